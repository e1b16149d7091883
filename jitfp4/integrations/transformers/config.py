"""What transformers writes to config.json of a model with FP4 weights, and what a user asks for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers.utils.quantization_config import QuantizationConfigMixin

from jitfp4.errors import ArgumentError
from jitfp4.formats import MXFP4, NVFP4, BlockFormat

METHOD = "jitfp4"
_FORMATS = {"nvfp4": NVFP4, "mxfp4": MXFP4}


class Jitfp4Config(QuantizationConfigMixin):  # type: ignore[misc]
    """How the linear layers of a model become FP4 while it is loaded. Layers that already are stay as they are.

    Args:
        weights: "nvfp4" or "mxfp4", for layers that the checkpoint has in floats.
        modules_to_not_convert: modules, or adjacent parts of their names ("layers.0.mlp", "o_proj"), that keep their
            floats, as routers and the head do.
        lm_head: whether the head becomes FP4, too. One that is tied to the embedding is then no longer tied: the
            embedding keeps its floats.
        fuse: whether layers of one input share one product where their scales allow it, SwiGLU and residuals are part
            of products, and norms, routers and rotations are jitfp4's, for the families that glue.py names.
    Raises:
        ArgumentError
    """

    def __init__(
        self,
        weights: str = "nvfp4",
        modules_to_not_convert: Sequence[str] | None = None,
        lm_head: bool = False,
        fuse: bool = True,
        **_: Any,
    ) -> None:
        if weights not in _FORMATS:
            raise ArgumentError("weights", repr(weights), " or ".join(map(repr, _FORMATS)))
        self.quant_method = METHOD
        self.weights = weights
        self.modules_to_not_convert = list(modules_to_not_convert or ())
        self.lm_head = bool(lm_head)
        self.fuse = bool(fuse)

    @property
    def format(self) -> BlockFormat:
        """The format of blocks that ``weights`` names."""
        return _FORMATS[self.weights]

"""Which layers of experts of transformers' models can be in FP4, and the name ``experts_implementation="jitfp4"``."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers.integrations.moe import ExpertsInterface, grouped_mm_experts_forward

from jitfp4.integrations.experts import MULTIPLE, Shape

NAME = "jitfp4"


def shape_of(module: nn.Module) -> Shape | None:
    """The layer of experts that a module is; None for other modules, and for experts that jitfp4 has no kernel for."""
    up, down = (getattr(module, name, None) for name in ("gate_up_proj", "down_proj"))
    if not (isinstance(up, nn.Parameter) and isinstance(down, nn.Parameter) and up.dim() == down.dim() == 3):
        return None
    if not getattr(module, "has_gate", False) or getattr(module, "has_post_expert_norm", False):
        return None
    activation = _activation(module)
    transposed = bool(module.is_transposed)
    experts, inter, hidden = down.shape if transposed else (down.shape[0], down.shape[2], down.shape[1])
    if activation is None or hidden % MULTIPLE or inter % MULTIPLE:
        return None
    return Shape(
        experts=experts,
        hidden=hidden,
        inter=inter,
        biased=bool(module.has_bias),
        order="concatenated gate,up" if module.is_concatenated else "interleaved",
        transposed=transposed,
        **activation,
    )


def _activation(module: Any) -> dict[str, Any] | None:
    """What fp4_experts() is to be called with: gates by SiLU, or gpt-oss's way."""
    if type(module)._apply_gate.__name__ == "_default_apply_gate":
        return {"activation": "swiglu"} if "silu" in type(module.act_fn).__name__.lower() else None
    if hasattr(module, "alpha") and hasattr(module, "limit"):
        limits = {"swiglu_alpha": float(module.alpha), "swiglu_limit": float(module.limit)}
        return {"activation": "swigluoai", **limits}
    return None


def register_experts() -> None:
    """Give transformers the name: FP4 experts are modules of their own, and others go on as ``grouped_mm``."""
    ExpertsInterface.register(NAME, grouped_mm_experts_forward)

"""transformers on jitfp4: checkpoints in FP4, quantization while loading, and attention over a cache in NVFP4.

>>> from jitfp4.integrations.transformers import Jitfp4Config, register
>>> register()
>>> model = AutoModelForCausalLM.from_pretrained(path)  # an FP4 checkpoint
>>> model = AutoModelForCausalLM.from_pretrained(path, quantization_config=Jitfp4Config())  # any other
"""

from __future__ import annotations

from jitfp4.integrations.transformers.config import Jitfp4Config
from jitfp4.integrations.transformers.quantizer import Jitfp4Quantizer, claim

__all__ = ["Jitfp4Config", "Jitfp4Quantizer", "register"]


def register() -> None:
    """Make transformers load FP4 checkpoints with jitfp4. Further calls change nothing.

    Names ``jitfp4`` as a quantization method, and takes the FP4 formats of ``compressed-tensors`` and ``modelopt``
    checkpoints; their other formats stay with whoever had them.
    """
    claim()

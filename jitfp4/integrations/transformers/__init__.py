"""transformers on jitfp4: checkpoints in FP4, quantization while loading, and attention over a cache in NVFP4.

>>> from jitfp4.integrations.transformers import Jitfp4Config, register
>>> register()
>>> model = AutoModelForCausalLM.from_pretrained(path)  # an FP4 checkpoint
>>> model = AutoModelForCausalLM.from_pretrained(path, quantization_config=Jitfp4Config())  # any other
>>> model.set_attn_implementation("jitfp4")
>>> model.generate(tokens, past_key_values=Nvfp4Cache(model.config, max_cache_len=4096))
"""

from __future__ import annotations

from jitfp4.integrations.transformers.attention import register_attention
from jitfp4.integrations.transformers.cache import Nvfp4Cache, calibrate
from jitfp4.integrations.transformers.config import Jitfp4Config
from jitfp4.integrations.transformers.delta_rule import use_gated_delta_rule
from jitfp4.integrations.transformers.experts import register_experts
from jitfp4.integrations.transformers.prompts import use_fp8_activations
from jitfp4.integrations.transformers.quantizer import Jitfp4Quantizer, claim
from jitfp4.integrations.transformers.serving import load_kernels
from jitfp4.integrations.transformers.steps import use_decode_step

__all__ = [
    "Jitfp4Config",
    "Jitfp4Quantizer",
    "Nvfp4Cache",
    "calibrate",
    "load_kernels",
    "register",
    "use_decode_step",
    "use_fp8_activations",
    "use_gated_delta_rule",
]


def register() -> None:
    """Make transformers load FP4 checkpoints with jitfp4. Further calls change nothing.

    Names ``jitfp4`` as a quantization method, and takes the FP4 formats of ``compressed-tensors``, ``modelopt``
    and gpt-oss (``mxfp4``); other formats stay with whoever had them. Names ``jitfp4`` as an implementation of
    attention and of experts.
    """
    claim()
    register_attention()
    register_experts()

"""Layers of experts with FP4 weights."""

from jitfp4.families.experts.api import fp4_experts
from jitfp4.families.experts.router import fused_topk_deepseek, route_experts
from jitfp4.families.experts.tokens import route_tokens
from jitfp4.families.experts.weights import Fp4Experts, prepare_fp4_experts

__all__ = [
    "Fp4Experts",
    "fp4_experts",
    "fused_topk_deepseek",
    "prepare_fp4_experts",
    "route_experts",
    "route_tokens",
]

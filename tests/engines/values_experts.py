"""Calls of FlashInfer's ``cutlass_fused_moe``, and of the functions that bring weights into its order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from jitfp4 import SfLayout
from jitfp4.flashinfer.mixed_gemm import (
    interleave_moe_scales_for_sm90_mixed_gemm,
    interleave_moe_weights_for_sm90_mixed_gemm,
)
from jitfp4.flashinfer.moe import ActivationType
from jitfp4.formats import MXFP4, NVFP4
from tests.engines import interleaved
from tests.engines.collect import Call
from tests.engines.trial import Arguments, Trial
from tests.engines.values import some_bytes
from tests.support.compare import poisoned
from tests.support.experts import Raw, dense, make_raw, make_routing, make_x
from tests.support.gemm import swizzled

EXPERTS, HIDDEN, INTER, TOKENS = 4, 256, 128, 5
ORDER = "concatenated up,gate"
PARALLEL = "tp_size", "tp_rank", "ep_size", "ep_rank"


def mxfp4_arguments(raw: Raw) -> Arguments:
    return {
        "fc1_expert_weights": interleave_moe_weights_for_sm90_mixed_gemm(raw.w13),
        "fc2_expert_weights": interleave_moe_weights_for_sm90_mixed_gemm(raw.w2),
        "quant_scales": [
            interleave_moe_scales_for_sm90_mixed_gemm(scales).view(torch.int32)
            for scales in (raw.w13_scales, raw.w2_scales)
        ],
        "use_w4_group_scaling": True,
    }


def nvfp4_arguments(raw: Raw) -> Arguments:
    """Activations have the global encode scales 5 and 3, which are taken out of the products' scales again."""
    assert raw.w13_alpha is not None and raw.w2_alpha is not None
    folded = [
        torch.stack([swizzled(one, SfLayout.layout_128x4) for one in scales]).view(torch.int32)
        for scales in (raw.w13_scales, raw.w2_scales)
    ]
    return {
        "fc1_expert_weights": raw.w13.view(torch.int64),
        "fc2_expert_weights": raw.w2.view(torch.int64),
        "quant_scales": [
            *(torch.tensor(5.0), folded[0], raw.w13_alpha / 5),
            *(torch.full((EXPERTS,), 3.0), folded[1], raw.w2_alpha / 3),
        ],
        "use_w4_group_scaling": False,
    }


def moe_arguments(raw: Raw) -> Arguments:
    """What all kinds have, and the weights of this one."""
    ids, weights = make_routing(TOKENS, 2, EXPERTS)
    return {
        "input": make_x(TOKENS, HIDDEN),
        "token_selected_experts": ids,
        "token_final_scales": weights,
        "output_dtype": torch.bfloat16,
        "fc1_expert_biases": raw.w13_bias,
        "fc2_expert_biases": raw.w2_bias,
        **(mxfp4_arguments if raw.format is MXFP4 else nvfp4_arguments)(raw),
    }


def swiglu_constants() -> Arguments:
    """Those of gpt-oss."""
    values = {"swiglu_alpha": 1.702, "swiglu_beta": 1.0, "swiglu_limit": 7.0}
    return {name: torch.full((EXPERTS,), value) for name, value in values.items()}


def cutlass_fused_moe(call: Call) -> Iterator[Trial]:
    kinds = [NVFP4] if "use_w4_group_scaling" not in call["keywords"] else [MXFP4]
    if "use_deepseek_fp8_block_scale" in call["keywords"]:  # vLLM's has all kinds
        kinds = [MXFP4, NVFP4]
    for kind in kinds:
        for activation in ("swiglu", "swigluoai", "relu2"):
            raw = make_raw(EXPERTS, HIDDEN, INTER, kind, gated=activation != "relu2", biases=kind is MXFP4)
            if raw.w13_bias is not None and raw.w2_bias is not None:
                raw = raw._replace(w13_bias=raw.w13_bias.bfloat16(), w2_bias=raw.w2_bias.bfloat16())
            constants = swiglu_constants() if activation == "swigluoai" else dict.fromkeys(swiglu_constants())
            given = moe_arguments(raw) | {
                **constants,
                "input_sf": None,
                **dict(zip(PARALLEL, (2, 0, 1, 0), strict=True)),
                "activation_type": ActivationType.Relu2 if activation == "relu2" else ActivationType.Swiglu,
                "use_deepseek_fp8_block_scale": False,
                "use_mxfp8_act_scaling": False,
                "enable_alltoall": False,
                "use_fused_finalize": True,
                "tune_max_num_tokens": 8192,
                "output": poisoned((TOKENS, HIDDEN), torch.bfloat16, "cpu"),
                "**": {},
            }
            yield Trial(f"{kind} {activation}", given, _like(raw, activation))


def _like(raw: Raw, activation: str) -> Callable[[Any, Arguments], None]:
    order = None if activation == "relu2" else ORDER

    def check(result: Any, given: Arguments) -> None:
        want = dense(
            raw, order, given["input"], given["token_selected_experts"], given["token_final_scales"], activation
        )
        assert result[0] is given["output"] and want.std() > 0.05
        assert (result[0].double() - want).norm() < 2.0**-8 * want.norm()

    return check


def interleave_weights(_call: Call) -> Iterator[Trial]:
    def check(result: torch.Tensor, _given: Arguments) -> None:
        assert all(interleaved.digest(one) == interleaved.DIGEST for one in result)

    codes = interleaved.codes()
    yield Trial("codes", {"weight": torch.stack((codes, codes))}, check)


def interleave_scales(_call: Call) -> Iterator[Trial]:
    """FlashInfer's layout is given by its shape: 64 rows by 128 columns together, four scales of four rows beside."""
    scales = some_bytes(2, 128, 8)

    def check(result: torch.Tensor, _given: Arguments) -> None:
        assert result.shape == (2, 2, 2, 16, 16)
        for expert, row, col in ((0, 0, 0), (1, 17, 3), (0, 127, 7), (1, 64, 5), (1, 100, 4)):
            place = result[expert, row // 64, col // 4, row % 16, row % 64 // 16 * 4 + col % 4]
            assert place == scales[expert, row, col]

    yield Trial("bytes", {"scales": scales, "group_size": 32}, check)


TRIALS: dict[str, Callable[[Call], Iterator[Trial]]] = {
    "cutlass_fused_moe": cutlass_fused_moe,
    "interleave_moe_scales_for_sm90_mixed_gemm": interleave_scales,
    "interleave_moe_weights_for_sm90_mixed_gemm": interleave_weights,
}

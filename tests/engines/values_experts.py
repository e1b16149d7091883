"""Calls of FlashInfer's layers of experts, and of the functions that bring weights into the order of one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from jitfp4 import SfLayout, nvfp4_dequantize, nvfp4_quantize, shuffle_matrix_a, shuffle_matrix_sf_a
from jitfp4.flashinfer.expert_layers import ActivationType
from jitfp4.flashinfer.mixed_gemm import (
    interleave_moe_scales_for_sm90_mixed_gemm,
    interleave_moe_weights_for_sm90_mixed_gemm,
)
from jitfp4.formats import MXFP4, NVFP4
from jitfp4.reference.shuffle import shuffle_rows
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


# ---- TensorRT-LLM's order --------------------------------------------------------------------------------------------


def shuffled(rows: torch.Tensor, *, gated: bool) -> torch.Tensor:
    """Of every expert: up and gate rows in turn, as prepare_static_weights_for_trtllm_fp4_moe() of vLLM has them."""
    in_turn = rows.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2) if gated else rows
    if rows.dtype != torch.uint8:
        return torch.stack([shuffle_rows(one.unsqueeze(1), 128).squeeze(1) for one in in_turn])
    return torch.stack([shuffle_matrix_a(one.contiguous(), 128) for one in in_turn])


def shuffled_scales(scales: torch.Tensor, *, gated: bool) -> torch.Tensor:
    in_turn = scales.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2) if gated else scales
    found = [shuffle_matrix_sf_a(one.contiguous(), 128, 16).view(one.shape) for one in in_turn]
    return torch.stack(found).view(torch.float8_e4m3fn)


class Activations(NamedTuple):
    """As a call has them, what they are, and the encode scale of NVFP4."""

    values: torch.Tensor
    scales: torch.Tensor | None
    exact: torch.Tensor
    encode: float


def activations_of(kind: str, tokens: int = TOKENS, hidden: int = HIDDEN) -> Activations:
    x = make_x(tokens, hidden)
    if kind == "bf16":
        return Activations(x, None, x, 1.0)
    if kind == "nvfp4":
        codes, scales = nvfp4_quantize(x, torch.tensor([64.0]), SfLayout.layout_linear)
        exact = nvfp4_dequantize(codes, scales, 1 / 64.0, SfLayout.layout_linear)
        return Activations(codes, scales.view(torch.float8_e4m3fn), exact, 64.0)
    powers = 118 + some_bytes(tokens, hidden // 32) % 4
    values = (100 * x).to(torch.float8_e4m3fn)
    exact = values.double() * torch.exp2(powers.double() - 127).repeat_interleave(32, 1)
    return Activations(values, powers.view(torch.float8_e4m3fn), exact, 1.0)


def routed_arguments(raw: Raw, x: Activations, activation: str) -> Arguments:
    """Between the products NVFP4 has the encode scale 3, which does not matter here."""
    gated, quantized = activation != "relu2", x.values.dtype == torch.uint8
    ids, weights = make_routing(len(x.values), 2, len(raw.w13))
    given: Arguments = {
        "topk_ids": (ids, weights),
        "hidden_states": x.values,
        "hidden_states_scale": x.scales,
        "gemm1_weights": shuffled(raw.w13, gated=gated),
        "gemm1_weights_scale": shuffled_scales(raw.w13_scales, gated=gated),
        "gemm2_weights": shuffled(raw.w2, gated=False),
        "gemm2_weights_scale": shuffled_scales(raw.w2_scales, gated=False),
        **dict.fromkeys(("output1_scale_scalar", "output1_scale_gate_scalar", "output2_scale_scalar")),
        **dict.fromkeys(("gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit")),
        "gemm1_bias": None if raw.w13_bias is None else shuffled(raw.w13_bias, gated=gated),
        "gemm2_bias": None if raw.w2_bias is None else shuffled(raw.w2_bias, gated=False),
        "num_experts": len(raw.w13),
        "top_k": 2,
        "intermediate_size": raw.w2.shape[2] * 2,
        "local_expert_offset": 0,
        "local_num_experts": len(raw.w13),
        "activation_type": ActivationType.Swiglu if gated else ActivationType.Relu2,
        "output": poisoned(x.exact.shape, torch.bfloat16, "cpu"),
    }
    of_gate = torch.ones(len(raw.w13))
    if quantized:
        assert raw.w13_alpha is not None and raw.w2_alpha is not None
        of_gate = raw.w13_alpha / x.encode
        given["output1_scale_gate_scalar"] = of_gate
        given["output1_scale_scalar"] = 3 * of_gate if gated else torch.full_like(of_gate, 3.0)
        given["output2_scale_scalar"] = raw.w2_alpha / 3
    if activation == "swigluoai":
        given["gemm1_alpha"] = torch.full_like(of_gate, 1.702)
        given["gemm1_beta"], given["gemm1_clamp_limit"] = 1 / of_gate, 7 / of_gate
    return given


def trtllm_fp4_block_scale_routed_moe(call: Call) -> Iterator[Trial]:
    words, is_mxfp4 = call["keywords"], "mxfp4" in call["function"].lower()
    kinds = ["bf16", "mxfp8"] if is_mxfp4 else ["nvfp4"]
    for kind in kinds[:1] if words.get("hidden_states_scale") == "None" else kinds:
        for activation in ("swiglu", "swigluoai", "relu2")[: 1 if kind == "mxfp8" else 3]:
            if activation == "swigluoai" and words.get("gemm1_alpha") == "None":
                continue
            if activation == "relu2" and (words.get("activation_type") == "3" or words.keys() > {"**"}):
                continue
            biases = is_mxfp4 and words["gemm1_bias"] != "None"
            raw = make_raw(
                EXPERTS, HIDDEN, INTER, MXFP4 if is_mxfp4 else NVFP4, gated=activation != "relu2", biases=biases
            )
            x = activations_of(kind)
            given = routed_arguments(raw, x, activation) | {
                "do_finalize": True,
                "enable_pdl": None,
                "gemm1_lora_delta": None,
                "per_token_scale": None,
                "tune_max_num_tokens": 8192,
                "routing_method_type": 1,
            }
            own = dict.fromkeys(("routing_bias", "n_group", "topk_group", "routed_scaling_factor"))
            if "Situ" in words.get("activation_type", ""):
                given["activation_type"] = 10
            given["**"] = own | {"topk_ids": given["topk_ids"]} if words.keys() > {"**"} else own | given
            yield Trial(f"{kind} {activation}", given, _like_routed(raw, activation, x.exact))


def _like_routed(raw: Raw, activation: str, x: torch.Tensor) -> Callable[[Any, Arguments], None]:
    def check(result: Any, given: Arguments) -> None:
        want = dense(raw, None if activation == "relu2" else ORDER, x, *given["topk_ids"], activation)
        assert want.std() > 1e-3
        assert (result[0].double() - want).norm() < 2.0**-8 * want.norm()

    return check


# ---- the order of experts on Hopper ----------------------------------------------------------------------------------


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
    "trtllm_fp4_block_scale_routed_moe": trtllm_fp4_block_scale_routed_moe,
}

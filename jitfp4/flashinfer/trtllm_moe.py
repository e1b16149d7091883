# ruff: noqa: ARG001 - FlashInfer's parameters
"""FlashInfer's ``trtllm_fp4_block_scale_routed_moe``: layers of experts with weights in TensorRT-LLM's order of rows.

Activations come in FP4, in FP8 or in 16 bits. The first two become bf16, exactly, and so the layer is that of
fp4_experts(): what is between its products stays in 16 bits, where FlashInfer's kernels round it to FP4 or FP8 again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from jitfp4 import engine
from jitfp4.errors import ArgumentError, ArgumentTypeError, renamed
from jitfp4.families.experts import prepare_fp4_experts
from jitfp4.families.quantize import nvfp4_dequantize
from jitfp4.flashinfer.expert_layers import (
    ActivationType,
    Layer,
    check_activation,
    check_kind,
    map_of_rank,
    one_value,
    remembered,
)
from jitfp4.formats import MXFP4, NVFP4, BlockFormat
from jitfp4.layouts import SfLayout, padded_shape
from jitfp4.public import checked
from jitfp4.reference.formats import unswizzle
from jitfp4.reference.shuffle import shuffle_rows
from jitfp4.tensors import check_contiguous, check_dtype

_SCALES = (torch.float8_e4m3fn, torch.uint8)
_TILE_M = 128  # of the epilogue, for which engines shuffle rows
_NEARLY = 1e-5  # of a constant that was divided by the scale of each expert


@checked
def trtllm_fp4_block_scale_routed_moe(
    topk_ids: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    routing_bias: torch.Tensor | None,
    hidden_states: torch.Tensor,
    hidden_states_scale: torch.Tensor | None,
    gemm1_weights: torch.Tensor,
    gemm1_weights_scale: torch.Tensor,
    gemm1_bias: torch.Tensor | None,
    gemm1_alpha: torch.Tensor | None,
    gemm1_beta: torch.Tensor | None,
    gemm1_clamp_limit: torch.Tensor | None,
    gemm2_weights: torch.Tensor,
    gemm2_weights_scale: torch.Tensor,
    gemm2_bias: torch.Tensor | None,
    output1_scale_scalar: torch.Tensor | None,
    output1_scale_gate_scalar: torch.Tensor | None,
    output2_scale_scalar: torch.Tensor | None,
    num_experts: int,
    top_k: int,
    n_group: int | None,
    topk_group: int | None,
    intermediate_size: int,
    local_expert_offset: int,
    local_num_experts: int,
    routed_scaling_factor: float | None,
    routing_method_type: int = 0,
    do_finalize: bool = True,
    enable_pdl: bool | None = None,
    activation_type: ActivationType | int = ActivationType.Swiglu.value,
    per_token_scale: torch.Tensor | None = None,
    output: torch.Tensor | None = None,
    tune_max_num_tokens: int = 8192,
    gemm1_lora_delta: torch.Tensor | None = None,
    valid_hidden_size: int | None = None,
    valid_intermediate_size: int | None = None,
    num_fused_shared_experts: int | None = None,
    hidden_states_scale_layout: SfLayout | None = None,
) -> list[torch.Tensor]:
    """A layer of experts with FP4 weights in TensorRT-LLM's order: ``jitfp4.fp4_experts`` by FlashInfer's arguments.

    What cutlass_fused_moe() says of remembered weights, of the first call and of graphs holds here, too. It runs on
    every GPU, also where FlashInfer's does not.

    Args:
        topk_ids: [tokens, slots] int32, an expert in the upper 16 bits and its weight as bf16 in the lower; or a pair,
            of experts, int32, and weights, float32 or bf16. Experts of other ranks are skipped.
        hidden_states: [tokens, hidden], bf16; or E4M3 with UE8M0 scales of blocks of 32 (MXFP8); or uint8
            [tokens, hidden / 2], NVFP4 codes.
        hidden_states_scale: of MXFP8 and NVFP4: [tokens, hidden / 32 or 16] in linear layout, or flat, float8_e4m3fn or
            uint8; else None.
        gemm1_weights: uint8 [experts of this rank, 2 inter, hidden / 2]: up and gate rows in turn, or rows without
            gates, as shuffle_matrix_a(rows, 128) orders them. hidden and the rows are multiples of 128.
        gemm1_weights_scale: of rows in the same order, as block_scale_interleave() orders them; as many E4M3 scales of
            16 elements, or UE8M0 scales of 32, as there are. float8_e4m3fn or uint8.
        gemm1_bias: [experts, 2 inter] in the order of the rows, float32 or bf16; not with NVFP4 activations.
        gemm1_alpha, gemm1_beta, gemm1_clamp_limit: float32 [experts], constants of SwiGLU, with one value for all; the
            latter two divided by output1_scale_gate_scalar.
        gemm2_weights, gemm2_weights_scale, gemm2_bias: the same of [experts, hidden, inter / 2].
        output1_scale_scalar, output1_scale_gate_scalar, output2_scale_scalar: float32 [experts]: decode scales of up
            rows, times the encode scale of what is between the products; of gates; and of the second product, times the
            decode scale of that. Only the product of encode and decode scale matters here. None: 1.
        num_experts, local_expert_offset, local_num_experts: of all ranks, and which of them this rank has.
        top_k, intermediate_size: as the tensors have them.
        activation_type: Swiglu, SwigluBias or Relu2.
        per_token_scale: float32 [tokens], factors of quantized activations, which are then rounded to bf16 once.
        output: bf16 [tokens, hidden] to fill in place.
        hidden_states_scale_layout: linear, or None.
        n_group, topk_group, routing_method_type, tune_max_num_tokens: without effect.
        the others: as by default or None; another value is an error.
    Returns:
        A list of the output alone.
    Raises:
        ArgumentError, ArgumentTypeError: before anything is written.
    """
    check_kind(
        "jitfp4 has whole layers of experts whose routing is given",
        _ALLOWED,
        routing_bias=routing_bias,
        routed_scaling_factor=1.0 if routed_scaling_factor is None else routed_scaling_factor,
        do_finalize=do_finalize,
        gemm1_lora_delta=gemm1_lora_delta,
        valid_hidden_size=valid_hidden_size,
        valid_intermediate_size=valid_intermediate_size,
        num_fused_shared_experts=num_fused_shared_experts or 0,
        hidden_states_scale_layout=SfLayout.layout_linear
        if hidden_states_scale_layout is None
        else hidden_states_scale_layout,
    )
    ids, weights = _routing(topk_ids, top_k)
    x = _in_bf16(hidden_states, hidden_states_scale, per_token_scale)
    if hidden_states.dtype == torch.uint8 and (gemm1_bias is not None or gemm2_bias is not None):
        name = "gemm2_bias" if gemm1_bias is None else "gemm1_bias"
        raise ArgumentError(name, "a tensor", "None with NVFP4 activations, of whose products it would have the scale")
    layer = _Weights(
        gemm1_weights,
        gemm1_weights_scale,
        gemm2_weights,
        gemm2_weights_scale,
        (gemm1_bias, gemm2_bias),
        (gemm1_alpha, gemm1_beta, gemm1_clamp_limit),
        (output1_scale_scalar, output1_scale_gate_scalar, output2_scale_scalar),
        int(activation_type),
        intermediate_size,
        (num_experts, local_expert_offset, local_num_experts),
    ).layer()
    return layer.run(x, ids, weights, output, enable_pdl, _CALL)


_ALLOWED = {
    "routing_bias": None,
    "routed_scaling_factor": 1.0,
    "do_finalize": True,
    "gemm1_lora_delta": None,
    "valid_hidden_size": None,
    "valid_intermediate_size": None,
    "num_fused_shared_experts": 0,
    "hidden_states_scale_layout": SfLayout.layout_linear,
}
_CALL = {"x": "hidden_states", "topk_ids": "topk_ids", "topk_weights": "topk_ids", "out": "output"}
_PREPARATION = {
    "w13": "gemm1_weights",
    "w2": "gemm2_weights",
    "w13_scales": "gemm1_weights_scale",
    "w2_scales": "gemm2_weights_scale",
    "w13_bias": "gemm1_bias",
    "w2_bias": "gemm2_bias",
    "w13_alpha": "output1_scale_gate_scalar",
    "w2_alpha": "output2_scale_scalar",
}


# ---- what a call has -------------------------------------------------------------------------------------------------


def _routing(
    topk_ids: torch.Tensor | tuple[torch.Tensor, torch.Tensor], top_k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts and weights."""
    if isinstance(topk_ids, torch.Tensor):
        check_dtype("topk_ids", topk_ids, (torch.int32,))
        ids, weights = topk_ids >> 16, (topk_ids << 16).view(torch.float32)  # bf16 is the upper half of float32
    else:
        if not isinstance(topk_ids, tuple) or len(topk_ids) != 2 or not all(torch.is_tensor(one) for one in topk_ids):
            raise ArgumentTypeError("topk_ids", type(topk_ids).__name__, "a tensor, or a pair of tensors")
        check_dtype("topk_ids", topk_ids[0], (torch.int32,))
        check_dtype("topk_ids", topk_ids[1], (torch.float32, torch.bfloat16))
        ids, weights = topk_ids[0], topk_ids[1].float()
    if ids.dim() != 2 or ids.shape[1] != top_k:
        raise ArgumentError("topk_ids", f"shape {tuple(ids.shape)}", f"[tokens, {top_k}], as top_k")
    return ids, weights


def _in_bf16(x: torch.Tensor, scale: torch.Tensor | None, of_tokens: torch.Tensor | None) -> torch.Tensor:
    """[tokens, hidden], exactly without factors of tokens: of NVFP4 without the global scale."""
    check_dtype("hidden_states", x, (torch.bfloat16, torch.float8_e4m3fn, torch.uint8))
    if x.dim() != 2:
        raise ArgumentError("hidden_states", f"shape {tuple(x.shape)}", "two dimensions")
    if (scale is None) != (x.dtype == torch.bfloat16):
        got = "None" if scale is None else "a tensor"
        raise ArgumentError("hidden_states_scale", got, f"{'None' if scale is not None else 'a tensor'} with {x.dtype}")
    if scale is None:
        if of_tokens is not None:
            raise ArgumentError("per_token_scale", "a tensor", "None with bf16 activations")
        return x
    check_dtype("hidden_states_scale", scale, _SCALES)
    tokens, blocks = x.shape[0], x.shape[1] // (8 if x.dtype == torch.uint8 else MXFP4.block)
    if scale.numel() != tokens * blocks:
        raise ArgumentError("hidden_states_scale", f"shape {tuple(scale.shape)}", f"({tokens}, {blocks})")
    check_contiguous("hidden_states_scale", scale)
    scale = scale.view(torch.uint8).view(tokens, blocks)
    if x.dtype == torch.uint8:
        check_contiguous("hidden_states", x)
        wide = nvfp4_dequantize(x, scale, 1.0, SfLayout.layout_linear, out_dtype=torch.bfloat16)
    else:
        powers = (scale.to(torch.int16) << 7).view(torch.bfloat16)  # a byte of UE8M0 is the exponent of bf16
        wide = (x.bfloat16().unflatten(1, (-1, MXFP4.block)) * powers.unsqueeze(-1)).flatten(1)
    if of_tokens is None:
        return wide
    check_dtype("per_token_scale", of_tokens, (torch.float32,))
    if of_tokens.numel() != tokens:
        raise ArgumentError("per_token_scale", f"shape {tuple(of_tokens.shape)}", f"({tokens},)")
    return (wide * of_tokens.view(tokens, 1)).bfloat16()


# ---- weights ---------------------------------------------------------------------------------------------------------


class _Weights(NamedTuple):
    """What a layer is made of, as it came."""

    w13: torch.Tensor
    w13_scales: torch.Tensor
    w2: torch.Tensor
    w2_scales: torch.Tensor
    biases: tuple[torch.Tensor | None, torch.Tensor | None]
    swiglu: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
    outputs: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
    activation: int
    inter: int
    rank: tuple[int, int, int]

    def layer(self) -> Layer:
        """The prepared layer."""
        tensors = self.w13, self.w13_scales, self.w2, self.w2_scales, *self.biases, *self.swiglu, *self.outputs
        others = self.activation, self.inter, *self.rank
        try:
            return remembered("gemm1_weights", tensors, others, self._prepared)
        except ArgumentError as error:
            raise renamed(error, _PREPARATION) from None

    def _prepared(self) -> Layer:
        gated = check_activation(self.activation)
        all_experts, first, own = self.rank
        if not 0 <= first <= first + own <= all_experts:
            raise ArgumentError("local_expert_offset", first, f"0 to {all_experts - own}")
        rows = self.inter * (2 if gated else 1)
        w13, scales13, kind, of13 = _in_order("w13", self.w13, self.w13_scales, (own, rows), gated)
        w2, scales2, _, of2 = _in_order("w2", self.w2, self.w2_scales, (own, 2 * w13.shape[2]), False)
        of_up, of_gate, of_second = (self._factors(number, own) for number in range(3))
        between = of_up / of_gate if gated else of_up  # the encode scale, of which the second factor is the inverse
        bias13, bias2 = self.biases
        experts = prepare_fp4_experts(
            w13,
            scales13,
            w2,
            scales2,
            order="concatenated up,gate" if gated else None,
            sf_layout=SfLayout.layout_linear,
            block_size=kind.block,
            w13_alpha=of_gate,
            w2_alpha=of_second * between,
            w13_bias=None if bias13 is None else _rows_in_order("gemm1_bias", bias13, of13),
            w2_bias=None if bias2 is None else _rows_in_order("gemm2_bias", bias2, of2),
        )
        alpha, beta, limit = (
            None if values is None else one_value(f"gemm1_{name}", _times(values, factors), own, _NEARLY)
            for name, values, factors in zip(
                ("alpha", "beta", "clamp_limit"), self.swiglu, (torch.ones_like(of_gate), of_gate, of_gate), strict=True
            )
        )
        expert_map = map_of_rank(all_experts, first, own, self.w13.device)
        limit = None if limit == math.inf else limit
        return Layer(experts, "swiglu" if gated else "relu2", alpha, beta, limit, expert_map)

    def _factors(self, number: int, experts: int) -> torch.Tensor:
        name = ("output1_scale_scalar", "output1_scale_gate_scalar", "output2_scale_scalar")[number]
        given = self.outputs[number]
        if given is None:
            return torch.ones(experts, dtype=torch.float32, device=self.w13.device)
        check_dtype(name, given, (torch.float32,))
        if given.numel() != experts:
            raise ArgumentError(name, f"shape {tuple(given.shape)}", f"({experts},)")
        return given.flatten()


def _times(values: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Or as they are, for one_value() to refuse."""
    return values * factors if values.shape == factors.shape and values.dtype == torch.float32 else values


def _in_order(
    name: str, codes: torch.Tensor, scales: torch.Tensor, size: tuple[int, int], gated: bool
) -> tuple[torch.Tensor, torch.Tensor, BlockFormat, torch.Tensor]:
    """Codes and linear scales in the order of rows before they were shuffled, their format, and where rows are."""
    check_dtype(name, codes, (torch.uint8,))
    check_contiguous(name, codes)
    experts, rows = size
    if codes.dim() != 3 or codes.shape[:2] != size or rows % _TILE_M or not codes.shape[2] or codes.shape[2] % 16:
        allowed = f"({experts}, {rows}, hidden or inter / 2), rows a multiple of {_TILE_M}"
        raise ArgumentError(name, f"shape {tuple(codes.shape)}", allowed)
    check_dtype(f"{name}_scales", scales, _SCALES)
    check_contiguous(f"{name}_scales", scales)
    shapes = {kind: padded_shape(SfLayout.layout_128x4, rows, 2 * codes.shape[2] // kind.block) for kind in BlockFormat}
    found = [kind for kind, shape in shapes.items() if scales.numel() == experts * shape[0] * shape[1]]
    if not found:
        allowed = " or ".join(str((experts, *shape)) for shape in shapes.values())
        raise ArgumentError(f"{name}_scales", f"shape {tuple(scales.shape)}", allowed)
    kind = NVFP4 if NVFP4 in found else MXFP4
    places = _places(rows, gated, codes.device)
    swizzled = scales.view(torch.uint8).view(experts, *shapes[kind])
    linear = unswizzle(swizzled, SfLayout.layout_128x4, rows, 2 * codes.shape[2] // kind.block)
    return codes[:, places], linear[:, places], kind, places


def _places(rows: int, gated: bool, device: torch.device) -> torch.Tensor:
    """For each row, where it was before up and gate rows took turns and all were shuffled, its place behind that."""
    order = torch.arange(rows, device=device)
    if gated:
        order = order.view(2, -1).T.flatten()
    shuffled = shuffle_rows(order.unsqueeze(1), _TILE_M).squeeze(1)
    places = torch.empty_like(shuffled)
    places[shuffled] = torch.arange(rows, device=device)
    return places


def _rows_in_order(name: str, bias: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    if bias.dim() != 2 or bias.shape[1] != len(places):
        raise ArgumentError(name, f"shape {tuple(bias.shape)}", f"[experts, {len(places)}]")
    return bias[:, places]


# ---- beside FlashInfer -----------------------------------------------------------------------------------------------


def beside(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """For overlay(): FlashInfer's function on the GPUs that it has kernels for, whose products are of FP4 by FP4."""

    def trtllm_fp4_block_scale_routed_moe_beside(*args: Any, **kwargs: Any) -> Any:
        x = kwargs["hidden_states"] if "hidden_states" in kwargs else args[2]
        is_theirs = x.is_cuda and engine.target_of(x).arch.has_tcgen05
        return (theirs if is_theirs else trtllm_fp4_block_scale_routed_moe)(*args, **kwargs)

    return trtllm_fp4_block_scale_routed_moe_beside

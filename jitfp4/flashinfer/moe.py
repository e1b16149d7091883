# ruff: noqa: ARG001 - FlashInfer's parameters
"""FlashInfer's ``cutlass_fused_moe``: of its many kinds of layers those with FP4 weights and 16-bit activations.

Weights and scales are prepared at the first call, and remembered for as long as the engine keeps its own.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from jitfp4 import engine
from jitfp4.errors import ArgumentError, ArgumentTypeError, renamed
from jitfp4.families.experts import Fp4Experts, prepare_fp4_experts
from jitfp4.flashinfer.expert_layers import (
    ActivationType,
    Layer,
    check_activation,
    check_kind,
    map_of_rank,
    one_value,
    remembered,
)
from jitfp4.flashinfer.mixed_gemm import deinterleave_scales, deinterleave_weights
from jitfp4.layouts import SfLayout
from jitfp4.public import checked
from jitfp4.tensors import check_contiguous, check_dtype

_HALVES = (torch.bfloat16, torch.float16)
_MXFP4, _NVFP4 = 2, 6  # how many quant_scales there are


@checked
def cutlass_fused_moe(
    input: torch.Tensor,  # noqa: A002 - FlashInfer's name
    token_selected_experts: torch.Tensor,
    token_final_scales: torch.Tensor | None,
    fc1_expert_weights: torch.Tensor,
    fc2_expert_weights: torch.Tensor,
    output_dtype: torch.dtype,
    quant_scales: Sequence[torch.Tensor],
    fc1_expert_biases: torch.Tensor | None = None,
    fc2_expert_biases: torch.Tensor | None = None,
    input_sf: torch.Tensor | None = None,
    swiglu_alpha: torch.Tensor | None = None,
    swiglu_beta: torch.Tensor | None = None,
    swiglu_limit: torch.Tensor | None = None,
    tp_size: int = 1,
    tp_rank: int = 0,
    ep_size: int = 1,
    ep_rank: int = 0,
    cluster_size: int = 1,
    cluster_rank: int = 0,
    output: torch.Tensor | None = None,
    enable_alltoall: bool = False,
    use_deepseek_fp8_block_scale: bool = False,
    use_w4_group_scaling: bool = False,
    use_mxfp8_act_scaling: bool = False,
    min_latency_mode: bool = False,
    use_packed_weights: bool = False,
    use_wfp4afp8_humming: bool = False,
    tune_max_num_tokens: int = 8192,
    enable_pdl: bool | None = None,
    activation_type: ActivationType = ActivationType.Swiglu,
    swizzled_input_sf: bool = True,
    use_fused_finalize: bool = True,
    profile_ids: list[int] | None = None,
    workspace_buffer: torch.Tensor | None = None,
    *,
    clamped_relu2_limit: torch.Tensor | None = None,
    situ_beta: torch.Tensor | None = None,
    situ_linear_beta: torch.Tensor | None = None,
    backend: str = "cutlass",
) -> list[torch.Tensor]:
    """A layer of experts with FP4 weights and 16-bit activations: ``jitfp4.fp4_experts`` behind FlashInfer's arguments.

    At the first call with weights they are prepared and remembered, by their memory and version, until that memory is
    freed: **the experts then take their memory twice.** Where that is too much, call prepare_fp4_experts() when the
    model is loaded, and fp4_experts(). The first call waits for the GPU, so it must not be in the capture of a graph.
    torch.compile does not trace it. What is written into weights through ``.data`` is not seen: call forget_weights()
    then.

    Args:
        input: [tokens, hidden], bf16 or fp16.
        token_selected_experts, token_final_scales: [tokens, slots], int32 and float32.
        fc1_expert_weights: [experts of this rank, 2 inter, hidden / 2] bytes, first the up rows and then the gates, or
            without gates [..., inter, ...]. MXFP4: uint8 from interleave_moe_weights_for_sm90_mixed_gemm(). NVFP4: in
            their order, as int64.
        fc2_expert_weights: the same of [experts, hidden, inter].
        output_dtype: input's.
        quant_scales: MXFP4, with use_w4_group_scaling: of both weights, from
            interleave_moe_scales_for_sm90_mixed_gemm(), also as int32. NVFP4: global encode scale of the activations
            (one, or one for each expert), block scales in 128x4 layout as int32, and decode scales of weights times
            activations, float32 [experts]; then the same of the second product. Activations stay in 16 bits, so the
            encode scales only take theirs out of the decode scales.
        fc1_expert_biases, fc2_expert_biases: [experts, n]; the second only counts where tp_rank is 0.
        swiglu_alpha, swiglu_beta, swiglu_limit: float32 [experts], with one value for all of them.
        ep_size, ep_rank: ids are those of ep_size times as many experts, of which this rank has the ep_rank-th part.
        output: to fill in place.
        activation_type: Swiglu, SwigluBias or Relu2.
        enable_alltoall, tune_max_num_tokens, use_fused_finalize, profile_ids, workspace_buffer: without effect.
        the others: as by default; another value is an error.
    Returns:
        A list of the output alone, as FlashInfer.
    Raises:
        ArgumentError, ArgumentTypeError: before anything is written.
    """
    check_kind(
        "jitfp4 has FP4 weights with 16-bit activations",
        _DEFAULTS,
        input_sf=input_sf,
        cluster_size=cluster_size,
        cluster_rank=cluster_rank,
        use_deepseek_fp8_block_scale=use_deepseek_fp8_block_scale,
        use_mxfp8_act_scaling=use_mxfp8_act_scaling,
        min_latency_mode=min_latency_mode,
        use_packed_weights=use_packed_weights,
        use_wfp4afp8_humming=use_wfp4afp8_humming,
        clamped_relu2_limit=clamped_relu2_limit,
        situ_beta=situ_beta,
        situ_linear_beta=situ_linear_beta,
        backend=backend,
    )
    check_dtype("input", input, _HALVES)
    if output_dtype != input.dtype:
        raise ArgumentTypeError("output_dtype", output_dtype, f"{input.dtype}, as input")
    if not isinstance(activation_type, int):
        raise ArgumentTypeError("activation_type", type(activation_type).__name__, "an ActivationType")
    if not 0 <= ep_rank < ep_size:
        raise ArgumentError("ep_rank", ep_rank, f"0 to ep_size - 1, {ep_size - 1}")
    weights = _Weights(
        fc1_expert_weights,
        fc2_expert_weights,
        _scales_of(quant_scales, use_w4_group_scaling),
        fc1_expert_biases,
        fc2_expert_biases if tp_rank == 0 else None,
        (swiglu_alpha, swiglu_beta, swiglu_limit),
        int(activation_type),
        ep_size,
        ep_rank,
    )
    layer = weights.layer()
    return layer.run(input, token_selected_experts, token_final_scales, output, enable_pdl, _CALL)


_DEFAULTS = {name: parameter.default for name, parameter in inspect.signature(cutlass_fused_moe).parameters.items()}
_CALL = {"x": "input", "topk_ids": "token_selected_experts", "topk_weights": "token_final_scales", "out": "output"}
_PREPARATION = {
    "w13": "fc1_expert_weights",
    "w2": "fc2_expert_weights",
    **dict.fromkeys(("w13_scales", "w2_scales", "w13_alpha", "w2_alpha"), "quant_scales"),
    "w13_bias": "fc1_expert_biases",
    "w2_bias": "fc2_expert_biases",
}


def _scales_of(quant_scales: Sequence[torch.Tensor], grouped: bool) -> tuple[torch.Tensor, ...]:
    wanted = _MXFP4 if grouped else _NVFP4
    if not isinstance(quant_scales, Sequence) or len(quant_scales) != wanted:
        got = len(quant_scales) if isinstance(quant_scales, Sequence) else type(quant_scales).__name__
        allowed = f"{_MXFP4} tensors with use_w4_group_scaling, MXFP4, or {_NVFP4} without, NVFP4"
        raise ArgumentError("quant_scales", got, allowed)
    for scales in quant_scales:
        if not isinstance(scales, torch.Tensor):
            raise ArgumentTypeError("quant_scales", type(scales).__name__, "tensors")
    return tuple(quant_scales)


class _Weights(NamedTuple):
    """What a layer is made of, as it came."""

    w13: torch.Tensor
    w2: torch.Tensor
    scales: tuple[torch.Tensor, ...]
    w13_bias: torch.Tensor | None
    w2_bias: torch.Tensor | None
    swiglu: tuple[torch.Tensor | None, ...]
    activation: int
    ep_size: int
    ep_rank: int

    def layer(self) -> Layer:
        """The prepared layer."""
        tensors = [self.w13, self.w2, *self.scales, self.w13_bias, self.w2_bias, *self.swiglu]
        others = self.activation, self.ep_size, self.ep_rank
        try:
            return remembered("fc1_expert_weights", tensors, others, self._prepared)
        except ArgumentError as error:
            raise renamed(error, _PREPARATION) from None

    def _prepared(self) -> Layer:
        gated = check_activation(self.activation)
        prepare = self._mxfp4 if len(self.scales) == _MXFP4 else self._nvfp4
        experts = prepare("concatenated up,gate" if gated else None)
        own = experts.experts
        alpha, beta, limit = (
            None if values is None else one_value(f"swiglu_{name}", values, own)
            for name, values in zip(("alpha", "beta", "limit"), self.swiglu, strict=True)
        )
        expert_map = map_of_rank(self.ep_size * own, self.ep_rank * own, own, self.w13.device)
        limit = None if limit == math.inf else limit
        return Layer(experts, "swiglu" if gated else "relu2", alpha, beta, limit, expert_map)

    def _mxfp4(self, order: str | None) -> Fp4Experts:
        codes = [_of("w13", self.w13, torch.uint8), _of("w2", self.w2, torch.uint8)]
        scales = []
        for name, weight, folded in zip(("w13_scales", "w2_scales"), codes, self.scales, strict=True):
            check_contiguous(name, folded)
            experts, n, half_k = weight.shape
            wanted = (experts, n // 64, half_k // 64, 16, 16)
            found = folded.view(torch.uint8) if folded.dim() == len(wanted) else folded
            if tuple(found.shape) != wanted:
                allowed = f"{wanted} bytes, from interleave_moe_scales_for_sm90_mixed_gemm()"
                raise ArgumentError(name, f"shape {tuple(folded.shape)} of {folded.dtype}", allowed)
            scales.append(deinterleave_scales(found))
        return prepare_fp4_experts(
            deinterleave_weights(codes[0]),
            scales[0],
            deinterleave_weights(codes[1]),
            scales[1],
            order=order,
            sf_layout=SfLayout.layout_linear,
            block_size=32,
            w13_bias=self.w13_bias,
            w2_bias=self.w2_bias,
        )

    def _nvfp4(self, order: str | None) -> Fp4Experts:
        x_scale, scales13, alpha13, h_scale, scales2, alpha2 = self.scales
        w13, w2 = _of("w13", self.w13, torch.int64), _of("w2", self.w2, torch.int64)
        for scale in (x_scale, alpha13, h_scale, alpha2):
            check_dtype("quant_scales", scale, (torch.float32,))
        return prepare_fp4_experts(
            w13.view(torch.uint8),
            _bytes("w13_scales", scales13),
            w2.view(torch.uint8),
            _bytes("w2_scales", scales2),
            order=order,
            sf_layout=SfLayout.layout_128x4,
            w13_alpha=_product(alpha13, x_scale),
            w2_alpha=_product(alpha2, h_scale),
            w13_bias=self.w13_bias,
            w2_bias=self.w2_bias,
        )


def _of(name: str, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Weights of an expert, of the type in which FlashInfer takes them."""
    check_dtype(name, weight, (dtype,))
    if weight.dim() != 3:
        raise ArgumentError(name, f"shape {tuple(weight.shape)}", "[experts, n, ...]")
    check_contiguous(name, weight)
    return weight


def _bytes(name: str, scales: torch.Tensor) -> torch.Tensor:
    check_dtype(name, scales, (torch.int32,))
    check_contiguous(name, scales)
    return scales.view(torch.uint8)


def _product(alpha: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Of decode scales [experts] with an encode scale, or with one for each."""
    if alpha.dim() != 1 or (scale.numel() != 1 and scale.shape != alpha.shape):
        raise ArgumentError("quant_scales", f"shapes {tuple(alpha.shape)}, {tuple(scale.shape)}", "[experts], and one")
    return alpha * scale.flatten()


# ---- beside FlashInfer -----------------------------------------------------------------------------------------------


def beside(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """For overlay(): FlashInfer's function, except for layers that FlashInfer has only elsewhere, or not at all.

    jitfp4's are MXFP4 with use_w4_group_scaling, and NVFP4 on GPUs without products of FP4 by FP4, both with 16-bit
    activations and an activation function that jitfp4 has.
    """
    signature = inspect.signature(cutlass_fused_moe)

    def cutlass_fused_moe_beside(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        return (cutlass_fused_moe if _serves(given) else theirs)(*args, **kwargs)

    return cutlass_fused_moe_beside


def _serves(given: dict[str, Any]) -> bool:
    x, weight = given["input"], given["fc1_expert_weights"]
    if x.dtype not in _HALVES or given.get("use_wfp4afp8_humming") or given.get("use_mxfp8_act_scaling"):
        return False
    if int(given.get("activation_type", ActivationType.Swiglu)) not in list(ActivationType):
        return False
    if given.get("use_w4_group_scaling"):
        return weight.dtype is torch.uint8 and len(given["quant_scales"]) == _MXFP4
    if weight.dtype is not torch.int64 or len(given["quant_scales"]) != _NVFP4:
        return False
    arch = engine.target_of(x).arch if x.is_cuda else None
    return arch is None or not (arch.has_tcgen05 or arch.has_scaled_mma)

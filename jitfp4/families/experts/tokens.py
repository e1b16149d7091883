"""Routing from activations: the logits of a router and the choice of experts by them."""

from __future__ import annotations

import torch

from jitfp4.dispatch import differ, reaches
from jitfp4.dtypes import HALVES
from jitfp4.errors import ArgumentError
from jitfp4.families.experts.kernels.router import most_tokens
from jitfp4.families.experts.router import check_bias, check_rows, check_rules, route_experts
from jitfp4.families.experts.router_operation import EXPERTS_ROUTER, multiply
from jitfp4.families.experts.router_problem import COLUMNS, RouterArguments
from jitfp4.families.experts.weights import MOST_EXPERTS
from jitfp4.public import public
from jitfp4.tensors import as_rows, check_contiguous, check_device, check_dtype, check_same_device, output, writing


@public
def route_tokens(
    x: torch.Tensor,
    weight: torch.Tensor,
    top_k: int,
    *,
    method: str,
    renormalize: bool,
    logit_bias: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    groups: int = 1,
    topk_groups: int = 1,
    shared: bool = False,
    scale: float = 1.0,
    logits: torch.Tensor | None = None,
    out_ids: torch.Tensor | None = None,
    out_weights: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """route_experts() of the logits ``x @ weight.T + logit_bias``: for few tokens, both in one launch.

    Args:
        x: [tokens, hidden], bf16 or fp16; hidden is a multiple of 8, the elements of a row are adjacent, and rows begin
            at multiples of 16 bytes.
        weight: [rows, hidden] of the dtype of x, or float32, contiguous: a row for each of up to 1024 experts, and one
            more where ``shared``. It may be read before the kernel ahead has ended.
        top_k, method, renormalize: as for route_experts().
        logit_bias: [rows], float32, bf16 or fp16, contiguous: added to the logits.
        bias, groups, topk_groups: as for route_experts(). Both biases are read as weight is.
        shared: as for route_experts(): the last row of weight is the gate.
        scale: a factor of all weights.
        logits: [tokens, rows] to fill in place, float32 or of the dtype of x, elements of a row adjacent: the choice
            is by what is written. None: by float32, which nobody sees.
        out_ids, out_weights: as for route_experts(), [tokens, top_k or, where ``shared``, top_k + 1].
        enable_pdl: programmatic dependent launch; None means wherever the GPU has it.
    Returns:
        ``out_ids``, ``out_weights``.
    Numerics:
        Products and sums in float32. Up to 16 tokens of up to 8192 columns, a kernel adds in an order that depends on
        the sizes alone, so that equal calls give equal bits; for more, torch multiplies.
    Raises:
        ArgumentError, ArgumentTypeError: before anything is written.
    """
    check_dtype("x", x, tuple(HALVES))
    check_device("x", x)
    if x.dim() != 2:
        raise ArgumentError("x", f"shape {tuple(x.shape)}", "[tokens, hidden]")
    as_rows("x", x, COLUMNS)
    tokens, hidden = x.shape
    check_dtype("weight", weight, (x.dtype, torch.float32))
    check_same_device("weight", weight, x)
    most = MOST_EXPERTS + shared
    if weight.dim() != 2 or weight.shape[1] != hidden or not shared < weight.shape[0] <= most:
        raise ArgumentError("weight", f"shape {tuple(weight.shape)}", f"[1 to {MOST_EXPERTS} experts, {hidden}]")
    check_contiguous("weight", weight)
    rows, slots = weight.shape[0], top_k + shared
    check_rules(rows - shared, top_k, method, bias, groups, topk_groups, shared, x)
    if logit_bias is not None:
        check_bias("logit_bias", logit_bias, rows, x)
    if logits is not None:
        check_dtype("logits", logits, (x.dtype, torch.float32))
        check_same_device("logits", logits, x)
        if differ(logits.shape, (tokens, rows)):
            raise ArgumentError("logits", f"shape {tuple(logits.shape)}", f"({tokens}, {rows})")
        check_rows(logits)
    ids = output("out_ids", out_ids, (tokens, slots), (torch.int32,), like=x)
    weights = output("out_weights", out_weights, (tokens, slots), (torch.float32, x.dtype), like=x)
    if reaches(tokens, most_tokens(rows, hidden) + 1):
        logits = torch.empty(tokens, rows, device=x.device) if logits is None else logits
        with writing(logits, ids, weights):
            multiply(x, weight, logit_bias, logits)
            return route_experts(
                logits,
                top_k,
                method=method,
                renormalize=renormalize,
                bias=bias,
                groups=groups,
                topk_groups=topk_groups,
                shared=shared,
                scale=scale,
                out_ids=ids,
                out_weights=weights,
                enable_pdl=enable_pdl,
            )
    EXPERTS_ROUTER(
        RouterArguments(
            x=x,
            weight=weight,
            logit_bias=logit_bias,
            bias=bias,
            logits=logits,
            out_ids=ids,
            out_weights=weights,
            method=method,
            renormalize=renormalize,
            groups=groups,
            topk_groups=topk_groups,
            shared=shared,
            scale=float(scale),
            enable_pdl=enable_pdl,
        )
    )
    return ids, weights

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
    scale: float = 1.0,
    logits: torch.Tensor | None = None,
    out_ids: torch.Tensor | None = None,
    out_weights: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
    shared: bool = False,
    norm: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """route_experts() of the logits ``x @ weight.T + logit_bias``: for few tokens, both in one launch.

    Args:
        x: [tokens, hidden], bf16 or fp16; hidden is a multiple of 8, the elements of a row are adjacent, and rows begin
            at multiples of 16 bytes.
        weight: [experts, hidden] of the dtype of x, or float32, contiguous, up to 1024 experts. It may be read before
            the kernel ahead has ended.
        top_k, method, renormalize, bias, groups, topk_groups, scale, out_ids, out_weights: as for route_experts().
        logit_bias: [experts], float32, bf16 or fp16, contiguous: added to the logits. It is read as weight is.
        logits: [tokens, experts] to fill in place, float32 or of the dtype of x, elements of a row adjacent: the choice
            is by what is written. None: by float32, which nobody sees.
        enable_pdl: programmatic dependent launch; None means wherever the GPU has it.
    Returns:
        ``out_ids``, ``out_weights``.
    Numerics:
        Products and sums in float32. Up to 32 tokens, unless there are many experts or columns, the order of a sum does
        not depend on the number of tokens, and equal calls give equal bits; for more, torch multiplies, and its order
        of sums is its own.
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
    if weight.dim() != 2 or weight.shape[1] != hidden or not 0 < weight.shape[0] <= MOST_EXPERTS:
        raise ArgumentError("weight", f"shape {tuple(weight.shape)}", f"[1 to {MOST_EXPERTS} experts, {hidden}]")
    check_contiguous("weight", weight)
    experts = weight.shape[0]
    check_rules(experts - shared, top_k, method, bias, groups, topk_groups, x)
    if logit_bias is not None:
        check_bias("logit_bias", logit_bias, experts, x)
    if logits is not None:
        check_dtype("logits", logits, (x.dtype, torch.float32))
        check_same_device("logits", logits, x)
        check_rows(logits)
        if differ(logits.shape, (tokens, experts)):
            raise ArgumentError("logits", f"shape {tuple(logits.shape)}", f"({tokens}, {experts})")
    if reaches(tokens, most_tokens(experts, hidden) + 1):
        logits = torch.empty(tokens, experts, device=x.device) if logits is None else logits
        with writing(logits):
            multiply(x, weight, logit_bias, logits)
        return route_experts(
            logits,
            top_k,
            method=method,
            renormalize=renormalize,
            bias=bias,
            groups=groups,
            topk_groups=topk_groups,
            scale=scale,
            out_ids=out_ids,
            out_weights=out_weights,
            enable_pdl=enable_pdl,
        )
    ids = output("out_ids", out_ids, (tokens, top_k + shared), (torch.int32,), like=x)
    weights = output("out_weights", out_weights, (tokens, top_k + shared), (torch.float32, x.dtype), like=x)
    EXPERTS_ROUTER(
        RouterArguments(
            x=x,
            weight=weight,
            logit_bias=logit_bias,
            bias=bias,
            norm_weight=None if norm is None else norm[0],
            normed=None if norm is None else norm[1],
            eps=1e-6,
            norm_bias=0.0,
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

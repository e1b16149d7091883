"""Routing from activations: the logits of a router and the choice of experts by them, with a norm before or not."""

from __future__ import annotations

import torch

from jitfp4.dispatch import differ, reaches
from jitfp4.dtypes import HALVES
from jitfp4.errors import ArgumentError
from jitfp4.families.experts.kernels.router import most_tokens
from jitfp4.families.experts.router import check_bias, check_rows, check_rules, route_experts
from jitfp4.families.experts.router_operation import EXPERTS_ROUTER, multiply
from jitfp4.families.experts.router_problem import COLUMNS, MOST_NORMED, MOST_NORMED_HIDDEN, RouterArguments
from jitfp4.families.experts.topk_problem import MOST_TAKEN, Method
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
) -> tuple[torch.Tensor, torch.Tensor]:
    """route_experts() of the logits ``x @ weight.T + logit_bias``: for few tokens, both in one launch.

    Args:
        x: [tokens, hidden], bf16 or fp16; hidden is a multiple of 8, the elements of a row are adjacent, and rows begin
            at multiples of 16 bytes.
        weight: [experts, hidden] of the dtype of x, or float32, contiguous, up to 1024 experts. It may be read before
            the kernel ahead has ended.
        top_k, method, renormalize: as for route_experts().
        logit_bias: [experts], float32, bf16 or fp16, contiguous: added to the logits.
        bias, groups, topk_groups, scale: as for route_experts(). Both biases are read as weight is.
        logits: [tokens, experts] to fill in place, float32 or of the dtype of x, elements of a row adjacent: the choice
            is by what is written. None: by float32, which nobody sees.
        out_ids, out_weights: as for route_experts().
        enable_pdl: programmatic dependent launch; None means wherever the GPU has it.
    Returns:
        ``out_ids``, ``out_weights``.
    Numerics:
        Products and sums in float32. Up to 16 tokens of up to 16384 columns, a kernel adds in an order that depends on
        the sizes alone, so that equal calls give equal bits; for more, torch multiplies.
    Raises:
        ArgumentError, ArgumentTypeError: before anything is written.
    """
    _check("x", x, COLUMNS)
    tokens, hidden = x.shape
    _check_weight("weight", weight, x, (x.dtype, torch.float32), MOST_EXPERTS)
    experts = weight.shape[0]
    check_rules(experts, top_k, method, bias, groups, topk_groups, x)
    if logit_bias is not None:
        check_bias("logit_bias", logit_bias, experts, x)
    if logits is not None:
        check_dtype("logits", logits, (x.dtype, torch.float32))
        check_same_device("logits", logits, x)
        if differ(logits.shape, (tokens, experts)):
            raise ArgumentError("logits", f"shape {tuple(logits.shape)}", f"({tokens}, {experts})")
        check_rows(logits)
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
    ids = output("out_ids", out_ids, (tokens, top_k), (torch.int32,), like=x)
    weights = output("out_weights", out_weights, (tokens, top_k), (torch.float32, x.dtype), like=x)
    EXPERTS_ROUTER(
        RouterArguments(
            x=x,
            weight=weight,
            logit_bias=logit_bias,
            bias=bias,
            norm_weight=None,
            normed=None,
            logits=logits,
            out_ids=ids,
            out_weights=weights,
            eps=0.0,
            norm_bias=0.0,
            method=method,
            renormalize=renormalize,
            groups=groups,
            topk_groups=topk_groups,
            shared=False,
            scale=float(scale),
            enable_pdl=enable_pdl,
            names="",
        )
    )
    return ids, weights


def joins_norm(tokens: int, hidden: int) -> bool:
    """Whether rmsnorm_route_experts() takes so many rows of so many elements."""
    return 0 < tokens <= MOST_NORMED and 64 <= hidden <= MOST_NORMED_HIDDEN


@public
def rmsnorm_route_experts(
    input: torch.Tensor,  # noqa: A002 - as in rmsnorm()
    weight: torch.Tensor,
    router: torch.Tensor,
    top_k: int,
    eps: float,
    *,
    weight_bias: float,
    renormalize: bool,
    shared: bool,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    logits: torch.Tensor | None = None,
    out_ids: torch.Tensor | None = None,
    out_weights: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Normalise a few rows, multiply them by a router, and choose their experts by a softmax, in one launch.

    Args:
        input: [tokens, hidden], fp16 or bf16, 16-byte aligned; up to 8 tokens, hidden a multiple of 16 from 64 to 8192.
            Rows may lie apart, at multiples of 16 bytes.
        weight: [hidden] of input's dtype. As ``router`` and ``bias``, it may be read before the kernel ahead has ended.
        router: [experts, hidden] of input's dtype, contiguous, up to 1024 experts, and where ``shared`` one row more.
        top_k: experts of a token, 1 to 32, or where ``shared`` to 31. They are in the order of their logits, the
            highest first.
        eps: added to the mean of squares.
        weight_bias: added to ``weight`` in float32: 0, or 1 as norms of Gemma and Qwen3-Next have it.
        renormalize: divide the scores of the experts of a token by their sum.
        shared: the last row of the router is the gate of an expert that all tokens have, as Qwen3-Next has one. Behind
            the ``top_k`` slots is another one with the number of that row, whose weight is the sigmoid of its logit.
        bias: [rows of the router], float32, bf16 or fp16, contiguous: added to the logits.
        out: [tokens, hidden] of input's dtype to fill in place, contiguous.
        logits: [tokens, rows of the router] float32 to fill in place, elements of a row adjacent.
        out_ids: [tokens, top_k or, with a shared expert, top_k + 1] int32 to fill in place, contiguous.
        out_weights: the same of float32. What is None is allocated; all four are memory of their own.
        enable_pdl: programmatic dependent launch; None means wherever the GPU has it.
    Returns:
        ``(out, logits, out_ids, out_weights)``: the rows, and what fp4_experts() takes.
    Numerics:
        ``out`` as by rmsnorm(), bit by bit; the rest as by route_tokens() of it.
    Raises:
        ArgumentError, ArgumentTypeError: before anything is written.
    """
    _check("input", input, 2 * COLUMNS)
    tokens, hidden = input.shape
    if tokens and not joins_norm(tokens, hidden):
        allowed = f"up to {MOST_NORMED} rows of 64 to {MOST_NORMED_HIDDEN} elements"
        raise ArgumentError("input", f"shape {tuple(input.shape)}", allowed)
    check_dtype("weight", weight, (input.dtype,))
    check_same_device("weight", weight, input)
    if tuple(weight.shape) != (hidden,):
        raise ArgumentError("weight", f"shape {tuple(weight.shape)}", f"({hidden},)")
    check_contiguous("weight", weight)
    if not eps >= 0:
        raise ArgumentError("eps", eps, "a finite number that is not negative")
    _check_weight("router", router, input, (input.dtype,), MOST_EXPERTS + shared)
    rows = router.shape[0]
    most = min(MOST_TAKEN, rows) - shared
    if not 0 < top_k <= most:
        raise ArgumentError("top_k", top_k, f"1 to {most}")
    if bias is not None:
        check_bias("bias", bias, rows, input)
    normed = output("out", out, (tokens, hidden), (input.dtype,), like=input)
    found = output("logits", logits, (tokens, rows), (torch.float32,), like=input)
    ids = output("out_ids", out_ids, (tokens, top_k + shared), (torch.int32,), like=input)
    weights = output("out_weights", out_weights, (tokens, top_k + shared), (torch.float32,), like=input)
    EXPERTS_ROUTER(
        RouterArguments(
            x=input,
            weight=router,
            logit_bias=bias,
            bias=None,
            norm_weight=weight,
            normed=normed,
            logits=found,
            out_ids=ids,
            out_weights=weights,
            eps=float(eps),
            norm_bias=float(weight_bias),
            method=Method.SOFTMAX,
            renormalize=renormalize,
            groups=1,
            topk_groups=1,
            shared=shared,
            scale=1.0,
            enable_pdl=enable_pdl,
            names="x=input,weight=router,norm_weight=weight,normed=out,logit_bias=bias",
        )
    )
    return normed, found, ids, weights


def _check(name: str, x: torch.Tensor, multiple: int) -> None:
    """Check rows of 16-bit floats."""
    check_dtype(name, x, tuple(HALVES))
    check_device(name, x)
    if x.dim() != 2:
        raise ArgumentError(name, f"shape {tuple(x.shape)}", "[tokens, hidden]")
    as_rows(name, x, multiple)


def _check_weight(name: str, weight: torch.Tensor, x: torch.Tensor, dtypes: tuple[torch.dtype, ...], most: int) -> None:
    check_dtype(name, weight, dtypes)
    check_same_device(name, weight, x)
    if weight.dim() != 2 or weight.shape[1] != x.shape[1] or not 0 < weight.shape[0] <= most:
        raise ArgumentError(name, f"shape {tuple(weight.shape)}", f"[1 to {most} experts, {x.shape[1]}]")
    check_contiguous(name, weight)

"""Routing: the experts of each token, from a router's logits."""

from __future__ import annotations

import torch

from jitfp4.dtypes import FLOATS
from jitfp4.errors import ArgumentError, renamed
from jitfp4.families.experts.topk_operation import EXPERTS_TOPK
from jitfp4.families.experts.topk_problem import MOST_TAKEN, Method, TopkArguments
from jitfp4.families.experts.weights import MOST_EXPERTS
from jitfp4.public import public
from jitfp4.tensors import check_contiguous, check_device, check_dtype, check_same_device, output


@public
def route_experts(
    logits: torch.Tensor,
    top_k: int,
    *,
    method: str,
    renormalize: bool,
    bias: torch.Tensor | None = None,
    groups: int = 1,
    topk_groups: int = 1,
    shared: bool = False,
    scale: float = 1.0,
    out_ids: torch.Tensor | None = None,
    out_weights: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts of each token and their weights, as fp4_experts() takes them, by the logits of a router.

    Args:
        logits: [tokens, experts], or where ``shared`` one column more, float32, bf16 or fp16, up to 1024 experts;
            elements of a row adjacent.
        top_k: experts of a token, 1 to 32, or where ``shared`` to 31. They are in the order of their scores, the
            highest first.
        method: "softmax", of all experts, or "sigmoid" of each: how a logit becomes a score.
        renormalize: divide the scores of the experts of a token by their sum. A softmax of the top-k logits, as gpt-oss
            has it, is the same as the top-k of a softmax, renormalised.
        bias: [experts], float32, bf16 or fp16, contiguous: added to the scores for the choice, not for the weights.
            Only for "sigmoid".
        groups: groups of neighbouring experts, up to 32, each with two or more. Only for "sigmoid".
        topk_groups: of several groups, those that count: the ones whose two best experts have the highest sums.
        shared: the last column is the gate of an expert that all tokens have, such as Qwen3-Next's shared expert:
            behind the ``top_k`` slots is one with the number of that column, whose weight is the sigmoid of its logit.
            Only for "softmax".
        scale: a factor of all weights.
        out_ids: [tokens, top_k or, with a shared expert, top_k + 1] int32 to fill in place, contiguous; allocated when
            None.
        out_weights: the same shape to fill in place, contiguous, float32 or of the logits' dtype; allocated as
            float32 when None. Both share no memory with another argument.
        enable_pdl: programmatic dependent launch; None means wherever the GPU has it.
    Returns:
        ``out_ids``, ``out_weights``.
    Numerics:
        In float32, whatever the dtype of the logits::

            weight = scale * softmax(logits)[id]                                    renormalize: over the taken logits
            weight = scale * sigmoid(logits)[id]              renormalize: divided by (the sum of them + 1e-20) before

        Softmax is ordered by its logits, sigmoid by float32 scores (+ bias). Of equal experts or groups the one with
        the lower number is taken, which torch.topk does not promise. NaN is above all numbers, as for torch.topk, so
        that it shows in the weights. Equal calls give equal bits.
    Raises:
        ArgumentError, ArgumentTypeError: before anything is written.
    """
    return _route(
        logits,
        top_k,
        method=method,
        renormalize=renormalize,
        bias=bias,
        groups=groups,
        topk_groups=topk_groups,
        shared=shared,
        scale=scale,
        out_ids=out_ids,
        out_weights=out_weights,
        enable_pdl=enable_pdl,
    )


@public
def fused_topk_deepseek(
    scores: torch.Tensor,
    bias: torch.Tensor,
    n_group: int,
    topk_group: int,
    topk: int,
    routed_scaling_factor: float,
    topk_values: torch.Tensor,
    topk_indices: torch.Tensor,
    launch_with_pdl: bool = True,
    routing_replay_out: torch.Tensor | None = None,
    *,
    backend: str = "default",
) -> None:
    """FlashInfer's routing of DeepSeek-V3: route_experts() by sigmoid, with a bias and groups, renormalised.

    Args:
        scores: [tokens, experts], float32, bf16 or fp16, up to 1024 experts: logits, before the sigmoid.
        bias: [experts], float32, bf16 or fp16, contiguous.
        n_group, topk_group, topk, routed_scaling_factor: ``groups``, ``topk_groups``, ``top_k`` and ``scale``.
        topk_values: [tokens, topk] of the dtype of scores, or float32: the weights, filled in place.
        topk_indices: [tokens, topk] int32: the experts, filled in place.
        launch_with_pdl: False for no programmatic dependent launch; where a GPU lacks it, there is none.
        routing_replay_out: None.
        backend: "default" or "cake", which mean the same.
    Returns:
        None.
    Raises:
        ArgumentError, ArgumentTypeError: before anything is written.
    """
    if routing_replay_out is not None:
        raise ArgumentError("routing_replay_out", "a tensor", "None: topk_indices has the experts")
    if backend not in ("default", "cake"):
        raise ArgumentError("backend", repr(backend), "'default' or 'cake'")
    try:
        _route(
            scores,
            topk,
            method="sigmoid",
            renormalize=True,
            bias=bias,
            groups=n_group,
            topk_groups=topk_group,
            shared=False,
            scale=routed_scaling_factor,
            out_ids=topk_indices,
            out_weights=topk_values,
            enable_pdl=None if launch_with_pdl else False,
        )
    except ArgumentError as error:
        raise renamed(error, _NAMES) from None


_NAMES = {
    "logits": "scores",
    "top_k": "topk",
    "groups": "n_group",
    "topk_groups": "topk_group",
    "scale": "routed_scaling_factor",
    "out_ids": "topk_indices",
    "out_weights": "topk_values",
}
"""From names of route_experts() to those of fused_topk_deepseek()."""


def _route(
    logits: torch.Tensor,
    top_k: int,
    *,
    method: str,
    renormalize: bool,
    bias: torch.Tensor | None,
    groups: int,
    topk_groups: int,
    shared: bool,
    scale: float,
    out_ids: torch.Tensor | None,
    out_weights: torch.Tensor | None,
    enable_pdl: bool | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """route_experts() with arguments whose types are checked."""
    check_dtype("logits", logits, tuple(FLOATS))
    check_device("logits", logits)
    if logits.dim() != 2 or not 0 < logits.shape[1] - shared <= MOST_EXPERTS:
        raise ArgumentError("logits", f"shape {tuple(logits.shape)}", f"[tokens, 1 to {MOST_EXPERTS} experts]")
    tokens, experts = logits.shape[0], logits.shape[1] - shared
    check_rows(logits)
    check_rules(experts, top_k, method, bias, groups, topk_groups, shared, logits)
    slots = top_k + shared
    ids = output("out_ids", out_ids, (tokens, slots), (torch.int32,), like=logits)
    weights = output("out_weights", out_weights, (tokens, slots), (torch.float32, logits.dtype), like=logits)
    EXPERTS_TOPK(
        TopkArguments(
            logits=logits,
            bias=bias,
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


def check_rows(logits: torch.Tensor) -> None:
    """Check the strides of logits [tokens, experts]."""
    tokens, experts = logits.shape
    if (logits.stride(1) != 1 and experts > 1) or (logits.stride(0) < experts and tokens > 1):
        raise ArgumentError("logits", f"strides {logits.stride()}", "rows that do not overlap, of adjacent elements")


def check_rules(
    experts: int,
    top_k: int,
    method: str,
    bias: torch.Tensor | None,
    groups: int,
    topk_groups: int,
    shared: bool,
    like: torch.Tensor,
) -> None:
    """Check what the choice among ``experts`` goes by."""
    if method not in tuple(Method):
        raise ArgumentError("method", repr(method), " or ".join(repr(str(one)) for one in Method))
    if not 0 < groups <= MOST_TAKEN or experts % groups or (groups > 1 and experts < 2 * groups):
        raise ArgumentError("groups", groups, f"1, or up to {MOST_TAKEN} groups of {experts} experts, two or more each")
    if not 0 < topk_groups <= groups:
        raise ArgumentError("topk_groups", topk_groups, f"1 to {groups}")
    most = min(MOST_TAKEN - shared, experts // groups * topk_groups)
    if not 0 < top_k <= most:
        raise ArgumentError("top_k", top_k, f"1 to {most}")
    if method == Method.SOFTMAX:
        if bias is not None:
            raise ArgumentError("bias", "a tensor", "None for softmax")
        if groups != 1:
            raise ArgumentError("groups", groups, "1 for softmax")
    elif shared:
        raise ArgumentError("shared", shared, "False for sigmoid")
    if bias is not None:
        check_bias("bias", bias, experts, like)


def check_bias(name: str, bias: torch.Tensor, experts: int, like: torch.Tensor) -> None:
    """Check a bias [experts]."""
    check_dtype(name, bias, tuple(FLOATS))
    check_same_device(name, bias, like)
    if tuple(bias.shape) != (experts,):
        raise ArgumentError(name, f"shape {tuple(bias.shape)}", f"[{experts}]")
    check_contiguous(name, bias)

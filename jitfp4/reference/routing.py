"""The choice of experts by a router's logits, in float32."""

from __future__ import annotations

import torch

LEAST_SUM = 1e-20
"""Added to the sum of the taken scores before they are divided by it: scores of sigmoid may all be 0."""


def choose(scores: torch.Tensor, top_k: int, bias: torch.Tensor | None, groups: int, topk_groups: int) -> torch.Tensor:
    """int64 [tokens, top_k]: the experts with the highest scores, of equal ones the lower first; NaN is the highest.

    ``bias`` is added to ``scores`` [tokens, experts] before. Of several groups of neighbouring experts only those with
    the highest sums of their two best count, again the lower of equal ones.
    """
    if bias is not None:
        scores = scores + bias
    order = scores.sort(dim=-1, descending=True, stable=True).indices
    if groups > 1:
        best = scores.view(len(scores), groups, -1).sort(-1, descending=True).values[..., :2].sum(-1)
        kept = best.sort(dim=-1, descending=True, stable=True).indices[:, :topk_groups]
        group = order // (scores.shape[1] // groups)
        is_left_out = ~(group.unsqueeze(-1) == kept.unsqueeze(1)).any(-1)
        order = order.gather(1, is_left_out.int().sort(dim=-1, stable=True).indices)
    return order[:, :top_k]


def weights_of(
    logits: torch.Tensor, ids: torch.Tensor, *, softmax: bool, renormalize: bool, scale: float
) -> torch.Tensor:
    """[tokens, top_k] of the logits' dtype: the scores of the taken experts, if asked for divided by their sum."""
    taken = logits.gather(1, ids)
    if softmax:
        return scale * torch.softmax(taken, -1) if renormalize else scale * torch.softmax(logits, -1).gather(1, ids)
    scores = torch.sigmoid(taken)
    return scale * (scores / (scores.sum(-1, keepdim=True) + LEAST_SUM) if renormalize else scores)


def choose_with_shared(logits: torch.Tensor, top_k: int, *, renormalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and weights [tokens, top_k + 1] by softmax, the last of an expert that all tokens have: the last logit's."""
    own = logits[:, :-1]
    ids = choose(own, top_k, None, 1, 1)
    weights = weights_of(own, ids, softmax=True, renormalize=renormalize, scale=1.0)
    number = torch.full_like(ids[:, :1], own.shape[1])
    return torch.cat((ids, number), 1), torch.cat((weights, logits[:, -1:].sigmoid()), 1)

"""Routers of models, and choices held against float64."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class Router(NamedTuple):
    """What a model has."""

    experts: int
    top_k: int
    method: str
    renormalize: bool
    groups: int = 1
    topk_groups: int = 1
    scale: float = 1.0
    biased: bool = False

    def options(self, bias: torch.Tensor | None) -> dict[str, Any]:
        named = self._asdict()
        return {name: named[name] for name in ("method", "renormalize", "groups", "topk_groups", "scale")} | {
            "bias": bias
        }


ROUTERS = {
    "gpt-oss": Router(128, 4, "softmax", True),
    "qwen3": Router(128, 8, "softmax", True),
    "qwen2": Router(60, 4, "softmax", False),
    "qwen3-next": Router(512, 10, "softmax", True),
    "deepseek-v3": Router(256, 8, "sigmoid", True, 8, 4, 2.5, biased=True),
    "kimi-k2": Router(384, 8, "sigmoid", True, 1, 1, 2.827, biased=True),
    "kimi-k3": Router(896, 16, "sigmoid", True, 1, 1, 2.5, biased=True),
    "llama4": Router(16, 1, "sigmoid", False),
    "uneven groups": Router(33, 5, "sigmoid", False, 11, 4, 0.5, biased=True),
    "pairs": Router(64, 32, "sigmoid", True, 32, 16, 1.0, biased=True),
    "one": Router(1, 1, "softmax", False),
    "all": Router(20, 20, "softmax", False),
}


def make_logits(
    router: Router, tokens: int, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor | None]:
    generator = torch.Generator().manual_seed(tokens)
    logits = 3 * torch.randn(tokens, router.experts, generator=generator)
    bias = torch.randn(router.experts, generator=generator) / 4 if router.biased else None
    return logits.to(dtype), bias


def assert_routing(
    router: Router, logits: torch.Tensor, bias: torch.Tensor | None, ids: torch.Tensor, weights: torch.Tensor
) -> None:
    """Token by token in float64: nothing that is left out is better than what is taken by more than float32's error."""
    x, unit = logits.double().cpu(), 2.0**-20
    assert ids.dtype == torch.int32
    for row, taken, got in zip(x, ids.cpu().long(), weights.double().cpu(), strict=True):
        assert len(set(taken.tolist())) == router.top_k
        scores = row if router.method == "softmax" else row.sigmoid()
        choice = scores if bias is None else scores + bias.double().cpu()
        by_group = choice.view(router.groups, -1)
        allowed = torch.ones(router.groups, dtype=torch.bool)
        if router.groups > 1:
            sums = by_group.sort(descending=True).values[:, :2].sum(-1)
            least = sums.sort(descending=True).values[router.topk_groups - 1]
            allowed, surely = sums >= least - unit, sums > least + unit
            used = (taken // by_group.shape[1]).unique()
            assert allowed[used].all()
            assert len(used) <= router.topk_groups
            allowed = surely  # what must have been looked at
        left = allowed.repeat_interleave(by_group.shape[1])
        left[taken] = False
        assert not left.any() or choice[left].max() <= choice[taken].min() + unit
        assert (choice[taken].diff() <= unit).all()
        if router.method == "softmax":
            want = (row[taken] if router.renormalize else row).softmax(-1)
            want = want if router.renormalize else want[taken]
        else:
            want = scores[taken] / scores[taken].sum() if router.renormalize else scores[taken]
        rounding = torch.finfo(weights.dtype).eps
        assert ((got - router.scale * want).abs() <= router.scale * want * (unit + rounding)).all()

"""What the layers of a model make of the same requests in vLLM: where two variants begin to differ.

A layer's output is the sum that the next one gets; those of its parts, attention and experts, are what they add to it.
Which experts a router of random weights chooses for a token hangs on rounding, and a token with another expert is
another token from there on. So logits may be given to routers: the same for every variant.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

SPREAD = 2.0  # standard deviation of given logits
FEW = 8  # rows of the largest decode step
_ATTENTION = ("linear_attn", "self_attn")

_seen: dict[str, list[torch.Tensor]] = {}


def watch(model: Any) -> None:
    """Remember what each layer, its attention, its experts and its router give from now on."""
    for index, layer in enumerate(model.model.layers):
        layer.register_forward_hook(_remembers(f"{index} sum", sum))
        attention = next(getattr(layer, name) for name in _ATTENTION if hasattr(layer, name))
        for part, module in (("attention", attention), ("experts", layer.mlp)):
            module.register_forward_hook(_remembers(f"{index} {part}", _first))
        if hasattr(layer.mlp, "gate"):
            layer.mlp.gate.register_forward_hook(_remembers(f"{index} router", _first))


def give_routes(model: Any, rows: int) -> None:
    """Let routers give logits of the row's number in its step, whatever their input is, for at most ``rows`` rows."""
    for index, layer in enumerate(model.model.layers):
        gate = layer.mlp.gate
        made = torch.Generator().manual_seed(index)
        table = SPREAD * torch.randn(rows, gate.weight.shape[0], generator=made)
        gate.register_forward_hook(_gives(table.to(gate.weight)))


def taken() -> dict[str, tuple[torch.Tensor, list[int]]]:
    """What was remembered by name: the rows of all steps [rows, columns], and how many each step had."""
    return {name: (torch.cat(steps).cpu(), [len(step) for step in steps]) for name, steps in _seen.items()}


def compared(one: Any, other: Any, chosen: int) -> list[str]:
    """Lines with the cosines of what taken() gave of two variants, and how many tokens have other experts."""
    lines = []
    for name, (rows, steps) in one.items():
        others, their_steps = other[name]
        count = min(len(steps), len(their_steps))  # those in graphs are not seen
        if steps[:count] != their_steps[:count]:
            return [f"steps of {steps} and {their_steps} rows: not the same requests in each"]
        steps = steps[:count]
        rows, others = rows[: sum(steps)], others[: sum(steps)]
        index, part = name.split()
        if part == "router":
            same = _chosen(rows, chosen) == _chosen(others, chosen)
            lines.append(f"layer {index} router: other experts for {int((~same.all(-1)).sum())} of {len(rows)} tokens")
            continue
        found = torch.nn.functional.cosine_similarity(rows.double(), others.double(), dim=-1)
        is_step = torch.tensor([count <= FEW for count in steps]).repeat_interleave(torch.tensor(steps))
        texts = [
            f"{kind} least {found[which].min():.5f} mean {found[which].mean():.5f}"
            for kind, which in (("prompts", ~is_step), ("steps", is_step))
            if which.any()
        ]
        lines.append(f"layer {index} {part}: {', '.join(texts)}")
    return lines


def _chosen(logits: torch.Tensor, count: int) -> torch.Tensor:
    """The experts of each token, in order of their numbers."""
    return logits.float().topk(count).indices.sort(-1).values


def _first(parts: Any) -> torch.Tensor:
    tensor: torch.Tensor = parts[0] if isinstance(parts, tuple) else parts
    return tensor


def _remembers(name: str, of: Callable[[Any], torch.Tensor]) -> Any:
    def hook(_module: Any, _arguments: Any, out: Any) -> None:
        _seen.setdefault(name, []).append(of(out).detach().clone())

    return hook


def _gives(table: torch.Tensor) -> Any:
    def hook(_module: Any, _arguments: Any, out: Any) -> Any:
        logits = table[: len(_first(out))]
        return (logits, *out[1:]) if isinstance(out, tuple) else logits

    return hook

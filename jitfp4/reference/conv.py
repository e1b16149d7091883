"""Causal convolutions over sequences with states, in float64: what the kernel rounds."""

from __future__ import annotations

import torch


def convolved(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, silu: bool) -> torch.Tensor:
    """float64 [tokens, channels] from ``inputs`` [width - 1 + tokens, channels]: what came before, and the tokens."""
    width = weight.shape[1]
    tokens = len(inputs) - width + 1
    sums = torch.zeros(tokens, inputs.shape[1], dtype=torch.float64, device=inputs.device)
    for j in range(width):
        sums += inputs[j : j + tokens].double() * weight[:, j].double()
    if bias is not None:
        sums += bias.double()
    return torch.nn.functional.silu(sums) if silu else sums


def magnitude(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The sums of absolute values, of which a float32 sum is off by a few units."""
    return convolved(inputs.abs(), weight.abs(), None if bias is None else bias.abs(), silu=False)


def past(state: torch.Tensor, width: int, accepted: int | None) -> torch.Tensor:
    """[width - 1, channels] of a state [channels, length]: the last inputs, in their order.

    After a call with drafted tokens, of which ``accepted`` were taken, they do not begin with the first.
    """
    first = 0 if accepted is None else min(max(accepted - 1, 0), state.shape[1] - (width - 1))
    return state[:, first : first + width - 1].T


def kept(inputs: torch.Tensor, width: int, *, drafted: bool) -> torch.Tensor:
    """What the state is after a call with ``inputs``, [inputs, channels]: the last ones, or all but the first."""
    return inputs[1:] if drafted else inputs[len(inputs) - width + 1 :]

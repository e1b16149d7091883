"""Causal convolutions of sequences, and results held against float64, sequence by sequence."""

from __future__ import annotations

from typing import NamedTuple

import torch

from jitfp4.reference.conv import convolved, kept, magnitude, past


class Sequences(NamedTuple):
    """Inputs [tokens, channels] of sequences behind each other, filters, and the states of more slots than are used."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    states: torch.Tensor
    starts: torch.Tensor
    slots: torch.Tensor

    def to(self, device: str) -> Sequences:
        return Sequences(*(None if value is None else value.to(device) for value in self))


def make_sequences(
    lengths: list[int],
    channels: int,
    width: int = 4,
    dtype: torch.dtype = torch.bfloat16,
    *,
    room: int = 0,
    channels_last: bool = True,
    biased: bool = True,
) -> Sequences:
    """States have ``room`` more columns than a filter needs."""
    generator, count = torch.Generator().manual_seed(sum(lengths)), len(lengths)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    states = random(count + 4, channels, width - 1 + room)
    if channels_last:
        states = states.transpose(1, 2).contiguous().transpose(1, 2)
    return Sequences(
        random(sum(lengths), channels),
        random(channels, width),
        random(channels) if biased else None,
        states,
        torch.tensor([0, *lengths]).cumsum(0).int(),
        (torch.randperm(count + 3, generator=generator)[:count] + 1).int(),  # slot 0 is none
    )


def assert_convolved(
    given: Sequences,
    out: torch.Tensor,
    states: torch.Tensor,
    *,
    has: list[bool] | None = None,
    accepted: list[int] | None = None,
    silu: bool = True,
) -> None:
    """``out`` is within rounding of float64, ``states`` are exactly what comes last, and other slots as they were."""
    width, unit = given.weight.shape[1], torch.finfo(out.dtype)
    wanted = given.states.clone()
    for sequence, slot in enumerate(given.slots.tolist()):
        start, end = given.starts[sequence : sequence + 2].tolist()
        if start == end or not 0 < slot < len(wanted):
            continue
        taken = None if accepted is None else accepted[sequence]
        before = past(given.states[slot], width, taken)
        before = before if has is None or has[sequence] else torch.zeros_like(before)
        inputs = torch.cat((before, given.x[start:end]))
        want = convolved(inputs, given.weight, given.bias, silu=silu)
        bound = magnitude(inputs, given.weight, given.bias) * 2.0**-20 + want.abs() * unit.eps + unit.smallest_normal
        assert ((out[start:end].double() - want).abs() <= bound).all()
        after = kept(inputs, width, drafted=accepted is not None)
        wanted[slot, :, : len(after)] = after.T
    assert torch.equal(states, wanted)

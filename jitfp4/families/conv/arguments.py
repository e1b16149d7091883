"""What the operator takes."""

from __future__ import annotations

from typing import NamedTuple

import torch

from jitfp4.operation import Written


class Arguments(NamedTuple):
    """Causal convolutions over sequences, each channel by itself, and their states.

    ``x`` and ``out``: [tokens, channels] of sequences behind each other, or [sequences, tokens, channels]; channels are
    adjacent. ``x`` None: the inputs are in ``out``. ``weight`` [channels, width], ``bias`` [channels] or None.
    ``states`` [slots, channels, at least width - 1], with any strides, in the dtype of x.

    ``starts`` int32 [sequences + 1] or None, with three dimensions. ``slots`` int32 [sequences], rows apart or not, or
    None: the number of the sequence. ``null_slot`` and slots outside: the sequence is left out. ``has_state`` bool
    [sequences]; None: ``has_by_default`` for all. ``accepted`` int32 [sequences] or None: the drafted tokens of the
    call before that were accepted, and that one. ``by_sequence``: a CTA has a sequence; without it ``x`` is not None.
    """

    x: torch.Tensor | None
    weight: torch.Tensor
    bias: torch.Tensor | None
    states: Written
    starts: torch.Tensor | None
    slots: torch.Tensor | None
    has_state: torch.Tensor | None
    accepted: torch.Tensor | None
    out: Written
    sequences: int
    null_slot: int
    has_by_default: bool
    by_sequence: bool
    silu: bool
    enable_pdl: bool | None
    names: str

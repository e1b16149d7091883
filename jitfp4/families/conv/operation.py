"""The operation: its arguments, its kernel, its tactics and its reference."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch

from jitfp4.arch import Arch
from jitfp4.dtypes import HALVES
from jitfp4.families.conv.arguments import Arguments
from jitfp4.families.conv.kernels.causal import KERNEL, WIDE, ConvTactic
from jitfp4.families.conv.problem import Problem
from jitfp4.operation import Operation
from jitfp4.reference import conv as reference
from jitfp4.selection import Row, Table, rows

_DECODE, _PROMPTS = {"by_sequence": True}, {"by_sequence": False}
TABLE = Table(
    (
        *rows(
            (ConvTactic(2, 128, 0), _DECODE | {"sequences": 4}),
            (ConvTactic(4, 128, 0), _DECODE | {"sequences": 128}),
            (ConvTactic(8, 64, 0), _DECODE),
            (ConvTactic(4, 128, 8), _PROMPTS | {"tokens": 512}),
            (ConvTactic(4, 64, 16), _PROMPTS | {"tokens": 2048}),
            (ConvTactic(4, 64, 32), _PROMPTS),  # 256 threads and as many tokens are 1 % faster where they fill the GPU
            wide=True,
        ),
        Row(ConvTactic(1, 128, 0), _DECODE),  # not searched, as the next
        Row(ConvTactic(1, 128, 8)),
    ),
    measured="h200/conv_search.csv",
)


def _is_wide(arguments: Arguments) -> bool:
    a = arguments
    tensors = a.out if a.x is None else a.x, a.out
    strides = [a.out.shape[-1], *(stride for tensor in tensors for stride in tensor.stride()[:-1])]
    if a.states.stride(1) == 1:
        strides += [a.states.stride(0), a.states.stride(2)]
    return all(stride % WIDE == 0 for stride in strides)


def _problem(arguments: Arguments) -> Problem:
    out = arguments.out
    return Problem(
        HALVES[out.dtype],
        arguments.weight.shape[1],
        _is_wide(arguments),
        arguments.by_sequence,
        tokens=out.shape[0] if out.dim() == 2 else out.shape[0] * out.shape[1],
        sequences=arguments.sequences,
        channels=out.shape[-1],
    )


def _problems(_arch: Arch) -> Iterator[Problem]:
    """One for each row, with filters of 2 to 4 taps."""
    calls = ((True, 1, 1), (True, 64, 64), (True, 256, 256), (False, 64, 8), (False, 1024, 8), (False, 8192, 8))
    for dtype, width, wide, call in product(HALVES.values(), (2, 3, 4), (True, False), calls):
        by_sequence, tokens, sequences = call
        yield Problem(dtype, width, wide, by_sequence, tokens, sequences, 8192)


def _reference(arguments: Arguments) -> None:
    a = arguments
    width, x = a.weight.shape[1], a.out if a.x is None else a.x
    numbers = range(a.sequences) if a.slots is None else a.slots.tolist()
    starts = None if a.starts is None else a.starts.clamp(0, len(x)).tolist()
    for sequence, slot in enumerate(numbers):
        if not 0 <= slot < len(a.states) or (a.slots is not None and slot == a.null_slot):
            continue
        of = slice(starts[sequence], starts[sequence + 1]) if starts is not None else sequence
        tokens, out, state = x[of], a.out[of], a.states[slot]
        if not len(tokens):
            continue
        accepted = None if a.accepted is None else int(a.accepted[sequence])
        has = a.has_by_default if a.has_state is None else bool(a.has_state[sequence])
        past = reference.past(state, width, accepted)
        inputs = torch.cat((past if has else torch.zeros_like(past), tokens))
        after = reference.kept(inputs, width, drafted=accepted is not None)[: state.shape[1]]
        out.copy_(reference.convolved(inputs, a.weight, a.bias, silu=a.silu))
        state[:, : len(after)] = after.T


CONV = Operation(
    Arguments,
    name="causal_conv1d",
    kernels=(KERNEL,),
    problem=_problem,
    problems=_problems,
    tables=(TABLE,),
    reference=_reference,
    output="out",
    aligned=("x", "states", "out", "weight", "bias"),
    exclusive=("out", "states"),
    growing=("tokens", "sequences"),
)

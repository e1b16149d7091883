"""conv/causal: short causal convolutions, each channel by itself, with the states of sequences."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product, starmap
from typing import Any

import torch

from jitfp4.arch import Arch
from jitfp4.families.conv.arguments import Arguments
from jitfp4.families.conv.problem import Problem
from jitfp4.formats import DType
from jitfp4.kernel import Kernel, Plan
from jitfp4.layouts import ceil_div
from jitfp4.spec import I64, Geometry, KernelSpec, Ptr

WIDE = 8  # of what the channels and strides of a wide problem are multiples
_MAX_GRID_Y = 65535


@dataclass(frozen=True, slots=True)
class ConvTactic:
    """Channels of a thread, threads of a CTA, and tokens that it takes; 0: it takes a sequence."""

    vec: int
    threads: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvSpec(KernelSpec):
    """A thread takes ``vec`` channels."""

    dtype: DType
    width: int
    vec: int
    by_sequence: bool
    threads: int


def _specialise(problem: Problem, tactic: ConvTactic) -> ConvSpec:
    return ConvSpec(
        dtype=problem.dtype,
        width=problem.width,
        vec=tactic.vec,
        by_sequence=problem.by_sequence,
        threads=tactic.threads,
    )


def rejects(problem: Problem, tactic: ConvTactic, _arch: Arch) -> str | None:
    """Why a tactic cannot run a problem on an architecture."""
    if problem.by_sequence != (tactic.tokens == 0):
        return "a CTA has a sequence" if problem.by_sequence else "a CTA has a block of tokens"
    if problem.wide == (tactic.vec == 1):
        return f"a thread has {'several channels' if problem.wide else 'one channel'}"
    if _ctas_of_channels(problem, tactic) > _MAX_GRID_Y:
        return f"more than {_MAX_GRID_Y} CTAs for the channels of a token"
    return None


def _ctas_of_channels(problem: Problem, tactic: ConvTactic) -> int:
    return ceil_div(problem.channels, tactic.threads * tactic.vec)


def _geometry(problem: Problem, tactic: ConvTactic, _arch: Arch) -> Geometry:
    parts = problem.sequences if problem.by_sequence else ceil_div(problem.tokens, tactic.tokens)
    return Geometry(grid=(parts, _ctas_of_channels(problem, tactic), 1), block=(tactic.threads, 1, 1))


def _strides(rows: torch.Tensor) -> tuple[int, int]:
    """From a sequence to the next, and from a token to the next."""
    return (rows.stride(0), rows.stride(1)) if rows.dim() == 3 else (0, rows.stride(0))


def _bind(arguments: Arguments, plan: Plan) -> dict[str, Any]:
    a = arguments
    x = a.out if a.x is None else a.x
    problem, geometry = plan.problem, plan.geometry
    return {
        "x": x,
        "weight": a.weight,
        "bias": a.bias,
        "states": a.states,
        "starts": a.starts,
        "slot_of": a.slots,
        "has_state": a.has_state,
        "accepted": a.accepted,
        "out": a.out,
        "channels": problem.channels,
        "tokens": problem.tokens,
        "sequences": problem.sequences,
        "sequence_tokens": a.out.shape[1] if a.out.dim() == 3 else 0,
        "block_tokens": ceil_div(problem.tokens, geometry.grid[0]),
        "x_sequence_stride": _strides(x)[0],
        "x_stride": _strides(x)[1],
        "out_sequence_stride": _strides(a.out)[0],
        "out_stride": _strides(a.out)[1],
        "state_stride": a.states.stride(0),
        "state_channel_stride": a.states.stride(1),
        "state_token_stride": a.states.stride(2),
        "state_slots": a.states.shape[0],
        "state_length": a.states.shape[2],
        "slot_stride": 0 if a.slots is None else a.slots.stride(0),
        "null_slot": a.null_slot,
        "has_by_default": int(a.has_by_default),
        "has_silu": int(a.silu),
    }


KERNEL = Kernel(
    name="conv/causal",
    spec=ConvSpec,
    params=(
        Ptr("x", "const In", "[tokens, channels]"),
        Ptr("weight", "const In", "[channels, width]"),
        Ptr("bias", "const In", "[channels]; null: 0"),
        Ptr("states", "In", "[state_slots, channels, state_length]"),
        Ptr("starts", "const int32", "[sequences + 1]; null: sequence_tokens for each"),
        Ptr("slot_of", "const int32", "[sequences]; null: the sequence's number"),
        Ptr("has_state", "const uint8", "[sequences]; null: has_by_default"),
        Ptr("accepted", "const int32", "[sequences]; null: none is drafted"),
        Ptr("out", "In", "[tokens, channels]; may be x with kBySequence"),
        I64("channels"),
        I64("tokens"),
        I64("sequences"),
        I64("sequence_tokens"),
        I64("block_tokens"),
        *(I64(name, "elements") for name in ("x_sequence_stride", "x_stride", "out_sequence_stride", "out_stride")),
        *(I64(name, "elements") for name in ("state_stride", "state_channel_stride", "state_token_stride")),
        I64("state_slots"),
        I64("state_length", "width - 1 or more"),
        I64("slot_stride", "elements"),
        I64("null_slot"),
        I64("has_by_default", "0 or 1"),
        I64("has_silu", "0 or 1"),
    ),
    tactics=tuple(starmap(ConvTactic, product((1, 2, 4, 8), (64, 128, 256), (0, 8, 16, 32, 64, 128, 256)))),
    rejects=rejects,
    specialise=_specialise,
    geometry=_geometry,
    bind=_bind,
)

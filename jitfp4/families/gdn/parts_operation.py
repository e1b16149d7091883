"""The operations before gdn/prefill_wgmma where it divides sequences: parts alone, and the states before them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch

from jitfp4.arch import Arch
from jitfp4.dtypes import HALVES
from jitfp4.families.gdn.kernels.prefill_join import PREFILL_JOIN, JoinTactic
from jitfp4.families.gdn.kernels.prefill_parts import PREFILL_PARTS, PartsTactic
from jitfp4.families.gdn.prefill_arguments import (
    CHUNK,
    JoinArguments,
    JoinProblem,
    PartsArguments,
    PartsProblem,
    chunk_place,
)
from jitfp4.families.gdn.problem import HEAD_DIMS, VALUE_DIMS
from jitfp4.layouts import ceil_div
from jitfp4.operation import Operation
from jitfp4.reference import gdn_prefill as reference
from jitfp4.selection import Row, Table


def _parts_problem(arguments: PartsArguments) -> PartsProblem:
    a = arguments
    return PartsProblem(
        dtype=HALVES[a.k.dtype],
        head_dim=a.k.shape[2],
        value_dim=a.v.shape[2],
        tokens=a.k.shape[0],
        sequences=a.cu_seqlens.shape[0] - 1,
        heads=a.part_states.shape[1],
        part_chunks=a.part_chunks,
    )


def _parts_problems(arch: Arch) -> Iterator[PartsProblem]:
    for dtype, head_dim in product(HALVES.values() if arch.has_wgmma else (), HEAD_DIMS):
        for value_dim in VALUE_DIMS[head_dim]:
            yield PartsProblem(dtype, head_dim, value_dim, tokens=8192, sequences=1, heads=8, part_chunks=16)


def _parts_reference(arguments: PartsArguments) -> None:
    a, size = arguments, arguments.part_chunks * CHUNK
    ones = torch.ones(a.k.shape[0], a.part_states.shape[1])
    decay, beta = (ones if gate is None else gate for gate in (a.g, a.beta))
    for n, (first, end) in enumerate(reference.sequences(a.cu_seqlens, a.k.shape[0])):
        place = chunk_place(first, n, size)
        for at, start in enumerate(range(first, end - size, size)):
            one = slice(start, start + size)
            a.part_states[place + at] = reference.part(a.k[one], a.v[one], decay[one], beta[one], a.use_qk_l2norm)


PREFILL_PARTS_OPERATION = Operation(
    PartsArguments,
    name="gated_delta_rule_parts",
    kernels=(PREFILL_PARTS,),
    problem=_parts_problem,
    problems=_parts_problems,
    tables=(Table((Row(PartsTactic(128)), Row(PartsTactic(64))), measured=None),),
    reference=_parts_reference,
    output="part_states",
    aligned=("k", "v", "products", "part_states"),
    exclusive=("part_states",),
    growing=("tokens", "sequences", "part_chunks"),
)


def _join_problem(arguments: JoinArguments) -> JoinProblem:
    _, heads, rows, head_dim = arguments.part_states.shape
    return JoinProblem(head_dim, rows - head_dim, arguments.cu_seqlens.shape[0] - 1, heads)


def _join_problems(arch: Arch) -> Iterator[JoinProblem]:
    for head_dim in HEAD_DIMS if arch.has_wgmma else ():
        for value_dim in VALUE_DIMS[head_dim]:
            yield JoinProblem(head_dim, value_dim, sequences=1, heads=8)


def _join_reference(arguments: JoinArguments) -> None:
    a, size = arguments, arguments.part_chunks * CHUNK
    value_dim = a.part_states.shape[2] - a.part_states.shape[3]
    for n, (first, end) in enumerate(reference.sequences(a.cu_seqlens, a.tokens)):
        slot = n if a.state_indices is None else int(a.state_indices[n])
        if not 0 <= slot < a.pool:
            continue
        before = a.part_states[:, :, :value_dim]
        h = torch.zeros_like(before[0]) if a.initial_state is None else a.initial_state[slot].float()
        place = chunk_place(first, n, size)
        for at in range(place, place + max(1, ceil_div(end - first, size))):
            added = before[at].clone()
            before[at] = h
            h = h @ a.part_states[at, :, value_dim:] + added


PREFILL_JOIN_OPERATION = Operation(
    JoinArguments,
    name="gated_delta_rule_join",
    kernels=(PREFILL_JOIN,),
    problem=_join_problem,
    problems=_join_problems,
    tables=(Table((Row(JoinTactic()),), measured=None),),
    reference=_join_reference,
    output="part_states",
    aligned=("part_states", "initial_state"),
    exclusive=("part_states",),
    growing=("sequences",),
)

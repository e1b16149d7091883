"""The operation behind chunk_gated_delta_rule()."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from jitfp4.arch import Arch
from jitfp4.dtypes import HALVES
from jitfp4.families.gdn.kernels.prefill import PREFILL, PrefillTactic
from jitfp4.families.gdn.kernels.prefill_wgmma import PREFILL_WGMMA, WgmmaTactic
from jitfp4.families.gdn.prefill_arguments import PrefillArguments, PrefillProblem
from jitfp4.families.gdn.problem import HEAD_DIMS, VALUE_DIMS
from jitfp4.operation import Operation
from jitfp4.reference import gdn_prefill as reference
from jitfp4.selection import Row, Table

_FEWEST = 8  # states whose CTAs of 16 rows are a half of the SMs of an H200: shorter chunks count most
_FEW = 33  # states whose CTAs of 32 rows are no more than the SMs of an H200
_MANY = 96  # states from which on it pays to make a chunk's products beside them
_HALF = 66  # states whose CTAs of 64 rows are no more, if V is 128


def _rows() -> Iterator[Row[PrefillTactic | WgmmaTactic]]:
    yield Row(WgmmaTactic(64, divided=True), {"few_and_long": True})
    yield Row(WgmmaTactic(64), {"states": _HALF})
    yield Row(WgmmaTactic(128), {"states": _MANY})
    yield Row(WgmmaTactic(128, fused=True), {"value_dim": 128})  # each CTA of 256 rows would make the products
    yield Row(WgmmaTactic(128))
    yield Row(WgmmaTactic(64))
    for stages in (3, 2, 1):  # fewer, where they do not fit
        yield Row(PrefillTactic(16, stages), {"states": _FEWEST})
    for rows, stages in ((32, 2), (32, 1)):
        yield Row(PrefillTactic(rows, stages), {"states": _FEW})
    for rows, stages in ((64, 2), (32, 2), (32, 1)):
        yield Row(PrefillTactic(rows, stages))


TABLE = Table(tuple(_rows()), measured=None)


def _problem(arguments: PrefillArguments) -> PrefillProblem:
    a = arguments
    return PrefillProblem(
        dtype=HALVES[a.q.dtype],
        head_dim=a.q.shape[2],
        value_dim=a.v.shape[2],
        tokens=a.q.shape[0],
        sequences=a.cu_seqlens.shape[0] - 1,
        heads=a.output.shape[1],
    )


def problems(_arch: Arch) -> Iterator[PrefillProblem]:
    """Problems that reach each row of the table, in each dtype."""
    for dtype, head_dim in product(HALVES.values(), HEAD_DIMS):
        for value_dim, (states, tokens) in product(
            VALUE_DIMS[head_dim], ((8, 8192), (32, 8192), (96, 8192), (128, 8192), (256, 1 << 16))
        ):
            yield PrefillProblem(dtype, head_dim, value_dim, tokens, states // 8, heads=8)


def _reference(arguments: PrefillArguments) -> None:
    a = arguments
    reference.prefill(
        (a.q, a.k, a.v),
        (a.g, a.beta),
        a.scale,
        a.final_state if a.in_place else a.initial_state,
        a.final_state,
        a.cu_seqlens,
        a.state_indices,
        (a.state_checkpoints, a.checkpoint_cu_starts, a.checkpoint_every_n_tokens),
        a.output,
        use_qk_l2norm=a.use_qk_l2norm,
    )


GATED_DELTA_RULE_PREFILL = Operation(
    PrefillArguments,
    name="gated_delta_rule_prefill",
    kernels=(PREFILL, PREFILL_WGMMA),
    problem=_problem,
    problems=problems,
    tables=(TABLE,),
    reference=_reference,
    output="output",
    aligned=("q", "k", "v", "initial_state", "final_state", "state_checkpoints", "output"),
    exclusive=("output", "final_state", "state_checkpoints"),
    growing=("tokens", "sequences"),
)

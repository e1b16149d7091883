"""The operation behind the family's functions: its arguments, its kernels, its reference."""

from __future__ import annotations

from jitfp4.dtypes import HALVES
from jitfp4.families.gdn.arguments import Arguments
from jitfp4.families.gdn.kernels import chunk, delta_rule
from jitfp4.families.gdn.launches import head_gap
from jitfp4.families.gdn.problem import STATE_DTYPES, Problem, StateLayout
from jitfp4.families.gdn.tables import TABLE, problems
from jitfp4.operation import Operation
from jitfp4.reference import gdn as reference


def _problem(arguments: Arguments) -> Problem:
    batch, tokens, value_heads, value_dim = arguments.v.shape
    steps, step_slots = arguments.intermediate_states_buffer, arguments.ssm_state_indices
    head_dim, dtype = arguments.q.shape[3], arguments.q.dtype
    apart = head_gap(arguments.state) != 0 or (steps is not None and head_gap(steps) != 0)
    return Problem(
        dtype=HALVES[dtype],
        state_dtype=STATE_DTYPES[arguments.state.dtype],
        state_layout=StateLayout.KV if arguments.k_major else StateLayout.VK,
        head_dim=head_dim,
        value_dim=value_dim,
        tokens=tokens,
        batch=batch,
        value_heads=value_heads,
        store_steps=steps is not None or step_slots is not None,
        step_slots=step_slots is not None,
        general=apart or value_dim != head_dim or arguments.a.dtype != dtype or arguments.b.dtype != dtype,
    )


GATED_DELTA_RULE = Operation(
    Arguments,
    name="gated_delta_rule",
    kernels=(delta_rule.KERNEL, chunk.KERNEL),
    problem=_problem,
    problems=problems,
    tables=(TABLE,),
    reference=lambda arguments: reference.gated_delta_rule(*arguments[:-2]),
    output="output",
    aligned=("q", "k", "v", "state", "output", "intermediate_states_buffer"),
    exclusive=("output", "state", "intermediate_states_buffer"),
    growing=("batch",),
)

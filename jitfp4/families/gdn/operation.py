"""The operation behind the family's functions: its arguments, its kernels, its reference."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from jitfp4.dtypes import HALVES
from jitfp4.families.gdn import problem as p
from jitfp4.families.gdn.tables import CHUNK_TACTICS, TABLE, WALK_TACTICS, problems
from jitfp4.kernel import Kernel, Plan
from jitfp4.operation import Operation, Written
from jitfp4.reference import gdn as reference
from jitfp4.spec import F32, I64, Param, Ptr

BIAS_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class Arguments(NamedTuple):
    """The arguments of gated_delta_rule_mtp(); ``k_major``: a head's state is [K, V]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    state: Written
    A_log: torch.Tensor
    a: torch.Tensor
    dt_bias: torch.Tensor
    b: torch.Tensor
    scale: float
    output: Written
    initial_state_indices: torch.Tensor | None
    output_state_indices: torch.Tensor | None
    intermediate_states_buffer: Written | None
    ssm_state_indices: torch.Tensor | None
    update_state: bool
    use_qk_l2norm: bool
    k_major: bool
    enable_pdl: bool | None
    names: str


def _problem(arguments: Arguments) -> p.Problem:
    batch, tokens, value_heads, value_dim = arguments.v.shape
    steps, step_slots = arguments.intermediate_states_buffer, arguments.ssm_state_indices
    head_dim, dtype = arguments.q.shape[3], arguments.q.dtype
    apart = _head_gap(arguments.state) != 0 or (steps is not None and _head_gap(steps) != 0)
    return p.Problem(
        dtype=HALVES[dtype],
        state_dtype=p.STATE_DTYPES[arguments.state.dtype],
        state_layout=p.StateLayout.KV if arguments.k_major else p.StateLayout.VK,
        head_dim=head_dim,
        value_dim=value_dim,
        tokens=tokens,
        batch=batch,
        value_heads=value_heads,
        store_steps=steps is not None or step_slots is not None,
        step_slots=step_slots is not None,
        general=apart or value_dim != head_dim or arguments.a.dtype != dtype or arguments.b.dtype != dtype,
    )


def _bind(arguments: Arguments, _plan: Plan) -> dict[str, Any]:
    q, k, v, a, b, state = (getattr(arguments, name) for name in ("q", "k", "v", "a", "b", "state"))
    slots, write_slots = arguments.initial_state_indices, arguments.output_state_indices
    write_slots = slots if write_slots is None else write_slots
    buffer, step_slots = arguments.intermediate_states_buffer, arguments.ssm_state_indices
    steps = state if buffer is None else buffer
    step_strides = (0, state.stride(0)) if buffer is None else buffer.stride()[:2]
    strides = {
        f"{name}_{axis}_stride": tensor.stride(place)
        for name, tensor in (("q", q), ("k", k), ("v", v), ("a", a), ("b", b))
        for place, axis in enumerate(("batch", "token"))
    }
    return strides | {
        "q": q,
        "k": k,
        "v": v,
        "a": a,
        "b": b,
        "a_log": arguments.A_log,
        "dt_bias": arguments.dt_bias,
        "state": state,
        "slots": slots,
        "write_slots": write_slots,
        "steps": steps,
        "step_slots": step_slots,
        "out": arguments.output,
        "scale": arguments.scale,
        "batch": q.shape[0],
        "tokens": q.shape[1],
        "value_heads": v.shape[2],
        "heads_ratio": v.shape[2] // q.shape[2],
        "pool": state.shape[0],
        "state_stride": state.stride(0),
        "steps_batch_stride": step_strides[0],
        "steps_token_stride": step_strides[1],
        "dt_bias_type": BIAS_TYPES[arguments.dt_bias.dtype],
        "step_slot_bytes": _width(step_slots),
        "slot_bytes": _width(slots),
        "write_slot_bytes": _width(write_slots),
        "update_state": int(arguments.update_state),
        "l2norm": int(arguments.use_qk_l2norm),
        "a_bytes": a.element_size(),
        "b_bytes": b.element_size(),
        "state_head_gap": _head_gap(state),
        "steps_head_gap": _head_gap(steps),
    }


def _head_gap(states: torch.Tensor) -> int:
    """Elements between the states of neighbouring heads in a tensor [..., heads, rows, columns]."""
    heads, rows, columns = states.shape[-3:]
    return states.stride(-3) - rows * columns if heads > 1 else 0


def _width(indices: torch.Tensor | None) -> int:
    """Bytes of an index; 0 if there is no list of indices."""
    return 0 if indices is None else indices.element_size()


_PARAMS: tuple[Param, ...] = (
    Ptr("q", "const In", "[batch, tokens, heads, K]"),
    Ptr("k", "const In", "[batch, tokens, heads, K]"),
    Ptr("v", "const In", "[batch, tokens, value_heads, V]"),
    Ptr("a", "const void", "[batch, tokens, value_heads] of a_bytes"),
    Ptr("b", "const void", "[batch, tokens, value_heads] of b_bytes"),
    Ptr("a_log", "const float", "[value_heads]"),
    Ptr("dt_bias", "const void", "[value_heads] of dt_bias_type"),
    Ptr("state", "State", "[pool, value_heads, V, K], or K, V"),
    Ptr("slots", "const void", "[batch], integers of slot_bytes; outside the pool: no state, output zero"),
    Ptr("write_slots", "const void", "[batch], integers of write_slot_bytes; outside the pool: skipped"),
    Ptr("steps", "State", "[batch, tokens, value_heads, V, K], or [pool, ...] with step_slots"),
    Ptr("step_slots", "const void", "[batch, tokens], integers of step_slot_bytes; outside the pool: skipped"),
    Ptr("out", "In", "[batch, tokens, value_heads, V]"),
    F32("scale", "of q"),
    I64("batch"),
    I64("tokens", "<= kMaxTokens", member="int"),
    I64("value_heads"),
    I64("heads_ratio", "value heads that share a head of q and k", member="int"),
    I64("pool", "slots of state"),
    I64("q_batch_stride", "elements, as all strides"),
    I64("q_token_stride"),
    I64("k_batch_stride"),
    I64("k_token_stride"),
    I64("v_batch_stride"),
    I64("v_token_stride"),
    I64("a_batch_stride"),
    I64("a_token_stride"),
    I64("b_batch_stride"),
    I64("b_token_stride"),
    I64("state_stride"),
    I64("steps_batch_stride"),
    I64("steps_token_stride", "of a slot with step_slots"),
    I64("dt_bias_type", "0 float, 1 bf16, 2 f16", member="int"),
    I64("step_slot_bytes", "0: steps has its own strides", member="int"),
    I64("slot_bytes", "0, 4 or 8; 0: request n uses slot n", member="int"),
    I64("write_slot_bytes", "likewise", member="int"),
    I64("update_state", "0: write_slots is not used", member="bool"),
    I64("l2norm", "0: q and k as they are", member="bool"),
    I64("a_bytes", "2: In, 4: float", member="int"),
    I64("b_bytes", "likewise", member="int"),
    I64("state_head_gap", "from the end of a head's state to the next head's"),
    I64("steps_head_gap", "likewise"),
)

DELTA_RULE = Kernel(
    name="gdn/delta_rule",
    spec=p.WalkSpec,
    params=_PARAMS,
    tactics=WALK_TACTICS,
    rejects=p.walk_rejects,
    specialise=p.walk_spec,
    geometry=p.walk_geometry,
    bind=_bind,
)
CHUNK = Kernel(
    name="gdn/chunk",
    spec=p.ChunkSpec,
    params=_PARAMS,
    tactics=CHUNK_TACTICS,
    rejects=p.chunk_rejects,
    specialise=p.chunk_spec,
    geometry=p.chunk_geometry,
    bind=_bind,
)

GATED_DELTA_RULE = Operation(
    Arguments,
    name="gated_delta_rule",
    kernels=(DELTA_RULE, CHUNK),
    problem=_problem,
    problems=problems,
    tables=(TABLE,),
    reference=lambda arguments: reference.gated_delta_rule(*arguments[:-2]),
    output="output",
    aligned=("q", "k", "v", "state", "output", "intermediate_states_buffer"),
    exclusive=("output", "state", "intermediate_states_buffer"),
    growing=("batch",),
)

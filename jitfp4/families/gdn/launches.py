"""What the launches of the kernels for a few tokens have in common: parameters, their values, the grid; and limits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch

from jitfp4.arch import Arch
from jitfp4.errors import ArgumentError
from jitfp4.families.gdn.arguments import Arguments
from jitfp4.families.gdn.problem import AHEAD_GRAIN, HEAD_DIMS, VALUE_DIMS, Problem
from jitfp4.formats import DType
from jitfp4.kernel import Plan
from jitfp4.layouts import ceil_div
from jitfp4.spec import F32, I64, MAX_GRID_YZ, WARP, Geometry, Param, Ptr

ProblemT = TypeVar("ProblemT")
TacticT = TypeVar("TacticT")
BIAS_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

PARAMS: tuple[Param, ...] = (
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


def bind(arguments: Arguments, _plan: Plan) -> dict[str, Any]:
    """The values of PARAMS."""
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
        "state_head_gap": head_gap(state),
        "steps_head_gap": head_gap(steps),
    }


def head_gap(states: torch.Tensor) -> int:
    """Elements between the states of neighbouring heads in a tensor [..., heads, rows, columns]."""
    heads, rows, columns = states.shape[-3:]
    return states.stride(-3) - rows * columns if heads > 1 else 0


def _width(indices: torch.Tensor | None) -> int:
    """Bytes of an index; 0 if there is no list of indices."""
    return 0 if indices is None else indices.element_size()


class StateSpec(Protocol):
    """What the specs of both kernels have: CTAs of ``warps`` warps that take ``tile_v`` rows of a state."""

    @property
    def head_dim(self) -> int: ...
    @property
    def value_dim(self) -> int: ...
    @property
    def state_dtype(self) -> DType: ...
    @property
    def general(self) -> bool: ...
    @property
    def tile_v(self) -> int: ...
    @property
    def warps(self) -> int: ...
    @property
    def shared_bytes(self) -> int: ...


def require(spec: StateSpec, name: str, allowed: tuple[int, ...]) -> None:
    """Raises ArgumentError."""
    if getattr(spec, name) not in allowed:
        raise ArgumentError(name, getattr(spec, name), f"one of {allowed}")


def require_dims(spec: StateSpec) -> None:
    require(spec, "head_dim", HEAD_DIMS)
    allowed = VALUE_DIMS[spec.head_dim]
    require(spec, "value_dim", allowed if spec.general and spec.state_dtype is DType.F32 else allowed[:1])


def require_grain(ahead: int) -> None:
    if ahead < 0 or ahead % AHEAD_GRAIN:
        raise ArgumentError("ahead", ahead, f"a multiple of {AHEAD_GRAIN}")


def grid(problem: Problem, spec: StateSpec, least_shared_bytes: int) -> Geometry:
    """``value_dim / tile_v`` CTAs for each value head along x; requests along y and, beyond the limit of y, z."""
    grid_y = min(problem.batch, MAX_GRID_YZ)
    ctas = (problem.value_heads * (spec.value_dim // spec.tile_v), grid_y, ceil_div(problem.batch, grid_y))
    shared_bytes = max(spec.shared_bytes, least_shared_bytes)
    return Geometry(grid=ctas, block=(WARP * spec.warps, 1, 1), shared_bytes=shared_bytes)


def bound(problem: Problem, bounds: tuple[int, ...]) -> int:
    """The least bound of a call's tokens. Raises ArgumentError for more than the last."""
    if problem.tokens > bounds[-1]:
        raise ArgumentError("tokens", problem.tokens, f"at most {bounds[-1]}")
    return next(most for most in bounds if problem.tokens <= most)


class Sized(Protocol):
    """A spec of CTAs that take so many bytes of shared memory."""

    @property
    def shared_bytes(self) -> int: ...


def refused(
    specialise: Callable[[ProblemT, TacticT], Sized], problem: ProblemT, tactic: TacticT, arch: Arch
) -> str | None:
    """Why a tactic's specialisation cannot be, or its CTA does not fit on an SM."""
    try:
        spec = specialise(problem, tactic)
    except ArgumentError as error:
        return str(error)
    fits = spec.shared_bytes <= arch.shared_bytes
    return None if fits else f"it needs {spec.shared_bytes} bytes of shared memory"

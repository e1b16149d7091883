"""gdn/prefill_join: the state before each part of a prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jitfp4.arch import Arch, names_with
from jitfp4.families.gdn.prefill_arguments import JoinArguments, JoinProblem
from jitfp4.kernel import Kernel, Plan
from jitfp4.spec import I64, Geometry, KernelSpec, Ptr


@dataclass(frozen=True, slots=True)
class JoinTactic:
    """There is one way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinSpec(KernelSpec):
    """A CTA takes ``rows`` rows of a state, a thread four in a column."""

    head_dim: int
    value_dim: int

    rows = 8  # 128 CTAs for eight heads of 128 rows

    @property
    def threads(self) -> int:
        """Of a CTA."""
        return self.head_dim * (self.rows // 4)


def _specialise(problem: JoinProblem, _tactic: JoinTactic) -> JoinSpec:
    return JoinSpec(head_dim=problem.head_dim, value_dim=problem.value_dim)


def _rejects(_problem: JoinProblem, _tactic: JoinTactic, arch: Arch) -> str | None:
    return None if arch.has_wgmma else f"only kernels of {names_with('has_wgmma')} divide sequences"


def _geometry(problem: JoinProblem, tactic: JoinTactic, _arch: Arch) -> Geometry:
    spec = _specialise(problem, tactic)
    ctas = problem.sequences * problem.heads * (problem.value_dim // spec.rows)
    return Geometry(grid=(ctas, 1, 1), block=(spec.threads, 1, 1))


def _bind(arguments: JoinArguments, plan: Plan) -> dict[str, Any]:
    a = arguments
    return {
        "part_states": a.part_states,
        "cu_seqlens": a.cu_seqlens,
        "initial_state": a.initial_state,
        "slots": a.state_indices,
        "cu_seqlens_bytes": a.cu_seqlens.element_size(),
        "tokens": a.tokens,
        "heads": plan.problem.heads,
        "part_chunks": a.part_chunks,
        "state_bytes": 4 if a.initial_state is None else a.initial_state.element_size(),
        "pool": a.pool,
        "slot_bytes": 0 if a.state_indices is None else a.state_indices.element_size(),
        "initial_stride": 0 if a.initial_state is None else a.initial_state.stride(0),
    }


PREFILL_JOIN = Kernel(
    name="gdn/prefill_join",
    spec=JoinSpec,
    params=(
        Ptr("part_states", "float", "[places of parts, heads, V + K, K]; V rows become states before"),
        Ptr("cu_seqlens", "const void", "[sequences + 1], integers of cu_seqlens_bytes"),
        Ptr("initial_state", "const uint8", "[pool, heads, V, K] of state_bytes; null: 0"),
        Ptr("slots", "const void", "[sequences], of slot_bytes; outside the pool: skipped"),
        I64("cu_seqlens_bytes", "4 or 8"),
        I64("tokens", "of all sequences"),
        I64("pool", "slots"),
        I64("heads", member="uint32"),
        I64("part_chunks", "of a part"),
        I64("state_bytes", "4: float32; 2: bf16", member="int"),
        I64("slot_bytes", "0, 4 or 8; 0: sequence n uses slot n", member="int"),
        I64("initial_stride", "elements of a slot"),
    ),
    tactics=(JoinTactic(),),
    rejects=_rejects,
    specialise=_specialise,
    geometry=_geometry,
    bind=_bind,
)

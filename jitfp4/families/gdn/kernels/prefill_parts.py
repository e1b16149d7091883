"""gdn/prefill_parts: parts of prompts, each from no state, and their maps of the state before to what it adds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jitfp4.arch import Arch, names_with
from jitfp4.errors import ArgumentError
from jitfp4.families.gdn.prefill_arguments import CHUNK, PartsArguments, PartsProblem, places
from jitfp4.families.gdn.wgmma_parts import PARAMETERS, PartsSpec
from jitfp4.kernel import Kernel, Plan
from jitfp4.spec import Geometry


@dataclass(frozen=True, slots=True)
class PartsTactic:
    """``rows``: of a state or a map, in a CTA, 64 for each warpgroup that computes."""

    rows: int


def _specialise(problem: PartsProblem, tactic: PartsTactic) -> PartsSpec:
    return PartsSpec(dtype=problem.dtype, head_dim=problem.head_dim, value_dim=problem.value_dim, rows=tactic.rows)


def _rejects(problem: PartsProblem, tactic: PartsTactic, arch: Arch) -> str | None:
    if not arch.has_wgmma:
        return f"its products are instructions of {names_with('has_wgmma')}"
    try:
        _specialise(problem, tactic)
    except ArgumentError as error:
        return str(error)
    return None


def _geometry(problem: PartsProblem, tactic: PartsTactic, _arch: Arch) -> Geometry:
    spec = _specialise(problem, tactic)
    items = places(problem.tokens, problem.sequences, problem.part_chunks * CHUNK)
    ctas = items * problem.heads * ((problem.value_dim + problem.head_dim) // spec.rows)
    return Geometry(grid=(ctas, 1, 1), block=(spec.threads, 1, 1), shared_bytes=spec.shared_bytes)


def _bind(arguments: PartsArguments, plan: Plan) -> dict[str, Any]:
    a, heads = arguments, plan.problem.heads
    unused = ("q", "initial_state", "final_state", "slots", "checkpoints", "checkpoint_starts", "out", "g", "beta")
    none = ("q_ratio", "q_stride", "state_bytes", "pool", "slot_bytes", "initial_stride", "final_stride")
    return {
        **dict.fromkeys(unused),
        **dict.fromkeys((*none, "checkpoint_every", "checkpoint_count", "start_bytes", "scale", "l2norm"), 0),
        "k": a.k,
        "v": a.v,
        "products": a.products,
        "cu_seqlens": a.cu_seqlens,
        "cu_seqlens_bytes": a.cu_seqlens.element_size(),
        "tokens": plan.problem.tokens,
        "heads": heads,
        "k_ratio": heads // a.k.shape[1],
        "v_ratio": heads // a.v.shape[1],
        "k_stride": a.k.stride(0),
        "v_stride": a.v.stride(0),
        "part_states": a.part_states,
        "part_chunks": a.part_chunks,
        "sequences": plan.problem.sequences,
    }


PREFILL_PARTS = Kernel(
    name="gdn/prefill_parts",
    spec=PartsSpec,
    params=PARAMETERS,
    tactics=(PartsTactic(128), PartsTactic(64)),
    rejects=_rejects,
    specialise=_specialise,
    geometry=_geometry,
    bind=_bind,
)

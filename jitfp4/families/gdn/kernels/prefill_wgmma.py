"""gdn/prefill_wgmma: the chunks of each prompt in their order, on the warpgroup products of sm_90a."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from jitfp4.arch import Arch, names_with
from jitfp4.errors import ArgumentError
from jitfp4.families.gdn.parts_operation import PREFILL_JOIN_OPERATION, PREFILL_PARTS_OPERATION
from jitfp4.families.gdn.prefill_arguments import (
    CHUNK,
    JoinArguments,
    PartsArguments,
    PrefillArguments,
    PrefillProblem,
    places,
)
from jitfp4.families.gdn.prefill_parameters import BEFORE, bind, initial_of, pool_of, scratch
from jitfp4.families.gdn.wgmma_parts import PARAMETERS, WgmmaSpec
from jitfp4.kernel import Before, Kernel, Plan, Scratch
from jitfp4.layouts import ceil_div
from jitfp4.spec import Geometry

_HALF = 66  # of the SMs of an H200: a part's CTAs of 128 rows are as many for its map as for its state
_FEWEST = 4  # chunks of a part


@dataclass(frozen=True, slots=True)
class WgmmaTactic:
    """Of a kernel.

    ``rows``: of a state, in a CTA, 64 for each warpgroup that computes; ``divided``: sequences in parts; ``fused``: no
    kernel before it.
    """

    rows: int
    divided: bool = False
    fused: bool = False


TACTICS = (
    *(WgmmaTactic(rows, divided) for divided in (False, True) for rows in (64, 128)),
    WgmmaTactic(128, fused=True),
)


def part_chunks(problem: PrefillProblem) -> int:
    """Chunks of a part, so that the parts of all sequences fill an H200 once."""
    return max(_FEWEST, ceil_div(problem.tokens // CHUNK, max(1, _HALF // problem.heads)))


def _specialise(problem: PrefillProblem, tactic: WgmmaTactic) -> WgmmaSpec:
    return WgmmaSpec(dtype=problem.dtype, head_dim=problem.head_dim, value_dim=problem.value_dim, **asdict(tactic))


def _rejects(problem: PrefillProblem, tactic: WgmmaTactic, arch: Arch) -> str | None:
    if not arch.has_wgmma:
        return f"its products are instructions of {names_with('has_wgmma')}"
    if tactic.fused and (tactic.divided or tactic.rows != 128):
        return "only CTAs of 128 rows make the products of whole sequences"
    try:
        _specialise(problem, tactic)
    except ArgumentError as error:
        return str(error)
    return None


def _geometry(problem: PrefillProblem, tactic: WgmmaTactic, _arch: Arch) -> Geometry:
    spec = _specialise(problem, tactic)
    items = places(problem.tokens, problem.sequences, part_chunks(problem) * CHUNK)
    ctas = (items if tactic.divided else problem.sequences) * problem.heads * (problem.value_dim // spec.rows)
    return Geometry(grid=(ctas, 1, 1), block=(spec.threads, 1, 1), shared_bytes=spec.shared_bytes)


def _scratch(arguments: PrefillArguments, plan: Plan) -> dict[str, Scratch]:
    problem = plan.problem
    items = places(problem.tokens, problem.sequences, part_chunks(problem) * CHUNK) if plan.spec.divided else 0
    shape = (items, problem.heads, problem.value_dim + problem.head_dim, problem.head_dim)
    products = {"products": Scratch((0,), torch.uint8)} if plan.spec.fused else scratch(arguments, plan)
    return {**products, "part_states": Scratch(shape, torch.float32)}


def _parts(
    arguments: PrefillArguments, plan: Plan, products: torch.Tensor, part_states: torch.Tensor
) -> PartsArguments:
    a = arguments
    return PartsArguments(
        k=a.k,
        v=a.v,
        g=a.g,
        beta=a.beta,
        cu_seqlens=a.cu_seqlens,
        products=products,
        part_states=part_states,
        part_chunks=part_chunks(plan.problem),
        use_qk_l2norm=a.use_qk_l2norm,
        enable_pdl=a.enable_pdl,
    )


def _join(arguments: PrefillArguments, plan: Plan, part_states: torch.Tensor, **_others: torch.Tensor) -> JoinArguments:
    return JoinArguments(
        part_states=part_states,
        cu_seqlens=arguments.cu_seqlens,
        initial_state=initial_of(arguments),
        state_indices=arguments.state_indices,
        part_chunks=part_chunks(plan.problem),
        tokens=plan.problem.tokens,
        pool=pool_of(arguments, plan.problem),
        enable_pdl=arguments.enable_pdl,
    )


def _bind(arguments: PrefillArguments, plan: Plan, products: torch.Tensor, part_states: torch.Tensor) -> dict[str, Any]:
    return bind(arguments, plan, products) | {
        "part_states": part_states,
        "part_chunks": part_chunks(plan.problem),
        "sequences": plan.problem.sequences,
        "g": arguments.g,
        "beta": arguments.beta,
        "scale": arguments.scale,
        "l2norm": int(arguments.use_qk_l2norm),
    }


PREFILL_WGMMA = Kernel(
    name="gdn/prefill_wgmma",
    spec=WgmmaSpec,
    params=PARAMETERS,
    tactics=TACTICS,
    rejects=_rejects,
    specialise=_specialise,
    geometry=_geometry,
    bind=_bind,
    scratch=_scratch,
    before=(*BEFORE, Before(PREFILL_PARTS_OPERATION, _parts), Before(PREFILL_JOIN_OPERATION, _join)),
)

"""A batch of products of two FP4 matrices by tcgen05 products of 64 columns, of the filled rows of each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from jitfp4.arch import Arch, names_with
from jitfp4.families.gemm.arguments import MaskedArguments
from jitfp4.families.gemm.kernels.blockscaled import PARAMS, SliceSpec, cuts, lacks, launch, most_stages, values, wastes
from jitfp4.families.gemm.problem import MaskedProblem
from jitfp4.formats import NVFP4, DType
from jitfp4.kernel import Kernel, Plan
from jitfp4.spec import I64, Geometry, Ptr

MOST_ENTRIES = 1024
_RIGHT_ROWS = 16  # of which a pair of CTAs takes multiples


@dataclass(frozen=True, slots=True)
class MaskedTactic:
    """The tunable fields of MaskedSpec."""

    tile_n: int
    ctas: int
    stages: int
    swap_ab: bool = False
    tma_store: bool = True
    cluster_m: int = 1
    cluster_n: int = 1
    split: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedSpec(SliceSpec):
    """With the numbers of groups of tiles of every entry in shared memory."""

    @property
    def list_bytes(self) -> int:
        return 4 * MOST_ENTRIES


def _tactics() -> Iterator[MaskedTactic]:
    """Every tactic, with as many stages as fit with NVFP4, whose scales take more memory than MXFP4's."""
    for cut in cuts():
        fields = cut._asdict()
        yield MaskedTactic(
            stages=most_stages(MaskedSpec(format=NVFP4, out_dtype=DType.BF16, stages=2, **fields)), **fields
        )


def specialise(problem: MaskedProblem, tactic: MaskedTactic) -> MaskedSpec:
    """The spec of a tactic for a problem."""
    return MaskedSpec(format=problem.format, out_dtype=problem.out_dtype, **asdict(tactic))


def rejects(problem: MaskedProblem, tactic: MaskedTactic, arch: Arch) -> str | None:
    """Why a tactic cannot run a problem on an architecture."""
    if not arch.has_tcgen05:
        return f"its products are instructions of {names_with('has_tcgen05')}"
    if tactic.ctas == 2 and tactic.tile_n % _RIGHT_ROWS:
        return f"pairs take multiples of {_RIGHT_ROWS} rows of the right operand"
    if problem.entries > MOST_ENTRIES:
        return f"its list has room for {MOST_ENTRIES} entries"
    spec = specialise(problem, tactic)
    return lacks(problem.entry, spec, arch) or wastes(problem.entry, spec)


def _geometry(problem: MaskedProblem, tactic: MaskedTactic, arch: Arch) -> Geometry:
    return launch(problem.entry, specialise(problem, tactic), arch, problem.entries)


def _bind(arguments: MaskedArguments, plan: Plan) -> dict[str, Any]:
    entries = plan.problem.entries
    return values(arguments, plan, entries) | {"masked_m": arguments.masked_m, "entries": entries}


KERNEL = Kernel(
    name="gemm/blockscaled_masked",
    spec=MaskedSpec,
    params=(*PARAMS, Ptr("masked_m", "const int32", "[entries]"), I64("entries")),
    tactics=tuple(_tactics()),
    rejects=rejects,
    specialise=specialise,
    geometry=_geometry,
    bind=_bind,
)

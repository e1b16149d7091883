"""A batch of products of two FP4 matrices by mma.sync, of the filled rows of each, on every architecture."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from jitfp4.arch import Arch
from jitfp4.families.gemm.arguments import MaskedArguments
from jitfp4.families.gemm.kernels import portable
from jitfp4.families.gemm.kernels.portable import PortableSpec, PortableTactic
from jitfp4.families.gemm.problem import MaskedProblem
from jitfp4.formats import BlockFormat, DType
from jitfp4.kernel import Kernel, Plan
from jitfp4.layouts import SfLayout
from jitfp4.spec import MAX_GRID_YZ, Geometry, KernelSpec, Ptr


@dataclass(frozen=True, slots=True)
class PortableMaskedTactic(PortableTactic):
    """As for one product."""

    @classmethod
    def of(cls, tactic: PortableTactic) -> PortableMaskedTactic:
        return cls(**asdict(tactic))


@dataclass(frozen=True, slots=True, kw_only=True)
class PortableMaskedSpec(KernelSpec):
    """A PortableSpec whose scales are in 128x4."""

    format: BlockFormat
    out_dtype: DType
    tile_m: int
    tile_n: int
    warp_m: int
    warp_n: int
    groups: int
    stages: int
    scaled_mma: bool

    @property
    def of_entry(self) -> PortableSpec:
        return PortableSpec(a_layout=SfLayout.layout_128x4, **asdict(self))

    @property
    def threads(self) -> int:
        return self.of_entry.threads

    @property
    def shared_bytes(self) -> int:
        return self.of_entry.shared_bytes


def specialise(problem: MaskedProblem, tactic: PortableMaskedTactic) -> PortableMaskedSpec:
    """The spec of a tactic for a problem."""
    cut = asdict(tactic)
    del cut["split"]
    return PortableMaskedSpec(format=problem.format, out_dtype=problem.out_dtype, **cut)


def rejects(problem: MaskedProblem, tactic: PortableMaskedTactic, arch: Arch) -> str | None:
    """Why a tactic cannot run a problem on an architecture."""
    if problem.entries > MAX_GRID_YZ:
        return f"its grid has at most {MAX_GRID_YZ} entries"
    return portable.rejects(problem.entry, tactic, arch)


def geometry(problem: MaskedProblem, tactic: PortableMaskedTactic, arch: Arch) -> Geometry:
    """Grid: that of one product; z over entries."""
    one = portable.geometry(problem.entry, tactic, arch)
    return replace(one, grid=(*one.grid[:2], problem.entries))


def _bind(arguments: MaskedArguments, plan: Plan) -> dict[str, Any]:
    return portable.values(arguments, plan) | {"masked_m": arguments.masked_m}


KERNEL = Kernel(
    name="gemm/portable_masked",
    spec=PortableMaskedSpec,
    params=(*portable.KERNEL.params, Ptr("masked_m", "const int32", "[entries]")),
    tactics=tuple(PortableMaskedTactic.of(tactic) for tactic in portable.TACTICS),
    rejects=rejects,
    specialise=specialise,
    geometry=geometry,
    bind=_bind,
)

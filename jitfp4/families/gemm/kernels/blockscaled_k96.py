"""Two FP4 matrices by tcgen05 products of 96 columns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import ClassVar

from jitfp4.arch import Arch, names_with
from jitfp4.families.gemm.kernels.blockscaled import (
    ATOM_BYTES,
    PARAMS,
    WRITERS,
    BlockScaledSpec,
    bind,
    cuts,
    lacks,
    launch,
    most_stages,
    wastes,
)
from jitfp4.families.gemm.problem import Fp4Problem
from jitfp4.formats import NVFP4, DType
from jitfp4.kernel import Kernel
from jitfp4.spec import Geometry

_RIGHT_ROWS = 16


@dataclass(frozen=True, slots=True)
class K96Tactic:
    """The tunable fields of K96Spec."""

    tile_n: int
    ctas: int
    stages: int
    scale_stages: int
    swap_ab: bool = False
    tma_store: bool = True
    cluster_m: int = 1
    cluster_n: int = 1
    split: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class K96Spec(BlockScaledSpec):
    """Instructions of 96 columns, which may begin in one slice and end in the next.

    Scales have a separate ring of ``scale_stages`` stages.
    """

    scale_stages: int

    threads: ClassVar[int] = 32 * (WRITERS + 3)
    products: ClassVar[int] = 96
    step: ClassVar[int] = 768

    @property
    def whole_columns(self) -> int:
        return 4 * self.format.block

    @property
    def pieces(self) -> int:
        return 4 if self.format is NVFP4 else 2

    @property
    def scale_bytes(self) -> int:
        return self.scale_stages * ((1 + self.right_atoms) * self.scale_atoms * ATOM_BYTES + 16)


def _tactics() -> Iterator[K96Tactic]:
    """Every tactic, with as many stages as fit with NVFP4, whose scales take more memory than MXFP4's."""
    for cut in cuts():
        if cut.tile_n % _RIGHT_ROWS:
            continue
        fields = cut._asdict()
        long = K96Spec(format=NVFP4, out_dtype=DType.BF16, stages=2, scale_stages=3, **fields)
        long = replace(long, stages=most_stages(long))
        yield K96Tactic(stages=long.stages, scale_stages=most_stages(long, "scale_stages"), **fields)


def specialise(problem: Fp4Problem, tactic: K96Tactic) -> K96Spec:
    """The spec of a tactic for a problem."""
    return K96Spec(format=problem.format, out_dtype=problem.out_dtype, **asdict(tactic))


def rejects(problem: Fp4Problem, tactic: K96Tactic, arch: Arch) -> str | None:
    """Why a tactic cannot run a problem on an architecture."""
    if not arch.has_k96:
        return f"its products are instructions of {names_with('has_k96')}"
    if tactic.tile_n % _RIGHT_ROWS:
        return f"its products take multiples of {_RIGHT_ROWS} rows of the right operand"
    spec = specialise(problem, tactic)
    return lacks(problem, spec, arch) or wastes(problem, spec)


def geometry(problem: Fp4Problem, tactic: K96Tactic, arch: Arch) -> Geometry:
    """The geometry of a tactic for a problem."""
    return launch(problem, specialise(problem, tactic), arch)


KERNEL = Kernel(
    name="gemm/blockscaled_k96",
    spec=K96Spec,
    params=PARAMS,
    tactics=tuple(_tactics()),
    rejects=rejects,
    specialise=specialise,
    geometry=geometry,
    bind=bind,
)

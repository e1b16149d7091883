"""gdn/prefill: the chunks of each prompt in their order, with the state in registers."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from jitfp4.arch import Arch
from jitfp4.errors import ArgumentError
from jitfp4.families.gdn.launches import refused
from jitfp4.families.gdn.prefill_arguments import CHUNK, PRODUCTS_BYTES, PrefillProblem
from jitfp4.families.gdn.prefill_parameters import BEFORE, PARAMETERS, bind, scratch
from jitfp4.families.gdn.problem import HEAD_DIMS, VALUE_DIMS
from jitfp4.formats import DType
from jitfp4.kernel import Kernel
from jitfp4.spec import Geometry, KernelSpec


@dataclass(frozen=True, slots=True)
class PrefillTactic:
    """Fields of PrefillSpec."""

    rows: int
    stages: int


TACTICS = (*(PrefillTactic(rows, stages) for rows in (16, 32) for stages in (3, 2, 1)), PrefillTactic(64, 2))


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillSpec(KernelSpec):
    """A CTA has ``rows`` rows of a state; ``stages`` chunks are in shared memory."""

    dtype: DType
    head_dim: int
    value_dim: int
    rows: int
    stages: int

    threads = 2 * 128

    def __post_init__(self) -> None:
        if self.head_dim not in HEAD_DIMS:
            raise ArgumentError("head_dim", self.head_dim, f"one of {HEAD_DIMS}")
        if self.value_dim not in VALUE_DIMS[self.head_dim]:
            raise ArgumentError("value_dim", self.value_dim, f"one of {VALUE_DIMS[self.head_dim]}")
        if self.rows not in (16, 32, 64):
            raise ArgumentError("rows", self.rows, "16, 32 or 64")
        if self.stages not in (1, 2, 3):
            raise ArgumentError("stages", self.stages, "1 to 3")

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a CTA in bytes: stages of products, keys, queries and values; what warps give each other."""
        stage = PRODUCTS_BYTES + CHUNK * (2 * (self.head_dim + 8) + self.rows + 8) * 2
        given = self.rows * (2 * (self.head_dim + 8) + 3 * (CHUNK + 8)) * 2
        return self.stages * stage + given


def _specialise(problem: PrefillProblem, tactic: PrefillTactic) -> PrefillSpec:
    return PrefillSpec(
        dtype=problem.dtype,
        head_dim=problem.head_dim,
        value_dim=problem.value_dim,
        **asdict(tactic),
    )


def _rejects(problem: PrefillProblem, tactic: PrefillTactic, arch: Arch) -> str | None:
    return refused(_specialise, problem, tactic, arch)


def _geometry(problem: PrefillProblem, tactic: PrefillTactic, _arch: Arch) -> Geometry:
    spec = _specialise(problem, tactic)
    ctas = problem.states * (problem.value_dim // tactic.rows)
    return Geometry(grid=(ctas, 1, 1), block=(spec.threads, 1, 1), shared_bytes=spec.shared_bytes)


PREFILL = Kernel(
    name="gdn/prefill",
    spec=PrefillSpec,
    params=PARAMETERS,
    tactics=TACTICS,
    rejects=_rejects,
    specialise=_specialise,
    geometry=_geometry,
    bind=bind,
    scratch=scratch,
    before=BEFORE,
)

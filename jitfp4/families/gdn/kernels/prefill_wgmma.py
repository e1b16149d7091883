"""gdn/prefill_wgmma: the chunks of each prompt in their order, on the warpgroup products of sm_90a."""

from __future__ import annotations

from dataclasses import dataclass

from jitfp4.arch import Arch, names_with
from jitfp4.errors import ArgumentError
from jitfp4.families.gdn.prefill_arguments import CHUNK, PrefillProblem
from jitfp4.families.gdn.prefill_parameters import BEFORE, PARAMETERS, bind, scratch
from jitfp4.families.gdn.problem import HEAD_DIMS, VALUE_DIMS
from jitfp4.formats import DType
from jitfp4.kernel import Kernel
from jitfp4.layouts import round_up
from jitfp4.spec import Geometry, KernelSpec

_STAGES = 3
_SQUARE_BYTES = CHUNK * CHUNK * 2


@dataclass(frozen=True, slots=True)
class WgmmaTactic:
    """``rows``: of a state, in a CTA, 64 for each warpgroup that computes."""

    rows: int


TACTICS = (WgmmaTactic(64), WgmmaTactic(128))


@dataclass(frozen=True, slots=True, kw_only=True)
class WgmmaSpec(KernelSpec):
    """A CTA has ``rows`` rows of a state, 64 in each warpgroup; one more copies what they take."""

    dtype: DType
    head_dim: int
    value_dim: int
    rows: int

    def __post_init__(self) -> None:
        if self.head_dim not in HEAD_DIMS:
            raise ArgumentError("head_dim", self.head_dim, f"one of {HEAD_DIMS}")
        if self.value_dim not in VALUE_DIMS[self.head_dim]:
            raise ArgumentError("value_dim", self.value_dim, f"one of {VALUE_DIMS[self.head_dim]}")
        if self.value_dim % self.rows:
            raise ArgumentError("rows", self.rows, f"a divisor of {self.value_dim}, the value dimension")

    @property
    def threads(self) -> int:
        """Of a CTA."""
        return 128 * (self.rows // 64 + 1)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a CTA in bytes: stages of what is copied, and their barriers."""
        squares = 2 * (self.head_dim // CHUNK + 1) * _SQUARE_BYTES
        values, factors = CHUNK * (self.rows + 8) * 2, 3 * CHUNK * 4 + 16
        return round_up(_STAGES * round_up(squares + values + factors, 1024) + _STAGES * 16, 1024)


def _specialise(problem: PrefillProblem, tactic: WgmmaTactic) -> WgmmaSpec:
    return WgmmaSpec(dtype=problem.dtype, head_dim=problem.head_dim, value_dim=problem.value_dim, rows=tactic.rows)


def _rejects(problem: PrefillProblem, tactic: WgmmaTactic, arch: Arch) -> str | None:
    if not arch.has_wgmma:
        return f"its products are instructions of {names_with('has_wgmma')}"
    try:
        _specialise(problem, tactic)
    except ArgumentError as error:
        return str(error)
    return None


def _geometry(problem: PrefillProblem, tactic: WgmmaTactic, _arch: Arch) -> Geometry:
    spec = _specialise(problem, tactic)
    ctas = problem.states * (problem.value_dim // spec.rows)
    return Geometry(grid=(ctas, 1, 1), block=(spec.threads, 1, 1), shared_bytes=spec.shared_bytes)


PREFILL_WGMMA = Kernel(
    name="gdn/prefill_wgmma",
    spec=WgmmaSpec,
    params=PARAMETERS,
    tactics=TACTICS,
    rejects=_rejects,
    specialise=_specialise,
    geometry=_geometry,
    bind=bind,
    scratch=scratch,
    before=BEFORE,
)

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

_ROWS = 64  # of a CTA
_STAGES = 3
_SQUARE_BYTES = CHUNK * CHUNK * 2


@dataclass(frozen=True, slots=True)
class WgmmaTactic:
    """There is one way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WgmmaSpec(KernelSpec):
    """A CTA has 64 rows of a state, in a warpgroup; a second one computes the outputs."""

    dtype: DType
    head_dim: int
    value_dim: int

    threads = 2 * 128

    def __post_init__(self) -> None:
        if self.head_dim not in HEAD_DIMS:
            raise ArgumentError("head_dim", self.head_dim, f"one of {HEAD_DIMS}")
        if self.value_dim not in VALUE_DIMS[self.head_dim]:
            raise ArgumentError("value_dim", self.value_dim, f"one of {VALUE_DIMS[self.head_dim]}")

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a CTA in bytes: stages of what is copied, and left operands of two chunks."""
        squares = 2 * (self.head_dim // CHUNK + 1) * _SQUARE_BYTES
        values, factors = CHUNK * (_ROWS + 8) * 2, 3 * CHUNK * 4 + 16
        left = 2 * _ROWS * (self.head_dim + CHUNK) * 2
        return round_up(_STAGES * (squares + values + factors) + left, 1024)


def _specialise(problem: PrefillProblem, _tactic: WgmmaTactic) -> WgmmaSpec:
    return WgmmaSpec(dtype=problem.dtype, head_dim=problem.head_dim, value_dim=problem.value_dim)


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
    ctas = problem.states * (problem.value_dim // _ROWS)
    return Geometry(grid=(ctas, 1, 1), block=(spec.threads, 1, 1), shared_bytes=spec.shared_bytes)


PREFILL_WGMMA = Kernel(
    name="gdn/prefill_wgmma",
    spec=WgmmaSpec,
    params=PARAMETERS,
    tactics=(WgmmaTactic(),),
    rejects=_rejects,
    specialise=_specialise,
    geometry=_geometry,
    bind=bind,
    scratch=scratch,
    before=BEFORE,
)

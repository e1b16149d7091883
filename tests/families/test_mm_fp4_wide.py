"""mm_fp4 by wgmma: the kernel of sm_90a and the expansion before it, their cuts, and what selection gives."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from jitfp4 import SfLayout, mm_fp4, nvfp4_quantize, sim
from jitfp4.arch import Arch
from jitfp4.families.gemm.arguments import ExpandArguments
from jitfp4.families.gemm.expand_operation import EXPAND
from jitfp4.families.gemm.fp4_operation import MM_FP4
from jitfp4.families.gemm.kernels.expand import ExpandTactic
from jitfp4.families.gemm.kernels.wide import WideTactic
from jitfp4.families.gemm.kernels.wide_fp4 import KERNEL as FP4_WIDE
from jitfp4.families.gemm.kernels.wide_fp4 import rejects, specialise
from jitfp4.families.gemm.problem import ExpandProblem, Fp4Problem
from jitfp4.formats import MXFP4, NVFP4, BlockFormat, DType
from jitfp4.reference.gemm import decode, expand
from tests.support.compare import poisoned
from tests.support.gemm import assert_fp4_close, assert_fp4_product, make_matrix
from tests.support.gpu import needs_sm_90a

BF16, F16 = torch.bfloat16, torch.float16
SWIZZLED, TILED_8X4 = SfLayout.layout_128x4, SfLayout.layout_8x4
SIM = [pytest.mark.sim, pytest.mark.compile]
SM_90A = Arch.of("sm_90a")


@pytest.fixture(params=[pytest.param("sm_90a", marks=SIM), pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Races are errors, also with a grid before that still runs."""
    if request.param == "cuda":
        needs_sm_90a()
        yield "cuda"
    else:
        with sim.device(request.param, races=True, chain=sim.Chain(after_unknown=True)):
            yield "cpu"


def problem(m: int, n: int, k: int, block_format: BlockFormat = NVFP4) -> Fp4Problem:
    return Fp4Problem(block_format, SWIZZLED, DType.BF16, m, n, k)


# ---- results ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tactic", EXPAND.kernels[0].tactics, ids=str)
@pytest.mark.parametrize(("block_format", "layout"), [(NVFP4, SWIZZLED), (NVFP4, TILED_8X4), (MXFP4, SWIZZLED)])
def test_expansion(tactic: ExpandTactic, block_format: BlockFormat, layout: SfLayout, device: str) -> None:
    """Exactly; a ragged last step is filled with zeros, although scales in the padding are NaN."""
    a = make_matrix(139, 1056, block_format, layout)
    x = poisoned((139, 1152), F16 if block_format is NVFP4 else BF16, device)
    given = a.codes.to(device), a.scales.to(device)
    with EXPAND.forced(tactic):
        EXPAND(ExpandArguments(*given, x, block_format.block, layout is TILED_8X4, enable_pdl=True))
    want = expand(a.codes, a.scales, block_format, layout)
    assert torch.equal(x.cpu().float(), want)
    assert want.abs().sum() > 0


CASES = (  # with rows and columns that are no whole tiles, at other places of a tile of scales than its first
    (WideTactic(64, 1, 2), 40, 72, 416, NVFP4, SWIZZLED, BF16),
    (WideTactic(64, 4, split=2), 60, 264, 416, MXFP4, TILED_8X4, F16),
    (WideTactic(128, 1, 2, 3), 130, 72, 416, NVFP4, TILED_8X4, F16),
    (WideTactic(256, 2), 200, 136, 160, MXFP4, SWIZZLED, BF16),
    (WideTactic(64, 3), 70, 392, 96, NVFP4, SWIZZLED, BF16),
    (WideTactic(32, 2, divided=True), 40, 264, 416, NVFP4, SWIZZLED, F16),
    (WideTactic(64, 2, cluster=2), 70, 264, 672, MXFP4, SWIZZLED, BF16),
)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("tactic", "m", "n", "k", "block_format", "layout", "dtype"), CASES, ids=str)
def test_cuts_formats_and_layouts(
    tactic: WideTactic,
    m: int,
    n: int,
    k: int,
    block_format: BlockFormat,
    layout: SfLayout,
    dtype: torch.dtype,
    device: str,
) -> None:
    with MM_FP4.forced(tactic):
        assert_fp4_product(m, n, k, block_format, layout, dtype, device)


@pytest.mark.parametrize("arch", [pytest.param("sm_90a", marks=SIM)])
def test_a_weight_that_was_just_written(arch: str) -> None:
    """The product reads b before it waits: the expansion before it has waited for the quantizer of b."""
    x = torch.randn(104, 96, generator=torch.Generator().manual_seed(1)).bfloat16()
    with sim.device(arch, races=True, chain=sim.Chain()), MM_FP4.forced(WideTactic(32, 2)):
        a, b = nvfp4_quantize(x[:40], 1.0), nvfp4_quantize(x, 1.0)
        out = mm_fp4(a[0], b[0].T, a[1], b[1].T)
    values = [decode(*operand, NVFP4, SWIZZLED) for operand in (a, b)]
    assert_fp4_close(out, *values, None)


# ---- selection -------------------------------------------------------------------------------------------------------


def test_what_is_selected_can_run() -> None:
    for m in (1, 8, 16, 33, 64, 65, 129, 256, 513, 8192):
        for n in (8, 2112, 4096, 8192, 57344):
            for k in (32, 4096, 28672):
                tactic = MM_FP4.select(problem(m, n, k), SM_90A)
                assert isinstance(tactic, WideTactic)
                assert rejects(problem(m, n, k), tactic, SM_90A) is None
    assert not isinstance(MM_FP4.select(problem(512, 4096, 4096), Arch.of("sm_100a")), WideTactic)


def test_why_a_tactic_is_rejected() -> None:
    assert rejects(problem(1, 64, 1024), WideTactic(32, 2, 2), SM_90A) is None
    assert "empty" in str(rejects(problem(32, 64, 1024), WideTactic(64, 2), SM_90A))
    assert "step" in str(rejects(problem(64, 64, 128), WideTactic(64, 1, 2, 2), SM_90A))
    assert "sm_90a" in str(rejects(problem(64, 64, 1024), WideTactic(64, 2), Arch.of("sm_100a")))


@pytest.mark.parametrize("block_format", BlockFormat)
def test_every_tactic_makes_a_kernel_that_fits(block_format: BlockFormat) -> None:
    for tactic in FP4_WIDE.tactics:
        spec = specialise(problem(tactic.tile_m, 8192, 8192, block_format), tactic)
        assert spec.shared_bytes <= SM_90A.shared_bytes


def test_only_sm_90a_expands() -> None:
    one = ExpandProblem(NVFP4, SWIZZLED, 64, 4096)
    assert list(EXPAND.candidates(one, SM_90A))
    for name in ("sm_80", "sm_100a", "sm_120a"):
        assert not list(EXPAND.candidates(one, Arch.of(name)))

"""The kernels of the norm family: selection, machine code, and every byte in the simulator and on a GPU."""

from __future__ import annotations

import dataclasses
from itertools import product

import pytest
import torch

import jitfp4
from jitfp4 import nvfp4_quantize
from jitfp4.arch import ARCHS, Arch
from jitfp4.engine import build
from jitfp4.families.norm import add_rmsnorm_fp4quant, rmsnorm_fp4quant
from jitfp4.families.norm.kernels.rmsnorm_fp4quant import KERNEL, Spec, Tactic, row_threads
from jitfp4.families.norm.kernels.rows_fp4quant import KERNEL as ROWS
from jitfp4.families.norm.kernels.rows_fp4quant import TACTICS as ROWS_TACTICS
from jitfp4.families.norm.kernels.rows_fp4quant import RowsSpec, RowsTactic
from jitfp4.families.norm.operation import RMSNORM
from jitfp4.families.norm.problem import Problem, Scale
from jitfp4.formats import DType
from jitfp4.reference import norm as reference
from tests.support.compare import assert_same_bytes
from tests.support.norm import DTYPES, FORMATS, LAYOUTS, LINEAR, check, rows_of_all_kinds
from tests.support.sample import SIM_ARCHS
from tests.support.sass import disassemble

# ---- selection -------------------------------------------------------------------------------------------------------

PROBLEM = Problem(in_dtype=DType.F16, block=16, scale=Scale.E4M3, add=True, gate=False, padded=False, m=1, h=65536)
TACTICS = KERNEL.tactics


@pytest.mark.parametrize("arch", ARCHS.values(), ids=str)
def test_every_hidden_size_has_a_kernel_that_warm_up_builds(arch: Arch, whole: bool) -> None:
    prebuilt = {*KERNEL.specs(arch), *ROWS.specs(arch)}
    met = set()
    for add, h, m in product((False, True), range(65536, 63, -16 if whole else -112), (1, 20, 1000, 1 << 17)):
        problem = PROBLEM._replace(add=add, m=m, h=h)
        _, spec, launch, _ = RMSNORM.plan(problem, arch)
        met.add(spec)
        most = spec.max_threads if isinstance(spec, Spec) else 32 * spec.warps
        assert launch.block[0] <= most and launch.shared_bytes <= arch.shared_bytes
        assert launch.cluster[0] == 1 or (arch.has_tma and launch.cluster[0] <= 8)
        share = row_threads(h, spec) if isinstance(spec, Spec) else launch.block[0]
        threads = share if spec.warps > 1 else min(share, 32)
        assert threads * launch.cluster[0] * spec.units * 16 >= h
    form = PROBLEM.in_dtype, PROBLEM.block, PROBLEM.scale
    gated = {s for s in prebuilt if isinstance(s, RowsSpec) and s.gate}
    assert met == {s for s in prebuilt - gated if (s.in_dtype, s.block, s.scale) == form}


def test_a_row_that_does_not_fit_on_chip_is_streamed() -> None:
    assert RMSNORM.select(PROBLEM, Arch.of("sm_80")).stream
    assert RMSNORM.select(PROBLEM, Arch.of("sm_90a")).clustered
    assert not any(spec.stream for spec in KERNEL.specs(Arch.of("sm_90a")))


def test_specs_name_no_size_of_a_problem() -> None:
    names = {field.name for field in dataclasses.fields(Spec)}
    assert names == {"in_dtype", "block", "scale", "add", "units", "warps", "clustered", "stream"}


# ---- generated code --------------------------------------------------------------------------------------------------


@pytest.mark.compile
@pytest.mark.slow
@pytest.mark.one_in(4)
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a", "sm_120a"])
def test_wide_accesses(arch: str, add: bool, whole: bool) -> None:
    target, form = Arch.of(arch), (add, DType.BF16, 16)
    specs = [spec for spec in KERNEL.specs(target) if (spec.add, spec.in_dtype, spec.block) == form]
    for spec in specs if whole else specs[::3]:
        code = disassemble(build(KERNEL, spec, target).cubin)
        loads = [line for line in code if line.startswith("LDG" if spec.stream else "LDGSTS")]
        assert loads and all(".128" in line for line in loads if "LDGSTS" in line), spec


# ---- simulator -------------------------------------------------------------------------------------------------------

SIM_SHAPES = [(7, 64), (3, 80), (2, 1040), (131, 128), (2, 4160)]


@pytest.mark.sim
@pytest.mark.compile
@pytest.mark.one_in(2)
@pytest.mark.parametrize("arch", SIM_ARCHS)
@pytest.mark.parametrize(("block", "scale_format"), FORMATS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_simulated_kernel(arch: str, dtype: torch.dtype, block: int, scale_format: str) -> None:
    with jitfp4.sim.device(arch):
        for layout, (m, h) in zip([*LAYOUTS, *LAYOUTS], SIM_SHAPES, strict=False):
            if h % block == 0:
                x = rows_of_all_kinds(m, h, dtype)
                check(x, x.flip(0), layout, block, scale_format, "cpu")
                check(x, None, "linear" if layout == "both" else layout, block, scale_format, "cpu", scale=None)


@pytest.mark.sim
@pytest.mark.compile
@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("tactic", "h"),
    [
        (Tactic(2, 1), 1024),  # rows that fill their threads, which are not asked for then
        (Tactic(3, 1), 1536),
        (Tactic(3, 1), 1104),
        (Tactic(1, 8), 1040),
        (Tactic(2, 8), 3088),
        (Tactic(4, 4), 6160),
        (Tactic(2, 16, clustered=True), 20496),
        (Tactic(8, 16, stream=True), 9232),
        (RowsTactic(1), 4096),
        (RowsTactic(1), 1040),
        (RowsTactic(2), 3088),
        (RowsTactic(4), 8208),
    ],
    ids=str,
)
def test_every_kind_of_kernel_simulated(tactic: Tactic | RowsTactic, h: int) -> None:
    x = rows_of_all_kinds(3, h, torch.float16)
    with jitfp4.sim.device("sm_90a", races=True), RMSNORM.forced(tactic):
        check(x, x.flip(0), "both", 16, "e4m3", "cpu")
        check(x, None, "128x4", 16, "e4m3", "cpu")


# ---- GPU -------------------------------------------------------------------------------------------------------------

GPU_SHAPES = [(1, 64), (130, 96), (300, 256), (129, 512), (33, 1024), (7, 1536), (70, 2080), (9, 4096), (5, 7168)]
LONG_SHAPES = [(3, 12288), (2, 20480), (2, 32768), (2, 65504), (1, 65536)]


@pytest.mark.gpu
class TestOnGpu:
    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize(("block", "scale_format"), FORMATS)
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_shapes(self, dtype: torch.dtype, block: int, scale_format: str, layout: str) -> None:
        for m, h in GPU_SHAPES + LONG_SHAPES:
            x = rows_of_all_kinds(m, h, dtype)
            check(x, x.flip(0), layout, block, scale_format, "cuda")
            if layout != "both":
                check(x, None, layout, block, scale_format, "cuda", scale=None, eps=0.0)

    @pytest.mark.parametrize("tactic", [*(tactic for tactic in TACTICS if not tactic.stream), *ROWS_TACTICS], ids=str)
    def test_every_kind_of_kernel(self, tactic: Tactic | RowsTactic) -> None:
        for m, h in GPU_SHAPES + LONG_SHAPES:
            if tactic in RMSNORM.candidates(PROBLEM._replace(m=m, h=h), Arch.of("sm_90a")):
                x = rows_of_all_kinds(m, h, torch.float16)
                with RMSNORM.forced(tactic):
                    check(x, x.flip(0), "both", 16 if h % 32 else 32, "e4m3", "cuda")
                    check(x, None, "128x4", 16, "e4m3", "cuda")

    @RMSNORM.forced(Tactic(8, 16, stream=True))
    def test_streaming(self) -> None:
        for m, h in GPU_SHAPES + LONG_SHAPES:
            x = rows_of_all_kinds(m, h, torch.bfloat16)
            check(x, x.flip(0), "both", 16, "e4m3", "cuda")
            check(x, None, "linear", 16, "e4m3", "cuda")

    @pytest.mark.parametrize("h", [4096, 32768])
    def test_many_rows_against_the_reference_on_the_gpu(self, h: int) -> None:
        x, residual = (torch.randn(4096, h, device="cuda").half() for _ in range(2))
        weight, y = torch.randn(h, device="cuda").half(), torch.empty_like(x)
        hidden = reference.add(x, residual)
        q, sf = add_rmsnorm_fp4quant(x, residual, weight, global_scale=7.0, y_out=y)[:2]
        assert torch.equal(residual, hidden)
        assert torch.equal(y, reference.rmsnorm(hidden, weight, 1e-6))
        want_q, want_sf = nvfp4_quantize(y, 7.0, LINEAR)
        assert torch.equal(q.view(torch.uint8), want_q)
        assert torch.equal(sf.view(torch.uint8), want_sf)

    def test_calls_that_each_need_the_one_before(self) -> None:
        x, weight = torch.randn(300, 4096, device="cuda").half(), torch.randn(4096, device="cuda").half()
        results = []
        for enable_pdl in (True, False):
            residual = torch.zeros_like(x)
            for _ in range(20):
                q, sf = add_rmsnorm_fp4quant(x, residual, weight, enable_pdl=enable_pdl)[:2]
            results.append((residual, q.view(torch.uint8), sf.view(torch.uint8)))
        for name, got, want in zip(("residual", "codes", "scales"), *results, strict=True):
            assert_same_bytes(name, got.view(torch.uint8), want.view(torch.uint8))

    def test_graph_replay_and_streams(self) -> None:
        first, second = (torch.randn(70, 1536, device="cuda").half() for _ in range(2))
        x, weight = first.clone(), torch.randn(1536, device="cuda").half()
        rmsnorm_fp4quant(x, weight)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            q, sf = rmsnorm_fp4quant(x, weight)
        x.copy_(second)
        graph.replay()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            want_q, want_sf = rmsnorm_fp4quant(second, weight, enable_pdl=False)
        side.synchronize()
        assert_same_bytes("codes", q.view(torch.uint8), want_q.view(torch.uint8))
        assert_same_bytes("scales", sf.view(torch.uint8), want_sf.view(torch.uint8))

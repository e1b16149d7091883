"""mm_fp4 on the sm_100 family: whole small products in the simulator, what is legal, what the model chooses."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from jitfp4 import ArgumentError, mm_fp4, nvrtc, sim
from jitfp4.arch import Arch
from jitfp4.families.gemm.fp4_operation import MM_FP4
from jitfp4.families.gemm.kernels.blockscaled import KERNEL as K64
from jitfp4.families.gemm.kernels.blockscaled import K64Tactic
from jitfp4.families.gemm.kernels.blockscaled_k96 import KERNEL as K96
from jitfp4.families.gemm.kernels.blockscaled_k96 import K96Tactic
from jitfp4.families.gemm.kernels.portable import PortableTactic
from jitfp4.families.gemm.model import SELECTABLE, Tactic, cheapest, estimate
from jitfp4.families.gemm.problem import Fp4Problem
from jitfp4.formats import MXFP4, NVFP4, BlockFormat, DType
from jitfp4.kernel import AnyKernel
from jitfp4.layouts import SfLayout
from jitfp4.reference.formats import swizzle
from jitfp4.reference.gemm import error_bound, matmul
from jitfp4.reference.quantize import dequantize
from tests.support.compare import poisoned
from tests.support.gemm import make_codes
from tests.support.ledger import read
from tests.support.sass import disassemble

BF16, F16 = torch.bfloat16, torch.float16
SIM = [pytest.mark.sim, pytest.mark.compile]
SWIZZLED = SfLayout.layout_128x4
SM_100A, SM_103A = Arch.of("sm_100a"), Arch.of("sm_103a")


def problem(m: int, n: int, k: int, block_format: BlockFormat = NVFP4, layout: SfLayout = SWIZZLED) -> Fp4Problem:
    return Fp4Problem(block_format, layout, DType.BF16, m, n, k)


def kernel_of(tactic: Tactic) -> AnyKernel:
    return K64 if isinstance(tactic, K64Tactic) else K96


# ---- results ---------------------------------------------------------------------------------------------------------


def operand(rows: int, k: int, block_format: BlockFormat, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes [rows, k / 2], scales in 128x4 whose padding is NaN, and the values."""
    codes, scales = make_codes(rows, k, block_format, seed)
    padded = swizzle(scales, SWIZZLED)
    values = dequantize(codes, padded, block_format, None, SWIZZLED)
    padded[swizzle(torch.ones_like(scales), SWIZZLED) == 0] = 0xFF
    return codes, padded, values


def assert_product(
    tactic: Tactic,
    arch: Arch,
    m: int,
    n: int,
    k: int,
    block_format: BlockFormat,
    dtype: torch.dtype,
    past: int = 0,
    seed: int | None = None,
) -> torch.Tensor:
    """A product behind an unfinished grid, in a poisoned output with ``past`` columns more, is within the bound.

    Returns it. With a ``seed``, warps run in an order of their own.
    """
    codes_a, scales_a, a = operand(m, k, block_format, 1)
    codes_b, scales_b, b = operand(n, k, block_format, 2)
    alpha = None if past else torch.tensor([2.0**-13 * 1.37])
    whole = poisoned((m, n + past), dtype, "cpu")
    before, out = whole[:, n:].clone(), whole[:, :n]
    chain = sim.Chain(after_unknown=True)
    with sim.device(arch, races=True, seed=seed, chain=chain), MM_FP4.forced(tactic):
        mm_fp4(
            codes_a, codes_b.T, scales_a, scales_b.T, alpha, dtype, out,
            block_size=block_format.block, use_nvfp4=block_format is NVFP4,
        )  # fmt: skip
    error, bound = (out.double() - matmul(a, b, alpha, None)).abs(), error_bound(a, b, alpha, None, dtype)
    assert bool((error <= bound).all()), f"{(error / bound).max().item():.2f} times what is allowed"
    assert torch.equal(whole[:, n:].view(torch.int16), before.view(torch.int16))
    return out


# Rows, columns and k that are no whole tiles; more tiles than CTAs; more steps than stages.
K64_CASES = (  # and SMs
    (K64Tactic(64, 1, 2), 1, 100, 136, 576, NVFP4, BF16),
    (K64Tactic(128, 1, 3), 2, 130, 392, 320, MXFP4, F16),
    (K64Tactic(192, 1, 2), 2, 130, 392, 320, NVFP4, BF16),
    (K64Tactic(256, 1, 2), 1, 100, 520, 192, NVFP4, F16),  # images that overlap
    (K64Tactic(64, 2, 2), 2, 200, 136, 576, MXFP4, BF16),
    (K64Tactic(256, 2, 2), 2, 200, 520, 192, NVFP4, BF16),
    (K64Tactic(8, 1, 3, swap_ab=True), 2, 5, 264, 832, MXFP4, BF16),
    (K64Tactic(32, 2, 2, swap_ab=True), 2, 29, 264, 576, NVFP4, F16),
    (K64Tactic(64, 1, 2, swap_ab=True, prefetch=True), 2, 100, 200, 832, NVFP4, BF16),
    (K64Tactic(128, 1, 2, tma_store=False), 2, 130, 144, 192, NVFP4, BF16),
)
K96_CASES = (
    (K96Tactic(64, 1, 2, 2), 1, 100, 136, 832, NVFP4, BF16),
    (K96Tactic(128, 1, 3, 3), 2, 130, 136, 896, MXFP4, F16),
    (K96Tactic(64, 2, 2, 3), 2, 200, 136, 320, NVFP4, BF16),
    (K96Tactic(16, 1, 2, 3, swap_ab=True), 2, 13, 264, 1600, NVFP4, BF16),
    (K96Tactic(256, 2, 2, 3, tma_store=False), 2, 200, 264, 640, MXFP4, BF16),
)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("tactic", "sms", "m", "n", "k", "block_format", "dtype"), K64_CASES + K96_CASES, ids=str)
@pytest.mark.parametrize("arch", [pytest.param("", marks=SIM)])
def test_products(
    tactic: Tactic, sms: int, m: int, n: int, k: int, block_format: BlockFormat, dtype: torch.dtype, arch: str
) -> None:
    """With races, proxies and the order of tensor memory."""
    on = SM_100A if isinstance(tactic, K64Tactic) else SM_103A
    assert_product(tactic, replace(on, num_sms=sms), m, n, k, block_format, dtype)


SHAPES = [(ctas, m, n) for ctas, m, n in product((1, 2), (1, 2, 4), (1, 2, 4)) if m * n > 1 and ctas * m <= 4]


@pytest.mark.one_in(6)
@pytest.mark.parametrize(("ctas", "cluster_m", "cluster_n"), SHAPES)
@pytest.mark.parametrize("arch", [pytest.param(arch, marks=SIM) for arch in ("sm_100a", "sm_103a")])
def test_clusters(ctas: int, cluster_m: int, cluster_n: int, arch: str) -> None:
    """Of three tiles along each side that is shared: a tile of the last cluster is outside. One cluster takes all."""
    shape = {"cluster_m": cluster_m, "cluster_n": cluster_n}
    m, n = 128 * ctas * (3 if cluster_m > 1 else 1) - 28, 64 * (3 if cluster_n > 1 else 1) - 8
    on = replace(Arch.of(arch), num_sms=ctas * cluster_m * cluster_n)
    if arch == "sm_100a":
        assert_product(K64Tactic(64, ctas, 2, **shape), on, m, n, 576, MXFP4 if cluster_n == 2 else NVFP4, BF16)
    else:
        assert_product(K96Tactic(64, ctas, 3, 2, **shape), on, m, n, 896, MXFP4 if cluster_m == 2 else NVFP4, BF16)


SHARED_CASES = (  # and SMs: what else the CTAs of a cluster share, in other combinations
    (K64Tactic(256, 2, 2, cluster_m=2, cluster_n=2), 8, 300, 520, 320, NVFP4, BF16),
    (K64Tactic(192, 1, 2, cluster_m=4), 4, 300, 200, 320, MXFP4, F16),
    (K64Tactic(64, 1, 2, cluster_n=2, tma_store=False), 2, 100, 200, 576, NVFP4, BF16),
    (K64Tactic(64, 2, 2, swap_ab=True, prefetch=True, cluster_m=2), 4, 100, 296, 832, NVFP4, BF16),
    (K64Tactic(8, 1, 3, swap_ab=True, split=2), 2, 5, 264, 832, MXFP4, BF16),
    (K64Tactic(64, 1, 2, swap_ab=True, split=4), 4, 61, 264, 1216, NVFP4, F16),
    (K64Tactic(64, 2, 2, swap_ab=True, cluster_n=2, split=2), 8, 100, 264, 832, NVFP4, BF16),
    (K96Tactic(256, 2, 2, 3, cluster_n=2), 4, 200, 520, 896, NVFP4, BF16),
    (K96Tactic(32, 1, 3, 2, swap_ab=True, split=2), 2, 29, 264, 1664, MXFP4, BF16),
)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("tactic", "sms", "m", "n", "k", "block_format", "dtype"), SHARED_CASES, ids=str)
@pytest.mark.parametrize("arch", [pytest.param("", marks=SIM)])
def test_clusters_of_other_tactics(
    tactic: Tactic, sms: int, m: int, n: int, k: int, block_format: BlockFormat, dtype: torch.dtype, arch: str
) -> None:
    on = SM_100A if isinstance(tactic, K64Tactic) else SM_103A
    assert_product(tactic, replace(on, num_sms=sms), m, n, k, block_format, dtype)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("case", [SHARED_CASES[0], SHARED_CASES[5], SHARED_CASES[-1]], ids=str)
@pytest.mark.parametrize("arch", [pytest.param("sm_103a", marks=SIM)])
def test_the_order_in_which_warps_run_changes_nothing(case: tuple[Any, ...], arch: str) -> None:
    tactic, sms, *rest = case
    on = replace(Arch.of(arch), num_sms=sms)
    first, second = (assert_product(tactic, on, *rest, seed=seed) for seed in (1, 2))
    assert torch.equal(first.view(torch.int16), second.view(torch.int16))


@pytest.mark.parametrize("tactic", [K64Tactic(64, 1, 2), K64Tactic(64, 1, 2, tma_store=False)], ids=str)
@pytest.mark.parametrize("arch", [pytest.param("sm_103a", marks=SIM)])
def test_an_output_between_other_columns_and_no_alpha(tactic: Tactic, arch: str) -> None:
    """Its rows are aligned to 16 bytes, not to 32."""
    assert_product(tactic, Arch.of(arch), 40, 72, 64, NVFP4, BF16, past=8)


@pytest.mark.parametrize("arch", [pytest.param("sm_100a", marks=SIM)])
def test_a_scale_that_is_nan_spoils_its_row_only(arch: str) -> None:
    codes_a, scales_a, _ = operand(16, 64, NVFP4, 1)
    codes_b, scales_b, _ = operand(64, 64, NVFP4, 2)
    scales_a.view(-1)[SWIZZLED.offset(3, 1, 4)] = 0x7F
    with sim.device(arch), MM_FP4.forced(K64Tactic(64, 1, 2)):
        out = mm_fp4(codes_a, codes_b.T, scales_a, scales_b.T)
    assert out[3].isnan().all()
    assert not out[torch.arange(16) != 3].isnan().any()


# ---- what is legal ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tactic", "arch", "one", "reason"),
    [
        (K64Tactic(64, 1, 2), Arch.of("sm_90a"), problem(64, 64, 256), "sm_100a and sm_103a"),
        (K96Tactic(64, 1, 2, 2), SM_100A, problem(64, 64, 256), "of sm_103a"),
        (K64Tactic(64, 1, 2), SM_100A, problem(64, 64, 256, layout=SfLayout.layout_8x4), "128x4"),
        (K64Tactic(64, 1, 2), SM_100A, problem(64, 64, 96), "k % 64"),
        (K96Tactic(64, 1, 2, 2), SM_103A, problem(64, 64, 192, MXFP4), "k % 128"),
        (K64Tactic(256, 1, 5), SM_100A, problem(256, 256, 256), "shared memory"),
        (K64Tactic(32, 1, 2), SM_100A, problem(32, 32, 256), "swap_ab"),
        (K64Tactic(32, 1, 2, swap_ab=True), SM_100A, problem(33, 128, 256), "only one"),
        (K64Tactic(64, 1, 2, swap_ab=True, tma_store=False), SM_100A, problem(64, 64, 256), "columns of out"),
        (K64Tactic(64, 2, 2), SM_100A, problem(128, 256, 256), "one CTA of each pair"),
        (K64Tactic(8, 2, 2, swap_ab=True), SM_100A, problem(8, 256, 256), "multiples of 16"),
        (K96Tactic(8, 1, 2, 2, swap_ab=True), SM_103A, problem(8, 256, 256), "multiples of 16"),
        (K64Tactic(128, 1, 2), SM_100A, problem(128, 64, 256), "empty"),
        (K64Tactic(64, 1, 2, prefetch=True), SM_100A, problem(128, 64, 512), "prefetch"),
        (K64Tactic(64, 1, 2, cluster_m=2), SM_100A, problem(128, 256, 256), "half of the CTAs"),
        (K96Tactic(64, 2, 2, 2, cluster_n=4), SM_103A, problem(512, 128, 256), "half of the CTAs"),
        (K64Tactic(64, 1, 2, split=2), SM_100A, problem(64, 64, 512), "few rows of a"),
        (K64Tactic(64, 1, 2, swap_ab=True, split=4), SM_100A, problem(64, 64, 768), "part of the columns"),
    ],
    ids=str,
)
def test_why_a_tactic_is_rejected(tactic: Tactic, arch: Arch, one: Fp4Problem, reason: str) -> None:
    assert reason in str(kernel_of(tactic).rejects(one, tactic, arch))
    with pytest.raises(ArgumentError, match="tactic"):
        kernel_of(tactic).plan(one, tactic, arch)


@pytest.mark.parametrize(("name", "tactic"), [("tile_n", K64Tactic(48, 1, 2)), ("ctas", K64Tactic(64, 4, 2)),
                                              ("stages", K64Tactic(64, 1, 1)), ("split", K64Tactic(64, 1, 2, split=3)),
                                              ("cluster_m", K64Tactic(64, 2, 2, cluster_m=4)),
                                              ("cluster_m", K64Tactic(8, 1, 2, cluster_m=2)),
                                              ("split", K64Tactic(64, 2, 2, cluster_n=4, split=4))],
                         ids=str)  # fmt: skip
def test_impossible_cuts_name_the_field(name: str, tactic: Tactic) -> None:
    with pytest.raises(ArgumentError, match=f"^{name}:"):
        kernel_of(tactic).specialise(problem(256, 256, 256), tactic)


def test_every_tactic_fills_shared_memory() -> None:
    """One stage more does not fit, of the ring that is left to grow."""
    for tactic in (*K64.tactics, *K96.tactics):
        spec: Any = kernel_of(tactic).specialise(problem(256, 256, 8192), tactic)
        assert spec.shared_bytes <= SM_100A.shared_bytes
        ring = "stages" if isinstance(tactic, K64Tactic) else "scale_stages"
        if getattr(tactic, ring) < 12:
            larger = replace(spec, **{ring: getattr(tactic, ring) + 1})
            assert larger.shared_bytes > SM_100A.shared_bytes


def test_grids() -> None:
    one = problem(1000, 4096, 4096)
    assert K64.geometry(one, K64Tactic(256, 2, 5), SM_100A).grid == (128, 1, 1)  # 64 tiles, two CTAs each
    wide = K96.geometry(one, K96Tactic(128, 1, 5, 9), SM_103A)
    assert (wide.grid, wide.block, wide.cluster) == ((148, 1, 1), (224, 1, 1), (1, 1, 1))  # of 256 tiles
    shared = K64.geometry(problem(4096, 4096, 4096), K64Tactic(256, 2, 5, cluster_m=2, cluster_n=2), SM_100A)
    assert (shared.grid, shared.cluster) == ((128, 1, 1), (8, 1, 1))  # of 64 groups, 16 at once: two on each GPC
    assert K64.geometry(problem(8, 4096, 4096), K64Tactic(8, 1, 5, swap_ab=True, split=4), SM_100A).grid == (128, 1, 1)


# ---- what the model chooses ------------------------------------------------------------------------------------------


def test_the_choice_is_legal_and_no_dearer_than_others() -> None:
    for arch in (SM_100A, SM_103A):
        for m in (1, 8, 40, 128, 500, 4096):
            for n, k, block_format in ((8, 64, NVFP4), (4096, 7168, MXFP4), (57344, 8192, NVFP4)):
                one = problem(m, n, k, block_format)
                tactic = MM_FP4.select(one, arch)
                assert tactic == cheapest(one, arch)
                assert kernel_of(tactic).rejects(one, tactic, arch) is None
                legal = (t for t in SELECTABLE if kernel_of(t).rejects(one, t, arch) is None)
                costs = (estimate(one, t, arch).clocks for t in legal)
                assert estimate(one, tactic, arch).clocks == min(costs)


def test_every_selectable_tactic_is_chosen_for_some_problem() -> None:
    chosen = {MM_FP4.select(one, arch) for arch in (SM_100A, SM_103A) for one in MM_FP4.problems(arch)}
    assert set(SELECTABLE) <= chosen


def test_who_takes_what() -> None:
    large = problem(4096, 4096, 7168)
    assert isinstance(MM_FP4.select(large, SM_100A), K64Tactic)
    assert isinstance(MM_FP4.select(large, SM_103A), K96Tactic)
    assert MM_FP4.select(large, SM_100A).ctas == 2
    assert MM_FP4.select(problem(8, 57344, 4096), SM_100A).swap_ab
    for one in (problem(64, 4096, 4096, layout=SfLayout.layout_8x4), problem(64, 4096, 4128)):
        assert isinstance(MM_FP4.select(one, SM_100A), PortableTactic)


def test_the_model_counts_waves_and_bytes() -> None:
    figures = estimate(problem(1000, 4096, 4096), K64Tactic(256, 2, 5), SM_100A)
    assert (figures.groups, figures.waves, figures.stages) == (64, 1, 5)
    assert figures.bytes_in_flight == 5 * 256 * 128
    assert figures.product_clocks == 4096 / 64 * 128
    longer = estimate(problem(1000, 4096, 4096), K96Tactic(256, 2, 5, 7), SM_103A)
    assert longer.product_clocks == 43 * 128  # a third fewer, rounded up


def test_the_model_counts_what_a_cluster_shares_once() -> None:
    one = problem(4096, 4096, 4096)
    alone, shared = (estimate(one, K64Tactic(256, 2, 5, cluster_m=n, cluster_n=n), SM_100A) for n in (1, 2))
    assert alone.tile_bytes == shared.tile_bytes == 256 * 2048 + 3 * 128 * 256
    assert alone.l2_bytes == alone.tile_bytes - 128 * 256  # pairs share the scales of the right rows
    assert shared.l2_bytes == alone.l2_bytes / 2
    assert (alone.groups, alone.waves, shared.groups, shared.waves) == (256, 4, 64, 4)
    split = estimate(problem(8, 4096, 4096), K64Tactic(8, 1, 5, swap_ab=True, split=4), SM_100A)
    assert (split.groups, split.product_clocks) == (32, 16 * 4)


# ---- machine code ----------------------------------------------------------------------------------------------------


@pytest.mark.compile
@pytest.mark.parametrize(
    ("tactic", "arch", "products", "copies", "multicast"),
    [
        (K64Tactic(256, 2, 5), SM_100A, 4, 12, 1),
        (K64Tactic(128, 1, 5, cluster_n=2), SM_100A, 4, 8, 2),
        (K64Tactic(256, 2, 5, cluster_m=2, cluster_n=2), SM_100A, 4, 12, 4),
        (K64Tactic(32, 1, 5, swap_ab=True, split=4), SM_100A, 4, 8, 0),
        (K96Tactic(128, 1, 5, 9), SM_103A, 8, 24, 0),
        (K96Tactic(256, 2, 5, 7, cluster_m=2), SM_103A, 8, 36, 2),
    ],
    ids=str,
)
def test_the_machine_code_has_the_intended_instructions(
    tactic: Tactic, arch: Arch, products: int, copies: int, multicast: int
) -> None:
    """Block-scaled products and copies of scales, of a step each once and in no loop over lanes; tensor copies.

    What several CTAs of a cluster need comes by multicast, and commits arrive in all of them.
    """
    kernel = kernel_of(tactic)
    spec = kernel.specialise(problem(256, 256, 256), tactic)
    cubin = nvrtc.compile_cubin(kernel.render(spec, arch), arch, symbol=kernel.symbol)
    opcodes = [line.split()[0].split(".") for line in disassemble(cubin)]
    count, cast = Counter(op[0] for op in opcodes), Counter(op[0] for op in opcodes if "MULTICAST" in op)
    assert (count["UTCOMMA"], count["UTCCP"]) == (products, copies)
    assert (count["UTMALDG"], cast["UTMALDG"]) == (4, multicast)
    assert cast["UTCBAR"] == (count["UTCBAR"] if multicast else 0)
    assert count["UTMASTG"] == 1
    assert count["LDTM"] == (2 if tactic.swap_ab else 1)
    assert count["LDL"] + count["STL"] == 0


def test_the_ledger_counts_tensor_core_instructions() -> None:
    for kernel, products in ((K64, 4), (K96, 8)):
        lines = read(kernel).values()
        assert lines
        for line in lines:
            assert int(line["UTC"]) > products
            assert int(line["UTMA"]) >= 5  # four loads and a store
            assert (line["local"], line["LDL"], line["STL"]) == ("0", "0", "0")

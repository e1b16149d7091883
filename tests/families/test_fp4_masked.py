"""grouped_gemm_nt_masked: batches of products of FP4 matrices, of each the filled rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch

from jitfp4 import (
    SfLayout,
    grouped_gemm_nt_masked,
    scaled_fp4_grouped_quantize,
    sim,
)
from jitfp4.arch import Arch
from jitfp4.families.gemm.kernels.blockscaled_masked import KERNEL, MOST_ENTRIES, MaskedTactic
from jitfp4.families.gemm.masked_operation import MM_FP4_MASKED
from jitfp4.families.gemm.problem import MaskedProblem
from jitfp4.formats import MXFP4, NVFP4, BlockFormat, DType
from jitfp4.reference.gemm import error_bound, matmul
from tests.support.compare import poisoned
from tests.support.gemm import Fp4Matrix, make_matrix

BF16, F16 = torch.bfloat16, torch.float16
SIM = [pytest.mark.sim, pytest.mark.compile]
SWIZZLED = SfLayout.layout_128x4
SM_100A = Arch.of("sm_100a")
NAMES = {BF16: "bfloat16", F16: "float16"}


def keywords(block_format: BlockFormat, dtype: torch.dtype = BF16) -> dict[str, Any]:
    sf_dtype = "float8_e4m3fn" if block_format is NVFP4 else "float8_e8m0fnu"
    sizes = {"sf_vec_size": block_format.block, "c_dtype": NAMES[dtype]}
    return {"ab_dtype": "float4_e2m1fn", "sf_dtype": sf_dtype, **sizes}


class Batch(NamedTuple):
    """Codes [rows, k / 2, l] and scales [32, 4, rm, 4, rk, l], as FlashInfer orders them, and the values of each."""

    codes: torch.Tensor
    scales: torch.Tensor
    values: list[torch.Tensor]


def batch(matrices: list[Fp4Matrix]) -> Batch:
    swizzled = torch.stack([one.scales for one in matrices])
    scales = swizzled.view(len(matrices), swizzled.shape[1] // 128, swizzled.shape[2] // 4, 32, 4, 4)
    codes = torch.stack([one.codes for one in matrices])
    return Batch(codes.permute(1, 2, 0), scales.permute(3, 4, 1, 5, 2, 0), [one.values for one in matrices])


def operand(entries: int, rows: int, k: int, block_format: BlockFormat, seed: int) -> Batch:
    """The padding of scales is NaN."""
    return batch([make_matrix(rows, k, block_format, SWIZZLED, seed + entry) for entry in range(entries)])


def spoil(of: Batch, filled: list[int]) -> None:
    """Scales that are NaN in the rows that are not filled."""
    scales = of.scales.view(torch.uint8)
    for entry, rows in enumerate(filled):
        for row in range(rows, of.codes.shape[0]):
            scales[row % 32, row % 128 // 32, row // 128, :, :, entry] = 0xFF


def assert_products(
    filled: list[int],
    m: int,
    n: int,
    k: int,
    block_format: BlockFormat = NVFP4,
    dtype: torch.dtype = BF16,
    past: int = 0,
) -> torch.Tensor:
    """Filled rows are within the bound, and nothing else is written; returns the output with what is around it.

    Rows of out are ``past`` columns further apart than they are long; if they are, there is no alpha.
    """
    entries, count = len(filled), [min(max(rows, 0), m) for rows in filled]
    a, b = operand(entries, m, k, block_format, 1), operand(entries, n, k, block_format, 101)
    spoil(a, count)
    alpha = None if past else 2.0**-13 * torch.arange(1.0, 1.0 + entries)
    whole = poisoned((entries, m, n + past), dtype, "cpu")
    want, out = whole.clone(), whole[:, :, :n].permute(1, 2, 0)
    masked_m = torch.tensor(filled, dtype=torch.int32)
    got = grouped_gemm_nt_masked(
        (a.codes, a.scales), (b.codes, b.scales), out, masked_m, **keywords(block_format, dtype), alpha=alpha
    )
    assert got is out
    for entry, rows in enumerate(count):
        x, y, factor = a.values[entry][:rows], b.values[entry], None if alpha is None else alpha[entry]
        error = (whole[entry, :rows, :n].double() - matmul(x, y, factor, None)).abs()
        assert bool((error <= error_bound(x, y, factor, None, dtype)).all()), f"entry {entry}"
        want[entry, :rows, :n] = whole[entry, :rows, :n]
    assert torch.equal(whole.view(torch.int16), want.view(torch.int16)), "other rows or columns were written"
    return whole


# ---- results ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_format", BlockFormat, ids=str)
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_the_definition(block_format: BlockFormat, dtype: torch.dtype) -> None:
    assert_products([3, 0, 40, 999, -1], 40, 24, 192, block_format, dtype)


# No rows and all rows, numbers outside, tiles that end within rows and columns, more tiles than clusters, more steps
# than stages, more entries than lanes.
CASES = (  # and SMs, filled rows, m, n, k
    (MaskedTactic(8, 1, 3, swap_ab=True), 2, [5, 0, 8, -1], 8, 264, 832, MXFP4, BF16),
    (MaskedTactic(8, 1, 3, swap_ab=True), 3, [entry % 3 for entry in range(37)], 3, 136, 64, NVFP4, BF16),
    (MaskedTactic(32, 2, 2, swap_ab=True), 2, [29, 0, 7], 29, 264, 576, NVFP4, F16),
    (MaskedTactic(64, 1, 2, swap_ab=True), 2, [0, 65, 0, 150, 33], 150, 136, 320, NVFP4, BF16),
    (MaskedTactic(16, 1, 2, swap_ab=True, split=2), 2, [13, 0, 1], 13, 136, 832, NVFP4, BF16),
    (MaskedTactic(64, 1, 2), 1, [100, 0, 33, 999], 130, 136, 576, NVFP4, BF16),
    (MaskedTactic(128, 1, 3), 2, [0, 129, 2], 130, 392, 320, MXFP4, F16),
    (MaskedTactic(256, 1, 2), 1, [100, 31], 100, 520, 192, NVFP4, F16),  # images that overlap
    (MaskedTactic(256, 2, 2), 2, [200, 0, 128], 200, 520, 192, MXFP4, BF16),
    (MaskedTactic(128, 1, 2, tma_store=False), 2, [130, 0, 5], 130, 144, 192, NVFP4, BF16),
    (MaskedTactic(64, 1, 2, cluster_m=2, cluster_n=2), 4, [300, 0, 129], 300, 200, 320, NVFP4, BF16),
    (MaskedTactic(64, 2, 2, swap_ab=True, cluster_m=2), 4, [40, 0, 64], 100, 296, 576, MXFP4, BF16),
)


@pytest.mark.parametrize(("tactic", "sms", "filled", "m", "n", "k", "block_format", "dtype"), CASES, ids=str)
@pytest.mark.parametrize("arch", [pytest.param("sm_100a", marks=SIM)])
def test_products(
    tactic: MaskedTactic,
    sms: int,
    filled: list[int],
    m: int,
    n: int,
    k: int,
    block_format: BlockFormat,
    dtype: torch.dtype,
    arch: str,
) -> None:
    """With races, behind an unfinished grid."""
    on = replace(Arch.of(arch), num_sms=sms)
    with sim.device(on, races=True, chain=sim.Chain(after_unknown=True)), MM_FP4_MASKED.forced(tactic):
        assert_products(filled, m, n, k, block_format, dtype)


@pytest.mark.parametrize("arch", [pytest.param("sm_103a", marks=SIM)])
def test_the_order_in_which_warps_run_changes_nothing(arch: str) -> None:
    tactic, sms, *rest = CASES[3]
    on, given = replace(Arch.of(arch), num_sms=sms), rest[:4]
    found = []
    for seed in (1, 2):
        with sim.device(on, races=True, seed=seed), MM_FP4_MASKED.forced(tactic):
            found.append(assert_products(*given).view(torch.int16))
    assert torch.equal(*found)


@pytest.mark.parametrize("swap_ab", [False, True])
@pytest.mark.parametrize("arch", [pytest.param("sm_100a", marks=SIM)])
def test_an_output_between_other_columns_and_no_alpha(swap_ab: bool, arch: str) -> None:
    """Its rows are aligned to 16 bytes, not to 32."""
    with sim.device(arch, races=True), MM_FP4_MASKED.forced(MaskedTactic(64, 1, 2, swap_ab)):
        assert_products([40, 3], 40, 72, 64, past=8)


@pytest.mark.parametrize("arch", [pytest.param(arch, marks=SIM) for arch in ("sm_100a", "sm_103a")])
@pytest.mark.parametrize("m", [8, 70])
def test_behind_the_quantizer(m: int, arch: str) -> None:
    """The tactic of the table; nothing is filled in one entry."""
    x, masked_m = torch.randn(3, m, 128).bfloat16(), torch.tensor([m, 0, 3], dtype=torch.int32)
    weights, scale = torch.randn(3, 64, 128).bfloat16(), torch.tensor([2.0, 3.0, 5.0])
    full = torch.full((3,), 64, dtype=torch.int32)
    with sim.device(arch):
        a = scaled_fp4_grouped_quantize(x, masked_m, scale)
        b = scaled_fp4_grouped_quantize(weights, full, scale)
        out = torch.full((3, m, 64), 7.0, dtype=BF16).permute(1, 2, 0)
        grouped_gemm_nt_masked(a, b, out, masked_m, **keywords(NVFP4), alpha=(1 / scale**2).view(1, 1, 3))
    for entry, rows in enumerate(masked_m.tolist()):
        want = x[entry].double() @ weights[entry].double().T
        error = (out[:rows, :, entry] - want[:rows]).norm() / want[:rows].norm() if rows else 0.0
        assert error < 0.2
        assert (out[rows:, :, entry] == 7).all()


def test_the_transpose_and_other_spellings() -> None:
    a, b = operand(2, 5, 64, NVFP4, 1), operand(2, 16, 64, NVFP4, 101)
    masked_m, want = torch.tensor([5, 2], dtype=torch.int32), torch.zeros(2, 5, 16, dtype=BF16)
    given = (a.codes, a.scales), (b.codes, b.scales)
    grouped_gemm_nt_masked(*given, want.permute(1, 2, 0), masked_m, **keywords(NVFP4))
    flat = [(x.codes, x.scales.permute(5, 2, 4, 0, 1, 3).reshape(2, -1, 4)) for x in (a, b)]
    out = torch.zeros_like(want)
    grouped_gemm_nt_masked(*flat, out.permute(2, 1, 0), masked_m, **keywords(NVFP4), is_swap_ab=True)
    assert torch.equal(out, want) and out[0].any()


# ---- what is legal ---------------------------------------------------------------------------------------------------


def problem(m: int, n: int, k: int, entries: int = 2, block_format: BlockFormat = NVFP4) -> MaskedProblem:
    return MaskedProblem(block_format, DType.BF16, entries, m, n, k)


@pytest.mark.parametrize(
    ("tactic", "arch", "one", "reason"),
    [
        (MaskedTactic(64, 1, 2), "sm_90a", problem(64, 64, 256), "sm_100a and sm_103a"),
        (MaskedTactic(8, 2, 2, swap_ab=True), "sm_100a", problem(8, 256, 256), "multiples of 16"),
        (MaskedTactic(64, 1, 2), "sm_100a", problem(64, 64, 64, MOST_ENTRIES + 1), "entries"),
        (MaskedTactic(256, 1, 5), "sm_100a", problem(256, 256, 256), "shared memory"),
        (MaskedTactic(32, 1, 2, swap_ab=True), "sm_100a", problem(33, 128, 256), "only one"),
    ],
    ids=str,
)
def test_why_a_tactic_is_rejected(tactic: MaskedTactic, arch: str, one: MaskedProblem, reason: str) -> None:
    assert reason in str(KERNEL.rejects(one, tactic, Arch.of(arch)))


def test_grids() -> None:
    """As many clusters as the GPU runs at once, or as tiles if every row were filled."""
    assert KERNEL.geometry(problem(100, 256, 4096, 8), MaskedTactic(128, 1, 5), SM_100A).grid == (16, 1, 1)
    assert KERNEL.geometry(problem(1000, 4096, 4096, 8), MaskedTactic(128, 1, 5), SM_100A).grid == (148, 1, 1)

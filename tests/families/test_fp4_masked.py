"""grouped_gemm_nt_masked: batches of products of FP4 matrices, of each the filled rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from jitfp4 import (
    ArgumentError,
    SfLayout,
    grouped_gemm_nt_masked,
    scaled_fp4_grouped_quantize,
    silu_and_mul_scaled_nvfp4_experts_quantize,
    sim,
)
from jitfp4.arch import Arch
from jitfp4.families.gemm.kernels.blockscaled_masked import KERNEL, MOST_ENTRIES, MaskedTactic
from jitfp4.families.gemm.kernels.portable_masked import KERNEL as PORTABLE_KERNEL
from jitfp4.families.gemm.kernels.portable_masked import PortableMaskedTactic
from jitfp4.families.gemm.masked_operation import MM_FP4_MASKED
from jitfp4.families.gemm.problem import MaskedProblem
from jitfp4.formats import MXFP4, NVFP4, BlockFormat, DType
from jitfp4.reference.gemm import error_bound, matmul
from tests.support.compare import poisoned
from tests.support.gemm import Fp4Batch, make_batch, masked_keywords

BF16, F16 = torch.bfloat16, torch.float16
SIM = [pytest.mark.sim, pytest.mark.compile]
SWIZZLED = SfLayout.layout_128x4
SM_100A = Arch.of("sm_100a")


def spoil(of: Fp4Batch, filled: list[int]) -> None:
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
    device: str = "cpu",
) -> torch.Tensor:
    """Filled rows are within the bound, and nothing else is written; returns the output with what is around it.

    Rows of out are ``past`` columns further apart than they are long; if they are, there is no alpha.
    """
    entries, count = len(filled), [min(max(rows, 0), m) for rows in filled]
    a, b = make_batch(entries, m, k, block_format, 1), make_batch(entries, n, k, block_format, 101)
    spoil(a, count)
    alpha = None if past else 2.0**-13 * torch.arange(1.0, 1.0 + entries)
    whole = poisoned((entries, m, n + past), dtype, device)
    want, out = whole.clone(), whole[:, :, :n].permute(1, 2, 0)
    masked_m = torch.tensor(filled, dtype=torch.int32, device=device)
    lhs, rhs = ((x.codes.to(device), x.scales.to(device)) for x in (a, b))
    got = grouped_gemm_nt_masked(
        *(lhs, rhs, out, masked_m),
        **masked_keywords(block_format, dtype),
        alpha=None if alpha is None else alpha.to(device),
    )
    assert got is out
    for entry, rows in enumerate(count):
        x, y, factor = a.values[entry][:rows], b.values[entry], None if alpha is None else alpha[entry]
        error = (whole[entry, :rows, :n].cpu().double() - matmul(x, y, factor, None)).abs()
        assert bool((error <= error_bound(x, y, factor, None, dtype)).all()), f"entry {entry}"
        want[entry, :rows, :n] = whole[entry, :rows, :n]
    assert torch.equal(whole.view(torch.int16), want.view(torch.int16)), "other rows or columns were written"
    return whole


# ---- results ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_format", BlockFormat, ids=str)
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_the_definition(block_format: BlockFormat, dtype: torch.dtype, device: str) -> None:
    assert_products([3, 0, 40, 999, -1], 40, 24, 192, block_format, dtype, device=device)


def test_every_number_of_rows(device: str) -> None:
    for m, n, k in ((1, 8, 32), (17, 264, 416), (129, 136, 64)):
        assert_products([m, 0, m // 2, 1], m, n, k, device=device)


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
    (MaskedTactic(64, 2, 2, cluster_n=2), 4, [0, 0], 200, 136, 320, NVFP4, BF16),
    (MaskedTactic(8, 1, 3, swap_ab=True), 2, [2], 3, 136, 64, NVFP4, BF16),
)


@pytest.mark.one_in(3)
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


PORTABLE = (  # and the architecture, and what fits a tensor core
    ("sm_80", PortableMaskedTactic(16, 32, 16, 32, 2, 3), [5, 0, 3, -1], 5, 72, 160, NVFP4, BF16),
    ("sm_90a", PortableMaskedTactic(16, 128, 16, 32, 2, 3, split=2), [17, 0, 40], 40, 136, 288, MXFP4, F16),
    ("sm_120a", PortableMaskedTactic(64, 128, 64, 32, 1, 4, scaled_mma=True), [66, 999], 130, 136, 96, NVFP4, BF16),
    ("sm_100a", PortableMaskedTactic(16, 128, 16, 32, 2, 3, split=2), [0, 1, 16], 16, 136, 480, MXFP4, BF16),
)


@pytest.mark.parametrize(
    ("arch", "tactic", "filled", "m", "n", "k", "block_format", "dtype"),
    [pytest.param(*case, marks=SIM, id=case[0]) for case in PORTABLE],
)
def test_portable_products(
    arch: str,
    tactic: PortableMaskedTactic,
    filled: list[int],
    m: int,
    n: int,
    k: int,
    block_format: BlockFormat,
    dtype: torch.dtype,
) -> None:
    on = Arch.of(arch)
    chain = sim.Chain(after_unknown=True) if on.has_pdl else None
    with sim.device(on, races=True, chain=chain), MM_FP4_MASKED.forced(tactic):
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
        grouped_gemm_nt_masked(a, b, out, masked_m, **masked_keywords(NVFP4), alpha=(1 / scale**2).view(1, 1, 3))
    for entry, rows in enumerate(masked_m.tolist()):
        want = x[entry].double() @ weights[entry].double().T
        error = (out[:rows, :, entry] - want[:rows]).norm() / want[:rows].norm() if rows else 0.0
        assert error < 0.2
        assert (out[rows:, :, entry] == 7).all()


@pytest.mark.parametrize("arch", [pytest.param(arch, marks=SIM) for arch in ("sm_90a", "sm_100a")])
def test_a_layer_as_engines_compose_it(arch: str) -> None:
    """Quantize, gates and ups, SwiGLU and quantize, down: each launch waits for the one before."""
    entries, m, hidden, inter = 3, 20, 128, 64
    masked_m, generator = torch.tensor([20, 0, 9], dtype=torch.int32), torch.Generator().manual_seed(1)
    x, w13, w2 = (
        torch.randn(entries, *size, generator=generator).bfloat16()
        for size in ((m, hidden), (2 * inter, hidden), (hidden, inter))
    )
    scale, scale2 = torch.full((entries,), 2.0), torch.tensor([0.5, 1.0, 2.0])
    chain = sim.Chain()
    with sim.device(arch, races=True, chain=chain):
        up, down = (scaled_fp4_grouped_quantize(w, torch.full_like(masked_m, w.shape[1]), scale) for w in (w13, w2))
        h = torch.empty(entries, m, 2 * inter, dtype=BF16)
        y = torch.empty(entries, m, hidden, dtype=BF16)
        words = masked_keywords(NVFP4)
        a = scaled_fp4_grouped_quantize(x, masked_m, scale)
        grouped_gemm_nt_masked(a, up, h.permute(1, 2, 0), masked_m, **words, alpha=1 / scale**2)
        a = silu_and_mul_scaled_nvfp4_experts_quantize(h, masked_m, scale2)
        grouped_gemm_nt_masked(a, down, y.permute(1, 2, 0), masked_m, **words, alpha=1 / (scale * scale2))
    for entry, rows in enumerate(masked_m.tolist()):
        gate, up_ = (x[entry, :rows].double() @ w13[entry].double().T).chunk(2, -1)
        want = (torch.nn.functional.silu(gate) * up_) @ w2[entry].double().T
        assert (y[entry, :rows] - want).norm() <= 0.3 * want.norm()


def test_the_transpose_and_other_spellings() -> None:
    a, b = make_batch(2, 5, 64, NVFP4, 1), make_batch(2, 16, 64, NVFP4, 101)
    masked_m, want = torch.tensor([5, 2], dtype=torch.int32), torch.zeros(2, 5, 16, dtype=BF16)
    given = (a.codes, a.scales), (b.codes, b.scales)
    grouped_gemm_nt_masked(*given, want.permute(1, 2, 0), masked_m, **masked_keywords(NVFP4))
    flat = [(x.codes, x.scales.permute(5, 2, 4, 0, 1, 3).reshape(2, -1, 4)) for x in (a, b)]
    out = torch.zeros_like(want)
    grouped_gemm_nt_masked(*flat, out.permute(2, 1, 0), masked_m, **masked_keywords(NVFP4), is_swap_ab=True)
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
        (PortableMaskedTactic(64, 128, 64, 32, 1, 4), "sm_80", problem(32, 128, 256), "half of its tile"),
        (PortableMaskedTactic(16, 32, 16, 32, 2, 3), "sm_80", problem(16, 32, 64, 70_000), "65535 entries"),
    ],
    ids=str,
)
def test_why_a_tactic_is_rejected(
    tactic: MaskedTactic | PortableMaskedTactic, arch: str, one: MaskedProblem, reason: str
) -> None:
    kernel = KERNEL if isinstance(tactic, MaskedTactic) else PORTABLE_KERNEL
    assert reason in str(kernel.rejects(one, tactic, Arch.of(arch)))


def test_who_takes_what() -> None:
    """tcgen05 where it can; the portable products take k that are no multiple of 64, and more entries."""
    for m, tile_n in ((1, 8), (9, 16), (40, 64), (65, 128), (4096, 128)):
        assert MM_FP4_MASKED.select(problem(m, 4096, 64), SM_100A).tile_n == tile_n
    for one in (problem(64, 256, 96), problem(8, 256, 64, MOST_ENTRIES + 1)):
        assert isinstance(MM_FP4_MASKED.select(one, SM_100A), PortableMaskedTactic)


def test_grids() -> None:
    """As many clusters as the GPU runs at once, or as tiles if every row were filled."""
    assert KERNEL.geometry(problem(100, 256, 4096, 8), MaskedTactic(128, 1, 5), SM_100A).grid == (16, 1, 1)
    assert KERNEL.geometry(problem(1000, 4096, 4096, 8), MaskedTactic(128, 1, 5), SM_100A).grid == (148, 1, 1)
    split = PortableMaskedTactic(16, 128, 16, 32, 2, 3, split=2)
    assert PORTABLE_KERNEL.geometry(problem(40, 256, 512, 8), split, SM_100A).grid == (6, 2, 8)


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("ab_dtype", {"ab_dtype": "float8_e4m3fn"}),
        ("sf_dtype, sf_vec_size", {"sf_dtype": "float8_e8m0fnu"}),
        ("c_dtype", {"c_dtype": "float32"}),
        ("out", {"c_dtype": "float16"}),
        ("out", {"out": torch.zeros(5, 16, 2, dtype=BF16)}),  # entries innermost
        ("out", {"is_swap_ab": True}),
        ("masked_m", {"masked_m": torch.zeros(3, dtype=torch.int32)}),
        ("alpha", {"alpha": torch.ones(1)}),
        ("alpha_dtype", {"alpha_dtype": "float16"}),
        ("dst_signals", {"dst_signals": torch.zeros(2, dtype=torch.int32)}),
        ("is_combine_fusion", {"is_combine_fusion": True}),
        ("mma_tiler_mn", {"mma_tiler_mn": (128,)}),
        ("lhs", {"lhs": torch.zeros(5, 32, 2, dtype=torch.uint8)}),
    ],
    ids=str,
)
def test_what_is_refused(name: str, changed: dict[str, Any]) -> None:
    a, b = make_batch(2, 5, 64, NVFP4, 1), make_batch(2, 16, 64, NVFP4, 101)
    given = {"lhs": (a.codes, a.scales), "rhs": (b.codes, b.scales), "masked_m": torch.zeros(2, dtype=torch.int32)}
    given |= {"out": torch.zeros(2, 5, 16, dtype=BF16).permute(1, 2, 0), **masked_keywords(NVFP4)}
    with pytest.raises(ArgumentError) as caught:
        grouped_gemm_nt_masked(**(given | changed))
    assert caught.value.name == name
    grouped_gemm_nt_masked(**given, sm_count=3, mma_tiler_mn=(256, 128), cluster_shape_mn=(2, 1))


def test_an_output_in_memory_of_an_operand() -> None:
    a, b = make_batch(1, 16, 64, NVFP4, 1), make_batch(1, 16, 64, NVFP4, 101)
    out, masked_m = b.codes.reshape(-1).view(BF16).view(1, 16, 16).permute(1, 2, 0), torch.ones(1, dtype=torch.int32)
    given = (a.codes, a.scales), (b.codes, b.scales)
    with pytest.raises(ArgumentError, match="out: got memory of rhs"):
        grouped_gemm_nt_masked(*given, out, masked_m, **masked_keywords(NVFP4))

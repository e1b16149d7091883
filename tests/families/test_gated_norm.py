"""rmsnorm_gated_fp4quant: the bytes of its steps one by one, on the CPU, simulated and on a GPU, and bad input."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from jitfp4 import (
    ArgumentError,
    ArgumentTypeError,
    SfLayout,
    mxfp4_quantize,
    nvfp4_quantize,
    rmsnorm_fp4quant,
    rmsnorm_gated,
    rmsnorm_gated_fp4quant,
    sim,
)
from jitfp4.families.norm.kernels.rows_fp4quant import RowsTactic
from jitfp4.families.norm.operation import RMSNORM
from tests.support.compare import assert_same_bytes, poisoned
from tests.support.norm import DTYPES, rows_of_all_kinds
from tests.support.sample import SIM_ARCHS

SHAPES = [(7, 1, 64), (3, 3, 128), (2, 5, 256), (1, 3, 512), (130, 2, 64)]
SCALE = 3.0


def check(m: int, heads: int, d: int, dtype: torch.dtype, device: str) -> None:
    """NVFP4 in both layouts, and MXFP4, into poisoned outputs."""
    x = rows_of_all_kinds(m * heads, d, dtype).view(m, heads, d)
    gate = (x.flip(0) * 0.25).nan_to_num(1.0, 100.0, -100.0).contiguous()
    weight = torch.randn(d, generator=torch.Generator().manual_seed(d)).to(dtype)
    given = x.to(device), gate.to(device), weight.to(device)
    y = rmsnorm_gated(*given, 1e-5).view(m, heads * d)
    scale = torch.tensor([SCALE], device=device)
    for layout in (SfLayout.layout_linear, SfLayout.layout_128x4):
        codes = poisoned((m, heads * d // 2), torch.uint8, device)
        scales = poisoned((layout.numel(m, heads * d // 16),), torch.uint8, device)
        scales = scales.view(m, -1) if layout is SfLayout.layout_linear else scales
        swizzled = layout is SfLayout.layout_128x4
        rmsnorm_gated_fp4quant(*given, codes, scales, scale, 1e-5, is_sf_swizzled_layout=swizzled)
        want = nvfp4_quantize(y, scale, layout)
        assert_same_bytes("codes", codes.cpu(), want[0].view(torch.uint8).cpu())
        assert_same_bytes("scales", scales.cpu().flatten(), want[1].view(torch.uint8).cpu().flatten())
    codes, scales = rmsnorm_gated_fp4quant(*given, eps=1e-5, block_size=32, is_sf_swizzled_layout=True)
    want = mxfp4_quantize(y)
    assert_same_bytes("MXFP4 codes", codes.view(torch.uint8).cpu(), want[0].view(torch.uint8).cpu())
    assert_same_bytes("MXFP4 scales", scales.view(torch.uint8).cpu().flatten(), want[1].cpu().flatten())


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bytes_of_the_steps(device: str, dtype: torch.dtype) -> None:
    for m, heads, d in (*SHAPES, (1, 32, 128), (1, 17, 512)):
        check(m, heads, d, dtype, device)


@pytest.mark.sim
@pytest.mark.compile
@pytest.mark.parametrize("arch", SIM_ARCHS)
def test_simulated_kernel(arch: str) -> None:
    with sim.device(arch, races=True):
        for m, heads, d in SHAPES:
            check(m, heads, d, torch.bfloat16, "cpu")


@pytest.mark.sim
@pytest.mark.compile
@pytest.mark.parametrize("tactic", [RowsTactic(2), RowsTactic(4)], ids=str)
def test_every_number_of_units_simulated(tactic: RowsTactic) -> None:
    with sim.device("sm_90a", races=True), RMSNORM.forced(tactic):
        check(2, 9, 128, torch.float16, "cpu")


def test_rows_apart_and_no_rows(device: str) -> None:
    wide = torch.randn(3, 2, 256, dtype=torch.bfloat16, device=device)
    x, gate, weight = wide[..., :128], wide[..., 128:], torch.ones(128, dtype=torch.bfloat16, device=device)
    got, want = (rmsnorm_gated_fp4quant(*pair, weight) for pair in ((x, gate), (x.contiguous(), gate.contiguous())))
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(got, want, strict=True))
    codes, scales = rmsnorm_gated_fp4quant(x[:0], gate[:0], weight)
    assert (codes.shape, scales.shape) == ((0, 128), (0, 16))


X, W = torch.ones(4, 2, 64, dtype=torch.bfloat16), torch.ones(64, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("name", "arguments", "options"),
    [
        ("input", (X.float(), X, W), {}),
        ("input", (X[0], X[0], W), {}),
        ("input", (X[..., :48], X[..., :48], W[:48]), {}),
        ("input", (X.expand(4, 2, 64).repeat(1, 200, 1), X.repeat(1, 200, 1), W), {}),
        ("gate", (X, X[:2], W), {}),
        ("gate", (X, X.half(), W), {}),
        ("weight", (X, X, W[:32]), {}),
        ("weight", (X, X, W.half()), {}),
        ("eps", (X, X, W), {"eps": -1.0}),
        ("y_fp4", (X, X, W, torch.zeros(4, 2, 32, dtype=torch.uint8)), {}),
        ("block_size", (X, X, W), {"block_size": 8}),
    ],
)
def test_bad_input(name: str, arguments: Any, options: Any) -> None:
    with pytest.raises((ArgumentError, ArgumentTypeError), match=f"^{name}"):
        rmsnorm_gated_fp4quant(*arguments, **options)


def test_other_kernels_have_no_gate() -> None:
    with (
        sim.device("sm_90a"),
        RMSNORM.forced(RMSNORM.kernels[0].tactics[0]),
        pytest.raises(ArgumentError, match="gate"),
    ):
        rmsnorm_gated_fp4quant(X, X, W)
    assert rmsnorm_fp4quant(X[:, 0], W)[0].shape == (4, 32)

"""mm_fp8_fp4: what rounding a weight to E4M3 costs, and the scales of its rows."""

from __future__ import annotations

import pytest
import torch

from jitfp4 import Fp4Weight, fp8_row_scale, prepare_fp4_weight
from jitfp4.weight import rounded_to_e4m3
from tests.support.gemm import LINEAR

E4M3 = torch.float8_e4m3fn


def every_product() -> Fp4Weight:
    """Row i has every code with every E4M3 scale of mantissa i, and 448."""
    codes = (torch.arange(8) * 2 | torch.arange(8) * 2 + 1 << 4).to(torch.uint8).repeat(8, 16)
    scales = (torch.arange(16) << 3 | torch.arange(8).unsqueeze(1)).to(torch.uint8)
    scales[:, 15] = 0x7E
    return prepare_fp4_weight(codes, scales, 16, LINEAR)


def test_every_code_times_every_scale_is_rounded_to_nearest() -> None:
    weight = every_product()
    row_scale = fp8_row_scale(weight)
    assert row_scale[:8].tolist() == [8.0] * 8
    exact, got = weight.dequantize() / 8, rounded_to_e4m3(weight, row_scale) / 8
    is_normal = exact.abs() >= 2.0**-6
    assert torch.equal(got[is_normal], exact.to(E4M3).float()[is_normal])
    assert float((got - exact).abs()[is_normal].div(exact.abs()[is_normal]).max()) == pytest.approx(1 / 21)
    small = ~is_normal
    assert float((got - exact).abs()[small].max()) < 2.0**-9
    assert bool((got[small] * 2**9 == (got[small] * 2**9).round()).all())


@pytest.mark.parametrize(
    ("scale", "wanted"), [(448.0, 8.0), (72.0, 1.0), (80.0, 2.0), (1.0, 2.0**-6), (2.0**-9, 2.0**-15)]
)
def test_the_scale_of_a_row_is_the_least_that_fits(scale: float, wanted: float) -> None:
    scales = torch.tensor([[scale, 2.0**-9]] * 8).to(E4M3)
    weight = prepare_fp4_weight(torch.full((8, 16), 0x77, dtype=torch.uint8), scales, 16, LINEAR)
    assert fp8_row_scale(weight)[:8].tolist() == [wanted] * 8
    assert float(rounded_to_e4m3(weight, fp8_row_scale(weight)).max()) / wanted <= 448


def test_rows_of_zeros_and_of_nan() -> None:
    codes, scales = torch.full((16, 16), 0x77, dtype=torch.uint8), torch.full((16, 2), 0x38, dtype=torch.uint8)
    codes[1], scales[2], scales[3, 1] = 0, 0, 0x7F
    codes[4, :8], scales[4, 0] = 0, 0x7E  # the scale of a block of zeros does not count
    got = fp8_row_scale(prepare_fp4_weight(codes, scales, 16, LINEAR))
    assert got[1:3].tolist() == [1.0, 1.0]
    assert bool(got[3].isnan())
    assert got[4] == got[0]


def test_mxfp4_is_exact_down_to_2_to_the_minus_14_of_the_rows_scale() -> None:
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).repeat(8, 1)[:, :256]
    scales = (120 - torch.arange(16, dtype=torch.int32)).to(torch.uint8).repeat(8, 1)
    weight = prepare_fp4_weight(codes, scales, 32, LINEAR)
    exact, got = weight.dequantize(), rounded_to_e4m3(weight, fp8_row_scale(weight))
    assert torch.equal(got[:, : 15 * 32], exact[:, : 15 * 32])
    assert not torch.equal(got[:, 15 * 32 :], exact[:, 15 * 32 :])

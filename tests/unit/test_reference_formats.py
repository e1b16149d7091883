"""The torch models of the formats against independent definitions: enumerated values, ml_dtypes, exact fractions."""

from __future__ import annotations

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch

from jitfp4.formats import E2M1_VALUES
from jitfp4.reference import formats
from tests.support.inputs import MIDPOINTS


def nearest_e2m1(value: float) -> int:
    """Code of the nearest magnitude by exact arithmetic, ties to the even code."""
    distances = [abs(Fraction(abs(value)) - Fraction(v)) for v in E2M1_VALUES]
    best = min(distances)
    code = min((c for c, d in enumerate(distances) if d == best), key=lambda c: c % 2)
    return code | (8 if np.signbit(value) else 0)


def test_e2m1_midpoints_and_their_neighbours() -> None:
    points = np.array([p * s for p in (*MIDPOINTS, *E2M1_VALUES) for s in (1, -1)], dtype=np.float32)
    values = np.concatenate(
        [points, np.nextafter(points, np.float32(np.inf)), np.nextafter(points, np.float32(-np.inf))]
    )
    got = formats.encode_e2m1(torch.from_numpy(values))
    assert got.tolist() == [nearest_e2m1(float(v)) for v in values]


def test_e2m1_of_every_bf16() -> None:
    x = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.bfloat16).float()
    finite = x[x.isfinite()]
    assert formats.encode_e2m1(finite).tolist() == [nearest_e2m1(v) for v in finite.tolist()]
    assert set(formats.encode_e2m1(x[x.isnan()]).tolist()) == {7}
    assert formats.encode_e2m1(torch.tensor([float("inf"), float("-inf")])).tolist() == [7, 15]


def test_e2m1_round_trip_and_packing() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    assert torch.equal(formats.encode_e2m1(formats.decode_e2m1(codes)), codes)
    packed = formats.pack_e2m1(codes)
    assert packed.tolist() == [low | (low + 1) << 4 for low in range(0, 16, 2)]
    assert torch.equal(formats.unpack_e2m1(packed), codes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_e4m3_of_every_half(dtype: torch.dtype) -> None:
    x = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype).float()
    clipped = np.clip(x.numpy(), -448, 448)  # ml_dtypes does not saturate
    want = clipped.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    got = formats.encode_e4m3(x).numpy()
    nan = np.isnan(clipped)
    assert (got[~nan] == want[~nan]).all()
    assert set(got[nan]) == {0x7F}


def test_e4m3_decodes_every_byte() -> None:
    byte = torch.arange(256).to(torch.uint8)
    want = byte.numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    assert np.array_equal(formats.decode_e4m3(byte).numpy(), want, equal_nan=True)


def test_ue8m0_rounds_up_to_a_power_of_two() -> None:
    powers = torch.tensor([2.0**e for e in range(-127, 128)], dtype=torch.float64).float()
    assert formats.encode_ue8m0(powers).tolist() == list(range(255))
    above = torch.nextafter(powers, torch.tensor(torch.inf))
    assert formats.encode_ue8m0(above).tolist() == [*range(1, 255), 254]
    special = torch.tensor([0.0, torch.inf, torch.nan, 1e-45])
    assert formats.encode_ue8m0(special).tolist() == [0, 254, 254, 0]


def test_ue8m0_decodes_every_byte() -> None:
    byte = torch.arange(256).to(torch.uint8)
    want = byte.numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float64).astype(np.float32)
    assert np.array_equal(formats.decode_ue8m0(byte).numpy(), want, equal_nan=True)


def test_divide_rounds_correctly() -> None:
    denominators = torch.linspace(0.1, 3000, 4096)
    want = [np.float32(Fraction(2688) / Fraction(d)) for d in denominators.tolist()]
    assert formats.divide(2688.0, denominators).tolist() == [float(w) for w in want]


def test_block_amax_ignores_nan_unless_the_block_is_nan() -> None:
    nan, inf = float("nan"), float("inf")
    blocks = torch.tensor([[1.0, -3.0, nan, 2.0], [nan, nan, nan, nan], [nan, -0.0, 0.0, nan], [1.0, -inf, nan, 0.0]])
    amax = formats.block_amax(blocks)
    assert amax[0] == 3 and amax[1].isnan() and amax[2] == 0 and amax[3] == inf

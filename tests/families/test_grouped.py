"""Batches of matrices: plain, masked, and after SwiGLU."""

from __future__ import annotations

import pytest
import torch

from jitfp4 import (
    ArgumentError,
    ArgumentTypeError,
    SfLayout,
    nvfp4_batched_quantize,
    scaled_fp4_grouped_quantize,
    silu_and_mul_scaled_nvfp4_experts_quantize,
)
from jitfp4.families.quantize.arguments import BatchArguments
from jitfp4.families.quantize.operation import QUANTIZE_BATCH
from jitfp4.formats import NVFP4
from jitfp4.reference import quantize as reference
from jitfp4.reference.formats import unswizzle
from tests.support.compare import assert_same_bytes, poisoned
from tests.support.inputs import far_gates, random_matrix

L = SfLayout.layout_128x4


def batch(b: int, m: int, k: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.stack([random_matrix(m, k, dtype, seed) for seed in range(b)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_batched_is_one_matrix_at_a_time(dtype: torch.dtype, device: str) -> None:
    a = batch(3, 130, 336, dtype)
    for scale in (torch.tensor([2.0]), torch.arange(1.0, 131.0)):
        q, sf = nvfp4_batched_quantize(a.to(device), scale.to(device))
        assert q.shape == (3, 130, 168) and sf.shape == (3, 256 * 24)
        for b in range(3):
            g = scale if len(scale) == 1 else scale.unsqueeze(1)
            codes, scales = reference.quantize_blocks(a[b], NVFP4, g)
            assert_same_bytes("codes", q[b], codes)
            assert_same_bytes("scales", unswizzle(sf[b].view(256, 24), L, 130, 21), scales)
            assert int(sf[b].count_nonzero()) == int(scales.count_nonzero())


def test_masked_rows_are_quantized_and_no_others_touched(device: str) -> None:
    a, scale = batch(4, 140, 208), torch.tensor([1.0, 30.0, 0.01, 5.0])
    mask = torch.tensor([140, 0, 65, 999], dtype=torch.int32)
    q = poisoned((4, 140, 104), torch.uint8, device)
    sf = poisoned((4, L.numel(140, 13)), torch.uint8, device)
    poison = int(q.flatten()[0])
    given = a.to(device), mask.to(device), scale.to(device)
    QUANTIZE_BATCH(BatchArguments(*given, by_row=False, out=q, out_sf=sf, silu=False, four_over_six=0, enable_pdl=None))
    for b, rows in enumerate((140, 0, 65, 140)):
        codes, scales = reference.quantize_blocks(a[b, :rows], NVFP4, scale[b])
        assert_same_bytes("codes", q[b, :rows], codes)
        assert (q[b, rows:] == poison).all()
        linear = unswizzle(sf[b].view(256, 16), L, 256, 16).cpu()
        assert_same_bytes("scales", linear[:rows, :13].contiguous(), scales)
        assert not linear[:rows, 13:].any() and not linear[140:].any()
        assert (linear[rows:140] == poison).all()


def test_grouped_outputs_are_views_in_the_published_order(device: str) -> None:
    a, scale = batch(2, 130, 80), torch.tensor([3.0, 7.0])
    mask = torch.tensor([130, 20], dtype=torch.int32)
    q, sf = scaled_fp4_grouped_quantize(a.to(device), mask.to(device), scale.to(device))
    assert q.shape == (130, 40, 2) and sf.shape == (32, 4, 2, 4, 2, 2) and sf.dtype == torch.float8_e4m3fn
    codes, scales = reference.quantize_blocks(a[1, :20], NVFP4, scale[1])
    assert_same_bytes("codes", q[:20, :, 1].contiguous(), codes)
    for row, col in ((0, 0), (19, 4), (7, 3)):
        byte = sf.view(torch.uint8)[row % 32, row % 128 // 32, row // 128, col % 4, col // 4, 1]
        assert byte == scales[row, col]


def test_experts_apply_swiglu_first(device: str) -> None:
    a = batch(2, 20, 2 * 96, torch.float16)
    a[..., :96] = far_gates(a[..., :96])
    a = a.clamp(-200, 200)
    scale, mask = torch.tensor([0.5, 0.25]), torch.tensor([20, 11], dtype=torch.int32)
    q, sf = silu_and_mul_scaled_nvfp4_experts_quantize(a.to(device), mask.to(device), scale.to(device))
    assert q.shape == (20, 48, 2) and sf.shape == (32, 4, 1, 4, 2, 2)
    for b, rows in enumerate((20, 11)):
        codes, scales = reference.quantize_blocks(reference.silu_and_mul(a[b, :rows]), NVFP4, scale[b])
        differ = (q[:rows, :, b].cpu() != codes).float().mean()
        assert differ <= 2e-3  # ex2.approx; see test_fp4_quantize.py
        row, col = torch.meshgrid(torch.arange(rows), torch.arange(6), indexing="ij")
        written = sf.view(torch.uint8).cpu()[row % 32, row % 128 // 32, row // 128, col % 4, col // 4, b]
        assert (written != scales).float().mean() <= 1e-2


def test_bad_arguments_are_named() -> None:
    a, mask, scale = batch(2, 4, 32), torch.ones(2, dtype=torch.int32), torch.ones(2)
    with pytest.raises(ArgumentError, match=r"^a: "):
        nvfp4_batched_quantize(a[0], 1.0)
    with pytest.raises(ArgumentError, match=r"^a: "):
        nvfp4_batched_quantize(a.transpose(0, 1), 1.0)
    with pytest.raises(ArgumentError, match=r"^a_global_sf: "):
        nvfp4_batched_quantize(a, torch.ones(3))
    with pytest.raises(ArgumentError, match=r"^sf_vec_size: "):
        nvfp4_batched_quantize(a, 1.0, 32)
    with pytest.raises(ArgumentTypeError, match=r"^mask: "):
        scaled_fp4_grouped_quantize(a, mask.long(), scale)
    with pytest.raises(ArgumentError, match=r"^mask: "):
        scaled_fp4_grouped_quantize(a, mask[:1], scale)
    with pytest.raises(ArgumentError, match=r"^a_global_sf: "):
        scaled_fp4_grouped_quantize(a, mask, scale[:1])
    with pytest.raises(ArgumentError, match=r"^a: "):
        silu_and_mul_scaled_nvfp4_experts_quantize(a[..., :16].contiguous(), mask, scale)

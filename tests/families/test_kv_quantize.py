"""NVFP4 with a decode scale: rows and whole paged caches, on CPU, simulator and GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from jitfp4 import (
    ArgumentError,
    ArgumentTypeError,
    SfLayout,
    nvfp4_kv_dequantize,
    nvfp4_kv_quantize,
    nvfp4_quantize_append_paged_kv_cache_with_slot_mapping,
    nvfp4_quantize_paged_kv_cache,
)
from jitfp4.families.kv.kernels.quantize import TACTICS as QUANTIZE_TACTICS
from jitfp4.families.kv.operation import quantize
from jitfp4.reference import kv as reference
from jitfp4.reference.quantize import nvfp4_quantize as encode_reference
from tests.support.compare import assert_same_bytes
from tests.support.inputs import all_half_patterns, hard_blocks, random_matrix
from tests.support.kv import interleave_by_hand, quantize_by_hand

DTYPES = [torch.bfloat16, torch.float16]
SHAPES = [(1, 16), (3, 48), (5, 4112), (70, 128)]
SCALES = (1.0, 0.37, 3e-3, 1e-30, 1e30, 1e-42)
L = SfLayout.layout_linear


def check(x: torch.Tensor, scale: float, device: str) -> None:
    gd = torch.tensor([scale])
    codes, sf = nvfp4_kv_quantize(x.to(device), gd.to(device))
    want_codes, want_sf = reference.quantize(x, gd)
    assert_same_bytes("codes", codes, want_codes)
    assert_same_bytes("scales", sf, want_sf)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", SCALES[:5])
def test_reference_is_what_the_docstring_says(dtype: torch.dtype, scale: float) -> None:
    x = random_matrix(9, 64, dtype)
    x[0], x[1, :16], x[2] = 0, -0.0, 1e-4
    codes, sf = reference.quantize(x, torch.tensor([scale]))
    want_codes, want_sf = quantize_by_hand(x, scale)
    assert_same_bytes("codes", codes, want_codes)
    assert_same_bytes("scales", sf, want_sf)


@pytest.mark.parametrize("scale", [2.0**-9, 1.0, 2.0**7])
def test_powers_of_two_give_the_bytes_of_nvfp4_quantize(scale: float) -> None:
    for x in (random_matrix(20, 64, torch.bfloat16), hard_blocks(torch.float16)):
        want = encode_reference(x, torch.tensor(1 / scale), L)
        for name, got, wanted in zip(
            ("codes", "scales"), reference.quantize(x, torch.tensor(scale)), want, strict=True
        ):
            assert_same_bytes(name, got, wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows(dtype: torch.dtype, device: str) -> None:
    for m, k in SHAPES:
        check(random_matrix(m, k, dtype), 0.01, device)
    for scale in SCALES:
        check(hard_blocks(dtype), scale, device)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_half_on_gpu(dtype: torch.dtype) -> None:
    for scale in SCALES:
        check(all_half_patterns(dtype), scale, "cuda")
    check(random_matrix(3000, 1024, dtype), 0.01, "cuda")


@pytest.mark.parametrize("tactic", QUANTIZE_TACTICS, ids=str)
def test_every_tactic(tactic: object, device: str) -> None:
    with quantize.forced(tactic):
        check(random_matrix(37, 80, torch.bfloat16), 0.02, device)


def test_strided_rows_and_none() -> None:
    wide = random_matrix(6, 96, torch.float16)
    got = nvfp4_kv_quantize(wide[:, 32:64], 0.5)
    for name, a, b in zip(("codes", "scales"), got, reference.quantize(wide[:, 32:64], torch.tensor(0.5)), strict=True):
        assert_same_bytes(name, a, b)
    codes, sf = nvfp4_kv_quantize(wide[:0], 1.0)
    assert codes.shape == (0, 48) and sf.shape == (0, 6)


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("page_size", [4, 5, 8])
def test_paged_cache(layout: str, page_size: int, device: str) -> None:
    d = 80 if page_size == 5 else 64
    k = random_matrix(3 * page_size * 3, d, torch.bfloat16).view(3, page_size, 3, d)
    v = random_matrix(3 * page_size * 3, 128, torch.bfloat16, seed=1).view(3, page_size, 3, 128)
    shown = [(x.transpose(1, 2).contiguous() if layout == "HND" else x).to(device) for x in (k, v)]
    order = "linear" if page_size == 5 else "interleaved4"
    (k_fp4, v_fp4), (k_sf, v_sf), k_scale, v_scale = nvfp4_quantize_paged_kv_cache(*shown, layout, v_sf_layout=order)
    for x, fp4, sf, scale in ((k, k_fp4, k_sf, k_scale), (v, v_fp4, v_sf, v_scale)):
        amax = x.float().abs().amax()
        assert scale == float(torch.ones(()) / (torch.tensor(448.0) / amax))
        codes, scales = reference.quantize(x, torch.tensor(scale))
        if x is v and order == "interleaved4":
            scales = interleave_by_hand(scales)
        assert sf.dtype == torch.float8_e4m3fn and fp4.is_contiguous() and sf.is_contiguous()
        seen = [y.view(torch.uint8).transpose(1, 2) if layout == "HND" else y.view(torch.uint8) for y in (fp4, sf)]
        assert_same_bytes("codes", seen[0].contiguous(), codes)
        assert_same_bytes("scales", seen[1].contiguous(), scales)


def test_appended_tokens_get_the_bytes_of_the_whole_cache(device: str) -> None:
    k, v = (random_matrix(8 * 4 * 2, 64, torch.float16, seed=s).view(8, 2, 4, 64).to(device) for s in range(2))
    fp4, sf, k_scale, v_scale = nvfp4_quantize_paged_kv_cache(
        k, v, "HND", k_global_sf=3.7, v_global_sf=torch.tensor([0.61]).to(device)
    )
    again, again_sf = tuple(x.clone().fill_(0xA5) for x in fp4), tuple(x.clone() for x in sf)
    for x in again_sf:
        x.view(torch.uint8).fill_(0xA5)
    slots = torch.randperm(32, generator=torch.Generator().manual_seed(0))
    rows = [x.transpose(1, 2).flatten(0, 1)[slots.to(device)] for x in (k, v)]
    nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(
        *rows, slots.to(device), again, again_sf, k_scale, v_scale, "HND", v_sf_layout="interleaved4"
    )
    for got, want in zip((*again, *again_sf), (*fp4, *sf), strict=True):
        assert_same_bytes("cache", got, want)


def test_products_with_the_default_scale_fit_e4m3() -> None:
    k = random_matrix(16, 64, torch.bfloat16).view(2, 1, 8, 64)
    (k_fp4, _), (k_sf, _), _, _ = nvfp4_quantize_paged_kv_cache(k, k)
    assert nvfp4_kv_dequantize(k_fp4.view(16, 32), k_sf.view(16, 4), 1.0).abs().max() <= 448 * 17 / 16


GOOD = torch.zeros(2, 4, 2, 64, dtype=torch.bfloat16)
ROWS = torch.zeros(4, 64, dtype=torch.float16)
BAD_CALLS: dict[str, tuple[type[ArgumentError], str, Callable[[], object]]] = {
    "rows type": (ArgumentTypeError, "input", lambda: nvfp4_kv_quantize([1.0], 1.0)),
    "rows dtype": (ArgumentTypeError, "input", lambda: nvfp4_kv_quantize(ROWS.float(), 1.0)),
    "rows rank": (ArgumentError, "input", lambda: nvfp4_kv_quantize(ROWS[0], 1.0)),
    "k": (ArgumentError, "input", lambda: nvfp4_kv_quantize(ROWS[:, :24], 1.0)),
    "column stride": (ArgumentError, "input", lambda: nvfp4_kv_quantize(ROWS[:, ::2], 1.0)),
    "row stride": (ArgumentError, "input", lambda: nvfp4_kv_quantize(torch.zeros(4, 68).half()[:, :64], 1.0)),
    "address": (ArgumentError, "input", lambda: nvfp4_kv_quantize(torch.zeros(65).half()[1:].view(1, 64), 1.0)),
    "scale size": (ArgumentError, "global_scale", lambda: nvfp4_kv_quantize(ROWS, torch.ones(2))),
    "scale device": (ArgumentTypeError, "global_scale", lambda: nvfp4_kv_quantize(ROWS, torch.ones(1, device="meta"))),
    "cache rank": (ArgumentError, "k_cache", lambda: nvfp4_quantize_paged_kv_cache(GOOD[0], GOOD)),
    "cache dtypes": (ArgumentTypeError, "v_cache", lambda: nvfp4_quantize_paged_kv_cache(GOOD, GOOD.half())),
    "cache shapes": (ArgumentError, "v_cache", lambda: nvfp4_quantize_paged_kv_cache(GOOD, GOOD[:1])),
    "layout": (ArgumentError, "kv_layout", lambda: nvfp4_quantize_paged_kv_cache(GOOD, GOOD, "HDN")),
    "page size": (ArgumentError, "v_sf_layout", lambda: nvfp4_quantize_paged_kv_cache(GOOD, GOOD, "HND")),
    "head dim": (
        ArgumentError,
        "v_sf_layout",
        lambda: nvfp4_quantize_paged_kv_cache(GOOD[..., :32], GOOD[..., :32], "NHD"),
    ),
    "V order": (
        ArgumentError,
        "v_sf_layout",
        lambda: nvfp4_quantize_paged_kv_cache(GOOD, GOOD, "NHD", v_sf_layout="x"),
    ),
    "zero scale": (ArgumentError, "k_global_sf", lambda: nvfp4_quantize_paged_kv_cache(GOOD, GOOD, "NHD", 0.0)),
    "NaN scale": (
        ArgumentError,
        "v_global_sf",
        lambda: nvfp4_quantize_paged_kv_cache(GOOD, GOOD, "NHD", 1.0, torch.nan),
    ),
    "NaN in the cache": (ArgumentError, "k_cache", lambda: nvfp4_quantize_paged_kv_cache(GOOD / 0, GOOD, "NHD")),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_bad_arguments_are_named(case: str) -> None:
    error, name, call = BAD_CALLS[case]
    with pytest.raises(error) as caught:
        call()
    assert caught.value.name == name

"""NVFP4 dequantization: arguments, and every byte on CPU, simulator and GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import jitfp4
from jitfp4 import (
    ArgumentError,
    ArgumentTypeError,
    SfLayout,
    e2m1_and_ufp8sf_scale_to_float,
    mxfp4_dequantize,
    nvfp4_dequantize,
    nvfp4_quantize,
)
from jitfp4.formats import MXFP4, NVFP4
from jitfp4.reference import quantize as reference
from tests.support.compare import assert_same_bytes, poisoned
from tests.support.inputs import random_matrix
from tests.support.norm import assert_same_floats
from tests.support.sample import SIM_ARCHS

LAYOUTS = list(SfLayout)
OUT_DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 16), (3, 48), (129, 80), (40, 1040), (256, 512)]


def every_code_and_scale(layout: SfLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """[64, 256] in which every code meets many of the finite scale bytes, as packed codes and ``layout`` scales."""
    generator = torch.Generator().manual_seed(11)
    q = torch.randint(0, 256, (64, 128), generator=generator).to(torch.uint8)
    sf = torch.arange(64 * 16).remainder(127).to(torch.uint8).view(64, 16)
    return q, reference.swizzle(sf, layout)


def check_dequantize(
    q: torch.Tensor, sf: torch.Tensor, scale: float, layout: SfLayout, out_dtype: torch.dtype, device: str
) -> None:
    out = poisoned((q.shape[0], 2 * q.shape[1]), out_dtype, device)
    gd = torch.tensor([scale])
    got = nvfp4_dequantize(q.to(device), sf.to(device), gd.to(device), layout, out_dtype=out_dtype, out=out)
    assert got is out
    assert_same_bytes("values", out, reference.dequantize(q, sf, NVFP4, gd, layout).to(out_dtype))


def check_mxfp4(layout: SfLayout, out_dtype: torch.dtype, device: str) -> None:
    """Every UE8M0 byte, in poisoned outputs."""
    generator = torch.Generator().manual_seed(12)
    for m, k in ((70, 128), (9, 544)):
        q = torch.randint(0, 256, (m, k // 2), generator=generator).to(torch.uint8)
        scales = torch.arange(m * k // 32)
        scales[::3] = torch.tensor([0, 255, 1, 254]).repeat(len(scales))[: len(scales[::3])]
        sf = reference.swizzle(scales.to(torch.uint8).view(m, k // 32), layout)
        out = poisoned((m, k), out_dtype, device)
        mxfp4_dequantize(q.to(device), sf.to(device), layout, out_dtype=out_dtype, out=out)
        assert_same_floats("values", out, reference.dequantize(q, sf, MXFP4, None, layout).to(out_dtype))


def test_values_by_hand() -> None:
    q = torch.tensor([[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]], dtype=torch.uint8)
    sf = torch.tensor([[0x40]], dtype=torch.uint8)  # 2.0
    got = nvfp4_dequantize(q, sf, 0.5, SfLayout.layout_linear)
    positive = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert got.tolist() == [positive + [-v for v in positive]]


def test_mxfp4_values_by_hand() -> None:
    q = torch.full((1, 16), 0x72, dtype=torch.uint8)
    for byte, scale in ((127, 1.0), (130, 8.0), (0, 2.0**-127)):
        sf = torch.tensor([[byte]], dtype=torch.uint8)
        assert mxfp4_dequantize(q, sf, SfLayout.layout_linear).tolist() == [[1.0 * scale, 6.0 * scale] * 16]


def test_general_entry_agrees_with_the_others() -> None:
    q, sf = every_code_and_scale(SfLayout.layout_8x4)
    general = e2m1_and_ufp8sf_scale_to_float(q, sf, torch.tensor([0.5]), is_sf_8x4_layout=True)
    assert torch.equal(general, nvfp4_dequantize(q, sf, 0.5, SfLayout.layout_8x4))
    with pytest.raises(ArgumentError, match="global_scale_tensor"):
        e2m1_and_ufp8sf_scale_to_float(q, sf)
    with pytest.raises(ArgumentError, match="sf_vec_size"):
        e2m1_and_ufp8sf_scale_to_float(q, sf, torch.ones(1), 32)
    with pytest.raises(ArgumentError, match="is_sf_8x4_layout"):
        e2m1_and_ufp8sf_scale_to_float(q, sf, torch.ones(1), is_sf_swizzled_layout=False, is_sf_8x4_layout=True)


def test_scales_may_be_typed_and_flat() -> None:
    a = random_matrix(40, 64, torch.float16)
    q, sf = nvfp4_quantize(a, 4.0)
    want = nvfp4_dequantize(q, sf, 0.25)
    for variant in (sf.view(torch.float8_e4m3fn), sf.flatten()):
        assert torch.equal(nvfp4_dequantize(q, variant, 0.25), want)


Q, SF = torch.zeros(4, 32, dtype=torch.uint8), torch.zeros(128, 4, dtype=torch.uint8)
BAD_CALLS: dict[str, tuple[type[ArgumentError], str, Callable[[], object]]] = {
    "codes dtype": (ArgumentTypeError, "a_fp4", lambda: nvfp4_dequantize(Q.int(), SF, 1.0)),
    "codes rank": (ArgumentError, "a_fp4", lambda: nvfp4_dequantize(Q[0], SF, 1.0)),
    "codes width": (ArgumentError, "a_fp4", lambda: nvfp4_dequantize(Q[:, :12].contiguous(), SF, 1.0)),
    "codes strides": (ArgumentError, "a_fp4", lambda: nvfp4_dequantize(Q[:, ::2], SF, 1.0)),
    "scale count": (ArgumentError, "a_sf", lambda: nvfp4_dequantize(Q, SF[:4], 1.0)),
    "scale dtype": (ArgumentTypeError, "a_sf", lambda: nvfp4_dequantize(Q, SF.float(), 1.0)),
    "scale device": (ArgumentTypeError, "a_sf", lambda: nvfp4_dequantize(Q, SF.to("meta"), 1.0)),
    "global size": (ArgumentError, "global_decode_scale", lambda: nvfp4_dequantize(Q, SF, torch.ones(2))),
    "out dtype": (ArgumentTypeError, "out_dtype", lambda: nvfp4_dequantize(Q, SF, 1.0, out_dtype=torch.float64)),
    "out shape": (ArgumentError, "out", lambda: nvfp4_dequantize(Q, SF, 1.0, out=torch.empty(4, 32))),
    "block size": (ArgumentError, "sf_vec_size", lambda: nvfp4_dequantize(Q, SF, 1.0, sf_vec_size=32)),
    "layout": (ArgumentError, "sfLayout", lambda: nvfp4_dequantize(Q, SF, 1.0, 7)),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_bad_arguments_are_named(case: str) -> None:
    error, name, call = BAD_CALLS[case]
    with pytest.raises(error) as caught:
        call()
    assert caught.value.name == name


@pytest.mark.sim
@pytest.mark.compile
@pytest.mark.parametrize("arch", SIM_ARCHS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: x.tag)
@pytest.mark.parametrize("out_dtype", OUT_DTYPES, ids=str)
def test_simulated_kernel(arch: str, layout: SfLayout, out_dtype: torch.dtype) -> None:
    with jitfp4.sim.device(arch):
        check_mxfp4(layout, out_dtype, "cpu")
        check_dequantize(*every_code_and_scale(layout), 0.37, layout, out_dtype, "cpu")
        for m, k in SHAPES[:3]:
            q, sf = reference.nvfp4_quantize(random_matrix(m, k, torch.bfloat16), torch.tensor(3.0), layout)
            check_dequantize(q, sf, 1e-3, layout, out_dtype, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: x.tag)
@pytest.mark.parametrize("out_dtype", OUT_DTYPES, ids=str)
def test_on_gpu(layout: SfLayout, out_dtype: torch.dtype) -> None:
    check_mxfp4(layout, out_dtype, "cuda")
    for scale in (1.0, 0.37, 1e-30, 1e30):
        check_dequantize(*every_code_and_scale(layout), scale, layout, out_dtype, "cuda")
    for m, k in SHAPES:
        q, sf = reference.nvfp4_quantize(random_matrix(m, k, torch.bfloat16), torch.tensor(3.0), layout)
        check_dequantize(q, sf, 1 / 3, layout, out_dtype, "cuda")

"""NVFP4 back to floats."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch

from jitfp4.arch import Arch
from jitfp4.engine import Launch, target_of
from jitfp4.errors import ArgumentError, ArgumentTypeError
from jitfp4.formats import NVFP4, DType
from jitfp4.layouts import SfLayout, ceil_div
from jitfp4.ops import operator
from jitfp4.reference import quantize as reference
from jitfp4.registry import Family, register
from jitfp4.spec import I64, Geometry, KernelSpec, Ptr
from jitfp4.tensors import (
    check_contiguous,
    check_device,
    check_dtype,
    check_layout,
    check_same_device,
    output,
    scalar_f32,
)

_OUT_DTYPES = {torch.float32: DType.F32, torch.bfloat16: DType.BF16, torch.float16: DType.F16}
_BLOCK_THREADS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec(KernelSpec):
    out_dtype: DType
    sf_layout: SfLayout


def specs(_: Arch) -> Iterator[Spec]:
    """Every architecture has every specialisation."""
    for out_dtype, sf_layout in product(_OUT_DTYPES.values(), SfLayout):
        yield Spec(out_dtype=out_dtype, sf_layout=sf_layout)


def geometry(*, m: int, k: int) -> Geometry:
    """One thread for each block of 16."""
    return Geometry(grid=(ceil_div(m * k // NVFP4.block, _BLOCK_THREADS), 1, 1), block=(_BLOCK_THREADS, 1, 1))


NVFP4_DEQUANTIZE = register(
    Family(
        name="quantize/nvfp4_dequantize",
        spec=Spec,
        params=(
            Ptr("q", "const uint8", "[m, k/2], low nibble first"),
            Ptr("sf", "const uint8", "E4M3 scales in kSfLayout"),
            Ptr("global_scale", "const float", "[1], decode"),
            Ptr("out", "Out", "[m, k]"),
            I64("m"),
            I64("k"),
        ),
        specs=specs,
    )
)


@functools.lru_cache(maxsize=4096)
def _plan(dtype: torch.dtype, layout: int, m: int, k: int) -> Launch:
    spec = Spec(out_dtype=_OUT_DTYPES[dtype], sf_layout=SfLayout(layout))
    return Launch(NVFP4_DEQUANTIZE, spec, geometry(m=m, k=k))


def _reference(
    q: torch.Tensor, sf: torch.Tensor, scale: torch.Tensor, out: torch.Tensor, layout: int, _: bool | None
) -> None:
    out.copy_(reference.nvfp4_dequantize(q, sf, scale, SfLayout(layout)))


@operator(
    "nvfp4_dequantize(Tensor a_fp4, Tensor a_sf, Tensor scale, Tensor(a!) out, int layout, bool? enable_pdl)",
    reference=_reference,
    aligned=("a_fp4", "a_sf", "out"),
)
def _dequantize(
    q: torch.Tensor, sf: torch.Tensor, scale: torch.Tensor, out: torch.Tensor, layout: int, enable_pdl: bool | None
) -> None:
    m, k = out.shape
    _plan(out.dtype, layout, m, k).run((q, sf, scale, out, m, k), target_of(q), pdl=enable_pdl)


def nvfp4_dequantize(
    a_fp4: torch.Tensor,
    a_sf: torch.Tensor,
    global_decode_scale: torch.Tensor | float,
    sfLayout: SfLayout = SfLayout.layout_128x4,  # noqa: N803 - FlashInfer's name
    sf_vec_size: int = 16,
    out_dtype: torch.dtype = torch.float32,
    enable_pdl: bool | None = None,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """NVFP4 codes and scales, as nvfp4_quantize() returns them, to floats.

    Args:
        a_fp4: uint8 [..., k/2], contiguous, element 2j in the low nibble of byte j; leading dimensions count as m rows.
        a_sf: E4M3 block scales, uint8 or float8_e4m3fn, contiguous, ``sfLayout.shape(m, k/16)``.
        global_decode_scale: the *decode* scale, the inverse of what nvfp4_quantize() took: one float32 on a_fp4's
            device (fp16 and bf16 are widened), or a Python float.
        sfLayout: where the block scales lie.
        sf_vec_size: 16, the block size of NVFP4.
        out_dtype: float32, bfloat16 or float16.
        enable_pdl: programmatic dependent launch; None means wherever the GPU has it.
        out: contiguous tensor [..., k] of out_dtype to fill in place; allocated when None.
    Returns:
        [..., k] of out_dtype, on the device of a_fp4.
    Numerics:
        ``x = e2m1(code) * (dec8(b) * global_decode_scale)`` in float32, both products rounded to nearest, then rounded
        once to out_dtype.
    Raises:
        ArgumentError, ArgumentTypeError: before anything is written.
    """
    if sf_vec_size != NVFP4.block:
        raise ArgumentError("sf_vec_size", sf_vec_size, "16")
    layout = check_layout("sfLayout", sfLayout)
    if out_dtype not in _OUT_DTYPES:
        raise ArgumentTypeError("out_dtype", out_dtype, " or ".join(map(str, _OUT_DTYPES)))
    check_dtype("a_fp4", a_fp4, (torch.uint8,))
    check_device("a_fp4", a_fp4)
    check_contiguous("a_fp4", a_fp4)
    if a_fp4.dim() < 2 or a_fp4.shape[-1] == 0 or a_fp4.shape[-1] % (NVFP4.block // 2):
        raise ArgumentError("a_fp4", f"shape {tuple(a_fp4.shape)}", "[..., m, k/2] with k a positive multiple of 16")
    k = 2 * a_fp4.shape[-1]
    m = a_fp4.numel() * 2 // k
    check_dtype("a_sf", a_sf, (torch.uint8, torch.float8_e4m3fn))
    check_same_device("a_sf", a_sf, a_fp4)
    check_contiguous("a_sf", a_sf)
    if a_sf.numel() != layout.numel(m, k // NVFP4.block):
        raise ArgumentError(
            "a_sf", f"shape {tuple(a_sf.shape)}", f"{layout.shape(m, k // NVFP4.block)} for {layout.name}"
        )
    scale = scalar_f32("global_decode_scale", global_decode_scale, like=a_fp4)
    result = output("out", out, (*a_fp4.shape[:-1], k), (out_dtype,), like=a_fp4)
    if m:
        _dequantize(a_fp4.view(m, k // 2), a_sf.view(torch.uint8), scale, result.view(m, k), int(layout), enable_pdl)
    return result

"""NVFP4 quantization: floats to packed E2M1 codes and E4M3 block scales, and back."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import inf

import torch

from jitfp4.arch import Arch
from jitfp4.engine import Launch, target_of
from jitfp4.errors import ArgumentError
from jitfp4.formats import NVFP4, DType
from jitfp4.layouts import SfLayout, ceil_div
from jitfp4.ops import operator
from jitfp4.reference import quantize as reference
from jitfp4.reference.formats import swizzle
from jitfp4.reference.shuffle import shuffle_rows
from jitfp4.registry import Family, register
from jitfp4.spec import I64, Geometry, KernelSpec, Ptr
from jitfp4.tensors import as_rows, check_device, check_dtype, check_layout, output, scalar_f32

_IN_DTYPES = {torch.bfloat16: DType.BF16, torch.float16: DType.F16}
_BACKENDS = ("cuda", "cute-dsl", "auto")
_SHUFFLE_TILE = 128  # rows of the epilogue tile that do_shuffle prepares for
_WARP = 32
_BLOCK_THREADS = 256
_BLOCKS_BY_WORK = ((1 << 22, 1), (inf, 4))  # (limit on m * k, blocks of 16 for each thread)


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorSpec(KernelSpec):
    """A kernel in which every thread loads and converts whole blocks, ``blocks_per_thread`` of them along k."""

    in_dtype: DType
    sf_layout: SfLayout
    block_threads: int
    blocks_per_thread: int


def vector_specs(_arch: Arch) -> Iterator[VectorSpec]:
    """Every architecture has every specialisation."""
    for in_dtype, sf_layout, (_limit, blocks) in product(_IN_DTYPES.values(), SfLayout, _BLOCKS_BY_WORK):
        yield VectorSpec(in_dtype=in_dtype, sf_layout=sf_layout, block_threads=_BLOCK_THREADS, blocks_per_thread=blocks)


def vector_geometry(spec: VectorSpec, *, m: int, k: int) -> Geometry:
    """A warp takes 32 scales that are neighbours in memory, and ``blocks_per_thread`` such groups along k."""
    outer, inner, tile_cols = spec.sf_layout.tile
    warp_cols = _WARP if spec.sf_layout is SfLayout.layout_linear else tile_cols
    row_tasks = ceil_div(m, outer * inner) * ceil_div(outer * inner * warp_cols, _WARP)
    tasks = row_tasks * ceil_div(k // NVFP4.block, warp_cols * spec.blocks_per_thread)
    return Geometry(grid=(ceil_div(tasks * _WARP, spec.block_threads), 1, 1), block=(spec.block_threads, 1, 1))


def select(*, in_dtype: DType, sf_layout: SfLayout, m: int, k: int) -> VectorSpec:
    """The specialisation for a problem. Pure: reads no device, no clock and no environment."""
    blocks = next(blocks for limit, blocks in _BLOCKS_BY_WORK if m * k < limit)
    return VectorSpec(in_dtype=in_dtype, sf_layout=sf_layout, block_threads=_BLOCK_THREADS, blocks_per_thread=blocks)


NVFP4_VECTOR = register(
    Family(
        name="quantize/nvfp4_vector",
        spec=VectorSpec,
        params=(
            Ptr("x", "const In", "[m, k], rows x_stride elements apart"),
            Ptr("global_scale", "const float", "[1], encode"),
            Ptr("q", "uint8", "[m, k/2], low nibble first"),
            Ptr("sf", "uint8", "E4M3 scales in kSfLayout"),
            I64("m"),
            I64("k"),
            I64("x_stride"),
        ),
        specs=vector_specs,
    )
)


@functools.lru_cache(maxsize=4096)
def _plan(dtype: torch.dtype, layout: int, m: int, k: int) -> Launch:
    spec = select(in_dtype=_IN_DTYPES[dtype], sf_layout=SfLayout(layout), m=m, k=k)
    return Launch(NVFP4_VECTOR, spec, vector_geometry(spec, m=m, k=k))


def _reference(
    a: torch.Tensor, scale: torch.Tensor, q: torch.Tensor, sf: torch.Tensor, layout: int, _: bool | None
) -> None:
    codes, scales = reference.nvfp4_quantize(a, scale, SfLayout(layout))
    q.copy_(codes)
    sf.copy_(scales)


@operator(
    "nvfp4_quantize(Tensor a, Tensor a_global_sf, Tensor(a!) out, Tensor(b!) out_sf, int layout, bool? enable_pdl)",
    reference=_reference,
    aligned=("a", "out", "out_sf"),
)
def _quantize(
    a: torch.Tensor, scale: torch.Tensor, q: torch.Tensor, sf: torch.Tensor, layout: int, enable_pdl: bool | None
) -> None:
    m, k = a.shape
    _plan(a.dtype, layout, m, k).run((a, scale, q, sf, m, k, a.stride(0)), target_of(a), pdl=enable_pdl)


def nvfp4_quantize(
    a: torch.Tensor,
    a_global_sf: torch.Tensor | float,
    sfLayout: SfLayout = SfLayout.layout_128x4,  # noqa: N803 - FlashInfer's name
    do_shuffle: bool = False,
    sf_vec_size: int = 16,
    enable_pdl: bool | None = None,
    backend: str = "cuda",
    *,
    out: torch.Tensor | None = None,
    out_sf: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize to NVFP4: E2M1 codes in blocks of 16, one E4M3 scale each, one float32 scale for the tensor.

    Args:
        a: [..., k] fp16 or bf16; k a positive multiple of 16; leading dimensions count as m rows. Rows may be strided
            by a multiple of 16 bytes. Never copied, never moved to another device.
        a_global_sf: the *encode* scale, ``448 * 6 / amax(a)``: one float32 on a's device (fp16 and bf16 are widened),
            or a Python float. Read on the device only; finite and positive.
        sfLayout: where the block scales lie; see SfLayout.
        do_shuffle: permute the rows for TensorRT-LLM's epilogue tile of 128 (FlashInfer's shuffle_matrix_a); needs the
            128x4 layout and m % 128 == 0.
        sf_vec_size: 16, the block size of NVFP4.
        enable_pdl: programmatic dependent launch; None means wherever the GPU has it.
        backend: FlashInfer's names "cuda", "cute-dsl" and "auto" are accepted; each runs this package's kernel.
        out, out_sf: contiguous uint8 tensors on a's device to fill in place, of the shapes below; allocated when None.
    Returns:
        codes, uint8 [..., k/2], element 2j in the low nibble of byte j; and E4M3 block scales, uint8, 2-D:
        ``sfLayout.shape(m, k/16)``, padding zero.
    Numerics:
        For each block, with g the global scale, in float32, every operation correctly rounded::

            s = amax(|x|) * (g * float32(1/6));   b = e4m3(s)
            o = min(1 / (dec8(b) * (1/g)), FLT_MAX), 0 when amax == 0;   code = e2m1(x * o)

        Both conversions round to nearest even and saturate. A NaN element gives code 7 and counts for amax only when
        its whole block is NaN; Inf saturates. ``x ~= e2m1(code) * dec8(b) / g``.
    Raises:
        ArgumentError, ArgumentTypeError: before anything is written.
    """
    if backend not in _BACKENDS:
        raise ArgumentError("backend", repr(backend), ", ".join(_BACKENDS))
    if sf_vec_size != NVFP4.block:
        raise ArgumentError("sf_vec_size", sf_vec_size, "16")
    layout = check_layout("sfLayout", sfLayout)
    check_dtype("a", a, _IN_DTYPES)
    check_device("a", a)
    rows = as_rows("a", a, NVFP4.block)
    m, k = rows.shape
    scale = scalar_f32("a_global_sf", a_global_sf, like=a)
    if do_shuffle and (layout is not SfLayout.layout_128x4 or m % 128):
        raise ArgumentError("do_shuffle", f"True with {layout.name} and m = {m}", "layout_128x4 and m % 128 == 0")
    q = output("out", out, (*a.shape[:-1], k // 2), (torch.uint8,), like=a)
    sf = output("out_sf", out_sf, layout.shape(m, k // NVFP4.block), (torch.uint8,), like=a)
    if m == 0:
        return q, sf
    if not do_shuffle:
        _quantize(rows, scale, q if q.dim() == 2 else q.view(m, -1), sf, int(layout), enable_pdl)
        return q, sf
    linear = SfLayout.layout_linear
    codes, scales = nvfp4_quantize(rows, scale, linear, enable_pdl=enable_pdl)
    q.view(m, k // 2).copy_(shuffle_rows(codes, _SHUFFLE_TILE))
    sf.copy_(swizzle(shuffle_rows(scales, _SHUFFLE_TILE), layout))
    return q, sf

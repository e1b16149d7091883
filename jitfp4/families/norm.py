"""RMSNorm, alone or behind a residual addition, fused with FP4 quantization."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import product
from typing import Any

import torch

from jitfp4.arch import Arch
from jitfp4.engine import Launch, target_of
from jitfp4.errors import ArgumentError
from jitfp4.formats import DType
from jitfp4.layouts import SfLayout, ceil_div
from jitfp4.ops import operator
from jitfp4.reference import norm as reference
from jitfp4.reference.formats import swizzle
from jitfp4.registry import Family, register
from jitfp4.spec import F32, I64, Geometry, KernelSpec, Ptr
from jitfp4.tensors import check_contiguous, check_dtype, check_same_device, output, scalar_f32

_IN_DTYPES = {torch.bfloat16: DType.BF16, torch.float16: DType.F16}
_FP4_DTYPES = (torch.float4_e2m1fn_x2, torch.uint8) if hasattr(torch, "float4_e2m1fn_x2") else (torch.uint8,)
_UNIT = 16  # elements that a thread takes at once
_WARP = 32
_TURN = _UNIT * _WARP
_SMALL_CTA = 128  # threads, where rows need fewer
_STREAM_UNITS = 8
_MANY_ROWS = 16  # for each SM
_MAX_CTAS = 8  # of a cluster
_MIN_HIDDEN, _MAX_HIDDEN = 64, 65536


class Scale(StrEnum):
    """Type of a block scale."""

    E4M3 = "e4m3"
    UE8M0 = "ue8m0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec(KernelSpec):
    """A kernel whose threads hold ``units`` units of 16 elements of a row, or, when ``stream``, read them twice."""

    in_dtype: DType
    block: int
    scale: Scale
    add: bool
    units: int
    stream: bool

    @property
    def slot_bytes(self) -> int:
        """Shared memory of a thread: two inputs and a packed weight, or one input and a float32 weight."""
        return 6 * _UNIT * self.units

    @property
    def max_warps(self) -> int:
        """Of a CTA."""
        return 8 if self.units < 4 else 16

    @property
    def min_ctas(self) -> int:
        """CTAs that an SM must have registers for: 64, 80, 128 of a thread keep 1, 2, 4 units out of local memory."""
        return {1: 4, 2: 3}.get(self.units, 1)

    def shared_bytes(self, shape: Shape) -> int:
        """Shared memory of a CTA: 256 multipliers, the slots, and two sets of partial sums of 32 lanes."""
        warps = shape.row_threads // _WARP + (_MAX_CTAS if shape.ctas > 1 else 0)
        return 4 * 256 + (0 if self.stream else shape.cta_threads * self.slot_bytes) + 4 * 2 * warps * _WARP


@dataclass(frozen=True, slots=True)
class Shape:
    """How the threads of a launch share rows: ``row_threads`` of each of ``ctas`` CTAs take one row."""

    row_threads: int
    ctas: int = 1

    @property
    def cta_threads(self) -> int:
        return self.row_threads if self.row_threads > _WARP else _SMALL_CTA


def shape(spec: Spec, *, h: int, arch: Arch) -> Shape | None:
    """The threads that hold a row of ``h`` elements, or None where they cannot on ``arch``."""
    units = ceil_div(h, _UNIT)
    if spec.units == 1 and units <= _WARP // 2:
        return Shape(max(8, 1 << (units - 1).bit_length()))  # 8: whole tiles of 4 scales, also in blocks of 32
    turns = ceil_div(h, _TURN * spec.units)
    warps = spec.max_warps
    while spec.shared_bytes(Shape(warps * _WARP, _MAX_CTAS)) > arch.shared_bytes:
        warps //= 2
    if turns <= warps:
        return Shape(turns * _WARP)
    ctas = ceil_div(turns, warps)
    return Shape(warps * _WARP, ctas) if arch.has_tma and ctas <= _MAX_CTAS else None


def geometry(spec: Spec, shape: Shape, *, rows: int, arch: Arch) -> Geometry:
    """As many CTAs as the GPU holds at once, or as ``rows`` need."""
    threads, shared_bytes = shape.cta_threads, spec.shared_bytes(shape)
    by_registers = spec.min_ctas * spec.max_warps * _WARP // threads
    by_memory = (arch.shared_bytes + 1024) // (shared_bytes + 1024)  # the system takes 1 KiB of each CTA
    resident = arch.num_sms * max(1, min(by_registers, by_memory)) // shape.ctas * shape.ctas
    needed = ceil_div(rows * shape.row_threads, threads) * shape.ctas
    return Geometry(
        grid=(min(needed, resident), 1, 1),
        block=(threads, 1, 1),
        cluster=(shape.ctas, 1, 1),
        shared_bytes=shared_bytes,
    )


def select(*, in_dtype: DType, block: int, scale: Scale, add: bool, m: int, h: int, arch: Arch) -> tuple[Spec, Shape]:
    """The kernel for a problem, and how its threads share rows.

    Many units a thread cost the fewest instructions, which bound a plain norm of many rows; few units are done sooner,
    and are enough where the second input bounds the speed. A cluster spreads a row where SMs would be idle otherwise,
    or where one CTA cannot hold it.
    """
    few_units = add or m < _MANY_ROWS * arch.num_sms
    for units in (1, 2, 4) if few_units else (4,):
        spec = Spec(in_dtype=in_dtype, block=block, scale=scale, add=add, units=units, stream=False)
        found = shape(spec, h=h, arch=arch)
        if found is not None and (found.ctas == 1 or units == 4 or m * found.ctas <= arch.num_sms):
            return spec, found
    spec = Spec(in_dtype=in_dtype, block=block, scale=scale, add=add, units=_STREAM_UNITS, stream=True)
    return spec, Shape(ceil_div(h, _TURN * _STREAM_UNITS) * _WARP)


def specs(arch: Arch) -> Iterator[Spec]:
    """Streaming exists where neither a CTA nor a cluster holds the longest rows."""
    formats = ((16, Scale.E4M3), (32, Scale.E4M3), (32, Scale.UE8M0))
    for in_dtype, (block, scale), add in product(_IN_DTYPES.values(), formats, (False, True)):
        for units in (1, 2, 4):
            yield Spec(in_dtype=in_dtype, block=block, scale=scale, add=add, units=units, stream=False)
        if not arch.has_tma:
            yield Spec(in_dtype=in_dtype, block=block, scale=scale, add=add, units=_STREAM_UNITS, stream=True)


RMSNORM = register(
    Family(
        name="norm/rmsnorm_fp4quant",
        spec=Spec,
        params=(
            Ptr("x", "const In", "[m, h]"),
            Ptr("residual", "In", "[m, h], updated in place; null without an addition"),
            Ptr("weight", "const In", "[h]"),
            Ptr("global_scale", "const float", "[1], encode; null means 1"),
            Ptr("q", "uint8", "[m, h/2], low nibble first"),
            Ptr("sf_128x4", "uint8", "scales in the 128x4 layout, or null"),
            Ptr("sf_linear", "uint8", "[m, h/kBlock], or null"),
            Ptr("y", "In", "[m, h], what is quantized, or null"),
            I64("m"),
            I64("h"),
            I64("row_threads"),
            F32("eps"),
        ),
        specs=specs,
    )
)


@functools.lru_cache(maxsize=4096)
def _plan(
    dtype: torch.dtype, block: int, scale: str, add: bool, swizzled: bool, m: int, h: int, arch: Arch
) -> tuple[Launch, int]:
    spec, found = select(in_dtype=_IN_DTYPES[dtype], block=block, scale=Scale(scale), add=add, m=m, h=h, arch=arch)
    rows = SfLayout.layout_128x4.shape(m, 1)[0] if swizzled else m
    return Launch(RMSNORM, spec, geometry(spec, found, rows=rows, arch=arch)), found.row_threads


def _reference(
    input: torch.Tensor,  # noqa: A002 - FlashInfer's name
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    global_scale: torch.Tensor | None,
    y_fp4: torch.Tensor,
    sf_128x4: torch.Tensor | None,
    sf_linear: torch.Tensor | None,
    y_out: torch.Tensor | None,
    eps: float,
    block_size: int,
    scale_format: str,
    _: bool | None,
) -> None:
    _check_addresses(input, residual, y_out)
    hidden = input
    if residual is not None:
        hidden = reference.add(input, residual)
        residual.copy_(hidden)
    y = reference.rmsnorm(hidden, weight, eps)
    codes, scales = reference.quantize(y, block_size, scale_format, global_scale)
    y_fp4.copy_(codes)
    if sf_128x4 is not None:
        sf_128x4.copy_(swizzle(scales, SfLayout.layout_128x4).flatten())
    if sf_linear is not None:
        sf_linear.copy_(scales)
    if y_out is not None:
        y_out.copy_(y)


@operator(
    "rmsnorm_fp4quant(Tensor input, Tensor(a!)? residual, Tensor weight, Tensor? global_scale, Tensor(b!) y_fp4,"
    " Tensor(c!)? block_scale, Tensor(d!)? block_scale_unswizzled, Tensor(e!)? y_out, float eps, int block_size,"
    " str scale_format, bool? enable_pdl)",
    reference=_reference,
    aligned=("input", "weight", "y_fp4"),
)
def _rmsnorm(
    input: torch.Tensor,  # noqa: A002
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    global_scale: torch.Tensor | None,
    y_fp4: torch.Tensor,
    sf_128x4: torch.Tensor | None,
    sf_linear: torch.Tensor | None,
    y_out: torch.Tensor | None,
    eps: float,
    block_size: int,
    scale_format: str,
    enable_pdl: bool | None,
) -> None:
    _check_addresses(input, residual, y_out)
    m, h = input.shape
    target = target_of(input)
    launch, row_threads = _plan(
        input.dtype, block_size, scale_format, residual is not None, sf_128x4 is not None, m, h, target.arch
    )
    pointers = (input, residual, weight, global_scale, y_fp4, sf_128x4, sf_linear, y_out)
    launch.run((*pointers, m, h, row_threads, eps), target, pdl=enable_pdl)


def rmsnorm_fp4quant(
    input: torch.Tensor,  # noqa: A002 - FlashInfer's name
    weight: torch.Tensor,
    y_fp4: torch.Tensor | None = None,
    block_scale: torch.Tensor | None = None,
    global_scale: torch.Tensor | float | None = None,
    eps: float = 1e-6,
    block_size: int = 16,
    scale_format: str | None = None,
    is_sf_swizzled_layout: bool = False,
    enable_pdl: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalise rows and quantize them to FP4 in one pass.

    Args:
        input: [m, h] or [b, s, h], fp16 or bf16, contiguous, 16-byte aligned; h a multiple of block_size from 64 to
            65536. Leading dimensions count as m rows.
        weight: [h] of input's dtype.
        y_fp4, block_scale: contiguous tensors on input's device to fill in place, of the shapes below; allocated when
            None. Buffers of dtype uint8 are taken too.
        global_scale: the *encode* scale, ``448 * 6 / amax(y)``: one float32 on input's device (fp16 and bf16 are
            widened), or a Python float. Read on the device only. None means 1. An error with "ue8m0".
        eps: added to the mean of squares.
        block_size: 16 or 32 elements share a scale.
        scale_format: "e4m3" or "ue8m0"; None means "e4m3" for blocks of 16 and "ue8m0" for 32. Blocks of 16 with
            "ue8m0" are an error.
        is_sf_swizzled_layout: scales in the 128x4 layout instead of the linear one; padding is zero.
        enable_pdl: programmatic dependent launch; None means wherever the GPU has it.
    Returns:
        codes, float4_e2m1fn_x2 (uint8 where torch lacks it) [..., h/2], element 2j in the low nibble of byte j; and
        block scales, float8_e4m3fn or, for "ue8m0", uint8: linear [..., h/block_size], or the 128x4 layout as a flat
        tensor of ``SfLayout.layout_128x4.numel(m, h/block_size)``.
    Numerics:
        In float32, every operation correctly rounded::

            rstd = 1 / sqrt(sum(x * x) / h + eps);   y = round((x * rstd) * weight), rounded to input's dtype

        The order of the sum is that of ``jitfp4.reference.norm.sum_of_squares``; it does not depend on m. y is then
        quantized exactly as by nvfp4_quantize() or, with "ue8m0", mxfp4_quantize():
        ``y ~= e2m1(code) * e4m3(scale) / global_scale``, or ``e2m1(code) * 2**(scale - 127)``.
    Raises:
        ArgumentError, ArgumentTypeError: before anything is written.
    """
    recipe = _Recipe.of(block_size, scale_format, swizzled=is_sf_swizzled_layout, linear=not is_sf_swizzled_layout)
    outputs = _Outputs(y_fp4=y_fp4, block_scale=block_scale)
    codes, scales = _fused(input, None, weight, global_scale, eps, recipe, outputs, enable_pdl)
    return codes, scales


def add_rmsnorm_fp4quant(
    input: torch.Tensor,  # noqa: A002 - FlashInfer's name
    residual: torch.Tensor,
    weight: torch.Tensor,
    y_fp4: torch.Tensor | None = None,
    block_scale: torch.Tensor | None = None,
    global_scale: torch.Tensor | float | None = None,
    eps: float = 1e-6,
    block_size: int = 16,
    scale_format: str | None = None,
    is_sf_swizzled_layout: bool = False,
    output_both_sf_layouts: bool = False,
    block_scale_unswizzled: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
    y_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor] | tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Add to the residual in place, normalise the sum, and quantize it to FP4, in one pass.

    Args:
        input, weight, y_fp4, block_scale, global_scale, eps, block_size, scale_format, is_sf_swizzled_layout,
            enable_pdl: as in rmsnorm_fp4quant().
        residual: like input, contiguous, not overlapping it; becomes ``round(input + residual)``.
        output_both_sf_layouts: give the scales in both layouts; is_sf_swizzled_layout then does not matter.
        block_scale_unswizzled: the linear scales to fill in place when output_both_sf_layouts, where block_scale is the
            swizzled one; allocated when None. An error without output_both_sf_layouts.
        y_out: like input, contiguous, overlapping neither input nor residual: receives y as well.
    Returns:
        ``(codes, block_scale)`` as rmsnorm_fp4quant() does, or with output_both_sf_layouts
        ``(codes, swizzled block_scale, linear block_scale)``.
    Numerics:
        ``x = round(input + residual)``, the sum in float32; then as in rmsnorm_fp4quant(), so that the result is that
        of the same steps one by one.
    Raises:
        ArgumentError, ArgumentTypeError: before anything is written.
    """
    if block_scale_unswizzled is not None and not output_both_sf_layouts:
        raise ArgumentError("block_scale_unswizzled", "a tensor", "None without output_both_sf_layouts")
    _check_like("residual", residual, input)
    recipe = _Recipe.of(
        block_size,
        scale_format,
        swizzled=is_sf_swizzled_layout or output_both_sf_layouts,
        linear=not is_sf_swizzled_layout or output_both_sf_layouts,
    )
    outputs = _Outputs(y_fp4=y_fp4, block_scale=block_scale, block_scale_unswizzled=block_scale_unswizzled, y_out=y_out)
    return _fused(input, residual, weight, global_scale, eps, recipe, outputs, enable_pdl)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recipe:
    """What is made of the normalised rows."""

    block: int
    scale: Scale
    swizzled: bool
    linear: bool

    @staticmethod
    def of(block_size: int, scale_format: str | None, *, swizzled: bool, linear: bool) -> _Recipe:
        if block_size not in (16, 32):
            raise ArgumentError("block_size", block_size, "16 or 32")
        allowed = [Scale.E4M3] if block_size == 16 else [Scale.UE8M0, Scale.E4M3]
        if scale_format is not None and scale_format not in allowed:
            raise ArgumentError(
                "scale_format", repr(scale_format), f"{' or '.join(allowed)} for blocks of {block_size}"
            )
        return _Recipe(block=block_size, scale=Scale(scale_format or allowed[0]), swizzled=swizzled, linear=linear)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outputs:
    """The caller's buffers, under the names of the public functions."""

    y_fp4: torch.Tensor | None
    block_scale: torch.Tensor | None
    block_scale_unswizzled: torch.Tensor | None = None
    y_out: torch.Tensor | None = None


def _fused(
    input: torch.Tensor,  # noqa: A002
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    global_scale: torch.Tensor | float | None,
    eps: float,
    recipe: _Recipe,
    outputs: _Outputs,
    enable_pdl: bool | None,
) -> Any:
    check_dtype("input", input, tuple(_IN_DTYPES))
    if input.dim() not in (2, 3):
        raise ArgumentError("input", f"shape {tuple(input.shape)}", "[m, h] or [b, s, h]")
    *lead, h = input.shape
    if h % recipe.block or not _MIN_HIDDEN <= h <= _MAX_HIDDEN:
        raise ArgumentError("input", f"h = {h}", f"a multiple of {recipe.block} from {_MIN_HIDDEN} to {_MAX_HIDDEN}")
    check_contiguous("input", input)
    check_dtype("weight", weight, (input.dtype,))
    check_same_device("weight", weight, input)
    if tuple(weight.shape) != (h,):
        raise ArgumentError("weight", f"shape {tuple(weight.shape)}", f"({h},)")
    check_contiguous("weight", weight)
    if not 0 <= eps < math.inf:
        raise ArgumentError("eps", eps, "a finite number that is not negative")
    if global_scale is not None:
        if recipe.scale is Scale.UE8M0:
            raise ArgumentError("global_scale", "a scale", "None with scale_format 'ue8m0'")
        global_scale = scalar_f32("global_scale", global_scale, like=input)
    if outputs.y_out is not None:
        _check_like("y_out", outputs.y_out, input)
    m, cols = math.prod(lead), h // recipe.block
    sf_dtypes = (torch.float8_e4m3fn, torch.uint8) if recipe.scale is Scale.E4M3 else (torch.uint8,)
    codes = output("y_fp4", outputs.y_fp4, (*lead, h // 2), _FP4_DTYPES, like=input)
    flat, linear_shape = (SfLayout.layout_128x4.numel(m, cols),), (*lead, cols)
    swizzled = linear = None
    if recipe.swizzled:
        swizzled = output("block_scale", outputs.block_scale, flat, sf_dtypes, like=input)
    if recipe.linear:
        name = "block_scale_unswizzled" if recipe.swizzled else "block_scale"
        linear = output(name, getattr(outputs, name), linear_shape, sf_dtypes, like=input)
    if m:
        _rmsnorm(
            input.view(m, h),
            None if residual is None else residual.view(m, h),
            weight,
            global_scale,
            codes.view(torch.uint8).view(m, h // 2),
            None if swizzled is None else swizzled.view(torch.uint8),
            None if linear is None else linear.view(torch.uint8).view(m, cols),
            None if outputs.y_out is None else outputs.y_out.view(m, h),
            eps,
            recipe.block,
            recipe.scale.value,
            enable_pdl,
        )
    return tuple(out for out in (codes, swizzled, linear) if out is not None)


def _check_like(name: str, tensor: torch.Tensor, input: torch.Tensor) -> None:  # noqa: A002
    """``tensor`` has input's shape, dtype and device, and is contiguous."""
    check_dtype(name, tensor, (input.dtype,))
    check_same_device(name, tensor, input)
    if tensor.shape != input.shape:
        raise ArgumentError(name, f"shape {tuple(tensor.shape)}", f"{tuple(input.shape)}, as the input")
    check_contiguous(name, tensor)


def _check_addresses(input: torch.Tensor, residual: torch.Tensor | None, y_out: torch.Tensor | None) -> None:  # noqa: A002
    """residual and y_out are aligned, and overlap neither input nor each other. All three have one size."""
    taken = [("input", input.data_ptr())]
    for name, tensor in (("residual", residual), ("y_out", y_out)):
        if tensor is None:
            continue
        if past := tensor.data_ptr() % 16:
            raise ArgumentError(name, f"an address {past} bytes past a multiple of 16", "16-byte alignment")
        for other, address in taken:
            if abs(tensor.data_ptr() - address) < input.nbytes:
                raise ArgumentError(name, f"memory of {other}", "memory of its own")
        taken.append((name, tensor.data_ptr()))

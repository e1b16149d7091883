"""RMSNorm, alone or behind a residual addition, fused with FP4 quantization."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
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
_MANY_ROWS = 16  # for each SM
_MAX_CTAS = 8  # of a cluster
_MIN_HIDDEN, _MAX_HIDDEN = 64, 65536


class Scale(StrEnum):
    """Type of a block scale."""

    E4M3 = "e4m3"
    UE8M0 = "ue8m0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec(KernelSpec):
    """A kernel in which up to ``warps`` warps of a CTA share a row, or a cluster of such CTAs.

    A thread holds ``units`` units of 16 elements in registers or, when ``stream``, reads them twice. With one warp and
    one unit, rows may share the warp.
    """

    in_dtype: DType
    block: int
    scale: Scale
    add: bool
    units: int
    warps: int
    clustered: bool
    stream: bool

    @property
    def max_threads(self) -> int:
        """Of a CTA; rows of one warp get four warps to a CTA."""
        return _WARP * (4 if self.warps == 1 else self.warps)

    @property
    def min_ctas(self) -> int:
        """CTAs that an SM must have registers for: 64, 80, 128 of a thread keep 1, 2, 4 units out of local memory."""
        return {1: 1024, 2: 768}.get(self.units, 512) // self.max_threads

    @property
    def slot_bytes(self) -> int:
        """Shared memory of a thread: two inputs and a packed weight, or one input and a float32 weight."""
        return 6 * _UNIT * self.units

    @property
    def common_bytes(self) -> int:
        """Shared memory of a CTA besides: two sets of partial sums of 32 lanes, and 256 multipliers."""
        return 4 * (2 * (self.warps + (_MAX_CTAS if self.clustered else 1)) * _WARP + 256)

    def shared_bytes(self, threads: int) -> int:
        return self.common_bytes + (0 if self.stream else threads * self.slot_bytes)

    def capacity(self, arch: Arch) -> int:
        """Elements of the longest row that this kernel can take on ``arch``."""
        if self.shared_bytes(self.max_threads) > arch.shared_bytes or (self.clustered and not arch.has_tma):
            return 0
        return _TURN * self.units * self.warps * (_MAX_CTAS if self.clustered else 1)


def geometry(spec: Spec, *, m: int, h: int, padded: bool, arch: Arch) -> tuple[Geometry, int]:
    """A persistent grid, no larger than the rows need, and how many threads of a CTA share a row.

    ``padded`` counts the padding rows of the 128x4 layout, which must be written too.
    """
    rows = SfLayout.layout_128x4.shape(m, 1)[0] if padded else m
    turns, ctas = ceil_div(h, _TURN * spec.units), 1
    if spec.clustered:
        row_threads, ctas = spec.max_threads, ceil_div(turns, spec.warps)
    elif spec.warps > 1 or spec.units > 1:
        row_threads = turns * _WARP
    else:  # 8: whole tiles of 4 scales, also in blocks of 32
        row_threads = max(8, 1 << (ceil_div(h, _UNIT) - 1).bit_length())
    threads = row_threads if spec.warps > 1 else spec.max_threads
    shared_bytes = spec.shared_bytes(threads)
    by_registers = spec.min_ctas * spec.max_threads // threads
    by_memory = (arch.shared_bytes + 1024) // (shared_bytes + 1024)  # the system takes 1 KiB of each CTA
    resident = arch.num_sms * max(1, min(by_registers, by_memory)) // ctas * ctas
    needed = ceil_div(rows * row_threads, threads) * ctas
    grid = (min(needed, resident), 1, 1)
    return Geometry(grid, block=(threads, 1, 1), cluster=(ctas, 1, 1), shared_bytes=shared_bytes), row_threads


# (units, warps, clustered), shortest rows first: what one launch can be, apart from streaming.
SHAPES = (
    (1, 1, False),
    (1, 8, False),
    (2, 8, False),
    (4, 1, False),
    (4, 4, False),
    (4, 8, False),
    (4, 16, False),
    (4, 16, True),
    (4, 4, True),
)


def select(*, in_dtype: DType, block: int, scale: Scale, add: bool, m: int, h: int, arch: Arch) -> Spec:
    """The first shape that holds a row of ``h`` elements; streaming where none does.

    Four units a thread cost the fewest instructions, which bound a plain norm of many rows; fewer are done sooner, and
    are enough where the second input bounds the speed.
    """
    few_units = h <= _TURN or add or m < _MANY_ROWS * arch.num_sms
    for units, warps, clustered in SHAPES if few_units else SHAPES[3:]:
        spec = Spec(
            in_dtype=in_dtype,
            block=block,
            scale=scale,
            add=add,
            units=units,
            warps=warps,
            clustered=clustered,
            stream=False,
        )
        if h <= spec.capacity(arch):
            return spec
    return replace(spec, units=8, warps=16, clustered=False, stream=True)


def specs(arch: Arch) -> Iterator[Spec]:
    """What select() returns for any problem."""
    formats = ((16, Scale.E4M3), (32, Scale.E4M3), (32, Scale.UE8M0))
    hidden = range(_TURN, _MAX_HIDDEN + 1, _TURN)
    for in_dtype, (block, scale), add in product(_IN_DTYPES.values(), formats, (False, True)):
        yield from dict.fromkeys(
            select(in_dtype=in_dtype, block=block, scale=scale, add=add, m=m, h=h, arch=arch)
            for h, m in product(hidden, (1, _MANY_ROWS * arch.num_sms))
        )


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
    dtype: torch.dtype, block: int, scale: str, add: bool, padded: bool, m: int, h: int, arch: Arch
) -> tuple[Launch, int]:
    spec = select(in_dtype=_IN_DTYPES[dtype], block=block, scale=Scale(scale), add=add, m=m, h=h, arch=arch)
    launch_geometry, row_threads = geometry(spec, m=m, h=h, padded=padded, arch=arch)
    return Launch(RMSNORM, spec, launch_geometry), row_threads


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

"""Quantization of one matrix: NVFP4 and MXFP4, plain, per token, or after SwiGLU's activation."""

from __future__ import annotations

from functools import partial

import torch

from jitfp4 import replay
from jitfp4.addresses import extent, meet
from jitfp4.dtypes import ACTIVATIONS, CODE_DTYPES, HALVES, SF_DTYPES
from jitfp4.errors import ArgumentError
from jitfp4.families.quantize.arguments import Arguments, TokenArguments
from jitfp4.families.quantize.four_over_six import check_recipe, code_of
from jitfp4.families.quantize.operation import QUANTIZE, QUANTIZE_PER_TOKEN
from jitfp4.formats import MXFP4, NVFP4, BlockFormat, NVFP44Over6Config
from jitfp4.layouts import SfLayout, padded_shape
from jitfp4.public import public
from jitfp4.reference import quantize as reference
from jitfp4.reference.formats import divide, swizzle
from jitfp4.reference.shuffle import shuffle_rows
from jitfp4.tensors import (
    as_rows,
    check_device,
    check_dtype,
    check_layout,
    layout_of_flags,
    output,
    scalar_f32,
    scales_f32,
    writing,
)

_BACKENDS = ("cuda", "cute-dsl", "cake", "auto")
_SHUFFLE_TILE = 128  # rows of the epilogue tile for which do_shuffle permutes


@public
def nvfp4_quantize(
    a: torch.Tensor,
    a_global_sf: torch.Tensor | float,
    sfLayout: SfLayout = SfLayout.layout_128x4,  # noqa: N803 - FlashInfer's name
    do_shuffle: bool = False,
    sf_vec_size: int = 16,
    enable_pdl: bool | None = None,
    backend: str = "cuda",
    per_token_activation: bool = False,
    expanded_idx_to_permuted_idx: torch.Tensor | None = None,
    out_scale: torch.Tensor | None = None,
    nvfp4_4over6: NVFP44Over6Config | None = None,
    *,
    out: torch.Tensor | None = None,
    out_sf: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """Quantize to NVFP4: E2M1 codes, an E4M3 scale for each block of 16, and one float32 scale for the tensor.

    Args:
        a: [..., k] fp16, bf16 or float8_e4m3fn; k a positive multiple of 16; leading dimensions count as m rows. Rows
            may be strided by a multiple of 16 bytes. Never copied, never moved to another device.
        a_global_sf: the *encode* scale, ``448 * 6 / amax(a)``: one float32 on a's device (fp16 and bf16 are widened),
            or a Python float. Read on the device only; finite and positive. With per_token_activation the inverse base,
            ``1 / (448 * 6)``.
        sfLayout: the layout of the block scales; see SfLayout.
        do_shuffle: permute the rows for TensorRT-LLM's epilogue tile of 128 (FlashInfer's shuffle_matrix_a); needs the
            128x4 layout and m % 128 == 0.
        sf_vec_size: 16, the block size of NVFP4.
        enable_pdl: programmatic dependent launch; None means wherever the GPU has it.
        backend: FlashInfer's names "cuda", "cute-dsl", "cake" and "auto" are accepted; all run the kernels of this
            package.
        per_token_activation: give every row its own global scale; a is fp16 or bf16.
        expanded_idx_to_permuted_idx: not supported; None.
        out_scale: with per_token_activation, one float32 on a's device by which the decode scales that are returned
            are multiplied; nothing else changes.
        nvfp4_4over6: None, or the recipe by which each block takes the better of two scales, as
            ``jitfp4.reference.quantize.quantize_4over6`` defines it: an NVFP44Over6Config, also FlashInfer's. Not for
            float8 input. FlashInfer's default reads environment variables; here nothing does.
        out, out_sf: contiguous tensors on a's device to fill in place, of the shapes below: uint8, or float4_e2m1fn_x2
            and float8_e4m3fn; allocated when None.
    Returns:
        codes, uint8 [..., k/2], element 2j in the low nibble of byte j; E4M3 block scales, uint8, 2-D:
        ``sfLayout.shape(m, k/16)``, padding zero; with per_token_activation also the decode scale of each row, float32
        [m].
    Numerics:
        For each block, with g the global scale, in float32, every operation correctly rounded::

            s = amax(|x|) * (g * float32(1/6));   b = e4m3(s)
            o = min(1 / (dec8(b) * (1/g)), FLT_MAX), 0 when amax == 0;   code = e2m1(x * o)

        Both conversions round to nearest even and saturate. A NaN element gives code 7; amax ignores it unless its
        whole block is NaN. Inf saturates. ``x ~= e2m1(code) * dec8(b) / g``. float8_e4m3fn input is first replaced by
        ``fp16(x * ((1/g) * 6))``, so that dequantization gives ``6 x / g``. Per token, ``g = min((1 / a_global_sf) /
        amax(row), FLT_MAX)`` (1 where that is 0), and the decode scale is ``1 / g``, 0 for a row of zeros.
    Raises:
        ArgumentError, ArgumentTypeError: before anything is written.
    """
    _check_backend(backend)
    if sf_vec_size != NVFP4.block:
        raise ArgumentError("sf_vec_size", sf_vec_size, "16")
    if expanded_idx_to_permuted_idx is not None:
        raise ArgumentError("expanded_idx_to_permuted_idx", "a tensor", "None: index maps are not supported")
    layout = check_layout("sfLayout", sfLayout)
    check_dtype("a", a, HALVES if per_token_activation else ACTIVATIONS)
    check_device("a", a)
    rows = as_rows("a", a, NVFP4.block)
    m = rows.shape[0]
    scale = scalar_f32("a_global_sf", a_global_sf, like=a)
    recipe = check_recipe("nvfp4_4over6", nvfp4_4over6, a.dtype)
    factor = None if out_scale is None else scalar_f32("out_scale", out_scale, like=a)
    if factor is not None and not per_token_activation:
        raise ArgumentError("out_scale", "a tensor", "None without per_token_activation")
    if do_shuffle and (layout is not SfLayout.layout_128x4 or m % _SHUFFLE_TILE):
        raise ArgumentError("do_shuffle", f"True with {layout.name} and m = {m}", "layout_128x4 and m % 128 == 0")
    q, sf = _outputs(a, NVFP4, m, a.shape[-1], layout, out, out_sf)
    q_bytes, sf_bytes = q.view(torch.uint8), sf.view(torch.uint8)
    decode = None
    if per_token_activation:
        decode = torch.empty(m, dtype=torch.float32, device=a.device)
        run = partial(_run_per_token, rows, scale, decode, recipe=recipe)
    else:
        run = partial(_run, rows, scale, NVFP4, recipe=recipe)
    if do_shuffle:
        linear = torch.empty(m, a.shape[-1] // NVFP4.block, dtype=torch.uint8, device=a.device)
        codes = torch.empty(m, a.shape[-1] // 2, dtype=torch.uint8, device=a.device)
        run(codes, linear, SfLayout.layout_linear, enable_pdl)
        q_bytes.view(m, codes.shape[1]).copy_(shuffle_rows(codes, _SHUFFLE_TILE))
        sf_bytes.copy_(swizzle(shuffle_rows(linear, _SHUFFLE_TILE), layout))
    else:
        run(q_bytes, sf_bytes, layout, enable_pdl)
    if decode is None:
        return q, sf
    decode = shuffle_rows(decode.unsqueeze(1), _SHUFFLE_TILE).squeeze(1) if do_shuffle else decode
    return q, sf, decode if factor is None else decode * factor


@public
def mxfp4_quantize(
    a: torch.Tensor,
    backend: str = "cuda",
    enable_pdl: bool | None = None,
    sfLayout: SfLayout = SfLayout.layout_128x4,  # noqa: N803 - FlashInfer's name
    *,
    out: torch.Tensor | None = None,
    out_sf: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize to MXFP4: E2M1 codes, a power-of-two scale (UE8M0) for each block of 32, and no global scale.

    Args:
        a: [..., k] fp16, bf16 or float8_e4m3fn; k a positive multiple of 32; leading dimensions count as m rows. Rows
            may be strided by a multiple of 16 bytes. float8_e4m3fn is copied to bf16 first, which is exact.
        backend, enable_pdl, sfLayout, out, out_sf: as in nvfp4_quantize(), but out_sf is uint8 or float8_e8m0fnu.
    Returns:
        codes, uint8 [..., k/2]; and UE8M0 block scales, uint8, 2-D: ``sfLayout.shape(m, k/32)``, padding zero.
    Numerics:
        ``b = amax(|x|) * float32(1/6)`` rounded up to a power of two (OCP MX with a scale that never saturates), at
        most byte 254; ``code = e2m1(x * 2^(127 - b))``. ``x ~= e2m1(code) * 2^(b - 127)``. NaN and Inf as in
        nvfp4_quantize(), a block of NaN has byte 254.
    Raises:
        ArgumentError, ArgumentTypeError: before anything is written.
    """
    _check_backend(backend)
    layout = check_layout("sfLayout", sfLayout)
    check_dtype("a", a, ACTIVATIONS)
    check_device("a", a)
    rows = _halves(as_rows("a", a, MXFP4.block))
    q, sf = _outputs(a, MXFP4, rows.shape[0], a.shape[-1], layout, out, out_sf)
    _run(rows, None, MXFP4, q.view(torch.uint8), sf.view(torch.uint8), layout, enable_pdl)
    return q, sf


@public
def fp4_quantize(
    input: torch.Tensor,  # noqa: A002 - FlashInfer's name
    global_scale: torch.Tensor | float | None = None,
    sf_vec_size: int = 16,
    sf_use_ue8m0: bool = False,
    is_sf_swizzled_layout: bool = True,
    is_sf_8x4_layout: bool = False,
    is_global_scale_inversed: bool = False,
    enable_pdl: bool | None = None,
    backend: str = "cuda",
    nvfp4_4over6: NVFP44Over6Config | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize to NVFP4 or MXFP4, with FlashInfer's general signature.

    Args:
        input: [..., k] fp16, bf16 or float8_e4m3fn; as ``a`` of nvfp4_quantize() and mxfp4_quantize(). A column-major
            input (unit stride in the last dimension but one) is quantized along its columns, and the last two
            dimensions of both results are transposed back.
        global_scale: the *encode* scale: one float32, or one for each of the m rows; None is 1 (not for float8 input).
            With MXFP4 it is accepted and ignored, because engines pass it.
        sf_vec_size, sf_use_ue8m0: (16, False) for NVFP4, (32, True) for MXFP4.
        is_sf_swizzled_layout, is_sf_8x4_layout: 128x4, 8x4 (both) or linear (neither).
        is_global_scale_inversed: global_scale is the decode scale; its correctly rounded inverse is used.
        enable_pdl, backend: as in nvfp4_quantize().
        nvfp4_4over6: as in nvfp4_quantize(); None with MXFP4.
    Returns:
        codes, uint8 [..., k/2]; block scales, uint8, 2-D. Numerics as in nvfp4_quantize() and mxfp4_quantize().
    Raises:
        ArgumentError, ArgumentTypeError: before anything is written.
    """
    _check_backend(backend)
    layout = layout_of_flags(is_sf_swizzled_layout, is_sf_8x4_layout)
    if (sf_vec_size, sf_use_ue8m0) not in ((NVFP4.block, False), (MXFP4.block, True)):
        raise ArgumentError("sf_vec_size, sf_use_ue8m0", (sf_vec_size, sf_use_ue8m0), "(16, False) or (32, True)")
    block_format = MXFP4 if sf_use_ue8m0 else NVFP4
    check_dtype("input", input, ACTIVATIONS)
    recipe = check_recipe("nvfp4_4over6", nvfp4_4over6, input.dtype)
    if recipe is not None and block_format is MXFP4:
        raise ArgumentError("nvfp4_4over6", "a recipe", "None with MXFP4")
    check_device("input", input)
    transposed = input.dim() >= 2 and input.stride(-1) != 1 and input.stride(-2) == 1
    a = input.transpose(-2, -1) if transposed else input
    rows = as_rows("input", a, block_format.block)
    rows, m = rows if block_format is NVFP4 else _halves(rows), rows.shape[0]
    scale = None if block_format is MXFP4 else _encode_scale(global_scale, is_global_scale_inversed, m, a)
    q, sf = _outputs(a, block_format, m, a.shape[-1], layout, None, None)
    _run(rows, scale, block_format, q, sf, layout, enable_pdl, names="a=input", recipe=recipe)
    return (q.transpose(-2, -1), sf.transpose(-2, -1)) if transposed else (q, sf)


@public
def silu_and_mul_nvfp4_quantize(
    input: torch.Tensor,  # noqa: A002 - FlashInfer's name
    global_scale: torch.Tensor | float,
    sf_vec_size: int = 16,
    is_sf_swizzled_layout: bool = True,
    is_sf_8x4_layout: bool = False,
    enable_pdl: bool | None = None,
    nvfp4_4over6: NVFP44Over6Config | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize ``silu(input[..., :k]) * input[..., k:]``, the activation of SwiGLU, to NVFP4 in one pass over memory.

    Args:
        input: [..., 2k] fp16 or bf16; k a positive multiple of 16; leading dimensions count as m rows.
        global_scale: the *encode* scale of the product, as ``a_global_sf`` of nvfp4_quantize().
        sf_vec_size: 16.
        is_sf_swizzled_layout, is_sf_8x4_layout: 128x4, 8x4 (both) or linear (neither).
        enable_pdl, nvfp4_4over6: as in nvfp4_quantize().
    Returns:
        codes, uint8 [m, k/2]; E4M3 block scales, uint8, 2-D.
    Numerics:
        ``silu(v) = v / (1 + exp(-v))`` and the product in float32, rounded to the input's dtype, then as in
        nvfp4_quantize(). The GPU's exp is ``ex2.approx``, with a relative error of up to 2^-22 + |v| 2^-23: the only
        step in which the CPU and the GPU may differ.
    Raises:
        ArgumentError, ArgumentTypeError: before anything is written.
    """
    if sf_vec_size != NVFP4.block:
        raise ArgumentError("sf_vec_size", sf_vec_size, "16")
    layout = layout_of_flags(is_sf_swizzled_layout, is_sf_8x4_layout)
    check_dtype("input", input, HALVES)
    check_device("input", input)
    rows = as_rows("input", input, 2 * NVFP4.block)
    scale = scalar_f32("global_scale", global_scale, like=input)
    recipe = check_recipe("nvfp4_4over6", nvfp4_4over6)
    m, k = rows.shape[0], rows.shape[1] // 2
    q = torch.empty(m, k // 2, dtype=torch.uint8, device=input.device)
    sf = torch.empty(padded_shape(layout, m, k // NVFP4.block), dtype=torch.uint8, device=input.device)
    _run(rows, scale, NVFP4, q, sf, layout, enable_pdl, silu=True, names="a=input", recipe=recipe)
    return q, sf


@public
def silu_and_mul(
    input: torch.Tensor,  # noqa: A002 - FlashInfer's name
    out: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
) -> torch.Tensor:
    """``silu(input[..., :k]) * input[..., k:]`` without quantization, by torch operations: no kernel of this package.

    Args:
        input: [..., 2k] fp16 or bf16.
        out: contiguous [..., k] of input's dtype to fill in place; allocated when None.
        enable_pdl: accepted, without effect.
    Returns:
        [..., k]. Numerics as in silu_and_mul_nvfp4_quantize(), with torch's exp.
    Raises:
        ArgumentError, ArgumentTypeError: before anything is written.
    """
    del enable_pdl
    check_dtype("input", input, HALVES)
    check_device("input", input)
    if input.dim() == 0 or input.shape[-1] % 2:
        raise ArgumentError("input", f"shape {tuple(input.shape)}", "[..., 2k]")
    out = output("out", out, (*input.shape[:-1], input.shape[-1] // 2), (input.dtype,), like=input)
    if not torch.compiler.is_dynamo_compiling() and out.numel() and meet(extent(out), extent(input)):
        raise ArgumentError("out", "memory of input", "memory of its own")
    with writing(out):
        return out.copy_(reference.silu_and_mul(input.detach()))


def _check_backend(backend: str) -> None:
    if backend not in _BACKENDS:
        raise ArgumentError("backend", repr(backend), ", ".join(_BACKENDS))


def _outputs(
    a: torch.Tensor,
    block_format: BlockFormat,
    m: int,
    k: int,
    layout: SfLayout,
    out: torch.Tensor | None,
    out_sf: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    q = output("out", out, (*a.shape[:-1], k // 2), CODE_DTYPES, like=a)
    return q, output(
        "out_sf", out_sf, padded_shape(layout, m, k // block_format.block), SF_DTYPES[block_format], like=a
    )


def _halves(rows: torch.Tensor) -> torch.Tensor:
    """E4M3 rows converted to bf16, which holds every E4M3 value; other rows unchanged."""
    return rows.to(torch.bfloat16) if rows.dtype == torch.float8_e4m3fn else rows


def _encode_scale(scale: torch.Tensor | float | None, inversed: bool, m: int, a: torch.Tensor) -> torch.Tensor:
    if scale is None:
        if a.dtype == torch.float8_e4m3fn:
            raise ArgumentError("global_scale", None, "a scale with float8_e4m3fn input")
        scale = 1.0
    encode = scales_f32("global_scale", scale, (1, m), like=a)
    return replay.temporary(lambda scale: divide(1.0, scale), encode) if inversed else encode


def _run(
    rows: torch.Tensor,
    scale: torch.Tensor | None,
    block_format: BlockFormat,
    q: torch.Tensor,
    sf: torch.Tensor,
    layout: SfLayout,
    enable_pdl: bool | None,
    *,
    silu: bool = False,
    names: str = "",
    recipe: NVFP44Over6Config | None = None,
) -> None:
    QUANTIZE(
        Arguments(
            a=rows,
            scale=scale,
            out=q if q.dim() == 2 else q.view(rows.shape[0], q.shape[-1]),
            out_sf=sf,
            format=block_format.value,
            layout=int(layout),
            silu=silu,
            four_over_six=code_of(recipe),
            enable_pdl=enable_pdl,
            names=names,
        )
    )


def _run_per_token(
    rows: torch.Tensor,
    inverse_base: torch.Tensor,
    decode: torch.Tensor,
    q: torch.Tensor,
    sf: torch.Tensor,
    layout: SfLayout,
    enable_pdl: bool | None,
    *,
    recipe: NVFP44Over6Config | None,
) -> None:
    QUANTIZE_PER_TOKEN(
        TokenArguments(
            a=rows,
            inverse_base=inverse_base,
            out=q if q.dim() == 2 else q.view(rows.shape[0], q.shape[-1]),
            out_sf=sf,
            decode=decode,
            layout=int(layout),
            four_over_six=code_of(recipe),
            enable_pdl=enable_pdl,
        )
    )

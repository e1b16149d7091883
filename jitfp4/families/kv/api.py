"""The public functions of the NVFP4 KV cache: quantize, append, dequantize."""

from __future__ import annotations

import math

import torch

from jitfp4.dtypes import CODE_DTYPES, HALVES, SF_DTYPES
from jitfp4.errors import ArgumentError
from jitfp4.families.kv.calls import (
    NO_LISTS,
    append_by_position,
    append_by_slot,
    dequantize_paged,
    dequantize_side,
    quantize_side,
    quantize_sides,
)
from jitfp4.families.kv.checks import (
    Side,
    check_rows,
    check_side,
    check_unit_stride,
    check_work,
    decode_scales,
    is_interleaved,
    nhd,
    written_pair,
)
from jitfp4.formats import E4M3_MAX, NVFP4
from jitfp4.public import public
from jitfp4.reference.formats import divide
from jitfp4.tensors import Pair, check_dtype, check_same_device, pair, scalar_f32

_MIN_AMAX = 1e-12


@public
def nvfp4_kv_quantize(
    input: torch.Tensor,  # noqa: A002 - FlashInfer's name
    global_scale: torch.Tensor | float,
    *,
    enable_pdl: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize rows to the format of the KV cache: NVFP4 with linear block scales and a *decode* scale.

    Args:
        input: [m, k] fp16 or bf16, rows contiguous and 16-byte aligned; k a positive multiple of 16.
        global_scale: the *decode* scale gd, ``amax(input) / (448 * 6)``: one float32 on input's device (fp16 and bf16
            are widened), or a Python float. Read on the device only; positive and finite.
        enable_pdl: programmatic dependent launch; None means wherever the GPU has it.
    Returns:
        codes, uint8 [m, k/2], element 2j in the low nibble of byte j; E4M3 block scales, uint8 [m, k/16].
    Numerics:
        For each block of 16, in float32, every operation correctly rounded::

            g = min(1 / gd, FLT_MAX);   s = amax(|x|) * (g * float32(1/6));   b = e4m3(s)
            o = min(1 / (dec8(b) * gd), FLT_MAX);   code = e2m1(x * o)

        This is nvfp4_quantize() with the encode scale 1/gd, whose inverse is gd itself. Both conversions round to
        nearest even and saturate; ``x ~= e2m1(code) * (dec8(b) * gd)``. A block of zeros has b = 0 and codes 0. A NaN
        gives code 7 and counts for amax only when its whole block is NaN; Inf saturates.
    Raises:
        ArgumentError, ArgumentTypeError: before anything is written.
    """
    check_rows("input", input, 2, HALVES)
    m, k = input.shape
    scale = scalar_f32("global_scale", global_scale, like=input)
    check_work("input", m, k // NVFP4.block)
    codes = torch.empty(m, k // 2, dtype=torch.uint8, device=input.device)
    sf = torch.empty(m, k // NVFP4.block, dtype=torch.uint8, device=input.device)
    side = Side(codes[None, :, None], sf[None, :, None])
    quantize_side(input[None, :, None], scale, NO_LISTS, side, interleaved=False, enable_pdl=enable_pdl, name="input")
    return codes, sf


@public
def nvfp4_quantize_paged_kv_cache(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    kv_layout: str = "HND",
    k_global_sf: torch.Tensor | float | None = None,
    v_global_sf: torch.Tensor | float | None = None,
    *,
    v_sf_layout: str = "interleaved4",
    enable_pdl: bool | None = None,
) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor], float, float]:
    """Quantize a whole paged cache to NVFP4.

    Args:
        k_cache, v_cache: fp16 or bf16, [pages, heads, page, d] ("HND") or [pages, page, heads, d] ("NHD"), of one dtype
            and the same numbers of pages, tokens and heads; d may differ. Rows of d are contiguous and 16-byte aligned;
            d is a multiple of 16.
        kv_layout: "HND" or "NHD".
        k_global_sf, v_global_sf: *encode* scales without the factor 6 of E2M1, ``448 / amax(cache)``: one element, or
            a number. None computes ``448 / max(amax(cache), 1e-12)``. The host reads them, so this function
            synchronises.
        v_sf_layout: "interleaved4", V's block scales as trtllm_* functions expect them, or "linear", as the append
            functions write and FlashInfer's wrappers expect them. Interleaved: in each (page, head), scale s of token t
            is byte ``t // 4 * 4 * d/16 + s * 4 + t % 4``; needs page % 4 == 0 and d % 64 == 0. K's are always linear.
        enable_pdl: programmatic dependent launch; None means wherever the GPU has it.
    Returns:
        ``(k_fp4, v_fp4), (k_sf, v_sf), k_scale, v_scale``: codes, uint8 [..., d/2], element 2j in the low nibble of
        byte j; block scales, float8_e4m3fn [..., d/16]; both in the order of axes of the input, contiguous. The scales
        are *decode* scales, ``1 / k_global_sf``: what the append and dequantize functions take.
    Numerics:
        As nvfp4_kv_quantize() with the decode scale that is returned, so that tokens appended with it get the bytes
        that they would have got here. ``x ~= e2m1(code) * (dec8(b) * k_scale)``; with the default scales
        ``|code| * dec8(b)`` is at most 448 (rounding aside), so that the product fits E4M3.
    Raises:
        ArgumentError, ArgumentTypeError: before anything is written; also for a default scale of a cache with NaN or
        Inf in it. What torch.compile traces does not check the values of scales.
    """
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        check_rows(name, cache, 4, HALVES)
    k, v = nhd(k_cache, kv_layout), nhd(v_cache, kv_layout)
    if v.shape[:-1] != k.shape[:-1]:
        raise ArgumentError("v_cache", f"shape {tuple(v_cache.shape)}", "k_cache's pages, tokens and heads")
    check_dtype("v_cache", v, (k.dtype,))
    check_same_device("v_cache", v, k)
    interleaved = is_interleaved(v_sf_layout, v.shape[-1], v.shape[1])
    for name, x in (("k_cache", k), ("v_cache", v)):
        check_work(name, x.shape[0] * x.shape[1], x.shape[2] * x.shape[3] // NVFP4.block)
    scales = _decode_scale_of("k", k_cache, k_global_sf), _decode_scale_of("v", v_cache, v_global_sf)
    codes, sf = (
        tuple(torch.empty(*x.shape[:-1], x.shape[-1] // per, dtype=dtype, device=x.device) for x in (k_cache, v_cache))
        for per, dtype in ((2, torch.uint8), (NVFP4.block, torch.float8_e4m3fn))
    )
    written = [Side(nhd(x, kv_layout), nhd(y.view(torch.uint8), kv_layout)) for x, y in zip(codes, sf, strict=True)]
    on_device = [scale.to(k.device) for scale in scales]
    quantize_sides((k, v), on_device, NO_LISTS, written, interleaved, enable_pdl, ("k_cache", "v_cache"))
    return (codes[0], codes[1]), (sf[0], sf[1]), float(scales[0]), float(scales[1])


@public
def nvfp4_quantize_append_paged_kv_cache(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    paged_kv_cache: Pair,
    kv_cache_sf: Pair,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    k_scale: torch.Tensor | float,
    v_scale: torch.Tensor | float,
    kv_layout: str = "NHD",
    *,
    v_sf_layout: str = "linear",
    enable_pdl: bool | None = None,
) -> None:
    """Quantize tokens of K and V into a paged NVFP4 cache, each at a position of its request: one launch.

    Args:
        append_key, append_value: [n, heads, d] fp16 or bf16 of one dtype, as in
            nvfp4_quantize_append_paged_kv_cache_with_slot_mapping().
        batch_indices: [n] int32 or int64, the request of each token.
        positions: [n] int32 or int64, the token's position in its request.
        paged_kv_cache, kv_cache_sf: as in nvfp4_quantize_append_paged_kv_cache_with_slot_mapping().
        kv_indices: int32 or int64, the pages of all requests, one request after the other.
        kv_indptr: [requests + 1] int32 or int64, where each request's pages begin in kv_indices.
        kv_last_page_len: [requests] int32 or int64; not read, because positions say where tokens go.
        k_scale, v_scale, kv_layout, v_sf_layout, enable_pdl: as in
            nvfp4_quantize_append_paged_kv_cache_with_slot_mapping().
    Returns:
        Nothing: the cache is updated in place. Numerics as nvfp4_kv_quantize(). Position p of request b goes to page
        ``kv_indices[kv_indptr[b] + p // page]``, token ``p % page``. On the GPU a token is skipped when its
        request, position or page is negative, or beyond its list or the cache; on the CPU negative values are skipped,
        and values beyond are errors. Two tokens for one place in one call have no defined result.
    Raises:
        ArgumentError, ArgumentTypeError: before anything is written.
    """
    codes, sf = written_pair("paged_kv_cache", paged_kv_cache), written_pair("kv_cache_sf", kv_cache_sf)
    check_rows("append_key", append_key, 3, HALVES)
    scales = decode_scales(k_scale, v_scale, append_key)
    append_by_position(
        append_key,
        append_value,
        batch_indices=batch_indices,
        positions=positions,
        kv_indices=kv_indices,
        kv_indptr=kv_indptr,
        kv_last_page_len=kv_last_page_len,
        codes=codes,
        sf=sf,
        scales=scales,
        kv_layout=kv_layout,
        v_sf_layout=v_sf_layout,
        enable_pdl=enable_pdl,
    )


@public
def nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    slot_mapping: torch.Tensor,
    paged_kv_cache: Pair,
    kv_cache_sf: Pair,
    k_scale: torch.Tensor | float,
    v_scale: torch.Tensor | float,
    kv_layout: str = "NHD",
    *,
    v_sf_layout: str = "linear",
    enable_pdl: bool | None = None,
) -> None:
    """Quantize tokens of K and V into the slots of a paged NVFP4 cache: one launch.

    Args:
        append_key, append_value: [n, heads, d] fp16 or bf16 of one dtype; d may differ. Rows of d are contiguous and
            16-byte aligned; other strides are free, as in views of a packed projection. Tokens beyond the length of
            slot_mapping are not read.
        slot_mapping: int32 or int64, at most n entries: the slot of each token, ``page * page_size + token of the
            page``.
        paged_kv_cache: a pair (K, V), or both stacked as [pages, 2, ...]: uint8 (or float4_e2m1fn_x2), each
            [pages, page, heads, d/2] ("NHD") or [pages, heads, page, d/2] ("HND"); 8-byte aligned rows. Neither K nor V
            nor their scales share memory with each other or with another argument.
        kv_cache_sf: float8_e4m3fn, arranged as paged_kv_cache with d/16. All strides but the last are free, so
            codes and scales may share pages.
        k_scale, v_scale: *decode* scales, recommended ``amax / (448 * 6)``, positive and finite: float32 tensors of one
            element, or numbers. The host reads a tensor once, and again after it was changed in place, but never
            while a CUDA graph is captured or torch.compile traces. During a capture a tensor must be on append_key's
            device.
        kv_layout: "NHD" or "HND".
        v_sf_layout: "linear", or "interleaved4" as nvfp4_quantize_paged_kv_cache() describes it.
        enable_pdl: programmatic dependent launch; None means wherever the GPU has it.
    Returns:
        Nothing: the cache is updated in place. Numerics as nvfp4_kv_quantize(). Negative slots are skipped. Slots
        beyond the cache are skipped on the GPU, and errors on the CPU. Two tokens for one slot in one call have no
        defined result.
    Raises:
        ArgumentError, ArgumentTypeError: before anything is written.
    """
    codes, sf = written_pair("paged_kv_cache", paged_kv_cache), written_pair("kv_cache_sf", kv_cache_sf)
    check_rows("append_key", append_key, 3, HALVES)
    scales = decode_scales(k_scale, v_scale, append_key)
    append_by_slot(
        append_key,
        append_value,
        slot_mapping,
        codes=codes,
        sf=sf,
        scales=scales,
        kv_layout=kv_layout,
        v_sf_layout=v_sf_layout,
        enable_pdl=enable_pdl,
    )


@public
def nvfp4_kv_dequantize(
    fp4_data: torch.Tensor,
    block_scales: torch.Tensor,
    global_scale: torch.Tensor | float,
    output_dtype: torch.dtype = torch.bfloat16,
    *,
    enable_pdl: bool | None = None,
) -> torch.Tensor:
    """Convert rows of NVFP4 with linear block scales, as nvfp4_kv_quantize() returns them, to floats.

    Args:
        fp4_data: uint8 (or float4_e2m1fn_x2) [m, k/2], rows contiguous.
        block_scales: E4M3, uint8 or float8_e4m3fn, [m, k/16], rows contiguous.
        global_scale: the *decode* scale: one float32 on fp4_data's device (fp16 and bf16 are widened), or a number.
        output_dtype: bfloat16 or float16.
        enable_pdl: programmatic dependent launch; None means wherever the GPU has it.
    Returns:
        [m, k] of output_dtype.
    Numerics:
        ``x = e2m1(code) * (dec8(b) * global_scale)`` in float32, both products rounded to nearest, then rounded once to
        output_dtype.
    Raises:
        ArgumentError, ArgumentTypeError: before anything is written.
    """
    check_dtype("fp4_data", fp4_data, CODE_DTYPES)
    check_dtype("block_scales", block_scales, SF_DTYPES[NVFP4])
    if output_dtype not in HALVES:
        raise ArgumentError("output_dtype", output_dtype, " or ".join(map(str, HALVES)))
    for name, x in (("fp4_data", fp4_data), ("block_scales", block_scales)):
        if x.dim() != 2:
            raise ArgumentError(name, f"shape {tuple(x.shape)}", "[m, ...]")
        check_unit_stride(name, x)
    side = Side(fp4_data.view(torch.uint8)[None, :, None], block_scales.view(torch.uint8)[None, :, None])
    check_side("fp4_data", "block_scales", side)
    scale = scalar_f32("global_scale", global_scale, like=fp4_data)
    check_work("fp4_data", fp4_data.shape[0], fp4_data.shape[1] // 8)
    out = torch.empty(fp4_data.shape[0], side.head_dim, dtype=output_dtype, device=fp4_data.device)
    dequantize_side(side, scale, None, None, out[None, :, None], interleaved=False, enable_pdl=enable_pdl, name="out")
    return out


@public
def nvfp4_kv_dequantize_paged(
    paged_kv_cache: Pair,
    kv_cache_sf: Pair,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    k_scale: torch.Tensor | float,
    v_scale: torch.Tensor | float,
    output_k: torch.Tensor,
    output_v: torch.Tensor,
    kv_layout: str = "NHD",
    *,
    v_sf_layout: str = "linear",
    enable_pdl: bool | None = None,
) -> None:
    """Convert the sequences of a paged NVFP4 cache to floats: one launch.

    Args:
        paged_kv_cache, kv_cache_sf: as in nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(); the scales may be
            uint8 too.
        block_tables: [batch, columns] int32 or int64, the pages of each sequence; ``columns * page >= max_seq``.
        seq_lens: [batch] int32 or int64; lengths above max_seq count as max_seq.
        k_scale, v_scale: *decode* scales: one float32 each on the cache's device (fp16 and bf16 are widened), or
            numbers. Read on the device only.
        output_k, output_v: [batch, max_seq, heads, d] bf16 or fp16 of one dtype, contiguous, to fill in place. d of K
            and V may differ.
        kv_layout: "NHD" or "HND".
        v_sf_layout: "linear", or "interleaved4" as nvfp4_quantize_paged_kv_cache() describes it.
        enable_pdl: programmatic dependent launch; None means wherever the GPU has it.
    Returns:
        Nothing: the outputs are filled in place. Numerics as nvfp4_kv_dequantize(). Positions from seq_lens on are
        not written; nor are those in a page that is negative or, on the GPU, beyond the cache. On the CPU a page beyond
        the cache is an error.
    Raises:
        ArgumentError, ArgumentTypeError: before anything is written.
    """
    codes, sf = pair("paged_kv_cache", paged_kv_cache), pair("kv_cache_sf", kv_cache_sf)
    check_dtype("output_k", output_k, HALVES)
    dequantize_paged(
        output_k,
        output_v,
        block_tables,
        seq_lens,
        codes=codes,
        sf=sf,
        scales=(scalar_f32("k_scale", k_scale, like=output_k), scalar_f32("v_scale", v_scale, like=output_k)),
        kv_layout=kv_layout,
        v_sf_layout=v_sf_layout,
        enable_pdl=enable_pdl,
    )


def _decode_scale_of(side: str, cache: torch.Tensor, given: torch.Tensor | float | None) -> torch.Tensor:
    """1 / the encode scale that was given or, without one, that of the largest magnitude: float32 [1], on the CPU."""
    name, checks = f"{side}_global_sf", not torch.compiler.is_dynamo_compiling()  # a trace cannot branch on values
    if given is None:
        amax = torch.stack(torch.aminmax(cache)).abs().amax() if cache.numel() else torch.zeros(())
        amax = amax.float().cpu()
        if checks and not math.isfinite(amax):
            raise ArgumentError(f"{side}_cache", f"a largest magnitude of {amax}", f"finite values, or {name}")
        encode = divide(E4M3_MAX, amax.clamp(min=_MIN_AMAX).reshape(1))
    else:
        encode = scalar_f32(name, given, like=cache).detach().cpu().reshape(1)
    decode = divide(1.0, encode)
    if checks and not (0 < float(encode) < math.inf and 0 < float(decode) < math.inf):
        raise ArgumentError(name, float(encode), "a positive finite encode scale with a finite inverse")
    return decode

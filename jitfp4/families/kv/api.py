"""The public functions of the NVFP4 KV cache: quantize, append, dequantize."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from jitfp4.errors import ArgumentError
from jitfp4.families.kv.arguments import (
    APPEND_SF_DTYPES,
    CODE_DTYPES,
    INDEX_DTYPES,
    SF_DTYPES,
    Cache,
    Side,
    check_kv_layout,
    check_list,
    check_rows,
    check_v_sf_layout,
    decode_scales,
    sides,
)
from jitfp4.families.kv.operation import NEITHER, Dequantize, Quantize, dequantize, quantize, steps
from jitfp4.families.kv.problem import DTYPES, MAX_GRID_YZ, MAX_THREADS
from jitfp4.formats import E4M3_MAX, NVFP4
from jitfp4.reference.formats import divide
from jitfp4.tensors import check_contiguous, check_device, check_dtype, check_same_device, scalar_f32

_MIN_AMAX = 1e-12
_MAX_TOKENS = 1 << 31


def nvfp4_kv_quantize(
    input: torch.Tensor,  # noqa: A002 - FlashInfer's name
    global_scale: torch.Tensor | float,
    *,
    enable_pdl: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize rows as a KV cache holds them: NVFP4 with linear block scales and a *decode* scale.

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
    check_rows("input", input, 2, DTYPES)
    m, k = input.shape
    scale = scalar_f32("global_scale", global_scale, like=input)
    _check_tokens("input", m, k // NVFP4.block)
    codes = torch.empty(m, k // 2, dtype=torch.uint8, device=input.device)
    sf = torch.empty(m, k // NVFP4.block, dtype=torch.uint8, device=input.device)
    page = [x[None, :, None] for x in (codes, sf)]
    quantize(Quantize(input[None, :, None], None, scale, None, *[None] * 4, *page, None, None, NEITHER, enable_pdl))
    return codes, sf


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
            and the same pages and heads; d may differ. Rows of d are contiguous and 16-byte aligned; d a multiple
            of 16.
        kv_layout: "HND" or "NHD".
        k_global_sf, v_global_sf: *encode* scales without the 6 of E2M1, ``448 / amax(cache)``: one element, or a
            number. None computes ``448 / max(amax(cache), 1e-12)``. Read by the host: this function synchronises.
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
        Inf in it.
    """
    caches, outputs, scales = [], [], []
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        check_rows(name, cache, 4, DTYPES)
        check_kv_layout(kv_layout)
        caches.append(cache.transpose(1, 2) if kv_layout == "HND" else cache)
    k, v = caches
    if v.shape[:-1] != k.shape[:-1]:
        raise ArgumentError("v_cache", f"shape {tuple(v_cache.shape)}", "k_cache's pages, tokens and heads")
    check_dtype("v_cache", v, (k.dtype,))
    check_same_device("v_cache", v, k)
    interleaved = check_v_sf_layout(v_sf_layout, v.shape[-1], v.shape[1])
    _check_tokens("k_cache", k.shape[0] * k.shape[1], k.shape[2] * max(k.shape[-1], v.shape[-1]) // NVFP4.block)
    for name, cache, given in (("k_global_sf", k_cache, k_global_sf), ("v_global_sf", v_cache, v_global_sf)):
        scales.append(_decode_scale_of(name, name.replace("global_sf", "cache"), cache, given))
        *place, d = cache.shape
        codes = torch.empty(*place, d // 2, dtype=torch.uint8, device=cache.device)
        sf = torch.empty(*place, d // NVFP4.block, dtype=torch.float8_e4m3fn, device=cache.device)
        outputs.append((codes, sf))
    (k_codes, k_sf), (v_codes, v_sf) = outputs
    written = sides((k_codes, v_codes), (k_sf, v_sf), kv_layout)
    _write(caches, written, [x.to(k.device) for x in scales], (None,) * 4, interleaved, enable_pdl)
    return (k_codes, v_codes), (k_sf, v_sf), float(scales[0]), float(scales[1])


def nvfp4_quantize_append_paged_kv_cache(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    paged_kv_cache: Cache,
    kv_cache_sf: Cache,
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
        kv_indices: int32 or int64, the pages of all requests, one request behind the other.
        kv_indptr: [requests + 1] int32 or int64, where each request's pages begin in kv_indices.
        kv_last_page_len: [requests] int32 or int64; a position says where its token goes, so this is not read.
        k_scale, v_scale, kv_layout, v_sf_layout, enable_pdl: as in
            nvfp4_quantize_append_paged_kv_cache_with_slot_mapping().
    Returns:
        Nothing: the cache is updated in place. Numerics as nvfp4_kv_quantize(). Position p of request b goes to page
        ``kv_indices[kv_indptr[b] + p // page]``, token ``p % page``. On the GPU a token is skipped whose request,
        position or page is negative or outside of its list or of the cache; on the CPU negative ones are skipped, and
        one outside is an error. Two tokens for one place, in one call, have no defined result.
    Raises:
        ArgumentError, ArgumentTypeError: before anything is written.
    """
    check_rows("append_key", append_key, 3, DTYPES)
    tokens = batch_indices.numel() if isinstance(batch_indices, torch.Tensor) else 0
    requests = kv_indptr.numel() - 1 if isinstance(kv_indptr, torch.Tensor) else 0
    check_list("batch_indices", batch_indices, append_key)
    check_list("positions", positions, append_key, tokens)
    check_list("kv_indices", kv_indices, append_key)
    check_list("kv_indptr", kv_indptr, append_key)
    check_list("kv_last_page_len", kv_last_page_len, append_key, max(requests, 0))
    for name, x in (("append_key", append_key), ("append_value", append_value)):
        if isinstance(x, torch.Tensor) and x.dim() == 3 and x.shape[0] != tokens:
            raise ArgumentError(name, f"{x.shape[0]} tokens", f"{tokens}, as batch_indices")
    written = sides(paged_kv_cache, kv_cache_sf, kv_layout, APPEND_SF_DTYPES)
    interleaved = check_v_sf_layout(v_sf_layout, written[1].head_dim, written[1].codes.shape[1])
    scales = decode_scales(k_scale, v_scale, append_key)
    lists = (positions, batch_indices, kv_indices, kv_indptr)
    _append((append_key, append_value), written, scales, lists, interleaved, enable_pdl)


def nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    slot_mapping: torch.Tensor,
    paged_kv_cache: Cache,
    kv_cache_sf: Cache,
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
            16-byte aligned, the other strides free, as in views of a packed projection. Rows behind the last of
            slot_mapping are not looked at.
        slot_mapping: int32 or int64, at most n entries: the slot of each token, ``page * page_size + token of the
            page``.
        paged_kv_cache: a pair (K, V), or both stacked as [pages, 2, ...]: uint8 (or float4_e2m1fn_x2), each
            [pages, page, heads, d/2] ("NHD") or [pages, heads, page, d/2] ("HND"); 8-byte aligned rows.
        kv_cache_sf: float8_e4m3fn, arranged as paged_kv_cache with d/16. Strides of both are free but for the last:
            codes and scales may share pages.
        k_scale, v_scale: *decode* scales, recommended ``amax / (448 * 6)``, positive and finite: float32 tensors of one
            element, or numbers. Tensors are read by the host once, and again when they were changed in place; not
            while a CUDA graph is captured or torch.compile traces. During a capture they must be tensors on
            append_key's device.
        kv_layout: "NHD" or "HND".
        v_sf_layout: "linear", or "interleaved4" as nvfp4_quantize_paged_kv_cache() describes it.
        enable_pdl: programmatic dependent launch; None means wherever the GPU has it.
    Returns:
        Nothing: the cache is updated in place. Numerics as nvfp4_kv_quantize(). A negative slot is skipped. One beyond
        the cache is skipped on the GPU, and an error on the CPU. Two tokens for one slot, in one call, have no defined
        result.
    Raises:
        ArgumentError, ArgumentTypeError: before anything is written.
    """
    check_rows("append_key", append_key, 3, DTYPES)
    check_list("slot_mapping", slot_mapping, append_key)
    for name, x in (("append_key", append_key), ("append_value", append_value)):
        if isinstance(x, torch.Tensor) and x.dim() == 3 and x.shape[0] < slot_mapping.numel():
            raise ArgumentError(name, f"{x.shape[0]} tokens", f"at least {slot_mapping.numel()}, as slot_mapping")
    written = sides(paged_kv_cache, kv_cache_sf, kv_layout, APPEND_SF_DTYPES)
    interleaved = check_v_sf_layout(v_sf_layout, written[1].head_dim, written[1].codes.shape[1])
    scales = decode_scales(k_scale, v_scale, append_key)
    _append((append_key, append_value), written, scales, (slot_mapping, None, None, None), interleaved, enable_pdl)


def nvfp4_kv_dequantize(
    fp4_data: torch.Tensor,
    block_scales: torch.Tensor,
    global_scale: torch.Tensor | float,
    output_dtype: torch.dtype = torch.bfloat16,
    *,
    enable_pdl: bool | None = None,
) -> torch.Tensor:
    """Rows of NVFP4 with linear block scales, as nvfp4_kv_quantize() returns them, to floats.

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
    check_device("fp4_data", fp4_data)
    check_dtype("block_scales", block_scales, SF_DTYPES)
    if output_dtype not in DTYPES:
        raise ArgumentError("output_dtype", output_dtype, " or ".join(map(str, DTYPES)))
    for name, x in (("fp4_data", fp4_data), ("block_scales", block_scales)):
        if x.dim() != 2:
            raise ArgumentError(name, f"shape {tuple(x.shape)}", "[m, ...]")
    scale = scalar_f32("global_scale", global_scale, like=fp4_data)
    (m, width) = fp4_data.shape
    _check_tokens("fp4_data", m, width // 8)
    codes, sf = fp4_data[None, :, None], block_scales[None, :, None]
    side, _ = sides((codes, codes), (sf, sf), "NHD")
    out = torch.empty(m, 2 * width, dtype=output_dtype, device=fp4_data.device)
    dequantize(Dequantize(*side, None, None, scale, None, None, None, out[None, :, None], None, NEITHER, enable_pdl))
    return out


def nvfp4_kv_dequantize_paged(
    paged_kv_cache: Cache,
    kv_cache_sf: Cache,
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
    """The sequences of a paged NVFP4 cache to floats: one launch.

    Args:
        paged_kv_cache, kv_cache_sf: as in nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(); the scales may be
            uint8 too.
        block_tables: [batch, columns] int32 or int64, the pages of each sequence; ``columns * page`` covers max_seq.
        seq_lens: [batch] int32 or int64; those above max_seq count as max_seq.
        k_scale, v_scale: *decode* scales: one float32 each on the cache's device (fp16 and bf16 are widened), or
            numbers. Read on the device only.
        output_k, output_v: [batch, max_seq, heads, d] bf16 or fp16 of one dtype, contiguous, to fill in place. d of K
            and V may differ.
        kv_layout: "NHD" or "HND".
        v_sf_layout: "linear", or "interleaved4" as nvfp4_quantize_paged_kv_cache() describes it.
        enable_pdl: programmatic dependent launch; None means wherever the GPU has it.
    Returns:
        Nothing: the outputs are filled in place. Numerics as nvfp4_kv_dequantize(). Positions from seq_lens on keep
        what they held; so do those in a page that is negative or, on the GPU, beyond the cache. On the CPU a page
        beyond the cache is an error.
    Raises:
        ArgumentError, ArgumentTypeError: before anything is written.
    """
    pair = sides(paged_kv_cache, kv_cache_sf, kv_layout)
    pages, page_size, heads, _ = pair[0].codes.shape
    check_dtype("output_k", output_k, DTYPES)
    if output_k.dim() != 4:
        raise ArgumentError("output_k", f"shape {tuple(output_k.shape)}", "[batch, max_seq, heads, d]")
    batch, tokens = output_k.shape[:2]
    for name, out, side in (("output_k", output_k, pair[0]), ("output_v", output_v, pair[1])):
        check_dtype(name, out, (output_k.dtype,))
        check_same_device(name, out, side.codes)
        check_contiguous(name, out)
        if out.shape != (want := (batch, tokens, heads, side.head_dim)):
            raise ArgumentError(name, f"shape {tuple(out.shape)}", f"{want}")
    check_list("seq_lens", seq_lens, output_k, batch)
    check_dtype("block_tables", block_tables, INDEX_DTYPES)
    check_same_device("block_tables", block_tables, output_k)
    if block_tables.dim() != 2 or block_tables.shape[0] != batch or block_tables.shape[1] * page_size < tokens:
        raise ArgumentError(
            "block_tables",
            f"shape {tuple(block_tables.shape)}: block_tables column count insufficient, or another batch",
            f"[{batch}, at least {-(-tokens // page_size)}]",
        )
    if block_tables.stride(1) != 1 and block_tables.shape[1] > 1:
        raise ArgumentError("block_tables", f"strides {block_tables.stride()}", "unit stride in the last dimension")
    if batch > MAX_GRID_YZ:
        raise ArgumentError("output_k", f"{batch} sequences", f"at most {MAX_GRID_YZ}")
    interleaved = check_v_sf_layout(v_sf_layout, pair[1].head_dim, page_size)
    _check_tokens("output_k", tokens, heads * max(side.head_dim for side in pair) // 8)
    scales = [scalar_f32(name, x, like=output_k) for name, x in (("k_scale", k_scale), ("v_scale", v_scale))]
    (k, v), (ks, vs) = pair, scales
    lists = (block_tables, seq_lens)
    if k.like(v):
        side = 1 if interleaved else NEITHER
        dequantize(Dequantize(*k, *v, ks, vs, *lists, output_k, output_v, side, enable_pdl))
        return
    dequantize(Dequantize(*k, None, None, ks, None, *lists, output_k, None, NEITHER, enable_pdl))
    side = 0 if interleaved else NEITHER
    dequantize(Dequantize(*v, None, None, vs, None, *lists, output_v, None, side, enable_pdl))


Lists = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


def _append(
    x: tuple[torch.Tensor, torch.Tensor],
    written: tuple[Side, Side],
    scales: tuple[torch.Tensor, torch.Tensor],
    lists: Lists,
    interleaved: bool,
    enable_pdl: bool | None,
) -> None:
    """Check rows [n, heads, d] of K and V against the cache, and write them."""
    slots = lists[0]
    assert slots is not None
    for name, rows, side in zip(("append_key", "append_value"), x, written, strict=True):
        check_rows(name, rows, 3, DTYPES)
        check_dtype(name, rows, (x[0].dtype,))
        check_same_device(name, rows, x[0])
        check_same_device("paged_kv_cache", side.codes, rows)
        if rows.shape[1:] != (want := (side.codes.shape[2], side.head_dim)):
            raise ArgumentError(name, f"shape {tuple(rows.shape)}", f"{('n', *want)}, as the cache")
        _check_tokens(name, slots.numel(), want[0] * want[1] // NVFP4.block)
    if slots.numel():
        _write(x, written, scales, lists, interleaved, enable_pdl)


def _write(
    x: Sequence[torch.Tensor],
    written: tuple[Side, Side],
    scales: Sequence[torch.Tensor],
    lists: Lists,
    interleaved: bool,
    enable_pdl: bool | None,
) -> None:
    """One launch where K and V have the same strides, else one for each."""
    if written[0].like(written[1]) and steps(x[0]) == steps(x[1]):
        side = 1 if interleaved else NEITHER
        quantize(Quantize(*x, *scales, *lists, *written[0], *written[1], side, enable_pdl))
        return
    for rows, side_written, scale, side in zip(x, written, scales, (NEITHER, 0 if interleaved else NEITHER), strict=True):
        quantize(Quantize(rows, None, scale, None, *lists, *side_written, None, None, side, enable_pdl))


def _decode_scale_of(name: str, cache_name: str, cache: torch.Tensor, given: torch.Tensor | float | None) -> torch.Tensor:
    """1 / the encode scale that was given or, without one, follows from the largest magnitude: one float32 on the CPU."""
    if given is None:
        low, high = torch.aminmax(cache) if cache.numel() else (torch.zeros(()), torch.zeros(()))
        amax = max(abs(float(low)), abs(float(high)))
        if not math.isfinite(amax):
            raise ArgumentError(cache_name, f"a largest magnitude of {amax}", f"finite values, or {name}")
        encode = divide(E4M3_MAX, torch.tensor([max(amax, _MIN_AMAX)]))
    else:
        encode = scalar_f32(name, given, like=cache).detach().cpu().reshape(1)
    decode = divide(1.0, encode)
    if not (0 < float(decode) < math.inf and 0 < float(encode) < math.inf):
        raise ArgumentError(name, float(encode), "a positive finite encode scale with a finite inverse")
    return decode


def _check_tokens(name: str, tokens: int, blocks: int) -> None:
    """The kernels count tokens in 31 bits, and a grid holds so many CTAs over the blocks (or chunks) of a token."""
    if tokens >= _MAX_TOKENS or blocks > MAX_GRID_YZ // 2 * MAX_THREADS:
        raise ArgumentError(name, f"{tokens} tokens of {blocks} blocks", f"less than 2^31, of at most {MAX_GRID_YZ // 2 * MAX_THREADS}")

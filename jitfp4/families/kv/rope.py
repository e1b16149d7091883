"""Rotation of queries and keys and append to a cache in one launch: the operation and its public function."""

from __future__ import annotations

import torch

from jitfp4.dispatch import differ, reaches
from jitfp4.dtypes import HALVES
from jitfp4.errors import ArgumentError
from jitfp4.families.kv.arguments import NEITHER
from jitfp4.families.kv.checks import (
    APPEND_SF_DTYPES,
    Side,
    check_rows,
    check_unit_stride,
    is_interleaved,
    nhd,
    sides,
    written_pair,
)
from jitfp4.families.kv.kernels.rope_append import HEAD_DIMS, KERNEL, ROTARY, TABLE, Arguments, problem, problems
from jitfp4.families.kv.launches import steps
from jitfp4.operation import Operation
from jitfp4.public import public
from jitfp4.reference import kv as reference
from jitfp4.reference import norm, rope
from jitfp4.tensors import LEAST, Pair, check_contiguous, check_dtype, check_list, check_same_device, output

_MOST_ROWS = 1 << 31
_ALIGNED = 16  # bytes


def _reference(arguments: Arguments) -> None:
    turned: list[torch.Tensor] = []
    for x, weight in ((arguments.query, arguments.q_norm_weight), (arguments.key, arguments.k_norm_weight)):
        x = x if weight is None else norm.rmsnorm(x, weight, arguments.eps, arguments.weight_bias)
        turned.append(rope.rotate(x, arguments.cos_sin_cache, arguments.positions, is_neox=arguments.is_neox))
    pages, page_size = arguments.k_cache.shape[:2]
    slots = arguments.slot_mapping
    reference.check_slots(slots, pages * page_size)
    live = slots >= 0
    page, token = slots[live].long() // page_size, slots[live].long() % page_size
    written = (
        (turned[1], arguments.k_cache, arguments.k_sf, arguments.k_scale, arguments.k_factor),
        (arguments.value, arguments.v_cache, arguments.v_sf, arguments.v_scale, arguments.v_factor),
    )
    for side, (x, cache, sf, scale, factor) in enumerate(written):
        decode = torch.tensor([factor]) if scale is None else scale
        if sf is not None:
            reference.append(x, slots, cache, sf, decode, interleaved=side == arguments.interleaved)
            continue
        rows = x[live]
        if cache.shape[-1] == x.shape[-1]:
            rows = (rows.float() / decode.reshape(())).clamp(-448, 448).to(torch.float8_e4m3fn)
        cache[page, token] = rows.contiguous().view(torch.uint8)
    arguments.query_out.copy_(turned[0])


ROPE_APPEND = Operation(
    Arguments,
    name="rope_append",
    kernels=(KERNEL,),
    problem=problem,
    problems=problems,
    tables=(TABLE,),
    reference=_reference,
    output="query_out",
    aligned=(
        "query",
        "key",
        "value",
        "q_norm_weight",
        "k_norm_weight",
        "cos_sin_cache",
        "query_out",
        "k_cache",
        "v_cache",
    ),
    exclusive=("query_out", "k_cache", "v_cache", "k_sf", "v_sf"),
    growing=("rows",),
)


@public
def rope_append_paged_kv_cache(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    paged_kv_cache: Pair,
    kv_cache_sf: Pair | None = None,
    k_scale: torch.Tensor | float = 1.0,
    v_scale: torch.Tensor | float = 1.0,
    *,
    is_neox: bool,
    kv_layout: str,
    v_sf_layout: str = "linear",
    q_norm_weight: torch.Tensor | None = None,
    k_norm_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    weight_bias: float = 0.0,
    query_out: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
) -> torch.Tensor:
    """Rotate queries and keys by their positions, and append keys and values to a paged cache, in one launch.

    Args:
        query: [tokens, heads, d], fp16 or bf16; d 64, 80, 96, 112, 128, 192 or 256. Rows of d are contiguous
            and 16-byte aligned, other strides are free, as in views of a packed projection.
        key, value: [tokens, kv_heads, d] of query's dtype, likewise.
        cos_sin_cache: float32 [max_position, rotary], contiguous, 16-byte aligned: of each position rotary / 2 cosines,
            then as many sines. rotary is a multiple of 32, at most d; elements behind it are not rotated.
        positions: int32 or int64 [tokens]. One outside of cos_sin_cache gives NaN.
        slot_mapping: int32 or int64 [tokens]: ``page * page_size + token of the page``.
        paged_kv_cache: a pair (K, V), or both stacked as [pages, 2, ...], each [pages, page, kv_heads, d] ("NHD") or
            [pages, kv_heads, page, d] ("HND"), with equal strides, 16-byte aligned: of query's dtype or float8_e4m3fn,
            rows of d 16-byte aligned; or NVFP4 as uint8 (or float4_e2m1fn_x2) with d/2 in the last dimension.
        kv_cache_sf: for NVFP4, float8_e4m3fn, arranged as paged_kv_cache with d/16; else None.
        k_scale, v_scale: *decode* scales of an NVFP4 or E4M3 cache, positive and finite: numbers, which are passed by
            value, or one float32 each on query's device, read there only.
        is_neox: whether element i of a head is rotated with element i + rotary / 2; else neighbours are pairs.
        kv_layout: "NHD" or "HND".
        v_sf_layout: "linear", or "interleaved4" as nvfp4_quantize_paged_kv_cache() describes it.
        q_norm_weight, k_norm_weight: [d] of query's dtype, of an RMSNorm of each head before the rotation. Both are
            None where there is none.
        eps: of these norms.
        weight_bias: added to both weights in float32; 1 as norms of Gemma and Qwen3-Next have it.
        query_out: [tokens, heads, d] contiguous, of query's dtype; memory of its own; allocated when None.
        enable_pdl: programmatic dependent launch; None means wherever the GPU has it.
    Returns:
        query_out, the rotated queries. The cache is updated in place. Negative slots are skipped. Slots beyond the
        cache are skipped on the GPU, and errors on the CPU.
    Numerics:
        The bytes of the steps one by one: rmsnorm() of each head, or gemma_rmsnorm() with a weight_bias of 1;
        ``(a cos - b sin, b cos + a sin)`` in float32, every operation rounded, then rounded to query's dtype; then
        nvfp4_kv_quantize(), or for E4M3 ``e4m3(x / scale)``, saturating.
    Raises:
        ArgumentError, ArgumentTypeError: before anything is written.
    """
    cache = written_pair("paged_kv_cache", paged_kv_cache)
    sf = (None, None) if kv_cache_sf is None else written_pair("kv_cache_sf", kv_cache_sf)
    tokens, d = _check_inputs(query, key, value)
    for name, values in (("positions", positions), ("slot_mapping", slot_mapping)):
        check_list(name, values, query, tokens)
    _check_cos_sin(cos_sin_cache, query)
    if (q_norm_weight is None) != (k_norm_weight is None):
        raise ArgumentError("q_norm_weight, k_norm_weight", "one without the other", "both or neither")
    for name, weight in (("q_norm_weight", q_norm_weight), ("k_norm_weight", k_norm_weight)):
        if weight is not None:
            check_dtype(name, weight, (query.dtype,))
            check_same_device(name, weight, query)
            if tuple(weight.shape) != (d,) or not weight.is_contiguous():
                raise ArgumentError(name, f"shape {tuple(weight.shape)}", f"a contiguous ({d},)")
    if not eps >= 0:
        raise ArgumentError("eps", eps, "a finite number that is not negative")
    k, v = _sides(cache, sf, kv_layout, query)
    if k.codes.shape[2] != key.shape[1]:
        raise ArgumentError("paged_kv_cache", f"{k.codes.shape[2]} heads", f"{key.shape[1]}, as key")
    factors, scales = zip(*(_decode(n, s, query) for n, s in (("k_scale", k_scale), ("v_scale", v_scale))), strict=True)
    interleaved = is_interleaved(v_sf_layout, d, k.codes.shape[1]) if kv_cache_sf is not None else False
    result = output("query_out", query_out, tuple(query.shape), (query.dtype,), like=query)
    ROPE_APPEND(
        Arguments(
            query=query,
            key=key,
            value=value,
            q_norm_weight=q_norm_weight,
            k_norm_weight=k_norm_weight,
            cos_sin_cache=cos_sin_cache,
            positions=positions,
            slot_mapping=slot_mapping,
            k_scale=scales[0],
            v_scale=scales[1],
            query_out=result,
            k_cache=k.codes,
            v_cache=v.codes,
            k_sf=None if kv_cache_sf is None else k.sf,
            v_sf=None if kv_cache_sf is None else v.sf,
            k_factor=factors[0],
            v_factor=factors[1],
            eps=eps,
            weight_bias=float(weight_bias),
            is_neox=is_neox,
            interleaved=1 if interleaved else NEITHER,
            enable_pdl=enable_pdl,
            names="k_cache=paged_kv_cache,v_cache=paged_kv_cache,k_sf=kv_cache_sf,v_sf=kv_cache_sf",
        )
    )
    return result


def _check_inputs(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[int, int]:
    """The number of tokens and the size of a head, after checks of queries, keys and values."""
    check_rows("query", query, 3, HALVES)
    tokens, heads, d = query.shape
    if d not in HEAD_DIMS:
        raise ArgumentError("query", f"d = {d}", " or ".join(map(str, HEAD_DIMS)))
    for name, x in (("key", key), ("value", value)):
        check_rows(name, x, 3, (query.dtype,))
        check_same_device(name, x, query)
        if differ(x.shape, (tokens, key.shape[1], d)):
            raise ArgumentError(name, f"shape {tuple(x.shape)}", f"[{tokens}, kv_heads, {d}], as query and key")
    if reaches(tokens * (heads + 2 * key.shape[1]), _MOST_ROWS):
        raise ArgumentError("query", f"{tokens} tokens", "less than 2^31 heads of queries, keys and values")
    return tokens, d


def _check_cos_sin(cos_sin_cache: torch.Tensor, query: torch.Tensor) -> None:
    check_dtype("cos_sin_cache", cos_sin_cache, (torch.float32,))
    check_same_device("cos_sin_cache", cos_sin_cache, query)
    check_contiguous("cos_sin_cache", cos_sin_cache)
    rotary, d = cos_sin_cache.shape[-1] if cos_sin_cache.dim() == 2 else 0, query.shape[2]
    if not 0 < rotary <= d or rotary % ROTARY or not cos_sin_cache.shape[0]:
        allowed = f"[max_position, rotary], at least one position, rotary a multiple of {ROTARY} to {d}"
        raise ArgumentError("cos_sin_cache", f"shape {tuple(cos_sin_cache.shape)}", allowed)


def _sides(
    cache: tuple[torch.Tensor, torch.Tensor],
    sf: tuple[torch.Tensor | None, torch.Tensor | None],
    kv_layout: str,
    query: torch.Tensor,
) -> tuple[Side, Side]:
    """K and V of a cache as bytes; without block scales, each stands in for its own."""
    d = query.shape[2]
    if sf[0] is not None and sf[1] is not None:
        k, v = sides(cache, (sf[0], sf[1]), kv_layout, APPEND_SF_DTYPES)
        width = d // 2
    else:
        for x in cache:
            check_dtype("paged_kv_cache", x, (query.dtype, torch.float8_e4m3fn))
            if x.dim() != 4 or x.dtype != cache[0].dtype:
                raise ArgumentError("paged_kv_cache", f"{x.dtype} of shape {tuple(x.shape)}", "K and V alike, 4-D")
            check_unit_stride("paged_kv_cache", x)
        data = [nhd(x.view(torch.uint8), kv_layout) for x in cache]
        k, v = (Side(x, x) for x in data)
        width = d * cache[0].element_size()
        for x in data:
            if any(step % _ALIGNED for step in steps(x)):
                raise ArgumentError("paged_kv_cache", f"strides {x.stride()} bytes", f"multiples of {_ALIGNED} bytes")
    for side in (k, v):
        check_same_device("paged_kv_cache", side.codes, query)
        if side.codes.shape[-1] != width:
            raise ArgumentError("paged_kv_cache", f"rows of {side.codes.shape[-1]} bytes", f"{width}, for d = {d}")
    if not k.like(v):
        raise ArgumentError("paged_kv_cache", "K and V of other shapes or strides", "equal ones")
    return k, v


def _decode(name: str, scale: torch.Tensor | float, like: torch.Tensor) -> tuple[float, torch.Tensor | None]:
    """A decode scale as a number, or as a tensor."""
    if not isinstance(scale, torch.Tensor):
        if not scale > LEAST:
            raise ArgumentError(name, scale, "a positive finite decode scale")
        return float(scale), None
    check_dtype(name, scale, (torch.float32,))
    check_same_device(name, scale, like)
    if scale.numel() != 1:
        raise ArgumentError(name, f"{scale.numel()} elements", "one")
    return 1.0, scale.view(1)

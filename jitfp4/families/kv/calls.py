"""What the public functions have in common: checks of tensors and flags, and the call of one operator."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from jitfp4.addresses import Places
from jitfp4.dispatch import differ, reaches
from jitfp4.dtypes import HALVES, INDEX_DTYPES
from jitfp4.errors import ArgumentError
from jitfp4.families.kv.arguments import NEITHER, Dequantize, Quantize
from jitfp4.families.kv.checks import (
    APPEND_SF_DTYPES,
    Side,
    check_rows,
    check_unit_stride,
    check_work,
    is_interleaved,
    sides,
)
from jitfp4.families.kv.launches import steps
from jitfp4.families.kv.operation import dequantize, quantize
from jitfp4.formats import NVFP4
from jitfp4.spec import MAX_GRID_YZ
from jitfp4.tensors import check_contiguous, check_dtype, check_list, check_same_device

Both = tuple[torch.Tensor, torch.Tensor]
"""One tensor for K and one for V."""

Lists = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
"""Slots or positions. With positions also: the request of each token, all pages, where each request's pages begin."""

NO_LISTS: Lists = (None, None, None, None)


def append_by_slot(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    codes: Both,
    sf: Both,
    scales: Both,
    kv_layout: str,
    v_sf_layout: str,
    enable_pdl: bool | None,
) -> None:
    check_list("slot_mapping", slot_mapping, append_key)
    n = slot_mapping.shape[0]
    for name, x in (("append_key", append_key), ("append_value", append_value)):
        check_rows(name, x, 3, HALVES)
        if reaches(n, x.shape[0] + 1):
            raise ArgumentError(name, f"{x.shape[0]} tokens", f"at least {n}, as slot_mapping")
    written = sides(codes, sf, kv_layout, APPEND_SF_DTYPES)
    rows, lists = (append_key[:n], append_value[:n]), (slot_mapping, None, None, None)
    _append(rows, written, scales, lists, v_sf_layout, enable_pdl)


def append_by_position(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    *,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    codes: Both,
    sf: Both,
    scales: Both,
    kv_layout: str,
    v_sf_layout: str,
    enable_pdl: bool | None,
) -> None:
    check_list("batch_indices", batch_indices, append_key)
    n = batch_indices.shape[0]
    check_list("positions", positions, append_key, n)
    check_list("kv_indices", kv_indices, append_key)
    check_list("kv_indptr", kv_indptr, append_key)
    if kv_indptr.shape[0] == 0:
        raise ArgumentError("kv_indptr", "no entries", "one more than requests")
    check_list("kv_last_page_len", kv_last_page_len, append_key, kv_indptr.shape[0] - 1)
    for name, x in (("append_key", append_key), ("append_value", append_value)):
        check_rows(name, x, 3, HALVES)
        if differ(x.shape[:1], (n,)):
            raise ArgumentError(name, f"{x.shape[0]} tokens", f"{n}, as batch_indices")
    written = sides(codes, sf, kv_layout, APPEND_SF_DTYPES)
    check_work("kv_indices", kv_indices.shape[0] * written[0].codes.shape[1], 0)
    lists = (positions, batch_indices, kv_indices, kv_indptr)
    _append((append_key, append_value), written, scales, lists, v_sf_layout, enable_pdl)


def dequantize_paged(
    output_k: torch.Tensor,
    output_v: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    codes: Both,
    sf: Both,
    scales: Both,
    kv_layout: str,
    v_sf_layout: str,
    enable_pdl: bool | None,
) -> None:
    k, v = sides(codes, sf, kv_layout)
    _, page_size, heads, _ = k.codes.shape
    if output_k.dim() != 4:
        raise ArgumentError("output_k", f"shape {tuple(output_k.shape)}", "[batch, max_seq, heads, d]")
    batch, tokens = output_k.shape[:2]
    for name, out, side in (("output_k", output_k, k), ("output_v", output_v, v)):
        check_dtype(name, out, (output_k.dtype,))
        check_same_device(name, out, side.codes)
        check_contiguous(name, out)
        if differ(out.shape, want := (batch, tokens, heads, side.head_dim)):
            raise ArgumentError(name, f"shape {tuple(out.shape)}", f"{want}")
        check_work(name, tokens, heads * side.head_dim // NVFP4.block)
    if reaches(batch, MAX_GRID_YZ + 1):
        raise ArgumentError("output_k", f"{batch} sequences", f"at most {MAX_GRID_YZ}")
    check_list("seq_lens", seq_lens, output_k, batch)
    _check_tables(block_tables, output_k, page_size)
    interleaved = is_interleaved(v_sf_layout, v.head_dim, page_size)
    lists = block_tables, seq_lens
    _dequantize_sides((k, v), scales, lists, (output_k, output_v), interleaved, enable_pdl)


def _dequantize_sides(
    read: tuple[Side, Side],
    scales: Both,
    lists: Both,
    outs: Both,
    interleaved: bool,
    enable_pdl: bool | None,
) -> None:
    """Dequantize K and V: one launch where they have the same shapes and strides, else one for each."""
    k, v = read
    if not k.like(v):
        dequantize_side(k, scales[0], *lists, outs[0], interleaved=False, enable_pdl=enable_pdl, name="output_k")
        dequantize_side(v, scales[1], *lists, outs[1], interleaved=interleaved, enable_pdl=enable_pdl, name="output_v")
        return
    dequantize(
        Dequantize(
            k_codes=k.codes,
            k_sf=k.sf,
            v_codes=v.codes,
            v_sf=v.sf,
            k_scale=scales[0],
            v_scale=scales[1],
            block_tables=lists[0],
            seq_lens=lists[1],
            k_out=outs[0],
            v_out=outs[1],
            interleaved=1 if interleaved else NEITHER,
            enable_pdl=enable_pdl,
            names="k_out=output_k,v_out=output_v,k_codes=paged_kv_cache,v_codes=paged_kv_cache",
        )
    )


def dequantize_side(
    side: Side,
    scale: torch.Tensor,
    block_tables: torch.Tensor | None,
    seq_lens: torch.Tensor | None,
    out: torch.Tensor,
    *,
    interleaved: bool,
    enable_pdl: bool | None,
    name: str,
) -> None:
    """Dequantize one side alone."""
    dequantize(
        Dequantize(
            k_codes=side.codes,
            k_sf=side.sf,
            v_codes=None,
            v_sf=None,
            k_scale=scale,
            v_scale=None,
            block_tables=block_tables,
            seq_lens=seq_lens,
            k_out=out,
            v_out=None,
            interleaved=0 if interleaved else NEITHER,
            enable_pdl=enable_pdl,
            names=f"k_out={name}",
        )
    )


def _check_tables(block_tables: torch.Tensor, out: torch.Tensor, page_size: int) -> None:
    batch, tokens = out.shape[:2]
    check_dtype("block_tables", block_tables, INDEX_DTYPES)
    check_same_device("block_tables", block_tables, out)
    shape = tuple(block_tables.shape)
    if block_tables.dim() != 2 or differ(shape[:1], (batch,)):
        raise ArgumentError("block_tables", f"shape {shape}", f"[{batch}, columns]")
    if shape[1] * page_size < tokens:
        got = f"shape {shape}: block_tables column count insufficient for max_seq = {tokens}"
        raise ArgumentError("block_tables", got, f"at least {-(-tokens // page_size)} columns")
    check_unit_stride("block_tables", block_tables)


def _append(
    x: Both,
    written: tuple[Side, Side],
    scales: Both,
    lists: Lists,
    v_sf_layout: str,
    enable_pdl: bool | None,
) -> None:
    """Check rows [n, heads, d] of K and V against the cache, and write them."""
    for name, rows, side in zip(("append_key", "append_value"), x, written, strict=True):
        check_dtype(name, rows, (x[0].dtype,))
        check_same_device(name, rows, x[0])
        check_same_device("paged_kv_cache", side.codes, rows)
        if rows.shape[1:] != (want := (side.codes.shape[2], side.head_dim)):
            raise ArgumentError(name, f"shape {tuple(rows.shape)}", f"{('n', *want)}, as the cache")
        check_work(name, rows.shape[0], want[0] * want[1] // NVFP4.block)
    interleaved = is_interleaved(v_sf_layout, written[1].head_dim, written[1].codes.shape[1])
    quantize_sides(x, scales, lists, written, interleaved, enable_pdl, ("append_key", "append_value"))


def _cache_names(lists: Lists) -> str:
    """The public names of a cache that is written, and of the lists that say where."""
    slots = "slot_mapping" if lists[3] is None else "positions"
    return f"k_codes=paged_kv_cache,k_sf=kv_cache_sf,slots={slots},indices=kv_indices,indptr=kv_indptr"


def quantize_sides(
    x: Both,
    scales: Sequence[torch.Tensor],
    lists: Lists,
    written: Sequence[Side],
    interleaved: bool,
    enable_pdl: bool | None,
    names: tuple[str, str],
) -> None:
    """Quantize K and V: one launch where they have the same shapes and strides, else one for each."""
    k, v = written
    if not k.like(v) or steps(x[0]) != steps(x[1]):
        _check_apart(k, v)
        quantize_side(x[0], scales[0], lists, k, interleaved=False, enable_pdl=enable_pdl, name=names[0])
        quantize_side(x[1], scales[1], lists, v, interleaved=interleaved, enable_pdl=enable_pdl, name=names[1])
        return
    slots, batch_indices, indices, indptr = lists
    quantize(
        Quantize(
            k=x[0],
            v=x[1],
            k_scale=scales[0],
            v_scale=scales[1],
            slots=slots,
            batch_indices=batch_indices,
            indices=indices,
            indptr=indptr,
            k_codes=k.codes,
            k_sf=k.sf,
            v_codes=v.codes,
            v_sf=v.sf,
            interleaved=1 if interleaved else NEITHER,
            enable_pdl=enable_pdl,
            names=f"k={names[0]},v={names[1]},{_cache_names(lists)},v_codes=paged_kv_cache,v_sf=kv_cache_sf",
        )
    )


def _check_apart(k: Side, v: Side) -> None:
    """Check that K and V, which two launches write, share no memory."""
    if torch.compiler.is_dynamo_compiling() or k.codes.is_meta:
        return
    for name, one, other in (("paged_kv_cache", k.codes, v.codes), ("kv_cache_sf", k.sf, v.sf)):
        if one.numel() and Places.of(one, other).meet(one.data_ptr(), other.data_ptr()):
            raise ArgumentError(name, "K and V in the same memory", "memory of its own for each")


def quantize_side(
    x: torch.Tensor,
    scale: torch.Tensor,
    lists: Lists,
    written: Side,
    *,
    interleaved: bool,
    enable_pdl: bool | None,
    name: str,
) -> None:
    """Quantize one side alone."""
    slots, batch_indices, indices, indptr = lists
    quantize(
        Quantize(
            k=x,
            v=None,
            k_scale=scale,
            v_scale=None,
            slots=slots,
            batch_indices=batch_indices,
            indices=indices,
            indptr=indptr,
            k_codes=written.codes,
            k_sf=written.sf,
            v_codes=None,
            v_sf=None,
            interleaved=0 if interleaved else NEITHER,
            enable_pdl=enable_pdl,
            names=f"k={name},{_cache_names(lists)}",
        )
    )

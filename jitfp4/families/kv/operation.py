"""The operators that write and read a KV cache, and their kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from jitfp4.dispatch import known
from jitfp4.dtypes import HALVES
from jitfp4.families.kv import tables
from jitfp4.families.kv.problem import (
    Addressing,
    DequantizeProblem,
    DequantizeSpec,
    QuantizeProblem,
    QuantizeSpec,
    dequantize_geometry,
    dequantize_rejects,
    dequantize_spec,
    quantize_geometry,
    quantize_rejects,
    quantize_spec,
)
from jitfp4.kernel import Kernel, Plan
from jitfp4.operation import Operation, Written
from jitfp4.reference import kv as reference
from jitfp4.spec import I64, Ptr

NEITHER = -1
"""The value of ``interleaved`` where the scales of both sides are linear."""


class Quantize(NamedTuple):
    """``k`` and ``v`` are tokens [tokens, heads, d], or whole pages [pages, tokens, heads, d].

    The caches are [pages, tokens, heads, ...]. K and V have the same shapes and strides. ``slots`` are slots, or
    positions if there is ``indptr``. ``interleaved`` is the side (0 for K, 1 for V) whose scales are interleaved by 4
    tokens, or NEITHER.
    """

    k: torch.Tensor
    v: torch.Tensor | None
    k_scale: torch.Tensor
    v_scale: torch.Tensor | None
    slots: torch.Tensor | None
    batch_indices: torch.Tensor | None
    indices: torch.Tensor | None
    indptr: torch.Tensor | None
    k_codes: Written
    k_sf: Written
    v_codes: Written | None
    v_sf: Written | None
    interleaved: int
    enable_pdl: bool | None
    names: str

    @property
    def addressing(self) -> Addressing:
        if self.slots is None:
            return Addressing.WHOLE
        return Addressing.SLOTS if self.indptr is None else Addressing.POSITIONS

    @property
    def tokens(self) -> int:
        return self.k_codes.shape[0] * self.k_codes.shape[1] if self.slots is None else self.slots.numel()


class Dequantize(NamedTuple):
    """Caches [pages, tokens, heads, ...] to outputs [sequences, tokens, heads, d].

    Without ``block_tables`` there is one page, which is one sequence.
    """

    k_codes: torch.Tensor
    k_sf: torch.Tensor
    v_codes: torch.Tensor | None
    v_sf: torch.Tensor | None
    k_scale: torch.Tensor
    v_scale: torch.Tensor | None
    block_tables: torch.Tensor | None
    seq_lens: torch.Tensor | None
    k_out: Written
    v_out: Written | None
    interleaved: int
    enable_pdl: bool | None
    names: str


_CACHE = (
    I64("num_pages"),
    I64("page_size"),
    I64("heads"),
    I64("cols", "block scales of a head"),
    I64("codes_page", "bytes from one to the next, in both sides"),
    I64("codes_token"),
    I64("codes_head"),
    I64("sf_page"),
    I64("sf_token"),
    I64("sf_head"),
    I64("interleaved_side", "0 for K, 1 for V, else neither"),
    I64("wide_lists", "bit i: list i has entries of 8 bytes, not 4"),
)


def _quantize_problem(a: Quantize) -> QuantizeProblem:
    blocks = a.k_sf.shape[2] * a.k_sf.shape[3]
    return QuantizeProblem(HALVES[a.k.dtype], a.addressing, a.tokens, blocks, sides=1 if a.v is None else 2)


def _bind_quantize(a: Quantize, _: Plan) -> Mapping[str, Any]:
    x = (0, *steps(a.k)) if a.slots is not None else steps(a.k)
    return {
        "k": a.k,
        "v": a.v,
        "k_scale": a.k_scale,
        "v_scale": a.v_scale,
        "k_codes": a.k_codes,
        "k_sf": a.k_sf,
        "v_codes": a.v_codes,
        "v_sf": a.v_sf,
        "slots": a.slots,
        "batch_indices": a.batch_indices,
        "indices": a.indices,
        "indptr": a.indptr,
        "tokens": a.tokens,
        "requests": 0 if a.indptr is None else a.indptr.numel() - 1,
        "num_indices": 0 if a.indices is None else a.indices.numel(),
        **dict(zip(("x_page", "x_token", "x_head"), x, strict=True)),
        **_bind_cache(a, (a.slots, a.batch_indices, a.indices, a.indptr)),
    }


def _quantize_reference(a: Quantize) -> None:
    pages, page_size = a.k_codes.shape[:2]
    if a.slots is None:
        slots = torch.arange(pages * page_size, device=a.k.device)
    elif a.indptr is None:
        slots = a.slots
        reference.check_slots(slots, pages * page_size)
    else:
        lists = a.batch_indices, a.slots, a.indices, a.indptr
        slots = reference.slots_in_pages(*_given(*lists), page_size, pages)
    sides = [(a.k, a.k_codes, a.k_sf, a.k_scale)]
    if a.v is not None:
        sides.append(_given(a.v, a.v_codes, a.v_sf, a.v_scale))
    for side, (x, codes, sf, scale) in enumerate(sides):
        tokens = x.flatten(0, 1) if a.slots is None else x
        reference.append(tokens, slots, codes, sf, scale, interleaved=side == a.interleaved)


QUANTIZE = Kernel(
    name="kv/quantize",
    spec=QuantizeSpec,
    params=(
        Ptr("k", "const In", "[tokens, heads, d] or [pages, tokens, heads, d], d contiguous"),
        Ptr("v", "const In"),
        Ptr("k_scale", "const float", "[1], decode"),
        Ptr("v_scale", "const float"),
        Ptr("k_codes", "uint8", "[pages, tokens, heads, d/2], low nibble first"),
        Ptr("k_sf", "uint8", "[pages, tokens, heads, d/16], E4M3"),
        Ptr("v_codes", "uint8"),
        Ptr("v_sf", "uint8"),
        Ptr("slots", "const void", "[tokens], slots or positions; list 0"),
        Ptr("batch_indices", "const void", "[tokens]; list 1"),
        Ptr("indices", "const void", "[num_indices], pages; list 2"),
        Ptr("indptr", "const void", "[requests + 1]; list 3"),
        I64("tokens"),
        I64("requests"),
        I64("num_indices"),
        I64("x_page", "elements from one to the next"),
        I64("x_token"),
        I64("x_head"),
        *_CACHE,
    ),
    tactics=tables.QUANTIZE_TACTICS,
    rejects=quantize_rejects,
    specialise=quantize_spec,
    geometry=quantize_geometry,
    bind=_bind_quantize,
)

quantize = Operation(
    Quantize,
    name="kv_quantize",
    kernels=(QUANTIZE,),
    problem=_quantize_problem,
    problems=tables.quantize_problems,
    tables=(tables.QUANTIZE,),
    reference=_quantize_reference,
    output="k",
    aligned=("k", "v"),
    exclusive=("k_codes", "v_codes", "k_sf", "v_sf"),
    growing=("tokens",),
)


def _dequantize_problem(a: Dequantize) -> DequantizeProblem:
    sequences, tokens, heads, d = a.k_out.shape
    return DequantizeProblem(
        out_dtype=HALVES[a.k_out.dtype],
        page_size=0 if a.block_tables is None else a.k_codes.shape[1],
        sequences=sequences,
        tokens=tokens,
        chunks=heads * d // 8,
        sides=1 if a.v_codes is None else 2,
    )


def _bind_dequantize(a: Dequantize, plan: Plan) -> Mapping[str, Any]:
    return {
        "k_codes": a.k_codes,
        "v_codes": a.v_codes,
        "k_sf": a.k_sf,
        "v_sf": a.v_sf,
        "k_scale": a.k_scale,
        "v_scale": a.v_scale,
        "k_out": a.k_out,
        "v_out": a.v_out,
        "block_tables": a.block_tables,
        "seq_lens": a.seq_lens,
        "sides": plan.problem.sides,
        "max_tokens": plan.problem.tokens,
        "table_stride": 0 if a.block_tables is None else a.block_tables.stride(0),
        **_bind_cache(a, (a.block_tables, a.seq_lens)),
    }


def _dequantize_reference(a: Dequantize) -> None:
    tokens, lengths = a.k_out.shape[1], [a.k_out.shape[1]]
    tables_ = torch.zeros(1, 1, dtype=torch.int64)
    if a.block_tables is not None and a.seq_lens is not None:
        lengths = [min(length, tokens) for length in a.seq_lens.tolist()]
        tables_ = a.block_tables
        reference.check_tables(tables_, lengths, a.k_codes.shape[0], a.k_codes.shape[1])
    sides = [(a.k_codes, a.k_sf, a.k_scale, a.k_out)]
    if a.v_codes is not None:
        sides.append(_given(a.v_codes, a.v_sf, a.v_scale, a.v_out))
    for side, (codes, sf, scale, out) in enumerate(sides):
        for sequence, length in enumerate(lengths):
            place = reference.places(tables_[sequence], length, codes.shape[1])
            found = reference.gather(codes, sf, place, interleaved=side == a.interleaved)
            out[sequence, place.position] = reference.dequantize(*found, scale).to(out.dtype)


DEQUANTIZE = Kernel(
    name="kv/dequantize",
    spec=DequantizeSpec,
    params=(
        Ptr("k_codes", "const uint8", "[pages, tokens, heads, d/2], low nibble first"),
        Ptr("v_codes", "const uint8"),
        Ptr("k_sf", "const uint8", "[pages, tokens, heads, d/16], E4M3"),
        Ptr("v_sf", "const uint8"),
        Ptr("k_scale", "const float", "[1], decode"),
        Ptr("v_scale", "const float"),
        Ptr("k_out", "Out", "[sequences, max_tokens, heads, d]"),
        Ptr("v_out", "Out"),
        Ptr("block_tables", "const void", "[sequences, ...], pages, rows table_stride apart; list 0"),
        Ptr("seq_lens", "const void", "[sequences]; list 1"),
        I64("sides"),
        I64("max_tokens"),
        I64("table_stride"),
        *_CACHE,
    ),
    tactics=tables.DEQUANTIZE_TACTICS,
    rejects=dequantize_rejects,
    specialise=dequantize_spec,
    geometry=dequantize_geometry,
    bind=_bind_dequantize,
)

dequantize = Operation(
    Dequantize,
    name="kv_dequantize",
    kernels=(DEQUANTIZE,),
    problem=_dequantize_problem,
    problems=tables.dequantize_problems,
    tables=(tables.DEQUANTIZE,),
    reference=_dequantize_reference,
    output="k_out",
    aligned=("k_out", "v_out"),
    exclusive=("k_out", "v_out"),
    growing=("sequences", "tokens"),
)


_Four = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _given(*tensors: torch.Tensor | None) -> _Four:
    """Four optional tensors that are given together, as tensors."""
    a, b, c, d = (tensor for tensor in tensors if tensor is not None)
    return a, b, c, d


def steps(tensor: torch.Tensor) -> tuple[int, ...]:
    """The strides of all dimensions but the last; 0 for a dimension of size 1, whose stride means nothing."""
    return tuple(
        0 if known(size == 1) else stride for size, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
    )


def _bind_cache(a: Quantize | Dequantize, lists: tuple[torch.Tensor | None, ...]) -> Mapping[str, int]:
    pages, page_size, heads, cols = a.k_sf.shape
    codes, sf = steps(a.k_codes), steps(a.k_sf)
    return {
        "num_pages": pages,
        "page_size": page_size,
        "heads": heads,
        "cols": cols,
        **dict(zip(("codes_page", "codes_token", "codes_head"), codes, strict=True)),
        **dict(zip(("sf_page", "sf_token", "sf_head"), sf, strict=True)),
        "interleaved_side": a.interleaved,
        "wide_lists": sum(1 << i for i, x in enumerate(lists) if x is not None and x.dtype == torch.int64),
    }

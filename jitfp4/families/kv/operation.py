"""The operators that write and read a KV cache."""

from __future__ import annotations

import torch

from jitfp4.dtypes import HALVES
from jitfp4.families.kv import tables
from jitfp4.families.kv.arguments import Dequantize, Quantize
from jitfp4.families.kv.kernels import dequantize as dequantize_kernel
from jitfp4.families.kv.kernels import quantize as quantize_kernel
from jitfp4.families.kv.problem import DequantizeProblem, QuantizeProblem
from jitfp4.operation import Operation
from jitfp4.reference import kv as reference


def _quantize_problem(a: Quantize) -> QuantizeProblem:
    blocks = a.k_sf.shape[2] * a.k_sf.shape[3]
    return QuantizeProblem(HALVES[a.k.dtype], a.addressing, a.tokens, blocks, sides=1 if a.v is None else 2)


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


quantize = Operation(
    Quantize,
    name="kv_quantize",
    kernels=(quantize_kernel.KERNEL,),
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


dequantize = Operation(
    Dequantize,
    name="kv_dequantize",
    kernels=(dequantize_kernel.KERNEL,),
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

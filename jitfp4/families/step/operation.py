"""The operation: its arguments, its kernel, its reference."""

from __future__ import annotations

import torch
from torch.nn.functional import silu

from jitfp4.dtypes import HALVES
from jitfp4.families.step.arguments import Arguments
from jitfp4.families.step.kernels.decode import KERNEL
from jitfp4.families.step.problem import HEAD_DIM, PAGE, Problem
from jitfp4.families.step.tables import TABLE, problems
from jitfp4.formats import NVFP4
from jitfp4.layouts import ceil_div
from jitfp4.operation import Operation
from jitfp4.reference import kv, norm, rope
from jitfp4.weight import TILE_COLS, TILE_ROWS, Fp4Weight, tile_bytes


def problem_of(arguments: Arguments) -> Problem:
    """The sizes of a model, and what it has."""
    a = arguments
    return Problem(
        a.x.shape[1],
        a.heads,
        a.kv_cache.shape[3],
        a.inter,
        HALVES[a.x.dtype],
        a.biases is not None,
        a.head_norms is not None,
        a.interleaved,
    )


def weights_of(layer: torch.Tensor, problem: Problem) -> list[Fp4Weight]:
    """The four prepared weights of a layer, views of its bytes; those of gates and ups are ``gated``."""
    found, at = [], 0
    for number, (n, k) in enumerate(problem.products):
        shape = ceil_div(n, TILE_ROWS), ceil_div(k, TILE_COLS), tile_bytes(NVFP4)
        size = shape[0] * shape[1] * shape[2]
        found.append(Fp4Weight(layer[at : at + size].view(shape), None, n, k, NVFP4, gated=number == 2))
        at += size
    return found


def _attend(a: Arguments, layer: int, qkv: torch.Tensor) -> torch.Tensor:
    """Rotates, appends, and attends: [1, heads * 128] of [1, (heads + 2 kv_heads) * 128]."""
    kv_heads, tokens = a.kv_cache.shape[3], int(a.seq_lens)
    rows = qkv.unflatten(1, (-1, HEAD_DIM))
    query, key, value = rows.split((a.heads, kv_heads, kv_heads), 1)
    if a.head_norms is not None:
        query, key = (norm.rmsnorm(x, a.head_norms[layer, i], a.eps) for i, x in enumerate((query, key)))
    position = torch.tensor([tokens - 1]) if a.positions is None else a.positions
    query, key = (rope.rotate(x, a.cos_sin_cache, position, is_neox=True) for x in (query, key))
    pages = a.block_tables[0, : ceil_div(tokens, PAGE)].long()
    slot = pages[-1:] * PAGE + (tokens - 1) % PAGE
    sides = []
    for side, row in enumerate((key, value)):
        interleaved = a.interleaved and side == 1
        scale = torch.ones(1) if a.kv_scales is None else a.kv_scales[layer, side]
        codes, scales = (x[layer, side].transpose(1, 2) for x in (a.kv_cache, a.kv_cache_sf))  # heads behind tokens
        kv.append(row, slot, codes, scales, scale, interleaved=interleaved)
        at, col = kv.scale_places(torch.arange(PAGE), scales.shape[-1], interleaved=interleaved)
        own = scales[pages][:, at, :, col].permute(2, 0, 3, 1)  # of [64, 8, pages, heads]
        values = kv.dequantize(codes[pages], own, scale)  # [pages, 64, kv_heads, 128]
        sides.append(values.flatten(0, 1)[:tokens].transpose(0, 1))
    groups = query[0].float().unflatten(0, (kv_heads, -1))
    weights = torch.softmax(groups @ sides[0].transpose(1, 2) * a.scale, -1)
    return (weights @ sides[1]).reshape(1, -1).to(qkv.dtype)


def _alphas(alphas: torch.Tensor, problem: Problem) -> list[torch.Tensor]:
    """What the outputs of each product are multiplied by, gates before ups."""
    q, side = problem.heads * HEAD_DIM, problem.kv_heads * HEAD_DIM
    counts = torch.tensor([q, side, side, problem.hidden, problem.inter, problem.inter, problem.hidden])
    return list(alphas.repeat_interleave(counts).split([n for n, _ in problem.products]))


def _reference(arguments: Arguments) -> None:
    a, problem = arguments, problem_of(arguments)
    h = a.x
    for layer in range(len(a.weights)):
        qkv, o, gate_up, down = (one.dequantize() for one in weights_of(a.weights[layer], problem))
        alpha = _alphas(a.alphas[layer], problem)
        rows = norm.rmsnorm(h, a.norms[layer, 0], a.eps).float() @ qkv.T * alpha[0]
        attended = _attend(a, layer, (rows if a.biases is None else rows + a.biases[layer].float()).to(h.dtype))
        h = norm.add((attended.float() @ o.T * alpha[1]).to(h.dtype), h)
        gate, up = (norm.rmsnorm(h, a.norms[layer, 1], a.eps).float() @ gate_up.T * alpha[2]).chunk(2, -1)
        h = norm.add(((silu(gate) * up).to(h.dtype).float() @ down.T * alpha[3]).to(h.dtype), h)
    a.out.copy_(h)


DECODE_STEP = Operation(
    Arguments,
    name="decode_step",
    kernels=(KERNEL,),
    problem=problem_of,
    problems=problems,
    tables=(TABLE,),
    reference=_reference,
    output="out",
    aligned=(
        *("x", "weights", "norms", "head_norms", "biases", "kv_cache", "kv_cache_sf", "cos_sin_cache", "state", "out"),
    ),
    exclusive=("kv_cache", "kv_cache_sf", "state", "out"),
)

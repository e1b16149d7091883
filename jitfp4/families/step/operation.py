"""The operation: its arguments, its kernel, its reference."""

from __future__ import annotations

import torch
from torch.nn.functional import silu

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
    """The sizes of a model."""
    return Problem(arguments.x.shape[1], arguments.heads, arguments.kv_cache.shape[3], arguments.inter)


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
    position = torch.tensor([tokens - 1])
    query, key = (rope.rotate(x, a.cos_sin_cache, position, is_neox=True) for x in (query, key))
    one = torch.ones(1)
    pages = a.block_tables[0, : ceil_div(tokens, PAGE)].long()
    sides = []
    for side, row in enumerate((key, value)):
        codes, scales = a.kv_cache[layer, side], a.kv_cache_sf[layer, side]
        new = kv.quantize(row[0], one)
        token = (tokens - 1) % PAGE
        codes[pages[-1], :, token], scales[pages[-1], :, token] = new
        values = kv.dequantize(codes[pages], scales[pages], one)  # [pages, kv_heads, 64, 128]
        sides.append(values.transpose(0, 1).flatten(1, 2)[:, :tokens])
    groups = query[0].float().unflatten(0, (kv_heads, -1))
    weights = torch.softmax(groups @ sides[0].transpose(1, 2) * a.scale, -1)
    return (weights @ sides[1]).reshape(1, -1).bfloat16()


def _reference(arguments: Arguments) -> None:
    a = arguments
    h = a.x
    for layer in range(len(a.weights)):
        qkv, o, gate_up, down = (one.dequantize() for one in weights_of(a.weights[layer], problem_of(a)))
        alpha = a.alphas[layer]
        attended = _attend(a, layer, (norm.rmsnorm(h, a.norms[layer, 0], a.eps).float() @ qkv.T * alpha[0]).bfloat16())
        h = norm.add((attended.float() @ o.T * alpha[1]).bfloat16(), h)
        gate, up = (norm.rmsnorm(h, a.norms[layer, 1], a.eps).float() @ gate_up.T * alpha[2]).chunk(2, -1)
        h = norm.add(((silu(gate) * up).bfloat16().float() @ down.T * alpha[3]).bfloat16(), h)
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
    aligned=("x", "weights", "norms", "kv_cache", "kv_cache_sf", "cos_sin_cache", "state", "out"),
    exclusive=("kv_cache", "kv_cache_sf", "state", "out"),
)

"""The kernels that a model can need, built and loaded before an engine serves: no request then waits for a compiler.

What a call launches depends on its sizes. An engine's configuration bounds those of a model, so the problems of all its
calls can be listed, and the tables say which few kernels they select.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

from jitfp4 import engine, tactics, warmup
from jitfp4.arch import Arch
from jitfp4.dtypes import HALVES
from jitfp4.families.attention.arguments import Arguments as AttentionArguments
from jitfp4.families.attention.operation import ATTENTION
from jitfp4.families.attention.problem import MANY_ROWS, ROW_BLOCK, TILE
from jitfp4.families.attention.problem import Problem as AttentionProblem
from jitfp4.families.experts.gather_operation import EXPERTS_GATHER
from jitfp4.families.experts.kernels.combine import CombineTactic
from jitfp4.families.experts.operation import EXPERTS_DOWN, EXPERTS_ROUTE, EXPERTS_UP
from jitfp4.families.experts.problem import GatherProblem, Product, RouteProblem
from jitfp4.families.experts.problem import Problem as ExpertsProblem
from jitfp4.families.experts.results_operation import EXPERTS_RESULTS
from jitfp4.families.experts.tables import item_rows_of, weight_down
from jitfp4.families.experts.weights import Fp4Experts
from jitfp4.families.gemm.fp8_operation import MM_FP8_FP4
from jitfp4.families.gemm.operation import MM_BF16_FP4
from jitfp4.families.gemm.problem import Fp8Problem
from jitfp4.families.gemm.problem import Problem as ProductProblem
from jitfp4.families.kv.operation import quantize
from jitfp4.families.kv.problem import Addressing, QuantizeProblem
from jitfp4.families.norm.fp8 import ROWS_FP8QUANT
from jitfp4.families.norm.kernels.rows_fp8quant import Fp8Problem as Fp8RowsProblem
from jitfp4.formats import NVFP4, BlockFormat, DType
from jitfp4.integrations.fp8 import LEAST_ROWS
from jitfp4.layouts import ceil_div, round_up
from jitfp4.operation import Operation
from jitfp4.weight import Fp4Weight

_EVERY_ROW = 64  # from here on, only multiples of _ROWS select another kernel
_ROWS = 8
_FP8_ROWS = 16


class Traffic(NamedTuple):
    """Bounds of what one step brings to an attention layer: new tokens in all, requests, tokens of a request."""

    tokens: int
    requests: int
    context: int


def load_products(weight: Fp4Weight, dtype: torch.dtype, max_tokens: int) -> None:
    """Load the kernels for products of 1 to ``max_tokens`` rows of activations; nothing on a CPU."""
    if weight.data.is_cuda:
        target = engine.target_of(weight.data)
        _load_products(target, HALVES[dtype], weight.format, weight.n, weight.k, max_tokens, weight.gated)


@engine.until_reset
def _load_products(
    target: engine.Target, dtype: DType, block_format: BlockFormat, n: int, k: int, max_tokens: int, gated: bool
) -> None:
    _load(MM_BF16_FP4, products(dtype, block_format, n, k, max_tokens, gated), target)


def products(
    dtype: DType, block_format: BlockFormat, n: int, k: int, max_tokens: int, gated: bool = False
) -> Iterator[ProductProblem]:
    """Problems that select every kernel of products of up to ``max_tokens`` rows."""
    few, most = min(_EVERY_ROW, max_tokens), round_up(max_tokens, _ROWS)
    for m in (*range(1, few + 1), *range(_EVERY_ROW + _ROWS, most + 1, _ROWS)):
        yield ProductProblem(dtype, dtype, block_format, m, n, k, gated)


def load_fp8_products(weight: Fp4Weight, dtype: torch.dtype, max_tokens: int) -> None:
    """Load the kernels for products in FP8 of up to ``max_tokens`` rows of activations; nothing on a CPU."""
    if weight.data.is_cuda and max_tokens >= LEAST_ROWS:
        target, rows = engine.target_of(weight.data), Fp8RowsProblem(HALVES[dtype], False, False, LEAST_ROWS, weight.k)
        _load(ROWS_FP8QUANT, [rows], target)
        _load_fp8_products(target, HALVES[dtype], weight.format, weight.n, weight.k, max_tokens, weight.gated)


@engine.until_reset
def _load_fp8_products(
    target: engine.Target, dtype: DType, block_format: BlockFormat, n: int, k: int, max_tokens: int, gated: bool
) -> None:
    _load(MM_FP8_FP4, fp8_products(dtype, block_format, n, k, max_tokens, gated), target)


def fp8_products(
    dtype: DType, block_format: BlockFormat, n: int, k: int, max_tokens: int, gated: bool = False
) -> Iterator[Fp8Problem]:
    """Problems that select every kernel of products in FP8 of up to ``max_tokens`` rows: tiles are of whole 16."""
    for m in range(LEAST_ROWS, round_up(max_tokens, _FP8_ROWS) + 1, _FP8_ROWS):
        yield Fp8Problem(dtype, block_format, m, n, k, gated)


def load_growing(operation: Operation[Any, Any], base: Any, field: str, most: int, like: torch.Tensor) -> None:
    """Load the kernels for problems like ``base`` with 1 to ``most`` in ``field``; nothing on a CPU.

    Nor of an operation that a GPU has no problems for.
    """
    if like.is_cuda:
        _load_growing(engine.target_of(like), operation, base, field, most)


@engine.until_reset
def _load_growing(target: engine.Target, operation: Operation[Any, Any], base: Any, field: str, most: int) -> None:
    if operation.problems(target.arch):
        _load(operation, growing(base, field, most), target)


def growing(base: Any, field: str, most: int) -> Iterator[Any]:
    """Problems like ``base`` that select every kernel for 1 to ``most`` in ``field``."""
    return (base._replace(**{field: size}) for size in _tokens(most))


def load_experts(experts: Fp4Experts, dtype: torch.dtype, slots: int, max_tokens: int) -> None:
    """Load the kernels for 1 to ``max_tokens`` tokens of ``slots`` experts each; nothing on a CPU."""
    if experts.w13.is_cuda:
        target = engine.target_of(experts.w13)
        _load_layer(target, experts, dtype, slots, max_tokens)
        _load(EXPERTS_ROUTE, (RouteProblem(t, slots, experts.experts) for t in _tokens(max_tokens)), target)
        if target.arch.has_wgmma:  # for its product up of many rows
            _load(EXPERTS_GATHER, [GatherProblem(HALVES[dtype], max_tokens, slots, items=1, item_rows=1)], target)


def load_fp8_experts(experts: Fp4Experts, dtype: torch.dtype, slots: int, least_tokens: int, max_tokens: int) -> None:
    """Load what ``least_tokens`` to ``max_tokens`` tokens in FP8 need beside load_experts(); nothing on a CPU."""
    if experts.w13.is_cuda and max_tokens >= least_tokens:
        target = engine.target_of(experts.w13)
        _load_layer(target, experts, dtype, slots, max_tokens, least_tokens)
        rows = GatherProblem(HALVES[dtype], max_tokens, slots, items=1, item_rows=1, fp8=True)
        _load(EXPERTS_GATHER, [rows], target)


def _load_layer(
    target: engine.Target,
    experts: Fp4Experts,
    dtype: torch.dtype,
    slots: int,
    max_tokens: int,
    fp8_from: int | None = None,
) -> None:
    up = (Product.GATED if experts.gated else Product.PLAIN, experts.rows13, experts.hidden)
    down = (Product.DOWN, experts.hidden, experts.inter)
    for operation, matrix in ((EXPERTS_UP, up), (EXPERTS_DOWN, down), (EXPERTS_RESULTS, down)):
        shape = (HALVES[dtype], experts.format, experts.experts, slots, max_tokens, fp8_from)
        _load_experts(target, operation, matrix, *shape)


@engine.until_reset
def _load_experts(
    target: engine.Target,
    operation: Operation[Any, Any],
    matrix: tuple[Product, int, int],
    dtype: DType,
    block_format: BlockFormat,
    experts: int,
    slots: int,
    max_tokens: int,
    fp8_from: int | None,
) -> None:
    problems = expert_products(matrix, dtype, block_format, experts, slots, max_tokens, target.arch, fp8_from)
    if operation is EXPERTS_RESULTS:
        problems = (one for one in problems if isinstance(EXPERTS_DOWN.select(one, target.arch), CombineTactic))
    _load(operation, problems, target)


def expert_products(
    matrix: tuple[Product, int, int],
    dtype: DType,
    block_format: BlockFormat,
    experts: int,
    slots: int,
    max_tokens: int,
    arch: Arch,
    fp8_from: int | None = None,
) -> Iterator[ExpertsProblem]:
    """Problems that select every kernel of a product by weights ``[n, k]`` for up to ``max_tokens`` tokens.

    With ``fp8_from`` those of products in FP8, of so many tokens and more.
    """
    (product, n, k), fp8 = matrix, fp8_from is not None
    size = weight_down(product, n, k)
    for tokens in _tokens(max_tokens, fp8_from or 1):
        item_rows = item_rows_of(tokens * slots, experts, size, arch, fp8=fp8)
        yield ExpertsProblem(product, dtype, block_format, tokens, slots, experts, n, k, item_rows, fp8)


def _tokens(most: int, least: int = 1) -> Iterator[int]:
    """Numbers of tokens: every one up to 1024, then steps of a 64th, which no table tells apart."""
    tokens = least
    while tokens < most:
        yield tokens
        tokens += 1 + tokens // 1024 * 16
    yield most


def load_attention(arguments: AttentionArguments, traffic: Traffic) -> None:
    """Load the kernels for attention over a cache: ``arguments`` are of any call; nothing on a CPU."""
    if arguments.query.is_cuda:
        target = engine.target_of(arguments.query)
        _load(ATTENTION, attentions(ATTENTION.problem(arguments), _kv_heads(arguments), traffic), target)


def attentions(base: AttentionProblem, kv_heads: int, traffic: Traffic) -> Iterator[AttentionProblem]:
    """Problems that select every kernel of attention within ``traffic``; ``base`` is that of any call."""
    group = base.rows  # an upper bound of the query heads of a KV head
    lengths = _powers(1, ceil_div(traffic.context, TILE))
    batches = _powers(kv_heads, traffic.requests * kv_heads)
    for tiles in lengths:
        for batch in batches:
            for rows in (8, 16):
                yield base._replace(rows=rows, tiles=tiles, units=tiles * batch, causal=True, blocks=0)
            for rows in _powers(ROW_BLOCK, MANY_ROWS):
                most = kv_heads * (ceil_div(traffic.tokens * group, ROW_BLOCK) + 2 * traffic.requests)
                for blocks in _powers(kv_heads, most):
                    yield base._replace(rows=rows, tiles=tiles, units=tiles * batch, causal=True, blocks=blocks)


def load_appends(dtype: torch.dtype, kv_heads: int, head_dim: int, max_tokens: int, like: torch.Tensor) -> None:
    """Load the kernels that append 1 to ``max_tokens`` tokens to an NVFP4 cache on ``like``'s device; not on a CPU."""
    if like.is_cuda:
        _load(quantize, appends(HALVES[dtype], kv_heads, head_dim, max_tokens), engine.target_of(like))


def appends(dtype: DType, kv_heads: int, head_dim: int, max_tokens: int) -> Iterator[QuantizeProblem]:
    """Problems that select every kernel that appends up to ``max_tokens`` tokens."""
    for tokens in range(1, max_tokens + 1):
        yield QuantizeProblem(dtype, Addressing.SLOTS, tokens, kv_heads * head_dim // NVFP4.block, 2)


def _kv_heads(arguments: AttentionArguments) -> int:
    """The number of KV heads of a cache."""
    return int(arguments.key_cache.shape[1 if arguments.hnd else 2])


def _load(operation: Operation[Any, Any], problems: Iterable[Any], target: engine.Target) -> None:
    file = tactics.active(lambda: target.gpu)
    warmup.load(warmup.needed(operation, problems, target.arch, file), target, jobs=os.cpu_count() or 1)


def _powers(first: int, last: int) -> list[int]:
    """Powers of two from the least that is not below ``first`` to the least that is not below ``last``."""
    low, high = (1 << max(0, bound - 1).bit_length() for bound in (first, last))
    return [1 << exponent for exponent in range(low.bit_length() - 1, high.bit_length())]

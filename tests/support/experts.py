"""Layers of experts with weights of every kind, and results held against float64, step by step."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from jitfp4 import Fp4Experts, SfLayout, fp4_experts, prepare_fp4_experts
from jitfp4.families.experts.arguments import DownArguments, UpArguments
from jitfp4.families.experts.kernels.few_down import FewTactic
from jitfp4.families.experts.operation import down_matrix, up_matrix
from jitfp4.formats import MXFP4, NVFP4, BlockFormat
from jitfp4.operation import observed
from jitfp4.reference.experts import (
    activation,
    activation_bound,
    combine,
    experts_of,
    linear,
    linear_bound,
    rounded_rows,
)
from jitfp4.reference.gemm import error_bound
from jitfp4.reference.quantize import dequantize
from tests.support.compare import poisoned
from tests.support.gemm import LINEAR, check_graph_replay, swizzled

REAL = (
    (32, 4, 2880, 2880, MXFP4, "swigluoai"),
    (64, 8, 2048, 768, NVFP4, "swiglu"),
    (16, 8, 7168, 2048, NVFP4, "swiglu"),
)
"""Of gpt-oss, Qwen3 and DeepSeek-V3: experts, fewer than they have, slots, hidden, inter, format, activation."""
SWIGLU = {"swiglu": (1.0, 0.0, math.inf), "swigluoai": (1.702, 1.0, 7.0)}


class Raw(NamedTuple):
    """What a checkpoint has of a layer: codes, linear scales, global scales and biases."""

    w13: torch.Tensor
    w13_scales: torch.Tensor
    w2: torch.Tensor
    w2_scales: torch.Tensor
    w13_alpha: torch.Tensor | None
    w2_alpha: torch.Tensor | None
    w13_bias: torch.Tensor | None
    w2_bias: torch.Tensor | None
    format: BlockFormat

    def values(self) -> tuple[torch.Tensor, torch.Tensor]:
        """w13 [experts, n, hidden] and w2 [experts, hidden, inter] in float64, with their global scales."""
        found = []
        for codes, scales, alpha in (
            (self.w13, self.w13_scales, self.w13_alpha),
            (self.w2, self.w2_scales, self.w2_alpha),
        ):
            weight = dequantize(codes, scales, self.format, None, LINEAR).double()
            if alpha is not None:
                of_rows = alpha.double().view(len(alpha), -1)
                weight = weight * of_rows.repeat_interleave(weight.shape[1] // of_rows.shape[1], 1).unsqueeze(-1)
            found.append(weight)
        return found[0], found[1]


def make_raw(
    experts: int,
    hidden: int,
    inter: int,
    block_format: BlockFormat = NVFP4,
    *,
    gated: bool = True,
    biases: bool = True,
    seed: int = 0,
) -> Raw:
    """Random codes; scales over several binades, so that gates of all sizes come out."""
    generator = torch.Generator().manual_seed(seed)

    def integers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator).to(torch.uint8)

    rows, block = 2 * inter if gated else inter, block_format.block
    low, high = (16, 64) if block_format is NVFP4 else (112, 122)
    alpha = [torch.rand(experts, generator=generator) / math.sqrt(k) for k in (hidden, inter)]
    return Raw(
        integers(0, 256, experts, rows, hidden // 2),
        integers(low, high, experts, rows, hidden // block),
        integers(0, 256, experts, hidden, inter // 2),
        integers(low, high, experts, hidden, inter // block),
        *(alpha if block_format is NVFP4 else (None, None)),
        torch.randn(experts, rows, generator=generator) if biases else None,
        torch.randn(experts, hidden, generator=generator) if biases else None,
        block_format,
    )


def prepared(raw: Raw, order: str | None, device: str = "cpu", layout: SfLayout = LINEAR) -> Fp4Experts:
    given = {name: value.to(device) for name, value in raw._asdict().items() if isinstance(value, torch.Tensor)}
    if layout is not LINEAR:
        for name in ("w13_scales", "w2_scales"):
            given[name] = torch.stack([swizzled(one, layout) for one in given[name]])
    return prepare_fp4_experts(
        order=order,
        sf_layout=layout,
        block_size=raw.format.block,
        **given,
    )


def make_layer(
    experts: int, hidden: int, inter: int, block_format: BlockFormat = NVFP4, device: str = "cpu", **flags: bool
) -> Fp4Experts:
    raw = make_raw(experts, hidden, inter, block_format, **flags)
    return prepared(raw, "concatenated gate,up" if flags.get("gated", True) else None, device)


def make_routing(
    tokens: int, slots: int, experts: int, *, skipped: bool = False, seed: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """ids int32 of different experts, and weights; with ``skipped`` some ids are -1."""
    generator = torch.Generator().manual_seed(seed)
    low = 1 if skipped else 0
    ids = [torch.randperm(experts + low, generator=generator)[:slots] - low for _ in range(tokens)]
    weights = torch.rand(tokens, slots, generator=generator)
    return torch.stack(ids).int() if ids else torch.empty(0, slots, dtype=torch.int32), weights


def make_x(tokens: int, hidden: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(2)).to(dtype)


def assert_layer(
    layer: Fp4Experts,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor | None,
    **options: Any,
) -> torch.Tensor:
    """A layer in a poisoned output; each step of a launched one is within its bound. Returns the output.

    Odd numbers of tokens have a residual.
    """
    seen: list[Any] = []
    options = {"residual": x.flip(1) if len(x) % 2 else None} | options
    out = poisoned((len(x), layer.hidden), x.dtype, x.device)
    with observed(seen.append):
        assert fp4_experts(x, layer, ids, weights, out=out, **options) is out
    for call in seen:
        step = call.arguments
        if isinstance(step, UpArguments):
            _assert_up(step)
        elif isinstance(step, DownArguments):
            _assert_down(step, isinstance(call.operation.select(call.problem, call.target.arch), FewTactic))
    return out


def _rows_of_h(step: UpArguments | DownArguments, local: torch.Tensor) -> torch.Tensor:
    """For each assignment its row of h; any where it is skipped."""
    rows = torch.arange(local.numel(), device=local.device)
    if step.order is not None:
        count = int((local >= 0).sum())
        order = step.order[:count].long()
        assert torch.equal(order.sort().values, (local.flatten() >= 0).nonzero().flatten())
        rows[order] = torch.arange(count, device=local.device)
    return rows


def _assert_up(step: UpArguments) -> None:
    local = experts_of(step.ids, step.expert_map, len(step.w13)).flatten()
    rows = _rows_of_h(step, local)
    x = step.x.repeat_interleave(step.ids.shape[1], 0)
    if step.input_weights is not None:
        x = (x.float() * step.input_weights.flatten().unsqueeze(-1)).to(x.dtype)
    if step.fp8:
        x = rounded_rows(x)
    constants = step.swiglu_alpha, step.swiglu_beta, step.swiglu_limit
    for expert in local[local >= 0].unique().tolist():
        found = (local == expert).nonzero().flatten()
        matrix = up_matrix(step, expert)
        sums, bound = linear(x[found], *matrix), linear_bound(x[found], *matrix, fp8=step.fp8)
        if step.gated:
            (gate, up), (of_gate, of_up) = sums.chunk(2, -1), bound.chunk(2, -1)
            want = activation(gate, up, *constants)
            bound = activation_bound(gate, up, (of_gate, of_up), *constants, step.h.dtype)
        else:
            want = sums.clamp(min=0).square()
            absolute = bound * (2 * sums.abs() + bound) + want * 2.0**-23
            units = torch.finfo(step.h.dtype)
            bound = absolute + (want + absolute) * units.eps / 2 + units.smallest_normal * units.eps
        _assert_within(step.h[rows[found]].double() - want, bound)
        if step.fp8:
            _assert_near(step.h[rows[found]], want)


def _assert_down(step: DownArguments, in_one: bool) -> None:
    """With ``in_one`` the results of slots are not in memory."""
    tokens, slots = step.ids.shape
    local = experts_of(step.ids, step.expert_map, len(step.w2))
    rows, flat = _rows_of_h(step, local), local.flatten()
    y, errors = (torch.zeros(step.y.shape, dtype=torch.float64, device=step.y.device) for _ in range(2))
    for expert in flat[flat >= 0].unique().tolist():
        found = (flat == expert).nonzero().flatten()
        weight, scale, bias = down_matrix(step, expert)
        h = rounded_rows(step.h[rows[found]]) if step.fp8 else step.h[rows[found]]
        y[found] = linear(h, weight, scale, bias)
        scaled = weight.double() * scale.double().unsqueeze(-1)
        errors[found] = error_bound(h, scaled, None, bias, step.y.dtype, fp8=step.fp8)
        if not in_one:
            _assert_within(step.y[found].double() - y[found], errors[found])
        if step.fp8:
            _assert_near(step.y[found], y[found])
    if not in_one:
        y, errors = step.y.double(), torch.zeros_like(errors)
    of_weights = None if step.weights is None else step.weights.abs()
    want = combine(y.view(tokens, slots, -1), step.weights, local)
    magnitude = combine((y.abs() + errors).view(tokens, slots, -1), of_weights, local)
    if step.residual is not None:
        want, magnitude = want + step.residual.double(), magnitude + step.residual.double().abs()
    absolute = magnitude * slots * 2.0**-23 + combine(errors.view(tokens, slots, -1), of_weights, local)
    units = torch.finfo(step.out.dtype)
    bound = absolute + (want.abs() + absolute) * units.eps / 2 + units.smallest_normal * units.eps
    _assert_within(step.out.double() - want, bound)


def _assert_within(error: torch.Tensor, bound: torch.Tensor) -> None:
    worst = (error.abs() / bound).max().item()
    assert worst <= 1, f"{worst:.2f} times what is allowed"


def _assert_near(rows: torch.Tensor, want: torch.Tensor) -> None:
    """Of rows of sums of E4M3, whose elements may be off by much of themselves, the norms are off by little."""
    error = (rows.double() - want).norm(dim=-1) / want.norm(dim=-1).clamp_min(1e-30)
    assert error.max() < 0.02, f"a row is off by {error.max().item():.3f}"


def dense(
    raw: Raw, order: str | None, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, name: str
) -> torch.Tensor:
    """The layer in float64 without a rounding in between, expert by expert: another way to the same numbers."""
    w13, w2 = raw.values()
    out = torch.zeros(len(x), w2.shape[1], dtype=torch.float64)
    for token, slots in enumerate(ids.tolist()):
        for slot, expert in enumerate(slots):
            if not 0 <= expert < len(w13):
                continue
            sums = w13[expert] @ x[token].double()
            if raw.w13_bias is not None:
                sums = sums + raw.w13_bias[expert]
            if order is None:
                h = sums.clamp(min=0).square()
            else:
                first, second = (sums[0::2], sums[1::2]) if order == "interleaved" else sums.chunk(2)
                gate, up = (second, first) if order == "concatenated up,gate" else (first, second)
                h = activation(gate, up, *SWIGLU[name])
            y = w2[expert] @ h
            if raw.w2_bias is not None:
                y = y + raw.w2_bias[expert]
            out[token] += weights[token, slot] * y
    return out


def check_chain(tokens: int) -> None:
    """On the GPU: layers that each read the one before, by dependent launch, replayed: equal to calls one by one."""
    layer = make_layer(16, 1024, 512, device="cuda", biases=False)
    x, (ids, weights) = make_x(tokens, 1024).cuda(), (one.cuda() for one in make_routing(tokens, 4, 16))

    def chain() -> torch.Tensor:
        y = x
        for number in range(8):
            y = fp4_experts(y, layer, (ids + number) % 16, weights).clamp(-2, 2)
        return y

    check_graph_replay(chain)

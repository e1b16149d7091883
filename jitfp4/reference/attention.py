"""Attention over a paged cache, in float64.

A cache side (K or V) is seen as [pages, page tokens, heads, ...], a strided view of whatever layout the caller has.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch

from jitfp4.formats import E4M3_MAX, NVFP4
from jitfp4.reference.formats import decode_e2m1, decode_e4m3, unpack_e2m1

_GROUP = 4  # tokens whose V scales are interleaved


@dataclass(frozen=True, slots=True)
class Side:
    """K or V: ``data`` [P, page, H, D], or packed E2M1 [P, page, H, D/2] with ``scales`` [P, page, H, D/16]."""

    data: torch.Tensor
    scales: torch.Tensor | None = None
    interleaved: bool = False

    def page_values(self, pages: torch.Tensor) -> torch.Tensor:
        """The pages ``pages`` [n] as float64 [n, page, H, D]."""
        data = self.data[pages]
        if self.scales is None:
            return data.float().double()  # float8 has no direct way
        scales = self.scales.view(torch.uint8)[pages]
        if self.interleaved:
            scales = linear_scales(scales)
        values = decode_e2m1(unpack_e2m1(data)).double()
        return values * decode_e4m3(scales).double().repeat_interleave(NVFP4.block, dim=-1)


def linear_scales(scales: torch.Tensor) -> torch.Tensor:
    """Scales [n, page, H, S], interleaved over groups of four tokens, in the order of their tokens.

    For each head, a group's 4 * S bytes are S runs of four, one byte for each token.
    """
    n, page, heads, cols = scales.shape
    groups = scales.reshape(n, page // _GROUP, _GROUP, heads, cols).transpose(2, 3)
    runs = groups.reshape(n, page // _GROUP, heads, cols, _GROUP)
    return runs.permute(0, 1, 4, 2, 3).reshape(n, page, heads, cols)


@dataclass(frozen=True, slots=True)
class Mask:
    """Which tokens a query sees, as bits of ``data`` (uint8), the lowest of a byte first. Bits behind its end are 0.

    With ``ends`` [batch + 1], request b has a row of bits for each query and a bit for each token, from byte ends[b]
    on. Without it, each query has a row of ``row_bytes`` bytes, with a bit for each of its request's new tokens.
    """

    data: torch.Tensor
    ends: torch.Tensor | None
    row_bytes: int

    def seen(self, b: int, begin: int, count: int, length: int, positions: torch.Tensor) -> torch.Tensor:
        """Whether queries ``begin`` to ``begin + count - 1`` see ``positions`` [n] of request b: bool [count, n]."""
        rows = torch.arange(count, device=positions.device).unsqueeze(1)
        if self.ends is None:
            at = positions - (length - count)
            bits = (begin + rows) * 8 * self.row_bytes + at.clamp(min=0)
        else:
            at = positions
            bits = 8 * int(self.ends[b]) + rows * length + at
        inside = (bits >= 0) & (bits < 8 * len(self.data))
        bytes_ = torch.cat((self.data, self.data.new_zeros(1)))[torch.where(inside, bits // 8, -1)]
        return (bytes_ >> (bits % 8) & 1 != 0) | (at < 0)


def paged_attention(
    q: torch.Tensor,
    k: Side,
    v: Side,
    tables: torch.Tensor,
    seq_lens: torch.Tensor,
    q_ends: torch.Tensor,
    *,
    bmm1_scale: float | torch.Tensor,
    bmm2_scale: float | torch.Tensor,
    soft_cap: float = 0.0,
    causal: bool = True,
    window_left: int = -1,
    sinks: torch.Tensor | None = None,
    mask: Mask | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(bmm1_scale * q k) v * bmm2_scale for each request, causal to the end.

    Args:
        q: [tokens, heads, D]; request b owns rows q_ends[b] to q_ends[b + 1].
        tables: [batch, 2, columns], the pages of K and those of V. A page that does not exist holds no tokens.
        q_ends: [batch + 1]; the rows of a request end where q does, and are none where its end is not behind its
            beginning.
        soft_cap: if positive, a logit x becomes soft_cap * tanh(x / soft_cap), but for those of sinks.
        sinks: [heads], a logit that takes part in the softmax and has no value.
        mask: which tokens a query sees besides, within the window.
    Returns:
        out [tokens, heads, D] and the base-2 logarithm of the softmax's denominator [tokens, heads], both float64.
        A row that sees nothing gives 0 and -inf. One that sees a NaN, or a product of +inf, gives NaN; in V alone, NaN
        in that dimension.
    """
    tokens, heads, _ = q.shape
    capacity = k.data.shape[1] * tables.shape[-1]
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    lse = torch.full((tokens, heads), -math.inf, dtype=torch.float64, device=q.device)
    for b in range(len(seq_lens)):
        begin = min(max(0, int(q_ends[b])), tokens)
        count, length = max(0, min(int(q_ends[b + 1]), tokens) - begin), max(0, min(int(seq_lens[b]), capacity))
        rows = slice(begin, begin + count)
        keys, values, positions = _gather(k, v, tables[b], length)
        queries = q[rows].to(torch.float32).double()
        group = heads // keys.shape[1]
        logits = bmm1_scale * torch.einsum("qhd,khd->hqk", queries, keys.repeat_interleave(group, 1))
        at = length - count + torch.arange(count, device=q.device).unsqueeze(1)
        if soft_cap > 0:
            logits = soft_cap * torch.tanh(logits / soft_cap)
        seen = positions <= at if causal else torch.ones_like(positions <= at)
        if mask is not None:
            seen &= mask.seen(b, begin, count, length, positions)
        if window_left >= 0:
            seen &= positions >= at - window_left
        logits = logits.masked_fill(~seen, -math.inf)
        if sinks is not None:
            logits = torch.cat((logits, sinks.double().view(-1, 1, 1).expand(-1, count, 1)), -1)
        total = torch.logsumexp(logits, -1)
        total[total == math.inf] = math.nan
        weights = torch.exp(logits - total.unsqueeze(-1))[..., : len(positions)]
        weights = torch.where(seen & (total != -math.inf).unsqueeze(-1), weights, 0.0)
        out[rows] = bmm2_scale * _weighted(weights, values.repeat_interleave(group, 1), seen)
        lse[rows] = total.T / math.log(2)
    return out, lse


def _weighted(weights: torch.Tensor, values: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """Sums [q, heads, D] of values [k, heads, D] with weights [heads, q, k], without those that are not seen."""
    finite = values.isfinite()
    sums = torch.einsum("hqk,khd->qhd", weights, torch.where(finite, values, 0.0))
    for token in (~finite).flatten(1).any(1).nonzero().flatten().tolist():
        product = weights[:, :, token].T.unsqueeze(-1) * torch.where(finite[token], 0.0, values[token])
        sums += torch.where(seen[:, token].view(-1, 1, 1), product, 0.0)
    return sums


def _gather(k: Side, v: Side, table: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """K and V [n, heads, D] of the tokens that are there, and their positions [n]."""
    pages, page = k.data.shape[:2]
    positions = torch.arange(length, device=k.data.device)
    ids = table.long()[:, positions // page]
    there = ((ids >= 0) & (ids < pages)).all(0)
    positions, ids = positions[there], ids[:, there]
    sides = []
    for side, of in ((k, ids[0]), (v, ids[1])):
        used, place = torch.unique(of, return_inverse=True)
        sides.append(side.page_values(used)[place, positions % page])
    return sides[0], sides[1], positions


def pad_lists(pages: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Lists of page numbers, pages[ends[b] : ends[b + 1]], as rows of one table, padded with -1."""
    lists = [pages[int(first) : int(last)] for first, last in itertools.pairwise(ends)]
    return torch.nn.utils.rnn.pad_sequence(lists, batch_first=True, padding_value=-1)


def rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """float64 to ``dtype``, by way of float32 and, to E4M3, saturating."""
    x = x.float()
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(dtype) if dtype == torch.float8_e4m3fn else x.to(dtype)

"""Paged NVFP4 caches for tests: poisoned where nothing may be read, and attention written out plainly."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch

import jitfp4
from jitfp4 import counters
from jitfp4.arch import Arch

SCATTERED: dict[str, Any] = {
    "lengths": (140,),
    "q_lens": (75,),
    "kv_heads": 1,
    "group": 2,
    "page": 1,
    "window_left": 50,
    "shared": False,
    "missing": tuple((0, at % 2, at, -1) for at in range(140) if at * at % 7 in (1, 4)),
    "steep": 8.0,
    "spikes": True,
}
"""Every place in a tile has tokens that are missing, and tokens that some rows see and others do not."""
FEW_SMS = dataclasses.replace(Arch.of("sm_90a"), num_sms=16)
"""Of all SMs of a GPU most have nothing to do in these cases, which costs the simulator as much as work."""
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
NAN_BYTE = 0x7F


@contextmanager
def counted() -> Iterator[list[torch.Tensor]]:
    """The counters that launches inside the block get. They have to be zero at its end."""
    found: list[torch.Tensor] = []
    of = counters.of
    with mock.patch.object(counters, "of", lambda workspace: found.append(of(workspace)) or found[-1]):
        yield found
    assert not any(each.any() for each in found), "the next launch counts from zero"


@dataclass
class Case:
    """A batch over a cache of random codes or floats. Where no token of a request lies, scales or floats are NaN."""

    cache: torch.dtype = torch.uint8
    lengths: tuple[int, ...] = (70, 33)
    q_lens: tuple[int, ...] | int = 1
    kv_heads: int = 2
    group: int = 8
    head_dim: int = 128
    page: int = 16
    kv_layout: str = "HND"
    v_scale_layout: str = "linear"
    shared: bool = True
    window_left: int = -1
    causal: bool = True
    masks: tuple[torch.Tensor, ...] = ()  # of each request, bool [queries, tokens]; then causal says nothing
    with_sinks: bool = False
    q_dtype: torch.dtype = torch.bfloat16
    out_dtype: torch.dtype | None = None
    missing: tuple[tuple[int, int, int, int], ...] = ()  # request, 0 for K or 1 for V, column, page number instead
    extra_page_bytes: int = 0  # between the pages
    device: str = "cpu"
    steep: float = 1.0  # how much further apart logits are: the greatest then rises along a request
    spikes: bool = False  # one element of each query is 2^13 times as large as the others
    seed: int = 0
    options: dict[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        batch, d = len(self.lengths), self.head_dim
        columns = max(1, -(-max(self.lengths) // self.page)) + 1
        self.pages = 2 * batch * columns + 1
        numbers = torch.randperm(self.pages)[: 2 * batch * columns].view(batch, 2, columns).to(torch.int32)
        if self.shared:
            numbers[:, 1] = numbers[:, 0]
        shape = (self.pages, self.page, self.kv_heads)
        if self.cache == torch.uint8:
            data = [torch.randint(0, 256, (*shape, d // 2)).to(torch.uint8) for _ in "kv"]
            scales = [torch.randint(36, 60, (*shape, d // 16)).to(torch.uint8) for _ in "kv"]
        else:
            data, scales = [torch.randn(*shape, d).to(self.cache).view(torch.uint8) for _ in "kv"], []
        for side in (0, 1):
            used = torch.zeros(self.pages, self.page, dtype=torch.bool)
            for b, length in enumerate(self.lengths):
                for token in range(length):
                    used[numbers[b, side, token // self.page], token % self.page] = True
            (scales or data)[side][~used] = NAN_BYTE if self.cache != torch.bfloat16 else 0xFF
        self.linear = [data, [scale.clone() for scale in scales]]
        for b, side, column, number in self.missing:
            numbers[b, side, column] = number
        if scales and self.v_scale_layout == "interleaved4":
            scales[1] = interleave(scales[1])
        self.numbers = numbers
        laid = [self._lay(tensor) for tensor in (*data, *scales)]
        self.kv_cache = (laid[0].view(self.cache), laid[1].view(self.cache))
        self.kv_cache_sf = (laid[2], laid[3]) if scales else None
        tables = numbers[:, 0] if self.shared else numbers
        self.block_tables = tables.contiguous().to(self.device)
        self.seq_lens = torch.tensor(self.lengths, dtype=torch.int32, device=self.device)
        counts = (self.q_lens,) * batch if isinstance(self.q_lens, int) else self.q_lens
        self.ends = [0]
        for count in counts:
            self.ends.append(self.ends[-1] + count)
        self.cum_seq_lens_q = torch.tensor(self.ends, dtype=torch.int32, device=self.device)
        query = torch.randn(self.ends[-1], self.kv_heads * self.group, d)
        if self.spikes:
            query *= 2.0**-13
            row, head = torch.meshgrid(*map(torch.arange, query.shape[:2]), indexing="ij")
            query[row, head, (29 * row + 37 * head) % d] = torch.where((row // 2 + head) % 2 == 0, 1.5, -1.5)
        self.query = query.to(self.q_dtype).to(self.device)
        self.sinks = torch.randn(self.kv_heads * self.group).to(self.device) if self.with_sinks else None
        self.workspace = torch.zeros(32 << 20, dtype=torch.uint8, device=self.device)
        self.bmm1, self.bmm2 = self.steep * d**-0.5, 0.6

    def _lay(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.transpose(1, 2).contiguous() if self.kv_layout == "HND" else tensor
        size = tensor[0].numel() + self.extra_page_bytes
        memory = torch.full((self.pages, size), NAN_BYTE, dtype=torch.uint8)
        view = memory[:, : tensor[0].numel()].unflatten(1, tensor.shape[1:])
        view.copy_(tensor)
        return memory.to(self.device)[:, : tensor[0].numel()].unflatten(1, tensor.shape[1:])

    def run(self, **changes: object) -> tuple[torch.Tensor, torch.Tensor]:
        """What trtllm_batch_decode_with_kv_cache() gives."""
        return jitfp4.trtllm_batch_decode_with_kv_cache(**(self.decode_arguments() | changes))

    def run_context(self, **changes: object) -> tuple[torch.Tensor, torch.Tensor]:
        """What trtllm_batch_context_with_kv_cache() gives."""
        return jitfp4.trtllm_batch_context_with_kv_cache(**(self.context_arguments() | changes))

    def decode_arguments(self) -> dict[str, object]:
        """Those of trtllm_batch_decode_with_kv_cache()."""
        ragged = not isinstance(self.q_lens, int)
        arguments: dict[str, object] = {
            "query": self.query,
            "kv_cache": self.kv_cache,
            "workspace_buffer": self.workspace,
            "block_tables": self.block_tables,
            "seq_lens": self.seq_lens,
            "max_seq_len": max(self.lengths),
            "bmm1_scale": self.bmm1,
            "bmm2_scale": self.bmm2,
            "window_left": self.window_left,
            "out_dtype": self.out_dtype,
            "sinks": self.sinks,
            "kv_layout": self.kv_layout,
            "q_len_per_req": 1 if ragged else self.q_lens,
            "kv_cache_sf": self.kv_cache_sf,
            "uses_shared_paged_kv_idx": self.shared,
            "return_lse": True,
            "v_scale_layout": self.v_scale_layout,
        }
        if ragged:
            arguments |= {"max_q_len": max(1, *self.q_lens), "cum_seq_lens_q": self.cum_seq_lens_q}
        return arguments | self.options

    def context_arguments(self) -> dict[str, object]:
        """Those of trtllm_batch_context_with_kv_cache()."""
        batch = len(self.lengths)
        arguments: dict[str, object] = {
            "query": self.query,
            "kv_cache": self.kv_cache,
            "workspace_buffer": self.workspace,
            "block_tables": self.block_tables,
            "seq_lens": self.seq_lens,
            "max_q_len": max(1, *(end - begin for begin, end in itertools.pairwise(self.ends))),
            "max_kv_len": max(self.lengths),
            "bmm1_scale": self.bmm1,
            "bmm2_scale": self.bmm2,
            "batch_size": batch,
            "cum_seq_lens_q": self.cum_seq_lens_q,
            "cum_seq_lens_kv": torch.zeros(batch + 1, dtype=torch.int32, device=self.device),
            "window_left": self.window_left,
            "out_dtype": self.out_dtype,
            "sinks": self.sinks,
            "kv_layout": self.kv_layout,
            "kv_cache_sf": self.kv_cache_sf,
            "uses_shared_paged_kv_idx": self.shared,
            "causal": self.causal,
            "return_lse": True,
            "v_scale_layout": self.v_scale_layout,
        }
        return arguments | self.options

    def expected(self, cap: float | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention in float64, request by request: out and base-2 logarithms. ``cap``: that of the logits."""
        out = torch.zeros(self.query.shape, dtype=torch.float64)
        lse = torch.full(self.query.shape[:2], -torch.inf, dtype=torch.float64)
        query = self.query.cpu().float().double().unflatten(1, (self.kv_heads, self.group))
        for b, length in enumerate(self.lengths):
            keys, values, at = self._tokens(b, length)
            rows, count = slice(self.ends[b], self.ends[b + 1]), self.ends[b + 1] - self.ends[b]
            last = (length - count + torch.arange(count)).unsqueeze(1)
            seen = self.masks[b][:, at] if self.masks else (at <= last) | (not self.causal)
            if self.window_left >= 0:
                seen = seen & (at >= last - self.window_left)
            logits = self.bmm1 * torch.einsum("rhgd,thd->rhgt", query[rows], keys)
            if cap is not None:
                logits = cap * torch.tanh(logits / cap)
            logits = logits.flatten(1, 2).masked_fill(~seen.unsqueeze(1), -torch.inf)
            if self.sinks is not None:
                sinks = self.sinks.cpu().double().view(1, -1, 1).expand(count, -1, 1)
                logits = torch.cat((logits, sinks), -1)
            of_rows = torch.logsumexp(logits, -1, keepdim=True)
            weights = torch.where(of_rows > -torch.inf, torch.exp(logits - of_rows), 0)[..., : len(at)]
            lse[rows] = of_rows.squeeze(-1) / math.log(2)
            weights = weights.unflatten(1, (self.kv_heads, self.group))
            out[rows] = self.bmm2 * torch.einsum("rhgt,thd->rhgd", weights, values).flatten(1, 2)
        return out, lse

    def _tokens(self, b: int, length: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """K and V of the tokens that are there [tokens, heads, dim], and their places in the request."""
        at = torch.arange(length)
        pages = self.numbers[b][:, at // self.page].long()
        there = ((pages >= 0) & (pages < self.pages)).all(0)
        at, pages = at[there], pages[:, there]
        sides = []
        for side in (0, 1):
            data = self.linear[0][side][pages[side], at % self.page]
            if self.cache == torch.uint8:
                sides.append(dequantize(data, self.linear[1][side][pages[side], at % self.page]))
            else:
                sides.append(data.view(self.cache).float().double())
        return sides[0], sides[1], at

    def check(self, got: tuple[torch.Tensor, torch.Tensor], bounds: dict[torch.dtype, float]) -> None:
        """Outputs within ``bounds`` of what is expected, logarithms as exact as float32; nothing seen gives nothing.

        A row may be off by more than all together: sums that nearly cancel are small.
        """
        out, lse = got
        expected, expected_lse = self.expected()
        assert relative_error(out, expected) < bounds[out.dtype]
        errors = (out.cpu().float().double() - expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-30)
        assert errors.max() < 2 * bounds[out.dtype], f"a row is off by {errors.max()}"
        seen = expected_lse.isfinite()
        assert torch.equal(lse.cpu().isfinite(), seen)
        assert torch.all(lse.cpu()[~seen] == -torch.inf)
        assert torch.all(out.cpu().float()[(expected == 0).all(-1)] == 0)
        if seen.any():
            assert (lse.cpu().double() - expected_lse)[seen].abs().max() < 1e-4


def dequantize(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    values = torch.stack((E2M1[(codes & 15).long()], E2M1[(codes >> 4).long()]), -1).flatten(-2)
    return values * scales.view(torch.float8_e4m3fn).double().repeat_interleave(16, -1)


def interleave(scales: torch.Tensor) -> torch.Tensor:
    """V's scales [pages, page, heads, cols] as out[4 g + a][4 b + t] = in[4 g + t][a cols / 4 + b] for each head."""
    pages, page, heads, cols = scales.shape
    groups = scales.view(pages, page // 4, 4, heads, cols)
    flat = groups.permute(0, 1, 3, 4, 2).reshape(pages, page // 4, heads, 4, cols)
    return flat.transpose(2, 3).reshape(pages, page, heads, cols).contiguous()


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    difference = got.cpu().float().double() - expected
    return float(difference.norm() / expected.norm().clamp(min=1e-30))

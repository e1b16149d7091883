"""What FlashInfer's tests are compared with, attention of one request in float32, and how their ends are named."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from tests.engines.acceptance import DIFFERENT, _kind, _single_decode, _single_prefill

QUERIES, KEYS, HEADS, KV_HEADS, DIM = 7, 9, 4, 2, 16


def _random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _torch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, scale: float) -> torch.Tensor:
    keys, values = (x.repeat_interleave(HEADS // KV_HEADS, 1).transpose(0, 1) for x in (k, v))
    return scaled_dot_product_attention(q.transpose(0, 1), keys, values, seen, scale=scale).transpose(0, 1)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window_left", [-1, 0, 3])
def test_prefill(causal: bool, window_left: int) -> None:
    q, k, v = _random(0, QUERIES, HEADS, DIM), _random(1, KEYS, KV_HEADS, DIM), _random(2, KEYS, KV_HEADS, DIM)
    seen = torch.ones(QUERIES, KEYS, dtype=torch.bool)
    if causal:
        seen = seen.tril(KEYS - QUERIES)
    if window_left >= 0:
        seen = seen.triu(KEYS - QUERIES - window_left)
    out, lse = _single_prefill(q, k, v, causal=causal, window_left=window_left, sm_scale=0.3, return_lse=True)
    torch.testing.assert_close(out, _torch(q, k, v, seen, 0.3))
    logits = 0.3 * torch.einsum("qhd,khd->qhk", q, k.repeat_interleave(HEADS // KV_HEADS, 1))
    base_2 = logits.masked_fill(~seen[:, None], -torch.inf).logsumexp(-1) / torch.log(torch.tensor(2.0))
    torch.testing.assert_close(lse, base_2)
    by_head = _single_prefill(
        q, k.transpose(0, 1), v.transpose(0, 1), kv_layout="HND", causal=causal, window_left=window_left, sm_scale=0.3
    )
    torch.testing.assert_close(by_head, out)


def test_decode_and_scales() -> None:
    q, k, v = _random(3, HEADS, DIM), _random(4, KEYS, KV_HEADS, DIM), _random(5, KEYS, KV_HEADS, DIM)
    seen = torch.ones(1, KEYS, dtype=torch.bool)
    expected = 3 * _torch(q[None], k, v, seen, DIM**-0.5 * 2 * 0.5)[0]
    torch.testing.assert_close(_single_decode(q, k, v, q_scale=2.0, k_scale=0.5, v_scale=3.0), expected)


def test_what_differs_on_purpose_is_known_by_its_words() -> None:
    for name, words in DIFFERENT.items():
        assert _kind(name, AssertionError(f"... {words}; ...")) == "different"
        assert _kind(name, AssertionError("Tensor-likes are not close!")) == "failed"
        assert _kind("test_of_another_name", AssertionError(words)) == "failed"
        assert _kind(name, RuntimeError(words)) == "failed"

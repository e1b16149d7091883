"""The gated delta rule for whole prompts: the definition, token by token, and the products of a chunk."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from jitfp4.reference.gdn import NORM_EPS, delta_rule

_CHUNK = 64
_BLOCK = 16
_VEC = 4

Gates = tuple[torch.Tensor | None, torch.Tensor | None]


def sequences(cu_seqlens: torch.Tensor, tokens: int) -> Iterator[tuple[int, int]]:
    """The first token of each sequence and the one behind its last, within ``tokens`` whatever the list holds."""
    bounds = cu_seqlens.clamp(0, tokens).tolist()
    yield from ((first, max(first, end)) for first, end in itertools.pairwise(bounds))


def prefill(
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    gates: Gates,
    scale: float,
    initial: torch.Tensor | None,
    final: torch.Tensor | None,
    cu_seqlens: torch.Tensor,
    slots: torch.Tensor | None,
    checkpoints: tuple[torch.Tensor | None, torch.Tensor | None, int],
    out: torch.Tensor,
    *,
    use_qk_l2norm: bool,
) -> None:
    """Fill ``out``, ``final`` and the checkpoints: every token by the recurrence, in float32."""
    tokens, heads, value_dim = out.shape
    q, k, v = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in qkv)
    decay, beta = (torch.ones(tokens, heads) if gate is None else gate for gate in gates)
    stored, starts, every = checkpoints
    pool = next((len(state) for state in (initial, final) if state is not None), None)
    for n, (first, end) in enumerate(sequences(cu_seqlens, tokens)):
        slot = n if slots is None else int(slots[n])
        if slot < 0 or (pool is not None and slot >= pool):
            out[first:end] = 0
            continue
        h = torch.zeros(1, heads, value_dim, q.shape[2]) if initial is None else initial[slot : slot + 1].float()
        one = slice(first, end)
        args = [x[one].unsqueeze(0) for x in (q, k, v, decay, beta)]
        walk = delta_rule(args[0], args[1], args[2], args[3], args[4], h, scale, use_qk_l2norm=use_qk_l2norm, vec=_VEC)
        for t, (out_t, after) in enumerate(walk, 1):
            h = after
            out[first + t - 1] = out_t[0].to(out.dtype)
            if stored is not None and starts is not None and every and t % every == 0:
                at = int(starts[n]) + t // every - 1
                if 0 <= at < len(stored):
                    stored[at] = h[0].to(stored.dtype)
        if final is not None:
            final[slot] = h[0].to(final.dtype)


def products(
    q: torch.Tensor, k: torch.Tensor, gates: Gates, first: int, end: int, scale: float, heads: int, use_qk_l2norm: bool
) -> Iterator[torch.Tensor]:
    """For each chunk of a sequence, [heads, bytes]: ChunkProducts of templates/gdn/prefill_chunk.cuh.j2."""
    for start in range(first, end, _CHUNK):
        one = slice(start, min(end, start + _CHUNK))
        decay, beta = (torch.ones(one.stop - start, heads) if gate is None else gate[one] for gate in gates)
        decay, beta = _padded(decay, 1.0).T, _padded(beta, 0.0).T
        keys, queries = (_padded(x[one], 0.0).repeat_interleave(heads // x.shape[1], 1) for x in (k, q))
        keys, queries = keys.transpose(0, 1), queries.transpose(0, 1)
        norms = [_norms(x) if use_qk_l2norm else torch.ones(x.shape[:2]) for x in (keys, queries)]
        yield _pack(keys, queries, norms[0].double(), norms[1].double(), decay, beta, scale, q.dtype)


def part(
    k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, use_qk_l2norm: bool
) -> torch.Tensor:
    """[heads, V + K, K] float32: the state after tokens from none before them, and their map of a state before."""
    heads, value_dim, head_dim = decay.shape[1], v.shape[2], k.shape[2]
    k, v = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (k, v))
    values = torch.cat([v, torch.zeros(*v.shape[:2], head_dim, dtype=v.dtype)], -1)
    h = torch.cat([torch.zeros(value_dim, head_dim), torch.eye(head_dim)]).expand(1, heads, -1, -1)
    args = [x.unsqueeze(0) for x in (k, k, values, decay, beta)]
    walk = delta_rule(args[0], args[1], args[2], args[3], args[4], h, 1.0, use_qk_l2norm=use_qk_l2norm, vec=_VEC)
    for _, after in walk:
        h = after
    return h[0]


def _padded(x: torch.Tensor, fill: float) -> torch.Tensor:
    """The tokens of a chunk in float64, and behind them ``fill``."""
    whole = torch.full((_CHUNK, *x.shape[1:]), fill, dtype=torch.float64)
    whole[: len(x)] = x
    return whole


def _norms(x: torch.Tensor) -> torch.Tensor:
    """1 / the length of each row, as normalize() has it."""
    return (x.square().sum(-1) + NORM_EPS).rsqrt()


def _pack(
    keys: torch.Tensor,
    queries: torch.Tensor,
    key_norm: torch.Tensor,
    query_norm: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    scale: float,
    dtype: torch.dtype,
) -> torch.Tensor:
    heads = len(keys)
    later, earlier = torch.arange(_CHUNK).unsqueeze(1), torch.arange(_CHUNK)
    spans = torch.zeros(heads, _CHUNK, _CHUNK, dtype=torch.float64)
    for t in range(_CHUNK):
        if t:
            spans[:, t] = spans[:, t - 1] * decay[:, t : t + 1]
        spans[:, t, t] = 1.0
    since_first = spans[:, :, 0] * decay[:, :1]
    keys_k, keys_q = keys @ keys.mT, queries @ keys.mT
    lower = keys_k * (beta * key_norm).unsqueeze(-1) * key_norm.unsqueeze(-2) * spans
    lower = torch.where(earlier < later, lower, 0.0) + torch.eye(_CHUNK)
    inverse = torch.linalg.solve_triangular(lower, torch.eye(_CHUNK, dtype=torch.float64), upper=False)
    solve = inverse * beta.unsqueeze(-2)
    attend = keys_q * (scale * query_norm).unsqueeze(-1) * key_norm.unsqueeze(-2) * spans
    attend = torch.where(earlier <= later, attend, 0.0)
    parts = (
        _lower(solve, dtype),
        _lower(attend, dtype),
        (since_first * key_norm).float(),
        (spans[:, -1] * key_norm).float(),
        (since_first * query_norm * scale).float(),
        torch.nn.functional.pad(since_first[:, -1:], (0, 3)).float(),
    )
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts], -1)


def _lower(matrix: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The lower blocks of each head's matrix, where four rows of eight have their halves exchanged."""
    tiles = matrix.to(dtype).unflatten(2, (-1, _BLOCK)).unflatten(1, (-1, _BLOCK)).transpose(2, 3)
    tiles = torch.stack([tiles[:, i, j] for i in range(_CHUNK // _BLOCK) for j in range(i + 1)], 1).clone()
    for row in range(_BLOCK):
        if row // 4 % 2:
            tiles[:, :, row] = tiles[:, :, row].roll(_BLOCK // 2, -1)
    return tiles.flatten(1)

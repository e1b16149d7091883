"""What the operator takes."""

from __future__ import annotations

from typing import NamedTuple

import torch

from jitfp4.operation import Written


class Arguments(NamedTuple):
    """All layers of a dense model for one token.

    ``x`` and ``out``: bf16 [1, hidden]. ``weights``: uint8 [layers, bytes], the tiles of the weights of a layer in the
    order of their use. ``norms``: bf16 [layers, 2, hidden]. ``alphas``: float32 [layers, 4]. ``kv_cache``: uint8
    [layers, 2, pages, kv_heads, 64, 64], ``kv_cache_sf`` likewise [..., 64, 8]. ``block_tables``: int32 [1, pages of
    the request]. ``seq_lens``: int32 [1]. ``cos_sin_cache``: float32 [max_position, 128]. ``state``: int64, zeros
    before the first call.
    """

    x: torch.Tensor
    weights: torch.Tensor
    norms: torch.Tensor
    alphas: torch.Tensor
    kv_cache: Written
    kv_cache_sf: Written
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    cos_sin_cache: torch.Tensor
    state: Written
    out: Written
    heads: int
    inter: int
    eps: float
    scale: float
    enable_pdl: bool | None

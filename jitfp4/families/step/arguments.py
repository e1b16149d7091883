"""What the operator takes."""

from __future__ import annotations

from typing import NamedTuple

import torch

from jitfp4.operation import Written


class Arguments(NamedTuple):
    """All layers of a dense model for one token.

    ``x`` and ``out``: bf16 or fp16 [1, hidden]. ``weights``: uint8 [layers, bytes], the tiles of the weights of a layer
    in the order of their use. Of x's dtype, ``norms`` [layers, 2, hidden], and where the model has them ``head_norms``
    [layers, 2, 128] and ``biases`` [layers, rows of qkv]. ``alphas``: float32 [layers, 7]. ``kv_cache``: uint8 [layers,
    2, pages, kv_heads, 64, 64], ``kv_cache_sf`` likewise [..., 64, 8], those of values ``interleaved`` or not.
    ``kv_scales``: float32 [layers, 2], or all are 1. ``block_tables``: int32 [1, pages of the request]. ``seq_lens``:
    int32 [1]. ``positions``: int32 [1], or it is that of the last token. ``cos_sin_cache``: float32 [max_position,
    128]. ``state``: int64, zeros before the first call.
    """

    x: torch.Tensor
    weights: torch.Tensor
    norms: torch.Tensor
    head_norms: torch.Tensor | None
    biases: torch.Tensor | None
    alphas: torch.Tensor
    kv_cache: Written
    kv_cache_sf: Written
    kv_scales: torch.Tensor | None
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    positions: torch.Tensor | None
    cos_sin_cache: torch.Tensor
    state: Written
    out: Written
    heads: int
    inter: int
    interleaved: bool
    eps: float
    scale: float
    enable_pdl: bool | None

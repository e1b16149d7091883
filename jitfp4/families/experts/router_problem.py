"""A router, from activations to the choice of experts: its arguments, and what the choice of tactics sees of it."""

from __future__ import annotations

from typing import NamedTuple

import torch

from jitfp4.families.experts.topk_problem import Method
from jitfp4.formats import DType
from jitfp4.operation import Written

COLUMNS = 8
"""Of x, that a thread loads at once: hidden is a multiple of it."""
MOST_TOKENS, MOST_HIDDEN = 16, 8192
"""Of a launch that multiplies and chooses."""


class RouterArguments(NamedTuple):
    """The choice of ``out_ids`` and ``out_weights`` [tokens, slots] for ``x`` [tokens, hidden].

    ``weight`` [experts, hidden], and where ``shared`` one row more; ``logit_bias``, ``bias`` float, of each row, or
    None; ``logits`` [tokens, rows], rows apart or not, or None. See route_tokens().
    """

    x: torch.Tensor
    weight: torch.Tensor
    logit_bias: torch.Tensor | None
    bias: torch.Tensor | None
    logits: Written | None
    out_ids: Written
    out_weights: Written
    method: str
    renormalize: bool
    groups: int
    topk_groups: int
    shared: bool
    scale: float
    enable_pdl: bool | None


class RouterProblem(NamedTuple):
    """``tokens`` choices among ``experts``, by products of ``hidden`` columns; with or without one that all have."""

    dtype: DType
    weight: DType
    logits: DType
    weights: DType
    method: Method
    tokens: int
    experts: int
    hidden: int
    shared: bool

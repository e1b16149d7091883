"""The choice of experts by a router's logits: its arguments, and what the choice of tactics sees of it."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

import torch

from jitfp4.formats import DType
from jitfp4.operation import Written

MOST_TAKEN = 32  # slots of a token, and groups of experts: a lane has one


class Method(StrEnum):
    """How a logit becomes the score of an expert."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"


class TopkArguments(NamedTuple):
    """The choice of ``out_ids`` and ``out_weights`` [tokens, slots], int32 and float, from ``logits``.

    ``logits`` [tokens, experts], or where ``shared`` one column more, rows apart or not; ``bias`` [experts] float or
    None. See route_experts().
    """

    logits: torch.Tensor
    bias: torch.Tensor | None
    out_ids: Written
    out_weights: Written
    method: str
    renormalize: bool
    groups: int
    topk_groups: int
    shared: bool
    scale: float
    enable_pdl: bool | None


class TopkProblem(NamedTuple):
    """``tokens`` choices among ``experts``."""

    logits: DType
    weights: DType
    method: Method
    tokens: int
    experts: int

"""The operation behind route_experts(): the experts of each token and their weights."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch

from jitfp4.arch import Arch
from jitfp4.dtypes import FLOATS, HALVES
from jitfp4.families.experts.kernels.topk import TOPK, TopkTactic
from jitfp4.families.experts.router_problem import RouterArguments
from jitfp4.families.experts.topk_problem import Method, TopkArguments, TopkProblem
from jitfp4.formats import DType
from jitfp4.operation import Operation
from jitfp4.reference import routing as reference
from jitfp4.selection import Row, Table

TABLE = Table((Row(TopkTactic(4)),), measured=None)


def _problem(arguments: TopkArguments) -> TopkProblem:
    logits, weights = arguments.logits, arguments.out_weights
    tokens, experts = logits.shape[0], logits.shape[1] - arguments.shared
    return TopkProblem(FLOATS[logits.dtype], FLOATS[weights.dtype], Method(arguments.method), tokens, experts)


def _problems(_arch: Arch) -> Iterator[TopkProblem]:
    """Routers of published models."""
    for logits, method, experts in product(FLOATS.values(), Method, (64, 128, 256, 384, 512)):
        yield TopkProblem(logits, DType.F32, method, 64, experts)
    for logits in HALVES.values():  # FlashInfer's fused_topk_deepseek
        yield TopkProblem(logits, logits, Method.SIGMOID, 64, 256)


def choose_by(logits: torch.Tensor, arguments: TopkArguments | RouterArguments) -> None:
    """Fill ids and weights by logits [tokens, columns] float32."""
    a, softmax = arguments, arguments.method == Method.SOFTMAX
    if a.shared:
        ids, weights = reference.choose_with_shared(logits, a.out_ids.shape[1] - 1, renormalize=a.renormalize)
        weights = weights * a.scale
    else:
        scores = logits if softmax else torch.sigmoid(logits)
        ids = reference.choose(scores, a.out_ids.shape[1], a.bias, a.groups, a.topk_groups)
        weights = reference.weights_of(logits, ids, softmax=softmax, renormalize=a.renormalize, scale=a.scale)
    a.out_ids.copy_(ids)
    a.out_weights.copy_(weights)


EXPERTS_TOPK = Operation(
    TopkArguments,
    name="experts_topk",
    kernels=(TOPK,),
    problem=_problem,
    problems=_problems,
    tables=(TABLE,),
    reference=lambda arguments: choose_by(arguments.logits.float(), arguments),
    output="out_ids",
    exclusive=("out_ids", "out_weights"),
    growing=("tokens",),
)

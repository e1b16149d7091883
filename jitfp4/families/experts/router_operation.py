"""The operation behind route_tokens(): logits, the experts of each token and their weights."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch

from jitfp4.arch import Arch
from jitfp4.dtypes import FLOATS
from jitfp4.families.experts.kernels.router import ROUTER, RouterTactic
from jitfp4.families.experts.router_problem import RouterArguments, RouterProblem
from jitfp4.families.experts.topk_operation import choose_by
from jitfp4.families.experts.topk_problem import Method
from jitfp4.formats import DType
from jitfp4.operation import Operation
from jitfp4.selection import Row, Table

TABLE = Table((Row(RouterTactic(4, 256), {"hidden": 2048}), Row(RouterTactic(4, 512))), measured=None)


def _problem(arguments: RouterArguments) -> RouterProblem:
    a = arguments
    return RouterProblem(
        FLOATS[a.x.dtype],
        FLOATS[a.weight.dtype],
        DType.F32 if a.logits is None else FLOATS[a.logits.dtype],
        FLOATS[a.out_weights.dtype],
        Method(a.method),
        a.x.shape[0],
        a.weight.shape[0] - a.shared,
        a.weight.shape[1],
        a.shared,
    )


_MODELS = (  # method, experts, hidden, and whether there is an expert that all tokens have
    (Method.SOFTMAX, 128, 2048, False),
    (Method.SOFTMAX, 128, 2880, False),
    (Method.SOFTMAX, 512, 2048, True),
    (Method.SIGMOID, 256, 7168, False),
)


def _problems(_arch: Arch) -> Iterator[RouterProblem]:
    """Routers of published models, for one token and for several; then the other dtypes that a call may have."""
    for (method, experts, hidden, shared), tokens in product(_MODELS, (1, 8)):
        problem = RouterProblem(
            DType.BF16, DType.BF16, DType.F32, DType.F32, method, tokens, experts, hidden, shared=shared
        )
        yield problem
        if method == Method.SOFTMAX:
            yield problem._replace(logits=DType.BF16)
    yield problem._replace(weight=DType.F32)
    yield problem._replace(weights=DType.BF16)
    yield problem._replace(dtype=DType.F16, weight=DType.F16)


def multiply(x: torch.Tensor, weight: torch.Tensor, logit_bias: torch.Tensor | None, logits: torch.Tensor) -> None:
    """Fill ``logits`` by torch, with float32 sums that are rounded once."""
    columns = weight.t()
    if x.is_cuda and {weight.dtype, logits.dtype, x.dtype if logit_bias is None else logit_bias.dtype} == {x.dtype}:
        if logit_bias is None:
            torch.mm(x, columns, out=logits)
        else:
            torch.addmm(logit_bias, x, columns, out=logits)
        return
    if x.is_cuda and weight.dtype == x.dtype:
        product = torch.mm(x, columns, out_dtype=torch.float32)
    else:
        product = x.float() @ columns.float()
    logits.copy_(product if logit_bias is None else product + logit_bias)


def _reference(arguments: RouterArguments) -> None:
    a = arguments
    logits = torch.empty(len(a.x), len(a.weight)) if a.logits is None else a.logits
    multiply(a.x, a.weight, a.logit_bias, logits)
    choose_by(logits.float(), a)


EXPERTS_ROUTER = Operation(
    RouterArguments,
    name="experts_router",
    kernels=(ROUTER,),
    problem=_problem,
    problems=_problems,
    tables=(TABLE,),
    reference=_reference,
    output="out_ids",
    aligned=("x", "weight"),
    exclusive=("logits", "out_ids", "out_weights"),
    growing=("tokens",),
)

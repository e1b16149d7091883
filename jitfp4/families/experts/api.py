"""The public function: arguments are checked, results and temporaries allocated, and the operations called."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from functools import partial

import torch

from jitfp4 import engine, replay, sim
from jitfp4.arch import names_with
from jitfp4.dispatch import is_watched
from jitfp4.errors import ArgumentError, ArgumentTypeError
from jitfp4.families.experts.arguments import DownArguments, RouteArguments, UpArguments
from jitfp4.families.experts.operation import EXPERTS_DOWN, EXPERTS_ROUTE, EXPERTS_UP
from jitfp4.families.experts.problem import DTYPES, counters, most_items
from jitfp4.families.experts.tables import item_rows_of
from jitfp4.families.experts.weights import Fp4Experts
from jitfp4.formats import MXFP4
from jitfp4.public import public
from jitfp4.tensors import as_rows, check_contiguous, check_device, check_dtype, check_same_device
from jitfp4.weight import check_still

_ID_DTYPES = (torch.int32, torch.int64)
_MOST_ASSIGNMENTS = 1 << 24
_MOST_SLOTS = 32
# alpha, beta and limit of an activation
_SWIGLU: dict[str, tuple[float, float, float | None]] = {
    "swiglu": (1.0, 0.0, None),
    "swigluoai": (1.702, 1.0, 7.0),
    "relu2": (1.0, 0.0, None),
}


replay.unpack(Fp4Experts, *(field.name for field in fields(Fp4Experts)))


@public
def fp4_experts(
    x: torch.Tensor,
    experts: Fp4Experts,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor | None,
    *,
    activation: str = "swiglu",
    swiglu_alpha: float | None = None,
    swiglu_beta: float | None = None,
    swiglu_limit: float | None = None,
    expert_map: torch.Tensor | None = None,
    apply_router_weight_on_input: bool = False,
    activations: str | None = None,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
) -> torch.Tensor:
    """A layer of experts: each token goes through those that the router chose, and their results are added up.

    Args:
        x: [tokens, hidden], bf16 or fp16, 16-byte aligned; elements of a row adjacent, rows at multiples of 16 bytes.
            Never copied.
        experts: from prepare_fp4_experts(), on x's device. Must be complete when the call is made: with programmatic
            dependent launch the kernels read it while their predecessors still run.
        topk_ids: [tokens, slots], int32 or int64, contiguous, 1 to 32 slots: the experts of each token. A slot with an
            id of -1, or any other outside the experts, is skipped, and a token without a slot gives zeros.
        topk_weights: [tokens, slots], float32, contiguous; None means 1.
        activation: "swiglu": ``silu(gate) * up``; "swigluoai": with the constants of gpt-oss, see Numerics; "relu2":
            the square of ``max(up, 0)``, for experts without a gate.
        swiglu_alpha, swiglu_beta, swiglu_limit: in place of the activation's own; limit None means that.
        expert_map: int32 [global experts], contiguous: the number of each expert among those of ``experts``, or -1 if
            it is on another rank. Then ``topk_ids`` has global numbers.
        apply_router_weight_on_input: multiply x by the weights, not the results.
        activations: "fp8": both products are of E4M3, for many tokens, on sm_90a alone; see Numerics. None: of 16 bits.
        residual: [tokens, hidden] of x's dtype, laid out as x may be: added to the results.
        out: [tokens, hidden] to fill in place, of x's dtype; elements of a row adjacent, rows at multiples of 16 bytes;
            sharing no memory with another argument. Allocated when None.
        enable_pdl: programmatic dependent launch; None means wherever the GPU has it.
    Returns:
        [tokens, hidden] of x's dtype.
    Numerics:
        With ``round`` to x's dtype, weights exact, sums and everything else in float32::

            gate, up = scale * (sum over hidden of x * w13) + bias
            g, u = min(gate, limit), up between -limit and limit
            h = round(g * sigmoid(alpha * g) * (u + beta));   relu2: h = round(max(up, 0)^2)
            y = round(scale * (sum over inter of h * w2) + bias)
            out = round(sum over slots in their order of weight * y, + residual)

        alpha, beta, limit are 1, 0 and none for "swiglu", 1.702, 1 and 7 for "swigluoai". With weights on the input,
        x is round(weight * x), and the weights of y are 1. Equal calls give equal bits.

        With activations "fp8" each row of x and of h is rounded to E4M3, relative to its largest magnitude divided by
        448, and weights as by mm_fp8_fp4(), relative to a power of two of their row: MXFP4 blocks whose scale is at
        least 2^-14 of the largest of their row are exact, an element of NVFP4 is off by at most 1 / 21 of itself. Sums
        stay in the tensor cores, which keep about 14 bits of them.
    Raises:
        ArgumentError, ArgumentTypeError: before anything is written.
    """
    if not isinstance(experts, Fp4Experts):
        raise ArgumentTypeError("experts", type(experts).__name__, "an Fp4Experts, from prepare_fp4_experts()")
    if activation not in _SWIGLU:
        raise ArgumentError("activation", repr(activation), " or ".join(map(repr, _SWIGLU)))
    if (activation != "relu2") != experts.gated:
        raise ArgumentError("activation", repr(activation), "relu2 for experts without a gate, and only for them")
    if activations not in (None, "fp8"):
        raise ArgumentError("activations", repr(activations), "'fp8' or None")
    check_dtype("x", x, tuple(DTYPES))
    check_device("x", x)
    check_same_device("experts", experts.w13, x)
    check_still("experts", partial(replace, experts))
    if x.dim() != 2 or x.shape[1] != experts.hidden:
        raise ArgumentError("x", f"shape {tuple(x.shape)}", f"[tokens, {experts.hidden}], as the experts")
    _check_routing(x, topk_ids, topk_weights, expert_map)
    if apply_router_weight_on_input and topk_weights is None:
        raise ArgumentTypeError("topk_weights", "None", "a tensor with apply_router_weight_on_input")
    alpha, beta, limit = _SWIGLU[activation]
    alpha = alpha if swiglu_alpha is None else swiglu_alpha
    beta = beta if swiglu_beta is None else swiglu_beta
    limit = limit if swiglu_limit is None else swiglu_limit
    if limit is not None and limit <= 0:
        raise ArgumentError("swiglu_limit", limit, "a number above 0")
    if out is None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
    check_dtype("out", out, (x.dtype,))
    check_same_device("out", out, x)
    if tuple(out.shape) != tuple(x.shape):
        raise ArgumentError("out", f"shape {tuple(out.shape)}", f"{tuple(x.shape)}")
    if residual is not None:
        check_dtype("residual", residual, (x.dtype,))
        check_same_device("residual", residual, x)
        if residual.shape != x.shape:
            raise ArgumentError("residual", f"shape {tuple(residual.shape)}", f"{tuple(x.shape)}")
        residual = as_rows("residual", residual, 32)
    _launch(
        as_rows("x", x, 32),
        experts,
        topk_ids,
        topk_weights,
        expert_map,
        residual,
        as_rows("out", out, 32),
        constants=(float(alpha), float(beta), math.inf if limit is None else float(limit)),
        on_input=apply_router_weight_on_input,
        fp8=activations is not None,
        enable_pdl=enable_pdl,
    )
    return out


def _launch(
    x: torch.Tensor,
    experts: Fp4Experts,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor | None,
    expert_map: torch.Tensor | None,
    residual: torch.Tensor | None,
    out: torch.Tensor,
    *,
    constants: tuple[float, float, float],
    on_input: bool,
    fp8: bool,
    enable_pdl: bool | None,
) -> None:
    """The launches of a layer, with rows of x and of out; ``constants`` are alpha, beta and limit."""
    (tokens, hidden), assignments = x.shape, topk_ids.numel()
    item_rows, count = _item_rows(topk_ids, experts, fp8), experts.experts
    items = order = None
    names = "w13=experts,w2=experts,scale13=experts,scale2=experts,bias13=experts,bias2=experts,ids=topk_ids"
    if item_rows and assignments:
        items = replay.scratch((most_items(assignments, count, item_rows), 4), torch.int32, x)
        order = replay.scratch((assignments,), torch.int32, x)
        EXPERTS_ROUTE(RouteArguments(topk_ids, expert_map, items, order, count, item_rows, enable_pdl, names))
    h = replay.scratch((assignments, experts.inter), x.dtype, x)
    y = replay.scratch((assignments, hidden), x.dtype, x)
    done = replay.scratch((counters(tokens, hidden),), torch.int32, x)
    EXPERTS_UP(
        UpArguments(
            x=x,
            w13=experts.w13,
            scale13=experts.scale13,
            bias13=experts.bias13,
            ids=topk_ids,
            expert_map=expert_map,
            input_weights=topk_weights if on_input else None,
            items=items,
            order=order,
            h=h,
            done=done,
            swiglu_alpha=constants[0],
            swiglu_beta=constants[1],
            swiglu_limit=constants[2],
            gated=experts.gated,
            mxfp4=experts.format is MXFP4,
            fp8=fp8,
            item_rows=item_rows,
            enable_pdl=enable_pdl,
            names=f"{names},input_weights=topk_weights",
        )
    )
    EXPERTS_DOWN(
        DownArguments(
            h=h,
            w2=experts.w2,
            scale2=experts.scale2,
            bias2=experts.bias2,
            ids=topk_ids,
            expert_map=expert_map,
            weights=None if on_input else topk_weights,
            residual=residual,
            x=x,
            input_weights=topk_weights if on_input else None,
            items=items,
            order=order,
            y=y,
            done=done,
            out=out,
            mxfp4=experts.format is MXFP4,
            fp8=fp8,
            item_rows=item_rows,
            enable_pdl=enable_pdl,
            names=f"{names},weights=topk_weights,input_weights=topk_weights",
        )
    )


def _item_rows(ids: torch.Tensor, experts: Fp4Experts, fp8: bool) -> int:
    """Rows of an item of the list; 0 for no list."""
    is_known = not torch.compiler.is_dynamo_compiling() and not is_watched()
    arch = engine.target_of(ids).arch if is_known and (ids.is_cuda or sim.active_device() is not None) else None
    if fp8 and arch is not None and not arch.has_wgmma:
        raise ArgumentError("activations", "'fp8'", f"None on {arch.name}: products are of {names_with('has_wgmma')}")
    size = experts.hidden * experts.inter
    return item_rows_of(ids.numel(), experts.experts, size, arch, fp8=fp8)


def _check_routing(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor | None,
    expert_map: torch.Tensor | None,
) -> None:
    check_dtype("topk_ids", topk_ids, _ID_DTYPES)
    check_same_device("topk_ids", topk_ids, x)
    tokens = x.shape[0]
    if topk_ids.dim() != 2 or topk_ids.shape[0] != tokens or not 0 < topk_ids.shape[1] <= _MOST_SLOTS:
        raise ArgumentError("topk_ids", f"shape {tuple(topk_ids.shape)}", f"[{tokens}, 1 to {_MOST_SLOTS} slots]")
    check_contiguous("topk_ids", topk_ids)
    if topk_ids.numel() > _MOST_ASSIGNMENTS:
        raise ArgumentError("topk_ids", f"{topk_ids.numel()} elements", f"at most {_MOST_ASSIGNMENTS}")
    if topk_weights is not None:
        check_dtype("topk_weights", topk_weights, (torch.float32,))
        check_same_device("topk_weights", topk_weights, x)
        if topk_weights.shape != topk_ids.shape:
            raise ArgumentError("topk_weights", f"shape {tuple(topk_weights.shape)}", f"{tuple(topk_ids.shape)}")
        check_contiguous("topk_weights", topk_weights)
    if expert_map is not None:
        check_dtype("expert_map", expert_map, (torch.int32,))
        check_same_device("expert_map", expert_map, x)
        if expert_map.dim() != 1 or not expert_map.numel():
            raise ArgumentError("expert_map", f"shape {tuple(expert_map.shape)}", "[global experts]")
        check_contiguous("expert_map", expert_map)

"""What the second kernels of chunk_gated_delta_rule() share: their parameters, and the kernel before them."""

from __future__ import annotations

from typing import Any

import torch

from jitfp4.families.gdn.prefill_arguments import (
    PRODUCTS_BYTES,
    PrefillArguments,
    PrefillProblem,
    ProductsArguments,
    places,
)
from jitfp4.families.gdn.products_operation import PREFILL_PRODUCTS_OPERATION
from jitfp4.kernel import Before, Plan, Scratch
from jitfp4.spec import I64, Ptr

PARAMETERS = (
    Ptr("q", "const In", "[tokens, heads / q_ratio, K]"),
    Ptr("k", "const In", "[tokens, heads / k_ratio, K]"),
    Ptr("v", "const In", "[tokens, heads / v_ratio, V]"),
    Ptr("products", "const uint8", "[places, heads, sizeof(ChunkProducts)]"),
    Ptr("cu_seqlens", "const void", "[sequences + 1], integers of cu_seqlens_bytes"),
    Ptr("initial_state", "const uint8", "[pool, heads, V, K] of state_bytes; null: 0"),
    Ptr("final_state", "uint8", "[pool, heads, V, K] of state_bytes; null: not stored"),
    Ptr("slots", "const void", "[sequences], of slot_bytes; outside the pool: no state, output zero"),
    Ptr("checkpoints", "uint8", "[checkpoint_count, heads, V, K] of state_bytes"),
    Ptr("checkpoint_starts", "const void", "[sequences + 1], integers of start_bytes"),
    Ptr("out", "In", "[tokens, heads, V]"),
    I64("cu_seqlens_bytes", "4 or 8"),
    I64("tokens", "of all sequences"),
    I64("heads", "of the output", member="uint32"),
    I64("q_ratio", "heads that share one of q", member="int"),
    I64("k_ratio", "heads that share one of k", member="int"),
    I64("v_ratio", "heads that share one of v", member="int"),
    I64("q_stride", "elements of a token"),
    I64("k_stride", "likewise"),
    I64("v_stride", "likewise"),
    I64("state_bytes", "4: float32; 2: bf16", member="int"),
    I64("pool", "slots"),
    I64("slot_bytes", "0, 4 or 8; 0: sequence n uses slot n", member="int"),
    I64("initial_stride", "elements of a slot"),
    I64("final_stride", "likewise"),
    I64("checkpoint_every", "tokens, a multiple of kChunk; 0: none"),
    I64("checkpoint_count"),
    I64("start_bytes", "4 or 8", member="int"),
)


def scratch(_arguments: PrefillArguments, plan: Plan) -> dict[str, Scratch]:
    problem = plan.problem
    chunks = places(problem.tokens, problem.sequences) * problem.heads
    return {"products": Scratch((chunks * PRODUCTS_BYTES,), torch.uint8)}


def _products(
    arguments: PrefillArguments, plan: Plan, products: torch.Tensor, **_others: torch.Tensor
) -> ProductsArguments:
    a = arguments
    return ProductsArguments(
        q=a.q,
        k=a.k,
        g=a.g,
        beta=a.beta,
        scale=a.scale,
        cu_seqlens=a.cu_seqlens,
        products=products,
        heads=plan.problem.heads,
        use_qk_l2norm=a.use_qk_l2norm,
        enable_pdl=a.enable_pdl,
    )


def initial_of(arguments: PrefillArguments) -> torch.Tensor | None:
    """The states before the first tokens."""
    return arguments.final_state if arguments.in_place else arguments.initial_state


def pool_of(arguments: PrefillArguments, problem: PrefillProblem) -> int:
    """Slots of states."""
    states = initial_of(arguments), arguments.final_state
    return next((state.shape[0] for state in states if state is not None), problem.sequences)


def bind(arguments: PrefillArguments, plan: Plan, products: torch.Tensor) -> dict[str, Any]:
    a, heads = arguments, plan.problem.heads
    initial = initial_of(a)
    checkpoints, starts = a.state_checkpoints, a.checkpoint_cu_starts
    states = [state for state in (initial, a.final_state, checkpoints) if state is not None]
    return {
        "q": a.q,
        "k": a.k,
        "v": a.v,
        "products": products,
        "cu_seqlens": a.cu_seqlens,
        "initial_state": initial,
        "final_state": a.final_state,
        "slots": a.state_indices,
        "checkpoints": checkpoints,
        "checkpoint_starts": starts,
        "out": a.output,
        "cu_seqlens_bytes": a.cu_seqlens.element_size(),
        "tokens": plan.problem.tokens,
        "heads": heads,
        "q_ratio": heads // a.q.shape[1],
        "k_ratio": heads // a.k.shape[1],
        "v_ratio": heads // a.v.shape[1],
        "q_stride": a.q.stride(0),
        "k_stride": a.k.stride(0),
        "v_stride": a.v.stride(0),
        "state_bytes": states[0].element_size() if states else 4,
        "pool": pool_of(a, plan.problem),
        "slot_bytes": 0 if a.state_indices is None else a.state_indices.element_size(),
        "initial_stride": 0 if initial is None else initial.stride(0),
        "final_stride": 0 if a.final_state is None else a.final_state.stride(0),
        "checkpoint_every": a.checkpoint_every_n_tokens,
        "checkpoint_count": 0 if checkpoints is None else checkpoints.shape[0],
        "start_bytes": 0 if starts is None else starts.element_size(),
    }


BEFORE = (Before(PREFILL_PRODUCTS_OPERATION, _products),)

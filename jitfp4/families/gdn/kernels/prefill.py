"""gdn/prefill: the chunks of each prompt in their order, with the state in registers."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from jitfp4.arch import Arch
from jitfp4.errors import ArgumentError
from jitfp4.families.gdn.prefill_arguments import (
    CHUNK,
    PRODUCTS_BYTES,
    PrefillArguments,
    PrefillProblem,
    ProductsArguments,
    places,
)
from jitfp4.families.gdn.problem import CHUNK_ROWS, HEAD_DIMS, VALUE_DIMS
from jitfp4.families.gdn.products_operation import PREFILL_PRODUCTS_OPERATION
from jitfp4.formats import DType
from jitfp4.kernel import Before, Kernel, Plan, Scratch
from jitfp4.spec import I64, Geometry, KernelSpec, Ptr


@dataclass(frozen=True, slots=True)
class PrefillTactic:
    """Fields of PrefillSpec."""

    pairs: int
    stages: int


TACTICS = tuple(PrefillTactic(pairs, stages) for pairs in (2, 4) for stages in (2, 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillSpec(KernelSpec):
    """Each of ``pairs`` pairs of warps has 16 rows of a state; ``stages`` chunks are in shared memory."""

    dtype: DType
    head_dim: int
    value_dim: int
    pairs: int
    stages: int

    def __post_init__(self) -> None:
        if self.head_dim not in HEAD_DIMS:
            raise ArgumentError("head_dim", self.head_dim, f"one of {HEAD_DIMS}")
        if self.value_dim not in VALUE_DIMS[self.head_dim]:
            raise ArgumentError("value_dim", self.value_dim, f"one of {VALUE_DIMS[self.head_dim]}")
        if self.pairs not in (2, 4):
            raise ArgumentError("pairs", self.pairs, "2 or 4")
        if self.stages not in (1, 2):
            raise ArgumentError("stages", self.stages, "1 or 2")

    @property
    def threads(self) -> int:
        """Two warps of each pair."""
        return 2 * 32 * self.pairs

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a CTA in bytes: a stage has products, keys, values, queries and left operands."""
        rows = CHUNK * (2 * (self.head_dim + 8) + CHUNK_ROWS * self.pairs + 8) * 2
        left = self.pairs * CHUNK_ROWS * (self.head_dim + CHUNK) * 2
        return self.stages * (PRODUCTS_BYTES + rows + left)


def _specialise(problem: PrefillProblem, tactic: PrefillTactic) -> PrefillSpec:
    return PrefillSpec(
        dtype=problem.dtype,
        head_dim=problem.head_dim,
        value_dim=problem.value_dim,
        **asdict(tactic),
    )


def _rejects(problem: PrefillProblem, tactic: PrefillTactic, arch: Arch) -> str | None:
    try:
        spec = _specialise(problem, tactic)
    except ArgumentError as error:
        return str(error)
    fits = spec.shared_bytes <= arch.shared_bytes
    return None if fits else f"it needs {spec.shared_bytes} bytes of shared memory"


def _geometry(problem: PrefillProblem, tactic: PrefillTactic, _arch: Arch) -> Geometry:
    spec = _specialise(problem, tactic)
    ctas = problem.states * (problem.value_dim // (CHUNK_ROWS * tactic.pairs))
    return Geometry(grid=(ctas, 1, 1), block=(spec.threads, 1, 1), shared_bytes=spec.shared_bytes)


def _scratch(_arguments: PrefillArguments, plan: Plan) -> dict[str, Scratch]:
    problem = plan.problem
    chunks = places(problem.tokens, problem.sequences) * problem.heads
    return {"products": Scratch((chunks * PRODUCTS_BYTES,), torch.uint8)}


def _products(arguments: PrefillArguments, plan: Plan, products: torch.Tensor) -> ProductsArguments:
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


def _bind(arguments: PrefillArguments, plan: Plan, products: torch.Tensor) -> dict[str, Any]:
    a, heads = arguments, plan.problem.heads
    initial = a.final_state if a.in_place else a.initial_state
    pool = next((state.shape[0] for state in (initial, a.final_state) if state is not None), plan.problem.sequences)
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
        "pool": pool,
        "slot_bytes": 0 if a.state_indices is None else a.state_indices.element_size(),
        "initial_stride": 0 if initial is None else initial.stride(0),
        "final_stride": 0 if a.final_state is None else a.final_state.stride(0),
        "checkpoint_every": a.checkpoint_every_n_tokens,
        "checkpoint_count": 0 if checkpoints is None else checkpoints.shape[0],
        "start_bytes": 0 if starts is None else starts.element_size(),
    }


PREFILL = Kernel(
    name="gdn/prefill",
    spec=PrefillSpec,
    params=(
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
    ),
    tactics=TACTICS,
    rejects=_rejects,
    specialise=_specialise,
    geometry=_geometry,
    bind=_bind,
    scratch=_scratch,
    before=(Before(PREFILL_PRODUCTS_OPERATION, _products),),
)

"""gdn/prefill_products: what each chunk of a prompt needs that does not depend on the state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jitfp4.arch import Arch
from jitfp4.errors import ArgumentError
from jitfp4.families.gdn.launches import refused
from jitfp4.families.gdn.prefill_arguments import (
    CHUNK,
    INVERTING_BYTES,
    OF_TOKENS_BYTES,
    PRODUCTS_BYTES,
    ProductsArguments,
    ProductsProblem,
    places,
)
from jitfp4.families.gdn.problem import HEAD_DIMS
from jitfp4.formats import DType
from jitfp4.kernel import Kernel, Plan
from jitfp4.layouts import round_up
from jitfp4.spec import F32, I64, Geometry, KernelSpec, Ptr


@dataclass(frozen=True, slots=True)
class ProductsTactic:
    """There is one way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductsSpec(KernelSpec):
    """A CTA takes one chunk and head."""

    dtype: DType
    head_dim: int

    threads = 2 * CHUNK

    def __post_init__(self) -> None:
        if self.head_dim not in HEAD_DIMS:
            raise ArgumentError("head_dim", self.head_dim, f"one of {HEAD_DIMS}")

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a CTA in bytes: keys and queries or what is made of them, spans, six numbers of a token."""
        rows = 2 * CHUNK * self.head_dim * 2
        return round_up(max(rows, PRODUCTS_BYTES + INVERTING_BYTES) + OF_TOKENS_BYTES, 1024)


def _rejects(problem: ProductsProblem, tactic: ProductsTactic, arch: Arch) -> str | None:
    return refused(_specialise, problem, tactic, arch)


def _specialise(problem: ProductsProblem, _tactic: ProductsTactic) -> ProductsSpec:
    return ProductsSpec(dtype=problem.dtype, head_dim=problem.head_dim)


def _geometry(problem: ProductsProblem, tactic: ProductsTactic, _arch: Arch) -> Geometry:
    spec = _specialise(problem, tactic)
    ctas = places(problem.tokens, problem.sequences) * problem.heads
    return Geometry(grid=(ctas, 1, 1), block=(spec.threads, 1, 1), shared_bytes=spec.shared_bytes)


def _bind(arguments: ProductsArguments, plan: Plan) -> dict[str, Any]:
    q, k, heads = arguments.q, arguments.k, arguments.heads
    return {
        "q": q,
        "k": k,
        "g": arguments.g,
        "beta": arguments.beta,
        "cu_seqlens": arguments.cu_seqlens,
        "products": arguments.products,
        "scale": arguments.scale,
        "cu_seqlens_bytes": arguments.cu_seqlens.element_size(),
        "tokens": plan.problem.tokens,
        "sequences": plan.problem.sequences,
        "heads": heads,
        "q_ratio": heads // q.shape[1],
        "k_ratio": heads // k.shape[1],
        "q_stride": q.stride(0),
        "k_stride": k.stride(0),
        "l2norm": int(arguments.use_qk_l2norm),
    }


PREFILL_PRODUCTS = Kernel(
    name="gdn/prefill_products",
    spec=ProductsSpec,
    params=(
        Ptr("q", "const In", "[tokens, heads / q_ratio, K]"),
        Ptr("k", "const In", "[tokens, heads / k_ratio, K]"),
        Ptr("g", "const float", "[tokens, heads], decays; null: 1"),
        Ptr("beta", "const float", "[tokens, heads]; null: 1"),
        Ptr("cu_seqlens", "const void", "[sequences + 1], integers of cu_seqlens_bytes"),
        Ptr("products", "uint8", "[places, heads, sizeof(ChunkProducts)]"),
        F32("scale", "of q"),
        I64("cu_seqlens_bytes", "4 or 8"),
        I64("tokens", "of all sequences"),
        I64("sequences"),
        I64("heads", "of the output", member="uint32"),
        I64("q_ratio", "heads that share one of q", member="int"),
        I64("k_ratio", "heads that share one of k", member="int"),
        I64("q_stride", "elements of a token"),
        I64("k_stride", "likewise"),
        I64("l2norm", "0: q and k as they are", member="bool"),
    ),
    tactics=(ProductsTactic(),),
    rejects=_rejects,
    specialise=_specialise,
    geometry=_geometry,
    bind=_bind,
)

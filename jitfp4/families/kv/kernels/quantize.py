"""The kernel that writes tokens to a cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

from jitfp4.arch import Arch
from jitfp4.families.kv.arguments import Quantize
from jitfp4.families.kv.launches import CACHE, PLACE_BYTES, CacheSpec, bind_cache, cut, steps
from jitfp4.families.kv.problem import Addressing, QuantizeProblem
from jitfp4.formats import DType
from jitfp4.kernel import Kernel, Plan
from jitfp4.spec import I64, Geometry, Ptr


class QuantizeTactic(NamedTuple):
    """How the quantize kernel divides the work: tokens of a thread, threads of a CTA."""

    tokens: int
    threads: int


TACTICS = tuple(QuantizeTactic(*values) for values in product((1, 2, 4, 8), (64, 128, 256)))


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeSpec(CacheSpec):
    """Each thread quantizes one block, the same one of ``tokens_per_thread`` tokens."""

    in_dtype: DType
    addressing: Addressing
    tokens_per_thread: int


def specialise(problem: QuantizeProblem, tactic: QuantizeTactic) -> QuantizeSpec:
    """The kernel that a tactic makes for a problem."""
    return QuantizeSpec(in_dtype=problem.in_dtype, addressing=problem.addressing, tokens_per_thread=tactic.tokens)


def rejects(_: QuantizeProblem, __: QuantizeTactic, ___: Arch) -> None:
    """Every tactic can run every problem."""


def geometry(problem: QuantizeProblem, tactic: QuantizeTactic, _: Arch) -> Geometry:
    """Grid: x over tokens, y over the blocks of a token, z over sides."""
    across, strips, block = cut(problem.tokens, problem.blocks, tactic.tokens, tactic.threads)
    shared = block[1] * tactic.tokens * PLACE_BYTES if problem.addressing is not Addressing.WHOLE else 0
    return Geometry(grid=(across, strips, problem.sides), block=block, shared_bytes=shared)


def _bind(a: Quantize, _: Plan) -> Mapping[str, Any]:
    x = (0, *steps(a.k)) if a.slots is not None else steps(a.k)
    return {
        "k": a.k,
        "v": a.v,
        "k_scale": a.k_scale,
        "v_scale": a.v_scale,
        "k_codes": a.k_codes,
        "k_sf": a.k_sf,
        "v_codes": a.v_codes,
        "v_sf": a.v_sf,
        "slots": a.slots,
        "batch_indices": a.batch_indices,
        "indices": a.indices,
        "indptr": a.indptr,
        "tokens": a.tokens,
        "requests": 0 if a.indptr is None else a.indptr.numel() - 1,
        "num_indices": 0 if a.indices is None else a.indices.numel(),
        **dict(zip(("x_page", "x_token", "x_head"), x, strict=True)),
        **bind_cache(a, (a.slots, a.batch_indices, a.indices, a.indptr)),
    }


KERNEL = Kernel(
    name="kv/quantize",
    spec=QuantizeSpec,
    params=(
        Ptr("k", "const In", "[tokens, heads, d] or [pages, tokens, heads, d], d contiguous"),
        Ptr("v", "const In"),
        Ptr("k_scale", "const float", "[1], decode"),
        Ptr("v_scale", "const float"),
        Ptr("k_codes", "uint8", "[pages, tokens, heads, d/2], low nibble first"),
        Ptr("k_sf", "uint8", "[pages, tokens, heads, d/16], E4M3"),
        Ptr("v_codes", "uint8"),
        Ptr("v_sf", "uint8"),
        Ptr("slots", "const void", "[tokens], slots or positions; list 0"),
        Ptr("batch_indices", "const void", "[tokens]; list 1"),
        Ptr("indices", "const void", "[num_indices], pages; list 2"),
        Ptr("indptr", "const void", "[requests + 1]; list 3"),
        I64("tokens"),
        I64("requests"),
        I64("num_indices"),
        I64("x_page", "elements from one to the next"),
        I64("x_token"),
        I64("x_head"),
        *CACHE,
    ),
    tactics=TACTICS,
    rejects=rejects,
    specialise=specialise,
    geometry=geometry,
    bind=_bind,
)

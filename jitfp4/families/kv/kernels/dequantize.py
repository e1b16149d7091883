"""The kernel that reads a cache back to floats."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

from jitfp4.arch import Arch
from jitfp4.families.kv.arguments import Dequantize
from jitfp4.families.kv.launches import CACHE, PLACE_BYTES, CacheSpec, bind_cache, cut
from jitfp4.families.kv.problem import DequantizeProblem, Lookup
from jitfp4.formats import DType
from jitfp4.kernel import Kernel, Plan
from jitfp4.spec import I64, Geometry, Ptr


class DequantizeTactic(NamedTuple):
    """How the dequantize kernel divides the work: tokens of a thread, threads of a CTA, and what looks up pages."""

    tokens: int
    threads: int
    by_cta: bool = False


TACTICS = (
    *(DequantizeTactic(*values) for values in product((1, 2, 4, 8), (128, 256))),
    *(DequantizeTactic(*values, by_cta=True) for values in product((4, 8), (128, 256))),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DequantizeSpec(CacheSpec):
    """Each thread writes 16 bytes for each of ``tokens_per_thread`` tokens."""

    out_dtype: DType
    lookup: Lookup
    tokens_per_thread: int


def specialise(problem: DequantizeProblem, tactic: DequantizeTactic) -> DequantizeSpec:
    """The kernel that a tactic makes for a problem."""
    lookup = Lookup.CTA if tactic.by_cta else Lookup.THREAD if problem.page_size else Lookup.NONE
    return DequantizeSpec(out_dtype=problem.out_dtype, lookup=lookup, tokens_per_thread=tactic.tokens)


def rejects(problem: DequantizeProblem, tactic: DequantizeTactic, _: Arch) -> str | None:
    """Why a tactic cannot run a problem; None where it can."""
    if tactic.by_cta and not problem.page_size:
        return "there are no pages to look up"
    if not tactic.by_cta and problem.page_size % tactic.tokens:
        return f"{tactic.tokens} tokens of a thread may lie in two pages of {problem.page_size}"
    return None


def geometry(problem: DequantizeProblem, tactic: DequantizeTactic, _: Arch) -> Geometry:
    """Grid: x over tokens, y over sequences, z over sides and the chunks of a token."""
    across, strips, block = cut(problem.tokens, problem.chunks, tactic.tokens, tactic.threads)
    shared = block[1] * tactic.tokens * PLACE_BYTES if tactic.by_cta else 0
    return Geometry(grid=(across, problem.sequences, strips * problem.sides), block=block, shared_bytes=shared)


def _bind(a: Dequantize, plan: Plan) -> Mapping[str, Any]:
    return {
        "k_codes": a.k_codes,
        "v_codes": a.v_codes,
        "k_sf": a.k_sf,
        "v_sf": a.v_sf,
        "k_scale": a.k_scale,
        "v_scale": a.v_scale,
        "k_out": a.k_out,
        "v_out": a.v_out,
        "block_tables": a.block_tables,
        "seq_lens": a.seq_lens,
        "sides": plan.problem.sides,
        "max_tokens": plan.problem.tokens,
        "table_stride": 0 if a.block_tables is None else a.block_tables.stride(0),
        **bind_cache(a, (a.block_tables, a.seq_lens)),
    }


KERNEL = Kernel(
    name="kv/dequantize",
    spec=DequantizeSpec,
    params=(
        Ptr("k_codes", "const uint8", "[pages, tokens, heads, d/2], low nibble first"),
        Ptr("v_codes", "const uint8"),
        Ptr("k_sf", "const uint8", "[pages, tokens, heads, d/16], E4M3"),
        Ptr("v_sf", "const uint8"),
        Ptr("k_scale", "const float", "[1], decode"),
        Ptr("v_scale", "const float"),
        Ptr("k_out", "Out", "[sequences, max_tokens, heads, d]"),
        Ptr("v_out", "Out"),
        Ptr("block_tables", "const void", "[sequences, ...], pages, rows table_stride apart; list 0"),
        Ptr("seq_lens", "const void", "[sequences]; list 1"),
        I64("sides"),
        I64("max_tokens"),
        I64("table_stride"),
        *CACHE,
    ),
    tactics=TACTICS,
    rejects=rejects,
    specialise=specialise,
    geometry=geometry,
    bind=_bind,
)

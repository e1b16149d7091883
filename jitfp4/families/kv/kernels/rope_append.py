"""The kernel that rotates queries and keys and appends keys and values to a cache, behind their projection."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import product
from typing import Any, NamedTuple

import torch

from jitfp4.arch import Arch
from jitfp4.dtypes import HALVES
from jitfp4.errors import ArgumentError
from jitfp4.families.kv.launches import CacheSpec, steps
from jitfp4.formats import DType
from jitfp4.kernel import Kernel, Plan
from jitfp4.layouts import ceil_div
from jitfp4.operation import Written
from jitfp4.selection import Row, Table
from jitfp4.spec import F32, I64, Geometry, Ptr

UNIT = 16  # elements of a lane
HEAD_DIMS = (64, 80, 96, 112, 128, 192, 256)
ROTARY = 32  # rotated elements come in multiples of it


class CacheType(StrEnum):
    """What a cache holds: NVFP4 with block scales, E4M3, or 16-bit floats as the input."""

    NVFP4 = "nvfp4"
    E4M3 = "e4m3"
    HALF = "half"


class Arguments(NamedTuple):
    """Queries, keys and values [tokens, heads, d]; caches [pages, tokens, heads, bytes] as uint8, of equal strides.

    ``k_scale`` and ``v_scale`` are decode scales, or None: then ``k_factor`` and ``v_factor``. ``interleaved`` is the
    side (0 for K, 1 for V) whose block scales are interleaved by 4 tokens, or another number.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    q_norm_weight: torch.Tensor | None
    k_norm_weight: torch.Tensor | None
    cos_sin_cache: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    query_out: Written
    k_cache: Written
    v_cache: Written
    k_sf: Written | None
    v_sf: Written | None
    k_factor: float
    v_factor: float
    eps: float
    weight_bias: float
    is_neox: bool
    interleaved: int
    enable_pdl: bool | None
    names: str


class Problem(NamedTuple):
    """``rows`` heads of ``d`` elements: of queries, keys and values together."""

    in_dtype: DType
    cache: CacheType
    d: int
    rows: int


@dataclass(frozen=True, slots=True)
class Tactic:
    """The threads of a CTA."""

    threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeAppendSpec(CacheSpec):
    """A row has ``units`` of 16 elements, and a lane for each."""

    in_dtype: DType
    cache: CacheType
    units: int
    threads: int

    def __post_init__(self) -> None:
        for name, allowed in (("units", tuple(d // UNIT for d in HEAD_DIMS)), ("threads", (64, 128, 256))):
            if getattr(self, name) not in allowed:
                raise ArgumentError(name, getattr(self, name), f"one of {allowed}")

    @property
    def lanes(self) -> int:
        """Neighbouring lanes that share a row: a power of two, so that no row is in two warps."""
        return lanes_of(self.units)


def lanes_of(units: int) -> int:
    """The smallest power of two that is at least ``units``."""
    return 1 << (units - 1).bit_length()


TACTICS = (Tactic(64), Tactic(128), Tactic(256))
TABLE = Table((Row(Tactic(64), {"rows": 4096}), Row(Tactic(256))), measured=None)


def problem(arguments: Arguments) -> Problem:
    """The problem of a call."""
    tokens, heads, d = arguments.query.shape
    size = arguments.k_cache.shape[-1]
    cache = CacheType.HALF if size == 2 * d else CacheType.E4M3 if size == d else CacheType.NVFP4
    rows = tokens * (heads + 2 * arguments.key.shape[1])
    return Problem(HALVES[arguments.query.dtype], cache, d, rows)


def problems(_arch: Arch) -> Iterator[Problem]:
    """Few and many rows of every kind, of the usual sizes, and of one that does not fill its lanes."""
    for dtype, cache, d, rows in product(HALVES.values(), CacheType, (64, 128, 256), (64, 1 << 16)):
        yield Problem(dtype, cache, d, rows)
    yield Problem(DType.BF16, CacheType.NVFP4, 96, 64)


def specialise(problem: Problem, tactic: Tactic) -> RopeAppendSpec:
    """The spec of a tactic for a problem."""
    return RopeAppendSpec(
        in_dtype=problem.in_dtype,
        cache=problem.cache,
        units=problem.d // UNIT,
        threads=tactic.threads,
    )


def rejects(_problem: Problem, _tactic: Tactic, _arch: Arch) -> None:
    """Every tactic can run every problem."""


def geometry(problem: Problem, tactic: Tactic, _arch: Arch) -> Geometry:
    """Grid: x over rows."""
    rows = tactic.threads // lanes_of(problem.d // UNIT)
    return Geometry(grid=(ceil_div(problem.rows, rows), 1, 1), block=(tactic.threads, 1, 1))


def _bind(arguments: Arguments, _: Plan) -> dict[str, Any]:
    strides = {
        f"{name}_{step}": size
        for name, tensor in (("q", arguments.query), ("k", arguments.key), ("v", arguments.value))
        for step, size in zip(("token", "head"), steps(tensor), strict=True)
    }
    sf = (0, 0, 0) if arguments.k_sf is None else steps(arguments.k_sf)
    lists = (arguments.positions, arguments.slot_mapping)
    return {
        "q": arguments.query,
        "k": arguments.key,
        "v": arguments.value,
        "q_weight": arguments.q_norm_weight,
        "k_weight": arguments.k_norm_weight,
        "cos_sin": arguments.cos_sin_cache,
        "positions": arguments.positions,
        "slots": arguments.slot_mapping,
        "k_scale": arguments.k_scale,
        "v_scale": arguments.v_scale,
        "q_out": arguments.query_out,
        "k_cache": arguments.k_cache,
        "v_cache": arguments.v_cache,
        "k_sf": arguments.k_sf,
        "v_sf": arguments.v_sf,
        "tokens": arguments.query.shape[0],
        "q_heads": arguments.query.shape[1],
        "kv_heads": arguments.key.shape[1],
        **strides,
        "max_position": arguments.cos_sin_cache.shape[0],
        "rotary": arguments.cos_sin_cache.shape[1],
        "num_pages": arguments.k_cache.shape[0],
        "page_size": arguments.k_cache.shape[1],
        **dict(zip(("data_page", "data_token", "data_head"), steps(arguments.k_cache), strict=True)),
        **dict(zip(("sf_page", "sf_token", "sf_head"), sf, strict=True)),
        "is_neox": int(arguments.is_neox),
        "interleaved_side": arguments.interleaved,
        "wide_lists": sum(1 << i for i, x in enumerate(lists) if x.dtype == torch.int64),
        "k_factor": arguments.k_factor,
        "v_factor": arguments.v_factor,
        "eps": arguments.eps,
        "weight_bias": arguments.weight_bias,
    }


KERNEL = Kernel(
    name="kv/rope_append",
    spec=RopeAppendSpec,
    params=(
        Ptr("q", "const In", "[tokens, q_heads, d], d contiguous"),
        Ptr("k", "const In", "[tokens, kv_heads, d]"),
        Ptr("v", "const In"),
        Ptr("q_weight", "const In", "[d]; null without a norm"),
        Ptr("k_weight", "const In"),
        Ptr("cos_sin", "const float", "[max_position, rotary]: cosines, then sines"),
        Ptr("positions", "const void", "[tokens]; list 0"),
        Ptr("slots", "const void", "[tokens]; list 1"),
        Ptr("k_scale", "const float", "[1], decode; null: k_factor"),
        Ptr("v_scale", "const float"),
        Ptr("q_out", "In", "[tokens, q_heads, d]; may be q"),
        Ptr("k_cache", "uint8", "[pages, tokens, kv_heads, d in bytes]"),
        Ptr("v_cache", "uint8"),
        Ptr("k_sf", "uint8", "[pages, tokens, kv_heads, d/16], E4M3, or null"),
        Ptr("v_sf", "uint8"),
        I64("tokens"),
        I64("q_heads"),
        I64("kv_heads"),
        I64("q_token", "elements from one to the next"),
        I64("q_head"),
        I64("k_token"),
        I64("k_head"),
        I64("v_token"),
        I64("v_head"),
        I64("max_position"),
        I64("rotary", "elements of a row that are rotated, a multiple of 32"),
        I64("num_pages"),
        I64("page_size"),
        I64("data_page", "bytes from one to the next, in both sides"),
        I64("data_token"),
        I64("data_head"),
        I64("sf_page"),
        I64("sf_token"),
        I64("sf_head"),
        I64("is_neox", "whether elements rotary / 2 apart are pairs, and not neighbours"),
        I64("interleaved_side", "0 for K, 1 for V, else neither"),
        I64("wide_lists", "bit i: list i has entries of 8 bytes, not 4"),
        F32("k_factor"),
        F32("v_factor"),
        F32("eps"),
        F32("weight_bias", "of both norms"),
    ),
    tactics=TACTICS,
    rejects=rejects,
    specialise=specialise,
    geometry=geometry,
    bind=_bind,
)

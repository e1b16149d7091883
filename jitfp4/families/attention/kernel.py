"""The decode kernels of attention: what they can be specialised to, what they take, and their launch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from jitfp4.errors import ArgumentError
from jitfp4.formats import DType
from jitfp4.layouts import round_up
from jitfp4.spec import F32, I64, KernelSpec, Param, Ptr

HEAD_DIMS = (64, 128, 256)
TILE = 32  # tokens that a warp takes at a time


class Pages(StrEnum):
    """How 32 tokens lie in pages: in one, each half in one, or in any number of them."""

    WHOLE = "whole"
    HALVES = "halves"
    MANY = "many"

    @staticmethod
    def of(page: int) -> Pages:
        """For pages of ``page`` tokens."""
        return Pages.WHOLE if page % TILE == 0 else Pages.HALVES if page % (TILE // 2) == 0 else Pages.MANY


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec(KernelSpec):
    """A warp takes 32 tokens of one KV head and ``rows`` query rows at a time, ``stages`` tiles ahead.

    ``interleaved`` tells the order of V's scales; ``packed`` is for caches
    whose rows follow each other within a page and head; with ``two_tables``, K and V have pages of their own;
    ``min_ctas`` CTAs of ``warps`` warps fit an SM; ``head_warps`` of them
    take the same tokens for different KV heads.
    """

    q_dtype: DType
    out_dtype: DType
    head_dim: int
    rows: int
    interleaved: bool
    pages: Pages
    packed: bool
    two_tables: bool
    warps: int
    head_warps: int
    stages: int
    min_ctas: int

    @property
    def stage_bytes(self) -> int:
        """Shared memory of a tile: K and V, their scales, which tokens have no page."""
        return 2 * TILE * (self.head_dim // 2 + self.head_dim // 16) + 16

    @property
    def part_bytes(self) -> int:
        """Shared memory of a warp's state."""
        return 4 * self.rows * (self.head_dim + 4 + 2)

    @property
    def shared_bytes(self) -> int:
        """Shared memory that a CTA uses: rings, the states of its warps, where its share begins."""
        return round_up(self.warps * (self.stages * self.stage_bytes + self.part_bytes) + (2 * 44 + 4) * self.warps + 8 + 1, 16)


PARAMS: tuple[Param, ...] = (
    Ptr("q", "const Query", "[tokens, heads, D], 16-byte aligned rows"),
    Ptr("k", "const uint8", "16-byte aligned rows"),
    Ptr("v", "const uint8"),
    Ptr("k_scales", "const uint8", "rows aligned to D / 16 bytes"),
    Ptr("v_scales", "const uint8"),
    Ptr("tables", "const int32", "[batch, max_pages], twice with v_table"),
    Ptr("seq_lens", "const int32", "[batch]"),
    Ptr("cum_q", "const int32", "[batch + 1]; null: q_len of each request"),
    Ptr("sinks", "const float", "[heads] or null"),
    Ptr("bmm1_tensor", "const float", "[1] or null: multiplies bmm1"),
    Ptr("bmm2_tensor", "const float", "[1] or null: multiplies bmm2"),
    Ptr("out", "Out", "[tokens, heads, D]"),
    Ptr("lse", "float", "[tokens, heads] or null; base 2"),
    Ptr("counters", "uint32", "[grid], zero between launches"),
    Ptr("partials", "float", "[grid, 2, head_warps * rows * (D + 2)]"),
    F32("bmm1"),
    F32("bmm2"),
    I64("batch"),
    I64("kv_heads"),
    I64("group", "heads / kv_heads"),
    I64("q_len"),
    I64("total_q", "tokens of q"),
    I64("num_pages"),
    I64("page", "tokens"),
    I64("max_pages", "columns of tables"),
    I64("window_left", "negative: none"),
    I64("q_token_stride", "elements"),
    I64("q_head_stride"),
    I64("k_page_stride", "bytes, as all of the cache"),
    I64("k_token_stride"),
    I64("k_head_stride"),
    I64("v_page_stride"),
    I64("v_token_stride"),
    I64("v_head_stride"),
    I64("k_scales_page_stride"),
    I64("k_scales_token_stride"),
    I64("k_scales_head_stride"),
    I64("v_scales_page_stride"),
    I64("v_scales_token_stride"),
    I64("v_scales_head_stride"),
    I64("table_stride", "elements"),
    I64("v_table", "elements from a request's K pages to its V pages"),
)

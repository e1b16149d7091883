"""What selection sees of a call."""

from __future__ import annotations

from typing import NamedTuple

from jitfp4.formats import DType

HEAD_DIM, PAGE = 128, 64
MOST_SPLITS = 32
TAG_WORDS = 8


class Problem(NamedTuple):
    """A dense model: its sizes, in elements and heads, and what it has.

    ``bias``: of queries, keys and values; ``head_norms``: RMSNorm of each query and key; ``interleaved``: scales of
    values in the cache.
    """

    hidden: int
    heads: int
    kv_heads: int
    inter: int
    dtype: DType = DType.BF16
    bias: bool = False
    head_norms: bool = False
    interleaved: bool = False

    @property
    def products(self) -> tuple[tuple[int, int], ...]:
        """(n, k) of the products of a layer, in the order of their use."""
        q = self.heads * HEAD_DIM
        qkv = q + 2 * self.kv_heads * HEAD_DIM
        return (qkv, self.hidden), (self.hidden, q), (2 * self.inter, self.hidden), (self.hidden, self.inter)

    @property
    def state_words(self) -> int:
        """Words of 8 bytes through which CTAs pass values: pairs of them, and parts of attention."""
        pairs = (2 * self.hidden + self.products[0][0] + self.heads * HEAD_DIM + self.inter) // 2
        return TAG_WORDS + pairs + MOST_SPLITS * self.heads * (HEAD_DIM + 2)

"""Problems of a layer of experts: what the choice of tactics sees."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from jitfp4.arch import Arch
from jitfp4.dtypes import HALVES
from jitfp4.formats import BlockFormat, DType
from jitfp4.layouts import ceil_div
from jitfp4.weight import TILE_ROWS

DTYPES = HALVES
FEW = 16  # assignments up to which each CTA of any kernel finds its rows by itself, without a list
COUNTER_ROWS = 16  # rows of the hidden state that at least share a counter of finished slots


class Product(StrEnum):
    """Which product of a layer: with gates, without, and back to the hidden size."""

    GATED = "gated"
    PLAIN = "plain"
    DOWN = "down"


class RouteProblem(NamedTuple):
    """ids [tokens, slots] of ``experts`` experts of this GPU."""

    tokens: int
    slots: int
    experts: int

    @property
    def assignments(self) -> int:
        return self.tokens * self.slots


class GatherProblem(NamedTuple):
    """Rows of x [tokens, .] in the order of a list of ``items``, each of up to ``item_rows`` rows, or in E4M3."""

    dtype: DType
    tokens: int
    slots: int
    items: int
    item_rows: int
    fp8: bool = False


class Problem(NamedTuple):
    """A product of a layer: rows of activations, ``slots`` for each token, by weights [n, k] of ``experts`` experts.

    With ``item_rows`` above 0, experts/route has made a list of items with up to so many rows of one expert. With 0,
    each CTA finds its rows by itself. With ``fp8`` the operands of the product are E4M3.
    """

    product: Product
    dtype: DType
    format: BlockFormat
    tokens: int
    slots: int
    experts: int
    n: int
    k: int
    item_rows: int
    fp8: bool = False

    @property
    def assignments(self) -> int:
        return self.tokens * self.slots

    @property
    def is_few(self) -> bool:
        return self.assignments <= FEW

    @property
    def items(self) -> int:
        """The most items that the list may have; without a list, one for each assignment."""
        if self.item_rows == 0:
            return self.assignments
        return most_items(self.assignments, self.experts, self.item_rows)

    @property
    def rows_per_expert(self) -> float:
        """Rows of an expert, if assignments spread evenly over as many as they can."""
        return self.assignments / min(self.experts, max(1, self.assignments))

    def tiles_per_sm(self, arch: Arch) -> float:
        """Tiles of 64 rows of the weights that are read, for each SM."""
        return min(self.experts, self.assignments) * ceil_div(self.n, TILE_ROWS) / arch.num_sms


def most_items(assignments: int, experts: int, item_rows: int) -> int:
    """The most items of up to ``item_rows`` rows of one expert into which assignments can fall."""
    return assignments if assignments <= experts else experts + (assignments - experts) // item_rows


def counters(tokens: int, hidden: int) -> int:
    """Counters of finished slots: for each token, one for the rows that a CTA has."""
    return tokens * ceil_div(hidden, COUNTER_ROWS)

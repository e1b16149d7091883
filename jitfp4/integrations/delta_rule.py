"""What layers of gated delta rules have in common in engines: what kernels are for, gates of prompts, what to load."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from jitfp4.families.conv.operation import CONV
from jitfp4.families.conv.problem import Problem as ConvProblem
from jitfp4.families.gdn.operation import GATED_DELTA_RULE
from jitfp4.families.gdn.parts_operation import PREFILL_JOIN_OPERATION, PREFILL_PARTS_OPERATION
from jitfp4.families.gdn.prefill_arguments import JoinProblem, PartsProblem, PrefillProblem, ProductsProblem
from jitfp4.families.gdn.prefill_operation import GATED_DELTA_RULE_PREFILL
from jitfp4.families.gdn.problem import Problem as RuleProblem
from jitfp4.families.gdn.problem import StateLayout
from jitfp4.families.gdn.products_operation import PREFILL_PRODUCTS_OPERATION
from jitfp4.families.norm.kernels.rmsnorm import Problem as NormProblem
from jitfp4.families.norm.plain import RMSNORM
from jitfp4.formats import DType
from jitfp4.weight import TILE_ROWS, Fp4Weight

SILU = ("silu", "swish")
_HEAD_DIMS = ((64, 64), (128, 128))
_WIDTHS = (2, 3, 4)
_LEAST, _MULTIPLE = 64, 16  # of the elements of a normalised row


class Shape(NamedTuple):
    """Heads of queries and of keys, and of values, as many as a rank has; and the convolution's taps."""

    heads: int
    value_heads: int
    head_dim: int
    value_dim: int
    width: int

    @property
    def served(self) -> bool:
        """Whether there are kernels for it."""
        return (self.head_dim, self.value_dim) in _HEAD_DIMS and self.width in _WIDTHS

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Of queries, keys and values of a token."""
        keys = self.heads * self.head_dim
        return keys, keys, self.value_heads * self.value_dim

    @property
    def of_a_head(self) -> tuple[int, int, int, int]:
        """Rows of a projection to queries, keys, values and gates that has all of a head side by side."""
        values = self.value_heads // self.heads * self.value_dim
        return self.head_dim, self.head_dim, values, values

    def split(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values [.., heads, d] of rows that have them side by side."""
        q, k, v = rows.split(self.sizes, -1)
        q, k = (part.unflatten(-1, (self.heads, self.head_dim)) for part in (q, k))
        return q, k, v.unflatten(-1, (self.value_heads, self.value_dim))

    def needed(
        self, dtype: DType, state_dtype: DType, requests: int, tokens: int, drafted: int = 0
    ) -> Iterator[tuple[Any, Any, str, int]]:
        """What load_growing() needs for steps of ``requests`` and ``tokens`` of all together, ``drafted`` of each."""
        conv = ConvProblem(dtype, self.width, True, True, 1, 1, sum(self.sizes))
        yield CONV, conv, "sequences", requests
        yield CONV, conv._replace(by_sequence=False), "tokens", tokens
        for count in sorted({1, 1 + drafted}):
            rule = RuleProblem(
                dtype=dtype,
                state_dtype=state_dtype,
                state_layout=StateLayout.VK,
                head_dim=self.head_dim,
                value_dim=self.value_dim,
                tokens=count,
                batch=1,
                value_heads=self.value_heads,
                store_steps=count > 1,
                step_slots=count > 1,
            )
            yield GATED_DELTA_RULE, rule, "batch", requests
        prompts = PrefillProblem(dtype, self.head_dim, self.value_dim, 1, 1, self.value_heads)
        products = ProductsProblem(dtype, self.head_dim, 1, 1, self.value_heads)
        yield PREFILL_PRODUCTS_OPERATION, products, "tokens", tokens
        if prompts._replace(tokens=tokens).few_and_long:
            parts = PartsProblem(dtype, self.head_dim, self.value_dim, 1, 1, self.value_heads, part_chunks=1)
            yield PREFILL_PARTS_OPERATION, parts, "tokens", tokens
            join = JoinProblem(self.head_dim, self.value_dim, 1, self.value_heads)
            yield PREFILL_JOIN_OPERATION, join, "sequences", requests
        yield GATED_DELTA_RULE_PREFILL, prompts, "tokens", tokens
        yield GATED_DELTA_RULE_PREFILL, prompts._replace(tokens=tokens), "sequences", requests


def by_part(heads: int, sizes: Sequence[int]) -> torch.Tensor:
    """Where each row is when all heads' first parts come first: from heads of parts of ``sizes`` rows."""
    places = torch.arange(heads * sum(sizes), device="cpu").view(heads, -1).split(list(sizes), -1)
    return torch.cat([part.flatten() for part in places])


def in_order(weight: Fp4Weight, rows: torch.Tensor) -> Fp4Weight:
    """A weight with its rows in another order, which moves whole tiles of them."""
    places = rows.to(weight.data.device)
    tiles = places[::TILE_ROWS] // TILE_ROWS
    row_scale = None if weight.row_scale is None else weight.row_scale[places]
    return replace(weight, data=weight.data[tiles], row_scale=row_scale)


def gated_norm(dtype: DType, size: int, rows: int) -> tuple[Any, Any, str, int]:
    """What load_growing() needs for ``rows`` before a gate."""
    return RMSNORM, NormProblem(dtype, False, True, 1, size), "m", rows


def is_normalised(size: int) -> bool:
    """Whether there are kernels for rows of so many elements."""
    return size >= _LEAST and size % _MULTIPLE == 0


def gates_of_prompts(
    A_log: torch.Tensor,  # noqa: N803 - the engines' name
    a: torch.Tensor,
    dt_bias: torch.Tensor,
    b: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The factors by which tokens let states decay, and the update gates, float32, of a and b [tokens, heads]."""
    rate = A_log.float().exp() * functional.softplus(a.float() + dt_bias.float())
    return (-rate).exp(), b.float().sigmoid().contiguous()

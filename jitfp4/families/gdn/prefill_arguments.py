"""The arguments of the operations behind chunk_gated_delta_rule(), and what selection sees of them."""

from __future__ import annotations

from typing import NamedTuple

import torch

from jitfp4.formats import DType
from jitfp4.operation import Written

CHUNK = 64  # tokens that are taken at once
LOWER_BYTES = 10 * 16 * 16 * 2  # Lower in templates/gdn/prefill_chunk.cuh.j2
_SPANS_BYTES = 4 * CHUNK * (16 + 4)  # of 16 x 16 blocks in rows of 20
INVERTING_BYTES = 2 * LOWER_BYTES + _SPANS_BYTES  # Inverting in prefill_inverse.cuh.j2
OF_TOKENS_BYTES = _SPANS_BYTES + (6 + 4 + 4) * CHUNK * 4  # OfTokens
PRODUCTS_BYTES = 2 * LOWER_BYTES + 3 * CHUNK * 4 + 16  # ChunkProducts


class PrefillArguments(NamedTuple):
    """The arguments of chunk_gated_delta_rule().

    ``in_place``: the initial state is ``final_state``'s, and ``initial_state`` None. ``state_indices``: the slot of
    each sequence in the pools of states; None: slot n for sequence n.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor | None
    beta: torch.Tensor | None
    scale: float
    initial_state: torch.Tensor | None
    final_state: Written | None
    cu_seqlens: torch.Tensor
    state_indices: torch.Tensor | None
    state_checkpoints: Written | None
    checkpoint_cu_starts: torch.Tensor | None
    checkpoint_every_n_tokens: int
    output: Written
    in_place: bool
    use_qk_l2norm: bool
    enable_pdl: bool | None
    names: str


class ProductsArguments(NamedTuple):
    """``products``: [places of chunks * heads * PRODUCTS_BYTES] uint8, with one ChunkProducts for each."""

    q: torch.Tensor
    k: torch.Tensor
    g: torch.Tensor | None
    beta: torch.Tensor | None
    scale: float
    cu_seqlens: torch.Tensor
    products: Written
    heads: int
    use_qk_l2norm: bool
    enable_pdl: bool | None


class PartsArguments(NamedTuple):
    """``part_states``: [places of parts, heads, V + K, K] float32, parts of ``part_chunks`` chunks of a sequence."""

    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor | None
    beta: torch.Tensor | None
    cu_seqlens: torch.Tensor
    products: torch.Tensor
    part_states: Written
    part_chunks: int
    use_qk_l2norm: bool
    enable_pdl: bool | None


class JoinArguments(NamedTuple):
    """``part_states``: as of PartsArguments; ``pool``: slots of ``initial_state``; ``tokens``: of all sequences."""

    part_states: Written
    cu_seqlens: torch.Tensor
    initial_state: torch.Tensor | None
    state_indices: torch.Tensor | None
    part_chunks: int
    tokens: int
    pool: int
    enable_pdl: bool | None


class PrefillProblem(NamedTuple):
    """The properties of a call that selection depends on; ``heads``: those of the output."""

    dtype: DType
    head_dim: int
    value_dim: int
    tokens: int
    sequences: int
    heads: int

    @property
    def states(self) -> int:
        """Heads of all sequences."""
        return self.sequences * self.heads

    @property
    def few_and_long(self) -> bool:
        """Whether the states leave most of an H200 idle for so long that it pays to divide the sequences."""
        return self.states <= 16 and self.tokens >= 32 * CHUNK * self.sequences


class PartsProblem(NamedTuple):
    """The same of the kernel for parts of sequences."""

    dtype: DType
    head_dim: int
    value_dim: int
    tokens: int
    sequences: int
    heads: int
    part_chunks: int


class JoinProblem(NamedTuple):
    """The same of the kernel that joins parts."""

    head_dim: int
    value_dim: int
    sequences: int
    heads: int


class ProductsProblem(NamedTuple):
    """The same of a call's first kernel."""

    dtype: DType
    head_dim: int
    tokens: int
    sequences: int
    heads: int


def places(tokens: int, sequences: int, size: int = CHUNK) -> int:
    """Places of chunks, or of parts of ``size`` tokens: a sequence may leave one before the next sequence's empty."""
    return tokens // size + sequences


def chunk_place(first: int, sequence: int, size: int = CHUNK) -> int:
    """The place of the first chunk, or part, of a sequence whose first token is ``first``."""
    return first // size + sequence

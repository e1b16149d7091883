"""Layers of experts that FlashInfer's functions are given with each call: prepared at the first one, and remembered.

An engine keeps weights and scales in the order of FlashInfer's kernels, and jitfp4's read them in another one. A layer
is known by the memory and version of all that it is made of, for as long as that memory lives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from jitfp4.errors import ArgumentError, renamed
from jitfp4.families.experts import Fp4Experts, fp4_experts
from jitfp4.tensors import check_dtype


class ActivationType(IntEnum):
    """FlashInfer's number of an activation; those that jitfp4 has."""

    Swiglu = 3
    SwigluBias = 5
    Relu2 = 6

    def __repr__(self) -> str:
        return f"ActivationType.{self.name}"


class Layer(NamedTuple):
    """Prepared weights, with the constants of their activation."""

    experts: Fp4Experts
    activation: str
    alpha: float | None
    beta: float | None
    limit: float | None
    expert_map: torch.Tensor | None

    def run(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor | None,
        output: torch.Tensor | None,
        enable_pdl: bool | None,
        names: Mapping[str, str],
    ) -> list[torch.Tensor]:
        """FlashInfer's result: a list of the output alone. ``names``: of the caller's arguments, for errors."""
        try:
            out = fp4_experts(
                x,
                self.experts,
                ids,
                weights,
                activation=self.activation,
                swiglu_alpha=self.alpha,
                swiglu_beta=self.beta,
                swiglu_limit=self.limit,
                expert_map=self.expert_map,
                out=output,
                enable_pdl=enable_pdl,
            )
        except ArgumentError as error:
            raise renamed(error, names) from None
        return [out]


_layers: dict[tuple[Any, ...], tuple[Layer, tuple[StorageWeakRef, ...]]] = {}


def remembered(
    name: str, tensors: Sequence[torch.Tensor | None], others: tuple[Any, ...], prepare: Callable[[], Layer]
) -> Layer:
    """The layer of these tensors and other values, from memory if it is there. ``name``: of the first argument."""
    key = (*map(_identity, tensors), *others)
    if (found := _layers.get(key)) is not None and not any(map(StorageWeakRef.expired, found[1])):
        return found[0]
    for other, (_, storages) in [*_layers.items()]:
        if any(map(StorageWeakRef.expired, storages)):
            del _layers[other]
    first = tensors[0]
    if first is not None and first.is_cuda and torch.cuda.is_current_stream_capturing():
        raise ArgumentError(name, "weights without a call before this capture", "known weights")
    made = prepare()
    _layers[key] = made, tuple(StorageWeakRef(tensor.untyped_storage()) for tensor in tensors if tensor is not None)
    return made


def forget_weights() -> None:
    """Free what is remembered of layers of experts. The next call prepares them again."""
    _layers.clear()


def _identity(tensor: torch.Tensor | None) -> tuple[Any, ...] | None:
    """What tells a tensor from others while its memory lives; the version changes with what is written into it."""
    if tensor is None:
        return None
    version = 0 if tensor.is_inference() else tensor._version
    return tensor.data_ptr(), version, tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.device


def check_activation(activation_type: int) -> bool:
    """Whether an activation has gates."""
    if activation_type not in list(ActivationType):
        raise ArgumentError("activation_type", activation_type, ", ".join(map(repr, ActivationType)))
    return activation_type != ActivationType.Relu2


def check_kind(why: str, allowed: Mapping[str, Any], **given: Any) -> None:
    """That arguments have the one value that is allowed: else they are of a kind of layer that jitfp4 lacks."""
    for name, value in given.items():
        if value is not allowed[name] and value != allowed[name]:
            got = "a tensor" if isinstance(value, torch.Tensor) else repr(value)
            raise ArgumentError(name, got, f"{allowed[name]!r}: {why}")


def one_value(name: str, values: torch.Tensor, experts: int, nearly: float = 0.0) -> float:
    """The value that all experts have, or nearly have."""
    check_dtype(name, values, (torch.float32,))
    found = values.unique().tolist()
    if tuple(values.shape) != (experts,) or found[-1] - found[0] > nearly * abs(found[-1]):
        raise ArgumentError(name, f"shape {tuple(values.shape)}, values {found[:4]}", f"({experts},) of one value")
    return float(found[0])


def map_of_rank(experts: int, first: int, own: int, device: torch.device) -> torch.Tensor | None:
    """Of ``experts`` experts, ``own`` are on this rank, from ``first`` on; None: all."""
    if own == experts:
        return None
    expert_map = torch.full((experts,), -1, dtype=torch.int32, device=device)
    expert_map[first : first + own] = torch.arange(own, device=device)
    return expert_map

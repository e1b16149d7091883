"""Decorators of public functions: they check the types of arguments, and make repeated calls fast."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from types import NoneType, UnionType
from typing import Any, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

import torch

from jitfp4.errors import ArgumentError, ArgumentTypeError
from jitfp4.layouts import SfLayout
from jitfp4.replay import replayed
from jitfp4.tensors import check_strided

P = ParamSpec("P")
R = TypeVar("R")

_OVER = (2.0 - 2.0**-24) * 2.0**127  # from here on float32 is infinite
_MOST_BITS = 63  # of an int without its sign: an operator takes 64-bit ints

# By annotation: the exact types that a value may have, and their name in an error.
_ALLOWED: dict[Any, tuple[tuple[type, ...], str]] = {
    NoneType: ((NoneType,), "None"),
    bool: ((bool,), "a bool"),
    int: ((int,), "an int"),
    float: ((float, int), "a finite number"),
    str: ((str,), "a str"),
    torch.dtype: ((torch.dtype,), "a torch.dtype"),
    SfLayout: ((SfLayout, int), "an SfLayout or its int"),
    torch.Tensor: ((), "a torch.Tensor"),
}


def public(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a public function of tensors and flags with ``checked`` and ``replayed``."""
    return replayed(checked(function))


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function so that it checks its arguments. A function with other arguments than tensors and flags uses
    this alone, and calls one that is ``public``.

    An argument of a type that its annotation does not name is an ArgumentTypeError (a bool is no number, and a number
    is no bool), and so is a sparse, quantized or negated tensor. A number that is NaN, infinite or too large for
    float32 is an ArgumentError, and so is an int of more than 64 bits. Of arguments whose annotations name other types,
    only tensors are looked at.
    """
    hints = get_type_hints(function)
    names = list(inspect.signature(function).parameters)
    rules = {name: rule for name in names if (rule := _rule(hints.get(name, object))) is not None}

    known: dict[tuple[Any, ...], tuple[_Watched, ...]] = {}  # by the types of arguments that were found right

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        kinds = () if torch.compiler.is_dynamo_compiling() else (*map(type, (*args, *kwargs.values())), *kwargs)
        if kinds and kinds in known:  # the first for torch.compile, which guards the size of known
            values: tuple[Any, ...] = (*args, *kwargs.values())
            for number, name, rule in known[kinds]:
                value = values[number]
                if rule is not None:
                    _check(name, value, *rule)
                elif value.layout is not _strided or value.is_neg() or value.is_quantized:
                    check_strided(name, value)
            return function(*args, **kwargs)
        given = (*zip(names, args, strict=False), *kwargs.items())
        for name, value in given:
            if name in rules:
                _check(name, value, *rules[name])
            elif isinstance(value, torch.Tensor):
                check_strided(name, value)
        if kinds:
            known[kinds] = tuple(_watched(given, rules))
        return function(*args, **kwargs)

    return call


_Rule = tuple[frozenset[type], bool, str]
_Watched = tuple[int, str, _Rule | None]
"""The number and the name of an argument whose value is looked at in each call; for a tensor, its layout alone."""
_strided = torch.strided


def _watched(given: Sequence[tuple[str, Any]], rules: dict[str, _Rule]) -> Iterator[_Watched]:
    for number, (name, value) in enumerate(given):
        if isinstance(value, torch.Tensor):
            yield number, name, None
        elif name in rules and type(value) in (int, float):
            yield number, name, rules[name]


def _rule(hint: Any) -> _Rule | None:
    """The types that a value may have, whether it may be a tensor, and the words of an error for both."""
    members = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    if any(member not in _ALLOWED for member in members):
        return None
    types = frozenset(kind for member in members for kind in _ALLOWED[member][0])
    return types, torch.Tensor in members, " or ".join(_ALLOWED[member][1] for member in members)


def _check(name: str, value: Any, types: frozenset[type], may_be_tensor: bool, words: str) -> None:
    if may_be_tensor and isinstance(value, torch.Tensor):
        check_strided(name, value)
        return
    if type(value) not in types and not (SfLayout in types and isinstance(value, IntEnum)):  # FlashInfer's SfLayout
        raise ArgumentTypeError(name, f"{type(value).__name__} {value!r}"[:100], words)
    if torch.compiler.is_dynamo_compiling():
        return
    if float in types and value is not None and not _is_finite(value):
        raise ArgumentError(name, f"{value}"[:40] if type(value) is float else "an int of over 1000 bits", words)
    if int in types and type(value) is int and value.bit_length() > _MOST_BITS:
        raise ArgumentError(name, f"an int of {value.bit_length()} bits", words)


def _is_finite(number: float) -> bool:
    """As float32, which is what kernels take."""
    try:
        return abs(float(number)) < _OVER
    except OverflowError:  # an int beyond the range of float64
        return False

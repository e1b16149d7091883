"""Checks of types: a call like an earlier one is still looked at where its values count."""

from __future__ import annotations

import math

import pytest
import torch

from jitfp4.errors import ArgumentError, ArgumentTypeError
from jitfp4.public import checked


@checked
def _function(x: torch.Tensor, factor: float = 1.0, *, rows: int = 1, name: str = "", other: object = None) -> object:
    return x, factor, rows, name, other


@pytest.mark.parametrize("earlier", [0, 1, 3])
def test_every_call_is_checked(earlier: int) -> None:
    x = torch.ones(2)
    for _ in range(earlier):
        assert _function(x, 2.0, rows=3) == (x, 2.0, 3, "", None)
        _function(x, 2.0, name="a", other=[])
    for error, argument, call in (
        (ArgumentError, "factor", lambda: _function(x, math.nan, rows=3)),
        (ArgumentError, "rows", lambda: _function(x, 2.0, rows=1 << 64)),
        (ArgumentTypeError, "x", lambda: _function(x.to_sparse(), 2.0, rows=3)),
        (ArgumentTypeError, "factor", lambda: _function(x, True, rows=3)),
        (ArgumentTypeError, "rows", lambda: _function(x, 2.0, rows=3.0)),
        (ArgumentTypeError, "name", lambda: _function(x, 2.0, name=3)),
        (ArgumentTypeError, "name", lambda: _function(x, 2.0, other=[], name=[])),
    ):
        with pytest.raises(error, match=argument):
            call()


def test_names_and_not_places_tell_what_a_keyword_is() -> None:
    x = torch.ones(2)
    assert _function(x, name="a", rows=2) == (x, 1.0, 2, "a", None)
    with pytest.raises(ArgumentTypeError, match="name"):
        _function(x, name=2, rows=2)

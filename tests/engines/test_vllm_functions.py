"""Functions that have vLLM's names have its parameters, and its calls fit them."""

from __future__ import annotations

import inspect
import json
from typing import Any

import pytest

import jitfp4
from tests.engines.vllm_functions import FIXTURE, NAMES

RECORDED = json.loads(FIXTURE.read_text())
OWN = {"enable_pdl"}
"""Keyword-only parameters that jitfp4 has beyond vLLM's."""


@pytest.mark.parametrize("name", NAMES)
def test_parameters_are_those_of_vllm(name: str) -> None:
    ours = inspect.signature(getattr(jitfp4, name)).parameters
    found = [
        [word, None if one.default is one.empty else repr(one.default)]
        for word, one in ours.items()
        if one.kind is one.POSITIONAL_OR_KEYWORD
    ]
    assert found == [[word, default] for word, _, default in RECORDED["signatures"][name]]
    assert {word for word, one in ours.items() if one.kind is one.KEYWORD_ONLY} == OWN


@pytest.mark.parametrize(
    "call", RECORDED["calls"], ids=lambda call: f"{call['file'].rpartition('/')[2]}:{call['line']}"
)
def test_the_calls_of_vllm_fit(call: dict[str, Any]) -> None:
    bound = inspect.signature(getattr(jitfp4, call["function"])).bind(*call["positional"], **call["keywords"])
    assert {"x", "weight"} <= bound.arguments.keys()

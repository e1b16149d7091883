"""Specs: canonical text, round trips, and what may not be a field."""

from __future__ import annotations

import dataclasses

import pytest

import jitfp4.families  # noqa: F401 - registers every family
from jitfp4.arch import ARCHS
from jitfp4.errors import ArgumentError
from jitfp4.registry import Family, families, lookup, register
from jitfp4.spec import Ptr

ALL = families()


@pytest.mark.parametrize("family", ALL, ids=lambda f: f.name)
def test_specs_are_finite_distinct_and_survive_json(family: Family) -> None:
    for arch in ARCHS.values():
        specs = list(family.specs(arch))
        assert len(set(specs)) == len(specs)
        for spec in specs:
            assert type(spec) is family.spec
            assert family.spec.from_fields(spec.fields()) == spec
            assert spec.json().replace(" ", "") == spec.json()


@pytest.mark.parametrize("family", ALL, ids=lambda f: f.name)
def test_no_runtime_value_is_a_field(family: Family) -> None:
    runtime = {param.name for param in family.params if not isinstance(param, Ptr)} | {
        "m",
        "n",
        "k",
        "batch",
        "rows",
        "device",
    }
    assert not runtime & {field.name for field in dataclasses.fields(family.spec)}


@pytest.mark.parametrize(
    "change",
    [
        {"sf_layout": "4x4"},
        {"in_dtype": "f64"},
        {"in_dtype": 3},
        {"blocks_per_thread": "2"},
        {"block_format": "mxfp4", "silu": True},
        {"extra": 1},
    ],
    ids=str,
)
def test_impossible_fields_are_refused(change: dict[str, object]) -> None:
    family = lookup("quantize/vector")
    good = next(iter(family.specs(ARCHS["sm_90a"]))).fields()
    with pytest.raises(ArgumentError, match="spec"):
        family.spec.from_fields(good | change)
    with pytest.raises(ArgumentError, match="spec"):
        family.spec.from_fields({})


def test_registry_finds_by_name_and_by_folder() -> None:
    assert lookup(ALL[0].name) is ALL[0]
    assert set(families("quantize")) == {family for family in ALL if family.name.startswith("quantize/")}
    for wrong in ("quant", "quantize/", "nothing"):
        with pytest.raises(ArgumentError, match="family"):
            families(wrong)
        with pytest.raises(ArgumentError, match="family"):
            lookup(wrong)


def test_a_second_registration_is_an_error() -> None:
    with pytest.raises(ArgumentError, match="not registered yet"):
        register(dataclasses.replace(ALL[0]))

"""Specs: canonical text, round trips, and what may not be a field."""

from __future__ import annotations

import dataclasses
from itertools import product

import pytest

import jitfp4.families  # noqa: F401 - registers every family
from jitfp4.arch import ARCHS
from jitfp4.errors import ArgumentError
from jitfp4.kernel import AnyKernel, kernels, lookup, register
from jitfp4.spec import Ptr

ALL = kernels()


@pytest.mark.parametrize("kernel", ALL, ids=lambda k: k.name)
def test_specs_are_finite_distinct_and_survive_json(kernel: AnyKernel) -> None:
    for arch in ARCHS.values():
        specs = list(kernel.specs(arch))
        assert len(set(specs)) == len(specs)
        for spec in specs:
            assert type(spec) is kernel.spec
            assert kernel.spec.from_fields(spec.fields()) == spec
            assert spec.json().replace(" ", "") == spec.json()


@pytest.mark.parametrize("kernel", ALL, ids=lambda k: k.name)
def test_no_runtime_value_is_a_field(kernel: AnyKernel) -> None:
    runtime = {param.name for param in kernel.params if not isinstance(param, Ptr)} | {
        "m",
        "n",
        "k",
        "batch",
        "rows",
        "device",
    }
    fields = {field.name for field in dataclasses.fields(kernel.spec)}
    if kernel.name in ("attention/decode", "attention/decode_masked"):
        fields.remove("rows")  # of query, that a warp takes at a time: 8 or 16
    if kernel.name in ("gdn/prefill", "gdn/prefill_parts", "gdn/prefill_wgmma"):
        fields.remove("rows")  # of a state, that a CTA has
    if kernel.name == "experts/router":
        fields -= {"rows", "tokens"}  # of the weight, that a CTA has, and those that it multiplies at a time
    if kernel.name.startswith("attention/"):
        fields.discard("soft_cap")  # whether there is one
    if kernel.name.startswith("quantize/"):
        fields.discard("four_over_six")  # whether there are two scales to choose from; how is a value
    assert not runtime & fields


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
    kernel = lookup("quantize/vector")
    good = next(iter(kernel.specs(ARCHS["sm_90a"]))).fields()
    with pytest.raises(ArgumentError, match="spec"):
        kernel.spec.from_fields(good | change)
    with pytest.raises(ArgumentError, match="spec"):
        kernel.spec.from_fields({})


@pytest.mark.parametrize("kernel", ALL, ids=lambda k: k.name)
def test_a_file_names_no_spec_that_no_problem_gives(kernel: AnyKernel) -> None:
    """Plans, records and tactics files: a template or the compiler might never end with such a number."""
    good = next(spec for arch in ARCHS.values() for spec in kernel.specs(arch)).fields()
    assert kernel.read_spec(good).fields() == good
    for name, wrong in product(good, (-1, 1 << 31, 10**30, "x", None, [], {})):
        with pytest.raises(ArgumentError, match="spec"):
            kernel.read_spec(good | {name: wrong})


@pytest.mark.parametrize("kernel", ALL, ids=lambda k: k.name)
def test_sizes_of_zero_are_refused_or_rendered(kernel: AnyKernel) -> None:
    arch, good = next((arch, spec.fields()) for arch in ARCHS.values() for spec in kernel.specs(arch))
    for name in [name for name, value in good.items() if type(value) is int]:
        try:
            spec = kernel.read_spec(good | {name: 0})
        except ArgumentError:
            continue
        assert kernel.render(spec, arch)


def test_registry_finds_by_name_and_by_folder() -> None:
    assert lookup(ALL[0].name) is ALL[0]
    assert set(kernels("quantize")) == {kernel for kernel in ALL if kernel.name.startswith("quantize/")}
    for wrong in ("quant", "quantize/", "nothing"):
        with pytest.raises(ArgumentError, match="kernel"):
            kernels(wrong)
        with pytest.raises(ArgumentError, match="kernel"):
            lookup(wrong)


def test_a_second_registration_is_an_error() -> None:
    with pytest.raises(ArgumentError, match="not registered yet"):
        register(dataclasses.replace(ALL[0]), lambda _arch, _which: ())

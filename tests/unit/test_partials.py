"""A partial is a header: it includes what it uses, at its top, and compiles alone, with a stub of what it takes."""

from __future__ import annotations

import re
from collections import Counter

import pytest

import jitfp4.families  # noqa: F401 - registers every kernel
from jitfp4 import nvrtc
from jitfp4.arch import Arch
from jitfp4.kernel import kernels
from jitfp4.render import render_partial, templates_dir
from tests.support.partials import USES

FOLDER = templates_dir()
PARTIALS = sorted(path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*.cuh.j2"))

SPECS = {
    "attention/products.cuh.j2": "attention/prefill_wgmma",
    "gemm/fp8_products.cuh.j2": "gemm/wide_fp8",
    "gemm/products.cuh.j2": "gemm/wide",
    "gemm/start_product.cuh.j2": "gemm/wide",
    "gemm/wide_fp8_mainloop.cuh.j2": "gemm/wide_fp8",
    "gemm/wide_mainloop.cuh.j2": "gemm/wide",
    "gemm/wide_steps.cuh.j2": "gemm/wide",
    "experts/wide.cuh.j2": "experts/wide_up",
    "experts/wide_config.cuh.j2": "experts/wide_up",
    "experts/wide_mainloop.cuh.j2": "experts/wide_up",
}
"""Those whose text a spec makes, as assembly that names each register; and a kernel that has such specs."""


@pytest.mark.compile
@pytest.mark.parametrize("partial", PARTIALS)
def test_it_compiles_alone(partial: str) -> None:
    arch, use = USES.get(partial, ("sm_90a", ""))
    spec = next(iter(next(iter(kernels(SPECS[partial]))).specs(Arch.of(arch)))) if partial in SPECS else None
    source = render_partial(partial, Arch.of(arch), spec)
    nvrtc.compile_ptx(f'{source}{use}extern "C" __global__ void alone() {{}}\n', Arch.of(arch), symbol="alone")


@pytest.mark.parametrize("partial", PARTIALS)
def test_includes_stand_at_the_top(partial: str) -> None:
    text = (FOLDER / partial).read_text()
    assert re.match(r'(//% include ".*" %//\n)*// ---- ' + re.escape(partial.removesuffix(".cuh.j2")) + r" -+\n", text)
    assert text.count("//% include") == len(re.findall(r"\A(?://% include .*\n)*", text)[0].splitlines())


TWICE = {
    "ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];",  # volatile, and not
    "ld.global.v4.b32 {%0, %1, %2, %3}, [%4];",  # partials/units says why its own are others
    "st.global.v4.b32 [%0], {%1, %2, %3, %4};",
    "st.global.v2.b32 [%0], {%1, %2};",
}
ASSEMBLY = re.compile(r'asm(?: volatile)?\(\s*((?:"(?:\\.|[^"\\])*"\s*)+)')


def test_an_instruction_stands_once() -> None:
    found = [text for path in FOLDER.rglob("*.j2") for text in ASSEMBLY.findall(path.read_text())]
    counted = Counter("".join(re.findall(r'"((?:\\.|[^"\\])*)"', text)) for text in found)
    del counted[""]  # emits nothing
    assert len(counted) > 100
    assert {text for text, count in counted.items() if count > 1} == TWICE


@pytest.mark.parametrize("template", sorted(path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*.j2")))
def test_a_comment_is_a_sentence(template: str) -> None:
    """At least it ends as one; but for drawings, which are indented, and headings."""
    text = (FOLDER / template).read_text()
    last = re.findall(r"^ *//(?: (?!  |----).*)\n(?! *//)", text, re.MULTILINE)
    assert not [line for line in last if not re.search(r"[.:]\n\Z", line) and "${" not in line]


def test_the_list_is_of_partials() -> None:
    assert USES.keys() | SPECS.keys() <= set(PARTIALS)

"""Rendering: the environment's rules, and the shape of every generated file."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import jinja2
import pytest

import jitfp4.families  # noqa: F401 - registers every family
from jitfp4 import render
from jitfp4.arch import ARCHS
from jitfp4.errors import ArgumentError, RenderError
from jitfp4.formats import DType
from jitfp4.kernel import AnyKernel, kernels, lookup
from jitfp4.layouts import SfLayout
from jitfp4.spec import F32, I64, Ptr, TensorMapParam

SM_90A = ARCHS["sm_90a"]


def text_of(kernel: AnyKernel, arch: str = "sm_90a") -> str:
    return kernel.render(next(iter(kernel.specs(ARCHS[arch]))), ARCHS[arch])


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kernel", kernels(), ids=lambda k: k.name)
def test_generated_files_stand_alone_and_name_nothing_of_this_machine(kernel: AnyKernel) -> None:
    for arch in ARCHS.values():
        for spec in kernel.specs(arch):
            text = kernel.render(spec, arch)
            assert "#include" not in text
            assert f" {kernel.symbol}(" in text
            assert not re.search(r"\$\{|//%|\b(None|True|False)\b|/work/|/home/|/root/|20\d\d-", text), (
                kernel.name,
                spec,
            )
            assert text.endswith("\n") and "\n\n\n" not in text
            assert max(len(line) for line in text.splitlines() if not line.startswith("// spec:")) <= 120


def test_text_does_not_depend_on_the_process() -> None:
    program = (
        "import jitfp4.families; from jitfp4.kernel import lookup; from jitfp4.arch import Arch; import hashlib;"
        "f = lookup('quantize/vector'); a = Arch.of('sm_100a');"
        "print(hashlib.sha256(''.join(f.render(s, a) for s in f.specs(a)).encode()).hexdigest())"
    )
    root = Path(__file__).parents[2]
    digests = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONPATH": str(root), "PYTHONHASHSEED": seed, "HOME": "/nonexistent"},
            cwd="/",
            check=True,
            capture_output=True,
        ).stdout
        for seed in ("0", "1", "7")
    }
    assert len(digests) == 1


def test_unknown_names_and_wrong_types_are_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render, "templates_dir", lambda: tmp_path)
    render._environment.cache_clear()
    spec = next(iter(kernels("quantize")[-1].specs(SM_90A)))
    cases = {
        "typo": "constexpr int kK = ${spec.tpyo};",
        "bool": "${spec.in_dtype | cpp_bool}",
        "type": "${spec.sf_layout | cpp_type}",
        "syntax": "//% if %//",
    }
    for name, text in cases.items():
        (tmp_path / name).write_text(text)
        with pytest.raises(RenderError, match=name):
            render.render(name, spec, SM_90A, symbol="k", params=())
    with pytest.raises(RenderError, match="absent"):
        render.render("absent", spec, SM_90A, symbol="k", params=())
    render._environment.cache_clear()


def test_ptx_braces_and_blank_lines_survive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render, "templates_dir", lambda: tmp_path)
    render._environment.cache_clear()
    body = 'asm("{%0, %1}, [%2];");\n\nint a[2][2] = {{1, 2}, {3, 4}};\n{# not a comment\n'
    (tmp_path / "t").write_text(body)
    spec = next(iter(kernels("quantize")[-1].specs(SM_90A)))
    assert render.render("t", spec, SM_90A, symbol="k", params=()) == body
    render._environment.cache_clear()


def test_a_spec_of_another_family_is_refused() -> None:
    vector, dequantize = lookup("quantize/vector"), lookup("quantize/dequantize")
    with pytest.raises(ArgumentError, match="spec"):
        vector.render(next(iter(dequantize.specs(SM_90A))), SM_90A)


def test_filters() -> None:
    assert render.cpp_bool(True) == "true"
    assert render.cpp_type(DType.F32) == "float"
    assert [render.cpp_enum(layout) for layout in SfLayout] == ["k128x4", "k8x4", "kLinear"]
    with pytest.raises(jinja2.TemplateRuntimeError):
        render.cpp_bool(1)  # type: ignore[arg-type]
    declared = render.cpp_params((Ptr("x", "const In", "[m, k]"), I64("m"), F32("eps"), TensorMapParam("map")))
    assert [line.split("//")[0].strip() for line in declared.splitlines()] == [
        "const In* __restrict__ x,",
        "int64 m,",
        "float eps,",
        "const __grid_constant__ TensorMap map",
    ]
    assert render.cpp_params((I64("m", "rows"),)) == "int64 m  // rows\n"

"""The compiler: every specialisation for every architecture, its machine code, and its errors."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import jitfp4.families  # noqa: F401 - registers every family
from jitfp4 import nvrtc
from jitfp4.arch import ARCHS
from jitfp4.errors import CompileError
from jitfp4.kernel import kernels

pytestmark = pytest.mark.compile

PYTHONPATH = {"PYTHONPATH": os.pathsep.join((str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")))}


def test_equal_source_gives_equal_bytes_in_another_process() -> None:
    kernel, arch = kernels("quantize")[-1], ARCHS["sm_90a"]
    spec = next(iter(kernel.specs(arch)))
    here = nvrtc.compile_cubin(kernel.render(spec, arch), arch, symbol=kernel.symbol)
    program = (
        "import sys, hashlib, jitfp4.families; from jitfp4 import nvrtc; from jitfp4.kernel import lookup;"
        f"from jitfp4.arch import Arch; f = lookup({kernel.name!r}); a = Arch.of('sm_90a'); s = next(iter(f.specs(a)));"
        "sys.stdout.buffer.write(nvrtc.compile_cubin(f.render(s, a), a, symbol=f.symbol))"
    )
    there = subprocess.run(
        [sys.executable, "-c", program], env=PYTHONPATH, cwd="/", check=True, capture_output=True
    ).stdout
    assert here == there


def test_a_compile_error_shows_the_numbered_lines_around_the_fault() -> None:
    source = "\n".join(["// line"] * 9 + ['extern "C" __global__ void k(int* p) { *p = nonsense; }'] + ["// tail"] * 9)
    with pytest.raises(CompileError) as caught:
        nvrtc.compile_cubin(source, ARCHS["sm_90a"], symbol="k")
    message = str(caught.value)
    assert 'identifier "nonsense" is undefined' in message
    assert ">   10 | extern" in message and "     6 | // line" in message and "    14 | // tail" in message
    assert "    15 |" not in message
    assert str(pickle.loads(pickle.dumps(caught.value))) == message  # noqa: S301


def test_toolchain_is_recognised_without_loading_it() -> None:
    program = (
        "from jitfp4 import nvrtc; t = nvrtc.toolchain(); assert t is not None; print(t.name);"
        "assert 'libnvrtc' not in open('/proc/self/maps').read()"
    )
    done = subprocess.run([sys.executable, "-c", program], env=PYTHONPATH, capture_output=True, text=True)
    if done.returncode and "AssertionError" in done.stderr and not nvrtc._packaged_libraries():
        pytest.skip("NVRTC comes from outside the environment's packages here")
    assert done.returncode == 0, done.stderr
    toolchain = nvrtc.toolchain()
    assert toolchain is not None and done.stdout.strip() == toolchain.name


def test_ptx_carries_line_information() -> None:
    ptx = nvrtc.compile_ptx('extern "C" __global__ void k(int* p) { *p = 1; }', ARCHS["sm_100a"], symbol="k")
    assert ".target sm_100a" in ptx and ".loc" in ptx

"""jitfp4 sim: any PTX file, checked on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from jitfp4.arch import Arch
from jitfp4.cli import app
from jitfp4.nvrtc import compile_ptx

pytestmark = [pytest.mark.compile, pytest.mark.sim]

SOURCE = """extern "C" __global__ void scale(const float* x, float* y, int n, float by) {
  __shared__ float cells[64];
  const int t = threadIdx.x, i = blockIdx.x * 64 + t;
  cells[t] = x[i] * by;
  SYNC;
  if (i < n) y[i] = cells[63 - t];
}
"""


@pytest.fixture
def kernel(tmp_path: Path) -> Path:
    path = tmp_path / "scale.ptx"
    path.write_text(compile_ptx(SOURCE.replace("SYNC", "__syncthreads()"), Arch.of("sm_90a"), symbol="scale"))
    return path


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["sim", *map(str, arguments)])


def test_arrays_go_in_and_out(kernel: Path, tmp_path: Path) -> None:
    x = np.random.default_rng(1).standard_normal(128).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    result = run(
        kernel, "--grid", "2", "--block", "64", tmp_path / "x.npy", "f32[2,64]", 128, 2.5, "--out", tmp_path / "after"
    )
    assert result.exit_code == 0, result.output
    assert "nothing found" in result.stdout
    y = np.load(tmp_path / "after" / "arg1.npy")
    np.testing.assert_array_equal(y, x.reshape(2, 64)[:, ::-1] * np.float32(2.5))


def test_a_fault_names_the_line_of_the_source(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.ptx"
    wrong.write_text(compile_ptx(SOURCE.replace("SYNC", ""), Arch.of("sm_90a"), symbol="scale"))
    arguments = (wrong, "--block", "64", "f32[64]=random", "f32[64]", 64, 0.5)
    result = run(*arguments)
    assert result.exit_code == 1
    assert "unordered write by another warp" in result.stdout and "line 6" in result.stdout
    document = json.loads(run(*arguments, "--json").stdout)
    assert document["ok"] is False and document["fault"].startswith("SimRaceError")
    assert run(*arguments, "--no-races").exit_code == 0


def test_a_kernel_that_does_not_end_is_given_up(tmp_path: Path, kernel: Path) -> None:
    spins = tmp_path / "spins.ptx"
    source = 'extern "C" __global__ void spins(volatile int* flag) { while (!*flag) {} }'
    spins.write_text(compile_ptx(source, Arch.of("sm_90a"), symbol="spins"))
    assert run(spins, "i32[1]=1", "--limit", 1000).exit_code == 0
    result = run(spins, "i32[1]", "--limit", 1000)
    assert result.exit_code == 1
    assert "SimLimitError: still runs after" in result.stdout
    arguments = (kernel, "--block", "64", "f32[64]", "f32[64]", 64, 0.5)
    issued = json.loads(run(*arguments, "--json").stdout)["issued"]
    assert issued > 0 and run(*arguments, "--limit", issued).exit_code == 0
    assert run(*arguments, "--limit", 0).exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (("--block", "0", "f32[64]", "f32[64]", 64, 0.5), "--block"),
        (("--block", "64", "f32[64]", "f31[64]", 64, 0.5), "ARG 1"),
        (("--block", "64", "f32[64]"), "args"),
    ],
)
def test_bad_arguments_are_named(kernel: Path, arguments: tuple[object, ...], name: str) -> None:
    result = run(kernel, *arguments)
    assert result.exit_code == 2 and name in result.stderr


SMALL = """.version 8.0
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 p) {
  .reg .b32 %r; .reg .b64 %a, %b;
  ld.param.u64 %a, [p]; mov.u32 %r, %tid.x; mad.wide.u32 %b, %r, 4, %a; st.global.u32 [%b], %r; ret;
}
"""
NO_ARGUMENTS = (
    *("i8[40]=300", "u8[4]=-1", "i32[4]=99999999999999999999", "f32[99999999999999]", "u32[3]=4294967296"),
    *(f"f32[{','.join('4' * 34)}]", f"f32[{'9' * 4000}]", "9" * 5000, "f32[4]=x", "0x", "cut.npy", "empty.npy"),
    *("objects.npy", "missing.npy", ".npy", "f32[4]=1e99", "f16[4]=7e4", str(1 << 64)),
)
NO_PTX: dict[str, tuple[str, str]] = {
    "no ret": (" ret;", ""),
    "a huge variable": (".visible", ".global .b8 x[99999999999999];\n.visible"),
    "a negative variable": (".visible", ".global .b8 x[-4];\n.visible"),
    "huge shared memory": ("  .reg .b32 %r;", ".shared .b8 s[9999999999]; .reg .b32 %r;"),
    "huge local memory": ("  .reg .b32 %r;", ".local .b8 s[9999999999]; .reg .b32 %r;"),
    "huge parameters": (".param .u64 p", ".param .u64 p, .param .b8 q[99999999999]"),
    "too many initial values": (".visible", ".global .b32 x[2] = {1,2,3};\n.visible"),
    "deep blocks": ("ret;", "{" * 5000 + "}" * 5000 + " ret;"),
    "deep parentheses": (", 4,", ", " + "(" * 5000 + "4" + ")" * 5000 + ","),
    "a long number": (", 4,", f", {'9' * 5000},"),
    "a huge offset": ("[p]", "[p+99999999999999999999]"),
    "an unknown instruction": ("mad.wide.u32", "frob.u32"),
    "no such label": ("ret;", "bra NOWHERE;"),
    "cut": ("st.global.u32 [%b], %r; ret;\n}", ""),
    "another target": ("sm_90a", "sm_7"),
    "no target": (".target sm_90a", ""),
    "nothing": (SMALL, ""),
}


@pytest.mark.parametrize("argument", NO_ARGUMENTS, ids=lambda text: text[:20])
def test_what_is_no_argument_is_a_message(tmp_path: Path, argument: str) -> None:
    (tmp_path / "small.ptx").write_text(SMALL)
    np.save(tmp_path / "whole.npy", np.arange(100))
    (tmp_path / "cut.npy").write_bytes((tmp_path / "whole.npy").read_bytes()[:40])
    (tmp_path / "empty.npy").touch()
    np.save(tmp_path / "objects.npy", np.array([{}]))
    result = run(tmp_path / "small.ptx", tmp_path / argument if argument.endswith(".npy") else argument)
    assert result.exit_code == 2 and result.stderr.startswith("jitfp4: "), result.exception


@pytest.mark.parametrize("what", NO_PTX)
def test_what_is_no_ptx_is_a_message(tmp_path: Path, what: str) -> None:
    assert NO_PTX[what][0] in SMALL
    (tmp_path / "wrong.ptx").write_text(SMALL.replace(*NO_PTX[what], 1))
    result = run(tmp_path / "wrong.ptx", "i32[32]", "--limit", 1000)
    assert result.exit_code == 2 and result.stderr.startswith("jitfp4: "), (result.output[:200], result.exception)


@pytest.mark.parametrize("data", [bytes(range(256)), SMALL.encode("utf-16"), b"\xff\xfe"], ids=len)
def test_bytes_that_are_no_text_are_a_message(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "wrong.ptx").write_bytes(data)
    result = run(tmp_path / "wrong.ptx")
    assert result.exit_code == 2 and "KERNEL.ptx" in result.stderr


@pytest.mark.parametrize("option", ["--grid", "--block", "--cluster"])
def test_sizes_that_are_none_are_a_message(tmp_path: Path, option: str) -> None:
    (tmp_path / "small.ptx").write_text(SMALL)
    for size in ("0", "-1", "", "1,2,3,4", "9" * 5000, "\u00b2", "\u0663", "1.5", "x"):
        result = run(tmp_path / "small.ptx", "i32[32]", option, size)
        assert result.exit_code == 2 and option in result.stderr, (size, result.exception)


def test_less_than_no_shared_memory_is_a_message(tmp_path: Path) -> None:
    (tmp_path / "small.ptx").write_text(SMALL)
    result = run(tmp_path / "small.ptx", "i32[32]", "--shared", "-1")
    assert result.exit_code == 2 and "--shared" in result.stderr


def test_numpy_users_need_no_torch() -> None:
    code = """
import sys
import numpy as np
from jitfp4 import sim
from jitfp4.spec import Geometry
x = np.zeros(32, np.int32)
ptx = '''
.version 8.0
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 p) {
  .reg .b32 %r; .reg .b64 %a, %b;
  ld.param.u64 %a, [p]; mov.u32 %r, %tid.x; mad.wide.u32 %b, %r, 4, %a; st.global.u32 [%b], %r; ret;
}'''
sim.run(ptx, [x], Geometry((1, 1, 1), (32, 1, 1)), "sm_90a", races=True)
assert (x == np.arange(32)).all()
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)

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

"""The family that CONTRIBUTING.md adds works as it stands there: rendered, compiled, simulated, and warmed up."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = re.compile(r"^`([\w/.]+)`\n\n```(?:python|cuda)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

PROGRAM = """
import torch

from jitfp4 import ArgumentError, ArgumentTypeError, nvrtc, sim
from jitfp4.arch import ARCHS
from jitfp4.families.toy.api import scale
from jitfp4.families.toy.operation import KERNEL, SCALE
from jitfp4.families.toy.problem import Problem, Tactic
from jitfp4.warmup import plan

x = torch.randn(1001)
want = x * 3.0
assert torch.equal(scale(x, 3.0), want)
for arch in ("sm_80", "sm_90a", "sm_100a"):
    for tactic in KERNEL.tactics:
        with sim.device(arch, races=True), SCALE.forced(tactic):
            out = torch.full((1001,), float("nan"))
            assert scale(x, 3.0, out=out) is out and torch.equal(out, want)
for arch in ARCHS.values():
    assert SCALE.select(Problem(1 << 20), arch) == Tactic(4)
    for task in plan([arch], ["toy"]):
        nvrtc.compile_cubin(task.kernel.render(task.spec, arch), arch, symbol=task.kernel.symbol)
try:
    scale(x.double(), 1.0)
except ArgumentTypeError as error:
    assert "x" in str(error)
try:
    with sim.device("sm_90a"), SCALE.forced(Tactic(4)):
        scale(x[:2], 1.0)
except ArgumentError as error:
    assert "more than there are" in str(error)
compiled = torch.compile(scale, fullgraph=True, backend="aot_eager")
assert torch.equal(compiled(x, 3.0), want)
print("done")
"""


@pytest.mark.compile
@pytest.mark.sim
def test_the_kernel_that_is_added_there_works(tmp_path: Path) -> None:
    for name in ("jitfp4", "templates"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    files = FILES.findall((ROOT / "CONTRIBUTING.md").read_text())
    assert len(files) == 5
    for path, text in files:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    command = [sys.executable, "-c", PROGRAM]
    environment = {"PYTHONPATH": str(tmp_path), "JITFP4_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "done", done.stderr

"""The list of files to read in CONTRIBUTING.md: what a first call enters, and what the template includes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import FrameType

import pytest

import jitfp4
from jitfp4 import sim
from jitfp4.render import templates_dir
from tests.inputs.good import good_calls

ROOT = Path(__file__).parents[2]
PACKAGE = Path(jitfp4.__file__).parent
TEXT = (ROOT / "CONTRIBUTING.md").read_text().split("## What to read\n")[1].split("\n## ")[0]
ROWS = re.findall(r"^\| `(\w+)` on (\w+) \| (\w+)/(.*?) \| (\d+) \| (\d+) \|$", TEXT, re.MULTILINE)
SHARED, VOCABULARY, MACHINERY = (
    set(re.findall(r"`(\w+)`", paragraph)) for paragraph in re.findall(r"^- ((?:.|\n  )*)", TEXT, re.MULTILINE)
)


def entered(function: str, arch: str) -> set[str]:
    """The modules of the package of which a good call enters a function, without suffix."""
    files: set[str] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            files.add(frame.f_code.co_filename)

    arguments = good_calls()[function]()
    with sim.device(arch):
        sys.setprofile(note)
        try:
            getattr(jitfp4, function)(**arguments)
        finally:
            sys.setprofile(None)
    own = {Path(file) for file in files if file.startswith(f"{PACKAGE}/")}
    return {path.relative_to(PACKAGE).with_suffix("").as_posix() for path in own}


def included(template: str) -> set[str]:
    names = re.findall(r'include "(.*?)"', (templates_dir() / template).read_text())
    return {template}.union(*map(included, names))


@pytest.mark.sim
@pytest.mark.compile
@pytest.mark.parametrize(("function", "arch", "family", "files", "python", "templates"), ROWS, ids=lambda value: value)
def test_the_files_to_read(function: str, arch: str, family: str, files: str, python: str, templates: str) -> None:
    names = re.findall(r"`([\w/]+)`", files)
    listed = {f"families/{family}/{name}" for name in names}
    # a new process, which has planned no call yet
    call = f"from tests.unit.test_reading import entered; print(*entered({function!r}, {arch!r}))"
    done = subprocess.run([sys.executable, "-c", call], cwd=ROOT, capture_output=True, text=True, check=True)
    modules = set(done.stdout.split())
    of_family = {name for name in modules if name.startswith("families/")}
    assert of_family <= listed
    without_code = {name.rsplit("/", 1)[1] for name in listed - of_family}
    assert without_code <= {"arguments", "problem", "tables", "fp4_tables", "operation"}, "entered by no call"
    rest = {name.split("/")[0] for name in modules - of_family} - {"sim", "__init__", "registration"}
    assert SHARED <= rest <= SHARED | VOCABULARY | MACHINERY
    assert all((PACKAGE / f"{name}.py").exists() for name in listed)
    assert len(SHARED) + len(names) == int(python) <= 15
    kernel = next(name for name in names if name.startswith("kernels/")).removeprefix("kernels/")
    assert len(included(f"{family}/{kernel}.cu.j2")) == int(templates)


def test_there_are_three() -> None:
    assert len(ROWS) == 3

"""The family that CONTRIBUTING.md adds works as it stands there: a clean copy of the tree, every step, every check."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jitfp4 import nvrtc
from tests.support.ledger import NVRTC

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text().split("## Adding a kernel")[1]
STEP = re.compile(r"^`([\w./]+)`(?:, behind `([^`\n]+)`)?\n\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CHECKS = re.search(r"^```sh\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)[1].replace(" && ", "\n").splitlines()
MADE = re.search(r"^These files were made:\n\n```\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)[1].splitlines()
MODULES = {"python": (), "jitfp4": ("-m", "jitfp4")}  # others are a module of their name


def follow(tree: Path) -> None:
    """Write the files, and put the lines behind those that the text names."""
    for name, behind, text in STEP.findall(TEXT):
        file = tree / name
        if behind:
            before, line, after = file.read_text().partition(f"\n{behind}\n")
            assert line and line not in after, f"{name} has not one line {behind}"
            file.write_text(f"{before}{line}{text}{after}")
        else:
            assert not file.exists()
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)


def run(command: str, tree: Path) -> None:
    tool, *arguments = shlex.split(command)
    program = [sys.executable, *MODULES.get(tool, ("-m", tool)), *arguments]
    environment = os.environ | {"PYTHONPATH": str(tree), "JITFP4_CACHE_DIR": str(tree / "cache")}
    done = subprocess.run(program, env=environment, cwd=tree, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"


def files(tree: Path) -> set[str]:
    return {path.relative_to(tree).as_posix() for path in tree.rglob("*") if path.is_file()}


@pytest.mark.compile
@pytest.mark.sim
@pytest.mark.slow
def test_the_family_that_is_added_there_passes_what_has_to_pass(tmp_path: Path) -> None:
    toolchain = nvrtc.toolchain()
    if toolchain is None or toolchain.version != NVRTC:
        pytest.skip(f"the ledger is of NVRTC {NVRTC}")
    # with the bytecode, and of what is hidden with the cache of mypy, which takes 20 s without one
    tree, left_out = tmp_path / "tree", shutil.ignore_patterns(".[!m]*", "build", "dist", "site")
    shutil.copytree(ROOT, tree, ignore=left_out)
    before = files(tree)
    follow(tree)
    for command in CHECKS:
        run(command, tree)
    made = {name for name in files(tree) - before if not re.search(r"^cache/|/\.|^\.|__pycache__", name)}
    assert sorted(made) == MADE

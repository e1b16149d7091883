"""Every block of code in every page is run, and every command of jitfp4 in them is one that the command line takes."""

from __future__ import annotations

import importlib.util
import inspect
import re
import shlex
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer

import jitfp4
from jitfp4.arch import Arch
from jitfp4.cli import app
from jitfp4.nvrtc import compile_ptx
from tests.support.cli_page import PAGE, page

ROOT = Path(__file__).parents[2]
DOCS = sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))
PAGES = {name: (ROOT / name).read_text() for name in ("README.md", "cache_layout.md", "jitfp4/sim/README.md", *DOCS)}
BLOCKS = {name: re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL) for name, text in PAGES.items()}
ELSEWHERE = {"docs/transformers.md"}  # tests/integrations/test_transformers_docs.py runs it with tiny models
SCALE = """extern "C" __global__ void scale(const float* x, float* y, int n, float by) {
  const int i = blockIdx.x * 256 + threadIdx.x;
  if (i < n) y[i] = x[i] * by;
}"""


def of_simulator() -> dict[str, Any]:
    ptx = compile_ptx(SCALE, Arch.of("sm_90a"), symbol="scale")
    x, y = np.ones(128, np.float32), np.zeros(128, np.float32)
    return {"ptx": ptx, "x": x, "y": y, "a": torch.randn(8, 64).bfloat16(), "scale": torch.ones(1)}


GIVEN: dict[str, Callable[[], dict[str, Any]]] = {
    "jitfp4/sim/README.md": of_simulator,
    "docs/tuning.md": lambda: {"model": lambda batch: batch, "batch": None},
}
"""What a page speaks of without making it."""


@pytest.mark.compile
@pytest.mark.parametrize("name", [name for name in PAGES if BLOCKS[name] and name not in ELSEWHERE])
def test_the_code_of_a_page_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block by itself, on the CPU; what needs a GPU is called with the arguments that it takes."""
    monkeypatch.chdir(tmp_path)
    for needs_gpu in ("tune", "load_tactics"):
        signature = inspect.signature(getattr(jitfp4, needs_gpu))
        monkeypatch.setattr(jitfp4, needs_gpu, lambda *a, signature=signature, **k: signature.bind(*a, **k))
    for number, code in enumerate(BLOCKS[name]):
        if "flashinfer" in code and importlib.util.find_spec("flashinfer") is None:
            continue
        text = code.replace('"cuda"', '"cpu"')
        exec(compile(text, f"{name}, block {number}", "exec"), GIVEN[name]() if name in GIVEN else {})  # noqa: S102


def commands(name: str) -> list[str]:
    """What a page's blocks that are no Python call ``jitfp4`` with, without what a shell makes of it."""
    blocks = re.findall(r"^```(?!python)\w*\n(.*?)^```", PAGES[name], re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    return [found for line in lines for found in re.findall(r"(?:^|&& |\$ |RUN |\d )jitfp4 ([^|&#>]+)", line)]


COMMANDS = [(name, command) for name in PAGES for command in commands(name) if not command.startswith("[")]


def test_pages_have_commands() -> None:
    assert len(COMMANDS) > 40


@pytest.mark.parametrize(("name", "command"), COMMANDS, ids=lambda text: text.strip()[:60])
def test_a_command_of_a_page_is_taken(name: str, command: str) -> None:
    words, found = shlex.split(command.replace("...", "")), typer.main.get_command(app)
    if "[OPTIONS]" in words:
        return  # a usage line of docs/cli.md, which is compared as a whole
    while hasattr(found, "commands"):
        found = found.commands[words.pop(0)]
    found.make_context(found.name, words)


def test_the_page_of_commands_is_what_help_says() -> None:
    assert PAGE.read_text() == page(), "python -m tests.support.cli_page"


def test_every_page_is_in_the_navigation() -> None:
    listed = re.findall(r"^ +- ([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md"))


def test_every_example_is_in_its_page() -> None:
    folder = ROOT / "examples"
    files = [str(path.relative_to(folder)) for name in ("*.py", "Dockerfile") for path in folder.rglob(name)]
    assert sorted(re.findall(r"^\| `(.+?)`", PAGES["docs/examples.md"], re.MULTILINE)) == sorted(files)


def test_the_home_page_has_code_the_version_and_links() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    home = PAGES["docs/index.md"]
    assert BLOCKS["docs/index.md"] and f"version {project['version']}." in home
    assert all(f"({url})" in home for url in project["urls"].values())


def test_no_page_calls_the_digest_of_a_bundle_that_of_its_file() -> None:
    assert not [name for name, text in PAGES.items() if "prints its SHA-256" in text]

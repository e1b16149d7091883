"""jitfp4 render: generated sources, and golden files that must not drift unseen."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from jitfp4 import render as renderer
from jitfp4.arch import ARCHS, Arch
from jitfp4.cli import app
from jitfp4.golden import GOLDEN_ARCHS, goldens, source_path, sources
from jitfp4.kernel import kernels, lookup

ROOT = Path(__file__).parents[2]
FAMILY = "quantize/vector"


@pytest.fixture
def templates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the templates that the renderer uses for one test."""
    copy = tmp_path / "templates"
    shutil.copytree(ROOT / "templates", copy)
    monkeypatch.setattr(renderer, "templates_dir", lambda: copy)
    renderer._environment.cache_clear()
    yield copy
    renderer._environment.cache_clear()


@pytest.fixture
def golden(tmp_path: Path) -> Path:
    """Golden files of one family, as the untouched templates generate them."""
    folder = tmp_path / "golden"
    folder.mkdir()
    assert run("--update", FAMILY, "--golden", folder).exit_code == 0
    return folder


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["render", *map(str, arguments)])


def files(folder: Path) -> dict[str, str]:
    return {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()}


# ---- golden files ----------------------------------------------------------------------------------------------------


def test_the_committed_golden_files_are_what_the_templates_generate() -> None:
    result = run("--check", "--golden", ROOT / "tests/golden")
    assert result.exit_code == 0, result.stderr


def test_an_edited_partial_is_shown_as_a_unified_diff(templates: Path, golden: Path) -> None:
    partial = templates / "partials/types.cuh.j2"
    partial.write_text(partial.read_text() + "using quad = unsigned long long;\n")
    renderer._environment.cache_clear()
    result = run("--check", FAMILY, "--golden", golden)
    assert result.exit_code == 1
    assert result.stdout.count("\n+using quad = unsigned long long;\n") == len(GOLDEN_ARCHS)
    path = f"{FAMILY}/sm_90a.cu"
    assert f"--- golden/{path}\n+++ generated/{path}\n@@ " in result.stdout
    assert f"changed: {golden / path}\n" in result.stderr


def test_a_missing_and_an_extra_golden_file_are_drift(golden: Path) -> None:
    gone, *_ = files(golden)
    (golden / gone).unlink()
    extra = golden / FAMILY / "sm_70.cu"
    extra.write_text("// left behind\n")
    result = run("--check", FAMILY, "--golden", golden, "--json")
    assert result.exit_code == 1
    drift = {item["path"]: item["kind"] for item in json.loads(result.stdout)["drift"]}
    assert drift == {gone: "missing", extra.relative_to(golden).as_posix(): "extra"}


def test_update_rewrites_adds_and_removes(templates: Path, golden: Path) -> None:
    before = files(golden)
    template = templates / f"{FAMILY}.cu.j2"
    template.write_text(template.read_text() + "// the end\n")
    renderer._environment.cache_clear()
    (golden / FAMILY / "sm_90a.specs").unlink()
    (golden / FAMILY / "extra.cu").write_text("")
    result = run("--update", FAMILY, "--golden", golden)
    assert result.exit_code == 0
    verbs = [line.split()[0] for line in result.stdout.splitlines()]
    assert sorted(verbs) == sorted(["added", "removed", *["rewritten"] * len(GOLDEN_ARCHS)])
    ends = {path: "// the end\n" if path.endswith(".cu") else "" for path in before}
    assert files(golden) == {path: text + ends[path] for path, text in before.items()}
    assert run("--check", FAMILY, "--golden", golden).exit_code == 0


def test_a_missing_end_of_line_is_drift(golden: Path) -> None:
    path = golden / next(iter(files(golden)))
    path.write_text(path.read_text().rstrip("\n"))
    result = run("--check", FAMILY, "--golden", golden)
    assert result.exit_code == 1
    assert f"changed: {path}" in result.stderr


def test_golden_files_say_every_line_of_every_specialisation() -> None:
    """A source is the family's first with the lines replaced that its block in the .specs file lists."""
    files_ = goldens(FAMILY)
    kernel = lookup(FAMILY)
    for arch in map(Arch.of, GOLDEN_ARCHS):
        first, blocks = files_[f"{FAMILY}/{arch.name}.cu"], files_[f"{FAMILY}/{arch.name}.specs"].split("\n\n")
        specs = list(kernel.specs(arch))
        assert len(blocks) == len(specs) - 1  # the first replaces nothing: its block is empty
        for spec, block in zip(specs[1:], blocks, strict=True):
            removed, added = ([line[1:] for line in block.strip().splitlines() if line[0] == sign] for sign in "-+")
            want = kernel.render(spec, arch).splitlines()
            assert sorted(set(first.splitlines()) - set(want)) == sorted(set(removed) - set(want))
            assert spec.json() in added[0] and all(line in want for line in added)


def test_every_specialisation_has_a_file_name_of_its_own() -> None:
    archs = [Arch.of(name) for name in GOLDEN_ARCHS]
    places = [source_path(f, spec, arch) for f in kernels() for arch in archs for spec in f.specs(arch)]
    assert len(set(places)) == len(places)
    assert sources(archs).keys() == set(places)


# ---- sources ---------------------------------------------------------------------------------------------------------


def test_sources_go_to_stdout() -> None:
    result = run(FAMILY, "--arch", "sm_89")
    assert result.exit_code == 0
    assert result.stdout == "".join(sources([Arch.of("sm_89")], FAMILY).values())


def test_sources_go_to_files(tmp_path: Path) -> None:
    result = run("--arch", "sm_80,sm_121a", "--out", tmp_path)
    assert result.exit_code == 0
    want = sources([Arch.of("sm_80"), Arch.of("sm_121a")])
    assert files(tmp_path) == want
    assert result.stdout.split() == [str(tmp_path / path) for path in want]


def test_sources_as_json() -> None:
    result = run(FAMILY, "--json")
    found = {item["path"]: item for item in json.loads(result.stdout)["sources"]}
    want = sources([Arch.of(name) for name in GOLDEN_ARCHS], FAMILY)
    assert {path: item["source"] for path, item in found.items()} == want
    assert all(item["sha256"] == hashlib.sha256(item["source"].encode()).hexdigest() for item in found.values())


def test_rendering_for_all_archs_loads_no_compiler(tmp_path: Path) -> None:
    code = f"""
import sys
from jitfp4.cli import app
app(["render", "--arch", "all", "--out", {str(tmp_path)!r}], standalone_mode=False)
sys.exit("loaded NVRTC" if "cuda.bindings.nvrtc" in sys.modules else 0)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(files(tmp_path)) == len(sources(list(ARCHS.values())))


# ---- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ["no_such_family"],
        ["--arch", "sm_1"],
        ["--check", "--update"],
        ["--check", "--arch", "sm_80"],
        ["--update", "--out", "folder"],
        ["--check", "--golden", "no_such_folder"],
    ],
    ids=" ".join,
)
def test_bad_input_is_status_2(arguments: list[str]) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("jitfp4: ")
    assert result.stdout == ""

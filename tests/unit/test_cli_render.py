"""jitfp4 render: generated sources, and golden files that must not drift unseen."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import re
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
from jitfp4.golden import GOLDEN_ARCHS, digest, goldens, source_path, sources
from jitfp4.kernel import AnyKernel, kernels, lookup

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
    assert result.stdout.count("\n+using quad = unsigned long long;\n") == 1  # the others are differences to this one
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
    (golden / FAMILY / "sm_90a.csv").unlink()
    (golden / FAMILY / "extra.cu").write_text("")
    result = run("--update", FAMILY, "--golden", golden)
    assert result.exit_code == 0
    verbs = [line.split()[0] for line in result.stdout.splitlines()]
    assert sorted(verbs) == sorted(["added", "removed", *["rewritten"] * len(GOLDEN_ARCHS)])
    after = files(golden)
    assert after.keys() == before.keys()
    for path, text in before.items():
        if path.endswith(".cu"):
            assert after[path] == text + "// the end\n"
        elif path.endswith(".diff"):
            assert after[path] == text
        else:  # the same specialisations, with other digests
            fields, other = ([line.rpartition(",")[0] for line in t.splitlines()] for t in (text, after[path]))
            assert fields == other and text != after[path]
    assert run("--check", FAMILY, "--golden", golden).exit_code == 0


def test_a_missing_end_of_line_is_drift(golden: Path) -> None:
    path = golden / next(iter(files(golden)))
    path.write_text(path.read_text().rstrip("\n"))
    result = run("--check", FAMILY, "--golden", golden)
    assert result.exit_code == 1
    assert f"changed: {path}" in result.stderr


def test_every_kernel_has_a_golden_file_also_one_of_another_architecture() -> None:
    assert {path.rpartition("/")[0] for path in goldens()} == {kernel.name for kernel in kernels()}


def test_the_difference_between_architectures_leads_from_one_source_to_the_other() -> None:
    texts, kernel = goldens(FAMILY), lookup(FAMILY)
    spec, other = next(iter(kernel.specs(Arch.of("sm_90a")))), Arch.of("sm_100a")
    old, new = (kernel.render(spec, arch).splitlines() for arch in (Arch.of("sm_90a"), other))
    assert texts[f"{FAMILY}/sm_90a.cu"].splitlines() == old
    changes = texts[f"{FAMILY}/sm_100a.diff"].splitlines()[2:]
    gone, come = ([line[1:] for line in changes if line[0] == sign] for sign in "-+")
    assert gone and come
    assert [line for line in old if line not in new] == [line for line in gone if line not in new]
    assert [line for line in new if line not in old] == [line for line in come if line not in old]


def test_a_golden_table_has_every_specialisation_and_the_digest_of_its_source() -> None:
    texts, kernel = goldens(FAMILY), lookup(FAMILY)
    for arch in map(Arch.of, GOLDEN_ARCHS):
        rows = list(csv.DictReader(io.StringIO(texts[f"{FAMILY}/{arch.name}.csv"])))
        want = {(*map(str, spec.fields().values()),): digest(kernel.render(spec, arch)) for spec in kernel.specs(arch)}
        found = {(*map(str, list(row.values())[:-1]),): row["source"] for row in rows}
        assert {tuple(value.lower() for value in spec): source for spec, source in want.items()} == found


@pytest.mark.parametrize("kernel", kernels(), ids=lambda k: k.name)
def test_sources_differ_only_in_the_lines_that_the_spec_renders(kernel: AnyKernel) -> None:
    """So that one golden source and a table of fields say all of what is generated."""
    for arch in map(Arch.of, GOLDEN_ARCHS):
        specs = kernel.specs(arch)
        if not specs:
            continue
        declared = [re.compile(line) for line in spec_lines(kernel.template)]
        first = kernel.render(specs[0], arch).splitlines()
        for spec in specs[1:]:
            source = kernel.render(spec, arch).splitlines()
            for line in {*source} ^ {*first}:
                assert any(pattern.fullmatch(line) for pattern in declared), line


def spec_lines(template: str) -> Iterator[str]:
    """Patterns of the lines that a template and what it includes fill from the spec."""
    for line in (ROOT / "templates" / template).read_text().splitlines():
        if include := re.search(r'include "(.*?)"', line):
            yield from spec_lines(include[1])
        elif "${" in line and "${arch." not in line:
            yield ".*".join(re.escape(part) for part in re.split(r"\$\{.*?\}|//%.*?%//", line))


def test_every_specialisation_has_a_file_name_of_its_own() -> None:
    archs = [Arch.of(name) for name in GOLDEN_ARCHS]
    places = [source_path(k, spec, arch) for k in kernels() for arch in archs for spec in k.specs(arch)]
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


def test_rendering_for_all_archs_loads_no_compiler(tmp_path: Path, whole: bool) -> None:
    """The cache of keys and values stands for all families but in whole runs."""
    pattern = None if whole else "kv"
    code = f"""
import sys
from jitfp4.cli import app
app(["render", *{[pattern] if pattern else []}, "--arch", "all", "--out", {str(tmp_path)!r}], standalone_mode=False)
sys.exit("loaded NVRTC" if "cuda.bindings.nvrtc" in sys.modules else 0)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(files(tmp_path)) == len(sources(list(ARCHS.values()), pattern))


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

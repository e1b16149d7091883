"""The built distributions: what is in them, and that the wheel works where the checkout is not."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEMPLATES = sorted(path.relative_to(ROOT / "templates").as_posix() for path in (ROOT / "templates").rglob("*.j2"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

pytestmark = pytest.mark.slow


def build(kind: str, source: Path, out: Path) -> Path:
    """One distribution, by the build backend in a process of its own: it reads the working directory."""
    code = f"import hatchling.build; print(hatchling.build.build_{kind}({str(out)!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return out / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel and links to this one's dependencies; the checkout is not on its path."""
    environment = tmp_path_factory.mktemp("environment")
    venv.create(environment, with_pip=False, symlinks=True)
    site = environment / f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
    for folder in (Path(path) for path in sys.path if path.endswith("site-packages")):
        for item in folder.iterdir():
            if "jitfp4" not in item.name:  # an editable install has a .pth file
                (site / item.name).symlink_to(item)
    pip = [sys.executable, "-m", "pip", "--python", str(environment / "bin/python"), "install", "--quiet"]
    options = ["--no-deps", "--no-index", "--ignore-installed", "--disable-pip-version-check"]
    subprocess.run([*pip, *options, str(wheel)], check=True, cwd=environment)
    return environment


def run(installed: Path, *command: str) -> str:
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    environment = kept | {"JITFP4_CACHE_DIR": str(installed / "cache")}
    program = [str(installed / "bin" / command[0]), *command[1:]]
    done = subprocess.run(program, cwd=installed, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_wheel_holds_the_package_and_its_templates(wheel: Path) -> None:
    files = contents(wheel)
    templates = {name: text for name, text in files.items() if "/_templates/" in name}
    assert templates == {f"jitfp4/_templates/{name}": (ROOT / "templates" / name).read_bytes() for name in TEMPLATES}
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "jitfp4").rglob("*.py")}
    assert {name for name in files if name.endswith(".py")} == modules
    assert {name.split("/")[0] for name in files} == {"jitfp4", f"jitfp4-{PROJECT['version']}.dist-info"}


def test_the_installed_package_is_the_wheel(installed: Path) -> None:
    code = "import jitfp4, jitfp4.render; print(jitfp4.__file__); print(jitfp4.render.templates_dir())"
    package, templates = run(installed, "python", "-c", code).split()
    assert Path(package).is_relative_to(installed)
    assert Path(templates).is_relative_to(installed)


def test_it_renders_what_the_checkout_renders(installed: Path) -> None:
    run(installed, "jitfp4", "render", "quantize", "--out", "generated")
    command = [sys.executable, "-m", "jitfp4", "render", "quantize", "--out", str(installed / "expected")]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    generated = sources(installed / "generated")
    assert generated and generated == sources(installed / "expected")


@pytest.mark.compile
def test_it_warms_up_and_verifies_a_kernel(installed: Path) -> None:
    command = "jitfp4", "warmup", "--arch", "sm_90a", "--family", "quantize/vector"
    run(installed, *command, "--write-plan", "plan.json")
    plan = json.loads((installed / "plan.json").read_text())
    (installed / "one.json").write_text(json.dumps(plan | {"kernels": plan["kernels"][:1]}))
    assert json.loads(run(installed, "jitfp4", "warmup", "one.json", "--json"))["built"] == 1
    assert json.loads(run(installed, "jitfp4", "warmup", "one.json", "--json"))["cached"] == 1
    run(installed, "jitfp4", "cache", "verify", "--recompile")
    (digest,) = run(installed, "jitfp4", "cache", "ls", "-q").split()
    provenance = json.loads(run(installed, "jitfp4", "cache", "show", digest, "--json"))["entries"][0]["provenance"]
    version = run(installed, "python", "-c", "import jitfp4; print(jitfp4.__version__)").strip()
    assert provenance["jitfp4"] == version == PROJECT["version"]


def test_a_wheel_built_from_the_sdist_is_the_same(wheel: Path, tmp_path: Path) -> None:
    sdist = build("sdist", ROOT, tmp_path)
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    again = build("wheel", tmp_path / sdist.name.removesuffix(".tar.gz"), tmp_path)
    assert contents(again) == contents(wheel)


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def sources(folder: Path) -> dict[str, str]:
    return {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*.cu")}


# ---- metadata --------------------------------------------------------------------------------------------------------


LINES = {
    "constraints.txt": ("cu13", "nvidia-cuda-nvrtc"),
    "constraints-torch214.txt": ("cu13", "nvidia-cuda-nvrtc"),
    "constraints-cu12.txt": ("cu12", "nvidia-cuda-nvrtc-cu12"),
}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(file: str) -> list[tuple[str, str]]:
    """Name and version of every pin of a constraints file and of those that it includes."""
    found: list[tuple[str, str]] = []
    for line in (text.split("#")[0].strip() for text in (ROOT / file).read_text().splitlines()):
        if line.startswith("-c "):
            found += pins(line.removeprefix("-c "))
        elif line:
            name, version = line.split("==")
            found.append((normal(name), version))
    return found


@pytest.mark.parametrize("file", LINES)
def test_every_dependency_of_a_cuda_line_is_pinned_once(file: str) -> None:
    names = [name for name, _ in pins(file)]
    assert len(set(names)) == len(names)
    own_torch = {"sglang", "vllm"}  # which pin one
    others = {extra for extra, _ in LINES.values()} - {LINES[file][0]} | own_torch
    extras = (items for name, items in PROJECT["optional-dependencies"].items() if name not in others)
    wanted = {normal(re.match(r"[\w.-]+", item)[0]) for items in (PROJECT["dependencies"], *extras) for item in items}
    assert wanted <= set(names)


@pytest.mark.parametrize(("file", "extra", "nvrtc"), [(file, *line) for file, line in LINES.items()])
def test_the_compiler_of_a_cuda_line_is_in_its_extra_only(file: str, extra: str, nvrtc: str) -> None:
    assert not any("nvrtc" in item for item in PROJECT["dependencies"])
    bindings, compiler = PROJECT["optional-dependencies"][extra]
    assert re.match(r"[\w.-]+", compiler)[0] == nvrtc
    major = extra.removeprefix("cu")
    for item, pin in ((bindings, "cuda-bindings"), (bindings, "cuda-python"), (compiler, nvrtc)):
        version = dict(pins(file))[pin]
        assert version.split(".")[0] == major
        least, below = re.search(r">=([\d.]+),<(\d+)$", item).groups()
        assert tuple(map(int, least.split("."))) <= tuple(map(int, version.split("."))) < (int(below),)


def test_the_console_script_is_the_command_line() -> None:
    assert PROJECT["scripts"] == {"jitfp4": "jitfp4.cli:app"}

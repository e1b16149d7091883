"""The floors of the house: a module imports its own floor and those below; foreign packages stay in their rooms."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "jitfp4"
FLOORS = (
    (
        "version",
        "spec",
        "arch",
        "layouts",
        "formats",
        "config",
        "errors",
        "reference",
        "selection",
        "dispatch",
        "addresses",
    ),
    ("cache", "bundle", "wheel", "remote", "render", "keys", "kernel"),
    ("tensors", "replay", "driver", "nvrtc", "sim", "tactics", "weight"),
    ("engine", "operation", "public"),
    ("families",),
    ("warmup", "golden", "tuning", "integrations"),
    ("cli", "flashinfer", "registration", "__init__", "__main__"),
)
FLOOR = {module: level for level, modules in enumerate(FLOORS) for module in modules}
ROOMS = {
    # sim takes torch tensors at its edge
    "torch": {
        "addresses",
        "tensors",
        "weight",
        "dispatch",
        "replay",
        "operation",
        "public",
        "reference",
        "families",
        "sim",
        "tuning",
        "integrations",
    },
    "transformers": {"integrations"},
    "safetensors": {"integrations"},
    "cuda": {"nvrtc", "driver", "cli"},  # cli asks where nvdisasm is
    "jinja2": {"render"},
    "typer": {"cli", "__main__"},
    "filelock": {"cache"},
    "zstandard": {"bundle"},
}
MODULES = sorted(PACKAGE.rglob("*.py"))


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module == "jitfp4":
            yield from (f"jitfp4.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or ""


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_no_higher_floor(path: Path) -> None:
    here = room(path)
    for name in imports(path):
        parts = name.split(".")
        if parts[0] == "jitfp4" and len(parts) > 1 and parts[1] in FLOOR and path.name != "__init__.py":
            assert FLOOR[parts[1]] <= FLOOR[here], f"{path} on floor {FLOOR[here]} imports {name}"
            if here == parts[1] == "families":
                own = path.relative_to(PACKAGE).parts[1].removesuffix(".py")
                assert parts[2] == own, f"{path}: a family imports another"
        if parts[0] in ROOMS:
            assert here in ROOMS[parts[0]], f"{path} imports {name}, which belongs in {sorted(ROOMS[parts[0]])}"


@pytest.mark.complete
def test_every_module_has_a_floor() -> None:
    assert {room(path) for path in MODULES} <= set(FLOOR)

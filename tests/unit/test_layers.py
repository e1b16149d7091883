"""The floors of the house: a module imports its own floor and those below; foreign packages stay in their rooms."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "jitfp4"
FLOORS = re.findall(r"^.{12}([1-9])  ((?:\S+ )*\S+)", (ROOT / "README.md").read_text(), re.MULTILINE)
"""Number and modules of each, as README lists them."""
FLOOR = {module.split("/")[0]: int(number) for number, modules in FLOORS for module in modules.split()}
FLOOR |= {"__init__": len(FLOORS), "__main__": len(FLOORS)}
ROOMS = {
    # sim takes torch tensors at its edge
    "torch": {
        "addresses",
        "tensors",
        "weight",
        "dispatch",
        "dtypes",
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
    assert {room(path) for path in MODULES} == set(FLOOR), "README, Where things are"
    assert [int(number) for number, _ in FLOORS] == list(range(1, len(FLOORS) + 1))

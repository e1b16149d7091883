"""The floors of the house: a module imports its own floor and those below, without circles; foreign packages stay in
their rooms.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
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
        "counters",
        "tensors",
        "weight",
        "dispatch",
        "dtypes",
        "remembered",
        "replay",
        "operation",
        "public",
        "reference",
        "families",
        "flashinfer",
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
    "vllm": {"integrations"},
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


# ---- circles ---------------------------------------------------------------------------------------------------------

OWNERS = ("machine", "memory", "program", "races")
"""Modules of the simulator that parts of them name as types only, to say what they are a part of."""
NAMES = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in MODULES}


def graph(*, owners: Sequence[str]) -> dict[str, set[str]]:
    """What each module imports, also in functions and for types; without the simulator's imports of types of owners."""
    let = {f"jitfp4.sim.{owner}" for owner in owners}
    found: dict[str, set[str]] = {}
    for name, path in NAMES.items():
        tree = ast.parse(path.read_text())
        types = {node for part in ast.walk(tree) if _is_for_types(part) for node in ast.walk(part)}
        found[name] = {
            other
            for node in ast.walk(tree)
            if isinstance(node, ast.Import | ast.ImportFrom)
            for other in _modules(node)
            if other != name and not (node in types and name.startswith("jitfp4.sim.") and other in let)
        }
    return found


def _is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def _modules(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    """The modules of the package that a statement imports, or imports names of."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if alias.name in NAMES)
        return
    for alias in node.names:
        name = f"{node.module}.{alias.name}"
        if name in NAMES or node.module in NAMES:
            yield name if name in NAMES else str(node.module)


def in_circles(imported: dict[str, set[str]]) -> set[str]:
    """What is left when modules that nobody imports, or that import nobody, are taken away again and again."""
    left = {name: set(others) for name, others in imported.items()}
    while True:
        wanted = set().union(*left.values())
        gone = {name for name, others in left.items() if not others or name not in wanted}
        if not gone:
            return set(left)
        left = {name: others - gone for name, others in left.items() if name not in gone}


def test_there_are_no_circles() -> None:
    assert in_circles(graph(owners=OWNERS)) == set()


@pytest.mark.parametrize("owner", OWNERS)
def test_every_exception_is_needed(owner: str) -> None:
    assert in_circles(graph(owners=[other for other in OWNERS if other != owner]))


@pytest.mark.complete
def test_every_module_has_a_floor() -> None:
    assert {room(path) for path in MODULES} == set(FLOOR), "README, Where things are"
    assert [int(number) for number, _ in FLOORS] == list(range(1, len(FLOORS) + 1))

"""What the documentation promises is what the code does."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
from collections.abc import Callable
from pathlib import Path

import pytest

import jitfp4
import jitfp4.flashinfer
from jitfp4 import config, errors

PACKAGE = Path(__file__).parents[2] / "jitfp4"
FAMILIES = {f"jitfp4.families.{path.parent.name}" for path in (PACKAGE / "families").glob("*/__init__.py")}
FUNCTIONS = [
    value for name in jitfp4.__all__ if inspect.isfunction(value := getattr(jitfp4, name)) and name != "cache_info"
]


@pytest.mark.parametrize("module", sorted(jitfp4._HOMES.keys() | FAMILIES))
def test_what_a_module_makes_public_is_public(module: str) -> None:
    listed = set(importlib.import_module(module).__all__)
    assert listed == set(jitfp4._HOMES.get(module, ())), f"_HOMES of jitfp4/__init__.py beside __all__ of {module}"
    imported = re.findall(r"^    from ([\w.]+) import \*$", inspect.getsource(jitfp4), re.MULTILINE)
    assert module in imported, f"jitfp4/__init__.py: from {module} import *, which type checkers read"


@pytest.mark.parametrize("name", jitfp4.__all__)
def test_every_public_name_has_a_docstring_of_its_own(name: str) -> None:
    value = getattr(jitfp4, name)
    assert value.__doc__
    assert not (dataclasses.is_dataclass(value) and value.__doc__.startswith(f"{name}(")), "dataclass's own text"


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_every_module_and_public_class_has_a_docstring(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree), f"{path} has none"
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            assert ast.get_docstring(node), f"{path}: class {node.name} has none"


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_public_functions_describe_every_parameter_and_what_comes_back(function: Callable[..., object]) -> None:
    text = inspect.getdoc(function) or ""
    sections = dict(re.findall(r"^(Args|Returns|Numerics|Raises):\n((?:(?: .*)?\n?)*?)(?=^\S|\Z)", text, re.MULTILINE))
    assert sections.keys() >= {"Args", "Returns", "Raises"}
    described = re.findall(r"^ {4}([\w, ]+):", sections["Args"], re.MULTILINE)
    names = [name.strip() for group in described for name in group.split(",")]
    assert names == list(inspect.signature(function).parameters)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_public_functions_are_annotated_in_full(function: Callable[..., object]) -> None:
    signature = inspect.signature(function)
    assert signature.return_annotation is not inspect.Signature.empty
    assert all(p.annotation is not inspect.Parameter.empty for p in signature.parameters.values())


def test_every_variable_is_in_the_table_with_its_default() -> None:
    table = dict(re.findall(r"^\| (JITFP4_\w+(?:, JITFP4_\w+)*) \|.*\| (.*?) \|$", config.__doc__ or "", re.MULTILINE))
    documented = {name: default for names, default in table.items() for name in names.split(", ")}
    source = inspect.getsource(config)
    assert documented.keys() == set(re.findall(r'"(JITFP4_\w+)"', source))
    defaults = config.read_config({"HOME": "/home/me"})
    assert str(defaults.cache_dir) == "/home/me/.cache/jitfp4"
    assert config.read_config({"XDG_CACHE_HOME": "/xdg", "HOME": "/home/me"}).cache_dir == Path("/xdg/jitfp4")
    assert documented["JITFP4_CACHE"] == f"``{defaults.cache_mode}``"
    assert documented["JITFP4_CACHE_MAX_BYTES"] == f"{defaults.cache_max_bytes >> 30} GiB, {defaults.cache_max_entries}"
    assert documented["JITFP4_OFFLINE"] == str(int(defaults.offline))
    assert documented["JITFP4_STRICT"] == str(int(defaults.strict))
    assert documented["JITFP4_LOCK_TIMEOUT"] == f"{defaults.lock_timeout:.0f}"
    assert defaults.tactics is None and documented["JITFP4_TACTICS"] == "none"
    assert defaults.cache_ro == () and defaults.bundle_sha256 is None
    assert (documented["JITFP4_CACHE_RO"], documented["JITFP4_BUNDLE_SHA256"]) == ("none", "none")
    assert defaults.record is None and documented["JITFP4_RECORD"] == "none"
    assert defaults.log_level is None and all(f"``{level}``" in (config.__doc__ or "") for level in config.LOG_LEVELS)


@pytest.mark.complete
def test_every_public_name_is_in_the_reference() -> None:
    pages = (PACKAGE.parent / "docs/api").glob("*.md")
    described = re.findall(r"^::: jitfp4\.([\w.]+)$", "\n".join(page.read_text() for page in pages), re.MULTILINE)
    assert len(described) == len(set(described))
    of_flashinfer = {name.split(".")[1] for name in described if name.startswith("flashinfer.")}
    own = {name.split(".")[0] for name in described if not name.startswith("flashinfer.")}
    assert own == set(jitfp4.__all__), "a page in docs/api has ::: jitfp4.NAME"
    assert of_flashinfer == {*jitfp4.flashinfer.__all__} - {"MODULES"}, "docs/api/flashinfer.md"


def test_the_drawn_tree_of_errors_is_the_tree() -> None:
    drawn = re.findall(r"── (\w+)", errors.__doc__ or "")
    assert ["Jitfp4Error", *drawn] == list(_tree(errors.Jitfp4Error))


def _tree(error: type[Exception]) -> list[str]:
    below = [sub for sub in error.__subclasses__() if sub.__module__ == errors.__name__]
    return [error.__name__, *(name for sub in below for name in _tree(sub))]

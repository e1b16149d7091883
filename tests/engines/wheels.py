"""Python files of a wheel, and where FlashInfer defines a name: read as text, nothing is imported or run."""

from __future__ import annotations

import ast
import zipfile
from pathlib import Path


class Sources:
    """Python files by their path in a wheel or in site-packages, and the version that they are of."""

    def __init__(self, sources: dict[str, str], version: str) -> None:
        self.sources, self.version = sources, version
        self._trees: dict[str, ast.Module] = {}

    @classmethod
    def of_wheel(cls, path: Path) -> Sources:
        with zipfile.ZipFile(path) as archive:
            names = sorted(name for name in archive.namelist() if name.endswith(".py"))
            return cls({name: archive.read(name).decode() for name in names}, path.name.split("-")[1])

    @classmethod
    def of_folder(cls, folder: Path, package: str) -> Sources:
        files = sorted((folder / package).rglob("*.py"))
        return cls({file.relative_to(folder).as_posix(): file.read_text() for file in files}, "installed")

    def tree(self, file: str) -> ast.Module:
        if file not in self._trees:
            self._trees[file] = ast.parse(self.sources[file])
        return self._trees[file]

    def definition(self, module: str, name: str) -> tuple[str, ast.FunctionDef | ast.ClassDef] | None:
        """The file and the statement that define ``module.name``, through imports and other names; None if none does.

        Of a function with overloads it is the last one, which runs.
        """
        file = next((file for file in _files(module) if file in self.sources), None)
        if file is None:
            return None
        package = module if file.endswith("/__init__.py") else module.rpartition(".")[0]
        found: tuple[str, ast.FunctionDef | ast.ClassDef] | None = None
        for node in _statements(self.tree(file).body):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
                found = file, node
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        found = self.definition(_absolute(package, node), alias.name) or found
            elif isinstance(node, ast.Assign) and name in _names(node.targets) and isinstance(node.value, ast.Name):
                found = self.definition(module, node.value.id) or found
        return found


def _names(targets: list[ast.expr]) -> set[str]:
    return {target.id for target in targets if isinstance(target, ast.Name)}


def _files(module: str) -> tuple[str, str]:
    path = module.replace(".", "/")
    return f"{path}.py", f"{path}/__init__.py"


def _statements(body: list[ast.stmt]) -> list[ast.stmt]:
    """The statements of a module, also those below ``if``, ``try`` and ``with``."""
    found = []
    for node in body:
        found.append(node)
        for part in ("body", "orelse", "handlers", "finalbody"):
            if isinstance(node, ast.If | ast.Try | ast.With):
                for inner in getattr(node, part, []):
                    found += _statements(inner.body if isinstance(inner, ast.ExceptHandler) else [inner])
    return found


def _absolute(package: str, node: ast.ImportFrom) -> str:
    """The full name of the module of ``from ... import``."""
    if not node.level:
        return node.module or ""
    base = package.split(".")[: len(package.split(".")) - node.level + 1]
    return ".".join([*base, *([node.module] if node.module else [])])

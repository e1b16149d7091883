"""Packages that SGLang imports and only names, or uses on a GPU, are stood in for where they are not installed.

To import this module is enough, before SGLang is imported.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

STOOD_IN = ("IPython", "torchvision", "tvm_ffi")


def passed(*given: Any, **named: Any) -> Any:
    """A decorator that changes nothing, with arguments of its own or without."""
    return given[0] if len(given) == 1 and not named and callable(given[0]) else passed


class StandIn(ModuleType):
    """A package with any name in it."""

    __path__: list[str] = []  # noqa: RUF012 - what makes it a package

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {}) if name[0].isupper() else passed


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the packages that are stood in for, after all others."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        del path, target
        found = name.partition(".")[0] in STOOD_IN
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if found else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


if importlib.util.find_spec("transformers") is not None:
    importlib.import_module("transformers.modeling_layers")  # it does without torchvision only while there is none
sys.meta_path.append(Finder())

"""Registers the operators with torch as soon as it is imported, so that a saved export loads after ``import jitfp4``.

Importing jitfp4 imports no torch. Where torch comes later, a finder on ``sys.meta_path`` waits for it: it finds torch
where the finders behind it do, and has the families imported once torch's own code has run. It stays there, because
removing it could make another thread skip a finder.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType


def register_with_torch() -> None:
    """Import the families, which register their operators, if torch is imported, or else when it will be."""
    if sys.modules.get("torch") is not None:
        _import_families()
    elif _Finder not in sys.meta_path:
        sys.meta_path.insert(0, _Finder)


def _import_families() -> None:
    with contextlib.suppress(Exception):  # ``import torch`` is not to fail; the first public name raises it again
        importlib.import_module("jitfp4.families")


class _Finder:
    """Finds torch only."""

    @classmethod
    def find_spec(cls, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != "torch":
            return None
        finders = list(sys.meta_path)
        for finder in finders[finders.index(cls) + 1 :]:
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader)  # type: ignore[assignment]
                return spec
        return None


class _Loader:
    """Torch's own loader, which takes its place back before torch's code runs."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def exec_module(self, module: Any) -> None:
        module.__loader__ = module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        _import_families()

"""The store that most projects start with: files written in place, no checks, no locks. It exists to be caught.

Same tree as the real one, so that the same fault hits both. A fault test proves something because this store fails it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from jitfp4.cache import Built, Manifest
from jitfp4.cache.layer import entry_path
from jitfp4.config import Config
from jitfp4.keys import Recipe


@dataclass(frozen=True)
class NaiveLoaded:
    """What the naive store hands out, believing it."""

    cubin: bytes


class NaiveStore:
    """One folder per kernel; what is there is right."""

    def __init__(self, config: Config) -> None:
        assert config.cache_dir is not None
        self.root = config.cache_dir

    def get_or_build(self, recipe: Recipe, toolchain: str, build: Callable[[], Built]) -> NaiveLoaded:
        found = self.lookup(recipe, toolchain)
        if found is not None:
            return found
        built = build()
        folder = self._folder(recipe, toolchain)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "kernel.cubin").write_bytes(built.cubin)
        (folder / "kernel.cu").write_text(recipe.source)
        (folder / "entry.json").write_bytes(Manifest.of(recipe, toolchain, built).encode())
        return NaiveLoaded(built.cubin)

    def lookup(self, recipe: Recipe, toolchain: str) -> NaiveLoaded | None:
        try:
            return NaiveLoaded((self._folder(recipe, toolchain) / "kernel.cubin").read_bytes())
        except FileNotFoundError:
            return None

    def remove(self, recipe: Recipe, toolchain: str) -> None:
        (self._folder(recipe, toolchain) / "kernel.cubin").unlink(missing_ok=True)

    def _folder(self, recipe: Recipe, toolchain: str) -> Path:
        return self.root / entry_path(recipe.digest, toolchain)

"""A walk over a root: its entries, their last use and size, and the folders that cannot be read."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from jitfp4.cache.entry import MANIFEST, is_digest, is_toolchain
from jitfp4.cache.layer import VERSION, Layer
from jitfp4.cache.tree import check_trusted, disk_bytes, names, open_folder
from jitfp4.errors import CacheUntrustedError


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """The last use and the size of one entry. ``disk_bytes`` counts blocks; ``last_used`` is in seconds since 1970."""

    digest: str
    toolchain: str
    disk_bytes: int
    last_used: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Obstacle:
    """A folder on the way to entries that cannot be read or trusted, or something else in its place.

    ``path`` is relative to the root; empty for the root itself.
    """

    path: str
    error: OSError | CacheUntrustedError

    @property
    def digest_prefix(self) -> str:
        """The first digits of the digests of the entries in it."""
        return "".join(self.path.split("/")[1:])


@dataclass(frozen=True, slots=True)
class Survey:
    """The entries of a root, least recently used first, and the folders that could not be walked."""

    uses: list[Use] = field(default_factory=list)
    obstacles: list[Obstacle] = field(default_factory=list)


def survey(layer: Layer) -> Survey:
    """Walk a root, following no link. A root that does not exist is empty; a last use in the future counts as now."""
    found = Survey()
    for item in _look(layer.path, None, (), trusted=not layer.is_pinned()):
        if isinstance(item, Use):
            found.uses.append(item)
        else:
            found.obstacles.append(item)
    found.uses.sort(key=lambda use: (use.last_used, use.digest, use.toolchain))
    return found


def _look(path: str | Path, at: int | None, place: tuple[str, ...], *, trusted: bool) -> Iterator[Use | Obstacle]:
    """Walk the folder ``path`` in the folder ``at``. ``place`` is its path below the root, name by name."""
    try:
        with open_folder(path, at=at) as folder:
            if trusted:
                check_trusted(os.fstat(folder), "/".join(place) or str(path))
            for name in names(folder):
                if len(place) == 3 and is_toolchain(name):
                    yield _use("".join(place[1:]), name, folder)
                elif _leads_on(place, name):
                    yield from _look(name, folder, (*place, name), trusted=trusted)
    except FileNotFoundError:
        return  # it does not exist, or was evicted meanwhile
    except (OSError, CacheUntrustedError) as error:
        yield Obstacle(path="/".join(place), error=error)


def _leads_on(place: tuple[str, ...], name: str) -> bool:
    """Whether the folder ``name`` in ``place`` can hold entries."""
    match place:
        case ():
            return name == VERSION
        case (_,):
            return is_digest(name + "0" * 62)
        case (_, fan):
            return is_digest(fan + name)
    return False


def _use(digest: str, toolchain: str, recipe: int) -> Use:
    total = disk_bytes(toolchain, at=recipe)[0]
    return Use(digest=digest, toolchain=toolchain, disk_bytes=total, last_used=_last_used(toolchain, recipe))


def _last_used(toolchain: str, recipe: int) -> float:
    try:
        with open_folder(toolchain, at=recipe) as folder:
            return min(os.stat(MANIFEST, dir_fd=folder, follow_symlinks=False).st_mtime, time.time())
    except (OSError, CacheUntrustedError):
        return 0.0

"""Keeping the user's root within its limits: least recently used first, measured in disk blocks."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from jitfp4.cache.entry import MANIFEST
from jitfp4.cache.layer import Layer, entry_path
from jitfp4.cache.lock import LOCKS, open_lock, try_lock
from jitfp4.cache.publish import BAD, evict, remove_tree, sweep

PRUNE_LOCK = f"{LOCKS}/prune"
"""Held by the one process that evicts. Its time of modification is when the last pass began."""

_PASS_SECONDS = 60.0
_ROOM = 7 / 8  # an automatic pass that has to evict goes down to this share, so that the next publish fits


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a pass leaves behind: disk bytes, number of entries, seconds since the last use. None is no limit."""

    max_bytes: float | None = None
    max_entries: float | None = None
    max_age: float | None = None

    def exceeded(self, total: int, count: int) -> bool:
        """``total`` disk bytes in ``count`` entries are too much."""
        return (self.max_bytes is not None and total > self.max_bytes) or (
            self.max_entries is not None and count > self.max_entries
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """One entry as the eviction sees it. ``disk_bytes`` counts blocks; ``last_used`` is in seconds since 1970."""

    digest: str
    toolchain: str
    disk_bytes: int
    last_used: float


def survey(layer: Layer) -> list[Use]:
    """Every entry folder of a layer, least recently used first. A stamp in the future counts as now."""
    now = time.time()
    uses = []
    for digest, toolchain in layer.places():
        folder = layer.path / entry_path(digest, toolchain)
        last_used = min(_modified(folder / MANIFEST), now)
        uses.append(Use(digest=digest, toolchain=toolchain, disk_bytes=disk_bytes(folder)[0], last_used=last_used))
    return sorted(uses, key=lambda use: (use.last_used, use.digest, use.toolchain))


def disk_bytes(path: Path) -> tuple[int, int]:
    """Bytes of blocks and number of inodes of ``path`` and all below it. What vanishes meanwhile counts as nothing."""
    total, inodes = 0, 0
    with suppress(OSError):
        total, inodes = path.lstat().st_blocks * 512, 1
        with os.scandir(path) as items:
            for item in items:
                below = disk_bytes(path / item.name)
                total, inodes = total + below[0], inodes + below[1]
    return total, inodes


def choose(uses: list[Use], limits: Limits, *, other_bytes: int) -> list[Use]:
    """The entries that have to go, least recently used first; ``other_bytes`` are on disk besides them."""
    total, count = other_bytes + sum(use.disk_bytes for use in uses), len(uses)
    oldest_allowed = time.time() - limits.max_age if limits.max_age is not None else float("-inf")
    chosen = []
    for use in uses:
        if use.last_used >= oldest_allowed and not limits.exceeded(total, count):
            break
        chosen.append(use)
        total, count = total - use.disk_bytes, count - 1
    return chosen


def enforce(root: int, layer: Layer, limits: Limits, *, dry_run: bool = False, room: float = 1.0) -> list[Use]:
    """One pass: sweep, drop the evidence in ``bad/`` when space is short, evict. Returns what went, or would go.

    Args:
        root: descriptor of the trusted folder of ``layer``, the user's root.
        room: when a limit is exceeded, evict down to this share of it.
    """
    if not dry_run:
        sweep(root)
    uses = survey(layer)
    total = disk_bytes(layer.path)[0]
    if limits.exceeded(total, len(uses)):
        total -= disk_bytes(layer.path / BAD)[0]
        if not dry_run:
            remove_tree(root, BAD)
        limits = Limits(
            max_bytes=None if limits.max_bytes is None else limits.max_bytes * room,
            max_entries=None if limits.max_entries is None else limits.max_entries * room,
            max_age=limits.max_age,
        )
    chosen = choose(uses, limits, other_bytes=total - sum(use.disk_bytes for use in uses))
    return [use for use in chosen if dry_run or evict(root, entry_path(use.digest, use.toolchain))]


def enforce_now_and_then(root: int, layer: Layer, limits: Limits, *, at_once: bool) -> int:
    """An automatic pass, unless another process is at it or one has just been made. Returns the number of evictions."""
    with open_lock(root, PRUNE_LOCK) as fd:
        status = os.fstat(fd)
        recent = status.st_size > 0 and abs(time.time() - status.st_mtime) < _PASS_SECONDS
        if (recent and not at_once) or not try_lock(fd):
            return 0
        os.pwrite(fd, b"the last pass began when this file was modified\n", 0)
        return len(enforce(root, layer, limits, room=_ROOM))


def _modified(path: Path) -> float:
    try:
        return path.lstat().st_mtime
    except OSError:
        return 0.0

"""Results of the cache: a kernel, or why there is none; and counters."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from jitfp4.cache.layer import entry_path


class Miss(enum.StrEnum):
    """Why a look-up found nothing to use. Where several layers have a reason, the last of these is reported."""

    OFF = "off"
    ABSENT = "absent"
    TOOLCHAIN = "other toolchain"
    UNREADABLE = "unreadable"
    UNTRUSTED = "untrusted"
    CORRUPT = "corrupt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Missed:
    """A look-up without a result. ``detail`` lists what was found but refused, layer by layer."""

    reason: Miss
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A kernel for the driver: exactly these bytes were verified, or came from build().

    ``toolchain`` is the one that built it. ``missed`` is None for a hit, else why the kernel had to be built, in
    ``build_ms`` milliseconds.
    """

    cubin: bytes
    symbol: str
    toolchain: str | None
    digest: str
    root: Path | None = None
    missed: Missed | None = None
    build_ms: float = 0.0

    @property
    def path(self) -> Path | None:
        """The entry's folder; None for a kernel that was built and not stored."""
        return self.root / entry_path(self.digest, self.toolchain) if self.root and self.toolchain else None


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheInfo:
    """Counters of one Cache since it was made.

    ``misses`` counts by Miss value, ``store_errors`` by cause. ``joins`` counts misses that were answered by the build
    of another process, ``lock_timeouts`` those that waited for another process for too long.
    """

    hits: int
    misses: Mapping[str, int]
    builds: int
    publishes: int
    quarantines: int
    evictions: int
    joins: int
    lock_timeouts: int
    store_errors: Mapping[str, int]

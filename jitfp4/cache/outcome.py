"""What the cache answers: a kernel, why there is none, and counters."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from jitfp4.cache.layer import entry_path


class Miss(enum.StrEnum):
    """Why a lookup found nothing to use; the later members hide the earlier ones when layers disagree."""

    OFF = "off"
    ABSENT = "absent"
    TOOLCHAIN = "other toolchain"
    UNREADABLE = "unreadable"
    UNTRUSTED = "untrusted"
    CORRUPT = "corrupt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Missed:
    """A lookup without a result. ``detail`` names what was found and refused, layer by layer."""

    reason: Miss
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A kernel to hand to the driver: exactly these bytes were verified, or came from build().

    ``toolchain`` built it. ``missed`` is None for a hit, else why it had to be built; ``build_ms`` is what that took.
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
        """The entry's folder; None when the kernel was built and is only in memory."""
        return self.root / entry_path(self.digest, self.toolchain) if self.root and self.toolchain else None


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheInfo:
    """Counters of one Cache since it was made. ``misses`` is by Miss value, ``store_errors`` by cause; ``joins`` are
    misses that another process's build answered, ``lock_timeouts`` those for which the wait was too long."""

    hits: int
    misses: Mapping[str, int]
    builds: int
    publishes: int
    quarantines: int
    evictions: int
    joins: int
    lock_timeouts: int
    store_errors: Mapping[str, int]

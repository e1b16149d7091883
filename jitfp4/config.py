"""Every JITFP4_ environment variable, read in one place. None of them changes a numeric result.

| variable | meaning | default |
|---|---|---|
| JITFP4_CACHE_DIR | the user's kernel cache | ``$XDG_CACHE_HOME/jitfp4`` or ``~/.cache/jitfp4`` |
| JITFP4_CACHE_RO | read-only caches searched after it, separated by ``:`` | none |
| JITFP4_CACHE | ``rw``, ``ro`` (never write) or ``off`` | ``rw`` |
| JITFP4_CACHE_MAX_BYTES, JITFP4_CACHE_MAX_ENTRIES | size limits of the user's cache | 2 GiB, 50000 |
| JITFP4_OFFLINE | 1: never compile; a missing kernel is an error that says how to prebuild it | 0 |
| JITFP4_STRICT | 1: errors of the store and of the tactics file are raised, not logged | 0 |
| JITFP4_BUNDLE_SHA256 | digest of the one bundle whose kernels are imported, and loaded from any cache | none |
| JITFP4_TACTICS | tactics file: what ``jitfp4 tune`` found on this GPU | none |
| JITFP4_LOCK_TIMEOUT | seconds to wait for another process that builds the same kernel | 60 |
| JITFP4_RECORD | a file to which each process appends the kernels that it uses; ``jitfp4 warmup`` builds them | none |
| JITFP4_LOG | to stderr: ``debug``, ``info`` (a line for each compiled kernel), ``warning``, ``error`` | none |
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from jitfp4.errors import ArgumentError, CacheError

CACHE_MODES = ("rw", "ro", "off")
LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The environment, parsed. ``cache_dir`` is None when there is no home directory to put it in."""

    cache_dir: Path | None
    cache_ro: tuple[Path, ...] = ()
    cache_mode: str = "rw"
    cache_max_bytes: int = 2 << 30
    cache_max_entries: int = 50_000
    offline: bool = False
    strict: bool = False
    bundle_sha256: str | None = None
    tactics: Path | None = None
    lock_timeout: float = 60.0
    record: Path | None = None
    log_level: str | None = None

    def check_writable(self) -> None:
        """The user's cache may be written. Raises CacheError."""
        if self.cache_mode != "rw":
            raise CacheError(f"JITFP4_CACHE is {self.cache_mode}: the cache is not written")


def read_config(env: Mapping[str, str] | None = None) -> Config:
    """Parse the JITFP4_ variables of ``env`` (the process environment by default)."""
    env = os.environ if env is None else env
    return Config(
        cache_dir=_cache_dir(env),
        cache_ro=tuple(Path(part).absolute() for part in env.get("JITFP4_CACHE_RO", "").split(os.pathsep) if part),
        cache_mode=_choice(env, "JITFP4_CACHE", CACHE_MODES) or "rw",
        cache_max_bytes=int(_number(env, "JITFP4_CACHE_MAX_BYTES", 2 << 30)),
        cache_max_entries=int(_number(env, "JITFP4_CACHE_MAX_ENTRIES", 50_000)),
        offline=_flag(env, "JITFP4_OFFLINE"),
        strict=_flag(env, "JITFP4_STRICT"),
        bundle_sha256=read_sha256("JITFP4_BUNDLE_SHA256", env.get("JITFP4_BUNDLE_SHA256") or None),
        tactics=Path(env["JITFP4_TACTICS"]).absolute() if env.get("JITFP4_TACTICS") else None,
        lock_timeout=_number(env, "JITFP4_LOCK_TIMEOUT", 60.0),
        record=Path(env["JITFP4_RECORD"]).absolute() if env.get("JITFP4_RECORD") else None,
        log_level=(_choice(env, "JITFP4_LOG", LOG_LEVELS) or "").upper() or None,
    )


def read_sha256(name: str, text: str | None) -> str | None:
    """A digest in lower case. Raises ArgumentError for anything but 64 hex digits."""
    if text is None:
        return None
    if not re.fullmatch("[0-9a-fA-F]{64}", text):
        raise ArgumentError(name, repr(text), "64 hex digits")
    return text.lower()


def _cache_dir(env: Mapping[str, str]) -> Path | None:
    if explicit := env.get("JITFP4_CACHE_DIR"):
        return Path(explicit).absolute()
    xdg, home = Path(env.get("XDG_CACHE_HOME", "")), Path(env.get("HOME", ""))
    if xdg.is_absolute():  # the XDG specification says to ignore a relative one
        return xdg / "jitfp4"
    return home / ".cache" / "jitfp4" if home.is_absolute() else None


def _choice(env: Mapping[str, str], name: str, choices: tuple[str, ...]) -> str | None:
    text = env.get(name)
    if text is not None and text not in choices:
        raise ArgumentError(name, repr(text), ", ".join(choices))
    return text


def _flag(env: Mapping[str, str], name: str) -> bool:
    text = env.get(name, "0")
    if text not in ("", "0", "1"):
        raise ArgumentError(name, repr(text), "0 or 1")
    return text == "1"


def _number(env: Mapping[str, str], name: str, default: float) -> float:
    text = env.get(name)
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        raise ArgumentError(name, repr(text), "a number") from None
    if not 0 < value < float("inf"):
        raise ArgumentError(name, repr(text), "a positive finite number")
    return value

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
        cache_ro=_paths(env, "JITFP4_CACHE_RO"),
        cache_mode=_choice(env, "JITFP4_CACHE", CACHE_MODES) or "rw",
        cache_max_bytes=int(_number(env, "JITFP4_CACHE_MAX_BYTES", 2 << 30, least=1)),
        cache_max_entries=int(_number(env, "JITFP4_CACHE_MAX_ENTRIES", 50_000, least=1)),
        offline=_flag(env, "JITFP4_OFFLINE"),
        strict=_flag(env, "JITFP4_STRICT"),
        bundle_sha256=read_sha256("JITFP4_BUNDLE_SHA256", env.get("JITFP4_BUNDLE_SHA256") or None),
        tactics=_path(env, "JITFP4_TACTICS"),
        lock_timeout=_number(env, "JITFP4_LOCK_TIMEOUT", 60.0),
        record=_path(env, "JITFP4_RECORD"),
        log_level=(_choice(env, "JITFP4_LOG", LOG_LEVELS) or "").upper() or None,
    )


def read_sha256(name: str, text: str | None) -> str | None:
    """A digest in lower case. Raises ArgumentError for anything but 64 hex digits."""
    if text is None:
        return None
    if not re.fullmatch("[0-9a-fA-F]{64}", text):
        raise ArgumentError(name, repr(text), "64 hex digits")
    return text.lower()


def read_path(name: str, text: str) -> Path:
    """An absolute path. Raises ArgumentError for a URL, for ``~``, which only shells expand, and for NUL characters.

    Also for a relative path where the working directory was removed.
    """
    if "://" in text or text.startswith("~") or "\0" in text:
        raise ArgumentError(name, repr(text), "a path on this machine: no URL, and no ~, which only shells expand")
    try:
        return Path(text).absolute()
    except FileNotFoundError:
        raise ArgumentError(name, repr(text), "an absolute path: the working directory was removed") from None


def _path(env: Mapping[str, str], name: str) -> Path | None:
    return read_path(name, env[name]) if env.get(name) else None


def _paths(env: Mapping[str, str], name: str) -> tuple[Path, ...]:
    text = env.get(name, "")
    if "://" in text:  # before its colon separates two paths
        read_path(name, text)
    return tuple(read_path(name, part) for part in text.split(os.pathsep) if part)


def _cache_dir(env: Mapping[str, str]) -> Path | None:
    if explicit := _path(env, "JITFP4_CACHE_DIR"):
        return explicit
    xdg, home = Path(env.get("XDG_CACHE_HOME", "")), Path(env.get("HOME", ""))
    if xdg.is_absolute():  # the XDG specification says to ignore a relative one
        return xdg / "jitfp4"
    return home / ".cache" / "jitfp4" if home.is_absolute() else None


def _choice(env: Mapping[str, str], name: str, choices: tuple[str, ...]) -> str | None:
    text = env.get(name) or None
    if text is not None and text not in choices:
        raise ArgumentError(name, repr(text), ", ".join(choices))
    return text


def _flag(env: Mapping[str, str], name: str) -> bool:
    text = env.get(name, "0")
    if text not in ("", "0", "1"):
        raise ArgumentError(name, repr(text), "0 or 1")
    return text == "1"


def _number(env: Mapping[str, str], name: str, default: float, *, least: float = 0.0) -> float:
    text = env.get(name)
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        raise ArgumentError(name, repr(text), "a number") from None
    if not least <= value < float("inf") or not value:
        raise ArgumentError(name, repr(text), f"a finite number of {least:g} or more" if least else "a positive number")
    return value

"""Tactics files, which hold the fastest tactics measured on one GPU, and the choice of the file for this process.

A file is one JSON document, for one GPU and one toolchain. Its checksum finds damage, not forgery. That is enough: a
tactic is used only if its kernel lists it and does not reject it, so a wrong file makes calls slower, but never changes
their results.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jitfp4 import nvrtc
from jitfp4.config import read_config
from jitfp4.errors import TacticsError
from jitfp4.files import check_out, read_regular, replacing

SCHEMA = 1
MAX_BYTES = 16 << 20

Fields = Mapping[str, str | int | bool]
_KINDS: dict[str, type | tuple[type, ...]] = {
    "operation": str,
    "problem": dict,
    "kernel": str,
    "tactic": dict,
    "us": (int, float),
    "measured": int,
    "finished": bool,
}
_HEAD = ("schema", "gpu", "arch", "toolchain")
_log = logging.getLogger("jitfp4.tactics")


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The fastest tactic that was found for an operation and a bucket of its problems.

    ``us`` is the measured time of a call in microseconds, ``measured`` the number of tactics that were measured. If the
    search was interrupted, ``finished`` is false: the choice is used, and the next run measures the problem again.
    """

    operation: str
    problem: Fields
    kernel: str
    tactic: Fields
    us: float
    measured: int
    finished: bool

    @property
    def key(self) -> str:
        """Operation and problem as text; a file has one choice for each."""
        return f"{self.operation} {_canonical(self.problem)}"


@dataclass(frozen=True, eq=False)
class TacticsFile:
    """The choices for one GPU, by the driver's name of it, and for one toolchain, by its name in the cache."""

    gpu: str
    arch: str
    toolchain: str
    choices: Mapping[str, Choice]
    path: Path | None = None

    def of(self, operation: str) -> list[Choice]:
        """The choices for one operation."""
        return [choice for choice in self.choices.values() if choice.operation == operation]

    def encode(self) -> bytes:
        """The bytes of the file; equal choices give equal bytes."""
        body = {
            "schema": SCHEMA,
            "gpu": self.gpu,
            "arch": self.arch,
            "toolchain": self.toolchain,
            "choices": [asdict(self.choices[key]) for key in sorted(self.choices)],
        }
        return (json.dumps({"sha256": _checksum(body), **body}, indent=1) + "\n").encode()

    @classmethod
    def decode(cls, data: bytes, path: Path | None = None) -> TacticsFile:
        """Parse and verify a file. Raises TacticsError with the reason when it is damaged or of another version."""
        if len(data) > MAX_BYTES:
            raise TacticsError(f"more than {MAX_BYTES} bytes")
        try:
            body = json.loads(data)
        except (ValueError, RecursionError):
            raise TacticsError("damaged: it is no JSON") from None
        if not isinstance(body, dict) or "schema" not in body:
            raise TacticsError("no tactics file")
        if body["schema"] != SCHEMA:
            raise TacticsError(f"a tactics file of version {str(body['schema'])[:20]}; this jitfp4 reads {SCHEMA}")
        if body.pop("sha256", None) != _checksum(body):
            raise TacticsError("damaged: its checksum does not match")
        try:
            head = {name: str(body[name]) for name in _HEAD[1:]}
            choices = [_choice(fields) for fields in body["choices"]]
        except (KeyError, TypeError) as error:
            raise TacticsError(f"not in the form of version {SCHEMA}: {error}") from None
        return cls(**head, choices={choice.key: choice for choice in choices}, path=path)

    def updated(self, choices: Iterable[Choice]) -> TacticsFile:
        """This file with more choices; a later choice replaces an earlier one of the same key."""
        merged = {**self.choices, **{choice.key: choice for choice in choices}}
        return TacticsFile(self.gpu, self.arch, self.toolchain, merged, self.path)

    def check(self, gpus: Iterable[str]) -> None:
        """Check that the file was made on one of ``gpus``, with this toolchain. Raises TacticsError with the reason.

        Without NVRTC, every toolchain is accepted, as for the kernels in the cache.
        """
        if self.gpu not in (names := list(gpus)):
            here = " and ".join(map(repr, names)) or "no GPU"
            raise TacticsError(f"{self.path}: tuned on {self.gpu!r}; here is {here}")
        if (found := nvrtc.toolchain()) is not None and found.name != self.toolchain:
            raise TacticsError(f"{self.path}: tuned with {self.toolchain}; here is {found.name}")


def read(path: Path) -> TacticsFile:
    """The file at ``path``, verified. Raises TacticsError, which names it, or OSError."""
    data = read_regular(path, MAX_BYTES + 1)
    try:
        return TacticsFile.decode(data, path)
    except TacticsError as error:
        raise TacticsError(f"{path}: {error}") from None


def write(file: TacticsFile, path: Path) -> None:
    """Write a file; it appears complete or not at all. Raises ArgumentError if ``path`` cannot be a regular file."""
    check_out(path)
    with replacing(path) as raw:
        raw.write(file.encode())


def _choice(fields: Any) -> Choice:
    """Raises TypeError when a field is missing, unknown or of another type."""
    choice = Choice(**fields)
    for name, kind in _KINDS.items():
        if not isinstance(value := getattr(choice, name), kind):
            raise TypeError(f"{name}: {value!r}"[:80])
    return choice


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _checksum(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(_canonical(body).encode()).hexdigest()


# ---- what this process uses ------------------------------------------------------------------------------------------

_loaded: TacticsFile | None = None
_reading = threading.Lock()  # so that a bad file is logged once


def use(file: TacticsFile | None) -> None:
    """Use a file from now on; None: the one that JITFP4_TACTICS names, read again. Remembered calls are forgotten."""
    from jitfp4 import replay  # imports torch, which a command that only reads files does not need

    global _loaded
    _loaded = file
    for memo in (_config, _named):
        memo.cache_clear()
    replay.forget()


def active(gpu: Callable[[], str]) -> TacticsFile | None:
    """The file in use for calls on the GPU of this name; None where calls use the committed tables.

    If the file that JITFP4_TACTICS names cannot be used, that is logged once and the file is ignored; with
    JITFP4_STRICT it is a TacticsError. ``gpu`` is called only if there is a file.
    """
    if _loaded is not None:
        return _loaded if _loaded.gpu == gpu() else None
    config = _config()
    if config.tactics is None:
        return None
    with _reading:
        return _named(config.tactics, config.strict, gpu())


_config = functools.cache(read_config)


@functools.cache
def _named(path: Path, strict: bool, gpu: str) -> TacticsFile | None:
    try:
        file = read(path)
        file.check([gpu])
    except (OSError, TacticsError) as error:
        why = f"JITFP4_TACTICS: {error}"
        if strict:
            raise TacticsError(why) from None
        _log.warning("%s; the committed tables select tactics", why)
        return None
    return file

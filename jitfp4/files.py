"""Files that are written whole or not at all, and read only where they are files."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from jitfp4.errors import ArgumentError


def check_out(out: Path) -> None:
    """A file may be written there. Raises ArgumentError for a link, a folder or a device, such as /dev/stdout."""
    with suppress(FileNotFoundError):
        if not stat.S_ISREG(out.lstat().st_mode):
            raise ArgumentError("out", f"{out}, which is no regular file", "a regular file, or a name that is free")


@contextmanager
def regular(path: str | Path, *, follow: bool = True) -> Iterator[IO[bytes]]:
    """A file, open for reading. Raises OSError for a FIFO, a device or a folder, and unless ``follow`` for a link."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)  # a FIFO is not waited for
    with open(os.open(path, flags), "rb") as file:  # noqa: PTH123 - a descriptor
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "no regular file", str(path))
        yield file


def read_regular(path: str | Path, most: int, *, follow: bool = True) -> bytes:
    """The first ``most`` bytes of a file. Raises like regular()."""
    with regular(path, follow=follow) as file:
        return file.read(most)


@contextmanager
def replacing(out: Path) -> Iterator[IO[bytes]]:
    """A file that takes the name ``out`` when it is complete and on disk, and leaves nothing when it is not."""
    partial = out.with_name(f".{out.name}.{os.urandom(8).hex()}.partial")
    try:
        with partial.open("xb") as raw:
            yield raw
            raw.flush()
            os.fsync(raw.fileno())
        partial.replace(out)
    finally:
        partial.unlink(missing_ok=True)

"""Folders of a cache root, reached by descriptors: opened, made, measured, removed. No link below a root is followed.

Anything below a root may be a planted link, and a name may be swapped between a check and a use. So each step opens one
name below an open folder, and the checks and the work use the descriptor that was opened.
"""

from __future__ import annotations

import errno
import itertools
import os
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from jitfp4.errors import CacheError, CacheUntrustedError

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def check_trusted(status: os.stat_result, what: str) -> None:
    """Check that only this user and root can have written it. Raises CacheUntrustedError."""
    if status.st_uid != 0 and status.st_uid != os.geteuid():
        raise CacheUntrustedError(f"{what}: belongs to uid {status.st_uid}, not to uid {os.geteuid()} or root")
    if status.st_mode & 0o022:
        raise CacheUntrustedError(f"{what}: group or others may write it (mode {stat.S_IMODE(status.st_mode):04o})")


def check_folder(status: os.stat_result, what: str) -> None:
    """Check that ``status``, of lstat(2), is that of a folder. Raises CacheUntrustedError."""
    if not stat.S_ISDIR(status.st_mode):
        raise CacheUntrustedError(f"{what}: a symbolic link or a file where a folder belongs")


def check_shared(status: os.stat_result, what: str) -> None:
    """Check that every user can read it. Raises CacheError."""
    wanted = 0o055 if stat.S_ISDIR(status.st_mode) else 0o044
    if status.st_mode & wanted != wanted:
        mode = stat.S_IMODE(status.st_mode)
        raise CacheError(f"{what}: is for its user only (mode {mode:04o}), which --world-readable does not change")


# ---- open ------------------------------------------------------------------------------------------------------------


def folder_descriptor(path: str | Path, *, at: int | None = None) -> int:
    """A descriptor of a real folder, for the caller to close. Raises CacheUntrustedError for a link or a file."""
    try:
        return os.open(path, _FOLDER, dir_fd=at)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise CacheUntrustedError(f"{path}: a symbolic link or a file where a folder belongs") from None
        raise


def close(fd: int) -> None:
    """Close a descriptor. Errors of close(2) are ignored: they take back nothing that was read or synced before."""
    with suppress(OSError):
        os.close(fd)


@contextmanager
def open_folder(path: str | Path, *, at: int | None = None) -> Iterator[int]:
    """A descriptor of a real folder, closed at the end. Raises CacheUntrustedError for a symbolic link or a file."""
    fd = folder_descriptor(path, at=at)
    try:
        yield fd
    finally:
        close(fd)


@contextmanager
def open_trusted(path: str | Path) -> Iterator[int]:
    """A descriptor of a folder that no other user can have written. Raises CacheUntrustedError or OSError."""
    with open_folder(path) as folder:
        check_trusted(os.fstat(folder), str(path))
        yield folder


@contextmanager
def open_below(root: int, path: str, *, trusted: bool = True) -> Iterator[int]:
    """A descriptor of a folder below ``root``. Links are refused, and unless ``trusted`` is False, each level checked.

    Raises like open_trusted().
    """
    with ExitStack() as stack:
        folder, levels = root, path.split("/")
        for depth, name in enumerate(levels, 1):
            folder = stack.enter_context(open_folder(name, at=folder))
            if trusted:
                check_trusted(os.fstat(folder), "/".join(levels[:depth]))
        yield folder


def names(folder: int) -> list[str]:
    """The names in an open folder, sorted."""
    return sorted(os.listdir(folder))


def exists(folder: int, path: str) -> bool:
    """Whether ``path`` exists below ``folder``; a link counts, whatever its target."""
    try:
        os.stat(path, dir_fd=folder, follow_symlinks=False)
    except OSError:
        return False
    return True


# ---- make ------------------------------------------------------------------------------------------------------------


def fresh_name() -> str:
    """A name that no other process uses: the process id and random digits."""
    return f"{os.getpid()}-{os.urandom(8).hex()}"


def make_folders(path: Path, mode: int) -> None:
    """Make a folder and its missing parents, all with ``mode``, whatever the umask."""
    missing = itertools.takewhile(lambda folder: not os.path.lexists(folder), (path, *path.parents))
    for folder in reversed(list(missing)):
        with suppress(FileExistsError):
            folder.mkdir(mode)
            set_mode(folder, mode)


def ensure_folder(root: int, path: str, mode: int) -> bool:
    """Make one folder. One that exists must be no link, trusted, and readable by others where ``mode`` is.

    True when it is new. Raises CacheUntrustedError, CacheError or OSError.
    """
    try:
        os.mkdir(path, mode, dir_fd=root)
    except FileExistsError:
        status = os.stat(path, dir_fd=root, follow_symlinks=False)
        check_folder(status, path)
        check_trusted(status, path)
        if mode & 0o055:
            check_shared(status, path)
        return False
    set_mode(path, mode, at=root)
    return True


def set_mode(path: str | Path, mode: int, *, at: int | None = None) -> None:
    """Set the mode of a new folder, whatever the umask. A link in its place is refused, not followed."""
    fd = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
    try:
        status = os.fstat(fd)
        if status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) != mode:
            os.chmod(f"/proc/self/fd/{fd}", mode)  # noqa: PTH101 - fchmod refuses a descriptor that only names a file
    finally:
        close(fd)


# ---- measure ---------------------------------------------------------------------------------------------------------


def disk_bytes(path: str | Path, *, at: int | None = None) -> tuple[int, int]:
    """Bytes of disk blocks and number of inodes of ``path`` and all below it.

    Links are counted, not followed. Files that vanish meanwhile or cannot be read are not counted.
    """
    try:
        status = os.stat(path, dir_fd=at, follow_symlinks=False)
    except OSError:
        return 0, 0
    total, inodes = status.st_blocks * 512, 1
    if not stat.S_ISDIR(status.st_mode):
        return total, inodes
    with suppress(OSError, CacheUntrustedError), open_folder(path, at=at) as top:
        waiting = [(".", status)]
        while waiting:
            below, seen = waiting.pop()
            for name, found in _contents(top, below, seen):
                total, inodes = total + found.st_blocks * 512, inodes + 1
                if stat.S_ISDIR(found.st_mode):
                    waiting.append((f"{below}/{name}", found))
    return total, inodes


def _contents(top: int, path: str, seen: os.stat_result) -> Iterator[tuple[str, os.stat_result]]:
    """Names in the folder ``path`` below ``top`` and their status; nothing if it is no longer the one of ``seen``."""
    with suppress(OSError, CacheUntrustedError), open_folder(path, at=top) as folder:
        if os.path.samestat(os.fstat(folder), seen):
            for name in names(folder):
                with suppress(FileNotFoundError):
                    yield name, os.stat(name, dir_fd=folder, follow_symlinks=False)


# ---- remove ----------------------------------------------------------------------------------------------------------


def remove_tree(folder: int, name: str) -> bool:
    """Delete ``name`` in ``folder``: a file, a link (not its target), or a folder of any depth. True when it is gone.

    Inner folders are first moved up into ``folder``, so that three descriptors are enough at any depth. Other file
    systems are not entered. After an error the rest stays for the next attempt.
    """
    waiting, device = [name], os.fstat(folder).st_dev
    while waiting:
        current = waiting.pop()
        if _unlink(folder, current):
            continue
        with suppress(OSError, CacheUntrustedError), open_folder(current, at=folder) as inside:
            if os.fstat(inside).st_dev == device:
                waiting += [up for child in names(inside) if (up := _delete_or_lift(inside, child, folder))]
        with suppress(OSError):
            os.rmdir(current, dir_fd=folder)
    return not exists(folder, name)


def _delete_or_lift(inside: int, child: str, folder: int) -> str | None:
    """Delete a file or an empty folder. Move any other folder up into ``folder`` and return its new name."""
    if _unlink(inside, child):
        return None
    with suppress(OSError):
        os.rmdir(child, dir_fd=inside)
        return None
    with suppress(OSError):
        os.rename(child, name := fresh_name(), src_dir_fd=inside, dst_dir_fd=folder)
        return name
    return None


def _unlink(folder: int, name: str) -> bool:
    with suppress(OSError):
        os.unlink(name, dir_fd=folder)
        return True
    return False

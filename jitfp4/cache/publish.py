"""Writing: stage an entry, sync it to disk, rename it into place; quarantine, evict, sweep.

A *staging folder* is a folder in ``tmp/``, locked by its owner. Sweeping removes those whose owner was killed.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

from jitfp4.cache.entry import FILES
from jitfp4.cache.layer import VERSION, entry_path
from jitfp4.cache.lock import LOCKS, TROUBLE, held, try_lock
from jitfp4.cache.tree import (
    check_shared,
    check_trusted,
    close,
    ensure_folder,
    exists,
    folder_descriptor,
    fresh_name,
    make_folders,
    names,
    open_below,
    open_folder,
    open_trusted,
    remove_tree,
    set_mode,
)
from jitfp4.errors import CacheUntrustedError

TMP, BAD = "tmp", "bad"
KEPT_BAD = 16
"""How many quarantined entries are kept for inspection: the newest ones."""

_ATTEMPTS = 8  # another process may remove a folder between two steps


@contextmanager
def open_root(path: Path, *, world_readable: bool = False) -> Iterator[int]:
    """A descriptor of a cache root, created with its folders when missing.

    Raises:
        CacheUntrustedError: somebody else could have written it.
        CacheError: ``world_readable``, and it exists already with a mode for its user only.
        OSError: it cannot be made or opened.
    """
    mode = _folder_mode(world_readable)
    make_folders(path, mode)
    with open_trusted(path) as root:
        if world_readable:
            check_shared(os.fstat(root), str(path))
        for name in (VERSION, TMP, LOCKS):
            ensure_folder(root, name, mode)
        yield root


def publish(root: int, digest: str, toolchain: str, files: Mapping[str, bytes], *, world_readable: bool) -> bool:
    """Put one entry in place, durably. False when another process was first: then its entry stays.

    Files are written and synced, the staging folder is synced and renamed, its new parents are synced. So a visible
    entry is complete, also after a power cut.
    """
    target = entry_path(digest, toolchain)
    if exists(root, target):
        return False
    with _staging(root, _folder_mode(world_readable)) as (name, stage):
        _write_files(stage, files, 0o644 if world_readable else 0o600)
        os.fsync(stage)
        changed = _move_in(root, f"{TMP}/{name}", target, _folder_mode(world_readable))
        for folder in changed:
            with suppress(FileNotFoundError):  # already evicted
                _sync_folder(root, folder)
    return bool(changed)


def check_entry_shared(root: int, digest: str, toolchain: str) -> None:
    """Check that every user can read this entry, which was published earlier. Raises CacheError or OSError."""
    entry = entry_path(digest, toolchain)
    recipe = entry.rpartition("/")[0]
    for path in (recipe.rpartition("/")[0], recipe, entry, *(f"{entry}/{name}" for name in FILES)):
        check_shared(os.stat(path, dir_fd=root, follow_symlinks=False), path)


def _move_in(root: int, staged: str, target: str, mode: int) -> list[str]:
    """Rename into place, below parents that an eviction may remove while they are empty.

    Returns the folders that got a new member, the deepest first; an empty list when the place is taken.
    """
    recipe = target.rpartition("/")[0]
    fan = recipe.rpartition("/")[0]
    for attempt in range(_ATTEMPTS):
        try:
            made_fan = ensure_folder(root, fan, mode)
            made_recipe = ensure_folder(root, recipe, mode)
            os.rename(staged, target, src_dir_fd=root, dst_dir_fd=root)
            return [recipe, *([fan] if made_recipe or made_fan else []), *([VERSION] if made_fan else [])]
        except FileNotFoundError:
            if attempt + 1 == _ATTEMPTS:
                raise
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                break
            raise
    return []


def write_file(root: int, path: str, data: bytes, *, world_readable: bool) -> None:
    """Put a single file in place, durably. A file of the same name is replaced."""
    folder, _, leaf = path.rpartition("/")
    ensure_folder(root, folder, _folder_mode(world_readable))
    with _staging(root, _folder_mode(world_readable)) as (_, stage):
        _write_files(stage, {leaf: data}, 0o644 if world_readable else 0o600)
        os.rename(leaf, path, src_dir_fd=stage, dst_dir_fd=root)
        _sync_folder(root, folder)


def quarantine(root: int, digest: str, toolchain: str) -> str | None:
    """Move a bad entry to ``bad/`` and return its new path. The caller holds the recipe's lock.

    Of the folders above the entry, the highest one that is a link or not trusted is moved instead. The target of a
    link stays.
    """
    fan, rest = digest[:2], digest[2:]
    entry = entry_path(digest, toolchain)
    for level in (f"{VERSION}/{fan}", f"{VERSION}/{fan}/{rest}", entry):
        try:
            with open_folder(level, at=root) as folder:
                check_trusted(os.fstat(folder), level)
                if level != entry:
                    continue
        except FileNotFoundError:
            return None
        except CacheUntrustedError:
            pass
        ensure_folder(root, BAD, 0o700)
        with open_below(root, BAD) as bad:
            for name in names(bad)[: 1 - KEPT_BAD]:
                remove_tree(bad, name)
        target = f"{BAD}/{time.time_ns():020d}-{digest[:12]}-{toolchain}"
        os.rename(level, target, src_dir_fd=root, dst_dir_fd=root)
        return target
    return None


def sweep(root: int) -> int:
    """Remove staging folders of processes that died; returns how many. A folder that cannot be locked stays."""
    swept = 0
    with suppress(OSError, CacheUntrustedError), open_below(root, TMP) as tmp:
        for name in names(tmp):
            try:
                with held(partial(folder_descriptor, name, at=tmp)) as folder:
                    swept += try_lock(folder.fd) and remove_tree(tmp, name)
            except CacheUntrustedError:  # a file or a link: no process stages in one
                swept += remove_tree(tmp, name)
            except OSError:
                continue
    return swept


def evict(root: int, path: str) -> bool:
    """Remove an entry, and the folders above it that become empty. False when it does not exist or cannot be removed.

    One rename takes it out of its place, so a reader sees all of it or nothing.
    """
    version, fan, recipe, toolchain = path.split("/")
    try:
        with open_below(root, version) as top, open_below(top, fan) as middle:
            with open_below(middle, recipe) as folder:
                gone = discard(root, folder, toolchain)
            with suppress(OSError):  # not empty: another toolchain or recipe is there
                os.rmdir(recipe, dir_fd=middle)
                os.rmdir(fan, dir_fd=top)
    except (OSError, CacheUntrustedError):
        return False
    return gone


def discard(root: int, folder: int, name: str) -> bool:
    """Move ``name`` in ``folder`` to ``tmp/`` and delete it there. False when it does not exist or cannot be removed.

    The move takes no inode and hardly ever a disk block, so it works on a full disk. Without a usable ``tmp/``, or
    without a block for the new name, it is deleted in its place.
    """
    try:
        with open_below(root, TMP) as tmp:
            os.rename(name, away := fresh_name(), src_dir_fd=folder, dst_dir_fd=tmp)
            remove_tree(tmp, away)
            return True
    except CacheUntrustedError:
        return remove_tree(folder, name)
    except OSError as error:
        no_room = error.errno in (errno.ENOSPC, errno.EDQUOT) or not exists(root, TMP)
        return no_room and exists(folder, name) and remove_tree(folder, name)


@contextmanager
def _staging(root: int, mode: int) -> Iterator[tuple[str, int]]:
    """Name and descriptor of a new staging folder, which is locked against sweeping and removed unless it was moved."""
    for _ in range(_ATTEMPTS):
        name = fresh_name()
        path = f"{TMP}/{name}"
        os.mkdir(path, mode, dir_fd=root)
        with ExitStack() as stack:
            try:
                set_mode(path, mode, at=root)
                stage = stack.enter_context(held(partial(folder_descriptor, path, at=root)))
            except FileNotFoundError:
                continue  # another process has swept it already
            if not _own_staging(stage.fd):
                continue
            try:
                yield name, stage.fd
            finally:
                if exists(root, path):
                    with suppress(OSError, CacheUntrustedError), open_below(root, TMP) as tmp:
                        remove_tree(tmp, name)
            return
    raise OSError(errno.EAGAIN, "a sweeper removed every staging folder", TMP)


def _own_staging(stage: int) -> bool:
    try:
        return try_lock(stage) and os.fstat(stage).st_nlink > 0
    except OSError as error:
        if error.errno in TROUBLE:  # no locks here: nobody can lock it to sweep it
            return True
        raise


def _write_files(folder: int, files: Mapping[str, bytes], mode: int) -> None:
    """Write all files, then sync all: the first sync does most of the work of the others."""
    fds = []
    try:
        for name, data in files.items():
            fds.append(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode, dir_fd=folder))
            os.fchmod(fds[-1], mode)  # whatever the umask
            view = memoryview(data)
            while view:
                view = view[os.write(fds[-1], view) :]
        for fd in fds:
            os.fsync(fd)
    finally:
        for fd in fds:
            close(fd)


def _sync_folder(root: int, path: str) -> None:
    with open_folder(path, at=root) as folder:
        os.fsync(folder)


def _folder_mode(world_readable: bool) -> int:
    return 0o755 if world_readable else 0o700

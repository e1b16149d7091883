"""Writing: stage a folder, make it durable, rename it into place; quarantine; sweep what killed processes left."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from jitfp4.cache.layer import VERSION, check_folder, check_trusted, entry_path, open_folder
from jitfp4.cache.lock import LOCKS, TROUBLE, try_lock
from jitfp4.errors import CacheUntrustedError

TMP, BAD = "tmp", "bad"
KEPT_BAD = 16
"""Quarantined entries that are kept as evidence, the newest ones."""

_ATTEMPTS = 8  # a sweeper or an eviction may take a folder away between two steps


@contextmanager
def open_root(path: Path, *, world_readable: bool = False) -> Iterator[int]:
    """A descriptor of a cache root, created with its folders when missing. Raises CacheUntrustedError or OSError."""
    mode = _folder_mode(world_readable)
    if not path.is_dir():
        path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            path.mkdir(mode=mode)
            path.chmod(mode)  # whatever the umask
    with open_folder(path) as root:
        check_trusted(os.fstat(root), str(path))
        for name in (VERSION, TMP, LOCKS):
            _ensure_folder(root, name, mode)
        yield root


def publish(root: int, digest: str, toolchain: str, files: Mapping[str, bytes], *, world_readable: bool) -> bool:
    """Put one entry in place, durably. False when another process was first: its entry stays.

    Order: files written, files synced, staging folder synced, renamed, parents synced. So an entry that is visible is
    whole, also after a power cut.
    """
    target = entry_path(digest, toolchain)
    if exists(root, target):
        return False
    with _staging(root, _folder_mode(world_readable)) as (name, stage):
        _write_files(stage, files, 0o644 if world_readable else 0o600)
        os.fsync(stage)
        changed = _move_in(root, f"{TMP}/{name}", target, _folder_mode(world_readable))
        for folder in changed:
            with suppress(FileNotFoundError):  # evicted again already
                _sync_folder(root, folder)
    return bool(changed)


def _move_in(root: int, staged: str, target: str, mode: int) -> list[str]:
    """Rename into place, below parents that an eviction may remove while they are empty.

    Returns the folders that got a new name in them, the deepest first; none when the place is taken.
    """
    recipe = target.rpartition("/")[0]
    fan = recipe.rpartition("/")[0]
    for attempt in range(_ATTEMPTS):
        try:
            made_fan = _ensure_folder(root, fan, mode)
            made_recipe = _ensure_folder(root, recipe, mode)
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
    """Put a single file in place, durably, replacing one of that name."""
    folder, _, leaf = path.rpartition("/")
    _ensure_folder(root, folder, _folder_mode(world_readable))
    with _staging(root, _folder_mode(world_readable)) as (_, stage):
        _write_files(stage, {leaf: data}, 0o644 if world_readable else 0o600)
        os.rename(leaf, path, src_dir_fd=stage, dst_dir_fd=root)
        _sync_folder(root, folder)


def quarantine(root: int, digest: str, toolchain: str) -> str | None:
    """Move a bad entry to ``bad/`` and return its new path. Only for a holder of the recipe's lock.

    What moves is the highest level that is not a trusted folder: a planted link above the entry goes, not its target.
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
        _ensure_folder(root, BAD, 0o700)
        for name in sorted(_names(root, BAD))[: 1 - KEPT_BAD]:
            remove_tree(root, f"{BAD}/{name}")
        target = f"{BAD}/{time.time_ns():020d}-{digest[:12]}-{toolchain}"
        os.rename(level, target, src_dir_fd=root, dst_dir_fd=root)
        return target
    return None


def sweep(root: int) -> int:
    """Remove staging folders whose owner died, and say how many. A folder that is locked, or cannot be, stays."""
    swept = 0
    for name in _names(root, TMP):
        with suppress(OSError, CacheUntrustedError), open_folder(f"{TMP}/{name}", at=root) as folder:
            if try_lock(folder):
                swept += remove_tree(root, f"{TMP}/{name}")
    return swept


def evict(root: int, path: str) -> bool:
    """Remove a folder for good. It leaves its place in one step, so a reader sees all of it or nothing."""
    with _staging(root, 0o700) as (name, _):
        try:
            os.rename(path, f"{TMP}/{name}/evicted", src_dir_fd=root, dst_dir_fd=root)
        except OSError:
            return False
    with suppress(OSError):  # not empty: another toolchain or recipe is there
        os.rmdir(recipe := path.rpartition("/")[0], dir_fd=root)
        os.rmdir(recipe.rpartition("/")[0], dir_fd=root)
    return True


def remove_tree(root: int, path: str) -> bool:
    """Delete a folder or a file without following links; errors leave the rest for the next sweep."""
    import shutil  # 6 ms of imports that a warm start does not pay

    with suppress(OSError):
        os.unlink(path, dir_fd=root)
        return True
    shutil.rmtree(path, ignore_errors=True, dir_fd=root)
    return not exists(root, path)


def exists(root: int, path: str) -> bool:
    """Something has this name below ``root``."""
    try:
        os.stat(path, dir_fd=root, follow_symlinks=False)
    except OSError:
        return False
    return True


@contextmanager
def _staging(root: int, mode: int) -> Iterator[tuple[str, int]]:
    """Name and descriptor of a fresh folder in ``tmp/``, locked so that no sweeper takes it, removed if it is left."""
    for _ in range(_ATTEMPTS):
        name = f"{os.getpid()}-{os.urandom(8).hex()}"
        os.mkdir(f"{TMP}/{name}", 0o700, dir_fd=root)
        with ExitStack() as stack:
            try:
                stage = stack.enter_context(open_folder(f"{TMP}/{name}", at=root))
            except FileNotFoundError:
                continue  # a sweeper was faster
            if not _own_staging(stage):
                continue
            os.fchmod(stage, mode)  # whatever the umask
            try:
                yield name, stage
            finally:
                if exists(root, f"{TMP}/{name}"):
                    remove_tree(root, f"{TMP}/{name}")
            return
    raise OSError(errno.EAGAIN, "a sweeper removed every staging folder", TMP)


def _own_staging(stage: int) -> bool:
    try:
        return try_lock(stage) and os.fstat(stage).st_nlink > 0
    except OSError as error:
        if error.errno in TROUBLE:  # no locks here: a sweeper cannot lock it either, and leaves it alone
            return True
        raise


def _write_files(folder: int, files: Mapping[str, bytes], mode: int) -> None:
    """Write all, then sync all: the first sync commits most of what the others would wait for."""
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
            os.close(fd)


def _ensure_folder(root: int, path: str, mode: int) -> bool:
    """Create one folder, or check that the one that is there is real and trusted. True when it is new."""
    try:
        os.mkdir(path, mode, dir_fd=root)
        os.chmod(path, mode, dir_fd=root)  # whatever the umask
        return True
    except FileExistsError:
        status = os.stat(path, dir_fd=root, follow_symlinks=False)
        check_folder(status, path)
        check_trusted(status, path)
        return False


def _sync_folder(root: int, path: str) -> None:
    with open_folder(path, at=root) as folder:
        os.fsync(folder)


def _names(root: int, path: str) -> list[str]:
    try:
        with open_folder(path, at=root) as folder, os.scandir(folder) as items:
            return [item.name for item in items]
    except (OSError, CacheUntrustedError):
        return []


def _folder_mode(world_readable: bool) -> int:
    return 0o755 if world_readable else 0o700

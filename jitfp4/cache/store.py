"""The cache as the engine uses it: find a kernel in the layers, or build it once and publish it.

A failure of the cache (no space, no permission) never fails a call whose build succeeded: it is counted, and logged
once per cause. ``strict`` turns it into an exception. Exceptions of build() pass through, and nothing is published.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from jitfp4.cache.entry import Built, EntryFiles, Manifest, is_toolchain, newest_first
from jitfp4.cache.evict import Limits, enforce_now_and_then
from jitfp4.cache.index import Index
from jitfp4.cache.installed import installed_layers
from jitfp4.cache.layer import INDEXES, Layer, entry_path
from jitfp4.cache.lock import Lock, locked, stripe
from jitfp4.cache.outcome import CacheInfo, Loaded, Miss, Missed
from jitfp4.cache.publish import check_entry_shared, open_root, publish, quarantine, sweep, write_file
from jitfp4.cache.tree import exists
from jitfp4.config import Config
from jitfp4.errors import ArgumentError, BundleError, CacheCorruptError, CacheError, CacheUntrustedError
from jitfp4.keys import Recipe

_PASS_SHARE = 32  # a process checks the limits each time it has published max_bytes / _PASS_SHARE

_BAD = frozenset({Miss.UNREADABLE, Miss.UNTRUSTED, Miss.CORRUPT})

_log = logging.getLogger("jitfp4.cache")


class Cache:
    """A user's root, read-only layers behind it, and the rules of cache_layout.md. Threads may share it.

    Args:
        config: where the layers are, the mode, the limits. Nothing is touched before the first call.
        world_readable: make folders 0755 and files 0644 instead of 0700 and 0600: for an image that others run.
    """

    def __init__(self, config: Config, *, world_readable: bool = False) -> None:
        self.config = config
        self.world_readable = world_readable
        writable = config.cache_mode == "rw"
        root, pin = config.cache_dir, config.bundle_sha256
        self.user = Layer(path=root, own=True, stamps=writable, pin=pin) if root else None
        self.layers = tuple(Layer(path=path, pin=pin) for path in config.cache_ro)
        if config.cache_mode != "off":
            self.layers += tuple(installed_layers(pin))
        self._all = ((self.user,) if self.user else ()) + self.layers
        self._counters: Counter[tuple[str, str]] = Counter()
        self._mutex = threading.Lock()
        self._unpruned: int | None = None  # bytes published since the last pass of eviction; None before the first

    def get_or_build(self, recipe: Recipe, toolchain: str | None, build: Callable[[], Built]) -> Loaded:
        """The kernel of ``recipe``: from a layer, verified, or built once among all processes, and published.

        Args:
            toolchain: name of the compiler build, such as ``nvrtc-12.9.86-3f2a91c07d5e``; None without a compiler:
                then the entry of any toolchain is taken, and ``build`` has to raise.
            build: called at most once, after every layer missed.
        Raises:
            CacheError: only with JITFP4_STRICT, when the cache failed or held a bad entry.
        """
        found = self.lookup(recipe, toolchain)
        if isinstance(found, Loaded):
            return found
        if toolchain is None or self.config.offline or self.config.cache_mode != "rw":
            return self._build(recipe, toolchain, build, found)[0]
        if self.user and not self.user.believes(recipe.digest, toolchain):  # then nobody could load it
            return self._build(recipe, toolchain, build, found)[0]
        return self._build_once(recipe, toolchain, build, found)

    def lookup(self, recipe: Recipe, toolchain: str | None) -> Loaded | Missed:
        """Search the layers in order, verify what is found, and count the result. Builds and repairs nothing."""
        found = self._search(recipe, toolchain)
        if isinstance(found, Loaded):
            self._count("hits")
            return found
        self._count("misses", found.reason.value)
        if found.reason in _BAD and self._count("reports", found.detail) == 1:
            _log.warning("kernel cache, lookup: %s", found.detail)
        return found

    def info(self) -> CacheInfo:
        """A snapshot of the counters."""
        with self._mutex:
            counters = dict(self._counters)

        def by_kind(kind: str) -> dict[str, int]:
            return {name: count for (group, name), count in sorted(counters.items()) if group == kind}

        def total(kind: str) -> int:
            return counters.get((kind, ""), 0)

        return CacheInfo(
            hits=total("hits"),
            misses=by_kind("misses"),
            builds=total("builds"),
            publishes=total("publishes"),
            quarantines=total("quarantines"),
            evictions=total("evictions"),
            joins=total("joins"),
            lock_timeouts=total("lock_timeouts"),
            store_errors=by_kind("store_errors"),
        )

    def adopt(self, files: EntryFiles) -> bool:
        """Publish an entry from elsewhere in the user's root, after every check. False when it has a good one already.

        The checks find damage, and files that do not belong together. They cannot find out whether a compiler made the
        cubin from kernel.cu: for that the caller needs a digest that it can trust, see bundle.py.

        Raises:
            CacheCorruptError: the files are not what their manifest says.
            CacheError, OSError: the root cannot be written, or JITFP4_CACHE forbids it.
        """
        manifest = Manifest.decode(files.manifest)
        files.check(manifest.digest, manifest.toolchain)
        if not is_toolchain(manifest.toolchain):
            raise CacheCorruptError(f"toolchain: {manifest.toolchain!r} cannot be a folder name")
        place, shared = (manifest.digest, manifest.toolchain), self.world_readable
        with open_root(self._writable_root(), world_readable=shared) as root:
            if publish(root, *place, files.by_name(), world_readable=shared):
                return True
            if self.holds(*place):
                if shared:
                    check_entry_shared(root, *place)
                return False
            what = f"import of {manifest.family} for {manifest.arch}"
            with locked(root, stripe(manifest.digest), what, self.config.lock_timeout) as lock:
                if lock is Lock.HELD and not self.holds(*place):
                    self._quarantine(root, *place)
                return publish(root, *place, files.by_name(), world_readable=shared)

    def check_bundle(self, index: Index) -> None:
        """Check that the pin and the size limit allow to import the bundle of ``index``. Raises BundleError."""
        pin, most = self.config.bundle_sha256, self.config.cache_max_bytes
        if pin is not None and pin != index.digest:
            raise BundleError(f"its digest is {index.digest}; JITFP4_BUNDLE_SHA256 pins {pin}")
        if index.total_bytes > most:
            raise BundleError(f"unpacks to {index.total_bytes} bytes; JITFP4_CACHE_MAX_BYTES is {most}")

    def holds(self, digest: str, toolchain: str) -> bool:
        """Whether the user's root has this entry, complete and undamaged."""
        try:
            Layer(path=self._own_root(), own=True).read_files(digest, toolchain).check(digest, toolchain)
        except (OSError, CacheError):
            return False
        return True

    def adopt_index(self, index: Index) -> None:
        """Store the index of imported entries, for those who pin it. Raises CacheError or OSError."""
        path, shared = f"{INDEXES}/{index.digest}.json", self.world_readable
        with open_root(self._writable_root(), world_readable=shared) as root:
            write_file(root, path, index.encode(), world_readable=shared)

    def read(self, digest: str, toolchain: str) -> EntryFiles:
        """The three files of an entry, checked, from the first layer that has it.

        Raises:
            FileNotFoundError: no layer has it.
            CacheCorruptError, CacheUntrustedError, OSError: the first layer that has it has a bad one.
        """
        for layer in self._all:
            with suppress(FileNotFoundError):
                files = layer.read_files(digest, toolchain)
                files.check(digest, toolchain)
                return files
        raise FileNotFoundError(errno.ENOENT, "no such entry", entry_path(digest, toolchain))

    def _own_root(self) -> Path:
        if self.user is None:
            raise CacheError("there is no cache folder: neither HOME nor JITFP4_CACHE_DIR is set")
        return self.user.path

    def _writable_root(self) -> Path:
        self.config.check_writable()
        return self._own_root()

    # ---- looking ------------------------------------------------------------

    def _search(self, recipe: Recipe, toolchain: str | None) -> Loaded | Missed:
        if self.config.cache_mode == "off":
            return Missed(reason=Miss.OFF)
        if toolchain is not None and not is_toolchain(toolchain):
            raise ArgumentError("toolchain", repr(toolchain), "a-z 0-9 _ + - and single inner dots, at most 100")
        refused: list[Missed] = []
        for layer, name in self._candidates(recipe.digest, toolchain):
            found = self._load(layer, recipe, name)
            if isinstance(found, Loaded):
                return found
            if found.reason is not Miss.ABSENT:
                refused.append(found)
        if refused:
            reasons = list(Miss)
            worst = max((missed.reason for missed in refused), key=reasons.index)
            return Missed(reason=worst, detail="; ".join(missed.detail for missed in refused))
        found_now = self.user.toolchains(recipe.digest) if self.user else []
        if others := [name for name in found_now if name != toolchain]:
            return Missed(reason=Miss.TOOLCHAIN, detail=f"built by {', '.join(others)}, not by {toolchain}")
        return Missed(reason=Miss.ABSENT)

    def _candidates(self, digest: str, toolchain: str | None) -> Iterator[tuple[Layer, str]]:
        """Layers and toolchains in the order of the search. Lazy: a hit in the first one lists no folder."""
        if toolchain is not None:
            for layer in self._all:
                yield layer, toolchain
        anything_goes = toolchain is None or self.config.offline
        for layer in sorted(self._all, key=lambda layer: layer.own) if anything_goes else self.layers:
            names = [name for name in layer.toolchains(digest) if name != toolchain]
            yield from ((layer, name) for name in newest_first(names))

    def _load(self, layer: Layer, recipe: Recipe, toolchain: str) -> Loaded | Missed:
        try:
            manifest, cubin = layer.load(recipe, toolchain)
        except FileNotFoundError:
            return Missed(reason=Miss.ABSENT)
        except CacheCorruptError as error:
            reason, cause = Miss.CORRUPT, str(error)
        except CacheUntrustedError as error:
            reason, cause = Miss.UNTRUSTED, str(error)
        except OSError as error:
            reason, cause = Miss.UNREADABLE, f"{error.filename}: {error.strerror}"
        else:
            return Loaded(
                cubin=cubin, symbol=manifest.symbol, toolchain=toolchain, digest=recipe.digest, root=layer.path
            )
        path = layer.path / entry_path(recipe.digest, toolchain)
        about_root = cause.startswith(f"{layer.path}:")  # the same failure for every entry
        detail = f"{reason.value} entry: " + (cause if about_root else f"{path}: {cause}")
        if self.config.strict:
            kind = {Miss.CORRUPT: CacheCorruptError, Miss.UNTRUSTED: CacheUntrustedError}.get(reason, CacheError)
            raise kind(detail)
        return Missed(reason=reason, detail=detail)

    # ---- building -----------------------------------------------------------

    def _build_once(self, recipe: Recipe, toolchain: str, build: Callable[[], Built], missed: Missed) -> Loaded:
        """Under the recipe's lock: look again, move a bad entry aside, build, publish."""
        user, entry = self.user, entry_path(recipe.digest, toolchain)
        with ExitStack() as stack:
            root, lock = None, None
            with self._tolerated("open"):
                root = stack.enter_context(open_root(self._own_root(), world_readable=self.world_readable))
            if root is None or user is None:
                return self._build(recipe, toolchain, build, missed)[0]
            absent = missed.reason in (Miss.ABSENT, Miss.TOOLCHAIN)  # then an entry that appears is a new one
            done = partial(exists, root, entry) if absent else None
            with self._tolerated("lock"):
                what = f"{recipe.family} for {recipe.arch} ({recipe.digest[:12]})"
                waiting = locked(root, stripe(recipe.digest), what, self.config.lock_timeout, done)
                lock = stack.enter_context(waiting)
            if lock is Lock.TIMED_OUT:
                self._count("lock_timeouts")
                return self._build(recipe, toolchain, build, missed)[0]
            if lock in (Lock.HELD, Lock.NOT_NEEDED):
                again = self._load(user, recipe, toolchain)
                if isinstance(again, Loaded):
                    self._count("joins")
                    return again
                if lock is Lock.HELD and again.reason in (Miss.CORRUPT, Miss.UNTRUSTED):
                    with self._tolerated("quarantine"):
                        self._quarantine(root, recipe.digest, toolchain)
            loaded, built = self._build(recipe, toolchain, build, missed)
            with self._tolerated("publish"):
                if self._publish(root, user, recipe, toolchain, built):
                    loaded = replace(loaded, root=user.path)
        return loaded

    def _build(
        self, recipe: Recipe, toolchain: str | None, build: Callable[[], Built], missed: Missed
    ) -> tuple[Loaded, Built]:
        start = time.perf_counter()
        built = build()
        milliseconds = (time.perf_counter() - start) * 1e3
        self._count("builds")
        loaded = Loaded(
            cubin=built.cubin,
            symbol=built.symbol,
            toolchain=toolchain,
            digest=recipe.digest,
            missed=missed,
            build_ms=milliseconds,
        )
        return loaded, built

    def _publish(self, root: int, user: Layer, recipe: Recipe, toolchain: str, built: Built) -> bool:
        """True when this process put the entry in place. Then it looks after the limits, now and then."""
        manifest = Manifest.of(recipe, toolchain, built)
        manifest.check_cubin(built.cubin)
        user.check_new(manifest)
        files = EntryFiles(cubin=built.cubin, source=recipe.source.encode(), manifest=manifest.encode())
        if not publish(root, recipe.digest, toolchain, files.by_name(), world_readable=self.world_readable):
            return False
        self._count("publishes")
        with self._mutex:
            first, self._unpruned = self._unpruned is None, (self._unpruned or 0) + len(built.cubin)
            due = self._unpruned >= self.config.cache_max_bytes // _PASS_SHARE
            if due:
                self._unpruned = 0
        if first:
            sweep(root)
        if first or due:
            limits = Limits(max_bytes=self.config.cache_max_bytes, max_entries=self.config.cache_max_entries)
            evicted = enforce_now_and_then(root, user, limits, at_once=due)
            self._count("evictions", amount=evicted)
        return True

    def _quarantine(self, root: int, digest: str, toolchain: str) -> None:
        """Move a bad entry aside, and count it. The caller holds the recipe's lock."""
        moved = quarantine(root, digest, toolchain)
        if moved is not None:
            self._count("quarantines")
            _log.warning("%s: moved aside to %s", self._own_root() / entry_path(digest, toolchain), moved)

    # ---- failures -----------------------------------------------------------

    @contextmanager
    def _tolerated(self, step: str) -> Iterator[None]:
        """Count a failure of the cache, and warn once per cause; strict mode raises it instead."""
        try:
            yield
        except (OSError, CacheError) as error:
            self._trouble(step, error)

    def _trouble(self, step: str, error: OSError | CacheError) -> None:
        name = errno.errorcode.get(error.errno or 0, "OSError") if isinstance(error, OSError) else type(error).__name__
        cause = f"{step}: {name}"
        if self.config.strict:
            raise error if isinstance(error, CacheError) else CacheError(f"kernel cache, {step}: {error}") from error
        if self._count("store_errors", cause) == 1:
            _log.warning("kernel cache, %s: %s; kernels that cannot be stored stay in memory", step, error)

    def _count(self, kind: str, name: str = "", amount: int = 1) -> int:
        with self._mutex:
            self._counters[kind, name] += amount
            return self._counters[kind, name]

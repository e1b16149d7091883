"""P11, P12: whatever is planted below a root, looking after it changes and counts nothing outside, and ends.

Every place of the tree times every thing that a link can name times everything that the cache does to its tree.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from jitfp4.cache import Cache, Catalog, Limits, Loaded, Verdict
from jitfp4.cache.layer import entry_path
from jitfp4.cache.tree import disk_bytes
from jitfp4.config import Config
from tests.faults.kernels import TOOLCHAIN, make_built, make_recipe
from tests.faults.sandbox import sandboxed

RECIPE = make_recipe()
DIGEST = RECIPE.digest
ENTRY = entry_path(DIGEST, TOOLCHAIN)
FREE = "00" if DIGEST[:2] != "00" else "01"

TAKEN = [
    "v1",
    f"v1/{DIGEST[:2]}",
    f"v1/{DIGEST[:2]}/{DIGEST[2:]}",
    ENTRY,
    f"{ENTRY}/kernel.cubin",
    f"{ENTRY}/entry.json",
]
"""Places that hold something; it is moved out of the root, so that the link leads to good files."""

NEW = [
    f"v1/{FREE}",
    f"v1/{DIGEST[:2]}/{'a' * 62}",
    f"v1/{DIGEST[:2]}/{DIGEST[2:]}/nvrtc-1-0",
    f"{ENTRY}/more",
    "v1/more",
    "more",
    "tmp/more",
    "bad/more",
    "bundles/more.json",
    "tmp",
    "bad",
    "bundles",
]
TARGETS = {
    "a folder": "outside",
    "folders of recipes": "outside/v1",
    "recipes": f"outside/v1/{DIGEST[:2]}",
    "entries": f"outside/v1/{DIGEST[:2]}/{DIGEST[2:]}",
    "a file": "outside/file",
    "the root": "cache",
    "itself": ".",
    "its parent": "..",
    "nothing": "nowhere",
}


def prune_all(root: Path) -> None:
    Catalog(root).prune(Limits(max_entries=0))


def prune_dry(root: Path) -> None:
    Catalog(root).prune(Limits(max_entries=0), dry_run=True)


def call_over_the_limit(root: Path) -> None:
    """Publishing begins with an automatic pass."""
    cache = Cache(Config(cache_dir=root, cache_max_bytes=1))
    for seed in (0, 5):
        assert cache.get_or_build(make_recipe(seed), TOOLCHAIN, lambda seed=seed: make_built(seed)).cubin


def look(root: Path) -> None:
    catalog = Catalog(root)
    list(catalog.entries())
    list(catalog.verify())
    catalog.size()


def clear(root: Path) -> None:
    Catalog(root).clear()


ACTIONS: list[Callable[[Path], None]] = [look, prune_all, prune_dry, clear, call_over_the_limit]


def make_model(root: Path) -> Path:
    cache = Cache(Config(cache_dir=root))
    for seed in range(3):
        cache.get_or_build(make_recipe(seed), TOOLCHAIN, lambda seed=seed: make_built(seed))
    return root


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "cache")


class World:
    """A cache with three entries, and a folder outside that looks like one and belongs to the same user."""

    def __init__(self, base: Path, model: Path | None = None) -> None:
        self.root, self.outside, self.moved = base / "cache", base / "outside", base / "moved"
        model = model or make_model(base / "model")
        for root in (self.root, self.outside):
            shutil.copytree(model, root)
        shutil.copytree(self.outside / "v1" / DIGEST[:2] / DIGEST[2:], self.outside / "a" / ("b" * 62))
        (self.outside / "file").write_text("precious")
        for name in ("bad", "bundles"):
            (self.root / name).mkdir(mode=0o700)

    def plant(self, place: str, target: str) -> None:
        path = self.root / place
        if path.exists() and place in TAKEN:
            shutil.move(path, self.moved)
            path.symlink_to(self.moved)
            return
        if path.is_dir():
            shutil.rmtree(path)
        name = TARGETS[target]
        path.symlink_to(name if name.startswith(".") else self.root.parent / name)

    def outside_now(self) -> dict[str, tuple[int, int, int, bytes]]:
        """Everything outside the root but the times of access, contents included."""
        seen = {}
        for top in (self.outside, self.moved):
            for path in [top, *top.rglob("*")] if os.path.lexists(top) else []:
                status = path.lstat()
                data = path.read_bytes() if stat.S_ISREG(status.st_mode) else b""
                seen[str(path)] = status.st_ino, status.st_mode, status.st_mtime_ns, data
        return seen


def own_disk_bytes(root: Path) -> tuple[int, int]:
    """What du counts: links as themselves."""
    found = [root.lstat()]
    for folder, folders, files in os.walk(root, followlinks=False):
        found += [(Path(folder) / name).lstat() for name in folders + files]
    return sum(status.st_blocks * 512 for status in found), len(found)


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("place", [*TAKEN, *NEW])
def test_nothing_outside_changes(tmp_path: Path, model: Path, place: str, action: Callable[[Path], None]) -> None:
    targets = ["a folder"] if place in TAKEN else [name for name in TARGETS if name not in ("itself", "its parent")]
    for number, target in enumerate(targets):
        base = tmp_path / str(number)
        base.mkdir()
        world = World(base, model)
        world.plant(place, target)
        before = world.outside_now()
        assert disk_bytes(world.root) == own_disk_bytes(world.root)
        action(world.root)
        assert world.outside_now() == before, target
        assert disk_bytes(world.root) == own_disk_bytes(world.root)


@pytest.mark.parametrize("action", ACTIONS)
def test_links_in_circles_end(tmp_path: Path, action: Callable[[Path], None]) -> None:
    """Links to ``.`` and ``..`` everywhere: to follow two of them is to walk for ever."""
    sandboxed("tests.faults.test_links:act_among_circles", base=str(tmp_path), action=action.__name__)


def act_among_circles(base: str, action: str) -> None:
    world = World(Path(base))
    for place in NEW:
        if not place.startswith(("tmp", "bad", "bundles")) or "/" in place:
            for target in ("itself", "its parent", "the root"):
                path = world.root / f"{place}-{len(target)}"
                path.symlink_to(TARGETS[target] if TARGETS[target].startswith(".") else world.root)
    for name in ("one", "two"):
        (world.root / name).symlink_to(".")
        (world.root / "v1" / name).symlink_to("..")
    before = world.outside_now()
    assert disk_bytes(world.root) == own_disk_bytes(world.root)
    {function.__name__: function for function in ACTIONS}[action](world.root)
    assert world.outside_now() == before


def test_a_linked_folder_counts_as_a_link(tmp_path: Path) -> None:
    """50 MB outside must not make a prune to 10 MB take everything."""
    world = World(tmp_path)
    (world.outside / "big").write_bytes(bytes(50_000_000))
    (world.root / "v1" / FREE).symlink_to(world.outside)
    (world.root / "linked").symlink_to(world.outside)
    assert Catalog(world.root).size().disk_bytes < 1_000_000
    assert Catalog(world.root).prune(Limits(max_bytes=10e6)) == []


@pytest.mark.parametrize("place", [f"v1/{FREE}", f"v1/{DIGEST[:2]}/{'a' * 62}", "v1"])
@pytest.mark.parametrize("kind", ["a folder", "a file", "nothing"])
def test_what_is_in_the_way_of_entries_is_a_finding_and_clear_removes_it(tmp_path: Path, place: str, kind: str) -> None:
    world = World(tmp_path)
    world.plant(place, kind)
    catalog = Catalog(world.root)
    findings = [checked for checked in catalog.verify() if checked.use is None]
    assert [(item.path, item.verdict) for item in findings] == [(world.root / place, Verdict.UNTRUSTED)]
    catalog.clear()
    assert not os.path.lexists(world.root / place)
    assert catalog.findings == []
    assert isinstance(Cache(Config(cache_dir=world.root)).get_or_build(RECIPE, TOOLCHAIN, make_built), Loaded)


def test_a_tree_of_any_depth_is_counted_and_removed(tmp_path: Path) -> None:
    """3,000 folders in one another, with few descriptors: no recursion, no path that is too long."""
    sandboxed("tests.faults.test_links:act_on_a_deep_tree", base=str(tmp_path))


def act_on_a_deep_tree(base: str) -> None:
    import resource

    world = World(Path(base))
    for place in (f"{ENTRY}/deep", "bad/deep", "tmp/deep"):
        _dig(world.root / place, 3000)
    resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))
    look(world.root)
    call_over_the_limit(world.root)
    clear(world.root)
    assert sorted(path.name for path in world.root.iterdir()) == ["locks", "tmp", "v1"]
    assert list((world.root / "v1").iterdir()) == list((world.root / "tmp").iterdir()) == []


def _dig(path: Path, depth: int) -> None:
    path.mkdir(mode=0o700)
    at = os.open(path, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("d", 0o700, dir_fd=at)
        below = os.open("d", os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = below
    os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=at))
    os.close(at)


def test_a_folder_that_turns_into_a_link_meanwhile(tmp_path: Path) -> None:
    """Another process of the user swaps a level of the tree for a link, and back, as fast as it can."""
    seen = sandboxed("tests.faults.test_links:race_with_a_swapper", base=str(tmp_path), rounds=300)
    assert seen == {"outside is as it was": True, "swaps": True}


def race_with_a_swapper(base: str, rounds: int) -> dict[str, bool]:
    import signal

    from tests.faults.sandbox import end_child, start_child

    world = World(Path(base))
    fan = world.root / "v1" / DIGEST[:2]
    before = world.outside_now()

    def swap() -> None:
        link, real = fan.with_name("link"), fan.with_name("real")
        link.symlink_to(world.outside / "v1" / DIGEST[:2])
        (world.root / "swapped").touch()
        while True:
            for one, other in ((link, real), (real, link)):
                try:
                    fan.rename(other)
                    one.rename(fan)
                except OSError:
                    continue

    child = start_child(swap)
    cache = Cache(Config(cache_dir=world.root))
    for _ in range(rounds):
        Catalog(world.root).prune(Limits(max_entries=0))
        Catalog(world.root).size()
        cache.get_or_build(RECIPE, TOOLCHAIN, make_built)
    end_child(child, signal.SIGKILL)
    return {"outside is as it was": world.outside_now() == before, "swaps": (world.root / "swapped").exists()}

"""P11: whose folders they are and who may read them does not hang on the umask, on a link, or on who runs it."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from jitfp4.bundle import export_bundle, import_bundle
from jitfp4.cache import Cache, Catalog, Limits, Loaded, Verdict
from jitfp4.cache.layer import entry_path
from jitfp4.cache.tree import set_mode
from jitfp4.cli import app
from jitfp4.config import Config, read_config
from jitfp4.errors import CacheError
from tests.faults.kernels import TOOLCHAIN, make_built, make_recipe
from tests.faults.sandbox import sandboxed
from tests.faults.trouble import NOBODY, in_world
from tests.unit.test_bundle import entry

RECIPE = make_recipe()


@pytest.fixture(autouse=True)
def umask() -> None:
    old = os.umask(0o022)
    yield
    os.umask(old)


def modes(top: Path) -> tuple[set[int], set[int]]:
    """Of the folders and of the files from ``top`` on."""
    found = [top, *top.rglob("*")]
    return tuple({stat.S_IMODE(path.lstat().st_mode) for path in found if path.is_dir() == wanted}
                 for wanted in (True, False))  # fmt: skip


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077, 0o277, 0o777])
@pytest.mark.parametrize("shared", [False, True])
def test_modes_do_not_hang_on_the_umask(tmp_path: Path, mask: int, shared: bool) -> None:
    """The parents that are made on the way, the root, and everything in it."""
    os.umask(mask)
    cache = Cache(Config(cache_dir=tmp_path / "made" / "on" / "the way"), world_readable=shared)
    cache.adopt(entry(0))
    os.umask(0o022)
    folders, files = modes(tmp_path / "made")
    assert folders == ({0o755} if shared else {0o700})
    assert files - {0o600} == ({0o644} if shared else set())  # lock files are for the user alone


def test_parents_that_are_there_stay_as_they_are(tmp_path: Path) -> None:
    for mode in (0o700, 0o750, 0o1777):
        parent = tmp_path / f"{mode:o}"
        parent.mkdir()
        parent.chmod(mode)
        Cache(Config(cache_dir=parent / "cache")).adopt(entry(0))
        assert stat.S_IMODE(parent.stat().st_mode) == mode


def test_others_read_what_was_written_for_them() -> None:
    """As another user: the image's folder works, whatever the umask of who made it was."""
    seen = sandboxed("tests.faults.test_modes:read_as_nobody")
    if "skip" in seen:
        pytest.skip(seen["skip"])
    assert seen == {"hits": [True] * 4, "verdicts": [0]}


def read_as_nobody() -> dict[str, object]:
    def work(folder: Path) -> dict[str, object]:
        roots = []
        for mask in (0o000, 0o022, 0o077, 0o777):
            os.umask(mask)
            roots.append(folder / f"{mask:o}" / "deep" / "image")
            Cache(Config(cache_dir=roots[-1]), world_readable=True).adopt(entry(0))
        if os.geteuid() == 0:
            become_nobody()
        hits = [isinstance(Cache(Config(cache_dir=None, cache_ro=(root,))).lookup(RECIPE, TOOLCHAIN), Loaded)
                for root in roots]  # fmt: skip
        verdicts = {int(item.verdict) for root in roots for item in Catalog(root).verify()}
        return {"hits": hits, "verdicts": sorted(verdicts)}

    return in_world(work)


@pytest.mark.parametrize("mask", [0o277, 0o777])
def test_locks_work_for_others_whatever_the_umask(mask: int) -> None:
    """A lock file that its own user cannot open again would be trouble at each build; root would not notice."""
    seen = sandboxed("tests.faults.test_modes:build_twice_as_nobody", mask=mask)
    if "skip" in seen:
        pytest.skip(seen["skip"])
    assert seen == {"store_errors": {}, "published": True}


def build_twice_as_nobody(mask: int) -> dict[str, object]:
    def work(folder: Path) -> dict[str, object]:
        folder.chmod(0o777)
        if os.geteuid() == 0:
            become_nobody()
        os.umask(mask)
        cache = Cache(Config(cache_dir=folder / "cache"))
        for _ in range(2):
            loaded = cache.get_or_build(RECIPE, TOOLCHAIN, make_built)
            Catalog(folder / "cache").prune(Limits(max_entries=0))
        return {"store_errors": dict(cache.info().store_errors), "published": loaded.path is not None}

    return in_world(work)


def become_nobody() -> None:
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)


PRIVATE: dict[str, Callable[[Path], None]] = {
    "an empty root": lambda root: root.mkdir(mode=0o700),
    "a root with that kernel": lambda root: Cache(Config(cache_dir=root)).adopt(entry(0)) and None,
    "a root with another kernel": lambda root: Cache(Config(cache_dir=root)).adopt(entry(1)) and None,
    "an opened root with that kernel": lambda root: (PRIVATE["a root with that kernel"](root), root.chmod(0o755))[0],
    "an opened root and v1": lambda root: (PRIVATE["an opened root with that kernel"](root),
                                            [(root / name).chmod(0o755) for name in ("v1", "tmp", "locks")])[0],
}  # fmt: skip


@pytest.mark.parametrize("kind", PRIVATE)
def test_world_readable_into_a_private_root_is_an_error_that_names_the_folder(tmp_path: Path, kind: str) -> None:
    """Not a success that nobody else can use."""
    root, bundle = tmp_path / "cache", tmp_path / "bundle"
    PRIVATE[kind](root)
    digest = export_bundle([entry(0)], bundle)
    with pytest.raises(CacheError, match=r"mode 0[67]00"):
        import_bundle(bundle, Cache(Config(cache_dir=root), world_readable=True), digest)
    command = ["import", str(bundle), "--digest", digest, "--world-readable", "--cache-dir", str(root)]
    result = CliRunner().invoke(app, ["cache", *command])
    assert result.exit_code == 2
    assert "--world-readable" in result.stderr


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"XDG_CACHE_HOME": "cache", "HOME": "/home/me"}, "/home/me/.cache/jitfp4"),
        ({"XDG_CACHE_HOME": "./cache", "HOME": "/home/me"}, "/home/me/.cache/jitfp4"),
        ({"XDG_CACHE_HOME": "", "HOME": "/home/me"}, "/home/me/.cache/jitfp4"),
        ({"XDG_CACHE_HOME": "cache"}, None),
        ({"HOME": "home"}, None),
        ({"HOME": ""}, None),
        ({"XDG_CACHE_HOME": "/xdg", "HOME": "home"}, "/xdg/jitfp4"),
    ],
)
def test_no_default_hangs_on_the_working_directory(env: dict[str, str], expected: str | None) -> None:
    assert read_config(env).cache_dir == (Path(expected) if expected else None)


def test_a_relative_folder_is_that_of_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = read_config({"JITFP4_CACHE_DIR": "cache", "JITFP4_CACHE_RO": "one:two"})
    assert (config.cache_dir, config.cache_ro) == (tmp_path / "cache", (tmp_path / "one", tmp_path / "two"))


def test_a_link_that_takes_the_place_of_a_new_folder_is_not_followed(tmp_path: Path) -> None:
    """Between making a folder and giving it its mode."""
    outside = tmp_path / "outside"
    outside.mkdir()
    outside.chmod(0o711)
    (tmp_path / "link").symlink_to(outside)
    with pytest.raises(OSError):
        set_mode(tmp_path / "link", 0o777)
    assert stat.S_IMODE(outside.stat().st_mode) == 0o711


@pytest.mark.parametrize("level", ["root", "v1", "fan", "recipe", "tmp", "locks", "staging"])
def test_no_mode_outside_changes_when_folders_are_swapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, level: str
) -> None:
    """Whatever folder is made, a link to another takes its place at once."""
    outside = tmp_path / "outside"
    outside.mkdir()
    outside.chmod(0o711)
    names = {"root": "cache", "fan": RECIPE.digest[:2], "recipe": RECIPE.digest[2:]}
    make, swapped = os.mkdir, []

    def make_and_swap(path: object, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        make(path, mode, dir_fd=dir_fd)
        name = Path(str(path)).name
        if name == names.get(level, level) or (level == "staging" and name.startswith(f"{os.getpid()}-")):
            os.rmdir(path, dir_fd=dir_fd)
            os.symlink(outside, path, dir_fd=dir_fd)
            swapped.append(name)

    monkeypatch.setattr(os, "mkdir", make_and_swap)
    os.umask(0o077 if level == "fan" else 0o777)
    loaded = Cache(Config(cache_dir=tmp_path / "cache"), world_readable=True).get_or_build(
        RECIPE, TOOLCHAIN, make_built
    )
    os.umask(0o022)
    assert swapped, "nothing was made"
    assert (loaded.cubin, loaded.path) == (make_built().cubin, None)
    assert stat.S_IMODE(outside.stat().st_mode) == 0o711
    assert list(outside.iterdir()) == []


# ---- as a user who is not root ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("attack", ["link", "foreign", "unreadable", "sticky"])
def test_the_same_as_a_user_who_is_not_root(attack: str) -> None:
    """Root may do anything, so what it is refused says little about others."""
    seen = sandboxed("tests.faults.test_modes:attack_as_nobody", attack=attack)
    if "skip" in seen:
        pytest.skip(seen["skip"])
    assert seen["served"] == "right"
    assert seen["outside"] is True
    assert seen["verdicts"] == {"link": [2], "foreign": [2], "unreadable": [4], "sticky": [2]}[attack]


def attack_as_nobody(attack: str) -> dict[str, object]:
    def work(folder: Path) -> dict[str, object]:
        root, outside = folder / "cache", folder / "outside"
        (outside / "precious").mkdir(parents=True)
        folder.chmod(0o777)
        if os.geteuid() == 0:
            os.chown(outside, NOBODY, NOBODY)
            os.chown(outside / "precious", NOBODY, NOBODY)
            foreign = folder / "foreign"
            shutil.copytree(outside, foreign)
            become_nobody()
        else:
            foreign = Path("/usr")
        Cache(Config(cache_dir=root)).get_or_build(RECIPE, TOOLCHAIN, make_built)
        fan = root / "v1" / RECIPE.digest[:2]
        if attack == "link":
            fan.rename(folder / "moved")
            fan.symlink_to(outside)
        elif attack == "foreign":
            fan.rename(folder / "moved")
            fan.symlink_to(foreign)
        elif attack == "unreadable":
            fan.chmod(0)
        else:
            fan.chmod(0o1777)
        verdicts = sorted({int(item.verdict) for item in Catalog(root).verify()})
        Catalog(root).prune(Limits(max_entries=0))
        loaded = Cache(Config(cache_dir=root)).get_or_build(RECIPE, TOOLCHAIN, make_built)
        if fan.is_dir() and not fan.is_symlink():
            fan.chmod(0o700)
        Catalog(root).clear()
        served = "right" if loaded.cubin == make_built().cubin else "wrong"
        return {"served": served, "outside": (outside / "precious").is_dir(), "verdicts": verdicts}

    return in_world(work)


def test_an_unreadable_folder_is_no_empty_one() -> None:
    """For verify, ls, size and export, at every level; root reads everything, so this is tried as another user."""
    seen = sandboxed("tests.faults.test_modes:unreadable_levels")
    if "skip" in seen:
        pytest.skip(seen["skip"])
    below = {"verify": 4, "ls": 4, "size": 4, "clear": 4, "export": 2}
    assert seen == {"root": below | {"clear": 2}, "v1": below, "fan": below, "recipe": below}


def unreadable_levels() -> dict[str, object]:
    def work(folder: Path) -> dict[str, object]:
        folder.chmod(0o777)
        for name in ("export", "ls", "verify", "size", "clear"):  # import what they need while this is allowed
            CliRunner().invoke(app, ["cache", name, "--cache-dir", str(folder / "none"), "--out", str(folder / "out")])
            CliRunner().invoke(app, ["cache", name, "--cache-dir", str(folder / "none")])
        if os.geteuid() == 0:
            os.chdir("/")
            become_nobody()
        seen: dict[str, object] = {}
        for level in ("root", "v1", "fan", "recipe"):
            root = folder / level
            Cache(Config(cache_dir=root)).get_or_build(RECIPE, TOOLCHAIN, make_built)
            entry_folder = root / entry_path(RECIPE.digest, TOOLCHAIN)
            victim = dict(zip(("recipe", "fan", "v1", "root"), entry_folder.parents, strict=False))[level]
            victim.chmod(0)
            commands = {name: ["cache", name, "--cache-dir", str(root)] for name in ("verify", "ls", "size")}
            commands["clear"] = ["cache", "clear", "-y", "--cache-dir", str(root)]
            commands["export"] = ["cache", "export", "--out", str(folder / "out"), "--cache-dir", str(root)]
            seen[level] = {name: CliRunner().invoke(app, command).exit_code for name, command in commands.items()}
        return seen

    return in_world(work)


def test_a_root_that_is_a_file_is_a_finding(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for command, status in (("verify", 2), ("ls", 2), ("size", 2), ("prune", 2)):
        result = CliRunner().invoke(app, ["cache", command, "--cache-dir", str(tmp_path / "file")])
        assert result.exit_code == status, command
        assert "where a folder belongs" in result.stdout + result.stderr
    (checked,) = Catalog(tmp_path / "file").verify()
    assert checked.verdict is Verdict.UNTRUSTED

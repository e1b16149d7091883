"""P1, P2: no byte reaches the driver unless it was published for this key. Random damage, and deliberate edits."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from jitfp4.cache import Cache, Loaded
from jitfp4.cache.layer import entry_path
from jitfp4.config import Config
from jitfp4.keys import Recipe
from tests.faults.kernels import TOOLCHAIN, make_built, make_cubin, make_recipe
from tests.faults.naive import NaiveStore

MUTATIONS = 10_000
TOOLCHAINS = (TOOLCHAIN, "nvrtc-13.1.0-000000000000")
KEYS = [(make_recipe(seed, arch), arch, seed) for seed in range(3) for arch in ("sm_90a", "sm_100a", "sm_120a")]
TRUTH = {recipe.digest: make_built(seed, arch).cubin for recipe, arch, seed in KEYS}

Store = type[Cache] | type[NaiveStore]


class Victim:
    """A filled cache, one of its entries under attack, and the way back to the published state."""

    def __init__(self, root: Path, store: Store) -> None:
        self.root = root
        for recipe, arch, seed in KEYS:
            for toolchain in TOOLCHAINS:
                store(Config(cache_dir=root)).get_or_build(recipe, toolchain, lambda a=arch, s=seed: make_built(s, a))
        self.published = {path: path.read_bytes() for path in root.rglob("kernel.*")}
        self.published |= {path: path.read_bytes() for path in root.rglob("entry.json")}

    def folder(self, recipe: Recipe, toolchain: str = TOOLCHAIN) -> Path:
        return self.root / entry_path(recipe.digest, toolchain)

    def restore(self, *recipes: Recipe) -> None:
        for recipe in recipes:
            for toolchain in TOOLCHAINS:
                folder = self.folder(recipe, toolchain)
                if folder.is_symlink():
                    folder.unlink()
                folder.mkdir(exist_ok=True, mode=0o700)
                for name in ("kernel.cubin", "kernel.cu", "entry.json"):
                    if (folder / name).read_bytes() != self.published[folder / name]:
                        (folder / name).write_bytes(self.published[folder / name])


def damaged(data: bytes, rng: random.Random) -> bytes:
    """``data`` with a flipped bit, cut at a 64th, zeroed in a range, extended, with a swapped pair, or other bytes."""
    kind, at = rng.randrange(6), rng.randrange(len(data))
    if kind == 0:
        return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
    if kind == 1:
        return data[: len(data) * rng.randrange(64) // 64]
    if kind == 2:
        return data[:at] + bytes(len(data[at : at + 512])) + data[at + 512 :]
    if kind == 3:
        return data + rng.randbytes(rng.randrange(1, 64))
    if kind == 4:
        return data[at:] + data[:at]
    return rng.randbytes(len(data))


def damage_file(victim: Victim, one: Recipe, _: Recipe, rng: random.Random) -> None:
    path = victim.folder(one) / rng.choice(["kernel.cubin", "kernel.cubin", "entry.json"])
    path.write_bytes(damaged(path.read_bytes(), rng))


def swap_entries(victim: Victim, one: Recipe, other: Recipe, rng: random.Random) -> None:
    """Two valid entries change places: same kernel for another architecture, or another kernel."""
    names = rng.choice([("kernel.cubin",), ("kernel.cubin", "kernel.cu"), ("kernel.cubin", "kernel.cu", "entry.json")])
    for name in names:
        a, b = victim.folder(one) / name, victim.folder(other) / name
        a.write_bytes(victim.published[b])
        b.write_bytes(victim.published[a])


def copy_entry(victim: Victim, one: Recipe, other: Recipe, rng: random.Random) -> None:
    names = rng.choice([("kernel.cubin",), ("kernel.cubin", "entry.json")])
    for name in names:
        (victim.folder(one) / name).write_bytes(victim.published[victim.folder(other) / name])


def reseal(data: bytes) -> bytes:
    body = data[: data.rindex(b',\n  "seal"')]
    return body + b',\n  "seal": "%s"\n}\n' % hashlib.sha256(body).hexdigest().encode()


def edit_manifest(victim: Victim, one: Recipe, other: Recipe, rng: random.Random) -> None:
    """The other kernel's bytes, and a manifest that was made to fit them and sealed anew: all but the preimage."""
    mine, theirs = victim.folder(one), victim.folder(other)
    fields = json.loads(victim.published[mine / "entry.json"])
    cubin = rng.choice([victim.published[theirs / "kernel.cubin"], make_cubin("sm_80", seed=rng.randrange(1000))])
    (mine / "kernel.cubin").write_bytes(cubin)
    text = (mine / "entry.json").read_text()
    text = text.replace(fields["cubin"]["sha256"], hashlib.sha256(cubin).hexdigest())
    if rng.random() < 0.5:
        text = text.replace(fields["recipe"]["arch"], other.arch)
    recipe = json.loads(victim.published[theirs / "entry.json"])["recipe"]
    if (
        cubin[48:52] == victim.published[mine / "kernel.cubin"][48:52]
    ):  # same architecture: the digest must give it away
        text = text.replace(fields["recipe"]["digest"], recipe["digest"])
    (mine / "entry.json").write_bytes(reseal(text.encode()) if rng.random() < 0.7 else text.encode())


KINDS: dict[str, Callable[[Victim, Recipe, Recipe, random.Random], None]] = {
    "damage": damage_file,
    "swap": swap_entries,
    "copy": copy_entry,
    "manifest": edit_manifest,
}


def campaign(root: Path, store: Store, count: int) -> tuple[Counter[str], Counter[str], Counter[str]]:
    """Mutate ``count`` times, look both keys up after each; per kind: mutations, wrong bytes served, misses."""
    rng = random.Random(20261121)
    victim = Victim(root, store)
    reader = store(Config(cache_dir=root))
    done, wrong, missed = Counter[str](), Counter[str](), Counter[str]()
    while done.total() < count:
        (one, _, _), (other, _, _) = rng.sample(KEYS, 2)
        kind = rng.choice(list(KINDS))
        KINDS[kind](victim, one, other, rng)
        changed = any(
            (victim.folder(one) / name).read_bytes() != victim.published[victim.folder(one) / name]
            for name in ("kernel.cubin", "entry.json")
        )
        if changed:
            done[kind] += 1
            found = reader.lookup(one, TOOLCHAIN)
            if isinstance(found, Loaded) or (found is not None and not hasattr(found, "reason")):
                wrong[kind] += found.cubin != TRUTH[one.digest]
            else:
                missed[kind] += 1
        victim.restore(one, other)
    assert all(reader.lookup(recipe, TOOLCHAIN).cubin == TRUTH[recipe.digest] for recipe, _, _ in KEYS)
    return done, wrong, missed


def test_thousands_of_mutations_serve_nothing(tmp_path: Path, whole: bool) -> None:
    count = MUTATIONS if whole else MUTATIONS // 4
    done, wrong, missed = campaign(tmp_path / "cache", Cache, count)
    assert done.total() >= count
    assert wrong.total() == 0, wrong
    assert missed == done, "every mutated entry is a miss"


def test_the_naive_store_serves_every_kind_of_mutation(tmp_path: Path) -> None:
    done, wrong, _ = campaign(tmp_path / "cache", NaiveStore, 400)
    assert all(wrong[kind] > 0 for kind in KINDS), wrong
    assert wrong.total() > done.total() // 2


@pytest.mark.parametrize("what", ["renamed", "other toolchain", "other arch", "older entry of the recipe"])
def test_a_whole_valid_entry_in_the_wrong_place_is_a_miss(tmp_path: Path, what: str) -> None:
    """A folder moved as it is. Only a replay of the same recipe and toolchain is right: the bytes are the same."""
    victim = Victim(tmp_path / "cache", Cache)
    recipe, other = make_recipe(0), make_recipe(1)
    source = {
        "renamed": victim.folder(other),
        "other toolchain": victim.folder(recipe, TOOLCHAINS[1]),
        "other arch": victim.folder(make_recipe(0, "sm_100a")),
        "older entry of the recipe": victim.folder(recipe),
    }[what]
    shutil.copytree(source, tmp_path / "moved")
    shutil.rmtree(victim.folder(recipe))
    (tmp_path / "moved").rename(victim.folder(recipe))
    found = Cache(Config(cache_dir=victim.root)).lookup(recipe, TOOLCHAIN)
    if what == "older entry of the recipe":
        assert found.cubin == TRUTH[recipe.digest]
    else:
        assert not isinstance(found, Loaded)
        assert "found under" in found.detail


def test_every_damage_is_logged_quarantined_and_rebuilt(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rng = random.Random(1)
    recipe = make_recipe(0)
    for round_ in range(100):
        cache = Cache(Config(cache_dir=tmp_path))
        path = cache.get_or_build(recipe, TOOLCHAIN, make_built).path
        file = path / rng.choice(["kernel.cubin", "entry.json"])
        file.write_bytes(damaged(before := file.read_bytes(), rng))
        if file.read_bytes() == before:
            continue
        caplog.clear()
        loaded = cache.get_or_build(recipe, TOOLCHAIN, make_built)
        assert loaded.cubin == TRUTH[recipe.digest], round_
        assert loaded.missed is not None
        assert cache.info().quarantines == 1
        assert str(path) in caplog.text
        assert isinstance(cache.lookup(recipe, TOOLCHAIN), Loaded)

"""bundle.py and remote.py: reproducible, verified before anything is written, pinned by one digest."""

from __future__ import annotations

import hashlib
import io
import json
import random
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import fsspec
import pytest
import zstandard

from jitfp4.bundle import export_bundle, import_bundle, normalized, verify_bundle
from jitfp4.cache import Cache, Catalog, EntryFiles, Index, Loaded, Manifest, Verdict
from jitfp4.cache.index import Listed
from jitfp4.cache.layer import entry_path
from jitfp4.config import Config
from jitfp4.errors import BundleError, CacheCorruptError, CacheError
from jitfp4.remote import Remote
from tests.faults.kernels import TOOLCHAIN, make_built, make_recipe

SEEDS = range(4)


def entry(seed: int, *, created: str = "2026-11-21", size: int = 3000) -> EntryFiles:
    built = make_built(seed, size=size)
    built = replace(built, provenance={**built.provenance, "created": created, "compile_ms": len(created) + 0.5})
    recipe = make_recipe(seed)
    manifest = Manifest.of(recipe, TOOLCHAIN, built).encode()
    return EntryFiles(cubin=built.cubin, source=recipe.source.encode(), manifest=manifest)


@pytest.fixture
def bundle(tmp_path: Path) -> tuple[Path, str]:
    path = tmp_path / "kernels.tar.zst"
    return path, export_bundle([entry(seed) for seed in SEEDS], path)


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(Config(cache_dir=tmp_path / "cache"))


def is_empty(cache: Cache) -> bool:
    return not cache.config.cache_dir.exists()


def test_same_kernels_same_bytes(tmp_path: Path, bundle: tuple[Path, str]) -> None:
    """Another machine, another time, another order: the same file."""
    again = tmp_path / "again"
    digest = export_bundle([entry(seed, created="2031-01-01T00:00") for seed in reversed(SEEDS)], again)
    assert digest == bundle[1]
    assert again.read_bytes() == bundle[0].read_bytes()
    assert export_bundle([entry(seed) for seed in (0, 1, 2, 5)], again) != digest


def test_members_tell_nothing_about_the_machine(bundle: tuple[Path, str]) -> None:
    data = zstandard.ZstdDecompressor().stream_reader(bundle[0].open("rb")).read()
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        members = archive.getmembers()
        index = archive.extractfile(members[0]).read()
    assert {(m.mtime, m.uid, m.gid, m.uname, m.gname, m.mode) for m in members} == {(0, 0, 0, "", "", 0o644)}
    assert [member.name for member in members[:2]] == ["bundle.json", members[1].name]
    assert hashlib.sha256(index).hexdigest() == bundle[1]
    assert b"compile_ms" not in data


def test_round_trip(bundle: tuple[Path, str], cache: Cache) -> None:
    first = import_bundle(bundle[0], cache, bundle[1])
    assert (first.digest, first.added, first.present) == (bundle[1], 4, 0)
    second = import_bundle(bundle[0], cache, bundle[1])
    assert (second.added, second.present) == (0, 4)
    for seed in SEEDS:
        found = cache.lookup(make_recipe(seed), TOOLCHAIN)
        assert isinstance(found, Loaded)
        assert found.cubin == make_built(seed).cubin
    assert {checked.verdict for checked in Catalog(cache.config.cache_dir).verify()} == {Verdict.OK}
    index = cache.config.cache_dir / "bundles" / f"{bundle[1]}.json"
    assert hashlib.sha256(index.read_bytes()).hexdigest() == bundle[1]
    exported = export_bundle([cache.read(make_recipe(seed).digest, TOOLCHAIN) for seed in SEEDS], bundle[0])
    assert exported == bundle[1]


def test_an_import_replaces_what_is_damaged(bundle: tuple[Path, str], cache: Cache) -> None:
    import_bundle(bundle[0], cache, bundle[1])
    (cache.config.cache_dir / entry_path(make_recipe(2).digest, TOOLCHAIN) / "kernel.cubin").write_bytes(b"x")
    again = import_bundle(bundle[0], cache, bundle[1])
    assert (again.added, again.present) == (1, 3)
    assert {checked.verdict for checked in Catalog(cache.config.cache_dir).verify()} == {Verdict.OK}
    assert Catalog(cache.config.cache_dir).size().quarantined == 1


def test_an_entry_that_is_damaged_is_not_exported(tmp_path: Path) -> None:
    with pytest.raises(CacheCorruptError):
        export_bundle([entry(0), replace(entry(1), cubin=b"x")], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_wrong_digest_is_refused_before_anything_is_written(bundle: tuple[Path, str], cache: Cache) -> None:
    with pytest.raises(BundleError, match=bundle[1]):
        import_bundle(bundle[0], cache, "0" * 64)
    assert is_empty(cache)


def test_no_damaged_bundle_is_imported(bundle: tuple[Path, str], cache: Cache) -> None:
    """300 flips, cuts and extensions anywhere in the compressed file."""
    data, rng = bundle[0].read_bytes(), random.Random(3)
    for _ in range(300):
        at = rng.randrange(len(data))
        damaged = rng.choice([data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :], data[:at]])
        bundle[0].write_bytes(damaged)
        with pytest.raises(BundleError):
            import_bundle(bundle[0], cache, bundle[1])
    assert is_empty(cache)


def rewritten(path: Path, edit: Callable[[list[tuple[tarfile.TarInfo, bytes]]], None]) -> None:
    """The bundle after ``edit`` changed its list of members: well-formed zstd and tar."""
    data = zstandard.ZstdDecompressor().stream_reader(path.open("rb")).read()
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        members = [(member, archive.extractfile(member).read()) for member in archive]
    edit(members)
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for member, content in members:
            member.pax_headers = {}
            member.size = 0 if member.issym() else len(content)
            archive.addfile(member, io.BytesIO(content))
    path.write_bytes(zstandard.ZstdCompressor().compress(out.getvalue()))


def rename_outside(members: list[tuple[tarfile.TarInfo, bytes]]) -> None:
    members[1][0].name = "../../evil"


def make_link(members: list[tuple[tarfile.TarInfo, bytes]]) -> None:
    members[3][0].type, members[3][0].linkname = tarfile.SYMTYPE, "/etc/passwd"


def add_member(members: list[tuple[tarfile.TarInfo, bytes]]) -> None:
    members.append((tarfile.TarInfo("extra"), b"x"))


def drop_member(members: list[tuple[tarfile.TarInfo, bytes]]) -> None:
    del members[-1]


def swap_members(members: list[tuple[tarfile.TarInfo, bytes]]) -> None:
    members[3], members[6] = (members[3][0], members[6][1]), (members[6][0], members[3][1])


def repeat_member(members: list[tuple[tarfile.TarInfo, bytes]]) -> None:
    members.insert(2, members[1])


@pytest.mark.parametrize("edit", [rename_outside, make_link, add_member, drop_member, swap_members, repeat_member])
def test_a_forged_archive_is_refused(
    bundle: tuple[Path, str], cache: Cache, edit: Callable[[list[tuple[tarfile.TarInfo, bytes]]], None]
) -> None:
    rewritten(bundle[0], edit)
    with pytest.raises(BundleError):
        import_bundle(bundle[0], cache, bundle[1])
    assert is_empty(cache)


def test_an_index_must_be_canonical_and_name_folders() -> None:
    index = Index.of([Listed.of(normalized(entry(0)))])
    assert Index.decode(index.encode(), index.digest) == index
    fields = json.loads(index.encode())
    for broken in (
        json.dumps(fields).encode(),
        index.encode() + b"\n",
        b"[]",
        b"{" * 100_000,
        index.encode().replace(TOOLCHAIN.encode(), b"../../../evil"),
        index.encode().replace(b'"bytes": 3000', b'"bytes": 99999999999'),
    ):
        with pytest.raises(BundleError):
            Index.decode(broken)


def test_a_tactics_file_goes_with_the_kernels(tmp_path: Path, cache: Cache, bundle: tuple[Path, str]) -> None:
    path, tactics = tmp_path / "tuned", b'{"schema": 1}'
    digest = export_bundle([entry(seed) for seed in SEEDS], path, tactics)
    assert digest != bundle[1]
    index = verify_bundle(path, digest)
    assert index.tactics == (len(tactics), hashlib.sha256(tactics).hexdigest())
    assert Index.decode(index.encode(), digest) == index
    assert import_bundle(path, cache, digest).tactics == tactics
    assert import_bundle(bundle[0], cache, bundle[1]).tactics is None
    for broken in (
        index.encode().replace(b'"bytes": 13,', b'"bytes": 99999999,'),
        index.encode().replace(b'"tactics"', b'"other"'),
        index.encode().replace(b'"bytes": 13', b'"bytes": 013'),
    ):
        with pytest.raises(BundleError):
            Index.decode(broken)

    def change(members: list[tuple[tarfile.TarInfo, bytes]]) -> None:
        assert members[1][0].name == "tactics.json"
        members[1] = members[1][0], b'{"schema": 2}'

    rewritten(path, change)
    with pytest.raises(BundleError, match="not the file that the index lists"):
        verify_bundle(path, digest)


def test_a_small_file_cannot_unpack_to_a_big_one(tmp_path: Path) -> None:
    bomb = tmp_path / "bomb"
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        member = tarfile.TarInfo("bundle.json")
        member.size = 200 << 20
        archive.addfile(member, io.BytesIO(bytes(member.size)))
    bomb.write_bytes(zstandard.ZstdCompressor().compress(out.getvalue()))
    assert bomb.stat().st_size < 1 << 20
    with pytest.raises(BundleError, match="bytes"):
        verify_bundle(bomb)


@pytest.mark.parametrize("scheme", ["file", "memory"])
def test_push_and_pull(tmp_path: Path, cache: Cache, scheme: str) -> None:
    remote = Remote(f"file://{tmp_path}/remote" if scheme == "file" else f"memory://{tmp_path.name}")
    digest = remote.push(entry(seed) for seed in SEEDS)
    assert remote.push(entry(seed, created="later") for seed in SEEDS) == digest
    assert remote.digests() == [digest]
    pulled = remote.pull(digest, cache)
    assert (pulled.added, pulled.present) == (4, 0)
    assert remote.pull(digest, cache).present == 4
    assert {checked.verdict for checked in Catalog(cache.config.cache_dir).verify()} == {Verdict.OK}
    assert (cache.config.cache_dir / "bundles" / f"{digest}.json").exists()


def test_a_remote_object_that_is_not_its_name_is_refused(tmp_path: Path, cache: Cache) -> None:
    remote = Remote(f"file://{tmp_path}/remote")
    digest = remote.push([entry(0)])
    for path in [*(tmp_path / "remote" / "blobs").iterdir(), tmp_path / "remote" / "bundles" / f"{digest}.json"]:
        data = path.read_bytes()
        for damaged in (data[:-1], data + b"!", data[:-1] + b"!", b""):
            path.write_bytes(damaged)
            with pytest.raises(BundleError):
                remote.pull(digest, cache)
        path.unlink()
        with pytest.raises(BundleError, match="no such object"):
            remote.pull(digest, cache)
        path.write_bytes(data)
    assert not list((tmp_path / "cache").glob("v1/*/*/*"))
    assert remote.pull(digest, cache).added == 1


def test_swapped_blobs_are_refused(tmp_path: Path, cache: Cache) -> None:
    remote = Remote(f"file://{tmp_path}/remote")
    digest = remote.push([entry(0), entry(1)])
    sizes = [path for path in (tmp_path / "remote" / "blobs").iterdir() if path.stat().st_size == 3000]
    one, two = sizes[0].read_bytes(), sizes[1].read_bytes()
    sizes[0].write_bytes(two)
    sizes[1].write_bytes(one)
    with pytest.raises(BundleError, match="not the ones of this name"):
        remote.pull(digest, cache)


def test_a_push_that_broke_off_is_completed_by_the_next(tmp_path: Path, cache: Cache) -> None:
    remote = Remote(f"file://{tmp_path}/remote")
    digest = remote.push([entry(0)])
    blob = next((tmp_path / "remote" / "blobs").iterdir())
    blob.write_bytes(blob.read_bytes()[:10])
    assert remote.push([entry(0)]) == digest
    assert remote.pull(digest, cache).added == 1


def test_an_unknown_or_missing_driver_is_a_typed_error(tmp_path: Path) -> None:
    with pytest.raises(CacheError, match="nosuch"):
        Remote("nosuch://bucket")
    driver = "tests-nothing"
    fsspec.register_implementation(driver, "no_such_module.Files", clobber=True, errtxt="install no_such_module")
    with pytest.raises(CacheError, match="pip install"):
        Remote(f"{driver}://bucket")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(CacheError):
        Remote(f"file://{tmp_path}/file/below").push([entry(0)])


def test_a_pulled_root_serves_as_a_pinned_layer(tmp_path: Path, cache: Cache) -> None:
    remote = Remote(f"memory://{tmp_path.name}-layer")
    digest = remote.push([entry(0)])
    remote.pull(digest, cache)
    (cache.config.cache_dir / entry_path(make_recipe(0).digest, TOOLCHAIN)).chmod(0o777)
    unpinned = Cache(Config(cache_dir=None, cache_ro=(cache.config.cache_dir,)))
    assert not isinstance(unpinned.lookup(make_recipe(0), TOOLCHAIN), Loaded)
    pinned = Cache(Config(cache_dir=None, cache_ro=(cache.config.cache_dir,), bundle_sha256=digest))
    assert isinstance(pinned.lookup(make_recipe(0), TOOLCHAIN), Loaded)

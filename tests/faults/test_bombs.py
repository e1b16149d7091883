"""Bundles that are small on disk and huge in memory: refused at once, with or without a digest, whatever the trick.

A hostile bundle is any bytes that zstd unpacks. Each runs in a process of its own that may not use much memory.
"""

from __future__ import annotations

import io
import json
import resource
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zstandard

from jitfp4.bundle import export_bundle, verify_bundle
from jitfp4.cache import Cache, Index
from jitfp4.cache.entry import FILES
from jitfp4.cache.index import MAX_INDEX_BYTES, Listed
from jitfp4.config import Config
from jitfp4.errors import BundleError
from tests.faults.kernels import TOOLCHAIN
from tests.faults.sandbox import sandboxed
from tests.unit.test_bundle import entry

MIB, GIB = 1 << 20, 1 << 30
_ALLOWED = 400 * MIB  # above what the process has when it begins
_ZEROS = bytes(16 * MIB)


def header(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    member = tarfile.TarInfo(name)
    member.size, member.mode, member.type = size, 0o644, kind
    return member.tobuf(tarfile.GNU_FORMAT)


def zeros(size: int) -> Iterator[bytes]:
    for start in range(0, size, len(_ZEROS)):
        yield _ZEROS[: size - start]


def good_start() -> bytes:
    """The index of a good bundle, as a member."""
    index = Index.of([Listed.of(entry(0))]).encode()
    return header("bundle.json", len(index)) + index + bytes(-len(index) % 512)


def special(kind: bytes, *, behind: bytes = b"") -> Callable[[], Iterator[bytes]]:
    def parts() -> Iterator[bytes]:
        yield behind
        yield header("././@LongLink", GIB, kind)
        yield from zeros(GIB)

    return parts


def pax(record: bytes) -> Callable[[], Iterator[bytes]]:
    """A PAX header whose one record is a GiB long: a path, or sparse map, or anything."""

    def parts() -> Iterator[bytes]:
        text = b"%d %s=" % (GIB, record)
        yield header("./PaxHeaders/x", GIB, b"x") + text
        yield from zeros(GIB - len(text) - 1)
        yield b"\n"

    return parts


def size_field(field: bytes) -> Callable[[], Iterator[bytes]]:
    """A header that names its size in another way: base 256, signs, blanks, not octal."""

    def parts() -> Iterator[bytes]:
        block = bytearray(header("bundle.json", 0))
        block[124:136] = field.ljust(12, b"\0")[:12]
        block[148:156] = b"        "
        block[148:156] = b"%06o\0 " % sum(block)
        yield bytes(block)
        yield from zeros(GIB)

    return parts


def index_text(unit: bytes) -> Callable[[], Iterator[bytes]]:
    """An index of the largest size, of as many JSON objects as fit."""

    def parts() -> Iterator[bytes]:
        head, tail = b'{"schema": 1, "entries": [', b"0]}"
        body = unit * ((MAX_INDEX_BYTES - len(head) - len(tail)) // len(unit))
        yield header("bundle.json", len(head) + len(body) + len(tail)) + head + body + tail

    return parts


def index_in_form(unit: bytes) -> Callable[[], Iterator[bytes]]:
    """The same behind the head that every index has."""

    def parts() -> Iterator[bytes]:
        head, tail = b'{\n "schema": 1,\n "entries": [\n', b"\n ]\n}\n"
        body = unit * ((MAX_INDEX_BYTES - len(head) - len(tail)) // len(unit))
        yield header("bundle.json", len(head) + len(body) + len(tail)) + head + body + tail

    return parts


def index_of_huge_files(count: int) -> Callable[[], Iterator[bytes]]:
    """Files as large as they may be, and all of zeros."""

    def parts() -> Iterator[bytes]:
        import hashlib

        sums = (256 * MIB, hashlib.sha256(bytes(256 * MIB)).hexdigest())
        files = {name: (sums if name == "kernel.cubin" else (1, sums[1])) for name in FILES}
        listed = [Listed(recipe=f"{i:064x}", toolchain=TOOLCHAIN, family="toy", arch="sm_90a", files=files)
                  for i in range(count)]  # fmt: skip
        index = Index.of(listed).encode()
        yield header("bundle.json", len(index)) + index + bytes(-len(index) % 512)
        yield from zeros(GIB)

    return parts


BOMBS: dict[str, Callable[[], Iterator[bytes]]] = {
    **{f"first member of kind {kind!r}": special(kind) for kind in (b"L", b"K", b"x", b"g", b"S", b"V", b"D", b"7")},
    **{f"second member of kind {kind!r}": special(kind, behind=good_start()) for kind in (b"L", b"K", b"x", b"g")},
    **{f"PAX {record.decode()}": pax(record) for record in (b"path", b"GNU.sparse.map", b"comment", b"size")},
    "base 256": size_field(b"\x80" + bytes(6) + b"\x01" + bytes(4)),
    "a negative size": size_field(b"\xff" * 12),
    "blanks": size_field(b" 10000000000"),
    "a sign": size_field(b"+7777777777"),
    "no size": size_field(b""),
    "an index of objects": index_text(b"{},"),
    "an index of lists": index_text(b"[],"),
    "an index of depth": index_text(b"["),
    "an index of numbers": index_text(b"0,"),
    "an index in form, of objects": index_in_form(b"  {\n  },\n"),
    "an index in form, of one long string": index_in_form(b'"'),
    "files of the largest size": index_of_huge_files(1),
    "many of them": index_of_huge_files(1000),
    "nothing but zeros": lambda: zeros(GIB),
}


def write_bomb(name: str, path: Path) -> None:
    with path.open("wb") as raw, zstandard.ZstdCompressor(level=1).stream_writer(raw) as packed:
        for part in BOMBS[name]():
            packed.write(part)


@pytest.mark.parametrize("name", BOMBS)
def test_a_small_file_takes_little_memory(tmp_path: Path, name: str) -> None:
    path = tmp_path / "bomb"
    write_bomb(name, path)
    assert path.stat().st_size < 4 * MIB
    seen = sandboxed("tests.faults.test_bombs:refuse", path=str(path))
    assert seen == ["BundleError", "BundleError"]


def refuse(path: str) -> list[str]:
    """What verifying raises when no more than _ALLOWED bytes can be had; MemoryError when that is not enough."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + _ALLOWED
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    return [_raised(Path(path), digest) for digest in ("0" * 64, None)]


def _raised(path: Path, digest: str | None) -> str:
    try:
        verify_bundle(path, digest)
    except BaseException as error:
        return type(error).__name__
    return "nothing"


def test_a_bundle_larger_than_the_cache_is_refused_before_a_file_is_read(tmp_path: Path) -> None:
    from jitfp4.bundle import import_bundle

    path = tmp_path / "bundle"
    digest = export_bundle([entry(seed, size=20_000) for seed in range(4)], path)
    small = Cache(Config(cache_dir=tmp_path / "cache", cache_max_bytes=50_000))
    with pytest.raises(BundleError, match="unpacks to"):
        import_bundle(path, small, digest)
    assert not (tmp_path / "cache").exists()


def test_a_frame_that_asks_for_a_huge_window_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bundle"
    export_bundle([entry(0)], path)
    plain = zstandard.ZstdDecompressor().stream_reader(path.open("rb")).read()
    wide = zstandard.ZstdCompressionParameters.from_level(1, window_log=30)
    path.write_bytes(zstandard.ZstdCompressor(compression_params=wide).compressobj().compress(plain) or b"")
    packer = zstandard.ZstdCompressor(compression_params=wide).compressobj()
    path.write_bytes(packer.compress(plain) + packer.flush())
    with pytest.raises(BundleError, match=r"memory|window"):
        verify_bundle(path)


@pytest.mark.parametrize("tail", [b"x", bytes(512), b"", None])
def test_nothing_may_follow_the_last_member(tmp_path: Path, tail: bytes | None) -> None:
    """Not in the archive, and not in a second frame."""
    path = tmp_path / "bundle"
    export_bundle([entry(0)], path)
    packed = path.read_bytes()
    if tail is None:
        path.write_bytes(packed + zstandard.ZstdCompressor().compress(b"more"))
    else:
        plain = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(packed)).read()
        path.write_bytes(zstandard.ZstdCompressor().compress(plain + tail if tail else plain[:-512]))
    with pytest.raises(BundleError):
        verify_bundle(path)


def test_every_header_bit_counts(tmp_path: Path) -> None:
    """No header is interpreted: each of its 512 bytes is what the writer writes, or the bundle is refused."""
    path = tmp_path / "bundle"
    export_bundle([entry(0)], path)
    plain = zstandard.ZstdDecompressor().stream_reader(path.open("rb")).read()
    size = int(plain[124:135], 8)
    second = 512 + size + -size % 512
    for start in (0, second):
        for at in range(start, start + 512):
            changed = plain[:at] + bytes([plain[at] ^ 1]) + plain[at + 1 :]
            path.write_bytes(zstandard.ZstdCompressor(level=1).compress(changed))
            with pytest.raises(BundleError):
                verify_bundle(path)


def test_an_index_must_be_in_order_and_without_repetitions() -> None:
    listed = [Listed.of(entry(seed)) for seed in range(3)]
    good = Index.of(listed)
    assert Index.decode(good.encode()) == good
    for entries in (good.entries[::-1], good.entries[:1] * 2):
        with pytest.raises(BundleError, match="order"):
            Index.decode(Index(tuple(entries)).encode())
    fields = json.loads(good.encode())
    for name in ("recipe", "toolchain", "family", "arch"):
        for value in ("", "\n", '"', "x" * 5000, "../..", "é", 7, None, [], {}):
            fields["entries"][0][name] = value
            text = (json.dumps(fields, indent=1) + "\n").encode()
            if name == "family" and value in ("", "\n", '"', "../..", "é"):
                continue  # a family is any short text
            if name == "arch" and value == "":
                continue
            with pytest.raises(BundleError):
                Index.decode(text)
        fields = json.loads(good.encode())

"""cache/entry.py: entry.json and the checks on bytes."""

from __future__ import annotations

import functools
import hashlib
import json
import struct
from collections.abc import Iterator

import pytest

from jitfp4.cache.entry import EntryFiles, Manifest, check_elf, is_digest, is_toolchain, newest_first
from jitfp4.errors import CacheCorruptError
from tests.faults.kernels import SYMBOL, TOOLCHAIN, make_built, make_cubin, make_recipe

RECIPE, BUILT = make_recipe(), make_built()
MANIFEST = Manifest.of(RECIPE, TOOLCHAIN, BUILT)
FILES = EntryFiles(cubin=BUILT.cubin, source=RECIPE.source.encode(), manifest=MANIFEST.encode())


def reseal(text: str) -> bytes:
    """entry.json after an edit by somebody who knows how to seal it."""
    body = text[: text.rindex(',\n  "seal"')].encode()
    return body + b',\n  "seal": "%s"\n}\n' % hashlib.sha256(body).hexdigest().encode()


def test_manifest_round_trip_and_is_json() -> None:
    assert Manifest.decode(MANIFEST.encode()) == MANIFEST
    fields = json.loads(MANIFEST.encode())
    assert fields["recipe"]["digest"] == RECIPE.digest
    assert fields["cubin"] == {"bytes": len(BUILT.cubin), "sha256": hashlib.sha256(BUILT.cubin).hexdigest()}


def test_complete_entry_passes_every_check() -> None:
    assert FILES.check(RECIPE.digest, TOOLCHAIN) == MANIFEST
    assert MANIFEST.check_source(FILES.source) == RECIPE


def test_every_single_bit_of_the_manifest_is_sealed() -> None:
    data = MANIFEST.encode()
    for position in range(len(data)):
        flipped = bytearray(data)
        flipped[position] ^= 1 << position % 8
        with pytest.raises(CacheCorruptError, match="seal"):
            Manifest.decode(bytes(flipped))


@pytest.mark.parametrize("data", [b"", b"{}", b"\0" * 5000, b"[" * 100_000])
def test_garbage_never_reaches_the_parser(data: bytes) -> None:
    with pytest.raises(CacheCorruptError, match="seal"):
        Manifest.decode(data)


@pytest.mark.parametrize(
    "edit",
    [
        ('"schema": 1,\n  "recipe"', '"schema": 2,\n  "recipe"'),
        ('"symbol": "toy_kernel"', '"symbol": 3'),
        ('"symbol"', '"simbol"'),
        ('"provenance": {', '"provenance": "", "x": {'),
        ('"family": "toy"', '"family": null'),
        ("{", "{" + '"a":[' * 20_000),
    ],
)
def test_sealed_nonsense_is_corrupt(edit: tuple[str, str]) -> None:
    with pytest.raises(CacheCorruptError):
        Manifest.decode(reseal(MANIFEST.encode().decode().replace(*edit, 1)))


def members(value: object, path: tuple[object, ...] = ()) -> Iterator[tuple[object, ...]]:
    """The path of every member of a JSON document."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from members(inner, (*path, key))


WRONG = (None, True, -1, 10**30, 1.5, "", "\ud800", "\0", "x" * 100_000, [], [[]], {}, {"a": {}})


def test_whatever_stands_in_a_sealed_member_is_corrupt_or_changes_nothing() -> None:
    """Every member, taken out or with every kind of value: a typed error, or an entry that passes every check."""
    document = json.loads(FILES.manifest)
    del document["seal"]
    paths, passed = list(members(document)), set()
    assert len(paths) > 15
    for path in paths:
        for value in ("absent", *WRONG):
            edited = json.loads(json.dumps(document))
            *folders, leaf = path
            place = functools.reduce(lambda folder, key: folder[key], folders, edited)
            if value == "absent":
                del place[leaf]
            else:
                place[leaf] = value
            body = json.dumps(edited, indent=2).removesuffix("\n}").encode()
            sealed = body + b',\n  "seal": "%s"\n}\n' % hashlib.sha256(body).hexdigest().encode()
            try:
                EntryFiles(cubin=FILES.cubin, source=FILES.source, manifest=sealed).check(RECIPE.digest, TOOLCHAIN)
                manifest = Manifest.decode(sealed)
                manifest.check_asked(RECIPE)
                manifest.encode()
            except CacheCorruptError:
                continue
            passed.add(path[0])
    assert passed <= {"provenance"}


@pytest.mark.parametrize("field", ["family", "arch", "options"])
def test_sealed_edit_of_the_preimage_does_not_give_the_digest(field: str) -> None:
    old, new = {"family": ('"toy"', '"toi"'), "arch": ('"sm_90a"', '"sm_90"'), "options": ("c++17", "c++20")}[field]
    files = EntryFiles(
        cubin=FILES.cubin, source=FILES.source, manifest=reseal(FILES.manifest.decode().replace(old, new, 1))
    )
    with pytest.raises(CacheCorruptError, match="hash to"):
        files.check(RECIPE.digest, TOOLCHAIN)


def test_an_entry_belongs_to_its_place() -> None:
    with pytest.raises(CacheCorruptError, match="found under"):
        MANIFEST.check_place(make_recipe(1).digest, TOOLCHAIN)
    with pytest.raises(CacheCorruptError, match="found under"):
        MANIFEST.check_place(RECIPE.digest, "nvrtc-13")


def test_other_cubin_is_refused() -> None:
    for cubin in (BUILT.cubin[:-1], BUILT.cubin + b"\0", make_cubin(seed=1), b""):
        with pytest.raises(CacheCorruptError, match="SHA-256"):
            MANIFEST.check_cubin(cubin)


# e_ident[8] and e_flags as seen in cubins of NVRTC 12.9.86 and 13.5.
ELF_HEADERS = [
    ("sm_80", 7, 0x500550),
    ("sm_89", 7, 0x590559),
    ("sm_90a", 7, 0x5A0D5A),
    ("sm_100a", 8, 0x600640A),
    ("sm_103a", 8, 0x600670A),
    ("sm_120a", 8, 0x600780A),
    ("sm_121a", 8, 0x600790A),
    ("sm_80", 8, 0x6005004),
    ("sm_90a", 8, 0x6005A04),
    ("sm_100a", 8, 0x6006402),
]


@pytest.mark.parametrize(("arch", "version", "flags"), ELF_HEADERS)
def test_elf_header_names_the_architecture(arch: str, version: int, flags: int) -> None:
    cubin = bytearray(make_cubin(arch))
    cubin[8] = version
    cubin[48:52] = struct.pack("<I", flags)
    check_elf(bytes(cubin), arch, SYMBOL)
    for other in {name for name, _, _ in ELF_HEADERS} - {arch}:
        with pytest.raises(CacheCorruptError, match="wanted device code"):
            check_elf(bytes(cubin), other, SYMBOL)


def test_arch_specific_code_is_not_plain_code() -> None:
    check_elf(make_cubin("sm_90"), "sm_90", SYMBOL)
    with pytest.raises(CacheCorruptError, match="sm_90a; wanted device code for sm_90"):
        check_elf(make_cubin("sm_90a"), "sm_90", SYMBOL)


def test_elf_of_another_kind_or_symbol_is_refused() -> None:
    cubin = make_cubin()
    for broken in (b"", cubin[:63], b"MZ" + cubin[2:], cubin[:4] + b"\x01" + cubin[5:]):
        with pytest.raises(CacheCorruptError, match="ELF"):
            check_elf(broken, "sm_90a", SYMBOL)
    with pytest.raises(CacheCorruptError, match="ELF machine 62"):
        check_elf(cubin[:18] + struct.pack("<H", 62) + cubin[20:], "sm_90a", SYMBOL)
    with pytest.raises(CacheCorruptError, match="no kernel"):
        check_elf(cubin, "sm_90a", "toy")


@pytest.mark.compile
def test_real_cubins_pass() -> None:
    from jitfp4 import nvrtc
    from jitfp4.arch import ARCHS

    source = f'extern "C" __global__ void {SYMBOL}(float* x) {{ x[0] = 1.0f; }}'
    for arch in ARCHS.values():
        check_elf(nvrtc.compile_cubin(source, arch, symbol=SYMBOL), arch.name, SYMBOL)


def test_names_that_may_be_folders() -> None:
    for good in ("nvrtc-12.9.86-3f2a", "nvrtc-12.9", "a", "a_b+c-d.e"):
        assert is_toolchain(good)
    for bad in ("", ".", "..", "a/b", "../a", "a..b", ".a", "a.", "A", "a\0b", "a\n", "a" * 101, "-a"):
        assert not is_toolchain(bad)
    assert is_digest("0" * 64)
    assert not any(map(is_digest, ("0" * 63, "0" * 65, "0" * 63 + "A", "0" * 63 + "\n", "../" + "0" * 61)))


def test_newest_toolchain_first() -> None:
    names = ["nvrtc-12.9.86-bb", "nvrtc-12.10.1-aa", "nvrtc-9.0-ff", "nvrtc-13.0.1-00", "nvrtc-12.9-cc"]
    assert newest_first(names) == [
        "nvrtc-13.0.1-00",
        "nvrtc-12.10.1-aa",
        "nvrtc-12.9.86-bb",
        "nvrtc-12.9-cc",
        "nvrtc-9.0-ff",
    ]

"""Kernels as a Python wheel: what a container installs with pip, and the cache then finds by itself.

A wheel holds what an imported bundle puts into a cache, as ``jitfp4_kernels/<name>/``, a folder of a namespace package
without code. The digest of the bundle stands in the wheel's metadata. So the layer is pinned: no kernel is loaded from
it that this bundle does not list. pip verifies what it installs only where it is given hashes (``--require-hashes``).
"""

from __future__ import annotations

import base64
import hashlib
import re
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from jitfp4.bundle import indexed
from jitfp4.cache import EntryFiles, Manifest
from jitfp4.cache.installed import DIGEST, PACKAGE
from jitfp4.cache.layer import INDEXES, entry_path
from jitfp4.files import check_out, replacing

_EPOCH = (1980, 1, 1, 0, 0, 0)  # the first moment that a zip file can name


def export_wheel(entries: Iterable[EntryFiles], folder: Path, version: str) -> tuple[Path, str]:
    """Write ``jitfp4_kernels_<archs>_cu<major>-<version>+<digest>-py3-none-any.whl`` into ``folder``.

    The same entries give the same bytes, in whatever order they come.

    Returns:
        The wheel, and the digest of the bundle in it.
    Raises:
        ArgumentError: there are no entries, or something that is no file has the wheel's name.
        CacheCorruptError: an entry is not what its manifest says.
    """
    index, kept = indexed(entries)
    manifests = [Manifest.decode(files.manifest) for files in kept.values()]
    name = "_".join(_names(manifests))
    distribution, local = f"{PACKAGE}_{name}", f"{version}+{index.digest[:12]}"
    layer, info = f"{PACKAGE}/{name}", f"{distribution}-{local}.dist-info"
    contents = {f"{layer}/{INDEXES}/{index.digest}.json": index.encode()}
    for place, files in kept.items():
        contents |= {f"{layer}/{entry_path(*place)}/{file}": data for file, data in files.by_name().items()}
    toolchains = ", ".join(sorted({manifest.toolchain for manifest in manifests}))
    summary = f"{len(kept)} kernels of jitfp4 {version}, built by {toolchains}"
    contents |= {
        f"{info}/METADATA": _metadata(distribution.replace("_", "-"), local, summary),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: jitfp4\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/{DIGEST}": f"{index.digest}\n".encode(),
    }
    folder.mkdir(parents=True, exist_ok=True)
    out = folder / f"{distribution}-{local}-py3-none-any.whl"
    check_out(out)
    with replacing(out) as raw, zipfile.ZipFile(raw, "w", zipfile.ZIP_DEFLATED) as packed:
        for path, data in sorted(contents.items()):
            _add(packed, path, data)
        _add(packed, f"{info}/RECORD", _record(contents, f"{info}/RECORD"))
    return out, index.digest


def _names(manifests: Iterable[Manifest]) -> list[str]:
    """``sm90a``, ..., ``cu13``: for what, and with which CUDA, the kernels were compiled."""
    archs = {manifest.arch.replace("_", "") for manifest in manifests}
    majors = {found[1] for m in manifests if (found := re.match(r"nvrtc-(\d+)\.", m.toolchain))}
    return [*sorted(archs), *(f"cu{major}" for major in sorted(majors))]


def _metadata(name: str, version: str, summary: str) -> bytes:
    fields = f"Name: {name}\nVersion: {version}\nSummary: {summary}\nRequires-Dist: jitfp4\n"
    return f"Metadata-Version: 2.1\n{fields}".encode()


def _record(contents: Mapping[str, bytes], own: str) -> bytes:
    """Path, SHA-256 and size of every file, as installers check them; RECORD's own line has neither."""
    lines = []
    for path, data in sorted(contents.items()):
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        lines.append(f"{path},sha256={digest},{len(data)}\n")
    return "".join([*lines, f"{own},,\n"]).encode()


def _add(packed: zipfile.ZipFile, path: str, data: bytes) -> None:
    member = zipfile.ZipInfo(path, _EPOCH)
    member.compress_type, member.external_attr = zipfile.ZIP_DEFLATED, 0o100644 << 16
    packed.writestr(member, data)

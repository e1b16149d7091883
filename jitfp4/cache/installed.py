"""Kernels that were installed as Python packages: folders of the namespace package ``jitfp4_kernels``.

Each folder is a cache root that holds one bundle and nothing else. The digest of the bundle stands in the package's
metadata, beside the namespace package. jitfp4/wheel.py writes such packages.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator
from pathlib import Path

from jitfp4.cache.layer import INDEXES, Layer
from jitfp4.config import read_sha256
from jitfp4.files import read_regular

PACKAGE = "jitfp4_kernels"
DIGEST = "bundle.sha256"
"""The file of a package's metadata that pins its bundle."""

_log = logging.getLogger("jitfp4.cache")


def installed_layers(pin: str | None) -> Iterator[Layer]:
    """The installed packages of kernels as layers, in the order of their names.

    ``pin``, the digest of JITFP4_BUNDLE_SHA256, replaces the packages' own digests unless it is None. A package without
    a readable digest is left out with a warning; what an uninstallation may leave, a folder without an index, silently.
    """
    for root in sorted(_roots()):
        try:
            if root / INDEXES not in root.iterdir():
                continue
            digest = _digest(root)
        except (OSError, ValueError) as error:  # also bytes that are no text
            _log.warning("%s: no kernel is taken from it: %s: %s", root, DIGEST, error)
        else:
            yield Layer(path=root, pin=pin or digest)


def _digest(root: Path) -> str | None:
    """The digest in the metadata of the package of ``root``. Raises OSError or ValueError."""
    beside = f"{PACKAGE}_{root.name}-"
    for metadata in sorted(root.parent.parent.iterdir()):
        if metadata.name.startswith(beside) and metadata.suffix == ".dist-info":
            return read_sha256(DIGEST, read_regular(metadata / DIGEST, 100).decode().strip())
    raise FileNotFoundError(f"no package of this name is installed: {beside}*.dist-info is missing")


def _roots() -> Iterator[Path]:
    """The folders of the packages. One that cannot be listed is left out with a warning."""
    found = importlib.util.find_spec(PACKAGE)
    for place in found.submodule_search_locations or () if found else ():
        try:
            yield from Path(place).iterdir()
        except FileNotFoundError:
            continue  # a place of the namespace package that does not exist
        except OSError as error:
            _log.warning("%s: no kernel is taken from it: %s", place, error)

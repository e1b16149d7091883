"""Kernels that were installed as Python packages: folders of the namespace package ``jitfp4_kernels``.

Each folder is a cache root that holds one bundle and nothing else. The digest of the bundle stands in the package's
metadata. jitfp4/wheel.py writes such packages.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
from collections.abc import Iterator
from pathlib import Path

from jitfp4.cache.layer import Layer
from jitfp4.config import read_sha256
from jitfp4.errors import ArgumentError

PACKAGE = "jitfp4_kernels"
DIGEST = "bundle.sha256"
"""The file of a package's metadata that pins its bundle."""

_log = logging.getLogger("jitfp4.cache")


def installed_layers(pin: str | None) -> Iterator[Layer]:
    """The installed packages of kernels as layers, in the order of their names.

    ``pin``, the digest of JITFP4_BUNDLE_SHA256, replaces the packages' own digests unless it is None. A package without
    a readable digest is left out with a warning.
    """
    found = importlib.util.find_spec(PACKAGE)
    folders = [Path(place) for place in found.submodule_search_locations or ()] if found else []
    for root in sorted(root for folder in folders if folder.is_dir() for root in folder.iterdir()):
        try:
            package = importlib.metadata.distribution(f"{PACKAGE}_{root.name}")
            digest = read_sha256(DIGEST, (package.read_text(DIGEST) or "").strip())
        except (importlib.metadata.PackageNotFoundError, ArgumentError, OSError) as error:
            _log.warning("%s: no kernel is taken from it: %s", root, error)
        else:
            yield Layer(path=root, pin=pin or digest)

"""The version of the installed package."""

from __future__ import annotations

import functools
import importlib.metadata


@functools.cache
def version() -> str:
    """jitfp4's version; ``0`` when it runs from a checkout that is not installed."""
    try:
        return importlib.metadata.version("jitfp4")
    except importlib.metadata.PackageNotFoundError:
        return "0"

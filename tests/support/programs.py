"""The programs of bench/ and examples/: loaded from their files, and called as a shell would call them."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FILES = {file.stem: file for folder in ("bench", "examples") for file in sorted((ROOT / folder).glob("*.py"))}
"""By name."""


def load(name: str) -> ModuleType:
    """The module; an example finds its neighbours, as when it is run."""
    if FILES[name].parent.name == "bench":
        return importlib.import_module(f"bench.{name}")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FILES[name].parent)
        return importlib.import_module(name)


def run_main(program: ModuleType, *arguments: object) -> None:
    """``main()`` with these arguments."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [f"{program.__name__}.py", *map(str, arguments)])
        program.main()


def parser_of(program: ModuleType) -> argparse.ArgumentParser:
    """What ``main()`` reads its arguments with."""
    found: list[argparse.ArgumentParser] = []

    def stop(parser: argparse.ArgumentParser, *_: Any) -> None:
        found.append(parser)
        raise SystemExit

    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(argparse.ArgumentParser, "parse_args", stop)
        program.main()
    return found[0]

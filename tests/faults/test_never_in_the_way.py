"""P9: the store never fails a call whose build succeeded; it warns once per cause, and strict mode raises."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.sandbox import ROOT, sandboxed
from tests.faults.trouble import TROUBLES

TROUBLE = "tests.faults.trouble"


def survive(trouble: str, store: str = "cache", strict: bool = False) -> dict[str, object]:
    seen = sandboxed(f"{TROUBLE}:survive", trouble=trouble, store=store, strict=strict)
    if "skip" in seen:
        pytest.skip(f"{trouble}: {seen['skip']}")
    return seen


@pytest.mark.parametrize("trouble", TROUBLES)
def test_the_kernel_runs_anyway(trouble: str) -> None:
    seen = survive(trouble)
    assert (seen["right"], seen["raised"]) == (5, "")
    assert 1 <= seen["causes"] <= 2
    lookups = [text for text in seen["warnings"] if "lookup" in text]
    assert len(seen["warnings"]) - len(lookups) == seen["causes"], seen["warnings"]
    assert len(lookups) <= 1, lookups


@pytest.mark.parametrize("trouble", TROUBLES)
def test_strict_mode_raises(trouble: str) -> None:
    assert survive(trouble, strict=True)["raised"] in ("CacheError", "CacheUntrustedError")


@pytest.mark.parametrize("trouble", TROUBLES)
def test_the_naive_store_fails_the_call(trouble: str) -> None:
    assert survive(trouble, store="naive")["raised"] != ""


@pytest.mark.parametrize("home", [None, "/proc/nowhere"])
def test_without_a_home_kernels_stay_in_memory(home: str | None) -> None:
    seen = sandboxed(f"{TROUBLE}:no_home", home=home)
    assert len(seen["warnings"]) == 1


def test_importing_touches_no_file(tmp_path: Path) -> None:
    code = "import jitfp4, jitfp4.cache, jitfp4.bundle; jitfp4.cache.Cache(jitfp4.cache.store.Config(cache_dir=None))"
    env = {"PYTHONPATH": str(ROOT), "HOME": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    subprocess.run([sys.executable, "-c", code], env=env, cwd=tmp_path, check=True)
    assert list(tmp_path.iterdir()) == []

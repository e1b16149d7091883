"""Ranks on one empty cache, a plan in shards, an image that runs without NVRTC and without a writable disk."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jitfp4 import warmup
from jitfp4.arch import Arch
from jitfp4.bundle import export_bundle, import_bundle
from jitfp4.cache import Cache, Catalog
from jitfp4.config import Config
from tests.faults import fleet
from tests.faults.sandbox import ROOT, sandboxed

pytestmark = pytest.mark.compile
RANKS = 8


def test_ranks_compile_each_kernel_once(tmp_path: Path, whole: bool) -> None:
    report, ranks = tmp_path / "report.json", RANKS if whole else RANKS // 2
    kept = {name: value for name, value in os.environ.items() if not name.startswith("JITFP4_")}
    environment = kept | {
        "PYTHONPATH": str(ROOT),
        "JITFP4_CACHE_DIR": str(tmp_path / "cache"),
        "FLEET_REPORT": str(report),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    subprocess.run([*command, fleet.__file__], env=environment, check=True, capture_output=True, timeout=900)
    builds, publishes, shared, store_errors = json.loads(report.read_text())
    assert (builds, publishes, store_errors) == (fleet.KERNELS, fleet.KERNELS, 0)
    assert shared == (ranks - 1) * fleet.KERNELS


def test_shards_cover_a_plan_without_overlap() -> None:
    tasks = warmup.plan([Arch.of(fleet.ARCH), Arch.of("sm_100a")])
    for count in (1, 3, 8):
        shards = [warmup.shard(tasks, index, count) for index in range(count)]
        assert sorted(map(str, sum(shards, ()))) == sorted(map(str, tasks))
        assert [warmup.shard(tuple(reversed(tasks)), index, count)[::-1] for index in range(count)] == shards


def test_prebuilt_in_an_image_runs_without_nvrtc_on_a_read_only_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Built in one cache, carried as a bundle, imported into another that is the image's read-only layer."""
    from jitfp4 import engine

    monkeypatch.setenv("JITFP4_CACHE_DIR", str(tmp_path / "built"))
    engine.reset()
    assert all(outcome.error is None for outcome in warmup.warm_up(fleet.some_tasks(), jobs=2))
    catalog = Catalog(tmp_path / "built")
    bundle = tmp_path / "kernels.tar.zst"
    digest = export_bundle((catalog.read(entry.use)[2] for entry in catalog.entries()), bundle)
    image = Cache(Config(cache_dir=tmp_path / "image"), world_readable=True)
    assert import_bundle(bundle, image, digest).added == fleet.KERNELS
    seen = sandboxed("tests.faults.fleet:run_anywhere", cache=str(tmp_path / "image"))
    if seen["status"] == fleet.NOT_ALLOWED:
        pytest.skip("this machine does not allow private mounts, by which NVRTC is hidden")
    assert seen["status"] == 0


def test_two_builds_of_a_plan_give_one_bundle(tmp_path: Path) -> None:
    """P14: compiled twice, in other folders and processes, the kernels are the same bytes, and so is the bundle."""
    digests, files = [], []
    for name in ("a", "elsewhere/b"):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        code = (
            "from jitfp4 import warmup; from tests.faults.fleet import some_tasks; warmup.warm_up(some_tasks(), jobs=2)"
        )
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "JITFP4_CACHE_DIR": str(folder / "cache")}
        environment |= {"TZ": "Asia/Tokyo", "PYTHONHASHSEED": str(len(digests)), "HOME": str(folder)}
        subprocess.run([sys.executable, "-c", code], env=environment, cwd=folder, check=True)
        catalog = Catalog(folder / "cache")
        digests.append(export_bundle((catalog.read(e.use)[2] for e in catalog.entries()), folder / "bundle"))
        files.append((folder / "bundle").read_bytes())
    assert digests[0] == digests[1]
    assert files[0] == files[1]

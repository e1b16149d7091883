"""P3, P4, P5: a reader sees a whole entry or none; a process may die at any instant, and so may the machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.sandbox import sandboxed

CRASHES = "tests.faults.crashes"


@pytest.mark.parametrize(
    ("scenario", "at_least"), [("publish", 30), ("rebuild", 30), ("prune", 15), ("clear", 15), ("index", 10)]
)
def test_exit_at_every_write_side_call(tmp_path: Path, shim: Path, scenario: str, at_least: int) -> None:
    """No bad entry, no stuck lock, no litter after the next publish, whichever call was the last."""
    seen = sandboxed(f"{CRASHES}:exit_everywhere", shim=shim, store="cache", root=str(tmp_path), scenario=scenario)
    assert seen["problems"] == []
    assert seen["points"] >= at_least, "the shim missed calls"


def test_the_naive_store_does_not_survive_exits(tmp_path: Path, shim: Path) -> None:
    seen = sandboxed(f"{CRASHES}:exit_everywhere", shim=shim, store="naive", root=str(tmp_path), scenario="publish")
    assert "wrong bytes are served" in " ".join(seen["problems"])


def test_random_kills(tmp_path: Path, whole: bool) -> None:
    kills = 500 if whole else 200
    seen = sandboxed(f"{CRASHES}:kill_at_random", store="cache", root=str(tmp_path / "cache"), kills=kills)
    assert seen["entries"] > 40
    assert seen["orphans"] > 0, "no kill came during a publish: the test proves nothing"
    assert (seen["torn"], seen["problems"]) == (0, 0)


def test_the_naive_store_is_torn_by_random_kills(tmp_path: Path) -> None:
    seen = sandboxed(f"{CRASHES}:kill_at_random", store="naive", root=str(tmp_path / "cache"), kills=150)
    assert seen["torn"] > 0


@pytest.mark.slow
def test_reads_against_writers(tmp_path: Path, whole: bool) -> None:
    root = str(tmp_path / "cache")
    reads = 1_000_000 if whole else 60_000
    seen = sandboxed(f"{CRASHES}:read_against_writers", store="cache", root=root, reads=reads)
    assert seen["hits"] > 1000
    assert (seen["torn"], seen["bad"], seen["writers that failed"]) == (0, 0, 0)


def test_readers_of_the_naive_store_see_torn_files(tmp_path: Path) -> None:
    root = str(tmp_path / "cache")
    seen = sandboxed(f"{CRASHES}:read_against_writers", store="naive", root=root, reads=30_000)
    assert seen["torn"] > 0


def test_published_means_synced_in_order(tmp_path: Path, shim: Path) -> None:
    """Data before the folder, the folder before the rename, the rename before the parents."""
    trace = sandboxed(f"{CRASHES}:trace_publish", shim=shim, store="cache", root=str(tmp_path / "cache"))
    rename = next(i for i, call in enumerate(trace) if call[0] == "rename")
    stage, target = Path(trace[rename][1]), Path(trace[rename][2])

    def positions(name: str, path: Path) -> list[int]:
        return [i for i, call in enumerate(trace) if call[0] == name and call[1] == str(path)]

    last = 0
    for name in ("kernel.cubin", "kernel.cu", "entry.json"):
        (write,), (sync,) = positions("write", stage / name), positions("fsync", stage / name)
        assert write < sync < rename
        last = max(last, sync)
    assert positions("mkdir", stage)[0] < positions("flock", stage)[0] < positions("open", stage / "entry.json")[0]
    (folder_sync,) = positions("fsync", stage)
    assert last < folder_sync < rename
    parents = [positions("fsync", parent)[0] for parent in list(target.parents)[:3]]
    assert rename < parents[0] < parents[1] < parents[2]
    assert not [call for call in trace[rename + 1 :] if call[0] in ("write", "rename", "unlink")]


def test_no_power_cut_leaves_a_bad_entry(tmp_path: Path, shim: Path) -> None:
    """Not even one that the checks of a load would catch."""
    counts = sandboxed(f"{CRASHES}:power_cuts", shim=shim, store="cache", root=str(tmp_path))
    assert counts["whole"] >= 1
    assert counts["absent"] >= 1
    assert (counts["wrong"], counts["corrupt"]) == (0, 0)


def test_a_power_cut_leaves_the_naive_store_bad(tmp_path: Path, shim: Path) -> None:
    counts = sandboxed(f"{CRASHES}:power_cuts", shim=shim, store="naive", root=str(tmp_path))
    assert counts["wrong"] > 0

"""The time of the kernel cache: a verified load, a durable publish, a cold start of 64 processes, a warm first kernel.

``python bench/bench_cache.py [--out DIR]``. cuda.core's FileStreamProgramCache, which verifies nothing and does not let
processes wait for each other, is measured beside it in the same run. Needs no GPU. Exits 1 when a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jitfp4.cache import Built, Cache, Loaded
from jitfp4.config import Config
from jitfp4.keys import Recipe

ARCH, KERNEL, TOOLCHAIN = "sm_90a", "quantize/vector", "nvrtc-bench"
SYMBOL = KERNEL.replace("/", "_")
CUBIN_BYTES, SOURCE_BYTES = 30_000, 11_000
LOADS, PUBLISHES, PROCESSES, RUNS, COLD_RUNS = 2000, 200, 64, 9, 5
LOAD_US = 60.0  # the bar

_WARM = {
    "this cache": """
import sys, time
from pathlib import Path
from jitfp4.cache import Cache
from jitfp4.config import Config
from jitfp4.keys import Recipe
recipe = Recipe(family="bench", arch="sm_90a", options=(), source=Path(sys.argv[2]).read_text())
assert Cache(Config(cache_dir=Path(sys.argv[1]))).lookup(recipe, "nvrtc-bench").cubin
""",
    "cuda.core": """
import sys
from pathlib import Path
from cuda.core import Program, ProgramOptions
from cuda.core.utils import FileStreamProgramCache
program = Program(Path(sys.argv[2]).read_text(), "c++", ProgramOptions(arch="sm_90a"))
assert program.compile("cubin", cache=FileStreamProgramCache(sys.argv[1])).code
""",
    "bare Python": "",
}


def toy_recipe(number: int) -> Recipe:
    return Recipe(family="bench", arch=ARCH, options=(str(number),), source="x" * SOURCE_BYTES)


def median_us(call: Callable[[], object], count: int) -> float:
    times = []
    for _ in range(count):
        start = time.perf_counter()
        call()
        times.append(1e6 * (time.perf_counter() - start))
    return statistics.median(times)


def measure_loads_and_publishes(folder: Path, cubin: bytes) -> list[dict[str, Any]]:
    """Medians in one process, for a cubin of 30 KB."""
    from cuda.core.utils import FileStreamProgramCache

    cache = Cache(Config(cache_dir=folder / "own"))
    peer = FileStreamProgramCache(folder / "peer")

    def build() -> Built:
        return Built(cubin=cubin, symbol=SYMBOL, provenance={})

    path = cache.get_or_build(recipe := toy_recipe(0), TOOLCHAIN, build).path
    assert path is not None
    peer[recipe.digest.encode()] = cubin
    fresh, keys = iter(map(toy_recipe, range(1, PUBLISHES + 1))), iter(range(PUBLISHES))
    loads = {
        "unverified read": lambda: read_unverified(path / "kernel.cubin"),
        "verified load, this cache": lambda: cache.lookup(recipe, TOOLCHAIN),
        "unverified get, cuda.core": lambda: peer[recipe.digest.encode()],
    }
    publishes = {
        "cold publish, this cache": lambda: cache.get_or_build(next(fresh), TOOLCHAIN, build),
        "put, cuda.core": lambda: peer.__setitem__(f"{next(keys):064}".encode(), cubin),
    }
    rows = [{"case": name, "unit": "us", "median": median_us(call, LOADS)} for name, call in loads.items()]
    rows += [{"case": name, "unit": "us", "median": median_us(call, PUBLISHES)} for name, call in publishes.items()]
    assert isinstance(cache.lookup(recipe, TOOLCHAIN), Loaded)
    assert cache.info().publishes == PUBLISHES + 1
    return rows


def read_unverified(path: Path) -> bytes:
    fd = os.open(path, os.O_RDONLY)
    try:
        return os.read(fd, os.fstat(fd).st_size)
    finally:
        os.close(fd)


def cold_start(which: str, source: Path, folder: Path, processes: int) -> dict[str, Any]:
    """Fork ``processes`` with all imports done, start them at once, time the last one, and count compilations."""
    prepare = {"this cache": own_cold, "cuda.core": peer_cold}[which](source.read_text(), folder)
    gate, open_gate = os.pipe()
    done, report = os.pipe()
    children = []
    for _ in range(processes):
        child = os.fork()
        if child == 0:
            os.read(gate, 1)
            compiled = prepare()
            os.write(report, b"1" if compiled else b"0")
            os._exit(0)
        children.append(child)
    start = time.perf_counter()
    os.write(open_gate, b"." * processes)
    statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    elapsed = time.perf_counter() - start
    assert not any(statuses), statuses
    return {"ms": 1e3 * elapsed, "compilations": os.read(done, processes).count(b"1")}


def own_cold(source: str, folder: Path) -> Callable[[], bool]:
    from jitfp4 import nvrtc
    from jitfp4.arch import Arch

    arch = Arch.of(ARCH)
    nvrtc._library()
    recipe = Recipe(family="bench", arch=ARCH, options=nvrtc.compile_options(arch), source=source)
    cache = Cache(Config(cache_dir=folder))

    def build() -> Built:
        return Built(cubin=nvrtc.compile_cubin(source, arch, symbol=SYMBOL), symbol=SYMBOL, provenance={})

    return lambda: cache.get_or_build(recipe, TOOLCHAIN, build).missed is not None


def peer_cold(source: str, folder: Path) -> Callable[[], bool]:
    from cuda.core import Program, ProgramOptions
    from cuda.core.utils import FileStreamProgramCache

    class Counting(FileStreamProgramCache):
        """Says whether this process stored what it compiled."""

        stored = False

        def __setitem__(self, key: object, value: Any) -> None:
            self.stored = True
            super().__setitem__(key, value)

    def work() -> bool:
        cache = Counting(folder)
        Program(source, "c++", ProgramOptions(arch=ARCH)).compile("cubin", cache=cache)
        return cache.stored

    return work


def measure_cold_starts(folder: Path, source: Path) -> list[dict[str, Any]]:
    """Medians of interleaved runs, so that a neighbour on the machine disturbs all cases alike.

    A warm start is the same processes once more: the time of starting them and of loading the kernel.
    """
    cases = [
        (f"{state} start of {processes}, {which}", which, processes)
        for which in ("this cache", "cuda.core")
        for processes in (1, PROCESSES)
        for state in ("cold", "warm")
    ]
    found: dict[str, list[dict[str, Any]]] = {case: [] for case, _, _ in cases}
    for run in range(COLD_RUNS):
        for case, which, processes in cases:
            place = folder / f"{which}-{processes}-{run}"
            found[case].append(in_fresh_process("--cold-start", which, str(source), str(place), str(processes)))
    return [
        {
            "case": case,
            "unit": "ms",
            "median": statistics.median(run["ms"] for run in runs),
            "compilations": max(run["compilations"] for run in runs),
        }
        for case, runs in found.items()
    ]


def measure_warm_processes(folder: Path, source: Path) -> list[dict[str, Any]]:
    """Whole processes, from start to a verified cubin in memory; no driver is touched."""
    rows = []
    text = source.read_text()
    cubin = make_cubin(text)
    recipe = Recipe(family="bench", arch=ARCH, options=(), source=text)
    built = Built(cubin=cubin, symbol=SYMBOL, provenance={})
    Cache(Config(cache_dir=folder / "this cache")).get_or_build(recipe, TOOLCHAIN, lambda: built)
    for which, code in _WARM.items():
        times = []
        for _ in range(1 + RUNS):
            start = time.perf_counter()
            arguments = [sys.executable, "-c", code, str(folder / which), str(source)]
            subprocess.run(arguments, check=True, env=environment())
            times.append(1e3 * (time.perf_counter() - start))
        rows.append({"case": f"warm process, {which}", "unit": "ms", "median": statistics.median(times[1:])})
    return rows


def make_cubin(source: str) -> bytes:
    from jitfp4 import nvrtc
    from jitfp4.arch import Arch

    return nvrtc.compile_cubin(source, Arch.of(ARCH), symbol=SYMBOL)


def render_kernel() -> str:
    """The largest source among the quantize kernels of one architecture."""
    import jitfp4.families  # noqa: F401
    from jitfp4.arch import Arch
    from jitfp4.kernel import lookup

    kernel, arch = lookup(KERNEL), Arch.of(ARCH)
    return max((kernel.render(spec, arch) for spec in kernel.specs(arch)), key=len)


def in_fresh_process(*arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, __file__, *arguments], env=environment(), capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(done.stderr)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def environment() -> dict[str, str]:
    root = str(Path(__file__).parents[1])
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))}


def check_bars(rows: list[dict[str, Any]]) -> dict[str, bool]:
    """The bars, and whether each is met."""
    median = {row["case"]: row["median"] for row in rows}
    many = next(row for row in rows if row["case"] == f"cold start of {PROCESSES}, this cache")
    limit = 2 * median["cold start of 1, this cache"] + median[f"warm start of {PROCESSES}, this cache"]
    return {
        f"verified load <= {LOAD_US:.0f} us": median["verified load, this cache"] <= LOAD_US,
        f"{PROCESSES} cold processes compile once": many["compilations"] == 1,
        f"{PROCESSES} cold processes <= 2 compiles and a warm start of as many": many["median"] <= limit,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "cpu")
    parser.add_argument("--cold-start", nargs=4, metavar=("WHICH", "SOURCE", "DIR", "N"), help="one run, as JSON")
    arguments = parser.parse_args()
    if arguments.cold_start:
        which, source, folder, processes = arguments.cold_start
        print(json.dumps(cold_start(which, Path(source), Path(folder), int(processes))))
        return 0
    from bench.harness import write_results
    from bench.stamp import stamp

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = folder / "kernel.cu"
        source.write_text(render_kernel())
        cubin = make_cubin(source.read_text()).ljust(CUBIN_BYTES, b"\0")
        rows = measure_loads_and_publishes(folder / "loads", cubin)
        rows += measure_cold_starts(folder / "cold", source)
        rows += measure_warm_processes(folder / "warm", source)
    rows = [{"compilations": "", **row, "median": round(row["median"], 2)} for row in rows]
    bars = check_bars(rows)
    for row in rows:
        print(f"{row['case']:34} {row['median']:10.2f} {row['unit']}  {row['compilations']}")
    for bar, holds in bars.items():
        print(f"{'holds ' if holds else 'MISSED'} {bar}")
    columns = ("case", "median", "unit", "compilations")
    write_results(
        arguments.out / "cache", [{name: row[name] for name in columns} for row in rows], stamp() | {"bars": bars}
    )
    return 0 if all(bars.values()) else 1


if __name__ == "__main__":
    sys.exit(main())

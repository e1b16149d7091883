"""First calls step by step, cold (nothing cached) and warm, in fresh processes; and a warm-up with everything cached.

``python bench/bench_jit.py [--out DIR]``. Without a GPU a first call ends with the verified cubin in memory; with one
it goes on through the driver to the launch. Exits 1 when a bar is missed.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

RUNS = 9
ARCH_WITHOUT_GPU = "sm_90a"
COLD_COMPILE_MS, WARMUP_RERUN_S = 150.0, 2.0  # the bars


class Steps:
    """Exclusive milliseconds of each named step: the time of a step inside another one counts only for the inner."""

    def __init__(self) -> None:
        self.ms: dict[str, float] = {}
        self._nested = [0.0]

    def run(self, name: str, function: Callable[[], Any]) -> Any:
        self._nested.append(0.0)
        start = time.perf_counter()
        try:
            return function()
        finally:
            elapsed = 1e3 * (time.perf_counter() - start)
            self.ms[name] = self.ms.get(name, 0.0) + elapsed - self._nested.pop()
            self._nested[-1] += elapsed

    def watch(self, owner: Any, attribute: str, name: str) -> None:
        """Count every call of ``owner.attribute`` as step ``name``."""
        function = getattr(owner, attribute)

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            return self.run(name, lambda: function(*args, **kwargs))

        setattr(owner, attribute, timed)


def first_call() -> dict[str, Any]:
    """Make a first call with the cache in JITFP4_CACHE_DIR. Returns milliseconds by step, and what was loaded."""
    steps = Steps()
    torch = steps.run("import torch", lambda: __import__("torch"))
    steps.run("import jitfp4", lambda: __import__("jitfp4.families"))
    from jitfp4 import engine, kernel, nvrtc
    from jitfp4.arch import Arch
    from jitfp4.cache import layer, store
    from jitfp4.families import quantize
    from jitfp4.families.quantize.operation import QUANTIZE
    from jitfp4.families.quantize.problem import Problem
    from jitfp4.formats import NVFP4, DType
    from jitfp4.layouts import SfLayout

    steps.watch(kernel, "render", "render")
    steps.watch(nvrtc, "toolchain", "recognise NVRTC")
    steps.watch(nvrtc, "_library", "load NVRTC")
    steps.watch(nvrtc, "compile_cubin", "compile")
    steps.watch(store, "publish", "publish")
    steps.watch(layer.Layer, "load", "verify")
    m, k = 128, 4096
    if torch.cuda.is_available():
        scale = steps.run("CUDA context", lambda: torch.ones(1, device="cuda"))
        a = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
        driver = steps.run("import cuda.core", lambda: __import__("jitfp4.driver").driver)
        steps.watch(driver.LoadedKernel, "__init__", "load")
        steps.run("rest of the call", lambda: (quantize.nvfp4_quantize(a, scale), torch.cuda.synchronize()))
    else:
        problem, arch = Problem(NVFP4, DType.BF16, SfLayout.layout_128x4, False, False, m, k), Arch.of(ARCH_WITHOUT_GPU)
        plan = QUANTIZE.plan(problem, arch)
        steps.run("rest of the call", lambda: engine.build(plan.kernel, plan.spec, arch))
    info = engine.cache_info()
    mapped = "libnvrtc.so" in Path("/proc/self/maps").read_text()
    return {"ms": steps.ms, "builds": info.builds, "hits": info.hits, "nvrtc_mapped": mapped}


def in_fresh_process(*arguments: str, cache: Path) -> tuple[dict[str, Any], float]:
    """The JSON that a fresh interpreter prints, and its wall-clock milliseconds."""
    environment = {"JITFP4_CACHE_DIR": str(cache), **_environment()}
    start = time.perf_counter()
    done = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout), 1e3 * (time.perf_counter() - start)


def _environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("JITFP4_")}
    root = str(Path(__file__).parents[1])
    return kept | {"PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))}


def measure_first_calls(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """RUNS cold and RUNS warm first calls, alternating; a warm one finds the kernel that the cold one published."""
    calls: dict[str, list[dict[str, Any]]] = {"cold": [], "warm": []}
    for run in range(RUNS):
        for case, found in calls.items():
            call, wall = in_fresh_process(__file__, "--first-call", cache=folder / str(run))
            found.append(call | {"ms": call["ms"] | {"whole process": wall}})
            assert call["builds"] == (case == "cold") and call["hits"] == (case == "warm"), (case, call)
    return calls


def measure_warmup(folder: Path) -> list[dict[str, Any]]:
    """The first warm-up of the quantize families for one architecture, then RUNS more."""
    command = "-m", "jitfp4", "warmup", "--arch", ARCH_WITHOUT_GPU, "--family", "quantize", "--json"
    runs = [in_fresh_process(*command, cache=folder) for _ in range(1 + RUNS)]
    return [{"built": found["built"], "cached": found["cached"], "s": wall / 1e3} for found, wall in runs]


def summarise(
    calls: Mapping[str, Sequence[Mapping[str, Any]]], warmups: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """One row for each case and step."""
    first, *again = ([1e3 * run["s"]] for run in warmups)
    return [
        *(
            {"case": case, "step": step, **_spread([call["ms"][step] for call in found])}
            for case, found in calls.items()
            for step in found[0]["ms"]
        ),
        {"case": "warmup", "step": f"first, {warmups[0]['built']} kernels", **_spread(first)},
        {"case": "warmup", "step": "again", **_spread([ms for (ms,) in again])},
    ]


def _spread(values: Sequence[float]) -> dict[str, float]:
    middle, low, high = statistics.median(values), min(values), max(values)
    return {"median_ms": round(middle, 2), "min_ms": round(low, 2), "max_ms": round(high, 2), "runs": len(values)}


def check_bars(
    rows: Sequence[Mapping[str, Any]], calls: Mapping[str, Any], warmups: Sequence[Mapping[str, Any]]
) -> dict[str, bool]:
    """The bars, and whether each is met."""
    median = {(row["case"], row["step"]): row["median_ms"] for row in rows}
    return {
        f"cold compile <= {COLD_COMPILE_MS:.0f} ms": median["cold", "compile"] <= COLD_COMPILE_MS,
        "a warm first call does not load NVRTC": not any(call["nvrtc_mapped"] for call in calls["warm"]),
        "warm-up again builds nothing": all(run["built"] == 0 for run in warmups[1:]),
        f"warm-up again < {WARMUP_RERUN_S:.0f} s": median["warmup", "again"] < 1e3 * WARMUP_RERUN_S,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "cpu")
    parser.add_argument("--first-call", action="store_true", help="make one first call and print its steps as JSON")
    arguments = parser.parse_args()
    if arguments.first_call:
        print(json.dumps(first_call()))
        return 0
    from bench.harness import write_results
    from bench.stamp import stamp

    with tempfile.TemporaryDirectory() as folder:
        calls = measure_first_calls(Path(folder) / "calls")
        warmups = measure_warmup(Path(folder) / "warmup")
    rows = summarise(calls, warmups)
    bars = check_bars(rows, calls, warmups)
    for row in rows:
        print(f"{row['case']:7} {row['step']:20} {row['median_ms']:9.2f} ms  ({row['min_ms']} to {row['max_ms']})")
    for bar, holds in bars.items():
        print(f"{'holds ' if holds else 'MISSED'} {bar}")
    write_results(arguments.out / "jit", rows, stamp() | {"bars": bars})
    return 0 if all(bars.values()) else 1


if __name__ == "__main__":
    sys.exit(main())

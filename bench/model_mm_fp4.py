"""The model of mm_fp4's kernels, on the shapes of FlashInfer's comparison of SM103 with SM100: tactics, waves, bytes.

Run anywhere: ``python -m bench.model_mm_fp4 [--out DIR]``. Nothing is measured: ``clocks`` is computed by
jitfp4/families/gemm/model.py, whose constants are assumptions; it is not the speed of a GPU.
"""

from __future__ import annotations

import argparse
from itertools import product
from pathlib import Path

from bench.bench_mm_fp4 import COMPARED
from bench.harness import write_results
from bench.stamp import stamp
from jitfp4.arch import Arch
from jitfp4.families.gemm.model import cheapest, estimate
from jitfp4.families.gemm.problem import Fp4Problem
from jitfp4.formats import NVFP4, DType
from jitfp4.layouts import SfLayout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("bench/results/cpu"))
    out, rows = parser.parse_args().out, []
    for arch, (m, n, k) in product(("sm_100a", "sm_103a"), COMPARED):
        problem = Fp4Problem(NVFP4, SfLayout.layout_128x4, DType.BF16, m, n, k)
        tactic = cheapest(problem, Arch.of(arch))
        assert tactic is not None
        figures = estimate(problem, tactic, Arch.of(arch))._asdict()
        rounded = {name: round(value) for name, value in figures.items()}
        rows.append({"arch": arch, "m": m, "n": n, "k": k, "tactic": str(tactic)} | rounded)
        print(rows[-1])
    write_results(out / "mm_fp4_model", rows, stamp())


if __name__ == "__main__":
    main()

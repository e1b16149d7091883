"""Results on a GPU of kernels that are undefined by the PTX manual: ``python bench/faults_on_gpu.py [--out DIR]``.

Each negative kernel of tests/sim/faulty*.py that the GPU can run is launched many times, with and without the piece
that synchronises, and its results are compared with the simulator's. Each row counts the launches with other results.
Right results of an undefined kernel prove nothing: its row then says "undefined", not "wrong". Exits 1 when a kernel
that is correct by the manual gives another result.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.harness import write_results
from bench.stamp import stamp
from jitfp4 import sim
from jitfp4.tensors import device_arch
from tests.sim.cuda import compiled
from tests.sim.faulty import GLOBAL, PROXIES, Case
from tests.sim.faulty_clusters import CLUSTERS
from tests.sim.faulty_matrix import MATRIX
from tests.sim.gpu import run_on_gpu


def wrong_launches(case: Case, piece: str, want: list[Any], launches: int) -> int:
    """The number of launches that leave other bytes in the arrays than ``want``."""
    args, ptx = case.args(), compiled(case.text(piece), case.arch)
    arrays = [value for value in want if isinstance(value, np.ndarray)]
    count = 0
    for _ in range(launches):
        got = run_on_gpu(ptx, args, case.geometry)
        count += any(g.tobytes() != w.tobytes() for g, w in zip(got, arrays, strict=True))
    return count


def measure(case: Case, launches: int) -> dict[str, Any]:
    want = case.args()
    sim.run(compiled(case.text(case.right), case.arch), want, case.geometry, case.arch, races=True)
    right, wrong = (wrong_launches(case, piece, want, launches) for piece in (case.right, case.wrong))
    row = {"case": case.name, "section": case.section, "arch": case.arch, "launches": launches}
    verdict = "wrong" if wrong else "undefined"
    return row | {"wrong_with_the_piece": right, "wrong_without": wrong, "verdict": verdict}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "h200")
    parser.add_argument("--launches", type=int, default=500)
    arguments = parser.parse_args()
    arch = device_arch(torch.cuda.current_device()).name
    rows = []
    for case in [*PROXIES, *GLOBAL, *CLUSTERS, *MATRIX]:
        if case.arch == arch and case.ends:
            rows.append(measure(case, arguments.launches))
            print({name: rows[-1][name] for name in ("case", "wrong_with_the_piece", "wrong_without")}, flush=True)
    write_results(arguments.out / "sim_faults", rows, stamp())
    return 1 if any(row["wrong_with_the_piece"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())

"""Every shape of the gated delta rule's kernel on every size: what kernel.py's tables were read from.

Run on a GPU: ``python -m bench.search_gdn [--out DIR]``. One row for each case and shape; ``of_best`` is its time
over the best one's.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

from bench.bench_gdn import Case, arguments, geomean, replay_us
from bench.harness import write_results
from bench.stamp import stamp
from jitfp4 import engine
from jitfp4.arch import Arch
from jitfp4.engine import Launch
from jitfp4.families.gdn import gated_delta_rule_mtp, operator
from jitfp4.families.gdn.kernel import DELTA_RULE, Problem, Shape, StateLayout, geometry, specialise
from jitfp4.formats import DType
from jitfp4.tensors import device_arch

REPLAYS = 7
BATCHES = (1, 4, 8, 16, 32, 64, 256)
KINDS = (
    (True, True, 2),
    (True, True, 4),
    (True, True, 8),
    (False, True, 8),
    (True, False, 1),
    (True, False, 4),
    (True, False, 8),
)
LARGE = 128  # from this batch on, shapes that never win on a smaller one are left out


def shapes(batch: int) -> Iterator[Shape]:
    """Rows of a lane, tile, warps, where v is staged, and how many CTAs share an SM."""
    for ilp_rows in (1, 2, 4, 8):
        for tile_v in (8, 16, 32, 64, 128):
            for warps in (2, 4, 8):
                if tile_v % (4 * ilp_rows * warps) or (batch >= LARGE and (tile_v < 32 or warps == 2)):
                    continue
                yield Shape(tile_v, ilp_rows, warps)
                if 4 <= batch <= 32 and warps > 2:
                    yield Shape(tile_v, ilp_rows, warps, keep_state=True)
                if warps == 4:
                    yield Shape(tile_v, ilp_rows, warps, use_smem_v=True)
                if warps == 4 and batch >= 16:
                    yield from (Shape(tile_v, ilp_rows, warps, ctas_per_sm=count) for count in (2, 3, 4))


def problem_of(case: Case) -> Problem:
    return Problem(
        dtype=DType.BF16,
        state_dtype=DType.F32,
        state_layout=StateLayout.VK,
        head_dim=128,
        tokens=case.tokens,
        heads=case.batch * case.value_heads,
        store_steps=case.steps,
    )


def planned(case: Case, shape: Shape, arch: Arch) -> Launch:
    spec = specialise(problem_of(case), shape)
    cut = geometry(spec, batch=case.batch, value_heads=case.value_heads, arch=arch, ctas_per_sm=shape.ctas_per_sm)
    return Launch(DELTA_RULE, spec, cut)


def search(case: Case, arch: Arch) -> list[dict[str, object]]:
    given, times = arguments(case), {}
    for shape in shapes(case.batch):
        launch = planned(case, shape, arch)
        with mock.patch.object(operator, "_plan", lambda *_, launch=launch: launch):
            times[shape] = replay_us(lambda: gated_delta_rule_mtp(**given), REPLAYS)
    best = min(times.values())
    head = {"update": case.update, "steps": case.steps, "tokens": case.tokens, "batch": case.batch}
    return [
        head | shape._asdict() | {"us": round(us, 2), "of_best": round(us / best, 3)}
        for shape, us in sorted(times.items(), key=lambda item: item[1])
    ]


def build_all(all_cases: list[Case], arch: Arch) -> None:
    wanted = {specialise(problem_of(case), shape) for case in all_cases for shape in shapes(case.batch)}
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda spec: engine.build(DELTA_RULE, spec, arch), wanted))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("bench/results/h200"))
    out = parser.parse_args().out
    arch = device_arch(0)
    all_cases = [
        Case(batch=batch, tokens=tokens, update=update, steps=steps)
        for update, steps, tokens in KINDS
        for batch in BATCHES
    ]
    build_all(all_cases, arch)
    rows = []
    for case in all_cases:
        rows += search(case, arch)
        print(case, len(rows), "rows", flush=True)
    write_results(out / "gdn_search", rows, stamp())
    for steps in (True, False):
        for batch in BATCHES:
            report(rows, steps, batch)


def report(rows: list[dict[str, object]], steps: bool, batch: int) -> None:
    """The shapes that lose least over the cases of one batch size."""
    losses: dict[tuple[object, ...], list[float]] = {}
    for row in rows:
        if row["steps"] == steps and row["batch"] == batch:
            losses.setdefault(tuple(row[name] for name in Shape._fields), []).append(float(str(row["of_best"])))
    ranked = sorted(losses, key=lambda shape: geomean(losses[shape]))[:4]
    print(f"steps {steps} batch {batch}: " + "  ".join(f"{shape} {geomean(losses[shape]):.3f}" for shape in ranked))


if __name__ == "__main__":
    main()

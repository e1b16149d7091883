"""Every shape of the gated delta rule's kernel on every size: what kernel.py's tables were read from.

Run on a GPU: ``python -m bench.search_gdn [--out DIR]``. One row for each case and shape; ``of_best`` is its time
over the best one's.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any
from unittest import mock

from bench.bench_gdn import K_MAJOR, Case, arguments, replay_us
from bench.harness import write_results
from bench.stamp import stamp
from jitfp4 import engine
from jitfp4.arch import Arch
from jitfp4.engine import Launch
from jitfp4.errors import ArgumentError
from jitfp4.families.gdn import operator
from jitfp4.families.gdn.kernel import DELTA_RULE, Problem, Shape, StateLayout, geometry, specialise
from jitfp4.formats import DType

ARCH = Arch.of("sm_90a")
REPLAYS = 5
BATCHES = (1, 4, 8, 16, 32, 64, 256)
KINDS = (  # update, steps, tokens, state
    *((True, True, tokens, "f32") for tokens in (1, 2, 4, 8)),
    (False, True, 8, "f32"),
    *((True, False, tokens, "f32") for tokens in (1, 2, 4, 8, 16)),
    *((True, steps, tokens, "bf16") for steps, tokens in ((True, 4), (False, 1), (False, 4))),
    (True, False, 1, K_MAJOR),
)
# Rows of a tile and of a lane, warps: one pass over the tile, and the few cuts with two that were ever the best.
CUTS = (
    *((8, 1, 2), (16, 1, 4), (32, 1, 8), (16, 2, 2), (32, 2, 4), (64, 2, 8), (64, 2, 4), (128, 2, 4)),
    *((16, 4, 1), (32, 4, 2), (64, 4, 4), (128, 4, 4), (128, 4, 8), (64, 8, 2), (128, 8, 4)),
)


def shapes(case: Case) -> Iterator[Shape]:
    """Every cut that the case admits, with what can matter for it."""
    for cut in CUTS:
        for changes in _changes(case, Shape(*cut)):
            shape = Shape(*cut)._replace(**changes)
            with suppress(ArgumentError):
                if specialise(problem_of(case), shape).shared_bytes <= ARCH.shared_bytes:
                    yield shape


def _changes(case: Case, cut: Shape) -> Iterator[dict[str, Any]]:
    """Where v is staged, how states are stored, and how many CTAs share an SM, in place of the defaults."""
    if not case.steps:
        yield {}
        if cut.warps == 4 and case.batch >= 16:
            yield {"use_smem_v": True}
    for bulk_stores in (False, True) if case.steps else ():
        for keep_state in (False, True) if 4 <= case.batch <= 16 else (False,):
            for ctas_per_sm in (0, 1, 2, 3, 4) if case.batch >= 32 else (0,):
                if ctas_per_sm != 1 or cut.tile_v >= 64:
                    yield {"bulk_stores": bulk_stores, "keep_state": keep_state, "ctas_per_sm": ctas_per_sm}


def problem_of(case: Case) -> Problem:
    return Problem(
        dtype=DType.BF16,
        state_dtype=DType.BF16 if case.state == "bf16" else DType.F32,
        state_layout=StateLayout.KV if case.state == K_MAJOR else StateLayout.VK,
        head_dim=128,
        tokens=case.tokens,
        heads=case.batch * case.value_heads,
        store_steps=case.steps,
    )


def planned(case: Case, shape: Shape) -> Launch:
    spec = specialise(problem_of(case), shape)
    cut = geometry(spec, batch=case.batch, value_heads=case.value_heads, arch=ARCH, ctas_per_sm=shape.ctas_per_sm)
    return Launch(DELTA_RULE, spec, cut)


def search(case: Case) -> list[dict[str, object]]:
    given, times = arguments(case), {}
    for shape in shapes(case):
        launch = planned(case, shape)
        with mock.patch.object(operator, "_plan", lambda *_, launch=launch: launch):
            times[shape] = replay_us(lambda: case.function(**given), REPLAYS)
    best = min(times.values())
    head = {"state": case.state, "update": case.update, "steps": case.steps, "tokens": case.tokens, "batch": case.batch}
    return [
        head | shape._asdict() | {"us": round(us, 2), "of_best": round(us / best, 3)}
        for shape, us in sorted(times.items(), key=lambda item: item[1])
    ]


def build_all(all_cases: list[Case]) -> None:
    wanted = {specialise(problem_of(case), shape) for case in all_cases for shape in shapes(case)}
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda spec: engine.build(DELTA_RULE, spec, ARCH), wanted))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("bench/results/h200"))
    out = parser.parse_args().out
    all_cases = [
        Case(batch=batch, tokens=tokens, update=update, steps=steps, state=state)
        for update, steps, tokens, state in KINDS
        for batch in BATCHES
    ]
    build_all(all_cases)
    rows = []
    for case in all_cases:
        rows += search(case)
    write_results(out / "gdn_search", rows, stamp())
    report(rows)


def report(rows: list[dict[str, object]]) -> None:
    """The best shapes of each case."""
    for _, case in groupby(rows, lambda row: [row[name] for name in ("state", "update", "steps", "tokens", "batch")]):
        best = list(case)[:6]
        print(*list(best[0].values())[:5], *(f"{_brief(row)}:{row['us']}" for row in best))


def _brief(row: dict[str, object]) -> str:
    changed = [f"{name}={row[name]}" for name, usual in Shape._field_defaults.items() if row[name] != usual]
    return "/".join([f"{row['tile_v']},{row['ilp_rows']},{row['warps']}", *changed])


if __name__ == "__main__":
    main()

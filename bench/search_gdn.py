"""Many tactics of the gated delta rule's kernels on every size: families/gdn/tables.py follows from the results.

Run on a GPU: ``python -m bench.search_gdn [--part PART] [--out DIR]``, one of PARTS: calls that store the state after
every token, in ``gdn_search.csv``; the final state alone, in ``gdn_search_final.csv``; states [K, V], in
``gdn_search_kv.csv``. One row for each case and tactic; ``of_best`` is its time divided by that of the best tactic.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import MISSING, asdict, fields
from itertools import groupby, product
from pathlib import Path

from bench.bench_gdn import K_MAJOR, Case, arguments, warm_us
from bench.harness import write_results
from bench.stamp import stamp
from jitfp4 import engine
from jitfp4.arch import Arch
from jitfp4.families.gdn.kernels.chunk import ChunkTactic
from jitfp4.families.gdn.kernels.delta_rule import WalkTactic
from jitfp4.families.gdn.operation import GATED_DELTA_RULE
from jitfp4.families.gdn.problem import Problem, StateLayout
from jitfp4.formats import DType

ARCH = Arch.of("sm_90a")
REPLAYS = 5
BATCHES = (1, 4, 8, 16, 32, 64)
MANY = 256  # of calls that move few bytes, whose fixed costs matter longest
PARTS = {  # of the file's name: update, steps, tokens, state
    "steps": (
        *((True, True, tokens, "f32") for tokens in (1, 2, 4, 8)),
        (False, True, 8, "f32"),
        (True, True, 4, "bf16"),
    ),
    "final": tuple((True, False, tokens, state) for state in ("f32", "bf16") for tokens in (1, 2, 4, 8, 16)),
    "kv": ((True, False, 1, K_MAJOR),),
}
# Rows of a tile, rows of a lane, warps. States of small batches fit in L2; large batches are bound by memory.
SMALL_CUTS = ((16, 1, 4), (32, 1, 8), (32, 2, 4), (64, 2, 8), (64, 4, 4), (128, 4, 8), (128, 8, 4))
LARGE_CUTS = ((8, 1, 2), (16, 1, 4), (32, 1, 8), (32, 2, 4), (64, 2, 8))
DECODE_CUTS = (
    *((16, 1, 4), (32, 1, 8), (16, 2, 2), (32, 2, 4), (64, 2, 8)),
    *((32, 4, 2), (64, 4, 4), (128, 4, 8), (128, 8, 4)),
)
CTAS_PER_SM = {2: (0, 8, 12), 4: (0, 4, 6), 8: (0, 2)}  # by warps
LARGE = 32  # batch from which states do not stay in L2
FEW = 4  # tokens; of more, those that are taken one by one lose by far


def tactics(case: Case) -> Iterator[WalkTactic | ChunkTactic]:
    """The tactics that can run a case, and differ in fields that matter for it."""
    wanted = set(_worth_trying(case))
    return (tactic for tactic in GATED_DELTA_RULE.candidates(problem_of(case), ARCH) if tactic in wanted)


def _worth_trying(case: Case) -> Iterator[WalkTactic | ChunkTactic]:
    yield GATED_DELTA_RULE.select(problem_of(case), ARCH)
    if case.steps and case.batch >= LARGE:
        for cut in LARGE_CUTS:
            for ctas_per_sm, ahead in product(CTAS_PER_SM[cut[2]], (0, 48, 96)):
                yield WalkTactic(*cut, ctas_per_sm=ctas_per_sm, bulk_stores=True, ahead=ahead)
    elif case.steps:
        for cut, bulk_stores, keep_state in product(SMALL_CUTS, (False, True), (False, True)):
            yield WalkTactic(*cut, bulk_stores=bulk_stores, keep_state=keep_state)
    else:
        for ahead in (0, 96) if case.batch >= LARGE else (0,):
            if case.tokens <= FEW:
                for cut in DECODE_CUTS:
                    yield WalkTactic(*cut, ahead=ahead)
                yield WalkTactic(64, 4, 4, use_smem_v=True, ahead=ahead)
            if case.tokens > 1:
                for warps, bulk in product((4, 8), (False, True)):
                    yield ChunkTactic(warps, ahead=ahead, bulk=bulk)


def problem_of(case: Case) -> Problem:
    return Problem(
        dtype=DType.BF16,
        state_dtype=DType.BF16 if case.state == "bf16" else DType.F32,
        state_layout=StateLayout.KV if case.state == K_MAJOR else StateLayout.VK,
        head_dim=128,
        value_dim=128,
        tokens=case.tokens,
        batch=case.batch,
        value_heads=case.value_heads,
        store_steps=case.steps,
    )


def search(case: Case) -> list[dict[str, object]]:
    given, times = arguments(case), {}
    for tactic in tactics(case):
        with GATED_DELTA_RULE.forced(tactic):
            times[tactic] = warm_us(lambda: case.function(**given), REPLAYS)
    best = min(times.values())
    head = {"state": case.state, "update": case.update, "steps": case.steps, "tokens": case.tokens, "batch": case.batch}
    return [
        head | _row(tactic) | {"us": round(us, 2), "of_best": round(us / best, 3)}
        for tactic, us in sorted(times.items(), key=lambda item: item[1])
    ]


def _row(tactic: WalkTactic | ChunkTactic) -> dict[str, object]:
    kernel = {"kernel": "delta_rule" if isinstance(tactic, WalkTactic) else "chunk"}
    names = (field.name for kind in (WalkTactic, ChunkTactic) for field in fields(kind))
    return kernel | dict.fromkeys(names) | asdict(tactic)


def build_all(all_cases: list[Case]) -> None:
    plans = (GATED_DELTA_RULE.plan(problem_of(case), ARCH, tactic) for case in all_cases for tactic in tactics(case))
    wanted = {(plan.kernel, plan.spec) for plan in plans}
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda kernel: engine.build(*kernel, ARCH), wanted))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=PARTS, default="steps")
    parser.add_argument("--out", type=Path, default=Path("bench/results/h200"))
    options = parser.parse_args()
    all_cases = [
        Case(batch=batch, tokens=tokens, update=update, steps=steps, state=state)
        for update, steps, tokens, state in PARTS[options.part]
        for batch in (*BATCHES, *((MANY,) if options.part == "final" else ()))
    ]
    build_all(all_cases)
    rows = []
    for case in all_cases:
        rows += search(case)
    name = "gdn_search" if options.part == "steps" else f"gdn_search_{options.part}"
    write_results(options.out / name, rows, stamp())
    report(rows)


def report(rows: list[dict[str, object]]) -> None:
    """The best tactics of each case."""
    for _, case in groupby(rows, lambda row: [row[name] for name in ("state", "update", "steps", "tokens", "batch")]):
        best = list(case)[:6]
        print(*list(best[0].values())[:5], *(f"{_brief(row)}:{row['us']}" for row in best))


def _brief(row: dict[str, object]) -> str:
    both = (*fields(WalkTactic), *fields(ChunkTactic))
    usual = {field.name: field.default for field in both if field.default is not MISSING}
    changed = [f"{name}={row[name]}" for name in usual if row[name] is not None and row[name] != usual[name]]
    return "/".join([f"{row['kernel']} {row['tile_v']},{row['ilp_rows']},{row['warps']}", *changed])


if __name__ == "__main__":
    main()

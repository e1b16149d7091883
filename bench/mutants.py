"""The whole mutation campaign: ``python bench/mutants.py [--kind KIND] [--kernel NAME] [--arch ARCH] [--out DIR]``.

Prints how many mutants of each kernel tests notice, and every survivor without a recorded reason. With ``--out``,
writes a table by kernel and instruction, mutants.csv, and the stamp of the run, mutants.json; rows that are not run
again stay in the table. Exits 1 if a survivor has no reason.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from bench.stamp import stamp
from tests.mutants import campaign, trial
from tests.mutants.checks import CHECKS
from tests.mutants.launches import KERNELS, record

Row = dict[str, str]


def synchronisation(name: str, arch: str, _: int) -> Iterator[Row]:
    """Every mutant of the launches of one entry of KERNELS."""
    known = campaign.known_survivors()
    for one in record(name, arch):
        found, unchanged = campaign.candidates(one)
        for mutant in found:
            v = campaign.judge(one, mutant, unchanged)
            why = "" if v.how else campaign.reason(v, known) or ""
            yield _row("synchronisation", v, f"number {v.nth}, {v.source}", why)


def arithmetic(name: str, arch: str, count: int) -> Iterator[Row]:
    """A sample of the mutants of one entry of CHECKS, shared out among its modules."""
    known = trial.known_survivors()
    modules = trial.modules(name, arch)
    for one in modules:
        print(f"{name}, {arch}: {one.coverage} instructions that compute are executed", flush=True)
        for mutant in one.sample(-(-count // len(modules))):
            v = trial.judge(one, mutant)
            yield _row("arithmetic", v, v.line, "" if v.how else trial.reason(v, known) or "")


def _row(kind: str, verdict: campaign.Verdict | trial.Verdict, where: str, why: str) -> Row:
    v = verdict
    row = {"kind": kind, "kernel": v.kernel, "arch": v.arch, "instruction": v.instruction, "change": v.change}
    if not v.how:
        print(f"{'SURVIVES' if why else 'SURVIVES WITHOUT A REASON'}: {[*row.values(), where, why]}", flush=True)
    return {**row, "where": where, "how": v.how, "reason": why}


def table(rows: list[Row]) -> list[dict[str, object]]:
    """Counts by kernel, architecture, instruction and, of synchronisation, change."""
    total, noticed, reasons = Counter[tuple[str, ...]](), Counter[tuple[str, ...]](), Counter[tuple[str, ...]]()
    for row in rows:
        change = row["change"] if row["kind"] == "synchronisation" else "computes something else"
        key = row["kind"], row["kernel"], row["arch"], row["instruction"], change
        total[key] += 1
        noticed[key] += bool(row["how"])
        reasons[key] += bool(row["reason"]) and not row["reason"].startswith(("gap", "open"))
    names = "kind", "kernel", "arch", "instruction", "change"
    return [
        {**dict(zip(names, key, strict=True)), "mutants": n, "noticed": noticed[key], "equivalent": reasons[key]}
        for key, n in total.items()
    ]


def store(folder: Path, rows: list[Row]) -> None:
    path, counts = folder / "mutants.csv", table(rows)
    ran = {(row["kind"], row["kernel"], row["arch"]) for row in rows}
    kept: list[dict[str, object]] = []
    if path.exists():
        with path.open(newline="") as file:
            kept += [row for row in csv.DictReader(file) if (row["kind"], row["kernel"], row["arch"]) not in ran]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(counts[0]))
        writer.writeheader()
        writer.writerows(kept + counts)
    (folder / "mutants.json").write_text(json.dumps(stamp(), indent=2) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=("synchronisation", "arithmetic"), help="default: both")
    parser.add_argument("--kernel", action="append", choices=sorted({*KERNELS, *CHECKS}), help="only these")
    parser.add_argument("--arch", action="append", help="only these, such as sm_90a")
    parser.add_argument("--count", type=int, default=14, help="mutants of the arithmetic of each kernel (default 14)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where to write mutants.csv and mutants.json")
    arguments = parser.parse_args()
    rows: list[Row] = []
    for run, entries in ((synchronisation, KERNELS), (arithmetic, CHECKS)):
        for name in entries if arguments.kind in (None, run.__name__) else ():
            archs = entries[name].archs
            wanted = not arguments.kernel or name in arguments.kernel
            for arch in archs if wanted else ():
                if arch not in (arguments.arch or archs):
                    continue
                mine = list(run(name, arch, arguments.count))
                rows += mine
                if mine:
                    if arguments.out:
                        store(arguments.out, rows)
                    noticed = sum(bool(row["how"]) for row in mine)
                    print(f"{run.__name__:16} {name:24} {arch:8} {noticed:3} of {len(mine):3} noticed", flush=True)
    survivors = [row for row in rows if not row["how"]]
    new = [row for row in survivors if not row["reason"]]
    print(f"{len(rows) - len(survivors)} of {len(rows)} noticed, {len(new)} survive without a reason")
    return 1 if new else 0


if __name__ == "__main__":
    sys.exit(main())

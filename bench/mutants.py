"""The whole mutation campaign: ``python bench/mutants.py [--kind KIND] [--kernel NAME] [--arch ARCH] [--processes N]
[--verdicts FILE] [--out DIR]``.

Prints how many mutants of each kernel tests notice, and every survivor without a recorded reason. ``--verdicts`` keeps
what each mutant did, a line for each, and what stands there is not run again: a campaign that was cut goes on. With
``--out``, writes a table by kernel and instruction, mutants.csv, and the stamp of the run, mutants.json; rows that are
not run again stay in the table. Exits 1 if a survivor has no reason.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.forks import Forks
from bench.stamp import stamp
from jitfp4 import nvrtc
from tests.mutants import campaign, trial
from tests.mutants.checks import CHECKS
from tests.mutants.launches import KERNELS, record
from tests.support import ptx

Verdict = campaign.Verdict | trial.Verdict
Entry = tuple[str, str, str]
"""Kind, kernel, architecture."""
Line = dict[str, Any]
"""A verdict, its entry's kind, the mutant's number, the number of all of the entry, and the commit."""


def synchronisation(name: str, arch: str, _: int) -> list[Callable[[], Verdict]]:
    """Every mutant of the launches of one entry of KERNELS."""
    found: list[Callable[[], Verdict]] = []
    for one in record(name, arch):
        mutants, unchanged = campaign.candidates(one)
        assert unchanged.is_steady is not None  # found out here, once
        found += [partial(campaign.judge, one, mutant, unchanged) for mutant in mutants]
    return found


def arithmetic(name: str, arch: str, count: int) -> list[Callable[[], Verdict]]:
    """A sample of the mutants of one entry of CHECKS, shared out among its modules."""
    modules = trial.modules(name, arch)
    for one in modules:
        print(f"{name}, {arch}: {one.coverage} instructions that compute are executed", flush=True)
    share = -(-count // len(modules))
    return [partial(trial.judge, one, mutant) for one in modules for mutant in one.sample(share)]


KINDS = {"synchronisation": (synchronisation, KERNELS), "arithmetic": (arithmetic, CHECKS)}


class Verdicts:
    """The lines of a file, to which several processes append."""

    def __init__(self, path: Path, commit: str) -> None:
        self._path, self._commit = path, commit
        path.touch()

    def of(self, entry: Entry) -> list[Line]:
        return self._all()[entry]

    def add(self, kind: str, number: int, of: int, judge: Callable[[], Verdict]) -> None:
        line = {"kind": kind, **asdict(judge()), "number": number, "of": of, "commit": self._commit}
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def _all(self) -> dict[Entry, list[Line]]:
        found = defaultdict(list)
        for text in self._path.read_text().splitlines(keepends=True):
            if text.endswith("\n"):  # a process may have ended within the last line
                line = json.loads(text)
                if line["commit"] != self._commit:
                    raise SystemExit(f"{self._path} is of commit {line['commit']}, and this is {self._commit}")
                found[line["kind"], line["kernel"], line["arch"]].append(line)
        return found


def run(entry: Entry, count: int, verdicts: Verdicts, forks: Forks) -> None:
    """Judges the mutants of an entry that are not judged yet."""
    kind, name, arch = entry
    known = verdicts.of(entry)
    if known and len(known) == known[0]["of"]:
        return
    done, mutants = {line["number"] for line in known}, KINDS[kind][0](name, arch, count)
    for number, judge in enumerate(mutants):
        if number not in done:
            forks.begin_or_do(partial(verdicts.add, kind, number, len(mutants), judge))
    forks.join()
    lines = verdicts.of(entry)
    noticed = sum(bool(line["how"]) for line in lines)
    print(f"{kind:16} {name:32} {arch:8} {noticed:3} of {len(lines):3} noticed", flush=True)


def reason(line: Line, known: dict[str, Any]) -> str:
    """Why a survivor may survive; empty if nobody knows."""
    of, verdict = {"synchronisation": (campaign, campaign.Verdict), "arithmetic": (trial, trial.Verdict)}[line["kind"]]
    fields = {name: line[name] for name in verdict.__dataclass_fields__}
    return "" if line["how"] else of.reason(verdict(**fields), known[line["kind"]]) or ""


def table(lines: Iterable[Line], reasons: Iterable[str]) -> list[dict[str, object]]:
    """Counts by kernel, architecture, instruction and, of synchronisation, change."""
    total, noticed, equivalent = Counter[tuple[str, ...]](), Counter[tuple[str, ...]](), Counter[tuple[str, ...]]()
    for line, why in zip(lines, reasons, strict=True):
        change = line["change"] if line["kind"] == "synchronisation" else "computes something else"
        key = line["kind"], line["kernel"], line["arch"], line["instruction"], change
        total[key] += 1
        noticed[key] += bool(line["how"])
        equivalent[key] += bool(why) and not why.startswith("gap")
    names = "kind", "kernel", "arch", "instruction", "change"
    return [
        {**dict(zip(names, key, strict=True)), "mutants": n, "noticed": noticed[key], "equivalent": equivalent[key]}
        for key, n in total.items()
    ]


def store(folder: Path, counts: list[dict[str, object]], of: dict[str, object]) -> None:
    """The table, with the rows of other entries that it had, and the stamp."""
    path = folder / "mutants.csv"
    ran = {(row["kind"], row["kernel"], row["arch"]) for row in counts}
    kept: list[dict[str, object]] = []
    if path.exists():
        with path.open(newline="") as file:
            kept += [row for row in csv.DictReader(file) if (row["kind"], row["kernel"], row["arch"]) not in ran]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(counts[0]))
        writer.writeheader()
        writer.writerows(kept + counts)
    (folder / "mutants.json").write_text(json.dumps(of, indent=2) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=tuple(KINDS), help="default: both")
    parser.add_argument("--kernel", action="append", choices=sorted({*KERNELS, *CHECKS}), help="only these")
    parser.add_argument("--arch", action="append", help="only these, such as sm_90a")
    parser.add_argument("--count", type=int, default=14, help="mutants of the arithmetic of each kernel (default 14)")
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="how many work at a time (default 1)")
    parser.add_argument("--verdicts", type=Path, metavar="FILE", help="what is judged already, to which more is added")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where to write mutants.csv and mutants.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    entries = [
        (kind, name, arch)
        for kind, (_, of) in KINDS.items()
        for name, subject in of.items()
        for arch in subject.archs
        if kind == (arguments.kind or kind)
        and name in (arguments.kernel or of)
        and arch in (arguments.arch or subject.archs)
    ]
    now, forks = stamp(), Forks(arguments.processes)
    with tempfile.TemporaryDirectory() as folder:
        nvrtc.compile_ptx = ptx.kept(Path(folder), nvrtc.compile_ptx)
        verdicts = Verdicts(arguments.verdicts or Path(folder, "verdicts"), str(now["commit"]))
        for entry in entries:
            forks.begin(partial(run, entry, arguments.count, verdicts, forks))
        forks.join()
        lines = [line for entry in entries for line in sorted(verdicts.of(entry), key=lambda line: line["number"])]
    known = {"synchronisation": campaign.known_survivors(), "arithmetic": trial.known_survivors()}
    reasons = [reason(line, known) for line in lines]
    for line, why in zip(lines, reasons, strict=True):
        if not line["how"]:
            print(f"{'SURVIVES' if why else 'SURVIVES WITHOUT A REASON'}: {[*line.values(), why]}")
    if arguments.out and lines:
        store(arguments.out, table(lines, reasons), now)
    new = sum(not line["how"] and not why for line, why in zip(lines, reasons, strict=True))
    print(f"{sum(bool(line['how']) for line in lines)} of {len(lines)} noticed, {new} survive without a reason")
    return 1 if new else 0


if __name__ == "__main__":
    sys.exit(main())

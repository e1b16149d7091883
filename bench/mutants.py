"""The whole mutation campaign: ``python bench/mutants.py [--kernel NAME] [--arch ARCH] [--out FILE.csv]``.

Prints how many mutants of each kernel and instruction are noticed, and every survivor that has no reason on file.
Exits 1 when there is one.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from tests.mutants.campaign import Verdict, candidates, judge, known_survivors, reason
from tests.mutants.launches import ARCHS, KERNELS, record


def kind(verdict: Verdict) -> str:
    return f"{verdict.instruction} {verdict.change}"


def campaign(name: str, arch: str) -> list[Verdict]:
    """Every mutant of the launches of one entry of KERNELS."""
    verdicts = []
    for one in record(name, arch):
        found, want = candidates(one)
        verdicts += [judge(one, mutant, want) for mutant in found]
    return verdicts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernel", action="append", choices=KERNELS, help="only these; default: every kernel")
    parser.add_argument("--arch", action="append", choices=ARCHS)
    parser.add_argument("--out", type=Path, help="where to write every verdict as CSV")
    arguments = parser.parse_args()
    verdicts: list[Verdict] = []
    known = known_survivors()
    for arch in arguments.arch or ARCHS:
        for name in arguments.kernel or KERNELS:
            mine = campaign(name, arch)
            verdicts += mine
            total, noticed = Counter(map(kind, mine)), Counter(kind(v) for v in mine if v.how)
            for which, count in total.items():
                print(f"{name:24} {arch:8} {which:70} {noticed[which]:3} of {count:3}", flush=True)
            for v in mine:
                if not v.how and not reason(v, known):
                    print(
                        f"SURVIVES without a reason: number {v.nth} of {v.instruction} {v.change}, {v.source}",
                        flush=True,
                    )
    survivors = [v for v in verdicts if not v.how]
    new = [v for v in survivors if not reason(v, known)]
    print(f"{len(verdicts) - len(survivors)} of {len(verdicts)} noticed, {len(new)} survive without a reason")
    if arguments.out:
        with arguments.out.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(Verdict.__dataclass_fields__))
            writer.writeheader()
            writer.writerows(asdict(v) for v in verdicts)
    return 1 if new else 0


if __name__ == "__main__":
    sys.exit(main())

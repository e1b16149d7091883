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

from tests.mutants.campaign import Verdict, candidates, judge, known_survivors
from tests.mutants.launches import ARCHS, KERNELS, record


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernel", action="append", choices=KERNELS, help="only these; default: every kernel")
    parser.add_argument("--arch", action="append", choices=ARCHS)
    parser.add_argument("--out", type=Path, help="where to write every verdict as CSV")
    arguments = parser.parse_args()
    verdicts: list[Verdict] = []
    for arch in arguments.arch or ARCHS:
        for name in arguments.kernel or KERNELS:
            for one in record(name, arch):
                found, want = candidates(one)
                verdicts += [judge(one, mutant, want) for mutant in found]
    total, noticed = Counter(), Counter()
    for v in verdicts:
        key = (v.kernel, v.arch, v.instruction, v.change)
        total[key] += 1
        noticed[key] += bool(v.how)
    for key, count in total.items():
        print(f"{key[0]:24} {key[1]:8} {key[2]:60} {key[3]:16} {noticed[key]:3} of {count:3}")
    survivors = [v for v in verdicts if not v.how]
    known = known_survivors()
    new = [v for v in survivors if (v.kernel, v.instruction, v.change) not in known]
    print(f"{sum(noticed.values())} of {len(verdicts)} noticed, {len(survivors)} survive, {len(new)} without a reason")
    for v in new:
        print(f"SURVIVES {v.kernel} {v.arch}: {v.instruction} {v.change}, {v.source}")
    if arguments.out:
        with arguments.out.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(Verdict.__dataclass_fields__))
            writer.writeheader()
            writer.writerows(asdict(v) for v in verdicts)
    return 1 if new else 0


if __name__ == "__main__":
    sys.exit(main())

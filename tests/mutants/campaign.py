"""Runs mutants of recorded launches: a mutant is noticed when its sanitised run fails or leaves other bytes."""

from __future__ import annotations

import csv
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jitfp4 import sim
from jitfp4.errors import Jitfp4Error
from jitfp4.sim.api import load
from jitfp4.sim.program import Program
from tests.mutants.launches import Recorded, contents
from tests.mutants.synchronisation import Mutant, mutants

SURVIVORS = Path(__file__).with_name("survivors.csv")
HANGS_S = 60
"""A run that takes longer than this loops forever: runs of the campaign take a second or two."""


class Hangs(Exception):  # noqa: N818 - not an error of the program that runs
    """A mutant does not end."""


@dataclass(frozen=True)
class Verdict:
    """``how`` a mutant was noticed; empty when it survived. ``nth`` counts the launch's executed instructions that
    read like ``instruction``, from 1.
    """

    kernel: str
    arch: str
    instruction: str
    nth: int
    source: str
    change: str
    how: str


@contextmanager
def at_most(seconds: int) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise Hangs

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def sanitised(one: Recorded, program: Program | str) -> tuple[sim.Stats, list[bytes]]:
    """A run that may follow an unfinished grid, which reads and writes every argument."""
    args = one.fresh()
    chain = sim.Chain(after_unknown=True)
    stats = sim.run(program, args, one.geometry, one.arch, entry=one.entry, races=True, chain=chain)
    return stats, contents(args)


def candidates(one: Recorded) -> tuple[list[Mutant], list[bytes]]:
    """The mutants of the instructions that a launch executes, and what it leaves in memory unchanged."""
    stats, want = sanitised(one, one.ptx)
    program, count, found = load(one.ptx, one.entry), Counter[str](), []
    for pc in sorted(stats.executed):
        count[program.opcode(pc)] += 1
        found += [replace(m, nth=count[program.opcode(pc)]) for m in mutants(pc, program.module.code[pc])]
    return found, want


def judge(one: Recorded, mutant: Mutant, want: list[bytes]) -> Verdict:
    program = load(one.ptx, one.entry)
    instr = program.module.code[mutant.pc]
    code = list(program.module.code)
    code[mutant.pc] = replace(mutant.instead, guard=instr.guard, negated=instr.negated)
    source = program.place_of(instr).splitlines()[-1].strip().rpartition("/")[2]
    how = ""
    try:
        with at_most(HANGS_S):
            _, got = sanitised(one, Program(replace(program.module, code=code), one.entry))
        how = "" if got == want else "other bytes"
    except Jitfp4Error as error:
        how = type(error).__name__
    except Hangs:
        how = "hangs"
    return Verdict(one.kernel, one.arch, program.opcode(mutant.pc), mutant.nth, source, mutant.change, how)


Known = dict[tuple[str, str, str, str], str]


def known_survivors() -> Known:
    """Reasons of the mutants that rightly survive, by kernel, instruction, number (* is every one) and change."""
    with SURVIVORS.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {(row["kernel"], row["instruction"], row["nth"], row["change"]): row["reason"] for row in rows}


def reason(verdict: Verdict, known: Known) -> str | None:
    """Why a survivor may survive."""
    for kernel in (verdict.kernel, "*"):
        for nth in (str(verdict.nth), "*"):
            found = known.get((kernel, verdict.instruction, nth, verdict.change))
            if found:
                return found
    return None

"""Runs mutants of recorded launches: one is noticed when a sanitised run fails or leaves other bytes, in some order."""

from __future__ import annotations

import csv
from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from jitfp4 import sim
from jitfp4.errors import Jitfp4Error
from jitfp4.sim.api import load
from jitfp4.sim.program import Program
from tests.mutants.recorded import Recorded, contents
from tests.mutants.synchronisation import Mutant, mutants

SURVIVORS = Path(__file__).with_name("survivors.csv")
ENDLESS = 3
"""A mutant that issues so many times the instructions of the kernel, and some, loops forever."""
SEEDS = (None, 1, 2)
"""Of the orders in which a mutant runs until it is noticed: first the fixed one."""


@dataclass
class Unchanged:
    """What a kernel leaves in memory in the fixed order, and what that run cost."""

    one: Recorded
    memory: list[bytes]
    stats: sim.Stats

    def limit(self, seed: int | None) -> int:
        """The instructions within which a mutant has to end. In a random order warps issue apart, up to five times as
        often as in the fixed one.
        """
        apart = 0 if seed is None else self.stats.instructions // 32
        return ENDLESS * (self.stats.issued + apart + 10_000)

    @cached_property
    def is_steady(self) -> bool:
        """Whether it leaves the same in other orders; if not, only errors tell."""
        return all(sanitised(self.one, self.one.ptx, seed=seed)[1] == self.memory for seed in SEEDS[1:])


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


def sanitised(
    one: Recorded, program: Program | str, limit: int | None = None, seed: int | None = None
) -> tuple[sim.Stats, list[bytes]]:
    """A run that may follow an unfinished grid, which reads and writes every argument that is not constant."""
    args = one.fresh()
    constant = [getattr(args[number], "tensor", args[number]) for number in one.constant]
    chain = sim.Chain(constant=[tensor for tensor in constant if tensor is not None], after_unknown=True)
    options = {"entry": one.entry, "races": True, "chain": chain, "limit": limit, "seed": seed}
    return sim.run(program, args, one.geometry, one.arch, **options), contents(args)


def candidates(one: Recorded) -> tuple[list[Mutant], Unchanged]:
    """The mutants of the instructions that a launch executes, and what it does unchanged."""
    stats, memory = sanitised(one, one.ptx)
    program, count, found = load(one.ptx, one.entry), Counter[str](), []
    for pc in sorted(stats.executed):
        count[program.opcode(pc)] += 1
        found += [replace(m, nth=count[program.opcode(pc)]) for m in mutants(pc, program.module.code[pc])]
    return found, Unchanged(one, memory, stats)


def judge(one: Recorded, mutant: Mutant, want: Unchanged) -> Verdict:
    program = load(one.ptx, one.entry)
    instr = program.module.code[mutant.pc]
    code = list(program.module.code)
    code[mutant.pc] = replace(mutant.instead, guard=instr.guard, negated=instr.negated)
    source = program.place_of(instr).splitlines()[-1].strip().rpartition("/")[2]
    how, changed = "", Program(replace(program.module, code=code), one.entry)
    for seed in SEEDS:
        try:
            _, got = sanitised(one, changed, want.limit(seed), seed)
            how = "other bytes" if got != want.memory and want.is_steady else ""
        except Jitfp4Error as error:
            how = type(error).__name__
        if how:
            break
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

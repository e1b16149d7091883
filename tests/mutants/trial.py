"""Runs arithmetic mutants: one is noticed when a test of its kernel's family fails."""

from __future__ import annotations

import csv
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from jitfp4 import engine, nvrtc, sim
from jitfp4.sim.api import load
from jitfp4.sim.program import Program
from tests.mutants.arithmetic import Mutant, mutants
from tests.mutants.campaign import ENDLESS
from tests.mutants.checks import CHECKS
from tests.mutants.runs import Check

SURVIVORS = Path(__file__).with_name("survivors_arithmetic.csv")


@dataclass
class Module:
    """A compiled kernel: what of it the checks execute, and which of them run it."""

    kernel: str
    arch: str
    ptx: str
    source: str
    entry: str | None
    checks: list[Check] = field(default_factory=list)
    executed: set[int] = field(default_factory=set)
    limit: int = 0

    def line(self, pc: int) -> str:
        """The CUDA line of an instruction, without the spaces around it."""
        loc = load(self.ptx, self.entry).module.code[pc].loc
        return "" if loc is None else self.source.splitlines()[loc.line - 1].strip()

    @property
    def coverage(self) -> str:
        """How many of the instructions that compute the checks execute."""
        return f"{len(self.executed.intersection(self.computing))} of {len(self.computing)}"

    @property
    def computing(self) -> list[int]:
        """Instructions that compute."""
        return [pc for pc, instr in enumerate(load(self.ptx, self.entry).module.code) if any(mutants(pc, instr))]

    def sample(self, count: int) -> list[Mutant]:
        """Mutants of ``count`` executed instructions, the same in every process and whatever else is executed; more of
        them begin with fewer.
        """
        order = np.random.default_rng(zlib.crc32(f"{self.kernel} {self.arch}".encode()))
        code = load(self.ptx, self.entry).module.code
        several = {pc: list(mutants(pc, code[pc])) for pc in self.computing}
        chosen = {pc: several[pc][int(order.integers(len(several[pc])))] for pc in several}
        return [chosen[pc] for pc in order.permutation(self.computing).tolist() if pc in self.executed][:count]


@dataclass(frozen=True)
class Verdict:
    """``how`` a mutant was noticed; empty when it survived."""

    kernel: str
    arch: str
    instruction: str
    change: str
    line: str
    how: str


@contextmanager
def _watched(seen: dict[str, Module]) -> Iterator[set[str]]:
    """Notes what the simulated calls in the block execute; yields the modules that run."""
    run, compile_ptx, ran = sim.run, nvrtc.compile_ptx, set[str]()
    sources: dict[str, str] = {}

    def kept(source: str, *args: Any, **options: Any) -> str:
        ptx = compile_ptx(source, *args, **options)
        sources[ptx] = source
        return ptx

    def noted(ptx: str, *args: Any, **options: Any) -> sim.Stats:
        stats = run(ptx, *args, **options)
        one = seen.setdefault(ptx, Module("", "", ptx, sources.get(ptx, ""), options.get("entry")))
        one.executed |= stats.executed.keys()
        one.limit = max(one.limit, ENDLESS * (stats.issued + 10_000))
        ran.add(ptx)
        return stats

    with mock.patch.object(sim, "run", noted), mock.patch.object(nvrtc, "compile_ptx", kept):
        yield ran


def modules(kernel: str, arch: str) -> list[Module]:
    """The modules of one entry of CHECKS: those that its first check runs."""
    subject, seen = CHECKS[kernel], dict[str, Module]()
    engine.reset()  # compiles again, so that every source is met
    for check in subject.checks if arch in subject.archs else ():
        with _watched(seen) as ran:
            check(arch)
        for ptx in ran:
            seen[ptx].checks.append(check)
    first = subject.checks[0]
    mine = [one for one in seen.values() if one.entry == subject.entry and first in one.checks]
    return [replace(one, kernel=kernel, arch=arch) for one in mine]


@contextmanager
def _instead(one: Module, program: Program) -> Iterator[None]:
    run = sim.run

    def mutated(ptx: str, *args: Any, **options: Any) -> sim.Stats:
        if ptx == one.ptx:
            return run(program, *args, **options, limit=one.limit)
        return run(ptx, *args, **options)

    with mock.patch.object(sim, "run", mutated):
        yield


def judge(one: Module, mutant: Mutant) -> Verdict:
    """Runs the checks until one fails."""
    program = load(one.ptx, one.entry)
    code = list(program.module.code)
    code[mutant.pc] = mutant.instead
    changed, how = Program(replace(program.module, code=code), one.entry), ""
    for check in one.checks:
        try:
            with _instead(one, changed), np.errstate(all="ignore"):
                check(one.arch)
        except Exception as error:
            how = type(error).__name__
            break
    return Verdict(one.kernel, one.arch, program.opcode(mutant.pc), mutant.change, one.line(mutant.pc), how)


Known = dict[tuple[str, str, str, str], str]


def known_survivors() -> Known:
    """What is known of survivors, by kernel (* is every one), instruction, change and CUDA line.

    It says whether the mutant is ``equivalent`` (no input that is allowed tells it apart, but by a rounding that the
    tests allow) or lives in a ``gap`` of its family's tests.
    """
    with SURVIVORS.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {
        (row["kernel"], row["instruction"], row["change"], row["line"]): f"{row['judged']}: {row['reason']}"
        for row in rows
    }


def reason(verdict: Verdict, known: Known) -> str | None:
    """Why a survivor may survive."""
    for kernel in (verdict.kernel, "*"):
        for change in (verdict.change, "*"):
            found = known.get((kernel, verdict.instruction, change, verdict.line))
            if found:
                return found
    return None

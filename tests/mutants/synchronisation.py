"""Mutants of a kernel: one synchronising instruction deleted, or weakened.

``griddepcontrol.launch_dependents`` is left out: it lets the next grid begin early, and without it there is more order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from jitfp4.sim.ptx import Imm, Instr

_DELETED = (
    *("bar", "barrier", "fence", "membar", "griddepcontrol.wait", "mbarrier.arrive", "mbarrier.arrive_drop"),
    *("mbarrier.init", "mbarrier.try_wait", "mbarrier.test_wait", "mbarrier.expect_tx", "mbarrier.complete_tx"),
    *("cp.async.wait_group", "cp.async.wait_all", "cp.async.commit_group", "cp.async.mbarrier"),
    *("cp.async.bulk.commit_group", "cp.async.bulk.wait_group"),
    *("wgmma.fence", "wgmma.commit_group", "wgmma.wait_group"),
    *("tcgen05.wait::ld", "tcgen05.wait::st", "tcgen05.commit"),
    *("tcgen05.fence::before_thread_sync", "tcgen05.fence::after_thread_sync"),
)
_WEAKER = {"release": "relaxed", "acquire": "relaxed", "acq_rel": "relaxed"}
_NARROWER = {"gpu": "cta", "sys": "cta", "gl": "cta", "cluster": "cta"}
_NOTHING = Instr("pmevent", (), (), None, False, 0, "", None)


@dataclass(frozen=True)
class Mutant:
    """The instruction at ``pc``, the ``nth`` of its kind that is executed, replaced."""

    pc: int
    change: str
    instead: Instr
    nth: int = 0


def _opcode(instr: Instr) -> str:
    return ".".join((instr.name, *instr.mods))


def synchronises(instr: Instr) -> bool:
    name = _opcode(instr)
    return any(name == prefix or name.startswith(prefix + ".") for prefix in _DELETED)


def mutants(pc: int, instr: Instr) -> Iterator[Mutant]:
    """What may be wrong at one instruction. A deleted wait always succeeds."""
    name = _opcode(instr)
    if synchronises(instr):
        deleted = replace(_NOTHING, line=instr.line, loc=instr.loc, text=f"deleted: {instr.text}")
        if instr.mods[:1] in (("try_wait",), ("test_wait",)):
            operands = (instr.operands[0], Imm(0), Imm(0))
            deleted = replace(deleted, name="setp", mods=("eq", "u32"), operands=operands)
        yield Mutant(pc, "deleted", deleted)
    if name.startswith(("cp.async.wait_group", "cp.async.bulk.wait_group", "wgmma.wait_group")):
        count = instr.operands[0]
        if isinstance(count, Imm):
            yield Mutant(pc, "one group fewer", replace(instr, operands=(Imm(int(count.value) + 1),)))
    if "expect_tx" in instr.mods and instr.mods[0] == "arrive":
        mods = tuple(mod for mod in instr.mods if mod != "expect_tx")
        yield Mutant(pc, "expects no bytes", replace(instr, mods=mods, operands=instr.operands[:-1]))
    if instr.name in ("ld", "st", "atom", "red", "barrier"):
        mods = tuple(_WEAKER.get(mod, mod) for mod in instr.mods)
        if mods != instr.mods and "wait" not in instr.mods:
            yield Mutant(pc, "relaxed", replace(instr, mods=mods))
    ordering = instr.name in ("fence", "membar") and "proxy" not in instr.mods and "mbarrier_init" not in instr.mods
    if ordering or instr.name == "mbarrier":
        mods = tuple(_NARROWER.get(mod, mod) for mod in instr.mods)
        if mods != instr.mods:
            yield Mutant(pc, "of the CTA only", replace(instr, mods=mods))

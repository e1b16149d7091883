"""Mutants of a kernel that compute something else: an operator, a constant or a comparison changed."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace

from jitfp4.sim.ptx import Imm, Instr, Operand

_OTHER = {
    "add": "sub",
    "sub": "add",
    "min": "max",
    "max": "min",
    "and": "or",
    "or": "and",
    "xor": "or",
    "shl": "shr",
    "shr": "shl",
    "div": "mul",
    "rem": "div",
    "mul": "add",
    "neg": "mov",
    "not": "mov",
    "abs": "neg",
}
"""Instructions with the same operands."""
_COMPARES = {
    "eq": "ne",
    "ne": "eq",
    "lt": "ge",
    "ge": "lt",
    "gt": "le",
    "le": "gt",
    "num": "nan",
    "nan": "num",
    "equ": "ne",
    "neu": "eq",
    "ltu": "ge",
    "geu": "lt",
    "gtu": "le",
    "leu": "gt",
}
"""Of each comparison the opposite."""
_WITH_CONSTANTS = frozenset(_OTHER) | {"mad", "fma", "selp", "setp", "set", "mov", "lop3", "prmt", "bfe", "bfi", "shf"}


@dataclass(frozen=True)
class Mutant:
    """The instruction at ``pc``, replaced. ``change`` says what was written instead."""

    pc: int
    change: str
    instead: Instr


def mutants(pc: int, instr: Instr) -> Iterator[Mutant]:
    """What else one instruction could compute; nothing for those that only load, store, move, branch or wait."""
    for changed in _operators(instr):
        yield Mutant(pc, ".".join((changed.name, *changed.mods)), changed)
    for at, operand in enumerate(instr.operands):
        if isinstance(operand, Imm) and instr.name in _WITH_CONSTANTS:
            for other in _constants(operand):
                operands = (*instr.operands[:at], other, *instr.operands[at + 1 :])
                yield Mutant(pc, f"{operand.value} is {other.value}", replace(instr, operands=operands))


def _operators(instr: Instr) -> Iterator[Instr]:
    name, mods, kind = instr.name, instr.mods, instr.mods[-1] if instr.mods else ""
    if name in ("setp", "set"):
        yield replace(instr, mods=(_COMPARES[mods[0]], *mods[1:]))
    elif name in ("fma", "mad") and "wide" not in mods:
        yield replace(instr, name="mul", operands=instr.operands[:3])
    elif name == "selp":
        to, first, second, which = instr.operands
        yield replace(instr, operands=(to, second, first, which))
    elif name == "mul" and mods[0] in ("hi", "wide"):
        if mods[0] == "hi":
            yield replace(instr, mods=("lo", *mods[1:]))
    elif name in ("shl", "shr"):
        yield replace(instr, name=_OTHER[name], mods=(f"b{kind[1:]}",))
    elif name in ("div", "rem") and kind[0] in "us":
        yield replace(instr, name=_OTHER[name], mods=("lo", *mods) if name == "div" else mods)
    elif name in _OTHER:
        left = tuple(mod for mod in mods if mod != "lo")
        yield replace(instr, name=_OTHER[name], mods=left if _OTHER[name] != "mov" else (kind,))


def _constants(old: Imm) -> Iterator[Operand]:
    """One more and one less; of a float the double, and its negative. What is not finite is doubled to a tiny number or
    to 0.
    """
    if old.bits is None:
        yield Imm(old.value + 1)
        yield Imm(old.value - 1)
    elif old.value == 0:
        yield Imm(1.0, (0x3F800000, 32) if old.bits[1] == 32 else (0x3FF0000000000000, 64))
    else:
        pattern, width = old.bits
        exponent = 1 << (23 if width == 32 else 52)
        yield _floating(pattern ^ 1 << width - 1, width)
        yield _floating((pattern + exponent) % (1 << width), width)


def _floating(pattern: int, width: int) -> Imm:
    floating, whole = ("<f", "<I") if width == 32 else ("<d", "<Q")
    return Imm(struct.unpack(floating, struct.pack(whole, pattern))[0], (pattern, width))

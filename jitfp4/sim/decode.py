"""From a parsed instruction to a Python closure: operands, modifiers and the registry of handlers.

A handler is a function that takes a ``Decode`` and returns a step, registered under the longest fitting opcode prefix
(``mbarrier.try_wait`` before ``mbarrier``). It must consume every modifier and operand; what is left over is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from jitfp4.errors import SimParseError
from jitfp4.sim.lanes import Lanes
from jitfp4.sim.memory import RANK_BITS
from jitfp4.sim.ptx import TYPES, Addr, Array, Imm, Instr, Not, Operand, Reg, Sink, Special, Sym, Type, Vec
from jitfp4.sim.special import special

if TYPE_CHECKING:
    from jitfp4.sim.machine import Machine
    from jitfp4.sim.program import Program

Step = Callable[["Machine", Lanes], None]
"""Executes one instruction for some threads."""
Control = Callable[["Machine", Lanes, int], None]
"""Executes an instruction that moves threads: the last argument is the next program counter."""
Source = Callable[["Machine", Lanes], Any]
"""Reads an operand: an array with one element per lane, or a NumPy scalar for all."""
Dest = Callable[["Machine", Lanes, Any], None]
"""Writes an operand. Takes a fresh array (the register may keep it) or a scalar."""


class Decode:
    """One instruction being decoded."""

    def __init__(self, instr: Instr, pc: int, program: Program) -> None:
        self.instr, self.pc, self.program = instr, pc, program
        self.mods = list(instr.mods)
        self.operands = list(instr.operands)

    def error(self, message: str) -> SimParseError:
        return SimParseError(f"{message}\n  {self.program.place_of(self.instr)}")

    # Modifiers

    def take(self, *names: str) -> str | None:
        """Consume the first modifier that is one of ``names``."""
        for mod in self.mods:
            if mod in names:
                self.mods.remove(mod)
                return mod
        return None

    def flag(self, name: str) -> bool:
        return self.take(name) is not None

    def need(self, *names: str) -> str:
        found = self.take(*names)
        if found is None:
            raise self.error(f"expected one of {', '.join('.' + name for name in names)}")
        return found

    def ignore(self, *names: str) -> None:
        """Consume modifiers that have no effect on results: cache operators, scopes, alignment promises."""
        while self.take(*names):
            pass

    def type(self) -> Type:
        """Consume the next type modifier."""
        return TYPES[self.need(*TYPES)]

    def no_more_mods(self) -> None:
        if self.mods:
            raise self.error(f"modifier .{self.mods[0]} of {self.instr.name} is not modelled")

    def finish(self) -> None:
        self.no_more_mods()
        if self.operands:
            raise self.error(f"{self.instr.name} has an operand that is not modelled: {self.operands[0]}")

    # Operands

    def next(self) -> Operand:
        if not self.operands:
            raise self.error("too few operands")
        return self.operands.pop(0)

    def src(self, kind: Type, operand: Operand | None = None, *, wide: bool = False) -> Source:
        """Reader of the next operand as ``kind``. ``wide`` allows a register with more bits, whose low part is read."""
        operand = operand if operand is not None else self.next()
        if isinstance(operand, Reg):
            return self._read_register(operand, kind, wide)
        if isinstance(operand, Imm):
            value = self.literal(operand, kind)
            return lambda _m, _lanes: value
        if isinstance(operand, Special):
            return self._read_special(operand, kind)
        if isinstance(operand, Sym):
            return self._read_symbol(operand, kind)
        if isinstance(operand, Not) and kind.bits == 1:
            inverted = self._read_register(operand.reg, kind, wide)
            return lambda m, lanes: ~inverted(m, lanes)
        raise self.error(f"cannot read {operand} as .{kind.name}")

    def _read_register(self, reg: Reg, kind: Type, wide: bool) -> Source:
        index, dtype = reg.index, kind.dtype
        if reg.type.bits != kind.bits:
            if not wide or reg.type.bits < kind.bits or kind.bits == 1:
                raise self.error(f"{reg.name} has {reg.type.bits} bits, .{kind.name} needs {kind.bits}")
            raw = kind.raw
            return lambda m, lanes: m.registers[index][lanes.sel].astype(raw).view(dtype)
        if dtype == reg.type.raw:
            return lambda m, lanes: m.registers[index][lanes.sel]
        return lambda m, lanes: m.registers[index][lanes.sel].view(dtype)

    def _read_special(self, operand: Special, kind: Type) -> Source:
        read, dtype = special(operand.name), kind.dtype
        return lambda m, lanes: read(m, lanes).astype(kind.raw).view(dtype)

    def _read_symbol(self, operand: Sym, kind: Type) -> Source:
        space, offset = self.program.address_of(operand)
        dtype = kind.dtype
        if space == "shared":
            return lambda m, lanes: ((m.rank[lanes.sel] << RANK_BITS) + offset).astype(dtype)
        name = operand.name
        if space == "global":
            return lambda m, _lanes: dtype.type(m.program.module_bases[name] + operand.offset)
        value = dtype.type(offset)
        return lambda _m, _lanes: value

    def literal(self, imm: Imm, kind: Type) -> Any:
        """An immediate as a NumPy scalar of ``kind``, exact bits where the source gives bits."""
        if kind.bits == 1:
            return np.bool_(bool(imm.value))
        if imm.bits is not None and imm.bits[1] == kind.bits:
            return kind.raw.type(imm.bits[0]).view(kind.dtype)
        if kind.dtype.kind == "f":
            return kind.dtype.type(imm.value)
        if not isinstance(imm.value, int):
            raise self.error(f"{imm.value} is not an integer")
        return kind.raw.type(imm.value & ((1 << kind.bits) - 1)).view(kind.dtype)

    def immediate(self) -> int:
        """The next operand, which must be an integer literal."""
        operand = self.next()
        if not isinstance(operand, Imm) or not isinstance(operand.value, int):
            raise self.error("expected an integer literal")
        return operand.value

    def dst(self, kind: Type, operand: Operand | None = None, *, wide: bool = False) -> Dest:
        """Writer of the next operand from ``kind``. ``wide`` allows a longer register: sign- or zero-extended."""
        operand = operand if operand is not None else self.next()
        if isinstance(operand, Sink):
            return lambda _m, _lanes, _value: None
        if not isinstance(operand, Reg):
            raise self.error(f"cannot write {operand}")
        index, raw = operand.index, operand.type.raw
        if operand.type.bits == kind.bits:
            return lambda m, lanes, value: _assign(m, lanes, index, value.view(raw))
        if not wide or operand.type.bits < kind.bits or kind.bits == 1:
            raise self.error(f"{operand.name} has {operand.type.bits} bits, .{kind.name} needs {kind.bits}")
        grown = np.dtype(f"i{raw.itemsize}") if kind.is_signed else raw
        return lambda m, lanes, value: _assign(m, lanes, index, value.astype(grown).view(raw))

    def vector(self, operand: Operand | None = None) -> tuple[Operand, ...]:
        """The elements of the next operand, which is ``{...}`` or a single register."""
        operand = operand if operand is not None else self.next()
        return operand.items if isinstance(operand, Vec) else (operand,)

    def address(self, operand: Operand | None = None) -> Source:
        """Reader of ``[base+offset]``: one int64 address per lane."""
        operand = operand if operand is not None else self.next()
        if not isinstance(operand, Addr) or operand.rest:
            raise self.error(f"expected an address, not {operand}")
        return self.base(operand)

    def base(self, operand: Addr) -> Source:
        """The address part of an ``[...]`` operand, without its vectors."""
        offset = np.int64(operand.offset)
        if isinstance(operand.base, Imm):
            fixed = int(operand.base.value) + operand.offset
            return lambda _m, lanes: np.full(lanes.n, fixed, np.int64)
        bits = operand.base.type.bits if isinstance(operand.base, Reg) else 64
        read = self.src(TYPES[f"u{bits}"], operand.base)

        def address(m: Machine, lanes: Lanes) -> Array:
            value = read(m, lanes)
            if value.ndim == 0:
                return np.full(lanes.n, np.int64(value) + offset, np.int64)
            out: Array = value.astype(np.int64)
            if offset:
                out += offset
                if bits == 32:
                    out &= 0xFFFFFFFF
            return out

        return address


def _assign(m: Machine, lanes: Lanes, index: int, value: Any) -> None:
    if not lanes.full:
        if not m.registers[index].flags.writeable:
            m.registers[index] = m.registers[index].copy()
        m.registers[index][lanes.sel] = value
    elif value.ndim:
        m.registers[index] = value
    else:
        m.registers[index] = np.full(m.total, value)


def broadcast(value: Any, n: int) -> Array:
    """An operand's value with one element per lane."""
    return np.full(n, value) if value.ndim == 0 else value


StepBuilder = Callable[[Decode], Step]
ControlBuilder = Callable[[Decode], Control]
B = TypeVar("B", bound=Callable[[Decode], Any])

STEPS: dict[str, StepBuilder] = {}
CONTROLS: dict[str, ControlBuilder] = {}


def step(*names: str) -> Callable[[B], B]:
    """Register a builder of an instruction that falls through."""

    def register(builder: B) -> B:
        for name in names:
            STEPS[name] = builder
        return builder

    return register


def control(*names: str) -> Callable[[B], B]:
    """Register a builder of an instruction that may branch, suspend or exit."""

    def register(builder: B) -> B:
        for name in names:
            CONTROLS[name] = builder
        return builder

    return register


def find(instr: Instr) -> tuple[str, bool]:
    """The registered name that fits an opcode, and whether it is a control instruction. KeyError when there is none."""
    parts = [instr.name, *instr.mods]
    for length in range(len(parts), 0, -1):
        name = ".".join(parts[:length])
        if name in CONTROLS:
            return name, True
        if name in STEPS:
            return name, False
    raise KeyError(instr.name)

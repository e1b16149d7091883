"""A PTX entry decoded for execution: closures in basic blocks, and the layout of its variables."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from jitfp4.errors import SimParseError
from jitfp4.sim import ops as _ops  # noqa: F401 (registers every instruction)
from jitfp4.sim.decode import CONTROLS, STEPS, Control, Decode, Source, Step, find
from jitfp4.sim.lanes import Lanes
from jitfp4.sim.memory import PARAM_START, POISON, SHARED_START, GlobalMemory
from jitfp4.sim.ptx import Array, Function, Instr, Module, Reg, Sym, Variable, Vec
from jitfp4.sim.registers import owned, owner, registers_of, watched, watched_control


@dataclass(frozen=True, slots=True)
class Block:
    """A basic block: steps with their program counters, then at most one control instruction, at ``end - 1``."""

    steps: tuple[tuple[int, Step], ...]
    control: Control | None
    end: int


Copies = list[tuple[int, int, int]]
_LAST = ("ret", "exit", "trap", "bra", "brx")
_MOST_BYTES = {"global": 1 << 36, "shared": 1 << 24, "const": 1 << 24, "local": 1 << 19, "param": 1 << 19}
"""Of a variable: no GPU has more, and a buffer's window in global memory is not wider."""
_NEVER_WAIT = frozenset(("bra", "brx", "ret", "exit", "trap", "call"))


def _align(offset: int, to: int) -> int:
    return -(-offset // max(to, 1)) * max(to, 1)


class Program:
    """One entry of a module and the device functions it may call."""

    def __init__(self, module: Module, entry: str | None = None) -> None:
        self.module = module
        self.entry = _entry(module, entry)
        self.registers = [_fill(kind.raw) for kind in module.registers]
        self.owned = owned(module.code)
        self.module_bases: dict[str, int] = {}  # addresses of .global variables, set by each run
        self.places: dict[str, tuple[str, int]] = {}
        self.return_copies: dict[int, Copies] = {}
        self.barrier_results: dict[int, Step] = {}  # what bar.red writes when its threads are released
        self._lay_out()
        self.blocks: list[Block] = []
        self.block_at: dict[int, int] = {}
        self._decode()

    # Variables

    def _lay_out(self) -> None:
        """Give every variable an address in its space; dynamic shared memory follows the static."""
        ends = {"shared": SHARED_START, "local": 0, "const": 0}
        variables = list(self.module.variables.values())
        for function in self.module.functions.values():
            if function.entry and function is not self.entry:
                continue
            formal = {id(v) for v in function.params} if function.entry else set()
            variables += [v for v in function.variables.values() if id(v) not in formal]
        for variable in (*variables, *self.entry.params):
            most = _MOST_BYTES.get(variable.space, _MOST_BYTES["param"])
            if not len(variable.init) <= variable.size <= most and not variable.extern:
                text = f"{variable.size} bytes, {len(variable.init)} of them given"
                raise SimParseError(f"variable {variable.name}: {text}; allowed: at most {most}")
        for variable in variables:
            space = "local" if variable.space == "param" else variable.space
            if space == "shared" and variable.extern:
                continue
            if space != "global":
                ends[space] = _align(ends[space], variable.align)
                variable.offset = ends[space]
                ends[space] += variable.size
            self.places[variable.name] = (space, variable.offset)
        self.shared_static = ends["shared"] - SHARED_START
        self.local_bytes, self.const_bytes = ends["local"], ends["const"]
        dynamic = [v for v in variables if v.space == "shared" and v.extern]
        self.shared_dynamic: int | None = None
        if dynamic:
            self.shared_dynamic = _align(ends["shared"], max(v.align for v in dynamic))
            self.places |= {v.name: ("shared", self.shared_dynamic) for v in dynamic}
        self.param_bytes = 0
        for variable in self.entry.params:
            variable.offset = _align(self.param_bytes, variable.align)
            self.param_bytes = variable.offset + variable.size
            self.places[variable.name] = ("param", PARAM_START + variable.offset)

    def address_of(self, symbol: Sym) -> tuple[str, int]:
        """Space and address of a variable plus offset."""
        if symbol.name not in self.places:
            raise SimParseError(f"variable {symbol.name} has no storage: another entry's parameter?")
        space, address = self.places[symbol.name]
        return space, address + symbol.offset

    def initialise(self, memory: GlobalMemory) -> Array:
        """Place the module's ``.global`` variables in ``memory``. Returns the constant bank."""
        const = np.zeros(self.const_bytes, np.uint8)
        images: dict[str, Array] = {}
        for variable in self.module.variables.values():
            if variable.space in ("global", "const"):
                image = np.zeros(variable.size, np.uint8)
                image[: len(variable.init)] = np.frombuffer(variable.init, np.uint8)
                images[variable.name] = image
            if variable.space == "global":
                self.module_bases[variable.name] = memory.add(variable.name, images[variable.name])
        for name, image in images.items():
            variable = self.module.variables[name]
            for offset, symbol in variable.fixups:
                address = self.module_bases.get(symbol.name, 0) + symbol.offset
                image[offset : offset + 8] = np.frombuffer(address.to_bytes(8, "little"), np.uint8)
            if variable.space == "const":
                const[variable.offset : variable.offset + variable.size] = image
        return const

    # Calls

    def param_copies(self, actual: Vec, formal: tuple[Variable, ...], d: Decode) -> Copies:
        """What a call copies between the caller's .param variables and the function's: local offsets and sizes."""
        if len(actual.items) != len(formal):
            raise d.error(f"call with {len(actual.items)} parameters of a function that has {len(formal)}")
        copies: Copies = []
        for item, variable in zip(actual.items, formal, strict=True):
            if not isinstance(item, Sym):
                raise d.error(f"call parameter {item} is not a .param variable")
            copies.append((self.address_of(item)[1], variable.offset, variable.size))
        return copies

    # Code

    def _decode(self) -> None:
        for function in self.module.functions.values():
            if function is self.entry or not function.entry:
                self._decode_function(function)

    def _decode_function(self, function: Function) -> None:
        """Cut a function into blocks: at labels, after control instructions, and before those at which threads wait."""
        code = range(function.start, function.end)
        steps: dict[int, Step] = {}
        controls: dict[int, Control] = {}
        leaders = {function.start, function.end}
        for pc in code:
            instr = self.module.code[pc]
            leaders.update(instr.targets)
            if self._build(pc, instr, steps, controls):
                leaders |= {pc, pc + 1} if instr.name not in _NEVER_WAIT else {pc + 1}
        if not code and not function.entry:
            return  # only declared: a call of it is an error of the thread that makes it
        last = self.module.code[function.end - 1] if code else None
        if last is None or last.name not in _LAST or last.guard is not None:
            raise SimParseError(f"{function.name}: threads may run past its end, where no ret is")
        for start, end in pairwise(sorted(leaders)):
            self.block_at[start] = len(self.blocks)
            plain = tuple((pc, steps[pc]) for pc in range(start, end) if pc in steps)
            self.blocks.append(Block(plain, controls.get(end - 1), end))

    def _build(self, pc: int, instr: Instr, steps: dict[int, Step], controls: dict[int, Control]) -> bool:
        """Decode one instruction into ``steps`` or ``controls``; True for the latter."""
        try:
            name, is_control = find(instr)
        except KeyError:
            raise SimParseError(f"unknown instruction {instr.name}\n  {self.place_of(instr)}") from None
        decode = Decode(instr, pc, self)
        decode.mods = decode.mods[name.count(".") :]
        guard = None if instr.guard is None else _guard(instr.guard, instr.negated)
        touched = frozenset() if owner(instr) else self.owned & registers_of(instr.operands)
        if is_control:
            control = CONTROLS[name](decode)
            if touched:
                control = watched_control(control, touched)
            controls[pc] = control if guard is None else _guarded_control(control, guard)
        else:
            step = STEPS[name](decode)
            if touched:
                step = watched(step, instr, touched)
            steps[pc] = step if guard is None else _guarded_step(step, guard)
        decode.finish()
        return is_control

    def place_of(self, instr: Instr) -> str:
        where = f"PTX line {instr.line}: {instr.text}"
        if instr.loc is not None:
            where += f"\n  {self.module.files.get(instr.loc.file, 'source')} line {instr.loc.line}"
        return where

    def place(self, pc: int) -> str:
        return self.place_of(self.module.code[pc]) if pc < len(self.module.code) else "end of code"

    def executed(self, block_runs: Array) -> Counter[int]:
        """Thread-instructions by position, from how many threads entered each block."""
        counts: Counter[int] = Counter()
        for start, number in self.block_at.items():
            runs = int(block_runs[number])
            if runs:
                counts.update(dict.fromkeys(range(start, self.blocks[number].end), runs))
        return counts

    def opcode(self, pc: int) -> str:
        instr = self.module.code[pc]
        return ".".join((instr.name, *instr.mods))


def _entry(module: Module, name: str | None) -> Function:
    entries = [f for f in module.functions.values() if f.entry]
    if name is None and len(entries) == 1:
        return entries[0]
    for function in entries:
        if function.name == name:
            return function
    found = ", ".join(function.name for function in entries) or "none"
    if name is None:
        raise SimParseError(f"the entry has to be named (--entry), because there is not one but these: {found}")
    raise SimParseError(f"entry {name!r} is not one of these: {found}")


def _fill(dtype: np.dtype[Any]) -> tuple[np.dtype[Any], Any]:
    """Registers start with a recognisable pattern, so that a read before a write does not look like a zero."""
    pattern = bool(0) if dtype.kind == "b" else int.from_bytes(bytes([POISON] * dtype.itemsize), "little")
    return dtype, pattern


def _guard(reg: Reg, negated: bool) -> Source:
    index = reg.index
    if negated:
        return lambda m, lanes: ~m.registers[index][lanes.sel]
    return lambda m, lanes: m.registers[index][lanes.sel]


def _guarded_step(step: Step, guard: Source) -> Step:
    def run(m: Any, lanes: Lanes) -> None:
        taken, _ = m.split(lanes, guard(m, lanes))
        if taken is not None:
            step(m, taken)

    return run


def _guarded_control(control: Control, guard: Source) -> Control:
    def run(m: Any, lanes: Lanes, following: int) -> None:
        taken, rest = m.split(lanes, guard(m, lanes))
        if rest is not None:
            m.ready.push(following, rest)
        if taken is not None:
            control(m, taken, following)

    return run

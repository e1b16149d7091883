"""Operands of PTX instructions, and the names that they use."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable

from jitfp4.sim.lexer import Cursor
from jitfp4.sim.ptx import (
    Addr,
    Imm,
    Label,
    Module,
    Not,
    Operand,
    Pair,
    Reg,
    Sink,
    Special,
    Sym,
    Type,
    Variable,
    Vec,
)

_SPECIAL = re.compile(
    r"%(n?tid|n?ctaid|n?clusterid|cluster_n?ctaid)\.[xyz]|%(lane|n?warp|n?sm|grid)id|%cluster_n?ctarank"
    r"|%is_explicit_cluster|%lanemask_(eq|le|lt|ge|gt)|%clock(64|_hi)?|%globaltimer(_lo|_hi)?"
    r"|%(total|aggr|dynamic)_smem_size|WARP_SZ"
)


class Scope:
    """Names visible inside one ``{ }``: registers, variables, labels. Inline assembly opens a scope of its own."""

    def __init__(self, parent: Scope | None) -> None:
        self.parent = parent
        self.regs: dict[str, Reg] = {}
        self.ranges: dict[str, tuple[int, Type]] = {}  # %r<40> declares %r0 to %r39
        self.variables: dict[str, Variable] = {}
        self.labels: dict[str, int] = {}

    def variable(self, name: str) -> Variable | None:
        scope: Scope | None = self
        while scope is not None:
            if name in scope.variables:
                return scope.variables[name]
            scope = scope.parent
        return None

    def label(self, name: str) -> int | None:
        scope: Scope | None = self
        while scope is not None:
            if name in scope.labels:
                return scope.labels[name]
            scope = scope.parent
        return None


class Operands(Cursor):
    """Reads operands in the current scope; registers enter the module when an operand first names them."""

    def __init__(self, source: str, module: Module) -> None:
        super().__init__(source)
        self.module = module
        self.scope = Scope(None)

    def new_register(self, name: str, kind: Type) -> Reg:
        self.module.registers.append(kind)
        return Reg(name, len(self.module.registers) - 1, kind)

    def register(self, name: str) -> Reg | None:
        stem = name.rstrip("0123456789")
        scope: Scope | None = self.scope
        while scope is not None:
            if name in scope.regs:
                return scope.regs[name]
            if stem != name and stem in scope.ranges and int(name[len(stem) :]) < scope.ranges[stem][0]:
                scope.regs[name] = self.new_register(name, scope.ranges[stem][1])
                return scope.regs[name]
            scope = scope.parent
        return None

    def separated(self, close: str, item: Callable[[], Operand]) -> tuple[Operand, ...]:
        items: list[Operand] = []
        while not self.accept(close):
            items.append(item())
            if self.token.text != close:
                self.expect(",")
        return tuple(items)

    def operand(self) -> Operand:
        first = self.primary()
        if self.accept("|"):
            return Pair(first, self.primary())
        return first

    def primary(self) -> Operand:
        token = self.token
        if token.kind == "word":
            return self.name()
        if self.accept("{"):
            return Vec(self.separated("}", self.operand))
        if self.accept("("):
            return Vec(self.separated(")", self.operand))
        if self.accept("["):
            return self.address()
        if self.accept("!"):
            reg = self.primary()
            if not isinstance(reg, Reg):
                raise self.error("only a predicate can be negated", token)
            return Not(reg)
        if token.kind in ("int", "float") or token.text in ("-", "+"):
            return self.literal()
        raise self.error("unknown operand")

    def literal(self) -> Imm:
        negative = self.accept("-")
        self.accept("+")
        token = self.next()
        sign = -1 if negative else 1
        if token.kind == "int":
            return Imm(sign * int(token.text.rstrip("U"), 0))
        if token.kind != "float":
            raise self.error("expected a number", token)
        if token.text[:2] in ("0f", "0F"):
            bits = int(token.text[2:], 16) ^ (0x80000000 if negative else 0)
            return Imm(struct.unpack("<f", struct.pack("<I", bits))[0], (bits, 32))
        if token.text[:2] in ("0d", "0D"):
            bits = int(token.text[2:], 16) ^ (1 << 63 if negative else 0)
            return Imm(struct.unpack("<d", struct.pack("<Q", bits))[0], (bits, 64))
        return Imm(sign * float(token.text))

    def name(self) -> Operand:
        token = self.next()
        if token.text == "_":
            return Sink()
        reg = self.register(token.text)
        if reg is not None:
            return reg
        variable = self.scope.variable(token.text) or self.module.variables.get(token.text)
        if variable is not None:
            return Sym(variable.name, self.offset())
        if _SPECIAL.fullmatch(token.text):
            return Special(token.text)
        if token.text.startswith("%"):
            raise self.error("unknown register", token)
        return Label(token.text)

    def address(self) -> Addr:
        """``[base+offset]`` or ``[map, {x, y}]``; the bracket is open."""
        base = self.primary()
        if not isinstance(base, (Reg, Sym, Imm)):
            raise self.error("address needs a register, a variable or a number")
        offset = self.offset()
        rest: list[Operand] = []
        while self.accept(","):
            rest.append(self.operand())
        self.expect("]")
        if isinstance(base, Sym):
            base, offset = Sym(base.name), offset + base.offset
        return Addr(base, offset, tuple(rest))

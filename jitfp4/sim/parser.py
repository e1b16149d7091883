"""Parser of whole PTX modules, as NVRTC 12.9 and 13.0 write them.

A directive, instruction or operand form that is not known here raises SimParseError with its PTX line.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable

from jitfp4.errors import SimParseError
from jitfp4.sim.lexer import Token, tokenize
from jitfp4.sim.ptx import (
    TYPES,
    Addr,
    Function,
    Imm,
    Instr,
    Label,
    Loc,
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
_LINE_DIRECTIVES = frozenset((".version", ".target", ".address_size", ".file", ".loc"))
_FUNCTION_DIRECTIVES = frozenset(
    (".maxntid", ".reqntid", ".minnctapersm", ".maxnctapersm", ".maxnreg", ".noreturn", ".explicitcluster")
    + (".reqnctapercluster", ".maxclusterrank", ".blocksareclusters")
)
_LINKAGE = frozenset((".visible", ".extern", ".weak", ".common"))
_SPACES = frozenset((".global", ".const", ".shared", ".local", ".param"))


class _Scope:
    """Names visible inside one ``{ }``: registers, variables, labels. Inline assembly opens a scope of its own."""

    def __init__(self, parent: _Scope | None) -> None:
        self.parent = parent
        self.regs: dict[str, Reg] = {}
        self.ranges: dict[str, tuple[int, Type]] = {}  # %r<40> declares %r0 to %r39
        self.variables: dict[str, Variable] = {}
        self.labels: dict[str, int] = {}

    def variable(self, name: str) -> Variable | None:
        scope: _Scope | None = self
        while scope is not None:
            if name in scope.variables:
                return scope.variables[name]
            scope = scope.parent
        return None

    def label(self, name: str) -> int | None:
        scope: _Scope | None = self
        while scope is not None:
            if name in scope.labels:
                return scope.labels[name]
            scope = scope.parent
        return None


class _Parser:
    def __init__(self, source: str) -> None:
        self.source = source
        self.tokens = tokenize(source)
        self.at = 0
        self.module = Module((0, 0), "", [], {}, {}, [], {})
        self.scope = _Scope(None)
        self.loc: Loc | None = None
        self.pending: list[tuple[Instr, _Scope]] = []  # instructions whose labels are not resolved yet
        self.tables: dict[str, tuple[str, ...]] = {}  # .branchtargets lists by label
        self.function: Function | None = None
        self.unnamed = 0

    # Token access

    @property
    def token(self) -> Token:
        return self.tokens[self.at]

    def next(self) -> Token:
        token = self.tokens[self.at]
        self.at += 1
        return token

    def accept(self, text: str) -> bool:
        if self.token.text == text and self.token.kind != "end":
            self.at += 1
            return True
        return False

    def expect(self, text: str) -> Token:
        if self.token.text != text:
            raise self.error(f"expected {text!r}")
        return self.next()

    def error(self, message: str, token: Token | None = None) -> SimParseError:
        token = token or self.token
        return SimParseError(f"PTX line {token.line}: {message}, at {token.text!r}")

    def integer(self) -> int:
        sign = -1 if self.accept("-") else 1
        token = self.next()
        if token.kind != "int":
            raise self.error("expected an integer", token)
        return sign * int(token.text.rstrip("U"), 0)

    def separated(self, close: str, item: Callable[[], Operand]) -> tuple[Operand, ...]:
        items: list[Operand] = []
        while not self.accept(close):
            items.append(item())
            if self.token.text != close:
                self.expect(",")
        return tuple(items)

    # Module level

    def parse(self) -> Module:
        while self.token.kind != "end":
            text = self.token.text
            if text in _LINE_DIRECTIVES:
                self.line_directive()
            elif text in _LINKAGE:
                self.linkage()
            elif text in (".entry", ".func"):
                self.parse_function()
            elif text in _SPACES:
                self.declaration(self.module.variables, extern=False)
            elif text == ".section":
                self.debug_section()
            elif text == ".pragma":
                self.pragma()
            elif text == ".alias":
                raise self.error("aliases are not modelled")
            else:
                raise self.error("unknown directive")
        return self.module

    def linkage(self) -> None:
        extern = self.next().text == ".extern"
        if self.token.text in (".entry", ".func"):
            self.parse_function()
        else:
            self.declaration(self.module.variables, extern=extern)

    def line_directive(self) -> None:
        """A directive that ends with its line. ``.loc`` names the CUDA source of the next instructions."""
        first = self.next()
        words = []
        while self.token.line == first.line and self.token.kind != "end":
            words.append(self.next().text)
        if first.text == ".version":
            major, minor = words[0].split(".")
            self.module.version = (int(major), int(minor))
        elif first.text == ".target":
            self.module.target = words[0]
        elif first.text == ".address_size":
            if words != ["64"]:
                raise self.error("only 64-bit addresses are modelled", first)
        elif first.text == ".file":
            self.module.files[int(words[0])] = words[1].strip('"')
        else:
            self.loc = Loc(int(words[0]), int(words[1]))

    def debug_section(self) -> None:
        """``.section .debug_... { }``: data for debuggers, without an effect on execution."""
        self.next()
        name = self.next()
        if not name.text.startswith(".debug"):
            raise self.error("unknown section", name)
        self.expect("{")
        while not self.accept("}"):
            if self.next().kind == "end":
                raise self.error("section is not closed", name)

    def pragma(self) -> None:
        """Hints to ptxas (unrolling, register use): without an effect on results."""
        self.next()
        while not self.accept(";"):
            if self.token.kind != "string" and self.token.text != ",":
                raise self.error("expected a pragma string")
            self.next()

    # Variables

    def type_of(self, token: Token) -> Type:
        kind = TYPES.get(token.text.removeprefix("."))
        if kind is None:
            raise self.error("unknown type", token)
        return kind

    def declaration(self, into: dict[str, Variable], *, extern: bool) -> None:
        """``.space .align 16 .b8 name[4], other = 1;``"""
        space = self.next().text[1:]
        while True:
            variable = self.variable(space, extern=extern)
            into[variable.name] = variable
            if not self.accept(","):
                break
        self.expect(";")

    def variable(self, space: str, *, extern: bool = False) -> Variable:
        align, kind, vector = 0, None, 1
        while self.token.kind == "directive":
            token = self.next()
            if token.text == ".align":
                align = self.integer()
            elif token.text in (".v2", ".v4"):
                vector = int(token.text[2:])
            elif token.text == ".ptr":  # what a pointer parameter points to; ptxas uses it, execution does not
                if self.token.text in _SPACES:
                    self.next()
                if self.accept(".align"):
                    self.integer()
            elif token.text == ".attribute":
                raise self.error("variable attributes are not modelled", token)
            else:
                kind = self.type_of(token)
        if kind is None:
            raise self.error("variable without a type")
        name = self.next().text
        count, unsized = vector, False
        while self.accept("["):
            if self.accept("]"):
                unsized = True
                continue
            count *= self.integer()
            self.expect("]")
        init, fixups = (self.initialiser(kind) if self.accept("=") else (b"", ()))
        size = 0 if unsized else count * kind.bytes
        if unsized and init:
            size = len(init)
        natural = kind.bytes * vector
        return Variable(name, space, size, align or natural, init, fixups, extern=extern or (unsized and not init))

    def initialiser(self, kind: Type) -> tuple[bytes, tuple[tuple[int, Sym], ...]]:
        data, fixups = bytearray(), []
        depth = 0
        while True:
            if self.accept("{"):
                depth += 1
                continue
            if not (depth and self.token.text == "}"):
                value = self.constant()
                if isinstance(value, Sym):
                    fixups.append((len(data), value))
                    value = Imm(0)
                data += _encode(value, kind)
            while depth and self.accept("}"):
                depth -= 1
            if depth == 0:
                return bytes(data), tuple(fixups)
            self.accept(",")

    def constant(self) -> Imm | Sym:
        generic = self.token.text == "generic" and self.next()
        if generic:
            self.expect("(")
        operand = self.operand()
        if generic:
            self.expect(")")
        if not isinstance(operand, (Imm, Sym)):
            raise self.error("expected a constant")
        return operand

    # Functions

    def parse_function(self) -> None:
        entry = self.next().text == ".entry"
        returns = self.parameters() if self.token.text == "(" else ()
        name = self.next().text
        params = self.parameters() if self.token.text == "(" else ()
        function = Function(name, entry, params, returns)
        while self.token.text in _FUNCTION_DIRECTIVES:
            directive = self.next()
            values = []
            while self.token.line == directive.line and self.token.kind == "int":
                values.append(self.integer())
                self.accept(",")
            function.directives[directive.text[1:]] = tuple(values)
        if self.accept(";"):
            self.module.functions.setdefault(name, function)
            return
        self.module.functions[name] = function
        self.function, function.start = function, len(self.module.code)
        self.scope = _Scope(None)
        for variable in params + returns:
            self.scope.variables[variable.name] = function.variables[variable.name] = variable
        self.loc = None
        self.block()
        self.resolve()
        function.end = len(self.module.code)
        self.function = None
        self.scope = _Scope(None)

    def parameters(self) -> tuple[Variable, ...]:
        self.expect("(")
        variables: list[Variable] = []
        while not self.accept(")"):
            space = self.next().text
            if space not in (".param", ".reg"):
                raise self.error("expected .param")
            variables.append(self.variable("param"))
            self.accept(",")
        return tuple(variables)

    def block(self) -> None:
        """``{ statements }``: a function body, an inline assembly scope or a call sequence."""
        self.expect("{")
        self.scope = _Scope(self.scope)
        while not self.accept("}"):
            self.statement()
        assert self.scope.parent is not None
        self.scope = self.scope.parent

    def statement(self) -> None:
        token = self.token
        if token.text == "{":
            self.block()
        elif token.text in _LINE_DIRECTIVES:
            self.line_directive()
        elif token.text == ".pragma":
            self.pragma()
        elif token.text == ".reg":
            self.registers()
        elif token.text in _SPACES:
            self.local_variable()
        elif token.kind == "word" and self.tokens[self.at + 1].text == ":":
            self.label()
        elif token.kind == "word" or token.text == "@":
            self.instruction()
        elif token.text != ";" or not self.accept(";"):
            raise self.error("unknown directive")

    def local_variable(self) -> None:
        """A variable inside a function. Its storage name is made unique, because scopes may repeat names."""
        assert self.function is not None
        declared: dict[str, Variable] = {}
        self.declaration(declared, extern=False)
        for name, variable in declared.items():
            self.scope.variables[name] = variable
            if name in self.function.variables:
                self.unnamed += 1
                variable.name = f"{name}#{self.unnamed}"
            self.function.variables[variable.name] = variable

    def registers(self) -> None:
        self.expect(".reg")
        token = self.next()
        if token.text in (".v2", ".v4"):
            raise self.error("vector registers are not modelled", token)
        kind = self.type_of(token)
        while True:
            name = self.next().text
            if self.accept("<"):
                self.scope.ranges[name] = (self.integer(), kind)
                self.expect(">")
            else:
                self.scope.regs[name] = self.new_register(name, kind)
            if not self.accept(","):
                break
        self.expect(";")

    def new_register(self, name: str, kind: Type) -> Reg:
        self.module.registers.append(kind)
        return Reg(name, len(self.module.registers) - 1, kind)

    def register(self, name: str) -> Reg | None:
        stem = name.rstrip("0123456789")
        scope: _Scope | None = self.scope
        while scope is not None:
            if name in scope.regs:
                return scope.regs[name]
            if stem != name and stem in scope.ranges and int(name[len(stem) :]) < scope.ranges[stem][0]:
                scope.regs[name] = self.new_register(name, scope.ranges[stem][1])
                return scope.regs[name]
            scope = scope.parent
        return None

    def label(self) -> None:
        token = self.next()
        self.expect(":")
        if self.token.text == ".branchtargets":
            self.next()
            names = [self.next().text]
            while self.accept(","):
                names.append(self.next().text)
            self.expect(";")
            self.tables[token.text] = tuple(names)
        elif self.token.text in (".callprototype", ".calltargets"):
            raise self.error("indirect calls are not modelled")
        else:
            self.scope.labels[token.text] = len(self.module.code)

    # Instructions

    def instruction(self) -> None:
        first, guard, negated = self.token, None, False
        if self.accept("@"):
            negated = self.accept("!")
            guard = self.register(self.token.text)
            if guard is None:
                raise self.error("unknown predicate")
            self.next()
        opcode = self.next()
        if opcode.kind != "word":
            raise self.error("expected an instruction", opcode)
        name, *mods = opcode.text.split(".")
        operands: list[Operand] = []
        if self.token.text != ";":
            operands.append(self.operand())
            while self.accept(","):
                operands.append(self.operand())
        last = self.expect(";")
        text = " ".join(self.source[first.start : last.end].split())
        instr = Instr(name, tuple(mods), tuple(operands), guard, negated, opcode.line, text, self.loc)
        self.module.code.append(instr)
        self.pending.append((instr, self.scope))

    def operand(self) -> Operand:
        first = self.primary()
        if self.accept("|"):
            return Pair(first, self.primary())
        return first

    def primary(self) -> Operand:
        token = self.token
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
        if token.kind != "word":
            raise self.error("unknown operand")
        return self.name()

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
            offset = 0
            while self.token.text in ("+", "-"):
                self.accept("+")
                offset += self.integer()
            return Sym(variable.name, offset)
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
        offset = 0
        while self.token.text in ("+", "-"):
            self.accept("+")
            offset += self.integer()
        rest: list[Operand] = []
        while self.accept(","):
            rest.append(self.operand())
        self.expect("]")
        if isinstance(base, Sym):
            base, offset = Sym(base.name), offset + base.offset
        return Addr(base, offset, tuple(rest))

    def resolve(self) -> None:
        """Replace labels by instruction indices, in the scope of each instruction."""
        for instr, scope in self.pending:
            if instr.name not in ("bra", "brx"):
                continue
            names: tuple[str, ...] = ()
            for operand in instr.operands:
                if isinstance(operand, Label):
                    names = self.tables.get(operand.name, (operand.name,))
            targets = [scope.label(name) for name in names]
            if None in targets or not targets:
                raise SimParseError(f"PTX line {instr.line}: unknown label in {instr.text!r}")
            instr.targets = tuple(t for t in targets if t is not None)
        self.pending.clear()


def _encode(value: Imm, kind: Type) -> bytes:
    """The bytes of an initialiser's element."""
    if value.bits is not None and value.bits[1] == kind.bits:
        return value.bits[0].to_bytes(kind.bytes, "little")
    if kind.name == "f32":
        return struct.pack("<f", value.value)
    if kind.name == "f64":
        return struct.pack("<d", value.value)
    return (int(value.value) & ((1 << kind.bits) - 1)).to_bytes(kind.bytes, "little")


def parse(source: str) -> Module:
    """Parse a PTX file. Raises SimParseError naming the line of what it does not know."""
    return _Parser(source).parse()

"""Parser of whole PTX modules, as NVRTC 12.9 and 13.0 write them.

A directive, instruction or operand form that is not known here raises SimParseError with its PTX line.
"""

from __future__ import annotations

import struct

from jitfp4.errors import SimParseError
from jitfp4.sim.lexer import Token
from jitfp4.sim.operands import Operands, Scope
from jitfp4.sim.ptx import (
    TYPES,
    Function,
    Imm,
    Instr,
    Label,
    Loc,
    Module,
    Operand,
    Sym,
    Type,
    Variable,
)

_FUNCTION_DIRECTIVES = frozenset(
    (
        *(".maxntid", ".reqntid", ".minnctapersm", ".maxnctapersm", ".maxnreg", ".noreturn"),
        *(".explicitcluster", ".reqnctapercluster", ".maxclusterrank", ".blocksareclusters"),
    )
)
_LINKAGE = frozenset((".visible", ".extern", ".weak", ".common"))
_SPACES = frozenset((".global", ".const", ".shared", ".local", ".param"))


class _Parser(Operands):
    def __init__(self, source: str) -> None:
        super().__init__(source, Module((0, 0), "", [], {}, {}, [], {}))
        self.loc: Loc | None = None
        self.pending: list[tuple[Instr, Scope]] = []  # instructions whose labels are not resolved yet
        self.tables: dict[str, tuple[str, ...]] = {}  # .branchtargets lists by label
        self.variables: dict[str, Variable] = {}  # of the function being parsed

    # Module level

    def parse(self) -> Module:
        while self.token.kind != "end":
            text = self.token.text
            if self.token.kind == "line":
                self.line_directive()
            elif text in _LINKAGE:
                self.linkage()
            elif text in (".entry", ".func"):
                self.parse_function()
            elif text in _SPACES:
                self.declaration(self.module.variables, extern=False)
            elif self.token.kind == "section":
                self.next()  # data for debuggers, without an effect on execution
            elif text == ".pragma":
                self.pragma()
            elif text == ".section":
                raise self.error("unknown section, or one that is not closed")
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
        token = self.next()
        directive, *words = token.text.split()
        if directive == ".version":
            major, minor = words[0].split(".")
            self.module.version = (int(major), int(minor))
        elif directive == ".target":
            self.module.target = words[0].rstrip(",")
        elif directive == ".address_size":
            if words != ["64"]:
                raise self.error("only 64-bit addresses are modelled", token)
        elif directive == ".file":
            self.module.files[int(words[0])] = " ".join(words[1:]).strip('"')
        else:
            self.loc = Loc(int(words[0]), int(words[1]))

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
        init, fixups = self.initialiser(kind) if self.accept("=") else (b"", ())
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
        """A number, or ``symbol+8`` or ``generic(symbol)+8``."""
        if self.accept("generic"):
            self.expect("(")
            operand = self.operand()
            self.expect(")")
            if isinstance(operand, Sym):
                operand = Sym(operand.name, operand.offset + self.offset())
        else:
            operand = self.operand()
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
        self.variables, function.start = function.variables, len(self.module.code)
        self.scope = Scope(None)
        for variable in params + returns:
            self.scope.variables[variable.name] = function.variables[variable.name] = variable
        self.loc = None
        self.block()
        self.resolve()
        function.end = len(self.module.code)
        self.scope = Scope(None)

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
        outer, self.scope = self.scope, Scope(self.scope)
        while not self.accept("}"):
            self.statement()
        self.scope = outer

    def statement(self) -> None:
        token = self.token
        if token.text == "{":
            self.block()
        elif token.kind == "line":
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
        declared: dict[str, Variable] = {}
        self.declaration(declared, extern=False)
        for name, variable in declared.items():
            self.scope.variables[name] = variable
            if name in self.variables:
                variable.name = f"{name}#{len(self.variables)}"
            self.variables[variable.name] = variable

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

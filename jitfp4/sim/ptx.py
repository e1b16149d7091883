"""A parsed PTX module: types, operands, instructions, variables and functions.

Names follow the PTX ISA manual. Nothing here executes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

RAW_DTYPES: dict[int, np.dtype[Any]] = {bits: np.dtype(f"u{bits // 8}") for bits in (8, 16, 32, 64)}
"""What a register of so many bits is stored as: raw bits."""


@dataclass(frozen=True, slots=True)
class Type:
    """A fundamental or packed PTX type. ``dtype`` is the NumPy view under which arithmetic reads it."""

    name: str
    bits: int
    dtype: np.dtype[Any]

    @property
    def raw(self) -> np.dtype[Any]:
        """The storage dtype: unsigned bits, or bool for predicates."""
        return self.dtype if self.bits == 1 else RAW_DTYPES[self.bits]

    @property
    def is_float(self) -> bool:
        return self.name in ("f16", "bf16", "f32", "f64", "f16x2", "bf16x2", "f32x2")

    @property
    def is_signed(self) -> bool:
        return self.name[0] == "s"

    @property
    def bytes(self) -> int:
        return self.bits // 8


def _types() -> dict[str, Type]:
    table = [("pred", 1, "?"), ("f32", 32, "f4"), ("f64", 64, "f8")]
    for kind in "bus":
        table += [(f"{kind}{bits}", bits, f"{'i' if kind == 's' else 'u'}{bits // 8}") for bits in RAW_DTYPES]
    raw16 = ("f16", "bf16", "e4m3x2", "e5m2x2", "ue8m0x2", "e2m1x4", "e2m3x2", "e3m2x2")
    table += [(name, 16, "u2") for name in raw16]
    table += [(name, 32, "u4") for name in ("f16x2", "bf16x2", "tf32", "u16x2", "s16x2", "e4m3x4", "e5m2x4")]
    table += [("e2m1x2", 8, "u1"), ("e4m3", 8, "u1"), ("e5m2", 8, "u1"), ("f32x2", 64, "u8")]
    return {name: Type(name, bits, np.dtype(code)) for name, bits, code in table}


TYPES = _types()


@dataclass(frozen=True, slots=True)
class Loc:
    """A CUDA source position from ``.loc``."""

    file: int
    line: int


@dataclass(frozen=True, slots=True)
class Reg:
    """A virtual register; ``index`` addresses the machine's register list."""

    name: str
    index: int
    type: Type


@dataclass(frozen=True, slots=True)
class Imm:
    """A literal. ``bits`` holds the exact pattern of a ``0f``/``0d`` literal and its width."""

    value: int | float
    bits: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Special:
    """A special register such as ``%tid.x``."""

    name: str


@dataclass(frozen=True, slots=True)
class Sym:
    """The address of a variable, plus a constant."""

    name: str
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Label:
    """A branch target or function name; resolved to an instruction index by the parser."""

    name: str


@dataclass(frozen=True, slots=True)
class Vec:
    """``{a, b, ...}`` or, for calls, ``(a, b, ...)``."""

    items: tuple[Operand, ...]


@dataclass(frozen=True, slots=True)
class Addr:
    """``[base+offset]``, with tensor coordinates and further vectors in ``rest``."""

    base: Reg | Sym | Imm
    offset: int = 0
    rest: tuple[Operand, ...] = ()


@dataclass(frozen=True, slots=True)
class Not:
    """``!p``."""

    reg: Reg


@dataclass(frozen=True, slots=True)
class Pair:
    """``d|p``: a result and its predicate."""

    first: Operand
    second: Operand


@dataclass(frozen=True, slots=True)
class Sink:
    """``_``: a result that nobody reads."""


Operand = Reg | Imm | Special | Sym | Label | Vec | Addr | Not | Pair | Sink


@dataclass(slots=True)
class Variable:
    """A module, function or parameter variable. ``init`` holds bytes and (offset, symbol) address fix-ups."""

    name: str
    space: str
    size: int
    align: int
    init: bytes = b""
    fixups: tuple[tuple[int, Sym], ...] = ()
    extern: bool = False
    offset: int = 0


@dataclass(slots=True)
class Instr:
    """One instruction: ``@guard name.mods operands``."""

    name: str
    mods: tuple[str, ...]
    operands: tuple[Operand, ...]
    guard: Reg | None
    negated: bool
    line: int
    text: str
    loc: Loc | None
    targets: tuple[int, ...] = ()


@dataclass(slots=True)
class Function:
    """An entry or device function. Instruction indices are positions in the module's one code list."""

    name: str
    entry: bool
    params: tuple[Variable, ...]
    returns: tuple[Variable, ...]
    start: int = 0
    end: int = 0
    directives: dict[str, tuple[int, ...]] = field(default_factory=dict)
    variables: dict[str, Variable] = field(default_factory=dict)

    def block_directive(self, name: str) -> tuple[int, int, int] | None:
        """Three sizes of ``.maxntid`` and its relatives; what is left out is 1."""
        values = self.directives.get(name)
        return (*values, 1, 1)[:3] if values else None  # type: ignore[return-value]


@dataclass(slots=True)
class Module:
    """A whole PTX file. ``registers`` lists the type of every register that some instruction names."""

    version: tuple[int, int]
    target: str
    code: list[Instr]
    functions: dict[str, Function]
    variables: dict[str, Variable]
    registers: list[Type]
    files: dict[int, str]

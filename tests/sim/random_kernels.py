"""Random CUDA kernels of 32 threads and more, with all that they compute written out.

A statement defines one variable, named by the letter of its type and a number, and stores it: the first statement whose
stored value differs is at fault. Variables are computed from earlier ones and from the thread's own inputs.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.sim.random_forms import EXPRESSIONS, FORMS, SEQUENCES, WARP_EXPRESSIONS

Array = np.ndarray[Any, Any]

BLOCK = 256
TYPES = {  # letter: C++ type, asm constraint, cast of a 64-bit word
    "i": ("uint32", "r", "uint32(W)"),
    "l": ("uint64", "l", "W"),
    "s": ("uint16", "h", "uint16(W)"),
    "f": ("float", "f", "__uint_as_float(uint32(W))"),
    "d": ("double", "d", "__longlong_as_double((long long)W)"),
    "h": ("uint32", "r", "uint32(W)"),  # two f16
    "b": ("uint32", "r", "uint32(W)"),  # two bf16
}
INPUTS = {"i": 5, "l": 3, "s": 3, "f": 5, "d": 3, "h": 4, "b": 4}

PRELUDE = """
using uint16 = unsigned short;
using int32 = int;
__device__ __forceinline__ uint64 word(uint16 x) { return x; }
__device__ __forceinline__ uint64 word(uint32 x) { return x; }
__device__ __forceinline__ uint64 word(uint64 x) { return x; }
__device__ __forceinline__ uint64 word(float x) { return __float_as_uint(x); }
__device__ __forceinline__ uint64 word(double x) { return __double_as_longlong(x); }
__device__ __forceinline__ uint32 warp_match_all(uint32 x) {
  int same;
  return __match_all_sync(~0u, x, &same) + same;
}
__device__ __forceinline__ double settled(double x) {
  return x == x ? x : __longlong_as_double(0xFFF8000000000000ll);
}
// The lanes for which p holds exchange among themselves.
__device__ __forceinline__ uint32 among(bool p, uint32 x) {
  const uint32 members = __ballot_sync(~0u, p);
  if (!p) return members;
  const uint32 sum = __reduce_add_sync(members, x) ^ __match_any_sync(members, x & 7);
  return sum + __ballot_sync(members, x & 1) + __shfl_sync(members, x, __ffs(members) - 1);
}
"""


@dataclass(frozen=True, slots=True)
class Kernel:
    """``source`` defines kernel(in, out), uint64 [threads, inputs] and [threads, statements]; it fits prelude tests."""

    source: str
    inputs: list[str]
    statements: list[str]

    def explain(self, values: Array, gpu: Array, simulated: Array) -> str:
        """The first statement that differs, with the values that it used. Rows are threads."""
        slot = int(np.flatnonzero((gpu != simulated).any(axis=0))[0])
        threads = np.flatnonzero(gpu[:, slot] != simulated[:, slot])
        first, statement = threads[0], self.statements[slot]
        known = dict(zip(self.inputs, values[first].tolist(), strict=True))
        known |= zip((_defined(s) for s in self.statements[:slot]), gpu[first].tolist(), strict=False)
        used = {name: hex(known[name]) for name in re.findall(r"\b[a-z]\d+\b", statement) if name in known}
        return (
            f"{len(threads)} threads differ at {statement}\n"
            f"thread {first}: GPU {gpu[first, slot]:#x}, simulator {simulated[first, slot]:#x}, {used}"
        )


def _defined(statement: str) -> str:
    return statement.split()[1].rstrip(";")


def write(seed: int, kernels: int, statements: int = 48) -> Kernel:
    """Kernel ``seed`` of ``kernels``, which together contain every form of every instruction."""
    writer = _Writer(random.Random(seed))
    own = FORMS[seed % kernels :: kernels]
    plain = [*own, *SEQUENCES, *EXPRESSIONS]
    kinds = [writer.branch, writer.loop, writer.exchange, writer.warp]
    todo = [lambda form=form: writer.plain(form) for form in own]
    while len(todo) < statements:
        kind = writer.rng.choice([*kinds, None])
        todo.append(kind or (lambda: writer.plain(writer.rng.choice(plain))))
    writer.rng.shuffle(todo)
    for statement in todo:
        statement()
    return writer.kernel()


class _Writer:
    """Writes one kernel, statement by statement."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.names = {letter: [f"{letter}{n}" for n in range(count)] for letter, count in INPUTS.items()}
        self.inputs = [name for names in self.names.values() for name in names]
        self.statements: list[str] = []
        self.used: set[str] = set()

    def plain(self, form: str) -> None:
        letter = form[0]
        name = self.new(letter)
        self.done(letter, name, f"{TYPES[letter][0]} {name}; {self.assign(name, form)}")

    def branch(self) -> None:
        """Two sides of a condition that few warps agree on, one of them nested."""
        letter = self.rng.choice("ilsfdhb")
        name, start = self.new(letter), self.operand(letter)
        once, other, third = (self.assign(name, self.form(letter), name) for _ in range(3))
        body = f"if ({self.condition()}) {{ {once} if ({self.condition()}) {{ {other} }} }} else {{ {third} }}"
        self.done(letter, name, f"{TYPES[letter][0]} {name} = {start}; {body}")

    def loop(self) -> None:
        """Each thread goes round its own number of times, some leave early."""
        letter = self.rng.choice("ilsfdhb")
        name, start, trips = self.new(letter), self.operand(letter), self.operand("i")
        body = f"{self.assign(name, self.form(letter), name)} if ({self.condition()} && n > 2) break;"
        self.done(
            letter, name, f"{TYPES[letter][0]} {name} = {start}; for (int n = 0; n < ({trips} & 7); ++n) {{ {body} }}"
        )

    def exchange(self) -> None:
        """Through shared memory, or a sum that all threads of the CTA add to."""
        letter = self.rng.choice("ilsfdhb")
        name, value = self.new(letter), self.operand(letter)
        if self.rng.random() < 0.3:
            operation = self.rng.choice(("atomicAdd", "atomicMax", "atomicXor"))
            before = f"{operation}(&cells[threadIdx.x % 3], word({value}));"
            read, before = "cells[threadIdx.x % 5]", f"cells[threadIdx.x] = threadIdx.x; __syncthreads(); {before}"
        else:
            before, read = f"cells[threadIdx.x] = word({value});", f"cells[(threadIdx.x * 5 + 7) % {BLOCK}]"
        read = TYPES[letter][2].replace("W", read)
        text = f"{TYPES[letter][0]} {name}; {before} __syncthreads(); {name} = {read}; __syncthreads();"
        self.done(letter, name, text)

    def warp(self) -> None:
        self.plain(self.rng.choice(WARP_EXPRESSIONS))

    def assign(self, name: str, form: str, also: str | None = None) -> str:
        """``name`` becomes the result of a form; ``also`` may be an operand, too. No operand is used twice: ptxas knows
        that min(x, x) is x, even for a NaN that the instruction would replace.
        """
        self.used.clear()
        if form[2] == "=":
            return re.sub(r"\b[ilsfdhb]\b", lambda found: self.operand(found[0], also), f"{name} {form[2:]};")
        head, _, operands = form[2:].partition(" ") if form[2] != "{" else form[2:].rpartition("} ")
        operands = [self.asm_operand(kind, also) for kind in operands.split()]
        numbers = "".join(f", %{n + 1}" for n in range(len(operands)))
        text = head + "}" if form[2] == "{" else f"{head} %0{numbers};"
        return f'asm("{text}" : "={TYPES[form[0]][1]}"({name}) : {", ".join(operands)});'

    def asm_operand(self, kind: str, also: str | None) -> str:
        if kind[0] == "#":
            return f'"n"({self.rng.getrandbits(int(kind[1:]))})'
        if kind == "c":
            return f'"r"({self.operand("i")} & 255)'
        return f'"{TYPES[kind][1]}"({self.operand(kind, also)})'

    def operand(self, letter: str, also: str | None = None) -> str:
        """A variable of a type; half of the time an input, so that values stay interesting."""
        free = [name for name in self.names[letter] if name not in self.used]
        chosen = self.rng.choice(free[:2] if self.rng.random() < 0.4 else free)
        if also is not None and also[0] == letter and also not in self.used and self.rng.random() < 0.6:
            chosen = also
        self.used.add(chosen)
        return chosen

    def form(self, letter: str) -> str:
        known = self.rng.choice((FORMS, EXPRESSIONS))
        return self.rng.choice([form for form in known if form[0] == letter] or [f"{letter} = {letter}"])

    def condition(self) -> str:
        self.used.clear()
        text = self.rng.choice(("i & 1", "int32(i) < int32(i)", "f < f", "!(f <= f)", "l > l", "d >= d", "f != f"))
        return re.sub(r"\b[ilfd]\b", lambda found: self.operand(found[0]), text)

    def new(self, letter: str) -> str:
        return f"{letter}{len(self.inputs) + len(self.statements)}"

    def done(self, letter: str, name: str, text: str) -> None:
        self.names[letter].append(name)
        self.statements.append(text)

    def kernel(self) -> Kernel:
        loads = [
            f"{TYPES[name[0]][0]} {name} = {TYPES[name[0]][2].replace('W', f'in[{n}]')};"
            for n, name in enumerate(self.inputs)
        ]
        stores = [f"{text} {_store(n, _defined(text), _compound(text))}" for n, text in enumerate(self.statements)]
        body = "\n  ".join([*loads, *stores])
        source = f"""{PRELUDE}
extern "C" __global__ void kernel(const uint64* in, uint64* out) {{
  __shared__ uint64 cells[{BLOCK}];
  const uint32 thread = blockIdx.x * blockDim.x + threadIdx.x;
  in += thread * {len(self.inputs)};
  out += thread * {len(self.statements)};
  {body}
}}
"""
        return Kernel(source, self.inputs, self.statements)


def _compound(text: str) -> bool:
    return "{" in text or "asm" not in text


def _store(slot: int, name: str, compound: bool) -> str:
    """Of two f64 NaNs, ptxas decides which one is handed on: only single instructions show theirs."""
    settle = f"{name} = settled({name});" if name[0] == "d" else ""
    store = f"out[{slot}] = word({name});"
    return f"{settle} {store}" if compound else f"{store} {settle}"


# Bit patterns at which operations change their ways: zeros, units, halves, limits, subnormals, infinities, NaNs.
_SPECIAL = {
    "i": [0, 1, 2, 31, 32, 33, 63, 64, 255, 256, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0x80000001,
          0xFFFFFFFF, 0xFFFFFFFE, 0x7FFF8000, 0x80008000, 0x00FF00FF, 0x80808080, 0x7F7F7F7F],
    "l": [0, 1, 63, 64, 65, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, (1 << 63) - 1, 1 << 63, (1 << 64) - 1,
          (1 << 53) + 1, (1 << 24) + 1, 0x5555555555555555, (1 << 64) - (1 << 31), (1 << 64) - (1 << 31) - 1],
    "s": [0, 0x8000, 1, 0x8001, 0x3FF, 0x400, 0x3C00, 0xBC00, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7E00, 0xFE01, 0x7C01,
          0x7FFF, 0xFFFF, 0x3800, 0x3E00, 0x3F80, 0xBF80, 0x7F7F, 0x7F80, 0xFF80, 0x7FC0, 0x80, 0x7F, 0x7E7E, 0x8080],
    "f": [0, 0x80000000, 1, 0x80000001, 0x7FFFFF, 0x800000, 0x807FFFFF, 0x80800000, 0x3F800000, 0xBF800000, 0x3F000000,
          0x3FC00000, 0xC0200000, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00001, 0x7F800001,
          0x7FFFFFFF, 0x4F000000, 0xCF000000, 0x4EFFFFFF, 0x4F800000, 0x5F000000, 0xDF000000, 0x43E00000, 0x43E80000,
          0x477FE000, 0x477FF000, 0x47600000, 0x3EFFFFFF, 0x4B000000, 0x4B800000, 0x33000000, 0x387FE000, 0x42FE0000],
    "d": [0, 1 << 63, 1, (1 << 52) - 1, 1 << 52, 0x3FF0000000000000, 0xBFE0000000000000, 0x7FEFFFFFFFFFFFFF,
          0x7FF0000000000000, 0xFFF0000000000000, 0xFFF8000000000000,
          0x41E0000000000000, 0xC1E0000000200000, 0x43E0000000000000, 0x47EFFFFFE0000000, 0x47EFFFFFF0000000,
          0x3810000000000000, 0x3800000000000001, 0x3690000000000000, 0x3FF0000010000000, 0x40EFFC0000000000],
}  # fmt: skip


def inputs(seed: int, names: list[str], threads: int) -> Array:
    """uint64 [threads, names]: a third special values, a third any bits, a third moderate numbers."""
    rng = np.random.default_rng(seed)
    columns = [_column(rng, name[0], threads) for name in names]
    return np.ascontiguousarray(np.stack(columns, axis=1))


def _column(rng: np.random.Generator, letter: str, n: int) -> Array:
    if letter in "hb":
        low, high = (_column(rng, "s", n) for _ in range(2))
        moderate = _moderate(rng, letter, n) | _moderate(rng, letter, n) << np.uint64(16)
        return np.where(rng.random(n) < 0.5, low | high << np.uint64(16), moderate)
    bits = {"i": 32, "f": 32, "s": 16}.get(letter, 64)
    special = rng.choice(np.array(_SPECIAL[letter], np.uint64), n)
    anything = rng.integers(0, 1 << 64, n, np.uint64) >> np.uint64(64 - bits)
    return np.choose(rng.integers(0, 3, n), [special, anything, _moderate(rng, letter, n)])


def _moderate(rng: np.random.Generator, letter: str, n: int) -> Array:
    x = np.round(rng.standard_normal(n) * 2.0 ** rng.integers(-6, 7, n), 3)
    if letter in "il":
        return np.abs(x * 16).astype(np.uint64)
    if letter == "d":
        return x.view(np.uint64)
    if letter == "f":
        return x.astype(np.float32).view(np.uint32).astype(np.uint64)
    if letter == "b":
        return (x.astype(np.float32).view(np.uint32) >> np.uint32(16)).astype(np.uint64)
    return x.astype(np.float16).view(np.uint16).astype(np.uint64)

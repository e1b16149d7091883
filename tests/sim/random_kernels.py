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

# Result, instruction and operands; {a,b} stands for each alternative, #n for a random n-bit immediate, c for an i below
# 256: what positions and lengths are restricted to.
INSTRUCTIONS = """
i {add,sub,min,max,div,rem}.{s32,u32} i i
i {add,sub}.sat.s32 i i
i {min,max}.relu.s32 i i
i mul.{lo,hi}.{s32,u32} i i
i mad.{lo,hi}.{s32,u32} i i i
i mad.hi.sat.s32 i i i
i mul24.{lo,hi}.{s32,u32} i i
i mad24.{lo,hi}.{s32,u32} i i i
i sad.{s32,u32} i i i
i {abs,neg}.s32 i
l {add,sub,min,max,div,rem}.{s64,u64} l l
l mul.{lo,hi}.{s64,u64} l l
l mad.{lo,hi}.{s64,u64} l l l
l mul.wide.{s32,u32} i i
l mad.wide.{s32,u32} i i l
l sad.{s64,u64} l l l
l {abs,neg}.s64 l
s {add,sub,min,max,mul.lo,mul.hi,div,rem}.{s16,u16} s s
s mad.{lo,hi}.{s16,u16} s s s
i mul.wide.{s16,u16} s s
i {add,min,max}.{s16x2,u16x2} i i
i {min,max}.relu.s16x2 i i
i {and,or,xor}.b32 i i
l {and,or,xor}.b64 l l
i {not,cnot}.b32 i
i lop3.b32 i i i #8
i {shl.b32,shr.s32,shr.u32} i i
l {shl.b64,shr.s64,shr.u64} l i
s {shl.b16,shr.s16,shr.u16} s i
i shf.{l,r}.{clamp,wrap}.b32 i i i
i bfe.{s32,u32} i i i
i bfe.{s32,u32} i #5 #5
l bfe.{s64,u64} l c c
l bfe.{s64,u64} l #6 #6
i bfi.b32 i i i i
i bfi.b32 i i #5 #5
l bfi.b64 l l c c
l bfi.b64 l l #6 #6
i bmsk.{clamp,wrap}.b32 i i
i szext.{clamp,wrap}.{s32,u32} i i
i {popc,clz,brev}.b32 i
i {popc,clz}.b64 l
l brev.b64 l
i bfind{,.shiftamt}.{s32,u32} i
i bfind{,.shiftamt}.{s64,u64} l
i fns.b32 i #5 #2
i prmt.b32{,.f4e,.b4e,.rc8,.ecl,.ecr,.rc16} i i i
i dp4a.{s32,u32}.{s32,u32} i i i
i dp2a.{lo,hi}.{s32,u32}.{s32,u32} i i i
i v{add,sub,avrg,absdiff,min,max}{2,4}.{s32,u32}.{s32,u32}.{s32,u32}{,.sat,.add} i i i
i vset{2,4}.{s32,u32}.{s32,u32}.{eq,ne,lt,le,gt,ge}{,.add} i i i
f {add,sub,mul}.{rn,rz,rm,rp}{,.ftz}{,.sat}.f32 f f
f fma.{rn,rz,rm,rp}{,.ftz}{,.sat}.f32 f f f
f div.{rn,rz,rm,rp}{,.ftz}.f32 f f
f {sqrt,rcp}.{rn,rz,rm,rp}{,.ftz}.f32 f
f {min,max}{,.ftz}{,.NaN}{,.xorsign.abs}.f32 f f
f {abs,neg}{,.ftz}.f32 f
f copysign.f32 f f
f slct{,.ftz}.f32.f32 f f f
i slct.b32.s32 i i i
d {add,sub,mul,div}.rn.f64 d d
d fma.rn.f64 d d d
d {sqrt,rcp}.rn.f64 d
d {min,max}.f64 d d
d {abs,neg}.f64 d
d copysign.f64 d d
h {add,sub,mul}.rn{,.ftz}{,.sat}.f16x2 h h
h fma.rn{,.ftz}{,.sat,.relu}.f16x2 h h h
h {min,max}{,.ftz}{,.NaN}{,.xorsign.abs}.f16x2 h h
h {abs,neg}{,.ftz}.f16x2 h
s {add,sub,mul}.rn{,.ftz}{,.sat}.f16 s s
s fma.rn{,.ftz}{,.sat,.relu}.f16 s s s
s {min,max}{,.ftz}{,.NaN}{,.xorsign.abs}.f16 s s
b {add,sub,mul}.rn.bf16x2 b b
b fma.rn{,.relu}.bf16x2 b b b
b {min,max}{,.NaN}{,.xorsign.abs}.bf16x2 b b
b {abs,neg}.bf16x2 b
s {add,sub,mul}.rn.bf16 s s
s fma.rn{,.relu}.bf16 s s s
s {min,max}{,.NaN}{,.xorsign.abs}.bf16 s s
i set.{eq,ne,lt,le,gt,ge,equ,neu,ltu,leu,gtu,geu,num,nan}{,.ftz}.u32.f32 f f
i set.{eq,ne,lt,le,gt,ge,equ,neu,ltu,leu,gtu,geu,num,nan}.u32.f64 d d
i set.{eq,ne,lt,le,gt,ge}.u32.{s32,u32} i i
i set.{lo,ls,hi,hs}.u32.u64 l l
h set.{eq,ne,lt,le,gt,ge,equ,neu,ltu,leu,gtu,geu,num,nan}{,.ftz}.f16x2.f16x2 h h
b set.{eq,ne,lt,le,gt,ge,equ,neu,ltu,leu,gtu,geu,num,nan}.bf16x2.bf16x2 b b
i cvt.{rni,rzi,rmi,rpi}{,.ftz}.{s32,u32}.f32 f
l cvt.{rni,rzi,rmi,rpi}{,.ftz}.{s64,u64}.f32 f
s cvt.{rni,rzi,rmi,rpi}{,.ftz}.{s16,u16}.f32 f
i cvt.{rni,rzi,rmi,rpi}.{s8,u8}.f32 f
i cvt.{rni,rzi,rmi,rpi}.{s32,u32}.f64 d
l cvt.{rni,rzi,rmi,rpi}.{s64,u64}.f64 d
i cvt.{rni,rzi,rmi,rpi}.{s32,u32}.{f16,bf16} s
s cvt.{rni,rzi,rmi,rpi}.{s16,u16}.{f16,bf16} s
l cvt.{rni,rzi,rmi,rpi}.{s64,u64}.{f16,bf16} s
f cvt.{rn,rz,rm,rp}.f32.{s32,u32} i
f cvt.rn.f32.{s64,u64} l
f cvt.rn.f32.{s16,u16} s
f cvt.rn.f32.{s8,u8} i
d cvt.rn.f64.{s32,u32} i
d cvt.rn.f64.{s64,u64} l
s cvt.{rn,rz,rm,rp}.{f16,bf16}.{s32,u32} i
s cvt.rn.{f16,bf16}.{s64,u64} l
s cvt.rn.{f16,bf16}.{s16,u16} s
s cvt.{rn,rz}.f16.f32 f
s cvt.{rn,rz}{,.relu}{,.satfinite}.f16.f32 f
s cvt.{rn,rz}{,.relu}{,.satfinite}.bf16.f32 f
s cvt.rn.{f16,bf16}.f64 d
f cvt{,.ftz}{,.sat}.f32.f16 s
f cvt.f32.bf16 s
d cvt.f64.{f16,bf16} s
f cvt.{rn,rz,rm,rp}{,.ftz}.f32.f64 d
d cvt{,.ftz}.f64.f32 f
f cvt.{rni,rzi,rmi,rpi}{,.ftz}{,.sat}.f32.f32 f
d cvt.{rni,rzi,rmi,rpi}.f64.f64 d
s cvt.{rni,rzi,rmi,rpi}.f16.f16 s
h cvt.{rn,rz}{,.relu}{,.satfinite}.f16x2.f32 f f
b cvt.{rn,rz}{,.relu}{,.satfinite}.bf16x2.f32 f f
s cvt.rn.satfinite{,.relu}.{e4m3x2,e5m2x2}.f32 f f
s cvt.rn.satfinite{,.relu}.{e4m3x2,e5m2x2}.f16x2 h
h cvt.rn{,.relu}.f16x2.{e4m3x2,e5m2x2} s
i cvt.rna.tf32.f32 f
i cvt.{rn,rz}{,.relu}.tf32.f32 f
i cvt.pack.sat.{s16,u16}.s32 i i
i cvt.pack.sat.{s8,u8}.s32.b32 i i i
i cvt{,.sat}.{s8,u8,s16,u16}.{s32,u32} i
i cvt{,.sat}.{s32,u32}.{s64,u64} l
i cvt.{s32,u32}.{s16,u16} s
l cvt.{s64,u64}.{s32,u32} i
l cvt.sat.u64.s32 i
i cvt.sat.{s32.u32,u32.s32} i
"""

SEQUENCES = """
l {.reg .u32 lo, hi; add.cc.u32 lo, %1, %2; addc.u32 hi, %3, %4; mov.b64 %0, {lo, hi};} i i i i
l {.reg .u32 lo, hi; sub.cc.u32 lo, %1, %2; subc.u32 hi, %3, %4; mov.b64 %0, {lo, hi};} i i i i
l {.reg .u32 lo, hi; mad.lo.cc.u32 lo, %1, %2, %3; madc.hi.u32 hi, %1, %2, %4; mov.b64 %0, {lo, hi};} i i i i
i {.reg .pred p; testp.subnormal.f32 p, %1; selp.u32 %0, %2, %3, p;} f i i
i {.reg .pred p; testp.normal.f32 p, %1; selp.u32 %0, %2, %3, p;} f i i
i {.reg .pred p; testp.normal.f64 p, %1; selp.u32 %0, %2, %3, p;} d i i
i {.reg .pred p, q; setp.leu.and.f32 p|q, %1, %2, 1; selp.u32 %0, %3, %4, p; @q add.u32 %0, %0, 1;} f f i i
i {.reg .b16 lo, hi; mov.b32 {lo, hi}, %1; mov.b32 %0, {hi, lo};} i
""".strip().splitlines()

EXPRESSIONS = """
i = i + i * i
i = i / (i | 1)
i = i % (i | 1)
i = uint32(int32(i) / int32(i & 0xffff | 1))
i = uint32(int32(i) >> (i & 31)) ^ i
i = i < i ? i : i
i = int32(i) < int32(i) ? i : i
i = (i & i) | (~i & i)
i = __byte_perm(i, i, i)
i = __funnelshift_l(i, i, i)
i = __funnelshift_rc(i, i, i)
i = __vadd2(i, i)
i = __vsub4(i, i)
i = __vmins2(i, i)
i = __vmaxu4(i, i)
i = __vabsdiffu4(i, i)
i = __vavgs2(i, i)
i = __vcmpgtu4(i, i)
i = __vsetles2(i, i)
i = __vaddss2(i, i)
i = __vaddus4(i, i)
i = __vsads4(i, i)
i = __viaddmin_s16x2(i, i, i)
i = __viaddmax_s16x2_relu(i, i, i)
i = __viaddmin_u16x2(i, i, i)
i = __viaddmax_s32_relu(i, i, i)
i = __vimax3_s16x2_relu(i, i, i)
i = __vimin3_u16x2(i, i, i)
i = __vimax3_s32(i, i, i)
i = __dp4a(i, i, i)
i = __dp2a_hi(int32(i), int32(i), int32(i))
i = __brev(i)
i = __ffs(i)
i = __popc(i) + __clz(i)
i = __ffsll(l) + __popcll(l) + __clzll(l)
i = __sad(i, i, i)
i = __rhadd(i, i)
i = __umulhi(i, i)
i = __float2int_rn(f)
i = __float2uint_ru(f)
i = __double2int_rd(d)
i = f < f ? i : i
i = !(f >= f) ? i : i
i = isnan(f) ? i : i + signbit(f)
l = l + l * l
l = l / (l | 1)
l = l % (uint64(i) | 1)
l = l >> (i & 63)
l = uint64(i) * i + l
l = __umul64hi(l, l)
l = __float2ll_rz(f)
l = __double2ull_rn(d)
f = f * f + f
f = (f - f) * f
f = f / f
f = 1.0f / f
f = sqrtf(f)
f = fmaf(f, f, f)
f = fminf(f, fmaxf(f, f))
f = truncf(f) + floorf(f)
f = ceilf(f) - rintf(f)
f = roundf(f)
f = nextafterf(f, f)
f = ldexpf(f, int32(i & 63) - 32)
f = copysignf(f, f) + fabsf(f)
f = __fadd_rz(f, f)
f = __fmul_rd(f, f)
f = __fdiv_ru(f, f)
f = __fmaf_rz(f, f, f)
f = __frcp_rn(f)
f = __frsqrt_rn(fabsf(f))
f = float(int32(i))
f = float(l)
f = float(d)
f = i < i ? f : f
d = d * d + d
d = d / d
d = sqrt(d)
d = fma(d, d, d)
d = double(f)
d = double((long long)l)
s = uint16(i) + s
""".strip().splitlines()

WARP_EXPRESSIONS = """
i = __shfl_sync(~0u, i, i)
i = __shfl_sync(~0u, i, i, 8)
f = __shfl_xor_sync(~0u, f, i & 31)
i = __shfl_up_sync(~0u, i, i & 31)
l = __shfl_down_sync(~0u, l, i & 31)
i = __shfl_down_sync(~0u, i, 3, 16)
i = __shfl_up_sync(~0u, i, 5, 16)
h = __shfl_xor_sync(~0u, h, 24)
i = __ballot_sync(~0u, f < f)
i = __any_sync(~0u, i < 9) + 2 * __all_sync(~0u, i > 9)
i = __reduce_add_sync(~0u, i)
i = uint32(__reduce_min_sync(~0u, int32(i)))
i = __reduce_max_sync(~0u, i)
i = __reduce_and_sync(~0u, i) + __reduce_or_sync(~0u, i) + __reduce_xor_sync(~0u, i)
i = __match_any_sync(~0u, i & 3)
i = __match_any_sync(~0u, l & 1)
i = warp_match_all(i & 1)
i = among(i < i, i)
i = among(f < f, i)
""".strip().splitlines()


def expand(text: str) -> list[str]:
    """The alternatives of ``{a,b}``, innermost first."""
    match = re.search(r"\{([^{}]*)\}", text)
    if match is None:
        return [text]
    return [
        form
        for alternative in match[1].split(",")
        for form in expand(text[: match.start()] + alternative + text[match.end() :])
    ]


FORMS = sorted({form for line in INSTRUCTIONS.strip().splitlines() for form in expand(line)})


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
        stores = [f"{text} {_store(n, _defined(text), '{' in text)}" for n, text in enumerate(self.statements)]
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

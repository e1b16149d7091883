"""What random kernels compute: the type of a result, how it comes about, and the types of the operands.

Types are letters: i 32 bits, l 64 bits, s 16 bits, f float32, d float64, h two f16, b two bf16.
"""

from __future__ import annotations

import re

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

"""add, sub, mul, ...: one mnemonic for every type. Sends each to the module of its type."""

from __future__ import annotations

from jitfp4.sim.decode import Decode, Step, step
from jitfp4.sim.ops import approx, floating, half, integer, simd
from jitfp4.sim.ptx import TYPES

_HALF = ("f16", "bf16", "f16x2", "bf16x2")


@step("add", "sub", "mul", "mad", "fma", "div", "rem", "min", "max", "abs", "neg", "sqrt", "rcp")
def _arithmetic(d: Decode) -> Step:
    op = d.instr.name
    if op in ("div", "sqrt", "rcp") and ("approx" in d.mods or "full" in d.mods):
        return approx.build(d, op)
    kind = d.type()
    if kind.name == "f32" and any(mod in _HALF for mod in d.mods):
        return half.build_mixed(d, op, d.type())
    if kind.name in _HALF:
        return half.build(d, op, kind)
    if kind.name in ("s16x2", "u16x2"):
        return simd.build(d, op, kind)
    if kind.is_float:
        return floating.build(d, op, kind)
    if kind.name not in TYPES or kind.name[0] not in "us":
        raise d.error(f"{op} has no type .{kind.name}")
    return integer.build(d, op, kind)

"""cvt: between integers, f16, bf16, f32, f64 and the packed 8-, 6- and 4-bit formats."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np

from jitfp4.sim import formats
from jitfp4.sim import rounding as exact
from jitfp4.sim.decode import Decode, Step, broadcast, step
from jitfp4.sim.ops.half import halves, widen
from jitfp4.sim.ptx import TYPES, Array, Type

_FLOAT = ("rn", "rz", "rm", "rp", "rna", "rs")
_INTEGER: dict[str, Callable[[Any], Any]] = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
_HALF = ("f16", "bf16")

F32 = TYPES["f32"]

# Pairs of narrow floats in one register: bits of one element, encoder and decoder.
_PAIRS: dict[str, tuple[int, Callable[..., Array], Callable[[Array], Array]]] = {
    "e4m3x2": (8, formats.f32_to_e4m3, formats.e4m3_to_f32),
    "e5m2x2": (8, formats.f32_to_e5m2, formats.e5m2_to_f32),
    "e2m3x2": (8, formats.f32_to_e2m3, formats.e2m3_to_f32),
    "e3m2x2": (8, formats.f32_to_e3m2, formats.e3m2_to_f32),
    "e2m1x2": (4, formats.f32_to_e2m1, formats.e2m1_to_f32),
}


@step("cvt")
def _cvt(d: Decode) -> Step:
    if d.flag("pack"):
        return _pack_integers(d)
    rounding, integral = d.take(*_FLOAT), d.take(*_INTEGER)
    ftz, sat = d.flag("ftz"), d.flag("sat")
    satfinite, relu = d.flag("satfinite"), d.flag("relu")
    out, source = d.type(), d.type()
    if rounding == "rs":
        raise d.error("stochastic rounding is not modelled")
    if out.name in _PAIRS or out.name == "ue8m0x2":
        return _to_narrow_pair(d, out, source, rounding, satfinite, relu)
    if source.name in _PAIRS or source.name == "ue8m0x2":
        return _from_narrow_pair(d, out, source, rounding, relu)
    if out.name in ("f16x2", "bf16x2"):
        return _to_half_pair(d, out, source, rounding, relu, satfinite)
    if out.name == "tf32":
        dst, read = d.dst(TYPES["b32"]), d.src(F32)
        mode = rounding or "rn"
        return lambda m, lanes: dst(
            m, lanes, formats.f32_to_tf32(np.asarray(read(m, lanes)), mode, relu=relu, satfinite=satfinite)
        )
    if out.is_float:
        return _to_float(d, out, source, rounding, integral, ftz=ftz, sat=sat, relu=relu, satfinite=satfinite)
    if relu or satfinite:
        raise d.error(f"cvt to .{out.name} has no .relu and no .satfinite")
    if source.is_float:
        return _float_to_integer(d, out, source, integral, ftz)
    return _between_integers(d, out, source, sat)


def _between_integers(d: Decode, out: Type, source: Type, sat: bool) -> Step:
    """Truncate or extend; ``.sat`` clamps to the destination's range."""
    dst, read = d.dst(out, wide=True), d.src(source, wide=True)
    if not sat:
        return lambda m, lanes: dst(m, lanes, read(m, lanes).astype(out.dtype))
    limits, own = np.iinfo(out.dtype), np.iinfo(source.dtype)
    low, high = (source.dtype.type(v) for v in (max(limits.min, own.min), min(limits.max, own.max)))
    return lambda m, lanes: dst(m, lanes, np.clip(read(m, lanes), low, high).astype(out.dtype))


def _widened(source: Type, given: Array, ftz: bool) -> Array:
    """A float operand as float32, or float64 for f64; integers as they are."""
    if source.name in _HALF:
        return widen(source.name, given)
    return exact.flush_f32(given) if ftz and source.name == "f32" else given


def _float_to_integer(d: Decode, out: Type, source: Type, integral: str | None, ftz: bool) -> Step:
    """Round to an integer and clamp. NaN is 0, or the sign bit alone where f64 or a 64-bit integer takes part."""
    if integral is None:
        raise d.error("float to integer needs .rni, .rzi, .rmi or .rpi")
    dst, read = d.dst(out, wide=True), d.src(TYPES["b16"] if source.name in _HALF else source, wide=True)
    limits, rnd = np.iinfo(out.dtype), _INTEGER[integral]
    wide = source.name == "f64" or out.bits == 64
    nan = out.raw.type(1 << (out.bits - 1) if wide else 0).view(out.dtype)
    top = np.float64(limits.max + 1)

    def run(m: Any, lanes: Any) -> None:
        x = rnd(_widened(source, np.asarray(read(m, lanes)), ftz).astype(np.float64))
        inside = (x >= limits.min) & (x < top)
        value = np.where(inside, x, 0.0).astype(out.dtype)
        value = np.where(x >= top, out.dtype.type(limits.max), value)
        value = np.where(x < limits.min, out.dtype.type(limits.min), value)
        dst(m, lanes, np.where(np.isnan(x), nan, value))

    return run


def _to_float(
    d: Decode,
    out: Type,
    source: Type,
    rounding: str | None,
    integral: str | None,
    *,
    ftz: bool,
    sat: bool,
    **clamp: bool,
) -> Step:
    """To f16, bf16, f32 or f64, from a float or an integer."""
    half = out.name in _HALF
    dst = d.dst(TYPES["b16"] if half else out, wide=half)
    read = d.src(TYPES["b16"] if source.name in _HALF else source, wide=True)
    keeps_nan = source.is_float and ("f64" in (out.name, source.name) or (source.name, out.name) == ("bf16", "f32"))
    mode = rounding or "rn"
    if source.bits == 64 and not source.is_float and mode != "rn" and out.name != "f64":
        raise d.error("directed rounding from 64-bit integers is not modelled")

    def run(m: Any, lanes: Any) -> None:
        given = np.asarray(read(m, lanes))
        x = _widened(source, given, ftz)
        if integral is not None:
            x = _INTEGER[integral](x)
        if sat:
            x = exact.saturate(x)
        if half:
            encode = formats.f32_to_bf16 if out.name == "bf16" else formats.f32_to_f16
            y = encode(x if x.dtype.kind == "f" else x.astype(np.float64), mode, **clamp)
        else:
            y = _narrowed(x, out, mode)
            if clamp["relu"]:
                y = np.where((y > 0) | (y != y), y, out.dtype.type(0))
            y = exact.canonical(y)
            y = exact.flush_f32(y) if ftz and out.name == "f32" else y
        if keeps_nan and (bad := x != x).any():
            bits = exact.canonical(given) if ftz and source.name == "f32" else given
            y = np.where(bad, _kept_nan(bits.view(f"u{bits.dtype.itemsize}"), source, out).view(y.dtype), y)
        dst(m, lanes, y)

    return run


_MANTISSA = {"f16": 10, "bf16": 7, "f32": 23, "f64": 52}


def _kept_nan(bits: Array, source: Type, out: Type) -> Array:
    """A NaN with its sign and as much of its payload as fits; quiet, except that bf16 to f32 is a mere shift."""
    fraction = np.uint64((1 << 52) - 1)
    payload = bits.astype(np.uint64) << np.uint64(52 - _MANTISSA[source.name]) & fraction
    if "f64" in (source.name, out.name):
        payload |= exact.F64_QUIET
    sign = bits.astype(np.uint64) >> np.uint64(source.bits - 1) << np.uint64(out.bits - 1)
    exponent = np.uint64((1 << (out.bits - 1)) - (1 << _MANTISSA[out.name]))
    return np.asarray((sign | exponent | payload >> np.uint64(52 - _MANTISSA[out.name])).astype(f"u{out.bytes}"))


def _narrowed(x: Array, out: Type, mode: str) -> Array:
    """``x`` as float32 or float64 with one rounding; always a new array."""
    if out.name == "f64" or mode == "rn" or x.dtype == np.float32:
        return x.astype(out.dtype)
    return formats.f64_to_f32(x.astype(np.float64), mode)


def _to_half_pair(d: Decode, out: Type, source: Type, rounding: str | None, relu: bool, satfinite: bool) -> Step:
    """``cvt.rn.f16x2.f32 d, a, b``: a goes to the upper half."""
    if source.name != "f32" or rounding not in ("rn", "rz"):
        raise d.error(f"cvt to .{out.name} takes .f32 with .rn or .rz")
    encode = formats.f32_to_bf16 if out.name == "bf16x2" else formats.f32_to_f16
    dst, a, b = d.dst(TYPES["b32"]), d.src(F32), d.src(F32)

    def run(m: Any, lanes: Any) -> None:
        pair = np.stack([broadcast(s(m, lanes), lanes.n) for s in (b, a)], axis=1)
        bits = encode(pair, rounding, relu=relu, satfinite=satfinite)
        dst(m, lanes, np.ascontiguousarray(bits).view(np.uint32).reshape(lanes.n))

    return run


def _to_narrow_pair(d: Decode, out: Type, source: Type, rounding: str | None, satfinite: bool, relu: bool) -> Step:
    """Two elements, ``a`` or the upper half above ``b`` or the lower half."""
    scale = out.name == "ue8m0x2"
    if not scale and (rounding != "rn" or not satfinite):
        raise d.error(f"cvt to .{out.name} needs .rn.satfinite")
    if scale and rounding not in ("rz", "rp"):
        raise d.error("cvt to .ue8m0x2 needs .rz or .rp")
    if source.name not in ("f32", "f16x2", "bf16x2"):
        raise d.error(f"cvt to .{out.name} from .{source.name} is not in the manual")
    dst = d.dst(TYPES["b8" if out.name == "e2m1x2" else "b16"], wide=True)
    packed = source.name != "f32"
    reads = [d.src(TYPES["b32"])] if packed else [d.src(F32), d.src(F32)]

    def encode(x: Array) -> Array:
        if scale:
            return formats.f32_to_ue8m0(x, str(rounding), satfinite=satfinite)
        return _PAIRS[out.name][1](x, relu=relu)

    shift = 4 if out.name == "e2m1x2" else 8
    element = np.dtype(np.uint8 if out.name == "e2m1x2" else np.uint16)

    def run(m: Any, lanes: Any) -> None:
        if packed:
            both = widen(source.name, halves(reads[0](m, lanes), lanes.n)).reshape(lanes.n, 2)
            low, high = both[:, 0], both[:, 1]
        else:
            high, low = (broadcast(r(m, lanes), lanes.n) for r in reads)
        dst(m, lanes, encode(high).astype(element) << element.type(shift) | encode(low).astype(element))

    return run


def _from_narrow_pair(d: Decode, out: Type, source: Type, rounding: str | None, relu: bool) -> Step:
    """``cvt.rn.f16x2.e4m3x2`` and relatives: exact, except that bf16 has no smaller power than 2**-133."""
    wanted = "bf16x2" if source.name == "ue8m0x2" else "f16x2"
    if out.name != wanted or rounding != "rn":
        raise d.error(f"cvt from .{source.name} needs .rn.{wanted}")
    shift, decode = 8, cast("Callable[[Array], Array]", formats.ue8m0_to_f32)
    if source.name in _PAIRS:
        shift, _, decode = _PAIRS[source.name]
    dst = d.dst(TYPES["b32"])
    read = d.src(TYPES["b8" if source.name == "e2m1x2" else "b16"], wide=True)
    encode = formats.f32_to_bf16 if out.name == "bf16x2" else formats.f32_to_f16
    mask = {"e2m1x2": 0xF, "e2m3x2": 0x3F, "e3m2x2": 0x3F}.get(source.name, 0xFF)

    def run(m: Any, lanes: Any) -> None:
        bits = broadcast(read(m, lanes), lanes.n)
        pair = np.stack([bits & mask, bits >> bits.dtype.type(shift) & mask], axis=1)
        out_bits = encode(decode(pair), relu=relu)
        dst(m, lanes, np.ascontiguousarray(out_bits).view(np.uint32).reshape(lanes.n))

    return run


def _pack_integers(d: Decode) -> Step:
    """``cvt.pack.sat``: clamp two s32 to 16 or 8 bits and pack them, 8-bit pairs below the low half of c."""
    d.need("sat")
    out, source = d.type(), d.type()
    if out.bits not in (8, 16) or source.name != "s32":
        raise d.error("this form of cvt.pack is not modelled")
    if out.bits == 8:
        d.need("b32")
    dst, a, b = d.dst(TYPES["b32"]), d.src(source), d.src(source)
    c = d.src(TYPES["b32"]) if out.bits == 8 else None
    limits = np.iinfo(out.dtype)

    def clamp(x: Any) -> Array:
        return np.asarray(np.clip(x, limits.min, limits.max).astype(out.dtype).view(out.raw).astype(np.uint32))

    def run(m: Any, lanes: Any) -> None:
        value = clamp(a(m, lanes)) << np.uint32(out.bits) | clamp(b(m, lanes))
        if c is not None:
            value = np.asarray(c(m, lanes)) << np.uint32(16) | value
        dst(m, lanes, value)

    return run

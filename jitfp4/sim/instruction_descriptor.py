"""The 32-bit instruction descriptor of ``tcgen05.mma``, decoded and checked against the kinds of the PTX manual."""

from __future__ import annotations

from dataclasses import dataclass

from jitfp4.arch import Arch, names_with
from jitfp4.errors import SimError

BLOCK_SCALED = ("mxf8f6f4", "mxf4", "mxf4nvf4")
KINDS = ("f16", "tf32", "f8f6f4", "i8", *BLOCK_SCALED)

_F8F6F4 = {0: "e4m3", 1: "e5m2", 3: "e2m3", 4: "e3m2", 5: "e2m1"}
_OPERAND_TYPES = {
    "f16": {0: "f16", 1: "bf16"},
    "tf32": {2: "tf32"},
    "f8f6f4": _F8F6F4,
    "i8": {0: "u8", 1: "s8"},
    "mxf8f6f4": _F8F6F4,
    "mxf4": {1: "e2m1"},
    "mxf4nvf4": {1: "e2m1"},
}
_RESULT_TYPES = {"f16": {0: "f16", 1: "f32"}, "tf32": {1: "f32"}, "f8f6f4": {0: "f16", 1: "f32"}, "i8": {2: "s32"}}
_K = {"f16": 16, "tf32": 8, "f8f6f4": 32, "i8": 32, "mxf8f6f4": 32, "mxf4": 64, "mxf4nvf4": 64}


@dataclass(frozen=True, slots=True, kw_only=True)
class InstructionDescriptor:
    """One dense ``tcgen05.mma``: ``m`` and ``n`` are the pair's with cta_group::2.

    ``scale_type``, ``sfa_id`` and ``sfb_id`` belong to the block-scaled kinds; ids select bytes of a scale word.
    """

    kind: str
    m: int
    n: int
    k: int
    a_type: str
    b_type: str
    d_type: str
    negate_a: bool
    negate_b: bool
    trans_a: bool
    trans_b: bool
    saturate: bool
    scale_type: str
    sfa_id: int
    sfb_id: int

    @staticmethod
    def decode(bits: int, kind: str, cta_group: int, arch: Arch, *, block: int = 0) -> InstructionDescriptor:
        """Decode and check ``bits`` for ``tcgen05.mma.cta_group::<cta_group>.kind::<kind>{.block<block>}`` on ``arch``.

        Raises SimError for reserved bits, sparsity, and types or shapes that the kind does not have.
        """
        if kind not in KINDS:
            raise SimError(f"tcgen05.mma kind::{kind} is not modelled")
        scaled, packed = kind in BLOCK_SCALED, kind in ("mxf4", "mxf4nvf4")
        _require(bits >> 2 & 1 == 0, bits, "sparse matrices are not modelled")
        _require(bits & (_reserved(kind)) == 0, bits, f"a bit that is reserved for kind::{kind} is set")
        types = _OPERAND_TYPES[kind]
        a_code, b_code = bits >> 7 & 7, bits >> 10 & (3 if packed else 7)
        _require(a_code in types and b_code in types, bits, f"operand types {a_code} and {b_code} of kind::{kind}")
        _require(kind != "f16" or a_code == b_code, bits, "kind::f16 with operands of two types")
        d_code = bits >> 4 & 3
        _require(scaled or d_code in _RESULT_TYPES[kind], bits, f"accumulator type {d_code} of kind::{kind}")
        wide = bool(bits >> 31) if packed else False
        descriptor = InstructionDescriptor(
            kind=kind,
            m=(bits >> 27 & 3) << 7 if scaled else (bits >> 24 & 31) << 4,
            n=(bits >> 17 & 63) << 3,
            k=96 if wide else _K[kind],
            a_type=types[a_code],
            b_type=types[b_code],
            d_type="f32" if scaled else _RESULT_TYPES[kind][d_code],
            negate_a=bool(bits >> 13 & 1),
            negate_b=bool(bits >> 14 & 1),
            trans_a=bool(bits >> 15 & 1),
            trans_b=bool(bits >> 16 & 1),
            saturate=kind == "i8" and bool(bits >> 3 & 1),
            scale_type="" if not scaled else "ue8m0" if bits >> 23 & 1 else "ue4m3",
            sfa_id=bits >> 29 & 3 if scaled else 0,
            sfb_id=bits >> 4 & 3 if scaled else 0,
        )
        _check_shape(bits, descriptor, cta_group)
        _require(not wide or arch.has_k96, bits, f"K = 96 on {arch.name}: only {names_with('has_k96')} has it")
        if scaled:
            _check_scales(bits, descriptor, block)
        return descriptor


def _reserved(kind: str) -> int:
    """Bits that must be zero in a dense descriptor of ``kind``."""
    if kind in ("mxf4", "mxf4nvf4"):
        return 0x3 | 1 << 3 | 1 << 6 | 1 << 12 | 3 << 15 | 7 << 24
    if kind == "mxf8f6f4":
        return 0x3 | 1 << 3 | 1 << 6 | 7 << 24 | 1 << 31
    return 0x3 | 1 << 6 | 1 << 23 | 1 << 29 | 3 << 30 | (0 if kind == "i8" else 1 << 3)


def _check_shape(bits: int, d: InstructionDescriptor, cta_group: int) -> None:
    if d.kind in BLOCK_SCALED:
        steps = {1: {128: 8}, 2: {128: 16, 256: 16}}
    else:
        steps = {1: {64: 8, 128: 16}, 2: {128: 32, 256: 32}}
    step = steps[cta_group].get(d.m)
    legal = step is not None and step <= d.n <= 256 and d.n % step == 0
    _require(legal, bits, f"M = {d.m}, N = {d.n} of kind::{d.kind} with cta_group::{cta_group}")
    _require(not (d.k == 96 and cta_group == 2 and d.m != 256), bits, "K = 96 with cta_group::2 needs M = 256")
    transposable = d.kind == "f16" or (d.kind in ("f8f6f4", "mxf8f6f4", "i8"))
    _require(transposable or not (d.trans_a or d.trans_b), bits, f"MN-major operands of kind::{d.kind}")


def _check_scales(bits: int, d: InstructionDescriptor, block: int) -> None:
    blocks = {"mxf8f6f4": (32,), "mxf4": (32,), "mxf4nvf4": (16, 32)}[d.kind]
    _require(block in blocks, bits, f"kind::{d.kind} with blocks of {block}")
    ue4m3 = d.scale_type == "ue4m3"
    _require(not ue4m3 or (d.kind == "mxf4nvf4" and block == 16), bits, f"ue4m3 scales of kind::{d.kind}.block{block}")
    if d.k == 64:
        ids: tuple[int, ...] = (0,) if block == 16 else (0, 2)
    else:
        ids = (0, 2) if block == 16 else (0, 1, 2, 3)
    _require(d.sfa_id in ids and d.sfb_id in ids, bits, f"scale ids {d.sfa_id}, {d.sfb_id}: allowed are {ids}")


def _require(holds: bool, bits: int, message: str) -> None:
    if not holds:
        raise SimError(f"tcgen05.mma instruction descriptor {bits:#010x}: {message}")

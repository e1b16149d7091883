"""Logic, shifts, fields and permutations, bit by bit."""

from __future__ import annotations

import numpy as np
import pytest

from jitfp4.errors import SimParseError
from tests.sim.snippets import evaluate
from tests.sim.test_integer import number, values

pytestmark = pytest.mark.sim

A, B, C = values(32, 1), values(32, 2), values(32, 3)
SHIFTS = np.resize(np.array([0, 1, 2, 7, 31, 32, 33, 63, 64, 65, 255, 0xFFFFFFFF], np.uint32), len(A))


@pytest.mark.parametrize("table", [0x00, 0xEA, 0x96, 0xFE, 0xCA, 0x1B, 0xFF])
def test_lop3_follows_its_table(table: int) -> None:
    got = evaluate(f"lop3.b32 %d, %a, %b, %c, {table};", A, B, C, out=np.uint32)
    bit = np.arange(32, dtype=np.uint32)
    index = (A[:, None] >> bit & 1) * 4 + (B[:, None] >> bit & 1) * 2 + (C[:, None] >> bit & 1)
    want = ((table >> index & 1).astype(np.uint64) << bit).sum(1)
    assert (got == want).all()


@pytest.mark.parametrize(
    ("op", "kind"), [("shl", "b32"), ("shr", "u32"), ("shr", "s32"), ("shl", "b64"), ("shr", "s64"), ("shr", "u16")]
)
def test_shift_amounts_clamp(op: str, kind: str) -> None:
    bits = int(kind[1:])
    a = values(bits, 4)
    got = evaluate(f"{op}.{kind} %d, %a, %b;", a, SHIFTS, out=a.dtype)
    want = []
    for x, s in zip(a.tolist(), SHIFTS.tolist(), strict=True):
        amount = min(s, bits)
        want.append((x << amount if op == "shl" else number(x, kind.replace("b", "u")) >> amount) % (1 << bits))
    assert got.tolist() == want


@pytest.mark.parametrize("direction", ["l", "r"])
@pytest.mark.parametrize("mode", ["clamp", "wrap"])
def test_funnel_shift(direction: str, mode: str) -> None:
    got = evaluate(f"shf.{direction}.{mode}.b32 %d, %a, %b, %c;", A, B, SHIFTS, out=np.uint32)
    for g, a, b, s in zip(got.tolist(), A.tolist(), B.tolist(), SHIFTS.tolist(), strict=True):
        amount = min(s, 32) if mode == "clamp" else s & 31
        pair = b << 32 | a
        want = pair << amount >> 32 if direction == "l" else pair >> amount
        assert g == want & 0xFFFFFFFF


@pytest.mark.parametrize("kind", ["u32", "s32", "u64", "s64"])
def test_bit_field_extract(kind: str) -> None:
    bits = int(kind[1:])
    a = values(bits, 5)
    length = np.roll(SHIFTS, 5)
    got = evaluate(f"bfe.{kind} %d, %a, %b, %c;", a, SHIFTS, length, out=a.dtype)
    for g, x, p, n in zip(got.tolist(), a.tolist(), SHIFTS.tolist(), length.tolist(), strict=True):
        pos, size = p & 255, n & 255
        sign = 0 if kind[0] == "u" or size == 0 else x >> min(pos + size - 1, bits - 1) & 1
        want = sum((x >> pos + i & 1 if i < size and pos + i < bits else sign) << i for i in range(bits))
        assert g == want


@pytest.mark.parametrize("kind", ["b32", "b64"])
def test_bit_field_insert(kind: str) -> None:
    bits = int(kind[1:])
    a, b = values(bits, 6), values(bits, 7)
    length = np.roll(SHIFTS, 3)
    got = evaluate(f"bfi.{kind} %d, %a, %b, %c, %e;", a, b, SHIFTS, length, out=a.dtype)
    for g, x, y, p, n in zip(got.tolist(), a.tolist(), b.tolist(), SHIFTS.tolist(), length.tolist(), strict=True):
        want = y
        for i in range(min(n & 255, bits - (p & 255))):
            bit = 1 << (p & 255) + i
            want = want & ~bit | (bit if x >> i & 1 else 0)
        assert g == want


def test_prmt_default_mode_copies_and_replicates_signs() -> None:
    got = evaluate("prmt.b32 %d, %a, %b, %c;", A, B, C, out=np.uint32)
    for g, a, b, c in zip(got.tolist(), A.tolist(), B.tolist(), C.tolist(), strict=True):
        source = (b << 32 | a).to_bytes(8, "little")
        picks = [c >> 4 * i & 15 for i in range(4)]
        want = bytes((0xFF if source[p & 7] & 0x80 else 0) if p & 8 else source[p & 7] for p in picks)
        assert g == int.from_bytes(want, "little")


@pytest.mark.parametrize(
    ("mode", "rows"),
    [
        ("f4e", (0x03020100, 0x04030201, 0x05040302, 0x06050403)),
        ("b4e", (0x05060700, 0x06070001, 0x07000102, 0x00010203)),
        ("rc8", (0x00000000, 0x01010101, 0x02020202, 0x03030303)),
        ("ecl", (0x03020100, 0x03020101, 0x03020202, 0x03030303)),
        ("ecr", (0x00000000, 0x01010100, 0x02020100, 0x03020100)),
        ("rc16", (0x01000100, 0x03020302, 0x01000100, 0x03020302)),
    ],
)
def test_prmt_special_modes(mode: str, rows: tuple[int, ...]) -> None:
    selector = np.arange(4, dtype=np.uint32)
    a, b = np.full(4, 0x03020100, np.uint32), np.full(4, 0x07060504, np.uint32)
    assert evaluate(f"prmt.b32.{mode} %d, %a, %b, %c;", a, b, selector, out=np.uint32).tolist() == list(rows)


def test_counting_and_finding_bits() -> None:
    text = [f"{x:032b}" for x in A.tolist()]
    assert evaluate("popc.b32 %d, %a;", A, out=np.uint32).tolist() == [t.count("1") for t in text]
    assert evaluate("clz.b32 %d, %a;", A, out=np.uint32).tolist() == [len(t) - len(t.lstrip("0")) for t in text]
    assert evaluate("brev.b32 %d, %a;", A, out=np.uint32).tolist() == [int(t[::-1], 2) for t in text]
    top = [0xFFFFFFFF if x == 0 else x.bit_length() - 1 for x in A.tolist()]
    assert evaluate("bfind.u32 %d, %a;", A, out=np.uint32).tolist() == top
    signed = [x if x < 1 << 31 else ~x & 0xFFFFFFFF for x in A.tolist()]
    want = [0xFFFFFFFF if x == 0 else x.bit_length() - 1 for x in signed]
    assert evaluate("bfind.s32 %d, %a;", A, out=np.uint32).tolist() == want


def test_clz_of_64_bits() -> None:
    a = values(64, 8)
    assert evaluate("clz.b64 %d, %a;", a, out=np.uint32).tolist() == [64 - x.bit_length() for x in a.tolist()]


@pytest.mark.parametrize("offset", [-3, -1, 0, 1, 4])
def test_nth_set_bit(offset: int) -> None:
    base = A & np.uint32(31)
    got = evaluate(f"fns.b32 %d, %a, %b, {offset};", B, base, out=np.uint32)
    for g, mask, start in zip(got.tolist(), B.tolist(), base.tolist(), strict=True):
        step = 1 if offset > 0 else -1
        places = [i for i in range(start, 32 if step > 0 else -1, step) if mask >> i & 1]
        if offset == 0:
            want = start if mask >> start & 1 else 0xFFFFFFFF
        else:
            want = places[abs(offset) - 1] if len(places) >= abs(offset) else 0xFFFFFFFF
        assert g == want


def test_masks_and_sign_extension() -> None:
    pos, size = A & np.uint32(63), B & np.uint32(63)
    got = evaluate("bmsk.clamp.b32 %d, %a, %b;", pos, size, out=np.uint32).tolist()
    pairs = list(zip(pos.tolist(), size.tolist(), strict=True))
    assert got == [((1 << min(n, 32)) - 1 << min(p, 32)) & 0xFFFFFFFF for p, n in pairs]
    got = evaluate("szext.wrap.s32 %d, %a, %b;", C, size, out=np.int32).tolist()
    for g, x, n in zip(got, C.tolist(), size.tolist(), strict=True):
        low = x & (1 << (n & 31)) - 1
        assert g == (low - (1 << (n & 31)) if n & 31 and low >> (n & 31) - 1 else low)


def test_registers_pack_from_the_low_end() -> None:
    body = ".reg .b16 %x, %y; mov.b32 {%x, %y}, %a; mov.b32 %d, {%y, %x};"
    assert (evaluate(body, A, out=np.uint32) == (A << 16 | A >> 16)).all()


def test_registers_of_another_width_are_refused() -> None:
    with pytest.raises(SimParseError, match=r"%a has 64 bits, .u32 needs 32"):
        evaluate("add.u32 %d, %a, 1;", values(64, 9), out=np.uint32)

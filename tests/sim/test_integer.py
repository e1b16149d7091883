"""Integer arithmetic against Python's unbounded integers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.sim.snippets import Array, evaluate

pytestmark = pytest.mark.sim

EDGES = (0, 1, 2, 3, 5, 31, 32, 33, 63, 64, 127, 128, 255, 256, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000)


def values(bits: int, seed: int, count: int = 400) -> Array:
    """Raw patterns: edges of the range first, then random ones."""
    rng = np.random.default_rng(seed)
    top = (1 << bits) - 1
    edges = [v & top for e in EDGES for v in (e, -e, e + 1)]
    rest = rng.integers(0, top, count - len(edges), dtype=np.uint64, endpoint=True)
    out = np.concatenate([np.array(edges, np.uint64), rest])
    return rng.permutation(out).astype(f"u{bits // 8}")


def number(raw: int, kind: str) -> int:
    bits = int(kind[1:])
    return raw - (1 << bits) if kind[0] == "s" and raw >> (bits - 1) else raw


def truncated(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


BINARY: dict[str, Callable[[int, int, int], int]] = {
    "add": lambda a, b, _: a + b,
    "sub": lambda a, b, _: a - b,
    "mul.lo": lambda a, b, _: a * b,
    "mul.hi": lambda a, b, bits: a * b >> bits,
    "min": lambda a, b, _: min(a, b),
    "max": lambda a, b, _: max(a, b),
    "div": lambda a, b, _: truncated(a, b),
    "rem": lambda a, b, _: a - truncated(a, b) * b,
}


@pytest.mark.parametrize("kind", ["s16", "u16", "s32", "u32", "s64", "u64"])
@pytest.mark.parametrize("op", BINARY)
def test_binary_operations_wrap(op: str, kind: str) -> None:
    bits = int(kind[1:])
    a, b = values(bits, 1), values(bits, 2)
    if op in ("div", "rem"):
        b = np.where(b == 0, b.dtype.type(7), b)
    got = evaluate(f"{op}.{kind} %d, %a, %b;", a, b, out=a.dtype)
    want = [
        BINARY[op](number(int(x), kind), number(int(y), kind), bits) % (1 << bits) for x, y in zip(a, b, strict=True)
    ]
    assert got.tolist() == want


@pytest.mark.parametrize("kind", ["s16", "u16", "s32", "u32"])
def test_wide_products_are_exact(kind: str) -> None:
    bits = int(kind[1:])
    a, b, c = values(bits, 3), values(bits, 4), values(2 * bits, 5)
    got = evaluate(f"mad.wide.{kind} %d, %a, %b, %c;", a, b, c, out=c.dtype)
    want = [
        (number(int(x), kind) * number(int(y), kind) + int(z)) % (1 << 2 * bits)
        for x, y, z in zip(a, b, c, strict=True)
    ]
    assert got.tolist() == want


@pytest.mark.parametrize("op", ["add.sat", "sub.sat"])
def test_saturating_addition_clamps(op: str) -> None:
    a, b = values(32, 6), values(32, 7)
    got = evaluate(f"{op}.s32 %d, %a, %b;", a, b, out=np.int32)
    x, y = a.view(np.int32).astype(np.int64), b.view(np.int32).astype(np.int64)
    assert (got == np.clip(x + y if op == "add.sat" else x - y, -(1 << 31), (1 << 31) - 1)).all()


def test_carry_chains_make_wide_additions() -> None:
    a, b = values(64, 8), values(64, 9)
    body = """
    .reg .b32 %al, %ah, %bl, %bh, %dl, %dh;
    mov.b64 {%al, %ah}, %a; mov.b64 {%bl, %bh}, %b;
    {ADD}.cc.u32 %dl, %al, %bl; {ADD}c.u32 %dh, %ah, %bh;
    mov.b64 %d, {%dl, %dh};
    """
    assert (evaluate(body.replace("{ADD}", "add"), a, b, out=np.uint64) == a + b).all()
    assert (evaluate(body.replace("{ADD}", "sub"), a, b, out=np.uint64) == a - b).all()


def test_multiply_with_carry_makes_a_64_bit_product() -> None:
    a, b = values(32, 10), values(32, 11)
    body = """
    .reg .b32 %lo, %hi;
    mad.lo.cc.u32 %lo, %a, %b, 4294967295; madc.hi.u32 %hi, %a, %b, 0;
    mov.b64 %d, {%lo, %hi};
    """
    want = [int(x) * int(y) + 0xFFFFFFFF & (1 << 64) - 1 for x, y in zip(a, b, strict=True)]
    assert evaluate(body, a, b, out=np.uint64).tolist() == want


def test_24_bit_products() -> None:
    a, b = values(32, 12), values(32, 13)
    low = [(int(x) & 0xFFFFFF) * (int(y) & 0xFFFFFF) for x, y in zip(a, b, strict=True)]
    assert evaluate("mul24.lo.u32 %d, %a, %b;", a, b, out=np.uint32).tolist() == [p & 0xFFFFFFFF for p in low]
    assert evaluate("mul24.hi.u32 %d, %a, %b;", a, b, out=np.uint32).tolist() == [p >> 16 & 0xFFFFFFFF for p in low]


def test_sum_of_absolute_difference() -> None:
    a, b, c = values(32, 14), values(32, 15), values(32, 16)
    want = np.abs(a.view(np.int32).astype(np.int64) - b.view(np.int32)) + c.view(np.int32)
    assert (evaluate("sad.s32 %d, %a, %b, %c;", a, b, c, out=np.int32) == want.astype(np.int32)).all()


@pytest.mark.parametrize(("form", "signed_a", "signed_b"), [("u32.u32", 0, 0), ("s32.u32", 1, 0), ("s32.s32", 1, 1)])
def test_byte_dot_products(form: str, signed_a: int, signed_b: int) -> None:
    a, b, c = values(32, 17), values(32, 18), values(32, 19)
    x = a.view(np.int8 if signed_a else np.uint8).reshape(-1, 4).astype(np.int64)
    y = b.view(np.int8 if signed_b else np.uint8).reshape(-1, 4).astype(np.int64)
    got = evaluate(f"dp4a.{form} %d, %a, %b, %c;", a, b, c, out=np.uint32)
    assert (got == ((x * y).sum(1) + c.astype(np.int64)).astype(np.uint32)).all()
    halves = a.view(np.int16 if signed_a else np.uint16).reshape(-1, 2).astype(np.int64)
    got = evaluate(f"dp2a.hi.{form} %d, %a, %b, %c;", a, b, c, out=np.uint32)
    assert (got == ((halves * y[:, 2:]).sum(1) + c.astype(np.int64)).astype(np.uint32)).all()


@pytest.mark.parametrize("op", ["add", "min", "max"])
@pytest.mark.parametrize("kind", ["s16x2", "u16x2"])
def test_pairs_of_16_bit_integers(op: str, kind: str) -> None:
    a, b = values(32, 20), values(32, 21)
    dtype = np.int16 if kind[0] == "s" else np.uint16
    fn = {"add": np.add, "min": np.minimum, "max": np.maximum}[op]
    got = evaluate(f"{op}.{kind} %d, %a, %b;", a, b, out=np.uint32)
    assert (got == fn(a.view(dtype), b.view(dtype)).view(np.uint32)).all()


def test_absolute_value_and_negation_of_the_smallest_integer() -> None:
    a = np.array([0x80000000, 0xFFFFFFFF, 5], np.uint32)
    assert evaluate("abs.s32 %d, %a;", a, out=np.uint32).tolist() == [0x80000000, 1, 5]
    assert evaluate("neg.s32 %d, %a;", a, out=np.uint32).tolist() == [0x80000000, 1, 0xFFFFFFFB]


@pytest.mark.parametrize(
    ("op", "fn"), [("vadd", np.add), ("vsub", np.subtract), ("vmin", np.minimum), ("vmax", np.maximum)]
)
@pytest.mark.parametrize("kind", ["s32", "u32"])
def test_simd_video_instructions_clamp_each_element(op: str, fn: np.ufunc, kind: str) -> None:
    a, b = values(32, 22), values(32, 23)
    zero = np.zeros_like(a)
    for count, bits in ((2, 16), (4, 8)):
        dtype = np.dtype(f"{'i' if kind[0] == 's' else 'u'}{bits // 8}")
        limits = np.iinfo(dtype)
        want = np.clip(fn(a.view(dtype).astype(int), b.view(dtype).astype(int)), limits.min, limits.max).astype(dtype)
        got = evaluate(f"{op}{count}.{kind}.{kind}.{kind}.sat %d, %a, %b, %c;", a, b, zero, out=np.uint32)
        assert (got == want.view(np.uint32)).all()


def test_simd_sums_comparisons_and_averages() -> None:
    a, b, c = values(32, 24), values(32, 25), values(32, 26)
    x, y = (v.view(np.uint8).reshape(-1, 4).astype(int) for v in (a, b))
    got = evaluate("vabsdiff4.u32.u32.u32.add %d, %a, %b, %c;", a, b, c, out=np.uint32)
    assert (got == (np.abs(x - y).sum(1) + c).astype(np.uint32)).all()
    got = evaluate("vset4.u32.u32.gt %d, %a, %b, %c;", a, b, c, out=np.uint32)
    assert (got.view(np.uint8).reshape(-1, 4) == (x > y)).all()
    got = evaluate("vavrg4.u32.u32.u32 %d, %a, %b, %c;", a, b, c, out=np.uint32)
    assert (got.view(np.uint8).reshape(-1, 4) == (x + y + 1) // 2).all()


def test_division_by_zero_sets_every_bit() -> None:
    a, zero = np.array([5, 0x80000000, 0], np.uint32), np.zeros(3, np.uint32)
    for op in ("div.u32", "div.s32", "rem.u32", "rem.s32"):
        assert evaluate(f"{op} %d, %a, %b;", a, zero, out=np.uint32).tolist() == [0xFFFFFFFF] * 3

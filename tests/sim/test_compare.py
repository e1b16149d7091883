"""Comparisons, selections and predicates."""

from __future__ import annotations

import numpy as np
import pytest

from tests.sim.snippets import evaluate
from tests.sim.test_floating import floats, halves
from tests.sim.test_integer import values

pytestmark = [pytest.mark.sim, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

SELECT = "selp.u32 %d, 1, 0, %p;"
ORDERED = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}


@pytest.mark.parametrize("op", ORDERED)
@pytest.mark.parametrize("kind", ["s32", "u32", "s64", "u16"])
def test_integer_comparisons(op: str, kind: str) -> None:
    bits = int(kind[1:])
    a = values(bits, 1)
    b = np.where(np.arange(len(a)) % 3 == 0, a, values(bits, 2))
    got = evaluate(f"setp.{op}.{kind} %p, %a, %b; {SELECT}", a, b, out=np.uint32)
    dtype = f"{'i' if kind[0] == 's' else 'u'}{bits // 8}"
    assert (got == ORDERED[op](a.view(dtype), b.view(dtype))).all()


@pytest.mark.parametrize("op", ORDERED)
def test_float_comparisons_and_their_unordered_forms(op: str) -> None:
    a = floats(1)
    b = np.where(np.arange(len(a)) % 3 == 0, a, floats(2))
    unordered = np.isnan(a) | np.isnan(b)
    holds = ORDERED[op](a, b)
    got = evaluate(f"setp.{op}.f32 %p, %a, %b; {SELECT}", a, b, out=np.uint32)
    assert (got == (holds & ~unordered)).all()
    got = evaluate(f"setp.{op}u.f32 %p, %a, %b; {SELECT}", a, b, out=np.uint32)
    assert (got == (holds | unordered)).all()


def test_num_and_nan_tests() -> None:
    a, b = floats(3), floats(4)
    unordered = np.isnan(a) | np.isnan(b)
    assert (evaluate(f"setp.nan.f32 %p, %a, %b; {SELECT}", a, b, out=np.uint32) == unordered).all()
    assert (evaluate(f"setp.num.f32 %p, %a, %b; {SELECT}", a, b, out=np.uint32) == ~unordered).all()


def test_second_predicate_is_the_complement_before_combining() -> None:
    a, b = values(32, 3), values(32, 4)
    body = "setp.gt.u32 %q, %b, 100; setp.lt.and.u32 %p|%q, %a, %b, !%q; .reg .b32 %x, %y;"
    body += "selp.u32 %x, 1, 0, %p; selp.u32 %y, 2, 0, %q; add.u32 %d, %x, %y;"
    less, other = a < b, ~(b > 100)
    assert (evaluate(body, a, b, out=np.uint32) == (less & other) + 2 * (~less & other)).all()


def test_packed_half_comparison_sets_two_predicates() -> None:
    a, b = halves("f16", 1), halves("f16", 2)
    body = "setp.lt.f16x2 %p|%q, %a, %b; .reg .b32 %x, %y;"
    body += "selp.u32 %x, 1, 0, %p; selp.u32 %y, 2, 0, %q; or.b32 %d, %x, %y;"
    got = evaluate(body, a.view(np.uint32), b.view(np.uint32), out=np.uint32)
    less = (a.view(np.float16) < b.view(np.float16)).reshape(-1, 2)
    assert (got == less[:, 0] + 2 * less[:, 1]).all()


def test_set_gives_a_mask_or_one() -> None:
    a, b = floats(5), floats(6)
    assert (evaluate("set.lt.u32.f32 %d, %a, %b;", a, b, out=np.uint32) == np.where(a < b, 0xFFFFFFFF, 0)).all()
    assert (evaluate("set.lt.f32.f32 %d, %a, %b;", a, b, out=np.float32) == (a < b)).all()
    x, y = halves("f16", 3), halves("f16", 4)
    got = evaluate("set.gt.f16x2.f16x2 %d, %a, %b;", x.view(np.uint32), y.view(np.uint32), out=np.uint32)
    assert (got.view(np.float16) == (x.view(np.float16) > y.view(np.float16))).all()


def test_slct_selects_by_sign() -> None:
    a, b, c = values(32, 5), values(32, 6), floats(7, 400)
    got = evaluate("slct.b32.f32 %d, %a, %b, %c;", a, b, c, out=np.uint32)
    assert (got == np.where(c >= 0, a, b)).all()


@pytest.mark.parametrize("test", ["finite", "infinite", "number", "notanumber", "normal", "subnormal"])
def test_testp(test: str) -> None:
    a = floats(8)
    tiny = np.finfo(np.float32).smallest_normal
    want = {
        "finite": np.isfinite(a),
        "infinite": np.isinf(a),
        "number": ~np.isnan(a),
        "notanumber": np.isnan(a),
        "normal": np.isfinite(a) & ((np.abs(a) >= tiny) | (a == 0)),
        "subnormal": (np.abs(a) < tiny) & (a != 0),
    }[test]
    assert (evaluate(f"testp.{test}.f32 %p, %a; {SELECT}", a, out=np.uint32) == want).all()


def test_predicate_logic() -> None:
    a, b = values(32, 9), values(32, 10)
    body = "setp.lt.u32 %p, %a, %b; setp.gt.u32 %q, %a, 77; xor.pred %p, %p, %q; not.pred %p, %p;" + SELECT
    assert (evaluate(body, a, b, out=np.uint32) == ~((a < b) ^ (a > 77))).all()

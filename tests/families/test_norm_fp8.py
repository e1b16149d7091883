"""Rows to E4M3, alone and behind RMSNorm: every byte on the CPU, in the simulator and on a GPU, and bad input."""

from __future__ import annotations

import pytest
import torch

import jitfp4
from jitfp4 import (
    ArgumentError,
    ArgumentTypeError,
    add_rmsnorm_fp8quant,
    fused_add_rmsnorm,
    rmsnorm,
    rmsnorm_fp8quant,
    rows_fp8quant,
)
from jitfp4.families.norm.fp8 import ROWS_FP8QUANT
from jitfp4.families.norm.kernels.rows_fp8quant import Fp8Tactic
from jitfp4.reference import norm as reference
from tests.support.compare import assert_same_bytes, poisoned
from tests.support.norm import DTYPES, assert_same_floats, rows_of_all_kinds
from tests.support.sample import SIM_ARCHS

E4M3 = torch.float8_e4m3fn
SHAPES = [(7, 64), (3, 80), (5, 128), (2, 1040), (2, 4096), (3, 4160)]


def assert_rows(name: str, got: tuple[torch.Tensor, torch.Tensor], y: torch.Tensor) -> None:
    """The bytes and the scales of the reference, for what is quantized."""
    codes, scales = reference.quantize_rows(y)
    assert_same_floats(f"{name}: scales", got[1], scales)
    got_codes = got[0].view(torch.uint8).cpu()
    is_nan = codes & 0x7F == 0x7F
    assert torch.equal(got_codes & 0x7F == 0x7F, is_nan), f"{name}: NaN elsewhere"
    assert_same_bytes(name, got_codes.masked_fill(is_nan, 0), codes.masked_fill(is_nan, 0))


def check(x: torch.Tensor, device: torch.device | str, eps: float = 1e-5) -> None:
    """All functions write the reference's bytes into poisoned outputs."""
    m, h = x.shape
    generator = torch.Generator().manual_seed(h)
    weight, other = torch.randn(h, generator=generator).to(x.dtype), x.flip(0)
    on = x.to(device, copy=True), weight.to(device), other.to(device)
    outs = poisoned((m, h), torch.uint8, device).view(E4M3), poisoned((m,), torch.float32, device)
    got = rows_fp8quant(on[0], *outs)
    assert got[0] is outs[0]
    assert got[1] is outs[1]
    assert_rows("rows", got, x)
    wide = torch.cat((on[2], on[0]), 1)  # rows that lie apart
    assert_rows("norm", rmsnorm_fp8quant(wide[:, h:], on[1], eps), reference.rmsnorm(x, weight, eps))
    total, residual = reference.add(x, other), on[2].clone()
    got = add_rmsnorm_fp8quant(on[0], residual, on[1], eps)
    assert_same_floats("residual", residual, total)
    assert_rows("sum", got, reference.rmsnorm(total, weight, eps))


def test_reference() -> None:
    """The largest element of a row becomes 448; others are off by at most 1 / 16 of themselves; all scales fit."""
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(2)).bfloat16()
    codes, scales = rows_fp8quant(x)
    assert bool((codes.float().abs().amax(-1) == 448).all())
    error = (codes.float() * scales.unsqueeze(-1) - x.float()).abs()
    assert bool((error <= (x.float().abs() / 16).clamp_min(0.501 * 2.0**-9 * scales.unsqueeze(-1))).all())


def test_rows_of_zeros_tiny_values_inf_and_nan() -> None:
    x = torch.zeros(4, 64, dtype=torch.bfloat16)
    x[1], x[2, 3], x[3, 5], x[3, 6] = 2.0**-126, torch.inf, torch.nan, 7.0
    codes, scales = rows_fp8quant(x)
    assert scales.tolist() == [0.0, 0.0, torch.inf, 7 / 448]
    assert not codes[:2].float().any()
    assert codes.float().isnan().nonzero().tolist() == [[2, 3], [3, 5]]
    assert codes[3, 6] == 448


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_as_the_steps_one_by_one(dtype: torch.dtype) -> None:
    x, residual = (rows_of_all_kinds(6, 320, dtype).roll(i, 0) for i in range(2))
    weight = torch.randn(320, generator=torch.Generator().manual_seed(3)).to(dtype)
    assert_rows("norm", rmsnorm_fp8quant(x, weight), rmsnorm(x, weight))
    y, own = x.clone(), residual.clone()
    fused_add_rmsnorm(y, own, weight)
    assert_rows("sum", add_rmsnorm_fp8quant(x, residual, weight), y)
    assert_same_floats("residual", residual, own)


@pytest.mark.sim
@pytest.mark.compile
@pytest.mark.parametrize("arch", SIM_ARCHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_simulated_kernel(arch: str, dtype: torch.dtype) -> None:
    with jitfp4.sim.device(arch, races=True):
        for m, h in SHAPES:
            check(rows_of_all_kinds(m, h, dtype), "cpu")


@pytest.mark.sim
@pytest.mark.compile
@pytest.mark.parametrize(
    ("tactic", "h"), [(Fp8Tactic(2, 1), 1008), (Fp8Tactic(4, 16), 20496), (Fp8Tactic(8, 16), 40000)], ids=str
)
def test_every_kind_of_kernel_simulated(tactic: Fp8Tactic, h: int) -> None:
    with jitfp4.sim.device("sm_90a", races=True), ROWS_FP8QUANT.forced(tactic):
        check(rows_of_all_kinds(2, h, torch.float16), "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kernel_on_a_gpu(dtype: torch.dtype) -> None:
    for m, h in (*SHAPES, (300, 2048), (1, 20496), (64, 8192), (2, 65536), (1000, 128)):
        for _ in range(2):  # the second call is repeated from memory
            check(rows_of_all_kinds(m, h, dtype), "cuda")


def test_leading_dimensions_and_no_rows() -> None:
    x, w = torch.randn(4, 3, 64, dtype=torch.bfloat16), torch.ones(64, dtype=torch.bfloat16)
    codes, scales = rmsnorm_fp8quant(x, w)
    assert (codes.shape, scales.shape) == ((4, 3, 64), (4, 3))
    assert [out.shape for out in add_rmsnorm_fp8quant(x[:0], x[:0].clone(), w)] == [(0, 3, 64), (0, 3)]


X, W = torch.ones(4, 64, dtype=torch.bfloat16), torch.ones(64, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("input", lambda: rows_fp8quant(X.float())),
        ("input", lambda: rows_fp8quant(X[:, :48])),
        ("y_fp8", lambda: rows_fp8quant(X, torch.zeros(4, 64, dtype=torch.uint8))),
        ("y_fp8", lambda: rows_fp8quant(X, torch.zeros(4, 32).to(E4M3))),
        ("y_scale", lambda: rows_fp8quant(X, None, torch.ones(4, 1))),
        ("y_scale", lambda: rows_fp8quant(X, None, torch.ones(4).half())),
        ("weight", lambda: rmsnorm_fp8quant(X, W[:32])),
        ("weight", lambda: rmsnorm_fp8quant(X, W.half())),
        ("eps", lambda: rmsnorm_fp8quant(X, W, -1.0)),
        ("residual", lambda: add_rmsnorm_fp8quant(X, X, W)),
        ("residual", lambda: add_rmsnorm_fp8quant(X, X[:2].clone(), W)),
        ("residual", lambda: add_rmsnorm_fp8quant(X, torch.ones(4, 128, dtype=torch.bfloat16)[:, :64], W)),
    ],
)
def test_bad_input(name: str, call: object) -> None:
    with pytest.raises((ArgumentError, ArgumentTypeError), match=f"^{name}"):
        call()  # type: ignore[operator]
    assert torch.equal(X, torch.ones_like(X))

"""RMSNorm to 16-bit floats: every byte on the CPU, in the simulator and on a GPU, and bad input."""

from __future__ import annotations

import pytest
import torch

import jitfp4
from jitfp4 import (
    ArgumentError,
    ArgumentTypeError,
    fused_add_rmsnorm,
    gemma_fused_add_rmsnorm,
    gemma_rmsnorm,
    rmsnorm,
    rmsnorm_gated,
)
from jitfp4.families.norm.kernels.rmsnorm import Tactic
from jitfp4.families.norm.plain import RMSNORM
from jitfp4.reference import norm as reference
from tests.support.compare import poisoned
from tests.support.norm import DTYPES, assert_same_floats, rows_of_all_kinds
from tests.support.sample import SIM_ARCHS

SHAPES = [(7, 64), (3, 80), (5, 128), (2, 1040), (2, 4096), (3, 4160)]


def check(x: torch.Tensor, device: torch.device | str, eps: float = 1e-5) -> None:
    """All functions write the reference's bytes into poisoned outputs; the gate's exp may differ."""
    m, h = x.shape
    generator = torch.Generator().manual_seed(h)
    weight, other = torch.randn(h, generator=generator).to(x.dtype), x.flip(0)
    on = x.to(device, copy=True), weight.to(device), other.to(device)
    out = poisoned((m, h), x.dtype, device)
    assert rmsnorm(on[0], on[1], eps, out) is out
    assert_same_floats("rmsnorm", out, reference.rmsnorm(x, weight, eps))
    assert_same_floats("gemma", gemma_rmsnorm(on[0], on[1], eps), reference.rmsnorm(x, weight, eps, 1.0))
    total = reference.add(x, other)
    for function, bias in ((fused_add_rmsnorm, 0.0), (gemma_fused_add_rmsnorm, 1.0)):
        y, residual = on[0].clone(), on[2].clone()
        function(y, residual, on[1], eps)
        assert_same_floats("residual", residual, total)
        assert_same_floats("sum", y, reference.rmsnorm(total, weight, eps, bias))
    packed = torch.cat((other, x, x), 1).to(device)
    gate = packed[:, h:].unflatten(-1, (2, h))  # two heads of each row, which do not flatten
    both = packed[:, : 2 * h].reshape(m, 2, h).contiguous()
    got = rmsnorm_gated(both, gate, on[1], eps).cpu().float()
    want = reference.rmsnorm(both.cpu(), weight, eps, 0.0, gate.cpu()).float()
    close = {"rtol": 2.0**-7 if x.dtype == torch.bfloat16 else 2.0**-10, "atol": 2.0**-24, "equal_nan": True}
    torch.testing.assert_close(got, want, **close)  # type: ignore[arg-type]
    wide = torch.cat((on[0], on[2]), 1)  # rows that lie apart
    got = rmsnorm_gated(wide[:, :h], wide[:, h:], on[1], eps).cpu().float()
    want = reference.rmsnorm(x, weight, eps, 0.0, other).float()
    torch.testing.assert_close(got, want, **close)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reference_against_float64(dtype: torch.dtype) -> None:
    x, z, w = (torch.randn(size, generator=torch.Generator().manual_seed(1)).to(dtype) for size in ((5, 192),) * 3)
    wide = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt() * w[0].double()
    error = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-11
    torch.testing.assert_close(rmsnorm(x, w[0]).double(), wide, rtol=error, atol=2.0**-25)
    gated = wide * torch.nn.functional.silu(z.double())
    torch.testing.assert_close(rmsnorm_gated(x, z, w[0]).double(), gated, rtol=1.01 * error, atol=2.0**-25)


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
    ("tactic", "h"), [(Tactic(2, 1), 1008), (Tactic(4, 16), 20496), (Tactic(8, 16), 40000)], ids=str
)
def test_every_kind_of_kernel_simulated(tactic: Tactic, h: int) -> None:
    with jitfp4.sim.device("sm_90a", races=True), RMSNORM.forced(tactic):
        check(rows_of_all_kinds(2, h, torch.float16), "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kernel_on_a_gpu(dtype: torch.dtype) -> None:
    for m, h in (*SHAPES, (300, 2048), (1, 20496), (64, 8192), (2, 65536), (1000, 128)):
        for _ in range(2):  # the second call is repeated from memory
            check(rows_of_all_kinds(m, h, dtype), "cuda")


def test_in_place_and_empty() -> None:
    x, w = torch.randn(4, 3, 64, dtype=torch.bfloat16), torch.ones(64, dtype=torch.bfloat16)
    want = rmsnorm(x, w)
    assert want.shape == x.shape and rmsnorm(x, w, out=x) is x and torch.equal(x, want)
    assert rmsnorm(x[:0], w).shape == (0, 3, 64)
    fused_add_rmsnorm(x[:0], x[:0].clone(), w)


X, W = torch.ones(4, 64, dtype=torch.bfloat16), torch.ones(64, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("input", lambda: rmsnorm(X.float(), W)),
        ("input", lambda: rmsnorm(X[:, :56], W)),
        ("input", lambda: rmsnorm(X[:, :48], W[:48])),
        ("weight", lambda: rmsnorm(X, W[:32])),
        ("weight", lambda: rmsnorm(X, W.half())),
        ("eps", lambda: rmsnorm(X, W, -1.0)),
        ("out", lambda: rmsnorm(X, W, out=torch.ones(4, 32, dtype=torch.bfloat16))),
        ("out", lambda: rmsnorm(X[:2], W, out=X[1:3])),
        ("gate", lambda: rmsnorm_gated(X, X[:2], W)),
        ("gate", lambda: rmsnorm_gated(X, X.half(), W)),
        ("gate", lambda: rmsnorm_gated(X, torch.ones(64, 4, dtype=torch.bfloat16).T, W)),
        ("gate", lambda: rmsnorm_gated(X, torch.ones(4, 68, dtype=torch.bfloat16)[:, :64], W)),
        ("input", lambda: fused_add_rmsnorm(X, X, W)),
        ("residual", lambda: fused_add_rmsnorm(X, X[:2].clone(), W)),
        ("input", lambda: fused_add_rmsnorm(torch.ones(4, 128, dtype=torch.bfloat16)[:, :64], X, W)),
    ],
)
def test_bad_input(name: str, call: object) -> None:
    with pytest.raises((ArgumentError, ArgumentTypeError), match=f"^{name}"):
        call()  # type: ignore[operator]
    assert torch.equal(X, torch.ones_like(X))

"""A norm with a small product in one launch: on the CPU, simulated, on a GPU; bad input."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from jitfp4 import ArgumentError, ArgumentTypeError, rmsnorm_linear, sim
from jitfp4.families.norm.kernels.linear import TACTICS, Tactic
from jitfp4.families.norm.linear import RMSNORM_LINEAR
from jitfp4.reference import norm as reference
from tests.support.compare import poisoned
from tests.support.norm import DTYPES, assert_same_floats
from tests.support.sample import SIM_ARCHS

EPS = 1e-5
# rows, elements, columns of the product
SHAPES = [(1, 64, 3), (3, 80, 33), (5, 2048, 65), (8, 272, 20), (16, 1040, 8), (2, 4096, 40)]


def make(m: int, h: int, n: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(m * h + n)
    x, weight, matrix, bias = (torch.randn(size, generator=generator) for size in ((m, h + 16), (h,), (n, h), (n,)))
    scaled = {"input": x, "weight": 1 + weight / 4, "matrix": matrix * h**-0.5, "bias": bias}
    return {name: value.to(dtype) for name, value in scaled.items()}


def check(m: int, h: int, n: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
    """On rows that lie apart, in poisoned outputs, against float64."""
    given = make(m, h, n, dtype)
    own = {name: value.to(device) for name, value in given.items()}
    x, weight, matrix, bias = own["input"][:, :h], own["weight"], own["matrix"], own["bias"]
    want = reference.rmsnorm(given["input"][:, :h], given["weight"], EPS, 1.0)
    exact = want.double() @ given["matrix"].double().T
    error = 2.0**-22 * (want.double().abs() @ given["matrix"].double().abs().T)

    out, product = poisoned((m, h), dtype, device), poisoned((m, n), dtype, device)
    got = rmsnorm_linear(x, weight, matrix, EPS, weight_bias=1.0, out=out, product=product)
    assert got[0] is out and got[1] is product
    assert_same_floats("rows", out, want)
    unit = torch.finfo(dtype).eps / 2
    assert ((product.cpu().double() - exact).abs() <= error + unit * (exact.abs() + error)).all()
    plain = rmsnorm_linear(x, weight, matrix, EPS, weight_bias=0.0, bias=bias)
    assert_same_floats("rows", plain[0], reference.rmsnorm(given["input"][:, :h], given["weight"], EPS))
    assert plain[1].dtype == torch.float32


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_number(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    check(*shape, dtype)


@pytest.mark.sim
@pytest.mark.compile
@pytest.mark.one_in(3)
@pytest.mark.parametrize("arch", SIM_ARCHS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_simulated_kernel(shape: tuple[int, int, int], arch: str) -> None:
    with sim.device(arch, races=True):
        check(*shape, DTYPES[sum(shape) % len(DTYPES)])


@pytest.mark.sim
@pytest.mark.compile
@pytest.mark.parametrize("tactic", TACTICS, ids=str)
def test_every_tactic_simulated(tactic: Tactic) -> None:
    with sim.device("sm_90a", races=True, seed=1), RMSNORM_LINEAR.forced(tactic):
        check(3, 272, 37, torch.bfloat16)


@pytest.mark.sim
@pytest.mark.compile
@pytest.mark.parametrize("seed", [None, 5])
def test_a_chain_of_dependent_launches(seed: int | None) -> None:
    """The product of one is the input of the next: nothing is read before it is complete."""
    given = make(3, 64, 64, torch.bfloat16)
    weight, matrix = given["weight"], given["matrix"]
    chain = sim.Chain(constant=[weight, matrix], after_unknown=True)
    with sim.device("sm_90a", races=True, chain=chain, seed=seed):
        x = given["input"][:, :64].contiguous()
        for _ in range(3):
            _, x = rmsnorm_linear(x, weight, matrix, EPS, weight_bias=0.0, product=torch.empty_like(x))
    want = given["input"][:, :64].contiguous()
    for _ in range(3):
        _, want = rmsnorm_linear(want, weight, matrix, EPS, weight_bias=0.0, product=torch.empty_like(want))
    torch.testing.assert_close(x, want, rtol=2.0**-6, atol=2.0**-6)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, (8, 2048, 513), (16, 2880, 128), (1, 2048, 1024)], ids=str)
def test_on_a_gpu(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    check(*shape, dtype, "cuda")


def test_no_rows() -> None:
    given = make(1, 64, 8, torch.bfloat16)
    out = rmsnorm_linear(given["input"][:0, :64], given["weight"], given["matrix"], EPS, weight_bias=0.0)
    assert [tuple(one.shape) for one in out] == [(0, 64), (0, 8)]


X, W, M = (torch.ones(size, dtype=torch.bfloat16) for size in ((4, 64), (64,), (8, 64)))


@pytest.mark.parametrize(
    ("words", "change"),
    [
        ("input: got torch.float32", {"input": X.float()}),
        (r"input: got shape \(2, 2, 64\)", {"input": X.view(2, 2, 64)}),
        (r"input: got shape \(17, 64\)", {"input": X[:1].repeat(17, 1)}),
        (r"input: got shape \(1, 4112\)", {"input": X[:1, :16].repeat(1, 257), "weight": W[:16].repeat(257)}),
        (r"input: got shape \(13, 4096\)", {"input": X[:1].repeat(13, 64), "weight": W.repeat(64)}),
        ("weight: got", {"weight": W[:32]}),
        ("matrix: got torch.float16", {"matrix": M.half()}),
        (r"matrix: got shape \(8, 32\)", {"matrix": M[:, :32]}),
        (r"matrix: got shape \(0, 64\)", {"matrix": M[:0]}),
        ("matrix: got an address 8 bytes past", {"matrix": torch.ones(516, dtype=torch.bfloat16)[4:].view(8, 64)}),
        ("eps: got -1", {"eps": -1.0}),
        (r"bias: got shape \(7,\)", {"bias": W[:7]}),
        ("out: got", {"out": X.float()}),
        ("product: got", {"product": X[:, :8]}),
        (r"product: got torch\.int32", {"product": torch.zeros(4, 8, dtype=torch.int32)}),
        ("out: got memory of input", {"out": X}),
    ],
)
def test_what_cannot_be(words: str, change: dict[str, Any]) -> None:
    good = {"input": X, "weight": W, "matrix": M, "eps": EPS, "weight_bias": 1.0}
    rmsnorm_linear(**good)  # type: ignore[arg-type]
    with pytest.raises((ArgumentError, ArgumentTypeError), match=words):
        rmsnorm_linear(**(good | change))  # type: ignore[arg-type]
    assert torch.equal(X, torch.ones_like(X))

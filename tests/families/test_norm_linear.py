"""A norm with a small product, and a choice of experts, in one launch: on the CPU, simulated, on a GPU; bad input."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from jitfp4 import ArgumentError, ArgumentTypeError, fp4_experts, rmsnorm_linear, rmsnorm_route_experts, sim
from jitfp4.families.norm.kernels.linear import TACTICS, Tactic
from jitfp4.families.norm.linear import RMSNORM_LINEAR
from jitfp4.reference import norm as reference
from tests.support.compare import poisoned
from tests.support.experts import make_layer
from tests.support.norm import DTYPES, assert_same_floats
from tests.support.routing import Router, assert_routing
from tests.support.sample import SIM_ARCHS

EPS = 1e-5
# rows, elements, experts or columns, slots
SHAPES = [(1, 64, 3, 1), (3, 80, 33, 5), (5, 2048, 65, 31), (8, 272, 20, 20), (16, 1040, 8, 2), (2, 4096, 40, 7)]


def make(m: int, h: int, n: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(m * h + n)
    x, weight, matrix, bias = (torch.randn(size, generator=generator) for size in ((m, h + 16), (h,), (n, h), (n,)))
    scaled = {"input": x, "weight": 1 + weight / 4, "matrix": matrix * h**-0.5, "bias": bias}
    return {name: value.to(dtype) for name, value in scaled.items()}


def check(m: int, h: int, n: int, top_k: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
    """Both functions on rows that lie apart, in poisoned outputs, against float64."""
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

    for shared in (False, True):
        experts = n - shared
        router = Router(experts, min(top_k, experts), "softmax", renormalize=not shared)
        options: dict[str, Any] = {"weight_bias": 1.0, "renormalize": not shared, "shared": shared}
        for _ in range(2):  # the counter is 0 again
            rows, logits, ids, weights = rmsnorm_route_experts(
                x, weight, matrix, router.top_k, EPS, bias=bias, **options
            )
        assert_same_floats("rows", rows, want)
        biased = exact + given["bias"].double()
        assert ((logits.cpu().double() - biased).abs() <= error + 2.0**-23 * biased.abs()).all()
        logits, ids, weights = logits.cpu(), ids.cpu(), weights.cpu()
        assert ids.shape == weights.shape == (m, router.top_k + shared)
        taken = slice(0, router.top_k)
        assert_routing(router, logits[:, :experts], None, ids[:, taken], weights[:, taken].contiguous())
        if shared:
            assert (ids[:, -1] == experts).all()
            torch.testing.assert_close(weights[:, -1], logits[:, -1].sigmoid(), rtol=2.0**-20, atol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_number(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    check(*shape, dtype)


@pytest.mark.sim
@pytest.mark.compile
@pytest.mark.one_in(3)
@pytest.mark.parametrize("arch", SIM_ARCHS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_simulated_kernel(shape: tuple[int, int, int, int], arch: str) -> None:
    with sim.device(arch, races=True):
        check(*shape, DTYPES[sum(shape) % len(DTYPES)])


@pytest.mark.sim
@pytest.mark.compile
@pytest.mark.parametrize("tactic", TACTICS, ids=str)
def test_every_tactic_simulated(tactic: Tactic) -> None:
    with sim.device("sm_90a", races=True, seed=1), RMSNORM_LINEAR.forced(tactic):
        check(3, 272, 37, 4, torch.bfloat16)


@pytest.mark.sim
@pytest.mark.compile
@pytest.mark.parametrize("seed", [None, 5])
def test_before_a_layer_by_dependent_launch(seed: int | None) -> None:
    """Norm and choice, layer, and the same again: nothing is read before it is complete."""
    layer, given = make_layer(8, 64, 64), make(3, 64, 8, torch.bfloat16)
    x, weight, matrix = given["input"][:, :64].contiguous(), given["weight"], given["matrix"]
    chain = sim.Chain(constant=[*layer.tensors().values(), weight, matrix], after_unknown=True)
    options: dict[str, Any] = {"weight_bias": 0.0, "renormalize": True, "shared": True}
    with sim.device("sm_90a", races=True, chain=chain, seed=seed):
        out = x
        for _ in range(2):
            rows, _, ids, weights = rmsnorm_route_experts(out, weight, matrix, 2, EPS, **options)
            out = fp4_experts(rows, layer, ids, weights, residual=out)
    assert out.isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, (8, 2048, 513, 10), (16, 2880, 128, 4), (1, 2048, 1024, 31)], ids=str)
def test_on_a_gpu(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    check(*shape, dtype, "cuda")


def test_no_rows() -> None:
    given = make(1, 64, 8, torch.bfloat16)
    x, options = given["input"][:0, :64], {"weight_bias": 0.0, "renormalize": True, "shared": True}
    out = rmsnorm_route_experts(x, given["weight"], given["matrix"], 2, EPS, **options)  # type: ignore[arg-type]
    assert [tuple(one.shape) for one in out] == [(0, 64), (0, 8), (0, 3), (0, 3)]


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
        ("router: got torch.float16", {"router": M.half()}),
        (r"router: got shape \(8, 32\)", {"router": M[:, :32]}),
        (r"router: got shape \(0, 64\)", {"router": M[:0]}),
        ("router: got 1025 experts", {"router": M[:1].repeat(1026, 1)}),
        ("router: got an address 8 bytes past", {"router": torch.ones(516, dtype=torch.bfloat16)[4:].view(8, 64)}),
        ("top_k: got 0; allowed: 1 to 7", {"top_k": 0}),
        ("top_k: got 8; allowed: 1 to 7", {"top_k": 8}),
        ("top_k: got 32; allowed: 1 to 31", {"top_k": 32, "router": M.repeat(8, 1)}),
        ("eps: got -1", {"eps": -1.0}),
        (r"bias: got shape \(7,\)", {"bias": W[:7]}),
        ("out: got", {"out": X.float()}),
        ("logits: got", {"logits": X[:, :8]}),
        ("out_ids: got", {"out_ids": torch.zeros(4, 2, dtype=torch.int32)}),
        ("out_weights: got", {"out_weights": torch.zeros(4, 3, dtype=torch.bfloat16)}),
        ("out: got memory of input", {"out": X}),
    ],
)
def test_what_cannot_be(words: str, change: dict[str, Any]) -> None:
    good = {
        "input": X,
        "weight": W,
        "router": M,
        "top_k": 2,
        "eps": EPS,
        "weight_bias": 1.0,
        "renormalize": True,
        "shared": True,
    }
    rmsnorm_route_experts(**good)  # type: ignore[arg-type]
    with pytest.raises((ArgumentError, ArgumentTypeError), match=words):
        rmsnorm_route_experts(**(good | change))
    assert torch.equal(X, torch.ones_like(X))


def test_the_other_function_names_its_own_arguments() -> None:
    with pytest.raises(ArgumentError, match="matrix: got shape"):
        rmsnorm_linear(X, W, M[:, :32], EPS, weight_bias=0.0)
    with pytest.raises(ArgumentTypeError, match=r"product: got torch\.int32"):
        rmsnorm_linear(X, W, M, EPS, weight_bias=0.0, product=torch.zeros(4, 8, dtype=torch.int32))

"""A decode step in one launch: against the single functions in turn, races, later launches, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch

from jitfp4 import (
    ArgumentError,
    ArgumentTypeError,
    DecodeStep,
    Fp4Weight,
    UnsupportedArchError,
    mm_bf16_fp4,
    prepare_fp4_weight,
    rmsnorm,
    rope_append_paged_kv_cache,
    sim,
    trtllm_batch_decode_with_kv_cache,
)
from jitfp4.families.step.kernels.decode import StepTactic
from jitfp4.families.step.operation import DECODE_STEP
from jitfp4.layouts import SfLayout

EPS = 1e-5


class Model(NamedTuple):
    """A dense model of random weights, and a request of it."""

    step: DecodeStep
    call: dict[str, Any]
    tokens: int

    @staticmethod
    def random(device: str, hidden: int, heads: int, kv_heads: int, inter: int, layers: int, tokens: int) -> Model:
        rng = torch.Generator().manual_seed(tokens)

        def ints(low: int, high: int, *shape: int) -> torch.Tensor:
            return torch.randint(low, high, shape, dtype=torch.uint8, generator=rng).to(device)

        def weights(n: int, k: int, **order: str) -> list[Fp4Weight]:
            return [
                prepare_fp4_weight(
                    ints(0, 256, n, k // 2), ints(0x30, 0x40, n, k // 16), 16, SfLayout.layout_linear, **order
                )
                for _ in range(layers)
            ]

        q = heads * 128
        norms = 1 + 0.1 * torch.randn(layers, 2, hidden, generator=rng)
        alphas = torch.tensor([[hidden**-0.5, q**-0.5, hidden**-0.5, inter**-0.5]]).repeat(layers, 1) / 3
        step = DecodeStep(
            weights(q + 256 * kv_heads, hidden),
            weights(hidden, q),
            weights(2 * inter, hidden, order="concatenated gate,up"),
            weights(hidden, inter),
            norms.bfloat16().to(device),
            alphas.to(device),
            heads=heads,
            kv_heads=kv_heads,
            eps=EPS,
        )
        pages = -(-tokens // 64)
        shape = layers, 2, pages + 1, kv_heads, 64
        call = {
            "x": torch.randn(1, hidden, generator=rng).bfloat16().to(device),
            "kv_cache": ints(0, 256, *shape, 64),
            "kv_cache_sf": ints(0x30, 0x38, *shape, 8),
            "block_tables": torch.randperm(pages + 1, generator=rng)[:pages].int().view(1, -1).to(device),
            "seq_lens": torch.tensor([tokens], dtype=torch.int32, device=device),
            "cos_sin_cache": torch.randn(tokens + 1, 128, generator=rng).clamp(-1, 1).to(device),
        }
        return Model(step, call, tokens)

    def in_turn(self, kv_cache: torch.Tensor, kv_cache_sf: torch.Tensor) -> torch.Tensor:
        """The same step by single functions, on other caches."""
        call, step, problem = self.call, self.step, self.step.problem
        device, position = call["x"].device, self.tokens - 1
        page = call["block_tables"][0, position // 64].long()
        h = call["x"]
        for layer in range(len(step.data)):
            qkv, o, gate_up, down = step.weights(layer)
            alpha = step.alphas[layer].split(1)
            rows = mm_bf16_fp4(rmsnorm(h, step.norms[layer, 0], EPS), qkv, alpha[0]).view(1, -1, 128)
            query, key, value = rows.split((problem.heads, problem.kv_heads, problem.kv_heads), 1)
            cache = kv_cache[layer, 0], kv_cache[layer, 1]
            sf = tuple(side.view(torch.float8_e4m3fn) for side in kv_cache_sf[layer])
            rotated = torch.empty(query.shape, dtype=query.dtype, device=device)
            rope_append_paged_kv_cache(
                *(query, key, value, call["cos_sin_cache"]),
                torch.tensor([position], dtype=torch.int32, device=device),
                (page * 64 + position % 64).view(1),
                *(cache, sf),
                is_neox=True,
                kv_layout="HND",
                query_out=rotated,
            )
            attended = trtllm_batch_decode_with_kv_cache(
                *(rotated, cache, torch.zeros(32 << 20, dtype=torch.uint8, device=device)),
                *(call["block_tables"], call["seq_lens"], self.tokens, 128**-0.5),
                kv_layout="HND",
                kv_cache_sf=sf,
                v_scale_layout="linear",
            )
            h = mm_bf16_fp4(attended.flatten(1), o, alpha[1], residual=h)
            act = mm_bf16_fp4(rmsnorm(h, step.norms[layer, 1], EPS), gate_up, alpha[2], activation="swiglu")
            h = mm_bf16_fp4(act, down, alpha[3], residual=h)
        return h


def assert_step(model: Model, want: torch.Tensor, caches: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Runs the step: hidden values near those wanted, and the same bytes in the caches but for a few roundings."""
    before = [model.call[name].clone() for name in ("kv_cache", "kv_cache_sf")]
    out = torch.full_like(model.call["x"], 7.0)
    assert model.step.run(**model.call, out=out) is out
    error = (out.float() - want.float()).norm() / want.float().norm()
    # of few tokens, a value of the newest that lies between two codes is much of what attention gives
    bound = 0.02 * len(model.step.data) * (1 + 4 / int(model.call["seq_lens"]))
    assert error < bound, f"relative error {error:.4f}"
    for name, old, expected in zip(("kv_cache", "kv_cache_sf"), before, caches, strict=True):
        got = model.call[name]
        written = (expected != old).sum()
        assert written and (got != expected).sum() <= 0.25 * written, name  # a value between two codes
        assert ((got != old).flatten(-1).sum() <= 0.05 * got.numel()) or got.numel() < 1 << 20
    return out


@pytest.fixture(params=[1, 64, 130], ids="{} tokens".format)
def tiny(request: pytest.FixtureRequest) -> Iterator[Model]:
    yield Model.random("cpu", 256, 2, 1, 384, 2, request.param)


def test_the_reference_is_the_single_functions_in_turn(tiny: Model) -> None:
    caches = tiny.call["kv_cache"].clone(), tiny.call["kv_cache_sf"].clone()
    assert_step(tiny, tiny.in_turn(*caches), caches)


@pytest.mark.sim
@pytest.mark.compile
@pytest.mark.parametrize("races", [False, True], ids=["twice", "races"])
def test_simulated(races: bool) -> None:
    model = Model.random("cpu", 256, 2 + races, 1, 384, 2 - races, 200)  # an odd number of heads, too
    caches = model.call["kv_cache"].clone(), model.call["kv_cache_sf"].clone()
    want = model.in_turn(*caches)
    with sim.device("sm_90a", races=races), DECODE_STEP.forced(StepTactic(2, 4)):
        first = assert_step(model, want, caches)
        if not races:
            assert torch.equal(model.step.run(**model.call), first)  # tags of a launch before are not taken for new


@pytest.mark.sim
@pytest.mark.compile
@pytest.mark.parametrize("tokens", [1, 64, 65, 129])
def test_the_ends_of_pages_without_a_race(tokens: int) -> None:
    """Of the CTAs that share a KV head, one appends, whatever pages the others have."""
    model = Model.random("cpu", 128, 1, 1, 128, 1, tokens)
    caches = model.call["kv_cache"].clone(), model.call["kv_cache_sf"].clone()
    with sim.device("sm_90a", races=True):
        assert_step(model, model.in_turn(*caches), caches)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 129, 2048, 5000])
def test_on_a_gpu(tokens: int) -> None:
    model = Model.random("cuda", 4096, 32, 8, 14336, 2, tokens)
    caches = model.call["kv_cache"].clone(), model.call["kv_cache_sf"].clone()
    first = assert_step(model, model.in_turn(*caches), caches)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = model.step.run(**model.call)
    for _ in range(20):
        graph.replay()
    assert torch.equal(out, first)


def test_what_is_refused(tiny: Model) -> None:
    step, call = tiny.step, tiny.call
    qkv, o, gate_up, down = ([one] for one in step.weights(0))
    sizes = {"heads": 2, "kv_heads": 1, "eps": EPS}
    norms, alphas = step.norms[:1], step.alphas[:1]
    with pytest.raises(ArgumentError, match="heads"):
        DecodeStep(qkv, o, gate_up, down, norms, alphas, **sizes | {"heads": 9})
    with pytest.raises(ArgumentError, match="o, heads, kv_heads: got"):
        DecodeStep(qkv, down, gate_up, down, norms, alphas, **sizes)
    with pytest.raises(ArgumentError, match="gate_up"):
        DecodeStep(qkv, o, [], down, norms, alphas, **sizes)
    with pytest.raises(ArgumentTypeError, match="down"):
        DecodeStep(qkv, o, gate_up, [down[0].data], norms, alphas, **sizes)  # type: ignore[list-item]
    with pytest.raises(ArgumentError, match="norms"):
        DecodeStep(qkv, o, gate_up, down, step.norms, alphas, **sizes)
    for name, given in (
        ("x", call["x"].expand(2, -1)),
        ("kv_cache", call["kv_cache"][:1]),
        ("kv_cache_sf", call["kv_cache_sf"][..., :4]),
        ("block_tables", call["block_tables"][0]),
        ("seq_lens", call["seq_lens"].long()),
        ("cos_sin_cache", call["cos_sin_cache"][:, :64]),
    ):
        with pytest.raises(ArgumentError, match=name):
            step.run(**call | {name: given})
    with pytest.raises(ArgumentError, match="layer"):
        step.weights(2)
    with sim.device("sm_80"), pytest.raises(UnsupportedArchError):
        step.run(**call)

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
BOUND = 0.01  # of the error of a layer
TINY = 256, 2, 1, 384


class Model(NamedTuple):
    """A dense model of random weights, and a request of it."""

    step: DecodeStep
    call: dict[str, Any]
    tokens: int

    @staticmethod
    def random(
        device: str,
        sizes: tuple[int, int, int, int],
        layers: int,
        tokens: int,
        dtype: torch.dtype = torch.bfloat16,
        *,
        more: bool = False,
    ) -> Model:
        """Sizes are hidden, heads, kv_heads and inter; ``more``: with all that a model or its cache may have."""
        hidden, heads, kv_heads, inter = sizes
        rng = torch.Generator().manual_seed(tokens)

        def ints(low: int, high: int, *shape: int) -> torch.Tensor:
            return torch.randint(low, high, shape, dtype=torch.uint8, generator=rng).to(device)

        def floats(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=rng)

        def weights(n: int, k: int, **order: str) -> list[Fp4Weight]:
            return [
                prepare_fp4_weight(
                    ints(0, 256, n, k // 2), ints(0x30, 0x40, n, k // 16), 16, SfLayout.layout_linear, **order
                )
                for _ in range(layers)
            ]

        q = heads * 128
        alphas = torch.tensor([hidden, hidden, hidden, q, hidden, hidden, inter]) ** -0.5 / 3
        alphas *= torch.tensor([1, 0.5, 2, 1, 1, 2, 1])  # so in_turn() can multiply parts without rounding
        tensors = {}
        if more:
            tensors["biases"] = floats(layers, q + 256 * kv_heads).to(device, dtype)
            tensors["head_norms"] = (1 + 0.1 * floats(layers, 2, 128)).to(device, dtype)
        step = DecodeStep(
            weights(q + 256 * kv_heads, hidden),
            weights(hidden, q),
            weights(2 * inter, hidden, order="concatenated gate,up"),
            weights(hidden, inter),
            (1 + 0.1 * floats(layers, 2, hidden)).to(device, dtype),
            alphas.repeat(layers, 1).to(device),
            heads=heads,
            kv_heads=kv_heads,
            eps=EPS,
            **tensors,
        )
        pages = -(-tokens // 64)
        shape = layers, 2, pages + 1, kv_heads, 64
        call: dict[str, Any] = {
            "x": floats(1, hidden).to(device, dtype),
            "kv_cache": ints(0, 256, *shape, 64),
            "kv_cache_sf": ints(0x30, 0x38, *shape, 8),
            "block_tables": torch.randperm(pages + 1, generator=rng)[:pages].int().view(1, -1).to(device),
            "seq_lens": torch.tensor([tokens], dtype=torch.int32, device=device),
            "cos_sin_cache": floats(tokens + 1, 128).clamp(-1, 1).to(device),
        }
        if more:
            call["kv_scales"] = (0.5 + torch.rand(layers, 2, generator=rng)).to(device)
            call["positions"] = torch.tensor([tokens // 2], dtype=torch.int32, device=device)
            call["v_scale_layout"] = "interleaved4"
        return Model(step, call, tokens)

    def in_turn(self, kv_cache: torch.Tensor, kv_cache_sf: torch.Tensor) -> torch.Tensor:
        """The same step by single functions, on caches as they were before.

        Their codes of the new token may be others, where a value lies between two. They are compared, and then those
        that the step has written are taken: of few tokens they are much of what attention gives.
        """
        call, step, problem = self.call, self.step, self.step.problem
        device, position = call["x"].device, self.tokens - 1
        page, order = call["block_tables"][0, position // 64].long(), call.get("v_scale_layout", "linear")
        at = call.get("positions", torch.tensor([position], dtype=torch.int32, device=device))
        ones = torch.ones(len(step.data), 2, device=device)
        counts = torch.tensor([problem.heads, problem.kv_heads, problem.kv_heads], device=device)
        h = call["x"]
        for layer in range(len(step.data)):
            qkv, o, gate_up, down = step.weights(layer)
            alpha, scales = step.alphas[layer].split(1), call.get("kv_scales", ones)[layer].split(1)
            parts = (step.alphas[layer, :3] / alpha[0]).repeat_interleave(128 * counts).to(h.dtype)
            bias = None if step.biases is None else step.biases[layer] / parts
            rows = parts * mm_bf16_fp4(rmsnorm(h, step.norms[layer, 0], EPS), qkv, alpha[0], bias)
            query, key, value = rows.view(1, -1, 128).split(counts.tolist(), 1)
            cache = kv_cache[layer, 0], kv_cache[layer, 1]
            sf = tuple(side.view(torch.float8_e4m3fn) for side in kv_cache_sf[layer])
            norms = (None, None) if step.head_norms is None else step.head_norms[layer].unbind()
            old = [both[layer, :, page].clone() for both in (kv_cache, kv_cache_sf)]
            query = rope_append_paged_kv_cache(
                *(query, key, value, call["cos_sin_cache"], at, (page * 64 + position % 64).view(1)),
                *(cache, sf, *scales),
                is_neox=True,
                kv_layout="HND",
                v_sf_layout=order,
                q_norm_weight=norms[0],
                k_norm_weight=norms[1],
                eps=EPS,
            )
            for name, mine, before in zip(("kv_cache", "kv_cache_sf"), (kv_cache, kv_cache_sf), old, strict=True):
                own, theirs = mine[layer, :, page], call[name][layer, :, page]
                written = (own != before).sum()
                assert written and (own != theirs).sum() <= 0.25 * written, (name, layer)
                mine[layer, :, page] = theirs
            attended = trtllm_batch_decode_with_kv_cache(
                *(query, cache, torch.zeros(32 << 20, dtype=torch.uint8, device=device)),
                *(call["block_tables"], call["seq_lens"], self.tokens, 128**-0.5 * scales[0], scales[1]),
                kv_layout="HND",
                kv_cache_sf=sf,
                v_scale_layout=order,
            )
            h = mm_bf16_fp4(attended.flatten(1), o, alpha[3], residual=h)
            act = mm_bf16_fp4(rmsnorm(h, step.norms[layer, 1], EPS), gate_up, alpha[4], activation="swiglu")
            h = mm_bf16_fp4(act * (alpha[5] / alpha[4]).to(act.dtype), down, alpha[6], residual=h)
        return h


def assert_step(model: Model) -> torch.Tensor:
    """Runs the step: hidden values and bytes of the caches as by single functions, but for a few roundings."""
    caches = [model.call[name].clone() for name in ("kv_cache", "kv_cache_sf")]
    out = torch.full_like(model.call["x"], 7.0)
    assert model.step.run(**model.call, out=out) is out
    want = model.in_turn(*caches)
    for name, old in zip(("kv_cache", "kv_cache_sf"), caches, strict=True):
        assert torch.equal(model.call[name], old), name  # nothing but the new token was written
    error = (out.float() - want.float()).norm() / want.float().norm()
    assert error < BOUND * len(model.step.data), f"relative error {error:.5f}"
    return out


@pytest.fixture(params=[1, 64, 130], ids="{} tokens".format)
def tiny(request: pytest.FixtureRequest) -> Iterator[Model]:
    dtype = torch.float16 if request.param == 64 else torch.bfloat16
    yield Model.random("cpu", TINY, 2, request.param, dtype, more=request.param > 1)


def test_the_reference_is_the_single_functions_in_turn(tiny: Model) -> None:
    assert_step(tiny)


@pytest.mark.sim
@pytest.mark.compile
@pytest.mark.parametrize("races", [False, True], ids=["twice", "races"])
def test_simulated(races: bool) -> None:
    """An odd number of heads for a KV head, too, and fp16 with all that a model may have."""
    dtype = torch.float16 if races else torch.bfloat16
    sizes = (256, 3, 1, 384) if races else (128, 2, 1, 256)
    model = Model.random("cpu", sizes, 2 - races, 200, dtype, more=races)
    with sim.device("sm_90a", races=races), DECODE_STEP.forced(StepTactic(2, 4, 4)):
        first = assert_step(model)
        if not races:
            assert torch.equal(model.step.run(**model.call), first)  # tags of a launch before are not taken for new


@pytest.mark.sim
@pytest.mark.compile
@pytest.mark.one_in(4)
@pytest.mark.parametrize("tokens", [1, 64, 65, 129])
def test_the_ends_of_pages_without_a_race(tokens: int) -> None:
    """Of the CTAs that share a KV head, one appends, whatever pages the others have; some CTAs have no KV head."""
    model = Model.random("cpu", (128, 1, 1, 128), 1, tokens, more=tokens == 65)
    with sim.device("sm_90a", races=True), DECODE_STEP.forced(StepTactic(2, 2, 4)):
        assert_step(model)


@pytest.mark.sim
@pytest.mark.compile
def test_many_pages_without_a_race() -> None:
    """More than a CTA has in shared memory, and more blocks of tokens than warps; shares of pages differ by one."""
    model = Model.random("cpu", (256, 3, 1, 128), 1, 64 * 14 - 5, more=True)
    with sim.device("sm_90a", races=True), DECODE_STEP.forced(StepTactic(2, 2, 4)):
        assert_step(model)


@pytest.mark.gpu
@pytest.mark.parametrize(("tokens", "dtype"), [(1, torch.bfloat16), (129, torch.float16), (2048, torch.bfloat16)])
@pytest.mark.parametrize("more", [False, True], ids=["plain", "more"])
def test_on_a_gpu(tokens: int, dtype: torch.dtype, more: bool) -> None:
    sizes = (3584, 28, 4, 18944) if more else (4096, 32, 8, 14336)
    model = Model.random("cuda", sizes, 2, tokens, dtype, more=more)
    first = assert_step(model)
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

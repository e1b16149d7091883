"""nano-vllm's contexts through jitfp4's attention. Its modules are stood in for; block tables are as it makes them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional

from jitfp4.errors import ArgumentError

pytest.importorskip("safetensors")
from jitfp4.integrations.nano_vllm import PAGE, Attention, Head, Pages, Step, fuse_glue, install, quantize_linears

HEADS, KV_HEADS, HEAD_DIM, BLOCK = 4, 2, 64, 2 * PAGE
SCALE = HEAD_DIM**-0.5


@dataclass
class Context:
    """The fields of nanovllm.utils.context.Context."""

    is_prefill: bool = False
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    max_seqlen_q: int = 0
    max_seqlen_k: int = 0
    slot_mapping: torch.Tensor | None = None
    context_lens: torch.Tensor | None = None
    block_tables: torch.Tensor | None = None


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.fixture
def context(monkeypatch: pytest.MonkeyPatch) -> Callable[[Context], None]:
    """Makes a context the one that nano-vllm's get_context() returns."""
    module = ModuleType("nanovllm.utils.context")
    monkeypatch.setitem(sys.modules, "nanovllm.utils.context", module)

    def enter(given: Context) -> None:
        module.__dict__["get_context"] = lambda: given

    return enter


def expected(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The last len(q) tokens of a request over all of its keys and values [tokens, heads, d]."""
    q, k, v = (states.float().transpose(0, 1) for states in (q, k, v))
    seen = torch.ones(q.shape[1], k.shape[1]).tril(k.shape[1] - q.shape[1]).bool()
    return functional.scaled_dot_product_attention(q, k, v, seen, scale=SCALE, enable_gqa=True).transpose(0, 1)


@pytest.mark.parametrize(("cache", "least"), [("bf16", 0.01), ("nvfp4", 0.2)])
def test_prefill_chunks_and_decode(cache: str, least: float, context: Callable[[Context], None]) -> None:
    generator = torch.Generator().manual_seed(0)

    def random(tokens: int, heads: int) -> torch.Tensor:
        return torch.randn(tokens, heads, HEAD_DIM, generator=generator).bfloat16()

    layers = [Attention(HEADS, HEAD_DIM, SCALE, KV_HEADS) for _ in range(2)]
    step = Step(torch.device("cpu"))
    blocks, before, new = [[3, 1], [0]], (0, 0), (BLOCK + 3, 40)
    for number, layer in enumerate(layers):
        layer.pages = Pages.new(cache, 8, KV_HEADS, HEAD_DIM, torch.device("cpu"), 2.0**-9)
        layer.step, layer.is_first = step, number == 0
    keys = [[random(0, KV_HEADS)] * 2 for _ in layers]
    values = [[random(0, KV_HEADS)] * 2 for _ in layers]
    for new in ((BLOCK + 3, 40), (5, 9), (1, 1)):
        ends = [old + count for old, count in zip(before, new, strict=True)]
        slots = [blocks[r][i // BLOCK] * BLOCK + i % BLOCK for r in range(2) for i in range(before[r], ends[r])]
        tables = torch.tensor([[3, 1], [0, -1]], dtype=torch.int32)
        decode = new == (1, 1)
        context(
            Context(slot_mapping=int32(*slots), context_lens=int32(*ends), block_tables=tables)
            if decode
            else Context(
                True,
                int32(0, new[0], sum(new)),
                int32(0, ends[0], sum(ends)),
                max(new),
                max(ends),
                int32(*slots),
                None,
                None if before == (0, 0) else tables,
            )
        )
        for number, layer in enumerate(layers):
            q, k, v = random(sum(new), HEADS), random(sum(new), KV_HEADS), random(sum(new), KV_HEADS)
            parts = zip(q.split(new), k.split(new), v.split(new), strict=True)
            wanted = []
            for r, (own_q, own_k, own_v) in enumerate(parts):
                keys[number][r] = torch.cat((keys[number][r], own_k))
                values[number][r] = torch.cat((values[number][r], own_v))
                wanted.append(expected(own_q, keys[number][r], values[number][r]))
            got, want = layer(q, k, v).float(), torch.cat(wanted)
            assert torch.linalg.norm(got - want) < least * torch.linalg.norm(want)
        before = (ends[0], ends[1])


def test_tokens_without_a_slot_and_empty_requests(context: Callable[[Context], None]) -> None:
    """As a captured graph for more requests than there are has them."""
    for cache in ("bf16", "nvfp4"):
        layer = Attention(HEADS, HEAD_DIM, SCALE, KV_HEADS)
        layer.pages = Pages.new(cache, 2, KV_HEADS, HEAD_DIM, torch.device("cpu"), 2.0**-9)
        layer.step, layer.is_first = Step(torch.device("cpu")), True
        tables = torch.zeros(2, 1, dtype=torch.int32)
        context(Context(slot_mapping=int32(0, -1), context_lens=int32(1, 0), block_tables=tables))
        q, k = torch.ones(2, HEADS, HEAD_DIM).bfloat16(), torch.ones(2, KV_HEADS, HEAD_DIM).bfloat16()
        out = layer(q, k, torch.stack((k[0], 9 * k[1])))
        torch.testing.assert_close(out[0], q[0], rtol=0.05, atol=0)
        assert not out[1].any()
        assert not layer.pages.value[:2].transpose(1, 2).flatten(0, 1)[1:].any()


class RMSNorm(nn.Module):
    """As nano-vllm's, without torch.compile, and in double precision."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(size).bfloat16() + 0.5), 1e-6

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor | tuple[torch.Tensor, ...]:
        total = x.double() if residual is None else x.double() + residual.double()
        normal = functional.rms_norm(total, total.shape[-1:], self.weight.double(), self.eps).to(x.dtype)
        return normal if residual is None else (normal, total.to(x.dtype))


class RotaryEmbedding(nn.Module):
    """As nano-vllm's, without torch.compile."""

    def __init__(self) -> None:
        super().__init__()
        angles = torch.outer(torch.arange(64.0), 100.0 ** (-torch.arange(HEAD_DIM // 2) / (HEAD_DIM // 2)))
        self.cos_sin_cache = torch.cat((angles.cos(), angles.sin()), -1).unsqueeze(1)

    def forward(self, positions: torch.Tensor, *heads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        cos, sin = self.cos_sin_cache[positions].chunk(2, -1)
        halves = [x.float().chunk(2, -1) for x in heads]
        return tuple(torch.cat((a * cos - b * sin, b * cos + a * sin), -1).bfloat16() for a, b in halves)


class Owner(nn.Module):
    """As nano-vllm's Qwen3Attention, without its linear layers, and a norm of rows."""

    def __init__(self, cache: str, qkv_bias: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.rotary_emb, self.qkv_bias = RMSNorm(2 * HEADS * HEAD_DIM), RotaryEmbedding(), qkv_bias
        if not qkv_bias:
            self.q_norm, self.k_norm = RMSNorm(HEAD_DIM), RMSNorm(HEAD_DIM)
        self.attn = Attention(HEADS, HEAD_DIM, SCALE, KV_HEADS)
        self.attn.pages = Pages.new(cache, 4, KV_HEADS, HEAD_DIM, torch.device("cpu"), 2.0**-9)
        self.attn.step, self.attn.is_first = Step(torch.device("cpu")), True

    def forward(self, positions: torch.Tensor, qkv: torch.Tensor, residual: torch.Tensor) -> list[torch.Tensor]:
        qkv, residual = self.norm(qkv, residual)
        q, k, v = (x.unflatten(-1, (-1, HEAD_DIM)) for x in qkv.split([n * HEAD_DIM for n in (4, 2, 2)], -1))
        if not self.qkv_bias:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = self.rotary_emb(positions, q, k)
        return [self.attn(q, k, v), residual, self.norm(residual)]


@pytest.mark.parametrize(("cache", "least"), [("bf16", 0.01), ("nvfp4", 0.1)])
@pytest.mark.parametrize("qkv_bias", [False, True])
def test_norms_and_rotations_are_one_launch_with_the_append(
    cache: str, least: float, qkv_bias: bool, context: Callable[[Context], None]
) -> None:
    own, fused = Owner(cache, qkv_bias), Owner(cache, qkv_bias)
    assert fuse_glue(fused, RMSNorm) == 2 and isinstance(own.norm, RMSNorm) and not isinstance(fused.norm, RMSNorm)
    steps = [
        (Context(True, int32(0, 3, 7), int32(0, 3, 7), 4, 4, int32(256, 257, 258, 0, 1, 2, 3)), [0, 1, 2, 0, 1, 2, 3]),
        (Context(slot_mapping=int32(259, 4), context_lens=int32(4, 5), block_tables=int32(1, 0).view(2, 1)), [3, 4]),
    ]
    for step, positions in steps:
        context(step)
        x = [torch.randn(len(positions), 2 * HEADS * HEAD_DIM).bfloat16() for _ in range(2)]
        got, want = (model(torch.tensor(positions), x[0].clone(), x[1].clone()) for model in (fused, own))
        for one, other in zip(got, want, strict=True):
            assert torch.linalg.norm((one - other).float()) < least * torch.linalg.norm(other.float())


def test_before_there_are_pages_it_is_torchs(context: Callable[[Context], None]) -> None:
    layer = Attention(HEADS, HEAD_DIM, SCALE, KV_HEADS)
    q, k, v = torch.randn(7, HEADS, HEAD_DIM), torch.randn(7, KV_HEADS, HEAD_DIM), torch.randn(7, KV_HEADS, HEAD_DIM)
    context(Context(True, int32(0, 3, 7), int32(0, 3, 7), 4, 4))
    want = torch.cat([expected(q[a:b], k[a:b], v[a:b]) for a, b in ((0, 3), (3, 7))])
    torch.testing.assert_close(layer(q, k, v), want)


class LinearBase(nn.Module):
    """What nano-vllm's has: a weight, a bias, a dimension that ranks divide."""

    def __init__(self, tp_dim: int | None, tp_rank: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(24, 96).bfloat16())
        self.bias = nn.Parameter(torch.ones(24).bfloat16())
        self.tp_dim, self.tp_rank, self.tp_size = tp_dim, tp_rank, 1


class SiluAndMul(nn.Module):
    """As nano-vllm's, without torch.compile."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, y = x.chunk(2, -1)
        return functional.silu(x) * y


class Mlp(nn.Module):
    """As nano-vllm's Qwen3MLP."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj, self.act_fn = LinearBase(0, 0), LinearBase(1, 0), activation
        self.gate_up_proj.weight = nn.Parameter(torch.randn(192, 96).bfloat16() / 4)
        self.gate_up_proj.bias = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate_up = self.gate_up_proj(x)
        x = self.act_fn(gate_up)
        return self.down_proj(x)


def test_the_product_of_gates_and_ups_applies_the_activation() -> None:
    torch.manual_seed(0)
    mlp, x = Mlp(SiluAndMul()), torch.randn(3, 96).bfloat16()
    assert quantize_linears(mlp, LinearBase, SiluAndMul) == 2
    layer = mlp.gate_up_proj.layer
    gate, up = (x.float() @ layer.dequantize().T).chunk(2, -1)
    got = mlp.act_fn(mlp.gate_up_proj(x))
    torch.testing.assert_close(got.float(), functional.silu(gate) * up, rtol=2**-7, atol=1e-3)
    torch.testing.assert_close(mlp(x), mlp.down_proj(got))
    other = Mlp(nn.Tanh())
    assert quantize_linears(other, LinearBase, SiluAndMul) == 2
    assert other.gate_up_proj(x).shape == (3, 192) and isinstance(other.act_fn, nn.Tanh)


def test_linear_layers_are_replaced() -> None:
    for tp_dim, tp_rank, has_bias in ((0, 1, True), (1, 0, True), (1, 1, False)):
        model = nn.Sequential(LinearBase(tp_dim, tp_rank))
        weight = model[0].weight.detach().clone()
        assert quantize_linears(model, LinearBase, SiluAndMul) == 1
        x = torch.randn(3, 96).bfloat16()
        want = x @ weight.T + (1 if has_bias else 0)
        assert torch.linalg.norm(model(x) - want) < 0.2 * torch.linalg.norm(want)
        assert (model[0].layer.bias is not None) == has_bias


def test_the_head_takes_the_last_token_of_each_request(context: Callable[[Context], None]) -> None:
    head = LinearBase(0, 0)
    x, last = torch.randn(7, 96).bfloat16(), torch.tensor([2, 6])
    for given, rows in ((Context(True, int32(0, 3, 7), int32(0, 3, 7), 4, 4), x[last]), (Context(), x)):
        context(given)
        want = rows @ head.weight.T
        got = Head(head)(x)
        assert got.shape == want.shape and torch.linalg.norm(got - want) < 0.2 * torch.linalg.norm(want)
    head.tp_size = 2
    with pytest.raises(ArgumentError, match="fp4_head: got a head of 2 ranks"):
        Head(head)


def test_it_is_put_in_place_before_the_import_and_not_after(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, linear = ModuleType("nanovllm.engine.model_runner"), ModuleType("nanovllm.layers.linear")
    activation, norm = ModuleType("nanovllm.layers.activation"), ModuleType("nanovllm.layers.layernorm")
    loaded = []
    runner.__dict__.update(load_model=lambda _, path: loaded.append(path), ModelRunner=type("ModelRunner", (), {}))
    linear.__dict__.update(LinearBase=LinearBase)
    activation.__dict__.update(SiluAndMul=SiluAndMul)
    norm.__dict__.update(RMSNorm=RMSNorm)
    packages = {name: ModuleType(name) for name in ("nanovllm", "nanovllm.engine", "nanovllm.layers")}
    packages["nanovllm.engine"].__dict__["model_runner"] = runner
    packages |= {module.__name__: module for module in (runner, linear, activation, norm)}
    for name, module in packages.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "nanovllm.layers.attention", ModuleType("nanovllm.layers.attention"))
    with pytest.raises(ArgumentError, match="nanovllm: got imported already"):
        install()
    monkeypatch.delitem(sys.modules, "nanovllm.layers.attention")
    install()
    install(fp4_head=True)
    assert sys.modules.pop("nanovllm.layers.attention").Attention is Attention
    model = nn.Sequential(LinearBase(0, 0), RMSNorm(96))
    model.lm_head = SimpleNamespace(weight=torch.randn(24, 96).bfloat16(), tp_size=1)
    runner.load_model(model, "here")
    assert loaded == ["here"] and isinstance(model.lm_head, Head)
    assert not isinstance(model[0], LinearBase) and not isinstance(model[1], RMSNorm)
    with pytest.raises(ArgumentError, match="cache: got 'fp8'"):
        install(cache="fp8")

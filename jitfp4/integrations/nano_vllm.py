"""nano-vllm on jitfp4: its attention over pages in NVFP4 or bf16, its linear layers in FP4, and its norms.

>>> from jitfp4.integrations.nano_vllm import install
>>> install()
>>> from nanovllm import LLM

nano-vllm (https://github.com/GeeeekExplorer/nano-vllm) has no hooks: install() puts a module in the place of
``nanovllm.layers.attention``, which needs flash-attn, and replaces two functions of its model runner. A block of its
cache, 256 tokens, is two pages.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional

from jitfp4.errors import ArgumentError
from jitfp4.families.attention import trtllm_batch_context_with_kv_cache, trtllm_batch_decode_with_kv_cache
from jitfp4.families.attention.api import new_workspace
from jitfp4.families.kv import (
    nvfp4_quantize_append_paged_kv_cache_with_slot_mapping,
    rope_append_paged_kv_cache,
)
from jitfp4.families.kv.kernels.rope_append import ROTARY
from jitfp4.families.norm import fused_add_rmsnorm, rmsnorm
from jitfp4.integrations.layers import Fp4Linear, quantized, regular

PAGE = 128
_CACHES = ("nvfp4", "bf16")
_GATE_UP = "concatenated gate,up"  # rows of a rank's part, too


class Step:
    """Pages [batch, columns] and lengths [batch] of a step's requests, for all layers, and their scratch memory."""

    def __init__(self, device: torch.device) -> None:
        self.workspace = new_workspace(device)
        self.tables = torch.zeros(0, 0, dtype=torch.int32, device=device)
        self.lengths = torch.zeros(0, dtype=torch.int32, device=device)

    def begin(self, context: Any) -> None:
        """Take the requests of nano-vllm's context. A captured graph does so each time: the first layer calls it."""
        self.lengths = context.cu_seqlens_k.diff() if context.is_prefill else context.context_lens
        if context.block_tables is not None:
            self.tables = torch.stack((2 * context.block_tables, 2 * context.block_tables + 1), -1).flatten(1)
            return
        # whole requests, whose slots tell their pages
        starts = torch.arange(0, context.max_seqlen_k, PAGE, device=self.lengths.device)
        firsts = (context.cu_seqlens_q[:-1].unsqueeze(1) + starts).clamp(max=len(context.slot_mapping) - 1)
        self.tables = (context.slot_mapping[firsts] // PAGE).to(torch.int32)


class Norm(nn.Module):
    """RMSNorm of rows, or of their sum with ``residual``, which is updated in place."""

    def __init__(self, own: Any) -> None:
        super().__init__()
        self.weight, self.eps = own.weight.data, own.eps

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        if residual is None:
            return rmsnorm(x, self.weight, self.eps)
        fused_add_rmsnorm(x, residual, self.weight, self.eps)
        return x, residual


class Rotation(nn.Module):
    """In the place of the rotation of an attention layer, ``owner``: it is left to where keys are appended.

    So are the norms of heads. ``table`` is float32 [positions, d], of each position the cosines, then the sines.
    """

    def __init__(self, owner: Any) -> None:
        super().__init__()
        self.table = owner.rotary_emb.cos_sin_cache.flatten(0, 1)
        self.positions = torch.zeros(0, dtype=torch.int64, device=self.table.device)  # of a step's tokens
        self.norms: dict[str, Any] = {}
        if hasattr(owner, "q_norm"):
            weights = owner.q_norm.weight.data, owner.k_norm.weight.data
            self.norms = {"q_norm_weight": weights[0], "k_norm_weight": weights[1], "eps": owner.q_norm.eps}

    def forward(self, positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.positions = positions
        return q, k


@dataclass(slots=True)
class Pages:
    """Keys and values of a layer, [pages, kv_heads, page, ...], scales, and decode scales float32 [1].

    In bf16 there is one page more: tokens without a slot are written there.
    """

    key: torch.Tensor
    value: torch.Tensor
    scales: tuple[torch.Tensor, torch.Tensor] | None
    factors: tuple[torch.Tensor, torch.Tensor] | None
    order: str

    @staticmethod
    def new(cache: str, pages: int, heads: int, head_dim: int, device: torch.device, decode_scale: float) -> Pages:
        """Pages of zeros."""
        if cache == "bf16":
            key, value = (
                torch.zeros(pages + 1, heads, PAGE, head_dim, dtype=torch.bfloat16, device=device) for _ in range(2)
            )
            return Pages(key, value, None, None, "linear")
        key, value = (
            torch.zeros(pages, heads, PAGE, head_dim // 2, dtype=torch.uint8, device=device) for _ in range(2)
        )
        first, second = (
            torch.zeros(pages, heads, PAGE, head_dim // 16, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
            for _ in range(2)
        )
        factor = torch.tensor([decode_scale], dtype=torch.float32, device=device)
        order = "interleaved4" if head_dim % 64 == 0 else "linear"
        return Pages(key, value, (first, second), (factor, factor), order)

    def append(self, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
        """Write tokens [n, kv_heads, d] to their slots; those with slot -1 nowhere."""
        if self.scales is None or self.factors is None:
            places = torch.where(slots < 0, self.key.shape[0] * PAGE - 1, slots).long()
            for pages, states in ((self.key, key), (self.value, value)):
                pages[places // PAGE, :, places % PAGE] = states
            return
        nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(
            key,
            value,
            slots,
            (self.key, self.value),
            self.scales,
            *self.factors,
            kv_layout="HND",
            v_sf_layout=self.order,
        )

    def turn_and_append(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor, rotation: Rotation
    ) -> torch.Tensor:
        """Likewise, after norms and a rotation of ``k``, and of ``q`` [n, heads, d], which is returned."""
        return rope_append_paged_kv_cache(
            q,
            k,
            v,
            rotation.table,
            rotation.positions,
            slots,
            (self.key, self.value),
            self.scales,
            *(self.factors or ()),
            is_neox=True,
            kv_layout="HND",
            v_sf_layout=self.order,
            **rotation.norms,
        )

    def products(self, scale: float) -> tuple[Any, Any]:
        """What products with keys and with values are multiplied by."""
        return (scale, 1.0) if self.factors is None else (scale * self.factors[0], self.factors[1])


class Attention(nn.Module):
    """In the place of nano-vllm's, with its arguments: q [tokens, heads, d], k and v [tokens, kv_heads, d]."""

    def __init__(self, num_heads: int, head_dim: int, scale: float, num_kv_heads: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.scale, self.num_kv_heads = num_heads, head_dim, scale, num_kv_heads
        self.pages: Pages | None = None
        self.step: Step | None = None
        self.is_first = False
        self.rotation: Rotation | None = None
        self._products: tuple[Any, Any] | None = None

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """[tokens, heads, d]. Before there are pages, when memory is measured, it is torch's, without rotation."""
        context = sys.modules["nanovllm.utils.context"].get_context()
        if self.pages is None or self.step is None:
            return self._without_pages(q, k, v, context)
        q, k, v = regular(q), regular(k), regular(v)
        if self.rotation is None:
            self.pages.append(k, v, context.slot_mapping)
        else:
            q = self.pages.turn_and_append(q, k, v, context.slot_mapping, self.rotation)
        if self.is_first:
            self.step.begin(context)
        tables, lengths = self.step.tables, self.step.lengths
        if self._products is None:
            self._products = self.pages.products(self.scale)
        first = (q, (self.pages.key, self.pages.value), self.step.workspace, tables, lengths)
        options: dict[str, Any] = {
            "kv_layout": "HND",
            "kv_cache_sf": self.pages.scales,
            "v_scale_layout": self.pages.order,
        }
        out: Any
        if context.is_prefill:
            ends = context.cu_seqlens_q, context.cu_seqlens_k
            sizes = context.max_seqlen_q, context.max_seqlen_k
            out = trtllm_batch_context_with_kv_cache(*first, *sizes, *self._products, len(lengths), *ends, **options)
        else:
            out = trtllm_batch_decode_with_kv_cache(*first, tables.shape[1] * PAGE, *self._products, **options)
        return cast("torch.Tensor", out if isinstance(out, torch.Tensor) else out[0])

    def _without_pages(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, context: Any) -> torch.Tensor:
        ends = context.cu_seqlens_q.tolist()
        outs = []
        for begin, end in itertools.pairwise(ends):
            one, two, three = (states[begin:end].transpose(0, 1).unsqueeze(0) for states in (q, k, v))
            out = functional.scaled_dot_product_attention(
                one, two, three, is_causal=True, scale=self.scale, enable_gqa=True
            )
            outs.append(out[0].transpose(0, 1))
        return torch.cat(outs)


class _Linear(nn.Module):
    """A linear layer of a rank; the parts of rows are added up over ranks. ``order``: of gates and ups, for SwiGLU."""

    def __init__(self, own: Any, order: str | None = None) -> None:
        super().__init__()
        rows, cols = own.weight.shape
        rows_are_parts = own.tp_dim == 1
        self.reduce = rows_are_parts and own.tp_size > 1
        self.layer = Fp4Linear(cols, rows, False, own.weight.dtype)
        self.layer.load(quantized(own.weight.data), order)
        self.layer.bias = own.bias if not rows_are_parts or own.tp_rank == 0 else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x)
        if self.reduce:
            out = out.contiguous()
            torch.distributed.all_reduce(out)
        return out


class Head(nn.Module):
    """The product with the embedding's transpose of the last token of each request, [requests, vocabulary]."""

    def __init__(self, own: Any) -> None:
        super().__init__()
        if own.tp_size > 1:
            raise ArgumentError("fp4_head", f"a head of {own.tp_size} ranks", "one rank")
        rows, cols = own.weight.shape
        self.layer = Fp4Linear(cols, rows, False, own.weight.dtype)
        self.layer.load(quantized(own.weight.data))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        context = sys.modules["nanovllm.utils.context"].get_context()
        if context.is_prefill:
            x = x[context.cu_seqlens_q[1:].long() - 1]
        out: torch.Tensor = self.layer(x)
        return out


def quantize_linears(model: nn.Module, base: type[nn.Module], activation: type[nn.Module]) -> int:
    """Replace the linear layers, instances of nano-vllm's LinearBase, one after the other. Returns how many.

    Where an MLP's gates and ups go through its SiluAndMul, ``activation``, their product applies it instead.
    """
    found = [(name, module) for name, module in model.named_modules() if isinstance(module, base)]
    for name, module in found:
        parent, _, child = name.rpartition(".")
        owner, order = model.get_submodule(parent), None
        if child == "gate_up_proj" and isinstance(getattr(owner, "act_fn", None), activation):
            owner.act_fn, order = nn.Identity(), _GATE_UP
        setattr(owner, child, _Linear(module, order))
    return len(found)


def fuse_glue(model: nn.Module, norm: type[nn.Module]) -> int:
    """Replace norms, instances of nano-vllm's RMSNorm, ``norm``, and rotations. Returns how many.

    Rotations of heads whose size is no multiple of 32 stay.
    """
    count = 0
    for owner in list(model.modules()):
        attention = getattr(owner, "attn", None)
        if isinstance(attention, Attention) and attention.head_dim % ROTARY == 0:
            attention.rotation = owner.rotary_emb = Rotation(owner)
            if attention.rotation.norms:
                owner.q_norm, owner.k_norm = nn.Identity(), nn.Identity()
            count += 1
        for child, module in owner.named_children():
            if isinstance(module, norm):
                setattr(owner, child, Norm(module))
                count += 1
    return count


def install(
    *,
    fp4_weights: bool = True,
    fp4_head: bool = False,
    glue: bool = True,
    cache: str = "nvfp4",
    decode_scale: float = 0.125,
    load_weights: Callable[[nn.Module, str], None] | None = None,
) -> None:
    """Put jitfp4 into nano-vllm, before ``nanovllm`` is imported.

    Args:
        fp4_weights: whether linear layers are quantized to NVFP4 when they are loaded.
        fp4_head: whether the head is, too; on one rank only. The embedding keeps its floats.
        glue: whether norms are jitfp4's, and heads are normalised, rotated and appended in one launch.
        cache: "nvfp4" or "bf16".
        decode_scale: of keys and values in NVFP4, any power of two near 2688 times less than the largest of them; with
            0.125, they are up to 336, and blocks whose largest is below 0.012 lose precision.
        load_weights: in place of nano-vllm's, which reads safetensors files of a folder; gets the model and the folder.
    Raises:
        ArgumentError: for another cache, or if nano-vllm's attention was imported already.
    """
    if cache not in _CACHES:
        raise ArgumentError("cache", repr(cache), " or ".join(map(repr, _CACHES)))
    name = "nanovllm.layers.attention"
    if name in sys.modules and not hasattr(sys.modules[name], "of_jitfp4"):
        raise ArgumentError("nanovllm", "imported already", "install() before it is imported")
    module = ModuleType(name)
    module.__dict__.update(Attention=Attention, of_jitfp4=True)
    sys.modules[name] = module
    from nanovllm.engine import model_runner
    from nanovllm.layers.activation import SiluAndMul
    from nanovllm.layers.layernorm import RMSNorm
    from nanovllm.layers.linear import LinearBase

    load = getattr(model_runner.load_model, "of_nano_vllm", model_runner.load_model)

    def load_model(model: nn.Module, path: str) -> None:
        (load_weights or load)(model, path)
        if fp4_weights:
            quantize_linears(model, LinearBase, SiluAndMul)
        if fp4_head:
            model.lm_head = Head(model.lm_head)
        if glue:
            fuse_glue(model, RMSNorm)

    def allocate_kv_cache(runner: Any) -> None:
        _allocate(runner, cache, decode_scale)

    load_model.of_nano_vllm = load  # type: ignore[attr-defined]
    model_runner.load_model = load_model
    model_runner.ModelRunner.allocate_kv_cache = allocate_kv_cache


def _allocate(runner: Any, cache: str, decode_scale: float) -> None:
    """As many blocks as the memory that nano-vllm's configuration allows."""
    config = runner.config
    free, total = torch.cuda.mem_get_info()
    stats = torch.cuda.memory_stats()
    taken = total - free + stats["allocated_bytes.all.peak"] - stats["allocated_bytes.all.current"]
    layers = [module for module in runner.model.modules() if isinstance(module, Attention)]
    heads, head_dim = layers[0].num_kv_heads, layers[0].head_dim
    row = 2 * head_dim if cache == "bf16" else head_dim // 2 + head_dim // 16
    block = 2 * len(layers) * runner.block_size * heads * row
    step = Step(torch.device("cuda", torch.cuda.current_device()))
    spare = step.workspace.nbytes + 2 * len(layers) * PAGE * heads * row
    config.num_kvcache_blocks = int(total * config.gpu_memory_utilization - taken - spare) // block
    if config.num_kvcache_blocks <= 0:
        raise ArgumentError("gpu_memory_utilization", config.gpu_memory_utilization, "room for a block of the cache")
    if runner.block_size != 2 * PAGE:
        raise ArgumentError("kvcache_block_size", runner.block_size, f"{2 * PAGE}")
    pages = 2 * config.num_kvcache_blocks
    for number, layer in enumerate(layers):
        layer.pages = Pages.new(cache, pages, heads, head_dim, step.workspace.device, decode_scale)
        layer.step, layer.is_first = step, number == 0

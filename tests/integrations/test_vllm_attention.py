"""The attention backend for vLLM against vLLM's own classes, on the CPU: caches, steps, decode, prefill, append."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm.config import CacheConfig, DeviceConfig, ModelConfig, VllmConfig, set_current_vllm_config
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import FullAttentionSpec, get_kv_quant_mode

from jitfp4 import nvfp4_kv_dequantize, nvfp4_kv_quantize
from jitfp4.integrations.vllm.attention import Jitfp4AttentionBackend, Jitfp4AttentionImpl, Jitfp4MetadataBuilder

PAGE, PAGES = 16, 32
K_SCALE, V_SCALE = 0.5, 2.0
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 128,
    "max_position_embeddings": 512,
}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmConfig]:
    folder = Path(tmp_path_factory.mktemp("model"))
    (folder / "config.json").write_text(json.dumps(LLAMA))
    model = ModelConfig(model=str(folder), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=512)
    config = VllmConfig(model_config=model, cache_config=CacheConfig(), device_config=DeviceConfig(device="cpu"))
    with set_current_vllm_config(config):
        yield config


def spec_of(head_dim: int, cache_dtype: str, kv_heads: int = 2) -> Any:
    """A layer's cache as vLLM describes it, after the backend's adjustments."""
    mode = get_kv_quant_mode(cache_dtype)
    dtype = torch.uint8 if cache_dtype == "nvfp4" else torch.bfloat16
    spec = FullAttentionSpec(
        block_size=PAGE, num_kv_heads=kv_heads, head_size=head_dim, dtype=dtype, kv_quant_mode=mode
    )
    return Jitfp4AttentionBackend.customize_spec(spec) if hasattr(spec, "state_content_bytes") else spec


def define_append() -> torch.library.Library:
    """vLLM's operator that writes 16-bit keys and values into pages; its extension is not here."""
    library = torch.library.Library("_C_cache_ops", "FRAGMENT")
    name = "reshape_and_cache_flash"
    if not hasattr(torch.ops._C_cache_ops, name):
        caches = "Tensor(a!) key_cache, Tensor(b!) value_cache"
        rest = "Tensor slot_mapping, str kv_cache_dtype, Tensor k_scale, Tensor v_scale"
        library.define(f"{name}(Tensor key, Tensor value, {caches}, {rest}) -> ()")

        def write(key: Any, value: Any, key_cache: Any, value_cache: Any, slots: Any, dtype: str, *_: Any) -> None:
            assert dtype == "auto"
            live = slots >= 0
            page, token = slots[live] // key_cache.shape[1], slots[live] % key_cache.shape[1]
            key_cache[page, token], value_cache[page, token] = key[live], value[live]

        library.impl(name, write, "CPU")
    return library


_library = define_append()


class Model:
    """A layer, its cache, and the tokens that it has seen."""

    def __init__(
        self,
        config: VllmConfig,
        head_dim: int,
        cache_dtype: str = "nvfp4",
        window: int | None = None,
        sinks: bool = False,
    ) -> None:
        self.head_dim, self.heads, self.kv_heads, self.window = head_dim, 4, 2, window
        self.spec = spec_of(head_dim, cache_dtype)
        self.builder = Jitfp4MetadataBuilder(self.spec, ["layer"], config, torch.device("cpu"))
        given = torch.randn(self.heads, dtype=torch.bfloat16) if sinks else None
        self.impl = Jitfp4AttentionImpl(
            self.heads, head_dim, head_dim**-0.5, self.kv_heads, None, window, cache_dtype, sinks=given
        )
        self.impl.process_weights_after_loading(torch.bfloat16)
        shape = Jitfp4AttentionBackend.get_kv_cache_shape(PAGES, PAGE, self.kv_heads, head_dim, cache_dtype)
        self.cache = torch.full((PAGES * self.spec.page_size_bytes,), 0x55, dtype=torch.uint8).view(self.spec.dtype)
        self.cache = self.cache.view(shape)
        self.is_nvfp4 = cache_dtype == "nvfp4"
        scales = {"_k_scale": torch.tensor(K_SCALE), "_v_scale": torch.tensor(V_SCALE)}
        self.layer: Any = SimpleNamespace(**scales, _k_scale_float=K_SCALE, _v_scale_float=V_SCALE)
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self.tables = torch.randperm(PAGES, generator=torch.Generator().manual_seed(0)).to(torch.int32).view(4, -1)

    def run(self, lengths: list[tuple[int, int]]) -> None:
        """One step in which request r has ``lengths[r]``: tokens before the step, and new ones. Checks its output."""
        new = torch.tensor([count for _, count in lengths])
        total = int(new.sum())
        starts = torch.tensor([0, *new.cumsum(0).tolist()], dtype=torch.int32)
        seq_lens = torch.tensor([before + count for before, count in lengths], dtype=torch.int32)
        made = torch.Generator().manual_seed(total)
        query, key, value = (
            torch.randn(total, heads, self.head_dim, generator=made).bfloat16()
            for heads in (self.heads, self.kv_heads, self.kv_heads)
        )
        slots = [
            int(self.tables[r, at // PAGE]) * PAGE + at % PAGE
            for r, (before, count) in enumerate(lengths)
            for at in range(before, before + count)
        ]
        common = CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=seq_lens,
            num_reqs=len(lengths),
            num_actual_tokens=total,
            max_query_len=int(new.max()),
            max_seq_len=int(seq_lens.max()),
            block_table_tensor=self.tables[: len(lengths)],
            slot_mapping=torch.tensor(slots),
        )
        step = self.builder.build(0, common)
        self.impl.do_kv_cache_update(self.layer, key, value, self.cache, common.slot_mapping)
        out = torch.full_like(query, torch.nan)
        self.impl.forward(self.layer, query, key, value, self.cache, step, out)
        for r, (before, _) in enumerate(lengths):
            own = slice(int(starts[r]), int(starts[r + 1]))
            if before == 0:
                self.keys.insert(r, key[own])
                self.values.insert(r, value[own])
            else:
                self.keys[r] = torch.cat((self.keys[r][:before], key[own]))
                self.values[r] = torch.cat((self.values[r][:before], value[own]))
            exact = self.exact(query[own], self.stored(self.keys[r], K_SCALE), self.stored(self.values[r], V_SCALE))
            assert ((out[own].double() - exact).abs() <= 2**-7 * exact.abs() + 2**-8).all()

    def stored(self, rows: torch.Tensor, scale: float) -> torch.Tensor:
        """What the cache holds of ``rows``."""
        if not self.is_nvfp4:
            return rows.double()
        codes, block_scales = nvfp4_kv_quantize(rows.reshape(-1, self.head_dim), scale)
        return nvfp4_kv_dequantize(codes, block_scales, scale).view_as(rows).double()

    def exact(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Attention in float64."""
        group = self.heads // self.kv_heads
        keys, values = (side.repeat_interleave(group, 1) for side in (keys, values))
        logits = torch.einsum("qhd,khd->hqk", query.double(), keys) * self.head_dim**-0.5
        own = torch.arange(len(keys) - len(query), len(keys))[:, None]
        at = torch.arange(len(keys))[None]
        hidden = at > own if self.window is None else (at > own) | (at <= own - self.window)
        logits = logits.masked_fill(hidden, -torch.inf)
        if self.impl.sinks is not None:
            sinks = self.impl.sinks.double()[:, None, None].expand(-1, len(query), 1)
            logits = torch.cat((logits, sinks), -1)
        weights = logits.softmax(-1)[..., : len(keys)]
        return torch.einsum("hqk,khd->qhd", weights, values)


@pytest.mark.parametrize("cache_dtype", ["nvfp4", "auto"])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize(("window", "sinks"), [(None, False), (None, True), (12, False), (12, True)])
def test_steps_equal_exact_attention_over_the_cache(
    config: VllmConfig, head_dim: int, window: int | None, sinks: bool, cache_dtype: str
) -> None:
    model = Model(config, head_dim, cache_dtype, window, sinks)
    model.run([(0, 37), (0, 10)])  # prompts
    model.run([(37, 1), (10, 1)])  # decode
    model.run([(38, 1), (11, 20), (0, 5)])  # decode, a chunk of a prompt, and a new prompt
    for step in range(4):
        model.run([(39 + step, 1), (31 + step, 1), (5 + 9 * step, 9)])  # a prompt in chunks beside decode
    model.run([(43, 1), (35, 1), (41, 1)])


def test_padded_requests_of_a_captured_step_read_nothing(config: VllmConfig) -> None:
    model = Model(config, 64)
    model.run([(0, 20)])
    padded = CommonAttentionMetadata(
        query_start_loc=torch.tensor([0, 1, 2], dtype=torch.int32),
        query_start_loc_cpu=torch.tensor([0, 1, 2], dtype=torch.int32),
        seq_lens=torch.tensor([20, 0], dtype=torch.int32),
        num_reqs=2,
        num_actual_tokens=2,
        max_query_len=1,
        max_seq_len=512,
        block_table_tensor=model.tables[:2],
        slot_mapping=torch.tensor([-1, -1]),
    )
    before = model.cache.clone()
    query = torch.randn(2, 4, 64).bfloat16()
    key = torch.randn(2, 2, 64).bfloat16()
    model.impl.do_kv_cache_update(model.layer, key, key, model.cache, padded.slot_mapping)
    out = torch.full_like(query, torch.nan)
    model.impl.forward(model.layer, query, key, key, model.cache, model.builder.build(0, padded), out)
    assert torch.equal(model.cache, before)
    assert not out[0].isnan().any() and not out[1].any()


def test_without_a_step_the_output_is_zero(config: VllmConfig) -> None:
    model = Model(config, 64)
    out = torch.full((3, 4, 64), torch.nan, dtype=torch.bfloat16)
    assert not model.impl.forward(model.layer, out, out, out, model.cache, None, out).any()


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("cache_dtype", ["nvfp4", "auto"])
def test_vllm_reserves_what_the_cache_takes(head_dim: int, cache_dtype: str) -> None:
    spec = spec_of(head_dim, cache_dtype, kv_heads=8)
    shape = Jitfp4AttentionBackend.get_kv_cache_shape(PAGES, PAGE, 8, head_dim, cache_dtype)
    elements = torch.Size(shape).numel() * spec.dtype.itemsize
    assert elements == PAGES * spec.page_size_bytes
    bits = 4.5 if cache_dtype == "nvfp4" else 16
    assert spec.page_size_bytes == 2 * 8 * PAGE * head_dim * bits / 8


def validate(**changes: Any) -> list[str]:
    arguments: dict[str, Any] = {
        "head_size": 64,
        "dtype": torch.bfloat16,
        "kv_cache_dtype": "nvfp4",
        "block_size": None,
        "use_mla": False,
        "has_sink": True,
        "use_sparse": False,
        "use_mm_prefix": False,
        "use_per_head_quant_scales": False,
        "device_capability": DeviceCapability(9, 0),
        "attn_type": "decoder",
        "has_sliding_window": True,
    }
    return Jitfp4AttentionBackend.validate_configuration(**arguments | changes)


def test_the_backend_serves_what_it_says() -> None:
    """gpt-oss: head dimension 64, sinks and windows over an NVFP4 cache on Hopper."""
    for changes in ({}, {"head_size": 256}, {"kv_cache_dtype": "auto"}, {"block_size": 64}):
        assert validate(**changes) == []
    for changes in (
        {"head_size": 72},
        {"kv_cache_dtype": "fp8"},
        {"block_size": 24},
        {"use_mla": True},
        {"dtype": torch.float32},
        {"attn_type": "encoder"},
        {"device_capability": DeviceCapability(7, 5)},
    ):
        assert len(validate(**changes)) == 1, changes


@pytest.mark.parametrize(
    "refused",
    [{"alibi_slopes": [1.0]}, {"logits_soft_cap": 30.0}, {"attn_type": "encoder"}, {"num_heads": 258}],
    ids=lambda refused: next(iter(refused)),
)
def test_layers_that_it_cannot_run_are_errors(refused: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {"num_heads": 4, "head_size": 64, "scale": 0.125, "num_kv_heads": 2} | refused
    with pytest.raises(NotImplementedError, match="jitfp4's attention backend has no"):
        Jitfp4AttentionImpl(**arguments)

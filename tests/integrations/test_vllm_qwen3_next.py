"""Qwen3-Next through vLLM's own classes with the plugin, against transformers' in float32: layer by layer, on the CPU.

Both have the values of the same FP4 weights. Every expert is chosen for every token, since which ones are among the
first few may hang on rounding. A prompt of more than one chunk is followed by single tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")
pytest.importorskip("transformers")

import transformers
from vllm import platforms
from vllm.config import CompilationConfig, DeviceConfig, ModelConfig, VllmConfig, set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata

import jitfp4.integrations.vllm as plugin
from bench.engines.models import VARIANTS, config_of, fill, fill_values, in_fp4, seed
from jitfp4.integrations.vllm.delta_rule import Fp4ModelGatedDeltaNet, Fp4ModelRMSNormGated
from jitfp4.integrations.vllm.experts import Fp4ExpertsMethod
from jitfp4.integrations.vllm.norms import Fp4ModelGemmaRMSNorm
from jitfp4.reference.formats import decode_e2m1, decode_e4m3, unpack_e2m1
from tests.support.vllm_layers import define_routing, one_rank

plugin.register()
_library = define_routing()

__all__ = ["one_rank"]  # a fixture of all tests here
pytestmark = pytest.mark.usefixtures("one_rank")

LAYERS, EXPERTS, PROMPT, STEPS, SLOT = 4, 4, 70, 3, 2
HEADS, KV_HEADS, D = 4, 2, 64
SMALL = {
    "hidden_size": 128,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": D,
    "vocab_size": 128,
    "num_experts": EXPERTS,
    "num_experts_per_tok": EXPERTS,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
IDS = 7 * torch.arange(PROMPT + STEPS) % 128


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """vLLM's model with the plugin, the values of its weights by name, and vLLM's configuration."""
    (tmp_path / "config.json").write_text(
        json.dumps(config_of("qwen3-next-80b-a3b", VARIANTS["plugin"], LAYERS) | SMALL)
    )
    platform = type(platforms.current_platform)
    monkeypatch.setattr(platform, "current_device", lambda *_: "cpu", raising=False)
    gdn = "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn.QwenGatedDeltaNetAttention"
    monkeypatch.setattr(f"{gdn}._warmup_prefill_kernels", lambda *_: None, raising=False)  # in Triton
    monkeypatch.setattr(platform, "get_attn_backend_cls", classmethod(lambda *_, **__: plugin.BACKEND))
    monkeypatch.setattr(Attention, "forward", attention)
    config = VllmConfig(
        model_config=ModelConfig(model=str(tmp_path), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=512),
        device_config=DeviceConfig(device="cpu"),
        compilation_config=CompilationConfig(mode=0, custom_ops=["none", "+rms_norm_gated", "+gemma_rms_norm"]),
    )
    before = torch.get_default_dtype()
    with set_current_vllm_config(config), torch.no_grad():
        torch.set_default_dtype(torch.bfloat16)
        model = initialize_model(vllm_config=config)
        seed(model)
        torch.manual_seed(0)
        for name, parameter in model.named_parameters():
            if name.endswith(("norm.weight", "dt_bias")):  # not all the same
                parameter.data.normal_(0.5, 0.5)
        values = values_of({name: tensor.clone() for name, tensor in model.named_parameters()})
        process_weights_after_loading(model, config.model_config, torch.device("cpu"))
        yield model, values, config
        torch.set_default_dtype(before)


def attention(layer: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> torch.Tensor:
    """Causal attention over all tokens that a layer has had: vLLM's own kernels are not here."""
    query, key, value = (x.view(len(query), -1, D).float() for x in (query, key, value))
    past = vars(layer).setdefault("past", (key[:0], value[:0]))
    key, value = layer.past = torch.cat((past[0], key)), torch.cat((past[1], value))
    hidden = torch.ones(len(query), len(key), dtype=torch.bool).tril(len(key) - len(query))
    whole = (x.transpose(0, 1).repeat_interleave(HEADS // x.shape[1], 0) for x in (query, key, value))
    out = torch.nn.functional.scaled_dot_product_attention(*whole, attn_mask=hidden)
    return out.transpose(0, 1).flatten(1).bfloat16()


def values_of(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights in float32: those in FP4 decoded, the others as they are."""
    found = {}
    for name, tensor in tensors.items():
        if name.endswith("weight_packed"):
            stem = name.removesuffix("_packed")
            scales = decode_e4m3(tensors[f"{stem}_scale"].view(torch.uint8)).float()
            blocks = decode_e2m1(unpack_e2m1(tensor)).float().unflatten(-1, (-1, 16))
            factor = tensors[f"{stem}_global_scale"].flatten()[0]
            found[stem] = (blocks * scales.unsqueeze(-1)).flatten(-2) / factor
        elif "_scale" not in name:
            found[name] = tensor.float()
    return found


def reference(values: dict[str, torch.Tensor]) -> Any:
    """The model in transformers, which has all of the weights and no others."""
    document = config_of("qwen3-next-80b-a3b", VARIANTS["bf16"], LAYERS) | SMALL
    config = transformers.Qwen3NextConfig(**document, pad_token_id=None)
    config._attn_implementation = config._experts_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    keys, state = D * KV_HEADS, {}
    for name, value in values.items():
        stem, _, last = name.rpartition(".")
        if stem.endswith("qkv_proj"):
            parts = value.split([len(value) - 2 * keys, keys, keys])
            state |= {f"{stem.replace('qkv', side)}.weight": part for side, part in zip("qkv", parts, strict=True)}
        elif stem.endswith("gate_up_proj"):
            for side, part in zip(("gate", "up"), value.chunk(2), strict=True):
                state[f"{stem.replace('gate_up', side)}.weight"] = part
        elif last in ("w13_weight", "w2_weight"):
            own = stem.replace(".routed_experts", "")
            state[f"{own}.{'gate_up_proj' if last == 'w13_weight' else 'down_proj'}"] = value
        else:
            state[name] = value
    wanted = model.state_dict()
    known = {name: value for name, value in state.items() if name in wanted}
    strange = {name for name in state if name not in wanted}
    assert all(".attn." in name for name in strange), strange  # scales of a cache
    model.load_state_dict(known)
    return model


def linear(tokens: int, first: bool) -> GDNAttentionMetadata:
    """A step of one request for layers of the delta rule: its prompt, or a token."""
    slots = torch.tensor([SLOT], dtype=torch.int32)
    starts = torch.tensor([0, tokens], dtype=torch.int32)
    known = torch.tensor([False])
    if not first:
        return GDNAttentionMetadata(
            num_prefills=0,
            num_prefill_tokens=0,
            num_decodes=1,
            num_decode_tokens=1,
            num_spec_decodes=0,
            num_spec_decode_tokens=0,
            num_actual_tokens=tokens,
            non_spec_query_start_loc=starts,
            non_spec_state_indices_tensor=slots,
        )
    return GDNAttentionMetadata(
        num_prefills=1,
        num_prefill_tokens=tokens,
        num_decodes=0,
        num_decode_tokens=0,
        num_spec_decodes=0,
        num_spec_decode_tokens=0,
        num_actual_tokens=tokens,
        has_initial_state=known,
        non_spec_query_start_loc=starts,
        non_spec_state_indices_tensor=slots,
        prefill_query_start_loc=starts,
        prefill_state_indices=slots,
        prefill_has_initial_state=known,
    )


def layers_of(model: Any) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Outputs of transformers' layers for all tokens at once [tokens, hidden], and logits."""
    found: list[torch.Tensor] = []
    hook = lambda _layer, _given, out: found.append((out[0] if isinstance(out, tuple) else out).view(len(IDS), -1))  # noqa: E731
    held = [layer.register_forward_hook(hook) for layer in model.model.layers]
    logits = model(IDS.unsqueeze(0)).logits[0]
    for each in held:
        each.remove()
    return found, logits


def test_layers_are_those_of_transformers(made: Any) -> None:
    """About as near to float32 as transformers' own in bf16."""
    model, values, config = made
    theirs = reference(values)
    want, logits = layers_of(theirs)
    rounded, rounded_logits = layers_of(theirs.bfloat16())

    got: list[list[torch.Tensor]] = [[] for _ in range(LAYERS)]
    rules = []
    for index, layer in enumerate(model.model.layers):
        layer.register_forward_hook(lambda _layer, _given, out, index=index: got[index].append(out[0] + out[1]))
        assert isinstance(layer.mlp.experts.routed_experts.quant_method, Fp4ExpertsMethod)
        assert type(layer.input_layernorm) is Fp4ModelGemmaRMSNorm and layer.input_layernorm.by_jitfp4
        if hasattr(layer, "linear_attn"):
            rule = layer.linear_attn
            assert type(rule) is Fp4ModelGatedDeltaNet and type(rule.norm) is Fp4ModelRMSNormGated and rule.by_jitfp4
            pairs = zip(rule.get_state_shape(), rule.get_state_dtype(), strict=False)
            rule.kv_cache = tuple(torch.randn(4, *shape).to(dtype) for shape, dtype in pairs)
            rules.append(rule.prefix)
    outs = []
    for begin, end in ((0, PROMPT), *((n, n + 1) for n in range(PROMPT, PROMPT + STEPS))):
        step: Any = {name: linear(end - begin, begin == 0) for name in rules}
        with set_forward_context(step, config, num_tokens=end - begin):
            outs.append(model(IDS[begin:end], torch.arange(begin, end)))
    assert len(rules) == LAYERS - 1
    ours = [*(torch.cat(steps) for steps in got), torch.cat(outs) @ model.lm_head.weight.T]
    for mine, other, exact in zip(ours, (*rounded, rounded_logits), (*want, logits), strict=True):
        for tokens in (slice(PROMPT), slice(PROMPT, None)):
            bound = 1.4 * error(other[tokens], exact[tokens])
            assert bound < 0.08 and error(mine[tokens], exact[tokens]) < bound


def test_the_bench_gives_a_model_in_bf16_the_same_values(made: Any) -> None:
    """A router that vLLM's experts hold once more is not taken for one in FP4."""
    _, values, _ = made
    names = [name for name in values if name.endswith("weight") and "norm" not in name]
    assert {name.split(".", 3)[-1] for name in names} >= {"mlp.gate.weight", "mlp.shared_expert_gate.weight"}
    for name in names:
        filled = torch.zeros(values[name].shape, dtype=torch.bfloat16)
        (fill_values if in_fp4(name) else fill)(name, filled)
        assert torch.equal(filled, values[name].bfloat16()), name


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """The norm of what is wrong, of the norm of what is right."""
    return float((got.float() - want).norm() / want.norm())

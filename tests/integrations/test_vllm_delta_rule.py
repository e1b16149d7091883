"""The plugin's layers of gated delta rules in vLLM's registry, on the CPU: every kind of step, against a recurrence."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

pytest.importorskip("vllm")

from vllm import platforms
from vllm.config import DeviceConfig, LoRAConfig, VllmConfig, set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.layernorm import RMSNormGated
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata

import jitfp4.integrations.vllm as plugin
from jitfp4.integrations.vllm import delta_rule, hybrids
from jitfp4.integrations.vllm.delta_rule import Fp4ModelGatedDeltaNet, Fp4ModelRMSNormGated
from jitfp4.integrations.vllm.order import OrderedLinearMethod, can_be_ordered
from jitfp4.integrations.vllm.quantization import Jitfp4ModelOptConfig
from tests.support.vllm_layers import in_bfloat16, one_rank

plugin.register()
FP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": ["*"]}
H, HV, D, WIDTH, SLOTS = 2, 4, 64, 4, 9
CHANNELS = (2 * H + HV) * D
TEXT = SimpleNamespace(
    hidden_size=64,
    hidden_act="silu",
    rms_norm_eps=1e-6,
    linear_num_key_heads=H,
    linear_num_value_heads=HV,
    linear_key_head_dim=D,
    linear_value_head_dim=D,
    linear_conv_kernel_dim=WIDTH,
)


__all__ = ["in_bfloat16", "one_rank"]  # fixtures of all tests here
pytestmark = pytest.mark.usefixtures("one_rank", "in_bfloat16")


@pytest.fixture(autouse=True)
def config(monkeypatch: pytest.MonkeyPatch) -> Iterator[VllmConfig]:
    """Of a model whose FP4 layers jitfp4 runs."""
    monkeypatch.setattr(type(platforms.current_platform), "current_device", lambda *_: "cpu", raising=False)
    config = VllmConfig(device_config=DeviceConfig(device="cpu"))
    config.quant_config = Jitfp4ModelOptConfig.from_config(FP4)
    config.model_config = SimpleNamespace(dtype=torch.bfloat16, hf_text_config=TEXT)
    with set_current_vllm_config(config), torch.no_grad():
        yield config


def layer_of(config: VllmConfig, state_dtype: torch.dtype) -> Any:
    """A layer with random numbers; its slots lie apart, as in vLLM's pages."""
    config.cache_config.mamba_ssm_cache_dtype = "float32" if state_dtype == torch.float32 else "bfloat16"
    layer = QwenGatedDeltaNetAttention(TEXT, config, "model.layers.0.linear_attn", gqa_interleaved_layout=True)
    assert type(layer) is Fp4ModelGatedDeltaNet and layer.by_jitfp4
    layer.conv1d.weight.normal_(std=0.5), layer.dt_bias.normal_(), layer.A_log.normal_(std=0.3)
    states = torch.randn(SLOTS, 2, HV, D, D, dtype=torch.float32).to(state_dtype)[:, 0]
    layer.kv_cache = (torch.randn(SLOTS, WIDTH + 1, CHANNELS, dtype=torch.bfloat16), states)
    return layer


def exactly(layer: Any, past: Any, state: Any, rows: Any, b: Any, a: Any) -> tuple[Any, Any]:
    """Outputs [tokens, HV, D] and the states after each token, in float64, with inputs of the rule in 16 bits."""
    outs, states, state = [], [], state.double()
    inputs, filters = torch.cat((past, rows)).double(), layer.conv1d.weight.flatten(1).double()
    for t in range(len(rows)):
        mixed = torch.nn.functional.silu((inputs[t : t + WIDTH] * filters.T).sum(0)).bfloat16().double()
        q, k, v = mixed.split((H * D, H * D, HV * D))
        q, k = (torch.nn.functional.normalize(x.view(H, D), dim=-1).repeat_interleave(HV // H, 0) for x in (q, k))
        rate = layer.A_log.double().exp() * torch.nn.functional.softplus(a[t].double() + layer.dt_bias.double())
        state = state * (-rate).exp()[:, None, None]
        update = (v.view(HV, D) - torch.einsum("hvk,hk->hv", state, k)) * b[t].double().sigmoid()[:, None]
        state = state + update[:, :, None] * k[:, None, :]
        outs.append(torch.einsum("hvk,hk->hv", state, q) * D**-0.5)
        states.append(state)
    return torch.stack(outs), states


def run(layer: Any, config: VllmConfig, step: GDNAttentionMetadata) -> tuple[torch.Tensor, ...]:
    """Outputs, which begin as 7, and what they are made of: one row more than the step has."""
    count = step.num_actual_tokens + 1
    rows, b, a = (torch.randn(count, width).bfloat16() for width in (CHANNELS, HV, HV))
    out = torch.full((count, HV, D), 7.0, dtype=torch.bfloat16)
    given = rows.clone()
    with patch.object(QwenGatedDeltaNetAttention, "_forward_core") as theirs:
        with set_forward_context({layer.prefix: step}, config, num_tokens=count):
            layer._forward_core(rows, b, a, out)
        assert not theirs.called
    assert (out[-1] == 7).all()
    return out, given, b, a


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    assert (got.double() - want).norm() <= 0.01 * want.norm()


def ints(*values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


STATE_DTYPES = pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=str)


@STATE_DTYPES
def test_prompts_behind_tokens_of_others(config: VllmConfig, state_dtype: torch.dtype) -> None:
    layer, starts, slots, known = (
        layer_of(config, state_dtype),
        (0, 1, 2, 72, 77),
        (3, 8, 1, 5),
        (True, True, False, True),
    )
    pasts, states = (cache.clone() for cache in layer.kv_cache)
    step = GDNAttentionMetadata(
        num_prefills=2,
        num_prefill_tokens=75,
        num_decodes=2,
        num_decode_tokens=2,
        num_spec_decodes=0,
        num_spec_decode_tokens=0,
        num_actual_tokens=77,
        has_initial_state=torch.tensor(known),
        non_spec_query_start_loc=ints(*starts),
        non_spec_state_indices_tensor=ints(*slots),
        prefill_query_start_loc=ints(0, 70, 75),
        prefill_state_indices=ints(*slots[2:]),
        prefill_has_initial_state=torch.tensor(known[2:]),
    )
    out, rows, b, a = run(layer, config, step)
    for n, slot in enumerate(slots):
        part = slice(starts[n], starts[n + 1])
        past, state = pasts[slot, : WIDTH - 1] * known[n], states[slot] * known[n]
        want, ends = exactly(layer, past, state, rows[part], b[part], a[part])
        close(out[part], want)
        close(layer.kv_cache[1][slot], ends[-1])
        assert torch.equal(layer.kv_cache[0][slot, : WIDTH - 1], torch.cat((past, rows[part]))[1 - WIDTH :])
    for slot in {*range(SLOTS)} - {*slots}:
        assert torch.equal(layer.kv_cache[1][slot], states[slot])


@STATE_DTYPES
def test_a_token_of_each_request(config: VllmConfig, state_dtype: torch.dtype) -> None:
    layer, slots = layer_of(config, state_dtype), (6, 2, 0)  # the last stands for none: a graph has more rows
    pasts, states = (cache.clone() for cache in layer.kv_cache)
    step = GDNAttentionMetadata(
        num_prefills=0,
        num_prefill_tokens=0,
        num_decodes=3,
        num_decode_tokens=3,
        num_spec_decodes=0,
        num_spec_decode_tokens=0,
        num_actual_tokens=3,
        non_spec_query_start_loc=ints(0, 1, 2, 3),
        non_spec_state_indices_tensor=ints(*slots),
    )
    out, rows, b, a = run(layer, config, step)
    for n, slot in enumerate(slots[:2]):
        part = slice(n, n + 1)
        want, ends = exactly(layer, pasts[slot, : WIDTH - 1], states[slot], rows[part], b[part], a[part])
        close(out[part], want)
        close(layer.kv_cache[1][slot], ends[-1])
    assert all(torch.equal(cache[0], before[0]) for cache, before in zip(layer.kv_cache, (pasts, states), strict=True))


@pytest.mark.skipif(
    not hasattr(GDNAttentionMetadata, "uniform_spec_sequence_length"),
    reason="vLLM does not say how many tokens were drafted for each request, and its own kernels take them",
)
@STATE_DTYPES
def test_drafted_tokens(config: VllmConfig, state_dtype: torch.dtype) -> None:
    layer, table, accepted = layer_of(config, state_dtype), ints((4, 1, 7), (2, 8, 3)), ints(2, 1)
    pasts, states = (cache.clone() for cache in layer.kv_cache)
    step = GDNAttentionMetadata(
        num_prefills=0,
        num_prefill_tokens=0,
        num_decodes=0,
        num_decode_tokens=0,
        num_spec_decodes=2,
        num_spec_decode_tokens=6,
        num_actual_tokens=6,
        spec_query_start_loc=ints(0, 3, 6),
        spec_state_indices_tensor=table,
        spec_sequence_masks=torch.tensor([True, True]),
        num_accepted_tokens=accepted,
        uniform_spec_sequence_length=3,
    )
    out, rows, b, a = run(layer, config, step)
    for n, slots in enumerate(table.tolist()):
        part, before = slice(3 * n, 3 * n + 3), int(accepted[n]) - 1
        past = pasts[slots[0], before : before + WIDTH - 1]
        want, each = exactly(layer, past, states[slots[before]], rows[part], b[part], a[part])
        close(out[part], want)
        for slot, state in zip(slots, each, strict=True):
            close(layer.kv_cache[1][slot], state)
    ragged = SimpleNamespace(**vars(step) | {"uniform_spec_sequence_length": None})
    assert layer._serves(step, rows) and not layer._serves(ragged, rows)


def test_what_stays_with_vllm(config: VllmConfig) -> None:
    layer = layer_of(config, torch.float32)
    assert not layer.warms_up and layer.num_spec == 0
    for warms_up in (False, True):  # while vLLM measures the memory that it needs
        layer.warms_up = warms_up
        with patch.object(QwenGatedDeltaNetAttention, "_forward_core") as theirs:
            for steps in (None, {}):
                with set_forward_context(steps, config, num_tokens=1):
                    layer._forward_core(None, None, None, None)
        assert theirs.call_count == 1 + warms_up
    plan = SimpleNamespace(flashinfer_checkpoint_plan=object(), spec_sequence_masks=None, num_actual_tokens=3)
    rows = torch.zeros(3, CHANNELS)
    assert not layer._serves(plan, rows)
    plan.flashinfer_checkpoint_plan = None
    assert layer._serves(plan, rows) and not layer._serves(plan, rows.float())
    config.quant_config = None
    config.compilation_config.static_forward_context.clear()
    layer = QwenGatedDeltaNetAttention(TEXT, config, "model.layers.0.linear_attn", gqa_interleaved_layout=True)
    assert not layer.by_jitfp4 and not layer.norm.by_jitfp4


def test_projections_give_parts_side_by_side(config: VllmConfig) -> None:
    """What vLLM gathers from interleaved outputs is what the layer's own lie as, once its weights are processed."""
    layer, x = layer_of(config, torch.bfloat16), torch.randn(5, TEXT.hidden_size)
    projections = (layer.in_proj_qkvz, layer.in_proj_ba)
    for projection in projections:
        projection.weight.data.normal_()
    q, k, v, z, b, a = layer.fix_query_key_value_ordering(*(x @ one.weight.T for one in projections))
    for projection in projections:
        projection.quant_method.process_weights_after_loading(projection)
    assert not layer.gqa_interleaved_layout
    qkvz, ba = (one.quant_method.apply(one, x) for one in projections)
    assert torch.equal(qkvz, torch.cat([part.flatten(1) for part in (q, k, v, z)], 1))
    assert torch.equal(ba, torch.cat((b, a), 1))


def test_projections_stay_interleaved(config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """With adapters, with drafts, where another's method has prepared a weight, and in other models."""
    with monkeypatch.context() as change:
        change.setattr(config, "lora_config", LoRAConfig(max_lora_rank=8))
        assert layer_of(config, torch.bfloat16).gqa_interleaved_layout
    reasons = ((delta_rule, "can_be_ordered"), (delta_rule, "has_fp4_layers"))
    for owner, name in reasons:
        config.compilation_config.static_forward_context.clear()
        with patch.object(owner, name, return_value=False):
            layer = QwenGatedDeltaNetAttention(TEXT, config, "model.layers.0.linear_attn", gqa_interleaved_layout=True)
        assert layer.gqa_interleaved_layout and not isinstance(layer.in_proj_qkvz.quant_method, OrderedLinearMethod)
    config.compilation_config.static_forward_context.clear()
    config.speculative_config = SimpleNamespace(num_speculative_tokens=2)
    assert layer_of(config, torch.bfloat16).gqa_interleaved_layout


def test_weights_of_others_and_of_several_matrices_are_not_ordered() -> None:
    layer = SimpleNamespace(quant_method=UnquantizedLinearMethod(), output_partition_sizes=[8])
    assert can_be_ordered(layer)
    layer.output_partition_sizes = [4, 4]
    assert not can_be_ordered(layer)
    layer = SimpleNamespace(quant_method=object(), output_partition_sizes=[8])
    assert not can_be_ordered(layer)


def test_vllm_warms_its_kernels_up_where_it_may_call_them(config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts beside prompts, and, since vLLM 0.33, states at borders of prefixes."""
    held = config.compilation_config.static_forward_context
    for mode, has_plans, expected in (("none", True, False), ("align", False, False), ("align", True, True)):
        held.clear()
        monkeypatch.setattr(config.cache_config, "mamba_cache_mode", mode)
        metadata = SimpleNamespace(**({"flashinfer_checkpoint_plan": None} if has_plans else {}))
        monkeypatch.setattr(delta_rule, "GDNAttentionMetadata", metadata)
        assert layer_of(config, torch.bfloat16).warms_up == expected
    held.clear()
    with patch.object(delta_rule, "has_fp4_layers", return_value=False):
        layer = QwenGatedDeltaNetAttention(TEXT, config, "model.layers.0.linear_attn", gqa_interleaved_layout=True)
    assert layer.warms_up


def test_the_gated_norm() -> None:
    norm = RMSNormGated(D, eps=1e-6, norm_before_gate=True, activation="silu")
    assert type(norm) is Fp4ModelRMSNormGated and norm.name == "rms_norm_gated"
    norm.weight.normal_()
    wide = torch.randn(5, 3 * HV * D)
    x, z = torch.randn(5, HV, D), wide[:, HV * D : 2 * HV * D].view(5, HV, D)
    with patch.object(RMSNormGated, "forward_cuda") as theirs:
        out = norm.forward_cuda(x, z)
        assert not theirs.called
        for other, gate in ((norm, None), (norm, z.float()), (RMSNormGated(D, norm_before_gate=False), z)):
            other.forward_cuda(x, gate)
        assert theirs.call_count == 3
    want = norm.forward_native(x.double(), z.double())
    assert ((out.double() - want).abs() <= want.abs() * 2**-8 + 1e-6).all()


def test_the_kernels_of_all_steps_are_loaded(config: VllmConfig) -> None:
    with patch.object(delta_rule, "load_growing") as load:
        layer_of(config, torch.bfloat16)
    scheduler = config.scheduler_config
    most = {
        "sequences": scheduler.max_num_seqs,
        "batch": scheduler.max_num_seqs,
        "m": HV * scheduler.max_num_batched_tokens,
    }
    most["tokens"] = scheduler.max_num_batched_tokens
    called = [(call.args[0].name.rpartition(":")[2], *call.args[2:4]) for call in load.call_args_list]
    assert all(size == most[field] for _, field, size in called)
    rules = {
        ("gated_delta_rule", "batch"),
        ("gated_delta_rule_prefill", "tokens"),
        ("gated_delta_rule_prefill", "sequences"),
    }
    assert {pair[:2] for pair in called} >= rules | {("rmsnorm", "m")}


def test_the_layers_are_registered_when_a_model_needs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    registry: dict[str, type] = {"RMSNormGated": RMSNormGated}
    monkeypatch.setattr(hybrids, "op_registry_oot", registry)
    monkeypatch.setattr(hybrids, "_registered", hybrids._registered[:1])
    module = sys.modules.pop(hybrids._MODULE)
    try:
        hybrids.register_hybrids()
        torch.nn.Sequential(torch.nn.Identity())
        assert list(registry) == ["RMSNormGated"]
    finally:
        sys.modules[hybrids._MODULE] = module
    torch.nn.Sequential(torch.nn.Identity())
    assert registry["QwenGatedDeltaNetAttention"] is Fp4ModelGatedDeltaNet
    assert registry["RMSNormGated"] is RMSNormGated  # another plugin's

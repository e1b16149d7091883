"""A good call of every public function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import jitfp4
from jitfp4.formats import MXFP4

Arguments = dict[str, Any]
Calls = dict[str, Callable[[], Arguments]]

_WORKSPACE = 1 << 21  # enough for max_q_len=7 on a GPU of 248 SMs


def good_calls() -> Calls:
    """By function: arguments that it accepts, fresh each time, as many of them given as go together.

    What stands behind a space tells two calls of one function apart. A method's object is its argument ``self``.
    """

    def half(*shape: int) -> torch.Tensor:
        return torch.randn(*shape).bfloat16()

    def codes(*shape: int) -> torch.Tensor:
        return torch.zeros(*shape, dtype=torch.uint8)

    one = lambda: torch.ones(1)  # noqa: E731
    gates = lambda: {"A_log": torch.zeros(2), "a": half(2, 1, 2), "dt_bias": torch.zeros(2), "b": half(2, 1, 2)}  # noqa: E731
    qkv = lambda: {"q": half(2, 1, 1, 64), "k": half(2, 1, 1, 64), "v": half(2, 1, 2, 64)}  # noqa: E731
    state = lambda: torch.zeros(2, 2, 64, 64)  # noqa: E731
    return {
        "nvfp4_quantize": lambda: {
            "a": half(4, 64),
            "a_global_sf": one(),
            "out": codes(4, 32),
            "out_sf": codes(128, 4),
        },
        "nvfp4_quantize per token": lambda: {"a": half(4, 64), "a_global_sf": one(), "per_token_activation": True},
        "nvfp4_quantize 4over6": lambda: {
            "a": half(4, 64),
            "a_global_sf": one(),
            "per_token_activation": True,
            "out_scale": one(),
            "nvfp4_4over6": jitfp4.NVFP44Over6Config(),
        },
        "NVFP44Over6Config": lambda: {"e4m3_max": 256, "err_mode": "MSE", "err_use_fast_math": True},
        "mxfp4_quantize": lambda: {"a": half(4, 64), "out": codes(4, 32), "out_sf": codes(128, 4)},
        "fp4_quantize": lambda: {"input": half(4, 64), "global_scale": one()},
        "silu_and_mul_nvfp4_quantize": lambda: {"input": half(4, 64), "global_scale": one()},
        "nvfp4_batched_quantize": lambda: {"a": half(2, 4, 64), "a_global_sf": one()},
        "scaled_fp4_grouped_quantize": lambda: {
            "a": half(2, 4, 64),
            "mask": torch.ones(2, dtype=torch.int32),
            "a_global_sf": torch.ones(2),
        },
        "silu_and_mul_scaled_nvfp4_experts_quantize": lambda: {
            "a": half(2, 4, 64),
            "mask": torch.ones(2, dtype=torch.int32),
            "a_global_sf": torch.ones(2),
        },
        "nvfp4_dequantize": lambda: {
            "a_fp4": codes(4, 32),
            "a_sf": codes(128, 4),
            "global_decode_scale": one(),
            "out": torch.zeros(4, 64),
        },
        "mxfp4_dequantize": lambda: {"a_fp4": codes(4, 32), "a_sf": codes(128, 4), "out": torch.zeros(4, 64)},
        "e2m1_and_ufp8sf_scale_to_float": lambda: {
            "e2m1_tensor": codes(4, 32),
            "ufp8_scale_tensor": codes(128, 4),
            "global_scale_tensor": one(),
        },
        "block_scale_interleave": lambda: {"unswizzled_sf": codes(4, 4), "out": codes(512)},
        "make_nvfp4_global_scale": lambda: {"input_tensor": half(4, 64), "per_token_activation": False},
        "mxfp4_dequantize_host": lambda: {"weight": codes(4, 32), "scale": codes(4, 2)},
        "silu_and_mul": lambda: {"input": half(4, 64), "out": half(4, 32)},
        "shuffle_matrix_a": lambda: {"input_tensor": codes(128, 32), "epilogue_tile_m": 128},
        "shuffle_matrix_sf_a": lambda: {"input_tensor": codes(128, 4), "epilogue_tile_m": 128},
        "rope_append_paged_kv_cache": lambda: {
            "query": half(4, 2, 64),
            "key": half(4, 1, 64),
            "value": half(4, 1, 64),
            "cos_sin_cache": torch.zeros(8, 64),
            "positions": torch.arange(4),
            "slot_mapping": torch.arange(4),
            "paged_kv_cache": (codes(2, 1, 16, 32), codes(2, 1, 16, 32)),
            "kv_cache_sf": (codes(2, 1, 16, 4).view(torch.float8_e4m3fn), codes(2, 1, 16, 4).view(torch.float8_e4m3fn)),
            "k_scale": one(),
            "v_scale": one(),
            "is_neox": True,
            "kv_layout": "HND",
            "q_norm_weight": half(64),
            "k_norm_weight": half(64),
            "query_out": half(4, 2, 64),
        },
        "rmsnorm_fp4quant": lambda: {
            "input": half(4, 64),
            "weight": half(64),
            "y_fp4": codes(4, 32),
            "block_scale": codes(4, 4),
            "global_scale": one(),
        },
        "add_rmsnorm_fp4quant": lambda: {
            "input": half(4, 64),
            "residual": half(4, 64),
            "weight": half(64),
            "y_fp4": codes(4, 32),
            "block_scale": codes(512),
            "global_scale": one(),
            "output_both_sf_layouts": True,
            "block_scale_unswizzled": codes(4, 4),
            "y_out": half(4, 64),
        },
        "rmsnorm": lambda: {"input": half(4, 64), "weight": half(64), "out": half(4, 64)},
        "gemma_rmsnorm": lambda: {"input": half(4, 64), "weight": half(64), "out": half(4, 64)},
        "rmsnorm_gated": lambda: {
            "input": half(4, 64),
            "gate": half(4, 64),
            "weight": half(64),
            "out": half(4, 64),
        },
        "fused_add_rmsnorm": lambda: {"input": half(4, 64), "residual": half(4, 64), "weight": half(64)},
        "gemma_fused_add_rmsnorm": lambda: {"input": half(4, 64), "residual": half(4, 64), "weight": half(64)},
        "mm_fp4": lambda: {
            "a": codes(4, 32),
            "b": codes(8, 32).T,
            "a_descale": codes(128, 4),
            "b_descale": codes(128, 4).T,
            "alpha": one(),
            "out": half(4, 8),
        },
        "gated_delta_rule_mtp": lambda: {
            **qkv(),
            "initial_state": state(),
            "initial_state_indices": torch.arange(2),
            **gates(),
            "output": half(2, 1, 2, 64),
            "intermediate_states_buffer": torch.zeros(2, 1, 2, 64, 64),
            "output_state_indices": torch.arange(2),
        },
        "gated_delta_rule_decode_pretranspose": lambda: {
            **qkv(),
            "state": state(),
            **gates(),
            "output": half(2, 1, 2, 64),
            "intermediate_states_buffer": torch.zeros(2, 1, 2, 64, 64),
        },
        "gated_delta_rule_decode": lambda: {**qkv(), "state": state(), **gates(), "output": half(2, 1, 2, 64)},
        **_kv_calls(),
        **_attention_calls(),
        **_gemm_calls(),
        **_experts_calls(),
    }


def _half(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).bfloat16()


def _codes(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.uint8)


def _ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _kv_calls() -> Calls:
    """Four pages of four tokens, one head of 64."""

    def cache() -> Arguments:
        codes, scales = ([_codes(4, 4, 1, width) for _ in "kv"] for width in (32, 4))
        return {"paged_kv_cache": tuple(codes), "kv_cache_sf": tuple(x.view(torch.float8_e4m3fn) for x in scales)}

    def rows() -> Arguments:
        return {"append_key": _half(2, 1, 64), "append_value": _half(2, 1, 64)}

    def scales() -> Arguments:
        return {"k_scale": torch.ones(1), "v_scale": torch.ones(1)}

    return {
        "nvfp4_kv_quantize": lambda: {"input": _half(4, 64), "global_scale": torch.ones(1)},
        "nvfp4_quantize_paged_kv_cache": lambda: {
            "k_cache": _half(4, 1, 4, 64),
            "v_cache": _half(4, 1, 4, 64),
            "k_global_sf": torch.ones(1),
            "v_global_sf": torch.ones(1),
        },
        "nvfp4_quantize_append_paged_kv_cache": lambda: {
            **rows(),
            "batch_indices": _ints(0, 1),
            "positions": _ints(0, 0),
            **cache(),
            "kv_indices": _ints(0, 1),
            "kv_indptr": _ints(0, 1, 2),
            "kv_last_page_len": _ints(1, 1),
            **scales(),
        },
        "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping": lambda: {
            **rows(),
            "slot_mapping": _ints(3, 8),
            **cache(),
            **scales(),
        },
        "nvfp4_kv_dequantize": lambda: {
            "fp4_data": _codes(4, 32),
            "block_scales": _codes(4, 4),
            "global_scale": torch.ones(1),
        },
        "nvfp4_kv_dequantize_paged": lambda: {
            **cache(),
            "block_tables": torch.stack((_ints(0, 1), _ints(2, 3))),
            "seq_lens": _ints(5, 3),
            **scales(),
            "output_k": _half(2, 5, 1, 64),
            "output_v": _half(2, 5, 1, 64),
        },
    }


def _attention_calls() -> Calls:
    """Two requests over four pages of four tokens, one KV head of 64 for two query heads."""

    def cache(*shape: int) -> tuple[Any, Any]:
        codes, scales = ([_codes(*shape, width) for _ in "kv"] for width in (32, 4))
        return tuple(codes), tuple(scales)

    def decode() -> Arguments:
        codes, scales = cache(4, 1, 4)
        return {
            "query": _half(2, 2, 64),
            "kv_cache": codes,
            "workspace_buffer": _codes(_WORKSPACE),
            "block_tables": torch.stack((_ints(0, 1), _ints(2, 3))),
            "seq_lens": _ints(5, 3),
            "max_seq_len": 8,
            "bmm1_scale": torch.ones(1),
            "bmm2_scale": torch.ones(1),
            "out": _half(2, 2, 64),
            "sinks": torch.zeros(2),
            "kv_cache_sf": scales,
            "lse": torch.zeros(2, 2),
            "return_lse": True,
        }

    def xqa() -> Arguments:
        arguments = decode() | {"mask": torch.ones(2, 1, 2, dtype=torch.int16).view(torch.uint16), "kv_layout": "HND"}
        del arguments["lse"], arguments["return_lse"]
        return arguments

    def make_wrapper() -> Any:
        return jitfp4.BatchDecodeWithPagedKVCacheWrapper(_codes(_WORKSPACE))

    def plan() -> Arguments:
        return {
            "indptr": _ints(0, 2, 3),
            "indices": _ints(0, 1, 2),
            "last_page_len": _ints(1, 3),
            "num_qo_heads": 2,
            "num_kv_heads": 1,
            "head_dim": 64,
            "page_size": 4,
            "q_data_type": torch.bfloat16,
            "kv_data_type": torch.uint8,
            "seq_lens": _ints(5, 3),
        }

    def run() -> Arguments:
        wrapper = make_wrapper()
        wrapper.plan(**plan())
        codes, scales = cache(4, 4, 1)
        arguments = {"q": _half(2, 2, 64), "paged_kv_cache": codes, "kv_cache_sf": scales, "out": _half(2, 2, 64)}
        return {"self": wrapper, **arguments, "lse": torch.zeros(2, 2), "return_lse": True, "sinks": torch.zeros(2)}

    def single() -> Arguments:
        (k, v), scales = cache(4, 1)
        return {"q": _half(2, 64), "k": k, "v": v, "kv_cache_sf": scales}

    def context() -> Arguments:
        arguments = decode() | {"query": _half(3, 2, 64), "out": _half(3, 2, 64), "lse": torch.zeros(3, 2)}
        del arguments["max_seq_len"]
        lengths = {"max_q_len": 2, "max_kv_len": 8, "batch_size": 2}
        return arguments | lengths | {"cum_seq_lens_q": _ints(0, 2, 3), "cum_seq_lens_kv": _ints(0, 5, 8)}

    def make_prefill() -> Any:
        return jitfp4.BatchPrefillWithPagedKVCacheWrapper(_codes(_WORKSPACE))

    def plan_prefill() -> Arguments:
        decode_plan = plan()
        lists = {f"paged_kv_{name}": decode_plan.pop(name) for name in ("indptr", "indices", "last_page_len")}
        decode_plan["head_dim_qk"] = decode_plan.pop("head_dim")
        return {"qo_indptr": _ints(0, 2, 3), **lists, **decode_plan, "max_token_per_sequence": 2}

    def run_prefill() -> Arguments:
        wrapper = make_prefill()
        wrapper.plan(**plan_prefill())
        return run() | {"self": wrapper, "q": _half(3, 2, 64), "out": _half(3, 2, 64), "lse": torch.zeros(3, 2)}

    def forward(arguments: Arguments) -> Arguments:
        return {name: arguments[name] for name in ("self", "q", "paged_kv_cache", "kv_cache_sf")}

    def reset(wrapper: Any) -> Arguments:
        return {"self": wrapper, "float_workspace_buffer": _codes(_WORKSPACE), "int_workspace_buffer": _codes(8)}

    name, prefill = "BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper"
    return {
        "trtllm_batch_context_with_kv_cache": context,
        "single_prefill_with_kv_cache": lambda: single() | {"q": _half(3, 2, 64)},
        prefill: lambda: {
            "float_workspace_buffer": _codes(_WORKSPACE),
            "use_cuda_graph": True,
            "qo_indptr_buf": _ints(0, 0, 0),
            "paged_kv_indptr_buf": _ints(0, 0, 0),
            "paged_kv_indices_buf": _ints(0, 0, 0, 0),
            "paged_kv_last_page_len_buf": _ints(0, 0),
        },
        f"{prefill}.plan": lambda: {"self": make_prefill(), **plan_prefill()},
        f"{prefill}.run": run_prefill,
        f"{prefill}.forward": lambda: forward(run_prefill()),
        f"{prefill}.forward_return_lse": lambda: forward(run_prefill()),
        f"{prefill}.reset_workspace_buffer": lambda: reset(make_prefill()),
        "trtllm_batch_decode_with_kv_cache": decode,
        "trtllm_batch_decode_with_kv_cache ragged": lambda: {
            **decode(),
            "max_q_len": 1,
            "cum_seq_lens_q": _ints(0, 1, 2),
            "q_len_per_req": None,
        },
        "xqa_batch_decode_with_kv_cache": xqa,
        "xqa_batch_decode_with_kv_cache ragged": lambda: {
            **xqa(),
            "mask": torch.ones(2, 2, dtype=torch.int16).view(torch.uint16),
            "q_len_per_req": 2,
            "q_cu_seq_lens": _ints(0, 1, 2),
        },
        "single_decode_with_kv_cache": single,
        name: lambda: {
            "float_workspace_buffer": _codes(_WORKSPACE),
            "use_cuda_graph": True,
            "paged_kv_indptr_buffer": _ints(0, 0, 0),
            "paged_kv_indices_buffer": _ints(0, 0, 0, 0),
            "paged_kv_last_page_len_buffer": _ints(0, 0),
        },
        f"{name}.plan": lambda: {"self": make_wrapper(), **plan()},
        f"{name}.run": run,
        f"{name}.forward": lambda: forward(run()),
        f"{name}.forward_return_lse": lambda: forward(run()),
        f"{name}.reset_workspace_buffer": lambda: reset(make_wrapper()),
    }


def _gemm_calls() -> Calls:
    def weight() -> Any:
        return jitfp4.prepare_fp4_weight(_codes(8, 16), _codes(128, 4), sf_layout=jitfp4.SfLayout.layout_128x4)

    return {
        "prepare_fp4_weight": lambda: {
            "weight": _codes(8, 16),
            "scales": _codes(128, 4),
            "sf_layout": jitfp4.SfLayout.layout_128x4,
        },
        "mm_bf16_fp4": lambda: {
            "a": _half(3, 32),
            "weight": weight(),
            "alpha": torch.ones(1),
            "bias": _half(8),
            "out": _half(3, 8),
        },
        "mm_fp8_fp4": lambda: {
            "a": _half(3, 32).to(torch.float8_e4m3fn),
            "a_scale": torch.ones(3),
            "weight": weight(),
            "row_scale": torch.ones(64),
            "alpha": torch.ones(1),
            "bias": _half(8),
            "out": _half(3, 8),
        },
        "fp8_row_scale": lambda: {"weight": weight()},
        "Fp4Weight": lambda: {
            "data": _codes(1, 1, 4352),
            "row_scale": torch.ones(64),
            "n": 8,
            "k": 32,
            "format": MXFP4,
        },
        "Fp4Weight.from_tensors": lambda: {"named": weight().tensors()},
    }


def _experts_calls() -> Calls:
    """Two experts of 64 by 64 in blocks of 32, three tokens with two slots."""

    def raw() -> Arguments:
        return {
            "w13": _codes(2, 128, 32),
            "w13_scales": _codes(2, 128, 2),
            "w2": _codes(2, 64, 32),
            "w2_scales": _codes(2, 64, 2),
            "order": "interleaved",
            "sf_layout": jitfp4.SfLayout.layout_linear,
            "block_size": 32,
            "w13_alpha": torch.ones(2, 2),
            "w2_alpha": torch.ones(2),
            "w13_bias": _half(2, 128),
            "w2_bias": _half(2, 64),
        }

    def experts() -> Any:
        return jitfp4.prepare_fp4_experts(**raw())

    def parts() -> Arguments:
        made = experts()
        return {name: value for name, value in made.tensors().items() if name != "size"}

    return {
        "prepare_fp4_experts": raw,
        "fp4_experts": lambda: {
            "x": _half(3, 64),
            "experts": experts(),
            "topk_ids": torch.tensor([[0, 1], [1, 0], [-1, -1]], dtype=torch.int32),
            "topk_weights": torch.ones(3, 2),
            "activation": "swigluoai",
            "swiglu_alpha": 1.5,
            "swiglu_beta": 1.0,
            "swiglu_limit": 5.0,
            "expert_map": _ints(1, 0),
            "apply_router_weight_on_input": True,
            "out": _half(3, 64),
        },
        "Fp4Experts": lambda: {**parts(), "hidden": 64, "inter": 64, "gated": True, "format": MXFP4},
        "Fp4Experts.from_tensors": lambda: {"named": experts().tensors()},
        "Fp4Experts.dequantize": lambda: {"self": experts(), "expert": 1},
    }

"""A good call of every public function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import jitfp4
from jitfp4.formats import MXFP4
from tests.inputs.good_caches import Arguments, Calls, attention_calls, kv_calls
from tests.inputs.good_caches import codes as _codes
from tests.inputs.good_caches import half as _half
from tests.inputs.good_caches import ints as _ints


def good_calls() -> Calls:
    """By function: arguments that it accepts, fresh each time, as many of them given as go together.

    What stands behind a space tells two calls of one function apart. A method's object is its argument ``self``.
    """

    def half(*shape: int) -> torch.Tensor:
        return torch.randn(*shape).bfloat16()

    def codes(*shape: int) -> torch.Tensor:
        return torch.zeros(*shape, dtype=torch.uint8)

    one = lambda: torch.ones(1)  # noqa: E731
    eights = lambda: {"y_fp8": torch.zeros(4, 64).to(torch.float8_e4m3fn), "y_scale": torch.ones(4)}  # noqa: E731
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
        "FP4Tensor": lambda: {"data": codes(4, 2, 32), "scale": codes(128, 8).view(torch.float8_e4m3fn)},
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
        "rmsnorm_linear": lambda: {
            "input": half(4, 64),
            "weight": half(64),
            "matrix": half(8, 64),
            "eps": 1e-6,
            "weight_bias": 1.0,
            "bias": half(8),
            "out": half(4, 64),
            "product": half(4, 8),
        },
        "rmsnorm_gated_fp4quant": lambda: {
            "input": half(4, 2, 64),
            "gate": half(4, 2, 64),
            "weight": half(64),
            "y_fp4": codes(4, 64),
            "block_scale": codes(4, 8),
            "global_scale": one(),
        },
        "fused_add_rmsnorm": lambda: {"input": half(4, 64), "residual": half(4, 64), "weight": half(64)},
        "gemma_fused_add_rmsnorm": lambda: {"input": half(4, 64), "residual": half(4, 64), "weight": half(64)},
        "rows_fp8quant": lambda: {"input": half(4, 64), **eights()},
        "rmsnorm_fp8quant": lambda: {"input": half(4, 64), "weight": half(64), **eights()},
        "add_rmsnorm_fp8quant": lambda: {
            "input": half(4, 64),
            "residual": half(4, 64),
            "weight": half(64),
            **eights(),
        },
        "mm_fp4": lambda: {
            "a": codes(4, 32),
            "b": codes(8, 32).T,
            "a_descale": codes(128, 4),
            "b_descale": codes(128, 4).T,
            "alpha": one(),
            "out": half(4, 8),
        },
        "grouped_gemm_nt_masked": lambda: {
            "lhs": (codes(2, 4, 32).permute(1, 2, 0), codes(2, 1, 1, 32, 4, 4).permute(3, 4, 1, 5, 2, 0)),
            "rhs": (codes(2, 8, 32).permute(1, 2, 0), codes(2, 1, 1, 32, 4, 4).permute(3, 4, 1, 5, 2, 0)),
            "out": half(2, 4, 8).permute(1, 2, 0),
            "masked_m": torch.full((2,), 4, dtype=torch.int32),
            "ab_dtype": "float4_e2m1fn",
            "sf_dtype": "float8_e4m3fn",
            "c_dtype": "bfloat16",
            "sf_vec_size": 16,
            "alpha": torch.ones(2),
        },
        "chunk_gated_delta_rule": lambda: {
            "q": half(70, 1, 64),
            "k": half(70, 1, 64),
            "v": half(70, 2, 64),
            "g": torch.ones(70, 2),
            "beta": torch.ones(70, 2),
            "initial_state": state(),
            "output_final_state": True,
            "cu_seqlens": torch.tensor([0, 66, 70]),
            "use_qk_l2norm_in_kernel": True,
            "output": half(70, 2, 64),
            "output_state": state(),
            "state_checkpoints": torch.zeros(1, 2, 64, 64),
            "checkpoint_cu_starts": torch.tensor([0, 1, 1]),
            "checkpoint_every_n_tokens": 64,
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
        **kv_calls(),
        **attention_calls(),
        **_gemm_calls(),
        **_conv_calls(),
        **_experts_calls(),
        **_step_calls(),
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
            "residual": _half(3, 8),
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


def _conv_calls() -> Calls:
    """Filters of 4 taps on 64 channels; sequences of two tokens and one."""
    given: Callable[[], Arguments] = lambda: {"weight": _half(64, 4), "bias": _half(64), "activation": "silu"}  # noqa: E731
    return {
        "causal_conv1d_fn": lambda: {
            "x": _half(3, 64).T,
            **given(),
            "conv_states": _half(5, 64, 3),
            "query_start_loc": _ints(0, 2, 3),
            "cache_indices": _ints(3, 1),
            "has_initial_state": torch.tensor([True, False]),
        },
        "causal_conv1d_update": lambda: {
            "x": _half(3, 64),
            "conv_state": _half(5, 64, 4),
            **given(),
            "conv_state_indices": _ints(3, 1),
            "num_accepted_tokens": _ints(1, 2),
            "query_start_loc": _ints(0, 2, 3),
            "max_query_len": 2,
            "out": _half(3, 64),
        },
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
            "residual": _half(3, 64),
            "out": _half(3, 64),
        },
        "route_experts": lambda: {
            "logits": _half(3, 8),
            "top_k": 2,
            "method": "sigmoid",
            "renormalize": True,
            "bias": torch.zeros(8),
            "groups": 4,
            "topk_groups": 2,
            "scale": 2.5,
            "out_ids": torch.zeros(3, 2, dtype=torch.int32),
            "out_weights": torch.zeros(3, 2),
        },
        "route_tokens": lambda: {
            "x": _half(3, 64),
            "weight": _half(8, 64),
            "top_k": 2,
            "method": "sigmoid",
            "renormalize": True,
            "logit_bias": torch.zeros(8),
            "bias": torch.zeros(8),
            "groups": 4,
            "topk_groups": 2,
            "shared": False,
            "scale": 2.5,
            "logits": torch.zeros(3, 8),
            "out_ids": torch.zeros(3, 2, dtype=torch.int32),
            "out_weights": torch.zeros(3, 2),
        },
        "fused_topk_deepseek": lambda: {
            "scores": _half(3, 8),
            "bias": _half(8),
            "n_group": 4,
            "topk_group": 2,
            "topk": 2,
            "routed_scaling_factor": 2.5,
            "topk_values": _half(3, 2),
            "topk_indices": torch.zeros(3, 2, dtype=torch.int32),
        },
        "Fp4Experts": lambda: {**parts(), "hidden": 64, "inter": 64, "gated": True, "format": MXFP4},
        "Fp4Experts.from_tensors": lambda: {"named": experts().tensors()},
        "Fp4Experts.dequantize": lambda: {"self": experts(), "expert": 1},
    }


def _step_calls() -> Calls:
    def weight(n: int, order: str | None = None) -> Any:
        linear = jitfp4.SfLayout.layout_linear
        return jitfp4.prepare_fp4_weight(_codes(n, 64), _codes(n, 8), sf_layout=linear, order=order)

    def model() -> Arguments:
        return {
            "qkv": [weight(384)],
            "o": [weight(128)],
            "gate_up": [weight(256, "concatenated gate,up")],
            "down": [weight(128)],
            "norms": _half(1, 2, 128),
            "alphas": torch.ones(1, 7),
            "heads": 1,
            "kv_heads": 1,
            "eps": 1e-5,
            "biases": _half(1, 384),
            "head_norms": _half(1, 2, 128),
        }

    step = jitfp4.DecodeStep
    return {
        "DecodeStep": model,
        "DecodeStep.weights": lambda: {"self": step(**model()), "layer": 0},
        "DecodeStep.run": lambda: {
            "self": step(**model()),
            "x": _half(1, 128),
            "kv_cache": _codes(1, 2, 2, 1, 64, 64),
            "kv_cache_sf": _codes(1, 2, 2, 1, 64, 8),
            "block_tables": _ints(0, 1).view(1, 2),
            "seq_lens": _ints(70),
            "cos_sin_cache": torch.randn(128, 128),
            "kv_scales": torch.ones(1, 2),
            "positions": _ints(69),
            "v_scale_layout": "interleaved4",
            "sm_scale": 0.1,
            "out": _half(1, 128),
        },
    }

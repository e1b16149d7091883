"""Good calls of the functions of a KV cache, and small tensors for good calls of others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import jitfp4

Arguments = dict[str, Any]
Calls = dict[str, Callable[[], Arguments]]

_WORKSPACE = 1 << 21  # enough for max_q_len=7 on a GPU of 248 SMs


def half(*shape: int) -> torch.Tensor:
    """Random bfloat16."""
    return torch.randn(*shape).bfloat16()


def codes(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.uint8)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def kv_calls() -> Calls:
    """Four pages of four tokens, one head of 64."""

    def cache() -> Arguments:
        data, sf = ([codes(4, 4, 1, width) for _ in "kv"] for width in (32, 4))
        return {"paged_kv_cache": tuple(data), "kv_cache_sf": tuple(x.view(torch.float8_e4m3fn) for x in sf)}

    def rows() -> Arguments:
        return {"append_key": half(2, 1, 64), "append_value": half(2, 1, 64)}

    def scales() -> Arguments:
        return {"k_scale": torch.ones(1), "v_scale": torch.ones(1)}

    return {
        "nvfp4_kv_quantize": lambda: {"input": half(4, 64), "global_scale": torch.ones(1)},
        "nvfp4_quantize_paged_kv_cache": lambda: {
            "k_cache": half(4, 1, 4, 64),
            "v_cache": half(4, 1, 4, 64),
            "k_global_sf": torch.ones(1),
            "v_global_sf": torch.ones(1),
        },
        "nvfp4_quantize_append_paged_kv_cache": lambda: {
            **rows(),
            "batch_indices": ints(0, 1),
            "positions": ints(0, 0),
            **cache(),
            "kv_indices": ints(0, 1),
            "kv_indptr": ints(0, 1, 2),
            "kv_last_page_len": ints(1, 1),
            **scales(),
        },
        "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping": lambda: {
            **rows(),
            "slot_mapping": ints(3, 8),
            **cache(),
            **scales(),
        },
        "rope_append_paged_kv_cache": lambda: {
            "query": half(4, 2, 64),
            "key": half(4, 1, 64),
            "value": half(4, 1, 64),
            "cos_sin_cache": torch.zeros(8, 64),
            "positions": torch.arange(4),
            "slot_mapping": torch.arange(4),
            "paged_kv_cache": (codes(2, 1, 16, 32), codes(2, 1, 16, 32)),
            "kv_cache_sf": (codes(2, 1, 16, 4).view(torch.float8_e4m3fn), codes(2, 1, 16, 4).view(torch.float8_e4m3fn)),
            **scales(),
            "is_neox": True,
            "kv_layout": "HND",
            "q_norm_weight": half(64),
            "k_norm_weight": half(64),
            "query_out": half(4, 2, 64),
        },
        "nvfp4_kv_dequantize": lambda: {
            "fp4_data": codes(4, 32),
            "block_scales": codes(4, 4),
            "global_scale": torch.ones(1),
        },
        "nvfp4_kv_dequantize_paged": lambda: {
            **cache(),
            "block_tables": torch.stack((ints(0, 1), ints(2, 3))),
            "seq_lens": ints(5, 3),
            **scales(),
            "output_k": half(2, 5, 1, 64),
            "output_v": half(2, 5, 1, 64),
        },
    }


def attention_calls() -> Calls:
    """Two requests over four pages of four tokens, one KV head of 64 for two query heads."""

    def cache(*shape: int) -> tuple[Any, Any]:
        data, sf = ([codes(*shape, width) for _ in "kv"] for width in (32, 4))
        return tuple(data), tuple(sf)

    def decode() -> Arguments:
        data, sf = cache(4, 1, 4)
        return {
            "query": half(2, 2, 64),
            "kv_cache": data,
            "workspace_buffer": codes(_WORKSPACE),
            "block_tables": torch.stack((ints(0, 1), ints(2, 3))),
            "seq_lens": ints(5, 3),
            "max_seq_len": 8,
            "bmm1_scale": torch.ones(1),
            "bmm2_scale": torch.ones(1),
            "out": half(2, 2, 64),
            "sinks": torch.zeros(2),
            "kv_cache_sf": sf,
            "lse": torch.zeros(2, 2),
            "return_lse": True,
        }

    def xqa() -> Arguments:
        arguments = decode() | {"mask": torch.ones(2, 1, 2, dtype=torch.int16).view(torch.uint16), "kv_layout": "HND"}
        del arguments["lse"], arguments["return_lse"]
        return arguments

    def make_wrapper() -> Any:
        return jitfp4.BatchDecodeWithPagedKVCacheWrapper(codes(_WORKSPACE))

    def plan() -> Arguments:
        return {
            "indptr": ints(0, 2, 3),
            "indices": ints(0, 1, 2),
            "last_page_len": ints(1, 3),
            "num_qo_heads": 2,
            "num_kv_heads": 1,
            "head_dim": 64,
            "page_size": 4,
            "q_data_type": torch.bfloat16,
            "kv_data_type": torch.uint8,
            "seq_lens": ints(5, 3),
        }

    def run() -> Arguments:
        wrapper = make_wrapper()
        wrapper.plan(**plan())
        data, sf = cache(4, 4, 1)
        arguments = {"q": half(2, 2, 64), "paged_kv_cache": data, "kv_cache_sf": sf, "out": half(2, 2, 64)}
        return {"self": wrapper, **arguments, "lse": torch.zeros(2, 2), "return_lse": True, "sinks": torch.zeros(2)}

    def single() -> Arguments:
        (k, v), scales = cache(4, 1)
        return {"q": half(2, 64), "k": k, "v": v, "kv_cache_sf": scales}

    def context() -> Arguments:
        arguments = decode() | {"query": half(3, 2, 64), "out": half(3, 2, 64), "lse": torch.zeros(3, 2)}
        del arguments["max_seq_len"]
        lengths = {"max_q_len": 2, "max_kv_len": 8, "batch_size": 2}
        return arguments | lengths | {"cum_seq_lens_q": ints(0, 2, 3), "cum_seq_lens_kv": ints(0, 5, 8)}

    def make_prefill() -> Any:
        return jitfp4.BatchPrefillWithPagedKVCacheWrapper(codes(_WORKSPACE))

    def plan_prefill() -> Arguments:
        decode_plan = plan()
        lists = {f"paged_kv_{name}": decode_plan.pop(name) for name in ("indptr", "indices", "last_page_len")}
        decode_plan["head_dim_qk"] = decode_plan.pop("head_dim")
        return {"qo_indptr": ints(0, 2, 3), **lists, **decode_plan, "max_token_per_sequence": 2}

    def run_prefill() -> Arguments:
        wrapper = make_prefill()
        wrapper.plan(**plan_prefill())
        return run() | {"self": wrapper, "q": half(3, 2, 64), "out": half(3, 2, 64), "lse": torch.zeros(3, 2)}

    def forward(arguments: Arguments) -> Arguments:
        return {name: arguments[name] for name in ("self", "q", "paged_kv_cache", "kv_cache_sf")}

    def reset(wrapper: Any) -> Arguments:
        return {"self": wrapper, "float_workspace_buffer": codes(_WORKSPACE), "int_workspace_buffer": codes(8)}

    name, prefill = "BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper"
    return {
        "trtllm_batch_context_with_kv_cache": context,
        "single_prefill_with_kv_cache": lambda: single() | {"q": half(3, 2, 64)},
        prefill: lambda: {
            "float_workspace_buffer": codes(_WORKSPACE),
            "use_cuda_graph": True,
            "qo_indptr_buf": ints(0, 0, 0),
            "paged_kv_indptr_buf": ints(0, 0, 0),
            "paged_kv_indices_buf": ints(0, 0, 0, 0),
            "paged_kv_last_page_len_buf": ints(0, 0),
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
            "cum_seq_lens_q": ints(0, 1, 2),
            "q_len_per_req": None,
        },
        "xqa_batch_decode_with_kv_cache": xqa,
        "xqa_batch_decode_with_kv_cache ragged": lambda: {
            **xqa(),
            "mask": torch.ones(2, 2, dtype=torch.int16).view(torch.uint16),
            "q_len_per_req": 2,
            "q_cu_seq_lens": ints(0, 1, 2),
        },
        "single_decode_with_kv_cache": single,
        name: lambda: {
            "float_workspace_buffer": codes(_WORKSPACE),
            "use_cuda_graph": True,
            "paged_kv_indptr_buffer": ints(0, 0, 0),
            "paged_kv_indices_buffer": ints(0, 0, 0, 0),
            "paged_kv_last_page_len_buffer": ints(0, 0),
        },
        f"{name}.plan": lambda: {"self": make_wrapper(), **plan()},
        f"{name}.run": run,
        f"{name}.forward": lambda: forward(run()),
        f"{name}.forward_return_lse": lambda: forward(run()),
        f"{name}.reset_workspace_buffer": lambda: reset(make_wrapper()),
    }

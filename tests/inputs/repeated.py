"""Calls that are made again and again: a good call of every public function, and one that reaches each kernel."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import torch

import jitfp4
from tests.inputs.calls import function_of
from tests.inputs.good import Arguments, Calls, good_calls

NO_LAUNCH = (
    *("block_scale_interleave", "nvfp4_block_scale_interleave", "make_nvfp4_global_scale"),
    *("silu_and_mul", "shuffle_matrix_a", "shuffle_matrix_sf_a", "prepare_fp4_weight", "Fp4Weight"),
    "fp8_row_scale",
    "Fp4Weight.from_tensors",
    *("prepare_fp4_experts", "Fp4Experts", "Fp4Experts.from_tensors", "Fp4Experts.dequantize"),
    *("NVFP44Over6Config", "FP4Tensor"),
    *("DecodeStep", "DecodeStep.weights"),
    *(
        f"Batch{kind}WithPagedKVCacheWrapper{method}"
        for kind in ("Decode", "Prefill")
        for method in ("", ".plan", ".reset_workspace_buffer")
    ),
)
"""Functions of torch operations alone, and methods that only prepare."""

CHECKED = {
    "nvfp4_quantize shuffled": "rows are permuted by torch operations behind the launch",
    "nvfp4_quantize 4over6": "scales are multiplied by a torch operation behind the launch",
    "nvfp4_quantize_paged_kv_cache": "the host reads the scales",
    "mm_fp4 trtllm": "columns are permuted by a torch operation behind the launch",
}
"""Calls that launch a kernel and take the checked way each time, and why."""


def archs_of(name: str) -> tuple[str, ...]:
    """The architectures that a call of repeated_calls() runs on, but for older ones."""
    for_hopper = name.startswith(("mm_fp8_fp4", "DecodeStep", "fp4_experts fp8"))
    return ("sm_90a",) if for_hopper else ("sm_90a", "sm_100a", "sm_103a", "sm_120a")


def repeated_calls() -> Calls:
    """By function, and what stands behind a space: arguments, fresh each time."""
    return {**good_calls(), **_more()}


def _half(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).bfloat16()


def _bytes(*shape: int) -> torch.Tensor:
    return torch.randint(32, 96, shape).to(torch.uint8)


def _more() -> Calls:
    good = good_calls()

    def product(m: int, n: int, k: int, order: str | None = None) -> Arguments:
        codes, scales = _bytes(n, k // 2), _bytes(n, k // 16)
        linear = jitfp4.SfLayout.layout_linear
        return {"a": _half(m, k), "weight": jitfp4.prepare_fp4_weight(codes, scales, sf_layout=linear, order=order)}

    def eights(m: int, n: int, k: int) -> Arguments:
        given = {"a": _bytes(m, k).view(torch.float8_e4m3fn), "a_scale": torch.ones(m)}
        return {**product(m, n, k), **given, "row_scale": torch.ones(n)}

    def fp4(m: int, n: int, k: int) -> Arguments:
        rows = -(-m // 128) * 128, -(-n // 128) * 128
        a, b = (_bytes(x, k // 2) for x in (m, n))
        a_sf, b_sf = (_bytes(x, k // 16) for x in rows)
        return {"a": a, "b": b.T, "a_descale": a_sf, "b_descale": b_sf.T}

    def sides(name: str) -> Arguments:
        """V with rows of another length than K."""
        arguments = good[name]()
        for key, width in (("paged_kv_cache", 64), ("kv_cache_sf", 8)):
            k, v = arguments[key]
            arguments[key] = k, torch.zeros(*v.shape[:-1], width, dtype=torch.uint8).view(v.dtype)
        key = "append_value" if "append" in name else "output_v"
        return arguments | {key: _half(*arguments[key].shape[:-1], 128)}

    def layer(tokens: int) -> Arguments:
        ids = torch.tensor([[token % 2, 1 - token % 2] for token in range(tokens)])
        return {
            "x": _half(tokens, 64),
            "experts": good["fp4_experts"]()["experts"],
            "topk_ids": ids,
            "topk_weights": None,
        }

    def streamed() -> Arguments:
        """16 experts with about a row each."""
        raw = good["prepare_fp4_experts"]()
        more = {n: v.repeat(8, *[1] * (v.dim() - 1)) if isinstance(v, torch.Tensor) else v for n, v in raw.items()}
        ids = torch.arange(18).view(9, 2) % 16
        return layer(9) | {"experts": jitfp4.prepare_fp4_experts(**more), "topk_ids": ids}

    def drafted(tokens: int) -> Arguments:
        """Two requests of so many new tokens, under masks."""
        words = torch.ones(2, tokens, 2 * -(-tokens // 32), dtype=torch.int16)
        rows = {name: _half(2 * tokens, 2, 64) for name in ("query", "out")}
        given = good["xqa_batch_decode_with_kv_cache"]() | rows
        return given | {"mask": words.view(torch.uint16), "q_len_per_req": tokens}

    append, dequantize = "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping", "nvfp4_kv_dequantize_paged"
    return {
        "nvfp4_quantize many": lambda: {"a": torch.zeros(8192, 4096).bfloat16(), "a_global_sf": torch.ones(1)},
        "nvfp4_quantize e4m3": lambda: {
            "a": _bytes(2048, 4096).view(torch.float8_e4m3fn),
            "a_global_sf": torch.ones(1),
        },
        "fp4_quantize 4over6": lambda: {**good["fp4_quantize"](), "nvfp4_4over6": jitfp4.NVFP44Over6Config()},
        "nvfp4_quantize number": lambda: {"a": _half(4, 64), "a_global_sf": 2.0},
        "nvfp4_quantize token": lambda: {"a": _half(4, 64), "a_global_sf": 0.5, "per_token_activation": True},
        "nvfp4_quantize shuffled": lambda: {"a": _half(128, 64), "a_global_sf": 2.0, "do_shuffle": True},
        "fp4_quantize inversed": lambda: {**good["fp4_quantize"](), "is_global_scale_inversed": True},
        "rmsnorm_fp4quant rows": lambda: {"input": _half(4, 1024), "weight": _half(1024)},
        "gated_delta_rule_mtp tokens": lambda: _delta_rule(8),
        "chunk_gated_delta_rule heads": lambda: prompt(70, 16),
        "chunk_gated_delta_rule many heads": lambda: prompt(70, 72),
        "chunk_gated_delta_rule parts": lambda: prompt(2048, 2),
        "mm_bf16_fp4 wide": lambda: product(64, 128, 128),
        "mm_bf16_fp4 divided": lambda: product(32, 8704, 128),
        "mm_fp8_fp4 divided": lambda: eights(64, 8704, 128),
        "mm_fp8_fp4 expanded": lambda: eights(520, 128, 128),
        "mm_fp8_fp4 swiglu": lambda: {
            **eights(64, 128, 128),
            "weight": product(64, 128, 128, "interleaved")["weight"],
            "row_scale": torch.ones(128),
            "activation": "swiglu",
        },
        "mm_bf16_fp4 residual": lambda: {**product(3, 64, 128), "residual": _half(3, 64)},
        "mm_bf16_fp4 swiglu": lambda: {
            **product(64, 128, 128, "interleaved"),
            "activation": "swiglu",
        },
        "mm_fp4 divided": lambda: fp4(32, 8704, 128),
        "mm_fp4 k96": lambda: fp4(256, 4096, 768),
        "grouped_gemm_nt_masked k96": lambda: {
            **good["grouped_gemm_nt_masked"](),
            "lhs": (_bytes(2, 4, 48).permute(1, 2, 0), _bytes(2, 128 * 8)),
            "rhs": (_bytes(2, 8, 48).permute(1, 2, 0), _bytes(2, 128 * 8)),
        },
        "mm_fp4 trtllm": lambda: {**fp4(16, 128, 128), "backend": "trtllm"},
        "single_prefill_with_kv_cache tokens": lambda: {
            **good["single_prefill_with_kv_cache"](),
            "q": _half(80, 2, 64),
        },
        "xqa_batch_decode_with_kv_cache tree": lambda: drafted(10),
        "xqa_batch_decode_with_kv_cache wide tree": lambda: drafted(80),
        "trtllm_batch_decode_with_kv_cache fp4": lambda: {
            **good["trtllm_batch_decode_with_kv_cache"](),
            "out": None,
            "out_dtype": "nvfp4",
            "o_sf_scale": 2.0,
        },
        "fp4_experts listed": lambda: layer(9),
        "fp4_experts wide": lambda: layer(40),
        "fp4_experts fp8": lambda: {**layer(40), "activations": "fp8"},
        "fp4_experts streamed": streamed,
        f"{append} sides": lambda: sides(append),
        f"{dequantize} sides": lambda: sides(dequantize),
    }


def _delta_rule(tokens: int) -> Arguments:
    return {
        "q": _half(2, tokens, 1, 128),
        "k": _half(2, tokens, 1, 128),
        "v": _half(2, tokens, 2, 128),
        "initial_state": torch.zeros(2, 2, 128, 128),
        "initial_state_indices": torch.arange(2),
        "A_log": torch.zeros(2),
        "a": _half(2, tokens, 2),
        "dt_bias": torch.zeros(2),
        "b": _half(2, tokens, 2),
    }


def prompt(tokens: int, heads: int) -> Arguments:
    """One sequence; a table divides a long one, and looks at the number of states."""
    return {
        "q": _half(tokens, 1, 64),
        "k": _half(tokens, 1, 64),
        "v": _half(tokens, heads, 64),
        "g": torch.ones(tokens, heads),
        "beta": torch.ones(tokens, heads),
        "cu_seqlens": torch.tensor([0, tokens]),
        "use_qk_l2norm_in_kernel": True,
    }


def without_outputs(name: str, arguments: Arguments) -> Arguments:
    """The arguments without the tensors that the call allocates if they are not given."""
    defaults = inspect.signature(function_of(name)).parameters
    return {key: x for key, x in arguments.items() if key not in _OUTPUTS or defaults[key].default is not None}


_OUTPUTS = (
    "out",
    "out_sf",
    "y_fp4",
    "block_scale",
    "block_scale_unswizzled",
    "y_out",
    "output",
    "lse",
    "out_ids",
    "out_weights",
)


def filled(name: str, seed: int) -> Arguments:
    """The arguments of a call, with other values in tensors of codes, scales and floats for each seed."""
    with torch.random.fork_rng():
        torch.manual_seed(0)  # of the weights that an object of the call keeps
        arguments = repeated_calls()[name]()
    for key, value in arguments.items():
        for tensor in tensors_of(value) if "workspace" not in key else ():
            random = {"generator": torch.Generator(tensor.device).manual_seed(seed), "device": tensor.device}
            if tensor.dtype in (torch.uint8, torch.float8_e4m3fn):  # finite and positive, as scales are
                tensor.copy_(torch.randint(32, 96, tensor.shape, **random).to(torch.uint8).view(tensor.dtype))
            elif tensor.dtype == torch.float32:
                tensor.copy_(torch.rand(tensor.shape, **random) + 0.5)
            elif tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape, **random))
            elif key == "mask" and "a" in arguments:
                tensor.fill_(arguments["a"].shape[1])  # what is behind is not written
    return arguments


def tensors_of(value: Any) -> list[torch.Tensor]:
    """All tensors in an argument or a result, in their order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return tensors_of(tuple(value.values()))
    if dataclasses.is_dataclass(value):
        return tensors_of(tuple(getattr(value, field.name) for field in dataclasses.fields(value)))
    return [tensor for part in value for tensor in tensors_of(part)] if isinstance(value, (tuple, list)) else []

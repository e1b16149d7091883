"""What an engine's source does not say about a call: tensors and settings by hand, and whether the result is right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

import jitfp4
from jitfp4 import SfLayout
from jitfp4.formats import MXFP4, NVFP4
from jitfp4.reference import quantize as reference
from jitfp4.reference.formats import unswizzle
from tests.engines.collect import Call
from tests.engines.trial import Arguments, Trial
from tests.support.compare import assert_same_bytes
from tests.support.gdn import assert_close, case, recurrence
from tests.support.gemm import assert_fp4_close, make_matrix
from tests.support.kv import paged_cache
from tests.support.routing import ROUTERS, Router, assert_routing, make_logits

LINEAR, CODES = SfLayout.layout_linear, getattr(torch, "float4_e2m1fn_x2", torch.uint8)


def halves(*shape: int, seed: int = 2) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def some_bytes(*shape: int) -> torch.Tensor:
    return torch.randint(0, 120, shape, generator=torch.Generator().manual_seed(3), dtype=torch.uint8)


# ---- quantization ----------------------------------------------------------------------------------------------------


def nvfp4_quantize(call: Call) -> Iterator[Trial]:
    scale = torch.tensor([2.5])
    per_token = "per_token_activation" in call["keywords"]
    if per_token:
        base = 1 / (448 * 6)
        yield Trial("a number", {"a": halves(5, 64), "a_global_sf": base}, _check_per_token)
        yield Trial("a tensor", {"a": halves(5, 64), "a_global_sf": torch.tensor([base])}, _check_per_token)
        return
    yield Trial("one scale", {"a": halves(5, 64), "a_global_sf": scale, "nvfp4_4over6": None}, _check_nvfp4)
    if "nvfp4_4over6" in call["keywords"]:
        recipe = jitfp4.NVFP44Over6Config(err_mode="MSE")
        yield Trial("4over6", {"a": halves(5, 64), "a_global_sf": scale, "nvfp4_4over6": recipe}, _check_nvfp4)


def fp4_quantize(_call: Call) -> Iterator[Trial]:
    flags = {"sf_vec_size": 16, "sf_use_ue8m0": False, "enable_pdl": True}
    for swizzled, small in ((True, False), (True, True), (False, False)):
        layouts = {"is_sf_swizzled_layout": swizzled, "is_sf_8x4_layout": small}
        for backend in ("cuda", "cute-dsl"):
            inputs = {"input": halves(5, 64), "global_scale": torch.tensor([2.5])}
            yield Trial(f"{swizzled} {small} {backend}", flags | layouts | inputs | {"backend": backend}, _check_nvfp4)


def _check_nvfp4(result: Any, given: Arguments) -> None:
    a, scale = given.get("a", given.get("input")), given.get("a_global_sf", given.get("global_scale"))
    swizzled, small = given.get("is_sf_swizzled_layout", True), given.get("is_sf_8x4_layout", False)
    named = SfLayout.layout_8x4 if small else SfLayout.layout_128x4 if swizzled else LINEAR
    layout = given.get("sfLayout", named)
    recipe = given.get("nvfp4_4over6")
    if recipe is None:
        want = reference.nvfp4_quantize(a, torch.as_tensor(scale), layout)
    else:
        codes, linear = reference.quantize_4over6(a, recipe, scale)
        want = codes, linear
    assert_same_bytes("codes", result[0].view(torch.uint8), want[0])
    assert_same_bytes("scales", result[1].view(torch.uint8), want[1])


def _check_per_token(result: Any, given: Arguments) -> None:
    a = given["a"].float()
    q, sf, scales = result
    back = jitfp4.nvfp4_dequantize(q, sf, 1.0, given["sfLayout"]) * scales.view(-1, 1)
    assert (back - a).abs().max() <= a.abs().amax() / 6
    assert torch.allclose(scales, a.abs().amax(-1) / (448 * 6), rtol=1e-6)


def mxfp4_quantize(_call: Call) -> Iterator[Trial]:
    def check(result: Any, given: Arguments) -> None:
        want = reference.mxfp4_quantize(given["a"], SfLayout.layout_128x4)
        assert_same_bytes("codes", result[0], want[0])
        assert_same_bytes("scales", result[1], want[1])

    for backend in ("cuda", "cute-dsl"):
        yield Trial(backend, {"a": halves(5, 64), "backend": backend}, check)


def make_nvfp4_global_scale(_call: Call) -> Iterator[Trial]:
    for recipe, top in ((None, 448), (jitfp4.NVFP44Over6Config(256), 256)):

        def check(result: torch.Tensor, _given: Arguments, top: int = top) -> None:
            assert result.tolist() == torch.tensor([1 / (top * 6)]).tolist()

        yield Trial(str(top), {"input_tensor": halves(5, 64), "nvfp4_4over6_config": recipe}, check)


def scaled_fp4_grouped_quantize(call: Call) -> Iterator[Trial]:
    silu = call["callee"].startswith("silu")

    def check(result: Any, given: Arguments) -> None:
        q, sf = result
        assert sf.dtype == torch.float8_e4m3fn
        x = jitfp4.silu_and_mul(given["a"]) if silu else given["a"]
        for expert, filled in enumerate(given["mask"].tolist()):
            want = reference.nvfp4_quantize(x[expert], given["a_global_sf"][expert], LINEAR)
            assert_same_bytes("codes", q[:filled, :, expert], want[0][:filled])
            tiles = sf[..., expert].permute(2, 4, 0, 1, 3).reshape(-1, x.shape[-1] // 16).view(torch.uint8)
            linear = unswizzle(tiles, SfLayout.layout_128x4, x.shape[1], x.shape[-1] // 16)
            assert_same_bytes("scales", linear[:filled], want[1][:filled])

    mask, scales = torch.tensor([3, 0, 40], dtype=torch.int32), torch.tensor([1.0, 2.0, 3.0])
    yield Trial("three", {"a": halves(3, 40, 128), "mask": mask, "a_global_sf": scales}, check)
    yield Trial("one", {"a": halves(1, 40, 128), "mask": mask[2:], "a_global_sf": scales[2:]}, check)


# ---- weights ---------------------------------------------------------------------------------------------------------


def block_scale_interleave(_call: Call) -> Iterator[Trial]:
    def check(result: torch.Tensor, given: Arguments) -> None:
        source = given["unswizzled_sf"]
        experts = source if source.dim() == 3 else source.unsqueeze(0)
        rows, cols = experts.shape[1:]
        one = result.numel() // len(experts)
        assert result.dtype == source.dtype and result.dim() == 1
        for expert in range(len(experts)):
            for row in range(0, rows, 7):
                at = [SfLayout.layout_128x4.offset(row, col, cols) + expert * one for col in range(cols)]
                assert torch.equal(result[at], experts[expert, row])

    for name, sf in (
        ("bytes", some_bytes(256, 8)),
        ("experts", some_bytes(2, 100, 6)),
        ("bf16", halves(128, 8)),
        ("rows of two strides", some_bytes(300, 8)[::2]),
    ):
        yield Trial(name, {"unswizzled_sf": sf}, check)


def _moved(row: int) -> int:
    return row // 32 * 32 + row % 32 // 4 + 8 * (row % 4)


def shuffle_matrix_a(_call: Call) -> Iterator[Trial]:
    def check(result: torch.Tensor, given: Arguments) -> None:
        for row in range(len(result)):
            assert torch.equal(result[_moved(row)], given["input_tensor"][row])

    weight = some_bytes(256, 32)
    yield Trial("bytes", {"input_tensor": weight, "epilogue_tile_m": 128}, check)
    yield Trial(
        "e4m3", {"input_tensor": weight.view(torch.float8_e4m3fn).view(torch.uint8), "epilogue_tile_m": 128}, check
    )


def shuffle_matrix_sf_a(_call: Call) -> Iterator[Trial]:
    def check(result: torch.Tensor, given: Arguments) -> None:
        source = given["input_tensor"]
        for row in range(len(source)):
            at = [SfLayout.layout_128x4.offset(_moved(row), col, source.shape[1]) for col in range(source.shape[1])]
            assert torch.equal(result[at], source[row])

    yield Trial("bytes", {"input_tensor": some_bytes(256, 8), "epilogue_tile_m": 128, "num_elts_per_sf": 32}, check)


def mm_fp4(call: Call) -> Iterator[Trial]:
    others = (("cudnn", MXFP4, False), ("trtllm", NVFP4, True)) if "block_size" in call["keywords"] else ()
    backends = "auto", "cutlass", "cudnn", "cute-dsl", "b12x", "trtllm"
    for backend, form, small in (*((backend, NVFP4, False) for backend in backends), *others):
        a = make_matrix(5, 128, form, SfLayout.layout_8x4 if small else SfLayout.layout_128x4, 1)
        b = make_matrix(128, 128, form, seed=2)
        codes, scales = b.codes, b.scales
        if backend == "trtllm":
            codes = jitfp4.shuffle_matrix_a(codes, 128)
            linear = unswizzle(scales, SfLayout.layout_128x4, 128, 128 // form.block)
            scales = jitfp4.shuffle_matrix_sf_a(linear, 128).view(128, -1)
        alpha = torch.tensor([2.0**-9 * 1.37])

        def check(
            result: torch.Tensor, _given: Arguments, values: tuple[torch.Tensor, ...] = (a.values, b.values, alpha)
        ) -> None:
            assert_fp4_close(result, *values)

        yield Trial(
            f"{backend} {form} {'8x4' if small else '128x4'}",
            {
                "a": a.codes,
                "b": codes.T,
                "a_descale": a.scales,
                "b_descale": scales.T,
                "alpha": alpha,
                "out_dtype": torch.bfloat16,
                "block_size": form.block,
                "use_8x4_sf_layout": small,
                "use_nvfp4": form is NVFP4,
                "backend": backend,
            },
            check,
        )


# ---- norm, delta rule, cache -----------------------------------------------------------------------------------------


def add_rmsnorm_fp4quant(_call: Call) -> Iterator[Trial]:
    for swizzled, spare in (
        (True, None),
        (True, torch.zeros(3, 8, dtype=torch.uint8).view(torch.float8_e4m3fn)),
        (False, None),
    ):
        x, residual, weight = halves(3, 128), halves(3, 128, seed=4), halves(128)
        result = torch.zeros(3, 64, dtype=torch.uint8)
        sf = torch.zeros((128, 8) if swizzled else (3, 8), dtype=torch.uint8)
        given = {
            "input": x,
            "residual": residual,
            "weight": weight,
            "y_fp4": result.view(CODES),
            "block_scale": sf.view(torch.float8_e4m3fn),
            "global_scale": torch.tensor([2.0]),
            "eps": 1e-6,
            "is_sf_swizzled_layout": swizzled,
            "block_scale_unswizzled": spare,
        }
        want = jitfp4.rmsnorm_fp4quant((x + residual), weight, global_scale=2.0, is_sf_swizzled_layout=swizzled)
        added = (x + residual).clone()

        def check(_result: Any, given: Arguments, want: Any = want, added: torch.Tensor = added) -> None:
            assert_same_bytes("residual", given["residual"], added)
            assert_same_bytes("codes", given["y_fp4"].view(torch.uint8), want[0].view(torch.uint8))
            got = given["block_scale"].view(torch.uint8)
            assert_same_bytes("scales", got, want[1].view(torch.uint8).view(got.shape))

        yield Trial(f"{swizzled} {spare is not None}", given, check)


def gated_delta_rule(call: Call) -> Iterator[Trial]:
    drafts = call["callee"].endswith("mtp")
    pooled = "initial_state" in call["keywords"]
    given = case(2, 3 if drafts else 1, pool=5 if pooled else 2, head_dim=128)
    if pooled:
        given["initial_state_indices"] = torch.tensor([3, 1], dtype=torch.int32)
    want, states = recurrence(given)
    slots = given["initial_state_indices"].long()
    if drafts:
        given["intermediate_states_buffer"] = torch.zeros(2, 3, *given["initial_state"].shape[1:])
    elif not pooled:
        given["state"] = given.pop("initial_state")
    before = given["initial_state"].clone() if drafts else None

    def check(result: Any, given: Arguments) -> None:
        assert_close("output", result[0], want)
        if before is not None:
            assert torch.equal(given["initial_state"], before), "the states of verified drafts stay"
            assert_close("kept states", given["intermediate_states_buffer"], states)
        else:
            assert_close("states", result[1][slots] if pooled else result[1], states[:, -1])

    yield Trial("float32 states", given, check)


def nvfp4_kv_quantize(_call: Call) -> Iterator[Trial]:
    def check(result: Any, given: Arguments) -> None:
        want = reference.nvfp4_quantize(given["input"], 1 / given["global_scale"], LINEAR)
        assert_same_bytes("codes", result[0], want[0])
        assert_same_bytes("scales", result[1], want[1])

    yield Trial("rows", {"input": halves(6, 128), "global_scale": torch.tensor([0.25])}, check)


def nvfp4_kv_dequantize(_call: Call) -> Iterator[Trial]:
    codes, sf = some_bytes(6, 64), some_bytes(6, 8)
    want = reference.dequantize(codes, sf, NVFP4, torch.tensor(0.25), LINEAR).bfloat16()

    def check(result: torch.Tensor, _given: Arguments) -> None:
        assert_same_bytes("values", result, want)

    given = {
        "fp4_data": codes,
        "block_scales": sf,
        "global_scale": torch.tensor([0.25]),
        "output_dtype": torch.bfloat16,
    }
    yield Trial("rows", given, check)


def append(_call: Call) -> Iterator[Trial]:
    for layout in ("NHD", "HND"):
        cache = paged_cache(4, 16, 2, (128, 128), layout, "one page", "cpu")
        key, value = halves(5, 2, 128), halves(5, 2, 128, seed=5)
        slots = torch.tensor([17, 3, -1, 40], dtype=torch.int64)  # and a padded token without a slot

        def check(_result: Any, _given: Arguments, cache: Any = cache, sides: Any = (key, value)) -> None:
            for written, source in zip(cache.sides(), sides, strict=True):
                want = jitfp4.nvfp4_kv_quantize(source.reshape(10, 128), 0.5)
                for token, slot in ((0, 17), (1, 3), (3, 40)):
                    for part in (0, 1):
                        got = written[part][slot // 16, slot % 16]
                        assert_same_bytes("slot", got, want[part].view(torch.uint8).view(5, 2, -1)[token])

        yield Trial(
            layout,
            {
                "append_key": key,
                "append_value": value,
                "slot_mapping": slots,
                "paged_kv_cache": cache.codes,
                "kv_cache_sf": cache.sf,
                "k_scale": torch.tensor(0.5),
                "v_scale": torch.tensor(0.5),
                "kv_layout": layout,
            },
            check,
        )


# ---- routing ---------------------------------------------------------------------------------------------------------


def fused_topk_deepseek(_call: Call) -> Iterator[Trial]:
    for name in ("deepseek-v3", "kimi-k2"):
        router = ROUTERS[name]
        logits, bias = make_logits(router, 5)

        def check(_: Any, given: Arguments, router: Router = router) -> None:
            assert_routing(router, given["scores"], given["bias"], given["topk_indices"], given["topk_values"])

        yield Trial(
            name,
            {
                "scores": logits,
                "bias": bias,
                "n_group": router.groups,
                "topk_group": router.topk_groups,
                "topk": router.top_k,
                "routed_scaling_factor": router.scale,
                "topk_values": torch.empty(5, router.top_k),
                "topk_indices": torch.empty(5, router.top_k, dtype=torch.int32),
                "launch_with_pdl": True,
            },
            check,
        )


TRIALS: dict[str, Callable[[Call], Iterator[Trial]]] = {
    "nvfp4_quantize": nvfp4_quantize,
    "fp4_quantize": fp4_quantize,
    "mxfp4_quantize": mxfp4_quantize,
    "make_nvfp4_global_scale": make_nvfp4_global_scale,
    "scaled_fp4_grouped_quantize": scaled_fp4_grouped_quantize,
    "silu_and_mul_scaled_nvfp4_experts_quantize": scaled_fp4_grouped_quantize,
    "block_scale_interleave": block_scale_interleave,
    "nvfp4_block_scale_interleave": block_scale_interleave,
    "shuffle_matrix_a": shuffle_matrix_a,
    "shuffle_matrix_sf_a": shuffle_matrix_sf_a,
    "mm_fp4": mm_fp4,
    "fused_topk_deepseek": fused_topk_deepseek,
    "add_rmsnorm_fp4quant": add_rmsnorm_fp4quant,
    "gated_delta_rule_decode_pretranspose": gated_delta_rule,
    "gated_delta_rule_mtp": gated_delta_rule,
    "nvfp4_kv_quantize": nvfp4_kv_quantize,
    "nvfp4_kv_dequantize": nvfp4_kv_dequantize,
    "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping": append,
}
"""By FlashInfer's name; attention's are in values_attention.py."""

"""What judges the arithmetic of each kernel: its family's own simulated tests, the cheapest first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple
from unittest import mock

import torch

from jitfp4 import SfLayout, sim
from jitfp4.arch import Arch
from jitfp4.families.attention.kernels.decode import DecodeTactic
from jitfp4.families.attention.operation import ATTENTION
from jitfp4.families.gdn import gated_delta_rule_mtp
from jitfp4.families.gdn.kernels.chunk import ChunkTactic
from jitfp4.families.gdn.kernels.delta_rule import WalkTactic
from jitfp4.families.gdn.operation import GATED_DELTA_RULE
from jitfp4.families.gemm.fp4_operation import MM_FP4
from jitfp4.families.gemm.kernels import wide
from jitfp4.families.gemm.kernels.blockscaled import K64Tactic
from jitfp4.families.gemm.kernels.blockscaled_k96 import K96Tactic
from jitfp4.families.gemm.kernels.narrow import NarrowTactic
from jitfp4.families.gemm.kernels.portable import PortableTactic
from jitfp4.families.gemm.kernels.wide import WideTactic
from jitfp4.families.gemm.operation import MM_BF16_FP4
from jitfp4.families.norm.kernels.rmsnorm_fp4quant import Tactic
from jitfp4.families.norm.operation import RMSNORM
from jitfp4.families.quantize.kernels.e4m3 import TACTICS as TABLE_TACTICS
from jitfp4.formats import MXFP4, NVFP4
from tests.families import test_attention as attention
from tests.families import test_attention_wgmma as attention_wgmma
from tests.families import test_dequantize as dequantize
from tests.families import test_fp4_blockscaled as blockscaled
from tests.families import test_fp4_quantize as fp4
from tests.families import test_gdn_chunk as chunk
from tests.families import test_gdn_kernel as gdn
from tests.families import test_grouped as grouped
from tests.families import test_kv_append as append
from tests.families import test_kv_dequantize as kv_read
from tests.families import test_kv_quantize as kv_quantize
from tests.families import test_mm_fp4 as mm_fp4
from tests.families import test_norm_kernel as norm
from tests.families import test_prefill as prefill
from tests.families import test_quantize as quantize
from tests.mutants.launches import attention_case
from tests.support.attention import SCATTERED
from tests.support.compare import poisoned
from tests.support.gdn import assert_close, case, check_other_writes, recurrence
from tests.support.gemm import assert_fp4_product, assert_product, assert_weights_come_back
from tests.support.norm import check, rows_of_all_kinds

Check = Callable[[str], None]
"""Takes the name of an architecture, and raises where a result is wrong."""
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
TILED, LINEAR = SfLayout.layout_128x4, SfLayout.layout_linear


class Subject(NamedTuple):
    """A kernel, by the name of its entry: that of every module that the first check runs."""

    entry: str
    checks: tuple[Check, ...]
    archs: tuple[str, ...] = ("sm_90a", "sm_100a")


def on(test: Callable[..., None], *args: Any) -> Check:
    """A test that takes a device, last, on which its tensors are."""

    def run(arch: str) -> None:
        with sim.device(arch):
            test(*args, "cpu")

    return run


def _norm(tactic: Tactic, h: int) -> tuple[Check, ...]:
    def one(m: int, h: int, layout: str, scale: float | None = 3.0) -> Check:
        def run(arch: str) -> None:
            x = rows_of_all_kinds(m, h, F16)
            with sim.device(replace(Arch.of(arch), num_sms=2)), RMSNORM.forced(tactic):
                check(x, x.flip(0), layout, 16, "e4m3", "cpu", scale=scale)

        return run

    return one(6, h, "both"), one(20 if h < 9000 else 9, h, "both"), one(3, h - 80, "128x4", None), one(131, 80, "both")


def _full_rows(tactic: Tactic, h: int, *layouts: str) -> Check:
    """Rows that fill their threads."""

    def run(arch: str) -> None:
        x = rows_of_all_kinds(8 if h < 9000 else 3, h, F16)
        with sim.device(arch), RMSNORM.forced(tactic):
            for layout in layouts or ("both",):
                check(x, x.flip(0), layout, 16, "e4m3", "cpu")

    return run


def _short_rows(arch: str) -> None:
    norm.test_simulated_kernel(arch, F16, 16, "e4m3")


def _rows_by_warps(arch: str) -> None:
    """The same kernels, with several rows for each CTA, of which some fill the threads."""
    tactics = ((Tactic(1, 1), (80, 512)), (Tactic(1, 8), (1040, 4096)), (Tactic(2, 8), (4160, 8192)))
    for tactic, lengths in tactics:
        with sim.device(replace(Arch.of(arch), num_sms=2)), RMSNORM.forced(tactic):
            for layout, h in product(norm.LAYOUTS, lengths):
                x = rows_of_all_kinds(9, h, F16)
                check(x, x.flip(0), layout, 16, "e4m3", "cpu")
                check(x, None, "linear" if layout == "both" else layout, 16, "e4m3", "cpu", scale=None)


def _gdn(tactic: WalkTactic, head_dim: int, tokens: int, *, update: bool = True) -> Check:
    def run(arch: str) -> None:
        for number in (0, 1):
            arguments = case(2, tokens, 1, 2, head_dim, exact_gates=True, seed=number)
            arguments["initial_state_indices"] = torch.tensor([1, -1] if number else [1, 0])
            with GATED_DELTA_RULE.forced(tactic):
                gdn.check_kernel(arguments, "cpu", arch, l2norm=not number, update=update)

    return run


def _gates(tactic: WalkTactic, head_dim: int, tokens: int) -> Check:
    """Gates that are no round numbers, and rows so short that the epsilon of their norm counts."""

    def run(arch: str) -> None:
        arguments = case(2, tokens, 1, 2, head_dim)
        arguments["q"], arguments["k"] = arguments["q"] * 1e-3, arguments["k"] * 1e-3
        steps = poisoned((2, tokens, 2, head_dim, head_dim), F32, "cpu") if tokens > 1 else None
        want_out, want_states = recurrence(arguments)
        with sim.device(arch), GATED_DELTA_RULE.forced(tactic):
            out, state = gated_delta_rule_mtp(**arguments, intermediate_states_buffer=steps)
        assert_close("output", out, want_out)
        assert_close("state", state, want_states[:, -1])

    return run


def _gdn_writes(tactic: WalkTactic) -> Check:
    """Final states to other slots, states of every token to slots of the pool."""

    def run(arch: str) -> None:
        with sim.device(arch), GATED_DELTA_RULE.forced(tactic):
            check_other_writes("cpu")

    return run


def _chunk(tokens: int, tactic: ChunkTactic, **options: Any) -> Check:
    return lambda arch: chunk.TestSimulated().test_shapes(arch, (tokens, 64, BF16, F32), tactic, options)


def _attention(tactic: DecodeTactic, sms: int = 2, **options: Any) -> Check:
    def run(arch: str) -> None:
        one = attention_case(**options)
        with sim.device(replace(Arch.of(arch), num_sms=sms)), ATTENTION.forced(tactic):
            one.check(one.run(), attention._BOUND)

    return run


def _decode(**cache: Any) -> tuple[Check, ...]:
    """Two short requests; windows, sinks and missing pages; several tokens of ragged requests; many CTAs' shares."""
    tactic = DecodeTactic(2, 2, 1)
    return (
        _attention(tactic, lengths=(70, 33), **cache),
        _attention(tactic, lengths=(45, 0, 33), window_left=30, with_sinks=True, missing=((0, 0, 1, -1),), **cache),
        _attention(tactic, lengths=(40, 50, 2), q_lens=(3, 0, 2), group=4, window_left=20, **cache),
        _attention(tactic, lengths=(170,), kv_heads=3, group=7, extra_page_bytes=64, **cache),
        _attention(tactic, 5, lengths=(390, 20), kv_heads=1, steep=8.0, **cache),
        _attention(tactic, 3, **SCATTERED | cache | {"q_lens": (8,), "group": 5}),
    )


def _prefill(tests: Any, *names: str) -> tuple[Check, ...]:
    """Cases of test_prefill.py or test_attention_wgmma.py."""

    def one(name: str) -> Check:
        def run(arch: str) -> None:
            with sim.device(arch):
                case, got = tests.run(name)
            case.check(got, tests._BOUND)

        return run

    return tuple(map(one, names))


def _races(arch: str) -> None:
    """Several tiles of rows, none of which may write another's."""
    tactic = PortableTactic(16, 128, 16, 32, 2, 3, scaled_mma=arch == "sm_120a")
    with sim.device(arch, races=True), MM_FP4.forced(tactic):
        assert_fp4_product(40, 72, 416)


def _mm_fp4(*cases: Any) -> tuple[Check, ...]:
    """Cases of test_fp4_blockscaled.py."""

    def one(tactic: Any, sms: int, *rest: Any) -> Check:
        return lambda arch: blockscaled.assert_product(tactic, replace(Arch.of(arch), num_sms=sms), *rest)

    return tuple(one(*case) for case in cases)


def _gemm(tactic: NarrowTactic | WideTactic, *sizes: tuple[int, int, int], **options: Any) -> tuple[Check, ...]:
    """Products, and each weight by itself. With two SMs, so that a CTA of the wide kernel has several tiles, and rings
    of so few slots that each is filled again.
    """

    def on_few_sms(test: Callable[[], object]) -> Check:
        def run(arch: str) -> None:
            few = mock.patch.object(wide, "_MOST_SLOTS", 4)
            with sim.device(replace(Arch.of(arch), num_sms=2)), MM_BF16_FP4.forced(tactic), few:
                test()

        return run

    weights = partial(assert_weights_come_back, 72, 160, options.get("block_format", NVFP4))
    return (*(on_few_sms(partial(assert_product, *size, **options)) for size in sizes), on_few_sms(weights))


_INDICES = ((torch.int32,) * 5, (torch.int64, torch.int32, torch.int32, torch.int64, torch.int32))
_CUTS = (WalkTactic(16, 2, 2, bulk_stores=True), WalkTactic(64, 4, 4, use_smem_v=True, keep_state=True))
CHECKS: dict[str, Subject] = {
    "norm, one warp": Subject("norm_rmsnorm_fp4quant", (*_norm(Tactic(3, 1), 1104), _full_rows(Tactic(3, 1), 1536))),
    "norm, eight warps": Subject("norm_rmsnorm_fp4quant", (*_norm(Tactic(2, 8), 3088), _full_rows(Tactic(2, 8), 8192))),
    "norm, cluster": Subject(
        "norm_rmsnorm_fp4quant",
        (*_norm(Tactic(2, 16, clustered=True), 16400), _full_rows(Tactic(2, 16, clustered=True), 32768)),
    ),
    "norm, stream": Subject(
        "norm_rmsnorm_fp4quant",
        (*_norm(Tactic(8, 16, stream=True), 9232), _full_rows(Tactic(8, 16, stream=True), 65536)),
    ),
    "norm, short rows": Subject("norm_rmsnorm_fp4quant", (_short_rows, _rows_by_warps)),
    "quantize, vector": Subject(
        "quantize_vector",
        (
            lambda arch: quantize.test_simulated_kernel(arch, TILED, F16),
            on(fp4.test_one_scale_for_each_row, F16),
            *(on(quantize.test_no_global_scale_tells_kernels_and_reference_apart, x) for x in (0.0, torch.nan, 1e38)),
        ),
    ),
    "quantize, mxfp4": Subject("quantize_vector", (on(fp4.test_mxfp4_is_the_reference, BF16, TILED),)),
    "quantize, float8": Subject(
        "quantize_vector",
        (
            on(fp4.test_float8_input_is_the_reference, TILED),
            on(fp4.test_one_scale_for_each_row, torch.float8_e4m3fn),
        ),
    ),
    "quantize, table": Subject(
        "quantize_e4m3",
        (on(fp4.test_float8_input_through_the_table_is_the_reference, TILED, TABLE_TACTICS[0]),),
        ("sm_90a",),
    ),
    "quantize, per token": Subject(
        "quantize_row_scale",
        (on(fp4.test_per_token_is_the_reference, BF16),),
    ),
    "quantize, silu": Subject(
        "quantize_vector",
        (
            on(fp4.test_silu_and_mul_is_the_reference_but_for_exp, BF16),
            on(fp4.test_silu_keeps_the_sign_of_zero_and_its_tail),
        ),
    ),
    "quantize, tensor maps": Subject(
        "quantize_tma", (lambda arch: fp4.test_tma_kernel_is_the_reference(arch, BF16, TILED),)
    ),
    "quantize, batches": Subject("quantize_grouped", (on(grouped.test_batched_is_one_matrix_at_a_time, BF16),)),
    "quantize, masked": Subject(
        "quantize_grouped", (on(grouped.test_masked_rows_are_quantized_and_no_others_touched),)
    ),
    "quantize, experts": Subject("quantize_grouped", (on(grouped.test_experts_apply_swiglu_first),)),
    "dequantize": Subject("quantize_dequantize", (lambda arch: dequantize.test_simulated_kernel(arch, TILED, BF16),)),
    "kv, rows": Subject("kv_quantize", (on(kv_quantize.test_rows, BF16), on(kv_quantize.test_paged_cache, "HND", 5))),
    "kv, slots": Subject(
        "kv_quantize",
        (
            on(append.test_slots, "NHD", "pair"),
            on(append.test_slots, "HND", "one page"),
            on(append.test_interleaved_scales_of_v, "NHD"),
            on(append.check_wild),
            on(append.test_ties),
        ),
    ),
    "kv, positions": Subject(
        "kv_quantize",
        (*(on(append.test_positions, dtypes) for dtypes in _INDICES), on(append.check_wild), on(append.test_ties)),
    ),
    "kv, read": Subject(
        "kv_dequantize",
        (
            on(kv_read.test_paged, "HND", "pair", BF16),
            on(kv_read.test_paged, "NHD", "one page", BF16),
            on(kv_read.test_interleaved_scales_of_v, (64, 64)),
            on(kv_read.check_wild),
            on(kv_read.test_more_chunks_than_a_cta_has_threads),
        ),
    ),
    "kv, read rows": Subject("kv_dequantize", (on(kv_read.test_flat, F16),)),
    "gdn, one token": Subject(
        "gdn_delta_rule",
        (
            _gdn(WalkTactic(16, 2, 2), 64, 1),
            _gates(WalkTactic(16, 2, 2), 64, 1),
            lambda arch: gdn.check_without_slots(arch, WalkTactic(16, 2, 2)),
        ),
    ),
    "gdn, bulk stores": Subject(
        "gdn_delta_rule", (_gdn(_CUTS[0], 64, 3), _gdn(_CUTS[0], 64, 6, update=False), _gates(_CUTS[0], 64, 3))
    ),
    "gdn, v in shared memory": Subject(
        "gdn_delta_rule",
        (
            _gdn(_CUTS[1], 64, 3),
            _gdn(_CUTS[1], 64, 6, update=False),
            _gates(_CUTS[1], 64, 3),
            _gdn_writes(_CUTS[1]),
        ),
    ),
    "gdn, pools": Subject("gdn_delta_rule", (gdn.test_simulated_pools_strides_and_orders,)),
    "gdn, chunk": Subject(
        "gdn_chunk",
        (
            _chunk(5, ChunkTactic(4)),
            _chunk(8, ChunkTactic(4), use_qk_l2norm=False, scale=0.75),
            lambda arch: chunk.TestSimulated().test_strides(arch),
        ),
    ),
    "gdn, chunk ahead": Subject(
        "gdn_chunk",
        (
            _chunk(16, ChunkTactic(4, ahead=4)),
            _chunk(13, ChunkTactic(4, ahead=4), disable_state_update=True, use_qk_l2norm=False),
        ),
    ),
    "attention, nvfp4": Subject("attention_decode", _decode()),
    "attention, e4m3": Subject("attention_decode", _decode(cache=torch.float8_e4m3fn)),
    "attention, bf16": Subject("attention_decode", _decode(cache=BF16)),
    "prefill, nvfp4": Subject(
        "attention_prefill",
        (*_prefill(prefill, "missing_pages", "all_tokens", "scattered", "many_tiles"), prefill.check_table_ends),
    ),
    "prefill, interleaved": Subject(
        "attention_prefill",
        _prefill(prefill, "ragged_interleaved", "scattered_interleaved", "many_requests_interleaved"),
    ),
    "prefill, bf16": Subject("attention_prefill", _prefill(prefill, "cache_bf16", "scattered_bf16")),
    "prefill, e4m3": Subject(
        "attention_prefill", _prefill(prefill, "cache_e4m3", "scattered_e4m3", "many_requests", "many_tiles_e4m3")
    ),
    "prefill, wgmma": Subject("attention_prefill_wgmma", _prefill(attention_wgmma, "scattered", "ragged"), ("sm_90a",)),
    "gemm, narrow": Subject(
        "gemm_narrow",
        (
            *_gemm(NarrowTactic(8, 2, 2, 2, 2, 1), (5, 72, 672), (19, 64, 160)),
            *_gemm(NarrowTactic(8, 2, 2, 2, 2, 1, split=5), (5, 72, 672))[:1],
        ),
    ),
    "gemm, narrow split": Subject(
        "gemm_narrow",
        _gemm(NarrowTactic(16, 2, 2, 2, 2, 1, split=2), (13, 72, 1056), block_format=MXFP4),
    ),
    "gemm, wide split": Subject(
        "gemm_wide", _gemm(WideTactic(64, 1, 2, 2), (70, 72, 416), (40, 200, 1536)), ("sm_90a",)
    ),
    "gemm, wide divided": Subject(
        "gemm_wide",
        _gemm(WideTactic(64, 2, divided=True), (70, 136, 416), (70, 264, 1536), (300, 520, 160), block_format=MXFP4),
        ("sm_90a",),
    ),
    "gemm, wide cluster": Subject(
        "gemm_wide",
        _gemm(WideTactic(64, 2, cluster=2), (130, 520, 160), (70, 264, 1536), (1100, 264, 160)),
        ("sm_90a",),
    ),
    "mm_fp4, portable": Subject(
        "gemm_portable",
        (
            on(lambda device: mm_fp4.test_formats_layouts_and_dtypes(device, NVFP4, TILED, BF16)),
            on(mm_fp4.test_every_e4m3_scale),
            on(mm_fp4.test_strides),
            _races,
        ),
        ("sm_80", "sm_120a"),
    ),
    "mm_fp4, K = 64": Subject(
        "gemm_blockscaled",
        _mm_fp4(blockscaled.K64_CASES[0], (K64Tactic(64, 1, 2), 1, 1050, 72, 64, NVFP4, BF16)),
        ("sm_100a",),
    ),
    "mm_fp4, K = 64 in pairs": Subject(
        "gemm_blockscaled",
        _mm_fp4(blockscaled.K64_CASES[4], (K64Tactic(64, 2, 2), 2, 2600, 72, 64, MXFP4, BF16)),
        ("sm_100a",),
    ),
    "mm_fp4, K = 64 in clusters": Subject(
        "gemm_blockscaled",
        _mm_fp4(
            (K64Tactic(64, 1, 2, cluster_m=2, cluster_n=2), 4, 330, 328, 576, NVFP4, BF16),
            (K64Tactic(64, 1, 2, cluster_m=2, cluster_n=2), 4, 1300, 136, 64, NVFP4, BF16),
        ),
        ("sm_100a",),
    ),
    "mm_fp4, K = 64 split": Subject(
        "gemm_blockscaled",
        _mm_fp4(
            (K64Tactic(64, 1, 2, swap_ab=True, split=4), 4, 61, 392, 1216, NVFP4, BF16),
            (K64Tactic(64, 1, 2, swap_ab=True, split=4), 4, 100, 1304, 1024, NVFP4, BF16),
        ),
        ("sm_100a",),
    ),
    "mm_fp4, K = 96": Subject(
        "gemm_blockscaled_k96",
        _mm_fp4(blockscaled.K96_CASES[0], (K96Tactic(64, 1, 2, 2), 1, 1050, 72, 64, NVFP4, BF16)),
        ("sm_103a",),
    ),
}

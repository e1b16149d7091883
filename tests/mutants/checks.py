"""What judges the arithmetic of each kernel: its family's own simulated tests, the cheapest first."""

from __future__ import annotations

from typing import NamedTuple

import torch

from jitfp4.families.gdn.kernels.chunk import ChunkTactic
from jitfp4.families.gdn.kernels.delta_rule import WalkTactic
from jitfp4.families.gemm.kernels.blockscaled import K64Tactic
from jitfp4.families.gemm.kernels.blockscaled_k96 import K96Tactic
from jitfp4.families.gemm.kernels.narrow import NarrowTactic
from jitfp4.families.gemm.kernels.wide import WideTactic
from jitfp4.families.norm.kernels.rmsnorm_fp4quant import Tactic
from jitfp4.families.norm.kernels.rows_fp4quant import RowsTactic
from jitfp4.families.quantize.kernels.e4m3 import TACTICS as TABLE_TACTICS
from jitfp4.formats import MXFP4, NVFP4
from tests.families import test_attention_wgmma as attention_wgmma
from tests.families import test_dequantize as dequantize
from tests.families import test_fp4_blockscaled as blockscaled
from tests.families import test_fp4_quantize as fp4
from tests.families import test_fp4_quantize_table as table
from tests.families import test_gdn_chunk as chunk
from tests.families import test_gdn_kernel as gdn
from tests.families import test_grouped as grouped
from tests.families import test_kv_append as append
from tests.families import test_kv_dequantize as kv_read
from tests.families import test_kv_quantize as kv_quantize
from tests.families import test_mm_fp4 as mm_fp4
from tests.families import test_prefill as prefill
from tests.families import test_quantize as quantize
from tests.mutants.runs import (
    BF16,
    F16,
    TILED,
    Check,
    chunk_steps,
    decode,
    fp4_cases,
    full_rows,
    gates,
    gdn_steps,
    gdn_writes,
    norm_rows,
    on,
    portable_races,
    prefill_cases,
    products,
    rows_by_warps,
    short_rows,
)


class Subject(NamedTuple):
    """A kernel, by the name of its entry: that of every module that the first check runs."""

    entry: str
    checks: tuple[Check, ...]
    archs: tuple[str, ...] = ("sm_90a", "sm_100a")


_INDICES = ((torch.int32,) * 5, (torch.int64, torch.int32, torch.int32, torch.int64, torch.int32))
_CUTS = (WalkTactic(16, 2, 2, bulk_stores=True), WalkTactic(64, 4, 4, use_smem_v=True, keep_state=True))
CHECKS: dict[str, Subject] = {
    "norm, one warp": Subject("norm_rmsnorm_fp4quant", (*norm_rows(Tactic(3, 1), 1104), full_rows(Tactic(3, 1), 1536))),
    "norm, eight warps": Subject(
        "norm_rmsnorm_fp4quant", (*norm_rows(Tactic(2, 8), 3088), full_rows(Tactic(2, 8), 8192))
    ),
    "norm, cluster": Subject(
        "norm_rmsnorm_fp4quant",
        (*norm_rows(Tactic(2, 16, clustered=True), 16400), full_rows(Tactic(2, 16, clustered=True), 32768)),
    ),
    "norm, stream": Subject(
        "norm_rmsnorm_fp4quant",
        (*norm_rows(Tactic(8, 16, stream=True), 9232), full_rows(Tactic(8, 16, stream=True), 65536)),
    ),
    "norm, short rows": Subject("norm_rmsnorm_fp4quant", (rows_by_warps, short_rows)),
    "norm, a CTA for a row": Subject(
        "norm_rows_fp4quant", (*norm_rows(RowsTactic(2), 3088), full_rows(RowsTactic(1), 4096))
    ),
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
        (
            on(table.test_float8_input_through_the_table_is_the_reference, TILED, TABLE_TACTICS[0]),
            *(on(table.test_a_warp_takes_several_tasks_of_float8_input, shape) for shape in ((260, 2400), (20, 6416))),
        ),
        ("sm_90a",),
    ),
    "quantize, per token": Subject(
        "quantize_per_token",
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
            gdn_steps(WalkTactic(16, 2, 2), 64, 1),
            gates(WalkTactic(16, 2, 2), 64, 1),
            lambda arch: gdn.check_without_slots(arch, WalkTactic(16, 2, 2)),
        ),
    ),
    "gdn, bulk stores": Subject(
        "gdn_delta_rule", (gdn_steps(_CUTS[0], 64, 3), gdn_steps(_CUTS[0], 64, 6, update=False), gates(_CUTS[0], 64, 3))
    ),
    "gdn, v in shared memory": Subject(
        "gdn_delta_rule",
        (
            gdn_steps(_CUTS[1], 64, 3),
            gdn_steps(_CUTS[1], 64, 6, update=False),
            gates(_CUTS[1], 64, 3),
            gdn_writes(_CUTS[1]),
        ),
    ),
    "gdn, pools": Subject("gdn_delta_rule", (gdn.test_simulated_pools_strides_and_orders,)),
    "gdn, chunk": Subject(
        "gdn_chunk",
        (
            chunk_steps(5, ChunkTactic(4)),
            chunk_steps(8, ChunkTactic(4), use_qk_l2norm=False, scale=0.75),
            lambda arch: chunk.TestSimulated().test_strides(arch),
        ),
    ),
    "gdn, chunk ahead": Subject(
        "gdn_chunk",
        (
            chunk_steps(16, ChunkTactic(4, ahead=4)),
            chunk_steps(13, ChunkTactic(4, ahead=4), disable_state_update=True, use_qk_l2norm=False),
        ),
    ),
    "attention, nvfp4": Subject("attention_decode", decode()),
    "attention, e4m3": Subject("attention_decode", decode(cache=torch.float8_e4m3fn)),
    "attention, bf16": Subject("attention_decode", decode(cache=BF16)),
    "prefill, nvfp4": Subject(
        "attention_prefill",
        (*prefill_cases(prefill, "missing_pages", "all_tokens", "scattered", "many_tiles"), prefill.check_table_ends),
    ),
    "prefill, interleaved": Subject(
        "attention_prefill",
        prefill_cases(prefill, "ragged_interleaved", "scattered_interleaved", "many_requests_interleaved"),
    ),
    "prefill, bf16": Subject("attention_prefill", prefill_cases(prefill, "cache_bf16", "scattered_bf16")),
    "prefill, e4m3": Subject(
        "attention_prefill", prefill_cases(prefill, "cache_e4m3", "scattered_e4m3", "many_requests", "many_tiles_e4m3")
    ),
    "prefill, wgmma": Subject(
        "attention_prefill_wgmma", prefill_cases(attention_wgmma, "scattered", "ragged"), ("sm_90a",)
    ),
    "gemm, narrow": Subject(
        "gemm_narrow",
        (
            *products(NarrowTactic(8, 2, 2, 2, 2, 1), (5, 72, 672), (19, 64, 160)),
            *products(NarrowTactic(8, 2, 2, 2, 2, 1, split=5), (5, 72, 672))[:1],
        ),
    ),
    "gemm, narrow split": Subject(
        "gemm_narrow",
        products(NarrowTactic(16, 2, 2, 2, 2, 1, split=2), (13, 72, 1056), block_format=MXFP4),
    ),
    "gemm, wide split": Subject(
        "gemm_wide", products(WideTactic(64, 1, 2, 2), (70, 72, 416), (40, 200, 1536)), ("sm_90a",)
    ),
    "gemm, wide divided": Subject(
        "gemm_wide",
        products(WideTactic(64, 2, divided=True), (70, 136, 416), (70, 264, 1536), (300, 520, 160), block_format=MXFP4),
        ("sm_90a",),
    ),
    "gemm, wide cluster": Subject(
        "gemm_wide",
        products(WideTactic(64, 2, cluster=2), (130, 520, 160), (70, 264, 1536), (1100, 264, 160)),
        ("sm_90a",),
    ),
    "mm_fp4, portable": Subject(
        "gemm_portable",
        (
            on(lambda device: mm_fp4.test_formats_layouts_and_dtypes(device, NVFP4, TILED, BF16)),
            on(mm_fp4.test_every_e4m3_scale),
            on(mm_fp4.test_strides),
            portable_races,
        ),
        ("sm_80", "sm_120a"),
    ),
    "mm_fp4, K = 64": Subject(
        "gemm_blockscaled",
        fp4_cases(blockscaled.K64_CASES[0], (K64Tactic(64, 1, 2), 1, 1050, 72, 64, NVFP4, BF16)),
        ("sm_100a",),
    ),
    "mm_fp4, K = 64 in pairs": Subject(
        "gemm_blockscaled",
        fp4_cases(blockscaled.K64_CASES[4], (K64Tactic(64, 2, 2), 2, 2600, 72, 64, MXFP4, BF16)),
        ("sm_100a",),
    ),
    "mm_fp4, K = 64 in clusters": Subject(
        "gemm_blockscaled",
        fp4_cases(
            (K64Tactic(64, 1, 2, cluster_m=2, cluster_n=2), 4, 330, 328, 576, NVFP4, BF16),
            (K64Tactic(64, 1, 2, cluster_m=2, cluster_n=2), 4, 1300, 136, 64, NVFP4, BF16),
        ),
        ("sm_100a",),
    ),
    "mm_fp4, K = 64 split": Subject(
        "gemm_blockscaled",
        fp4_cases(
            (K64Tactic(64, 1, 2, swap_ab=True, split=4), 4, 61, 392, 1216, NVFP4, BF16),
            (K64Tactic(64, 1, 2, swap_ab=True, split=4), 4, 100, 1304, 1024, NVFP4, BF16),
        ),
        ("sm_100a",),
    ),
    "mm_fp4, K = 96": Subject(
        "gemm_blockscaled_k96",
        fp4_cases(blockscaled.K96_CASES[0], (K96Tactic(64, 1, 2, 2), 1, 1050, 72, 64, NVFP4, BF16)),
        ("sm_103a",),
    ),
}

"""What judges the arithmetic of each kernel: its family's own simulated tests, the cheapest first."""

from __future__ import annotations

import torch

from jitfp4.families.attention.kernels.decode_masked import MaskedDecodeTactic
from jitfp4.families.attention.kernels.prefill_masked import MaskedPrefillTactic
from jitfp4.families.attention.kernels.prefill_wgmma_masked import MaskedWgmmaTactic
from jitfp4.families.gdn.kernels.chunk import ChunkTactic
from jitfp4.families.gdn.kernels.delta_rule import WalkTactic
from jitfp4.families.gdn.kernels.prefill import PrefillTactic
from jitfp4.families.gdn.kernels.prefill_wgmma import WgmmaTactic as WgmmaPrefillTactic
from jitfp4.families.norm.kernels.rmsnorm_fp4quant import Tactic
from jitfp4.families.norm.kernels.rows_fp4quant import RowsTactic
from jitfp4.families.quantize.kernels.e4m3 import TACTICS as TABLE_TACTICS
from tests.families import test_attention_fp4_output as fp4_output
from tests.families import test_attention_masks as attention_masks
from tests.families import test_attention_wgmma as attention_wgmma
from tests.families import test_conv as conv
from tests.families import test_dequantize as dequantize
from tests.families import test_fp4_quantize as fp4
from tests.families import test_fp4_quantize_table as table
from tests.families import test_gdn_chunk as chunk
from tests.families import test_gdn_kernel as gdn
from tests.families import test_gdn_prefill as gdn_prefill
from tests.families import test_grouped as grouped
from tests.families import test_kv_append as append
from tests.families import test_kv_dequantize as kv_read
from tests.families import test_kv_quantize as kv_quantize
from tests.families import test_norm_fp8 as norm_fp8
from tests.families import test_prefill as prefill
from tests.families import test_quantize as quantize
from tests.families import test_rmsnorm as rmsnorm
from tests.families import test_rope_append as rope_append
from tests.families import test_step as step
from tests.mutants.checks_experts import CHECKS_EXPERTS
from tests.mutants.checks_gemm import CHECKS_GEMM
from tests.mutants.runs import (
    BF16,
    F16,
    TILED,
    Subject,
    chunk_steps,
    decode,
    full_rows,
    gates,
    gdn_steps,
    gdn_writes,
    masks,
    norm_rows,
    on,
    prefill_cases,
    prompts,
    rows,
    rows_by_warps,
    short_rows,
)

_I32, _I64 = torch.int32, torch.int64
_INDICES = ((_I32, _I64, _I64, _I32, _I64), (_I64, _I32, _I32, _I64, _I32))
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
    "norm, plain": Subject("norm_rmsnorm", rows(rmsnorm.check)),
    "norm, rows in E4M3": Subject(
        "norm_rows_fp8quant",
        rows(norm_fp8.check),
    ),
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
    "kv, rope append": Subject(
        "kv_rope_append",
        (
            lambda arch: rope_append.test_simulated_kernel(rope_append.KINDS[0], arch),
            lambda _: rope_append.test_a_position_outside_gives_nan_and_nothing_else_changes(True),
        ),
    ),
    "kv, rope append of pairs": Subject(
        "kv_rope_append", (lambda arch: rope_append.test_simulated_kernel(rope_append.KINDS[3], arch),)
    ),
    "conv, prompts": Subject(
        "conv_causal",
        (
            on(lambda device: conv.test_ragged_prompts(device, BF16, 4, 72, True)),
            on(conv.test_slots_that_are_none),
            on(conv.test_large_sums),
            on(conv.test_prompts_in_parts_are_whole_prompts),
        ),
    ),
    "conv, tokens": Subject(
        "conv_causal",
        (
            on(lambda device: conv.test_a_token_of_each(device, BF16, 4, 72, False)),
            on(conv.test_rows_apart),
            on(conv.test_tokens_without_a_slot),
            on(lambda device: conv.test_several_tokens_of_each(device, 3, True)),
            on(lambda device: conv.test_drafted_tokens(device, True, False)),
        ),
    ),
    "gdn, prefill": Subject(
        "gdn_prefill",
        (prompts(PrefillTactic(32, 2), 5, 0, 64, 67), prompts(PrefillTactic(32, 2), 130, seed=3)),
    ),
    "gdn, prefill on warpgroups": Subject(
        "gdn_prefill_wgmma", (prompts(WgmmaPrefillTactic(64), 5, 0, 64, 67),), ("sm_90a",)
    ),
    "gdn, prefill in one kernel": Subject(
        "gdn_prefill_wgmma", (prompts(WgmmaPrefillTactic(128, fused=True), 67, 130, head_dim=128),), ("sm_90a",)
    ),
    "gdn, prefill products": Subject(
        "gdn_prefill_products",
        (lambda _: gdn_prefill.test_the_products_of_chunks(), prompts(WgmmaPrefillTactic(64), 67, head_dim=128)),
        ("sm_90a",),
    ),
    "gdn, prefill in parts": Subject(
        "gdn_prefill_parts", (prompts(WgmmaPrefillTactic(64, divided=True), 530, 3),), ("sm_90a",)
    ),
    "gdn, prefill joined": Subject(
        "gdn_prefill_join", (prompts(WgmmaPrefillTactic(64, divided=True), 530, 3),), ("sm_90a",)
    ),
    "gdn, one token": Subject(
        "gdn_delta_rule",
        (
            gdn_steps(WalkTactic(16, 2, 2), 64, 1),
            gates(WalkTactic(16, 2, 2), 64, 1),
            lambda arch: gdn.check_without_slots(arch, WalkTactic(16, 2, 2)),
        ),
    ),
    "gdn, one token of bf16 states": Subject(
        "gdn_delta_rule",
        (lambda _: gdn.test_simulated_rows_of_one_token_stay_as_in_memory(WalkTactic(64, 4, 2), BF16),),
        ("sm_90a",),
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
    "gdn, chunk by bulk copies": Subject(
        "gdn_chunk",
        (
            chunk_steps(3, ChunkTactic(4, bulk=True), state_dtype=BF16),
            chunk_steps(8, ChunkTactic(2, bulk=True), head_dim=128),
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
    "attention, masked": Subject(
        "attention_decode_masked", masks(attention_masks.FEW, MaskedDecodeTactic(2, 2, 1), with_sinks=True)
    ),
    "attention, NVFP4 output": Subject(
        "attention_quantize", (on(lambda device: fp4_output.test_given_and_allocated(torch.uint8, device)),)
    ),
    "prefill, masked": Subject(
        "attention_prefill_masked", masks(attention_masks.MANY, MaskedPrefillTactic(4, 16, 32, 1), with_sinks=True)
    ),
    "prefill, wgmma masked": Subject(
        "attention_prefill_wgmma_masked",
        masks(attention_masks.MANY, MaskedWgmmaTactic(2, 1, 64), cache=torch.float8_e4m3fn, window_left=25),
        ("sm_90a",),
    ),
    "decode step": Subject("step_decode", (lambda _: step.test_simulated(races=False),), ("sm_90a",)),
}
CHECKS |= CHECKS_GEMM | CHECKS_EXPERTS

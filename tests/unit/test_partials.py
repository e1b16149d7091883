"""A partial is a header: it includes what it uses, at its top, and compiles alone, with a stub of what it takes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import jitfp4.families  # noqa: F401 - registers every kernel
from jitfp4 import nvrtc
from jitfp4.arch import Arch
from jitfp4.errors import CompileError, RenderError
from jitfp4.kernel import kernels
from jitfp4.render import render_partial, templates_dir

FOLDER = templates_dir()
PARTIALS = sorted(path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*.cuh.j2"))

TAKES = {
    f"attention/{name}.cuh.j2"
    for name in (
        *("byte_tile", "cluster_items", "combine", "expand", "half_tile", "items", "nvfp4_tile", "pages", "parts"),
        *("queries", "softmax", "team", "work"),
    )
} | {"step/attention.cuh.j2", "step/parts.cuh.j2"}
"""Those that still take names of the template that includes them. One that does not any more leaves the list."""

SPECS = {
    "attention/blocks.cuh.j2": "attention/prefill_masked",
    "attention/products.cuh.j2": "attention/prefill_wgmma",
    "gemm/fp8_products.cuh.j2": "gemm/wide_fp8",
    "gemm/products.cuh.j2": "gemm/wide",
    "gemm/start_product.cuh.j2": "gemm/wide",
    "gemm/wide_fp8_mainloop.cuh.j2": "gemm/wide_fp8",
    "gemm/wide_mainloop.cuh.j2": "gemm/wide",
    "gemm/wide_steps.cuh.j2": "gemm/wide",
    "experts/wide.cuh.j2": "experts/wide_up",
    "experts/wide_config.cuh.j2": "experts/wide_up",
    "experts/wide_mainloop.cuh.j2": "experts/wide_up",
}
"""Those whose text a spec makes, as assembly that names each register; and a kernel that has such specs."""

GDN = """
struct Stub {
  using In = f16;
  using State = float;
  static constexpr StateLayout kStateLayout = StateLayout::kVk;
  static constexpr bool kGeneral = true;
  static constexpr int kHeadDim = 128, kValueDim = 128, kMaxTokens = 4, kTileV = 64, kIlpRows = 2, kWarps = 4;
  static constexpr int kAhead = 64, kLanes = 8;
};
using C = Lanes<Stub>;
struct Operands {
  const In *q, *k, *v;
  const void *a, *b, *slots, *step_slots, *dt_bias;
  const float* a_log;
  const float* state;
  int tokens, batch, pool, heads_ratio, value_heads, a_bytes, b_bytes, slot_bytes, step_slot_bytes, dt_bias_type;
  int64 state_stride, state_head_gap, q_batch_stride, q_token_stride, k_batch_stride, k_token_stride, v_batch_stride;
  int64 a_batch_stride, a_token_stride, b_batch_stride, b_token_stride, steps_batch_stride, steps_token_stride;
};
""".replace("const In *q", "const f16 *q")
GDN_ROWS = """
__global__ void rows(C::Rows& h, float* p) {
  load_rows<C, StateLayout::kVk>(h, p + lane_offset<C, StateLayout::kKv>(0, 0));
  store_rows<C, To::kShared, StateLayout::kKv>(h, p);
}
"""
BLOCKSCALED = """
struct Config {
  using Out = f16;
  static constexpr Format kFormat = Format::kNvfp4;
  static constexpr int kTileN = 128, kCtaGroup = 2, kClusterM = 1, kClusterN = 2, kSplit = 2, kStages = 3, kPartN = 64;
  static constexpr bool kSwapAb = false, kTmaStore = false;
};
"""
EPILOGUE = """
template struct Epilogue<Config>;
struct Smem {
  uint8 out[4][2][4096];
  Barrier accumulator_full[2], accumulator_empty[2];
  uint32 tmem;
};
__global__ void run(Epilogue<Config>& e, Smem& smem, TileScheduler<Config>& tiles, TensorMap& map, f16* out) {
  init_epilogue<Config>(smem);
  e.run(smem, tiles, 8, nullptr, map, out, 8);
}
"""
PORTABLE = """
struct Config {
  using Out = bf16;
  static constexpr Format   kFormat  = Format::kNvfp4;
  static constexpr SfLayout kALayout = SfLayout::k8x4;
  static constexpr int kTileM = 16, kTileN = 128, kWarpM = 16, kWarpN = 32, kGroups = 2, kStages = 3;
  static constexpr bool kHasClusters = true, kScaledMma = true;
};
__global__ void run(PortableOperands<bf16>& p) { PortableGemm<Config>::run(p); }
"""
BLOCKS = """
struct Chunk {
  __device__ uint32 vector(uint32 row, uint32 v) const { return row + v; }
  __device__ const uint8* scale(uint32 row, uint32 column) const { return nullptr; }
};
struct Place { int a, b, a_scales, b_scales; };
__global__ void run(float (&sums)[1][2][4], Chunk& a, Place& place) {
  %s<Format::kMxfp4>::multiply(sums, a, a, place, 64, 3);
}
"""
WIDE = """
struct Weight { static __device__ void decode(Fragments& a, uint32 tile, uint32 half, const Place& place) {} };
struct Shared {
  uint8   x[4][32 * 128], weight[3][2][4608];
  Barrier full[4], empty[4], weight_full[3], weight_empty[3];
};
template struct Consumer<Shared, Weight, 32, 1, 1>;
"""
WIDE_SCHEDULE = """
struct Config {
  static constexpr int  kTileM = 64, kTileN = 128, kCommonN = 0, kCluster = 2, kSplit = 1, kBandM = 4;
  static constexpr bool kShared = false, kDivided = true;
};
template class WideSchedule<Config>;
"""
WIDE_STEPS = """
struct Weight {
  struct Codes {};
  static __device__ Codes load(uint32 tile, uint32 half, const Place& place) { return {}; }
  static __device__ void decode(Fragments& a, const Codes& of) {}
};
struct Shared {
  uint8   x[4][2 * 32 * 128], weight[4][2][4608];
  Barrier full[4], empty[4];
};
template struct StepConsumer<Shared, Weight, 32, 2>;
"""
WIDE_FP8 = """
struct Shared {
  uint8   x[4][64 * 128], weight[3][2][4608];
  Barrier full[4], empty[4], weight_full[3], weight_empty[3];
};
__global__ void run(Shared& shared, float (&sums)[32]) {
  Fp8Consumer<Shared, Format::kNvfp4, 64, 2>{shared, 0, 0, 0}.accumulate(sums, 3);
}
"""
REQUEST = """
struct Operands {
  const int32 *cum_q, *page_ends, *seq_lens, *tables, *mask_ends;
  const uint8 *k, *v, *k_scales, *v_scales, *mask;
  int   batch, q_len, total_q, num_pages, max_pages, table_stride, v_table, page, group, window_left, kv_heads;
  int   k_page_stride, k_token_stride, v_page_stride, v_token_stride, mask_row_bytes, causal;
  int   k_scales_page_stride, k_scales_token_stride, v_scales_page_stride, v_scales_token_stride;
  int64 k_head_stride, v_head_stride, k_scales_head_stride, v_scales_head_stride, mask_bytes;
};
"""
ROWS = """
struct Operands {
  const bf16* q;
  bf16*       out;
  float *     lse, bmm1, bmm2;
  const float *bmm1_tensor, *bmm2_tensor, *sinks;
  int   group, kv_heads;
  int64 q_token_stride, q_head_stride;
};
struct Block {
  struct { int q_begin; } request;
  int head, first_row;
  __device__ int rows(const Operands&) const { return 8; }
};
"""
USES: dict[str, tuple[str, str]] = {
    "attention/blocks.cuh.j2": (
        "sm_80",
        REQUEST + "__global__ void run(const Operands& p, int* to) {\n  RowBlock<64, 16> block;\n"
        "  if (!block.find(p)) return;\n"
        "  *to = block.rows(p) + Sight(p, block, 0, 16).some_first() + block.mask.bits(p, 0, 0);\n}\n",
    ),
    "attention/rows.cuh.j2": (
        "sm_80",
        ROWS + "__global__ void run(const Operands& p, Block& block, uint32 (&a)[4], float (&x)[2][8][4]) {\n"
        "  RowQueries<bf16, f16, 128, 2, 128, false> held;\n  RowSoftmax<2, 64, 128> state;\n"
        "  RowScales<2> scales;\n  held.load(p, block, 1, 0, scales), held.get(1, 2, a), state.clear();\n"
        "  state.cap(1, x, scales), state.keep_above(x, scales.ones()), state.finish(p, block, 1);\n}\n",
    ),
    "attention/tiles.cuh.j2": (
        "sm_80",
        REQUEST + "struct Request { int table; };\ntemplate struct CacheTiles<4, 128, 128, true, 64, 128, 0>;\n"
        "using Tiles = CacheTiles<8, 80, 128, false, 32, 256, 64>;\n"
        "__global__ void run(const Operands& p, Tiles::Shared& s, const Request& r) {\n"
        "  Tiles::Lookup(p, r, 1, 2, 3, 4).put(p, s, 0), Tiles::copy_tile(p, s, 0, 1), Tiles::decode_tile(s, 1);\n}\n",
    ),
    "attention/codes.cuh.j2": (
        "sm_100a",
        "__global__ void run(uint32 (&pair)[4]) { decode(5, pair), pair[0] = decode_scales(multiply_add(1, 2, 3)); }\n",
    ),
    "attention/columns.cuh.j2": (
        "sm_80",
        REQUEST + "__global__ void run(const Operands& p, int* to) { *to = column_of(3, inverse_of_page(p)); }\n",
    ),
    "attention/products.cuh.j2": ("sm_90a", "__global__ void run(float (&d)[16]) { hold(d); }\n"),
    "attention/scales.cuh.j2": (
        "sm_80",
        "struct Operands { float bmm1, bmm2; const float *bmm1_tensor, *bmm2_tensor, *sinks; };\n"
        "__global__ void run(const Operands& p, float* x) {\n"
        "  const float factor = add_sink(p, 0, x[0], x[1]) * logit_scale(p, 1) * query_exponent(x[0]);\n"
        "  x[2] = output_factor(factor, output_scale(p, 1), x[1]), x[3] = row_lse(x[0], x[1]);\n}\n",
    ),
    "attention/references.cuh.j2": (
        "sm_80",
        "__global__ void run(float* x) { *x = next_reference(RowScales<2>::ones().x[1][0], kNone); }\n",
    ),
    "attention/request.cuh.j2": (
        "sm_80",
        REQUEST + "__global__ void run(const Operands& p, TiledRequest<32, 8, 2>& r) { r.load(p, r.items(p)); }\n",
    ),
    "experts/activation.cuh.j2": (
        "sm_80",
        "struct Results { __device__ float4 of_sums(const float* sums, int) const { return {*sums}; } };\n"
        "__global__ void run(float4* to, const float* sums) {\n"
        "  *to = Activation<true, 32>{1, 1, 7}.of_sums(Results{}, sums, int(ctas() - cta_number()));\n"
        "  *to = Activation<false, 32>{}.of_sums(Results{}, sums, 0);\n}\n",
    ),
    "experts/finish.cuh.j2": (
        "sm_80",
        "struct Rows { int32 assignment[8], finished[8]; uint32 taken[8]; };\n"
        "__global__ void run(Finish<bf16, 16, 128>& f, Rows& rows, Routing& routing, int32* done, bf16* out) {\n"
        "  f.count(rows, done, 8, threadIdx.x, 0, 1), f.add_up(rows, 8, 0, threadIdx.x, 4, 0, 1);\n"
        "  zero_tokens<16, 4>(routing, out, 8, 2, 64, 64, 0, 0, threadIdx.x);\n}\n",
    ),
    "experts/rows.cuh.j2": (
        "sm_80",
        "__global__ void run(Item* to, const int4* items, Routing& routing, int32 (&rows)[8]) {\n"
        "  to[0] = listed_item<8>(items, 1, 2), to[1] = found_item(routing, 0, 9, rows, 0, threadIdx.x);\n}\n",
    ),
    "gdn/prefill_item.cuh.j2": (
        "sm_80",
        "struct Operands {\n"
        "  const void *cu_seqlens, *slots, *checkpoint_starts;\n  const uint8* products;\n  f16* out;\n"
        "  int64 cu_seqlens_bytes, tokens, pool, checkpoint_every, checkpoint_count;\n"
        "  int   slot_bytes, start_bytes, state_bytes;\n  uint32 heads;\n};\n"
        "__global__ void run(const Operands& p, const f16* k, int64* to) {\n"
        "  const PrefillItem<f16, 128, 256, 64> item(p);\n"
        "  item.clear_outputs(p, threadIdx.x, 32);\n"
        "  to[0] = item.slot(p) + item.chunks() + item.tokens_of(1) + item.checkpoint(p, 64);\n"
        "  to[1] = item.part_of_state(p, 1, 2, 3) + *item.products(p) + (item.rows<128>(k, 128, 2) - k);\n}\n",
    ),
    "gdn/prefill_source.cuh.j2": (
        "sm_80",
        "__global__ void run(Source<bf16, 64, 128, 128>& source) {\n"
        "  __shared__ bf16 rows[64][136];\n  source.copy(rows, 7);\n}\n",
    ),
    "gdn/prefill_states.cuh.j2": (
        "sm_80",
        "__global__ void run(float (&h)[2][4][4], uint8* p) { load_state<128>(h, p, 4), store_state<128>(h, p, 2); }\n",
    ),
    "gdn/squares.cuh.j2": (
        "sm_80",
        "__global__ void run(float (&x)[2][4], bf16* to) {\n  __shared__ bf16 rows[16][24];\n"
        "  multiply<bf16>(x[0], x[1], ptx::load_matrices(left_in(rows)), ptx::load_matrices(right_in(rows)));\n"
        "  put<24>(to, x[0]);\n}\n",
    ),
    "gdn/wgmma.cuh.j2": (
        "sm_90a",
        "__global__ void run(float (&x)[8][4], float (&y)[16][4], uint4 a) {\n"
        "  ptx::wgmma<bf16, false>(x, a, ptx::wgmma_matrix(0, 8192));\n"
        "  ptx::wgmma<f16, true>(y, a, 0), ptx::wgmma_wait_for<1>(x), ptx::wgmma_wait_for<0>(y);\n"
        "  ptx::copy_async_arrive(nullptr);\n}\n",
    ),
    "gemm/fp8_expansion.cuh.j2": (
        "sm_90a",
        "template struct Fp8Weight<bf16, Format::kMxfp4>;\n"
        "__global__ void run(const uint8* tiles, const float* scales, uint8* to, uint32* counters) {\n"
        "  const Expansion<Format::kNvfp4> expansion(tiles, scales, to, counters, 128, 4, 2);\n"
        "  expansion.run(threadIdx.x), expansion.wait(0, 0), expansion.finish(1, threadIdx.x);\n}\n",
    ),
    "gemm/fp8_results.cuh.j2": (
        "sm_90a",
        "using Results = WideResults<bf16, 64, 2, 2, 1, 1, false>;\n"
        "__global__ void run(uint8 (&to)[2][4096], const TensorMap& out, float (&sums)[32], const float* scales) {\n"
        "  RowScales<64>(scales, 1, 0, 100, 0).multiply(sums, 0);\n"
        "  write_parts<Results, 2>(to, {out, {0, 0}, 64, false}, sums, 1, threadIdx.x, {}, {});\n}\n",
    ),
    "gemm/group_sums.cuh.j2": (
        "sm_90a",
        "struct Sums { static constexpr int kGroups = 2, kGap = 64; };\n"
        "__global__ void run(float4* p, const float* x) { *p = add(sum_groups<Sums>(x), sum_cluster(x, 2)); }\n",
    ),
    "gemm/multiply.cuh.j2": (
        "sm_80",
        "template struct WeightPiece<bf16, Format::kMxfp4, 8, 2>;\n"
        "template struct WeightPiece<f16, Format::kNvfp4, 16, 1>;\n",
    ),
    "gemm/output.cuh.j2": (
        "sm_80",
        "template struct Output<bf16, Format::kMxfp4>;\ntemplate struct Output<f16, Format::kNvfp4>;\n",
    ),
    "gemm/packed_weight.cuh.j2": (
        "sm_90a",
        "using Weight = PackedWeight<f16, Format::kNvfp4>;\ntemplate struct PackedWeight<bf16, Format::kMxfp4>;\n"
        "__global__ void run(Weight& w, uint8 (&to)[2][Weight::kTileBytes], Barrier* b) { w.load(to, 0, 0, 1, b); }\n",
    ),
    "gemm/pieces.cuh.j2": (
        "sm_90a",
        "using Piece = WeightPiece<bf16, Format::kNvfp4, 8, 3>;\ntemplate struct GroupSums<Piece, 2, 48>;\n"
        "template struct PieceLoads<Piece, true>;\ntemplate struct PieceLoads<Piece, false>;\n",
    ),
    "gemm/prepared_weight.cuh.j2": (
        "sm_90a",
        "using Weight = PreparedWeight<f16, bf16, Format::kMxfp4>;\n"
        "template struct PreparedWeight<bf16, bf16, Format::kNvfp4>;\n"
        "__global__ void run(Weight& w, uint8 (&to)[2][Weight::kTileBytes], Barrier* b) { w.load(to, 0, 0, 1, b); }\n",
    ),
    "gemm/wide_fp8_mainloop.cuh.j2": ("sm_90a", WIDE_FP8),
    "gemm/wide_common.cuh.j2": ("sm_90a", "template struct CommonSums<32>;\n"),
    "gemm/wide_mainloop.cuh.j2": ("sm_90a", WIDE),
    "gemm/wide_steps.cuh.j2": ("sm_90a", WIDE_STEPS),
    "gemm/wide_schedule.cuh.j2": ("sm_90a", WIDE_SCHEDULE),
    "gemm/wide_results.cuh.j2": (
        "sm_90a",
        "using Results = WideResults<bf16, 64, 2, 2, 2, 2, false>;\ntemplate class Exchange<64, 2, 2, 16384>;\n"
        "__global__ void run(float (&sums)[32], const float* other) {\n"
        "  Results::stage<1>(0, sums, threadIdx.x, {}, {});\n"
        "  Results::stage_total<0>(1, 2, 0, other, 0, sums, threadIdx.x, {}, {});\n}\n",
    ),
    "gdn/lanes.cuh.j2": ("sm_90a", GDN),
    "gdn/rows.cuh.j2": ("sm_90a", GDN + GDN_ROWS),
    "gdn/row_writer.cuh.j2": (
        "sm_90a",
        GDN + "template struct RowWriter<C, true>;\n"
        "__global__ void write(RowWriter<C, true>& w, C::Rows& h, float* p) { w.write<true>(h, p); }\n",
    ),
    "gdn/operands.cuh.j2": (
        "sm_90a",
        GDN + "__global__ void run(Operands& p, Item<C>& item, f16* out) {\n"
        "  clear_outputs<C>(p, out + item.values(p) + item.outputs(p) + item.rows<StateLayout::kVk>(0, 0));\n"
        "  bring_next_group(p, item);\n"
        "  if (load_gate<C>(p.a, slot_at(p.slots, 4, 0), 4) > load_bias(p.a, 0, Bias::kF16)) out->bits = 0;\n}\n",
    ),
    "gdn/inputs.cuh.j2": (
        "sm_90a",
        GDN + "__global__ void run(Operands& p, Item<C>& item, ItemInputs<C, true>& inputs, float* to) {\n"
        "  inputs.load(p, item);\n  *to = inputs.token(p, item).beta;\n"
        "  inputs.for_rows(p, item, 4, [&](int r, uint2 x) { to[r] = inputs.squares({1, 2, 3, 4}); });\n}\n",
    ),
    "gdn/prologue.cuh.j2": (
        "sm_90a",
        GDN + "__global__ void run(Operands& p, ItemInputs<C, true>& inputs, f16* out) {\n"
        "  begin(p, this_item<C>(), inputs, out);\n}\n",
    ),
    "gemm/tile_scheduler.cuh.j2": (
        "sm_100a",
        BLOCKSCALED.replace("  static constexpr Format kFormat = Format::kNvfp4;\n", "")
        + "template struct ClusterPlace<Config>;\ntemplate struct TileScheduler<Config>;\n",
    ),
    "gemm/cluster_loads.cuh.j2": (
        "sm_100a",
        BLOCKSCALED.replace("  static constexpr Format kFormat = Format::kNvfp4;\n", "")
        + "template struct Share<Config, 2>;\n__global__ void run(Barrier (&b)[3], TensorMap& map, uint8* to) {\n"
        "  drain<Config>(b, Ring<3>{});\n  ClusterPlace<Config> place;\n"
        "  left_share(map, place).load(to, 0, 0, b), right_share(map, place).prefetch(0, 0);\n"
        "  left_scales_share<64>(map, place).load(to, 0, 0, b);\n"
        "  right_scales_share<1, 64>(map, place).load(to, 0, 0, b);\n}\n",
    ),
    "gemm/tmem_epilogue.cuh.j2": ("sm_100a", BLOCKSCALED + EPILOGUE),
    "gemm/masked_tiles.cuh.j2": (
        "sm_100a",
        BLOCKSCALED.replace("  static constexpr Format kFormat = Format::kNvfp4;\n", "")
        + "template struct MaskedScheduler<Config>;\n",
    ),
    "gemm/slice_mainloop.cuh.j2": (
        "sm_100a",
        BLOCKSCALED.replace("kTmaStore = false", "kTmaStore = false, kPrefetch = true")
        + "template struct SliceMainloop<Config>;\n"
        "__global__ void run(BlockscaledOperands<Config>& p) { blockscaled_gemm<Config, SliceMainloop<Config>>(p); }\n",
    ),
    "gemm/blockscaled_shell.cuh.j2": ("sm_100a", BLOCKSCALED + "template struct Epilogue<Config>;\n"),
    "gemm/codes.cuh.j2": (
        "sm_80",
        "__global__ void run(uint32 (&to)[4]) {\n"
        "  unpack_codes<bf16>(to, 3), unpack_codes<f16>(to, 3);\n"
        "  to[0] = unpack_scales<bf16>(1) + unpack_scales<f16>(1);\n}\n",
    ),
    "gemm/portable_gemm.cuh.j2": ("sm_120a", PORTABLE),
    "gemm/half_blocks.cuh.j2": ("sm_80", BLOCKS % "HalfBlocks"),
    "gemm/scaled_blocks.cuh.j2": ("sm_120a", BLOCKS % "ScaledBlocks"),
    "partials/e2m1_decode.cuh.j2": ("sm_80", "__global__ void run(float (&v)[8]) { decode_e2m1x8(3, v); }\n"),
    "partials/formats.cuh.j2": (
        "sm_80",
        "template struct Recipe<Format::kMxfp4>;\ntemplate struct Recipe<Format::kNvfp4>;\n",
    ),
    "partials/four_over_six.cuh.j2": (
        "sm_90a",
        "__global__ void run(uint32 (&x)[8], uint2* to) {\n"
        "  *to = FourOverSix<true>(1, 2.0f, 3.0f).operator()<bf16>(x, 1.0f).codes;\n}\n",
    ),
    "partials/inputs.cuh.j2": (
        "sm_100a",
        "__global__ void run(RawUnit<f16>& raw, const f16* p) { load_unit<f16>(raw, p, is_wide(p, 32)); }\n",
    ),
    "partials/nvfp4.cuh.j2": (
        "sm_80",
        "__global__ void run(uint32 (&x)[8], uint2* to) { *to = encode_block<bf16>(x, block_amax<f16>(x)); }\n",
    ),
    "partials/quantize_task.cuh.j2": (
        "sm_100a",
        "__global__ void run(Matrix<f16>& a, Matrix<e4m3>& b) {\n"
        "  quantize_task<Format::kNvfp4, SfLayout::k128x4, true, true, 2>(a, 1, 0, 0);\n"
        "  quantize_task<Format::kNvfp4, SfLayout::kLinear, false, false, 1>(b, 0, 0, 0);\n}\n",
    ),
    "partials/reduce.cuh.j2": ("sm_80", "__global__ void run(float (&x)[2]) { group_sum<4>(x); }\n"),
    "partials/row_sum.cuh.j2": ("sm_90a", "template struct RowSum<4, true>;\n"),
    "partials/sf_layout.cuh.j2": (
        "sm_80",
        "template struct Sector<SfLayout::k8x4>;\n"
        "__global__ void run(uint64* to) {\n"
        "  *to = sf_offset<SfLayout::k128x4>(1, 2, sf_padded_cols<SfLayout::k8x4>(3));\n}\n",
    ),
    "partials/units.cuh.j2": (
        "sm_80",
        "template struct Weights<f16, true>;\ntemplate struct Weights<bf16, false>;\n"
        "__global__ void run(Unit& u, const float (&x)[16]) { add<f16>(u, u), scale<bf16>(u, x, 1.0f, x); }\n",
    ),
    "partials/vectors.cuh.j2": (
        "sm_80",
        "__global__ void run(uint32 (&w)[4], f16* p) {\n"
        "  ld_halves<8>(p, w), st_halves<4>(p, {to_pair<bf16>(1, 2), 3});\n}\n",
    ),
    "step/products.cuh.j2": (
        "sm_90a",
        "struct Config {\n  using T = f16;\n"
        "  static constexpr int kCtas = 8, kDepth = 2, kQ = 128, kQkv = 384, kHidden = 256, kInter = 384;\n"
        "  static constexpr bool kHasBias = true;\n};\n"
        "struct Shared {\n"
        "  uint8 x[kWarps][256];\n  uint4 zeros;\n  float rows[kWarps][32], squares[2][kWarps], own[32];\n"
        "  struct { float rows[kWarps][96]; } wide;\n};\n"
        "template struct Stream<Config>;\ntemplate struct Products<Config, Shared>;\n",
    ),
}
"""Of templates: an architecture, and code that makes the compiler read them."""


def compiles(partial: str) -> bool:
    arch, use = USES.get(partial, ("sm_90a", ""))
    spec = next(iter(next(iter(kernels(SPECS[partial]))).specs(Arch.of(arch)))) if partial in SPECS else None
    source = render_partial(partial, Arch.of(arch), spec)
    try:
        nvrtc.compile_ptx(f'{source}{use}extern "C" __global__ void alone() {{}}\n', Arch.of(arch), symbol="alone")
    except CompileError as error:
        if partial not in TAKES:
            raise
        return not str(error)
    return True


@pytest.mark.compile
@pytest.mark.parametrize("partial", PARTIALS)
def test_it_compiles_alone(partial: str) -> None:
    try:
        alone = compiles(partial)
    except RenderError:
        alone = False
    assert alone == (partial not in TAKES)


@pytest.mark.parametrize("partial", sorted(set(PARTIALS) - TAKES))
def test_includes_stand_at_the_top(partial: str) -> None:
    text = (FOLDER / partial).read_text()
    assert re.match(r'(//% include ".*" %//\n)*// ---- ' + re.escape(partial.removesuffix(".cuh.j2")) + r" -+\n", text)
    assert text.count("//% include") == len(re.findall(r"\A(?://% include .*\n)*", text)[0].splitlines())


def test_the_list_is_of_partials() -> None:
    assert TAKES | USES.keys() | SPECS.keys() <= set(PARTIALS)
    assert Path(FOLDER).is_dir()

"""What makes the compiler read the templates in partials: stubs of what they take, and code with them."""

from __future__ import annotations

from tests.support import attention_partials, gemm_partials

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
STEP = """
struct Config {
  using T = f16;
  static constexpr int kCtas = 8, kDepth = 2, kHeads = 2, kKvHeads = 1, kGroup = 2, kSplits = 3;
  static constexpr int kQ = 256, kQkv = 512, kHidden = 256, kInter = 384;
  static constexpr bool kHasBias = true, kHasHeadNorms = true, kInterleaved = true;
};
"""
USES: dict[str, tuple[str, str]] = {
    **attention_partials.USES,
    **gemm_partials.USES,
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
        "  skip_tokens<16, 4>(routing, f.sum, out, 8, 64, 0, 0, threadIdx.x);\n}\n",
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
        "  ptx::wgmma<bf16, false, false>(x, a, ptx::wgmma_matrix(0, 8192));\n"
        "  ptx::wgmma<f16, true, true>(y, a, 0), ptx::wgmma_shared<f16, true>(x, 0, 0);\n"
        "  ptx::wgmma_wait_for<1>(x), ptx::wgmma_wait_for<0>(y);\n"
        "  ptx::copy_async_arrive(nullptr);\n}\n",
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
    "step/attention.cuh.j2": (
        "sm_90a",
        "using Tile = Nvfp4Tile<attention::PageLayout<false>>;\ntemplate struct attention::OwnPage<Tile>;\n"
        "__global__ void run(attention::State<Tile>& state, attention::OwnPage<Tile>& page, Tile::Queries& q,\n"
        "                    uint32 (&weights)[1][2], const float (&scale)[2]) {\n"
        "  const Tile::Lane lane = page.lane();\n  page.load<false>(page.bytes, page.bytes, 1, 2, lane);\n"
        "  state.weigh(page.bytes, 0, lane, q, scale, 16, 1, weights);\n"
        "  Tile::Values values(page.bytes, 0, lane);\n  attention::clear<Tile>(values, 3, 1);\n"
        "  weights[0][0] = attention::rotate<f16>(1, 2, scale, 0, true);\n}\n",
    ),
    "step/parts.cuh.j2": (
        "sm_90a",
        STEP + "struct Shared {\n  uint8 kv[kPages][2][kKvBytes];\n  uint16 q[2][128];\n  float cos_sin[128];\n"
        "  struct { Part<Config> parts[kParts]; } wide;\n  Barrier pages;\n};\n"
        "template struct Attention<Config, Shared>;\n",
    ),
    "step/products.cuh.j2": (
        "sm_90a",
        STEP + "struct Shared {\n"
        "  uint8 x[kWarps][256];\n  uint4 zeros;\n  float rows[kWarps][32], squares[2][kWarps], own[32];\n"
        "  struct { float rows[kWarps][96]; } wide;\n};\n"
        "template struct Stream<Config>;\ntemplate struct Products<Config, Shared>;\n",
    ),
}
"""By partial: an architecture, and code for it."""

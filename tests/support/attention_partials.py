"""What makes the compiler read the templates in attention: stubs of what they take, and code with them."""

from __future__ import annotations

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
WGMMA = (
    REQUEST.replace(
        "struct Operands {",
        "struct Operands {\n  const bf16* q;\n  bf16* out;\n  uint32* counters;\n  void* workspace;\n"
        "  const float *bmm1_tensor, *bmm2_tensor, *sinks;\n  float *lse, bmm1, bmm2;\n"
        "  int   most_parts;\n  int64 q_token_stride, q_head_stride;",
    )
    + """
struct Config {
  using Operands = ::Operands;
  using Query    = bf16;
  using Out      = bf16;
  using Mma      = f16;
  using Mask     = TokenMask;
  static constexpr int  kCacheBits = 4, kHeadDim = 96, kWidth = 128, kTile = 64, kTeams = 3, kStages = 3;
  static constexpr int  kClusterCtas = 2;
  static constexpr bool kInterleaved = true, kTwoTables = true;
  static constexpr int  kTeamRows = 64, kRows = 384, kConsumers = 384, kThreads = 512, kWarps = 2, kEvery = 2;
  static constexpr int  kRowBytes = 48, kScaleBytes = 6;
};
"""
)

DECODE = (
    REQUEST.replace(
        "struct Operands {",
        "struct Operands {\n  const bf16* q;\n  bf16* out;\n  uint32* counters;\n  uint8* workspace;\n"
        "  const float *bmm1_tensor, *bmm2_tensor, *sinks;\n  float *lse, bmm1, bmm2;\n  uint32 group_inverse;\n"
        "  int64 q_token_stride, q_head_stride;",
    )
    + """
template <int kBits> struct Decode {
  using Operands = ::Operands;
  using Query    = bf16;
  using Mask     = NoMask;
  static constexpr bool kIsBf16Cache = true, kInterleaved = true, kPacked = true, kTwoTables = true;
  static constexpr int  kCacheBits = kBits, kHeadDim = 96, kWidth = 128, kRows = 8, kTile = 32, kStages = 2;
  static constexpr int  kWarps = 4, kHeadWarps = 2, kThreads = 128, kCluster = 2, kBlocks = 1, kSteps = 8;
  static constexpr int  kRowBytes = 96 * kBits / 8, kScaleBytes = kBits == 4 ? 6 : 0;
  static constexpr int  kStageRow = 128 * kBits / 8, kStageScales = kBits == 4 ? 8 : 0;
"""
)
STAGES = DECODE + "  static constexpr Pages kPages = Pages::kHalves;\n};\n"
ROW_SUMS = """
  using State = Softmax<1, 32, 128, true>;
};
struct Tile {
  static constexpr float kValueUnit = 1;
  __device__ static int value_dim(int m, bool upper, int g) { return g * 16 + 2 * m + upper; }
};
"""
LAYOUT = """
struct Layout {
  using Query = bf16;
  struct Queries { uint32 words[1][8][2]; };
  static constexpr int  kHeadDim = 96, kWidth = 128, kBlocks = 1, kSteps = 8, kStageRow = 64, kValuesAt = 2048;
  static constexpr int  kScaleBytes = 6, kStageScales = 8, kScalesAt = 4096, kVScalesAt = 4352, kVScalesRow = 6;
  static constexpr bool kInterleaved = true, kIsBf16Cache = true;
  __device__ static int place(int row, int chunk) { return row * 64 + chunk * 16; }
  __device__ static int opaque(int x) { return x; }
};
"""


def _tile(name: str) -> tuple[str, str]:
    return "sm_80", (
        f"{LAYOUT}using Tile = {name}<Layout>;\n"
        "using Sums = float[1][8][4];\n"
        "__global__ void run(const uint8* s, Layout::Queries& q, uint32 (&x)[4], float (&l)[1][4], Sums& o) {\n"
        "  const Tile::Lane lane;\n  Tile::scores(s, 0, lane, q, l);\n"
        "  Tile::ld_query(reinterpret_cast<const bf16*>(s), 1, Tile::word_dim(0, 1, 1), x);\n"
        "  Tile::Values v(s, 0, lane);\n  v.hide_absent(Tile::value_dim(1, true, 2));\n"
        "  v.multiply({{1, 2}}, o), o[0][0][0] *= Tile::kKeyUnit * Tile::kValueUnit;\n}\n"
    )


USES: dict[str, tuple[str, str]] = {
    "attention/nvfp4_tile.cuh.j2": _tile("Nvfp4Tile"),
    "attention/byte_tile.cuh.j2": _tile("E4m3Tile"),
    "attention/half_tile.cuh.j2": _tile("HalfTile"),
    "attention/tile_rows.cuh.j2": (
        "sm_80",
        "__global__ void run(const uint8* s, uint32 (&x)[8], uint32 (&y)[1]) { ld_row(s, 16, x), ld_row(s, 0, y); }\n",
    ),
    "attention/work.cuh.j2": ("sm_80", DECODE + "};\ntemplate struct Segments<Decode<4>>;\n"),
    "attention/pages.cuh.j2": (
        "sm_80",
        STAGES
        + "".join(
            f"template class Stages<Decode<{bits}>>::Producer;\ntemplate struct Stages<Decode<{bits}>>::FirstPages;\n"
            for bits in (4, 8, 16)
        ),
    ),
    "attention/queries.cuh.j2": (
        "sm_80",
        DECODE
        + """};
struct Tile {
  using Mma = f16;
  struct Queries { uint32 words[1][8][2]; };
  __device__ static void ld_query(const bf16* row, int, int c, uint32 (&x)[4]) { ld_halves<8>(row + c, x); }
  __device__ static int word_dim(int j, int r, int half) { return 4 * j + 2 * r + half; }
};
template struct RawQueries<Decode<4>, Tile>;
""",
    ),
    "attention/combine.cuh.j2": ("sm_80", DECODE + ROW_SUMS + "template struct Combination<Decode<4>, Tile>;\n"),
    "attention/cluster_items.cuh.j2": (
        "sm_90a",
        DECODE + ROW_SUMS + "template struct ClusterItems<Decode<4>, Tile>;\n",
    ),
    "attention/blocks.cuh.j2": (
        "sm_80",
        REQUEST + "__global__ void run(const Operands& p, int* to) {\n  RowBlock<64, 16, TokenMask> block;\n"
        "  if (!block.find(p)) return;\n"
        "  *to = block.rows(p) + Sight(p, block, 0, 16).some_first() + block.mask().bits(p, 0, 0);\n}\n",
    ),
    "attention/rows.cuh.j2": (
        "sm_80",
        ROWS + "__global__ void run(const Operands& p, Block& block, uint32 (&a)[4], float* unit) {\n"
        "  RowQueries<bf16, f16, 128, 2, 128, false> held;\n  Softmax<2, 64, 128, false> state;\n"
        "  RowScales<2> scales;\n  held.load(p, block, 1, 0, scales), held.get(1, 2, a), state.clear();\n"
        "  finish(state, p, block, *unit);\n}\n",
    ),
    "attention/tiles.cuh.j2": (
        "sm_80",
        REQUEST + "struct Request { int table; };\nstruct Block { Request request; int head; };\n"
        "struct Task { Block block; int first, end, begin, tiles; uint32 inverse; };\n"
        "template struct CacheTiles<4, 128, 128, true, 64, 128, 0, Task, false>;\n"
        "using Tiles = CacheTiles<8, 80, 128, false, 32, 256, 64, Task, true>;\n"
        "__global__ void run(const Operands& p, Tiles::Shared& s) {\n"
        "  Tiles::look_up(p, s, 1), Tiles::settle(p, s, 1), Tiles::copy_tile(s, 1), Tiles::decode_tile(s, 1);\n}\n",
    ),
    "attention/codes.cuh.j2": (
        "sm_100a",
        "__global__ void run(uint32 (&pair)[4]) { decode(5, pair), pair[0] = decode_scales(multiply_add(1, 2, 3)); }\n",
    ),
    "attention/columns.cuh.j2": (
        "sm_80",
        REQUEST + "__global__ void run(const Operands& p, int* to) { *to = column_of(3, inverse_of_page(p)); }\n",
    ),
    "attention/products.cuh.j2": ("sm_90a", "__global__ void run(float (&d)[16]) { fence_operand(d); }\n"),
    "attention/scales.cuh.j2": (
        "sm_80",
        "struct Operands { float bmm1, bmm2; const float *bmm1_tensor, *bmm2_tensor; };\n"
        "__global__ void run(const Operands& p, float* x) {\n"
        "  x[1] = logit_scale(p, 1) * query_exponent(x[0]) * output_scale(p, 1);\n}\n",
    ),
    "attention/softmax.cuh.j2": (
        "sm_80",
        REQUEST
        + "template <class State> __device__ void use(State& state, const Operands& p, typename State::Logits& x) {\n"
        "  const uint32 there[2] = {1, 2};\n  const TiledRequest<32, 8, 2> r = {};\n  const NoMask mask;\n"
        "  state.clear(), state.cap(1, x, state.scales), state.close();\n"
        "  state.hide(x, 1, [&](int n, int i) { return Seen(p, r, n + i, true, mask, 3, there); });\n"
        "  if (state.refer(x, State::Scales::ones())) state.move();\n  state.weigh(0, x[0][0]);\n}\n"
        "struct Down : Softmax<1, 64, 128, false> { Scales scales; };\n"
        "struct Across : Softmax<2, 64, 128, true> { Scales scales; };\n"
        "__global__ void run(const Operands& p, Down& a, Down::Logits& x, Across& b, Across::Logits& y) {\n"
        "  use(a, p, x), use(b, p, y), flat(x)[0] = 1;\n}\n",
    ),
    "attention/ending.cuh.j2": (
        "sm_80",
        ROWS + "__global__ void run(const Operands& p, Block& block, float* x, e4m3* bytes) {\n"
        "  const OutputRow row(p, block.request, 1, 2, 3);\n"
        "  const float scale = end_row(p, row, true, x[0], x[1], x[2]);\n"
        "  store_outputs(p.out + row.at, float2{scale, scale}), store_outputs(bytes, float4{scale});\n}\n",
    ),
    "attention/token_mask.cuh.j2": (
        "sm_80",
        REQUEST + "__global__ void run(const Operands& p, const TiledRequest<32, 8, 2>& r, int* to) {\n"
        "  const uint32 there[4] = {1, 2, 3, 4};\n  const TokenMask mask(p, r, 1);\n"
        "  *to = Seen(p, r, 1, true, mask, 3, there).bits(2) + mask.end_for_all(p, r, 5);\n}\n",
    ),
    "attention/items.cuh.j2": ("sm_90a", WGMMA + "template struct Work<Config>;\n"),
    "attention/expand.cuh.j2": (
        "sm_90a",
        WGMMA + "template struct Expansion<Config>;\ntemplate class Expansion<Config>::Raw<kKeys>;\n"
        "template class Expansion<Config>::Raw<kValues>;\n",
    ),
    "attention/team.cuh.j2": ("sm_90a", WGMMA + "template struct Team<Config>;\n"),
    "attention/parts.cuh.j2": ("sm_90a", WGMMA + "template struct Parts<Config>;\n"),
    "attention/request.cuh.j2": (
        "sm_80",
        REQUEST + "__global__ void run(const Operands& p, TiledRequest<32, 8, 2>& r) { r.load(p, r.items(p)); }\n",
    ),
}

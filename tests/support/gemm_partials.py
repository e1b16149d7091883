"""What makes the compiler read the templates in partials of products: stubs of what they take, and code with them."""

from __future__ import annotations

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
  uint8   x[4][16 * 128], weight[3][2][4608];
  Barrier full[4], empty[4], weight_full[3], weight_empty[3];
};
template struct Consumer<Shared, Weight, 16, 1, 1>;
"""
WIDE_SCHEDULE = """
struct Config {
  static constexpr int kTileM = 64, kTileN = 128, kCommonN = 0, kCluster = 2, kSplit = 1, kBandM = 4;
};
template class WideTiles<Config>;
template struct SplitTile<Config>;
template struct WholeTiles<Config>;
template struct DividedTiles<Config>;
struct Exchange {
  __device__ void leave(float (&sums)[32], int barrier, uint32 thread) const {}
  __device__ void collect(float (&sums)[32], uint32 back, int barrier, uint32 thread) const {}
};
template <class Schedule> __device__ bool run(float (&sums)[32]) {
  Schedule schedule(256, 256, 256);
  Work     work;
  return schedule.take(work) && schedule.complete(sums, work, Exchange{}, 1, 0);
}
__global__ void run(float (&sums)[32], bool* out) {
  *out = run<WideSchedule<false, false, Config>>(sums) && run<WideSchedule<false, true, Config>>(sums);
}
"""
WIDE_STEPS = """
struct Weight {
  struct Codes {};
  static __device__ Codes load(uint32 tile, uint32 half, const Place& place) { return {}; }
  static __device__ void decode(Fragments& a, const Codes& of) {}
};
struct Shared {
  uint8   x[4][2 * 16 * 128], weight[4][2][4608];
  Barrier full[4], empty[4];
};
template struct StepConsumer<Shared, Weight, 16, 1, 2>;
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
USES: dict[str, tuple[str, str]] = {
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
}

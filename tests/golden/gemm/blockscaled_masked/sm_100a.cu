// gemm_blockscaled_masked, generated from templates/gemm/blockscaled_masked.cu.j2
// spec: {"cluster_m":1,"cluster_n":1,"ctas":1,"format":"nvfp4","out_dtype":"bf16","split":1,"stages":10,"swap_ab":true,"tile_n":8,"tma_store":true}
//
// For each entry of a batch out [masked_m, n] = alpha * a [masked_m, k] b [n, k]^T, both FP4 with block scales, by the
// block-scaled products of the sm_100 family: gemm/blockscaled with a scheduler that walks the filled rows. Other rows
// of out are not written. Rows of a beyond masked_m are multiplied where a tile has them, whatever their values: a row
// of out depends on its own row of a only.

// ---- partials/types --------------------------------------------------------
using uint8  = unsigned char;
using uint16 = unsigned short;
using uint32 = unsigned int;
using uint64 = unsigned long long;
using int32  = int;
using int64  = long long;
struct bf16 { uint16 bits; };
struct f16  { uint16 bits; };
struct e4m3 { uint8 bits; };

constexpr int   kWarp   = 32;
constexpr float kFltMax = 0x1.fffffep+127f;

__host__ __device__ constexpr int64 ceil_div(int64 a, int64 b) { return (a + b - 1) / b; }

// ---- partials/ptx ----------------------------------------------------------
// A function for each instruction that several kernels use.
namespace ptx {
__device__ __forceinline__ uint32 shared_address(const void* p) { return uint32(__cvta_generic_to_shared(p)); }

__device__ __forceinline__ void griddep_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void griddep_launch() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// Loads are volatile, so that the compiler keeps them after griddep_wait.
__device__ __forceinline__ float ld_f32(const void* p) {
  float v;
  asm volatile("ld.global.f32 %0, [%1];" : "=f"(v) : "l"(p));
  return v;
}
// L1 keeps the line: the thread's next load may find the other half of the sector there.
__device__ __forceinline__ uint4 ld_global_nc_16(const void* p) {
  uint4 v;
  asm volatile("ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}
__device__ __forceinline__ void ld_global_nc_32(uint32 (&v)[8], const void* p) {
  asm volatile("ld.global.nc.v8.b32 {%0, %1, %2, %3, %4, %5, %6, %7}, [%8];"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]), "=r"(v[4]), "=r"(v[5]), "=r"(v[6]), "=r"(v[7])
               : "l"(p));
}

// Pairs of 16-bit floats. Where one operand is NaN, the other is the result. The xorsign forms compare magnitudes
// and give the result the product of the signs.
__device__ __forceinline__ uint32 max_bf16x2(uint32 a, uint32 b) {
  uint32 d;
  asm("max.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
__device__ __forceinline__ uint32 max_f16x2(uint32 a, uint32 b) {
  uint32 d;
  asm("max.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
__device__ __forceinline__ uint32 min_f16x2(uint32 a, uint32 b) {
  uint32 d;
  asm("min.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
__device__ __forceinline__ uint32 max_xorsign_abs_bf16x2(uint32 a, uint32 b) {
  uint32 d;
  asm("max.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
__device__ __forceinline__ uint32 max_xorsign_abs_f16x2(uint32 a, uint32 b) {
  uint32 d;
  asm("max.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
__device__ __forceinline__ uint32 min_xorsign_abs_f16x2(uint32 a, uint32 b) {
  uint32 d;
  asm("min.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
__device__ __forceinline__ uint32 mul_f16x2(uint32 a, uint32 b) {
  uint32 d;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

// The bits of a where mask has ones, those of b elsewhere.
__device__ __forceinline__ uint32 select_bits(uint32 mask, uint32 a, uint32 b) {
  uint32 d;
  asm("lop3.b32 %0, %1, %2, %3, 0xCA;" : "=r"(d) : "r"(mask), "r"(a), "r"(b));
  return d;
}

// 2^v with a relative error of 2^-22; flushes subnormals.
__device__ __forceinline__ float ex2_approx(float v) {
  float d;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(d) : "f"(v));
  return d;
}

// 1 / v with an error of 1 ulp; flushes subnormals.
__device__ __forceinline__ float rcp_approx(float v) {
  float d;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(d) : "f"(v));
  return d;
}

// 1 / sqrt(v) with a relative error of 2^-22.9; flushes subnormals.
__device__ __forceinline__ float rsqrt_approx(float v) {
  float d;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(d) : "f"(v));
  return d;
}

// Conversions of pairs: PTX names the high half first.
__device__ __forceinline__ uint32 cvt_f16x2(float lo, float hi) {
  uint32 d;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(hi), "f"(lo));
  return d;
}
__device__ __forceinline__ float cvt_f32_f16(uint16 a) {
  float d;
  asm("cvt.f32.f16 %0, %1;" : "=f"(d) : "h"(a));
  return d;
}
__device__ __forceinline__ uint16 cvt_e4m3x2(float lo, float hi) {
  uint16 d;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(d) : "f"(hi), "f"(lo));
  return d;
}
__device__ __forceinline__ uint32 cvt_f16x2_e4m3x2(uint16 a) {
  uint32 d;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(d) : "h"(a));
  return d;
}
// Four conversions to E2M1 pairs: v[i] becomes nibble i.
__device__ __forceinline__ uint32 cvt_e2m1x8(const float (&v)[8]) {
  uint32 d;
  asm("{\n"
      "  .reg .b8 b0, b1, b2, b3;\n"
      "  cvt.rn.satfinite.e2m1x2.f32 b0, %2, %1;\n"
      "  cvt.rn.satfinite.e2m1x2.f32 b1, %4, %3;\n"
      "  cvt.rn.satfinite.e2m1x2.f32 b2, %6, %5;\n"
      "  cvt.rn.satfinite.e2m1x2.f32 b3, %8, %7;\n"
      "  mov.b32 %0, {b0, b1, b2, b3};\n"
      "}"
      : "=r"(d) : "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]), "f"(v[4]), "f"(v[5]), "f"(v[6]), "f"(v[7]));
  return d;
}
}  // namespace ptx

// ---- partials/vectors ------------------------------------------------------
// Accesses of 1 to 16 bytes. Loads are volatile, so that the compiler keeps them after griddep_wait, and coherent,
// because the same kernel may write the address later.
namespace ptx {
template <typename T> __device__ T ld(const void* p);
template <> __device__ __forceinline__ uint8 ld(const void* p) {
  uint16 v;
  asm volatile("ld.global.u8 %0, [%1];" : "=h"(v) : "l"(p));
  return uint8(v);
}
template <> __device__ __forceinline__ uint16 ld(const void* p) {
  uint16 v;
  asm volatile("ld.global.b16 %0, [%1];" : "=h"(v) : "l"(p));
  return v;
}
template <> __device__ __forceinline__ uint32 ld(const void* p) {
  uint32 v;
  asm volatile("ld.global.b32 %0, [%1];" : "=r"(v) : "l"(p));
  return v;
}
template <> __device__ __forceinline__ uint64 ld(const void* p) {
  uint64 v;
  asm volatile("ld.global.b64 %0, [%1];" : "=l"(v) : "l"(p));
  return v;
}
template <> __device__ __forceinline__ uint2 ld(const void* p) {
  uint2 v;
  asm volatile("ld.global.v2.b32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
  return v;
}
template <> __device__ __forceinline__ uint4 ld(const void* p) {
  uint4 v;
  asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}
// For memory that is read once: allocates no line in L1.
__device__ __forceinline__ uint4 ld_once(const void* p) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}
__device__ __forceinline__ void st(void* p, uint4 v) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
// For memory that is not read again soon: L2 evicts it first.
__device__ __forceinline__ void st_once(void* p, uint4 v) {
  asm volatile("st.global.cs.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}
}  // namespace ptx

// N neighbouring 16-bit floats in as few registers as they fill, the first in the low half.
template <int N>
__device__ __forceinline__ void ld_halves(const void* p, uint32 (&w)[(N + 1) / 2]) {
  static_assert(N == 1 || N == 2 || N == 4 || N == 8, "one access");
  if constexpr (N == 1) w[0] = ptx::ld<uint16>(p);
  if constexpr (N == 2) w[0] = ptx::ld<uint32>(p);
  if constexpr (N == 4) {
    const uint2 v = ptx::ld<uint2>(p);
    w[0] = v.x, w[1] = v.y;
  }
  if constexpr (N == 8) {
    const uint4 v = ptx::ld<uint4>(p);
    w[0] = v.x, w[1] = v.y, w[2] = v.z, w[3] = v.w;
  }
}
template <int N>
__device__ __forceinline__ void st_halves(void* p, const uint32 (&w)[(N + 1) / 2]) {
  static_assert(N == 1 || N == 2 || N == 4 || N == 8, "one access");
  if constexpr (N == 1) *static_cast<uint16*>(p) = uint16(w[0]);
  if constexpr (N == 2) *static_cast<uint32*>(p) = w[0];
  if constexpr (N == 4) *static_cast<uint2*>(p) = {w[0], w[1]};
  if constexpr (N == 8) *static_cast<uint4*>(p) = {w[0], w[1], w[2], w[3]};
}

// Two floats rounded to a pair of 16-bit floats, the first in the low half.
template <typename T> __device__ uint32 to_pair(float lo, float hi);
template <> __device__ __forceinline__ uint32 to_pair<f16>(float lo, float hi) { return ptx::cvt_f16x2(lo, hi); }
template <> __device__ __forceinline__ uint32 to_pair<bf16>(float lo, float hi) {
  uint32 d;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(hi), "f"(lo));
  return d;
}

// ---- gemm/masked_rows ------------------------------------------------------
// How many of the m rows of an entry of a batch are filled.
__device__ __forceinline__ int64 masked_rows(const int32* masked_m, int64 entry, int64 m) {
  return min(max(int64(int32(ptx::ld<uint32>(masked_m + entry))), int64(0)), m);
}
// ---- partials/cluster_address ----------------------------------------------
namespace ptx {
// The address that `p` has in the CTA `rank` of the cluster.
__device__ __forceinline__ uint32 cluster_address(const void* p, uint32 rank) {
  uint32 a;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(a) : "r"(shared_address(p)), "r"(rank));
  return a;
}
// Stores at such an address.
__device__ __forceinline__ void st_cluster(uint32 to, const uint32* v) {
  asm volatile("st.shared::cluster.v4.b32 [%0], {%1, %2, %3, %4};"
               ::"r"(to), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]) : "memory");
}
}  // namespace ptx

// ---- partials/cluster ------------------------------------------------------
// CTAs of one cluster: they run at the same time and write into each other's shared memory.
namespace ptx {
__device__ __forceinline__ uint32 cluster_rank() {
  uint32 r;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return r;
}
__device__ __forceinline__ uint32 cluster_ctas() {
  uint32 n;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(n));
  return n;
}
__device__ __forceinline__ uint32 cluster_id() {
  uint32 i;
  asm("mov.u32 %0, %%clusterid.x;" : "=r"(i));
  return i;
}
__device__ __forceinline__ uint32 clusters() {
  uint32 n;
  asm("mov.u32 %0, %%nclusterid.x;" : "=r"(n));
  return n;
}
// A barrier of all threads of the cluster. What they wrote before it, also to shared memory of other CTAs, is visible
// after it.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// Stores to shared memory of the CTA `rank`, at the address that `p` has in this CTA.
__device__ __forceinline__ void st_cluster(const float* p, uint32 rank, float v) {
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(cluster_address(p, rank)), "f"(v) : "memory");
}
}  // namespace ptx

// ---- gemm/tile_scheduler ---------------------------------------------------
// The rows of the left operand are the rows of the accumulator: the left operand is a, or b with kSwapAb. A tile is
// kTileM rows of the left operand by kTileN rows of the right one, and the kCtaGroup CTAs of a tile divide its left
// rows. A cluster takes kClusterM tiles along the left rows by kClusterN along the right ones, in kSplit parts of the
// columns. What is outside of the matrix is computed too, from zeros, and not written.
//
// Config: kTileN, kCtaGroup, kClusterM, kClusterN, kSplit, kSwapAb.
template <class Config> struct ClusterShape {
  static constexpr int kTileM       = 128 * Config::kCtaGroup;
  static constexpr int kColumnCtas  = Config::kCtaGroup * Config::kClusterM;  // that have the same right rows
  static constexpr int kSplitCtas   = kColumnCtas * Config::kClusterN;        // with the same part of the columns
  static constexpr int kClusterCtas = kSplitCtas * Config::kSplit;
  static constexpr int kCopiers     = Config::kClusterM + Config::kClusterN - 1;  // tiles that a CTA copies for
};

// A mask of `count` CTAs of a cluster: every `step`-th.
__host__ __device__ constexpr uint32 cta_mask(int step, int count) {
  uint32 mask = 0;
  for (int i = 0; i < count; ++i) mask |= 1u << i * step;
  return mask;
}

// The place of this CTA in its cluster: by rank, the CTAs of a tile follow each other, then the tiles along the left
// rows, then those along the right ones, then the parts of the columns.
template <class Config> struct ClusterPlace {
  using Shape = ClusterShape<Config>;
  static constexpr int kCtaGroup = Config::kCtaGroup, kColumnCtas = Shape::kColumnCtas;
  uint32 rank = Shape::kClusterCtas == 1 ? 0 : ptx::cluster_rank();

  __device__ __forceinline__ uint32 cta() const { return rank % kCtaGroup; }  // of its tile
  __device__ __forceinline__ uint32 column() const { return rank % kColumnCtas; }
  __device__ __forceinline__ uint32 tile_m() const { return column() / kCtaGroup; }
  __device__ __forceinline__ uint32 tile_n() const { return (rank - split() * Shape::kSplitCtas) / kColumnCtas; }
  __device__ __forceinline__ uint32 split() const { return Config::kSplit == 1 ? 0 : rank / Shape::kSplitCtas; }
  // Its steps along the columns, of all.
  __device__ __forceinline__ uint32 begin(uint32 steps) const { return steps * split() / Config::kSplit; }
  __device__ __forceinline__ uint32 end(uint32 steps) const { return steps * (split() + 1) / Config::kSplit; }
  // Masks: who needs the same left rows, right rows, and scales of the right rows.
  __device__ __forceinline__ uint16 with_left() const {
    return cta_mask(kColumnCtas, Config::kClusterN) << (split() * Shape::kSplitCtas + column());
  }
  __device__ __forceinline__ uint16 with_right() const {
    return cta_mask(kCtaGroup, Config::kClusterM) << (rank - column() + cta());
  }
  __device__ __forceinline__ uint16 with_right_scales() const { return cta_mask(1, kColumnCtas) << (rank - column()); }
  // The CTAs of its tile, and all that copy something for them.
  __device__ __forceinline__ uint16 of_tile() const { return cta_mask(1, kCtaGroup) << (rank - cta()); }
  __device__ __forceinline__ uint16 copiers() const {
    const uint32 tile = split() * Shape::kSplitCtas + tile_m() * kCtaGroup;
    return with_right_scales() | cta_mask(kColumnCtas, Config::kClusterN) * cta_mask(1, kCtaGroup) << tile;
  }
};

// A tile of a CTA. Matrices of a batch lie one behind another, and so do their scales, each in whole atoms of 128 rows.
struct Tile {
  uint32 left, right;              // its first rows of both operands
  uint32 left_codes, right_codes;  // the same among the rows of all matrices
  uint32 left_atoms, right_atoms;  // and among the rows of atoms
  uint32 entry;                    // of the batch
};

// Clusters are persistent and take groups of kClusterM x kClusterN tiles in turn. Groups in a band, which is as high as
// 8 tiles, follow each other along the left rows, so that they find their right rows in L2.
template <class Config> struct TileScheduler {
  static constexpr bool kMasked = false;
  static constexpr int kTileM = ClusterShape<Config>::kTileM * Config::kClusterM;  // of a group
  static constexpr int kTileN = Config::kTileN * Config::kClusterN;
  static constexpr int kBand  = 8 / Config::kClusterM;
  int64  m;
  uint32 left, right, first, step;  // groups
  ClusterPlace<Config> place;

  __device__ __forceinline__ TileScheduler(int64 m, int64 n)
      : m(m), left(ceil_div(Config::kSwapAb ? n : m, kTileM)), right(ceil_div(Config::kSwapAb ? m : n, kTileN)),
        first(ptx::cluster_id()), step(ptx::clusters()) {}
  __device__ __forceinline__ uint32 count() const { return left * right; }
  __device__ __forceinline__ Tile tile(uint32 group) const {
    const uint32 band = group / (kBand * right), inside = group % (kBand * right);
    const uint32 high = min(uint32(kBand), left - band * kBand);
    const uint32 l = (band * kBand + inside % high) * kTileM + place.column() * 128;
    const uint32 r = (inside / high * Config::kClusterN + place.tile_n()) * Config::kTileN;
    return {l, r, l, r, l / 128, r / 128, 0};
  }
  // Of `a` and of out: how many there are, and the first one of an entry of the batch.
  __device__ __forceinline__ int64 rows(uint32) const { return m; }
  __device__ __forceinline__ int64 first_row(uint32) const { return 0; }
};

// ---- gemm/masked_tiles -----------------------------------------------------
// The tiles of a batch of products, of which an entry has as many rows of a as masked_m says. All matrices of an
// operand have the same shape. Clusters take groups of tiles in turn, from the first entry to the last; there are none
// for rows that are not filled.
//
// Config: as for the tile scheduler.
template <class Config> struct MaskedScheduler {
  using Groups = TileScheduler<Config>;
  static constexpr bool kMasked = true;
  const int32* masked_m;
  uint32* ends;  // in shared memory: for each entry, how many groups it and those before it have
  uint32  entries;
  int64   m, n;
  uint32  first = ptx::cluster_id(), step = ptx::clusters();
  ClusterPlace<Config> place = {};

  // Of a.
  __device__ __forceinline__ int64 rows(uint32 entry) const { return masked_rows(masked_m, entry, m); }
  __device__ __forceinline__ int64 first_row(uint32 entry) const { return entry * m; }
  __device__ __forceinline__ uint32 count() const { return ends[entries - 1]; }

  // All threads of the CTA: the first warp fills `ends`.
  __device__ __forceinline__ void prepare() const {
    ptx::griddep_wait();
    const uint32 lane = threadIdx.x;
    uint32 before = 0;
    for (uint32 e = lane; lane < kWarp && e - lane < entries; e += kWarp) {
      uint32 sum = e < entries ? Groups(rows(e), n).count() : 0;
#pragma unroll
      for (int distance = 1; distance < kWarp; distance *= 2) {
        const uint32 other = __shfl_up_sync(~0u, sum, distance);
        if (lane >= distance) sum += other;
      }
      if (e < entries) ends[e] = before + sum;
      before += __shfl_sync(~0u, sum, kWarp - 1);
    }
    __syncthreads();
  }
  __device__ __forceinline__ Tile tile(uint32 group) const {
    uint32 entry = 0;  // the first that ends behind the group
    for (uint32 last = entries - 1; entry < last;) {
      const uint32 middle = (entry + last) / 2;
      if (ends[middle] > group) last = middle;
      else entry = middle + 1;
    }
    Tile at = Groups(rows(entry), n).tile(entry == 0 ? group : group - ends[entry - 1]);
    const uint32 left = Config::kSwapAb ? n : m, right = Config::kSwapAb ? m : n;
    at.left_codes  += entry * left;
    at.right_codes += entry * right;
    at.left_atoms  += entry * ceil_div(left, 128);
    at.right_atoms += entry * ceil_div(right, 128);
    at.entry = entry;
    return at;
  }
};
// ---- partials/mbarrier -----------------------------------------------------
// A phase of a barrier completes when the expected number of threads have arrived and the expected number of bytes were
// copied. A wait for a parity returns once the phase of that parity is complete; on a new barrier, a wait for parity 1
// returns at once.
using Barrier = uint64;

namespace ptx {
__device__ __forceinline__ void mbarrier_init(Barrier* b, uint32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(b)), "r"(arrivals) : "memory");
}
// Makes initialised barriers visible to the copy engine.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void mbarrier_arrive(Barrier* b) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(b)) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive_expect_tx(Barrier* b, uint32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(b)), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void mbarrier_wait(Barrier* b, uint32 parity) {
  uint32 done = 0;
  while (!done)
    asm volatile("{\n"
                 "  .reg .pred p;\n"
                 "  mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                 "  selp.u32 %0, 1, 0, p;\n"
                 "}"
                 : "=r"(done) : "r"(shared_address(b)), "r"(parity) : "memory");
}
}  // namespace ptx

// ---- partials/tma ----------------------------------------------------------
// A tensor map: what the host encodes to describe a tensor to TMA.
struct alignas(64) TensorMap { uint64 opaque[16]; };

namespace ptx {
// Returns true in exactly one lane of a converged warp.
__device__ __forceinline__ bool elect_one() {
  uint32 chosen;
  asm volatile("{\n"
               "  .reg .pred p;\n"
               "  elect.sync _|p, 0xffffffff;\n"
               "  selp.u32 %0, 1, 0, p;\n"
               "}"
               : "=r"(chosen));
  return chosen;
}
__device__ __forceinline__ void prefetch_tensor_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}
// Copies the box at (row, col) of a matrix to shared memory; its bytes count towards the barrier.
__device__ __forceinline__ void tma_load(void* to, const TensorMap& map, int32 col, int32 row, Barrier* b) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes"
               " [%0], [%1, {%2, %3}], [%4];"
               ::"r"(shared_address(to)), "l"(&map), "r"(col), "r"(row), "r"(shared_address(b)) : "memory");
}
}  // namespace ptx

// The offset of a 16-byte chunk of a row in a box of 128-byte rows that was loaded with the 128-byte swizzle.
__device__ __forceinline__ uint32 swizzle_128(uint32 row, uint32 chunk) { return row * 128 + ((chunk ^ row % 8) * 16); }

// ---- partials/tma_cluster --------------------------------------------------
// Copies of boxes of tensors for several CTAs of a cluster. Of two CTAs that compute a tile together, the first one has
// the barrier: `b` is its address in the cluster.
namespace ptx {
__device__ __forceinline__ void tma_load_pair(void* to, const TensorMap& map, int32 col, int32 row, uint32 b) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.cta_group::2"
               " [%0], [%1, {%2, %3}], [%4];"
               ::"r"(shared_address(to)), "l"(&map), "r"(col), "r"(row), "r"(b) : "memory");
}
// To every CTA of the mask, to the address of `to`. In each, the bytes count towards the barrier of its tile.
template <int kCtaGroup>
__device__ void tma_load_multicast(void* to, const TensorMap& map, int32 col, int32 row, uint32 b, uint16 mask);
template <>
__device__ __forceinline__ void tma_load_multicast<1>(void* to, const TensorMap& map, int32 col, int32 row,
                                                        uint32 b, uint16 mask) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
               ".cta_group::1 [%0], [%1, {%2, %3}], [%4], %5;"
               ::"r"(shared_address(to)), "l"(&map), "r"(col), "r"(row), "r"(b), "h"(mask) : "memory");
}
template <>
__device__ __forceinline__ void tma_load_multicast<2>(void* to, const TensorMap& map, int32 col, int32 row,
                                                        uint32 b, uint16 mask) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
               ".cta_group::2 [%0], [%1, {%2, %3}], [%4], %5;"
               ::"r"(shared_address(to)), "l"(&map), "r"(col), "r"(row), "r"(b), "h"(mask) : "memory");
}
__device__ __forceinline__ void tma_prefetch(const TensorMap& map, int32 col, int32 row) {
  asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%0, {%1, %2}];"
               ::"l"(&map), "r"(col), "r"(row) : "memory");
}
}  // namespace ptx

// ---- partials/ring ---------------------------------------------------------
// The slot of a ring that a thread is at, and the parity of the current phase of that slot's barrier.
template <int kSize> struct Ring {
  uint32 slot = 0, parity = 0;
  __device__ __forceinline__ void advance() {
    if (++slot == kSize) slot = 0, parity ^= 1;
  }
};

// ---- gemm/pipeline ---------------------------------------------------------
// The barriers of a pipeline: one arrival completes `full`, and `frees` arrivals complete `empty`.
template <int kStages>
__device__ __forceinline__ void init_pipeline(Barrier (&full)[kStages], Barrier (&empty)[kStages], uint32 frees) {
  for (int s = 0; s < kStages; ++s) {
    ptx::mbarrier_init(&full[s], 1);
    ptx::mbarrier_init(&empty[s], frees);
  }
}

// ---- gemm/cluster_loads ----------------------------------------------------
// Copies of operands and of their scales to the CTAs of a cluster, each of which copies a share for all that need it.

// Waits until every stage is free: a CTA must not end while others still arrive at its barriers.
template <class Config, int kStages>
__device__ __forceinline__ void drain(Barrier (&empty)[kStages], Ring<kStages> state) {
  if constexpr (ClusterShape<Config>::kSplitCtas == 1) return;
  for (int i = 0; i < kStages; ++i, state.advance()) ptx::mbarrier_wait(&empty[state.slot], state.parity ^ 1);
}

// The share of a CTA in a box of an operand, for all kSharers CTAs that need the box: at `row` and `col` of the box and
// `offset` bytes of a stage. In each of them it counts towards the barrier of the first CTA of its tile, which alone
// expects it.
template <class Config, int kSharers> struct Share {
  const TensorMap& map;
  uint16 mask;
  uint32 row, col, offset;

  // The address of the barrier in the first CTA of this CTA's tile.
  static __device__ __forceinline__ uint32 leader(const Barrier* b) {
    if constexpr (Config::kCtaGroup == 1) return ptx::shared_address(b);
    return ptx::cluster_address(b, ClusterShape<Config>::kClusterCtas == 2 ? 0 : ptx::cluster_rank() & ~1u);
  }
  __device__ __forceinline__ void load(uint8* stage, uint32 box_col, uint32 box_row, Barrier* b) const {
    uint8* const to = stage + offset;
    const int32  x = box_col + col, y = box_row + row;
    if constexpr (kSharers > 1) {
      ptx::tma_load_multicast<Config::kCtaGroup>(to, map, x, y, leader(b), mask);
    } else if constexpr (Config::kCtaGroup == 2) {
      ptx::tma_load_pair(to, map, x, y, leader(b));
    } else {
      ptx::tma_load(to, map, x, y, b);
    }
  }
  __device__ __forceinline__ void prefetch(uint32 box_col, uint32 box_row) const {
    ptx::tma_prefetch(map, box_col + col, box_row + row);
  }
};
template <class Config> using LeftShare       = Share<Config, Config::kClusterN>;
template <class Config> using RightShare      = Share<Config, Config::kClusterM>;
template <class Config> using RightScaleShare = Share<Config, ClusterShape<Config>::kColumnCtas>;

// Rows of 128 bytes.
template <class Config>
__device__ __forceinline__ LeftShare<Config> left_share(const TensorMap& map, ClusterPlace<Config> place) {
  constexpr uint32 kRows = 128 / Config::kClusterN;
  const uint32 row = place.tile_n() * kRows;
  return {map, place.with_left(), row, 0, row * 128};
}
template <class Config>
__device__ __forceinline__ RightShare<Config> right_share(const TensorMap& map, ClusterPlace<Config> place) {
  constexpr uint32 kRows = Config::kTileN / ClusterShape<Config>::kColumnCtas;
  const uint32 row = place.tile_m() * kRows;
  return {map, place.with_right(), place.cta() * (Config::kTileN / Config::kCtaGroup) + row, 0, row * 128};
}
// Rows of kWords words of 8 bytes, one for each 128 rows of the operand.
template <uint32 kWords, class Config>
__device__ __forceinline__ LeftShare<Config> left_scales_share(const TensorMap& map, ClusterPlace<Config> place) {
  const uint32 word = place.tile_n() * (kWords / Config::kClusterN);
  return {map, place.with_left(), 0, word, word * 8};
}
template <uint32 kRows, uint32 kWords, class Config>
__device__ __forceinline__ RightScaleShare<Config> right_scales_share(const TensorMap& map,
                                                                      ClusterPlace<Config> place) {
  const uint32 word = place.column() * (kRows * kWords / ClusterShape<Config>::kColumnCtas);
  return {map, place.with_right_scales(), word / kWords, word % kWords, word * 8};
}

// ---- partials/arch ---------------------------------------------------------
// sm_100a
constexpr bool kHasXorsign = true;  // min, max with .xorsign.abs: from sm_86 on
constexpr bool kHasE4m3Cvt = true;
constexpr bool kHasE2m1Cvt = true;
constexpr bool kHasLd256   = true && __CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__ >= 1209;  // PTX 8.8
constexpr bool kHasPdl     = true;

// ---- partials/async_copy ---------------------------------------------------
// Accesses of 16 bytes to shared memory by address, and asynchronous copies into it.
namespace ptx {
__device__ __forceinline__ uint4 ld_shared(uint32 p) {
  uint4 v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(p) : "memory");
  return v;
}
// For data that is not written any more: the compiler may move these loads, and merge loads of one address.
__device__ __forceinline__ uint4 ld_shared_constant(uint32 p) {
  uint4 v;
  asm("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(p));
  return v;
}
__device__ __forceinline__ void st_shared(uint32 p, uint4 v) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
// Starts a copy of 16 bytes from global memory, cached in L2 only.
__device__ __forceinline__ void copy_async(uint32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
// Waits for the copies that this thread has started.
__device__ __forceinline__ void copy_async_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }
}  // namespace ptx

// ---- partials/cluster_barriers ---------------------------------------------
// Barriers between the CTAs of a cluster.
namespace ptx {
// Arrives at the barrier of the CTA `rank`.
__device__ __forceinline__ void mbarrier_arrive_cluster(Barrier* b, uint32 rank) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];"
               ::"r"(cluster_address(b, rank)) : "memory");
}
// What another CTA did before it arrived is visible then.
__device__ __forceinline__ void mbarrier_wait_cluster(Barrier* b, uint32 parity) {
  uint32 done = 0;
  while (!done)
    asm volatile("{\n"
                 "  .reg .pred p;\n"
                 "  mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
                 "  selp.u32 %0, 1, 0, p;\n"
                 "}"
                 : "=r"(done) : "r"(shared_address(b)), "r"(parity) : "memory");
}
}  // namespace ptx

// ---- partials/st_32 --------------------------------------------------------
namespace ptx {
// Stores 32 bytes at once; for GPUs with kHasLd256.
__device__ __forceinline__ void st_32(void* p, const uint32 (&v)[8]) {
  asm volatile("st.global.v8.b32 [%0], {%1, %2, %3, %4, %5, %6, %7, %8};"
               ::"l"(p), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]), "r"(v[4]), "r"(v[5]), "r"(v[6]), "r"(v[7])
               : "memory");
}
}  // namespace ptx

// ---- partials/store_matrices -----------------------------------------------
namespace ptx {
// Stores 8 x 8 matrices, transposed. r[i] of lane l is row l / 4, columns 2 (l % 4) and the next, of matrix i. Lane
// 8 i + c gives the address of column c of matrix i, 16 bytes.
__device__ __forceinline__ void store_matrices(uint32 to, const uint32 (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
               ::"r"(to), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
}
__device__ __forceinline__ void store_matrices(uint32 to, const uint32 (&r)[2]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};"
               ::"r"(to), "r"(r[0]), "r"(r[1]) : "memory");
}
__device__ __forceinline__ void store_matrices(uint32 to, const uint32 (&r)[1]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%0], {%1};" ::"r"(to), "r"(r[0]) : "memory");
}
}  // namespace ptx

// ---- partials/format -------------------------------------------------------
enum class Format { kNvfp4, kMxfp4 };
// Elements that share a scale.
__host__ __device__ constexpr int block_of(Format format) { return format == Format::kNvfp4 ? 16 : 32; }

// ---- partials/tcgen05 ------------------------------------------------------
// The tensor cores of the sm_100 family: tensor memory, products of block-scaled FP4 matrices, copies of their scales.
// An address of tensor memory has the lane in its upper half and the column in the lower. With a kCtaGroup of 2, two
// CTAs work together: the first one issues what both do.
namespace ptx {
// Allocates all 512 columns and writes their address to shared memory. One warp of each CTA does it, and frees them.
template <int kCtaGroup> __device__ void tmem_alloc(uint32* address);
template <int kCtaGroup> __device__ void tmem_free(uint32 address);
// Copies 128 rows by four scales, 512 bytes of shared memory, to four columns: column c has the scales of rows 32 c to
// 32 c + 31, every quarter of the lanes the same. Both CTAs of a group copy what they have at this place. Products and
// copies of one thread are carried out in the order of their issue, so that a copy may overwrite scales of products
// before it.
template <int kCtaGroup> __device__ void tmem_copy_scales(uint32 to, uint32 from);
// Arrives once at the barrier when all that this thread has issued so far is complete; or in each CTA of the mask.
template <int kCtaGroup> __device__ void tcgen05_commit(Barrier* b);
template <int kCtaGroup> __device__ void tcgen05_commit(Barrier* b, uint16 mask);
// accumulator = left right^T, or accumulator += it. The arguments after the operands, which are descriptors, are the
// instruction descriptor and the columns of the scales. K: 64 or 96 columns.
template <int kCtaGroup, Format kFormat, int kColumns>
__device__ void mma_block_scaled(uint32 accumulator, uint64 left, uint64 right, uint32 instruction, uint32 left_scales,
                                 uint32 right_scales, bool add);

template <> __device__ __forceinline__ void tmem_alloc<1>(uint32* address) {
  asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], 512;"
               ::"r"(shared_address(address)) : "memory");
  asm volatile("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;");
}
template <> __device__ __forceinline__ void tmem_free<1>(uint32 address) {
  asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, 512;" ::"r"(address) : "memory");
}
template <> __device__ __forceinline__ void tmem_copy_scales<1>(uint32 to, uint32 from) {
  const uint64 atom = uint64(from & 0x3FFFFu) >> 4 | uint64(128 / 16) << 32 | uint64(1) << 46;
  asm volatile("tcgen05.cp.cta_group::1.32x128b.warpx4 [%0], %1;" ::"r"(to), "l"(atom) : "memory");
}
template <> __device__ __forceinline__ void tcgen05_commit<1>(Barrier* b) {
  asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];"
               ::"r"(shared_address(b)) : "memory");
}
template <> __device__ __forceinline__ void tcgen05_commit<1>(Barrier* b, uint16 mask) {
  asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64"
               " [%0], %1;"
               ::"r"(shared_address(b)), "h"(mask) : "memory");
}
template <>
__device__ __forceinline__ void mma_block_scaled<1, Format::kNvfp4, 64>(
    uint32 accumulator, uint64 left, uint64 right, uint32 instruction, uint32 left_scales, uint32 right_scales,
    bool add) {
  asm volatile("{\n"
               "  .reg .pred add;\n"
               "  setp.ne.b32 add, %6, 0;\n"
               "  tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.scale_vec::4X"
               " [%0], %1, %2, %3, [%4], [%5], add;\n"
               "}"
               ::"r"(accumulator), "l"(left), "l"(right), "r"(instruction), "r"(left_scales), "r"(right_scales),
                 "r"(uint32(add))
               : "memory");
}
template <>
__device__ __forceinline__ void mma_block_scaled<1, Format::kMxfp4, 64>(
    uint32 accumulator, uint64 left, uint64 right, uint32 instruction, uint32 left_scales, uint32 right_scales,
    bool add) {
  asm volatile("{\n"
               "  .reg .pred add;\n"
               "  setp.ne.b32 add, %6, 0;\n"
               "  tcgen05.mma.cta_group::1.kind::mxf4.block_scale.scale_vec::2X"
               " [%0], %1, %2, %3, [%4], [%5], add;\n"
               "}"
               ::"r"(accumulator), "l"(left), "l"(right), "r"(instruction), "r"(left_scales), "r"(right_scales),
                 "r"(uint32(add))
               : "memory");
}
template <>
__device__ __forceinline__ void mma_block_scaled<1, Format::kNvfp4, 96>(
    uint32 accumulator, uint64 left, uint64 right, uint32 instruction, uint32 left_scales, uint32 right_scales,
    bool add) {
  asm volatile("{\n"
               "  .reg .pred add;\n"
               "  setp.ne.b32 add, %6, 0;\n"
               "  tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.block16"
               " [%0], %1, %2, %3, [%4], [%5], add;\n"
               "}"
               ::"r"(accumulator), "l"(left), "l"(right), "r"(instruction), "r"(left_scales), "r"(right_scales),
                 "r"(uint32(add))
               : "memory");
}
template <>
__device__ __forceinline__ void mma_block_scaled<1, Format::kMxfp4, 96>(
    uint32 accumulator, uint64 left, uint64 right, uint32 instruction, uint32 left_scales, uint32 right_scales,
    bool add) {
  asm volatile("{\n"
               "  .reg .pred add;\n"
               "  setp.ne.b32 add, %6, 0;\n"
               "  tcgen05.mma.cta_group::1.kind::mxf4.block_scale.block32"
               " [%0], %1, %2, %3, [%4], [%5], add;\n"
               "}"
               ::"r"(accumulator), "l"(left), "l"(right), "r"(instruction), "r"(left_scales), "r"(right_scales),
                 "r"(uint32(add))
               : "memory");
}

template <> __device__ __forceinline__ void tmem_alloc<2>(uint32* address) {
  asm volatile("tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%0], 512;"
               ::"r"(shared_address(address)) : "memory");
  asm volatile("tcgen05.relinquish_alloc_permit.cta_group::2.sync.aligned;");
}
template <> __device__ __forceinline__ void tmem_free<2>(uint32 address) {
  asm volatile("tcgen05.dealloc.cta_group::2.sync.aligned.b32 %0, 512;" ::"r"(address) : "memory");
}
template <> __device__ __forceinline__ void tmem_copy_scales<2>(uint32 to, uint32 from) {
  const uint64 atom = uint64(from & 0x3FFFFu) >> 4 | uint64(128 / 16) << 32 | uint64(1) << 46;
  asm volatile("tcgen05.cp.cta_group::2.32x128b.warpx4 [%0], %1;" ::"r"(to), "l"(atom) : "memory");
}
template <> __device__ __forceinline__ void tcgen05_commit<2>(Barrier* b) {
  asm volatile("tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.b64 [%0];"
               ::"r"(shared_address(b)) : "memory");
}
template <> __device__ __forceinline__ void tcgen05_commit<2>(Barrier* b, uint16 mask) {
  asm volatile("tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64"
               " [%0], %1;"
               ::"r"(shared_address(b)), "h"(mask) : "memory");
}
template <>
__device__ __forceinline__ void mma_block_scaled<2, Format::kNvfp4, 64>(
    uint32 accumulator, uint64 left, uint64 right, uint32 instruction, uint32 left_scales, uint32 right_scales,
    bool add) {
  asm volatile("{\n"
               "  .reg .pred add;\n"
               "  setp.ne.b32 add, %6, 0;\n"
               "  tcgen05.mma.cta_group::2.kind::mxf4nvf4.block_scale.scale_vec::4X"
               " [%0], %1, %2, %3, [%4], [%5], add;\n"
               "}"
               ::"r"(accumulator), "l"(left), "l"(right), "r"(instruction), "r"(left_scales), "r"(right_scales),
                 "r"(uint32(add))
               : "memory");
}
template <>
__device__ __forceinline__ void mma_block_scaled<2, Format::kMxfp4, 64>(
    uint32 accumulator, uint64 left, uint64 right, uint32 instruction, uint32 left_scales, uint32 right_scales,
    bool add) {
  asm volatile("{\n"
               "  .reg .pred add;\n"
               "  setp.ne.b32 add, %6, 0;\n"
               "  tcgen05.mma.cta_group::2.kind::mxf4.block_scale.scale_vec::2X"
               " [%0], %1, %2, %3, [%4], [%5], add;\n"
               "}"
               ::"r"(accumulator), "l"(left), "l"(right), "r"(instruction), "r"(left_scales), "r"(right_scales),
                 "r"(uint32(add))
               : "memory");
}
template <>
__device__ __forceinline__ void mma_block_scaled<2, Format::kNvfp4, 96>(
    uint32 accumulator, uint64 left, uint64 right, uint32 instruction, uint32 left_scales, uint32 right_scales,
    bool add) {
  asm volatile("{\n"
               "  .reg .pred add;\n"
               "  setp.ne.b32 add, %6, 0;\n"
               "  tcgen05.mma.cta_group::2.kind::mxf4nvf4.block_scale.block16"
               " [%0], %1, %2, %3, [%4], [%5], add;\n"
               "}"
               ::"r"(accumulator), "l"(left), "l"(right), "r"(instruction), "r"(left_scales), "r"(right_scales),
                 "r"(uint32(add))
               : "memory");
}
template <>
__device__ __forceinline__ void mma_block_scaled<2, Format::kMxfp4, 96>(
    uint32 accumulator, uint64 left, uint64 right, uint32 instruction, uint32 left_scales, uint32 right_scales,
    bool add) {
  asm volatile("{\n"
               "  .reg .pred add;\n"
               "  setp.ne.b32 add, %6, 0;\n"
               "  tcgen05.mma.cta_group::2.kind::mxf4.block_scale.block32"
               " [%0], %1, %2, %3, [%4], [%5], add;\n"
               "}"
               ::"r"(accumulator), "l"(left), "l"(right), "r"(instruction), "r"(left_scales), "r"(right_scales),
                 "r"(uint32(add))
               : "memory");
}

// Before and after a barrier: what threads did in tensor memory before it is visible to the others after it.
__device__ __forceinline__ void tcgen05_before_sync() {
  asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
}
__device__ __forceinline__ void tcgen05_after_sync() {
  asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
}
// The descriptor of an operand in shared memory: rows of 128 bytes, in the 128-byte swizzle of the copy.
__device__ __forceinline__ uint64 smem_descriptor(uint32 address) {
  return uint64(address & 0x3FFFFu) >> 4 | uint64(1024 / 16) << 32 | uint64(1) << 46 | uint64(2) << 61;
}
// The same for a product of 96 columns, which may go past the end of its rows: it continues at their beginning in
// `next`.
__device__ __forceinline__ uint64 smem_descriptor(uint32 address, uint32 next) {
  return smem_descriptor(address) | uint64(next & 0x3FFFFu) >> 4 << 16 | uint64(1) << 52;
}

// Loads kCount registers from tensor memory: neighbouring columns of a lane's row, or fragments of 8 x 8 of 16 lanes.
// The registers belong to the load until the wait.
template <int kCount> __device__ void tmem_load_rows(uint32* r, uint32 from);
template <int kCount> __device__ void tmem_load_fragments(uint32* r, uint32 from);
template <> __device__ __forceinline__ void tmem_load_rows<64>(uint32* r, uint32 from) {
  asm volatile("tcgen05.ld.sync.aligned.32x32b.x64.b32 {"
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
               "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
               "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
               "}, [%64];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]), "=r"(r[4]), "=r"(r[5]), "=r"(r[6]), "=r"(r[7])
               , "=r"(r[8]), "=r"(r[9]), "=r"(r[10]), "=r"(r[11]), "=r"(r[12]), "=r"(r[13]), "=r"(r[14]), "=r"(r[15])
               , "=r"(r[16]), "=r"(r[17]), "=r"(r[18]), "=r"(r[19]), "=r"(r[20]), "=r"(r[21]), "=r"(r[22]), "=r"(r[23])
               , "=r"(r[24]), "=r"(r[25]), "=r"(r[26]), "=r"(r[27]), "=r"(r[28]), "=r"(r[29]), "=r"(r[30]), "=r"(r[31])
               , "=r"(r[32]), "=r"(r[33]), "=r"(r[34]), "=r"(r[35]), "=r"(r[36]), "=r"(r[37]), "=r"(r[38]), "=r"(r[39])
               , "=r"(r[40]), "=r"(r[41]), "=r"(r[42]), "=r"(r[43]), "=r"(r[44]), "=r"(r[45]), "=r"(r[46]), "=r"(r[47])
               , "=r"(r[48]), "=r"(r[49]), "=r"(r[50]), "=r"(r[51]), "=r"(r[52]), "=r"(r[53]), "=r"(r[54]), "=r"(r[55])
               , "=r"(r[56]), "=r"(r[57]), "=r"(r[58]), "=r"(r[59]), "=r"(r[60]), "=r"(r[61]), "=r"(r[62]), "=r"(r[63])
               : "r"(from));
}
template <> __device__ __forceinline__ void tmem_load_fragments<4>(uint32* r, uint32 from) {
  asm volatile("tcgen05.ld.sync.aligned.16x256b.x1.b32 {"
               "%0, %1, %2, %3"
               "}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(from));
}
template <> __device__ __forceinline__ void tmem_load_fragments<8>(uint32* r, uint32 from) {
  asm volatile("tcgen05.ld.sync.aligned.16x256b.x2.b32 {"
               "%0, %1, %2, %3, %4, %5, %6, %7"
               "}, [%8];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]), "=r"(r[4]), "=r"(r[5]), "=r"(r[6]), "=r"(r[7])
               : "r"(from));
}
template <> __device__ __forceinline__ void tmem_load_fragments<16>(uint32* r, uint32 from) {
  asm volatile("tcgen05.ld.sync.aligned.16x256b.x4.b32 {"
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
               "}, [%16];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]), "=r"(r[4]), "=r"(r[5]), "=r"(r[6]), "=r"(r[7])
               , "=r"(r[8]), "=r"(r[9]), "=r"(r[10]), "=r"(r[11]), "=r"(r[12]), "=r"(r[13]), "=r"(r[14]), "=r"(r[15])
               : "r"(from));
}
template <> __device__ __forceinline__ void tmem_load_fragments<32>(uint32* r, uint32 from) {
  asm volatile("tcgen05.ld.sync.aligned.16x256b.x8.b32 {"
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
               "}, [%32];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]), "=r"(r[4]), "=r"(r[5]), "=r"(r[6]), "=r"(r[7])
               , "=r"(r[8]), "=r"(r[9]), "=r"(r[10]), "=r"(r[11]), "=r"(r[12]), "=r"(r[13]), "=r"(r[14]), "=r"(r[15])
               , "=r"(r[16]), "=r"(r[17]), "=r"(r[18]), "=r"(r[19]), "=r"(r[20]), "=r"(r[21]), "=r"(r[22]), "=r"(r[23])
               , "=r"(r[24]), "=r"(r[25]), "=r"(r[26]), "=r"(r[27]), "=r"(r[28]), "=r"(r[29]), "=r"(r[30]), "=r"(r[31])
               : "r"(from));
}
template <int N> __device__ __forceinline__ void tmem_wait(uint32 (&r)[N]) {
  asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory");
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+r"(r[i])::"memory");  // not read before
}
}  // namespace ptx

// ---- partials/bulk_groups --------------------------------------------------
// Bulk stores from shared memory, in groups: a thread waits until older groups have read their source.
namespace ptx {
// The stores that this thread has started since the last group become one.
__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until all but the last kAllowed groups of this thread have read their source.
template <int kAllowed> __device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kAllowed) : "memory");
}
}  // namespace ptx

// ---- partials/fence_proxy --------------------------------------------------
namespace ptx {
// Makes this thread's writes to shared memory visible to the copy engine and to the tensor cores.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
}  // namespace ptx

// ---- partials/tma_store ----------------------------------------------------
namespace ptx {
// Stores a box of a tensor from shared memory.
__device__ __forceinline__ void tma_store(const TensorMap& map, int32 col, int32 row, uint32 from) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];"
               ::"l"(&map), "r"(col), "r"(row), "r"(from) : "memory");
}
}  // namespace ptx

// ---- gemm/tmem_epilogue ----------------------------------------------------
// From the accumulators in tensor memory to out, by four warps, each of which has the lanes of a quarter.
//
// Config: as for the tile scheduler, Out, kPartN, kTmaStore.
//
// Tensor memory holds two stages of the accumulator of a tile and, in its last columns, scales: while the tensor cores
// fill one stage, four warps write the other. Two stages of 256 columns share kShared of them. These are read first,
// and then the tensor cores may go on.
constexpr int kScaleColumn   = 464;
constexpr int kEpilogueWarps = 4;

template <class Config> struct Accumulators {
  static constexpr bool kOverlap  = 2 * Config::kTileN > kScaleColumn;
  static constexpr int  kStep     = kOverlap ? kScaleColumn - Config::kTileN : Config::kTileN;
  static constexpr int  kShared   = Config::kTileN - kStep;
  static constexpr int  kBarriers = kOverlap ? 1 : 2;
  uint32 stage = 0, parity = 0;

  __device__ __forceinline__ uint32 column() const { return stage * kStep; }
  __device__ __forceinline__ uint32 barrier() const { return kOverlap ? 0 : stage; }
  __device__ __forceinline__ void advance() {
    stage ^= 1;
    if (kOverlap || stage == 0) parity ^= 1;
  }
};

// The columns that a warp writes at a time.
template <class Config> struct Part {
  static constexpr int kParts     = Config::kTileN / Config::kPartN;
  static constexpr int kRegisters = Config::kSwapAb ? 2 * (Config::kPartN / 2) : Config::kPartN;
  static constexpr int kBytes     = Config::kPartN * 64;  // 32 rows, 16 bits each
  static_assert(Accumulators<Config>::kShared <= Config::kPartN && Accumulators<Config>::kShared >= 0,
                "the first part that is read has the shared columns");
  static_assert(Config::kPartN == 64 || Config::kSwapAb, "other parts are written by the epilogue of kSwapAb");
};

// How warps of the CTAs with other parts of the columns give their sums to the one that adds them up. The barrier
// `empty` is that of the sender. With a kSplit above 1, one for each warp stands behind the other shared memory.
template <class Config> struct SplitExchange {
  uint4   sums[Config::kSplit > 1 ? Config::kSplit - 1 : 1][Part<Config>::kRegisters / 4][kWarp];
  Barrier full, empty;

  template <typename Smem> static __device__ __forceinline__ SplitExchange& of(Smem& smem, uint32 warp) {
    return reinterpret_cast<SplitExchange*>(&smem + 1)[warp];
  }
};
template <class Config>
constexpr int kExchangeBytes = Config::kSplit > 1 ? kEpilogueWarps * sizeof(SplitExchange<Config>) : 0;

template <class Config, typename Smem> __device__ __forceinline__ void init_epilogue(Smem& smem) {
  init_pipeline(smem.accumulator_full, smem.accumulator_empty, kEpilogueWarps * Config::kCtaGroup);
  for (int w = 0; Config::kSplit > 1 && w < kEpilogueWarps; ++w) {
    ptx::mbarrier_init(&SplitExchange<Config>::of(smem, w).full, Config::kSplit - 1);
    ptx::mbarrier_init(&SplitExchange<Config>::of(smem, w).empty, 1);
  }
}

__device__ __forceinline__ uint32 sum(uint32 a, uint32 b) {
  return __float_as_uint(__uint_as_float(a) + __uint_as_float(b));
}

// One warp: 32 rows of the accumulator of every tile of this CTA.
template <class Config> struct Epilogue {
  using Out = typename Config::Out;
  static constexpr int kRegisters = Part<Config>::kRegisters, kPartN = Config::kPartN;
  uint32 warp, lane;
  float  alpha;
  bool   leader;  // of the warp
  Accumulators<Config> accumulators;
  uint32 exchange_parity = 0;

  // Two neighbours, scaled, as a pair of 16-bit floats.
  __device__ __forceinline__ uint32 pair(const uint32* r) const {
    return to_pair<Out>(__uint_as_float(r[0]) * alpha, __uint_as_float(r[1]) * alpha);
  }
  // kPartN columns of its rows. A thread gets a row of them, or with kSwapAb fragments of 8 x 8.
  __device__ __forceinline__ void load(uint32 (&r)[kRegisters], uint32 from) const {
    if constexpr (Config::kSwapAb) {
      ptx::tmem_load_fragments<kRegisters / 2>(r, from);
      ptx::tmem_load_fragments<kRegisters / 2>(r + kRegisters / 2, from + (16 << 16));
    } else {
      ptx::tmem_load_rows<kRegisters>(r, from);
    }
    ptx::tmem_wait(r);
  }
  // To rows of 128 bytes of shared memory, or with kSwapAb of 64 bytes, swizzled.
  __device__ __forceinline__ void store_smem(uint32 to, const uint32 (&r)[kRegisters]) const {
#pragma unroll
    for (int i = 0; i < kPartN / 8; ++i) {
      if constexpr (Config::kSwapAb) {
        const uint32 *upper = r + 4 * i, *lower = upper + kRegisters / 2;
        const uint32 pairs[4] = {pair(upper), pair(upper + 2), pair(lower), pair(lower + 2)};
        ptx::store_matrices(to + i * 512 + lane % 8 * 64 + (lane / 8 ^ lane % 8 / 2) * 16, pairs);
      } else {
        const uint32* v = r + 8 * i;
        ptx::st_shared(to + swizzle_128(lane, i), make_uint4(pair(v), pair(v + 2), pair(v + 4), pair(v + 6)));
      }
    }
  }
  // To the row itself, of which `cols` columns are left, 32 bytes at a time where it is aligned so.
  __device__ __forceinline__ void store_row(Out* row, int64 cols, bool wide, const uint32 (&r)[kRegisters]) const {
#pragma unroll
    for (int i = 0; i < kPartN; i += 16) {
      uint32 pairs[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) pairs[j] = pair(r + (i + 2 * j) % kRegisters);
      if (kHasLd256 && wide && i + 16 <= cols) {
        ptx::st_32(row + i, pairs);
        continue;
      }
      if (i < cols) ptx::st(row + i, make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]));
      if (i + 8 < cols) ptx::st(row + i + 8, make_uint4(pairs[4], pairs[5], pairs[6], pairs[7]));
    }
  }
  template <typename Smem>
  __device__ __forceinline__ void release(Smem& smem) const {
    Barrier* empty = &smem.accumulator_empty[accumulators.barrier()];
    ptx::tcgen05_before_sync();
    __syncwarp();
    if (!leader) return;
    if constexpr (Config::kCtaGroup == 1) ptx::mbarrier_arrive(empty);
    if constexpr (Config::kCtaGroup == 2) ptx::mbarrier_arrive_cluster(empty, ptx::cluster_rank() & ~1u);
  }
  // The CTA with the first part of the columns adds the sums of the other parts to its own, in their order; true there.
  __device__ __forceinline__ bool add_splits(SplitExchange<Config>& exchange, uint32 (&r)[kRegisters],
                                             ClusterPlace<Config> place) {
    constexpr uint32 kSplitCtas = ClusterShape<Config>::kSplitCtas;
    const uint32 parity = exchange_parity;
    exchange_parity ^= 1;
    if (place.split() > 0) {
      const uint32 first = place.rank % kSplitCtas;
      const uint32 to = ptx::cluster_address(&exchange.sums[place.split() - 1][0][lane], first);
      ptx::mbarrier_wait_cluster(&exchange.empty, parity ^ 1);
#pragma unroll
      for (int i = 0; i < kRegisters / 4; ++i) ptx::st_cluster(to + i * sizeof(exchange.sums[0][0]), r + 4 * i);
      __syncwarp();
      if (leader) ptx::mbarrier_arrive_cluster(&exchange.full, first);
      return false;
    }
    ptx::mbarrier_wait_cluster(&exchange.full, parity);
    for (int split = 1; split < Config::kSplit; ++split) {
#pragma unroll
      for (int i = 0; i < kRegisters / 4; ++i) {
        const uint4 v = exchange.sums[split - 1][i][lane];
        r[4 * i] = sum(r[4 * i], v.x), r[4 * i + 1] = sum(r[4 * i + 1], v.y);
        r[4 * i + 2] = sum(r[4 * i + 2], v.z), r[4 * i + 3] = sum(r[4 * i + 3], v.w);
      }
    }
    __syncwarp();
    if (leader)
      for (int split = 1; split < Config::kSplit; ++split)
        ptx::mbarrier_arrive_cluster(&exchange.empty, place.rank + split * kSplitCtas);
    return true;
  }
  // From shared memory to the first `rows` rows of a part, of which `cols` columns are left.
  __device__ __forceinline__ void copy_rows(Out* to, int64 stride, uint32 staged, int64 rows, int64 cols) const {
    constexpr uint32 kVectors = Config::kSwapAb ? 4 : 8;  // of a row
    const uint32 v = lane % kVectors;
    if (8 * v >= cols) return;
    for (uint32 row = lane / kVectors; row < rows; row += kWarp / kVectors) {
      const uint32 at = Config::kSwapAb ? row * 64 + (v ^ row / 2 % 4) * 16 : swizzle_128(row, v);
      ptx::st(to + row * stride + 8 * v, ptx::ld_shared(staged + at));
    }
  }
  // `out` as a map of boxes of one warp's part, and as rows out_stride apart: either serves. A box of the map ends with
  // the rows of out; those of a masked entry may end before.
  template <typename Smem, class Tiles>
  __device__ __forceinline__ void run(Smem& smem, const Tiles& tiles, int64 n, const float* alphas,
                                      const TensorMap& out_map, Out* out, int64 out_stride) {
    constexpr uint32 kBoxRows = Config::kSwapAb ? kPartN : 32;
    constexpr int kParts = Part<Config>::kParts;
    constexpr bool kOverlap = Accumulators<Config>::kOverlap;
    const uint32 lanes = smem.tmem + (warp << 21);
    const bool   wide  = (uint64(out) | out_stride * sizeof(Out)) % 32 == 0;
    uint32 buffer = 0;
    for (uint32 tile = tiles.first; tile < tiles.count(); tile += tiles.step, accumulators.advance()) {
      const Tile   at   = tiles.tile(tile);
      const uint32 left = at.left + 32 * warp;
      const int64  m = tiles.rows(at.entry), first = tiles.first_row(at.entry);
      if (Tiles::kMasked && alphas != nullptr) alpha = ptx::ld_f32(alphas + at.entry);
      ptx::mbarrier_wait(&smem.accumulator_full[accumulators.barrier()], accumulators.parity);
      ptx::tcgen05_after_sync();
#pragma unroll 1
      for (int i = 0; i < kParts; ++i) {
        const uint32 part = kOverlap && accumulators.stage == 0 ? kParts - 1 - i : i, right = at.right + part * kPartN;
        uint32 r[kRegisters];
        load(r, lanes + accumulators.column() + part * kPartN);
        if (i == (kOverlap ? 0 : kParts - 1)) release(smem);
        if constexpr (Config::kSplit > 1)
          if (!add_splits(SplitExchange<Config>::of(smem, warp), r, tiles.place)) continue;
        if constexpr (Config::kTmaStore) {
          const uint32 staged = ptx::shared_address(smem.out[warp][buffer]);
          const uint32 row = Config::kSwapAb ? right : left, col = Config::kSwapAb ? left : right;
          if (leader) ptx::bulk_wait_read<1>();  // the store before the last has read this buffer
          __syncwarp();
          store_smem(staged, r);
          ptx::fence_proxy_async();
          __syncwarp();
          const bool cut = Tiles::kMasked && row + kBoxRows > m;
          if (cut) copy_rows(out + (first + row) * out_stride + col, out_stride, staged, m - row, n - col);
          if (leader) {
            if (!cut && row < m && col < n) ptx::tma_store(out_map, col, first + row, staged);
            ptx::bulk_commit();
          }
          buffer ^= 1;
        } else if (left + lane < m) {
          store_row(out + (first + left + lane) * out_stride + right, n - right, wide, r);
        }
      }
    }
    if (Config::kTmaStore && leader) ptx::bulk_wait_read<0>();
  }
};

// ---- gemm/blockscaled_shell ------------------------------------------------
// What stands around the main loop of a product of block-scaled FP4 matrices on the sm_100 family. CTAs are persistent.
// Four warps are the epilogue, which writes a tile while the next one is computed; one issues the products: scales from
// shared to tensor memory, then products; the others are producers. With a kCtaGroup of 2, two CTAs compute a tile of
// 256 rows together: each has half of the rows of both operands, and the first one issues the products of both.
//
// The left operand of the products, of which a CTA takes 128 rows, is a, or b with kSwapAb. Then the products are the
// transpose of out, and the epilogue transposes them back. Of the rows and scales that several CTAs of a cluster need,
// each of them copies a part, for all. With a kSplit above 1, the CTAs with the first part of the columns add up the
// sums of all.
//
//   producer            mma warp                        epilogue warps
//   empty  <----------- commit                                            stages of the pipeline
//   full   -----------> scales to tmem, products
//                       accumulator_empty <------------ release           stages of the accumulator
//                       commit -----------------------> accumulator_full
//
// Config: as for the tile scheduler and the epilogue, kFormat, kStages.
// Operands: BlockscaledOperands, or with another scheduler what is derived of it; tiles() gets the shared memory behind
// the rest, and is called by all threads.
// Mainloop: Smem, kProducers, kStepColumns, kProductColumns; init() and produce(), which an elected thread of each
// producer calls; an object of it issues the products of a step.

constexpr int kAtomBytes = 512;  // of scales: 128 rows by four

template <class Config> struct BlockscaledOperands {
  const TensorMap &left, &right, &left_scales, &right_scales, &out_map;
  typename Config::Out* out;
  const float* alpha;
  int64 m, n, k, out_stride;

  __device__ __forceinline__ TileScheduler<Config> tiles(uint8*) const { return {m, n}; }
};

// kAtoms: of scales, along a stage of them.
template <class Config, int kScaleStages, int kAtoms, class Pipelines>
struct alignas(1024) BlockscaledSmem {  // the 128-byte swizzle repeats every 1024 bytes
  static constexpr int kRightAtoms = Config::kTileN > 128 ? 2 : 1;  // along the right rows
  static constexpr int kBarriers   = Accumulators<Config>::kBarriers;
  uint8     left[Config::kStages][128 * 128];
  uint8     right[Config::kStages][Config::kTileN / Config::kCtaGroup * 128];
  uint8     out[Config::kTmaStore ? kEpilogueWarps : 1][2][Config::kTmaStore ? Part<Config>::kBytes : 64];
  uint8     left_scales[kScaleStages][kAtoms * kAtomBytes];
  uint8     right_scales[kScaleStages][kRightAtoms * kAtoms * kAtomBytes];
  Pipelines pipelines;
  Barrier   accumulator_full[kBarriers], accumulator_empty[kBarriers];
  uint32    tmem;

  static constexpr uint32 kOperandBytes = sizeof(left[0]) + sizeof(right[0]);
  static constexpr uint32 kScaleBytes   = sizeof(left_scales[0]) + sizeof(right_scales[0]);
  static constexpr uint32 kScaleWords   = kAtoms * kAtomBytes / 8;  // of 128 rows

  // Copies a stage of scales to tensor memory, to the columns left_column(), ... and right_column(), ...
  static constexpr int kRightStep = kRightAtoms * 4;  // columns
  __device__ __forceinline__ uint32 left_column() const { return tmem + kScaleColumn; }
  __device__ __forceinline__ uint32 right_column() const { return tmem + kScaleColumn + kAtoms * 4; }
  __device__ __forceinline__ void scales_to_tmem(uint32 stage) const {
    const uint32 from_left = ptx::shared_address(left_scales[stage]);
    const uint32 from_right = ptx::shared_address(right_scales[stage]);
#pragma unroll
    for (int i = 0; i < kAtoms; ++i) {
      ptx::tmem_copy_scales<Config::kCtaGroup>(left_column() + 4 * i, from_left + i * kAtomBytes);
#pragma unroll
      for (int j = 0; j < kRightAtoms; ++j)
        ptx::tmem_copy_scales<Config::kCtaGroup>(right_column() + kRightStep * i + 4 * j,
                                                 from_right + (j * kAtoms + i) * kAtomBytes);
    }
  }
};

// The instruction descriptor: E2M1 times E2M1, the type of the scales, the size of the tile, the columns of a product,
// and the byte of a word at which the scales begin.
template <class Config, int kColumns> __device__ __forceinline__ constexpr uint32 instruction(uint32 byte) {
  return 1u << 7 | 1u << 10 | uint32(Config::kTileN / 8) << 17 | uint32(Config::kFormat == Format::kMxfp4) << 23
         | uint32(Config::kCtaGroup) << 27 | byte << 4 | byte << 29 | uint32(kColumns == 96) << 31;
}

// Arrives at the barrier in each CTA of the mask when the products and copies so far are complete.
template <class Config> __device__ __forceinline__ void commit(Barrier* b, uint16 mask) {
  if constexpr (ClusterShape<Config>::kSplitCtas == 1) ptx::tcgen05_commit<1>(b);
  if constexpr (ClusterShape<Config>::kSplitCtas > 1) ptx::tcgen05_commit<Config::kCtaGroup>(b, mask);
}

// A barrier of all threads of the CTA, or of the cluster.
template <class Config> __device__ __forceinline__ void sync_all() {
  if constexpr (ClusterShape<Config>::kClusterCtas == 1) __syncthreads();
  if constexpr (ClusterShape<Config>::kClusterCtas > 1) {
    __syncwarp();
    ptx::cluster_sync();
  }
}

// `products`: how many a tile has.
template <class Config, class Mainloop, class Tiles>
__device__ __forceinline__ void multiply(typename Mainloop::Smem& smem, const Tiles& tiles, uint32 steps,
                                         uint32 products) {
  Mainloop mainloop{smem, tiles.place.copiers()};
  const uint32 begin = tiles.place.begin(steps), end = tiles.place.end(steps);
  Accumulators<Config> accumulators;
  for (uint32 tile = tiles.first; tile < tiles.count(); tile += tiles.step, accumulators.advance()) {
    const uint32 skip = tiles.tile(tile).right % 128 / 32;  // scales come by 128 rows, and a tile may begin within them
    const uint32 accumulator = smem.tmem + accumulators.column();
    Barrier*     empty = &smem.accumulator_empty[accumulators.barrier()];
    if constexpr (Config::kCtaGroup == 1) ptx::mbarrier_wait(empty, accumulators.parity ^ 1);
    if constexpr (Config::kCtaGroup == 2) ptx::mbarrier_wait_cluster(empty, accumulators.parity ^ 1);
    for (uint32 step = begin; step < end; ++step)
      mainloop.step(accumulator, skip, products - step * Mainloop::kProducts, step > begin);
    commit<Config>(&smem.accumulator_full[accumulators.barrier()], tiles.place.of_tile());
  }
}

template <class Mainloop> constexpr int kBlockscaledThreads = kWarp * (kEpilogueWarps + 1 + Mainloop::kProducers);

template <class Config, class Mainloop, class Operands>
__device__ __forceinline__ void blockscaled_gemm(const Operands& p) {
  constexpr uint32 kMmaWarp = kEpilogueWarps, kProducerWarp = kMmaWarp + 1;
  extern __shared__ uint8 dynamic[];
  auto& smem = *reinterpret_cast<typename Mainloop::Smem*>(dynamic);
  const uint32 warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;

  if (warp >= kProducerWarp && ptx::elect_one()) {
    Mainloop::init(smem, p, warp - kProducerWarp);
    if (warp == kProducerWarp) init_epilogue<Config>(smem);
    ptx::fence_mbarrier_init();
  }
  if (warp == kMmaWarp) {
    ptx::tmem_alloc<Config::kCtaGroup>(&smem.tmem);
    ptx::tcgen05_before_sync();
  }
  sync_all<Config>();
  ptx::tcgen05_after_sync();
  ptx::griddep_launch();

  const auto   tiles = p.tiles(dynamic + sizeof(smem) + kExchangeBytes<Config>);
  const uint32 steps = ceil_div(p.k, Mainloop::kStepColumns);
  if (warp >= kProducerWarp) {
    ptx::griddep_wait();
    if (ptx::elect_one()) Mainloop::produce(smem, p, tiles, steps, warp - kProducerWarp);
  } else if (warp == kMmaWarp) {
    if (tiles.place.cta() == 0 && ptx::elect_one())
      multiply<Config, Mainloop>(smem, tiles, steps, ceil_div(p.k, Mainloop::kProductColumns));
  } else {
    ptx::griddep_wait();
    Epilogue<Config> epilogue{warp, lane, p.alpha != nullptr ? ptx::ld_f32(p.alpha) : 1.0f, ptx::elect_one(), {}};
    epilogue.run(smem, tiles, p.n, p.alpha, p.out_map, p.out, p.out_stride);
  }
  sync_all<Config>();  // tensor memory is no longer read
  if (warp == kMmaWarp) ptx::tmem_free<Config::kCtaGroup>(smem.tmem);
}

// ---- gemm/slice_mainloop ---------------------------------------------------
// The main loop of products of 64 columns, around which the shell stands. One warp copies both operands and their
// scales.
//
// A step is a stage of the pipeline: 256 columns of both operands and their scales, and four products.
//
// Config: as for the shell, kPrefetch.
template <class Config> struct SliceMainloop {
  static constexpr int kProducers = 1, kStepColumns = 256, kProductColumns = 64, kProducts = 4;
  static constexpr int kAtoms  = Config::kFormat == Format::kNvfp4 ? 4 : 2;  // of scales
  static constexpr int kStages = Config::kStages;
  struct Pipelines { Barrier full[kStages], empty[kStages]; };
  using Smem = BlockscaledSmem<Config, kStages, kAtoms, Pipelines>;
  using Operands = BlockscaledOperands<Config>;

  static __device__ __forceinline__ void init(Smem& smem, const Operands& p, uint32) {
    ptx::prefetch_tensor_map(p.left);
    ptx::prefetch_tensor_map(p.right);
    ptx::prefetch_tensor_map(p.left_scales);
    ptx::prefetch_tensor_map(p.right_scales);
    init_pipeline(smem.pipelines.full, smem.pipelines.empty, ClusterShape<Config>::kCopiers);
  }

  template <class Tiles>
  static __device__ __forceinline__ void produce(Smem& smem, const Operands& p, const Tiles& tiles, uint32 steps,
                                                 uint32) {
    constexpr uint32 kWords = Smem::kScaleWords, kBytes = Smem::kOperandBytes + Smem::kScaleBytes;
    const auto   left         = left_share(p.left, tiles.place);
    const auto   right        = right_share(p.right, tiles.place);
    const auto   left_scales  = left_scales_share<kWords>(p.left_scales, tiles.place);
    const auto   right_scales = right_scales_share<Smem::kRightAtoms, kWords>(p.right_scales, tiles.place);
    const bool   first = tiles.place.cta() == 0;
    const uint32 end   = tiles.place.end(steps);
    Ring<kStages> state;
    for (uint32 tile = tiles.first; tile < tiles.count(); tile += tiles.step) {
      const Tile at = tiles.tile(tile);
      for (uint32 step = tiles.place.begin(steps); step < end; ++step, state.advance()) {
        const uint32 stage = state.slot;
        Barrier*     full  = &smem.pipelines.full[stage];
        if (Config::kPrefetch && step + kStages < end) {
          const uint32 ahead = step + kStages;
          left.prefetch(ahead * 128, at.left_codes);
          right.prefetch(ahead * 128, at.right_codes);
          left_scales.prefetch(ahead * kWords, at.left_atoms);
          right_scales.prefetch(ahead * kWords, at.right_atoms);
        }
        ptx::mbarrier_wait(&smem.pipelines.empty[stage], state.parity ^ 1);
        if (first) ptx::mbarrier_arrive_expect_tx(full, Config::kCtaGroup * kBytes);
        left.load(smem.left[stage], step * 128, at.left_codes, full);
        right.load(smem.right[stage], step * 128, at.right_codes, full);
        left_scales.load(smem.left_scales[stage], step * kWords, at.left_atoms, full);
        right_scales.load(smem.right_scales[stage], step * kWords, at.right_atoms, full);
      }
    }
    drain<Config>(smem.pipelines.empty, state);
  }

  // The state of the thread that issues products.
  Smem&  smem;
  uint16 copiers;
  Ring<kStages> state = {};

  // `products`: how many of the tile are still to come.
  __device__ __forceinline__ void step(uint32 accumulator, uint32 skip, uint32 products, bool add) {
    constexpr int kProductsOfAtom = kProducts / kAtoms;
    const uint32 left = ptx::shared_address(smem.left[state.slot]);
    const uint32 right = ptx::shared_address(smem.right[state.slot]);
    ptx::mbarrier_wait(&smem.pipelines.full[state.slot], state.parity);
    ptx::tcgen05_after_sync();
    smem.scales_to_tmem(state.slot);
#pragma unroll
    for (int i = 0; i < kProducts; ++i) {
      const int atom = i / kProductsOfAtom, half = i % kProductsOfAtom;
      if (i < products)
        ptx::mma_block_scaled<Config::kCtaGroup, Config::kFormat, 64>(
            accumulator, ptx::smem_descriptor(left + 32 * i), ptx::smem_descriptor(right + 32 * i),
            instruction<Config, 64>(2 * half), smem.left_column() + 4 * atom,
            smem.right_column() + Smem::kRightStep * atom + skip, add || i > 0);
    }
    commit<Config>(&smem.pipelines.empty[state.slot], copiers);
    state.advance();
  }
};
// ---- spec ------------------------------------------------------------------
struct Config {
  using Out = bf16;
  static constexpr Format kFormat = Format::kNvfp4;
  static constexpr int  kTileN    = 8;
  static constexpr int  kCtaGroup = 1;  // CTAs of a tile
  static constexpr int  kClusterM = 1;  // tiles
  static constexpr int  kClusterN = 1;
  static constexpr int  kSplit    = 1;  // parts of the columns
  static constexpr int  kStages   = 10;
  static constexpr int  kPartN    = 8;  // columns that a warp of the epilogue writes at a time
  static constexpr bool kSwapAb   = true;
  static constexpr bool kTmaStore = true;
  static constexpr bool kPrefetch = false;
};

// ---- kernel ----------------------------------------------------------------
using Out = Config::Out;
using Mainloop = SliceMainloop<Config>;
constexpr uint32 kListBytes = 4096;  // of shared memory, for the scheduler
static_assert(sizeof(Mainloop::Smem) + kExchangeBytes<Config> + kListBytes == 224256,
              "the launch counts on it");
static_assert(kBlockscaledThreads<Mainloop> == 192, "the launch counts on it");

struct MaskedOperands : BlockscaledOperands<Config> {
  const int32* masked_m;
  int64 entries;

  __device__ __forceinline__ MaskedScheduler<Config> tiles(uint8* list) const {
    const MaskedScheduler<Config> of{masked_m, reinterpret_cast<uint32*>(list), uint32(entries), m, n};
    of.prepare();
    return of;
  }
};

extern "C" __global__ void __launch_bounds__(192, 1) gemm_blockscaled_masked(
    const __grid_constant__ TensorMap left,          // [rows, k / 2] bytes; boxes are a CTA's part of what CTAs share
    const __grid_constant__ TensorMap right,         // likewise
    const __grid_constant__ TensorMap left_scales,   // [rows / 128, 64 words for each 4 columns of scales], likewise
    const __grid_constant__ TensorMap right_scales,  // likewise
    const __grid_constant__ TensorMap out_map,       // [m, n], boxes [32, 64] or with kSwapAb [kPartN, 32]
    const float* __restrict__ alpha,                 // [1]; null: 1
    Out* __restrict__ out,                           // [m, n]
    int64 m,
    int64 n,                                         // a multiple of 8
    int64 k,                                         // a multiple of 64
    int64 out_stride,                                // elements
    const int32* __restrict__ masked_m,              // [entries]
    int64 entries) {
  blockscaled_gemm<Config, Mainloop>(MaskedOperands{
      {left, right, left_scales, right_scales, out_map, out, alpha, m, n, k, out_stride}, masked_m, entries});
}

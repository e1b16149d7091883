// gemm_portable, generated from templates/gemm/portable.cu.j2
// spec: {"a_layout":"layout_8x4","format":"nvfp4","groups":2,"out_dtype":"bf16","scaled_mma":false,"stages":3,"tile_m":16,"tile_n":128,"warp_m":16,"warp_n":32}
//
// out [m, n] = a [m, k] times the transpose of b [n, k], both FP4 with block scales, in the layouts of the quantizers.
//
// A CTA takes kTileM rows of a by kTileN rows of b; the CTAs of a cluster take the same rows, and each a share of the
// columns. A step is kGroups chunks of 128 columns: each group of warps multiplies one chunk, and each of its warps
// kWarpM by kWarpN rows of it. Asynchronous copies fill a pipeline of stages, one step each, codes and scales as they
// lie in memory. Sums are float32: over a warp's chunks in order, then over groups, then over the cluster, always in
// the same order.

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

// ---- partials/async_copy_groups --------------------------------------------
// Asynchronous copies into shared memory in groups: a thread waits for older groups while the newest are in flight.
namespace ptx {
// Copies 16 bytes: the first `bytes` are read, the others are zero.
__device__ __forceinline__ void copy_async_or_zero(uint32 to, const void* from, uint32 bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
// The copies that this thread has started since the last call become a group.
__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until all but the last kAllowed groups of this thread are complete.
template <int kAllowed>
__device__ __forceinline__ void copy_async_wait_for() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kAllowed) : "memory");
}
}  // namespace ptx

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

// ---- partials/select -------------------------------------------------------
// Select<kFirst, A, B> is the type A where kFirst is true, else B.
template <bool kFirst, typename A, typename B> struct Choice { using Type = A; };
template <typename A, typename B> struct Choice<false, A, B> { using Type = B; };
template <bool kFirst, typename A, typename B> using Select = typename Choice<kFirst, A, B>::Type;

// ---- partials/sf_layout ----------------------------------------------------
// A tile of scales holds kOuter * kInner rows by kCols columns, in the order [inner row][outer row][column].
enum class SfLayout { k128x4, k8x4, kLinear };
template <SfLayout> struct SfTile;
template <> struct SfTile<SfLayout::k128x4>  { static constexpr int kOuter = 4, kInner = 32, kCols = 4; };
template <> struct SfTile<SfLayout::k8x4>    { static constexpr int kOuter = 1, kInner = 8, kCols = 4; };
template <> struct SfTile<SfLayout::kLinear> { static constexpr int kOuter = 1, kInner = 1, kCols = 1; };

// Byte offset of scale (row, col) in a buffer of padded_cols columns.
template <SfLayout L> __device__ __forceinline__ uint64 sf_offset(uint32 row, uint32 col, uint32 padded_cols) {
  using Tile = SfTile<L>;
  constexpr int kRows = Tile::kOuter * Tile::kInner;
  return uint64(row / kRows) * padded_cols * kRows + col / Tile::kCols * (kRows * Tile::kCols) +
         row % Tile::kInner * (Tile::kOuter * Tile::kCols) + row % kRows / Tile::kInner * Tile::kCols +
         col % Tile::kCols;
}

// A sector is 32 scales that are neighbours in memory: the unit of work of a warp, whose lanes then fill it with one
// store. Sectors are numbered down the matrix: in 128x4, number s holds rows 2s, 2s+1 of its tile and the rows
// 32, 64 and 96 below them, by 4 columns; in 8x4, 8 rows by 4 columns; in the linear layout, 32 columns of one row.
template <SfLayout L> struct Sector {
  using Tile = SfTile<L>;
  static constexpr int kCols     = L == SfLayout::kLinear ? 32 : Tile::kCols;
  static constexpr int kRows     = 32 / kCols;
  static constexpr int kTileRows = Tile::kOuter * Tile::kInner;
  static constexpr int kPerTile  = kTileRows / kRows;

  // Matrix row of byte i of sector s.
  static __device__ __forceinline__ uint32 row(uint32 s, uint32 i) {
    const uint32 r = s % kPerTile * kRows + i / kCols;  // [inner row][outer row]
    return s / kPerTile * kTileRows + r % Tile::kOuter * Tile::kInner + r / Tile::kOuter;
  }
  // Byte offset of sector s at column col, in a buffer of padded_cols columns; its next columns follow kStride later.
  static constexpr int kStride = kCols * kTileRows;
  static __device__ __forceinline__ int64 offset(uint32 s, uint32 col, uint32 padded_cols) {
    return (int64(s / kPerTile) * padded_cols + col) * kTileRows + s % kPerTile * 32;
  }
};

template <SfLayout L> __device__ __forceinline__ uint32 sf_padded_cols(uint32 cols) {
  return (cols + SfTile<L>::kCols - 1) & ~uint32(SfTile<L>::kCols - 1);
}
template <SfLayout L> __device__ __forceinline__ uint32 sf_padded_rows(uint32 rows) {
  return (rows + Sector<L>::kTileRows - 1) & ~uint32(Sector<L>::kTileRows - 1);
}

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

// ---- gemm/copies -----------------------------------------------------------
// Copies to shared memory, and loads from it.
namespace ptx {
// For data that is read once: L2 evicts it first. The bytes count towards the barrier.
__device__ __forceinline__ void bulk_load_once(void* to, const void* from, uint32 bytes, Barrier* b) {
  constexpr uint64 policy = 0x12F0000000000000u;  // createpolicy.fractional.L2::evict_first, 1.0
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
               " [%0], [%1], %2, [%3], %4;"
               ::"r"(shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(b)), "l"(policy) : "memory");
}
__device__ __forceinline__ uint2 ld_shared_8(uint32 p) {
  uint2 v;
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(p) : "memory");
  return v;
}
__device__ __forceinline__ uint32 ld_shared_4(uint32 p) {
  uint32 v;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(v) : "r"(p) : "memory");
  return v;
}
// Loads from shared memory of the CTA `rank`, at the address that `p` has in this CTA.
__device__ __forceinline__ float4 ld_cluster(const float* p, uint32 rank) {
  float4 v;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(cluster_address(p, rank)) : "memory");
  return v;
}
}  // namespace ptx

// ---- gemm/group_sums -------------------------------------------------------
__device__ __forceinline__ float4 add(float4 a, float4 b) { return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w}; }

// Adds up four neighbouring sums of all groups of warps, kGap floats apart; `p` points to those of the first group.
template <class Sums> __device__ __forceinline__ float4 sum_groups(const float* p) {
  float4 sum = *reinterpret_cast<const float4*>(p);
#pragma unroll
  for (int i = 1; i < Sums::kGroups; ++i) sum = add(sum, *reinterpret_cast<const float4*>(p + i * Sums::kGap));
  return sum;
}
// The same for the CTAs of a cluster; `p` is an address in this CTA.
__device__ __forceinline__ float4 sum_cluster(const float* p, int ctas) {
  float4 sum = ptx::ld_cluster(p, 0);
  for (int i = 1; i < ctas; ++i) sum = add(sum, ptx::ld_cluster(p, i));
  return sum;
}

// ---- partials/arch ---------------------------------------------------------
// sm_100a
constexpr bool kHasXorsign = true;  // min, max with .xorsign.abs: from sm_86 on
constexpr bool kHasE4m3Cvt = true;
constexpr bool kHasE2m1Cvt = true;
constexpr bool kHasLd256   = true && __CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__ >= 1209;  // PTX 8.8
constexpr bool kHasPdl     = true;

// ---- partials/pairs --------------------------------------------------------
// Two 16-bit floats in one register, the first element in the low half.
constexpr uint32 kPairSigns = 0x80008000u;

template <typename T> constexpr bool kIsBf16       = false;
template <>           constexpr bool kIsBf16<bf16> = true;

template <typename T> __device__ float low(uint32 pair);
template <typename T> __device__ float high(uint32 pair);
template <> __device__ __forceinline__ float low<bf16>(uint32 pair) { return __uint_as_float(pair << 16); }
template <> __device__ __forceinline__ float high<bf16>(uint32 pair) { return __uint_as_float(pair & 0xFFFF0000u); }
template <> __device__ __forceinline__ float low<f16>(uint32 pair) { return ptx::cvt_f32_f16(uint16(pair)); }
template <> __device__ __forceinline__ float high<f16>(uint32 pair) { return ptx::cvt_f32_f16(uint16(pair >> 16)); }

// The larger magnitude in each half, with an arbitrary sign; NaN only where both are NaN.
template <typename T> __device__ uint32 max_magnitude(uint32 a, uint32 b);
template <> __device__ __forceinline__ uint32 max_magnitude<bf16>(uint32 a, uint32 b) {
  if constexpr (kHasXorsign) return ptx::max_xorsign_abs_bf16x2(a, b);
  return ptx::max_bf16x2(a & ~kPairSigns, b & ~kPairSigns);
}
template <> __device__ __forceinline__ uint32 max_magnitude<f16>(uint32 a, uint32 b) {
  if constexpr (kHasXorsign) return ptx::max_xorsign_abs_f16x2(a, b);
  return ptx::max_f16x2(a & ~kPairSigns, b & ~kPairSigns);
}

// ---- partials/bf16x2 -------------------------------------------------------
namespace ptx {
// A fused multiply-add of -0, because sm_80 has no mul.bf16x2.
__device__ __forceinline__ uint32 mul_bf16x2(uint32 a, uint32 b) {
  uint32 d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(kPairSigns));
  return d;
}
}  // namespace ptx

// ---- partials/e2m1_decode --------------------------------------------------
// Codes i and i + 4 of a word, bits 4 i to 4 i + 3, as a pair of T: as sign, last exponent bits and first mantissa bit
// of a 16-bit float, the bits of a code are its value times 2^-14 (f16; a subnormal for 0.5) or 2^-126 (bf16).
template <typename T> __device__ __forceinline__ uint32 e2m1_pair_of(uint32 word, int i) {
  const uint32 top = word << (12 - 4 * i);
  return (top & kPairSigns) | (top & 0x70007000u) >> (kIsBf16<T> ? 6 : 3);
}
// Code i of a word to v[i].
__device__ __forceinline__ void decode_e2m1x8(uint32 word, float (&v)[8]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32 pair = e2m1_pair_of<f16>(word, i);
    v[i]     = low<f16>(pair) * 0x1p14f;
    v[i + 4] = high<f16>(pair) * 0x1p14f;
  }
}

// ---- partials/e4m3 ---------------------------------------------------------
// Rounds to E4M3: to nearest even, saturating at 448; NaN becomes 0x7F.
__device__ __forceinline__ uint8 encode_e4m3(float v) {
  if constexpr (kHasE4m3Cvt) return uint8(ptx::cvt_e4m3x2(v, 0.0f));
  const float  a    = fabsf(v);
  const uint32 bits = __float_as_uint(a), sign = __float_as_uint(v) >> 24 & 0x80u;
  if (a != a) return 0x7F;
  if (a >= 448.0f) return sign | 0x7Eu;
  if (a < 0x1p-6f) return sign | (__float_as_uint(a + 0x1p14f) - __float_as_uint(0x1p14f));  // in steps of 2^-9
  return sign | ((bits + 0x7FFFFu + (bits >> 20 & 1u) - (120u << 23)) >> 20);
}

__device__ __forceinline__ float decode_e4m3(uint8 b) {
  if constexpr (kHasE4m3Cvt) return ptx::cvt_f32_f16(uint16(ptx::cvt_f16x2_e4m3x2(b)));
  const uint32 a = b & 0x7Fu, sign = uint32(b & 0x80u) << 24;
  const float  v = a == 0x7Fu ? __uint_as_float(0x7FFFFFFFu) : __uint_as_float(a << 20) * 0x1p120f;
  return __uint_as_float(__float_as_uint(v) | sign);
}
// Two bytes to a pair of fp16, which holds every E4M3 value.
__device__ __forceinline__ uint32 decode_e4m3x2(uint16 bytes) {
  if constexpr (kHasE4m3Cvt) return ptx::cvt_f16x2_e4m3x2(bytes);
  return ptx::cvt_f16x2(decode_e4m3(uint8(bytes)), decode_e4m3(uint8(bytes >> 8)));
}

// ---- partials/format -------------------------------------------------------
enum class Format { kNvfp4, kMxfp4 };
// Elements that share a scale.
__host__ __device__ constexpr int block_of(Format format) { return format == Format::kNvfp4 ? 16 : 32; }

// ---- partials/mma_half -----------------------------------------------------
// Products of 16-bit floats on the tensor cores. With g = lane / 4 and t = lane % 4:
namespace ptx {
// d += a b for a 16 x 16 and a 16 x 8 matrix. a is pairs a[g][2 t], a[g + 8][2 t], a[g][2 t + 8], a[g + 8][2 t + 8]; b
// is pairs b[2 t][g], b[2 t + 8][g]; d is d[g][2 t], d[g][2 t + 1], d[g + 8][2 t], d[g + 8][2 t + 1].
template <typename T> __device__ void mma_half(float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1);
template <>
__device__ __forceinline__ void mma_half<bf16>(float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9},"
      " {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ __forceinline__ void mma_half<f16>(float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9},"
      " {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// Four 8 x 8 matrices from shared memory: lane 8 i + r gives the address of row r of matrix i, 16 bytes; of matrix i, a
// lane gets the pair at row g, columns 2 t and 2 t + 1.
__device__ __forceinline__ uint4 load_matrices(uint32 row) {
  uint4 v;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(row) : "memory");
  return v;
}
}  // namespace ptx

// ---- gemm/half_blocks ------------------------------------------------------
// Codes times scales become bf16, exactly, for the tensor cores. The columns of a product may be in any order that is
// the same for both operands: lane 4 g + t has columns 32 t to 32 t + 31 of row g of a chunk. A word has eight of them;
// the words of four lanes make two products of 16 columns, with pairs of codes i and i + 4.
// 32 codes of a row, and their scales.
template <Format kFormat> struct Piece {
  static constexpr int kPieceScales = 32 / block_of(kFormat);
  uint4  codes;
  uint32 scales[kPieceScales];  // as pairs with equal halves

  // Beyond the last column the scale is zero, whatever its byte is. The sign of a scale is ignored.
  __device__ __forceinline__ void load(uint32 from, const uint8* scale, bool is_inside) {
    codes = ptx::ld_shared(from);
    if constexpr (kFormat == Format::kNvfp4) {
      const uint32 both = decode_e4m3x2(*reinterpret_cast<const uint16*>(scale) & 0x7F7Fu);
      scales[0] = __float_as_uint(low<f16>(both) * 0x1p118f);
      scales[1] = __float_as_uint(high<f16>(both) * 0x1p118f);
    } else {
      scales[0] = *scale == 0 ? 0x00400000u : *scale == 255 ? 0x7FC00000u : uint32(*scale) << 23;
    }
#pragma unroll
    for (int i = 0; i < kPieceScales; ++i) scales[i] = is_inside ? scales[i] >> 16 | (scales[i] & 0xFFFF0000u) : 0;
  }

  // Word j to four pairs. The bits of a code, as sign, last exponent bits and first mantissa bit of a bf16, are its
  // value times 2^-126. NVFP4's scales are times 2^118, so that one product is enough. MXFP4's may be any power of two.
  __device__ __forceinline__ void decode(uint32 (&pairs)[4], int j) const {
    const uint32 word = j == 0 ? codes.x : j == 1 ? codes.y : j == 2 ? codes.z : codes.w;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      pairs[i] = e2m1_pair_of<bf16>(word, i);
      if constexpr (kFormat == Format::kMxfp4) pairs[i] = ptx::mul_bf16x2(pairs[i], 0x7E807E80u);  // 2^126
      pairs[i] = ptx::mul_bf16x2(pairs[i], scales[kPieceScales * j / 4]);
    }
  }
};

template <Format kFormat> struct HalfBlocks {
  static constexpr float kUnit = kFormat == Format::kNvfp4 ? 0x1p16f : 1.0f;  // NVFP4: each factor is times 2^-8

  // `columns` counts those of the operands from the first column of the chunk on.
  template <int kBlocksM, int kBlocksN, class ChunkA, class ChunkB, class Place>
  static __device__ __forceinline__ void multiply(float (&sums)[kBlocksM][kBlocksN][4], const ChunkA& a,
                                                  const ChunkB& b, const Place& place, int columns, uint32 lane) {
    const uint32 g = lane / 4, t = lane % 4, column = t * Piece<kFormat>::kPieceScales;
    const bool is_inside = int(32 * t) < columns;
    Piece<kFormat> of_a[kBlocksM][2], of_b[kBlocksN];
#pragma unroll
    for (int i = 0; i < 2 * kBlocksM; ++i) {
      const uint32 row = 8 * i + g;
      of_a[i / 2][i % 2].load(a.vector(place.a + row, t), a.scale(place.a_scales + row, column), is_inside);
    }
#pragma unroll
    for (int j = 0; j < kBlocksN; ++j) {
      const uint32 row = 8 * j + g;
      of_b[j].load(b.vector(place.b + row, t), b.scale(place.b_scales + row, column), is_inside);
    }
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      uint32 y[kBlocksN][4];
#pragma unroll
      for (int j = 0; j < kBlocksN; ++j) of_b[j].decode(y[j], word);
#pragma unroll
      for (int i = 0; i < kBlocksM; ++i) {
        uint32 upper[4], lower[4];
        of_a[i][0].decode(upper, word);
        of_a[i][1].decode(lower, word);
#pragma unroll
        for (int step = 0; step < 2; ++step) {
          const uint32 x[4] = {upper[2 * step], lower[2 * step], upper[2 * step + 1], lower[2 * step + 1]};
#pragma unroll
          for (int j = 0; j < kBlocksN; ++j) ptx::mma_half<bf16>(sums[i][j], x, y[j][2 * step], y[j][2 * step + 1]);
        }
      }
    }
  }
};

// ---- partials/mma_scaled ---------------------------------------------------
namespace ptx {
// d += a b of a 16 x 64 by a 64 x 8 matrix. With g = lane / 4 and t = lane % 4, a is eight codes each of a[g][8 t],
// a[g + 8][8 t], a[g][8 t + 32], a[g + 8][8 t + 32]; b is b[8 t][g], b[8 t + 32][g]; d as in mma_half. The bytes of a
// word of scales are those of a row: of a, row g in lane 4 g, row g + 8 in lane 4 g + 1; of b, column g in lane 4 g.
// MXFP4 uses two of the four: half kHalf.
template <Format kFormat, int kHalf>
__device__ __forceinline__ void mma_scaled(float (&d)[4], const uint4& a, uint32 b0, uint32 b1, uint32 of_a,
                                           uint32 of_b) {
  if constexpr (kFormat == Format::kNvfp4) {
    asm("mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3"
        " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3}, %10, {0, 0}, %11, {0, 0};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1), "r"(of_a), "r"(of_b));
  } else {
    asm("mma.sync.aligned.m16n8k64.row.col.kind::mxf4.block_scale.scale_vec::2X.f32.e2m1.e2m1.f32.ue8m0"
        " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3}, %10, {%12, 0}, %11, {%12, 0};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1), "r"(of_a), "r"(of_b), "n"(2 * kHalf));
  }
}
}  // namespace ptx

// ---- gemm/scaled_blocks ----------------------------------------------------
// The tensor cores multiply codes with block scales, 64 columns at a time.
template <Format kFormat> struct ScaledBlocks {
  static constexpr float kUnit = 1.0f;

  // A word of scales, with zeros for blocks beyond the first `columns` columns, whatever their bytes are.
  static __device__ __forceinline__ uint32 scales_inside(const uint8* p, int columns) {
    const uint32 word = *reinterpret_cast<const uint32*>(p);
    const int    count = max(0, columns / block_of(kFormat));
    return count >= 4 ? word : word & ~(0xFFFFFFFFu << 8 * count);
  }

  template <int kStep, int kBlocksM, int kBlocksN, class ChunkA, class ChunkB, class Place>
  static __device__ __forceinline__ void step(float (&sums)[kBlocksM][kBlocksN][4], const ChunkA& a, const ChunkB& b,
                                              const Place& place, int columns, uint32 lane) {
    constexpr int kColumn = kFormat == Format::kNvfp4 ? 4 * kStep : 0;  // of scales
    const int    inside = columns - kColumn * block_of(kFormat);
    const uint32 g      = lane / 4;
    uint4  y[kBlocksN / 2];
    uint32 of_b[kBlocksN];
#pragma unroll
    for (int j = 0; j < kBlocksN / 2; ++j) {
      y[j] = ptx::load_matrices(b.vector(place.b + 16 * j + lane / 16 * 8 + lane % 8, 2 * kStep + lane / 8 % 2));
    }
#pragma unroll
    for (int j = 0; j < kBlocksN; ++j) of_b[j] = scales_inside(b.scale(place.b_scales + 8 * j + g, kColumn), inside);
#pragma unroll
    for (int i = 0; i < kBlocksM; ++i) {
      const uint4  x    = ptx::load_matrices(a.vector(place.a + 16 * i + lane % 16, 2 * kStep + lane / 16));
      const uint32 of_a = scales_inside(a.scale(place.a_scales + 16 * i + g + lane % 2 * 8, kColumn), inside);
#pragma unroll
      for (int j = 0; j < kBlocksN; ++j) {
        const uint4& v = y[j / 2];
        ptx::mma_scaled<kFormat, kStep>(sums[i][j], x, j % 2 ? v.z : v.x, j % 2 ? v.w : v.y, of_a, of_b[j]);
      }
    }
  }

  // `columns` counts those of the operands from the first column of the chunk on.
  template <int kBlocksM, int kBlocksN, class ChunkA, class ChunkB, class Place>
  static __device__ __forceinline__ void multiply(float (&sums)[kBlocksM][kBlocksN][4], const ChunkA& a,
                                                  const ChunkB& b, const Place& place, int columns, uint32 lane) {
    step<0>(sums, a, b, place, columns, lane);
    step<1>(sums, a, b, place, columns, lane);
  }
};

// ---- spec ------------------------------------------------------------------
using Out = bf16;
constexpr Format   kFormat  = Format::kNvfp4;
constexpr SfLayout kALayout = SfLayout::k8x4;
constexpr int kTileM  = 16;
constexpr int kTileN  = 128;
constexpr int kWarpM  = 16;
constexpr int kWarpN  = 32;
constexpr int kGroups = 2;
constexpr int kStages = 3;
constexpr bool kHasClusters = true;
constexpr bool kScaledMma   = false;  // the tensor cores multiply codes with scales

constexpr int kBlock      = block_of(kFormat);
constexpr int kChunk      = 128;
constexpr int kRowBytes   = kChunk / 2;
constexpr int kScaleTiles = kChunk / kBlock / 4;  // of four columns, in a chunk
constexpr int kBlocksM = kWarpM / 16, kBlocksN = kWarpN / 8;
constexpr int kWarpsM  = kTileM / kWarpM, kGroupWarps = kWarpsM * (kTileN / kWarpN);
constexpr int kThreads = kGroups * kGroupWarps * kWarp;

using Accumulators = float[kBlocksM][kBlocksN][4];

// ---- operands --------------------------------------------------------------
// Rows of an operand, and where a stage holds them: a chunk of a row is four vectors of 16 bytes, permuted so that
// loads of one column from eight rows have no bank conflicts: vector v of row r is at v ^ r / 2 % 4. Scales lie as in
// memory, tile by tile.
template <int kRows, SfLayout L> struct Operand {
  static constexpr int kTileRows  = SfTile<L>::kOuter * SfTile<L>::kInner;
  static constexpr int kTileBytes = kTileRows * SfTile<L>::kCols;
  static constexpr int kRowTiles  = kRows < kTileRows ? 1 : kRows / kTileRows;

  struct Chunk {
    uint8 codes[kRows][kRowBytes];
    uint8 scales[kRowTiles][kScaleTiles][kTileBytes];

    __device__ __forceinline__ uint32 vector(uint32 row, uint32 v) const {
      return ptx::shared_address(codes[row]) + (v ^ row / 2 % 4) * 16;
    }
    // `row` counts from the first of the first tile.
    __device__ __forceinline__ const uint8* scale(uint32 row, uint32 column) const {
      return scales[0][0] + sf_offset<L>(row, column, kScaleTiles * SfTile<L>::kCols);
    }
  };

  const uint8* codes;   // of the first row
  const uint8* scales;  // of the tile that holds it
  int64 stride;         // bytes, of a row
  int64 tiles_stride;   // bytes, of a row of tiles
  int   rows;           // of the operand, from the first row on
  int   place;          // of the first row in that tile

  __device__ __forceinline__ Operand(const uint8* all, const uint8* all_scales, int64 stride, int first, int64 last,
                                     int64 columns)
      : codes(all + first * stride), stride(stride), rows(int(last) - first), place(first % kTileRows) {
    tiles_stride = ceil_div(columns, SfTile<L>::kCols) * kTileBytes;
    scales       = all_scales + first / kTileRows * tiles_stride;
  }

  // Starts the copies of the step that begins at `column`. Columns from `end` on and rows past the last become zero.
  __device__ __forceinline__ void load(Chunk (&chunks)[kGroups], int column, int end, uint32 thread) const {
    constexpr int kVectors = kGroups * 4, kAll = kRows * kVectors;  // of a row, of all rows
#pragma unroll
    for (int i = 0; i < kAll; i += kThreads) {
      if (kAll % kThreads != 0 && i + thread >= kAll) break;
      const int row = (i + thread) / kVectors, v = (i + thread) % kVectors, at = column + v * 32;
      ptx::copy_async_or_zero(chunks[v / 4].vector(row, v % 4), codes + row * stride + at / 2,
                              row < rows && at < end ? 16 : 0);
    }
    constexpr int kPieces = kTileBytes / 16, kTiles = kGroups * kScaleTiles, kTileCols = SfTile<L>::kCols * kBlock;
    constexpr int kAllScales = kRowTiles * kTiles * kPieces;
#pragma unroll
    for (int i = 0; i < kAllScales; i += kThreads) {
      if (kAllScales % kThreads != 0 && i + thread >= kAllScales) break;
      const uint32 number = (i + thread) / kPieces;
      const int row = number / kTiles, tile = number % kTiles, at = column + tile * kTileCols;
      const int piece = thread % kPieces * 16;
      uint8*       to   = chunks[tile / kScaleTiles].scales[row][tile % kScaleTiles] + piece;
      const uint8* from = scales + row * tiles_stride + at / kTileCols * kTileBytes + piece;
      ptx::copy_async_or_zero(ptx::shared_address(to), from, row * kTileRows < place + rows && at < end ? 16 : 0);
    }
  }
};
using OperandA = Operand<kTileM, kALayout>;
using OperandB = Operand<kTileN, SfLayout::k128x4>;

// A warp's first rows of a and of b, in the CTA's tile and among its rows of scales.
struct Place {
  int a, b, a_scales, b_scales;
};

using Multiplier = Select<kScaledMma, ScaledBlocks<kFormat>, HalfBlocks<kFormat>>;

// ---- shared memory ---------------------------------------------------------
struct Pipeline {
  alignas(128) OperandA::Chunk a[kStages][kGroups];
  alignas(16) OperandB::Chunk b[kStages][kGroups];
};
constexpr int kPitch = kTileN + 8;  // so that a fragment is stored without bank conflicts
struct Sums {
  static constexpr int kGroups = ::kGroups, kGap = kTileM * kPitch;
  float rows[kGroups][kTileM][kPitch];
};
union Shared {
  Pipeline pipeline;
  Sums sums;  // after the last product of every warp
};

static_assert(sizeof(Shared) == 62208, "the launch counts on it");

// ---- sums over warps and CTAs ----------------------------------------------
// `row` and `column` are the warp's first.
__device__ __forceinline__ void store_sums(Sums& s, const Accumulators& sums, uint32 group, int row, int column,
                                           uint32 lane) {
  const uint32 g = lane / 4, t = lane % 4;
#pragma unroll
  for (int i = 0; i < kBlocksM; ++i) {
#pragma unroll
    for (int j = 0; j < kBlocksN; ++j) {
      float* at = &s.rows[group][row + 16 * i + g][column + 8 * j + 2 * t];
      *reinterpret_cast<float2*>(at)              = {sums[i][j][0], sums[i][j][1]};
      *reinterpret_cast<float2*>(at + 8 * kPitch) = {sums[i][j][2], sums[i][j][3]};
    }
  }
}

// ---- kernel ----------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kThreads) gemm_portable(
    const uint8* __restrict__ a,         // [m, k / 2]
    const uint8* __restrict__ b,         // [n, k / 2]
    const uint8* __restrict__ a_scales,  // in kALayout
    const uint8* __restrict__ b_scales,  // in 128x4
    const float* __restrict__ alpha,     // [1]; null: 1
    Out* __restrict__ out,               // [m, n]
    int64 m,
    int64 n,                             // a multiple of 8
    int64 k,                             // a multiple of 32
    int64 a_stride,                      // elements, as all strides: bytes of codes
    int64 b_stride,
    int64 out_stride
) {
  extern __shared__ __align__(128) uint8 dynamic[];
  Shared& s = *reinterpret_cast<Shared*>(dynamic);
  Pipeline& pipeline = s.pipeline;
  const uint32 thread = threadIdx.x, lane = thread % kWarp, warp = thread / kWarp, group = warp / kGroupWarps;
  const uint32 shares = kHasClusters ? ptx::cluster_ctas() : 1, share = blockIdx.x % shares;  // of the columns
  const int first_m = blockIdx.x / shares * kTileM, first_n = blockIdx.y * kTileN;
  const int warp_m  = warp % kWarpsM * kWarpM, warp_n = warp % kGroupWarps / kWarpsM * kWarpN;

  const int chunks = int(ceil_div(k, kChunk));
  const int begin  = int(int64(chunks) * share / shares) * kChunk;
  const int end    = min(int(k), int(int64(chunks) * (share + 1) / shares) * kChunk);
  const int turns  = int(ceil_div(end - begin, kGroups * kChunk));
  const OperandA operand_a(a, a_scales, a_stride, first_m, m, k / kBlock);
  const OperandB operand_b(b, b_scales, b_stride, first_n, n, k / kBlock);
  const Place place = {warp_m, warp_n, operand_a.place + warp_m, operand_b.place + warp_n};

  if constexpr (kHasPdl) {
    ptx::griddep_launch();
    ptx::griddep_wait();
  }
#pragma unroll 1
  for (int i = 0; i < kStages - 1; ++i) {
    if (i < turns) {
      operand_a.load(pipeline.a[i], begin + i * (kGroups * kChunk), end, thread);
      operand_b.load(pipeline.b[i], begin + i * (kGroups * kChunk), end, thread);
    }
    ptx::copy_async_commit();
  }

  Accumulators sums = {};
  int stage = 0;
#pragma unroll 1
  for (int turn = 0; turn < turns; ++turn) {
    ptx::copy_async_wait_for<kStages - 2>();
    __syncthreads();
    const int next = turn + kStages - 1;
    if (next < turns) {
      const int to = stage == 0 ? kStages - 1 : stage - 1;  // the stage just read
      operand_a.load(pipeline.a[to], begin + next * (kGroups * kChunk), end, thread);
      operand_b.load(pipeline.b[to], begin + next * (kGroups * kChunk), end, thread);
    }
    ptx::copy_async_commit();
    const int column = begin + (turn * kGroups + int(group)) * kChunk;
    Multiplier::multiply(sums, pipeline.a[stage][group], pipeline.b[stage][group], place, end - column, lane);
    if (++stage == kStages) stage = 0;
  }
  __syncthreads();  // the sums take the place of the pipeline

  store_sums(s.sums, sums, group, warp_m, warp_n, lane);
  __syncthreads();
  constexpr int kQuads = kTileN / 4, kItems = kTileM * kQuads / 2;
  const bool is_shared = kHasClusters && shares > 1;
  if (is_shared) {
    for (uint32 i = thread; i < 2 * kItems; i += kThreads) {
      float* at = &s.sums.rows[0][i / kQuads][i % kQuads * 4];
      *reinterpret_cast<float4*>(at) = sum_groups<Sums>(at);
    }
    ptx::cluster_sync();
  }
  const float factor = alpha == nullptr ? 1.0f : ptx::ld_f32(alpha);
  for (uint32 i = thread + share * kThreads; i < kItems; i += kThreads * shares) {
    const int row = i / (kQuads / 2), column = i % (kQuads / 2) * 8;
    if (row >= operand_a.rows || column >= operand_b.rows) continue;
    const float* p = &s.sums.rows[0][row][column];
    uint32 pairs[4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float4 v = is_shared ? sum_cluster(p + 4 * half, shares) : sum_groups<Sums>(p + 4 * half);
      pairs[2 * half]     = to_pair<Out>(v.x * Multiplier::kUnit * factor, v.y * Multiplier::kUnit * factor);
      pairs[2 * half + 1] = to_pair<Out>(v.z * Multiplier::kUnit * factor, v.w * Multiplier::kUnit * factor);
    }
    st_halves<8>(out + (first_m + row) * out_stride + first_n + column, pairs);
  }
  if (is_shared) ptx::cluster_sync();  // a CTA's memory lives until the others have read it
}

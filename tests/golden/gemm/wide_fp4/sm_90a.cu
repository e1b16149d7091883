// gemm_wide_fp4, generated from templates/gemm/wide_fp4.cu.j2
// spec: {"band":4,"cluster":1,"depth":2,"divided":false,"dtype":"f16","format":"nvfp4","groups":1,"out_dtype":"bf16","split":2,"tile_m":32}
//
// out [m, n] = x [m, k] times the transpose of an FP4 weight [n, k], for many rows of x. On the tensor cores the weight
// is the left operand, decoded in registers, and x the right one, in shared memory. So rows of a product are rows of
// the weight, and the transpose of a product is written to out. The weight is prepared; gemm/wide_fp4 takes one as the
// quantizers leave it, and x from gemm/expand. With kGated, rows of the weight are gates of features and their ups, and
// out [m, n / 2] is silu(gate) * up.
//
// A CTA takes tiles of kTileN rows of the weight by kTileM rows of x, in steps of 128 columns. Two producer warps keep
// kWeightSlots steps of the weight and kSlots half steps of x in flight; with kWhole, a slot has a step of both. A
// consumer warpgroup has 64 rows of the weight: it decodes their next half step while the tensor cores multiply the
// current one. With a kDepth of 2 or 4, so many warpgroups have the same rows, and take the half steps, or with kWhole
// the steps, in turn.
//
// - kCluster CTAs share their rows of x: each has different rows of the weight, and copies a part of x for all. With
//   kCommon, the last groups of two CTAs have the same rows of the weight, and take the steps in turn.
// - kSplit times as many CTAs are a cluster: each has a part of the columns of a tile. They, and warpgroups with the
//   same rows, add up their sums through shared memory, each for a part of the rows of x.
// - Other clusters are persistent. With kDivided, they share the last tiles. gemm/wide_schedule has three schedules.

// ---- partials/arch ---------------------------------------------------------
// sm_90a
constexpr bool kHasXorsign = true;  // min, max with .xorsign.abs: from sm_86 on
constexpr bool kHasE4m3Cvt = true;
constexpr bool kHasE2m1Cvt = false;
constexpr bool kHasLd256   = false && __CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__ >= 1209;  // PTX 8.8
constexpr bool kHasPdl     = true;

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

// ---- partials/ring ---------------------------------------------------------
// The slot of a ring that a thread is at, and the parity of the current phase of that slot's barrier.
template <int kSize> struct Ring {
  uint32 slot = 0, parity = 0;
  __device__ __forceinline__ void advance() {
    if (++slot == kSize) slot = 0, parity ^= 1;
  }
};

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

// ---- partials/format -------------------------------------------------------
enum class Format { kNvfp4, kMxfp4 };
// Elements that share a scale.
__host__ __device__ constexpr int block_of(Format format) { return format == Format::kNvfp4 ? 16 : 32; }

// ---- gemm/weight -----------------------------------------------------------
// A prepared weight is a matrix of tiles, 64 rows by 128 columns; jitfp4/weight.py describes it. Of each
// 16 x 16 piece a lane holds one word of eight codes, the fragment that the tensor cores want of it, and scales of rows
// g and g + 8. Both become the weight times 2^-8, in bf16 and in fp16 alike, without rounding.
constexpr int   kTileRows = 64, kTileCols = 128;
constexpr int   kBlocks     = kTileRows / 16;  // of 16 rows
constexpr int   kCodeBytes  = kTileRows * kTileCols / 2;
constexpr float kWeightUnit = 0x1p8f;

// Pairs in the order of a fragment: rows g and g + 8, columns 2 t and 2 t + 1; the same rows, columns 2 t + 8 and
// 2 t + 9. As sign, last bits of the exponent and first bit of the mantissa, a code is its value times a power of two.
constexpr uint32 kPairCodes = 0x81C081C0u, kPairValues = 0x01C001C0u;  // with signs, without
template <typename T> __device__ void decode_codes(uint32 (&pairs)[4], uint32 w);
template <> __device__ __forceinline__ void decode_codes<bf16>(uint32 (&pairs)[4], uint32 w) {  // times 2^-126
  pairs[0] = w & kPairCodes;
  pairs[1] = w << 6 & kPairCodes;
  pairs[2] = __funnelshift_r(w, w, 6) & kPairCodes;
  pairs[3] = (w << 4 ^ w >> 4) & kPairCodes;
}
template <> __device__ __forceinline__ void decode_codes<f16>(uint32 (&pairs)[4], uint32 w) {  // times 2^-14
  decode_codes<bf16>(pairs, w);
#pragma unroll
  for (int i = 0; i < 4; ++i) pairs[i] += 7 * (pairs[i] & kPairValues);  // their sign stays, the others move by three
}

// Two scales of a word of four: rows g and g + 8, in the first or the second half of its columns. A scale byte has five
// bits of exponent, with a bias of 21, and three of mantissa. The bytes of the first lie in the middle of a half of the
// word, those of the second after its bytes have changed places.
template <typename T> __device__ uint32 decode_scales(uint32 v, bool second);
template <> __device__ __forceinline__ uint32 decode_scales<bf16>(uint32 v, bool second) {  // times 2^118
  uint32 d;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;"
      : "=r"(d) : "r"(second ? __byte_perm(v, 0, 0x2301) : v), "r"(0x0FF00FF0u), "r"(0x70007000u));
  return d;  // v & mask | constant
}
template <> __device__ __forceinline__ uint32 decode_scales<f16>(uint32 v, bool second) {  // times 2^6
  return (second ? __byte_perm(v, 0, 0x2301) : v) << 3 & 0x7F807F80u;
}

// Products of pairs with the first (`upper`) and with the second (`lower`) half of another pair. As one statement, they
// need no copies of a half.
template <typename T>
__device__ void mul_pairs(uint32 (&upper)[2], uint32 (&lower)[2], uint32 scales);
template <> __device__ __forceinline__ void mul_pairs<f16>(uint32 (&upper)[2], uint32 (&lower)[2], uint32 scales) {
  asm("{\n"
      "  .reg .b16 first, second;\n"
      "  .reg .b32 a, b;\n"
      "  mov.b32 {first, second}, %4;\n"
      "  mov.b32 a, {first, first};\n"
      "  mov.b32 b, {second, second};\n"
      "  mul.rn.f16x2 %0, %0, a;\n"
      "  mul.rn.f16x2 %1, %1, a;\n"
      "  mul.rn.f16x2 %2, %2, b;\n"
      "  mul.rn.f16x2 %3, %3, b;\n"
      "}"
      : "+r"(upper[0]), "+r"(upper[1]), "+r"(lower[0]), "+r"(lower[1]) : "r"(scales));
}
// A fused multiply-add of -0, because sm_80 has no mul.bf16x2.
template <> __device__ __forceinline__ void mul_pairs<bf16>(uint32 (&upper)[2], uint32 (&lower)[2], uint32 scales) {
  asm("{\n"
      "  .reg .b16 first, second;\n"
      "  .reg .b32 a, b;\n"
      "  mov.b32 {first, second}, %4;\n"
      "  mov.b32 a, {first, first};\n"
      "  mov.b32 b, {second, second};\n"
      "  fma.rn.bf16x2 %0, %0, a, %5;\n"
      "  fma.rn.bf16x2 %1, %1, a, %5;\n"
      "  fma.rn.bf16x2 %2, %2, b, %5;\n"
      "  fma.rn.bf16x2 %3, %3, b, %5;\n"
      "}"
      : "+r"(upper[0]), "+r"(upper[1]), "+r"(lower[0]), "+r"(lower[1]) : "r"(scales), "r"(0x80008000u));
}

// One 16 x 16 piece: `scales` of rows g and g + 8 as a pair.
template <typename T>
__device__ __forceinline__ void decode_weight(uint32 (&pairs)[4], uint32 codes, uint32 scales) {
  decode_codes<T>(pairs, codes);
  uint32 upper[2] = {pairs[0], pairs[2]}, lower[2] = {pairs[1], pairs[3]};
  mul_pairs<T>(upper, lower, scales);
  pairs[0] = upper[0], pairs[1] = lower[0], pairs[2] = upper[1], pairs[3] = lower[1];
}

// ---- partials/fence_proxy --------------------------------------------------
namespace ptx {
// Makes this thread's writes to shared memory visible to the copy engine and to the tensor cores.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
}  // namespace ptx

// ---- partials/named_barriers -----------------------------------------------
// Barriers of the CTA, by number; 0 is that of __syncthreads(). `threads` counts those that arrive or wait, all of them
// in whole warps.
namespace ptx {
__device__ __forceinline__ void barrier_arrive(int i, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(i), "r"(threads) : "memory");
}
// Arrives, and waits for the others.
__device__ __forceinline__ void barrier_sync(int i, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(i), "r"(threads) : "memory");
}
}  // namespace ptx

// ---- partials/warpgroup ----------------------------------------------------
// Warpgroups: the order of their matrix products, and the number of their registers.
namespace ptx {
// To be called before the first product, and whenever registers of a product were written.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until all but the last kAllowed groups of products are complete.
template <int kAllowed>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kAllowed) : "memory");
}

// Sets the number of registers of each thread: one warpgroup gives some back, the others get them.
template <int N> __device__ __forceinline__ void registers_fewer() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N> __device__ __forceinline__ void registers_more() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

// Reads threadIdx.x again, so that no register must hold it, or what is computed from it, where registers are few.
__device__ __forceinline__ uint32 thread_index() {
  uint32 i;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(i));
  return i;
}
}  // namespace ptx

// ---- gemm/products ---------------------------------------------------------
// The matrix products of warpgroups, for the rows and the type that the spec names.
namespace ptx {
// The low half of the descriptor of a tile of rows of 128 bytes, in the 128-byte swizzle of the copy; the high half is
// the same for all tiles. To go on by 16 columns, that is 32 bytes, add 2.
__device__ __forceinline__ uint32 wgmma_tile(uint32 address) { return (address & 0x3FFFFu) >> 4 | 1u << 16; }
// d = a b, or d += a b, of a 64 x 16 by a 16 x n matrix, where n is twice the size of d.
// With g = lane / 4 and t = lane % 4, warp w of a warpgroup has in a[i] row 16 w + g + 8 (i % 2), columns 2 t + 8 (i
// / 2) and the next, and in d[i] row 16 w + g + 8 (i / 2 % 2), column 8 (i / 4) + 2 t + i % 2. Neither may be accessed
// before a wait.
__device__ __forceinline__ void wgmma(float (&d)[16], const uint32 (&a)[4], uint32 b, bool add) {
  asm volatile("{\n"
               "  .reg .pred add;\n"
               "  .reg .b64 b;\n"
               "  mov.b64 b, {%20, 0x40000040};\n"
               "  setp.ne.b32 add, %21, 0;\n"
               "  wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 {"
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
               "}, {%16, %17, %18, %19}, b, add, 1, 1, 0;\n"
               "}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
        , "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(int32(add)));
}
}  // namespace ptx

// ---- gemm/wide_place -------------------------------------------------------
// What a consumer holds of its tile, and where its 64 rows of the weight are.
using Fragments = uint32[4][4];  // 64 rows by 64 columns of the weight, in a warpgroup

struct Affine { float scale, bias; };  // of a row of the weight

// A consumer: the first row of its warpgroup in the weight, and the columns from its current step on.
struct Place {
  uint32 warp, lane, row;
  int32  columns;
};

// ---- gemm/start_product ----------------------------------------------------
// Starts the products of half a step, which become one group. `x`: its descriptor.
template <int kSums>
__device__ __forceinline__ void start_product(float (&sums)[kSums], const Fragments& a, uint32 x, bool add) {
  ptx::wgmma_fence();
#pragma unroll
  for (int i = 0; i < 4; ++i) ptx::wgmma(sums, a[i], x + 2 * i, add || i > 0);
  ptx::wgmma_commit();
}

// ---- partials/cluster_copies -----------------------------------------------
// Writes to shared memory of another CTA of the cluster, and arrivals at its barriers, by addresses in the cluster.
namespace ptx {
__device__ __forceinline__ void mbarrier_arrive_at(uint32 b) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(b) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive_expect_at(uint32 b, uint32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cluster.b64 _, [%0], %1;" ::"r"(b), "r"(bytes) : "memory");
}
// From this CTA's shared memory; the bytes count towards the barrier, which lies where they go.
__device__ __forceinline__ void copy_shared(uint32 to, uint32 from, uint32 bytes, uint32 b) {
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(to), "r"(from), "r"(bytes), "r"(b) : "memory");
}
__device__ __forceinline__ void st_async(uint32 to, uint32 v, uint32 b) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];"
               ::"r"(to), "r"(v), "r"(b) : "memory");
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

// ---- partials/tma_store ----------------------------------------------------
namespace ptx {
// Stores a box of a tensor from shared memory.
__device__ __forceinline__ void tma_store(const TensorMap& map, int32 col, int32 row, uint32 from) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];"
               ::"l"(&map), "r"(col), "r"(row), "r"(from) : "memory");
}
}  // namespace ptx

// ---- gemm/wide_copies ------------------------------------------------------
// Copies around the products of warpgroups, and what CTAs tell each other.
namespace ptx {
// Copies `bytes` bytes, which count towards the barrier.
__device__ __forceinline__ void bulk_load(void* to, const void* from, uint32 bytes, Barrier* b) {
  asm volatile("cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(b)) : "memory");
}
// Copies a box to every CTA of the mask, to the address of `to`. In each it counts towards the barrier at address b.
__device__ __forceinline__ void tma_multicast(void* to, const TensorMap& map, int32 col, int32 row, Barrier* b,
                                              uint16 mask) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
               " [%0], [%1, {%2, %3}], [%4], %5;"
               ::"r"(shared_address(to)), "l"(&map), "r"(col), "r"(row), "r"(shared_address(b)), "h"(mask) : "memory");
}

__device__ __forceinline__ uint16 ld_16(const void* p) {
  uint16 v;
  asm volatile("ld.global.u16 %0, [%1];" : "=h"(v) : "l"(p));
  return v;
}
// A thread that reads v with ld_acquire sees everything written before: by this thread, and by those that met it at a
// barrier.
__device__ __forceinline__ void st_release(uint64* p, uint64 v) {
  asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
__device__ __forceinline__ uint64 ld_acquire(const uint64* p) {
  uint64 v;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
}  // namespace ptx

// ---- gemm/wide_steps -------------------------------------------------------
// Products of one thread of a consumer warpgroup, for few rows of x: instructions around them cost as much as the
// products. So a slot of the ring has a whole step, of x and of the weight, and warpgroups with the same rows take the
// steps in turn. Of each slot, both producers complete a phase of its barrier in `full`, and all warps that read it
// one of that in `empty`. There are two sets of fragments: while the tensor cores read one, the other is filled, from
// codes that were loaded half a step before.
//
// kRound slots in a row, the first of the ring being the first, are one body of a loop: their addresses need no
// instructions, which else take up to a ninth of the time.
template <class Shared, class Weight, int kTileM, int kTurns, int kCluster> struct StepConsumer {
  static constexpr int kSlots = sizeof(Shared::full) / sizeof(Barrier), kRound = kSlots / kTurns, kMostRound = 8;
  using Sums  = float[kTileM / 2];
  using Codes = typename Weight::Codes;

  Shared& shared;
  uint32  group;
  Place   place;
  uint32  empty;  // the address, in the cluster, of the first barrier that the lane tells of slots which are free
  uint32  turns;  // of how many warpgroups: kTurns, but for those that take turns with another CTA's
  uint32  first;  // slot
  uint32  slot = first, parity = 0;
  Fragments a = {}, b = {};

  __device__ __forceinline__ void wait(uint32 slot, uint32 parity) { ptx::mbarrier_wait(&shared.full[slot], parity); }
  __device__ __forceinline__ Codes load(uint32 slot, int half) const {
    return Weight::load(ptx::shared_address(shared.weight[slot][group]), half, place);
  }
  // To be called once the products of a slot are complete.
  __device__ __forceinline__ void release(uint32 of) const {
    __syncwarp();  // all lanes have loaded their codes
    if constexpr (kCluster == 1) {
      if (place.lane == 0) ptx::mbarrier_arrive(&shared.empty[of]);
    } else {
      if (place.lane < kCluster) ptx::mbarrier_arrive_at(empty + of * sizeof(Barrier));
    }
  }
  // The products of slot `now`. Before the last of them start, `next` waits for the slot after it and loads its first
  // codes; false: there is none. `done` frees the slot before, when its products are complete.
  template <class Done, class Next>
  __device__ __forceinline__ void step(Sums& sums, uint32 now, const Done& done, const Next& next) {
    constexpr uint32 kBytes = sizeof(Shared::x[0]);
    const uint32 x = ptx::wgmma_tile(ptx::shared_address(shared.x[0])) + now * (kBytes / 16);
    Codes codes = load(now, 1);
    start_product(sums, a, x, true);
    ptx::wgmma_wait<1>();  // b is free
    done();
    Weight::decode(b, codes);
    const bool goes_on = next(codes);
    start_product(sums, b, x + kBytes / 32, true);
    ptx::wgmma_wait<1>();  // a is free
    if (goes_on) Weight::decode(a, codes);
  }
  // Takes the next `steps` steps of the warpgroup, at least one.
  __device__ __forceinline__ void accumulate(Sums& sums, uint32 steps) {
#pragma unroll
    for (int i = 0; i < kTileM / 2; ++i) sums[i] = 0.0f;
    wait(slot, parity);
    Weight::decode(a, load(slot, 0));
    constexpr uint32 kNone = ~0u;
    uint32 last = kNone;  // the slot before
    const auto release_last = [&] {
      if (last != kNone) release(last);
    };
    while (steps > 0) {
      if (kRound <= kMostRound && turns == kTurns && slot == first && steps >= kRound) {
        steps -= kRound;
#pragma unroll
        for (int i = 0; i < kRound; ++i) {
          const auto at = [&](int i) { return (kTurns == 1 ? 0 : first) + i * kTurns; };
          const auto done = [&] { i > 0 ? release(at(i - 1)) : release_last(); };
          step(sums, at(i), done, [&](Codes& codes) {
            if (i + 1 == kRound) parity ^= 1;
            if (i + 1 == kRound && steps == 0) return false;
            const uint32 then = at((i + 1) % kRound);
            wait(then, parity);
            codes = load(then, 0);
            return true;
          });
        }
        last = first + (kRound - 1) * kTurns;
      } else {
        const uint32 now = slot;
        step(sums, now, release_last, [&](Codes& codes) {
          slot += turns;
          if (slot >= kSlots) slot -= kSlots, parity ^= 1;
          if (--steps == 0) return false;
          wait(slot, parity);
          codes = load(slot, 0);
          return true;
        });
        last = now;
      }
    }
    ptx::wgmma_wait<0>();
    release(last);
#pragma unroll
    for (int i = 0; i < kTileM / 2; ++i) asm volatile("" : "+f"(sums[i])::"memory");  // not read before
  }
};
// ---- gemm/wide_mainloop ----------------------------------------------------
// Products of one thread of a consumer warpgroup. Rings of x have slots of half a step, rings of the weight of a step.
// Of each slot, producers complete a phase of its barrier in `full`, and all warps that read it one of that in `empty`.
template <class Shared, class Weight, int kTileM, int kDepth, int kCluster> struct Consumer {
  static constexpr int kSlots = sizeof(Shared::full) / sizeof(Barrier);
  static constexpr int kWeightSlots = sizeof(Shared::weight_full) / sizeof(Barrier);
  using Sums = float[kTileM / 2];

  Shared& shared;
  uint32  group, half;  // the half step that it takes of each kDepth
  Place   place;
  Ring<kSlots>       ring;
  Ring<kWeightSlots> weight_ring;

  // Decodes the next half step: half kNext of a step where the warpgroup takes both, else its own half.
  template <int kNext> __device__ __forceinline__ void decode_next(Fragments& a) {
    const uint32 slot = weight_slot();
    if (kDepth > 1 || kNext == 0) ptx::mbarrier_wait(&shared.weight_full[slot], weight_ring.parity);
    const uint32 of_step = kDepth == 1 ? kNext : kDepth == 2 ? half : half % 2;
    Weight::decode(a, ptx::shared_address(shared.weight[slot][group]), of_step, place);
  }
  __device__ __forceinline__ uint32 weight_slot() const { return weight_ring.slot + (kDepth == 4 ? half / 2 : 0); }
  // To be called after the fragments were used: only then are the loads complete for sure.
  __device__ __forceinline__ void release_weight() {
    __syncwarp();
    if (place.lane == 0) ptx::mbarrier_arrive(&shared.weight_empty[weight_slot()]);
#pragma unroll
    for (int i = 0; i < kDepth; i += 2) weight_ring.advance(), place.columns -= kTileCols;
  }
  __device__ __forceinline__ void multiply(Sums& sums, const Fragments& a, bool add) {
    const uint32 slot = ring.slot + half;
    ptx::mbarrier_wait(&shared.full[slot], ring.parity);
    start_product(sums, a, ptx::wgmma_tile(ptx::shared_address(shared.x[slot])), add);
#pragma unroll
    for (int i = 0; i < kDepth; ++i) ring.advance();
  }
  // Frees the slot of x of the product that was issued kBack products ago, where 1 is the last.
  template <int kBack> __device__ __forceinline__ void release_x() {
    constexpr int kDistance = kBack * kDepth;
    release_x((ring.slot >= kDistance ? ring.slot : ring.slot + kSlots) - kDistance + half);
  }
  __device__ __forceinline__ void release_x(uint32 slot) {
    Barrier* b = &shared.empty[slot];
    if constexpr (kCluster == 1) {
      if (place.lane == 0) ptx::mbarrier_arrive(b);
    } else {
      if (place.lane < kCluster) ptx::mbarrier_arrive_at(ptx::cluster_address(b, place.lane));
    }
  }
  // `products` half steps of the warpgroup. Of two sets of fragments one is filled while tensor cores read the other.
  __device__ __forceinline__ void accumulate(Sums& sums, uint32 products) {
    Fragments a, b;
    if (kTileM == 256 && kDepth == 1 && group > 0) {  // half a step apart, they decode in turn
      Ring<kSlots> second = ring;
      second.advance();
      ptx::mbarrier_wait(&shared.full[second.slot], second.parity);
    }
    decode_next<0>(a);
    for (uint32 done = 0;;) {
      multiply(sums, a, done > 0);
      if constexpr (kDepth > 1) release_weight();
      ptx::wgmma_wait<1>();  // b is free
      if (done > 0) release_x<2>();
      if (++done == products) break;
      decode_next<1>(b);
      multiply(sums, b, true);
      release_weight();
      ptx::wgmma_wait<1>();  // a is free
      release_x<2>();
      if (++done == products) break;
      decode_next<0>(a);
    }
    ptx::wgmma_wait<0>();
    release_x<1>();
    if (kDepth == 1 && products % 2 == 1) release_weight();
#pragma unroll
    for (int i = 0; i < kTileM / 2; ++i) asm volatile("" : "+f"(sums[i])::"memory");  // not read before
  }
};

// ---- partials/reciprocal ---------------------------------------------------
// 1 / v, correctly rounded where neither v nor the result is near overflow or underflow: an approximation, corrected by
// its remainder (Markstein).
__device__ __forceinline__ float reciprocal_inside(float v) {
  const float seed = ptx::rcp_approx(v);
  return fmaf(fmaf(-v, seed, 1.0f), seed, seed);
}

// ---- partials/silu_of ------------------------------------------------------
// v / (1 + exp(-v)). exp is ex2.approx of a rounded product: the one step that is not correctly rounded, with a
// relative error of up to 2^-22 + |v| * 2^-23.
constexpr float kLog2E = 0x1.715476p+0f, kSiluRange = 80.0f;

// For |v| <= kSiluRange, where the divisor is far from overflow: the quotient of a correctly rounded reciprocal,
// corrected by its remainder, is correctly rounded (Markstein). The remainder is subtracted, so that -0 stays -0.
__device__ __forceinline__ float silu_inside(float v) {
  const float d = 1.0f + ptx::ex2_approx(v * -kLog2E), r = reciprocal_inside(d), q = v * r;
  return fmaf(-fmaf(d, q, -v), r, q);
}
// For larger |v|, 1 + exp(-v) rounds to 1 or to exp(-v). ex2.approx flushes subnormal results to zero, and exp(v) may
// be subnormal; exp(v) times 2^64 is not.
__device__ __forceinline__ float silu_outside(float v) {
  return v > 0.0f ? v : v * ptx::ex2_approx(fmaf(v, kLog2E, 64.0f)) * 0x1p-64f;
}

__device__ __forceinline__ float silu(float v) {
  return fabsf(v) > kSiluRange ? silu_outside(v) : silu_inside(v);
}

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

// ---- gemm/wide_results -----------------------------------------------------
// How the sums in the registers of a warpgroup become rows of `out` in shared memory, and how those who have sums of
// the same elements add them up: warpgroups and CTAs of one tile through shared memory, clusters through the workspace.

// Sums are exchanged in the order in which the threads hold them: of 8 rows of x, four sums of the first thread, four
// of the next, and so on.
template <int kSums> __device__ __forceinline__ float4 four(const float (&sums)[kSums], int i) {
  return make_float4(sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]);
}
template <int kSums> __device__ __forceinline__ void add(float (&sums)[kSums], int i, float4 v) {
  sums[4 * i] += v.x, sums[4 * i + 1] += v.y, sums[4 * i + 2] += v.z, sums[4 * i + 3] += v.w;
}

// The results of a warpgroup: kTileM rows of x in kParts parts. kGroups groups of kDepth warpgroups in each of kSplit
// CTAs have sums of the same tile.
template <typename Out, int kTileM, int kParts, int kGroups, int kDepth, int kSplit, bool kGated> struct WideResults {
  static constexpr int kPartM   = kTileM / kParts;
  static constexpr int kSharers = kSplit * kDepth;  // warpgroups with sums of the same elements
  using Sums = float[kTileM / 2];

  // Writes part kPart of the features of a warpgroup, half as many as rows, to rows of 64 bytes, in the 64-byte swizzle
  // of the copy that stores them. A thread has the gate of a feature in row g and its up in row g + 8.
  template <int kPart>
  static __device__ __forceinline__ void stage_gated(uint32 to, const Sums& sums, uint32 thread, Affine gates,
                                                     Affine ups) {
    constexpr int kMatrices = kPartM < 32 ? kPartM / 8 : 4;  // of 8 features by 8 rows of x
    const uint32 row = thread % 32 % (8 * kMatrices);
    to += row * 64 + (thread / 32 ^ row / 2 % 4) * 16;
#pragma unroll
    for (int i = 0; i < kPartM; i += 8 * kMatrices, to += kMatrices * 512) {
      const float* d = sums + (kPart * kPartM + i) / 2;
      uint32 pairs[kMatrices];
#pragma unroll
      for (int j = 0; j < kMatrices; ++j) {
        const float g[2] = {fmaf(d[4 * j], gates.scale, gates.bias), fmaf(d[4 * j + 1], gates.scale, gates.bias)};
        const float u[2] = {fmaf(d[4 * j + 2], ups.scale, ups.bias), fmaf(d[4 * j + 3], ups.scale, ups.bias)};
        pairs[j] = to_pair<Out>(silu(g[0]) * u[0], silu(g[1]) * u[1]);
      }
      ptx::store_matrices(to, pairs);
    }
  }

  // Writes part kPart of a warpgroup's sums to rows of 128 bytes, in the 128-byte swizzle of the copy that stores them.
  template <int kPart>
  static __device__ __forceinline__ void stage(uint32 to, const Sums& sums, uint32 thread, Affine upper,
                                               Affine lower) {
    if constexpr (kGated) return stage_gated<kPart>(to, sums, thread, upper, lower);
    constexpr int kMatrices = kPartM < 16 ? 2 : 4;  // of 8 x 8, two for each 8 rows of x
    to += thread / 16 % 2 * 1024 + swizzle_128(thread % 8, thread / 32 * 2 + thread / 8 % 2);
#pragma unroll
    for (int i = 0; i < kPartM; i += 4 * kMatrices, to += 2048) {
      const float* d = sums + (kPart * kPartM + i) / 2;
      uint32 pairs[kMatrices];
#pragma unroll
      for (int j = 0; j < kMatrices; ++j) {
        const Affine of = j % 2 ? lower : upper;
        pairs[j] = to_pair<Out>(fmaf(d[2 * j], of.scale, of.bias), fmaf(d[2 * j + 1], of.scale, of.bias));
      }
      ptx::store_matrices(to, pairs);
    }
  }

  // The same, after adding the sums of the other sharers. `shared_sums` are this thread's sums of sharer 0 of a CTA;
  // the CTAs that share a tile have the rank `peer` and those `step` after each other.
  template <int kPart>
  static __device__ __forceinline__ void stage_total(uint32 part, uint32 step, uint32 peer, const float* shared_sums,
                                                     uint32 to, Sums& sums, uint32 thread, Affine upper,
                                                     Affine lower) {
    constexpr int kTeamSums = kTileM * 64;
    if (part == kPart) {
#pragma unroll
      for (int other = 1; other < kSharers; ++other) {
        const int sharer = (kPart + other) % kSharers;
#pragma unroll
        for (int i = kPart * kPartM / 8; i < (kPart + 1) * kPartM / 8; ++i) {
          const float* from = shared_sums + sharer % kDepth * (kGroups * kTeamSums) + i * 512;
          if constexpr (kSplit == 1) add(sums, i, *reinterpret_cast<const float4*>(from));
          if constexpr (kSplit > 1) add(sums, i, ptx::ld_cluster(from, sharer / kDepth * step + peer));
        }
      }
      return stage<kPart>(to, sums, thread, upper, lower);
    }
    if constexpr (kPart + 1 < kParts)
      stage_total<kPart + 1>(part, step, peer, shared_sums, to, sums, thread, upper, lower);
  }
};

// What the product is added to, after it was rounded; null: nothing.
template <typename Out, int kPartM> struct Residual {
  const Out* rows;
  int64 stride, m, n;

  // To rows of 128 bytes as stage() writes them, for the part of out that begins at (row, col).
  __device__ __forceinline__ void add(uint32 to, uint32 row, uint32 col, uint32 thread) const {
    for (uint32 i = thread; i < kPartM * 8; i += 128) {
      const uint32 inside = i / 8, chunk = i % 8, at = to + swizzle_128(inside, chunk);
      if (row + inside >= m || col + chunk * 8 >= n) continue;
      const uint4 y = ptx::ld_shared(at), r = ptx::ld<uint4>(rows + (row + inside) * stride + col + chunk * 8);
      const auto sum = [](uint32 a, uint32 b) {
        return to_pair<Out>(low<Out>(a) + low<Out>(b), high<Out>(a) + high<Out>(b));
      };
      ptx::st_shared(at, make_uint4(sum(y.x, r.x), sum(y.y, r.y), sum(y.z, r.z), sum(y.w, r.w)));
    }
  }
};

// What clusters leave for each other in the workspace: for each warpgroup a word, which says that its sums are
// complete, and, kWordsBytes behind the first word, the sums. A workspace need not be cleared: no memory holds kReady
// by chance, and the reader clears the word. `barrier` is the named barrier of the warpgroup.
constexpr uint64 kReady = 0x9E3779B97F4A7C15u;

template <int kTileM, int kTeams, int kCluster, int kWordsBytes> class Exchange {
 public:
  using Sums = float[kTileM / 2];

  __device__ __forceinline__ Exchange(uint8* workspace, uint32 team, uint32 thread)
      : word_(reinterpret_cast<uint64*>(workspace) + blockIdx.x * kTeams + team),
        sums_(reinterpret_cast<float4*>(workspace + kWordsBytes) +
              uint64(blockIdx.x * kTeams + team) * (kTileM * 16) + thread) {}
  __device__ __forceinline__ void leave(const Sums& sums, int barrier, uint32 thread) const {
#pragma unroll
    for (int i = 0; i < kTileM / 8; ++i) __stcg(sums_ + i * 128, four(sums, i));
    __threadfence();
    ptx::barrier_sync(barrier, 128);
    if (thread == 0) ptx::st_release(word_, kReady);
  }
  // Adds the sums of the cluster `back` places before this one.
  __device__ __forceinline__ void collect(Sums& sums, uint32 back, int barrier, uint32 thread) const {
    uint64* const word = word_ - back * (kCluster * kTeams);
    const float4* from = sums_ - uint64(back * (kCluster * kTeams)) * (kTileM * 16);
    while (ptx::ld_acquire(word) != kReady) {}
#pragma unroll
    for (int i = 0; i < kTileM / 8; ++i) add(sums, i, __ldcg(from + i * 128));
    ptx::barrier_sync(barrier, 128);
    if (thread == 0) *word = 0;
  }

 private:
  uint64* word_;
  float4* sums_;
};

// ---- partials/select -------------------------------------------------------
// Select<kFirst, A, B> is the type A where kFirst is true, else B.
template <bool kFirst, typename A, typename B> struct Choice { using Type = A; };
template <typename A, typename B> struct Choice<false, A, B> { using Type = B; };
template <bool kFirst, typename A, typename B> using Select = typename Choice<kFirst, A, B>::Type;

// ---- gemm/wide_schedule ----------------------------------------------------
// The tiles of a cluster, and the part of their columns that it takes. One of three schedules says which: SplitTile,
// WholeTiles and DividedTiles.
struct Work { uint32 tile, begin, end; };  // a tile, and the steps of its columns from begin to before end

// What the schedules have in common. First, a cluster takes its share: steps from begin_ to before end_, counted over
// tiles, in descending order. Then it takes whole tiles: next_, and each time so many further as there are clusters.
//
// Config: kTileM, the rows of x of a tile; kCluster CTAs with the same ones, each with kTileN rows of the weight of its
// own, and kCommonN after these for all of them; kSplit CTAs with the same tile; kBandM.
template <class Config> class WideTiles {
 public:
  uint32 tiles_m, tiles_n, steps;

  __device__ __forceinline__ WideTiles(int64 m, int64 n, int64 k)
      : tiles_m(ceil_div(m, Config::kTileM)), tiles_n(ceil_div(n, kClusterN)),
        steps(ceil_div(k, kTileCols)) {}
  __device__ __forceinline__ bool take(Work& work) {
    if (begin_ < end_) {
      const uint32 tile = (end_ - 1) / steps, from = max(begin_, tile * steps);
      work = {tile, from - tile * steps, end_ - tile * steps};
      end_ = from;
      return true;
    }
    work = {next_, 0, steps};
    next_ += ptx::clusters();
    return work.tile < tiles_m * tiles_n;
  }
  // Whether this cluster gets the sums of a whole tile, which it writes. To be called where tiles are divided:
  // elsewhere a condition that always holds would change how NVRTC arranges the loop.
  template <class Sums, class Exchange>
  __device__ __forceinline__ bool complete(Sums&, const Work&, const Exchange&, int, uint32) const {
    return true;
  }
  // The first row of the weight in the tile that take() gives next; 0 if it gives none.
  __device__ __forceinline__ int64 peek_row() const {
    WideTiles after = *this;
    Work work;
    return after.take(work) ? after.place(work.tile).y : 0;
  }
  // The first row of x and the first row of the weight, for this CTA. Tiles are in bands of kBandM along M.
  __device__ __forceinline__ uint2 place(uint32 tile) const {
    constexpr uint32 kBandM = Config::kBandM;
    const uint32 band = tile / (kBandM * tiles_n), inside = tile % (kBandM * tiles_n);
    const uint32 high = min(kBandM, tiles_m - band * kBandM);
    const uint32 rank = kCluster == 1 ? 0 : kSplit == 1 ? ptx::cluster_rank() : ptx::cluster_rank() % kCluster;
    return {(band * kBandM + inside % high) * Config::kTileM, inside / high * kClusterN + rank * Config::kTileN};
  }

 protected:
  static constexpr int kCluster = Config::kCluster, kSplit = Config::kSplit;
  static constexpr uint32 kClusterN = Config::kTileN * kCluster + Config::kCommonN;

  // The first `divided` tiles are divided, and every cluster gets an equal share of their steps; `id` is the cluster's.
  __device__ __forceinline__ void divide(uint32 divided, uint32 id) {
    divided_steps_ = uint64(divided) * steps, next_ = divided + id;
    begin_ = share_begin(id), end_ = share_begin(id + 1);
  }
  // Returns the first step of a cluster's share, counted over all divided tiles.
  __device__ __forceinline__ uint32 share_begin(uint32 cluster) const {
    return divided_steps_ * cluster / ptx::clusters();
  }

  uint64 divided_steps_;
  uint32 next_, begin_, end_;
};

// A cluster has one tile. Those who have sums of the same elements, CTAs or warpgroups, add them up in shared memory.
template <class Config> struct SplitTile : WideTiles<Config> {
  static constexpr bool kOneTile = true;

  __device__ __forceinline__ SplitTile(int64 m, int64 n, int64 k) : WideTiles<Config>(m, n, k) {
    constexpr int kSplit = Config::kSplit;
    const uint32 id = ptx::cluster_id(), part = kSplit == 1 ? 0 : ptx::cluster_rank() / Config::kCluster;
    const uint32 steps = this->steps;
    this->begin_ = id * steps + steps * part / kSplit, this->end_ = id * steps + steps * (part + 1) / kSplit;
    this->next_  = this->tiles_m * this->tiles_n;
  }
};

// Clusters are persistent and take tiles in turn.
template <class Config> struct WholeTiles : WideTiles<Config> {
  static constexpr bool kOneTile = false;

  __device__ __forceinline__ WholeTiles(int64 m, int64 n, int64 k) : WideTiles<Config>(m, n, k) {
    this->divide(0, ptx::cluster_id());
  }
};

// Clusters are persistent. The tiles that would not fill a last wave are divided by their steps, and every cluster gets
// an equal share. Of the clusters that share a tile, all but the last leave partial sums in memory, and the last adds
// them in a fixed order. It waits for earlier clusters only, and those leave their sums before they wait themselves,
// because a cluster takes the tiles of its share in descending order.
template <class Config> struct DividedTiles : WideTiles<Config> {
  static constexpr bool kOneTile = false;

  __device__ __forceinline__ DividedTiles(int64 m, int64 n, int64 k) : WideTiles<Config>(m, n, k) {
    const uint32 tiles = this->tiles_m * this->tiles_n, id = ptx::cluster_id();
    const uint32 clusters = ptx::clusters(), rest = tiles % clusters;
    this->divide(rest == 0 ? 0 : tiles < 2 * clusters ? tiles : rest + clusters, id);
  }
  template <class Sums, class Exchange>
  __device__ __forceinline__ bool complete(Sums& sums, const Work& work, const Exchange& exchange, int barrier,
                                           uint32 thread) const {
    if (work.end < this->steps) {
      exchange.leave(sums, barrier, thread);
      return false;
    }
    const uint32 first = work.tile * this->steps;
    for (uint32 back = 1, begin = first + work.begin; begin > first; ++back) {
      exchange.collect(sums, back, barrier, thread);
      begin = this->share_begin(ptx::cluster_id() - back);
    }
    return true;
  }
};

template <bool kOneTile, bool kDivided, class Config>
using WideSchedule =
    Select<kOneTile, SplitTile<Config>, Select<kDivided, DividedTiles<Config>, WholeTiles<Config>>>;

// ---- gemm/wide_common ------------------------------------------------------
// The last groups of two CTAs have the same rows of the weight, and each the sums of every other step. Each gives the
// other those of half of the rows of x, and adds up what it keeps.
//
//   warpgroup of CTA r                                 that of the other
//     waits for empty of its own CTA                     arrives at empty here, once it has read what it took
//     writes `given`; a copy to `taken` of the other     waits for the bytes in its full, reads `taken`
template <int kTileM> struct CommonSums {
  static constexpr int    kFours = kTileM / 16;  // of a thread, as four() counts them, for half of the rows of x
  static constexpr uint32 kBytes = kFours * 128 * sizeof(float4);

  float4  given[kFours][128], taken[kFours][128];
  Barrier full, empty;

  __device__ __forceinline__ void init() {
    ptx::mbarrier_init(&full, 1);
    ptx::mbarrier_init(&empty, 1);
  }
  // `sums` of half `rank` become those of both CTAs. The parity is that of the number of exchanges before.
  __device__ __forceinline__ void exchange(float (&sums)[kTileM / 2], uint32 rank, uint32 parity, int barrier,
                                           uint32 thread) {
    ptx::mbarrier_wait(&empty, parity ^ 1);
#pragma unroll
    for (int i = 0; i < kFours; ++i) given[i][thread] = rank == 0 ? four(sums, kFours + i) : four(sums, i);
    ptx::fence_proxy_async();
    ptx::barrier_sync(barrier, 128);
    if (thread == 0) {
      ptx::mbarrier_arrive_expect_tx(&full, kBytes);
      const uint32 to = ptx::cluster_address(taken, rank ^ 1), from = ptx::shared_address(given);
      ptx::copy_shared(to, from, kBytes, ptx::cluster_address(&full, rank ^ 1));
    }
    ptx::mbarrier_wait(&full, parity);
#pragma unroll
    for (int i = 0; i < kFours; ++i) {
      const float4 other = taken[i][thread];
      if (rank == 0) add(sums, i, other);
      if (rank != 0) add(sums, kFours + i, other);
    }
    ptx::barrier_sync(barrier, 128);
    if (thread == 0) ptx::mbarrier_arrive_at(ptx::cluster_address(&empty, rank ^ 1));
  }
};
template <> struct CommonSums<0> {  // no rows are common
  __device__ __forceinline__ void init() {}
  template <class... Any> __device__ __forceinline__ void exchange(Any&&...) {}
};
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

// ---- gemm/codes ------------------------------------------------------------
// Codes and scales as the quantizers pack them become pairs of 16-bit floats, exactly: NVFP4 in fp16, times 2^-7; MXFP4
// in bf16, which has the range of its scales. The columns of a product may be in any order that is the same for both
// operands. So a word of eight codes becomes pairs of codes i and i + 4; and of the eight blocks of 16 columns of a
// step, lane t of four has block 4 (t / 2) + t % 2 in the first half step, and the block two after it in the second.
template <typename T> constexpr float kCodesUnit       = 0x1p7f;
template <>           constexpr float kCodesUnit<bf16> = 1.0f;

// As sign, last bits of the exponent and first bit of the mantissa, a code is its value times 2^-14 or 2^-126.
// attention/codes has another form in fp16, with a product in place of the shifts of `even`.
template <typename T> __device__ void unpack_codes(uint32 (&pairs)[4], uint32 word);
template <> __device__ __forceinline__ void unpack_codes<f16>(uint32 (&pairs)[4], uint32 word) {
  constexpr uint32 kSigns = 0x80808080u, kBits = 0x8E008E00u;
  const uint32 even = ptx::select_bits(kSigns, word << 4, word << 1), odd = ptx::select_bits(kSigns, word, word >> 3);
  pairs[0] = even << 8 & kBits, pairs[1] = odd << 8 & kBits, pairs[2] = even & kBits, pairs[3] = odd & kBits;
}
// Scales may be any power of two, so a product of its own makes up for 2^-126.
template <> __device__ __forceinline__ void unpack_codes<bf16>(uint32 (&pairs)[4], uint32 word) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    pairs[i] = ptx::mul_bf16x2(e2m1_pair_of<bf16>(word, i), 0x7E807E80u);
  }
}

// Two bytes of scales to a pair; the sign of E4M3 is ignored.
template <typename T> __device__ uint32 unpack_scales(uint32 two);
template <> __device__ __forceinline__ uint32 unpack_scales<f16>(uint32 two) {  // times 2^7
  return ptx::mul_f16x2(decode_e4m3x2(two & 0x7F7Fu), 0x58005800u);
}
template <> __device__ __forceinline__ uint32 unpack_scales<bf16>(uint32 two) {
  uint32 pair = 0;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32 byte = two >> 8 * i & 255;
    pair |= (byte == 0 ? 0x0040u : byte == 255 ? 0x7FC0u : byte << 7) << 16 * i;
  }
  return pair;
}

// ---- gemm/packed_weight ----------------------------------------------------
// The weight as the quantizers leave it. A tile in shared memory has 64 bytes of codes for each row, in the 64-byte
// swizzle of the copy, and then the scales of the 128 rows among which its 64 rows are, in the order of memory.
// gemm/expand, which runs before, lets this kernel begin when what lay before both is complete, the weight too.
namespace ptx {
__device__ __forceinline__ uint32 ld_shared_1(uint32 p) {
  uint32 v;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(v) : "r"(p) : "memory");
  return v;
}
}  // namespace ptx

template <typename In, Format kFormat> struct PackedWeight {
  static constexpr int kScaleTiles = kFormat == Format::kNvfp4 ? 2 : 1;  // of 128 rows by 4 columns
  static constexpr int kScaleBytes = 512;  // of such a tile
  static constexpr int kTileBytes  = kCodeBytes + kScaleTiles * kScaleBytes;

  const TensorMap& codes;
  const TensorMap& scales;  // a row has 128 rows of scales, as words of 8 bytes

  // Starts the copies of a step. Beyond the weight, codes are zero.
  template <int kGroups>
  __device__ __forceinline__ void load(uint8 (&to)[kGroups][kTileBytes], uint32 row, uint32 step, uint32,
                                       Barrier* full) const {
#pragma unroll
    for (int i = 0; i < kGroups; ++i, row += kTileRows) {
      ptx::tma_load(to[i], codes, step * (kTileCols / 2), row, full);
      ptx::tma_load(to[i] + kCodeBytes, scales, step * (kScaleTiles * kScaleBytes / 8), row / 128, full);
    }
  }
  __device__ __forceinline__ Affine affine(int64, float alpha) const {
    return {alpha * (kCodesUnit<In> * kCodesUnit<In>), 0.0f};
  }

  // Half `half` of the columns of a tile; each warp has 16 of its rows, and each lane a block of rows g and g + 8.
  static __device__ __forceinline__ void decode(Fragments& a, uint32 tile, uint32 half, const Place& place) {
    const uint32 g = place.lane / 4, t = place.lane % 4;
    const uint32 codes  = tile + place.warp * 1024 + g * 64 + ((t / 2 * 2 + half) ^ g / 2) * 16 + t % 2 * 8;
    const uint32 column = kFormat == Format::kNvfp4 ? t / 2 * kScaleBytes + t % 2 + half * 2 : t / 2 * 2 + half;
    const uint32 scales = tile + kCodeBytes + (place.warp % 2 * 16 + g) * 16 +
                          (place.row / kTileRows % 2 * 2 + place.warp / 2) * 4 + column;
    const uint2 upper = ptx::ld_shared_8(codes), lower = ptx::ld_shared_8(codes + 8 * 64);
    uint32 two = ptx::ld_shared_1(scales) | ptx::ld_shared_1(scales + 8 * 16) << 8;
    if (int32(t / 2 * 64 + t % 2 * 16 + half * 32) >= place.columns) two = 0;  // beyond the last column it may be NaN
    const uint32 of_both = unpack_scales<In>(two);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint32 u[4], l[4];
      unpack_codes<In>(u, i == 0 ? upper.x : upper.y);
      unpack_codes<In>(l, i == 0 ? lower.x : lower.y);
#pragma unroll
      for (int j = 0; j < 4; j += 2) {
        uint32 first[2] = {u[j], u[j + 1]}, second[2] = {l[j], l[j + 1]};
        mul_pairs<In>(first, second, of_both);
        uint32 (&to)[4] = a[2 * i + j / 2];
        to[0] = first[0], to[1] = second[0], to[2] = first[1], to[3] = second[1];
      }
    }
  }
};

// ---- spec ------------------------------------------------------------------
using In  = f16;
using Out = bf16;
constexpr Format kFormat   = Format::kNvfp4;
constexpr int kTileM       = 32;
constexpr int kGroups      = 1;  // of 64 rows of the weight
constexpr int kDepth       = 2;  // warpgroups of a group
constexpr int kCluster     = 1;
constexpr int kSplit       = 2;
constexpr bool kCommon     = false;
constexpr bool kDivided    = false;
constexpr int kSlots       = 24;
constexpr int kWeightSlots = 13;
constexpr bool kGated      = false;  // rows of the weight are gates and ups
constexpr int kBandM       = 4;  // tiles along M that the weight is read for at a time
constexpr bool kWhole      = false;  // a slot has a whole step
constexpr int kMinCtas     = 1;  // that an SM must hold at once; bounds the registers

constexpr int kTeams     = kGroups * kDepth;  // consumer warpgroups
constexpr int kConsumers = kTeams * 128;      // threads
constexpr int kThreads   = kConsumers + 128;
// A thread starts with 65536 / kMinCtas / kThreads registers, in eights. Producers need few.
constexpr int kProducerRegisters = kTeams == 4 ? 32 : 40;
constexpr int kConsumerRegisters =
    (65536 / kMinCtas / kThreads / 8 * 8 * kThreads - 128 * kProducerRegisters) / kConsumers / 8 * 8;
constexpr int kSharers = kSplit * kDepth;     // warpgroups with sums of the same elements
constexpr int kParts   = 4;       // of the rows of x, after the sharers have added up
constexpr int kPartM   = kTileM / kParts;

using Weight = PackedWeight<In, kFormat>;
using Results = WideResults<Out, kTileM, kParts, kGroups, kDepth, kSplit, kGated>;

// ---- shared memory ---------------------------------------------------------
constexpr int kTileN     = (kGroups - kCommon) * kTileRows;  // of a CTA's own
constexpr int kHalf      = kTileCols / 2;
constexpr int kCopyM     = kTileM / kCluster;  // rows of x that a CTA copies
constexpr int kHalves    = kWhole ? 2 : 1;  // half steps of x in a slot
constexpr int kWeightRing = kWhole ? 1 : kWeightSlots;  // with kWhole, the weight is in the slots of x
constexpr int kTileBytes = Weight::kTileBytes;
constexpr int kTeamSums  = kTileRows * kTileM * 4;   // bytes, of a warpgroup

using Part = uint8[kPartM * kTileRows * 2];  // of the results of a warpgroup

template <bool kOwn> struct ResultParts {
  Part parts[kTeams][kParts];
  __device__ __forceinline__ Part* of(uint32 team) { return parts[team]; }
};
template <> struct ResultParts<false> {  // they take the place of sums
  __device__ __forceinline__ Part* of(uint32) { return nullptr; }
};

struct alignas(1024) Shared : ResultParts<kSharers == 1> {  // the 128-byte swizzle repeats every 1024 bytes
  uint8   x[kSlots][kHalves * kTileM * kHalf * 2];
  uint8   weight[kWeightSlots][kGroups][kTileBytes];
  Barrier full[kSlots], empty[kSlots];
  Barrier weight_full[kWeightRing], weight_empty[kWeightRing];
  alignas(16) CommonSums<kCommon ? kTileM : 0> common;
};
static_assert(sizeof(Shared) == 165888, "the launch counts on it");
static_assert(kSlots % (kCommon ? 2 : kDepth) == 0, "a warpgroup has slots of its own");
static_assert(kSharers == 1 || (!kDivided && kTeams * kTeamSums <= sizeof(Shared::x)), "room for sums");

enum NamedBarrier { kTeamBarrier = 1, kConsumersBarrier = 5, kStartBarrier = 6 };  // the first: one of each warpgroup

// ---- producers -------------------------------------------------------------
struct Config {
  static constexpr int kTileM = ::kTileM, kTileN = ::kTileN, kCluster = ::kCluster, kSplit = ::kSplit;
  static constexpr int kBandM = ::kBandM, kCommonN = kCommon * kTileRows;
};
using Schedule = WideSchedule<(kSharers > 1), kDivided, Config>;

__device__ __forceinline__ void produce_x(Shared& shared, Schedule schedule, const TensorMap& x) {
  const uint32 rank = kCluster == 1 ? 0 : ptx::cluster_rank(), place = kSplit == 1 ? rank : rank % kCluster;
  Ring<kSlots> ring;
  for (Work work; schedule.take(work);) {
    const uint32 row = schedule.place(work.tile).x + place * kCopyM;
    for (uint32 half = 2 * work.begin; half < 2 * work.end; ring.advance()) {
      Barrier* full = &shared.full[ring.slot];
      ptx::mbarrier_wait(&shared.empty[ring.slot], ring.parity ^ 1);
      ptx::mbarrier_arrive_expect_tx(full, sizeof(shared.x[0]));
#pragma unroll
      for (int i = 0; i < kHalves; ++i, ++half) {
        uint8* to = shared.x[ring.slot] + (i * kTileM + place * kCopyM) * (kHalf * 2);
        if constexpr (kCluster == 1) ptx::tma_load(to, x, half * kHalf, row, full);
        if constexpr (kCluster > 1)
          ptx::tma_multicast(to, x, half * kHalf, row, full, ((1 << kCluster) - 1) << (rank - place));
      }
    }
  }
}
__device__ __forceinline__ void produce_weight(Shared& shared, Schedule schedule, const Weight& weight) {
  Ring<kWeightSlots> ring;
  for (Work work; schedule.take(work);) {
    const uint32 row = schedule.place(work.tile).y;
    for (uint32 step = work.begin; step < work.end; ++step, ring.advance()) {
      Barrier* full = (kWhole ? shared.full : shared.weight_full) + ring.slot;
      ptx::mbarrier_wait((kWhole ? shared.empty : shared.weight_empty) + ring.slot, ring.parity ^ 1);
      const uint32 rank = ptx::cluster_rank(), common = row + (kCluster - rank) * kTileN;
      auto& own  = reinterpret_cast<uint8(&)[kGroups - kCommon][kTileBytes]>(shared.weight[ring.slot]);
      auto& last = reinterpret_cast<uint8(&)[1][kTileBytes]>(shared.weight[ring.slot][kGroups - 1]);
      const bool takes_turn = kCommon && ring.slot % kCluster == rank;
      ptx::mbarrier_arrive_expect_tx(full, sizeof(own) + (takes_turn ? sizeof(last) : 0));
      weight.load(own, row, step, schedule.steps, full);
      if (takes_turn) weight.load(last, common, step, schedule.steps, full);
    }
  }
}

// ---- consumers -------------------------------------------------------------
// The products of a warpgroup for a tile: of those with the same rows, each takes half steps in turn.
template <bool kSteps, class S> struct Turns {
  Consumer<S, Weight, kTileM, kDepth, kCluster> consumer;
  uint32 half;

  __device__ __forceinline__ Turns(S& shared, uint32 group, const Place& place, uint32, uint32 half, uint32, bool)
      : consumer{shared, group, half, place, {}, {}}, half(half) {}
  __device__ __forceinline__ void accumulate(Results::Sums& sums, const Work& work, uint32 col, int64 k) {
    const uint32 steps = work.end - work.begin, skipped = work.begin + (kDepth == 4 ? half / 2 : 0);
    consumer.place.row = col, consumer.place.columns = int32(k) - int32(skipped) * kTileCols;
    consumer.accumulate(sums, kDepth == 4 ? (2 * steps + 3 - half) / 4 : steps * (2 / kDepth));
  }
};
template <class S> struct Turns<true, S> {  // whole steps
  StepConsumer<S, Weight, kTileM, kDepth, kCluster> consumer;
  uint32 half, rank;
  bool   is_common;
  uint32 passed = 0;  // steps before the present tile

  __device__ __forceinline__ Turns(S& shared, uint32 group, const Place& place, uint32 first, uint32 half, uint32 rank,
                                   bool is_common)
      : consumer{shared, group, place, ptx::cluster_address(shared.empty, first + place.lane % kCluster),
                 is_common ? kCluster : kDepth, is_common ? rank : half},
        half(half), rank(rank), is_common(is_common) {}
  __device__ __forceinline__ void accumulate(Results::Sums& sums, const Work& work, uint32, int64) {
    const uint32 steps = work.end - work.begin;
    consumer.accumulate(sums, is_common ? (steps + (passed % 2 == rank)) / 2 : (steps + kDepth - 1 - half) / kDepth);
    passed += steps;
  }
};

// ---- kernel ----------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kThreads, kMinCtas) gemm_wide_fp4(
    const __grid_constant__ TensorMap x,              // [m, round_up(k, 128)], boxes [kCopyM, kHalf]
    const __grid_constant__ TensorMap weight,         // [n, k / 2] bytes, boxes [64, 64]
    const __grid_constant__ TensorMap weight_scales,  // [n / 128, 64 words for each 4 columns of scales]
    const float* __restrict__ alpha,                  // [1]; null: 1
    uint8* __restrict__ workspace,                    // of divided tiles, else null
    const __grid_constant__ TensorMap out,            // [m, n], boxes [kPartM, 64]
    int64 m,
    int64 n,                                          // a multiple of 8
    int64 k                                           // a multiple of 32
) {
  extern __shared__ uint8 shared_bytes[];
  Shared& shared = *reinterpret_cast<Shared*>(shared_bytes);
  const uint32 number = __shfl_sync(~0u, threadIdx.x / kWarp, 0);
  const uint32 team = number / 4, warp = number % 4, lane = threadIdx.x % kWarp;

  const Weight given{weight, weight_scales};
  const Residual<Out, kPartM> added{nullptr, 0, m, n};

  // Each producer prepares its barriers and starts; consumers wait for both. With kWhole, producers have the same ones.
  const bool produces = team == kTeams;
  if (produces && warp == 0 && ptx::elect_one()) {
    ptx::prefetch_tensor_map(x);
    ptx::prefetch_tensor_map(out);
    for (int s = 0; s < kSlots; ++s) {
      ptx::mbarrier_init(&shared.full[s], kHalves);  // arrivals of one or both producers
      ptx::mbarrier_init(&shared.empty[s], 4 * ((kGroups - kCommon) * kCluster + kCommon));
    }
    shared.common.init();
    ptx::fence_mbarrier_init();
  }
  if (!kWhole && produces && warp == 1 && ptx::elect_one()) {
    for (int s = 0; s < kWeightSlots; ++s) {
      ptx::mbarrier_init(&shared.weight_full[s], 1);
      ptx::mbarrier_init(&shared.weight_empty[s], 4 * kGroups * min(kDepth, 2));
    }
    ptx::fence_mbarrier_init();
  }
  __syncwarp();
  if constexpr (kCluster > 1) ptx::cluster_sync();
  ptx::griddep_launch();

  if (produces) {
    if constexpr (kCluster == 1 && !kWhole) ptx::barrier_arrive(kStartBarrier, kThreads);
    ptx::registers_fewer<kProducerRegisters>();  // consumers wait for these before they come to the barrier
    if constexpr (kCluster == 1 && kWhole) ptx::barrier_sync(kStartBarrier, kThreads);
    if (warp == 0) {
      ptx::griddep_wait();
      if (ptx::elect_one()) produce_x(shared, Schedule(m, n, k), x);
    } else if (warp == 1) {  // the weight is not what the previous kernel writes
      if (ptx::elect_one()) produce_weight(shared, Schedule(m, n, k), given);
    }
  } else {
    ptx::registers_more<kConsumerRegisters>();
    if constexpr (kCluster == 1) ptx::barrier_sync(kStartBarrier, kThreads);
    ptx::griddep_wait();
    const uint32 group = kDepth == 1 ? team : team % kGroups, half = kDepth == 1 ? 0 : team / kGroups;
    const uint32 rank = ptx::cluster_rank(), peer = kSplit == 1 ? rank : rank % kCluster;
    const uint32 part   = kSharers == 1 ? 0 : (kSplit == 1 ? 0 : rank / kCluster) * kDepth + half;
    const float  factor = alpha != nullptr ? ptx::ld_f32(alpha) : 1.0f;
    Schedule schedule(m, n, k);
    const bool is_common = kCommon && group == kGroups - 1;
    Turns<kWhole, Shared> turns{shared, group, {warp, lane}, rank - peer, half, rank, is_common};
    uint32 tiles = 0;  // before the present one

    for (Work work; schedule.take(work);) {
      const uint2  at  = schedule.place(work.tile);
      const uint32 col = is_common ? at.y + (kCluster - rank) * kTileN : at.y + group * kTileRows;  // of out
      const int64  row = col + warp * 16 + lane / 4;
      const Affine upper = given.affine(row, factor), lower = given.affine(row + 8, factor);
      Results::Sums sums;
      turns.accumulate(sums, work, col, k);
      const uint32 thread = ptx::thread_index() % 128;
      const auto store = [&](uint8* rows, uint32 number) {  // of a part, once all have written theirs
        if (!kGated && added.rows != nullptr) {
          ptx::barrier_sync(kTeamBarrier + team, 128);
          added.add(ptx::shared_address(rows), at.x + number * kPartM, col, thread);
        }
        ptx::fence_proxy_async();
        ptx::barrier_sync(kTeamBarrier + team, 128);
        if (thread != 0 || col >= n) return;
        ptx::tma_store(out, kGated ? col / 2 : col, at.x + number * kPartM, ptx::shared_address(rows));
        ptx::bulk_commit();
      };
      if constexpr (Schedule::kOneTile) {
        float* const shared_sums = reinterpret_cast<float*>(shared.x) + group * (kTeamSums / 4) + thread * 4;
        ptx::barrier_sync(kConsumersBarrier, kConsumers);  // x is no longer read
#pragma unroll
        for (int i = 0; i < kTileM / 8; ++i) {
          if (i / (kPartM / 8) == part) continue;  // it adds these up itself
          *reinterpret_cast<float4*>(shared_sums + half * (kGroups * kTeamSums / 4) + i * 512) = four(sums, i);
        }
        if constexpr (kSplit == 1) ptx::barrier_sync(kConsumersBarrier, kConsumers);
        if constexpr (kSplit > 1) ptx::cluster_sync();
        uint8* const rows = shared.x[0] + team * kTeamSums + part * (kPartM * kTileRows * 4);  // room for these
        Results::stage_total<0>(part, kCluster, peer, shared_sums, ptx::shared_address(rows), sums, thread, upper,
                                lower);
        if (part < kParts) store(rows, part);
        break;
      } else {
        const Exchange<kTileM, kTeams, kCluster, 16384> exchange(workspace, team, thread);
        if (kDivided && !schedule.complete(sums, work, exchange, kTeamBarrier + team, thread)) continue;
        Part* const rows = shared.of(team);
        if (thread == 0) ptx::bulk_wait_read<0>();
        ptx::barrier_sync(kTeamBarrier + team, 128);
        if (is_common) {
          shared.common.exchange(sums, rank, tiles++ % 2, kTeamBarrier + team, thread);
          if (rank == 0) Results::stage<0>(ptx::shared_address(rows[0]), sums, thread, upper, lower);
          if (rank != 0) Results::stage<1>(ptx::shared_address(rows[0]), sums, thread, upper, lower);
          store(rows[0], rank);
          continue;
        }
        Results::stage<0>(ptx::shared_address(rows[0]), sums, thread, upper, lower);
        store(rows[0], 0);
        Results::stage<1>(ptx::shared_address(rows[1]), sums, thread, upper, lower);
        store(rows[1], 1);
      }
    }
    if (ptx::thread_index() % 128 == 0) ptx::bulk_wait_read<0>();
    if constexpr (kSplit > 1) ptx::cluster_sync();  // others may still read this CTA's sums
  }
  if constexpr (kCluster > 1) ptx::cluster_sync();  // others may still write to this CTA's shared memory
}

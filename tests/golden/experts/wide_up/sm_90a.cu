// experts_wide_up, generated from templates/experts/wide_up.cu.j2
// spec: {"cluster":1,"dtype":"bf16","format":"nvfp4","fp8":true,"groups":4,"product":"gated","step_m":8,"tile_m":16}
//
// h = activation(x [tokens * slots, k] times the transposes of FP4 weights [n, k] of experts), for many rows of each
// expert. The rows of x and of h are in the order of the list of items, which experts/route made; experts/gather wrote
// those of x.
// With kFp8, experts/gather is experts/quantize, x is in E4M3, and the weights become so.
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

// ---- partials/fence_proxy --------------------------------------------------
namespace ptx {
// Makes this thread's writes to shared memory visible to the copy engine and to the tensor cores.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
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

// ---- partials/ring ---------------------------------------------------------
// The slot of a ring that a thread is at, and the parity of the current phase of that slot's barrier.
template <int kSize> struct Ring {
  uint32 slot = 0, parity = 0;
  __device__ __forceinline__ void advance() {
    if (++slot == kSize) slot = 0, parity ^= 1;
  }
};

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
__device__ __forceinline__ void wgmma(float (&d)[4], const uint32 (&a)[4], uint32 b, bool add) {
  asm volatile("{\n"
               "  .reg .pred add;\n"
               "  .reg .b64 b;\n"
               "  mov.b64 b, {%8, 0x40000040};\n"
               "  setp.ne.b32 add, %9, 0;\n"
               "  wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {"
               "%0, %1, %2, %3"
               "}, {%4, %5, %6, %7}, b, add, 1, 1;\n"
               "}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(int32(add)));
}
__device__ __forceinline__ void wgmma(float (&d)[8], const uint32 (&a)[4], uint32 b, bool add) {
  asm volatile("{\n"
               "  .reg .pred add;\n"
               "  .reg .b64 b;\n"
               "  mov.b64 b, {%12, 0x40000040};\n"
               "  setp.ne.b32 add, %13, 0;\n"
               "  wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3 {"
               "%0, %1, %2, %3, %4, %5, %6, %7"
               "}, {%8, %9, %10, %11}, b, add, 1, 1;\n"
               "}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(int32(add)));
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

// ---- gemm/wide_place -------------------------------------------------------
// What a consumer holds of its tile, and where its 64 rows of the weight are.
using Fragments = uint32[4][4];  // 64 rows by 64 columns of the weight, in a warpgroup

struct Affine { float scale, bias; };  // of a row of the weight

// A consumer: the first row of its warpgroup in the weight, and the columns from its current step on.
struct Place {
  uint32 warp, lane, row;
  int32  columns;
};

// ---- gemm/prepared_weight --------------------------------------------------
// The weight in tiles that lie in memory as decode_weight() takes them. With kOnce, L2 need not keep them.
template <typename In, typename Out, Format kFormat, bool kOnce = false> struct PreparedWeight {
  static constexpr int kBlockScales = (kFormat == Format::kNvfp4 ? 4 : 2) * 32;  // bytes, of 16 rows
  static constexpr int kTileBytes   = kCodeBytes + kBlocks * kBlockScales;

  const uint8* tiles;
  const float* row_scale;
  const Out*   bias;
  int64        n;

  // Starts the copies of a step. Beyond the last tile of the weight, that tile again.
  template <int kGroups>
  __device__ __forceinline__ void load(uint8 (&to)[kGroups][kTileBytes], uint32 row, uint32 step, uint32 steps,
                                       Barrier* full) const {
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      const uint64 from = uint64(min(row / kTileRows + i, uint32(ceil_div(n, kTileRows)) - 1)) * steps + step;
      if constexpr (kOnce) ptx::bulk_load_once(to[i], tiles + from * kTileBytes, kTileBytes, full);
      if constexpr (!kOnce) ptx::bulk_load(to[i], tiles + from * kTileBytes, kTileBytes, full);
    }
  }
  __device__ __forceinline__ Affine affine(int64 row, float alpha) const {
    Affine of{alpha * kWeightUnit, 0.0f};
    if (row >= n) return of;
    if constexpr (kFormat == Format::kMxfp4) of.scale *= ptx::ld_f32(row_scale + row);
    if (bias != nullptr) of.bias = low<Out>(ptx::ld_16(bias + row));
    return of;
  }
  struct Codes { uint4 codes; uint2 scales; };  // of half the columns of a tile; each warp has 16 of its rows
  static __device__ __forceinline__ Codes load(uint32 tile, uint32 half, const Place& place) {
    Codes of;
    of.codes = ptx::ld_shared(tile + (2 * place.warp + half) * (kCodeBytes / 8) + place.lane * 16);
    const uint32 from = tile + kCodeBytes + place.warp * kBlockScales + place.lane / 4 * (kBlockScales / 8)
                        + half * (kBlockScales / 16);
    if constexpr (kFormat == Format::kNvfp4) {
      of.scales = ptx::ld_shared_8(from);
    } else {
      of.scales.x = ptx::ld_shared_4(from);
    }
    return of;
  }
  static __device__ __forceinline__ void decode(Fragments& a, const Codes& of) {
    constexpr bool kSmall = kFormat == Format::kNvfp4;  // a block is a product's columns, else half of them
    const uint32 later = kSmall ? of.scales.y : of.scales.x;
    decode_weight<In>(a[0], of.codes.x, decode_scales<In>(of.scales.x, false));
    decode_weight<In>(a[1], of.codes.y, decode_scales<In>(of.scales.x, kSmall));
    decode_weight<In>(a[2], of.codes.z, decode_scales<In>(later, !kSmall));
    decode_weight<In>(a[3], of.codes.w, decode_scales<In>(later, true));
  }
  static __device__ __forceinline__ void decode(Fragments& a, uint32 tile, uint32 half, const Place& place) {
    decode(a, load(tile, half, place));
  }
};

// ---- gemm/fp8_weight -------------------------------------------------------
// A prepared weight becomes E4M3, relative to the scale of its row, a power of two.
//
// In bf16, code times scale is exact. It is made times 2^-120, so that the last four bits of its exponent are those of
// E4M3, and what is too small for a normal E4M3 is too small for a normal bf16. Then E4M3 is the sign and seven of the
// next eight bits: the rest is cut off. A scale has four bits of mantissa, a code two, the product up to five, and E4M3
// has four: so that cutting off rounds to nearest, ties to even, a scale gets 6 / 16 of its last bit on top. Of 8 to 15
// eighths times 1 or 1.5, exact results do not reach the next E4M3 with that, and those more than half way do.
template <typename Out, Format kFormat> struct Fp8Weight : PreparedWeight<bf16, Out, kFormat> {
  // Of rows `row` and eight below; zeros below the weight.
  __device__ __forceinline__ float2 scales(int64 row) const {
    return make_float2(row < this->n ? ptx::ld_f32(this->row_scale + row) : 0.0f,
                       row + 8 < this->n ? ptx::ld_f32(this->row_scale + row + 8) : 0.0f);
  }
  __device__ __forceinline__ Affine affine(int64 row, float scale) const {
    const bool has_bias = this->bias != nullptr && row < this->n;
    return {scale, has_bias ? low<Out>(ptx::ld_16(this->bias + row)) : 0.0f};
  }
};

// What turns a pair of scale bytes, of two rows with these scales, into bf16. A byte has a bias of 21; bf16 has one of
// 127, of which 120 are to be taken back where codes are times 2^-126. MXFP4's bytes are relative to their row.
template <Format kFormat> __device__ __forceinline__ uint32 exponent_of(float row_scale) {
  constexpr uint32 kBias = 127 - 21 + 6;
  const uint32 shift = kFormat == Format::kMxfp4 ? 2 : (__float_as_uint(row_scale) >> 23) - 127;
  return (kBias - shift) << 7 & 0x7F80u | 6;
}

// Two pairs of such products become four bytes.
__device__ __forceinline__ uint32 to_e4m3(uint32 first, uint32 second) {
  return __byte_perm(ptx::select_bits(kPairSigns, first, first << 4),
                     ptx::select_bits(kPairSigns, second, second << 4), 0x7531);
}

// Half of a step of the columns, as it lies in shared memory: for each 16 columns a word of the lane that has the first
// of a pair of neighbours in the order of bf16, one of the next lane, and scales.
template <Format kFormat> struct RawHalf {
  static constexpr int kBlockScales = PreparedWeight<bf16, bf16, kFormat>::kBlockScales;
  uint32 first[4], second[4], scales[2];

  __device__ __forceinline__ void load(uint32 tile, uint32 half, uint32 warp, uint32 lane) {
    const uint32 codes = tile + (2 * warp + half) * (kCodeBytes / 8) + lane / 4 * 64 + lane % 2 * 32;
    const uint4  a = ptx::ld_shared(codes), b = ptx::ld_shared(codes + 16);
    first[0] = a.x, first[1] = a.y, first[2] = a.z, first[3] = a.w;
    second[0] = b.x, second[1] = b.y, second[2] = b.z, second[3] = b.w;
    const uint32 from =
        tile + kCodeBytes + warp * kBlockScales + lane / 4 * (kBlockScales / 8) + half * (kBlockScales / 16);
    if constexpr (kFormat == Format::kNvfp4) {
      const uint2 v = ptx::ld_shared_8(from);
      scales[0] = v.x, scales[1] = v.y;
    } else {
      scales[0] = ptx::ld_shared_4(from);
    }
  }
  // Columns 16 i to 16 i + 15 become columns 4 t to 4 t + 3 of rows g and g + 8, for the lane 4 g + t. Lanes with a t
  // of 0 and 1 have pairs 0 and 1 of two words, the others pairs 2 and 3, which begin eight columns later.
  __device__ __forceinline__ void decode(uint32& upper, uint32& lower, int i, uint32 exponents, uint32 lane) const {
    const bool   is_late = lane % 4 >= 2;
    const uint32 turn = is_late ? 6 : 0, factor = is_late ? 16 : 64, back = is_late ? 4 : 32;
    const uint32 a = first[i], b = second[i];
    uint32 u[2] = {__funnelshift_r(a, a, turn) & kPairCodes, __funnelshift_r(b, b, turn) & kPairCodes};
    uint32 l[2] = {(a * factor ^ shifted(a, back)) & kPairCodes, (b * factor ^ shifted(b, back)) & kPairCodes};
    const bool   is_second = kFormat == Format::kNvfp4 ? i % 2 == 1 : i >= 2;
    const uint32 word  = scales[kFormat == Format::kNvfp4 ? i / 2 : 0];
    const uint32 bytes = (is_second ? __byte_perm(word, 0, 0x2301) : word) & 0x0FF00FF0u;
    mul_pairs<bf16>(u, l, bytes + exponents);
    upper = to_e4m3(u[0], u[1]), lower = to_e4m3(l[0], l[1]);
  }

 private:
  // Zero for a shift by 32.
  static __device__ __forceinline__ uint32 shifted(uint32 v, uint32 right) {
    uint32 d;
    asm("shr.u32 %0, %1, %2;" : "=r"(d) : "r"(v), "r"(right));
    return d;
  }
};

// ---- experts/wide_config ---------------------------------------------------
using In = bf16;
constexpr Format kFormat = Format::kNvfp4;
constexpr int kTileM     = 16;  // the most rows of an item
constexpr int kStepM     = 8;  // products have a multiple of as many rows
constexpr int kBoxM      = 8;  // and copies of as many
constexpr int kGroups    = 4;  // consumer warpgroups, of 64 rows of the weight
constexpr int kCluster   = 1;  // CTAs with the same rows of x
constexpr int kStages    = 5;
constexpr int kTileBytes = 4608;
constexpr bool kFp8      = true;  // products are of E4M3

constexpr int kConsumers = kGroups * 128;  // threads
constexpr int kThreads   = kConsumers + 128;
// A thread starts with 65536 / kThreads registers, in eights. Producers need few.
constexpr int kProducerRegisters = 32;
constexpr int kConsumerRegisters =
    (65536 / kThreads / 8 * 8 * kThreads - 128 * kProducerRegisters) / kConsumers / 8 * 8;

constexpr int kTileN       = kGroups * kTileRows;
constexpr int kHalf        = kFp8 ? kTileCols : kTileCols / 2;  // columns of half of a step
constexpr int kHalfBytes   = 128;  // of a row of x
constexpr int kStepTiles   = 2 * kHalf / kTileCols;  // of the weight, side by side
constexpr int kSums        = kTileM / 2;  // of a thread
constexpr int kStagedRows  = 16;  // of results, which a warpgroup writes at a time
constexpr int kStagedBytes = 32 * 2;  // of a row

struct alignas(1024) Stage {  // the 128-byte swizzle repeats every 1024 bytes
  uint8 x[2][kTileM * kHalfBytes];
  uint8 weight[kGroups][kStepTiles * kTileBytes];
};
struct Shared {
  Stage   stages[kStages];
  uint8   staged[kGroups][kStagedRows * kStagedBytes];
  float   scale[kGroups][kTileRows], bias[kGroups][kTileRows];  // of the rows of the weight
  int32   of_rows[kGroups][kFp8 ? 2 : 1][kTileM];  // of the rows of x: assignments, and bits of scales
  Barrier full[kStages], empty[kStages];
};
static_assert(sizeof(Shared) == 211968, "the launch counts on it");
static_assert(kTileM % kStepM == 0 && kTileM % kBoxM == 0, "whole products and copies");

enum NamedBarrier { kTeamBarrier = 1 };  // and the next ones: one of each warpgroup

using Sums = float[kSums];

// ---- experts/wide_mainloop -------------------------------------------------
// Products of one thread of a consumer warpgroup, which has 64 rows of the weight. Fragments are those of half a step.
constexpr int kBlockScales = (kFormat == Format::kNvfp4 ? 4 : 2) * 32;  // bytes, of 16 rows
static_assert(kTileBytes == kCodeBytes + kBlocks * kBlockScales, "the launch counts on it");

// What turns scale bytes into the factors of products that become E4M3: rows of a weight have no scale of their own.
constexpr float kE4m3Unit = kFormat == Format::kNvfp4 ? 8.0f : 4.0f;

// A lane's codes and scales of 64 columns.
struct Packed {
  uint4 codes;
  uint2 scales;

  // To fragments i and i + 1 of E4M3, of 32 columns each. The columns of a word follow each other there, those of row g
  // as those of row g + 8: experts/quantize brings columns of x into this order.
  __device__ __forceinline__ void decode_e4m3(Fragments& a, int i) const {
    constexpr bool kNvfp4 = kFormat == Format::kNvfp4;
    decode_e4m3(a[i][0], a[i][1], codes.x, scales.x, false);
    decode_e4m3(a[i][2], a[i][3], codes.y, scales.x, kNvfp4);
    decode_e4m3(a[i + 1][0], a[i + 1][1], codes.z, kNvfp4 ? scales.y : scales.x, !kNvfp4);
    decode_e4m3(a[i + 1][2], a[i + 1][3], codes.w, kNvfp4 ? scales.y : scales.x, true);
  }
  static __device__ __forceinline__ void decode_e4m3(uint32& upper, uint32& lower, uint32 word, uint32 bytes,
                                                     bool second) {
    constexpr uint32 kExponents = 0x10001u;
    const uint32 pair = (second ? __byte_perm(bytes, 0, 0x2301) : bytes) & 0x0FF00FF0u;
    uint32 pairs[4];
    decode_codes<bf16>(pairs, word);
    uint32 u[2] = {pairs[0], pairs[2]}, l[2] = {pairs[1], pairs[3]};
    mul_pairs<bf16>(u, l, pair + kExponents * exponent_of<kFormat>(kE4m3Unit));
    upper = to_e4m3(u[0], u[1]), lower = to_e4m3(l[0], l[1]);
  }
  __device__ __forceinline__ void decode(Fragments& a) const {
    if constexpr (kFormat == Format::kNvfp4) {
      decode_weight<In>(a[0], codes.x, decode_scales<In>(scales.x, false));
      decode_weight<In>(a[1], codes.y, decode_scales<In>(scales.x, true));
      decode_weight<In>(a[2], codes.z, decode_scales<In>(scales.y, false));
      decode_weight<In>(a[3], codes.w, decode_scales<In>(scales.y, true));
    } else {
      const uint32 first = decode_scales<In>(scales.x, false), second = decode_scales<In>(scales.x, true);
      decode_weight<In>(a[0], codes.x, first);
      decode_weight<In>(a[1], codes.y, first);
      decode_weight<In>(a[2], codes.z, second);
      decode_weight<In>(a[3], codes.w, second);
    }
  }
};

class Consumer {
 public:
  __device__ __forceinline__ Consumer(Shared& shared, uint32 team, uint32 warp, uint32 lane)
      : shared_(shared), codes_(ptx::shared_address(shared.stages[0].weight[team]) + warp * (kCodeBytes / kBlocks)
                                + lane * 16),
        scales_(ptx::shared_address(shared.stages[0].weight[team]) + kCodeBytes + warp * kBlockScales
                + lane / 4 * (kBlockScales / 8)),
        x_(ptx::wgmma_tile(ptx::shared_address(shared.stages[0].x[0]))),
        empty_(ptx::cluster_address(shared.empty, lane % kCluster)), is_speaker_(lane < kCluster) {
    asm volatile("" : "+r"(codes_), "+r"(scales_));  // computed once, not in every step
  }

  // Waits until the step that is `behind` steps behind the next one has arrived, if the tile has as many.
  __device__ __forceinline__ void wait_behind(uint32 behind, uint32 steps) const {
    if (behind == 0 || behind >= steps) return;
    const uint32 later = ring_.slot + behind;
    ptx::mbarrier_wait(&shared_.full[later % kStages], ring_.parity ^ later / kStages);
  }

  // Leaves `steps` steps to the other warpgroups.
  __device__ __forceinline__ void skip(uint32 steps) {
    for (uint32 step = 0; step < steps; ++step) {
      ptx::mbarrier_wait(&shared_.full[ring_.slot], ring_.parity);
      free(advance());
    }
  }
  // The products of a tile with `rows` rows of x, in as many halves of a step. Two sets of fragments: while the tensor
  // cores read one, the other is filled.
  __device__ __forceinline__ void accumulate(Sums& sums, uint32 rows, uint32 halves) {
    Fragments a, b;
    uint32 before = 0;  // the barrier that frees the stage of the last product
#pragma unroll 1
    for (uint32 half = 0; half + 1 < halves; half += 2) {
      const uint32 x = arrived();
      decode(a, 0);
      multiply(sums, a, x, half > 0, rows);
      ptx::wgmma_wait<1>();  // b is free, and so is its stage
      if (half > 0) free(before);
      decode(b, 1);
      multiply(sums, b, x + kTileM * kHalfBytes / 16, true, rows);
      before = advance();
      ptx::wgmma_wait<1>();  // a is free
    }
    if (halves % 2 == 1) {
      const uint32 x = arrived();
      decode(a, 0);
      multiply(sums, a, x, halves > 1, rows);
      ptx::wgmma_wait<0>();
      if (halves > 1) free(before);
      before = advance();
    }
    ptx::wgmma_wait<0>();
    free(before);
#pragma unroll
    for (int i = 0; i < kSums; ++i) asm volatile("" : "+f"(sums[i])::"memory");  // not read before
  }

 private:
  // The half descriptor of x of the next stage, once that has arrived.
  __device__ __forceinline__ uint32 arrived() const {
    ptx::mbarrier_wait(&shared_.full[ring_.slot], ring_.parity);
    return x_ + ring_.slot * (sizeof(Stage) / 16);
  }
  __device__ __forceinline__ void decode(Fragments& a, uint32 half) const {
    const uint32 stage = ring_.slot * sizeof(Stage);
    if constexpr (kFp8) {
      const Packed first = load(stage + half * kTileBytes, 0), second = load(stage + half * kTileBytes, 1);
      first.decode_e4m3(a, 0), second.decode_e4m3(a, 2);
    } else {
      load(stage, half).decode(a);
    }
  }
  // One or the other 64 columns of a tile.
  __device__ __forceinline__ Packed load(uint32 tile, uint32 side) const {
    Packed of;
    of.codes = ptx::ld_shared(codes_ + tile + side * (kCodeBytes / kBlocks / 2));
    const uint32 from = scales_ + tile + side * (kBlockScales / 16);
    if constexpr (kFormat == Format::kNvfp4) {
      of.scales = ptx::ld_shared_8(from);
    } else {
      of.scales.x = ptx::ld_shared_4(from);
    }
    return of;
  }
  // Starts a product with half a step of x: the first `rows` rows, from kLeast to kMost, rounded up to a multiple of
  // kStepM. A branch has all of a product, so that the compiler knows which registers are in flight.
  template <int kLeast = kStepM, int kMost = kTileM>
  __device__ __forceinline__ static void multiply(Sums& sums, const Fragments& a, uint32 x, bool add, uint32 rows) {
    if constexpr (kLeast < kMost) {
      constexpr int kMiddle = (kLeast + kMost) / 2 / kStepM * kStepM;
      if (rows <= kMiddle) return multiply<kLeast, kMiddle>(sums, a, x, add, rows);
      return multiply<kMiddle + kStepM, kMost>(sums, a, x, add, rows);
    } else {
      ptx::wgmma_fence();
#pragma unroll
      for (int i = 0; i < 4; ++i)
        ptx::wgmma(reinterpret_cast<float (&)[kMost / 2]>(sums), a[i], x + 2 * i, add || i > 0);
      ptx::wgmma_commit();
    }
  }
  // Goes on to the next stage. What free() takes when this one is no longer read.
  __device__ __forceinline__ uint32 advance() {
    const uint32 barrier = empty_ + ring_.slot * sizeof(Barrier);
    ring_.advance();
    return barrier;
  }
  __device__ __forceinline__ void free(uint32 barrier) const {
    __syncwarp();
    if (is_speaker_) ptx::mbarrier_arrive_at(barrier);
  }

  Shared& shared_;
  uint32 codes_, scales_;  // of this lane in the first stage
  uint32 x_;               // the half descriptor there
  uint32 empty_;           // in the CTA of the cluster that this lane tells
  bool   is_speaker_;
  Ring<kStages> ring_;
};

// ---- partials/ld_relaxed ---------------------------------------------------
// From L2, whatever L1 holds: what other CTAs write while the kernel runs, or wrote before it has waited for theirs.
namespace ptx {
__device__ __forceinline__ uint32 ld_relaxed_4(const void* p) {
  uint32 v;
  asm volatile("ld.relaxed.gpu.global.b32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ uint64 ld_relaxed_8(const void* p) {
  uint64 v;
  asm volatile("ld.relaxed.gpu.global.b64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
}  // namespace ptx

// ---- experts/routing -------------------------------------------------------
// Which expert of this GPU a slot of a token goes to. An assignment is token * slots + slot.
namespace ptx {
// Relaxed, because kernels read the routing before they wait for the kernel ahead of them.
__device__ __forceinline__ int32 ld_fresh_4(const void* p) { return int32(ld_relaxed_4(p)); }
__device__ __forceinline__ int64 ld_fresh_8(const void* p) { return int64(ld_relaxed_8(p)); }
__device__ __forceinline__ float ld_fresh_f32(const void* p) { return __int_as_float(ld_fresh_4(p)); }
__device__ __forceinline__ int4 ld_fresh_16(const void* p) {
  int4 v;
  asm volatile("ld.relaxed.gpu.global.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}
}  // namespace ptx

struct Routing {
  const uint8* ids;
  const int32* map;  // null: the identity
  int64 id_bytes, end, experts;

  __device__ __forceinline__ int64 id(int64 assignment) const {
    if (id_bytes == 8) return ptx::ld_fresh_8(ids + 8 * assignment);
    return ptx::ld_fresh_4(ids + 4 * assignment);
  }
  // -1 where the slot is skipped: never an expert that is not there.
  __device__ __forceinline__ int32 expert(int64 id) const {
    if (id < 0 || id >= end) return -1;
    const int64 local = map == nullptr ? id : ptx::ld_fresh_4(map + id);
    return local < 0 || local >= experts ? -1 : int32(local);
  }
  // A bit for each slot of a token that is not skipped; there are up to 32.
  __device__ __forceinline__ uint32 taken(int64 token, int slots) const {
    uint32 mask = 0;
#pragma unroll 8
    for (int slot = 0; slot < slots; ++slot) mask |= uint32(expert(id(token * slots + slot)) >= 0) << slot;
    return mask;
  }
};

// ---- experts/wide ----------------------------------------------------------
// Persistent clusters of kCluster CTAs take tiles of up to kTileM rows of an item. The CTAs of a cluster share these
// rows, each by kTileN rows of the weight of its own, in steps of 128 columns. A stage of a CTA goes round:
//
//   x        producer warp 0       wait for empty -> expect bytes at full -> TMA of a share of the rows, to all CTAs
//   weight   producer warp 1       wait for empty -> expect bytes at full -> bulk copies
//   consumer warpgroups, of kTileRows rows of the weight each: wait for full -> decode, multiply -> arrive at empty of
//                                  all CTAs: 4 warps of each warpgroup
namespace ptx {
// Starts a copy of 4 bytes, or writes zero.
__device__ __forceinline__ void copy_async_4_or_zero(void* to, const void* from, bool present) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;"
               ::"r"(shared_address(to)), "l"(from), "r"(present ? 4 : 0) : "memory");
}
}  // namespace ptx

// A product of a layer: rows in the order of the list by the weight [n, k] of each expert.
struct Layer {
  const uint8* weight;
  const float* scale;
  const float* bias;
  const int4*  items;
  const int32* order;
  const float* x_scale;  // of each row, in the order of the list
  uint32 items_end, n, k;

  __device__ __forceinline__ uint32 tiles() const { return ceil_div(n, kTileRows); }
  __device__ __forceinline__ uint32 chunks() const { return ceil_div(k, kTileCols); }
  __device__ __forceinline__ uint32 steps() const { return ceil_div(k, 2 * kHalf); }
  __device__ __forceinline__ uint32 halves() const { return ceil_div(k, kHalf); }
};

// The same value, which all lanes of the warp have: now the compiler knows that, too.
__device__ __forceinline__ uint32 uniform(uint32 v) { return __reduce_max_sync(~0u, v); }
__device__ __forceinline__ uint32 rank_in_cluster() { return kCluster == 1 ? 0 : ptx::cluster_rank(); }

// ---- work ------------------------------------------------------------------
struct Work {
  uint32 expert, first, rows, row;  // the item, and its first row of the weight
};

// Tiles of an item follow each other, and items of an expert do: CTAs that run at the same time read the same rows of x
// and the same weight, which lie in L2. An item without rows ends the list. The item of the next tile is loaded while a
// tile is worked on. kFresh: L1 may hold an older list, because the thread has not waited for the kernel ahead.
template <bool kFresh> class Schedule {
 public:
  __device__ __forceinline__ explicit Schedule(const Layer& layer)
      : items_(layer.items), end_(layer.items_end), tiles_(ceil_div(layer.n, kTileN * kCluster)),
        next_(kCluster == 1 ? blockIdx.x : ptx::cluster_id()) {
    load();
  }
  __device__ __forceinline__ bool take(Work& work) {
    work = {uniform(of_.x), uniform(of_.y), uniform(of_.z), tile_ * (kTileN * kCluster) + rank_in_cluster() * kTileN};
    next_ += kCluster == 1 ? gridDim.x : ptx::clusters();
    load();
    return work.rows > 0;
  }

 private:
  __device__ __forceinline__ void load() {
    const uint32 item = next_ / tiles_;
    tile_ = next_ - item * tiles_, of_ = {};
    if (item >= end_) return;
    if constexpr (kFresh) {
      const int4 v = ptx::ld_fresh_16(items_ + item);
      of_ = make_uint4(v.x, v.y, v.z, v.w);
    } else {
      of_ = ptx::ld<uint4>(items_ + item);
    }
  }
  const int4* items_;
  uint32 end_, tiles_, next_, tile_;
  uint4  of_;  // expert, first, rows
};

// ---- producers -------------------------------------------------------------
// Rows behind those of an item are of other items, or outside: nobody stores what becomes of them.
__device__ __forceinline__ void produce_x(Shared& shared, const Layer& layer, const TensorMap& x) {
  const uint32 rank = rank_in_cluster(), steps = layer.steps(), halves = layer.halves();
  Schedule<false> schedule(layer);
  Ring<kStages> ring;
  for (Work work; schedule.take(work);) {
    const uint32 boxes = ceil_div(work.rows, kBoxM);
    for (uint32 step = 0; step < steps; ++step, ring.advance()) {
      const uint32 count = min(2u, halves - 2 * step);
      Barrier* const full = &shared.full[ring.slot];
      ptx::mbarrier_wait(&shared.empty[ring.slot], ring.parity ^ 1);
      if (ptx::elect_one()) {
        ptx::mbarrier_arrive_expect_tx(full, boxes * count * (kBoxM * kHalfBytes));
        for (uint32 box = rank; box < boxes; box += kCluster) {
          for (uint32 half = 0; half < count; ++half) {
            uint8* const to = shared.stages[ring.slot].x[half] + box * (kBoxM * kHalfBytes);
            const int32 col = (2 * step + half) * (kHalfBytes / 2), row = work.first + box * kBoxM;
            if constexpr (kCluster == 1) ptx::tma_load(to, x, col, row, full);
            if constexpr (kCluster > 1) ptx::tma_multicast(to, x, col, row, full, (1 << kCluster) - 1);
          }
        }
      }
    }
  }
}

__device__ __forceinline__ void produce_weight(Shared& shared, const Layer& layer) {
  const uint32 tiles = layer.tiles(), chunks = layer.chunks(), steps = layer.steps();
  Schedule<true> schedule(layer);
  Ring<kStages> ring;
  for (Work work; schedule.take(work);) {
    const uint32 tile = work.row / kTileRows, count = tile < tiles ? min(uint32(kGroups), tiles - tile) : 0;
    const uint8* const weight = layer.weight + (uint64(work.expert) * tiles + tile) * chunks * kTileBytes;
    for (uint32 step = 0; step < steps; ++step, ring.advance()) {
      Barrier* const full = &shared.full[ring.slot];
      ptx::mbarrier_wait(&shared.empty[ring.slot], ring.parity ^ 1);
      if (ptx::elect_one()) {
        const uint32 chunk = step * kStepTiles, bytes = min(uint32(kStepTiles), chunks - chunk) * kTileBytes;
        ptx::mbarrier_arrive_expect_tx(full, count * bytes);
        for (uint32 i = 0; i < count; ++i) {
          uint8* const to = shared.stages[ring.slot].weight[i];
          ptx::bulk_load_once(to, weight + (i * chunks + chunk) * kTileBytes, bytes, full);
        }
      }
    }
  }
}

// ---- consumers -------------------------------------------------------------
// The place of a 16-byte chunk of a row of results in shared memory: two or one rows in 128 bytes.
__device__ __forceinline__ uint32 staged_at(uint32 row, uint32 chunk) {
  if constexpr (kStagedBytes == 64) return swizzle_128(row / 2, row % 2 * 4 + chunk);
  return swizzle_128(row, chunk);
}

// Starts copies of what a warpgroup needs for its results: scales and biases of its rows of the weight, from col on,
// with kOrdered the assignments of its rows of x, and their scales if they have some. No register holds them while the
// warpgroup multiplies.
template <bool kOrdered>
__device__ __forceinline__ void copy_aside(Shared& shared, const Layer& layer, const Work& work, uint32 team,
                                           uint32 col) {
  const uint32 thread = ptx::thread_index() % 128, row = thread % kTileRows;
  const uint64 at = uint64(work.expert) * layer.tiles() * kTileRows + col + row;
  const bool   is_bias = thread >= kTileRows;
  const float* const from = is_bias ? layer.bias : layer.scale;
  ptx::copy_async_4_or_zero((is_bias ? shared.bias : shared.scale)[team] + row,
                            from == nullptr ? layer.scale : from + at, from != nullptr);
  if constexpr (kOrdered) {
    for (uint32 i = thread; i < work.rows; i += 128)
      ptx::copy_async_4_or_zero(&shared.of_rows[team][0][i], layer.order + work.first + i, true);
  }
  if constexpr (kFp8) {
    for (uint32 i = thread; i < kTileM; i += 128) {
      const bool is_row = i < work.rows;
      ptx::copy_async_4_or_zero(&shared.of_rows[team][kFp8][i], layer.x_scale + (is_row ? work.first + i : 0), is_row);
    }
  }
}
// Sums of products times the scales of their rows of x.
__device__ __forceinline__ void scale_sums(Sums& sums, const int32 (&x_scale)[kTileM], uint32 lane) {
#pragma unroll
  for (int i = 0; i < kTileM / 8; ++i) {
    const uint2 of = ptx::ld_shared_8(ptx::shared_address(x_scale + 8 * i + lane % 4 * 2));
#pragma unroll
    for (int j = 0; j < 4; ++j) sums[4 * i + j] *= __uint_as_float(j % 2 == 0 ? of.x : of.y);
  }
}
__device__ __forceinline__ Affine affine(const Shared& shared, uint32 team, uint32 row) {
  return {shared.scale[team][row] * (kFp8 ? kE4m3Unit : kWeightUnit), shared.bias[team][row]};
}

// Writes the first `rows` rows of a warpgroup's results, once all of it has left the tile before. `pair(i, lower)`
// gives two: of rows g or g + 8 of the weight, and rows 8 i + 2 t and the next of x. `store(row, chunk, v)` stores 8
// neighbouring results of a row.
template <class Pair, class Store>
__device__ __forceinline__ void write_rows(Shared& shared, uint32 team, uint32 rows, const Pair& pair,
                                           const Store& store) {
  constexpr int kChunks = kStagedBytes / 16, kStoredRows = 128 / kChunks;
  const uint32 thread = ptx::thread_index() % 128, warp = thread / kWarp, lane = thread % kWarp;
  const uint32 staged = ptx::shared_address(shared.staged[team]);
#pragma unroll
  for (int from = 0; from < kTileM; from += kStagedRows) {
    if (from >= rows) break;
    if (from > 0) ptx::barrier_sync(kTeamBarrier + team, 128);  // the rows before have been read
#pragma unroll
    for (int row = from; row < from + kStagedRows && row < kTileM; row += 16) {
      if (row >= rows) break;
      const uint32 at = row - from + lane % 8;
      if constexpr (kStagedBytes == 64) {
        const uint32 pairs[2] = {pair(row / 8, false), pair(row / 8 + 1, false)};
        ptx::store_matrices(staged + staged_at(at + lane / 8 % 2 * 8, warp), pairs);
      } else {
        const uint32 pairs[4] = {pair(row / 8, false), pair(row / 8, true), pair(row / 8 + 1, false),
                                 pair(row / 8 + 1, true)};
        ptx::store_matrices(staged + staged_at(at + lane / 16 * 8, warp * 2 + lane / 8 % 2), pairs);
      }
    }
    ptx::barrier_sync(kTeamBarrier + team, 128);
    const uint32 end = min(rows - from, uint32(kStagedRows));
    for (uint32 row = thread / kChunks; row < end; row += kStoredRows)
      store(from + row, thread % kChunks, ptx::ld_shared(staged + staged_at(row, thread % kChunks)));
  }
}

// finish(work, team, col, sums, upper, lower) of a warpgroup, whose rows of the weight begin at col.
template <bool kOrdered, class Finish>
__device__ __forceinline__ void consume(Shared& shared, const Layer& layer, uint32 team, uint32 warp,
                                        const Finish& finish) {
  Consumer consumer(shared, team, warp, ptx::thread_index() % kWarp);
  Schedule<false> schedule(layer);
  for (Work work; schedule.take(work);) {
    const uint32 col = work.row + team * kTileRows;
    if (__any_sync(~0u, col >= layer.n)) {  // a vote: then slots and what follows stay in uniform registers
      consumer.skip(layer.steps());
      continue;
    }
    ptx::barrier_sync(kTeamBarrier + team, 128);  // the tile before is out of shared memory
    copy_aside<kOrdered>(shared, layer, work, team, col);
    // Warpgroups begin at different times, so that some multiply while another finishes its tile.
    consumer.wait_behind(team * kStages / (2 * kGroups), layer.steps());
    Sums sums;
    consumer.accumulate(sums, work.rows, layer.halves());
    ptx::copy_async_wait();
    ptx::barrier_sync(kTeamBarrier + team, 128);
    if constexpr (kFp8) scale_sums(sums, shared.of_rows[team][kFp8], ptx::thread_index() % kWarp);
    const uint32 row = warp * 16 + ptx::thread_index() % kWarp / 4;
    finish(work, team, col, sums, affine(shared, team, row), affine(shared, team, row + 8));
  }
}

// ---- CTA -------------------------------------------------------------------
// All but what becomes of the sums. A warp that has no other work calls last(lane).
template <bool kOrdered, class Finish, class Last>
__device__ __forceinline__ void run(Shared& shared, const Layer& layer, const TensorMap& x, const Finish& finish,
                                    const Last& last) {
  const uint32 number = __shfl_sync(~0u, threadIdx.x / kWarp, 0);
  const uint32 team = number / 4, warp = number % 4;
  if (number == kGroups * 4 && ptx::elect_one()) {
    ptx::prefetch_tensor_map(x);
    for (int s = 0; s < kStages; ++s) {
      ptx::mbarrier_init(&shared.full[s], 2);
      ptx::mbarrier_init(&shared.empty[s], 4 * kGroups * kCluster);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  if constexpr (kCluster > 1) ptx::cluster_sync();
  if (team == kGroups) {
    ptx::registers_fewer<kProducerRegisters>();
    if (warp == 1) {  // the list and the weight are not what the previous kernel writes
      produce_weight(shared, layer);
    } else if (warp == 0) {
      ptx::griddep_wait();
      produce_x(shared, layer, x);
    } else if (warp == 2) {
      ptx::griddep_wait();
      ptx::griddep_launch();  // what the next kernel reads before it waits was complete before this kernel
      last(ptx::thread_index() % kWarp);
    }
  } else {
    ptx::registers_more<kConsumerRegisters>();
    ptx::griddep_wait();
    consume<kOrdered>(shared, layer, team, warp, finish);
  }
  if constexpr (kCluster > 1) ptx::cluster_sync();  // others may still write to this CTA's shared memory
}

__device__ __forceinline__ float activation(float gate, float up, float alpha, float beta, float limit) {
  const float g = gate > limit ? limit : gate, u = up > limit ? limit : up < -limit ? -limit : up;
  return g * ptx::rcp_approx(1.0f + ptx::ex2_approx(alpha * g * -0x1.715476p+0f)) * (u + beta);
}
__device__ __forceinline__ float squared_relu(float v) { return v < 0.0f ? 0.0f : v * v; }
// ---- kernel ----------------------------------------------------------------
constexpr bool kGated = true;

// What becomes of the sums: rows of h. With gates, rows g are those of features whose up rows are rows g + 8.
struct Finish {
  Shared& shared;
  In*     h;
  uint32  n;
  float   alpha, beta, limit;

  __device__ __forceinline__ void operator()(const Work& work, uint32 team, uint32 col, const Sums& sums, Affine upper,
                                             Affine lower) const {
    const uint32 factor = kGated ? 2 : 1, features = n / factor, first = col / factor;
    const auto result = [&](int i, bool low) {
      if constexpr (kGated) {
        const float gate = fmaf(sums[i], upper.scale, upper.bias), up = fmaf(sums[i + 2], lower.scale, lower.bias);
        return activation(gate, up, alpha, beta, limit);
      } else {
        const Affine of = low ? lower : upper;
        return squared_relu(fmaf(sums[i + (low ? 2 : 0)], of.scale, of.bias));
      }
    };
    const auto pair = [&](int i, bool low) { return to_pair<In>(result(4 * i, low), result(4 * i + 1, low)); };
    const auto store = [&](uint32 row, uint32 chunk, uint4 v) {
      if (first + chunk * 8 < features) ptx::st(h + uint64(work.first + row) * features + first + chunk * 8, v);
    };
    write_rows(shared, team, work.rows, pair, store);
  }
};

extern "C" __global__ void __launch_bounds__(kThreads, 1) experts_wide_up(
    const __grid_constant__ TensorMap x,  // [tokens * slots, k], boxes [kBoxM, kHalf]; of E4M3 as pairs
    const uint8* __restrict__ weight,     // [experts, ceil(n / 64), ceil(k / 128), kTileBytes]
    const float* __restrict__ scale,      // [experts, round_up(n, 64)]
    const float* __restrict__ bias,       // as scale; null: none
    const int4* __restrict__ items,       // [items_end]
    In* __restrict__ h,                   // [tokens * slots, n, with gates n / 2]
    int32* __restrict__ done,             // [counters]
    int64 items_end,
    int64 n,                              // rows of the weight
    int64 k,                              // columns, a multiple of 32
    int64 counters,
    float swiglu_alpha,
    float swiglu_beta,
    float swiglu_limit,
    const float* __restrict__ x_scale     // [tokens * slots], of rows of E4M3; else null
) {
  extern __shared__ uint8 shared_bytes[];
  Shared& shared = *reinterpret_cast<Shared*>(shared_bytes);
  const Layer layer{weight, scale, bias, items, nullptr, x_scale, uint32(items_end), uint32(n), uint32(k)};
  const Finish finish{shared, h, uint32(n), swiglu_alpha, swiglu_beta, swiglu_limit};
  run<false>(shared, layer, x, finish, [&](uint32 lane) {  // the next kernel counts in done
    for (uint64 i = blockIdx.x * kWarp + lane; i < counters; i += gridDim.x * kWarp) done[i] = 0;
  });
}

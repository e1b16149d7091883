// attention_prefill_wgmma_masked, generated from templates/attention/prefill_wgmma_masked.cu.j2
// spec: {"cache":"nvfp4","ctas":2,"head_dim":128,"interleaved":false,"out_dtype":"bf16","producers":1,"q_dtype":"bf16","soft_cap":false,"stages":2,"teams":2,"tile":64,"turns":true,"two_tables":false}
//
// Attention of many query rows over a paged cache, on the warpgroup products of sm_90a. A CTA takes items of kRows
// query rows of one KV head: the rows of its tokens for all query heads of the group, so that K and V are expanded once
// for all of them. Several CTAs can share an item's tokens. Producer warps expand tiles of K and V to 16-bit floats in
// shared memory; each consumer warpgroup has 64 rows, and its products with V of a tile run beside its softmax of the
// next one. Two CTAs of a cluster can share the expansion: they take neighbouring rows, and one expands K for both, the
// other V.

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

// ---- partials/arch ---------------------------------------------------------
// sm_90a
constexpr bool kHasXorsign = true;  // min, max with .xorsign.abs: from sm_86 on
constexpr bool kHasE4m3Cvt = true;
constexpr bool kHasE2m1Cvt = false;
constexpr bool kHasLd256   = false && __CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__ >= 1209;  // PTX 8.8
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

// ---- partials/ring ---------------------------------------------------------
// The slot of a ring that a thread is at, and the parity of the current phase of that slot's barrier.
template <int kSize> struct Ring {
  uint32 slot = 0, parity = 0;
  __device__ __forceinline__ void advance() {
    if (++slot == kSize) slot = 0, parity ^= 1;
  }
};

// ---- partials/select -------------------------------------------------------
// Select<kFirst, A, B> is the type A where kFirst is true, else B.
template <bool kFirst, typename A, typename B> struct Choice { using Type = A; };
template <typename A, typename B> struct Choice<false, A, B> { using Type = B; };
template <bool kFirst, typename A, typename B> using Select = typename Choice<kFirst, A, B>::Type;

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

// ---- attention/products ----------------------------------------------------
// Matrix products of warpgroups.
namespace ptx {
// The descriptor of a matrix: rows of 128 bytes with the 128-byte swizzle, in blocks that are `across` bytes apart. If
// the rows are rows of the product, a step of 16 columns is 32 bytes further in the same block. If the rows are its
// depth, a block has 64 columns of the product, and a step of 16 rows is 2048 bytes further. Both are added to the
// descriptor in units of 16 bytes.
__device__ __forceinline__ uint64 wgmma_matrix(uint32 address, uint32 across) {
  return uint64(address & 0x3FFFFu) >> 4 | uint64(across / 16) << 16 | uint64(1024 / 16) << 32 | uint64(1) << 62;
}
// d = a b, or d += a b, of 64 rows by 16 and 64 rows by 16, both in shared memory.
// With g = lane / 4 and t = lane % 4, warp w of a warpgroup has in d[i] row 16 w + g + 8 (i / 2 % 2), column 8 (i / 4)
// + 2 t + i % 2. It may not be accessed before a wait.
__device__ __forceinline__ void wgmma_scores(float (&d)[32], uint64 a, uint64 b, bool add) {
  asm volatile("{\n"
               "  .reg .pred add;\n"
               "  setp.ne.b32 add, %34, 0;\n"
               "  wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {"
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
               "}, %32, %33, add, 1, 1, 0, 0;\n"
               "}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
        , "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
        , "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23])
        , "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
               : "l"(a), "l"(b), "r"(int32(add)));
}
// d += a b of 64 rows by 16 in registers and 16 rows by 128 in shared memory. a[i] is row 16 w + g + 8 (i % 2),
// columns 2 t + 8 (i / 2) and the next: what d above has in neighbours.
__device__ __forceinline__ void wgmma_outputs(float (&d)[64], const uint32 (&a)[4], uint64 b) {
  asm volatile("{\n"
               "  wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {"
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
               "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
               "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
               "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;\n"
               "}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
        , "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
        , "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23])
        , "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
        , "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39])
        , "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47])
        , "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55])
        , "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
}  // namespace ptx

// Keeps the compiler from reading sums before the wait in front of this.
template <int N> __device__ __forceinline__ void fence_operand(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// ---- attention/soft_cap ----------------------------------------------------
// A logit x becomes cap * tanh(x / cap). The product times `scale` is x, and the result is capped, both as exponents of
// two. tanh(z) is 1 - 2 / (1 + e^(2 z)), whose error is that of a few roundings of the cap.
__device__ __forceinline__ float soft_capped(float soft_cap, float product, float scale) {
  constexpr float kToTwo = 1.44269504f;  // from exponents of e
  const float cap = soft_cap * kToTwo;
  const float power = ptx::ex2_approx(product * (scale * (2.0f * kToTwo / cap)));
  return fmaf(-2.0f * cap, ptx::rcp_approx(1.0f + power), cap);
}

// ---- attention/request -----------------------------------------------------
constexpr int kMostTokens = 1 << 24;  // of a request

// A request in tiles of kTile tokens, blocks of kRows query rows, and groups of kHeadWarps KV heads.
template <int kTile, int kRows, int kHeadWarps> struct TiledRequest {
  int tokens;  // in the cache, at most as many as the page table covers
  int q_begin, q_len;
  int first_tile, tiles;  // that any of its query rows sees
  int row_blocks;
  int table;  // where its page numbers begin

  template <class Operands> __device__ __forceinline__ void load(const Operands& p, int b) {
    const int begin = p.cum_q ? p.cum_q[b] : b * p.q_len, end = p.cum_q ? p.cum_q[b + 1] : begin + p.q_len;
    q_begin = max(0, min(begin, p.total_q));
    q_len   = max(0, min(end, p.total_q) - q_begin);
    int pages = p.max_pages;
    table = b * p.table_stride;
    if (p.page_ends) {
      const int first = max(0, min(p.page_ends[b], p.max_pages));
      table = first, pages = max(0, min(p.page_ends[b + 1], p.max_pages) - first);
    }
    tokens = max(0, min(p.seq_lens[b], min(pages, kMostTokens / p.page) * p.page));
    first_tile = first_token(p) / kTile;
    tiles      = max(1, int(ceil_div(tokens, kTile)) - first_tile);
    row_blocks = (q_len * p.group + kRows - 1) / kRows;
  }
  // Returns the first token that any of its query rows sees.
  template <class Operands> __device__ __forceinline__ int first_token(const Operands& p) const {
    return p.window_left < 0 ? 0 : max(0, tokens - q_len - p.window_left);
  }
  template <class Operands> __device__ __forceinline__ int items(const Operands& p) const {
    return p.kv_heads / kHeadWarps * row_blocks;
  }
};

// A query sees the tokens from `first` to before `end`.
struct Span {
  int first, end;

  // Is that of query token `query` of a request, or of its last.
  template <class Operands, class Request>
  __device__ __forceinline__ Span(const Operands& p, const Request& r, int query, bool causal) {
    const int at = r.tokens - r.q_len + min(query, r.q_len - 1);
    first = p.window_left < 0 ? 0 : max(0, at - min(p.window_left, kMostTokens));
    end   = causal ? at + 1 : r.tokens;
  }
};

// ---- attention/token_mask --------------------------------------------------
// A mask of the caller's: a row of bits for each query token of a request, one for each token from `first` on. A query
// sees the tokens before `first`, and those whose bit is 1. Bits behind the end of the mask are 0.
struct TokenMask {
  int64 begin;  // bits
  int   first, row_bits;

  TokenMask() = default;
  // For request b: rows of its tokens from byte mask_ends[b] on, or rows of its new tokens at its queries.
  template <class Operands, class Request>
  __device__ __forceinline__ TokenMask(const Operands& p, const Request& r, int b) : first(first_of(p, r)) {
    row_bits = p.mask_ends ? r.tokens : p.mask_row_bytes * 8;
    begin = p.mask_ends ? int64(p.mask_ends[b]) * 8 : int64(r.q_begin) * row_bits;
  }
  // Returns the first token of request r that a query may not see.
  template <class Operands, class Request>
  __device__ __forceinline__ static int first_of(const Operands& p, const Request& r) {
    return p.mask_ends ? 0 : r.tokens - r.q_len;
  }
  // Bit i says whether a query token of the request sees token `at` + i.
  template <class Operands> __device__ __forceinline__ uint32 bits(const Operands& p, int query, int at) const {
    const int   before = min(max(first - at, 0), 32);
    const int64 from = begin + int64(query) * row_bits + max(at - first, 0);
    const int   left = from < 0 ? 0 : int(min(max(p.mask_bytes - from / 8, int64(0)), int64(5)));
    const uint8* bytes = p.mask + from / 8;
    uint32 low = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i < left) low |= uint32(bytes[i]) << 8 * i;
    }
    const uint32 high = left == 5 ? bytes[4] : 0;
    const uint64 seen = __funnelshift_r(low, high, int(from) % 8);
    return uint32(seen << before) | uint32((uint64(1) << before) - 1);
  }
  // Returns the end of the tokens that all queries of request r see from where the last sees them, `end` without mask.
  template <class Operands, class Request>
  __device__ __forceinline__ static int end_for_all(const Operands& p, const Request& r, int) {
    return first_of(p, r);
  }
};

// No mask: a query sees all tokens of its span.
struct NoMask {
  NoMask() = default;
  template <class Operands, class Request> __device__ __forceinline__ NoMask(const Operands&, const Request&, int) {}
  template <class Operands> __device__ __forceinline__ uint32 bits(const Operands&, int, int) const { return ~0u; }
  template <class Operands, class Request>
  __device__ __forceinline__ static int end_for_all(const Operands&, const Request&, int end) {
    return end;
  }
};

// Returns the bits of a word that are below bit n.
__device__ __forceinline__ uint32 bits_below(int n) { return __funnelshift_lc(~0u, 0, max(n, 0)); }

// What a query sees of the tokens from `start` on, 32 to a word. Bits of `there` tell those that have a page.
template <class Operands, class Mask, int kWords> struct Seen {
  const Operands& p;
  const Mask&     mask;
  const uint32  (&there)[kWords];
  int  query, start;
  Span span;

  template <class Request>
  __device__ __forceinline__ Seen(const Operands& p, const Request& r, int query, bool causal, const Mask& mask,
                                  int start, const uint32 (&there)[kWords])
      : p(p), mask(mask), there(there), query(min(query, r.q_len - 1)), start(start), span(p, r, query, causal) {}

  __device__ __forceinline__ uint32 bits(int w) const {
    const int at = start + 32 * w;
    return there[w] & mask.bits(p, query, at) & bits_below(span.end - at) & ~bits_below(span.first - at);
  }
};

// ---- attention/softmax -----------------------------------------------------
// The online softmax of a warp's query rows, in powers of two.
//
// A weight is 2^(x - reference). The reference is near the maximum of x so far: the x that set it has the weight
// 2^kHeadroom, and it moves only when a weight would be above 2^kLargest, so that float16 holds every weight.
constexpr float kHeadroom = 8.0f, kLargest = 15.0f;
constexpr float kNone = -0x1p126f;  // the reference of a row without a weight

// Factors from products of query rows, two of each kBlocks, to exponents of two. They are positive: the largest product
// stays largest.
template <int kBlocks> struct RowScales {
  float x[kBlocks][2];

  __device__ __forceinline__ static RowScales ones() {
    RowScales scales;
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) scales.x[n][0] = scales.x[n][1] = 1.0f;
    return scales;
  }
};

// Makes fours what products of warpgroups take.
template <int kBlocks, int kFours>
__device__ __forceinline__ float (&flat(float (&x)[kBlocks][kFours][4]))[kBlocks * kFours * 4] {
  return reinterpret_cast<float(&)[kBlocks * kFours * 4]>(x);
}

// Tensor cores leave a lane two rows of each of kBlocks blocks, in fours: with g = lane / 4 and c = lane % 4, rows g
// and g + 8 of a block, and of each 8 tokens or dimensions those at 2 c and 2 c + 1. With kColumns rows are the columns
// of products: rows 2 c and 2 c + 1 of a block, and of each 16 tokens or dimensions those at g and g + 8.
template <int kBlocks, int kTile, int kDims, bool kColumns> struct Softmax {
  static constexpr int kFours = kTile / (kColumns ? 16 : 8), kSums = kDims / (kColumns ? 16 : 8);
  using Logits = float[kBlocks][kFours][4];
  using Scales = RowScales<kBlocks>;

  float reference[kBlocks][2];
  float sum[kBlocks][2];     // of the weights that this lane has seen
  float factor[kBlocks][2];  // of the last move
  float o[kBlocks][kSums][4];  // of weighted values

  // Returns which of a lane's two rows of a block number i of four is of.
  __device__ __forceinline__ static constexpr int row_of(int i) { return kColumns ? i % 2 : i / 2; }
  // Calls f with each of the distances between the lanes that share a row.
  template <class F> __device__ __forceinline__ static void over_lanes(F f) {
#pragma unroll
    for (int distance = kColumns ? 4 : 1; distance < (kColumns ? kWarp : 4); distance *= 2) f(distance);
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      reference[n][0] = reference[n][1] = sum[n][0] = sum[n][1] = 0.0f;
#pragma unroll
      for (int m = 0; m < kSums; ++m) o[n][m][0] = o[n][m][1] = o[n][m][2] = o[n][m][3] = 0.0f;
    }
  }

  // Makes products capped exponents.
  __device__ __forceinline__ static void cap(float soft_cap, Logits& x, const Scales& scales) {
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
      for (int u = 0; u < kFours; ++u) {
#pragma unroll
        for (int i = 0; i < 4; ++i) x[n][u][i] = soft_capped(soft_cap, x[n][u][i], scales.x[n][row_of(i)]);
      }
    }
  }

  // Makes products of tokens that their row does not see -inf. seen(n, i) is what row i of block n sees of the tile.
  template <class F> __device__ __forceinline__ static void hide(Logits& x, int lane, F seen) {
    constexpr int kWordFours = kColumns ? 2 : 4;  // of 32 tokens
    const int own = kColumns ? lane / 4 : lane % 4 * 2;  // a lane's first token
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      const auto upper = seen(n, 0), lower = seen(n, 1);
#pragma unroll
      for (int w = 0; w * kWordFours < kFours; ++w) {
        const uint32 bits[2] = {upper.bits(w) >> own, lower.bits(w) >> own};
#pragma unroll
        for (int u = 0; u < kWordFours && w * kWordFours + u < kFours; ++u) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int token = kColumns ? 16 * u + i / 2 * 8 : 8 * u + i % 2;
            if (!(bits[row_of(i)] >> token & 1)) x[n][w * kWordFours + u][i] = __uint_as_float(0xFF800000u);
          }
        }
      }
    }
  }

  // Makes products exponents. Returns whether references moved: then the sums of weighted values must follow.
  __device__ __forceinline__ bool refer(Logits& x, const Scales& scales) {
    bool fresh = false;
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
      for (int u = 0; u < kFours; ++u) {
#pragma unroll
        for (int i = 0; i < 4; ++i) x[n][u][i] = fmaf(x[n][u][i], scales.x[n][row_of(i)], -reference[n][row_of(i)]);
      }
      fresh = fresh || sum[n][0] == 0.0f || sum[n][1] == 0.0f;
    }
    // Above a positive bound floats are in order as integers, of which one instruction takes the largest of three.
    const float (&all)[kBlocks * kFours * 4] = flat(x);
    int32 most[2] = {__float_as_int(all[0]), __float_as_int(all[1])};
#pragma unroll
    for (int i = 2; i < kBlocks * kFours * 4; i += 4) {
      most[0] = max(max(most[0], __float_as_int(all[i])), __float_as_int(all[i + 1]));
      if (i + 3 < kBlocks * kFours * 4) {
        most[1] = max(max(most[1], __float_as_int(all[i + 2])), __float_as_int(all[i + 3]));
      }
    }
    const bool rises = max(most[0], most[1]) > __float_as_int(kLargest);
    const bool moved = __any_sync(~0u, rises || fresh);
    if (moved) raise(x);
    return moved;
  }
  __device__ __forceinline__ void move() {
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
      for (int m = 0; m < kSums; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) o[n][m][i] *= factor[n][row_of(i)];
      }
    }
  }
  // Makes four exponents of block n weights.
  __device__ __forceinline__ void weigh(int n, float (&x)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[i] = ptx::ex2_approx(x[i]);
      sum[n][row_of(i)] += x[i];
    }
  }

  // Adds up the weights that the lanes of a row have seen.
  __device__ __forceinline__ void close() {
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        over_lanes([&](int distance) { sum[n][i] += __shfl_xor_sync(~0u, sum[n][i], distance); });
        if (sum[n][i] == 0.0f) reference[n][i] = kNone;
      }
    }
  }

 private:
  // Moves the references of rows with an exponent above kLargest, or without a weight so far.
  __device__ __forceinline__ void raise(Logits& x) {
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        float top = x[n][0][kColumns ? row : 2 * row], seen = sum[n][row];
#pragma unroll
        for (int u = 0; u < kFours; ++u) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            if (row_of(i) == row) top = fmaxf(top, x[n][u][i]);
          }
        }
        over_lanes([&](int distance) {
          top = fmaxf(top, __shfl_xor_sync(~0u, top, distance));
          seen += __shfl_xor_sync(~0u, seen, distance);
        });
        const bool  fresh = seen == 0.0f && top >= kNone;
        const float by    = fresh || top > kLargest ? top - kHeadroom : 0.0f;
        factor[n][row] = seen == 0.0f ? 1.0f : ptx::ex2_approx(-by);
        reference[n][row] += by, sum[n][row] *= factor[n][row];
#pragma unroll
        for (int u = 0; u < kFours; ++u) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            if (row_of(i) == row) x[n][u][i] -= by;
          }
        }
      }
    }
  }
};

// ---- attention/items -------------------------------------------------------
// The work of a call in items of kRows query rows for one KV head. A query row is a query head of the group at a query
// token, heads first. The items are in the order request, rows, head; where K and V of all heads of the request do not
// fit into L2, in the order request, head, rows. Rows come in descending order: under a causal mask the long items then
// start first. The last items, which would leave SMs idle, are divided into parts along their tokens.
//
// Whole items and parts are numbered in that order. A cluster takes the one that has its own number, then the next that
// none has taken yet. One of its warps finds from the lengths on the device where that lies, and says so to the others
// in shared memory.

// A condition that is the same in all lanes, as the compiler sees by the vote: it keeps what changes in loops and
// branches on it, such as the slots of rings, in uniform registers.
__device__ __forceinline__ bool in_all(bool condition) { return __any_sync(~0u, condition); }

// Returns which CTA of a cluster of kClusterCtas this is.
template <int kClusterCtas> __device__ __forceinline__ uint32 rank_in_cluster() {
  return kClusterCtas == 1 ? 0 : ptx::cluster_rank();
}

// Config is that of attention/prefill_wgmma.
template <class Config> struct Work {
  using Operands = typename Config::Operands;
  using Mask     = typename Config::Mask;
  using Request  = TiledRequest<Config::kTile, Config::kRows, 1>;  // all warps of a CTA take the same KV head
  static constexpr int kTile = Config::kTile, kRows = Config::kRows, kEvery = Config::kEvery;
  static constexpr int kClusterCtas = Config::kClusterCtas;

  static constexpr int kHeadsTokens = (32 << 20) / (2 * (Config::kRowBytes + Config::kScaleBytes));  // that fit into L2
  // Returns what a query row of a request sees.
  __device__ __forceinline__ static Span seen_by(const Operands& p, const Request& r, int row) {
    return Span(p, r, row / p.group, p.causal);
  }

  // Is a part of an item, or all of it.
  struct alignas(16) Item : Mask {
    Request request;
    int head, row;   // the first of its rows
    int first, end;  // of the tokens that any of its rows sees
    int start, tiles;  // of its first tile, and how many; none behind the last item
    int part, parts;   // which of how many
    int place;         // of the first part's sums in the workspace
  };

  // The next items of a CTA. The places are used in turn. When one is used again, every warp is through with the item
  // in it: whoever finds items is two tiles of its group, and the stages, ahead of the last consumer, and items have a
  // tile.
  static constexpr int kPlaces = 16;
  static_assert(Config::kStages + 2 * kEvery + 2 < kPlaces, "no place is used again too soon");
  struct Places {
    Item    items[kPlaces];
    Barrier known[kPlaces];
  };

  // Takes one warp through them.
  class Items {
   public:
    __device__ __forceinline__ explicit Items(Places& places) : places_(places) {}

    __device__ __forceinline__ const Item& next() {
      const uint32 at = count_ % kPlaces;
      ptx::mbarrier_wait(&places_.known[at], count_++ / kPlaces % 2);
      return places_.items[at];
    }

   private:
    Places& places_;
    uint32 count_ = 0;
  };

  static constexpr int kMostParts = kWarp;  // of an item

  // Finds the items of a cluster, by one warp, 32 requests at a time, one in each lane. Other warps have one that does
  // nothing.
  class Finder {
   public:
    __device__ __forceinline__ Finder(const Operands& p, Places& places, bool finds)
        : p_(p), places_(places), finds_(finds), clusters_(gridDim.x / kClusterCtas),
          number_(blockIdx.x / kClusterCtas) {
      if (finds) divide();
    }

    // Takes the next number, which arrives meanwhile.
    __device__ __forceinline__ void take() {
      if (!finds_ || taken_) return;
      if (ptx::thread_index() % kWarp == 0) drawn_ = atomicAdd(p_.counters, 1);
      taken_ = true;
    }
    // Puts the next item into its place, or the end.
    __device__ __forceinline__ void put() {
      if (!finds_) return;
      Item item;
      do {
        if (count_ > 0 || skipped_) {
          take();
          number_ = clusters_ + __shfl_sync(~0u, drawn_, 0);
          taken_  = false;
        }
        skipped_ = !find(item);
      } while (skipped_);
      const int at = count_++ % kPlaces;
      if (ptx::thread_index() % kWarp == 0) {
        places_.items[at] = item;
        ptx::mbarrier_arrive(&places_.known[at]);
        if constexpr (kClusterCtas == 2) {
          const uint32 from = ptx::shared_address(&places_.items[at]);
          const uint32 known = ptx::cluster_address(&places_.known[at], 1);
          ptx::fence_proxy_async();
          ptx::mbarrier_arrive_expect_at(known, sizeof(Item));
          ptx::copy_shared(ptx::cluster_address(&places_.items[at], 1), from, sizeof(Item), known);
        }
      }
    }

   private:
    // All clusters can take as many whole items. Those that are left, or all if there are not enough, are divided so
    // that every cluster has a part. Each lane tries another number of parts of the longest item. The unit of costs is
    // half a tile: beside its tiles, a part costs as much as two to begin and to end, and half of one to add to others.
    __device__ __forceinline__ void divide() {
      const int lane = ptx::thread_index() % kWarp, parts = lane + 1;
      int items = 0, longest = 1;
      float tiles = 0.0f;
      for (int b = lane; b < p_.batch; b += kWarp) {
        Request r;
        r.load(p_, b);
        items += r.items(p_), tiles += float(r.items(p_)) * r.tiles, longest = max(longest, r.tiles);
      }
      items = __reduce_add_sync(~0u, items), longest = __reduce_max_sync(~0u, longest);
#pragma unroll
      for (int distance = 1; distance < kWarp; distance *= 2) tiles += __shfl_xor_sync(~0u, tiles, distance);
      whole_ = items / clusters_ * clusters_;
      const int   left = items - whole_, size = (longest + lane) / parts;
      const float rounds = ceilf(fminf(left, tiles / longest) * parts / clusters_);
      uint32 cost = uint32(rounds) * (2 * size + 4) + lane;
      if (lane > 0 && left * parts > p_.most_parts) cost = ~0u / kWarp;
      parts_ = __reduce_min_sync(~0u, cost * kWarp + lane) % kWarp + 1;
      size_  = (longest + parts_ - 1) / parts_;
      end_   = whole_ + left * parts_;
    }

    // Finds what has the number that was taken last, and returns whether an item has a part of that number.
    __device__ __forceinline__ bool find(Item& item) {
      if (in_all(number_ >= end_)) {
        // Nobody takes one after the last: ready for the next launch.
        if (number_ == end_ + clusters_ - 1 && ptx::thread_index() % kWarp == 0) atomicExch(p_.counters, 0);
        item.tiles = 0;
        return true;
      }
      const int over = max(0, number_ - whole_), i = min(number_, whole_) + over / parts_;
      for (; b_ < p_.batch; b_ += kWarp) {
        const int lane = ptx::thread_index() % kWarp;
        Request r;
        int own = 0;
        if (b_ + lane < p_.batch) {
          r.load(p_, b_ + lane);
          own = r.items(p_);
        }
        int upto = own;
#pragma unroll
        for (int distance = 1; distance < kWarp; distance *= 2) {
          const int other = __shfl_up_sync(~0u, upto, distance);
          if (lane >= distance) upto += other;
        }
        const uint32 behind = __ballot_sync(~0u, i < before_ + upto);
        if (behind != 0) {
          const int found = __ffs(behind) - 1;
          set(item, b_ + found, i - before_ - __shfl_sync(~0u, upto - own, found));
          break;
        }
        before_ += __shfl_sync(~0u, upto, kWarp - 1);
      }
      if (in_all(number_ < whole_)) return true;
      item.part = over % parts_, item.parts = (item.tiles + size_ - 1) / size_, item.place = over - item.part;
      if (in_all(item.part >= item.parts)) return false;
      const int start = item.start, begin = item.part * item.tiles / item.parts;
      const int end   = (item.part + 1) * item.tiles / item.parts;
      if (end < item.tiles) item.end = start + end * kTile;
      item.start = start + begin * kTile, item.first = max(item.first, item.start), item.tiles = end - begin;
      return true;
    }
    // Makes it item i of a request.
    __device__ __forceinline__ void set(Item& item, int b, int i) const {
      Request& r = item.request;
      r.load(p_, b);
      static_cast<Mask&>(item) = Mask(p_, r, b);
      const bool fits = int64(r.tokens) * p_.kv_heads <= kHeadsTokens;
      const int block = fits ? i / p_.kv_heads : i % r.row_blocks;
      item.head  = fits ? i % p_.kv_heads : i / r.row_blocks;
      item.row   = (r.row_blocks - 1 - block) * kRows;
      item.first = seen_by(p_, r, item.row).first;
      item.end   = seen_by(p_, r, item.row + kRows - 1).end;
      item.start = item.first / kTile * kTile;
      item.tiles = max(1, (item.end - item.start + kTile - 1) / kTile);
      item.part  = 0, item.parts = 1;
    }

    const Operands& p_;
    Places& places_;
    const bool finds_;
    const int clusters_;
    int whole_;          // items that are not divided
    int parts_, size_;   // of others, and their tiles, at most
    int end_;            // of the numbers
    int number_;         // that was taken last
    int b_ = 0, before_ = 0;  // the first request in the lanes, and the items of those before it
    uint32 count_ = 0;        // items that were put
    uint32 drawn_;            // by the first lane
    bool taken_ = false, skipped_ = false;
  };
};

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

// ---- partials/prefetch_line ------------------------------------------------
namespace ptx {
// Prefetches the 128-byte line of *p into L2.
__device__ __forceinline__ void prefetch_line(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }
}  // namespace ptx

// ---- attention/cvt_e2m1 ----------------------------------------------------
namespace ptx {
// Converts eight codes. Code i of the word becomes half i % 2 of pair i / 2.
__device__ __forceinline__ void cvt_f16x2_e2m1x8(uint32 word, uint32 (&pair)[4]) {
  asm("{\n"
      "  .reg .b8 b0, b1, b2, b3;\n"
      "  mov.b32 {b0, b1, b2, b3}, %4;\n"
      "  cvt.rn.f16x2.e2m1x2 %0, b0;\n"
      "  cvt.rn.f16x2.e2m1x2 %1, b1;\n"
      "  cvt.rn.f16x2.e2m1x2 %2, b2;\n"
      "  cvt.rn.f16x2.e2m1x2 %3, b3;\n"
      "}"
      : "=r"(pair[0]), "=r"(pair[1]), "=r"(pair[2]), "=r"(pair[3]) : "r"(word));
}
}  // namespace ptx

// ---- attention/codes -------------------------------------------------------
// a b + c as one instruction: the compiler would make a shift and an addition of it.
__device__ __forceinline__ uint32 multiply_add(uint32 a, int b, uint32 c) {
  uint32 d;
  asm("mad.lo.s32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
// Eight codes to four pairs. By software, pair i has codes i and i + 4; by hardware, 2 i and 2 i + 1. By software, each
// byte of `odd` and `even` has the sign of a code on top and its other bits above the last. Twice a code plus 0x70 is
// such a byte: a carry takes the sign to the top. With the shifts of gemm/codes, it would be an instruction more.
__device__ __forceinline__ void decode(uint32 word, uint32 (&pair)[4]) {
  if constexpr (kHasE2m1Cvt) {
    ptx::cvt_f16x2_e2m1x8(word, pair);
  } else {
    constexpr uint32 kSigns = 0x80808080u, kBits = 0x8E008E00u;
    const uint32 odd  = ptx::select_bits(kSigns, word, word >> 3);
    const uint32 even = multiply_add(~word & 0x0F0F0F0Fu, -2, 0x70707070u + 2 * 0x0F0F0F0Fu);
    pair[0] = even << 8 & kBits, pair[1] = odd << 8 & kBits, pair[2] = even & kBits, pair[3] = odd & kBits;
  }
}
// Decodes the scales of two blocks, by software times 2^7.
__device__ __forceinline__ uint32 decode_scales(uint32 two) {
  const uint32 s = decode_e4m3x2(uint16(two));
  return kHasE2m1Cvt ? s : ptx::mul_f16x2(s, 0x58005800u);
}

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

// ---- attention/copies ------------------------------------------------------
// Asynchronous copies into shared memory, and other instructions of the attention kernels.
namespace ptx {
// Copies kBytes where `present`; else writes zeros, and reads nothing.
template <int kBytes, bool kPresent>
__device__ __forceinline__ void copy_or_clear(uint32 to, const void* from, bool present) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16, "one copy");
  const int bytes = present ? kBytes : 0;
  if constexpr (kBytes == 16 && kPresent) {
    copy_async(to, from);
  } else if constexpr (kBytes == 16) {
    copy_async_or_zero(to, from, bytes);
  } else if constexpr (kPresent) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(kBytes) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;"
                 ::"r"(to), "l"(from), "n"(kBytes), "r"(bytes) : "memory");
  }
}

// A row of kBytes bytes on its way into registers, by accesses that its alignment allows; 0 where it is not `present`.
template <int kBytes> struct RowBytes {
  static constexpr int kUnit = kBytes & -kBytes;
  using Access = Select<kUnit == 1, uint8, Select<kUnit == 2, uint16, uint32>>;
  Access parts[kBytes / kUnit];

  __device__ __forceinline__ void load(const uint8* from, bool present) {
#pragma unroll
    for (int i = 0; i < kBytes / kUnit; ++i) {
      parts[i] = 0;
      if (present) parts[i] = ld<Access>(from + i * kUnit);
    }
  }
  __device__ __forceinline__ uint32 word(int w) const {
    uint32 word = 0;
#pragma unroll
    for (int i = w * 4; i < w * 4 + 4; i += kUnit) {
      if (i < kBytes) word |= uint32(parts[i / kUnit]) << i % 4 * 8;
    }
    return word;
  }
};

__device__ __forceinline__ void st_shared_word(uint32 p, uint32 v) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(p), "r"(v) : "memory");
}
// Copies a row of kBytes bytes where `present`, by accesses that its alignment allows, and clears what follows up to
// kRoom. Below four bytes there is no asynchronous copy.
template <int kBytes, int kRoom, bool kPresent>
__device__ __forceinline__ void copy_row_or_clear(uint32 to, const uint8* from, bool present) {
  constexpr int kUnit = kBytes & -kBytes;
  if constexpr (kBytes == kRoom && kUnit == kBytes) {
    copy_or_clear<kBytes, kPresent>(to, from, present);
  } else if constexpr (kUnit >= 4) {
#pragma unroll
    for (int i = 0; i < kRoom; i += kUnit) copy_or_clear<kUnit, false>(to + i, from + i, present && i < kBytes);
  } else {
    RowBytes<kBytes> row;
    row.load(from, present);
#pragma unroll
    for (int i = 0; i < kRoom; i += 4) st_shared_word(to + i, row.word(i / 4));
  }
}

// Returns what lies a b bytes behind base.
__device__ __forceinline__ const uint8* mad_wide(int a, int b, const uint8* base) {
  const uint8* d;
  asm("mad.wide.s32 %0, %1, %2, %3;" : "=l"(d) : "r"(a), "r"(b), "l"(base));
  return d;
}

// Adds to what other CTAs read and write: what they wrote before is seen after, and the other way round.
__device__ __forceinline__ uint32 atom_add_acq_rel(uint32* p, uint32 v) {
  uint32 old;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;" : "=r"(old) : "l"(p), "r"(v) : "memory");
  return old;
}
}  // namespace ptx

// ---- attention/expand ------------------------------------------------------
// Tiles of K and V on their way from pages to shared memory, as 16-bit floats in rows of 128 bytes with the 128-byte
// swizzle. A warp takes kOwnTokens neighbouring tokens of a tile. A lane expands a whole row, because working out where
// a row lies costs much; rows of 16-bit floats are copied, each by four lanes. Eight lanes with neighbouring tokens
// write to all banks. The loads of a warp's next tile are under way while it waits for a free slot.
enum Side { kKeys, kValues };  // of two CTAs, the one whose rank this is expands it

// One half of a pair as both. Said so, it costs nothing: the multiplication takes either half.
template <bool kUpper> __device__ __forceinline__ uint32 twice(uint32 pair) {
  uint16 half[2];
  asm("mov.b32 {%0, %1}, %2;" : "=h"(half[0]), "=h"(half[1]) : "r"(pair));
  asm("mov.b32 %0, {%1, %1};" : "=r"(pair) : "h"(half[kUpper]));
  return pair;
}
__device__ __forceinline__ uint4 expand_e2m1(uint32 word, uint32 scale) {
  uint32 pair[4];
  decode(word, pair);
  return {ptx::mul_f16x2(pair[0], scale), ptx::mul_f16x2(pair[1], scale), ptx::mul_f16x2(pair[2], scale),
          ptx::mul_f16x2(pair[3], scale)};
}
__device__ __forceinline__ uint4 expand_e4m3(uint32 a, uint32 b) {
  return {decode_e4m3x2(uint16(a)), decode_e4m3x2(uint16(a >> 16)), decode_e4m3x2(uint16(b)),
          decode_e4m3x2(uint16(b >> 16))};
}

// Config is that of attention/prefill_wgmma.
template <class Config> struct Expansion {
  using Operands = typename Config::Operands;
  using Query    = typename Config::Query;
  using Item     = typename Work<Config>::Item;
  using Places   = typename Work<Config>::Places;
  using Finder   = typename Work<Config>::Finder;
  static constexpr int  kCacheBits = Config::kCacheBits, kHeadDim = Config::kHeadDim, kTile = Config::kTile;
  static constexpr int  kRowBytes = Config::kRowBytes, kScaleBytes = Config::kScaleBytes, kWarps = Config::kWarps;
  static constexpr int  kRows = Config::kRows, kClusterCtas = Config::kClusterCtas, kEvery = Config::kEvery;
  static constexpr int  kConsumers = Config::kConsumers, kThreads = Config::kThreads;
  static constexpr int  kBlockBytes = kTile * 128;  // of 64 columns
  static constexpr bool kTwoTables = Config::kTwoTables, kInterleaved = Config::kInterleaved;

  static constexpr bool kIsNvfp4 = kCacheBits == 4, kIsHalf = kCacheBits == 16;
  static constexpr int  kUnits     = (kRowBytes + 15) / 16;  // of a row
  static constexpr int  kOwnTokens = kTile / kWarps;
  static constexpr int  kAcross    = kIsHalf ? 4 : kWarp / kOwnTokens;  // lanes that share a row
  static constexpr int  kGroup     = kWarp / kAcross;        // tokens that a warp takes at a time
  static constexpr int  kLoads     = kOwnTokens / kGroup;
  static_assert(kLoads > 0 && kOwnTokens <= kWarp, "a lane has some tokens, and a word a bit for each of a warp");

  // As the top bits of a float16 without exponent bias, a code of E2M1 is its value times 2^-14, and a block scale
  // times 2^7 is a float16 too, so that their product is exact: 2^-7 of the value.
  static constexpr float kUnit = kIsNvfp4 ? 0x1p-7f : 1.0f;  // of K and V as they enter the products

  // The pages of a lane's tokens in one tile; what the item does not see has none.
  struct Tile {
    int head;
    int page[kLoads], v_page[kTwoTables ? kLoads : 1], slot[kLoads];

    template <Side kSide> __device__ __forceinline__ int page_of(int i) const {
      return kSide == kValues && kTwoTables ? v_page[i] : page[i];
    }
    __device__ __forceinline__ bool has(const Operands& p, int i) const {
      return uint32(page[i]) < uint32(p.num_pages) && (!kTwoTables || uint32(v_page[i]) < uint32(p.num_pages));
    }
    // Returns the first token of a warp, and that of a lane.
    __device__ __forceinline__ static int first_of_warp() {
      return ptx::thread_index() / kWarp % kWarps * kOwnTokens;
    }
    __device__ __forceinline__ static int first_of_lane() {
      const int lane = ptx::thread_index() % kWarp;
      return first_of_warp() + lane / 8 / kAcross * 8 + lane % 8;
    }
    // Returns a bit for each token of the warp that has no page, for the masks.
    __device__ __forceinline__ uint32 absent(const Operands& p) const {
      uint32 bits = 0;
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const uint32 lanes = __ballot_sync(~0u, !has(p, i));
#pragma unroll
        for (int j = 0; j < kGroup; j += 8) bits |= (lanes >> j * kAcross & 255) << (i * kGroup + j);
      }
      return bits;
    }
  };

  // Every kEvery-th tile in the order of the work, from tile `first` on. Pages are looked up one of them ahead. One
  // warp of a cluster `finds` the items.
  class Tiles {
   public:
    __device__ __forceinline__ Tiles(const Operands& p, Places& places, int first, bool finds)
        : p_(p), items_(places), finder_(p, places, finds), inverse_((0x80000000u + p.page - 1) / p.page),
          own_(Tile::first_of_lane()), ahead_(first) {}

    __device__ __forceinline__ bool next(Tile& tile) {
      while (left_ <= ahead_) {
        ahead_ -= left_;
        finder_.put();
        const Item& item = items_.next();
        left_ = __shfl_sync(~0u, item.tiles, 0);
        if (left_ == 0) return false;
        head_ = item.head, table_ = p_.tables + item.request.table;
        first_ = item.first, end_ = item.end, start_ = item.start;
        fetch_queries(item);
      }
      left_ -= ahead_, start_ += ahead_ * kTile, ahead_ = kEvery;
      if (left_ <= kEvery) finder_.take();
      tile.head = head_;
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const int  token  = start_ + own_ + i * kGroup;
        const int  column = int(__umulhi(2 * token, inverse_));  // exact below 2^24
        const bool inside = token >= first_ && token < end_;
        tile.slot[i] = token - column * p_.page;
        tile.page[i] = inside ? table_[column] : -1;
        if constexpr (kTwoTables) tile.v_page[i] = inside ? table_[column + p_.v_table] : -1;
      }
      return true;
    }

   private:
    // To L2, some tiles before the consumers need them.
    __device__ __forceinline__ void fetch_queries(const Item& item) const {
      constexpr int kLines = (kHeadDim * sizeof(Query) + 127) / 128;
      const int thread = rank_in_cluster<kClusterCtas>() * (kThreads - kConsumers) + ptx::thread_index() - kConsumers;
      for (int i = thread; i < kRows * kLines; i += kClusterCtas * (kThreads - kConsumers)) {
        const int row = item.row + i / kLines;
        if (row >= item.request.q_len * p_.group) break;
        const Query* q = p_.q + int64(item.request.q_begin + row / p_.group) * p_.q_token_stride +
                         (item.head * p_.group + row % p_.group) * p_.q_head_stride;
        ptx::prefetch_line(q + i % kLines * (128 / sizeof(Query)));
      }
    }

    const Operands& p_;
    typename Work<Config>::Items items_;
    Finder finder_;
    const uint32 inverse_;
    const int own_;  // a lane's first token of a tile
    int ahead_;      // tiles from start_ to the next
    int left_ = 0, start_;
    // Those of the item follow.
    int head_, first_, end_;
    const int32* table_;
  };

  // What a lane has of one tile's K or V.
  template <Side kSide> class Raw {
   public:
    __device__ __forceinline__ void load(const Operands& p, const Tile& tile) {
      if (tile.head != head_) {
        head_   = tile.head;
        base_       = kSide == kValues ? p.v + head_ * p.v_head_stride : p.k + head_ * p.k_head_stride;
        scale_base_ = kSide == kValues ? p.v_scales + head_ * p.v_scales_head_stride
                                       : p.k_scales + head_ * p.k_scales_head_stride;
      }
      const bool   there = tile.has(p, 0);
      const uint8* from  = row(p, tile, base_, 0);
#pragma unroll
      for (int i = 0; i < kOwnUnits; ++i) {
        if constexpr (!kIsNvfp4) bytes_[i] = {0, 0, 0, 0};  // of NVFP4, scales of zero suffice: codes are finite
        if (there) bytes_[i] = load_unit(from, first_unit() + i * kAcross);
      }
      if constexpr (kIsNvfp4) {
#pragma unroll
        for (int i = 0; i < kScaleWords; ++i) scales_[i] = 0;
        if (there) load_scales(p, tile);
      }
    }
    // Stores to where Raw::first_chunk() of the tile stands.
    __device__ __forceinline__ void store(uint32 to) const {
#pragma unroll
      for (int i = 0; i < kOwnUnits; ++i) {
        const uint32 words[4] = {bytes_[i].x, bytes_[i].y, bytes_[i].z, bytes_[i].w};
        uint32 two = 0;
        if constexpr (kIsNvfp4) two = decode_scales(scales_of(i));
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
          if ((i * kAcross * kChunks + c) * 8 >= kHeadDim) break;
          const uint32 scale = c < 2 ? twice<false>(two) : twice<true>(two);
          const uint4  chunk = kIsNvfp4 ? expand_e2m1(words[c], scale) : expand_e4m3(words[2 * c], words[2 * c + 1]);
          ptx::st_shared(chunk_at(to, i * kAcross * kChunks + c, 0), chunk);
        }
      }
    }
    // 16-bit floats stay what they are: no registers in between.
    __device__ __forceinline__ static void copy(const Operands& p, const Tile& tile, uint32 to) {
      const uint8* base = (kSide == kValues ? p.v + tile.head * p.v_head_stride
                                            : p.k + tile.head * p.k_head_stride) + first_unit() * 16;
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const bool   there = tile.has(p, i);
        const uint8* from  = row(p, tile, base, i);
#pragma unroll
        for (int j = 0; j < kUnits; j += kAcross) {
          if (kUnits % kAcross != 0 && j + first_unit() >= kUnits) break;
          ptx::copy_or_clear<16, false>(chunk_at(to, j, i), from + j * 16, there);
        }
      }
    }
    // Returns where a lane's first chunk stands in a tile.
    __device__ __forceinline__ static uint32 first_chunk() {
      const int token = Tile::first_of_lane(), chunk = first_unit() * kChunks;
      return chunk / 8 * kBlockBytes + token * 128 + ((chunk % 8 ^ token % 8) * 16);
    }

   private:
    static constexpr int  kChunks = 16 / kCacheBits;  // of 16 bytes that 16 bytes become
    static constexpr bool kByFour = kSide == kValues && kInterleaved;
    static constexpr int  kOwnUnits   = kUnits / kAcross;
    static constexpr int  kScaleWords = kByFour ? 2 * kOwnUnits : (kUnits + 1) / 2;
    static_assert(kIsHalf || kUnits % kAcross == 0, "lanes that share a row have as much of it");

    __device__ __forceinline__ static int first_unit() { return ptx::thread_index() % kWarp / 8 % kAcross; }
    __device__ __forceinline__ static const uint8* row(const Operands& p, const Tile& tile, const uint8* base, int i) {
      const uint8* page =
          ptx::mad_wide(tile.page_of<kSide>(i), kSide == kValues ? p.v_page_stride : p.k_page_stride, base);
      return ptx::mad_wide(tile.slot[i], kSide == kValues ? p.v_token_stride : p.k_token_stride, page);
    }
    // Loads unit i of a row, of which the last may be a half.
    __device__ __forceinline__ static uint4 load_unit(const uint8* row, int i) {
      if constexpr (kRowBytes % 16 == 0) return ptx::ld<uint4>(row + i * 16);
      const uint2 lower = ptx::ld<uint2>(row + i * 16);
      if (i * 16 + 8 >= kRowBytes) return {lower.x, lower.y, 0, 0};
      const uint2 upper = ptx::ld<uint2>(row + i * 16 + 8);
      return {lower.x, lower.y, upper.x, upper.y};
    }
    // The scales of a row's blocks. Interleaved, four tokens' scales of a block are neighbours, in rows of kScaleBytes
    // over all blocks of the four: a word for each block.
    __device__ __forceinline__ void load_scales(const Operands& p, const Tile& tile) {
      const uint8* page = ptx::mad_wide(
          tile.page_of<kSide>(0), kSide == kValues ? p.v_scales_page_stride : p.k_scales_page_stride, scale_base_);
      const int stride = kSide == kValues ? p.v_scales_token_stride : p.k_scales_token_stride, slot = tile.slot[0];
      if constexpr (!kByFour && (kScaleBytes & (kScaleBytes - 1)) == 0) {
        ld_halves<kUnits>(ptx::mad_wide(slot, stride, page), scales_);
      } else if constexpr (!kByFour) {
        ptx::RowBytes<kScaleBytes> bytes;
        bytes.load(ptx::mad_wide(slot, stride, page), true);
#pragma unroll
        for (int i = 0; i < kScaleWords; ++i) scales_[i] = bytes.word(i);
      } else {
#pragma unroll
        for (int i = 0; i < kScaleWords; ++i) {
          const int block = 2 * (first_unit() + i / 2 * kAcross) + i % 2;
          const int at = 4 * block, row = slot / 4 * 4 + at / kScaleBytes;
          scales_[i] = ptx::ld<uint32>(ptx::mad_wide(row, stride, page) + at % kScaleBytes);
        }
      }
    }
    // Returns those of the two blocks of unit i.
    __device__ __forceinline__ uint32 scales_of(int i) const {
      if constexpr (!kByFour && kAcross == 1) return scales_[i / 2] >> i % 2 * 16;
      if constexpr (!kByFour) return scales_[i] >> first_unit() * 16;
      return __byte_perm(scales_[2 * i], scales_[2 * i + 1], ptx::thread_index() % 4 * 0x11 + 0x40);
    }
    // Returns where the lane's load i puts a chunk.
    __device__ __forceinline__ static uint32 chunk_at(uint32 first, int chunk, int i) {
      return (first ^ chunk % 8 * 16) + chunk / 8 * kBlockBytes + i * (kGroup * 128);
    }

    int head_ = -1;
    const uint8 *base_, *scale_base_;  // of that head
    uint4  bytes_[kIsHalf ? 1 : kOwnUnits] = {};
    uint32 scales_[kScaleWords];
  };
};

// ---- attention/scales ------------------------------------------------------
// The factors around a softmax in powers of two: of queries before it, of outputs behind it.
constexpr float kLog2E = 1.44269504f;

// From products of queries and keys to exponents of two. `unit` is the number that stands for 1 in keys.
template <class Operands> __device__ __forceinline__ float logit_scale(const Operands& p, float unit) {
  return p.bmm1 * (p.bmm1_tensor ? *p.bmm1_tensor : 1.0f) * (kLog2E / unit);
}
// Of outputs. `unit` is the number that stands for 1 in values.
template <class Operands> __device__ __forceinline__ float output_scale(const Operands& p, float unit) {
  return p.bmm2 * (p.bmm2_tensor ? *p.bmm2_tensor : 1.0f) / unit;
}

// The biased exponent of the power of two that brings a row of queries near 2^14, by its largest magnitude: a float16
// then keeps all bits of bfloat16 values over 28 binades. 254 minus it is that of the inverse.
__device__ __forceinline__ uint32 query_exponent(float amax) { return min(268 - (__float_as_uint(amax) >> 23), 253u); }

// ---- attention/ending ------------------------------------------------------
// The end of a query row: where its outputs go, its sink, its lse, and its outputs as they are stored.
struct OutputRow {
  int   head;
  int64 at;  // among the rows of all heads and query tokens

  // Is that of query token `token` of request r, and head `in_group` of those that share a KV head.
  template <class Operands, class Request>
  __device__ __forceinline__ OutputRow(const Operands& p, const Request& r, int kv_head, int token, int in_group)
      : head(kv_head * p.group + in_group), at(int64(r.q_begin + token) * p.kv_heads * p.group + head) {}
};

// Stores the lse of a row, base two, if this lane `stores` it: -inf for a row that sees no token. Its weights are
// 2^(x - reference), and `sum` is that of all. The sink of a head is one more logit, whose token has no value. Returns
// what sums of weighted values are multiplied by: `scale` over the sum, 0 for a row that sees no token.
template <class Operands>
__device__ __forceinline__ float end_row(
    const Operands& p, const OutputRow& row, bool stores, float scale, float reference, float sum) {
  if (p.sinks) {
    const float sink = p.sinks[row.head] * kLog2E, top = fmaxf(sink, reference);
    const float factor = ptx::ex2_approx(reference - top);
    sum = fmaf(sum, factor, ptx::ex2_approx(sink - top)), reference = top;
    scale *= factor;
  }
  if (p.lse && stores) p.lse[row.at] = sum == 0.0f ? __uint_as_float(0xFF800000u) : reference + log2f(sum);
  return sum == 0.0f ? 0.0f : scale / sum;
}

// Makes two neighbouring outputs what is stored: 16 bits or 32.
template <class Out> __device__ __forceinline__ uint32 to_outputs(float a, float b) {
  if constexpr (sizeof(Out) == 1) return encode_e4m3(a) | uint32(encode_e4m3(b)) << 8;
  else return to_pair<Out>(a, b);
}
template <class Out> __device__ __forceinline__ void store_outputs(Out* out, float2 v) {
  using Two = Select<sizeof(Out) == 1, uint16, uint32>;
  *reinterpret_cast<Two*>(out) = Two(to_outputs<Out>(v.x, v.y));
}
template <class Out> __device__ __forceinline__ void store_outputs(Out* out, float4 v) {
  const uint32 a = to_outputs<Out>(v.x, v.y), b = to_outputs<Out>(v.z, v.w);
  if constexpr (sizeof(Out) == 1) *reinterpret_cast<uint32*>(out) = a | b << 16;
  else *reinterpret_cast<uint2*>(out) = {a, b};
}

// ---- attention/team --------------------------------------------------------
// Four lanes have a pair each of four blocks; then each has a block, in the order of the lanes.
__device__ __forceinline__ void exchange(uint32 (&w)[4], int c) {
#pragma unroll
  for (int bit = 1; bit < 4; bit *= 2) {
    const bool upper = c & bit;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (j & bit) continue;
      const uint32 other = __shfl_xor_sync(~0u, upper ? w[j] : w[j + bit], bit);
      if (upper) w[j] = other;
      else w[j + bit] = other;
    }
  }
}

// The query rows of a team, their weights and their ending. Config is that of attention/prefill_wgmma.
template <class Config> struct Team {
  using Operands = typename Config::Operands;
  using Query    = typename Config::Query;
  using Out      = typename Config::Out;
  using Mma      = typename Config::Mma;
  using Mask     = typename Config::Mask;
  using Item     = typename Work<Config>::Item;
  static constexpr int   kHeadDim = Config::kHeadDim, kWidth = Config::kWidth, kTile = Config::kTile;
  static constexpr int   kTeamRows = Config::kTeamRows, kWarps = Config::kWarps, kWords = kTile / 32;
  static constexpr int   kOwnTokens = Expansion<Config>::kOwnTokens;
  static constexpr bool  kIsNvfp4 = Expansion<Config>::kIsNvfp4;
  static constexpr float kUnit = Expansion<Config>::kUnit;

  using State   = Softmax<1, kTile, kWidth, false>;
  using Weights = uint32[kTile / 16][4];

  // Returns whether a row has these eight of kWidth elements.
  __device__ __forceinline__ static bool is_own(int eight) { return kHeadDim == kWidth || eight * 8 < kHeadDim; }

  // Says which tokens of a tile have no page.
  struct Absent {
    uint32 words[kWarps];  // of kOwnTokens

    __device__ __forceinline__ explicit Absent(const uint32* from) {
#pragma unroll
      for (int i = 0; i < kWarps; ++i) words[i] = from[i];
    }
    __device__ __forceinline__ bool any() const {
      uint32 all = 0;
#pragma unroll
      for (int i = 0; i < kWarps; ++i) all |= words[i];
      return all != 0;
    }
    // Sets a bit for each token that has a page.
    __device__ __forceinline__ void complement(uint32 (&there)[kWords]) const {
      constexpr int kOf = 32 / kOwnTokens;
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        there[w] = ~words[w * kOf];
#pragma unroll
        for (int i = 1; i < kOf; ++i) there[w] ^= words[w * kOf + i] << i * kOwnTokens;
      }
    }
  };

  struct Rows {
    int   team;          // of the cluster
    int   inner, width;  // the tiles that all rows of the warp see in full begin at `inner` or up to `width` behind it
    typename State::Scales scales;

    __device__ __forceinline__ Rows(const Operands& p, const Item& item, int team) : team(team) {
      const int row = first_row(item);
      inner = Work<Config>::seen_by(p, item.request, row + 15).first;
      width = item.end_for_all(p, item.request, Work<Config>::seen_by(p, item.request, row).end) - kTile - inner;
    }
    // Returns that of this warp, in the request.
    __device__ __forceinline__ int first_row(const Item& item) const {
      return item.row + team * kTeamRows + ptx::thread_index() / kWarp % 4 * 16;
    }

    __device__ __forceinline__ bool see_all(int start) const {
      return width >= 0 && uint32(start - inner) <= uint32(width);
    }

    // Not in the registers of a lane: where its rows stand.
    __device__ __forceinline__ void mask(
        const Operands& p, const Item& item, int start, const Absent& absent, typename State::Logits& s) const {
      const int lane = ptx::thread_index() % kWarp, row = first_row(item) + lane / 4;
      uint32 there[kWords];
      absent.complement(there);
      State::hide(s, lane, [&](int, int i) {
        return Seen(p, item.request, (row + 8 * i) / p.group, p.causal, static_cast<const Mask&>(item), start, there);
      });
    }

    // The warp's rows to shared memory, as K's columns lie. As float16, a row is brought near 2^14 by a power of two,
    // which keeps all bits of bfloat16 over 28 binades. Two lanes have a row.
    __device__ __forceinline__ void load(const Operands& p, const Item& item, uint8* to) {
      constexpr int kEights = kWidth / 16;  // of a lane
      const int lane = ptx::thread_index() % kWarp, row = first_row(item), own = row + lane / 2;
      const Query* from = p.q + int64(item.request.q_begin + own / p.group) * p.q_token_stride +
                          (item.head * p.group + own % p.group) * p.q_head_stride + lane % 2 * (kWidth / 2);
      const bool used = own < item.request.q_len * p.group;
      constexpr int kWords = sizeof(Query) == 1 ? 2 : 4;
      uint32 x[kEights][kWords];
      float  amax = 0.0f, v[8];
#pragma unroll
      for (int i = 0; i < kEights; ++i) {
#pragma unroll
        for (int j = 0; j < kWords; ++j) x[i][j] = 0;
        if (used && is_own(lane % 2 * kEights + i)) ld_halves<2 * kWords>(from + 8 * i, x[i]);
        get(x[i], v);
#pragma unroll
        for (int j = 0; j < 8; ++j) amax = fmaxf(amax, fabsf(v[j]));
      }
      amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, 1));
      const float    unit     = logit_scale(p, kUnit);
      const uint32   exponent = kIsBf16<Mma> ? 127u : query_exponent(amax);
      const float    factor   = copysignf(__uint_as_float(exponent << 23), unit);  // a scale is positive
      const float    back     = fmaxf(fabsf(unit) * __uint_as_float((254 - exponent) << 23), 0x1p-126f);
      const uint32   line     = ptx::shared_address(to) + (row - item.row) % kTeamRows * 128 + lane / 2 * 128;
#pragma unroll
      for (int i = 0; i < kEights; ++i) {
        const int chunk = lane % 2 * kEights + i;
        get(x[i], v);
#pragma unroll
        for (int j = 0; j < 8; ++j) v[j] *= factor;
        const uint4 pairs =
            kIsNvfp4 ? uint4{to_pair<Mma>(v[0], v[4]), to_pair<Mma>(v[1], v[5]), to_pair<Mma>(v[2], v[6]),
                             to_pair<Mma>(v[3], v[7])}
                     : uint4{to_pair<Mma>(v[0], v[1]), to_pair<Mma>(v[2], v[3]), to_pair<Mma>(v[4], v[5]),
                             to_pair<Mma>(v[6], v[7])};
        ptx::st_shared(line + chunk / 8 * (kTeamRows * 128) + ((chunk % 8 ^ lane / 2 % 8) * 16), pairs);
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) scales.x[0][i] = __shfl_sync(~0u, back, lane / 4 * 2 + 16 * i);
    }

   private:
    template <int kWords> __device__ __forceinline__ static void get(const uint32 (&x)[kWords], float (&v)[8]) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if constexpr (sizeof(Query) == 1) {
          const uint32 two = decode_e4m3x2(uint16(x[i / 2] >> i % 2 * 16));
          v[2 * i] = low<f16>(two), v[2 * i + 1] = high<f16>(two);
        } else {
          using Half = Select<sizeof(Query) == 2, Query, f16>;
          v[2 * i] = low<Half>(x[i]), v[2 * i + 1] = high<Half>(x[i]);
        }
      }
    }
  };

  __device__ __forceinline__ static void to_weights(const float (&s)[kTile / 2], Weights& weights) {
#pragma unroll
    for (int i = 0; i < kTile / 4; ++i) weights[i / 4][i % 4] = to_pair<Mma>(s[2 * i], s[2 * i + 1]);
  }

  // Eight neighbours from four pairs: of an NVFP4 cache, pair i is dimensions i and i + 4.
  __device__ __forceinline__ static void store(Out* to, const uint32 (&w)[4]) {
    if constexpr (sizeof(Out) == 1) {
      const uint32 order = kIsNvfp4 ? 0x5140 : 0x5410;
      const uint32 a = __byte_perm(w[0], w[1], order), b = __byte_perm(w[2], w[3], order);
      *reinterpret_cast<uint2*>(to) =
          kIsNvfp4 ? uint2{__byte_perm(a, b, 0x5410), __byte_perm(a, b, 0x7632)} : uint2{a, b};
    } else {
      *reinterpret_cast<uint4*>(to) =
          kIsNvfp4 ? uint4{__byte_perm(w[0], w[1], 0x5410), __byte_perm(w[2], w[3], 0x5410),
                           __byte_perm(w[0], w[1], 0x7632), __byte_perm(w[2], w[3], 0x7632)}
                   : uint4{w[0], w[1], w[2], w[3]};
    }
  }

  // Writes the outputs of a warp's rows.
  __device__ __forceinline__ static void finish(
      const Operands& p, const Item& item, const Rows& rows, const State& state) {
    const int   lane = ptx::thread_index() % kWarp, c = lane % 4;
    const float unit = output_scale(p, kUnit);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int  at   = rows.first_row(item) + lane / 4 + 8 * i;
      const bool used = at < item.request.q_len * p.group;
      const OutputRow row(p, item.request, item.head, at / p.group, at % p.group);
      const float scale = end_row(p, row, used && c == 0, unit, state.reference[0][i], state.sum[0][i]);
      Out* out = p.out + row.at * kHeadDim;
#pragma unroll
      for (int block = 0; block < kWidth / 8; block += 4) {
        uint32 pairs[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float (&x)[4] = state.o[0][block + j];
          pairs[j] = to_outputs<Out>(x[2 * i] * scale, x[2 * i + 1] * scale);
        }
        exchange(pairs, c);
        if (used && is_own(block + c)) store(out + (block + c) * 8, pairs);
      }
    }
  }
};

// ---- attention/parts -------------------------------------------------------
// Items that are divided along their tokens: each warp leaves what it has of its 16 rows in the workspace, and the last
// one to arrive adds up all parts in the order of the tokens. Of what the workspace holds, a launch reads only what it
// wrote. The first counter numbers the parts that clusters take, the others are those of parts; they are zero between
// launches.
__device__ __forceinline__ uint4 to_words(float a, float b, float c, float d) {
  return {__float_as_uint(a), __float_as_uint(b), __float_as_uint(c), __float_as_uint(d)};
}

__device__ __forceinline__ float4 to_floats(uint4 v) {
  return {__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w)};
}

// Adds to references and sums of two rows those of another part of them.
__device__ __forceinline__ void add(float4& a, float4 b) {
  const float upper = fmaxf(a.x, b.x), lower = fmaxf(a.z, b.z);
  a = {upper, fmaf(a.y, ptx::ex2_approx(a.x - upper), b.y * ptx::ex2_approx(b.x - upper)),
       lower, fmaf(a.w, ptx::ex2_approx(a.z - lower), b.w * ptx::ex2_approx(b.z - lower))};
}

// Config is that of attention/prefill_wgmma.
template <class Config> struct Parts {
  using Operands = typename Config::Operands;
  using Item     = typename Work<Config>::Item;
  using State    = typename Team<Config>::State;
  static constexpr int kTeams = Config::kTeams, kWidth = Config::kWidth, kMostParts = Work<Config>::kMostParts;

  static constexpr int kItemWarps = Config::kClusterCtas * kTeams * 4;
  static constexpr int kQuads     = kWidth / 8 + 1;  // 16 bytes of a lane, of a part: references and sums, then outputs
  static constexpr int kAtOnce    = kTeams == 2 && kWidth == 128 ? 16 : 8;  // quads on their way, as registers allow
  static constexpr int kStep      = kItemWarps * kQuads * kWarp;  // from a part to the next

  // Adds up the sums of `count` parts; `parts` are the lane's quads of the first.
  __device__ __forceinline__ static void add_up(State& state, const uint4* parts, int count) {
    const auto load = [&](int part, int quad) {
      return to_floats(ptx::ld<uint4>(parts + part * kStep + quad * kWarp));
    };
    // The four lanes of a row take the parts' references and sums in turn.
    float4 heads[kMostParts / 4];
#pragma unroll
    for (int i = 0; i < kMostParts / 4; ++i) {
      const int part = 4 * i + ptx::thread_index() % 4;
      heads[i] = {kNone, 0.0f, kNone, 0.0f};
      if (part < count) heads[i] = load(part, 0);
    }
    float4 all = heads[0];
#pragma unroll
    for (int i = 1; i < kMostParts / 4; ++i) add(all, heads[i]);
#pragma unroll
    for (int lane = 1; lane < 4; lane *= 2) {
      add(all, {__shfl_xor_sync(~0u, all.x, lane), __shfl_xor_sync(~0u, all.y, lane), __shfl_xor_sync(~0u, all.z, lane),
                __shfl_xor_sync(~0u, all.w, lane)});
    }
    auto& reference = state.reference[0];
    auto& sum = state.sum[0];
    reference[0] = all.x, sum[0] = all.y, reference[1] = all.z, sum[1] = all.w;
#pragma unroll
    for (int first = 0; first < kWidth / 8; first += kAtOnce) {
      for (int part = 0; in_all(part < count); ++part) {
        const float4 head = load(part, 0);
        float4 v[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) v[i] = load(part, first + i + 1);
        const float upper = ptx::ex2_approx(head.x - all.x), lower = ptx::ex2_approx(head.z - all.z);
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          float (&o)[4] = state.o[0][first + i];
          o[0] = fmaf(v[i].x, upper, o[0]), o[1] = fmaf(v[i].y, upper, o[1]);
          o[2] = fmaf(v[i].z, lower, o[2]), o[3] = fmaf(v[i].w, lower, o[3]);
        }
      }
    }
  }

  // Puts a part to the others of its item. Returns whether it was the last; then this warp has the sums of all.
  __device__ __forceinline__ static bool join(const Operands& p, const Item& item, int team, State& state) {
    const int lane = ptx::thread_index() % kWarp;
    const int warp = (rank_in_cluster<Config::kClusterCtas>() * kTeams + team) * 4 + ptx::thread_index() / kWarp % 4;
    uint4* const parts = reinterpret_cast<uint4*>(p.workspace) +
                         (int64(item.place) * kItemWarps + warp) * (kQuads * kWarp) + lane;
    uint4* const own = parts + item.part * kStep;
    own[0] = to_words(state.reference[0][0], state.sum[0][0], state.reference[0][1], state.sum[0][1]);
#pragma unroll
    for (int i = 0; i < kWidth / 8; ++i) {
      const float (&o)[4] = state.o[0][i];
      own[(i + 1) * kWarp] = to_words(o[0], o[1], o[2], o[3]);
    }
    __syncwarp();
    bool last = false;
    if (lane == 0) {
      uint32* const counter = p.counters + 1 + item.place * kItemWarps + warp;
      last = ptx::atom_add_acq_rel(counter, 1) == item.parts - 1;
      if (last) *counter = 0;  // for the next launch
    }
    __syncwarp();
    if (!__any_sync(~0u, last)) return false;
    state.clear();
    add_up(state, parts, item.parts);
    return true;
  }
};

// ---- spec ------------------------------------------------------------------
using Query = bf16;
using Out   = bf16;
struct Operands {
  const Query* q;
  const uint8* k;
  const uint8* v;
  const uint8* k_scales;
  const uint8* v_scales;
  const int32* tables;
  const int32* seq_lens;
  const int32* page_ends;
  const int32* cum_q;
  const float* sinks;
  const float* bmm1_tensor;
  const float* bmm2_tensor;
  Out* out;
  float* lse;
  float bmm1;
  float bmm2;
  int batch;
  int kv_heads;
  int group;
  int q_len;
  int total_q;
  int num_pages;
  int page;
  int max_pages;
  int window_left;
  int64 q_token_stride;
  int64 q_head_stride;
  int k_page_stride;
  int k_token_stride;
  int64 k_head_stride;
  int v_page_stride;
  int v_token_stride;
  int64 v_head_stride;
  int k_scales_page_stride;
  int k_scales_token_stride;
  int64 k_scales_head_stride;
  int v_scales_page_stride;
  int v_scales_token_stride;
  int64 v_scales_head_stride;
  int table_stride;
  int v_table;
  int causal;
  uint8* workspace;
  uint32* counters;
  int most_parts;
  float soft_cap;
  const uint8* mask;
  const int32* mask_ends;
  int64 mask_bytes;
  int mask_row_bytes;
};

struct Config {
  using Operands = ::Operands;
  using Query    = ::Query;
  using Out      = ::Out;
  using Mma      = f16;  // what K, V, the queries and the weights are in products
  using Mask     = Select<true, TokenMask, NoMask>;
  static constexpr int kCacheBits = 4;  // of an element of K and V
  static constexpr int  kHeadDim     = 128;
  static constexpr int  kWidth       = 128;  // of rows in shared memory and of outputs, with zeros
  static constexpr bool kInterleaved = false;  // V's scales, by four tokens
  static constexpr bool kSoftCap     = false;  // logits are capped
  static constexpr bool kTwoTables   = false;   // K and V have pages of their own
  static constexpr int  kTile        = 64;   // tokens
  static constexpr int  kTeams       = 2;  // consumer warpgroups
  static constexpr int  kStages      = 2;  // tiles of K, and of V, in shared memory
  static constexpr bool kTurns       = true;  // teams start their products in turn
  static constexpr int  kProducers   = 1;  // producer warpgroups
  static constexpr int  kClusterCtas        = 2;  // of a cluster

  static constexpr int kTeamRows  = 64;
  static constexpr int kRows      = kClusterCtas * kTeams * kTeamRows;  // of an item
  static constexpr int kConsumers = kTeams * 128;  // threads
  static constexpr int kThreads   = kConsumers + kProducers * 128;
  static constexpr int kProducerRegisters = 80, kConsumerRegisters = 208;

  static constexpr int kRowBytes   = kHeadDim * kCacheBits / 8, kScaleBytes = kCacheBits == 4 ? kHeadDim / 16 : 0;
  static constexpr int kBlocks     = kWidth / 64;  // of columns: 128 bytes of 16-bit floats
  static constexpr int kBlockBytes = kTile * 128;
  static constexpr int kSteps      = kTile / 16;

  // A group of producer warps takes a tile of K or V. Groups have one of the two, and its tiles in turn, if there are
  // enough of them.
  static constexpr int kWarps  = 2;  // of a group
  static constexpr int kGroups = kProducers * 4 / kWarps;
  static constexpr int kSides  = kClusterCtas == 1 ? 2 : 1;  // that a CTA expands
  static constexpr int kEvery  = kGroups > kSides ? kGroups / kSides : 1;  // tiles from one of a group to its next
};
using Item    = Work<Config>::Item;
using Places  = Work<Config>::Places;
using Tile    = Expansion<Config>::Tile;
using Tiles   = Expansion<Config>::Tiles;
using Absent  = Team<Config>::Absent;
using Rows    = Team<Config>::Rows;
using State   = Team<Config>::State;
using Weights = Team<Config>::Weights;
using Stage   = Ring<Config::kStages>;

// ---- shared memory ---------------------------------------------------------
struct alignas(1024) Shared {  // the 128-byte swizzle repeats every 1024 bytes
  uint8   q[Config::kTeams][Config::kBlocks * Config::kTeamRows * 128];
  uint8   tiles[2][Config::kStages][Config::kBlocks * Config::kBlockBytes];
  uint32  absent[Config::kStages][Config::kWarps];  // a bit for each token without a page, by the warp that has it
  Barrier full[2][Config::kStages], empty[2][Config::kStages];
  Places  places;
};
static_assert(sizeof(Shared) == 100352, "the launch counts on it");

enum NamedBarrier { kTeamBarrier = 1, kTurnBarrier = 5 };  // one for each team

// ---- producers -------------------------------------------------------------
// K or V of one tile after the other, by one group of warps.
template <Side kSide> class Producer {
  using Raw = Expansion<Config>::Raw<kSide>;

 public:
  __device__ __forceinline__ Producer(const Operands& p, Shared& shared)
      : p_(p), shared_(shared), to_(ptx::shared_address(shared.tiles[kSide]) + Raw::first_chunk()),
        own_(__shfl_sync(~0u, Tile::first_of_warp(), 0)) {}

  // Starts to load what put() then stores; 16-bit floats are on their way to shared memory.
  __device__ __forceinline__ void load(const Tile& tile, const Stage& stage) {
    if constexpr (kSide == kKeys) absent_ = tile.absent(p_);
    if constexpr (Config::kCacheBits < 16) raw_.load(p_, tile);
    else Raw::copy(p_, tile, take(stage));
  }
  __device__ __forceinline__ void put(const Stage& stage) {
    if constexpr (Config::kCacheBits < 16) raw_.store(take(stage));
    else ptx::copy_async_wait();
  }
  // By one lane, when all lanes have fenced what they put.
  __device__ __forceinline__ void arrive(const Stage& stage) {
    uint32* const absent = &shared_.absent[stage.slot][own_ / Expansion<Config>::kOwnTokens];
    if constexpr (kSide == kKeys) *absent = absent_;
    ptx::mbarrier_arrive(&shared_.full[kSide][stage.slot]);
    if constexpr (Config::kClusterCtas == 2) share(stage, absent);
  }

 private:
  // Does the same to the other CTA of the cluster.
  __device__ __forceinline__ void share(const Stage& stage, const uint32* absent) {
    constexpr uint32 kOther = 1 - kSide, kBytes = Expansion<Config>::kOwnTokens * 128;
    const uint32 full = ptx::cluster_address(&shared_.full[kSide][stage.slot], kOther);
    const uint8* tile = shared_.tiles[kSide][stage.slot] + own_ * 128;
    const uint32 from = ptx::shared_address(tile), to = ptx::cluster_address(tile, kOther);
    ptx::mbarrier_arrive_expect_at(full, Config::kBlocks * kBytes + (kSide == kKeys ? sizeof(absent_) : 0));
#pragma unroll
    for (int i = 0; i < Config::kBlocks; ++i) {
      ptx::copy_shared(to + i * Config::kBlockBytes, from + i * Config::kBlockBytes, kBytes, full);
    }
    if constexpr (kSide == kKeys) ptx::st_async(ptx::cluster_address(absent, kOther), absent_, full);
  }
  // Waits until everybody is through with a slot, and returns where this lane stores to.
  __device__ __forceinline__ uint32 take(const Stage& stage) const {
    ptx::mbarrier_wait(&shared_.empty[kSide][stage.slot], stage.parity ^ 1);
    return to_ + stage.slot * sizeof(shared_.tiles[0][0]);
  }

  const Operands& p_;
  Shared& shared_;
  const uint32 to_;
  const int    own_;  // this warp's first token
  uint32 absent_;     // bits of its tokens
  Raw raw_;
};

// Produces every tile from `first` on that this group takes.
template <bool kHasKeys, bool kHasValues>
__device__ __forceinline__ void produce(const Operands& p, Shared& shared, int first) {
  const bool finds = kHasKeys && __shfl_sync(~0u, threadIdx.x / kWarp, 0) == Config::kConsumers / kWarp;
  Tiles tiles(p, shared.places, first, finds);
  Tile  tile;
  if (!tiles.next(tile)) return;
  Producer<kKeys>   keys(p, shared);
  Producer<kValues> values(p, shared);
  Stage stage;
  for (int i = 0; i < first; ++i) stage.advance();
  if constexpr (kHasKeys) keys.load(tile, stage);
  if constexpr (kHasValues) values.load(tile, stage);
  for (bool more = true; more;) {
    more = tiles.next(tile);
    if constexpr (kHasKeys) keys.put(stage);
    if constexpr (kHasValues) values.put(stage);
    ptx::fence_proxy_async();
    __syncwarp();
    if (ptx::elect_one()) {
      if constexpr (kHasKeys) keys.arrive(stage);
      if constexpr (kHasValues) values.arrive(stage);
    }
#pragma unroll
    for (int i = 0; i < Config::kEvery; ++i) stage.advance();
    if (more) {
      if constexpr (kHasKeys) keys.load(tile, stage);
      if constexpr (kHasValues) values.load(tile, stage);
    }
  }
}

// ---- consumers -------------------------------------------------------------
// One warp of a team.
struct Consumer {
  const Operands& p;
  Shared& shared;
  int  team;
  Stage keys, values;

  // s = q k of the next tile; under way until a wait. Returns which of its tokens are absent.
  __device__ __forceinline__ Absent start_scores(float (&s)[Config::kTile / 2]) {
    ptx::mbarrier_wait(&shared.full[kKeys][keys.slot], keys.parity);
    const Absent absent(shared.absent[keys.slot]);
    uint32 rows = ptx::shared_address(shared.q[team]);
    if constexpr (Config::kWidth > 128) asm volatile("" : "+r"(rows));  // else registers keep what follows from it
    const uint64 q = ptx::wgmma_matrix(rows, Config::kTeamRows * 128);
    const uint64 k = ptx::wgmma_matrix(ptx::shared_address(shared.tiles[kKeys][keys.slot]), Config::kBlockBytes);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < Config::kHeadDim / 16; ++i) {
      ptx::wgmma_scores(s, q + i / 4 * (Config::kTeamRows * 8) + i % 4 * 2,
                        k + i / 4 * (Config::kBlockBytes / 16) + i % 4 * 2, i > 0);
    }
    ptx::wgmma_commit();
    return absent;
  }
  // o += weights v of the next tile; under way until a wait.
  __device__ __forceinline__ void start_outputs(float (&o)[Config::kWidth / 2], const Weights& weights) {
    ptx::mbarrier_wait(&shared.full[kValues][values.slot], values.parity);
    const uint64 v = ptx::wgmma_matrix(ptx::shared_address(shared.tiles[kValues][values.slot]), Config::kBlockBytes);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < Config::kSteps; ++i) ptx::wgmma_outputs(o, weights[i], v + i * 128);
    ptx::wgmma_commit();
  }
  __device__ __forceinline__ void release(Side side, Stage& stage) {
    __syncwarp();
    if (threadIdx.x % kWarp == 0) {
      Barrier* const empty = &shared.empty[side][stage.slot];
      if constexpr (Config::kClusterCtas == 1) ptx::mbarrier_arrive(empty);
      else ptx::mbarrier_arrive_at(ptx::cluster_address(empty, side));  // who expands it
    }
    stage.advance();
  }
  // Teams start products one after the other, so that one's softmax falls into the products of the others. The number
  // of the barrier is a constant in each branch, and takes no register.
  __device__ __forceinline__ void take_turn() const {
#pragma unroll
    for (int i = 0; i < Config::kTeams; ++i) {
      if (Config::kTurns && team == i) ptx::barrier_sync(kTurnBarrier + i, 256);
    }
  }
  __device__ __forceinline__ void pass_turn() const {
    if constexpr (Config::kTurns) ptx::barrier_arrive(kTurnBarrier + (team + 1) % Config::kTeams, 256);
  }

  // The scores of the tile at `start` to weights, while outputs of the tile before are under way if there is one.
  template <bool kFirst>
  __device__ __forceinline__ void weigh(
      const Rows& rows, const Item& item, int start, int left, const Absent& absent, State::Logits& s, Weights& weights,
      State& state) {
    ptx::wgmma_wait<kFirst ? 0 : 1>();
    fence_operand(flat(s));
    if constexpr (Config::kSoftCap) State::cap(p.soft_cap, s, rows.scales);
    if (absent.any() || !rows.see_all(start)) rows.mask(p, item, start, absent, s);
    release(kKeys, keys);
    const bool moved = state.refer(s, Config::kSoftCap ? State::Scales::ones() : rows.scales);
#pragma unroll
    for (int i = 0; i < Config::kTile / 8; ++i) state.weigh(0, s[0][i]);
    if constexpr (!kFirst) {
      fence_operand(flat(s));
      if (in_all(left <= kMostTokens)) {  // always; the compiler leaves the wait here: products run beside the weights
        ptx::wgmma_wait<0>();
        release(kValues, values);
        fence_operand(flat(state.o));
        if (moved) state.move();
      }
    }
    fence_operand(flat(s));
    Team<Config>::to_weights(flat(s), weights);
  }

  __device__ __forceinline__ void attend(const Rows& rows, const Item& item, int tiles, State& state) {
    State::Logits s;
    Weights weights;
    int start = __shfl_sync(~0u, item.start, 0);
    take_turn();
    const Absent absent = start_scores(flat(s));
    pass_turn();
    int left = tiles - 1;
    weigh<true>(rows, item, start, left, absent, s, weights, state);
    for (; in_all(left > 0); --left) {
      take_turn();
      const Absent absent = start_scores(flat(s));
      start_outputs(flat(state.o), weights);
      pass_turn();
      weigh<false>(rows, item, start += Config::kTile, left, absent, s, weights, state);
    }
    start_outputs(flat(state.o), weights);
    ptx::wgmma_wait<0>();
    release(kValues, values);
    fence_operand(flat(state.o));
  }
};

// ---- kernel ----------------------------------------------------------------
// Clears what is behind the rows of all tiles. Nobody writes it later.
__device__ __forceinline__ void clear_margins(Shared& shared) {
  constexpr int kMargin = (Config::kWidth - Config::kHeadDim) / 8;  // chunks of a row
  for (int i = threadIdx.x; i < 2 * Config::kStages * Config::kTile * kMargin; i += Config::kThreads) {
    const int row = i / kMargin, token = row % Config::kTile, chunk = Config::kHeadDim / 8 + i % kMargin;
    uint8* const tile = shared.tiles[0][0] + row / Config::kTile * sizeof(shared.tiles[0][0]);
    *reinterpret_cast<uint4*>(tile + chunk / 8 * Config::kBlockBytes + token * 128 + (chunk % 8 ^ token % 8) * 16) = {};
  }
  ptx::fence_proxy_async();
}

extern "C" __global__ void __launch_bounds__(Config::kThreads, 1) attention_prefill_wgmma_masked(
    const Query* __restrict__ q,            // [tokens, heads, D], rows aligned to 16 bytes (E4M3: 8)
    const uint8* __restrict__ k,            // rows aligned to 16 bytes
    const uint8* __restrict__ v,
    const uint8* __restrict__ k_scales,     // rows aligned to D / 16 bytes
    const uint8* __restrict__ v_scales,
    const int32* __restrict__ tables,       // [batch, max_pages], twice with v_table, or one list
    const int32* __restrict__ seq_lens,     // [batch]
    const int32* __restrict__ page_ends,    // [batch + 1], where requests end in the list; null: a row for each
    const int32* __restrict__ cum_q,        // [batch + 1]; null: q_len of each request
    const float* __restrict__ sinks,        // [heads] or null
    const float* __restrict__ bmm1_tensor,  // [1] or null: multiplies bmm1
    const float* __restrict__ bmm2_tensor,  // [1] or null: multiplies bmm2
    Out* __restrict__ out,                  // [tokens, heads, D]
    float* __restrict__ lse,                // [tokens, heads] or null; base 2
    float bmm1,
    float bmm2,
    int64 batch,
    int64 kv_heads,
    int64 group,                            // heads / kv_heads
    int64 q_len,
    int64 total_q,                          // tokens of q
    int64 num_pages,
    int64 page,                             // tokens
    int64 max_pages,                        // columns of tables, or the length of the list
    int64 window_left,                      // negative: none
    int64 q_token_stride,                   // elements
    int64 q_head_stride,
    int64 k_page_stride,                    // bytes, as all of the cache
    int64 k_token_stride,
    int64 k_head_stride,
    int64 v_page_stride,
    int64 v_token_stride,
    int64 v_head_stride,
    int64 k_scales_page_stride,
    int64 k_scales_token_stride,
    int64 k_scales_head_stride,
    int64 v_scales_page_stride,
    int64 v_scales_token_stride,
    int64 v_scales_head_stride,
    int64 table_stride,                     // elements
    int64 v_table,                          // elements from a request's K pages to its V pages
    int64 causal,                           // 0 or 1
    uint8* __restrict__ workspace,          // 16-byte aligned, of any content
    uint32* __restrict__ counters,          // zero between launches
    int64 most_parts,                       // that the workspace holds
    float soft_cap,                         // of logits
    const uint8* __restrict__ mask,         // [mask_bytes], the lowest bit of a byte first
    const int32* __restrict__ mask_ends,    // [batch + 1], bytes; null: rows of mask_row_bytes for each query
    int64 mask_bytes,
    int64 mask_row_bytes) {
  extern __shared__ uint8 dynamic[];
  Shared& shared = *reinterpret_cast<Shared*>(dynamic);
  const Operands p = {q, k, v, k_scales, v_scales, tables, seq_lens, page_ends, cum_q, sinks, bmm1_tensor, bmm2_tensor,
      out, lse, bmm1, bmm2, int(batch), int(kv_heads), int(group), int(q_len), int(total_q),
      int(num_pages), int(page), int(max_pages), int(window_left), q_token_stride, q_head_stride,
      int(k_page_stride), int(k_token_stride), k_head_stride, int(v_page_stride), int(v_token_stride),
      v_head_stride, int(k_scales_page_stride), int(k_scales_token_stride), k_scales_head_stride,
      int(v_scales_page_stride), int(v_scales_token_stride), v_scales_head_stride, int(table_stride),
      int(v_table), int(causal), workspace, counters, int(most_parts), soft_cap, mask, mask_ends,
      mask_bytes, int(mask_row_bytes)};
  const int team = __shfl_sync(~0u, threadIdx.x / 128, 0);  // the same in all lanes, as the compiler now sees

  if (threadIdx.x == 0) {
    for (int i = 0; i < 2 * Config::kStages; ++i) {
      ptx::mbarrier_init(&shared.full[0][0] + i, Config::kWarps);
      ptx::mbarrier_init(&shared.empty[0][0] + i, Config::kClusterCtas * Config::kTeams * 4);
    }
    for (Barrier& known : shared.places.known) ptx::mbarrier_init(&known, 1);
    if constexpr (Config::kClusterCtas == 2) ptx::fence_mbarrier_init();
  }
  if constexpr (Config::kHeadDim < Config::kWidth) clear_margins(shared);
  if constexpr (Config::kClusterCtas == 1) __syncthreads();
  else ptx::cluster_sync();
  ptx::griddep_wait();
  ptx::griddep_launch();
  if (team >= Config::kTeams) {
    ptx::registers_fewer<Config::kProducerRegisters>();
    const int group = __shfl_sync(~0u, (threadIdx.x - Config::kConsumers) / (Config::kWarps * kWarp), 0);
    const uint32 side = Config::kClusterCtas == 1 ? group % 2 : rank_in_cluster<Config::kClusterCtas>();
    const int first = group / Config::kSides;
    if constexpr (Config::kGroups < Config::kSides) produce<true, true>(p, shared, 0);
    else if (side == kKeys) produce<true, false>(p, shared, first);
    else produce<false, true>(p, shared, first);
    if constexpr (Config::kClusterCtas == 2) ptx::cluster_sync();
    return;
  }
  ptx::registers_more<Config::kConsumerRegisters>();
  Consumer consumer{p, shared, team, {}, {}};
  if (Config::kTurns && team == Config::kTeams - 1) consumer.pass_turn();
  Work<Config>::Items items(shared.places);
  while (true) {
    const Item& item = items.next();
    const int tiles = __shfl_sync(~0u, item.tiles, 0);
    if (!in_all(tiles > 0)) break;
    Rows rows(p, item, rank_in_cluster<Config::kClusterCtas>() * Config::kTeams + team);
    ptx::barrier_sync(kTeamBarrier + team, 128);  // the last item's queries are no longer read
    rows.load(p, item, shared.q[team]);
    ptx::fence_proxy_async();
    ptx::barrier_sync(kTeamBarrier + team, 128);
    State state;
    state.clear();
    consumer.attend(rows, item, tiles, state);
    state.close();
    if (in_all(item.parts > 1) && !Parts<Config>::join(p, item, team, state)) continue;
    Team<Config>::finish(p, item, rows, state);
  }
  if (Config::kTurns && team == 0) consumer.take_turn();  // the one that is left
  // The other CTA may still write to this one's shared memory.
  if constexpr (Config::kClusterCtas == 2) ptx::cluster_sync();
}

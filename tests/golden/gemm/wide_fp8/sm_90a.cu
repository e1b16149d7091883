// gemm_wide_fp8, generated from templates/gemm/wide_fp8.cu.j2
// spec: {"band":4,"cluster":1,"divided":false,"format":"nvfp4","gated":false,"out_dtype":"bf16","split":1,"tile_m":64}
//
// out [m, n] = x [m, k] times the transpose of an FP4 weight [n, k], in E4M3. On the tensor cores the weight is the
// left operand, decoded in registers, and x the right one, in shared memory. So rows of a product are rows of the
// weight, and the transpose of a product is written to out. With kGated, rows of the weight are gates of features and
// their ups, and out [m, n / 2] is silu(gate) * up.
//
// A CTA takes tiles of kTileN rows of the weight by kTileM rows of x, in steps of 128 columns. Two producer warps keep
// kWeightSlots steps of the weight and kSlots steps of x in flight. A consumer warpgroup has 64 rows of the weight: it
// decodes their next step, as E4M3, while the tensor cores multiply the current one. Sums of a tile stay in the tensor
// cores, which keep about 14 bits of them.
//
// CTAs are persistent, except those that split a tile: kSplit CTAs of a cluster each have a part of its columns, and
// add up their sums through shared memory, each for a part of the rows of x. kCluster CTAs share their rows of x: each
// has different rows of the weight, and copies a part of x for all. With kDivided, clusters share the last tiles.
// gemm/wide_schedule has three schedules.

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
}  // namespace ptx

// ---- gemm/fp8_products -----------------------------------------------------
// The matrix product of warpgroups, of E4M3. The tensor cores keep about 14 bits of its sums.
namespace ptx {
// d = a b, or d += a b, of a 64 x 32 by a 32 x n matrix, where n is twice the size of d; d as in gemm/products, and b
// as wgmma_tile() gives it. With g = lane / 4 and t = lane % 4, warp w of a warpgroup has in a[i] of row
// 16 w + g + 8 (i % 2) columns 4 t + 16 (i / 2) and the three after it. Neither may be accessed before a wait.
__device__ __forceinline__ void wgmma_e4m3(float (&d)[32], const uint32 (&a)[4], uint32 b, bool add) {
  asm volatile("{\n"
               "  .reg .pred add;\n"
               "  .reg .b64 b;\n"
               "  mov.b64 b, {%36, 0x40000040};\n"
               "  setp.ne.b32 add, %37, 0;\n"
               "  wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {"
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
               "}, {%32, %33, %34, %35}, b, add, 1, 1;\n"
               "}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
        , "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
        , "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23])
        , "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(int32(add)));
}
}  // namespace ptx

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

// ---- gemm/wide_place -------------------------------------------------------
// What a consumer holds of its tile, and where its 64 rows of the weight are.
using Fragments = uint32[4][4];  // 64 rows by 64 columns of the weight, in a warpgroup

struct Affine { float scale, bias; };  // of a row of the weight

// A consumer: the first row of its warpgroup in the weight, and the columns from its current step on.
struct Place {
  uint32 warp, lane, row;
  int32  columns;
};

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

// ---- gemm/wide_fp8_mainloop ------------------------------------------------
// Products of one thread of a consumer warpgroup. Rings of x and of the weight have slots of a step, 128 columns. Of
// each slot, producers complete a phase of its barrier in `full`, and all warps that read it one of that in `empty`.
template <class Shared, Format kFormat, int kTileM, int kCluster> struct Fp8Consumer {
  static constexpr int kSlots       = sizeof(Shared::full) / sizeof(Barrier);
  static constexpr int kWeightSlots = sizeof(Shared::weight_full) / sizeof(Barrier);
  using Sums = float[kTileM / 2];
  using Raw  = RawHalf<kFormat>;

  Shared& shared;
  uint32  group, warp, lane;
  uint32  exponents;  // of the scales of rows g and g + 8 of the warp
  Ring<kSlots>       ring;
  Ring<kWeightSlots> weight_ring;

  // Loads the next step, both halves of its columns.
  __device__ __forceinline__ void load(Raw (&raw)[2]) {
    ptx::mbarrier_wait(&shared.weight_full[weight_ring.slot], weight_ring.parity);
    const uint32 tile = ptx::shared_address(shared.weight[weight_ring.slot][group]);
    raw[0].load(tile, 0, warp, lane), raw[1].load(tile, 1, warp, lane);
  }
  __device__ __forceinline__ void decode(Fragments& a, const Raw (&raw)[2]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      raw[i / 2].decode(a[i][0], a[i][1], i % 2 * 2, exponents, lane);
      raw[i / 2].decode(a[i][2], a[i][3], i % 2 * 2 + 1, exponents, lane);
    }
  }
  // To be called after the fragments were used: only then are the loads complete for sure.
  __device__ __forceinline__ void release_weight() {
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(&shared.weight_empty[weight_ring.slot]);
    weight_ring.advance();
  }
  __device__ __forceinline__ void multiply(Sums& sums, const Fragments& a, bool add) {
    ptx::mbarrier_wait(&shared.full[ring.slot], ring.parity);
    const uint32 x = ptx::wgmma_tile(ptx::shared_address(shared.x[ring.slot]));
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < 4; ++i) ptx::wgmma_e4m3(sums, a[i], x + 2 * i, add || i > 0);
    ptx::wgmma_commit();
    release_weight();
    ring.advance();
  }
  // Frees the slot of x of the product that was issued kBack products ago, where 1 is the last.
  template <int kBack> __device__ __forceinline__ void release_x() {
    Barrier* b = &shared.empty[(ring.slot >= kBack ? ring.slot : ring.slot + kSlots) - kBack];
    if constexpr (kCluster == 1) {
      if (lane == 0) ptx::mbarrier_arrive(b);
    } else {
      if (lane < kCluster) ptx::mbarrier_arrive_at(ptx::cluster_address(b, lane));
    }
  }
  // Two sets of fragments: while the tensor cores read one, the other is filled.
  __device__ __forceinline__ void accumulate(Sums& sums, uint32 steps) {
    Fragments a, b;
    Raw raw[2];
    if (group > 0 && steps > 1) {  // half a step apart, they decode in turn
      Ring<kSlots> second = ring;
      second.advance();
      ptx::mbarrier_wait(&shared.full[second.slot], second.parity);
    }
    load(raw);
    decode(a, raw);
    for (uint32 done = 0;;) {
      multiply(sums, a, done > 0);
      const bool first = done == 0;
      if (++done == steps) break;
      load(raw);  // while the products start
      ptx::wgmma_wait<1>();  // b is free
      if (!first) release_x<2>();
      decode(b, raw);
      multiply(sums, b, true);
      if (++done == steps) break;
      load(raw);
      ptx::wgmma_wait<1>();  // a is free
      release_x<2>();
      decode(a, raw);
    }
    ptx::wgmma_wait<1>();
    if (steps > 1) release_x<2>();
    ptx::wgmma_wait<0>();
    release_x<1>();
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

// ---- gemm/fp8_results ------------------------------------------------------
// The sums of a warpgroup are multiplied by the scales of rows of x, and written.

// The scales of rows of x, from `row` on, of which there are m; they are `step` apart. A lane has every 32nd.
template <int kTileM> struct RowScales {
  static constexpr int kHeld = (kTileM + kWarp - 1) / kWarp;
  float held[kHeld];

  __device__ __forceinline__ RowScales(const float* scales, int64 step, uint32 row, int64 m, uint32 lane) {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      held[i] = ptx::ld_f32(scales + min(int64(row + 32 * i + lane), m - 1) * step);
    }
  }
  __device__ __forceinline__ void multiply(float (&sums)[kTileM / 2], uint32 lane) const {
#pragma unroll
    for (int i = 0; i < kTileM / 8; ++i) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float scale = __shfl_sync(~0u, held[i / 4], i % 4 * 8 + lane % 4 * 2 + j);
        sums[4 * i + j] *= scale, sums[4 * i + 2 + j] *= scale;
      }
    }
  }
};

// Where the results of a row of x and a row of the weight go; there are none of rows of the weight from n on. If
// these are gates and ups, two of them share a column.
struct Destination {
  const TensorMap& out;
  uint2 at;
  int64 n;
  bool  gated;

  __device__ __forceinline__ void store(uint32 row, const uint8* from) const {
    ptx::tma_store(out, gated ? at.y / 2 : at.y, at.x + row, ptx::shared_address(from));
    ptx::bulk_commit();
  }
};

// Writes the kParts parts of a warpgroup's results, in turn through two places in shared memory. `barrier` is the named
// barrier of the warpgroup. A place is free when the store before the last has read it: so a warpgroup without results
// stages none.
template <class Results, int kParts, int kPart = 0, int kPlaceBytes>
__device__ __forceinline__ void write_parts(uint8 (&places)[2][kPlaceBytes], const Destination& to,
                                            const typename Results::Sums& sums, int barrier, uint32 thread,
                                            Affine upper, Affine lower) {
  if constexpr (kPart < kParts) {
    if (to.at.y >= to.n) return;
    if (thread == 0) ptx::bulk_wait_read<1>();
    ptx::barrier_sync(barrier, 128);
    uint8* const rows = places[kPart % 2];
    Results::template stage<kPart>(ptx::shared_address(rows), sums, thread, upper, lower);
    ptx::fence_proxy_async();
    ptx::barrier_sync(barrier, 128);
    if (thread == 0) to.store(kPart * Results::kPartM, rows);
    write_parts<Results, kParts, kPart + 1>(places, to, sums, barrier, thread, upper, lower);
  }
}

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

// ---- spec ------------------------------------------------------------------
using Out = bf16;
constexpr Format kFormat   = Format::kNvfp4;
constexpr int kTileM       = 64;
constexpr int kCluster     = 1;
constexpr int kSplit       = 1;
constexpr bool kDivided    = false;
constexpr int kSlots       = 12;
constexpr int kWeightSlots = 12;
constexpr int kBandM       = 4;  // tiles along M that the weight is read for at a time
constexpr bool kGated      = false;  // rows of the weight are gates and ups

constexpr int kGroups    = 2;  // of 64 rows of the weight, one of each consumer warpgroup
constexpr int kConsumers = kGroups * 128, kThreads = kConsumers + 128;
constexpr int kConsumerRegisters = 232, kProducerRegisters = 40;

using Weight = Fp8Weight<Out, kFormat>;
constexpr int kTileN = kGroups * kTileRows;
constexpr int kCopyM = kTileM / kCluster;  // rows of x that a CTA copies
constexpr int kParts = 2, kPartM = kTileM / kParts;  // of the results of a warpgroup
using Results = WideResults<Out, kTileM, kParts, kGroups, 1, kSplit, kGated>;

// ---- shared memory ---------------------------------------------------------
struct alignas(1024) Shared {  // the 128-byte swizzle repeats every 1024 bytes
  uint8   x[kSlots][kTileM * kTileCols];
  uint8   results[kGroups][2][4096];  // of a part of a warpgroup
  uint8   weight[kWeightSlots][kGroups][Weight::kTileBytes];
  Barrier full[kSlots], empty[kSlots], weight_full[kWeightSlots], weight_empty[kWeightSlots];
};
constexpr int kTeamSums = kTileRows * kTileM * 4;  // bytes, of a warpgroup
static_assert(kSplit == 1 ? kPartM * kTileRows * 2 == sizeof(Shared::results[0][0])
                          : kCluster == 1 && !kDivided && kGroups * kTeamSums <= sizeof(Shared::x), "room for results");
static_assert(sizeof(Shared) == 226304, "the launch counts on it");

enum NamedBarrier { kTeamBarrier = 1, kConsumersBarrier = 3 };  // the first: one of each warpgroup

// ---- warp roles ------------------------------------------------------------
struct Config {
  static constexpr int kTileM = ::kTileM, kTileN = ::kTileN, kCluster = ::kCluster, kSplit = ::kSplit;
  static constexpr int kBandM = ::kBandM, kCommonN = 0;
};
using Schedule = WideSchedule<(kSplit > 1), kDivided, Config>;

__device__ __forceinline__ void produce_x(Shared& shared, Schedule schedule, const TensorMap& x) {
  const uint32 rank = kCluster == 1 ? 0 : ptx::cluster_rank();
  Ring<kSlots> ring;
  for (Work work; schedule.take(work);) {
    const uint32 row = schedule.place(work.tile).x + rank * kCopyM;
    for (uint32 step = work.begin; step < work.end; ++step, ring.advance()) {
      Barrier* full = &shared.full[ring.slot];
      uint8*   to   = shared.x[ring.slot] + rank * (kCopyM * kTileCols);
      ptx::mbarrier_wait(&shared.empty[ring.slot], ring.parity ^ 1);
      ptx::mbarrier_arrive_expect_tx(full, sizeof(shared.x[0]));
      if constexpr (kCluster == 1) ptx::tma_load(to, x, step * (kTileCols / 2), row, full);
      if constexpr (kCluster > 1) ptx::tma_multicast(to, x, step * (kTileCols / 2), row, full, (1 << kCluster) - 1);
    }
  }
}
__device__ __forceinline__ void produce_weight(Shared& shared, Schedule schedule, const Weight& weight) {
  Ring<kWeightSlots> ring;
  for (Work work; schedule.take(work);) {
    const uint32 row = schedule.place(work.tile).y;
    for (uint32 step = work.begin; step < work.end; ++step, ring.advance()) {
      Barrier* full = &shared.weight_full[ring.slot];
      ptx::mbarrier_wait(&shared.weight_empty[ring.slot], ring.parity ^ 1);
      ptx::mbarrier_arrive_expect_tx(full, sizeof(shared.weight[0]));
      weight.load(shared.weight[ring.slot], row, step, schedule.steps, full);
    }
  }
}

// ---- kernel ----------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kThreads, 1) gemm_wide_fp8(
    const __grid_constant__ TensorMap x,    // [m, k / 2] pairs of E4M3, boxes [kCopyM, 64]
    const float* __restrict__ x_scale,      // [m] or [1]
    const uint8* __restrict__ weight,       // [ceil(n / 64), ceil(k / 128), kTileBytes]
    const float* __restrict__ row_scale,    // [round_up(n, 64)], powers of two
    const float* __restrict__ alpha,        // [1]; null: 1
    const Out* __restrict__ bias,           // [n]; null: none
    uint8* __restrict__ workspace,          // of divided tiles, else null
    const __grid_constant__ TensorMap out,  // [m, n], boxes [kPartM, 64], or [m, n / 2], boxes [kPartM, 32]
    int64 m,
    int64 n,                                // a multiple of 8
    int64 k,                                // a multiple of 32
    int64 x_scale_step                      // from one row of x to the next: 1, or 0
) {
  extern __shared__ uint8 shared_bytes[];
  Shared& shared = *reinterpret_cast<Shared*>(shared_bytes);
  const uint32 number = __shfl_sync(~0u, threadIdx.x / kWarp, 0);
  const uint32 team = number / 4, warp = number % 4, lane = threadIdx.x % kWarp;
  const Weight given{weight, row_scale, bias, n};

  if (number == 0 && ptx::elect_one()) {
    ptx::prefetch_tensor_map(x);
    ptx::prefetch_tensor_map(out);
    for (int s = 0; s < kSlots; ++s) {
      ptx::mbarrier_init(&shared.full[s], 1);
      ptx::mbarrier_init(&shared.empty[s], 4 * kGroups * kCluster);
    }
    for (int s = 0; s < kWeightSlots; ++s) {
      ptx::mbarrier_init(&shared.weight_full[s], 1);
      ptx::mbarrier_init(&shared.weight_empty[s], 4 * kGroups);
    }
    ptx::fence_mbarrier_init();
  }
  if constexpr (kCluster == 1) __syncthreads();
  if constexpr (kCluster > 1) ptx::cluster_sync();
  ptx::griddep_launch();

  if (team == kGroups) {
    ptx::registers_fewer<kProducerRegisters>();
    if (warp == 0) {
      ptx::griddep_wait();
      if (ptx::elect_one()) produce_x(shared, Schedule(m, n, k), x);
    } else if (warp == 1) {  // the weight is not what the previous kernel writes
      if (ptx::elect_one()) produce_weight(shared, Schedule(m, n, k), given);
    }
  } else {
    ptx::registers_more<kConsumerRegisters>();
    ptx::griddep_wait();
    const float factor = alpha != nullptr ? ptx::ld_f32(alpha) : 1.0f;
    Schedule schedule(m, n, k);
    Fp8Consumer<Shared, kFormat, kTileM, kCluster> consumer{shared, team, warp, lane, 0, {}, {}};
    // Scales of rows, which decoding needs, are loaded a tile ahead.
    const int64 inside = team * kTileRows + warp * 16 + lane / 4;
    float2 next = given.scales(schedule.peek_row() + inside);
    for (Work work; schedule.take(work);) {
      uint2 at = schedule.place(work.tile);
      consumer.exponents = exponent_of<kFormat>(next.x) | exponent_of<kFormat>(next.y) << 16;
      const Affine upper = given.affine(at.y + inside, next.x * factor);
      const Affine lower = given.affine(at.y + inside + 8, next.y * factor);
      const RowScales<kTileM> scales(x_scale, x_scale_step, at.x, m, lane);
      next = given.scales(schedule.peek_row() + inside);
      at.y += team * kTileRows;
      const Destination to{out, at, n, kGated};
      Results::Sums sums;
      consumer.accumulate(sums, work.end - work.begin);
      const uint32 thread = ptx::thread_index() % 128;
      if constexpr (Schedule::kOneTile) {
        const uint32 part = ptx::cluster_rank();
        float* const shared_sums = reinterpret_cast<float*>(shared.x) + team * (kTeamSums / 4) + thread * 4;
        scales.multiply(sums, lane);
        ptx::barrier_sync(kConsumersBarrier, kConsumers);  // x is no longer read
#pragma unroll
        for (int i = 0; i < kTileM / 8; ++i) {
          if (i / (kPartM / 8) == part) continue;  // it adds these up itself
          *reinterpret_cast<float4*>(shared_sums + i * 512) = four(sums, i);
        }
        ptx::cluster_sync();
        uint8* const rows = shared.x[0] + team * kTeamSums + part * (kPartM * kTileRows * 4);  // room for these
        Results::stage_total<0>(part, 1, 0, shared_sums, ptx::shared_address(rows), sums, thread, upper, lower);
        ptx::fence_proxy_async();
        ptx::barrier_sync(kTeamBarrier + team, 128);
        if (thread == 0 && part < kParts) to.store(part * kPartM, rows);
        break;
      } else {
        const Exchange<kTileM, kGroups, kCluster, 16384> exchange(workspace, team, thread);
        if (kDivided && !schedule.complete(sums, work, exchange, kTeamBarrier + team, thread)) continue;
        scales.multiply(sums, lane);
        write_parts<Results, kParts>(shared.results[team], to, sums, kTeamBarrier + team, thread, upper, lower);
      }
    }
    if (ptx::thread_index() % 128 == 0) ptx::bulk_wait_read<0>();
    if constexpr (kSplit > 1) ptx::cluster_sync();  // others may still read this CTA's sums
  }
  if constexpr (kCluster > 1) ptx::cluster_sync();  // others may still write to this CTA's shared memory
}

// experts_stream_down, generated from templates/experts/stream_down.cu.j2
// spec: {"ctas":2,"dtype":"bf16","format":"nvfp4","warp_blocks":4,"warps":4}
//
// A product of a layer of experts, for few assignments of tokens to experts, with as many CTAs as fit on the GPU: the
// weights of the chosen experts flow through each CTA in one stream from its first unit of work to its last.
//
// Every CTA finds the items, up to kTileM rows of one expert each, by itself. A unit of work is an item and kRows rows
// of its weight; CTAs take units in turn. Warps that multiply take the chunks of 128 columns of a CTA's units in turn,
// each with two stages, so that a piece of the weight and a chunk of activations are under way while the warp
// multiplies others, also from unit to unit. On the tensor cores the weight is the left operand, so
// that rows of activations are columns of the product. Sums are float32: over a warp's chunks of a unit in order, then
// over warps. One more warp makes results of them:
//
//   multiplying warps   wait for drained -> store sums of a unit -> arrive on filled
//   the last warp       load scales -> wait for filled -> add up, store results -> arrive on drained
//
// Up: rows are those of x; the results go through the activation to h. Down: rows are those of h. When the CTA is
// through, it counts its results, and adds up the slots of those tokens of which it has counted the last. What the
// kernel reads before it waits was complete before the kernel ahead of it began: that one waits first and then lets
// this one begin.

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

// ---- gemm/multiply ---------------------------------------------------------
__device__ __forceinline__ uint32 word_of(const uint4& v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

// A warp's piece of the weight, kWarpBlocks blocks of 16 rows by 128 columns, times a chunk of x, kTileM rows.
template <typename In, Format kFormat, int kTileM, int kWarpBlocks> struct WeightPiece {
  static constexpr int kRows        = kTileM;
  static constexpr int kHeight      = kWarpBlocks;  // in blocks
  static constexpr int kColumns     = kTileM / 8;   // of the product, in eights
  static constexpr int kRowBytes    = kTileCols * int(sizeof(In));  // of a chunk of x
  static constexpr int kXBytes      = kTileM * kRowBytes;
  static constexpr int kBlockCodes  = kCodeBytes / kBlocks;
  static constexpr int kBlockScales = kBlockCodes / (kFormat == Format::kNvfp4 ? 8 : 16);
  static constexpr int kTileBytes   = kCodeBytes + kBlocks * kBlockScales;
  static constexpr int kCodes       = kWarpBlocks * kBlockCodes;
  static constexpr int kBytes       = kCodes + kWarpBlocks * kBlockScales;

  using Accumulators = float[kWarpBlocks][kColumns][4];

  // At `piece` are the codes and, after them, the scales. Rows of x are 256 bytes. The 16-byte vectors of each half are
  // permuted so that loads of one column from eight rows have no bank conflicts: vector v of row r is at v ^ r % 8.
  // `matrix` is, for each eight rows, where this lane has its row of the first four matrices in a chunk of x.
  static __device__ __forceinline__ void multiply(
      Accumulators& sums, uint32 piece, uint32 chunk, const uint32 (&matrix)[kColumns], int lane) {
    constexpr int kLaneScales = kBlockScales / 8;  // bytes, of a row and the one eight below
    const uint32 codes = piece + lane * 16, scales = piece + kCodes + lane / 4 * kLaneScales;
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      uint4 w[kWarpBlocks];
      uint2 s[kWarpBlocks];
#pragma unroll
      for (int b = 0; b < kWarpBlocks; ++b) {
        w[b] = ptx::ld_shared(codes + b * kBlockCodes + half * (kBlockCodes / 2));
        const uint32 from = scales + b * kBlockScales + half * (kLaneScales / 2);
        if constexpr (kFormat == Format::kNvfp4) {
          s[b] = ptx::ld_shared_8(from);
        } else {
          s[b].x = ptx::ld_shared_4(from);
        }
      }
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {  // of steps
        uint4 x[kColumns];
#pragma unroll
        for (int n = 0; n < kColumns; ++n) {
          x[n] = ptx::load_matrices(chunk + (pair ? matrix[n] ^ 64 : matrix[n]) + half * 128);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
          for (int b = 0; b < kWarpBlocks; ++b) {
            const bool   second = kFormat == Format::kNvfp4 ? i == 1 : pair == 1;
            const uint32 word   = kFormat == Format::kNvfp4 && pair ? s[b].y : s[b].x;
            uint32 a[4];
            decode_weight<In>(a, word_of(w[b], 2 * pair + i), decode_scales<In>(word, second));
#pragma unroll
            for (int n = 0; n < kColumns; ++n) {
              ptx::mma_half<In>(sums[b][n], a, i ? x[n].z : x[n].x, i ? x[n].w : x[n].y);
            }
          }
        }
      }
    }
  }
};

// ---- gemm/pieces -----------------------------------------------------------
// A warp's pieces of the weight on their way into its ring, and the way of its sums out.
// Where the pieces of a warp are in their tiles. A piece may lie in two of them, one below the other.
template <class Piece, bool kHasTma> struct PieceLoads {
  static constexpr int kWarpBlocks = Piece::kHeight, kBlockCodes = Piece::kBlockCodes;
  static constexpr int kBlockScales = Piece::kBlockScales;

  int   block;  // the first one, of a tile
  int64 below;  // to the tile below; none is below the last

  __device__ __forceinline__ void load(uint8* to, const uint8* tile, Barrier* full, int lane) const {
    if (!kHasTma || ptx::elect_one()) {
      if constexpr (kHasTma) ptx::mbarrier_arrive_expect_tx(full, Piece::kBytes);
      if constexpr (kWarpBlocks == kBlocks) {  // scales lie behind the codes
        copy(to, tile, Piece::kBytes, full, lane);
      } else {
        const int here = kBlocks % kWarpBlocks == 0 ? kWarpBlocks : min(kWarpBlocks, kBlocks - block);
        copy_blocks(to, 0, tile, block, here, full, lane);
        if (here < kWarpBlocks) copy_blocks(to, here, tile + below, 0, kWarpBlocks - here, full, lane);
      }
    }
  }

 private:
  __device__ __forceinline__ static void copy_blocks(uint8* to, int at, const uint8* tile, int block, int count,
                                                     Barrier* full, int lane) {
    copy(to + at * kBlockCodes, tile + block * kBlockCodes, count * kBlockCodes, full, lane);
    copy(to + Piece::kCodes + at * kBlockScales, tile + kCodeBytes + block * kBlockScales, count * kBlockScales, full,
         lane);
  }
  __device__ __forceinline__ static void copy(uint8* to, const uint8* from, int bytes, Barrier* full, int lane) {
    if constexpr (kHasTma) {
      ptx::bulk_load_once(to, from, bytes, full);
    } else {
      for (int i = lane * 16; i < bytes; i += kWarp * 16) ptx::copy_async(ptx::shared_address(to + i), from + i);
    }
  }
};

// The sums of kCount groups of warps; the warps of a group have kHeight rows of the weight.
template <class Piece, int kCount, int kHeight> struct GroupSums {
  static constexpr int kPitch  = kHeight + 4;  // no bank conflicts between lanes of a fragment
  static constexpr int kGroups = kCount, kGap = Piece::kRows * kPitch;

  float rows[kGroups][Piece::kRows][kPitch];

  // `first` is the warp's first row in the CTA.
  __device__ __forceinline__ void store(const typename Piece::Accumulators& sums, int group, int first, int lane) {
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int b = 0; b < Piece::kHeight; ++b) {
#pragma unroll
      for (int n = 0; n < Piece::kColumns; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          rows[group][8 * n + 2 * t + i % 2][first + 16 * b + i / 2 * 8 + g] = sums[b][n][i];
        }
      }
    }
  }
};

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

// ---- experts/gathered ------------------------------------------------------
// The list of items that each CTA makes by itself from up to kMost assignments: up to kTileM rows of one expert each,
// in the order of experts. Items are the same in every CTA; the order of the rows of an item may differ.
template <int kMost, int kMostExperts, int kTileM> struct Gathered {
  int32   sizes[kMostExperts];  // of an expert: its rows, and the rows of lower experts times 2^16
  ushort4 items[kMost];         // expert, its first row in `order`, rows
  short   expert[kMost];        // of an assignment; -1: skipped
  uint16  order[kMost];         // assignments
  uint16  token[kMost];         // of an assignment in this order
  int32   count;                // of items

  static_assert(kMost < 1 << 15 && kMostExperts < 1 << 15, "two numbers in a word");

  // For all kThreads threads of a CTA, whole warps.
  template <int kThreads>
  __device__ __forceinline__ void find(const Routing& routing, int tokens, int slots, int experts, int thread) {
    const int assignments = tokens * slots;
    constexpr int kTurns = (kMost + kThreads - 1) / kThreads;
    int64 id[kTurns];
    int   arrival[kTurns];
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      const int i = turn * kThreads + thread;
      id[turn] = i < assignments ? routing.id(i) : -1;
    }
    for (int i = thread; i < experts; i += kThreads) sizes[i] = 0;
    __syncthreads();
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      const int i = turn * kThreads + thread;
      if (i >= assignments) break;
      const int32 own = routing.expert(id[turn]);
      expert[i]     = short(own);
      arrival[turn] = own < 0 ? 0 : atomicAdd(&sizes[own], 1);
    }
    __syncthreads();
    if (thread < kWarp) cut(experts, thread);
    __syncthreads();
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      const int i = turn * kThreads + thread;
      if (i >= assignments || expert[i] < 0) continue;
      const int size = sizes[expert[i]];
      const int at = (size >> 16) + ((size & 0xFFFF) > kTileM ? rank(i) : arrival[turn]);
      order[at] = uint16(i), token[at] = uint16(i / slots);
    }
    __syncthreads();
  }
  // A bit for each slot of a token that is not skipped.
  __device__ __forceinline__ uint32 taken(int token, int slots) const {
    uint32 mask = 0;
    for (int slot = 0; slot < slots; ++slot) mask |= uint32(expert[token * slots + slot] >= 0) << slot;
    return mask;
  }

 private:
  // One warp cuts the rows of each expert into items; a lane has neighbouring experts.
  __device__ __forceinline__ void cut(int experts, int lane) {
    const int per_lane = (experts + kWarp - 1) / kWarp, first = lane * per_lane, end = min(first + per_lane, experts);
    int own = 0;  // rows and items times 2^16
    for (int i = first; i < end; ++i) own += sizes[i] + ((sizes[i] + kTileM - 1) / kTileM << 16);
    int up_to = own;
#pragma unroll
    for (int step = 1; step < kWarp; step *= 2) {
      const int other = __shfl_up_sync(0xFFFFFFFFu, up_to, step);
      if (lane >= step) up_to += other;
    }
    if (lane == kWarp - 1) count = up_to >> 16;
    int row = (up_to - own) & 0xFFFF, item = (up_to - own) >> 16;
    for (int i = first; i < end; ++i) {
      const int rows = sizes[i];
      for (int at = 0; at < rows; at += kTileM) {
        items[item++] = {uint16(i), uint16(row + at), uint16(min(kTileM, rows - at)), 0};
      }
      sizes[i] = row << 16 | rows;
      row += rows;
    }
  }
  // Rows of the same expert ahead of an assignment: where there are several items, each CTA must cut them alike.
  __device__ __forceinline__ int rank(int assignment) const {
    int ahead = 0;
    for (int i = 0; i < assignment; ++i) ahead += expert[i] == expert[assignment];
    return ahead;
  }
};

// ---- experts/scaled --------------------------------------------------------
// Eight activations times a factor.
template <typename T> __device__ __forceinline__ uint4 scaled(uint4 v, float factor) {
  const auto both = [&](uint32 pair) { return to_pair<T>(low<T>(pair) * factor, high<T>(pair) * factor); };
  return {both(v.x), both(v.y), both(v.z), both(v.w)};
}

// ---- experts/store ---------------------------------------------------------
template <typename T> __device__ __forceinline__ void store(T* to, float4 v) {
  st_halves<4>(to, {to_pair<T>(v.x, v.y), to_pair<T>(v.z, v.w)});
}

// ---- experts/slot_sum ------------------------------------------------------
// The results of a token's slots, weighted and added up in the order of the slots, and the residual.
template <typename T> struct SlotSum {
  const T*     y;        // [tokens, slots, n]
  const float* weights;  // [tokens, slots]; null: 1
  int64 n;
  int   slots;
  const T* residual;  // [tokens, n]; null: none
  int64 residual_stride;

  // Columns from `at` on, four or eight, of the slots that `taken` has a bit for.
  template <int kColumns>
  __device__ __forceinline__ void columns(float (&sum)[kColumns], int64 token, uint32 taken, int64 at) const {
    constexpr int kAtOnce = 8;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) sum[i] = 0.0f;
    for (int slot = 0; slot < slots; slot += kAtOnce) {
      uint32 v[kAtOnce][kColumns / 2];
      float  w[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        if ((taken >> (slot + j) & 1) == 0) continue;
        const int64 assignment = token * slots + slot + j;
        ld_halves<kColumns>(y + assignment * n + at, v[j]);
        w[j] = weights == nullptr ? 1.0f : ptx::ld_f32(weights + assignment);
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        if ((taken >> (slot + j) & 1) == 0) continue;
#pragma unroll
        for (int i = 0; i < kColumns; i += 2) {
          sum[i]     = fmaf(w[j], low<T>(v[j][i / 2]), sum[i]);
          sum[i + 1] = fmaf(w[j], high<T>(v[j][i / 2]), sum[i + 1]);
        }
      }
    }
    if (residual == nullptr) return;
    uint32 r[kColumns / 2];
    ld_halves<kColumns>(residual + token * residual_stride + at, r);
#pragma unroll
    for (int i = 0; i < kColumns; i += 2) sum[i] += low<T>(r[i / 2]), sum[i + 1] += high<T>(r[i / 2]);
  }
  __device__ __forceinline__ float4 quad(int64 token, uint32 taken, int64 at) const {
    float sum[4];
    columns(sum, token, taken, at);
    return {sum[0], sum[1], sum[2], sum[3]};
  }
};

// ---- spec ------------------------------------------------------------------
using In = bf16;
enum class Product { kGated, kPlain, kDown };
constexpr Product kProduct = Product::kDown;
constexpr Format kFormat  = Format::kNvfp4;
constexpr int kWarpBlocks = 4;  // of 16 rows
constexpr int kWarps      = 4;        // that multiply
constexpr int kStages     = 2;
constexpr int kMinCtas    = 2;         // that an SM must hold at once; bounds the registers
constexpr bool kDown      = kProduct == Product::kDown;

constexpr int kMost    = 512;  // assignments
constexpr int kExperts = 1024;
constexpr int kTileM   = 8;
constexpr int kThreads = (kWarps + 1) * kWarp;
constexpr int kRows    = kWarpBlocks * 16;
constexpr int kHalf    = kTileCols / 2;
constexpr int kScales  = 4;  // units whose scales are kept

using Piece = WeightPiece<In, kFormat, kTileM, kWarpBlocks>;
using Sums  = GroupSums<Piece, kWarps, kRows>;

// ---- shared memory ---------------------------------------------------------
struct Shared {
  alignas(128) uint8 weight[kWarps][kStages][Piece::kBytes];
  alignas(128) uint8 x[kWarps][kStages][Piece::kXBytes];
  alignas(16) Sums sums;  // of one unit
  alignas(16) float scale[kScales][kRows], bias[kScales][kRows];  // of the rows of the weight
  float factor[kMost];  // of x, by assignment
  Gathered<kMost, kExperts, kTileM> list;
  Barrier full[kWarps][kStages];  // the weight is copied
  Barrier filled, drained;
};

static_assert(sizeof(Shared) <= 77440, "the launch counts on it");

// ---- work ------------------------------------------------------------------
// The units of a CTA: blockIdx.x and every gridDim.x-th behind it. Units of an item lie behind each other.
struct Work {
  int tiles, units;  // of an item, of this CTA

  __device__ __forceinline__ Work(int items, int tiles) : tiles(tiles) {
    const int all = items * tiles, first = int(blockIdx.x);
    units = all > first ? (all - first - 1) / int(gridDim.x) + 1 : 0;
  }
};
// An item and one of its tiles of kRows rows of the weight.
struct Unit {
  int item, tile, step_item, step_tile, tiles;

  __device__ __forceinline__ explicit Unit(const Work& work)
      : item(int(blockIdx.x) / work.tiles), tile(int(blockIdx.x) % work.tiles), step_item(int(gridDim.x) / work.tiles),
        step_tile(int(gridDim.x) % work.tiles), tiles(work.tiles) {}
  __device__ __forceinline__ void advance() {
    item += step_item, tile += step_tile;
    if (tile >= tiles) tile -= tiles, ++item;
  }
};

// ---- results ---------------------------------------------------------------
struct Results {
  const float* scale;
  const float* bias;  // null: none

  // Four sums of neighbouring rows of the weight, scaled, and with their bias.
  __device__ __forceinline__ float4 of_sums(const float* sums, int row) const {
    const float4 v  = sum_groups<Sums>(sums);
    const float4 by = *reinterpret_cast<const float4*>(&scale[row]);
    const float4 y  = {v.x * kWeightUnit * by.x, v.y * kWeightUnit * by.y, v.z * kWeightUnit * by.z,
                       v.w * kWeightUnit * by.w};
    return bias != nullptr ? add(y, *reinterpret_cast<const float4*>(&bias[row])) : y;
  }
};

// ---- kernel ----------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kThreads, kMinCtas) experts_stream_down(
    const In* __restrict__ x,              // h [tokens * slots, k]
    const uint8* __restrict__ weight,      // [experts, ceil(n / 64), ceil(k / 128), kTileBytes]
    const float* __restrict__ scale,       // [experts, round_up(n, 64)]
    const float* __restrict__ bias,        // as scale; null: none
    const float* __restrict__ weights,     // [tokens, slots], factors of y; null: 1
    const uint8* __restrict__ ids,         // [tokens, slots] of id_bytes bytes
    const int32* __restrict__ expert_map,  // [ids_end]; null: the identity
    In* __restrict__ y,                    // [tokens * slots, n]
    int32* __restrict__ done,              // [tokens, tiles of kRows rows], zero
    In* __restrict__ out,                  // [tokens, n]
    const In* __restrict__ residual,       // [tokens, n], added to the sums; null: none
    int64 id_bytes,                        // 4 or 8
    int64 ids_end,                         // ids are below it, or skipped
    int64 experts,
    int64 tokens,
    int64 slots,
    int64 n,                               // rows of the weight
    int64 k,                               // columns, a multiple of 32
    int64 x_stride,                        // elements, as all strides
    int64 out_stride,
    int64 residual_stride
) {
  extern __shared__ __align__(128) uint8 dynamic[];
  Shared& s = *reinterpret_cast<Shared*>(dynamic);
  const int thread = int(threadIdx.x), lane = int(threadIdx.x % kWarp), warp = int(threadIdx.x / kWarp);
  const Routing routing = {ids, expert_map, id_bytes, ids_end, experts};
  const int chunks = int(ceil_div(k, kTileCols)), blocks = int(ceil_div(n, kTileRows));  // of an expert
  const int active = min(kWarps, chunks);  // warps with work

  if (thread == 0) {
    for (int i = 0; i < kWarps * kStages; ++i) ptx::mbarrier_init(&s.full[0][0] + i, 1);
    ptx::mbarrier_init(&s.filled, active), ptx::mbarrier_init(&s.drained, 1);
    ptx::fence_mbarrier_init();
  }
  if (warp >= active && warp < kWarps) {
    float* const own = &s.sums.rows[warp][0][0];
    for (int i = lane; i < Sums::kGap; i += kWarp) own[i] = 0.0f;
  }
  if constexpr (kHasPdl) {
    if constexpr (!kDown) ptx::griddep_wait();
    ptx::griddep_launch();
  }
  s.list.find<kThreads>(routing, int(tokens), int(slots), int(experts), thread);
  const Work work = {s.list.count, int(ceil_div(n, kRows))};

  if (warp < kWarps) {
    const int turns = warp < active ? int(ceil_div(int64(work.units) * chunks - warp, active)) : 0;
    Unit ahead(work);    // of the next load
    int  chunk  = warp;  // of it: every active-th is this warp's
    int  loaded = 0, first = 0;  // rows of the activations that were loaded last, the first of them in the order
    bool ends   = false;  // it is the last chunk of the unit for this warp
    Barrier* const full = s.full[warp];
    const auto load_weight = [&](int stage) {
      const int row = ahead.tile * kRows, block = s.list.items[ahead.item].x * blocks + row / kTileRows;
      const PieceLoads<Piece, true> pieces = {row % kTileRows / 16, 0};
      const uint8* const tile = weight + int64(block * chunks + chunk) * Piece::kTileBytes;
      pieces.load(s.weight[warp][stage], tile, &full[stage], lane);
    };
    // A lane copies 16 bytes of each half of a row, and of the one four below it.
    const int    x_row = lane / 8;
    const uint32 x_stages = ptx::shared_address(s.x[warp]);
    const uint32 x_to     = x_stages + x_row * Piece::kRowBytes + (lane % 8 ^ x_row) * 16;
    const auto place = [&](int stage, int row, int half) {
      return (row == 4 ? x_to ^ 64 : x_to) + stage * Piece::kXBytes + row * Piece::kRowBytes + half * 128;
    };
    const auto load_x = [&](int stage) {
      const ushort4 item   = s.list.items[ahead.item];
      const int     column = chunk * kTileCols + lane % 8 * 8, left = int(k) - column;
#pragma unroll
      for (int row = 0; row < kTileM; row += 4) {
        if (x_row + row >= item.z) continue;  // nobody stores their sums
        const In* from = x + (kDown ? s.list.order : s.list.token)[item.y + x_row + row] * x_stride + column;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          ptx::copy_async_or_zero(place(stage, row, half), from + half * kHalf, half * kHalf < left ? 16 : 0);
        }
      }
      loaded = item.z, first = item.y;
    };
    const auto advance = [&] {
      chunk += active;
      ends = chunk >= chunks;
      if (ends) chunk -= chunks, ahead.advance();
    };
    if (turns > 0) load_weight(0);
    if constexpr (kHasPdl && kDown) ptx::griddep_wait();
    if (turns > 0) load_x(0), advance();
    ptx::copy_async_commit();

    Piece::Accumulators sums = {};
    int unit = 0;
#pragma unroll 1
    for (int turn = 0; turn < turns; ++turn) {
      const int  stage = turn % 2, rows = loaded, first_row = first;
      const bool is_last = ends;
      ptx::copy_async_wait_for<0>();
      __syncwarp();
      if (turn + 1 < turns) load_weight(stage ^ 1), load_x(stage ^ 1), advance();
      ptx::copy_async_commit();
      const int    x_lane = min(lane % 8, rows - 1);
      const uint32 matrix[Piece::kColumns] = {uint32(x_lane * Piece::kRowBytes + (lane / 8 ^ x_lane) * 16)};
      ptx::mbarrier_wait(&full[stage], turn / 2 % 2);
      Piece::multiply(
          sums, ptx::shared_address(s.weight[warp][stage]), x_stages + stage * Piece::kXBytes, matrix, lane);
      if (is_last) {
        ptx::mbarrier_wait(&s.drained, unit % 2 ^ 1);
        s.sums.store(sums, warp, 0, lane);
        __syncwarp();
        if (lane == 0) ptx::mbarrier_arrive(&s.filled);
        ++unit;
#pragma unroll
        for (int b = 0; b < kWarpBlocks; ++b) {
#pragma unroll
          for (int i = 0; i < 4; ++i) sums[b][0][i] = 0.0f;
        }
      }
    }
  } else {
    Unit ahead(work), now(work);
    const auto load_scales = [&](int unit) {
      if (unit < work.units) {
        const int64 row = int64(s.list.items[ahead.item].x) * blocks * kTileRows + ahead.tile * kRows;
        for (int i = lane * 4; i < kRows; i += kWarp * 4) {
          ptx::copy_async(ptx::shared_address(&s.scale[unit % kScales][i]), scale + row + i);
          if (bias != nullptr) ptx::copy_async(ptx::shared_address(&s.bias[unit % kScales][i]), bias + row + i);
        }
        ahead.advance();
      }
      ptx::copy_async_commit();
    };
    for (int i = 0; i < kScales - 1; ++i) load_scales(i);
    if constexpr (kHasPdl && kDown) ptx::griddep_wait();
    for (int unit = 0; unit < work.units; ++unit, now.advance()) {
      const ushort4 item = s.list.items[now.item];
      load_scales(unit + kScales - 1);
      ptx::copy_async_wait_for<kScales - 1>();
      __syncwarp();
      const Results results = {s.scale[unit % kScales], bias == nullptr ? nullptr : s.bias[unit % kScales]};
      ptx::mbarrier_wait(&s.filled, unit % 2);
      constexpr int kQuads = kRows / 4;
      for (int i = lane; i < item.z * kQuads; i += kWarp) {
        const int column = i / kQuads, at = i % kQuads * 4, row = now.tile * kRows + at;
        if (row >= n) continue;
        store(y + s.list.order[item.y + column] * n + row, results.of_sums(&s.sums.rows[0][column][at], at));
      }
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(&s.drained);
    }
  }

  // Counts this CTA's results; those of a token that are complete are added up by the lanes of its warp.
  constexpr int kQuads = kRows / 4;
  const SlotSum<In> total = {y, weights, n, int(slots), residual, residual_stride};
  __syncthreads();
  for (int first = warp * kWarp; first < work.units * kTileM; first += kThreads) {
    const int unit = int(blockIdx.x) + (first + lane) / kTileM * int(gridDim.x), row = lane % kTileM;
    const int tile = unit % work.tiles;
    int    token = -1;
    uint32 taken = 0;
    if ((first + lane) / kTileM < work.units && row < s.list.items[unit / work.tiles].z) {
      token = s.list.token[s.list.items[unit / work.tiles].y + row];
      taken = s.list.taken(token, int(slots));
      __threadfence();
      const int before = atomicAdd(&done[token * work.tiles + tile], 1);
      __threadfence();
      if (before + 1 != __popc(taken)) token = -1;
    }
    __syncwarp();
    uint32 finished = __ballot_sync(0xFFFFFFFFu, token >= 0);
    while (finished != 0) {
      int from = -1;  // the lane with the pair of this lane
#pragma unroll
      for (int i = 0; i < kWarp / kQuads; ++i) {
        if (lane / kQuads == i) from = __ffs(finished) - 1;
        finished &= finished - 1;
      }
      const int    of = __shfl_sync(0xFFFFFFFFu, token, max(from, 0));
      const int    at = __shfl_sync(0xFFFFFFFFu, tile, max(from, 0)) * kRows + lane % kQuads * 4;
      const uint32 slots_of = __shfl_sync(0xFFFFFFFFu, taken, max(from, 0));
      if (from >= 0 && at < n) store(out + of * out_stride + at, total.quad(of, slots_of, at));
    }
  }
  for (int token = int(blockIdx.x); token < tokens; token += int(gridDim.x)) {
    if (s.list.taken(token, int(slots)) != 0) continue;
    for (int64 i = thread * 4; i < n; i += kThreads * 4) store(out + token * out_stride + i, total.quad(token, 0, i));
  }
}

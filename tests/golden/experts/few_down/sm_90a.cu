// experts_few_down, generated from templates/experts/few_down.cu.j2
// spec: {"ctas":2,"dtype":"bf16","format":"nvfp4","groups":16,"stages":3,"warp_blocks":1}
//
// The product "down" of a layer of experts for up to eight assignments of tokens to experts, such as those of one
// token: a CTA takes its rows of the weights of all of their experts, one behind the other, so that it has the results
// of every slot and adds them up by itself.
//
// On the tensor cores the weight is the left operand. An assignment is a column of the product: the other columns of
// its expert's part are zero, so that the sums of all experts fit in the registers of one product. A CTA takes kRows
// rows of the weights and a share of their chunks of 128 columns, which are divided among the CTAs of a cluster; its
// warps take chunks in turn, each with a ring of stages. Sums are float32: over a warp's chunks in order, then over
// warps, then over the cluster, always in the same order.

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

// ---- experts/store ---------------------------------------------------------
template <typename T> __device__ __forceinline__ void store(T* to, float4 v) {
  st_halves<4>(to, {to_pair<T>(v.x, v.y), to_pair<T>(v.z, v.w)});
}

// ---- spec ------------------------------------------------------------------
using In = bf16;
constexpr Format kFormat  = Format::kNvfp4;
constexpr int kWarpBlocks = 1;  // of 16 rows
constexpr int kGroups     = 16;       // of one warp each
constexpr int kStages     = 3;
constexpr int kMinCtas    = 2;         // that an SM must hold at once; bounds the registers
constexpr bool kHasTma      = true;
constexpr bool kHasClusters = kHasTma;

constexpr int kTileM   = 8;  // assignments
constexpr int kThreads = kGroups * kWarp;
constexpr int kRows    = kWarpBlocks * 16;
constexpr int kQuads   = kRows / 4;

using Piece = WeightPiece<In, kFormat, kTileM, kWarpBlocks>;
using Sums  = GroupSums<Piece, kGroups, kRows>;

// ---- shared memory ---------------------------------------------------------
struct Buffers {
  alignas(128) uint8 weight[kGroups][kStages][Piece::kBytes];
  alignas(128) uint8 x[kGroups][2][Piece::kRowBytes];  // one row of a chunk
  alignas(128) uint8 zeros[Piece::kRowBytes];
  Barrier full[kGroups][kStages];  // the weight is copied
};
struct Shared {
  union {
    Buffers buffers;
    Sums sums;  // once every warp is through
  };
  float scale[kTileM][kRows], bias[kTileM][kRows];  // of the rows of the weights, by the number of the expert
  float results[kTileM][kRows];                     // of assignments
  float factor[kTileM];
  int32 assignment[kTileM];                         // by the number of the expert
};

static_assert(sizeof(Shared) <= 65792, "the launch counts on it");

// ---- work ------------------------------------------------------------------
// A warp's chunks in the order of its turns: those of the first expert, of the second, and so on.
struct Turns {
  int expert, chunk;  // the number of the expert among those that are taken

  __device__ __forceinline__ void advance(int chunks) {
    for (chunk += kGroups; chunk >= chunks; chunk -= chunks) ++expert;
  }
};

// ---- kernel ----------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kThreads, kMinCtas) experts_few_down(
    const In* __restrict__ x,              // h [tokens * slots, k]
    const uint8* __restrict__ weight,      // [experts, ceil(n / 64), ceil(k / 128), kTileBytes]
    const float* __restrict__ scale,       // [experts, round_up(n, 64)]
    const float* __restrict__ bias,        // as scale; null: none
    const float* __restrict__ weights,     // [tokens, slots], factors of results; null: 1
    const uint8* __restrict__ ids,         // [tokens, slots] of id_bytes bytes
    const int32* __restrict__ expert_map,  // [ids_end]; null: the identity
    In* __restrict__ out,                  // [tokens, n]
    const In* __restrict__ residual,       // [tokens, n], added to the sums; null: none
    int64 id_bytes,                        // 4 or 8
    int64 ids_end,                         // ids are below it, or skipped
    int64 experts,
    int64 tokens,
    int64 slots,
    int64 n,                               // rows of the weight
    int64 k,                               // columns, a multiple of 32
    int64 out_stride,                      // elements
    int64 residual_stride
) {
  extern __shared__ __align__(128) uint8 dynamic[];
  Shared& s = *reinterpret_cast<Shared*>(dynamic);
  Buffers& buffers = s.buffers;
  const int thread = threadIdx.x, lane = thread % kWarp, warp = thread / kWarp;
  const int shares = kHasClusters ? gridDim.x : 1, share = blockIdx.x;  // of the chunks; a cluster is a line along x
  const int row = blockIdx.y * kRows;
  const Routing routing = {ids, expert_map, id_bytes, ids_end, experts};

  if constexpr (kHasPdl) ptx::griddep_launch();
  if constexpr (kHasTma) {
    if (lane == 0) {
#pragma unroll
      for (int i = 0; i < kStages; ++i) ptx::mbarrier_init(&buffers.full[warp][i], 1);
      ptx::fence_mbarrier_init();
    }
    __syncwarp();
  }
  // Lane i gets the i-th assignment that is not skipped, and its expert.
  int32 expert = lane < tokens * slots ? routing.expert(routing.id(lane)) : -1;
  const uint32 taken = __ballot_sync(0xFFFFFFFFu, expert >= 0);
  const int    count = __popc(taken);
  int assignment = 0;
#pragma unroll
  for (int i = 0; i < kTileM; ++i) {
    if ((taken >> i & 1) != 0 && __popc(taken & ((1u << i) - 1)) == lane) assignment = i;
  }
  expert = __shfl_sync(0xFFFFFFFFu, expert, assignment);

  const int chunks = int(ceil_div(k, kTileCols)), total = count * chunks;
  const int first = total * share / shares, last = total * (share + 1) / shares;
  const int turns = int(ceil_div(last - first - warp, kGroups));
  const int64 strip = int64(chunks) * Piece::kTileBytes, tiles = ceil_div(n, kTileRows);
  const uint8* const rows_of_0 = weight + row / kTileRows * strip;
  const PieceLoads<Piece, kHasTma> pieces = {row % kTileRows / 16,
                                             row / kTileRows * kTileRows + kTileRows < n ? strip : 0};
  uint8 (*const stages)[Piece::kBytes] = buffers.weight[warp];
  Barrier* const full = buffers.full[warp];
  const Turns begin = {(first + warp) / chunks, (first + warp) % chunks};

  Turns ahead = begin;  // the next piece to load
  const auto load = [&](int stage) {
    const int64 of = __shfl_sync(0xFFFFFFFFu, expert, ahead.expert);
    pieces.load(stages[stage], rows_of_0 + of * tiles * strip + ahead.chunk * Piece::kTileBytes, &full[stage], lane);
    ahead.advance(chunks);
  };
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) {
    if (i < turns) load(i);
  }
  for (int number = 0; number < count; ++number) {
    const int64 of = __shfl_sync(0xFFFFFFFFu, expert, number) * tiles * kTileRows + row;
    for (int i = thread * 4; i < kRows && row + i < n; i += kThreads * 4) {
      ptx::copy_async(ptx::shared_address(&s.scale[number][i]), scale + of + i);
      if (bias != nullptr) ptx::copy_async(ptx::shared_address(&s.bias[number][i]), bias + of + i);
    }
  }
  if (thread < count) s.assignment[thread] = assignment;
  if (thread < tokens * slots) s.factor[thread] = weights == nullptr ? 1.0f : ptx::ld_fresh_f32(weights + thread);
  for (int i = thread; i < Piece::kRowBytes / 4; i += kThreads) reinterpret_cast<uint32*>(buffers.zeros)[i] = 0;
  __syncthreads();
  if constexpr (kHasPdl) ptx::griddep_wait();

  Turns next = begin;  // the next chunk of x to load
  const auto load_x = [&](uint32 to) {
    const int64 of = __shfl_sync(0xFFFFFFFFu, assignment, next.expert);
    const int column = next.chunk * kTileCols + lane * 8;
    if (lane < kTileCols / 8) ptx::copy_async_or_zero(to + lane * 16, x + of * k + column, column < k ? 16 : 0);
    next.advance(chunks);
  };
  const uint32 x_stages = ptx::shared_address(buffers.x[warp]), zeros = ptx::shared_address(buffers.zeros);
  if (turns > 0) load_x(x_stages);
  ptx::copy_async_commit();

  Piece::Accumulators sums = {};
  Turns  now    = begin;
  int    stage  = 0;
  uint32 parity = 0;
#pragma unroll 1
  for (int turn = 0; turn < turns; ++turn) {
    ptx::copy_async_wait_for<0>();
    __syncwarp();
    const int read = stage == 0 ? kStages - 1 : stage - 1;  // in the turn before
    if (turn + kStages - 1 < turns) load(read);
    if (turn + 1 < turns) load_x(x_stages + (turn + 1) % 2 * Piece::kRowBytes);
    ptx::copy_async_commit();
    const uint32 chunk  = x_stages + turn % 2 * Piece::kRowBytes;
    const int    column = __shfl_sync(0xFFFFFFFFu, assignment, now.expert);  // of the sums
    const uint32 matrix[Piece::kColumns] = {(lane % 8 == column ? 0 : zeros - chunk) + lane / 8 * 16};
    if constexpr (kHasTma) ptx::mbarrier_wait(&full[stage], parity);
    Piece::multiply(sums, ptx::shared_address(stages[stage]), chunk, matrix, lane);
    now.advance(chunks);
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
  ptx::copy_async_wait();  // for scales, in warps without a turn
  __syncthreads();         // the sums take the place of the ring

  s.sums.store(sums, warp, 0, lane);
  __syncthreads();
  if (kHasClusters && shares > 1) {
    for (int i = thread; i < count * kQuads; i += kThreads) {
      float* at = &s.sums.rows[0][s.assignment[i / kQuads]][i % kQuads * 4];
      *reinterpret_cast<float4*>(at) = sum_groups<Sums>(at);
    }
    ptx::cluster_sync();
  }
  for (int i = thread; i < count * kQuads; i += kThreads) {
    const int number = i / kQuads, quad = i % kQuads, column = s.assignment[number];
    if (quad % shares != share || row + 4 * quad >= n) continue;
    const float* from = &s.sums.rows[0][column][4 * quad];
    const float4 sum = kHasClusters && shares > 1 ? sum_cluster(from, shares) : sum_groups<Sums>(from);
    const float4 by  = *reinterpret_cast<const float4*>(&s.scale[number][4 * quad]);
    float4 v = {sum.x * kWeightUnit * by.x, sum.y * kWeightUnit * by.y, sum.z * kWeightUnit * by.z,
                sum.w * kWeightUnit * by.w};
    if (bias != nullptr) v = add(v, *reinterpret_cast<const float4*>(&s.bias[number][4 * quad]));
    *reinterpret_cast<float4*>(&s.results[column][4 * quad]) = v;
  }
  __syncthreads();
  for (int i = thread; i < tokens * kQuads; i += kThreads) {
    const int token = i / kQuads, quad = i % kQuads;
    if (quad % shares != share || row + 4 * quad >= n) continue;
    float4 sum = {};
    for (int column = token * int(slots); column < (token + 1) * slots; ++column) {
      if ((taken >> column & 1) == 0) continue;
      const float4 v = *reinterpret_cast<const float4*>(&s.results[column][4 * quad]);
      const uint32 lo = to_pair<In>(v.x, v.y), hi = to_pair<In>(v.z, v.w);
      const float  w  = s.factor[column];
      sum = {fmaf(w, low<In>(lo), sum.x), fmaf(w, high<In>(lo), sum.y), fmaf(w, low<In>(hi), sum.z),
             fmaf(w, high<In>(hi), sum.w)};
    }
    if (residual != nullptr) {
      uint32 r[2];
      ld_halves<4>(residual + token * residual_stride + row + 4 * quad, r);
      sum = add(sum, {low<In>(r[0]), high<In>(r[0]), low<In>(r[1]), high<In>(r[1])});
    }
    store(out + token * out_stride + row + 4 * quad, sum);
  }
  if (kHasClusters && shares > 1) ptx::cluster_sync();  // a CTA's memory lives until the others have read it
}

// gdn_chunk, generated from templates/gdn/chunk.cu.j2
// spec: {"ahead":0,"bulk":false,"dtype":"bf16","general":false,"head_dim":128,"max_tokens":4,"state_dtype":"f32","value_dim":128,"warps":4}
//
// The delta rule for many tokens, of which only the last state is stored. A CTA owns kTileV rows (V index) of one value
// head's state; a warp holds 16 of them in registers and takes all tokens of its request at once, in the chunkwise form
// of the delta rule. With h the state before the first token:
//   u_t   = beta_t (v_t - D_t h k_t - sum over s < t of E_ts (k_s k_t) u_s)
//   out_t = D_t h q_t + sum over s <= t of E_ts (k_s q_t) u_s
//   h becomes D_T h + sum over t of E_Tt u_t k_t,  T the last token
// where D_t is the product of the decays from the first token to t, and E_ts that from the token after s to t. All
// h k_t and h q_t are one matrix product; so are all k_s k_t and k_s q_t, and the sums over u_t k_t. Only u is computed
// token by token, from a few numbers of a row instead of all its columns.
//
// The products run on the tensor cores. Vectors of 16-bit floats and a bf16 state are multiplied as they are, unless
// their types differ; otherwise the factors are TF32 numbers, of which two have 22 of the 24 bits of a float32. u is
// split into two or three numbers of the kind that the state is multiplied in, of 16 bits at least. Everything else is
// float32; 1 / sqrt is approximate.

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

// ---- partials/matrices -----------------------------------------------------
// Transposed 8 x 8 matrices of 16-bit floats. Lanes hold pairs as in partials/mma_half.
namespace ptx {
__device__ __forceinline__ uint32 transpose(uint32 a) {
  uint32 d;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(a));
  return d;
}
// As load_matrices, transposed: of matrix i, a lane gets rows 2 t and 2 t + 1 of column g.
__device__ __forceinline__ uint4 load_matrices_transposed(uint32 row) {
  uint4 v;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(row) : "memory");
  return v;
}
}  // namespace ptx

// ---- partials/mma ----------------------------------------------------------
namespace ptx {
// d += a b for a 16 x 8 and an 8 x 8 matrix in TF32, the upper 19 bits of each element. With g = lane / 4 and
// t = lane % 4, a is a[g][t], a[g + 8][t], a[g][t + 4], a[g + 8][t + 4]; b is b[t][g], b[t + 4][g]; d is d[g][2 t],
// d[g][2 t + 1], d[g + 8][2 t], d[g + 8][2 t + 1].
__device__ __forceinline__ void mma_tf32(float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9},"
      " {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
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

// ---- partials/reduce -------------------------------------------------------
// Sums over groups of kLanes lanes that are kApart apart, for N values at once: lanes at distance kApart add up first,
// then 2 kApart, 4 kApart, ... Every lane of a group gets the same bits.
template <int kLanes, int kApart = 1, int N>
__device__ __forceinline__ void group_sum(float (&x)[N]) {
#pragma unroll
  for (int distance = kApart; distance < kLanes * kApart; distance *= 2) {
#pragma unroll
    for (int i = 0; i < N; ++i) x[i] += __shfl_xor_sync(~0u, x[i], distance);
  }
}

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

// ---- partials/bulk_copy ----------------------------------------------------
// Bulk copies, asynchronous to the thread that starts them: shared to global memory, and global memory to L2.
namespace ptx {
// Stores `bytes` bytes, as a group of its own. kOnce: they are not read again soon, and L2 evicts them first.
template <bool kOnce>
__device__ __forceinline__ void bulk_store(void* to, const void* from, uint32 bytes) {
  const uint32 source = shared_address(from);
  if constexpr (kOnce) {
    uint64 policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%0], [%1], %2, %3;"
                 ::"l"(to), "r"(source), "r"(bytes), "l"(policy) : "memory");
  } else {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
                 ::"l"(to), "r"(source), "r"(bytes) : "memory");
  }
  bulk_commit();
}
// Prefetches `bytes` bytes into L2.
__device__ __forceinline__ void bulk_prefetch(const void* from, uint32 bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
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

// ---- partials/f32x2 --------------------------------------------------------
// Two floats, for which one instruction suffices where the GPU has packed arithmetic. Each is rounded by itself.
constexpr bool kHasF32x2 = false;

struct alignas(8) f32x2 { float x, y; };

__device__ __forceinline__ f32x2 mul(f32x2 a, f32x2 b) {
  if constexpr (kHasF32x2) {
    f32x2 d;
    asm("{\n"
        "  .reg .b64 a, b, d;\n"
        "  mov.b64 a, {%2, %3};\n"
        "  mov.b64 b, {%4, %5};\n"
        "  mul.rn.f32x2 d, a, b;\n"
        "  mov.b64 {%0, %1}, d;\n"
        "}"
        : "=f"(d.x), "=f"(d.y) : "f"(a.x), "f"(a.y), "f"(b.x), "f"(b.y));
    return d;
  }
  return {a.x * b.x, a.y * b.y};
}

__device__ __forceinline__ f32x2 fma(f32x2 a, f32x2 b, f32x2 c) {
  if constexpr (kHasF32x2) {
    f32x2 d;
    asm("{\n"
        "  .reg .b64 a, b, c, d;\n"
        "  mov.b64 a, {%2, %3};\n"
        "  mov.b64 b, {%4, %5};\n"
        "  mov.b64 c, {%6, %7};\n"
        "  fma.rn.f32x2 d, a, b, c;\n"
        "  mov.b64 {%0, %1}, d;\n"
        "}"
        : "=f"(d.x), "=f"(d.y) : "f"(a.x), "f"(a.y), "f"(b.x), "f"(b.y), "f"(c.x), "f"(c.y));
    return d;
  }
  return {fmaf(a.x, b.x, c.x), fmaf(a.y, b.y, c.y)};
}

// ---- gdn/lanes -------------------------------------------------------------
enum class StateLayout { kVk, kKv };  // a head's state: [V, K] or [K, V]

// The work of a lane. Config: State, kHeadDim (K), kValueDim (V), kTileV, kWarps, kLanes that share a row, and kIlpRows
// of each; for other partials In, kMaxTokens, kAhead, kGeneral.
template <class Config> struct Lanes : Config {
  static constexpr int kWarpRows = kWarp / Config::kLanes * Config::kIlpRows;
  static constexpr int kTiles    = Config::kValueDim / Config::kTileV;
  static constexpr int kThreads  = Config::kWarps * kWarp;
  static constexpr int kVec      = 16 / sizeof(typename Config::State);            // columns of a 16-byte access
  static constexpr int kAccesses = Config::kHeadDim / (Config::kLanes * kVec);     // accesses of a lane to a row
  static constexpr int kQuads    = Config::kHeadDim / (Config::kLanes * 4);        // groups of four columns of a lane
  static constexpr int kPairs    = 2 * kQuads;
  static_assert(Config::kHeadDim % (Config::kLanes * kVec) == 0, "every column has a lane");

  using Rows = f32x2[Config::kIlpRows][kPairs];
};

// ---- gdn/rows --------------------------------------------------------------
// Moves a lane's rows of a state between memory and registers, in 16-byte accesses. C: Lanes.

// A lane's rows of a [V, K] state as they are in memory.
template <class C> using Packed = uint32[C::kIlpRows][4 * C::kAccesses];

template <typename State, int N> __device__ __forceinline__ f32x2 pair_of(const uint32 (&row)[N], int i) {
  if constexpr (sizeof(State) == 4) return {__uint_as_float(row[2 * i]), __uint_as_float(row[2 * i + 1])};
  else return {low<State>(row[i]), high<State>(row[i])};
}

template <typename State, int N> __device__ __forceinline__ void set_pair(uint32 (&row)[N], int i, f32x2 x) {
  if constexpr (sizeof(State) == 4) row[2 * i] = __float_as_uint(x.x), row[2 * i + 1] = __float_as_uint(x.y);
  else row[i] = to_pair<State>(x.x, x.y);
}

// The offset in a head's state of a lane's part of rows row, row + 1, ...
template <class C, StateLayout kLayout>
__device__ __forceinline__ int64 lane_offset(int row, int lane) {
  if constexpr (kLayout == StateLayout::kVk) return row * C::kHeadDim + lane * C::kVec;
  return lane * C::kVec * C::kValueDim + row;
}

template <int kRows, int kPairs>
__device__ __forceinline__ float& at(f32x2 (&h)[kRows][kPairs], int row, int column) {
  return column % 2 ? h[row][column / 2].y : h[row][column / 2].x;
}

// The offset of a [V, K] lane's access m to its row r.
template <class C> __device__ __forceinline__ int access(int r, int m) {
  return r * C::kHeadDim + m * (C::kLanes * C::kVec);
}

// The offset of a [K, V] lane's access to its column c, rows r to r + 3.
template <class C> __device__ __forceinline__ int column_access(int r, int c) {
  return (c / 4 * (4 * C::kLanes) + c % 4) * C::kValueDim + r;
}

template <class C, StateLayout kLayout>
__device__ __forceinline__ void load_rows(Packed<C>& h, const typename C::State* p) {
  static_assert(kLayout == StateLayout::kVk, "neighbours in memory are of one row");
#pragma unroll
  for (int r = 0; r < C::kIlpRows; ++r) {
#pragma unroll
    for (int m = 0; m < C::kAccesses; ++m) {
      const uint4 words = ptx::ld_once(p + access<C>(r, m));
      h[r][4 * m] = words.x, h[r][4 * m + 1] = words.y, h[r][4 * m + 2] = words.z, h[r][4 * m + 3] = words.w;
    }
  }
}

template <class C, StateLayout kLayout>
__device__ __forceinline__ void load_rows(typename C::Rows& h, const typename C::State* p) {
  if constexpr (kLayout == StateLayout::kVk) {
    Packed<C> packed;
    load_rows<C, kLayout>(packed, p);
#pragma unroll
    for (int i = 0; i < C::kIlpRows * C::kPairs; ++i) {
      h[i / C::kPairs][i % C::kPairs] = pair_of<typename C::State>(packed[i / C::kPairs], i % C::kPairs);
    }
  } else {
#pragma unroll
    for (int c = 0; c < 2 * C::kPairs; ++c) {
#pragma unroll
      for (int r = 0; r < C::kIlpRows; r += 4) {
        const uint4 words = ptx::ld_once(p + column_access<C>(r, c));
        at(h, r, c) = __uint_as_float(words.x), at(h, r + 1, c) = __uint_as_float(words.y);
        at(h, r + 2, c) = __uint_as_float(words.z), at(h, r + 3, c) = __uint_as_float(words.w);
      }
    }
  }
}

enum class To { kL2, kMemory, kShared };
template <To kTo, typename State> __device__ __forceinline__ void store_words(State* at, const uint4& words) {
  if constexpr (kTo == To::kL2) ptx::st(at, words);
  if constexpr (kTo == To::kMemory) ptx::st_once(at, words);
  if constexpr (kTo == To::kShared) *reinterpret_cast<uint4*>(at) = words;
}

template <class C, To kTo, StateLayout kLayout>
__device__ __forceinline__ void store_rows(const Packed<C>& h, typename C::State* p) {
  static_assert(kLayout == StateLayout::kVk, "neighbours in memory are of one row");
#pragma unroll
  for (int r = 0; r < C::kIlpRows; ++r) {
#pragma unroll
    for (int m = 0; m < C::kAccesses; ++m) {
      store_words<kTo>(p + access<C>(r, m), uint4{h[r][4 * m], h[r][4 * m + 1], h[r][4 * m + 2], h[r][4 * m + 3]});
    }
  }
}

template <class C, To kTo, StateLayout kLayout>
__device__ __forceinline__ void store_rows(typename C::Rows& h, typename C::State* p) {
  if constexpr (kLayout == StateLayout::kVk) {
    Packed<C> packed;
#pragma unroll
    for (int i = 0; i < C::kIlpRows * C::kPairs; ++i) {
      set_pair<typename C::State>(packed[i / C::kPairs], i % C::kPairs, h[i / C::kPairs][i % C::kPairs]);
    }
    store_rows<C, kTo, kLayout>(packed, p);
  } else {
#pragma unroll
    for (int c = 0; c < 2 * C::kPairs; ++c) {
#pragma unroll
      for (int r = 0; r < C::kIlpRows; r += 4) {
        const float x[4] = {at(h, r, c), at(h, r + 1, c), at(h, r + 2, c), at(h, r + 3, c)};
        store_words<kTo>(p + column_access<C>(r, c), uint4{__float_as_uint(x[0]), __float_as_uint(x[1]),
                                                         __float_as_uint(x[2]), __float_as_uint(x[3])});
      }
    }
  }
}

// ---- gdn/operands ----------------------------------------------------------
// The item of work of a CTA, and what it loads of the kernel's parameters, which are the struct Operands. C: Lanes.
template <class C> struct Item {
  int64 n;     // request
  int   head;  // value head
  int   tile;  // first row

  template <class Operands> __device__ __forceinline__ int64 values(const Operands& p) const {
    return n * p.v_batch_stride + head * C::kValueDim + tile;
  }
  template <class Operands> __device__ __forceinline__ int64 outputs(const Operands& p) const {
    return (n * p.tokens * p.value_heads + head) * C::kValueDim + tile;
  }
  template <StateLayout kLayout>
  __device__ __forceinline__ int64 rows(int row, int lane) const {
    return int64(head) * (C::kValueDim * C::kHeadDim) + lane_offset<C, kLayout>(tile + row, lane);
  }
};

// What is loaded together is used after all loads were issued: until then it stays as it is in memory, because even a
// conversion would wait.

// Entry n of an index list of 4- or 8-byte integers; nothing where there is no list (0 bytes), and the entry is n.
struct Entry { uint32 low, high; };

__device__ __forceinline__ Entry load_entry(const void* list, int bytes, int64 n) {
  Entry entry = {};
  if (bytes == 0) return entry;
  const uint8* from = static_cast<const uint8*>(list) + n * bytes;
  entry.low  = ptx::ld<uint32>(from);
  entry.high = ptx::ld<uint32>(from + bytes - 4);
  return entry;
}

__device__ __forceinline__ int64 value_of(const Entry& entry, int bytes, int64 n) {
  if (bytes == 0) return n;
  return bytes == 8 ? int64(uint64(entry.high) << 32 | entry.low) : int32(entry.low);
}

__device__ __forceinline__ int64 slot_at(const void* slots, int bytes, int64 n) {
  return value_of(load_entry(slots, bytes, n), bytes, n);
}

// Whether the pool has a slot; a negative one never exists.
template <class Operands> __device__ __forceinline__ bool exists(const Operands& p, int64 slot) {
  return uint64(slot) < uint64(p.pool);
}

// Writes zero for every token of an item that has no state; `out` points to the item's first row.
template <class C, class Operands>
__device__ __forceinline__ void clear_outputs(const Operands& p, typename C::In* out) {
  for (int i = threadIdx.x; i < p.tokens * C::kTileV; i += C::kThreads) {
    out[i / C::kTileV * p.value_heads * C::kValueDim + i % C::kTileV].bits = 0;
  }
}

template <typename In> __device__ __forceinline__ float load_half(const In* p) { return low<In>(ptx::ld<uint16>(p)); }

template <class C> __device__ __forceinline__ uint32 load_gate(const void* p, int64 i, int bytes) {
  if (C::kGeneral && bytes == 4) return ptx::ld<uint32>(static_cast<const float*>(p) + i);
  return ptx::ld<uint16>(static_cast<const typename C::In*>(p) + i);
}

template <class C> __device__ __forceinline__ float gate_of(uint32 bits, int bytes) {
  return C::kGeneral && bytes == 4 ? __uint_as_float(bits) : low<typename C::In>(bits);
}

enum class Bias : int { kF32, kBf16, kF16 };
__device__ __forceinline__ uint32 load_bias(const void* p, int i, Bias type) {
  if (type == Bias::kF32) return ptx::ld<uint32>(static_cast<const float*>(p) + i);
  return ptx::ld<uint16>(static_cast<const uint16*>(p) + i);
}

__device__ __forceinline__ float bias_of(uint32 bits, Bias type) {
  return type == Bias::kF32 ? __uint_as_float(bits) : type == Bias::kBf16 ? low<bf16>(bits) : low<f16>(bits);
}

constexpr int kShare = 4;  // heads that one CTA prefetches

// DRAM loses time whenever it switches between writing and reading. So the heads of a batch are cut into groups of
// kAhead, and the CTAs of a group's first heads prefetch the states of the whole next group into L2: DRAM reads come in
// bursts.
template <class C, class Operands>
__device__ __forceinline__ void bring_next_group(const Operands& p, const Item<C>& item) {
  static_assert(C::kAhead % kShare == 0, "every head has a CTA that brings it");
  if constexpr (C::kAhead > 0) {
    const uint32 value_heads = p.value_heads, head = uint32(item.n) * value_heads + item.head;
    const uint32 place = head % C::kAhead;
    const uint32 wanted = head - place + C::kAhead + place * kShare + threadIdx.x;
    if (threadIdx.x >= kShare || place >= C::kAhead / kShare || wanted >= uint32(p.batch) * value_heads) return;
    const int64 slot = slot_at(p.slots, p.slot_bytes, wanted / value_heads);
    if (!exists(p, slot)) return;
    int64 piece = int64(wanted % value_heads) * (C::kValueDim * C::kHeadDim) + item.tile * C::kHeadDim;
    if constexpr (C::kGeneral) piece += (int64(wanted % value_heads) - item.head) * p.state_head_gap;
    ptx::bulk_prefetch(p.state + slot * p.state_stride + piece, C::kTileV * C::kHeadDim * sizeof(typename C::State));
  }
}

// ---- gdn/inputs ------------------------------------------------------------
constexpr float kNormEps = 1e-6f;

// The gates of a token, and the offset in `steps`, in elements, of the state after it; negative: it is not stored.
template <bool kStep> struct Token { float decay, beta; int64 step; };
template <> struct Token<false> { float decay, beta; static constexpr int64 step = -1; };

__device__ __forceinline__ void set_step(Token<true>& token, int64 step) { token.step = step; }
__device__ __forceinline__ void set_step(Token<false>&, int64) {}

// Returns log(1 + exp(x)), which is x itself from about 17 on.
__device__ __forceinline__ float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

// What every row of an item needs: load() issues the loads, the other functions use the loaded values.
// kSteps: the state after every token is stored. C: Lanes.
template <class C, bool kSteps> struct ItemInputs {
  static constexpr int kRowLanes = C::kHeadDim / 4;           // threads of a team: one row, four columns each
  static constexpr int kTeams    = C::kThreads / kRowLanes;   // each takes one row of k or q at a time
  static constexpr int kMaxLoads = (2 * C::kMaxTokens + kTeams - 1) / kTeams;
  static constexpr int kInFlight = kMaxLoads < 4 ? kMaxLoads : 4;

  uint2 kq[kInFlight];
  uint32 a, b, a_log, bias;  // of token gate_token()
  Entry step;

  // The last warp has the gates: with few tokens, it has no row of k or q. Beyond the last token, and in other warps,
  // the number is one that no token has.
  static __device__ __forceinline__ uint32 gate_token() { return threadIdx.x - (C::kThreads - kWarp); }
  static __device__ __forceinline__ int row(int i) { return i * kTeams + int(threadIdx.x) / kRowLanes; }
  static __device__ __forceinline__ int column() { return int(threadIdx.x) % kRowLanes * 4; }

  // Row r is k of token r / 2, or q where r is odd.
  template <class Operands>
  static __device__ __forceinline__ uint2 load_row(const Operands& p, const Item<C>& item, int r) {
    if (r >= 2 * p.tokens) return {};
    const int64 at = item.head / p.heads_ratio * C::kHeadDim + column();
    return ptx::ld<uint2>(r % 2 ? p.q + item.n * p.q_batch_stride + r / 2 * p.q_token_stride + at
                                : p.k + item.n * p.k_batch_stride + r / 2 * p.k_token_stride + at);
  }

  template <class Operands> __device__ __forceinline__ void load(const Operands& p, const Item<C>& item) {
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) kq[i] = load_row(p, item, row(i));
    const uint32 t = gate_token();
    if (t >= p.tokens) return;
    a     = load_gate<C>(p.a, item.n * p.a_batch_stride + t * p.a_token_stride + item.head, p.a_bytes);
    b     = load_gate<C>(p.b, item.n * p.b_batch_stride + t * p.b_token_stride + item.head, p.b_bytes);
    a_log = ptx::ld<uint32>(p.a_log + item.head);
    bias  = load_bias(p.dt_bias, item.head, Bias(p.dt_bias_type));
    if constexpr (kSteps) step = load_entry(p.step_slots, p.step_slot_bytes, item.n * p.tokens + t);
  }

  // Calls use(r, the four halves) for rows r < count of k and q, one row for each team.
  template <class Operands, typename Use>
  __device__ __forceinline__ void for_rows(const Operands& p, const Item<C>& item, int count, Use use) const {
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (i * kTeams < count) use(row(i), kq[i]);
    }
    for (int i = kInFlight; i * kTeams < count; ++i) use(row(i), load_row(p, item, row(i)));
  }

  // Returns the squared length of the team's row.
  static __device__ __forceinline__ float squares(const float (&x)[4]) {
    float ssq[1] = {fmaf(x[3], x[3], fmaf(x[2], x[2], fmaf(x[1], x[1], x[0] * x[0])))};
    group_sum<kRowLanes>(ssq);
    return ssq[0];
  }

  // Returns the gates of token gate_token().
  template <class Operands>
  __device__ __forceinline__ Token<kSteps> token(const Operands& p, const Item<C>& item) const {
    Token<kSteps> token;
    const float x = gate_of<C>(a, p.a_bytes) + bias_of(bias, Bias(p.dt_bias_type));
    token.decay = expf(-expf(__uint_as_float(a_log)) * softplus(x));
    token.beta  = 1.0f / (1.0f + expf(-gate_of<C>(b, p.b_bytes)));
    if constexpr (kSteps) {
      const int64 in_buffer = item.n * p.steps_batch_stride + gate_token() * p.steps_token_stride;
      const int64 slot = value_of(step, p.step_slot_bytes, 0);
      set_step(token, p.step_slot_bytes == 0 ? in_buffer : exists(p, slot) ? slot * p.steps_token_stride : -1);
    }
    return token;
  }
};

// ---- gdn/prologue ----------------------------------------------------------
template <class C> __device__ __forceinline__ Item<C> this_item() {
  const int x = blockIdx.x;
  return {blockIdx.z * int64(gridDim.y) + blockIdx.y, x / C::kTiles, x % C::kTiles * C::kTileV};
}

// Waits for earlier kernels, starts to load what every row of the item needs, and returns the slot of its request. If
// there is none, the outputs are set to zero and the CTA is done. `out` points to the item's first row.
template <class C, bool kSteps, class Operands>
__device__ __forceinline__ int64 begin(const Operands& p, const Item<C>& item, ItemInputs<C, kSteps>& inputs,
                                       typename C::In* out) {
  if constexpr (kHasPdl) ptx::griddep_wait();
  const Entry entry = load_entry(p.slots, p.slot_bytes, item.n);
  inputs.load(p, item);
  const int64 slot = value_of(entry, p.slot_bytes, item.n);
  if (!exists(p, slot)) clear_outputs<C>(p, out);
  return slot;
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

// ---- gdn/row_port ----------------------------------------------------------
// A warp's rows in shared memory, as they are in memory, and the barrier that counts their bytes.
template <class C, bool kUsed> struct Tiles {
  alignas(16) typename C::State rows[C::kWarps][C::kWarpRows * C::kHeadDim];
  Barrier arrived[C::kWarps];
};
template <class C> struct Tiles<C, false> {};

// Moves a warp's rows, of which four lanes share two, between memory and registers. Either each lane loads and stores
// its own, in pieces of 64 bytes of eight rows; or the copy engine moves all of them at once through shared memory,
// which L2 and DRAM serve faster. Then lanes of even and of odd rows take neighbouring pieces of 64 bytes in turns, so
// that there are no bank conflicts.
template <class C, bool kBulk> struct RowPort {
  using State = typename C::State;
  static constexpr uint32 kBytes = C::kWarpRows * C::kHeadDim * sizeof(State);
  Tiles<C, kBulk>& tiles;

  static __device__ __forceinline__ int64 offset() {
    const int thread = threadIdx.x % kWarp;
    return lane_offset<C, StateLayout::kVk>(thread / C::kLanes * C::kIlpRows, thread % C::kLanes);
  }

  // Starts to load the rows from `p`, where the warp's first row begins.
  __device__ __forceinline__ void start(Packed<C>& h, const State* p) {
    if constexpr (kBulk) {
      const int warp = threadIdx.x / kWarp;
      if (threadIdx.x % kWarp != 0) return;
      ptx::mbarrier_init(&tiles.arrived[warp], 1);
      ptx::fence_mbarrier_init();
      ptx::mbarrier_arrive_expect_tx(&tiles.arrived[warp], kBytes);
      ptx::bulk_load_once(tiles.rows[warp], p, kBytes, &tiles.arrived[warp]);
    } else {
      load_rows<C, StateLayout::kVk>(h, p + offset());
    }
  }

  // Waits for the rows. A __syncthreads() separates it from start().
  __device__ __forceinline__ void finish(Packed<C>& h) {
    if constexpr (kBulk) ptx::mbarrier_wait(&tiles.arrived[threadIdx.x / kWarp], 0);
    read(h);
  }

  // Reads the rows from shared memory, if they are there.
  __device__ __forceinline__ void read(Packed<C>& h) {
    if constexpr (kBulk) {
      each_pair([&](State* first, State* second, uint32* words, bool odd) {
        const uint4 a = *reinterpret_cast<const uint4*>(first), b = *reinterpret_cast<const uint4*>(second);
        const uint4 x = odd ? b : a, y = odd ? a : b;
        words[0] = x.x, words[1] = x.y, words[2] = x.z, words[3] = x.w;
        words[4] = y.x, words[5] = y.y, words[6] = y.z, words[7] = y.w;
      }, h);
    }
  }

  // Stores the rows to `p`; bulk copies read shared memory until the function returns.
  __device__ __forceinline__ void store(Packed<C>& h, State* p) {
    if constexpr (kBulk) {
      each_pair([&](State* first, State* second, const uint32* words, bool odd) {
        const uint4 x = {words[0], words[1], words[2], words[3]}, y = {words[4], words[5], words[6], words[7]};
        *reinterpret_cast<uint4*>(first) = odd ? y : x, *reinterpret_cast<uint4*>(second) = odd ? x : y;
      }, h);
      ptx::fence_proxy_async();
      __syncwarp();
      if (threadIdx.x % kWarp != 0) return;
      ptx::bulk_store<true>(p, tiles.rows[threadIdx.x / kWarp], kBytes);
      ptx::bulk_wait_read<0>();
    } else {
      store_rows<C, To::kMemory, StateLayout::kVk>(h, p + offset());
    }
  }

 private:
  // Calls use(first, second, words, odd) for two neighbouring accesses of a lane to one row and their eight words.
  template <typename Use> __device__ __forceinline__ void each_pair(Use use, Packed<C>& h) {
    const bool odd = threadIdx.x / C::kLanes % 2;
    State* rows = tiles.rows[threadIdx.x / kWarp] + offset();
#pragma unroll
    for (int r = 0; r < C::kIlpRows; ++r) {
#pragma unroll
      for (int m = 0; m < C::kAccesses; m += 2) {
        use(rows + access<C>(r, m + odd), rows + access<C>(r, m + 1 - odd), &h[r][4 * m], odd);
      }
    }
  }
};

// ---- spec ------------------------------------------------------------------
struct Config {
  using In    = bf16;
  using State = float;
  static constexpr bool kGeneral = false;  // a and b may be float32, heads of a slot have gaps
  static constexpr int kHeadDim = 128;  // K
  static constexpr int kValueDim = 128;  // V
  static constexpr int kMaxTokens = 4;
  static constexpr int kWarps = 4;
  static constexpr int kTileV = 64;
  static constexpr int kAhead = 0;  // heads whose states are prefetched into L2 at a time; 0: none
  static constexpr bool kBulk = false;  // the copy engine moves the states
  static constexpr int kLanes = 4;  // lanes that share a row
  static constexpr int kIlpRows = 2;  // rows of a lane
};

// ---- work of a lane --------------------------------------------------------
// Lane 4 g + t of a warp holds columns of rows 2 g and 2 g + 1: rows g and g + 8 of a matrix of the tensor cores.
using C = Lanes<Config>;
using In = C::In;
using State = C::State;
// Vectors 2 t and 2 t + 1 are k and q of token t: h is multiplied by all of them.
constexpr int kVectors = 2 * C::kMaxTokens;
constexpr int kBlocks  = kVectors / 8;  // an mma multiplies by 8 vectors, which are those of 4 tokens
constexpr int kGroups  = (kBlocks + 1) / 2;  // of 8 tokens, or all 4
constexpr bool kAsIs   = kIsBf16<State> && kIsBf16<In>;  // products of bf16, without conversions
constexpr int kTerms   = sizeof(State) == 4 ? 2 : 1;  // a float32 of the state is the sum of two TF32 numbers
constexpr bool kReread = C::kBulk && C::kMaxTokens * sizeof(State) > 16;  // rows do not stay in registers meanwhile

static_assert(C::kValueDim % C::kTileV == 0 && C::kTileV == C::kWarps * C::kWarpRows, "every row has a warp");
static_assert(C::kMaxTokens % 4 == 0, "whole blocks");

struct Operands {
  const In* q;
  const In* k;
  const In* v;
  const void* a;
  const void* b;
  const float* a_log;
  const void* dt_bias;
  State* state;
  const void* slots;
  const void* write_slots;
  State* steps;
  const void* step_slots;
  In* out;
  float scale;
  int64 batch;
  int tokens;
  int64 value_heads;
  int heads_ratio;
  int64 pool;
  int64 q_batch_stride;
  int64 q_token_stride;
  int64 k_batch_stride;
  int64 k_token_stride;
  int64 v_batch_stride;
  int64 v_token_stride;
  int64 a_batch_stride;
  int64 a_token_stride;
  int64 b_batch_stride;
  int64 b_token_stride;
  int64 state_stride;
  int64 steps_batch_stride;
  int64 steps_token_stride;
  int dt_bias_type;
  int step_slot_bytes;
  int slot_bytes;
  int write_slot_bytes;
  bool update_state;
  bool l2norm;
  int a_bytes;
  int b_bytes;
  int64 state_head_gap;
  int64 steps_head_gap;
};
using Inputs = ItemInputs<C, false>;

// ---- shared memory ---------------------------------------------------------
struct Shared : Tiles<C, C::kBulk> {
  alignas(16) uint4 vectors[kVectors][C::kPairs];  // not normalised; zero beyond the last token
  float mix[C::kMaxTokens][kVectors];  // [s][n]: the factor of u_s in the result of vector n
  float start[kVectors];  // [n]: the factor of (h times vector n) in the result of vector n
  float norms[kVectors];  // 1 / length of k; 1 / length of q, times scale
  float span[C::kMaxTokens][C::kMaxTokens + 1];  // [t][s + 1]: E_ts, zero where s > t; [t][0]: D_t
  Token<false> tokens[C::kMaxTokens];  // beyond the last one, decay and beta are zero
};

static_assert(sizeof(Shared) == 2352, "the launch counts on it");

// Piece i of a vector has the columns of the lanes' pairs i: word t is that of lane t. So a matrix of eight pieces is
// what an mma takes, as it is or transposed. The order of pieces differs between vectors, so that neither eight
// neighbours nor every second one of sixteen have bank conflicts.
__device__ __forceinline__ uint4* piece(Shared& s, int vector, int i) {
  return &s.vectors[vector][i ^ (vector ^ vector / 8) % 8];
}

__device__ __forceinline__ uint32 bits(float x) { return __float_as_uint(x); }

// ---- once for all rows of an item ------------------------------------------
// Computes the gates of every token, and the products of decays: lane s + 1 multiplies the decays of tokens after s.
__device__ __forceinline__ void stage_gates(Shared& s, const Operands& p, const Item<C>& item, const Inputs& inputs) {
  Token<false> token = {};
  const int lane = threadIdx.x % kWarp;
  if (lane < p.tokens) token = inputs.token(p, item);
  if (lane < C::kMaxTokens) s.tokens[lane] = token;
  float product = 1.0f;
#pragma unroll
  for (int t = 0; t < C::kMaxTokens; ++t) {
    const float decay = __shfl_sync(~0u, token.decay, t);
    if (t >= lane) product *= decay;
    if (lane <= C::kMaxTokens) s.span[t][lane] = t + 1 < lane ? 0.0f : product;
  }
}

__device__ __forceinline__ void stage(Shared& s, const Operands& p, const Item<C>& item, const Inputs& inputs) {
  if (threadIdx.x / kWarp == C::kWarps - 1) stage_gates(s, p, item, inputs);
  inputs.for_rows(p, item, kVectors, [&](int r, uint2 halves) {
    const float x[4] = {low<In>(halves.x), high<In>(halves.x), low<In>(halves.y), high<In>(halves.y)};
    const float norm = p.l2norm ? ptx::rsqrt_approx(Inputs::squares(x) + kNormEps) : 1.0f;
    if (r >= kVectors) return;
    constexpr int kFours = C::kVec / 4;
    const int column = Inputs::column(), lane = column / C::kVec % C::kLanes;
    const int i = column / (C::kLanes * C::kVec) * kFours + column / 4 % kFours;
    reinterpret_cast<uint32*>(piece(s, r, 2 * i))[lane] = halves.x;
    reinterpret_cast<uint32*>(piece(s, r, 2 * i + 1))[lane] = halves.y;
    if (column == 0) s.norms[r] = r % 2 ? norm * p.scale : norm;
  });
}

// The factor of a product with vector n: with k, it is subtracted from v and multiplied by beta; with q, it is a part
// of the output.
__device__ __forceinline__ float weight(const Shared& s, int n) {
  return n % 2 ? s.norms[n] : -s.norms[n] * s.tokens[n / 2].beta;
}

// Computes every k_s k_t and k_s q_t times its factors, and the factors of every h k_t and h q_t.
__device__ __forceinline__ void stage_mix(Shared& s) {
  if (threadIdx.x < kVectors) s.start[threadIdx.x] = weight(s, threadIdx.x) * s.span[threadIdx.x / 2][0];
  constexpr int kTargets = (kVectors + 15) / 16;
  const int thread = threadIdx.x % kWarp, g = thread / C::kLanes, t = thread % C::kLanes;
  for (int tile = threadIdx.x / kWarp; tile < kGroups * kTargets; tile += C::kWarps) {
    const int source = tile % kGroups * 8, target = tile / kGroups * 16;
    const int from_vector = 2 * ((source + thread % 8) % C::kMaxTokens), to_vector = (target + thread % 16) % kVectors;
    float products[2][4] = {};  // independent accumulators, so that no mma waits for the previous one
#pragma unroll
    for (int i = 0; i < C::kPairs; i += 4) {
      const uint4 k = ptx::load_matrices(ptx::shared_address(piece(s, from_vector, i + thread / 8)));
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint4 x = ptx::load_matrices(ptx::shared_address(piece(s, to_vector, i + 2 * half + thread / 16)));
        ptx::mma_half<In>(products[half], {x.x, x.y, x.z, x.w}, half ? k.z : k.x, half ? k.w : k.y);
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int from = source + 2 * t + i % 2, to = target + g + i / 2 * 8, token = to / 2;
      if (from >= C::kMaxTokens || to >= kVectors) continue;
      const bool counts = to % 2 ? from <= token : from < token;
      const float product = products[0][i] + products[1][i];
      s.mix[from][to] = counts ? product * s.norms[from * 2] * weight(s, to) * s.span[token][from + 1] : 0.0f;
    }
  }
}

// ---- a warp's rows ---------------------------------------------------------
using Rows = Packed<C>;

// [b][r][i]: a number for row r of a lane and vector 8 b + 2 t + i, which is k or q of token 4 b + t.
using Sums = float[kBlocks][C::kIlpRows][2];

// words[b] has v of a lane's two rows at token 4 b + t.
struct Values {
  uint32 words[kBlocks];

  // `v` points to the first of the lane's rows.
  __device__ __forceinline__ void load(const In* v, int64 token_stride, int tokens, int lane) {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      const int token = 4 * b + lane;
      words[b] = token < tokens ? ptx::ld<uint32>(v + token * token_stride) : 0;
    }
  }
};

using Factor = uint32[4];

// Splits floats into sums of one or two TF32 numbers.
template <int N>
__device__ __forceinline__ void split(Factor (&terms)[N], const float (&whole)[4]) {
  static_assert(N == 1 || N == 2, "the second takes what the first leaves");
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    terms[0][i] = bits(whole[i]) & 0xFFFFE000u;
    if constexpr (N == 2) terms[1][i] = bits(whole[i] - __uint_as_float(terms[0][i]));
  }
}

// Sets `sums` to h times every vector.
__device__ __forceinline__ void multiply(Sums& sums, const Rows& h, Shared& s) {
  const int thread = threadIdx.x % kWarp;
  constexpr int kChains = C::kMaxTokens > 8 ? 1 : kTerms;  // independent accumulators, where there are registers
  float products[kChains][kBlocks][4] = {};
#pragma unroll
  for (int i = 0; i < C::kPairs; i += 4) {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      const uint4 four = ptx::load_matrices(ptx::shared_address(piece(s, 8 * b + thread % 8, i + thread / 8)));
      const uint32 x[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if constexpr (kAsIs) {
          if (j % 2) continue;
          const int w = i + j;
          ptx::mma_half<In>(products[0][b], {h[0][w], h[1][w], h[0][w + 1], h[1][w + 1]}, x[j], x[j + 1]);
        } else {
          Factor left[kTerms];
          const f32x2 upper = pair_of<State>(h[0], i + j), lower = pair_of<State>(h[1], i + j);
          split(left, {upper.x, lower.x, upper.y, lower.y});
#pragma unroll
          for (int term = 0; term < kTerms; ++term) {
            ptx::mma_tf32(products[term % kChains][b], left[term], bits(low<In>(x[j])), bits(high<In>(x[j])));
          }
        }
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kBlocks * 4; ++i) {
    float sum = products[0][i / 4][i % 4];
    if (kChains == 2) sum += products[kChains - 1][i / 4][i % 4];
    sums[i / 4][i % 4 / 2][i % 2] = sum;
  }
}

// Computes u token by token. `sums` has the products with h before, u and the outputs after.
__device__ __forceinline__ void solve(Sums& sums, const Shared& s, const Values& values, int tokens, int t) {
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    const float2 start = *reinterpret_cast<const float2*>(&s.start[8 * b + 2 * t]);
    const float beta = s.tokens[4 * b + t].beta;
#pragma unroll
    for (int r = 0; r < C::kIlpRows; ++r) {
      const float v = r ? high<In>(values.words[b]) : low<In>(values.words[b]);
      sums[b][r][0] = sums[b][r][0] * start.x + beta * v, sums[b][r][1] *= start.y;
    }
  }
#pragma unroll
  for (int token = 0; token < C::kMaxTokens; ++token) {
    if (token >= tokens) break;
    const float u[C::kIlpRows] = {__shfl_sync(~0u, sums[token / 4][0][0], token % 4, C::kLanes),
                                  __shfl_sync(~0u, sums[token / 4][1][0], token % 4, C::kLanes)};
#pragma unroll
    for (int b = token / 4; b < kBlocks; ++b) {
      if (4 * b + t < token) continue;  // an earlier token: its factor is 0, but u may be NaN
      const float2 mix = *reinterpret_cast<const float2*>(&s.mix[token][8 * b + 2 * t]);
#pragma unroll
      for (int r = 0; r < C::kIlpRows; ++r) {
        sums[b][r][0] = fmaf(u[r], mix.x, sums[b][r][0]);
        sums[b][r][1] = fmaf(u[r], mix.y, sums[b][r][1]);
      }
    }
  }
}

// `out` points to the first of the lane's rows.
__device__ __forceinline__ void store_outputs(const Sums& sums, In* out, int64 stride, int tokens, int t) {
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    const uint32 words[1] = {to_pair<In>(sums[b][0][1], sums[b][1][1])};
    if (4 * b + t < tokens) st_halves<C::kIlpRows>(out + (4 * b + t) * stride, words);
  }
}

// What a lane adds to the state for the tokens of a group: token t, and t + 4 if there are more than four.
struct Change {
  static constexpr bool kOne = kBlocks == 1;
  Factor terms[kAsIs || kOne ? 1 : 2];

  // u is [token][row].
  __device__ __forceinline__ void set(const float (&u)[2][C::kIlpRows]) {
    if constexpr (kAsIs) {
      const auto cut = [](float x) { return __uint_as_float(bits(x) & 0xFFFF0000u); };
#pragma unroll
      for (int r = 0; r < C::kIlpRows; ++r) {
        const float rest = u[0][r] - cut(u[0][r]), other = kOne ? rest : u[1][r];
        terms[0][r]     = to_pair<bf16>(cut(u[0][r]), cut(other));
        terms[0][2 + r] = to_pair<bf16>(kOne ? rest - cut(rest) : rest, kOne ? 0.0f : other - cut(other));
      }
    } else if constexpr (kOne) {
      Factor parts[2];
      split(parts, {u[0][0], u[0][1], 0.0f, 0.0f});
      terms[0][0] = parts[0][0], terms[0][1] = parts[0][1], terms[0][2] = parts[1][0], terms[0][3] = parts[1][1];
    } else {
      split(terms, {u[0][0], u[0][1], u[1][0], u[1][1]});
    }
  }

  // `k` has k of token t, and of token t + 4 or again of t.
  __device__ __forceinline__ void add(float (&d)[4], uint32 k) const {
    if constexpr (kAsIs) {
      ptx::mma_half<In>(d, terms[0], k, k);
    } else {
#pragma unroll
      for (const Factor& term : terms) ptx::mma_tf32(d, term, bits(low<In>(k)), bits(high<In>(k)));
    }
  }
};

// Updates h to the state after the last token.
__device__ __forceinline__ void update(Rows& h, const Sums& sums, Shared& s, int tokens, int t) {
  const int thread = threadIdx.x % kWarp;
  Change change[kGroups];
#pragma unroll
  for (int c = 0; c < kGroups; ++c) {
    float u[2][C::kIlpRows] = {};
#pragma unroll
    for (int b = 2 * c; b < kBlocks && b < 2 * c + 2; ++b) {
      const int token = 4 * b + t;
#pragma unroll
      for (int r = 0; r < C::kIlpRows && token < tokens; ++r) {
        u[b % 2][r] = sums[b][r][0] * s.norms[2 * token] * s.span[tokens - 1][token + 1];
      }
    }
    change[c].set(u);
  }
  const float decay = s.span[tokens - 1][0];
  // Rows of a matrix are k of tokens 0, 4, 1, 5, 2, ... of a group, or of each of four tokens twice.
  const int vector = 2 * (thread % 8 / 2) + (Change::kOne ? 0 : thread % 2 * 8);
#pragma unroll
  for (int i = 0; i < C::kPairs; i += 4) {
    uint32 k[kGroups][4];
#pragma unroll
    for (int c = 0; c < kGroups; ++c) {
      const uint4 four = ptx::load_matrices_transposed(ptx::shared_address(piece(s, 16 * c + vector, i + thread / 8)));
      k[c][0] = four.x, k[c][1] = four.y, k[c][2] = four.z, k[c][3] = four.w;
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const f32x2 upper = mul(pair_of<State>(h[0], i + j), {decay, decay});
      const f32x2 lower = mul(pair_of<State>(h[1], i + j), {decay, decay});
      float d[4] = {upper.x, upper.y, lower.x, lower.y};
#pragma unroll
      for (int c = 0; c < kGroups; ++c) change[c].add(d, k[c][j]);
      set_pair<State>(h[0], i + j, {d[0], d[1]});
      set_pair<State>(h[1], i + j, {d[2], d[3]});
    }
  }
}

// ---- kernel ----------------------------------------------------------------
// Warps that an SM must hold at once: they limit a thread to 168, 128, 96 or 80 registers. Packed floats need register
// pairs, and so the highest limit; rows and products of fewer registers leave room for more warps, which hide
// the loads.
constexpr int kMinWarps = C::kMaxTokens > 8 || kHasF32x2 ? (kReread ? 16 : 12)
                                                         : 16 + 4 * (kTerms == 1 && kBlocks == 1) + 4 * kAsIs;
extern "C" __global__ void __launch_bounds__(C::kThreads, kMinWarps / C::kWarps) gdn_chunk(
    const In* __restrict__ q,              // [batch, tokens, heads, K]
    const In* __restrict__ k,              // [batch, tokens, heads, K]
    const In* __restrict__ v,              // [batch, tokens, value_heads, V]
    const void* __restrict__ a,            // [batch, tokens, value_heads] of a_bytes
    const void* __restrict__ b,            // [batch, tokens, value_heads] of b_bytes
    const float* __restrict__ a_log,       // [value_heads]
    const void* __restrict__ dt_bias,      // [value_heads] of dt_bias_type
    State* __restrict__ state,             // [pool, value_heads, V, K], or K, V
    const void* __restrict__ slots,        // [batch], integers of slot_bytes; outside the pool: no state, output zero
    const void* __restrict__ write_slots,  // [batch], integers of write_slot_bytes; outside the pool: skipped
    State* __restrict__ steps,             // [batch, tokens, value_heads, V, K], or [pool, ...] with step_slots
    const void* __restrict__ step_slots,   // [batch, tokens], integers of step_slot_bytes; outside the pool: skipped
    In* __restrict__ out,                  // [batch, tokens, value_heads, V]
    float scale,                           // of q
    int64 batch,
    int64 tokens,                          // <= kMaxTokens
    int64 value_heads,
    int64 heads_ratio,                     // value heads that share a head of q and k
    int64 pool,                            // slots of state
    int64 q_batch_stride,                  // elements, as all strides
    int64 q_token_stride,
    int64 k_batch_stride,
    int64 k_token_stride,
    int64 v_batch_stride,
    int64 v_token_stride,
    int64 a_batch_stride,
    int64 a_token_stride,
    int64 b_batch_stride,
    int64 b_token_stride,
    int64 state_stride,
    int64 steps_batch_stride,
    int64 steps_token_stride,              // of a slot with step_slots
    int64 dt_bias_type,                    // 0 float, 1 bf16, 2 f16
    int64 step_slot_bytes,                 // 0: steps has its own strides
    int64 slot_bytes,                      // 0, 4 or 8; 0: request n uses slot n
    int64 write_slot_bytes,                // likewise
    int64 update_state,                    // 0: write_slots is not used
    int64 l2norm,                          // 0: q and k as they are
    int64 a_bytes,                         // 2: In, 4: float
    int64 b_bytes,                         // likewise
    int64 state_head_gap,                  // from the end of a head's state to the next head's
    int64 steps_head_gap                   // likewise

) {
  extern __shared__ __align__(16) uint8 dynamic[];
  Shared& s = *reinterpret_cast<Shared*>(dynamic);
  const Item<C> item = this_item<C>();
  if constexpr (C::kGeneral) state += item.head * state_head_gap;  // so that offsets in a state are those without gaps
  const Operands p = {q, k, v, a, b, a_log, dt_bias, state, slots, write_slots, steps, step_slots, out, scale, batch,
      int(tokens), value_heads, int(heads_ratio), pool, q_batch_stride, q_token_stride, k_batch_stride,
      k_token_stride, v_batch_stride, v_token_stride, a_batch_stride, a_token_stride, b_batch_stride,
      b_token_stride, state_stride, steps_batch_stride, steps_token_stride, int(dt_bias_type),
      int(step_slot_bytes), int(slot_bytes), int(write_slot_bytes), bool(update_state), bool(l2norm),
      int(a_bytes), int(b_bytes), state_head_gap, steps_head_gap};
  if (item.n >= batch) return;
  const int t         = threadIdx.x % C::kLanes;
  const int first_row = threadIdx.x / kWarp * C::kWarpRows + threadIdx.x % kWarp / C::kLanes * C::kIlpRows;
  out += item.outputs(p);
  Inputs inputs;
  const int64 slot = begin(p, item, inputs, out);
  if (!exists(p, slot)) return;
  const int64 offset = item.rows<StateLayout::kVk>(threadIdx.x / kWarp * C::kWarpRows, 0);
  Rows h;
  RowPort<C, C::kBulk> port = {s};
  port.start(h, state + slot * state_stride + offset);
  Values values;
  values.load(v + item.values(p) + first_row, v_token_stride, p.tokens, t);
  if constexpr (kHasPdl) ptx::griddep_launch();
  bring_next_group(p, item);
  stage(s, p, item, inputs);
  __syncthreads();

  stage_mix(s);
  Sums sums;
  port.finish(h);
  multiply(sums, h, s);
  __syncthreads();
  const Entry entry = load_entry(write_slots, p.write_slot_bytes, item.n);  // above, no register is free for it
  solve(sums, s, values, p.tokens, t);
  store_outputs(sums, out + first_row, value_heads * C::kValueDim, p.tokens, t);
  const int64 write_slot = p.update_state ? value_of(entry, p.write_slot_bytes, item.n) : -1;
  if (!exists(p, write_slot)) return;
  if constexpr (kReread) port.read(h);
  update(h, sums, s, p.tokens, t);
  port.store(h, state + write_slot * state_stride + offset);
}

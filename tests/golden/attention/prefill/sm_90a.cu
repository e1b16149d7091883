// attention_prefill, generated from templates/attention/prefill.cu.j2
// spec: {"cache":"nvfp4","head_dim":128,"interleaved":false,"min_ctas":1,"out_dtype":"bf16","q_dtype":"bf16","soft_cap":false,"tile":32,"warp_rows":16,"warps":4}
//
// Attention of many query rows over a paged cache. A CTA takes kRows query rows of one request and KV head, kWarpRows
// for each warp, and all tokens that any of them sees, in tiles of kTile: while the warps multiply one tile, the next
// ones are copied.
//
// One barrier orders all: a warp arrives in the middle of a tile, and waits at its end. So warps may be half a tile
// apart, and the softmax of one falls into the products of another:
//
//   | scores t | arrive t | softmax, outputs t | wait t | decode t + 2, copy t + 3 | scores t + 1
//
// After the wait for tile t all warps are through with t - 1, whose buffer gets t + 2, and what they copied and decoded
// before they arrived is there. 16-bit floats are not decoded: they are copied, and looked up, a tile later.

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

// ---- partials/select -------------------------------------------------------
// Select<kFirst, A, B> is the type A where kFirst is true, else B.
template <bool kFirst, typename A, typename B> struct Choice { using Type = A; };
template <typename A, typename B> struct Choice<false, A, B> { using Type = B; };
template <bool kFirst, typename A, typename B> using Select = typename Choice<kFirst, A, B>::Type;

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

// ---- spec ------------------------------------------------------------------
constexpr int  kCacheBits   = 4;  // of an element of K and V
constexpr bool kIsBf16Cache = false;

using Query = bf16;
using Out   = bf16;
constexpr int  kHeadDim     = 128;
constexpr int  kWidth       = 128;  // of rows in shared memory, of which products take kHeadDim elements
constexpr bool kInterleaved = false;  // V's scales, by four tokens
constexpr bool kSoftCap     = false;  // logits are capped
constexpr bool kMasked      = false;  // by the caller
constexpr int  kWarps       = 4;
constexpr int  kWarpRows    = 16;
constexpr int  kTile        = 32;  // tokens
constexpr int  kMinCtas     = 1;  // that an SM must hold at once; bounds the registers

constexpr int  kThreads    = kWarps * kWarp;
constexpr int  kRows       = kWarps * kWarpRows, kParts = kWarpRows / 16;
constexpr int  kSteps      = kHeadDim / 16;
constexpr bool kHalves     = kCacheBits == 16;
constexpr bool kHeldQueries = kHeadDim * kWarpRows <= 128 * 16;  // in registers
constexpr int  kQueryBytes = kHeldQueries ? 0 : kRows * kHeadDim * 2;  // in shared memory
using Mma = Select<kHalves && kIsBf16Cache, bf16, f16>;

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
  float soft_cap;
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

// ---- attention/blocks ------------------------------------------------------
// The work of a call: blocks of kRows query rows of one request and one KV head, one for each CTA. A row is one query
// token of one of the heads that share the KV head: row = token * group + head. The last rows of a request and head
// come first: under a causal mask they see the most tokens, and blocks that start last should be short.
template <int kTile, int kRows, class Mask> struct RowBlock : Mask {
  TiledRequest<kTile, kRows, 1> request;  // all warps of a CTA take the same KV head
  int head, first_row;

  // Finds the block of this CTA; false where it has none. Each warp searches by itself, 32 requests at a time.
  template <class Operands> __device__ __forceinline__ bool find(const Operands& p) {
    const int lane = threadIdx.x % kWarp;
    int before = 0;
    for (int base = 0; base < p.batch; base += kWarp) {
      int own = 0;
      if (base + lane < p.batch) {
        request.load(p, base + lane);
        own = request.items(p);
      }
      int upto = own;
#pragma unroll
      for (int distance = 1; distance < kWarp; distance *= 2) {
        const int other = __shfl_up_sync(~0u, upto, distance);
        if (lane >= distance) upto += other;
      }
      const uint32 behind = __ballot_sync(~0u, before + upto > int(blockIdx.x));
      if (behind != 0) {
        const int found = __ffs(behind) - 1;
        const int inside = int(blockIdx.x) - before - __shfl_sync(~0u, upto - own, found);
        request.load(p, base + found);
        head = inside / request.row_blocks;
        mask() = Mask(p, request, base + found);
        first_row = (request.row_blocks - 1 - inside % request.row_blocks) * kRows;
        return true;
      }
      before += __shfl_sync(~0u, upto, kWarp - 1);
    }
    return false;
  }
  template <class Operands> __device__ __forceinline__ int rows(const Operands& p) const {
    return request.q_len * p.group;
  }
  __device__ __forceinline__ Mask& mask() { return *this; }
  __device__ __forceinline__ const Mask& mask() const { return *this; }
};

// The tokens that several rows see, from `first` to before `end`: those that some row sees, and those that all see.
struct Sight {
  Span of_first, of_last;

  // Looks at `count` rows from `row` on.
  template <class Operands, class Block>
  __device__ __forceinline__ Sight(const Operands& p, const Block& block, int row, int count)
      : of_first(p, block.request, row / p.group, p.causal),
        of_last(p, block.request, (row + count - 1) / p.group, p.causal) {}
  __device__ __forceinline__ int some_first() const { return of_first.first; }
  __device__ __forceinline__ int some_end() const { return max(0, of_last.end); }
  __device__ __forceinline__ int all_first() const { return of_last.first; }
  __device__ __forceinline__ int all_end() const { return of_first.end; }
};

using Block   = RowBlock<kTile, kRows, Select<kMasked, TokenMask, NoMask>>;
using Request = decltype(Block::request);

// What a CTA does: in shared memory, since registers are few.
struct Task {
  // Of a warp: the tokens that some row sees, and those that all see.
  struct alignas(16) Spans { int first, end, all_first, all_end; };

  Spans  spans[kWarps];
  Block  block;
  int    first, end;    // of the tokens that some row sees
  int    begin, tiles;  // the first token of the first tile, which may be before
  uint32 inverse;       // of the tokens of a page
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

// ---- partials/mbarrier_spin ------------------------------------------------
constexpr bool kHasTryWait = true;

namespace ptx {
// As mbarrier_wait, where a thread cannot be suspended: it looks again and again.
__device__ __forceinline__ void mbarrier_spin(Barrier* b, uint32 parity) {
  if constexpr (kHasTryWait) return mbarrier_wait(b, parity);
  uint32 done = 0;
  while (!done)
    asm volatile("{\n"
                 "  .reg .pred p;\n"
                 "  mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                 "  selp.u32 %0, 1, 0, p;\n"
                 "}"
                 : "=r"(done) : "r"(shared_address(b)), "r"(parity) : "memory");
}
}  // namespace ptx

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

// ---- attention/columns -----------------------------------------------------
// The column of the page table that has a token is found by a division by the tokens of a page.
template <class Operands> __device__ __forceinline__ uint32 inverse_of_page(const Operands& p) {
  return (0x80000000u + p.page - 1) / p.page;
}
__device__ __forceinline__ int column_of(int token, uint32 inverse) {
  return int(__umulhi(2 * token, inverse));  // exact below 2^24
}

// ---- attention/tiles -------------------------------------------------------
// Copies of tiles of kTile tokens from pages to shared memory, where all warps of a CTA read them as 16-bit floats:
// rows of kHeadDim elements, K, then V, in one of three buffers, by turns. A cache of 16-bit floats is copied to them
// directly. Others are first copied in their own format, codes of K and V, then their scales, and decoded once for all
// warps.
template <int kCacheBits, int kHeadDim, int kWidth, bool kInterleaved, int kTile, int kThreads, int kQueryBytes,
          class Task, bool kFewRegisters>
struct CacheTiles {
  static constexpr bool kHalves     = kCacheBits == 16;
  static constexpr int  kRowBytes   = kHeadDim * kCacheBits / 8, kScaleBytes = kCacheBits == 4 ? kHeadDim / 16 : 0;
  static constexpr int  kUnroll     = kHeadDim <= 128 ? 8 : 1;  // of loops beside the sums, which leave few registers
  static constexpr int kHalfRow      = 2 * kWidth;  // bytes
  static constexpr int kSideBytes    = kTile * kHalfRow;
  static constexpr int kRawSideBytes = kTile * kRowBytes, kRawScalesAt = 2 * kRawSideBytes;
  static constexpr int kScalesRow    = (kScaleBytes + 3) / 4 * 4;
  static constexpr int kRawBytes     = kHalves ? 0 : 2 * kTile * (kRowBytes + kScalesRow);
  static constexpr int kBuffers      = 3;
  static constexpr int kAhead        = kHalves ? 2 : 3;  // how many tiles ahead of its use a tile is copied
  static constexpr int kRowTurns     = 4;
  static constexpr int kWords        = kTile > kWarp ? kTile / kWarp : 1;  // that have a bit for each token
  // Of decoded numbers:
  static constexpr float kUnit = !kHalves && kCacheBits == 4 && !kHasE2m1Cvt ? 0x1p-7f : 1.0f;

  // Of a token: where its rows of K and V lie, and their scales. Before, the numbers of its pages, its slot in them,
  // and bits: 0 if some row of the CTA sees the token, 1 if it may be one of four tokens of which one is seen, whose V
  // scales are interleaved.
  using Rows = uint64[kScaleBytes > 0 ? 4 : 2];

  struct Shared {
    alignas(1024) uint8 halves[kBuffers][2 * kSideBytes];
    alignas(16) Rows rows[kRowTurns][kTile];
    uint32 present[kRowTurns][2];  // a bit for each token that is seen and has a page
    alignas(16) uint8 rest[2 * kRawBytes + kQueryBytes + 16];  // tiles as they are in the cache, by turn; query rows
    Barrier behind;  // the middle of a tile
    Task    task;
  };

  __device__ __forceinline__ static uint32 thread_index() {
    return kFewRegisters ? ptx::thread_index() : threadIdx.x;
  }
  // The offset of a chunk of 16 bytes: those of each 128 bytes are permuted, and eight rows' are in different banks.
  __device__ __forceinline__ static constexpr int place_of(int row, int chunk) {
    return row * kHalfRow + (chunk ^ (row & 7)) * 16;
  }

  // Looks up the pages of a tile's tokens, whose numbers are then copied from the page table.
  template <class Operands>
  __device__ __forceinline__ static void look_up(const Operands& p, Shared& s, int tile) {
    const Task& task = s.task;
    const int thread = thread_index();
    if (thread >= kTile) return;
    const int    token  = task.begin + tile * kTile + thread, column = column_of(token, task.inverse);
    const bool   listed = (kInterleaved ? token & ~3 : token) < task.end;
    const uint32 to     = ptx::shared_address(s.rows[tile % kRowTurns][thread]);
    const int32* from   = p.tables + (listed ? task.block.request.table + column : 0);
    ptx::copy_or_clear<4, false>(to, from, listed);
    ptx::copy_or_clear<4, false>(to + 4, from + p.v_table, listed);
    ptx::st_shared_word(to + 8, token - column * p.page);
    ptx::st_shared_word(to + 12, listed ? token >= task.first && token < task.end ? 3 : 2 : 0);
  }
  // Ends a look-up, when the copies are complete.
  template <class Operands> __device__ __forceinline__ static void settle(const Operands& p, Shared& s, int tile) {
    const int thread = thread_index(), turn = tile % kRowTurns;
    if (thread >= kWords * kWarp) return;
    uint32 bits = 0;
    if (thread < kTile) {
      Rows& rows = s.rows[turn][thread];
      const uint4 place = ptx::ld_shared(ptx::shared_address(rows));
      const int   k_page = place.x, v_page = place.y, slot = place.z;
      if (place.x < uint32(p.num_pages) && place.y < uint32(p.num_pages)) bits = place.w;
      const auto set = [&](int i, const uint8* base, int64 head_stride, int page, int page_stride, int token_stride) {
        const uint8* page_rows = ptx::mad_wide(page, page_stride, base + s.task.block.head * head_stride);
        rows[i] = uint64(ptx::mad_wide(slot, token_stride, page_rows));
      };
      set(0, p.k, p.k_head_stride, k_page, p.k_page_stride, p.k_token_stride);
      set(1, p.v, p.v_head_stride, v_page, p.v_page_stride, p.v_token_stride);
      if constexpr (kScaleBytes > 0) {
        set(2, p.k_scales, p.k_scales_head_stride, k_page, p.k_scales_page_stride, p.k_scales_token_stride);
        set(3, p.v_scales, p.v_scales_head_stride, v_page, p.v_scales_page_stride, p.v_scales_token_stride);
        if (bits == 0) rows[3] = 0;
      }
    }
    const uint32 present = __ballot_sync(~0u, bits & 1);
    if (thread % kWarp == 0) s.present[turn][thread / kWarp] = present;
  }
  // Whether all tokens of a tile are present.
  __device__ __forceinline__ static bool whole(const Shared& s, int tile) {
    constexpr uint32 kAll = kTile >= kWarp ? ~0u : (1u << kTile % kWarp) - 1;
    const uint32* present = s.present[tile % kRowTurns];
    return present[0] == kAll && (kWords == 1 || present[kWords - 1] == kAll);
  }

  // Starts the copies of a tile. Tokens that have no page are not read, and become 0.
  __device__ __forceinline__ static void copy_tile(Shared& s, int tile) {
    if (whole(s, tile)) copy_rows<true>(s, tile);
    else copy_rows<false>(s, tile);
  }
  template <bool kWhole> __device__ __forceinline__ static void copy_rows(Shared& s, int tile) {
    constexpr uint32 kBytes = kRowBytes % 16 == 0 ? 16 : 8;  // that rows are aligned to
    constexpr uint32 kChunks = kRowBytes / kBytes, kCopies = kTile * kChunks;
    constexpr bool   kEven = kThreads % kChunks == 0;  // a thread's chunks have the same place in their rows
    const uint32  thread  = thread_index();
    const Rows*   rows    = s.rows[tile % kRowTurns];
    const uint32* present = s.present[tile % kRowTurns];
    const uint32  to = ptx::shared_address(kHalves ? s.halves[tile % kBuffers] : s.rest + tile % 2 * kRawBytes);
    const auto    is_present = [&](uint32 row) { return kWhole || (present[row / kWarp] >> row % kWarp & 1); };
#pragma unroll kUnroll
    for (uint32 i = 0; i < kCopies; i += kThreads) {
      const uint32 copy = i + thread, row = kEven ? i / kChunks + thread / kChunks : copy / kChunks;
      const uint32 chunk = kEven ? thread % kChunks : copy % kChunks;
      if (kCopies % kThreads != 0 && copy >= kCopies) break;
      const auto [k_low, k_high, v_low, v_high] = ptx::ld_shared(ptx::shared_address(rows[row]));
      const uint8* k = reinterpret_cast<const uint8*>(uint64(k_high) << 32 | k_low);
      const uint8* v = reinterpret_cast<const uint8*>(uint64(v_high) << 32 | v_low);
      const uint32 at = to + (kHalves ? place_of(row, chunk) : copy * kBytes);
      ptx::copy_or_clear<kBytes, kWhole>(at, k + chunk * kBytes, is_present(row));
      ptx::copy_or_clear<kBytes, kWhole>(
          at + (kHalves ? kSideBytes : kRawSideBytes), v + chunk * kBytes, is_present(row));
    }
    if constexpr (kScaleBytes > 0) {
#pragma unroll
      for (uint32 i = 0; i < 2 * kTile; i += kThreads) {
        const uint32 copy = i + thread, row = copy % kTile, side = copy / kTile;
        if (2 * kTile % kThreads != 0 && copy >= 2 * kTile) break;
        const uint64 from = rows[row][2 + side];
        ptx::copy_row_or_clear<kScaleBytes, kScalesRow, kWhole>(
            to + kRawScalesAt + copy * kScalesRow, reinterpret_cast<const uint8*>(from),
            kInterleaved && side == 1 ? from != 0 : is_present(row));
      }
    }
  }

  // Decodes 16 neighbouring elements to 16-bit floats in their order. `scale` is that of their block.
  __device__ __forceinline__ static void decode_block(const uint8* from, uint32 scale, uint4 (&to)[2]) {
    uint32 pairs[8];
    if constexpr (kCacheBits == 4) {
      const uint2 codes = *reinterpret_cast<const uint2*>(from);
      const uint32 words[2] = {codes.x, codes.y}, both = decode_scales(scale * 0x0101u);
#pragma unroll
      for (int w = 0; w < 2; ++w) {
        uint32 four[4];
        decode(words[w], four);
#pragma unroll
        for (int i = 0; i < 4; ++i) {  // by software, a pair has codes i and i + 4
          const uint32 sorted = __byte_perm(four[i % 2 * 2], four[i % 2 * 2 + 1], i < 2 ? 0x5410 : 0x7632);
          pairs[4 * w + i] = ptx::mul_f16x2(kHasE2m1Cvt ? four[i] : sorted, both);
        }
      }
    } else {
      const uint4 bytes = *reinterpret_cast<const uint4*>(from);
      const uint32 words[4] = {bytes.x, bytes.y, bytes.z, bytes.w};
#pragma unroll
      for (int i = 0; i < 8; ++i) pairs[i] = decode_e4m3x2(uint16(words[i / 2] >> i % 2 * 16));
    }
    to[0] = {pairs[0], pairs[1], pairs[2], pairs[3]}, to[1] = {pairs[4], pairs[5], pairs[6], pairs[7]};
  }

  // Decodes a tile that has been copied to 16-bit floats. V of tokens that have no page becomes 0.
  __device__ __forceinline__ static void decode_tile(Shared& s, int tile) {
    constexpr int kRowBlocks = kHeadDim / 16, kSideBlocks = kTile * kRowBlocks;
    const uint8*  raw     = s.rest + tile % 2 * kRawBytes;
    const uint32* present = s.present[tile % kRowTurns];
    const int     thread  = thread_index();
#pragma unroll kUnroll
    for (int i = 0; i < kSideBlocks; i += kThreads) {
      // Eight lanes take four blocks of two rows each, so that they write to different banks.
      const int at = i + thread;
      if (kSideBlocks % kThreads != 0 && at >= kSideBlocks) break;
      constexpr bool kFours = kRowBlocks % 4 == 0;
      const int row   = kFours ? at / (2 * kRowBlocks) * 2 + at / 4 % 2 : at / kRowBlocks;
      const int block = kFours ? at / 8 % (kRowBlocks / 4) * 4 + at % 4 : at % kRowBlocks;
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        uint32 scale = 0;
        if constexpr (kScaleBytes > 0) {
          const uint8* scales = raw + kRawScalesAt + side * kTile * kScalesRow;
          const bool grouped = kInterleaved && side == 1;
          scale = scales[grouped ? row / 4 * 4 * kScalesRow + block * 4 + row % 4 : row * kScalesRow + block];
          if (grouped && !(present[row / kWarp] >> row % kWarp & 1)) scale = 0;
        }
        uint4 halves[2];
        decode_block(raw + side * kRawSideBytes + (row * kRowBlocks + block) * (kCacheBits * 2), scale, halves);
        uint8* to = s.halves[tile % kBuffers] + side * kSideBytes;
#pragma unroll
        for (int j = 0; j < 2; ++j) *reinterpret_cast<uint4*>(to + place_of(row, 2 * block + j)) = halves[j];
      }
    }
  }
};
using Tiles  = CacheTiles<kCacheBits, kHeadDim, kWidth, kInterleaved, kTile, kThreads, kQueryBytes, Task,
                          (kParts > 1)>;
using Shared = Tiles::Shared;

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

// ---- attention/soft_cap ----------------------------------------------------
// A logit x becomes cap * tanh(x / cap). The product times `scale` is x, and the result is capped, both as exponents of
// two. tanh(z) is 1 - 2 / (1 + e^(2 z)), whose error is that of a few roundings of the cap.
__device__ __forceinline__ float soft_capped(float soft_cap, float product, float scale) {
  constexpr float kToTwo = 1.44269504f;  // from exponents of e
  const float cap = soft_cap * kToTwo;
  const float power = ptx::ex2_approx(product * (scale * (2.0f * kToTwo / cap)));
  return fmaf(-2.0f * cap, ptx::rcp_approx(1.0f + power), cap);
}

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

// ---- attention/rows --------------------------------------------------------
// The 16 kParts query rows of a warp, which are the left factor of the product with K, and their ending. Of each 16
// rows, a lane has elements of rows g and g + 8. In float16, each row is first scaled by a power of two to a maximum
// near 2^14, which keeps all bits of bfloat16 values over 28 binades.
// The row of a lane's elements in part n, half i.
template <int kParts, class Block> __device__ __forceinline__ int row_of(const Block& block, int n, int i) {
  const int thread = ptx::thread_index();
  return block.first_row + thread / kWarp * (16 * kParts) + 16 * n + 8 * i + thread % kWarp / 4;
}

// They are in registers, or in shared memory.
template <class Query, class Mma, int kHeadDim, int kParts, int kThreads, bool kHeld> struct RowQueries {
  static constexpr int kSteps = kHeadDim / 16;
  uint32 words[kHeld ? kParts : 1][kHeld ? kSteps : 1][4];
  uint32 at;  // address of this lane's words in shared memory

  // `one` is the number that stands for 1 in keys, `to` the room for all rows in shared memory.
  template <class Operands, class Block>
  __device__ __forceinline__ void load(
      const Operands& p, const Block& block, float one, uint32 to, RowScales<kParts>& scales) {
    const float unit = logit_scale(p, one);
    at = to + threadIdx.x * 16;
    uint32 rows[kParts][2][2 * kSteps];
#pragma unroll
    for (int n = 0; n < kParts; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) load_row(p, block, row_of<kParts>(block, n, i), rows[n][i]);
    }
#pragma unroll
    for (int n = 0; n < kParts; ++n) {
      uint32 (&raw)[2][2 * kSteps] = rows[n];
      float factor[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float scale = fabsf(unit) * normalise(raw[i], factor[i]);
        scales.x[n][i] = scale < 0x1p-126f ? 0x1p-126f : scale;  // times -inf is -inf
        factor[i] = copysignf(factor[i], unit);
      }
#pragma unroll
      for (int m = 0; m < kSteps; ++m) {
        uint32 a[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const uint32 two = raw[j % 2][2 * m + j / 2];
          a[j] = to_pair<Mma>(low<QueryHalf>(two) * factor[j % 2], high<QueryHalf>(two) * factor[j % 2]);
        }
        if constexpr (kHeld) {
#pragma unroll
          for (int j = 0; j < 4; ++j) words[n][m][j] = a[j];
        } else {
          ptx::st_shared(at + (n * kSteps + m) * kThreads * 16, {a[0], a[1], a[2], a[3]});
        }
      }
    }
  }
  // Returns the left factor of part n in step m, 16 rows by 16 dimensions.
  __device__ __forceinline__ void get(int n, int m, uint32 (&a)[4]) const {
    if constexpr (kHeld) {
#pragma unroll
      for (int j = 0; j < 4; ++j) a[j] = words[n][m][j];
    } else {
      const uint4 v = ptx::ld_shared(at + (n * kSteps + m) * kThreads * 16);
      a[0] = v.x, a[1] = v.y, a[2] = v.z, a[3] = v.w;
    }
  }

 private:
  using QueryHalf = Select<sizeof(Query) == 2, Query, f16>;

  // This lane's elements of a row, zeros beyond the last row: a pair of neighbours of each eight dimensions.
  template <class Operands, class Block>
  __device__ __forceinline__ static void load_row(
      const Operands& p, const Block& block, int row, uint32 (&x)[2 * kSteps]) {
    const Query* from = p.q + (block.request.q_begin + row / p.group) * p.q_token_stride +
                        (block.head * p.group + row % p.group) * p.q_head_stride + threadIdx.x % 4 * 2;
    const bool used = row < block.rows(p);
#pragma unroll
    for (int i = 0; i < 2 * kSteps; ++i) {
      x[i] = 0;
      if (used) {
        if constexpr (sizeof(Query) == 1) x[i] = decode_e4m3x2(ptx::ld<uint16>(from + 8 * i));
        else x[i] = ptx::ld<uint32>(from + 8 * i);
      }
    }
  }
  // `factor` is the power of two that scales a row; returns its inverse.
  __device__ __forceinline__ static float normalise(const uint32 (&x)[2 * kSteps], float& factor) {
    factor = 1.0f;
    if constexpr (kIsBf16<Mma>) return 1.0f;
    float amax = 0.0f;
#pragma unroll
    for (int i = 0; i < 2 * kSteps; ++i) {
      amax = fmaxf(amax, fmaxf(fabsf(low<QueryHalf>(x[i])), fabsf(high<QueryHalf>(x[i]))));
    }
    amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, 1));
    amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, 2));
    const uint32 exponent = query_exponent(amax);
    factor = __uint_as_float(exponent << 23);
    return __uint_as_float((254 - exponent) << 23);
  }
};

// Writes the outputs of its rows. `one` is the number that stands for 1 in values.
template <int kParts, int kTile, int kHeadDim, class Operands, class Block>
__device__ __forceinline__ void finish(
    Softmax<kParts, kTile, kHeadDim, false>& state, const Operands& p, const Block& block, float one) {
  const float unit = output_scale(p, one);
  state.close();
#pragma unroll
  for (int n = 0; n < kParts; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int at = row_of<kParts>(block, n, i);
      if (at >= block.rows(p)) continue;
      const int c = ptx::thread_index() % 4;
      const OutputRow row(p, block.request, block.head, at / p.group, at % p.group);
      const float scale = end_row(p, row, c == 0, unit, state.reference[n][i], state.sum[n][i]);
      auto* out = p.out + row.at * kHeadDim + 2 * c;
#pragma unroll
      for (int m = 0; m < kHeadDim / 8; ++m) {
        store_outputs(out + 8 * m, float2{state.o[n][m][2 * i] * scale, state.o[n][m][2 * i + 1] * scale});
      }
    }
  }
}

using Queries  = RowQueries<Query, Mma, kHeadDim, kParts, kThreads, kHeldQueries>;
using State    = Softmax<kParts, kTile, kHeadDim, false>;
using Scales   = State::Scales;

static_assert(sizeof(Shared) == 63488, "the launch counts on it");

// ---- a tile ----------------------------------------------------------------
// `partial`: some row of the warp does not see all tokens of the tile. Calls `middle` between the products. Fragments
// are loaded one step before their products.
template <class F>
__device__ __forceinline__ void attend(const Operands& p, const Block& block, Shared& s, int tile, int start,
                                       bool partial, const Queries& q, const Scales& scales, State& state, F middle) {
  constexpr int kFours = kTile / 16, kProducts = kSteps * kFours;
  const auto side = [&](int i) {
    return ptx::shared_address(s.halves[tile % Tiles::kBuffers]) + i * Tiles::kSideBytes;
  };
  const int  lane = Tiles::thread_index() % kWarp;
  const uint32 k = side(0) + Tiles::place_of(lane % 8 + lane / 16 * 8, lane / 8 % 2);
  const auto load_k = [&](int i) {
    return ptx::load_matrices((k ^ 32 * (i / kFours)) + i % kFours * 16 * Tiles::kHalfRow);
  };
  State::Logits x = {};
  uint32 a[kParts][4];
  uint4  b = load_k(0);
#pragma unroll
  for (int i = 0; i < kProducts; ++i) {
    const int u = i % kFours;
#pragma unroll
    for (int n = 0; n < kParts; ++n) {
      if (u == 0) q.get(n, i / kFours, a[n]);
    }
    const uint4 next = i + 1 < kProducts ? load_k(i + 1) : b;
#pragma unroll
    for (int n = 0; n < kParts; ++n) {
      ptx::mma_half<Mma>(x[n][2 * u], a[n], b.x, b.y);
      ptx::mma_half<Mma>(x[n][2 * u + 1], a[n], b.z, b.w);
    }
    b = next;
  }
  if constexpr (kSoftCap) State::cap(p.soft_cap, x, scales);
  if (partial || !Tiles::whole(s, tile)) {
    uint32 present[Tiles::kWords];
#pragma unroll
    for (int w = 0; w < Tiles::kWords; ++w) present[w] = s.present[tile % Tiles::kRowTurns][w];
    State::hide(x, ptx::thread_index() % kWarp, [&](int n, int i) {
      const int query = row_of<kParts>(block, n, i) / p.group;
      return Seen(p, block.request, query, p.causal, block.mask(), start, present);
    });
  }
  middle();
  const bool moved = state.refer(x, kSoftCap ? Scales::ones() : scales);
  if (moved) state.move();
  const int at = Tiles::thread_index() % kWarp;
  const uint32 v = side(1) + Tiles::place_of(at % 16, at / 16);
  const auto load_v = [&](int i) {
    return ptx::load_matrices_transposed((v ^ 32 * (i % kSteps)) + i / kSteps * 16 * Tiles::kHalfRow);
  };
  b = load_v(0);
#pragma unroll
  for (int u = 0; u < kFours; ++u) {
#pragma unroll
    for (int n = 0; n < kParts; ++n) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {  // rows g, g + 8 of eight tokens, then of the next
        float (&four)[4] = x[n][2 * u + j / 2];
        if (j % 2 == 0) state.weigh(n, four);
        a[n][j] = to_pair<Mma>(four[j % 2 * 2], four[j % 2 * 2 + 1]);
      }
    }
#pragma unroll
    for (int m = 0; m < kSteps; ++m) {
      const int   i    = u * kSteps + m;
      const uint4 next = i + 1 < kProducts ? load_v(i + 1) : b;
#pragma unroll
      for (int n = 0; n < kParts; ++n) {
        ptx::mma_half<Mma>(state.o[n][2 * m], a[n], b.x, b.y);
        ptx::mma_half<Mma>(state.o[n][2 * m + 1], a[n], b.z, b.w);
      }
      b = next;
    }
  }
}

// ---- kernel ----------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kThreads, kMinCtas) attention_prefill(
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
    float soft_cap                          // of logits

) {
  extern __shared__ __align__(1024) uint8 dynamic[];
  Shared& s = *reinterpret_cast<Shared*>(dynamic);
  const Operands p = {q, k, v, k_scales, v_scales, tables, seq_lens, page_ends, cum_q, sinks, bmm1_tensor, bmm2_tensor,
      out, lse, bmm1, bmm2, int(batch), int(kv_heads), int(group), int(q_len), int(total_q),
      int(num_pages), int(page), int(max_pages), int(window_left), q_token_stride, q_head_stride,
      int(k_page_stride), int(k_token_stride), k_head_stride, int(v_page_stride), int(v_token_stride),
      v_head_stride, int(k_scales_page_stride), int(k_scales_token_stride), k_scales_head_stride,
      int(v_scales_page_stride), int(v_scales_token_stride), v_scales_head_stride, int(table_stride),
      int(v_table), int(causal), soft_cap};

  if constexpr (kHasPdl) ptx::griddep_wait();
  {
    Block block;
    if (!block.find(p)) return;
    if (threadIdx.x == 0) {
      const Sight all(p, block, block.first_row, min(kRows, block.rows(p) - block.first_row));
      Task& task = s.task;
      task.block = block, task.inverse = inverse_of_page(p);
      task.first = all.some_first(), task.end = all.some_end(), task.begin = task.first / kTile * kTile;
      task.tiles = int(ceil_div(task.end - task.begin, kTile));
      ptx::mbarrier_init(&s.behind, kWarps);
    }
    if (threadIdx.x % kWarp == 0) {
      const int   warp = threadIdx.x / kWarp, first_row = block.first_row + warp * kWarpRows;
      const Sight sight(p, block, first_row, kWarpRows);
      s.task.spans[warp] = {sight.some_first(), first_row < block.rows(p) ? sight.some_end() : 0, sight.all_first(),
                            block.end_for_all(p, block.request, sight.all_end())};
    }
  }
  if constexpr (kHasPdl) ptx::griddep_launch();
  __syncthreads();

  const Task&  task  = s.task;
  const Block& block = task.block;
  for (int tile = 0; tile <= Tiles::kAhead; ++tile) Tiles::look_up(p, s, tile);
  Queries queries;
  Scales scales;
  State state;
  queries.load(p, block, Tiles::kUnit, ptx::shared_address(s.rest) + 2 * Tiles::kRawBytes, scales);
  state.clear();
  ptx::copy_async_wait();
  for (int tile = 0; tile < Tiles::kAhead; ++tile) Tiles::settle(p, s, tile);
  __syncthreads();
  const int tiles = task.tiles, begin = task.begin;  // read at every tile
  const Task::Spans seen = task.spans[threadIdx.x / kWarp];
  for (int tile = 0; tile < min(2, tiles); ++tile) Tiles::copy_tile(s, tile);
  ptx::copy_async_wait();
  __syncthreads();
  if constexpr (!kHalves) {
    for (int tile = 0; tile < min(2, tiles); ++tile) Tiles::decode_tile(s, tile);
    __syncthreads();
    if (2 < tiles) Tiles::copy_tile(s, 2);
  }
#pragma unroll 1
  for (int tile = 0; tile < tiles; ++tile) {
    const int  start  = begin + tile * kTile;
    const auto arrive = [&] {
      ptx::copy_async_wait();
      if (tile + Tiles::kAhead < tiles) Tiles::settle(p, s, tile + Tiles::kAhead);
      __syncwarp();
      if (ptx::thread_index() % kWarp == 0) ptx::mbarrier_arrive(&s.behind);
    };
    if (start < seen.end && start + kTile > seen.first) {
      const bool partial = start < seen.all_first || start + kTile > seen.all_end;
      attend(p, block, s, tile, start, partial, queries, scales, state, arrive);
    } else {
      arrive();
    }
    ptx::mbarrier_spin(&s.behind, tile % 2);
    if constexpr (!kHalves) {
      if (tile + 2 < tiles) Tiles::decode_tile(s, tile + 2);
    }
    if (tile + Tiles::kAhead < tiles) Tiles::copy_tile(s, tile + Tiles::kAhead);
    if (tile + Tiles::kAhead + 1 < tiles) Tiles::look_up(p, s, tile + Tiles::kAhead + 1);
  }
  finish(state, p, block, Tiles::kUnit);
}

// norm_rmsnorm_fp4quant, generated from templates/norm/rmsnorm_fp4quant.cu.j2
// spec: {"add":false,"block":16,"clustered":false,"in_dtype":"bf16","scale":"e4m3","stream":false,"units":1,"warps":1}
//
// Persistent groups of threads take one row after another. A group is a part of a warp or a warp (kWarps is 1), up to
// kWarps warps of a CTA, or all CTAs of a cluster. A thread owns kUnits units of a row and keeps them as floats between
// the sum of squares and the quantization, while its next row is being copied to shared memory. A row that is too long
// for that (kStream) is read twice.

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

// ---- partials/units --------------------------------------------------------
// A unit is 16 neighbouring elements, which one thread normalises and quantizes. 32 units are a turn of a warp.
constexpr int kUnit = 16, kTurn = kUnit * kWarp;

using Unit = uint32[kUnit / 2];  // pairs

// A turn of 16-bit floats in shared memory is 64 vectors of 16 bytes. Copies write them in order, neighbouring lanes to
// neighbouring vectors; a thread then reads the two vectors of its unit. Their offsets avoid bank conflicts in both
// accesses: the two vectors of a unit are at addresses p and p ^ 16, and vector i + 32 is half a turn after vector i.
constexpr int kTurnBytes = kTurn * 2;
__device__ __forceinline__ uint32 vector_offset(uint32 i) { return (i ^ (i >> 3 & 1)) * 16; }

__device__ __forceinline__ void load_unit(Unit& u, uint32 p) {
  const uint4 lo = ptx::ld_shared(p), hi = ptx::ld_shared(p ^ 16);
  u[0] = lo.x, u[1] = lo.y, u[2] = lo.z, u[3] = lo.w, u[4] = hi.x, u[5] = hi.y, u[6] = hi.z, u[7] = hi.w;
}
__device__ __forceinline__ void store_unit(uint32 p, const Unit& u) {
  ptx::st_shared(p, {u[0], u[1], u[2], u[3]}), ptx::st_shared(p ^ 16, {u[4], u[5], u[6], u[7]});
}

namespace ptx {
// Volatile, so that the compiler keeps the load after griddep_wait; coherent, because the thread may write the unit
// later.
__device__ __forceinline__ void ld_unit(Unit& u, const void* p) {
  asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(u[0]), "=r"(u[1]), "=r"(u[2]), "=r"(u[3]) : "l"(p));
  asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4 + 16];"
               : "=r"(u[4]), "=r"(u[5]), "=r"(u[6]), "=r"(u[7]) : "l"(p));
}
__device__ __forceinline__ void st_16(void* p, uint4 v) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w));
}
__device__ __forceinline__ void st_8(void* p, uint2 v) {
  asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(p), "r"(v.x), "r"(v.y));
}
__device__ __forceinline__ void st_1(void* p, uint8 v) {
  asm volatile("st.global.b8 [%0], %1;" ::"l"(p), "r"(uint32(v)));
}
}  // namespace ptx

__device__ __forceinline__ void write_unit(void* p, const Unit& u) {
  ptx::st_16(p, {u[0], u[1], u[2], u[3]}), ptx::st_16(static_cast<uint8*>(p) + 16, {u[4], u[5], u[6], u[7]});
}

template <typename T> __device__ __forceinline__ void widen(float (&to)[kUnit], const Unit& x) {
#pragma unroll
  for (int i = 0; i < kUnit / 2; ++i) to[2 * i] = low<T>(x[i]), to[2 * i + 1] = high<T>(x[i]);
}
// round(x + y), the sums in float32.
template <typename T> __device__ __forceinline__ void add(Unit& x, const Unit& y) {
#pragma unroll
  for (int i = 0; i < kUnit / 2; ++i) x[i] = to_pair<T>(low<T>(x[i]) + low<T>(y[i]), high<T>(x[i]) + high<T>(y[i]));
}
// The even and the odd elements are two chains of fused multiply-adds.
__device__ __forceinline__ float sum_of_squares(const float (&x)[kUnit]) {
  float even = 0.0f, odd = 0.0f;
#pragma unroll
  for (int i = 0; i < kUnit; i += 2) even = fmaf(x[i], x[i], even), odd = fmaf(x[i + 1], x[i + 1], odd);
  return even + odd;
}
// Sets `to` to round((x * s) * w).
template <typename T>
__device__ __forceinline__ void scale(Unit& to, const float (&x)[kUnit], float s, const float (&w)[kUnit]) {
#pragma unroll
  for (int i = 0; i < kUnit / 2; ++i) to[i] = to_pair<T>(x[2 * i] * s * w[2 * i], x[2 * i + 1] * s * w[2 * i + 1]);
}

// The weights of a thread's unit in shared memory, which the thread loads for every row: as 16-bit floats (kPacked), or
// widened to float once. place() is the offset of a lane's weights in those of a turn, p is their address.
template <typename T, bool kPacked> struct Weights {
  static constexpr int kBytes = kPacked ? kTurnBytes : 2 * kTurnBytes;  // of a turn
  static __device__ __forceinline__ uint32 place(uint32 lane) { return kPacked ? vector_offset(2 * lane) : lane * 16; }
  static __device__ __forceinline__ void store(uint32 p, const Unit& u) {
    if constexpr (kPacked) {
      store_unit(p, u);
    } else {
      float w[kUnit];
      widen<T>(w, u);
#pragma unroll
      for (int i = 0; i < kUnit; i += 4)
        ptx::st_shared(p + i / 4 * (kWarp * 16), {__float_as_uint(w[i]), __float_as_uint(w[i + 1]),
                                                  __float_as_uint(w[i + 2]), __float_as_uint(w[i + 3])});
    }
  }
  static __device__ __forceinline__ void load(float (&w)[kUnit], uint32 p) {
    if constexpr (kPacked) {
      const uint4 lo = ptx::ld_shared_constant(p), hi = ptx::ld_shared_constant(p ^ 16);
      const Unit  u  = {lo.x, lo.y, lo.z, lo.w, hi.x, hi.y, hi.z, hi.w};
      widen<T>(w, u);
    } else {
#pragma unroll
      for (int i = 0; i < kUnit; i += 4) {
        const uint4 v = ptx::ld_shared_constant(p + i / 4 * (kWarp * 16));
        w[i] = __uint_as_float(v.x), w[i + 1] = __uint_as_float(v.y);
        w[i + 2] = __uint_as_float(v.z), w[i + 3] = __uint_as_float(v.w);
      }
    }
  }
};

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

// ---- partials/row_sum ------------------------------------------------------
// The sum of a row of units, with the same bits for any number of threads that share the row. Unit j belongs to lane
// j % 32 and turn j / 32. A lane adds its turns as a binary tree, neighbours first, then the lanes are added in the
// same way. A thread may hold 2^n consecutive turns, or all of them, and a CTA 2^n warps with consecutive turns: the
// bits of the sum do not depend on n.
constexpr int kMaxCtas = 8;  // of a cluster

template <int N> __device__ __forceinline__ float tree_sum(const float (&x)[N]) {
  if constexpr (N == 1) {
    return x[0];
  } else {
    float pairs[(N + 1) / 2];
#pragma unroll
    for (int i = 0; i < N; i += 2) pairs[i / 2] = i + 1 < N ? x[i] + x[i + 1] : x[i];
    return tree_sum(pairs);
  }
}

// Partial sums of a row, one for each lane: of up to kWarps warps of this CTA, and of the CTAs of its cluster. Rows use
// two sets of them in turn, so that one barrier for each row is enough.
template <int kWarps, bool kClustered> struct RowSum {
  float warps[2][kWarps][kWarp];
  float ctas[2][kClustered ? kMaxCtas : 1][kWarp];

  // mine: the sum of a lane's turns. All threads of a row call this; `lanes` lanes of a warp share the row.
  __device__ __forceinline__ float operator()(float mine, uint32 use, uint32 lanes) {
    const uint32 warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    if constexpr (kWarps > 1) {
      warps[use][warp][lane] = mine;
      __syncthreads();
      float sums[kWarps];
#pragma unroll
      for (int w = 0; w < kWarps; ++w) sums[w] = w * kWarp < blockDim.x ? warps[use][w][lane] : 0.0f;
      mine = tree_sum(sums);
    }
    if constexpr (kClustered) {
      const uint32 count = ptx::cluster_ctas();
      const float* place = &ctas[use][ptx::cluster_rank()][lane];
      for (uint32 c = warp; c < count; c += kWarps) ptx::st_cluster(place, c, mine);
      ptx::cluster_sync();
      float sums[kMaxCtas];
#pragma unroll
      for (int c = 0; c < kMaxCtas; ++c) sums[c] = c < count ? ctas[use][c][lane] : 0.0f;
      mine = tree_sum(sums);
    }
#pragma unroll
    for (int distance = 1; distance < kWarp; distance *= 2)
      if (distance < lanes) mine += __shfl_xor_sync(~0u, mine, distance);
    return mine;
  }
};

// ---- partials/reciprocal ---------------------------------------------------
// 1 / v, correctly rounded where neither v nor the result is near overflow or underflow: an approximation, corrected by
// its remainder (Markstein).
__device__ __forceinline__ float reciprocal_inside(float v) {
  const float seed = ptx::rcp_approx(v);
  return fmaf(fmaf(-v, seed, 1.0f), seed, seed);
}

// ---- partials/rstd ---------------------------------------------------------
// 1 / sqrt(sum / h + eps), every step correctly rounded. Away from overflow and underflow, quotient, root and
// reciprocal are approximations corrected by their remainders (Markstein).
struct Rstd {
  float h, reciprocal, eps;
  __device__ __forceinline__ float operator()(float sum) const {
    float quotient = sum * reciprocal;
    quotient = fmaf(fmaf(-quotient, h, sum), reciprocal, quotient);
    const float v = quotient + eps;
    if (__float_as_uint(v) - 0x0D800000u > 0x64000000u) return 1.0f / sqrtf(sum / h + eps);  // not 2^-100 to 2^100
    const float seed = ptx::rsqrt_approx(v), near = v * seed;
    return reciprocal_inside(fmaf(fmaf(-near, near, v), 0.5f * seed, near));
  }
};

// ---- partials/ue8m0 --------------------------------------------------------
// UE8M0: byte b is 2^(b - 127). v >= 0 is rounded up, to at most byte 254, also for Inf and NaN. Up to 2^-127, v
// becomes byte 0.
__device__ __forceinline__ uint8 encode_ue8m0(float v) {
  const uint32 bits = __float_as_uint(v);
  return min((bits + (bits < 0x00800000u ? 0x003FFFFFu : 0x007FFFFFu)) >> 23, 254u);
}
// 2^(127 - b), exact.
__device__ __forceinline__ float ue8m0_multiplier(uint8 b) {
  return __uint_as_float(b == 254 ? 0x00400000u : (254u - b) << 23);
}
// Byte 255 is NaN.
__device__ __forceinline__ float decode_ue8m0(uint8 b) {
  return __uint_as_float(b == 255 ? 0x7FFFFFFFu : b == 0 ? 0x00400000u : uint32(b) << 23);
}

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

// ---- partials/e2m1 ---------------------------------------------------------
// Rounds to E2M1: to nearest even, saturating at 6; NaN becomes +6 (code 7), a zero keeps its sign.
//
// Without an instruction for it, the conversion goes through float16: bits 9 to 11 of v * 2^-14 are the magnitude of
// the code once bit 8 is rounded up. The rounding to float16 must not lose on which side of a tie of E2M1 v is. So v is
// multiplied by 1 + 2^-9 first. Each tie is then midway between two float16s, of which the even one is on the side to
// which a v equal to the tie has to be rounded. A product with 1 - 5 * 2^-11 makes the upper of the two the tie itself,
// and leaves the lower one below it. All steps keep the order of values, so that tests of the seven ties and of their
// neighbours cover all values.
constexpr float  kE2m1Aside = 0x1.008p-14f;
constexpr uint32 kE2m1Back = 0x3BFB3BFBu, kE2m1Most = 0x0E000E00u;  // two float16s: 1 - 5 * 2^-11, and 6 * 2^-14

// In the high byte of each half, a code times 2 (bits 0 to 3, to be rounded) and its sign (bit 7).
__device__ __forceinline__ uint32 e2m1_pair(float lo, float hi) {
  const uint32 v = ptx::mul_f16x2(ptx::cvt_f16x2(lo * kE2m1Aside, hi * kE2m1Aside), kE2m1Back);
  if constexpr (kHasXorsign) return ptx::min_xorsign_abs_f16x2(v, kE2m1Most);
  return ptx::min_f16x2(v & ~kPairSigns, kE2m1Most) | (v & kPairSigns);
}
// The codes of four values, in the upper nibbles of four bytes; the lower nibbles are arbitrary.
__device__ __forceinline__ uint32 e2m1x4(float v0, float v1, float v2, float v3) {
  const uint32 doubled = __byte_perm(e2m1_pair(v0, v1), e2m1_pair(v2, v3), 0x7531);
  return ptx::select_bits(0x70707070u, doubled * 8 + 0x08080808u, doubled);
}

// Codes of eight values, v[i] in nibble i.
__device__ __forceinline__ uint32 e2m1x8(const float (&v)[8]) {
  if constexpr (kHasE2m1Cvt) return ptx::cvt_e2m1x8(v);
  const uint32 even = e2m1x4(v[0], v[2], v[4], v[6]), odd = e2m1x4(v[1], v[3], v[5], v[7]);
  return ptx::select_bits(0x0F0F0F0Fu, even >> 4, odd);
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

// ---- partials/nvfp4 --------------------------------------------------------
// Blocks of 16 elements with one E4M3 scale b each, and one global encode scale g. Every step is correctly rounded:
//   s = amax * (g * fl(1/6));  b = e4m3(s);  o = min(1 / (dec8(b) * (1 / g)), FLT_MAX);  codes = e2m1(x * o)
// amax ignores NaN unless all 16 are NaN, which gives b = 0x7F; Inf gives b = 0x7E. fminf(NaN, FLT_MAX) = FLT_MAX, so
// o is a number. A block of zeros needs no case of its own: b = 0, o = FLT_MAX, and +-0 * o = +-0.
constexpr int kNvfp4Block = 16;

__device__ __forceinline__ float nvfp4_sixth(float g) { return g * __uint_as_float(0x3E2AAAABu); }
__device__ __forceinline__ float nvfp4_multiplier(uint8 b, float g) {
  return fminf(1.0f / (decode_e4m3(b) * (1.0f / g)), kFltMax);
}

// nvfp4_multiplier() for many blocks that share g.
struct Nvfp4Multiplier {
  float decode;
  bool  in_range;
  __device__ __forceinline__ explicit Nvfp4Multiplier(float g) : decode(1.0f / g) {
    in_range = fabsf(decode) > 0x1p-100f && fabsf(decode) < 0x1p100f;
  }
  __device__ __forceinline__ float operator()(uint8 b) const {
    const float v = decode_e4m3(b) * decode;
    if (!in_range || v == 0.0f) return fminf(1.0f / v, kFltMax);
    return fminf(reciprocal_inside(v), kFltMax);
  }
};

// x: 16 elements in 8 pairs.
template <typename In> __device__ __forceinline__ float block_amax(const uint32 (&x)[8]) {
  uint32 most[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) most[i] = max_magnitude<In>(x[i], x[i + 4]);
  const uint32 pair = max_magnitude<In>(max_magnitude<In>(most[0], most[1]), max_magnitude<In>(most[2], most[3]));
  return fmaxf(fabsf(low<In>(pair)), fabsf(high<In>(pair)));
}

// Codes of x * o, element i in nibble i.
template <typename In> __device__ __forceinline__ uint2 encode_block(const uint32 (&x)[8], float o) {
  uint32 codes[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float y[8];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      y[2 * i]     = low<In>(x[4 * half + i]) * o;
      y[2 * i + 1] = high<In>(x[4 * half + i]) * o;
    }
    codes[half] = e2m1x8(y);
  }
  return make_uint2(codes[0], codes[1]);
}

// ---- spec ------------------------------------------------------------------
enum class Scale { kE4m3, kUe8m0 };

using In = bf16;
constexpr int   kBlock     = 16;
constexpr Scale kScale     = Scale::kE4m3;
constexpr bool  kAdd       = false;
constexpr int   kUnits     = 1;
constexpr int   kWarps     = 1;
constexpr bool  kClustered = false;
constexpr bool  kStream    = false;
constexpr int   kThreads   = 128;  // the most threads of a CTA
constexpr int   kMinCtas   = 8;  // that an SM must hold at once; bounds the registers

// ---- shared memory ---------------------------------------------------------
struct Shared {
  RowSum<kWarps, kClustered> row_sum;
  float multiplier[256];  // by scale byte
};
// It is followed by the weights (widened to float once, where the inputs leave room for that), then by the next row of
// each warp, which is being copied. Warps that take a row each share the weights.
using Weight = Weights<In, kAdd>;
constexpr int kWeightBytes = kUnits * Weight::kBytes;  // of a warp
constexpr int kFills       = kWarps > 1 ? kUnits : 1;  // turns of weights that a warp copies
static_assert(kWarps > 1 || kUnits <= kThreads / kWarp, "each turn has a warp");
constexpr int kInputBytes  = kUnits * kTurnBytes;
constexpr int kSlotBytes   = (kAdd ? 2 : 1) * kInputBytes;
static_assert(sizeof(Shared) == 1536 && kWeightBytes == 64 * kWarp &&
              kSlotBytes == 32 * kWarp, "the launch reserves as much");

// ---- kernel ----------------------------------------------------------------
constexpr int  kUnitsPerBlock = kBlock / kUnit;
constexpr int  kSfTurn        = kWarp / kUnitsPerBlock;    // scales of a turn
constexpr bool kWholeWarps    = kUnits > 1 || kWarps > 1;  // no two rows share a warp

using Tile = SfTile<SfLayout::k128x4>;
constexpr int kTileRows = Tile::kOuter * Tile::kInner;

// The turns of a lane that has units first, first + 32, ... of `units`.
__device__ __forceinline__ int turns_from(uint32 first, uint32 units) {
  return first < units ? int((units - first + kWarp - 1) / kWarp) : 0;
}

// Which rows and units a thread works on.
struct Place {
  uint32 lane, thread, threads;  // lane of its warp; thread of the `threads` that share a row
  uint32 row0, row, row_step;    // the first row of the warp, and that of the thread
  uint32 turn, unit;             // the first turn of the warp, and the first unit of the thread
  int    shift;                  // 2^shift lanes of a warp share a row
  __device__ __forceinline__ explicit Place(uint32 row_threads) {
    const uint32 warp = threadIdx.x / kWarp, rank = kClustered ? ptx::cluster_rank() : 0;
    const uint32 cta  = kClustered ? ptx::cluster_id() : blockIdx.x;
    const uint32 ctas = kClustered ? ptx::clusters() : gridDim.x;
    lane     = threadIdx.x % kWarp;
    shift    = !kWholeWarps ? 31 - __clz(row_threads) : 5;
    thread   = kWarps > 1 ? rank * blockDim.x + threadIdx.x : in_row(lane);
    threads  = kClustered ? ptx::cluster_ctas() * blockDim.x : row_threads;
    row0     = kWarps > 1 ? cta : (cta * blockDim.x + warp * kWarp) >> shift;
    row      = row0 + (lane >> shift);
    row_step = kWarps > 1 ? ctas : ctas * blockDim.x >> shift;
    turn     = kWarps > 1 ? (rank * kWarps + warp) * kUnits : 0;
    unit     = turn * kWarp + in_row(lane);
  }
  __device__ __forceinline__ uint32 in_row(uint32 of_warp) const { return of_warp & ((1u << shift) - 1); }
};

struct Operands {
  const In* x;
  In*       residual;
  const In* weight;
  uint8 *   q, *sf_128x4, *sf_linear;
  In*       y;
  int64     h;
  uint32    rows, units;  // units of a row
};

// What a lane copies of each row: vectors lane and lane + 32 of each turn of its warp. Where several rows share a warp,
// the second vector belongs to a later row than the first.
struct Vectors {
  static constexpr int kMiddle = kUnits / 2 * kTurn;  // the immediate offset of a copy reaches 2 KiB either way
  const In* x;
  In*       residual;      // both point kMiddle elements behind the first vector
  int64     step, second;  // elements from a row to the next, and from the first vector to the second
  uint32    to;            // shared address of the first vector
  uint32    row, rows, row_step, later_rows;  // row of the first vector; rows from it to the second
  int       turns[2];

  __device__ __forceinline__ Vectors(const Operands& p, const Place& place, uint32 slots) {
    const uint32 unit = place.turn * kWarp + place.in_row(place.lane / 2);
    row        = place.row0 + (place.lane / 2 >> place.shift);
    rows       = p.rows;
    row_step   = place.row_step;
    later_rows = !kWholeWarps ? 16 >> place.shift : 0;
    const int64 at = int64(row) * p.h + unit * kUnit + place.lane % 2 * (kUnit / 2) + kMiddle;
    x        = p.x + at;
    residual = p.residual + at;
    step     = int64(row_step) * p.h;
    second   = later_rows ? later_rows * p.h : kTurn / 2;
    to       = slots + vector_offset(place.lane);
    turns[0] = turns_from(unit, p.units);
    turns[1] = turns_from(unit + (later_rows ? 0 : kWarp / 2), p.units);
  }
  // Calls f(elements, bytes) for every vector (kAll), or for those that exist: `elements` is the distance of the vector
  // from x and residual, `bytes` that from `to`.
  template <bool kAll, typename F> __device__ __forceinline__ void each(F f) {
    asm volatile("" : "+l"(x), "+r"(to));  // keeps the compiler from computing the addresses again for every vector
    if constexpr (kAdd) asm volatile("" : "+l"(residual));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int   exists = kWholeWarps || row + i * later_rows < rows ? turns[i] : 0;
      const int64 from   = i * (kWholeWarps ? kTurn / 2 : second) - kMiddle;
#pragma unroll
      for (int v = 0; v < kUnits; ++v)
        if (kAll || v < exists) f(from + v * kTurn, i * (kTurnBytes / 2) + v * kTurnBytes);
    }
  }
  template <bool kAll> __device__ __forceinline__ void fetch() {
    each<kAll>([&](int64 elements, int bytes) {
      ptx::copy_async(to + bytes, x + elements);
      if constexpr (kAdd) ptx::copy_async(to + kInputBytes + bytes, residual + elements);
    });
  }
  template <bool kAll> __device__ __forceinline__ void write_residual() {
    each<kAll>([&](int64 elements, int bytes) {
      ptx::st_16(residual + elements, ptx::ld_shared(to + kInputBytes + bytes));
    });
  }
  __device__ __forceinline__ void next_row() {
    row += row_step, x += step;
    if constexpr (kAdd) residual += step;
  }
};

// Codes and scale byte of a unit.
__device__ __forceinline__ uint2 quantize(const Unit& u, uint8& b, float sixth, const float* multiplier) {
  float amax = block_amax<In>(u);
  if constexpr (kUnitsPerBlock == 2) amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, 1));
  b = kScale == Scale::kE4m3 ? encode_e4m3(amax * sixth) : encode_ue8m0(amax * sixth);
  return encode_block<In>(u, kScale == Scale::kE4m3 ? multiplier[b] : ue8m0_multiplier(b));
}

// Takes all rows of a thread. kFilled: every unit of its warp exists, so that no access needs a condition.
template <bool kFilled>
__device__ __forceinline__ void walk(const Operands& p, const Place& place, Vectors& vectors, const Rstd& rstd_of,
                                     float sixth, Shared& shared, uint32 input_at, uint32 weight_at, uint32 row_lanes) {
  const uint32 cols    = p.units / kUnitsPerBlock;
  const uint32 sf_rows = p.sf_128x4 ? sf_padded_rows<SfLayout::k128x4>(p.rows) : p.rows;
  const uint32 sf_cols = sf_padded_cols<SfLayout::k128x4>(cols);
  const int    turns   = kFilled ? kUnits : turns_from(place.unit, p.units);
  const int    warp_turns = kFilled ? kUnits : turns_from(place.turn * kWarp, p.units);

  // Where a block is two units, the first of its two lanes writes the scale. Lanes beyond the last column write zeros.
  const bool   has_scale    = place.lane % kUnitsPerBlock == 0;
  const uint32 col          = place.unit / kUnitsPerBlock;
  const bool   has_linear   = p.sf_linear && has_scale;
  const int    padded_turns = !p.sf_128x4 || !has_scale ? 0
                              : kFilled                 ? kUnits
                                                        : turns_from(place.unit, sf_cols * kUnitsPerBlock);
  const In* weight = p.weight + place.unit * kUnit;
  uint32    row = place.row, use = 0;
  for (uint32 row0 = place.row0; row0 < sf_rows; row0 += place.row_step, row += place.row_step) {
    const bool here   = kWholeWarps || row < p.rows;
    const int  exists = here ? turns : 0;
    const int64 at    = (uint64(row) * p.units + place.unit) * kUnit;
    if (row0 < p.rows) {
      float f[kStream ? 1 : kUnits][kUnit], sums[kUnits];
      if constexpr (!kStream) {
        ptx::copy_async_wait();
        __syncwarp();
        asm volatile("" : "+r"(input_at));  // keeps the compiler from computing the address again
      }
#pragma unroll
      for (int v = 0; v < kUnits; ++v) {
        sums[v] = 0.0f;
        if (v >= warp_turns) continue;
        Unit u = {}, r = {};
        if constexpr (kStream) {
          if (v < exists) ptx::ld_unit(u, p.x + at + v * kTurn);
          if (kAdd && v < exists) ptx::ld_unit(r, p.residual + at + v * kTurn);
        } else {
          load_unit(u, input_at + v * kTurnBytes);
          if constexpr (kAdd) load_unit(r, input_at + kInputBytes + v * kTurnBytes);
        }
        if constexpr (kAdd) {
          add<In>(u, r);
          if constexpr (!kStream) store_unit(input_at + kInputBytes + v * kTurnBytes, u);
          if (kStream && v < exists) write_unit(p.residual + at + v * kTurn, u);
        }
        widen<In>(f[kStream ? 0 : v], u);
        sums[v] = sum_of_squares(f[kStream ? 0 : v]);
      }
      if constexpr (!kStream) {
        __syncwarp();
        if constexpr (kAdd) {
          vectors.write_residual<kFilled>();
          __syncwarp();
        }
        vectors.next_row();
        if (row0 + place.row_step < p.rows) vectors.fetch<kFilled>();
      }
      const float rstd = rstd_of(shared.row_sum(tree_sum(sums), use, row_lanes));
      use ^= 1;

      uint8* to_q       = p.q + (uint64(at) >> 1);
      uint8* to_linear  = p.sf_linear + (uint64(row) * cols + col);
      uint8* to_swizzle = p.sf_128x4 + sf_offset<SfLayout::k128x4>(row, col, sf_cols);
      // Keeps the compiler from computing these addresses again for every unit.
      asm volatile("" : "+l"(to_q), "+l"(to_linear), "+l"(to_swizzle), "+r"(weight_at));
#pragma unroll
      for (int v = 0; v < kUnits; ++v) {
        if (v < warp_turns) {
          Unit  u = {};
          float w[kUnit];
          if constexpr (kStream) {
            if (v < exists) ptx::ld_unit(u, (kAdd ? p.residual : p.x) + at + v * kTurn);
            widen<In>(f[0], u);
            if (v < exists) ptx::ld_unit(u, weight + v * kTurn);
            widen<In>(w, u);
          } else {
            Weight::load(w, weight_at + v * Weight::kBytes);
          }
          scale<In>(u, f[kStream ? 0 : v], rstd, w);
          if (kAdd && p.y && v < exists) write_unit(p.y + at + v * kTurn, u);
          uint8 b;
          const uint2 codes = quantize(u, b, sixth, shared.multiplier);
          if (v < exists) ptx::st_8(to_q + v * (kTurn / 2), codes);
          if (has_linear && v < exists) ptx::st_1(to_linear + v * kSfTurn, b);
          if (here && v < padded_turns) ptx::st_1(to_swizzle + v * kSfTurn * kTileRows, v < turns ? b : uint8(0));
        }
      }
    }
    if (row >= p.rows && row < sf_rows) {
      for (uint32 c = place.thread * Tile::kCols; c < sf_cols; c += place.threads * Tile::kCols)
        *reinterpret_cast<uint32*>(p.sf_128x4 + sf_offset<SfLayout::k128x4>(row, c, sf_cols)) = 0;
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, kMinCtas) norm_rmsnorm_fp4quant(
    const In* __restrict__ x,                // [m, h]
    In* __restrict__ residual,               // [m, h], updated in place; null without an addition
    const In* __restrict__ weight,           // [h]
    const float* __restrict__ global_scale,  // [1], encode; null means 1
    uint8* __restrict__ q,                   // [m, h/2], low nibble first
    uint8* __restrict__ sf_128x4,            // scales in the 128x4 layout, or null
    uint8* __restrict__ sf_linear,           // [m, h/kBlock], or null
    In* __restrict__ y,                      // [m, h], what is quantized, or null
    int64 m,
    int64 h,
    float eps,
    int64 row_threads) {
  extern __shared__ uint4 dynamic_shared[];
  Shared& shared = *reinterpret_cast<Shared*>(dynamic_shared);

  const Operands p = {x, residual, weight, q, sf_128x4, sf_linear, y, h, uint32(m), uint32(h) / kUnit};
  const Place    place(row_threads);
  const uint32   warp      = threadIdx.x / kWarp, weights = ptx::shared_address(&shared + 1);
  const uint32   slots     = weights + (kWarps > 1 ? blockDim.x / kWarp : 1) * kWeightBytes + warp * kSlotBytes;
  const uint32   input_at  = slots + vector_offset(2 * place.lane);
  const uint32   weight_at = weights + (kWarps > 1 ? warp * kWeightBytes : 0) + Weight::place(place.lane);
  Vectors vectors(p, place, slots);

  // All loads are started before any of them is waited for; those of weights, which do not come from an earlier kernel,
  // before that kernel has ended.
  const int turns = turns_from(place.unit, p.units), first = kWarps > 1 ? 0 : warp;
  Unit w[kFills] = {};
#pragma unroll
  for (int i = 0; i < kFills; ++i)
    if (!kStream && first + i < turns) ptx::ld_unit(w[i], weight + place.unit * kUnit + (first + i) * kTurn);
  if constexpr (kClustered) ptx::cluster_sync();  // all CTAs have started: their shared memory may be written
  if constexpr (kHasPdl) ptx::griddep_wait(), ptx::griddep_launch();
  if (!kStream && place.row0 < p.rows) vectors.fetch<false>();
  const float g = kScale == Scale::kE4m3 && global_scale ? ptx::ld_f32(global_scale) : 1.0f;
  if constexpr (!kStream) {
#pragma unroll
    for (int i = 0; i < kFills; ++i)
      if (first + i < kUnits) Weight::store(weight_at + (first + i) * Weight::kBytes, w[i]);
#pragma unroll
    for (int v = 0; v < kUnits; ++v) {
      if (v < turns && place.row < p.rows) continue;
      store_unit(input_at + v * kTurnBytes, {});  // zeros where no copy writes, or only that of a later row
      if constexpr (kAdd) store_unit(input_at + kInputBytes + v * kTurnBytes, {});
    }
  }
  if constexpr (kScale == Scale::kE4m3) {
    const Nvfp4Multiplier multiplier_of(g);
    for (uint32 b = threadIdx.x; b < 256; b += blockDim.x) shared.multiplier[b] = multiplier_of(b);
  }
  __syncthreads();

  const float  elements = float(uint32(h)), sixth = nvfp4_sixth(g);
  const Rstd   rstd_of{elements, 1.0f / elements, eps};
  const uint32 row_lanes = kWholeWarps ? kWarp : uint32(row_threads);
  if (!kStream && kWholeWarps && (place.turn + kUnits) * kWarp <= p.units) {
    walk<true>(p, place, vectors, rstd_of, sixth, shared, input_at, weight_at, row_lanes);
  } else {
    walk<false>(p, place, vectors, rstd_of, sixth, shared, input_at, weight_at, row_lanes);
  }
}

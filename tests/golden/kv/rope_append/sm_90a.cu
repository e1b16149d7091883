// kv_rope_append, generated from templates/kv/rope_append.cu.j2
// spec: {"cache":"nvfp4","in_dtype":"bf16","threads":64,"units":4}
//
// Behind the product that makes queries, keys and values: rotates queries and keys by their positions, where weights
// are given after an RMSNorm of each head, and writes keys and values into a paged cache. A row is one head of one
// token. A lane takes a unit of a row, and kLanes lanes share the row, of which the last may have none. Every value is
// rounded to 16 bits after the norm and after the rotation, so that the result is that of the same steps one by one.
// Grid: x over rows, in the order of tokens, and for each token its heads of queries, keys and values.

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

// ---- kv/cache --------------------------------------------------------------
// A paged cache: codes and block scales by page, token of the page, and head, with strides. Indices come from the
// caller's tensors unchecked: one that points outside of its list or of the cache gives kNowhere.
constexpr uint32 kNowhere = ~0u;

struct Place {
  uint32 page  = 0;
  uint32 token = kNowhere;  // of the page
  __device__ __forceinline__ bool found() const { return token != kNowhere; }
};

struct Strides {  // in elements of the pointer that they are used with
  uint32 page, token;
  __device__ __forceinline__ uint64 at(Place p) const { return uint64(p.page) * page + uint64(p.token) * token; }
};

// The threads of a CTA share the work of finding the places of its `count` tokens: places[i] = find(i).
template <typename Find>
__device__ __forceinline__ void find_places(Place* places, uint32 count, Find find) {
  const uint32 threads = blockDim.x * blockDim.y;
  for (uint32 i = threadIdx.y * blockDim.x + threadIdx.x; i < count; i += threads) places[i] = find(i);
  __syncthreads();
}

// Entry i of a list of 4- or 8-byte integers.
__device__ __forceinline__ int64 index_at(const void* list, int64 i, bool wide) {
  if (wide) return int64(ptx::ld<uint64>(static_cast<const int64*>(list) + i));
  return int32(ptx::ld<uint32>(static_cast<const int32*>(list) + i));
}

// Where column col of a head's scales lies. Interleaved, the scales of four neighbouring tokens fill one run of 4 *
// cols bytes: column by column, and in each column token by token.
struct ScaleColumn {
  uint32 row, byte, group;
  __device__ __forceinline__ ScaleColumn(uint32 col, uint32 cols, bool interleaved)
      : row(interleaved ? col * 4 / cols : 0), byte(interleaved ? col * 4 % cols : col), group(interleaved ? 3 : 0) {}
  __device__ __forceinline__ uint64 at(Place p, Strides strides) const {
    return strides.at({p.page, (p.token & ~group) + row}) + (byte + (p.token & group));
  }
};

// Stores 16 codes, or loads 8, at any address; in one access where the address is aligned.
__device__ __forceinline__ void store_codes(uint8* p, uint2 codes) {
  if (uint64(p) % 8 == 0) {
    *reinterpret_cast<uint2*>(p) = codes;
    return;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) p[i] = uint8((i < 4 ? codes.x : codes.y) >> i % 4 * 8);
}
__device__ __forceinline__ uint32 load_codes(const uint8* p) {
  if (uint64(p) % 4 == 0) return ptx::ld<uint32>(p);
  uint32 codes = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) codes |= uint32(ptx::ld<uint8>(p + i)) << i * 8;
  return codes;
}

// ---- spec ------------------------------------------------------------------
enum class CacheType { kNvfp4, kE4m3, kHalf };
using In = bf16;
constexpr CacheType kCache = CacheType::kNvfp4;
constexpr int kUnits   = 4;  // of a row
constexpr int kLanes   = 4;
constexpr int kThreads = 64;

// ---- kernel ----------------------------------------------------------------
// Rotates a unit. The cache of a position has `half` cosines, then `half` sines. A position that has none gives NaN.
struct Rotation {
  const float* at;  // of the row's position; null: there is none
  int  half;
  bool neighbours;  // are pairs, and not elements that lie `half` apart

  // `count` neighbouring cosines or sines from number i on.
  template <int kCount> __device__ __forceinline__ void load(float (&to)[kCount], int i) const {
#pragma unroll
    for (int j = 0; j < kCount; j += 4) {
      uint4 v = make_uint4(0x7FFFFFFFu, 0x7FFFFFFFu, 0x7FFFFFFFu, 0x7FFFFFFFu);
      if (at != nullptr) v = ptx::ld<uint4>(at + i + j);
      to[j] = __uint_as_float(v.x), to[j + 1] = __uint_as_float(v.y);
      to[j + 2] = __uint_as_float(v.z), to[j + 3] = __uint_as_float(v.w);
    }
  }
  // All lanes of the warp call this. `unit` counts from the beginning of the row.
  __device__ __forceinline__ void operator()(Unit& u, int unit) const {
    const int units = half / kUnit;
    const int distance = unit < units ? units : unit < 2 * units ? -units : 0;
    Unit other;
#pragma unroll
    for (int i = 0; i < kUnit / 2; ++i) other[i] = __shfl_sync(~0u, u[i], int(threadIdx.x) + distance, kWarp);
    if (unit * kUnit >= 2 * half) return;
    float f[kUnit], y[kUnit];
    widen<In>(f, u);
    if (neighbours) {
      float c[kUnit / 2], s[kUnit / 2];
      load(c, unit * (kUnit / 2)), load(s, half + unit * (kUnit / 2));
#pragma unroll
      for (int i = 0; i < kUnit / 2; ++i) {
        y[2 * i]     = f[2 * i] * c[i] - f[2 * i + 1] * s[i];
        y[2 * i + 1] = f[2 * i + 1] * c[i] + f[2 * i] * s[i];
      }
    } else {
      const bool second = unit >= units;
      const int  first  = (second ? unit - units : unit) * kUnit;
      float g[kUnit], c[kUnit], s[kUnit];
      widen<In>(g, other), load(c, first), load(s, half + first);
#pragma unroll
      for (int i = 0; i < kUnit; ++i) y[i] = second ? f[i] * c[i] + g[i] * s[i] : f[i] * c[i] - g[i] * s[i];
    }
#pragma unroll
    for (int i = 0; i < kUnit / 2; ++i) u[i] = to_pair<In>(y[2 * i], y[2 * i + 1]);
  }
};

// Where a row of K or V lies in its cache. `head` is that of the cache.
struct Target {
  uint8 *data, *sf;
  Strides data_strides, sf_strides;
  float scale;  // decode

  __device__ __forceinline__ void store(Place at, const Unit& u, const ScaleColumn& column) const {
    uint8* const to = data + data_strides.at(at);
    if constexpr (kCache == CacheType::kHalf) {
      write_unit(to, u);
    } else if constexpr (kCache == CacheType::kE4m3) {
      uint32 bytes[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        bytes[i] = 0;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const uint32 pair = u[2 * i + j / 2];
          bytes[i] |= uint32(encode_e4m3((j % 2 ? high<In>(pair) : low<In>(pair)) / scale)) << 8 * j;
        }
      }
      ptx::st_16(to, make_uint4(bytes[0], bytes[1], bytes[2], bytes[3]));
    } else {
      const uint8 b = encode_e4m3(block_amax<In>(u) * nvfp4_sixth(fminf(1.0f / scale, kFltMax)));
      store_codes(to, encode_block<In>(u, fminf(1.0f / (decode_e4m3(b) * scale), kFltMax)));
      sf[column.at(at, sf_strides)] = b;
    }
  }
};

// A decode scale: a tensor's, or a number.
__device__ __forceinline__ float scale_of(const float* tensor, float number) {
  return kCache == CacheType::kHalf || tensor == nullptr ? number : ptx::ld_f32(tensor);
}

extern "C" __global__ void __launch_bounds__(kThreads) kv_rope_append(
    const In* __restrict__ q,            // [tokens, q_heads, d], d contiguous
    const In* __restrict__ k,            // [tokens, kv_heads, d]
    const In* __restrict__ v,
    const In* __restrict__ q_weight,     // [d]; null without a norm
    const In* __restrict__ k_weight,
    const float* __restrict__ cos_sin,   // [max_position, rotary]: cosines, then sines
    const void* __restrict__ positions,  // [tokens]; list 0
    const void* __restrict__ slots,      // [tokens]; list 1
    const float* __restrict__ k_scale,   // [1], decode; null: k_factor
    const float* __restrict__ v_scale,
    In* __restrict__ q_out,              // [tokens, q_heads, d]; may be q
    uint8* __restrict__ k_cache,         // [pages, tokens, kv_heads, d in bytes]
    uint8* __restrict__ v_cache,
    uint8* __restrict__ k_sf,            // [pages, tokens, kv_heads, d/16], E4M3, or null
    uint8* __restrict__ v_sf,
    int64 tokens,
    int64 q_heads,
    int64 kv_heads,
    int64 q_token,                       // elements from one to the next
    int64 q_head,
    int64 k_token,
    int64 k_head,
    int64 v_token,
    int64 v_head,
    int64 max_position,
    int64 rotary,                        // elements of a row that are rotated, a multiple of 32
    int64 num_pages,
    int64 page_size,
    int64 data_page,                     // bytes from one to the next, in both sides
    int64 data_token,
    int64 data_head,
    int64 sf_page,
    int64 sf_token,
    int64 sf_head,
    int64 is_neox,                       // whether elements rotary / 2 apart are pairs, and not neighbours
    int64 interleaved_side,              // 0 for K, 1 for V, else neither
    int64 wide_lists,                    // bit i: list i has entries of 8 bytes, not 4
    float k_factor,
    float v_factor,
    float eps,
    float weight_bias                    // of both norms
) {
  const uint32 unit = threadIdx.x % kLanes, heads = uint32(q_heads + 2 * kv_heads);
  const uint32 own = (blockIdx.x * kThreads + threadIdx.x) / kLanes, rows = uint32(tokens) * heads;
  const uint32 row = min(own, rows - 1);  // threads without a row take the last one, and write nothing
  const bool   has_unit = kUnits == kLanes || unit < kUnits;
  const uint32 token = row / heads, head = row % heads;
  const bool   is_query = head < q_heads, is_value = head >= q_heads + kv_heads;
  const uint32 side = is_value, kv_head = is_query ? 0 : head - uint32(q_heads) - side * uint32(kv_heads);

  Unit w = {};
  if (q_weight != nullptr && !is_value && has_unit) ptx::ld_unit(w, (is_query ? q_weight : k_weight) + unit * kUnit);
  if constexpr (kHasPdl) ptx::griddep_launch(), ptx::griddep_wait();

  Unit u = {};
  if (has_unit) {
    ptx::ld_unit(u, is_query   ? q + token * q_token + head * q_head + unit * kUnit
                    : is_value ? v + token * v_token + kv_head * v_head + unit * kUnit
                               : k + token * k_token + kv_head * k_head + unit * kUnit);
  }
  const int64 position = index_at(positions, token, wide_lists & 1);
  const int64 slot     = is_query ? -1 : index_at(slots, token, wide_lists & 2);
  if (q_weight != nullptr) {
    float f[kUnit], by[kUnit];
    widen<In>(f, u), widen<In>(by, w);
    float sum = sum_of_squares(f);
#pragma unroll
    for (int distance = 1; distance < kLanes; distance *= 2) sum += __shfl_xor_sync(~0u, sum, distance);
    const Rstd rstd{float(kUnits * kUnit), 1.0f / float(kUnits * kUnit), eps};
#pragma unroll
    for (int i = 0; i < kUnit; ++i) by[i] += weight_bias;
    if (!is_value) scale<In>(u, f, rstd(sum), by);
  }
  const bool has = uint64(position) < uint64(max_position);
  const Rotation rotation{has ? cos_sin + position * rotary : nullptr, is_value ? 0 : int(rotary / 2), is_neox == 0};
  rotation(u, unit);
  if (own != row || !has_unit) return;
  if (is_query) {
    write_unit(q_out + (int64(token) * q_heads + head) * (kUnits * kUnit) + unit * kUnit, u);
    return;
  }
  if (uint64(slot) >= uint64(num_pages * page_size)) return;  // nowhere
  const Place at{uint32(slot) / uint32(page_size), uint32(slot) % uint32(page_size)};
  constexpr int kUnitBytes = kCache == CacheType::kNvfp4 ? kUnit / 2 : kCache == CacheType::kE4m3 ? kUnit : 2 * kUnit;
  const Target target{(side ? v_cache : k_cache) + kv_head * data_head + unit * kUnitBytes,
                      (side ? v_sf : k_sf) + kv_head * sf_head,
                      {uint32(data_page), uint32(data_token)},
                      {uint32(sf_page), uint32(sf_token)},
                      scale_of(side ? v_scale : k_scale, side ? v_factor : k_factor)};
  target.store(at, u, ScaleColumn(unit, kUnits, side == interleaved_side));
}

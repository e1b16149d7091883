// experts_combine, generated from templates/experts/combine.cu.j2
// spec: {"dtype":"bf16","threads":128}
//
// out [tokens, n] = for each token the sum over its slots, in their order, of weight times y. A token of which every
// slot is skipped becomes zeros. The residual is added. A thread has four columns of a token.
// Grid: x over tokens, y over columns.

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
constexpr int kThreads = 128;

// ---- kernel ----------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kThreads) experts_combine(
    const In* __restrict__ y,              // [tokens * slots, n], by assignment
    const float* __restrict__ weights,     // [tokens, slots], factors of y; null: 1
    const uint8* __restrict__ ids,         // [tokens, slots] of id_bytes bytes
    const int32* __restrict__ expert_map,  // [ids_end]; null: the identity
    In* __restrict__ out,                  // [tokens, n]
    const In* __restrict__ residual,       // [tokens, n], added to the sums; null: none
    int64 id_bytes,                        // 4 or 8
    int64 ids_end,                         // ids are below it, or skipped
    int64 experts,
    int64 slots,                           // of a token
    int64 n,                               // columns, a multiple of 32
    int64 out_stride,                      // elements
    int64 residual_stride
) {
  if constexpr (kHasPdl) {
    ptx::griddep_launch();
    ptx::griddep_wait();
  }
  const int64 token = blockIdx.x, at = (int64(blockIdx.y) * kThreads + threadIdx.x) * 8;
  const int   lane  = threadIdx.x % kWarp;
  const Routing routing{ids, expert_map, id_bytes, ids_end, experts};
  const bool    is_taken = lane < slots && routing.expert(routing.id(token * slots + lane)) >= 0;
  const uint32  taken    = __ballot_sync(0xFFFFFFFFu, is_taken);
  if (at >= n) return;
  const SlotSum<In> total{y, weights, n, int(slots), residual, residual_stride};
  float v[8];
  total.columns(v, token, taken, at);
  ptx::st(out + token * out_stride + at, make_uint4(to_pair<In>(v[0], v[1]), to_pair<In>(v[2], v[3]),
                                                    to_pair<In>(v[4], v[5]), to_pair<In>(v[6], v[7])));
}

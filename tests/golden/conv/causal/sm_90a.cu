// conv_causal, generated from templates/conv/causal.cu.j2
// spec: {"by_sequence":true,"dtype":"bf16","threads":64,"vec":2,"width":2}
//
// out[t] = silu(bias + the sum over j of weight[j] * x[t - kPast + j]) for each channel of sequences that lie behind
// each other; before its first token a sequence has its state: the kPast inputs that came last. A thread takes kVec
// neighbouring channels and goes through tokens one by one, with the last kPast of them in registers.
//
// With kBySequence a CTA has all tokens of a sequence, and out may be x. Without, it has a block of tokens, whatever
// sequences they are of. What reads a state also writes it: the first kPast tokens of a sequence are always of the CTA
// that has the first of them, and its successor begins behind them.

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

// ---- partials/st_global ----------------------------------------------------
namespace ptx {
// Stores that stay behind the loads before them, which may be of the same memory.
__device__ __forceinline__ void st(void* p, uint16 v) {
  asm volatile("st.global.b16 [%0], %1;" ::"l"(p), "h"(v) : "memory");
}
__device__ __forceinline__ void st(void* p, uint32 v) {
  asm volatile("st.global.b32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
__device__ __forceinline__ void st(void* p, uint2 v) {
  asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(p), "r"(v.x), "r"(v.y) : "memory");
}
}  // namespace ptx

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

// ---- partials/inputs -------------------------------------------------------
// A unit is 16 neighbouring elements: RawUnit holds them as they are in memory, 8 pairs of 16-bit floats are quantized.
template <typename In> struct Widened { using type = In; };
template <> struct Widened<e4m3> { using type = f16; };
template <typename In> using RawUnit = uint32[16 * sizeof(In) / 4];

// Rows that start at multiples of 32 bytes are loaded 32 bytes at a time where the GPU has such loads.
template <typename In> __device__ __forceinline__ bool is_wide(const In* x, int64 x_stride) {
  return kHasLd256 && sizeof(In) == 2 && (uint64(x) | x_stride * sizeof(In)) % 32 == 0;
}
template <typename In> __device__ __forceinline__ void load_unit(RawUnit<In>& raw, const In* p, bool wide) {
  if constexpr (kHasLd256 && sizeof(In) == 2) {
    if (wide) return ptx::ld_global_nc_32(raw, p);
  }
#pragma unroll
  for (int i = 0; i < 4 * sizeof(In); i += 4) {
    const uint4 v = ptx::ld_global_nc_16(p + i * 4 / sizeof(In));
    raw[i] = v.x, raw[i + 1] = v.y, raw[i + 2] = v.z, raw[i + 3] = v.w;
  }
}

// fp16(x * (6 * (1 / g))): FlashInfer's convention, after which the codes stand for 6 x / g.
__device__ __forceinline__ void widen_unit(const RawUnit<e4m3>& raw, float g, uint32 (&x)[8]) {
  const float p = 1.0f / g * 6.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const uint32 pair = decode_e4m3x2(uint16(raw[i / 2] >> i % 2 * 16));
    x[i] = to_pair<f16>(low<f16>(pair) * p, high<f16>(pair) * p);
  }
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
// ---- partials/reciprocal ---------------------------------------------------
// 1 / v, correctly rounded where neither v nor the result is near overflow or underflow: an approximation, corrected by
// its remainder (Markstein).
__device__ __forceinline__ float reciprocal_inside(float v) {
  const float seed = ptx::rcp_approx(v);
  return fmaf(fmaf(-v, seed, 1.0f), seed, seed);
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

// ---- partials/silu ---------------------------------------------------------
// round(silu(gate) * up)
template <typename In>
__device__ __forceinline__ void silu_and_mul(const RawUnit<In>& gate, const RawUnit<In>& up, uint32 (&x)[8]) {
  float v[16];
#pragma unroll
  for (int i = 0; i < 8; ++i) v[2 * i] = silu_inside(low<In>(gate[i])), v[2 * i + 1] = silu_inside(high<In>(gate[i]));
  if (block_amax<In>(gate) > kSiluRange) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float lo = low<In>(gate[i]), hi = high<In>(gate[i]);
      if (fabsf(lo) > kSiluRange) v[2 * i] = silu_outside(lo);
      if (fabsf(hi) > kSiluRange) v[2 * i + 1] = silu_outside(hi);
    }
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] = to_pair<In>(v[2 * i] * low<In>(up[i]), v[2 * i + 1] * high<In>(up[i]));
}

// ---- spec ------------------------------------------------------------------
using In = bf16;
constexpr int  kPast       = 2 - 1;
constexpr int  kVec        = 2;
constexpr bool kBySequence = true;
constexpr int  kThreads    = 64;
constexpr int  kAhead      = 4;  // tokens whose loads are under way together

// ---- kernel ----------------------------------------------------------------
using Channels = float[kVec];

// `step` is the distance of neighbouring channels.
__device__ __forceinline__ void load(Channels& v, const In* p, int64 step) {
  if (step == 1) {
    uint32 w[(kVec + 1) / 2];
    ld_halves<kVec>(p, w);
#pragma unroll
    for (int i = 0; i < kVec; ++i) v[i] = i % 2 ? high<In>(w[i / 2]) : low<In>(w[i / 2]);
  } else {
#pragma unroll
    for (int i = 0; i < kVec; ++i) v[i] = low<In>(ptx::ld<uint16>(p + i * step));
  }
}
__device__ __forceinline__ void store(In* p, int64 step, const Channels& v) {
  if (step == 1) {
    uint32 w[(kVec + 1) / 2];
#pragma unroll
    for (int i = 0; i < kVec; i += 2) w[i / 2] = to_pair<In>(v[i], i + 1 < kVec ? v[i + 1] : 0.0f);
    if constexpr (kVec == 1) ptx::st(p, uint16(w[0]));
    if constexpr (kVec == 2) ptx::st(p, w[0]);
    if constexpr (kVec == 4) ptx::st(p, uint2{w[0], w[1]});
    if constexpr (kVec == 8) ptx::st(p, uint4{w[0], w[1], w[2], w[3]});
  } else {
#pragma unroll
    for (int i = 0; i < kVec; ++i) ptx::st(p + i * step, uint16(to_pair<In>(v[i], 0.0f)));
  }
}

struct Filter {
  Channels weight[kPast + 1], bias;
  bool     has_silu;

  __device__ __forceinline__ void load_at(const In* weights, const In* biases, int64 channel) {
#pragma unroll
    for (int j = 0; j <= kPast; ++j) load(weight[j], weights + channel * (kPast + 1) + j, kPast + 1);
#pragma unroll
    for (int i = 0; i < kVec; ++i) bias[i] = 0.0f;
    if (biases != nullptr) load(bias, biases + channel, 1);
  }
  // Takes the next token: what it gives is in `row`, what came last in `past`.
  __device__ __forceinline__ void step(Channels (&past)[kPast], Channels& row) const {
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      float sum = bias[i];
#pragma unroll
      for (int j = 0; j < kPast; ++j) sum = fmaf(past[j][i], weight[j][i], sum);
      sum = fmaf(row[i], weight[kPast][i], sum);
#pragma unroll
      for (int j = 0; j + 1 < kPast; ++j) past[j][i] = past[j + 1][i];
      past[kPast - 1][i] = row[i];
      row[i] = has_silu ? silu(sum) : sum;
    }
  }
};

// Where the inputs of a thread's channels are.
struct Rows {
  const In* x;
  In*   out;
  int64 x_stride, out_stride;
};
struct States {
  In*   states;  // at the thread's channels
  int64 stride, channel_stride, token_stride, slots, length;
  const int32* slot_of;   // null: the sequence's number
  const uint8* has;       // null: all or none
  const int32* accepted;  // null: none is drafted
  int64 slot_stride, null_slot, has_by_default;

  // null where the sequence has none, and is left out.
  __device__ __forceinline__ In* of(int64 sequence) const {
    const int64 slot = slot_of == nullptr ? sequence : int32(ptx::ld<uint32>(slot_of + sequence * slot_stride));
    return slot < 0 || slot >= slots || (slot_of != nullptr && slot == null_slot) ? nullptr : states + slot * stride;
  }
  __device__ __forceinline__ void load_past(Channels (&past)[kPast], In* state, int64 sequence) const {
    const bool is_there = has == nullptr ? has_by_default != 0 : ptx::ld<uint8>(has + sequence) != 0;
    int64 first = accepted == nullptr ? 0 : int32(ptx::ld<uint32>(accepted + sequence)) - 1;
    first = max(int64(0), min(first, length - kPast));
#pragma unroll
    for (int j = 0; j < kPast; ++j) {
#pragma unroll
      for (int i = 0; i < kVec; ++i) past[j][i] = 0.0f;
      if (is_there) load(past[j], state + (first + j) * token_stride, channel_stride);
    }
  }
  // The last inputs behind `tokens` of x, or with drafted tokens all but the first.
  __device__ __forceinline__ void keep(const Channels (&past)[kPast], In* state, const In* x, int64 x_stride,
                                       int64 tokens) const {
    const int64 dropped = accepted == nullptr ? tokens : 1;
    for (int64 at = dropped; at < min(kPast + tokens, dropped + length); ++at) {
      Channels v;
      if (at >= kPast) load(v, x + (at - kPast) * x_stride, 1);
#pragma unroll
      for (int j = 0; j < kPast; ++j)
        if (at == j) {
#pragma unroll
          for (int i = 0; i < kVec; ++i) v[i] = past[j][i];
        }
      store(state + (at - dropped) * token_stride, channel_stride, v);
    }
  }
};

// The tokens from `from` to `until` of a sequence from `start` to `end`.
__device__ __forceinline__ void run(const Filter& filter, const Rows& rows, const States& states, int64 sequence,
                                    int64 start, int64 end, int64 from, int64 until) {
  In* state = states.of(sequence);
  if (state == nullptr) return;
  Channels past[kPast];
  if (from == start) {
    until = min(end, max(until, start + kPast));
    states.load_past(past, state, sequence);
    states.keep(past, state, rows.x + start * rows.x_stride, rows.x_stride, end - start);
  } else {
    from = max(from, start + kPast);
    if (from >= until) return;
#pragma unroll
    for (int j = 0; j < kPast; ++j) load(past[j], rows.x + (from - kPast + j) * rows.x_stride, 1);
  }
  for (int64 t = from; t < until; t += kAhead) {
    Channels row[kAhead];
#pragma unroll
    for (int a = 0; a < kAhead; ++a)
      if (t + a < until) load(row[a], rows.x + (t + a) * rows.x_stride, 1);
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      if (t + a >= until) break;
      filter.step(past, row[a]);
      store(rows.out + (t + a) * rows.out_stride, 1, row[a]);
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads) conv_causal(
    const In* __restrict__ x,             // [tokens, channels]
    const In* __restrict__ weight,        // [channels, width]
    const In* __restrict__ bias,          // [channels]; null: 0
    In* __restrict__ states,              // [state_slots, channels, state_length]
    const int32* __restrict__ starts,     // [sequences + 1]; null: sequence_tokens for each
    const int32* __restrict__ slot_of,    // [sequences]; null: the sequence's number
    const uint8* __restrict__ has_state,  // [sequences]; null: has_by_default
    const int32* __restrict__ accepted,   // [sequences]; null: none is drafted
    In* __restrict__ out,                 // [tokens, channels]; may be x with kBySequence
    int64 channels,
    int64 tokens,
    int64 sequences,
    int64 sequence_tokens,
    int64 block_tokens,
    int64 x_sequence_stride,              // elements
    int64 x_stride,                       // elements
    int64 out_sequence_stride,            // elements
    int64 out_stride,                     // elements
    int64 state_stride,                   // elements
    int64 state_channel_stride,           // elements
    int64 state_token_stride,             // elements
    int64 state_slots,
    int64 state_length,                   // width - 1 or more
    int64 slot_stride,                    // elements
    int64 null_slot,
    int64 has_by_default,                 // 0 or 1
    int64 has_silu                        // 0 or 1
) {
  if constexpr (kHasPdl) ptx::griddep_launch(), ptx::griddep_wait();
  const int64 channel = (int64(blockIdx.y) * kThreads + threadIdx.x) * kVec;
  if (channel >= channels) return;
  Filter filter;
  filter.has_silu = has_silu != 0;
  filter.load_at(weight, bias, channel);
  const States state = {states + channel * state_channel_stride, state_stride, state_channel_stride, state_token_stride,
                        state_slots, state_length, slot_of, has_state, accepted, slot_stride, null_slot,
                        has_by_default};
  // Of a sequence, its first token and the one behind its last.
  const auto begin_of = [&](int64 sequence) {
    if (starts == nullptr) return sequence * sequence_tokens;
    return max(int64(0), min(int64(int32(ptx::ld<uint32>(starts + sequence))), tokens));
  };
  if constexpr (kBySequence) {
    const int64 sequence = blockIdx.x, start = begin_of(sequence), end = begin_of(sequence + 1);
    const bool  apart = starts == nullptr;  // then each has its own distance to the next
    const Rows  rows = {x + channel + (apart ? sequence * (x_sequence_stride - sequence_tokens * x_stride) : 0),
                        out + channel + (apart ? sequence * (out_sequence_stride - sequence_tokens * out_stride) : 0),
                        x_stride, out_stride};
    if (start < end) run(filter, rows, state, sequence, start, end, start, end);
  } else {
    const Rows  rows = {x + channel, out + channel, x_stride, out_stride};
    const int64 until = min((int64(blockIdx.x) + 1) * block_tokens, tokens);
    int64 at = int64(blockIdx.x) * block_tokens, first = 0, behind = sequences;
    while (first < behind) {  // the first sequence that ends behind `at`
      const int64 middle = (first + behind) / 2;
      if (begin_of(middle + 1) <= at) first = middle + 1;
      else behind = middle;
    }
    for (int64 sequence = first; sequence < sequences; ++sequence) {
      const int64 start = begin_of(sequence), end = begin_of(sequence + 1);
      at = max(at, start);
      if (at >= until) break;
      if (at < end) run(filter, rows, state, sequence, start, end, at, min(end, until));
      at = max(at, end);
    }
  }
}

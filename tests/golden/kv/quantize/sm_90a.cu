// kv_quantize, generated from templates/kv/quantize.cu.j2
// spec: {"addressing":"whole","in_dtype":"bf16","tokens_per_thread":1}
//
// Quantizes rows of K and V to NVFP4 and writes them into a paged cache. A thread quantizes one block of each of
// kTokens tokens, while the next ones are loaded.
// Threads (w, h): a CTA is w blocks of a token by h runs of tokens. Grid: x over tokens, y over a token's blocks,
// z over K and V.

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
// Token i goes to place i of the cache (whole pages are quantized), to a slot (page * page_size + token), or to a
// position of a request that owns pages.
enum class Addressing { kWhole, kSlots, kPositions };
using In = bf16;
constexpr Addressing kAddressing = Addressing::kWhole;
constexpr int        kTokens     = 1;
constexpr int        kAhead      = kTokens > 2 ? kTokens / 2 : kTokens;  // that are on their way
static_assert(kTokens % kAhead == 0, "all rounds are full");
// The threads of a CTA look up its places together: a thread would wait for its own one after the other.
constexpr bool kTogether =
    kAddressing == Addressing::kPositions || (kAddressing == Addressing::kSlots && kTokens > 1);

// ---- kernel ----------------------------------------------------------------
__device__ __forceinline__ Place place_of(uint32 slot, int64 page_size) {
  return {slot / uint32(page_size), slot % uint32(page_size)};
}

// The lists that say where a token of kSlots or kPositions goes. Bits 0 to 3 of `wide` say which lists have 8-byte
// entries.
struct Lists {
  const void *slots, *batch_indices, *indices, *indptr;
  int64 tokens, requests, num_indices, num_pages, page_size, wide;

  __device__ __forceinline__ Place find(uint32 token) const {
    if (token >= tokens) return {};
    const int64 at = index_at(slots, token, wide & 1);  // a slot, or a position
    if constexpr (kAddressing == Addressing::kSlots) {
      return uint64(at) < num_pages * page_size ? place_of(at, page_size) : Place{};
    }
    const int64 request = index_at(batch_indices, token, wide & 2);
    if (uint64(request) >= requests) return {};
    const int64 begin = index_at(indptr, request, wide & 8), end = index_at(indptr, request + 1, wide & 8);
    if (begin < 0 || end > num_indices || end <= begin || uint64(at) >= (end - begin) * page_size) return {};
    const Place own  = place_of(at, page_size);
    const int64 page = index_at(indices, begin + own.page, wide & 4);
    return uint64(page) < num_pages ? Place{uint32(page), own.token} : Place{};
  }
};
extern __shared__ Place places[];  // of the CTA's tokens, with kTogether
static_assert(sizeof(Place) == 8, "the launch reserves shared memory for them");

extern "C" __global__ void __launch_bounds__(256) kv_quantize(
    const In* __restrict__ k,                // [tokens, heads, d] or [pages, tokens, heads, d], d contiguous
    const In* __restrict__ v,
    const float* __restrict__ k_scale,       // [1], decode
    const float* __restrict__ v_scale,
    uint8* __restrict__ k_codes,             // [pages, tokens, heads, d/2], low nibble first
    uint8* __restrict__ k_sf,                // [pages, tokens, heads, d/16], E4M3
    uint8* __restrict__ v_codes,
    uint8* __restrict__ v_sf,
    const void* __restrict__ slots,          // [tokens], slots or positions; list 0
    const void* __restrict__ batch_indices,  // [tokens]; list 1
    const void* __restrict__ indices,        // [num_indices], pages; list 2
    const void* __restrict__ indptr,         // [requests + 1]; list 3
    int64 tokens,
    int64 requests,
    int64 num_indices,
    int64 x_page,                            // elements from one to the next
    int64 x_token,
    int64 x_head,
    int64 num_pages,
    int64 page_size,
    int64 heads,
    int64 cols,                              // block scales of a head
    int64 codes_page,                        // bytes from one to the next, in both sides
    int64 codes_token,
    int64 codes_head,
    int64 sf_page,
    int64 sf_token,
    int64 sf_head,
    int64 interleaved_side,                  // 0 for K, 1 for V, else neither
    int64 wide_lists                         // bit i: list i has entries of 8 bytes, not 4
) {
  const uint32 side = blockIdx.z, blocks = uint32(heads * cols), own = blockIdx.y * blockDim.x + threadIdx.x;
  const uint32 block = min(own, blocks - 1), head = block / uint32(cols), col = block % uint32(cols);
  const uint32 row = threadIdx.y * kTokens, cta_first = blockIdx.x * blockDim.y * kTokens, first = cta_first + row;

  const In* x     = (side ? v : k) + head * x_head + col * kNvfp4Block;
  uint8*    codes = (side ? v_codes : k_codes) + head * codes_head + col * (kNvfp4Block / 2);
  uint8*    sf    = (side ? v_sf : k_sf) + head * sf_head;
  const Strides     x_strides{uint32(x_page), uint32(x_token)};
  const Strides     codes_strides{uint32(codes_page), uint32(codes_token)};
  const Strides     sf_strides{uint32(sf_page), uint32(sf_token)};
  const ScaleColumn column(col, uint32(cols), side == interleaved_side);
  const bool        wide = is_wide(x, x_page | x_token);
  asm volatile("" : "+l"(codes), "+l"(sf));  // keeps the compiler from computing them again for every token
  if constexpr (kHasPdl) ptx::griddep_wait();

  const Lists lists{slots,    batch_indices, indices,   indptr,    tokens,
                    requests, num_indices,   num_pages, page_size, wide_lists};
  RawUnit<In> raw[kAhead];
  Place       place[kAhead], next = place_of(first, page_size);  // for kWhole
  // Starts to load token i. One that does not exist goes nowhere, and loads the first token.
  const auto load = [&](int i, RawUnit<In>& to, Place& at) {
    const bool exists = first + i < tokens;
    if constexpr (kAddressing == Addressing::kWhole) {
      at = exists ? next : Place{};
      load_unit<In>(to, x + (exists ? x_strides.at(next) : 0), wide);
      if (++next.token == page_size) next = {next.page + 1, 0};
    } else {
      load_unit<In>(to, x + x_strides.at({0, exists ? first + i : 0}), wide);
    }
  };
#pragma unroll
  for (int i = 0; i < kAhead; ++i) load(i, raw[i], place[i]);
  if constexpr (kHasPdl) ptx::griddep_launch();
  const float decode = ptx::ld_f32(side ? v_scale : k_scale);
  if constexpr (kTogether) {
    find_places(places, blockDim.y * kTokens, [&](uint32 i) { return lists.find(cta_first + i); });
  }

  const float sixth = nvfp4_sixth(fminf(1.0f / decode, kFltMax));
#pragma unroll 1
  for (int i = 0; i < kTokens; i += kAhead) {
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      Place at = place[j];
      if constexpr (kTogether) at = places[row + i + j];
      else if constexpr (kAddressing == Addressing::kSlots) at = lists.find(first + i + j);
      const uint8 b = encode_e4m3(block_amax<In>(raw[j]) * sixth);
      const float o = fminf(1.0f / (decode_e4m3(b) * decode), kFltMax);
      const uint2 c = encode_block<In>(raw[j], o);
      if (i + kAhead < kTokens) load(i + kAhead + j, raw[j], place[j]);
      if (own != block || !at.found()) continue;
      store_codes(codes + codes_strides.at(at), c);
      sf[column.at(at, sf_strides)] = b;
    }
  }
}

// quantize_vector, generated from templates/quantize/vector.cu.j2
// spec: {"block_format":"nvfp4","blocks_per_thread":1,"four_over_six":false,"in_dtype":"bf16","sf_layout":"layout_128x4","silu":false}
//
// Threads (32 * w, h): a CTA is w warps along K by h sectors of block scales down the matrix.
// Grid: x along K, y and z down it.

// ---- partials/format -------------------------------------------------------
enum class Format { kNvfp4, kMxfp4 };
// Elements that share a scale.
__host__ __device__ constexpr int block_of(Format format) { return format == Format::kNvfp4 ? 16 : 32; }

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

// ---- partials/formats ------------------------------------------------------
// The block formats under one interface: scale() gives the scale byte of a block, multiplier() the factor of elements
// before they are rounded, value() the factor of decoded codes. g is the encode scale; for value(), the decode scale.
template <Format> struct Recipe;
template <> struct Recipe<Format::kNvfp4> {
  static constexpr int  kBlock          = kNvfp4Block;
  static constexpr bool kHasGlobalScale = true;
  float g;
  __device__ __forceinline__ uint8 scale(float amax) const { return encode_e4m3(amax * nvfp4_sixth(g)); }
  __device__ __forceinline__ float multiplier(uint8 b) const { return nvfp4_multiplier(b, g); }
  __device__ __forceinline__ float value(uint8 b) const { return decode_e4m3(b) * g; }
};
template <> struct Recipe<Format::kMxfp4> {
  static constexpr int  kBlock          = 32;
  static constexpr bool kHasGlobalScale = false;
  float g;
  __device__ __forceinline__ uint8 scale(float amax) const { return encode_ue8m0(amax * nvfp4_sixth(1.0f)); }
  __device__ __forceinline__ float multiplier(uint8 b) const { return ue8m0_multiplier(b); }
  __device__ __forceinline__ float value(uint8 b) const { return decode_ue8m0(b); }
};

// ---- partials/e2m1_decode --------------------------------------------------
// Codes i and i + 4 of a word, bits 4 i to 4 i + 3, as a pair of T: as sign, last exponent bits and first mantissa bit
// of a 16-bit float, the bits of a code are its value times 2^-14 (f16; a subnormal for 0.5) or 2^-126 (bf16).
template <typename T> __device__ __forceinline__ uint32 e2m1_pair_of(uint32 word, int i) {
  const uint32 top = word << (12 - 4 * i);
  return (top & kPairSigns) | (top & 0x70007000u) >> (kIsBf16<T> ? 6 : 3);
}
// Code i of a word to v[i].
__device__ __forceinline__ void decode_e2m1x8(uint32 word, float (&v)[8]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32 pair = e2m1_pair_of<f16>(word, i);
    v[i]     = low<f16>(pair) * 0x1p14f;
    v[i + 4] = high<f16>(pair) * 0x1p14f;
  }
}

// ---- partials/four_over_six ------------------------------------------------
// NVFP4 blocks that take the better of two scales. With the global encode scale g, one is made of s = (amax / 6) * g,
// the other of s * 1.5; block scales b and codes follow as in nvfp4. The second is taken where its error is less: the
// sum, from the first element to the last, of |y - x| or of its square, where in steps that are correctly rounded
//   y = (e2m1(code) * dec8(b)) * (1 / g)
//   y = ((e2m1(code) * dec8(b)) * row_amax) / (6 * e4m3_max)    if g was made for the row (kByRow)
// With fast math it is the sum for |e2m1(code) * dec8(b) - x * g|. A block of zeros has scale and codes 0.
struct Nvfp4Codes {
  uint2 codes;  // element i in nibble i
  uint8 scale;
};

// The bits of a recipe.
constexpr int64 kSquares = 2, kFastMath = 4, kSmallScales = 8;  // the last: e4m3_max is 256, otherwise 448

// v / divisor, which is 1, 1536 or 2688, correctly rounded. With kInside, where no step is near overflow or underflow,
// it is an approximation that its remainder corrects.
template <bool kInside> __device__ __forceinline__ float quotient(float v, float divisor) {
  if constexpr (!kInside) return v / divisor;
  const float inverse = 1.0f / divisor, near = v * inverse;
  return fmaf(fmaf(-divisor, near, v), inverse, near);
}

template <bool kByRow> struct FourOverSix {
  Nvfp4Multiplier multiplier_of;
  float g, of_values, divisor, of_inputs;  // an error is (e2m1(code) * dec8(b)) * of_values / divisor - x * of_inputs
  bool  squares, inside;

  __device__ __forceinline__ FourOverSix(int64 recipe, float g, float row_amax = 0.0f) : multiplier_of(g), g(g) {
    const bool fast = recipe & kFastMath;
    squares   = recipe & kSquares;
    of_values = fast ? 1.0f : kByRow ? row_amax : multiplier_of.decode;
    divisor   = fast ? 1.0f : recipe & kSmallScales ? 6.0f * 256.0f : 6.0f * 448.0f;
    of_inputs = fast ? g : 1.0f;
    inside    = of_values > 0x1p-80f && of_values < 0x1p80f;  // e2m1(code) * dec8(b) is 0, or from 2^-10 to 2688
  }

  // x: 16 elements in 8 pairs.
  template <typename In> __device__ __forceinline__ Nvfp4Codes operator()(const uint32 (&x)[8], float amax) const {
    const float s = amax / 6.0f * g;
    const Nvfp4Codes six = encode<In>(x, s), four = encode<In>(x, s * 1.5f);
    if (amax == 0.0f) return {};
    const bool better = !kByRow || inside ? error<In, true>(x, four) < error<In, true>(x, six)
                                          : error<In, false>(x, four) < error<In, false>(x, six);
    return better ? four : six;
  }

 private:
  template <typename In> __device__ __forceinline__ Nvfp4Codes encode(const uint32 (&x)[8], float s) const {
    const uint8 b = encode_e4m3(s);
    return {encode_block<In>(x, multiplier_of(b)), b};
  }
  template <typename In, bool kInside>
  __device__ __forceinline__ float error(const uint32 (&x)[8], const Nvfp4Codes& block) const {
    const float unit = decode_e4m3(block.scale) * 0x1p14f;  // what e2m1_pair_of gives is a value times 2^-14
    float differences[kNvfp4Block];
    const auto compare = [&](int i, float value) {
      float y = value * unit * of_values;
      if constexpr (kByRow) y = quotient<kInside>(y, divisor);
      differences[i] = y - (i % 2 == 0 ? low<In>(x[i / 2]) : high<In>(x[i / 2])) * of_inputs;
    };
#pragma unroll
    for (int p = 0; p < 8; ++p) {
      const int    i    = p / 4 * 8 + p % 4;
      const uint32 pair = e2m1_pair_of<f16>(p < 4 ? block.codes.x : block.codes.y, p % 4);
      compare(i, low<f16>(pair)), compare(i + 4, high<f16>(pair));
    }
    return squares ? sum<true>(differences) : sum<false>(differences);
  }
  template <bool kSquared> static __device__ __forceinline__ float sum(const float (&differences)[kNvfp4Block]) {
    float total = 0.0f;
#pragma unroll
    for (float d : differences) total += kSquared ? d * d : fabsf(d);
    return total;
  }
};

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
// Returns round(silu(gate) * up).
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

// ---- partials/quantize_task ------------------------------------------------
// The work of a warp: kBlocks neighbouring sectors of block scales (see sf_layout). A lane quantizes one block of
// elements in each of them.
template <typename In> struct Matrix {
  const In*    x;        // [rows, k], or for silu_and_mul [rows, 2k]: gate, then up; rows are x_stride apart
  const float* scale;    // of row r at r * scale_stride
  uint8*       q;        // [rows, k/2]
  uint8*       sf;
  int64        k, x_stride, scale_stride;
  uint32       rows;     // rows of sf from here on are padding, which is set to zero
  uint32       filled;   // rows from filled to rows are not written
};

// The work of a warp is number `sector` down the matrix and number `task` along K. Columns are counted in blocks. With
// kFourOverSix, NVFP4 blocks take the better of two scales by the given recipe.
template <Format F, SfLayout L, bool kSilu, bool kFourOverSix, int kBlocks, typename In>
__device__ __forceinline__ void quantize_task(const Matrix<In>& a, int64 four_over_six, uint32 sector, uint32 task) {
  using Sf   = Sector<L>;
  using Wide = typename Widened<In>::type;
  constexpr int kBlock = Recipe<F>::kBlock, kUnits = kBlock / 16;
  constexpr int kStep  = Sf::kCols * kBlock;  // elements from a thread's block to its next

  const uint32 lane      = threadIdx.x % kWarp;
  const uint32 row       = Sf::row(sector, lane);
  const uint32 first_col = task * (Sf::kCols * kBlocks), col = first_col + lane % Sf::kCols;
  const uint32 cols      = uint32(uint64(a.k) / kBlock), sf_cols = sf_padded_cols<L>(cols);
  if (row >= sf_padded_rows<L>(a.rows) || col >= sf_cols) return;

  const In* x  = a.x + row * a.x_stride + int64(col) * kBlock;
  uint8*    q  = a.q + (int64(row) * cols + col) * (kBlock / 2);
  uint8*    sf = a.sf + Sf::offset(sector, first_col, sf_cols) + lane;
  const uint32 data_left  = row < a.filled && col < cols ? cols - col : 0;
  const uint32 scale_left = row < a.filled || row >= a.rows ? sf_cols - col : 0;

  const bool wide = is_wide(a.x, a.x_stride);
  if constexpr (kHasPdl) ptx::griddep_wait();
  RawUnit<In> raw[kBlocks][kUnits] = {}, up[kSilu ? kBlocks : 1][kUnits] = {};
#pragma unroll
  for (int i = 0; i < kBlocks; ++i) {
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      if (i * Sf::kCols < data_left) {
        load_unit<In>(raw[i][u], x + i * kStep + u * 16, wide);
        if constexpr (kSilu) load_unit<In>(up[i][u], x + a.k + i * kStep + u * 16, wide);
      }
    }
  }
  if constexpr (kHasPdl) ptx::griddep_launch();
  float g = 1.0f;
  if (Recipe<F>::kHasGlobalScale && row < a.filled) g = ptx::ld_f32(a.scale + row * a.scale_stride);
  const Recipe<F> recipe{g};
#pragma unroll
  for (int i = 0; i < kBlocks; ++i) {
    uint32 block[kUnits][8];
    float amax = 0.0f;
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      if constexpr (kSilu) {
        silu_and_mul<In>(raw[i][u], up[i][u], block[u]);
      } else if constexpr (sizeof(In) == 1) {
        widen_unit(raw[i][u], recipe.g, block[u]);
      } else {
#pragma unroll
        for (int j = 0; j < 8; ++j) block[u][j] = raw[i][u][j];
      }
      const float unit_amax = block_amax<Wide>(block[u]);
      amax = u == 0 ? unit_amax : fmaxf(amax, unit_amax);
    }
    const bool  has_data = i * Sf::kCols < data_left;
    uint8 b;
    uint2 codes[kUnits];
    if constexpr (kFourOverSix) {
      const Nvfp4Codes better = FourOverSix<false>(four_over_six, recipe.g).template operator()<Wide>(block[0], amax);
      codes[0] = better.codes, b = better.scale;
    } else {
      b = recipe.scale(amax);
      const float o = recipe.multiplier(b);
#pragma unroll
      for (int u = 0; u < kUnits; ++u) codes[u] = encode_block<Wide>(block[u], o);
    }
    if (has_data) {
      if constexpr (kUnits == 1) *reinterpret_cast<uint2*>(q + i * kStep / 2) = codes[0];
      if constexpr (kUnits == 2)
        ptx::st(q + i * kStep / 2, make_uint4(codes[0].x, codes[0].y, codes[1].x, codes[1].y));
    }
    if (i * Sf::kCols < scale_left) sf[i * Sf::kStride] = has_data ? b : uint8(0);
  }
}

// ---- spec ------------------------------------------------------------------
using In = bf16;
constexpr Format   kFormat          = Format::kNvfp4;
constexpr SfLayout kSfLayout        = SfLayout::k128x4;
constexpr bool     kSilu            = false;
constexpr bool     kFourOverSix     = false;
constexpr int      kBlocksPerThread = 1;

// ---- kernel ----------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(256) quantize_vector(
    const In* __restrict__ x,                // [m, k], of silu_and_mul [m, 2k]; rows x_stride elements apart
    const float* __restrict__ global_scale,  // encode scale of row r at r * scale_stride; null for MXFP4
    uint8* __restrict__ q,                   // [m, k/2], low nibble first
    uint8* __restrict__ sf,                  // block scales in kSfLayout
    int64 m,
    int64 k,
    int64 x_stride,
    int64 scale_stride,
    int64 four_over_six                      // bits of a recipe; 0 unless kFourOverSix
) {
  const Matrix<In> a{x, global_scale, q, sf, k, x_stride, scale_stride, uint32(m), uint32(m)};
  const uint32 sector = (blockIdx.z * gridDim.y + blockIdx.y) * blockDim.y + threadIdx.y;
  const uint32 task   = (blockIdx.x * blockDim.x + threadIdx.x) / kWarp;
  quantize_task<kFormat, kSfLayout, kSilu, kFourOverSix, kBlocksPerThread>(a, four_over_six, sector, task);
}

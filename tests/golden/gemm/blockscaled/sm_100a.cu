// gemm_blockscaled, generated from templates/gemm/blockscaled.cu.j2
// spec: {"cluster_m":1,"cluster_n":1,"ctas":1,"format":"nvfp4","out_dtype":"bf16","prefetch":false,"split":4,"stages":8,"swap_ab":true,"tile_n":16,"tma_store":true}
//
// out [m, n] = alpha * a [m, k] b [n, k]^T, both FP4 with block scales, by the block-scaled products of the sm_100
// family. The left operand of the products, of which a CTA takes 128 rows, is a, or b with kSwapAb. Then the products
// are the transpose of out, and the warps that write them transpose them back.
//
// One warp copies steps of 256 columns of a tile's rows and of their scales, kStages of them in flight. One warp issues
// the products: scales from shared to tensor memory, then four products of 64 columns a step. Four warps write a tile
// while the next one is computed. CTAs are persistent. With a kCtas of 2, two CTAs compute a tile of 256 rows together:
// each has half of the rows of both operands, and the first one issues the products of both.
//
// A cluster computes kClusterM by kClusterN tiles. Of the rows and scales that several of its CTAs need, each of them
// copies a part, for all. With a kSplit above 1, it has so many groups of these CTAs, each for a part of the columns,
// and the first group adds up the sums of all.

// ---- partials/arch ---------------------------------------------------------
// sm_100a
constexpr bool kHasXorsign = true;  // min, max with .xorsign.abs: from sm_86 on
constexpr bool kHasE4m3Cvt = true;
constexpr bool kHasE2m1Cvt = true;
constexpr bool kHasLd256   = true && __CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__ >= 1209;  // PTX 8.8
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
enum class Format { kNvfp4, kMxfp4 };
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

// ---- spec ------------------------------------------------------------------
using Out = bf16;
constexpr Format kFormat  = Format::kNvfp4;
constexpr int  kTileN     = 16;
constexpr int  kCtas      = 1;  // of a tile
constexpr int  kClusterM  = 1;  // tiles
constexpr int  kClusterN  = 1;
constexpr int  kSplit     = 4;  // parts of the columns
constexpr int  kGroup     = kCtas * kClusterM * kClusterN;  // CTAs that have the same part of the columns
constexpr int  kCluster   = kGroup * kSplit;  // CTAs
constexpr int  kStages    = 8;
constexpr bool kSwapAb    = true;
constexpr bool kPrefetch  = false;   // to L2, kStages steps ahead
constexpr bool kTmaStore  = true;

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

// ---- partials/store_matrices -----------------------------------------------
namespace ptx {
// Stores 8 x 8 matrices, transposed. r[i] of lane l is row l / 4, columns 2 (l % 4) and the next, of matrix i. Lane
// 8 i + c gives the address of column c of matrix i, 16 bytes.
__device__ __forceinline__ void store_matrices(uint32 to, const uint32 (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
               ::"r"(to), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
}
__device__ __forceinline__ void store_matrices(uint32 to, const uint32 (&r)[2]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};"
               ::"r"(to), "r"(r[0]), "r"(r[1]) : "memory");
}
}  // namespace ptx

// ---- partials/ring ---------------------------------------------------------
// The slot of a ring that a thread is at, and the parity of the current phase of that slot's barrier.
template <int kSize> struct Ring {
  uint32 slot = 0, parity = 0;
  __device__ __forceinline__ void advance() {
    if (++slot == kSize) slot = 0, parity ^= 1;
  }
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
  asm volatile("{\n"
               "  .reg .b32 a;\n"
               "  mapa.shared::cluster.u32 a, %0, %1;\n"
               "  st.shared::cluster.f32 [a], %2;\n"
               "}" ::"r"(shared_address(p)), "r"(rank), "f"(v) : "memory");
}
}  // namespace ptx

// ---- gemm/tensor_memory ----------------------------------------------------
// The tensor cores of the sm_100 family: their memory, the product of block-scaled FP4 matrices, the copies around it.
// An address of tensor memory has the lane in its upper half and the column in the lower.
namespace ptx {
// Allocates all 512 columns and writes their address to shared memory. One warp of each CTA does it, and frees them.
__device__ __forceinline__ void tensor_memory_alloc(uint32* address) {
  asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], 512;"
               ::"r"(shared_address(address)) : "memory");
  asm volatile("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;");
}
__device__ __forceinline__ void tensor_memory_free(uint32 address) {
  asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, 512;" ::"r"(address) : "memory");
}
// Before and after a barrier: what threads did in tensor memory before it is visible to the others after it.
__device__ __forceinline__ void tensor_memory_before() {
  asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
}
__device__ __forceinline__ void tensor_memory_after() {
  asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
}

// The descriptor of an operand in shared memory: rows of 128 bytes, in the 128-byte swizzle of the copy.
__device__ __forceinline__ uint64 operand(uint32 address) {
  return uint64(address & 0x3FFFFu) >> 4 | uint64(1024 / 16) << 32 | uint64(1) << 46 | uint64(2) << 61;
}
// The same for a product of 96 columns, which may go past the end of its rows: it continues at their beginning in
// `next`.
__device__ __forceinline__ uint64 operand_over(uint32 address, uint32 next) {
  return operand(address) | uint64(next & 0x3FFFFu) >> 4 << 16 | uint64(1) << 52;
}
// 128 rows by four scales, 512 bytes, to four columns: column c has the scales of rows 32 c to 32 c + 31, every quarter
// of the lanes the same. With a kCtas of 2 both CTAs copy what they have at this place.
// Products and copies of one thread are carried out in the order of their issue, so that a copy may overwrite scales of
// products before it.
__device__ __forceinline__ void copy_scales(uint32 to, uint32 from) {
  const uint64 atom = uint64(from & 0x3FFFFu) >> 4 | uint64(128 / 16) << 32 | uint64(1) << 46;
  asm volatile("tcgen05.cp.cta_group::1.32x128b.warpx4 [%0], %1;" ::"r"(to), "l"(atom) : "memory");
}
// sums = left right^T, or sums += it. The arguments after the operands are the instruction descriptor and the columns
// of the scales.
__device__ __forceinline__ void multiply(uint32 sums, uint64 left, uint64 right, uint32 form, uint32 left_scales,
                                         uint32 right_scales, bool add) {
  asm volatile("{\n"
               "  .reg .pred add;\n"
               "  setp.ne.b32 add, %6, 0;\n"
               "  tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.scale_vec::4X"
               " [%0], %1, %2, %3, [%4], [%5], add;\n"
               "}"
               ::"r"(sums), "l"(left), "l"(right), "r"(form), "r"(left_scales), "r"(right_scales), "r"(uint32(add))
               : "memory");
}
// Arrives once at the barrier, in each CTA of the mask, when all that this thread has issued so far is complete.
__device__ __forceinline__ void commit(Barrier* b, uint16 mask) {
  if constexpr (kGroup == 1)
    asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];"
                 ::"r"(shared_address(b)) : "memory");
  if constexpr (kGroup > 1)
    asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64"
                 " [%0], %1;"
                 ::"r"(shared_address(b)), "h"(mask) : "memory");
}

// The address that `p` has in another CTA.
__device__ __forceinline__ uint32 cluster_address(const void* p, uint32 rank) {
  uint32 a;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(a) : "r"(shared_address(p)), "r"(rank));
  return a;
}
// The same in the first CTA of this CTA's pair.
__device__ __forceinline__ uint32 leader_address(const void* p) {
  if constexpr (kCtas == 1) return shared_address(p);
  return cluster_address(p, kCluster == 2 ? 0 : cluster_rank() & ~1u);
}
__device__ __forceinline__ void arrive_at(Barrier* b, uint32 rank) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];"
               ::"r"(cluster_address(b, rank)) : "memory");
}
// What the other CTA did before it arrived is visible then.
__device__ __forceinline__ void mbarrier_wait_cluster(Barrier* b, uint32 parity) {
  uint32 done = 0;
  while (!done)
    asm volatile("{\n"
                 "  .reg .pred p;\n"
                 "  mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
                 "  selp.u32 %0, 1, 0, p;\n"
                 "}"
                 : "=r"(done) : "r"(shared_address(b)), "r"(parity) : "memory");
}
// Copies a box to this CTA; its bytes count towards the barrier of the pair's first CTA.
__device__ __forceinline__ void tma_load_for_pair(void* to, const TensorMap& map, int32 col, int32 row, Barrier* b) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.cta_group::2"
               " [%0], [%1, {%2, %3}], [%4];"
               ::"r"(shared_address(to)), "l"(&map), "r"(col), "r"(row), "r"(leader_address(b)) : "memory");
}
// Copies a box to every CTA of the mask, to the address of `to`. In each, its bytes count towards the barrier of the
// first CTA of its tile.
__device__ __forceinline__ void tma_load_for_all(void* to, const TensorMap& map, int32 col, int32 row, Barrier* b,
                                                 uint16 mask) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
               ".cta_group::1 [%0], [%1, {%2, %3}], [%4], %5;"
               ::"r"(shared_address(to)), "l"(&map), "r"(col), "r"(row), "r"(leader_address(b)), "h"(mask) : "memory");
}
__device__ __forceinline__ void tma_prefetch(const TensorMap& map, int32 col, int32 row) {
  asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%0, {%1, %2}];"
               ::"l"(&map), "r"(col), "r"(row) : "memory");
}
}  // namespace ptx

// ---- gemm/tiles ------------------------------------------------------------
// The rows of the left operand are the rows of the sums: the left operand is a, or b with kSwapAb. A tile is kTileM
// rows of the left operand by kTileN rows of the right one, and the kCtas CTAs of a tile divide its left rows. Clusters
// take groups of kClusterM tiles along the left rows by kClusterN along the right ones in turn. What is outside of the
// matrix is computed too, from zeros, and not written.
constexpr int kTileM = 128 * kCtas;
constexpr int kBand  = 8 / kClusterM;  // groups with the same right rows that follow each other

// The barriers of a ring: one arrival completes `full`, and `frees` arrivals complete `empty`.
template <int kSize>
__device__ __forceinline__ void init_ring(Barrier (&full)[kSize], Barrier (&empty)[kSize], uint32 frees) {
  for (int s = 0; s < kSize; ++s) {
    ptx::mbarrier_init(&full[s], 1);
    ptx::mbarrier_init(&empty[s], frees);
  }
}

// A mask of `count` CTAs of a cluster: every `step`-th.
__host__ __device__ constexpr uint32 every(int step, int count) {
  uint32 mask = 0;
  for (int i = 0; i < count; ++i) mask |= 1u << i * step;
  return mask;
}
constexpr int kColumn = kCtas * kClusterM;  // CTAs of a group that have the same right rows

// The place of this CTA in its cluster: by rank, the CTAs of a tile follow each other, then the tiles along the left
// rows, then those along the right ones, then the parts of the columns.
struct Member {
  uint32 rank = kCluster == 1 ? 0 : ptx::cluster_rank();

  __device__ __forceinline__ uint32 cta() const { return rank % kCtas; }  // of its tile
  __device__ __forceinline__ uint32 column() const { return rank % kColumn; }
  __device__ __forceinline__ uint32 tile_m() const { return column() / kCtas; }
  __device__ __forceinline__ uint32 tile_n() const { return (rank - part() * kGroup) / kColumn; }
  __device__ __forceinline__ uint32 part() const { return kSplit == 1 ? 0 : rank / kGroup; }
  // Its steps, of all.
  __device__ __forceinline__ uint32 begin(uint32 steps) const { return steps * part() / kSplit; }
  __device__ __forceinline__ uint32 end(uint32 steps) const { return steps * (part() + 1) / kSplit; }
  // Masks: who needs the same left rows, right rows, and scales of the right rows.
  __device__ __forceinline__ uint16 with_left() const {
    return every(kColumn, kClusterN) << (part() * kGroup + column());
  }
  __device__ __forceinline__ uint16 with_right() const { return every(kCtas, kClusterM) << (rank - column() + cta()); }
  __device__ __forceinline__ uint16 with_right_scales() const { return every(1, kColumn) << (rank - column()); }
  // The CTAs of its tile, and all that copy something for them.
  __device__ __forceinline__ uint16 of_tile() const { return every(1, kCtas) << (rank - cta()); }
  __device__ __forceinline__ uint16 copiers() const {
    return with_right_scales() | every(kColumn, kClusterN) * every(1, kCtas) << (part() * kGroup + tile_m() * kCtas);
  }
};
constexpr uint32 kReleases = kClusterM + kClusterN - 1;  // of a slot: tiles for which a CTA copies something

struct Tiles {
  uint32 left, right, first, step;  // groups
  Member member;

  __device__ __forceinline__ Tiles(int64 m, int64 n)
      : left(ceil_div(kSwapAb ? n : m, kTileM * kClusterM)), right(ceil_div(kSwapAb ? m : n, kTileN * kClusterN)),
        first(ptx::cluster_id()), step(ptx::clusters()) {}
  __device__ __forceinline__ uint32 count() const { return left * right; }
  // The first row of the left operand for this CTA, and the first row of the right operand.
  __device__ __forceinline__ uint2 place(uint32 group) const {
    const uint32 band = group / (kBand * right), inside = group % (kBand * right);
    const uint32 high = min(uint32(kBand), left - band * kBand);
    return {(band * kBand + inside % high) * (kTileM * kClusterM) + member.column() * 128,
            (inside / high * kClusterN + member.tile_n()) * kTileN};
  }
};

// A barrier of all threads of the CTA, or of the cluster.
__device__ __forceinline__ void meet() {
  if constexpr (kCluster == 1) __syncthreads();
  if constexpr (kCluster > 1) {
    __syncwarp();
    ptx::cluster_sync();
  }
}

// The part of an operand's box that a CTA copies, for all kSharers CTAs that need the box: at `row` and `col` of the
// box and `offset` bytes of a slot. In each of them it counts towards the barrier of the first CTA of its tile, which
// alone expects it.
template <int kSharers> struct Share {
  const TensorMap& map;
  uint16 mask;
  uint32 row, col, offset;

  __device__ __forceinline__ void load(uint8* slot, uint32 box_col, uint32 box_row, Barrier* b) const {
    uint8* const to = slot + offset;
    const int32  x = box_col + col, y = box_row + row;
    if constexpr (kSharers > 1) ptx::tma_load_for_all(to, map, x, y, b, mask);
    if constexpr (kSharers == 1 && kCtas == 1) ptx::tma_load(to, map, x, y, b);
    if constexpr (kSharers == 1 && kCtas == 2) ptx::tma_load_for_pair(to, map, x, y, b);
  }
  __device__ __forceinline__ void prefetch(uint32 box_col, uint32 box_row) const {
    ptx::tma_prefetch(map, box_col + col, box_row + row);
  }
};
using LeftShare       = Share<kClusterN>;
using RightShare      = Share<kClusterM>;
using RightScaleShare = Share<kColumn>;

// Rows of 128 bytes.
__device__ __forceinline__ LeftShare left_share(const TensorMap& map, Member member) {
  constexpr uint32 kRows = 128 / kClusterN;
  const uint32 row = member.tile_n() * kRows;
  return {map, member.with_left(), row, 0, row * 128};
}
__device__ __forceinline__ RightShare right_share(const TensorMap& map, Member member) {
  constexpr uint32 kRows = kTileN / kColumn;
  const uint32 row = member.tile_m() * kRows;
  return {map, member.with_right(), member.cta() * (kTileN / kCtas) + row, 0, row * 128};
}
// Rows of kWords words of 8 bytes, one for each 128 rows of the operand.
template <uint32 kWords>
__device__ __forceinline__ LeftShare left_scales_share(const TensorMap& map, Member member) {
  const uint32 word = member.tile_n() * (kWords / kClusterN);
  return {map, member.with_left(), 0, word, word * 8};
}
template <uint32 kRows, uint32 kWords>
__device__ __forceinline__ RightScaleShare right_scales_share(const TensorMap& map, Member member) {
  const uint32 word = member.column() * (kRows * kWords / kColumn);
  return {map, member.with_right_scales(), word / kWords, word % kWords, word * 8};
}

// Waits until every slot is free: a CTA must not end while others still arrive at its barriers.
template <int kSize> __device__ __forceinline__ void drain(Barrier (&empty)[kSize], Ring<kSize> ring) {
  if constexpr (kGroup == 1) return;
  for (int i = 0; i < kSize; ++i, ring.advance()) ptx::mbarrier_wait(&empty[ring.slot], ring.parity ^ 1);
}

// ---- gemm/sums -------------------------------------------------------------
// Tensor memory holds two images of the sums of a tile and, in its last columns, scales: while the tensor cores fill
// one image, four warps write the other. Two images of 256 columns share kShared of them. They are read first, and then
// the tensor cores may go on.
constexpr int  kScaleColumn = 464;
constexpr bool kOverlap     = 2 * kTileN > kScaleColumn;
constexpr int  kImageStep   = kOverlap ? kScaleColumn - kTileN : kTileN;
constexpr int  kShared      = kTileN - kImageStep;
constexpr int  kSumsBarriers = kOverlap ? 1 : 2;
constexpr int  kWriters     = 4;                            // warps: each has the lanes of a quarter
constexpr int  kPartN       = 16;               // columns that a warp writes at a time
constexpr int  kParts       = kTileN / kPartN;
constexpr int  kRegisters   = kSwapAb ? 2 * (kPartN / 2) : kPartN;
constexpr int  kPartBytes   = kPartN * 64;                  // 32 rows of the sums, 16 bits each
static_assert(kShared <= kPartN && kShared >= 0, "the first part that is read has the shared columns");
static_assert(kPartN == 64 || kSwapAb, "other parts are written by the epilogue of kSwapAb");

struct Images {
  uint32 image = 0, parity = 0;
  __device__ __forceinline__ uint32 column() const { return image * kImageStep; }
  __device__ __forceinline__ uint32 barrier() const { return kOverlap ? 0 : image; }
  __device__ __forceinline__ void advance() {
    image ^= 1;
    if (kOverlap || image == 0) parity ^= 1;
  }
};

namespace ptx {
// Registers that a load of tensor memory fills, in order. They belong to it until the wait.
__device__ __forceinline__ void tensor_memory_load(uint32* r, uint32 from) {
  asm volatile("tcgen05.ld.sync.aligned.16x256b.x2.b32 {"
               "%0, %1, %2, %3, %4, %5, %6, %7"
               "}, [%8];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]), "=r"(r[4]), "=r"(r[5]), "=r"(r[6]), "=r"(r[7])
               : "r"(from));
}
template <int N> __device__ __forceinline__ void tensor_memory_wait(uint32 (&r)[N]) {
  asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory");
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+r"(r[i])::"memory");  // not read before
}
__device__ __forceinline__ void tma_store(const TensorMap& map, int32 col, int32 row, uint32 from) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];"
               ::"l"(&map), "r"(col), "r"(row), "r"(from) : "memory");
}
// The stores that this thread has started since the last group become one.
__device__ __forceinline__ void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until all but the last kAllowed groups of this thread have read their source.
template <int kAllowed> __device__ __forceinline__ void tma_store_wait() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kAllowed) : "memory");
}
// Makes this thread's writes to shared memory visible to the copy engine.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void st_32(void* p, const uint32 (&v)[8]) {
  asm volatile("st.global.v8.b32 [%0], {%1, %2, %3, %4, %5, %6, %7, %8};"
               ::"l"(p), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]), "r"(v[4]), "r"(v[5]), "r"(v[6]), "r"(v[7])
               : "memory");
}
// At an address of another CTA's shared memory.
__device__ __forceinline__ void st_cluster(uint32 to, const uint32* v) {
  asm volatile("st.shared::cluster.v4.b32 [%0], {%1, %2, %3, %4};"
               ::"r"(to), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]) : "memory");
}
}  // namespace ptx

// What warps of the CTAs with other columns hand to the one that adds it up. The barrier `empty` is that of the sender.
// With a kSplit above 1, one for each warp stands behind the other shared memory.
struct Handed {
  uint4   sums[kSplit > 1 ? kSplit - 1 : 1][kRegisters / 4][kWarp];
  Barrier full, empty;
};
constexpr int kHandedBytes = kSplit > 1 ? kWriters * sizeof(Handed) : 0;

template <typename Shared> __device__ __forceinline__ Handed& handed_of(Shared& shared, uint32 warp) {
  return reinterpret_cast<Handed*>(&shared + 1)[warp];
}

template <typename Shared> __device__ __forceinline__ void init_sums(Shared& shared) {
  init_ring(shared.sums_full, shared.sums_empty, kWriters * kCtas);
  for (int w = 0; kSplit > 1 && w < kWriters; ++w) {
    ptx::mbarrier_init(&handed_of(shared, w).full, kSplit - 1);
    ptx::mbarrier_init(&handed_of(shared, w).empty, 1);
  }
}

__device__ __forceinline__ uint32 scaled(const uint32* r, float alpha) {
  return to_pair<Out>(__uint_as_float(r[0]) * alpha, __uint_as_float(r[1]) * alpha);
}
__device__ __forceinline__ uint32 sum(uint32 a, uint32 b) {
  return __float_as_uint(__uint_as_float(a) + __uint_as_float(b));
}

// One warp: 32 rows of the sums of every tile of this CTA.
struct Writer {
  uint32 warp, lane;
  float  alpha;
  bool   leader;  // of the warp
  Images images;
  uint32 handed = 0;  // the parity of the next exchange of sums

  // kPartN columns of its rows. A thread gets a row of them, or with kSwapAb fragments of 8 x 8.
  __device__ __forceinline__ void load(uint32 (&r)[kRegisters], uint32 from) const {
    ptx::tensor_memory_load(r, from);
    if constexpr (kSwapAb) ptx::tensor_memory_load(r + kRegisters / 2, from + (16 << 16));
    ptx::tensor_memory_wait(r);
  }
  // To rows of 128 bytes, or with kSwapAb of 64 bytes, swizzled.
  __device__ __forceinline__ void stage(uint32 to, const uint32 (&r)[kRegisters]) const {
#pragma unroll
    for (int i = 0; i < kPartN / 8; ++i) {
      if constexpr (kSwapAb) {
        const uint32 *upper = r + 4 * i, *lower = upper + kRegisters / 2;
        const uint32 pairs[4] = {scaled(upper, alpha), scaled(upper + 2, alpha), scaled(lower, alpha),
                                 scaled(lower + 2, alpha)};
        ptx::store_matrices(to + i * 512 + lane % 8 * 64 + (lane / 8 ^ lane % 8 / 2) * 16, pairs);
      } else {
        const uint32* v = r + 8 * i;
        ptx::st_shared(to + swizzle_128(lane, i), make_uint4(scaled(v, alpha), scaled(v + 2, alpha),
                                                             scaled(v + 4, alpha), scaled(v + 6, alpha)));
      }
    }
  }
  // To the row itself, of which `cols` columns are left, 32 bytes at a time where it is aligned so.
  __device__ __forceinline__ void store(Out* row, int64 cols, bool wide, const uint32 (&r)[kRegisters]) const {
#pragma unroll
    for (int i = 0; i < kPartN; i += 16) {
      uint32 pairs[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) pairs[j] = scaled(r + (i + 2 * j) % kRegisters, alpha);
      if (kHasLd256 && wide && i + 16 <= cols) {
        ptx::st_32(row + i, pairs);
        continue;
      }
      if (i < cols) ptx::st(row + i, make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]));
      if (i + 8 < cols) ptx::st(row + i + 8, make_uint4(pairs[4], pairs[5], pairs[6], pairs[7]));
    }
  }
  template <typename Shared>
  __device__ __forceinline__ void release(Shared& shared) const {
    Barrier* empty = &shared.sums_empty[images.barrier()];
    ptx::tensor_memory_before();
    __syncwarp();
    if (!leader) return;
    if constexpr (kCtas == 1) ptx::mbarrier_arrive(empty);
    if constexpr (kCtas == 2) ptx::arrive_at(empty, ptx::cluster_rank() & ~1u);
  }
  // The CTA with the first part of the columns adds the sums of the other parts to its own, in their order; true there.
  __device__ __forceinline__ bool add_up(Handed& of_warp, uint32 (&r)[kRegisters], Member member) {
    const uint32 parity = handed;
    handed ^= 1;
    if (member.part() > 0) {
      const uint32 first = member.rank % kGroup;
      const uint32 to = ptx::cluster_address(&of_warp.sums[member.part() - 1][0][lane], first);
      ptx::mbarrier_wait_cluster(&of_warp.empty, parity ^ 1);
#pragma unroll
      for (int i = 0; i < kRegisters / 4; ++i) ptx::st_cluster(to + i * sizeof(of_warp.sums[0][0]), r + 4 * i);
      __syncwarp();
      if (leader) ptx::arrive_at(&of_warp.full, first);
      return false;
    }
    ptx::mbarrier_wait_cluster(&of_warp.full, parity);
    for (int part = 1; part < kSplit; ++part) {
#pragma unroll
      for (int i = 0; i < kRegisters / 4; ++i) {
        const uint4 v = of_warp.sums[part - 1][i][lane];
        r[4 * i] = sum(r[4 * i], v.x), r[4 * i + 1] = sum(r[4 * i + 1], v.y);
        r[4 * i + 2] = sum(r[4 * i + 2], v.z), r[4 * i + 3] = sum(r[4 * i + 3], v.w);
      }
    }
    __syncwarp();
    if (leader)
      for (int part = 1; part < kSplit; ++part) ptx::arrive_at(&of_warp.empty, member.rank + part * kGroup);
    return true;
  }
  // `out` as a map of boxes of one warp's part, and as rows out_stride apart: either serves.
  template <typename Shared>
  __device__ __forceinline__ void write(Shared& shared, const Tiles& tiles, int64 m, int64 n, const TensorMap& out_map,
                                        Out* out, int64 out_stride) {
    const uint32 sums = shared.tensor_memory + (warp << 21);
    const bool   wide = (uint64(out) | out_stride * sizeof(Out)) % 32 == 0;
    uint32 buffer = 0;
    for (uint32 tile = tiles.first; tile < tiles.count(); tile += tiles.step, images.advance()) {
      const uint2  at   = tiles.place(tile);
      const uint32 left = at.x + 32 * warp;
      ptx::mbarrier_wait(&shared.sums_full[images.barrier()], images.parity);
      ptx::tensor_memory_after();
#pragma unroll 1
      for (int i = 0; i < kParts; ++i) {
        const uint32 part = kOverlap && images.image == 0 ? kParts - 1 - i : i, right = at.y + part * kPartN;
        uint32 r[kRegisters];
        load(r, sums + images.column() + part * kPartN);
        if (i == (kOverlap ? 0 : kParts - 1)) release(shared);
        if constexpr (kSplit > 1)
          if (!add_up(handed_of(shared, warp), r, tiles.member)) continue;
        if constexpr (kTmaStore) {
          const uint32 staged = ptx::shared_address(shared.out[warp][buffer]);
          const uint32 row = kSwapAb ? right : left, col = kSwapAb ? left : right;
          if (leader) ptx::tma_store_wait<1>();  // the store before the last has read this buffer
          __syncwarp();
          stage(staged, r);
          ptx::fence_proxy_async();
          __syncwarp();
          if (leader) {
            if (row < m && col < n) ptx::tma_store(out_map, col, row, staged);
            ptx::tma_store_commit();
          }
          buffer ^= 1;
        } else if (left + lane < m) {
          store(out + (left + lane) * out_stride + right, n - right, wide, r);
        }
      }
    }
    if (kTmaStore && leader) ptx::tma_store_wait<0>();
  }
};

// ---- shared memory ---------------------------------------------------------
constexpr int kProducts   = 4;                                 // of a step
constexpr int kAtoms      = kFormat == Format::kNvfp4 ? 4 : 2; // of scales, along a step
constexpr int kAtomBytes  = 512;                               // 128 rows by four scales
constexpr int kRightAtoms = kTileN > 128 ? 2 : 1;              // along the right rows
constexpr int kRightStep  = kRightAtoms * 4;                   // columns of tensor memory
constexpr int kRightRows  = kTileN / kCtas;                    // of a CTA

struct alignas(1024) Shared {  // the 128-byte swizzle repeats every 1024 bytes
  uint8   left[kStages][128 * 128];
  uint8   right[kStages][kRightRows * 128];
  uint8   out[kTmaStore ? kWriters : 1][2][kTmaStore ? kPartBytes : 64];
  uint8   left_scales[kStages][kAtoms * kAtomBytes];
  uint8   right_scales[kStages][kRightAtoms * kAtoms * kAtomBytes];
  Barrier full[kStages], empty[kStages], sums_full[kSumsBarriers], sums_empty[kSumsBarriers];
  uint32  tensor_memory;
};
static_assert(sizeof(Shared) + kHandedBytes == 214080, "the launch counts on it");
constexpr uint32 kStageBytes = sizeof(Shared::left[0]) + sizeof(Shared::right[0])
                               + sizeof(Shared::left_scales[0]) + sizeof(Shared::right_scales[0]);

// ---- copies ----------------------------------------------------------------
constexpr uint32 kScaleWords = kAtoms * kAtomBytes / 8;

struct Copies {
  LeftShare left, left_scales;
  RightShare right;
  RightScaleShare right_scales;
};

__device__ __forceinline__ void produce(Shared& shared, const Tiles& tiles, const Copies& copies, uint32 steps) {
  const bool   first = tiles.member.cta() == 0;
  const uint32 end   = tiles.member.end(steps);
  Ring<kStages> ring;
  for (uint32 tile = tiles.first; tile < tiles.count(); tile += tiles.step) {
    const uint2 at = tiles.place(tile);
    for (uint32 step = tiles.member.begin(steps); step < end; ++step, ring.advance()) {
      const uint32 slot = ring.slot;
      Barrier*     full = &shared.full[slot];
      if (kPrefetch && step + kStages < end) {
        const uint32 ahead = step + kStages;
        copies.left.prefetch(ahead * 128, at.x);
        copies.right.prefetch(ahead * 128, at.y);
        copies.left_scales.prefetch(ahead * kScaleWords, at.x / 128);
        copies.right_scales.prefetch(ahead * kScaleWords, at.y / 128);
      }
      ptx::mbarrier_wait(&shared.empty[slot], ring.parity ^ 1);
      if (first) ptx::mbarrier_arrive_expect_tx(full, kCtas * kStageBytes);
      copies.left.load(shared.left[slot], step * 128, at.x, full);
      copies.right.load(shared.right[slot], step * 128, at.y, full);
      copies.left_scales.load(shared.left_scales[slot], step * kScaleWords, at.x / 128, full);
      copies.right_scales.load(shared.right_scales[slot], step * kScaleWords, at.y / 128, full);
    }
  }
  drain(shared.empty, ring);
}

// ---- products --------------------------------------------------------------
// The instruction descriptor: E2M1 times E2M1, the type of the scales, the size of the tile, and which half of a word
// of scales is taken.
__device__ __forceinline__ constexpr uint32 form(int half) {
  return 1u << 7 | 1u << 10 | uint32(kTileN / 8) << 17 | uint32(kFormat == Format::kMxfp4) << 23
         | uint32(kTileM / 128) << 27 | uint32(2 * half) << 4 | uint32(2 * half) << 29;
}

__device__ __forceinline__ void multiply(Shared& shared, const Tiles& tiles, uint32 steps, uint32 products) {
  constexpr int kProductsOfAtom = kProducts / kAtoms;
  const uint32 memory = shared.tensor_memory, left_scales = memory + kScaleColumn;
  const uint32 right_scales = left_scales + kAtoms * 4;
  const uint32 begin = tiles.member.begin(steps), end = tiles.member.end(steps);
  Ring<kStages> ring;
  Images images;
  for (uint32 tile = tiles.first; tile < tiles.count(); tile += tiles.step, images.advance()) {
    const uint32 skip = tiles.place(tile).y % 128 / 32;  // scales come by 128 rows, and a tile may begin within them
    const uint32 sums = memory + images.column();
    if constexpr (kCtas == 1) ptx::mbarrier_wait(&shared.sums_empty[images.barrier()], images.parity ^ 1);
    if constexpr (kCtas == 2) ptx::mbarrier_wait_cluster(&shared.sums_empty[images.barrier()], images.parity ^ 1);
    for (uint32 step = begin; step < end; ++step, ring.advance()) {
      const uint32 left = ptx::shared_address(shared.left[ring.slot]);
      const uint32 right = ptx::shared_address(shared.right[ring.slot]);
      const uint32 from_left = ptx::shared_address(shared.left_scales[ring.slot]);
      const uint32 from_right = ptx::shared_address(shared.right_scales[ring.slot]);
      ptx::mbarrier_wait(&shared.full[ring.slot], ring.parity);
      ptx::tensor_memory_after();
#pragma unroll
      for (int i = 0; i < kAtoms; ++i) {
        ptx::copy_scales(left_scales + 4 * i, from_left + i * kAtomBytes);
#pragma unroll
        for (int j = 0; j < kRightAtoms; ++j)
          ptx::copy_scales(right_scales + kRightStep * i + 4 * j, from_right + (j * kAtoms + i) * kAtomBytes);
      }
#pragma unroll
      for (int i = 0; i < kProducts; ++i) {
        const int atom = i / kProductsOfAtom, half = i % kProductsOfAtom;
        if (step * kProducts + i < products)
          ptx::multiply(sums, ptx::operand(left + 32 * i), ptx::operand(right + 32 * i), form(half),
                        left_scales + 4 * atom, right_scales + kRightStep * atom + skip, step > begin || i > 0);
      }
      ptx::commit(&shared.empty[ring.slot], tiles.member.copiers());
    }
    ptx::commit(&shared.sums_full[images.barrier()], tiles.member.of_tile());
  }
}

// ---- kernel ----------------------------------------------------------------
constexpr int kProductWarp = kWriters, kCopyWarp = kWriters + 1, kThreads = 32 * (kWriters + 2);
static_assert(kThreads == 192, "the launch counts on it");

extern "C" __global__ void __launch_bounds__(kThreads, 1) gemm_blockscaled(
    const __grid_constant__ TensorMap left,          // [rows, k / 2] bytes; boxes are a CTA's part of what CTAs share
    const __grid_constant__ TensorMap right,         // likewise
    const __grid_constant__ TensorMap left_scales,   // [rows / 128, 64 words for each 4 columns of scales], likewise
    const __grid_constant__ TensorMap right_scales,  // likewise
    const __grid_constant__ TensorMap out_map,       // [m, n], boxes [32, 64] or with kSwapAb [kPartN, 32]
    const float* __restrict__ alpha,                 // [1]; null: 1
    Out* __restrict__ out,                           // [m, n]
    int64 m,
    int64 n,                                         // a multiple of 8
    int64 k,                                         // a multiple of 64
    int64 out_stride                                 // elements
) {
  extern __shared__ uint8 shared_bytes[];
  Shared& shared = *reinterpret_cast<Shared*>(shared_bytes);
  const uint32 warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;

  if (warp == kCopyWarp && ptx::elect_one()) {
    ptx::prefetch_tensor_map(left);
    ptx::prefetch_tensor_map(right);
    ptx::prefetch_tensor_map(left_scales);
    ptx::prefetch_tensor_map(right_scales);
    init_ring(shared.full, shared.empty, kReleases);
    init_sums(shared);
    ptx::fence_mbarrier_init();
  }
  if (warp == kProductWarp) {
    ptx::tensor_memory_alloc(&shared.tensor_memory);
    ptx::tensor_memory_before();
  }
  meet();
  ptx::tensor_memory_after();
  ptx::griddep_launch();

  const Tiles  tiles(m, n);
  const uint32 steps = ceil_div(k, 256);
  if (warp == kCopyWarp) {
    ptx::griddep_wait();
    const Copies copies{left_share(left, tiles.member), left_scales_share<kScaleWords>(left_scales, tiles.member),
                        right_share(right, tiles.member),
                        right_scales_share<kRightAtoms, kScaleWords>(right_scales, tiles.member)};
    if (ptx::elect_one()) produce(shared, tiles, copies, steps);
  } else if (warp == kProductWarp) {
    if (tiles.member.cta() == 0 && ptx::elect_one()) multiply(shared, tiles, steps, ceil_div(k, 64));
  } else {
    ptx::griddep_wait();
    Writer writer{warp, lane, alpha != nullptr ? ptx::ld_f32(alpha) : 1.0f, ptx::elect_one(), {}};
    writer.write(shared, tiles, m, n, out_map, out, out_stride);
  }
  meet();  // tensor memory is no longer read
  if (warp == kProductWarp) ptx::tensor_memory_free(shared.tensor_memory);
}

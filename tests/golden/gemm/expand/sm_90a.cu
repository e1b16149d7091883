// gemm_expand, generated from templates/gemm/expand.cu.j2
// spec: {"a_layout":"layout_128x4","dtype":"f16","format":"nvfp4","tile_m":8}
//
// x [m, steps of 128 columns] = a [m, k], FP4 with block scales, as 16-bit floats, in the order of columns in which
// gemm/wide_fp4 takes them. Columns from k on are zero.
//
// A CTA takes kTileM rows by kSteps steps. Eight lanes take a step of a row: four for each half step, which write 16
// bytes each of its first and of its second 32 columns.

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

// ---- partials/bf16x2 -------------------------------------------------------
namespace ptx {
// A fused multiply-add of -0, because sm_80 has no mul.bf16x2.
__device__ __forceinline__ uint32 mul_bf16x2(uint32 a, uint32 b) {
  uint32 d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(kPairSigns));
  return d;
}
}  // namespace ptx

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

// ---- gemm/codes ------------------------------------------------------------
// Codes and scales as the quantizers pack them become pairs of 16-bit floats, exactly: NVFP4 in fp16, times 2^-7; MXFP4
// in bf16, which has the range of its scales. The columns of a product may be in any order that is the same for both
// operands. So a word of eight codes becomes pairs of codes i and i + 4; and of the eight blocks of 16 columns of a
// step, lane t of four has block 4 (t / 2) + t % 2 in the first half step, and the block two after it in the second.
template <typename T> constexpr float kCodesUnit       = 0x1p7f;
template <>           constexpr float kCodesUnit<bf16> = 1.0f;

// As sign, last bits of the exponent and first bit of the mantissa, a code is its value times 2^-14 or 2^-126.
// attention/codes has another form in fp16, with a product in place of the shifts of `even`.
template <typename T> __device__ void unpack_codes(uint32 (&pairs)[4], uint32 word);
template <> __device__ __forceinline__ void unpack_codes<f16>(uint32 (&pairs)[4], uint32 word) {
  constexpr uint32 kSigns = 0x80808080u, kBits = 0x8E008E00u;
  const uint32 even = ptx::select_bits(kSigns, word << 4, word << 1), odd = ptx::select_bits(kSigns, word, word >> 3);
  pairs[0] = even << 8 & kBits, pairs[1] = odd << 8 & kBits, pairs[2] = even & kBits, pairs[3] = odd & kBits;
}
// Scales may be any power of two, so a product of its own makes up for 2^-126.
template <> __device__ __forceinline__ void unpack_codes<bf16>(uint32 (&pairs)[4], uint32 word) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    pairs[i] = ptx::mul_bf16x2(e2m1_pair_of<bf16>(word, i), 0x7E807E80u);
  }
}

// Two bytes of scales to a pair; the sign of E4M3 is ignored.
template <typename T> __device__ uint32 unpack_scales(uint32 two);
template <> __device__ __forceinline__ uint32 unpack_scales<f16>(uint32 two) {  // times 2^7
  return ptx::mul_f16x2(decode_e4m3x2(two & 0x7F7Fu), 0x58005800u);
}
template <> __device__ __forceinline__ uint32 unpack_scales<bf16>(uint32 two) {
  uint32 pair = 0;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32 byte = two >> 8 * i & 255;
    pair |= (byte == 0 ? 0x0040u : byte == 255 ? 0x7FC0u : byte << 7) << 16 * i;
  }
  return pair;
}

// ---- spec ------------------------------------------------------------------
using Out = f16;
constexpr Format   kFormat = Format::kNvfp4;
constexpr SfLayout kLayout = SfLayout::k128x4;
constexpr int kTileM = 8;
constexpr int kSteps = 4;

// ---- kernel ----------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(256) gemm_expand(
    const uint8* __restrict__ a,       // [m, k / 2]
    const uint8* __restrict__ scales,  // in kLayout
    Out* __restrict__ x,               // [m, round_up(k, 128)]
    int64 m,
    int64 k,                           // a multiple of 32
    int64 a_stride,                    // bytes
    int64 x_stride                     // elements
) {
  constexpr int kBlock = block_of(kFormat);
  const int64  row  = int64(blockIdx.x) * kTileM + threadIdx.y;
  const uint32 step = blockIdx.y * kSteps + threadIdx.x / 8, half = threadIdx.x / 4 % 2, pair = threadIdx.x % 4;
  ptx::griddep_wait();
  ptx::griddep_launch();  // not before: the next kernel reads the other operand at once
  if (row >= m || int64(step) * kTileCols >= k) return;

  const uint32 padded_cols = sf_padded_cols<kLayout>(uint32(k / kBlock));
  uint32 to[2][4];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32 column = step * kTileCols + i * 64 + half * 32;  // of two blocks of 16 columns
    uint4  codes = {0, 0, 0, 0};
    uint32 two   = 0;
    if (column < k) {
      codes = ptx::ld<uint4>(a + row * a_stride + column / 2);
      const uint8* at = scales + sf_offset<kLayout>(uint32(row), column / kBlock, padded_cols);
      two = kFormat == Format::kNvfp4 ? ptx::ld<uint16>(at) : ptx::ld<uint8>(at) * 0x0101u;
    }
    const uint32 words[4] = {codes.x, codes.y, codes.z, codes.w};
    uint32 pairs[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      uint32 all[4];
      unpack_codes<Out>(all, words[j] >> 4 * pair);
      pairs[j] = all[0];
    }
    uint32 first[2] = {pairs[0], pairs[1]}, second[2] = {pairs[2], pairs[3]};
    mul_pairs<Out>(first, second, unpack_scales<Out>(two));
#pragma unroll
    for (int j = 0; j < 2; ++j) to[j][2 * i] = first[j], to[j][2 * i + 1] = second[j];
  }
  Out* x_row = x + row * x_stride + int64(step) * kTileCols + half * 64 + pair * 8;
#pragma unroll
  for (int j = 0; j < 2; ++j) ptx::st(x_row + j * 32, {to[j][0], to[j][1], to[j][2], to[j][3]});
}

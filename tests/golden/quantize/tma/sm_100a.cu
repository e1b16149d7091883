// quantize_tma, generated from templates/quantize/tma.cu.j2
// spec: {"blocks_per_thread":2,"ctas_per_sm":1,"in_dtype":"bf16","sf_layout":"layout_128x4","stages":6}
//
// CTAs are persistent. In each, a producer warp keeps kStages tiles of x in flight through the copy engine (TMA); each
// of the consumer warps quantizes the blocks of kBlocksPerThread sectors of block scales in each tile. A tile is wide
// rather than high, so that its rows are long runs of memory: 4 sectors high in the swizzled layouts, 16 (which are 16
// rows) in the linear one.

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

// ---- partials/arch ---------------------------------------------------------
// sm_100a
constexpr bool kHasXorsign = true;  // min, max with .xorsign.abs: from sm_86 on
constexpr bool kHasE4m3Cvt = true;
constexpr bool kHasE2m1Cvt = true;
constexpr bool kHasLd256   = true && __CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__ >= 1209;  // PTX 8.8
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

// ---- spec ------------------------------------------------------------------
using In = bf16;
constexpr SfLayout kSfLayout        = SfLayout::k128x4;
constexpr int      kStages          = 6;
constexpr int      kBlocksPerThread = 2;

// ---- kernel ----------------------------------------------------------------
using Sf = Sector<kSfLayout>;
constexpr int kConsumers  = 16;  // warps
constexpr int kThreads    = (kConsumers + 1) * kWarp;
constexpr int kHigh       = kSfLayout == SfLayout::kLinear ? 16 : 4;       // sectors in a column of a tile
constexpr int kWarpStep   = kConsumers / kHigh * Sf::kCols;                // blocks from a warp's sector to its next
constexpr int kTileCols   = kWarpStep * kBlocksPerThread;                  // in blocks
// A box of a copy has rows of 128 bytes. In 128x4, a box has 8 neighbouring rows, and there is one for each of the four
// outer rows of a tile of scales.
constexpr int kBoxCols    = 128 / (kNvfp4Block * sizeof(In));
constexpr int kBoxRows    = kSfLayout == SfLayout::k128x4 ? 8 : kHigh * Sf::kRows;
constexpr int kOuter      = SfTile<kSfLayout>::kOuter;
constexpr int kBoxBytes   = kBoxRows * 128, kColBytes = kOuter * kBoxBytes;
constexpr int kTileBytes  = kTileCols / kBoxCols * kColBytes;

static_assert(kBoxRows == 8 && kBoxCols * kNvfp4Block == 64, "boxes of the tensor map");

struct alignas(1024) Shared {  // the 128-byte swizzle repeats every 1024 bytes
  uint8   tile[kStages][kTileBytes];
  Barrier full[kStages], empty[kStages];
};
static_assert(sizeof(Shared) == 197632, "the launch counts on it");

// Which tile a CTA works on, and in which stage of the ring.
struct Cursor {
  uint32 col_tiles, row_tile, col_tile, row_step, col_step, stage = 0, parity = 0;
  __device__ __forceinline__ explicit Cursor(uint32 col_tiles)
      : col_tiles(col_tiles), row_tile(blockIdx.x / col_tiles), col_tile(blockIdx.x % col_tiles),
        row_step(gridDim.x / col_tiles), col_step(gridDim.x % col_tiles) {}
  __device__ __forceinline__ void advance() {
    row_tile += row_step, col_tile += col_step;
    if (col_tile >= col_tiles) ++row_tile, col_tile -= col_tiles;
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
};

extern "C" __global__ void __launch_bounds__(kThreads, 1) quantize_tma(
    const __grid_constant__ TensorMap x,     // [m, k]
    const float* __restrict__ global_scale,  // [1], encode
    uint8* __restrict__ q,                   // [m, k/2], low nibble first
    uint8* __restrict__ sf,                  // block scales in kSfLayout
    int64 m,
    int64 k) {
  extern __shared__ uint8 shared_bytes[];
  Shared& shared = *reinterpret_cast<Shared*>(shared_bytes);
  const uint32 warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const uint32 rows = uint32(m), cols = uint32(uint64(k) / kNvfp4Block), sf_cols = sf_padded_cols<kSfLayout>(cols);
  const uint32 row_tiles = (sf_padded_rows<kSfLayout>(rows) / Sf::kRows + kHigh - 1) / kHigh;

  if (threadIdx.x == 0) {
    ptx::prefetch_tensor_map(x);
    for (int s = 0; s < kStages; ++s) {
      ptx::mbarrier_init(&shared.full[s], 1);
      ptx::mbarrier_init(&shared.empty[s], kConsumers);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  ptx::griddep_wait();
  ptx::griddep_launch();

  Cursor at((cols + kTileCols - 1) / kTileCols);
  if (warp == kConsumers) {
    if (!ptx::elect_one()) return;
    for (; at.row_tile < row_tiles; at.advance()) {
      ptx::mbarrier_wait(&shared.empty[at.stage], at.parity ^ 1);
      ptx::mbarrier_arrive_expect_tx(&shared.full[at.stage], kTileBytes);
      const uint32 row = Sf::row(at.row_tile * kHigh, 0), col = at.col_tile * (kTileCols * kNvfp4Block);
      uint8* to = shared.tile[at.stage];
      for (int i = 0; i < kTileCols / kBoxCols; ++i) {
#pragma unroll
        for (int outer = 0; outer < kOuter; ++outer, to += kBoxBytes)
          ptx::tma_load(to, x, col + i * (128 / sizeof(In)), row + outer * 32, &shared.full[at.stage]);
      }
    }
    return;
  }

  // The byte of its sector that a lane computes: in 128x4, eight lanes must read rows of both parities to avoid bank
  // conflicts.
  const uint32 byte = kSfLayout == SfLayout::k128x4 ? lane % 4 + lane / 8 * 4 + lane / 4 % 2 * 16 : lane;
  const uint32 high = warp % kHigh, wide = warp / kHigh * Sf::kCols + byte % Sf::kCols;  // of a lane's first block
  const uint32 inner = Sf::row(high, byte) % kBoxRows, outer = kOuter == 1 ? 0 : Sf::row(0, byte) / 32;
  const uint32 from = wide / kBoxCols * kColBytes + outer * kBoxBytes;
  const uint32 chunk[2] = {from + swizzle_128(inner, wide % kBoxCols * 2),
                           from + swizzle_128(inner, wide % kBoxCols * 2 + 1)};

  const float g = ptx::ld_f32(global_scale);
  for (; at.row_tile < row_tiles; at.advance()) {
    uint32 block[kBlocksPerThread][8];
    ptx::mbarrier_wait(&shared.full[at.stage], at.parity);
    const uint8* tile = shared.tile[at.stage];
#pragma unroll
    for (int i = 0; i < kBlocksPerThread; ++i) {
      const uint4 lo = *reinterpret_cast<const uint4*>(tile + i * (kWarpStep / kBoxCols) * kColBytes + chunk[0]);
      const uint4 hi = *reinterpret_cast<const uint4*>(tile + i * (kWarpStep / kBoxCols) * kColBytes + chunk[1]);
      block[i][0] = lo.x, block[i][1] = lo.y, block[i][2] = lo.z, block[i][3] = lo.w;
      block[i][4] = hi.x, block[i][5] = hi.y, block[i][6] = hi.z, block[i][7] = hi.w;
    }
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(&shared.empty[at.stage]);

    const uint32 sector = at.row_tile * kHigh + high, row = Sf::row(sector, byte), col = at.col_tile * kTileCols + wide;
    uint8* to_q  = q + (int64(row) * cols + col) * (kNvfp4Block / 2);
    uint8* to_sf = sf + Sf::offset(sector, col - byte % Sf::kCols, sf_cols) + byte;
    const uint32 data_left  = row < rows && col < cols ? cols - col : 0;
    const uint32 scale_left = row < sf_padded_rows<kSfLayout>(rows) && col < sf_cols ? sf_cols - col : 0;
#pragma unroll
    for (int i = 0; i < kBlocksPerThread; ++i) {
      const bool  has_data = i * kWarpStep < data_left;
      const uint8 b        = encode_e4m3(block_amax<In>(block[i]) * nvfp4_sixth(g));
      const uint2 codes    = encode_block<In>(block[i], nvfp4_multiplier(b, g));
      if (has_data) *reinterpret_cast<uint2*>(to_q + i * kWarpStep * (kNvfp4Block / 2)) = codes;
      if (i * kWarpStep < scale_left) to_sf[i * (kWarpStep / Sf::kCols) * Sf::kStride] = has_data ? b : uint8(0);
    }
  }
}

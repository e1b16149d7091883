// step_decode, generated from templates/step/decode.cu.j2
// spec: {"bias":false,"ctas":128,"depth":5,"dtype":"bf16","head_norms":false,"heads":32,"hidden_chunks":32,"inter_chunks":112,"interleaved":false,"kv_heads":8,"splits":16}
//
// All layers of a dense model for one token of one request: RMSNorm, queries, keys and values, their rotation, the
// append to an NVFP4 cache, attention, its product with the residual, RMSNorm, SwiGLU, and the last product.
//
// A CTA stays on its SM for the whole step. It has a share of the rows of each weight, and its warps share the columns,
// 128 at a time. A warp's pieces of all weights, two blocks of 16 rows, pass through a ring of its own, layer after
// layer, so memory keeps streaming while warps wait for values. What a CTA computes, others read as words of a pair of
// values and a tag, the number of the layer in all launches: a word is written and read as one, a reader polls until
// the tag is the one that it wants, and there are no barriers between CTAs. Words of a layer take the place of those of
// the layer before, which everybody has read by then: each product needs all outputs of the product before it.
//
//   down (or x) -> h -> qkv -> queries, keys, values -> attention: parts of a KV head -> merged -> o -> h2 -> gate and
//   up -> act -> down

// ---- spec ------------------------------------------------------------------
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

using T = bf16;
struct Config {
  using T = ::T;
  static constexpr int kCtas = 128, kSplits = 16;  // CTAs; those that share a KV head
  static constexpr int kDepth = 5;  // of a warp's ring, in pieces
  static constexpr int kHeads = 32, kKvHeads = 8, kGroup = kHeads / kKvHeads;
  static constexpr int kQ = kHeads * 128, kQkv = kQ + 2 * kKvHeads * 128;
  static constexpr int kHidden = 32 * 128, kInter = 112 * 128;
  static constexpr bool kHasBias = false;  // of queries, keys and values
  static constexpr bool kHasHeadNorms = false;
  static constexpr bool kInterleaved = false;  // scales of values, of four tokens
};

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

// ---- partials/arch ---------------------------------------------------------
// sm_90a
constexpr bool kHasXorsign = true;  // min, max with .xorsign.abs: from sm_86 on
constexpr bool kHasE4m3Cvt = true;
constexpr bool kHasE2m1Cvt = false;
constexpr bool kHasLd256   = false && __CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__ >= 1209;  // PTX 8.8
constexpr bool kHasPdl     = true;

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

// ---- attention/tile_rows ---------------------------------------------------
// A lane reads words of rows of a tile in shared memory.
template <int kWords> __device__ __forceinline__ void ld_words(const uint8* p, uint32 (&w)[kWords]) {
  if constexpr (kWords == 1) w[0] = *reinterpret_cast<const uint32*>(p);
  if constexpr (kWords == 2) {
    const uint2 v = *reinterpret_cast<const uint2*>(p);
    w[0] = v.x, w[1] = v.y;
  }
  if constexpr (kWords == 4) {
    const uint4 v = *reinterpret_cast<const uint4*>(p);
    w[0] = v.x, w[1] = v.y, w[2] = v.z, w[3] = v.w;
  }
}

// kWords words of a row; `place` is the offset of the first chunk.
template <int kWords>
__device__ __forceinline__ void ld_row(const uint8* tile, int place, uint32 (&w)[kWords]) {
  if constexpr (kWords <= 4) {
    ld_words<kWords>(tile + place, w);
  } else {
#pragma unroll
    for (int i = 0; i < kWords; i += 4) {
      uint32 four[4];
      ld_words<4>(tile + (place ^ i * 4), four);
#pragma unroll
      for (int j = 0; j < 4; ++j) w[i + j] = four[j];
    }
  }
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

// ---- attention/nvfp4_tile --------------------------------------------------
// Twice the low, or the high, half of a pair. This form costs no instruction: the multiplication selects the half.
__device__ __forceinline__ uint32 low_twice(uint32 pair) {
  uint32 d;
  asm("{\n"
      "  .reg .b16 lo, hi;\n"
      "  mov.b32 {lo, hi}, %1;\n"
      "  mov.b32 %0, {lo, lo};\n"
      "}" : "=r"(d) : "r"(pair));
  return d;
}
__device__ __forceinline__ uint32 high_twice(uint32 pair) {
  uint32 d;
  asm("{\n"
      "  .reg .b16 lo, hi;\n"
      "  mov.b32 {lo, hi}, %1;\n"
      "  mov.b32 %0, {hi, hi};\n"
      "}" : "=r"(d) : "r"(pair));
  return d;
}

// Fragments of an NVFP4 tile. The left factor of a product is 16 x 16: K with tokens as rows, or V with dimensions as
// rows. The right factor has query rows as its eight columns. Products need no order of dimensions, if both factors
// have the same: lane c of a row of K takes kWidth / 4 neighbouring dimensions, lane g of V takes kWidth / 8, and
// queries and outputs use the same order.
//
// Software makes the bits of a code sign, last exponent bits and first mantissa bit of a float16, which is then 2^-14
// of its value. The product with a block scale is exact: where it is small, it is a subnormal float16. Where hardware
// converts, it is the value itself.
template <class Layout> struct Nvfp4Tile {
  using Query   = typename Layout::Query;
  using Queries = typename Layout::Queries;
  static constexpr int  kHeadDim = Layout::kHeadDim, kWidth = Layout::kWidth, kBlocks = Layout::kBlocks;
  static constexpr int  kSteps = Layout::kSteps, kStageRow = Layout::kStageRow, kValuesAt = Layout::kValuesAt;
  static constexpr int  kScaleBytes = Layout::kScaleBytes, kStageScales = Layout::kStageScales;
  static constexpr int  kScalesAt = Layout::kScalesAt, kVScalesAt = Layout::kVScalesAt;
  static constexpr int  kVScalesRow = Layout::kVScalesRow;
  static constexpr bool kInterleaved = Layout::kInterleaved;

  using Mma = f16;
  static constexpr float kKeyUnit   = kHasE2m1Cvt ? 1.0f : 0x1p-14f;  // the number that stands for 1 in fragments of K
  static constexpr float kValueUnit = kKeyUnit;
  static constexpr int   kKeyWords   = kWidth / 32;  // words of codes that a lane has of a row of K
  static constexpr int   kValueWords = kWidth / 64;  // and of a row of V
  static constexpr int   kValueBlocks = (kValueWords + 1) / 2;  // and of its scales

  // Which of the 8 dimensions of a word of K goes to half `half` of register r in step 2 w + j, for word w.
  __device__ __forceinline__ static constexpr int word_dim(int j, int r, int half) {
    return kHasE2m1Cvt ? 4 * j + 2 * r + half : 2 * j + r + 4 * half;
  }
  // Loads what a lane needs of a query row for steps 2 w and 2 w + 1.
  template <int kRegs>
  __device__ __forceinline__ static void ld_query(const Query* row, int w, int c, uint32 (&x)[kRegs]) {
    if (kHeadDim < kWidth && c * (kWidth / 4) + 8 * w >= kHeadDim) return;
    ld_halves<2 * kRegs>(row + c * (kWidth / 4) + 8 * w, x);
  }
  // Returns the dimension of row g, or of row g + 8, the upper one, of the outputs of step m.
  __device__ __forceinline__ static int value_dim(int m, bool upper, int g) { return g * (kWidth / 8) + 2 * m + upper; }

  // V's scales are then loaded as K's, two neighbouring blocks of a token, and transposed to two tokens of a block.
  static constexpr bool kTransposed = !kInterleaved && kStageScales == 8;

  // The offsets in a stage of what a lane reads.
  struct Lane {
    int key, key_scale;    // of row g; row g + 8 is 8 rows further
    int value[2];          // of tokens 2 c and 2 c + 1, likewise
    int value_scale;       // of token 2 c; of token g where they are transposed

    __device__ __forceinline__ Lane() {
      const int g = threadIdx.x % kWarp / 4, c = threadIdx.x % 4;
      const int k = c * (kWidth / 8), v = g * (kWidth / 16);
      int block = g * (kWidth / 8) / 16;
      if (kHeadDim < kWidth) block = min(block, kScaleBytes - kValueBlocks);  // behind a row: any
      key       = Layout::opaque(Layout::place(g, k / 16) + k % 16);
      key_scale = Layout::opaque(kScalesAt + g * kStageScales + c * (kStageScales / 4));
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        value[i] = Layout::opaque(kValuesAt + Layout::place(2 * c + i, v / 16) + v % 16);
      }
      const int own = kInterleaved ? c / 2 * 4 * kVScalesRow + block * 4 + c % 2 * 2 : 2 * c * kStageScales + block;
      value_scale = kTransposed ? key_scale + kVScalesAt - kScalesAt : Layout::opaque(kVScalesAt + own);
    }
  };

  // Sets s to K q for the 16 tokens from `first` on.
  __device__ __forceinline__ static void scores(
      const uint8* stage, int first, const Lane& lane, const Queries& q, float (&s)[kBlocks][4]) {
    uint32 codes[2][kKeyWords], scale[2][kKeyWords / 2];  // both halves have the scale of one block
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      ld_row(stage + (first + 8 * i) * kStageRow, lane.key, codes[i]);
      const uint8* scales = stage + lane.key_scale + (first + 8 * i) * kStageScales;
      if constexpr (kStageScales == 4) scale[i][0] = low_twice(decode_e4m3x2(*scales));
      if constexpr (kStageScales > 4) {
#pragma unroll
        for (int j = 0; j < kStageScales / 4; j += 2) {
          const uint32 two = decode_e4m3x2(*reinterpret_cast<const uint16*>(scales + j));
          scale[i][j]     = low_twice(two);
          scale[i][j + 1] = high_twice(two);
        }
      }
    }
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0.0f;
#pragma unroll
    for (int w = 0; w < kKeyWords; ++w) {
      uint32 low[4], high[4];
      decode(codes[0][w], low);
      decode(codes[1][w], high);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const uint32 a[4] = {
            ptx::mul_f16x2(low[2 * j], scale[0][w / 2]), ptx::mul_f16x2(high[2 * j], scale[1][w / 2]),
            ptx::mul_f16x2(low[2 * j + 1], scale[0][w / 2]), ptx::mul_f16x2(high[2 * j + 1], scale[1][w / 2])};
#pragma unroll
        for (int n = 0; n < kBlocks; ++n) {
          ptx::mma_half<Mma>(s[n], a, q.words[n][2 * w + j][0], q.words[n][2 * w + j][1]);
        }
      }
    }
  }

  // Decodes a word of each of two tokens: pair i has dimension i of both.
  __device__ __forceinline__ static void interleave(uint32 a, uint32 b, uint32 (&pairs)[8]) {
    uint32 half[2][4];
    if constexpr (kHasE2m1Cvt) {
      ptx::cvt_f16x2_e2m1x8(ptx::select_bits(0x0F0F0F0Fu, a, b << 4), half[0]);
      ptx::cvt_f16x2_e2m1x8(ptx::select_bits(0x0F0F0F0Fu, a >> 4, b), half[1]);
    } else {
      decode(__byte_perm(a, b, 0x5410), half[0]);
      decode(__byte_perm(a, b, 0x7632), half[1]);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) pairs[i] = kHasE2m1Cvt ? half[i % 2][i / 2] : half[i / 4][i % 4];
  }

  // V of 16 tokens, as codes and scales. It is loaded before the weights are known.
  struct Values {
    uint32 codes[4][kValueWords];  // of tokens 2 c, 2 c + 1, 2 c + 8, 2 c + 9
    uint32 scales[2][kValueBlocks];

    __device__ __forceinline__ Values(const uint8* stage, int first, const Lane& lane) {
#pragma unroll
      for (int i = 0; i < 4; ++i) ld_row(stage + (first + i / 2 * 8) * kStageRow, lane.value[i % 2], codes[i]);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int b = 0; b < kValueBlocks; ++b) {
          const uint8* at = stage + lane.value_scale + (first + i * 8) * kVScalesRow + b * (kInterleaved ? 4 : 1);
          if constexpr (kInterleaved || kTransposed) scales[i][b] = *reinterpret_cast<const uint16*>(at);
          else scales[i][b] = at[0] | at[kStageScales] << 8;
        }
      }
    }

    // Interleaved scales of tokens without a bit in `present` become 0. Linear ones are 0 already, by their copy.
    __device__ __forceinline__ void hide_absent(uint32 present) {
      present >>= 2 * (threadIdx.x % 4);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int b = 0; b < kValueBlocks && kInterleaved; ++b) {
          scales[i][b] &= (present >> 8 * i & 1 ? 0xFFu : 0u) | (present >> 8 * i & 2 ? 0xFF00u : 0u);
        }
      }
    }

    // Decodes the scales of this lane's block for two tokens.
    static __device__ __forceinline__ uint32 decode_two(uint32 scales) {
      const uint32 pair = decode_e4m3x2(scales);
      return kTransposed ? ptx::transpose(pair) : pair;
    }

    // Adds V p to o.
    __device__ __forceinline__ void multiply(const uint32 (&p)[kBlocks][2], float (&o)[kBlocks][kSteps][4]) const {
#pragma unroll
      for (int w = 0; w < kValueWords; ++w) {
        const uint32 scale0 = decode_two(scales[0][w / 2]), scale1 = decode_two(scales[1][w / 2]);
        uint32 first[8], second[8];
        interleave(codes[0][w], codes[1][w], first);
        interleave(codes[2][w], codes[3][w], second);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const uint32 a[4] = {ptx::mul_f16x2(first[2 * j], scale0), ptx::mul_f16x2(first[2 * j + 1], scale0),
                               ptx::mul_f16x2(second[2 * j], scale1), ptx::mul_f16x2(second[2 * j + 1], scale1)};
#pragma unroll
          for (int n = 0; n < kBlocks; ++n) ptx::mma_half<Mma>(o[n][4 * w + j], a, p[n][0], p[n][1]);
        }
      }
    }
  };
};

// ---- step/attention --------------------------------------------------------
// Attention of one query token over the NVFP4 pages of a request, one KV head and a share of the pages in a CTA.
namespace attention {
constexpr int kHeadDim = 128, kPage = 64, kSteps = kHeadDim / 16;
constexpr int kRowBytes = kHeadDim / 2, kScaleBytes = kHeadDim / 16, kPageBytes = kPage * kRowBytes;
constexpr float kNone = -1e30f;

// Where a tile has what Nvfp4Tile reads: in a page of keys or of values, whose scales follow its codes.
template <bool kInterleavedScales> struct PageLayout {
  using Query = f16;
  static constexpr int kHeadDim = attention::kHeadDim, kWidth = kHeadDim, kBlocks = 1, kSteps = attention::kSteps;
  static constexpr int kStageRow = kRowBytes, kScaleBytes = attention::kScaleBytes, kStageScales = kScaleBytes;
  static constexpr int kValuesAt = 0, kScalesAt = kPageBytes, kVScalesAt = kScalesAt, kVScalesRow = kScaleBytes;
  static constexpr bool kInterleaved = kInterleavedScales;
  struct Queries { uint32 words[kBlocks][kSteps][2]; };
  __device__ __forceinline__ static int place(int row, int vector) { return row * kRowBytes + vector * 16; }
  __device__ __forceinline__ static int opaque(int x) { return x; }  // registers are few: it may be computed again
};

template <class Tile> struct State {
  using Lane = typename Tile::Lane;

  float reference[2] = {kNone, kNone}, sum[2] = {}, o[1][kSteps][4] = {};

  // The weights of 16 tokens, of which lane `number` has g and g + 8, and of which the first `count` exist.
  __device__ __forceinline__ void weigh(
      const uint8* key, int first, const Lane& lane, const typename Tile::Queries& q, const float (&scale)[2],
      int count, int number, uint32 (&weights)[1][2]) {
    const bool has = number / 4 < count, has_next = number / 4 + 8 < count;
    float x[1][4], p[4];
    Tile::scores(key, first, lane, q, x);
#pragma unroll
    for (int i = 0; i < 4; ++i) x[0][i] = (i < 2 ? has : has_next) ? x[0][i] * scale[i % 2] : kNone;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float top = fmaxf(x[0][i], x[0][i + 2]);
#pragma unroll
      for (int distance = 4; distance < kWarp; distance *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, distance));
      top = fmaxf(top, reference[i]);
      const float factor = ptx::ex2_approx(reference[i] - top);
      reference[i] = top, sum[i] *= factor;
#pragma unroll
      for (int m = 0; m < kSteps; ++m) o[0][m][i] *= factor, o[0][m][i + 2] *= factor;
      p[i] = ptx::ex2_approx(x[0][i] - top), p[i + 2] = ptx::ex2_approx(x[0][i + 2] - top);
      sum[i] += p[i] + p[i + 2];
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) weights[0][i] = ptx::transpose(to_pair<typename Tile::Mma>(p[2 * i], p[2 * i + 1]));
  }
};

// What a lane reads of 16 tokens of a page, in registers: a page without the rest, in which all lanes are the same.
template <class Tile> struct OwnPage {
  using Lane = typename Tile::Lane;
  static constexpr int kScalesAt = Tile::kScalesAt;
  static constexpr int kNext = 8 * kRowBytes, kNextScale = 8 * kScaleBytes;  // from a row to the eighth after it
  alignas(16) uint8 bytes[kScalesAt + kNextScale + 2];

  static __device__ __forceinline__ Lane lane() {
    Lane at;
    at.key = 0, at.key_scale = at.value_scale = kScalesAt, at.value[0] = 0, at.value[1] = kRowBytes;
    return at;
  }
  // Loads tokens from `first` on of page number `page` of a pool.
  template <bool kValues>
  __device__ __forceinline__ void load(const uint8* codes, const uint8* scales, int64 page, int first, const Lane& at) {
    codes += page * kPageBytes + first * kRowBytes;
    scales += page * (kPage * kScaleBytes) + first * kScaleBytes;
    scales += (kValues ? at.value_scale : at.key_scale) - kScalesAt;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint8* const row = codes + i * kNext;
      if constexpr (kValues) {
        copy<uint2>(i * kNext, row + at.value[0]);
        copy<uint2>(i * kNext + kRowBytes, row + at.value[1]);
      } else {
        copy<uint4>(i * kNext, row + at.key);
      }
      copy<uint16>(kScalesAt + i * kNextScale, scales + i * kNextScale);
    }
  }

 private:
  template <class Access> __device__ __forceinline__ void copy(int to, const uint8* from) {
    *reinterpret_cast<Access*>(bytes + to) = *reinterpret_cast<const Access*>(from);
  }
};

// Takes the scales of tokens behind the first `count`, which may be anything.
template <class Tile> __device__ __forceinline__ void clear(typename Tile::Values& v, int count, int number) {
  if constexpr (Tile::kTransposed) {
    if (number / 4 >= count) v.scales[0][0] = 0;
    if (number / 4 + 8 >= count) v.scales[1][0] = 0;
  } else {
    v.hide_absent(count < 16 ? (1u << max(count, 0)) - 1 : ~0u);
  }
}

// Rotates a pair of dimensions by the cosines and sines of dimensions n and n + 1, of the first half.
template <typename T>
__device__ __forceinline__ uint32 rotate(uint32 pair, uint32 other, const float* cos_sin, int n, bool second) {
  const float2 c = *reinterpret_cast<const float2*>(cos_sin + n);
  const float2 d = *reinterpret_cast<const float2*>(cos_sin + kHeadDim / 2 + n);
  const float a = low<T>(pair) * c.x, b = high<T>(pair) * c.y;
  const float e = low<T>(other) * d.x, f = high<T>(other) * d.y;
  return second ? to_pair<T>(a + e, b + f) : to_pair<T>(a - e, b - f);
}
}  // namespace attention

// ---- partials/fence_proxy --------------------------------------------------
namespace ptx {
// Makes this thread's writes to shared memory visible to the copy engine and to the tensor cores.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
}  // namespace ptx

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

// ---- partials/st_shared_8 --------------------------------------------------
namespace ptx {
// Stores 8 bytes to shared memory, by address.
__device__ __forceinline__ void st_shared_8(uint32 p, uint32 a, uint32 b) {
  asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(p), "r"(a), "r"(b) : "memory");
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

// ---- gemm/copies -----------------------------------------------------------
// Copies to shared memory, and loads from it.
namespace ptx {
// For data that is read once: L2 evicts it first. The bytes count towards the barrier.
__device__ __forceinline__ void bulk_load_once(void* to, const void* from, uint32 bytes, Barrier* b) {
  constexpr uint64 policy = 0x12F0000000000000u;  // createpolicy.fractional.L2::evict_first, 1.0
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
               " [%0], [%1], %2, [%3], %4;"
               ::"r"(shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(b)), "l"(policy) : "memory");
}
__device__ __forceinline__ uint2 ld_shared_8(uint32 p) {
  uint2 v;
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(p) : "memory");
  return v;
}
__device__ __forceinline__ uint32 ld_shared_4(uint32 p) {
  uint32 v;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(v) : "r"(p) : "memory");
  return v;
}
// Loads from shared memory of the CTA `rank`, at the address that `p` has in this CTA.
__device__ __forceinline__ float4 ld_cluster(const float* p, uint32 rank) {
  float4 v;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(cluster_address(p, rank)) : "memory");
  return v;
}
}  // namespace ptx

// ---- partials/format -------------------------------------------------------
enum class Format { kNvfp4, kMxfp4 };
// Elements that share a scale.
__host__ __device__ constexpr int block_of(Format format) { return format == Format::kNvfp4 ? 16 : 32; }

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

// ---- step/piece ------------------------------------------------------------
// Products of a piece of a weight with one vector. A piece is two blocks of 16 rows by 128 columns: the codes of both,
// then their scales.
constexpr int kBlockBytes = 1024, kBlockScaleBytes = 128, kPieceBytes = 2 * (kBlockBytes + kBlockScaleBytes);

// What the vector is multiplied by before it is rounded to T: bf16 codes are subnormal, and an fp16 vector in front of
// its norm (kRaw) may be large. kUnit of the sums is what stands for 1.
template <typename T, bool kRaw> struct Vector {
  static constexpr float kUnit = kIsBf16<T> ? 0x1p32f : kRaw ? 0x1p-4f : 1.0f;
};

__device__ __forceinline__ uint32 word_at(const uint4& v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

// Adds products to sums of rows g and g + 8 of kCount blocks. There is one column to multiply by, and the tensor cores
// take eight: columns 2 j and 2 j + 1 have the values of x for steps 2 j and 2 j + 1, 32 of the 128, and zeros
// elsewhere. So a lane gets sums of codes for its own two steps, and multiplies those by its scales, instead of all
// weights. `zeros` is the address of 16 bytes of them.
template <typename T, int kCount>
__device__ __forceinline__ void multiply(float (&sums)[2][2], uint32 piece, uint32 x, uint32 zeros, int lane) {
  const uint32 codes = piece + lane * 16, scales = piece + 2 * kBlockBytes + lane * 4, mine = x + lane % 4 * 16;
  float  d[kCount][2][4] = {};
  uint32 f[kCount];
  uint4  w[2][kCount], v[4];
#pragma unroll
  for (int b = 0; b < kCount; ++b) {
    w[0][b] = ptx::ld_shared(codes + b * kBlockBytes);
    w[1][b] = ptx::ld_shared(codes + b * kBlockBytes + 512);
    f[b]    = ptx::ld_shared_4(scales + b * kBlockScaleBytes);
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) v[j] = ptx::ld_shared(lane / 8 == j ? mine + j * 64 : zeros);
#pragma unroll
  for (int j = 0; j < 4; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int b = 0; b < kCount; ++b) {
        uint32 a[4];
        decode_codes<T>(a, word_at(w[j / 2][b], j % 2 * 2 + i));
        ptx::mma_half<T>(d[b][i], a, i ? v[j].z : v[j].x, i ? v[j].w : v[j].y);
      }
    }
  }
#pragma unroll
  for (int b = 0; b < kCount; ++b) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32 scale = decode_scales<T>(f[b], i == 1);
      sums[b][0] = fmaf(d[b][i][0], low<T>(scale), sums[b][0]);
      sums[b][1] = fmaf(d[b][i][2], high<T>(scale), sums[b][1]);
    }
  }
}
// Of the four lanes that have parts of the same rows: lane t gets the sum of row 8 t + g.
__device__ __forceinline__ float gather(const float (&sums)[2][2], int lane) {
  const bool odd = lane % 2 != 0, second = lane / 2 % 2 != 0;
  float kept[2];
#pragma unroll
  for (int b = 0; b < 2; ++b) {
    kept[b] = odd ? sums[b][1] : sums[b][0];
    kept[b] += __shfl_xor_sync(~0u, odd ? sums[b][0] : sums[b][1], 1);
  }
  return (second ? kept[1] : kept[0]) + __shfl_xor_sync(~0u, second ? kept[0] : kept[1], 2);
}

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

// ---- partials/st_relaxed ---------------------------------------------------
namespace ptx {
// For words that other CTAs poll.
__device__ __forceinline__ void st_relaxed(uint32* p, uint32 v) {
  asm volatile("st.relaxed.gpu.global.b32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
}  // namespace ptx

// ---- step/words ------------------------------------------------------------
// What CTAs tell each other: a word is a pair of values, or a float, and a tag, the number of what it belongs to. It is
// written and read as one, so a reader polls until the tag is the one that it wants.
namespace ptx {
__device__ __forceinline__ void st_word(uint64* p, uint32 value, uint32 tag) {
  asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" ::"l"(p), "l"(uint64(tag) << 32 | value) : "memory");
}
__device__ __forceinline__ void ld_words(uint64 (&v)[2], const uint64* p) {
  asm volatile("ld.relaxed.gpu.global.v2.b64 {%0, %1}, [%2];" : "=l"(v[0]), "=l"(v[1]) : "l"(p) : "memory");
}
__device__ __forceinline__ void trap() { asm volatile("trap;"); }
}  // namespace ptx

constexpr uint32 kMostPolls = 1u << 24;  // then something is wrong, and a trap ends the launch

__device__ __forceinline__ bool tagged(uint64 word, uint32 tag) { return uint32(word >> 32) == tag; }

__device__ __forceinline__ uint32 wait_word(const uint64* from, uint32 tag) {
  uint64 v;
  uint32 polls = 0;
  do {
    v = ptx::ld_relaxed_8(from);
    if (++polls == kMostPolls) ptx::trap();
  } while (!tagged(v, tag));
  return uint32(v);
}
// Two words of each lane of a warp. The first look was earlier.
__device__ __forceinline__ void wait_words(uint64 (&v)[2], const uint64* from, uint32 tag) {
  uint32 polls = 0;
  while (!__all_sync(~0u, tagged(v[0], tag) && tagged(v[1], tag))) {
    ptx::ld_words(v, from);
    if (++polls == kMostPolls) ptx::trap();
  }
}

// A vector of 16-bit values as words, 128 of it in 64: those that a lane multiplies by follow each other. This is where
// the word of columns n and n + 1 lies.
constexpr int kChunk = 128, kChunkWords = kChunk / 2;
__device__ __forceinline__ int word_of_column(int n) {
  const int pair = n % kChunk / 2, step = pair / 8, t = pair % 4, j = pair / 4 % 2;
  return n / kChunk * kChunkWords + (step / 2 * 8 + t * 2 + step % 2) * 2 + j;
}
// The first column of word 0 of a lane, eight before that of word 1.
__device__ __forceinline__ int column_of_lane(int lane) { return (lane / 8 * 2 + lane % 2) * 16 + lane / 2 % 4 * 2; }

// ---- step/stream -----------------------------------------------------------
// The weights of all layers, as a CTA reads them. It has a share of the rows of each product, and its warps share the
// columns, 128 at a time. C is the kernel's Config: its sizes.
enum Product { kQkvProduct, kOProduct, kGateUp, kDown, kProducts };
constexpr int kWarps = 16, kThreads = kWarps * kWarp;
constexpr int kTileBytes = kBlocks * (kBlockBytes + kBlockScaleBytes);

__device__ __forceinline__ constexpr int larger(int a, int b) { return a > b ? a : b; }

template <class C> struct Shares {
  static __device__ __forceinline__ constexpr int blocks_of(int product) {
    return (product == kQkvProduct ? C::kQkv : product == kGateUp ? 2 * C::kInter : C::kHidden) / 16;
  }
  static __device__ __forceinline__ constexpr int chunks_of(int product) {
    return (product == kOProduct ? C::kQ : product == kDown ? C::kInter : C::kHidden) / kChunk;
  }
  static __device__ __forceinline__ constexpr int tiles_of(int product) {
    return int(ceil_div(blocks_of(product), kBlocks)) * chunks_of(product);
  }
  static __device__ __forceinline__ int first_block(int product, int cta) {
    return blocks_of(product) * cta / C::kCtas;
  }
  // Two blocks of 16 rows at a time; one where a tile begins or ends between them.
  static __device__ __forceinline__ int blocks_at(int at, int last) { return at % 2 != 0 || at + 1 == last ? 1 : 2; }

  static constexpr int   kMostChunks = larger(larger(C::kInter, C::kQ), C::kHidden) / kChunk;
  static constexpr int   kOwn = int(ceil_div(blocks_of(kDown), C::kCtas)) * 16;  // rows of a CTA
  static constexpr int   kWide = int(ceil_div(larger(blocks_of(kGateUp), blocks_of(kQkvProduct)), C::kCtas)) * 16;
  static constexpr int64 kLayerBytes =
      int64(tiles_of(kQkvProduct) + tiles_of(kOProduct) + tiles_of(kGateUp) + tiles_of(kDown)) * kTileBytes;

  // Whether warps have all columns of a product for their rows at once, so that none of the vector is kept for others.
  static __device__ __forceinline__ constexpr bool at_once(int product) {
    return blocks_of(product) % C::kCtas == 0 && blocks_of(product) / C::kCtas <= 2;
  }
  static __device__ __forceinline__ constexpr int kept(int product) {
    return at_once(product) ? 1 : int(ceil_div(chunks_of(product), kWarps));
  }
  static constexpr bool kWhole = C::kHidden % (kWarps * kChunk) == 0 && C::kQ % (kWarps * kChunk) == 0
                                 && C::kInter % (kWarps * kChunk) == 0;  // each warp has columns in every turn
  static constexpr int kKept = larger(larger(kept(kQkvProduct), kept(kOProduct)), larger(kept(kGateUp), kept(kDown)));

  // The pieces of a CTA in a layer, one of 128 columns for each warp, in the order of their use. Of each, a word has
  // whether there are two blocks, the number of the first in its tile, how many warps have columns, less one, and the
  // number of the first warp's tile in its layer; the others' follow.
  static __device__ __forceinline__ int plan(uint32* to) {
    int count = 0, tiles = 0;
    for (int product = 0; product < kProducts; ++product) {
      const int first = first_block(product, blockIdx.x), last = first_block(product, blockIdx.x + 1);
      const int chunks = chunks_of(product);
      for (int at = first, blocks; at < last; at += blocks) {
        blocks = blocks_at(at, last);
        for (int chunk = 0; chunk < chunks; chunk += kWarps) {
          to[count++] = (blocks - 1) | at % kBlocks << 1 | (min(chunks - chunk, kWarps) - 1) << 3
                          | (tiles + at / kBlocks * chunks + chunk) << 7;
        }
      }
      tiles += tiles_of(product);
    }
    return count;
  }
};

// A warp's pieces pass through a ring of its own, layer after layer, so memory keeps streaming while warps wait.
template <class C> struct Stream {
  const uint8*  weights;  // of the layer of the piece that is loaded next
  const uint32* plan;
  int pieces, layers, warp;
  uint8 (*slots)[kPieceBytes];
  Barrier* full;
  int next = -1, layer = 0;
  Ring<C::kDepth> ring;

  __device__ __forceinline__ void start() {
    if (warp >= Shares<C>::kMostChunks) return;  // it has no columns of any product
    advance();
#pragma unroll 1
    for (int i = 0; i < C::kDepth; ++i) load(i);
  }
  __device__ __forceinline__ void advance() {
    do {
      if (++next == pieces) next = 0, ++layer, weights += Shares<C>::kLayerBytes;
    } while (!Shares<C>::kWhole && warp > int(plan[next] >> 3 & 15));
  }
  __device__ __forceinline__ void load(int slot) {
    if (layer >= layers) return;
    const uint32 planned = plan[next], block = planned >> 1 & 3, blocks = (planned & 1) + 1;
    const uint8* const tile = weights + uint64((planned >> 7) + warp) * kTileBytes;
    if (ptx::elect_one()) {
      uint8* const to = slots[slot];
      ptx::mbarrier_arrive_expect_tx(full + slot, blocks * (kBlockBytes + kBlockScaleBytes));
      ptx::bulk_load_once(to, tile + block * kBlockBytes, blocks * kBlockBytes, full + slot);
      ptx::bulk_load_once(to + 2 * kBlockBytes, tile + kCodeBytes + block * kBlockScaleBytes,
                          blocks * kBlockScaleBytes, full + slot);
    }
    advance();
  }
  // The address of the piece that is used next.
  __device__ __forceinline__ uint32 wait() const {
    ptx::mbarrier_wait(full + ring.slot, ring.parity);
    return ptx::shared_address(slots[ring.slot]);
  }
  // The warp has read it: its place takes another one.
  __device__ __forceinline__ void release() {
    __syncwarp();
    load(ring.slot);
    ring.advance();
  }
};

// ---- step/products ---------------------------------------------------------
// The products of a layer, with what stands in front of them and behind. Of a norm in front, the weight is applied to
// the vector, and the factor to the sums: squares are added up while the product runs.

// What all layers share.
template <typename T> struct Model {
  const T *norms, *head_norms, *biases;
  const float* alphas;
  int   layers;
  float eps;
};
constexpr int kAlphas = 7;  // of queries, keys, values, o, gates, ups, down

// The words of each product's inputs and outputs, and of attention's parts.
struct Words { uint64 *h, *qkv, *att, *h2, *act, *parts; };

// Shared has x and zeros, sums of the warps in `wide` and `rows`, of squares in `squares`, and `own`, this CTA's share
// of hidden values.
template <class C, class Shared> struct Products {
  using T = typename C::T;
  using Share = Shares<C>;
  Shared& s;
  const Words& words;
  const Model<T>& model;
  T* const out;
  const int warp, lane;

  static __device__ __forceinline__ bool has_norm(int product) { return product == kQkvProduct || product == kGateUp; }
  static __device__ __forceinline__ float unit_of(int product) {
    return has_norm(product) ? Vector<T, true>::kUnit : Vector<T, false>::kUnit;
  }
  static __device__ __forceinline__ int alpha_of(int product, int row) {
    if (product == kQkvProduct) return row < C::kQ ? 0 : row < (C::kQ + C::kQkv) / 2 ? 1 : 2;
    return product == kOProduct ? 3 : product == kDown ? 6 : 4 + row / 8 % 2;
  }

  __device__ __forceinline__ void run(Stream<C>& stream, int product, int layer, uint32 tag) {
    const bool norm = has_norm(product);
    const int  chunks = Share::chunks_of(product), first = Share::first_block(product, blockIdx.x);
    const int  last = Share::first_block(product, blockIdx.x + 1), count = (last - first) * 16;
    const int  row = min(warp * kWarp + lane, count - 1);
    const uint64* const from = (product == kQkvProduct ? words.h : product == kOProduct ? words.att
                                : product == kGateUp ? words.h2 : words.act) + lane * 2;
    const T* const by = model.norms + (2 * layer + (product == kGateUp)) * C::kHidden + column_of_lane(lane);
    const float alpha = ptx::ld_f32(model.alphas + layer * kAlphas + alpha_of(product, first * 16 + row));
    const float unit = unit_of(product);
    float bias = 0.0f;
    if (C::kHasBias && product == kQkvProduct) {
      bias = low<T>(ptx::ld<uint16>(model.biases + layer * C::kQkv + first * 16 + row));
    }
    float* const rows = norm ? s.wide.rows[warp] : s.rows[warp];
    const uint32 x = ptx::shared_address(s.x[warp]), zeros = ptx::shared_address(&s.zeros);
    float  squares = 0.0f;
    uint64 v[2];
    uint32 w[2];
    const auto look = [&](int chunk) {
      if (chunk >= chunks) return;
      ptx::ld_words(v, from + chunk * kChunkWords);
      if (!norm) return;
      w[0] = ptx::ld<uint32>(by + chunk * kChunk);
      w[1] = ptx::ld<uint32>(by + chunk * kChunk + 8);
    };
    look(warp);
#pragma unroll 1
    for (int at = first; at < last; at += Share::blocks_at(at, last)) {
      const int blocks = Share::blocks_at(at, last);
      float  sums[2][2] = {};
      uint32 to = x;
#pragma unroll 1
      for (int chunk = warp; chunk < chunks; chunk += kWarps) {
        if (at == first) {
          wait_words(v, from + chunk * kChunkWords, tag);
          uint32 pairs[2];
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            float a = low<T>(uint32(v[j])), b = high<T>(uint32(v[j]));
            if (norm) {
              squares = fmaf(a, a, squares), squares = fmaf(b, b, squares);
              a *= low<T>(w[j]), b *= high<T>(w[j]);
            }
            pairs[j] = to_pair<T>(a * unit, b * unit);
          }
          ptx::st_shared_8(to + lane * 8, pairs[0], pairs[1]);
          __syncwarp();
          look(chunk + kWarps);
        }
        const uint32 piece = stream.wait();
        if (blocks == 2) multiply<T, 2>(sums, piece, to, zeros, lane);
        else multiply<T, 1>(sums, piece, to, zeros, lane);
        stream.release();
        to += kChunk * 2;
        if (to == x + Share::kKept * kChunk * 2) to = x;
      }
      const float sum = gather(sums, lane);
      if (lane % 4 < 2 * blocks) rows[(at - first) * 16 + lane % 4 * 8 + lane / 4] = sum;
    }
    if (norm) {
#pragma unroll
      for (int distance = 1; distance < kWarp; distance *= 2) squares += __shfl_xor_sync(~0u, squares, distance);
      if (lane == 0) s.squares[product / 2][warp] = squares;
    }
    __syncthreads();
    if (warp * kWarp < count) {
      const bool is_last = layer + 1 == model.layers;
      finish(product, first * 16, row, warp * kWarp + lane < count, alpha / unit, bias, tag, is_last);
    }
  }

  // Adds up the sums of the warps for a row.
  __device__ __forceinline__ void finish(int product, int first, int row, bool has, float alpha, float bias, uint32 tag,
                                         bool is_last) {
    const bool norm = has_norm(product);
    const int  pitch = norm ? Share::kWide : Share::kOwn;
    const float* at = (norm ? s.wide.rows[0] : s.rows[0]) + row;
    float four[4] = {}, squares = 0.0f;
#pragma unroll
    for (int i = 0; i < kWarps; ++i, at += pitch) four[i % 4] += *at;
    float y = ((four[0] + four[1]) + (four[2] + four[3])) * kWeightUnit * alpha;
    if (norm) {
#pragma unroll
      for (int i = 0; i < kWarps; ++i) squares += s.squares[product / 2][i];
      y = fmaf(y, rsqrtf(squares * (1.0f / float(C::kHidden)) + model.eps), bias);
    }
    const int n = first + row;
    uint64* to = words.qkv;
    int  column = n;
    bool writes = has && n % 2 == 0;
    if (product == kGateUp) {
      const float up = __shfl_down_sync(~0u, y, 8);
      y = silu(y) * up;
      to = words.act, column = n / 16 * 8 + n % 8, writes = writes && n % 16 < 8;
    } else if (product != kQkvProduct) {
      to = product == kOProduct ? words.h2 : words.h;
      if (has) {
        y = low<T>(to_pair<T>(y, 0.0f)) + s.own[row];
        y = low<T>(to_pair<T>(y, 0.0f));
        s.own[row] = y;
      }
      if (product == kDown) ++tag;  // of the next layer
    }
    const uint32 pair = to_pair<T>(y, __shfl_down_sync(~0u, y, 1));
    if (writes) {
      ptx::st_word(to + word_of_column(column), pair, tag);
      if (product == kDown && is_last) *reinterpret_cast<uint32*>(out + n) = pair;
    }
  }
};

// ---- step/parts ------------------------------------------------------------
// Attention in a step: up to kSplits CTAs share the pages of a KV head, fewer where there are few pages. Each rotates
// the head's queries; the one with the newest page appends; each attends to its pages. All add up a share of the
// outputs, from the parts of those with pages. The last pages of a CTA come into shared memory while the product before
// runs: the newest is among them. Of the pages before those, each warp takes 16 tokens at a time into registers, and
// has the next on their way.
struct Request {
  uint8 *cache, *scales;
  const float* kv_scales;  // of each layer, those of keys and of values; null: all 1
  const int32* pages;
  int64 num_pages;  // of the cache of a layer
  int   tokens;     // with the new one
  float scale;      // of logits, with log2(e)
};

template <class C> struct Part {  // of a softmax
  alignas(16) float o[C::kGroup][attention::kHeadDim];
  float reference[C::kGroup], sum[C::kGroup];
};
constexpr int kParts = 8, kPages = kParts / 4;  // four warps share a page
static_assert(kWarps == 2 * kParts, "the upper warps put their parts where the lower ones take them");
constexpr int kKvBytes = attention::kPage * (attention::kRowBytes + attention::kScaleBytes);

// Shared has two pages of keys and of values, their barrier, queries, cosines and sines, and parts in `wide`.
template <class C, class Shared> struct Attention {
  using T = typename C::T;
  using Tile    = Nvfp4Tile<attention::PageLayout<C::kInterleaved>>;
  using State   = attention::State<Tile>;
  using OwnPage = attention::OwnPage<Tile>;
  static constexpr int kLine = C::kGroup * attention::kHeadDim;  // outputs of a KV head
  static constexpr int kPartWords = kLine + 2 * C::kGroup;
  static_assert(C::kSplits <= kWarp, "a lane has the sum of a part");
  Shared& s;
  const Words& words;
  const Model<T>& model;
  const Request request;
  const int warp, lane;
  const int head = int(blockIdx.x) / C::kSplits, share = int(blockIdx.x) % C::kSplits;
  uint32 parity = 0;

  // Whether this CTA has a KV head.
  static __device__ __forceinline__ bool has_head() { return blockIdx.x < C::kKvHeads * C::kSplits; }

  __device__ __forceinline__ int pages() const { return (request.tokens + attention::kPage - 1) / attention::kPage; }
  // Returns how many CTAs have pages of the head: they are the first ones.
  __device__ __forceinline__ int sharers() const { return min(C::kSplits, (pages() + kPages - 1) / kPages); }
  // The first page of this CTA, or of the one behind it.
  __device__ __forceinline__ int first_page(int behind) const {
    return pages() * min(share + behind, sharers()) / sharers();
  }
  // The number of a page of this KV head, of keys or of values, in the caches of all layers.
  __device__ __forceinline__ int64 page_of(int layer, int side, int i) const {
    const int64 page = min(ptx::ld<uint32>(request.pages + i), uint32(request.num_pages - 1));
    return ((2 * layer + side) * request.num_pages + page) * C::kKvHeads + head;
  }
  // The last of the pages from `first` to `last`, into shared memory.
  __device__ __forceinline__ void load_pages(int layer, int first, int last) {
    if (warp != 0 || first >= last) return;
    const int from = max(first, last - kPages), count = last - from;
    if (lane == 0) ptx::mbarrier_arrive_expect_tx(&s.pages, 2 * count * kKvBytes);
    __syncwarp();
    if (lane < 2 * count) {
      const int64 at = page_of(layer, lane % 2, from + lane / 2);
      uint8* const to = s.kv[lane / 2][lane % 2];
      constexpr int kCodes = attention::kPageBytes, kScales = kKvBytes - kCodes;
      ptx::bulk_load_once(to, request.cache + at * kCodes, kCodes, &s.pages);
      ptx::bulk_load_once(to + kCodes, request.scales + at * kScales, kScales, &s.pages);
    }
  }
  __device__ __forceinline__ float kv_scale(int layer, int side) const {
    return request.kv_scales == nullptr ? 1.0f : ptx::ld_f32(request.kv_scales + 2 * layer + side);
  }

  // Dimensions n and n + 1 of a query (side 0) or of the key (1), normed, where the model does, and rotated. A warp has
  // all dimensions of a head: these and the pair 64 further.
  __device__ __forceinline__ uint32 turned(int layer, int side, const uint64* from, int n, uint32 tag) const {
    using namespace attention;
    uint32 w[2];
    if constexpr (C::kHasHeadNorms) {
      const T* const by = model.head_norms + (2 * layer + side) * kHeadDim;
      w[0] = ptx::ld<uint32>(by + n), w[1] = ptx::ld<uint32>(by + (n ^ 64));
    }
    uint32 pairs[2] = {wait_word(from + word_of_column(n), tag), wait_word(from + word_of_column(n ^ 64), tag)};
    if constexpr (C::kHasHeadNorms) {
      __syncwarp();
      float squares = 0.0f;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        squares = fmaf(low<T>(pairs[i]), low<T>(pairs[i]), squares);
        squares = fmaf(high<T>(pairs[i]), high<T>(pairs[i]), squares);
      }
#pragma unroll
      for (int distance = 1; distance < kWarp; distance *= 2) squares += __shfl_xor_sync(~0u, squares, distance);
      const float factor = Rstd{float(kHeadDim), 1.0f / float(kHeadDim), model.eps}(squares);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        pairs[i] = to_pair<T>(low<T>(pairs[i]) * factor * low<T>(w[i]), high<T>(pairs[i]) * factor * high<T>(w[i]));
      }
    }
    return rotate<T>(pairs[0], pairs[1], s.cos_sin, n % 64, n >= 64);
  }
  // A thread: two dimensions of a query, which become float16.
  __device__ __forceinline__ void put_query(int i, int layer, uint32 tag) const {
    const int row = i / (attention::kHeadDim / 2), n = i % (attention::kHeadDim / 2) * 2;
    const uint32 y = turned(layer, 0, words.qkv + (head * C::kGroup + row) * kChunkWords, n, tag);
    const uint32 z = to_pair<f16>(low<T>(y), high<T>(y));
    uint16* const to = s.q[row] + n / 8 * 8 + n % 4 * 2 + n / 4 % 2;
    to[0] = uint16(z), to[2] = uint16(z >> 16);
  }
  // What a lane multiplies keys by.
  __device__ __forceinline__ typename Tile::Queries queries() const {
    typename Tile::Queries q;
    const uint32 at = ptx::shared_address(s.q[min(lane / 4, C::kGroup - 1)]) + lane % 4 * 64;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint4 v = ptx::ld_shared(at + i * 16);
      q.words[0][2 * i][0] = v.x, q.words[0][2 * i][1] = v.y;
      q.words[0][2 * i + 1][0] = v.z, q.words[0][2 * i + 1][1] = v.w;
    }
    return q;
  }
  // A thread: two dimensions of the key or the value of the new token, into the cache and into shared memory.
  __device__ __forceinline__ void append(int i, int layer, int page, uint32 tag) const {
    using namespace attention;
    const int side = i / (kHeadDim / 2), n = i % (kHeadDim / 2) * 2;
    const uint64* const from = words.qkv + (C::kHeads + side * C::kKvHeads + head) * kChunkWords;
    const float  decode = kv_scale(layer, side);
    const uint32 pair = side == 0 ? turned(layer, 1, from, n, tag) : wait_word(from + word_of_column(n), tag);
    float v[8] = {low<T>(pair), high<T>(pair)};
    float amax = fmaxf(fabsf(v[0]), fabsf(v[1]));
    __syncwarp();
#pragma unroll
    for (int distance = 1; distance < 8; distance *= 2) amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, distance));
    const uint8 b = encode_e4m3(amax * nvfp4_sixth(fminf(1.0f / decode, kFltMax)));
    const float by = fminf(1.0f / (decode_e4m3(b) * decode), kFltMax);
    v[0] *= by, v[1] *= by;
    const uint8 codes = uint8(e2m1x8(v));
    const int   row = (request.tokens - 1) % kPage;
    const int64 to  = page_of(layer, side, (request.tokens - 1) / kPage);
    (request.cache + to * kPageBytes)[row * kRowBytes + n / 2] = codes;
    s.kv[page][side][row * kRowBytes + n / 2] = codes;
    if (n % 16 == 0) {
      const int at = C::kInterleaved && side == 1 ? row / 4 * 4 * kScaleBytes + n / 16 * 4 + row % 4
                                               : row * kScaleBytes + n / 16;
      (request.scales + to * (kPage * kScaleBytes))[at] = b;
      s.kv[page][side][kPageBytes + at] = b;
    }
    ptx::fence_proxy_async();
  }

  __device__ __forceinline__ void put(State& state, Part<C>& part) const {
    using namespace attention;
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float sum = state.sum[i];
#pragma unroll
      for (int distance = 4; distance < kWarp; distance *= 2) sum += __shfl_xor_sync(~0u, sum, distance);
      const int row = 2 * t + i;
      if (row >= C::kGroup) continue;
      if (g == 0) part.reference[row] = state.reference[i], part.sum[row] = sum;
#pragma unroll
      for (int m = 0; m < kSteps; m += 2) {
        *reinterpret_cast<float4*>(&part.o[row][Tile::value_dim(m, false, g)]) = {
            state.o[0][m][i], state.o[0][m][i + 2], state.o[0][m + 1][i], state.o[0][m + 1][i + 2]};
      }
    }
  }

  // Adds the part of another warp to the state.
  __device__ __forceinline__ void take(State& state, const Part<C>& part) const {
    using namespace attention;
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = 2 * t + i;
      if (row >= C::kGroup) continue;
      const float top = fmaxf(state.reference[i], part.reference[row]);
      const float mine = ptx::ex2_approx(state.reference[i] - top), its = ptx::ex2_approx(part.reference[row] - top);
      state.reference[i] = top;
      state.sum[i] = fmaf(its, g == 0 ? part.sum[row] : 0.0f, mine * state.sum[i]);
#pragma unroll
      for (int m = 0; m < kSteps; m += 2) {
        const float4 o = *reinterpret_cast<const float4*>(&part.o[row][Tile::value_dim(m, false, g)]);
        state.o[0][m][i]     = fmaf(its, o.x, mine * state.o[0][m][i]);
        state.o[0][m][i + 2] = fmaf(its, o.y, mine * state.o[0][m][i + 2]);
        state.o[0][m + 1][i] = fmaf(its, o.z, mine * state.o[0][m + 1][i]);
        state.o[0][m + 1][i + 2] = fmaf(its, o.w, mine * state.o[0][m + 1][i + 2]);
      }
    }
    __syncwarp();
  }

  __device__ __forceinline__ void run(int layer, uint32 tag) {
    using namespace attention;
    const int tokens = request.tokens, first = first_page(0), last = first_page(1), from = max(first, last - kPages);
    const int used = min(kParts, (last - first) * 4);  // parts
    const int thread = warp * kWarp + lane;
    if (last > first) {
      State state;
      const typename Tile::Lane places;
      const int blocks = 4 * (from - first);  // that warps take from global memory
      const float factor = request.scale * kv_scale(layer, 0) / Tile::kKeyUnit, scale[2] = {factor, factor};
      for (int i = thread; i < kLine / 2; i += kThreads) put_query(i, layer, tag);
      ptx::mbarrier_wait(&s.pages, parity);
      parity ^= 1;
      const int newest = (tokens - 1) / kPage - from;
      if (newest < last - from && warp >= 8 && warp < 12) append(thread - 8 * kWarp, layer, newest, tag);
      __syncthreads();
      const int   begin = warp % 4 * 16;  // of a warp's tokens in each of its pages
      const int64 values = request.num_pages * C::kKvHeads;  // the page of values behind that of keys
      OwnPage k, v;
      const typename Tile::Lane own = OwnPage::lane();
      if (warp < blocks) {
        const int64 page = page_of(layer, 0, first + warp / 4);
        k.template load<false>(request.cache, request.scales, page, begin, places);
        v.template load<true>(request.cache, request.scales, page + values, begin, places);
      }
      uint32 weights[1][2];
      if (warp < used && from + warp / 4 < last) {
        const int count = tokens - (from + warp / 4) * kPage - begin;
        const uint8* const page = s.kv[warp / 4][0];
        state.weigh(page, begin, places, queries(), scale, count, lane, weights);
        typename Tile::Values value(page + kKvBytes, begin, places);
        clear<Tile>(value, count, lane);
        value.multiply(weights, state.o);
      }
#pragma unroll 1
      for (int i = warp; i < blocks; i += kWarps) {
        const bool  more = i + kWarps < blocks;
        const int64 page = more ? page_of(layer, 0, first + (i + kWarps) / 4) : 0;
        state.weigh(k.bytes, 0, own, queries(), scale, 16, lane, weights);
        if (more) k.template load<false>(request.cache, request.scales, page, begin, places);
        typename Tile::Values(v.bytes, 0, own).multiply(weights, state.o);
        if (more) v.template load<true>(request.cache, request.scales, page + values, begin, places);
      }
      if (blocks > 0) {
        if (warp >= kParts) put(state, s.wide.parts[warp - kParts]);
        __syncthreads();
        if (warp < kParts) take(state, s.wide.parts[warp]);
      }
      if (warp < used) put(state, s.wide.parts[warp]);
    }
    __syncthreads();
    if (layer + 1 < model.layers) load_pages(layer + 1, first, last);
    uint64* const parts = words.parts + int(blockIdx.x) * kPartWords;
#pragma unroll 1
    for (int i = thread; i < kLine && used > 0; i += kThreads) {
      const int row = i / kHeadDim, dim = i % kHeadDim;
      float top = kNone, sum = 0.0f, o = 0.0f;
#pragma unroll 1
      for (int w = 0; w < used; ++w) top = fmaxf(top, s.wide.parts[w].reference[row]);
#pragma unroll 2
      for (int w = 0; w < used; ++w) {
        const float f = ptx::ex2_approx(s.wide.parts[w].reference[row] - top);
        sum = fmaf(f, s.wide.parts[w].sum[row], sum), o = fmaf(f, s.wide.parts[w].o[row][dim], o);
      }
      ptx::st_word(parts + i, __float_as_uint(o), tag);
      if (dim == 0) {
        ptx::st_word(parts + kLine + row, __float_as_uint(top), tag);
        ptx::st_word(parts + kLine + C::kGroup + row, __float_as_uint(sum), tag);
      }
    }
    constexpr int kTurns = kLine / kWarp;
    const int turn = kTurns * share / C::kSplits + warp;
    if (turn < kTurns * (share + 1) / C::kSplits) merge(layer, tag, turn * kWarp + lane);
  }

  // A warp: 32 outputs of this CTA's KV head, from the parts of all CTAs that share it.
  __device__ __forceinline__ void merge(int layer, uint32 tag, int i) const {
    using namespace attention;
    const int row = i / kHeadDim;
    const float decode = kv_scale(layer, 1);
    const uint64* const from = words.parts + head * C::kSplits * kPartWords;
    const int count = sharers();
    const uint64* const sums = from + min(lane, count - 1) * kPartWords + kLine + row;
    uint64 o[C::kSplits], reference, sum;
    bool   all;
    uint32 polls = 0;
    do {
      reference = ptx::ld_relaxed_8(sums), sum = ptx::ld_relaxed_8(sums + C::kGroup);
#pragma unroll
      for (int j = 0; j < C::kSplits; ++j) {
        o[j] = uint64(tag) << 32;  // zero, where there is no part
        if (j < count) o[j] = ptx::ld_relaxed_8(from + j * kPartWords + i);
      }
      all = tagged(reference, tag) && tagged(sum, tag);
#pragma unroll
      for (int j = 0; j < C::kSplits; ++j) all = all && tagged(o[j], tag);
      if (++polls == kMostPolls) ptx::trap();
    } while (!__all_sync(~0u, all));
    float top = __uint_as_float(uint32(reference));
#pragma unroll
    for (int distance = 1; distance < kWarp; distance *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, distance));
    const float factor = ptx::ex2_approx(__uint_as_float(uint32(reference)) - top);
    float part = lane < count ? factor * __uint_as_float(uint32(sum)) : 0.0f, y = 0.0f;
#pragma unroll
    for (int distance = 1; distance < kWarp; distance *= 2) part += __shfl_xor_sync(~0u, part, distance);
#pragma unroll
    for (int j = 0; j < C::kSplits; ++j) y = fmaf(__shfl_sync(~0u, factor, j), __uint_as_float(uint32(o[j])), y);
    y *= decode / (Tile::kValueUnit * part);
    const float next = __shfl_down_sync(~0u, y, 1);
    if (lane % 2 == 0) ptx::st_word(words.att + word_of_column(head * kLine + i), to_pair<T>(y, next), tag);
  }
};

// ---- kernel ----------------------------------------------------------------
union Wide {  // sums of the warps, of products with many rows; or parts of a softmax
  float rows[kWarps][Shares<Config>::kWide];
  Part<Config> parts[kParts];
};
struct Shared {
  alignas(128) uint8 ring[kWarps][Config::kDepth][kPieceBytes];
  alignas(128) uint8 kv[kPages][2][kKvBytes];
  alignas(16) uint8 x[kWarps][Shares<Config>::kKept][kChunk * 2];
  uint4 zeros;
  alignas(16) uint16 q[Config::kGroup][attention::kHeadDim];
  Wide  wide;
  float rows[kWarps][Shares<Config>::kOwn];
  float squares[2][kWarps];
  float own[Shares<Config>::kOwn];
  alignas(16) float cos_sin[attention::kHeadDim];
  uint32 plan[38];
  int    pieces;
  Barrier full[kWarps][Config::kDepth], pages;
};
static_assert(sizeof(Shared) == 232320, "the launch counts on it");

extern "C" __global__ void __launch_bounds__(kThreads, 1) step_decode(
    const T* __restrict__ x,                // [1, hidden]
    const uint8* __restrict__ weights,      // [layers, bytes]: tiles of qkv, o, gate and up, down
    const T* __restrict__ norms,            // [layers, 2, hidden]
    const T* __restrict__ head_norms,       // [layers, 2, 128]: of queries and of keys; null
    const T* __restrict__ biases,           // [layers, rows of qkv]; null
    const float* __restrict__ alphas,       // [layers, 7]: of q, k, v, o, gate, up, down
    uint8* __restrict__ cache,              // [layers, 2, num_pages, kv_heads, 64, 64]
    uint8* __restrict__ cache_sf,           // [layers, 2, num_pages, kv_heads, 64, 8]
    const float* __restrict__ kv_scales,    // [layers, 2]; null: 1
    const int32* __restrict__ block_table,  // [table_pages]
    const int32* __restrict__ seq_len,      // [1], with the new token
    const int32* __restrict__ positions,    // [1]: the row of cos_sin; null: that of the last token
    const float* __restrict__ cos_sin,      // [max_position, 128]
    uint64* __restrict__ state,             // words of the CTAs; zeros before the first launch
    T* __restrict__ out,                    // [1, hidden]
    int64 layers,
    int64 num_pages,
    int64 table_pages,
    int64 max_position,
    float eps,
    float scale                             // of logits, times log2(e)

) {
  extern __shared__ __align__(128) uint8 dynamic[];
  Shared& s = *reinterpret_cast<Shared*>(dynamic);
  const int thread = threadIdx.x, warp = thread / kWarp, lane = thread % kWarp;
  if (lane == 0) {
    for (int i = 0; i < Config::kDepth; ++i) ptx::mbarrier_init(&s.full[warp][i], 1);
    if (warp == 0) ptx::mbarrier_init(&s.pages, 1), s.zeros = {};
    ptx::fence_mbarrier_init();
    if (warp == 0) s.pieces = Shares<Config>::plan(s.plan);
  }
  __syncthreads();
  Stream<Config> stream = {weights, s.plan, s.pieces, int(layers), warp, s.ring[warp], s.full[warp]};
  stream.start();
  if constexpr (kHasPdl) ptx::griddep_wait();
  Words words;
  uint32* const tags = reinterpret_cast<uint32*>(state);  // the last one of earlier launches
  words.h = state + 8, words.qkv = words.h + Config::kHidden / 2;
  words.att = words.qkv + Config::kQkv / 2, words.h2 = words.att + Config::kQ / 2;
  words.act = words.h2 + Config::kHidden / 2, words.parts = words.act + Config::kInter / 2;
  const Model<T> model = {norms, head_norms, biases, alphas, int(layers), eps};
  const int tokens = max(1, min(int32(ptx::ld<uint32>(seq_len)), int(table_pages) * attention::kPage));
  Products<Config, Shared> products = {s, words, model, out, warp, lane};
  Attention<Config, Shared> attends = {
      s, words, model, {cache, cache_sf, kv_scales, block_table, num_pages, tokens, scale}, warp, lane};
  if (attends.has_head()) attends.load_pages(0, attends.first_page(0), attends.first_page(1));
  const uint32 before = ptx::ld_relaxed_4(tags);
  const int first = Shares<Config>::first_block(kDown, blockIdx.x) * 16;
  const int last = Shares<Config>::first_block(kDown, blockIdx.x + 1) * 16;
  for (int i = thread; i < (last - first) / 2; i += kThreads) {
    const uint32 pair = ptx::ld<uint32>(x + first + 2 * i);
    s.own[2 * i] = low<T>(pair), s.own[2 * i + 1] = high<T>(pair);
    ptx::st_word(words.h + word_of_column(first + 2 * i), pair, before + 1);
  }
  const int64 position = positions == nullptr ? tokens - 1 : int32(ptx::ld<uint32>(positions));
  for (int i = thread; i < attention::kHeadDim; i += kThreads) {
    s.cos_sin[i] = uint64(position) < uint64(max_position) ? ptx::ld_f32(cos_sin + position * attention::kHeadDim + i)
                                                           : __uint_as_float(0x7FFFFFFFu);
  }
  __syncthreads();
#pragma unroll 1
  for (int layer = 0; layer < model.layers; ++layer) {
    const uint32 tag = before + 1 + layer;
#pragma unroll 1
    for (int product = 0; product < kProducts; ++product) {
      if (product == kOProduct && attends.has_head()) attends.run(layer, tag);
      products.run(stream, product, layer, tag);
    }
  }
  if constexpr (kHasPdl) ptx::griddep_launch();
  // All CTAs have read it: this one has read what they wrote.
  if (blockIdx.x == 0 && thread == 0) ptx::st_relaxed(tags, before + uint32(model.layers) + 1);
}

// kv_dequantize, generated from templates/kv/dequantize.cu.j2
// spec: {"lookup":"none","out_dtype":"bf16","tokens_per_thread":2}
//
// Dequantizes K and V of the sequences in a paged NVFP4 cache. A thread writes 16 bytes for each of kTokens tokens.
// Threads (w, h): a CTA is w chunks of a token by h times kTokens tokens. Grid: x over tokens, y over sequences,
// z over K and V and over a token's chunks.

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
using Out = bf16;
// kNone: there is one page, of one sequence. kThread: a thread looks up its first token, and the others are in the same
// page. kCta: the threads of a CTA look up its tokens together.
enum class Lookup { kNone, kThread, kCta };
constexpr Lookup kLookup = Lookup::kNone;
constexpr int    kTokens = 2;

// ---- kernel ----------------------------------------------------------------
constexpr int kChunk = 8;  // elements
extern __shared__ Place places[];  // of the CTA's tokens, with kCta
static_assert(sizeof(Place) == 8, "the launch reserves shared memory for them");

extern "C" __global__ void __launch_bounds__(256) kv_dequantize(
    const uint8* __restrict__ k_codes,      // [pages, tokens, heads, d/2], low nibble first
    const uint8* __restrict__ v_codes,
    const uint8* __restrict__ k_sf,         // [pages, tokens, heads, d/16], E4M3
    const uint8* __restrict__ v_sf,
    const float* __restrict__ k_scale,      // [1], decode
    const float* __restrict__ v_scale,
    Out* __restrict__ k_out,                // [sequences, max_tokens, heads, d]
    Out* __restrict__ v_out,
    const void* __restrict__ block_tables,  // [sequences, ...], pages, rows table_stride apart; list 0
    const void* __restrict__ seq_lens,      // [sequences]; list 1
    int64 sides,
    int64 max_tokens,
    int64 table_stride,
    int64 num_pages,
    int64 page_size,
    int64 heads,
    int64 cols,                             // block scales of a head
    int64 codes_page,                       // bytes from one to the next, in both sides
    int64 codes_token,
    int64 codes_head,
    int64 sf_page,
    int64 sf_token,
    int64 sf_head,
    int64 interleaved_side,                 // 0 for K, 1 for V, else neither
    int64 wide_lists                        // bit i: list i has entries of 8 bytes, not 4
) {
  const uint32 side  = blockIdx.z % uint32(sides), sequence = blockIdx.y;
  const uint32 chunk = blockIdx.z / uint32(sides) * blockDim.x + threadIdx.x;
  const uint32 head  = chunk / uint32(2 * cols), in_head = chunk % uint32(2 * cols);
  const uint32 row   = threadIdx.y * kTokens, cta_first = blockIdx.x * blockDim.y * kTokens, first = cta_first + row;

  const int64  width = heads * cols * (2 * kChunk);  // elements of a token
  const uint8* codes = (side ? v_codes : k_codes) + head * codes_head + in_head * (kChunk / 2);
  const uint8* sf    = (side ? v_sf : k_sf) + head * sf_head;
  Out*         out   = (side ? v_out : k_out) + (sequence * max_tokens + first) * width + chunk * kChunk;
  const Strides     codes_strides{uint32(codes_page), uint32(codes_token)};
  const Strides     sf_strides{uint32(sf_page), uint32(sf_token)};
  const ScaleColumn column(in_head / 2, uint32(cols), side == interleaved_side);
  if constexpr (kHasPdl) ptx::griddep_wait();

  const int64 tokens =
      kLookup == Lookup::kNone ? max_tokens : min(index_at(seq_lens, sequence, wide_lists & 2), max_tokens);
  const auto find = [&](uint32 token) -> Place {
    if (kLookup == Lookup::kNone) return {0, token};
    if (token >= max_tokens) return {};
    const int64 page = index_at(block_tables, sequence * table_stride + token / uint32(page_size), wide_lists & 1);
    return token < tokens && uint64(page) < num_pages ? Place{uint32(page), token % uint32(page_size)} : Place{};
  };
  if constexpr (kLookup == Lookup::kCta) {
    find_places(places, blockDim.y * kTokens, [&](uint32 i) { return find(cta_first + i); });
  }
  if (head >= heads) return;

  const Place start = kLookup == Lookup::kCta ? Place{} : find(first);
  uint32 word[kTokens] = {};
  uint8  b[kTokens]    = {};
  bool   found[kTokens];
#pragma unroll
  for (int i = 0; i < kTokens; ++i) {
    Place at{start.page, start.token + i};
    if constexpr (kLookup == Lookup::kCta) at = places[row + i];
    found[i] = kLookup == Lookup::kCta ? at.found() : start.found() && first + i < tokens;
    if (!found[i]) continue;
    word[i] = load_codes(codes + codes_strides.at(at));
    b[i]    = ptx::ld<uint8>(sf + column.at(at, sf_strides));
  }
  if constexpr (kHasPdl) ptx::griddep_launch();

  const float decode = ptx::ld_f32(side ? v_scale : k_scale);
#pragma unroll
  for (int i = 0; i < kTokens; ++i) {
    const float scale = decode_e4m3(b[i]) * decode;
    float v[kChunk];
    decode_e2m1x8(word[i], v);
    uint32 w[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) w[j] = to_pair<Out>(v[2 * j] * scale, v[2 * j + 1] * scale);
    if (found[i]) ptx::st(out + i * width, make_uint4(w[0], w[1], w[2], w[3]));
  }
}

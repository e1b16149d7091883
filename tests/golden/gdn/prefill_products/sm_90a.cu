// gdn_prefill_products, generated from templates/gdn/prefill_products.cu.j2
// spec: {"dtype":"bf16","head_dim":128}
//
// The delta rule for whole prompts, first kernel: what a chunk of tokens needs that does not depend on the state. A CTA
// takes one chunk and head. Products of keys with keys and queries run on the tensor cores, exact up to float32 sums.
// The triangular inverse has the accuracy of float32: that of 16 x 16 blocks by substitution, a column by a thread; the
// rest by products of blocks on the tensor cores, with each number as the sum of two TF32 numbers.

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

// ---- partials/mma ----------------------------------------------------------
namespace ptx {
// d += a b for a 16 x 8 and an 8 x 8 matrix in TF32, the upper 19 bits of each element. With g = lane / 4 and
// t = lane % 4, a is a[g][t], a[g + 8][t], a[g][t + 4], a[g + 8][t + 4]; b is b[t][g], b[t + 4][g]; d is d[g][2 t],
// d[g][2 t + 1], d[g + 8][2 t], d[g + 8][2 t + 1].
__device__ __forceinline__ void mma_tf32(float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9},"
      " {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
}  // namespace ptx

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

// ---- gdn/prefill_chunk -----------------------------------------------------
// Sequences of a prefill in chunks of kChunk tokens, and what the chunks' first kernel leaves to the second.
constexpr int kChunk = 64;
constexpr int kChunkRow = kChunk + 8;  // elements of a row in shared memory: 8 rows start at 8 different banks

// What the delta rule needs of a chunk besides q, k, v and the state h before it. With D_t the product of the decays
// from the first token to t, E_ts that from the token after s to t, and |k_t| = 1 without normalisation:
//   solve  = (1 + strictly lower part of beta_t E_ts k_s k_t)^-1 beta_s:  u = solve (v - state_factor h k)
//   attend = lower part of scale E_ts k_s q_t:                            out = attend u + query_factor h q
// where k and q in the brackets are not normalised, as their norms are parts of the factors.
template <typename In> struct alignas(16) StateProducts {
  In    solve[kChunk][kChunkRow];  // [t][s]
  float state_factor[kChunk];      // D_t / |k_t|
  float end_factor[kChunk];        // E_tT / |k_t|, T the last token
  float decay;                     // D_T
};
template <typename In> struct alignas(16) OutputProducts {
  In    attend[kChunk][kChunkRow];  // [t][s]
  float query_factor[kChunk];       // D_t scale / |q_t|
};
template <typename In> struct ChunkProducts {
  StateProducts<In>  state;
  OutputProducts<In> output;
};

// Tokens [first, end) of all tokens.
struct Sequence { int64 first, end; };

// Element n of a list of integers of 4 or 8 bytes.
__device__ __forceinline__ int64 index_at(const void* list, int64 bytes, int64 n) {
  if (bytes == 8) return int64(ptx::ld<uint64>(static_cast<const int64*>(list) + n));
  return int32(ptx::ld<uint32>(static_cast<const int32*>(list) + n));
}

// Element n of cu_seqlens, within the tokens that exist.
__device__ __forceinline__ int64 token_at(const void* cu_seqlens, int64 bytes, int64 n, int64 tokens) {
  return min(max(index_at(cu_seqlens, bytes, n), int64(0)), tokens);
}
__device__ __forceinline__ Sequence sequence_at(const void* cu_seqlens, int64 bytes, int64 n, int64 tokens) {
  const int64 first = token_at(cu_seqlens, bytes, n, tokens);
  return {first, max(first, token_at(cu_seqlens, bytes, n + 1, tokens))};
}

// The place of a sequence's first chunk among the chunks of all sequences. Its chunks follow, and none meets another
// sequence's: ceil(length / kChunk) <= the distance to the next sequence's place.
__device__ __forceinline__ int64 place_of(int64 first, int64 n) { return first / kChunk + n; }

// ---- spec ------------------------------------------------------------------
using In = bf16;
constexpr int kHeadDim = 128;  // K
constexpr int kThreads = 128;

constexpr int   kRow     = kHeadDim + 8;  // elements of a row of keys in shared memory
constexpr int   kPieces  = kHeadDim / 8;  // of 16 bytes in a row
constexpr int   kBlock   = 16;              // tokens of a warp, which it multiplies by all before them
constexpr int   kTiles   = kChunk / kBlock;
constexpr int   kLowerRow = kChunk + 4;
constexpr float kNormEps = 1e-6f;
static_assert(kThreads == kTiles * kWarp && kThreads == 2 * kChunk, "work is divided so");

struct Operands {
  const In* q;
  const In* k;
  const float* g;
  const float* beta;
  const void* cu_seqlens;
  uint8* products;
  float scale;
  int64 cu_seqlens_bytes;
  int64 tokens;
  int64 sequences;
  uint32 heads;
  int q_ratio;
  int k_ratio;
  int64 q_stride;
  int64 k_stride;
  bool l2norm;
};

// ---- shared memory ---------------------------------------------------------
struct Rows { In keys[kChunk][kRow], queries[kChunk][kRow]; };
struct alignas(16) Shared {
  union { Rows rows; ChunkProducts<In> products; };  // products overwrite the rows
  // [t][s]: first E_ts, then beta_t E_ts k_s k_t, then the inverse of 1 + that; where s > t: 0, then room for products.
  float lower[kChunk][kLowerRow];
  float decay[kChunk], beta[kChunk];           // 1 and 0 beyond the last token
  float key_norm[kChunk], query_norm[kChunk];  // 1 / length; without normalisation 1
  float since_first[kChunk], until_end[kChunk];  // D_t; E_tT
};
static_assert(sizeof(Shared) == 53760, "the launch counts on it");

// ---- work of the CTA -------------------------------------------------------
struct Chunk {
  int64 first;   // token
  int   tokens;  // <= kChunk

  // Finds the chunk at a place; false if there is none.
  __device__ __forceinline__ bool find(const Operands& p, int64 place) {
    const int lane = threadIdx.x % kWarp;
    int64 after = 0;  // sequences whose place is not behind this one
    for (int64 n = lane;; n += kWarp) {
      const bool before = n < p.sequences &&
          place_of(token_at(p.cu_seqlens, p.cu_seqlens_bytes, n, p.tokens), n) <= place;
      const uint32 votes = __ballot_sync(~0u, before);
      after += __popc(votes);
      if (votes != ~0u) break;
    }
    if (after == 0) return false;
    const Sequence sequence = sequence_at(p.cu_seqlens, p.cu_seqlens_bytes, after - 1, p.tokens);
    first  = sequence.first + (place - place_of(sequence.first, after - 1)) * kChunk;
    tokens = int(max(int64(0), min(sequence.end - first, int64(kChunk))));
    return tokens > 0;
  }
};

__device__ __forceinline__ void load(const Operands& p, const Chunk& chunk, int head, Shared& s) {
  const In* keys    = p.k + chunk.first * p.k_stride + head / p.k_ratio * kHeadDim;
  const In* queries = p.q + chunk.first * p.q_stride + head / p.q_ratio * kHeadDim;
#pragma unroll
  for (int i = threadIdx.x; i < kChunk * kPieces; i += kThreads) {
    const int t = i / kPieces, column = i % kPieces * 8;
    const uint32 bytes = t < chunk.tokens ? 16 : 0;
    const int64  row   = bytes ? t : 0;
    const uint32 key   = ptx::shared_address(&s.rows.keys[t][column]);
    const uint32 query = ptx::shared_address(&s.rows.queries[t][column]);
    ptx::copy_async_or_zero(key, keys + row * p.k_stride + column, bytes);
    ptx::copy_async_or_zero(query, queries + row * p.q_stride + column, bytes);
  }
  if (threadIdx.x < kChunk) {
    const int   t  = threadIdx.x;
    const bool  is = t < chunk.tokens;
    const int64 at = (chunk.first + t) * p.heads + head;
    s.decay[t] = is && p.g != nullptr ? ptx::ld_f32(p.g + at) : 1.0f;
    s.beta[t]  = !is ? 0.0f : p.beta != nullptr ? ptx::ld_f32(p.beta + at) : 1.0f;
  }
  ptx::copy_async_wait();
}

// Thread s multiplies the decays of the tokens after s.
__device__ __forceinline__ void put_spans(Shared& s) {
  if (threadIdx.x >= kChunk) return;
  const int from = threadIdx.x;
  float span = 0.0f;
#pragma unroll 8
  for (int t = 0; t < kChunk; ++t) {
    span = t < from ? 0.0f : t == from ? 1.0f : span * s.decay[t];
    s.lower[t][from] = span;
    if (from == 0) s.since_first[t] = span * s.decay[0];
  }
  s.until_end[from] = span;
}

// [n][i]: tokens t = 16 warp + g + i / 2 * 8 and s = 8 n + 2 c + i % 2, with g = lane / 4, c = lane % 4.
using Products = float[kChunk / 8][4];

__device__ __forceinline__ int later_of(int i) {
  return threadIdx.x / kWarp * kBlock + threadIdx.x % kWarp / 4 + i / 2 * 8;
}
__device__ __forceinline__ int earlier_of(int n, int i) { return 8 * n + threadIdx.x % 4 * 2 + i % 2; }

// x, y += left right, where right is two blocks of eight columns.
__device__ __forceinline__ void multiply(float (&x)[4], float (&y)[4], uint4 left, uint4 right) {
  ptx::mma_half<In>(x, {left.x, left.y, left.z, left.w}, right.x, right.y);
  ptx::mma_half<In>(y, {left.x, left.y, left.z, left.w}, right.z, right.w);
}

// The products of the warp's tokens with the keys of all tokens up to them, and of its queries with each other.
__device__ __forceinline__ void multiply_rows(
    const Shared& s, Products& of_keys, Products& of_queries, float (&queries_alone)[2][4]) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const uint32 own   = (kBlock * warp + lane % 16) * kRow * 2 + lane / 16 * 16;
  const uint32 other = (lane % 8 + lane / 16 * 8) * kRow * 2 + lane / 8 % 2 * 16;
  const uint32 keys = ptx::shared_address(s.rows.keys), queries = ptx::shared_address(s.rows.queries);
#pragma unroll
  for (int k = 0; k < kHeadDim / 16; ++k) {
    const uint4 x = ptx::load_matrices(keys + own + 32 * k), y = ptx::load_matrices(queries + own + 32 * k);
    const uint4 z = ptx::load_matrices(queries + other + kBlock * warp * kRow * 2 + 32 * k);
    multiply(queries_alone[0], queries_alone[1], y, z);
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      if (j > warp) continue;
      const uint4 b = ptx::load_matrices(keys + other + kBlock * j * kRow * 2 + 32 * k);
      multiply(of_keys[2 * j], of_keys[2 * j + 1], x, b);
      multiply(of_queries[2 * j], of_queries[2 * j + 1], y, b);
    }
  }
}

// The squared lengths are on the diagonals.
__device__ __forceinline__ void put_norms(
    const Operands& p, Shared& s, const Products& of_keys, const float (&queries_alone)[2][4]) {
#pragma unroll
  for (int n = 0; n < kChunk / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int t = later_of(i);
      if (earlier_of(n, i) != t) continue;
      s.key_norm[t]   = p.l2norm ? ptx::rsqrt_approx(of_keys[n][i] + kNormEps) : 1.0f;
      s.query_norm[t] = p.l2norm ? ptx::rsqrt_approx(queries_alone[n % 2][i] + kNormEps) : 1.0f;
    }
  }
}

// Multiplies all products by their factors: those of keys go to `lower`, those of queries stay.
__device__ __forceinline__ void apply_factors(
    const Operands& p, Shared& s, const Products& of_keys, Products& of_queries) {
#pragma unroll
  for (int n = 0; n < kChunk / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int   t = later_of(i), from = earlier_of(n, i);
      const float factor = s.lower[t][from] * s.key_norm[from];
      s.lower[t][from] = from < t ? of_keys[n][i] * (s.beta[t] * s.key_norm[t]) * factor : 0.0f;
      of_queries[n][i] = from <= t ? of_queries[n][i] * (p.scale * s.query_norm[t]) * factor : 0.0f;
    }
  }
}

__device__ __forceinline__ void put_attend(Shared& s, const Products& of_queries) {
#pragma unroll
  for (int n = 0; n < kChunk / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      const uint32 pair = to_pair<In>(of_queries[n][i], of_queries[n][i + 1]);
      *reinterpret_cast<uint32*>(&s.products.output.attend[later_of(i)][earlier_of(n, 0)]) = pair;
    }
  }
}

// ---- the inverse -----------------------------------------------------------
// Warp w inverts 1 + the block of tokens 16 w to 16 w + 15; lanes j and j + 16 have column j.
__device__ __forceinline__ void invert_block(Shared& s) {
  const int first = threadIdx.x / kWarp * kBlock, column = threadIdx.x % kBlock;
  float x[kBlock];
#pragma unroll
  for (int t = 0; t < kBlock; ++t) {
    float sums[2] = {t == column ? 1.0f : 0.0f, 0.0f};
#pragma unroll
    for (int from = 0; from < t; from += 4) {
      const float4 a = *reinterpret_cast<const float4*>(&s.lower[first + t][first + from]);
      const float factors[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (from + i < t) sums[i % 2] = fmaf(-factors[i], x[from + i], sums[i % 2]);
      }
    }
    x[t] = sums[0] + sums[1];
  }
  __syncwarp();
  if (threadIdx.x % kWarp < kBlock) {
#pragma unroll
    for (int t = 0; t < kBlock; ++t) s.lower[first + t][first + column] = x[t];
  }
}

// A float as the sum of two TF32 numbers.
struct Split {
  uint32 high, low;
  __device__ __forceinline__ explicit Split(float x)
      : high(__float_as_uint(x) & 0xFFFFE000u), low(__float_as_uint(x - __uint_as_float(high))) {}
};

// A 16 x 8 block of a product of two matrices, whose first of kInner columns and rows are given, over [begin, end) of
// these.
template <int kInner>
__device__ __forceinline__ void multiply_exactly(
    float (&d)[4], const float* left, const float* right, int begin, int end) {
  const int g = threadIdx.x % kWarp / 4, c = threadIdx.x % 4;
  d[0] = d[1] = d[2] = d[3] = 0.0f;
#pragma unroll
  for (int k = 0; k < kInner; k += 8) {
    if (k < begin || k >= end) continue;
    const float* a = left + g * kLowerRow + k + c;
    const float* b = right + (k + c) * kLowerRow + g;
    const Split a0(a[0]), a1(a[8 * kLowerRow]), a2(a[4]), a3(a[8 * kLowerRow + 4]), b0(b[0]), b1(b[4 * kLowerRow]);
    ptx::mma_tf32(d, {a0.low, a1.low, a2.low, a3.low}, b0.high, b1.high);
    ptx::mma_tf32(d, {a0.high, a1.high, a2.high, a3.high}, b0.low, b1.low);
    ptx::mma_tf32(d, {a0.high, a1.high, a2.high, a3.high}, b0.high, b1.high);
  }
}

__device__ __forceinline__ void put_block(float* at, const float (&d)[4], float sign) {
  float* to = at + threadIdx.x % kWarp / 4 * kLowerRow + threadIdx.x % 4 * 2;
  *reinterpret_cast<float2*>(to) = {sign * d[0], sign * d[1]};
  *reinterpret_cast<float2*>(to + 8 * kLowerRow) = {sign * d[2], sign * d[3]};
}

// Joins two inverted blocks of kSize tokens, from `first` on: below them stands -second (lower first). A warp takes 16
// rows and kColumns columns from (row, column) of the block; the product in brackets stands above, where s > t: there,
// the inverted blocks are taken for zero.
template <int kSize, int kColumns>
__device__ __forceinline__ void join(Shared& s, int first, int row, int column) {
  const int second = first + kSize, begin = column / kBlock * kBlock, end = row + kBlock;
  float d[kColumns / 8][4];
#pragma unroll
  for (int n = 0; n < kColumns / 8; ++n) {
    multiply_exactly<kSize>(d[n], &s.lower[second + row][first], &s.lower[first][first + column + 8 * n], begin, kSize);
    put_block(&s.lower[first + row][second + column + 8 * n], d[n], 1.0f);
  }
  __syncthreads();
#pragma unroll
  for (int n = 0; n < kColumns / 8; ++n) {
    multiply_exactly<kSize>(d[n], &s.lower[second + row][second], &s.lower[first][second + column + 8 * n], 0, end);
    put_block(&s.lower[second + row][first + column + 8 * n], d[n], -1.0f);
  }
  __syncthreads();
}

// Half a row of the inverse, times beta_s.
__device__ __forceinline__ void put_solve(Shared& s) {
  const int t = threadIdx.x / 2, first = threadIdx.x % 2 * (kChunk / 2);
#pragma unroll
  for (int from = first; from < first + kChunk / 2; from += 8) {
    uint32 pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = from + 2 * i;
      pairs[i] = to_pair<In>(at <= t ? s.lower[t][at] * s.beta[at] : 0.0f,
                             at < t ? s.lower[t][at + 1] * s.beta[at + 1] : 0.0f);
    }
    *reinterpret_cast<uint4*>(&s.products.state.solve[t][from]) = {pairs[0], pairs[1], pairs[2], pairs[3]};
  }
}

__device__ __forceinline__ void put_factors(const Operands& p, Shared& s) {
  const int t = threadIdx.x;
  if (t >= kChunk) return;
  StateProducts<In>& state = s.products.state;
  OutputProducts<In>& output = s.products.output;
  state.state_factor[t]  = s.since_first[t] * s.key_norm[t];
  state.end_factor[t]    = s.until_end[t] * s.key_norm[t];
  output.query_factor[t] = s.since_first[t] * s.query_norm[t] * p.scale;
  for (In* row : {state.solve[t], output.attend[t]}) *reinterpret_cast<uint4*>(&row[kChunk]) = {};
  if (t == kChunk - 1) *reinterpret_cast<float4*>(&state.decay) = {s.since_first[t], 0.0f, 0.0f, 0.0f};
}

// ---- kernel ----------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kThreads) gdn_prefill_products(
    const In* __restrict__ q,             // [tokens, heads / q_ratio, K]
    const In* __restrict__ k,             // [tokens, heads / k_ratio, K]
    const float* __restrict__ g,          // [tokens, heads], decays; null: 1
    const float* __restrict__ beta,       // [tokens, heads]; null: 1
    const void* __restrict__ cu_seqlens,  // [sequences + 1], integers of cu_seqlens_bytes
    uint8* __restrict__ products,         // [places, heads, sizeof(ChunkProducts)]
    float scale,                          // of q
    int64 cu_seqlens_bytes,               // 4 or 8
    int64 tokens,                         // of all sequences
    int64 sequences,
    int64 heads,                          // of the output
    int64 q_ratio,                        // heads that share one of q
    int64 k_ratio,                        // heads that share one of k
    int64 q_stride,                       // elements of a token
    int64 k_stride,                       // likewise
    int64 l2norm                          // 0: q and k as they are

) {
  extern __shared__ __align__(16) uint8 dynamic[];
  Shared& s = *reinterpret_cast<Shared*>(dynamic);
  const Operands p = {q, k, g, beta, cu_seqlens, products, scale, cu_seqlens_bytes, tokens, sequences, uint32(heads),
      int(q_ratio), int(k_ratio), q_stride, k_stride, bool(l2norm)};

  if constexpr (kHasPdl) {
    ptx::griddep_launch();
    ptx::griddep_wait();
  }
  const int64 place = blockIdx.x / p.heads;
  const int   head  = int(blockIdx.x % p.heads);
  Chunk chunk;
  if (!chunk.find(p, place)) return;
  load(p, chunk, head, s);
  __syncthreads();
  put_spans(s);
  Products of_keys = {}, of_queries = {};
  float queries_alone[2][4] = {};
  multiply_rows(s, of_keys, of_queries, queries_alone);
  put_norms(p, s, of_keys, queries_alone);
  __syncthreads();  // spans and norms are there, and nobody reads the rows any more
  apply_factors(p, s, of_keys, of_queries);
  put_attend(s, of_queries);
  put_factors(p, s);
  __syncwarp();
  invert_block(s);  // of the warp's own rows
  __syncthreads();
  const int warp = threadIdx.x / kWarp;
  join<kBlock, 8>(s, warp / 2 * 2 * kBlock, 0, warp % 2 * 8);
  join<2 * kBlock, kBlock>(s, 0, warp / 2 * kBlock, warp % 2 * kBlock);
  put_solve(s);
  __syncthreads();
  uint4*       to   = reinterpret_cast<uint4*>(p.products + (place * p.heads + head) * sizeof(s.products));
  const uint4* from = reinterpret_cast<const uint4*>(&s.products);
  for (int i = threadIdx.x; i < int(sizeof(s.products) / 16); i += kThreads) to[i] = from[i];
}

// gdn_prefill, generated from templates/gdn/prefill.cu.j2
// spec: {"dtype":"bf16","head_dim":128,"pairs":2,"stages":2,"value_dim":128}
//
// The delta rule for whole prompts, second kernel: the chunks of a sequence in their order. A pair of warps takes 16
// rows (V index) of one head's state and a chunk of tokens at once. The first warp of a pair holds the rows in
// registers, in float32, and has the only work that must be done chunk after chunk:
//   u = (v - state_factor h k) solve^T
//   h becomes decay h + (end_factor u) k^T
// The second one starts the copies, and computes the outputs of the chunk before, from the h and u that the first
// leaves:
//   out = query_factor h q + u attend^T
// Every product has h or u as its left operand, which stays as the tensor cores left it; right operands are k, q and
// the products of the first kernel, in shared memory. Left operands are rounded to 16 bits; sums are float32.

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
constexpr int kHeadDim  = 128;  // K
constexpr int kValueDim = 128;  // V
constexpr int kPairs    = 2;  // of warps
constexpr int kStages   = 2;  // chunks in shared memory; with 1, the second warps wait for the first

constexpr int kHalf     = kPairs * kWarp;  // threads of the first warps, and of the second
constexpr int kThreads  = 2 * kHalf;
constexpr int kTileV    = 16 * kPairs;  // rows of a CTA
constexpr int kTiles    = kValueDim / kTileV;
constexpr int kRow      = kHeadDim + 8;  // elements of a row of keys in shared memory
constexpr int kValueRow = kTileV + 8;    // and of values
constexpr int kBlocks   = kChunk / 16;   // of 16 tokens

struct Operands {
  const In* q;
  const In* k;
  const In* v;
  const uint8* products;
  const void* cu_seqlens;
  const uint8* initial_state;
  uint8* final_state;
  const void* slots;
  uint8* checkpoints;
  const void* checkpoint_starts;
  In* out;
  int64 cu_seqlens_bytes;
  int64 tokens;
  uint32 heads;
  int q_ratio;
  int k_ratio;
  int v_ratio;
  int64 q_stride;
  int64 k_stride;
  int64 v_stride;
  int state_bytes;
  int64 pool;
  int slot_bytes;
  int64 initial_stride;
  int64 final_stride;
  int64 checkpoint_every;
  int64 checkpoint_count;
  int start_bytes;
};

// ---- shared memory ---------------------------------------------------------
struct alignas(16) StateStage {
  StateProducts<In> products;
  In keys[kChunk][kRow], values[kChunk][kValueRow];  // zero beyond the last token
};
struct alignas(16) OutputStage {
  OutputProducts<In> products;
  In queries[kChunk][kRow];
};
// What the first warp of each pair leaves to the second: left operands, each lane's in its place.
struct Left { uint4 state[kHeadDim / 16][kWarp], updates[kBlocks][kWarp]; };
struct Shared {
  StateStage  states[kStages];
  OutputStage outputs[kStages];
  Left        left[kStages][kPairs];
};
static_assert(sizeof(Shared) == 142880, "the launch counts on it");

// The pair of a warp, which is its place among the rows.
__device__ __forceinline__ int pair_of() { return threadIdx.x / kWarp % kPairs; }

// ---- the item of a CTA -----------------------------------------------------
struct Item {
  int64    n;     // sequence
  int      head;
  int      tile;  // first row
  Sequence sequence;

  __device__ __forceinline__ explicit Item(const Operands& p)
      : n(blockIdx.x / kTiles / p.heads), head(int(blockIdx.x / kTiles % p.heads)),
        tile(blockIdx.x % kTiles * kTileV), sequence(sequence_at(p.cu_seqlens, p.cu_seqlens_bytes, n, p.tokens)) {}

  __device__ __forceinline__ int64 slot(const Operands& p) const {
    return p.slot_bytes == 0 ? n : index_at(p.slots, p.slot_bytes, n);
  }
  __device__ __forceinline__ int64 chunks() const { return ceil_div(sequence.end - sequence.first, kChunk); }
  // The output of a token at the warp's first row.
  __device__ __forceinline__ In* output(const Operands& p, int64 token) const {
    return p.out + (token * p.heads + head) * kValueDim + tile + pair_of() * 16;
  }
};

__device__ __forceinline__ int tokens_of(const Sequence& sequence, int64 first) {
  return int(min(sequence.end - first, int64(kChunk)));
}

// Copies `kCount` elements of each token's row, which are `stride` elements apart; by the second warps.
template <int kCount, int kStride>
__device__ __forceinline__ void copy_rows(In (&to)[kChunk][kStride], const In* from, int64 stride, int tokens) {
  constexpr int kPieces = kCount / 8, kStep = kHalf / kPieces;  // pieces of a row; rows at a time
  static_assert(kHalf % kPieces == 0 && kChunk % kStep == 0, "whole rows");
  const int thread = threadIdx.x - kHalf, first = thread / kPieces, column = thread % kPieces * 8;
  const In* row = from + first * stride + column;
#pragma unroll
  for (int t = first; t < first + kChunk; t += kStep, row += kStep * stride) {
    const bool is = t < tokens;
    ptx::copy_async_or_zero(ptx::shared_address(&to[t][column]), is ? row : from, is ? 16 : 0);
  }
}

template <typename T> __device__ __forceinline__ void copy_whole(T& to, const uint8* from) {
#pragma unroll
  for (int at = 0; at < int(sizeof(T)); at += kHalf * 16) {
    const int mine = at + (threadIdx.x - kHalf) * 16;
    if (mine < int(sizeof(T))) ptx::copy_async(ptx::shared_address(&to) + mine, from + mine);
  }
}

__device__ __forceinline__ const uint8* products_of(const Operands& p, const Item& item, int64 chunk) {
  const int64 place = place_of(item.sequence.first, item.n) + chunk;
  return p.products + (place * p.heads + item.head) * sizeof(ChunkProducts<In>);
}

// Start the copies of a chunk.
__device__ __forceinline__ void copy(const Operands& p, const Item& item, int64 chunk, StateStage& stage) {
  const int64 first = item.sequence.first + chunk * kChunk;
  const int   tokens = tokens_of(item.sequence, first);
  copy_rows<kHeadDim>(stage.keys, p.k + first * p.k_stride + item.head / p.k_ratio * kHeadDim, p.k_stride, tokens);
  copy_rows<kTileV>(stage.values, p.v + first * p.v_stride + item.head / p.v_ratio * kValueDim + item.tile, p.v_stride,
                    tokens);
  copy_whole(stage.products, products_of(p, item, chunk));
}
__device__ __forceinline__ void copy(const Operands& p, const Item& item, int64 chunk, OutputStage& stage) {
  const int64 first = item.sequence.first + chunk * kChunk;
  const In* queries = p.q + first * p.q_stride + item.head / p.q_ratio * kHeadDim;
  copy_rows<kHeadDim>(stage.queries, queries, p.q_stride, tokens_of(item.sequence, first));
  copy_whole(stage.products, products_of(p, item, chunk) + sizeof(StateProducts<In>));
}

// ---- a warp's rows ---------------------------------------------------------
// With g = lane / 4 and c = lane % 4, element i of block n has row g + i / 2 * 8 and column 8 n + 2 c + i % 2.
using Rows   = float[kHeadDim / 8][4];  // of the state; columns are its K index
using Tokens = float[kChunk / 8][4];    // columns are tokens

// A left operand of 16 columns: two blocks.
__device__ __forceinline__ uint4 to_left(const float (&x)[4], const float (&y)[4]) {
  return {to_pair<In>(x[0], x[1]), to_pair<In>(x[2], x[3]), to_pair<In>(y[0], y[1]), to_pair<In>(y[2], y[3])};
}

// x and y, neighbouring blocks, += left times a right operand.
__device__ __forceinline__ void multiply(float (&x)[4], float (&y)[4], uint4 left, uint4 right) {
  ptx::mma_half<In>(x, {left.x, left.y, left.z, left.w}, right.x, right.y);
  ptx::mma_half<In>(y, {left.x, left.y, left.z, left.w}, right.z, right.w);
}

// Multiplies the columns of each token by its factor.
__device__ __forceinline__ void scale_tokens(Tokens& x, const float (&factors)[kChunk]) {
#pragma unroll
  for (int n = 0; n < kChunk / 8; ++n) {
    const float2 f = *reinterpret_cast<const float2*>(&factors[8 * n + threadIdx.x % 4 * 2]);
    x[n][0] *= f.x, x[n][1] *= f.y, x[n][2] *= f.x, x[n][3] *= f.y;
  }
}

// x += left matrix^T, for the lower part of a matrix [t][s].
__device__ __forceinline__ void multiply_lower(
    Tokens& x, const uint4 (&left)[kBlocks], const In (&matrix)[kChunk][kChunkRow]) {
  const int lane = threadIdx.x % kWarp;
  const uint32 at = ptx::shared_address(&matrix[lane % 8 + lane / 16 * 8][lane / 8 % 2 * 8]);
#pragma unroll
  for (int k = 0; k < kBlocks; ++k) {
#pragma unroll
    for (int j = k; j < kBlocks; ++j) {
      multiply(x[2 * j], x[2 * j + 1], left[k], ptx::load_matrices(at + 16 * j * kChunkRow * 2 + 32 * k));
    }
  }
}

// x += left rows^T, for the rows of k or q; left(k): 16 columns of the left operand.
template <typename F>
__device__ __forceinline__ void multiply_rows(Tokens& x, const In (&rows)[kChunk][kRow], F left) {
  const int lane = threadIdx.x % kWarp;
  const uint32 at = ptx::shared_address(&rows[lane % 8 + lane / 16 * 8][lane / 8 % 2 * 8]);
#pragma unroll
  for (int k = 0; k < kHeadDim / 16; ++k) {
    const uint4 columns = left(k);
#pragma unroll
    for (int j = 0; j < kBlocks; ++j) {
      multiply(x[2 * j], x[2 * j + 1], columns, ptx::load_matrices(at + 16 * j * kRow * 2 + 32 * k));
    }
  }
}

// left = v - x
__device__ __forceinline__ void subtract(const StateStage& stage, const Tokens& x, uint4 (&left)[kBlocks]) {
  const int lane = threadIdx.x % kWarp;
  const uint32 at = ptx::shared_address(&stage.values[lane % 8 + lane / 16 * 8][16 * pair_of() + lane / 8 % 2 * 8]);
#pragma unroll
  for (int j = 0; j < kBlocks; ++j) {
    const uint4  v        = ptx::load_matrices_transposed(at + 16 * j * kValueRow * 2);
    const uint32 words[4] = {v.x, v.y, v.z, v.w};
    float rest[2][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      rest[i / 2][i % 2 * 2]     = low<In>(words[i]) - x[2 * j + i / 2][i % 2 * 2];
      rest[i / 2][i % 2 * 2 + 1] = high<In>(words[i]) - x[2 * j + i / 2][i % 2 * 2 + 1];
    }
    left[j] = to_left(rest[0], rest[1]);
  }
}

// The first warp's work on a chunk.
__device__ __forceinline__ void advance(Rows& h, const StateStage& stage, Left& given) {
  const int lane = threadIdx.x % kWarp;
  uint4  left[kBlocks];
  Tokens u = {};
  {
    Tokens of_keys = {};
    multiply_rows(of_keys, stage.keys, [&](int k) {
      const uint4 columns = to_left(h[2 * k], h[2 * k + 1]);
      return given.state[k][lane] = columns;
    });
    scale_tokens(of_keys, stage.products.state_factor);
    subtract(stage, of_keys, left);
  }
  multiply_lower(u, left, stage.products.solve);
#pragma unroll
  for (int j = 0; j < kBlocks; ++j) given.updates[j][lane] = to_left(u[2 * j], u[2 * j + 1]);
  scale_tokens(u, stage.products.end_factor);
#pragma unroll
  for (int n = 0; n < kHeadDim / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) h[n][i] *= stage.products.decay;
  }
  const uint32 at = ptx::shared_address(&stage.keys[lane % 16][lane / 16 * 8]);
#pragma unroll
  for (int k = 0; k < kBlocks; ++k) {
    const uint4 columns = to_left(u[2 * k], u[2 * k + 1]);
#pragma unroll
    for (int m = 0; m < kHeadDim / 16; ++m) {
      multiply(h[2 * m], h[2 * m + 1], columns, ptx::load_matrices_transposed(at + 16 * k * kRow * 2 + 32 * m));
    }
  }
}

// Stores 16 rows of `tokens` tokens, two neighbouring rows at a time.
__device__ __forceinline__ void store_outputs(const Operands& p, const Item& item, int64 first, const Tokens& x) {
  const int lane = threadIdx.x % kWarp, tokens = tokens_of(item.sequence, first);
#pragma unroll
  for (int n = 0; n < kChunk / 8; ++n) {
    const uint32 upper = ptx::transpose(to_pair<In>(x[n][0], x[n][1]));
    const uint32 lower = ptx::transpose(to_pair<In>(x[n][2], x[n][3]));
    const int t = 8 * n + lane / 4;
    if (t >= tokens) continue;
    uint32* to = reinterpret_cast<uint32*>(item.output(p, first + t) + lane % 4 * 2);
    to[0] = upper, to[4] = lower;
  }
}

// The second warp's work on a chunk.
__device__ __forceinline__ void attend(
    const Operands& p, const Item& item, int64 chunk, const OutputStage& stage, const Left& given) {
  const int lane = threadIdx.x % kWarp;
  Tokens results = {};
  multiply_rows(results, stage.queries, [&](int k) { return given.state[k][lane]; });
  scale_tokens(results, stage.products.query_factor);
  uint4 left[kBlocks];
#pragma unroll
  for (int j = 0; j < kBlocks; ++j) left[j] = given.updates[j][lane];
  multiply_lower(results, left, stage.products.attend);
  store_outputs(p, item, item.sequence.first + chunk * kChunk, results);
}

// Calls f(the offset of two neighbouring columns in a head's state, block n, element i of the first) for a lane's part.
template <typename F> __device__ __forceinline__ void each_pair(const Item& item, F f) {
  const int lane = threadIdx.x % kWarp;
  const int at   = (item.tile + pair_of() * 16 + lane / 4) * kHeadDim + lane % 4 * 2;
#pragma unroll
  for (int n = 0; n < kHeadDim / 8; ++n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) f(at + half * 8 * kHeadDim + 8 * n, n, 2 * half);
  }
}

// `states`: of state_bytes each, float32 or bf16; `first`: the offset of the head's state.
__device__ __forceinline__ void load_state(
    const Operands& p, const Item& item, const uint8* states, int64 first, Rows& h) {
  const uint8* head = states + first * p.state_bytes;
  if (p.state_bytes == 4) {
    each_pair(item, [&](int at, int n, int i) {
      const uint2 v = ptx::ld<uint2>(head + at * 4);
      h[n][i] = __uint_as_float(v.x), h[n][i + 1] = __uint_as_float(v.y);
    });
  } else {
    each_pair(item, [&](int at, int n, int i) {
      const uint32 v = ptx::ld<uint32>(head + at * 2);
      h[n][i] = low<bf16>(v), h[n][i + 1] = high<bf16>(v);
    });
  }
}

__device__ __forceinline__ void store_state(
    const Operands& p, const Item& item, uint8* states, int64 first, const Rows& h) {
  uint8* head = states + first * p.state_bytes;
  if (p.state_bytes == 4) {
    each_pair(item, [&](int at, int n, int i) { *reinterpret_cast<float2*>(head + at * 4) = {h[n][i], h[n][i + 1]}; });
  } else {
    each_pair(item, [&](int at, int n, int i) {
      *reinterpret_cast<uint32*>(head + at * 2) = to_pair<bf16>(h[n][i], h[n][i + 1]);
    });
  }
}

// Stores the state after `tokens` tokens of a sequence, if that is where a checkpoint stands.
__device__ __forceinline__ void store_checkpoint(const Operands& p, const Item& item, int64 tokens, const Rows& h) {
  const bool within = item.sequence.first + tokens <= item.sequence.end;
  if (p.checkpoint_every == 0 || tokens % p.checkpoint_every || !within) return;
  const int64 start = index_at(p.checkpoint_starts, p.start_bytes, item.n);
  const int64 at = start + tokens / p.checkpoint_every - 1;
  if (uint64(at) >= uint64(p.checkpoint_count)) return;
  store_state(p, item, p.checkpoints, (at * p.heads + item.head) * (kValueDim * kHeadDim), h);
}

__device__ __forceinline__ void clear_outputs(const Operands& p, const Item& item) {
  for (int64 t = item.sequence.first + threadIdx.x % kWarp; t < item.sequence.end; t += kWarp) {
    for (int i = 0; i < 2; ++i) *reinterpret_cast<uint4*>(item.output(p, t) + 8 * i) = {};
  }
}

// ---- kernel ----------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kThreads) gdn_prefill(
    const In* __restrict__ q,                    // [tokens, heads / q_ratio, K]
    const In* __restrict__ k,                    // [tokens, heads / k_ratio, K]
    const In* __restrict__ v,                    // [tokens, heads / v_ratio, V]
    const uint8* __restrict__ products,          // [places, heads, sizeof(ChunkProducts)]
    const void* __restrict__ cu_seqlens,         // [sequences + 1], integers of cu_seqlens_bytes
    const uint8* __restrict__ initial_state,     // [pool, heads, V, K] of state_bytes; null: 0
    uint8* __restrict__ final_state,             // [pool, heads, V, K] of state_bytes; null: not stored
    const void* __restrict__ slots,              // [sequences], of slot_bytes; outside the pool: no state, output zero
    uint8* __restrict__ checkpoints,             // [checkpoint_count, heads, V, K] of state_bytes
    const void* __restrict__ checkpoint_starts,  // [sequences + 1], integers of start_bytes
    In* __restrict__ out,                        // [tokens, heads, V]
    int64 cu_seqlens_bytes,                      // 4 or 8
    int64 tokens,                                // of all sequences
    int64 heads,                                 // of the output
    int64 q_ratio,                               // heads that share one of q
    int64 k_ratio,                               // heads that share one of k
    int64 v_ratio,                               // heads that share one of v
    int64 q_stride,                              // elements of a token
    int64 k_stride,                              // likewise
    int64 v_stride,                              // likewise
    int64 state_bytes,                           // 4: float32; 2: bf16
    int64 pool,                                  // slots
    int64 slot_bytes,                            // 0, 4 or 8; 0: sequence n uses slot n
    int64 initial_stride,                        // elements of a slot
    int64 final_stride,                          // likewise
    int64 checkpoint_every,                      // tokens, a multiple of kChunk; 0: none
    int64 checkpoint_count,
    int64 start_bytes                            // 4 or 8

) {
  extern __shared__ __align__(16) uint8 dynamic[];
  Shared& s = *reinterpret_cast<Shared*>(dynamic);
  const Operands p = {q, k, v, products, cu_seqlens, initial_state, final_state, slots, checkpoints, checkpoint_starts,
      out, cu_seqlens_bytes, tokens, uint32(heads), int(q_ratio), int(k_ratio), int(v_ratio), q_stride,
      k_stride, v_stride, int(state_bytes), pool, int(slot_bytes), initial_stride, final_stride,
      checkpoint_every, checkpoint_count, int(start_bytes)};
  const bool second = threadIdx.x >= kHalf;

  if constexpr (kHasPdl) ptx::griddep_wait();
  const Item  item(p);
  const int64 slot = item.slot(p), chunks = item.chunks();
  if constexpr (kHasPdl) ptx::griddep_launch();
  if (uint64(slot) >= uint64(p.pool)) {
    if (!second) clear_outputs(p, item);
    return;
  }
  if (second && chunks > 0) copy(p, item, 0, s.states[0]);
  const int64 head = int64(item.head) * (kValueDim * kHeadDim);
  Rows h = {};
  if (!second && p.initial_state != nullptr) load_state(p, item, p.initial_state, slot * p.initial_stride + head, h);
  // With two stages, the second warps are a chunk behind.
  constexpr int kBehind = kStages - 1;
#pragma unroll 1
  for (int64 chunk = 0; chunk < chunks + kBehind; ++chunk) {
    const int stage = chunk % kStages, before = (chunk + kBehind) % kStages;
    ptx::copy_async_wait();
    __syncthreads();  // the copies are there, and nobody uses what the next ones overwrite
    if (second) {
      if (kStages > 1 && chunk + 1 < chunks) copy(p, item, chunk + 1, s.states[before]);
      if (chunk < chunks) copy(p, item, chunk, s.outputs[stage]);
    } else if (chunk < chunks) {
      advance(h, s.states[stage], s.left[stage][pair_of()]);
      store_checkpoint(p, item, (chunk + 1) * kChunk, h);
    }
    if constexpr (kStages == 1) {
      ptx::copy_async_wait();
      __syncthreads();  // h and u are there
      if (second && chunk + 1 < chunks) copy(p, item, chunk + 1, s.states[0]);
    }
    if (second && chunk >= kBehind) attend(p, item, chunk - kBehind, s.outputs[before], s.left[before][pair_of()]);
  }
  if (!second && p.final_state != nullptr) {
    store_state(p, item, p.final_state, slot * p.final_stride + head, h);
  }
}

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
constexpr int kChunk  = 64;
constexpr int kBlock  = 16;               // rows and columns of a block of a matrix
constexpr int kBlocks = kChunk / kBlock;  // in a row of blocks

// The lower part of a matrix [t][s] in blocks, row by row of blocks. The halves of each row of a block are exchanged in
// four rows of eight, so that eight rows start at eight different groups of four banks.
template <typename In> struct alignas(16) Lower {
  In blocks[kBlocks * (kBlocks + 1) / 2][kBlock][kBlock];

  // Column 0 or 8, by `half`, of a row of a block, in elements.
  static __device__ __forceinline__ int place(int row, int half) { return row * kBlock + (half ^ row / 4 % 2) * 8; }
  // Element s of row t; s <= t, or in the same block.
  __device__ __forceinline__ In* at(int t, int s) {
    return &blocks[block(t / kBlock, s / kBlock)][0][place(t % kBlock, s / 8 % 2) + s % 8];
  }
  // The one in row i and column j of the blocks.
  static __device__ __forceinline__ int block(int i, int j) { return i * (i + 1) / 2 + j; }
};

// What the delta rule needs of a chunk besides q, k, v and the state h before it. With D_t the product of the decays
// from the first token to t, E_ts that from the token after s to t, and |k_t| = 1 without normalisation:
//   solve  = (1 + strictly lower part of beta_t E_ts k_s k_t)^-1 beta_s:  u = solve (v - state_factor h k)
//   attend = lower part of scale E_ts k_s q_t:                            out = attend u + query_factor h q
// where k and q in the brackets are not normalised, as their norms are parts of the factors.
template <typename In> struct ChunkProducts {
  Lower<In> solve, attend;
  float state_factor[kChunk];  // D_t / |k_t|
  float end_factor[kChunk];    // E_tT / |k_t|, T the last token
  float query_factor[kChunk];  // D_t scale / |q_t|
  float decay[4];              // D_T, and nothing
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

// ---- gdn/prefill_source ----------------------------------------------------
// Where one of kThreads threads copies from, when together they copy kCount elements of each of kRows rows, and then of
// the next kRows rows: 16 bytes of every kStep-th row.
template <typename In, int kRows, int kCount, int kThreads> class Source {
 public:
  // `from`: the first row; rows are `stride` elements apart.
  __device__ __forceinline__ Source(const In* from, int64 stride, int thread)
      : thread_(thread), row_(from + thread / kPieces * stride + thread % kPieces * 8), step_(kStep * stride) {}

  // Starts the copies of the next rows, of which `rows` exist; the others are zero. to(row, column): the place of 16
  // bytes in shared memory.
  template <typename F> __device__ __forceinline__ void copy(int rows, F to) {
#pragma unroll
    for (int i = 0; i < kRows; i += kStep, row_ += step_) {
      const int row = i + thread_ / kPieces;
      ptx::copy_async_or_zero(to(row, thread_ % kPieces * 8), row_, row < rows ? 16 : 0);
    }
  }
  template <int kStride> __device__ __forceinline__ void copy(In (&to)[kRows][kStride], int rows) {
    copy(rows, [&](int row, int column) { return ptx::shared_address(&to[row][column]); });
  }

 private:
  static constexpr int kPieces = kCount / 8, kStep = kThreads / kPieces;
  static_assert(kThreads % kPieces == 0 && kRows % kStep == 0, "whole rows");

  const int   thread_;
  const In*   row_;
  const int64 step_;
};

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

// ---- gdn/squares -----------------------------------------------------------
// Products of 16 x 16 matrices, of 16-bit floats in shared memory. With g = lane / 4 and c = lane % 4, a left operand's
// registers are pairs in row g or g + 8 and columns 2 c or 2 c + 8; a right one's are the same of its rows, which are
// columns of the product. Element i of block n of a product has row g + i / 2 * 8 and column 8 n + 2 c + i % 2.

// The row whose address a lane gives to load an operand, and which half of it.
__device__ __forceinline__ int left_row() { return threadIdx.x % 16; }
__device__ __forceinline__ int left_half() { return threadIdx.x / 16 % 2; }
__device__ __forceinline__ int right_row() { return threadIdx.x % 8 + threadIdx.x / 16 % 2 * 8; }
__device__ __forceinline__ int right_half() { return threadIdx.x / 8 % 2; }

// That address, where rows are kStride elements apart.
template <typename In, int kStride> __device__ __forceinline__ uint32 left_in(const In (*rows)[kStride]) {
  return ptx::shared_address(&rows[left_row()][left_half() * 8]);
}
template <typename In, int kStride> __device__ __forceinline__ uint32 right_in(const In (*rows)[kStride]) {
  return ptx::shared_address(&rows[right_row()][right_half() * 8]);
}

// The same rows as a right operand.
__device__ __forceinline__ uint4 as_right(uint4 left) { return {left.x, left.z, left.y, left.w}; }

// x and y, neighbouring blocks, += left times a right operand.
template <typename In>
__device__ __forceinline__ void multiply(float (&x)[4], float (&y)[4], uint4 left, uint4 right) {
  ptx::mma_half<In>(x, {left.x, left.y, left.z, left.w}, right.x, right.y);
  ptx::mma_half<In>(y, {left.x, left.y, left.z, left.w}, right.z, right.w);
}

// Stores a block, rounded, where the rows are kStride elements apart.
template <int kStride, typename In> __device__ __forceinline__ void put(In* to, const float (&x)[4]) {
  to += threadIdx.x % kWarp / 4 * kStride + threadIdx.x % 4 * 2;
  *reinterpret_cast<uint32*>(to)               = to_pair<In>(x[0], x[1]);
  *reinterpret_cast<uint32*>(to + 8 * kStride) = to_pair<In>(x[2], x[3]);
}

// ---- spec ------------------------------------------------------------------
using In = bf16;
constexpr int kHeadDim = 128;  // K
constexpr int kThreads = 128;

constexpr int   kRow     = kHeadDim + 8;  // elements of a row of keys in shared memory
constexpr int   kLowerRow = kChunk + 4;
constexpr int   kSpanRow  = kBlock + 4;
constexpr float kNormEps  = 1e-6f;
static_assert(kThreads == kBlocks * kWarp && kThreads == 2 * kChunk, "a block of tokens for each warp");

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
struct alignas(16) Made {
  ChunkProducts<In> products;
  // [t][s]: first beta_t E_ts k_s k_t, then the inverse of 1 + that; in blocks above the diagonal, room for products.
  float lower[kChunk][kLowerRow];
};
struct alignas(16) Shared {
  union { Rows rows; Made made; };  // what is made overwrites the rows
  float spans[kBlocks][kBlock][kSpanRow];  // [t / kBlock][t % kBlock][s % kBlock]: E_ts in a block; 0 where s > t
  float decay[kChunk], beta[kChunk];           // 1 and 0 beyond the last token
  float key_norm[kChunk], query_norm[kChunk];  // 1 / length; without normalisation 1
  float since_first[kChunk], until_end[kChunk];  // D_t and E_tT, as if t's block were all
};
static_assert(sizeof(Shared) == 41472, "the launch counts on it");

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
  using Rows = Source<In, kChunk, kHeadDim, kThreads>;
  const In* keys    = p.k + chunk.first * p.k_stride + head / p.k_ratio * kHeadDim;
  const In* queries = p.q + chunk.first * p.q_stride + head / p.q_ratio * kHeadDim;
  Rows(keys, p.k_stride, threadIdx.x).copy(s.rows.keys, chunk.tokens);
  Rows(queries, p.q_stride, threadIdx.x).copy(s.rows.queries, chunk.tokens);
  if (threadIdx.x < kChunk) {
    const int   t  = threadIdx.x;
    const bool  is = t < chunk.tokens;
    const int64 at = (chunk.first + t) * p.heads + head;
    s.decay[t] = is && p.g != nullptr ? ptx::ld_f32(p.g + at) : 1.0f;
    s.beta[t]  = !is ? 0.0f : p.beta != nullptr ? ptx::ld_f32(p.beta + at) : 1.0f;
  }
  ptx::copy_async_wait();
}

// Thread s multiplies the decays of the tokens after s in its block; the warp's tokens are whole blocks.
__device__ __forceinline__ void put_spans(Shared& s) {
  if (threadIdx.x >= kChunk) return;
  const int from = threadIdx.x % kBlock, block = threadIdx.x / kBlock;
  float span = 0.0f;
#pragma unroll
  for (int t = 0; t < kBlock; t += 4) {
    const float4 d = *reinterpret_cast<const float4*>(&s.decay[block * kBlock + t]);
    const float decays[4] = {d.x, d.y, d.z, d.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      span *= decays[i];
      span = t + i < from ? 0.0f : t + i == from ? 1.0f : span;
      s.spans[block][t + i][from] = span;
    }
  }
  s.until_end[threadIdx.x] = span;
  __syncwarp();
  s.since_first[threadIdx.x] = s.spans[block][from][0] * s.decay[block * kBlock];
}
// The decay of blocks [first, end).
__device__ __forceinline__ float decay_of_blocks(const Shared& s, int first, int end) {
  float x = 1.0f;
#pragma unroll
  for (int i = 0; i < kBlocks; ++i) x *= first <= i && i < end ? s.since_first[i * kBlock + kBlock - 1] : 1.0f;
  return x;
}

// [n][i]: tokens t = 16 warp + g + i / 2 * 8 and s = 8 n + 2 c + i % 2, with g = lane / 4, c = lane % 4.
using Products = float[kChunk / 8][4];

__device__ __forceinline__ int later_of(int i) {
  return threadIdx.x / kWarp * kBlock + threadIdx.x % kWarp / 4 + i / 2 * 8;
}
__device__ __forceinline__ int earlier_of(int n, int i) { return 8 * n + threadIdx.x % 4 * 2 + i % 2; }

// The products of the warp's tokens with the keys of all tokens up to them, and of its queries with each other.
__device__ __forceinline__ void multiply_rows(
    const Shared& s, Products& of_keys, Products& of_queries, float (&queries_alone)[2][4]) {
  const int warp = threadIdx.x / kWarp;
  const uint32 own_keys = left_in(&s.rows.keys[kBlock * warp]), own_queries = left_in(&s.rows.queries[kBlock * warp]);
  const uint32 keys = right_in(s.rows.keys);
#pragma unroll
  for (int k = 0; k < kHeadDim / 16; ++k) {
    const uint4 x = ptx::load_matrices(own_keys + 32 * k), y = ptx::load_matrices(own_queries + 32 * k);
    multiply<In>(queries_alone[0], queries_alone[1], y, as_right(y));
#pragma unroll
    for (int j = 0; j < kBlocks; ++j) {
      if (j > warp) continue;
      const uint4 b = j == warp ? as_right(x) : ptx::load_matrices(keys + kBlock * j * kRow * 2 + 32 * k);
      multiply<In>(of_keys[2 * j], of_keys[2 * j + 1], x, b);
      multiply<In>(of_queries[2 * j], of_queries[2 * j + 1], y, b);
    }
  }
}

// The squared lengths are on the diagonals.
__device__ __forceinline__ void put_norms(
    const Operands& p, Shared& s, const Products& of_keys, const float (&queries_alone)[2][4]) {
#pragma unroll
  for (int n = 0; n < kChunk / 8; ++n) {
    if (n / 2 != threadIdx.x / kWarp) continue;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int t = later_of(i);
      if (earlier_of(n, i) != t) continue;
      s.key_norm[t]   = p.l2norm ? ptx::rsqrt_approx(of_keys[n][i] + kNormEps) : 1.0f;
      s.query_norm[t] = p.l2norm ? ptx::rsqrt_approx(queries_alone[n % 2][i] + kNormEps) : 1.0f;
    }
  }
}

// Multiplies the products by their factors and stores them: those of keys in `lower`, those of queries as `attend`.
__device__ __forceinline__ void put_products(
    const Operands& p, Shared& s, const Products& of_keys, const Products& of_queries) {
  const int warp = threadIdx.x / kWarp;
  float since[2], key[2], query[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int t = later_of(2 * half);
    since[half] = s.since_first[t], key[half] = s.beta[t] * s.key_norm[t], query[half] = p.scale * s.query_norm[t];
  }
#pragma unroll
  for (int n = 0; n < kChunk / 8; ++n) {
    if (n / 2 > warp) continue;
    const bool  own    = n / 2 == warp;
    const int   from   = earlier_of(n, 0);
    const float blocks = own ? 1.0f : decay_of_blocks(s, n / 2 + 1, warp);
    float2 norm = *reinterpret_cast<const float2*>(&s.key_norm[from]);
    if (!own) {
      const float2 until = *reinterpret_cast<const float2*>(&s.until_end[from]);
      norm.x *= blocks * until.x, norm.y *= blocks * until.y;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int t = later_of(2 * half);
      float2 span = {since[half], since[half]};
      if (own) span = *reinterpret_cast<const float2*>(&s.spans[warp][t % kBlock][from % kBlock]);  // 0 where s > t
      span.x *= norm.x, span.y *= norm.y;
      const float* const x = &of_keys[n][2 * half];
      const float* const y = &of_queries[n][2 * half];
      *reinterpret_cast<float2*>(&s.made.lower[t][from]) = {
          from < t ? x[0] * key[half] * span.x : 0.0f, from + 1 < t ? x[1] * key[half] * span.y : 0.0f};
      *reinterpret_cast<uint32*>(s.made.products.attend.at(t, from)) = to_pair<In>(
          from <= t ? y[0] * query[half] * span.x : 0.0f,
          from < t ? y[1] * query[half] * span.y : 0.0f);
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
      const float4 a = *reinterpret_cast<const float4*>(&s.made.lower[first + t][first + from]);
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
    for (int t = 0; t < kBlock; ++t) s.made.lower[first + t][first + column] = x[t];
  }
}

// A float as the sum of two TF32 numbers.
struct Split {
  uint32 high, low;
  __device__ __forceinline__ explicit Split(float x)
      : high(__float_as_uint(x) & 0xFFFFE000u), low(__float_as_uint(x - __uint_as_float(high))) {}
};

// Blocks of 16 x 8 of a product of two matrices, whose first of kInner columns and rows are given, over [begin, end) of
// these.
template <int kInner, int kCount>
__device__ __forceinline__ void multiply_exactly(
    float (&d)[kCount][4], const float* left, const float* right, int begin, int end) {
  const int g = threadIdx.x % kWarp / 4, c = threadIdx.x % 4;
#pragma unroll
  for (float& x : reinterpret_cast<float (&)[4 * kCount]>(d)) x = 0.0f;
#pragma unroll
  for (int k = 0; k < kInner; k += 8) {
    if (k < begin || k >= end) continue;
    const float* a = left + g * kLowerRow + k + c;
    const Split a0(a[0]), a1(a[8 * kLowerRow]), a2(a[4]), a3(a[8 * kLowerRow + 4]);
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      const float* b = right + (k + c) * kLowerRow + 8 * n + g;
      const Split b0(b[0]), b1(b[4 * kLowerRow]);
      ptx::mma_tf32(d[n], {a0.low, a1.low, a2.low, a3.low}, b0.high, b1.high);
      ptx::mma_tf32(d[n], {a0.high, a1.high, a2.high, a3.high}, b0.low, b1.low);
      ptx::mma_tf32(d[n], {a0.high, a1.high, a2.high, a3.high}, b0.high, b1.high);
    }
  }
}

template <int kCount> __device__ __forceinline__ void put_blocks(float* at, const float (&d)[kCount][4], float sign) {
  float* to = at + threadIdx.x % kWarp / 4 * kLowerRow + threadIdx.x % 4 * 2;
#pragma unroll
  for (int n = 0; n < kCount; ++n) {
    *reinterpret_cast<float2*>(to + 8 * n) = {sign * d[n][0], sign * d[n][1]};
    *reinterpret_cast<float2*>(to + 8 * n + 8 * kLowerRow) = {sign * d[n][2], sign * d[n][3]};
  }
}

// Joins two inverted blocks of kSize tokens, from `first` on: below them stands -second (lower first). A warp takes 16
// rows and kColumns columns from (row, column) of the block; the product in brackets stands above, where s > t: there,
// the inverted blocks are taken for zero.
template <int kSize, int kColumns>
__device__ __forceinline__ void join(Shared& s, int first, int row, int column) {
  const int second = first + kSize, begin = column / kBlock * kBlock, end = row + kBlock;
  float d[kColumns / 8][4];
  float (&lower)[kChunk][kLowerRow] = s.made.lower;
  multiply_exactly<kSize>(d, &lower[second + row][first], &lower[first][first + column], begin, kSize);
  put_blocks(&lower[first + row][second + column], d, 1.0f);
  __syncthreads();
  multiply_exactly<kSize>(d, &lower[second + row][second], &lower[first][second + column], 0, end);
  put_blocks(&lower[second + row][first + column], d, -1.0f);
  __syncthreads();
}

// Half a row of the inverse, times beta_s.
__device__ __forceinline__ void put_solve(Shared& s) {
  const int t = threadIdx.x / 2, first = threadIdx.x % 2 * (kChunk / 2);
#pragma unroll
  for (int from = first; from < first + kChunk / 2; from += 8) {
    if (from / kBlock > t / kBlock) continue;
    const float4* x    = reinterpret_cast<const float4*>(&s.made.lower[t][from]);  // 0 where s > t
    const float4* beta = reinterpret_cast<const float4*>(&s.beta[from]);
    *reinterpret_cast<uint4*>(s.made.products.solve.at(t, from)) = {
        to_pair<In>(x[0].x * beta[0].x, x[0].y * beta[0].y), to_pair<In>(x[0].z * beta[0].z, x[0].w * beta[0].w),
        to_pair<In>(x[1].x * beta[1].x, x[1].y * beta[1].y), to_pair<In>(x[1].z * beta[1].z, x[1].w * beta[1].w)};
  }
}

__device__ __forceinline__ void put_factors(const Operands& p, Shared& s) {
  const int t = threadIdx.x;
  if (t >= kChunk) return;
  ChunkProducts<In>& products = s.made.products;
  const float since_first = s.since_first[t] * decay_of_blocks(s, 0, t / kBlock);
  const float until_end   = s.until_end[t] * decay_of_blocks(s, t / kBlock + 1, kBlocks);
  products.state_factor[t] = since_first * s.key_norm[t];
  products.end_factor[t]   = until_end * s.key_norm[t];
  products.query_factor[t] = since_first * s.query_norm[t] * p.scale;
  if (t == kChunk - 1) *reinterpret_cast<float4*>(products.decay) = {since_first, 0.0f, 0.0f, 0.0f};
}

// ---- kernel ----------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kThreads, 5) gdn_prefill_products(
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
  put_products(p, s, of_keys, of_queries);
  put_factors(p, s);
  __syncwarp();
  invert_block(s);  // of the warp's own rows
  __syncthreads();
  const int warp = threadIdx.x / kWarp;
  join<kBlock, 8>(s, warp / 2 * 2 * kBlock, 0, warp % 2 * 8);
  join<2 * kBlock, kBlock>(s, 0, warp / 2 * kBlock, warp % 2 * kBlock);
  put_solve(s);
  __syncthreads();
  const ChunkProducts<In>& made = s.made.products;
  uint4*       to   = reinterpret_cast<uint4*>(p.products + (place * p.heads + head) * sizeof(made));
  const uint4* from = reinterpret_cast<const uint4*>(&made);
  for (int i = threadIdx.x; i < int(sizeof(made) / 16); i += kThreads) to[i] = from[i];
}

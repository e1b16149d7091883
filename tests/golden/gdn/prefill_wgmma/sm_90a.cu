// gdn_prefill_wgmma, generated from templates/gdn/prefill_wgmma.cu.j2
// spec: {"divided":true,"dtype":"bf16","fused":false,"head_dim":128,"rows":64,"value_dim":128}
//
// The delta rule for whole prompts, second kernel, on the warpgroup products of sm_90a: the chunks of a sequence in
// their order. A CTA takes kTileV rows (V index) of one head's state and a chunk of tokens at once. Each consumer, a
// warpgroup, has 64 of the rows in registers, in float32:
//   u = (v - state h k) solve^T
//   out = query h q + u attend^T
//   h becomes decay h + (end u) k^T
// Every product has h or u as its left operand, which stays in registers as the tensor cores left it; right operands
// are k, q and the products of the first kernel, in shared memory. Left operands are rounded to 16 bits; sums are
// float32. The last warpgroup, the producer, copies them into a ring of stages: `full` tells that a stage's copies are
// there. Outputs are left in the place of v; `empty` tells that all are through, and the producer stores the outputs
// before the stage's next copies.
// Two consumers take turns to start their products, so that what one does beside them falls into the other's:
//   turn      | u attend^T  u k^T  h k  h q of the next chunk |
//   no turn   | decay h, rest of v, u                         |
// One consumer alone leaves h and u in shared memory, in two places in turn, to a warpgroup for the outputs: `full` and
// `empty` of `between`.
// With kFused there is no first kernel: the producer prepares what is of single tokens, `ready`, and another warpgroup,
// the maker, makes the products, `made`. A stage goes from one to the next, and each has another one at a time:
//   producer  | outputs of c - 3 | k, q, v, norms, factors of c: ready              |
//   maker     | inverse, q k^T of c - 1: made, and k k^T of c beside its last blocks |
//   consumers | h k, h q, u of c - 2 | u attend, u k^T of c - 2, outputs: empty      |
// There consumers take no turns: they wait for the maker, and turns made one wait for the other, too.
// gdn/prefill_parts, kAlone, has only h, for parts of sequences from no state; gdn/prefill_join makes of that the state
// before each part; then, kDivided, parts take the place of sequences here.

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

// ---- partials/ring ---------------------------------------------------------
// The slot of a ring that a thread is at, and the parity of the current phase of that slot's barrier.
template <int kSize> struct Ring {
  uint32 slot = 0, parity = 0;
  __device__ __forceinline__ void advance() {
    if (++slot == kSize) slot = 0, parity ^= 1;
  }
};

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
__device__ __forceinline__ void store_matrices(uint32 to, const uint32 (&r)[1]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%0], {%1};" ::"r"(to), "r"(r[0]) : "memory");
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
//   solve  = (1 + strictly lower part of beta_t E_ts k_s k_t)^-1 beta_s:  u = solve (v - state h k)
//   attend = lower part of scale E_ts k_s q_t:                            out = attend u + query h q
// where k and q in the brackets are not normalised, as their norms are parts of the factors.
struct ChunkFactors {
  float state[kChunk];  // D_t / |k_t|
  float end[kChunk];    // E_tT / |k_t|, T the last token
  float query[kChunk];  // D_t scale / |q_t|
  float decay[4];       // D_T, and nothing
};
template <typename In> struct ChunkProducts {
  Lower<In>    solve, attend;
  ChunkFactors factors;
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

// The place of a sequence's first chunk among the chunks of all sequences, or of its first part of `size` tokens among
// all parts. Its others follow, and none meets another sequence's: ceil(length / size) <= the distance to the next
// sequence's place.
__device__ __forceinline__ int64 place_of(int64 first, int64 n, int64 size = kChunk) { return first / size + n; }

// The sequence whose chunk or part may be at a place; -1: there is none. By whole warps.
template <typename Operands>
__device__ __forceinline__ int64 sequence_of(const Operands& p, int64 place, int64 size = kChunk) {
  int64 after = 0;  // sequences whose place is not behind this one
  for (int64 n = threadIdx.x % kWarp;; n += kWarp) {
    const bool before = n < p.sequences &&
        place_of(token_at(p.cu_seqlens, p.cu_seqlens_bytes, n, p.tokens), n, size) <= place;
    const uint32 votes = __ballot_sync(~0u, before);
    after += __popc(votes);
    if (votes != ~0u) return after - 1;
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

// ---- gdn/squares -----------------------------------------------------------
// Products of 16 x 16 matrices, of 16-bit floats in shared memory. With g = lane / 4 and c = lane % 4, a left operand's
// registers are pairs in row g or g + 8 and columns 2 c or 2 c + 8; a right one's are the same of its rows, which are
// columns of the product. Element i of block n of a product has row g + i / 2 * 8 and column 8 n + 2 c + i % 2.

// The row whose address a lane gives to load an operand, and which half of it.
__device__ __forceinline__ int left_row(uint32 thread = threadIdx.x) { return thread % 16; }
__device__ __forceinline__ int left_half(uint32 thread = threadIdx.x) { return thread / 16 % 2; }
__device__ __forceinline__ int right_row(uint32 thread = threadIdx.x) { return thread % 8 + thread / 16 % 2 * 8; }
__device__ __forceinline__ int right_half(uint32 thread = threadIdx.x) { return thread / 8 % 2; }

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

// ---- gdn/swizzle -----------------------------------------------------------
// 64 rows of 128 bytes, whose pieces of 16 bytes are where the 128-byte swizzle has them.
template <typename In> struct alignas(1024) Swizzled {
  In rows[kChunk][kChunk];
  __device__ __forceinline__ uint32 at(int row, int column) {
    return ptx::shared_address(&rows[row][(column / 8 ^ row % 8) * 8]);
  }
};
// ---- gdn/prefill_inverse ---------------------------------------------------
// The triangular inverse of a chunk: that of 16 x 16 blocks by substitution in float32, a row by a thread; the rest by
// products of blocks on the tensor cores, with each number as the sum of two bf16 numbers, which is exact to 2^-16 of
// it; or, without kExact, rounded to f16. It goes to a Lower or to a Swizzled.
constexpr int kSpanRow = kBlock + 4;

// Numbers of a lower part: with kExact, as sums of two.
template <bool kExact> struct Parts {
  Lower<bf16> high, low;
};
template <> struct Parts<false> {
  Lower<f16> whole;
};
// What the inverse is made of.
template <bool kExact> struct alignas(16) Inverting {
  // Below the diagonal blocks, beta_t E_ts k_s k_t; in them, the inverse of 1 + their part of that.
  Parts<kExact> lower;
  float diagonal[kBlocks][kBlock][kSpanRow];  // [t / kBlock][s % kBlock][t % kBlock] of that, 0 where s >= t
};
// Numbers of tokens.
struct alignas(16) OfTokens {
  float spans[kBlocks][kBlock][kSpanRow];  // [t / kBlock][t % kBlock][s % kBlock]: E_ts in a block; 0 where s > t
  float decay[kChunk], beta[kChunk];           // 1 and 0 beyond the last token
  float key_norm[kChunk], query_norm[kChunk];  // 1 / length; without normalisation 1
  float since_first[kChunk], until_end[kChunk];  // D_t and E_tT, as if t's block were all
  float before[kBlocks][kChunk];  // [i][s], where s is before block i: E_ts / |k_s|, t the last token before the block
  float4 rows[kChunk];  // beta_t / |k_t|, scale / |q_t|, and both times D_t in the block
};

template <class Matrix> struct Element;
template <typename In> struct Element<Lower<In>> { using Type = In; };
template <typename In> struct Element<Swizzled<In>> { using Type = In; };
template <class Matrix> using ElementOf = typename Element<Matrix>::Type;

// A thread's pairs in a matrix: those at columns 8 n + 2 c of rows g and g + 8 of a block of rows.
template <class Matrix> class Pairs;
template <typename In> class Pairs<Lower<In>> {
 public:
  // From block `first` of the row of blocks `row` on.
  __device__ __forceinline__ Pairs(uint32 thread, int row, int first)
      : at_{at(thread, Lower<In>::block(row, first), 0), at(thread, Lower<In>::block(row, first), 1)} {}
  // Returns the pair `down` blocks further down, if the row is 0.
  template <typename T> __device__ __forceinline__ uint32& in(Lower<T>& lower, int down, int n, int half) const {
    const int blocks = Lower<In>::block(down, 0) + n / 2;
    return *reinterpret_cast<uint32*>(
        &lower.blocks[0][0][0] + at_[n % 2] + blocks * kBlockSize + half * (8 * kBlock));
  }

 private:
  static constexpr int kBlockSize = kBlock * kBlock;
  static __device__ __forceinline__ int at(uint32 thread, int block, int half) {
    return block * kBlockSize + Lower<In>::place(thread % kWarp / 4, half) + thread % 4 * 2;
  }
  const int at_[2];
};
template <typename In> class Pairs<Swizzled<In>> {
 public:
  __device__ __forceinline__ Pairs(uint32 thread, int row, int first)
      : at_((row * kBlock + thread % kWarp / 4) * kChunk + thread % 4 * 2), piece_(2 * first ^ thread % kWarp / 4) {}
  __device__ __forceinline__ uint32& in(Swizzled<In>& square, int down, int n, int half) const {
    const int rows = down * kBlock + half * 8;
    return *reinterpret_cast<uint32*>(&square.rows[0][0] + at_ + rows * kChunk + (piece_ ^ n) * 8);
  }

 private:
  const int at_, piece_;
};

// Half a row of a block on the diagonal.
template <typename In> __device__ __forceinline__ uint4& piece_of(Lower<In>& x, int block, int row, int half) {
  return *reinterpret_cast<uint4*>(&x.blocks[Lower<In>::block(block, block)][0][Lower<In>::place(row, half)]);
}
template <typename In> __device__ __forceinline__ uint4& piece_of(Swizzled<In>& x, int block, int row, int half) {
  return *reinterpret_cast<uint4*>(&x.rows[block * kBlock + row][(2 * block + half ^ row % 8) * 8]);
}

// Two numbers as the sum of two pairs.
struct Split {
  uint32 high, low;
  __device__ __forceinline__ Split(float x, float y)
      : high(to_pair<bf16>(x, y)), low(to_pair<bf16>(x - ::low<bf16>(high), y - ::high<bf16>(high))) {}
};

// Stores a pair where `pairs` has it.
__device__ __forceinline__ void put_pair(
    Parts<true>& to, const Pairs<Lower<bf16>>& pairs, int n, int half, float x, float y) {
  const Split parts(x, y);
  pairs.in(to.high, 0, n, half) = parts.high, pairs.in(to.low, 0, n, half) = parts.low;
}
__device__ __forceinline__ void put_pair(
    Parts<false>& to, const Pairs<Lower<bf16>>& pairs, int n, int half, float x, float y) {
  pairs.in(to.whole, 0, n, half) = to_pair<f16>(x, y);
}

// A row of a block on the diagonal, which lanes t and t + 16 have.
__device__ __forceinline__ void put_row(Parts<true>& to, const float (&x)[kBlock], int block, uint32 thread) {
  const bool upper = thread % kWarp < kBlock;
  uint32 parts[kBlock / 2];
#pragma unroll
  for (int i = 0; i < kBlock / 2; ++i) {
    const Split split(x[2 * i], x[2 * i + 1]);
    parts[i] = upper ? split.high : split.low;
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    piece_of(upper ? to.high : to.low, block, thread % kBlock, half) = {
        parts[4 * half], parts[4 * half + 1], parts[4 * half + 2], parts[4 * half + 3]};
  }
}
__device__ __forceinline__ void put_row(Parts<false>& to, const float (&x)[kBlock], int block, uint32 thread) {
  if (thread % kWarp >= kBlock) return;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float* const y = &x[8 * half];
    piece_of(to.whole, block, thread % kBlock, half) = {
        to_pair<f16>(y[0], y[1]), to_pair<f16>(y[2], y[3]), to_pair<f16>(y[4], y[5]), to_pair<f16>(y[6], y[7])};
  }
}

// The warp inverts 1 + its block on the diagonal; lanes t and t + 16 have row t: x (1 + block) = 1.
template <bool kExact, class Matrix>
__device__ __forceinline__ void invert_block(
    const OfTokens& s, Inverting<kExact>& made, Matrix& to_solve, int block, uint32 thread) {
  using In = ElementOf<Matrix>;
  const int row = thread % kBlock;
  float x[kBlock];
#pragma unroll
  for (int from = kBlock - 1; from >= 0; --from) {
    float sums[2] = {row == from ? 1.0f : 0.0f, 0.0f};
#pragma unroll
    for (int t = kBlock - 4; t >= (from + 1) / 4 * 4; t -= 4) {  // the newest x last, as it is waited for
      const float4 a = *reinterpret_cast<const float4*>(&made.diagonal[block][from][t]);
      const float factors[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
      for (int i = 3; i >= 0; --i) {
        if (t + i > from) sums[i % 2] = fmaf(-factors[i], x[t + i], sums[i % 2]);
      }
    }
    x[from] = sums[0] + sums[1];
  }
  put_row(made.lower, x, block, thread);
  if (thread % kWarp < kBlock) return;
#pragma unroll
  for (int i = 0; i < kBlock; i += 8) {
    const float4 first = *reinterpret_cast<const float4*>(&s.beta[kBlock * block + i]);
    const float4 second = *reinterpret_cast<const float4*>(&s.beta[kBlock * block + i + 4]);
    piece_of(to_solve, block, row, i / 8) = {
        to_pair<In>(x[i] * first.x, x[i + 1] * first.y), to_pair<In>(x[i + 2] * first.z, x[i + 3] * first.w),
        to_pair<In>(x[i + 4] * second.x, x[i + 5] * second.y), to_pair<In>(x[i + 6] * second.z, x[i + 7] * second.w)};
  }
}

// A 16 x 16 matrix as a left operand, in as many parts.
template <bool kExact> struct LeftParts {
  uint4 high, low;
  LeftParts() = default;
  __device__ __forceinline__ explicit LeftParts(const float (&x)[2][4]) {
    const Split a(x[0][0], x[0][1]), b(x[0][2], x[0][3]), c(x[1][0], x[1][1]), d(x[1][2], x[1][3]);
    high = {a.high, b.high, c.high, d.high}, low = {a.low, b.low, c.low, d.low};
  }
  // A block of `lower`, transposed. lane: its bytes to where it loads in a block.
  __device__ __forceinline__ LeftParts(const Parts<true>& lower, int block, uint32 lane)
      : high(ptx::load_matrices_transposed(ptx::shared_address(lower.high.blocks[block]) + lane)),
        low(ptx::load_matrices_transposed(ptx::shared_address(lower.low.blocks[block]) + lane)) {}
};
template <> struct LeftParts<false> {
  uint4 whole;
  LeftParts() = default;
  __device__ __forceinline__ explicit LeftParts(const float (&x)[2][4])
      : whole{to_pair<f16>(x[0][0], x[0][1]), to_pair<f16>(x[0][2], x[0][3]), to_pair<f16>(x[1][0], x[1][1]),
              to_pair<f16>(x[1][2], x[1][3])} {}
  __device__ __forceinline__ LeftParts(const Parts<false>& lower, int block, uint32 lane)
      : whole(ptx::load_matrices_transposed(ptx::shared_address(lower.whole.blocks[block]) + lane)) {}
};

// The sum of products of 16 x 16 matrices, of each of their parts apart, so that fewer products wait for another.
template <bool kExact> struct Sums {
  float parts[3][2][4] = {};

  // Adds left times a block of `lower`, transposed. lane: its bytes to where it loads in a block.
  __device__ __forceinline__ void add(const LeftParts<true>& left, const Parts<true>& lower, int block, uint32 lane) {
    const uint4 high = ptx::load_matrices(ptx::shared_address(lower.high.blocks[block]) + lane);
    const uint4 low  = ptx::load_matrices(ptx::shared_address(lower.low.blocks[block]) + lane);
    multiply<bf16>(parts[0][0], parts[0][1], left.low, high);
    multiply<bf16>(parts[1][0], parts[1][1], left.high, low);
    multiply<bf16>(parts[2][0], parts[2][1], left.high, high);
  }
  __device__ __forceinline__ float operator()(int n, int i) const {
    return (parts[0][n][i] + parts[1][n][i]) + parts[2][n][i];
  }
};
template <> struct Sums<false> {
  float whole[2][4] = {};

  __device__ __forceinline__ void add(const LeftParts<false>& left, const Parts<false>& lower, int block, uint32 lane) {
    multiply<f16>(whole[0], whole[1], left.whole,
                  ptx::load_matrices(ptx::shared_address(lower.whole.blocks[block]) + lane));
  }
  __device__ __forceinline__ float operator()(int n, int i) const { return whole[n][i]; }
};

// The warp's block of columns of the inverse X, below the diagonal, from the blocks A of the matrix:
//   X_ij = -X_ii sum of A_ik X_kj over j <= k < i
// All are transposed here, so that sums turn into left operands in registers.
// barriers: wait(i) waits for block i on the diagonal, and those before it in its row.
template <bool kExact, class Matrix, class Barriers>
__device__ __forceinline__ void put_columns(
    const OfTokens& s, Inverting<kExact>& made, Matrix& to_solve, int j, uint32 thread, Barriers barriers) {
  if (j == kBlocks - 1) return;
  using In  = ElementOf<Matrix>;
  using Low = Lower<bf16>;
  const int    g = thread % kWarp / 4, own = Low::block(j, j);
  const uint32 lane = Low::place(right_row(thread), right_half(thread)) * 2;
  const float  beta[2] = {s.beta[kBlock * j + g], s.beta[kBlock * j + g + 8]};
  const Pairs<Matrix> pairs(thread, 0, j);
  LeftParts<kExact> x[kBlocks - 1];  // X_kj
#pragma unroll
  for (int k = 0; k < kBlocks - 1; ++k) {
    if (k == j) x[k] = LeftParts<kExact>(made.lower, own, lane);
  }
#pragma unroll
  for (int i = 1; i < kBlocks; ++i) {
    if (i <= j) continue;
    barriers.wait(i);
    Sums<kExact> sums, products;
    float        result[2][4];
#pragma unroll
    for (int k = 0; k < i; ++k) {
      if (k >= j) sums.add(x[k], made.lower, Low::block(i, k), lane);
    }
#pragma unroll
    for (int at = 0; at < 8; ++at) result[at / 4][at % 4] = sums(at / 4, at % 4);
    products.add(LeftParts<kExact>(result), made.lower, Low::block(i, i), lane);
#pragma unroll
    for (int at = 0; at < 8; ++at) result[at / 4][at % 4] = -products(at / 4, at % 4);
    if (i < kBlocks - 1) x[i] = LeftParts<kExact>(result);
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const float* const pair = &result[n / 2][n % 2 * 2];
      pairs.in(to_solve, i, n % 2, n / 2) =
          ptx::transpose(to_pair<In>(pair[0] * beta[n % 2], pair[1] * beta[n % 2]));
    }
  }
}
// ---- partials/fence_proxy --------------------------------------------------
namespace ptx {
// Makes this thread's writes to shared memory visible to the copy engine and to the tensor cores.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
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

// ---- partials/named_barriers -----------------------------------------------
// Barriers of the CTA, by number; 0 is that of __syncthreads(). `threads` counts those that arrive or wait, all of them
// in whole warps.
namespace ptx {
__device__ __forceinline__ void barrier_arrive(int i, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(i), "r"(threads) : "memory");
}
// Arrives, and waits for the others.
__device__ __forceinline__ void barrier_sync(int i, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(i), "r"(threads) : "memory");
}
}  // namespace ptx

// ---- partials/warpgroup ----------------------------------------------------
// Warpgroups: the order of their matrix products, and the number of their registers.
namespace ptx {
// To be called before the first product, and whenever registers of a product were written.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until all but the last kAllowed groups of products are complete.
template <int kAllowed>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kAllowed) : "memory");
}

// Sets the number of registers of each thread: one warpgroup gives some back, the others get them.
template <int N> __device__ __forceinline__ void registers_fewer() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N> __device__ __forceinline__ void registers_more() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

// Reads threadIdx.x again, so that no register must hold it, or what is computed from it, where registers are few.
__device__ __forceinline__ uint32 thread_index() {
  uint32 i;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(i));
  return i;
}
}  // namespace ptx

// ---- gdn/wgmma -------------------------------------------------------------
// Matrix products of warpgroups with their left operand in registers.
namespace ptx {
// The descriptor of a matrix of 16-bit floats in rows of 128 bytes with the 128-byte swizzle, in blocks of 64 columns
// that are `across` bytes apart. It is in units of 16 bytes.
__device__ __forceinline__ uint64 wgmma_matrix(uint32 address, uint32 across) {
  return uint64(address & 0x3FFFFu) >> 4 | uint64(across / 16) << 16 | uint64(1024 / 16) << 32 | uint64(1) << 62;
}
// d += a b of 64 x 16 by 16 x 8 N. The rows of b's matrix are columns of the product, and 16 of its columns are taken;
// or with kDepth they are its depth, and 16 of them are. With g = lane / 4 and c = lane % 4, warp w of a warpgroup has
// in a rows 16 w + g and + 8 of columns 2 c and the next, then of columns 2 c + 8 and the next; and in d[n][i] row
// 16 w + g + i / 2 * 8, column 8 n + 2 c + i % 2. Neither may be accessed before a wait. Without kAdd d = a b.
template <typename In, bool kDepth, bool kAdd, int N> __device__ void wgmma(float (&d)[N][4], uint4 a, uint64 b);
template <> __device__ __forceinline__ void wgmma<bf16, 0, 0, 8>(
    float (&d)[8][4], uint4 a, uint64 b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
               "}, {%32, %33, %34, %35}, %36, 0, 1, 1, 0;"
               : "=f"(d[0][0]), "=f"(d[0][1]), "=f"(d[0][2]), "=f"(d[0][3])
               , "=f"(d[1][0]), "=f"(d[1][1]), "=f"(d[1][2]), "=f"(d[1][3])
               , "=f"(d[2][0]), "=f"(d[2][1]), "=f"(d[2][2]), "=f"(d[2][3])
               , "=f"(d[3][0]), "=f"(d[3][1]), "=f"(d[3][2]), "=f"(d[3][3])
               , "=f"(d[4][0]), "=f"(d[4][1]), "=f"(d[4][2]), "=f"(d[4][3])
               , "=f"(d[5][0]), "=f"(d[5][1]), "=f"(d[5][2]), "=f"(d[5][3])
               , "=f"(d[6][0]), "=f"(d[6][1]), "=f"(d[6][2]), "=f"(d[6][3])
               , "=f"(d[7][0]), "=f"(d[7][1]), "=f"(d[7][2]), "=f"(d[7][3])
               : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b));
}
template <> __device__ __forceinline__ void wgmma<bf16, 0, 1, 8>(
    float (&d)[8][4], uint4 a, uint64 b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
               "}, {%32, %33, %34, %35}, %36, 1, 1, 1, 0;"
               : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3])
               , "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3])
               , "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3])
               , "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3])
               , "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3])
               , "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3])
               , "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3])
               , "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3])
               : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b));
}
template <> __device__ __forceinline__ void wgmma<bf16, 1, 1, 8>(
    float (&d)[8][4], uint4 a, uint64 b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
               "}, {%32, %33, %34, %35}, %36, 1, 1, 1, 1;"
               : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3])
               , "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3])
               , "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3])
               , "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3])
               , "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3])
               , "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3])
               , "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3])
               , "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3])
               : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b));
}
template <> __device__ __forceinline__ void wgmma<bf16, 1, 1, 16>(
    float (&d)[16][4], uint4 a, uint64 b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
               "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
               "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
               "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;"
               : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3])
               , "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3])
               , "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3])
               , "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3])
               , "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3])
               , "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3])
               , "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3])
               , "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3])
               , "+f"(d[8][0]), "+f"(d[8][1]), "+f"(d[8][2]), "+f"(d[8][3])
               , "+f"(d[9][0]), "+f"(d[9][1]), "+f"(d[9][2]), "+f"(d[9][3])
               , "+f"(d[10][0]), "+f"(d[10][1]), "+f"(d[10][2]), "+f"(d[10][3])
               , "+f"(d[11][0]), "+f"(d[11][1]), "+f"(d[11][2]), "+f"(d[11][3])
               , "+f"(d[12][0]), "+f"(d[12][1]), "+f"(d[12][2]), "+f"(d[12][3])
               , "+f"(d[13][0]), "+f"(d[13][1]), "+f"(d[13][2]), "+f"(d[13][3])
               , "+f"(d[14][0]), "+f"(d[14][1]), "+f"(d[14][2]), "+f"(d[14][3])
               , "+f"(d[15][0]), "+f"(d[15][1]), "+f"(d[15][2]), "+f"(d[15][3])
               : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b));
}
template <> __device__ __forceinline__ void wgmma<f16, 0, 0, 8>(
    float (&d)[8][4], uint4 a, uint64 b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {"
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
               "}, {%32, %33, %34, %35}, %36, 0, 1, 1, 0;"
               : "=f"(d[0][0]), "=f"(d[0][1]), "=f"(d[0][2]), "=f"(d[0][3])
               , "=f"(d[1][0]), "=f"(d[1][1]), "=f"(d[1][2]), "=f"(d[1][3])
               , "=f"(d[2][0]), "=f"(d[2][1]), "=f"(d[2][2]), "=f"(d[2][3])
               , "=f"(d[3][0]), "=f"(d[3][1]), "=f"(d[3][2]), "=f"(d[3][3])
               , "=f"(d[4][0]), "=f"(d[4][1]), "=f"(d[4][2]), "=f"(d[4][3])
               , "=f"(d[5][0]), "=f"(d[5][1]), "=f"(d[5][2]), "=f"(d[5][3])
               , "=f"(d[6][0]), "=f"(d[6][1]), "=f"(d[6][2]), "=f"(d[6][3])
               , "=f"(d[7][0]), "=f"(d[7][1]), "=f"(d[7][2]), "=f"(d[7][3])
               : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b));
}
template <> __device__ __forceinline__ void wgmma<f16, 0, 1, 8>(
    float (&d)[8][4], uint4 a, uint64 b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {"
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
               "}, {%32, %33, %34, %35}, %36, 1, 1, 1, 0;"
               : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3])
               , "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3])
               , "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3])
               , "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3])
               , "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3])
               , "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3])
               , "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3])
               , "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3])
               : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b));
}
template <> __device__ __forceinline__ void wgmma<f16, 1, 1, 8>(
    float (&d)[8][4], uint4 a, uint64 b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {"
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
               "}, {%32, %33, %34, %35}, %36, 1, 1, 1, 1;"
               : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3])
               , "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3])
               , "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3])
               , "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3])
               , "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3])
               , "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3])
               , "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3])
               , "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3])
               : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b));
}
template <> __device__ __forceinline__ void wgmma<f16, 1, 1, 16>(
    float (&d)[16][4], uint4 a, uint64 b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {"
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
               "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
               "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
               "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;"
               : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3])
               , "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3])
               , "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3])
               , "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3])
               , "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3])
               , "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3])
               , "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3])
               , "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3])
               , "+f"(d[8][0]), "+f"(d[8][1]), "+f"(d[8][2]), "+f"(d[8][3])
               , "+f"(d[9][0]), "+f"(d[9][1]), "+f"(d[9][2]), "+f"(d[9][3])
               , "+f"(d[10][0]), "+f"(d[10][1]), "+f"(d[10][2]), "+f"(d[10][3])
               , "+f"(d[11][0]), "+f"(d[11][1]), "+f"(d[11][2]), "+f"(d[11][3])
               , "+f"(d[12][0]), "+f"(d[12][1]), "+f"(d[12][2]), "+f"(d[12][3])
               , "+f"(d[13][0]), "+f"(d[13][1]), "+f"(d[13][2]), "+f"(d[13][3])
               , "+f"(d[14][0]), "+f"(d[14][1]), "+f"(d[14][2]), "+f"(d[14][3])
               , "+f"(d[15][0]), "+f"(d[15][1]), "+f"(d[15][2]), "+f"(d[15][3])
               : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b));
}
// The same with a in shared memory, 16 columns of 64 rows, and 64 rows of b.
template <typename In, bool kAdd> __device__ void wgmma_shared(float (&d)[8][4], uint64 a, uint64 b);
template <> __device__ __forceinline__ void wgmma_shared<bf16, 0>(float (&d)[8][4], uint64 a, uint64 b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
               "}, %32, %33, 0, 1, 1, 0, 0;"
               : "=f"(d[0][0]), "=f"(d[0][1]), "=f"(d[0][2]), "=f"(d[0][3])
               , "=f"(d[1][0]), "=f"(d[1][1]), "=f"(d[1][2]), "=f"(d[1][3])
               , "=f"(d[2][0]), "=f"(d[2][1]), "=f"(d[2][2]), "=f"(d[2][3])
               , "=f"(d[3][0]), "=f"(d[3][1]), "=f"(d[3][2]), "=f"(d[3][3])
               , "=f"(d[4][0]), "=f"(d[4][1]), "=f"(d[4][2]), "=f"(d[4][3])
               , "=f"(d[5][0]), "=f"(d[5][1]), "=f"(d[5][2]), "=f"(d[5][3])
               , "=f"(d[6][0]), "=f"(d[6][1]), "=f"(d[6][2]), "=f"(d[6][3])
               , "=f"(d[7][0]), "=f"(d[7][1]), "=f"(d[7][2]), "=f"(d[7][3])
               : "l"(a), "l"(b));
}
template <> __device__ __forceinline__ void wgmma_shared<bf16, 1>(float (&d)[8][4], uint64 a, uint64 b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
               "}, %32, %33, 1, 1, 1, 0, 0;"
               : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3])
               , "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3])
               , "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3])
               , "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3])
               , "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3])
               , "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3])
               , "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3])
               , "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3])
               : "l"(a), "l"(b));
}
template <> __device__ __forceinline__ void wgmma_shared<f16, 0>(float (&d)[8][4], uint64 a, uint64 b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {"
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
               "}, %32, %33, 0, 1, 1, 0, 0;"
               : "=f"(d[0][0]), "=f"(d[0][1]), "=f"(d[0][2]), "=f"(d[0][3])
               , "=f"(d[1][0]), "=f"(d[1][1]), "=f"(d[1][2]), "=f"(d[1][3])
               , "=f"(d[2][0]), "=f"(d[2][1]), "=f"(d[2][2]), "=f"(d[2][3])
               , "=f"(d[3][0]), "=f"(d[3][1]), "=f"(d[3][2]), "=f"(d[3][3])
               , "=f"(d[4][0]), "=f"(d[4][1]), "=f"(d[4][2]), "=f"(d[4][3])
               , "=f"(d[5][0]), "=f"(d[5][1]), "=f"(d[5][2]), "=f"(d[5][3])
               , "=f"(d[6][0]), "=f"(d[6][1]), "=f"(d[6][2]), "=f"(d[6][3])
               , "=f"(d[7][0]), "=f"(d[7][1]), "=f"(d[7][2]), "=f"(d[7][3])
               : "l"(a), "l"(b));
}
template <> __device__ __forceinline__ void wgmma_shared<f16, 1>(float (&d)[8][4], uint64 a, uint64 b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {"
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
               "}, %32, %33, 1, 1, 1, 0, 0;"
               : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3])
               , "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3])
               , "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3])
               , "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3])
               , "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3])
               , "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3])
               , "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3])
               , "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3])
               : "l"(a), "l"(b));
}
// Arrives at a barrier once this thread's copies are complete.
__device__ __forceinline__ void copy_async_arrive(Barrier* b) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(b)) : "memory");
}
// Waits for all but the last kAllowed groups of products, before the sums in d are read.
template <int kAllowed, int N> __device__ __forceinline__ void wgmma_wait_for(float (&d)[N][4]) {
  wgmma_wait<kAllowed>();
#pragma unroll
  for (int i = 0; i < 4 * N; ++i) asm volatile("" : "+f"(d[i / 4][i % 4])::"memory");
}
}  // namespace ptx
// ---- gdn/prefill_make ------------------------------------------------------
// What a chunk needs that does not depend on the state, by a warpgroup. Products of keys with keys and queries run on
// the tensor cores, exact up to float32 sums. A warp has the tokens of a block of rows where products are made, and a
// block of columns where the inverse is. Operands: scale and l2norm.
constexpr int   kMakers  = 2 * kChunk;  // threads
constexpr float kNormEps = 1e-6f;
static_assert(kMakers == kBlocks * kWarp, "a block of tokens for each warp");

__device__ __forceinline__ int maker() { return threadIdx.x % kMakers; }

// The gates of a token that a thread has, 1 and 0 beyond the last one.
struct Gates {
  float decay = 1.0f, beta = 0.0f;

  Gates() = default;
  // p: g and beta, where token `first` is the chunk's first one of `tokens`.
  template <class Operands>
  __device__ __forceinline__ Gates(const Operands& p, int64 first, int tokens, int head) {
    if (maker() >= tokens) return;
    const int64 at = (first + maker()) * p.heads + head;
    if (p.g != nullptr) decay = ptx::ld_f32(p.g + at);
    beta = p.beta != nullptr ? ptx::ld_f32(p.beta + at) : 1.0f;
  }
  __device__ __forceinline__ void put(OfTokens& s) const {
    if (maker() >= kChunk) return;
    s.decay[maker()] = decay, s.beta[maker()] = beta;
  }
};

// Thread s multiplies the decays of the tokens after s in its block; the warp's tokens are whole blocks.
__device__ __forceinline__ void put_spans(OfTokens& s, uint32 thread) {
  if (int(thread) >= kChunk) return;
  const int from = int(thread) % kBlock, block = int(thread) / kBlock;
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
  s.until_end[int(thread)] = span;
  __syncwarp();
  s.since_first[int(thread)] = s.spans[block][from][0] * s.decay[block * kBlock];
}
// The decay of blocks [first, end).
__device__ __forceinline__ float decay_of_blocks(const OfTokens& s, int first, int end) {
  float x = 1.0f;
#pragma unroll
  for (int i = 0; i < kBlocks; ++i) x *= first <= i && i < end ? s.since_first[i * kBlock + kBlock - 1] : 1.0f;
  return x;
}

// The block of rows, or of columns, that a warp has. It differs from CTA to CTA, as the work of the blocks does, and a
// warp's place tells which of the SM's schedulers it has.
__device__ __forceinline__ int block_of_warp(uint32 thread) {
  return __shfl_sync(~0u, (int(thread) / kWarp + blockIdx.x) % kBlocks, 0);
}

// [n][i]: tokens t = 16 block + g + i / 2 * 8 and s = 8 n + 2 c + i % 2, with g = lane / 4, c = lane % 4.
using Products = float[kChunk / 8][4];

// The block's squared lengths are on the diagonals of products with itself.
template <class Operands>
__device__ __forceinline__ void put_norms(
    const Operands& p, int block, const float (&alone)[2][4], float* norms, uint32 thread) {
  const int g = thread % kWarp / 4;
  if (thread % 4 != g / 2) return;
  float* const to = norms + kBlock * block + g;
  to[0] = p.l2norm ? ptx::rsqrt_approx((g % 2 ? alone[0][1] : alone[0][0]) + kNormEps) : 1.0f;
  to[8] = p.l2norm ? ptx::rsqrt_approx((g % 2 ? alone[1][3] : alone[1][2]) + kNormEps) : 1.0f;
}

// Starts the products of all rows, keys or queries, with all keys, where warp w has block w.
template <class In, int kWide>
__device__ __forceinline__ void start_products(
    Products& products, Swizzled<In> (&rows)[kWide], Swizzled<In> (&keys)[kWide]) {
  ptx::wgmma_fence();
#pragma unroll
  for (int k = 0; k < kWide * kBlocks; ++k) {
    const uint64 left  = ptx::wgmma_matrix(ptx::shared_address(&rows[k / kBlocks]), sizeof(rows[0])) + k % kBlocks * 2;
    const uint64 right = ptx::wgmma_matrix(ptx::shared_address(&keys[k / kBlocks]), sizeof(keys[0])) + k % kBlocks * 2;
    if (k == 0) ptx::wgmma_shared<In, false>(products, left, right);
    else ptx::wgmma_shared<In, true>(products, left, right);
  }
  ptx::wgmma_commit();
}

// Puts the norms of the block's rows, keys or queries: calls also(wide, x) with 64 columns of them as left operands.
template <class In, int kWide, class Operands, class Also>
__device__ __forceinline__ void norm_rows(
    const Operands& p, Swizzled<In> (&rows)[kWide], int block, float* norms, uint32 thread, Also also) {
  float alone[2][4] = {};
#pragma unroll
  for (int wide = 0; wide < kWide; ++wide) {
    uint4 x[kBlocks];
#pragma unroll
    for (int k = 0; k < kBlocks; ++k) {
      x[k] = ptx::load_matrices(rows[wide].at(kBlock * block + left_row(thread), 16 * k + left_half(thread) * 8));
    }
#pragma unroll
    for (int k = 0; k < kBlocks; ++k) multiply<In>(alone[0], alone[1], x[k], as_right(x[k]));
    also(wide, x);
  }
  put_norms(p, block, alone, norms, thread);
}

// The same, and the products of the block's rows with the keys of all tokens up to them.
template <bool kHasWgmma, class In, int kWide, class Operands>
__device__ __forceinline__ void multiply_rows(
    const Operands& p, Swizzled<In> (&rows)[kWide], Swizzled<In> (&keys)[kWide], int block, Products& products,
    float* norms, uint32 thread) {
  for (float& x : reinterpret_cast<float (&)[kChunk / 2]>(products)) x = 0.0f;
  norm_rows(p, rows, block, norms, thread, [&](int wide, const uint4 (&x)[kBlocks]) {
    if constexpr (kHasWgmma) {
      const uint64 right = ptx::wgmma_matrix(ptx::shared_address(&keys[wide]), sizeof(keys[wide]));
      ptx::wgmma_fence();
#pragma unroll
      for (int k = 0; k < kBlocks; ++k) ptx::wgmma<In, false, true>(products, x[k], right + 2 * k);
      ptx::wgmma_commit();
      ptx::wgmma_wait_for<0>(products);
    } else {
#pragma unroll
      for (int j = 0; j < kBlocks; ++j) {
        if (j > block) continue;
#pragma unroll
        for (int k = 0; k < kBlocks; ++k) {
          const uint32 right = keys[wide].at(kBlock * j + right_row(thread), 16 * k + right_half(thread) * 8);
          multiply<In>(products[2 * j], products[2 * j + 1], x[k], ptx::load_matrices(right));
        }
      }
    }
  });
}

// What products of rows of the warp's block with keys 8 n + 2 c and the next are multiplied with for the keys. All is
// loaded before it is used, so that nothing waits for a single load.
struct KeyFactors {
  float2 of[2 * (kBlocks - 1)];  // norms, and the decay from there to the block
  float2 own[2][2];       // [n % 2][half] in the block: norms, and the decay from there to the row

  __device__ __forceinline__ KeyFactors(const OfTokens& s, int block, uint32 thread) {
    const int g = thread % kWarp / 4, c = thread % 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int    at   = i / 2 * 8 + 2 * c;
      const float2 span = *reinterpret_cast<const float2*>(&s.spans[block][g + i % 2 * 8][at]);
      const float2 norm = *reinterpret_cast<const float2*>(&s.key_norm[block * kBlock + at]);
      own[i / 2][i % 2] = {span.x * norm.x, span.y * norm.y};
    }
#pragma unroll
    for (int n = 0; n < 2 * (kBlocks - 1); ++n) {
      of[n] = n / 2 < block ? *reinterpret_cast<const float2*>(&s.before[block][8 * n + 2 * c]) : float2{};
    }
  }
};

// Calls own(n, half) for a thread's pairs in the block on the diagonal, other(n, half) for those in blocks before it.
template <class Own, class Other> __device__ __forceinline__ void each_pair_of(int block, Own own, Other other) {
#pragma unroll
  for (int j = 0; j < kBlocks; ++j) {
    if (j > block) continue;
    if (j == block) {
#pragma unroll
      for (int i = 0; i < 4; ++i) own(2 * j + i / 2, i % 2);
    } else if (j < kBlocks - 1) {
#pragma unroll
      for (int i = 0; i < 4; ++i) other(2 * j + i / 2, i % 2);
    }
  }
}

// Multiplies products of keys by their factors and stores them, in `lower` and `diagonal`.
template <bool kExact>
__device__ __forceinline__ void put_keys(
    const OfTokens& s, Inverting<kExact>& inverting, int block, const Products& of_keys, uint32 thread) {
  const int g = thread % kWarp / 4, c = thread % 4;
  const KeyFactors factors(s, block, thread);
  const Pairs<Lower<bf16>> pairs(thread, block, 0);
  float own[2], other[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float4 row = s.rows[kBlock * block + g + 8 * half];
    own[half] = row.x, other[half] = row.z;
  }
  each_pair_of(block, [&](int n, int half) {  // in the block
    const int    t = g + 8 * half, at = 8 * n % kBlock + 2 * c;
    const float2 factor = factors.own[n % 2][half];
    const float* const x = &of_keys[n][2 * half];
    inverting.diagonal[block][at][t]     = at < t ? x[0] * (own[half] * factor.x) : 0.0f;
    inverting.diagonal[block][at + 1][t] = at + 1 < t ? x[1] * (own[half] * factor.y) : 0.0f;
  }, [&](int n, int half) {
    const float2 factor = factors.of[n];
    const float* const x = &of_keys[n][2 * half];
    put_pair(inverting.lower, pairs, n, half, x[0] * (other[half] * factor.x), x[1] * (other[half] * factor.y));
  });
}

// The same of queries, as `attend`.
template <class Matrix>
__device__ __forceinline__ void put_queries(
    const OfTokens& s, Matrix& attend, int block, const Products& of_queries, uint32 thread) {
  using In = ElementOf<Matrix>;
  const int g = thread % kWarp / 4, c = thread % 4;
  const KeyFactors factors(s, block, thread);
  const Pairs<Matrix> pairs(thread, block, 0);
  float own[2], other[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float4 row = s.rows[kBlock * block + g + 8 * half];
    own[half] = row.y, other[half] = row.w;
  }
  each_pair_of(block, [&](int n, int half) {  // in the block
    const int    t = g + 8 * half, at = 8 * n % kBlock + 2 * c;
    const float2 factor = factors.own[n % 2][half];
    const float* const y = &of_queries[n][2 * half];
    pairs.in(attend, 0, n, half) =
        to_pair<In>(at <= t ? y[0] * (own[half] * factor.x) : 0.0f, at < t ? y[1] * (own[half] * factor.y) : 0.0f);
  }, [&](int n, int half) {
    const float2 factor = factors.of[n];
    const float* const y = &of_queries[n][2 * half];
    pairs.in(attend, 0, n, half) = to_pair<In>(y[0] * (other[half] * factor.x), y[1] * (other[half] * factor.y));
  });
}

// From spans and norms. Half of the threads have tokens as rows, half as columns.
template <class Operands>
__device__ __forceinline__ void put_factors(const Operands& p, OfTokens& s, ChunkFactors& to, uint32 thread) {
  const int   t = int(thread) % kChunk;
  const float norm = s.key_norm[t];
  if (int(thread) < kChunk) {
    const float in_block = s.since_first[t], since_first = in_block * decay_of_blocks(s, 0, t / kBlock);
    const float key = s.beta[t] * norm, query = s.query_norm[t] * p.scale;
    s.rows[t] = {key, query, key * in_block, query * in_block};
    to.state[t] = since_first * norm;
    to.query[t] = since_first * query;
    if (t == kChunk - 1) *reinterpret_cast<float4*>(to.decay) = {since_first, 0.0f, 0.0f, 0.0f};
  } else {
    float until = s.until_end[t] * norm;
#pragma unroll
    for (int i = 1; i < kBlocks; ++i) {
      if (i <= t / kBlock) continue;
      s.before[i][t] = until;
      until *= s.since_first[i * kBlock + kBlock - 1];
    }
    to.end[t] = until;
  }
}

// Makes a chunk's products and factors from its keys, queries and gates, which are there. `inverting` and `made` are
// where the keys and queries are, and a CTA is one of several of an SM. Barriers: of the warpgroup, and of blocks.
template <bool kHasWgmma, bool kExact, class In, int kWide, class Operands, class Made, class Barriers>
__device__ __forceinline__ void make(
    const Operands& p, Swizzled<In> (&keys)[kWide], Swizzled<In> (&queries)[kWide], OfTokens& s,
    Inverting<kExact>& inverting, Made& made, Barriers barriers) {
  const uint32 thread = ptx::thread_index() % kMakers;
  const int    block  = block_of_warp(thread);
  Products of_keys, of_queries;
  put_spans(s, thread);
  multiply_rows<kHasWgmma>(p, keys, keys, block, of_keys, s.key_norm, thread);
  multiply_rows<kHasWgmma>(p, queries, keys, block, of_queries, s.query_norm, thread);
  barriers.sync();  // spans and norms are there, and nobody reads any more what is overwritten
  put_factors(p, s, made.factors, thread);
  barriers.sync();
  put_keys(s, inverting, block, of_keys, thread);
  __syncwarp();
  invert_block(s, inverting, made.solve, block, thread);
  barriers.done(block);
  put_queries(s, made.attend, block, of_queries, thread);  // the less, the more columns follow
  put_columns(s, inverting, made.solve, block, thread, barriers);
}

// Named barriers, from kFirst on: of all makers, and of each block that warps before it need for their columns.
template <int kFirst> struct MakerBarriers {
  __device__ __forceinline__ void sync() const { ptx::barrier_sync(kFirst, kMakers); }
  // The warp has inverted its block.
  __device__ __forceinline__ void done(int block) const {
    __syncwarp();
    if (block > 0) ptx::barrier_arrive(kFirst + block, (block + 1) * kWarp);
  }
  // Waits for a block behind the warp's own.
  __device__ __forceinline__ void wait(int block) const { ptx::barrier_sync(kFirst + block, (block + 1) * kWarp); }
};

// Of a kernel that makes chunk after chunk: what its producer prepares for the maker, `ready`, and the maker's own.
template <bool kIs, int kStages> struct Making {
  OfTokens         of_tokens[2];
  Inverting<false> inverting;
  Barrier          ready[kStages];
};
template <int kStages> struct Making<false, kStages> { Barrier* ready; };

// The producer's part of making a chunk: what is of single tokens.
template <class Config> class Preparing {
 public:
  static constexpr int kWarps = kMakers / kWarp;  // that arrive at `ready`

  // Where the stage's copies are under way.
  __device__ __forceinline__ void next(
      const typename Config::Operands& p, const Gates& gates, typename Config::Shared& shared,
      const Ring<Config::kStages>& ring) {
    const uint32 thread = maker();
    const int    block  = __shfl_sync(~0u, thread / kWarp, 0);
    auto& stage = shared.stages[ring.slot];
    OfTokens& s = shared.making.of_tokens[turn_.slot];
    if (two_) {
      ptx::mbarrier_wait(&shared.made[behind_.slot], behind_.parity);
      behind_.advance();
    }
    gates.put(s);
    __syncwarp();
    put_spans(s, thread);
    ptx::mbarrier_wait(&shared.full[ring.slot], ring.parity);
    ptx::fence_proxy_async();
    const auto none = [](int, const uint4 (&)[kBlocks]) {};
    norm_rows(p, stage.keys, block, s.key_norm, thread, none);
    norm_rows(p, stage.queries, block, s.query_norm, thread, none);
    ptx::barrier_sync(Config::kProducerBarrier, kMakers);
    put_factors(p, s, stage.factors, thread);
    __syncwarp();
    if (thread % kWarp == 0) ptx::mbarrier_arrive(&shared.making.ready[ring.slot]);
    turn_.advance();
    two_ |= turn_.slot == 0;
  }

 private:
  Ring<2> turn_;                 // of what is prepared
  Ring<Config::kStages> behind_;  // the chunk that was prepared in the same place before
  bool two_ = false;              // there is one
};

// The warpgroup that makes a stage's products, between the producer and consumers. Config: as the producer's, and
// kMakerBarrier. The products of a chunk's keys run beside the inverse of the chunk before.
template <class Config>
__device__ __forceinline__ void make_chunks(
    const typename Config::Operands& p, const typename Config::Item& item, typename Config::Shared& shared) {
  auto& making = shared.making;
  const MakerBarriers<Config::kMakerBarrier> barriers;
  const int chunks = __shfl_sync(~0u, item.chunks(), 0);  // the same in all lanes, as the compiler now sees
  if (chunks == 0) return;
  Ring<Config::kStages> ring;
  Ring<2> turn;
  Products of_keys, of_queries;
  ptx::mbarrier_wait(&making.ready[ring.slot], ring.parity);
  start_products(of_keys, shared.stages[ring.slot].keys, shared.stages[ring.slot].keys);
  int chunk = 0;
  do {
    const uint32 thread = ptx::thread_index() % kMakers;
    const int    block  = __shfl_sync(~0u, thread / kWarp, 0);
    const uint32 slot   = ring.slot;
    auto& stage = shared.stages[slot];
    const OfTokens& s = making.of_tokens[turn.slot];
    ptx::wgmma_wait_for<0>(of_keys);
    put_keys(s, making.inverting, block, of_keys, thread);
    start_products(of_queries, stage.queries, stage.keys);
    __syncwarp();
    invert_block(s, making.inverting, stage.solve, block, thread);
    barriers.done(block);
    ptx::wgmma_wait_for<0>(of_queries);
    put_queries(s, stage.attend, block, of_queries, thread);
    turn.advance();
    if (++chunk < chunks) {  // otherwise the products that start are nobody's
      ring.advance();
      ptx::mbarrier_wait(&making.ready[ring.slot], ring.parity);
    }
    start_products(of_keys, shared.stages[ring.slot].keys, shared.stages[ring.slot].keys);
    put_columns(s, making.inverting, stage.solve, block, thread, barriers);
    ptx::fence_proxy_async();
    barriers.sync();
    if (maker() == 0) ptx::mbarrier_arrive(&shared.made[slot]);
  } while (chunk < chunks);
  ptx::wgmma_wait_for<0>(of_keys);
}
// ---- gdn/prefill_item ------------------------------------------------------
// The work of a CTA: kTileV rows (V index) of one head's state, over the chunks of a sequence. Operands: what a kernel
// over chunks takes.
template <typename In, int kHeadDim, int kValueDim, int kTileV> struct PrefillItem {
  static constexpr int kTiles = kValueDim / kTileV;

  int64    n;     // sequence
  int      head;
  int      tile;  // first row
  Sequence sequence;
  int64    before = 0;  // tokens of the sequence before these, where they are a part of it

  template <typename Operands>
  __device__ __forceinline__ explicit PrefillItem(const Operands& p)
      : n(blockIdx.x / kTiles / p.heads), head(int(blockIdx.x / kTiles % p.heads)),
        tile(blockIdx.x % kTiles * kTileV), sequence(sequence_at(p.cu_seqlens, p.cu_seqlens_bytes, n, p.tokens)) {}

  __device__ __forceinline__ PrefillItem(int64 n, int head, int tile, Sequence sequence, int64 before)
      : n(n), head(head), tile(tile), sequence(sequence), before(before) {}

  template <typename Operands> __device__ __forceinline__ int64 slot(const Operands& p) const {
    return p.slot_bytes == 0 ? n : index_at(p.slots, p.slot_bytes, n);
  }
  __device__ __forceinline__ int chunks() const { return int(ceil_div(sequence.end - sequence.first, kChunk)); }
  __device__ __forceinline__ int64 first_of(int chunk) const { return sequence.first + int64(chunk) * kChunk; }
  __device__ __forceinline__ int tokens_of(int chunk) const {
    return int(min(sequence.end - first_of(chunk), int64(kChunk)));
  }
  // The output of a token at the first row.
  template <typename Operands> __device__ __forceinline__ In* output(const Operands& p, int64 token) const {
    return p.out + (token * p.heads + head) * kValueDim + tile;
  }
  // By `count` threads.
  template <typename Operands>
  __device__ __forceinline__ void clear_outputs(const Operands& p, int thread, int count) const {
    constexpr int kPieces = kTileV / 8;
    for (int64 i = thread; i < (sequence.end - sequence.first) * kPieces; i += count) {
      *reinterpret_cast<uint4*>(output(p, sequence.first + i / kPieces) + i % kPieces * 8) = {};
    }
  }
  // The first token of q, k or v, where `ratio` heads share one of kDim elements.
  template <int kDim> __device__ __forceinline__ const In* rows(const In* x, int64 stride, int ratio) const {
    return x + sequence.first * stride + head / ratio * kDim;
  }
  template <typename Operands> __device__ __forceinline__ const uint8* products(const Operands& p) const {
    const int64 place = place_of(sequence.first - before, n) + before / kChunk;
    return p.products + (place * p.heads + head) * sizeof(ChunkProducts<In>);
  }
  // Bytes to the tile, from its column `column` on, in state i of those that are `stride` elements from each other.
  template <typename Operands>
  __device__ __forceinline__ int64 part_of_state(const Operands& p, int64 i, int64 stride, int column) const {
    return (i * stride + (int64(head) * kValueDim + tile) * kHeadDim + column) * p.state_bytes;
  }
  // The checkpoint after `tokens` of these; -1 if none stands there.
  template <typename Operands> __device__ __forceinline__ int64 checkpoint(const Operands& p, int64 tokens) const {
    const bool within = sequence.first + tokens <= sequence.end;
    tokens += before;
    if (p.checkpoint_every == 0 || tokens % p.checkpoint_every || !within) return -1;
    const int64 at = index_at(p.checkpoint_starts, p.start_bytes, n) + tokens / p.checkpoint_every - 1;
    return uint64(at) < uint64(p.checkpoint_count) ? at : -1;
  }
};

// ---- gdn/prefill_part ------------------------------------------------------
// The work of a CTA: kTileV rows of one head's state over a sequence, or, with kDivided, over a part of one:
// part_chunks chunks, but the last part may be shorter. With kAlone, a part has the K rows of a map, too, after the V
// rows.
template <typename In, int kHeadDim, int kValueDim, int kTileV, bool kDivided, bool kAlone>
struct PartItem : PrefillItem<In, kHeadDim, kValueDim, kTileV> {
  using Base = PrefillItem<In, kHeadDim, kValueDim, kTileV>;
  static constexpr int kTiles = Base::kTiles + (kAlone ? kHeadDim / kTileV : 0);

  int64 place;  // of the part, or the sequence
  bool  last;   // part of its sequence
  bool  none;   // nothing is at the place

  template <typename Operands>
  __device__ __forceinline__ explicit PartItem(const Operands& p)
      : PartItem(p, p.part_chunks * kChunk, blockIdx.x / kTiles / p.heads) {}

  // What a part gives and takes, from row `row` of the tile on: with kAlone, the state after the part from none before
  // it, [V, K], and the map of a state before to what it adds after, [K, K]; then, instead of the former, the state
  // before the part.
  template <typename Operands> __device__ __forceinline__ uint8* part_state(const Operands& p, int row) const {
    const int64 first = (place * p.heads + this->head) * (kValueDim + kHeadDim);
    return p.part_states + (first + this->tile + row) * (kHeadDim * 4);
  }

 private:
  template <typename Operands>
  __device__ __forceinline__ PartItem(const Operands& p, int64 size, int64 place)
      : PartItem(p, size, place, kDivided ? sequence_of(p, place, size) : place) {}

  template <typename Operands>
  __device__ __forceinline__ PartItem(const Operands& p, int64 size, int64 place, int64 n)
      : Base(n, int(blockIdx.x / kTiles % p.heads), blockIdx.x % kTiles * kTileV, {}, 0), place(place), last(true),
        none(n < 0) {
    if (none) return;
    const Sequence whole = sequence_at(p.cu_seqlens, p.cu_seqlens_bytes, n, p.tokens);
    this->sequence = whole;
    if (!kDivided) return;
    this->before = (place - place_of(whole.first, n, size)) * size;
    none = this->before > 0 && this->before >= whole.end - whole.first;
    last = whole.first + this->before + size >= whole.end;
    this->sequence = {whole.first + this->before, last ? whole.end : whole.first + this->before + size};
  }
};
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

// ---- gdn/prefill_producer --------------------------------------------------
// The warpgroup that copies what consumers of a chunk take, into a ring of stages. Config: types In, Item, Operands and
// Shared, dimensions, kTileV rows of a CTA, kAlone: no outputs, and tiles without values; kFused: the products are made
// here.
constexpr int kGroup  = 128;  // threads of a warpgroup
constexpr int kStages = 3;

// Where a thread copies from: the chunks of an item, one after the other.
template <class Config> class Copies {
 public:
  using In = typename Config::In;

  __device__ __forceinline__ Copies(const typename Config::Operands& p, const typename Config::Item& item)
      : keys_(item.template rows<Config::kHeadDim>(p.k, p.k_stride, p.k_ratio), p.k_stride, thread()),
        queries_(item.template rows<Config::kHeadDim>(p.q, p.q_stride, p.q_ratio), p.q_stride, thread()),
        values_(item.template rows<Config::kValueDim>(p.v, p.v_stride, p.v_ratio) + item.tile, p.v_stride, thread()),
        products_(reinterpret_cast<const ChunkProducts<In>*>(item.products(p))), step_(p.heads),
        has_values_(item.tile < Config::kValueDim) {}

  // Starts the copies of the next chunk, of `tokens` tokens.
  template <class Stage> __device__ __forceinline__ void next(Stage& to, int tokens) {
    keys_.copy(tokens, [&](int row, int column) { return to.keys[column / kChunk].at(row, column % kChunk); });
    if (!Config::kAlone || has_values_) values_.copy(to.values, tokens);
    if constexpr (!Config::kFused) copy_lower(products_->solve, to.solve);
    if constexpr (!Config::kAlone) {
      queries_.copy(tokens, [&](int row, int column) { return to.queries[column / kChunk].at(row, column % kChunk); });
      if constexpr (!Config::kFused) copy_lower(products_->attend, to.attend);
    }
    if constexpr (Config::kFused) return;
    constexpr int kPieces = sizeof(to.factors) / 16;
    if (thread() < kPieces) {
      ptx::copy_async(ptx::shared_address(&to.factors) + thread() * 16, &products_->factors.state[thread() * 4]);
    }
    products_ += step_;
  }

 private:
  static __device__ __forceinline__ int thread() { return threadIdx.x % kGroup; }

  // A warp takes a block of the lower part, and then the fourth after it.
  static __device__ __forceinline__ void copy_lower(const Lower<In>& from, Swizzled<In>& to) {
    const int row = thread() % kWarp / 2, half = thread() % 2 ^ row / 4 % 2;  // as Lower::place() has it
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      const int block = thread() / kWarp + 4 * i, down = block >= 6 ? 3 : block >= 3 ? 2 : block >= 1 ? 1 : 0;
      if (block >= kBlocks * (kBlocks + 1) / 2) continue;
      const int across = block - Lower<In>::block(down, 0);
      ptx::copy_async(to.at(down * kBlock + row, across * kBlock + half * 8),
                      &from.blocks[block][row][thread() % 2 * 8]);
    }
  }

  Source<In, kChunk, Config::kHeadDim, kGroup> keys_, queries_;
  Source<In, kChunk, Config::kTileV, kGroup>   values_;
  const ChunkProducts<In>*                     products_;
  const int64                                  step_;
  const bool                                   has_values_;
};

// Above the diagonal, nothing is copied; a map has no values.
template <class Config> __device__ __forceinline__ void clear_stages(typename Config::Shared& shared) {
#pragma unroll
  for (auto& stage : shared.stages) {
    for (auto* square : {&stage.solve, &stage.attend}) {
      for (int at = threadIdx.x % kGroup; at < int(sizeof(*square) / 16); at += kGroup) {
        reinterpret_cast<uint4*>(square)[at] = {};
      }
    }
    if constexpr (Config::kAlone) {
      for (int at = threadIdx.x % kGroup; at < int(sizeof(stage.values) / 16); at += kGroup) {
        reinterpret_cast<uint4*>(stage.values)[at] = {};
      }
    }
  }
}

// Stores the outputs that consumers left in the place of a stage's values. A thread takes those that it copies over.
template <class Config> class Outputs {
 public:
  using In = typename Config::In;

  __device__ __forceinline__ Outputs(const typename Config::Operands& p, const typename Config::Item& item)
      : step_(kStep * int64(p.heads) * Config::kValueDim),
        to_(item.output(p, item.sequence.first + row()) + column()) {}

  // Those of the next chunk, of `tokens` tokens.
  template <class Stage> __device__ __forceinline__ void next(const Stage& from, int tokens) {
#pragma unroll
    for (int i = 0; i < kChunk; i += kStep, to_ += step_) {
      if (row() + i < tokens) {
        *reinterpret_cast<uint4*>(to_) = *reinterpret_cast<const uint4*>(&from.values[row() + i][column()]);
      }
    }
  }

 private:
  static constexpr int kPieces = Config::kTileV / 8, kStep = kGroup / kPieces;
  static __device__ __forceinline__ int row() { return threadIdx.x % kGroup / kPieces; }
  static __device__ __forceinline__ int column() { return threadIdx.x % kPieces * 8; }

  const int64 step_;
  In*         to_;
};

template <class Config>
__device__ __forceinline__ void produce(
    const typename Config::Operands& p, const typename Config::Item& item, typename Config::Shared& shared) {
  Copies<Config>  copies(p, item);
  Outputs<Config> outputs(p, item);
  Preparing<Config> preparing;
  Ring<kStages> ring;
  const int chunks = item.chunks();
  for (int chunk = 0; chunk < chunks + kStages; ++chunk) {
    Gates gates;
    if constexpr (Config::kFused) gates = Gates(p, item.first_of(chunk), item.tokens_of(chunk), item.head);
    ptx::mbarrier_wait(&shared.empty[ring.slot], ring.parity ^ 1);
    if (!Config::kAlone && chunk >= kStages && chunk - kStages < chunks) {
      outputs.next(shared.stages[ring.slot], item.tokens_of(chunk - kStages));
    }
    if (chunk < chunks) {
      copies.next(shared.stages[ring.slot], item.tokens_of(chunk));
      ptx::copy_async_arrive(&shared.full[ring.slot]);
      if constexpr (Config::kFused) preparing.next(p, gates, shared, ring);
    }
    ring.advance();
  }
  ptx::copy_async_wait();
}
// ---- gdn/prefill_rows ------------------------------------------------------
// Products of a warpgroup's rows. With g = lane / 4 and c = lane % 4, element i of block n has row g + i / 2 * 8 and
// column 8 n + 2 c + i % 2.
using Tokens = float[kChunk / 8][4];  // columns are tokens

// A left operand of 16 columns: two blocks.
template <typename In> __device__ __forceinline__ uint4 to_left(const float (&x)[4], const float (&y)[4]) {
  return {to_pair<In>(x[0], x[1]), to_pair<In>(x[2], x[3]), to_pair<In>(y[0], y[1]), to_pair<In>(y[2], y[3])};
}

// The factors of tokens in a lane's columns.
struct TokenFactors {
  float2 of[kChunk / 8];
  __device__ __forceinline__ explicit TokenFactors(const float (&factors)[kChunk]) {
#pragma unroll
    for (int n = 0; n < kChunk / 8; ++n) {
      of[n] = *reinterpret_cast<const float2*>(&factors[8 * n + threadIdx.x % 4 * 2]);
    }
  }
  __device__ __forceinline__ float operator()(int n, int i) const { return i % 2 ? of[n].y : of[n].x; }
};
__device__ __forceinline__ void multiply(Tokens& x, const TokenFactors& factors) {
#pragma unroll
  for (int i = 0; i < 4 * (kChunk / 8); ++i) x[i / 4][i % 4] *= factors(i / 4, i);
}

// Starts x = left rows^T or, with kAdd, x += that, for kCount left operands of 16 columns and the rows of k, q or a
// square.
template <bool kAdd, typename In, int kCount>
__device__ __forceinline__ void start_rows(Tokens& x, const uint4 (&left)[kCount], Swizzled<In>* rows) {
  const uint64 right = ptx::wgmma_matrix(ptx::shared_address(rows), sizeof(*rows));
  ptx::wgmma_fence();
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    const uint64 columns = right + k / kBlocks * (sizeof(*rows) / 16) + k % kBlocks * 2;
    if (kAdd || k > 0) ptx::wgmma<In, false, true>(x, left[k], columns);
    else ptx::wgmma<In, false, false>(x, left[k], columns);
  }
  ptx::wgmma_commit();
}
// ---- gdn/prefill_states ----------------------------------------------------
// Moves a warp's part of a state, 16 kTiles rows of kBlocks blocks of eight columns, between memory and registers. With
// g = lane / 4 and c = lane % 4, h[i][n] has rows 16 i + g and 16 i + g + 8 and columns 8 n + 2 c and the next.

// Calls f(the offset of two neighbouring columns, the first of them); a row has kRow elements.
template <int kRow, int kTiles, int kBlocks, typename T, typename F>
__device__ __forceinline__ void each_pair(T (&h)[kTiles][kBlocks][4], F f) {
  const int at = threadIdx.x % kWarp / 4 * kRow + threadIdx.x % 4 * 2;
#pragma unroll
  for (int i = 0; i < 2 * kTiles; ++i) {
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) f(at + i * 8 * kRow + 8 * n, &h[i / 2][n][i % 2 * 2]);
  }
}

// `from` and `to`: the part's first element, of `bytes`: 4, float32, or 2, bf16.
template <int kRow, int kTiles, int kBlocks>
__device__ __forceinline__ void load_state(float (&h)[kTiles][kBlocks][4], const uint8* from, int bytes) {
  if (bytes == 4) {
    each_pair<kRow>(h, [&](int at, float* x) {
      const uint2 v = ptx::ld<uint2>(from + at * 4);
      x[0] = __uint_as_float(v.x), x[1] = __uint_as_float(v.y);
    });
  } else {
    each_pair<kRow>(h, [&](int at, float* x) {
      const uint32 v = ptx::ld<uint32>(from + at * 2);
      x[0] = low<bf16>(v), x[1] = high<bf16>(v);
    });
  }
}

template <int kRow, int kTiles, int kBlocks>
__device__ __forceinline__ void store_state(const float (&h)[kTiles][kBlocks][4], uint8* to, int bytes) {
  if (bytes == 4) {
    each_pair<kRow>(h, [&](int at, const float* x) { *reinterpret_cast<float2*>(to + at * 4) = {x[0], x[1]}; });
  } else {
    each_pair<kRow>(h, [&](int at, const float* x) {
      *reinterpret_cast<uint32*>(to + at * 2) = to_pair<bf16>(x[0], x[1]);
    });
  }
}

// ---- spec ------------------------------------------------------------------
using In = bf16;
constexpr int  kHeadDim  = 128;  // K
constexpr int  kValueDim = 128;  // V
constexpr int  kTileV    = 64;  // rows of a CTA
constexpr bool kDivided  = true;  // a CTA has a part of a sequence
constexpr bool kAlone    = false;  // from no state, and without outputs
constexpr bool kFused    = false;

constexpr int  kRows      = 64;  // of a consumer
constexpr int  kConsumers = kTileV / kRows;
constexpr bool kApart     = !kAlone && kConsumers == 1;  // outputs are another warpgroup's work
constexpr int  kUsers     = kConsumers + (kApart ? 1 : 0);  // warpgroups that take what is copied
constexpr int  kProducer  = kUsers + (kFused ? 1 : 0);  // the last warpgroup
constexpr int  kThreads   = (kProducer + 1) * kGroup;
constexpr int  kValueRow  = kTileV + 8;  // elements of a row of values in shared memory
// Registers of a thread where there are too few for all to have the same.
constexpr int kProducerRegisters = 40, kMakerRegisters = 88, kConsumerRegisters = kFused ? 192 : 232;

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
  uint8* part_states;
  int64 part_chunks;
  int64 sequences;
  const float* g;
  const float* beta;
  float scale;
  bool l2norm;
};
using Item = PartItem<In, kHeadDim, kValueDim, kTileV, kDivided, kAlone>;

// ---- shared memory ---------------------------------------------------------
using Square = Swizzled<In>;
using Wide   = Square[kHeadDim / kChunk];  // rows of kHeadDim elements, in blocks of columns

struct Stage {
  Wide    keys, queries;  // zero beyond the last token, like values
  Square  solve, attend;  // zero above the diagonal
  In      values[kChunk][kValueRow];
  ChunkFactors factors;
};
// What a consumer leaves to the warpgroup of the outputs: left operands of a chunk, each thread's in its place. Where
// there is none, names that are not used.
struct alignas(16) Left { uint4 state[kHeadDim / 16][kGroup], updates[kBlocks][kGroup]; };
template <bool kIs> struct Between {
  Left    left[2];
  Barrier full[2], empty[2];
};
template <> struct Between<false> { Left* left; Barrier *full, *empty; };
struct Shared {
  Stage   stages[kStages];
  Barrier full[kStages], made[kStages], empty[kStages];
  Between<kApart> between;
  Making<kFused, kStages> making;
  Item            item;
};
static_assert(sizeof(Shared) == 228352, "the launch counts on it");

struct Config {
  using In = ::In;
  using Item = ::Item;
  using Operands = ::Operands;
  using Shared = ::Shared;
  static constexpr int  kHeadDim = ::kHeadDim, kValueDim = ::kValueDim, kTileV = ::kTileV;
  static constexpr bool kAlone = ::kAlone, kFused = ::kFused;
  static constexpr int  kMakerBarrier = 1 + kConsumers, kProducerBarrier = kMakerBarrier + kBlocks, kStages = ::kStages;
};

// A chunk is there, and the tensor cores see it: with kFused, the maker has seen to that for all that is in the stage.
__device__ __forceinline__ Stage& wait_for(Shared& shared, const Ring<kStages>& ring) {
  ptx::mbarrier_wait(&(kFused ? shared.made : shared.full)[ring.slot], ring.parity);
  if constexpr (!kFused) ptx::fence_proxy_async();
  return shared.stages[ring.slot];
}

// ---- products --------------------------------------------------------------
using State = float[kHeadDim / 8][4];  // rows of it; columns are its K index
using Rows  = State[1];
constexpr int kSteps = kHeadDim / 16;
struct Updates { uint4 of_outputs[kBlocks], of_state[kBlocks]; };  // a chunk's u as left operands

// ---- a consumer ------------------------------------------------------------
class Consumer {
 public:
  __device__ __forceinline__ Consumer(const Operands& p, const Item& item, Shared& shared, int place)
      : place_(place), p_(p), item_(item), shared_(shared),
        first_(place * kRows + threadIdx.x % kGroup / kWarp * kBlock) {}

  __device__ __forceinline__ void consume(int64 slot) {
    Rows rows = {};
    if constexpr (kAlone) {
      each_pair<kHeadDim>(rows, [&](int at, float* x) {
        const int row = item_.tile - kValueDim + first_ + at / kHeadDim;  // of the map; negative in the state
        x[0] = row == at % kHeadDim ? 1.0f : 0.0f, x[1] = row == at % kHeadDim + 1 ? 1.0f : 0.0f;
      });
    } else if constexpr (kDivided) {
      load_state<kHeadDim>(rows, item_.part_state(p_, first_), 4);
    } else if (p_.initial_state != nullptr) {
      load_state<kHeadDim>(rows, p_.initial_state + part_of_state(slot, p_.initial_stride), p_.state_bytes);
    }
    const int chunks = __shfl_sync(~0u, item_.chunks(), 0);  // the same in all lanes, as the compiler now sees
    if (chunks > 0) {
      Updates u;
      Tokens out;
      if (place_ == kConsumers - 1) pass_turn();
      take_turn();
      open(rows[0], u, out);
      for (int chunk = 1; chunk < chunks; ++chunk) {
        take_turn();
        close(rows[0], u, out);
        if constexpr (!kAlone) store_checkpoint(rows, chunk - 1);
        open(rows[0], u, out);
      }
      take_turn();
      close(rows[0], u, out);
      pass_turn();
      if constexpr (!kAlone) store_checkpoint(rows, chunks - 1);
      if (place_ == 0) take_turn();  // the one that is left
    }
    if constexpr (kAlone) {
      store_state<kHeadDim>(rows, item_.part_state(p_, first_), 4);
    } else if (p_.final_state != nullptr && item_.last) {
      store_state<kHeadDim>(rows, p_.final_state + part_of_state(slot, p_.final_stride), p_.state_bytes);
    }
  }

  // The outputs, from what a consumer leaves.
  __device__ __forceinline__ void attend() {
    if constexpr (kApart) {
      auto& between = shared_.between;
      const int chunks = __shfl_sync(~0u, item_.chunks(), 0);
      for (int chunk = 0; chunk < chunks; ++chunk) {
        uint4 state[kSteps], updates[kBlocks];
        ptx::mbarrier_wait(&between.full[turn_.slot], turn_.parity);
        const Left& left = between.left[turn_.slot];
#pragma unroll
        for (int k = 0; k < kSteps; ++k) state[k] = left.state[k][threadIdx.x % kGroup];
#pragma unroll
        for (int j = 0; j < kBlocks; ++j) updates[j] = left.updates[j][threadIdx.x % kGroup];
        arrive(between.empty[turn_.slot]);
        Stage& stage = wait_for(shared_, ring_);
        Tokens out;
        start_rows<false>(out, state, stage.queries);
        const TokenFactors queries(stage.factors.query);
        ptx::wgmma_wait_for<0>(out);
        multiply(out, queries);
        start_rows<true>(out, updates, &stage.attend);
        ptx::wgmma_wait_for<0>(out);
        leave(out, stage);
        arrive(shared_.empty[ring_.slot]);
        ring_.advance(), turn_.advance();
      }
    }
  }

 private:
  static constexpr bool kOutputs = !kAlone && !kApart;
  static constexpr bool kTurns   = kConsumers > 1 && !kFused;
  static constexpr int  kBeside  = kOutputs && !kFused ? 1 : 0;  // products of outputs that may be under way

  // From a state, a chunk's u and the part of its outputs that needs no u; decays the state.
  __device__ __forceinline__ void open(State& h, Updates& to, Tokens& out) {
    uint4 left[kSteps], rest[kBlocks];
#pragma unroll
    for (int k = 0; k < kSteps; ++k) left[k] = to_left<In>(h[2 * k], h[2 * k + 1]);
    Stage& stage = wait_for(shared_, ring_);
    const ChunkFactors& factors = stage.factors;
    Tokens x, u;
    start_rows<false>(x, left, stage.keys);
    if constexpr (kOutputs) start_rows<false>(out, left, stage.queries);
    pass_turn();
    const float decay = factors.decay[0];
#pragma unroll
    for (int i = 0; i < 4 * (kHeadDim / 8); ++i) h[i / 4][i % 4] *= decay;
    ptx::wgmma_wait_for<kBeside>(x);
    if constexpr (kFused) ptx::wgmma_wait_for<0>(out);  // registers are few
    subtract(rest, stage, x);
    start_rows<false>(u, rest, &stage.solve);
    if constexpr (kApart) {
      ptx::mbarrier_wait(&shared_.between.empty[turn_.slot], turn_.parity ^ 1);
#pragma unroll
      for (int k = 0; k < kSteps; ++k) shared_.between.left[turn_.slot].state[k][threadIdx.x] = left[k];
    }
    if constexpr (kOutputs) {
      if constexpr (!kFused) ptx::wgmma_wait_for<1>(out);
      multiply(out, TokenFactors(factors.query));
    }
    ptx::wgmma_wait_for<0>(u);
#pragma unroll
    for (int j = 0; j < kBlocks; ++j) to.of_outputs[j] = to_left<In>(u[2 * j], u[2 * j + 1]);
    multiply(u, TokenFactors(factors.end));
#pragma unroll
    for (int j = 0; j < kBlocks; ++j) to.of_state[j] = to_left<In>(u[2 * j], u[2 * j + 1]);
  }

  // The products with u; leaves the outputs, and the stage.
  __device__ __forceinline__ void close(State& h, const Updates& u, Tokens& out) {
    Stage& stage = shared_.stages[ring_.slot];
    if constexpr (kOutputs) start_rows<true>(out, u.of_outputs, &stage.attend);
    const uint64 keys = ptx::wgmma_matrix(ptx::shared_address(stage.keys), sizeof(Square));
    ptx::wgmma_fence();
#pragma unroll
    for (int j = 0; j < kBlocks; ++j) ptx::wgmma<In, true, true>(h, u.of_state[j], keys + j * (kBlock * 128 / 16));
    ptx::wgmma_commit();
    if constexpr (kOutputs) {
      ptx::wgmma_wait_for<1>(out);
      leave(out, stage);
    }
    if constexpr (kApart) {
#pragma unroll
      for (int j = 0; j < kBlocks; ++j) shared_.between.left[turn_.slot].updates[j][threadIdx.x] = u.of_outputs[j];
      arrive(shared_.between.full[turn_.slot]);
      turn_.advance();
    }
    ptx::wgmma_wait_for<0>(h);
    arrive(shared_.empty[ring_.slot]);
    ring_.advance();
  }

  __device__ __forceinline__ void store_checkpoint(const Rows& rows, int chunk) const {
    const int64 at = item_.checkpoint(p_, int64(chunk + 1) * kChunk);
    if (at < 0) return;
    const int64 stride = int64(p_.heads) * (kValueDim * kHeadDim);
    store_state<kHeadDim>(rows, p_.checkpoints + part_of_state(at, stride), p_.state_bytes);
  }

  __device__ __forceinline__ int64 part_of_state(int64 i, int64 stride) const {
    return item_.part_of_state(p_, i, stride, first_ * kHeadDim);
  }
  // Consumers start products one after the other, so that what one does beside them falls into those of the other.
  __device__ __forceinline__ void take_turn() const {
    if constexpr (kTurns) ptx::barrier_sync(1 + place_, kConsumers * kGroup);
  }
  __device__ __forceinline__ void pass_turn() const {
    if constexpr (kTurns) ptx::barrier_arrive(1 + (place_ + 1) % kConsumers, kConsumers * kGroup);
  }
  static __device__ __forceinline__ void arrive(Barrier& barrier) {
    __syncwarp();
    if (threadIdx.x % kWarp == 0) ptx::mbarrier_arrive(&barrier);
  }

  // rest = v - state x, of the warp's 16 rows; operand j has tokens 16 j to 16 j + 15 as columns. Values and factors
  // are loaded where they are used, as registers are few.
  __device__ __forceinline__ void subtract(uint4 (&rest)[kBlocks], const Stage& stage, const Tokens& x) const {
    const int    lane = threadIdx.x % kWarp;
    const uint32 at   = place_in(stage);
#pragma unroll
    for (int j = 0; j < kBlocks; ++j) {
      const uint4  v = ptx::load_matrices_transposed(at + kBlock * j * kValueRow * 2);
      const uint32 words[4] = {v.x, v.y, v.z, v.w};
      float difference[2][4];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int n = 2 * j + half;
        const float2 factor = *reinterpret_cast<const float2*>(&stage.factors.state[8 * n + lane % 4 * 2]);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const uint32 word = words[2 * half + i / 2];
          difference[half][i] = fmaf(i % 2 ? -factor.y : -factor.x, x[n][i], i % 2 ? high<In>(word) : low<In>(word));
        }
      }
      rest[j] = to_left<In>(difference[0], difference[1]);
    }
  }

  // Leaves the warp's 16 rows of outputs in the place of its values, for the producer.
  __device__ __forceinline__ void leave(const Tokens& x, Stage& stage) const {
    const uint32 at = place_in(stage);
#pragma unroll
    for (int j = 0; j < kBlocks; ++j) {
      const uint4  v = to_left<In>(x[2 * j], x[2 * j + 1]);
      const uint32 words[4] = {v.x, v.y, v.z, v.w};
      ptx::store_matrices(at + kBlock * j * kValueRow * 2, words);
    }
  }

  // Where a lane moves eight of the warp's rows of a token from or to, for the first 16 tokens.
  __device__ __forceinline__ uint32 place_in(const Stage& stage) const {
    const int lane = threadIdx.x % kWarp;
    return ptx::shared_address(&stage.values[lane % 8 + lane / 16 * 8][first_ + lane / 8 % 2 * 8]);
  }

  const int       place_;  // among consumers
  const Operands& p_;
  const Item&     item_;
  Shared&         shared_;
  const int       first_;  // row of the CTA's
  Ring<kStages>   ring_;
  Ring<2>         turn_;  // of what is left to another warpgroup
};

// ---- kernel ----------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kThreads, 1) gdn_prefill_wgmma(
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
    int64 start_bytes,                           // 4 or 8
    uint8* __restrict__ part_states,             // [places of parts, heads, V + K, K] float32, of parts
    int64 part_chunks,                           // of a part
    int64 sequences,
    const float* __restrict__ g,                 // [tokens, heads], decays; null: 1
    const float* __restrict__ beta,              // [tokens, heads]; null: 1
    float scale,                                 // of q
    int64 l2norm                                 // 0: q and k as they are

) {
  extern __shared__ __align__(1024) uint8 dynamic[];
  Shared& shared = *reinterpret_cast<Shared*>(dynamic);
  const Operands p = {q, k, v, products, cu_seqlens, initial_state, final_state, slots, checkpoints, checkpoint_starts,
      out, cu_seqlens_bytes, tokens, uint32(heads), int(q_ratio), int(k_ratio), int(v_ratio), q_stride,
      k_stride, v_stride, int(state_bytes), pool, int(slot_bytes), initial_stride, final_stride,
      checkpoint_every, checkpoint_count, int(start_bytes), part_states, part_chunks, sequences, g, beta,
      scale, bool(l2norm)};
  const int group = __shfl_sync(~0u, threadIdx.x / kGroup, 0);  // the same in all lanes, as the compiler now sees

  if (threadIdx.x == 0) {
    for (Barrier& full : shared.full) ptx::mbarrier_init(&full, kGroup);
    for (Barrier& made : shared.made) ptx::mbarrier_init(&made, 1);
    if constexpr (kFused) {
      for (int i = 0; i < kStages; ++i) ptx::mbarrier_init(&shared.making.ready[i], Preparing<Config>::kWarps);
    }
    for (Barrier& empty : shared.empty) ptx::mbarrier_init(&empty, kUsers * kGroup / kWarp);
    if constexpr (kApart) {
      for (int i = 0; i < 2; ++i) ptx::mbarrier_init(&shared.between.full[i], kGroup / kWarp);
      for (int i = 0; i < 2; ++i) ptx::mbarrier_init(&shared.between.empty[i], kGroup / kWarp);
    }
  }
  if (group == kProducer) clear_stages<Config>(shared);
  __syncthreads();
  ptx::griddep_wait();
  const Item item(p);
  if (item.none || (kAlone && item.last)) return ptx::griddep_launch();
  const int64 slot = kAlone ? 0 : item.slot(p);
  ptx::griddep_launch();
  if (!kAlone && uint64(slot) >= uint64(p.pool)) return item.clear_outputs(p, threadIdx.x, kThreads);
  if constexpr (kFused) {  // consumers read it there, as registers are few
    if (threadIdx.x == 0) shared.item = item;
    __syncthreads();
  }
  if (group == kProducer) {
    if constexpr (kUsers > 1) ptx::registers_fewer<kProducerRegisters>();
    produce<Config>(p, item, shared);
  } else if (kFused && group == kUsers) {
    ptx::registers_fewer<kMakerRegisters>();
    if constexpr (kFused) make_chunks<Config>(p, item, shared);
  } else {
    if constexpr (kUsers > 1) ptx::registers_more<kConsumerRegisters>();
    if (group < kConsumers) Consumer(p, kFused ? shared.item : item, shared, group).consume(slot);
    else Consumer(p, item, shared, 0).attend();
  }
}

// gdn_prefill, generated from templates/gdn/prefill.cu.j2
// spec: {"dtype":"bf16","head_dim":128,"rows":16,"stages":3,"value_dim":128}
//
// The delta rule for whole prompts, second kernel: the chunks of a sequence in their order. A CTA takes kTileV rows (V
// index) of one head's state and a chunk of tokens at once, in two groups of four warps. The state warps do what must
// be done chunk after chunk, with the state in registers, in float32; each has a quarter of its columns:
//   u = (v - state h k) solve^T
//   h becomes decay h + (end u) k^T
// The output warps start copies for the chunks to come, and compute, from what the others leave in shared memory,
//   out = query h q + u attend^T
// Operands of products are rounded to 16 bits; sums are float32. A chunk, where | is __syncthreads() and the warps of a
// column wait at a name (the output warps have nothing to wait for at the first):
//   state   | h k, its rest   kRests  u   kUpdates  u k + h, h in 16 bits  |
//   output  | copies, h q                 kUpdates  u attend^T             |

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

// ---- spec ------------------------------------------------------------------
using In = bf16;
constexpr int kHeadDim  = 128;  // K
constexpr int kValueDim = 128;  // V
constexpr int kTileV    = 16;   // rows of a CTA
constexpr int kStages   = 3;  // chunks in shared memory; with 1, copies wait for the end of a chunk

constexpr int kWarps    = 4;  // of a group; each has a block of a chunk's tokens
constexpr int kGroup    = kWarps * kWarp;
constexpr int kThreads  = 2 * kGroup;
constexpr int kRowTiles = kTileV / kBlock;
constexpr int kColumns  = kHeadDim / kWarps;  // of the state, for a warp
constexpr int kRow      = kHeadDim + 8;  // elements of a row of keys in shared memory
constexpr int kValueRow = kTileV + 8;    // of values
constexpr int kTokenRow = kChunk + 8;    // and of a row for all tokens
static_assert(kWarps == kBlocks, "a block of tokens for each warp");

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
struct alignas(16) Stage {
  ChunkProducts<In> products;
  In keys[kChunk][kRow], queries[kChunk][kRow], values[kChunk][kValueRow];  // zero beyond the last token
};
struct Shared {
  Stage stages[kStages];
  In states[2][kTileV][kRow];     // h before a chunk, in turn
  In rests[kTileV][kTokenRow];    // v - state h k
  In updates[kTileV][kTokenRow];  // u
  In ends[kTileV][kTokenRow];     // end u
};
static_assert(sizeof(Shared) == 162352, "the launch counts on it");

enum NamedBarrier {
  kRests = 1,    // of the state warps
  kUpdates = 2,  // likewise
  kGiven = 3,    // the output warps wait for the updates
};

__device__ __forceinline__ int warp_of() { return threadIdx.x / kWarp % kWarps; }

using Item = PrefillItem<In, kHeadDim, kValueDim, kTileV>;

// ---- copies, by the output warps -------------------------------------------
// The chunks of an item, one after the other.
class Copies {
 public:
  __device__ __forceinline__ Copies(const Operands& p, const Item& item)
      : keys_(item.rows<kHeadDim>(p.k, p.k_stride, p.k_ratio), p.k_stride, thread()),
        queries_(item.rows<kHeadDim>(p.q, p.q_stride, p.q_ratio), p.q_stride, thread()),
        values_(item.rows<kValueDim>(p.v, p.v_stride, p.v_ratio) + item.tile, p.v_stride, thread()),
        products_(item.products(p) + thread() * 16), step_(p.heads * kBytes),
        left_(item.sequence.end - item.sequence.first) {}

  // Starts the copies of the next chunk, as a group; an empty one behind the last chunk.
  __device__ __forceinline__ void next(Stage& stage) {
    if (left_ > 0) {
      const int tokens = int(min(left_, int64(kChunk)));
      keys_.copy(stage.keys, tokens);
      values_.copy(stage.values, tokens);
      const uint32 to = ptx::shared_address(&stage.products) + thread() * 16;
#pragma unroll
      for (int at = 0; at < kBytes; at += kGroup * 16) {
        if (at + thread() * 16 < kBytes) ptx::copy_async(to + at, products_ + at);
      }
      products_ += step_;
      queries_.copy(stage.queries, tokens);
      left_ -= kChunk;
    }
    ptx::copy_async_commit();
  }

 private:
  static constexpr int kBytes = sizeof(ChunkProducts<In>);
  static __device__ __forceinline__ int thread() { return threadIdx.x - kGroup; }

  Source<In, kChunk, kHeadDim, kGroup> keys_, queries_;
  Source<In, kChunk, kTileV, kGroup>   values_;
  const uint8*     products_;
  const int64      step_;
  int64            left_;  // tokens
};

// ---- products --------------------------------------------------------------
// Blocks of the warp's tokens begin here, and the next ones follow.
__device__ __forceinline__ uint32 block_in(const Lower<In>& matrix, int row, int half) {
  return ptx::shared_address(matrix.blocks[Lower<In>::block(warp_of(), 0)]) + Lower<In>::place(row, half) * 2;
}
constexpr uint32 kBlockBytes = kBlock * kBlock * 2;

using Square = float[2][4];
using Tokens = Square[kRowTiles];                  // the warp's 16 tokens are columns
using Rows   = float[kRowTiles][kColumns / 8][4];  // of the state; columns are its K index, from the warp's first on

// Sums over `steps` <= kSteps steps of 16: `left`, at the first of kStride elements of each row, times right(step). Few
// sums are divided in two, as each waits for the tensor cores.
template <int kSteps, int kStride, typename Right>
__device__ __forceinline__ void multiply_steps(Tokens& sums, uint32 left, int steps, Right right) {
  constexpr int kParts = kRowTiles < 4 ? 2 : 1;
  Tokens parts[kParts] = {};
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    if (k >= steps) continue;
    const uint4 columns = right(k);
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      Square& x = parts[k % kParts][i];
      multiply<In>(x[0], x[1], ptx::load_matrices(left + i * kBlock * kStride * 2 + 32 * k), columns);
    }
  }
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      sums[i][j / 4][j % 4] = kParts == 2 ? parts[0][i][j / 4][j % 4] + parts[kParts - 1][i][j / 4][j % 4]
                                          : parts[0][i][j / 4][j % 4];
    }
  }
}

// The factors of the warp's tokens in a lane's columns.
struct Factors {
  float2 of[2];
  __device__ __forceinline__ explicit Factors(const float (&factors)[kChunk]) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      of[n] = *reinterpret_cast<const float2*>(&factors[warp_of() * kBlock + 8 * n + threadIdx.x % 4 * 2]);
    }
  }
  __device__ __forceinline__ float operator()(int n, int i) const { return i % 2 ? of[n].y : of[n].x; }
};

// ---- the state warps -------------------------------------------------------
__device__ __forceinline__ void put_state(const Rows& h, In (&to)[kTileV][kRow]) {
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n) put<kRow>(&to[i * kBlock][warp_of() * kColumns + 8 * n], h[i][n]);
  }
}

// Puts v - state h k, the rests.
__device__ __forceinline__ void put_rests(const Stage& stage, const In (&state)[kTileV][kRow], Shared& shared) {
  const int first = warp_of() * kBlock;
  const uint32 keys = right_in(&stage.keys[first]);
  Tokens x;
  multiply_steps<kHeadDim / 16, kRow>(x, left_in(state), kHeadDim / 16, [&](int k) {
    return ptx::load_matrices(keys + 32 * k);
  });
  const Factors factors(stage.products.factors.state);
  const uint32 values = right_in(&stage.values[first]);
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
    const uint4  v        = ptx::load_matrices_transposed(values + 32 * i);
    const uint32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint32 word = words[2 * n + j / 2];
        x[i][n][j] = (j % 2 ? high<In>(word) : low<In>(word)) - factors(n, j) * x[i][n][j];
      }
      put<kTokenRow>(&shared.rests[i * kBlock][first + 8 * n], x[i][n]);
    }
  }
}

// Puts the updates u, which are the rests times the transpose of solve.
__device__ __forceinline__ void put_updates(const Stage& stage, const uint4 (&solve)[kBlocks], Shared& shared) {
  Tokens u;
  multiply_steps<kBlocks, kTokenRow>(u, left_in(shared.rests), warp_of() + 1, [&](int k) { return solve[k]; });
  const Factors factors(stage.products.factors.end);
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      put<kTokenRow>(&shared.updates[i * kBlock][warp_of() * kBlock + 8 * n], u[i][n]);
#pragma unroll
      for (int j = 0; j < 4; ++j) u[i][n][j] *= factors(n, j);
      put<kTokenRow>(&shared.ends[i * kBlock][warp_of() * kBlock + 8 * n], u[i][n]);
    }
  }
}

// A chunk: from `before` and h, which are the same state.
__device__ __forceinline__ void advance(Rows& h, const Stage& stage, const In (&before)[kTileV][kRow], Shared& shared) {
  put_rests(stage, before, shared);
  uint4 solve[kBlocks];
  const uint32 blocks = block_in(stage.products.solve, right_row(), right_half());
#pragma unroll
  for (int k = 0; k < kBlocks; ++k) {
    if (k <= warp_of()) solve[k] = ptx::load_matrices(blocks + kBlockBytes * k);
  }
  ptx::barrier_sync(kRests, kGroup);
  put_updates(stage, solve, shared);
  uint4 keys[kBlocks][kColumns / 16];
  const uint32 columns = ptx::shared_address(&stage.keys[left_row()][warp_of() * kColumns + left_half() * 8]);
#pragma unroll
  for (int k = 0; k < kBlocks; ++k) {
#pragma unroll
    for (int m = 0; m < kColumns / 16; ++m) {
      keys[k][m] = ptx::load_matrices_transposed(columns + kBlock * k * kRow * 2 + 32 * m);
    }
  }
#pragma unroll
  for (float& x : reinterpret_cast<float (&)[sizeof(Rows) / 4]>(h)) x *= stage.products.factors.decay[0];
  ptx::barrier_arrive(kGiven, kThreads);
  ptx::barrier_sync(kUpdates, kGroup);
  const uint32 left = left_in(shared.ends);
#pragma unroll
  for (int k = 0; k < kBlocks; ++k) {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      const uint4 u = ptx::load_matrices(left + i * kBlock * kTokenRow * 2 + 32 * k);
#pragma unroll
      for (int m = 0; m < kColumns / 16; ++m) multiply<In>(h[i][2 * m], h[i][2 * m + 1], u, keys[k][m]);
    }
  }
}

// ---- the output warps ------------------------------------------------------
// Stores the outputs of the warp's tokens, all rows of the state.
__device__ __forceinline__ void store_outputs(
    const Operands& p, const Item& item, int chunk, const Square (&x)[kRowTiles]) {
  const int lane = threadIdx.x % kWarp, first = warp_of() * kBlock + lane / 4, tokens = item.tokens_of(chunk);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int t = first + 8 * half;
    if (t >= tokens) continue;
    uint32* to = reinterpret_cast<uint32*>(item.output(p, item.first_of(chunk) + t) + lane % 4 * 2);
#pragma unroll
    for (int i = 0; i < 2 * kRowTiles; ++i) {
      const float* const pair = &x[i / 2][i % 2][2 * half];
      to[4 * i] = to_pair<In>(pair[0], pair[1]);
    }
  }
}

// A chunk's outputs: the warp's tokens are rows, the state's rows are columns.
__device__ __forceinline__ void attend(
    const Operands& p, const Item& item, int chunk, const Stage& stage, const In (&state)[kTileV][kRow],
    const Shared& shared) {
  const int first = warp_of() * kBlock, row = first + threadIdx.x % kWarp / 4;
  const uint32 queries = left_in(&stage.queries[first]), right = right_in(state);
  Square results[kRowTiles] = {};
#pragma unroll
  for (int k = 0; k < kHeadDim / 16; ++k) {
    const uint4 left = ptx::load_matrices(queries + 32 * k);
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      multiply<In>(results[i][0], results[i][1], left, ptx::load_matrices(right + i * kBlock * kRow * 2 + 32 * k));
    }
  }
  const float upper = stage.products.factors.query[row], lower = stage.products.factors.query[row + 8];
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int j = 0; j < 8; ++j) results[i][j / 4][j % 4] *= j % 4 < 2 ? upper : lower;
  }
  ptx::barrier_sync(kGiven, kThreads);
  const uint32 blocks  = block_in(stage.products.attend, left_row(), left_half());
  const uint32 updates = right_in(shared.updates);
#pragma unroll
  for (int k = 0; k < kBlocks; ++k) {
    if (k > warp_of()) continue;
    const uint4 left = ptx::load_matrices(blocks + kBlockBytes * k);
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      const uint4 u = ptx::load_matrices(updates + i * kBlock * kTokenRow * 2 + 32 * k);
      multiply<In>(results[i][0], results[i][1], left, u);
    }
  }
  store_outputs(p, item, chunk, results);
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
  Shared& shared = *reinterpret_cast<Shared*>(dynamic);
  const Operands p = {q, k, v, products, cu_seqlens, initial_state, final_state, slots, checkpoints, checkpoint_starts,
      out, cu_seqlens_bytes, tokens, uint32(heads), int(q_ratio), int(k_ratio), int(v_ratio), q_stride,
      k_stride, v_stride, int(state_bytes), pool, int(slot_bytes), initial_stride, final_stride,
      checkpoint_every, checkpoint_count, int(start_bytes)};
  const bool outputs = threadIdx.x >= kGroup;

  if constexpr (kHasPdl) ptx::griddep_wait();
  const Item  item(p);
  const int64 slot = item.slot(p);
  const int   chunks = item.chunks();
  if constexpr (kHasPdl) ptx::griddep_launch();
  if (uint64(slot) >= uint64(p.pool)) return item.clear_outputs(p, threadIdx.x, kThreads);
  constexpr int kAhead = kStages - 1, kFirst = kAhead ? kAhead : 1;  // chunks that are copied before their turn
  if (outputs) {
    Copies copies(p, item);
#pragma unroll
    for (int i = 0; i < kFirst; ++i) copies.next(shared.stages[i]);
    for (int chunk = 0; chunk < chunks; ++chunk) {
      ptx::copy_async_wait_for<kFirst - 1>();
      __syncthreads();  // the chunk and the state before it are there, and nobody uses the chunk before
      if (kAhead > 0) copies.next(shared.stages[(chunk + kAhead) % kStages]);
      attend(p, item, chunk, shared.stages[chunk % kStages], shared.states[chunk % 2], shared);
      if (kAhead > 0) continue;
      __syncthreads();
      copies.next(shared.stages[0]);
    }
    return;
  }
  Rows h = {};
  const int first = warp_of() * kColumns;
  if (p.initial_state != nullptr) {
    load_state<kHeadDim>(h, p.initial_state + item.part_of_state(p, slot, p.initial_stride, first), p.state_bytes);
  }
  put_state(h, shared.states[0]);
  for (int chunk = 0; chunk < chunks; ++chunk) {
    __syncthreads();
    advance(h, shared.stages[chunk % kStages], shared.states[chunk % 2], shared);
    put_state(h, shared.states[(chunk + 1) % 2]);
    if (const int64 at = item.checkpoint(p, int64(chunk + 1) * kChunk); at >= 0) {
      const int64 stride = int64(p.heads) * (kValueDim * kHeadDim);
      store_state<kHeadDim>(h, p.checkpoints + item.part_of_state(p, at, stride, first), p.state_bytes);
    }
    if (kAhead == 0) __syncthreads();
  }
  if (p.final_state != nullptr) {
    store_state<kHeadDim>(h, p.final_state + item.part_of_state(p, slot, p.final_stride, first), p.state_bytes);
  }
}

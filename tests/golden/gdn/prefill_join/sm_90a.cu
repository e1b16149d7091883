// gdn_prefill_join, generated from templates/gdn/prefill_join.cu.j2
// spec: {"head_dim":128,"value_dim":128}
//
// The delta rule for whole prompts whose sequences are divided: the state before each part. What a part adds to the
// state is linear in the state before it, so that with the state h_0 after the part from none, and its map m, both of
// gdn/prefill_parts, h becomes h m + h_0. A CTA takes kRows rows (V index) of one head, over the parts of a sequence; a
// thread has four of them in a column. All is float32.

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
// ---- spec ------------------------------------------------------------------
constexpr int kHeadDim  = 128;  // K
constexpr int kValueDim = 128;  // V
constexpr int kRows     = 8;
constexpr int kThreads  = kHeadDim * (kRows / 4);
constexpr int kTiles    = kValueDim / kRows;

struct Operands {
  float* part_states;
  const void* cu_seqlens;
  const uint8* initial_state;
  const void* slots;
  int64 cu_seqlens_bytes;
  int64 tokens;
  int64 pool;
  uint32 heads;
  int64 part_chunks;
  int state_bytes;
  int slot_bytes;
  int64 initial_stride;
};

struct alignas(16) Shared { float state[kHeadDim][kRows]; };

// ---- kernel ----------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kThreads) gdn_prefill_join(
    float* __restrict__ part_states,          // [places of parts, heads, V + K, K]; V rows become states before
    const void* __restrict__ cu_seqlens,      // [sequences + 1], integers of cu_seqlens_bytes
    const uint8* __restrict__ initial_state,  // [pool, heads, V, K] of state_bytes; null: 0
    const void* __restrict__ slots,           // [sequences], of slot_bytes; outside the pool: skipped
    int64 cu_seqlens_bytes,                   // 4 or 8
    int64 tokens,                             // of all sequences
    int64 pool,                               // slots
    int64 heads,
    int64 part_chunks,                        // of a part
    int64 state_bytes,                        // 4: float32; 2: bf16
    int64 slot_bytes,                         // 0, 4 or 8; 0: sequence n uses slot n
    int64 initial_stride                      // elements of a slot

) {
  __shared__ Shared shared;
  const Operands p = {part_states, cu_seqlens, initial_state, slots, cu_seqlens_bytes, tokens, pool, uint32(heads),
      part_chunks, int(state_bytes), int(slot_bytes), initial_stride};
  const int column = threadIdx.x % kHeadDim, row = threadIdx.x / kHeadDim * 4;
  const int head = int(blockIdx.x / kTiles % p.heads), tile = blockIdx.x % kTiles * kRows;
  const int64 n = blockIdx.x / kTiles / p.heads, size = p.part_chunks * kChunk;

  if constexpr (kHasPdl) {
    ptx::griddep_launch();
    ptx::griddep_wait();
  }
  const Sequence sequence = sequence_at(p.cu_seqlens, p.cu_seqlens_bytes, n, p.tokens);
  const int64 parts = max(int64(1), ceil_div(sequence.end - sequence.first, size));
  const int64 slot = p.slot_bytes == 0 ? n : index_at(p.slots, p.slot_bytes, n);
  if (uint64(slot) >= uint64(p.pool)) return;
  float h[4] = {};
  if (p.initial_state != nullptr) {
    const int64 first = slot * p.initial_stride + (int64(head) * kValueDim + tile + row) * kHeadDim + column;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint8* const at = p.initial_state + (first + i * kHeadDim) * p.state_bytes;
      h[i] = p.state_bytes == 4 ? __uint_as_float(ptx::ld<uint32>(at)) : low<bf16>(ptx::ld<uint16>(at));
    }
  }
  constexpr int kSize = (kValueDim + kHeadDim) * kHeadDim;  // of a part's state and map
  float* state = p.part_states + (place_of(sequence.first, n, size) * p.heads + head) * kSize + column;
  for (int64 part = 0;; ++part, state += p.heads * kSize) {
    float* const own = state + (tile + row) * kHeadDim;
    float after[4];
    const bool last = part + 1 == parts;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (!last) after[i] = own[i * kHeadDim];
      own[i * kHeadDim] = h[i];
    }
    if (last) return;
    *reinterpret_cast<float4*>(&shared.state[column][row]) = {h[0], h[1], h[2], h[3]};
    __syncthreads();
    const float* const map = state + kValueDim * kHeadDim;
#pragma unroll 32
    for (int k = 0; k < kHeadDim; ++k) {
      const float  m = map[k * kHeadDim];
      const float4 x = *reinterpret_cast<const float4*>(&shared.state[k][row]);
      after[0] = fmaf(x.x, m, after[0]), after[1] = fmaf(x.y, m, after[1]);
      after[2] = fmaf(x.z, m, after[2]), after[3] = fmaf(x.w, m, after[3]);
    }
    __syncthreads();  // nobody reads the state any more
#pragma unroll
    for (int i = 0; i < 4; ++i) h[i] = after[i];
  }
}

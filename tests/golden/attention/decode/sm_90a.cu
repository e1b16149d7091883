// attention_decode, generated from templates/attention/decode.cu.j2
// spec: {"cache":"nvfp4","cluster":1,"head_dim":128,"head_warps":1,"interleaved":false,"min_ctas":1,"out_dtype":"bf16","packed":true,"pages":"halves","q_dtype":"bf16","rows":8,"soft_cap":false,"stages":2,"two_tables":false,"warps":4}
//
// Attention of a few query rows over a paged cache. Each warp takes tiles of 32 tokens: it copies them to its own ring
// of stages in shared memory, multiplies K by up to 16 query rows on the tensor cores, updates its own online softmax,
// and multiplies V by the weights. Each CTA takes an equal share of all tiles of all requests and KV heads; or, where
// there is little work, each cluster takes one item.

// ---- partials/select -------------------------------------------------------
// Select<kFirst, A, B> is the type A where kFirst is true, else B.
template <bool kFirst, typename A, typename B> struct Choice { using Type = A; };
template <typename A, typename B> struct Choice<false, A, B> { using Type = B; };
template <bool kFirst, typename A, typename B> using Select = typename Choice<kFirst, A, B>::Type;

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

// ---- attention/soft_cap ----------------------------------------------------
// A logit x becomes cap * tanh(x / cap). The product times `scale` is x, and the result is capped, both as exponents of
// two. tanh(z) is 1 - 2 / (1 + e^(2 z)), whose error is that of a few roundings of the cap.
__device__ __forceinline__ float soft_capped(float soft_cap, float product, float scale) {
  constexpr float kToTwo = 1.44269504f;  // from exponents of e
  const float cap = soft_cap * kToTwo;
  const float power = ptx::ex2_approx(product * (scale * (2.0f * kToTwo / cap)));
  return fmaf(-2.0f * cap, ptx::rcp_approx(1.0f + power), cap);
}

// ---- attention/request -----------------------------------------------------
constexpr int kMostTokens = 1 << 24;  // of a request

// A request in tiles of kTile tokens, blocks of kRows query rows, and groups of kHeadWarps KV heads.
template <int kTile, int kRows, int kHeadWarps> struct TiledRequest {
  int tokens;  // in the cache, at most as many as the page table covers
  int q_begin, q_len;
  int first_tile, tiles;  // that any of its query rows sees
  int row_blocks;
  int table;  // where its page numbers begin

  template <class Operands> __device__ __forceinline__ void load(const Operands& p, int b) {
    const int begin = p.cum_q ? p.cum_q[b] : b * p.q_len, end = p.cum_q ? p.cum_q[b + 1] : begin + p.q_len;
    q_begin = max(0, min(begin, p.total_q));
    q_len   = max(0, min(end, p.total_q) - q_begin);
    int pages = p.max_pages;
    table = b * p.table_stride;
    if (p.page_ends) {
      const int first = max(0, min(p.page_ends[b], p.max_pages));
      table = first, pages = max(0, min(p.page_ends[b + 1], p.max_pages) - first);
    }
    tokens = max(0, min(p.seq_lens[b], min(pages, kMostTokens / p.page) * p.page));
    first_tile = first_token(p) / kTile;
    tiles      = max(1, int(ceil_div(tokens, kTile)) - first_tile);
    row_blocks = (q_len * p.group + kRows - 1) / kRows;
  }
  // Returns the first token that any of its query rows sees.
  template <class Operands> __device__ __forceinline__ int first_token(const Operands& p) const {
    return p.window_left < 0 ? 0 : max(0, tokens - q_len - p.window_left);
  }
  template <class Operands> __device__ __forceinline__ int items(const Operands& p) const {
    return p.kv_heads / kHeadWarps * row_blocks;
  }
};

// A query sees the tokens from `first` to before `end`.
struct Span {
  int first, end;

  // Is that of query token `query` of a request, or of its last.
  template <class Operands, class Request>
  __device__ __forceinline__ Span(const Operands& p, const Request& r, int query, bool causal) {
    const int at = r.tokens - r.q_len + min(query, r.q_len - 1);
    first = p.window_left < 0 ? 0 : max(0, at - min(p.window_left, kMostTokens));
    end   = causal ? at + 1 : r.tokens;
  }
};

// ---- attention/token_mask --------------------------------------------------
// A mask of the caller's: a row of bits for each query token of a request, one for each token from `first` on. A query
// sees the tokens before `first`, and those whose bit is 1. Bits behind the end of the mask are 0.
struct TokenMask {
  int64 begin;  // bits
  int   first, row_bits;

  TokenMask() = default;
  // For request b: rows of its tokens from byte mask_ends[b] on, or rows of its new tokens at its queries.
  template <class Operands, class Request>
  __device__ __forceinline__ TokenMask(const Operands& p, const Request& r, int b) : first(first_of(p, r)) {
    row_bits = p.mask_ends ? r.tokens : p.mask_row_bytes * 8;
    begin = p.mask_ends ? int64(p.mask_ends[b]) * 8 : int64(r.q_begin) * row_bits;
  }
  // Returns the first token of request r that a query may not see.
  template <class Operands, class Request>
  __device__ __forceinline__ static int first_of(const Operands& p, const Request& r) {
    return p.mask_ends ? 0 : r.tokens - r.q_len;
  }
  // Bit i says whether a query token of the request sees token `at` + i.
  template <class Operands> __device__ __forceinline__ uint32 bits(const Operands& p, int query, int at) const {
    const int   before = min(max(first - at, 0), 32);
    const int64 from = begin + int64(query) * row_bits + max(at - first, 0);
    const int   left = from < 0 ? 0 : int(min(max(p.mask_bytes - from / 8, int64(0)), int64(5)));
    const uint8* bytes = p.mask + from / 8;
    uint32 low = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i < left) low |= uint32(bytes[i]) << 8 * i;
    }
    const uint32 high = left == 5 ? bytes[4] : 0;
    const uint64 seen = __funnelshift_r(low, high, int(from) % 8);
    return uint32(seen << before) | uint32((uint64(1) << before) - 1);
  }
  // Returns the end of the tokens that all queries of request r see from where the last sees them, `end` without mask.
  template <class Operands, class Request>
  __device__ __forceinline__ static int end_for_all(const Operands& p, const Request& r, int) {
    return first_of(p, r);
  }
};

// No mask: a query sees all tokens of its span.
struct NoMask {
  NoMask() = default;
  template <class Operands, class Request> __device__ __forceinline__ NoMask(const Operands&, const Request&, int) {}
  template <class Operands> __device__ __forceinline__ uint32 bits(const Operands&, int, int) const { return ~0u; }
  template <class Operands, class Request>
  __device__ __forceinline__ static int end_for_all(const Operands&, const Request&, int end) {
    return end;
  }
};

// Returns the bits of a word that are below bit n.
__device__ __forceinline__ uint32 bits_below(int n) { return __funnelshift_lc(~0u, 0, max(n, 0)); }

// What a query sees of the tokens from `start` on, 32 to a word. Bits of `there` tell those that have a page.
template <class Operands, class Mask, int kWords> struct Seen {
  const Operands& p;
  const Mask&     mask;
  const uint32  (&there)[kWords];
  int  query, start;
  Span span;

  template <class Request>
  __device__ __forceinline__ Seen(const Operands& p, const Request& r, int query, bool causal, const Mask& mask,
                                  int start, const uint32 (&there)[kWords])
      : p(p), mask(mask), there(there), query(min(query, r.q_len - 1)), start(start), span(p, r, query, causal) {}

  __device__ __forceinline__ uint32 bits(int w) const {
    const int at = start + 32 * w;
    return there[w] & mask.bits(p, query, at) & bits_below(span.end - at) & ~bits_below(span.first - at);
  }
};

// ---- attention/softmax -----------------------------------------------------
// The online softmax of a warp's query rows, in powers of two.
//
// A weight is 2^(x - reference). The reference is near the maximum of x so far: the x that set it has the weight
// 2^kHeadroom, and it moves only when a weight would be above 2^kLargest, so that float16 holds every weight.
constexpr float kHeadroom = 8.0f, kLargest = 15.0f;
constexpr float kNone = -0x1p126f;  // the reference of a row without a weight

// Factors from products of query rows, two of each kBlocks, to exponents of two. They are positive: the largest product
// stays largest.
template <int kBlocks> struct RowScales {
  float x[kBlocks][2];

  __device__ __forceinline__ static RowScales ones() {
    RowScales scales;
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) scales.x[n][0] = scales.x[n][1] = 1.0f;
    return scales;
  }
};

// Makes fours what products of warpgroups take.
template <int kBlocks, int kFours>
__device__ __forceinline__ float (&flat(float (&x)[kBlocks][kFours][4]))[kBlocks * kFours * 4] {
  return reinterpret_cast<float(&)[kBlocks * kFours * 4]>(x);
}

// Tensor cores leave a lane two rows of each of kBlocks blocks, in fours: with g = lane / 4 and c = lane % 4, rows g
// and g + 8 of a block, and of each 8 tokens or dimensions those at 2 c and 2 c + 1. With kColumns rows are the columns
// of products: rows 2 c and 2 c + 1 of a block, and of each 16 tokens or dimensions those at g and g + 8.
template <int kBlocks, int kTile, int kDims, bool kColumns> struct Softmax {
  static constexpr int kFours = kTile / (kColumns ? 16 : 8), kSums = kDims / (kColumns ? 16 : 8);
  using Logits = float[kBlocks][kFours][4];
  using Scales = RowScales<kBlocks>;

  float reference[kBlocks][2];
  float sum[kBlocks][2];     // of the weights that this lane has seen
  float factor[kBlocks][2];  // of the last move
  float o[kBlocks][kSums][4];  // of weighted values

  // Returns which of a lane's two rows of a block number i of four is of.
  __device__ __forceinline__ static constexpr int row_of(int i) { return kColumns ? i % 2 : i / 2; }
  // Calls f with each of the distances between the lanes that share a row.
  template <class F> __device__ __forceinline__ static void over_lanes(F f) {
#pragma unroll
    for (int distance = kColumns ? 4 : 1; distance < (kColumns ? kWarp : 4); distance *= 2) f(distance);
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      reference[n][0] = reference[n][1] = sum[n][0] = sum[n][1] = 0.0f;
#pragma unroll
      for (int m = 0; m < kSums; ++m) o[n][m][0] = o[n][m][1] = o[n][m][2] = o[n][m][3] = 0.0f;
    }
  }

  // Makes products capped exponents.
  __device__ __forceinline__ static void cap(float soft_cap, Logits& x, const Scales& scales) {
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
      for (int u = 0; u < kFours; ++u) {
#pragma unroll
        for (int i = 0; i < 4; ++i) x[n][u][i] = soft_capped(soft_cap, x[n][u][i], scales.x[n][row_of(i)]);
      }
    }
  }

  // Makes products of tokens that their row does not see -inf. seen(n, i) is what row i of block n sees of the tile.
  template <class F> __device__ __forceinline__ static void hide(Logits& x, int lane, F seen) {
    constexpr int kWordFours = kColumns ? 2 : 4;  // of 32 tokens
    const int own = kColumns ? lane / 4 : lane % 4 * 2;  // a lane's first token
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      const auto upper = seen(n, 0), lower = seen(n, 1);
#pragma unroll
      for (int w = 0; w * kWordFours < kFours; ++w) {
        const uint32 bits[2] = {upper.bits(w) >> own, lower.bits(w) >> own};
#pragma unroll
        for (int u = 0; u < kWordFours && w * kWordFours + u < kFours; ++u) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int token = kColumns ? 16 * u + i / 2 * 8 : 8 * u + i % 2;
            if (!(bits[row_of(i)] >> token & 1)) x[n][w * kWordFours + u][i] = __uint_as_float(0xFF800000u);
          }
        }
      }
    }
  }

  // Makes products exponents. Returns whether references moved: then the sums of weighted values must follow.
  __device__ __forceinline__ bool refer(Logits& x, const Scales& scales) {
    bool fresh = false;
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
      for (int u = 0; u < kFours; ++u) {
#pragma unroll
        for (int i = 0; i < 4; ++i) x[n][u][i] = fmaf(x[n][u][i], scales.x[n][row_of(i)], -reference[n][row_of(i)]);
      }
      fresh = fresh || sum[n][0] == 0.0f || sum[n][1] == 0.0f;
    }
    // Above a positive bound floats are in order as integers, of which one instruction takes the largest of three.
    const float (&all)[kBlocks * kFours * 4] = flat(x);
    int32 most[2] = {__float_as_int(all[0]), __float_as_int(all[1])};
#pragma unroll
    for (int i = 2; i < kBlocks * kFours * 4; i += 4) {
      most[0] = max(max(most[0], __float_as_int(all[i])), __float_as_int(all[i + 1]));
      if (i + 3 < kBlocks * kFours * 4) {
        most[1] = max(max(most[1], __float_as_int(all[i + 2])), __float_as_int(all[i + 3]));
      }
    }
    const bool rises = max(most[0], most[1]) > __float_as_int(kLargest);
    const bool moved = __any_sync(~0u, rises || fresh);
    if (moved) raise(x);
    return moved;
  }
  __device__ __forceinline__ void move() {
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
      for (int m = 0; m < kSums; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) o[n][m][i] *= factor[n][row_of(i)];
      }
    }
  }
  // Makes four exponents of block n weights.
  __device__ __forceinline__ void weigh(int n, float (&x)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[i] = ptx::ex2_approx(x[i]);
      sum[n][row_of(i)] += x[i];
    }
  }

  // Adds up the weights that the lanes of a row have seen.
  __device__ __forceinline__ void close() {
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        over_lanes([&](int distance) { sum[n][i] += __shfl_xor_sync(~0u, sum[n][i], distance); });
        if (sum[n][i] == 0.0f) reference[n][i] = kNone;
      }
    }
  }

 private:
  // Moves the references of rows with an exponent above kLargest, or without a weight so far.
  __device__ __forceinline__ void raise(Logits& x) {
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        float top = x[n][0][kColumns ? row : 2 * row], seen = sum[n][row];
#pragma unroll
        for (int u = 0; u < kFours; ++u) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            if (row_of(i) == row) top = fmaxf(top, x[n][u][i]);
          }
        }
        over_lanes([&](int distance) {
          top = fmaxf(top, __shfl_xor_sync(~0u, top, distance));
          seen += __shfl_xor_sync(~0u, seen, distance);
        });
        const bool  fresh = seen == 0.0f && top >= kNone;
        const float by    = fresh || top > kLargest ? top - kHeadroom : 0.0f;
        factor[n][row] = seen == 0.0f ? 1.0f : ptx::ex2_approx(-by);
        reference[n][row] += by, sum[n][row] *= factor[n][row];
#pragma unroll
        for (int u = 0; u < kFours; ++u) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            if (row_of(i) == row) x[n][u][i] -= by;
          }
        }
      }
    }
  }
};

// ---- partials/prefetch_line ------------------------------------------------
namespace ptx {
// Prefetches the 128-byte line of *p into L2.
__device__ __forceinline__ void prefetch_line(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }
}  // namespace ptx

// ---- attention/work --------------------------------------------------------
// A unit of work is a tile of kTile tokens for kHeadWarps KV heads and one block of kRows query rows; an item is all
// tiles of a request for the same heads and rows. The units of a call are in the order request, heads, rows, tokens.
// Every CTA takes the same number of consecutive units, and finds the first from the lengths on the device. A request
// without tokens counts as one unit, in which no token is present.

// Returns a / b for a >= 0 and b > 0, fast in the most frequent cases, where it is 0 or a.
__device__ __forceinline__ int quotient(int a, int b) {
  if (a < b) return 0;
  return b == 1 ? a : a / b;
}
// A value that is the same in all lanes, as the compiler now sees: branches on it need no reconvergence.
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(~0u, x, 0); }
// Returns the query token of a row.
template <class Operands> __device__ __forceinline__ int token_of(const Operands& p, int row) {
  return int(__umulhi(4 * row, p.group_inverse));  // exact below 2^23
}

// Prefetches line i of `bytes` bytes into L2; none if the bytes end before it.
__device__ __forceinline__ void prefetch_line(const void* from, int64 bytes, int i) {
  constexpr int kLine = 128;
  if (int64(i) * kLine < bytes) ptx::prefetch_line(static_cast<const uint8*>(from) + int64(i) * kLine);
}

// Config is that of attention/decode.
template <class Config> struct Segments {
  using Operands = typename Config::Operands;
  using Request  = TiledRequest<Config::kTile, Config::kRows, Config::kHeadWarps>;
  static constexpr int kTile = Config::kTile, kRows = Config::kRows, kHeadWarps = Config::kHeadWarps;
  static constexpr int kWarps = Config::kWarps, kThreads = Config::kThreads, kCluster = Config::kCluster;
  static constexpr int kTokenWarps = kWarps / kHeadWarps;  // warps that take different tokens

  // Tiles that all query rows of a request see in full: those that begin at `first` to `first + width`.
  struct Inner {
    int first, width;

    __device__ __forceinline__ Inner(const Operands& p, const Request& r) {
      const int begin = Span(p, r, r.q_len - 1, true).first;
      const int end = Config::Mask::end_for_all(p, r, Span(p, r, 0, true).end) - kTile;
      first = uniform(end < begin ? kMostTokens : begin), width = uniform(max(end - begin, 0));
    }
    __device__ __forceinline__ bool has(int start) const { return uint32(start - first) <= uint32(width); }
  };

  static constexpr int kSenders = kCluster > 1 ? kCluster : 1;  // CTAs that add up an item in their shared memory
  static constexpr int kStep    = kSenders * kTokenWarps * kTile;  // tokens from a tile of a warp to its next

  // Returns which of a cluster's warps with the same heads this one is.
  __device__ __forceinline__ static int turn_in_cluster() {
    return int(threadIdx.x) / kWarp / kHeadWarps * kSenders + int(blockIdx.x) % kSenders;
  }
  // Returns the request of this cluster's item.
  __device__ __forceinline__ static int request_of_cluster(const Operands& p) {
    return quotient(int(blockIdx.x) / kSenders, p.kv_heads / kHeadWarps);
  }

  // The units of one item that this CTA takes.
  struct Segment {
    Request request;
    int b, heads, block;  // numbers of the request, of a group of kHeadWarps heads, and of a block of rows
    int tile, count;  // the first of the request's tiles, and how many
    int begin, left;  // the first of the units, and how many this CTA has after them

    // Returns the KV head of warp i of those that take the same tokens.
    __device__ __forceinline__ int head(int i) const { return heads * kHeadWarps + i; }
    __device__ __forceinline__ int first_row() const { return block * kRows; }
    __device__ __forceinline__ bool whole() const { return count == request.tiles; }
    // The first token of this warp's first tile. Warps take the tiles of a CTA in turn, across the ends of segments; or
    // all warps of a cluster take those of an item, its CTAs one after the other.
    __device__ __forceinline__ int first_token() const {
      if constexpr (kCluster > 0) return request.first_tile * kTile + turn_in_cluster() * kTile;
      const int turn = int(threadIdx.x) / kWarp / kHeadWarps;
      return (request.first_tile + tile + (left + count - turn + kTokenWarps) % kTokenWarps) * kTile;
    }
    __device__ __forceinline__ int end_token() const { return (request.first_tile + tile + count) * kTile; }

    // Returns how many tiles this warp takes.
    __device__ __forceinline__ int own_tiles() const {
      return (end_token() - first_token() + kStep - 1) / kStep;
    }

    __device__ __forceinline__ bool next(const Operands& p) {
      if constexpr (kCluster > 0) return ++block < request.row_blocks;  // the same tokens for the next rows
      if (left == 0) return false;
      begin += count;
      if (++block == request.row_blocks) {
        block = 0;
        if (++heads == p.kv_heads / kHeadWarps) {
          heads = 0;
          do request.load(p, ++b);
          while (request.q_len == 0);
        }
      }
      tile  = 0;
      count = min(request.tiles, left);
      left -= count;
      return true;
    }
  };

  // Replaces a warp's segment, which is in shared memory to save registers, by the next one; false where there is none.
  __device__ __forceinline__ static bool advance(const Operands& p, Segment& own) {
    Segment s = own;
    __syncwarp();
    if (!uniform(s.next(p))) return false;
    if (threadIdx.x % kWarp == 0) own = s;
    __syncwarp();
    return true;
  }

  // Prefetches into L2 what CTAs read first, while the previous kernel ends. It may still write this memory, so nothing
  // is loaded.
  __device__ __forceinline__ static void prefetch_inputs(const Operands& p) {
    const int line = blockIdx.x * kThreads + threadIdx.x;
    prefetch_line(p.seq_lens, int64(p.batch) * 4, line);
    prefetch_line(p.tables, (p.page_ends ? int64(p.max_pages) : int64(p.batch) * p.table_stride) * 4, line);
    prefetch_line(p.q, p.total_q * p.q_token_stride * int64(sizeof(typename Config::Query)), line);
  }

  struct Shares {
    int units[kWarps];  // units of the requests that each warp has counted
    alignas(16) Request request;  // the one in which this CTA's share begins
    int b, before;      // its number, and the units of all requests before it
    int size;           // units of every CTA but the last
    int tiles;          // of the first request
  };

  // Rounds the size of a share up a little, if shares then end where items of `tiles` units end: whole items need no
  // sum over CTAs, and such a sum costs more than the memory traffic of kRounding units.
  static constexpr int kRounding = 32;
  __device__ __forceinline__ static int rounded(int size, int tiles) {
    const int parts = max(1, tiles / size);
    const int next  = size <= tiles ? (tiles + parts - 1) / parts : (size + tiles - 1) / tiles * tiles;
    return next - size <= min(kRounding, size / 16) ? next : size;
  }

  // Finds the share of this CTA and its first segment; false where no unit is left for it. Every thread counts the
  // units of a part of the requests.
  __device__ __forceinline__ static bool find_share(const Operands& p, Shares& s, Segment& now, Segment& ahead) {
    const int each = (p.batch + kThreads - 1) / kThreads, b0 = threadIdx.x * each, b1 = min(b0 + each, p.batch);
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    int units = 0;
    for (int b = b0; b < b1; ++b) {
      Request r;
      r.load(p, b);
      units += r.items(p) * r.tiles;
      if (b == 0) s.tiles = r.tiles;
    }
    int upto = units;
#pragma unroll
    for (int distance = 1; distance < kWarp; distance *= 2) {
      const int other = __shfl_up_sync(~0u, upto, distance);
      if (lane >= distance) upto += other;
    }
    if (lane == kWarp - 1) s.units[warp] = upto;
    __syncthreads();
    int total = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      if (w == warp) upto += total;
      total += s.units[w];
    }
    int size = max(kTokenWarps, (total + int(gridDim.x) - 1) / int(gridDim.x));
    if (size >= kRounding && total % s.tiles == 0) size = rounded(size, s.tiles);
    const int begin = blockIdx.x * size;
    if (begin >= total) return false;
    if (threadIdx.x == 0) s.size = size;
    int before = upto - units;
    if (before <= begin && begin < upto) {
      for (int b = b0; b < b1; ++b) {
        Request r;
        r.load(p, b);
        const int own = r.items(p) * r.tiles;
        if (begin < before + own) {
          s.b = b, s.before = before, s.request = r;
          break;
        }
        before += own;
      }
    }
    __syncthreads();
    Segment first;
    first.b = s.b, first.request = s.request;
    const int inside = begin - s.before, mine = min(size, total - begin);
    const int item = quotient(inside, first.request.tiles), blocks = first.request.row_blocks;
    first.heads = quotient(item, blocks);
    first.block = item - first.heads * blocks;
    first.tile  = inside - item * first.request.tiles;
    first.count = min(first.request.tiles - first.tile, mine);
    first.left  = mine - first.count;
    first.begin = begin;
    if (lane == 0) now = ahead = first;
    __syncwarp();
    return true;
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

// ---- partials/st_shared_8 --------------------------------------------------
namespace ptx {
// Stores 8 bytes to shared memory, by address.
__device__ __forceinline__ void st_shared_8(uint32 p, uint32 a, uint32 b) {
  asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(p), "r"(a), "r"(b) : "memory");
}
}  // namespace ptx

// ---- attention/columns -----------------------------------------------------
// The column of the page table that has a token is found by a division by the tokens of a page.
template <class Operands> __device__ __forceinline__ uint32 inverse_of_page(const Operands& p) {
  return (0x80000000u + p.page - 1) / p.page;
}
__device__ __forceinline__ int column_of(int token, uint32 inverse) {
  return int(__umulhi(2 * token, inverse));  // exact below 2^24
}

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

// ---- attention/copies ------------------------------------------------------
// Asynchronous copies into shared memory, and other instructions of the attention kernels.
namespace ptx {
// Copies kBytes where `present`; else writes zeros, and reads nothing.
template <int kBytes, bool kPresent>
__device__ __forceinline__ void copy_or_clear(uint32 to, const void* from, bool present) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16, "one copy");
  const int bytes = present ? kBytes : 0;
  if constexpr (kBytes == 16 && kPresent) {
    copy_async(to, from);
  } else if constexpr (kBytes == 16) {
    copy_async_or_zero(to, from, bytes);
  } else if constexpr (kPresent) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(kBytes) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;"
                 ::"r"(to), "l"(from), "n"(kBytes), "r"(bytes) : "memory");
  }
}

// A row of kBytes bytes on its way into registers, by accesses that its alignment allows; 0 where it is not `present`.
template <int kBytes> struct RowBytes {
  static constexpr int kUnit = kBytes & -kBytes;
  using Access = Select<kUnit == 1, uint8, Select<kUnit == 2, uint16, uint32>>;
  Access parts[kBytes / kUnit];

  __device__ __forceinline__ void load(const uint8* from, bool present) {
#pragma unroll
    for (int i = 0; i < kBytes / kUnit; ++i) {
      parts[i] = 0;
      if (present) parts[i] = ld<Access>(from + i * kUnit);
    }
  }
  __device__ __forceinline__ uint32 word(int w) const {
    uint32 word = 0;
#pragma unroll
    for (int i = w * 4; i < w * 4 + 4; i += kUnit) {
      if (i < kBytes) word |= uint32(parts[i / kUnit]) << i % 4 * 8;
    }
    return word;
  }
};

__device__ __forceinline__ void st_shared_word(uint32 p, uint32 v) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(p), "r"(v) : "memory");
}
// Copies a row of kBytes bytes where `present`, by accesses that its alignment allows, and clears what follows up to
// kRoom. Below four bytes there is no asynchronous copy.
template <int kBytes, int kRoom, bool kPresent>
__device__ __forceinline__ void copy_row_or_clear(uint32 to, const uint8* from, bool present) {
  constexpr int kUnit = kBytes & -kBytes;
  if constexpr (kBytes == kRoom && kUnit == kBytes) {
    copy_or_clear<kBytes, kPresent>(to, from, present);
  } else if constexpr (kUnit >= 4) {
#pragma unroll
    for (int i = 0; i < kRoom; i += kUnit) copy_or_clear<kUnit, false>(to + i, from + i, present && i < kBytes);
  } else {
    RowBytes<kBytes> row;
    row.load(from, present);
#pragma unroll
    for (int i = 0; i < kRoom; i += 4) st_shared_word(to + i, row.word(i / 4));
  }
}

// Returns what lies a b bytes behind base.
__device__ __forceinline__ const uint8* mad_wide(int a, int b, const uint8* base) {
  const uint8* d;
  asm("mad.wide.s32 %0, %1, %2, %3;" : "=l"(d) : "r"(a), "r"(b), "l"(base));
  return d;
}

// Adds to what other CTAs read and write: what they wrote before is seen after, and the other way round.
__device__ __forceinline__ uint32 atom_add_acq_rel(uint32* p, uint32 v) {
  uint32 old;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;" : "=r"(old) : "l"(p), "r"(v) : "memory");
  return old;
}
}  // namespace ptx

// ---- attention/pages -------------------------------------------------------
// Tiles on their way from pages to a warp's own ring of stages, ahead of the work and across segments.
enum class Pages { kWhole, kHalves, kMany };  // a tile lies in one page, each half in one, or in any number of pages

// A stage: K, then V, kTile rows each; their block scales. Config is that of attention/decode.
template <class Config> struct Stages {
  using Operands = typename Config::Operands;
  using Query    = typename Config::Query;
  using Segment  = typename Segments<Config>::Segment;
  using Inner    = typename Segments<Config>::Inner;
  static constexpr int   kTile = Config::kTile, kStages = Config::kStages, kHeadDim = Config::kHeadDim;
  static constexpr int   kWidth = Config::kWidth, kBlocks = Config::kBlocks, kSteps = Config::kSteps;
  static constexpr int   kRowBytes = Config::kRowBytes, kScaleBytes = Config::kScaleBytes;
  static constexpr int   kStageRow = Config::kStageRow, kStageScales = Config::kStageScales;
  static constexpr bool  kInterleaved = Config::kInterleaved, kPacked = Config::kPacked;
  static constexpr bool  kTwoTables = Config::kTwoTables, kIsBf16Cache = Config::kIsBf16Cache;
  static constexpr Pages kPages = Config::kPages;

  static constexpr int kChunks     = kStageRow / 16;  // of a row
  static constexpr int kPassRows   = kWarp / kChunks;  // rows of a pass: those that a warp copies at a time
  static constexpr int kPasses     = kTile / kPassRows;
  static constexpr int kValuesAt   = kTile * kStageRow;
  static constexpr int kScalesAt   = 2 * kTile * kStageRow;
  static constexpr int kVScalesAt  = kScalesAt + kTile * kStageScales;
  static constexpr int kVScalesRow = kInterleaved ? kScaleBytes : kStageScales;  // groups of four rows have no gaps
  static constexpr int kStageBytes = kVScalesAt + kTile * kStageScales;
  static constexpr int kPartialAt  = kStages * kStageBytes;
  static constexpr int kLookups    = kPages == Pages::kHalves ? 2 : 1;
  static constexpr bool kHoldsScales = kScaleBytes % 4 != 0;  // no asynchronous copy takes a row of them
  static_assert(kTile == kWarp && kPassRows > 0, "a lane for each row, and for each chunk of one");
  static_assert(kStageBytes % 128 == 0, "a line that is copied to two of shared memory costs half more sectors");

  // Says where a tile begins, and has a bit for each of its tokens that has no page.
  struct Partial {
    int    start;
    uint32 absent;
  };

  struct alignas(128) Buffer {
    uint8   stages[kStages][kStageBytes];
    Partial partial[kStages];  // of tiles that rows do not see in full
  };

  // The offset of a chunk of a row in a tile, in bytes. The chunks of each 128 bytes are permuted, so that reads of K
  // and V have few bank conflicts.
  __device__ __forceinline__ static int place(int row, int chunk) {
    const int at = row * kChunks + chunk;
    return (kChunks == 2 ? at : kChunks == 4 ? at ^ (row & 6) : at ^ (row & 7)) * 16;
  }

  // Hides how x was computed, so that the compiler keeps it in a register and does not compute it again.
  __device__ __forceinline__ static int opaque(int x) {
    asm volatile("" : "+r"(x));
    return x;
  }

  // Query rows are the right factor of products.
  struct Queries { uint32 words[kBlocks][kSteps][2]; };

  // Returns the token of a tile whose page a lane looks up.
  __device__ __forceinline__ static int lookup_of(int i) {
    return kPages == Pages::kMany ? int(threadIdx.x % kTile) : i * (kTile / 2);
  }

  // The page numbers of a warp's first tile, where it is known before the request's length is: both are then read at
  // the same time. Those behind the request's end mean nothing.
  struct FirstPages {
    bool known = false;
    int  k[kLookups], v[kLookups];

    FirstPages() = default;
    __device__ __forceinline__ explicit FirstPages(const Operands& p) {
      if constexpr (Config::kCluster > 0) {
        const int b = Segments<Config>::request_of_cluster(p);
        known = p.page_ends == nullptr && p.window_left < 0 && b < p.batch;
#pragma unroll
        for (int i = 0; i < kLookups; ++i) {
          const int token = Segments<Config>::turn_in_cluster() * kTile + lookup_of(i);
          const int column = column_of(token, inverse_of_page(p));
          k[i] = v[i] = -1;
          if (known && column < p.max_pages) {
            k[i] = p.tables[b * p.table_stride + column];
            v[i] = kTwoTables ? p.tables[b * p.table_stride + column + p.v_table] : k[i];
          }
        }
      }
    }
  };

  class Producer {
   public:
    // `segment` is the one that this warp copies, ahead of the one that it works on.
    __device__ __forceinline__ Producer(const Operands& p, Segment& segment, uint32 ring, const FirstPages& first)
        : p_(p), segment_(segment), inner_(p, segment.request), inverse_(inverse_of_page(p)) {
      const int lane = threadIdx.x % kWarp;
      rows_to_   = opaque(ring + place(lane / kChunks, lane % kChunks));
      scales_to_ = opaque(ring + kScalesAt + lane * kStageScales);
      enter();
      if (Config::kCluster > 0 && first.known && token_ < end_) look_up<true>(first);
      else seek();
    }

    // Starts the copies of the next tile, if there is one, to the stage that is `stage` bytes behind the first one.
    // Every call makes one group.
    __device__ __forceinline__ void issue(int stage) {
      put_scales();
      partial_ <<= 1;
      if (token_ < end_) {
        bool there[kLookups], all = inner_.has(token_);
#pragma unroll
        for (int i = 0; i < kLookups; ++i) {
          there[i] = uint32(k_page_[i]) < uint32(p_.num_pages);
          if constexpr (kTwoTables) there[i] &= uint32(v_page_[i]) < uint32(p_.num_pages);
          all &= there[i];
        }
        if (__all_sync(~0u, all)) {
          copy<true>(stage, there);
        } else {
          partial_ |= 1;
          copy<false>(stage, there);
        }
        token_ += Segments<Config>::kStep;
        seek();
      }
      ptx::copy_async_commit();
    }

    // Stores the scales of the last tile of issue(), which registers have held since then.
    __device__ __forceinline__ void put_scales() {
      if constexpr (kHoldsScales) {
        if (held_at_ < 0) return;
#pragma unroll
        for (int i = 0; i < kStageScales; i += 4) {
          ptx::st_shared_word(scales_to_ + held_at_ + i, k_held_.word(i / 4));
          ptx::st_shared_word(scales_to_ + held_at_ + kVScalesAt - kScalesAt + i, v_held_.word(i / 4));
        }
        held_at_ = -1;
      }
    }

    // Whether the tile that is used next lacks tokens: then the ring has its Partial.
    __device__ __forceinline__ bool partial() const { return partial_ >> (kStages - 1) & 1; }

   private:
    // Goes to the first tile of this warp in the segment. The pointers are to what this lane copies if it is in page 0.
    __device__ __forceinline__ void enter() {
      const int lane = threadIdx.x % kWarp, row = lane / kChunks, chunk = lane % kChunks * 16;
      const int head = segment_.head(threadIdx.x / kWarp % Config::kHeadWarps);
      token_  = uniform(segment_.first_token());
      end_    = uniform(segment_.end_token());
      tokens_ = uniform(segment_.request.tokens);
      inner_  = Inner(p_, segment_.request);
      table_  = p_.tables + segment_.request.table;
      k_ = p_.k + head * p_.k_head_stride + row * k_token_stride() + chunk;
      v_ = p_.v + head * p_.v_head_stride + row * v_token_stride() + chunk;
      if constexpr (kScaleBytes > 0) {
        k_scales_ = p_.k_scales + head * p_.k_scales_head_stride + lane * k_scales_token_stride();
        v_scales_ = p_.v_scales + head * p_.v_scales_head_stride + lane * v_scales_token_stride();
      }
    }

    // Looks up the pages of the next tile, so that their numbers are known when its copies start.
    __device__ __forceinline__ void seek() {
      while (token_ >= end_) {
        if (!Segments<Config>::advance(p_, segment_)) return;
        enter();
      }
      look_up<false>(FirstPages());
    }

    // Finds the pages of the next tile, which is the `first` one if kFirst.
    template <bool kFirst> __device__ __forceinline__ void look_up(const FirstPages& first) {
#pragma unroll
      for (int i = 0; i < kLookups; ++i) {
        const int token  = token_ + lookup_of(i);
        const int column = column_of(token, inverse_);
        slot_[i] = token - column * p_.page;
        k_page_[i] = v_page_[i] = -1;
        if ((kInterleaved ? token & ~3 : token) < tokens_) {
          k_page_[i] = kFirst ? first.k[i] : table_[column];
          v_page_[i] = kFirst ? first.v[i] : kTwoTables ? table_[column + p_.v_table] : k_page_[i];
        }
      }
    }

    struct Page {
      int k, v, slot;  // slot: of the first row of the pass, if all rows of the pass were in this page
      bool there;
    };

    // The page of `row`; `pass` is the first row of its pass.
    __device__ __forceinline__ Page page_of(const bool (&there)[kLookups], int row, int pass) const {
      if constexpr (kPages == Pages::kMany) {
        const int slot = __shfl_sync(~0u, slot_[0], row);
        return {__shfl_sync(~0u, k_page_[0], row), __shfl_sync(~0u, v_page_[0], row), slot - (row - pass),
                __shfl_sync(~0u, int(there[0]), row) != 0};
      }
      const bool upper = kLookups == 2 && row >= kTile / 2;
      const int  i = kLookups - 1, first = upper ? kTile / 2 : 0;
      return {upper ? k_page_[i] : k_page_[0], upper ? v_page_[i] : v_page_[0],
              (upper ? slot_[i] : slot_[0]) + pass - first, upper ? there[i] : there[0]};
    }

    // With kAll every token of the tile has a page and is seen. Else tokens without one, and those before the first
    // that is seen, are not read, and become 0.
    template <bool kAll>
    __device__ __forceinline__ void copy(int stage, const bool (&there)[kLookups]) {
      const int lane = threadIdx.x % kWarp, rows = tokens_ - token_;  // that there are from here on
      const int hidden = kAll ? 0 : segment_.request.first_token(p_) - token_;
      if constexpr (!kAll) {
        const uint32 absent = __ballot_sync(~0u, !page_of(there, lane, 0).there);
        const uint32 partial = scales_to_ + kPartialAt - kScalesAt + stage / kStageBytes * sizeof(Partial);
        if (lane == 0) ptx::st_shared_8(partial, token_, absent);
      }
#pragma unroll
      for (int i = 0; i < kPasses; ++i) {
        const int row = i * kPassRows + lane / kChunks;
        // The permutation of chunks repeats every eight rows.
        const int on = kPassRows % 8 == 0 ? i * kPassRows * kStageRow
                                          : place(row, lane % kChunks) - place(lane / kChunks, lane % kChunks);
        // In a packed page, one address serves all passes.
        const int  start = kPacked && kPages != Pages::kMany ? row_of_lookup(i * kPassRows) : i * kPassRows;
        const Page page  = page_of(there, kPages == Pages::kMany ? row : start, start);
        const int  skip  = (i * kPassRows - start) * kRowBytes;
        const bool copied = kAll || (page.there && row >= hidden && row < rows);
        copy_chunk<kAll>(rows_to_ + stage + on,
                         at(k_, page.k, p_.k_page_stride, page.slot, k_token_stride()) + skip, copied);
        copy_chunk<kAll>(rows_to_ + stage + on + kValuesAt,
                         at(v_, page.v, p_.v_page_stride, page.slot, v_token_stride()) + skip, copied);
      }
      if constexpr (kScaleBytes > 0) {
        const Page page = page_of(there, lane, 0);
        // Interleaved, a group of four rows holds the scales of its four tokens.
        const int  first = kInterleaved ? lane & ~3 : lane, last = kInterleaved ? lane | 3 : lane;
        const bool k_copied = kAll || (page.there && lane >= hidden && lane < rows);
        const bool v_copied = kAll || (page.there && last >= hidden && first < rows);
        const int v_to = scales_to_ + stage + kVScalesAt - kScalesAt - lane * (kStageScales - kVScalesRow);
        const uint8* k = at(k_scales_, page.k, p_.k_scales_page_stride, page.slot, k_scales_token_stride());
        if constexpr (kHoldsScales) k_held_.load(k, k_copied);
        else ptx::copy_row_or_clear<kScaleBytes, kStageScales, kAll>(scales_to_ + stage, k, k_copied);
        const uint8* v = at(v_scales_, page.v, p_.v_scales_page_stride, page.slot, v_scales_token_stride());
        if constexpr (kHoldsScales) v_held_.load(v, v_copied), held_at_ = stage;
        else ptx::copy_row_or_clear<kScaleBytes, kVScalesRow, kAll>(v_to, v, v_copied);
      }
    }

    // Copies this lane's chunk of a row. What is behind the row's last element becomes 0.
    template <bool kAll>
    __device__ __forceinline__ static void copy_chunk(uint32 to, const uint8* from, bool copied) {
      if constexpr (kRowBytes == kStageRow) {
        ptx::copy_or_clear<16, kAll>(to, from, copied);
      } else {
        constexpr int kBytes = kRowBytes % 16 == 0 ? 16 : 8;  // that rows are aligned to
        const int at = threadIdx.x % kChunks * 16;
#pragma unroll
        for (int i = 0; i < 16; i += kBytes) {
          ptx::copy_or_clear<kBytes, false>(to + i, from + i, copied && at + i < kRowBytes);
        }
      }
    }
    __device__ __forceinline__ static constexpr int row_of_lookup(int row) {
      return row / (kTile / kLookups) * (kTile / kLookups);
    }
    __device__ __forceinline__ static const uint8* at(
        const uint8* base, int page, int page_stride, int slot, int token_stride) {
      return ptx::mad_wide(slot, token_stride, ptx::mad_wide(page, page_stride, base));
    }
    __device__ __forceinline__ int k_token_stride() const { return kPacked ? kRowBytes : p_.k_token_stride; }
    __device__ __forceinline__ int v_token_stride() const { return kPacked ? kRowBytes : p_.v_token_stride; }
    __device__ __forceinline__ int k_scales_token_stride() const {
      return kPacked ? kScaleBytes : p_.k_scales_token_stride;
    }
    __device__ __forceinline__ int v_scales_token_stride() const {
      return kPacked ? kScaleBytes : p_.v_scales_token_stride;
    }

    const Operands& p_;
    Segment& segment_;
    const uint32 inverse_;
    uint32 partial_ = 0;  // a bit for each of the last tiles
    int rows_to_, scales_to_;  // where this lane copies to in the first stage
    int token_, end_, tokens_;  // where this warp's next tile begins, the segment's and the request's ends
    Inner inner_;
    int k_page_[kLookups], v_page_[kLookups], slot_[kLookups];
    const int32* table_;
    const uint8 *k_, *v_, *k_scales_, *v_scales_;
    ptx::RowBytes<kHoldsScales ? kScaleBytes : 1> k_held_, v_held_;
    int held_at_ = -1;  // the stage of what is held
  };
};

// ---- partials/arch ---------------------------------------------------------
// sm_90a
constexpr bool kHasXorsign = true;  // min, max with .xorsign.abs: from sm_86 on
constexpr bool kHasE4m3Cvt = true;
constexpr bool kHasE2m1Cvt = false;
constexpr bool kHasLd256   = false && __CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__ >= 1209;  // PTX 8.8
constexpr bool kHasPdl     = true;

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

// ---- attention/byte_tile ---------------------------------------------------
// Fragments of an E4M3 tile, which float16 holds exactly. The order of dimensions is that of attention/nvfp4_tile: lane
// c of a row of K takes kWidth / 4 neighbouring dimensions, lane g of V takes kWidth / 8.
template <class Layout> struct E4m3Tile {
  using Query   = typename Layout::Query;
  using Queries = typename Layout::Queries;
  static constexpr int kHeadDim = Layout::kHeadDim, kWidth = Layout::kWidth, kBlocks = Layout::kBlocks;
  static constexpr int kSteps = Layout::kSteps, kStageRow = Layout::kStageRow, kValuesAt = Layout::kValuesAt;

  using Mma = f16;
  static constexpr float kKeyUnit = 1.0f, kValueUnit = 1.0f;
  static constexpr int   kKeyWords   = kWidth / 16;  // words that a lane has of a row of K
  static constexpr int   kValueWords = kWidth / 32;  // and of a row of V

  __device__ __forceinline__ static constexpr int word_dim(int j, int r, int half) { return 4 * j + 2 * r + half; }
  // Loads what a lane needs of a query row for steps 2 w and 2 w + 1.
  template <int kRegs>
  __device__ __forceinline__ static void ld_query(const Query* row, int w, int c, uint32 (&x)[kRegs]) {
    if (kHeadDim < kWidth && c * (kWidth / 4) + 8 * w >= kHeadDim) return;
    ld_halves<2 * kRegs>(row + c * (kWidth / 4) + 8 * w, x);
  }
  __device__ __forceinline__ static int value_dim(int m, bool upper, int g) { return g * (kWidth / 8) + 2 * m + upper; }

  // The offsets in a stage of what a lane reads.
  struct Lane {
    int key;       // of row g; row g + 8 is 8 rows further
    int value[2];  // of tokens 2 c and 2 c + 1, likewise

    __device__ __forceinline__ Lane() {
      const int g = threadIdx.x % kWarp / 4, c = threadIdx.x % 4, k = c * (kWidth / 4), v = g * (kWidth / 8);
      key = Layout::opaque(Layout::place(g, k / 16) + k % 16);
#pragma unroll
      for (int i = 0; i < 2; ++i) value[i] = Layout::opaque(kValuesAt + Layout::place(2 * c + i, v / 16) + v % 16);
    }
  };

  // Sets s to K q for the 16 tokens from `first` on.
  __device__ __forceinline__ static void scores(
      const uint8* stage, int first, const Lane& lane, const Queries& q, float (&s)[kBlocks][4]) {
    uint32 bytes[2][kKeyWords];
#pragma unroll
    for (int i = 0; i < 2; ++i) ld_row(stage + (first + 8 * i) * kStageRow, lane.key, bytes[i]);
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0.0f;
#pragma unroll
    for (int w = 0; w < kKeyWords; ++w) {
      const uint32 a[4] = {decode_e4m3x2(uint16(bytes[0][w])), decode_e4m3x2(uint16(bytes[1][w])),
                           decode_e4m3x2(uint16(bytes[0][w] >> 16)), decode_e4m3x2(uint16(bytes[1][w] >> 16))};
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) ptx::mma_half<Mma>(s[n], a, q.words[n][w][0], q.words[n][w][1]);
    }
  }

  // V of 16 tokens, as bytes. Tokens without a page are 0.
  struct Values {
    uint32 bytes[4][kValueWords];  // of tokens 2 c, 2 c + 1, 2 c + 8, 2 c + 9

    __device__ __forceinline__ Values(const uint8* stage, int first, const Lane& lane) {
#pragma unroll
      for (int i = 0; i < 4; ++i) ld_row(stage + (first + i / 2 * 8) * kStageRow, lane.value[i % 2], bytes[i]);
    }
    __device__ __forceinline__ void hide_absent(uint32) {}

    // Adds V p to o.
    __device__ __forceinline__ void multiply(const uint32 (&p)[kBlocks][2], float (&o)[kBlocks][kSteps][4]) const {
#pragma unroll
      for (int m = 0; m < kSteps; ++m) {
        const int w = m / 2;
        const uint32 order = m % 2 ? 0x7362 : 0x5140;  // two dimensions of two tokens
        const uint32 first = __byte_perm(bytes[0][w], bytes[1][w], order);
        const uint32 second = __byte_perm(bytes[2][w], bytes[3][w], order);
        const uint32 a[4] = {decode_e4m3x2(uint16(first)), decode_e4m3x2(uint16(first >> 16)),
                             decode_e4m3x2(uint16(second)), decode_e4m3x2(uint16(second >> 16))};
#pragma unroll
        for (int n = 0; n < kBlocks; ++n) ptx::mma_half<Mma>(o[n][m], a, p[n][0], p[n][1]);
      }
    }
  };
};

// ---- attention/half_tile ---------------------------------------------------
// Fragments of a tile of 16-bit floats, as ldmatrix makes them: dimensions and tokens stay in order.
template <class Layout> struct HalfTile {
  using Query   = typename Layout::Query;
  using Queries = typename Layout::Queries;
  static constexpr int kHeadDim = Layout::kHeadDim, kWidth = Layout::kWidth, kBlocks = Layout::kBlocks;
  static constexpr int kSteps = Layout::kSteps, kStageRow = Layout::kStageRow, kValuesAt = Layout::kValuesAt;

  using Mma = Select<Layout::kIsBf16Cache, bf16, f16>;
  static constexpr float kKeyUnit = 1.0f, kValueUnit = 1.0f;

  __device__ __forceinline__ static constexpr int word_dim(int j, int r, int half) { return 4 * j + 2 * r + half; }
  // Loads what a lane needs of a query row for steps 2 w and 2 w + 1: the dimensions that it gets of K by ldmatrix.
  template <int kRegs>
  __device__ __forceinline__ static void ld_query(const Query* row, int w, int c, uint32 (&x)[kRegs]) {
#pragma unroll
    for (int i = 0; i < kRegs; ++i) {
      const int at = 8 * (4 * w + i);
      if (kHeadDim == kWidth || at < kHeadDim) x[i] = ptx::ld<uint32>(row + at + 2 * c);
    }
  }
  __device__ __forceinline__ static int value_dim(int m, bool upper, int g) { return 16 * m + 8 * upper + g; }

  // The rows whose addresses a lane gives to ldmatrix. In step m an address is XORed with 32 m.
  struct Lane {
    int key, value;

    __device__ __forceinline__ Lane() {
      const int lane = threadIdx.x % kWarp;
      key   = Layout::opaque(Layout::place(lane % 16, lane / 16));
      value = Layout::opaque(kValuesAt + Layout::place(lane % 8 + lane / 16 * 8, lane / 8 % 2));
    }
  };

  // Sets s to K q for the 16 tokens from `first` on.
  __device__ __forceinline__ static void scores(
      const uint8* stage, int first, const Lane& lane, const Queries& q, float (&s)[kBlocks][4]) {
    const uint32 rows = ptx::shared_address(stage) + first * kStageRow;
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0.0f;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const uint4  k    = ptx::load_matrices(rows + (lane.key ^ 32 * i));
      const uint32 a[4] = {k.x, k.y, k.z, k.w};
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) ptx::mma_half<Mma>(s[n], a, q.words[n][i][0], q.words[n][i][1]);
    }
  }

  // V of 16 tokens. Tokens without a page are 0.
  struct Values {
    const uint32 rows, at;

    __device__ __forceinline__ Values(const uint8* stage, int first, const Lane& lane)
        : rows(ptx::shared_address(stage) + first * kStageRow), at(lane.value) {}
    __device__ __forceinline__ void hide_absent(uint32) {}

    // Adds V p to o.
    __device__ __forceinline__ void multiply(const uint32 (&p)[kBlocks][2], float (&o)[kBlocks][kSteps][4]) const {
#pragma unroll
      for (int m = 0; m < kSteps; ++m) {
        const uint4  v    = ptx::load_matrices_transposed(rows + (at ^ 32 * m));
        const uint32 a[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int n = 0; n < kBlocks; ++n) ptx::mma_half<Mma>(o[n][m], a, p[n][0], p[n][1]);
      }
    }
  };
};

// ---- attention/scales ------------------------------------------------------
// The factors around a softmax in powers of two: of queries before it, of outputs behind it.
constexpr float kLog2E = 1.44269504f;

// From products of queries and keys to exponents of two. `unit` is the number that stands for 1 in keys.
template <class Operands> __device__ __forceinline__ float logit_scale(const Operands& p, float unit) {
  return p.bmm1 * (p.bmm1_tensor ? *p.bmm1_tensor : 1.0f) * (kLog2E / unit);
}
// Of outputs. `unit` is the number that stands for 1 in values.
template <class Operands> __device__ __forceinline__ float output_scale(const Operands& p, float unit) {
  return p.bmm2 * (p.bmm2_tensor ? *p.bmm2_tensor : 1.0f) / unit;
}

// The biased exponent of the power of two that brings a row of queries near 2^14, by its largest magnitude: a float16
// then keeps all bits of bfloat16 values over 28 binades. 254 minus it is that of the inverse.
__device__ __forceinline__ uint32 query_exponent(float amax) { return min(268 - (__float_as_uint(amax) >> 23), 253u); }

// ---- attention/queries -----------------------------------------------------
// kRows query rows as the right factor of products, which has eight columns. They are converted once for a segment. In
// float16, each row is first scaled by a power of two to a maximum near 2^14, which keeps all bits of bfloat16 values
// over 28 binades; Scales has the inverse.

// The rows as they are stored. They are loaded while the results of the segment before are written. Config is that of
// attention/decode, Tile makes fragments of its tiles.
template <class Config, class Tile> struct RawQueries {
  using Operands = typename Config::Operands;
  using Query    = typename Config::Query;
  using Mma      = typename Tile::Mma;
  using Segment  = typename Segments<Config>::Segment;
  using Scales   = RowScales<Config::kBlocks>;
  static constexpr int kBlocks = Config::kBlocks, kQueryWords = Config::kWidth / 32;
  static constexpr int kQueryRegs = sizeof(Query) == 1 ? 2 : 4;  // registers of eight neighbouring elements

  uint32 x[kBlocks][kQueryWords][kQueryRegs];

  __device__ __forceinline__ void load(const Operands& p, const Segment& s) {
    const int g = threadIdx.x % kWarp / 4, c = threadIdx.x % 4, head = s.head(threadIdx.x / kWarp % Config::kHeadWarps);
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      const int  row  = s.first_row() + 8 * n + g;
      const bool used = row < s.request.q_len * p.group;
      const int  token = token_of(p, row);
      const Query* from = p.q + (s.request.q_begin + token) * p.q_token_stride +
                          (head * p.group + row - token * p.group) * p.q_head_stride;
#pragma unroll
      for (int w = 0; w < kQueryWords; ++w) {
#pragma unroll
        for (int i = 0; i < kQueryRegs; ++i) x[n][w][i] = 0;
        if (used) Tile::ld_query(from, w, c, x[n][w]);
      }
    }
  }

  __device__ __forceinline__ void get(int n, int w, float (&v)[8]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (sizeof(Query) == 1) {
        const uint32 two = decode_e4m3x2(uint16(x[n][w][i / 2] >> i % 2 * 16));
        v[2 * i] = low<f16>(two), v[2 * i + 1] = high<f16>(two);
      } else {
        using Half = Select<sizeof(Query) == 2, Query, f16>;
        v[2 * i] = low<Half>(x[n][w][i]), v[2 * i + 1] = high<Half>(x[n][w][i]);
      }
    }
  }

  __device__ __forceinline__ void convert(float unit, typename Tile::Queries& q, Scales& scales) const {
    const int c = threadIdx.x % 4;
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      float factor = 1.0f, inverse = 1.0f;  // the factor gets the sign of the unit
      if constexpr (!kIsBf16<Mma>) {
        float amax = 0.0f, v[8];
#pragma unroll
        for (int w = 0; w < kQueryWords; ++w) {
          get(n, w, v);
#pragma unroll
          for (int i = 0; i < 8; ++i) amax = fmaxf(amax, fabsf(v[i]));
        }
        amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, 1));
        amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, 2));
        const uint32 exponent = query_exponent(amax);
        factor = __uint_as_float(exponent << 23), inverse = __uint_as_float((254 - exponent) << 23);
      }
      factor = copysignf(factor, unit);
#pragma unroll
      for (int w = 0; w < kQueryWords; ++w) {
        float v[8];
        get(n, w, v);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          q.words[n][2 * w + i / 2][i % 2] =
              to_pair<Mma>(v[Tile::word_dim(i / 2, i % 2, 0)] * factor, v[Tile::word_dim(i / 2, i % 2, 1)] * factor);
        }
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float scale = fabsf(unit) * __shfl_sync(~0u, inverse, (2 * c + i) * 4);
        scales.x[n][i] = scale == 0.0f ? 0x1p-126f : scale;
      }
    }
  }
};

// ---- attention/ending ------------------------------------------------------
// The end of a query row: where its outputs go, its sink, its lse, and its outputs as they are stored.
struct OutputRow {
  int   head;
  int64 at;  // among the rows of all heads and query tokens

  // Is that of query token `token` of request r, and head `in_group` of those that share a KV head.
  template <class Operands, class Request>
  __device__ __forceinline__ OutputRow(const Operands& p, const Request& r, int kv_head, int token, int in_group)
      : head(kv_head * p.group + in_group), at(int64(r.q_begin + token) * p.kv_heads * p.group + head) {}
};

// Stores the lse of a row, base two, if this lane `stores` it: -inf for a row that sees no token. Its weights are
// 2^(x - reference), and `sum` is that of all. The sink of a head is one more logit, whose token has no value. Returns
// what sums of weighted values are multiplied by: `scale` over the sum, 0 for a row that sees no token.
template <class Operands>
__device__ __forceinline__ float end_row(
    const Operands& p, const OutputRow& row, bool stores, float scale, float reference, float sum) {
  if (p.sinks) {
    const float sink = p.sinks[row.head] * kLog2E, top = fmaxf(sink, reference);
    const float factor = ptx::ex2_approx(reference - top);
    sum = fmaf(sum, factor, ptx::ex2_approx(sink - top)), reference = top;
    scale *= factor;
  }
  if (p.lse && stores) p.lse[row.at] = sum == 0.0f ? __uint_as_float(0xFF800000u) : reference + log2f(sum);
  return sum == 0.0f ? 0.0f : scale / sum;
}

// Makes two neighbouring outputs what is stored: 16 bits or 32.
template <class Out> __device__ __forceinline__ uint32 to_outputs(float a, float b) {
  if constexpr (sizeof(Out) == 1) return encode_e4m3(a) | uint32(encode_e4m3(b)) << 8;
  else return to_pair<Out>(a, b);
}
template <class Out> __device__ __forceinline__ void store_outputs(Out* out, float2 v) {
  using Two = Select<sizeof(Out) == 1, uint16, uint32>;
  *reinterpret_cast<Two*>(out) = Two(to_outputs<Out>(v.x, v.y));
}
template <class Out> __device__ __forceinline__ void store_outputs(Out* out, float4 v) {
  const uint32 a = to_outputs<Out>(v.x, v.y), b = to_outputs<Out>(v.z, v.w);
  if constexpr (sizeof(Out) == 1) *reinterpret_cast<uint32*>(out) = a | b << 16;
  else *reinterpret_cast<uint2*>(out) = {a, b};
}

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

// ---- attention/combine -----------------------------------------------------
// Adds up parts of a softmax, each of which has its own reference. Parts of warps are added in shared memory. Parts of
// CTAs that share an item are in the workspace. The last CTA to write its part of a line adds up the line, in the order
// of the tokens. If many CTAs share an item, the parts of each group of CTAs are added first, then the sums of the
// groups: one warp would take long to read all parts.
struct Quad {
  float reference, sum;
  float4 o;
  __device__ __forceinline__ void add(float f, float4 other) {
    o = {fmaf(f, other.x, o.x), fmaf(f, other.y, o.y), fmaf(f, other.z, o.z), fmaf(f, other.w, o.w)};
  }
};

// Adds up kCount parts, of which references(i), sums(i) and outputs(i) are what part i has of a line.
template <int kCount, class References, class Sums, class Outputs>
__device__ __forceinline__ Quad sum_of(References references, Sums sums, Outputs outputs) {
  Quad quad = {kNone, 0.0f, {0.0f, 0.0f, 0.0f, 0.0f}};
#pragma unroll
  for (int i = 0; i < kCount; ++i) quad.reference = fmaxf(quad.reference, references(i));
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const float f = ptx::ex2_approx(references(i) - quad.reference);
    quad.sum = fmaf(f, sums(i), quad.sum);
    quad.add(f, *reinterpret_cast<const float4*>(outputs(i)));
  }
  return quad;
}

// Counts this warp, which has written a line of its CTA's part, in byte `line` % 4 of a counter. Returns whether
// `others` CTAs were counted before it.
__device__ __forceinline__ bool comes_last(uint32* counter, int line, int others) {
  const int shift = line % 4 * 8;
  uint32 before = 0;
  __syncwarp();
  if (threadIdx.x % kWarp == 0) {
    before = ptx::atom_add_acq_rel(counter, 1u << shift) >> shift & 0xFFu;
    if (before == uint32(others)) atomicSub(counter, uint32(others + 1) << shift);  // for the next launch
  }
  before = __shfl_sync(~0u, before, 0);
  __syncwarp();
  return before == uint32(others);
}

// Config is that of attention/decode, Tile makes fragments of its tiles.
template <class Config, class Tile> struct Combination : Segments<Config> {
  using Operands = typename Config::Operands;
  using Segment  = typename Segments<Config>::Segment;
  using Shares   = typename Segments<Config>::Shares;
  using State    = typename Config::State;
  static constexpr int kHeadDim = Config::kHeadDim, kWidth = Config::kWidth, kRows = Config::kRows;
  static constexpr int kBlocks = Config::kBlocks, kSteps = Config::kSteps, kHeadWarps = Config::kHeadWarps;
  static constexpr int kWarps = Config::kWarps, kThreads = Config::kThreads;
  static constexpr int kTokenWarps = Segments<Config>::kTokenWarps;

  static constexpr int kPitch = kWidth + 4;  // floats of a row in shared memory; rows start in different banks
  static constexpr int kLines = kHeadWarps * kRows;  // lines of a CTA: the query rows of all its heads
  static constexpr int kQuads = kLines * kWidth / 4;
  static constexpr int kCounterWords = (kLines + 3) / 4;
  static constexpr int kMostLines = 8 * kWarp;  // lines of all parts that are added up in one round, at most

  struct Part {
    float o[kRows][kPitch];
    float reference[kRows], sum[kRows];
  };

  // The workspace has the parts; of what it holds, a launch reads only what it wrote. Counters are zero between
  // launches. A CTA has two counters of a byte for each line, one for the item that begins in it and one for the group
  // that ends with it, and two parts, one of an item that began in an earlier CTA and one of an item that goes on in
  // the next CTA.
  struct Slot {
    float* p;
    __device__ __forceinline__ Slot(const Operands& operands, int cta, bool goes_on)
        : p(reinterpret_cast<float*>(operands.workspace) +
            (2 * int64(cta) + goes_on) * (kLines * (kWidth + 2))) {}
    __device__ __forceinline__ float* o(int line, int dim) const { return p + line * kWidth + dim; }
    __device__ __forceinline__ float* reference(int line) const { return p + kLines * kWidth + line; }
    __device__ __forceinline__ float* sum(int line) const { return p + kLines * (kWidth + 1) + line; }
    __device__ __forceinline__ void put(const Quad& quad, int line, int dim) const {
      *reinterpret_cast<float4*>(o(line, dim)) = quad.o;
      if (dim == 0) *reference(line) = quad.reference, *sum(line) = quad.sum;
    }
  };

  __device__ __forceinline__ static void finish(const Operands& p, const Segment& s, Quad quad, int line, int dim) {
    const int block_row = s.first_row() + line % kRows;
    if (block_row >= s.request.q_len * p.group || (kHeadDim < kWidth && dim >= kHeadDim)) return;
    const int   token = token_of(p, block_row);
    const OutputRow row(p, s.request, s.head(line / kRows), token, block_row - token * p.group);
    const float scale = end_row(p, row, dim == 0, output_scale(p, Tile::kValueUnit), quad.reference, quad.sum);
    const float4 o = quad.o;
    store_outputs(p.out + row.at * kHeadDim + dim, float4{o.x * scale, o.y * scale, o.z * scale, o.w * scale});
  }

  // Writes the state of a warp to its part.
  __device__ __forceinline__ static void put(State& state, Part& part) {
    const int g = threadIdx.x % kWarp / 4, c = threadIdx.x % 4;
    state.close();
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = 8 * n + 2 * c + i;
        if (g == 0) part.reference[row] = state.reference[n][i], part.sum[row] = state.sum[n][i];
        if constexpr (Config::kCacheBits == 16) {
#pragma unroll
          for (int m = 0; m < kSteps; ++m) {
            part.o[row][Tile::value_dim(m, false, g)] = state.o[n][m][i];
            part.o[row][Tile::value_dim(m, true, g)]  = state.o[n][m][i + 2];
          }
        } else {  // a lane has four neighbouring dimensions
#pragma unroll
          for (int m = 0; m < kSteps; m += 2) {
            *reinterpret_cast<float4*>(&part.o[row][Tile::value_dim(m, false, g)]) = {
                state.o[n][m][i], state.o[n][m][i + 2], state.o[n][m + 1][i], state.o[n][m + 1][i + 2]};
          }
        }
      }
    }
  }

  __device__ __forceinline__ static Quad sum_of_warps(const Part (&parts)[kWarps], int line, int dim) {
    const int first = line / kRows, row = line % kRows;
    const auto part = [&](int i) -> const Part& { return parts[first + i * kHeadWarps]; };
    return sum_of<kTokenWarps>([&](int i) { return part(i).reference[row]; }, [&](int i) { return part(i).sum[row]; },
                               [&](int i) { return &part(i).o[row][dim]; });
  }

  // The parts that one CTA adds up: the last part of every `step` CTAs from `begin` on, and that of CTA `last`.
  struct Round {
    int first;  // the CTA in which the item begins
    int begin, step, last;

    __device__ __forceinline__ int count() const { return (last - begin) / step + 1; }
    __device__ __forceinline__ Slot slot(const Operands& p, int i) const {
      const int cta = min(begin + (i + 1) * step - 1, last);
      return Slot(p, cta, cta == first);
    }
  };

  // Adds up a line of the parts of a round, at most as many as a warp has lanes, and writes the outputs of the item
  // (`finishes`) or the last of the parts. A warp takes a line, and reads kAtOnce parts at a time.
  __device__ __forceinline__ static void merge(
      const Operands& p, const Segment& s, const Round& round, bool finishes, int line) {
    constexpr int kDims = kWidth < 4 * kWarp ? kWidth : 4 * kWarp, kAtOnce = 8;
    const int lane = threadIdx.x % kWarp, count = round.count();
    const bool used = lane * 4 < kDims;
    uint4 parts[kAtOnce];
    const auto load = [&](int from, int dim) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        parts[i] = {};
        if (used && from + i < count) parts[i] = ptx::ld<uint4>(round.slot(p, from + i).o(line, dim));
      }
    };
    float reference = kNone, sum = 0.0f;
    if (lane < count) {
      const Slot slot = round.slot(p, lane);
      reference = ptx::ld_f32(slot.reference(line)), sum = ptx::ld_f32(slot.sum(line));
    }
    load(0, lane * 4);
    float top = reference;
#pragma unroll
    for (int distance = 1; distance < kWarp; distance *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, distance));
    const float factor = ptx::ex2_approx(reference - top);
    sum *= factor;
#pragma unroll
    for (int distance = 1; distance < kWarp; distance *= 2) sum += __shfl_xor_sync(~0u, sum, distance);
#pragma unroll 1
    for (int dim = lane * 4; dim - lane * 4 < kWidth; dim += kDims) {
      Quad quad = {top, sum, {0.0f, 0.0f, 0.0f, 0.0f}};
#pragma unroll 1
      for (int from = 0; from < count; from += kAtOnce) {
        if (from > 0 || dim >= kDims) load(from, dim);
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const uint4 v = parts[i];
          quad.add(__shfl_sync(~0u, factor, from + i),
                   {__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w)});
        }
      }
      if (!used) continue;
      if (finishes) finish(p, s, quad, line, dim);
      else round.slot(p, count - 1).put(quad, line, dim);
    }
  }

  // Items that a CTA has whole are added up by a few of its warps, the settlers, each after its next tile; the other
  // warps need not wait for that.
  //
  //   others    put, arrive kUnsettled | all tiles of the next segment                        | sync kSettled, put
  //   settlers  put | first of these   | sync kUnsettled | outputs | arrive kSettled | others | put
  //
  // Settlers also wait for each other, kAmongSettlers, before one of them puts its next part.
  static constexpr int kSettlers = kWarps < 4 ? 0 : kWarps < 8 ? 2 : kWarps / 3, kFirstSettler = kWarps - kSettlers;
  enum : int { kUnsettled = 1, kSettled, kAmongSettlers };  // barriers of the CTA

  __device__ __forceinline__ static void settle(const Operands& p, const Segment& s, const Part (&parts)[kWarps]) {
    ptx::barrier_sync(kUnsettled, kThreads);
    for (int i = threadIdx.x - kFirstSettler * kWarp; i < kQuads; i += kSettlers * kWarp) {
      const int line = i / (kWidth / 4), dim = i % (kWidth / 4) * 4;
      finish(p, s, sum_of_warps(parts, line, dim), line, dim);
    }
    ptx::barrier_arrive(kSettled, kThreads);
    ptx::barrier_sync(kAmongSettlers, kSettlers * kWarp);
  }

  // Adds up the parts of the warps of a CTA that has an item whole, and writes its outputs.
  __device__ __forceinline__ static void write(const Operands& p, const Segment& s, const Part (&parts)[kWarps]) {
    for (int i = threadIdx.x; i < kQuads; i += kThreads) {
      const int line = i / (kWidth / 4), dim = i % (kWidth / 4) * 4;
      finish(p, s, sum_of_warps(parts, line, dim), line, dim);
    }
  }

  // Adds up the parts of a segment's warps, and writes the outputs of its item, or one part to the workspace. The warp
  // that writes the last of an item's parts of a line adds them up.
  __device__ __forceinline__ static void combine(
      const Operands& p, const Segment& s, const Shares& shares, const Part (&parts)[kWarps], bool) {
    const int share = shares.size, cta = blockIdx.x, lane = threadIdx.x % kWarp;
    if (s.whole()) {
      write(p, s, parts);
      return;
    }
    const int item_begin = s.begin - s.tile;
    const int first = quotient(item_begin, share), end = (item_begin + s.request.tiles - 1) / share;
    const int count = end - first + 1;
    int group = 1;
    if (count * kLines > kMostLines) {
      do group *= 2;
      while (group * group < count);
    }
    const int begin = first + (cta - first) / group * group;
#pragma unroll 1
    for (int line = threadIdx.x / kWarp; line < kLines; line += kWarps) {
      for (int dim = lane * 4; dim < kWidth; dim += 4 * kWarp) {
        Slot(p, cta, s.tile == 0).put(sum_of_warps(parts, line, dim), line, dim);
      }
      Round round = {first, first, 1, end};
      if (group > 1) round.begin = begin, round.last = min(begin + group - 1, end);
      int counter = group > 1 ? gridDim.x + round.last : first;
#pragma unroll 1
      while (comes_last(p.counters + counter * kCounterWords + line / 4, line, round.count() - 1)) {
        const bool finishes = round.begin == first && round.last == end;
        merge(p, s, round, finishes, line);
        if (finishes) break;
        round   = {first, first, group, end};
        counter = first;
      }
    }
  }
};

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

// ---- partials/cluster ------------------------------------------------------
// CTAs of one cluster: they run at the same time and write into each other's shared memory.
namespace ptx {
__device__ __forceinline__ uint32 cluster_rank() {
  uint32 r;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return r;
}
__device__ __forceinline__ uint32 cluster_ctas() {
  uint32 n;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(n));
  return n;
}
__device__ __forceinline__ uint32 cluster_id() {
  uint32 i;
  asm("mov.u32 %0, %%clusterid.x;" : "=r"(i));
  return i;
}
__device__ __forceinline__ uint32 clusters() {
  uint32 n;
  asm("mov.u32 %0, %%nclusterid.x;" : "=r"(n));
  return n;
}
// A barrier of all threads of the cluster. What they wrote before it, also to shared memory of other CTAs, is visible
// after it.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// Stores to shared memory of the CTA `rank`, at the address that `p` has in this CTA.
__device__ __forceinline__ void st_cluster(const float* p, uint32 rank, float v) {
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(cluster_address(p, rank)), "f"(v) : "memory");
}
}  // namespace ptx

// ---- attention/cluster_items -----------------------------------------------
// One item for each cluster: the warps of its CTAs take the tiles in turn, and nothing goes through the workspace. A
// CTA adds up the parts of its warps, and sends each line to the CTA that owns it, which adds up what comes and writes
// it out. A request with more rows than a segment has gives the cluster one item after the other.
//
//   all CTAs of a cluster  started   sums of warps | stores to owners | sums of CTAs, outputs  (the next item)
//   barrier of the cluster arrive             wait   arrive      wait                   arrive  wait
namespace ptx {
__device__ __forceinline__ void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
}
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }
}  // namespace ptx

// Config is that of attention/decode, Tile makes fragments of its tiles.
template <class Config, class Tile> struct ClusterItems : Combination<Config, Tile> {
  using Sums     = Combination<Config, Tile>;
  using Operands = typename Config::Operands;
  using Segment  = typename Sums::Segment;
  using Part     = typename Sums::Part;
  static constexpr int kWidth = Config::kWidth, kRows = Config::kRows, kWarps = Config::kWarps;
  static constexpr int kThreads = Config::kThreads, kCluster = Config::kCluster, kHeadWarps = Config::kHeadWarps;
  static constexpr int kSenders = Sums::kSenders, kLines = Sums::kLines, kQuads = Sums::kQuads;

  static constexpr int kOwned = kLines / kSenders;  // lines that a CTA owns
  static_assert(kOwned * kSenders == kLines, "all CTAs own as many lines");

  struct alignas(16) Shares {  // of the parts of this CTA's lines
    float o[kSenders][kOwned][kWidth];
    float reference[kSenders][kOwned], sum[kSenders][kOwned];
  };

  // Finds the item of this cluster; false for all CTAs of a cluster that has none.
  __device__ __forceinline__ static bool find_share(const Operands& p, Shares&, Segment& now, Segment& ahead) {
    Segment s;
    s.b = Sums::request_of_cluster(p);
    if (s.b >= p.batch) return false;
    s.request.load(p, s.b);
    if (s.request.q_len == 0) return false;
    if constexpr (kCluster > 1) ptx::cluster_arrive_relaxed();  // nothing was written
    s.heads = blockIdx.x / kSenders - s.b * (p.kv_heads / kHeadWarps), s.block = 0;
    s.tile = s.begin = s.left = 0, s.count = s.request.tiles;
    if (threadIdx.x % kWarp == 0) now = ahead = s;
    __syncwarp();
    return true;
  }

  // Adds up the parts of the warps of all CTAs of a cluster, and writes the outputs of their item.
  __device__ __forceinline__ static void combine(
      const Operands& p, const Segment& s, Shares& incoming, const Part (&parts)[kWarps], bool more) {
    if constexpr (kCluster == 1) return Sums::write(p, s, parts);
    constexpr int kRowQuads = kWidth / 4;
    const int rank = blockIdx.x % kSenders;
    const auto is_used = [&](int line) { return s.first_row() + line % kRows < s.request.q_len * p.group; };
    ptx::cluster_wait();  // all CTAs have started, or have read what came last
    for (int i = threadIdx.x; i < kQuads; i += kThreads) {
      const int line = i / kRowQuads, dim = i % kRowQuads * 4, owner = line / kOwned, own = line % kOwned;
      if (!is_used(line)) continue;
      const Quad quad = Sums::sum_of_warps(parts, line, dim);
      const uint32 o[4] = {__float_as_uint(quad.o.x), __float_as_uint(quad.o.y), __float_as_uint(quad.o.z),
                           __float_as_uint(quad.o.w)};
      ptx::st_cluster(ptx::cluster_address(&incoming.o[rank][own][dim], owner), o);
      if (dim == 0) {
        ptx::st_cluster(&incoming.reference[rank][own], owner, quad.reference);
        ptx::st_cluster(&incoming.sum[rank][own], owner, quad.sum);
      }
    }
    ptx::cluster_arrive();
    ptx::cluster_wait();
    for (int i = threadIdx.x; i < kOwned * kRowQuads; i += kThreads) {
      const int own = i / kRowQuads, dim = i % kRowQuads * 4, line = rank * kOwned + own;
      if (!is_used(line)) continue;
      const Quad quad = sum_of<kSenders>([&](int c) { return incoming.reference[c][own]; },
                                         [&](int c) { return incoming.sum[c][own]; },
                                         [&](int c) { return &incoming.o[c][own][dim]; });
      Sums::finish(p, s, quad, line, dim);
    }
    if (more) ptx::cluster_arrive();
  }
};

// ---- spec ------------------------------------------------------------------
using Query = bf16;
using Out   = bf16;
struct Operands {
  const Query* q;
  const uint8* k;
  const uint8* v;
  const uint8* k_scales;
  const uint8* v_scales;
  const int32* tables;
  const int32* seq_lens;
  const int32* page_ends;
  const int32* cum_q;
  const float* sinks;
  const float* bmm1_tensor;
  const float* bmm2_tensor;
  uint8* workspace;
  uint32* counters;
  Out* out;
  float* lse;
  float bmm1;
  float bmm2;
  int batch;
  int kv_heads;
  int group;
  int q_len;
  int total_q;
  int num_pages;
  int page;
  int max_pages;
  int window_left;
  int64 q_token_stride;
  int64 q_head_stride;
  int k_page_stride;
  int k_token_stride;
  int64 k_head_stride;
  int v_page_stride;
  int v_token_stride;
  int64 v_head_stride;
  int k_scales_page_stride;
  int k_scales_token_stride;
  int64 k_scales_head_stride;
  int v_scales_page_stride;
  int v_scales_token_stride;
  int64 v_scales_head_stride;
  int table_stride;
  int v_table;
  int group_inverse;
  float soft_cap;
};

struct Config {
  using Operands = ::Operands;
  using Query    = ::Query;
  using Mask     = Select<false, TokenMask, NoMask>;
  static constexpr int   kCacheBits   = 4;  // of an element of K and V
  static constexpr bool  kIsBf16Cache = false;
  static constexpr int   kHeadDim     = 128;
  static constexpr int   kWidth       = 128;  // of rows in shared memory and in products, with zeros
  static constexpr int   kRows        = 8;  // query rows of a segment
  static constexpr bool  kInterleaved = false;  // V's scales, by four tokens
  static constexpr bool  kSoftCap     = false;  // logits are capped
  static constexpr bool  kMasked      = false;  // by the caller
  static constexpr Pages kPages       = Pages::kHalves;
  static constexpr bool  kPacked      = true;  // rows of a page and head follow each other
  static constexpr bool  kTwoTables   = false;  // K and V have different page numbers
  static constexpr int   kWarps       = 4;
  static constexpr int   kHeadWarps   = 1;  // warps that take the same tokens for different KV heads
  static constexpr int   kStages      = 2;
  static constexpr int   kMinCtas     = 1;  // that an SM must hold at once; bounds the registers
  static constexpr int   kCluster     = 1;  // CTAs that share an item; 0: all CTAs share all items

  static constexpr int kTile     = 32;  // tokens
  static constexpr int kThreads  = kWarps * kWarp;
  static constexpr int kBlocks   = kRows / 8;
  static constexpr int kSteps    = kWidth / 16;
  static constexpr int kRowBytes = kHeadDim * kCacheBits / 8, kScaleBytes = kCacheBits == 4 ? kHeadDim / 16 : 0;
  static constexpr int kStageRow = kWidth * kCacheBits / 8;  // in bytes, too
  static constexpr int kStageScales = kCacheBits == 4 ? kWidth / 16 : 0;

  using State = Softmax<kBlocks, kTile, kWidth, true>;
};
using State   = Config::State;
using Scales  = State::Scales;
using Segment = Segments<Config>::Segment;
using Stage   = Stages<Config>;
using Tile    = Nvfp4Tile<Stage>;
using Raw     = RawQueries<Config, Tile>;
using Sums    = Combination<Config, Tile>;
using Items   = Select<(Config::kCluster > 0), ClusterItems<Config, Tile>, Sums>;

// ---- shared memory ---------------------------------------------------------
struct Shared {
  Stage::Buffer buffers[Config::kWarps];
  Sums::Part    parts[Config::kWarps];
  Segment now[Config::kWarps], ahead[Config::kWarps];  // a warp's own: where its work is, and where its copies are
  Segment done[Config::kWarps];  // whose parts wait to be added up
  Items::Shares shares;
};

static_assert(sizeof(Shared) == 59392, "the launch counts on it");

// ---- a tile ----------------------------------------------------------------
// Hides what rows do not see. Returns a bit for each token that is there, none for those before the first that is seen.
__device__ __forceinline__ uint32 mask(
    const Operands& p, const Segment& s, const Stage::Partial& tile, State::Logits& x) {
  const uint32 there[1] = {~tile.absent};
  const Config::Mask given(p, s.request, s.b);
  State::hide(x, threadIdx.x % kWarp, [&](int n, int i) {
    const int query = token_of(p, s.first_row() + 8 * n + threadIdx.x % 4 * 2 + i);
    return Seen(p, s.request, query, !Config::kMasked, given, tile.start, there);
  });
  const int rest = s.request.tokens - tile.start, hidden = max(0, s.request.first_token(p) - tile.start);
  return ~tile.absent & ~0u << hidden & (rest >= Config::kTile ? ~0u : (1u << max(rest, 0)) - 1);
}

__device__ __forceinline__ void attend(const Operands& p, const Segment& s, const Tile::Lane& lane,
                                       const Stage::Buffer& buffer, int stage, bool partial, const Tile::Queries& q,
                                       const Scales& scales, State& state) {
  const uint8* tile = buffer.stages[0] + stage;
  State::Logits x;
#pragma unroll
  for (int u = 0; u < State::kFours; ++u) {
    float of_16[Config::kBlocks][4];
    Tile::scores(tile, 16 * u, lane, q, of_16);
#pragma unroll
    for (int n = 0; n < Config::kBlocks; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) x[n][u][i] = of_16[n][i];
    }
  }
  if constexpr (Config::kSoftCap) State::cap(p.soft_cap, x, scales);
  uint32 present = ~0u;
  if (__any_sync(~0u, partial)) present = mask(p, s, buffer.partial[stage / Stage::kStageBytes], x);
  if (state.refer(x, Config::kSoftCap ? Scales::ones() : scales)) state.move();
#pragma unroll
  for (int u = 0; u < State::kFours; ++u) {
    Tile::Values v(tile, 16 * u, lane);
    v.hide_absent(present >> 16 * u);
    uint32 weights[Config::kBlocks][2];
#pragma unroll
    for (int n = 0; n < Config::kBlocks; ++n) {
      state.weigh(n, x[n][u]);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        weights[n][i] = ptx::transpose(to_pair<Tile::Mma>(x[n][u][2 * i], x[n][u][2 * i + 1]));
      }
    }
    v.multiply(weights, state.o);
  }
}

// ---- kernel ----------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(Config::kThreads, Config::kMinCtas) attention_decode(
    const Query* __restrict__ q,            // [tokens, heads, D], rows aligned to 16 bytes (E4M3: 8)
    const uint8* __restrict__ k,            // rows aligned to 16 bytes
    const uint8* __restrict__ v,
    const uint8* __restrict__ k_scales,     // rows aligned to D / 16 bytes
    const uint8* __restrict__ v_scales,
    const int32* __restrict__ tables,       // [batch, max_pages], twice with v_table, or one list
    const int32* __restrict__ seq_lens,     // [batch]
    const int32* __restrict__ page_ends,    // [batch + 1], where requests end in the list; null: a row for each
    const int32* __restrict__ cum_q,        // [batch + 1]; null: q_len of each request
    const float* __restrict__ sinks,        // [heads] or null
    const float* __restrict__ bmm1_tensor,  // [1] or null: multiplies bmm1
    const float* __restrict__ bmm2_tensor,  // [1] or null: multiplies bmm2
    uint8* __restrict__ workspace,          // 16-byte aligned, of any content
    uint32* __restrict__ counters,          // zero between launches
    Out* __restrict__ out,                  // [tokens, heads, D]
    float* __restrict__ lse,                // [tokens, heads] or null; base 2
    float bmm1,
    float bmm2,
    int64 batch,
    int64 kv_heads,
    int64 group,                            // heads / kv_heads
    int64 q_len,
    int64 total_q,                          // tokens of q
    int64 num_pages,
    int64 page,                             // tokens
    int64 max_pages,                        // columns of tables, or the length of the list
    int64 window_left,                      // negative: none
    int64 q_token_stride,                   // elements
    int64 q_head_stride,
    int64 k_page_stride,                    // bytes, as all of the cache
    int64 k_token_stride,
    int64 k_head_stride,
    int64 v_page_stride,
    int64 v_token_stride,
    int64 v_head_stride,
    int64 k_scales_page_stride,
    int64 k_scales_token_stride,
    int64 k_scales_head_stride,
    int64 v_scales_page_stride,
    int64 v_scales_token_stride,
    int64 v_scales_head_stride,
    int64 table_stride,                     // elements
    int64 v_table,                          // elements from a request's K pages to its V pages
    int64 group_inverse,                    // 2^30 / group, rounded up
    float soft_cap                          // of logits

) {
  extern __shared__ __align__(128) uint8 dynamic[];
  Shared& s = *reinterpret_cast<Shared*>(dynamic);
  const Operands p = {q, k, v, k_scales, v_scales, tables, seq_lens, page_ends, cum_q, sinks, bmm1_tensor, bmm2_tensor,
      workspace, counters, out, lse, bmm1, bmm2, int(batch), int(kv_heads), int(group), int(q_len),
      int(total_q), int(num_pages), int(page), int(max_pages), int(window_left), q_token_stride,
      q_head_stride, int(k_page_stride), int(k_token_stride), k_head_stride, int(v_page_stride),
      int(v_token_stride), v_head_stride, int(k_scales_page_stride), int(k_scales_token_stride),
      k_scales_head_stride, int(v_scales_page_stride), int(v_scales_token_stride), v_scales_head_stride,
      int(table_stride), int(v_table), int(group_inverse), soft_cap};
  const int warp = uniform(threadIdx.x / kWarp);

  if constexpr (kHasPdl) {
    Items::prefetch_inputs(p);
    ptx::griddep_wait();
  }
  Segment& now = s.now[warp];
  const Stage::FirstPages first(p);
  if (!uniform(Items::find_share(p, s.shares, now, s.ahead[warp]))) return;
  if constexpr (kHasPdl) ptx::griddep_launch();

  Raw raw;
  raw.load(p, now);
  Stage::Producer ahead(p, s.ahead[warp], ptx::shared_address(&s.buffers[warp]), first);
#pragma unroll 1
  for (int i = 0; i < Config::kStages - 1; ++i) ahead.issue(i * Stage::kStageBytes);
  const Tile::Lane lane;
  const float unit = logit_scale(p, Tile::kKeyUnit);
  constexpr int kLast = (Config::kStages - 1) * Stage::kStageBytes;
  const Stage::Buffer& buffer =
      *reinterpret_cast<const Stage::Buffer*>(dynamic + Stage::opaque(warp * int(sizeof(Stage::Buffer))));
  int  stage = 0, free = kLast;  // the stage that is used next, and the one that is filled; in bytes from the first
  bool more, unsettled = false;
  do {
    Tile::Queries queries;
    Scales scales;
    State state;
    raw.convert(unit, queries, scales);
    state.clear();
    bool settles = unsettled && warp >= Sums::kFirstSettler;  // after its first tile
    int  left = uniform(now.own_tiles());
    if (settles) left = min(left, 1);
    while (true) {
#pragma unroll 1
      for (; left > 0; --left) {
        ptx::copy_async_wait_for<Config::kStages - 2>();
        ahead.put_scales();
        __syncwarp();  // the copies of all lanes are complete, and all have read the stage that is filled next
        ahead.issue(free);
        attend(p, now, lane, buffer, stage, ahead.partial(), queries, scales, state);
        free = stage, stage = stage == kLast ? 0 : stage + Stage::kStageBytes;
      }
      if (!settles) break;
      Sums::settle(p, s.done[warp], s.parts);
      settles = false, left = uniform(now.own_tiles()) - 1;
    }
    if (unsettled && warp < Sums::kFirstSettler) ptx::barrier_sync(Sums::kSettled, Config::kThreads);
    Sums::put(state, s.parts[warp]);
    Segment next = now;
    more = uniform(next.next(p));
    if (more) raw.load(p, next);
    unsettled = uniform(Config::kCluster == 0 && Sums::kSettlers > 0 && more && now.whole());
    if (!unsettled) {
      __syncthreads();
      Items::combine(p, now, s.shares, s.parts, more);
      if (more && Config::kCluster < 2) __syncthreads();
    } else if (warp < Sums::kFirstSettler) {
      ptx::barrier_arrive(Sums::kUnsettled, Config::kThreads);
    } else if (threadIdx.x % kWarp == 0) {
      s.done[warp] = now;
    }
    __syncwarp();
    if (more && threadIdx.x % kWarp == 0) now = next;
    __syncwarp();
  } while (more);
}

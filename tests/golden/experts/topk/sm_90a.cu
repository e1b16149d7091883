// experts_topk, generated from templates/experts/topk.cu.j2
// spec: {"logits":"f32","method":"softmax","per_lane":2,"warps":4,"weights":"f32"}
//
// The experts of each token and their weights, from the logits of a router. A warp takes a token. There may be a logit
// more than experts: that of an expert that all tokens have, whose weight is the sigmoid of it and whose number is behind
// those of the others.

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

// ---- partials/store_float --------------------------------------------------
// Stores a float, rounded where T has 16 bits.
template <typename T> __device__ __forceinline__ void store_float(T* p, float v) {
  if constexpr (sizeof(T) == 4) *p = v;
  else p->bits = uint16(to_pair<T>(v, 0.0f));
}

// ---- partials/reduce -------------------------------------------------------
// Sums over groups of kLanes lanes that are kApart apart, for N values at once: lanes at distance kApart add up first,
// then 2 kApart, 4 kApart, ... Every lane of a group gets the same bits.
template <int kLanes, int kApart = 1, int N>
__device__ __forceinline__ void group_sum(float (&x)[N]) {
#pragma unroll
  for (int distance = kApart; distance < kLanes * kApart; distance *= 2) {
#pragma unroll
    for (int i = 0; i < N; ++i) x[i] += __shfl_xor_sync(~0u, x[i], distance);
  }
}

// ---- experts/choice --------------------------------------------------------
// The experts of a token by its logits, chosen by a warp: lane l has the experts l, l + 32, ... It takes the best top_k
// times, and lane s keeps what was taken for slot s. Experts and groups are compared by integer keys, so that the best
// of a warp is one reduction; of equal keys the lower number is taken.
enum class Method { kSoftmax, kSigmoid };

struct Rules {
  int   experts, top_k, groups, topk_groups;
  bool  renormalize;
  float scale;
};
struct Chosen {
  int32 id;
  float weight;
};

constexpr uint32 kAll  = ~0u;
constexpr int32  kNone = 0x7FFFFFFF;

template <typename T> __device__ __forceinline__ float load(const T* p) {
  if constexpr (sizeof(T) == 4) return ptx::ld_f32(p);
  else return low<T>(ptx::ld<uint16>(p));
}
// A lane's elements of a row of `experts`; behind its end the last again.
template <int N, typename T>
__device__ __forceinline__ void load_row(float (&v)[N], const T* row, int lane, int experts) {
#pragma unroll
  for (int i = 0; i < N; ++i) v[i] = load(row + min(i * kWarp + lane, experts - 1));
}
enum class Bias : int { kF32, kBf16, kF16 };
template <int N>
__device__ __forceinline__ void load_bias(float (&v)[N], const void* bias, Bias type, int lane, int experts) {
  switch (type) {
    case Bias::kF32: return load_row(v, static_cast<const float*>(bias), lane, experts);
    case Bias::kBf16: return load_row(v, static_cast<const bf16*>(bias), lane, experts);
    default: return load_row(v, static_cast<const f16*>(bias), lane, experts);
  }
}

// Unsigned integers in the order of floats: NaN is above all numbers, and -0 is 0. 0 is no float's: it stands for an
// expert that cannot be taken.
__device__ __forceinline__ uint32 key_of(float v) {
  const uint32 bits = __float_as_uint(v + 0.0f);
  return v != v ? kAll : bits >> 31 ? ~bits : bits | 1u << 31;
}
__device__ __forceinline__ float of_key(uint32 key) { return __uint_as_float(key >> 31 ? key ^ 1u << 31 : ~key); }

__device__ __forceinline__ float exp_of(float v) { return ptx::ex2_approx(v * 0x1.715476p+0f); }
__device__ __forceinline__ float sigmoid(float v) { return ptx::rcp_approx(1.0f + exp_of(-v)); }
__device__ __forceinline__ float sum_of_warp(float v) {
  float sum[1] = {v};
  group_sum<kWarp>(sum);
  return sum[0];
}

struct Taken {
  uint32 key;
  int32  id;
};
// Of equal keys, the first.
template <int N> __device__ __forceinline__ Taken best_of(const Taken (&of)[N]) {
  if constexpr (N == 1) {
    return of[0];
  } else {
    Taken better[(N + 1) / 2];
#pragma unroll
    for (int i = 0; i < N; i += 2) better[i / 2] = i + 1 < N && of[i + 1].key > of[i].key ? of[i + 1] : of[i];
    return best_of(better);
  }
}

template <Method kMethod, int kPerLane> class Choice {
 public:
  // By a lane's logits; `bias` is added to their scores. Returns what slot `lane` gets.
  __device__ __forceinline__ static Chosen of(const float (&logits)[kPerLane], const float (&bias)[kPerLane],
                                              const Rules& rules, int lane, uint64* room) {
    uint32 keys[kPerLane];
#pragma unroll
    for (int i = 0; i < kPerLane; ++i)
      keys[i] = i * kWarp + lane < rules.experts ? key_of(score_of(logits[i]) + bias[i]) : 0;
    if (rules.groups > 1) keep_groups(keys, lane, rules);

    const float all = kMethod == Method::kSoftmax && !rules.renormalize ? sum_of_exps(keys) : 1.0f;
    Taken own = {};
    if (!(rules.top_k >= kSifted && sift(own, keys, rules.top_k, lane, room))) {
      for (int slot = 0; slot < rules.top_k; ++slot) {
        const Taken taken = take(keys, lane);
        if (lane == slot) own = taken;
      }
    }
    const bool has = lane < rules.top_k;
    float weight = 0.0f;
    if constexpr (kMethod == Method::kSoftmax) {
      const float best = of_key(__shfl_sync(kAll, own.key, 0));
      weight = has ? exp_of(of_key(own.key) - best) : 0.0f;
      weight /= rules.renormalize ? sum_of_warp(weight) : all;
    } else {
      float logit = 0.0f;
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        const float of_lane = __shfl_sync(kAll, logits[i], own.id % kWarp);
        if (own.id / kWarp == i) logit = of_lane;
      }
      weight = has ? score_of(logit) : 0.0f;
      if (rules.renormalize) weight /= sum_of_warp(weight) + 1e-20f;
    }
    return {own.id, weight * rules.scale};
  }

 private:
  static constexpr int kSifted = 6;  // experts from which on they are not taken one by one: H200, 128 to 512 experts

  __device__ __forceinline__ static float score_of(float logit) {
    return kMethod == Method::kSoftmax ? logit : sigmoid(logit);
  }

  // The key of a group: its two best experts count together. Each lane has the keys of its own two best.
  __device__ __forceinline__ static uint32 key_of_group(uint32 first, uint32 second, int lane) {
    const uint32 best  = __reduce_max_sync(kAll, first);
    const bool   leads = lane == __ffs(__ballot_sync(kAll, first == best)) - 1;
    const uint32 next  = __reduce_max_sync(kAll, leads ? second : first);
    return key_of(of_key(best) + of_key(next));
  }

  // Keeps the keys of the experts in the best groups of neighbouring experts. There are up to 32 groups: lane g has the
  // key of group g.
  __device__ __forceinline__ static void keep_groups(uint32 (&keys)[kPerLane], int lane, const Rules& rules) {
    const int size = rules.experts / rules.groups;
    uint32 own = 0;
    if (size == kWarp) {  // a group has one expert of each lane: all are reduced together
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        const uint32 key = key_of_group(keys[i], 0, lane);
        if (lane == i && i < rules.groups) own = key;
      }
    } else {
      for (int group = 0; group < rules.groups; ++group) {
        uint32 first = 0, second = 0;
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) {
          const uint32 key = uint32(i * kWarp + lane - group * size) < uint32(size) ? keys[i] : 0;
          second = max(second, min(first, key));
          first  = max(first, key);
        }
        const uint32 key = key_of_group(first, second, lane);
        if (lane == group) own = key;
      }
    }
    int better = 0;
    for (int group = 0; group < rules.groups; ++group) {
      const uint32 other = __shfl_sync(kAll, own, group);
      better += other > own || (other == own && group < lane);
    }
    const uint32 kept = __ballot_sync(kAll, lane < rules.groups && better < rules.topk_groups);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int group = size == kWarp ? i : min((i * kWarp + lane) / size, kWarp - 1);
      keys[i] = kept >> group & 1 ? keys[i] : 0;
    }
  }

  // The sum over all experts of exp(logit - best), from keys of logits.
  __device__ __forceinline__ static float sum_of_exps(const uint32 (&keys)[kPerLane]) {
    uint32 best = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) best = max(best, keys[i]);
    best = __reduce_max_sync(kAll, best);
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) sum += keys[i] == 0 ? 0.0f : exp_of(of_key(keys[i]) - of_key(best));
    return sum_of_warp(sum);
  }

  // The best of a warp all at once. As many lanes as experts are to be taken have a best that is not below `bound`, so
  // only keys that are not can be taken: these few are ranked against each other. Returns false where they are many.
  __device__ __forceinline__ static bool sift(Taken& own, const uint32 (&keys)[kPerLane], int top_k, int lane,
                                              uint64* room) {
    uint32* const bests = reinterpret_cast<uint32*>(room);
    uint32 best = keys[0];
#pragma unroll
    for (int i = 1; i < kPerLane; ++i) best = max(best, keys[i]);
    bests[lane] = best;
    __syncwarp();
    int above = 0;
#pragma unroll
    for (int i = 0; i < kWarp; ++i) above += bests[i] > best;
    const uint32 bound = __reduce_min_sync(kAll, above < top_k ? best : kAll);
    __syncwarp();
    room[lane] = 0;
    __syncwarp();
    int count = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const bool   is_one = keys[i] >= bound;
      const uint32 ones   = __ballot_sync(kAll, is_one);
      const int    place  = count + __popc(ones & ((1u << lane) - 1));
      if (is_one && place < kWarp) room[place] = uint64(keys[i]) << 32 | uint32(~(i * kWarp + lane));
      count += __popc(ones);
    }
    if (count > kWarp) return false;
    __syncwarp();
    const uint64 mine = room[lane];
    int rank = 0;
#pragma unroll 8
    for (int i = 0; i < count; ++i) rank += room[i] > mine;
    __syncwarp();
    if (lane < count) room[rank] = mine;
    __syncwarp();
    own = {uint32(room[lane] >> 32), int32(~uint32(room[lane]))};
    return true;
  }

  // Takes the best expert from the lanes' keys, where it leaves 0.
  __device__ __forceinline__ static Taken take(uint32 (&keys)[kPerLane], int lane) {
    Taken each[kPerLane];
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) each[i] = {keys[i], i * kWarp + lane};
    const Taken  best = best_of(each);
    const uint32 key  = __reduce_max_sync(kAll, best.key);
    const int32  id   = __reduce_min_sync(kAll, best.key == key ? best.id : kNone);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i)
      if (i * kWarp + lane == id) keys[i] = 0;
    return {key, id};
  }
};

// ---- spec ------------------------------------------------------------------
using Logit  = float;
using Weight = float;
constexpr Method kMethod  = Method::kSoftmax;
constexpr int    kPerLane = 2;  // experts of a lane
constexpr int    kWarps   = 4;

// ---- kernel ----------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(kWarps * kWarp) experts_topk(
    const Logit* __restrict__ logits,  // [tokens, experts + shared]
    int64 logits_stride,               // elements
    const void* __restrict__ bias,     // [experts] of bias_type; null: none
    int32* __restrict__ out_ids,       // [tokens, top_k + shared]
    Weight* __restrict__ out_weights,  // [tokens, top_k + shared]
    int64 bias_type,                   // 0 float, 1 bf16, 2 f16
    int64 tokens,
    int64 experts,
    int64 top_k,
    int64 renormalize,                 // 0 or 1
    int64 groups,                      // 1: none
    int64 topk_groups,
    int64 shared,                      // 0 or 1: whether the last logit is that of an expert which all tokens have
    float scale) {
  if constexpr (kHasPdl) ptx::griddep_launch(), ptx::griddep_wait();
  const int   lane  = threadIdx.x % kWarp;
  const int64 token = int64(blockIdx.x) * kWarps + threadIdx.x / kWarp;
  if (token >= tokens) return;

  __shared__ alignas(16) uint64 room[kWarps][kWarp];
  float scores[kPerLane], added[kPerLane] = {};
  load_row(scores, logits + token * logits_stride, lane, int(experts));
  if (kMethod == Method::kSigmoid && bias != nullptr) load_bias(added, bias, Bias(bias_type), lane, int(experts));
  const Rules rules = {int(experts), int(top_k), int(groups), int(topk_groups), renormalize != 0, scale};
  Chosen chosen = Choice<kMethod, kPerLane>::of(scores, added, rules, lane, room[threadIdx.x / kWarp]);
  const int slots = int(top_k + shared);
  if (lane >= slots) return;
  if (lane == top_k) chosen = {int32(experts), sigmoid(load(logits + token * logits_stride + experts)) * scale};
  out_ids[token * slots + lane] = chosen.id;
  store_float(out_weights + token * slots + lane, chosen.weight);
}

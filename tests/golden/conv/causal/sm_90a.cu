// conv_causal, generated from templates/conv/causal.cu.j2
// spec: {"by_sequence":true,"dtype":"bf16","threads":128,"vec":2,"width":2}
//
// out[t] = silu(bias + the sum over j of weight[j] * x[t - kPast + j]) for each channel of sequences that lie behind
// each other; before its first token a sequence has its state: the kPast inputs that came last. A thread takes kVec
// neighbouring channels and goes through tokens one by one, with the last kPast of them in registers and the loads of
// the next kAhead under way. Filters do not come from an earlier kernel, and are loaded before it has ended.
//
// With kBySequence a CTA has all tokens of a sequence, and out may be x. Without, it has a block of tokens, whatever
// sequences they are of. What reads a state also writes it: the first kPast tokens of a sequence are always of the CTA
// that has the first of them, and its successor begins behind them.

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

// ---- partials/st_global ----------------------------------------------------
namespace ptx {
// Stores that stay behind the loads before them, which may be of the same memory.
__device__ __forceinline__ void st(void* p, uint16 v) {
  asm volatile("st.global.b16 [%0], %1;" ::"l"(p), "h"(v) : "memory");
}
__device__ __forceinline__ void st(void* p, uint32 v) {
  asm volatile("st.global.b32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
__device__ __forceinline__ void st(void* p, uint2 v) {
  asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(p), "r"(v.x), "r"(v.y) : "memory");
}
}  // namespace ptx

// ---- spec ------------------------------------------------------------------
using In = bf16;
constexpr int  kPast       = 2 - 1;
constexpr int  kVec        = 2;
constexpr bool kBySequence = true;
constexpr int  kThreads    = 128;
constexpr int  kAhead      = kBySequence ? 4 : 8;
// Threads that an SM must hold at once. They leave a thread 64, 80, 96 or 200 registers.
constexpr int  kResident   = kBySequence ? (kVec == 8 ? 768 : 1024) : kVec == 8 ? 320 : kVec == 4 ? 640 : 768;

// ---- kernel ----------------------------------------------------------------
using Channels = float[kVec];
using Packed   = uint32[(kVec + 1) / 2];  // as they are in memory

// What a thread holds: floats where it goes through many tokens, else pairs, which need fewer registers, so that an SM
// has more loads under way.
template <bool> struct HeldAs        { using type = Channels; };
template <>     struct HeldAs<true>  { using type = Packed; };
using Held = HeldAs<kBySequence>::type;

__device__ __forceinline__ uint32 half_of(const uint32* words, int i) { return words[i / 2] >> i % 2 * 16 & 0xFFFFu; }
__device__ __forceinline__ float value(const uint32* words, int i) {
  return i % 2 ? high<In>(words[i / 2]) : low<In>(words[i / 2]);
}
__device__ __forceinline__ float value(const float* v, int i) { return v[i]; }
__device__ __forceinline__ void unpack(Channels& v, const Packed& w) {
#pragma unroll
  for (int i = 0; i < kVec; ++i) v[i] = value(w, i);
}
__device__ __forceinline__ void unpack(Packed& v, const Packed& w) {
#pragma unroll
  for (int i = 0; i < kVec; i += 2) v[i / 2] = w[i / 2];
}
__device__ __forceinline__ void pack(Packed& w, const Channels& v) {
#pragma unroll
  for (int i = 0; i < kVec; i += 2) w[i / 2] = to_pair<In>(v[i], i + 1 < kVec ? v[i + 1] : 0.0f);
}
__device__ __forceinline__ void pack(Packed& w, const Packed& v) { unpack(w, v); }

template <int N> __device__ __forceinline__ void store_run(In* p, const uint32* w) {
  if constexpr (N == 1) ptx::st(p, uint16(w[0]));
  if constexpr (N == 2) ptx::st(p, w[0]);
  if constexpr (N == 4) ptx::st(p, uint2{w[0], w[1]});
  if constexpr (N == 8) ptx::st(p, uint4{w[0], w[1], w[2], w[3]});
}

// N columns of each channel, which lie behind each other: element i * N + j is column j of channel i. Accesses are as
// wide as what a thread has is aligned.
template <int N> struct Columns {
  static constexpr int kSize = kVec * N;
  static constexpr int kRun  = kSize % 8 == 0 ? 8 : kSize % 4 == 0 ? 4 : kSize % 2 == 0 ? 2 : 1;
  uint32 words[kSize / kRun * ((kRun + 1) / 2)];

  // With runs of one element, each has a word of its own.
  __device__ __forceinline__ float operator()(int i, int j) const {
    return kRun == 1 ? low<In>(words[i * N + j]) : value(words, i * N + j);
  }
  // Hides from the compiler what words are, so that it does not hold floats instead.
  __device__ __forceinline__ void make_opaque() {
#pragma unroll
    for (uint32& word : words) asm volatile("" : "+r"(word));
  }
  __device__ __forceinline__ void load(const In* p) {
#pragma unroll
    for (int at = 0; at < kSize; at += kRun) {
      uint32 run[(kRun + 1) / 2];
      ld_halves<kRun>(p + at, run);
#pragma unroll
      for (int r = 0; r < (kRun + 1) / 2; ++r) words[at / kRun * ((kRun + 1) / 2) + r] = run[r];
    }
  }
  __device__ __forceinline__ void store(In* p) const {
#pragma unroll
    for (int at = 0; at < kSize; at += kRun) store_run<kRun>(p + at, words + at / kRun * ((kRun + 1) / 2));
  }
};

// By approximate powers and quotients: off by a few units of a float, and 0 where it is below 2^-119.
__device__ __forceinline__ float silu(float v) {
  constexpr float kLog2E = 0x1.715476p+0f;
  return v * ptx::rcp_approx(1.0f + ptx::ex2_approx(v * -kLog2E));
}

struct Filter {
  Columns<kPast + 1> columns;
  Channels           weight[kPast + 1];  // those of many tokens
  Held               bias;
  bool               has_silu;

  __device__ __forceinline__ Filter(const In* weights, const In* biases, int64 channel, bool with_silu)
      : has_silu(with_silu) {
    columns.load(weights + channel * (kPast + 1));
    Packed w = {};
    if (biases != nullptr) ld_halves<kVec>(biases + channel, w);
    unpack(bias, w);
#pragma unroll
    for (int j = 0; j <= kPast; ++j) {
#pragma unroll
      for (int i = 0; i < kVec; ++i) weight[j][i] = columns(i, j);
    }
  }
  __device__ __forceinline__ float at(int i, int j) const { return kBySequence ? columns(i, j) : weight[j][i]; }

  // Takes the next token: what it gives is stored at `out`, what came last is in `past`.
  __device__ __forceinline__ void step(Held (&past)[kPast], const Packed& token, In* out) {
    if constexpr (kBySequence) columns.make_opaque();
    Channels result;
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      float sum = value(bias, i);
#pragma unroll
      for (int j = 0; j < kPast; ++j) sum = fmaf(value(past[j], i), at(i, j), sum);
      sum = fmaf(value(token, i), at(i, kPast), sum);
      result[i] = has_silu ? silu(sum) : sum;
    }
#pragma unroll
    for (int j = 0; j + 1 < kPast; ++j) {
#pragma unroll
      for (int i = 0; i < sizeof(Held) / 4; ++i) past[j][i] = past[j + 1][i];
    }
    unpack(past[kPast - 1], token);
    Packed w;
    pack(w, result);
    store_run<kVec>(out, w);
  }
};

struct States {
  In*   states;  // at the thread's channels
  int64 stride, channel_stride, token_stride, slots, length;
  const int32* slot_of;   // null: the sequence's number
  const uint8* has;       // null: all or none
  const int32* accepted;  // null: none is drafted
  int64 slot_stride, null_slot, has_by_default;

  // null where the sequence has none, and is left out.
  __device__ __forceinline__ In* of(int64 sequence) const {
    const int64 slot = slot_of == nullptr ? sequence : int32(ptx::ld<uint32>(slot_of + sequence * slot_stride));
    return slot < 0 || slot >= slots || (slot_of != nullptr && slot == null_slot) ? nullptr : states + slot * stride;
  }
  // Whether a thread's columns are one run.
  __device__ __forceinline__ bool is_dense() const {
    return kVec > 1 && length == kPast && token_stride == 1 && channel_stride == kPast && stride % 8 == 0;
  }
  __device__ __forceinline__ void load_past(Held (&past)[kPast], const In* state, int64 sequence) const {
    const bool is_there = has == nullptr ? has_by_default != 0 : ptx::ld<uint8>(has + sequence) != 0;
    int64 first = accepted == nullptr ? 0 : int32(ptx::ld<uint32>(accepted + sequence)) - 1;
    first = max(int64(0), min(first, length - kPast));
    Packed columns[kPast] = {};
    if (is_there && is_dense()) {
      Columns<kPast> run;
      run.load(state);
#pragma unroll
      for (int j = 0; j < kPast; ++j) {
#pragma unroll
        for (int i = 0; i < kVec; ++i) columns[j][i / 2] |= half_of(run.words, i * kPast + j) << i % 2 * 16;
      }
    } else if (is_there) {
#pragma unroll
      for (int j = 0; j < kPast; ++j) {
        const In* column = state + (first + j) * token_stride;
        if (channel_stride == 1) ld_halves<kVec>(column, columns[j]);
        else {
#pragma unroll
          for (int i = 0; i < kVec; ++i)
            columns[j][i / 2] |= uint32(ptx::ld<uint16>(column + i * channel_stride)) << i % 2 * 16;
        }
      }
    }
#pragma unroll
    for (int j = 0; j < kPast; ++j) unpack(past[j], columns[j]);
  }
  __device__ __forceinline__ void store_column(In* state, int64 column, const Held& v) const {
    Packed w;
    pack(w, v);
    In* to = state + column * token_stride;
    if (channel_stride == 1) return store_run<kVec>(to, w);
#pragma unroll
    for (int i = 0; i < kVec; ++i) ptx::st(to + i * channel_stride, uint16(half_of(w, i)));
  }
  __device__ __forceinline__ void store_past(In* state, const Held (&past)[kPast]) const {
    if (is_dense()) {
      Packed columns[kPast];
#pragma unroll
      for (int j = 0; j < kPast; ++j) pack(columns[j], past[j]);
      Columns<kPast> run = {};
#pragma unroll
      for (int at = 0; at < kVec * kPast; ++at)
        run.words[at / 2] |= half_of(columns[at % kPast], at / kPast) << at % 2 * 16;
      return run.store(state);
    }
#pragma unroll
    for (int j = 0; j < kPast; ++j) store_column(state, j, past[j]);
  }
};

// Where the inputs and outputs of a thread's channels are, and the loads that are under way.
struct Rows {
  const In* x;
  In*   out;
  int64 x_stride, out_stride;
  Packed next[kAhead];
  int64  first;  // the token of next[0] before a sequence is known, else -1

  __device__ __forceinline__ void load_ahead(int64 from, int64 until) {
    const In* p = x + from * x_stride;
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      if (from + a < until) ld_halves<kVec>(p, next[a]);
      p += x_stride;
      asm volatile("" : "+l"(p));  // keeps the compiler from holding the distances of all rows
    }
  }
};

// The tokens from `from` to `until` of a sequence from `start` to `end`.
__device__ __forceinline__ void run(Filter& filter, Rows& rows, const States& states, int64 sequence,
                                    int64 start, int64 end, int64 from, int64 until) {
  const bool is_first = from == start;
  Held       past[kPast];
  const auto load_before = [&](int64 token) {
#pragma unroll
    for (int j = 0; j < kPast; ++j) {
      Packed w;
      ld_halves<kVec>(rows.x + (token - kPast + j) * rows.x_stride, w);
      unpack(past[j], w);
    }
  };
  if (is_first) {
    until = min(end, max(until, start + kPast));
  } else {
    from = max(from, start + kPast);
    if (from >= until) return;
    load_before(from);
  }
  if (rows.first != from) rows.load_ahead(from, until);
  rows.first = -1;
  In* state = states.of(sequence);
  if (state == nullptr) return;
  const bool is_drafted = kBySequence && states.accepted != nullptr;  // then all inputs but the first are kept
  if (is_first) {
    states.load_past(past, state, sequence);
    if (is_drafted) {
#pragma unroll
      for (int j = 1; j < kPast; ++j) states.store_column(state, j - 1, past[j]);
    }
  }
  int64 t  = from;
  In*   to = rows.out + from * rows.out_stride;
  if constexpr (!kBySequence) {
    for (; t + kAhead <= until; t += kAhead) {  // the next loads are under way beside the sums
      Packed now[kAhead];
#pragma unroll
      for (int a = 0; a < kAhead; ++a) unpack(now[a], rows.next[a]);
      rows.load_ahead(t + kAhead, until);
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        filter.step(past, now[a], to);
        to += rows.out_stride;
        asm volatile("" : "+l"(to));
      }
    }
  }
#pragma unroll 1
  for (; t < until; ++t, to += rows.out_stride) {
    filter.step(past, rows.next[0], to);
    if (is_drafted && kPast - 1 + t - start < states.length)
      states.store_column(state, kPast - 1 + t - start, past[kPast - 1]);
#pragma unroll
    for (int a = 0; a + 1 < kAhead; ++a) unpack(rows.next[a], rows.next[a + 1]);
    if (kBySequence && t + kAhead < until)
      ld_halves<kVec>(rows.x + (t + kAhead) * rows.x_stride, rows.next[kAhead - 1]);
  }
  if (!is_first || is_drafted) return;
  if (until < end) load_before(end);
  states.store_past(state, past);
}

extern "C" __global__ void __launch_bounds__(kThreads, kResident / kThreads) conv_causal(
    const In* __restrict__ x,             // [tokens, channels]
    const In* __restrict__ weight,        // [channels, width]
    const In* __restrict__ bias,          // [channels]; null: 0
    In* __restrict__ states,              // [state_slots, channels, state_length]
    const int32* __restrict__ starts,     // [sequences + 1]; null: sequence_tokens for each
    const int32* __restrict__ slot_of,    // [sequences]; null: the sequence's number
    const uint8* __restrict__ has_state,  // [sequences]; null: has_by_default
    const int32* __restrict__ accepted,   // [sequences]; null: none is drafted
    In* __restrict__ out,                 // [tokens, channels]; may be x with kBySequence
    int64 channels,
    int64 tokens,
    int64 sequences,
    int64 sequence_tokens,
    int64 block_tokens,
    int64 x_sequence_stride,              // elements
    int64 x_stride,                       // elements
    int64 out_sequence_stride,            // elements
    int64 out_stride,                     // elements
    int64 state_stride,                   // elements
    int64 state_channel_stride,           // elements
    int64 state_token_stride,             // elements
    int64 state_slots,
    int64 state_length,                   // width - 1 or more
    int64 slot_stride,                    // elements
    int64 null_slot,
    int64 has_by_default,                 // 0 or 1
    int64 has_silu                        // 0 or 1
) {
  if constexpr (kHasPdl) ptx::griddep_launch();
  const int64 channel = (int64(blockIdx.y) * kThreads + threadIdx.x) * kVec, block = blockIdx.x;
  const bool  has_channel = channel < channels;
  Filter      filter(weight, bias, has_channel ? channel : 0, has_silu != 0);
  if constexpr (kHasPdl) ptx::griddep_wait();
  const States state = {states + channel * state_channel_stride, state_stride, state_channel_stride, state_token_stride,
                        state_slots, state_length, slot_of, has_state, accepted, slot_stride, null_slot,
                        has_by_default};
  // Of a sequence, its first token and the one behind its last.
  const auto begin_of = [&](int64 sequence) {
    if (starts == nullptr) return sequence * sequence_tokens;
    return max(int64(0), min(int64(int32(ptx::ld<uint32>(starts + sequence))), tokens));
  };
  Rows rows = {x + channel, out + channel, x_stride, out_stride, {}, -1};
  if constexpr (kBySequence) {
    const int64 sequence = block, start = begin_of(sequence), end = begin_of(sequence + 1);
    if (starts == nullptr) {  // then each has its own distance to the next
      rows.x += sequence * (x_sequence_stride - sequence_tokens * x_stride);
      rows.out += sequence * (out_sequence_stride - sequence_tokens * out_stride);
    }
    if (has_channel && start < end) run(filter, rows, state, sequence, start, end, start, end);
  } else {
    const int64 until = min((block + 1) * block_tokens, tokens);
    int64 at = block * block_tokens, first = 0, behind = sequences;
    if (has_channel) rows.load_ahead(at, tokens), rows.first = at;
    while (first < behind) {  // the first sequence that ends behind `at`: each lane looks at one, evenly apart
      const int64  apart = (behind - first + kWarp - 1) / kWarp, seen = first + (threadIdx.x % kWarp + 1) * apart - 1;
      const uint32 before = __ballot_sync(~0u, seen < behind && begin_of(seen + 1) <= at);
      first += __popc(before) * apart, behind = min(behind, first + apart - 1);
    }
    for (int64 sequence = first; has_channel && sequence < sequences; ++sequence) {
      const int64 start = begin_of(sequence), end = begin_of(sequence + 1);
      at = max(at, start);
      if (at >= until) break;
      if (at < end) run(filter, rows, state, sequence, start, end, at, min(end, until));
      at = max(at, end);
    }
  }
}

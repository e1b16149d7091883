// gdn_delta_rule, generated from templates/gdn/delta_rule.cu.j2
// spec: {"ahead":0,"bulk_stores":false,"dtype":"bf16","general":false,"head_dim":128,"ilp_rows":1,"keep_state":false,"max_tokens":4,"state_dtype":"f32","state_layout":"vk","store_steps":true,"tile_v":32,"use_smem_v":false,"value_dim":128,"warps":8}
//
// A CTA owns kTileV rows (V index) of one value head's state. It keeps them in registers and takes the tokens of its
// request one by one. Eight lanes share a row, so that an access of a warp covers whole 128-byte lines of four rows;
// every lane has its columns of kIlpRows rows. For each token and row, in float32:
//   h = decay * h;  u = (v - sum(h * k)) * beta;  h = fma(u, k, h);  out = sum(h * q)
// A lane sums its even and its odd columns, each in ascending order by fma, and adds the two sums. Then the sums of
// lanes that share a row are added, those at distance 1, 2, 4 or, with [K, V], 4, 8, 16.

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

// ---- partials/select -------------------------------------------------------
// Select<kFirst, A, B> is the type A where kFirst is true, else B.
template <bool kFirst, typename A, typename B> struct Choice { using Type = A; };
template <typename A, typename B> struct Choice<false, A, B> { using Type = B; };
template <bool kFirst, typename A, typename B> using Select = typename Choice<kFirst, A, B>::Type;

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

// ---- partials/bulk_groups --------------------------------------------------
// Bulk stores from shared memory, in groups: a thread waits until older groups have read their source.
namespace ptx {
// The stores that this thread has started since the last group become one.
__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until all but the last kAllowed groups of this thread have read their source.
template <int kAllowed> __device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kAllowed) : "memory");
}
}  // namespace ptx

// ---- partials/fence_proxy --------------------------------------------------
namespace ptx {
// Makes this thread's writes to shared memory visible to the copy engine and to the tensor cores.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
}  // namespace ptx

// ---- partials/bulk_copy ----------------------------------------------------
// Bulk copies, asynchronous to the thread that starts them: shared to global memory, and global memory to L2.
namespace ptx {
// Stores `bytes` bytes, as a group of its own. kOnce: they are not read again soon, and L2 evicts them first.
template <bool kOnce>
__device__ __forceinline__ void bulk_store(void* to, const void* from, uint32 bytes) {
  const uint32 source = shared_address(from);
  if constexpr (kOnce) {
    uint64 policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%0], [%1], %2, %3;"
                 ::"l"(to), "r"(source), "r"(bytes), "l"(policy) : "memory");
  } else {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
                 ::"l"(to), "r"(source), "r"(bytes) : "memory");
  }
  bulk_commit();
}
// Prefetches `bytes` bytes into L2.
__device__ __forceinline__ void bulk_prefetch(const void* from, uint32 bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
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

// ---- partials/f32x2 --------------------------------------------------------
// Two floats, for which one instruction suffices where the GPU has packed arithmetic. Each is rounded by itself.
constexpr bool kHasF32x2 = false;

struct alignas(8) f32x2 { float x, y; };

__device__ __forceinline__ f32x2 mul(f32x2 a, f32x2 b) {
  if constexpr (kHasF32x2) {
    f32x2 d;
    asm("{\n"
        "  .reg .b64 a, b, d;\n"
        "  mov.b64 a, {%2, %3};\n"
        "  mov.b64 b, {%4, %5};\n"
        "  mul.rn.f32x2 d, a, b;\n"
        "  mov.b64 {%0, %1}, d;\n"
        "}"
        : "=f"(d.x), "=f"(d.y) : "f"(a.x), "f"(a.y), "f"(b.x), "f"(b.y));
    return d;
  }
  return {a.x * b.x, a.y * b.y};
}

__device__ __forceinline__ f32x2 fma(f32x2 a, f32x2 b, f32x2 c) {
  if constexpr (kHasF32x2) {
    f32x2 d;
    asm("{\n"
        "  .reg .b64 a, b, c, d;\n"
        "  mov.b64 a, {%2, %3};\n"
        "  mov.b64 b, {%4, %5};\n"
        "  mov.b64 c, {%6, %7};\n"
        "  fma.rn.f32x2 d, a, b, c;\n"
        "  mov.b64 {%0, %1}, d;\n"
        "}"
        : "=f"(d.x), "=f"(d.y) : "f"(a.x), "f"(a.y), "f"(b.x), "f"(b.y), "f"(c.x), "f"(c.y));
    return d;
  }
  return {fmaf(a.x, b.x, c.x), fmaf(a.y, b.y, c.y)};
}

// ---- gdn/lanes -------------------------------------------------------------
enum class StateLayout { kVk, kKv };  // a head's state: [V, K] or [K, V]

// The work of a lane. Config: State, kHeadDim (K), kValueDim (V), kTileV, kWarps, kLanes that share a row, and kIlpRows
// of each; for other partials In, kMaxTokens, kAhead, kGeneral.
template <class Config> struct Lanes : Config {
  static constexpr int kWarpRows = kWarp / Config::kLanes * Config::kIlpRows;
  static constexpr int kTiles    = Config::kValueDim / Config::kTileV;
  static constexpr int kThreads  = Config::kWarps * kWarp;
  static constexpr int kVec      = 16 / sizeof(typename Config::State);            // columns of a 16-byte access
  static constexpr int kAccesses = Config::kHeadDim / (Config::kLanes * kVec);     // accesses of a lane to a row
  static constexpr int kQuads    = Config::kHeadDim / (Config::kLanes * 4);        // groups of four columns of a lane
  static constexpr int kPairs    = 2 * kQuads;
  static_assert(Config::kHeadDim % (Config::kLanes * kVec) == 0, "every column has a lane");

  using Rows = f32x2[Config::kIlpRows][kPairs];
};

// ---- gdn/rows --------------------------------------------------------------
// Moves a lane's rows of a state between memory and registers, in 16-byte accesses. C: Lanes.

// A lane's rows of a [V, K] state as they are in memory.
template <class C> using Packed = uint32[C::kIlpRows][4 * C::kAccesses];

template <typename State, int N> __device__ __forceinline__ f32x2 pair_of(const uint32 (&row)[N], int i) {
  if constexpr (sizeof(State) == 4) return {__uint_as_float(row[2 * i]), __uint_as_float(row[2 * i + 1])};
  else return {low<State>(row[i]), high<State>(row[i])};
}

template <typename State, int N> __device__ __forceinline__ void set_pair(uint32 (&row)[N], int i, f32x2 x) {
  if constexpr (sizeof(State) == 4) row[2 * i] = __float_as_uint(x.x), row[2 * i + 1] = __float_as_uint(x.y);
  else row[i] = to_pair<State>(x.x, x.y);
}

// The offset in a head's state of a lane's part of rows row, row + 1, ...
template <class C, StateLayout kLayout>
__device__ __forceinline__ int64 lane_offset(int row, int lane) {
  if constexpr (kLayout == StateLayout::kVk) return row * C::kHeadDim + lane * C::kVec;
  return lane * C::kVec * C::kValueDim + row;
}

template <int kRows, int kPairs>
__device__ __forceinline__ float& at(f32x2 (&h)[kRows][kPairs], int row, int column) {
  return column % 2 ? h[row][column / 2].y : h[row][column / 2].x;
}

// The offset of a [V, K] lane's access m to its row r.
template <class C> __device__ __forceinline__ int access(int r, int m) {
  return r * C::kHeadDim + m * (C::kLanes * C::kVec);
}

// The offset of a [K, V] lane's access to its column c, rows r to r + 3.
template <class C> __device__ __forceinline__ int column_access(int r, int c) {
  return (c / 4 * (4 * C::kLanes) + c % 4) * C::kValueDim + r;
}

template <class C, StateLayout kLayout>
__device__ __forceinline__ void load_rows(Packed<C>& h, const typename C::State* p) {
  static_assert(kLayout == StateLayout::kVk, "neighbours in memory are of one row");
#pragma unroll
  for (int r = 0; r < C::kIlpRows; ++r) {
#pragma unroll
    for (int m = 0; m < C::kAccesses; ++m) {
      const uint4 words = ptx::ld_once(p + access<C>(r, m));
      h[r][4 * m] = words.x, h[r][4 * m + 1] = words.y, h[r][4 * m + 2] = words.z, h[r][4 * m + 3] = words.w;
    }
  }
}

template <class C, StateLayout kLayout>
__device__ __forceinline__ void load_rows(typename C::Rows& h, const typename C::State* p) {
  if constexpr (kLayout == StateLayout::kVk) {
    Packed<C> packed;
    load_rows<C, kLayout>(packed, p);
#pragma unroll
    for (int i = 0; i < C::kIlpRows * C::kPairs; ++i) {
      h[i / C::kPairs][i % C::kPairs] = pair_of<typename C::State>(packed[i / C::kPairs], i % C::kPairs);
    }
  } else {
#pragma unroll
    for (int c = 0; c < 2 * C::kPairs; ++c) {
#pragma unroll
      for (int r = 0; r < C::kIlpRows; r += 4) {
        const uint4 words = ptx::ld_once(p + column_access<C>(r, c));
        at(h, r, c) = __uint_as_float(words.x), at(h, r + 1, c) = __uint_as_float(words.y);
        at(h, r + 2, c) = __uint_as_float(words.z), at(h, r + 3, c) = __uint_as_float(words.w);
      }
    }
  }
}

enum class To { kL2, kMemory, kShared };
template <To kTo, typename State> __device__ __forceinline__ void store_words(State* at, const uint4& words) {
  if constexpr (kTo == To::kL2) ptx::st(at, words);
  if constexpr (kTo == To::kMemory) ptx::st_once(at, words);
  if constexpr (kTo == To::kShared) *reinterpret_cast<uint4*>(at) = words;
}

template <class C, To kTo, StateLayout kLayout>
__device__ __forceinline__ void store_rows(const Packed<C>& h, typename C::State* p) {
  static_assert(kLayout == StateLayout::kVk, "neighbours in memory are of one row");
#pragma unroll
  for (int r = 0; r < C::kIlpRows; ++r) {
#pragma unroll
    for (int m = 0; m < C::kAccesses; ++m) {
      store_words<kTo>(p + access<C>(r, m), uint4{h[r][4 * m], h[r][4 * m + 1], h[r][4 * m + 2], h[r][4 * m + 3]});
    }
  }
}

template <class C, To kTo, StateLayout kLayout>
__device__ __forceinline__ void store_rows(typename C::Rows& h, typename C::State* p) {
  if constexpr (kLayout == StateLayout::kVk) {
    Packed<C> packed;
#pragma unroll
    for (int i = 0; i < C::kIlpRows * C::kPairs; ++i) {
      set_pair<typename C::State>(packed[i / C::kPairs], i % C::kPairs, h[i / C::kPairs][i % C::kPairs]);
    }
    store_rows<C, kTo, kLayout>(packed, p);
  } else {
#pragma unroll
    for (int c = 0; c < 2 * C::kPairs; ++c) {
#pragma unroll
      for (int r = 0; r < C::kIlpRows; r += 4) {
        const float x[4] = {at(h, r, c), at(h, r + 1, c), at(h, r + 2, c), at(h, r + 3, c)};
        store_words<kTo>(p + column_access<C>(r, c), uint4{__float_as_uint(x[0]), __float_as_uint(x[1]),
                                                         __float_as_uint(x[2]), __float_as_uint(x[3])});
      }
    }
  }
}

// ---- gdn/operands ----------------------------------------------------------
// The item of work of a CTA, and what it loads of the kernel's parameters, which are the struct Operands. C: Lanes.
template <class C> struct Item {
  int64 n;     // request
  int   head;  // value head
  int   tile;  // first row

  template <class Operands> __device__ __forceinline__ int64 values(const Operands& p) const {
    return n * p.v_batch_stride + head * C::kValueDim + tile;
  }
  template <class Operands> __device__ __forceinline__ int64 outputs(const Operands& p) const {
    return (n * p.tokens * p.value_heads + head) * C::kValueDim + tile;
  }
  template <StateLayout kLayout>
  __device__ __forceinline__ int64 rows(int row, int lane) const {
    return int64(head) * (C::kValueDim * C::kHeadDim) + lane_offset<C, kLayout>(tile + row, lane);
  }
};

// What is loaded together is used after all loads were issued: until then it stays as it is in memory, because even a
// conversion would wait.

// Entry n of an index list of 4- or 8-byte integers; nothing where there is no list (0 bytes), and the entry is n.
struct Entry { uint32 low, high; };

__device__ __forceinline__ Entry load_entry(const void* list, int bytes, int64 n) {
  Entry entry = {};
  if (bytes == 0) return entry;
  const uint8* from = static_cast<const uint8*>(list) + n * bytes;
  entry.low  = ptx::ld<uint32>(from);
  entry.high = ptx::ld<uint32>(from + bytes - 4);
  return entry;
}

__device__ __forceinline__ int64 value_of(const Entry& entry, int bytes, int64 n) {
  if (bytes == 0) return n;
  return bytes == 8 ? int64(uint64(entry.high) << 32 | entry.low) : int32(entry.low);
}

__device__ __forceinline__ int64 slot_at(const void* slots, int bytes, int64 n) {
  return value_of(load_entry(slots, bytes, n), bytes, n);
}

// Whether the pool has a slot; a negative one never exists.
template <class Operands> __device__ __forceinline__ bool exists(const Operands& p, int64 slot) {
  return uint64(slot) < uint64(p.pool);
}

// Writes zero for every token of an item that has no state; `out` points to the item's first row.
template <class C, class Operands>
__device__ __forceinline__ void clear_outputs(const Operands& p, typename C::In* out) {
  for (int i = threadIdx.x; i < p.tokens * C::kTileV; i += C::kThreads) {
    out[i / C::kTileV * p.value_heads * C::kValueDim + i % C::kTileV].bits = 0;
  }
}

template <typename In> __device__ __forceinline__ float load_half(const In* p) { return low<In>(ptx::ld<uint16>(p)); }

template <class C> __device__ __forceinline__ uint32 load_gate(const void* p, int64 i, int bytes) {
  if (C::kGeneral && bytes == 4) return ptx::ld<uint32>(static_cast<const float*>(p) + i);
  return ptx::ld<uint16>(static_cast<const typename C::In*>(p) + i);
}

template <class C> __device__ __forceinline__ float gate_of(uint32 bits, int bytes) {
  return C::kGeneral && bytes == 4 ? __uint_as_float(bits) : low<typename C::In>(bits);
}

enum class Bias : int { kF32, kBf16, kF16 };
__device__ __forceinline__ uint32 load_bias(const void* p, int i, Bias type) {
  if (type == Bias::kF32) return ptx::ld<uint32>(static_cast<const float*>(p) + i);
  return ptx::ld<uint16>(static_cast<const uint16*>(p) + i);
}

__device__ __forceinline__ float bias_of(uint32 bits, Bias type) {
  return type == Bias::kF32 ? __uint_as_float(bits) : type == Bias::kBf16 ? low<bf16>(bits) : low<f16>(bits);
}

constexpr int kShare = 4;  // heads that one CTA prefetches

// DRAM loses time whenever it switches between writing and reading. So the heads of a batch are cut into groups of
// kAhead, and the CTAs of a group's first heads prefetch the states of the whole next group into L2: DRAM reads come in
// bursts.
template <class C, class Operands>
__device__ __forceinline__ void bring_next_group(const Operands& p, const Item<C>& item) {
  static_assert(C::kAhead % kShare == 0, "every head has a CTA that brings it");
  if constexpr (C::kAhead > 0) {
    const uint32 value_heads = p.value_heads, head = uint32(item.n) * value_heads + item.head;
    const uint32 place = head % C::kAhead;
    const uint32 wanted = head - place + C::kAhead + place * kShare + threadIdx.x;
    if (threadIdx.x >= kShare || place >= C::kAhead / kShare || wanted >= uint32(p.batch) * value_heads) return;
    const int64 slot = slot_at(p.slots, p.slot_bytes, wanted / value_heads);
    if (!exists(p, slot)) return;
    int64 piece = int64(wanted % value_heads) * (C::kValueDim * C::kHeadDim) + item.tile * C::kHeadDim;
    if constexpr (C::kGeneral) piece += (int64(wanted % value_heads) - item.head) * p.state_head_gap;
    ptx::bulk_prefetch(p.state + slot * p.state_stride + piece, C::kTileV * C::kHeadDim * sizeof(typename C::State));
  }
}

// ---- gdn/inputs ------------------------------------------------------------
constexpr float kNormEps = 1e-6f;

// The gates of a token, and the offset in `steps`, in elements, of the state after it; negative: it is not stored.
template <bool kStep> struct Token { float decay, beta; int64 step; };
template <> struct Token<false> { float decay, beta; static constexpr int64 step = -1; };

__device__ __forceinline__ void set_step(Token<true>& token, int64 step) { token.step = step; }
__device__ __forceinline__ void set_step(Token<false>&, int64) {}

// Returns log(1 + exp(x)), which is x itself from about 17 on.
__device__ __forceinline__ float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

// What every row of an item needs: load() issues the loads, the other functions use the loaded values.
// kSteps: the state after every token is stored. C: Lanes.
template <class C, bool kSteps> struct ItemInputs {
  static constexpr int kRowLanes = C::kHeadDim / 4;           // threads of a team: one row, four columns each
  static constexpr int kTeams    = C::kThreads / kRowLanes;   // each takes one row of k or q at a time
  static constexpr int kMaxLoads = (2 * C::kMaxTokens + kTeams - 1) / kTeams;
  static constexpr int kInFlight = kMaxLoads < 4 ? kMaxLoads : 4;

  uint2 kq[kInFlight];
  uint32 a, b, a_log, bias;  // of token gate_token()
  Entry step;

  // The last warp has the gates: with few tokens, it has no row of k or q. Beyond the last token, and in other warps,
  // the number is one that no token has.
  static __device__ __forceinline__ uint32 gate_token() { return threadIdx.x - (C::kThreads - kWarp); }
  static __device__ __forceinline__ int row(int i) { return i * kTeams + int(threadIdx.x) / kRowLanes; }
  static __device__ __forceinline__ int column() { return int(threadIdx.x) % kRowLanes * 4; }

  // Row r is k of token r / 2, or q where r is odd.
  template <class Operands>
  static __device__ __forceinline__ uint2 load_row(const Operands& p, const Item<C>& item, int r) {
    if (r >= 2 * p.tokens) return {};
    const int64 at = item.head / p.heads_ratio * C::kHeadDim + column();
    return ptx::ld<uint2>(r % 2 ? p.q + item.n * p.q_batch_stride + r / 2 * p.q_token_stride + at
                                : p.k + item.n * p.k_batch_stride + r / 2 * p.k_token_stride + at);
  }

  template <class Operands> __device__ __forceinline__ void load(const Operands& p, const Item<C>& item) {
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) kq[i] = load_row(p, item, row(i));
    const uint32 t = gate_token();
    if (t >= p.tokens) return;
    a     = load_gate<C>(p.a, item.n * p.a_batch_stride + t * p.a_token_stride + item.head, p.a_bytes);
    b     = load_gate<C>(p.b, item.n * p.b_batch_stride + t * p.b_token_stride + item.head, p.b_bytes);
    a_log = ptx::ld<uint32>(p.a_log + item.head);
    bias  = load_bias(p.dt_bias, item.head, Bias(p.dt_bias_type));
    if constexpr (kSteps) step = load_entry(p.step_slots, p.step_slot_bytes, item.n * p.tokens + t);
  }

  // Calls use(r, the four halves) for rows r < count of k and q, one row for each team.
  template <class Operands, typename Use>
  __device__ __forceinline__ void for_rows(const Operands& p, const Item<C>& item, int count, Use use) const {
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (i * kTeams < count) use(row(i), kq[i]);
    }
    for (int i = kInFlight; i * kTeams < count; ++i) use(row(i), load_row(p, item, row(i)));
  }

  // Returns the squared length of the team's row.
  static __device__ __forceinline__ float squares(const float (&x)[4]) {
    float ssq[1] = {fmaf(x[3], x[3], fmaf(x[2], x[2], fmaf(x[1], x[1], x[0] * x[0])))};
    group_sum<kRowLanes>(ssq);
    return ssq[0];
  }

  // Returns the gates of token gate_token().
  template <class Operands>
  __device__ __forceinline__ Token<kSteps> token(const Operands& p, const Item<C>& item) const {
    Token<kSteps> token;
    const float x = gate_of<C>(a, p.a_bytes) + bias_of(bias, Bias(p.dt_bias_type));
    token.decay = expf(-expf(__uint_as_float(a_log)) * softplus(x));
    token.beta  = 1.0f / (1.0f + expf(-gate_of<C>(b, p.b_bytes)));
    if constexpr (kSteps) {
      const int64 in_buffer = item.n * p.steps_batch_stride + gate_token() * p.steps_token_stride;
      const int64 slot = value_of(step, p.step_slot_bytes, 0);
      set_step(token, p.step_slot_bytes == 0 ? in_buffer : exists(p, slot) ? slot * p.steps_token_stride : -1);
    }
    return token;
  }
};

// ---- gdn/prologue ----------------------------------------------------------
template <class C> __device__ __forceinline__ Item<C> this_item() {
  const int x = blockIdx.x;
  return {blockIdx.z * int64(gridDim.y) + blockIdx.y, x / C::kTiles, x % C::kTiles * C::kTileV};
}

// Waits for earlier kernels, starts to load what every row of the item needs, and returns the slot of its request. If
// there is none, the outputs are set to zero and the CTA is done. `out` points to the item's first row.
template <class C, bool kSteps, class Operands>
__device__ __forceinline__ int64 begin(const Operands& p, const Item<C>& item, ItemInputs<C, kSteps>& inputs,
                                       typename C::In* out) {
  if constexpr (kHasPdl) ptx::griddep_wait();
  const Entry entry = load_entry(p.slots, p.slot_bytes, item.n);
  inputs.load(p, item);
  const int64 slot = value_of(entry, p.slot_bytes, item.n);
  if (!exists(p, slot)) clear_outputs<C>(p, out);
  return slot;
}

// ---- gdn/row_writer --------------------------------------------------------
// Two buffers of a warp's rows in shared memory: one is being copied out while the other is filled.
template <class C, bool kUsed> struct Slices {
  alignas(16) typename C::State rows[C::kWarps][2][C::kWarpRows * C::kHeadDim];
};
template <class C> struct Slices<C, false> {};

// Writes a lane's rows to a state. Either each lane stores its own; or the warp's rows, which are neighbours, are
// gathered in shared memory and written by one bulk copy of some KiB, which is faster than many small stores.
template <class C, bool kBulk> struct RowWriter {
  using State = typename C::State;
  Slices<C, kBulk>& slices;
  int turn = 0;

  // `p` points to the lane's rows; that of the first lane is where the warp's rows begin. kOnce: the rows are not read
  // again soon.
  template <bool kOnce, typename Held>
  __device__ __forceinline__ void write(Held& h, State* p) {
    if constexpr (kBulk) {
      const int thread = threadIdx.x % kWarp;
      State* slice = slices.rows[threadIdx.x / kWarp][turn];
      turn ^= 1;
      if (thread == 0) ptx::bulk_wait_read<1>();  // for the copy that still reads this buffer
      __syncwarp();
      const int64 offset = lane_offset<C, C::kStateLayout>(thread / C::kLanes * C::kIlpRows, thread % C::kLanes);
      store_rows<C, To::kShared, C::kStateLayout>(h, slice + offset);
      ptx::fence_proxy_async();
      __syncwarp();
      if (thread == 0) ptx::bulk_store<kOnce>(p, slice, C::kWarpRows * C::kHeadDim * sizeof(State));
    } else {
      store_rows<C, kOnce ? To::kMemory : To::kL2, C::kStateLayout>(h, p);
    }
  }

  // The CTA must not end while a bulk copy still reads its shared memory.
  __device__ __forceinline__ void finish() const {
    if (kBulk && threadIdx.x % kWarp == 0) ptx::bulk_wait_read<0>();
  }
};

// ---- spec ------------------------------------------------------------------
struct Config {
  using In    = bf16;
  using State = float;
  static constexpr StateLayout kStateLayout = StateLayout::kVk;
  static constexpr bool kGeneral = false;  // a and b may be float32, heads of a slot have gaps
  static constexpr int kHeadDim = 128;  // K
  static constexpr int kValueDim = 128;  // V
  static constexpr int kMaxTokens = 4;
  static constexpr int kTileV = 32;
  static constexpr int kIlpRows = 1;
  static constexpr int kWarps = 8;
  static constexpr bool kUseSmemV = false;
  static constexpr bool kStoreSteps = true;
  static constexpr bool kKeepState = false;  // the state stays in L2, for the next call
  static constexpr bool kBulkStores = false;  // states are stored by bulk copies
  static constexpr int kAhead = 0;  // heads whose states are prefetched into L2 at a time; 0: none
  static constexpr int kLanes = 8;  // lanes that share a row
};

// ---- work of a lane --------------------------------------------------------
using C = Lanes<Config>;
using In = C::In;
using State = C::State;
using Rows = C::Rows;
constexpr int kPassRows = C::kWarps * C::kWarpRows;
constexpr bool kIsVk = C::kStateLayout == StateLayout::kVk;
// A build for one token keeps 16-bit rows as they are in memory and unpacks them twice: more warps fit on an SM.
constexpr bool kPacked = C::kMaxTokens == 1;
// The distance of lanes that share a row. With [K, V], lanes side by side have neighbouring rows: eight lanes side by
// side make an access to L1, so they have 64 bytes of two lines, and not 16 of eight.
constexpr int kApart = kIsVk ? 1 : kWarp / C::kLanes;
// Warps that an SM must hold at once: they limit a thread to 80 or 96 registers, which measured faster than the number
// that the compiler chooses. Packed floats need register pairs, and so a higher limit.
constexpr int kMinWarps =
    kPacked ? 16 : C::kIlpRows > 2 ? C::kWarps : C::kIlpRows == 2 && kHasF32x2 ? 16 : sizeof(State) == 4 ? 24 : 20;

static_assert(C::kValueDim % C::kTileV == 0 && C::kTileV % kPassRows == 0, "every row has a lane");
static_assert(C::kStateLayout == StateLayout::kVk || (C::kVec == 4 && C::kIlpRows % 4 == 0),
              "[K, V]: 16 bytes are four rows");
static_assert(C::kMaxTokens <= 2 * C::kLanes, "lane t of a row carries v of tokens t and t + kLanes");
static_assert(C::kMaxTokens <= kWarp, "a lane of the last warp for each token");
static_assert(!kPacked || (kIsVk && sizeof(State) == 2 && !C::kStoreSteps), "for 16-bit states [V, K] alone");

struct Operands {
  const In* q;
  const In* k;
  const In* v;
  const void* a;
  const void* b;
  const float* a_log;
  const void* dt_bias;
  State* state;
  const void* slots;
  const void* write_slots;
  State* steps;
  const void* step_slots;
  In* out;
  float scale;
  int64 batch;
  int tokens;
  int64 value_heads;
  int heads_ratio;
  int64 pool;
  int64 q_batch_stride;
  int64 q_token_stride;
  int64 k_batch_stride;
  int64 k_token_stride;
  int64 v_batch_stride;
  int64 v_token_stride;
  int64 a_batch_stride;
  int64 a_token_stride;
  int64 b_batch_stride;
  int64 b_token_stride;
  int64 state_stride;
  int64 steps_batch_stride;
  int64 steps_token_stride;
  int dt_bias_type;
  int step_slot_bytes;
  int slot_bytes;
  int write_slot_bytes;
  bool update_state;
  bool l2norm;
  int a_bytes;
  int b_bytes;
  int64 state_head_gap;
  int64 steps_head_gap;
};
using Inputs = ItemInputs<C, C::kStoreSteps>;
using Writer = RowWriter<C, C::kBulkStores>;

// ---- shared memory ---------------------------------------------------------
template <bool kUsed> struct ValueTile { float v[C::kMaxTokens][C::kTileV]; };
template <> struct ValueTile<false> {};

struct Shared : Slices<C, C::kBulkStores>, ValueTile<C::kUseSmemV> {
  alignas(16) float kq[2][C::kMaxTokens][C::kHeadDim];  // k, then q, in the order of column_slot
  In out[C::kMaxTokens][C::kTileV];
  Token<C::kStoreSteps> tokens[C::kMaxTokens];
};

static_assert(sizeof(Shared) == 4416, "the launch counts on it");

// Index in a row of Shared::kq of the four columns that begin at `column`. The eight lanes of a row read neighbouring
// groups of four, so that there are no bank conflicts.
__device__ __forceinline__ int column_slot(int column) {
  constexpr int kFours = C::kVec / 4, kLanes = C::kLanes;
  return ((column / (kLanes * C::kVec) * kFours + column / 4 % kFours) * kLanes + column / C::kVec % kLanes) * 4;
}

// ---- rows of a lane --------------------------------------------------------
// v of a lane's rows at every token: in shared memory (kSmem), or in registers, where lane t of a row has v of tokens t
// and t + kLanes.
template <bool kSmem> struct Values {
  static constexpr int kSets  = kSmem ? 1 : (C::kMaxTokens + C::kLanes - 1) / C::kLanes;
  static constexpr int kWords = (C::kIlpRows + 1) / 2;
  uint32 words[kSets][kWords];

  // `v` points to the first of the lane's rows.
  __device__ __forceinline__ void load(const In* v, int64 token_stride, int tokens, int lane) {
#pragma unroll
    for (int i = 0; i < kSets && !kSmem; ++i) {
      const int t = i * C::kLanes + lane;
      if (t < tokens) ld_halves<C::kIlpRows>(v + t * token_stride, words[i]);
    }
  }

  __device__ __forceinline__ void get(const ValueTile<kSmem>& tile, int t, int row, float (&value)[C::kIlpRows]) const {
    if constexpr (kSmem) {
#pragma unroll
      for (int r = 0; r < C::kIlpRows; ++r) value[r] = tile.v[t][row + r];
    } else {
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        const uint32 own  = kSets == 1 || t < C::kLanes ? words[0][i] : words[kSets - 1][i];
        const uint32 word = kIsVk ? __shfl_sync(~0u, own, t, C::kLanes)
                                  : __shfl_sync(~0u, own, t % C::kLanes * kApart + threadIdx.x % kApart);
        value[2 * i] = low<In>(word);
        if (C::kIlpRows > 1) value[2 * i + 1] = high<In>(word);
      }
    }
  }
};

template <bool kSmem>
__device__ __forceinline__ void stage_values(ValueTile<kSmem>& tile, const In* v, int64 token_stride, int tokens) {
  if constexpr (kSmem) {
    for (int i = threadIdx.x; i < tokens * C::kTileV; i += C::kThreads) {
      tile.v[i / C::kTileV][i % C::kTileV] = load_half(v + i / C::kTileV * token_stride + i % C::kTileV);
    }
  }
}

template <bool kPacked> struct Block {
  Select<kPacked, Packed<C>, Rows> h;
  Values<C::kUseSmemV> v;

  __device__ __forceinline__ void load(const Operands& p, const Item<C>& item, int64 slot, int row, int lane) {
    load_rows<C, C::kStateLayout>(h, p.state + slot * p.state_stride + item.rows<C::kStateLayout>(row, lane));
    v.load(p.v + item.values(p) + row, p.v_token_stride, p.tokens, lane);
  }
};

// ---- once for all rows of an item ------------------------------------------
// Writes to shared memory what every row needs: k and q l2-normalised, q times scale, decay and beta of each token.
__device__ __forceinline__ void stage(Shared& s, const Operands& p, const Item<C>& item, const Inputs& inputs) {
  if (const uint32 t = Inputs::gate_token(); t < p.tokens) s.tokens[t] = inputs.token(p, item);
  inputs.for_rows(p, item, 2 * p.tokens, [&](int r, uint2 halves) {
    const float x[4] = {low<In>(halves.x), high<In>(halves.x), low<In>(halves.y), high<In>(halves.y)};
    const float norm = p.l2norm ? 1.0f / sqrtf(Inputs::squares(x) + kNormEps) : 1.0f, factor = r % 2 ? p.scale : 1.0f;
    if (r >= 2 * p.tokens) return;
    *reinterpret_cast<float4*>(&s.kq[r % 2][r / 2][column_slot(Inputs::column())]) = {
        x[0] * norm * factor, x[1] * norm * factor, x[2] * norm * factor, x[3] * norm * factor};
  });
  stage_values(s, p.v + item.values(p), p.v_token_stride, p.tokens);
}

// ---- once for each token ---------------------------------------------------
struct Columns { f32x2 x[C::kPairs]; };

__device__ __forceinline__ Columns load_columns(const float (&row)[C::kHeadDim], int lane) {
  Columns c;
#pragma unroll
  for (int i = 0; i < C::kQuads; ++i) {
    const float4 four = *reinterpret_cast<const float4*>(&row[(i * C::kLanes + lane) * 4]);
    c.x[2 * i] = {four.x, four.y}, c.x[2 * i + 1] = {four.z, four.w};
  }
  return c;
}

__device__ __forceinline__ void scale_rows(Rows& h, float factor) {
#pragma unroll
  for (int r = 0; r < C::kIlpRows; ++r) {
#pragma unroll
    for (int i = 0; i < C::kPairs; ++i) h[r][i] = mul(h[r][i], {factor, factor});
  }
}

// Sets sum[r] to the lane's part of sum(h * c) for row r.
__device__ __forceinline__ void dot_rows(const Rows& h, const Columns& c, float* sum) {
#pragma unroll
  for (int r = 0; r < C::kIlpRows; ++r) {
    f32x2 pair = mul(h[r][0], c.x[0]);
#pragma unroll
    for (int i = 1; i < C::kPairs; ++i) pair = fma(h[r][i], c.x[i], pair);
    sum[r] = pair.x + pair.y;
  }
}

__device__ __forceinline__ void store_out(In* out, const float* sum) {
  uint32 words[(C::kIlpRows + 1) / 2];
#pragma unroll
  for (int r = 0; r < C::kIlpRows; r += 2) words[r / 2] = to_pair<In>(sum[r], sum[C::kIlpRows > 1 ? r + 1 : r]);
  st_halves<C::kIlpRows>(out, words);
}

// Takes a lane's rows through all tokens. `offset` is the offset of the rows in a state, `row` the number of the first
// one in the item.
__device__ __forceinline__ void walk(
    Block<false>& block, Shared& s, const Operands& p, Writer& writer, int64 offset, int row, int lane) {
  Rows& h = block.h;
  Columns k = load_columns(s.kq[0][0], lane);
  float sum[2 * C::kIlpRows] = {};  // h k of this token, and h q of the previous one, in one reduction
#pragma unroll 1
  for (int t = 0; t < p.tokens; ++t) {
    const Token<C::kStoreSteps> token = s.tokens[t];
    float value[C::kIlpRows];
    block.v.get(s, t, row, value);
    scale_rows(h, token.decay);
    dot_rows(h, k, sum);
    group_sum<C::kLanes, kApart>(sum);
    if (lane == 0 && t > 0) store_out(&s.out[t - 1][row], sum + C::kIlpRows);
#pragma unroll
    for (int r = 0; r < C::kIlpRows; ++r) {
      const float u = (value[r] - sum[r]) * token.beta;
#pragma unroll
      for (int i = 0; i < C::kPairs; ++i) h[r][i] = fma({u, u}, k.x[i], h[r][i]);
    }
    if (token.step >= 0) writer.write<true>(h, p.steps + token.step + offset);
    const Columns q = load_columns(s.kq[1][t], lane);
    if (t + 1 < p.tokens) k = load_columns(s.kq[0][t + 1], lane);
    dot_rows(h, q, sum + C::kIlpRows);
  }
  group_sum<C::kLanes, kApart>(sum);
  if (lane == 0) store_out(&s.out[p.tokens - 1][row], sum + C::kIlpRows);
}

// The same for the only token.
__device__ __forceinline__ void walk(
    Block<true>& block, Shared& s, const Operands&, Writer&, int64, int row, int lane) {
  const Token<C::kStoreSteps> token = s.tokens[0];
  const f32x2 decay = {token.decay, token.decay};
  float value[C::kIlpRows], sum[C::kIlpRows];
  block.v.get(s, 0, row, value);
  const Columns k = load_columns(s.kq[0][0], lane);
#pragma unroll
  for (int r = 0; r < C::kIlpRows; ++r) {
    f32x2 pair = mul(mul(pair_of<State>(block.h[r], 0), decay), k.x[0]);
#pragma unroll
    for (int i = 1; i < C::kPairs; ++i) pair = fma(mul(pair_of<State>(block.h[r], i), decay), k.x[i], pair);
    sum[r] = pair.x + pair.y;
  }
  group_sum<C::kLanes>(sum);
  const Columns q = load_columns(s.kq[1][0], lane);
#pragma unroll
  for (int r = 0; r < C::kIlpRows; ++r) {
    const float u = (value[r] - sum[r]) * token.beta;
    f32x2 pair = {};
#pragma unroll
    for (int i = 0; i < C::kPairs; ++i) {
      const f32x2 h = fma({u, u}, k.x[i], mul(pair_of<State>(block.h[r], i), decay));
      pair = i == 0 ? mul(h, q.x[0]) : fma(h, q.x[i], pair);
      set_pair<State>(block.h[r], i, h);
    }
    sum[r] = pair.x + pair.y;
  }
  group_sum<C::kLanes>(sum);
  if (lane == 0) store_out(&s.out[0][row], sum);
}

// Writes all outputs of an item at once, in 16-byte stores, which use DRAM better than scattered ones. `out` points to
// the item's first row.
__device__ __forceinline__ void store_outputs(const Shared& s, const Operands& p, In* out) {
  constexpr int kPiece = C::kTileV < 8 ? C::kTileV : 8, kPieces = C::kTileV / kPiece;
  __syncthreads();
  for (int i = threadIdx.x; i < p.tokens * kPieces; i += C::kThreads) {
    const int t = i / kPieces, row = i % kPieces * kPiece;
    uint32 words[kPiece / 2];
#pragma unroll
    for (int j = 0; j < kPiece / 2; ++j) words[j] = reinterpret_cast<const uint32*>(&s.out[t][row])[j];
    st_halves<kPiece>(out + t * p.value_heads * C::kValueDim + row, words);
  }
}

// ---- kernel ----------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(C::kThreads, kMinWarps / C::kWarps) gdn_delta_rule(
    const In* __restrict__ q,              // [batch, tokens, heads, K]
    const In* __restrict__ k,              // [batch, tokens, heads, K]
    const In* __restrict__ v,              // [batch, tokens, value_heads, V]
    const void* __restrict__ a,            // [batch, tokens, value_heads] of a_bytes
    const void* __restrict__ b,            // [batch, tokens, value_heads] of b_bytes
    const float* __restrict__ a_log,       // [value_heads]
    const void* __restrict__ dt_bias,      // [value_heads] of dt_bias_type
    State* __restrict__ state,             // [pool, value_heads, V, K], or K, V
    const void* __restrict__ slots,        // [batch], integers of slot_bytes; outside the pool: no state, output zero
    const void* __restrict__ write_slots,  // [batch], integers of write_slot_bytes; outside the pool: skipped
    State* __restrict__ steps,             // [batch, tokens, value_heads, V, K], or [pool, ...] with step_slots
    const void* __restrict__ step_slots,   // [batch, tokens], integers of step_slot_bytes; outside the pool: skipped
    In* __restrict__ out,                  // [batch, tokens, value_heads, V]
    float scale,                           // of q
    int64 batch,
    int64 tokens,                          // <= kMaxTokens
    int64 value_heads,
    int64 heads_ratio,                     // value heads that share a head of q and k
    int64 pool,                            // slots of state
    int64 q_batch_stride,                  // elements, as all strides
    int64 q_token_stride,
    int64 k_batch_stride,
    int64 k_token_stride,
    int64 v_batch_stride,
    int64 v_token_stride,
    int64 a_batch_stride,
    int64 a_token_stride,
    int64 b_batch_stride,
    int64 b_token_stride,
    int64 state_stride,
    int64 steps_batch_stride,
    int64 steps_token_stride,              // of a slot with step_slots
    int64 dt_bias_type,                    // 0 float, 1 bf16, 2 f16
    int64 step_slot_bytes,                 // 0: steps has its own strides
    int64 slot_bytes,                      // 0, 4 or 8; 0: request n uses slot n
    int64 write_slot_bytes,                // likewise
    int64 update_state,                    // 0: write_slots is not used
    int64 l2norm,                          // 0: q and k as they are
    int64 a_bytes,                         // 2: In, 4: float
    int64 b_bytes,                         // likewise
    int64 state_head_gap,                  // from the end of a head's state to the next head's
    int64 steps_head_gap                   // likewise

) {
  extern __shared__ __align__(16) uint8 dynamic[];
  Shared& s = *reinterpret_cast<Shared*>(dynamic);
  const Item<C> item = this_item<C>();
  if constexpr (C::kGeneral) {  // so that offsets in a state are those without gaps
    state += item.head * state_head_gap;
    steps += item.head * steps_head_gap;
  }
  const Operands p = {q, k, v, a, b, a_log, dt_bias, state, slots, write_slots, steps, step_slots, out, scale, batch,
      int(tokens), value_heads, int(heads_ratio), pool, q_batch_stride, q_token_stride, k_batch_stride,
      k_token_stride, v_batch_stride, v_token_stride, a_batch_stride, a_token_stride, b_batch_stride,
      b_token_stride, state_stride, steps_batch_stride, steps_token_stride, int(dt_bias_type),
      int(step_slot_bytes), int(slot_bytes), int(write_slot_bytes), bool(update_state), bool(l2norm),
      int(a_bytes), int(b_bytes), state_head_gap, steps_head_gap};
  if (item.n >= batch) return;
  const int lane      = threadIdx.x / kApart % C::kLanes;
  const int place     = kIsVk ? threadIdx.x % kWarp / C::kLanes : threadIdx.x % kApart;  // of the lane's rows in a warp
  const int first_row = threadIdx.x / kWarp * C::kWarpRows + place * C::kIlpRows;
  out += item.outputs(p);
  Inputs inputs;
  const int64 slot = begin(p, item, inputs, out);
  if (!exists(p, slot)) return;
  Block<kPacked> block;
  block.load(p, item, slot, first_row, lane);
  if constexpr (kHasPdl) ptx::griddep_launch();
  bring_next_group(p, item);
  stage(s, p, item, inputs);
  const Entry entry = load_entry(write_slots, p.write_slot_bytes, item.n);
  __syncthreads();

  Writer writer = {s};
#pragma unroll 1
  for (int row = first_row; row < C::kTileV; row += kPassRows) {
    if (row != first_row) block.load(p, item, slot, row, lane);
    const int64 offset = item.rows<C::kStateLayout>(row, lane);
    walk(block, s, p, writer, offset, row, lane);
    const int64 write_slot = p.update_state ? value_of(entry, p.write_slot_bytes, item.n) : -1;
    if (exists(p, write_slot)) writer.write<!C::kKeepState>(block.h, state + write_slot * state_stride + offset);
  }
  store_outputs(s, p, out);
  writer.finish();
}

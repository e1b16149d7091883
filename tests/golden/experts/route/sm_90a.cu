// experts_route, generated from templates/experts/route.cu.j2
// spec: {}
//
// Sorts the assignments of tokens to experts by expert, and cuts the rows of each expert into items of item_rows.
// The CTAs of one cluster divide the assignments and the items: each counts its assignments, adds up the counts of the
// other CTAs and of lower experts, writes its items, and puts each assignment behind those that came before. Among the
// rows of an expert the order is that of arrival: no result depends on it.

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

// ---- partials/cluster_load -------------------------------------------------
namespace ptx {
// Loads from shared memory of the CTA `rank`, at the address that `p` has in this CTA.
__device__ __forceinline__ int32 ld_cluster_4(const void* p, uint32 rank) {
  int32 v;
  asm volatile("ld.shared::cluster.b32 %0, [%1];" : "=r"(v) : "r"(cluster_address(p, rank)) : "memory");
  return v;
}
}  // namespace ptx

// ---- partials/ld_relaxed ---------------------------------------------------
// From L2, whatever L1 holds: what other CTAs write while the kernel runs, or wrote before it has waited for theirs.
namespace ptx {
__device__ __forceinline__ uint32 ld_relaxed_4(const void* p) {
  uint32 v;
  asm volatile("ld.relaxed.gpu.global.b32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ uint64 ld_relaxed_8(const void* p) {
  uint64 v;
  asm volatile("ld.relaxed.gpu.global.b64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
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

// ---- experts/routing -------------------------------------------------------
// Which expert of this GPU a slot of a token goes to. An assignment is token * slots + slot.
namespace ptx {
// Relaxed, because kernels read the routing before they wait for the kernel ahead of them.
__device__ __forceinline__ int32 ld_fresh_4(const void* p) { return int32(ld_relaxed_4(p)); }
__device__ __forceinline__ int64 ld_fresh_8(const void* p) { return int64(ld_relaxed_8(p)); }
__device__ __forceinline__ float ld_fresh_f32(const void* p) { return __int_as_float(ld_fresh_4(p)); }
__device__ __forceinline__ int4 ld_fresh_16(const void* p) {
  int4 v;
  asm volatile("ld.relaxed.gpu.global.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}
}  // namespace ptx

struct Routing {
  const uint8* ids;
  const int32* map;  // null: the identity
  int64 id_bytes, end, experts;

  __device__ __forceinline__ int64 id(int64 assignment) const {
    if (id_bytes == 8) return ptx::ld_fresh_8(ids + 8 * assignment);
    return ptx::ld_fresh_4(ids + 4 * assignment);
  }
  // -1 where the slot is skipped: never an expert that is not there.
  __device__ __forceinline__ int32 expert(int64 id) const {
    if (id < 0 || id >= end) return -1;
    const int64 local = map == nullptr ? id : ptx::ld_fresh_4(map + id);
    return local < 0 || local >= experts ? -1 : int32(local);
  }
  // A bit for each slot of a token that is not skipped; there are up to 32.
  __device__ __forceinline__ uint32 taken(int64 token, int slots) const {
    uint32 mask = 0;
#pragma unroll 8
    for (int slot = 0; slot < slots; ++slot) mask |= uint32(expert(id(token * slots + slot)) >= 0) << slot;
    return mask;
  }
};

// ---- spec ------------------------------------------------------------------
constexpr int kThreads = 1024;  // one for each expert
constexpr int kWarps   = kThreads / kWarp;
constexpr int kBatch   = 8;  // loads of a thread that are under way together
constexpr bool kHasClusters = true;

// ---- kernel ----------------------------------------------------------------
// The sum over the lanes up to this one.
__device__ __forceinline__ int32 sum_up_to(int32 v, int lane) {
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
    const int32 other = __shfl_up_sync(0xFFFFFFFFu, v, step);
    if (lane >= step) v += other;
  }
  return v;
}

// Calls f(assignment, expert) for each assignment of a thread that is not skipped; `ctas` CTAs take turns.
template <typename F>
__device__ __forceinline__ void each_taken(const Routing& routing, int64 assignments, int cta, int ctas, F f) {
  const int64 step = int64(ctas) * kThreads;
  for (int64 i = cta * kThreads + threadIdx.x; i < assignments; i += step * kBatch) {
    int64 id[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) id[b] = routing.id(min(i + b * step, assignments - 1));
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int64 at     = i + b * step;
      const int32 expert = at < assignments ? routing.expert(id[b]) : -1;
      if (expert >= 0) f(at, expert);
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads) experts_route(
    const uint8* __restrict__ ids,         // [tokens, slots] of id_bytes bytes
    const int32* __restrict__ expert_map,  // [ids_end]; null: the identity
    int4* __restrict__ items,              // [items_end]
    int32* __restrict__ order,             // [assignments]
    int64 id_bytes,                        // 4 or 8
    int64 ids_end,                         // ids are below it, or skipped
    int64 experts,
    int64 assignments,
    int64 item_rows,
    int64 items_end
) {
  __shared__ int32 counts[kThreads];  // rows of an expert in this CTA
  __shared__ int32 next[kThreads];    // where its next row goes
  __shared__ int2  sums[kWarps];      // rows and items of the experts of a warp
  const int thread = threadIdx.x, lane = thread % kWarp, warp = thread / kWarp;
  const int ctas = kHasClusters ? gridDim.x : 1, cta = blockIdx.x;
  const Routing routing = {ids, expert_map, id_bytes, ids_end, experts};

  counts[thread] = 0;
  if constexpr (kHasPdl) {
    ptx::griddep_launch();
    ptx::griddep_wait();
  }
  __syncthreads();
  each_taken(routing, assignments, cta, ctas, [&](int64, int32 expert) { atomicAdd(&counts[expert], 1); });
  int32 rows = 0, lower = 0;  // of all CTAs, of those before this one
  if (kHasClusters && ctas > 1) {
    ptx::cluster_sync();
    for (int i = 0; i < ctas; ++i) {
      const int32 count = ptx::ld_cluster_4(&counts[thread], i);
      rows += count, lower += i < cta ? count : 0;
    }
  } else {
    __syncthreads();
    rows = counts[thread];
  }
  const int32 parts = int32(ceil_div(rows, item_rows));
  const int2  up_to = {sum_up_to(rows, lane), sum_up_to(parts, lane)};
  if (lane == kWarp - 1) sums[warp] = up_to;
  __syncthreads();
  if (warp == 0) {
    const int2 of = sums[lane];
    sums[lane] = {sum_up_to(of.x, lane), sum_up_to(of.y, lane)};
  }
  __syncthreads();
  const int2  ahead = warp == 0 ? make_int2(0, 0) : sums[warp - 1];
  const int32 first = ahead.x + up_to.x - rows, item = ahead.y + up_to.y - parts;
  next[thread] = first + lower;
  for (int32 i = cta; i < parts; i += ctas) {
    const int32 start = i * int32(item_rows);
    items[item + i] = {thread, first + start, min(int32(item_rows), rows - start), 0};
  }
  for (int64 i = sums[kWarps - 1].y + cta * kThreads + thread; i < items_end; i += ctas * kThreads) {
    items[i] = {0, 0, 0, 0};
  }
  __syncthreads();
  each_taken(routing, assignments, cta, ctas,
             [&](int64 assignment, int32 expert) { order[atomicAdd(&next[expert], 1)] = int32(assignment); });
  if (kHasClusters && ctas > 1) ptx::cluster_sync();  // a CTA's memory lives until the others have read it
}

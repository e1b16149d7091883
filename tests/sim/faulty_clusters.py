"""The same of clusters: their barrier, and shared memory and mbarriers of another CTA."""

from __future__ import annotations

from tests.sim.faulty import Case, ints

_LIFETIME = "CUDA C++ Programming Guide: Distributed Shared Memory; barrier.cluster"
_ARRIVALS = """
extern "C" __global__ void __cluster_dims__(2, 1, 1) kernel(const int* x, int* y) {
  __shared__ __align__(8) uint64 b; const int t = threadIdx.x;
  if (t == 0) init(&b, 64);
  cluster_sync();
  unsigned to;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(to) : "r"(address(&b)), "r"(cluster_rank() ^ 1));
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" :: "r"(to) : "memory");
  y[64 * blockIdx.x + t] = x[t];
  END
}
"""
"""Nobody waits for the arrivals: the CTAs have to leave together."""

_PASSED = """
extern "C" __global__ void __cluster_dims__(2, 1, 1) kernel(const int* x, int* y) {
  __shared__ __align__(8) uint64 b; __shared__ int cells[64]; const int t = threadIdx.x;
  if (t == 0) init(&b, 64);
  cluster_sync();
  cells[t] = x[t] + blockIdx.x;
  unsigned to, from; int v = 0, done = 0;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(to) : "r"(address(&b)), "r"(RANK));
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(from) : "r"(address(cells + (t ^ 32))), "r"(RANK));
  asm volatile("mbarrier.arrive.ARRIVAL.shared::cluster.b64 _, [%0];" :: "r"(to) : "memory");
  while (!done)
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.WAIT.shared::cta.b64 p, [%1], 0; selp.s32 %0, 1, 0, p; }"
                 : "=r"(done) : "r"(address(&b)) : "memory");
  asm volatile("ld.shared::cluster.b32 %0, [%1];" : "=r"(v) : "r"(from) : "memory");
  y[64 * blockIdx.x + t] = v;
  cluster_sync();
}
"""
"""Each thread reads what another one wrote before it arrived."""

CLUSTERS = [
    Case(
        name="wait for arrivals of the neighbour that is of the CTA",
        section="mbarrier.try_wait: .scope",
        source=_PASSED,
        right="acquire.cluster",
        wrong="acquire.cta",
        message="unordered write by another warp",
        args=ints(64, 128),
        grid=2,
        extra={"ARRIVAL": "release.cluster", "WAIT": "PIECE", "RANK": "cluster_rank() ^ 1"},
    ),
    Case(
        name="arrival at the neighbour's mbarrier that is of the CTA",
        section="mbarrier.arrive: .scope",
        source=_PASSED,
        right="release.cluster",
        wrong="release.cta",
        message="unordered write by another warp",
        args=ints(64, 128),
        grid=2,
        extra={"ARRIVAL": "PIECE", "WAIT": "acquire.cluster", "RANK": "cluster_rank() ^ 1"},
    ),
    Case(
        name="mbarrier with operations of the CTA between neighbours, not in a CTA",
        section="mbarrier.arrive, mbarrier.try_wait: .scope",
        source=_PASSED,
        right="cluster_rank()",
        wrong="cluster_rank() ^ 1",
        message="unordered write by another warp",
        args=ints(64, 128),
        grid=2,
        extra={"ARRIVAL": "release.cta", "WAIT": "acquire.cta", "RANK": "PIECE"},
    ),
    Case(
        name="CTA that ends while its neighbour reads its memory",
        section=_LIFETIME,
        source="""
        extern "C" __global__ void __cluster_dims__(2, 1, 1) kernel(const int* x, int* y) {
          __shared__ int cells[64]; const int t = threadIdx.x;
          cells[t] = x[t] + blockIdx.x;
          cluster_sync();
          unsigned from; int v;
          asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(from) : "r"(address(cells + t)), "r"(cluster_rank() ^ 1));
          asm volatile("ld.shared::cluster.b32 %0, [%1];" : "=r"(v) : "r"(from) : "memory");
          y[64 * blockIdx.x + t] = v;
          PIECE
        }
        """,
        right="cluster_sync();",
        message="a CTA ends while others",
        args=ints(64, 128),
        grid=2,
    ),
    Case(
        name="cluster barrier with a relaxed arrival",
        section="barrier.cluster: .relaxed",
        source="""
        extern "C" __global__ void __cluster_dims__(2, 1, 1) kernel(const int* x, int* y) {
          __shared__ int cells[64]; const int t = threadIdx.x;
          cells[t] = x[t] + blockIdx.x;
          asm volatile("PIECE; barrier.cluster.wait.acquire.aligned;" ::: "memory");
          unsigned from; int v;
          asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(from) : "r"(address(cells + t)), "r"(cluster_rank() ^ 1));
          asm volatile("ld.shared::cluster.b32 %0, [%1];" : "=r"(v) : "r"(from) : "memory");
          y[64 * blockIdx.x + t] = v;
          cluster_sync();
        }
        """,
        right="barrier.cluster.arrive.release.aligned",
        wrong="barrier.cluster.arrive.relaxed.aligned",
        message="unordered write by another warp",
        args=ints(64, 128),
        grid=2,
    ),
    Case(
        name="CTA that ends before its neighbour has arrived at its mbarrier",
        section=_LIFETIME + "; mbarrier.arrive on shared::cluster",
        source=_ARRIVALS,
        right="cluster_sync();",
        message="CTA that has exited|a CTA ends while others",
        ends=False,  # an access to a CTA that is gone ends the context
        args=ints(64, 128),
        grid=2,
        extra={"END": "PIECE"},
    ),
    Case(
        name="CTA that does not wait for the end of its neighbour's arrivals",
        section=_LIFETIME + "; mbarrier.arrive on shared::cluster",
        source=_ARRIVALS,
        right="barrier.cluster.wait.acquire.aligned;",
        message="a CTA ends while others",
        ends=False,
        args=ints(64, 128),
        grid=2,
        extra={"END": 'asm volatile("barrier.cluster.arrive.release.aligned; PIECE" ::: "memory");'},
    ),
    Case(
        name="CTA that ends behind a relaxed arrival of its neighbour",
        section="barrier.cluster: .relaxed; mbarrier.arrive on shared::cluster",
        source=_ARRIVALS,
        right="barrier.cluster.arrive.release.aligned",
        wrong="barrier.cluster.arrive.relaxed.aligned",
        message="a CTA ends while others",
        args=ints(64, 128),
        grid=2,
        extra={"END": 'asm volatile("PIECE; barrier.cluster.wait.acquire.aligned;" ::: "memory");'},
    ),
    Case(
        name="CTA that ends before commits of its neighbour have arrived",
        section=_LIFETIME + "; tcgen05.commit: .multicast::cluster",
        source="""
        extern "C" __global__ void __cluster_dims__(2, 1, 1) kernel(const int* x, int* y) {
          __shared__ __align__(8) uint64 done[2]; const int t = threadIdx.x;
          if (t == 0) init(done, 1), init(done + 1, 1);
          cluster_sync();
          if (cluster_rank() == 0) {
            for (int i = 0; i < 2 && t == 0; ++i)
              asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64"
                           " [%0], %1;" ::"r"(address(done + i)), "h"((unsigned short)3) : "memory");
            wait(done, 0), wait(done + 1, 0);
          }
          if (cluster_rank() == 1) { PIECE }
          y[64 * blockIdx.x + t] = x[t];
          cluster_sync();
        }
        """,
        right="wait(done, 0), wait(done + 1, 0);",
        message="CTA has exited",
        ends=False,
        arch="sm_100a",
        args=ints(64, 128),
        grid=2,
    ),
]

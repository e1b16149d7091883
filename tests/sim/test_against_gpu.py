"""The simulator against a GPU: the same PTX, the same bits."""

from __future__ import annotations

import re
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import pytest

from tests.sim import random_kernels
from tests.sim.gpu import Array, assert_same_bits, both, hopper

pytestmark = [pytest.mark.gpu, pytest.mark.sim, pytest.mark.compile]

KERNELS = 60


@pytest.mark.parametrize("seed", range(KERNELS))
def test_random_kernels(seed: int) -> None:
    kernel = random_kernels.write(seed, KERNELS)
    values = random_kernels.inputs(seed, kernel.inputs, 4 * random_kernels.BLOCK)
    out = np.full((len(values), len(kernel.statements)), 0xA5A5A5A5A5A5A5A5, np.uint64)
    _, (gpu, simulated) = both(kernel.source, [values, out], grid=4, block=random_kernels.BLOCK)
    assert (gpu == simulated).all(), f"seed {seed}: {kernel.explain(values, gpu, simulated)}"


# ---- approximate functions -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bound:
    """How far a result may be from the simulator's: in units of the last place, absolutely, or as a ratio."""

    ulps: float = 0
    absolute: float = 0
    relative: float = 0
    within: float = np.inf  # largest argument that the manual gives a bound for


BOUNDS = {
    "rcp.approx.f32": Bound(ulps=1),
    "rcp.approx.ftz.f32": Bound(ulps=1),
    "sqrt.approx.f32": Bound(ulps=1),
    "sqrt.approx.ftz.f32": Bound(ulps=1),
    "rsqrt.approx.f32": Bound(ulps=1),
    "rsqrt.approx.ftz.f32": Bound(ulps=1),
    "div.approx.f32": Bound(ulps=2),
    "div.approx.ftz.f32": Bound(ulps=2),
    "div.full.f32": Bound(ulps=2),
    "div.full.ftz.f32": Bound(ulps=2),
    "ex2.approx.f32": Bound(ulps=2),
    "ex2.approx.ftz.f32": Bound(ulps=2),
    "lg2.approx.f32": Bound(absolute=2**-22, relative=2**-22),
    "lg2.approx.ftz.f32": Bound(absolute=2**-22, relative=2**-22),
    "sin.approx.f32": Bound(absolute=2**-20.5, within=np.pi),
    "sin.approx.ftz.f32": Bound(absolute=2**-20.5, within=np.pi),
    "cos.approx.f32": Bound(absolute=2**-20.5, within=np.pi),
    "cos.approx.ftz.f32": Bound(absolute=2**-20.5, within=np.pi),
    "tanh.approx.f32": Bound(relative=2**-11),
    "ex2.approx.f16": Bound(ulps=1),
    "ex2.approx.ftz.bf16": Bound(ulps=1),
    "tanh.approx.f16": Bound(ulps=1),
    "tanh.approx.bf16": Bound(ulps=1),
}

APPROXIMATE = """
extern "C" __global__ void kernel(const T* x, const T* y, T* z) {
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  asm("NAME %0, OPERANDS;" : "=REG"(z[i]) : "REG"(x[i]), "REG"(y[i]));
}
"""


def patterns(width: int) -> Array:
    """All 16-bit floats, or 2**19 float32 spread over all of their bit patterns."""
    if width == 16:
        return np.arange(1 << 16, dtype=np.uint16)
    return (np.arange(1 << 19, dtype=np.uint64) * 8209).astype(np.uint32)


def distance(gpu: Array, simulated: Array) -> Array:
    """Units in the last place between floats of equal sign, by their bits."""
    bits = [x.view(f"i{x.dtype.itemsize}").astype(np.int64) for x in (gpu, simulated)]
    magnitude = 0x7FFFFFFF if gpu.dtype.itemsize == 4 else 0x7FFF
    return np.abs(np.diff([np.where(b < 0, -(b & magnitude), b) for b in bits], axis=0)[0])


@pytest.mark.parametrize("name", BOUNDS)
def test_approximate_functions(name: str, rng: np.random.Generator) -> None:
    bound, kind = BOUNDS[name], name.rpartition(".")[2]
    bits = patterns(32 if kind == "f32" else 16)
    dtype = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}[kind]
    two = name.startswith("div")
    source = APPROXIMATE.replace("NAME", name).replace("OPERANDS", "%1, %2" if two else "%1")
    source = source.replace("REG", "f" if kind == "f32" else "h")
    source = re.sub(r"\bT\b", "float" if kind == "f32" else "unsigned short", source)
    other = rng.permutation(bits)
    pairs = both(source, [bits, other, np.zeros_like(bits)], grid=len(bits) // 256, block=256)
    gpu, simulated = (out.view(dtype) for out in pairs[2])
    inside = ~(np.abs(bits.view(dtype)) > bound.within)
    gpu, simulated = gpu[inside], simulated[inside]
    share = shares(gpu, simulated, bound)
    print(f"{name}: {np.mean(share > 0):.1%} differ, by up to {share.max():.2f} of the bound")  # noqa: T201
    wrong = np.flatnonzero(~(share <= 1))
    assert not len(wrong), f"{len(wrong)} results are further off than {bound}; first: " + ", ".join(
        f"{name}({bits[inside][i]:#x}) GPU {gpu[i]} simulator {simulated[i]}" for i in wrong[:4]
    )


def shares(gpu: Array, simulated: Array, bound: Bound) -> Array:
    """Distances as shares of the bound, of the measure that fits best; infinite where only one result is finite."""
    with np.errstate(all="ignore"):
        wide, exact = gpu.astype(np.float64), simulated.astype(np.float64)
        error = np.abs(wide - exact)
        measures = (
            (distance(gpu, simulated), bound.ulps),
            (error, bound.absolute),
            (error / np.abs(exact), bound.relative),
        )
        share = np.minimum.reduce([measure / limit for measure, limit in measures if limit])
    share = np.where(np.isfinite(wide) & np.isfinite(exact), share, np.inf)
    raw = f"u{gpu.dtype.itemsize}"
    return np.where(gpu.view(raw) == simulated.view(raw), 0.0, share)


# ---- barriers and clusters -------------------------------------------------------------------------------------------

RING = """
// Warp 0 copies tiles into a ring of three; four warps take their turns at adding them up.
extern "C" __global__ void kernel(const uint32* x, uint32* y, int tiles) {
  __shared__ __align__(128) uint32 ring[3][128];
  __shared__ __align__(8) uint64 full[3], empty[3];
  if (threadIdx.x == 0)
    for (int s = 0; s < 3; ++s) { init(&full[s], 1); init(&empty[s], 128); }
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  __syncthreads();
  x += blockIdx.x * tiles * 128;
  if (threadIdx.x >= 128) {
    for (int n = 0; threadIdx.x == 128 && n < tiles; ++n) {
      if (n >= 3) wait(&empty[n % 3], (n / 3 - 1) & 1);
      expect(&full[n % 3], 512);
      copy_in(ring[n % 3], x + n * 128, 512, &full[n % 3]);
    }
    return;
  }
  uint32 sum = threadIdx.x;
  for (int n = 0; n < tiles; ++n) {
    wait(&full[n % 3], (n / 3) & 1);
    sum = sum * 3 + ring[n % 3][(threadIdx.x + 33 * n) % 128];
    arrive(&empty[n % 3]);
  }
  y[blockIdx.x * 128 + threadIdx.x] = sum;
}
"""


def test_a_ring_of_mbarriers(rng: np.random.Generator) -> None:
    hopper()
    tiles = 10
    x, y = rng.integers(0, 1 << 32, (6, tiles, 128), dtype=np.uint32), np.zeros((6, 128), np.uint32)
    assert_same_bits(both(RING, [x, y, np.int32(tiles)], grid=6, block=160))


CLUSTER = """
// Each of four CTAs writes to its neighbour, adds to the first, reads the last, and takes part in a multicast.
extern "C" __global__ void __cluster_dims__(4, 1, 1) kernel(const uint32* x, uint32* y) {
  __shared__ __align__(128) uint32 own[64], sent[64], cast[4][64];
  __shared__ uint32 sum;
  __shared__ __align__(8) uint64 there, full;
  const uint32 t = threadIdx.x, rank = cluster_rank(), next = (rank + 1) % 4;
  own[t] = x[blockIdx.x * 64 + t];
  if (t == 0) { sum = 0; init(&there, 64); init(&full, 1); expect(&full, 1024); }
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  cluster_sync();
  uint32 to, barrier, first, last, value;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(to) : "r"(address(&sent[63 - t])), "r"(next));
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(barrier) : "r"(address(&there)), "r"(next));
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(first) : "r"(address(&sum)), "r"(0));
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(last) : "r"(address(&own[t ^ 5])), "r"(3));
  asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(to), "r"(own[t] * 7) : "memory");
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
  asm volatile("red.shared::cluster.add.u32 [%0], %1;" ::"r"(first), "r"(own[t]) : "memory");
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(last) : "memory");
  if (t == 0)
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
                 " [%0], [%1], 256, [%2], %3;"
                 ::"r"(address(cast[rank])), "l"(x + blockIdx.x * 64), "r"(address(&full)), "h"((unsigned short)15)
                 : "memory");
  asm volatile("{.reg .pred P;\\nW%=:\\n mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 P, [%0], 0;\\n"
               "@P bra D%=;\\n bra W%=;\\nD%=:\\n}" ::"r"(address(&there)) : "memory");
  wait(&full, 0);
  y += blockIdx.x * 64 * 4 + t;
  y[0] = sent[t];
  y[64] = value;
  y[128] = cast[(t + 1) % 4][t] + cast[rank ^ 2][63 - t];
  cluster_sync();
  y[192] = sum;
}
"""


def test_a_cluster_exchanges_through_shared_memory(rng: np.random.Generator) -> None:
    hopper()
    x, y = rng.integers(0, 1 << 32, (8, 64), dtype=np.uint32), np.zeros((8, 4, 64), np.uint32)
    assert_same_bits(both(CLUSTER, [x, y], grid=8, block=64))


# ---- atomics ---------------------------------------------------------------------------------------------------------

ATOMIC = """
extern "C" __global__ void kernel(T* cells, const T* x, const T* y, T* old) {
  __shared__ T own[128];
  const uint32 i = blockIdx.x * 128 + threadIdx.x;
  own[threadIdx.x] = cells[i];
  T a, b;
  asm volatile("atom.global.NAME %0, [%1], OPERANDS;"
               : "=REG"(a) : "l"(cells + i), "REG"(x[i]), "REG"(y[i]) : "memory");
  asm volatile("atom.shared.NAME %0, [%1], OPERANDS;"
               : "=REG"(b) : "r"(address(&own[threadIdx.x])), "REG"(x[i]), "REG"(y[i]) : "memory");
  old[i * 3] = a; old[i * 3 + 1] = b; old[i * 3 + 2] = own[threadIdx.x];
}
"""


@pytest.mark.parametrize(
    "name",
    ["add.f32", "add.f64", "add.noftz.f16x2", "add.noftz.bf16x2", "min.s32", "max.u32", "max.s64", "add.u64",
     "inc.u32", "dec.u32", "and.b32", "xor.b64", "exch.b32", "cas.b32", "cas.b64"],
)  # fmt: skip
def test_atomics(name: str) -> None:
    operation, kind = name.split(".")[0], name.rpartition(".")[2]
    letter = {"f32": "f", "f64": "d", "f16x2": "h", "bf16x2": "b"}.get(kind, "l" if kind.endswith("64") else "i")
    cpp, constraint, _ = random_kernels.TYPES[letter]
    count = 4096
    columns = random_kernels.inputs(5, [f"{letter}{n}" for n in range(3)], count)
    cells, x, y = (np.ascontiguousarray(columns[:, n].astype(f"u{8 if constraint in 'ld' else 4}")) for n in range(3))
    if kind == "f64":  # the GPU's global atomics hand a signalling NaN on as it is
        cells, x = (np.where(np.isnan(c.view(np.float64)), np.uint64(0), c) for c in (cells, x))
    if operation == "cas":
        x[::2] = cells[::2]
    source = ATOMIC.replace("NAME", name).replace("OPERANDS", "%2, %3" if operation == "cas" else "%2")
    source = re.sub(r"\bT\b", cpp, source.replace("REG", constraint))
    pairs = both(source, [cells, x, y, np.zeros((count, 3), cells.dtype)], grid=count // 128, block=128)
    assert_same_bits(pairs, name)

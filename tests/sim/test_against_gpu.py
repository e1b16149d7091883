"""The simulator against a GPU: the same PTX, the same bits."""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import pytest
import torch

from jitfp4.layouts import round_up
from jitfp4.sim import TensorMap
from jitfp4.sim.swizzle import Swizzle
from jitfp4.sim.tensormap import ElementType
from jitfp4.tensors import device_arch
from tests.sim import random_kernels
from tests.sim.gpu import Array, assert_same_bits, both

pytestmark = [pytest.mark.gpu, pytest.mark.sim, pytest.mark.compile]

KERNELS = 60


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Seeded by the test's name."""
    return np.random.default_rng(zlib.crc32(request.node.name.encode()))


def hopper() -> None:
    if device_arch(torch.cuda.current_device()).name != "sm_90a":
        pytest.skip("sm_90a instructions")


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
    x = bits.view(dtype).astype(np.float64)
    inside = ~(np.abs(x) > bound.within)
    gpu, simulated = gpu[inside], simulated[inside]
    wide, exact = gpu.astype(np.float64), simulated.astype(np.float64)
    same = gpu.view(bits.dtype) == simulated.view(bits.dtype)
    with np.errstate(all="ignore"):
        error = np.where(same, 0, np.abs(wide - exact))
        ulps = np.where(same, 0, distance(gpu, simulated))
        relative = np.where(same, 0, error / np.abs(exact))
    finite = np.isfinite(wide) & np.isfinite(exact)
    worst = {
        "ulps": ulps[finite].max(),
        "absolute": error[finite].max(),
        "relative": relative[finite & (exact != 0)].max(),
    }
    print(  # noqa: T201 - the figures are what a run is for: pytest -s
        f"{name}: {np.mean(~same):.2%} differ, at most by", *(f"{worst[m]:.4g} {m}" for m in worst if getattr(bound, m))
    )
    good = same | (finite & ((ulps <= bound.ulps) | (error <= bound.absolute) | (relative <= bound.relative)))
    wrong = np.flatnonzero(~good)
    assert not len(wrong), f"{len(wrong)} results are further off than {bound}; first: " + ", ".join(
        f"{name}({bits[inside][i]:#x}) GPU {gpu[i]} simulator {simulated[i]}" for i in wrong[:4]
    )


# ---- tensor cores ----------------------------------------------------------------------------------------------------

FORMATS = {
    "bf16": ml_dtypes.bfloat16,
    "f16": np.float16,
    "tf32": np.float32,
    "f32": np.float32,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "s8": np.int8,
    "u8": np.uint8,
    "s32": np.int32,
}
SPREADS = ("moderate", "wide", "any")


def elements(rng: np.random.Generator, name: str, count: int, spread: str) -> Array:
    """``moderate``: normal values; ``wide``: every exponent is as likely; ``any``: every bit pattern, NaN and all."""
    dtype = np.dtype(FORMATS[name])
    anything = rng.integers(0, 256, count * dtype.itemsize, np.uint8).view(dtype)
    if spread == "any" or name in ("s8", "u8", "s32"):
        return anything
    if spread == "moderate":
        return rng.standard_normal(count).astype(dtype)
    limits = ml_dtypes.finfo(dtype)
    exponents = rng.uniform(limits.minexp // 2, limits.maxexp // 2 - 1, count)
    return (np.exp2(exponents) * rng.choice([-1.0, 1.0], count)).astype(dtype)


MMA = """
extern "C" __global__ void kernel(const uint32* a, const uint32* b, const ACC* c, ACC* d) {
  const uint32 t = blockIdx.x * blockDim.x + threadIdx.x;
  a += t * NA; b += t * NB; c += t * NC; d += t * NC;
  asm volatile("mma.sync.aligned.m16n8kSHAPE {D}, {A}, {B}, {C};" : OUT : IN);
}
"""


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize(
    "form",
    [
        "16.row.col.f32.bf16.bf16.f32",
        "8.row.col.f32.bf16.bf16.f32",
        "16.row.col.f32.f16.f16.f32",
        "8.row.col.f32.f16.f16.f32",
        "16.row.col.f16.f16.f16.f16",
        "8.row.col.f16.f16.f16.f16",
        "8.row.col.f32.tf32.tf32.f32",
        "4.row.col.f32.tf32.tf32.f32",
        "32.row.col.f32.e4m3.e4m3.f32",
        "32.row.col.f32.e5m2.e4m3.f32",
        "16.row.col.f32.e4m3.e5m2.f32",
        "32.row.col.f16.e4m3.e4m3.f16",
        "32.row.col.s32.s8.u8.s32",
        "16.row.col.satfinite.s32.s8.s8.s32",
    ],
)
def test_mma(form: str, spread: str, rng: np.random.Generator) -> None:
    k, (d_type, a_type, b_type, _) = int(form.split(".")[0]), form.split(".")[-4:]
    size = np.dtype(FORMATS[a_type]).itemsize
    counts = {"A": 16 * k * size // 128, "B": 8 * k * size // 128, "C": 2 if d_type == "f16" else 4}
    constraint = "f" if d_type == "f32" else "r"
    names = {"D": [f"d[{i}]" for i in range(counts["C"])]}
    names |= {x: [f"{x.lower()}[{i}]" for i in range(n)] for x, n in counts.items()}
    kinds = {"A": "r", "B": "r", "C": constraint}
    source = MMA.replace("SHAPE", form).replace("ACC", {"f32": "float", "s32": "int"}.get(d_type, "uint32"))
    place = 0
    for x in "DABC":
        source = source.replace("{" + x + "}", "{" + ", ".join(f"%{place + i}" for i in range(len(names[x]))) + "}")
        place += len(names[x])
    source = source.replace("OUT", ", ".join(f'"={constraint}"({n})' for n in names["D"]))
    source = source.replace("IN", ", ".join(f'"{kinds[x]}"({n})' for x in "ABC" for n in names[x]))
    for x, n in counts.items():
        source = source.replace(f"N{x}", str(n))
    threads = 32 * 64
    a, b = (elements(rng, t, threads * counts[x] * 4 // size, spread) for t, x in ((a_type, "A"), (b_type, "B")))
    c = elements(rng, d_type, threads * counts["C"] * (2 if d_type == "f16" else 1), spread)
    words = [x.view(np.uint32) for x in (a, b, c)]
    assert_same_bits(both(source, [*words, np.zeros_like(words[2])], grid=8, block=256), form)


WGMMA = """
extern "C" __global__ void __launch_bounds__(128)
kernel(const uint32* raw, const ACC* c, ACC* d, uint64 a_layout, uint64 b_layout) {
  extern __shared__ __align__(1024) uint32 tile[];
  raw += blockIdx.x * WORDS;
  c += (blockIdx.x * 128 + threadIdx.x) * COUNT;
  d += (blockIdx.x * 128 + threadIdx.x) * COUNT;
  for (uint32 i = threadIdx.x; i < WORDS; i += 128) tile[i] = raw[i];
  ACC acc[COUNT];
  for (int i = 0; i < COUNT; ++i) acc[i] = c[i];
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  const uint64 a = a_layout | address(tile) >> 4, b = b_layout | (address(tile) + WORDS * 2) >> 4;
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
  asm volatile("{.reg .pred p; setp.ne.u32 p, 1, 0; wgmma.mma_async.sync.aligned.m64n64kSHAPE {REGS}, %AT, %BT, pTAIL;}"
               : OUT : "l"(a), "l"(b));
  asm volatile("wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;" ::: "memory");
  for (int i = 0; i < COUNT; ++i) d[i] = acc[i];
}
"""
TILE_WORDS = 16384  # both operands, 32 KiB each
LAYOUT_CODE = {Swizzle.NONE: 0, Swizzle.B128: 1, Swizzle.B64: 2, Swizzle.B32: 3}


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize(
    ("types", "swizzle", "transposed"),
    [
        *(("f32.bf16.bf16", swizzle, transposed) for swizzle in LAYOUT_CODE for transposed in (False, True)),
        ("f32.f16.f16", Swizzle.B128, False),
        ("f16.f16.f16", Swizzle.B64, True),
        ("f32.tf32.tf32", Swizzle.B128, False),
        ("f32.e4m3.e4m3", Swizzle.B128, False),
        ("f32.e5m2.e4m3", Swizzle.B32, False),
        ("f16.e4m3.e5m2", Swizzle.B128, False),
        ("s32.s8.u8", Swizzle.B128, False),
    ],
)
def test_wgmma(types: str, swizzle: Swizzle, transposed: bool, spread: str, rng: np.random.Generator) -> None:
    hopper()
    d_type, a_type, b_type = types.split(".")
    k = 32 // np.dtype(FORMATS[a_type]).itemsize
    count = 16 if d_type == "f16" else 32
    constraint = {"f32": "f"}.get(d_type, "r")
    tail = {"bf16": ", 1, -1, 0, 0", "f16": ", 1, -1, 0, 0", "s8": ""}.get(a_type, ", 1, -1")
    source = WGMMA.replace("SHAPE", f"{k}.{types}").replace("TAIL", tail.replace("0", str(int(transposed))))
    source = source.replace("WORDS", str(TILE_WORDS)).replace("COUNT", str(count))
    source = source.replace("REGS", ", ".join(f"%{i}" for i in range(count)))
    source = source.replace("%AT", f"%{count}").replace("%BT", f"%{count + 1}")
    source = source.replace("OUT", ", ".join(f'"+{constraint}"(acc[{i}])' for i in range(count)))
    source = source.replace("ACC", {"f32": "float", "s32": "int"}.get(d_type, "uint32"))
    span = swizzle.span
    if swizzle is Swizzle.NONE:
        strides = (128, 16 * k) if transposed else (64 * 16, 128)
    else:
        strides = (k * span, 8 * span) if transposed else (16, 8 * span)
    layout = np.uint64(strides[0] >> 4 << 16 | strides[1] >> 4 << 32 | LAYOUT_CODE[swizzle] << 62)
    grid = 4
    half = TILE_WORDS * grid // 2
    operands = [elements(rng, t, half * 4 // np.dtype(FORMATS[t]).itemsize, spread) for t in (a_type, b_type)]
    raw = np.concatenate([x.view(np.uint32).reshape(grid, -1) for x in operands], axis=1)
    c = elements(rng, d_type, grid * 128 * count * (2 if d_type == "f16" else 1), spread).view(np.uint32)
    args = [np.ascontiguousarray(raw), c, np.zeros_like(c), layout, layout]
    assert_same_bits(both(source, args, grid=grid, block=128, shared=4 * TILE_WORDS), types)


# ---- copies by TMA ---------------------------------------------------------------------------------------------------

TMA_LOAD = """
struct alignas(64) Map { uint64 opaque[16]; };
extern "C" __global__ void kernel(const __grid_constant__ Map map, const int* at, unsigned char* y) {
  extern __shared__ __align__(1024) unsigned char cells[];
  __shared__ __align__(8) uint64 full;
  if (threadIdx.x == 0) init(&full, 1);
  for (uint32 i = threadIdx.x; i < SPACE; i += blockDim.x) cells[i] = i;
  asm volatile("fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  at += blockIdx.x * RANK;
  if (threadIdx.x == 0) {
    expect(&full, BYTES);
    asm volatile("cp.async.bulk.tensor.RANKd.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {COORDS}], [%2];"
                 ::"r"(address(cells)), "l"(&map), "r"(address(&full)), POINT : "memory");
  }
  wait(&full, 0);
  for (uint32 i = threadIdx.x; i < SPACE; i += blockDim.x) y[blockIdx.x * SPACE + i] = cells[i];
}
"""
TMA_STORE = """
struct alignas(64) Map { uint64 opaque[16]; };
extern "C" __global__ void kernel(const __grid_constant__ Map map, const int* at, const unsigned char* x) {
  extern __shared__ __align__(1024) unsigned char cells[];
  for (int box = 0; box < BOXES; ++box, at += RANK) {
    for (uint32 i = threadIdx.x; i < SPACE; i += blockDim.x) cells[i] = x[box * SPACE + i];
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    if (threadIdx.x == 0) {
      asm volatile("INSTRUCTION [%1, {COORDS}], [%0];" ::"r"(address(cells)), "l"(&map), "n"(0), POINT : "memory");
      asm volatile("cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;" ::: "memory");
    }
    __syncthreads();
  }
}
"""
Case = tuple[ElementType, tuple[int, ...], tuple[int, ...], Swizzle, tuple[int, ...], bool]
MAPS: dict[str, Case] = {
    "1d": (ElementType.U8, (1000,), (64,), Swizzle.NONE, (), False),
    "2d plain": (ElementType.U8, (80, 40), (48, 24), Swizzle.NONE, (), False),
    "2d 32 bytes": (ElementType.U16, (64, 40), (16, 40), Swizzle.B32, (), False),
    "2d 64 bytes": (ElementType.F32, (40, 40), (16, 24), Swizzle.B64, (), False),
    "2d 128 bytes": (ElementType.U8, (256, 48), (128, 32), Swizzle.B128, (), False),
    "2d short rows": (ElementType.U8, (256, 48), (48, 32), Swizzle.B128, (), False),
    "2d short rows of 32": (ElementType.U8, (256, 48), (16, 20), Swizzle.B32, (), False),
    "3d NaN": (ElementType.BF16, (72, 10, 5), (16, 4, 3), Swizzle.B32, (), True),
    "3d odd box": (ElementType.F16, (72, 10, 5), (24, 3, 3), Swizzle.B64, (), True),
    "4d": (ElementType.S32, (20, 6, 5, 4), (8, 3, 2, 2), Swizzle.B32, (), False),
    "5d": (ElementType.U64, (6, 5, 4, 3, 3), (2, 3, 2, 2, 2), Swizzle.NONE, (), False),
    "element strides": (ElementType.U16, (64, 40, 6), (32, 24, 3), Swizzle.B64, (1, 3, 2), False),
}


def tma_case(rng: np.random.Generator, name: str) -> tuple[TensorMap, Array]:
    """A map over random bytes, and 24 corners of boxes, many outside."""
    dtype, dims, box, swizzle, steps, nan_fill = MAPS[name]
    row = -(-dims[0] * dtype.bits // 8 // 16) * 16 + 16
    strides = tuple(row * int(np.prod(dims[1:n])) for n in range(1, len(dims)))
    base = rng.integers(0, 256, row * int(np.prod(dims[1:])), np.uint8)
    tensor_map = TensorMap(
        base=base, dtype=dtype, dims=dims, strides=strides, box=box, element_strides=steps, swizzle=swizzle,
        nan_fill=nan_fill,
    )  # fmt: skip
    corners = [rng.integers(-b - 2, d + 3, 24) for b, d in zip(box, dims, strict=True)]
    return tensor_map, np.ascontiguousarray(np.stack(corners, axis=1)).astype(np.int32)


def tma_source(template: str, tensor_map: TensorMap, first: int) -> str:
    rank = len(tensor_map.dims)
    source = template.replace("COORDS", ", ".join(f"%{first + i}" for i in range(rank)))
    source = source.replace("POINT", ", ".join(f'"r"(at[{i}])' for i in range(rank)))
    return (
        source.replace("RANK", str(rank))
        .replace("BYTES", str(tensor_map.box_bytes))
        .replace("SPACE", str(space(tensor_map)))
    )


def space(tensor_map: TensorMap) -> int:
    """Shared memory for a box: a swizzle may lead beyond the box's own bytes."""
    return round_up(tensor_map.box_bytes, 1024)


@pytest.mark.parametrize("name", MAPS)
def test_tensor_loads(name: str, rng: np.random.Generator) -> None:
    hopper()
    tensor_map, corners = tma_case(rng, name)
    y = np.full((len(corners), space(tensor_map)), 0xA5, np.uint8)
    source = tma_source(TMA_LOAD, tensor_map, 3)
    pairs = both(source, [tensor_map, corners, y], grid=len(corners), block=64, shared=space(tensor_map))
    assert_same_bits(pairs, name)


@pytest.mark.parametrize(
    ("name", "operation"),
    [(name, None) for name in MAPS if name != "element strides"]
    + [("2d 64 bytes", "add"), ("3d NaN", "add"), ("3d odd box", "max"), ("4d", "min"), ("4d", "xor"), ("5d", "add")],
)
def test_tensor_stores_and_reductions(name: str, operation: str | None, rng: np.random.Generator) -> None:
    hopper()
    tensor_map, corners = tma_case(rng, name)
    rank = len(tensor_map.dims)
    instruction = f"cp.async.bulk.tensor.{rank}d.global.shared::cta.tile.bulk_group"
    if operation:
        instruction = f"cp.reduce.async.bulk.tensor.{rank}d.global.shared::cta.{operation}.tile.bulk_group"
    boxes = rng.integers(0, 256, (len(corners), space(tensor_map)), np.uint8)
    source = tma_source(TMA_STORE, tensor_map, 3).replace("INSTRUCTION", instruction)
    source = source.replace("BOXES", str(len(corners)))
    tensor = tensor_map.base
    kernel = source.replace("const unsigned char* x)", "const unsigned char* x, const unsigned char*)")
    pairs = both(kernel, [tensor_map, corners, boxes, tensor], block=64, shared=space(tensor_map))
    assert_same_bits(pairs, f"{name} {operation}")


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
    if operation == "cas":
        x[::2] = cells[::2]
    source = ATOMIC.replace("NAME", name).replace("OPERANDS", "%2, %3" if operation == "cas" else "%2")
    source = re.sub(r"\bT\b", cpp, source.replace("REG", constraint))
    pairs = both(source, [cells, x, y, np.zeros((count, 3), cells.dtype)], grid=count // 128, block=128)
    assert_same_bits(pairs, name)

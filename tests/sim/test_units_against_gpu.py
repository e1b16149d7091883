"""Tensor cores and tensor copies of the simulator against those of a GPU: the same PTX, the same bits."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from jitfp4.layouts import round_up
from jitfp4.sim import TensorMap
from jitfp4.sim.swizzle import Swizzle
from jitfp4.sim.tensormap import ElementType
from tests.sim.gpu import Array, assert_same_bits, both, hopper

pytestmark = [pytest.mark.gpu, pytest.mark.sim, pytest.mark.compile]

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
    corners[0] -= corners[0] % max(1, 128 // dtype.bits)  # rows of a box begin at 16 bytes
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
    """Shared memory for a box: a swizzle may lead beyond the box's own rows."""
    return round_up(tensor_map.shared_bytes, 1024)


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
    corners = np.maximum(corners, 0)
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

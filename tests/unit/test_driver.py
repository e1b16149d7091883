"""The launch path on a GPU: argument kinds, large shared memory, clusters, tensor maps, threads, refusals."""

from __future__ import annotations

import threading

import pytest
import torch

from jitfp4 import nvrtc
from jitfp4.errors import LaunchError
from jitfp4.spec import F32, I64, Geometry, Ptr, TensorMapParam, TileMap
from jitfp4.tensors import device_arch, on_device

pytestmark = [pytest.mark.gpu, pytest.mark.compile]

ONE_THREAD = Geometry(grid=(1, 1, 1), block=(1, 1, 1))

ARGUMENTS = """
extern "C" __global__ void kernel(double* out, long long n, float f) { out[n] = f; }
"""

SHARED = """
extern "C" __global__ void kernel(int* out, long long words) {
  extern __shared__ int buffer[];
  for (long long i = threadIdx.x; i < words; i += blockDim.x) buffer[i] = int(i);
  __syncthreads();
  if (threadIdx.x == 0) *out = buffer[words - 1];
}
"""

CLUSTER = """
extern "C" __global__ void kernel(int* out, long long) {
  unsigned rank, size;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  out[blockIdx.x] = rank * 100 + size;
}
"""

TENSOR_MAP = """
struct alignas(64) TensorMap { char opaque[128]; };
extern "C" __global__ void kernel(const __grid_constant__ TensorMap map, short* out) {
  __shared__ alignas(1024) short tile[8 * 64];
  __shared__ alignas(8) unsigned long long bar;
  unsigned at = __cvta_generic_to_shared(tile), b = __cvta_generic_to_shared(&bar);
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1; fence.mbarrier_init.release.cluster;" ::"r"(b) : "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 1024;" ::"r"(b) : "memory");
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {0, 8}], [%2];"
        ::"r"(at), "l"(&map), "r"(b) : "memory");
    asm volatile(
        "{ .reg .pred p; W: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], 0; @!p bra W; }" ::"r"(b) : "memory");
  }
  __syncthreads();
  for (int i = threadIdx.x; i < 8 * 64; i += blockDim.x) out[i] = tile[i];
}
"""


def load(source: str, *params: object):
    from jitfp4.driver import LoadedKernel

    return LoadedKernel(nvrtc.compile_cubin(source, device_arch(0), symbol="kernel"), "kernel", params, 0)


def run(kernel, geometry: Geometry, *args: object, pdl: bool = False) -> None:
    with on_device(0) as stream:
        kernel.launch(geometry, args, stream=stream, pdl=pdl)
    torch.cuda.synchronize()


@pytest.mark.parametrize("pdl", [False, True])
def test_argument_kinds(pdl: bool) -> None:
    out = torch.zeros(4, dtype=torch.float64, device="cuda")
    run(load(ARGUMENTS, Ptr("out", "double"), I64("n"), F32("f")), ONE_THREAD, out, 2, 0.1, pdl=pdl)
    assert out.tolist() == [0, 0, float(torch.tensor(0.1)), 0]


def test_dynamic_shared_memory_above_48_kib() -> None:
    kernel, out = load(SHARED, Ptr("out", "int"), I64("words")), torch.zeros(1, dtype=torch.int32, device="cuda")
    for words in (64, 40_000, 100):
        run(kernel, Geometry(grid=(1, 1, 1), block=(128, 1, 1), shared_bytes=4 * words), out, words)
        assert out.item() == words - 1


@pytest.mark.parametrize("size", [2, 8, 16])
def test_clusters(size: int) -> None:
    if not device_arch(0).has_tma:
        pytest.skip("clusters need compute capability 9.0")
    out = torch.zeros(32, dtype=torch.int32, device="cuda")
    geometry = Geometry(grid=(32, 1, 1), block=(32, 1, 1), cluster=(size, 1, 1))
    run(load(CLUSTER, Ptr("out", "int"), I64("n")), geometry, out, 0)
    assert out.tolist() == [100 * (i % size) + size for i in range(32)]


def test_tensor_map() -> None:
    if not device_arch(0).has_tma:
        pytest.skip("TMA needs compute capability 9.0")
    kernel = load(TENSOR_MAP, TensorMapParam("map"), Ptr("out", "short"))
    out = torch.zeros(8, 64, dtype=torch.int16, device="cuda")
    for seed in (0, 1):  # the second map has another address
        x = torch.randint(-9999, 9999, (12, 64), dtype=torch.int16, device="cuda")
        run(kernel, Geometry(grid=(1, 1, 1), block=(32, 1, 1)), TileMap(x.view(torch.uint16), (8, 64)), out)
        assert torch.equal(out[:4], x[8:]), seed
        assert not out[4:].any()
        run(
            kernel, Geometry(grid=(1, 1, 1), block=(32, 1, 1)), TileMap(x.view(torch.uint16), (8, 64), swizzle=128), out
        )
        chunks = out.view(8, 8, 8)  # row r holds 16-byte chunk c at place c ^ r
        unswizzled = torch.stack([torch.stack([chunks[r, c ^ r] for c in range(8)]) for r in range(8)]).view(8, 64)
        assert torch.equal(unswizzled[:4], x[8:])


def test_a_fresh_thread_can_launch() -> None:
    kernel, out = (
        load(ARGUMENTS, Ptr("out", "double"), I64("n"), F32("f")),
        torch.zeros(4, dtype=torch.float64, device="cuda"),
    )
    errors: list[BaseException] = []

    def body() -> None:
        try:
            run(kernel, ONE_THREAD, out, 1, 2.0)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert not errors and out.tolist() == [0, 2, 0, 0]


WHOLE_TILE = """
struct alignas(64) TensorMap { char opaque[128]; };
extern "C" __global__ void kernel(const __grid_constant__ TensorMap map, char* out) {
  __shared__ alignas(128) char tile[1024];
  __shared__ alignas(8) unsigned long long bar;
  unsigned at = __cvta_generic_to_shared(tile), b = __cvta_generic_to_shared(&bar);
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1; fence.mbarrier_init.release.cluster;" ::"r"(b) : "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 1024;" ::"r"(b) : "memory");
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {0, 1}], [%2];"
        ::"r"(at), "l"(&map), "r"(b) : "memory");
    asm volatile(
        "{ .reg .pred p; W: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], 0; @!p bra W; }" ::"r"(b) : "memory");
  }
  __syncthreads();
  for (int i = threadIdx.x; i < 1024; i += blockDim.x) out[i] = tile[i];
}
"""


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.uint32, torch.uint64], ids=str)
def test_tensor_maps_of_every_element_size(dtype: torch.dtype) -> None:
    if not device_arch(0).has_tma:
        pytest.skip("TMA needs compute capability 9.0")
    kernel = load(WHOLE_TILE, TensorMapParam("map"), Ptr("out", "char"))
    columns = 128 // dtype.itemsize
    memory = torch.randint(0, 256, (10, 256), dtype=torch.uint8, device="cuda")
    x, out = memory.view(dtype)[:, :columns], torch.zeros(8, 128, dtype=torch.uint8, device="cuda")
    run(kernel, Geometry(grid=(1, 1, 1), block=(32, 1, 1)), TileMap(x, (8, columns)), out)
    assert torch.equal(out, memory[1:9, :128])


def test_negative_numbers_of_both_kinds() -> None:
    out = torch.zeros(4, dtype=torch.float64, device="cuda")
    run(load(ARGUMENTS, Ptr("out", "double"), I64("n"), F32("f")), ONE_THREAD, out[3:], -2, -0.5)
    assert out.tolist() == [0, -0.5, 0, 0]
    run(load(ARGUMENTS, Ptr("out", "double"), I64("n"), F32("f")), ONE_THREAD, out, 0, -1e300)
    assert out[0] == float("-inf")


def test_a_launch_is_repeated_at_other_addresses_and_on_other_streams() -> None:
    kernel = load(ARGUMENTS, Ptr("out", "double"), I64("n"), F32("f"))
    first, second = (torch.zeros(4, dtype=torch.float64, device="cuda") for _ in range(2))
    side = torch.cuda.Stream()
    with on_device(0) as stream:
        prepared, tensors = kernel.launch(ONE_THREAD, (first, 1, 2.5), stream=stream, pdl=False)
        assert [tensor.data_ptr() for tensor in tensors] == [first.data_ptr()]
        prepared.launch(stream, [second.data_ptr()])
        torch.cuda.synchronize()
        prepared.launch(side.cuda_stream, [second[2:].data_ptr()])
        prepared.launch(stream, [first[1:].data_ptr()])
    torch.cuda.synchronize()
    assert first.tolist() == [0, 2.5, 2.5, 0] and second.tolist() == [0, 2.5, 0, 2.5]


def test_a_repeated_launch_has_a_tensor_map_of_its_own_address() -> None:
    if not device_arch(0).has_tma:
        pytest.skip("TMA needs compute capability 9.0")
    kernel = load(WHOLE_TILE, TensorMapParam("map"), Ptr("out", "char"))
    inputs = [torch.randint(0, 256, (10, 128), dtype=torch.uint8, device="cuda") for _ in range(300)]  # past the memo
    outputs = [torch.zeros(8, 128, dtype=torch.uint8, device="cuda") for _ in inputs]
    geometry = Geometry(grid=(1, 1, 1), block=(32, 1, 1))
    with on_device(0) as stream:
        prepared, _ = kernel.launch(geometry, (TileMap(inputs[0], (8, 128)), outputs[0]), stream=stream, pdl=False)
        for x, out in zip(inputs, outputs, strict=True):
            prepared.launch(stream, [x.data_ptr(), out.data_ptr()])
    torch.cuda.synchronize()
    assert all(torch.equal(out, x[1:9]) for x, out in zip(inputs, outputs, strict=True))


def test_threads_share_a_repeated_launch() -> None:
    kernel = load(ARGUMENTS, Ptr("out", "double"), I64("n"), F32("f"))
    outs = [torch.zeros(1000, dtype=torch.float64, device="cuda") for _ in range(4)]
    with on_device(0) as stream:
        prepared, _ = kernel.launch(ONE_THREAD, (outs[0], 0, 1.0), stream=stream, pdl=False)
    errors: list[BaseException] = []

    def body(out: torch.Tensor) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for i in range(1000):
                    prepared.launch(torch.cuda.current_stream().cuda_stream, [out.data_ptr() + 8 * i])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=body, args=(out,)) for out in outs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert not errors and all((out == 1).all() for out in outs)


def test_a_bound_launch_runs_in_a_thread_without_a_context() -> None:
    kernel, out = (
        load(ARGUMENTS, Ptr("out", "double"), I64("n"), F32("f")),
        torch.zeros(4, dtype=torch.float64, device="cuda"),
    )
    with on_device(0) as stream:
        prepared, _ = kernel.launch(ONE_THREAD, (out, 0, 1.0), stream=stream, pdl=False)
    run, errors = prepared.bound([out[2:].data_ptr()], stream), list[BaseException]()

    def body() -> None:
        try:
            if error := run():
                run.retry(error)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert not errors and out.tolist() == [1, 0, 1, 0]
    with pytest.raises(LaunchError, match="kernel: CUDA_ERROR_INVALID_VALUE"):
        run.retry(1)


def test_the_driver_refuses_what_is_not_a_cubin() -> None:
    from jitfp4.driver import LoadedKernel

    with pytest.raises(LaunchError, match="kernel"):
        LoadedKernel(b"\x7fELF" + bytes(200), "kernel", (), 0)


def test_argument_count_is_checked() -> None:
    with pytest.raises(LaunchError, match="takes 3 arguments, got 1"):
        run(load(ARGUMENTS, Ptr("out", "double"), I64("n"), F32("f")), ONE_THREAD, 1)


def test_memory_is_zero_and_no_part_of_a_capture() -> None:
    from jitfp4.driver import Memory

    size, graph = 1 << 20, torch.cuda.CUDAGraph()
    x = torch.ones(4, device="cuda")
    with torch.cuda.graph(graph):
        kept = Memory(torch.cuda.current_device(), size)
        x += 1
    space = torch.as_tensor(kept, device="cuda")
    assert space.numel() == size and space.dtype == torch.uint8 and not space.any()
    space.fill_(7)
    graph.replay()
    torch.cuda.synchronize()
    assert (space == 7).all() and (x == 2).all(), "a replay neither clears nor frees it"

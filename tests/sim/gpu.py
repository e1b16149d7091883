"""The same PTX on the GPU and in the simulator."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np
import torch

from jitfp4 import sim
from jitfp4.spec import Geometry
from jitfp4.tensors import device_arch
from tests.sim.cuda import compiled

Array = np.ndarray[Any, Any]


def hopper() -> None:
    """Skip a test of sm_90a instructions elsewhere."""
    import pytest  # here, because a benchmark uses this module without it

    if device_arch(torch.cuda.current_device()).name != "sm_90a":
        pytest.skip("sm_90a instructions")


def both(source: str, args: list[Any], *, grid: int = 1, block: int = 32, shared: int = 0) -> list[tuple[Array, Array]]:
    """Run ``kernel`` of ``source`` on copies of ``args`` twice: each array argument afterwards, (GPU, simulated).

    ``args``: NumPy arrays, NumPy scalars of the parameters' types, TensorMaps; equal arrays stay one buffer.
    """
    arch = device_arch(torch.cuda.current_device())
    ptx, geometry = compiled(source, arch.name), Geometry((grid, 1, 1), (block, 1, 1), shared_bytes=shared)
    on_gpu = run_on_gpu(ptx, args, geometry)
    sim.run(ptx, args, geometry, arch)
    arrays = [arg for arg in args if is_array(arg)]
    return list(zip(on_gpu, arrays, strict=True))


def is_array(arg: Any) -> bool:
    return isinstance(arg, np.ndarray)


def run_on_gpu(ptx: str, args: list[Any], geometry: Geometry) -> list[Array]:
    """What ``kernel`` leaves in each array argument; the arrays themselves stay as they are."""
    from cuda.bindings import driver as cuda

    buffers: dict[int, torch.Tensor] = {}

    def on_device(array: Array) -> torch.Tensor:
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        return buffers.setdefault(array.ctypes.data, torch.from_numpy(flat.copy()).cuda())

    holders = [_parameter(arg, on_device) for arg in args]
    pointers = (ctypes.c_void_p * len(holders))(*map(ctypes.addressof, holders))
    config = cuda.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = geometry.grid
    config.blockDimX, config.blockDimY, config.blockDimZ = geometry.block
    config.sharedMemBytes = geometry.shared_bytes
    config.hStream = cuda.CUstream(torch.cuda.current_stream().cuda_stream)
    _checked(cuda.cuLaunchKernelEx(config, _loaded(ptx, geometry.shared_bytes), ctypes.addressof(pointers), 0))
    torch.cuda.synchronize()
    return [on_device(arg).cpu().numpy().view(arg.dtype).reshape(arg.shape) for arg in args if is_array(arg)]


def _parameter(arg: Any, on_device: Any) -> Any:
    """One kernel parameter in memory."""
    if is_array(arg):
        return ctypes.c_uint64(on_device(arg).data_ptr())
    if isinstance(arg, sim.TensorMap):
        return _encoded(arg, on_device(arg.base).data_ptr())
    assert isinstance(arg, np.generic), type(arg)
    return ctypes.create_string_buffer(arg.tobytes(), arg.itemsize)


def _encoded(tensor_map: sim.TensorMap, address: int) -> Any:
    """The driver's 128 bytes for a tensor map. It wants them at a multiple of 64, where cuda.bindings has none."""
    from cuda.bindings import driver as cuda

    memory = ctypes.create_string_buffer(128 + 63)
    encoded = (ctypes.c_char * 128).from_buffer(memory, -ctypes.addressof(memory) % 64)
    rank = len(tensor_map.dims)
    dtype = getattr(cuda.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{tensor_map.dtype.value.upper()}")
    status = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled(
        encoded,
        int(dtype),
        rank,
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * rank)(*tensor_map.dims),
        (ctypes.c_uint64 * rank)(*tensor_map.strides),
        (ctypes.c_uint32 * rank)(*tensor_map.box),
        (ctypes.c_uint32 * rank)(*(tensor_map.element_strides or (1,) * rank)),
        0,  # not interleaved
        int(tensor_map.swizzle),
        0,  # no promotion to L2
        int(tensor_map.nan_fill),
    )
    assert status == 0, status
    return encoded


@functools.cache
def _loaded(ptx: str, shared: int) -> Any:
    """The driver's compilation of a module's ``kernel``; the module stays loaded."""
    from cuda.bindings import driver as cuda

    torch.cuda.current_stream()  # makes the device's context current
    library = _checked(cuda.cuLibraryLoadData(ptx.encode() + b"\0", [], [], 0, [], [], 0))
    function = _checked(cuda.cuKernelGetFunction(_checked(cuda.cuLibraryGetKernel(library, b"kernel"))))
    attribute = cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    _checked(cuda.cuFuncSetAttribute(function, attribute, shared))
    return function


def _checked(answer: tuple[Any, ...]) -> Any:
    status, *values = answer
    assert int(status) == 0, status
    return values[0] if values else None


def assert_same_bits(pairs: list[tuple[Array, Array]], name: str = "result") -> None:
    """Equal bytes in every pair; on failure how many elements differ, and the first."""
    for number, (gpu, simulated) in enumerate(pairs):
        raw = [np.ascontiguousarray(x).reshape(-1).view(f"u{x.dtype.itemsize}") for x in (gpu, simulated)]
        wrong = np.flatnonzero(raw[0] != raw[1])
        if len(wrong):
            at = wrong[0]
            raise AssertionError(
                f"{name}: array {number}: {len(wrong)} of {raw[0].size} elements differ, first at "
                f"{np.unravel_index(at, gpu.shape)}: GPU {raw[0][at]:#x}, simulator {raw[1][at]:#x}"
            )

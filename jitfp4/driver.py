"""The only caller of the CUDA driver: load a cubin, launch a kernel. Never synchronises; safe under graph capture."""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from typing import Any

import numpy
from cuda.bindings import driver as cuda
from cuda.core import Device, LaunchConfig, ObjectCode, Stream, TensorMapDescriptorOptions, launch
from cuda.core.utils import StridedMemoryView

from jitfp4.errors import LaunchError
from jitfp4.spec import F32, Geometry, Param, Ptr, TensorMapParam, TileMap

_PORTABLE_CLUSTER = 8  # a larger cluster needs it too
_MAX_TENSOR_MAPS = 256
_thread = threading.local()


class LoadedKernel:
    """A kernel on one device, ready to launch. Keeps the launch configurations that it has met."""

    def __init__(self, cubin: bytes, symbol: str, params: Sequence[Param], device: int) -> None:
        """Load ``cubin`` and find ``symbol`` in it. Raises LaunchError when the driver refuses."""
        self.symbol, self.device = symbol, device
        try:
            self._kernel = ObjectCode.from_cubin(cubin, name=symbol).get_kernel(symbol)
        except Exception as error:  # cuda.core raises its own CUDAError, RuntimeError or ValueError
            raise LaunchError(f"the driver refused {symbol} ({len(cubin)} bytes): {error}") from error
        self._count = len(params)
        self._pointers = tuple(i for i, param in enumerate(params) if isinstance(param, Ptr))
        self._floats = tuple(i for i, param in enumerate(params) if isinstance(param, F32))
        self._maps = tuple(i for i, param in enumerate(params) if isinstance(param, TensorMapParam))
        self._configs: dict[tuple[Geometry, bool], LaunchConfig] = {}
        self._shared_bytes = 0  # dynamic shared memory that the kernel has consented to

    def launch(self, geometry: Geometry, args: Sequence[Any], *, stream: int, pdl: bool) -> None:
        """Launch on a raw ``stream`` of the current device, which must be this kernel's.

        ``args`` follow the family's parameters: tensors (or None for a null pointer), ints, floats and TileMaps.
        ``pdl`` sets programmatic stream
        serialization: the kernel may start while its predecessor drains.
        """
        if not hasattr(_thread, "bound"):  # a thread that never called the driver has no current context
            Device(self.device).set_current()
            _thread.bound = True
        if len(args) != self._count:
            raise LaunchError(f"{self.symbol} takes {self._count} arguments, got {len(args)}")
        values = list(args)
        for i in self._pointers:
            values[i] = 0 if values[i] is None else values[i].data_ptr()
        for i in self._floats:
            values[i] = numpy.float32(values[i])
        for i in self._maps:
            values[i] = _tensor_map(values[i])
        config = self._configs.get((geometry, pdl)) or self._configure(geometry, pdl)
        launch(_stream(self.device, stream), config, self._kernel, *values)

    def _configure(self, geometry: Geometry, pdl: bool) -> LaunchConfig:
        cluster = geometry.cluster[0] * geometry.cluster[1] * geometry.cluster[2]
        if geometry.shared_bytes > self._shared_bytes:
            self._set("CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES", geometry.shared_bytes)
            self._shared_bytes = geometry.shared_bytes
        if cluster > _PORTABLE_CLUSTER:
            self._set("CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED", 1)
        grid = tuple(ctas // width for ctas, width in zip(geometry.grid, geometry.cluster, strict=True))
        config = LaunchConfig(
            grid=grid,  # cuda.core counts clusters where there are any
            block=geometry.block,
            cluster=geometry.cluster if cluster > 1 else None,
            shmem_size=geometry.shared_bytes,
            programmatic_stream_serialization=pdl,
        )
        self._configs[geometry, pdl] = config
        return config

    def _set(self, attribute: str, value: int) -> None:
        kernel = cuda.CUkernel(int(self._kernel.handle))
        name = getattr(cuda.CUfunction_attribute, attribute)
        (status,) = cuda.cuKernelSetAttribute(name, value, kernel, cuda.CUdevice(self.device))
        if status != cuda.CUresult.CUDA_SUCCESS:
            raise LaunchError(f"{self.symbol}: {attribute} = {value}: {status.name}")


@functools.cache
def _stream(device: int, handle: int) -> Stream:  # noqa: ARG001 - a handle names a stream of one device only
    return Stream.from_handle(handle)


def _tensor_map(tile: TileMap) -> Any:
    return _encode(_View(tile.tensor), tile.box, tile.swizzle)


class _View:
    """A tensor that compares by address, shape, strides and element size: what a tensor map depends on."""

    __slots__ = ("key", "tensor")

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor
        self.key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _View) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


@functools.lru_cache(maxsize=_MAX_TENSOR_MAPS)
def _encode(view: _View, box: tuple[int, ...], swizzle: int) -> Any:
    tensor, view.tensor = view.tensor, None  # the memo must not keep the tensor's memory alive
    swizzles = type(TensorMapDescriptorOptions(box_dim=box).swizzle)
    return StridedMemoryView.from_any_interface(tensor, stream_ptr=-1).as_tensor_map(
        box, swizzle=swizzles[f"SWIZZLE_{swizzle}B" if swizzle else "NONE"]
    )

"""The only caller of the CUDA driver: load a cubin, launch a kernel. Never synchronises; safe under graph capture.

A cubin is loaded by cuda.core. A launch calls ``cuLaunchKernelEx`` directly, with argument memory that is kept between
launches: packing 20 arguments each time would take longer than the driver.
"""

from __future__ import annotations

import ctypes
import functools
import math
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

from cuda.bindings import driver as cuda
from cuda.core import Device, ObjectCode

from jitfp4.errors import LaunchError
from jitfp4.spec import F32, Geometry, Param, Ptr, TensorMapParam, TileMap

_PORTABLE_CLUSTER = 8  # a kernel must permit a larger cluster by an attribute
_MAP_BYTES, _MAP_ALIGNMENT = 128, 64
_MAP_TYPES = {1: 0, 2: 1, 4: 2, 8: 4}  # CU_TENSOR_MAP_DATA_TYPE_UINT8, _UINT16, _UINT32, _UINT64 by element size
_MAP_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}  # CU_TENSOR_MAP_SWIZZLE_NONE, _32B, _64B, _128B
_MAP_L2_PROMOTION = 2  # CU_TENSOR_MAP_L2_PROMOTION_L2_128B
_MAX_MAPS = 256
_MAX_PREPARED = 1024  # launches that a kernel keeps
_POINTER = object()


class LoadedKernel:
    """A kernel on one device, ready to launch."""

    def __init__(self, cubin: bytes, symbol: str, params: Sequence[Param], device: int) -> None:
        """Load ``cubin`` and find ``symbol`` in it. Raises LaunchError when the driver refuses."""
        self.symbol, self.device, self.params = symbol, device, tuple(params)
        try:
            self._kernel = ObjectCode.from_cubin(cubin, name=symbol).get_kernel(symbol)
        except Exception as error:  # cuda.core raises its own CUDAError, RuntimeError or ValueError
            raise LaunchError(f"the driver refused {symbol} ({len(cubin)} bytes): {error}") from error
        self._kinds = [type(param) for param in params]
        self._prepare = functools.lru_cache(maxsize=_MAX_PREPARED)(functools.partial(PreparedLaunch, self))
        self.handle = ctypes.c_void_p(int(self._kernel.handle))
        self._shared_bytes = 0  # the limit of dynamic shared memory that was set so far
        self._configs: dict[tuple[Geometry, bool, int], tuple[Any, ctypes.c_void_p]] = {}
        self._lock = threading.Lock()

    def launch(
        self, geometry: Geometry, args: Sequence[Any], *, stream: int, pdl: bool
    ) -> tuple[PreparedLaunch, list[Any]]:
        """Launch on a raw ``stream`` of the current device, which must be this kernel's.

        ``args`` are in the order of the kernel's parameters: tensors (or None for a null pointer), ints, floats and
        TileMaps. ``pdl`` sets programmatic stream serialization: the kernel may start before its predecessor ends.
        Returns the launch, which can be repeated with other addresses, and the tensors whose addresses it takes.
        """
        if len(args) != len(self.params):
            raise LaunchError(f"{self.symbol} takes {len(self.params)} arguments, got {len(args)}")
        tensors: list[Any] = []
        constants: list[Any] = []
        for kind, arg in zip(self._kinds, args, strict=True):
            if kind is Ptr and arg is not None:
                tensors.append(arg)
                constants.append(_POINTER)
            elif kind is TensorMapParam:
                tensors.append(arg.tensor)
                constants.append(_MapLayout.of(arg))
            else:
                constants.append(_bits(kind, arg))
        prepared = self._prepare(geometry, pdl, tuple(constants))
        prepared.launch(stream, [tensor.data_ptr() for tensor in tensors])
        return prepared, tensors

    def config(self, geometry: Geometry, pdl: bool, stream: int) -> ctypes.c_void_p:
        """The address of the driver's description of a launch, which this kernel keeps alive."""
        key = geometry, pdl, stream
        with self._lock:
            if key not in self._configs:
                self._consent(geometry)
                config = _describe(geometry, pdl, stream)
                self._configs[key] = config, ctypes.c_void_p(config.getPtr())
            return self._configs[key][1]

    def _consent(self, geometry: Geometry) -> None:
        """Raise the kernel's limits to what a geometry needs."""
        if geometry.shared_bytes > self._shared_bytes:
            self._set("CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES", geometry.shared_bytes)
            self._shared_bytes = geometry.shared_bytes
        if math.prod(geometry.cluster) > _PORTABLE_CLUSTER:
            self._set("CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED", 1)

    def _set(self, attribute: str, value: int) -> None:
        name = getattr(cuda.CUfunction_attribute, attribute)
        (status,) = cuda.cuKernelSetAttribute(name, value, cuda.CUkernel(self.handle.value), cuda.CUdevice(self.device))
        if status != cuda.CUresult.CUDA_SUCCESS:
            raise LaunchError(f"{self.symbol}: {attribute} = {value}: {status.name}")


class PreparedLaunch:
    """A launch in which all is fixed except the addresses of the tensors and the stream."""

    def __init__(self, kernel: LoadedKernel, geometry: Geometry, pdl: bool, constants: Sequence[Any]) -> None:
        """``constants``: for each parameter its value, the layout of its tensor map, or the mark of a pointer."""
        self._kernel, self._geometry, self._pdl = kernel, geometry, pdl
        self._values = (ctypes.c_int64 * len(constants))()  # of the parameters without a tensor
        self._params = (ctypes.c_void_p * len(constants))()
        self._places: list[int] = []  # of the parameters with a tensor
        self._maps: list[tuple[int, _MapLayout]] = []  # number of the tensor, layout
        for place, constant in enumerate(constants):
            if isinstance(constant, _MapLayout):
                self._maps.append((len(self._places), constant))
            if constant is _POINTER or isinstance(constant, _MapLayout):
                self._places.append(place)
            else:
                self._values[place] = constant
                self._params[place] = ctypes.addressof(self._values) + 8 * place

    def launch(self, stream: int, addresses: Sequence[int]) -> None:
        """Launch on a raw stream of the current device, with tensors at these addresses."""
        run = self.bound(addresses, stream)
        if error := run():
            run.retry(error)

    def bound(self, addresses: Sequence[int], stream: int) -> BoundLaunch:
        """The launch on a raw stream with tensors at these addresses."""
        pointers = (ctypes.c_uint64 * len(addresses))(*addresses)
        params = type(self._params).from_buffer_copy(self._params)
        for number, place in enumerate(self._places):
            params[place] = ctypes.addressof(pointers) + 8 * number
        maps = [_encode(layout, addresses[number]) for number, layout in self._maps]
        for (number, _), (_, start) in zip(self._maps, maps, strict=True):
            params[self._places[number]] = start
        config = self._kernel.config(self._geometry, self._pdl, stream)
        where = ctypes.c_void_p(ctypes.addressof(params))
        run = BoundLaunch(_functions().cuLaunchKernelEx, config, self._kernel.handle, where, None)
        run.kernel, run.held = self._kernel, (pointers, params, maps, self._values)
        return run


class BoundLaunch(functools.partial[int]):
    """A launch with all its arguments, as a function that returns the driver's error.

    It has argument memory of its own, which nobody writes any more: threads may share it.
    """

    kernel: LoadedKernel
    held: object  # the argument memory

    def retry(self, error: int) -> None:
        """Launch in a thread that has no current context because it never called the driver. Raises LaunchError where
        that is not the cause of ``error``.
        """
        if not int(_called("cuCtxGetCurrent")):
            Device(self.kernel.device).set_current()
            error = self()
        if error:
            raise LaunchError(f"{self.kernel.symbol}: {cuda.CUresult(error).name}")


class Memory:
    """New memory of the current device, which is zero and stays for the rest of the process; torch.as_tensor takes it.

    It is none of torch's: it is no part of a CUDA graph that is being captured, nor of a pool that somebody empties.
    The constructor waits for its own memset alone.
    """

    def __init__(self, device: int, size: int) -> None:
        """``size`` bytes of ``device``, the current one. Raises LaunchError when the driver refuses."""
        Device(device).set_current()
        relaxed = cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED  # a capture forbids allocations otherwise
        before = _called("cuThreadExchangeStreamCaptureMode", relaxed)
        try:
            address = _called("cuMemAlloc", size)
            stream = _called("cuStreamCreate", cuda.CUstream_flags.CU_STREAM_NON_BLOCKING.value)
            _called("cuMemsetD8Async", address, 0, size, stream)
            _called("cuStreamSynchronize", stream)
            _called("cuStreamDestroy", stream)
        finally:
            _called("cuThreadExchangeStreamCaptureMode", before)
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (int(address), False),
            "version": 2,
        }


def _called(name: str, *args: Any) -> Any:
    """The result of a function of the driver. Raises LaunchError where it fails."""
    status, *results = getattr(cuda, name)(*args)
    if status != cuda.CUresult.CUDA_SUCCESS:
        raise LaunchError(f"{name}: {status.name}")
    return results[0] if results else None


def _bits(kind: type, value: Any) -> int:
    """The eight bytes of a parameter as an int: a null pointer, a float in the lower half, or an integer."""
    if kind is F32:
        return ctypes.c_int32.from_buffer(ctypes.c_float(value)).value  # a value beyond float32 becomes infinite
    return 0 if value is None else int(value)


def _describe(geometry: Geometry, pdl: bool, stream: int) -> Any:
    attributes = []
    if math.prod(geometry.cluster) > 1:
        cluster = cuda.CUlaunchAttribute()
        cluster.id = cuda.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        cluster.value.clusterDim.x, cluster.value.clusterDim.y, cluster.value.clusterDim.z = geometry.cluster
        attributes.append(cluster)
    if pdl:
        overlap = cuda.CUlaunchAttribute()
        overlap.id = cuda.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        overlap.value.programmaticStreamSerializationAllowed = 1
        attributes.append(overlap)
    config = cuda.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = geometry.grid
    config.blockDimX, config.blockDimY, config.blockDimZ = geometry.block
    config.sharedMemBytes, config.hStream = geometry.shared_bytes, stream
    config.attrs, config.numAttrs = attributes, len(attributes)
    return config


@functools.cache
def _functions() -> ctypes.CDLL:
    """The driver's library, which cuda.core has already loaded."""
    library = ctypes.CDLL("libcuda.so.1")
    pointer, u32 = ctypes.c_void_p, ctypes.c_uint32
    library.cuLaunchKernelEx.argtypes = [pointer] * 4
    library.cuTensorMapEncodeTiled.argtypes = [pointer, u32, u32, *[pointer] * 5, u32, u32, u32, u32]
    return library


class _MapLayout(NamedTuple):
    """A TileMap without its address; sizes and strides as the driver takes them, innermost first."""

    element_size: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]  # bytes; without the innermost
    box: tuple[int, ...]
    swizzle: int

    @staticmethod
    def of(tile: TileMap) -> _MapLayout:
        tensor, size = tile.tensor, tile.tensor.element_size()
        strides = tuple(stride * size for stride in tensor.stride()[-2::-1])
        return _MapLayout(size, tuple(tensor.shape[::-1]), strides, tile.box[::-1], tile.swizzle)


@functools.lru_cache(maxsize=_MAX_MAPS)
def _encode(layout: _MapLayout, address: int) -> tuple[Any, int]:
    """The memory of a tensor map, and the address of the map in it."""
    memory = ctypes.create_string_buffer(_MAP_BYTES + _MAP_ALIGNMENT)
    start = -ctypes.addressof(memory) % _MAP_ALIGNMENT + ctypes.addressof(memory)
    rank = len(layout.sizes)
    sizes, strides = (ctypes.c_uint64 * rank)(*layout.sizes), (ctypes.c_uint64 * rank)(*layout.strides)
    box, steps = (ctypes.c_uint32 * rank)(*layout.box), (ctypes.c_uint32 * rank)(*[1] * rank)
    kind, swizzle = _MAP_TYPES[layout.element_size], _MAP_SWIZZLES[layout.swizzle]
    status = _functions().cuTensorMapEncodeTiled(
        start, kind, rank, address, sizes, strides, box, steps, 0, swizzle, _MAP_L2_PROMOTION, 0
    )
    if status:
        raise LaunchError(f"tensor map of {layout}: {cuda.CUresult(status).name}")
    return memory, start

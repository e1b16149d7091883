"""The CUDA driver and the GPUs of this machine, as libcuda reports them. Loads neither torch nor cuda.core."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76  # CUdevice_attribute
_NAME_BYTES = 256


@dataclass(frozen=True, slots=True)
class Gpu:
    """One CUDA device."""

    name: str
    capability: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Driver:
    """The CUDA version that the driver supports, such as ``13.0``, and the devices that it shows to this process."""

    cuda: str
    gpus: tuple[Gpu, ...]


def cuda_driver() -> Driver | None:
    """The driver of this machine, or None when there is none."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version = _read(cuda.cuDriverGetVersion)
    devices = range(_read(cuda.cuDeviceGetCount)) if cuda.cuInit(0) == 0 else ()
    return Driver(f"{version // 1000}.{version % 1000 // 10}", tuple(_gpu(cuda, index) for index in devices))


def _gpu(cuda: ctypes.CDLL, index: int) -> Gpu:
    device = _read(cuda.cuDeviceGet, index)
    name = ctypes.create_string_buffer(_NAME_BYTES)
    cuda.cuDeviceGetName(name, _NAME_BYTES, device)
    major, minor = (
        _read(cuda.cuDeviceGetAttribute, attribute, device) for attribute in (_CAPABILITY_MAJOR, _CAPABILITY_MINOR)
    )
    return Gpu(name.value.decode(), (major, minor))


def _read(function: ctypes._NamedFuncPointer, *args: int) -> int:
    """The int that ``function`` writes to where its first argument points; 0 when it fails."""
    value = ctypes.c_int(0)
    function(ctypes.byref(value), *args)
    return value.value

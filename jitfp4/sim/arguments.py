"""Launch arguments to a parameter bank: pointers become buffers of global memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from jitfp4.errors import ArgumentError, ArgumentTypeError
from jitfp4.sim.memory import PARAM_START, GlobalMemory
from jitfp4.sim.ptx import Array, Variable
from jitfp4.sim.tensormap import TENSOR_MAP_BYTES, TensorMap, tensor_map_bytes
from jitfp4.sim.tiles import tensor_map
from jitfp4.spec import TileMap


def pack(params: Sequence[Variable], args: Sequence[Any], memory: GlobalMemory) -> tuple[Array, dict[int, Any]]:
    """The parameter bank and the tensor maps in it, by parameter address."""
    if len(args) != len(params):
        raise ArgumentError("args", len(args), f"{len(params)} arguments")
    size = max((p.offset + p.size for p in params), default=0)
    bank, maps = np.zeros(size, np.uint8), {}
    for number, (param, arg) in enumerate(zip(params, args, strict=True)):
        if isinstance(arg, TileMap):
            arg = tensor_map(arg)
        if isinstance(arg, TensorMap):
            maps[PARAM_START + param.offset] = arg
            if param.size != TENSOR_MAP_BYTES:
                raise ArgumentTypeError(f"args[{number}]", "TensorMap", f"a {param.size}-byte parameter")
            bank[param.offset : param.offset + param.size] = tensor_map_bytes(PARAM_START + param.offset)
            continue
        data = _value_bytes(number, param, arg, memory)
        bank[param.offset : param.offset + param.size] = np.frombuffer(data, np.uint8)
    return bank, maps


def _value_bytes(number: int, param: Variable, arg: Any, memory: GlobalMemory) -> bytes:
    name = f"args[{number}]"
    if arg is None:
        return bytes(param.size)
    if isinstance(arg, bytes) and len(arg) == param.size:
        return arg
    if isinstance(arg, np.ndarray) and arg.ndim + arg.size > 0 and not isinstance(arg, np.generic):
        return memory.add(f"{name} {arg.dtype}{list(arg.shape)}", *_array_bytes(arg)).to_bytes(8, "little")
    if type(arg).__module__.partition(".")[0] == "torch":
        return memory.add(f"{name} {arg.dtype}{list(arg.shape)}", *_tensor_bytes(name, arg)).to_bytes(8, "little")
    if isinstance(arg, (bool, int, np.integer, np.bool_)):
        least, most = -(1 << 8 * param.size - 1), (1 << 8 * param.size) - 1
        if not least <= arg <= most:
            raise ArgumentError(name, str(arg)[:60], f"a number of {param.size} bytes")
        return (int(arg) & most).to_bytes(param.size, "little")
    if isinstance(arg, (float, np.floating)) and param.size in (4, 8):
        with np.errstate(over="ignore"):
            value = np.array(arg, f"<f{param.size}")
        if np.isinf(value) and not math.isinf(arg):
            raise ArgumentError(name, str(arg), f"a number of {param.size} bytes")
        return value.tobytes()
    raise ArgumentTypeError(name, type(arg).__name__, f"a value for a {param.size}-byte parameter")


def array_of(name: str, arg: Any) -> Array:
    """The bytes of a NumPy array's or CPU tensor's extent, sharing its memory. Raises ArgumentTypeError."""
    if isinstance(arg, np.ndarray):
        return _array_bytes(arg)[0]
    if type(arg).__module__.partition(".")[0] == "torch":
        return _tensor_bytes(name, arg)[0]
    raise ArgumentTypeError(name, type(arg).__name__, "arrays or CPU tensors")


def _array_bytes(array: Array) -> tuple[Array, int]:
    """The bytes of an array's extent, sharing its memory, and the offset from its allocation."""
    low, high = np.lib.array_utils.byte_bounds(array)
    owner = array
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    if not array.flags.writeable or any(s < 0 for s in array.strides):
        raise ArgumentError("array", array.strides, "a writable array without negative strides")
    start = np.lib.array_utils.byte_bounds(owner)[0]
    if array.flags.c_contiguous:
        return array.reshape(-1).view(np.uint8), low - start
    return np.lib.stride_tricks.as_strided(array.view(np.uint8), (high - low,), (1,)), low - start


def _tensor_bytes(name: str, tensor: Any) -> tuple[Array, int]:
    import torch

    if tensor.device.type != "cpu":
        raise ArgumentTypeError(name, tensor.device, "a CPU tensor")
    whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy()
    start = tensor.storage_offset() * tensor.element_size()
    steps = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) if tensor.numel() else -1
    return whole[start : start + (steps + 1) * tensor.element_size()], start

"""A launch argument's TileMap as the tensor map that the simulated TMA unit reads."""

from __future__ import annotations

from typing import Any

import numpy as np

from jitfp4.sim.swizzle import Swizzle
from jitfp4.sim.tensormap import ElementType, TensorMap
from jitfp4.spec import TileMap

_SWIZZLES = {0: Swizzle.NONE, 32: Swizzle.B32, 64: Swizzle.B64, 128: Swizzle.B128}


def tensor_map(tile: TileMap) -> TensorMap:
    """The map of a torch CPU tensor or NumPy array, sharing its memory. PTX counts dimensions from the innermost."""
    array: np.ndarray[Any, Any] = np.asarray(tile.tensor)
    low, high = np.lib.array_utils.byte_bounds(array)
    base = np.lib.stride_tricks.as_strided(array.view(np.uint8), (high - low,), (1,))
    return TensorMap(
        base=base,
        dtype=ElementType(array.dtype.name),
        dims=array.shape[::-1],
        strides=array.strides[-2::-1],
        box=tile.box[::-1],
        swizzle=_SWIZZLES[tile.swizzle],
    )

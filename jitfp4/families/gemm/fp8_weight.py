"""The scale of each row of an FP4 weight, relative to which the kernels of mm_fp8_fp4 round it to E4M3."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from jitfp4.errors import ArgumentTypeError
from jitfp4.formats import E4M3_MAX, NVFP4
from jitfp4.public import checked
from jitfp4.tensors import check_device
from jitfp4.weight import MXFP4_UNIT, TILE_ROWS, Fp4Weight, check_still, decode_scales, unpack

_MOST_CODE = 6.0
_TILES = 64  # that are unpacked at a time


@checked
def fp8_row_scale(weight: Fp4Weight) -> torch.Tensor:
    """The scale of each row of a weight for mm_fp8_fp4(); to be computed once, when a model is loaded.

    Args:
        weight: from prepare_fp4_weight().
    Returns:
        float32 ``[round_up(n, 64)]`` on the weight's device. For NVFP4 the least power of two for which the largest
        block scale of the row, times 6 and divided by it, is at most 448; NaN for a row with a block scale of NaN. For
        MXFP4 four times the weight's own ``row_scale``.
    Raises:
        ArgumentError, ArgumentTypeError
    """
    if not isinstance(weight, Fp4Weight):
        raise ArgumentTypeError("weight", type(weight).__name__, "an Fp4Weight, from prepare_fp4_weight()")
    check_device("weight", weight.data)
    check_still("weight", partial(replace, weight))
    if weight.row_scale is not None:
        return weight.row_scale * MXFP4_UNIT
    largest = torch.empty(weight.data.shape[0] * TILE_ROWS, dtype=torch.float32, device=weight.data.device)
    for tile in range(0, weight.data.shape[0], _TILES):
        codes, scales = unpack(weight.data[tile : tile + _TILES], NVFP4)
        used = (codes.unflatten(-1, (-1, NVFP4.block)) & 7 != 0).any(-1)
        values = torch.where(used | (scales == 0xFF), decode_scales(scales), 0.0)
        largest[tile * TILE_ROWS : tile * TILE_ROWS + len(values)] = values.amax(-1)
    exact = torch.frexp(largest * (_MOST_CODE / E4M3_MAX))  # a mantissa of 0.5 is a power of two
    exponent = exact.exponent - (exact.mantissa == 0.5).int()
    scale = torch.ldexp(torch.ones_like(largest), torch.where(largest > 0, exponent, 0))
    return torch.where(largest.isnan(), torch.nan, scale)

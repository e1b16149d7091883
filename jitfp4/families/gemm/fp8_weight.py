"""An FP4 weight as the kernels of mm_fp8_fp4 multiply it: rounded to E4M3, relative to a scale for each row."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from jitfp4.errors import ArgumentTypeError
from jitfp4.formats import E4M3_MAX, NVFP4
from jitfp4.public import checked
from jitfp4.reference.formats import decode_e2m1
from jitfp4.tensors import check_device
from jitfp4.weight import TILE_ROWS, Fp4Weight, check_still, decode_scales, gates_first, unpack

_MOST_CODE = 6.0
_MXFP4_SHIFT = 4.0  # the largest scale of a prepared row is 2^8, and 6 * 2^6 is the most that E4M3 holds
_TILES = 64  # that are unpacked at a time
_NORMAL, _STEP = 2.0**-6, 2.0**-9  # of E4M3: its least normal value, the distance of those below
_MARK = 6 / 128  # of a scale's power of two: what cutting off needs in order to round


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
        return weight.row_scale * _MXFP4_SHIFT
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


def rounded(weight: Fp4Weight, row_scale: torch.Tensor) -> torch.Tensor:
    """float32 [n, k]: the values that the kernels multiply, with their row's scale; of gates and ups, gates first.

    Divided by it, each is rounded to the nearest E4M3, ties to even; one that is less than 2^-6 then, to a multiple of
    2^-9 that is less than 2^-9 away.
    """
    codes, bytes_ = unpack(weight.data, weight.format)
    shift = (
        row_scale.unsqueeze(-1) if weight.format is NVFP4 else torch.full_like(row_scale, _MXFP4_SHIFT).unsqueeze(-1)
    )
    scales = decode_scales(bytes_)
    scales = (scales + torch.exp2(torch.floor(torch.log2(scales))) * _MARK) / shift
    magnitudes = decode_e2m1(codes & 7) * scales.repeat_interleave(weight.format.block, -1)
    least = _STEP / 16  # the products are made in bf16, whose distances near zero are these
    magnitudes = torch.where(magnitudes < _NORMAL, torch.round(magnitudes / least) * least, magnitudes)
    power = torch.exp2(torch.floor(torch.log2(magnitudes.clamp_min(_NORMAL))))
    cut = torch.floor(magnitudes / (power / 8)) * (power / 8)
    values = torch.where(codes & 8 != 0, -cut, cut) * row_scale.unsqueeze(-1)
    values = values[: weight.n, : weight.k]
    return gates_first(values) if weight.gated else values

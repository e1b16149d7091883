"""Products with a weight that is known exactly, and how far a kernel may be from them."""

from __future__ import annotations

import torch
from torch.nn.functional import pad, silu

from jitfp4.formats import NVFP4, BlockFormat
from jitfp4.layouts import SfLayout
from jitfp4.reference.quantize import dequantize

_STEP = 16  # products that a tensor core adds at once


def matmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    alpha: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """float64 [m, n]: ``alpha * (x weight^T) + bias`` of x [m, k] and a weight [n, k]; None is 1 and 0."""
    product = x.double() @ weight.double().T
    if alpha is not None:
        product = product * alpha.double().reshape(())
    return product if bias is None else product + bias.double()


def swiglu(product: torch.Tensor) -> torch.Tensor:
    """float64 [m, n / 2]: ``silu(gate) * up`` of a product whose columns are n / 2 gates and then as many ups."""
    gate, up = product.double().chunk(2, -1)
    return silu(gate) * up


def error_bound(
    x: torch.Tensor,
    weight: torch.Tensor,
    alpha: torch.Tensor | None,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    *,
    fp8: bool = False,
) -> torch.Tensor:
    """How far each element of a kernel's result may be from matmul(): float64 [m, n].

    Products of 16-bit floats are exact. A tensor core adds 16 of them to a float32 sum, each term and the sum cut off
    at 2^-23 of the largest; sums of warps and CTAs are at most 128 more. So the sum is off by no more than
    ``(k / 16 + 17 + 128) * 2^-23`` of the sum of magnitudes. Scaling, adding bias and rounding to ``out_dtype`` add
    their own. Of ``fp8`` 32 products and the sum are cut off at 2^-13 of the largest; as sums grow no faster than by
    chance, four such losses of the sum of magnitudes are taken for all of them.
    """
    k = x.shape[1]
    magnitudes = matmul(x.abs(), weight.abs(), None if alpha is None else alpha.abs(), None)
    exact = matmul(x, weight, alpha, bias).abs()
    units = torch.finfo(out_dtype)
    lost = 4 * 33 * 2.0**-13 if fp8 else (k / _STEP + 17 + 128) * 2.0**-23
    absolute = magnitudes * lost + exact * 2.0**-21
    if bias is not None:
        absolute = absolute + bias.double().abs() * 2.0**-23
    return absolute + (exact + absolute) * units.eps / 2 + units.smallest_normal * units.eps


def decode(codes: torch.Tensor, scales: torch.Tensor, block_format: BlockFormat, layout: SfLayout) -> torch.Tensor:
    """float32 [rows, k] of an operand of mm_fp4: tensor cores ignore the sign of scales."""
    magnitude = scales & 0x7F if block_format is NVFP4 else scales
    return dequantize(codes, magnitude, block_format, None, layout)


def expand(codes: torch.Tensor, scales: torch.Tensor, block_format: BlockFormat, layout: SfLayout) -> torch.Tensor:
    """float32 [rows, round_up(k, 128)]: an operand as templates/gemm/expand.cu.j2 leaves it, NVFP4 times 2^-7.

    The bits of a column's number in its 128 columns, from the highest on, are t1, h, t0, q, e, and two of c; those of
    its place are h, q, c, t1, t0, e.
    """
    values = decode(codes, scales, block_format, layout)
    columns = pad(values, (0, -values.shape[1] % 128)).reshape(len(values), -1, 2, 2, 2, 2, 2, 4)
    places = columns.permute(0, 1, 3, 5, 7, 2, 4, 6).flatten(1)
    return places * 2.0**-7 if block_format is NVFP4 else places

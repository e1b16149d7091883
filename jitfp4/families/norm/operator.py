"""The torch operator behind both functions: kernel, reference, and checks of addresses."""

from __future__ import annotations

import torch

from jitfp4.engine import target_of
from jitfp4.errors import ArgumentError
from jitfp4.families.norm import kernel
from jitfp4.layouts import SfLayout
from jitfp4.ops import operator
from jitfp4.reference import norm as reference
from jitfp4.reference.formats import swizzle


def _reference(
    input: torch.Tensor,  # noqa: A002 - FlashInfer's name
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    global_scale: torch.Tensor | None,
    y_fp4: torch.Tensor,
    sf_128x4: torch.Tensor | None,
    sf_linear: torch.Tensor | None,
    y_out: torch.Tensor | None,
    eps: float,
    block_size: int,
    scale_format: str,
    _: bool | None,
) -> None:
    _check_overlap(input, residual, y_out)
    hidden = input
    if residual is not None:
        hidden = reference.add(input, residual)
        residual.copy_(hidden)
    y = reference.rmsnorm(hidden, weight, eps)
    codes, scales = reference.quantize(y, block_size, scale_format, global_scale)
    y_fp4.copy_(codes)
    if sf_128x4 is not None:
        sf_128x4.copy_(swizzle(scales, SfLayout.layout_128x4).flatten())
    if sf_linear is not None:
        sf_linear.copy_(scales)
    if y_out is not None:
        y_out.copy_(y)


@operator(
    "rmsnorm_fp4quant(Tensor input, Tensor(a!)? residual, Tensor weight, Tensor? global_scale, Tensor(b!) y_fp4,"
    " Tensor(c!)? block_scale, Tensor(d!)? block_scale_unswizzled, Tensor(e!)? y_out, float eps, int block_size,"
    " str scale_format, bool? enable_pdl)",
    reference=_reference,
    aligned=("input", "residual", "weight", "y_fp4", "y_out"),
)
def rmsnorm(
    input: torch.Tensor,  # noqa: A002
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    global_scale: torch.Tensor | None,
    y_fp4: torch.Tensor,
    sf_128x4: torch.Tensor | None,
    sf_linear: torch.Tensor | None,
    y_out: torch.Tensor | None,
    eps: float,
    block_size: int,
    scale_format: str,
    enable_pdl: bool | None,
) -> None:
    _check_overlap(input, residual, y_out)
    m, h = input.shape
    target = target_of(input)
    launch, row_threads = kernel.plan(
        input.dtype, block_size, scale_format, residual is not None, sf_128x4 is not None, m, h, target.arch
    )
    pointers = (input, residual, weight, global_scale, y_fp4, sf_128x4, sf_linear, y_out)
    launch.run((*pointers, m, h, row_threads, eps), target, pdl=enable_pdl)


def _check_overlap(input: torch.Tensor, residual: torch.Tensor | None, y_out: torch.Tensor | None) -> None:  # noqa: A002
    """residual and y_out overlap neither input nor each other. All three have one size."""
    taken = [("input", input.data_ptr())]
    for name, tensor in (("residual", residual), ("y_out", y_out)):
        if tensor is None:
            continue
        for other, address in taken:
            if abs(tensor.data_ptr() - address) < input.nbytes:
                raise ArgumentError(name, f"memory of {other}", "memory of its own")
        taken.append((name, tensor.data_ptr()))

"""Rearranging scales and weights once, at load time, by torch permutations, without kernels of this package."""

from __future__ import annotations

import torch

from jitfp4.addresses import extent, meet
from jitfp4.dtypes import SF_DTYPES
from jitfp4.errors import ArgumentError, ArgumentTypeError
from jitfp4.families.quantize.four_over_six import check_recipe
from jitfp4.formats import E2M1_MAX, E4M3_MAX, MXFP4, NVFP4, NVFP44Over6Config
from jitfp4.layouts import SfLayout, padded_numel
from jitfp4.public import public
from jitfp4.reference.formats import divide, swizzle
from jitfp4.reference.shuffle import shuffle_rows
from jitfp4.tensors import check_device, check_dtype, output, writing

_ELEMENTS_PER_SF = (16, 32)
_MAX_TILE = 1024
_BYTES = tuple(dict.fromkeys((*SF_DTYPES[NVFP4], *SF_DTYPES[MXFP4])))


@public
def block_scale_interleave(unswizzled_sf: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Rearrange linear block scales to the 128x4 layout.

    Args:
        unswizzled_sf: uint8, float8_e4m3fn, float8_e8m0fnu or bf16, [rows, cols] or [experts, rows, cols], on any
            device.
        out: contiguous, of the shape and dtype below, on unswizzled_sf's device, to fill in place; sharing no memory
            with unswizzled_sf. Allocated when None.
    Returns:
        1-D, same dtype and device: ``experts * round_up(rows, 128) * round_up(cols, 4)`` elements, each expert padded
        separately, padding zero.
    Raises:
        ArgumentError, ArgumentTypeError: before anything is written.
    """
    check_dtype("unswizzled_sf", unswizzled_sf, (*_BYTES, torch.bfloat16))
    check_device("unswizzled_sf", unswizzled_sf)
    if unswizzled_sf.dim() not in (2, 3):
        raise ArgumentError(
            "unswizzled_sf", f"shape {tuple(unswizzled_sf.shape)}", "[rows, cols] or [experts, rows, cols]"
        )
    moved = unswizzled_sf.view(torch.uint8) if unswizzled_sf.dtype in _BYTES else unswizzled_sf
    if out is not None:
        rows, cols = unswizzled_sf.shape[-2:]
        size = unswizzled_sf.shape[:-2].numel() * padded_numel(SfLayout.layout_128x4, rows, cols)
        output("out", out, (size,), (unswizzled_sf.dtype,), like=unswizzled_sf)
        if not torch.compiler.is_dynamo_compiling() and size and meet(extent(out), extent(unswizzled_sf)):
            raise ArgumentError("out", "memory of unswizzled_sf", "memory of its own")
    result = swizzle(moved, SfLayout.layout_128x4).flatten().view(unswizzled_sf.dtype)
    if out is None:
        return result
    with writing(out):
        return out.copy_(result)


nvfp4_block_scale_interleave = block_scale_interleave
"""FlashInfer's older name."""


@public
def make_nvfp4_global_scale(
    input_tensor: torch.Tensor,
    per_token_activation: bool,
    global_scale: float | None = None,
    nvfp4_4over6_config: NVFP44Over6Config | None = None,
) -> torch.Tensor:
    """The *encode* scale for nvfp4_quantize() with which a tensor fills the range of NVFP4.

    Args:
        input_tensor: any floating-point tensor, on any device but meta. Its values are used only if neither
            per_token_activation nor global_scale is given.
        per_token_activation: return ``1 / (448 * 6)``, for nvfp4_quantize(per_token_activation=True).
        global_scale: return this number.
        nvfp4_4over6_config: the recipe that nvfp4_quantize() gets as nvfp4_4over6: its e4m3_max takes the place of 448.
    Returns:
        float32 [1] on input_tensor's device: ``448 * 6 / amax(input_tensor)``, the largest float32 where amax is 0.
    Raises:
        ArgumentError, ArgumentTypeError
    """
    recipe = check_recipe("nvfp4_4over6_config", nvfp4_4over6_config)
    largest = (E4M3_MAX if recipe is None else recipe.e4m3_max) * E2M1_MAX
    if not (isinstance(input_tensor, torch.Tensor) and input_tensor.is_floating_point()):
        raise ArgumentTypeError("input_tensor", getattr(input_tensor, "dtype", type(input_tensor)), "floating point")
    if input_tensor.is_meta:
        raise ArgumentTypeError("input_tensor", "a tensor on meta", "a tensor with values")
    if not input_tensor.numel():
        raise ArgumentError("input_tensor", f"shape {tuple(input_tensor.shape)}", "at least one element")
    if per_token_activation or global_scale is not None:
        value = 1 / largest if per_token_activation else float(global_scale or 0)
        if not value > 0:
            raise ArgumentError("global_scale", value, "a finite number above 0")
        return torch.full((1,), value, dtype=torch.float32, device=input_tensor.device)
    amax = input_tensor.detach().float().abs().amax().reshape(1)
    return divide(largest, amax).clamp(max=torch.finfo(torch.float32).max)


@public
def shuffle_matrix_a(input_tensor: torch.Tensor, epilogue_tile_m: int) -> torch.Tensor:
    """Permute the rows of a weight to the order that TensorRT-LLM's epilogue with this tile expects.

    Args:
        input_tensor: [m, n] of any dtype; m a multiple of 32 (16 when the tile is no multiple of 128).
        epilogue_tile_m: rows of the epilogue tile, a multiple of 8 up to 1024.
    Returns:
        [m, n], a new tensor: source row i of a block goes to ``i // 4 + 8 * (i % 4)`` (``i // 2 + 8 * (i % 2)``).
    Raises:
        ArgumentError: another rank, or m is not a multiple of the block of rows.
    """
    _check_matrix("input_tensor", input_tensor)
    _check_tile(epilogue_tile_m)
    return shuffle_rows(input_tensor, epilogue_tile_m)


@public
def shuffle_matrix_sf_a(input_tensor: torch.Tensor, epilogue_tile_m: int, num_elts_per_sf: int = 16) -> torch.Tensor:
    """Shuffle linear block scales like the rows of their weight, and rearrange them to the 128x4 layout.

    Args:
        input_tensor: uint8, float8_e4m3fn or float8_e8m0fnu [m, n/num_elts_per_sf], linear; m a multiple of 128.
        epilogue_tile_m: rows of the epilogue tile, a multiple of 8 up to 1024.
        num_elts_per_sf: 16 or 32 elements of the weight share a scale. It is checked, but does not change the result.
    Returns:
        1-D of the same dtype, as block_scale_interleave() returns it: ``m * round_up(columns, 4)`` elements.
    Raises:
        ArgumentError, ArgumentTypeError: another dtype, rank, number of rows or block size.
    """
    check_dtype("input_tensor", input_tensor, _BYTES)
    _check_matrix("input_tensor", input_tensor)
    _check_tile(epilogue_tile_m)
    if num_elts_per_sf not in _ELEMENTS_PER_SF:
        raise ArgumentError("num_elts_per_sf", num_elts_per_sf, "16 or 32")
    if input_tensor.shape[0] % 128:
        raise ArgumentError("input_tensor", f"{input_tensor.shape[0]} rows", "a multiple of 128 rows")
    rows = shuffle_rows(input_tensor.view(torch.uint8), epilogue_tile_m)
    return swizzle(rows, SfLayout.layout_128x4).flatten().view(input_tensor.dtype)


def _check_matrix(name: str, tensor: torch.Tensor) -> None:
    if tensor.dim() != 2:
        raise ArgumentError(name, f"shape {tuple(tensor.shape)}", "[m, n]")


def _check_tile(rows: int) -> None:
    if rows <= 0 or rows % 8 or rows > _MAX_TILE:
        raise ArgumentError("epilogue_tile_m", str(rows)[:40], f"a multiple of 8 from 8 to {_MAX_TILE}")

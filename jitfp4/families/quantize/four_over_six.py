"""NVFP4 with the better of two scales for each block ("4 over 6"), by torch operations: no kernel of this package."""

from __future__ import annotations

import torch

from jitfp4.errors import ArgumentError, ArgumentTypeError
from jitfp4.formats import NVFP44Over6Config
from jitfp4.reference.quantize import quantize_4over6

_NAME = NVFP44Over6Config.__name__


def check_recipe(name: str, recipe: object, dtype: torch.dtype | None = None) -> NVFP44Over6Config | None:
    """``recipe``, or this package's NVFP44Over6Config for FlashInfer's. ``dtype``: of the tensor to quantize."""
    if recipe is None or type(recipe).__name__ == "_UnsetType":  # what FlashInfer's functions pass on by default
        return None
    if type(recipe).__name__ != _NAME:
        raise ArgumentTypeError(name, type(recipe).__name__, f"an {_NAME} or None")
    if dtype == torch.float8_e4m3fn:
        raise ArgumentError(name, "a recipe", "None with float8_e4m3fn input")
    if isinstance(recipe, NVFP44Over6Config):
        return recipe
    fields = (getattr(recipe, field) for field in ("e4m3_max", "err_mode", "err_use_fast_math"))
    return NVFP44Over6Config(*fields)


def quantize(
    x: torch.Tensor, scale: torch.Tensor, recipe: NVFP44Over6Config, row_amax: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [..., m, k/2] and linear scales [..., m, k/16] of x [..., m, k]; ``scale``: [], [1] or [..., m]."""
    by_block = scale.reshape(()) if scale.numel() == 1 else scale.unsqueeze(-1)
    return quantize_4over6(x, recipe, by_block, None if row_amax is None else row_amax.unsqueeze(-1))

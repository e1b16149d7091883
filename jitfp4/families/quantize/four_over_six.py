"""The recipe by which a block takes the better of two scales ("4 over 6"), as an argument and as operators take it."""

from __future__ import annotations

import torch

from jitfp4.errors import ArgumentError, ArgumentTypeError
from jitfp4.formats import NVFP44Over6Config, NVFP44Over6ErrMode

_NAME = NVFP44Over6Config.__name__
_SEARCH, _SQUARES, _FAST_MATH, _SMALL_SCALES = 1, 2, 4, 8  # as in partials/four_over_six


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


def code_of(recipe: NVFP44Over6Config | None) -> int:
    """A recipe as one integer, which operators and kernels take; 0 for none."""
    if recipe is None:
        return 0
    squares = _SQUARES if recipe.err_mode == NVFP44Over6ErrMode.MSE else 0
    fast, small = _FAST_MATH * recipe.err_use_fast_math, _SMALL_SCALES * (recipe.e4m3_max == 256)
    return _SEARCH | squares | fast | small


def recipe_of(code: int) -> NVFP44Over6Config | None:
    """The inverse of code_of()."""
    if not code:
        return None
    mode = NVFP44Over6ErrMode.MSE if code & _SQUARES else NVFP44Over6ErrMode.MAE
    return NVFP44Over6Config(256 if code & _SMALL_SCALES else 448, mode, bool(code & _FAST_MATH))

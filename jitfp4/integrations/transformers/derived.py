"""Modules of transformers whose forward calls jitfp4's kernels where they fit, and the parent's where they do not.

transformers has no registry for what stands between the products of a model. So a module gets a class derived from the
one that it has.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from jitfp4.integrations.layers import Fp4Linear
from jitfp4.integrations.swiglu import SwiGlu


@functools.cache
def derived(kind: Any, base: Any) -> Any:
    """The class ``base`` with the methods of ``kind`` before its own."""
    return type(base.__name__, (kind, base), {"__module__": base.__module__})


def become(module: Any, kind: Any) -> None:
    """Give a module the methods of ``kind``."""
    own: Any = type(module)
    module.__class__ = derived(kind, own)


def plus(module: nn.Module, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    """``module(x)``, or its first result, and the residual."""
    if isinstance(module, (Fp4Linear, SwiGlu)):
        return module(x, residual)  # type: ignore[no-any-return]
    out = module(x)
    out = out[0] if isinstance(out, tuple) else out
    return out if residual is None else residual + out  # type: ignore[no-any-return]

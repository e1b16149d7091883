"""Launches as they were made: what a mutant of a kernel is run on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch

from jitfp4 import sim
from jitfp4.spec import Geometry, TileMap

CONSTANT = {
    "gemm_narrow": (1,),
    "gemm_wide": (1,),
    "gemm_wide_fp4": (1, 2),
    "norm_rmsnorm_fp4quant": (2,),
    "norm_rows_fp4quant": (2,),
    "norm_rows_fp8quant": (2,),
    "step_decode": (1,),
    "conv_causal": (1, 2),
    "kv_rope_append": (3, 4),
    "norm_linear": (1, 2),
    "norm_rmsnorm": (2,),
    "gemm_wide_fp8": (2,),
    "experts_few_down": (1, 2, 3, 4, 5, 6),
    "experts_narrow_down": (1, 2, 3, 4, 5, 6, 7, 8, 12),
    "experts_narrow_up": (1, 2, 3),
    "experts_router": (1, 2, 10),
    "experts_stream_down": (1, 2, 3, 4, 5, 6),
    "experts_stream_up": (1, 2, 3),
    "experts_wide_down": (1, 2, 3, 4, 5),
    "experts_wide_up": (1, 2, 3, 4, 5),
}
"""Parameters by entry that no grid writes that may still run: weights, and of the products of experts, what the kernel
before the one before has left. They may be read ahead of a wait."""


@dataclass(frozen=True)
class Recorded:
    """One launch: its kernel, and its arguments as they were before it."""

    kernel: str
    arch: str
    ptx: str
    entry: str | None
    args: tuple[Any, ...]
    geometry: Geometry

    @property
    def constant(self) -> tuple[int, ...]:
        """Which arguments no earlier launch writes."""
        return CONSTANT.get(self.entry or "", ())

    def fresh(self) -> list[Any]:
        """Arguments to run with: copies, equal where the same memory was passed twice."""
        copies: dict[int, Any] = {}

        def copy(arg: Any) -> Any:
            if isinstance(arg, TileMap):
                return TileMap(copy(arg.tensor), arg.box, swizzle=arg.swizzle)
            if not isinstance(arg, torch.Tensor):
                return arg
            key = arg.untyped_storage().data_ptr()
            if key not in copies:
                whole = torch.empty(0, dtype=torch.uint8).set_(arg.untyped_storage())
                copies[key] = whole.clone().untyped_storage()
            return torch.empty(0, dtype=arg.dtype).set_(copies[key], arg.storage_offset(), arg.shape, arg.stride())

        return [copy(arg) for arg in self.args]


def contents(args: list[Any]) -> list[bytes]:
    """What is in memory after a run."""
    tensors = [arg.tensor if isinstance(arg, TileMap) else arg for arg in args]
    storages = [t.untyped_storage() for t in tensors if isinstance(t, torch.Tensor)]
    return [torch.empty(0, dtype=torch.uint8).set_(s).numpy().tobytes() for s in storages]


@contextmanager
def recording(name: str, arch: str, into: list[Recorded]) -> Iterator[None]:
    """Simulated calls in the block are kept, one for each module that is new."""
    run = sim.run

    def keep(ptx: str, args: Any, geometry: Geometry, target: Any, **options: Any) -> sim.Stats:
        if not any(one.ptx == ptx for one in into):
            one = Recorded(name, getattr(target, "name", target), ptx, options.get("entry"), tuple(args), geometry)
            into.append(replace(one, args=tuple(one.fresh())))
        return run(ptx, args, geometry, target, **options)

    with mock.patch.object(sim, "run", keep), sim.device(arch):
        yield

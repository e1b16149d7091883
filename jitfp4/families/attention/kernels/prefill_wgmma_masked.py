"""sm_90a's prefill kernel under a mask of the caller's: attention/prefill_wgmma with the mask's bits."""

from __future__ import annotations

import functools
from dataclasses import astuple, dataclass
from typing import Any

from jitfp4.families.attention.arguments import Arguments
from jitfp4.families.attention.kernels import prefill_wgmma
from jitfp4.families.attention.kernels.prefill_wgmma import WgmmaSpec, WgmmaTactic
from jitfp4.families.attention.parameters import MASK, bind_mask
from jitfp4.kernel import Kernel, Plan


@dataclass(frozen=True, slots=True)
class MaskedWgmmaTactic(WgmmaTactic):
    """As WgmmaTactic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedWgmmaSpec(WgmmaSpec):
    """A WgmmaSpec with a mask, whose bits are read for the tiles that not every row of a warp sees in full."""

    masked = True
    item_bytes = 80  # 16 of the mask
    work_registers = 48
    other_registers = 60


def _bind(arguments: Arguments, plan: Plan) -> dict[str, Any]:
    return prefill_wgmma.bind_all(arguments, plan) | bind_mask(arguments)


KERNEL = Kernel(
    name="attention/prefill_wgmma_masked",
    spec=MaskedWgmmaSpec,
    params=(*prefill_wgmma.PARAMS, *MASK),
    tactics=tuple(MaskedWgmmaTactic(*astuple(tactic)) for tactic in prefill_wgmma.TACTICS),
    rejects=functools.partial(prefill_wgmma.rejects, kind=MaskedWgmmaSpec),
    specialise=functools.partial(prefill_wgmma.specialise, kind=MaskedWgmmaSpec),
    geometry=functools.partial(prefill_wgmma.geometry, kind=MaskedWgmmaSpec),
    bind=_bind,
)

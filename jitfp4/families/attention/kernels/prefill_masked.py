"""The mma.sync kernel for many query rows under a mask of the caller's: attention/prefill with the mask's bits."""

from __future__ import annotations

import functools
from dataclasses import astuple, dataclass
from typing import Any

from jitfp4.families.attention.arguments import Arguments
from jitfp4.families.attention.kernels import prefill
from jitfp4.families.attention.kernels.prefill import PrefillSpec, PrefillTactic
from jitfp4.families.attention.parameters import MASK, bind_mask
from jitfp4.kernel import Kernel, Plan


@dataclass(frozen=True, slots=True)
class MaskedPrefillTactic(PrefillTactic):
    """As PrefillTactic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedPrefillSpec(PrefillSpec):
    """A PrefillSpec with a mask, whose bits are read for the tiles that not every row of a warp sees in full."""

    masked = True


def _bind(arguments: Arguments, plan: Plan) -> dict[str, Any]:
    return prefill.bind_all(arguments, plan) | bind_mask(arguments)


KERNEL = Kernel(
    name="attention/prefill_masked",
    spec=MaskedPrefillSpec,
    params=(*prefill.PARAMS, *MASK),
    tactics=tuple(MaskedPrefillTactic(*astuple(tactic)) for tactic in prefill.TACTICS),
    rejects=functools.partial(prefill.rejects, kind=MaskedPrefillSpec),
    specialise=functools.partial(prefill.specialise, kind=MaskedPrefillSpec),
    geometry=prefill.geometry,
    bind=_bind,
)

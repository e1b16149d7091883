"""The kernel for few query rows under a mask of the caller's: attention/decode with the mask's bits."""

from __future__ import annotations

import functools
from dataclasses import astuple, dataclass
from typing import Any

from jitfp4.families.attention.arguments import Arguments
from jitfp4.families.attention.kernels import decode
from jitfp4.families.attention.kernels.decode import DecodeSpec, DecodeTactic
from jitfp4.families.attention.parameters import MASK, bind_mask
from jitfp4.kernel import Kernel, Plan


@dataclass(frozen=True, slots=True)
class MaskedDecodeTactic(DecodeTactic):
    """As DecodeTactic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedDecodeSpec(DecodeSpec):
    """A DecodeSpec with a mask, whose bits are read for the tiles that not every row sees in full."""

    masked = True


def _bind(arguments: Arguments, plan: Plan) -> dict[str, Any]:
    return decode.bind_all(arguments, plan) | bind_mask(arguments)


KERNEL = Kernel(
    name="attention/decode_masked",
    spec=MaskedDecodeSpec,
    params=(*decode.PARAMS, *MASK),
    tactics=tuple(MaskedDecodeTactic(*astuple(tactic)) for tactic in decode.TACTICS),
    rejects=functools.partial(decode.rejects, kind=MaskedDecodeSpec),
    specialise=functools.partial(decode.specialise, kind=MaskedDecodeSpec),
    geometry=decode.geometry,
    bind=_bind,
)

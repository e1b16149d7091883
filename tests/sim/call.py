"""A call of a public function, small enough to simulate; of a large grid a part is."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch

from jitfp4.operation import Operation

HALVES = (torch.bfloat16, torch.float16)
E4M3 = torch.float8_e4m3fn
Arguments = dict[str, Any]


class Call(NamedTuple):
    """A public function, its arguments as CPU tensors, and the tactic that it is made with, if not the table's.

    ``bounds``: how far GPU and simulator may lie apart, as the norm of the difference over that of the result, by
    dtype; None: not at all, in no byte of what is returned or given.
    """

    function: str
    arguments: Arguments
    forced: tuple[Operation[Any, Any], Any] | None = None
    bounds: Mapping[torch.dtype, float] | None = None


Case = partial[Call]
"""Makes its call when it is asked to."""

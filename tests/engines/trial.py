"""What stands for the parts of an engine's call that its source leaves open."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

Arguments = dict[str, Any]


class Trial(NamedTuple):
    """Values by parameter for what a source leaves open, and a check of the result and the arguments.

    ``values["**"]`` are what ``**kwargs`` holds. ``function`` is called instead of the public one: a bound method.
    """

    name: str
    values: Arguments
    check: Callable[[Any, Arguments], None]
    function: Callable[..., Any] | None = None

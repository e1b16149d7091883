"""Putting jitfp4 in FlashInfer's place, and taking it out again, in any order.

What was asked for is a list of layers. Whenever it changes, FlashInfer is brought back first, and then the layers are
followed from the first to the last: so a layer that ends leaves the others as they were.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import warnings
from collections.abc import Iterable
from types import ModuleType, TracebackType
from typing import Any, Self

from jitfp4.errors import ArgumentError
from jitfp4.flashinfer import moe, trtllm_moe
from jitfp4.flashinfer.modules import ALL, FUNCTIONS, KERNELS, MODULES, Module, modules, of_jitfp4

_BESIDE = {
    "cutlass_fused_moe": moe.beside,
    "trtllm_fp4_block_scale_routed_moe": trtllm_moe.beside,
}
"""What of FlashInfer's function and jitfp4's serves a call, where both have their part."""
_ENVIRONMENT = "FLASHINFER_NVFP4_4OVER6"  # FlashInfer's quantizers read it where they are not told


class _Layer:
    """Something that was put in place, until it is removed; also as a ``with`` statement."""

    def remove(self) -> None:
        """Undo it; a second time does nothing. Modules that kept a function keep it."""
        if self in _layers:
            _layers.remove(self)
            _settle()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _at: TracebackType | None
    ) -> None:
        self.remove()


class Installed(_Layer):
    """jitfp4's modules under FlashInfer's names."""

    def is_in_place(self) -> bool:
        """Whether ``import flashinfer`` gives them."""
        return self in _layers and _stands_in()


class Overlaid(_Layer):
    """jitfp4's functions in FlashInfer's modules."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(names)

    def replaced(self) -> list[str]:
        """The full names that are jitfp4's; empty while install() is in place, and after the end."""
        if self not in _layers or _stands_in():
            return []
        return [f"{module.__name__}.{name}" for (module, name) in _patched if name in self._names]

    def left(self) -> dict[str, str]:
        """FlashInfer's modules that cannot be imported, and why: they are as they were."""
        return dict(_left) if self in _layers else {}

    def is_in_place(self) -> bool:
        """Whether anything is replaced."""
        return bool(self.replaced())


_layers: list[_Layer] = []
_patched: dict[tuple[ModuleType, str], Any] = {}  # what FlashInfer's modules had
_left: dict[str, str] = {}
_aside: dict[str, ModuleType] | None = None  # FlashInfer's modules while jitfp4's stand in for them


def install() -> Installed:
    """Make ``import flashinfer`` give this package, in this process, until uninstall() or the end of a ``with``.

    A FlashInfer that was imported before is put aside, and comes back. Modules that hold its functions already go on
    using them: call this before the engine is imported. Of several installations and overlays the latest is in place;
    what was in place before comes back when it ends.
    """
    layer = Installed()
    _add(layer)
    return layer


def overlay(*names: str) -> Overlaid:
    """Put jitfp4's functions into FlashInfer's modules, in this process, until uninstall() or the end of a ``with``.

    They are put where FlashInfer defines them, and where it gives them to others. What jitfp4 lacks stays FlashInfer's:
    other functions, and the layers of ``cutlass_fused_moe`` that have no FP4 weights, or FP4 activations; so do those
    of ``trtllm_fp4_block_scale_routed_moe`` on GPUs for which FlashInfer has kernels, and SfLayout, which jitfp4 takes
    as its own. Modules that hold a function already go on using it: call this before the engine is imported. An overlay
    inside another adds to it; the end of the inner one leaves the outer one.

    Args:
        names: of functions and classes; without any, all that both have.
    Returns:
        What was replaced, and what was left.
    Raises:
        ImportError: there is no FlashInfer, or it cannot be imported.
        ArgumentError: jitfp4 has no function of a name.
    """
    for name in names:
        if name not in FUNCTIONS:
            raise ArgumentError("names", repr(name), ", ".join(FUNCTIONS))
    layer = Overlaid(names or FUNCTIONS)
    _add(layer)
    return layer


def uninstall() -> None:
    """Bring back what ``flashinfer`` was before install() and overlay(), however often they were called."""
    _layers.clear()
    _settle()


def _add(layer: _Layer) -> None:
    if os.environ.get(_ENVIRONMENT) == "1":
        message = f"{_ENVIRONMENT} is set; jitfp4's quantizers do not read it: pass nvfp4_4over6=NVFP44Over6Config(...)"
        warnings.warn(message, RuntimeWarning, stacklevel=3)
    _layers.append(layer)
    try:
        _settle()
    except BaseException:
        _layers.remove(layer)
        _settle()
        raise


def _settle() -> None:
    """Bring FlashInfer back, and follow the layers."""
    for (module, name), value in _patched.items():
        setattr(module, name, value)
    _patched.clear()
    _left.clear()
    _bring_back()
    for name in dict.fromkeys(name for layer in _layers if isinstance(layer, Overlaid) for name in _ordered(layer)):
        _patch(name)
    if _layers and isinstance(_layers[-1], Installed):
        _stand_in()


def _ordered(layer: Overlaid) -> list[str]:
    return [name for name in FUNCTIONS if name in layer._names]


def _patch(name: str) -> None:
    """jitfp4's ``name`` in every module of FlashInfer that should have it."""
    for module in ("", *MODULES, *KERNELS):
        listed = ALL if not module else (*MODULES.get(module, ()), *KERNELS.get(module, ()))
        found = _imported(module) if name in listed else None
        if found is not None and vars(found).get(name) is not None:
            theirs = _patched[found, name] = getattr(found, name)
            setattr(found, name, _BESIDE[name](theirs) if name in _BESIDE else of_jitfp4(module, name))


def _imported(name: str) -> ModuleType | None:
    """A module of FlashInfer; None if it cannot be imported: of another version, or without what it needs."""
    path = f"flashinfer.{name}" if name else "flashinfer"
    if path in _left:
        return None
    try:
        return importlib.import_module(path)
    except Exception as error:
        if not name:
            if isinstance(error, ImportError):
                raise
            raise ImportError(f"flashinfer cannot be imported: {error}", name="flashinfer") from error
        _left[path] = f"{type(error).__name__}: {error}"
        return None


def _stands_in() -> bool:
    return isinstance(sys.modules.get("flashinfer"), Module)


def _of_flashinfer() -> list[str]:
    return [name for name in sys.modules if name.partition(".")[0] == "flashinfer"]


def _stand_in() -> None:
    global _aside
    _aside = {name: sys.modules.pop(name) for name in _of_flashinfer()}
    sys.modules.update(_stand_ins())


@functools.cache
def _stand_ins() -> dict[str, ModuleType]:
    """The package and its modules, the same ones every time: an engine may hold them."""
    package = Module("flashinfer", ALL, tuple(MODULES))
    submodules = modules("flashinfer")
    for name, module in submodules.items():
        if name.count(".") == 1:
            setattr(package, name.rpartition(".")[2], module)
    return {"flashinfer": package, **submodules}


def _bring_back() -> None:
    global _aside
    if _aside is None:
        return
    if _stands_in():
        for name in _of_flashinfer():
            del sys.modules[name]
        sys.modules.update(_aside)
    _aside = None

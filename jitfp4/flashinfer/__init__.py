"""This package under FlashInfer's module names, so that an engine's call sites run as they are.

``import jitfp4.flashinfer as flashinfer`` gives FlashInfer's names of functions that jitfp4 has, in FlashInfer's
modules: ``flashinfer.norm.rmsnorm_fp4quant`` and so on. An engine that imports ``flashinfer`` by itself gets them after

    jitfp4.flashinfer.install()
    ...
    jitfp4.flashinfer.uninstall()

or inside ``with jitfp4.flashinfer.install(): ...``. Nothing is substituted before that call. A name that
jitfp4 lacks is an AttributeError that says so, which ``hasattr`` and ``from flashinfer.norm import ...`` understand.

An engine that needs the rest of FlashInfer too keeps it: ``jitfp4.flashinfer.overlay()`` puts jitfp4's functions into
the modules of the FlashInfer that is installed, and uninstall() takes them out.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Collection
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import jitfp4
from jitfp4.errors import ArgumentError

__all__ = ["Installed", "Overlaid", "install", "overlay", "uninstall"]

_TYPES = ("NVFP44Over6Config", "NVFP44Over6ErrMode", "SfLayout")  # jitfp4's functions take FlashInfer's, too
_FP4 = (
    "SfLayout",
    "block_scale_interleave",
    "e2m1_and_ufp8sf_scale_to_float",
    "fp4_quantize",
    "mxfp4_dequantize",
    "mxfp4_dequantize_host",
    "mxfp4_quantize",
    "nvfp4_batched_quantize",
    "nvfp4_block_scale_interleave",
    "nvfp4_dequantize",
    "nvfp4_kv_dequantize",
    "nvfp4_kv_dequantize_paged",
    "nvfp4_kv_quantize",
    "nvfp4_quantize",
    "nvfp4_quantize_paged_kv_cache",
    "scaled_fp4_grouped_quantize",
    "shuffle_matrix_a",
    "shuffle_matrix_sf_a",
    "silu_and_mul_nvfp4_quantize",
    "silu_and_mul_scaled_nvfp4_experts_quantize",
)
_NORM = ("add_rmsnorm_fp4quant", "rmsnorm_fp4quant")

MODULES: dict[str, tuple[str, ...]] = {
    "activation": ("silu_and_mul", "silu_and_mul_scaled_nvfp4_experts_quantize"),
    "cute_dsl": _NORM,
    "decode": (
        "BatchDecodeWithPagedKVCacheWrapper",
        "single_decode_with_kv_cache",
        "trtllm_batch_decode_with_kv_cache",
        "xqa_batch_decode_with_kv_cache",
    ),
    "fp4_quantization": _FP4,
    "gdn_decode": (
        "gated_delta_rule_decode",
        "gated_delta_rule_decode_pretranspose",
        "gated_delta_rule_mtp",
    ),
    "gemm": ("mm_fp4",),  # FlashInfer's mm_bf16_fp4 takes other arguments
    "norm": _NORM,
    "page": (
        "nvfp4_kv_dequantize_paged",
        "nvfp4_quantize_append_paged_kv_cache",
        "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping",
    ),
    "prefill": (
        "BatchPrefillWithPagedKVCacheWrapper",
        "single_prefill_with_kv_cache",
        "trtllm_batch_context_with_kv_cache",
    ),
    "quantization": (*_FP4, *_TYPES, "make_nvfp4_global_scale"),
    "utils": (),
}
"""FlashInfer's modules, and of their functions those that jitfp4 has under these names."""

_ALL = tuple(dict.fromkeys(name for names in MODULES.values() for name in names))


class _Module(ModuleType):
    """A module of names that are looked up in jitfp4 when they are used."""

    def __init__(self, name: str, names: tuple[str, ...], modules: tuple[str, ...] = ()) -> None:
        super().__init__(name, f"FlashInfer's {name.partition('.')[2] or 'package'}, as far as jitfp4 has it.")
        self.__spec__ = ModuleSpec(name, None, is_package=bool(modules))
        self.__path__: list[str] = []
        self.__all__ = [public for public in names if public in jitfp4.__all__]

    def __getattr__(self, name: str) -> Any:
        return _look_up(self.__name__, self.__all__, name)

    def __dir__(self) -> list[str]:
        return sorted(self.__all__)


def _look_up(module: str, names: list[str], name: str) -> Any:
    if name in names:
        return getattr(jitfp4, name)
    if name.startswith("__"):
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    has = ", ".join(names) or "nothing yet"
    raise AttributeError(f"{module}.{name} is not in jitfp4, which stands in for this module; it has {has}")


def _modules(root: str) -> dict[str, ModuleType]:
    """FlashInfer's modules below ``root``, by their full names."""
    return {f"{root}.{name}": _Module(f"{root}.{name}", names) for name, names in MODULES.items()}


class Installed:
    """What install() put into sys.modules. Removing it brings back what was there before."""

    def __init__(self) -> None:
        taken = [name for name in sys.modules if name.partition(".")[0] == "flashinfer"]
        self._before = {name: sys.modules.pop(name) for name in taken}
        modules = _modules("flashinfer")
        package = _Module("flashinfer", _ALL, tuple(MODULES))
        for name, module in modules.items():
            setattr(package, name.rpartition(".")[2], module)
        self._installed = {"flashinfer": package, **modules}
        sys.modules.update(self._installed)

    def remove(self) -> None:
        """Undo it; a second time does nothing. Modules that kept a function keep it."""
        if self.is_in_place():
            for name in [name for name in sys.modules if name.partition(".")[0] == "flashinfer"]:
                del sys.modules[name]
            sys.modules.update(self._before)

    def is_in_place(self) -> bool:
        """Whether ``import flashinfer`` gives it."""
        return sys.modules.get("flashinfer") is self._installed["flashinfer"]

    def __enter__(self) -> Installed:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


class Overlaid:
    """What overlay() put into FlashInfer's modules. Removing it brings back what was there before."""

    def __init__(self, names: Collection[str]) -> None:
        self._before: list[tuple[ModuleType, str, Any]] = []
        for path in ("flashinfer", *(f"flashinfer.{name}" for name in MODULES)):
            try:
                module = importlib.import_module(path)
            except ImportError:
                if path == "flashinfer":
                    raise
                continue  # of another version, or without a package that it needs
            self._before += [(module, name, getattr(module, name)) for name in names if hasattr(module, name)]
        for module, name, _ in self._before:
            setattr(module, name, getattr(jitfp4, name))

    def replaced(self) -> list[str]:
        """The full names that are jitfp4's."""
        return [f"{module.__name__}.{name}" for module, name, _ in self._before]

    def remove(self) -> None:
        """Undo it; a second time does nothing. Modules that kept a function keep it."""
        for module, name, value in self._before:
            setattr(module, name, value)
        self._before = []

    def is_in_place(self) -> bool:
        """Whether anything is replaced."""
        return bool(self._before)

    def __enter__(self) -> Overlaid:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def install() -> Installed:
    """Make ``import flashinfer`` give this package, in this process, until uninstall().

    A FlashInfer that was imported before is put aside, and comes back. Modules that hold its functions already go on
    using them: call this before the engine is imported.
    """
    global _latest
    if not (isinstance(_latest, Installed) and _latest.is_in_place()):
        uninstall()
        _latest = Installed()
    return _latest


def overlay(*names: str) -> Overlaid:
    """Put jitfp4's functions into the modules of the installed FlashInfer, in this process, until uninstall().

    What jitfp4 lacks stays FlashInfer's, and so does SfLayout, which jitfp4 takes as its own. Modules that hold a
    function already go on using it: call this before the engine is imported.

    Args:
        names: of functions and classes; without any, all that both have.
    Returns:
        What was replaced.
    Raises:
        ImportError: there is no FlashInfer.
        ArgumentError: jitfp4 has no function of a name.
    """
    global _latest
    known = [name for name in _ALL if name not in _TYPES]
    for name in names:
        if name not in known:
            raise ArgumentError("names", repr(name), ", ".join(known))
    uninstall()
    _latest = Overlaid(names or known)
    return _latest


def uninstall() -> None:
    """Bring back what ``flashinfer`` was before install() or overlay(); without those, nothing."""
    if _latest is not None:
        _latest.remove()


_latest: Installed | Overlaid | None = None


def __getattr__(name: str) -> Any:
    return _look_up(__name__, [public for public in _ALL if public in jitfp4.__all__], name)


for _name, _module in _modules(__name__).items():
    sys.modules[_name] = _module
    globals()[_name.rpartition(".")[2]] = _module

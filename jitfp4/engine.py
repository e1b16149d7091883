"""From a spec to a running kernel: source, recipe, cache, cubin, loaded kernel, launch.

A launch is one dictionary look-up and one driver call. Only a spec that is new to the process goes further::

    Launch.run -> LoadedKernel.launch
                  the first time: _kernels[family, spec, device], else
                      build -> render -> recipe -> cache -> hit: verified cubin
                                                         -> miss: NVRTC, publish
                      load  -> LoadedKernel
"""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from jitfp4 import nvrtc, sim
from jitfp4.arch import Arch
from jitfp4.cache import Built, Cache, CacheInfo, Loaded
from jitfp4.config import read_config
from jitfp4.errors import ArgumentTypeError, OfflineError
from jitfp4.keys import Recipe
from jitfp4.registry import Family
from jitfp4.spec import Geometry, KernelSpec
from jitfp4.tensors import device_arch, on_device

if TYPE_CHECKING:
    from jitfp4.driver import LoadedKernel

_log = logging.getLogger("jitfp4.engine")


class Target(NamedTuple):
    """Where a call runs: an architecture, and a CUDA device index or None for the simulator.

    ``races``: the simulator looks for shared-memory races.
    """

    arch: Arch
    device: int | None
    races: bool = False


def target_of(tensor: Any) -> Target:
    """The target of calls on ``tensor``: its own device, or the simulated one for a CPU tensor under ``sim.device``."""
    if tensor.is_cuda:
        return _cuda_target(tensor.device.index)
    simulated = sim.active_device()
    if simulated is None:
        raise ArgumentTypeError(
            "tensor", f"a tensor on {tensor.device}", "a CUDA tensor, or a CPU tensor under sim.device()"
        )
    return Target(simulated.arch, None, simulated.races)


@functools.cache
def _cuda_target(index: int) -> Target:
    return Target(device_arch(index), index)


# ---- launch ----------------------------------------------------------------------------------------------------------

_kernels: dict[tuple[Family, KernelSpec, int], LoadedKernel] = {}


class Launch:
    """One specialisation at one geometry, ready to run. Families keep one for each problem that they have met."""

    __slots__ = ("_on_device", "family", "geometry", "spec")

    def __init__(self, family: Family, spec: KernelSpec, geometry: Geometry) -> None:
        self.family, self.spec, self.geometry = family, spec, geometry
        self._on_device: dict[int, LoadedKernel] = {}

    def run(self, args: Sequence[Any], target: Target, *, pdl: bool | None = None) -> None:
        """Run the kernel on ``target``, building or loading it first when this process has not met it.

        Args:
            args: in the order of ``family.params``: tensors for pointers, ints, floats, TileMaps for tensor maps.
            pdl: programmatic dependent launch; None means wherever the architecture has it.
        """
        arch, device, races = target
        if device is None:
            ptx = _ptx(self.family, self.spec, arch)
            sim.run(ptx, args, self.geometry, arch, entry=self.family.symbol, races=races)
            return
        with on_device(device) as stream:
            kernel = self._on_device.get(device)
            if kernel is None:
                kernel = self._on_device[device] = _load(self.family, self.spec, arch, device)
            kernel.launch(self.geometry, args, stream=stream, pdl=arch.has_pdl and pdl is not False)


def _load(family: Family, spec: KernelSpec, arch: Arch, device: int) -> LoadedKernel:
    from jitfp4.driver import LoadedKernel  # cuda.core costs 0.2 s to import: only a process that launches pays it

    key = family, spec, device
    with _build_lock(family, spec):
        if key not in _kernels:
            cubin = build(family, spec, arch).cubin
            _kernels[key] = LoadedKernel(cubin, family.symbol, family.params, device)
        return _kernels[key]


@functools.cache
def _build_lock(family: Family, spec: KernelSpec) -> threading.Lock:  # noqa: ARG001 - one lock for each pair
    return threading.Lock()


@functools.cache
def _ptx(family: Family, spec: KernelSpec, arch: Arch) -> str:
    if cache().config.offline:
        raise OfflineError(f"the simulator compiles {family.name}[{spec}] for {arch.name}, and JITFP4_OFFLINE is set")
    return nvrtc.compile_ptx(family.render(spec, arch), arch, symbol=family.symbol)


# ---- build -----------------------------------------------------------------------------------------------------------


def build(family: Family, spec: KernelSpec, arch: Arch) -> Loaded:
    """The kernel's verified cubin: from the cache, else compiled now and published.

    Raises:
        OfflineError: it is not cached, and JITFP4_OFFLINE or the lack of NVRTC forbids compiling it.
        CompileError: NVRTC rejected the generated source.
    """
    recipe, toolchain = _recipe(family, spec, arch), nvrtc.toolchain()

    def compile_now() -> Built:
        if cache().config.offline:
            raise OfflineError(_how_to_prebuild(family, spec, arch, "JITFP4_OFFLINE is set"))
        if toolchain is None:
            raise OfflineError(_how_to_prebuild(family, spec, arch, "NVRTC is not installed"))
        start = time.perf_counter()
        cubin = nvrtc.compile_cubin(recipe.source, arch, symbol=family.symbol)
        provenance = {
            "jitfp4": version(),
            "template": family.template,
            "spec": spec.fields(),
            "compile_ms": round(1e3 * (time.perf_counter() - start), 1),
            "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        return Built(cubin=cubin, symbol=family.symbol, provenance=provenance)

    loaded = cache().get_or_build(recipe, toolchain.name if toolchain else None, compile_now)
    if loaded.missed is not None:
        why = loaded.missed.detail or loaded.missed.reason.value
        _log.info("compiled %s[%s] for %s in %.0f ms (%s)", family.name, spec, arch.name, loaded.build_ms, why)
    return loaded


def is_cached(family: Family, spec: KernelSpec, arch: Arch) -> bool:
    """Whether build() would return without compiling. Verifies the entry; builds and repairs nothing."""
    toolchain = nvrtc.toolchain()
    found = cache().lookup(_recipe(family, spec, arch), toolchain.name if toolchain else None)
    return isinstance(found, Loaded)


@functools.cache
def cache() -> Cache:
    """The process's cache, as the environment describes it at the first use."""
    return Cache(read_config())


def cache_info() -> CacheInfo:
    """Counters of this process's kernel cache: hits, misses by reason, builds, publishes, store errors."""
    return cache().info()


def reset() -> None:
    """Forget loaded kernels and the cache's configuration; the next call reads the environment again."""
    _kernels.clear()
    for memo in (cache, _ptx, _build_lock):
        memo.cache_clear()


@functools.cache
def version() -> str:
    """jitfp4's version; ``source`` when it runs from a checkout that is not installed."""
    try:
        return importlib.metadata.version("jitfp4")
    except importlib.metadata.PackageNotFoundError:
        return "source"


def _recipe(family: Family, spec: KernelSpec, arch: Arch) -> Recipe:
    source = family.render(spec, arch)
    return Recipe(family=family.name, arch=arch.name, options=nvrtc.compile_options(arch), source=source)


def _how_to_prebuild(family: Family, spec: KernelSpec, arch: Arch, why: str) -> str:
    return (
        f"{family.name}[{spec}] for {arch.name} is not in the cache, and {why}. "
        f"Prebuild it where NVRTC is installed: jitfp4 warmup --arch {arch.name} --family {family.name}"
    )

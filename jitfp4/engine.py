"""From a spec to a running kernel: source, recipe, cache, cubin, loaded kernel, launch.

A spec that the process has used before takes only the first line::

    launch -> LoadedKernel.launch
              the first time: _kernels[kernel, spec, device], else
                  build -> render -> recipe -> cache -> hit: verified cubin
                                                     -> miss: NVRTC, publish
                  load  -> LoadedKernel
"""

from __future__ import annotations

import functools
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from jitfp4 import nvrtc, sim, tactics
from jitfp4.arch import Arch
from jitfp4.cache import Built, Cache, CacheInfo, Loaded
from jitfp4.config import read_config
from jitfp4.errors import ArgumentTypeError, OfflineError
from jitfp4.kernel import AnyKernel, Plan
from jitfp4.keys import Recipe
from jitfp4.remembered import Launch
from jitfp4.spec import KernelSpec
from jitfp4.tensors import device_arch, device_name, on_device
from jitfp4.version import version

if TYPE_CHECKING:
    from jitfp4.driver import LoadedKernel

__all__ = ["CacheInfo", "cache_info"]

R = TypeVar("R")

_log = logging.getLogger("jitfp4.engine")
_memos: list[functools._lru_cache_wrapper[Any]] = []  # by until_reset


def until_reset(function: Callable[..., R]) -> functools._lru_cache_wrapper[R]:
    """``functools.cache``, which reset() empties: for what follows from loaded kernels or from the environment."""
    _memos.append(functools.cache(function))
    return _memos[-1]


class Target(NamedTuple):
    """Where a call runs: an architecture, and a CUDA device index or None for the simulator.

    ``races``: the simulator looks for races in shared memory. ``gpu``: the device's name, for which tactics are tuned.
    """

    arch: Arch
    device: int | None
    races: bool = False

    @property
    def gpu(self) -> str:
        return f"simulated {self.arch.name}" if self.device is None else device_name(self.device)


def target_of(tensor: Any) -> Target:
    """The target of calls on ``tensor``: its CUDA device; under ``sim.device``, a CPU tensor has the simulated one."""
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

_kernels: dict[tuple[AnyKernel, KernelSpec, int], LoadedKernel] = {}


def launch(
    plan: Plan, args: Sequence[Any], target: Target, *, pdl: bool | None = None
) -> tuple[Launch, list[Any]] | None:
    """Run a kernel on ``target``. At its first use in this process it is built or read from the cache, and loaded.

    Args:
        args: in the order of the kernel's parameters: tensors for pointers, ints, floats, TileMaps for tensor maps.
        pdl: programmatic dependent launch; None means on every architecture that has it.
    Returns:
        The launch, which can be repeated, and the tensors whose addresses it takes; None in the simulator.
    """
    arch, device, races = target
    if device is None:
        ptx = _ptx(plan.kernel, plan.spec, arch)
        sim.run(ptx, args, plan.geometry, arch, entry=plan.kernel.symbol, races=races)
        return None
    with on_device(device) as stream:
        loaded = _kernels.get((plan.kernel, plan.spec, device)) or _load(plan.kernel, plan.spec, arch, device)
        return loaded.launch(plan.geometry, args, stream=stream, pdl=arch.has_pdl and pdl is not False)


def load(kernel: AnyKernel, spec: KernelSpec, target: Target) -> None:
    """Have a kernel loaded on a CUDA device before its first launch: built, or read from the cache. Safe in threads.

    Raises:
        ArgumentTypeError: the target is the simulator, which loads nothing.
        OfflineError, CompileError: as build().
    """
    if target.device is None:
        raise ArgumentTypeError("target", "the simulator", "a CUDA device")
    with on_device(target.device):
        if (kernel, spec, target.device) not in _kernels:
            _load(kernel, spec, target.arch, target.device)


def loaded() -> int:
    """The number of kernels that this process has loaded, on all devices. It grows at the first use of each."""
    return len(_kernels)


def _load(kernel: AnyKernel, spec: KernelSpec, arch: Arch, device: int) -> LoadedKernel:
    from jitfp4.driver import LoadedKernel  # the import of cuda.core takes 0.2 s: only processes that launch need it

    key = kernel, spec, device
    with _build_lock(kernel, spec):
        if key not in _kernels:
            _record(kernel, spec, arch)
            cubin = build(kernel, spec, arch).cubin
            _kernels[key] = LoadedKernel(cubin, kernel.symbol, kernel.params, device)
        return _kernels[key]


@until_reset
def _build_lock(kernel: AnyKernel, spec: KernelSpec) -> threading.Lock:  # noqa: ARG001 - one lock for each pair
    return threading.Lock()


def _ptx(kernel: AnyKernel, spec: KernelSpec, arch: Arch) -> str:
    with _build_lock(kernel, spec):  # threads that need it at the same time compile it once
        return _compile_ptx(kernel, spec, arch)


@until_reset
def _compile_ptx(kernel: AnyKernel, spec: KernelSpec, arch: Arch) -> str:
    if cache().config.offline:
        raise OfflineError(f"the simulator compiles {kernel.name}[{spec}] for {arch.name}, and JITFP4_OFFLINE is set")
    _record(kernel, spec, arch)
    return nvrtc.compile_ptx(kernel.render(spec, arch), arch, symbol=kernel.symbol)


# ---- build -----------------------------------------------------------------------------------------------------------


def build(kernel: AnyKernel, spec: KernelSpec, arch: Arch) -> Loaded:
    """The kernel's verified cubin, from the cache or else compiled and published.

    Raises:
        OfflineError: it is not cached, and it cannot be compiled: JITFP4_OFFLINE is set, or NVRTC is missing.
        CompileError: NVRTC rejected the generated source.
    """
    recipe, toolchain = _recipe(kernel, spec, arch), nvrtc.toolchain()

    def compile_now() -> Built:
        if cache().config.offline:
            raise OfflineError(_how_to_prebuild(kernel, spec, arch, "JITFP4_OFFLINE is set"))
        if toolchain is None:
            raise OfflineError(_how_to_prebuild(kernel, spec, arch, "NVRTC is not installed"))
        start = time.perf_counter()
        cubin = nvrtc.compile_cubin(recipe.source, arch, symbol=kernel.symbol)
        provenance = {
            "jitfp4": version(),
            "template": kernel.template,
            "spec": spec.fields(),
            "compile_ms": round(1e3 * (time.perf_counter() - start), 1),
            "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        return Built(cubin=cubin, symbol=kernel.symbol, provenance=provenance)

    loaded = cache().get_or_build(recipe, toolchain.name if toolchain else None, compile_now)
    if loaded.missed is not None:
        why = loaded.missed.detail or loaded.missed.reason.value
        _log.info("compiled %s[%s] for %s in %.0f ms (%s)", kernel.name, spec, arch.name, loaded.build_ms, why)
    return loaded


def is_cached(kernel: AnyKernel, spec: KernelSpec, arch: Arch) -> bool:
    """Whether build() would return without compiling. Verifies the cache entry; builds and repairs nothing."""
    toolchain = nvrtc.toolchain()
    found = cache().lookup(_recipe(kernel, spec, arch), toolchain.name if toolchain else None)
    return isinstance(found, Loaded)


# ---- plans -----------------------------------------------------------------------------------------------------------


def plan_entry(kernel: AnyKernel, spec: KernelSpec, arch: Arch) -> dict[str, object]:
    """The entry of one kernel in a plan of ``warmup``."""
    return {"family": kernel.name, "arch": arch.name, "spec": spec.fields()}


def _record(kernel: AnyKernel, spec: KernelSpec, arch: Arch) -> None:
    """At its first use, append a kernel to the file JITFP4_RECORD, as one line of JSON that ``warmup`` reads.

    Processes may share the file: each line is short, and appended by one write.
    """
    config = cache().config
    if config.record is None:
        return
    line = json.dumps(plan_entry(kernel, spec, arch)) + "\n"
    try:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC  # a FIFO must not hang the launch
        with open(os.open(config.record, flags, 0o666), "ab", buffering=0) as file:  # noqa: PTH123 - a descriptor
            file.write(line.encode())
    except OSError as error:
        if config.strict:
            raise
        _warn_of_record(f"{config.record}: {error.strerror}")


@until_reset
def _warn_of_record(trouble: str) -> None:
    _log.warning("JITFP4_RECORD: %s; what this process uses is not recorded", trouble)


# ---- the cache -------------------------------------------------------------------------------------------------------


@until_reset
def cache() -> Cache:
    """The process's cache, as the environment describes it at the first use."""
    config = read_config()
    if config.log_level is not None:
        _show_log(config.log_level)
    return Cache(config)


def _show_log(level: str) -> None:
    """Show messages of jitfp4 from ``level`` on on stderr, unless the program has set up logging itself."""
    package = logging.getLogger("jitfp4")
    package.setLevel(level)
    if not package.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
        package.addHandler(handler)


def cache_info() -> CacheInfo:
    """Counters of this process's kernel cache: hits, misses by reason, builds, publishes, store errors."""
    return cache().info()


def reset() -> None:
    """Forget calls, kernels, tactics and the cache's configuration. The next call reads the environment again."""
    _kernels.clear()
    tactics.use(None)
    for memo in _memos:
        memo.cache_clear()


def _recipe(kernel: AnyKernel, spec: KernelSpec, arch: Arch) -> Recipe:
    source = kernel.render(spec, arch)
    return Recipe(family=kernel.name, arch=arch.name, options=nvrtc.compile_options(arch), source=source)


def _how_to_prebuild(kernel: AnyKernel, spec: KernelSpec, arch: Arch, why: str) -> str:
    return (
        f"{kernel.name}[{spec}] for {arch.name} is not in the cache, and {why}. "
        f"Prebuild it where NVRTC is installed: jitfp4 warmup --arch {arch.name} --kernel {kernel.name}"
    )

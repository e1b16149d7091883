"""Run a kernel's PTX on CPU arrays, and choose the simulated device of a block of code."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from jitfp4.arch import Arch
from jitfp4.errors import ArgumentError, ArgumentTypeError
from jitfp4.sim.machine import Launch, Machine, linear
from jitfp4.sim.memory import PARAM_START, GlobalMemory
from jitfp4.sim.parser import parse
from jitfp4.sim.program import Program
from jitfp4.sim.ptx import Array, Variable
from jitfp4.sim.tensormap import TensorMap
from jitfp4.sim.tiles import tensor_map
from jitfp4.spec import Dim3, Geometry, TileMap

BATCH_THREADS = 8192
"""Threads simulated together unless the caller says otherwise: a 32-bit register array then takes 32 KiB of cache."""

TENSOR_MAP_BYTES = 128

_active: ContextVar[Arch | None] = ContextVar("jitfp4_sim_arch", default=None)


def active_arch() -> Arch | None:
    """The architecture of the innermost ``device`` block, or None outside of one."""
    return _active.get()


@contextmanager
def device(arch: str | Arch) -> Iterator[Arch]:
    """Simulate launches on CPU tensors as if on ``arch`` inside the block."""
    chosen = Arch.of(arch) if isinstance(arch, str) else arch
    token = _active.set(chosen)
    try:
        yield chosen
    finally:
        _active.reset(token)


@dataclass(slots=True)
class Stats:
    """What a run cost. ``instructions`` counts thread-instructions, ``opcodes`` the same by opcode."""

    instructions: int = 0
    seconds: float = 0.0
    opcodes: Counter[str] = field(default_factory=Counter)


@lru_cache(maxsize=64)
def load(ptx: str, entry: str | None = None) -> Program:
    """Parse and decode a module. Raises SimParseError."""
    return Program(parse(ptx), entry)


def run(
    ptx: str,
    args: Sequence[Any],
    geometry: Geometry,
    arch: str | Arch,
    *,
    entry: str | None = None,
    races: bool = False,
    batch: int = BATCH_THREADS,
) -> Stats:
    """Execute ``entry`` of a PTX module over a grid.

    Args:
        ptx: a module as NVRTC writes it.
        args: one per kernel parameter. NumPy arrays and torch CPU tensors (views too) are pointers, mutated in place and
            bounds-checked at the view's extent; integers, bools and NumPy scalars take the parameter's width; floats become
            float32 or, for an 8-byte parameter, float64; TensorMap and ``bytes`` are passed by value; None is a null pointer.
        geometry: grid in CTAs, block, cluster, dynamic shared bytes. A cluster size compiled into the kernel wins over 1.
        races: also look for shared-memory races (SimRaceError); several times slower.
        batch: threads simulated together, at least one cluster.
    Raises:
        SimError: a fault of the program, or something that is not modelled.
    """
    began = time.perf_counter()
    program = load(ptx, entry)
    arch = Arch.of(arch) if isinstance(arch, str) else arch
    memory = GlobalMemory()
    params, maps = _pack(program.entry.params, args, memory)
    const = program.initialise(memory)
    cluster = _cluster(program, geometry)
    launch = Launch(geometry=geometry, cluster=cluster, arch=arch, tensor_maps=maps, races=races)
    _check_limits(program, launch)
    stats = Stats()
    total, size = linear(geometry.grid), linear(cluster)
    ctas = max(batch // (linear(geometry.block) * size), 1) * size
    with np.errstate(all="ignore"):
        for first in range(0, total, ctas):
            machine = Machine(program, launch, memory, params, const, first, min(ctas, total - first))
            machine.run()
            stats.opcodes += program.histogram(machine.block_runs)
    stats.instructions = stats.opcodes.total()
    stats.seconds = time.perf_counter() - began
    return stats


def _cluster(program: Program, geometry: Geometry) -> Dim3:
    compiled = program.entry.directives.get("reqnctapercluster", ())
    dims = (*compiled, 1, 1)[:3] if compiled else geometry.cluster
    cluster = (dims[0], dims[1], dims[2])
    if geometry.cluster != (1, 1, 1) and geometry.cluster != cluster:
        raise ArgumentError("geometry.cluster", geometry.cluster, f"{cluster}, which the kernel was compiled for")
    if any(g % c for g, c in zip(geometry.grid, cluster, strict=True)):
        raise ArgumentError("geometry.grid", geometry.grid, f"multiples of the cluster {cluster}")
    return cluster


def _check_limits(program: Program, launch: Launch) -> None:
    """What the driver would refuse to launch."""
    block, arch = launch.geometry.block, launch.arch
    if program.module.target != arch.name:
        raise ArgumentError("arch", arch.name, f"{program.module.target}, which the PTX targets")
    directives = program.entry.directives
    required, limit = directives.get("reqntid"), directives.get("maxntid")
    if required and (*required, 1, 1)[:3] != block:
        raise ArgumentError("geometry.block", block, f"{required}, which the kernel was compiled for")
    most = min(1024, linear((*limit, 1, 1)[:3]) if limit else 1024)  # type: ignore[arg-type]
    if not 0 < linear(block) <= most:
        raise ArgumentError("geometry.block", block, f"1 to {most} threads")
    if not linear(launch.geometry.grid):
        raise ArgumentError("geometry.grid", launch.geometry.grid, "positive sizes")
    used = program.shared_static + launch.geometry.shared_bytes
    if used > arch.shared_bytes:
        raise ArgumentError("geometry.shared_bytes", used, f"at most {arch.shared_bytes} static and dynamic bytes")


# Parameters


def _pack(params: Sequence[Variable], args: Sequence[Any], memory: GlobalMemory) -> tuple[Array, dict[int, Any]]:
    """The parameter bank and the tensor maps in it, by parameter address."""
    if len(args) != len(params):
        raise ArgumentError("args", len(args), f"{len(params)} arguments")
    size = max((p.offset + p.size for p in params), default=0)
    bank, maps = np.zeros(size, np.uint8), {}
    for number, (param, arg) in enumerate(zip(params, args, strict=True)):
        if isinstance(arg, TileMap):
            arg = tensor_map(arg)
        if isinstance(arg, TensorMap):
            maps[PARAM_START + param.offset] = arg
            if param.size != TENSOR_MAP_BYTES:
                raise ArgumentTypeError(f"args[{number}]", "TensorMap", f"a {param.size}-byte parameter")
            continue
        data = _value_bytes(number, param, arg, memory)
        bank[param.offset : param.offset + param.size] = np.frombuffer(data, np.uint8)
    return bank, maps


def _value_bytes(number: int, param: Variable, arg: Any, memory: GlobalMemory) -> bytes:
    name = f"args[{number}]"
    if arg is None:
        return bytes(param.size)
    if isinstance(arg, bytes) and len(arg) == param.size:
        return arg
    if isinstance(arg, np.ndarray) and arg.ndim + arg.size > 0 and not isinstance(arg, np.generic):
        return memory.add(f"{name} {arg.dtype}{list(arg.shape)}", *_array_bytes(arg)).to_bytes(8, "little")
    if type(arg).__module__.partition(".")[0] == "torch":
        return memory.add(f"{name} {arg.dtype}{list(arg.shape)}", *_tensor_bytes(name, arg)).to_bytes(8, "little")
    if isinstance(arg, (bool, int, np.integer, np.bool_)):
        return (int(arg) & ((1 << 8 * param.size) - 1)).to_bytes(param.size, "little")
    if isinstance(arg, (float, np.floating)) and param.size in (4, 8):
        return np.dtype(f"<f{param.size}").type(arg).tobytes()
    raise ArgumentTypeError(name, type(arg).__name__, f"a value for a {param.size}-byte parameter")


def _array_bytes(array: Array) -> tuple[Array, int]:
    """The bytes of an array's extent, sharing its memory, and the offset from its allocation."""
    low, high = np.lib.array_utils.byte_bounds(array)
    owner = array
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    if not array.flags.writeable or any(s < 0 for s in array.strides):
        raise ArgumentError("array", array.strides, "a writable array without negative strides")
    start = np.lib.array_utils.byte_bounds(owner)[0]
    if array.flags.c_contiguous:
        return array.reshape(-1).view(np.uint8), low - start
    return np.lib.stride_tricks.as_strided(array.view(np.uint8), (high - low,), (1,)), low - start


def _tensor_bytes(name: str, tensor: Any) -> tuple[Array, int]:
    import torch

    if tensor.device.type != "cpu":
        raise ArgumentTypeError(name, tensor.device, "a CPU tensor")
    whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy()
    start = tensor.storage_offset() * tensor.element_size()
    steps = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) if tensor.numel() else -1
    return whole[start : start + (steps + 1) * tensor.element_size()], start

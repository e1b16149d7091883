"""Special registers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from jitfp4.errors import SimParseError
from jitfp4.sim.lanes import Lanes
from jitfp4.sim.memory import SHARED_START

if TYPE_CHECKING:
    from jitfp4.sim.machine import Machine


def _split3(number: Any, dims: tuple[int, int, int], axis: int) -> Any:
    return (number, number // dims[0], number // (dims[0] * dims[1]))[axis] % dims[axis]


def _vector(name: str, axis: int, m: Machine) -> Any:
    """%tid, %ctaid and their relatives, for every thread or as one number."""
    launch = m.launch
    grid, block, cluster = launch.geometry.grid, launch.geometry.block, launch.cluster
    cluster_grid = tuple(-(-g // c) for g, c in zip(grid, cluster, strict=True))
    fixed = {"ntid": block, "nctaid": grid, "nclusterid": cluster_grid, "cluster_nctaid": cluster}
    if name in fixed:
        return np.uint32(fixed[name][axis])
    if name == "tid":
        return _split3(m.tid, block, axis)
    cta = m.cta_index[axis][m.cta]
    return cta if name == "ctaid" else cta // cluster[axis] if name == "clusterid" else cta % cluster[axis]


def _scalar(name: str, m: Machine) -> Any:
    program, launch = m.program, m.launch
    one = np.uint64(1)
    lane = m.lane.astype(np.uint64)
    values: dict[str, Any] = {
        "laneid": lambda: m.lane,
        "warpid": lambda: m.tid // 32,
        "nwarpid": lambda: np.uint32(64),
        "smid": lambda: (m.first + m.cta) % launch.arch.num_sms,
        "nsmid": lambda: np.uint32(launch.arch.num_sms),
        "gridid": lambda: np.uint64(1),
        "cluster_ctarank": lambda: m.rank,
        "cluster_nctarank": lambda: np.uint32(m.cluster_size),
        "is_explicit_cluster": lambda: np.bool_(m.cluster_size > 1 or "explicitcluster" in program.entry.directives),
        "lanemask_eq": lambda: one << lane,
        "lanemask_lt": lambda: (one << lane) - one,
        "lanemask_le": lambda: (np.uint64(2) << lane) - one,
        "lanemask_gt": lambda: np.uint64(0xFFFFFFFF) & ~((np.uint64(2) << lane) - one),
        "lanemask_ge": lambda: np.uint64(0xFFFFFFFF) & ~((one << lane) - one),
        "dynamic_smem_size": lambda: np.uint32(launch.geometry.shared_bytes),
        "total_smem_size": lambda: np.uint32(m.memory.shared_end - SHARED_START),
        "aggr_smem_size": lambda: np.uint32(m.memory.shared_end),
        "WARP_SZ": lambda: np.uint32(32),
    }
    if name not in values:
        raise SimParseError(f"special register %{name} is not modelled")
    return values[name]()


def special(name: str) -> Callable[[Machine, Lanes], Any]:
    """Reader of a special register. Clocks count scheduler turns: only their direction of travel means anything."""
    stem, _, axis = name.removeprefix("%").partition(".")
    if stem.startswith(("clock", "globaltimer")):
        shift = np.uint64(32 if stem.endswith("_hi") else 0)
        return lambda m, _lanes: np.uint64(m.ready.turn) >> shift

    def read(m: Machine, lanes: Lanes) -> Any:
        value = m.special.get(name)
        if value is None:
            value = m.special[name] = _vector(stem, "xyz".index(axis), m) if axis else _scalar(stem, m)
        return value if value.ndim == 0 else value[lanes.sel]

    return read

"""Counters by which the CTAs of a launch share its work: memory of this library, which no caller writes.

A launch finds its counters zero and leaves them zero, so launches that never run at the same time can share them. Those
that may run at the same time have workspaces at different addresses, because their partial results lie there. So each
address of a workspace has a set of counters, for the rest of the process: also launches in CUDA graphs, which are
replayed on other streams than they were captured on.
"""

from __future__ import annotations

import threading

import torch

from jitfp4.tensors import on_device

COUNTER_BYTES = 1 << 16
"""Of a set; kernels of all grid sizes share it."""

_SLAB = 32  # sets that are allocated at once: 2 MiB, what the driver allocates at least
_MOST = 2048  # sets of the process
_sets: dict[tuple[int, int], torch.Tensor] = {}
_free: dict[int, list[torch.Tensor]] = {}
_lock = threading.Lock()


def of(workspace: torch.Tensor) -> torch.Tensor:
    """The counters of launches with this workspace: uint8 [COUNTER_BYTES], zero between launches."""
    key = workspace.get_device(), workspace.data_ptr()
    known = _sets.get(key)
    return _new(workspace, key) if known is None else known


def _new(workspace: torch.Tensor, key: tuple[int, int]) -> torch.Tensor:
    """Counters of a new address. Those of the simulator, and those beyond _MOST, are set to zero for each launch."""
    device, _ = key
    with _lock:
        if not workspace.is_cuda or (key not in _sets and len(_sets) >= _MOST):
            return torch.zeros(COUNTER_BYTES, dtype=torch.uint8, device=workspace.device)
        if key not in _sets:
            free = _free.setdefault(device, [])
            if not free:
                from jitfp4.driver import Memory  # the import of cuda.core takes 0.2 s

                with on_device(device):
                    slab = torch.as_tensor(Memory(device, _SLAB * COUNTER_BYTES), device=workspace.device)
                free += slab.view(_SLAB, COUNTER_BYTES).unbind()
            _sets[key] = free.pop()
        return _sets[key]

"""The peers of chunk_gated_delta_rule(): flash-linear-attention's Triton kernels, FlashInfer's CUTLASS kernel.

flash-linear-attention's kernels are tuned over those of their configurations that have four warps and at most three
stages. FlashInfer's is in a shared library, as nvcc makes it from flashinfer_gdn.cu beside this file and FlashInfer
0.6.6's headers. Later versions have another one, in the CuTe DSL.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_WARPS, _MOST_STAGES = 4, 3  # of the configurations that flash-linear-attention's kernels are tuned over

Given = dict[str, Any]
Peer = Callable[[], tuple[torch.Tensor, torch.Tensor]]


def _tune_over_fewer() -> None:
    """Cut what flash-linear-attention's kernels are tuned over, as all of it takes minutes; before their import."""
    tuner: Any = importlib.import_module("triton.runtime.autotuner").Autotuner
    make = tuner.__init__

    def cut(self: Any, fn: Any, names: Any, configs: Any, *args: Any, **kwargs: Any) -> None:
        few = [one for one in configs if one.num_warps == _WARPS and one.num_stages <= _MOST_STAGES]
        make(self, fn, names, few or configs, *args, **kwargs)

    tuner.__init__ = cut


def fla(given: Given, sequences: int) -> Peer | None:
    """flash-linear-attention on the same values, as sequences of equal length; None if it is not installed."""
    if importlib.util.find_spec("fla") is None:
        return None
    if "fla" not in sys.modules:
        _tune_over_fewer()
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule as peer

    q, k, v, g, beta = (given[name].unflatten(0, (sequences, -1)) for name in ("q", "k", "v", "g", "beta"))
    rate, state = g.log(), given["initial_state"].mT.contiguous()

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            out, final = peer(
                q, k, v, g=rate, beta=beta, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True
            )
        return out.flatten(0, 1), final.mT

    return call


def flashinfer(library: Path | None, given: Given) -> Peer | None:
    """FlashInfer's kernel; None without the library. It does not normalise: its q and k are unit vectors already."""
    if library is None:
        return None
    ctypes.CDLL("libcuda.so.1", ctypes.RTLD_GLOBAL)
    launch = ctypes.CDLL(str(library)).flashinfer_gdn
    q, k = (torch.nn.functional.normalize(given[name].float(), dim=-1).bfloat16() for name in ("q", "k"))
    v, state = given["v"], given["initial_state"]
    out, final = torch.empty_like(v), torch.empty_like(state)
    properties = torch.cuda.get_device_properties(v.device)
    workspace = torch.empty(properties.multi_processor_count * 128, dtype=torch.uint8, device=v.device)
    tensors = (out, final, q, k, v, state, given["g"], given["beta"], given["cu_seqlens"].long(), workspace)
    numbers = (len(state), q.shape[1], k.shape[1], v.shape[1], v.shape[1], v.shape[2])
    rest = (ctypes.c_int64(len(v)), ctypes.c_float(v.shape[2] ** -0.5), properties.multi_processor_count)

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        if launch(stream, *(ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors), *numbers, *rest):
            raise RuntimeError("FlashInfer's kernel was not launched")
        return out, final

    return call

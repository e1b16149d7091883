"""The tactics for a step, and the problems that reach every row."""

from __future__ import annotations

from collections.abc import Iterator

from jitfp4.arch import Arch
from jitfp4.families.step.kernels.decode import KERNEL, StepTactic
from jitfp4.families.step.problem import Problem
from jitfp4.formats import DType
from jitfp4.selection import Row, Table


def _most(problem: Problem, arch: Arch) -> StepTactic | None:
    """As many CTAs as can run; then the deepest rings."""
    return next((tactic for tactic in KERNEL.tactics if not KERNEL.rejects(problem, tactic, arch)), None)


TABLE = Table((Row(_most),), measured=None)


def problems(arch: Arch) -> Iterator[Problem]:
    """Llama-8B and 70B, Qwen3-0.6B and 8B, a model with biases, and models of 16, 32 and 64 KV heads."""
    if not arch.has_wgmma:
        return
    yield Problem(4096, 32, 8, 14336)
    yield Problem(4096, 32, 8, 14336, dtype=DType.F16, bias=True)
    yield Problem(8192, 64, 8, 28672)
    yield Problem(1024, 16, 8, 3072, head_norms=True)
    yield Problem(4096, 32, 8, 12288, head_norms=True, interleaved=True)
    yield Problem(4096, 32, 16, 11008)
    yield Problem(4096, 32, 32, 11008)
    yield Problem(4096, 64, 64, 11008)

"""Calls of the mutation campaign: products of every kind, on small inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from unittest import mock

import numpy as np
import torch

import jitfp4
from jitfp4 import engine, sim
from jitfp4.families.gemm.fp4_operation import MM_FP4
from jitfp4.families.gemm.fp8_operation import MM_FP8_FP4
from jitfp4.families.gemm.kernels import expanded_fp8 as expanded_fp8_kernel
from jitfp4.families.gemm.kernels import wide as wide_kernel
from jitfp4.families.gemm.kernels import wide_fp8 as wide_fp8_kernel
from jitfp4.families.gemm.kernels.blockscaled import K64Tactic
from jitfp4.families.gemm.kernels.blockscaled_k96 import K96Tactic
from jitfp4.families.gemm.kernels.blockscaled_masked import MaskedTactic
from jitfp4.families.gemm.kernels.expanded_fp8 import ExpandedTactic
from jitfp4.families.gemm.kernels.narrow import NarrowTactic
from jitfp4.families.gemm.kernels.portable import PortableTactic
from jitfp4.families.gemm.kernels.portable_masked import PortableMaskedTactic
from jitfp4.families.gemm.kernels.wide import WideTactic
from jitfp4.families.gemm.kernels.wide_fp8 import Fp8Tactic
from jitfp4.families.gemm.masked_operation import MM_FP4_MASKED
from jitfp4.families.gemm.operation import MM_BF16_FP4
from jitfp4.formats import NVFP4
from jitfp4.layouts import round_up
from jitfp4.spec import Geometry
from tests.families.test_fp4_masked import assert_products
from tests.families.test_gemm_fp8 import assert_exact
from tests.mutants.calls import few_sms
from tests.sim import gemm_kernels as gemm
from tests.sim.cuda import compiled
from tests.support.gemm import assert_fp4_product, assert_product, make_batch, make_codes, make_weight, masked_keywords
from tests.support.inputs import random_matrix


def portable(tactic: PortableTactic) -> None:
    with MM_FP4.forced(tactic):
        assert_fp4_product(20, 72, 416)


def portable_masked(tactic: PortableMaskedTactic) -> None:
    with MM_FP4_MASKED.forced(tactic):
        assert_products([5, 0, 3, 17], 17, 72, 416)


def narrow(tactic: NarrowTactic, m: int, n: int, k: int, call: Callable[[int, int, int], None] | None = None) -> None:
    with MM_BF16_FP4.forced(tactic):
        (call or partial(assert_product, plain=True))(m, n, k)


def residual(m: int, n: int, k: int) -> None:
    """A product, added to a residual."""
    a, residual = (random_matrix(m, size, torch.bfloat16) for size in (k, n))
    jitfp4.mm_bf16_fp4(a, make_weight(n, k, NVFP4), residual=residual)


def gated(m: int, n: int, k: int) -> None:
    """A product with a weight of gates and ups."""
    codes, scales = make_codes(n, k, NVFP4)
    weight = jitfp4.prepare_fp4_weight(codes, scales, sf_layout=jitfp4.SfLayout.layout_linear, order="interleaved")
    jitfp4.mm_bf16_fp4(random_matrix(m, k, torch.bfloat16), weight, activation="swiglu")


def wide(tactic: WideTactic, m: int, n: int, k: int, call: Callable[[int, int, int], None] | None = None) -> None:
    """Rings of two slots for each warpgroup of a row of tiles, so that it goes around them more than once."""
    turns = 2 if tactic.common else tactic.depth
    with _few_slots(wide_kernel, 2 * turns), MM_BF16_FP4.forced(tactic):
        (call or partial(assert_product, plain=True))(m, n, k)


def wide_fp4(tactic: WideTactic, m: int, n: int, k: int) -> None:
    """The same with two FP4 matrices."""
    with _few_slots(wide_kernel), MM_FP4.forced(tactic):
        assert_fp4_product(m, n, k)


def wide_fp8(tactic: Fp8Tactic, m: int, n: int, k: int) -> None:
    """The same with activations of E4M3."""
    with _few_slots(wide_fp8_kernel), MM_FP8_FP4.forced(tactic):
        assert_exact(m, n, k, NVFP4)


def expanded_fp8(tactic: ExpandedTactic, m: int, n: int, k: int) -> None:
    with _few_slots(expanded_fp8_kernel), MM_FP8_FP4.forced(tactic):
        assert_exact(m, n, k, NVFP4)


@contextmanager
def _few_slots(kernel: ModuleType, slots: int = 4) -> Iterator[None]:
    """Two SMs, and rings of so few slots that each is filled again."""
    engine.reset()  # no kernel with more slots
    with few_sms(), mock.patch.object(kernel, "_MOST_SLOTS", slots):
        yield
    engine.reset()


def tile(arch: str) -> None:
    """The tile of a GEMM in tests/sim/gemm_kernels.py for an architecture."""
    if arch == "sm_90a":
        source, pieces, (args, _), threads, stage = gemm.WGMMA, gemm.WGMMA_PIECES, gemm.wgmma_problem(320), 160, 24576
    else:
        source, pieces = gemm.TCGEN05, gemm.TCGEN05_PIECES
        (args, _), threads, stage = gemm.tcgen05_problem(1280), 128, 55296
    tensors = [torch.from_numpy(arg) if isinstance(arg, np.ndarray) else arg for arg in args]
    geometry = Geometry((1, 1, 1), (threads, 1, 1), shared_bytes=gemm.STAGES * stage)
    sim.run(compiled(gemm.with_pieces(source, pieces), arch), tensors, geometry, arch)


def blockscaled(tactic: K64Tactic | K96Tactic, m: int, n: int = 136, k: int = 576) -> None:
    """Several tiles for each CTA, by one cluster; more steps than stages."""
    generator = torch.Generator().manual_seed(1)
    sizes = (m, k // 2), (n, k // 2), (round_up(m, 128), k // 16), (round_up(n, 128), k // 16)
    a, b, a_scales, b_scales = (torch.randint(0, 64, size, generator=generator).to(torch.uint8) for size in sizes)
    sms = tactic.ctas * tactic.cluster_m * tactic.cluster_n * tactic.split
    with few_sms(sms), MM_FP4.forced(tactic):
        jitfp4.mm_fp4(a, b.T, a_scales, b_scales.T, torch.tensor([0.5]))


def blockscaled_masked(tactic: MaskedTactic, m: int, filled: list[int]) -> None:
    """More tiles than clusters, more steps than stages, rows that are not filled behind a tile's."""
    a, b = make_batch(len(filled), m, 576, NVFP4, 1), make_batch(len(filled), 136, 576, NVFP4, 11)
    out = torch.zeros(len(filled), m, 136, dtype=torch.bfloat16).permute(1, 2, 0)
    given = (a.codes, a.scales), (b.codes, b.scales), out, torch.tensor(filled, dtype=torch.int32)
    with few_sms(1), MM_FP4_MASKED.forced(tactic):
        jitfp4.grouped_gemm_nt_masked(*given, **masked_keywords(NVFP4), alpha=torch.full((len(filled),), 2.0**-13))

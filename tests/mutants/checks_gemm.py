"""What judges the arithmetic of products: their families' own simulated tests, the cheapest first."""

from __future__ import annotations

from jitfp4.families.gemm.kernels.blockscaled import K64Tactic
from jitfp4.families.gemm.kernels.blockscaled_k96 import K96Tactic
from jitfp4.families.gemm.kernels.expand import ExpandTactic
from jitfp4.families.gemm.kernels.expanded_fp8 import ExpandedTactic
from jitfp4.families.gemm.kernels.narrow import NarrowTactic
from jitfp4.families.gemm.kernels.wide import WideTactic
from jitfp4.families.gemm.kernels.wide_fp8 import Fp8Tactic
from jitfp4.formats import MXFP4, NVFP4
from tests.families import test_fp4_blockscaled as blockscaled
from tests.families import test_fp4_masked as fp4_masked
from tests.families import test_mm_fp4 as mm_fp4
from tests.families import test_mm_fp4_wide as mm_fp4_wide
from tests.mutants.runs import (
    BF16,
    TILED,
    Subject,
    fp4_cases,
    fp8_products,
    on,
    portable_races,
    products,
    wide_fp4_cases,
)

CHECKS_GEMM: dict[str, Subject] = {
    "gemm, narrow": Subject(
        "gemm_narrow",
        (
            *products(NarrowTactic(8, 2, 2, 2, 2, 1), (5, 72, 672), (13, 64, 160)),
            *products(NarrowTactic(8, 2, 2, 2, 2, 1, split=5), (5, 72, 672))[:1],
        ),
    ),
    "gemm, narrow split": Subject(
        "gemm_narrow",
        products(NarrowTactic(16, 2, 2, 2, 2, 1, split=2), (13, 72, 1056), block_format=MXFP4),
    ),
    "gemm, wide split": Subject(
        "gemm_wide", products(WideTactic(64, 1, 2, 2), (70, 72, 416), (40, 200, 1536)), ("sm_90a",)
    ),
    "gemm, wide divided": Subject(
        "gemm_wide",
        products(WideTactic(64, 2, divided=True), (70, 136, 416), (70, 264, 1536), (300, 520, 160), block_format=MXFP4),
        ("sm_90a",),
    ),
    "gemm, wide cluster": Subject(
        "gemm_wide",
        products(WideTactic(64, 2, cluster=2), (130, 520, 160), (70, 264, 1536), (1100, 264, 160)),
        ("sm_90a",),
    ),
    "mm_fp4, portable": Subject(
        "gemm_portable",
        (
            on(lambda device: mm_fp4.test_formats_layouts_and_dtypes(device, NVFP4, TILED, BF16)),
            on(mm_fp4.test_every_e4m3_scale),
            on(mm_fp4.test_strides),
            portable_races,
        ),
        ("sm_80", "sm_120a"),
    ),
    "mm_fp4, K = 64": Subject(
        "gemm_blockscaled",
        fp4_cases(blockscaled.K64_CASES[0], (K64Tactic(64, 1, 2), 1, 1050, 72, 64, NVFP4, BF16)),
        ("sm_100a",),
    ),
    "mm_fp4, K = 64 in pairs": Subject(
        "gemm_blockscaled",
        fp4_cases(blockscaled.K64_CASES[4], (K64Tactic(64, 2, 2), 2, 2600, 72, 64, MXFP4, BF16)),
        ("sm_100a",),
    ),
    "mm_fp4, K = 64 in clusters": Subject(
        "gemm_blockscaled",
        fp4_cases(
            (K64Tactic(64, 1, 2, cluster_m=2, cluster_n=2), 4, 330, 328, 576, NVFP4, BF16),
            (K64Tactic(64, 1, 2, cluster_m=2, cluster_n=2), 4, 1300, 136, 64, NVFP4, BF16),
        ),
        ("sm_100a",),
    ),
    "mm_fp4, K = 64 split": Subject(
        "gemm_blockscaled",
        fp4_cases(
            (K64Tactic(64, 1, 2, swap_ab=True, split=4), 4, 61, 392, 1216, NVFP4, BF16),
            (K64Tactic(64, 1, 2, swap_ab=True, split=4), 4, 100, 1304, 1024, NVFP4, BF16),
        ),
        ("sm_100a",),
    ),
    "mm_fp4, K = 96": Subject(
        "gemm_blockscaled_k96",
        fp4_cases(blockscaled.K96_CASES[0], (K96Tactic(64, 1, 2, 2), 1, 1050, 72, 64, NVFP4, BF16)),
        ("sm_103a",),
    ),
    "mm_fp4, wgmma": Subject("gemm_wide_fp4", wide_fp4_cases(0), ("sm_90a",)),
    "mm_fp4, wgmma divided": Subject("gemm_wide_fp4", wide_fp4_cases(5), ("sm_90a",)),
    "mm_fp4, expand": Subject(
        "gemm_expand", (on(mm_fp4_wide.test_expansion, ExpandTactic(4), NVFP4, TILED),), ("sm_90a",)
    ),
    "mm_fp4, masked": Subject(
        "gemm_blockscaled_masked", (lambda arch: fp4_masked.test_products(*fp4_masked.CASES[5], arch),), ("sm_100a",)
    ),
    "mm_fp4, masked rows": Subject(
        "gemm_blockscaled_masked",
        (
            lambda arch: fp4_masked.test_products(*fp4_masked.CASES[1], arch),
            lambda arch: fp4_masked.test_products(*fp4_masked.CASES[13], arch),  # a batch of one
        ),
        ("sm_100a",),
    ),
    "mm_fp4, portable masked": Subject(
        "gemm_portable_masked", (lambda _: fp4_masked.test_portable_products(*fp4_masked.PORTABLE[1]),), ("sm_90a",)
    ),
    "mm_fp8, wgmma": Subject("gemm_wide_fp8", fp8_products(Fp8Tactic(128), (70, 136, 416), (300, 72, 96)), ("sm_90a",)),
    "mm_fp8, expanded": Subject(
        "gemm_expanded_fp8", fp8_products(ExpandedTactic(256, 1), (300, 136, 416)), ("sm_90a",)
    ),
}

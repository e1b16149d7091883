"""The operation behind grouped_gemm_nt_masked, its tactics, and the problems that reach every row."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

from jitfp4.arch import Arch
from jitfp4.families.gemm import fp4_tables
from jitfp4.families.gemm.arguments import MaskedArguments
from jitfp4.families.gemm.kernels import blockscaled_masked, portable_masked
from jitfp4.families.gemm.kernels.blockscaled import Cut
from jitfp4.families.gemm.kernels.portable import PortableTactic
from jitfp4.families.gemm.kernels.portable_masked import PortableMaskedTactic
from jitfp4.families.gemm.problem import DTYPES, MaskedProblem
from jitfp4.formats import MXFP4, NVFP4, BlockFormat, DType
from jitfp4.layouts import SfLayout
from jitfp4.operation import Operation
from jitfp4.reference import gemm as reference
from jitfp4.selection import Row, Table

_ENTRIES = 2  # of a problem that stands for others
_OF = {Cut.of(tactic): tactic for tactic in blockscaled_masked.KERNEL.tactics}


def _portable(table: Table[PortableTactic]) -> tuple[Row[Any], ...]:
    """The rows for one product, as if it had the rows of b of all entries."""
    return tuple(Row(PortableMaskedTactic.of(row.tactic), row.when) for row in table.rows)


TABLE: Table[Any] = Table(_portable(fp4_tables.TABLE), measured=None)

SCALED: Table[Any] = Table(_portable(fp4_tables.SCALED), measured=None, needs="has_scaled_mma")

# How many rows are filled is not known, and most often few are: a tile has as many rows of a as an entry may have, up
# to 64, or 128 of them, as FlashInfer's default.
BLOCKSCALED: Table[Any] = Table(
    (
        *(Row(_OF[Cut(rows, 1, swap_ab=True)], {"m": rows}) for rows in (8, 16, 32, 64)),
        Row(_OF[Cut(128, 1)]),
        Row(_OF[Cut(64, 1)]),  # few rows of b
        *TABLE.rows,
    ),
    measured=None,
    needs="has_tcgen05",
)


def _problem(arguments: MaskedArguments) -> MaskedProblem:
    entries = arguments.masked_m.shape[0]
    return MaskedProblem(
        format=NVFP4 if arguments.block_size == NVFP4.block else MXFP4,
        out_dtype=DTYPES[arguments.out.dtype],
        entries=entries,
        m=arguments.out.shape[0] // entries,
        n=arguments.out.shape[1],
        k=2 * arguments.a.shape[1],
    )


def _reference(arguments: MaskedArguments) -> None:
    problem, layout = _problem(arguments), SfLayout.layout_128x4
    a, b, out = (x.unflatten(0, (problem.entries, -1)) for x in (arguments.a, arguments.b, arguments.out))
    a = reference.decode(a, arguments.a_descale, problem.format, layout)
    b = reference.decode(b, arguments.b_descale, problem.format, layout)
    for entry, filled in enumerate(arguments.masked_m.tolist()):
        rows, alpha = max(filled, 0), None if arguments.alpha is None else arguments.alpha[entry]
        out[entry, :rows].copy_(reference.matmul(a[entry, :rows], b[entry], alpha, None))


def _problems(arch: Arch) -> Iterator[MaskedProblem]:
    for block_format, dtype in product(BlockFormat, (DType.BF16, DType.F16)):
        if arch.has_tcgen05:
            sizes = [*((m, 4096) for m in (8, 16, 32, 64, 128)), (128, 64)]
        else:
            loads = product((16, 32, 64, 128), (0.2, 0.4, 2.0))
            sizes = [*((m, round(load * arch.num_sms / _ENTRIES) * 128) for m, load in loads), (16, 32)]
        for m, n in sizes:
            yield MaskedProblem(block_format, dtype, _ENTRIES, m=m, n=n, k=4096)


MM_FP4_MASKED = Operation(
    MaskedArguments,
    name="mm_fp4_masked",
    kernels=(blockscaled_masked.KERNEL, portable_masked.KERNEL),
    problem=_problem,
    problems=_problems,
    tables=(TABLE, SCALED, BLOCKSCALED),
    reference=_reference,
    output="out",
    aligned=("a", "b", "a_descale", "b_descale", "out"),
    exclusive=("out",),
    growing=("m",),
)

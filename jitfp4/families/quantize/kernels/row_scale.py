"""The scale of each row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jitfp4.arch import Arch
from jitfp4.families.quantize.arguments import RowScaleArguments
from jitfp4.families.quantize.problem import RowScaleProblem
from jitfp4.formats import DType
from jitfp4.kernel import Kernel, Plan
from jitfp4.spec import I64, Geometry, KernelSpec, Ptr


@dataclass(frozen=True, slots=True)
class RowScaleTactic:
    """The only tactic: a CTA takes a row."""


TACTICS = (RowScaleTactic(),)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowScaleSpec(KernelSpec):
    """The encode scale of every row."""

    in_dtype: DType

    threads = 256  # of a CTA


def specialise(problem: RowScaleProblem, _tactic: RowScaleTactic) -> RowScaleSpec:
    return RowScaleSpec(in_dtype=problem.in_dtype)


def rejects(_problem: RowScaleProblem, _tactic: RowScaleTactic, _arch: Arch) -> None:
    """The kernel runs every problem."""


def geometry(problem: RowScaleProblem, _tactic: RowScaleTactic, _arch: Arch) -> Geometry:
    """A CTA for each row."""
    return Geometry(grid=(problem.m, 1, 1), block=(RowScaleSpec.threads, 1, 1))


def _bind(arguments: RowScaleArguments, _plan: Plan) -> dict[str, Any]:
    return {
        "x": arguments.a,
        "inverse_base": arguments.inverse_base,
        "encode_scale": arguments.encode,
        "decode_scale": arguments.decode,
        "k": arguments.a.shape[1],
        "x_stride": arguments.a.stride(0),
    }


KERNEL = Kernel(
    name="quantize/row_scale",
    spec=RowScaleSpec,
    params=(
        Ptr("x", "const In", "[m, k], rows x_stride elements apart"),
        Ptr("inverse_base", "const float", "[1], 1 / (448 * 6)"),
        Ptr("encode_scale", "float", "[m]"),
        Ptr("decode_scale", "float", "[m]"),
        I64("k"),
        I64("x_stride"),
    ),
    tactics=TACTICS,
    rejects=rejects,
    specialise=specialise,
    geometry=geometry,
    bind=_bind,
)

"""Two FP4 matrices by wgmma: the left one is expanded beforehand."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from jitfp4.arch import Arch
from jitfp4.families.gemm.arguments import ExpandArguments, Fp4Arguments, atoms
from jitfp4.families.gemm.expand_operation import EXPAND
from jitfp4.families.gemm.kernels import wide
from jitfp4.families.gemm.kernels.expand import dtype_of
from jitfp4.families.gemm.kernels.wide import LONG, WideSpec, WideTactic
from jitfp4.families.gemm.problem import TORCH_DTYPES, Fp4Problem
from jitfp4.kernel import Before, Kernel, Plan, Scratch
from jitfp4.layouts import round_up
from jitfp4.spec import I64, Geometry, Ptr, TensorMapParam, TileMap
from jitfp4.weight import CODE_BYTES, TILE_COLS, TILE_ROWS

_SCALE_ROWS = 128  # of a tile of scales
_SMALLEST = 32  # tile, which takes any number of rows of x
# rows of x, groups, depth, splits
_CUTS = (
    (32, 1, 2, (1, 2)),
    (32, 2, 2, (1, 2)),
    (32, 1, 4, (1, 2)),
    (32, 4, 1, (1,)),
    (64, 1, 2, (1, 2, 3, 4)),
    (64, 1, 4, (1, 2)),
    (64, 2, 1, (2, 4)),
    (64, 2, 2, (1, 2, 3, 4)),
    (64, 3, 1, (1, 2, 3, 4)),
    (64, 4, 1, (1, 2, 4)),
)
_short = (WideTactic(tile_m, groups, depth, split) for tile_m, groups, depth, splits in _CUTS for split in splits)
_divided = (WideTactic(tile_m, groups, divided=True) for tile_m, groups in ((32, 4), (64, 3), (64, 4)))
TACTICS: tuple[WideTactic, ...] = (*_short, *_divided, *LONG)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp4WideSpec(WideSpec):
    """A WideSpec whose weight is b, as the quantizers leave it."""

    packed = True

    @property
    def tile_bytes(self) -> int:
        return CODE_BYTES + _SCALE_ROWS * TILE_COLS // self.format.block

    @property
    def scale_words(self) -> int:
        """Words of 8 bytes of a tile's scales."""
        return (self.tile_bytes - CODE_BYTES) // 8


def specialise(problem: Fp4Problem, tactic: WideTactic) -> Fp4WideSpec:
    """The spec of a tactic for a problem."""
    cuts = {name: value for name, value in asdict(tactic).items() if name not in {"ctas", "common"}}
    return Fp4WideSpec(dtype=dtype_of(problem.format), out_dtype=problem.out_dtype, format=problem.format, **cuts)


def rejects(problem: Fp4Problem, tactic: WideTactic, arch: Arch) -> str | None:
    """Why a tactic cannot run a problem on an architecture."""
    return wide.rejects(problem._replace(m=max(problem.m, _SMALLEST)), tactic, arch)


def geometry(problem: Fp4Problem, tactic: WideTactic, arch: Arch) -> Geometry:
    """The geometry of a tactic for a problem."""
    return wide.launch(specialise(problem, tactic), problem, arch)


def _scratch(arguments: Fp4Arguments, plan: Plan) -> dict[str, Scratch]:
    """x, which is a expanded, and a workspace."""
    shape = plan.problem.m, round_up(plan.problem.k, TILE_COLS)
    return {"x": Scratch(shape, TORCH_DTYPES[plan.spec.dtype]), **wide.scratch(arguments, plan)}


def _expansion(arguments: Fp4Arguments, _plan: Plan, x: torch.Tensor, **_workspace: torch.Tensor) -> ExpandArguments:
    return ExpandArguments(
        a=arguments.a,
        a_descale=arguments.a_descale,
        x=x,
        block_size=arguments.block_size,
        use_8x4_sf_layout=arguments.use_8x4_sf_layout,
        enable_pdl=arguments.enable_pdl,
    )


def _bind(
    arguments: Fp4Arguments, plan: Plan, x: torch.Tensor, workspace: torch.Tensor | None = None
) -> dict[str, Any]:
    spec: Fp4WideSpec = plan.spec
    m, n, k = plan.problem.m, plan.problem.n, plan.problem.k
    return {
        "x": TileMap(x.view(torch.uint16), (spec.tile_m // spec.cluster, TILE_COLS // 2), swizzle=128),
        "weight": TileMap(arguments.b, (TILE_ROWS, TILE_COLS // 2), swizzle=64),
        "weight_scales": TileMap(atoms(arguments.b_descale, n, k // spec.format.block), (1, spec.scale_words)),
        "alpha": arguments.alpha,
        "workspace": workspace,
        "out": TileMap(arguments.out.view(torch.uint16), (spec.tile_m // spec.parts, TILE_ROWS), swizzle=128),
        "m": m,
        "n": n,
        "k": k,
    }


KERNEL = Kernel(
    name="gemm/wide_fp4",
    spec=Fp4WideSpec,
    params=(
        TensorMapParam("x", "[m, round_up(k, 128)], boxes [kCopyM, kHalf]"),
        TensorMapParam("weight", "[n, k / 2] bytes, boxes [64, 64]"),
        TensorMapParam("weight_scales", "[n / 128, 64 words for each 4 columns of scales]"),
        Ptr("alpha", "const float", "[1]; null: 1"),
        Ptr("workspace", "uint8", "of divided tiles, else null"),
        TensorMapParam("out", "[m, n], boxes [kPartM, 64]"),
        I64("m"),
        I64("n", "a multiple of 8"),
        I64("k", "a multiple of 32"),
    ),
    tactics=TACTICS,
    rejects=rejects,
    specialise=specialise,
    geometry=geometry,
    bind=_bind,
    scratch=_scratch,
    before=(Before(EXPAND, _expansion),),
)

"""mm_bf16_fp4 with more around it: SwiGLU, a residual."""

from __future__ import annotations

import pytest
import torch

from jitfp4 import ArgumentError, ArgumentTypeError, Fp4Weight, mm_bf16_fp4, prepare_fp4_weight, sim
from jitfp4.arch import Arch
from jitfp4.families.gemm.kernels import narrow
from jitfp4.families.gemm.kernels.narrow import NarrowTactic
from jitfp4.families.gemm.kernels.wide import WideTactic
from jitfp4.families.gemm.operation import MM_BF16_FP4
from jitfp4.families.gemm.problem import Problem
from jitfp4.formats import MXFP4, NVFP4, BlockFormat, DType
from jitfp4.weight import ORDERS
from tests.support.compare import poisoned
from tests.support.gemm import LINEAR, assert_gated, make_codes, make_weight

BF16, F16 = torch.bfloat16, torch.float16
SIM = [pytest.mark.sim, pytest.mark.compile]
FEATURES, K = 168, 672  # the last 64 rows of the weight, and the last 128 columns, are not whole
ALPHA = 2.0**-9 * 1.37


def gated_weight(
    block_format: BlockFormat = NVFP4, device: str = "cpu", order: str = ORDERS[0], features: int = FEATURES
) -> Fp4Weight:
    codes, scales = make_codes(2 * features, K, block_format)
    if order == ORDERS[1]:
        codes, scales = (part.roll(features, 0) for part in (codes, scales))
    if order == ORDERS[2]:
        codes, scales = (torch.stack(part.chunk(2), 1).flatten(0, 1) for part in (codes, scales))
    return prepare_fp4_weight(codes.to(device), scales.to(device), block_format.block, LINEAR, order)


def rows(m: int, k: int = K, dtype: torch.dtype = BF16, device: str = "cpu", seed: int = 1) -> torch.Tensor:
    return torch.randn(m, k, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def check_gated(m: int, block_format: BlockFormat = NVFP4, dtype: torch.dtype = BF16, device: str = "cpu") -> None:
    """In a strided, poisoned output, around which nothing is written."""
    weight, a = gated_weight(block_format, device), rows(m, dtype=dtype, device=device)
    alpha = torch.tensor([ALPHA], device=device)
    wide = poisoned((m, FEATURES + 16), dtype, device)
    before = wide.clone()
    out = wide[:, 8 : 8 + FEATURES]
    assert mm_bf16_fp4(a, weight, alpha, out=out, activation="swiglu") is out
    assert_gated(out, a, weight, alpha)
    for side in (slice(0, 8), slice(8 + FEATURES, None)):
        assert torch.equal(wide[:, side].view(torch.uint8), before[:, side].view(torch.uint8))


def check_residual(m: int, n: int, dtype: torch.dtype = BF16, device: str = "cpu") -> None:
    """The bits of the product, rounded, and of a sum after it."""
    weight, a, bias = (
        make_weight(n, K, NVFP4, device),
        rows(m, dtype=dtype, device=device),
        rows(1, n, dtype, device)[0],
    )
    alpha = torch.tensor([ALPHA], device=device)
    residual = (100 * rows(m, n + 8, dtype, device, seed=2))[:, :n]
    out = poisoned((m, n), dtype, device)
    mm_bf16_fp4(a, weight, alpha, bias, out=out, residual=residual)
    assert torch.equal(out, mm_bf16_fp4(a, weight, alpha, bias) + residual)


# ---- results ---------------------------------------------------------------------------------------------------------


@pytest.mark.one_in(3)
@pytest.mark.parametrize("block_format", BlockFormat)
@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("m", [1, 5])
def test_swiglu(device: str, block_format: BlockFormat, dtype: torch.dtype, m: int) -> None:
    check_gated(m, block_format, dtype, device)


@pytest.mark.gpu
@pytest.mark.parametrize("m", [9, 17, 33, 64, 65, 129, 300])
def test_every_number_of_rows(m: int) -> None:
    check_gated(m, device="cuda")
    check_residual(m, 328, device="cuda")


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_a_residual_is_added_after_rounding(device: str, dtype: torch.dtype) -> None:
    check_residual(3, 72, dtype, device)


def test_gates_of_any_size(device: str) -> None:
    """exp of them overflows, or is subnormal; NaN stays in its feature."""
    codes, scales = make_codes(16, 32, NVFP4)
    codes[:], scales[:] = 0x22, 0x38  # ones
    scales[3, 0] = 0x7F
    weight = prepare_fp4_weight(codes.to(device), scales.to(device), 16, LINEAR, "concatenated gate,up")
    a = torch.zeros(6, 32, dtype=BF16, device=device)
    a[:, 0] = torch.tensor([-1e18, -200.0, -90.0, 0.0, 90.0, 1e18], dtype=BF16)
    out = mm_bf16_fp4(a, weight, activation="swiglu")
    good = [feature for feature in range(8) if feature != 3]
    gate = a[:, :1].double()
    torch.testing.assert_close(
        out[:, good].double(), (gate * torch.sigmoid(gate) * gate).expand(6, 7), rtol=2**-8, atol=1e-35
    )
    assert out[:, 3].isnan().all()


# ---- weights ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_format", BlockFormat)
def test_orders_of_the_same_weight_are_one(block_format: BlockFormat) -> None:
    given, *others = (gated_weight(block_format, order=order) for order in ORDERS)
    for other in others:
        assert torch.equal(given.data, other.data)
    codes, scales = make_codes(2 * FEATURES, K, block_format)
    plain = prepare_fp4_weight(codes, scales, block_format.block, LINEAR)
    assert torch.equal(given.dequantize(), plain.dequantize())
    assert not torch.equal(given.data, plain.data)


def test_a_saved_weight_keeps_its_gates() -> None:
    for block_format in BlockFormat:
        weight = gated_weight(block_format)
        again = Fp4Weight.from_tensors(weight.tensors())
        assert again.gated
        assert torch.equal(again.dequantize(), weight.dequantize())
    assert not Fp4Weight.from_tensors(make_weight(64, 128, NVFP4).tensors()).gated


# ---- kernels ---------------------------------------------------------------------------------------------------------

NARROW = (
    NarrowTactic(8, 4, 1, 2, 2, 1),
    NarrowTactic(8, 5, 1, 2, 2, 2),
    NarrowTactic(8, 2, 2, 2, 2, 1, split=2),
    NarrowTactic(16, 4, 2, 2, 2, 1, split=3),
    NarrowTactic(32, 1, 4, 1, 2, 1),
)
WIDE = (
    WideTactic(32, 2, 2, 2),
    WideTactic(64, 1, 2, 3),
    WideTactic(64, 2, divided=True),
    WideTactic(64, 2, cluster=2),
    WideTactic(128, 2, split=2),
    WideTactic(256, 2, divided=True),
)


@pytest.mark.sim
@pytest.mark.compile
@pytest.mark.one_in(6)
@pytest.mark.parametrize("tactic", [*NARROW, *WIDE], ids=str)
def test_without_a_race(tactic: NarrowTactic | WideTactic) -> None:
    m = max(tactic.tile_m // 2 + 6, 3)
    with sim.device("sm_90a", races=True), MM_BF16_FP4.forced(tactic):
        check_gated(m, MXFP4 if tactic.tile_m == 64 else NVFP4)
        check_residual(m, 136)


@pytest.mark.parametrize("arch", [pytest.param(arch, marks=SIM) for arch in ("sm_80", "sm_100a", "sm_120a")])
def test_other_architectures(arch: str) -> None:
    with sim.device(arch, races=True):
        check_gated(5)
        check_residual(5, 72)


ONE_ROW = (
    NarrowTactic(8, 2, 1, 2, 2, 2, room=1, x_stages=8),
    NarrowTactic(8, 3, 1, 3, 3, 1, split=2, room=1, x_stages=4),
    NarrowTactic(8, 1, 4, 1, 2, 1, room=2, x_stages=4),
)


@pytest.mark.sim
@pytest.mark.compile
@pytest.mark.one_in(2)
@pytest.mark.parametrize("tactic", ONE_ROW, ids=str)
def test_room_for_few_rows(tactic: NarrowTactic) -> None:
    """More chunks than there is room for, of the weight and of x."""
    with sim.device("sm_90a", races=True), MM_BF16_FP4.forced(tactic):
        check_gated(tactic.room)
        check_residual(tactic.room, 72)


@pytest.mark.sim
@pytest.mark.compile
def test_chunks_of_x_without_barriers() -> None:
    with sim.device("sm_80", races=True), MM_BF16_FP4.forced(NarrowTactic(8, 2, 1, 1, 4, 1, x_stages=4)):
        check_residual(5, 72)


# ---- arguments -------------------------------------------------------------------------------------------------------


def test_bad_arguments_are_named() -> None:
    weight, gated, a = make_weight(2 * FEATURES, K, NVFP4), gated_weight(), rows(3)
    out, residual = torch.zeros(3, 2 * FEATURES, dtype=BF16), torch.zeros(3, 2 * FEATURES, dtype=BF16)
    for error, name, arguments in (
        (ArgumentError, "^activation: got 'swiglu'", {"activation": "swiglu"}),
        (ArgumentError, "^activation: got None", {"weight": gated}),
        (ArgumentError, "^activation: got 'gelu'", {"weight": gated, "activation": "gelu"}),
        (ArgumentError, "^bias", {"weight": gated, "activation": "swiglu", "bias": out[0]}),
        (ArgumentError, "^residual", {"weight": gated, "activation": "swiglu", "residual": out[:, :FEATURES]}),
        (ArgumentError, "^out: got shape", {"weight": gated, "activation": "swiglu", "out": out}),
        (ArgumentError, "^residual: got shape", {"residual": residual[:2]}),
        (ArgumentTypeError, "^residual: got torch.float32", {"residual": residual.float()}),
        (ArgumentError, "^residual: got strides", {"residual": torch.zeros(2 * FEATURES, 3, dtype=BF16).T}),
        (ArgumentError, "^out: got memory of residual", {"residual": out, "out": out}),
    ):
        with pytest.raises(error, match=name):
            mm_bf16_fp4(**{"a": a, "weight": weight, **arguments})  # type: ignore[arg-type]
    assert not out.any()


def test_bad_weights_are_named() -> None:
    codes, scales = make_codes(24, 64, NVFP4)
    with pytest.raises(ArgumentError, match=r"^order: got 'gate,up'"):
        prepare_fp4_weight(codes, scales, 16, LINEAR, "gate,up")
    with pytest.raises(ArgumentError, match=r"^weight: got n = 24"):
        prepare_fp4_weight(codes, scales, 16, LINEAR, ORDERS[0])
    with pytest.raises(ArgumentError, match=r"^order"):
        prepare_fp4_weight(gated_weight(), order=ORDERS[0])
    plain = make_weight(24, 64, NVFP4)
    with pytest.raises(ArgumentError, match=r"^n: got 24"):
        Fp4Weight(plain.data, None, 24, 64, NVFP4, gated=True)


def test_why_a_tactic_is_rejected() -> None:
    problem, sm_90a = Problem(DType.BF16, DType.BF16, NVFP4, 2, 64, 1024), Arch.of("sm_90a")
    one_row = NarrowTactic(8, 4, 1, 4, 2, 1, room=1, x_stages=8)
    assert "room for 1 rows" in str(narrow.rejects(problem, one_row, sm_90a))
    assert narrow.rejects(problem._replace(m=1), one_row, sm_90a) is None
    assert "without barriers" in str(narrow.rejects(problem._replace(m=1), one_row, Arch.of("sm_80")))
    with pytest.raises(ArgumentError, match=r"^x_rows"):
        narrow.specialise(problem, NarrowTactic(8, 4, 1, 4, 2, 1, room=9))

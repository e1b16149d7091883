"""fp4_experts: layers against float64, on CPU, simulator and GPU; each step of a launched layer within its bound."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from jitfp4 import ArgumentError, fp4_experts, sim
from jitfp4.arch import ARCHS, Arch
from jitfp4.families.experts.kernels.few_down import FewTactic
from jitfp4.families.experts.kernels.narrow import FOUND, NarrowTactic, geometry, rejects
from jitfp4.families.experts.operation import EXPERTS_DOWN, EXPERTS_UP
from jitfp4.families.experts.problem import Problem, Product, most_items
from jitfp4.families.experts.tables import DOWN_TABLE, UP_TABLE, forced_item_rows, item_rows_of
from jitfp4.formats import MXFP4, NVFP4, BlockFormat, DType
from tests.support.experts import (
    REAL,
    assert_layer,
    check_chain,
    dense,
    make_layer,
    make_raw,
    make_routing,
    make_x,
    prepared,
)
from tests.support.sample import SIM_ARCHS

BF16, F16 = torch.bfloat16, torch.float16
SIM = [pytest.mark.sim, pytest.mark.compile]
ACTIVATIONS = (
    ("concatenated gate,up", "swiglu"),
    ("concatenated up,gate", "swigluoai"),
    ("interleaved", "swigluoai"),
    (None, "relu2"),
)


def on(device: str, *tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.to(device) for tensor in tensors]


# ---- results ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_format", BlockFormat)
@pytest.mark.parametrize(("order", "activation"), ACTIVATIONS)
def test_the_reference_is_the_layer_in_float64(block_format: BlockFormat, order: str | None, activation: str) -> None:
    """Only h, y and the output are rounded to bf16, so an element is off by little more than its 2^-8."""
    raw = make_raw(4, 160, 96, block_format, gated=order is not None)
    x, (ids, weights) = make_x(9, 160), make_routing(9, 2, 4, skipped=True)
    out = fp4_experts(x, prepared(raw, order), ids, weights, activation=activation)
    want = dense(raw, order, x, ids, weights, activation)
    assert want.std() > 0.05
    assert (out.double() - want).norm() < 2.0**-8 * want.norm()


@pytest.mark.one_in(5)
@pytest.mark.parametrize("block_format", BlockFormat)
@pytest.mark.parametrize(("order", "activation"), ACTIVATIONS)
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_every_format_and_activation(
    device: str, block_format: BlockFormat, order: str | None, activation: str, dtype: torch.dtype
) -> None:
    layer = prepared(make_raw(4, 160, 96, block_format, gated=order is not None), order, device)
    x, ids, weights = on(device, make_x(5, 160, dtype), *make_routing(5, 2, 4, skipped=True))
    assert_layer(layer, x, ids, weights, activation=activation)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("tokens", "slots", "experts"), [(1, 1, 1), (1, 8, 16), (3, 4, 40), (20, 4, 8), (9, 32, 32)])
@pytest.mark.parametrize("item_rows", [0, 8])
def test_numbers_of_tokens_slots_and_experts(
    device: str, tokens: int, slots: int, experts: int, item_rows: int
) -> None:
    if tokens * slots > FOUND and not item_rows:
        pytest.skip("it needs a list")
    layer = make_layer(experts, 96, 32, device=device, biases=False)
    x, ids, weights = on(device, make_x(tokens, 96), *make_routing(tokens, slots, experts))
    with forced_item_rows(item_rows):
        assert_layer(layer, x, ids, weights)


@pytest.mark.parametrize("item_rows", [0, 8])
def test_one_expert_with_everything(device: str, item_rows: int) -> None:
    layer = make_layer(5, 64, 64, device=device)
    x, weights = on(device, make_x(21, 64), torch.rand(21, 1))
    with forced_item_rows(item_rows):
        assert_layer(layer, x, torch.full((21, 1), 3, dtype=torch.int32, device=device), weights)


@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("item_rows", [0, 8])
def test_skipped_slots_and_tokens_that_no_expert_takes(device: str, id_dtype: torch.dtype, item_rows: int) -> None:
    layer = make_layer(4, 64, 32, device=device)
    x, weights = make_x(6, 64).to(device), torch.rand(6, 3).to(device)
    ids = torch.tensor([[0, 1, -1], [-1, -1, -1], [4, 2, 99], [3, 3, 3], [-7, 4, 1 << 30], [-1, -1, 2]])
    ids = ids.to(id_dtype).to(device)
    if id_dtype is torch.int64:
        ids[4, 1] = 1 << 32  # whose low half is an expert
    with forced_item_rows(item_rows):
        out = assert_layer(layer, x, ids, weights)
    assert not out[[1, 4]].any()
    assert out[[0, 2, 3, 5]].any(1).all()


@pytest.mark.parametrize("item_rows", [0, 8])
def test_an_expert_map_leaves_out_other_ranks(device: str, item_rows: int) -> None:
    """Two ranks with half of the experts each make the whole layer."""
    raw = make_raw(8, 64, 32, biases=False)
    x, ids, weights = on(device, make_x(7, 64), *make_routing(7, 3, 8))
    order = "concatenated gate,up"
    whole = fp4_experts(x, prepared(raw, order, device), ids, weights).float()
    parts = []
    for rank in range(2):
        mine = slice(4 * rank, 4 * rank + 4)
        part = raw._replace(**{n: v[mine] for n, v in raw._asdict().items() if isinstance(v, torch.Tensor)})
        expert_map = torch.full((8,), -1, dtype=torch.int32, device=device)
        expert_map[mine] = torch.arange(4, dtype=torch.int32, device=device)
        layer, options = prepared(part, order, device), {"expert_map": expert_map, "residual": None}
        with forced_item_rows(item_rows):
            parts.append(assert_layer(layer, x, ids, weights, **options).float())
    assert (parts[0] + parts[1] - whole).norm() < 2.0**-7 * whole.norm()


@pytest.mark.parametrize("item_rows", [0, 8])
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_weights_on_the_input(device: str, item_rows: int, dtype: torch.dtype) -> None:
    layer = make_layer(4, 160, 64, device=device)
    x, ids, weights = on(device, make_x(10, 160, dtype), *make_routing(10, 1, 4))
    with forced_item_rows(item_rows):
        assert_layer(layer, x, ids, weights, apply_router_weight_on_input=True)


def test_without_weights_they_are_one(device: str) -> None:
    layer = make_layer(4, 64, 32, device=device)
    x, ids, _ = on(device, make_x(3, 64), *make_routing(3, 2, 4))
    assert torch.equal(assert_layer(layer, x, ids, None), assert_layer(layer, x, ids, torch.ones(3, 2, device=device)))


def test_constants_of_the_activation(device: str) -> None:
    layer = make_layer(4, 64, 32, device=device)
    x, ids, weights = on(device, make_x(3, 64), *make_routing(3, 2, 4))
    own = assert_layer(layer, x, ids, weights, swiglu_alpha=1.702, swiglu_beta=1.0, swiglu_limit=7.0)
    assert torch.equal(own, assert_layer(layer, x, ids, weights, activation="swigluoai"))
    assert not torch.equal(own, assert_layer(layer, x, ids, weights))


def test_rows_apart_in_input_and_output(device: str) -> None:
    layer = make_layer(4, 64, 32, device=device)
    x, ids, weights = on(device, make_x(5, 96), *make_routing(5, 2, 4))
    wide = torch.full((5, 128), 7.0, dtype=BF16, device=device)
    fp4_experts(x[:, 16:80], layer, ids, weights, out=wide[:, 32:96])
    assert torch.equal(wide[:, 32:96], fp4_experts(x[:, 16:80].contiguous(), layer, ids, weights))
    assert (wide[:, :32] == 7).all()
    assert (wide[:, 96:] == 7).all()


def test_no_tokens(device: str) -> None:
    layer = make_layer(4, 64, 32, device=device)
    ids, weights = on(device, *make_routing(0, 2, 4))
    assert fp4_experts(torch.empty(0, 64, dtype=BF16, device=device), layer, ids, weights).shape == (0, 64)


def test_nan_stays_in_its_token(device: str) -> None:
    layer = make_layer(2, 64, 32, device=device)
    x = make_x(4, 64).to(device)
    x[2, 5] = torch.nan
    ids = torch.tensor([[0], [1], [0], [0]], dtype=torch.int32, device=device)
    for activation in ("swiglu", "swigluoai"):
        out = fp4_experts(x, layer, ids, None, activation=activation)
        assert out[2].isnan().all()
        assert out[[0, 1, 3]].isfinite().all()


def test_a_second_call_gives_equal_bits(device: str) -> None:
    layer = make_layer(4, 96, 64, device=device)
    x, ids, weights = on(device, make_x(6, 96), *make_routing(6, 2, 4))
    first = assert_layer(layer, x, ids, weights)
    assert torch.equal(first, assert_layer(layer, x, ids, weights))
    with forced_item_rows(8):
        assert torch.equal(first, assert_layer(layer, x, ids, weights))


@pytest.mark.parametrize("slots", [0, 33])
def test_numbers_of_slots_that_cannot_be(slots: int) -> None:
    layer = make_layer(2, 64, 32)
    with pytest.raises(ArgumentError, match=r"topk_ids: got shape .*1 to 32 slots"):
        fp4_experts(make_x(3, 64), layer, torch.zeros(3, slots, dtype=torch.int32), None)


# ---- simulated -------------------------------------------------------------------------------------------------------

SIMULATED = (
    NarrowTactic(8, 4, 1, 2, 2, 1),
    NarrowTactic(8, 2, 1, 3, 3, 2),
    NarrowTactic(8, 5, 1, 2, 2, 2),
    NarrowTactic(8, 3, 2, 2, 2, 1, split=2),
    NarrowTactic(8, 1, 4, 2, 2, 1, split=3),
    NarrowTactic(16, 4, 2, 2, 2, 1),
    NarrowTactic(16, 3, 2, 2, 4, 1, split=2),
    NarrowTactic(32, 2, 2, 2, 2, 1),
    NarrowTactic(64, 1, 4, 1, 2, 1),
)


@pytest.mark.sim
@pytest.mark.compile
@pytest.mark.one_in(18)
@pytest.mark.parametrize("tactic", SIMULATED, ids=str)
@pytest.mark.parametrize("arch", SIM_ARCHS)
def test_every_cut_without_a_race(tactic: NarrowTactic, arch: str, whole: bool) -> None:
    """More chunks than stages, last tiles and chunks that are not whole, items of several sizes.

    In a sample they are many for the product up where there is a list, and for the product down where there is none.
    """
    tokens, short = 2 * tactic.tile_m - 5, 416 if whole else 32 + 128 * tactic.split
    ids, weights = make_routing(tokens, 2, 3, skipped=True)
    for item_rows, (hidden, inter) in ((tactic.tile_m, (416, short)), (0, (short, 416))):
        layer = make_layer(3, hidden, inter)
        few = tokens if item_rows else min(tokens, FOUND // 2)
        forced = EXPERTS_UP.forced(tactic), EXPERTS_DOWN.forced(tactic), forced_item_rows(item_rows)
        with sim.device(arch, races=True), forced[0], forced[1], forced[2]:
            assert_layer(layer, make_x(few, hidden), ids[:few], weights[:few])


FEW = (FewTactic(1, 4, 2, 1), FewTactic(3, 2, 3, 1, split=2), FewTactic(2, 3, 2, 1, split=3))


@pytest.mark.sim
@pytest.mark.compile
@pytest.mark.one_in(6)
@pytest.mark.parametrize("tactic", FEW, ids=str)
@pytest.mark.parametrize(("tokens", "slots", "block_format"), [(1, 8, NVFP4), (2, 3, MXFP4)])
@pytest.mark.parametrize("arch", SIM_ARCHS)
def test_all_slots_in_a_cta_without_a_race(
    tactic: FewTactic, tokens: int, slots: int, block_format: BlockFormat, arch: str
) -> None:
    layer = make_layer(9, 160, 288, block_format)
    x, (ids, weights) = make_x(tokens, 160), make_routing(tokens, slots, 9, skipped=True)
    ids[-1, 0] = -1
    with sim.device(arch, races=True), EXPERTS_DOWN.forced(tactic):
        out = assert_layer(layer, x, ids, weights)
        assert torch.equal(out, assert_layer(layer, x, ids, weights))
        ids[-1] = -1
        assert not assert_layer(layer, x, ids, weights, residual=None)[-1].any()
        assert torch.equal(assert_layer(layer, x, ids, weights, residual=x)[-1], x[-1])


@pytest.mark.sim
@pytest.mark.compile
def test_items_that_several_ctas_share() -> None:
    layer, tactic = make_layer(3, 64, 64), NarrowTactic(8, 4, 1, 2, 2, 1)
    x, (ids, weights) = make_x(40, 64), make_routing(40, 2, 3)
    forced = EXPERTS_UP.forced(tactic), EXPERTS_DOWN.forced(tactic), forced_item_rows(32)
    with sim.device("sm_90a", races=True), forced[0], forced[1], forced[2]:
        assert_layer(layer, x, ids, weights)


@pytest.mark.sim
@pytest.mark.compile
@pytest.mark.parametrize("item_rows", [0, 8])
@pytest.mark.parametrize("seed", [None, 3])
def test_dependent_launches(item_rows: int, seed: int | None) -> None:
    """Two layers behind each other: nothing is touched too early, not even what lies before the kernel ahead."""
    layer = make_layer(4, 64, 64)
    x, (ids, weights) = make_x(4, 64), make_routing(4, 2, 4, skipped=True)
    chain = sim.Chain(constant=list(layer.tensors().values()), after_unknown=True)
    with sim.device("sm_90a", races=True, chain=chain, seed=seed), forced_item_rows(item_rows):
        once = fp4_experts(x, layer, ids, weights)
        fp4_experts(once, layer, ids, weights)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("arch", [pytest.param("sm_80", marks=SIM), pytest.param("sm_120a", marks=SIM)])
@pytest.mark.parametrize("block_format", BlockFormat)
def test_other_architectures(arch: str, block_format: BlockFormat) -> None:
    layer = make_layer(4, 160, 96, block_format)
    x, (ids, weights) = make_x(40, 160), make_routing(40, 2, 4)
    with sim.device(arch, races=True):
        assert_layer(layer, x, ids, weights)
        assert_layer(layer, x[:3], ids[:3], weights[:3])


# ---- selection -------------------------------------------------------------------------------------------------------


def problem(tokens: int, item_rows: int, product: Product = Product.DOWN) -> Problem:
    return Problem(product, DType.BF16, NVFP4, tokens, 8, 128, 2048, 768, item_rows)


@pytest.mark.parametrize("name", ARCHS)
@pytest.mark.parametrize("operation", [EXPERTS_UP, EXPERTS_DOWN], ids=lambda o: o.name)
def test_every_architecture_has_a_tactic(name: str, operation: object) -> None:
    arch = Arch.of(name)
    assert operation in (EXPERTS_UP, EXPERTS_DOWN)
    for one in operation.problems(arch):  # type: ignore[attr-defined]
        assert operation.select(one, arch) in operation.candidates(one, arch)  # type: ignore[attr-defined]


def test_every_row_of_the_tables_is_met() -> None:
    for operation, table in ((EXPERTS_UP, UP_TABLE), (EXPERTS_DOWN, DOWN_TABLE)):
        met = {operation.select(one, arch) for arch in ARCHS.values() for one in operation.problems(arch)}
        assert met >= {row.tactic for row in table.rows}


def test_why_a_tactic_is_rejected() -> None:
    sm_80, sm_90a, tactic = Arch.of("sm_80"), Arch.of("sm_90a"), NarrowTactic(8, 4, 1, 4, 2, 1)
    assert "shared memory" in str(rejects(problem(8, 0), NarrowTactic(8, 4, 1, 16, 4, 1), sm_90a))
    assert "clusters" in str(rejects(problem(8, 0), replace(tactic, split=2), sm_80))
    assert "counter" in str(rejects(problem(8, 0), NarrowTactic(8, 1, 1, 4, 2, 1, split=2), sm_90a))
    assert "among" in str(rejects(problem(64, 0), tactic, sm_90a))
    assert "fewer rows" in str(rejects(problem(64, 8), replace(tactic, tile_m=16), sm_90a))
    assert "grid" in str(rejects(problem(1 << 20, 8), tactic, sm_90a))


def test_the_grid_has_room_for_any_routing() -> None:
    assert most_items(5, 128, 8) == 5
    assert most_items(512, 128, 8) == 128 + 48
    assert geometry(problem(64, 8), NarrowTactic(8, 4, 1, 4, 2, 1), Arch.of("sm_90a")).grid == (1, 32, 176)
    assert geometry(problem(64, 32), NarrowTactic(8, 4, 1, 4, 2, 1), Arch.of("sm_90a")).grid == (1, 32, 140 * 4)
    assert [item_rows_of(a, 128, 2048 * 768, Arch.of("sm_80")) for a in (16, 64, 512)] == [0, 8, 16]


# ---- on the GPU ------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize(("experts", "slots", "hidden", "inter", "block_format", "activation"), REAL)
def test_real_sizes(
    experts: int, slots: int, hidden: int, inter: int, block_format: BlockFormat, activation: str
) -> None:
    layer = make_layer(experts, hidden, inter, block_format, "cuda")
    for tokens in (1, 3, 8, 40, 200):
        x, ids, weights = on("cuda", make_x(tokens, hidden), *make_routing(tokens, slots, experts, skipped=True))
        first = assert_layer(layer, x, ids, weights, activation=activation, residual=None)
        for _ in range(3):
            assert torch.equal(first, fp4_experts(x, layer, ids, weights, activation=activation))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 8, 60])
def test_tactics_agree(tokens: int) -> None:
    """One in 16 tactics of both products: a layer of a real shape, in both modes."""
    layer = make_layer(16, 1120, 1120, device="cuda")
    x, ids, weights = on("cuda", make_x(tokens, 1120), *make_routing(tokens, 4, 16))
    arch = Arch.of_capability(*torch.cuda.get_device_capability())
    for item_rows in (0, 8, 16, 32, 64):
        one = Problem(Product.DOWN, DType.BF16, NVFP4, tokens, 4, 16, 1120, 1120, item_rows)
        if item_rows == 0 and one.assignments > FOUND:
            continue
        for operation in (EXPERTS_UP, EXPERTS_DOWN):
            problem = one if operation is EXPERTS_DOWN else one._replace(product=Product.GATED, n=2 * one.n)
            for tactic in itertools.islice(operation.candidates(problem, arch), tokens % 16, None, 16):
                with forced_item_rows(item_rows), operation.forced(tactic):
                    assert_layer(layer, x, ids, weights)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 40])
def test_in_a_graph_and_behind_each_other(tokens: int) -> None:
    """Layers that each read the one before, by dependent launch, replayed: equal to calls one by one."""
    check_chain(tokens)

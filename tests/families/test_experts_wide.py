"""fp4_experts with many rows of each expert: the products of sm_90a, their cuts, and what selection gives."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
import torch

from jitfp4 import ArgumentError, fp4_experts, sim
from jitfp4.arch import Arch
from jitfp4.families.experts.kernels.combine import CombineTactic
from jitfp4.families.experts.kernels.narrow import NarrowTactic
from jitfp4.families.experts.kernels.wide import WIDE_TACTICS, WideTactic, geometry, rejects, specialise
from jitfp4.families.experts.operation import EXPERTS_DOWN, EXPERTS_UP
from jitfp4.families.experts.problem import Problem, Product
from jitfp4.families.experts.results_operation import EXPERTS_RESULTS
from jitfp4.families.experts.tables import HOPPER_DOWN, HOPPER_UP, forced_item_rows, item_rows_of
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
from tests.support.gpu import needs_sm_90a
from tests.support.sample import some

BF16, F16 = torch.bfloat16, torch.float16
SIM = [pytest.mark.sim, pytest.mark.compile]
SM_90A = Arch.of("sm_90a")
SMALL = WideTactic(32, 16, 2, 2)


@contextmanager
def forced(tactic: WideTactic, **simulated: object) -> Iterator[None]:
    """Both products with a tactic; simulated with races unless on the GPU."""
    with ExitStack() as stack:
        stack.enter_context(forced_item_rows(tactic.tile_m))
        stack.enter_context(EXPERTS_UP.forced(tactic))
        stack.enter_context(EXPERTS_DOWN.forced(CombineTactic(128)))
        stack.enter_context(EXPERTS_RESULTS.forced(tactic))
        if simulated:
            stack.enter_context(sim.device("sm_90a", **simulated))  # type: ignore[arg-type]
        yield


# ---- simulated -------------------------------------------------------------------------------------------------------

# Tiles of the weight that are not whole, and items of several sizes: of more rows than an item has, and of fewer than
# the least product has. Halves of steps are an even number, an odd one, and one alone.
CASES = (  # tokens, hidden, inter, format, gated, dtype
    (WideTactic(64, 16, 3, 2), 70, 288, 96, NVFP4, True, BF16),
    (WideTactic(64, 16, 4), 60, 416, 352, MXFP4, True, F16),
    (WideTactic(80, 8, 4, 2), 90, 96, 160, NVFP4, False, BF16),
    (WideTactic(96, 8, 3, 2), 100, 160, 224, MXFP4, False, F16),
    (WideTactic(160, 16, 3, 2), 150, 160, 96, NVFP4, True, F16),
    (WideTactic(256, 64, 2), 220, 32, 160, MXFP4, True, BF16),
    (WideTactic(192, 32, 2, 2), 180, 64, 96, NVFP4, True, BF16),
    (WideTactic(16, 8, 4, 2), 20, 416, 64, NVFP4, True, BF16),
    (WideTactic(16, 8, 4), 20, 2080, 64, MXFP4, True, BF16),
    (WideTactic(16, 16, 5), 20, 544, 64, MXFP4, True, BF16),
    (WideTactic(32, 32, 3), 37, 64, 32, MXFP4, True, BF16),
)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("tactic", "tokens", "hidden", "inter", "block_format", "gated", "dtype"), CASES, ids=str)
@pytest.mark.parametrize("arch", [pytest.param("sm_90a", marks=SIM)])
def test_every_cut_without_a_race(
    tactic: WideTactic,
    tokens: int,
    hidden: int,
    inter: int,
    block_format: BlockFormat,
    gated: bool,
    dtype: torch.dtype,
    arch: str,
) -> None:
    layer = make_layer(3, hidden, inter, block_format, gated=gated)
    x, (ids, weights) = make_x(tokens, hidden, dtype), make_routing(tokens, 2, 3, skipped=True)
    with forced(tactic, races=True):
        assert_layer(layer, x, ids, weights, activation="swigluoai" if gated else "relu2")


# In E4M3 steps have 256 columns: an odd number of halves, an even one, and one alone, whole and not
FP8_CASES = (
    (WideTactic(32, 16, 2, 2), 37, 288, 96, NVFP4, True, BF16),
    (WideTactic(16, 8, 4), 20, 544, 64, MXFP4, True, F16),
    (WideTactic(80, 8, 4, 2), 90, 96, 160, NVFP4, False, F16),
    (WideTactic(160, 16, 3, 2), 150, 256, 96, MXFP4, False, BF16),
)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("tactic", "tokens", "hidden", "inter", "block_format", "gated", "dtype"), FP8_CASES, ids=str)
@pytest.mark.parametrize("arch", [pytest.param("sm_90a", marks=SIM)])
def test_products_of_e4m3(
    tactic: WideTactic,
    tokens: int,
    hidden: int,
    inter: int,
    block_format: BlockFormat,
    gated: bool,
    dtype: torch.dtype,
    arch: str,
) -> None:
    """Without a race; the first case has weights on the input, too, and skipped slots between two layers."""
    layer = make_layer(3, hidden, inter, block_format, gated=gated)
    x, (ids, weights) = make_x(tokens, hidden, dtype), make_routing(tokens, 2, 3, skipped=True)
    kind = "swigluoai" if gated else "relu2"
    with forced(tactic, races=True):
        assert_layer(
            layer, x, ids, weights, activation=kind, activations="fp8", apply_router_weight_on_input=dtype is BF16
        )


@pytest.mark.parametrize("arch", [pytest.param("sm_90a", marks=SIM)])
def test_the_layer_is_that_of_float64(arch: str) -> None:
    """Not only each step by itself; by the table's own choice."""
    raw, (ids, weights) = make_raw(2, 160, 96), make_routing(40, 2, 2)
    x, order = make_x(40, 160), "interleaved"
    with sim.device(arch, races=True):
        out = fp4_experts(x, prepared(raw, order), ids, weights)
    want = dense(raw, order, x, ids, weights, "swiglu")
    assert (out.double() - want).norm() < 2.0**-8 * want.norm()


@pytest.mark.parametrize("arch", [pytest.param("sm_90a", marks=SIM)])
def test_empty_experts_and_one_with_everything(arch: str) -> None:
    layer, x, weights = make_layer(5, 64, 64), make_x(75, 64), torch.rand(75, 1)
    with forced(SMALL, races=True):
        assert_layer(layer, x, torch.full((75, 1), 3, dtype=torch.int32), weights)
        assert_layer(layer, x[:1], torch.tensor([[4]]), weights[:1])
        nobody = torch.full((75, 1), -1, dtype=torch.int32)
        assert not assert_layer(layer, x, nobody, weights, residual=None).any()


@pytest.mark.parametrize("arch", [pytest.param("sm_90a", marks=SIM)])
def test_tokens_of_other_ranks_are_skipped(arch: str) -> None:
    layer, (ids, weights) = make_layer(3, 64, 32), make_routing(40, 2, 8)
    expert_map = torch.tensor([-1, 2, -1, 0, 9, 1, -1, -1], dtype=torch.int32)
    with forced(SMALL, races=True):
        out = assert_layer(layer, make_x(40, 64), ids.long(), weights, expert_map=expert_map)
    here = torch.isin(ids, torch.tensor([1, 3, 5])).any(1)
    assert 0 < here.sum() < 40
    assert torch.equal(out.any(1), here)


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("arch", [pytest.param("sm_90a", marks=SIM)])
def test_weights_on_the_input(dtype: torch.dtype, arch: str) -> None:
    x, (ids, weights) = make_x(30, 160, dtype), make_routing(30, 2, 3, skipped=True)
    with forced(SMALL, races=True):
        assert_layer(make_layer(3, 160, 64), x, ids, weights, apply_router_weight_on_input=True)


@pytest.mark.parametrize("arch", [pytest.param("sm_90a", marks=SIM)])
def test_rows_apart_in_input_and_output(arch: str) -> None:
    layer, (ids, weights) = make_layer(2, 64, 32), make_routing(20, 2, 2)
    x, wide = make_x(20, 96), torch.full((20, 128), 7.0, dtype=BF16)
    with forced(SMALL, races=True):
        fp4_experts(x[:, 16:80], layer, ids, weights, out=wide[:, 32:96])
        assert torch.equal(wide[:, 32:96], fp4_experts(x[:, 16:80].contiguous(), layer, ids, weights))
    assert (wide[:, :32] == 7).all()
    assert (wide[:, 96:] == 7).all()


@pytest.mark.parametrize(("seed", "activations"), [(None, "fp8"), (3, None), (5, "fp8")])
@pytest.mark.parametrize("arch", [pytest.param("sm_90a", marks=SIM)])
def test_dependent_launches(seed: int | None, activations: str | None, arch: str) -> None:
    """Two layers behind each other: nothing is touched too early, not even what lies before the kernel ahead."""
    layer, (ids, weights) = make_layer(3, 64, 64), make_routing(20, 2, 3, skipped=True)
    chain = sim.Chain(constant=list(layer.tensors().values()), after_unknown=True)
    with forced(SMALL, races=True, chain=chain, seed=seed):
        once = fp4_experts(make_x(20, 64), layer, ids, weights)
        fp4_experts(once, layer, ids, weights, activations=activations)


# ---- E4M3 ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_format", BlockFormat)
def test_what_e4m3_costs(block_format: BlockFormat) -> None:
    """Rows of small scales keep what they have: they are relative to the largest of their row."""
    raw, (ids, weights) = make_raw(3, 160, 96, block_format, biases=False), make_routing(9, 2, 3)
    if block_format is NVFP4:
        raw = raw._replace(w13_scales=raw.w13_scales - 14, w2_scales=raw.w2_scales - 14)
    x, order = make_x(9, 160), "concatenated gate,up"
    out = fp4_experts(x, prepared(raw, order), ids, weights, activations="fp8")
    want = dense(raw, order, x, ids, weights, "swiglu")
    error = (out.double() - want).norm() / want.norm()
    assert 0.01 < error < (0.08 if block_format is NVFP4 else 0.06)


def test_a_scale_of_nan_is_that_of_its_row() -> None:
    raw, (ids, weights) = make_raw(2, 64, 32, biases=False), make_routing(4, 1, 2)
    raw.w2_scales[0, 5, 1] = 0x7F
    layer = prepared(raw, "concatenated gate,up")
    assert layer.scale2.isnan().nonzero().tolist() == [[0, 5]]
    for activations in (None, "fp8"):
        out = fp4_experts(make_x(4, 64), layer, ids, weights, activations=activations)
        assert torch.equal(out.isnan().nonzero()[:, 1].unique(), torch.tensor([5]))


def test_e4m3_is_for_sm_90a() -> None:
    layer, (ids, weights) = make_layer(2, 64, 32), make_routing(3, 1, 2)
    with pytest.raises(ArgumentError, match=r"^activations: got 'int8'; allowed: 'fp8' or None"):
        fp4_experts(make_x(3, 64), layer, ids, weights, activations="int8")
    with pytest.raises(ArgumentError, match=r"^activations: .*None on sm_100a"), sim.device("sm_100a"):
        fp4_experts(make_x(3, 64), layer, ids, weights, activations="fp8")


# ---- selection -------------------------------------------------------------------------------------------------------


def problem(item_rows: int, tokens: int = 2048, product: Product = Product.DOWN) -> Problem:
    return Problem(product, DType.BF16, NVFP4, tokens, 8, 128, 2048, 768, item_rows)


def test_who_takes_how_many_rows() -> None:
    rows = [item_rows_of(tokens * 8, 128, 2048 * 768, SM_90A) for tokens in (128, 256, 512, 1024, 2048, 1 << 16)]
    assert rows == sorted(rows)
    for item_rows in rows:
        tactics = {EXPERTS_UP.select(problem(item_rows), SM_90A)}
        down = EXPERTS_DOWN.select(problem(item_rows), SM_90A)
        assert type(down) is (NarrowTactic if item_rows < 16 else CombineTactic)
        if item_rows >= 16:
            tactics.add(EXPERTS_RESULTS.select(problem(item_rows), SM_90A))
        assert {type(tactic) for tactic in tactics} == {NarrowTactic if item_rows < 16 else WideTactic}
        assert all(tactic.tile_m >= item_rows for tactic in tactics)
    assert isinstance(EXPERTS_UP.select(problem(256), Arch.of("sm_100a")), NarrowTactic)


def test_every_row_of_the_table_is_met() -> None:
    for operation, table in ((EXPERTS_UP, HOPPER_UP), (EXPERTS_DOWN, HOPPER_DOWN)):
        met = {operation.select(one, SM_90A) for one in operation.problems(SM_90A)}
        assert met >= {row.tactic for row in table.rows}


@pytest.mark.parametrize("product", Product)
def test_every_tactic_makes_a_kernel_that_fits(product: Product) -> None:
    for tactic in WIDE_TACTICS:
        spec = specialise(problem(tactic.tile_m, product=product), tactic)
        assert spec.shared_bytes <= SM_90A.shared_bytes
        assert spec.stages >= 2


def test_why_a_tactic_is_rejected() -> None:
    tactic = WideTactic(64, 16, 4)
    assert rejects(problem(64), tactic, SM_90A) is None
    assert "sm_90a" in str(rejects(problem(64), tactic, Arch.of("sm_100a")))
    assert "list" in str(rejects(problem(0), tactic, SM_90A))
    assert "more rows" in str(rejects(problem(80), tactic, SM_90A))


@pytest.mark.parametrize(
    ("name", "tactic"),
    [
        ("tile_m", WideTactic(72, 8, 2)),
        ("tile_m", WideTactic(272, 16, 2)),
        ("step_m", WideTactic(96, 64, 2)),
        ("step_m", WideTactic(48, 48, 2)),
        ("groups", WideTactic(64, 16, 1)),
        ("groups", WideTactic(64, 16, 7)),
        ("groups", WideTactic(256, 64, 3)),
        ("cluster", WideTactic(64, 16, 4, 3)),
    ],
    ids=str,
)
def test_impossible_cuts_name_the_field(name: str, tactic: WideTactic) -> None:
    with pytest.raises(ArgumentError, match=f"^{name}:"):
        specialise(problem(256), tactic)


def test_grids() -> None:
    assert geometry(problem(64), WideTactic(64, 16, 4), SM_90A).grid == (132, 1, 1)  # of 8 * 380 tiles
    assert geometry(problem(64, tokens=1), WideTactic(64, 16, 4), SM_90A).grid == (64, 1, 1)
    assert geometry(problem(64), WideTactic(64, 16, 3), SM_90A).block == (512, 1, 1)


# ---- on the GPU ------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize(("experts", "slots", "hidden", "inter", "block_format", "activation"), REAL)
def test_real_sizes(
    experts: int, slots: int, hidden: int, inter: int, block_format: BlockFormat, activation: str, whole: bool
) -> None:
    """Every tactic, each in its items; a second call gives the same bits."""
    needs_sm_90a()
    layer = make_layer(experts, hidden, inter, block_format, "cuda")
    for tokens in (256, 1000):
        x, routing = make_x(tokens, hidden).cuda(), make_routing(tokens, slots, experts, skipped=True)
        ids, weights = (tensor.cuda() for tensor in routing)
        for tactic, activations in itertools.product(some(6, WIDE_TACTICS, whole=whole), (None, "fp8")):
            given = {"activation": activation, "activations": activations}
            with forced(tactic):
                first = assert_layer(layer, x, ids, weights, **given)
                for _ in range(3):
                    assert torch.equal(first, fp4_experts(x, layer, ids, weights, **given))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [100, 700])
def test_in_a_graph_and_behind_each_other(tokens: int) -> None:
    """Layers that each read the one before, by dependent launch, replayed: equal to calls one by one."""
    needs_sm_90a()
    check_chain(tokens)

"""Products of experts as one stream of weights through each CTA: simulated with races on, and on the GPU."""

from __future__ import annotations

import pytest
import torch

from jitfp4 import fp4_experts, sim
from jitfp4.arch import Arch
from jitfp4.families.experts.kernels import stream
from jitfp4.families.experts.kernels.stream import STREAM_TACTICS, STREAMED, StreamTactic, geometry, rejects
from jitfp4.families.experts.operation import EXPERTS_DOWN, EXPERTS_UP
from jitfp4.families.experts.problem import Problem, Product
from jitfp4.families.experts.tables import forced_item_rows, item_rows_of
from jitfp4.formats import MXFP4, NVFP4, BlockFormat, DType
from tests.support.experts import assert_layer, make_layer, make_raw, make_routing, make_x, prepared
from tests.support.sample import SIM_ARCHS

BF16, F16 = torch.bfloat16, torch.float16
SIMULATED = (
    StreamTactic(4, 2, 1),
    StreamTactic(4, 3, 2),
    StreamTactic(2, 3, 1),
    StreamTactic(1, 3, 1),
)


@pytest.fixture
def few_ctas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each CTA has many units of work, in items and tiles that do not begin together."""
    monkeypatch.setattr(stream, "resident", lambda _tactic, _arch: 5)


@pytest.mark.sim
@pytest.mark.compile
@pytest.mark.usefixtures("few_ctas")
@pytest.mark.one_in(6)
@pytest.mark.parametrize("tactic", SIMULATED, ids=str)
@pytest.mark.parametrize("arch", SIM_ARCHS)
def test_every_cut_without_a_race(tactic: StreamTactic, arch: str) -> None:
    """Last tiles and chunks that are not whole, experts with several items, skipped slots, a token without a slot."""
    layer = make_layer(3, 288, 288)
    x, (ids, weights) = make_x(13, 288), make_routing(13, 2, 3, skipped=True)
    ids[4] = -1
    with sim.device(arch, races=True), EXPERTS_UP.forced(tactic), EXPERTS_DOWN.forced(tactic), forced_item_rows(0):
        assert not assert_layer(layer, x, ids, weights, residual=None)[4].any()


@pytest.mark.sim
@pytest.mark.compile
@pytest.mark.usefixtures("few_ctas")
@pytest.mark.one_in(2)
@pytest.mark.parametrize(("order", "activation"), [("interleaved", "swigluoai"), (None, "relu2")])
@pytest.mark.parametrize(("dtype", "block_format"), [(BF16, MXFP4), (F16, NVFP4)])
def test_formats_and_weights_on_the_input(
    order: str | None, activation: str, dtype: torch.dtype, block_format: BlockFormat
) -> None:
    layer, tactic = prepared(make_raw(4, 160, 160, block_format, gated=order is not None), order), SIMULATED[0]
    x, (ids, weights) = make_x(6, 160, dtype), make_routing(6, 3, 4, skipped=True)
    with sim.device("sm_90a"), EXPERTS_UP.forced(tactic), EXPERTS_DOWN.forced(tactic), forced_item_rows(0):
        assert_layer(layer, x, ids, weights, activation=activation)
        assert_layer(layer, x, ids, weights, activation=activation, apply_router_weight_on_input=True)


@pytest.mark.sim
@pytest.mark.compile
@pytest.mark.usefixtures("few_ctas")
def test_routings_without_a_race() -> None:
    """One expert with everything, an expert map of another rank, no assignment at all, more experts than threads, more
    warps than chunks."""
    layer, many, tactic = make_layer(3, 160, 160), make_layer(130, 64, 64), StreamTactic(4, 3, 1)
    x, weights = make_x(20, 160), torch.rand(20, 1)
    with sim.device("sm_90a", races=True), EXPERTS_UP.forced(tactic), EXPERTS_DOWN.forced(tactic), forced_item_rows(0):
        assert_layer(layer, x, torch.ones(20, 1, dtype=torch.int32), weights)
        ids = torch.arange(20, dtype=torch.int64).view(20, 1) % 7
        assert_layer(layer, x, ids, weights, expert_map=torch.tensor([-1, 2, -1, 0, 7, 1, -1], dtype=torch.int32))
        assert not assert_layer(layer, x, torch.full((20, 1), 3, dtype=torch.int32), weights).any()
        assert_layer(many, make_x(9, 64), *make_routing(9, 4, 130))


@pytest.mark.sim
@pytest.mark.compile
@pytest.mark.one_in(2)
@pytest.mark.parametrize("seed", [None, 3])
def test_dependent_launches(seed: int | None) -> None:
    """Two layers behind each other: nothing is touched too early, not even what lies before the kernel ahead."""
    layer, tactic = make_layer(4, 160, 160), StreamTactic(4, 2, 1)
    x, (ids, weights) = make_x(4, 160), make_routing(4, 2, 4, skipped=True)
    chain = sim.Chain(constant=list(layer.tensors().values()), after_unknown=True)
    forced = EXPERTS_UP.forced(tactic), EXPERTS_DOWN.forced(tactic), forced_item_rows(0)
    with sim.device("sm_90a", races=True, chain=chain, seed=seed), forced[0], forced[1], forced[2]:
        once = fp4_experts(x, layer, ids, weights)
        fp4_experts(once, layer, ids, weights)


def problem(tokens: int, item_rows: int = 0) -> Problem:
    return Problem(Product.DOWN, DType.BF16, NVFP4, tokens, 8, 128, 2048, 768, item_rows)


def test_why_a_tactic_is_rejected() -> None:
    sm_90a, tactic = Arch.of("sm_90a"), StreamTactic(4, 4, 2)
    assert rejects(problem(8), tactic, sm_90a) is None
    assert "bulk copies" in str(rejects(problem(8), tactic, Arch.of("sm_80")))
    assert "list" in str(rejects(problem(8, 8), tactic, sm_90a))
    assert str(STREAMED) in str(rejects(problem(65), tactic, sm_90a))
    assert "shared memory" in str(rejects(problem(8), StreamTactic(4, 6, 3), sm_90a))


def test_who_streams() -> None:
    """On Hopper, unless there are so few assignments that other kernels are faster, or many rows of each expert, or
    many assignments to large experts."""
    sm_90a, small, large = Arch.of("sm_90a"), 2048 * 768, 2880 * 2880
    assert [item_rows_of(n, 128, small, sm_90a) for n in (16, 17, 256, 257)] == [0, 0, 0, 16]
    assert [item_rows_of(n, 128, large, sm_90a) for n in (16, 17, 128, 129, 256, 1025)] == [0, 0, 0, 16, 16, 32]
    assert [item_rows_of(n, 512, small, sm_90a) for n in (STREAMED, STREAMED + 1)] == [0, 8]
    assert [item_rows_of(n, 128, small, arch) for n in (16, 17) for arch in (None, Arch.of("sm_100a"))] == [0, 0, 8, 8]
    for operation in (EXPERTS_UP, EXPERTS_DOWN):
        assert isinstance(operation.select(problem(8), sm_90a), StreamTactic)
        assert not isinstance(operation.select(problem(2), sm_90a), StreamTactic)
        assert isinstance(operation.select(problem(64), sm_90a), StreamTactic)


def test_no_more_ctas_than_units_of_work() -> None:
    sm_90a, tactic = Arch.of("sm_90a"), StreamTactic(4, 4, 2)
    assert geometry(problem(8), tactic, sm_90a).grid == (2 * sm_90a.num_sms, 1, 1)
    assert geometry(problem(1), tactic, sm_90a).grid == (8 * 2048 // 64, 1, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 8, 60])
def test_tactics_agree(tokens: int) -> None:
    """Every tactic, on a layer of a real shape, twice; also one expert with everything."""
    layer = make_layer(16, 2080, 1120, device="cuda")
    x, (ids, weights) = make_x(tokens, 2080).cuda(), make_routing(tokens, 8, 16, skipped=True)
    arch = Arch.of_capability(*torch.cuda.get_device_capability())
    one = Problem(Product.DOWN, DType.BF16, NVFP4, tokens, 8, 16, 2080, 1120, 0)
    for tactic in STREAM_TACTICS:
        if rejects(one, tactic, arch):
            continue
        with forced_item_rows(0), EXPERTS_UP.forced(tactic), EXPERTS_DOWN.forced(tactic):
            for chosen in (ids.cuda(), torch.full_like(ids, 5).cuda()):
                first = assert_layer(layer, x, chosen, weights.cuda(), residual=None)
                assert torch.equal(first, fp4_experts(x, layer, chosen, weights.cuda()))

"""cutlass_fused_moe: what is remembered of weights, ranks, what is refused, what an overlay leaves to FlashInfer."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import jitfp4.flashinfer
from jitfp4 import ArgumentError
from jitfp4.flashinfer import cutlass_fused_moe, expert_layers, moe
from jitfp4.formats import MXFP4, NVFP4, BlockFormat
from tests.engines.trial import Arguments
from tests.engines.values_experts import EXPERTS, HIDDEN, INTER, ORDER, moe_arguments, swiglu_constants
from tests.support.experts import dense, make_raw


@pytest.fixture(autouse=True)
def nothing_is_known() -> Iterator[None]:
    jitfp4.flashinfer.forget_weights()
    yield
    jitfp4.flashinfer.forget_weights()


def arguments(block_format: BlockFormat = MXFP4) -> Arguments:
    return moe_arguments(make_raw(EXPERTS, HIDDEN, INTER, block_format))


def run(given: Arguments, **others: Any) -> torch.Tensor:
    (out,) = cutlass_fused_moe(**given | others)
    return out


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The results of preparing, one for each time."""
    found: list[torch.Tensor] = []
    original = moe.prepare_fp4_experts

    def prepare(*args: Any, **kwargs: Any) -> Any:
        layer = original(*args, **kwargs)
        found.append(layer.w13)
        return layer

    monkeypatch.setattr(moe, "prepare_fp4_experts", prepare)
    return found


# ---- what is remembered ----------------------------------------------------------------------------------------------


def test_weights_are_prepared_once_however_they_are_viewed(prepared: list[torch.Tensor]) -> None:
    given = arguments(NVFP4)
    first = run(given)
    viewed = {
        name: given[name].view(torch.uint8).view(torch.int64) for name in ("fc1_expert_weights", "fc2_expert_weights")
    }
    assert torch.equal(run(given, **viewed), first)
    assert len(prepared) == 1


def test_weights_that_were_written_are_prepared_again(prepared: list[torch.Tensor]) -> None:
    given = arguments()
    first = run(given)
    given["fc1_expert_weights"].copy_(arguments()["fc1_expert_weights"].flip(0))
    assert not torch.equal(run(given), first)
    given["quant_scales"][1].zero_()
    assert run(given, fc2_expert_biases=None).abs().max() < 1e-30
    assert len(prepared) == 3


def test_what_is_written_through_data_needs_forget_weights() -> None:
    given = arguments()
    first = run(given)
    given["fc1_expert_weights"].data.copy_(arguments()["fc1_expert_weights"].flip(0))
    assert torch.equal(run(given), first)
    jitfp4.flashinfer.forget_weights()
    assert not torch.equal(run(given), first)


def test_a_layer_is_forgotten_with_its_weights(prepared: list[torch.Tensor]) -> None:
    given = arguments()
    run(given)
    del given
    gc.collect()
    run(arguments())
    assert len(prepared) == 2 and len(expert_layers._layers) == 1


def test_weights_of_inference_mode() -> None:
    with torch.inference_mode():
        given = arguments()
        out = run(given)
    assert torch.equal(out, run(given))


# ---- ranks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_format", BlockFormat)
def test_ranks_add_up(block_format: BlockFormat) -> None:
    """Two ranks have half of the experts each; a token's experts of other ranks add nothing."""
    raw = make_raw(2 * EXPERTS, HIDDEN, INTER, block_format, biases=False)
    ids = torch.tensor([[0, 7], [4, 5], [3, 1], [6, 2], [1, 4]], dtype=torch.int32)
    parts = []
    for rank in range(2):
        mine = slice(rank * EXPERTS, (rank + 1) * EXPERTS)
        own = raw._replace(**{k: v[mine] for k, v in raw._asdict().items() if isinstance(v, torch.Tensor)})
        given = moe_arguments(own) | {"token_selected_experts": ids, "ep_size": 2, "ep_rank": rank}
        parts.append(run(given).double())
        local = torch.where(ids // EXPERTS == rank, ids % EXPERTS, -1)
        assert torch.equal(run(given, token_selected_experts=local, ep_size=1, ep_rank=0).double(), parts[-1])
    assert parts[0][1].eq(0).all() and parts[1][2].eq(0).all()


def test_only_the_first_rank_of_columns_adds_the_second_bias() -> None:
    given = arguments()
    assert torch.equal(run(given, tp_size=2, tp_rank=1), run(given, tp_size=2, tp_rank=1, fc2_expert_biases=None))
    assert not torch.equal(run(given, tp_size=2), run(given, tp_size=2, tp_rank=1))


# ---- what is refused -------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[BlockFormat, Arguments]] = {
    "use_deepseek_fp8_block_scale": (MXFP4, {"use_deepseek_fp8_block_scale": True}),
    "use_wfp4afp8_humming": (MXFP4, {"use_wfp4afp8_humming": True}),
    "min_latency_mode": (MXFP4, {"min_latency_mode": True}),
    "backend": (MXFP4, {"backend": "cake"}),
    "input_sf": (NVFP4, {"input_sf": torch.ones(1)}),
    "input": (MXFP4, {"input": torch.zeros(5, HIDDEN)}),
    "output_dtype": (MXFP4, {"output_dtype": torch.float16}),
    "ep_rank": (MXFP4, {"ep_size": 2, "ep_rank": 2}),
    "quant_scales": (MXFP4, {"use_w4_group_scaling": False}),
    "activation_type": (MXFP4, {"activation_type": 7}),
    "swiglu_alpha": (MXFP4, {"swiglu_alpha": torch.arange(EXPERTS).float()}),
    "token_selected_experts": (MXFP4, {"token_selected_experts": torch.zeros(5, 2)}),
    "token_final_scales": (MXFP4, {"token_final_scales": torch.zeros(5, 1)}),
    "output": (MXFP4, {"output": torch.zeros(4, HIDDEN, dtype=torch.bfloat16)}),
    "fc1_expert_weights": (
        MXFP4,
        {"fc1_expert_weights": torch.zeros(EXPERTS, 2 * INTER, HIDDEN // 16, dtype=torch.int64)},
    ),
    "fc2_expert_weights": (NVFP4, {"fc2_expert_weights": torch.zeros(EXPERTS, HIDDEN, INTER // 2, dtype=torch.uint8)}),
    "fc1_expert_biases": (MXFP4, {"fc1_expert_biases": torch.zeros(EXPERTS, INTER)}),
    "fc2_expert_biases": (MXFP4, {"fc2_expert_biases": torch.zeros(EXPERTS, INTER)}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_error_names_the_argument(name: str) -> None:
    block_format, wrong = REFUSED[name]
    with pytest.raises(ArgumentError, match=f"^{name}: got"):
        run(arguments(block_format), **wrong)


def test_an_activation_has_a_number() -> None:
    with pytest.raises(ArgumentError, match=r"^activation_type: got str"):
        run(arguments(), activation_type="swiglu")


def test_scales_in_another_order_are_refused() -> None:
    raw = make_raw(EXPERTS, HIDDEN, INTER, MXFP4)
    with pytest.raises(ArgumentError, match="interleave_moe_scales_for_sm90_mixed_gemm"):
        run(arguments(), quant_scales=[raw.w13_scales, raw.w2_scales])


# ---- on a GPU --------------------------------------------------------------------------------------------------------


def on_gpu(given: Arguments) -> Arguments:
    def moved(value: Any) -> Any:
        if isinstance(value, list):
            return [moved(one) for one in value]
        return value.cuda() if isinstance(value, torch.Tensor) else value

    return {name: moved(value) for name, value in given.items()}


@pytest.mark.gpu
@pytest.mark.parametrize("block_format", BlockFormat)
def test_on_a_gpu(block_format: BlockFormat) -> None:
    raw = make_raw(EXPERTS, HIDDEN, INTER, block_format)
    given = moe_arguments(raw)
    want = dense(
        raw, ORDER, given["input"], *(given[f"token_{name}"] for name in ("selected_experts", "final_scales")), "swiglu"
    )
    out = run(on_gpu(given))
    assert (out.cpu().double() - want).norm() < 2.0**-8 * want.norm()


@pytest.mark.gpu
def test_a_graph_needs_a_call_before() -> None:
    given = on_gpu(arguments())
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(ArgumentError, match="before this capture"), torch.cuda.graph(graph):
        run(given)
    eager, graph = run(given), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(given)
    out.zero_()
    graph.replay()
    assert torch.equal(out, eager)


# ---- beside FlashInfer -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "ours"),
    [
        ({}, True),
        (swiglu_constants(), True),
        ({"use_wfp4afp8_humming": True}, False),
        ({"activation_type": 7}, False),
        ({"input": torch.zeros(5, HIDDEN // 2, dtype=torch.uint8)}, False),
        ({"use_w4_group_scaling": False, "quant_scales": []}, False),
    ],
)
def test_an_overlay_leaves_other_layers_to_flashinfer(changes: Arguments, ours: bool) -> None:
    given = arguments() | changes
    both = moe.beside(lambda **_: "theirs")
    assert (both(**given) != "theirs") == ours

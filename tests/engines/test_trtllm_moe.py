"""trtllm_fp4_block_scale_routed_moe: both forms of a routing, ranks, per-token scales, what is refused, who serves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import jitfp4.flashinfer
from jitfp4 import ArgumentError, SfLayout, nvfp4_quantize, sim
from jitfp4.flashinfer import trtllm_fp4_block_scale_routed_moe, trtllm_moe
from jitfp4.formats import MXFP4, NVFP4, BlockFormat
from tests.engines.test_fused_moe import on_gpu
from tests.engines.trial import Arguments
from tests.engines.values_experts import EXPERTS, HIDDEN, INTER, ORDER, TOKENS, activations_of, routed_arguments
from tests.support.experts import dense, make_raw, make_x

OTHERS = ("routing_bias", "n_group", "topk_group", "routed_scaling_factor")


@pytest.fixture(autouse=True)
def nothing_is_known() -> Iterator[None]:
    jitfp4.flashinfer.forget_weights()
    yield
    jitfp4.flashinfer.forget_weights()


def arguments(kind: str = "nvfp4", block_format: BlockFormat = NVFP4) -> Arguments:
    raw = make_raw(EXPERTS, HIDDEN, INTER, block_format, biases=kind != "nvfp4")
    return routed_arguments(raw, activations_of(kind), "swiglu")


def run(given: Arguments, **others: Any) -> torch.Tensor:
    (out,) = trtllm_fp4_block_scale_routed_moe(**dict.fromkeys(OTHERS) | given | {"output": None} | others)
    return out


def packed(ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """As trtllm_moe_pack_topk_ids_weights() of vLLM."""
    return (ids << 16) | weights.bfloat16().view(torch.int16).int() & 0xFFFF


def test_a_packed_routing_is_that_of_a_pair() -> None:
    given = arguments()
    ids, weights = given["topk_ids"]
    ids[0, 1] = -1
    want = run(given, topk_ids=(ids, weights.bfloat16()))
    assert torch.equal(run(given, topk_ids=packed(ids, weights)), want)
    assert torch.equal(run(given, topk_ids=(ids, weights.bfloat16().float())), want)


def test_ranks_add_up() -> None:
    given = arguments("bf16", MXFP4)
    whole = run(given).double()
    found = torch.zeros_like(whole)
    for rank in range(2):
        mine = slice(2 * rank, 2 * rank + 2)
        part = {n: v[mine].clone() for n, v in given.items() if n.startswith("gemm") and isinstance(v, torch.Tensor)}
        found += run(given, **part, local_expert_offset=2 * rank, local_num_experts=2).double()
    assert (found - whole).norm() < 2.0**-7 * whole.norm()


def test_a_scale_for_each_token() -> None:
    raw, x = make_raw(EXPERTS, HIDDEN, INTER, biases=False), make_x(TOKENS, HIDDEN)
    codes, scales, of_tokens = nvfp4_quantize(
        x, torch.tensor([1 / 2688.0]), SfLayout.layout_linear, per_token_activation=True
    )
    given = routed_arguments(raw, activations_of("nvfp4"), "swiglu")
    given["output1_scale_gate_scalar"] = raw.w13_alpha
    given["output1_scale_scalar"] = 3 * given["output1_scale_gate_scalar"]
    out = run(given, hidden_states=codes, hidden_states_scale=scales, per_token_scale=of_tokens)
    want = dense(raw, ORDER, x, *given["topk_ids"], "swiglu")
    assert (out.double() - want).norm() < 0.2 * want.norm()  # what FP4 makes of x


REFUSED: dict[str, Arguments] = {
    "routing_bias": {"routing_bias": torch.zeros(EXPERTS)},
    "do_finalize": {"do_finalize": False},
    "routed_scaling_factor": {"routed_scaling_factor": 2.5},
    "topk_ids": {"topk_ids": torch.zeros(TOKENS, 3, dtype=torch.int32)},
    "hidden_states": {"hidden_states": torch.zeros(TOKENS, HIDDEN)},
    "hidden_states_scale": {"hidden_states_scale": None},
    "per_token_scale": {"per_token_scale": torch.ones(TOKENS + 1)},
    "gemm1_weights": {"intermediate_size": INTER // 2},
    "gemm2_weights_scale": {"gemm2_weights_scale": torch.zeros(EXPERTS, HIDDEN, 1, dtype=torch.uint8)},
    "gemm1_bias": {"gemm1_bias": torch.zeros(EXPERTS, 2 * INTER)},
    "gemm1_alpha": {"gemm1_alpha": torch.arange(EXPERTS).float()},
    "gemm1_beta": {"gemm1_beta": torch.ones(EXPERTS)},
    "output2_scale_scalar": {"output2_scale_scalar": torch.ones(EXPERTS + 1)},
    "activation_type": {"activation_type": 10},
    "local_expert_offset": {"local_expert_offset": 1},
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_error_names_the_argument(name: str) -> None:
    with pytest.raises(ArgumentError, match=f"^{name}: got"):
        run(arguments(), **REFUSED[name])


@pytest.mark.parametrize(
    "arch", [pytest.param(a, marks=[pytest.mark.sim, pytest.mark.compile]) for a in ("sm_90a", "sm_100a")]
)
def test_simulated(arch: str) -> None:
    raw = make_raw(2, 128, 64, biases=False)
    x = activations_of("nvfp4", 3, 128)
    given = routed_arguments(raw, x, "swigluoai")
    with sim.device(arch, races=True):
        out = run(given)
    want = dense(raw, ORDER, x.exact, *given["topk_ids"], "swigluoai")
    assert (out.double() - want).norm() < 2.0**-8 * want.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["nvfp4", "bf16", "mxfp8"])
def test_on_a_gpu_in_a_graph(kind: str) -> None:
    raw = make_raw(EXPERTS, HIDDEN, INTER, NVFP4 if kind == "nvfp4" else MXFP4, biases=kind != "nvfp4")
    x = activations_of(kind)
    given = routed_arguments(raw, x, "swiglu")
    want = dense(raw, ORDER, x.exact, *given["topk_ids"], "swiglu")
    moved = on_gpu(given) | {"topk_ids": tuple(one.cuda() for one in given["topk_ids"])}
    eager = run(moved)
    assert (eager.cpu().double() - want).norm() < 2.0**-8 * want.norm()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(moved)
    out.zero_()
    graph.replay()
    assert torch.equal(out, eager)


def test_flashinfer_serves_where_it_has_kernels() -> None:
    both = trtllm_moe.beside(lambda **_: "theirs")
    given = dict.fromkeys(OTHERS) | arguments() | {"output": None}
    assert both(**given) != "theirs"

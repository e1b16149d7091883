"""Decode attention: the reference against attention written out, and the kernel against both."""

from __future__ import annotations

import contextlib

import pytest
import torch

from jitfp4 import ArgumentError, sim
from jitfp4.arch import Arch
from jitfp4.families.attention.kernels.decode import KERNEL, DecodeTactic
from jitfp4.families.attention.operation import ATTENTION
from jitfp4.families.attention.problem import HEAD_DIMS, CacheFormat, Pages, Problem
from jitfp4.formats import DType
from tests.support.attention import NAN_BYTE, Case, counted
from tests.support.sample import SIM_ARCHS

CASES = {
    "hnd": {},
    "nhd": {"kv_layout": "NHD"},
    "one_token": {"lengths": (1,), "kv_heads": 1},
    "empty_requests": {"lengths": (0, 40, 0)},
    "page_1": {"page": 1, "lengths": (21, 5)},
    "page_3": {"page": 3, "group": 5},
    "page_8_interleaved": {"page": 8, "v_scale_layout": "interleaved4", "kv_layout": "NHD"},
    "page_64_interleaved": {"page": 64, "v_scale_layout": "interleaved4", "lengths": (130, 1)},
    "page_20": {"page": 20, "v_scale_layout": "interleaved4", "group": 7},
    "page_128": {"page": 128, "group": 1, "with_sinks": True},
    "strided_pages": {"extra_page_bytes": 64, "page": 32},
    "d_64": {"head_dim": 64, "kv_heads": 3},
    "d_256": {"head_dim": 256, "kv_heads": 1},
    "d_80": {"head_dim": 80, "kv_layout": "NHD", "with_sinks": True, "window_left": 30},
    "d_96": {"head_dim": 96, "page": 64, "q_lens": 4, "group": 5},
    "d_112": {"head_dim": 112, "page": 3, "extra_page_bytes": 64, "missing": ((0, 0, 1, -1),)},
    "d_192_interleaved": {"head_dim": 192, "kv_heads": 1, "v_scale_layout": "interleaved4"},
    "group_16": {"group": 16, "kv_heads": 1, "window_left": 30, "with_sinks": True},
    "group_17": {"group": 17, "kv_heads": 2, "q_lens": 2, "window_left": 30},
    "group_128": {"group": 128, "kv_heads": 1, "lengths": (40, 3), "head_dim": 64, "with_sinks": True},
    "q_len_4": {"q_lens": 4, "lengths": (60, 3), "group": 5},
    "q_len_8": {"q_lens": 8, "lengths": (90,), "group": 16, "kv_heads": 1, "window_left": 20},
    "ragged": {"q_lens": (3, 0, 5, 1), "lengths": (40, 50, 2, 0), "window_left": 20},
    "steep": {"lengths": (300, 90), "kv_heads": 1, "steep": 8.0, "spikes": True},
    "two_tables": {"shared": False, "missing": ((0, 0, 1, -1), (1, 1, 2, 10**6))},
    "missing_pages": {"page": 4, "missing": ((0, 0, 1, -1), (0, 1, 1, -1), (1, 0, 2, 2**30), (1, 1, 2, 2**30))},
    "fp16": {"q_dtype": torch.float16},
    "cache_bf16": {"cache": torch.bfloat16, "kv_layout": "NHD"},
    "cache_bf16_d_256": {"cache": torch.bfloat16, "head_dim": 256, "kv_heads": 1, "page": 5},
    "cache_fp16_d_64": {"cache": torch.float16, "q_dtype": torch.float16, "head_dim": 64, "group": 16},
    "cache_e4m3": {"cache": torch.float8_e4m3fn, "missing": ((0, 0, 1, -1),)},
    "cache_e4m3_d_64": {"cache": torch.float8_e4m3fn, "head_dim": 64, "page": 64, "q_dtype": torch.float16},
    "cache_e4m3_d_80": {"cache": torch.float8_e4m3fn, "head_dim": 80, "kv_layout": "NHD"},
    "cache_bf16_d_112": {"cache": torch.bfloat16, "head_dim": 112, "page": 5, "group": 16},
    "cache_fp16_d_192": {"cache": torch.float16, "q_dtype": torch.float16, "head_dim": 192, "kv_heads": 1},
    "cache_e4m3_d_256": {
        "cache": torch.float8_e4m3fn,
        "head_dim": 256,
        "kv_heads": 1,
        "q_dtype": torch.float8_e4m3fn,
        "out_dtype": torch.bfloat16,
    },
    "e4m3": {"q_dtype": torch.float8_e4m3fn, "out_dtype": torch.bfloat16},
    "e4m3_out": {"out_dtype": torch.float8_e4m3fn},
}
# Weights are float16 and outputs rounded; E4M3 has four significant bits.
_BOUND = {torch.float16: 1e-3, torch.bfloat16: 4e-3, torch.float8_e4m3fn: 5e-2}
_FLOAT64 = {torch.float16: 4e-4, torch.bfloat16: 3e-3, torch.float8_e4m3fn: 5e-2}


def _shared(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """The case by a kernel in which all CTAs share all items, which the table has for more work than a case's."""
    for warps in (8, 4, 2):
        with contextlib.suppress(ArgumentError), ATTENTION.forced(DecodeTactic(warps, 2, 1)):
            return case.run()
    raise AssertionError("no tactic fits")


@pytest.mark.parametrize("name", CASES)
def test_the_reference_is_attention(name: str) -> None:
    case = Case(**CASES[name])
    case.check(case.run(), _FLOAT64)


@pytest.mark.sim
@pytest.mark.compile
@pytest.mark.one_in(8)
@pytest.mark.parametrize("name", CASES)
def test_the_simulated_kernel_is_attention(name: str) -> None:
    case = Case(**CASES[name])
    with sim.device("sm_90a"):
        case.check(_shared(case), _BOUND)


@pytest.mark.sim
@pytest.mark.compile
@pytest.mark.one_in(2)
@pytest.mark.parametrize("arch", SIM_ARCHS)
@pytest.mark.parametrize("name", ["hnd", "page_8_interleaved", "cache_bf16", "cache_e4m3", "d_80", "cache_bf16_d_112"])
def test_no_races(name: str, arch: str) -> None:
    case = Case(**CASES[name])
    with sim.device(arch, races=True):
        case.check(case.run(), _BOUND)
        case.check(_shared(case), _BOUND)


def check_table_ends(arch: str, cache: torch.dtype = torch.uint8) -> None:
    """Of a request that says to be longer than its row of the page table, what the table has is there."""
    case = Case(lengths=(64, 33), kv_heads=1, group=2, cache=cache)
    case.block_tables = case.block_tables[:, : 64 // case.page].contiguous()
    case.seq_lens = torch.tensor([100, 33], dtype=torch.int32)
    with sim.device(arch), ATTENTION.forced(DecodeTactic(2, 2, 1)):
        case.check(case.run(), _BOUND)


@pytest.mark.sim
@pytest.mark.compile
def test_the_page_table_ends_a_request() -> None:
    check_table_ends("sm_90a")


@pytest.mark.sim
@pytest.mark.compile
def test_kernels_of_any_size_share_a_workspace() -> None:
    case = Case(kv_heads=8, kv_layout="NHD", lengths=(300, 70))
    case.workspace[:] = NAN_BYTE
    for tactic in (DecodeTactic(8, 3, 1, 8), DecodeTactic(4, 3, 3)):  # the first adds up groups of parts
        with sim.device("sm_90a"), ATTENTION.forced(tactic), counted():
            case.check(case.run(), _BOUND)


@pytest.mark.sim
@pytest.mark.compile
@pytest.mark.one_in(2)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_parts_of_many_ctas_are_added_up(head_dim: int) -> None:
    """Ten of each item, more than are read at a time, and of fewer dimensions than a warp reads at once, or more."""
    case = Case(lengths=(300,), kv_heads=1, head_dim=head_dim)
    with sim.device("sm_90a", races=True), ATTENTION.forced(DecodeTactic(1, 2, 1)):
        case.check(case.run(), _BOUND)


@pytest.mark.sim
@pytest.mark.compile
def test_warps_add_up_items_while_others_go_on() -> None:
    """A CTA of four warps takes several whole items, some of them shorter than it has warps."""
    case = Case(lengths=(130, 40, 5, 0, 100) * 30, kv_heads=4, page=16)
    with sim.device("sm_90a", races=True), ATTENTION.forced(DecodeTactic(4, 3, 1)):
        case.check(case.run(), _BOUND)


CLUSTERS = (DecodeTactic(2, 2, 1, cluster=2), DecodeTactic(1, 3, 1, cluster=8), DecodeTactic(2, 2, 1, cluster=1))
"""Of two query rows and more, and of one; items that have fewer tiles than the cluster has warps, and more."""


@pytest.mark.sim
@pytest.mark.compile
@pytest.mark.one_in(16)
@pytest.mark.parametrize("tactic", CLUSTERS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_a_cluster_takes_an_item(name: str, tactic: DecodeTactic) -> None:
    case = Case(**CASES[name])
    with sim.device("sm_90a", races=True), ATTENTION.forced(tactic):
        case.check(case.run(), _BOUND)


@pytest.mark.sim
@pytest.mark.compile
@pytest.mark.one_in(2)
@pytest.mark.parametrize("arch", SIM_ARCHS)
@pytest.mark.parametrize("options", [{}, {"q_lens": 8, "group": 16}, {"q_lens": (3, 0, 5, 1), "window_left": 20}])
def test_the_parts_of_a_cluster_are_added_up(arch: str, options: dict[str, object]) -> None:
    """Long items, one after the other where a request has more rows than one; nobody writes the workspace."""
    lengths = (300, 0, 70, 33) if isinstance(options.get("q_lens"), tuple) else (300, 70)
    case = Case(**{"lengths": lengths, "kv_heads": 2, **options})
    case.workspace[:] = NAN_BYTE
    for tactic in (DecodeTactic(2, 2, 1, cluster=4), DecodeTactic(2, 2, 1, head_warps=2, cluster=2)):
        with sim.device(arch, races=True), ATTENTION.forced(tactic), counted():
            case.check(case.run(), _BOUND)
        assert (case.workspace == NAN_BYTE).all()


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_the_kernel_is_attention(name: str) -> None:
    case = Case(**CASES[name], device="cuda")
    case.check(case.run(), _BOUND)


@pytest.mark.gpu
@pytest.mark.parametrize("kv_layout", ["HND", "NHD"])
def test_every_tactic_is_attention_on_one_workspace(kv_layout: str) -> None:
    case = Case(lengths=(5000, 0, 700, 33), kv_heads=8, kv_layout=kv_layout, device="cuda")
    case.workspace[:] = NAN_BYTE
    packed, tiles, bf16 = kv_layout == "HND", 256, DType.BF16
    problem = Problem(CacheFormat.NVFP4, bf16, bf16, 128, 8, 8, False, Pages.HALVES, packed, False, tiles, 32 * tiles)
    for tactic in KERNEL.candidates(problem, Arch.of_capability(*torch.cuda.get_device_capability())):
        with ATTENTION.forced(tactic):
            case.check(case.run(), _BOUND)


@pytest.mark.gpu
@pytest.mark.parametrize("kv_layout", ["HND", "NHD"])
def test_a_graph_follows_the_lengths(kv_layout: str) -> None:
    case = Case(lengths=(3000, 70, 500, 33), kv_heads=8, kv_layout=kv_layout, device="cuda")
    case.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = case.run()
    for lengths in ((3000, 70, 500, 33), (1, 69, 0, 32), (2999, 0, 499, 1)):
        case.lengths = lengths
        case.seq_lens.copy_(torch.tensor(lengths))
        graph.replay()
        torch.cuda.synchronize()
        case.check((out, lse), _BOUND)


@pytest.mark.gpu
def test_repeated_calls_give_the_same_bits() -> None:
    case = Case(lengths=(5000, 1, 900), kv_heads=8, device="cuda")
    first = case.run()
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(case.run(), first, strict=True))

"""Attention of many query tokens: the reference against attention written out, and the kernel against both."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from jitfp4 import nvrtc, sim
from jitfp4.arch import ARCHS
from jitfp4.families.attention.arguments import Arguments
from jitfp4.families.attention.kernels.decode import DecodeTactic
from jitfp4.families.attention.kernels.prefill import KERNEL as KERNEL_PREFILL
from jitfp4.families.attention.kernels.prefill import PrefillTactic, rejects, specialise
from jitfp4.families.attention.operation import ATTENTION
from jitfp4.families.attention.problem import HEAD_DIMS, CacheFormat, Pages, Problem, power_of_two
from jitfp4.formats import DType
from tests.support.attention import SCATTERED, Case
from tests.support.sass import disassemble

_SMALL: dict[str, Any] = {"kv_heads": 1, "group": 2}
CASES: dict[str, dict[str, Any]] = {
    # More rows than a block has, blocks of several requests and heads, one without queries and one without tokens.
    "ragged_interleaved": {
        "lengths": (90, 33, 0, 20),
        "q_lens": (80, 9, 3, 0),
        "group": 2,
        "page": 12,
        "v_scale_layout": "interleaved4",
        "with_sinks": True,
        "window_left": 20,
        "kv_layout": "NHD",
    },
    "missing_pages": {
        "lengths": (100, 33),
        "q_lens": (20, 40),
        "kv_heads": 1,
        "group": 5,
        "page": 5,
        "missing": ((0, 0, 1, -1), (1, 0, 0, 2**30)),
    },
    "group_71": {"lengths": (70,), "q_lens": (3,), "kv_heads": 1, "group": 71, "window_left": 40},
    "all_tokens": _SMALL
    | {"lengths": (70, 3), "q_lens": (33, 1), "causal": False, "with_sinks": True, "window_left": 50},
    "two_tables": _SMALL
    | {
        "lengths": (140,),
        "q_lens": (9,),
        "head_dim": 64,
        "shared": False,
        "page": 128,
        "v_scale_layout": "interleaved4",
        "extra_page_bytes": 64,
    },
    "d_256": _SMALL | {"lengths": (40,), "q_lens": (40,), "head_dim": 256, "out_dtype": torch.float8_e4m3fn},
    "d_80": _SMALL | {"lengths": (70,), "q_lens": (33,), "head_dim": 80, "page": 5, "window_left": 40},
    "d_96_e4m3": _SMALL
    | {"cache": torch.float8_e4m3fn, "lengths": (70,), "q_lens": (33,), "head_dim": 96, "kv_layout": "NHD"},
    "d_112": _SMALL | {"lengths": (70,), "q_lens": (33,), "head_dim": 112, "with_sinks": True},
    "d_112_bf16": _SMALL | {"cache": torch.bfloat16, "lengths": (70,), "q_lens": (33,), "head_dim": 112},
    "d_192_interleaved": _SMALL
    | {"lengths": (70,), "q_lens": (33,), "head_dim": 192, "v_scale_layout": "interleaved4"},
    "cache_bf16": _SMALL
    | {"cache": torch.bfloat16, "lengths": (80, 3), "q_lens": (10, 9), "missing": ((0, 0, 1, -1),)},
    "cache_fp16_d_256": _SMALL
    | {"cache": torch.float16, "q_dtype": torch.float16, "lengths": (40,), "q_lens": (9,), "head_dim": 256},
    "cache_e4m3": _SMALL
    | {
        "cache": torch.float8_e4m3fn,
        "q_dtype": torch.float8_e4m3fn,
        "out_dtype": torch.bfloat16,
        "lengths": (40,),
        "q_lens": (20,),
        "head_dim": 64,
        "page": 1,
        "missing": ((0, 0, 3, -1),),
    },
    "many_requests": _SMALL
    | {
        "cache": torch.float8_e4m3fn,
        "q_dtype": torch.float8_e4m3fn,
        "out_dtype": torch.bfloat16,
        "head_dim": 64,
        "lengths": (41, *(1 + at % 5 for at in range(36))),
        "q_lens": (20, *(1,) * 36),
    },
    "many_requests_interleaved": _SMALL
    | {
        "v_scale_layout": "interleaved4",
        "lengths": (41, *(1 + at % 5 for at in range(36))),
        "q_lens": (20, *(1,) * 36),
    },
    "many_tiles": _SMALL | {"lengths": (400,), "q_lens": (9,), "page": 5},
    "many_tiles_e4m3": _SMALL
    | {
        "cache": torch.float8_e4m3fn,
        "q_dtype": torch.float8_e4m3fn,
        "out_dtype": torch.bfloat16,
        "head_dim": 64,
        "lengths": (400,),
        "q_lens": (20,),
        "page": 5,
        "shared": False,
        "missing": tuple((0, at % 2, at, -1) for at in range(0, 80, 3)),
        "spikes": True,
    },
    "scattered": SCATTERED,
    "scattered_interleaved": SCATTERED
    | {
        "page": 4,
        "v_scale_layout": "interleaved4",
        "kv_layout": "NHD",
        "missing": tuple((0, at % 2, at, -1) for at in range(1, 35, 3)),
    },
    "scattered_bf16": SCATTERED | {"cache": torch.bfloat16, "steep": 128.0},
    "scattered_e4m3": SCATTERED
    | {
        "cache": torch.float8_e4m3fn,
        "q_dtype": torch.float8_e4m3fn,
        "out_dtype": torch.bfloat16,
        "head_dim": 64,
        "spikes": False,
    },
}
# Weights are 16-bit floats and outputs rounded; E4M3 has four significant bits.
_BOUND = {torch.float16: 1e-3, torch.bfloat16: 4e-3, torch.float8_e4m3fn: 5e-2}
_FLOAT64 = {torch.float16: 4e-4, torch.bfloat16: 3e-3, torch.float8_e4m3fn: 5e-2}


@pytest.mark.parametrize("name", CASES)
def test_the_reference_is_attention(name: str) -> None:
    case = Case(**CASES[name])
    case.check(case.run_context(), _FLOAT64)


# The cuts that the table gives, whichever kernel an architecture prefers.
_TACTICS = {64: PrefillTactic(8, 32, 64, 1), 128: PrefillTactic(8, 32, 32, 1), 256: PrefillTactic(8, 16, 32, 1)}
_OTHERS = {
    **dict.fromkeys(("group_71", "d_96_e4m3", "cache_bf16", "scattered_bf16"), PrefillTactic(8, 32, 64, 1)),
    "all_tokens": PrefillTactic(8, 16, 64, 1),
    "many_tiles": PrefillTactic(4, 16, 32, 1),
    "d_256": PrefillTactic(4, 16, 16, 1),
}


def run(name: str, **changes: Any) -> tuple[Case, tuple[torch.Tensor, torch.Tensor]]:
    """A case by this kernel, into poisoned outputs; one of them with a factor below zero."""
    case = Case(**CASES[name], **changes)
    if name == "all_tokens":
        case.bmm1 = -case.bmm1
    out = torch.full(case.query.shape, torch.nan, device=case.device).to(case.out_dtype or case.query.dtype)
    with ATTENTION.forced(_OTHERS.get(name, _TACTICS[power_of_two(case.head_dim)])):
        return case, case.run_context(out=out, out_dtype=None)


@pytest.mark.sim
@pytest.mark.compile
@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", CASES)
def test_the_simulated_kernel_is_attention_without_races(name: str) -> None:
    with sim.device("sm_90a", races=True):
        case, got = run(name)
    case.check(got, _BOUND)


def check_table_ends(arch: str) -> None:
    """Of a request that says to be longer than its row of the page table, what the table has is there."""
    case = Case(lengths=(40,), q_lens=(20,), kv_heads=1, group=2, page=20)
    case.block_tables, case.seq_lens = case.block_tables[:, :2].contiguous(), torch.tensor([100], dtype=torch.int32)
    with sim.device(arch), ATTENTION.forced(_TACTICS[128]):
        case.check(case.run_context(), _BOUND)


@pytest.mark.sim
@pytest.mark.compile
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_the_page_table_ends_a_request(arch: str) -> None:
    check_table_ends(arch)


@pytest.mark.sim
@pytest.mark.compile
@pytest.mark.parametrize("name", ["ragged_interleaved", "cache_e4m3"])
def test_the_conversions_of_blackwell(name: str) -> None:
    with sim.device("sm_100a", races=True):
        case, got = run(name)
    case.check(got, _BOUND)


def _problem_of(q_lens: tuple[int, ...], group: int, *, causal: bool) -> Problem:
    """What selection sees of a call with two KV heads."""
    side = torch.empty(1, 2, 16, 64, dtype=torch.bfloat16)
    arguments = dict.fromkeys(Arguments._fields) | {
        "query": torch.empty(sum(q_lens), 2 * group, 64, dtype=torch.bfloat16),
        "key_cache": side,
        "value_cache": side,
        "block_tables": torch.empty(len(q_lens), 1),
        "seq_lens": torch.empty(len(q_lens)),
        "out": side,
        "q_len_per_req": max(q_lens),
        "causal": causal,
        "max_tokens": 1,
        "hnd": True,
        "soft_cap": 0.0,
    }
    return ATTENTION.problem(Arguments(**arguments))


def test_what_counts_as_few_rows() -> None:
    for q_len, group, causal, rows in (
        (1, 8, False, 8),
        (8, 1, True, 8),
        (8, 16, True, 16),
        (1, 128, True, 16),
        (2, 65, True, 256),
        (2, 1, False, 64),
        (9, 7, True, 64),
        (9, 8, True, 128),
        (9, 15, True, 256),
        (100, 16, False, 2048),
        (1000, 16, False, 2048),
    ):
        problem = _problem_of((q_len, 1), group, causal=causal)
        assert (problem.rows, problem.causal) == (rows, causal or q_len == 1)
        assert (problem.blocks == 0) == (rows <= 16)


def _problem(**changes: Any) -> Problem:
    problem = Problem(
        cache=CacheFormat.NVFP4,
        q_dtype=DType.BF16,
        out_dtype=DType.BF16,
        head_dim=128,
        rows=256,
        heads=8,
        interleaved=False,
        pages=Pages.WHOLE,
        packed=True,
        two_tables=False,
        tiles=32,
        units=1024,
        blocks=1024,
    )
    return problem._replace(**changes)


@pytest.mark.parametrize("arch", ARCHS)
def test_few_rows_are_decoded_and_many_are_not(arch: str) -> None:
    for rows in (8, 16):
        assert isinstance(ATTENTION.select(_problem(rows=rows, blocks=0), ARCHS[arch]), DecodeTactic)
    for rows in (64, 128, 256):
        for cache in CacheFormat:
            for head_dim in HEAD_DIMS:
                problem = _problem(rows=rows, cache=cache, head_dim=head_dim)
                assert not isinstance(ATTENTION.select(problem, ARCHS[arch]), DecodeTactic)
                assert list(KERNEL_PREFILL.candidates(problem, ARCHS[arch]))


@pytest.mark.compile
@pytest.mark.one_in(100)
@pytest.mark.parametrize(
    ("arch", "tactic", "cache", "head_dim"),
    [
        (arch.name, tactic, cache, head_dim)
        for arch, cache, head_dim in itertools.product(ARCHS.values(), CacheFormat, HEAD_DIMS)
        for tactic in KERNEL_PREFILL.candidates(_problem(cache=cache, head_dim=head_dim), arch)
    ],
    ids=str,
)
def test_what_is_not_rejected_stays_in_registers(
    arch: str, tactic: PrefillTactic, cache: CacheFormat, head_dim: int
) -> None:
    if not nvrtc.supports(ARCHS[arch]):
        pytest.skip("this NVRTC does not know it")
    source = KERNEL_PREFILL.render(specialise(_problem(cache=cache, head_dim=head_dim), tactic), ARCHS[arch])
    code = disassemble(nvrtc.compile_cubin(source, ARCHS[arch], symbol=KERNEL_PREFILL.symbol))
    assert not [line for line in code if line.startswith(("LDL", "STL"))]


def test_why_a_tactic_is_rejected() -> None:
    for head_dim, tactic in ((192, PrefillTactic(8, 32, 64, 1)), (256, PrefillTactic(8, 32, 32, 1))):
        assert "registers" in str(rejects(_problem(head_dim=head_dim), tactic, ARCHS["sm_80"]))


@pytest.mark.parametrize("q_lens", [(2,) * 9, (64,) * 5, (65, 0, 1), (1000, 3)])
@pytest.mark.parametrize("group", [1, 5, 16])
def test_there_is_a_cta_for_every_block_of_rows(q_lens: tuple[int, ...], group: int) -> None:
    problem = _problem_of(q_lens, group, causal=False)
    for tactic in (_TACTICS[64], _TACTICS[128]):
        rows = tactic.warps * tactic.warp_rows
        blocks = 2 * sum(-(-q_len * group // rows) for q_len in q_lens)
        ctas = KERNEL_PREFILL.geometry(problem, tactic, ARCHS["sm_90a"]).grid[0]
        assert blocks <= ctas
        assert ctas <= 4 * (blocks + 2 * len(q_lens)), "not many in vain"


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_the_kernel_is_attention(name: str) -> None:
    case, got = run(name, device="cuda")
    case.check(got, _BOUND)


@pytest.mark.gpu
@pytest.mark.parametrize("cache", [torch.uint8, torch.float8_e4m3fn, torch.bfloat16])
def test_long_requests(cache: torch.dtype) -> None:
    case = Case(cache=cache, lengths=(700, 290), q_lens=(300, 290), kv_heads=2, group=4, device="cuda")
    case.check(case.run_context(), _BOUND)


@pytest.mark.gpu
def test_a_graph_follows_the_lengths() -> None:
    case = Case(lengths=(600, 70, 300), q_lens=(100, 20, 60), kv_heads=2, device="cuda")
    case.run_context(max_q_len=180)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = case.run_context(max_q_len=180)
    for lengths, q_lens in (((600, 70, 300), (100, 20, 60)), ((1, 70, 0), (1, 70, 109)), ((599, 0, 299), (0, 0, 180))):
        case.lengths, case.ends = lengths, [0, *itertools.accumulate(q_lens)]
        case.seq_lens.copy_(torch.tensor(lengths))
        case.cum_seq_lens_q.copy_(torch.tensor(case.ends))
        graph.replay()
        torch.cuda.synchronize()
        case.check(got, _BOUND)


@pytest.mark.gpu
def test_repeated_calls_give_the_same_bits() -> None:
    case = Case(lengths=(900, 1, 400), q_lens=(500, 1, 90), kv_heads=4, device="cuda")
    first = case.run_context()
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(case.run_context(), first, strict=True))

"""Attention of many query tokens on sm_90a's warpgroup products: results, races, cuts, machine code, selection."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch

from jitfp4 import ArgumentError, nvrtc, sim
from jitfp4.arch import Arch
from jitfp4.counters import COUNTER_BYTES
from jitfp4.families.attention.api import WORKSPACE_BYTES
from jitfp4.families.attention.kernels.prefill import PrefillTactic
from jitfp4.families.attention.kernels.prefill_wgmma import KERNEL as KERNEL_WGMMA
from jitfp4.families.attention.kernels.prefill_wgmma import TILES, WgmmaSpec, WgmmaTactic, geometry, rejects, specialise
from jitfp4.families.attention.operation import ATTENTION
from jitfp4.families.attention.problem import HEAD_DIMS, CacheFormat, Pages, Problem
from jitfp4.formats import DType
from tests.support.attention import FEW_SMS, SCATTERED, Case, counted
from tests.support.gpu import needs_sm_90a
from tests.support.sass import disassemble

SM_90A = Arch.of("sm_90a")
_ONE: dict[str, Any] = {"kv_heads": 1}
CASES: dict[str, tuple[WgmmaTactic, dict[str, Any]]] = {
    # More rows than an item has, items of several requests and heads, one without queries and one without tokens.
    "ragged": (
        WgmmaTactic(turns=True),
        {
            "lengths": (140, 33, 0, 20),
            "q_lens": (27, 9, 3, 0),
            "group": 5,
            "page": 12,
            "with_sinks": True,
            "window_left": 70,
            "missing": ((0, 0, 8, -1),),
        },
    ),
    "d_256_interleaved_all_tokens": (
        WgmmaTactic(tile=64),
        _ONE
        | {
            "lengths": (70, 3),
            "q_lens": (17, 5),
            "head_dim": 256,
            "causal": False,
            "window_left": 40,
            "kv_layout": "NHD",
            "v_scale_layout": "interleaved4",
            "extra_page_bytes": 64,
            "out_dtype": torch.float8_e4m3fn,
        },
    ),
    "two_tables_three_teams": (
        WgmmaTactic(teams=3, tile=64, stages=3, turns=True),
        _ONE
        | {
            "lengths": (150,),
            "q_lens": (30,),
            "shared": False,
            "missing": ((0, 0, 1, -1), (0, 1, 3, 2**30)),
            "q_dtype": torch.float16,
        },
    ),
    "cache_bf16": (
        WgmmaTactic(producers=2, turns=True),
        _ONE
        | {"cache": torch.bfloat16, "lengths": (300, 5), "q_lens": (17, 9), "page": 5, "missing": ((0, 0, 1, -1),)},
    ),
    "cache_fp16_d_64": (
        WgmmaTactic(stages=4, turns=True),
        _ONE
        | {
            "cache": torch.float16,
            "q_dtype": torch.float16,
            "head_dim": 64,
            "lengths": (140,),
            "q_lens": (130,),
            "group": 1,
        },
    ),
    "cache_e4m3": (
        WgmmaTactic(producers=2, tile=64, stages=3, turns=True),
        _ONE
        | {
            "cache": torch.float8_e4m3fn,
            "q_dtype": torch.float8_e4m3fn,
            "out_dtype": torch.bfloat16,
            "lengths": (150,),
            "q_lens": (17,),
            "page": 1,
            "missing": ((0, 0, 3, -1),),
        },
    ),
    # Items whose second half is beyond the queries, and requests with fewer tokens than a tile.
    "pairs": (
        WgmmaTactic(stages=3, turns=True, ctas=2),
        {
            "lengths": (300, 33, 0, 20, 160),
            "q_lens": (130, 9, 3, 0, 9),
            "group": 3,
            "page": 12,
            "with_sinks": True,
            "window_left": 90,
            "missing": ((0, 0, 8, -1), (4, 0, 9, -1)),
        },
    ),
    "pairs_three_teams": (
        WgmmaTactic(teams=3, tile=64, stages=4, turns=True, ctas=2),
        _ONE
        | {
            "lengths": (420,),
            "q_lens": (100,),
            "v_scale_layout": "interleaved4",
            "shared": False,
            "missing": ((0, 0, 1, -1), (0, 1, 3, 2**30)),
        },
    ),
    "d_80": (
        WgmmaTactic(2, 2, 128, 3, turns=True, ctas=2),
        _ONE | {"head_dim": 80, "lengths": (140, 20), "q_lens": (27, 9), "page": 5, "group": 3, "window_left": 70},
    ),
    "d_96_e4m3": (
        WgmmaTactic(tile=64),
        _ONE | {"head_dim": 96, "cache": torch.float8_e4m3fn, "lengths": (140,), "q_lens": (27,), "with_sinks": True},
    ),
    "d_112_bf16": (
        WgmmaTactic(2, 2, 128, 2, turns=True),
        _ONE | {"head_dim": 112, "cache": torch.bfloat16, "lengths": (140,), "q_lens": (27,), "kv_layout": "NHD"},
    ),
    "d_192_interleaved": (
        WgmmaTactic(tile=64),
        _ONE | {"head_dim": 192, "lengths": (140,), "q_lens": (27,), "v_scale_layout": "interleaved4"},
    ),
    "pairs_two_producers": (
        WgmmaTactic(producers=2, stages=3, turns=True, ctas=2),
        SCATTERED | {"lengths": (250,), "q_lens": (130,)},
    ),
    "pairs_e4m3": (
        WgmmaTactic(teams=3, tile=64, stages=3, turns=True, ctas=2),
        _ONE | {"cache": torch.float8_e4m3fn, "lengths": (300, 5), "q_lens": (60, 3), "missing": ((0, 0, 3, -1),)},
    ),
    "pairs_bf16_d_256": (
        WgmmaTactic(tile=64, ctas=2),
        _ONE
        | {
            "cache": torch.bfloat16,
            "head_dim": 256,
            "lengths": (150, 5),
            "q_lens": (70, 9),
            "missing": ((0, 0, 1, -1),),
            "with_sinks": True,
        },
    ),
    # Two lanes share a row.
    "pairs_e4m3_d_256": (
        WgmmaTactic(tile=64, turns=True, ctas=2),
        _ONE
        | {
            "cache": torch.float8_e4m3fn,
            "head_dim": 256,
            "lengths": (150, 5),
            "q_lens": (70, 9),
            "page": 12,
            "missing": ((0, 0, 1, -1),),
        },
    ),
    "pairs_interleaved_d_256": (
        WgmmaTactic(tile=64, ctas=2),
        _ONE
        | {
            "head_dim": 256,
            "lengths": (150, 5),
            "q_lens": (70, 9),
            "v_scale_layout": "interleaved4",
            "missing": ((0, 0, 1, -1),),
            "window_left": 90,
        },
    ),
    "pairs_d_192": (
        WgmmaTactic(tile=64, ctas=2),
        _ONE | {"head_dim": 192, "lengths": (150,), "q_lens": (70,), "page": 5, "missing": ((0, 0, 1, -1),)},
    ),
    "d_64_three_teams": (
        WgmmaTactic(3, 1, 64, 4, turns=True),
        _ONE | {"head_dim": 64, "lengths": (150, 20), "q_lens": (70, 9), "page": 12, "window_left": 60},
    ),
    "scattered": (WgmmaTactic(turns=True), SCATTERED | {"lengths": (250,), "q_lens": (130,), "group": 1}),
}
# As those of the kernel on mma.sync: weights are 16-bit floats and outputs rounded.
_BOUND = {torch.float16: 1e-3, torch.bfloat16: 4e-3, torch.float8_e4m3fn: 5e-2}


def run(name: str, **changes: Any) -> tuple[Case, tuple[torch.Tensor, torch.Tensor]]:
    """A case into poisoned outputs."""
    tactic, fields = (CASES | FEW)[name]
    case = Case(**fields, **changes)
    out = torch.full(case.query.shape, torch.nan, device=case.device).to(case.out_dtype or case.query.dtype)
    with ATTENTION.forced(tactic), counted():
        got = case.run_context(out=out, out_dtype=None)
    return case, got


@pytest.mark.sim
@pytest.mark.compile
@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", CASES)
def test_the_simulated_kernel_is_attention_without_races(name: str) -> None:
    with sim.device(FEW_SMS, races=True):
        case, got = run(name)
    case.check(got, _BOUND)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_the_kernel_is_attention(name: str) -> None:
    needs_sm_90a()
    case, got = run(name, device="cuda")
    case.check(got, _BOUND)
    for _ in range(5):
        again = run(name, device="cuda")[1]
        assert all(torch.equal(a.float(), b.float()) for a, b in zip(again, got, strict=True))


# ---- items -----------------------------------------------------------------------------------------------------------

_D64 = _ONE | {"head_dim": 64, "cache": torch.float8_e4m3fn, "page": 64}
FEW: dict[str, tuple[WgmmaTactic, dict[str, Any]]] = {
    # More parts than there are CTAs
    "long": (
        WgmmaTactic(tile=64, stages=4),
        _D64 | {"lengths": (760, 700, 740, 768, 750), "q_lens": (9,) * 5, "with_sinks": True},
    ),
    "long_pairs": (
        WgmmaTactic(tile=64, stages=4, turns=True, ctas=2),
        _D64 | {"lengths": (1500, 70), "q_lens": (20, 9), "window_left": 900, "missing": ((0, 0, 20, -1),)},
    ),
    # More items than there are places in shared memory
    "many": (WgmmaTactic(tile=64, stages=4), _D64 | {"lengths": tuple(range(9, 27)), "q_lens": (9,) * 18}),
    "many_pairs": (
        WgmmaTactic(tile=64, stages=3, ctas=2),
        _D64 | {"lengths": tuple(range(9, 27)), "q_lens": (9,) * 18},
    ),
}


@pytest.mark.sim
@pytest.mark.compile
@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", FEW)
def test_no_bit_depends_on_who_takes_a_part_or_comes_last(name: str) -> None:
    few = dataclasses.replace(SM_90A, num_sms=8 if "long" in name else FEW[name][0].ctas)
    with sim.device(few, races=True):
        case, got = run(name)
    assert case.workspace.any() == ("long" in name), "long items are divided"
    case.check(got, _BOUND)
    with sim.device(few, seed=1):
        again = run(name)[1]
    assert all(torch.equal(a, b) for a, b in zip(again, got, strict=True))


# ---- cuts ------------------------------------------------------------------------------------------------------------


def problem(cache: CacheFormat = CacheFormat.NVFP4, *, head_dim: int = 128, rows: int = 256) -> Problem:
    dtype = DType.F16 if cache is CacheFormat.F16 else DType.BF16
    return Problem(
        cache=cache,
        q_dtype=dtype,
        out_dtype=dtype,
        head_dim=head_dim,
        rows=rows,
        heads=8,
        interleaved=False,
        pages=Pages.WHOLE,
        packed=True,
        two_tables=False,
        tiles=128,
        units=1024,
        blocks=4096,
    )


@pytest.mark.compile
def test_the_most_registers_suffice() -> None:
    """Without them ptxas waits behind every product; that of K is waited for twice, that of V twice."""
    spec = specialise(problem(head_dim=256), WgmmaTactic(tile=64))
    code = disassemble(nvrtc.compile_cubin(KERNEL_WGMMA.render(spec, SM_90A), SM_90A, symbol=KERNEL_WGMMA.symbol))
    assert sum(line.startswith("HGMMA") for line in code) == 2 * (256 // 16 + 64 // 16)
    assert sum(line.startswith("WARPGROUP.DEPBAR") for line in code) == 4
    assert not [line for line in code if line.startswith(("LDL", "STL"))]


CUTS = [WgmmaTactic(*cut) for cut in itertools.product((2, 3), (1, 2), TILES, (2,), (False, True), (1, 2))]
PROBLEMS = [problem(cache, head_dim=head_dim) for cache in CacheFormat for head_dim in HEAD_DIMS]


@pytest.mark.compile
@pytest.mark.one_in(120)
@pytest.mark.parametrize(
    ("asked", "tactic"),
    [(one, cut) for one in PROBLEMS for cut in CUTS if rejects(one, cut, SM_90A) is None],
    ids=lambda x: f"{x.cache}-{x.head_dim}" if isinstance(x, Problem) else str(x),
)
def test_what_is_not_rejected_stays_in_registers(asked: Problem, tactic: WgmmaTactic) -> None:
    source = KERNEL_WGMMA.render(specialise(asked, tactic), SM_90A)
    code = disassemble(nvrtc.compile_cubin(source, SM_90A, symbol=KERNEL_WGMMA.symbol))
    # A producer also finds the items, and may keep six registers of that in memory.
    assert len([line for line in code if line.startswith(("LDL", "STL"))]) <= 12


def test_registers_are_shared_out() -> None:
    for tactic in KERNEL_WGMMA.tactics:
        spec: WgmmaSpec = specialise(problem(), tactic)
        used = 128 * (spec.teams * spec.consumer_registers + spec.producers * spec.producer_registers)
        assert used <= 65536
        assert spec.consumer_registers % 8 == spec.producer_registers % 8 == 0
        assert 24 <= spec.producer_registers <= spec.consumer_registers <= 240


def test_why_a_tactic_is_rejected() -> None:
    assert "sm_90a" in str(rejects(problem(), WgmmaTactic(), Arch.of("sm_100a")))
    assert "empty" in str(rejects(problem(rows=64), WgmmaTactic(), SM_90A))
    assert "registers" in str(rejects(problem(), WgmmaTactic(teams=3), SM_90A))
    for cache, wide in (
        (CacheFormat.E4M3, WgmmaTactic(tile=64)),
        (CacheFormat.BF16, WgmmaTactic(tile=64, producers=2)),
    ):
        assert "registers" in str(rejects(problem(cache, head_dim=256), wide, SM_90A))
    assert "shared memory" in str(rejects(problem(), WgmmaTactic(stages=4), SM_90A))


@pytest.mark.parametrize(("name", "value"), [("teams", 1), ("producers", 3), ("tile", 80), ("stages", 1), ("ctas", 3)])
def test_impossible_cuts_name_the_field(name: str, value: int) -> None:
    with pytest.raises(ArgumentError, match=f"^{name}:"):
        specialise(problem(), WgmmaTactic(**{name: value}))


def test_who_takes_how_many_rows() -> None:
    for cache in CacheFormat:
        for head_dim in (64, 128, 256):
            tactic = ATTENTION.select(problem(cache, head_dim=head_dim), SM_90A)
            assert isinstance(tactic, WgmmaTactic)
    assert isinstance(ATTENTION.select(problem(rows=64), SM_90A), PrefillTactic)
    assert [ATTENTION.select(problem(rows=rows), SM_90A).ctas for rows in (128, 256)] == [1, 2]
    assert isinstance(ATTENTION.select(problem(), Arch.of("sm_100a")), PrefillTactic)


def test_clusters_fill_the_gpu_as_far_as_they_can() -> None:
    odd = dataclasses.replace(SM_90A, num_sms=SM_90A.num_sms - 1)
    for arch, ctas in ((SM_90A, SM_90A.num_sms), (odd, SM_90A.num_sms - 2)):
        launched = geometry(problem(), WgmmaTactic(ctas=2), arch)
        assert (launched.grid, launched.cluster) == ((ctas, 1, 1), (2, 1, 1))
    assert geometry(problem()._replace(blocks=8), WgmmaTactic(), SM_90A).grid == (SM_90A.num_sms, 1, 1)


def test_a_workspace_holds_parts_for_every_cluster() -> None:
    for tactic in KERNEL_WGMMA.tactics:
        spec = specialise(problem(), tactic)
        parts = spec.most_parts(WORKSPACE_BYTES)
        assert geometry(problem(), tactic, SM_90A).grid[0] // tactic.ctas < parts
        assert parts * spec.part_bytes <= WORKSPACE_BYTES
        assert 4 * (1 + parts * tactic.ctas * tactic.teams * 4) <= COUNTER_BYTES, "a counter for each warp"


@pytest.mark.sim
@pytest.mark.compile
def test_a_small_workspace_holds_fewer_parts() -> None:
    tactic, fields = FEW["long"]
    case = Case(**fields)
    part = specialise(problem()._replace(head_dim=64), tactic).part_bytes
    for parts, dirty in ((14, False), (15, True)):  # three for each of five items
        space = torch.zeros(parts * part, dtype=torch.uint8)
        with sim.device(dataclasses.replace(SM_90A, num_sms=8)), ATTENTION.forced(tactic):
            case.check(case.run_context(workspace_buffer=space), _BOUND)
            assert bool(space.any()) == dirty
    with sim.device("sm_90a"), ATTENTION.forced(tactic), pytest.raises(ArgumentError, match="workspace_buffer"):
        case.run_context(workspace_buffer=space[: part // 2])

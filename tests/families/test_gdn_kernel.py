"""The gated delta rule's kernel: specialisations, generated code, and every one simulated and on the GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from jitfp4 import ArgumentError, sim
from jitfp4.arch import ARCHS, Arch
from jitfp4.dtypes import HALVES
from jitfp4.families.gdn import (
    gated_delta_rule_decode,
    gated_delta_rule_decode_pretranspose,
    gated_delta_rule_mtp,
)
from jitfp4.families.gdn.kernels import chunk, delta_rule
from jitfp4.families.gdn.kernels.chunk import KERNEL as CHUNK
from jitfp4.families.gdn.kernels.delta_rule import KERNEL as DELTA_RULE
from jitfp4.families.gdn.kernels.delta_rule import WalkTactic
from jitfp4.families.gdn.operation import GATED_DELTA_RULE
from jitfp4.families.gdn.problem import HEAD_DIMS, STATE_DTYPES, VALUE_DIMS, Problem, StateLayout
from jitfp4.formats import DType
from jitfp4.nvrtc import compile_cubin
from jitfp4.spec import KernelSpec
from tests.support.compare import assert_same_bytes, poisoned
from tests.support.gdn import STATE_DTYPES as STATE_TYPES
from tests.support.gdn import (
    Case,
    assert_close,
    case,
    check_both_orders,
    check_float_gates,
    check_graph_replay,
    check_heads_apart,
    check_other_writes,
    check_pool,
    check_strides,
    check_wide_values,
    moved,
    recurrence,
)
from tests.support.sample import SIM_ARCHS, some
from tests.support.sass import disassemble

SM_90A = Arch.of("sm_90a")
PROBLEM = Problem(
    dtype=DType.BF16,
    state_dtype=DType.F32,
    state_layout=StateLayout.VK,
    head_dim=128,
    value_dim=128,
    tokens=4,
    batch=1,
    value_heads=32,
    store_steps=True,
)


@pytest.mark.parametrize("arch", [Arch.of(name) for name in ARCHS], ids=str)
def test_selection_and_warm_up_agree(arch: Arch) -> None:
    problems = [
        PROBLEM._replace(
            dtype=dtype,
            state_dtype=state_dtype,
            head_dim=head_dim,
            value_dim=value_dim,
            general=general,
            tokens=tokens,
            batch=heads,
            value_heads=1,
            store_steps=steps,
            step_slots=slots,
        )
        for dtype in HALVES.values()
        for state_dtype in STATE_DTYPES.values()
        for head_dim in HEAD_DIMS
        for value_dim in VALUE_DIMS[head_dim][: None if state_dtype is DType.F32 else 1]
        for general in ((False, True) if value_dim == head_dim else (True,))
        for tokens in range(1, 17)
        for steps, slots in ((True, False), (True, True), (False, False))
        for heads in (1, 32, 64, 65, 128, 256, 512, 1024, 4096, 65536)
    ]
    problems += [
        problem._replace(state_layout=StateLayout.KV)
        for problem in problems
        if problem.state_dtype is DType.F32 and problem.tokens == 1 and not problem.store_steps
    ]
    assert {selected(problem, arch) for problem in problems} == {*DELTA_RULE.specs(arch), *CHUNK.specs(arch)}


def selected(problem: Problem, arch: Arch) -> KernelSpec:
    tactic = GATED_DELTA_RULE.select(problem, arch)
    return (
        delta_rule.specialise(problem, tactic) if isinstance(tactic, WalkTactic) else chunk.specialise(problem, tactic)
    )


def test_bulk_stores_are_for_copy_engines_and_for_places_that_differ() -> None:
    many = PROBLEM._replace(batch=1 << 15)
    assert GATED_DELTA_RULE.select(many, SM_90A).bulk_stores
    assert not GATED_DELTA_RULE.select(many, Arch.of("sm_89")).bulk_stores
    assert not GATED_DELTA_RULE.select(many._replace(step_slots=True), SM_90A).bulk_stores


@pytest.mark.parametrize(
    "change",
    [
        {"head_dim": 96},
        {"max_tokens": 5},
        {"max_tokens": 1},
        {"max_tokens": 1, "store_steps": False},
        {"ilp_rows": 3},
        {"warps": 3},
        {"tile_v": 8, "ilp_rows": 4},
        {"head_dim": 64, "value_dim": 64, "tile_v": 128},
        {"value_dim": 256},
        {"value_dim": 64, "general": True},
        {"value_dim": 256, "general": True, "state_dtype": DType.BF16},
        {"state_layout": StateLayout.KV, "ilp_rows": 2},
        {"state_layout": StateLayout.KV, "state_dtype": DType.BF16, "ilp_rows": 4, "warps": 2},
        {"state_layout": StateLayout.KV, "ilp_rows": 4, "warps": 2, "bulk_stores": True},
    ],
    ids=str,
)
def test_impossible_specialisations_are_rejected(change: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError):
        replace(delta_rule.specialise(PROBLEM, WalkTactic(32, 2, 4)), **change)


def tactics(head_dim: int) -> Iterator[WalkTactic]:
    """Every number of rows that a lane can hold, in tiles of every size, with each way to take v and store states."""
    for ilp_rows in (1, 2, 4, 8):
        for tile_v in (4, 16, 64, 128):
            warps = min(4, tile_v // (4 * ilp_rows))
            if warps and tile_v <= head_dim:
                use_smem_v = (tile_v == 16) == (ilp_rows < 4)
                yield WalkTactic(tile_v, ilp_rows, warps, use_smem_v)
                yield WalkTactic(tile_v, ilp_rows, warps, not use_smem_v, keep_state=tile_v == 64, bulk_stores=True)


@pytest.mark.compile
@pytest.mark.one_in(3)
@pytest.mark.parametrize("arch", ARCHS)
def test_compiles_everywhere_without_local_memory(arch: str) -> None:
    problems = [
        PROBLEM,
        PROBLEM._replace(dtype=DType.F16, state_dtype=DType.BF16, tokens=16),
        PROBLEM._replace(state_layout=StateLayout.KV, tokens=1, store_steps=False),
    ]
    for problem in problems:
        spec = selected(problem, Arch.of(arch))
        code = disassemble(
            compile_cubin(DELTA_RULE.render(spec, Arch.of(arch)), Arch.of(arch), symbol=DELTA_RULE.symbol)
        )
        assert not [line for line in code if line.startswith(("LDL", "STL"))]
        assert any(line.startswith("LDG.E.128") or ".128" in line for line in code)
        packed = sum(line.startswith("FFMA2") for line in code)
        assert (packed > 0) == (arch in ("sm_100a", "sm_103a"))  # elsewhere ptxas splits fma.rn.f32x2 in two


# ---- simulator -------------------------------------------------------------------------------------------------------


def check_kernel(
    arguments: Case, device: str, arch: str | None = None, *, l2norm: bool = True, update: bool = True
) -> None:
    """The kernel on ``device``, or simulated, writes the reference's bytes into poisoned outputs."""
    batch, tokens, value_heads, head_dim = arguments["v"].shape
    state_dtype, dtype = arguments["initial_state"].dtype, arguments["q"].dtype
    results = []
    for place in ("cpu", device):
        given = moved(arguments, place)
        steps = poisoned((batch, tokens, value_heads, head_dim, head_dim), state_dtype, place)
        out = poisoned((batch, tokens, value_heads, head_dim), dtype, place)
        with sim.device(arch) if arch and results else nullcontext():
            gated_delta_rule_mtp(
                **given,
                output=out,
                intermediate_states_buffer=steps if tokens > 1 else None,
                disable_state_update=not update,
                use_qk_l2norm=l2norm,
            )
        results.append((out, given["initial_state"], steps))
    for name, want, got in zip(("output", "state", "steps"), *results, strict=True):
        assert_same_bytes(name, got, want)


@pytest.mark.sim
@pytest.mark.compile
@pytest.mark.one_in(3)
@pytest.mark.parametrize("arch", SIM_ARCHS)
@pytest.mark.parametrize("state_dtype", STATE_TYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_simulated_kernels(arch: str, state_dtype: torch.dtype, head_dim: int, whole: bool) -> None:
    for number, tactic in enumerate(tactics(head_dim)):
        if not whole and (number // 2 + number // 8) % 2 == (state_dtype is torch.float32):
            continue  # a sample: each tactic with one type of states
        dtype = (torch.bfloat16, torch.float16)[number % 2]
        arguments = case(2, 3, 1, 2, head_dim, dtype=dtype, state_dtype=state_dtype, exact_gates=True, seed=number)
        arguments["initial_state_indices"] = torch.tensor([1, -1] if number % 3 == 0 else [1, 0])
        with GATED_DELTA_RULE.forced(tactic):
            check_kernel(arguments, "cpu", arch, l2norm=number % 4 != 3, update=number % 5 != 4)


@pytest.mark.sim
@pytest.mark.compile
@pytest.mark.parametrize("tokens", [1, 4, 5, 16])
def test_simulated_token_counts(tokens: int) -> None:
    check_kernel(case(1, tokens, exact_gates=True), "cpu", "sm_90a")


@pytest.mark.sim
@pytest.mark.compile
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "tactic",
    [
        WalkTactic(4, 1, 1, use_smem_v=True, bulk_stores=True),
        WalkTactic(16, 2, 2, keep_state=True),
        WalkTactic(64, 4, 2, bulk_stores=True),
        WalkTactic(64, 8, 2, ahead=4),
    ],
    ids=str,
)
def test_simulated_rows_of_one_token_stay_as_in_memory(tactic: WalkTactic, dtype: torch.dtype) -> None:
    arguments = case(2, 1, 1, 2, 64, dtype=dtype, state_dtype=torch.bfloat16, exact_gates=True)
    assert delta_rule.specialise(_decode(arguments), tactic).max_tokens == 1
    with GATED_DELTA_RULE.forced(tactic):
        check_kernel(arguments, "cpu", "sm_90a")
        check_kernel(arguments, "cpu", "sm_90a", l2norm=False, update=False)


def _decode(arguments: Case) -> Problem:
    dtype, head_dim = HALVES[arguments["q"].dtype], arguments["q"].shape[-1]
    return PROBLEM._replace(
        dtype=dtype, state_dtype=DType.BF16, head_dim=head_dim, value_dim=head_dim, tokens=1, store_steps=False
    )


@pytest.mark.sim
@pytest.mark.compile
@pytest.mark.parametrize("use_smem_v", [False, True])
@pytest.mark.parametrize("cut", [(32, 4, 2), (64, 8, 2), (128, 8, 4)], ids=str)
def test_simulated_rows_of_both_orders(cut: tuple[int, int, int], use_smem_v: bool) -> None:
    with sim.device("sm_90a"), GATED_DELTA_RULE.forced(WalkTactic(*cut, use_smem_v)):
        check_both_orders(128)


@pytest.mark.sim
@pytest.mark.compile
def test_simulated_gates_are_close() -> None:
    arguments = case(2, 3)
    want_out, want_states = recurrence(arguments)
    with sim.device("sm_90a"):
        out, state = gated_delta_rule_mtp(**arguments)
    assert_close("output", out, want_out)
    assert_close("state", state, want_states[:, -1])


@pytest.mark.sim
@pytest.mark.compile
@pytest.mark.parametrize("arch", SIM_ARCHS)
def test_simulated_pools_strides_and_orders(arch: str) -> None:
    with sim.device(arch):
        check_pool("cpu", torch.int32)
        check_other_writes("cpu")
        check_strides("cpu")
        check_both_orders(64)


@pytest.mark.sim
@pytest.mark.compile
@pytest.mark.parametrize("state_dtype", STATE_TYPES, ids=str)
@pytest.mark.parametrize("seed", [None, 1])
def test_simulated_final_states_beside_those_of_tokens_do_not_race(seed: int | None, state_dtype: torch.dtype) -> None:
    with sim.device("sm_90a", races=True, seed=seed):
        check_other_writes("cpu", state_dtype)


def check_without_slots(arch: str, tactic: WalkTactic) -> None:
    """Without a list of slots request n uses state n: the bytes of the same call with a list."""
    arguments = case(3, 1, exact_gates=True)
    with sim.device(arch), GATED_DELTA_RULE.forced(tactic):
        want_out, want_state = gated_delta_rule_mtp(**moved(arguments, "cpu"))
        del arguments["initial_state_indices"]
        state = arguments.pop("initial_state")
        out, state = gated_delta_rule_decode_pretranspose(**arguments, state=state)
    assert_same_bytes("output", out, want_out)
    assert_same_bytes("state", state, want_state)


@pytest.mark.sim
@pytest.mark.compile
@pytest.mark.parametrize("arch", SIM_ARCHS)
def test_simulated_calls_without_slots(arch: str) -> None:
    check_without_slots(arch, WalkTactic(16, 2, 2))


@pytest.mark.sim
@pytest.mark.compile
@pytest.mark.parametrize("arch", SIM_ARCHS)
def test_simulated_general_forms(arch: str) -> None:
    with sim.device(arch):
        check_heads_apart("cpu")
        check_float_gates("cpu")
        check_wide_values("cpu")
        check_both_orders(128, 256)


@pytest.mark.sim
@pytest.mark.compile
def test_simulated_heads_apart_brought_ahead_and_written_at_once() -> None:
    with sim.device("sm_90a"), GATED_DELTA_RULE.forced(WalkTactic(16, 1, 4, ahead=4)):
        check_heads_apart("cpu")
    arguments = case(2, 3)
    want_out, want_state = gated_delta_rule_mtp(**moved(arguments, "cpu"))
    arguments["initial_state"] = arguments["initial_state"].transpose(0, 1).contiguous().transpose(0, 1)
    tactic = WalkTactic(16, 1, 4, bulk_stores=True, ahead=4)
    with sim.device("sm_90a", races=True), GATED_DELTA_RULE.forced(tactic):
        out, state = gated_delta_rule_mtp(**arguments)
    assert_close("output", out, want_out.double())
    assert_close("state", state, want_state.double())


# ---- GPU -------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
class TestOnGpu:
    @pytest.mark.parametrize("state_dtype", STATE_TYPES, ids=str)
    @pytest.mark.parametrize("head_dim", [64, 128])
    def test_every_cut(self, head_dim: int, state_dtype: torch.dtype, whole: bool) -> None:
        for number, tactic in enumerate(some(10, tactics(head_dim), whole=whole)):
            dtype = (torch.bfloat16, torch.float16)[number % 2]
            arguments = case(5, 4, 2, 4, head_dim, dtype=dtype, state_dtype=state_dtype, exact_gates=True, seed=number)
            with GATED_DELTA_RULE.forced(tactic):
                check_kernel(arguments, "cuda", l2norm=number % 4 != 3, update=number % 5 != 4)

    @pytest.mark.parametrize("tokens", [1, 2, 4, 5, 8, 16])
    def test_every_token_count_and_table_row(self, tokens: int) -> None:
        for batch in (1, 9, 40):
            check_kernel(case(batch, tokens, 2, 16, exact_gates=True), "cuda")

    @pytest.mark.parametrize("state_dtype", STATE_TYPES, ids=str)
    def test_follows_the_recurrence(self, state_dtype: torch.dtype) -> None:
        arguments = case(3, 4, 2, 4, 128, state_dtype=state_dtype)
        want_out, want_states = recurrence(arguments)
        out, state = gated_delta_rule_mtp(**moved(arguments, "cuda"))
        assert_close("output", out.cpu(), want_out)
        assert_close("state", state.cpu(), want_states[:, -1])

    def test_pools_strides_and_orders(self) -> None:
        check_pool("cuda", torch.int32)
        check_pool("cuda", torch.int64)
        for state_dtype in STATE_TYPES:
            check_other_writes("cuda", state_dtype)
        check_strides("cuda")

    def test_general_forms(self) -> None:
        check_heads_apart("cuda")
        check_float_gates("cuda")
        check_wide_values("cuda", tokens=4)

    def test_a_slot_that_all_tokens_write_keeps_the_last(self) -> None:
        arguments = moved(case(64, 4, 2, 16, 128), "cuda")
        with GATED_DELTA_RULE.forced(WalkTactic(64, 4, 4)):
            want_out, want_state = gated_delta_rule_mtp(**moved(arguments, "cuda"))
        slots = torch.arange(64, device="cuda")[:, None].expand(64, 4).contiguous()
        out, state = gated_delta_rule_mtp(**arguments, ssm_state_indices=slots)
        assert_same_bytes("output", out, want_out)
        assert_same_bytes("state", state, want_state)

    @pytest.mark.parametrize(("head_dim", "value_dim"), [(64, 64), (128, 128), (128, 256)])
    def test_k_major(self, head_dim: int, value_dim: int) -> None:
        arguments = case(7, 1, 2, 4, head_dim, value_dim=value_dim, exact_gates=True)
        arguments.pop("initial_state_indices")
        arguments["state"] = arguments.pop("initial_state").mT.contiguous()
        want_out, want_state = gated_delta_rule_decode(**moved(arguments, "cpu"))
        out, state = gated_delta_rule_decode(**moved(arguments, "cuda"))
        assert_same_bytes("output", out, want_out)
        assert_same_bytes("state", state, want_state)

    def test_graph_replay(self) -> None:
        check_graph_replay(tokens=4)

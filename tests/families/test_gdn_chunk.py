"""The gated delta rule's chunkwise kernel: selection, generated code, and results against the recurrence."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from jitfp4 import ArgumentError, sim
from jitfp4.arch import Arch
from jitfp4.families.gdn import gated_delta_rule_mtp
from jitfp4.families.gdn.kernels.chunk import KERNEL as CHUNK
from jitfp4.families.gdn.kernels.chunk import ChunkTactic
from jitfp4.families.gdn.operation import GATED_DELTA_RULE
from jitfp4.families.gdn.problem import CHUNK_ROWS, Problem, StateLayout
from jitfp4.formats import DType
from tests.support.compare import assert_same_bytes, poisoned
from tests.support.gdn import STATE_DTYPES, Case, assert_close, case, check_graph_replay, moved, recurrence
from tests.support.ledger import read
from tests.support.sample import SIM_ARCHS

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
STEPS = 4  # of rounding that results may be off
PROBLEM = Problem(
    dtype=DType.BF16,
    state_dtype=DType.F32,
    state_layout=StateLayout.VK,
    head_dim=128,
    value_dim=128,
    tokens=16,
    batch=4096,
    value_heads=1,
    store_steps=False,
)
SPEC = CHUNK.specialise(PROBLEM, ChunkTactic(8))


@pytest.mark.parametrize("heads", [128, 512, 513, 65536])
@pytest.mark.parametrize("name", ["sm_80", "sm_90a", "sm_100a"])
def test_many_tokens_without_steps_get_it(name: str, heads: int) -> None:
    for tokens in range(1, 17):
        problem = PROBLEM._replace(tokens=tokens, batch=heads)
        tactic = GATED_DELTA_RULE.select(problem, Arch.of(name))
        if tokens not in (3, 4):  # where either may be the faster one
            assert isinstance(tactic, ChunkTactic) == (tokens > 4)
        assert name != "sm_80" or tactic.ahead == 0  # no copy engine
        for steps in (problem._replace(store_steps=True), problem._replace(store_steps=True, step_slots=True)):
            assert not isinstance(GATED_DELTA_RULE.select(steps, Arch.of(name)), ChunkTactic)


@pytest.mark.parametrize(
    "change",
    [
        {"head_dim": 96},
        {"value_dim": 256},
        {"value_dim": 256, "general": True, "state_dtype": DType.BF16},
        {"max_tokens": 2},
        {"warps": 3},
        {"head_dim": 64, "value_dim": 64, "warps": 8},
        {"ahead": 2},
    ],
    ids=str,
)
def test_impossible_specialisations_are_rejected(change: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError):
        replace(SPEC, **change)


def test_every_build_uses_tensor_cores_and_no_local_memory() -> None:
    """As the ledger has them, which is of today's sources. At 16 tokens, a few registers in local memory leave room for
    twice the warps: of float32 states they take a quarter off the time (gdn_search_final)."""
    rows = read(CHUNK)
    assert rows
    for name, row in rows.items():
        few = 12 if "max_tokens=16" in name and "bulk=true" in name else 0
        assert int(row["HMMA"]) > 0 and int(row["LDL"]) + int(row["STL"]) <= few, name


# ---- checks on every device ------------------------------------------------------------------------------------------


def run(arguments: Case, device: str, arch: str | None = None, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and pool of a call on ``device``, or simulated; ``arguments`` stay as they are."""
    output = poisoned(tuple(arguments["v"].shape), arguments["v"].dtype, device)
    with sim.device(arch, races=True) if arch else nullcontext():
        pool = gated_delta_rule_mtp(**moved(arguments, device), output=output, **moved(options, device))[1]
    return output.cpu(), pool.cpu()


def check(arguments: Case, device: str, arch: str | None = None, **options: Any) -> None:
    """Outputs and final states follow the recurrence, skipped requests give zeros, and no other slot changes."""
    before, slots = arguments["initial_state"], arguments["initial_state_indices"]
    targets = options.get("output_state_indices", slots)
    out, pool = run(arguments, device, arch, **options)
    want_out, want_states = recurrence(arguments, scale=options.get("scale"), l2norm=options.get("use_qk_l2norm", True))
    others = set(range(len(pool)))
    for n, (slot, target) in enumerate(zip(slots.tolist(), targets.tolist(), strict=True)):
        if slot < 0:
            assert_same_bytes("skipped output", out[n], torch.zeros_like(out[n]))
            continue
        assert_close(f"output {n}", out[n], want_out[n], STEPS)
        if target >= 0 and not options.get("disable_state_update"):
            assert_close(f"state {n}", pool[target], want_states[n, -1], STEPS)
            others.remove(target)
    assert_same_bytes("other slots", pool[sorted(others)], before[sorted(others)])


def general_form(batch: int) -> Case:
    arguments = case(batch, 6, head_dim=128, value_dim=256, gates=F32, pool=batch + 1)
    arguments["initial_state"] = arguments["initial_state"].transpose(0, 1).contiguous().transpose(0, 1)
    return arguments


# ---- simulator -------------------------------------------------------------------------------------------------------


@pytest.mark.sim
@pytest.mark.compile
@pytest.mark.parametrize("arch", SIM_ARCHS)
class TestSimulated:
    @pytest.mark.parametrize(
        ("given", "tactic", "options"),
        [
            ((1, 64, BF16, F32), ChunkTactic(1), {}),
            ((2, 128, F16, BF16), ChunkTactic(4), {"use_qk_l2norm": False}),
            ((3, 64, BF16, BF16), ChunkTactic(2, ahead=4), {}),
            ((4, 128, BF16, BF16), ChunkTactic(2, bulk=True), {"scale": 2.0}),
            ((4, 128, F16, F32), ChunkTactic(2, ahead=4, bulk=True), {}),
            ((5, 64, F16, BF16), ChunkTactic(2, ahead=4), {"scale": 0.75}),
            ((13, 64, F16, F32), ChunkTactic(1, ahead=4), {"disable_state_update": True}),
            ((16, 64, BF16, F32), ChunkTactic(4, ahead=4), {"use_qk_l2norm": False, "scale": 1.0}),
            ((8, 128, F16, BF16), ChunkTactic(2, ahead=4), {"use_qk_l2norm": False}),
            ((8, 128, BF16, BF16), ChunkTactic(4), {}),
            ((7, 64, F16, BF16), ChunkTactic(1, bulk=True), {"disable_state_update": True}),
            ((13, 128, F16, F32), ChunkTactic(8), {"scale": -0.5}),
            ((16, 128, BF16, F32), ChunkTactic(8, ahead=4), {}),
            ((16, 64, BF16, BF16), ChunkTactic(4, bulk=True), {}),
        ],
        ids=str,
    )
    def test_shapes(self, arch: str, given: tuple[Any, ...], tactic: ChunkTactic, options: Case) -> None:
        tokens, head_dim, dtype, state_dtype = given
        arguments = case(3, tokens, 1, 2, head_dim, dtype=dtype, state_dtype=state_dtype)  # heads 4 and 5 come ahead
        arguments["k"] /= 16  # no longer than 1, for calls that do not normalise it
        with GATED_DELTA_RULE.forced(tactic):
            check(arguments, "cpu", arch, **options)

    @GATED_DELTA_RULE.forced(ChunkTactic(2, ahead=8))
    def test_slots(self, arch: str) -> None:
        """Holes, a skipped request, and final states to other slots or to none."""
        arguments = case(4, 6, 2, 4, pool=7)
        arguments["initial_state_indices"] = torch.tensor([5, 0, -1, 3], dtype=torch.int32)
        check(arguments, "cpu", arch)
        check(arguments, "cpu", arch, output_state_indices=torch.tensor([6, -1, 4, 3]))

    @GATED_DELTA_RULE.forced(ChunkTactic(8, ahead=4))
    def test_general_forms(self, arch: str) -> None:
        """Float32 gates, 256 values, and a pool that has one head of all slots after the other."""
        check(general_form(3), "cpu", arch)

    @GATED_DELTA_RULE.forced(ChunkTactic(4))
    def test_decays_at_the_ends(self, arch: str) -> None:
        """Head 0 forgets all at some tokens and nothing at the others, head 1 never forgets, head 2 has a large rate of
        a small softplus."""
        arguments = case(2, 12, value_heads=3) | {"A_log": torch.tensor([5.0, -40.0, 20.0]), "dt_bias": torch.zeros(3)}
        arguments["a"] = torch.full((2, 12, 3), -100.0, dtype=BF16)
        arguments["a"][0, [0, 5, 6], :2] = 100.0
        arguments["a"][1, [8, 11], :2] = 15.0
        arguments["a"][..., 2] = -20.0
        check(arguments, "cpu", arch)

    @GATED_DELTA_RULE.forced(ChunkTactic(4))
    @pytest.mark.parametrize(("tokens", "state_dtype"), [(3, BF16), (4, F32), (7, F32), (8, BF16), (12, F32)], ids=str)
    def test_a_nan_reaches_no_earlier_token(self, arch: str, tokens: int, state_dtype: torch.dtype) -> None:
        arguments = case(1, tokens, state_dtype=state_dtype)
        want_out, want_pool = run(arguments, "cpu", arch)
        assert want_out.isfinite().all()
        for name in "qkvab":
            spoiled = moved(arguments, "cpu")
            spoiled[name].flatten(2)[0, -1, 0] = torch.nan
            out, pool = run(spoiled, "cpu", arch)
            assert out[0, -1].isnan().any()
            assert_same_bytes(f"earlier outputs, {name}", out[:, :-1], want_out[:, :-1])
            if name == "q":
                assert_same_bytes("state", pool, want_pool)

    @GATED_DELTA_RULE.forced(ChunkTactic(4))
    def test_strides(self, arch: str) -> None:
        """Views of a packed projection read as dense tensors do."""
        dense = case(2, 6, 1, 2)
        packed = torch.full((2, 8, 400), torch.nan, dtype=BF16)
        strided = moved(dense, "cpu")
        for name, first, end in (("q", 0, 64), ("k", 64, 128), ("v", 128, 256), ("a", 256, 258), ("b", 258, 260)):
            strided[name] = packed[:, 1:7, first:end].unflatten(-1, dense[name].shape[2:])
            strided[name].copy_(dense[name])
        want_out, want_pool = run(dense, "cpu", arch)
        with sim.device(arch, races=True):
            out, pool = gated_delta_rule_mtp(**strided)
        assert_same_bytes("output", out, want_out)
        assert_same_bytes("state", pool, want_pool)


# ---- GPU -------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
class TestOnGpu:
    @pytest.mark.parametrize("tokens", [1, 3, 4, 5, 8, 16])
    @pytest.mark.parametrize("state_dtype", STATE_DTYPES, ids=str)
    @pytest.mark.parametrize("head_dim", [64, 128])
    def test_shape(self, head_dim: int, state_dtype: torch.dtype, tokens: int) -> None:
        for number, warps in enumerate(warps for warps in (1, 2, 4, 8) if warps * CHUNK_ROWS <= head_dim):
            dtype = (BF16, F16)[number % 2]
            arguments = case(5, tokens, 2, 4, head_dim, dtype=dtype, state_dtype=state_dtype, pool=7, seed=number)
            arguments["initial_state_indices"] = torch.tensor([6, 2, -1, 0, 3])
            arguments["k"] /= 16  # no longer than 1, for calls that do not normalise it
            with GATED_DELTA_RULE.forced(ChunkTactic(warps, ahead=4 * (number % 2))):
                check(arguments, "cuda")
                check(arguments, "cuda", use_qk_l2norm=False, scale=0.75, disable_state_update=True)

    @GATED_DELTA_RULE.forced(ChunkTactic(8, ahead=4))
    def test_general_forms(self) -> None:
        check(general_form(5), "cuda")

    @GATED_DELTA_RULE.forced(ChunkTactic(8))
    def test_two_calls_follow_one(self) -> None:
        arguments = case(3, 16, 2, 4, 128)
        want_out, want_states = recurrence(arguments)
        pool = arguments["initial_state"]
        for tokens in (slice(8), slice(8, 16)):
            part = {name: arguments[name][:, tokens] for name in "qkvab"}
            out, pool = run(arguments | part | {"initial_state": pool}, "cuda")
            assert_close("output", out, want_out[:, tokens], STEPS)
            assert_close("state", pool, want_states[:, tokens][:, -1], STEPS)

    def test_heads_brought_ahead_change_nothing(self) -> None:
        arguments = case(40, 8, 2, 4, 128)
        with GATED_DELTA_RULE.forced(ChunkTactic(8)):
            want_out, want_pool = run(arguments, "cuda")
        with GATED_DELTA_RULE.forced(ChunkTactic(8, ahead=8)):
            out, pool = run(arguments, "cuda")
        assert_same_bytes("output", out, want_out)
        assert_same_bytes("state", pool, want_pool)

    @GATED_DELTA_RULE.forced(ChunkTactic(8, ahead=8))
    def test_graph_replay(self) -> None:
        check_graph_replay(tokens=8)

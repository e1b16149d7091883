"""Operations: schemas from a NamedTuple, parameters bound by name, checks of addresses, forced tactics."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch

import jitfp4
from jitfp4 import ArgumentError, engine, sim
from jitfp4.arch import ARCHS
from jitfp4.errors import LaunchError
from jitfp4.families.norm import add_rmsnorm_fp4quant, rmsnorm_fp4quant
from jitfp4.families.norm import operation as norm
from jitfp4.families.norm.kernels.rmsnorm_fp4quant import Tactic as NormTactic
from jitfp4.families.quantize.kernels.e4m3 import TableTactic
from jitfp4.families.quantize.kernels.tma import KERNEL as TMA
from jitfp4.families.quantize.kernels.tma import TmaTactic
from jitfp4.families.quantize.kernels.vector import KERNEL as VECTOR
from jitfp4.families.quantize.kernels.vector import VectorTactic
from jitfp4.families.quantize.operation import QUANTIZE
from jitfp4.kernel import Plan, kernels
from jitfp4.operation import Operation, Written, _schema, operations
from tests.support.compare import assert_same_bytes
from tests.support.gdn import case

SM_90A, SM_100A = ARCHS["sm_90a"], ARCHS["sm_100a"]
SIM = [pytest.mark.sim, pytest.mark.compile]
A = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)).bfloat16()


def shifted(tensor: torch.Tensor, elements: int = 1) -> torch.Tensor:
    """The same values, starting some elements past an aligned address."""
    memory = torch.zeros(tensor.numel() + elements, dtype=tensor.dtype, device=tensor.device)
    return memory[elements:].view(tensor.shape).copy_(tensor)


# ---- schema ----------------------------------------------------------------------------------------------------------


class Everything(NamedTuple):
    x: torch.Tensor
    scale: torch.Tensor | None
    out: Written
    extra: Written | None
    size: int
    eps: float
    flag: bool
    word: str
    enable_pdl: bool | None


def test_the_schema_is_that_of_the_arguments() -> None:
    assert _schema("name", Everything) == (
        "name(Tensor x, Tensor? scale, Tensor(a!) out, Tensor(b!)? extra, SymInt size, float eps, bool flag, str word, "
        "bool? enable_pdl) -> ()"
    )


@pytest.mark.parametrize("operation", operations(), ids=lambda operation: operation.name)
def test_torch_knows_every_operator_under_the_names_of_its_arguments(operation: Operation[Any, Any]) -> None:
    schema = operation.operator._schema
    assert tuple(argument.name for argument in schema.arguments) == operation.arguments._fields
    assert not schema.returns
    written = [argument.name for argument in schema.arguments if argument.alias_info is not None]
    assert written and all(argument.alias_info.is_write for argument in schema.arguments if argument.name in written)


# ---- parameters ------------------------------------------------------------------------------------------------------


def a_plan() -> tuple[norm.Arguments, Plan]:
    arguments = norm.Arguments(
        input=A,
        residual=None,
        weight=A[0],
        gate=None,
        global_scale=None,
        y_fp4=torch.zeros(4, 32, dtype=torch.uint8),
        block_scale=None,
        block_scale_unswizzled=torch.zeros(4, 4, dtype=torch.uint8),
        y_out=None,
        eps=0.25,
        block_size=16,
        scale_format="e4m3",
        enable_pdl=None,
        names="",
    )
    return arguments, norm.RMSNORM.plan(norm.RMSNORM.problem(arguments), SM_90A)


def test_values_follow_the_parameters_whatever_order_they_are_bound_in() -> None:
    arguments, plan = a_plan()
    want = norm.RMSNORM.prepare(plan, arguments)
    assert [param.name for param in plan.kernel.params][-4:] == ["m", "h", "eps", "row_threads"]
    assert want[-4:-1] == (4, 64, 0.25)
    backwards = replace(plan.kernel, bind=lambda *given: dict(reversed(plan.kernel.bind(*given).items())))
    assert all(got is value or got == value for got, value in zip(
        norm.RMSNORM.prepare(plan._replace(kernel=backwards), arguments), want, strict=True
    ))  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda bound: bound.pop("eps"), r"without a value: \['eps'\]; values without one: \[\]"),
        (lambda bound: bound.update(epsilon=1.0), r"without a value: \[\]; values without one: \['epsilon'\]"),
        (lambda bound: bound.update(hidden=bound.pop("h")), r"\['h'\]; values without one: \['hidden'\]"),
    ],
    ids=["missing", "unknown", "misnamed"],
)
def test_every_parameter_has_one_value(change: Callable[[dict[str, Any]], object], message: str) -> None:
    arguments, plan = a_plan()
    whole = plan.kernel.bind

    def bind(arguments: norm.Arguments, plan: Plan) -> dict[str, Any]:
        bound = dict(whole(arguments, plan))
        change(bound)
        return bound

    with pytest.raises(LaunchError, match=message):
        norm.RMSNORM.prepare(plan._replace(kernel=replace(plan.kernel, bind=bind)), arguments)


@pytest.mark.complete
def test_parameters_have_names_of_their_own() -> None:
    for kernel in kernels():
        names = [param.name for param in kernel.params]
        assert len(set(names)) == len(names), kernel.name


# ---- addresses -------------------------------------------------------------------------------------------------------

CODES = torch.zeros(4, 32, dtype=torch.uint8)
GDN = case(2, 2)


def delta_rule(**changes: Any) -> Callable[[], object]:
    return lambda: jitfp4.gated_delta_rule_mtp(**(GDN | changes))


def decode(function: Callable[..., object], **changes: Any) -> Callable[[], object]:
    one = {name: x[:, :1] if x.dim() > 1 else x for name, x in GDN.items() if not name.startswith("initial_state")}
    return lambda: function(**(one | {"state": GDN["initial_state"]} | changes))


SHIFTED_STATE = shifted(GDN["initial_state"])
MEMORY = torch.zeros(4 * 64 + 4 * 32, dtype=torch.bfloat16)
BAD_CALLS: dict[str, tuple[str, str, Callable[[], object]]] = {
    "a": ("a", "16-byte alignment", lambda: jitfp4.nvfp4_quantize(shifted(A), 1.0)),
    "input": ("input", "16-byte alignment", lambda: jitfp4.fp4_quantize(shifted(A), 1.0)),
    "silu": ("input", "16-byte alignment", lambda: jitfp4.silu_and_mul_nvfp4_quantize(shifted(A), 1.0)),
    "out": ("out", "16-byte alignment", lambda: jitfp4.nvfp4_quantize(A, 1.0, out=shifted(CODES))),
    "codes": (
        "e2m1_tensor",
        "16-byte alignment",
        lambda: jitfp4.e2m1_and_ufp8sf_scale_to_float(
            shifted(CODES), torch.zeros(4, 4, dtype=torch.uint8), torch.ones(1), is_sf_swizzled_layout=False
        ),
    ),
    "norm": ("input", "16-byte alignment", lambda: rmsnorm_fp4quant(shifted(A), A[0])),
    "residual": ("residual", "16-byte alignment", lambda: add_rmsnorm_fp4quant(A, shifted(A), A[0])),
    "residual on input": ("residual", "memory of its own", lambda: add_rmsnorm_fp4quant(MEMORY[:256].view(4, 64),
        MEMORY[128:].view(4, 64), A[0])),
    "output on input": (
        "y_fp4",
        "memory of its own",
        lambda: rmsnorm_fp4quant(MEMORY[:256].view(4, 64), A[0], MEMORY.view(torch.uint8)[128:256].view(4, 32)),
    ),
    "initial_state": ("initial_state", "16-byte alignment", delta_rule(initial_state=SHIFTED_STATE)),
    "state": ("state", "16-byte alignment", decode(jitfp4.gated_delta_rule_decode, state=SHIFTED_STATE)),
    "pretransposed state": (
        "state",
        "16-byte alignment",
        decode(jitfp4.gated_delta_rule_decode_pretranspose, state=SHIFTED_STATE),
    ),
    "intermediate_states_buffer": (
        "intermediate_states_buffer",
        "16-byte alignment",
        delta_rule(intermediate_states_buffer=shifted(torch.zeros(2, 2, 2, 64, 64))),
    ),
    "output on v": ("output", "memory of its own", delta_rule(output=GDN["v"])),
}  # fmt: skip


@pytest.mark.parametrize("device", ["cpu", pytest.param("sm_90a", marks=SIM)])
@pytest.mark.parametrize("name", BAD_CALLS)
def test_errors_name_the_public_argument(name: str, device: str) -> None:
    argument, allowed, call = BAD_CALLS[name]
    state = GDN["initial_state"].clone()
    with pytest.raises(ArgumentError, match=allowed) as caught:
        if device == "cpu":
            call()
        else:
            with sim.device(device):
                call()
    assert caught.value.name == argument
    assert_same_bytes("state", GDN["initial_state"], state)


# ---- forced tactics --------------------------------------------------------------------------------------------------


@pytest.mark.sim
@pytest.mark.compile
def test_a_forced_tactic_is_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Plan] = []
    launch = engine.launch

    def record(plan: Plan, *args: Any, **options: Any) -> object:
        seen.append(plan)
        return launch(plan, *args, **options)

    monkeypatch.setattr(engine, "launch", record)
    with sim.device("sm_90a"):
        want = jitfp4.nvfp4_quantize(A, 1.0)
        with QUANTIZE.forced(VectorTactic(4, 256)):
            got = jitfp4.nvfp4_quantize(A, 1.0)
            with QUANTIZE.forced(TmaTactic(6, 1, 2)):
                inner = jitfp4.nvfp4_quantize(A, 1.0)
            jitfp4.nvfp4_quantize(A, 1.0)
        jitfp4.nvfp4_quantize(A, 1.0)
    assert [plan.kernel for plan in seen] == [VECTOR, VECTOR, TMA, VECTOR, VECTOR]
    assert [plan.spec.blocks_per_thread for plan in seen] == [1, 4, 2, 4, 1]
    for one in (got, inner):
        for left, right in zip(one, want, strict=True):
            assert_same_bytes("result", left, right)


@pytest.mark.parametrize(
    ("operation", "tactic", "arch", "call", "why"),
    [
        (QUANTIZE, TmaTactic(6, 1, 2), "sm_89", lambda: jitfp4.nvfp4_quantize(A, 1.0), "it copies by TMA"),
        (QUANTIZE, TmaTactic(6, 1, 2), "sm_90a", lambda: jitfp4.mxfp4_quantize(A), "it takes bf16 or f16 to NVFP4"),
        (QUANTIZE, TableTactic(4, 768, 1), "sm_90a", lambda: jitfp4.nvfp4_quantize(A, 1.0), "it takes E4M3"),
        (
            norm.RMSNORM,
            NormTactic(1, 1),
            "sm_90a",
            lambda: rmsnorm_fp4quant(torch.zeros(1, 1024).half(), torch.zeros(1024).half()),
            "rows of at most 512 elements",
        ),
    ],
)  # fmt: skip
def test_an_illegal_tactic_is_an_error_with_the_reason(
    operation: Operation[Any, Any], tactic: object, arch: str, call: Callable[[], object], why: str
) -> None:
    with sim.device(arch), operation.forced(tactic), pytest.raises(ArgumentError, match=why) as caught:
        call()
    assert caught.value.name == "tactic"


def test_a_tactic_of_another_operation_is_refused() -> None:
    with pytest.raises(ArgumentError, match="tactic"), QUANTIZE.forced(NormTactic(1, 1)):
        pass


def test_forcing_ends_with_its_block_and_stays_in_its_context() -> None:
    seen: list[object] = []
    with pytest.raises(KeyError), QUANTIZE.forced(VectorTactic(4, 256)):
        thread = threading.Thread(target=lambda: seen.append(QUANTIZE._forced.get()))
        thread.start()
        thread.join()
        seen.append(QUANTIZE._forced.get())
        raise KeyError
    assert [*seen, QUANTIZE._forced.get()] == [None, VectorTactic(4, 256), None]


# ---- what runs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "sm_90a"])
def test_nothing_runs_on_empty_inputs(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither kernels, nor references, nor even selection: an empty problem has no geometry."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("it ran")

    monkeypatch.setattr(engine, "launch", refuse)
    for operation in operations():
        monkeypatch.setattr(operation, "_reference", refuse)
    none = {name: x if name in ("initial_state", "A_log", "dt_bias") else x[:0] for name, x in GDN.items()}
    with sim.device(device) if device != "cpu" else nullcontext():
        for layout in jitfp4.SfLayout:
            q, sf = jitfp4.nvfp4_quantize(A[:0], 1.0, layout)
            assert q.shape == (0, 32) and sf.shape == layout.shape(0, 4)
            assert jitfp4.nvfp4_dequantize(q, sf, 1.0, layout).shape == (0, 64)
        assert jitfp4.nvfp4_quantize(A[:0], 1.0, per_token_activation=True)[2].shape == (0,)
        assert jitfp4.nvfp4_batched_quantize(A[None, :0], 1.0)[0].shape == (1, 0, 32)
        assert jitfp4.nvfp4_batched_quantize(A[None][:0], 1.0)[0].shape == (0, 4, 32)
        assert rmsnorm_fp4quant(A[:0], A[0])[0].shape == (0, 32)
        assert jitfp4.gated_delta_rule_mtp(**none)[0].shape == (0, 2, 2, 64)


def test_results_carry_no_gradient() -> None:
    x, weight = A.clone().requires_grad_(), A[0].clone().requires_grad_()
    scale = torch.ones(1, requires_grad=True)
    arguments = {
        name: x.clone().requires_grad_() if x.is_floating_point() and name != "initial_state" else x.clone()
        for name, x in GDN.items()
    }
    q, sf = jitfp4.nvfp4_quantize(x, scale)
    results = [
        *(q, sf),
        *jitfp4.nvfp4_quantize(x, scale, per_token_activation=True),
        *jitfp4.fp4_quantize(x, scale, is_global_scale_inversed=True),
        *jitfp4.nvfp4_batched_quantize(x[None], scale),
        *rmsnorm_fp4quant(x, weight, global_scale=scale),
        *add_rmsnorm_fp4quant(x, A.clone(), weight),
        jitfp4.nvfp4_dequantize(q, sf, scale),
        *jitfp4.gated_delta_rule_mtp(**arguments),
    ]
    assert len(results) == 16 and not any(result.requires_grad for result in results)


@pytest.mark.complete
def test_an_operation_has_one_table_for_each_architecture() -> None:
    for operation in operations():
        for arch in ARCHS.values():
            assert sum(table.serves(arch) for table in operation.tables) <= 1
        assert sum(table.needs is None for table in operation.tables) == 1

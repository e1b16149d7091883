"""Every generated kernel on the GPU and in the simulator: public functions on CUDA tensors and on CPU tensors.

Of a grid that is too large to simulate, some CTAs are simulated, and what they wrote is compared. A kernel without
approximate functions must give the same bytes; for others the calls have bounds. Eight cases of each
kernel run, chosen by digest, and with ``--all`` every one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch

import jitfp4
import jitfp4.families
from jitfp4 import Fp4Weight, engine, replay, sim
from jitfp4.families.attention.kernels.prefill_masked import MaskedPrefillTactic
from jitfp4.families.attention.kernels.prefill_wgmma_masked import MaskedWgmmaTactic
from jitfp4.families.gdn.kernels.chunk import KERNEL as CHUNK
from jitfp4.families.gdn.kernels.delta_rule import KERNEL as DELTA_RULE
from jitfp4.families.gdn.kernels.prefill import PrefillTactic
from jitfp4.families.gdn.kernels.prefill_wgmma import WgmmaTactic
from jitfp4.families.gdn.prefill_operation import GATED_DELTA_RULE_PREFILL
from jitfp4.families.gemm.kernels.blockscaled import K64Tactic
from jitfp4.families.gemm.kernels.blockscaled_k96 import K96Tactic
from jitfp4.families.gemm.kernels.blockscaled_masked import MaskedTactic
from jitfp4.families.gemm.kernels.portable_masked import PortableMaskedTactic
from jitfp4.kernel import Plan, kernels, lookup
from jitfp4.sim import api
from jitfp4.sim.machine import Machine, linear
from jitfp4.spec import KernelSpec
from jitfp4.tensors import device_arch
from tests.inputs.good import good_calls
from tests.inputs.repeated import prompt
from tests.sim import engine_calls, quantize_calls
from tests.sim.call import Call, Case
from tests.support.attention import relative_error
from tests.support.compare import POISON
from tests.support.sample import some

DEVICE = "cuda"
SIMULATED_CTAS = 200  # of a grid; of a larger one, the batches at its start, middle and end
SAMPLE = 8  # cases of a kernel without --all
ELSEWHERE = ("experts/", "step/", "attention/quantize")
"""tests/families/test_experts.py and test_step.py hold the GPU and the simulator against references,
test_attention_fp4_output.py against what the quantizer writes.
"""
COMPLETE = ("quantize/", "gdn/chunk", "gdn/delta_rule")  # with --all, their cases launch every specialisation

PREFILL = {torch.bfloat16: 2**-7, torch.float32: 2**-7}  # left operands are rounded to 16 bits


def good_cases(*functions: str, bounds: dict[torch.dtype, float] | None = None) -> Iterator[Case]:
    """The good calls of functions, which are small."""
    yield from (partial(lambda name: Call(name, good_calls()[name](), bounds=bounds), name) for name in functions)


def gdn_prefill_cases(tactic: PrefillTactic | WgmmaTactic) -> Iterator[Case]:
    forced = GATED_DELTA_RULE_PREFILL, tactic
    for case in good_cases("chunk_gated_delta_rule", bounds=PREFILL):
        yield partial(lambda case: case()._replace(forced=forced), case)


def gdn_part_cases() -> Iterator[Case]:
    """A sequence of three parts."""
    forced = GATED_DELTA_RULE_PREFILL, WgmmaTactic(64, divided=True)
    yield partial(lambda: Call("chunk_gated_delta_rule", prompt(600, 1), forced=forced, bounds=PREFILL))


CASES: dict[str, Callable[[], Iterable[Case]]] = {
    "attention/decode": engine_calls.decode_cases,
    "attention/decode_masked": engine_calls.decode_masked_cases,
    "attention/prefill": engine_calls.prefill_cases,
    "attention/prefill_masked": partial(engine_calls.prefill_masked_cases, MaskedPrefillTactic(4, 16, 16, 1)),
    "attention/prefill_wgmma": engine_calls.prefill_wgmma_cases,
    "attention/prefill_wgmma_masked": partial(engine_calls.prefill_masked_cases, MaskedWgmmaTactic(tile=64)),
    "conv/causal": partial(good_cases, "causal_conv1d_fn", "causal_conv1d_update", bounds={torch.bfloat16: 2.0**-12}),
    "gdn/chunk": partial(quantize_calls.gdn_cases, CHUNK),
    "gdn/delta_rule": partial(quantize_calls.gdn_cases, DELTA_RULE),
    "gdn/prefill": partial(gdn_prefill_cases, PrefillTactic(32, 2)),
    "gdn/prefill_join": gdn_part_cases,
    "gdn/prefill_parts": gdn_part_cases,
    "gdn/prefill_products": partial(gdn_prefill_cases, PrefillTactic(32, 1)),
    "gdn/prefill_wgmma": partial(gdn_prefill_cases, WgmmaTactic(64)),
    "gemm/blockscaled": partial(engine_calls.blockscaled_cases, K64Tactic(64, 1, 2), K64Tactic(64, 2, 2)),
    "gemm/blockscaled_k96": partial(engine_calls.blockscaled_cases, K96Tactic(64, 1, 2, 2), K96Tactic(64, 2, 2, 3)),
    "gemm/blockscaled_masked": partial(engine_calls.masked_cases, MaskedTactic(64, 1, 2), MaskedTactic(64, 2, 2)),
    "gemm/expand": engine_calls.fp4_wide_cases,
    "gemm/expanded_fp8": engine_calls.expanded_fp8_cases,
    "gemm/narrow": engine_calls.narrow_cases,
    "gemm/portable": engine_calls.portable_cases,
    "gemm/portable_masked": partial(engine_calls.masked_cases, PortableMaskedTactic(64, 128, 64, 32, 1, 4)),
    "gemm/wide": engine_calls.wide_cases,
    "gemm/wide_fp4": engine_calls.fp4_wide_cases,
    "gemm/wide_fp8": engine_calls.wide_fp8_cases,
    "kv/dequantize": engine_calls.kv_dequantize_cases,
    "kv/quantize": engine_calls.kv_quantize_cases,
    "kv/rope_append": partial(good_cases, "rope_append_paged_kv_cache"),
    "norm/linear": partial(good_cases, "rmsnorm_linear"),
    "norm/rmsnorm": partial(good_cases, "rmsnorm", "gemma_rmsnorm", "fused_add_rmsnorm", "gemma_fused_add_rmsnorm"),
    "norm/rmsnorm_fp4quant": quantize_calls.norm_cases,
    "norm/rows_fp4quant": quantize_calls.norm_rows_cases,
    "norm/rows_fp8quant": partial(good_cases, "rows_fp8quant", "rmsnorm_fp8quant", "add_rmsnorm_fp8quant"),
    "quantize/dequantize": quantize_calls.dequantize_cases,
    "quantize/e4m3": quantize_calls.e4m3_cases,
    "quantize/grouped": quantize_calls.grouped_cases,
    "quantize/per_token": quantize_calls.per_token_cases,
    "quantize/tma": quantize_calls.tma_cases,
    "quantize/vector": quantize_calls.vector_cases,
}


class Launches:
    """What the calls of a test launch. Of large grids the simulator runs a part, unless CTAs share their work."""

    def __init__(self) -> None:
        self.found: set[tuple[str, KernelSpec]] = set()
        self.whole = self.partial = False

    def record(self, plan: Plan, *args: Any, **kwargs: Any) -> object:
        self.found.add((plan.kernel.name, plan.spec))
        return _launch(plan, *args, **kwargs)

    def machine(self, program: Any, launch: Any, memory: Any, params: Any, const: Any, first: int, ctas: int) -> Any:
        """In place of a Machine: one that does nothing in the midst of a large grid."""
        total = linear(launch.geometry.grid)
        kept = total <= SIMULATED_CTAS or first == 0 or first + ctas >= total or first <= total // 2 < first + ctas
        if kept or self.whole:
            return Machine(program, launch, memory, params, const, first, ctas)
        self.partial = True
        return Skipped(block_runs=(0,) * len(program.blocks))


_launch, _empty = engine.launch, torch.empty


def poisoned_empty(*args: Any, **kwargs: Any) -> torch.Tensor:
    out = _empty(*args, **kwargs)
    if out.dim():
        out.view(torch.uint8).fill_(POISON)
    return out


@dataclasses.dataclass
class Skipped:
    """A batch of CTAs that does not run: what sim.run() asks of a Machine."""

    block_runs: tuple[int, ...]
    races: None = None
    issued: int = 0

    def run(self) -> None:
        pass

    def release(self) -> None:
        pass


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    """Records what is launched. New memory is poisoned."""
    launches = Launches()
    monkeypatch.setattr(engine, "launch", launches.record)
    monkeypatch.setattr(api, "Machine", launches.machine)
    monkeypatch.setattr(torch, "empty", poisoned_empty)
    with replay.suspended():
        yield launches


@pytest.mark.complete
def test_every_kernel_has_cases() -> None:
    wanted = {kernel.name for kernel in kernels() if not kernel.name.startswith(ELSEWHERE)}
    assert CASES.keys() == wanted, "CASES of tests/sim/test_kernels_against_gpu.py"


@pytest.mark.gpu
@pytest.mark.sim
@pytest.mark.compile
@pytest.mark.slow
@pytest.mark.parametrize("kernel", CASES)
def test_kernels(kernel: str, launches: Launches, whole: bool) -> None:
    arch = device_arch(torch.cuda.current_device())
    specs = set(lookup(kernel).specs(arch))
    if not specs and not lookup(kernel).specs(arch, "all"):
        pytest.skip(f"not on {arch.name}")
    faults: list[str] = []
    for case in some(SAMPLE, CASES[kernel](), whole=whole, name=lambda case: f"{case.args}{case.keywords}"):
        call = case()
        faults += [f"{described(call)}: {difference}" for difference in compared(call, launches)]
    assert not faults, f"{len(faults)} tensors differ, such as\n" + "\n".join(faults[:5])
    launched = {spec for name, spec in launches.found if name == kernel}
    assert launched, f"no call launches {kernel}"
    if whole and kernel.startswith(COMPLETE):
        missing = specs - launched
        assert not missing, f"{len(missing)} specialisations were not launched, such as {next(iter(missing))}"


def compared(call: Call, launches: Launches) -> Iterator[str]:
    """How a call on the GPU and the same one in the simulator differ."""
    function, launches.partial = getattr(jitfp4, call.function), False
    launches.whole = call.bounds is not None
    on_gpu, on_cpu = moved(call.arguments, DEVICE), moved(call.arguments, "cpu")
    with call.forced[0].forced(call.forced[1]) if call.forced else nullcontext():
        on_gpu_results = function(**on_gpu)
        with sim.device(device_arch(torch.cuda.current_device())):
            simulated_results = function(**on_cpu)
    if call.bounds is None:
        gpu, simulated = tensors(on_gpu, on_gpu_results), tensors(on_cpu, simulated_results)
        yield from differences(tensors(call.arguments, ()), gpu, simulated, launches.partial)
        return
    for n, (left, right) in enumerate(zip(flat(on_gpu_results), flat(simulated_results), strict=True)):
        a, b, bound = left.cpu().double(), right.double(), call.bounds[left.dtype]
        finite = b.isfinite()
        if not torch.equal(a.isfinite(), finite):
            yield f"result {n} {left.dtype}{list(left.shape)}: not finite in other places"
        elif not (error := relative_error(a[finite], b[finite])) <= bound:
            yield f"result {n} {left.dtype}{list(left.shape)}: {error} of its norm away, {bound} allowed"


def moved(value: Any, device: str) -> Any:
    """Copies of the tensors on ``device``, wherever they are in a value."""
    if isinstance(value, torch.Tensor):
        return value.clone().to(device)
    if isinstance(value, Fp4Weight):
        parts = {name: moved(getattr(value, name), device) for name in ("data", "row_scale")}
        return dataclasses.replace(value, **parts)
    if isinstance(value, tuple):
        return tuple(moved(part, device) for part in value)
    return {name: moved(part, device) for name, part in value.items()} if isinstance(value, dict) else value


def flat(value: Any) -> list[torch.Tensor]:
    """The tensors of a value."""
    if isinstance(value, (tuple, list)):
        return [tensor for part in value for tensor in flat(part)]
    return [value] if isinstance(value, torch.Tensor) else []


def tensors(arguments: dict[str, Any], results: Any) -> list[torch.Tensor]:
    """All that a call may have written, arguments first."""
    given = flat(list(arguments.values()))
    return [
        x.cpu().view(torch.uint8) if x.dtype.itemsize == 1 else x.cpu()
        for x in (*given, *(x for x in flat(results) if not any(x is y for y in given)))
    ]


def described(call: Call) -> str:
    values = ", ".join(f"{name}={summary(value)}" for name, value in call.arguments.items())
    return f"{call.function}({values}){f' by {call.forced[1]}' if call.forced else ''}"


def summary(value: Any) -> str:
    if isinstance(value, Fp4Weight):
        return f"{value.format}[{value.n}, {value.k}]"
    if isinstance(value, tuple):
        return f"({', '.join(map(summary, value))})"
    return f"{value.dtype}{list(value.shape)}" if isinstance(value, torch.Tensor) else str(value)


def differences(
    before: list[torch.Tensor], gpu: list[torch.Tensor], simulated: list[torch.Tensor], partial: bool
) -> Iterator[str]:
    """Tensors with unequal bytes; with ``partial``, where the simulator changed what was there before."""
    for n, (left, right) in enumerate(zip(gpu, simulated, strict=True)):
        a, b = (x.contiguous().view(torch.uint8) for x in (left, right))
        wrong = a != b
        if partial:
            old = before[n].contiguous().view(torch.uint8) if n < len(before) else torch.full_like(b, POISON)
            assert n < len(before) or (b != old).any()
            wrong &= b != old
        if wrong.any():
            first = tuple(wrong.nonzero()[0].tolist())
            yield (
                f"tensor {n} {right.dtype}{list(right.shape)}: {int(wrong.sum())} of {wrong.numel()} bytes, first at "
                f"{first}: GPU {a[first]:#x}, simulator {b[first]:#x}"
            )

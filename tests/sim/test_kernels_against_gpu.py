"""Every generated kernel on the GPU and in the simulator: public functions on CUDA tensors and on CPU tensors.

``CALLS`` has calls for each family that together launch all of its specialisations. Of a grid that is too large to
simulate, some CTAs are simulated, and what they wrote is compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch

import jitfp4
import jitfp4.families
from jitfp4 import SfLayout, engine, replay, sim
from jitfp4.families.gdn.operation import CHUNK, DELTA_RULE, DTYPES, GATED_DELTA_RULE, STATE_DTYPES
from jitfp4.families.gdn.problem import Problem, StateLayout
from jitfp4.kernel import AnyKernel, Plan, kernels, lookup
from jitfp4.sim import api
from jitfp4.sim.machine import Machine, linear
from jitfp4.spec import KernelSpec
from jitfp4.tensors import device_arch
from tests.support.compare import POISON
from tests.support.inputs import hard_blocks, random_matrix

pytestmark = [pytest.mark.gpu, pytest.mark.sim, pytest.mark.compile, pytest.mark.slow]

DEVICE = "cuda"
SIMULATED_CTAS = 200  # of a grid; of a larger one, the batches at its start, middle and end
HALVES = (torch.bfloat16, torch.float16)
Arguments = dict[str, Any]
Call = tuple[str, Arguments]


def matrix(m: int, k: int, dtype: torch.dtype) -> torch.Tensor:
    """[m, k]: hard blocks, then random ones; rows repeat after 256."""
    wide = torch.bfloat16 if dtype == torch.float8_e4m3fn else dtype
    rows, hard = random_matrix(min(m, 256), k, wide), hard_blocks(wide).flatten()
    rows.view(-1)[: len(hard)] = hard
    return rows.repeat(-(-m // 256), 1)[:m].to(dtype)


def gates(m: int, k: int, dtype: torch.dtype) -> torch.Tensor:
    """[m, 2k] whose first half silu() maps to itself or zero, however exp is computed."""
    both = matrix(m, 2 * k, dtype)
    choices = torch.tensor([0.0, 20.5, 79.0, 100.0, 1000.0, -200.0, -1000.0], dtype=dtype)
    both[:, :k] = choices[torch.arange(m * k).view(m, k) % len(choices)]
    return both


# As many elements as select() needs to choose each specialisation.
SMALL, MEDIUM, LARGE = (37, 720), (2049, 4096), (32769, 4096)


def vector_calls() -> Iterator[Call]:
    for layout, (m, k) in product(SfLayout, (SMALL, MEDIUM, LARGE)):
        flags = {
            "is_sf_swizzled_layout": layout is not SfLayout.layout_linear,
            "is_sf_8x4_layout": layout is SfLayout.layout_8x4,
        }
        scale, row_scales = torch.tensor([0.7]), torch.linspace(0.1, 3, m)
        for dtype in HALVES:
            yield "nvfp4_quantize", {"a": matrix(m, k, dtype), "a_global_sf": scale, "sfLayout": layout}
            yield "mxfp4_quantize", {"a": matrix(m, k // 32 * 32, dtype), "sfLayout": layout}
            yield "silu_and_mul_nvfp4_quantize", flags | {"input": gates(m, k, dtype), "global_scale": scale}
        yield "fp4_quantize", flags | {"input": matrix(m, k, torch.float8_e4m3fn), "global_scale": row_scales}


def e4m3_calls() -> Iterator[Call]:
    for layout, (m, k) in product(SfLayout, (SMALL, MEDIUM)):
        a = matrix(m, k, torch.float8_e4m3fn)
        yield "nvfp4_quantize", {"a": a, "a_global_sf": torch.tensor([0.7]), "sfLayout": layout}


def row_scale_calls() -> Iterator[Call]:
    for dtype in HALVES:
        yield (
            "nvfp4_quantize",
            {"a": random_matrix(37, 720, dtype), "a_global_sf": torch.tensor([1 / 2688]), "per_token_activation": True},
        )


def grouped_calls() -> Iterator[Call]:
    mask, scales = torch.tensor([0, 130, 7], dtype=torch.int32), torch.tensor([0.5, 1.0, 3.0])
    for dtype in HALVES:
        batch = matrix(3 * 130, 272, dtype).view(3, 130, 272)
        yield "nvfp4_batched_quantize", {"a": batch, "a_global_sf": torch.tensor([0.7])}
        yield "scaled_fp4_grouped_quantize", {"a": batch, "mask": mask, "a_global_sf": scales}
        pairs = gates(3 * 130, 272, dtype).view(3, 130, 544)
        yield "silu_and_mul_scaled_nvfp4_experts_quantize", {"a": pairs, "mask": mask, "a_global_sf": scales}


def dequantize_calls() -> Iterator[Call]:
    m, k = 70, 704
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 256, (m, k // 2), generator=generator, dtype=torch.uint8)
    for layout, dtype in product(SfLayout, (torch.float32, *HALVES)):
        common = {"a_fp4": codes, "sfLayout": layout, "out_dtype": dtype}
        scales = torch.randint(0, 128, layout.shape(m, k // 16), generator=generator, dtype=torch.uint8)
        yield "nvfp4_dequantize", common | {"a_sf": scales, "global_decode_scale": torch.tensor([0.3])}
        powers = torch.randint(0, 256, layout.shape(m, k // 32), generator=generator, dtype=torch.uint8)
        yield "mxfp4_dequantize", common | {"a_sf": powers}


def norm_calls() -> Iterator[Call]:
    recipes = ((16, "e4m3"), (32, "e4m3"), (32, "ue8m0"))
    few = ((5, 256), (3, 4096), (2, 16384), (2, 32768), (1, 65536))
    many = ((2700, 2048), (2700, 4096), (700, 8192))
    for dtype, (block, scale), (m, h) in product(HALVES, recipes, (*few, *many)):
        x, residual = matrix(m, h, dtype), random_matrix(1, h, dtype, seed=1).repeat(m, 1)
        common = {
            "weight": random_matrix(1, h, dtype, seed=2)[0],
            "global_scale": None if scale == "ue8m0" else torch.tensor([3.0]),
            "block_size": block,
            "scale_format": scale,
        }
        yield "rmsnorm_fp4quant", common | {"input": x, "is_sf_swizzled_layout": True}
        yield (
            "add_rmsnorm_fp4quant",
            common | {"input": x, "residual": residual, "output_both_sf_layouts": True, "y_out": torch.zeros_like(x)},
        )


def gdn_calls(kernel: AnyKernel) -> Iterator[Call]:
    """A call for each specialisation. Gates at which exp and log do not matter: decay 1, beta 1/2."""
    arch, found = device_arch(torch.cuda.current_device()), set()
    for dtype, state, (dim, value_dim, gates), tokens, heads, (steps, slots) in product(
        HALVES,
        (torch.float32, torch.bfloat16),
        ((128, 128, None), (64, 64, None), (128, 128, torch.float32), (64, 64, torch.float32), (128, 256, None)),
        (1, 2, 3, 6, 11),
        (2, 65, 300, 513, 1025),
        ((False, False), (True, False), (True, True)),
    ):
        if value_dim != dim and state != torch.float32:
            continue
        general = value_dim != dim or gates is not None
        problem = Problem(
            dtype=DTYPES[dtype],
            state_dtype=STATE_DTYPES[state],
            state_layout=StateLayout.VK,
            head_dim=dim,
            value_dim=value_dim,
            tokens=tokens,
            batch=1,
            value_heads=heads,
            store_steps=steps,
            step_slots=slots,
            general=general,
        )
        tactic = GATED_DELTA_RULE.select(problem, arch)
        spec = kernel.specialise(problem, tactic) if type(tactic) is kernel.tactic else None
        if spec is not None and spec not in found:
            found.add(spec)
            arguments = delta_rule_arguments(dtype, state, dim, tokens, heads, value_dim, gates)
            if slots:
                arguments["initial_state"] = arguments["initial_state"].repeat(tokens, 1, 1, 1)
                arguments["ssm_state_indices"] = torch.arange(tokens).view(1, tokens)
            elif steps:
                pool = arguments["initial_state"]
                arguments["intermediate_states_buffer"] = torch.zeros(1, tokens, *pool.shape[1:], dtype=state)
            # the chunkwise kernel has an approximate 1 / sqrt
            yield "gated_delta_rule_mtp", arguments | {"use_qk_l2norm": kernel is DELTA_RULE}
        by_columns = kernel is DELTA_RULE and state is torch.float32 and (heads == 2 or not general)
        if by_columns and tokens == 1 and not steps:
            one = delta_rule_arguments(dtype, state, dim, 1, heads, value_dim, gates)
            del one["initial_state_indices"]
            yield "gated_delta_rule_decode", one | {"state": one.pop("initial_state").view(1, heads, dim, value_dim)}


def delta_rule_arguments(
    dtype: torch.dtype,
    state: torch.dtype,
    dim: int,
    tokens: int,
    heads: int,
    value_dim: int,
    gates: torch.dtype | None,
) -> Arguments:
    generator = torch.Generator().manual_seed(dim + tokens + heads)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    return {
        "q": normal(1, tokens, 1, dim).to(dtype),
        "k": normal(1, tokens, 1, dim).to(dtype),
        "v": normal(1, tokens, heads, value_dim).to(dtype),
        "initial_state": normal(1, heads, value_dim, dim).to(state),
        "initial_state_indices": torch.arange(1),
        "A_log": torch.full((heads,), -torch.inf),
        "a": normal(1, tokens, heads).to(gates or dtype),
        "dt_bias": normal(heads),
        "b": torch.zeros(1, tokens, heads, dtype=gates or dtype),
    }


CALLS: dict[str, Callable[[], Iterator[Call]]] = {
    "gdn/chunk": partial(gdn_calls, CHUNK),
    "gdn/delta_rule": partial(gdn_calls, DELTA_RULE),
    "norm/rmsnorm_fp4quant": norm_calls,
    "quantize/dequantize": dequantize_calls,
    "quantize/e4m3": e4m3_calls,
    "quantize/grouped": grouped_calls,
    "quantize/row_scale": row_scale_calls,
    "quantize/vector": vector_calls,
}


class Launches:
    """What the calls of a test launch. Of large grids the simulator runs a part."""

    def __init__(self) -> None:
        self.found: set[tuple[str, KernelSpec]] = set()
        self.partial = False

    def record(self, plan: Plan, *args: Any, **kwargs: Any) -> object:
        self.found.add((plan.kernel.name, plan.spec))
        return _launch(plan, *args, **kwargs)

    def machine(self, program: Any, launch: Any, memory: Any, params: Any, const: Any, first: int, ctas: int) -> Any:
        """In place of a Machine: one that does nothing in the midst of a large grid."""
        total = linear(launch.geometry.grid)
        kept = total <= SIMULATED_CTAS or first == 0 or first + ctas >= total or first <= total // 2 < first + ctas
        if kept:
            return Machine(program, launch, memory, params, const, first, ctas)
        self.partial = True
        return Skipped(block_runs=(0,) * len(program.blocks))


_launch, _empty = engine.launch, torch.empty


def poisoned_empty(*args: Any, **kwargs: Any) -> torch.Tensor:
    out = _empty(*args, **kwargs)
    if out.dim():
        out.view(torch.uint8).fill_(POISON)
    return out


@dataclass
class Skipped:
    """A batch of CTAs that does not run."""

    block_runs: tuple[int, ...]

    def run(self) -> None:
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


@pytest.mark.parametrize("kernel", [kernel.name for kernel in kernels()])
def test_kernels(kernel: str, launches: Launches) -> None:
    arch = device_arch(torch.cuda.current_device())
    specs = set(lookup(kernel).specs(arch))
    if not specs:
        pytest.skip(f"not on {arch.name}")
    assert kernel in CALLS, "a new kernel needs calls here"
    faults: list[str] = []
    for name, arguments in CALLS[kernel]():
        function, launches.partial = getattr(jitfp4, name), False
        on_gpu, on_cpu = moved(arguments, DEVICE), moved(arguments, "cpu")
        gpu = tensors(on_gpu, function(**on_gpu))
        with sim.device(arch):
            simulated = tensors(on_cpu, function(**on_cpu))
        wrong = differences(tensors(arguments, ()), gpu, simulated, launches.partial)
        faults += [f"{described(name, arguments)}: {difference}" for difference in wrong]
    assert not faults, f"{len(faults)} tensors differ, such as\n" + "\n".join(faults[:5])
    missing = specs - {spec for found, spec in launches.found if found == kernel}
    assert not missing, f"{len(missing)} specialisations were not launched, such as {next(iter(missing))}"


def moved(arguments: Arguments, device: str) -> Arguments:
    """Copies of the tensors on ``device``."""
    return {name: x.clone().to(device) if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}


def tensors(arguments: Arguments, results: Any) -> list[torch.Tensor]:
    """All that a call may have written, arguments first."""
    results = results if isinstance(results, tuple) else (results,)
    given = [x for x in arguments.values() if isinstance(x, torch.Tensor)]
    return [
        x.cpu().view(torch.uint8) if x.dtype.itemsize == 1 else x.cpu()
        for x in (*given, *(x for x in results if not any(x is y for y in given)))
    ]


def described(name: str, arguments: Arguments) -> str:
    values = ((k, f"{v.dtype}{list(v.shape)}" if isinstance(v, torch.Tensor) else v) for k, v in arguments.items())
    return f"{name}({', '.join(f'{key}={value}' for key, value in values)})"


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

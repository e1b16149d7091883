"""Calls of the mutation campaign: kernels of every family but products and experts, on small inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch

import jitfp4
from jitfp4 import sim
from jitfp4.families.attention.kernels.decode import DecodeTactic
from jitfp4.families.attention.kernels.prefill import PrefillTactic as PortablePrefillTactic
from jitfp4.families.attention.kernels.prefill_wgmma import WgmmaTactic
from jitfp4.families.attention.operation import ATTENTION
from jitfp4.families.gdn.kernels.chunk import ChunkTactic
from jitfp4.families.gdn.kernels.delta_rule import WalkTactic
from jitfp4.families.gdn.kernels.prefill import PrefillTactic
from jitfp4.families.gdn.kernels.prefill_wgmma import WgmmaTactic as WgmmaPrefillTactic
from jitfp4.families.gdn.operation import GATED_DELTA_RULE
from jitfp4.families.gdn.prefill_operation import GATED_DELTA_RULE_PREFILL
from jitfp4.families.kv.kernels.dequantize import DequantizeTactic
from jitfp4.families.kv.kernels.quantize import QuantizeTactic
from jitfp4.families.kv.operation import dequantize, quantize
from jitfp4.families.norm.kernels.rmsnorm_fp4quant import Tactic
from jitfp4.families.norm.kernels.rows_fp4quant import RowsTactic
from jitfp4.families.norm.operation import RMSNORM
from jitfp4.families.quantize.kernels.e4m3 import TACTICS as TABLE_TACTICS
from jitfp4.families.quantize.kernels.tma import TACTICS as TMA_TACTICS
from jitfp4.families.quantize.operation import QUANTIZE
from jitfp4.families.step.kernels.decode import StepTactic
from jitfp4.families.step.operation import DECODE_STEP
from tests.inputs.calls import function_of
from tests.inputs.good import good_calls
from tests.inputs.repeated import repeated_calls
from tests.support.attention import Case
from tests.support.compare import poisoned
from tests.support.conv import make_sequences
from tests.support.gdn import case
from tests.support.inputs import random_matrix
from tests.support.kv import paged_cache
from tests.support.norm import check, rows_of_all_kinds


@contextmanager
def few_sms(count: int = 2) -> Iterator[None]:
    """The simulated GPU has so few SMs that a persistent CTA meets several rows or tiles."""
    device = sim.active_device()
    assert device is not None
    with sim.device(replace(device.arch, num_sms=count)):
        yield


def norm(tactic: Tactic | RowsTactic, h: int) -> None:
    x = rows_of_all_kinds(20 if h < 9000 else 6, h, torch.float16)
    with few_sms(), RMSNORM.forced(tactic):
        check(x, x.flip(0), "both", 16, "e4m3", "cpu")


def quantize_by_tma() -> None:
    with few_sms(), QUANTIZE.forced(TMA_TACTICS[0]):
        jitfp4.nvfp4_quantize(random_matrix(300, 1040, torch.bfloat16), torch.tensor([3.0]))


def quantize_by_table() -> None:
    with QUANTIZE.forced(TABLE_TACTICS[0]):
        quantized(lambda a, g: jitfp4.nvfp4_quantize(a.to(torch.float8_e4m3fn), g), 150)


def gdn(
    tactic: WalkTactic | ChunkTactic | None,
    tokens: int,
    head_dim: int,
    *,
    steps: bool = False,
    state_dtype: torch.dtype = torch.float32,
) -> None:
    arguments = case(2, tokens, 1, 2, head_dim, exact_gates=True, state_dtype=state_dtype)
    if steps:
        arguments["intermediate_states_buffer"] = poisoned((2, tokens, 2, head_dim, head_dim), torch.float32, "cpu")
    with GATED_DELTA_RULE.forced(tactic) if tactic else nullcontext():
        jitfp4.gated_delta_rule_mtp(**arguments)


def gdn_prefill(tactic: PrefillTactic | WgmmaPrefillTactic) -> None:
    with GATED_DELTA_RULE_PREFILL.forced(tactic):
        jitfp4.chunk_gated_delta_rule(**good_calls()["chunk_gated_delta_rule"]())


def gdn_prefill_long(tactic: WgmmaPrefillTactic, dim: int = 64, tokens: int = 520) -> None:
    """Nine chunks: each stage is filled again, and there are two parts whose states are joined with the rest."""
    q, k, v = (random_matrix(tokens, dim, torch.bfloat16, seed).view(tokens, 1, dim) for seed in range(3))
    gates = torch.rand(tokens, 1, generator=torch.Generator().manual_seed(3))
    with GATED_DELTA_RULE_PREFILL.forced(tactic):
        jitfp4.chunk_gated_delta_rule(
            q,
            k,
            v,
            1 - gates / 100,
            gates,
            output_final_state=True,
            cu_seqlens=torch.tensor([0, tokens]),
            use_qk_l2norm_in_kernel=True,
        )


def quantized(call: Callable[[torch.Tensor, torch.Tensor], object], m: int = 10, k: int = 96) -> None:
    call(random_matrix(m, k, torch.bfloat16), torch.tensor([3.0]))


def dequantized(a: torch.Tensor, g: torch.Tensor) -> None:
    jitfp4.nvfp4_dequantize(*jitfp4.nvfp4_quantize(a, g), 1 / 3)


def quantized_experts(a: torch.Tensor, _: torch.Tensor) -> None:
    batch, scales = torch.stack([a, a]), torch.tensor([3.0, 4.0])
    jitfp4.silu_and_mul_scaled_nvfp4_experts_quantize(batch, torch.tensor([7, 2], dtype=torch.int32), scales)


def kv_append(tactic: QuantizeTactic) -> None:
    """Three tokens of one request, whose second page is found through the list."""
    k, v = (random_matrix(3 * 2, 64, torch.bfloat16, seed).view(3, 2, 64) for seed in (0, 1))
    cache = paged_cache(3, 4, 2, (64, 64), "NHD", "pair", "cpu")
    request, position, pages, ends, last = (torch.tensor(x) for x in ([0] * 3, [2, 3, 4], [2, 0], [0, 2], [1]))
    with quantize.forced(tactic):
        jitfp4.nvfp4_quantize_append_paged_kv_cache(
            k, v, request, position, cache.codes, cache.sf, pages, ends, last, 0.01, 0.4
        )


def kv_read(tactic: DequantizeTactic) -> None:
    cache = paged_cache(3, 8, 2, (64, 64), "HND", "pair", "cpu")
    outs = [poisoned((1, 16, 2, 64), torch.bfloat16, "cpu") for _ in "kv"]
    table, length, scale = torch.tensor([[2, 0]]), torch.tensor([13]), torch.tensor([0.4])
    with dequantize.forced(tactic):
        jitfp4.nvfp4_kv_dequantize_paged(cache.codes, cache.sf, table, length, scale, scale, *outs, "HND")


def attention_case(*, sms: int = 2, **options: Any) -> Case:
    """A case with no more workspace than so many SMs need."""
    made = Case(**options)
    made.workspace = torch.zeros(sms << 16, dtype=torch.uint8)
    return made


def attention(tactic: DecodeTactic, **options: Any) -> None:
    """Seven tiles of two requests, which end within the share of a CTA and of a warp."""
    made = attention_case(**({"lengths": (70, 33), "kv_heads": 2, "group": 8} | options))
    with few_sms(), ATTENTION.forced(tactic):
        made.run()


def prefill(
    tactic: PortablePrefillTactic | WgmmaTactic | DecodeTactic,
    *,
    masked: bool = False,
    **options: Any,
) -> None:
    """A request with more rows than an item, and a short one."""
    fields = {"lengths": (150, 20), "q_lens": (40, 9), "kv_heads": 1, "group": 4, "head_dim": 64}
    made = attention_case(**(fields | options))
    mask = torch.full((made.ends[-1], 4), -21846, dtype=torch.int16).view(torch.uint16)
    with few_sms(), ATTENTION.forced(tactic):
        if masked:
            made.run(mask=mask[:, : 2 * -(-max(made.q_lens) // 32)].contiguous())  # type: ignore[arg-type]
        else:
            made.run_context()


def repeated(name: str) -> None:
    """A call that others repeat."""
    function_of(name)(**repeated_calls()[name]())


def step() -> None:
    """Of four CTAs two share the KV head. With as many as the table has, a run takes twice as long."""
    with DECODE_STEP.forced(StepTactic(2, 2, 4)):
        repeated("DecodeStep.run")


def convolve(*, decode: bool) -> None:
    given = make_sequences([1, 1] if decode else [5, 2], 24)
    if decode:
        jitfp4.causal_conv1d_update(given.x, given.states, given.weight, given.bias, "silu", given.slots)
    else:
        jitfp4.causal_conv1d_fn(given.x.T, given.weight, given.bias, given.states, given.starts, given.slots)

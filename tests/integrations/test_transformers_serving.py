"""The kernels that load_kernels() names are all that steps of a model need: tiny random models, on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
from jitfp4 import warmup
from jitfp4.arch import Arch
from jitfp4.dtypes import HALVES
from jitfp4.families.attention.operation import ATTENTION
from jitfp4.families.experts.operation import EXPERTS_DOWN, EXPERTS_UP
from jitfp4.families.experts.problem import Product
from jitfp4.families.gdn.products_operation import PREFILL_PRODUCTS_OPERATION
from jitfp4.families.gemm.operation import MM_BF16_FP4
from jitfp4.families.kv.operation import quantize
from jitfp4.integrations import kernels
from jitfp4.integrations.transformers import (
    Jitfp4Config,
    Nvfp4Cache,
    load_kernels,
    register,
    serving,
    use_fp8_activations,
)
from jitfp4.operation import Operation
from tests.support.tiny_models import load, prompts, save

register()
ARCH = Arch.of("sm_90a")


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[Any]]:
    """What load_kernels() would load on a GPU, by operation."""
    tasks: dict[str, set[Any]] = {}

    def name(operation: Operation[Any, Any], problems: Any) -> None:
        tasks.setdefault(operation.name, set()).update(warmup.needed(operation, problems, ARCH))

    def experts(own: Any, dtype: torch.dtype, slots: int, tokens: int) -> None:
        rest = (HALVES[dtype], own.format, own.experts, slots, tokens, ARCH)
        for operation, matrix in (
            (EXPERTS_UP, (Product.GATED, own.rows13, own.hidden)),
            (EXPERTS_DOWN, (Product.DOWN, own.hidden, own.inter)),
        ):
            name(operation, kernels.expert_products(matrix, *rest))

    stand_ins = {
        "load_products": lambda w, d, m: name(MM_BF16_FP4, kernels.products(HALVES[d], w.format, w.n, w.k, m, w.gated)),
        "load_experts": experts,
        "load_attention": lambda call, traffic: name(
            ATTENTION, kernels.attentions(ATTENTION.problem(call), call.key_cache.shape[1], traffic)
        ),
        "load_growing": lambda operation, *base, like: name(operation, kernels.growing(*base)),  # noqa: ARG005
        "load_appends": lambda d, heads, dim, m, _: name(quantize, kernels.appends(HALVES[d], heads, dim, m)),
    }
    for function, stand_in in stand_ins.items():
        monkeypatch.setattr(serving, function, stand_in)
    return tasks


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe", "gpt_oss", "qwen3_next"])
@torch.no_grad()
def test_no_step_needs_another_kernel(
    kind: str, tmp_path: Path, named: dict[str, set[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(save(kind, tmp_path / "floats"), quantization_config=Jitfp4Config(), attn_implementation="jitfp4")
    load_kernels(model, requests=3, max_cache_len=128, max_tokens=3 * 40)
    assert {"mm_bf16_fp4", "attention"} <= {operation.rpartition(":")[2] for operation in named}
    needed: dict[str, set[Any]] = {}
    call = Operation.__call__

    def watched(self: Operation[Any, Any], arguments: Any) -> Any:
        if self.name in named:
            tasks = warmup.needed(self, [self.problem(self.arguments(*arguments))], ARCH)
            needed.setdefault(self.name, set()).update(tasks)
        return call(self, arguments)

    monkeypatch.setattr(Operation, "__call__", watched)
    for rows, length in ((1, 3), (3, 40)):
        cache = Nvfp4Cache(model.config, 128)
        for part in (prompts(rows, length), prompts(rows, 1)):
            model(part, past_key_values=cache)
    behind = {PREFILL_PRODUCTS_OPERATION.name} if kind == "qwen3_next" else set()  # another's launch, not on a CPU
    assert behind <= named.keys() and needed.keys() == named.keys() - behind
    for operation, tasks in needed.items():
        assert tasks <= named[operation], operation


def test_experts_in_fp8_are_loaded_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loads: list[tuple[int, ...]] = []
    monkeypatch.setattr(serving, "load_fp8_experts", lambda _, __, *sizes: loads.append(sizes))
    model = load(save("qwen3_moe", tmp_path / "floats"), quantization_config=Jitfp4Config())
    load_kernels(model, requests=1, max_cache_len=16, max_tokens=9)
    assert not loads
    use_fp8_activations(model)
    load_kernels(model, requests=1, max_cache_len=16, max_tokens=9)
    sizes = model.config.num_experts, model.config.num_experts_per_tok
    assert set(loads) == {(sizes[1], 128 * sizes[0] // sizes[1], 9)}

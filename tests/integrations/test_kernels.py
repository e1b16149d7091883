"""The kernels that are loaded before an engine serves are all that its calls need."""

from __future__ import annotations

import random
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from jitfp4 import (
    SfLayout,
    engine,
    mm_bf16_fp4,
    nvfp4_quantize,
    prepare_fp4_weight,
    trtllm_batch_decode_with_kv_cache,
    warmup,
)
from jitfp4.arch import Arch
from jitfp4.errors import ArgumentTypeError
from jitfp4.families.attention.arguments import Arguments
from jitfp4.families.attention.operation import ATTENTION
from jitfp4.families.experts.gather_operation import EXPERTS_GATHER
from jitfp4.families.experts.operation import EXPERTS_DOWN, EXPERTS_UP
from jitfp4.families.experts.problem import GatherProblem, Product
from jitfp4.families.experts.problem import Problem as ExpertsProblem
from jitfp4.families.experts.results_operation import EXPERTS_RESULTS
from jitfp4.families.experts.tables import item_rows_of
from jitfp4.families.gdn.prefill_operation import GATED_DELTA_RULE_PREFILL
from jitfp4.families.gemm.fp8_operation import MM_FP8_FP4
from jitfp4.families.gemm.operation import MM_BF16_FP4
from jitfp4.families.gemm.problem import Fp8Problem
from jitfp4.families.gemm.problem import Problem as ProductProblem
from jitfp4.families.kv.operation import quantize
from jitfp4.families.kv.problem import Addressing, QuantizeProblem
from jitfp4.formats import MXFP4, NVFP4, DType
from jitfp4.integrations import kernels
from jitfp4.integrations.delta_rule import Shape
from jitfp4.integrations.fp8 import LEAST_ROWS
from jitfp4.integrations.kernels import (
    Traffic,
    appends,
    attentions,
    expert_products,
    fp8_products,
    load_appends,
    load_attention,
    load_fp8_experts,
    load_products,
    products,
)

ARCHS = ["sm_80", "sm_90a", "sm_100a"]
ARCH = Arch.of("sm_90a")
FP8_KERNELS = ("quantize", "wide_up", "wide_down", "combine")


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("n", "k"), [(6144, 4096), (768, 2048), (28672, 4096)])
def test_products_of_every_number_of_rows(arch: str, n: int, k: int) -> None:
    for block_format, most in ((NVFP4, 1500), (MXFP4, 77)):
        listed = warmup.needed(MM_BF16_FP4, products(DType.BF16, block_format, n, k, most), Arch.of(arch))
        every = (ProductProblem(DType.BF16, DType.BF16, block_format, m, n, k) for m in range(1, most + 1))
        assert set(warmup.needed(MM_BF16_FP4, every, Arch.of(arch))) <= set(listed)
        assert len(listed) < 16


@pytest.mark.parametrize(("n", "k"), [(2112, 4096), (7168, 2048), (28672, 4096)])
def test_products_in_fp8_of_every_number_of_rows(n: int, k: int) -> None:
    most, arch = 2500, Arch.of("sm_90a")
    listed = warmup.needed(MM_FP8_FP4, fp8_products(DType.BF16, NVFP4, n, k, most), arch)
    every = (Fp8Problem(DType.BF16, NVFP4, m, n, k) for m in range(LEAST_ROWS, most + 1))
    assert set(warmup.needed(MM_FP8_FP4, every, arch)) <= set(listed)
    assert len(listed) < 16


def call(*, head_dim: int, heads: int, kv_heads: int, page: int, batch: int, q_len: int, longest: int) -> Arguments:
    """A call of attention, on tensors without data."""
    query = torch.empty(batch * q_len, heads, head_dim, dtype=torch.bfloat16, device="meta")
    side = torch.empty(64, kv_heads, page, head_dim // 2, dtype=torch.uint8, device="meta")
    scales = torch.empty(64, kv_heads, page, head_dim // 16, dtype=torch.uint8, device="meta")
    ints = torch.empty(batch, 4096, dtype=torch.int32, device="meta")
    return Arguments(
        query=query, key_cache=side, value_cache=side, key_scales=scales, value_scales=scales, block_tables=ints,
        seq_lens=ints[:, 0], page_ends=None, cum_seq_lens_q=None, sinks=None, bmm1_scale=None, bmm2_scale=None,
        workspace_buffer=ints, out=query, lse=None, bmm1=1.0, bmm2=1.0, q_len_per_req=q_len, window_left=-1,
        causal=True, max_tokens=longest, hnd=True, interleaved=False, enable_pdl=None,
    )  # fmt: skip


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("shape", [(64, 64, 8, 64), (128, 32, 8, 64), (256, 16, 2, 16)])
def test_attention_of_every_step(arch: str, shape: tuple[int, int, int, int]) -> None:
    head_dim, heads, kv_heads, page = shape
    sizes = {"head_dim": head_dim, "heads": heads, "kv_heads": kv_heads, "page": page}
    traffic = Traffic(tokens=4096, requests=64, context=32768)
    base = ATTENTION.problem(call(**sizes, batch=1, q_len=1, longest=1))
    listed = set(warmup.needed(ATTENTION, attentions(base, kv_heads, traffic), Arch.of(arch)))
    draw = random.Random(0)
    steps = []
    for _ in range(400):
        q_len = draw.choice([1, 1, 2, 8, draw.randint(9, 4096)])
        batch, longest = draw.randint(1, min(64, 4096 // q_len)), 1 << draw.randint(0, 15)
        steps.append(ATTENTION.problem(call(**sizes, batch=batch, q_len=q_len, longest=longest)))
    assert set(warmup.needed(ATTENTION, steps, Arch.of(arch))) <= listed
    assert len(listed) <= 24


def test_appends_of_every_number_of_tokens() -> None:
    listed = warmup.needed(quantize, appends(DType.BF16, 8, 128, 20000), Arch.of("sm_90a"))
    several = [QuantizeProblem(DType.BF16, Addressing.SLOTS, tokens, 64, 2) for tokens in (1, 64, 999, 2000, 17000)]
    assert set(warmup.needed(quantize, several, Arch.of("sm_90a"))) <= set(listed)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("shape", [(128, 8, 2048, 768), (32, 4, 2880, 2880)])
def test_experts_of_every_number_of_tokens(arch: str, shape: tuple[int, int, int, int]) -> None:
    experts, slots, hidden, inter = shape
    matrices = ((EXPERTS_UP, (Product.GATED, 2 * inter, hidden)), (EXPERTS_DOWN, (Product.DOWN, hidden, inter)))
    for operation, (product, n, k) in matrices:
        target = Arch.of(arch)
        problems = expert_products((product, n, k), DType.BF16, NVFP4, experts, slots, 2500, target)
        listed = warmup.needed(operation, problems, target)
        rows = partial(item_rows_of, experts=experts, size=hidden * inter, arch=target)
        every = (
            ExpertsProblem(product, DType.BF16, NVFP4, t, slots, experts, n, k, rows(t * slots)) for t in range(1, 2501)
        )
        assert set(warmup.needed(operation, every, target)) <= set(listed)


@pytest.mark.parametrize("gated", [True, False])
def test_experts_in_fp8_of_every_number_of_tokens(gated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    target, listed = engine.Target(Arch.of("sm_90a"), 0), set()
    monkeypatch.setattr(engine, "target_of", lambda _: target)
    monkeypatch.setattr(kernels, "_load", lambda one, problems, _: listed.update(warmup.needed(one, problems, ARCH)))
    up, hidden, inter, slots, least, most = (
        384 << gated,
        1024,
        384,
        4,
        1024,
        1500,
    )  # from 128 rows of each expert on
    layer: Any = SimpleNamespace(
        w13=SimpleNamespace(is_cuda=True), experts=32, rows13=up, hidden=hidden, inter=inter, gated=gated, format=NVFP4
    )
    load_fp8_experts(layer, torch.bfloat16, slots, least, least - 1)
    assert not listed
    load_fp8_experts(layer, torch.bfloat16, slots, least, most)
    products = (
        (EXPERTS_UP, Product.GATED if gated else Product.PLAIN, up, hidden),
        (EXPERTS_DOWN, Product.DOWN, hidden, inter),
        (EXPERTS_RESULTS, Product.DOWN, hidden, inter),
    )
    needed = set(warmup.needed(EXPERTS_GATHER, [GatherProblem(DType.BF16, most, slots, 9, 256, fp8=True)], ARCH))
    for operation, product, n, k in products:
        rows = partial(item_rows_of, experts=32, size=hidden * inter, arch=ARCH, fp8=True)
        every = (
            ExpertsProblem(product, DType.BF16, NVFP4, t, slots, 32, n, k, rows(t * slots), fp8=True)
            for t in range(least, most + 1)
        )
        needed.update(warmup.needed(operation, every, ARCH))
    assert {task.kernel.name for task in needed} == {f"experts/{kind}" for kind in FP8_KERNELS}
    assert listed == needed


@pytest.mark.parametrize(("tokens", "count"), [(512, 1), (4096, 3)])
def test_what_runs_before_prompts_of_delta_rules(tokens: int, count: int) -> None:
    """Long prompts of few heads are divided, where a GPU can."""
    operations = {one for one, *_ in Shape(8, 16, 128, 128, 4).needed(DType.BF16, DType.F32, 3, tokens)}
    before = {one.operation for kernel in GATED_DELTA_RULE_PREFILL.kernels for one in kernel.before}
    assert len(operations & before) == count
    for name, most in (("sm_90a", 3), ("sm_89", 1)):
        assert sum(bool(one.problems(Arch.of(name))) for one in before) == most


def test_kernels_are_loaded_again_after_a_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    loads: list[object] = []
    monkeypatch.setattr(kernels, "_load", lambda *call: loads.append(call))
    target = engine.Target(Arch.of("sm_90a"), 0)
    for _ in range(3):  # layers of one size
        kernels._load_products(target, DType.BF16, NVFP4, 64, 128, 1, False)
    assert len(loads) == 1
    engine.reset()
    kernels._load_products(target, DType.BF16, NVFP4, 64, 128, 1, False)
    assert len(loads) == 2


def test_the_simulator_loads_nothing() -> None:
    (task, *_) = warmup.needed(MM_BF16_FP4, products(DType.BF16, NVFP4, 64, 128, 1), Arch.of("sm_90a"))
    with pytest.raises(ArgumentTypeError, match="target: got the simulator"):
        engine.load(task.kernel, task.spec, engine.Target(task.arch, None))


@pytest.mark.gpu
def test_products_load_nothing_after_the_start() -> None:
    codes, scales = nvfp4_quantize(torch.randn(512, 1024, device="cuda").bfloat16(), torch.ones(1, device="cuda"))
    weight = prepare_fp4_weight(codes, scales, sf_layout=SfLayout.layout_128x4)
    load_products(weight, torch.bfloat16, 700)
    before = engine.loaded(), engine.cache_info().builds
    assert before[0] > 0
    for rows in range(1, 701):
        mm_bf16_fp4(torch.zeros(rows, 1024, device="cuda", dtype=torch.bfloat16), weight)
    assert (engine.loaded(), engine.cache_info().builds) == before


@pytest.mark.gpu
def test_decode_loads_nothing_after_the_start() -> None:
    device = torch.device("cuda")
    arguments = call(head_dim=128, heads=32, kv_heads=8, page=64, batch=1, q_len=1, longest=1)
    on_gpu = {name: torch.zeros_like(x, device=device) for name, x in arguments._asdict().items() if torch.is_tensor(x)}
    arguments = arguments._replace(**on_gpu)
    load_attention(arguments, Traffic(tokens=256, requests=64, context=4096))
    load_appends(torch.bfloat16, 8, 128, 256, arguments.query)
    before = engine.loaded()
    assert before > 0
    workspace = torch.zeros(32 << 20, dtype=torch.uint8, device=device)
    for batch in (1, 3, 8, 64):
        for longest in (64, 500, 4096):
            trtllm_batch_decode_with_kv_cache(
                torch.zeros(batch, 32, 128, dtype=torch.bfloat16, device=device),
                (arguments.key_cache, arguments.value_cache),
                workspace,
                torch.zeros(batch, 64, dtype=torch.int32, device=device),
                torch.full((batch,), longest, dtype=torch.int32, device=device),
                longest,
                kv_cache_sf=tuple(s.view(torch.float8_e4m3fn) for s in (arguments.key_scales, arguments.value_scales)),
                v_scale_layout="linear",
            )
    assert engine.loaded() == before

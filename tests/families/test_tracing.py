"""What torch's tracers see of the public functions and of their operators."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import jitfp4
from jitfp4 import ArgumentError, SfLayout
from jitfp4.families.attention.arguments import OutputArguments
from jitfp4.families.attention.output_operation import ATTENTION_QUANTIZE
from jitfp4.families.experts.arguments import GatherArguments, ResultArguments, RouteArguments
from jitfp4.families.experts.gather_operation import EXPERTS_GATHER
from jitfp4.families.experts.operation import EXPERTS_ROUTE
from jitfp4.families.experts.results_operation import EXPERTS_RESULTS
from jitfp4.families.gdn.parts_operation import PREFILL_JOIN_OPERATION, PREFILL_PARTS_OPERATION
from jitfp4.families.gdn.prefill_arguments import (
    PRODUCTS_BYTES,
    JoinArguments,
    PartsArguments,
    ProductsArguments,
    places,
)
from jitfp4.families.gdn.products_operation import PREFILL_PRODUCTS_OPERATION
from jitfp4.families.gemm.arguments import ExpandArguments
from jitfp4.families.gemm.expand_operation import EXPAND
from jitfp4.formats import NVFP4
from jitfp4.operation import Operation, operations
from tests.inputs.calls import function_of
from tests.inputs.good import good_calls
from tests.support.compare import assert_same_bytes
from tests.support.gdn import case
from tests.support.gemm import masked_keywords

ROOT = Path(__file__).parents[2]
A = torch.randn(6, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
BATCH = torch.stack([A, A.flip(0)])
WEIGHT, SCALE = A[0].clone(), torch.ones(1)
CODES, SCALES = jitfp4.nvfp4_quantize(A, SCALE, SfLayout.layout_linear)
POWERS = jitfp4.mxfp4_quantize(A, sfLayout=SfLayout.layout_linear)
SWIZZLED = jitfp4.nvfp4_quantize(A, SCALE)
COLUMNS = jitfp4.nvfp4_quantize(torch.cat((A, A[:2])), SCALE)
MATRICES = jitfp4.nvfp4_batched_quantize(BATCH, SCALE)
ROWS_OF_8 = jitfp4.nvfp4_batched_quantize(torch.cat((BATCH, BATCH[:, :2]), 1), SCALE)
PREPARED = jitfp4.prepare_fp4_weight(*COLUMNS, sf_layout=SfLayout.layout_128x4)
ROW_SCALE = jitfp4.fp8_row_scale(PREPARED)
MASK = torch.tensor([6, 6], dtype=torch.int32)
DELTA_RULE = case(2, 2)
BY_REQUEST = ("q", "k", "v", "a", "b", "initial_state_indices")
Function = Callable[..., Any]


def delta_rule(*given: torch.Tensor) -> Any:
    changed = dict(zip(BY_REQUEST, given, strict=True)) | {"initial_state": DELTA_RULE["initial_state"].clone()}
    return jitfp4.gated_delta_rule_mtp(**(DELTA_RULE | changed))


def masked_products(a: torch.Tensor, a_sf: torch.Tensor, b: torch.Tensor, b_sf: torch.Tensor) -> torch.Tensor:
    """Of batches that begin with their entries."""
    rows = torch.full(a.shape[:1], a.shape[1], dtype=torch.int32)
    out = torch.empty(*a.shape[:2], b.shape[1], dtype=torch.bfloat16).permute(1, 2, 0)
    given = (a.permute(1, 2, 0), a_sf), (b.permute(1, 2, 0), b_sf)
    jitfp4.grouped_gemm_nt_masked(*given, out, rows, **masked_keywords(NVFP4))
    return out.permute(2, 0, 1)


CALLS: dict[str, tuple[Function, tuple[torch.Tensor, ...]]] = {
    "nvfp4_quantize": (lambda a: jitfp4.nvfp4_quantize(a, SCALE), (A,)),
    "nvfp4_quantize, linear": (lambda a: jitfp4.nvfp4_quantize(a, SCALE, SfLayout.layout_linear), (A,)),
    "nvfp4_quantize, per token": (lambda a: jitfp4.nvfp4_quantize(a, SCALE, per_token_activation=True), (A,)),
    "nvfp4_quantize, out": (
        lambda a, out: jitfp4.nvfp4_quantize(a, SCALE, SfLayout.layout_linear, out=out),
        (A, torch.zeros_like(CODES)),
    ),
    "mxfp4_quantize": (jitfp4.mxfp4_quantize, (A,)),
    "fp4_quantize": (lambda a: jitfp4.fp4_quantize(a, SCALE), (A,)),
    "silu_and_mul_nvfp4_quantize": (lambda a: jitfp4.silu_and_mul_nvfp4_quantize(a, SCALE), (A,)),
    "nvfp4_batched_quantize": (lambda a: jitfp4.nvfp4_batched_quantize(a, SCALE), (BATCH,)),
    "scaled_fp4_grouped_quantize": (jitfp4.scaled_fp4_grouped_quantize, (BATCH, MASK, torch.ones(2))),
    "nvfp4_dequantize": (lambda q, sf: jitfp4.nvfp4_dequantize(q, sf, 1.0, SfLayout.layout_linear), (CODES, SCALES)),
    "mxfp4_dequantize": (lambda q, sf: jitfp4.mxfp4_dequantize(q, sf, SfLayout.layout_linear), POWERS),
    "rmsnorm_fp4quant": (lambda x: jitfp4.rmsnorm_fp4quant(x, WEIGHT), (A,)),
    "rmsnorm_fp4quant, rank 3": (lambda x: jitfp4.rmsnorm_fp4quant(x, WEIGHT), (BATCH,)),
    "add_rmsnorm_fp4quant": (
        lambda x, residual: jitfp4.add_rmsnorm_fp4quant(x, residual, WEIGHT, output_both_sf_layouts=True),
        (A, A.flip(0)),
    ),
    "rmsnorm": (lambda x: jitfp4.rmsnorm(x, WEIGHT), (A,)),
    "gemma_rmsnorm, rank 3": (lambda x: jitfp4.gemma_rmsnorm(x, WEIGHT), (BATCH,)),
    "rmsnorm_linear": (
        lambda x, matrix: jitfp4.rmsnorm_linear(x, WEIGHT, matrix, 1e-6, weight_bias=1.0),
        (A, A[:5].contiguous()),
    ),
    "rmsnorm_gated": (lambda x, gate: jitfp4.rmsnorm_gated(x, gate, WEIGHT), (A, A.flip(0))),
    "mm_fp4": (
        lambda a, b, *scales: jitfp4.mm_fp4(a, b.T, scales[0], scales[1].T),
        (SWIZZLED[0], COLUMNS[0], SWIZZLED[1], COLUMNS[1]),
    ),
    "grouped_gemm_nt_masked": (masked_products, (*MATRICES, *(tensor.clone() for tensor in ROWS_OF_8))),
    "mm_bf16_fp4": (lambda a: jitfp4.mm_bf16_fp4(a, PREPARED), (A,)),
    "mm_fp8_fp4": (
        lambda a, scale: jitfp4.mm_fp8_fp4(a.to(torch.float8_e4m3fn), scale, PREPARED, ROW_SCALE),
        (A, torch.ones(6)),
    ),
    "gated_delta_rule_mtp": (delta_rule, tuple(DELTA_RULE[name] for name in BY_REQUEST)),
}


def copies(tensors: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in tensors]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.one_in(2)
@pytest.mark.parametrize("which", ["the first", "all"])
@pytest.mark.parametrize("name", CALLS)
def test_a_size_that_nobody_knows(name: str, which: str) -> None:
    """torch.compile in one piece, with a number of rows that is data (unbacked): nothing branches on it."""
    function, tensors = CALLS[name]
    want, given = function(*copies(tensors)), copies(tensors)
    torch.compiler.reset()
    for tensor in given if which == "all" else given[:1]:
        torch._dynamo.decorators.mark_unbacked(tensor, 0)
    got = torch.compile(function, fullgraph=True, backend="aot_eager")(*given)
    wanted = want if isinstance(want, tuple) else (want,)
    for left, right in zip(got if isinstance(got, tuple) else (got,), wanted, strict=True):
        assert_same_bytes("result", left.contiguous(), right.contiguous())


PAGED_QUERIES = ("query", "block_tables", "seq_lens", "out")
BY_TOKEN = {
    "nvfp4_kv_quantize": ("input",),
    "nvfp4_kv_dequantize": ("fp4_data", "block_scales"),
    "nvfp4_kv_dequantize_paged": ("block_tables", "seq_lens", "output_k", "output_v"),
    "nvfp4_quantize_append_paged_kv_cache": ("append_key", "append_value", "batch_indices", "positions"),
    "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping": ("append_key", "append_value", "slot_mapping"),
    "trtllm_batch_context_with_kv_cache": ("query", "cum_seq_lens_q", "out", "lse"),
    "trtllm_batch_decode_with_kv_cache": (*PAGED_QUERIES, "lse"),
    "trtllm_batch_decode_with_kv_cache ragged": (*PAGED_QUERIES, "lse"),
    "xqa_batch_decode_with_kv_cache": (*PAGED_QUERIES, "mask"),
    "xqa_batch_decode_with_kv_cache ragged": (*PAGED_QUERIES, "mask"),
}
"""Functions of a KV cache, and what has a row for each token or request."""


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.one_in(2)
@pytest.mark.parametrize("which", ["the first", "all"])
@pytest.mark.parametrize("name", BY_TOKEN)
def test_a_number_of_tokens_that_nobody_knows(name: str, which: str) -> None:
    """The same for a KV cache: tokens, requests, and both."""
    function, calls = function_of(name), []
    for _ in range(2):
        torch.manual_seed(0)
        calls.append(good_calls()[name]())
    torch.compiler.reset()
    for tensor in BY_TOKEN[name][: 1 if which == "the first" else None]:
        torch._dynamo.decorators.mark_unbacked(calls[1][tensor], 0)
    want = function(**calls[0])
    got = torch.compile(lambda given: function(**given), fullgraph=True, backend="aot_eager")(calls[1])
    for left, right in zip(leaves(got), leaves(want), strict=True):
        assert_same_bytes("result", left.contiguous(), right.contiguous())
    for written in BY_TOKEN[name]:
        assert_same_bytes(written, calls[1][written], calls[0][written])


NOT_TRACED = {
    "BatchPrefillWithPagedKVCacheWrapper",  # made, and planned, before a model runs
    "BatchDecodeWithPagedKVCacheWrapper",
    "Fp4Weight.from_tensors",  # sizes are values of a tensor
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.one_in(10)
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name", sorted(good_calls().keys() - NOT_TRACED))
def test_every_function_is_traced_in_one_piece(name: str, dynamic: bool | None) -> None:
    """README says which are not."""
    function, calls = function_of(name), []
    for _ in range(2):
        torch.manual_seed(0)
        calls.append(good_calls()[name]())
        if "mask" in calls[-1]:
            calls[-1]["mask"].fill_(4)  # all rows: the others are not written
    torch.compiler.reset()
    want = function(**calls[0])
    got = torch.compile(lambda given: function(**given), fullgraph=True, backend="aot_eager", dynamic=dynamic)(calls[1])
    for left, right in zip(leaves(got), leaves(want), strict=True):
        assert_same_bytes("result", left.contiguous(), right.contiguous())


def test_one_graph_is_for_every_length() -> None:
    """Numbers of tokens, of queries and of requests may be symbols, and so may bounds, which are Python numbers."""
    graphs = []

    def backend(module: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        graphs.append(module)
        return module.forward

    def cache(tokens: int, *heads: int) -> tuple[torch.Tensor, ...]:
        shapes = [(tokens, *heads, width) for width in (32, 32, 4, 4)]
        return tuple(torch.randint(36, 60, shape, dtype=torch.uint8) for shape in shapes)

    def decode(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *scales: torch.Tensor) -> Any:
        return jitfp4.single_decode_with_kv_cache(q[0], k, v, kv_cache_sf=scales)

    def prefill(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *scales: torch.Tensor) -> Any:
        return jitfp4.single_prefill_with_kv_cache(q, k, v, causal=True, kv_cache_sf=scales)

    def paged(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *scales: torch.Tensor) -> Any:
        pages = [side.unflatten(0, (-1, 1)) for side in (k, v, *scales)]
        tables = torch.arange(len(k), dtype=torch.int32).expand(len(q), -1)
        lengths = torch.full((len(q),), len(k), dtype=torch.int32)
        work, bound = torch.zeros(32 << 20, dtype=torch.uint8), len(k) + 3
        return jitfp4.xqa_batch_decode_with_kv_cache(
            q, pages[:2], work, tables, lengths, bound, kv_cache_sf=pages[2:], kv_layout="NHD"
        )

    torch.compiler.reset()
    for function in (decode, prefill, paged):
        compiled = torch.compile(function, fullgraph=True, backend=backend, dynamic=True)
        graphs.clear()
        for tokens, queries in ((49, 9), (81, 20), (1001, 33)):
            arguments = torch.randn(queries, 4, 64).bfloat16(), *cache(tokens, 2)
            assert torch.equal(compiled(*arguments), function(*arguments))
        assert len(graphs) == 1, function


def leaves(results: Any) -> list[torch.Tensor]:
    results = results if isinstance(results, tuple) else (results,)
    return [result for result in results if isinstance(result, torch.Tensor)]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_unknown_sizes_that_differ_are_found() -> None:
    function, (x, residual) = CALLS["add_rmsnorm_fp4quant"]
    given = [x.clone(), residual[:5].clone()]
    torch.compiler.reset()
    for tensor in given:
        torch._dynamo.decorators.mark_unbacked(tensor, 0)
    with pytest.raises((RuntimeError, AssertionError)):  # torch's, at run time or by its guards
        torch.compile(function, fullgraph=True, backend="aot_eager")(*given)
    with pytest.raises(ArgumentError, match="residual"):
        function(*given)


class Recorder(TorchDispatchMode):
    """Keeps the calls of jitfp4's operators, and runs none."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "jitfp4":
            return func(*args, **(kwargs or {}))
        self.calls.append((func, args))
        return None


@functools.cache
def recorded() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """By operator, a call of it that the good call of some function makes."""
    with Recorder() as recorder:
        for name, arguments in good_calls().items():
            function_of(name)(**arguments())
    calls = [*recorder.calls, *within()]
    return {call[0].name(): call for call in calls}


def within() -> list[tuple[Any, tuple[Any, ...]]]:
    """Calls of operators that CPU tensors or few rows do not reach: they run before the operators of a function."""
    x = torch.empty(6, 128, dtype=torch.float16)
    expand = ExpandArguments(*SWIZZLED, x, 16, use_8x4_sf_layout=False, enable_pdl=None)
    ids, items, order = torch.tensor([[0, 1], [1, 0]]), torch.zeros(2, 4, dtype=torch.int32), torch.zeros(4).int()
    route = RouteArguments(ids, None, items, order, 2, 16, None, "ids=topk_ids")
    experts = good_calls()["fp4_experts"]()["experts"]
    weight, h, y = (experts.w2, experts.scale2, experts.bias2), torch.ones(4, 64), torch.empty(4, 64)
    listed = torch.tensor([[0, 0, 2, 0], [1, 2, 2, 0]], dtype=torch.int32), torch.tensor([0, 3, 1, 2]).int()
    gather = GatherArguments(
        torch.ones(2, 128).half(),
        None,
        *listed,
        torch.empty(4, 128, dtype=torch.uint8),
        torch.empty(4),
        slots=2,
        item_rows=16,
        enable_pdl=None,
        names="",
    )
    results = ResultArguments(
        h.bfloat16(),
        *weight,
        *listed,
        y.bfloat16(),
        slots=2,
        mxfp4=True,
        fp8=True,
        item_rows=16,
        enable_pdl=None,
        names="",
    )
    prompt = torch.randn(70, 1, 64).bfloat16()
    products = ProductsArguments(
        prompt,
        prompt,
        torch.ones(70, 2),
        torch.ones(70, 2),
        1.0,
        torch.tensor([0, 66, 70]),
        torch.zeros(places(70, 2) * 2 * PRODUCTS_BYTES, dtype=torch.uint8),
        heads=2,
        use_qk_l2norm=True,
        enable_pdl=None,
    )
    codes, scales = torch.zeros(3, 64, dtype=torch.uint8), torch.zeros(128, 8, dtype=torch.uint8)
    output = OutputArguments(prompt[:6].view(3, 128), codes, scales, first_row=2, encode_scale=3.0, enable_pdl=None)
    states = torch.zeros(places(70, 2, 4 * 64), 2, 128, 64)
    parts = PartsArguments(
        prompt, prompt, products.g, products.beta, products.cu_seqlens, products.products, states, 4, True, None
    )
    join = JoinArguments(states, products.cu_seqlens, torch.zeros(2, 2, 64, 64), None, 4, 70, 2, None)
    return [
        (ATTENTION_QUANTIZE.operator, output),
        (PREFILL_PRODUCTS_OPERATION.operator, products),
        (PREFILL_PARTS_OPERATION.operator, parts),
        (PREFILL_JOIN_OPERATION.operator, join),
        (EXPAND.operator, expand),
        (EXPERTS_ROUTE.operator, route),
        (EXPERTS_GATHER.operator, gather),
        (EXPERTS_RESULTS.operator, results),
    ]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("operation", operations(), ids=lambda operation: operation.name)
def test_operators_pass_opcheck(operation: Operation[Any, Any]) -> None:
    operator = operation.operator.name()
    assert operator in recorded(), f"tests/inputs/good.py has no call that reaches {operator}"
    torch.library.opcheck(*recorded()[operator])


def test_vmap_is_refused_by_name() -> None:
    with pytest.raises(RuntimeError, match="rule not implemented for jitfp4::quantize"):
        torch.func.vmap(lambda a: jitfp4.nvfp4_quantize(a, 1.0))(BATCH)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_an_exported_program_runs_where_the_package_is_imported(tmp_path: Path) -> None:
    class Module(torch.nn.Module):
        def forward(self, a: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return jitfp4.nvfp4_quantize(a, 1.0)

    file = tmp_path / "program.pt2"
    torch.export.save(torch.export.export(Module(), (A,)), file)
    torch.save(A, tmp_path / "a.pt")
    program = (
        "import sys; a = torch.load(sys.argv[2]);"
        "print(sum(int(x.long().sum()) for x in torch.export.load(sys.argv[1]).module()(a)))"
    )
    for imports in ("import jitfp4; import torch", "import torch; import jitfp4"):
        command = [sys.executable, "-c", f"{imports}; {program}", str(file), str(tmp_path / "a.pt")]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert int(done.stdout) == sum(int(x.long().sum()) for x in jitfp4.nvfp4_quantize(A, 1.0))

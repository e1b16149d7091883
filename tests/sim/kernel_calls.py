"""Calls of public functions that launch each kernel, small enough to simulate; of a large grid a part is.

For each kernel there are cases, and a case makes its call when it is asked to. The cases of ``quantize`` and ``gdn``
launch every specialisation that a table selects; those of the other families are a sample of formats, layouts, sizes and
cuts, and the tests of a family launch the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch

from jitfp4 import SfLayout
from jitfp4.families.attention.operation import ATTENTION
from jitfp4.families.attention.prefill import PrefillTactic
from jitfp4.families.attention.wgmma import WgmmaTactic
from jitfp4.families.gdn.operation import CHUNK, DELTA_RULE, DTYPES, GATED_DELTA_RULE, STATE_DTYPES
from jitfp4.families.gdn.problem import Problem, StateLayout
from jitfp4.families.gemm.operation import MM_BF16_FP4
from jitfp4.families.gemm.problem import NarrowTactic
from jitfp4.families.gemm.wide import WideTactic
from jitfp4.formats import MXFP4, NVFP4, BlockFormat
from jitfp4.kernel import AnyKernel
from jitfp4.operation import Operation
from jitfp4.tensors import device_arch
from tests.support.attention import Case as Batch
from tests.support.gemm import make_matrix, make_weight
from tests.support.inputs import hard_blocks, random_matrix
from tests.support.kv import paged_cache

HALVES = (torch.bfloat16, torch.float16)
E4M3 = torch.float8_e4m3fn
Arguments = dict[str, Any]


class Call(NamedTuple):
    """A public function, its arguments as CPU tensors, and the tactic that it is made with, if not the table's.

    ``bounds``: how far GPU and simulator may lie apart, as the norm of the difference over that of the result, by dtype;
    None: not at all, in no byte of what is returned or given.
    """

    function: str
    arguments: Arguments
    forced: tuple[Operation[Any, Any], Any] | None = None
    bounds: Mapping[torch.dtype, float] | None = None


Case = partial[Call]
Cases = Iterable[Case]


# ---- quantize --------------------------------------------------------------------------------------------------------


def matrix(m: int, k: int, dtype: torch.dtype) -> torch.Tensor:
    """[m, k]: hard blocks, then random ones; rows repeat after 256."""
    wide = torch.bfloat16 if dtype == E4M3 else dtype
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


def vector_cases() -> Iterator[Case]:
    functions = ("nvfp4_quantize", "mxfp4_quantize", "silu_and_mul_nvfp4_quantize")
    kinds = (*product(functions, HALVES), ("fp4_quantize", E4M3))
    for layout, size, (function, dtype) in product(SfLayout, (SMALL, MEDIUM, LARGE), kinds):
        yield partial(_vector_call, function, layout, *size, dtype)


def _vector_call(function: str, layout: SfLayout, m: int, k: int, dtype: torch.dtype) -> Call:
    flags = {
        "is_sf_swizzled_layout": layout is not SfLayout.layout_linear,
        "is_sf_8x4_layout": layout is SfLayout.layout_8x4,
    }
    scale = torch.tensor([0.7])
    if function == "nvfp4_quantize":
        return Call(function, {"a": matrix(m, k, dtype), "a_global_sf": scale, "sfLayout": layout})
    if function == "mxfp4_quantize":
        return Call(function, {"a": matrix(m, k // 32 * 32, dtype), "sfLayout": layout})
    if function == "fp4_quantize":
        return Call(function, flags | {"input": matrix(m, k, dtype), "global_scale": torch.linspace(0.1, 3, m)})
    return Call(function, flags | {"input": gates(m, k, dtype), "global_scale": scale})


def e4m3_cases() -> Iterator[Case]:
    for layout, size in product(SfLayout, (SMALL, MEDIUM)):
        yield partial(_vector_call, "nvfp4_quantize", layout, *size, E4M3)


def row_scale_cases() -> Iterator[Case]:
    for dtype in HALVES:
        yield partial(_row_scale_call, dtype)


def _row_scale_call(dtype: torch.dtype) -> Call:
    scale = torch.tensor([1 / 2688])
    given = {"a": random_matrix(37, 720, dtype), "a_global_sf": scale, "per_token_activation": True}
    return Call("nvfp4_quantize", given)


def grouped_cases() -> Iterator[Case]:
    functions = ("nvfp4_batched_quantize", "scaled_fp4_grouped_quantize", "silu_and_mul_scaled_nvfp4_experts_quantize")
    for function, dtype in product(functions, HALVES):
        yield partial(_grouped_call, function, dtype)


def _grouped_call(function: str, dtype: torch.dtype) -> Call:
    if function == "nvfp4_batched_quantize":
        batch = matrix(3 * 130, 272, dtype).view(3, 130, 272)
        return Call(function, {"a": batch, "a_global_sf": torch.tensor([0.7])})
    rows = gates(3 * 130, 272, dtype) if "silu" in function else matrix(3 * 130, 272, dtype)
    mask, scales = torch.tensor([0, 130, 7], dtype=torch.int32), torch.tensor([0.5, 1.0, 3.0])
    return Call(function, {"a": rows.view(3, 130, -1), "mask": mask, "a_global_sf": scales})


def dequantize_cases() -> Iterator[Case]:
    for block_format, layout, dtype in product(BlockFormat, SfLayout, (torch.float32, *HALVES)):
        yield partial(_dequantize_call, block_format, layout, dtype)


def _dequantize_call(block_format: BlockFormat, layout: SfLayout, dtype: torch.dtype) -> Call:
    m, k = 70, 704
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 256, (m, k // 2), generator=generator, dtype=torch.uint8)
    bytes_ = 128 if block_format is NVFP4 else 256
    shape = layout.shape(m, k // block_format.block)
    scales = torch.randint(0, bytes_, shape, generator=generator, dtype=torch.uint8)
    given = {"a_fp4": codes, "a_sf": scales, "sfLayout": layout, "out_dtype": dtype}
    if block_format is NVFP4:
        given["global_decode_scale"] = torch.tensor([0.3])
    return Call(f"{block_format}_dequantize", given)


# ---- norm ------------------------------------------------------------------------------------------------------------


def norm_cases() -> Iterator[Case]:
    recipes = ((16, "e4m3"), (32, "e4m3"), (32, "ue8m0"))
    few = ((5, 256), (3, 4096), (2, 16384), (2, 32768), (1, 65536))
    many = ((2700, 2048), (2700, 4096), (700, 8192))
    functions = ("rmsnorm_fp4quant", "add_rmsnorm_fp4quant")
    for function, dtype, (block, scale), size in product(functions, HALVES, recipes, (*few, *many)):
        yield partial(_norm_call, function, dtype, block, scale, *size)


def _norm_call(function: str, dtype: torch.dtype, block: int, scale: str, m: int, h: int) -> Call:
    x = matrix(m, h, dtype)
    given = {
        "input": x,
        "weight": random_matrix(1, h, dtype, seed=2)[0],
        "global_scale": None if scale == "ue8m0" else torch.tensor([3.0]),
        "block_size": block,
        "scale_format": scale,
    }
    if function == "rmsnorm_fp4quant":
        return Call(function, given | {"is_sf_swizzled_layout": True})
    residual = random_matrix(1, h, dtype, seed=1).repeat(m, 1)
    return Call(function, given | {"residual": residual, "output_both_sf_layouts": True, "y_out": torch.zeros_like(x)})


# ---- gated delta rule ------------------------------------------------------------------------------------------------


def gdn_cases(kernel: AnyKernel) -> Iterator[Case]:
    """One for each specialisation on this GPU. Gates at which exp and log do not matter: decay 1, beta 1/2."""
    arch, found = device_arch(torch.cuda.current_device()), set()
    for dtype, state, dim, tokens, heads, (steps, slots) in product(
        HALVES,
        (torch.float32, torch.bfloat16),
        (128, 64),
        (1, 2, 3, 6, 11),
        (2, 65, 300, 513, 1025),
        ((False, False), (True, False), (True, True)),
    ):
        problem = Problem(
            dtype=DTYPES[dtype],
            state_dtype=STATE_DTYPES[state],
            state_layout=StateLayout.VK,
            head_dim=dim,
            tokens=tokens,
            batch=1,
            value_heads=heads,
            store_steps=steps,
            step_slots=slots,
        )
        tactic = GATED_DELTA_RULE.select(problem, arch)
        spec = kernel.specialise(problem, tactic) if type(tactic) is kernel.tactic else None
        if spec is not None and spec not in found:
            found.add(spec)
            # the chunkwise kernel has an approximate 1 / sqrt
            yield partial(_delta_rule_call, dtype, state, dim, tokens, heads, steps, slots, kernel is DELTA_RULE)
        if tokens == 1 and state is torch.float32 and not steps and kernel is DELTA_RULE:
            yield partial(_one_token_call, dtype, state, dim, heads)


def _delta_rule_call(
    dtype: torch.dtype, state: torch.dtype, dim: int, tokens: int, heads: int, steps: bool, slots: bool, norm: bool
) -> Call:
    given = _delta_rule(dtype, state, dim, tokens, heads) | {"use_qk_l2norm": norm}
    pool = given["initial_state"]
    if slots:
        given["initial_state"] = pool.repeat(tokens, 1, 1, 1)
        given["ssm_state_indices"] = torch.arange(tokens).view(1, tokens)
    elif steps:
        given["intermediate_states_buffer"] = torch.zeros(1, tokens, *pool.shape[1:], dtype=state)
    return Call("gated_delta_rule_mtp", given)


def _one_token_call(dtype: torch.dtype, state: torch.dtype, dim: int, heads: int) -> Call:
    given = _delta_rule(dtype, state, dim, 1, heads)
    del given["initial_state_indices"]
    return Call("gated_delta_rule_decode", given | {"state": given.pop("initial_state")})


def _delta_rule(dtype: torch.dtype, state: torch.dtype, dim: int, tokens: int, heads: int) -> Arguments:
    generator = torch.Generator().manual_seed(dim + tokens + heads)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    return {
        "q": normal(1, tokens, 1, dim).to(dtype),
        "k": normal(1, tokens, 1, dim).to(dtype),
        "v": normal(1, tokens, heads, dim).to(dtype),
        "initial_state": normal(1, heads, dim, dim).to(state),
        "initial_state_indices": torch.arange(1),
        "A_log": torch.full((heads,), -torch.inf),
        "a": normal(1, tokens, heads).to(dtype),
        "dt_bias": normal(heads),
        "b": torch.zeros(1, tokens, heads, dtype=dtype),
    }


# ---- KV cache --------------------------------------------------------------------------------------------------------


def kv_quantize_cases() -> Iterator[Case]:
    for dtype in HALVES:
        yield partial(_rows_call, dtype)
        for layout, arrangement in (("NHD", "pair"), ("HND", "stacked")):
            yield partial(_append_call, dtype, layout, arrangement, by_slot=True)
            yield partial(_append_call, dtype, layout, arrangement, by_slot=False)
        yield partial(_pages_call, dtype)


def _rows_call(dtype: torch.dtype) -> Call:
    return Call("nvfp4_kv_quantize", {"input": matrix(70, 144, dtype), "global_scale": torch.tensor([0.01])})


def _append_call(dtype: torch.dtype, layout: str, arrangement: str, *, by_slot: bool) -> Call:
    """Seven tokens, some of them nowhere; order "interleaved4"."""
    cache = paged_cache(4, 4, 3, (64, 64), layout, arrangement, "cpu")
    rows = {f"append_{side}": random_matrix(7 * 3, 64, dtype, seed).view(7, 3, 64) for seed, side in enumerate(_SIDES)}
    given = rows | {"paged_kv_cache": cache.codes, "kv_cache_sf": cache.sf, "k_scale": 0.01, "v_scale": 0.4}
    given |= {"kv_layout": layout, "v_sf_layout": "interleaved4"}
    if by_slot:
        slots = torch.tensor([3, 15, -1, 16, 0, 7, 1 << 20], dtype=torch.int32)
        return Call("nvfp4_quantize_append_paged_kv_cache_with_slot_mapping", given | {"slot_mapping": slots})
    lists = {
        "batch_indices": torch.tensor([0, 0, 1, 1, -1, 2, 1]),
        "positions": torch.tensor([3, 4, 0, 3, 0, 0, 99]),
        "kv_indices": torch.tensor([3, 1, 0]),
        "kv_indptr": torch.tensor([0, 2, 3]),
        "kv_last_page_len": torch.tensor([1, 4]),
    }
    return Call("nvfp4_quantize_append_paged_kv_cache", given | lists)


_SIDES = ("key", "value")


def _pages_call(dtype: torch.dtype) -> Call:
    caches = {f"{side}_cache": random_matrix(3 * 8 * 2, 64, dtype, seed).view(3, 2, 8, 64) for seed, side in _KV}
    return Call("nvfp4_quantize_paged_kv_cache", caches | {"v_sf_layout": "interleaved4"})


_KV = ((0, "k"), (1, "v"))


def kv_dequantize_cases() -> Iterator[Case]:
    for dtype in HALVES:
        yield partial(_rows_back_call, dtype)
        for layout, page in (("NHD", 8), ("HND", 3)):
            yield partial(_paged_back_call, dtype, layout, page)


def _rows_back_call(dtype: torch.dtype) -> Call:
    codes, scales = _bytes(70, 72), _bytes(70, 9) & 0x7F
    given = {"fp4_data": codes, "block_scales": scales, "global_scale": torch.tensor([0.3]), "output_dtype": dtype}
    return Call("nvfp4_kv_dequantize", given)


def _paged_back_call(dtype: torch.dtype, layout: str, page: int) -> Call:
    place = (page, 2) if layout == "NHD" else (2, page)
    codes, scales = (tuple(_bytes(5, *place, width, seed=seed) for seed in (0, 1)) for width in (32, 4))
    outs = {f"output_{side}": torch.zeros(2, 3 * page, 2, 64, dtype=dtype) for _, side in _KV}
    given = {
        "paged_kv_cache": codes,
        "kv_cache_sf": scales,
        "block_tables": torch.tensor([[4, 0, 2], [1, -1, 99]]),
        "seq_lens": torch.tensor([2 * page + 1, 3 * page]),
        "k_scale": torch.tensor([0.3]),
        "v_scale": torch.tensor([0.7]),
        "kv_layout": layout,
    }
    return Call("nvfp4_kv_dequantize_paged", given | outs)


def _bytes(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


# ---- gemm ------------------------------------------------------------------------------------------------------------


def narrow_cases() -> Iterator[Case]:
    for tactic, m, n, k, dtype in (
        (None, 1, 72, 416, torch.bfloat16),
        (None, 17, 64, 384, torch.float16),
        (NarrowTactic(8, 2, 2, 2, 3, 1, split=2), 5, 72, 672, torch.bfloat16),
        (NarrowTactic(16, 4, 2, 2, 2, 1, split=3), 13, 72, 672, torch.float16),
        (NarrowTactic(64, 1, 4, 1, 2, 1), 61, 72, 672, torch.bfloat16),
    ):
        for block_format in BlockFormat:
            yield partial(_linear_call, tactic, m, n, k, block_format, dtype)


def wide_cases() -> Iterator[Case]:
    for tactic, m, n, k, block_format, dtype in (
        (WideTactic(64, 1, 2), 40, 72, 416, NVFP4, torch.bfloat16),
        (WideTactic(64, 4, split=2), 60, 264, 416, MXFP4, torch.bfloat16),
        (WideTactic(64, 2, 2, 4), 64, 136, 672, NVFP4, torch.float16),
        (WideTactic(128, 1, 2, 3), 130, 72, 416, NVFP4, torch.float16),
        (WideTactic(64, 2, cluster=2, divided=True), 130, 520, 416, NVFP4, torch.bfloat16),
        (WideTactic(256, 2), 200, 136, 160, MXFP4, torch.float16),
    ):
        yield partial(_linear_call, tactic, m, n, k, block_format, dtype)


def _linear_call(
    tactic: NarrowTactic | WideTactic | None, m: int, n: int, k: int, block_format: BlockFormat, dtype: torch.dtype
) -> Call:
    generator = torch.Generator().manual_seed(m + n + k)
    given = {
        "a": torch.randn(m, k, generator=generator).to(dtype),
        "weight": make_weight(n, k, block_format),
        "alpha": torch.tensor([2.0**-9 * 1.37]),
        "bias": torch.randn(n, generator=generator).to(dtype),
    }
    return Call("mm_bf16_fp4", given, tactic and (MM_BF16_FP4, tactic))


def fp4_cases(bounds: Mapping[torch.dtype, float] | None) -> Iterator[Case]:
    for m, n, k in ((1, 72, 416), (45, 136, 288), (200, 264, 160)):
        for block_format, a_layout in product(BlockFormat, (SfLayout.layout_128x4, SfLayout.layout_8x4)):
            yield partial(_fp4_call, m, n, k, block_format, a_layout, bounds)


def _fp4_call(
    m: int,
    n: int,
    k: int,
    block_format: BlockFormat,
    a_layout: SfLayout,
    bounds: Mapping[torch.dtype, float] | None,
) -> Call:
    a, b = make_matrix(m, k, block_format, a_layout, 1), make_matrix(n, k, block_format, seed=2)
    given = {
        "a": a.codes,
        "b": b.codes.T,
        "a_descale": a.scales,
        "b_descale": b.scales.T,
        "alpha": torch.tensor([2.0**-9 * 1.37]),
        "block_size": block_format.block,
        "use_8x4_sf_layout": a_layout is SfLayout.layout_8x4,
        "use_nvfp4": block_format is NVFP4,
    }
    return Call("mm_fp4", given, None, bounds)


# ---- attention -------------------------------------------------------------------------------------------------------

# Its exponentials are approximate: as far from each other as the family's tests let each be from float64.
_ATTENTION = {torch.float16: 1e-3, torch.bfloat16: 4e-3, E4M3: 5e-2, torch.float32: 1e-5}
_CACHES: tuple[Arguments, ...] = (
    {"v_scale_layout": "interleaved4"},
    {"cache": torch.bfloat16, "kv_layout": "NHD"},
    {"cache": E4M3, "head_dim": 64, "q_dtype": torch.float16},
    {"head_dim": 256, "out_dtype": E4M3, "missing": ((0, 0, 1, -1),)},
)


def decode_cases() -> Iterator[Case]:
    for cache in _CACHES:
        yield partial(_attention_call, "decode", cache, {"lengths": (70, 33), "kv_heads": 1, "with_sinks": True})
        yield partial(_attention_call, "decode", cache, {"lengths": (40, 0), "kv_heads": 1, "q_lens": (3, 2)})


def prefill_cases() -> Iterator[Case]:
    tactics = {64: PrefillTactic(4, 32, 64, 2), 128: PrefillTactic(4, 16, 64, 2), 256: PrefillTactic(8, 16, 32, 1)}
    for cache in _CACHES:
        yield partial(_context_call, cache, (40, 20), tactics[cache.get("head_dim", 128)])


def prefill_wgmma_cases() -> Iterator[Case]:
    for cache, tactic in zip(_CACHES, (WgmmaTactic(), WgmmaTactic(), WgmmaTactic(), WgmmaTactic(tile=64)), strict=True):
        yield partial(_context_call, cache, (40, 20), tactic)


def _context_call(cache: Arguments, q_lens: tuple[int, ...], tactic: Any) -> Call:
    fields = {"lengths": (90, 20), "q_lens": q_lens, "kv_heads": 1, "group": 2}
    return _attention_call("context", cache, fields)._replace(forced=(ATTENTION, tactic))


def _attention_call(kind: str, cache: Arguments, fields: Arguments) -> Call:
    batch = Batch(**(cache | fields))
    given = batch.decode_arguments() if kind == "decode" else batch.context_arguments()
    given["workspace_buffer"] = torch.zeros(8 << 20, dtype=torch.uint8)
    return Call(f"trtllm_batch_{kind}_with_kv_cache", given, None, _ATTENTION)


CASES: dict[str, Callable[[], Cases]] = {
    "attention/decode": decode_cases,
    "attention/prefill": prefill_cases,
    "attention/prefill_wgmma": prefill_wgmma_cases,
    "gdn/chunk": partial(gdn_cases, CHUNK),
    "gdn/delta_rule": partial(gdn_cases, DELTA_RULE),
    # No tcgen05 has told yet in which order it adds: half a unit of the result's last place.
    "gemm/blockscaled": partial(fp4_cases, {torch.bfloat16: 2.0**-9}),
    "gemm/blockscaled_k96": partial(fp4_cases, {torch.bfloat16: 2.0**-9}),
    "gemm/narrow": narrow_cases,
    "gemm/portable": partial(fp4_cases, None),
    "gemm/wide": wide_cases,
    "kv/dequantize": kv_dequantize_cases,
    "kv/quantize": kv_quantize_cases,
    "norm/rmsnorm_fp4quant": norm_cases,
    "quantize/dequantize": dequantize_cases,
    "quantize/e4m3": e4m3_cases,
    "quantize/grouped": grouped_cases,
    "quantize/row_scale": row_scale_cases,
    "quantize/vector": vector_cases,
}

"""Calls that launch the kernels of ``kv``, ``gemm`` and ``attention``.

These have dozens of specialisations. The calls are a sample of formats, layouts, sizes and cuts; the tests of a family
launch the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from itertools import product
from typing import Any

import torch

from jitfp4 import SfLayout, fp8_row_scale
from jitfp4.families.attention.kernels.prefill import PrefillTactic
from jitfp4.families.attention.kernels.prefill_wgmma import WgmmaTactic
from jitfp4.families.attention.operation import ATTENTION
from jitfp4.families.gemm.fp4_operation import MM_FP4
from jitfp4.families.gemm.fp8_operation import MM_FP8_FP4
from jitfp4.families.gemm.kernels.blockscaled import K64Tactic
from jitfp4.families.gemm.kernels.blockscaled_k96 import K96Tactic
from jitfp4.families.gemm.kernels.blockscaled_masked import MaskedTactic
from jitfp4.families.gemm.kernels.expanded_fp8 import ExpandedTactic
from jitfp4.families.gemm.kernels.narrow import NarrowTactic
from jitfp4.families.gemm.kernels.portable import PortableTactic
from jitfp4.families.gemm.kernels.portable_masked import PortableMaskedTactic
from jitfp4.families.gemm.kernels.wide import WideTactic
from jitfp4.families.gemm.kernels.wide_fp8 import Fp8Tactic
from jitfp4.families.gemm.masked_operation import MM_FP4_MASKED
from jitfp4.families.gemm.operation import MM_BF16_FP4
from jitfp4.formats import MXFP4, NVFP4, BlockFormat
from tests.sim.call import E4M3, HALVES, Arguments, Call, Case
from tests.sim.quantize_calls import matrix
from tests.support.attention import Case as Batch
from tests.support.gemm import make_batch, make_matrix, make_weight, masked_keywords
from tests.support.inputs import random_matrix
from tests.support.kv import paged_cache

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
        (WideTactic(64, 2, 2, 4), 64, 136, 1056, NVFP4, torch.float16),
        (WideTactic(128, 1, 2, 3), 130, 72, 416, NVFP4, torch.float16),
        (WideTactic(64, 2, cluster=2, divided=True), 130, 520, 416, NVFP4, torch.bfloat16),
        (WideTactic(256, 2), 200, 136, 160, MXFP4, torch.float16),
    ):
        yield partial(_linear_call, tactic, m, n, k, block_format, dtype)


def wide_fp8_cases() -> Iterator[Case]:
    for tactic, m, n, k, block_format in (
        (Fp8Tactic(64, 3), 40, 200, 416, MXFP4),
        (Fp8Tactic(128), 130, 136, 160, NVFP4),
        (Fp8Tactic(128, cluster=2, divided=True, band=8), 130, 520, 416, NVFP4),
        (Fp8Tactic(256), 200, 136, 160, MXFP4),
    ):
        yield partial(_fp8_call, tactic, m, n, k, block_format)


def expanded_fp8_cases() -> Iterator[Case]:
    yield partial(_fp8_call, ExpandedTactic(256, 1), 300, 136, 288, MXFP4)
    yield partial(_fp8_call, ExpandedTactic(144, 2), 530, 264, 416, NVFP4)


def _fp8_call(tactic: Fp8Tactic | ExpandedTactic, m: int, n: int, k: int, block_format: BlockFormat) -> Call:
    generator = torch.Generator().manual_seed(m + n + k)
    weight = make_weight(n, k, block_format)
    given = {
        "a": torch.randn(m, k, generator=generator).to(torch.float8_e4m3fn),
        "a_scale": torch.rand(m, generator=generator),
        "weight": weight,
        "row_scale": fp8_row_scale(weight),
    }
    return Call("mm_fp8_fp4", given, (MM_FP8_FP4, tactic))


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


def portable_cases() -> Iterator[Case]:
    for (tactic, *size), block_format, a_layout in product(
        (
            (PortableTactic(16, 128, 16, 32, 2, 3, split=4), 1, 72, 416),
            (PortableTactic(64, 128, 64, 32, 1, 4), 45, 136, 288),
            (PortableTactic(128, 128, 64, 32, 1, 4), 200, 264, 160),
        ),
        BlockFormat,
        (SfLayout.layout_128x4, SfLayout.layout_8x4),
    ):
        yield partial(_fp4_call, tactic, *size, block_format, a_layout)


def fp4_wide_cases() -> Iterator[Case]:
    for tactic, m, n, k, block_format, a_layout in (
        (WideTactic(64, 1, 2), 40, 72, 416, NVFP4, SfLayout.layout_128x4),
        (WideTactic(64, 4, split=2), 60, 264, 416, MXFP4, SfLayout.layout_8x4),
        (WideTactic(128, 1, 2, 3), 130, 72, 416, NVFP4, SfLayout.layout_8x4),
        (WideTactic(64, 2, cluster=2, divided=True), 130, 520, 416, NVFP4, SfLayout.layout_128x4),
        (WideTactic(256, 2), 200, 136, 160, MXFP4, SfLayout.layout_128x4),
    ):
        yield partial(_fp4_call, tactic, m, n, k, block_format, a_layout)


# No tcgen05 has told yet in which order it adds: half a unit of the result's last place.
_TCGEN05 = {torch.bfloat16: 2.0**-9}


def blockscaled_cases(*tactics: K64Tactic | K96Tactic) -> Iterator[Case]:
    for tactic, block_format in product(tactics, BlockFormat):
        yield partial(_fp4_call, tactic, 200, 136, 768, block_format, SfLayout.layout_128x4, _TCGEN05)


def _fp4_call(
    tactic: PortableTactic | WideTactic | K64Tactic | K96Tactic,
    m: int,
    n: int,
    k: int,
    block_format: BlockFormat,
    a_layout: SfLayout,
    bounds: Mapping[torch.dtype, float] | None = None,
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
    return Call("mm_fp4", given, (MM_FP4, tactic), bounds)


def masked_cases(*tactics: MaskedTactic | PortableMaskedTactic) -> Iterator[Case]:
    for tactic, block_format in product(tactics, BlockFormat):
        yield partial(_masked_call, tactic, block_format)


def _masked_call(tactic: MaskedTactic | PortableMaskedTactic, block_format: BlockFormat) -> Call:
    a, b = make_batch(3, 130, 320, block_format, 1), make_batch(3, 136, 320, block_format, 11)
    given = {
        "lhs": (a.codes, a.scales),
        "rhs": (b.codes, b.scales),
        "out": torch.zeros(3, 130, 136, dtype=torch.bfloat16).permute(1, 2, 0),
        "masked_m": torch.tensor([5, 0, 130], dtype=torch.int32),
        **masked_keywords(block_format),
        "alpha": 2.0**-9 * torch.arange(1.0, 4.0),
    }
    bounds = _TCGEN05 if isinstance(tactic, MaskedTactic) else None
    return Call("grouped_gemm_nt_masked", given, (MM_FP4_MASKED, tactic), bounds)


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
    tactics = {64: PrefillTactic(4, 32, 64, 2), 128: PrefillTactic(8, 16, 64, 1), 256: PrefillTactic(8, 16, 32, 1)}
    for cache in _CACHES:
        yield partial(_context_call, cache, (40, 20), tactics[cache.get("head_dim", 128)])


def prefill_wgmma_cases() -> Iterator[Case]:
    for cache, tactic in zip(_CACHES, (WgmmaTactic(), WgmmaTactic(), WgmmaTactic(), WgmmaTactic(tile=64)), strict=True):
        yield partial(_context_call, cache, (40, 20), tactic)


def decode_masked_cases() -> Iterator[Case]:
    for cache in _CACHES:
        yield partial(_tree_call, cache, {"lengths": (70, 33), "kv_heads": 1, "q_lens": (3, 7), "window_left": 20})


def prefill_masked_cases(tactic: Any) -> Iterator[Case]:
    for cache in _CACHES[:3]:
        yield partial(_tree_call, cache, {"lengths": (90, 20), "kv_heads": 1, "group": 4, "q_lens": (40, 20)}, tactic)


def _tree_call(cache: Arguments, fields: Arguments, tactic: Any = None) -> Call:
    """Random new tokens are seen."""
    call = _attention_call("decode", cache, fields)
    words = 2 * -(-max(fields["q_lens"]) // 32)
    mask = torch.randint(-(1 << 15), 1 << 15, (sum(fields["q_lens"]), words), dtype=torch.int16).view(torch.uint16)
    return call._replace(
        arguments=call.arguments | {"mask": mask}, forced=None if tactic is None else (ATTENTION, tactic)
    )


def _context_call(cache: Arguments, q_lens: tuple[int, ...], tactic: Any) -> Call:
    fields = {"lengths": (90, 20), "q_lens": q_lens, "kv_heads": 1, "group": 2}
    return _attention_call("context", cache, fields)._replace(forced=(ATTENTION, tactic))


def _attention_call(kind: str, cache: Arguments, fields: Arguments) -> Call:
    batch = Batch(**(cache | fields))
    given = batch.decode_arguments() if kind == "decode" else batch.context_arguments()
    given["workspace_buffer"] = torch.zeros(32 << 20, dtype=torch.uint8)
    return Call(f"trtllm_batch_{kind}_with_kv_cache", given, None, _ATTENTION)

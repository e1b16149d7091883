"""Calls that launch the kernels of ``quantize``, ``norm`` and ``gdn``.

Those of ``quantize`` and ``gdn`` launch every specialisation that a table selects; those of ``norm`` are a sample of
formats and sizes, and its tests launch the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import NamedTuple

import torch

from jitfp4 import NVFP44Over6Config, SfLayout
from jitfp4.dtypes import FLOATS
from jitfp4.families.gdn.kernels.delta_rule import KERNEL as DELTA_RULE
from jitfp4.families.gdn.operation import GATED_DELTA_RULE
from jitfp4.families.gdn.problem import STATE_DTYPES, Problem, StateLayout
from jitfp4.families.norm.kernels.rows_fp4quant import TACTICS as ROWS_TACTICS
from jitfp4.families.norm.kernels.rows_fp4quant import RowsTactic
from jitfp4.families.norm.operation import RMSNORM
from jitfp4.families.quantize.kernels.tma import TACTICS as TMA_TACTICS
from jitfp4.families.quantize.kernels.tma import TmaTactic
from jitfp4.families.quantize.operation import QUANTIZE
from jitfp4.formats import NVFP4, BlockFormat
from jitfp4.kernel import AnyKernel
from jitfp4.tensors import device_arch
from tests.sim.call import E4M3, HALVES, Arguments, Call, Case
from tests.support.inputs import hard_blocks, random_matrix

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
    for layout, size, function, dtype in product(SfLayout, (SMALL, MEDIUM), (functions[0], functions[2]), HALVES):
        yield partial(_better, partial(_vector_call, function, layout, *size, dtype))


def _better(case: Case) -> Call:
    """The same with the better of two scales for each block."""
    call = case()
    return call._replace(arguments=call.arguments | {"nvfp4_4over6": NVFP44Over6Config(err_mode="MSE")})


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
    for layout, size in product(SfLayout, (SMALL, MEDIUM, LARGE)):
        yield partial(_vector_call, "nvfp4_quantize", layout, *size, E4M3)


def tma_cases() -> Iterator[Case]:
    for dtype, layout, tactic in product(HALVES, SfLayout, TMA_TACTICS):
        yield partial(_tma_call, dtype, layout, tactic)


def _tma_call(dtype: torch.dtype, layout: SfLayout, tactic: TmaTactic) -> Call:
    return _vector_call("nvfp4_quantize", layout, 200, 528, dtype)._replace(forced=(QUANTIZE, tactic))


def per_token_cases() -> Iterator[Case]:
    for dtype, layout, k in product(HALVES, SfLayout, (496, 1008, 4080, 32752, 65520)):
        yield partial(_per_token_call, dtype, layout, k)
        yield partial(_better, partial(_per_token_call, dtype, layout, k))


def _per_token_call(dtype: torch.dtype, layout: SfLayout, k: int) -> Call:
    scale = torch.tensor([1 / 2688])
    given = {"a": random_matrix(9, k, dtype), "a_global_sf": scale, "sfLayout": layout, "per_token_activation": True}
    return Call("nvfp4_quantize", given)


def grouped_cases() -> Iterator[Case]:
    functions = ("nvfp4_batched_quantize", "scaled_fp4_grouped_quantize", "silu_and_mul_scaled_nvfp4_experts_quantize")
    for function, dtype in product(functions, HALVES):
        yield partial(_grouped_call, function, dtype)
        yield partial(_better, partial(_grouped_call, function, dtype))


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


NORMS = ("rmsnorm_fp4quant", "add_rmsnorm_fp4quant")
RECIPES = ((16, "e4m3"), (32, "e4m3"), (32, "ue8m0"))


def norm_cases() -> Iterator[Case]:
    few = ((5, 256), (3, 4096), (2, 16384), (2, 32768), (1, 65536))
    many = ((2700, 2048), (2700, 4096), (700, 8192))
    for function, dtype, (block, scale), size in product(NORMS, HALVES, RECIPES, (*few, *many)):
        yield partial(_norm_call, function, dtype, block, scale, *size)


def norm_rows_cases() -> Iterator[Case]:
    for function, dtype, (block, scale), tactic in product(NORMS, HALVES, RECIPES, ROWS_TACTICS):
        yield partial(_norm_rows_call, function, dtype, block, scale, tactic)


def _norm_rows_call(function: str, dtype: torch.dtype, block: int, scale: str, tactic: RowsTactic) -> Call:
    return _norm_call(function, dtype, block, scale, 5, 4096 * tactic.units)._replace(forced=(RMSNORM, tactic))


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
    for dtype, state, (dim, value_dim, gate), tokens, heads, (steps, slots) in product(
        HALVES,
        (torch.float32, torch.bfloat16),
        ((128, 128, None), (64, 64, None), (128, 128, torch.float32), (64, 64, torch.float32), (128, 256, None)),
        (1, 2, 3, 6, 11),
        (2, 65, 300, 513, 1025),
        ((False, False), (True, False), (True, True)),
    ):
        if value_dim != dim and state != torch.float32:
            continue
        general = value_dim != dim or gate is not None
        problem = Problem(
            dtype=FLOATS[dtype],
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
        sizes = _Sizes(dtype, state, dim, value_dim, gate, heads)
        if spec is not None and spec not in found:
            found.add(spec)
            # the chunkwise kernel has an approximate 1 / sqrt
            yield partial(_delta_rule_call, sizes, tokens, steps, slots, kernel is DELTA_RULE)
        by_columns = kernel is DELTA_RULE and state is torch.float32 and (heads == 2 or not general)
        if by_columns and tokens == 1 and not steps:
            yield partial(_one_token_call, sizes)


class _Sizes(NamedTuple):
    """Of a delta rule: dtypes of queries, states and gates (None: as queries), and dimensions."""

    dtype: torch.dtype
    state: torch.dtype
    dim: int
    value_dim: int
    gate: torch.dtype | None
    heads: int


def _delta_rule_call(sizes: _Sizes, tokens: int, steps: bool, slots: bool, norm: bool) -> Call:
    given = _delta_rule(sizes, tokens) | {"use_qk_l2norm": norm}
    pool = given["initial_state"]
    if slots:
        given["initial_state"] = pool.repeat(tokens, 1, 1, 1)
        given["ssm_state_indices"] = torch.arange(tokens).view(1, tokens)
    elif steps:
        given["intermediate_states_buffer"] = torch.zeros(1, tokens, *pool.shape[1:], dtype=sizes.state)
    return Call("gated_delta_rule_mtp", given)


def _one_token_call(sizes: _Sizes) -> Call:
    given = _delta_rule(sizes, 1)
    del given["initial_state_indices"]
    by_columns = given.pop("initial_state").view(1, sizes.heads, sizes.dim, sizes.value_dim)
    return Call("gated_delta_rule_decode", given | {"state": by_columns})


def _delta_rule(sizes: _Sizes, tokens: int) -> Arguments:
    dtype, state, dim, value_dim, gate, heads = sizes
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
        "a": normal(1, tokens, heads).to(gate or dtype),
        "dt_bias": normal(heads),
        "b": torch.zeros(1, tokens, heads, dtype=gate or dtype),
    }

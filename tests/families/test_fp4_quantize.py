"""The rest of the quantizers on one matrix: MXFP4, float8 input, per token, after SwiGLU, and the general entry."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from itertools import product

import pytest
import torch

from jitfp4 import (
    ArgumentError,
    ArgumentTypeError,
    SfLayout,
    fp4_quantize,
    mxfp4_dequantize,
    mxfp4_quantize,
    nvfp4_dequantize,
    nvfp4_quantize,
    shuffle_matrix_a,
    silu_and_mul_nvfp4_quantize,
    sim,
)
from jitfp4.arch import ARCHS, Arch
from jitfp4.families.quantize.kernels.e4m3 import KERNEL as TABLE
from jitfp4.families.quantize.kernels.per_token import TACTICS as TOKEN_TACTICS
from jitfp4.families.quantize.kernels.per_token import TokenTactic
from jitfp4.families.quantize.kernels.tma import KERNEL as TMA
from jitfp4.families.quantize.kernels.tma import TACTICS as TMA_TACTICS
from jitfp4.families.quantize.kernels.vector import KERNEL as VECTOR
from jitfp4.families.quantize.kernels.vector import VectorSpec
from jitfp4.families.quantize.operation import QUANTIZE, QUANTIZE_PER_TOKEN
from jitfp4.families.quantize.problem import Problem
from jitfp4.formats import MXFP4, NVFP4, BlockFormat, DType
from jitfp4.nvrtc import compile_cubin
from jitfp4.reference import quantize as reference
from jitfp4.reference.formats import decode_e2m1, swizzle, unpack_e2m1, unswizzle
from jitfp4.spec import KernelSpec
from tests.support.compare import assert_same_bytes, poisoned
from tests.support.inputs import all_half_patterns, far_gates, hard_blocks, random_matrix
from tests.support.sass import disassemble

HALVES = [torch.bfloat16, torch.float16]
LAYOUTS = list(SfLayout)
SIM = [pytest.mark.sim, pytest.mark.compile]
TMA_DEVICES = [
    pytest.param("sm_90a", marks=SIM),
    pytest.param("sm_100a", marks=[*SIM, pytest.mark.one_in(4)]),
    pytest.param("cuda", marks=pytest.mark.gpu),
]


# ---- MXFP4 -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: x.tag)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_mxfp4_is_the_reference(dtype: torch.dtype, layout: SfLayout, device: str) -> None:
    shapes = ((1, 32), (131, 96), (3, 1152))
    for a in (hard_blocks(dtype, 32), *(random_matrix(*shape, dtype) for shape in shapes)):
        m, k = a.shape
        out = poisoned((m, k // 2), torch.uint8, device)
        out_sf = poisoned(layout.shape(m, k // 32), torch.uint8, device)
        mxfp4_quantize(a.to(device), sfLayout=layout, out=out, out_sf=out_sf)
        want_q, want_sf = reference.mxfp4_quantize(a, layout)
        assert_same_bytes("codes", out, want_q)
        assert_same_bytes("scales", out_sf, want_sf)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_mxfp4_of_every_bit_pattern(dtype: torch.dtype) -> None:
    a = all_half_patterns(dtype).view(-1, 64)
    for got, want in zip(mxfp4_quantize(a.cuda()), reference.mxfp4_quantize(a, SfLayout.layout_128x4), strict=True):
        assert_same_bytes("output", got, want)


def test_mxfp4_scale_is_the_power_of_two_at_or_above_amax_over_6() -> None:
    a = torch.zeros(5, 32, dtype=torch.bfloat16)
    a[0, 0], a[1, 0], a[2, 0], a[3, 0] = 6.0, 6.03125, 3.0, 2.0**-133
    q, sf = mxfp4_quantize(a, sfLayout=SfLayout.layout_linear)
    assert sf.flatten().tolist() == [127, 128, 126, 0, 0]
    assert q[:, 0].tolist() == [7, 5, 7, 0, 0]


def test_mxfp4_never_saturates_a_finite_value() -> None:
    a = random_matrix(64, 256, torch.float16)
    q, sf = mxfp4_quantize(a)
    error = (mxfp4_dequantize(q, sf) - a.float()).unflatten(1, (-1, 32)).abs()
    step = torch.exp2(torch.ceil(torch.log2(a.float().unflatten(1, (-1, 32)).abs().amax(-1, keepdim=True) / 6)))
    assert (error <= step * 1.0001).all()  # half of the widest step, 2


# ---- float8 input ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: x.tag)
def test_float8_input_is_the_reference(layout: SfLayout, device: str) -> None:
    generator = torch.Generator().manual_seed(7)  # the largest of a block is anywhere in it
    every_byte = torch.cat([torch.randperm(256, generator=generator) for _ in range(5)])
    every_byte = every_byte.to(torch.uint8).view(torch.float8_e4m3fn).view(10, 128)
    odd = torch.randint(0, 256, (129, 144), generator=generator).to(torch.uint8).view(torch.float8_e4m3fn)
    for a, scale in ((odd, 2.0), *((every_byte, scale) for scale in (1.0, 37.3, 0.01, 1e-30, 1e30))):
        g = torch.tensor([scale])
        want_q, want_sf = reference.nvfp4_quantize(a, g, layout)
        q, sf = nvfp4_quantize(a.to(device), g.to(device), layout)
        assert_same_bytes("codes", q, want_q)
        assert_same_bytes("scales", sf, want_sf)


def test_float8_input_comes_back_times_6_over_g() -> None:
    a = random_matrix(32, 64, torch.float16, seed=4).clamp(-200, 200).to(torch.float8_e4m3fn)
    g = torch.tensor([2688.0 / 200])
    q, sf = nvfp4_quantize(a, g)
    want = a.float() * 6 / g
    got = nvfp4_dequantize(q, sf, 1 / g)
    assert ((got - want).norm() / want.norm()) < 0.12


# ---- per token -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_per_token_is_the_reference(dtype: torch.dtype, device: str) -> None:
    for m, k in ((72, 1040), (96, 10768), (64, 21008)):  # in one turn of the threads, in some and in many
        a = random_matrix(m, k, dtype)
        row = torch.arange(m)  # the largest of each is in every turn and at every place that a thread has in one
        turns, pair = -(-k // 4096), row // 2
        place = (pair % turns * 4096 + row * 37 % 65 * 16 + pair // turns % 16) % k
        a[row, place] = torch.where(row % 2 == 0, -3e4, 3e4).to(dtype)
        a[1], a[2, 5], a[3], a[4, 7] = 0.0, float("nan"), float("nan"), float("inf")
        inverse_base = torch.tensor([1 / 2688])
        q, sf, scales = nvfp4_quantize(a.to(device), inverse_base.to(device), per_token_activation=True)
        encode, decode = reference.row_scales(a, inverse_base)
        codes, blocks = reference.quantize_blocks(a, NVFP4, encode.unsqueeze(1))
        assert_same_bytes("codes", q, codes)
        assert_same_bytes("scales", sf, swizzle(blocks, SfLayout.layout_128x4))
        assert_same_bytes("row scales", scales, decode)
        assert scales[1].item() == 0 and not blocks[1].any() and not codes[1].any()


@pytest.mark.sim
@pytest.mark.compile
@pytest.mark.parametrize("tactic", TOKEN_TACTICS, ids=str)
def test_every_kind_of_per_token_kernel_simulated(tactic: TokenTactic) -> None:
    """Rows that fill their threads, and that leave some without a unit; whose largest unit is the first or the last."""
    whole = tactic.turn * tactic.warps
    for layout, (m, k) in zip(SfLayout, ((5, whole), (10, whole - 16), (3, whole * 5 // 8)), strict=True):
        k += whole if tactic.stream else 0
        a = random_matrix(m, k, torch.bfloat16)
        a[0, -1], a[1, 0], a[2, :-16] = 3e4, -3e4, float("nan")
        inverse_base = torch.tensor([1 / 2688])
        with sim.device("sm_90a", races=True), QUANTIZE_PER_TOKEN.forced(tactic):
            q, sf, scales = nvfp4_quantize(a, inverse_base, layout, per_token_activation=True)
        encode, decode = reference.row_scales(a, inverse_base)
        codes, blocks = reference.quantize_blocks(a, NVFP4, encode.unsqueeze(1))
        assert_same_bytes("codes", q, codes)
        assert_same_bytes("scales", sf, swizzle(blocks, layout))
        assert_same_bytes("row scales", scales, decode)


def test_per_token_dequantizes_with_the_row_scale() -> None:
    a = random_matrix(50, 128, torch.bfloat16)
    q, sf, scales = nvfp4_quantize(a, 1 / 2688, SfLayout.layout_linear, per_token_activation=True)
    values = decode_e2m1(unpack_e2m1(q)) * sf.view(torch.float8_e4m3fn).float().repeat_interleave(16, 1)
    error = values * scales.unsqueeze(1) - a.float()
    assert (error.norm(dim=1) / a.float().norm(dim=1) < 0.13).all()


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_shuffled_per_token_scales_go_with_their_rows(dtype: torch.dtype, device: str) -> None:
    a = random_matrix(256, 128, dtype)
    options = {"do_shuffle": True, "per_token_activation": True}
    q, sf, scales = (x.cpu() for x in nvfp4_quantize(a.to(device), torch.tensor([1 / 2688]).to(device), **options))
    blocks = unswizzle(sf, SfLayout.layout_128x4, 256, 8).view(torch.float8_e4m3fn).float().repeat_interleave(16, 1)
    back = decode_e2m1(unpack_e2m1(q)) * blocks * scales.unsqueeze(1)
    want = shuffle_matrix_a(a, 128).float()
    assert ((back - want).norm(dim=1) / want.norm(dim=1) < 0.13).all()
    assert ((back - want).norm() / want.norm()) < 0.11


# ---- after SwiGLU ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_silu_and_mul_is_the_reference_but_for_exp(dtype: torch.dtype, device: str) -> None:
    """ex2.approx moves a product across a rounding boundary of 16 bits now and then; a code then moves by one."""
    gate, up = (random_matrix(40, 352, dtype, seed) for seed in (1, 2))
    a = torch.cat((far_gates(gate), up), dim=1).clamp(-200, 200)
    g = torch.tensor([0.25])
    q, sf = silu_and_mul_nvfp4_quantize(a.to(device), g.to(device))
    want_q, want_sf = reference.nvfp4_quantize(reference.silu_and_mul(a), g, SfLayout.layout_128x4)
    assert q.shape == want_q.shape and sf.shape == want_sf.shape
    assert (sf.cpu() != want_sf).float().mean() <= 1e-3
    got, want = (unpack_e2m1(x) for x in (q.cpu(), want_q))
    assert (got != want).float().mean() <= 1e-3
    if device == "cpu" and sim.active_device() is None:
        assert torch.equal(q, want_q) and torch.equal(sf, want_sf)


def test_silu_keeps_the_sign_of_zero_and_its_tail(device: str) -> None:
    """Products of magnitude 3, down to silu(-92), which is about -1e-38; each gate at every place of a block."""
    some = torch.tensor([-0.0, 0, 90, -79, -81, -87, -87.5, -88.5, -90, -92, -20, 1, 2, 3, -1, -5]).double()
    gate = torch.stack([some.roll(by) for by in range(16)])
    exact = gate / (1 + torch.exp(-gate))
    up = torch.where(gate == 0, 1, 3 / exact.abs())
    a = torch.cat((gate, up), -1).bfloat16().to(device)
    q, _ = silu_and_mul_nvfp4_quantize(a, torch.tensor([1.0]).to(device))
    zeros = torch.where(torch.signbit(gate), 8, 0)
    assert torch.equal(unpack_e2m1(q.cpu()).long(), torch.where(gate == 0, zeros, torch.where(gate > 0, 7, 15)))


# ---- the general entry -----------------------------------------------------------------------------------------------


def test_general_entry_agrees_with_the_others(device: str) -> None:
    a, g = random_matrix(40, 96, torch.bfloat16).to(device), torch.tensor([3.0], device=device)
    linear, tile_8x4 = {"is_sf_swizzled_layout": False}, {"is_sf_8x4_layout": True}
    pairs = [
        (fp4_quantize(a, g), nvfp4_quantize(a, g)),
        (fp4_quantize(a, g, **linear), nvfp4_quantize(a, g, SfLayout.layout_linear)),
        (fp4_quantize(a, g, **tile_8x4), nvfp4_quantize(a, g, SfLayout.layout_8x4)),
        (fp4_quantize(a), nvfp4_quantize(a, 1.0)),
        (fp4_quantize(a, 1 / g, is_global_scale_inversed=True), nvfp4_quantize(a, 1 / (1 / g))),
        (fp4_quantize(a, g, 32, True), mxfp4_quantize(a)),
        (fp4_quantize(a.view(5, 8, 96), g.bfloat16()), nvfp4_quantize(a.view(5, 8, 96), g)),
    ]
    for got, want in pairs:
        for left, right in zip(got, want, strict=True):
            assert_same_bytes("output", left, right)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn], ids=str)
def test_one_scale_for_each_row(dtype: torch.dtype, device: str) -> None:
    a, g = random_matrix(7, 80, torch.float16).clamp(-400, 400).to(dtype), torch.arange(1.0, 8.0)
    q, sf = fp4_quantize(a.to(device), g.to(device))
    rows = [reference.nvfp4_quantize(a[row : row + 1], g[row], SfLayout.layout_linear) for row in range(7)]
    want_q, blocks = (torch.cat(parts) for parts in zip(*rows, strict=True))
    assert_same_bytes("codes", q, want_q)
    assert_same_bytes("scales", sf, swizzle(blocks, SfLayout.layout_128x4))


def test_a_column_major_matrix_is_quantized_along_its_columns() -> None:
    a = random_matrix(48, 32, torch.bfloat16)
    q, sf = fp4_quantize(a.t(), 2.0, is_sf_swizzled_layout=False)
    want_q, want_sf = fp4_quantize(a, 2.0, is_sf_swizzled_layout=False)
    assert torch.equal(q, want_q.t()) and torch.equal(sf, want_sf.t())


# ---- selection -------------------------------------------------------------------------------------------------------


def selected(arch: Arch, problem: Problem) -> KernelSpec:
    tactic = QUANTIZE.select(problem, arch)
    kernel = next(kernel for kernel in (VECTOR, TMA, TABLE) if kernel.tactic is type(tactic))
    return kernel.specialise(problem, tactic)


@pytest.mark.parametrize("arch", ARCHS.values(), ids=str)
def test_selection_returns_exactly_the_listed_specs(arch: Arch) -> None:
    kinds: list[tuple[BlockFormat, DType, bool, bool]] = [
        *((NVFP4, dtype, False, by_row) for dtype in DType if dtype is not DType.F32 for by_row in (False, True)),
        *((NVFP4, dtype, True, False) for dtype in (DType.BF16, DType.F16)),
        *((MXFP4, dtype, False, False) for dtype in (DType.BF16, DType.F16)),
    ]
    found = {
        selected(arch, Problem(form, dtype, layout, silu, by_row, 1 << m, 1 << k))
        for form, dtype, silu, by_row in kinds
        for layout in SfLayout
        for m in range(0, 20, 3)
        for k in range(5, 16, 2)
    }
    for dtype, layout, silu, m in product((DType.BF16, DType.F16), SfLayout, (False, True), (1, 64)):
        found.add(selected(arch, Problem(NVFP4, dtype, layout, silu, False, m, 1 << 20, four_over_six=True)))
    assert found == {spec for kernel in (VECTOR, TABLE, TMA) for spec in kernel.specs(arch)}


def test_impossible_specs_are_refused() -> None:
    good = VectorSpec(
        block_format=NVFP4,
        in_dtype=DType.BF16,
        sf_layout=SfLayout.layout_8x4,
        silu=False,
        four_over_six=False,
        blocks_per_thread=1,
    )
    for change in ({"block_format": MXFP4, "silu": True}, {"block_format": MXFP4, "in_dtype": DType.E4M3},
                   {"in_dtype": DType.E4M3, "silu": True}, {"block_format": MXFP4, "four_over_six": True},
                   {"in_dtype": DType.E4M3, "four_over_six": True}):  # fmt: skip
        with pytest.raises(ArgumentError, match="spec"):
            replace(good, **change)


@pytest.mark.compile
@pytest.mark.one_in(3)
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_103a"])
def test_machine_code_converts_and_loads_as_the_architecture_can(arch: str) -> None:
    """Blackwell converts to E2M1 with one instruction; loads are 16 bytes wide, 32 there."""
    for spec in VECTOR.specs(ARCHS[arch]):
        if spec.in_dtype is not DType.BF16 or spec.sf_layout is not SfLayout.layout_128x4:
            continue
        source = VECTOR.render(spec, ARCHS[arch])
        opcodes = [
            line.split()[0] for line in disassemble(compile_cubin(source, ARCHS[arch], symbol="quantize_vector"))
        ]
        assert any(".E2M1." in opcode for opcode in opcodes) == ARCHS[arch].has_e2m1_cvt, spec
        loads = [opcode for opcode in opcodes if opcode.startswith("LDG")]
        wide = [opcode for opcode in loads if ".128" in opcode or ".256" in opcode]
        assert len(loads) - len(wide) <= 2, (spec, loads)  # the global scale, once or in both branches
        assert not any(opcode.startswith(("LDL", "STL")) for opcode in opcodes), spec


# ---- the TMA kernel --------------------------------------------------------------------------------------------------


@pytest.mark.one_in(3)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: x.tag)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("arch", TMA_DEVICES)
def test_tma_kernel_is_the_reference(arch: str, dtype: torch.dtype, layout: SfLayout) -> None:
    """On a simulated GPU of two SMs, so that a CTA meets several tiles."""
    on_gpu = arch == "cuda"
    shapes = [(5, 272), (1500, 1040), (4096, 4096)] if on_gpu else [(5, 272), (300, 144), (130, 1040)]
    g, place = torch.tensor([3.0]), "cuda" if on_gpu else "cpu"
    for tactic in TMA_TACTICS if on_gpu else TMA_TACTICS[:1]:
        for m, k in shapes:
            a = random_matrix(m, k, dtype)
            a[2::5, ::2], a[2::5, 16:64], a[3::7] = 0, 0, 0
            rows = [a.to(place)]
            if layout is SfLayout.layout_linear:  # as one long row, and as rows apart
                rows.append(torch.cat([a, a[:, :64]], dim=1).to(place)[:, :k])
            want_q, want_sf = reference.nvfp4_quantize(a, g, layout)
            for x in rows:
                q = poisoned((m, k // 2), torch.uint8, place)
                sf = poisoned(layout.shape(m, k // 16), torch.uint8, place)
                with (
                    nullcontext() if on_gpu else sim.device(replace(ARCHS[arch], num_sms=2)),
                    QUANTIZE.forced(tactic),
                ):
                    nvfp4_quantize(x, g.to(place), layout, out=q, out_sf=sf)
                assert_same_bytes("codes", q, want_q)
                assert_same_bytes("scales", sf, want_sf)


# ---- arguments -------------------------------------------------------------------------------------------------------

A = torch.zeros(4, 64, dtype=torch.bfloat16)
BAD_CALLS: dict[str, tuple[type[ArgumentError], str, Callable[[], object]]] = {
    "mxfp4 k % 32": (ArgumentError, "a", lambda: mxfp4_quantize(A[:, :48])),
    "mxfp4 backend": (ArgumentError, "backend", lambda: mxfp4_quantize(A, "trtllm")),
    "per token of float8": (
        ArgumentTypeError,
        "a",
        lambda: nvfp4_quantize(A.to(torch.float8_e4m3fn), 1.0, per_token_activation=True),
    ),
    "index map": (
        ArgumentError,
        "expanded_idx_to_permuted_idx",
        lambda: nvfp4_quantize(A, 1.0, expanded_idx_to_permuted_idx=torch.zeros(4)),
    ),
    "mixed formats": (ArgumentError, "sf_vec_size, sf_use_ue8m0", lambda: fp4_quantize(A, 1.0, 32)),
    "8x4 but linear": (
        ArgumentError,
        "is_sf_8x4_layout",
        lambda: fp4_quantize(A, 1.0, is_sf_swizzled_layout=False, is_sf_8x4_layout=True),
    ),
    "scale count": (ArgumentError, "global_scale", lambda: fp4_quantize(A, torch.ones(3))),
    "float8 without scale": (ArgumentError, "global_scale", lambda: fp4_quantize(A.to(torch.float8_e4m3fn))),
    "silu width": (ArgumentError, "input", lambda: silu_and_mul_nvfp4_quantize(A[:, :48], 1.0)),
    "silu block": (ArgumentError, "sf_vec_size", lambda: silu_and_mul_nvfp4_quantize(A, 1.0, 32)),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_bad_arguments_are_named(case: str) -> None:
    error, name, call = BAD_CALLS[case]
    with pytest.raises(error) as caught:
        call()
    assert caught.value.name == name

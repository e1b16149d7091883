"""NVFP4 with the better of two scales for each block, against the definition in scalars, and through every function."""

from __future__ import annotations

from enum import IntEnum
from itertools import product
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
import torch

import jitfp4
from jitfp4 import ArgumentError, ArgumentTypeError, NVFP44Over6Config, SfLayout
from jitfp4.families.quantize.kernels.per_token import TACTICS as TOKEN_TACTICS
from jitfp4.families.quantize.kernels.per_token import TokenTactic
from jitfp4.families.quantize.operation import QUANTIZE_PER_TOKEN
from jitfp4.formats import E2M1_VALUES
from jitfp4.reference import quantize as reference
from jitfp4.reference.formats import block_amax, swizzle, unswizzle
from tests.support.compare import assert_same_bytes, poisoned
from tests.support.inputs import hard_blocks, random_matrix

LINEAR = SfLayout.layout_linear
RECIPES = [
    NVFP44Over6Config(top, mode, fast) for top in (448, 256) for mode in ("mae", "MSE") for fast in (False, True)
]


def block_by_hand(x: np.ndarray, g: np.float32, recipe: NVFP44Over6Config) -> tuple[list[int], int]:
    """Codes and scale byte of one block of float32, one scalar operation after the other."""
    f, amax = np.float32, np.abs(x).max()
    s6 = f(f(amax / f(6)) * g)
    found = []
    for s in (s6, f(s6 * f(1.5))):
        scale = ml_dtypes.float8_e4m3fn(min(s, f(448)))
        o = min(f(1) / f(f(scale) * f(f(1) / g)), np.finfo(f).max)
        codes = [nearest(f(v * o)) for v in x]
        error = f(0)
        for v, code in zip(x, codes, strict=True):
            value = f(E2M1_VALUES[code & 7]) * f(-1 if code > 7 else 1) * f(scale)
            difference = f(value - f(v * g)) if recipe.err_use_fast_math else f(f(value * f(f(1) / g)) - v)
            error = f(error + (f(difference * difference) if recipe.err_mode.name == "MSE" else abs(difference)))
        found.append((error, codes, int(scale.view(np.uint8))))
    return found[int(found[1][0] < found[0][0])][1:]


def nearest(v: np.float32) -> int:
    """The E2M1 code: nearest, ties to even, saturating."""
    distances = [abs(abs(float(v)) - magnitude) for magnitude in E2M1_VALUES]
    least = min(distances)
    code = next(c for c in sorted(range(8), key=lambda c: c % 2) if distances[c] == least)
    return code | 8 * bool(np.signbit(v))


def halves(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(8)).bfloat16()


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_by_hand(recipe: NVFP44Over6Config) -> None:
    a = halves(8, 128)
    g = jitfp4.make_nvfp4_global_scale(a, False, nvfp4_4over6_config=recipe)
    assert g.item() == np.float32(recipe.e4m3_max * 6) / np.float32(a.abs().max().item())
    q, sf = jitfp4.nvfp4_quantize(a, g, LINEAR, nvfp4_4over6=recipe)
    plain = jitfp4.nvfp4_quantize(a, g, LINEAR)
    assert (sf != plain[1]).any() and (sf == plain[1]).any(), "both scales are taken"
    for row in range(8):
        for block in range(8):
            x = a[row, 16 * block : 16 * block + 16].float().numpy()
            codes, scale = block_by_hand(x, np.float32(g.item()), recipe)
            got = q[row, 8 * block : 8 * block + 8]
            assert torch.stack((got & 15, got >> 4), -1).flatten().tolist() == codes
            assert sf[row, block].item() == scale


def test_it_is_the_more_exact_one() -> None:
    a = halves(64, 256)
    g = jitfp4.make_nvfp4_global_scale(a, False)

    def error(q: torch.Tensor, sf: torch.Tensor) -> float:
        return (jitfp4.nvfp4_dequantize(q, sf, 1 / g) - a.float()).square().mean().item()

    better = error(*jitfp4.nvfp4_quantize(a, g, nvfp4_4over6=NVFP44Over6Config(err_mode="MSE")))
    assert better < 0.95 * error(*jitfp4.nvfp4_quantize(a, g))


def test_zeros_and_nan() -> None:
    a = torch.zeros(3, 16, dtype=torch.bfloat16)
    a[1, 3], a[2, 5], a[2, 6] = float("nan"), float("nan"), 2.0
    q, sf = jitfp4.nvfp4_quantize(a, 1.0, LINEAR, nvfp4_4over6=NVFP44Over6Config())
    assert not q[0].any() and not sf[0].any() and not sf[1].any()
    assert q[2, 2] >> 4 == 7 and q[2, 3] & 15 == 7, "NaN is code 7, and takes the scale of amax / 6"


def test_through_every_function() -> None:
    recipe, a, g = NVFP44Over6Config(), halves(2, 40, 96), torch.tensor([3.0])
    wants = [jitfp4.nvfp4_quantize(matrix, g, nvfp4_4over6=recipe) for matrix in a]
    got = jitfp4.fp4_quantize(a[0], g, nvfp4_4over6=recipe)
    assert_same_bytes("fp4_quantize", got[0], wants[0][0])
    assert_same_bytes("fp4_quantize", got[1], wants[0][1])
    got = jitfp4.nvfp4_batched_quantize(a, g, nvfp4_4over6=recipe)
    for batch, want in enumerate(wants):
        assert_same_bytes("codes", got[0][batch], want[0])
        assert_same_bytes("scales", got[1][batch], want[1].flatten())
    mask, scales = torch.tensor([40, 7], dtype=torch.int32), torch.tensor([3.0, 3.0])
    codes, sf = jitfp4.scaled_fp4_grouped_quantize(a, mask, scales, recipe)
    assert_same_bytes("filled", codes[..., 0], wants[0][0])
    assert_same_bytes("filled", codes[:7, :, 1], wants[1][0][:7])
    tiles = sf.permute(5, 2, 4, 0, 1, 3).reshape(2, 128, -1).view(torch.uint8)
    assert_same_bytes("scales", tiles[0], wants[0][1])
    filled, scales_of_7 = (unswizzle(x, SfLayout.layout_128x4, 7, 6) for x in (tiles[1], wants[1][1]))
    assert_same_bytes("scales", filled, scales_of_7)
    gated = torch.cat((a, a.flip(-1)), -1)
    q, sf = jitfp4.silu_and_mul_nvfp4_quantize(gated[0], g, nvfp4_4over6=recipe)
    want = jitfp4.nvfp4_quantize(jitfp4.silu_and_mul(gated[0]), g, nvfp4_4over6=recipe)
    assert torch.equal(q, want[0]) and torch.equal(sf, want[1])
    experts = jitfp4.silu_and_mul_scaled_nvfp4_experts_quantize(gated, mask, scales, recipe)
    assert torch.equal(experts[0][..., 0], want[0])


def test_per_token() -> None:
    """The scale of each row is made for its amax; out_scale multiplies what is returned, and nothing else."""
    recipe, a = NVFP44Over6Config(256), halves(6, 64)
    base = jitfp4.make_nvfp4_global_scale(a, True, nvfp4_4over6_config=recipe)
    q, sf, scales = jitfp4.nvfp4_quantize(a, base, LINEAR, per_token_activation=True, nvfp4_4over6=recipe)
    assert jitfp4.nvfp4_dequantize(q, sf, 1.0, LINEAR).mul(scales.view(-1, 1)).sub(a.float()).abs().max() < 0.5
    twice = jitfp4.nvfp4_quantize(
        a, base, LINEAR, per_token_activation=True, out_scale=torch.tensor([2.0]), nvfp4_4over6=recipe
    )
    assert torch.equal(twice[0], q) and torch.equal(twice[1], sf) and torch.equal(twice[2], scales * 2)


def test_flashinfers_recipe_is_taken() -> None:
    class Mode(IntEnum):
        MAE = 0
        MSE = 1

    theirs = type("NVFP44Over6Config", (SimpleNamespace,), {})(e4m3_max=256, err_mode=Mode.MSE, err_use_fast_math=True)
    a, g = halves(4, 64), 5.0
    want = jitfp4.nvfp4_quantize(a, g, nvfp4_4over6=NVFP44Over6Config(256, "MSE", True))
    got = jitfp4.nvfp4_quantize(a, g, nvfp4_4over6=theirs)  # type: ignore[arg-type]
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    omitted = type("_UnsetType", (), {})()  # what fp4_quantize of FlashInfer passes on
    assert torch.equal(jitfp4.fp4_quantize(a, g, nvfp4_4over6=omitted)[0], jitfp4.nvfp4_quantize(a, g)[0])


def test_bad_recipes_are_named() -> None:
    a = halves(4, 64)
    for arguments in ({"e4m3_max": 400}, {"err_mode": "mean"}):
        with pytest.raises(ArgumentError, match=next(iter(arguments))):
            NVFP44Over6Config(**arguments)  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match="nvfp4_4over6"):
        jitfp4.nvfp4_quantize(a, 1.0, nvfp4_4over6=True)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="nvfp4_4over6"):
        jitfp4.nvfp4_quantize(a.to(torch.float8_e4m3fn), 1.0, nvfp4_4over6=NVFP44Over6Config())
    with pytest.raises(ArgumentError, match="nvfp4_4over6"):
        jitfp4.fp4_quantize(a, 1.0, 32, True, nvfp4_4over6=NVFP44Over6Config())
    with pytest.raises(ArgumentError, match="out_scale"):
        jitfp4.nvfp4_quantize(a, 1.0, out_scale=torch.ones(1))


def test_while_tracing() -> None:
    a, recipe = halves(4, 64), NVFP44Over6Config()
    compiled = torch.compile(jitfp4.nvfp4_quantize, fullgraph=True, backend="aot_eager")
    got, want = (f(a, torch.ones(1), nvfp4_4over6=recipe) for f in (compiled, jitfp4.nvfp4_quantize))
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


# ---- kernels ---------------------------------------------------------------------------------------------------------


def check_matrix(a: torch.Tensor, g: float, recipe: NVFP44Over6Config, layout: SfLayout, device: str) -> None:
    """The kernel on ``device`` writes exactly the reference's bytes into poisoned outputs."""
    out = poisoned((len(a), a.shape[1] // 2), torch.uint8, device)
    out_sf = poisoned(layout.shape(len(a), a.shape[1] // 16), torch.uint8, device)
    given = {"nvfp4_4over6": recipe, "out": out, "out_sf": out_sf}
    jitfp4.nvfp4_quantize(a.to(device), torch.tensor([g]).to(device), layout, **given)
    codes, scales = reference.quantize_4over6(a, recipe, torch.tensor(g))
    assert_same_bytes("codes", out, codes)
    assert_same_bytes("scales", out_sf, swizzle(scales, layout))


def check_tokens(a: torch.Tensor, recipe: NVFP44Over6Config, layout: SfLayout, device: str) -> None:
    base = torch.tensor([1 / (6 * recipe.e4m3_max)])
    q, sf, rows = jitfp4.nvfp4_quantize(
        a.to(device), base.to(device), layout, per_token_activation=True, nvfp4_4over6=recipe
    )
    encode, decode = reference.row_scales(a, base)
    amax = block_amax(a.float()).unsqueeze(1)
    codes, scales = reference.quantize_4over6(a, recipe, encode.unsqueeze(1), amax)
    assert_same_bytes("codes", q, codes)
    assert_same_bytes("scales", sf, swizzle(scales, layout))
    assert_same_bytes("row scales", rows, decode)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_kernels_are_the_reference(recipe: NVFP44Over6Config, device: str) -> None:
    for dtype, layout in product((torch.bfloat16, torch.float16), SfLayout):
        for a in (hard_blocks(dtype).view(-1, 80), random_matrix(9, 80, dtype)):
            check_matrix(a, 3.0, recipe, layout, device)
            check_tokens(a, recipe, layout, device)


@pytest.mark.parametrize("g", [0.0, 1e-38, 1e-30, 1e30, 1e38, torch.inf, torch.nan])
def test_no_global_scale_tells_kernels_and_reference_apart(g: float, device: str) -> None:
    for recipe in RECIPES[:4]:
        check_matrix(hard_blocks(torch.bfloat16), g, recipe, LINEAR, device)


@pytest.mark.sim
@pytest.mark.compile
@pytest.mark.parametrize("tactic", TOKEN_TACTICS, ids=str)
def test_every_kind_of_per_token_kernel_simulated(tactic: TokenTactic) -> None:
    k = tactic.turn * tactic.warps * (2 if tactic.stream else 1) - 16
    with jitfp4.sim.device("sm_90a", races=True), QUANTIZE_PER_TOKEN.forced(tactic):
        check_tokens(random_matrix(3, k, torch.bfloat16), RECIPES[0], SfLayout.layout_128x4, "cpu")


def test_activations_and_batches(device: str) -> None:
    """Of SwiGLU, whose exp may differ, gates at which it does not matter; masked rows, and a scale for each row."""
    recipe, up = RECIPES[6], random_matrix(80, 96, torch.bfloat16).view(2, 40, 96)
    gate = torch.where(torch.arange(96) % 3 == 0, -1000.0, 1000.0).bfloat16().expand_as(up)
    gated, values = torch.cat((gate, up), -1), reference.silu_and_mul(torch.cat((gate, up), -1))
    scales, mask = torch.tensor([0.01, 3.0]), torch.tensor([40, 7], dtype=torch.int32)
    wants = [reference.quantize_4over6(v, recipe, g) for v, g in zip(values, scales, strict=True)]
    q, sf = jitfp4.silu_and_mul_nvfp4_quantize(gated[0].to(device), scales[:1].to(device), nvfp4_4over6=recipe)
    assert_same_bytes("codes", q, wants[0][0])
    assert_same_bytes("scales", sf, swizzle(wants[0][1], SfLayout.layout_128x4))
    given = (x.to(device) for x in (gated, mask, scales))
    q, sf = jitfp4.silu_and_mul_scaled_nvfp4_experts_quantize(*given, recipe)
    tiles = sf.permute(5, 2, 4, 0, 1, 3).reshape(2, 128, -1).view(torch.uint8)
    for b, (rows, (codes, linear)) in enumerate(zip(mask.tolist(), wants, strict=True)):
        assert_same_bytes("codes", q[:rows, :, b], codes[:rows])
        assert_same_bytes("scales", unswizzle(tiles[b], SfLayout.layout_128x4, rows, 6), linear[:rows])
    by_row = torch.linspace(0.1, 3, 40)
    q, sf = jitfp4.nvfp4_batched_quantize(up.to(device), by_row.to(device), nvfp4_4over6=recipe)
    codes, linear = reference.quantize_4over6(up, recipe, by_row.unsqueeze(1))
    assert_same_bytes("codes", q, codes)
    assert_same_bytes("scales", sf, swizzle(linear, SfLayout.layout_128x4).flatten(1))

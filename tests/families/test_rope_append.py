"""Rotation and append in one launch: the bytes of the separate steps, on the CPU, in the simulator and on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import jitfp4
from jitfp4 import (
    ArgumentError,
    ArgumentTypeError,
    gemma_rmsnorm,
    nvfp4_quantize_append_paged_kv_cache_with_slot_mapping,
    rmsnorm,
    rope_append_paged_kv_cache,
)
from tests.support.compare import assert_same_bytes
from tests.support.norm import assert_same_floats
from tests.support.sample import SIM_ARCHS

PAGES, PAGE, KV_HEADS, HEADS, POSITIONS = 4, 8, 2, 6, 32
E4M3 = torch.float8_e4m3fn
KINDS = [
    (torch.bfloat16, 128, 128, True, "nvfp4", True, "HND"),
    (torch.float16, 64, 32, False, "e4m3", False, "NHD"),
    (torch.bfloat16, 256, 64, True, "half", True, "NHD"),
    (torch.float16, 128, 96, False, "nvfp4", True, "NHD"),
    (torch.bfloat16, 64, 64, True, "half", False, "HND"),
    (torch.bfloat16, 256, 256, False, "e4m3", True, "HND"),
    (torch.bfloat16, 80, 64, True, "nvfp4", True, "HND"),
    (torch.float16, 96, 96, True, "nvfp4", True, "NHD"),
    (torch.bfloat16, 112, 32, False, "e4m3", True, "NHD"),
    (torch.bfloat16, 192, 192, False, "half", False, "HND"),
]


def case(
    dtype: torch.dtype, d: int, rotary: int, is_neox: bool, cache: str, norm: bool, layout: str, tokens: int = 5
) -> dict[str, Any]:
    """Arguments: slots in part negative, one position outside, caches full of old bytes."""
    generator = torch.Generator().manual_seed(d + rotary)
    packed = torch.randn(tokens, HEADS + 2 * KV_HEADS, d, generator=generator).to(dtype)
    query, key, value = packed.split((HEADS, KV_HEADS, KV_HEADS), 1)

    def pages(width: int, kind: torch.dtype) -> torch.Tensor:
        shape = (PAGES, KV_HEADS, PAGE, width) if layout == "HND" else (PAGES, PAGE, KV_HEADS, width)
        size = width * kind.itemsize
        old = torch.randint(0, 120, (*shape[:-1], size), generator=generator, dtype=torch.uint8)
        return old.view(kind)

    width, kind = {"nvfp4": (d // 2, torch.uint8), "e4m3": (d, E4M3), "half": (d, dtype)}[cache]
    slots = torch.randperm(PAGES * PAGE, generator=generator)[:tokens].int()
    slots[1:2] = -1
    weights: dict[str, Any] = {}
    if norm:
        weights = {f"{x}_norm_weight": torch.randn(d, generator=generator).to(dtype) for x in "qk"}
        weights["weight_bias"] = float(d == 256)
    return {
        "query": query,
        "key": key,
        "value": value,
        "cos_sin_cache": torch.randn(POSITIONS, rotary, generator=generator),
        "positions": torch.randint(0, POSITIONS, (tokens,), generator=generator),
        "slot_mapping": slots,
        "paged_kv_cache": (pages(width, kind), pages(width, kind)),
        "kv_cache_sf": (pages(d // 16, E4M3), pages(d // 16, E4M3)) if cache == "nvfp4" else None,
        "k_scale": 0.01,
        "v_scale": torch.tensor([0.02]),
        "is_neox": is_neox,
        "kv_layout": layout,
    } | weights


def copied(given: dict[str, Any], device: str) -> dict[str, Any]:
    def move(x: Any) -> Any:
        if isinstance(x, tuple):
            return tuple(move(part) for part in x)
        return x.to(device, copy=True) if isinstance(x, torch.Tensor) else x

    return {name: move(x) for name, x in given.items()}


def rotated(x: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
    """The rotation, element by element, from its definition."""
    rows = given["cos_sin_cache"][given["positions"].long()]
    half, out = rows.shape[1] // 2, x.clone()
    for i in range(half):
        a, b = (i, i + half) if given["is_neox"] else (2 * i, 2 * i + 1)
        cos, sin = rows[:, i, None], rows[:, half + i, None]
        first, second = x[..., a].float(), x[..., b].float()
        out[..., a] = (first * cos - second * sin).to(x.dtype)
        out[..., b] = (second * cos + first * sin).to(x.dtype)
    return out


def separately(given: dict[str, Any]) -> list[torch.Tensor]:
    """Rotated queries, caches and scales by one function after the other."""
    turned = []
    for name in ("query", "key"):
        x, weight = given[name], given.get(f"{name[0]}_norm_weight")
        norm = gemma_rmsnorm if given.get("weight_bias") else rmsnorm
        turned.append(rotated(x if weight is None else norm(x, weight, 1e-6), given))
    cache, slots = given["paged_kv_cache"], given["slot_mapping"]
    scales = given["k_scale"], given["v_scale"]
    if given["kv_cache_sf"] is not None:
        nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(
            turned[1].contiguous(), given["value"], slots, cache, given["kv_cache_sf"], *scales, given["kv_layout"]
        )
        return [turned[0], *cache, *given["kv_cache_sf"]]
    for x, pages, scale in zip((turned[1], given["value"]), cache, scales, strict=True):
        nhd = pages.transpose(1, 2) if given["kv_layout"] == "HND" else pages
        for row, slot in zip(x, slots.tolist(), strict=True):
            if slot >= 0:
                scaled = row if pages.dtype == row.dtype else (row.float() / float(scale)).clamp(-448, 448)
                nhd[slot // PAGE, slot % PAGE] = scaled.to(pages.dtype)
    return [turned[0], *cache]


def together(given: dict[str, Any]) -> list[torch.Tensor]:
    query = rope_append_paged_kv_cache(**given)
    return [query, *given["paged_kv_cache"], *(given["kv_cache_sf"] or ())]


def check(kind: tuple[Any, ...], device: str = "cpu", tokens: int = 5) -> None:
    given = case(*kind, tokens=tokens)
    want, got = separately(copied(given, "cpu")), together(copied(given, device))
    for number, (a, b) in enumerate(zip(got, want, strict=True)):
        assert_same_bytes(f"result {number}", a.cpu().contiguous(), b.contiguous())


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_reference_is_the_steps_one_by_one(kind: tuple[Any, ...]) -> None:
    check(kind)


@pytest.mark.sim
@pytest.mark.compile
@pytest.mark.parametrize("arch", SIM_ARCHS)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_simulated_kernel(kind: tuple[Any, ...], arch: str) -> None:
    with jitfp4.sim.device(arch, races=True):
        given = case(*kind)
        want = copied(given, "cpu")
        got = together(given)
    for number, (a, b) in enumerate(zip(got, separately(want), strict=True)):
        assert_same_bytes(f"result {number}", a.contiguous(), b.contiguous())


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_kernel_on_a_gpu(kind: tuple[Any, ...]) -> None:
    for tokens in (1, 5, 5, 31):  # an equal call is repeated from memory
        check(kind, "cuda", tokens)


@pytest.mark.parametrize("simulated", [False, pytest.param(True, marks=[pytest.mark.sim, pytest.mark.compile])])
def test_a_position_outside_gives_nan_and_nothing_else_changes(simulated: bool) -> None:
    given = case(*KINDS[2])
    given["positions"][3] = POSITIONS
    want = separately(copied({**given, "positions": given["positions"].clamp(max=POSITIONS - 1)}, "cpu"))[0]
    want[3, :, :64] = torch.nan
    if simulated:
        with jitfp4.sim.device("sm_90a", races=True):
            got = together(given)[0]
    else:
        got = together(given)[0]
    assert_same_floats("queries", got, want)


BAD: list[tuple[str, dict[str, Any]]] = [
    ("query", {"query": torch.zeros(5, 6, 72, dtype=torch.bfloat16)}),
    ("key", {"key": torch.zeros(4, 2, 128, dtype=torch.bfloat16)}),
    ("value", {"value": torch.zeros(5, 2, 128, dtype=torch.float16)}),
    ("positions", {"positions": torch.zeros(4, dtype=torch.int64)}),
    ("slot_mapping", {"slot_mapping": torch.zeros(5)}),
    ("cos_sin_cache", {"cos_sin_cache": torch.zeros(32, 48)}),
    ("cos_sin_cache", {"cos_sin_cache": torch.zeros(32, 160)}),
    ("kv_layout", {"kv_layout": "HDN"}),
    ("paged_kv_cache", {"kv_cache_sf": None}),
    ("k_scale", {"k_scale": 0.0}),
    ("v_scale", {"v_scale": torch.ones(2)}),
    ("q_norm_weight", {"k_norm_weight": None}),
    ("q_norm_weight", {"q_norm_weight": torch.ones(64, dtype=torch.bfloat16)}),
    ("eps", {"eps": -1.0}),
    ("query_out", {"query_out": torch.zeros(5, 6, 64, dtype=torch.bfloat16)}),
]


@pytest.mark.parametrize(("name", "wrong"), BAD, ids=str)
def test_bad_input(name: str, wrong: dict[str, Any]) -> None:
    given = case(*KINDS[0])
    kept = copied(given, "cpu")
    with pytest.raises((ArgumentError, ArgumentTypeError), match=f"^{name}"):
        rope_append_paged_kv_cache(**given | wrong)
    for a, b in zip(given["paged_kv_cache"], kept["paged_kv_cache"], strict=True):
        assert torch.equal(a, b)


def test_a_slot_beyond_the_cache_is_an_error_on_the_cpu() -> None:
    given = case(*KINDS[0])
    given["slot_mapping"][0] = PAGES * PAGE
    with pytest.raises(ArgumentError, match=r"^slot_mapping"):
        rope_append_paged_kv_cache(**given)

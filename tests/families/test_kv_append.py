"""Tokens appended to a paged NVFP4 cache: every arrangement of memory, skips, and checks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from jitfp4 import (
    ArgumentError,
    ArgumentTypeError,
    nvfp4_quantize_append_paged_kv_cache,
    nvfp4_quantize_append_paged_kv_cache_with_slot_mapping,
    sim,
)
from jitfp4.families.kv.kernels.quantize import TACTICS as QUANTIZE_TACTICS
from jitfp4.families.kv.operation import quantize
from jitfp4.reference import kv as reference
from tests.support.compare import assert_same_bytes
from tests.support.inputs import random_matrix
from tests.support.kv import ARRANGEMENTS, PagedCache, interleave_by_hand, paged_cache

append_by_slot = nvfp4_quantize_append_paged_kv_cache_with_slot_mapping
append_by_position = nvfp4_quantize_append_paged_kv_cache

SCALES = (0.013, 0.4)
LAYOUTS = ["NHD", "HND"]
I32, I64 = torch.int32, torch.int64


def tokens(n: int, heads: int, d: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return random_matrix(n * heads, d, dtype, seed).view(n, heads, d)


def write_by_hand(
    cache: PagedCache,
    k: torch.Tensor,
    v: torch.Tensor,
    slots: list[int],
    *,
    interleaved: bool = False,
    scales: tuple[float, float] = SCALES,
) -> None:
    """Token by token into a cache on the CPU; slots outside of it are left out."""
    for side, (x, scale, (codes, sf)) in enumerate(zip((k, v), scales, cache.sides(), strict=True)):
        pages, page_size = codes.shape[:2]
        new_codes, new_sf = reference.quantize(x, torch.tensor(scale))
        linear = torch.zeros(sf.shape, dtype=torch.uint8)
        written = torch.zeros(sf.shape, dtype=torch.uint8)
        for i, slot in enumerate(slots):
            if 0 <= slot < pages * page_size:
                page, token = divmod(slot, page_size)
                codes[page, token], linear[page, token], written[page, token] = new_codes[i], new_sf[i], 1
        if side == 1 and interleaved:
            linear, written = interleave_by_hand(linear), interleave_by_hand(written)
        sf[written.bool()] = linear[written.bool()]


def assert_same_memory(got: PagedCache, want: PagedCache) -> None:
    for a, b in zip(got.memory, want.memory, strict=True):
        assert_same_bytes("memory", a, b)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_slots(layout: str, arrangement: str, device: str) -> None:
    """Pages of 8, 5 (whose parts begin at odd addresses) and 1, in every arrangement; two rows more than slots; nothing
    else changes.
    """
    for page_size, heads, d, index_dtype in ((8, 2, 64, torch.int64), (5, 3, 48, torch.int32), (1, 1, 64, torch.int64)):
        k, v = tokens(9, heads, d), tokens(9, heads, d, 1)
        slots = [2, -1, 0, 12 * page_size - 1, page_size + 3, -7, 5 * page_size + 1]
        cache, want = (paged_cache(12, page_size, heads, (d, d), layout, arrangement, x) for x in (device, "cpu"))
        slot_mapping = torch.tensor(slots, dtype=index_dtype, device=device)
        append_by_slot(k.to(device), v.to(device), slot_mapping, cache.codes, cache.sf, *SCALES, layout)
        write_by_hand(want, k, v, slots)
        assert_same_memory(cache, want)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_interleaved_scales_of_v(layout: str, device: str) -> None:
    k, v = tokens(6, 2, 128), tokens(6, 2, 128, 1)
    slots = [0, 1, 6, 11, 15, 12]
    for arrangement in ARRANGEMENTS:
        cache, want = (paged_cache(2, 8, 2, (128, 128), layout, arrangement, x) for x in (device, "cpu"))
        lists = torch.tensor(slots, device=device)
        append_by_slot(
            k.to(device), v.to(device), lists, cache.codes, cache.sf, *SCALES, layout, v_sf_layout="interleaved4"
        )
        write_by_hand(want, k, v, slots, interleaved=True)
        assert_same_memory(cache, want)


@pytest.mark.parametrize("interleaved", [False, True])
def test_head_dims_may_differ(interleaved: bool, device: str) -> None:
    k, v = tokens(5, 2, 96), tokens(5, 2, 64, 1)
    slots = [7, 2, 0, 1, 5]
    for arrangement in ("pair", "one page"):
        cache, want = (paged_cache(2, 4, 2, (96, 64), "HND", arrangement, x) for x in (device, "cpu"))
        order = "interleaved4" if interleaved else "linear"
        lists = torch.tensor(slots, device=device)
        append_by_slot(k.to(device), v.to(device), lists, cache.codes, cache.sf, *SCALES, "HND", v_sf_layout=order)
        write_by_hand(want, k, v, slots, interleaved=interleaved)
        assert_same_memory(cache, want)


def test_views_of_a_packed_projection(device: str) -> None:
    packed = random_matrix(7, 2 * 3 * 64 + 32, torch.float16)
    k, v = (packed[:, i * 192 : (i + 1) * 192].unflatten(1, (3, 64)) for i in range(2))
    on_device = packed.to(device)
    views = [on_device[:, i * 192 : (i + 1) * 192].unflatten(1, (3, 64)) for i in range(2)]
    cache, want = (paged_cache(3, 4, 3, (64, 64), "NHD", "stacked", x) for x in (device, "cpu"))
    append_by_slot(*views, torch.arange(7, device=device), cache.codes, cache.sf, *SCALES)
    write_by_hand(want, k, v, list(range(7)))
    assert_same_memory(cache, want)


@pytest.mark.parametrize("dtypes", [(I32, I64, I64, I32, I64), (I64, I32, I32, I64, I32)], ids=str)
def test_positions(dtypes: tuple[torch.dtype, ...], device: str) -> None:
    """Three requests, one of them without pages; a request, a position and a page that are negative."""
    k, v = tokens(8, 2, 64), tokens(8, 2, 64, 1)
    request, position = [0, 0, 2, 2, 2, -1, 0, 2], [3, 4, 0, 5, 9, 0, -1, 11]
    indices, indptr, last = [5, 1, 3, 0, -1], [0, 2, 2, 5], [1, 0, 4]
    slots = [5 * 4 + 3, 4, 3 * 4, 1, -1, -1, -1, -1]
    cache, want = (paged_cache(6, 4, 2, (64, 64), "NHD", "pair", x) for x in (device, "cpu"))
    lists = [
        torch.tensor(values, dtype=dtype, device=device)
        for values, dtype in zip((request, position, indices, indptr, last), dtypes, strict=True)
    ]
    append_by_position(k.to(device), v.to(device), *lists[:2], cache.codes, cache.sf, *lists[2:], *SCALES)
    write_by_hand(want, k, v, slots)
    assert_same_memory(cache, want)


def near_ties(n: int, heads: int, d: int, seed: int) -> torch.Tensor:
    """Values at a tie of two codes that rounds down, and one bit above it, in every order; and in each block a 6, which
    makes its scale a power of two.
    """
    generator = torch.Generator().manual_seed(seed)
    ties = torch.tensor([0.25, 1.25, 2.5, 5.0]).bfloat16().view(torch.int16)
    shape = n * heads * d // 16, 16
    bits = ties[torch.randint(4, shape, generator=generator)] + torch.randint(2, shape, generator=generator).short()
    x = bits.view(torch.bfloat16)
    x[torch.arange(shape[0]), torch.arange(shape[0]) % 16] = 6.0
    return x.view(n, heads, d)


def test_ties(device: str) -> None:
    """Every bit of an element counts, and none of its neighbour's."""
    k, v = (near_ties(8, 2, 64, seed) for seed in (0, 1))
    slots, scales = list(range(8)), (0.5, 2.0)
    want = paged_cache(2, 4, 2, (64, 64), "NHD", "pair", "cpu")
    write_by_hand(want, k, v, slots, scales=scales)
    lists = [torch.tensor(x, device=device) for x in (slots, [0] * 8, slots, [0, 1], [0, 2], [4])]
    cache = paged_cache(2, 4, 2, (64, 64), "NHD", "pair", device)
    append_by_slot(k.to(device), v.to(device), lists[0], cache.codes, cache.sf, *scales)
    assert_same_memory(cache, want)
    cache = paged_cache(2, 4, 2, (64, 64), "NHD", "pair", device)
    append_by_position(k.to(device), v.to(device), *lists[1:3], cache.codes, cache.sf, *lists[3:], *scales)
    assert_same_memory(cache, want)


WILD_SLOTS = [3, 32, 2**31 - 1, -(2**31), 5]
WILD_POSITIONS: dict[str, tuple[list[int], list[int], list[int], list[int], list[int]]] = {
    # requests, positions, pages, bounds; and the slots that are written
    "request": ([0, 2, 2**31 - 1], [0, 0, 0], [1, 2], [0, 1, 2], [4]),
    "position": ([0, 0, 1], [0, 4, 2**31 - 1], [1, 2], [0, 1, 2], [4]),
    "page": ([0, 0, 1], [0, 4, 1], [1, 8, 2**31 - 1], [0, 2, 3], [4]),
    "bounds": ([0, 1, 2], [0, 1, 0], [1, 2], [0, 1, 99, -5], [4]),
}


@pytest.mark.sim
@pytest.mark.compile
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_indices_outside_are_skipped_in_the_simulator(arch: str) -> None:
    with sim.device(arch, races=True):
        check_wild("cpu")


@pytest.mark.gpu
def test_indices_outside_are_skipped_on_gpu() -> None:
    check_wild("cuda")


def check_wild(device: str) -> None:
    """Kernels read indices as data: what points outside changes nothing, not even after truncation to 32 bits."""
    k, v = tokens(5, 2, 64), tokens(5, 2, 64, 1)
    for slots, dtype in ((WILD_SLOTS, torch.int32), ([3, 32, 2**32 + 1, -(2**63), 5], torch.int64)):
        cache, want = (paged_cache(8, 4, 2, (64, 64), "NHD", "pair", x) for x in (device, "cpu"))
        lists = torch.tensor(slots, dtype=dtype, device=device)
        append_by_slot(k.to(device), v.to(device), lists, cache.codes, cache.sf, *SCALES)
        write_by_hand(want, k, v, slots)
        assert_same_memory(cache, want)
    for request, position, indices, indptr, slots in WILD_POSITIONS.values():
        cache, want = (paged_cache(8, 4, 2, (64, 64), "NHD", "pair", x) for x in (device, "cpu"))
        lists = [torch.tensor(x, device=device) for x in (request, position, indices, indptr, [4] * (len(indptr) - 1))]
        append_by_position(k[:3].to(device), v[:3].to(device), *lists[:2], cache.codes, cache.sf, *lists[2:], *SCALES)
        write_by_hand(want, k, v, slots)
        assert_same_memory(cache, want)


def test_the_cpu_raises_before_it_writes() -> None:
    k, v = tokens(5, 2, 64), tokens(5, 2, 64, 1)
    cache, want = (paged_cache(8, 4, 2, (64, 64), "NHD", "pair", "cpu") for _ in range(2))
    with pytest.raises(ArgumentError, match="slot_mapping"):
        append_by_slot(k, v, torch.tensor(WILD_SLOTS), cache.codes, cache.sf, *SCALES)
    names = {"request": "batch_indices", "position": "positions", "page": "kv_indices", "bounds": "kv_indptr"}
    for case, (request, position, indices, indptr, _) in WILD_POSITIONS.items():
        lists = [torch.tensor(x) for x in (request, position, indices, indptr, [4] * (len(indptr) - 1))]
        with pytest.raises(ArgumentError, match=names[case]):
            append_by_position(k[:3], v[:3], *lists[:2], cache.codes, cache.sf, *lists[2:], *SCALES)
    assert_same_memory(cache, want)


@pytest.mark.parametrize("tactic", QUANTIZE_TACTICS, ids=str)
def test_every_tactic(tactic: object, device: str) -> None:
    k, v = tokens(11, 3, 80), tokens(11, 3, 80, 1)
    slots = torch.randperm(12, generator=torch.Generator().manual_seed(2))[:11]
    cache, want = (paged_cache(3, 4, 3, (80, 80), "HND", "pair", x) for x in (device, "cpu"))
    with quantize.forced(tactic):
        append_by_slot(k.to(device), v.to(device), slots.to(device), cache.codes, cache.sf, *SCALES, "HND")
    write_by_hand(want, k, v, slots.tolist())
    assert_same_memory(cache, want)
    cache = paged_cache(3, 4, 3, (80, 80), "HND", "pair", device)
    lists = [torch.tensor(x, device=device) for x in ([0] * 11, slots.tolist(), [0, 1, 2], [0, 3], [4])]
    with quantize.forced(tactic):
        append_by_position(
            k.to(device), v.to(device), *lists[:2], cache.codes, cache.sf, *lists[2:], *SCALES, kv_layout="HND"
        )
    assert_same_memory(cache, want)


@pytest.mark.gpu
def test_repeated_calls_see_what_changed() -> None:
    scales = [torch.tensor([s], device="cuda") for s in SCALES]
    for seed in range(3):
        k, v = tokens(4, 2, 64, seed), tokens(4, 2, 64, seed + 9)
        slots = torch.randperm(12, generator=torch.Generator().manual_seed(seed))[:4]
        cache, want = (paged_cache(3, 4, 2, (64, 64), "NHD", "stacked", x) for x in ("cuda", "cpu"))
        append_by_slot(k.cuda(), v.cuda(), slots.cuda(), cache.codes, cache.sf, *scales)
        write_by_hand(want, k, v, slots.tolist())
        assert_same_memory(cache, want)
    scales[1].fill_(torch.nan)
    with pytest.raises(ArgumentError, match="v_scale"):
        append_by_slot(k.cuda(), v.cuda(), slots.cuda(), cache.codes, cache.sf, *scales)


def test_no_tokens_change_nothing(device: str) -> None:
    cache, want = (paged_cache(2, 4, 2, (64, 64), "NHD", "pair", x) for x in (device, "cpu"))
    none = torch.zeros(0, dtype=torch.int64, device=device)
    x = tokens(3, 2, 64).to(device)
    append_by_slot(x, x, none, cache.codes, cache.sf, *SCALES)
    append_by_position(x[:0], x[:0], none, none, cache.codes, cache.sf, none, none.new_zeros(1), none, *SCALES)
    assert_same_memory(cache, want)


# ---- scales ----------------------------------------------------------------------------------------------------------


def good(**changes: Any) -> dict[str, Any]:
    """Arguments of append_by_slot(), some of them replaced."""
    cache = paged_cache(2, 4, 2, (64, 64), "NHD", "pair", "cpu")
    x = tokens(3, 2, 64)
    named = {"append_key": x, "append_value": x, "slot_mapping": torch.arange(3), "k_scale": 1.0, "v_scale": 1.0}
    return named | {"paged_kv_cache": cache.codes, "kv_cache_sf": cache.sf} | changes


@pytest.mark.parametrize("value", [0.0, -1.0, torch.nan, torch.inf])
@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_scales_are_positive_and_finite(name: str, value: float) -> None:
    for scale in (value, torch.tensor(value), torch.tensor([value])):
        with pytest.raises(ValueError, match=name):
            append_by_slot(**good(**{name: scale}))


def test_a_scale_that_was_changed_is_checked_again() -> None:
    scale = torch.tensor([0.5])
    append_by_slot(**good(k_scale=scale))
    append_by_slot(**good(k_scale=scale, v_scale=scale))
    scale.fill_(-1.0)
    with pytest.raises(ArgumentError, match="k_scale"):
        append_by_slot(**good(k_scale=scale))


@pytest.mark.gpu
@pytest.mark.parametrize(("numbers", "before"), [(False, 1), (True, 1), (True, 3)])
def test_graphs_take_numbers_and_scales_on_the_device(numbers: bool, before: int) -> None:
    k, v = tokens(3, 2, 64).cuda(), tokens(3, 2, 64, 1).cuda()
    scales = [torch.tensor([s], device="cuda") for s in SCALES]
    given = SCALES if numbers else scales
    slots = torch.tensor([1, 5, -1], device="cuda")
    cache, want = (paged_cache(2, 4, 2, (64, 64), "NHD", "stacked", x) for x in ("cuda", "cpu"))
    for _ in range(before):  # the first compiles
        append_by_slot(k, v, torch.full_like(slots, -1), cache.codes, cache.sf, *given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(ArgumentError, match="k_scale"):
            append_by_slot(k, v, slots, cache.codes, cache.sf, torch.tensor([0.5]), scales[1])
        append_by_slot(k, v, slots, cache.codes, cache.sf, *given)
    slots.copy_(torch.tensor([0, 7, 2]))
    graph.replay()
    write_by_hand(want, k.cpu(), v.cpu(), [0, 7, 2])
    assert_same_memory(cache, want)


# ---- arguments -------------------------------------------------------------------------------------------------------

X = torch.zeros(3, 2, 64, dtype=torch.bfloat16)
CODES, SF = torch.zeros(2, 4, 2, 32, dtype=torch.uint8), torch.zeros(2, 4, 2, 4).to(torch.float8_e4m3fn)
WIDE, ONE = torch.zeros(2, 4, 2, 64, dtype=torch.uint8), CODES[:, :1]


def good_cache(codes: object, sf: object) -> dict[str, Any]:
    return good(paged_kv_cache=codes, kv_cache_sf=sf)


BAD_CALLS: dict[str, tuple[type[ArgumentError], str, Callable[[], dict[str, Any]]]] = {
    "key dtype": (ArgumentTypeError, "append_key", lambda: good(append_key=X.float())),
    "key rank": (ArgumentError, "append_key", lambda: good(append_key=X[0])),
    "key heads": (ArgumentError, "append_key", lambda: good(append_key=X[:, :1])),
    "key tokens": (ArgumentError, "append_key", lambda: good(append_key=X[:2])),
    "key stride": (ArgumentError, "append_key", lambda: good(append_key=torch.zeros(3, 2, 72).bfloat16()[..., 4:68])),
    "value dtype": (ArgumentTypeError, "append_value", lambda: good(append_value=X.half())),
    "value tokens": (ArgumentError, "append_value", lambda: good(append_value=X[:2])),
    "value d": (ArgumentError, "append_value", lambda: good(append_value=X[..., :32])),
    "slots dtype": (ArgumentTypeError, "slot_mapping", lambda: good(slot_mapping=torch.arange(3).float())),
    "slots rank": (ArgumentError, "slot_mapping", lambda: good(slot_mapping=torch.zeros(1, 3, dtype=torch.int32))),
    "slots strides": (ArgumentError, "slot_mapping", lambda: good(slot_mapping=torch.arange(6)[::2])),
    "slots device": (ArgumentTypeError, "slot_mapping", lambda: good(slot_mapping=torch.arange(3, device="meta"))),
    "slots type": (ArgumentTypeError, "slot_mapping", lambda: good(slot_mapping=[0, 1, 2])),
    "value type": (ArgumentTypeError, "append_value", lambda: good(append_value=None)),
    "cache of one": (ArgumentTypeError, "paged_kv_cache", lambda: good(paged_kv_cache=(CODES, None))),
    "cache type": (ArgumentTypeError, "paged_kv_cache", lambda: good(paged_kv_cache=[CODES])),
    "cache dtype": (ArgumentTypeError, "paged_kv_cache", lambda: good(paged_kv_cache=(CODES.int(), CODES))),
    "cache rank": (ArgumentError, "paged_kv_cache", lambda: good(paged_kv_cache=CODES)),
    "cache shapes": (ArgumentError, "paged_kv_cache", lambda: good_cache((CODES, CODES[:1]), (SF, SF[:1]))),
    "cache strides": (ArgumentError, "paged_kv_cache", lambda: good_cache((CODES, WIDE[..., ::2]), (SF, SF.clone()))),
    "one slot": (ArgumentError, "paged_kv_cache", lambda: good_cache((CODES, ONE.expand_as(CODES)), (SF, SF.clone()))),
    "no scales": (ArgumentTypeError, "kv_cache_sf", lambda: good(kv_cache_sf=None)),
    "scale bytes": (ArgumentTypeError, "kv_cache_sf", lambda: good(kv_cache_sf=(SF.view(torch.uint8), SF))),
    "scale shape": (ArgumentError, "kv_cache_sf", lambda: good(kv_cache_sf=(SF, SF[..., :2]))),
    "scale device": (ArgumentTypeError, "kv_cache_sf", lambda: good(kv_cache_sf=(SF, SF.to("meta")))),
    "layout": (ArgumentError, "kv_layout", lambda: good(kv_layout="HDN")),
    "layout of another order": (ArgumentError, "append_key", lambda: good(kv_layout="HND")),
    "V order": (ArgumentError, "v_sf_layout", lambda: good(v_sf_layout="swizzled")),
    "k_scale bool": (ArgumentTypeError, "k_scale", lambda: good(k_scale=True)),
    "flag": (ArgumentTypeError, "enable_pdl", lambda: good(enable_pdl=1)),
    "k_scale type": (ArgumentTypeError, "k_scale", lambda: good(k_scale="1")),
    "k_scale dtype": (ArgumentTypeError, "k_scale", lambda: good(k_scale=torch.ones(1, dtype=torch.float64))),
    "v_scale size": (ArgumentError, "v_scale", lambda: good(v_scale=torch.ones(2))),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_CALLS)
def test_bad_arguments_are_named(case: str) -> None:
    error, name, arguments = BAD_CALLS[case]
    with pytest.raises(error) as caught:
        append_by_slot(**arguments())
    assert caught.value.name == name


def test_bad_lists_are_named() -> None:
    cache = paged_cache(2, 4, 2, (64, 64), "NHD", "pair", "cpu")
    n = torch.zeros(3, dtype=torch.int32)
    lists = {"batch_indices": n, "positions": n, "kv_indices": n[:1], "kv_indptr": n[:2], "kv_last_page_len": n[:1]}
    for name, bad in (
        ("batch_indices", n.float()),
        ("append_key", n[:2]),  # as batch_indices and positions
        ("positions", n[:2]),
        ("kv_indices", n[None]),
        ("kv_indptr", n.bool()),
        ("kv_last_page_len", n),
    ):
        changed = {"batch_indices": bad, "positions": bad} if name == "append_key" else {name: bad}
        with pytest.raises(ArgumentError) as caught:
            append_by_position(
                X, X, paged_kv_cache=cache.codes, kv_cache_sf=cache.sf, k_scale=1, v_scale=1, **lists | changed
            )
        assert caught.value.name == name


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torch_compile_traces_the_whole_function() -> None:
    k, v, slots = tokens(3, 2, 64), tokens(3, 2, 64, 1), torch.tensor([1, 5, 2])
    cache, want = (paged_cache(2, 4, 2, (64, 64), "NHD", "stacked", "cpu") for _ in range(2))

    def model(k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor, codes: torch.Tensor, sf: torch.Tensor) -> None:
        append_by_slot(k * 1, v * 1, slots, codes, sf, *SCALES)

    torch.compile(model, fullgraph=True, backend="aot_eager")(k, v, slots, cache.codes, cache.sf)
    write_by_hand(want, k, v, [1, 5, 2])
    assert_same_memory(cache, want)

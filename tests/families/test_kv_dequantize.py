"""NVFP4 caches back to floats: flat and paged, on CPU, simulator and GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from jitfp4 import (
    ArgumentError,
    ArgumentTypeError,
    nvfp4_kv_dequantize,
    nvfp4_kv_dequantize_paged,
    nvfp4_kv_quantize,
    sim,
)
from jitfp4.arch import Arch
from jitfp4.families.kv.kernels.dequantize import TACTICS as DEQUANTIZE_TACTICS
from jitfp4.families.kv.kernels.dequantize import DequantizeTactic
from jitfp4.families.kv.kernels.dequantize import rejects as dequantize_rejects
from jitfp4.families.kv.operation import dequantize
from jitfp4.families.kv.problem import DequantizeProblem
from jitfp4.families.kv.tables import dequantize_problems
from jitfp4.formats import E2M1_VALUES, DType
from tests.support.compare import assert_same_bytes, poisoned
from tests.support.inputs import random_matrix
from tests.support.kv import ARRANGEMENTS, PagedCache, interleave_by_hand, paged_cache

DTYPES = [torch.bfloat16, torch.float16]
SCALES = (0.37, 2.0)


def every_code_and_scale(m: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and finite scale bytes, each met often."""
    generator = torch.Generator().manual_seed(m + k)
    return (
        torch.randint(0, 256, (m, k // 2), generator=generator, dtype=torch.uint8),
        torch.arange(m * k // 16).remainder(127).to(torch.uint8).view(m, k // 16),
    )


def decode_by_hand(codes: torch.Tensor, sf: torch.Tensor, scale: float) -> torch.Tensor:
    """[..., k/2] codes and [..., k/16] bytes by table, in float32."""
    values = torch.tensor([*E2M1_VALUES, *(-v for v in E2M1_VALUES)])
    x = values[torch.stack((codes & 15, codes >> 4), -1).flatten(-2).long()]
    block = sf.view(torch.float8_e4m3fn).float() * torch.tensor(scale)
    return (x.unflatten(-1, (-1, 16)) * block.unsqueeze(-1)).flatten(-2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_flat(dtype: torch.dtype, device: str) -> None:
    for m, k in ((1, 16), (7, 48), (33, 128), (3, 4112)):
        codes, sf = every_code_and_scale(m, k)
        for scale in (1.0, 0.37, 1e-30):
            want = decode_by_hand(codes, sf, scale).to(dtype)
            gd = torch.tensor([scale], device=device)
            assert_same_bytes("values", nvfp4_kv_dequantize(codes.to(device), sf.to(device), gd, dtype), want)
    typed, rows = sf.view(torch.float8_e4m3fn).to(device), torch.cat([codes, codes], 1).to(device)[:, : codes.shape[1]]
    assert_same_bytes("strided", nvfp4_kv_dequantize(rows, typed, 1e-30, dtype), want)
    odd = torch.cat([codes, codes[:, :1]], 1).to(device)[:, : codes.shape[1]]
    assert_same_bytes("rows of odd strides", nvfp4_kv_dequantize(odd, typed, 1e-30, dtype), want)


def test_round_trip_error_is_half_a_step(device: str) -> None:
    x = random_matrix(40, 128, torch.bfloat16)
    gd = (x.float().abs().amax() / 2688).reshape(1)
    back = nvfp4_kv_dequantize(*nvfp4_kv_quantize(x.to(device), gd.to(device)), gd.to(device)).cpu().float()
    step = x.float().unflatten(1, (-1, 16)).abs().amax(-1, keepdim=True) / 6 * 1.08 + 6 * 2**-9 * gd
    assert ((back - x.float()).unflatten(1, (-1, 16)).abs() <= step).all()


def filled(pages: int, page_size: int, dims: tuple[int, int], layout: str, arrangement: str) -> PagedCache:
    cache = paged_cache(pages, page_size, 3, dims, layout, arrangement, "cpu")
    generator = torch.Generator().manual_seed(pages + page_size)
    for codes, sf in cache.sides():
        codes.copy_(torch.randint(0, 256, codes.shape, generator=generator, dtype=torch.uint8))
        sf.copy_(torch.randint(0, 127, sf.shape, generator=generator, dtype=torch.uint8))
    return cache


def moved(cache: PagedCache, device: str) -> PagedCache:
    """The same arrangement of memory on ``device``."""
    fresh = paged_cache_like(cache, device)
    for a, b in zip(fresh.memory, cache.memory, strict=True):
        a.copy_(b)
    return fresh


def paged_cache_like(cache: PagedCache, device: str) -> PagedCache:
    (k, _), (v, _) = cache.sides()
    arrangement = (
        "stacked" if isinstance(cache.codes, torch.Tensor) else "one page" if len(cache.memory) == 1 else "pair"
    )
    return paged_cache(*k.shape[:3], (2 * k.shape[3], 2 * v.shape[3]), cache.layout, arrangement, device)


def check_paged(
    cache: PagedCache,
    table: torch.Tensor,
    lens: torch.Tensor,
    max_seq: int,
    dtype: torch.dtype,
    device: str,
    order: str = "linear",
) -> None:
    """Every value is right, and every position without one keeps what it held."""
    on_device = moved(cache, device)
    outs, wants = [], []
    for side, ((codes, sf), scale) in enumerate(zip(cache.sides(), SCALES, strict=True)):
        pages, page_size, heads, width = codes.shape
        shape = (len(lens), max_seq, heads, 2 * width)
        outs.append(poisoned(shape, dtype, device))
        want = poisoned(shape, dtype, "cpu")
        linear = sf
        if side == 1 and order == "interleaved4":
            place = interleave_by_hand(torch.arange(sf[0, :, 0].numel()).view(1, page_size, 1, -1).to(torch.uint8))
            linear = torch.empty_like(sf)
            linear.permute(0, 2, 1, 3).flatten(2)[..., place.flatten().long()] = sf.permute(0, 2, 1, 3).flatten(2)
            flat = torch.empty(pages, heads, page_size * sf.shape[3], dtype=torch.uint8)
            flat[..., place.flatten().long()] = sf.permute(0, 2, 1, 3).flatten(2)
            linear = flat.view(pages, heads, page_size, -1).transpose(1, 2)
        values = decode_by_hand(codes, linear, scale).to(dtype)
        for b, length in enumerate(lens.tolist()):
            for t in range(min(length, max_seq)):
                page = int(table[b, t // page_size])
                if 0 <= page < pages:
                    want[b, t] = values[page, t % page_size]
        wants.append(want)
    gds = [torch.tensor([s], device=device) for s in SCALES]
    lists = table.to(device), lens.to(device)
    nvfp4_kv_dequantize_paged(on_device.codes, on_device.sf, *lists, *gds, *outs, cache.layout, v_sf_layout=order)
    for name, out, want in zip(("K", "V"), outs, wants, strict=True):
        assert_same_bytes(name, out, want)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_paged(layout: str, arrangement: str, dtype: torch.dtype, device: str) -> None:
    for page_size, d, index_dtype in ((4, 64, torch.int32), (6, 48, torch.int64), (1, 48, torch.int32)):
        table = torch.tensor([[5, 0, 3], [2, -1, 1], [4, 4, 4], [1, 2, 0]], dtype=index_dtype)
        lens = torch.tensor([2 * page_size + 1, 3 * page_size, 0, 99], dtype=torch.int32)
        check_paged(filled(6, page_size, (d, d), layout, arrangement), table, lens, 3 * page_size, dtype, device)


@pytest.mark.parametrize("dims", [(64, 64), (64, 128)], ids=str)
def test_interleaved_scales_of_v(dims: tuple[int, int], device: str) -> None:
    cache = filled(4, 8, dims, "HND", "one page")
    table = torch.arange(4).view(2, 2)
    check_paged(cache, table, torch.tensor([16, 11]), 16, torch.bfloat16, device, "interleaved4")


def test_more_chunks_than_a_cta_has_threads(device: str) -> None:
    with dequantize.forced(DequantizeTactic(1, 64)):
        cache = filled(3, 4, (256, 256), "HND", "pair")
        check_paged(cache, torch.tensor([[2, 0]]), torch.tensor([7]), 8, torch.bfloat16, device)


def test_rows_of_a_wider_table_and_nothing_to_do(device: str) -> None:
    cache = filled(4, 4, (32, 32), "NHD", "pair")
    wide = torch.tensor([[0, 1, 7, 7], [3, 2, 7, 7]])
    check_paged(cache, wide[:, :2], torch.tensor([8, 5]), 8, torch.float16, device)
    check_paged(cache, wide, torch.tensor([-3, 0]), 8, torch.float16, device)
    check_paged(cache, wide[:0], torch.tensor([], dtype=torch.int32), 8, torch.float16, device)


@pytest.mark.parametrize("tactic", DEQUANTIZE_TACTICS, ids=str)
def test_every_tactic(tactic: object, device: str) -> None:
    cache = filled(3, 8, (80, 80), "HND", "pair")
    with dequantize.forced(tactic):
        check_paged(cache, torch.tensor([[2, 0, 1]]), torch.tensor([21]), 24, torch.bfloat16, device)


def test_a_tactic_that_cannot_run_a_problem_says_why() -> None:
    arch = Arch.of("sm_90a")
    pages_of_6, rows = (DequantizeProblem(DType.BF16, page, 1, 12, chunks=8, sides=1) for page in (6, 0))
    assert dequantize_rejects(pages_of_6, DequantizeTactic(2, 128), arch) is None
    assert "two pages of 6" in str(dequantize_rejects(pages_of_6, DequantizeTactic(4, 128), arch))
    assert "no pages" in str(dequantize_rejects(rows, DequantizeTactic(4, 128, by_cta=True), arch))
    assert all(dequantize.select(problem, arch) for problem in dequantize_problems(arch))


@pytest.mark.gpu
def test_repeated_calls_see_what_changed() -> None:
    cache = filled(6, 4, (64, 64), "NHD", "stacked")
    for lens, table in (([8, 5], [[0, 1], [3, 2]]), ([3, 0], [[5, 1], [3, 2]]), ([8, 8], [[5, -1], [0, 0]])):
        check_paged(cache, torch.tensor(table), torch.tensor(lens), 8, torch.bfloat16, "cuda")


def test_a_negative_page_is_skipped_and_one_beyond_is_an_error_on_the_cpu() -> None:
    cache = filled(3, 4, (64, 64), "NHD", "pair")
    check_paged(cache, torch.tensor([[2, -1]]), torch.tensor([8]), 8, torch.bfloat16, "cpu")
    with pytest.raises(ArgumentError, match="block_tables"):
        check_paged(cache, torch.tensor([[2, 3]]), torch.tensor([8]), 8, torch.bfloat16, "cpu")
    check_paged(cache, torch.tensor([[2, 3]]), torch.tensor([4]), 8, torch.bfloat16, "cpu")  # not in the sequence


def check_wild(device: str) -> None:
    cache = filled(3, 4, (64, 64), "NHD", "pair")
    for table in (torch.tensor([[2, 3, -(2**31), 0]], dtype=torch.int32), torch.tensor([[2, 2**32, 2**62, 0]])):
        check_paged(cache, table, torch.tensor([2**31 - 1], dtype=torch.int32), 16, torch.bfloat16, device)


@pytest.mark.sim
@pytest.mark.compile
@pytest.mark.parametrize("arch", ["sm_80", "sm_100a"])
def test_pages_outside_are_skipped_in_the_simulator(arch: str) -> None:
    with sim.device(arch, races=True):
        check_wild("cpu")


@pytest.mark.gpu
def test_pages_outside_are_skipped_on_gpu() -> None:
    check_wild("cuda")


CODES, SF = torch.zeros(4, 32, dtype=torch.uint8), torch.zeros(4, 4, dtype=torch.uint8)


def paged(**changes: object) -> None:
    page, sf = torch.zeros(3, 4, 2, 32, dtype=torch.uint8), torch.zeros(3, 4, 2, 4, dtype=torch.uint8)
    out = torch.zeros(2, 8, 2, 64, dtype=torch.bfloat16)
    named: dict[str, object] = {"paged_kv_cache": (page, page), "kv_cache_sf": (sf, sf), "k_scale": 1.0, "v_scale": 1.0}
    named |= {"block_tables": torch.zeros(2, 2, dtype=torch.int32), "seq_lens": torch.zeros(2, dtype=torch.int32)}
    nvfp4_kv_dequantize_paged(**named | {"output_k": out, "output_v": out} | changes)  # type: ignore[arg-type]


OUT = torch.zeros(2, 8, 2, 64, dtype=torch.bfloat16)
BAD_CALLS: dict[str, tuple[type[ArgumentError], str, Callable[[], object]]] = {
    "codes dtype": (ArgumentTypeError, "fp4_data", lambda: nvfp4_kv_dequantize(CODES.int(), SF, 1.0)),
    "codes rank": (ArgumentError, "fp4_data", lambda: nvfp4_kv_dequantize(CODES[0], SF, 1.0)),
    "codes width": (ArgumentError, "fp4_data", lambda: nvfp4_kv_dequantize(CODES[:, :12], SF, 1.0)),
    "scales shape": (ArgumentError, "block_scales", lambda: nvfp4_kv_dequantize(CODES, SF[:, :3], 1.0)),
    "scales dtype": (ArgumentTypeError, "block_scales", lambda: nvfp4_kv_dequantize(CODES, SF.float(), 1.0)),
    "scale size": (ArgumentError, "global_scale", lambda: nvfp4_kv_dequantize(CODES, SF, torch.ones(2))),
    "out dtype": (ArgumentError, "output_dtype", lambda: nvfp4_kv_dequantize(CODES, SF, 1.0, torch.float32)),
    "columns": (ArgumentError, "block_tables", lambda: paged(block_tables=torch.zeros(2, 1, dtype=torch.int32))),
    "table dtype": (ArgumentTypeError, "block_tables", lambda: paged(block_tables=torch.zeros(2, 2))),
    "table strides": (ArgumentError, "block_tables", lambda: paged(block_tables=torch.zeros(2, 2).int().T)),
    "lengths": (ArgumentError, "seq_lens", lambda: paged(seq_lens=torch.zeros(3, dtype=torch.int32))),
    "k_scale": (ArgumentError, "k_scale", lambda: paged(k_scale=torch.ones(2))),
    "K shape": (ArgumentError, "output_k", lambda: paged(output_k=OUT[..., :32].contiguous())),
    "K strides": (ArgumentError, "output_k", lambda: paged(output_k=OUT.transpose(1, 2).contiguous().transpose(1, 2))),
    "V dtype": (ArgumentTypeError, "output_v", lambda: paged(output_v=OUT.half())),
    "V rank": (ArgumentError, "output_v", lambda: paged(output_v=OUT[0])),
    "no scales": (ArgumentTypeError, "kv_cache_sf", lambda: paged(kv_cache_sf=None)),
    "V order": (ArgumentError, "v_sf_layout", lambda: paged(v_sf_layout="x")),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_CALLS)
def test_bad_arguments_are_named(case: str) -> None:
    error, name, call = BAD_CALLS[case]
    with pytest.raises(error) as caught:
        call()
    assert caught.value.name == name

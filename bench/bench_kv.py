"""Writing and reading back an NVFP4 KV cache, against a copy of the same bytes and FlashInfer's recorded times.

Run on a GPU: ``python -m bench.bench_kv [--part functions|tactics] [--out DIR]``. 8 heads of 128, bf16. Every figure is
CUDA-graph time with cold L2 (see harness.py); ``ratio`` is the time of a copy of the same bytes divided by the
kernel's. Pages are in random order. Many tokens follow each other in one sequence; few are a decode step, with one
token of each sequence.

functions  every function of the family; ``peer_us`` is FlashInfer's time for the same case, measured on another day
           (results/h200/kv_flashinfer.csv has the date and the version)
tactics    every tactic of the tables; their thresholds follow from it
"""

from __future__ import annotations

import argparse
import csv
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch

import jitfp4
from bench.harness import Call, copy_us, time_us, write_results
from bench.stamp import stamp
from jitfp4.families.kv.kernels.dequantize import TACTICS as DEQUANTIZE_TACTICS
from jitfp4.families.kv.kernels.quantize import TACTICS as QUANTIZE_TACTICS
from jitfp4.families.kv.operation import dequantize, quantize

HEADS, D = 8, 128
FEW = 4096  # fewer tokens are a decode step, into a cache of at least this size
CONTEXT = 8192  # tokens of a sequence in a decode step
TOKENS = (1, 64, 256, 4096, 16384, 65536, 262144)
PAGED = ((1, 4096), (1, 32768), (16, 8192), (64, 8192))
PEERS = Path(__file__).parent / "results/h200/kv_flashinfer.csv"

Bound = tuple[Call, int]

_copies: dict[int, float] = {}


def measure(case: str, make_call: Callable[[], Bound], **facts: object) -> dict[str, Any]:
    """One row: the time of the call and, once for each size, of a copy. ``make_call`` returns a call and its bytes."""
    first = [make_call()]
    moved = first[0][1]
    us = time_us(lambda: (first.pop() if first else make_call())[0], moved)
    key = -(-moved >> 16)
    if key not in _copies:
        _copies[key] = copy_us(moved)
    row = {"case": case, **facts, "mib": moved / 2**20, "us": us, "copy_us": _copies[key]}
    row |= {"ratio": _copies[key] / us, "tb_per_s": moved / us / 1e6}
    print({name: round(value, 3) if isinstance(value, float) else value for name, value in row.items()}, flush=True)
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in row.items()}


class Cache:
    """An empty cache with room for ``tokens`` tokens, its pages in random order, and the slots of the tokens."""

    def __init__(self, layout: str, page: int, tokens: int) -> None:
        pages = -(-tokens // page)
        place = (page, HEADS) if layout == "NHD" else (HEADS, page)
        self.codes = tuple(torch.empty(pages, *place, D // 2, dtype=torch.uint8, device="cuda") for _ in "kv")
        sf = tuple(torch.empty(pages, *place, D // 16, dtype=torch.uint8, device="cuda") for _ in "kv")
        for x in (*self.codes, *sf):
            x.random_(0, 127)
        self.sf = tuple(x.view(torch.float8_e4m3fn) for x in sf)
        self.order = torch.randperm(pages, device="cuda")
        position = torch.arange(tokens, device="cuda")
        self.slots = self.order[position // page] * page + position % page
        self.scales = torch.full((1,), 0.002, device="cuda"), torch.full((1,), 0.003, device="cuda")


def rows(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, dtype=torch.float16, device="cuda").normal_().bfloat16()


def written(k: torch.Tensor) -> int:
    """Bytes that are read and written when K and V like ``k`` are quantized."""
    return k.nbytes * 2 * 41 // 32


def append_by_slot(layout: str, page: int, tokens: int, *, order: str = "linear") -> Callable[[], Bound]:
    def make_call() -> Bound:
        cache, k, v = Cache(layout, page, max(tokens, FEW)), rows(tokens, HEADS, D), rows(tokens, HEADS, D)
        slots = cache.slots if tokens >= FEW else torch.randperm(FEW, device="cuda")[:tokens]
        call, moved = jitfp4.nvfp4_quantize_append_paged_kv_cache_with_slot_mapping, written(k) + slots.nbytes
        return lambda: call(k, v, slots, cache.codes, cache.sf, *cache.scales, layout, v_sf_layout=order), moved

    return make_call


def append_by_position(layout: str, page: int, tokens: int, *, order: str = "linear") -> Callable[[], Bound]:
    def make_call() -> Bound:
        few = tokens < FEW
        cache = Cache(layout, page, max(tokens * page, FEW) if few else tokens)
        k, v = rows(tokens, HEADS, D), rows(tokens, HEADS, D)
        lists = (decode_step if few else one_sequence)(cache, page, tokens)
        request, position, *pages = (torch.as_tensor(x, dtype=torch.int32, device="cuda") for x in lists)
        call, moved = jitfp4.nvfp4_quantize_append_paged_kv_cache, written(k) + 2 * request.nbytes
        places, sides = (request, position), (cache.codes, cache.sf)
        return lambda: call(k, v, *places, *sides, *pages, *cache.scales, layout, v_sf_layout=order), moved

    return make_call


def one_sequence(cache: Cache, page: int, tokens: int) -> tuple[Any, ...]:
    """The lists of an append by position: all tokens of the only sequence."""
    position = torch.arange(tokens)
    return torch.zeros_like(position), position, cache.order, [0, len(cache.order)], [page]


def decode_step(cache: Cache, page: int, tokens: int) -> tuple[Any, ...]:
    """The same of one token each of ``tokens`` sequences: each ends in a page of its own, earlier pages are any."""
    own = CONTEXT // page
    pages = torch.randint(len(cache.order), (tokens, own), device="cuda")
    pages[:, -1] = cache.order[:tokens]
    request = torch.arange(tokens)
    last = torch.full_like(request, page)
    return request, torch.full_like(request, CONTEXT - 1), pages.flatten(), torch.arange(tokens + 1) * own, last


def quantize_pages(layout: str, page: int, tokens: int, order: str = "linear") -> Callable[[], Bound]:
    """The kernel of nvfp4_quantize_paged_kv_cache(): that function also reads scales back to the host."""

    def make_call() -> Bound:
        from jitfp4.families.kv.calls import NO_LISTS, quantize_sides
        from jitfp4.families.kv.checks import Side, nhd

        cache, shape = Cache(layout, page, tokens), [tokens // page, HEADS, page, D]
        shape = shape if layout == "HND" else [shape[0], page, HEADS, D]
        k, v = rows(*shape), rows(*shape)
        sides = [
            Side(nhd(x, layout), nhd(sf.view(torch.uint8), layout)) for x, sf in zip(cache.codes, cache.sf, strict=True)
        ]
        x, names = (nhd(k, layout), nhd(v, layout)), ("k_cache", "v_cache")
        interleaved = order == "interleaved4"
        return lambda: quantize_sides(x, cache.scales, NO_LISTS, sides, interleaved, None, names), written(k)

    return make_call


def quantize_rows(m: int, k: int) -> Callable[[], Bound]:
    def make_call() -> Bound:
        x, scale = rows(m, k), torch.tensor([0.002], device="cuda")
        return lambda: jitfp4.nvfp4_kv_quantize(x, scale), x.nbytes * 41 // 32

    return make_call


def dequantize_rows(m: int, k: int) -> Callable[[], Bound]:
    def make_call() -> Bound:
        codes, sf = jitfp4.nvfp4_kv_quantize(rows(m, k), 0.002)
        scale = torch.tensor([0.002], device="cuda")
        return lambda: jitfp4.nvfp4_kv_dequantize(codes, sf, scale), m * k * 41 // 16

    return make_call


def dequantize_pages(layout: str, page: int, sequences: int, tokens: int, order: str = "linear") -> Callable[[], Bound]:
    def make_call() -> Bound:
        cache = Cache(layout, page, sequences * tokens)
        tables = cache.order.int().view(sequences, -1)
        lens = torch.full((sequences,), tokens, dtype=torch.int32, device="cuda")
        outs = [torch.empty(sequences, tokens, HEADS, D, dtype=torch.bfloat16, device="cuda") for _ in "kv"]
        moved = sum(x.nbytes for x in (*outs, *cache.codes, *cache.sf)) + tables.nbytes
        call, lists = jitfp4.nvfp4_kv_dequantize_paged, (tables, lens)
        return lambda: call(cache.codes, cache.sf, *lists, *cache.scales, *outs, layout, v_sf_layout=order), moved

    return make_call


APPENDS = {"append by slot": append_by_slot, "append by position": append_by_position}


def functions() -> Iterator[dict[str, Any]]:
    with PEERS.open() as file:
        known = {
            (r["case"], r["layout"], r["page"], r["sequences"], r["tokens"]): r["us"] for r in csv.DictReader(file)
        }

    def row(
        case: str, make_call: Callable[[], Bound], layout: str, page: int | str, sequences: int, tokens: int
    ) -> Any:
        found = measure(case, make_call, layout=layout, page=page, sequences=sequences, tokens=tokens)
        peer = known.get((case, layout, str(page), str(sequences), str(tokens)))
        return found | {"peer_us": peer or "", "speedup": round(float(peer) / found["us"], 2) if peer else ""}

    for layout, page in (("NHD", 16), ("HND", 16), ("HND", 64), ("NHD", 1)):
        for tokens in TOKENS:
            yield row("append by slot", append_by_slot(layout, page, tokens), layout, page, 1, tokens)
        for tokens in (64, 256, 16384, 65536):
            sequences = tokens if tokens < FEW else 1
            yield row("append by position", append_by_position(layout, page, tokens), layout, page, sequences, tokens)
        for tokens in (4096, 65536):
            for order in ("linear", "interleaved4") if page % 4 == 0 else ("linear",):
                case = f"quantize pages V {order}"
                yield row(case, quantize_pages(layout, page, tokens, order), layout, page, 1, tokens)
        for sequences, tokens in PAGED:
            call = dequantize_pages(layout, page, sequences, tokens)
            yield row("dequantize pages", call, layout, page, sequences, tokens)
        if page % 4 == 0:
            for case, append in APPENDS.items():
                call = append(layout, page, 65536, order="interleaved4")
                yield row(f"{case} V interleaved4", call, layout, page, 1, 65536)
            call = dequantize_pages(layout, page, 16, 8192, "interleaved4")
            yield row("dequantize pages V interleaved4", call, layout, page, 16, 8192)
    for width, m in ((1024, 65536), (128, 1048576)):
        yield row(f"quantize rows of {width}", quantize_rows(m, width), "", "", 1, m)
        yield row(f"dequantize rows of {width}", dequantize_rows(m, width), "", "", 1, m)


def tactics() -> Iterator[dict[str, Any]]:
    writes = APPENDS | {"quantize pages": quantize_pages}
    for (case, make), tokens in product(writes.items(), (64, 1024, 4096, 16384, 65536)):
        for tactic in QUANTIZE_TACTICS:
            with quantize.forced(tactic):
                facts = {"page": 16, "tokens": tokens, "per_thread": tactic.tokens, "threads": tactic.threads}
                yield measure(case, make("HND", 16, tokens), **facts, by_cta="")
    for tokens, page, cut in product((256, 4096, 65536), (16, 1), DEQUANTIZE_TACTICS):
        if cut.by_cta or page % cut.tokens == 0:
            with dequantize.forced(cut):
                facts = {"page": page, "tokens": tokens, "per_thread": cut.tokens, "threads": cut.threads}
                yield measure("dequantize pages", dequantize_pages("HND", page, 1, tokens), **facts, by_cta=cut.by_cta)


PARTS = {"functions": functions, "tactics": tactics}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, action="append", help="may be repeated; both without it")
    parser.add_argument("--out", type=Path, default=Path("bench/results/h200"))
    options = parser.parse_args()
    for part in options.part or PARTS:
        began, rows_ = time.time(), list(PARTS[part]())
        write_results(options.out / ("kv" if part == "functions" else f"kv_{part}"), rows_, stamp())
        print(f"{part}: {len(rows_)} rows in {time.time() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()

"""Whole layers of FP4 experts: time, a read of the touched weights in the same run, recorded peers, goals.

Run on a GPU: ``python -m bench.bench_experts [--out DIR]`` writes ``experts.csv``, a line for each layer, routing and
number of tokens. ``--part search`` measures whole layers with every tactic of the product up, then, with the best of
these, every tactic of the product down, with and without a list of items, and writes ``experts_search.csv``; the tables
follow from it. Each tactic has one replay behind a first one, which does not count, and those that are nearly the
fastest have five more, in turn.
``--part fp8`` measures layers with activations in E4M3 in turn with those in 16 bits, and writes ``experts_fp8.csv``; a
search with ``--fp8`` is one of their tactics, and writes ``experts_search_fp8.csv``. ``--layers``, ``--tokens`` and
``--routings`` take some of the cases.

A case is a graph of calls that go in turn through two copies of the layer and through routings of their own, so that
weights are cold: between two reads of the same expert lie 330 MB and more, or the other copy. Activations are warm. The
time is the median of 7 replays. Weights are random codes. ``touched`` is the mean number of experts with rows.

``read_us`` is the time of a kernel that only reads as many bytes, and ``limit_us`` the larger of that and of the
operations at 770 TFLOP/s. ``peer`` is the best of experts_peers.py: vLLM's Marlin, humming and triton_kernels.
Compared are their two products and the activation (``products_us``) behind a routing that is prepared before, and
without the sum, which only triton_kernels has in its product. With ``--peers measured`` those that are installed are
replayed in turn with jitfp4's graph, over the same routings, and ``experts_peers.csv`` has a line for each; else they
are read from that file, or from another one.
"""

from __future__ import annotations

import argparse
import csv
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from itertools import product as pairs_of
from pathlib import Path
from typing import Any

import torch

from bench import experts_peers
from bench.bench_gemm import COLD_BYTES, READ, medians, replay_us
from bench.experts_layers import LAYERS, ROUTINGS, Case, Copies, Layer, layer_replay, make_case, make_copies
from bench.harness import geomean, write_results
from bench.stamp import stamp
from jitfp4 import nvrtc
from jitfp4.arch import Arch
from jitfp4.driver import LoadedKernel
from jitfp4.engine import build, target_of
from jitfp4.families.experts.kernels.combine import CombineTactic
from jitfp4.families.experts.kernels.narrow import NarrowTactic
from jitfp4.families.experts.kernels.stream import STREAMED, StreamTactic
from jitfp4.families.experts.kernels.wide import WIDE_TACTICS, WideTactic
from jitfp4.families.experts.operation import EXPERTS_DOWN, EXPERTS_UP
from jitfp4.families.experts.problem import Problem, Product
from jitfp4.families.experts.results_operation import EXPERTS_RESULTS
from jitfp4.families.experts.tables import forced_item_rows, item_rows_of
from jitfp4.formats import DType
from jitfp4.layouts import ceil_div
from jitfp4.narrow import TILE_MS
from jitfp4.spec import I64, Geometry, Ptr

TOKENS = (1, 8, 64, 256, 2048)
SEARCHED_TOKENS = (1, 8, 64)
FP8_TOKENS = (256, 2048, 8192)
PEERS = Path(__file__).parent / "results/h200/experts_peers.csv"
REPLAYS = 7
PEAK_TFLOPS = 770
_KERNELS = EXPERTS_UP.kernels, (*EXPERTS_DOWN.kernels, *EXPERTS_RESULTS.kernels)
_KINDS = ("narrow", "stream", "wide")
_NEARLY = 1.08  # times the fastest
_SEARCH_REPLAYS = 5
_FEWEST_ROWS, _MOST_ROOM = 16, 2.6  # of an item of a wide tactic; over the mean rows of an expert


class Read:
    """A kernel that only reads."""

    def __init__(self, arch: Arch) -> None:
        params = (Ptr("p", "const uint4"), Ptr("out", "unsigned int"), I64("vectors"))
        self.kernel = LoadedKernel(nvrtc.compile_cubin(READ, arch, symbol="read"), "read", params, 0)
        self.out = torch.zeros(1, dtype=torch.int32, device="cuda")
        self.sms = arch.num_sms

    def us(self, case: Case, copies: Copies) -> float:
        """The time for as many bytes as the case touches, cold; the shortest of several grids."""
        size = min(case.bytes, copies.data[0].numel()) // 16 * 16
        steps = max(1, copies.data[0].numel() // size)
        parts = [data[i * size : (i + 1) * size] for i in range(steps) for data in copies.data]
        parts = parts[: max(2, 2 * ceil_div(COLD_BYTES, size))]
        return min(replay_us([partial(self._launch, part, ctas) for part in parts]) for ctas in (2, 4, 8, 16))

    def _launch(self, part: torch.Tensor, ctas: int) -> None:
        geometry = Geometry((ctas * self.sms, 1, 1), (512, 1, 1))
        stream = torch.cuda.current_stream().cuda_stream
        self.kernel.launch(geometry, (part, self.out, part.numel() // 16), stream=stream, pdl=False)


def beside(case: Case, copies: Copies, peers: Sequence[experts_peers.Peer]) -> tuple[float, list[dict[str, object]]]:
    """Microseconds of the layer, and lines of peers, all replayed in turn."""
    graphs = [(peer.name, part, replay) for peer in peers for part, replay in experts_peers.graphs(peer, case).items()]
    us, *theirs = medians([layer_replay(case, copies), *(replay for _, _, replay in graphs)], REPLAYS)
    rows: dict[str, dict[str, object]] = {}
    for (name, part, _), their_us in zip(graphs, theirs, strict=True):
        rows.setdefault(name, {"peer": name, "products_us": None, "layer_us": None})[f"{part}_us"] = round(their_us, 2)
    return us, list(rows.values())


def measure(
    layers: Sequence[Layer], tokens: Sequence[int], routings: Sequence[str], lines: list[Any], with_peers: bool
) -> Iterator[dict[str, object]]:
    """A line for each case. ``lines``: of peers; those that are measured here join them."""
    read = Read(target_of(torch.empty(1, device="cuda")).arch)
    for layer in layers:
        copies = make_copies(layer)
        peers = list(experts_peers.peers(layer)) if with_peers else []
        for routing in routings:
            for count in tokens:
                case = make_case(layer, count, routing)
                us, of_peers = beside(case, copies, peers)
                lines += [{"layer": layer.name, "routing": routing, "tokens": count, **line} for line in of_peers]
                read_us = read.us(case, copies)
                limit = max(read_us, layer.flops * count * layer.slots / PEAK_TFLOPS / 1e6)
                peer, peer_us = experts_peers.best_of(lines, layer.name, routing, count)
                row = {
                    "layer": layer.name,
                    "routing": routing,
                    "tokens": count,
                    "touched": round(case.touched, 1),
                    "mb": round(case.bytes / 1e6, 1),
                    "us": round(us, 2),
                    "read_us": round(read_us, 2),
                    "limit_us": round(limit, 2),
                    "of_limit": round(limit / us, 3),
                    "goal_us": layer.goals.get(count) if routing == "uniform" else None,
                    "peer": peer,
                    "peer_us": peer_us,
                    "of_peer": round(peer_us / us, 3) if peer_us else None,
                }
                print(*row.values(), *(" ".join(map(str, line.values())) for line in of_peers), sep=", ", flush=True)
                yield row
        del copies, peers


def measure_fp8(layers: Sequence[Layer], tokens: Sequence[int], routings: Sequence[str]) -> Iterator[dict[str, object]]:
    """A line for each case: both kinds of activations, in turn."""
    for layer in layers:
        copies = make_copies(layer)
        for routing, count in pairs_of(routings, tokens):
            case = make_case(layer, count, routing)
            us, fp8_us = medians([layer_replay(case, copies), layer_replay(case, copies, "fp8")], REPLAYS)
            row = {"layer": layer.name, "routing": routing, "tokens": count}
            row |= {"us": round(us, 2), "fp8_us": round(fp8_us, 2), "faster": round(us / fp8_us, 3)}
            print(*row.values(), sep=", ", flush=True)
            yield row
        del copies


# ---- search ----------------------------------------------------------------------------------------------------------


def problems_of(layer: Layer, tokens: int, item_rows: int, fp8: bool) -> tuple[Problem, Problem]:
    def problem(kind: Product, n: int, k: int) -> Problem:
        return Problem(kind, DType.BF16, layer.format, tokens, layer.slots, layer.experts, n, k, item_rows, fp8)

    return (
        problem(Product.GATED, 2 * layer.inter, layer.hidden),
        problem(Product.DOWN, layer.hidden, layer.inter),
    )


def searched(
    layer: Layer, tokens: int, arch: Arch, kinds: Sequence[str], fp8: bool
) -> dict[int, tuple[list[Any], list[Any]]]:
    """By the rows of an item: tactics of both products."""
    size = layer.hidden * layer.inter
    chosen = item_rows_of(tokens * layer.slots, layer.experts, size, arch, fp8=fp8)
    sizes = {chosen} | ({0, TILE_MS[0]} if tokens * layer.slots <= STREAMED and not fp8 else set())
    mean, has_list = tokens * layer.slots / layer.experts, tokens * layer.slots > layer.slots
    if arch.has_wgmma and has_list and "wide" in kinds:
        sizes |= {t.tile_m for t in WIDE_TACTICS if mean <= t.tile_m <= max(_FEWEST_ROWS, _MOST_ROOM * mean)}
    found = {}
    for item_rows in sorted(sizes):
        up, down = problems_of(layer, tokens, item_rows, fp8)
        operations = (EXPERTS_UP, up), (EXPERTS_DOWN, down), (EXPERTS_RESULTS, down)
        ups, downs, results = (
            [tactic for tactic in operation.candidates(problem, arch) if _is_tried(tactic, item_rows, kinds)]
            for operation, problem in operations
        )
        if ups and (downs or results):
            found[item_rows] = ups, [*downs, *results]
    return found


def _is_tried(tactic: Any, item_rows: int, kinds: Sequence[str]) -> bool:
    """The sum behind a wide product is no choice."""
    if isinstance(tactic, WideTactic):
        return "wide" in kinds and tactic.tile_m == item_rows
    if isinstance(tactic, StreamTactic):
        return "stream" in kinds
    if isinstance(tactic, CombineTactic):
        return False
    return "narrow" in kinds and (not isinstance(tactic, NarrowTactic) or tactic.tile_m == (item_rows or TILE_MS[0]))


def search(
    layers: Sequence[Layer], tokens: Sequence[int], arch: Arch, kinds: Sequence[str], seconds: float, fp8: bool
) -> Iterator[dict[str, object]]:
    """Cases until the time is over; a case is measured whole."""
    cases = [(layer, count, searched(layer, count, arch, kinds, fp8)) for layer in layers for count in tokens]
    specs = {
        (kernel, kernel.specialise(problem, tactic))
        for layer, count, found in cases
        for item_rows, both in found.items()
        for kernels, problem, tactics in zip(_KERNELS, problems_of(layer, count, item_rows, fp8), both, strict=True)
        for tactic in tactics
        for kernel in kernels
        if isinstance(tactic, kernel.tactic)
    }
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda one: build(*one, arch), specs))
    end = time.monotonic() + seconds
    for layer in layers:
        copies = make_copies(layer)
        for _, count, found in [case for case in cases if case[0] is layer]:
            if time.monotonic() > end:
                print(f"no time is left for {layer.name}, {count} tokens")
                continue
            case = make_case(layer, count, "uniform")
            for item_rows, (ups, downs) in found.items():
                with forced_item_rows(item_rows):
                    yield from search_case(case, copies, item_rows, ups, downs, "fp8" if fp8 else None)


def search_case(
    case: Case, copies: Copies, item_rows: int, ups: Sequence[Any], downs: Sequence[Any], activations: str | None
) -> Iterator[dict[str, object]]:
    by_up = times_of(case, copies, [(tactic, None) for tactic in ups], activations)
    (best, _), _ = min(by_up.items(), key=lambda item: item[1])
    by_down = times_of(case, copies, [(best, tactic) for tactic in downs], activations)
    fast = sorted(by_down, key=by_down.__getitem__)[:3]
    ups_again = [(up, fast[0][1]) for up, _ in sorted(by_up, key=by_up.__getitem__)[:6]]
    again = times_of(case, copies, ups_again, activations)
    for product, times, place in (("up", by_up, 0), ("down", by_down, 1), ("up with the best down", again, 0)):
        for pair, us in times.items():
            tactic = pair[place]
            yield {
                "layer": case.layer.name,
                "tokens": case.tokens,
                "item_rows": item_rows,
                "product": product,
                "kind": type(tactic).__name__,
                "tactic": " ".join(f"{name}={value}" for name, value in asdict(tactic).items()),
                "us": round(us, 2),
            }
    (up, down), us = min(again.items(), key=lambda item: item[1])
    print(case.layer.name, case.tokens, item_rows, f"{us:.2f} us", up, down, flush=True)


def times_of(
    case: Case, copies: Copies, pairs: Sequence[tuple[Any, Any]], activations: str | None
) -> dict[tuple[Any, Any], float]:
    """Microseconds of whole layers by tactics; None for what the table says."""
    replays = {}
    for up, down in pairs:
        with ExitStack() as stack:
            stack.enter_context(EXPERTS_UP.forced(up))
            if isinstance(down, WideTactic):
                stack.enter_context(EXPERTS_DOWN.forced(CombineTactic(128)))
                stack.enter_context(EXPERTS_RESULTS.forced(down))
            elif down is not None:
                stack.enter_context(EXPERTS_DOWN.forced(down))
            replays[up, down] = layer_replay(case, copies, activations)
    times = dict(zip(replays, medians(list(replays.values()), 1), strict=True))
    near = [pair for pair in times if times[pair] <= _NEARLY * min(times.values())]
    times.update(zip(near, medians([replays[pair] for pair in near], _SEARCH_REPLAYS), strict=True))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("bench/results/h200"))
    parser.add_argument("--peers", default=str(PEERS), help="a file of their microseconds, or 'measured'")
    parser.add_argument("--part", choices=("cases", "fp8", "search"), default="cases")
    parser.add_argument("--layers", nargs="+", help="parts of their names")
    parser.add_argument("--tokens", type=int, nargs="+")
    parser.add_argument("--routings", nargs="+", choices=ROUTINGS, default=ROUTINGS)
    parser.add_argument("--kinds", nargs="+", choices=_KINDS, default=_KINDS, help="of a search")
    parser.add_argument("--fp8", action="store_true", help="a search of layers with activations in E4M3")
    parser.add_argument("--seconds", type=float, default=240.0, help="the most that a search may take")
    options = parser.parse_args()
    layers = [layer for layer in LAYERS if not options.layers or any(part in layer.name for part in options.layers)]
    if options.part == "search":
        arch = target_of(torch.empty(1, device="cuda")).arch
        found = search(layers, options.tokens or SEARCHED_TOKENS, arch, options.kinds, options.seconds, options.fp8)
        write_results(options.out / f"experts_search{'_fp8' if options.fp8 else ''}", list(found), stamp())
        return
    if options.part == "fp8":
        rows = list(measure_fp8(layers, options.tokens or FP8_TOKENS, options.routings))
        write_results(options.out / "experts_fp8", rows, stamp())
        return
    with_peers = options.peers == "measured"
    lines = [] if with_peers else list(csv.DictReader(Path(options.peers).read_text().splitlines()))
    rows = list(measure(layers, options.tokens or TOKENS, options.routings, lines, with_peers))
    write_results(options.out / "experts", rows, stamp())
    if with_peers and lines:
        write_results(options.out / "experts_peers", lines, stamp())
    compared = [row for row in rows if row["of_peer"]]
    for few, which in ((True, "1 to 64 tokens"), (False, "more")):
        of = [float(str(row["of_peer"])) for row in compared if (int(str(row["tokens"])) <= 64) == few]
        if of:
            print(f"{which}: of the best peer {geomean(of):.2f}, at worst {min(of):.2f}")


if __name__ == "__main__":
    main()

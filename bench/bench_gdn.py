"""The gated delta rule: time, bandwidth, a copy of the same bytes and the peer, over batch and tokens.

Run on a GPU: ``python -m bench.bench_gdn [--value-heads 32 64] [--out DIR]``. bf16 inputs, float32 states, 16 q and k
heads of dimension 128. A case is a graph of ten calls on the same tensors, the median of 15 replays: the protocol of
FlashInfer's figures below. Bytes are those of states alone: read once, written after every token that is kept, and once
at the end where the state is updated. The peers: FlashInfer 0.7.2.post1 on an H200, as measured with this protocol on
2026-11-21; flash-linear-attention, in the same run, where it is installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.harness import geomean, write_results
from bench.stamp import stamp
from jitfp4.families.gdn import gated_delta_rule_mtp

CALLS, REPLAYS = 10, 15
HEADS, HEAD_DIM = 16, 128
STATE_BYTES = 4 * HEAD_DIM * HEAD_DIM
BATCHES = (1, 4, 8, 16, 32, 64, 128, 256, 512)
COPY_CHUNK = 256 << 20  # one copy of more than this runs at two thirds of the speed

# microseconds by (updates the state, tokens), one for each of BATCHES; states of every token kept; 32 value heads
FLASHINFER_US: dict[tuple[bool, int], Sequence[float]] = {
    (True, 2): (4.3, 9.4, 19.6, 39.4, 74.8, 150.0, 291.7, 576.6, 1145.5),
    (True, 4): (6.1, 14.9, 33.0, 61.1, 115.2, 226.1, 445.3, 882.4, 1756.9),
    (True, 8): (8.7, 25.0, 56.7, 104.8, 199.1, 388.9, 764.4, 1514.5),
    (False, 8): (8.4, 24.3, 51.1, 96.7, 182.1, 351.4, 688.1, 1362.1),
}

Call = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """``update``: the final state is written back; ``steps``: the state after every token is kept."""

    batch: int
    tokens: int
    update: bool = True
    steps: bool = True
    value_heads: int = 32

    @property
    def moved_bytes(self) -> int:
        """State bytes read and written."""
        return self.batch * self.value_heads * STATE_BYTES * (1 + self.update + self.tokens * self.steps)

    @property
    def flashinfer_us(self) -> float | None:
        row = FLASHINFER_US.get((self.update, self.tokens), ()) if self.steps and self.value_heads == 32 else ()
        return dict(zip(BATCHES, row, strict=False)).get(self.batch)


def cases(value_heads: int) -> Iterator[Case]:
    """The tables: kept states with and without the final write, then plain decoding."""
    for update, steps, tokens in (
        *((True, True, t) for t in (1, 2, 4, 8)),
        (False, True, 8),
        *((True, False, t) for t in (1, 2, 4, 8)),
    ):
        for batch in BATCHES:
            yield Case(batch=batch, tokens=tokens, update=update, steps=steps, value_heads=value_heads)


def replay_us(call: Call, replays: int = REPLAYS) -> float:
    """Median microseconds of a call, from replays of a graph of ten."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(CALLS):
                call()
        times = []
        for _ in range(replays + 2):
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            stop.record()
            stop.synchronize()
            times.append(1e3 * start.elapsed_time(stop) / CALLS)
    return statistics.median(times[2:])


def arguments(case: Case) -> dict[str, Any]:
    """What gated_delta_rule_mtp() takes, filled with normal values."""
    rows, heads = (case.batch, case.tokens), case.value_heads

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda")

    steps = torch.empty(*rows, heads, HEAD_DIM, HEAD_DIM, device="cuda") if case.steps else None
    return {
        "q": normal(*rows, HEADS, HEAD_DIM).bfloat16(),
        "k": normal(*rows, HEADS, HEAD_DIM).bfloat16(),
        "v": normal(*rows, heads, HEAD_DIM).bfloat16(),
        "initial_state": normal(case.batch, heads, HEAD_DIM, HEAD_DIM),
        "initial_state_indices": torch.arange(case.batch, dtype=torch.int32, device="cuda"),
        "A_log": 0.1 * normal(heads),
        "a": normal(*rows, heads).bfloat16(),
        "dt_bias": normal(heads),
        "b": normal(*rows, heads).bfloat16(),
        "output": torch.empty(*rows, heads, HEAD_DIM, dtype=torch.bfloat16, device="cuda"),
        "intermediate_states_buffer": steps,
        "disable_state_update": not case.update,
    }


def copy_us(moved_bytes: int) -> float:
    """A device-to-device copy that reads and writes ``moved_bytes`` together."""
    source = torch.randn(moved_bytes // 8, device="cuda")
    target = torch.empty_like(source)
    chunks = list(zip(target.split(COPY_CHUNK // 4), source.split(COPY_CHUNK // 4), strict=True))
    return replay_us(lambda: [out.copy_(x) for out, x in chunks])


def fla_us(given: dict[str, Any]) -> float | None:
    """flash-linear-attention's fused kernel: state read and written once. None where it is not installed."""
    if importlib.util.find_spec("fla") is None:
        return None
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule

    rate = torch.exp(given["A_log"]) * torch.nn.functional.softplus(given["a"].float() + given["dt_bias"])
    beta, state = torch.sigmoid(given["b"].float()), given["initial_state"].mT.contiguous()
    q, k, v = (given[name] for name in "qkv")
    return replay_us(
        lambda: fused_recurrent_gated_delta_rule(
            q, k, v, g=-rate, beta=beta, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True
        )
    )


def measure(case: Case) -> dict[str, object]:
    given = arguments(case)
    us = replay_us(lambda: gated_delta_rule_mtp(**given))
    peer_us = case.flashinfer_us if case.steps else fla_us(given) if case.update else None
    copied_us = copy_us(case.moved_bytes)
    return {
        "value_heads": case.value_heads,
        "update": case.update,
        "steps": case.steps,
        "tokens": case.tokens,
        "batch": case.batch,
        "us": round(us, 2),
        "tb_per_s": round(case.moved_bytes / us / 1e6, 3),
        "copy_us": round(copied_us, 2),
        "of_copy": round(copied_us / us, 3),
        "peer": None if peer_us is None else "flashinfer" if case.steps else "fla",
        "peer_us": peer_us and round(peer_us, 2),
        "speedup": peer_us and round(peer_us / us, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--value-heads", type=int, nargs="+", default=[32, 64])
    parser.add_argument("--out", type=Path, default=Path("bench/results/h200"))
    options = parser.parse_args()
    rows = []
    for value_heads in options.value_heads:
        for case in cases(value_heads):
            if case.moved_bytes < 48 << 30:
                rows.append(measure(case))
                print(*rows[-1].values(), sep="\t", flush=True)
    write_results(options.out / "gdn", rows, stamp())
    for peer in ("flashinfer", "fla"):
        if gains := [float(str(row["speedup"])) for row in rows if row["peer"] == peer]:
            print(f"against {peer}: {min(gains):.2f} to {max(gains):.2f}, geometric mean {geomean(gains):.3f}")


if __name__ == "__main__":
    main()

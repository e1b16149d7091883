"""causal_conv1d_fn and causal_conv1d_update on the channels of Qwen3-Next, beside a copy of the same bytes.

Run on a GPU: ``python -m bench.bench_conv [--part search] [--out DIR]``. The search has every tactic.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench.harness import copy_us, write_results
from bench.stamp import stamp
from jitfp4 import causal_conv1d_fn, causal_conv1d_update
from jitfp4.arch import Arch
from jitfp4.families.conv.operation import CONV
from jitfp4.families.conv.problem import Problem
from jitfp4.formats import DType
from jitfp4.tuning import Call, time_us

CHANNELS, WIDTH = 8192, 4


class Load(NamedTuple):
    """``tokens`` of each of ``sequences``: prompts, or tokens that are decoded."""

    decode: bool
    sequences: int
    tokens: int

    @property
    def bytes(self) -> int:
        """Inputs, outputs, states read and written, and filters."""
        states = 2 * self.sequences * (WIDTH - 1)
        return 2 * CHANNELS * (2 * self.sequences * self.tokens + states + WIDTH)

    @property
    def problem(self) -> Problem:
        count = self.sequences * self.tokens
        return Problem(DType.BF16, WIDTH, True, self.decode, count, self.sequences, CHANNELS)

    def make(self) -> Call:
        def half(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device="cuda").bfloat16()

        weight, states = half(CHANNELS, WIDTH), half(self.sequences + 1, WIDTH - 1, CHANNELS).transpose(1, 2)
        x = half(self.sequences * self.tokens, CHANNELS)
        slots = torch.arange(1, self.sequences + 1, dtype=torch.int32, device="cuda")
        if self.decode:
            out = torch.empty_like(x)
            return lambda: causal_conv1d_update(x, states, weight, None, "silu", slots, out=out)
        starts = torch.arange(self.sequences + 1, dtype=torch.int32, device="cuda") * self.tokens
        has = torch.ones(self.sequences, dtype=torch.bool, device="cuda")
        return lambda: causal_conv1d_fn(x.T, weight, None, states, starts, slots, has)


LOADS = (
    *(Load(True, sequences, 1) for sequences in (1, 8, 64, 256)),
    *(Load(False, sequences, tokens) for sequences, tokens in ((1, 128), (1, 1024), (1, 8192), (8, 1024), (64, 128))),
)


def measure(searching: bool) -> Iterator[dict[str, object]]:
    arch = Arch.of_capability(*torch.cuda.get_device_capability())
    for load in LOADS:
        copy = copy_us(load.bytes)
        tactics: list[Any] = list(CONV.candidates(load.problem, arch)) if searching else [None]
        for tactic in tactics:
            with CONV.forced(tactic) if tactic is not None else nullcontext():
                us = time_us(load.make, load.bytes)
            chosen = CONV.select(load.problem, arch) if tactic is None else tactic
            row = {
                "call": "decode" if load.decode else "prompts",
                "sequences": load.sequences,
                "tokens": load.tokens,
                "vec": chosen.vec,
                "threads": chosen.threads,
                "block_tokens": chosen.tokens,
                "us": round(us, 2),
                "copy_us": round(copy, 2),
                "ratio": round(copy / us, 3),
            }
            print(*row.values(), flush=True)
            yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("bench/results/h200"))
    parser.add_argument("--part", choices=("loads", "search"), default="loads")
    options = parser.parse_args()
    searching = options.part == "search"
    write_results(options.out / ("conv_search" if searching else "conv"), list(measure(searching)), stamp())


if __name__ == "__main__":
    main()

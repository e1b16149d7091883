"""The decode loop of an engine: norm and quantization, dequantization, a gated-delta-rule step, again and again.

    python examples/decode_loop.py [--device cuda] [--batch 64] [--steps 8]

Runs the same steps in every way that an engine does, and compares the states that are left:

eager      each call by itself
compiled   one step under torch.compile
graph      one step captured into a CUDA graph and replayed (GPU)
streams    each half of the batch on a stream of its own (GPU)
device     all on a second GPU, where there is one

Prints the time of a step, host included, and how far the states are from the eager ones. jitfp4's kernels give the
same bytes in every way; torch's matrix products may not, for half a batch or on another GPU. Status 1 above 1 %.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import TypeVar

import torch
from torch.nn import functional

import jitfp4

HIDDEN, HEADS, VALUE_HEADS, DIM = 512, 2, 4, 64
TOLERANCE = 0.01
WIDTHS = [HEADS * DIM, HEADS * DIM, VALUE_HEADS * DIM, VALUE_HEADS, VALUE_HEADS]  # q, k, v, a, b


@dataclass(frozen=True)
class Layer:
    """Weights of one layer, on one device. ``encode`` scales the activations to be quantized, ``decode`` is 1 / it."""

    norm: torch.Tensor
    project: torch.Tensor
    back: torch.Tensor
    decay: torch.Tensor
    bias: torch.Tensor
    encode: torch.Tensor
    decode: torch.Tensor

    @staticmethod
    def random() -> Layer:
        return Layer(
            norm=torch.ones(HIDDEN, dtype=torch.bfloat16),
            project=(torch.randn(sum(WIDTHS), HIDDEN) / HIDDEN**0.5).bfloat16(),
            back=(torch.randn(HIDDEN, VALUE_HEADS * DIM) / (VALUE_HEADS * DIM) ** 0.5).bfloat16(),
            decay=torch.zeros(VALUE_HEADS),
            bias=torch.zeros(VALUE_HEADS),
            encode=torch.tensor([448.0 * 6 / 8]),  # normalised rows rarely exceed 8
            decode=torch.tensor([8 / (448.0 * 6)]),
        )

    def step(self, x: torch.Tensor, work: Work) -> torch.Tensor:
        """One token of each request: [batch, HIDDEN] to the same; the residual and the states move on in place."""
        codes, scales = jitfp4.add_rmsnorm_fp4quant(x, work.residual, self.norm, global_scale=self.encode)
        linear = jitfp4.SfLayout.layout_linear
        codes, scales = codes.view(torch.uint8), scales.view(torch.uint8)
        y = jitfp4.nvfp4_dequantize(codes, scales, self.decode, linear, out_dtype=torch.bfloat16)
        q, k, v, a, b = functional.linear(y, self.project).unsqueeze(1).split(WIDTHS, dim=-1)
        out, _ = jitfp4.gated_delta_rule_mtp(
            q.unflatten(-1, (HEADS, DIM)),
            k.unflatten(-1, (HEADS, DIM)),
            v.unflatten(-1, (VALUE_HEADS, DIM)),
            work.states,
            work.slots,
            self.decay,
            a,
            self.bias,
            b,
        )
        return functional.linear(out.flatten(1), self.back)


@dataclass(frozen=True)
class Work:
    """What the steps of some requests change."""

    residual: torch.Tensor
    states: torch.Tensor
    slots: torch.Tensor

    @staticmethod
    def random(batch: int) -> Work:
        states = torch.randn(batch, VALUE_HEADS, DIM, DIM)
        return Work(residual=torch.zeros(batch, HIDDEN, dtype=torch.bfloat16), states=states, slots=torch.arange(batch))

    def copy(self) -> Work:
        return Work(**{field.name: getattr(self, field.name).clone() for field in fields(self)})

    def requests(self, first: int, last: int) -> Work:
        """Some of the requests; the pool of states stays whole."""
        return replace(self, residual=self.residual[first:last], slots=self.slots[first:last])


Part = TypeVar("Part", Layer, Work)


def moved(item: Part, device: torch.device) -> Part:
    return type(item)(**{field.name: getattr(item, field.name).to(device) for field in fields(item)})


Step = Callable[[torch.Tensor], torch.Tensor]


def run(step: Step, x: torch.Tensor, steps: int) -> float:
    """Microseconds of a step; the first one, which compiles, is not among them."""
    x = step(x)
    synchronize(x.device)
    began = time.perf_counter()
    for _ in range(steps - 1):
        x = step(x)
    synchronize(x.device)
    return (time.perf_counter() - began) / max(steps - 1, 1) * 1e6


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def captured(layer: Layer, work: Work, x: torch.Tensor) -> Step:
    """A step as a CUDA graph over tensors of its own. What warming up did to ``work`` is undone."""
    before, inside = work.copy(), x.clone()
    layer.step(inside, work)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer.step(inside, work)
    for field in fields(Work):
        getattr(work, field.name).copy_(getattr(before, field.name))

    def replay(x: torch.Tensor) -> torch.Tensor:
        inside.copy_(x)
        graph.replay()
        return out

    return replay


def on_streams(layer: Layer, work: Work) -> Step:
    """Both halves of the batch at once. Each stream waits for the current one, which then waits for both."""
    batch = len(work.slots)
    halves = [(0, batch // 2), (batch // 2, batch)]
    streams = [torch.cuda.Stream(work.states.device) for _ in halves]

    def step(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        current = torch.cuda.current_stream(x.device)
        for (first, last), stream in zip(halves, streams, strict=True):
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                out[first:last] = layer.step(x[first:last], work.requests(first, last))
        for stream in streams:
            current.wait_stream(stream)
        return out

    return step


def ways(layer: Layer, start: Work, x: torch.Tensor) -> Iterator[tuple[str, Step, Work, torch.Tensor]]:
    """Each way that this machine has, with fresh requests."""
    work = start.copy()
    yield "eager", lambda x: layer.step(x, work), work, x
    backend = "inductor" if x.is_cuda else "aot_eager"  # inductor needs a C++ compiler for the CPU
    compiled, work_compiled = torch.compile(layer.step, fullgraph=True, backend=backend), start.copy()
    yield "compiled", lambda x: compiled(x, work_compiled), work_compiled, x
    if x.device.type != "cuda":
        return
    work_captured, work_streams = start.copy(), start.copy()
    yield "graph", captured(layer, work_captured, x), work_captured, x
    yield "streams", on_streams(layer, work_streams), work_streams, x
    if torch.cuda.device_count() > 1:
        second = torch.device("cuda", 1)
        there, work_there = moved(layer, second), moved(start, second)
        yield "device", lambda x: there.step(x, work_there), work_there, x.to(second)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device(options.device)
    layer, start = moved(Layer.random(), device), moved(Work.random(options.batch), device)
    x = torch.randn(options.batch, HIDDEN).bfloat16().to(device)
    want, worst = None, 0.0
    with torch.no_grad():
        for name, step, work, first in ways(layer, start, x):
            us = run(step, first, options.steps)
            left = torch.cat([work.states.flatten().cpu(), work.residual.flatten().float().cpu()])
            want = left if want is None else want
            off = ((left - want).norm() / want.norm()).item()
            worst = max(worst, off)
            same = "the same bytes" if torch.equal(left, want) else f"off by {off:.1e}"
            print(f"{name:9} {us:9.1f} us a step, {same}")
    if not worst < TOLERANCE:
        sys.exit(f"two ways disagree by more than {TOLERANCE}")


if __name__ == "__main__":
    main()

"""The gated delta rule: time, bandwidth, a copy of the same bytes and the peer, over batch and tokens.

Run on a GPU: ``python -m bench.bench_gdn [--value-heads 32 64] [--out DIR]``: ``gdn.csv`` has a line for each case.
``--part compile`` times NVRTC on every specialisation instead, anywhere. bf16 inputs, 16 q and k heads of dimension
128, float32 states [V, K] unless a case says otherwise.
A case is a graph of ten calls on the same tensors, the median of 15 replays: the protocol of
FlashInfer's figures below. Bytes are those of states alone: read once, written after every token if steps are stored,
and once at the end if the state is updated. The peers: FlashInfer 0.7.2.post1 on an H200, measured with this protocol
on 2026-11-21; flash-linear-attention, in the same run, if it is installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.harness import Call, copy_us, geomean, time_us, write_results
from bench.stamp import stamp
from jitfp4 import nvrtc
from jitfp4.arch import Arch
from jitfp4.families.gdn import gated_delta_rule_decode, gated_delta_rule_mtp
from jitfp4.families.gdn.kernels.chunk import KERNEL as CHUNK
from jitfp4.families.gdn.kernels.delta_rule import KERNEL as DELTA_RULE
from jitfp4.tuning import REPLAYS

HEADS, HEAD_DIM = 16, 128
K_MAJOR = "f32 [K, V]"
STATES = {"f32": torch.float32, "bf16": torch.bfloat16, K_MAJOR: torch.float32}
BATCHES = (1, 4, 8, 16, 32, 64, 128, 256, 512)
TOKENS = (1, 2, 4, 8)
COMPILE_ARCHS = ("sm_90a", "sm_100a")

# microseconds by (updates the state, tokens), one for each of BATCHES; states of every token kept; 32 value heads
FLASHINFER_US: dict[tuple[bool, int], Sequence[float]] = {
    (True, 2): (4.3, 9.4, 19.6, 39.4, 74.8, 150.0, 291.7, 576.6, 1145.5),
    (True, 4): (6.1, 14.9, 33.0, 61.1, 115.2, 226.1, 445.3, 882.4, 1756.9),
    (True, 8): (8.7, 25.0, 56.7, 104.8, 199.1, 388.9, 764.4, 1514.5),
    (False, 8): (8.4, 24.3, 51.1, 96.7, 182.1, 351.4, 688.1, 1362.1),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """``update``: the final state is written back; ``steps``: the state after every token is stored; ``state``: one of
    STATES.
    """

    batch: int
    tokens: int
    update: bool = True
    steps: bool = True
    value_heads: int = 32
    state: str = "f32"

    @property
    def moved_bytes(self) -> int:
        """State bytes read and written."""
        head = HEAD_DIM * HEAD_DIM * STATES[self.state].itemsize
        return self.batch * self.value_heads * head * (1 + self.update + self.tokens * self.steps)

    @property
    def function(self) -> Callable[..., object]:
        return gated_delta_rule_decode if self.state == K_MAJOR else gated_delta_rule_mtp

    @property
    def flashinfer_us(self) -> float | None:
        known = self.steps and self.value_heads == 32 and self.state == "f32"
        row = FLASHINFER_US.get((self.update, self.tokens), ()) if known else ()
        return dict(zip(BATCHES, row, strict=False)).get(self.batch)


def cases(value_heads: int) -> Iterator[Case]:
    """The cases: stored steps with and without the final write, then plain decoding, then other states."""
    for update, steps, tokens, state in (
        *((True, True, t, "f32") for t in TOKENS),
        (False, True, 8, "f32"),
        *((True, False, t, "f32") for t in TOKENS),
        *((True, steps, t, "bf16") for steps, t in ((True, 4), (False, 1), (False, 4)) if value_heads == 32),
        *((True, False, 1, K_MAJOR) for _ in range(value_heads == 32)),
    ):
        for batch in BATCHES:
            yield Case(batch=batch, tokens=tokens, update=update, steps=steps, value_heads=value_heads, state=state)


def arguments(case: Case) -> dict[str, Any]:
    """Arguments of gated_delta_rule_mtp(), or for [K, V] gated_delta_rule_decode(), filled with normal values."""
    rows, heads, dtype = (case.batch, case.tokens), case.value_heads, STATES[case.state]

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda")

    states = normal(case.batch, heads, HEAD_DIM, HEAD_DIM).to(dtype)
    steps = torch.empty(*rows, heads, HEAD_DIM, HEAD_DIM, dtype=dtype, device="cuda") if case.steps else None
    pool = {
        "initial_state": states,
        "initial_state_indices": torch.arange(case.batch, dtype=torch.int32, device="cuda"),
        "intermediate_states_buffer": steps,
        "disable_state_update": not case.update,
    }
    return {
        "q": normal(*rows, HEADS, HEAD_DIM).bfloat16(),
        "k": normal(*rows, HEADS, HEAD_DIM).bfloat16(),
        "v": normal(*rows, heads, HEAD_DIM).bfloat16(),
        "A_log": 0.1 * normal(heads),
        "a": normal(*rows, heads).bfloat16(),
        "dt_bias": normal(heads),
        "b": normal(*rows, heads).bfloat16(),
        "output": torch.empty(*rows, heads, HEAD_DIM, dtype=torch.bfloat16, device="cuda"),
        **({"state": states} if case.state == K_MAJOR else pool),
    }


def warm_us(call: Call, replays: int = REPLAYS) -> float:
    """Microseconds of a call, when calls follow each other on one set of tensors, as decoding steps do."""
    return time_us(lambda: call, 0, l2="warm", replays=replays)


def fla_us(given: dict[str, Any]) -> float | None:
    """Microseconds of flash-linear-attention's fused kernel, which reads and writes the state once. None if it is not
    installed.
    """
    if importlib.util.find_spec("fla") is None:
        return None
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule

    rate = torch.exp(given["A_log"]) * torch.nn.functional.softplus(given["a"].float() + given["dt_bias"])
    beta, state = torch.sigmoid(given["b"].float()), given["initial_state"].mT.contiguous()
    q, k, v = (given[name] for name in "qkv")

    def call() -> object:
        return fused_recurrent_gated_delta_rule(
            q, k, v, g=-rate, beta=beta, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True
        )

    return warm_us(call)


def measure(case: Case) -> dict[str, object]:
    given = arguments(case)
    us = warm_us(lambda: case.function(**given))
    peer_us = case.flashinfer_us if case.steps else fla_us(given) if case.state == "f32" else None
    copied_us = copy_us(case.moved_bytes, l2="warm")
    return {
        "value_heads": case.value_heads,
        "state": case.state,
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


# ---- compile time ----------------------------------------------------------------------------------------------------


def compile_times() -> Iterator[dict[str, object]]:
    """Milliseconds of NVRTC for every specialisation, the best of three runs; one at a time."""
    for arch in map(Arch.of, COMPILE_ARCHS):
        for kernel in (DELTA_RULE, CHUNK):
            for spec in kernel.specs(arch):
                source, took = kernel.render(spec, arch), []
                for _ in range(3):
                    start = time.perf_counter()
                    nvrtc.compile_cubin(source, arch, symbol=kernel.symbol)
                    took.append(1e3 * (time.perf_counter() - start))
                yield {"arch": arch.name, "kernel": kernel.name, "spec": str(spec), "ms": round(min(took), 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=("speed", "compile"), default="speed")
    parser.add_argument("--value-heads", type=int, nargs="+", default=[32, 64])
    parser.add_argument("--out", type=Path, help="bench/results/h200, or bench/results/cpu for compile")
    options = parser.parse_args()
    out = options.out or Path("bench/results") / ("h200" if options.part == "speed" else "cpu")
    if options.part == "compile":
        rows = list(compile_times())
        write_results(out / "gdn_compile", rows, stamp())
        print(f"{len(rows)} specialisations, at most {max(float(str(row['ms'])) for row in rows):.0f} ms")
        return
    rows = []
    for value_heads in options.value_heads:
        for case in cases(value_heads):
            if case.moved_bytes < 48 << 30:
                rows.append(measure(case))
                print(*rows[-1].values(), sep="\t", flush=True)
    write_results(out / "gdn", rows, stamp())
    for peer in ("flashinfer", "fla"):
        if gains := [float(str(row["speedup"])) for row in rows if row["peer"] == peer]:
            print(f"against {peer}: {min(gains):.2f} to {max(gains):.2f}, geometric mean {geomean(gains):.3f}")


if __name__ == "__main__":
    main()

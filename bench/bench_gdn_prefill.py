"""chunk_gated_delta_rule over sequences and lengths, beside flash-linear-attention in the same run; errors of both.

Run on a GPU: ``python -m bench.bench_gdn_prefill [--tactics] [--out DIR]``. bf16 inputs, 16 q and k heads and 32 value
heads of dimension 128, normalised in the kernel, float32 states; FlashInfer's case has 2 and 8 heads. A case is a graph
of ten calls on the same tensors, the median of several replays. ``--tactics`` times every tactic of the second kernel
too. Errors are of one sequence of 1,024 tokens, against the recurrence in float64: root mean square over that of the
result. flash-linear-attention is measured where it is installed, on sequences of equal length without cu_seqlens.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from bench.harness import geomean, time_us, write_results
from bench.stamp import stamp
from jitfp4 import chunk_gated_delta_rule
from jitfp4.families.gdn.kernels.prefill import TACTICS
from jitfp4.families.gdn.prefill_operation import GATED_DELTA_RULE_PREFILL

HEAD_DIM = 128
HEADS = ((16, 32), (2, 8))
CELLS = tuple((sequences, length) for length in (1024, 8192, 65536) for sequences in (1, 2, 8, 32))
MOST_TOKENS = 1 << 20
REPLAYS = 5
ERROR_TOKENS = 1024


def arguments(sequences: int, length: int, heads: int, value_heads: int) -> dict[str, Any]:
    """Arguments of chunk_gated_delta_rule() on the GPU, decays of 0.9 to 1."""
    tokens = sequences * length

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    return {
        "q": normal(tokens, heads, HEAD_DIM),
        "k": normal(tokens, heads, HEAD_DIM),
        "v": normal(tokens, value_heads, HEAD_DIM),
        "g": 1.0 - 0.1 * torch.rand(tokens, value_heads, device="cuda"),
        "beta": torch.rand(tokens, value_heads, device="cuda"),
        "initial_state": torch.randn(sequences, value_heads, HEAD_DIM, HEAD_DIM, device="cuda"),
        "output_final_state": True,
        "cu_seqlens": torch.arange(0, tokens + 1, length, device="cuda"),
        "use_qk_l2norm_in_kernel": True,
    }


def ours(given: dict[str, Any]) -> Callable[[], object]:
    out, state = torch.empty_like(given["v"]), torch.empty_like(given["initial_state"])
    return lambda: chunk_gated_delta_rule(**given, output=out, output_state=state)


def fla(given: dict[str, Any], sequences: int) -> Callable[[], tuple[torch.Tensor, torch.Tensor]] | None:
    """flash-linear-attention's chunkwise kernels on the same values; None if it is not installed."""
    if importlib.util.find_spec("fla") is None:
        return None
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule as peer

    q, k, v, g, beta = (given[name].unflatten(0, (sequences, -1)) for name in ("q", "k", "v", "g", "beta"))
    ratio = v.shape[2] // q.shape[2]
    q, k = (x.repeat_interleave(ratio, 2) for x in (q, k))
    rate, state = g.log(), given["initial_state"].mT.contiguous()

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        result = peer(
            q, k, v, g=rate, beta=beta, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True
        )
        return result[0], result[1]

    return call


def us_of(call: Callable[[], object]) -> float:
    return time_us(lambda: call, 0, l2="warm", replays=REPLAYS)


def recurrence(given: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and state of one sequence in float64."""
    q, k, v, g, beta = (given[name].double() for name in ("q", "k", "v", "g", "beta"))
    ratio = v.shape[1] // q.shape[1]
    q, k = ((x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()).repeat_interleave(ratio, 1) for x in (q, k))
    h, out = given["initial_state"][0].double(), torch.empty_like(v)
    for t in range(len(q)):
        h = h * g[t, :, None, None]
        u = (v[t] - (h @ k[t].unsqueeze(-1)).squeeze(-1)) * beta[t].unsqueeze(-1)
        h = h + u.unsqueeze(-1) * k[t].unsqueeze(-2)
        out[t] = (h @ q[t].unsqueeze(-1)).squeeze(-1) * HEAD_DIM**-0.5
    return out, h


def _error(got: torch.Tensor, want: torch.Tensor) -> float | None:
    if got.is_meta:  # a rehearsal
        return None
    return round(float(((got.double() - want).square().mean() / want.square().mean()).sqrt()), 6)


def errors() -> Iterator[dict[str, object]]:
    """Errors of ours and the peer's, for decays near 1, far from it, and for repeated keys."""
    for kind in ("normal", "repeated keys", "strong decay"):
        given = arguments(1, ERROR_TOKENS, 2, 4)
        if kind == "repeated keys":
            given["k"][1::2] = given["k"][::2]
        if kind == "strong decay":
            given["g"].square_().square_().square_().square_()
        want = recurrence(given)
        peer = fla(given, 1)
        found = {"jitfp4": chunk_gated_delta_rule(**given), "fla": peer and peer()}
        for name, got in found.items():
            if got is None:
                continue
            state = got[1].mT if name == "fla" else got[1]
            pairs = zip(("output", "state"), (got[0].reshape(want[0].shape), state[0]), want, strict=True)
            yield {"case": kind, "of": name, **{part: _error(x, y) for part, x, y in pairs}}


def measure(sequences: int, length: int, heads: int, value_heads: int, tactics: bool) -> Iterator[dict[str, object]]:
    given = arguments(sequences, length, heads, value_heads)
    peer = fla(given, sequences)
    us, peer_us = us_of(ours(given)), peer and us_of(peer)
    row = {
        "heads": heads,
        "value_heads": value_heads,
        "sequences": sequences,
        "length": length,
        "tactic": "table",
        "us": round(us, 1),
        "fla_us": peer_us and round(peer_us, 1),
        "speedup": peer_us and round(peer_us / us, 3),
    }
    yield row
    for tactic in TACTICS if tactics else ():
        with GATED_DELTA_RULE_PREFILL.forced(tactic):
            us = us_of(ours(given))
        yield row | {"tactic": "/".join(map(str, asdict(tactic).values())), "us": round(us, 1), "speedup": None}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tactics", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("bench/results/h200"))
    options = parser.parse_args()
    rows = []
    for heads, value_heads in HEADS:
        for sequences, length in CELLS:
            if sequences * length <= MOST_TOKENS:
                for row in measure(sequences, length, heads, value_heads, options.tactics):
                    rows.append(row)
                    print(*row.values(), sep="\t", flush=True)
    found = list(errors())
    for row in found:
        print(*row.values(), sep="\t")
    write_results(options.out / "gdn_prefill", rows, stamp())
    write_results(options.out / "gdn_prefill_errors", found, stamp())
    if gains := [float(str(row["speedup"])) for row in rows if row["speedup"]]:
        print(f"against fla: {min(gains):.2f} to {max(gains):.2f}, geometric mean {geomean(gains):.3f}")


if __name__ == "__main__":
    main()

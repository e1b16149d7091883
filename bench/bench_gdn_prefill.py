"""chunk_gated_delta_rule over sequences and lengths, beside flash-linear-attention and FlashInfer in the same run.

Run on a GPU: ``python -m bench.bench_gdn_prefill [--flashinfer LIBRARY] [--tactics] [--out DIR]``. bf16 inputs, 16 q
and k heads and 32 value heads of dimension 128, normalised in the kernel, float32 states; FlashInfer's case has 2 and 8
heads. A case is a graph of ten calls on the same tensors, the median of several replays. ``--tactics`` times every
tactic of gdn/prefill_wgmma too. Errors are of one sequence of 1,024 tokens, against the recurrence in float64: root
mean square over that of the result. The peers are those of peers_gdn_prefill.py, where they are; ``speedup`` is over
the faster one.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from bench import peers_gdn_prefill as peers
from bench.harness import geomean, time_us, write_results
from bench.stamp import stamp
from jitfp4 import chunk_gated_delta_rule
from jitfp4.arch import Arch
from jitfp4.families.gdn.kernels.prefill_wgmma import PREFILL_WGMMA
from jitfp4.families.gdn.prefill_arguments import PrefillProblem
from jitfp4.families.gdn.prefill_operation import GATED_DELTA_RULE_PREFILL
from jitfp4.formats import DType

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


def errors(flashinfer: Path | None) -> Iterator[dict[str, object]]:
    """Errors of ours and the peers', for decays near 1, far from it, and for repeated keys."""
    for kind in ("normal", "repeated keys", "strong decay"):
        given = arguments(1, ERROR_TOKENS, 2, 4)
        if kind == "repeated keys":
            given["k"][1::2] = given["k"][::2]
        if kind == "strong decay":
            given["g"].square_().square_().square_().square_()
        want = recurrence(given)
        calls = {
            "jitfp4": lambda given=given: chunk_gated_delta_rule(**given),
            "fla": peers.fla(given, 1),
            "flashinfer": peers.flashinfer(flashinfer, given),
        }
        for name, call in calls.items():
            if call is not None:
                got = zip(("output", "state"), call(), want, strict=True)
                yield {"case": kind, "of": name, **{part: _error(x.view_as(y), y) for part, x, y in got}}


def measure(
    sequences: int, length: int, heads: int, value_heads: int, options: argparse.Namespace
) -> Iterator[dict[str, object]]:
    given = arguments(sequences, length, heads, value_heads)
    us = us_of(ours(given))
    calls = {"fla": peers.fla(given, sequences), "flashinfer": peers.flashinfer(options.flashinfer, given)}
    peer_us = {name: us_of(call) for name, call in calls.items() if call is not None}
    row = {
        "heads": heads,
        "value_heads": value_heads,
        "sequences": sequences,
        "length": length,
        "tactic": "table",
        "us": round(us, 1),
        **{f"{name}_us": round(peer_us[name], 1) if name in peer_us else None for name in calls},
        "speedup": round(min(peer_us.values()) / us, 3) if peer_us else None,
    }
    yield row
    problem = PrefillProblem(DType.BF16, HEAD_DIM, HEAD_DIM, sequences * length, sequences, value_heads)
    arch = Arch.of_capability(*torch.cuda.get_device_capability())
    for tactic in PREFILL_WGMMA.candidates(problem, arch) if options.tactics else ():
        with GATED_DELTA_RULE_PREFILL.forced(tactic):
            us = us_of(ours(given))
        yield row | {"tactic": str(tactic), "us": round(us, 1), "speedup": None}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tactics", action="store_true")
    parser.add_argument("--flashinfer", type=Path, help="the library that peers_gdn_prefill.py loads")
    parser.add_argument("--out", type=Path, default=Path("bench/results/h200"))
    options = parser.parse_args()
    rows = []
    for heads, value_heads in HEADS:
        for sequences, length in CELLS:
            if sequences * length <= MOST_TOKENS:
                for row in measure(sequences, length, heads, value_heads, options):
                    rows.append(row)
                    print(*row.values(), sep="\t", flush=True)
    found = list(errors(options.flashinfer))
    for row in found:
        print(*row.values(), sep="\t")
    write_results(options.out / "gdn_prefill", rows, stamp())
    write_results(options.out / "gdn_prefill_errors", found, stamp())
    if gains := [float(str(row["speedup"])) for row in rows if row["speedup"]]:
        print(f"against the faster peer: {min(gains):.2f} to {max(gains):.2f}, geometric mean {geomean(gains):.3f}")


if __name__ == "__main__":
    main()

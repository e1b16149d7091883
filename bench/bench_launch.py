"""Host time of one call: every public function, its operator, and launches by torch and Triton.

Run on a GPU: ``python -m bench.bench_launch [--out DIR]``. The GPU work is tiny and asynchronous; the time until the
call returns is measured. Rows that begin with ``good:`` are the calls of tests/inputs/good.py, one for each public
function and method, with as many arguments given as go together. ``torch_ops`` is this time divided by that of a torch
in-place addition right before, because the clock of a host may change every second; ``triton_launches`` is it divided
by that of a Triton kernel with 7 arguments in the same run.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

import jitfp4
from bench.bench_gdn import Case, arguments
from bench.harness import write_results
from bench.stamp import stamp
from jitfp4 import (
    SfLayout,
    gated_delta_rule_mtp,
    mm_bf16_fp4,
    mm_fp4,
    nvfp4_kv_dequantize_paged,
    nvfp4_quantize,
    nvfp4_quantize_append_paged_kv_cache_with_slot_mapping,
    prepare_fp4_weight,
    replay,
    rmsnorm_fp4quant,
    trtllm_batch_decode_with_kv_cache,
    xqa_batch_decode_with_kv_cache,
)
from tests.inputs.good import good_calls

CALLS, ROUNDS = 2000, 9
ROUND_S = 0.02  # of slow calls, a round has fewer
BEFORE = 200  # additions before each call's round
TORCH, TRITON = "torch in-place add", "Triton kernel, 7 arguments"

Call = Callable[[], object]


def host_us(calls: Mapping[str, Call]) -> dict[str, tuple[float, float]]:
    """Medians over rounds: mean host microseconds of a call, and these divided by those of the addition right before.

    The queue is drained between rounds. Each round has every call, so that slow clocks at the beginning affect all
    calls alike.
    """
    rounds: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    counts: dict[str, int] = {}
    for name, call in calls.items():
        call()
        counts[name] = min(CALLS, max(1, int(ROUND_S / _mean_s(call, min(CALLS, 5)))))
    for _ in range(ROUNDS + 2):
        for name, call in calls.items():
            before, own = _mean_s(calls[TORCH], min(CALLS, BEFORE)), _mean_s(call, counts[name])
            rounds[name].append((1e6 * own, own / before))
    times = {name: [*zip(*measured[2:], strict=True)] for name, measured in rounds.items()}
    return {name: (statistics.median(us), statistics.median(ratios)) for name, (us, ratios) in times.items()}


def _mean_s(call: Call, count: int) -> float:
    """Mean seconds of so many calls; the queue is empty before."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - start) / count


def triton_call(a: torch.Tensor, scale: torch.Tensor, q: torch.Tensor, sf: torch.Tensor) -> Call | None:
    """A Triton kernel with nvfp4_quantize's seven arguments that does almost nothing; None without Triton."""
    try:
        import triton
        import triton.language as tl
    except ImportError:
        return None

    @triton.jit
    def kernel(x, scale, q, sf, m, k, x_stride):  # noqa: ARG001
        tl.store(q + tl.program_id(0), tl.load(scale).to(tl.uint8))

    return lambda: kernel[(1,)](a, scale, q, sf, 128, 256, 256)


def checked(call: Call) -> Call:
    """The call without the memory of earlier calls."""

    def suspended() -> object:
        with replay.suspended():
            return call()

    return suspended


def calls() -> dict[str, Call | None]:
    a, scale = torch.randn(128, 256, device="cuda", dtype=torch.bfloat16), torch.ones(1, device="cuda")
    q, sf = nvfp4_quantize(a, scale)
    weight, normed, norm_sf = torch.randn_like(a[0]), torch.empty_like(q), torch.empty_like(q[:, :16])
    delta_rule = arguments(Case(batch=1, tokens=2))
    operator = torch.ops.jitfp4.quantize.default

    def given() -> object:
        return nvfp4_quantize(a, scale, out=q, out_sf=sf)

    return {
        "nvfp4_quantize, outputs given": given,
        "nvfp4_quantize, outputs allocated": lambda: nvfp4_quantize(a, scale),
        "nvfp4_quantize, outputs given, checked": checked(given),
        "its operator, through torch's dispatcher": lambda: operator(a, scale, q, sf, "nvfp4", 0, False, 0, None, ""),
        "rmsnorm_fp4quant, outputs given": lambda: rmsnorm_fp4quant(a, weight, normed, norm_sf),
        "rmsnorm_fp4quant, outputs allocated": lambda: rmsnorm_fp4quant(a, weight),
        "nvfp4_quantize, a number as scale": lambda: nvfp4_quantize(a, 2.0, out=q, out_sf=sf),
        "gated_delta_rule_mtp, outputs given": lambda: gated_delta_rule_mtp(**delta_rule),
        **products(),
        **cache(),
        **attention(),
        **functions(),
        TORCH: lambda: a.add_(1),
        TRITON: triton_call(a, scale, q, sf),
        "two torch.empty": lambda: (torch.empty((128, 128), dtype=torch.uint8, device="cuda"),
                                    torch.empty((128, 16), dtype=torch.uint8, device="cuda")),
        "torch.empty_strided": lambda: torch.empty_strided((128, 128), (128, 1), dtype=torch.uint8, device="cuda"),
    }  # fmt: skip


def products() -> dict[str, Call]:
    """One launch; one with a workspace; and two, the first of which expands a."""
    found: dict[str, Call] = {}
    for name, (m, n, k) in {"": (1, 256, 256), ", divided tiles": (32, 8704, 128)}.items():
        a, out = (torch.zeros(m, x, device="cuda", dtype=torch.bfloat16) for x in (k, n))
        a_fp4, b_fp4 = (torch.zeros(rows, k // 2, device="cuda", dtype=torch.uint8) for rows in (m, n))
        a_sf, b_sf = (torch.zeros(-(-rows // 128) * 128, k // 16, device="cuda", dtype=torch.uint8) for rows in (m, n))
        weight = prepare_fp4_weight(b_fp4, b_sf, sf_layout=SfLayout.layout_128x4)
        found[f"mm_bf16_fp4{name}"] = functools.partial(mm_bf16_fp4, a, weight, out=out)
        found[f"mm_fp4{name}"] = functools.partial(mm_fp4, a_fp4, b_fp4.T, a_sf, b_sf.T, out=out)
    return found


def cache() -> dict[str, Call]:
    """Eight requests of one token, over pages of 16 tokens with two heads of 128."""
    q, k, v = (torch.zeros(8, 2, 128, device="cuda", dtype=torch.bfloat16) for _ in "qkv")
    scales = [torch.ones(1, device="cuda") for _ in "kv"]
    codes, sf = (torch.zeros(16, 2, 16, 2, x, device="cuda", dtype=torch.uint8) for x in (64, 8))
    pair, sf_pair, typed = codes.unbind(1), sf.unbind(1), sf.view(torch.float8_e4m3fn)
    slots = torch.arange(8, device="cuda")
    tables, lengths = slots.int()[:, None], torch.ones(8, device="cuda", dtype=torch.int32)
    workspace = torch.zeros(32 << 20, device="cuda", dtype=torch.uint8)
    read = [torch.zeros(8, 1, 2, 128, device="cuda", dtype=torch.bfloat16) for _ in "kv"]
    append, out = nvfp4_quantize_append_paged_kv_cache_with_slot_mapping, torch.empty_like(q)
    decode = {"out": out, "kv_layout": "NHD", "v_scale_layout": "linear"}
    return {
        "append, a cache in one tensor": lambda: append(k, v, slots, codes, typed, *scales),
        "append, numbers as scales": lambda: append(k, v, slots, codes, typed, 1.0, 2.0),
        "nvfp4_kv_dequantize_paged": lambda: nvfp4_kv_dequantize_paged(pair, sf_pair, tables, lengths, *scales, *read),
        "trtllm_batch_decode_with_kv_cache": lambda: trtllm_batch_decode_with_kv_cache(
            q,
            pair,
            workspace,
            tables,
            lengths,
            16,
            kv_cache_sf=sf_pair,
            **decode,  # type: ignore[arg-type]
        ),
    }


def attention() -> dict[str, Call]:
    """Decode attention of the same requests by its other names."""
    q, out = (torch.zeros(8, 2, 128, device="cuda", dtype=torch.bfloat16) for _ in "qo")
    pair, scales = (torch.zeros(16, 2, 16, 2, x, device="cuda", dtype=torch.uint8).unbind(1) for x in (64, 8))
    ends, lengths = (torch.arange(n, device="cuda", dtype=torch.int32) for n in (9, 8))
    workspace = torch.zeros(32 << 20, device="cuda", dtype=torch.uint8)
    wrapper = jitfp4.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD")
    wrapper.plan(ends, lengths, lengths + 1, 2, 2, 128, 16, q_data_type=torch.bfloat16, kv_data_type=torch.uint8)
    tables, given = lengths[:, None], {"kv_cache_sf": scales, "out": out}
    xqa = functools.partial(xqa_batch_decode_with_kv_cache, q, pair, workspace, tables, lengths, 16)
    return {
        "xqa_batch_decode_with_kv_cache": functools.partial(xqa, **given),  # type: ignore[arg-type]
        "BatchDecodeWithPagedKVCacheWrapper.run": functools.partial(wrapper.run, q, pair, **given),
        "BatchDecodeWithPagedKVCacheWrapper.run, numbers as scales": functools.partial(
            wrapper.run, q, pair, q_scale=0.5, k_scale=0.5, v_scale=2.0, **given
        ),
    }


LEFT_OUT = ("mxfp4_dequantize_host",)  # its tensors are on the CPU


def functions() -> dict[str, Call]:
    """A call of every public function and method, as the tests have it. Types are not called."""
    found: dict[str, Call] = {}
    with torch.device("cuda"):
        for name, make in good_calls().items():
            called = functools.reduce(getattr, name.split()[0].split("."), jitfp4)
            if not isinstance(called, type) and name not in LEFT_OUT:
                arguments = make()
                of = [arguments.pop("self")] if "self" in arguments else []
                found[f"good: {name}"] = functools.partial(called, *of, **arguments)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("bench/results/h200"))
    out = parser.parse_args().out
    us = host_us({name: call for name, call in calls().items() if call is not None})
    rows = [
        {
            "call": name,
            "host_us": round(time, 2),
            "torch_ops": round(additions, 2),
            "triton_launches": round(time / us[TRITON][0], 2) if TRITON in us else None,
        }
        for name, (time, additions) in us.items()
    ]
    for row in rows:
        print(f"{row['host_us']:8.2f} us {row['torch_ops']:6.2f} {row['triton_launches'] or 0:6.2f}  {row['call']}")
    write_results(out / "launch", rows, stamp())


if __name__ == "__main__":
    main()

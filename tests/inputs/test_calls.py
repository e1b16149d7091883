"""Bad input is a clear, typed error that names the argument, before anything is written; nothing is silently accepted.

The same table runs on the CPU, under the simulator and on a GPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import jitfp4
from jitfp4 import sim
from tests.inputs.calls import bad_calls, good_calls, verdict

ELSEWHERE = {
    **dict.fromkeys(("mm_bf16_fp4", "prepare_fp4_weight"), "test_gemm.py"),
    **dict.fromkeys(
        ("single_decode_with_kv_cache", "trtllm_batch_decode_with_kv_cache"), "test_attention_arguments.py"
    ),
    **dict.fromkeys(
        ("single_prefill_with_kv_cache", "trtllm_batch_context_with_kv_cache"), "test_prefill_arguments.py"
    ),
    **dict.fromkeys(
        (
            "nvfp4_kv_dequantize",
            "nvfp4_kv_dequantize_paged",
            "nvfp4_kv_quantize",
            "nvfp4_quantize_append_paged_kv_cache",
            "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping",
            "nvfp4_quantize_paged_kv_cache",
        ),
        "test_kv_append.py",
    ),
}
"""Functions whose arguments have a table of their own, below tests/families."""


@pytest.fixture(
    params=[
        "cpu",
        pytest.param("sm_90a", marks=[pytest.mark.sim, pytest.mark.compile]),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ]
)
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param.startswith("sm_"):
        with sim.device(request.param):
            yield "cpu"
    else:
        yield request.param


@pytest.mark.parametrize("name", good_calls())
def test_every_bad_value_of_every_argument(name: str, device: str) -> None:
    counts: Counter[str] = Counter()
    wrong = []
    for bad in bad_calls(name, device):
        found = verdict(bad)
        counts[found.split()[0]] += 1
        if found != "clear":
            wrong.append(f"{bad}: {found}")
    print(f"{name} on {device}: {dict(counts)}")  # noqa: T201
    assert not wrong, "\n".join(wrong)
    assert counts["clear"] > 10


@pytest.mark.parametrize("name", good_calls())
def test_the_good_call_is_good(name: str) -> None:
    getattr(jitfp4, name)(**good_calls()[name]())


def test_every_public_function_of_tensors_is_in_the_table() -> None:
    functions = {name for name in jitfp4.__all__ if name[0].islower()}
    assert functions - good_calls().keys() - ELSEWHERE.keys() == {"sim", "cache_info", "tune", "load_tactics"}
    for file in set(ELSEWHERE.values()):
        assert (Path(__file__).parents[1] / "families" / file).is_file()

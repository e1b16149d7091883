"""Every public function is remembered, whichever kernels it launches: its second call takes the short way."""

from __future__ import annotations

import sys
from types import FrameType

import pytest
import torch

from jitfp4 import replay
from jitfp4.kernel import kernels
from tests.inputs.calls import callables, function_of
from tests.inputs.repeated import CHECKED, NO_LAUNCH, archs_of, repeated_calls, without_outputs
from tests.support.launches import Launches, plain  # noqa: F401 - a fixture

CALLS = repeated_calls()


def launched(name: str, arch: str, monkeypatch: pytest.MonkeyPatch, *, outputs: bool) -> Launches:
    """The launches of two calls of a kind."""
    replay.forget()
    launches = Launches(monkeypatch, arch)
    for _ in range(2):
        arguments = CALLS[name]()
        function_of(name)(**arguments if outputs else without_outputs(name, arguments))
    return launches


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("outputs", [True, False], ids=["given", "allocated"])
@pytest.mark.parametrize(("name", "arch"), [(name, arch) for name in CALLS for arch in archs_of(name)])
def test_a_second_call_repeats_the_launches_of_the_first(
    name: str, arch: str, outputs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches = launched(name, arch, monkeypatch, outputs=outputs)
    if name in CHECKED:
        half = len(launches.first) // 2
        assert half and launches.first[:half] == launches.first[half:] and not launches.repeated
    else:
        assert bool(launches.first) == (name not in NO_LAUNCH)
        assert launches.repeated == launches.first


@pytest.mark.complete
@pytest.mark.usefixtures("plain")
def test_every_kernel_is_among_them(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[str] = set()
    for name in CALLS.keys() - CHECKED.keys():
        for arch in archs_of(name):
            seen.update(launched(name, arch, monkeypatch, outputs=True).repeated)
    assert seen == {kernel.name for kernel in kernels()}, "tests/inputs/repeated.py needs a call that reaches it"


@pytest.mark.complete
def test_every_public_function_is_here() -> None:
    of_no_tensors = {
        "CacheInfo",
        "NVFP44Over6ErrMode",
        "SfLayout",
        "load_tactics",
        "tune",
    }  # a result, enumerations, the tuner
    here = [function_of(name) for name in CALLS]
    missing = {name.split(".")[0] for name, function in callables() if function not in here}
    assert missing == of_no_tensors, "tests/inputs/good.py needs a call of it"


UNPACKED = {
    "BatchDecodeWithPagedKVCacheWrapper": "the wrapper's plan and lists",
    "BatchPrefillWithPagedKVCacheWrapper": "the wrapper's plan and lists",
    "causal_conv1d_fn": "metadata is left out",
    "fp4_quantize inversed": "the reciprocal of a scale",
    "mm_bf16_fp4": "an Fp4Weight",
    "mm_fp8_fp4": "an Fp4Weight",
    "nvfp4_quantize_append_paged_kv_cache": "whether the values of scales are known",
    "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping": "whether the values of scales are known",
    "trtllm_batch_decode_with_kv_cache fp4": "an FP4Tensor",
}
"""Functions that do something before a call is looked up, and what with."""


@pytest.mark.usefixtures("plain")
def test_a_second_call_runs_nothing_of_a_family(monkeypatch: pytest.MonkeyPatch) -> None:
    Launches(monkeypatch, "sm_90a")
    for name in CALLS.keys() - {*NO_LAUNCH, *CHECKED}:
        if {name, name.split(" ")[0].split(".")[0]} & UNPACKED.keys():
            continue
        replay.forget()
        arguments, ran = CALLS[name](), list[str]()
        function_of(name)(**arguments)

        def watch(frame: FrameType, event: str, _: object, ran: list[str] = ran) -> None:
            if event == "call" and "/families/" in frame.f_code.co_filename:
                ran.append(frame.f_code.co_name)

        sys.setprofile(watch)
        try:
            function_of(name)(**arguments)
        finally:
            sys.setprofile(None)
        assert not ran, name


@pytest.mark.usefixtures("plain")
def test_an_output_in_place_is_another_call(monkeypatch: pytest.MonkeyPatch) -> None:
    launches, given = Launches(monkeypatch, "sm_90a"), CALLS["causal_conv1d_update"]() | {"out": None}
    x = given["x"]
    for out in (torch.empty_like(x), x, torch.empty_like(x), x):
        function_of("causal_conv1d_update")(**given | {"out": out})
    assert (len(launches.first), len(launches.repeated)) == (2, 2)

"""A workspace is scratch: no result depends on what it held before, or on who else uses it between two calls."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from cuda.bindings import driver as cuda

import jitfp4
from jitfp4 import counters, driver, sim
from jitfp4.arch import Arch
from jitfp4.errors import LaunchError
from jitfp4.families.attention.kernels.decode import DecodeTactic
from jitfp4.families.attention.kernels.prefill import PrefillTactic
from jitfp4.families.attention.kernels.prefill_wgmma import WgmmaTactic
from jitfp4.families.attention.operation import ATTENTION
from tests.support.attention import Case, counted
from tests.support.gpu import needs_sm_90a
from tests.support.sample import some

CALLS: dict[str, tuple[Any, bool, dict[str, Any]]] = {
    "decode": (DecodeTactic(4, 3, 1), False, {"lengths": (300, 70), "kv_heads": 1}),
    "decode_groups": (DecodeTactic(8, 3, 1, 8), False, {"lengths": (300, 70), "kv_heads": 8, "kv_layout": "NHD"}),
    "prefill": (PrefillTactic(4, 16, 64, 1), True, {"lengths": (90,), "q_lens": (40,), "kv_heads": 1, "group": 2}),
    "prefill_wgmma": (
        WgmmaTactic(tile=64, stages=4),
        True,
        {"lengths": (760, 70), "q_lens": (9, 9), "head_dim": 64, "cache": torch.float8_e4m3fn, "kv_heads": 1},
    ),
}
"""By kernel: a tactic, whether the call is one of many query tokens, and a case whose items are divided."""
_FEW_SMS = dataclasses.replace(Arch.of("sm_90a"), num_sms=8)
_Fill = Callable[[torch.Tensor], object]
_PATTERNS: dict[str, _Fill] = {
    "0x00": lambda space: space.zero_(),
    "0x01": lambda space: space.fill_(1),
    "0x7f": lambda space: space.fill_(0x7F),
    "0xff": lambda space: space.fill_(0xFF),
    "random": lambda space: space.random_(0, 256),
    "nan": lambda space: space.view(torch.float32).fill_(torch.nan),
    "infinity": lambda space: space.view(torch.float32).fill_(torch.inf),
    "counting": lambda space: space.view(torch.int32).copy_(torch.arange(space.numel() // 4)),
    "old_results": lambda _: None,
}
_BYTES: dict[str, _Fill] = {f"{byte:#04x}": functools.partial(torch.Tensor.fill_, value=byte) for byte in range(256)}
_BOUND = {torch.float16: 1e-3, torch.bfloat16: 4e-3}


def _run(name: str, case: Case, space: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A call into poisoned outputs."""
    tactic, many, _ = CALLS[name]
    out = torch.full_like(case.query, torch.nan)
    with ATTENTION.forced(tactic):
        return (case.run_context if many else case.run)(workspace_buffer=space, out=out)


@pytest.mark.sim
@pytest.mark.compile
@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", CALLS)
def test_no_content_of_the_workspace_changes_a_bit(name: str, whole: bool) -> None:
    case = Case(**CALLS[name][2])
    with sim.device(_FEW_SMS), counted():
        expected = _run(name, case, case.workspace)
        case.check(expected, _BOUND)
        assert case.workspace.any() == (name != "prefill"), "items are divided"
        space = torch.zeros(1 << 22, dtype=torch.uint8)
        for pattern in some(3, _PATTERNS, whole=whole, name=lambda pattern: f"{name} {pattern}"):
            _PATTERNS[pattern](space)
            for got in (_run(name, case, space), _run(name, case, space)):
                same = [torch.equal(a, b) for a, b in zip(got, expected, strict=True)]
                assert all(same), f"{name} on a workspace of {pattern}"


@pytest.mark.parametrize(
    "place",
    [pytest.param("cpu", marks=[pytest.mark.sim, pytest.mark.compile]), pytest.param("cuda", marks=pytest.mark.gpu)],
)
def test_two_wrappers_and_a_stranger_share_a_buffer(place: str) -> None:
    """As SGLang's one buffer of torch.empty for wrappers of this library and of another one."""
    space = torch.empty(1 << 22 if place == "cpu" else 128 << 20, dtype=torch.uint8, device=place).random_(0, 256)
    length, pages = (300, 19) if place == "cpu" else (3004, 188)
    decode = Case(lengths=(length,), kv_heads=1, kv_layout="NHD", device=place)
    prefill = Case(lengths=(length,), q_lens=(20,), kv_heads=1, kv_layout="NHD", device=place)
    wrappers = jitfp4.BatchDecodeWithPagedKVCacheWrapper(space), jitfp4.BatchPrefillWithPagedKVCacheWrapper(space)
    ends, last = (torch.tensor(x, dtype=torch.int32, device=place) for x in ([0, pages], [12]))
    with ExitStack() as stack:
        if place == "cpu":
            stack.enter_context(sim.device(_FEW_SMS))
            stack.enter_context(counted())
        lists = ends, decode.block_tables[0, :pages].contiguous(), last
        wrappers[0].plan(*lists, 8, 1, 128, 16, q_data_type="bfloat16", kv_data_type=torch.uint8, sm_scale=decode.bmm1)
        lists = prefill.cum_seq_lens_q, ends, prefill.block_tables[0, :pages].contiguous(), last
        wrappers[1].plan(
            *lists, 8, 1, 128, 16, causal=True, q_data_type="bfloat16", kv_data_type=torch.uint8, sm_scale=prefill.bmm1
        )
        for byte in (None, 0x7F, 0xFF):
            for wrapper, case in zip(wrappers, (decode, prefill), strict=True):
                if byte is not None:
                    space.fill_(byte)
                got = wrapper.run(
                    case.query, case.kv_cache, v_scale=case.bmm2, return_lse=True, kv_cache_sf=case.kv_cache_sf
                )
                case.check(got, _BOUND)


# ---- counters --------------------------------------------------------------------------------------------------------


@pytest.fixture
def fake_device() -> Iterator[None]:
    """Memory of CUDA devices is memory of this process, and no counters are known."""
    with (
        mock.patch("jitfp4.driver.Memory", lambda _device, size: torch.zeros(size, dtype=torch.uint8)),
        mock.patch.object(counters, "on_device", mock.MagicMock()),
        mock.patch.dict(counters._sets, clear=True),
        mock.patch.dict(counters._free, clear=True),
    ):
        yield


def _workspace(address: int, device: int = 0) -> Any:
    return SimpleNamespace(
        is_cuda=True, device=torch.device("cpu"), get_device=lambda: device, data_ptr=lambda: address
    )


@pytest.mark.usefixtures("fake_device")
def test_counters_belong_to_an_address() -> None:
    workspaces = [_workspace(4096 * i, device) for i in range(40) for device in (0, 1)]
    first = [counters.of(space) for space in workspaces]
    assert len({each.data_ptr() for each in first}) == len(workspaces)
    assert all(counters.of(space) is each for space, each in zip(workspaces, first, strict=True))
    assert all(each.numel() == counters.COUNTER_BYTES and each.data_ptr() % 16 == 0 for each in first)


@pytest.mark.usefixtures("fake_device")
def test_counters_beyond_the_bound_are_cleared_for_each_launch() -> None:
    with mock.patch.object(counters, "_MOST", 2):
        kept = [counters.of(_workspace(address)) for address in (0, 16)]
        counters.of(_workspace(32)).fill_(1)
        assert not counters.of(_workspace(32)).any()
        assert [counters.of(_workspace(address)) for address in (0, 16)] == kept
    assert len(counters._sets) == 2


class _Driver:
    """The functions of the driver by name; each notes its call, and ``refused`` fails."""

    def __init__(self, refused: str = "") -> None:
        self.called: list[str] = []
        self.refused = refused

    def __getattr__(self, name: str) -> Any:
        return functools.partial(self._call, name) if name.startswith("cu") else getattr(cuda, name)

    def _call(self, name: str, *args: Any) -> tuple[Any, ...]:
        self.called.append(f"{name} {args[0].name}" if name.startswith("cuThread") else name)
        failed = name == self.refused
        status = cuda.CUresult.CUDA_ERROR_OUT_OF_MEMORY if failed else cuda.CUresult.CUDA_SUCCESS
        return (status, {"cuThreadExchangeStreamCaptureMode": _GLOBAL, "cuMemAlloc": 4096}.get(name, 1))


_GLOBAL = cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
_EXCHANGED = [f"cuThreadExchangeStreamCaptureMode CU_STREAM_CAPTURE_MODE_{mode}" for mode in ("RELAXED", "GLOBAL")]


def test_memory_is_allocated_and_cleared_whatever_is_captured() -> None:
    fake = _Driver()
    with mock.patch.object(driver, "cuda", fake), mock.patch.object(driver, "Device"):
        memory = driver.Memory(0, 100)
    work = ["cuMemAlloc", "cuStreamCreate", "cuMemsetD8Async", "cuStreamSynchronize", "cuStreamDestroy"]
    assert fake.called == [_EXCHANGED[0], *work, _EXCHANGED[1]]
    assert memory.__cuda_array_interface__["data"] == (4096, False)
    fake = _Driver("cuMemAlloc")
    with (
        mock.patch.object(driver, "cuda", fake),
        mock.patch.object(driver, "Device"),
        pytest.raises(LaunchError, match="cuMemAlloc: CUDA_ERROR_OUT_OF_MEMORY"),
    ):
        driver.Memory(0, 100)
    assert fake.called == [_EXCHANGED[0], "cuMemAlloc", _EXCHANGED[1]]


# ---- on a GPU --------------------------------------------------------------------------------------------------------


def _divided(name: str) -> Case:
    """A case whose items are divided on a whole GPU."""
    lengths = (40000, 3000) if name != "prefill" else (300,)
    return Case(**(CALLS[name][2] | {"lengths": lengths[: len(CALLS[name][2]["lengths"])], "device": "cuda"}))


@pytest.mark.gpu
@pytest.mark.parametrize("name", CALLS)
def test_no_content_of_the_workspace_changes_a_bit_on_a_gpu(name: str) -> None:
    if name.endswith("wgmma"):
        needs_sm_90a()
    case = _divided(name)
    expected = _run(name, case, case.workspace)
    assert case.workspace.any() == (name != "prefill"), "items are divided"
    space = torch.empty(32 << 20, dtype=torch.uint8, device="cuda")
    for pattern, fill in (_BYTES | _PATTERNS).items():
        fill(space)
        for _ in range(3):
            got = _run(name, case, space)
            assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True)), pattern


def _captured(name: str, case: Case, space: torch.Tensor) -> tuple[torch.cuda.CUDAGraph, Any]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = _run(name, case, space)
    return graph, got


@pytest.mark.gpu
@pytest.mark.parametrize("name", CALLS)
def test_graphs_run_beside_each_other_on_dirty_workspaces(name: str) -> None:
    """Workspaces that are new to the library when they are captured; replayed at once, on streams of their own."""
    if name.endswith("wgmma"):
        needs_sm_90a()
    case = _divided(name)
    expected = _run(name, case, case.workspace)
    spaces = [torch.empty(32 << 20, dtype=torch.uint8, device="cuda").fill_(0xFF) for _ in range(3)]
    graphs = [_captured(name, case, space) for space in spaces]
    streams = [torch.cuda.Stream() for _ in graphs]
    for pattern, fill in _PATTERNS.items():
        for space in spaces:
            fill(space)
        torch.cuda.synchronize()
        for _ in range(20):
            for stream, (graph, _) in zip(streams, graphs, strict=True):
                with torch.cuda.stream(stream):
                    graph.replay()
            eager = _run(name, case, case.workspace)
        torch.cuda.synchronize()
        for got in (eager, *(got for _, got in graphs)):
            assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True)), pattern


@pytest.mark.gpu
def test_remembered_calls_use_the_counters_of_their_workspace() -> None:
    """Equal calls on two streams, each with a workspace of its own, many times at once."""
    case = Case(lengths=(5000, 700), kv_heads=8, device="cuda")
    expected = case.run()
    spaces = [torch.empty(32 << 20, dtype=torch.uint8, device="cuda").fill_(0x7F) for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in spaces]
    torch.cuda.synchronize()
    results = []
    for _ in range(100):
        for stream, space in zip(streams, spaces, strict=True):
            with torch.cuda.stream(stream):
                results.append(case.run(workspace_buffer=space))
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for got in results for a, b in zip(got, expected, strict=True))

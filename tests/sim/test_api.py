"""Launching: arguments, limits, the device context, statistics; and public calls on every simulated architecture."""

from __future__ import annotations

import gc
import threading
import weakref

import numpy as np
import pytest
import torch

import jitfp4
from jitfp4 import sim
from jitfp4.arch import ARCHS
from jitfp4.errors import ArgumentError, ArgumentTypeError, SimLimitError
from jitfp4.sim.machine import Machine
from jitfp4.spec import Geometry
from tests.sim.cuda import compiled, launch

pytestmark = [pytest.mark.sim, pytest.mark.compile]

SCALE = """
extern "C" __global__ void __launch_bounds__(128) kernel(const float* x, double* y, float f, long long n, int k) {
  if (threadIdx.x < n) y[threadIdx.x] = x[threadIdx.x] * f + k;
}
"""


def test_arguments_take_the_width_of_their_parameters() -> None:
    x = torch.arange(40, dtype=torch.float32)[4:36]
    y = np.zeros(32)
    for f, n, k in ((0.5, 32, -3), (np.float32(0.5), np.int64(32), np.int32(-3))):
        y[:] = 0
        launch(SCALE, [x, y, f, n, k])
        assert (y == x.numpy() * 0.5 - 3).all()


def test_torch_tensors_are_changed_in_place_within_their_view() -> None:
    source = 'extern "C" __global__ void kernel(unsigned short* x) { x[threadIdx.x * 3] = 0x3F80; }'
    whole = torch.zeros(40, 3, dtype=torch.bfloat16)
    launch(source, [whole[4:36, 1]])
    assert whole[4:36, 1].eq(1).all() and whole.sum() == 32


def test_several_views_of_one_storage_alias() -> None:
    source = 'extern "C" __global__ void kernel(const int* x, int* y) { y[threadIdx.x] = x[threadIdx.x] + 1; }'
    both = np.zeros(64, np.int32)
    launch(source, [both[:32], both[32:]])
    launch(source, [both[32:], both[:32]])
    assert both[:32].tolist() == [2] * 32 and both[32:].tolist() == [1] * 32


def test_a_batch_leaves_no_memory_to_a_garbage_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[Machine]] = []
    run = Machine.run
    monkeypatch.setattr(Machine, "run", lambda self: (made.append(weakref.ref(self)), run(self))[1])
    source = """extern "C" __global__ void kernel(int* x) {
      __shared__ int y[32];
      y[threadIdx.x] = x[threadIdx.x];
      __syncthreads();
      x[threadIdx.x] = y[31 - threadIdx.x];
    }"""
    gc.disable()
    try:
        sim.run(compiled(source, "sm_90a"), [np.arange(32, dtype=np.int32)], Geometry((1, 1, 1), (32, 1, 1)), "sm_90a")
        assert [ref() for ref in made] == [None]
    finally:
        gc.enable()


def test_a_program_that_does_not_end_is_an_error() -> None:
    source = 'extern "C" __global__ void kernel(volatile int* x) { while (*x == 0) {} *x = 2; }'
    geometry = Geometry((1, 1, 1), (32, 1, 1))
    ended = sim.run(compiled(source, "sm_90a"), [np.ones(1, np.int32)], geometry, "sm_90a", limit=10_000)
    assert 0 < ended.issued < 10_000
    with pytest.raises(SimLimitError, match=r"still runs after 1\d{4} instructions\n  thread \(0, 0, 0\) of CTA"):
        sim.run(compiled(source, "sm_90a"), [np.zeros(1, np.int32)], geometry, "sm_90a", limit=10_000)


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        (["text", 0], ArgumentTypeError, r"args\[0\]: got str"),
        ([np.zeros(4, np.float32)[::-1], 0], ArgumentError, "without negative strides"),
        ([np.zeros(4, np.float32)], ArgumentError, "2 arguments"),
        ([np.zeros(4, np.float32), 1 << 32], ArgumentError, r"args\[1\]: got 4294967296; allowed: a number of 4 bytes"),
        ([np.zeros(4, np.float32), np.int64(-(1 << 31) - 1)], ArgumentError, r"args\[1\]"),
        ([np.zeros(4, np.float32), 1e39], ArgumentError, r"args\[1\]: got 1e\+39"),
    ],
)
def test_arguments_that_cannot_be_passed(args: list[object], error: type[Exception], message: str) -> None:
    source = 'extern "C" __global__ void kernel(const float* x, int n) {}'
    with pytest.raises(error, match=message):
        launch(source, args)


@pytest.mark.parametrize(
    ("geometry", "message"),
    [
        (Geometry((1, 1, 1), (256, 1, 1)), "geometry.block"),
        (Geometry((0, 1, 1), (32, 1, 1)), "geometry.grid"),
        (Geometry((1, 1, 1), (32, 1, 1), shared_bytes=300_000), "geometry.shared_bytes"),
        (Geometry((3, 1, 1), (32, 1, 1), (2, 1, 1)), "geometry.grid"),
    ],
)
def test_launches_that_the_driver_would_refuse(geometry: Geometry, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        sim.run(compiled(SCALE, "sm_90a"), [np.zeros(1, np.float32), np.zeros(1), 0.0, 1, 1], geometry, "sm_90a")


def test_ptx_runs_on_its_own_architecture_only() -> None:
    with pytest.raises(ArgumentError, match="sm_90a, which the PTX targets"):
        sim.run(compiled(SCALE, "sm_90a"), [], Geometry((1, 1, 1), (1, 1, 1)), "sm_100a")


def test_results_do_not_depend_on_the_batch() -> None:
    source = """
    extern "C" __global__ void kernel(int* y) {
      y[blockIdx.x * 64 + threadIdx.x] = blockIdx.x * 1000 + threadIdx.x + gridDim.x;
    }
    """
    geometry = Geometry((7, 1, 1), (64, 1, 1))
    results = []
    for batch in (1, 64, 200, 8192):
        y = np.zeros((7, 64), np.int32)
        sim.run(compiled(source, "sm_90a"), [y], geometry, "sm_90a", batch=batch)
        results.append(y)
    assert all((y == np.arange(7)[:, None] * 1000 + np.arange(64) + 7).all() for y in results)


def test_statistics_count_thread_instructions() -> None:
    y = np.zeros(64, np.int32)
    source = 'extern "C" __global__ void kernel(int* y) { if (threadIdx.x < 40) y[threadIdx.x] = 1; }'
    stats = launch(source, [y], block=64)
    assert stats.opcodes["setp.gt.u32"] == 64 and stats.opcodes["st.global.u32"] == 40
    assert stats.instructions == stats.opcodes.total() and stats.seconds > 0


def test_the_device_is_a_property_of_the_context() -> None:
    assert sim.active_device() is None
    seen = []
    with sim.device("sm_90a") as outer, sim.device(ARCHS["sm_100a"]):
        thread = threading.Thread(target=lambda: seen.append(sim.active_device()))
        thread.start()
        thread.join()
        assert sim.active_device() == (ARCHS["sm_100a"], False, None, None) and outer.name == "sm_90a"
    assert sim.active_device() is None and seen == [None]
    with pytest.raises(ArgumentError, match="sm_1"), sim.device("sm_1"):
        pass


@pytest.mark.parametrize("arch", ARCHS)
def test_a_public_function_simulates_to_the_reference(arch: str) -> None:
    torch.manual_seed(0)
    a = torch.randn(9, 96, dtype=torch.bfloat16) * 3
    scale = torch.tensor([100.0])
    want = jitfp4.nvfp4_quantize(a, scale)
    with sim.device(arch):
        got = jitfp4.nvfp4_quantize(a, scale)
    assert all(torch.equal(g.view(torch.uint8), w.view(torch.uint8)) for g, w in zip(got, want, strict=True))


def test_a_swapped_nibble_changes_the_result() -> None:
    source = """
    extern "C" __global__ void kernel(const float* x, unsigned char* y) {
      unsigned r;
      asm("{.reg .b8 t; cvt.rn.satfinite.e2m1x2.f32 t, %1, %2; cvt.u32.u8 %0, t;}"
          : "=r"(r) : "f"(x[2 * threadIdx.x + FIRST]), "f"(x[2 * threadIdx.x + SECOND]));
      y[threadIdx.x] = r;
    }
    """
    x = np.arange(64, dtype=np.float32) % 7
    y, swapped = np.zeros(32, np.uint8), np.zeros(32, np.uint8)
    launch(source.replace("FIRST", "1").replace("SECOND", "0"), [x, y], arch="sm_100a")
    launch(source.replace("FIRST", "0").replace("SECOND", "1"), [x, swapped], arch="sm_100a")
    codes = np.array([0, 2, 4, 5, 6, 6, 7], np.uint8)[x.astype(int)]  # 5 is halfway between 4 and 6: to even, 4
    assert (y == codes[0::2] | codes[1::2] << 4).all() and (y != swapped).any()

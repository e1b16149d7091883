"""Branches, loops, calls and exits of threads that disagree."""

from __future__ import annotations

import numpy as np
import pytest

from jitfp4.errors import SimError, SimParseError
from tests.sim.cuda import launch
from tests.sim.snippets import evaluate

pytestmark = pytest.mark.sim

A = np.random.default_rng(0).integers(0, 200, 700, dtype=np.uint32)


def test_threads_take_their_own_side_of_a_branch_and_meet_again() -> None:
    body = """
    setp.lt.u32 %p, %a, 100; @%p bra small;
    add.u32 %d, %a, 1000; bra join;
    small: mul.lo.u32 %d, %a, 2;
    join: add.u32 %d, %d, 7;
    """
    assert (evaluate(body, A, out=np.uint32) == np.where(A < 100, 2 * A, A + 1000) + 7).all()


def test_loops_run_a_different_number_of_times() -> None:
    """Collatz steps: every thread leaves the loop on its own."""
    body = """
    .reg .b32 %x, %odd; mov.u32 %d, 0; add.u32 %x, %a, 1;
    loop: setp.le.u32 %p, %x, 1; @%p bra done;
    and.b32 %odd, %x, 1; setp.eq.u32 %q, %odd, 1;
    @%q mad.lo.u32 %x, %x, 3, 1;
    @!%q shr.u32 %x, %x, 1;
    add.u32 %d, %d, 1; bra loop;
    done:
    """

    def steps(n: int) -> int:
        count = 0
        while n > 1:
            n, count = (3 * n + 1 if n % 2 else n // 2), count + 1
        return count

    assert evaluate(body, A, out=np.uint32).tolist() == [steps(int(a) + 1) for a in A]


def test_guarded_instructions_leave_other_threads_alone() -> None:
    body = "mov.u32 %d, 5; setp.gt.u32 %p, %a, 50; @%p add.u32 %d, %d, %a; @!%p mov.u32 %d, 1;"
    assert (evaluate(body, A, out=np.uint32) == np.where(A > 50, A + 5, 1)).all()


def test_indexed_branches() -> None:
    body = """
    .reg .b32 %k; and.b32 %k, %a, 3; mov.u32 %d, 0;
    targets: .branchtargets zero, one, two, three;
    brx.idx %k, targets;
    three: add.u32 %d, %d, 8;
    two: add.u32 %d, %d, 4;
    one: add.u32 %d, %d, 2;
    zero: add.u32 %d, %d, 1;
    """
    assert (evaluate(body, A, out=np.uint32) == np.array([1, 3, 7, 15])[A & 3]).all()


def test_inline_assembly_scopes_hide_names_and_labels() -> None:
    body = """
    .reg .b32 %t; mov.u32 %t, 1;
    { .reg .b32 %t; mov.u32 %t, 10; again: add.u32 %t, %t, 5; setp.lt.u32 %p, %t, 18; @%p bra again; mov.u32 %d, %t; }
    { .reg .b32 %t; mov.u32 %t, 50; setp.lt.u32 %p, %a, 3; @%p bra again; add.u32 %d, %d, %t; again: }
    add.u32 %d, %d, %t;
    """
    assert (evaluate(body, A, out=np.uint32) == np.where(A < 3, 21, 71)).all()


def test_calls_pass_parameters_and_return() -> None:
    source = """
    __device__ __noinline__ float chain(float a, float b, int n) {
      float s = 0;
      for (int i = 0; i < n; i++) s = s * a + b;
      return s;
    }
    extern "C" __global__ void kernel(float* y) {
      int t = threadIdx.x;
      y[t] = (t & 1) ? chain(t * .5f, 2.f, t & 7) : chain(.25f, t, 3) + 1.f;
    }
    """

    def chain(a: float, b: float, n: int) -> np.float32:
        s = np.float32(0)
        for _ in range(n):
            s = s * np.float32(a) + np.float32(b)
        return s

    y = np.zeros(64, np.float32)
    launch(source, [y], block=64)
    want = [chain(t * 0.5, 2, t & 7) if t & 1 else chain(0.25, t, 3) + np.float32(1) for t in range(64)]
    assert y.tolist() == want


def test_structures_on_the_stack_live_in_local_memory() -> None:
    source = """
    extern "C" __global__ void kernel(const int* pick, int* y) {
      int row[8];
      for (int i = 0; i < 8; i++) row[i] = i * int(threadIdx.x);
      row[pick[threadIdx.x] & 7] += 1000;
      y[threadIdx.x] = row[pick[threadIdx.x + 1] & 7];
    }
    """
    pick = np.random.default_rng(1).integers(0, 8, 33).astype(np.int32)
    y = np.zeros(32, np.int32)
    launch(source, [pick, y])
    t = np.arange(32)
    assert (y == pick[1:] * t + 1000 * (pick[1:] == pick[:-1])).all()


def test_a_spinning_thread_lets_the_others_work() -> None:
    source = """
    extern "C" __global__ void kernel(volatile int* flag, int* y) {
      if (threadIdx.x == 0) { while (flag[0] == 0) {} y[0] = flag[0]; }
      else if (threadIdx.x == 33) { for (int i = 0; i < 1000; i++) y[1] += i; __threadfence(); flag[0] = 7; }
    }
    """
    flag, y = np.zeros(1, np.int32), np.zeros(2, np.int32)
    launch(source, [flag, y], block=64)
    assert y.tolist() == [7, 499500]


def test_trap_is_an_error_of_the_threads_that_reach_it() -> None:
    with pytest.raises(SimError, match=r"(?s)trap.*thread"):
        evaluate("setp.gt.u32 %p, %a, 190; @%p trap; mov.u32 %d, 1;", A, out=np.uint32)


def test_a_call_out_of_the_module_is_an_error_of_its_thread() -> None:
    source = """
    extern "C" __device__ int printf(const char*, ...);
    extern "C" __global__ void kernel(const int* x) {
      if (x[threadIdx.x] < 0) printf("negative");
    }
    """
    x = np.zeros(32, np.int32)
    launch(source, [x])
    x[9] = -1
    with pytest.raises(SimError, match=r"(?s)call of vprintf.*thread \(9, 0, 0\)"):
        launch(source, [x])


def test_special_registers_number_the_grid() -> None:
    source = """
    extern "C" __global__ void kernel(int* y) {
      int t = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
      int* row = y + 4 * (blockIdx.x * 24 + t);
      unsigned lane, warp;
      asm("mov.u32 %0, %%laneid;" : "=r"(lane)); asm("mov.u32 %0, %%warpid;" : "=r"(warp));
      row[0] = threadIdx.y; row[1] = threadIdx.z; row[2] = lane; row[3] = gridDim.x * 100 + warp;
    }
    """
    y = np.zeros((3 * 24, 4), np.int32)
    launch(source, [y], grid=3, block=(4, 3, 2))
    t = np.tile(np.arange(24), 3)
    assert (y == np.stack([t // 4 % 3, t // 12, t, np.full(72, 300)], 1)).all()


def test_an_unknown_label_is_an_error() -> None:
    with pytest.raises(SimParseError, match="unknown label"):
        evaluate("bra nowhere; mov.u32 %d, 0;", A, out=np.uint32)

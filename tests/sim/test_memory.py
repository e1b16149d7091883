"""State spaces: vectors, bounds, alignment, initialisation, generic addresses and atomics."""

from __future__ import annotations

import numpy as np
import pytest

from jitfp4 import sim
from jitfp4.errors import SimMemoryError, SimParseError
from jitfp4.spec import Geometry
from tests.sim.cuda import launch
from tests.sim.snippets import evaluate
from tests.sim.test_integer import values

pytestmark = pytest.mark.sim

I32 = np.arange(64, dtype=np.uint32)
SHARED = ".shared .align 32 .b8 buffer[1024];"


def shared_kernel(body: str) -> str:
    return f".reg .b32 %at, %x, %y; .reg .b64 %w; mov.u32 %at, buffer; mad.lo.u32 %at, %a, 4, %at; {body}"


def test_shared_memory_is_private_to_a_cta() -> None:
    body = shared_kernel("st.shared.u32 [%at], %i; bar.sync 0; ld.shared.u32 %d, [%at];")
    index = np.arange(512, dtype=np.uint32)
    got = evaluate(body, index % 256, out=np.uint32, module=SHARED)
    assert (got == index).all()


def test_bytes_and_halves_extend_by_their_type() -> None:
    body = shared_kernel("st.shared.u32 [%at], %b; ld.shared.{KIND} %d, [%at];")
    b = values(32, 1)[:64]
    low8, low16 = (b & 0xFF).astype(np.uint8), (b & 0xFFFF).astype(np.uint16)
    for kind, want in (("u8", low8), ("s8", low8.view(np.int8)), ("u16", low16), ("s16", low16.view(np.int16))):
        got = evaluate(body.replace("{KIND}", kind), I32, b, out=np.int32, module=SHARED)
        assert (got == want.astype(np.int32)).all(), kind


def test_generic_addresses_reach_every_space() -> None:
    body = """
    .local .align 4 .b32 %slot;
    .reg .b64 %s, %l, %g; .reg .b32 %x, %y, %z;
    mov.u64 %s, buffer; cvta.shared.u64 %s, %s; mad.lo.u64 %s, %index, 4, %s; st.u32 [%s], %a;
    mov.u64 %l, %slot; cvta.local.u64 %l, %l; st.u32 [%l], %b;
    ld.param.u64 %g, [in_a]; mad.lo.u64 %g, %index, 4, %g;
    ld.u32 %x, [%s]; ld.u32 %y, [%l]; ld.u32 %z, [%g];
    isspacep.shared %p, %s; isspacep.global %q, %g; and.pred %p, %p, %q; isspacep.local %q, %l; and.pred %p, %p, %q;
    add.u32 %x, %x, %y; add.u32 %x, %x, %z; selp.u32 %d, %x, 0, %p;
    """
    a, b = I32 * 3, I32 * 5 + 1
    assert (evaluate(body, a, b, out=np.uint32, module=SHARED) == 2 * a + b).all()


def test_vectors_of_128_and_256_bits() -> None:
    source = np.arange(128, dtype=np.uint32)
    body = """
    .reg .b64 %at, %row; .reg .b32 %x<8>;
    ld.param.u64 %at, [in_b]; and.b64 %row, %index, 15; mad.lo.u64 %at, %row, 32, %at;
    ld.global.v8.b32 {%x0, %x1, %x2, %x3, %x4, %x5, %x6, %x7}, [%at];
    add.u32 %d, %x0, %x7;
    ld.global.nc.L1::no_allocate.L2::128B.v4.b32 {%x0, _, %x2, %x3}, [%at+16];
    add.u32 %d, %d, %x3;
    """
    got = evaluate(body, np.arange(128, dtype=np.uint32), source, out=np.uint32)
    row = np.arange(128) % 16 * 8
    assert (got == row + 2 * (row + 7)).all()


def test_module_constants_and_globals_are_initialised() -> None:
    module = """
    .const .align 4 .b32 table[4] = {10, 20, 0x1E, -1};
    .global .align 4 .f32 half = 0f3F000000;
    .global .align 4 .b8 table2[8] = {1, 0, 0, 0, 7};
    .global .align 8 .u64 pointer = generic(table2)+4;
    """
    body = """
    .reg .b64 %at, %row; .reg .b32 %x, %y;
    mov.u64 %at, table; and.b64 %row, %index, 3; mad.lo.u64 %at, %row, 4, %at; ld.const.u32 %d, [%at];
    ld.global.u32 %x, [half]; add.u32 %d, %d, %x;
    ld.global.u64 %at, [pointer]; ld.global.u32 %y, [%at]; add.u32 %d, %d, %y;
    """
    got = evaluate(body, I32, out=np.uint32, module=module)
    table = np.array([10, 20, 30, 0xFFFFFFFF], np.uint32)[np.arange(64) % 4]
    assert (got == table + np.uint32(0x3F000000) + np.uint32(7)).all()


# Faults


def test_a_store_past_a_buffer_names_thread_instruction_and_line() -> None:
    x = np.zeros(100, np.float32)
    source = """
    extern "C" __global__ void kernel(float* x, int n) {
      int i = blockIdx.x * blockDim.x + threadIdx.x;
      if (i <= n) x[i] = 1.0f;
    }
    """
    with pytest.raises(SimMemoryError) as caught:
        launch(source, [x, 100], grid=2, block=64)
    message = str(caught.value)
    assert "global buffer args[0] float32[100]" in message
    assert "thread (36, 0, 0) of CTA (1, 0, 0)" in message
    assert "st.global" in message
    assert "kernel.cu line" in message


def test_a_load_before_a_buffer_is_found() -> None:
    source = 'extern "C" __global__ void kernel(const int* x, int* y) { y[threadIdx.x] = x[int(threadIdx.x) - 1]; }'
    with pytest.raises(SimMemoryError, match=r"no buffer"):
        launch(source, [np.zeros(32, np.int32), np.zeros(32, np.int32)])


def test_buffers_do_not_touch() -> None:
    """An index that runs from one argument into the next is caught, however large it is."""
    source = 'extern "C" __global__ void kernel(const int* x, int* y, long long i) { y[0] = x[i]; }'
    for index in (8, 1 << 20, 1 << 33):
        with pytest.raises(SimMemoryError):
            launch(source, [np.zeros(8, np.int32), np.zeros(8, np.int32), index], block=1)


def test_misaligned_vectors_are_found() -> None:
    source = """
    extern "C" __global__ void kernel(const char* x, float4* y) { y[0] = *reinterpret_cast<const float4*>(x + 8); }
    """
    with pytest.raises(SimMemoryError, match="of 16 bytes is not aligned"):
        launch(source, [np.zeros(64, np.uint8), np.zeros(4, np.float32)], block=1)


def test_views_keep_their_alignment_and_bounds() -> None:
    whole = np.zeros(64, np.float32)
    source = 'extern "C" __global__ void kernel(float4* x) { x[threadIdx.x] = make_float4(1, 2, 3, 4); }'
    launch(source, [whole[16:32]], block=4)
    assert whole[:16].sum() == 0 and whole[16:20].tolist() == [1, 2, 3, 4] and whole[32:].sum() == 0
    with pytest.raises(SimMemoryError, match="not aligned"):
        launch(source, [whole[17:33]], block=4)
    with pytest.raises(SimMemoryError, match="outside"):
        launch(source, [whole[16:31]], block=4)


def test_uninitialised_shared_memory_is_not_read() -> None:
    body = shared_kernel("setp.lt.u32 %p, %i, 63; @%p st.shared.u32 [%at], %i; bar.sync 0; ld.shared.u32 %d, [%at];")
    with pytest.raises(SimMemoryError, match=r"(?s)read of shared memory which nothing wrote.*thread \(63, 0, 0\)"):
        evaluate(body, I32, out=np.uint32, module=SHARED)


def test_shared_accesses_stay_inside_the_declared_bytes() -> None:
    body = shared_kernel("st.shared.u32 [%at+1020], %i; mov.u32 %d, 0;")
    with pytest.raises(SimMemoryError, match="shared access of 4 bytes is outside"):
        evaluate(body, I32, out=np.uint32, module=SHARED)


def test_constant_memory_is_not_written() -> None:
    with pytest.raises(SimMemoryError, match="store to const memory"):
        evaluate(
            ".reg .b64 %at; mov.u64 %at, table; cvta.const.u64 %at, %at; st.u32 [%at], %a; mov.u32 %d, 0;",
            I32,
            out=np.uint32,
            module=".const .align 4 .b32 table[4];",
        )


def test_dynamic_shared_memory_has_the_launched_size() -> None:
    source = """
    extern __shared__ __align__(16) int cells[];
    extern "C" __global__ void kernel(int* y, int last) {
      __shared__ int fixed[4];
      if (threadIdx.x < 4) fixed[threadIdx.x] = 5;
      cells[threadIdx.x] = threadIdx.x;
      if (last) cells[32] = 1;
      __syncthreads();
      y[threadIdx.x] = cells[31 - threadIdx.x] + fixed[threadIdx.x & 3];
    }
    """
    y = np.zeros(32, np.int32)
    launch(source, [y, 0], shared=128)
    assert (y == 36 - np.arange(32)).all()
    with pytest.raises(SimMemoryError, match="shared access"):
        launch(source, [y, 1], shared=128)


# Atomics


@pytest.mark.parametrize(
    ("op", "kind"), [("add", "u32"), ("min", "s32"), ("max", "u32"), ("and", "b32"), ("or", "b32"), ("xor", "b32")]
)
def test_atomics_at_one_address_take_turns(op: str, kind: str) -> None:
    b = values(32, 2)[:64]
    body = f"""
    .reg .b64 %at; .reg .b32 %old;
    ld.param.u64 %at, [in_a]; atom.relaxed.gpu.global.{op}.{kind} %old, [%at], %b; mov.b32 %d, %old;
    """
    cell = np.full(64, 0x0F0F0F0F, np.uint32)
    got = evaluate(body, cell, b, out=np.uint32)
    dtype = np.int32 if kind[0] == "s" else np.uint32
    fn = {
        "add": np.add,
        "min": np.minimum,
        "max": np.maximum,
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
    }
    steps = fn[op].accumulate(np.concatenate([np.array([0x0F0F0F0F], np.uint32), b]).view(dtype), dtype=dtype)
    assert (got.view(dtype) == steps[:64]).all()
    assert cell.view(dtype)[0] == steps[64]


def test_compare_and_swap_elects_one_thread() -> None:
    source = """
    extern "C" __global__ void kernel(int* lock, int* winner, int* count) {
      int old = atomicCAS(lock, -1, int(threadIdx.x));
      if (old == -1) winner[0] = threadIdx.x;
      atomicInc(reinterpret_cast<unsigned*>(count), 9u);
      atomicExch(count + 1, int(threadIdx.x));
      atomicDec(reinterpret_cast<unsigned*>(count + 2), 5u);
    }
    """
    lock, winner, count = np.array([-1], np.int32), np.array([-1], np.int32), np.zeros(3, np.int32)
    launch(source, [lock, winner, count])
    assert lock[0] == winner[0] >= 0
    expected = 0
    for _ in range(32):
        expected = 5 if expected == 0 else expected - 1
    assert count.tolist() == [32 % 10, 31, expected]


def test_float_and_half_reductions() -> None:
    body = """
    .reg .b64 %at;
    ld.param.u64 %at, [in_c];
    red.global.add.f32 [%at], %a;
    red.global.add.noftz.f16x2 [%at+4], %b;
    red.global.v2.f32.add [%at+8], {%a, %a};
    mov.u32 %d, 0;
    """
    a = np.arange(64, dtype=np.float32)
    b = np.full(64, 0x3C003800, np.uint32)
    cells = np.zeros(64, np.float32)
    text = body.replace("red.global.v2.f32.add", "red.global.add.v2.f32")
    evaluate(text, a, b, cells, out=np.uint32)
    assert cells[0] == a.sum() and cells[2] == a.sum() and cells[3] == a.sum()
    assert cells[1:2].view(np.float16).tolist() == [32.0, 64.0]


def test_an_unknown_cache_operator_is_refused() -> None:
    with pytest.raises(SimParseError, match=r"modifier \.zz"):
        evaluate(".reg .b64 %at; ld.param.u64 %at, [in_a]; ld.global.zz.u32 %d, [%at];", I32, out=np.uint32)


def test_null_pointers_are_in_no_buffer() -> None:
    source = 'extern "C" __global__ void kernel(int* x, int use) { if (use) x[threadIdx.x] = 1; }'
    launch(source, [None, 0])
    with pytest.raises(SimMemoryError, match="in no buffer"):
        launch(source, [None, 1])


def test_run_needs_one_argument_for_each_parameter() -> None:
    with pytest.raises(ValueError, match="allowed: 1 arguments"):
        sim.run(
            ".version 8.8\n.target sm_90a\n.address_size 64\n.visible .entry k(.param .u32 n) { ret; }",
            [],
            Geometry((1, 1, 1), (1, 1, 1)),
            "sm_90a",
        )

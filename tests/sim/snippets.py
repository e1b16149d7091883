"""Run a few PTX instructions, one thread per element."""

from __future__ import annotations

from typing import Any

import numpy as np

from jitfp4 import sim
from jitfp4.spec import Geometry

Array = np.ndarray[Any, Any]
NAMES = "abcef"

_HEADER = """
.version 8.8
.target {arch}
.address_size 64
{module}
.visible .entry snippet({params}) {{
    .reg .pred %p, %q, %guard;
    .reg .b32 %tid, %cta, %ntid, %n, %i;
    .reg .b64 %pointer, %offset, %index;
    {registers}
    mov.u32 %tid, %tid.x;
    mov.u32 %cta, %ctaid.x;
    mov.u32 %ntid, %ntid.x;
    mad.lo.u32 %i, %cta, %ntid, %tid;
    ld.param.u32 %n, [count];
    setp.ge.u32 %guard, %i, %n;
    @%guard exit;
    cvt.u64.u32 %index, %i;
    {loads}
    {body}
    {store}
    ret;
}}
"""


def _register(dtype: np.dtype[Any]) -> str:
    return f".b{max(16, 8 * dtype.itemsize)}"


def source(body: str, operands: tuple[np.dtype[Any], ...], out: np.dtype[Any], arch: str, module: str = "") -> str:
    """PTX that loads operands %a, %b, ..., runs ``body`` and stores %d. Registers %p and %q are predicates."""
    names = NAMES[: len(operands)]
    registers, loads = [f".reg {_register(out)} %d;"], []
    for name, dtype in zip(names, operands, strict=True):
        registers.append(f".reg {_register(dtype)} %{name};")
        loads.append(f"ld.param.u64 %pointer, [in_{name}]; mad.lo.u64 %offset, %index, {dtype.itemsize}, %pointer;")
        loads.append(f"ld.global.b{8 * dtype.itemsize} %{name}, [%offset];")
    store = f"ld.param.u64 %pointer, [out]; mad.lo.u64 %offset, %index, {out.itemsize}, %pointer;"
    store += f" st.global.b{8 * out.itemsize} [%offset], %d;"
    params = ", ".join([f".param .u64 in_{n}" for n in names] + [".param .u64 out", ".param .u32 count"])
    return _HEADER.format(
        arch=arch,
        module=module,
        params=params,
        registers="\n    ".join(registers),
        loads="\n    ".join(loads),
        body=body,
        store=store,
    )


def evaluate(body: str, *operands: Array, out: Any, arch: str = "sm_100a", module: str = "") -> Array:
    """%d of every thread as dtype ``out``; thread i has element i of each operand in %a, %b, %c, %e, %f."""
    count = len(operands[0])
    result = np.full(count, 0xA5, np.uint8).repeat(np.dtype(out).itemsize).view(out)
    text = source(body, tuple(o.dtype for o in operands), np.dtype(out), arch, module)
    block = 32 * min(8, -(-count // 32))
    geometry = Geometry((-(-count // block), 1, 1), (block, 1, 1))
    sim.run(text, [*(np.ascontiguousarray(o) for o in operands), result, count], geometry, arch)
    return result

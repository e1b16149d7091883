"""overlay() and install() on the FlashInfer that is installed, in a process of their own; skipped without one.

``pip install --no-deps flashinfer-python``, with apache-tvm-ffi, nvidia-ml-py, einops, tabulate and ninja, is enough:
its Python imports without a GPU. With nvidia-cutlass-dsl[cu13] nothing is left.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from typing import Any

import pytest

import jitfp4.flashinfer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="no FlashInfer is installed"),
]

PROGRAM = """
import importlib, json, sys
import jitfp4, jitfp4.flashinfer
from jitfp4.flashinfer.modules import FUNCTIONS, KERNELS, MODULES

import flashinfer
def state():
    return {(m, n): id(v) for m, v in list(sys.modules.items()) if m.startswith("flashinfer") and v is not None
            for n, v in vars(v).items() if n in FUNCTIONS}
before = state()
outer = jitfp4.flashinfer.overlay()
replaced, left = outer.replaced(), outer.left()
with jitfp4.flashinfer.overlay("mm_fp4") as inner:
    inner_replaced = inner.replaced()
after_inner = outer.replaced()
with jitfp4.flashinfer.install():
    import flashinfer as standing
    stands = standing.nvfp4_quantize is jitfp4.nvfp4_quantize and not hasattr(standing, "sampling")
from flashinfer.quantization import fp4_quantize, SfLayout
from flashinfer.quantization.fp4_quantization import nvfp4_quantize
from flashinfer.gemm.gemm_base import mm_fp4
from flashinfer.decode import trtllm_batch_decode_with_kv_cache
from flashinfer.page import append_paged_kv_cache
import torch
q, sf = nvfp4_quantize(torch.randn(4, 64).bfloat16(), torch.ones(1), SfLayout.layout_linear)
ours = all(f.__module__.startswith("jitfp4") for f in (fp4_quantize, nvfp4_quantize, mm_fp4,
                                                       trtllm_batch_decode_with_kv_cache))
theirs = append_paged_kv_cache.__module__.startswith("flashinfer")
remaining = [f"{m}.{n}" for (m, n), v in state().items() if m in {f"flashinfer.{x}" for x in (*MODULES, *KERNELS)}
             and not getattr(getattr(sys.modules[m], n), "__module__", "").startswith("jitfp4")
             and getattr(sys.modules[m], n) is not None]
jitfp4.flashinfer.uninstall()
after = state()
print(json.dumps({"replaced": replaced, "left": left, "inner": inner_replaced, "after_inner": after_inner,
    "stands": stands, "shape": list(sf.shape), "ours": ours, "theirs": theirs, "remaining": remaining,
    "restored": all(after[key] == value for key, value in before.items())}))
"""


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    print(json.dumps(found, indent=1))  # noqa: T201
    return found  # type: ignore[no-any-return]


def test_functions_are_replaced_where_they_are_defined(report: dict[str, Any]) -> None:
    wanted = {"flashinfer.mm_fp4", "flashinfer.gemm.mm_fp4", "flashinfer.gemm.gemm_base.mm_fp4"} | {
        f"flashinfer.{module}{name}"
        for name in ("nvfp4_quantize", "fp4_quantize", "block_scale_interleave", "nvfp4_kv_quantize")
        for module in ("", "quantization.", "quantization.fp4_quantization.", "fp4_quantization.")
    }
    assert wanted <= set(report["replaced"])
    assert {"flashinfer.gdn_decode.gated_delta_rule_mtp", "flashinfer.cutlass_fused_moe"} <= set(report["replaced"])
    assert "flashinfer.fused_moe.interleave_moe_weights_for_sm90_mixed_gemm" not in report["replaced"]
    assert report["ours"] and report["theirs"] and report["shape"] == [4, 4]


def test_everything_that_both_have_is_replaced(report: dict[str, Any]) -> None:
    assert report["remaining"] == []
    served = {name for name in jitfp4.flashinfer.MODULES if name != "utils"}
    missed = {path.partition(".")[2] for path in report["left"]}
    of_cute = {"rmsnorm_fp4quant", "add_rmsnorm_fp4quant", "blockscaled_gemm"}
    assert missed <= {"gdn_kernels.gdn_decode_bf16_state", *(f"cute_dsl.{name}" for name in of_cute)}
    reached = {path.partition(".")[2].rpartition(".")[0] for path in report["replaced"]}
    assert served - reached - missed <= {"cute_dsl", "norm"}, "these two have it only with nvidia-cutlass-dsl"


def test_overlays_nest_and_end(report: dict[str, Any]) -> None:
    assert report["after_inner"] == report["replaced"]
    assert {path.rpartition(".")[2] for path in report["inner"]} == {"mm_fp4"}
    assert report["stands"] and report["restored"]

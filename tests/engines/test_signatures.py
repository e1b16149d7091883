"""Names, order and defaults of every public function are those of FlashInfer: of the release in ``flashinfer.json``,
and of the one that is installed.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import inspect
import json
from pathlib import Path
from typing import Any

import pytest

import jitfp4.flashinfer
from tests.engines import signatures
from tests.engines.wheels import Sources

OWN = {
    *("enable_pdl", "out", "out_sf", "out_dtype", "skip_check"),  # FlashInfer's decorators add skip_check
    *("kv_cache_sf", "kv_block_scales", "v_scale_layout", "v_sf_layout"),
}
"""Keyword-only parameters that jitfp4 has beyond FlashInfer's."""

_DECODE, _PREFILL = "BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper"
LACKING = {
    f"{name}.{method}"
    for name in (_DECODE, _PREFILL)
    for method in ("workspace_size", "prewarm_paged_kv_stride_variant")
}
"""What jitfp4 does not have: no kernel needs the first, and there is nothing that the second could warm."""

GATHERED = {"grouped_gemm_nt_masked": {"alpha", "alpha_dtype", "mma_tiler_mn", "cluster_shape_mn"}}
"""What FlashInfer takes in ``**kwargs``, and jitfp4 by name."""

RECORDED = json.loads(signatures.FIXTURE.read_text())


def differences(theirs: signatures.Signatures) -> set[str]:
    """One line for each function, method and parameter that is not as in FlashInfer."""
    found: set[str] = set()
    for name, entry in theirs.items():
        ours = getattr(jitfp4.flashinfer, name)
        if "parameters" in entry:
            found |= _compare(name, entry["parameters"], ours)
        for method, parameters in entry.get("methods", {}).items():
            if method == "__init__" or hasattr(ours, method):
                found |= _compare(f"{name}.{method}", parameters, getattr(ours, method), skip=1)
            else:
                found.add(f"{name}.{method}")
    return found


def _compare(name: str, theirs: list[signatures.Parameter], function: Any, skip: int = 0) -> set[str]:
    ours = dict(list(inspect.signature(function).parameters.items())[skip:])
    lacking = {f"{name}: {word}" for word, kind, _ in theirs if kind != "rest" and word not in ours}
    common = [(word, kind, default) for word, kind, default in theirs if word in ours]
    lacking |= {
        f"{name}: {word} = {_written(ours[word].default)}, not {default}"
        for word, _, default in common
        if _written(ours[word].default) != _same(default)
    }
    lacking |= {
        f"{name}: {word} is keyword-only"
        for word, kind, _ in common
        if kind == "positional" and ours[word].kind is inspect.Parameter.KEYWORD_ONLY
    }
    order = [word for word, kind, _ in theirs if kind == "positional"]
    positional = [word for word, parameter in ours.items() if parameter.kind is not inspect.Parameter.KEYWORD_ONLY]
    if [word for word in order if word in ours] != positional[: len(order)][: len([w for w in order if w in ours])]:
        lacking.add(f"{name}: order {positional}, not {order}")
    known = {word for word, _, _ in theirs} | GATHERED.get(name, set())
    lacking |= {f"{name}: {word} is not in FlashInfer" for word in ours if word not in known | OWN}
    return lacking


def _written(default: Any) -> str | None:
    """A default as FlashInfer writes it."""
    if default is inspect.Parameter.empty:
        return None
    return f"SfLayout.{default.name}" if isinstance(default, jitfp4.SfLayout) else repr(default)


def _same(default: str | None) -> str | None:
    """FlashInfer's default of nvfp4_4over6 reads environment variables; jitfp4 has none that changes a result."""
    return {"_UNSET": "None", "ActivationType.Swiglu.value": "3"}.get(default, default) if default else default


def test_as_in_the_recorded_release() -> None:
    assert differences(RECORDED["signatures"]) == LACKING


def test_every_function_but_those_of_jitfp4_is_compared() -> None:
    served = {name for names in jitfp4.flashinfer.MODULES.values() for name in names}
    assert served - RECORDED["signatures"].keys() == {"nvfp4_dequantize"}


def test_a_new_parameter_or_another_default_or_order_is_found() -> None:
    theirs = json.loads(json.dumps(RECORDED["signatures"]))
    theirs["mm_fp4"]["parameters"].append(["tile", "keyword", "None"])
    theirs["rmsnorm_fp4quant"]["parameters"][5][2] = "1e-05"
    theirs["shuffle_matrix_a"]["parameters"].reverse()
    theirs["BatchDecodeWithPagedKVCacheWrapper"]["methods"]["new"] = []
    assert differences(theirs) - LACKING == {
        "mm_fp4: tile",
        "rmsnorm_fp4quant: eps = 1e-06, not 1e-05",
        "shuffle_matrix_a: order ['input_tensor', 'epilogue_tile_m'], not ['epilogue_tile_m', 'input_tensor']",
        "BatchDecodeWithPagedKVCacheWrapper.new",
    }


@functools.cache
def _installed() -> Path | None:
    spec = importlib.util.find_spec("flashinfer")
    return Path(spec.origin).parents[1] if spec is not None and spec.origin else None


@pytest.mark.skipif(_installed() is None, reason="no FlashInfer is installed")
def test_as_in_the_release_that_is_installed() -> None:
    folder = _installed()
    assert folder is not None
    theirs = signatures.signatures(Sources.of_folder(folder, "flashinfer"))
    assert differences(theirs) == LACKING, importlib.metadata.version("flashinfer-python")

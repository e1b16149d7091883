"""jitfp4 in FlashInfer's place: the substitution, and what engines rely on beside the calls of ``tests/engines``."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import jitfp4
import jitfp4.flashinfer
from jitfp4.flashinfer.modules import HERE
from tests.support.attention import Case


@pytest.fixture
def flashinfer() -> Iterator[ModuleType]:
    with jitfp4.flashinfer.install():
        import flashinfer

        yield flashinfer


def halves(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2)).bfloat16()


# ---- the substitution ------------------------------------------------------------------------------------------------


def test_it_is_explicit_and_reversible() -> None:
    assert "flashinfer" not in sys.modules
    other = ModuleType("flashinfer")
    sys.modules["flashinfer"] = other
    try:
        installed = jitfp4.flashinfer.install()
        from flashinfer.norm import rmsnorm_fp4quant

        assert rmsnorm_fp4quant is jitfp4.rmsnorm_fp4quant
        package = sys.modules["flashinfer"]
        assert jitfp4.flashinfer.install().is_in_place() and installed.is_in_place()
        assert sys.modules["flashinfer"] is package
        jitfp4.flashinfer.uninstall()
        assert not installed.is_in_place()
        jitfp4.flashinfer.uninstall()
        assert sys.modules["flashinfer"] is other
        assert not [name for name in sys.modules if name.startswith("flashinfer.")]
    finally:
        del sys.modules["flashinfer"]


def test_without_a_substitution() -> None:
    from jitfp4.flashinfer.decode import single_decode_with_kv_cache

    import jitfp4.flashinfer as flashinfer

    assert flashinfer.decode.single_decode_with_kv_cache is single_decode_with_kv_cache
    assert flashinfer.nvfp4_quantize is jitfp4.nvfp4_quantize
    assert {"fp4_quantize", "SfLayout"} <= set(dir(flashinfer.fp4_quantization))


class Theirs(IntEnum):
    """FlashInfer's SfLayout."""

    layout_128x4 = 0
    layout_8x4 = 1
    layout_linear = 2


@pytest.fixture
def theirs() -> Iterator[dict[str, Any]]:
    """A FlashInfer of two modules: three functions that jitfp4 has, one that it lacks, and the layout."""
    package, norm = ModuleType("flashinfer"), ModuleType("flashinfer.norm")
    functions = {name: lambda: None for name in ("nvfp4_quantize", "rmsnorm_fp4quant", "gemma_rmsnorm", "mm_fp4")}
    vars(package).update(functions, SfLayout=Theirs, norm=norm, __path__=[])
    vars(norm).update({name: functions[name] for name in ("rmsnorm_fp4quant", "gemma_rmsnorm")})
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "flashinfer", package)
        patch.setitem(sys.modules, "flashinfer.norm", norm)
        yield functions
        jitfp4.flashinfer.uninstall()


def test_an_overlay_leaves_the_rest_of_flashinfer(theirs: dict[str, Any]) -> None:
    put = jitfp4.flashinfer.overlay()
    import flashinfer
    from flashinfer.norm import gemma_rmsnorm, rmsnorm_fp4quant

    assert rmsnorm_fp4quant is flashinfer.rmsnorm_fp4quant is jitfp4.rmsnorm_fp4quant
    assert flashinfer.mm_fp4 is jitfp4.mm_fp4
    assert gemma_rmsnorm is theirs["gemma_rmsnorm"]
    assert flashinfer.SfLayout is Theirs
    assert not hasattr(flashinfer, "mxfp4_quantize")  # of a later version than theirs
    assert set(put.replaced()) == {
        *("flashinfer.nvfp4_quantize", "flashinfer.rmsnorm_fp4quant", "flashinfer.mm_fp4"),
        "flashinfer.norm.rmsnorm_fp4quant",
    }
    jitfp4.flashinfer.uninstall()
    jitfp4.flashinfer.uninstall()
    assert flashinfer.norm.rmsnorm_fp4quant is flashinfer.rmsnorm_fp4quant is theirs["rmsnorm_fp4quant"]
    assert not put.is_in_place() and not put.replaced()


def test_an_overlay_of_some_names(theirs: dict[str, Any]) -> None:
    import flashinfer

    with jitfp4.flashinfer.overlay("mm_fp4", "mxfp4_quantize") as put:
        assert put.replaced() == ["flashinfer.mm_fp4"]
        assert flashinfer.nvfp4_quantize is theirs["nvfp4_quantize"]
    assert flashinfer.mm_fp4 is theirs["mm_fp4"]
    for wrong in ("gemma_rmsnorm", "SfLayout"):
        with pytest.raises(jitfp4.ArgumentError, match=wrong):
            jitfp4.flashinfer.overlay(wrong)


def test_the_latest_of_overlay_and_install_is_in_place(theirs: dict[str, Any]) -> None:
    import flashinfer

    outer = jitfp4.flashinfer.overlay()
    installed = jitfp4.flashinfer.install()
    assert installed.is_in_place() and not outer.is_in_place()
    assert sys.modules["flashinfer"] is not flashinfer
    jitfp4.flashinfer.overlay()
    assert sys.modules["flashinfer"] is flashinfer and flashinfer.mm_fp4 is jitfp4.mm_fp4
    assert not installed.is_in_place() and outer.is_in_place()


@pytest.mark.parametrize("inner", [jitfp4.flashinfer.install, jitfp4.flashinfer.overlay])
@pytest.mark.parametrize("outer", [jitfp4.flashinfer.install, jitfp4.flashinfer.overlay])
def test_the_end_of_an_inner_one_leaves_the_outer_one(theirs: dict[str, Any], outer: Any, inner: Any) -> None:
    import flashinfer as real

    with outer() as first:
        before = sys.modules["flashinfer"]
        with inner() as second:
            assert second.is_in_place()
            assert sys.modules["flashinfer"].mm_fp4 is jitfp4.mm_fp4
        assert first.is_in_place() and not second.is_in_place()
        assert sys.modules["flashinfer"] is before
        assert before.mm_fp4 is jitfp4.mm_fp4
    assert sys.modules["flashinfer"] is real and real.mm_fp4 is theirs["mm_fp4"]


def test_overlays_end_in_any_order(theirs: dict[str, Any]) -> None:
    import flashinfer

    product = jitfp4.flashinfer.overlay("mm_fp4")
    both = jitfp4.flashinfer.overlay("mm_fp4", "nvfp4_quantize")
    product.remove()
    assert flashinfer.mm_fp4 is jitfp4.mm_fp4, "the later one still wants it"
    assert set(both.replaced()) == {"flashinfer.mm_fp4", "flashinfer.nvfp4_quantize"} and not product.replaced()
    both.remove()
    assert flashinfer.mm_fp4 is theirs["mm_fp4"] and flashinfer.nvfp4_quantize is theirs["nvfp4_quantize"]


def test_a_module_that_cannot_be_imported_is_left(theirs: dict[str, Any], tmp_path: Path) -> None:
    """As FlashInfer's are that load a library which is not there: OSError, RuntimeError."""
    import flashinfer

    (tmp_path / "decode.py").write_text("raise OSError('libcuda.so.1: cannot open shared object file')\n")
    (tmp_path / "page.py").write_text("import no_such_package\n")
    flashinfer.__path__ = [str(tmp_path)]
    put = jitfp4.flashinfer.overlay()
    assert put.is_in_place() and flashinfer.mm_fp4 is jitfp4.mm_fp4
    left = put.left()
    assert "libcuda" in left["flashinfer.decode"] and "no_such_package" in left["flashinfer.page"]


def test_a_package_that_cannot_be_imported_is_an_import_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "flashinfer").mkdir()
    (tmp_path / "flashinfer/__init__.py").write_text("raise OSError('libcuda.so.1')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match="libcuda"):
        jitfp4.flashinfer.overlay()
    assert "flashinfer" not in sys.modules


def test_modules_where_functions_are_defined_have_them(theirs: dict[str, Any], tmp_path: Path) -> None:
    """Engines import from there; and a module of FlashInfer that is imported later gets jitfp4's."""
    import flashinfer

    (tmp_path / "gemm").mkdir()
    (tmp_path / "gemm/__init__.py").write_text("from .gemm_base import mm_fp4\n")
    (tmp_path / "gemm/gemm_base.py").write_text("def mm_fp4(): ...\n\ndef bmm_fp8(): ...\n")
    (tmp_path / "later.py").write_text("from .gemm.gemm_base import mm_fp4, bmm_fp8\n")
    flashinfer.__path__ = [str(tmp_path)]
    with jitfp4.flashinfer.overlay("mm_fp4") as put:
        assert put.replaced() == ["flashinfer.mm_fp4", "flashinfer.gemm.mm_fp4", "flashinfer.gemm.gemm_base.mm_fp4"]
        later = importlib.import_module("flashinfer.later")
        assert later.mm_fp4 is jitfp4.mm_fp4 and later.bmm_fp8 is flashinfer.gemm.gemm_base.bmm_fp8
    for name in ("later", "gemm", "gemm.gemm_base"):
        sys.modules.pop(f"flashinfer.{name}")


def test_a_recipe_in_the_environment_is_not_followed_in_silence(
    theirs: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHINFER_NVFP4_4OVER6", "1")
    with pytest.warns(RuntimeWarning, match="nvfp4_4over6"):
        jitfp4.flashinfer.overlay()


def test_the_kernel_of_bf16_states(flashinfer: ModuleType) -> None:
    """sgl-project/sglang calls it past the public function where it has pools of bf16 states."""
    from flashinfer.gdn_kernels.gdn_decode_bf16_state import gated_delta_rule_mtp as on_bf16

    states, slots = torch.randn(5, 4, 64, 64).bfloat16(), torch.tensor([3, 1], dtype=torch.int32)
    given, buffer = gates(2, 3), torch.zeros(2, 3, 4, 64, 64).bfloat16()
    want, _ = jitfp4.gated_delta_rule_mtp(
        **given, initial_state=states.clone(), initial_state_indices=slots, disable_state_update=True
    )
    got = on_bf16(
        **given,
        softplus_beta=1.0,
        softplus_threshold=20.0,
        initial_state_source=states,
        initial_state_indices=slots,
        use_qk_l2norm_in_kernel=True,
        scale=None,
        output=None,
        intermediate_states_buffer=buffer,
        disable_state_update=True,
    )
    assert torch.equal(got, want) and buffer.flatten(2).any(-1).all()
    with pytest.raises(jitfp4.ArgumentError, match="recovery_steps"):
        on_bf16(**given, initial_state_source=states, initial_state_indices=slots, recovery_steps=2)


def test_an_overlay_needs_a_flashinfer() -> None:
    with pytest.raises(ImportError, match="flashinfer"):
        jitfp4.flashinfer.overlay()


def test_layouts_may_be_flashinfers() -> None:
    x, scale = halves(5, 64), torch.tensor([3.0])
    for layout in Theirs:
        got = jitfp4.nvfp4_quantize(x, scale, layout)  # type: ignore[arg-type]
        want = jitfp4.nvfp4_quantize(x, scale, jitfp4.SfLayout(layout))
        assert all(map(torch.equal, got, want))
        back = jitfp4.nvfp4_dequantize(*got, 1.0, sfLayout=layout)  # type: ignore[arg-type]
        assert torch.equal(back, jitfp4.nvfp4_dequantize(*want, 1.0, int(layout)))
    compiled = torch.compile(jitfp4.nvfp4_quantize, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, scale, Theirs.layout_linear)[1], want[1])


@pytest.mark.parametrize("name", jitfp4.flashinfer.MODULES)
def test_every_name_is_the_function_of_that_name(name: str, flashinfer: ModuleType) -> None:
    module = importlib.import_module(f"flashinfer.{name}")
    assert importlib.util.find_spec(f"flashinfer.{name}") is not None
    for public in module.__all__:
        home = importlib.import_module(f"jitfp4.flashinfer.{HERE[public]}") if public in HERE else jitfp4
        assert getattr(module, public) is getattr(home, public) is getattr(flashinfer, public)
    with pytest.raises(AttributeError, match=f"flashinfer.{name}.nothing is not in jitfp4"):
        _ = module.nothing


def test_names_that_are_missing(flashinfer: ModuleType) -> None:
    with pytest.raises(AttributeError, match="is not in jitfp4"):
        _ = flashinfer.MultiLevelCascadeAttentionWrapper
    assert not hasattr(flashinfer.gemm, "mm_bf16_fp4")  # theirs takes codes and scales, ours a prepared weight
    with pytest.raises(ImportError, match="fused_add_rmsnorm"):
        from flashinfer.norm import fused_add_rmsnorm  # noqa: F401
    with pytest.raises(ModuleNotFoundError, match=r"flashinfer\.cascade"):
        import flashinfer.cascade


def test_probes(flashinfer: ModuleType) -> None:
    """vllm/utils/flashinfer.py: has_flashinfer(), has_flashinfer_moe(), has_flashinfer_cutlass_fused_moe()."""
    assert importlib.util.find_spec("flashinfer") is not None
    assert hasattr(importlib.import_module("flashinfer.fused_moe"), "cutlass_fused_moe")
    assert not hasattr(importlib.import_module("flashinfer.fused_moe"), "trtllm_fp4_block_scale_moe")
    for name in ("fp4_quantize", "nvfp4_block_scale_interleave"):
        assert hasattr(importlib.import_module("flashinfer"), name)
    assert not hasattr(flashinfer, "autotune")


# ---- calls -----------------------------------------------------------------------------------------------------------


def gates(batch: int, tokens: int) -> dict[str, torch.Tensor]:
    return {
        "q": halves(batch, tokens, 2, 64),
        "k": halves(batch, tokens, 2, 64),
        "v": halves(batch, tokens, 4, 64),
        "A_log": torch.zeros(4),
        "a": halves(batch, tokens, 4),
        "dt_bias": torch.ones(4),
        "b": halves(batch, tokens, 4),
    }


def test_a_wrapper_over_a_paged_cache(flashinfer: ModuleType) -> None:
    """vllm-project/vllm, vllm/v1/attention/backends/flashinfer.py: fast_plan_decode(), and forward() with a wrapper."""
    case = Case(lengths=(20, 9), page=16, kv_layout="NHD")
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(case.workspace, "NHD", use_tensor_cores=True)
    assert not wrapper.is_cuda_graph_enabled  # else the engine would go past plan()
    lists = (
        torch.tensor([0, 2, 3]),
        torch.cat((case.block_tables[0, :2], case.block_tables[1, :1])),
        torch.tensor([4, 9]),
    )
    sizes = case.query.shape[1], 2, 128, 16
    dtypes = torch.bfloat16, torch.uint8, None, None
    options = "NONE", -1, None, *dtypes, case.bmm1, None, None, True, None, None, -1, False
    wrapper.plan(*(x.int() for x in lists), *sizes, *options)
    assert wrapper._window_left == -1
    assert wrapper._logits_soft_cap == 0.0
    assert wrapper._sm_scale == case.bmm1
    out = torch.empty_like(case.query)
    wrapper.run(case.query, case.kv_cache, k_scale=1.0, v_scale=case.bmm2, out=out, kv_cache_sf=case.kv_cache_sf)
    assert torch.equal(out, case.run()[0])


def test_wrappers_by_their_older_names(flashinfer: ModuleType) -> None:
    """FlashInfer's begin_forward(), forward() and end_forward(): window and scale come with each layer's call."""
    case = Case(torch.bfloat16, lengths=(20, 9), page=16, kv_layout="NHD", window_left=5, steep=2.0)
    lists = (
        torch.tensor([0, 2, 3], dtype=torch.int32),
        torch.cat((case.block_tables[0, :2], case.block_tables[1, :1])),
        torch.tensor([4, 9], dtype=torch.int32),
    )
    sizes = case.query.shape[1], 2, 128, 16
    layer = {"sm_scale": case.bmm1, "window_left": 5, "logits_soft_cap": 0.0, "k_scale": None, "v_scale": case.bmm2}
    decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(case.workspace, "NHD", use_tensor_cores=True)
    decode.begin_forward(*lists, *sizes, q_data_type=torch.bfloat16)
    assert torch.equal(decode.forward(case.query, case.kv_cache, **layer), case.run()[0])
    decode.end_forward()
    prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(case.workspace, "NHD", backend="fa2")
    ends = torch.tensor([0, 1, 2], dtype=torch.int32)
    prefill.begin_forward(ends, *lists, *sizes, q_data_type=torch.bfloat16, causal=False)
    assert torch.equal(prefill.forward(case.query, case.kv_cache, causal=True, **layer), case.run()[0])
    prefill.end_forward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_delta_rule_into_an_output_of_another_dtype(flashinfer: ModuleType, dtype: torch.dtype) -> None:
    """FlashInfer's gated_delta_rule_decode_pretranspose() converts into an output that was given."""
    decode, state = flashinfer.gdn_decode.gated_delta_rule_decode_pretranspose, torch.randn(2, 4, 64, 64)
    want, _ = decode(**gates(2, 1), state=state.clone())
    output = torch.empty(2, 1, 4, 64, dtype=dtype)
    assert decode(**gates(2, 1), state=state.clone(), output=output)[0] is output
    assert torch.equal(output, want.to(dtype))

"""FlashInfer's own tests, run against jitfp4 on a GPU.

git clone https://github.com/flashinfer-ai/flashinfer CHECKOUT
python tests/engines/acceptance.py CHECKOUT [--processes N] [--seconds S] [--results FILE] [pytest arguments]

jitfp4's functions are put into the installed FlashInfer (``overlay()``), and a test counts when it called one of them.
Two things differ from FlashInfer's own run: every GPU counts as sm_100, so that tests of what FlashInfer has for
Blackwell alone run on others too, and attention of one request, which many tests compare with, is computed by torch.

There are 166,000 tests. They run in N processes in an order in which every test function gets its turn, so that those
that began within S seconds are a sample of all; with the same FILE the next run goes on (see forked.py).

Each test ends in one of these, counted at the end:
- passed: it called jitfp4, and what it checks is true;
- refused: jitfp4 refused an argument with a typed error; the reasons are listed with their counts;
- other words: the call was refused, as the test wants, and the message has other words than FlashInfer's;
- different: the test ends where jitfp4 differs on purpose; DIFFERENT names these tests, docs/engines.md the reasons;
- environment: the test sets FLASHINFER_NVFP4_4OVER6 behind the import, which jitfp4 does not read (it takes a
  configuration as an argument);
- own kernel: FlashInfer had to build a kernel of its own, which is not what is tried here;
- no memory: beside other processes, and again beside fewer;
- elsewhere: no function of jitfp4 was called, or the test skipped itself, for reasons that are listed;
- failed: anything else. The exit status is 1 then.

This is a program, not a module of the tests: FlashInfer's tests are a package of the same name.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

FILES = (
    "attention/test_batch_decode_kernels.py",
    "attention/test_batch_prefill_kernels.py",
    "attention/test_decode_prefill_lse.py",
    "attention/test_non_contiguous_decode.py",
    "attention/test_page.py",
    "attention/test_sliding_window.py",
    "attention/test_tensor_cores_decode.py",
    "attention/test_trtllm_gen_attention_decode.py",
    "attention/test_trtllm_gen_attention_prefill.py",
    "attention/test_xqa_batch_decode.py",
    "gdn/test_decode_delta_rule.py",
    "gdn/test_prefill_delta_rule.py",
    "gemm/test_mm_fp4.py",
    "norm/test_add_rmsnorm_fp4_quant_cute_dsl.py",
    "norm/test_rmsnorm_fp4_quant_cute_dsl.py",
    "utils/test_fp4_kv_quantization.py",
    "utils/test_fp4_quantize.py",
    "utils/test_fp4_quantize_padding.py",
)
OUTCOMES = (
    "passed",
    "refused",
    "other words",
    "different",
    "environment",
    "own kernel",
    "no memory",
    "elsewhere",
    "failed",
)
# What a test that jitfp4 ends otherwise says then, by its name: both are about requests without a slot.
DIFFERENT = {
    "test_decode_kernel_bf16_padding_indices": "Slot 0 (null buffer) should have been updated",
    "test_gdn_decode_mtp_non_bf16_output_preserves_padding_slots": "Greatest absolute difference: 42.0",
}
METHODS = ("run", "run_return_lse", "forward", "forward_return_lse")

_is_served = False  # whether the running test has called a function of jitfp4


def _counted(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        global _is_served
        _is_served = True
        return function(*args, **kwargs)

    return counted


def _prepare() -> None:
    """Before a test module is imported: jitfp4 in FlashInfer's modules, its calls counted, one oracle in torch."""
    import flashinfer
    import flashinfer.jit
    import flashinfer.utils

    import jitfp4.flashinfer

    flashinfer.utils.get_compute_capability = lambda _device: (10, 0)
    for name in ("is_sm100a_supported", "is_sm100f_supported"):
        setattr(flashinfer.utils, name, lambda _device: True)
    helpers = importlib.import_module("tests.test_helpers.jit_utils")  # of the checkout
    for name in ("gen_decode_attention_modules", "gen_prefill_attention_modules"):
        setattr(helpers, name, lambda *_args, **_kwargs: [])
    flashinfer.jit.build_jit_specs = lambda *_args, **_kwargs: None
    supported = getattr(flashinfer.mm_fp4, "is_backend_supported", None)
    for path in jitfp4.flashinfer.overlay().replaced():
        module, _, name = path.rpartition(".")
        ours = getattr(sys.modules[module], name)
        if isinstance(ours, type):
            for method in {*METHODS} & {*vars(ours)}:
                if inspect.isfunction(vars(ours)[method]):  # a partial method calls one of these
                    setattr(ours, method, _counted(vars(ours)[method]))
        else:
            setattr(sys.modules[module], name, _counted(ours))
            if name == "mm_fp4":
                getattr(sys.modules[module], name).is_backend_supported = supported
    for module in (flashinfer, flashinfer.decode):
        module.single_decode_with_kv_cache = _single_decode
    for module in (flashinfer, flashinfer.prefill):
        module.single_prefill_with_kv_cache = _single_prefill
        module.single_prefill_with_kv_cache_return_lse = functools.partial(_single_prefill, return_lse=True)


def _single_decode(
    q: Any, k: Any, v: Any, kv_layout: str = "NHD", pos_encoding_mode: str = "NONE", *_other: Any, **kwargs: Any
) -> Any:
    """Attention of one query token to one request: ``q`` is [heads, head_dim]."""
    out = _single_prefill(q[None], k, v, kv_layout=kv_layout, pos_encoding_mode=pos_encoding_mode, **kwargs)
    return (out[0][0], out[1][0]) if kwargs.get("return_lse") else out[0]


def _single_prefill(
    q: Any,
    k: Any,
    v: Any,
    scale_q: Any = None,
    scale_k: Any = None,
    scale_v: Any = None,
    *,
    o_dtype: Any = None,
    custom_mask: Any = None,
    causal: bool = False,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    return_lse: bool = False,
    q_scale: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    **_other: Any,
) -> Any:
    """Attention of one request in float32, by torch: softmax over the keys that causal and window_left leave."""
    import torch

    if pos_encoding_mode != "NONE":
        pytest.skip("the oracle has no rotation")
    if kv_layout == "HND":
        k, v = k.transpose(0, 1), v.transpose(0, 1)
    group = q.shape[1] // k.shape[1]
    keys, values = (x.float().repeat_interleave(group, 1) for x in (k, v))
    scale = (q.shape[-1] ** -0.5) if sm_scale is None else sm_scale
    for one in (scale_q, scale_k, q_scale, k_scale):
        scale = scale if one is None else scale * one
    if torch.is_tensor(scale) and scale.dim():
        scale = scale.reshape(-1, 1, 1)
    logits = torch.einsum("qhd,khd->hqk", q.float(), keys) * scale
    if logits_soft_cap:
        logits = logits_soft_cap * torch.tanh(logits / logits_soft_cap)
    at = torch.arange(len(q), device=q.device)[:, None] + len(k) - len(q)
    key = torch.arange(len(k), device=q.device)[None]
    seen = key <= at if causal else torch.ones_like(key <= at)
    if custom_mask is not None:
        seen = custom_mask.reshape(len(q), len(k)).bool()
    if window_left >= 0:
        seen = seen & (key >= at - window_left)
    logits = logits.masked_fill(~seen, -torch.inf)
    out = torch.einsum("hqk,khd->qhd", logits.softmax(-1), values)
    for one in (scale_v, v_scale):
        out = out if one is None else out * one
    out = out.to(o_dtype or (q.dtype if q.dtype.itemsize > 1 else torch.float16))
    return (out, logits.logsumexp(-1).T / 0.6931471805599453) if return_lse else out


def _kind(test: str, error: Exception) -> str:
    """The outcome of a test that ended with ``error``."""
    if any("flashinfer/jit/" in frame.filename for frame in traceback.extract_tb(error.__traceback__)):
        return "own kernel"
    if "CuTe-DSL cannot target" in str(error):
        return "own kernel"
    if isinstance(error, AssertionError) and DIFFERENT.get(test, "no such words") in str(error):
        return "different"
    if isinstance(error, AssertionError) and os.environ.get("FLASHINFER_NVFP4_4OVER6") == "1":
        return "environment"
    if isinstance(error, AssertionError) and "Regex pattern did not match" in str(error):
        return "other words"
    return "failed"


def _forked() -> Any:
    """The plugin beside this file; under this name, since ``tests`` is FlashInfer's package here."""
    return importlib.import_module("forked")


def pytest_configure() -> None:
    forked = _forked()
    forked.started.append(_share)
    forked.is_sound.append(_works)
    _prepare()


def _pretend() -> None:
    """Modules ask for the GPU at their import, and none may be touched before the processes are forked."""
    import torch

    of = torch.cuda.get_device_capability
    torch.cuda.get_device_capability = functools.wraps(of)(lambda _device=None: (10, 0))
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # whether there is one


def _share(count: int) -> None:
    """Leaves the other processes their part of the GPU's memory, of which few tests need much."""
    import torch

    torch.cuda.get_device_capability = inspect.unwrap(torch.cuda.get_device_capability)
    # One of the modules sets this at its import. Without the caching allocator no allocation can be captured.
    os.environ.pop("PYTORCH_NO_CUDA_MEMORY_CACHING", None)
    torch.cuda.set_per_process_memory_fraction(min(1.0, 2 / count))


def _works() -> bool:
    """Whether kernels still run, which is over after a fault, and random numbers, which a failed capture ends."""
    import torch

    try:
        torch.cuda.empty_cache()
        torch.randn(1, device="cuda").item()
    except RuntimeError:
        return False
    return True


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    import torch

    from jitfp4.errors import ArgumentError

    global _is_served
    _is_served = False
    torch.set_default_device(None)  # that of a test before, which was of another file
    outcome, reason = "failed", ""
    try:
        result = yield
        outcome = "passed" if _is_served else "elsewhere"
        return result
    except pytest.skip.Exception as error:
        outcome = "no memory" if "due to OOM" in str(error) else "elsewhere"  # FlashInfer's conftest.py says so
        raise
    except ArgumentError as error:
        outcome, reason = "refused", str(error)
        pytest.skip(f"refused: {reason}")
    except Exception as error:
        outcome = _kind(getattr(item, "originalname", ""), error)
        if outcome != "failed":
            pytest.skip(f"{outcome}: {error}")
        raise
    finally:
        item.user_properties += [("outcome", outcome), ("reason", reason)]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """The counts by file, and why calls were refused, tests left out, and tests failed."""
    counts: dict[str, Counter[str]] = {}
    reasons: Counter[tuple[str, str]] = Counter()
    for line in _forked().read(config.option.results).values():
        counts.setdefault(line["id"].partition("::")[0].removeprefix("tests/"), Counter())[line["outcome"]] += 1
        reasons[line["outcome"], line["reason"]] += bool(line["reason"])
    terminalreporter.section("FlashInfer's tests with jitfp4")
    terminalreporter.line(f"{'file':<48}" + "".join(f"{name:>12}" for name in OUTCOMES))
    total = sum(counts.values(), Counter())
    for file, found in [*sorted(counts.items()), ("all", total)]:
        terminalreporter.line(f"{file:<48}" + "".join(f"{found[name]:>12}" for name in OUTCOMES))
    for (outcome, reason), number in reasons.most_common():
        terminalreporter.line(f"{outcome} {number:>5}: {reason}")


def main(checkout: Path, arguments: list[str]) -> int:
    """Run the tests of ``FILES``, or those that ``arguments`` name."""
    here, root = Path(__file__).resolve().parent, checkout.resolve()
    sys.path[:] = [str(root), *(path for path in sys.path if Path(path or ".").resolve() != here)]
    sys.path.append(str(here))  # after the checkout: pytest imports this file and forked.py by their names
    _pretend()
    options = ["-p", "forked", "-p", "acceptance", "--import-mode=importlib", "--capture=no", "-q"]
    named = any(".py" in argument for argument in arguments)
    files = [] if named else [str(root / "tests" / file) for file in FILES if (root / "tests" / file).exists()]
    return int(pytest.main([*options, f"--rootdir={root}", *files, *arguments]))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))

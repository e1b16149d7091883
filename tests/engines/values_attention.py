"""Attention's calls: caches, lists and settings by hand, for every kind of cache that the call may meet."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

import jitfp4
from jitfp4.reference.formats import unswizzle
from tests.engines.collect import Call
from tests.engines.trial import Arguments, Trial
from tests.support.attention import Case, relative_error

NVFP4, E4M3, BF16 = torch.uint8, torch.float8_e4m3fn, torch.bfloat16
BOUND = {torch.bfloat16: 4e-3, torch.float16: 1e-3}
Decode, Prefill = jitfp4.BatchDecodeWithPagedKVCacheWrapper, jitfp4.BatchPrefillWithPagedKVCacheWrapper


def _checked(case: Case) -> Callable[[Any, Arguments], None]:
    """A check of an output, or of an output and its logarithms, against attention in float64."""

    def check(result: Any, given: Arguments) -> None:
        out, lse = result if isinstance(result, tuple) else (result, None)
        want, want_lse = case.expected()
        assert relative_error(out, want) < BOUND[out.dtype]
        assert given.get("out") is None or out is given["out"]
        assert given.get("lse") is None or lse is given["lse"]
        if lse is not None:
            assert (lse.double() - want_lse).abs().max() < 1e-4

    return check


# ---- functions -------------------------------------------------------------------------------------------------------


def _function_values(case: Case, call: Call) -> Arguments:
    """What both trtllm functions and XQA's take of a case; engines give their counters as zeroed memory."""
    lse = torch.empty(case.query.shape[:2]) if call["keywords"].get("return_lse") == "True" else None
    return case.decode_arguments() | {
        "o_sf_scale": None,
        "out": torch.empty_like(case.query),
        "out_dtype": torch.bfloat16,
        "skip_softmax_threshold_scale_factor": None,
        "multi_ctas_kv_counter_buffer": torch.zeros(1 << 16, dtype=torch.uint8),
        "lse": lse,
        "return_lse": False,
        "enable_pdl": True,
    }


def _caches(call: Call, **changes: Any) -> Iterator[tuple[str, Case]]:
    """A case for each cache: NVFP4 pages as the engine fills them, E4M3, bf16."""
    scaled = "kv_cache_sf" in call["keywords"]
    for name, cache in (("nvfp4", NVFP4), ("e4m3", E4M3), ("bf16", BF16)):
        if cache != NVFP4 or scaled:
            order = {"v_scale_layout": "interleaved4"} if cache == NVFP4 else {}
            case = Case(cache, **({"lengths": (20, 9), "group": 4} | order | changes))
            yield name, _with_factor(case, call["keywords"].get("bmm2_scale"))


def _with_factor(case: Case, stated: str | None) -> Case:
    """The case with the factor of values that the call gives: 1 where the source gives 1, or none."""
    case.bmm2 = 1.0 if stated in (None, "1.0") else case.bmm2
    return case


def _to_fp4(case: Case, values: Arguments) -> Trial:
    """The same with NVFP4 output, whose scales are rows of those of a whole batch, as vLLM gives it."""
    tokens, heads, d = case.query.shape
    data, rows = torch.empty(tokens, heads, d // 2, dtype=torch.uint8), torch.zeros(128, heads * d // 16)
    out, encode = jitfp4.FP4Tensor(data, rows.to(torch.float8_e4m3fn), 7, case.query.shape), 300.0

    def check(result: Any, _given: Arguments) -> None:
        result = result[0] if isinstance(result, tuple) else result
        assert result is out
        scales = unswizzle(out.scale.view(torch.uint8), jitfp4.SfLayout.layout_128x4, *out.scale.shape)
        of_case = scales[7 : 7 + tokens].contiguous()
        got = jitfp4.nvfp4_dequantize(data.flatten(1), of_case, 1 / encode, jitfp4.SfLayout.layout_linear)
        assert relative_error(got.view(case.query.shape), case.expected()[0]) < 0.13

    return Trial("nvfp4 output", values | {"out": out, "out_dtype": None, "o_sf_scale": encode}, check)


def decode(call: Call) -> Iterator[Trial]:
    drafts = "max_q_len" in call["keywords"]
    for name, case in _caches(call):
        values = _function_values(case, call) | {"q_len_per_req": 1, "max_q_len": None, "cum_seq_lens_q": None}
        if call["keywords"].get("q_len_per_req") != "None":
            yield Trial(name, values | {"backend": "trtllm-gen", "**": {}}, _checked(case))
            if "o_sf_scale" in call["keywords"]:
                yield _to_fp4(case, values | {"backend": "trtllm-gen"})
    if drafts:
        for name, case in _caches(call, q_lens=(3, 1)):
            ragged = {"q_len_per_req": None, "max_q_len": 3, "cum_seq_lens_q": case.cum_seq_lens_q}
            values = _function_values(case, call) | {"backend": "trtllm-gen"} | ragged
            yield Trial(f"{name} drafts", values, _checked(case))
    elif "**" in call["keywords"]:
        case = Case(E4M3, lengths=(20, 9), q_lens=3)
        kwargs = {"q_len_per_req": 3, "mask": None}
        yield Trial("drafts", _function_values(case, call) | {"**": kwargs}, _checked(case))


def context(call: Call) -> Iterator[Trial]:
    causal = call["keywords"].get("causal") != "False"
    for name, case in _caches(call, lengths=(20, 9), q_lens=(7, 9), causal=causal):
        lists = {"cum_seq_lens_kv": torch.tensor([0, 20, 29], dtype=torch.int32), "causal": causal}
        values = _function_values(case, call) | case.context_arguments() | lists
        values |= {"out": torch.empty_like(case.query), "return_lse": False, "out_dtype": torch.bfloat16}
        yield Trial(name, values, _checked(case))
        if "o_sf_scale" in call["keywords"]:
            yield _to_fp4(case, values)


def xqa(call: Call) -> Iterator[Trial]:
    for ragged in (False, True):
        for name, case in _caches(call, q_lens=(3, 1) if ragged else 3, v_scale_layout="linear"):
            tokens = [0, 1, 2, 0] if ragged else [0, 1, 2] * 2
            mask = torch.tensor([[(2 << token) - 1, 0] for token in tokens], dtype=torch.int16)
            mask = mask if ragged else mask.view(2, 3, 2)
            drafts = {"mask": mask.view(torch.uint16), "q_cu_seq_lens": case.cum_seq_lens_q if ragged else None}
            values = _function_values(case, call) | drafts | {"q_len_per_req": 3}
            yield Trial(f"{name} {'ragged' if ragged else 'uniform'}", values, _checked(case))


# ---- wrappers --------------------------------------------------------------------------------------------------------


def _lists(case: Case) -> Arguments:
    """A case's pages as the lists of plan()."""
    counts = [-(-length // case.page) for length in case.lengths]
    pages = torch.cat([row[:count] for row, count in zip(case.block_tables, counts, strict=True)])
    ends = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)
    last = torch.tensor([(length - 1) % case.page + 1 for length in case.lengths], dtype=torch.int32)
    lists = {"indptr": ends, "indices": pages, "last_page_len": last}
    return lists | {f"paged_kv_{name}": value for name, value in lists.items()} | {"qo_indptr": case.cum_seq_lens_q}


def _sizes(case: Case) -> Arguments:
    d = case.head_dim
    heads = {"num_qo_heads": case.query.shape[1], "num_kv_heads": case.kv_heads}
    return heads | {"head_dim": d, "head_dim_qk": d, "head_dim_vo": d, "page_size": case.page}


def _settings(case: Case) -> Arguments:
    """Settings of plan() that engines compute; the rest is written in their sources."""
    return {
        "q_data_type": case.q_dtype,
        "kv_data_type": case.cache,
        "data_type": case.cache,
        "o_data_type": case.q_dtype,
        "sm_scale": case.bmm1,
        "window_left": -1,
        "logits_soft_cap": None,
        "causal": case.causal,
        "pos_encoding_mode": "NONE",
        "rope_scale": None,
        "rope_theta": None,
        "non_blocking": True,
        "fixed_split_size": -1,
        "disable_split_kv": False,
        "q_len_per_req": 1,
        "seq_lens": case.seq_lens,
        "custom_mask": None,
        "prefix_len_ptr": None,
        "token_pos_in_items_ptr": None,
        "token_pos_in_items_len": 0,
        "max_item_len_ptr": None,
        "global_override_indptr_cpu": _lists(case)["indptr"],
    }


def _case(call: Call, cache: torch.dtype, prefill: bool, **changes: Any) -> Case:
    """SGLang's pages hold one token, in a cache of three dimensions; vLLM's hold 16."""
    page = 1 if call["engine"] == "sglang" else 16
    q_lens = (7, 9) if prefill else 1
    usual = {"page": page, "kv_layout": "NHD", "lengths": (20, 9), "q_lens": q_lens, "group": 4}
    return Case(cache, **(usual | changes))  # type: ignore[arg-type]


def _cache_of(call: Call, case: Case) -> Any:
    if call["engine"] == "sglang":
        return tuple(side.squeeze(1) for side in case.kv_cache)
    return case.kv_cache


def _planned(wrapper: Any, case: Case, prefill: bool) -> Any:
    lists, sizes = _lists(case), _sizes(case)
    numbers = [sizes[name] for name in ("num_qo_heads", "num_kv_heads", "head_dim", "page_size")]
    kinds = {"sm_scale": case.bmm1, "q_data_type": case.q_dtype, "kv_data_type": case.cache}
    ordered = [lists[name] for name in ("indptr", "indices", "last_page_len")]
    if prefill:
        wrapper.plan(lists["qo_indptr"], *ordered, *numbers, causal=case.causal, **kinds)
    else:
        wrapper.plan(*ordered, *numbers, **kinds)
    return wrapper


def _attends(wrapper: Any, case: Case, older: bool = False) -> None:
    """A planned wrapper gives the attention of its case; the older names leave the mask to forward()."""
    if older:
        options = {"causal": case.causal} if isinstance(wrapper, Prefill) else {}
        out = wrapper.forward(case.query, case.kv_cache, sm_scale=case.bmm1, v_scale=case.bmm2, **options)
        _checked(case)(out, {})
        return
    out = wrapper.run(case.query, case.kv_cache, v_scale=case.bmm2, kv_cache_sf=case.kv_cache_sf)
    _checked(case)(out, {})


def construct(call: Call) -> Iterator[Trial]:
    prefill = call["callee"] == Prefill.__name__
    kinds = ((BF16, "auto"), (NVFP4, "fa2"), (NVFP4, "trtllm-gen")) if call["engine"] == "vllm" else ((BF16, "fa2"),)
    for cache, backend in kinds:
        order = "interleaved4" if backend == "trtllm-gen" else "linear"
        stated = call["keywords"].get("backend", "'auto'")
        if stated.startswith("'") and (backend == "trtllm-gen") != (stated == "'trtllm-gen'"):
            continue
        case = _case(call, cache, prefill, v_scale_layout=order)
        sizes = {"indptr": 3, "indices": 64, "last_page_len": 2}
        buffers = {f"paged_kv_{name}_{'buf' if prefill else 'buffer'}": _zeros(n) for name, n in sizes.items()}

        def check(wrapper: Any, _given: Arguments, case: Case = case) -> None:
            _attends(_planned(wrapper, case, prefill), case)

        values = {
            "float_workspace_buffer": case.workspace,
            "kv_layout": case.kv_layout,
            "use_cuda_graph": False,
            "use_tensor_cores": True,
            "backend": backend,
            "qo_indptr_buf": _zeros(3),
            **buffers,
            "**": {},
        }
        yield Trial(f"{cache} {backend}".replace("torch.", ""), values, check)


def _zeros(count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.int32)


def plan(call: Call) -> Iterator[Trial]:
    prefill = is_prefill(call)
    caches = (BF16, NVFP4) if call["engine"] == "vllm" and call["positional"] == [] else (BF16,)
    for cache in caches:
        chosen = {"kv_heads": 1, "causal": False, "page": 8, "q_lens": 1}  # one row of queries for chosen pages
        changes = chosen if call["callee"] == "self.wrapper.plan" else {}
        case = _case(call, cache, prefill, **changes)
        kind = Prefill if prefill else Decode
        wrapper = kind(case.workspace, "NHD", backend="fa2")

        def check(_result: Any, _given: Arguments, case: Case = case, wrapper: Any = wrapper) -> None:
            _attends(wrapper, case, older=call["callee"].endswith("begin_forward"))

        values = {**_lists(case), **_sizes(case), **_settings(case), "**": {}}
        function = _method(wrapper, call)
        if "global_override_indptr_cpu" in call["keywords"]:
            function = _fast_decode_plan(wrapper)
        yield Trial(str(cache).removeprefix("torch."), values, check, function)


def _fast_decode_plan(wrapper: Any) -> Callable[..., None]:
    """What SGLang puts in the place of begin_forward(): FlashInfer's planner, or, without FlashInfer, what this leaves
    to a wrapper like ours (decode.py, 4865 to 4901)."""
    try:
        from flashinfer.decode import fast_decode_plan
    except ImportError:

        def fast_decode_plan(
            wrapper: Any, _indptr: Any, *lists: Any, global_override_indptr_cpu: Any, **kinds: Any
        ) -> None:
            wrapper._plan_impl(global_override_indptr_cpu, *lists, **kinds)

    return functools.partial(fast_decode_plan, wrapper)


def run(call: Call) -> Iterator[Trial]:
    prefill = is_prefill(call)
    scaled = "kv_cache_sf" in call["keywords"]
    causal = call["keywords"].get("causal") != "False"
    for cache in (BF16, E4M3, NVFP4) if scaled else (BF16, E4M3):
        case = _case(call, cache, prefill, **({"causal": causal} if prefill else {}))
        case = _with_factor(case, call["keywords"].get("v_scale"))
        wrapper = _planned((Prefill if prefill else Decode)(case.workspace, "NHD", backend="fa2"), case, prefill)
        values = {
            "q": case.query,
            "paged_kv_cache": _cache_of(call, case),
            "q_scale": 1.0,
            "k_scale": 1.0,
            "v_scale": case.bmm2,
            "out": torch.empty_like(case.query),
            "lse": torch.empty(case.query.shape[:2]),
            "kv_cache_sf": case.kv_cache_sf,
            "sinks": None,
            "sm_scale": case.bmm1,
            "window_left": -1,
            "logits_soft_cap": 0.0,
            "causal": causal,
        }
        yield Trial(str(cache).removeprefix("torch."), values, _checked(case), _method(wrapper, call))


def _method(wrapper: Any, call: Call) -> Callable[..., Any]:
    """The method that is called; one that the wrapper lacks is missed when it is called."""
    name = call["callee"].rpartition(".")[2]
    return lambda *positional, **keywords: getattr(wrapper, name)(*positional, **keywords)


def is_prefill(call: Call) -> bool:
    """Whether the wrapper of a call is the prefill wrapper."""
    return any(word in call["callee"] for word in ("refill", "paged", "self.wrapper"))


def class_of(call: Call) -> str:
    """FlashInfer's class of the wrapper whose method is called."""
    return (Prefill if is_prefill(call) else Decode).__name__


def _at(line: int, file: str) -> Callable[[Call], bool]:
    return lambda call: (call["line"], call["file"].rpartition("/")[2]) == (line, file)


def _calls_of(word: str) -> Callable[[Call], bool]:
    return lambda call: word in call["callee"]


def _passes(word: str) -> Callable[[Call], bool]:
    return lambda call: word in call["keywords"]


TRIALS = {
    "trtllm_batch_decode_with_kv_cache": decode,
    "trtllm_batch_context_with_kv_cache": context,
    "xqa_batch_decode_with_kv_cache": xqa,
    Decode.__name__: construct,
    Prefill.__name__: construct,
    **{f"{name}.plan": plan for name in ("self", "self.wrapper", "prefill_wrapper")},
    **{f"{name}.begin_forward": plan for name in ("wrapper", "wrapper_paged")},
    **{f"{name}.run": run for name in ("self.wrapper", "prefill_wrapper", "decode_wrapper")},
    **{f"{name}.forward": run for name in ("prefill_wrapper_paged", "decode_wrapper")},
    "prefill_wrapper_paged.forward_return_lse": run,
}

OTHERS = (
    (_calls_of("ragged"), "the wrapper of keys and values that are no pages, which stays FlashInfer's"),
    (_passes("dcp_world_size"), "vLLM's own wrapper of context parallelism"),
    (_at(2393, "flashinfer.py"), "run() of vLLM's own wrapper of context parallelism"),
    (_at(2435, "flashinfer.py"), "FlashInfer's wrapper with sinks: a class of its own"),
    (_passes("global_override_indptr_cpu"), "FlashInfer's fast_decode_plan, which plans by the wrapper's _plan_impl()"),
)
"""Calls of something else that looks the same."""

PENDING: tuple[tuple[Callable[[Call], bool], str], ...] = ()
"""Calls that are refused, and what is missing: to be emptied."""

REFUSED = (
    (_passes("enable_block_sparse_attention"), "attention to chosen blocks, in SGLang's MiniMax models"),
    (lambda call: "Situ" in call["keywords"].get("activation_type", ""), "experts with SiTU, in SGLang"),
    (lambda call: call["keywords"].get("do_finalize") == "False", "experts without their sum, in models of Muse Spark"),
)
"""Calls that stay the engine's."""

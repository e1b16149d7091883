"""Bad values for each argument of every public function, and what becomes of them."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch

import jitfp4
from jitfp4 import sim
from jitfp4.errors import ArgumentError
from tests.inputs.good import Arguments, good_calls

_HUGE = 10**400


def function_of(call: str) -> Callable[..., Any]:
    """The function, class or method that a good call is of."""
    return functools.reduce(getattr, call.split()[0].split("."), jitfp4)  # type: ignore[return-value]


def callables() -> Iterator[tuple[str, Callable[..., object]]]:
    """What the package exports and takes arguments: functions, classes and their methods, but for exceptions."""
    for name in jitfp4.__all__:
        value = getattr(jitfp4, name)
        if callable(value) and not (isinstance(value, type) and issubclass(value, Exception)):
            kept = vars(value).items() if isinstance(value, type) else ()
            members = [key for key, member in kept if key[0] != "_" and not isinstance(member, functools.partialmethod)]
            methods = ((f"{name}.{key}", getattr(value, key)) for key in members)
            for called, function in ((name, value), *methods):
                if callable(function) and inspect.signature(function).parameters.keys() - {"self"}:
                    yield called, function


class Bad(NamedTuple):
    """One argument of a function with a bad value."""

    function: str
    argument: str
    what: str
    arguments: Arguments

    def __str__(self) -> str:
        return f"{self.function}({self.argument}={self.what})"


def bad_calls(name: str, device: str) -> Iterator[Bad]:
    """Every bad value of every argument of a function, one at a time."""

    def make() -> Arguments:
        with torch.device(device):
            return good_calls()[name]()

    for parameter in inspect.signature(function_of(name)).parameters.values():
        if parameter.name == "self":
            continue
        given = make().get(parameter.name, parameter.default)
        for what, value in _bad_values(parameter, given):
            yield Bad(name, parameter.name, what, make() | {parameter.name: value})
        written = parameter.name in _WRITTEN and (name, parameter.name) not in _ONLY_READ
        for other in make() if written and isinstance(given, torch.Tensor) else ():
            arguments = make()
            tensor = arguments[other][0] if isinstance(arguments[other], tuple) else arguments[other]
            if other != parameter.name and isinstance(tensor, torch.Tensor) and tensor.nbytes >= given.nbytes:
                dense = tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))
                memory = dense.view(-1).view(torch.uint8)[: given.nbytes].view(given.dtype).view(given.shape)
                yield Bad(name, parameter.name, f"memory of {other}", arguments | {parameter.name: memory})
        if parameter.name in _UPDATED.get(name, ()):
            yield from _aliases(name, parameter.name, make)


def _aliases(name: str, written: str, make: Callable[[], Arguments]) -> Iterator[Bad]:
    """Every other tensor inside the memory of a cache or of states that the function updates, and K in that of V."""
    for other in make():
        arguments = make()
        pair = arguments[written] if isinstance(arguments[written], tuple) else (arguments[written],)
        if other == written:
            if len(pair) == 2:
                yield Bad(name, written, "K as V", arguments | {written: (pair[0], pair[0][:])})
            continue
        given = arguments[other][0] if isinstance(arguments[other], tuple) else arguments[other]
        is_read = other != "kv_last_page_len"
        if is_read and isinstance(given, torch.Tensor) and given.nbytes <= pair[0].nbytes:
            inside = pair[0].view(-1).view(torch.uint8)[: given.nbytes].view(given.dtype).view(given.shape)
            inside.copy_(given)
            whole = (inside, arguments[other][1]) if isinstance(arguments[other], tuple) else inside
            yield Bad(name, written, f"memory of {other}", arguments | {other: whole})


_APPENDED = ("paged_kv_cache", "kv_cache_sf")
_UPDATED = {
    "nvfp4_quantize_append_paged_kv_cache": _APPENDED,
    "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping": _APPENDED,
    "gated_delta_rule_mtp": ("initial_state", "intermediate_states_buffer"),
    "gated_delta_rule_decode_pretranspose": ("state", "intermediate_states_buffer"),
    "gated_delta_rule_decode": ("state",),
    "causal_conv1d_fn": ("conv_states",),
    "causal_conv1d_update": ("conv_state",),
    "DecodeStep.run": ("kv_cache", "kv_cache_sf"),
}
"""What functions write in place that is no output."""

_WRITTEN = (
    *("out", "out_sf", "y_fp4", "block_scale", "block_scale_unswizzled", "y_out", "output", "residual"),
    *("lse", "output_k", "output_v", "logits", "out_ids", "out_weights"),
    *("topk_indices", "topk_values"),
)
_ONLY_READ = {("mm_bf16_fp4", "residual"), ("fp4_experts", "residual"), ("route_experts", "logits")}


def verdict(bad: Bad) -> str:
    """``clear`` for a typed error that names the argument; else what is wrong."""
    before = {name: value.clone() for name, value in bad.arguments.items() if _is_plain(value)}
    try:
        function_of(bad.function)(**bad.arguments)
    except ArgumentError as error:
        named = {part.strip() for part in error.name.split(",")}
        fits_no_other = _fits_no_other(bad) or bad.what.removeprefix("memory of ") in named
        if bad.argument not in named and not (fits_no_other and named & bad.arguments.keys()):
            return f"names another: {error}"
        touched = [n for n, old in before.items() if not torch.equal(_bytes(bad.arguments[n]), _bytes(old))]
        return f"wrote {touched} before the error" if touched else "clear"
    except Exception as error:  # what the campaign looks for
        return f"untyped {type(error).__name__}: {str(error)[:90]}"
    return "clear" if is_allowed(bad) else "accepted"


def _fits_no_other(bad: Bad) -> bool:
    """The function would take the value if another argument fitted it: the error may name that one."""
    sized = bad.what in ("one element too many", "one element too few") and bad.argument in (
        *_LISTS,
        "k",
        "q",
        "x",
        "topk_ids",
        "scores",
        "logits",  # their number is that of experts, which groups divide
    )
    return (
        sized
        or " in dimension " in bad.what
        or bad.what.removeprefix("K ").removeprefix("V ") in ("on meta", "of another rank", "one row too many")
        or (bad.argument == "q_len_per_req" and bad.what == "7")
        or (bad.argument == "cum_seq_lens_q" and bad.what in ("meta", "complex"))
    )


_LISTS = (
    *("batch_indices", "positions", "slot_mapping", "kv_indices", "kv_indptr", "seq_lens", "cum_seq_lens_q"),
    *("indptr", "indices", "last_page_len", "paged_kv_indptr_buffer", "paged_kv_indices_buffer"),
    *("paged_kv_last_page_len_buffer", "qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len"),
    *("qo_indptr_buf", "paged_kv_indptr_buf", "paged_kv_indices_buf", "paged_kv_last_page_len_buf"),
    *("cum_seq_lens_kv", "cu_seqlens", "batch_size", "unswizzled_sf", "query_start_loc", "conv_state_indices"),
)
"""Arguments whose lengths go together: lists of integers, and scales with the place for their copy."""


def is_allowed(bad: Bad) -> bool:
    """Whether a value is accepted on purpose: the documented list."""
    scales = "scale" in bad.argument or "global_sf" in bad.argument or bad.argument in _FLAT
    anything = bad.function in _PERMUTATIONS or bad.argument == "input_tensor"
    return (
        bad.what.removeprefix("K ").removeprefix("V ").startswith(_HARMLESS)
        or any(f" {what}" in bad.what for what in _HARMLESS)  # a part of a dict
        or (bad.what == "of another rank" and scales)  # flattened or not, the elements are what counts
        or (bad.what == "of another rank" and bad.argument in _LEADING)  # leading dimensions
        or (
            bad.what == "one row too many" and bad.argument in ("a", "input", "e2m1_tensor", "cos_sin_cache")
        )  # m is free
        or (anything and bad.what.startswith(("one ", "broadcast", "every other", "of torch.", "on meta")))
        or (bad.function == "make_nvfp4_global_scale" and bad.what == "of another rank")  # an amax of any tensor
        or (bad.function == "fp8_row_scale" and bad.what == "on meta")  # torch operations
        or (bad.function == "silu_and_mul" and bad.what in ("broadcast", "every other element"))  # torch operations
        or (
            bad.argument == "int_workspace_buffer" and isinstance(bad.arguments[bad.argument], torch.Tensor)
        )  # not used
        or bad.argument == "metadata"  # not used
        or (bad.function == "FP4Tensor" and bad.what.startswith(("one ", "of another rank")))  # sizes are free
        or (bad.function, bad.argument, bad.what) == ("causal_conv1d_update", "out", "memory of x")  # in place
        or (bad.argument == "block_size" and bad.what == "16")
        or (bad.argument in _BUFFERS and bad.what.startswith(("of torch.", "of another rank", "one element")))
        or (
            bad.argument in ("bmm1_scale", "bmm2_scale") and bad.what in ("0.0", "-1.0", "1e-300")
        )  # a factor like another
        or (
            bad.function.startswith("xqa")
            and bad.argument == "mask"
            and bad.what in ("broadcast", "every other element")
        )
        or (bad.what == "K twice" and "append" not in bad.function)  # a cache may be read twice
        or (bad.argument, bad.what) in _LEGAL
        or ((bad.argument, bad.what) in _LEGAL_FOR_KERNELS and _runs_a_kernel(bad))
    )


_HARMLESS = ("a leaf", "of inference mode", "empty in dimension")
"""What torch has for other purposes than its values, and nothing to do: taken, or a typed error."""
_PERMUTATIONS = ("block_scale_interleave", "nvfp4_block_scale_interleave", "shuffle_matrix_a", "shuffle_matrix_sf_a")
_LEADING = ("input", "a", "e2m1_tensor", "weight")
_FLAT = ("a_sf", "ufp8_scale_tensor", "alpha")
_BUFFERS = ("workspace_buffer", "float_workspace_buffer")  # of any type; too small ones are refused at the launch
_LEGAL = {
    *itertools.product(("window_left",), ("0", "7")),
    *itertools.product(("max_seq_len",), ("0", "7")),  # it only helps to choose a kernel
    *itertools.product(("page_size", "q_len_per_req", "max_q_len"), ("7",)),
    ("window_right", "0"),
    *(("num_ranks", "0"), ("sm_count", "7")),  # the default; not used
    ("num_qo_heads", "7"),
    ("named", "data on meta"),  # a weight without memory, as torch's modules may have
    ("named", "without bias13"),  # biases are optional
    ("named", "without bias2"),
    *itertools.product(("expert_map",), ("one element too many", "one element too few")),  # any number of experts
    ("w13_alpha", "one element too few"),  # one for both halves
    *itertools.product(("expert", "layer", "null_block_id"), ("0",)),
    *itertools.product(("null_block_id",), ("-16", "7")),  # a slot that is none
    ("pad_slot_id", "-16"),
    *itertools.product(("max_query_len",), ("0", "-16")),  # not used
    ("weight", "one element too few"),  # a filter of three taps
    *itertools.product(("conv_states", "conv_state"), ("one element too many", "every other element")),
    *itertools.product(("q", "k"), ("one row too many",)),  # another head
    *itertools.product(("max_seqlen",), ("0", "7")),  # not used
    *itertools.product(("block_tables",), ("one element too many", "one element too few")),  # columns are free
    *itertools.product(("block_tables",), ("meta", "complex")),  # of plan(), which does not need it
    *itertools.product(("seq_lens_q",), ("meta", "complex")),  # likewise
    ("multi_ctas_kv_counter_buffer", "complex"),  # likewise
    *itertools.product(("max_kv_len", "max_sequence_kv"), ("0", "7")),  # likewise bounds
    *itertools.product(("max_token_per_sequence", "uniform_q_len"), ("7",)),
    *(("cp_rank", "0"), ("request_order_plan", "None"), ("scale_start_index", "0")),  # the defaults
    ("scale_start_index", "7"),
    ("token_pos_in_items_len", "0"),
    *itertools.product(("kv_indices", "indices", "paged_kv_indptr_buffer"), ("one element too many",)),  # room
    *itertools.product(("paged_kv_indices_buffer",), ("one element too many", "one element too few")),
    *itertools.product(("slot_mapping", "indices", "paged_kv_last_page_len_buffer"), ("one element too few",)),
    *itertools.product(("paged_kv_indices", "paged_kv_indices_buf"), ("one element too many", "one element too few")),
    *itertools.product(("qo_indptr_buf", "paged_kv_indptr_buf"), ("one element too many",)),
    ("paged_kv_last_page_len_buf", "one element too few"),
}

_LEGAL_FOR_KERNELS = {("kv_indices", "one element too few")}
"""What the reference refuses and a kernel takes, because it shows in values, which the host would have to wait for.

A request whose pages end behind the last of ``kv_indices`` has none: its tokens are skipped, and nothing outside of the
list is read. ``test_indices_outside_are_skipped_on_gpu`` and ``_in_the_simulator`` see to that, as "bounds".
"""


def _runs_a_kernel(bad: Bad) -> bool:
    on_gpu = any(isinstance(value, torch.Tensor) and value.is_cuda for value in bad.arguments.values())
    return on_gpu or sim.active_device() is not None


def _is_plain(value: object) -> bool:
    plain = isinstance(value, torch.Tensor) and value.layout is torch.strided
    return plain and not (value.is_meta or value.is_quantized)  # type: ignore[attr-defined]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return (
        tensor.resolve_neg().clone(memory_format=torch.contiguous_format).view(torch.uint8) if tensor.dim() else tensor
    )


def _bad_values(parameter: inspect.Parameter, given: Any) -> Iterator[tuple[str, Any]]:
    kind = str(parameter.annotation)
    yield from (("an object", object()), ("a dict", {}), ("bytes", b"x"), ("a list", [1.0]))
    if "None" not in kind:
        yield "None", None
    if isinstance(given, torch.Tensor):
        yield from _bad_tensors(given)
        if "float" in kind:
            yield from _bad_scales(positive=True)
    elif isinstance(given, tuple):
        yield from _bad_pairs(given)
    elif isinstance(given, dict):
        yield from _bad_dicts(given)
    elif isinstance(given, jitfp4.Fp4Weight):
        yield from (("a str", "x"), ("7", 7), ("its data", given.data))
        data, scale = given.data.to("meta"), given.row_scale
        yield "on meta", dataclasses.replace(given, data=data, row_scale=None if scale is None else scale.to("meta"))
        yield from (("resized", _resized(given, "data", 1)), ("emptied", _resized(given, "data", 0)))
    elif isinstance(given, jitfp4.Fp4Experts):
        yield from (("a str", "x"), ("7", 7), ("its w13", given.w13))
        yield from ((f"{part} of {size}", _resized(given, part, size)) for part in ("w13", "scale2") for size in (0, 1))
    else:
        yield from next((values for part, values in _BY_KIND.items() if part in kind), tuple)()


def _resized(prepared: Any, part: str, size: int) -> Any:
    """Prepared tensors of which one has lost its elements since."""
    fields = {field.name: getattr(prepared, field.name) for field in dataclasses.fields(prepared)}
    made = type(prepared)(**fields | {part: fields[part].clone()})
    getattr(made, part).resize_(size)
    return made


_BY_KIND: dict[str, Callable[[], Iterable[tuple[str, Any]]]] = {
    "bool": lambda: (("a str", "x"), ("2", 2), ("two elements", torch.ones(2)), ("nan", math.nan)),
    "SfLayout": lambda: (("99", 99), ("a str", "128x4"), ("-1", -1), ("1.5", 1.5), ("nan", math.nan)),
    "int": lambda: (("a str", "16"), *((str(n), n) for n in (0, -16, 7, 16.5, math.nan)), ("10**400", _HUGE)),
    "dtype": lambda: (("a str", "float17"), ("int64", torch.int64), ("float", float), ("7", 7)),
    "str": lambda: (("another", "nothing"), ("7", 7), ("two elements", torch.ones(2))),
    "float": lambda: _bad_scales(positive=False),
    "object": lambda: (("a str", "x"), ("7", 7)),
    "Tensor": lambda: _BAD_IN_PLACE_OF_NONE,
    "Pair": lambda: _BAD_IN_PLACE_OF_NONE,
    "BlockFormat": lambda: (("a str", "nvfp4"), ("16", 16)),
}
"""By what an annotation holds: bad values for what is neither a tensor nor made of tensors."""

_BAD_IN_PLACE_OF_NONE = (
    ("a str", "x"),
    ("7", 7),
    ("meta", torch.empty(1, device="meta")),
    ("complex", torch.zeros(1, dtype=torch.complex64)),
)


def _bad_pairs(good: tuple[torch.Tensor, ...]) -> Iterator[tuple[str, Any]]:
    k, v = good
    yield from (("a str", "x"), ("7", 7), ("one of two", (k,)), ("three", (k, v, v)), ("K and None", (k, None)))
    yield from (("K twice", (k, k)), ("K by itself", k), ("K on a str", (k, "x")))
    yield from ((f"K {what}", (bad, v)) for what, bad in _bad_tensors(k))
    yield from ((f"V {what}", (k, bad)) for what, bad in _bad_tensors(v))


def _bad_dicts(good: dict[str, torch.Tensor]) -> Iterator[tuple[str, Any]]:
    yield from (("a str", "x"), ("one more", {**good, "more": torch.ones(1)}))
    for name, tensor in good.items():
        yield f"without {name}", {key: value for key, value in good.items() if key != name}
        yield from ((f"{name} {what}", {**good, name: bad}) for what, bad in _bad_tensors(tensor))


def _bad_tensors(good: torch.Tensor) -> Iterator[tuple[str, Any]]:
    yield "a str", "x"
    yield "a NumPy array", good.float().cpu().numpy()
    for dtype in (torch.complex64, torch.bool, torch.float64, torch.int16):
        if dtype is not good.dtype:
            yield f"of {dtype}", good.to(dtype)
    yield "on meta", good.to("meta")
    yield "sparse", good.float().to_sparse() if good.dim() else good.float().reshape(1).to_sparse()
    yield "of another rank", good.unsqueeze(0).unsqueeze(0).unsqueeze(0)
    if good.is_floating_point() and good.dtype.itemsize > 1:
        yield "negated", torch._neg_view(good)  # its memory holds the values with the other sign
        yield "quantized", torch.quantize_per_tensor(good.float(), 1.0, 0, torch.quint8)
    yield "a leaf", good.clone().requires_grad_() if good.is_floating_point() else good.clone()
    with torch.inference_mode():
        yield "of inference mode", good.clone()
    for dimension in range(good.dim()):
        yield f"empty in dimension {dimension}", good.narrow(dimension, 0, 0).contiguous()
    yield "a number of int16", torch.tensor(3, dtype=torch.int16, device=good.device)
    if good.dim() and good.numel() > 1:
        yield "one element too many", torch.cat([good, good], -1)[..., : good.shape[-1] + 1].contiguous()
        yield "one element too few", good[..., :-1].contiguous()
        yield "broadcast", good[..., :1].expand(good.shape)
    if good.dim() > 1:
        yield "one row too many", torch.cat([good, good], -2)[..., : good.shape[-2] + 1, :].contiguous()
        wide = good.new_zeros(*good.shape[:-1], 2 * good.shape[-1])
        yield "every other element", wide[..., ::2]


def _bad_scales(*, positive: bool) -> Iterator[tuple[str, Any]]:
    yield from (("a str", "1.0"), ("nan", math.nan), ("inf", math.inf), ("10**400", _HUGE), ("1e300", 1e300))
    yield from (("-1e300", -1e300), ("1e39", 1e39), ("-inf", -math.inf))
    yield from (("complex", 1j), ("six elements", torch.ones(3, 2)))
    if positive:
        yield from (("0.0", 0.0), ("-1.0", -1.0), ("1e-300", 1e-300))

"""A good call of every public function, and bad values for each of its arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

import jitfp4
from jitfp4.errors import ArgumentError

Arguments = dict[str, Any]
_HUGE = 10**400


class Bad(NamedTuple):
    """One argument of a function with a bad value."""

    function: str
    argument: str
    what: str
    arguments: Arguments

    def __str__(self) -> str:
        return f"{self.function}({self.argument}={self.what})"


def good_calls() -> dict[str, Callable[[], Arguments]]:
    """By function: arguments that it accepts, fresh each time."""

    def half(*shape: int) -> torch.Tensor:
        return torch.randn(*shape).bfloat16()

    def codes(*shape: int) -> torch.Tensor:
        return torch.zeros(*shape, dtype=torch.uint8)

    one = lambda: torch.ones(1)  # noqa: E731
    gates = lambda: {"A_log": torch.zeros(2), "a": half(2, 1, 2), "dt_bias": torch.zeros(2), "b": half(2, 1, 2)}  # noqa: E731
    qkv = lambda: {"q": half(2, 1, 1, 64), "k": half(2, 1, 1, 64), "v": half(2, 1, 2, 64)}  # noqa: E731
    state = lambda: torch.zeros(2, 2, 64, 64)  # noqa: E731
    return {
        "nvfp4_quantize": lambda: {
            "a": half(4, 64),
            "a_global_sf": one(),
            "out": codes(4, 32),
            "out_sf": codes(128, 4),
        },
        "mxfp4_quantize": lambda: {"a": half(4, 64), "out": codes(4, 32), "out_sf": codes(128, 4)},
        "fp4_quantize": lambda: {"input": half(4, 64), "global_scale": one()},
        "silu_and_mul_nvfp4_quantize": lambda: {"input": half(4, 64), "global_scale": one()},
        "nvfp4_batched_quantize": lambda: {"a": half(2, 4, 64), "a_global_sf": one()},
        "scaled_fp4_grouped_quantize": lambda: {
            "a": half(2, 4, 64),
            "mask": torch.ones(2, dtype=torch.int32),
            "a_global_sf": torch.ones(2),
        },
        "silu_and_mul_scaled_nvfp4_experts_quantize": lambda: {
            "a": half(2, 4, 64),
            "mask": torch.ones(2, dtype=torch.int32),
            "a_global_sf": torch.ones(2),
        },
        "nvfp4_dequantize": lambda: {
            "a_fp4": codes(4, 32),
            "a_sf": codes(128, 4),
            "global_decode_scale": one(),
            "out": torch.zeros(4, 64),
        },
        "mxfp4_dequantize": lambda: {"a_fp4": codes(4, 32), "a_sf": codes(128, 4), "out": torch.zeros(4, 64)},
        "e2m1_and_ufp8sf_scale_to_float": lambda: {
            "e2m1_tensor": codes(4, 32),
            "ufp8_scale_tensor": codes(128, 4),
            "global_scale_tensor": one(),
        },
        "block_scale_interleave": lambda: {"unswizzled_sf": codes(4, 4)},
        "shuffle_matrix_a": lambda: {"input_tensor": codes(128, 32), "epilogue_tile_m": 128},
        "shuffle_matrix_sf_a": lambda: {"input_tensor": codes(128, 4), "epilogue_tile_m": 128},
        "rmsnorm_fp4quant": lambda: {
            "input": half(4, 64),
            "weight": half(64),
            "y_fp4": codes(4, 32),
            "block_scale": codes(4, 4),
            "global_scale": one(),
        },
        "add_rmsnorm_fp4quant": lambda: {
            "input": half(4, 64),
            "residual": half(4, 64),
            "weight": half(64),
            "y_fp4": codes(4, 32),
            "block_scale": codes(512),
            "global_scale": one(),
            "output_both_sf_layouts": True,
            "block_scale_unswizzled": codes(4, 4),
            "y_out": half(4, 64),
        },
        "mm_fp4": lambda: {
            "a": codes(4, 32),
            "b": codes(8, 32).T,
            "a_descale": codes(128, 4),
            "b_descale": codes(128, 4).T,
            "alpha": one(),
            "out": half(4, 8),
        },
        "gated_delta_rule_mtp": lambda: {
            **qkv(),
            "initial_state": state(),
            "initial_state_indices": torch.arange(2),
            **gates(),
            "output": half(2, 1, 2, 64),
            "intermediate_states_buffer": torch.zeros(2, 1, 2, 64, 64),
            "output_state_indices": torch.arange(2),
        },
        "gated_delta_rule_decode_pretranspose": lambda: {
            **qkv(),
            "state": state(),
            **gates(),
            "output": half(2, 1, 2, 64),
        },
        "gated_delta_rule_decode": lambda: {**qkv(), "state": state(), **gates(), "output": half(2, 1, 2, 64)},
    }


def bad_calls(name: str, device: str) -> Iterator[Bad]:
    """Every bad value of every argument of a function, one at a time."""

    def make() -> Arguments:
        given = good_calls()[name]()
        return {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in given.items()}

    for parameter in inspect.signature(getattr(jitfp4, name)).parameters.values():
        given = make().get(parameter.name, parameter.default)
        for what, value in _bad_values(parameter, given):
            yield Bad(name, parameter.name, what, make() | {parameter.name: value})
        for other in make() if parameter.name in _WRITTEN and isinstance(given, torch.Tensor) else ():
            arguments = make()
            tensor = arguments[other]
            if other != parameter.name and isinstance(tensor, torch.Tensor) and tensor.nbytes >= given.nbytes:
                dense = tensor if tensor.is_contiguous() else tensor.T
                memory = dense.view(-1).view(torch.uint8)[: given.nbytes].view(given.dtype).view(given.shape)
                yield Bad(name, parameter.name, f"memory of {other}", arguments | {parameter.name: memory})


_WRITTEN = ("out", "out_sf", "y_fp4", "block_scale", "block_scale_unswizzled", "y_out", "output", "residual")


def verdict(bad: Bad) -> str:
    """``clear`` for a typed error that names the argument; else what is wrong."""
    before = {name: value.clone() for name, value in bad.arguments.items() if _is_plain(value)}
    try:
        getattr(jitfp4, bad.function)(**bad.arguments)
    except ArgumentError as error:
        named = {part.strip() for part in error.name.split(",")}
        fits_no_other = bad.what in _LEGAL_ALONE or bad.what.removeprefix("memory of ") in named
        if bad.argument not in named and not (fits_no_other and named <= bad.arguments.keys()):
            return f"names another: {error}"
        touched = [n for n, old in before.items() if not torch.equal(_bytes(bad.arguments[n]), _bytes(old))]
        return f"wrote {touched} before the error" if touched else "clear"
    except Exception as error:  # what the campaign looks for
        return f"untyped {type(error).__name__}: {str(error)[:90]}"
    return "clear" if _is_allowed(bad) else "accepted"


_LEGAL_ALONE = ("on meta", "of another rank", "one row too many")
"""Values that the function would take if another argument fitted them: the error may name that one."""


def _is_allowed(bad: Bad) -> bool:
    """What is accepted on purpose."""
    scales = "scale" in bad.argument or "global_sf" in bad.argument or bad.argument in ("a_sf", "alpha")
    anything = bad.function in ("block_scale_interleave", "shuffle_matrix_a", "shuffle_matrix_sf_a")
    return (
        (bad.what == "of another rank" and scales)  # flattened or not, the elements are what counts
        or (bad.what == "of another rank" and bad.argument in ("input", "a", "e2m1_tensor"))  # leading dimensions
        or (bad.what == "one row too many" and bad.argument in ("a", "input", "e2m1_tensor"))  # m is free
        or (anything and bad.what.startswith(("one ", "broadcast", "every other", "of torch.", "on meta")))
        or (bad.argument == "block_size" and bad.what == "16")
    )


def _is_plain(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_meta


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8) if tensor.dim() else tensor


def _bad_values(parameter: inspect.Parameter, given: Any) -> Iterator[tuple[str, Any]]:
    kind = str(parameter.annotation)
    may_be_none = "None" in kind
    yield from (("an object", object()), ("a dict", {}), ("bytes", b"x"), ("a list", [1.0]))
    if not may_be_none:
        yield "None", None
    if isinstance(given, torch.Tensor):
        yield from _bad_tensors(given)
        if "float" in kind:
            yield from _bad_scales(positive=True)
    elif "bool" in kind:
        yield from (("a str", "x"), ("2", 2), ("two elements", torch.ones(2)), ("nan", float("nan")))
    elif "SfLayout" in kind:
        yield from (("99", 99), ("a str", "128x4"), ("-1", -1), ("1.5", 1.5), ("nan", float("nan")))
    elif "int" in kind:
        yield from (
            ("a str", "16"),
            ("0", 0),
            ("-16", -16),
            ("7", 7),
            ("16.5", 16.5),
            ("nan", float("nan")),
            ("10**400", _HUGE),
        )
    elif "dtype" in kind:
        yield from (("a str", "float32"), ("int64", torch.int64), ("float", float))
    elif "str" in kind:
        yield from (("another", "nothing"), ("7", 7), ("two elements", torch.ones(2)))
    elif "float" in kind:
        yield from _bad_scales(positive=False)
    elif "Tensor" in kind:
        yield from (("a str", "x"), ("7", 7), ("meta", torch.empty(1, device="meta")))
        yield "complex", torch.zeros(1, dtype=torch.complex64)


def _bad_tensors(good: torch.Tensor) -> Iterator[tuple[str, Any]]:
    yield "a str", "x"
    yield "a NumPy array", good.float().cpu().numpy()
    for dtype in (torch.complex64, torch.bool, torch.float64, torch.int16):
        if dtype is not good.dtype:
            yield f"of {dtype}", good.to(dtype)
    yield "on meta", good.to("meta")
    yield "sparse", good.float().to_sparse() if good.dim() else good.float().reshape(1).to_sparse()
    yield "of another rank", good.unsqueeze(0).unsqueeze(0).unsqueeze(0)
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
    yield from (("a str", "1.0"), ("nan", float("nan")), ("inf", float("inf")), ("10**400", _HUGE))
    yield from (("complex", 1j), ("six elements", torch.ones(3, 2)))
    if positive:
        yield from (("0.0", 0.0), ("-1.0", -1.0))

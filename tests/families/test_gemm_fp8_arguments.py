"""mm_fp8_fp4: wrong values and types are named."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from jitfp4 import ArgumentError, ArgumentTypeError, fp8_row_scale, mm_fp8_fp4, prepare_fp4_weight
from jitfp4.formats import NVFP4
from tests.support.gemm import LINEAR, make_weight

E4M3 = torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("a", torch.zeros(4, 64).to(E4M3)),
        ("a_scale", torch.ones(3)),
        ("a_scale", torch.ones(8)[::2]),
        ("row_scale", torch.ones(8)),
        ("row_scale", torch.ones(64, 1)),
        ("alpha", torch.ones(2)),
        ("bias", torch.ones(16).bfloat16()),
        ("out", torch.ones(4, 16).bfloat16()),
        ("out_dtype", torch.float32),
    ],
    ids=str,
)
def test_wrong_values_are_named(name: str, given: Any) -> None:
    weight = make_weight(8, 32, NVFP4)
    good = {"a": torch.zeros(4, 32).to(E4M3), "a_scale": torch.ones(4), "weight": weight, "row_scale": torch.ones(64)}
    with pytest.raises(ArgumentError, match=f"^{name}:"):
        mm_fp8_fp4(**{**good, name: given})


def test_activations_of_other_weights() -> None:
    codes, scales = torch.zeros(16, 16, dtype=torch.uint8), torch.full((16, 2), 0x38, dtype=torch.uint8)
    plain, gated = (prepare_fp4_weight(codes, scales, sf_layout=LINEAR, order=order) for order in (None, "interleaved"))
    a, bias = torch.zeros(4, 32), torch.ones(16).bfloat16()
    for error, weight, more in (
        ("^activation: got None", gated, {}),
        ("^activation: got 'gelu'", gated, {"activation": "gelu"}),
        ("^activation: got 'swiglu'", plain, {"activation": "swiglu"}),
        ("^bias", gated, {"activation": "swiglu", "bias": bias}),
    ):
        with pytest.raises(ArgumentError, match=error):
            mm_fp8_fp4(a.to(E4M3), torch.ones(4), weight, fp8_row_scale(weight), **more)


@pytest.mark.parametrize("name", ["a", "a_scale", "weight", "row_scale"])
def test_wrong_types_are_named(name: str) -> None:
    weight = make_weight(8, 32, NVFP4)
    good = {"a": torch.zeros(4, 32).to(E4M3), "a_scale": torch.ones(4), "weight": weight, "row_scale": torch.ones(64)}
    with pytest.raises(ArgumentTypeError, match=f"^{name}:"):
        mm_fp8_fp4(**{**good, name: torch.zeros(4, 32).bfloat16()})

"""What judges the arithmetic of layers of experts: their family's own simulated tests, the cheapest first."""

from __future__ import annotations

import torch

from jitfp4.families.experts.kernels.few_down import FewTactic
from jitfp4.families.experts.kernels.narrow import NarrowTactic
from jitfp4.families.experts.kernels.router import RouterTactic
from jitfp4.families.experts.kernels.stream import StreamTactic
from jitfp4.families.experts.kernels.topk import TopkTactic
from jitfp4.families.experts.kernels.wide import WideTactic
from tests.families import test_experts_route as route
from tests.families import test_experts_router as router
from tests.families import test_experts_tokens as tokens
from tests.families import test_norm_linear as norm_linear
from tests.mutants.calls_experts import few, layer
from tests.mutants.calls_experts import route as many_ids
from tests.mutants.runs import Check, Subject, on

_NARROW, _STREAM, _WIDE = NarrowTactic(8, 2, 2, 2, 2, 1), StreamTactic(2, 2, 1), WideTactic(32, 16, 2)


def _layer(
    tactic: NarrowTactic | StreamTactic | WideTactic,
    tokens: int,
    *,
    listed: bool = True,
    size: int = 160,
    slots: int = 2,
) -> Check:
    return on(lambda _: layer(tactic, tokens, listed=listed, size=size, slots=slots))


def _assignments(_: str) -> None:
    """Few and many, all for one expert, none."""
    many_ids(1)
    route.assert_routed(torch.full((40, 30), 7, dtype=torch.int32), None, route.EXPERTS, 16)
    route.assert_routed(route.make_ids(1, 3), None, route.EXPERTS, 16)


CHECKS_EXPERTS: dict[str, Subject] = {
    "experts, topk": Subject(
        "experts_topk",
        (
            on(lambda device: router.test_routers_of_models(device, "deepseek-v3", torch.float32)),
            on(router.test_large_logits),
            on(router.test_of_equal_ones_the_lower_number_is_taken),
            *(
                on(lambda device, t=t: router.test_any_number_of_tokens(device, 33, t))
                for t in (TopkTactic(1), TopkTactic(4), TopkTactic(8))
            ),
        ),
    ),
    "experts, router": Subject(
        "experts_router",
        (
            on(lambda device: tokens.test_any_number_of_tokens(device, 17, RouterTactic(4, 128))),
            on(tokens.test_nan_infinity_and_zero),
            on(lambda device: tokens.test_dtypes_of_weight_and_bias(device, torch.float32, torch.bfloat16)),
            on(tokens.test_rows_apart_and_given_outputs),
        ),
    ),
    "norm, linear": Subject("norm_linear", (on(lambda _: norm_linear.check(3, 80, 33, torch.bfloat16)),)),
    "experts, list": Subject("experts_route", (on(_assignments),)),
    "experts, narrow up": Subject("experts_narrow_up", (_layer(_NARROW, 11), _layer(_NARROW, 7, slots=9))),
    "experts, narrow down": Subject("experts_narrow_down", (_layer(_NARROW, 11), _layer(_NARROW, 7, slots=9))),
    "experts, few down": Subject("experts_few_down", (on(lambda _: few(FewTactic(3, 2, 2, 1))),)),
    "experts, stream up": Subject(
        "experts_stream_up", (_layer(_STREAM, 11), _layer(_STREAM, 3, listed=False), _layer(_STREAM, 7, slots=9))
    ),
    "experts, stream down": Subject(
        "experts_stream_down", (_layer(_STREAM, 11), _layer(_STREAM, 3, listed=False), _layer(_STREAM, 7, slots=9))
    ),
    "experts, gather": Subject(
        "experts_gather", (_layer(_WIDE, 40), _layer(_WIDE, 36, size=288, slots=9)), ("sm_90a",)
    ),
    "experts, combine": Subject(
        "experts_combine", (_layer(_WIDE, 40), _layer(_WIDE, 36, size=288, slots=9)), ("sm_90a",)
    ),
    "experts, wide up": Subject(
        "experts_wide_up", (_layer(_WIDE, 40), _layer(_WIDE, 36, size=288, slots=9)), ("sm_90a",)
    ),
    "experts, wide down": Subject(
        "experts_wide_down", (_layer(_WIDE, 40), _layer(_WIDE, 36, size=288, slots=9)), ("sm_90a",)
    ),
}

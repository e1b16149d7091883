"""The gated delta rule of one token for models of the Qwen3-Next kind, whose code calls a function of its module."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from jitfp4.errors import ArgumentError
from jitfp4.families.gdn import gated_delta_rule_decode
from jitfp4.integrations.layers import regular

_NAME = "torch_recurrent_gated_delta_rule"  # of a function in the module that defines a model
_HEAD_DIMS = ((64, 64), (128, 128))
Rule = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]


def use_gated_delta_rule(model: torch.nn.Module) -> int:
    """Let the models of this one's code compute single tokens by gated_delta_rule_decode().

    transformers has a registry of such functions for the package ``kernels`` only: so the function of the model's
    module is replaced, for all models of the process. Calls that the kernel is not for go to what was there.

    Returns:
        How many layers of the model call it.
    Raises:
        ArgumentError: if none does.
    """
    layers = [layer for layer in model.modules() if hasattr(layer, "A_log") and hasattr(_module(layer), _NAME)]
    if not layers:
        raise ArgumentError("model", type(model).__name__, f"a model whose module has {_NAME}()")
    for module in {_module(layer) for layer in layers}:
        known = getattr(module, _NAME)
        if not isinstance(known, _Replaced):
            setattr(module, _NAME, _Replaced(known))
    return len(layers)


class _Replaced:
    """The function, with transformers' arguments; ``g`` is the logarithm of the decay, ``beta`` a factor."""

    def __init__(self, known: Rule) -> None:
        self.known = known

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        initial_state: torch.Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        dims = (key.shape[-1], value.shape[-1])
        fits = query.dtype in (torch.bfloat16, torch.float16) and query.shape[1] == 1 and dims in _HEAD_DIMS
        if not fits or initial_state is None or initial_state.dtype != torch.float32 or not output_final_state:
            options = {"output_final_state": output_final_state, "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel}
            return self.known(query, key, value, g=g, beta=beta, initial_state=initial_state, **options, **kwargs)
        # the kernel makes decay and beta itself, from what softplus and sigmoid turn into these
        rate = -g.float()
        zeros = torch.zeros(rate.shape[-1], device=rate.device)
        return gated_delta_rule_decode(
            regular(query),
            regular(key),
            regular(value),
            initial_state,
            zeros,
            (rate + torch.log(-torch.expm1(-rate))).contiguous(),
            zeros,
            torch.logit(beta.float()).contiguous(),
            use_qk_l2norm=use_qk_l2norm_in_kernel,
        )


def _module(layer: torch.nn.Module) -> Any:
    return sys.modules[type(layer).__module__]

"""The gated delta rule for models of the Qwen3-Next kind, whose code calls functions of its module."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from jitfp4.errors import ArgumentError
from jitfp4.families.gdn import chunk_gated_delta_rule, gated_delta_rule_decode
from jitfp4.integrations.layers import regular

_HEAD_DIMS = ((64, 64), (128, 128))
_DTYPES = (torch.bfloat16, torch.float16)
_NAMES = "torch_recurrent_gated_delta_rule", "torch_chunk_gated_delta_rule"  # in the module that defines a model
Rule = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]


def use_gated_delta_rule(model: torch.nn.Module) -> int:
    """Let the models of this one's code compute prompts by chunk_gated_delta_rule(), tokens by its decode.

    transformers has a registry of such functions for the package ``kernels`` only: so the functions of the model's
    module are replaced, for all models of the process. Calls that a kernel is not for go to what was there.

    Returns:
        How many layers of the model call it.
    Raises:
        ArgumentError: if none does.
    """
    layers = [layer for layer in model.modules() if hasattr(layer, "A_log") and hasattr(_module(layer), _NAMES[0])]
    if not layers:
        raise ArgumentError("model", type(model).__name__, f"a model whose module has {_NAMES[0]}()")
    for module in {_module(layer) for layer in layers}:
        for name, replaced in zip(_NAMES, (_Token, _Prompt), strict=True):
            known = getattr(module, name, None)
            if known is not None and not isinstance(known, replaced):
                setattr(module, name, replaced(known))
    return len(layers)


class _Replaced:
    """Stands for a function of transformers, ``known``, with its arguments: ``g`` is the decay's logarithm."""

    def __init__(self, known: Rule) -> None:
        self.known = known


class _Token(_Replaced):
    """The function of one token."""

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
        fits = query.dtype in _DTYPES and query.shape[1] == 1 and dims in _HEAD_DIMS
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


class _Prompt(_Replaced):
    """The function of whole prompts; a state is [K, V] in transformers, and [V, K] in the kernel."""

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        chunk_size: int = 64,
        initial_state: torch.Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        cu_seqlens: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        batch, tokens = query.shape[:2]
        fits = query.dtype in _DTYPES and (key.shape[-1], value.shape[-1]) in _HEAD_DIMS
        if not fits or (cu_seqlens is not None and batch > 1):
            options: dict[str, Any] = {
                "chunk_size": chunk_size,
                "initial_state": initial_state,
                "output_final_state": output_final_state,
                "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel,
                "cu_seqlens": cu_seqlens,
            }
            return self.known(query, key, value, g=g, beta=beta, **options, **kwargs)
        if cu_seqlens is None:
            cu_seqlens = torch.arange(0, (batch + 1) * tokens, tokens, device=query.device)
        result = chunk_gated_delta_rule(
            regular(query.flatten(0, 1)),
            regular(key.flatten(0, 1)),
            regular(value.flatten(0, 1)),
            g.float().exp().flatten(0, 1).contiguous(),
            beta.float().flatten(0, 1).contiguous(),
            initial_state=None if initial_state is None else initial_state.float().mT.contiguous(),
            output_final_state=output_final_state,
            cu_seqlens=cu_seqlens,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        )
        out, state = result if isinstance(result, tuple) else (result, None)
        return out.unflatten(0, (batch, tokens)), None if state is None else state.mT.contiguous()


def _module(layer: torch.nn.Module) -> Any:
    return sys.modules[type(layer).__module__]

"""Mixtures of FP4 experts in transformers' models: for few tokens the router and its choice are one launch.

An expert that all tokens have, with a gate, is one more of the others where it has their size: its slot is the last,
its weight the gate's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from jitfp4.dtypes import HALVES
from jitfp4.families.experts import route_experts, route_tokens
from jitfp4.families.experts.kernels.router import most_tokens
from jitfp4.integrations.checkpoints import aligned
from jitfp4.integrations.experts import ExpertsModule
from jitfp4.integrations.layers import Fp4Linear, regular
from jitfp4.integrations.swiglu import SwiGlu
from jitfp4.layouts import round_up

_ROWS = 8  # a multiple of the rows of a router, by which products of many tokens are fast


class Router(nn.Module):
    """Top-k of the softmax of a linear layer. Weights are float32, ids int32.

    ``with_shared``: the router's rows, the gate of an expert that all tokens have, and rows of zeros; or None.
    """

    weight: torch.Tensor
    top_k: int
    with_shared: torch.Tensor | None

    @staticmethod
    def fits(_module: Any) -> bool:
        return True

    @staticmethod
    def prepare(module: Any) -> None:
        """Read from a file, the weight may begin anywhere."""
        module.weight = nn.Parameter(aligned(module.weight.data), requires_grad=False)
        module.register_buffer("with_shared", None, persistent=False)

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Logits, weights and ids."""
        x = regular(hidden_states.reshape(-1, hidden_states.shape[-1]))
        shared, experts = self.with_shared is not None, self.weight.shape[0]
        matrix = self.weight if self.with_shared is None else self.with_shared
        bias, columns = getattr(self, "bias", None), experts + shared
        # the softmax of the top-k logits is the top-k of the softmax, renormalised
        rules: dict[str, Any] = {
            "method": "softmax",
            "renormalize": bool(getattr(self, "norm_topk_prob", True)),
            "shared": shared,
        }
        if len(x) <= most_tokens(columns, x.shape[1]) and x.dtype in HALVES and x.dtype == matrix.dtype:
            logits = x.new_empty(len(x), columns)
            ids, weights = route_tokens(x, matrix[:columns], self.top_k, logit_bias=bias, logits=logits, **rules)
        else:
            logits = functional.linear(x, matrix, bias)
            ids, weights = route_experts(logits[:, :columns], self.top_k, **rules)
        return logits[:, :experts], weights, ids


class Block(nn.Module):
    """A router and its experts."""

    experts: ExpertsModule
    shared_expert: nn.Module
    shared_expert_gate: nn.Linear

    @staticmethod
    def fits(module: Any) -> bool:
        return isinstance(module.experts, ExpertsModule) and not any(
            hasattr(child, "_hf_hook") for child in module.modules()
        )

    @staticmethod
    def prepare(module: Any) -> None:
        """Make the expert that all tokens have one more of the others. Its own layer stays, for saving."""
        shared, gate = getattr(module, "shared_expert", None), getattr(module, "shared_expert_gate", None)
        if not isinstance(shared, SwiGlu) or not isinstance(shared.down_proj, Fp4Linear) or type(gate) is not nn.Linear:
            return
        weight, experts = module.gate.weight.data, module.experts
        if gate.bias is None and experts.takes(shared.gate_up, shared.down_proj):
            experts.append(shared.gate_up, shared.down_proj)
            rows = torch.cat((weight, gate.weight.data.to(weight.dtype)))
            module.gate.with_shared = functional.pad(rows, (0, 0, 0, round_up(len(rows), _ROWS) - len(rows)))

    def forward(self, hidden_states: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        """As the parent's; ``residual`` is added to the result."""
        router: Any = self.router if hasattr(self, "router") else self.gate
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        _, weights, ids = router(rows)
        added = None if residual is None else regular(residual.reshape(rows.shape))
        out = self.experts(rows, ids, weights, added)
        if hasattr(self, "shared_expert") and router.with_shared is None:
            out = out + torch.sigmoid(self.shared_expert_gate(rows)) * self.shared_expert(rows)
        out = out.view(hidden_states.shape)
        return (out, weights) if hasattr(self, "router") else out  # gpt-oss's gives weights, too

"""The gates, the ups and the activation of an MLP as one product: SwiGLU stands in its epilogue."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from jitfp4.integrations.layers import Fp4Linear, with_one_scale
from jitfp4.weight import with_gates, without_gates

_PARTS = ("gate_proj", "up_proj")
_PROBES = 64  # values of gates and of ups that an MLP is asked about


class SwiGlu(nn.Module):
    """``down_proj(silu(gate) * up)``, with gates and ups of one layer: two launches.

    Gates, ups and the sigmoid are not rounded to 16 bits on the way, only their product is.

    Args:
        gate_up: an Fp4Linear whose weight is ``gated``.
        down_proj: any module.
        inter: outputs of ``gate_up``, without padding.
    """

    def __init__(self, gate_up: Fp4Linear, down_proj: nn.Module, inter: int) -> None:
        super().__init__()
        self.gate_up, self.down_proj, self.inter = gate_up, down_proj, inter

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """[..., hidden] to [..., hidden]; ``residual`` is added to them."""
        inner = self.gate_up(x)[..., : self.inter]
        if isinstance(self.down_proj, Fp4Linear):
            return self.down_proj(inner, residual)  # type: ignore[no-any-return]
        out: torch.Tensor = self.down_proj(inner)
        return out if residual is None else residual + out

    def separate(self) -> dict[str, torch.Tensor]:
        """The tensors that gate_proj and up_proj would have alone, by their names: new ones but the decode scale."""
        named: dict[str, torch.Tensor] = {}
        for name, weight in zip(_PARTS, without_gates(self.gate_up.prepared), strict=True):
            own = weight.tensors()
            named |= {f"{name}.weight": own["data"], f"{name}.weight_size": own["size"]}
            if "row_scale" in own:
                named[f"{name}.weight_row_scale"] = own["row_scale"]
            if self.gate_up.alpha is not None:
                named[f"{name}.alpha"] = self.gate_up.alpha.clone()
        return named


def swiglu_of(mlp: Any) -> SwiGlu | None:
    """A module for an MLP with Fp4Linear layers ``gate_proj`` and ``up_proj``, and what its ``down_proj`` is.

    None where its forward is not SwiGLU and nothing else, where layers have biases or scales that no product has in
    common, and where hooks move its inputs between devices.
    """
    gate, up = (getattr(mlp, name, None) for name in _PARTS)
    if not isinstance(gate, Fp4Linear) or not isinstance(up, Fp4Linear) or hasattr(mlp, "_hf_hook"):
        return None
    if gate.bias is not None or up.bias is not None or gate.out_features != up.out_features or not _is_swiglu(mlp):
        return None
    common = with_one_scale((gate, up))
    if common is None:
        return None
    (first, second), alpha = common
    weight = with_gates(first, second)
    layer = Fp4Linear(gate.in_features, weight.n, False, torch.bfloat16, weight.format)
    layer.assign(weight, alpha)
    return SwiGlu(layer, mlp.down_proj, gate.out_features)


def _is_swiglu(mlp: Any) -> bool:
    """Whether the forward of an MLP's class gives ``down_proj(silu(gate) * up)`` by four attributes alone."""
    generator = torch.Generator().manual_seed(0)
    gate, up = (4 * torch.randn(_PROBES, generator=generator, device="cpu") for _ in _PARTS)
    stand_in = SimpleNamespace(
        gate_proj=lambda _: gate, up_proj=lambda _: up, down_proj=lambda x: x, act_fn=getattr(mlp, "act_fn", None)
    )
    try:
        out = type(mlp).forward(stand_in, torch.zeros(_PROBES, device="cpu"))
    except Exception:  # it asks for what an MLP of four attributes has not
        return False
    return isinstance(out, torch.Tensor) and torch.allclose(out, functional.silu(gate) * up)

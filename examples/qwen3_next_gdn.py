"""A Qwen3-Next gated-delta-net layer on jitfp4's kernels, against the torch implementation in transformers.

    python examples/qwen3_next_gdn.py [--device cuda] [--batch 3]

Random weights in the real configuration: 2048 hidden, 16 q and k heads, 32 value heads of dimension 128.
Each request is prefilled in one call, decoded one token at a time, and then verifies 4 drafted tokens of which only
some are accepted: the states after every token are kept, and the accepted one is put back. transformers runs the
accepted tokens in one pass. Both must agree at every position.
"""

from __future__ import annotations

import argparse
import sys

import torch
from torch.nn import functional
from transformers.models.qwen3_next.configuration_qwen3_next import Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

import jitfp4

PREFILL, DECODE, DRAFT = 70, 6, 4
TOLERANCE = 0.02  # bf16 results of two float32 computations in different orders, through a norm and a projection


class GatedDeltaNet:
    """The layer's forward pass over a few tokens, with its state between calls held here."""

    def __init__(self, layer: Qwen3NextGatedDeltaNet, batch: int) -> None:
        weight = layer.in_proj_qkvz.weight
        self.layer = layer
        self.window = weight.new_zeros(batch, layer.conv_dim, layer.conv_kernel_size - 1)
        self.states = torch.zeros(
            batch, layer.num_v_heads, layer.head_v_dim, layer.head_k_dim, dtype=torch.float32, device=weight.device
        )
        self.slots = torch.randperm(batch, device=weight.device)

    def prefill(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, tokens, hidden], any number of tokens, to the same shape; the state moves on by all of them."""
        (query, key, value), z, (b, a), windows = self._project(x)
        rate = self.layer.A_log.float().exp() * functional.softplus(a.float() + self.layer.dt_bias.float())
        out, _ = jitfp4.chunk_gated_delta_rule(
            *(part.flatten(0, 1) for part in (query, key, value)),
            g=(-rate).exp().flatten(0, 1),
            beta=b.float().sigmoid().flatten(0, 1),
            initial_state=self.states,
            output_final_state=True,
            output_state=self.states,
            state_indices=self.slots,
            cu_seqlens=torch.arange(0, x.shape[0] * x.shape[1] + 1, x.shape[1], device=x.device),
            use_qk_l2norm_in_kernel=True,
        )
        self.window = self._last(windows)
        return self._output(out, z)

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, tokens, hidden], at most 16 tokens, to the same shape; the state moves on by all of them."""
        out, windows, _ = self._recur(x, keep=False)
        self.window = self._last(windows)
        return out

    def verify(self, x: torch.Tensor, accepted: int) -> torch.Tensor:
        """Like decode(), but the state moves on by ``accepted`` tokens only: the rest was drafted in vain."""
        out, windows, states = self._recur(x, keep=True)
        self.window = windows[..., accepted : accepted + self.window.shape[-1]].contiguous()
        self.states[self.slots] = states[:, accepted - 1]
        return out

    def _project(
        self, x: torch.Tensor
    ) -> tuple[list[torch.Tensor], torch.Tensor, tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
        """Heads of q, k and v after the convolution, z, the gates, and the convolution's inputs."""
        layer = self.layer
        query, key, value, z, b, a = layer.fix_query_key_value_ordering(layer.in_proj_qkvz(x), layer.in_proj_ba(x))
        mixed = torch.cat([part.flatten(2) for part in (query, key, value)], dim=-1).mT
        windows = torch.cat([self.window, mixed], dim=-1)
        mixed = functional.silu(functional.conv1d(windows, layer.conv1d.weight, groups=layer.conv_dim)).mT.contiguous()
        parts = mixed.split([layer.key_dim, layer.key_dim, layer.value_dim], dim=-1)
        heads = layer.num_k_heads, layer.num_k_heads, layer.num_v_heads
        return [part.unflatten(-1, (n, -1)) for part, n in zip(parts, heads, strict=True)], z, (b, a), windows

    def _last(self, windows: torch.Tensor) -> torch.Tensor:
        return windows[..., -self.window.shape[-1] :].contiguous()

    def _output(self, out: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        layer = self.layer
        out = layer.norm(out.reshape(-1, layer.head_v_dim), z.reshape(-1, layer.head_v_dim))
        return layer.out_proj(out.view(*z.shape[:2], -1))

    def _recur(self, x: torch.Tensor, *, keep: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        layer = self.layer
        (query, key, value), z, (b, a), windows = self._project(x)
        steps = self.states.new_empty(*x.shape[:2], *self.states.shape[1:]) if keep else None
        out, _ = jitfp4.gated_delta_rule_mtp(
            query,
            key,
            value,
            self.states,
            self.slots,
            layer.A_log.float(),
            a,
            layer.dt_bias,
            b,
            intermediate_states_buffer=steps,
            disable_state_update=keep,
        )
        return self._output(out, z), windows, steps


def difference(got: torch.Tensor, want: torch.Tensor) -> float:
    """The norm of the difference over the norm of what is wanted."""
    return ((got.float() - want.float()).norm() / want.float().norm()).item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, default=3)
    options = parser.parse_args()
    torch.manual_seed(0)
    layer = Qwen3NextGatedDeltaNet(Qwen3NextConfig(), 0).to(options.device, torch.bfloat16).eval()
    tokens = torch.randn(options.batch, PREFILL + DECODE + 2 * DRAFT, 2048).to(options.device, torch.bfloat16)
    with torch.no_grad():
        want = layer(tokens)
        net = GatedDeltaNet(layer, options.batch)
        worst = {
            "prefill": difference(net.prefill(tokens[:, :PREFILL]), want[:, :PREFILL]),
            "decode": 0.0,
            "verify": 0.0,
        }
        for at in range(PREFILL, PREFILL + DECODE):
            one = slice(at, at + 1)
            worst["decode"] = max(worst["decode"], difference(net.decode(tokens[:, one]), want[:, one]))
        at = PREFILL + DECODE
        for accepted in (1, 3, DRAFT):
            draft = tokens[:, at : at + DRAFT].clone()
            draft[:, accepted:] = torch.randn_like(draft[:, accepted:])
            got = net.verify(draft, accepted)[:, :accepted]
            worst["verify"] = max(worst["verify"], difference(got, want[:, at : at + accepted]))
            at += accepted
    for name, value in worst.items():
        print(f"{name:8} relative difference {value:.2e}")
    if not max(worst.values()) < TOLERANCE:
        sys.exit(f"jitfp4 and transformers disagree by more than {TOLERANCE}")


if __name__ == "__main__":
    main()

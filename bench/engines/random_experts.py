"""What rounding costs a Qwen3-Next of random weights, by transformers alone: what ``--layers-too`` should find in vLLM.

    python -m bench.engines.random_experts [--layers 4] [--experts 512]

A quarter of Qwen3-Next-80B-A3B's width, on a CPU, in bf16. Cosines of each layer's outputs with ``noise``, where those
of products are off by 2^-9 and rounded again, to those without; with the routers' own choices, and with given ones.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

from bench.engines.layer_outputs import SPREAD
from bench.engines.models import COMMON, QWEN3_NEXT
from bench.engines.vllm_decode import NOISE

PROMPTS, TOKENS = 8, 64
STD = 0.04  # as wide for this width as 0.02 is for 2048
NARROW = {
    "hidden_size": 512,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "vocab_size": 4096,
}
PARTS = ("Linear", "Qwen3NextExperts")  # whose outputs are off


def model_of(layers: int, experts: int) -> Any:
    """A model of random weights; its norms' are 1, which this model adds 1 to."""
    document = (
        COMMON | QWEN3_NEXT | NARROW | {"num_hidden_layers": layers, "num_experts": experts, "pad_token_id": None}
    )
    model = Qwen3NextForCausalLM(Qwen3NextConfig(**document)).bfloat16().eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.fill_(1.0)
        elif parameter.dim() > 1:
            parameter.data.normal_(0, 0.5 if "conv1d" in name else 0.02 if "embed" in name else STD)
        elif name.endswith("dt_bias"):
            parameter.data.zero_()
    return model


def off(x: torch.Tensor) -> torch.Tensor:
    return (x.float() * (1 + NOISE * torch.randn(x.shape))).to(x.dtype)


def routes(out: Any, layer: int) -> Any:
    """Choices in place of a router's own, the same in every run."""
    logits, values, chosen = out
    made = torch.Generator().manual_seed(layer)
    given = (SPREAD * torch.randn(logits.shape, generator=made)).softmax(-1).topk(chosen.shape[-1])
    return logits, (given.values / given.values.sum(-1, keepdim=True)).to(values.dtype), given.indices


def run(model: Any, ids: torch.Tensor, *, noise: bool, given: bool) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The outputs of layers [tokens, hidden], and the experts of tokens."""
    outs: list[torch.Tensor] = []
    chosen: list[torch.Tensor] = []
    held = []
    for layer, block in enumerate(model.model.layers):
        held.append(block.register_forward_hook(lambda _m, _x, out: outs.append(out.flatten(0, 1))))
        router = block.mlp.gate
        if given:
            held.append(router.register_forward_hook(lambda _m, _x, out, layer=layer: routes(out, layer)))
        held.append(router.register_forward_hook(lambda _m, _x, out: chosen.append(out[2].sort(-1).values)))
        if noise:
            held.append(router.register_forward_pre_hook(lambda _m, x: (off(x[0]),)))
    parts = [module for module in model.modules() if noise and type(module).__name__ in PARTS]
    held += [part.register_forward_hook(lambda _m, _x, out: off(out)) for part in parts]
    model(ids, use_cache=False)
    for each in held:
        each.remove()
    return outs, chosen


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--experts", type=int, default=512)
    options = parser.parse_args()
    torch.manual_seed(0)
    model = model_of(options.layers, options.experts)
    ids = (7 * torch.arange(PROMPTS)[:, None] + 13 * torch.arange(TOKENS) + 10) % 4096
    for given in (False, True):
        (exact, choices), (noisy, others) = (run(model, ids, noise=noise, given=given) for noise in (False, True))
        for layer, pair in enumerate(zip(exact, noisy, strict=True)):
            found = torch.nn.functional.cosine_similarity(*(side.double() for side in pair), dim=-1)
            changed = int((choices[layer] != others[layer]).any(-1).sum())
            text = (
                f"cosine least {found.min():.4f} mean {found.mean():.4f}, other experts for {changed} of {len(found)}"
            )
            print(f"{'given' if given else 'own'} routes, layer {layer}: {text} tokens", flush=True)


if __name__ == "__main__":
    main()

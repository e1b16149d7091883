"""transformers loads, quantizes, saves and runs FP4 models: tiny random ones, on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")
from jitfp4.errors import ArgumentError
from jitfp4.formats import MXFP4, NVFP4, BlockFormat
from jitfp4.integrations.experts import ExpertsModule
from jitfp4.integrations.layers import Fp4Linear
from jitfp4.integrations.swiglu import SwiGlu
from jitfp4.integrations.transformers import Jitfp4Config, register
from jitfp4.integrations.transformers.delta_rule import DeltaNet
from tests.support.tiny_models import CONFIGS, load, prompts, save, to_fp4

register()


def dequantized(model: Any, floats: Any) -> Any:
    """The float model with what the FP4 layers of the other hold."""
    for name, module in model.named_modules():
        if isinstance(module, SwiGlu):
            both = module.gate_up.dequantize().chunk(2)
            for linear, weight in zip((name + ".gate_proj", name + ".up_proj"), both, strict=True):
                floats.get_submodule(linear).weight.data.copy_(weight[: module.inter])
        elif isinstance(module, Fp4Linear) and not name.endswith("gate_up"):
            linear = floats.get_submodule(name)
            assert linear.weight.shape == (module.out_features, module.in_features)
            weight, net = module.dequantize(), model.get_submodule(name.rpartition(".")[0])
            if isinstance(net, DeltaNet) and name.endswith("in_proj_qkvz"):  # its rows are in the order of their use
                weight = weight[DeltaNet.order_of(net.shape).argsort()]
            linear.weight.data = weight.to(linear.weight.dtype)
        elif isinstance(module, ExpertsModule):
            fill(floats.get_submodule(name), module)
    return floats


def fill(floats: Any, module: ExpertsModule) -> None:
    """Give float experts what those in FP4 hold."""
    for expert in range(module.shape.experts - module.appended):  # a shared expert has a module of its own, too
        for side, matrix in zip(("gate_up_proj", "down_proj"), module.experts.dequantize(expert), strict=True):
            weight, bias = matrix.weight * matrix.scale.unsqueeze(1), matrix.bias
            if side == "gate_up_proj" and module.shape.order == "interleaved":
                weight = weight.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1)
                bias = None if bias is None else bias.unflatten(0, (2, -1)).T.flatten()
            target = getattr(floats, side).data[expert]
            target.copy_(weight.T if module.shape.transposed else weight)
            if bias is not None:
                torch.testing.assert_close(getattr(floats, f"{side}_bias")[expert].float(), bias)


def fp4_names(model: Any) -> set[str]:
    return {name for name, module in model.named_modules() if isinstance(module, (Fp4Linear, ExpertsModule))}


def close(got: torch.Tensor, want: torch.Tensor, least: float = 0.04) -> None:
    """As alike as two orders of sums in bf16 make logits of such a model, but where a router decides otherwise."""
    error = (got - want).float().norm(dim=-1) / want.float().norm(dim=-1)
    assert error.median() < least, error.detach()


@pytest.mark.parametrize("kind", CONFIGS)
def test_floats_are_quantized_while_they_are_loaded(kind: str, tmp_path: Path) -> None:
    folder = save(kind, tmp_path / "floats")
    model = load(folder, quantization_config=Jitfp4Config())
    assert len(fp4_names(model)) > 4 and "lm_head" not in fp4_names(model)
    layers = [module for module in model.modules() if isinstance(module, ExpertsModule)]
    assert len(layers) == {"llama": 0, "qwen3": 0, "qwen3_5": 0, "deepseek_v3": 1}.get(kind, 2)
    floats = load(folder)
    want = floats(prompts()).logits
    close(model(prompts()).logits, dequantized(model, floats)(prompts()).logits)
    error = torch.linalg.norm(model(prompts()).logits - want) / torch.linalg.norm(want)
    assert 0.005 < error < 0.7  # it is FP4, and the same model

    model.save_pretrained(tmp_path / "fp4")
    again = load(tmp_path / "fp4")
    assert fp4_names(again) == fp4_names(model)
    assert torch.equal(again(prompts()).logits, model(prompts()).logits)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize(
    ("source", "block_format"), [("compressed-tensors", NVFP4), ("compressed-tensors", MXFP4), ("modelopt", NVFP4)]
)
def test_checkpoints_of_others_are_loaded(source: str, block_format: BlockFormat, shards: int, tmp_path: Path) -> None:
    floats = save("qwen3", tmp_path / "floats")
    model = load(to_fp4(floats, tmp_path / "fp4", source, block_format, shards))
    assert len(fp4_names(model)) == 12  # four in attention, two in an MLP, of each layer
    quantized = load(floats, quantization_config=Jitfp4Config("nvfp4" if block_format is NVFP4 else "mxfp4"))
    scale = 1 if block_format is MXFP4 else 1.7
    assert fp4_names(quantized) == fp4_names(model)
    for name in fp4_names(model):
        torch.testing.assert_close(
            model.get_submodule(name).dequantize() * scale, quantized.get_submodule(name).dequantize()
        )
    close(model(prompts()).logits, dequantized(model, load(floats))(prompts()).logits)
    model.save_pretrained(tmp_path / "again")
    assert torch.equal(load(tmp_path / "again")(prompts()).logits, model(prompts()).logits)
    tokens = model.generate(prompts(), max_new_tokens=4, do_sample=False)
    assert torch.equal(tokens, stepwise(model, prompts(), 4))


@pytest.mark.parametrize(
    ("kind", "source", "block_format"),
    [
        ("qwen3_moe", "compressed-tensors", NVFP4),
        ("qwen3_moe", "compressed-tensors", MXFP4),
        ("qwen3_moe", "modelopt", NVFP4),
        ("deepseek_v3", "modelopt", NVFP4),
        ("gpt_oss", "mxfp4", MXFP4),
    ],
)
def test_experts_of_others_are_loaded(kind: str, source: str, block_format: BlockFormat, tmp_path: Path) -> None:
    floats = save(kind, tmp_path / "floats")
    model = load(to_fp4(floats, tmp_path / "fp4", source, block_format, 2))
    assert [name for name in fp4_names(model) if name.endswith("layers.1.mlp.experts")]
    close(model(prompts()).logits, dequantized(model, load(floats))(prompts()).logits)
    want = load(floats)(prompts()).logits
    assert torch.linalg.norm(model(prompts()).logits - want) < 0.7 * torch.linalg.norm(want)
    model.save_pretrained(tmp_path / "again")
    again = load(tmp_path / "again", experts_implementation="jitfp4")
    assert fp4_names(again) == fp4_names(model)
    assert torch.equal(again(prompts()).logits, model(prompts()).logits)
    tokens = model.generate(prompts(), max_new_tokens=3, do_sample=False, eos_token_id=None)
    assert tokens.shape == (2, 12)


def stepwise(model: Any, tokens: torch.Tensor, new: int) -> torch.Tensor:
    """Greedy tokens, the whole model over all tokens for each."""
    for _ in range(new):
        tokens = torch.cat((tokens, model(tokens, use_cache=False).logits[:, -1:].argmax(-1)), 1)
    return tokens


def test_layers_of_one_input_are_one_product_and_the_same_numbers(tmp_path: Path) -> None:
    folder = save("llama", tmp_path / "floats", attention_bias=True)
    fused, alone = (load(folder, quantization_config=Jitfp4Config(fuse=flag)) for flag in (True, False))
    first, second = fused.model.layers[0].self_attn, alone.model.layers[0].self_attn
    assert first.q_proj.fused and first.v_proj.fused and not second.q_proj.fused
    x = torch.randn(5, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    for name in ("q_proj", "k_proj", "v_proj"):
        assert torch.equal(getattr(first, name)(x), getattr(second, name)(x))
    assert torch.equal(first.k_proj(x), second.k_proj(x))  # without its siblings
    x.mul_(-2)  # between siblings
    assert torch.equal(first.q_proj(x), second.q_proj(x))
    assert torch.equal(first.k_proj(2 * x), second.k_proj(2 * x))
    alphas = {float(layer.alpha) for layer in (second.q_proj, second.k_proj, second.v_proj)}
    assert all(float(getattr(first, name).alpha) == max(alphas) for name in ("q_proj", "k_proj", "v_proj"))
    moved = fused.to(torch.float32)
    assert moved.model.layers[0].self_attn.q_proj.alpha.dtype == torch.float32
    assert not moved.model.layers[0].self_attn.q_proj.fused
    assert moved(prompts()).logits.dtype == torch.float32


@pytest.mark.parametrize("tied", [False, True])
def test_the_head_becomes_fp4_by_choice(tied: bool, tmp_path: Path) -> None:
    folder = save("llama", tmp_path / "floats", tie_word_embeddings=tied)
    assert isinstance(load(folder, quantization_config=Jitfp4Config()).lm_head, nn.Linear)
    model = load(folder, quantization_config=Jitfp4Config(lm_head=True))
    assert isinstance(model.lm_head, Fp4Linear) and isinstance(model.model.embed_tokens, nn.Embedding)
    floats = load(folder)
    error = torch.linalg.norm(model.lm_head.dequantize() - floats.lm_head.weight)
    assert error < 0.12 * torch.linalg.norm(floats.lm_head.weight)
    model.save_pretrained(tmp_path / "fp4")
    again = load(tmp_path / "fp4")
    assert isinstance(again.lm_head, Fp4Linear)
    assert torch.equal(again(prompts()).logits, model(prompts()).logits)


def test_sizes_that_kernels_do_not_have_are_padded(tmp_path: Path) -> None:
    folder = save("llama", tmp_path / "floats", intermediate_size=100, hidden_size=120, mlp_bias=True)
    for weights in ("nvfp4", "mxfp4"):
        model = load(folder, quantization_config=Jitfp4Config(weights))
        close(model(prompts()).logits, dequantized(model, load(folder))(prompts()).logits)


def test_modules_can_keep_their_floats(tmp_path: Path) -> None:
    folder = save("llama", tmp_path / "floats")
    model = load(folder, quantization_config=Jitfp4Config(modules_to_not_convert=["self_attn.o_proj", "layers.1.mlp"]))
    names = fp4_names(model)
    assert "model.layers.0.mlp.gate_up" in names and "model.layers.1.self_attn.q_proj" in names
    assert not [name for name in names if "o_proj" in name or "layers.1.mlp" in name]


def test_a_layer_in_another_format_is_an_error_that_names_it(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = to_fp4(save("llama", tmp_path / "floats"), tmp_path / "fp4", "compressed-tensors")
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    del tensors["model.layers.0.mlp.up_proj.weight_packed"]
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ArgumentError, match=r"model\.layers\.0\.mlp\.up_proj\.weight_scale"):
        load(folder)


@pytest.mark.parametrize("quantized_before", [False, True])
def test_a_model_on_several_ranks_is_an_error(
    quantized_before: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What transformers' tp_plan leaves on a model, before it is loaded."""
    import transformers

    folder = save("llama", tmp_path / "floats")
    options = {} if quantized_before else {"quantization_config": Jitfp4Config()}
    if quantized_before:
        folder = to_fp4(folder, tmp_path / "fp4", "compressed-tensors")
    monkeypatch.setattr(transformers.PreTrainedModel, "_tp_size", 2)
    with pytest.raises(ArgumentError, match="tp_plan: got 2 ranks; allowed: none"):
        load(folder, **options)

"""What docs/transformers.md tells to run is run: with tiny models in place of those that it names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
import transformers

from jitfp4.errors import ArgumentError
from tests.support.programs import ROOT
from tests.support.tiny_models import prompts, save, to_fp4

PAGE = (ROOT / "docs/transformers.md").read_text()


class Tokenizer:
    """Tokens of a fixed text."""

    def __call__(self, text: str, return_tensors: str) -> Any:
        assert text and return_tensors == "pt"
        return transformers.BatchEncoding({"input_ids": prompts(1, 7)})

    def decode(self, tokens: torch.Tensor) -> str:
        return " ".join(map(str, tokens.tolist()))


def test_its_blocks_run_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda _: Tokenizer())
    floats = save("qwen3", tmp_path / "floats")
    folders = {"Qwen/Qwen3-8B": floats, "nvidia/Qwen3-8B-NVFP4": to_fp4(floats, tmp_path / "fp4", "modelopt")}
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    text = "\n".join(blocks).replace(', device_map="cuda"', "")  # which needs accelerate and a GPU
    text = text.replace("torch.compile(model, ", 'torch.compile(model, backend="eager", ')
    text = text.replace("max_new_tokens=32", "max_new_tokens=3").replace("[1] + 8", "[1] + 2")  # fewer steps
    for name, folder in folders.items():
        assert f'"{name}"' in text
        text = text.replace(f'"{name}"', repr(str(folder)))
    names: dict[str, Any] = {}
    exec(text, names)  # noqa: S102 - the page is ours
    assert 8 <= names["out"].shape[1] <= 7 + 3
    assert (tmp_path / "qwen3-8b-fp4/model.safetensors").exists()
    with pytest.raises(ArgumentError) as caught:
        names["Nvfp4Cache"](names["model"].config, 4).layers[0].update(*[torch.zeros(1, 2, 5, 64)] * 2)
    assert str(caught.value).split(":")[0] in PAGE


def test_every_function_of_the_package_is_in_it() -> None:
    from jitfp4.integrations import transformers as package

    assert not [name for name in package.__all__ if name not in PAGE and name != "Jitfp4Quantizer"]

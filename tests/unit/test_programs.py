"""Every benchmark and example is imported without a GPU, explains itself, and takes the commands that texts name."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

from tests.support.programs import FILES, ROOT, load, parser_of

NEEDED = {  # packages that not every installation has; what measures a Triton kernel imports its module late
    "triton": ("triton_norm", "triton_quantize"),
    "transformers": (
        "bench_load",
        "bench_model",
        "models",
        "nano_vllm",
        "perplexity",
        "qwen3_next_gdn",
        "sentence_similarity",
    ),
    "safetensors": ("nvfp4_linear", "quantize_weights"),
}
TEXTS = ("*.md", "docs/**/*.md", "bench/*.py", "examples/**/*", "jitfp4/**/*.md", "jitfp4/**/*.py", "tests/**/*.py")
COMMAND = re.compile(r"(?:python -m bench\.|(?:python|--) (?:bench|examples)/)(\w+)(?:\.py)?(?=[\s`])([^`\n]*)")
WALKTHROUGH = "bench_toy"  # the reader of CONTRIBUTING.md writes it
MENTIONED = re.compile(r"``(--[^`]+)``")


def commands() -> list[tuple[str, str]]:
    """A program and its arguments as a text writes them: ``[--part a|b] [--out DIR]``."""
    found = set()
    for pattern in TEXTS:
        for file in ROOT.glob(pattern):
            if file.is_file() and file.suffix != ".pyc":
                found |= {(name, usage.strip()) for name, usage in COMMAND.findall(file.read_text())}
    for name, file in FILES.items():
        summary = file.read_text().split('"""')[1]
        found |= {(name, usage) for usage in MENTIONED.findall(summary)}
    return sorted((name, usage) for name, usage in found if name != WALKTHROUGH)


def spelled_out(usage: str) -> Iterator[list[str]]:
    """Each way to follow a usage: what it demands, with one of its options, or one of a choice."""
    demanded = re.sub(r"\[.*?\]", "", usage).split()
    yield demanded
    for option in re.findall(r"\[(.*?)\]", usage):
        for way in option.split(" | "):
            *name, values = way.split()
            for value in values.split("|"):
                yield [*demanded, *name, value]


def with_values(words: list[str], parser: argparse.ArgumentParser) -> list[str]:
    """The words, with a value for a name such as DIR, and for an option that is only mentioned."""
    options = {name: action for action in parser._actions for name in action.option_strings}
    filled: list[str] = []
    for word in [*words, "VALUE"]:
        option = options.get(filled[-1]) if filled else None
        if word == "VALUE" and (option is None or option.nargs == 0):
            break
        is_name = re.fullmatch(r"[A-Z]+(\.[a-z]+)?", word) is not None
        filled.append(next(iter(option.choices)) if is_name and option and option.choices else "1" if is_name else word)
    return filled


def loaded(name: str) -> ModuleType:
    for package, names in NEEDED.items():
        if name in names:
            pytest.importorskip(package)
    return load(name)


@pytest.mark.parametrize("name", FILES)
def test_it_is_imported_without_a_gpu_and_without_triton(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name not in NEEDED["triton"]:
        monkeypatch.setitem(sys.modules, "triton", None)
    assert loaded(name).__doc__


@pytest.mark.parametrize("name", [name for name, file in FILES.items() if "def main(" in file.read_text()])
def test_it_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        parser_of(loaded(name)).parse_args(["--help"])
    assert exited.value.code == 0
    assert "usage: " in capsys.readouterr().out


@pytest.mark.parametrize(("name", "usage"), commands(), ids=" ".join)
def test_a_command_in_a_text_is_taken(name: str, usage: str) -> None:
    parser = parser_of(loaded(name))
    for words in spelled_out(usage):
        parser.parse_args(with_values(words, parser))


def test_a_command_that_is_not_taken_is_noticed() -> None:
    parser = parser_of(load("bench_gemm"))
    for usage in ("--part peers", "[--part cases|peers]", "[--out DIR] [--gib LIMIT]", "--seconds few"):
        with pytest.raises(SystemExit):
            for words in spelled_out(usage):
                parser.parse_args(with_values(words, parser))

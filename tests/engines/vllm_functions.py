"""vLLM's signatures of its own functions whose names jitfp4 has, and its calls of them, from its wheel:

pip download --no-deps --dest DIR vllm==VERSION
python -m tests.engines.vllm_functions DIR/vllm-VERSION-*.whl

writes ``vllm.json`` beside this file, which ``test_vllm_functions.py`` compares with jitfp4's. Nothing of vLLM is
imported: the sources are parsed.
"""

from __future__ import annotations

import argparse
import ast
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.engines.signatures import parameters
from tests.engines.wheels import Sources

FIXTURE = Path(__file__).with_name("vllm.json")
FILE = "vllm/model_executor/layers/mamba/ops/causal_conv1d.py"
CONSTANTS = "vllm/v1/attention/backends/utils.py"
NAMES = ("causal_conv1d_fn", "causal_conv1d_update")


def recorded(sources: Sources) -> dict[str, Any]:
    """By name the parameters, constants as numbers, and the calls with what they pass."""
    numbers = {
        node.targets[0].id: ast.unparse(node.value)
        for node in sources.tree(CONSTANTS).body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    found: dict[str, Any] = {"version": sources.version, "signatures": {}, "calls": list(_calls(sources))}
    for node in sources.tree(FILE).body:
        if isinstance(node, ast.FunctionDef) and node.name in NAMES:
            found["signatures"][node.name] = [
                [word, kind, numbers.get(default, default)] for word, kind, default in parameters(node)
            ]
    return found


def _calls(sources: Sources) -> Iterator[dict[str, Any]]:
    for file, text in sources.sources.items():
        if not file.startswith("vllm/") or not any(f"{name}(" in text for name in NAMES):
            continue
        for node in ast.walk(sources.tree(file)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in NAMES:
                yield {
                    "file": file,
                    "line": node.lineno,
                    "function": node.func.id,
                    "positional": [ast.unparse(value) for value in node.args],
                    "keywords": {str(given.arg): ast.unparse(given.value) for given in node.keywords},
                }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    found = recorded(Sources.of_wheel(parser.parse_args().wheel))
    calls = ",\n".join(json.dumps(call) for call in found.pop("calls"))
    FIXTURE.write_text(f'{json.dumps(found)[:-1]}, "calls": [\n{calls}\n]}}\n')


if __name__ == "__main__":
    main()

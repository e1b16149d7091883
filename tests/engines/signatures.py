"""FlashInfer's signatures of the functions that jitfp4 has, from its wheel:

pip download --no-deps --dest DIR flashinfer-python==VERSION
python -m tests.engines.signatures DIR/flashinfer_python-VERSION-*.whl

writes ``flashinfer.json`` beside this file, which ``test_signatures.py`` compares with jitfp4's. Nothing of FlashInfer
is imported: the sources are parsed.
"""

from __future__ import annotations

import argparse
import ast
import json
from pathlib import Path
from typing import Any

import jitfp4.flashinfer
from tests.engines.wheels import Sources

FIXTURE = Path(__file__).with_name("flashinfer.json")

Parameter = list[Any]  # [name, "positional" or "keyword" or "rest", default as source text or None]
Signatures = dict[str, dict[str, Any]]


def signatures(sources: Sources) -> Signatures:
    """By public name: where FlashInfer defines it, and its parameters, or those of each of its methods."""
    found: Signatures = {}
    for module, names in jitfp4.flashinfer.MODULES.items():
        for name in names:
            place = sources.definition(f"flashinfer.{module}", name)
            if place is None or name in found:
                continue
            file, node = place
            entry: dict[str, Any] = {"file": file}
            if isinstance(node, ast.FunctionDef):
                entry["parameters"] = parameters(node)
            elif not any(isinstance(base, ast.Name) and base.id.endswith("Enum") for base in node.bases):
                entry["methods"] = _methods(node)
            found[name] = entry
    return dict(sorted(found.items()))


def _methods(node: ast.ClassDef) -> dict[str, list[Parameter]]:
    """The parameters of a class's public methods without self; those of ``_x_impl`` for an ``x`` that passes on."""
    functions = {item.name: item for item in node.body if isinstance(item, ast.FunctionDef)}
    properties = {name for name, item in functions.items() if any(_is(d, "property") for d in item.decorator_list)}
    public: dict[str, list[Parameter]] = {}
    for name, item in functions.items():
        if name in properties or (name.startswith("_") and name != "__init__"):
            continue
        passes_on = item.args.kwarg is not None and f"_{name}_impl" in functions
        public[name] = parameters(functions[f"_{name}_impl"] if passes_on else item)[1:]
    for item in node.body:  # begin_forward = plan; run_return_lse = functools.partialmethod(run, return_lse=True)
        if isinstance(item, ast.Assign):
            fixed: dict[str | None, str] = {}
            value = item.value
            if isinstance(value, ast.Call) and value.args:
                fixed = {keyword.arg: ast.unparse(keyword.value) for keyword in value.keywords}
                value = value.args[0]
            if isinstance(value, ast.Name) and value.id in public:
                same = [[word, kind, fixed.get(word, default)] for word, kind, default in public[value.id]]
                public.update({target.id: same for target in item.targets if isinstance(target, ast.Name)})
    return public


def _is(decorator: ast.expr, name: str) -> bool:
    return isinstance(decorator, ast.Name) and decorator.id == name


def parameters(node: ast.FunctionDef) -> list[Parameter]:
    """A function's parameters in their order; of ``*args`` and ``**kwargs`` only that they are there."""
    given = node.args
    positional = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(positional) - len(given.defaults)) + given.defaults
    found = [[p.arg, "positional", _text(d)] for p, d in zip(positional, defaults, strict=True)]
    found += [[p.arg, "keyword", _text(d)] for p, d in zip(given.kwonlyargs, given.kw_defaults, strict=True)]
    return found + [[rest.arg, "rest", None] for rest in (given.vararg, given.kwarg) if rest is not None]


def _text(default: ast.expr | None) -> str | None:
    return None if default is None else ast.unparse(default)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    sources = Sources.of_wheel(parser.parse_args().wheel)
    lines = [f'"{name}": {json.dumps(entry)}' for name, entry in signatures(sources).items()]
    FIXTURE.write_text(f'{{"version": "{sources.version}", "signatures": {{\n' + ",\n".join(lines) + "\n}}\n")


if __name__ == "__main__":
    main()

"""The calls that engines make of FlashInfer's functions which jitfp4 has, from the engines' wheels:

pip download --no-deps --dest DIR vllm==VERSION sglang==VERSION
python -m tests.engines.collect DIR/vllm-VERSION-*.whl DIR/sglang-VERSION-*.whl [--against]

writes ``calls.json`` beside this file: each call with its file, line, function and arguments as they are written there.
With ``--against`` nothing is written: calls that the recorded list lacks are printed, and the exit status is 1 if there
are any. Nothing of an engine is imported: the sources are parsed. A call through a name that a file gives the function
itself (an alias, an attribute, a lazy wrapper) is found too; one through a name that another file gave it is not.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jitfp4.flashinfer
from tests.engines.wheels import Sources

RECORD = Path(__file__).with_name("calls.json")
NAMES = {
    name for names in jitfp4.flashinfer.MODULES.values() for name in names if name[0].islower() or "Wrapper" in name
}
WRAPPERS = {name for name in NAMES if "Wrapper" in name}
METHODS = {"plan", "begin_forward", "run", "run_return_lse", "forward", "forward_return_lse"}
_ENGINES_OWN = ("flashinfer_cutedsl_", "flashinfer_")  # vLLM's names of FlashInfer's functions begin so

Call = dict[str, Any]


def calls(engine: str, sources: Sources) -> list[Call]:
    """Every call, in the order of files and lines."""
    found: list[Call] = []
    for file, text in sources.sources.items():
        if file.startswith(f"{engine}/") and "flashinfer" in text:
            tree = sources.tree(file)
            found += [{"engine": engine, "file": file, **call} for call in _calls(tree, _names(tree))]
    return found


def _names(tree: ast.Module) -> dict[str, str]:
    """FlashInfer's name of what this file calls by another; that of an attribute begins with a dot."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and "flashinfer" in (node.module or ""):
            for alias in node.names:
                own = _ENGINES_OWN if "utils" in (node.module or "") else ()
                possible = (alias.name, *(alias.name.removeprefix(prefix) for prefix in own))
                theirs = next((name for name in possible if name in NAMES), None)
                inner = "gdn_kernels" in (node.module or "")  # functions of the same names with other parameters
                if theirs is not None and not inner:
                    names[alias.asname or alias.name] = theirs
    returned = {
        node.name: item.value
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        for item in ast.walk(node)
        if isinstance(item, ast.Return) and item.value is not None
    }
    for _ in range(3):  # names of names
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and len(node.targets) == 1:
                for target, value in _pairs(node.targets[0], node.value, returned):
                    name = _target(target)
                    if name and (theirs := _callee(value, names)):
                        names[name] = theirs
    return names


def _pairs(target: ast.expr, value: ast.expr, returned: dict[str, ast.expr]) -> list[tuple[ast.expr, ast.expr]]:
    """What is assigned to what; ``returned``: what a function of the file returns."""
    if isinstance(value, ast.IfExp):
        return [*_pairs(target, value.body, returned), *_pairs(target, value.orelse, returned)]
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id in returned:
        return _pairs(target, returned[value.func.id], {})
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        return [pair for two in zip(target.elts, value.elts, strict=True) for pair in _pairs(*two, returned)]
    return [(target, value)]


def _target(node: ast.expr) -> str | None:
    if isinstance(node, ast.Name):
        return node.id
    return f".{node.attr}" if isinstance(node, ast.Attribute) else None


def _callee(node: ast.expr, names: dict[str, str]) -> str | None:
    """FlashInfer's name of a function that an expression gives."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute):
        theirs = node.attr in NAMES and "flashinfer" in ast.unparse(node.value)
        return node.attr if theirs else names.get(f".{node.attr}")
    return None


def _calls(tree: ast.Module, names: dict[str, str]) -> Iterator[Call]:
    wrapper = next((name for name in names.values() if name in WRAPPERS), None)

    def visit(node: ast.AST, inside: tuple[str, ...]) -> Iterator[Call]:
        for child in ast.iter_child_nodes(node):
            named = isinstance(child, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef)
            if isinstance(child, ast.Call):
                callee = _callee(child.func, names)
                if callee is None and wrapper is not None:
                    callee = _method(child.func, inside)
                if callee is not None:
                    yield _record(child, callee, inside)
            yield from visit(child, (*inside, child.name) if named else inside)

    return visit(tree, ())


def _method(function: ast.expr, inside: tuple[str, ...]) -> str | None:
    """``wrapper.plan`` and so on: a method of something that is called a wrapper, or of the ``self`` of a function that
    is put into one. Which class it has, the file hides."""
    if isinstance(function, ast.Attribute) and function.attr in METHODS:
        receiver = ast.unparse(function.value)
        if "wrapper" in receiver.lower() or (receiver == "self" and len(inside) == 1):
            return f"{receiver}.{function.attr}"
    return None


def _record(call: ast.Call, callee: str, inside: tuple[str, ...]) -> Call:
    return {
        "line": call.lineno,
        "function": ".".join(inside),
        "callee": callee,
        "positional": [ast.unparse(argument) for argument in call.args],
        "keywords": {keyword.arg or "**": ast.unparse(keyword.value) for keyword in call.keywords},
    }


def identity(call: Call) -> tuple[str, ...]:
    """What makes a call another one: all but its line."""
    keywords = tuple(f"{name}={text}" for name, text in call["keywords"].items())
    return (call["engine"], call["file"], call["function"], call["callee"], *call["positional"], *keywords)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheels", type=Path, nargs="+")
    parser.add_argument("--against", action="store_true")
    given = parser.parse_args()
    versions, found = {}, []
    for path in given.wheels:
        engine, sources = path.name.split("-")[0], Sources.of_wheel(path)
        versions[engine] = sources.version
        found += calls(engine, sources)
    if not given.against:
        lines = ",\n".join(json.dumps(call) for call in found)
        RECORD.write_text(f'{{"versions": {json.dumps(versions)}, "calls": [\n{lines}\n]}}\n')
        return
    known = {identity(call) for call in json.loads(RECORD.read_text())["calls"]}
    new = [call for call in found if identity(call) not in known]
    for call in new:
        print(f"{call['file']}:{call['line']} {call['function']}: {call['callee']}", call["keywords"])  # noqa: T201
    sys.exit(bool(new))


if __name__ == "__main__":
    main()

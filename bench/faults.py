"""How many bad inputs and spoiled files the tests try, by class, and what becomes of them.

Run anywhere: ``python -m bench.faults [--out DIR]`` writes two files. ``inputs.csv``: by function and class of bad
values, on the CPU, how many are a ``clear`` error (or accepted on purpose, by the list of tests/inputs/calls.py) and
how many are ``wrong``. ``opened.csv``: every file that jitfp4 opens in tests/faults/test_opened.py, each fault that it
was given, and whether a call or a command hung, died, or wrote elsewhere.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from bench.harness import write_results
from bench.stamp import stamp
from tests.faults.sandbox import build_shim, sandboxed
from tests.faults.test_opened import FAULTS
from tests.inputs.calls import bad_calls, verdict
from tests.inputs.good import good_calls

CLASSES = {
    "memory of another argument": ("memory of", "as V", "twice"),
    "dtype": ("of torch.", "a number of int", "quantized", "complex"),
    "rank and shape": ("of another rank", "element", "row too many", "empty in", "resized", "emptied", "size"),
    "strides and views": ("broadcast", "negated", "a leaf", "inference", "sparse", "its data"),
    "device": ("meta",),
    "wrong type": ("an object", "a dict", "bytes", "a list", "a str", "NumPy", "None", "by itself", "float", "int"),
}
"""Words of a bad value, by class; the first that fits counts. Others are numbers and names outside what is allowed."""


def class_of(what: str) -> str:
    if what == "every other element":
        return "strides and views"
    return next((name for name, words in CLASSES.items() if any(word in what for word in words)), "value")


def inputs() -> Iterator[dict[str, object]]:
    for function in good_calls():
        counts: Counter[tuple[str, bool]] = Counter()
        for bad in bad_calls(function, "cpu"):
            counts[class_of(bad.what), verdict(bad) == "clear"] += 1
        for name in sorted({name for name, _ in counts}):
            clear, wrong = counts[name, True], counts[name, False]
            yield {"function": function, "class": name, "tried": clear + wrong, "clear": clear, "wrong": wrong}


def opened() -> Iterator[dict[str, object]]:
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        seen = sandboxed("tests.faults.test_opened:spoil_all", shim=build_shim(base), base=folder, share=1)
    for path in seen["opened"]:
        for fault in FAULTS:
            problems = [text for text in seen["problems"] if text.startswith(f"{path} as {fault}: ")]
            yield {"file": path, "fault": fault, "problem": "; ".join(problems)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("bench/results/cpu"))
    options = parser.parse_args()
    for name, rows in (("inputs", list(inputs())), ("opened", list(opened()))):
        write_results(options.out / name, rows, stamp())
        print(f"{name}: {len(rows)} lines")


if __name__ == "__main__":
    main()

"""Every call of ``calls.json``, keyword for keyword as the engine's source has it, gives the right result.

What a source says literally is taken from it; what it does not, tensors above all, comes from ``values.py``. A keyword
without a value there fails, and so does a call without a trial.
"""

from __future__ import annotations

import ast
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import jitfp4.flashinfer
from jitfp4 import sim
from tests.engines import signatures
from tests.engines.collect import RECORD, Call
from tests.engines.trial import Trial
from tests.engines.values import TRIALS
from tests.engines.values_attention import OTHERS, PENDING, REFUSED, class_of
from tests.engines.values_attention import TRIALS as ATTENTION
from tests.engines.values_experts import TRIALS as OF_EXPERTS

RECORDED = json.loads(RECORD.read_text())
THEIRS = json.loads(signatures.FIXTURE.read_text())["signatures"]


def place(call: Call) -> str:
    """``flashinfer.py:2764``; names of files differ enough with their line."""
    return f"{call['engine']}-{call['file'].rpartition('/')[2]}:{call['line']}"


def trials(call: Call) -> list[Trial]:
    make = (TRIALS | ATTENTION | OF_EXPERTS).get(call["callee"])
    return [] if make is None else list(make(call))


def arguments(call: Call, trial: Trial) -> tuple[list[Any], dict[str, Any], dict[str, Any]]:
    """Positional, by keyword, and all by parameter."""
    names = [name for name, kind, _ in _parameters(call) if kind == "positional"]
    positional = [_value(name, text, trial) for name, text in zip(names, call["positional"], strict=False)]
    keywords: dict[str, Any] = {}
    for name, text in call["keywords"].items():
        keywords |= trial.values["**"] if name == "**" else {name: _value(name, text, trial)}
    return positional, keywords, dict(zip(names, positional, strict=False)) | keywords


def _parameters(call: Call) -> list[signatures.Parameter]:
    """FlashInfer's, of the function, of the class, or of its method."""
    receiver, _, method = call["callee"].rpartition(".")
    entry = THEIRS[class_of(call) if receiver else method]
    return entry["methods"][method if receiver else "__init__"] if "methods" in entry else entry["parameters"]


def _value(name: str, text: str, trial: Trial) -> Any:
    """What the source says, or else the trial."""
    try:
        return ast.literal_eval(text)
    except ValueError:
        pass
    owner, _, member = text.partition(".")
    known = {"SfLayout": jitfp4.SfLayout, "torch": torch}.get(owner)
    if known is not None and member.isidentifier():
        return getattr(known, member)
    return trial.values[name]


OURS = [call for call in RECORDED["calls"] if not any(match(call) for match, _ in OTHERS)]


@pytest.fixture(
    params=["cpu", pytest.param("sm_90a", marks=[pytest.mark.sim, pytest.mark.compile, pytest.mark.one_in(6)])]
)
def device(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.param == "cpu":
        yield
    else:
        with sim.device(request.param):
            yield


@pytest.mark.parametrize("call", OURS, ids=lambda call: f"{place(call)}-{call['callee']}")
def test_a_call(call: Call, device: None) -> None:
    refused = any(match(call) for match, _ in (*PENDING, *REFUSED))
    found = trials(call)
    assert found, f"{call['callee']} has no values"
    for trial in found:
        positional, keywords, given = arguments(call, trial)
        function = trial.function or getattr(jitfp4.flashinfer, call["callee"])
        try:
            result = function(*positional, **keywords)
            assert not refused, "it is accepted: take it from the list"
            trial.check(result, given)
        except Exception as error:
            if not (refused and isinstance(error, (jitfp4.ArgumentError, TypeError, AttributeError))):
                error.add_note(f"with {trial.name}")
                raise


def test_the_counts() -> None:
    """``pytest -s`` prints how many calls give the right result, are refused, or are of something else."""
    rules = {"of something else": OTHERS, "refused": REFUSED, "pending": PENDING}
    kinds = (
        f"{call['engine']}: {next((k for k, found in rules.items() if any(m(call) for m, _ in found)), 'right')}"
        for call in RECORDED["calls"]
    )
    counts = Counter(kinds)
    print(RECORDED["versions"], dict(counts))  # noqa: T201
    assert counts["vllm: refused"] + counts["sglang: refused"] == sum(any(m(c) for m, _ in REFUSED) for c in OURS)
    for match, reason in (*OTHERS, *PENDING, *REFUSED):
        assert any(match(call) for call in RECORDED["calls"]), f"no call is left of {reason}"

"""Bad input is a clear, typed error that names the argument, before anything is written; nothing is silently accepted.

The same table runs on the CPU, under the simulator and on a GPU.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from jitfp4 import sim
from tests.inputs.calls import bad_calls, callables, function_of, is_allowed, verdict
from tests.inputs.good import good_calls


@pytest.fixture(
    params=[
        "cpu",
        pytest.param("sm_90a", marks=[pytest.mark.sim, pytest.mark.compile]),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ]
)
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param.startswith("sm_"):
        with sim.device(request.param):
            yield "cpu"
    else:
        yield request.param


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """The tensors are small, and the threads of a machine in use wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", good_calls())
def test_every_bad_value_of_every_argument(name: str, device: str, whole: bool) -> None:
    """Under the simulator, which is slow, two and one in six of the refused values, by digest; all with ``--all``."""
    counts: Counter[str] = Counter()
    wrong = []
    for bad in bad_calls(name, device):
        skipped = is_allowed(bad) or (counts["clear"] > 1 and zlib.crc32(str(bad).encode()) % 6)
        if sim.active_device() is not None and not whole and skipped:
            continue
        found = verdict(bad)
        counts[found.split()[0]] += 1
        if found != "clear":
            wrong.append(f"{bad}: {found}")
    print(f"{name} on {device}: {dict(counts)}")  # noqa: T201
    assert not wrong, "\n".join(wrong)
    assert counts["clear"] > 1


def tensors(found: Any) -> list[torch.Tensor]:
    """Those of a result, in order; a record's are its attributes."""
    if isinstance(found, torch.Tensor):
        return [found]
    parts = found if isinstance(found, (tuple, list)) else getattr(found, "tensors", dict)().values()
    return [tensor for part in parts for tensor in tensors(part)]


@pytest.mark.parametrize("name", good_calls())
def test_the_good_call_is_good_and_sees_no_default_dtype(name: str) -> None:
    """Engines load models with another default dtype than float32."""
    results, before = [], torch.get_default_dtype()
    for default in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        arguments = good_calls()[name]()
        torch.set_default_dtype(default)
        try:
            results.append(tensors(function_of(name)(**arguments)))
        finally:
            torch.set_default_dtype(before)
    kinds = [[(tensor.dtype, tensor.shape) for tensor in found] for found in results]
    assert kinds[0] == kinds[1]


@pytest.mark.complete
def test_everything_that_can_be_called_is_in_the_table() -> None:
    """A new function fails here until tests/inputs/good.py has a good call of it."""
    in_table = [function_of(call) for call in good_calls()]
    missing = {name.split(".")[0] for name, function in callables() if function not in in_table}
    of_no_tensors = {"CacheInfo", "NVFP44Over6ErrMode", "SfLayout", "load_tactics", "tune"}  # a result, enumerations
    assert missing == of_no_tensors, "tests/inputs/good.py: everything else needs a good call"

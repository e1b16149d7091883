"""Every exception of the package: pickled, copied, out of a spawned worker, and through torch.compile."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import pytest
import torch

import jitfp4
from jitfp4 import errors
from jitfp4.errors import ArgumentError, CompileError, Jitfp4Error

ARGUMENTS = {
    ArgumentError: ("a", torch.float64, "torch.float16 or torch.bfloat16"),
    CompileError: ("kernel.cu", "sm_90a", "kernel.cu(3): error: no\n", ">    3 | nonsense"),
}


def tree(root: type[Jitfp4Error]) -> Iterator[type[Jitfp4Error]]:
    yield root
    for kind in root.__subclasses__():
        yield from tree(kind)


KINDS = list(tree(Jitfp4Error))


def make(kind: type[Jitfp4Error]) -> Jitfp4Error:
    arguments = next((values for base, values in ARGUMENTS.items() if issubclass(kind, base)), ("a message",))
    error = kind(*arguments)
    error.add_note("seen by a worker")
    return error


def fail(kind: type[Jitfp4Error]) -> None:
    raise make(kind)


def test_the_tree_of_the_module_is_the_tree_of_the_classes() -> None:
    named = [line.split("── ")[1].split()[0] for line in (errors.__doc__ or "").splitlines() if "── " in line]
    assert sorted(["Jitfp4Error", *named]) == sorted(kind.__name__ for kind in KINDS)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda error: pickle.loads(pickle.dumps(error))])  # noqa: S301
def test_a_copy_is_the_same_error(kind: type[Jitfp4Error], again: Callable[[Jitfp4Error], Jitfp4Error]) -> None:
    error = make(kind)
    twin = again(error)
    assert type(twin) is kind and twin is not error
    assert str(twin) == str(error) and twin.__dict__ == error.__dict__


def test_what_came_need_not_be_something_to_pickle() -> None:
    error = ArgumentError("a", lambda: None, "a tensor")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)  # noqa: S301


def test_a_spawned_worker_hands_every_error_to_its_parent() -> None:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        for kind in KINDS:
            error = pool.submit(fail, kind).exception(timeout=600)
            assert not isinstance(error, BrokenProcessPool)
            assert type(error) is kind and str(error) == str(make(kind))


@pytest.mark.parametrize(
    ("a", "kind"),
    [
        (torch.zeros(16, 16, dtype=torch.int32), errors.ArgumentTypeError),
        (torch.zeros(16, 15, dtype=torch.bfloat16), ArgumentError),
    ],
    ids=["dtype", "shape"],
)
def test_torch_compile_shows_the_error_of_a_wrong_argument(a: torch.Tensor, kind: type[ArgumentError]) -> None:
    quantize = torch.compile(jitfp4.nvfp4_quantize, fullgraph=True, backend="eager")
    with pytest.raises(kind) as eager:
        jitfp4.nvfp4_quantize(a, torch.ones(1))
    name, got, allowed = eager.value.args
    with pytest.raises(torch._dynamo.exc.Unsupported) as compiled:
        quantize(a, torch.ones(1))
    assert f"raised exception {kind.__name__}(" in str(compiled.value)
    assert all(text in str(compiled.value) for text in (f"'{name}'", str(got), allowed))

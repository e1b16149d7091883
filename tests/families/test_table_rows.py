"""Tables, problems and tactics of each operation: rows that are met, fields that vary, launches that can be."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from typing import Any

import pytest

from jitfp4.arch import ARCHS, Arch
from jitfp4.families.quantize.kernels.tma import TmaTactic
from jitfp4.kernel import AnyKernel, kernels
from jitfp4.operation import Operation, operations
from jitfp4.selection import Row, Table, table_for

OPERATIONS = operations()


def problems(operation: Operation[Any, Any], arch: Arch) -> list[Any]:
    """In an order in which a few of them show all there is."""
    found = list(operation._problems(arch))
    random.Random(0).shuffle(found)
    return found


def selected_rows(operation: Operation[Any, Any]) -> Iterator[tuple[Table[Any], Row[Any]]]:
    """Table and row that each problem gets on each architecture."""
    for arch in ARCHS.values():
        table = table_for(operation.tables, arch)
        for problem in problems(operation, arch):
            given = ((row, row.of(problem, arch)) for row in table.rows)
            row, tactic = next(
                (row, tactic)
                for row, tactic in given
                if tactic is not None and not kernel_of(operation, tactic).rejects(problem, tactic, arch)
            )
            assert operation.select(problem, arch) is tactic
            yield table, row


def kernel_of(operation: Operation[Any, Any], tactic: object) -> AnyKernel:
    return next(kernel for kernel in operation.kernels if kernel.tactic is type(tactic))


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_every_row_is_met_by_a_problem_on_some_architecture(operation: Operation[Any, Any]) -> None:
    missed = [row for table in operation.tables for row in table.rows]
    for _, met in selected_rows(operation):
        missed = [row for row in missed if row is not met]
        if not missed:
            return
    raise AssertionError(missed)


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_every_row_names_a_tactic_that_its_kernel_lists(operation: Operation[Any, Any]) -> None:
    for table in operation.tables:
        for row in table.rows:
            if not callable(row.tactic):  # a model has a test of its own
                assert row.tactic in kernel_of(operation, row.tactic).tactics


@pytest.mark.parametrize("kernel", kernels(), ids=lambda kernel: kernel.name)
def test_every_field_of_a_spec_varies(kernel: AnyKernel) -> None:
    """A field that no problem and no candidate sets otherwise is dead."""
    (operation,) = (operation for operation in OPERATIONS if kernel in operation.kernels)
    constant = {field.name: set() for field in dataclasses.fields(kernel.spec)}
    for arch in ARCHS.values():
        for problem in problems(operation, arch):
            for tactic in kernel.candidates(problem, arch):
                spec = kernel.specialise(problem, tactic)
                constant = {name: seen | {getattr(spec, name)} for name, seen in constant.items() if len(seen) < 2}
            if not any(len(seen) < 2 for seen in constant.values()):
                return
    assert not constant, f"the same in every specialisation: {constant}"


@pytest.mark.parametrize("arch", ARCHS.values(), ids=lambda arch: arch.name)
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_launches_stay_within_what_the_kernel_is_compiled_for(
    operation: Operation[Any, Any], arch: Arch, whole: bool
) -> None:
    """Threads within __launch_bounds__, shared memory within the architecture's. Of thousands of problems a sample."""
    for problem in problems(operation, arch)[: None if whole else 600]:
        tactic = operation.select(problem, arch)
        plan = operation.plan(problem, arch)
        spec, (x, y, z) = plan.spec, plan.geometry.block
        bounds = [getattr(spec, name) for name in ("max_threads", "threads") if hasattr(spec, name)]
        most = bounds[0] if bounds else 32 * (spec.consumers + 1 if isinstance(tactic, TmaTactic) else spec.warps)
        assert 0 < x * y * z <= most <= 1024, (problem, tactic)
        assert plan.geometry.shared_bytes <= arch.shared_bytes, (problem, tactic)
        assert min(plan.geometry.grid) > 0 and max(plan.geometry.grid[1:]) <= 65535, (problem, tactic)

"""Measured tables, which give the tactic of a problem."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from jitfp4.arch import Arch

TacticT = TypeVar("TacticT")


@dataclass(frozen=True, slots=True)
class Row(Generic[TacticT]):
    """A tactic, and the problems that get it.

    Each entry of ``when`` names an attribute of the problem, or a method of it that takes the architecture. A number is
    an inclusive upper bound; any other value must equal the attribute.
    """

    tactic: TacticT
    when: Mapping[str, Any] = field(default_factory=dict)

    def fits(self, problem: Any, arch: Arch) -> bool:
        return all(_holds(problem, name, wanted, arch) for name, wanted in self.when.items())


def rows(*tactics: tuple[TacticT, dict[str, Any]], **when: Any) -> tuple[Row[TacticT], ...]:
    """Rows that share the conditions ``when``; each tactic comes with its further conditions."""
    return tuple(Row(tactic, when | own) for tactic, own in tactics)


@dataclass(frozen=True, slots=True)
class Table(Generic[TacticT]):
    """Rows in order of preference: the first that fits a problem, and whose tactic can run it, is taken.

    ``measured`` is the committed file below ``bench/results`` from which the rows follow; None for rows that are not
    measured. A table serves the architectures in ``archs``; an empty ``archs`` stands for all that no other table of
    the operation names.
    """

    rows: tuple[Row[TacticT], ...]
    measured: str | None
    archs: tuple[str, ...] = ()


def table_for(tables: tuple[Table[TacticT], ...], arch: Arch) -> Table[TacticT]:
    """The table that names ``arch``, or the one that names none."""
    named = (table for table in tables if arch.name in table.archs)
    return next(named, None) or next(table for table in tables if not table.archs)


def _holds(problem: Any, name: str, wanted: Any, arch: Arch) -> bool:
    value = getattr(problem, name)
    value = value(arch) if callable(value) else value
    return bool(value <= wanted if type(wanted) in (int, float) else value == wanted)

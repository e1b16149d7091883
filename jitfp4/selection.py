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

    ``tactic`` may be a function, a model: it takes the problem and the architecture, and returns a tactic, or None for
    a problem that the row does not fit.

    Each entry of ``when`` names an attribute of the problem, or a method of it that takes the architecture. A number is
    an inclusive upper bound; any other value must equal the attribute.
    """

    tactic: TacticT
    when: Mapping[str, Any] = field(default_factory=dict)

    def of(self, problem: Any, arch: Arch) -> Any:
        """The row's tactic; None for a problem that it does not fit."""
        if not all(_holds(problem, name, wanted, arch) for name, wanted in self.when.items()):
            return None
        return self.tactic(problem, arch) if callable(self.tactic) else self.tactic


def rows(*tactics: tuple[TacticT, dict[str, Any]], **when: Any) -> tuple[Row[TacticT], ...]:
    """Rows that share the conditions ``when``; each tactic comes with its further conditions."""
    return tuple(Row(tactic, when | own) for tactic, own in tactics)


@dataclass(frozen=True, slots=True)
class Table(Generic[TacticT]):
    """Rows in order of preference: the first that fits a problem, and whose tactic can run it, is taken.

    ``measured`` is the committed file below ``bench/results`` from which the rows follow; None for rows that are not
    measured. ``elsewhere`` names another file for the rows whose tactics are of a type. A table serves the
    architectures with the capability ``needs``, a field of Arch; None stands for all that no other table of the
    operation serves.
    """

    rows: tuple[Row[TacticT], ...]
    measured: str | None
    needs: str | None = None
    elsewhere: Mapping[type, str] = field(default_factory=dict)

    def serves(self, arch: Arch) -> bool:
        return self.needs is not None and bool(getattr(arch, self.needs))


def table_for(tables: tuple[Table[TacticT], ...], arch: Arch) -> Table[TacticT]:
    """The table whose capability ``arch`` has, or the one for all others."""
    own = (table for table in tables if table.serves(arch))
    return next(own, None) or next(table for table in tables if table.needs is None)


def _holds(problem: Any, name: str, wanted: Any, arch: Arch) -> bool:
    value = getattr(problem, name)
    value = value(arch) if callable(value) else value
    return bool(value <= wanted if type(wanted) in (int, float) else value == wanted)

"""The specification of one generated kernel, the geometry of its launch, and its parameters."""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Any, Self, TypeVar

from jitfp4.errors import ArgumentError

RecordT = TypeVar("RecordT")
Dim3 = tuple[int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSpec:
    """Everything that changes a kernel's generated source, and nothing else.

    Fields are enums, ints or bools. Shapes, strides and scales are kernel arguments, so that the specs of a kernel are
    finite and can all be built ahead of time.
    """

    def fields(self) -> dict[str, str | int | bool]:
        """The fields as JSON values, in declaration order; a StrEnum gives its value, an IntEnum its name."""
        return fields_of(self)

    def json(self) -> str:
        """Canonical JSON: sorted keys, no spaces. Part of the generated source, and so of the cache key."""
        return json.dumps(self.fields(), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_fields(cls, values: Mapping[str, object]) -> Self:
        """The inverse of fields(). Raises ArgumentError on a missing, unknown or impossible value."""
        return record_of(cls, values, "spec")

    def __str__(self) -> str:
        return ",".join(f"{name}={str(value).lower()}" for name, value in self.fields().items())


def fields_of(record: Any) -> dict[str, str | int | bool]:
    """The fields of a spec, a problem or a tactic (a dataclass or a NamedTuple) as JSON values, in their order."""
    return {name: _as_json(getattr(record, name)) for name in _names(type(record))}


def record_of(kind: type[RecordT], values: Mapping[str, object], what: str) -> RecordT:
    """The inverse of fields_of(). Raises ArgumentError for ``what`` on a missing, unknown or impossible value."""
    types, names = typing.get_type_hints(kind), _names(kind)
    if sorted(values) != sorted(names):
        raise ArgumentError(what, sorted(values), f"exactly {sorted(names)}")
    try:
        return kind(**{name: _from_json(types[name], values[name]) for name in names})
    except (KeyError, ValueError, ArithmeticError) as error:
        raise ArgumentError(what, dict(values), f"values of {kind.__name__}: {error}") from None


def _names(kind: Any) -> list[str]:
    return [f.name for f in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else list(kind._fields)


def _as_json(value: Any) -> str | int | bool:
    return value.name if isinstance(value, IntEnum) else value.value if isinstance(value, Enum) else value


def _from_json(kind: Any, value: Any) -> Any:
    if type(value) is kind:
        return value
    if isinstance(value, str) and issubclass(kind, Enum):
        return kind[value] if issubclass(kind, IntEnum) else kind(value)
    raise ValueError(f"{value!r} is no {kind.__name__}")


WARP = 32  # threads
MAX_GRID_YZ = 65535  # CTAs of a grid along y, and along z


@dataclass(frozen=True, slots=True)
class Geometry:
    """One launch: ``grid`` in CTAs, ``block`` in threads, ``cluster`` in CTAs, dynamic shared memory in bytes."""

    grid: Dim3
    block: Dim3
    cluster: Dim3 = (1, 1, 1)
    shared_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Ptr:
    """A pointer parameter: ``cpp`` is the pointee with its qualifiers, ``shape`` a comment for the reader."""

    name: str
    cpp: str
    shape: str = ""

    @property
    def declaration(self) -> str:
        return f"{self.cpp}* __restrict__ {self.name}"


@dataclass(frozen=True, slots=True)
class I64:
    """A 64-bit integer parameter. Every runtime integer is one: Python ints need no conversion at launch.

    ``member`` is its type where the parameters are gathered in a struct.
    """

    name: str
    shape: str = ""
    member: str = "int64"

    @property
    def declaration(self) -> str:
        return f"int64 {self.name}"


@dataclass(frozen=True, slots=True)
class F32:
    """A float parameter."""

    name: str
    shape: str = ""

    @property
    def declaration(self) -> str:
        return f"float {self.name}"


@dataclass(frozen=True, slots=True)
class TensorMapParam:
    """A TMA tensor map, passed by value in parameter memory."""

    name: str
    shape: str = ""

    @property
    def declaration(self) -> str:
        return f"const __grid_constant__ TensorMap {self.name}"


Param = Ptr | I64 | F32 | TensorMapParam
"""A parameter of a kernel. ``declaration`` is its C++ text. All but tensor maps can also be members of a struct."""


@dataclass(frozen=True, slots=True)
class TileMap:
    """The argument for a TensorMapParam: a tensor, and the boxes in which TMA copies it.

    ``tensor`` is row-major with unit stride in its last dimension. TMA copies its elements as integers of their size.
    ``box`` is in elements, outermost dimension first; ``swizzle`` is the shared-memory swizzle span in bytes: 0, 32, 64
    or 128. Elements outside the tensor read as zero.
    """

    tensor: Any
    box: tuple[int, ...]
    swizzle: int = 0

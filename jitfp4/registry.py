"""The kernel families: what each generated kernel is called, is made from, takes, and can be specialised to.

Importing ``jitfp4.families`` registers all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from jitfp4.arch import Arch
from jitfp4.errors import ArgumentError
from jitfp4.render import render
from jitfp4.spec import KernelSpec, Param


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Family:
    """One template and everything that is specific to it.

    ``name`` is the template's path without its suffix, such as ``quantize/vector``: it finds the template, the
    golden files and, with ``/`` read as ``_``, the kernel's symbol. ``specs(arch)`` lists every specialisation that
    selection can return on ``arch`` (none where the family does not exist); warm-up builds exactly those.
    """

    name: str
    spec: type[KernelSpec]
    params: tuple[Param, ...]
    specs: Callable[[Arch], Iterable[KernelSpec]]

    @property
    def template(self) -> str:
        return f"{self.name}.cu.j2"

    @property
    def symbol(self) -> str:
        return self.name.replace("/", "_")

    def render(self, spec: KernelSpec, arch: Arch) -> str:
        """The generated source of one specialisation."""
        if type(spec) is not self.spec:
            raise ArgumentError("spec", type(spec).__name__, f"{self.spec.__name__}, the spec of {self.name}")
        return render(self.template, spec, arch, symbol=self.symbol, params=self.params)


_families: dict[str, Family] = {}


def register(family: Family) -> Family:
    """Add a family; a second registration of a name is an error."""
    if family.name in _families:
        raise ArgumentError("family", repr(family.name), "a name that is not registered yet")
    _families[family.name] = family
    return family


def families(pattern: str | None = None) -> tuple[Family, ...]:
    """All families in name order, or those called ``pattern`` or lying below it (``quantize`` names all of its
    kernels).

    Raises ArgumentError when ``pattern`` names none.
    """
    found = tuple(
        family
        for name, family in sorted(_families.items())
        if pattern is None or name == pattern or name.startswith(f"{pattern}/")
    )
    if not found:
        raise ArgumentError("family", repr(pattern), ", ".join(sorted(_families)))
    return found


def lookup(name: str) -> Family:
    """The family called ``name`` exactly."""
    if name not in _families:
        raise ArgumentError("family", repr(name), ", ".join(sorted(_families)))
    return _families[name]

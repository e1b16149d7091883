"""The one Jinja environment: a template, a spec and an architecture become one self-contained CUDA C++ file.

Delimiters are ``${value}`` and ``//% block %//``: both survive a C++ editor, and neither collides with PTX operands or
nested braces. Every value passes through a typed filter, and a name that is not defined is an error.
"""

from __future__ import annotations

import functools
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import jinja2

from jitfp4.arch import Arch
from jitfp4.errors import RenderError
from jitfp4.formats import DType
from jitfp4.layouts import SfLayout
from jitfp4.spec import F32, I64, KernelSpec, Param, Ptr

_INCLUDE = re.compile(r'^//% include "(.*?)" %//\n', re.MULTILINE)
_CPP_TYPES = {DType.BF16: "bf16", DType.F16: "f16", DType.F32: "float", DType.E4M3: "e4m3"}


@dataclass(frozen=True, slots=True)
class Header:
    """What the comment on top of a generated file says, and the kernel's ``extern "C"`` symbol."""

    template: str
    spec_json: str
    arch: str
    symbol: str


def templates_dir() -> Path:
    """Where the templates lie: inside an installed package, or beside it in a checkout."""
    installed = Path(__file__).parent / "_templates"
    return installed if installed.is_dir() else Path(__file__).parents[1] / "templates"


def render(template: str, spec: KernelSpec, arch: Arch, *, symbol: str, params: Sequence[Param]) -> str:
    """Generate the CUDA C++ source of one kernel.

    Args:
        template: path below the templates folder, such as ``quantize/vector.cu.j2``.
        spec: the kernel's specification, visible to the template as ``spec``.
        arch: the compile target, visible as ``arch``.
        symbol: the kernel's ``extern "C"`` name.
        params: the kernel's parameters, visible as ``params``; the filter ``cpp_params`` declares them.
    Returns:
        The text of one file without any ``#include``. Equal arguments give equal text on every machine.
    Raises:
        RenderError: the template does not exist, is not well formed, or uses a name that is not defined.
    """
    header = Header(template=template, spec_json=spec.json(), arch=arch.name, symbol=symbol)
    try:
        return _environment().get_template(template).render(header=header, spec=spec, arch=arch, params=tuple(params))
    except jinja2.TemplateError as error:
        raise RenderError(f"{template} with {spec} for {arch.name}: {type(error).__name__}: {error}") from error


def render_partial(partial: str, arch: Arch, spec: object = None) -> str:
    """Generate the text of a partial and of what it includes, as of a file of its own.

    Args:
        spec: has the fields that a partial with text for each value of a spec names.
    Raises:
        RenderError.
    """
    try:
        return _environment().get_template(partial).render(arch=arch, spec=spec)
    except jinja2.TemplateError as error:
        raise RenderError(f"{partial} for {arch.name}: {type(error).__name__}: {error}") from error


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=_Loader(templates_dir()),
        variable_start_string="${",
        variable_end_string="}",
        block_start_string="//%",
        block_end_string="%//",
        comment_start_string="//#",
        comment_end_string="#//",
        undefined=jinja2.StrictUndefined,
        autoescape=False,  # noqa: S701 - the output is CUDA C++, not HTML
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        auto_reload=False,
    )
    environment.filters.update(
        cpp_bool=cpp_bool,
        cpp_type=cpp_type,
        cpp_enum=cpp_enum,
        cpp_params=cpp_params,
        cpp_members=cpp_members,
        cpp_values=cpp_values,
    )
    return environment


class _Loader(jinja2.FileSystemLoader):
    """A template with what it includes, and what that includes, each once and before it is needed.

    Every partial begins with an ``include`` of each partial that it uses; a template names what it uses itself.
    """

    def get_source(self, environment: jinja2.Environment, template: str) -> tuple[str, str, Callable[[], bool]]:
        source, path, is_fresh = super().get_source(environment, template)
        return self._expand(environment, source, set()), path, is_fresh

    def _expand(self, environment: jinja2.Environment, text: str, seen: set[str]) -> str:
        def include(found: re.Match[str]) -> str:
            name = found[1]
            if name in seen:
                return ""
            seen.add(name)
            return self._expand(environment, super(_Loader, self).get_source(environment, name)[0], seen)

        return _INCLUDE.sub(include, text)


def cpp_bool(value: bool) -> str:
    """``true`` or ``false``; anything but a bool is an error."""
    if not isinstance(value, bool):
        raise jinja2.TemplateRuntimeError(f"cpp_bool takes a bool, got {value!r}")
    return "true" if value else "false"


def cpp_type(dtype: DType) -> str:
    """The generated source's name of an element type."""
    if dtype not in _CPP_TYPES:
        raise jinja2.TemplateRuntimeError(f"cpp_type takes a DType, got {dtype!r}")
    return _CPP_TYPES[dtype]


def cpp_enum(value: SfLayout | StrEnum) -> str:
    """An enumerator of generated source: ``k`` and the value's name, ``k128x4`` or ``kLinear``."""
    tag = value.tag if isinstance(value, SfLayout) else str(value)
    return "k" + tag[:1].upper() + tag[1:]


def cpp_params(params: Sequence[Param]) -> str:
    """A kernel's parameter list, one line each, with the shape as a comment."""
    commas = [","] * (len(params) - 1) + [""]
    declarations = [param.declaration + comma for param, comma in zip(params, commas, strict=True)]
    width = max(map(len, declarations), default=0)
    lines = [
        f"{declaration:<{width}}  // {param.shape}" if param.shape else declaration
        for declaration, param in zip(declarations, params, strict=True)
    ]
    end = "\n" if params and params[-1].shape else ""  # a comment must not swallow what the template writes behind it
    return "\n    ".join(lines) + end


def cpp_members(params: Sequence[Param]) -> str:
    """The parameters as members of a struct, one line each."""
    members = [
        f"{param.cpp}* {param.name};" if isinstance(param, Ptr) else f"{_member_type(param)} {param.name};"
        for param in params
    ]
    return "\n  ".join(members)


def cpp_values(params: Sequence[Param]) -> str:
    """The initialiser of a struct of cpp_members() from the parameters."""
    values = [
        f"{param.member}({param.name})" if isinstance(param, I64) and param.member != "int64" else param.name
        for param in params
    ]
    lines = textwrap.wrap(", ".join(values), width=100)
    return "{" + "\n      ".join(lines) + "}"


def _member_type(param: Param) -> str:
    if isinstance(param, I64):
        return param.member
    if isinstance(param, F32):
        return "float"
    raise jinja2.TemplateRuntimeError(f"a tensor map is no member of a struct: {param.name}")

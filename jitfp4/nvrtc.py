"""The only caller of the compiler: generated source to cubin or PTX, without a GPU, a driver, nvcc or a header."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import mmap
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jitfp4.arch import Arch
from jitfp4.errors import CompileError, ToolchainError
from jitfp4.layouts import round_up

OPTIONS = (
    "--std=c++17",
    "--fmad=false",  # a fused multiply-add is written as fmaf() where it is meant: results do not hang on the compiler
    "--ftz=false",
    "--prec-div=true",
    "--prec-sqrt=true",
    "--extra-device-vectorization",
    "--no-source-include",
)
"""Options of every compilation, besides the architecture. Part of the cache key."""

_EXCERPT_MARGIN = 4  # source lines shown around each line that the compiler complained about
_MAX_EXCERPTS = 5
_PT_NOTE, _NT_GNU_BUILD_ID = 4, 3


@dataclass(frozen=True, slots=True)
class Toolchain:
    """One NVRTC build.

    ``version`` is what a reader knows it by (``12.9.86`` where the package says it, else ``12.9``); ``build`` hashes
    the GNU build id of libnvrtc and the bytes of its builtins, which tell patch levels and repackaged builds apart.
    """

    version: str
    build: str

    @property
    def name(self) -> str:
        """Folder name in the cache, such as ``nvrtc-12.9.86-0123456789ab``."""
        return f"nvrtc-{self.version}-{self.build[:12]}"


def compile_options(arch: Arch) -> tuple[str, ...]:
    """The options that make a cubin for ``arch``."""
    return (f"--gpu-architecture={arch.name}", *OPTIONS)


def compile_cubin(source: str, arch: Arch, *, symbol: str) -> bytes:
    """Compile one generated file to a cubin (ELF) for ``arch``.

    Args:
        source: CUDA C++ without ``#include``.
        symbol: the ``extern "C"`` kernel; it also names the program, because that name is kept in the cubin.
    Raises:
        CompileError: NVRTC rejected the source; the message holds its log and the numbered lines around each fault.
        ToolchainError: NVRTC could not be loaded or failed otherwise.
    """
    return _compile(source, arch, compile_options(arch), symbol, "CUBIN")


def compile_ptx(source: str, arch: Arch, *, symbol: str) -> str:
    """Compile one generated file to PTX text with line information, for the simulator. Raises like compile_cubin()."""
    options = (f"--gpu-architecture={arch.ptx_target}", *OPTIONS, "--generate-line-info")
    return _compile(source, arch, options, symbol, "PTX").rstrip(b"\0").decode()


@functools.cache
def toolchain() -> Toolchain | None:
    """The NVRTC of this environment, or None when there is none.

    An installed NVRTC package is recognised from its files, so that a process whose kernels are all cached never loads
    the library.
    """
    try:
        library = _installed_library() or _loaded_library()
    except ToolchainError:
        return None
    digest = hashlib.sha256(_gnu_build_id(library))
    for builtins in sorted(library.parent.glob("libnvrtc-builtins.so*")):
        digest.update(hashlib.sha256(builtins.read_bytes()).digest())
    return Toolchain(version=_version(library), build=digest.hexdigest())


def _compile(source: str, arch: Arch, options: tuple[str, ...], symbol: str, kind: str) -> bytes:
    nvrtc = _bindings()
    program_name = f"{symbol}.cu"
    program = _check(nvrtc, nvrtc.nvrtcCreateProgram(source.encode(), program_name.encode(), 0, [], []))
    try:
        encoded = [option.encode() for option in options]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            log = _read(nvrtc, program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
            if status == nvrtc.nvrtcResult.NVRTC_ERROR_COMPILATION:
                raise CompileError(program_name, arch.name, log, numbered_excerpt(source, log))
            raise ToolchainError(f"NVRTC failed on {program_name} for {arch.name}: {status.name}\n{log}")
        return _read(nvrtc, program, kind)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def numbered_excerpt(source: str, log: str) -> str:
    """The source lines around each line that ``log`` names, numbered, the faulty ones marked with ``>``."""
    lines = source.splitlines()
    faults = list(dict.fromkeys(int(n) for n in re.findall(r"\.cu\((\d+)\): (?:catastrophic )?error", log)))[
        :_MAX_EXCERPTS
    ]
    shown = {n for fault in faults for n in range(fault - _EXCERPT_MARGIN, fault + _EXCERPT_MARGIN + 1)}
    return "\n".join(
        f"{'>' if number in faults else ' '}{number:5} | {lines[number - 1]}"
        for number in sorted(shown)
        if 1 <= number <= len(lines)
    )


def _read(nvrtc: Any, program: Any, what: str) -> bytes:
    size = _check(nvrtc, getattr(nvrtc, f"nvrtcGet{what}Size")(program))
    buffer = bytes(size)  # the bindings fill the object that is passed to them
    _check(nvrtc, getattr(nvrtc, f"nvrtcGet{what}")(program, buffer))
    return buffer


def _check(nvrtc: Any, answer: tuple[Any, ...]) -> Any:
    status, *values = answer
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise ToolchainError(f"NVRTC: {status.name}")
    return values[0] if values else None


def _bindings() -> Any:
    try:
        from cuda.bindings import nvrtc

        _check(nvrtc, nvrtc.nvrtcVersion()[:1])  # loads the library
    except (ImportError, RuntimeError) as error:  # cuda.pathfinder's DynamicLibNotFoundError is a RuntimeError
        raise ToolchainError(f"NVRTC cannot be loaded: {error}. Install what fits cuda-bindings.") from error
    return nvrtc


def _installed_library() -> Path | None:
    """libnvrtc in the package that fits the installed cuda.bindings, found without loading it."""
    try:
        major = importlib.metadata.version("cuda-bindings").split(".")[0]
    except importlib.metadata.PackageNotFoundError:
        raise ToolchainError("cuda-bindings is not installed") from None
    nvidia = importlib.util.find_spec("nvidia")
    for root in (nvidia.submodule_search_locations or ()) if nvidia else ():
        for folder in (f"cu{major}", "cuda_nvrtc"):
            library = Path(root) / folder / "lib" / f"libnvrtc.so.{major}"
            if library.is_file():
                return library
    return None


def _loaded_library() -> Path:
    from cuda.pathfinder import load_nvidia_dynamic_lib

    _bindings()
    path = load_nvidia_dynamic_lib("nvrtc").abs_path
    if path is None:
        raise ToolchainError("NVRTC was loaded from a place that the loader does not name")
    return Path(path).resolve()


def _version(library: Path) -> str:
    """The version of the package that owns ``library``; for any other library, what NVRTC itself says."""
    for name in ("nvidia-cuda-nvrtc-cu12", "nvidia-cuda-nvrtc"):
        try:
            package = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if any(Path(str(package.locate_file(file))) == library for file in package.files or ()):
            return package.version
    nvrtc = _bindings()
    _, major, minor = nvrtc.nvrtcVersion()
    return f"{major}.{minor}"


def _gnu_build_id(library: Path) -> bytes:
    """The descriptor of the ELF note NT_GNU_BUILD_ID (System V gABI, note section; type 3, owner "GNU")."""
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as elf:
        (headers_at,) = struct.unpack_from("<Q", elf, 32)
        entry_size, count = struct.unpack_from("<HH", elf, 54)
        for index in range(count):
            kind, _, offset, _, _, size = struct.unpack_from("<IIQQQQ", elf, headers_at + index * entry_size)
            note = offset
            while kind == _PT_NOTE and note < offset + size:
                name_size, desc_size, note_type = struct.unpack_from("<III", elf, note)
                name_at, desc_at = note + 12, note + 12 + round_up(name_size, 4)
                if note_type == _NT_GNU_BUILD_ID and elf[name_at : name_at + 4] == b"GNU\0":
                    return elf[desc_at : desc_at + desc_size]
                note = desc_at + round_up(desc_size, 4)
    raise ToolchainError(f"{library} has no GNU build id, so cached kernels could not be told apart")

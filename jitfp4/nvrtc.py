"""The only caller of the compiler: generated source to cubin or PTX, without a GPU, a driver, nvcc or a header.

libnvrtc is called through ctypes, by the path of the file that toolchain() names: cuda.bindings takes whichever
libnvrtc the process met first, and a cubin would then stand in the cache under the name of another compiler.
"""

from __future__ import annotations

import ctypes
import filecmp
import functools
import hashlib
import importlib.metadata
import logging
import mmap
import re
import signal
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jitfp4.arch import Arch
from jitfp4.errors import CompileError, ToolchainError

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
_SHT_NOTE, _NT_GNU_BUILD_ID = 7, 3
_ERROR_COMPILATION = 6  # nvrtcResult
_PACKAGES = ("nvidia-cuda-nvrtc-cu12", "nvidia-cuda-nvrtc")  # from CUDA 13 on without a suffix

_log = logging.getLogger("jitfp4.nvrtc")


@dataclass(frozen=True, slots=True)
class Toolchain:
    """One NVRTC build.

    ``version`` is what a reader knows it by (``12.9.86`` where the package says it, else ``12.9``); ``build`` hashes
    the GNU build id of libnvrtc and the bytes of its builtins, which tell patch levels and repackaged builds apart.
    ``library`` is the file, and this file is what compiles.
    """

    version: str
    build: str
    library: Path

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
        ToolchainError: NVRTC is missing, cannot be loaded, does not know ``arch``, or failed otherwise.
    """
    return _compile(source, arch, compile_options(arch), symbol, "CUBIN")


def compile_ptx(source: str, arch: Arch, *, symbol: str) -> str:
    """Compile one generated file to PTX text with line information, for the simulator. Raises like compile_cubin()."""
    options = (f"--gpu-architecture={arch.ptx_target}", *OPTIONS, "--generate-line-info")
    return _compile(source, arch, options, symbol, "PTX").rstrip(b"\0").decode()


@functools.cache
def toolchain() -> Toolchain | None:
    """The NVRTC of this environment, or None when there is none that can be used, which is logged.

    A process whose kernels are all cached needs no more than this name.
    """
    try:
        return find_toolchain()
    except ToolchainError as error:
        _log.warning("%s; only kernels that are in the cache can run", error)
        return None


@functools.cache
def find_toolchain() -> Toolchain | None:
    """The NVRTC of this environment, or None when there is none.

    That is the newest one whose major version is not above that of cuda-bindings, which follows the driver. Installed
    packages are recognised from their files, without loading the library.

    Raises:
        ToolchainError: there is one, but it is damaged, cannot be loaded, or is newer than cuda-bindings.
    """
    found = _packaged_libraries() or _system_library()
    if not found:
        return None
    bindings = _package_version("cuda-bindings") or "inf"
    usable = [major for major in found if major <= float(bindings.split(".")[0])]
    if not usable:
        newest = found[max(found)][1]
        raise ToolchainError(f"NVRTC {newest} is newer than cuda-bindings {bindings}: install jitfp4[cu12] or [cu13]")
    library, version = found[max(usable)]
    return Toolchain(version=version, build=_build(library, _builtins(library, version)), library=library)


def supports(arch: Arch) -> bool:
    """Whether this NVRTC compiles for ``arch``: an old one lacks new architectures. Raises ToolchainError."""
    return int(arch.name.removeprefix("sm_").rstrip("a")) in _library().archs


def _compile(source: str, arch: Arch, options: tuple[str, ...], symbol: str, kind: str) -> bytes:
    nvrtc = _library()
    if not supports(arch):
        needed = ".".join(map(str, arch.nvrtc))
        raise ToolchainError(f"NVRTC {nvrtc.toolchain.version} does not know {arch.name}; {needed} and later do")
    program, program_name = ctypes.c_void_p(), f"{symbol}.cu"
    nvrtc.call("CreateProgram", ctypes.byref(program), source.encode(), program_name.encode(), 0, None, None)
    try:
        encoded = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        status = nvrtc.status("CompileProgram", program, len(encoded), encoded)
        _let_ctrl_c_interrupt()
        if status:
            log = nvrtc.read(program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
            if status == _ERROR_COMPILATION:
                raise CompileError(program_name, arch.name, log, numbered_excerpt(source, log))
            raise ToolchainError(f"NVRTC failed on {program_name} for {arch.name}: {nvrtc.error(status)}\n{log}")
        return nvrtc.read(program, kind)
    finally:
        nvrtc.status("DestroyProgram", ctypes.byref(program))


def _let_ctrl_c_interrupt() -> None:
    """Undo what the first compilation of NVRTC does to SIGINT: then it no longer ends a wait of the main thread."""
    if callable(signal.getsignal(signal.SIGINT)):
        signal.siginterrupt(signal.SIGINT, True)


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


# ---- the library -----------------------------------------------------------------------------------------------------


@functools.cache
def _library() -> _Library:
    found = find_toolchain()
    if found is None:
        raise ToolchainError("NVRTC is not installed: install jitfp4[cu12] or jitfp4[cu13]")
    return _Library(found)


class _Library:
    """libnvrtc, loaded from the file that ``toolchain`` names. ``archs`` are the SM numbers that it compiles for."""

    def __init__(self, toolchain: Toolchain) -> None:
        """Raises ToolchainError when it cannot be loaded, or when not exactly this build would compile."""
        self.toolchain = toolchain
        library, builtins = toolchain.library, _builtins(toolchain.library, toolchain.version)
        if _build(library, builtins) != toolchain.build:
            raise ToolchainError(f"{library} was replaced while this process ran: start it again")
        try:
            # libnvrtc opens its builtins by name: what is loaded already comes first, then LD_LIBRARY_PATH
            ctypes.CDLL(str(builtins))
            self._dll = ctypes.CDLL(str(library))
            version = self._version()
            count = ctypes.c_int()
            self.call("GetNumSupportedArchs", ctypes.byref(count))
            archs = (ctypes.c_int * count.value)()
            self.call("GetSupportedArchs", archs)
        except (OSError, AttributeError) as error:
            raise ToolchainError(f"{library} cannot be loaded: {error}") from None
        self.archs = frozenset(archs)
        if version != _major_minor(toolchain.version):
            raise ToolchainError(f"{library} calls itself NVRTC {version}, its package {toolchain.version}")
        _check_mapped(builtins)

    def status(self, name: str, *args: Any) -> int:
        """The nvrtcResult of ``nvrtc<name>``; 0 is success."""
        return int(self._dll[f"nvrtc{name}"](*args))

    def call(self, name: str, *args: Any) -> None:
        """``nvrtc<name>``. Raises ToolchainError when it fails."""
        if status := self.status(name, *args):
            raise ToolchainError(f"nvrtc{name}: {self.error(status)}")

    def error(self, status: int) -> str:
        """NVRTC's name of an nvrtcResult."""
        text = self._dll.nvrtcGetErrorString
        text.restype = ctypes.c_char_p
        return bytes(text(status)).decode()

    def read(self, program: ctypes.c_void_p, what: str) -> bytes:
        """What ``nvrtcGet<what>`` gives: the log, the cubin, or the PTX of ``program``."""
        size = ctypes.c_size_t()
        self.call(f"Get{what}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self.call(f"Get{what}", program, buffer)
        return buffer.raw

    def _version(self) -> str:
        major, minor = ctypes.c_int(), ctypes.c_int()
        self.call("Version", ctypes.byref(major), ctypes.byref(minor))
        return f"{major.value}.{minor.value}"


def _check_mapped(builtins: Path) -> None:
    """No other file with the name of ``builtins`` was loaded before it: libnvrtc would use that one."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    mapped = {line.split(maxsplit=5)[5] for line in lines if f"/{builtins.name}" in line}
    for other in mapped - {str(builtins.resolve())}:
        if not Path(other).is_file() or not filecmp.cmp(builtins, other, shallow=False):
            raise ToolchainError(f"{other} was loaded before {builtins}: NVRTC would compile with it")


# ---- finding it ------------------------------------------------------------------------------------------------------


def _packaged_libraries() -> dict[int, tuple[Path, str]]:
    """Major version to libnvrtc and version of the installed NVRTC packages."""
    found = {}
    for name in _PACKAGES:
        try:
            package = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        for file in package.files or ():
            soname = re.fullmatch(r"libnvrtc\.so\.(\d+)", file.name)
            if soname and (path := Path(str(package.locate_file(file)))).is_file():
                found[int(soname[1])] = path, package.version
    return found


def _system_library() -> dict[int, tuple[Path, str]]:
    """The same for a libnvrtc that no package owns: a toolkit's, conda's, or what the loader finds. It is loaded."""
    try:
        from cuda.pathfinder import DynamicLibNotFoundError, load_nvidia_dynamic_lib
    except ImportError:
        return {}
    try:
        path = load_nvidia_dynamic_lib("nvrtc").abs_path
        major, minor = ctypes.c_int(), ctypes.c_int()
        ctypes.CDLL(path).nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    except DynamicLibNotFoundError:
        return {}
    except (OSError, RuntimeError) as error:
        raise ToolchainError(f"NVRTC cannot be loaded: {error}") from None
    return {major.value: (Path(path or ""), f"{major.value}.{minor.value}")}


def _package_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _major_minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _builtins(library: Path, version: str) -> Path:
    return library.parent / f"libnvrtc-builtins.so.{_major_minor(version)}"


def _build(library: Path, builtins: Path) -> str:
    """Toolchain.build of these two files. Raises ToolchainError when they cannot be what they should be."""
    try:
        digest = hashlib.sha256(_build_id(library))
        if not (data := builtins.read_bytes()).startswith(b"\x7fELF"):
            raise ValueError(f"{builtins} is not an ELF file")
    except (OSError, ValueError, struct.error) as error:
        raise ToolchainError(f"NVRTC is damaged or cannot be read: {library}: {error}") from None
    digest.update(hashlib.sha256(data).digest())
    return digest.hexdigest()


def _build_id(library: Path) -> bytes:
    """The GNU build id (System V gABI, note section; type 3, owner "GNU"), else the SHA-256 of the whole file.

    It is looked for in the sections, because the program header of NVRTC 12.8.93's note points elsewhere.
    """
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as elf:
        if elf[:4] != b"\x7fELF":
            raise ValueError("not an ELF file")
        (sections_at,) = struct.unpack_from("<Q", elf, 40)
        section_size, count = struct.unpack_from("<HH", elf, 58)
        for index in range(count):
            kind, note = struct.unpack_from("<4xI16xQ", elf, sections_at + index * section_size)
            if kind == _SHT_NOTE:
                desc_size, note_type, owner = struct.unpack_from("<4xII4s", elf, note)
                if note_type == _NT_GNU_BUILD_ID and owner == b"GNU\0":
                    return elf[note + 16 : note + 16 + desc_size]
        return hashlib.sha256(elf).digest()

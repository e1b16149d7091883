"""``jitfp4 doctor``: whether this machine can compile, cache and run kernels, and what the problems are."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import stat
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import typer

from jitfp4.arch import ARCHS, Arch
from jitfp4.cache import Cache, Catalog
from jitfp4.cache.layer import Layer
from jitfp4.cache.lock import try_lock
from jitfp4.cache.tree import check_trusted, open_folder
from jitfp4.cli.gpus import Driver, cuda_driver
from jitfp4.cli.options import AsJson, CacheDir, configure, examples
from jitfp4.cli.output import human_bytes, plural, put, put_facts, put_json, say
from jitfp4.config import Config
from jitfp4.errors import CacheError, CompileError, TacticsError, ToolchainError, UnsupportedArchError

EXAMPLES = examples(
    "jitfp4 doctor",
    "jitfp4 doctor --json --cache-dir /srv/kernels",
)

_PACKAGES = ("jitfp4", "torch", "cuda-bindings", "cuda-core", "jinja2")
_PROBE = 'extern "C" __global__ void probe() {}\n'
_LEAST_FREE_BYTES = 64 << 20


@dataclass(slots=True)
class Finding:
    """One topic: facts and problems."""

    topic: str
    facts: dict[str, object] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def doctor(cache_dir: CacheDir = None, as_json: AsJson = False) -> None:
    """Report on compiler, cache, GPU and driver of this machine. Leaves no file behind.

    Exit status: 0 no problem, 1 problems were found, 2 an error.
    """
    config = configure(cache_dir)
    findings = [
        _versions(),
        _compiler(config),
        _cache(config),
        *map(_layer, Cache(config).layers),
        _gpu(config),
        *([_tactics(config.tactics)] if config.tactics else []),
    ]
    problems = [problem for finding in findings for problem in finding.problems]
    if as_json:
        fields = [{"topic": f.topic, "problems": f.problems, **f.facts} for f in findings]
        put_json("doctor", ok=not problems, findings=fields)
    else:
        for finding in findings:
            put(finding.topic)
            put_facts((f"  {name}", _text(name, value)) for name, value in finding.facts.items())
            for problem in finding.problems:
                put(f"  PROBLEM: {problem}")
    say(f"{plural(len(problems), 'problem')} found")
    if problems:
        raise typer.Exit(1)


def _versions() -> Finding:
    finding = Finding("versions", {"python": platform.python_version()})
    for package in _PACKAGES:
        try:
            finding.facts[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            finding.facts[package] = None
            if package != "jitfp4":  # which may run from a checkout
                finding.problems.append(f"{package} is not installed")
    return finding


def _compiler(config: Config) -> Finding:
    """The compiler. With JITFP4_OFFLINE nothing is compiled, and no compiler is no problem."""
    from jitfp4 import nvrtc

    finding = Finding("compiler", {"offline": config.offline, "nvrtc": None})
    try:
        toolchain = nvrtc.find_toolchain()
        if toolchain is None:
            raise ToolchainError("NVRTC is not installed: install jitfp4[cu12] or jitfp4[cu13]")
        finding.facts |= {"nvrtc": toolchain.version, "build": toolchain.build, "toolchain": toolchain.name}
        finding.facts["library"] = str(toolchain.library)
        if not config.offline:
            _try_compiling(finding)
    except ToolchainError as error:
        if config.offline:
            finding.facts["unusable"] = str(error)
        else:
            finding.problems.append(f"{error}; only kernels that are in the cache can run")
    return finding


def _try_compiling(finding: Finding) -> None:
    from jitfp4 import nvrtc

    known = [arch for arch in ARCHS.values() if nvrtc.supports(arch)]
    refused = {}
    for arch in known:
        try:
            nvrtc.compile_cubin(_PROBE, arch, symbol="probe")
        except (CompileError, ToolchainError) as error:
            refused[arch.name] = str(error).splitlines()[0]
    finding.facts["archs"] = [arch.name for arch in known if arch.name not in refused]
    finding.facts["too_old_for"] = [arch.name for arch in ARCHS.values() if arch not in known]
    finding.problems += [f"NVRTC does not compile for {name}: {reason}" for name, reason in refused.items()]


def _cache(config: Config) -> Finding:
    root = config.cache_dir
    finding = Finding("cache", {"path": root and str(root), "mode": config.cache_mode, "strict": config.strict})
    if root is None:
        finding.problems.append("there is no cache folder: neither HOME nor JITFP4_CACHE_DIR is set")
        return finding
    exists = _exists(root, finding)
    if exists is None:
        return finding
    if exists:
        _inspect_root(Layer(path=root, own=True, pin=config.bundle_sha256), finding)
    place = root if exists else next(parent for parent in root.absolute().parents if parent.exists())
    _inspect_file_system(place, finding)
    if config.cache_mode == "rw":
        _try_writing(place, finding)
    return finding


def _layer(layer: Layer) -> Finding:
    finding = Finding("read-only layer", {"path": str(layer.path)})
    exists = _exists(layer.path, finding)
    if exists:
        _inspect_root(layer, finding)
    elif exists is not None:
        finding.problems.append(f"{layer.path}: does not exist")
    return finding


def _exists(root: Path, finding: Finding) -> bool | None:
    """Whether ``root`` exists; None, and a problem, when a folder above it cannot be searched."""
    exists: bool | None = None
    try:
        root.lstat()
        exists = True
    except FileNotFoundError:
        exists = False
    except OSError as error:
        finding.problems.append(f"{root}: {error.strerror}")
    finding.facts["exists"] = exists
    return exists


def _gpu(config: Config) -> Finding:
    driver = cuda_driver()
    finding = Finding("gpu", {"driver_cuda": driver and driver.cuda, "devices": []})
    devices = []
    for gpu in driver.gpus if driver else ():
        try:
            arch = Arch.of_capability(*gpu.capability).name
        except UnsupportedArchError as error:
            arch = None
            finding.problems.append(f"{gpu.name}: {error}")
        devices.append({"name": gpu.name, "arch": arch})
    finding.facts["devices"] = devices
    if driver and not config.offline:
        finding.problems += _unfit_compiler(driver, {str(device["arch"]) for device in devices})
    return finding


def _tactics(path: Path) -> Finding:
    """Whether the file that JITFP4_TACTICS names would be used here."""
    from jitfp4.tactics import read

    finding, driver = Finding("tactics", {"path": str(path)}), cuda_driver()
    try:
        file = read(path)
        finding.facts |= {"gpu": file.gpu, "toolchain": file.toolchain, "choices": len(file.choices)}
        file.check(gpu.name for gpu in (driver.gpus if driver else ()))
    except (OSError, TacticsError) as error:
        finding.problems.append(f"{error}; the committed tables select tactics")
    return finding


def _unfit_compiler(driver: Driver, archs: set[str]) -> Iterator[str]:
    """Why kernels of this NVRTC may not run here: the driver is too old for it, or it is too old for a GPU."""
    from jitfp4 import nvrtc

    with suppress(ToolchainError):  # reported under the compiler
        toolchain = nvrtc.find_toolchain()
        if toolchain is None:
            return
        if _numbers(toolchain.version)[:2] > _numbers(driver.cuda):
            yield (
                f"NVRTC {toolchain.version} is newer than the driver, which is for CUDA {driver.cuda} and may refuse "
                "its kernels: update the driver or install an older NVRTC"
            )
        for name in sorted(archs & ARCHS.keys()):
            if not nvrtc.supports(ARCHS[name]):
                yield f"NVRTC {toolchain.version} is too old for the GPU's {name}"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdecimal())


def _inspect_root(layer: Layer, finding: Finding) -> None:
    """Whether a load would trust this root: by its owner and mode, or by the pinned bundle."""
    try:
        with open_folder(layer.path) as folder:
            status = os.fstat(folder)
            finding.facts |= {"owner": status.st_uid, "permissions": f"{stat.S_IMODE(status.st_mode):04o}"}
            if layer.own or not layer.is_pinned():
                check_trusted(status, str(layer.path))
        catalog = Catalog(layer.path, pin=layer.pin, own=layer.own)
        size = catalog.size()
        finding.facts |= {"entries": size.entries, "disk_bytes": size.disk_bytes, "quarantined": size.quarantined}
        finding.facts["pinned"] = layer.pin
        finding.problems += [f"{item.path}: {item.reason}" for item in catalog.findings]
        if size.entries or not layer.own:
            layer.check_pin()
    except (CacheError, OSError) as error:
        finding.problems.append(str(error))


def _inspect_file_system(place: Path, finding: Finding) -> None:
    system = os.statvfs(place)
    free_bytes = system.f_bavail * system.f_frsize
    finding.facts |= {"file_system": _file_system(place), "free_bytes": free_bytes}
    if free_bytes < _LEAST_FREE_BYTES:
        finding.problems.append(f"{place}: {human_bytes(free_bytes)} free")
    if system.f_files:  # some file systems, such as btrfs, do not count inodes
        finding.facts["free_inodes"] = system.f_favail
        if not system.f_favail:
            finding.problems.append(f"{place}: no inode is free")


def _try_writing(place: Path, finding: Finding) -> None:
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            finding.facts["writable"] = True
            finding.facts["locks"] = try_lock(file.fileno())
    except OSError as error:
        cause = "locks do not work" if finding.facts.get("writable") else "cannot be written"
        finding.problems.append(f"{place}: {cause}: {error.strerror}")


def _file_system(place: Path) -> str:
    """The type of the file system that holds ``place``, from proc(5) mountinfo: the longest mount point above it."""
    real = place.resolve()
    mounts = (line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines())
    found = {Path(fields[4]): fields[fields.index("-") + 1] for fields in mounts if real.is_relative_to(fields[4])}
    return found[max(found, key=lambda mount: len(mount.parts))]


def _text(name: str, value: object) -> object:
    match value:
        case list(items):
            return " ".join(_flat(items)) or "none"
        case int() if name.endswith("_bytes"):
            return human_bytes(value)
        case bool():
            return "yes" if value else "no"
        case None:
            return "none"
    return value


def _flat(items: list[object]) -> Iterator[str]:
    for item in items:
        yield ", ".join(str(value) for value in item.values()) if isinstance(item, dict) else str(item)

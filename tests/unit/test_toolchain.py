"""Which NVRTC is named and which one compiles: two lines installed side by side, old ones, damaged ones, strangers."""

from __future__ import annotations

import logging
import os
import re
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import jitfp4
import jitfp4.families  # registers every family
from jitfp4 import OfflineError, engine, nvrtc, warmup
from jitfp4.arch import ARCHS, Arch
from jitfp4.cache.entry import check_elf
from jitfp4.cli import app
from jitfp4.errors import ToolchainError
from jitfp4.kernel import AnyKernel, kernels, lookup
from tests.support.ledger import builds, sample
from tests.support.sass import disassemble

pytestmark = pytest.mark.compile

ROOT = Path(__file__).parents[2]
KERNEL = 'extern "C" __global__ void kernel(int* p) { *p = 1; }'
COMPILE = f"""
from jitfp4 import nvrtc
from jitfp4.arch import ARCHS
print(nvrtc.toolchain().version, nvrtc.compile_ptx({KERNEL!r}, ARCHS["sm_90a"], symbol="kernel"))
"""

Install = Callable[[str, str, Mapping[str, bytes | Path]], None]


def real() -> nvrtc.Toolchain:
    """The NVRTC that these tests run with; tests that need its files skip where no package holds them."""
    toolchain = nvrtc.toolchain()
    assert toolchain is not None
    if not nvrtc._packaged_libraries():
        pytest.skip("NVRTC comes from outside the environment's packages here")
    return toolchain


def builtins_of(toolchain: nvrtc.Toolchain) -> Path:
    return nvrtc._builtins(toolchain.library, toolchain.version)


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))} | environment
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)


@pytest.fixture
def forget() -> Iterator[None]:
    """The process looks for NVRTC again, in the test and after it."""
    memos = nvrtc.toolchain, nvrtc.find_toolchain, nvrtc._library
    for memo in memos:
        memo.cache_clear()
    yield
    for memo in memos:
        memo.cache_clear()


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forget: None) -> Install:
    """Puts made-up packages before the installed ones. To begin with, no NVRTC is seen, and cuda-bindings 99."""
    site = tmp_path / "site"

    def put(name: str, version: str, files: Mapping[str, bytes | Path]) -> None:
        info = site / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "RECORD").write_text("".join(f"{path},,\n" for path in files))
        for path, content in files.items():
            (site / path).parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, Path):
                (site / path).symlink_to(content)
            else:
                (site / path).write_bytes(content)

    hidden = tmp_path / "hidden"
    for name, version in {**dict.fromkeys(nvrtc._PACKAGES, "0"), "cuda-bindings": "99"}.items():
        info = hidden / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "RECORD").write_text("")
    monkeypatch.syspath_prepend(str(hidden))
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))
    return put


def elf(note: bytes = b"") -> bytes:
    """A 64-bit ELF file with one section, ``note``, and a program header that points nowhere, as NVRTC 12.8.93 has."""
    program_header = struct.pack("<IIQQQQQQ", 4, 4, 1 << 40, 0, 0, 36, 36, 4)
    start = 64 + len(program_header)
    header = b"\x7fELF\x02\x01\x01" + bytes(9) + struct.pack("<HHIQQQ", 3, 62, 1, 0, 64, start + len(note))
    header += struct.pack("<IHHHHHH", 0, 64, 56, 1, 64, 1 if note else 0, 0)
    section = struct.pack("<IIQQQQIIQQ", 0, 7, 2, 0, start, len(note), 0, 0, 4, 0) if note else b""
    return header + program_header + note + section


def build_id(number: int) -> bytes:
    return struct.pack("<III4s", 4, 20, 3, b"GNU\0") + bytes([number]) * 20


def line(
    major: int, minor: int, library: bytes | Path | None = None, builtins: bytes | Path | None = None
) -> dict[str, bytes | Path]:
    """The files of an NVRTC package; made up where none is given."""
    folder = "nvidia/cuda_nvrtc/lib" if major == 12 else f"nvidia/cu{major}/lib"
    return {
        f"{folder}/libnvrtc.so.{major}": elf(build_id(major)) if library is None else library,
        f"{folder}/libnvrtc-builtins.so.{major}.{minor}": elf() if builtins is None else builtins,
    }


# ---- which one is named ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bindings", "installed", "chosen"),
    [
        ("12.9.10", (12, 13), "12.8.93"),
        ("13.4.4", (12, 13), "13.0.88"),
        ("13.4.4", (12,), "12.8.93"),
        ("14.0.0", (12, 13), "13.0.88"),
    ],
)
def test_the_newest_that_is_not_newer_than_the_bindings(
    bindings: str, installed: tuple[int, ...], chosen: str, install: Install
) -> None:
    install("cuda-bindings", bindings, {})
    if 12 in installed:
        install("nvidia-cuda-nvrtc-cu12", "12.8.93", line(12, 8))
    if 13 in installed:
        install("nvidia-cuda-nvrtc", "13.0.88", line(13, 0))
    toolchain = nvrtc.toolchain()
    assert toolchain is not None and toolchain.version == chosen
    assert toolchain.library.name == f"libnvrtc.so.{chosen[:2]}"


def test_one_that_is_newer_than_the_bindings_is_not_used(install: Install, caplog: pytest.LogCaptureFixture) -> None:
    install("cuda-bindings", "12.9.10", {})
    install("nvidia-cuda-nvrtc", "13.0.88", line(13, 0))
    with pytest.raises(ToolchainError, match=r"NVRTC 13\.0\.88 is newer than cuda-bindings 12\.9\.10: install"):
        nvrtc.find_toolchain()
    with caplog.at_level(logging.WARNING, "jitfp4.nvrtc"):
        assert nvrtc.toolchain() is None
    assert "newer than cuda-bindings" in caplog.text


def test_builds_are_told_apart_by_build_id_by_builtins_or_by_the_whole_file(tmp_path: Path) -> None:
    library, builtins = tmp_path / "libnvrtc.so.12", tmp_path / "libnvrtc-builtins.so.12.8"
    variants = [
        (elf(build_id(1)), elf()),
        (elf(build_id(2)), elf()),
        (elf(build_id(2)), elf() + b"more"),
        (elf(), elf()),
        (elf() + b"more", elf()),
        (elf(b"\0" * 36), elf()),
    ]
    builds = []
    for contents in variants:
        library.write_bytes(contents[0])
        builtins.write_bytes(contents[1])
        builds.append(nvrtc._build(library, builtins))
    assert len(set(builds)) == len(variants)
    library.write_bytes(elf(build_id(1)) + b"after the sections")  # what a build id stands for is not read
    builtins.write_bytes(elf())
    assert nvrtc._build(library, builtins) == builds[0]


# ---- which one compiles ----------------------------------------------------------------------------------------------


def test_the_library_that_is_named_compiles() -> None:
    """Also where both lines are installed: PTX begins with the release that made it."""
    done = run(COMPILE)
    assert done.returncode == 0, done.stderr
    named, ptx = done.stdout.split(maxsplit=1)
    assert re.search(r"release [\d.]+, V([\d.]+)", ptx)[1].startswith(named)


def test_libraries_that_were_loaded_before_change_nothing() -> None:
    """Those of every installed package, each with its builtins, in the global scope of the process."""
    load = "".join(
        f"ctypes.CDLL({str(file)!r}, ctypes.RTLD_GLOBAL)\n"
        for library, version in nvrtc._packaged_libraries().values()
        for file in (nvrtc._builtins(library, version), library)
    )
    plain, after = run(COMPILE), run(f"import ctypes\n{load}{COMPILE}")
    assert after.returncode == 0, after.stderr
    assert after.stdout == plain.stdout


def test_the_search_path_of_the_loader_changes_nothing(tmp_path: Path) -> None:
    toolchain = real()
    for file in (toolchain.library, builtins_of(toolchain)):
        (tmp_path / file.name).write_text("something else")
    done = run(COMPILE, LD_LIBRARY_PATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout == run(COMPILE).stdout


@pytest.mark.parametrize("same", [True, False], ids=["same bytes", "other bytes"])
def test_builtins_of_the_same_name_that_were_loaded_before(tmp_path: Path, same: bool) -> None:
    mine = builtins_of(real())
    other = tmp_path / mine.name
    other.write_bytes(mine.read_bytes() + (b"" if same else b"other"))
    done = run(f"import ctypes\nctypes.CDLL({str(other)!r})\n{COMPILE}")
    if same:
        assert done.returncode == 0, done.stderr
    else:
        assert f"ToolchainError: {other} was loaded before {mine}" in done.stderr


def test_a_package_that_names_another_version_than_its_library(install: Install) -> None:
    toolchain = real_before_install()
    major, minor = map(int, toolchain.version.split(".")[:2])
    files = line(major, minor + 1, toolchain.library, builtins_of(toolchain))
    install("nvidia-cuda-nvrtc", f"{major}.{minor + 1}.7", files)
    with pytest.raises(ToolchainError, match=rf"calls itself NVRTC {major}\.{minor}, its package {major}\.{minor + 1}"):
        nvrtc.compile_cubin(KERNEL, ARCHS["sm_90a"], symbol="kernel")


def test_a_package_that_is_replaced_while_the_process_runs(install: Install, tmp_path: Path) -> None:
    toolchain = real_before_install()
    major, minor = map(int, toolchain.version.split(".")[:2])
    install("nvidia-cuda-nvrtc", toolchain.version, line(major, minor, toolchain.library, builtins_of(toolchain)))
    named = nvrtc.toolchain()
    assert named is not None and named.name == toolchain.name
    builtins = builtins_of(named)
    changed = builtins.read_bytes() + b"an update"
    builtins.unlink()
    builtins.write_bytes(changed)
    with pytest.raises(ToolchainError, match="was replaced while this process ran"):
        nvrtc.compile_cubin(KERNEL, ARCHS["sm_90a"], symbol="kernel")


def real_before_install() -> nvrtc.Toolchain:
    """The environment's own NVRTC, asked of another process: here it is hidden."""
    done = run("from jitfp4 import nvrtc; t = nvrtc.toolchain(); print(t.version, t.build, t.library)")
    assert done.returncode == 0, done.stderr
    version, build, library = done.stdout.split()
    return nvrtc.Toolchain(version=version, build=build, library=Path(library))


# ---- damage ----------------------------------------------------------------------------------------------------------

DAMAGE = {"empty": b"", "text": b"not a library\n" * 9, "cut off": elf(build_id(1))[:-60], "header only": elf()[:20]}


@pytest.mark.parametrize(
    ("which", "damage"), [*(("library", damage) for damage in DAMAGE), ("builtins", "empty"), ("builtins", "text")]
)
def test_a_damaged_library_is_no_toolchain(
    which: str, damage: str, install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    files = line(13, 0)
    files[next(path for path in files if ("builtins" in path) == (which == "builtins"))] = DAMAGE[damage]
    install("nvidia-cuda-nvrtc", "13.0.88", files)
    with pytest.raises(ToolchainError, match="NVRTC is damaged or cannot be read"):
        nvrtc.find_toolchain()
    with caplog.at_level(logging.WARNING, "jitfp4.nvrtc"):
        assert nvrtc.toolchain() is None
    assert "only kernels that are in the cache can run" in caplog.text


@pytest.mark.parametrize("offline", ["0", "1"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_library_does_not_matter_to_cached_kernels(
    damage: str, offline: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    kernel, arch = lookup("quantize/vector"), ARCHS["sm_90a"]
    one, other = list(kernel.specs(arch))[:2]
    monkeypatch.setenv("JITFP4_CACHE_DIR", str(tmp_path / "cache"))
    engine.reset()
    built = engine.build(kernel, one, arch)
    request.getfixturevalue("install")("nvidia-cuda-nvrtc", "13.0.88", line(13, 0, DAMAGE[damage]))
    monkeypatch.setenv("JITFP4_OFFLINE", offline)
    engine.reset()
    assert engine.build(kernel, one, arch).cubin == built.cubin
    with pytest.raises(OfflineError, match="jitfp4 warmup --arch sm_90a"):
        engine.build(kernel, other, arch)


def test_warm_up_says_what_is_wrong_with_a_damaged_library(
    install: Install, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    install("nvidia-cuda-nvrtc", "13.0.88", line(13, 0, b""))
    plan = tmp_path / "plan.json"
    plan.write_text(warmup.write_plan(warmup.plan([ARCHS["sm_90a"]], ["quantize/vector"])[:1]))
    result = CliRunner().invoke(app, ["warmup", str(plan), "--cache-dir", str(tmp_path / "cache")])
    assert result.exit_code == 2, result.output
    assert "is not in the cache" in result.stderr
    assert "NVRTC is damaged or cannot be read" in caplog.text


def test_a_library_that_does_not_load_is_an_error_of_the_toolchain(install: Install) -> None:
    install("nvidia-cuda-nvrtc", "13.0.88", line(13, 0))
    assert nvrtc.toolchain() is not None
    with pytest.raises(ToolchainError, match="cannot be loaded"):
        nvrtc.compile_cubin(KERNEL, ARCHS["sm_90a"], symbol="kernel")


# ---- what it compiles ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ARCHS.values(), ids=lambda arch: arch.name)
def test_an_architecture_that_an_old_nvrtc_lacks_is_named_with_the_version_that_has_it(arch: Arch) -> None:
    toolchain = nvrtc.toolchain()
    assert toolchain is not None
    version = tuple(map(int, toolchain.version.split(".")[:2]))
    assert nvrtc.supports(arch) == (version >= arch.nvrtc)
    if not nvrtc.supports(arch):
        with pytest.raises(ToolchainError, match=rf"NVRTC {toolchain.version} does not know {arch.name}; 12\.9"):
            nvrtc.compile_cubin(KERNEL, arch, symbol="kernel")


_LAUNCH_NAMES = "CUlaunchConfig", "CUlaunchAttribute", "CUlaunchAttributeID"


def test_the_driver_finds_what_it_uses_in_the_bindings_of_this_line() -> None:
    names = "cuKernelSetAttribute", "CUkernel", "CUdevice", "CUfunction_attribute", "CUresult", *_LAUNCH_NAMES
    done = run(f"from jitfp4 import driver; print(*(hasattr(driver.cuda, name) for name in {names}))")
    assert done.stdout.split() == ["True"] * len(names), done.stderr


@pytest.mark.other_nvrtc
@pytest.mark.parametrize("kernel", kernels(), ids=lambda kernel: kernel.name)
def test_kernels_compile(kernel: AnyKernel, whole: bool) -> None:
    """What CI asks of another NVRTC than the ledger's: a build of its sample, or one for each architecture."""
    firsts = {build.arch: build for build in reversed(list(builds(kernel)))}
    for build in firsts.values() if whole else sample(kernel, 0):
        if nvrtc.supports(build.arch):
            cubin = nvrtc.compile_cubin(build.source, build.arch, symbol=kernel.symbol)
            check_elf(cubin, build.arch.name, kernel.symbol)
            assert any(text.startswith("EXIT") for text in disassemble(cubin))


@pytest.mark.sim
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_what_it_makes_of_a_kernel_gives_the_bytes_of_the_reference(arch: str) -> None:
    a, scale = torch.randn(8, 64, generator=torch.Generator().manual_seed(0)).bfloat16(), torch.tensor([100.0])
    expected = jitfp4.nvfp4_quantize(a, scale)
    with jitfp4.sim.device(arch):
        simulated = jitfp4.nvfp4_quantize(a, scale)
    assert all(torch.equal(one, other) for one, other in zip(simulated, expected, strict=True))

"""The ledger: what the compiler made of every specialisation, committed so that a review sees what a change costs.

``tests/ledger/<kernel>.csv`` has a line for each specialisation and architecture: the digest of its source without
comments, registers, bytes of local and of static shared memory, instructions in all, and how many of each kind in
KINDS. The tests fail on a source that the ledger does not know, and compile a sample, or everything with ``--all``.
After a review of the differences::

    python -m tests.support.ledger [--jobs N] [--all] [PATTERN]

compiles what has changed (``--all``: everything) and rewrites the files.
"""

from __future__ import annotations

import argparse
import csv
import io
import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import jitfp4.families  # noqa: F401 - registers every kernel
from jitfp4 import nvrtc
from jitfp4.arch import ARCHS, Arch
from jitfp4.cache.entry import check_elf
from jitfp4.golden import digest
from jitfp4.kernel import AnyKernel, kernels
from jitfp4.spec import KernelSpec
from tests.support.sass import disassemble, tool

FOLDER = Path(__file__).parents[1] / "ledger"
NVRTC = "13.0.88"
"""The compiler that the committed numbers are of; others differ by a few registers."""

KINDS = ("LDG", "STG", "LDS", "STS", "LDL", "STL", "SHFL", "MUFU", "HMMA", "HGMMA", "UTC", "UTMA", "UBLK")
"""Beginnings of opcodes: memory, exchange, special functions, tensor cores of each generation, the copy engine."""

_COMMENT = re.compile(r'("(?:\\.|[^"\\\n])*")|//[^\n]*')  # or a string, which may look like one
_COMPILING = 1000  # an empty kernel takes as long to compile and read as so many instructions more


class Build(NamedTuple):
    """A specialisation of a kernel for an architecture."""

    kernel: AnyKernel
    arch: Arch
    spec: KernelSpec

    @property
    def name(self) -> str:
        return f"{self.arch.name} {self.spec}"

    @property
    def source(self) -> str:
        return self.kernel.render(self.spec, self.arch)

    @property
    def digest(self) -> str:
        return digest(code_of(self.source))


def code_of(source: str) -> str:
    """What the compiler reads of a source: no comments, no indentation, no empty lines."""
    bare = _COMMENT.sub(lambda match: match.group(1) or "", source)
    return "\n".join(line for text in bare.splitlines() if (line := text.strip()))


def builds(kernel: AnyKernel) -> Iterator[Build]:
    """Every specialisation that warm-up builds."""
    for arch in ARCHS.values():
        for spec in kernel.specs(arch):
            yield Build(kernel, arch, spec)


def sample(kernel: AnyKernel, instructions: int) -> list[Build]:
    """One build, and more while their instructions together stay within a bound; the digests in the ledger choose.

    So each change of a template draws anew, and the cost of a sample does not grow with a kernel's specialisations.
    """
    chosen, total = set[str](), 0
    for row in sorted(read(kernel).values(), key=lambda row: (row["source"], row["build"])):
        total += int(row["instructions"]) + _COMPILING
        if chosen and total > instructions:
            break
        chosen.add(row["build"])
    return [build for build in builds(kernel) if build.name in chosen]


def measure(build: Build) -> dict[str, str]:
    """Compile, and read the machine code: a line of the ledger."""
    cubin = nvrtc.compile_cubin(build.source, build.arch, symbol=build.kernel.symbol)
    check_elf(cubin, build.arch.name, build.kernel.symbol)
    opcodes = Counter(line.split()[0] for line in disassemble(cubin))
    usage = _resources(cubin)
    counts = {kind: sum(n for opcode, n in opcodes.items() if opcode.startswith(kind)) for kind in KINDS}
    numbers = {"registers": usage["REG"], "local": usage["LOCAL"], "shared": usage["SHARED"]}
    numbers |= {"instructions": opcodes.total()} | counts
    return {"build": build.name, "source": build.digest} | {name: str(number) for name, number in numbers.items()}


def _resources(cubin: bytes) -> dict[str, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [tool("cuobjdump"), "--dump-resource-usage", file.name]
        listing = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {name: int(number) for name, number in re.findall(r"(\w+):(\d+)", listing.split("Function", 1)[1])}


def read(kernel: AnyKernel) -> dict[str, dict[str, str]]:
    """The committed lines of a kernel, by build."""
    path = FOLDER / f"{kernel.name}.csv"
    return {row["build"]: row for row in csv.DictReader(io.StringIO(path.read_text()))} if path.exists() else {}


def write(kernel: AnyKernel, rows: Iterable[dict[str, str]]) -> None:
    lines = sorted(rows, key=lambda row: row["build"])
    path = FOLDER / f"{kernel.name}.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(lines[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pattern", nargs="?", help="a kernel, or a family of them")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--all", action="store_true", help="compile what has not changed, too")
    options = parser.parse_args()
    toolchain = nvrtc.toolchain()
    if toolchain is None or toolchain.version != NVRTC:
        parser.error(f"the ledger is of NVRTC {NVRTC}, not of {toolchain and toolchain.version}")
    with ThreadPoolExecutor(options.jobs) as pool:
        for kernel in kernels(options.pattern):
            known, wanted = read(kernel), list(builds(kernel))
            stale = [b for b in wanted if options.all or known.get(b.name, {}).get("source") != b.digest]
            fresh = {row["build"]: row for row in pool.map(measure, stale)}
            changed = sum(fresh[name] != known.get(name) for name in fresh)
            write(kernel, [fresh.get(b.name) or known[b.name] for b in wanted])
            print(f"{kernel.name}: {len(wanted)} builds, {len(stale)} compiled, {changed} changed")  # noqa: T201


if __name__ == "__main__":
    main()

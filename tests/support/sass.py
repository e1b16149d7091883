"""Machine code as text."""

from __future__ import annotations

import functools
import importlib.metadata
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?(.*?) ?;")


def disassemble(cubin: bytes) -> list[str]:
    """The instructions of a cubin, predicates dropped, in address order."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [tool("nvdisasm"), "-c", "--no-dataflow", file.name]  # opcodes are the same, a quarter sooner
        listing = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return [match.group(1) for line in listing.splitlines() if (match := _INSTRUCTION.search(line))]


@functools.cache
def tool(name: str) -> str:
    """nvdisasm or cuobjdump: the package's, else the one on the path."""
    try:
        files = importlib.metadata.files(f"nvidia-cuda-{name}") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    packaged = [Path(str(file.locate())) for file in files if file.name == name]
    found = str(packaged[0]) if packaged else shutil.which(name)
    assert found, f"install nvidia-cuda-{name}"
    return found

"""Machine code as text."""

from __future__ import annotations

import re
import subprocess
import tempfile

from cuda.pathfinder import find_nvidia_binary_utility

_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?(.*?) ?;")


def disassemble(cubin: bytes) -> list[str]:
    """The instructions of a cubin, predicates dropped, in address order."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [tool("nvdisasm"), "-c", "--no-dataflow", file.name]  # opcodes are the same, a quarter sooner
        listing = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return [match.group(1) for line in listing.splitlines() if (match := _INSTRUCTION.search(line))]


def tool(name: str) -> str:
    """nvdisasm or cuobjdump."""
    found = find_nvidia_binary_utility(name)
    assert found, f"install nvidia-cuda-{name}"
    return found

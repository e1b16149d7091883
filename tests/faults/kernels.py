"""Made-up kernels for cache tests: real ELF headers, so that no compiler is needed."""

from __future__ import annotations

import random
import struct

from jitfp4.cache import Built
from jitfp4.keys import Recipe

TOOLCHAIN = "nvrtc-12.9.86-0123456789ab"
SYMBOL = "toy_kernel"


def make_cubin(arch: str = "sm_90a", *, seed: int = 0, size: int = 3000, symbol: str = SYMBOL) -> bytes:
    """``size`` bytes with NVRTC 12.9's ELF header for ``arch``, a ``.text.<symbol>`` name and a random payload."""
    sm, specific = int(arch[3:].rstrip("a")), arch.endswith("a")
    if sm < 100:
        version, flags = 7, 0x500500 | sm | (0x800 if specific else 0)
    else:
        version, flags = 8, 0x6000002 | sm << 8 | (0x8 if specific else 0)
    head = b"\x7fELF\x02\x01\x01\x33" + bytes([version]) + bytes(7) + struct.pack("<HHI", 2, 190, 129) + bytes(24)
    head += struct.pack("<I", flags) + bytes(12) + b".text." + symbol.encode() + b"\0"
    return head + random.Random(f"{arch} {seed}").randbytes(size - len(head))


def make_recipe(seed: int = 0, arch: str = "sm_90a") -> Recipe:
    """A recipe that differs from every other seed's, with 2 KB of source."""
    source = f'extern "C" __global__ void {SYMBOL}() {{}}  // {seed}\n' + "// padding\n" * 180
    return Recipe(family="toy", arch=arch, options=(f"--gpu-architecture={arch}", "--std=c++17"), source=source)


def make_built(seed: int = 0, arch: str = "sm_90a", *, size: int = 3000) -> Built:
    """What a build of make_recipe(seed, arch) returns: the same bytes each time."""
    cubin = make_cubin(arch, seed=seed, size=size)
    return Built(cubin=cubin, symbol=SYMBOL, provenance={"jitfp4": "test", "spec": {"seed": seed}})

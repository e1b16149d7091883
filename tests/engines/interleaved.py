"""What FlashInfer's own kernel makes of codes of MXFP4 experts on Hopper, as a digest:

python -m tests.engines.interleaved DIR/flashinfer_python-VERSION-*.whl

takes the kernel from the wheel, compiles it, runs it in the simulator, and prints DIGEST.
"""

from __future__ import annotations

import argparse
import hashlib
import zipfile
from pathlib import Path

import torch

from jitfp4 import nvrtc
from jitfp4.arch import Arch
from jitfp4.sim.api import run
from jitfp4.spec import Geometry

ROWS, COLS = 32, 128
DIGEST = "f8c60b73018bf810c0f632b6eb7e4a805bd7c2bf6dcda9e8d9fdd09901b29ae4"
"""Of what FlashInfer 0.7.2.post1 makes of codes()."""

_FILE, _NAME = "moe_gemm_mixed_utils.cu", "interleave_fp4_weights_for_sm90_mixed_gemm_kernel"


def codes() -> torch.Tensor:
    """uint8 [ROWS, COLS / 2]: all values, in no order."""
    numbers = torch.arange(ROWS * COLS // 2)
    return (numbers * 2654435761 >> 13 & 0xFF).to(torch.uint8).view(ROWS, COLS // 2)


def digest(ordered: torch.Tensor) -> str:
    return hashlib.sha256(ordered.numpy().tobytes()).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    with zipfile.ZipFile(parser.parse_args().wheel) as archive:
        text = next(archive.read(name).decode() for name in archive.namelist() if name.endswith(_FILE))
    first = text.index(f"__global__ void {_NAME}")
    kernel = text[first : text.index("__global__", first + 1)]
    source = f'typedef unsigned char uint8_t;\ntypedef unsigned int uint32_t;\nextern "C" {kernel}'
    ordered = torch.zeros_like(codes())
    ptx = nvrtc.compile_ptx(source, Arch.of("sm_90a"), symbol=_NAME)
    run(ptx, (codes(), ordered, ROWS, COLS), Geometry((4, 1, 1), (16, 32, 1)), "sm_90a", entry=_NAME)
    print(digest(ordered))  # noqa: T201


if __name__ == "__main__":
    main()

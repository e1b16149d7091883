"""Machine code: the ledger is of today's sources, nothing lives in local memory, and samples agree with it."""

from __future__ import annotations

import pytest

from jitfp4 import nvrtc
from jitfp4.arch import ARCHS, Arch
from jitfp4.kernel import AnyKernel, kernels
from tests.support.ledger import NVRTC, builds, measure, read

# NVRTC keeps a register or two of these in local memory, loaded and stored once for each thread.
_SPILLED = {
    f"{arch} block_format=nvfp4,in_dtype=f16,sf_layout=layout_linear,silu=true,blocks_per_thread=2": 2
    for arch in ("sm_120a", "sm_121a")
}
_SAMPLE = 24  # one build in so many is compiled


@pytest.mark.parametrize("kernel", kernels(), ids=lambda k: k.name)
def test_the_ledger_has_every_build_of_todays_sources(kernel: AnyKernel) -> None:
    known, wanted = read(kernel), {build.name: build.digest for build in builds(kernel)}
    stale = sorted(name for name in wanted if known.get(name, {}).get("source") != wanted[name])
    gone = sorted(known.keys() - wanted.keys())
    assert not stale and not gone, f"python -m tests.support.ledger {kernel.name}; stale: {stale[:3]}, gone: {gone[:3]}"


@pytest.mark.parametrize("kernel", kernels(), ids=lambda k: k.name)
def test_nothing_lives_in_local_memory(kernel: AnyKernel) -> None:
    for name, row in read(kernel).items():
        assert int(row["LDL"]) + int(row["STL"]) <= _SPILLED.get(name, 0), name
        assert int(row["instructions"]) > 0 and int(row["registers"]) > 0


@pytest.mark.compile
@pytest.mark.parametrize("arch", ARCHS.values(), ids=lambda a: a.name)
@pytest.mark.parametrize("kernel", kernels(), ids=lambda k: k.name)
def test_a_sample_compiles_to_what_the_ledger_says(kernel: AnyKernel, arch: Arch) -> None:
    """Chosen by digest, so that each change of a source draws anew; with another NVRTC, local memory only."""
    toolchain = nvrtc.toolchain()
    assert toolchain is not None
    if not nvrtc.supports(arch):
        pytest.skip("this NVRTC is too old for the architecture")
    known = read(kernel)
    for build in builds(kernel):
        if build.arch is arch and int(build.digest, 16) % _SAMPLE == 0:
            row = measure(build)
            if toolchain.version == NVRTC:
                assert row == known[build.name]
            assert int(row["LDL"]) + int(row["STL"]) <= _SPILLED.get(build.name, 0), build.name

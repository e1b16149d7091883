"""Machine code: the ledger is of today's sources, local memory is where it is known, and samples agree with it."""

from __future__ import annotations

import pytest

from jitfp4 import nvrtc
from jitfp4.kernel import AnyKernel, kernels, lookup
from tests.support.ledger import NVRTC, builds, code_of, measure, read, sample

# Loads and stores of local memory in a build at most, by parts of its kernel and name; the first that fits counts.
_SPILLED = {
    # Under a mask: what is beside its bits, for a tile that some of 16 query rows does not see in full.
    ("attention/decode_masked", "rows=16"): 12,
    ("attention/prefill_masked sm_80", "soft_cap=true", "warp_rows=32"): 19,
    # Sums of 256 dimensions beside scores: up to four registers.
    ("attention/prefill sm_10", "cache=nvfp4", "head_dim=256,interleaved=false", "tile=32"): 7,
    # Decode attention: 16 query rows of 256 elements do not fit in registers, which is right but slow.
    ("cache=", "head_dim=256,rows=16"): 1400,
    # Rows of 192 elements, which take the registers of 256.
    ("attention/decode ", "cache=bf16", "head_dim=192,rows=8"): 25,
    # Scales that no asynchronous copy takes are held for a tile.
    ("attention/decode sm_90a cache=nvfp4", "head_dim=80,rows=8", "warps=12"): 8,
    # A part of the next segment's queries, once for a segment.
    ("cache=nvfp4", "rows=8", "pages=whole,packed=false", "warps=12", "head_warps=4"): 8,
    ("sm_89", "cache=nvfp4", "head_dim=256,rows=8", "pages=whole,packed=true"): 5,
    # Prefill on wgmma: registers of a producer, which finds the items too; stored and loaded once for a tile.
    ("cache=nvfp4", "two_tables=true,soft_cap=false,teams="): 12,
    # With a soft cap also a register or two of a consumer.
    ("cache=nvfp4", "head_dim=128,interleaved=false,two_tables=false,soft_cap=true,teams=3"): 12,
    ("cache=nvfp4", "teams="): 6,
    ("cache=e4m3", "teams="): 6,
    ("sm_120a", "in_dtype=f16,sf_layout=layout_linear,silu=true,blocks_per_thread=2"): 2,
    ("sm_121a", "in_dtype=f16,sf_layout=layout_linear,silu=true,blocks_per_thread=2"): 2,
    # A product on warpgroups whose last tiles are divided: a register, or two, loaded once for a tile.
    ("dtype=f16,out_dtype=", "format=nvfp4,tile_m=256", "cluster=2,divided=true"): 4,
    ("depth=1,split=1", "divided=true"): 2,
    # Norms with 16-bit output of more than 32,768 elements: a row does not fit in registers, which is right but slow.
    ("add=false,gate=", "units=8,warps=16"): 722,
    ("add=true,gate=false", "units=8,warps=16"): 241,
    ("gate=true", "warps=16"): 2,
    # Likewise with E4M3 output; those of up to 32,768 keep two registers there.
    ("norm/rows_fp8quant", "norm=true", "units=8,warps=16"): 1743,
    ("norm/rows_fp8quant", "add=true,units=4,warps=16"): 4,
    ("cache=", "units=", "threads=64"): 2,
    # Rows that are added, normalised and quantized by a CTA each: up to seven registers.
    ("norm/rows_fp4quant sm_1", "add=true"): 14,
    ("norm/rows_fp4quant sm_1", "add=false,gate=false"): 16,
    # Behind a gate such a CTA holds gates too, which is not tuned: a third of the registers of 64 elements.
    ("norm/rows_fp4quant", "gate=true"): 68,
    # A token's convolution of 8 channels: up to seven registers, so that an SM holds 24 warps.
    ("conv/causal", "vec=8,by_sequence=true"): 14,
    # Consumers beside a maker of products: while a state is loaded or stored, once for a sequence, not for a chunk.
    ("gdn/prefill_wgmma", "rows=128", "fused=true"): 247,
    # Two consumers of 64 rows of a state each: a register, stored once; of parts, up to ten of the producer.
    ("gdn/prefill_parts", "rows=128"): 20,
    ("gdn/prefill_wgmma", "rows=128"): 2,
    # One consumer, of sequences in parts: addresses of stages, most of them the producer's.
    ("gdn/prefill_wgmma", "rows=64,divided=true"): 83,
    # Convolutions: a register, stored once.
    ("sm_120a", "dtype=bf16,width=3,vec=1,by_sequence=false,threads=128"): 2,
    ("sm_121a", "dtype=bf16,width=3,vec=1,by_sequence=false,threads=128"): 2,
    # Of a batch: 128 sums of a thread, and addresses that are parameters of a single product.
    ("sm_80", "format=nvfp4,out_dtype=", "tile_m=64,tile_n=128,warp_m=64,warp_n=32"): 18,
    ("sm_89", "format=nvfp4,a_layout=layout_128x4", "tile_m=32,tile_n=128,warp_m=32,warp_n=32"): 3,
    # Rotation and append of f16 to a cache of halves: a register, stored and loaded once.
    ("kv/rope_append sm_12", "in_dtype=f16,cache=half", "threads=256"): 2,
    # A part of the matrix, the weight and a row do not fit in the 128 registers of 16 warps' threads; not tuned.
    ("norm/linear", "warps=16"): 234,
    # A router of many columns: up to three registers.
    ("experts/router", "tokens=8,vectors=2,rows=4,threads=512"): 6,
    # A decode step: values of the loop over layers around attention, once for a layer.
    ("step/decode",): 21,
    # 16 tokens: room for twice the warps, which takes a quarter off the time (gdn_search_final).
    ("gdn/chunk", "max_tokens=16", "bulk=true"): 12,
}
# How far a build with sums of groups may be from the ledger. NVRTC makes four loads of one of a float4, and joins them
# again in an order that hangs on addresses of its own objects: for one process in ten or so, PTX and counts differ.
_UNSTEADY = {"registers": 8, "instructions": 64, "LDS": 2}
_SAMPLE = 2500  # instructions of the builds of a kernel that are compiled


def allowed(kernel: AnyKernel, build: str) -> int:
    """How often a build may touch local memory."""
    name = f"{kernel.name} {build}"
    return next((most for parts, most in _SPILLED.items() if all(part in name for part in parts)), 0)


@pytest.mark.parametrize("kernel", kernels(), ids=lambda k: k.name)
def test_the_ledger_has_every_build_of_todays_sources(kernel: AnyKernel) -> None:
    known, wanted = read(kernel), {build.name: build.digest for build in builds(kernel)}
    stale = sorted(name for name in wanted if known.get(name, {}).get("source") != wanted[name])
    gone = sorted(known.keys() - wanted.keys())
    assert not stale and not gone, f"python -m tests.support.ledger {kernel.name}; stale: {stale[:3]}, gone: {gone[:3]}"


@pytest.mark.parametrize("kernel", kernels(), ids=lambda k: k.name)
def test_local_memory_is_used_only_where_it_is_known(kernel: AnyKernel) -> None:
    for name, row in read(kernel).items():
        assert int(row["LDL"]) + int(row["STL"]) <= allowed(kernel, name), name
        assert int(row["instructions"]) > 0 and int(row["registers"]) > 0


@pytest.mark.compile
@pytest.mark.parametrize("kernel", kernels(), ids=lambda k: k.name)
def test_builds_compile_to_what_the_ledger_says(kernel: AnyKernel, whole: bool) -> None:
    """A sample of them, or all with ``--all``; with another NVRTC than the ledger's, local memory only."""
    toolchain = nvrtc.toolchain()
    assert toolchain is not None
    known = read(kernel)
    for build in builds(kernel) if whole else sample(kernel, _SAMPLE):
        if not nvrtc.supports(build.arch):
            continue
        row = measure(build)
        if toolchain.version == NVRTC:
            most = _UNSTEADY if "sum_groups<" in build.source else {}
            wanted = known[build.name]
            assert {**row, **dict.fromkeys(most)} == {**wanted, **dict.fromkeys(most)}
            assert all(abs(int(row[name]) - int(wanted[name])) <= most[name] for name in most), (row, wanted)
        assert int(row["LDL"]) + int(row["STL"]) <= allowed(kernel, build.name), build.name


@pytest.mark.compile
def test_comments_do_not_reach_the_machine_code() -> None:
    build = sample(lookup("quantize/vector"), 0)[0]
    bare = code_of(build.source)
    assert "//" in build.source and "//" not in bare
    cubins = {nvrtc.compile_cubin(text, build.arch, symbol=build.kernel.symbol) for text in (build.source, bare)}
    assert len(cubins) == 1


def test_a_string_is_no_comment() -> None:
    assert code_of('a = "//b\\"//c";  // d\n\n  // e\n  f;\n') == 'a = "//b\\"//c";\nf;'

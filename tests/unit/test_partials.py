"""A partial is a header: it includes what it uses, at its top, and compiles alone, with a stub of what it takes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from jitfp4 import nvrtc
from jitfp4.arch import Arch
from jitfp4.errors import CompileError, RenderError
from jitfp4.render import render_partial, templates_dir

FOLDER = templates_dir()
PARTIALS = sorted(path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*.cuh.j2"))

TAKES = {
    *(f"attention/{name}.cuh.j2" for name in ("blocks", "byte_tile", "codes", "combine", "cvt_e2m1", "expand")),
    *(f"attention/{name}.cuh.j2" for name in ("half_tile", "items", "matrices", "nvfp4_tile", "pages", "parts")),
    *(f"attention/{name}.cuh.j2" for name in ("products", "queries", "request", "rows", "softmax", "team", "tiles")),
    "attention/work.cuh.j2",
    *(f"experts/{name}.cuh.j2" for name in ("activation", "finish", "pieces", "rows", "wide")),
    *(f"gemm/{name}.cuh.j2" for name in ("group_sums", "multiply", "output", "packed_weight", "prepared_weight")),
    *(f"gemm/{name}.cuh.j2" for name in ("products", "wide_mainloop", "wide_place", "wide_results")),
    *(f"gemm/{name}.cuh.j2" for name in ("fp8_products", "fp8_weight", "wide_fp8_mainloop", "wide_fp8_results")),
}
"""Those that still take names of the template that includes them. One that does not any more leaves the list."""

GDN = """
struct Stub {
  using In = f16;
  using State = float;
  static constexpr StateLayout kStateLayout = StateLayout::kVk;
  static constexpr bool kGeneral = true;
  static constexpr int kHeadDim = 128, kValueDim = 128, kMaxTokens = 4, kTileV = 64, kIlpRows = 2, kWarps = 4;
  static constexpr int kAhead = 64, kLanes = 8;
};
using C = Lanes<Stub>;
struct Operands {
  const In *q, *k, *v;
  const void *a, *b, *slots, *step_slots, *dt_bias;
  const float* a_log;
  const float* state;
  int tokens, batch, pool, heads_ratio, value_heads, a_bytes, b_bytes, slot_bytes, step_slot_bytes, dt_bias_type;
  int64 state_stride, state_head_gap, q_batch_stride, q_token_stride, k_batch_stride, k_token_stride, v_batch_stride;
  int64 a_batch_stride, a_token_stride, b_batch_stride, b_token_stride, steps_batch_stride, steps_token_stride;
};
""".replace("const In *q", "const f16 *q")
GDN_ROWS = """
__global__ void rows(C::Rows& h, float* p) {
  load_rows<C, StateLayout::kVk>(h, p + lane_offset<C, StateLayout::kKv>(0, 0));
  store_rows<C, To::kShared, StateLayout::kKv>(h, p);
}
"""
BLOCKSCALED = """
struct Config {
  using Out = f16;
  static constexpr Format kFormat = Format::kNvfp4;
  static constexpr int kTileN = 128, kCtaGroup = 2, kClusterM = 1, kClusterN = 2, kSplit = 2, kStages = 3, kPartN = 64;
  static constexpr bool kSwapAb = false, kTmaStore = false;
};
"""
EPILOGUE = """
template struct Epilogue<Config>;
struct Smem {
  uint8 out[4][2][4096];
  Barrier accumulator_full[2], accumulator_empty[2];
  uint32 tmem;
};
__global__ void run(Epilogue<Config>& e, Smem& smem, TileScheduler<Config>& tiles, TensorMap& map, f16* out) {
  init_epilogue<Config>(smem);
  e.run(smem, tiles, 8, 8, map, out, 8);
}
"""
BLOCKS = """
struct Chunk {
  __device__ uint32 vector(uint32 row, uint32 v) const { return row + v; }
  __device__ const uint8* scale(uint32 row, uint32 column) const { return nullptr; }
};
struct Place { int a, b, a_scales, b_scales; };
__global__ void run(float (&sums)[1][2][4], Chunk& a, Place& place) {
  %s<Format::kMxfp4>::multiply(sums, a, a, place, 64, 3);
}
"""
USES: dict[str, tuple[str, str]] = {
    "gdn/lanes.cuh.j2": ("sm_90a", GDN),
    "gdn/rows.cuh.j2": ("sm_90a", GDN + GDN_ROWS),
    "gdn/row_writer.cuh.j2": (
        "sm_90a",
        GDN + "template struct RowWriter<C, true>;\n"
        "__global__ void write(RowWriter<C, true>& w, C::Rows& h, float* p) { w.write<true>(h, p); }\n",
    ),
    "gdn/operands.cuh.j2": (
        "sm_90a",
        GDN + "__global__ void run(Operands& p, Item<C>& item, f16* out) {\n"
        "  clear_outputs<C>(p, out + item.values(p) + item.outputs(p) + item.rows<StateLayout::kVk>(0, 0));\n"
        "  bring_next_group(p, item);\n"
        "  if (load_gate<C>(p.a, slot_at(p.slots, 4, 0), 4) > load_bias(p.a, 0, Bias::kF16)) out->bits = 0;\n}\n",
    ),
    "gdn/inputs.cuh.j2": (
        "sm_90a",
        GDN + "__global__ void run(Operands& p, Item<C>& item, ItemInputs<C, true>& inputs, float* to) {\n"
        "  inputs.load(p, item);\n  *to = inputs.token(p, item).beta;\n"
        "  inputs.for_rows(p, item, 4, [&](int r, uint2 x) { to[r] = inputs.squares({1, 2, 3, 4}); });\n}\n",
    ),
    "gdn/prologue.cuh.j2": (
        "sm_90a",
        GDN + "__global__ void run(Operands& p, ItemInputs<C, true>& inputs, f16* out) {\n"
        "  begin(p, this_item<C>(), inputs, out);\n}\n",
    ),
    "gemm/tile_scheduler.cuh.j2": (
        "sm_100a",
        BLOCKSCALED.replace("  static constexpr Format kFormat = Format::kNvfp4;\n", "")
        + "template struct ClusterPlace<Config>;\ntemplate struct TileScheduler<Config>;\n",
    ),
    "gemm/cluster_loads.cuh.j2": (
        "sm_100a",
        BLOCKSCALED.replace("  static constexpr Format kFormat = Format::kNvfp4;\n", "")
        + "template struct Share<Config, 2>;\n__global__ void run(Barrier (&b)[3], TensorMap& map, uint8* to) {\n"
        "  drain<Config>(b, Ring<3>{});\n  ClusterPlace<Config> place;\n"
        "  left_share(map, place).load(to, 0, 0, b), right_share(map, place).prefetch(0, 0);\n"
        "  left_scales_share<64>(map, place).load(to, 0, 0, b);\n"
        "  right_scales_share<1, 64>(map, place).load(to, 0, 0, b);\n}\n",
    ),
    "gemm/tmem_epilogue.cuh.j2": ("sm_100a", BLOCKSCALED + EPILOGUE),
    "gemm/blockscaled_shell.cuh.j2": ("sm_100a", BLOCKSCALED + "template struct Epilogue<Config>;\n"),
    "gemm/codes.cuh.j2": (
        "sm_80",
        "__global__ void run(uint32 (&to)[4]) {\n"
        "  unpack_codes<bf16>(to, 3), unpack_codes<f16>(to, 3);\n"
        "  to[0] = unpack_scales<bf16>(1) + unpack_scales<f16>(1);\n}\n",
    ),
    "gemm/half_blocks.cuh.j2": ("sm_80", BLOCKS % "HalfBlocks"),
    "gemm/scaled_blocks.cuh.j2": ("sm_120a", BLOCKS % "ScaledBlocks"),
    "partials/e2m1_decode.cuh.j2": ("sm_80", "__global__ void run(float (&v)[8]) { decode_e2m1x8(3, v); }\n"),
    "partials/formats.cuh.j2": (
        "sm_80",
        "template struct Recipe<Format::kMxfp4>;\ntemplate struct Recipe<Format::kNvfp4>;\n",
    ),
    "partials/inputs.cuh.j2": (
        "sm_100a",
        "__global__ void run(RawUnit<f16>& raw, const f16* p) { load_unit<f16>(raw, p, is_wide(p, 32)); }\n",
    ),
    "partials/nvfp4.cuh.j2": (
        "sm_80",
        "__global__ void run(uint32 (&x)[8], uint2* to) { *to = encode_block<bf16>(x, block_amax<f16>(x)); }\n",
    ),
    "partials/quantize_task.cuh.j2": (
        "sm_100a",
        "__global__ void run(Matrix<f16>& a, Matrix<e4m3>& b) {\n"
        "  quantize_task<Format::kNvfp4, SfLayout::k128x4, true, 2>(a, 0, 0);\n"
        "  quantize_task<Format::kNvfp4, SfLayout::kLinear, false, 1>(b, 0, 0);\n}\n",
    ),
    "partials/reduce.cuh.j2": ("sm_80", "__global__ void run(float (&x)[2]) { group_sum<4>(x); }\n"),
    "partials/row_sum.cuh.j2": ("sm_90a", "template struct RowSum<4, true>;\n"),
    "partials/sf_layout.cuh.j2": (
        "sm_80",
        "template struct Sector<SfLayout::k8x4>;\n"
        "__global__ void run(uint64* to) {\n"
        "  *to = sf_offset<SfLayout::k128x4>(1, 2, sf_padded_cols<SfLayout::k8x4>(3));\n}\n",
    ),
    "partials/units.cuh.j2": (
        "sm_80",
        "template struct Weights<f16, true>;\ntemplate struct Weights<bf16, false>;\n"
        "__global__ void run(Unit& u, const float (&x)[16]) { add<f16>(u, u), scale<bf16>(u, x, 1.0f, x); }\n",
    ),
    "partials/vectors.cuh.j2": (
        "sm_80",
        "__global__ void run(uint32 (&w)[4], f16* p) {\n"
        "  ld_halves<8>(p, w), st_halves<4>(p, {to_pair<bf16>(1, 2), 3});\n}\n",
    ),
}
"""Of templates: an architecture, and code that makes the compiler read them."""


def compiles(partial: str) -> bool:
    arch, use = USES.get(partial, ("sm_90a", ""))
    source = render_partial(partial, Arch.of(arch))
    try:
        nvrtc.compile_ptx(f'{source}{use}extern "C" __global__ void alone() {{}}\n', Arch.of(arch), symbol="alone")
    except CompileError as error:
        if partial not in TAKES:
            raise
        return not str(error)
    return True


@pytest.mark.compile
@pytest.mark.parametrize("partial", PARTIALS)
def test_it_compiles_alone(partial: str) -> None:
    try:
        alone = compiles(partial)
    except RenderError:
        alone = False
    assert alone == (partial not in TAKES)


@pytest.mark.parametrize("partial", sorted(set(PARTIALS) - TAKES))
def test_includes_stand_at_the_top(partial: str) -> None:
    text = (FOLDER / partial).read_text()
    assert re.match(r'(//% include ".*" %//\n)*// ---- ' + re.escape(partial.removesuffix(".cuh.j2")) + r" -+\n", text)
    assert text.count("//% include") == len(re.findall(r"\A(?://% include .*\n)*", text)[0].splitlines())


def test_the_list_is_of_partials() -> None:
    assert TAKES | USES.keys() <= set(PARTIALS)
    assert Path(FOLDER).is_dir()

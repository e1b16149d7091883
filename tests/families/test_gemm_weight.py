"""The prepared FP4 weight: every scale, both ways, both layouts, and what is refused."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from jitfp4 import ArgumentError, ArgumentTypeError, Fp4Weight, SfLayout, nvfp4_quantize, prepare_fp4_weight
from jitfp4 import weight as module
from jitfp4.formats import MXFP4, NVFP4, BlockFormat
from jitfp4.reference.formats import decode_e2m1, swizzle
from jitfp4.reference.quantize import dequantize
from jitfp4.weight import pack, tile_bytes, unpack
from tests.support.compare import assert_same_bytes
from tests.support.gemm import LINEAR, make_codes


def values(codes: torch.Tensor, scales: torch.Tensor, block_format: BlockFormat) -> torch.Tensor:
    return dequantize(codes, scales, block_format, None, LINEAR)


@pytest.mark.parametrize("block_format", BlockFormat)
@pytest.mark.parametrize(("n", "k"), [(8, 32), (64, 128), (72, 416), (200, 1184)])
@pytest.mark.parametrize("layout", SfLayout)
def test_prepared_weight_has_the_same_values(block_format: BlockFormat, n: int, k: int, layout: SfLayout) -> None:
    codes, scales = make_codes(n, k, block_format)
    weight = prepare_fp4_weight(codes, swizzle(scales, layout), block_format.block, layout)
    assert weight.data.shape == (-(-n // 64), -(-k // 128), tile_bytes(block_format))
    assert torch.equal(weight.dequantize(), values(codes, scales, block_format))


def test_every_e4m3_scale_is_exact() -> None:
    scales = torch.arange(256, dtype=torch.uint8).view(16, 16)
    codes = torch.arange(256, dtype=torch.uint8).mul(17 * 9 % 256).view(2, 128).repeat(8, 1)
    weight = prepare_fp4_weight(codes, scales, sf_layout=LINEAR)
    want = values(codes, scales, NVFP4)
    assert torch.equal(weight.dequantize().nan_to_num(nan=7.25), want.nan_to_num(nan=7.25))
    assert want.isnan().sum() == 2 * 16  # bytes 0x7F and 0xFF


def test_mxfp4_scales_are_relative_to_their_row() -> None:
    scales = torch.tensor([[0, 1, 2, 3], [254, 253, 230, 226], [100, 255, 90, 100], [127, 99, 110, 127]])
    codes = torch.full((8, 64), 0x72, dtype=torch.uint8)
    codes[3, 48:] = 0  # a block of zeros, whose scale does not count
    scales = torch.cat((scales, scales)).to(torch.uint8)
    weight = prepare_fp4_weight(codes, scales, 32, LINEAR)
    got, want = weight.dequantize(), values(codes, scales, MXFP4)
    assert torch.equal(got.nan_to_num(nan=7.25), want.nan_to_num(nan=7.25))


def test_mxfp4_blocks_far_below_their_row_become_zero() -> None:
    codes = torch.full((8, 64), 0x72, dtype=torch.uint8)
    scales = torch.tensor([[150, 122, 121, 0]] * 8, dtype=torch.uint8)
    got = prepare_fp4_weight(codes, scales, 32, LINEAR).dequantize()
    want = values(codes, scales, MXFP4)
    assert torch.equal(got[:, :64], want[:, :64])
    assert not got[:, 64:].any()


def test_fragments_lie_as_documented() -> None:
    """Lane 4 g + t, step s: pairs of rows g and g + 8 at columns 2 t and 2 t + 8, in the documented bits."""
    codes, scales = make_codes(64, 128, NVFP4)
    nibbles = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)
    data = pack(nibbles, torch.full_like(scales, 168))
    for block, step, lane in ((0, 0, 0), (3, 7, 31), (1, 5, 13), (2, 2, 22)):
        g, t = divmod(lane, 4)
        at = block * 1024 + step // 4 * 512 + lane * 16 + step % 4 * 4
        word = int.from_bytes(bytes(data[0, 0, at : at + 4].tolist()), "little")
        rotated = word >> 6 | (word & 63) << 26
        for i, pair in enumerate((word, word << 6, rotated, word << 4 ^ word >> 4)):
            row, column = 16 * block + g + i % 2 * 8, 16 * step + 2 * t + i // 2 * 8
            for half in range(2):
                bits = pair >> 16 * half & 0x81C0
                assert (bits >> 12 & 8 | bits >> 6 & 7) == nibbles[row, column + half], (block, step, lane, i, half)


@pytest.mark.parametrize("block_format", BlockFormat)
def test_unpack_is_the_inverse_of_pack(block_format: BlockFormat) -> None:
    generator = torch.Generator().manual_seed(3)
    codes = torch.randint(0, 16, (128, 384), generator=generator).to(torch.uint8)
    scales = torch.randint(0, 256, (128, 384 // block_format.block), generator=generator).to(torch.uint8)
    got = unpack(pack(codes, scales), block_format)
    assert_same_bytes("codes", got[0], codes)
    assert_same_bytes("scales", got[1], scales)


@pytest.mark.parametrize("block_format", BlockFormat)
def test_slabs_change_nothing(block_format: BlockFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    codes, scales = make_codes(200, 256, block_format)
    whole = prepare_fp4_weight(codes, scales, block_format.block, LINEAR)
    monkeypatch.setattr(module, "_SLAB", 1)
    assert_same_bytes("data", prepare_fp4_weight(codes, scales, block_format.block, LINEAR).data, whole.data)


def test_a_prepared_weight_stays_as_it_is() -> None:
    codes, scales = make_codes(64, 128, NVFP4)
    weight = prepare_fp4_weight(codes, scales, sf_layout=LINEAR)
    assert prepare_fp4_weight(weight) is weight
    with pytest.raises(ArgumentError, match="scales: got a tensor"):
        prepare_fp4_weight(weight, scales)


def test_takes_what_the_quantizer_gives() -> None:
    x = torch.randn(72, 160, generator=torch.Generator().manual_seed(5)).bfloat16()
    q, sf = nvfp4_quantize(x, torch.tensor([2688.0]) / x.abs().amax().float())
    weight = prepare_fp4_weight(q, sf, sf_layout=SfLayout.layout_128x4)
    assert (weight.n, weight.k, weight.format) == (72, 160, NVFP4)
    assert torch.equal(
        weight.dequantize(), dequantize(q.view(torch.uint8), sf.view(torch.uint8), NVFP4, None, SfLayout.layout_128x4)
    )


@pytest.mark.parametrize("block_format", BlockFormat)
def test_through_safetensors(block_format: BlockFormat, tmp_path: Path) -> None:
    codes, scales = make_codes(72, 160, block_format)
    weight = prepare_fp4_weight(codes, scales, block_format.block, LINEAR)
    save_file(weight.tensors(), tmp_path / "w.safetensors")
    loaded = Fp4Weight.from_tensors(load_file(tmp_path / "w.safetensors"))
    assert (loaded.n, loaded.k, loaded.format) == (72, 160, block_format)
    assert torch.equal(loaded.dequantize(), weight.dequantize())


def test_an_order_of_codes_has_its_number() -> None:
    named = prepare_fp4_weight(*make_codes(72, 160, NVFP4), sf_layout=LINEAR).tensors()
    digest = hashlib.sha256(named["data"].numpy().tobytes()).hexdigest()[:16]
    assert (named["size"].tolist()[2], digest) == (3, "72042e4f61aa9d03"), "another order needs another number"


def test_tensors_that_do_not_fit_together_are_refused() -> None:
    codes, scales = make_codes(72, 160, NVFP4)
    named = prepare_fp4_weight(codes, scales, sf_layout=LINEAR).tensors()
    with pytest.raises(ArgumentError, match="named"):
        Fp4Weight.from_tensors({"data": named["data"]})
    with pytest.raises(ArgumentError, match="data"):
        Fp4Weight.from_tensors({**named, "size": torch.tensor([200, 160, 3])})
    for size in ([72, 160], [72, 160, 2]):  # of releases with another order of codes
        with pytest.raises(ArgumentError, match="named, size"):
            Fp4Weight.from_tensors({**named, "size": torch.tensor(size)})
    with pytest.raises(ArgumentError, match="data"):
        Fp4Weight.from_tensors({**named, "row_scale": torch.ones(128)})


def test_bad_arguments_are_named() -> None:
    codes, scales = make_codes(64, 128, NVFP4)
    for error, name, arguments in (
        (ArgumentError, "block_size", (codes, scales, 64)),
        (ArgumentTypeError, "weight", (codes.float(), scales)),
        (ArgumentError, "weight", (codes.flatten(), scales)),
        (ArgumentError, "weight", (codes.T, scales)),
        (ArgumentError, "weight: got n = 60", (codes[:60], scales)),
        (ArgumentError, "weight: got k = 16", (codes[:, :8].contiguous(), scales)),
        (ArgumentTypeError, "scales", (codes,)),
        (ArgumentTypeError, "scales", (codes, scales.float())),
        (ArgumentError, "scales: got 512 elements", (codes, scales, 16, SfLayout.layout_128x4)),
        (ArgumentTypeError, "sf_layout: got None", (codes, scales)),
        (ArgumentError, "sf_layout", (codes, scales, 16, 7)),
    ):
        with pytest.raises(error, match=name):
            prepare_fp4_weight(*arguments)  # type: ignore[arg-type]


def test_values_by_hand() -> None:
    codes = torch.full((8, 16), 0x21, dtype=torch.uint8)  # 0.5, 1
    scales = torch.tensor([[0x38, 0x40]] * 8, dtype=torch.uint8)  # 1, 2
    got = prepare_fp4_weight(codes, scales, sf_layout=LINEAR).dequantize()
    assert got.tolist() == [[0.5, 1.0] * 8 + [1.0, 2.0] * 8] * 8
    assert decode_e2m1(torch.tensor([1, 2], dtype=torch.uint8)).tolist() == [0.5, 1.0]

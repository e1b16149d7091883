"""FP4 weights in the order in which the kernels of products and of experts read them.

A prepared weight is a uint8 tensor of tiles, ``[ceil(n / 64), ceil(k / 128), tile_bytes]``: 64 rows by 128 columns,
one piece of memory. Rows past n and columns past k hold zero.

Codes come first, 4096 bytes: four blocks of 16 rows, each of eight steps of 16 columns. For each step, lane ``4 g + t``
has one 32-bit word with the eight codes that it passes to the tensor cores: columns 2 t and 2 t + 1 of row g, then of
row g + 8; columns 2 t + 8 and 2 t + 9 of row g, then of row g + 8. The words of four steps are adjacent, then come the
other lanes, then the other four steps. The first column of each of the four pairs is in the low half of the word, the
second in the high half. Codes are placed so that few instructions turn a pair into bf16, where its signs are the first
bits of the halves, and its exponents and mantissas bits 8 to 6: a mask, and before it for pair 1 a shift to the left by
6, for pair 2 a rotation to the right by 6, and for pair 3 the exclusive or of shifts by 4 to the left and to the right.
So a half has these bits (s: sign, e: exponent, m: mantissa of a pair's code; S: the sign in the other half; x: what
makes pair 3 come out)::

    bit     15 14 13 12 11 10  9  8  7  6  5  4  3  2  1  0
    pair     0  2  2  2  3  3  1  0  0  0  2  3  3  1  1  1
             s  e  e  m  x  x  s  e  e  m  S  x  x  e  e  m

Scales follow, one byte each: block after block, and for each g a word for two columns of blocks: row g of both in the
low half, row g + 8 of both in the high half. The byte of the first column is in bits 11 to 4 of its half; that of the
second is there after the bytes of the half have changed places. A byte has no sign, five bits of exponent with a bias
of 21 and three bits of mantissa: it can hold every E4M3 magnitude except zero. A scale of zero is written as zero
codes, a negative scale as codes of the opposite sign, NaN as 0xFF. MXFP4's scales are relative to the largest scale of
their row, which ``row_scale`` holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from jitfp4.errors import ArgumentError, ArgumentTypeError, renamed
from jitfp4.formats import MXFP4, NVFP4, BlockFormat
from jitfp4.layouts import ceil_div, round_up
from jitfp4.reference.formats import decode_e2m1, unpack_e2m1
from jitfp4.tensors import check_contiguous, check_dtype, check_same_device, check_strided

ROWS, COLS = 8, 32  # n and k are multiples of them
TILE_ROWS, TILE_COLS = 64, 128
CODE_BYTES = TILE_ROWS * TILE_COLS // 2
_BIAS, _TOP = 21, 29  # of the exponent in a scale byte: its bias, and its largest value that is a number
_ONE, _NAN = _BIAS << 3, 0xFF
_UE8M0_NAN = 255
_MOST_ROWS = 1 << 31
_SLAB = 1 << 24  # elements that are packed at a time
_ORDER, _GATED_ORDER = 3, 4  # the numbers of the order of codes and scales: others whenever pack() changes
MXFP4_UNIT = 4.0  # in E4M3: the largest scale of a prepared row is 2^8, and 6 * 2^6 is the most that E4M3 holds
_NORMAL, _STEP = 2.0**-6, 2.0**-9  # of E4M3: its least normal value, the distance of those below
_MARK = 6 / 128  # of a scale's power of two: what cutting off needs in order to round
_HALF_BLOCK = 8  # rows that a lane has in one register of a fragment
ORDERS = ("concatenated gate,up", "concatenated up,gate", "interleaved")
"""How a matrix may have the rows of gates and ups; interleaved: both of a feature follow each other."""


def tile_bytes(block_format: BlockFormat) -> int:
    """Bytes of a tile: its codes and its scales."""
    return CODE_BYTES + TILE_ROWS * TILE_COLS // block_format.block


@dataclass(frozen=True, slots=True)
class Fp4Weight:
    """A prepared weight [n, k], as prepare_fp4_weight() makes it.

    Attributes:
        data: uint8 ``[ceil(n / 64), ceil(k / 128), 4608]`` (NVFP4) or ``[..., 4352]`` (MXFP4), contiguous.
        row_scale: float32 ``[round_up(n, 64)]``, a factor for each row of an MXFP4 weight; None for NVFP4.
        n, k: logical size.
        format: the format of its blocks.
        gated: whether the rows are those of n / 2 gates and as many ups. Then each 16 rows are the gates of eight
            features and their ups, so that one thread has both of a feature.
    """

    data: torch.Tensor
    row_scale: torch.Tensor | None
    n: int
    k: int
    format: BlockFormat
    gated: bool = False

    def __post_init__(self) -> None:
        for name, size, multiple in (("n", self.n, ROWS), ("k", self.k, COLS)):
            if not isinstance(size, (int, torch.SymInt)) or isinstance(size, bool):
                raise ArgumentTypeError(name, type(size).__name__, "an int")
            if size <= 0 or size % multiple or size >= _MOST_ROWS:
                raise ArgumentError(name, str(size)[:40], f"a positive multiple of {multiple} below 2^31")
        if not isinstance(self.gated, bool):
            raise ArgumentTypeError("gated", type(self.gated).__name__, "a bool")
        if self.gated and self.n % (2 * _HALF_BLOCK):
            raise ArgumentError("n", str(self.n)[:40], f"a multiple of {2 * _HALF_BLOCK}, of gates and ups")
        if not isinstance(self.format, BlockFormat):
            raise ArgumentTypeError("format", type(self.format).__name__, "a BlockFormat")
        shape = (ceil_div(self.n, TILE_ROWS), ceil_div(self.k, TILE_COLS), tile_bytes(self.format))
        _check_part("data", self.data, torch.uint8, shape)
        if (self.row_scale is None) != (self.format is NVFP4):
            what = "None" if self.row_scale is None else "a tensor"
            raise ArgumentError("row_scale", what, "a tensor for MXFP4, None for NVFP4")
        if self.row_scale is not None:
            _check_part("row_scale", self.row_scale, torch.float32, (shape[0] * TILE_ROWS,))
            check_same_device("row_scale", self.row_scale, self.data)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The weight as named tensors, for safetensors or a state_dict; ``size`` also tells the order of the codes."""
        order = _GATED_ORDER if self.gated else _ORDER
        named = {"data": self.data, "size": torch.tensor([self.n, self.k, order])}
        return named if self.row_scale is None else {**named, "row_scale": self.row_scale}

    @staticmethod
    def from_tensors(named: Mapping[str, torch.Tensor]) -> Fp4Weight:
        """The inverse of tensors().

        Raises ArgumentError, which names the tensor, if they do not fit together, or if another release of jitfp4
        prepared the weight in an order that this one does not read: then call prepare_fp4_weight() again.
        """
        if not isinstance(named, Mapping):
            raise ArgumentTypeError("named", type(named).__name__, "a mapping, as tensors() gives it")
        if not {"data", "size"} <= named.keys() <= {"data", "size", "row_scale"}:
            raise ArgumentError("named", sorted(map(str, named)), "data, size and, for MXFP4, row_scale")
        data, row_scale = named["data"], named.get("row_scale")
        _check_part("named, size", named["size"], torch.int64, (3,))
        if named["size"].is_meta:
            raise ArgumentTypeError("named, size", "a tensor on meta", "a tensor with values")
        n, k, order = named["size"].tolist()
        if order not in (_ORDER, _GATED_ORDER):
            allowed = f"order {_ORDER}, or {_GATED_ORDER} of gates and ups: prepare it again"
            raise ArgumentError("named, size", f"order {order} of a prepared weight", allowed)
        try:
            return Fp4Weight(data, row_scale, n, k, NVFP4 if row_scale is None else MXFP4, order == _GATED_ORDER)
        except ArgumentError as error:
            raise renamed(error, {part: f"named, {part}" for part in ("data", "row_scale", "n", "k")}) from None

    def dequantize(self) -> torch.Tensor:
        """The weight in float32, [n, k], exact; of one that is ``gated``, first the gates and then the ups."""
        codes, scales = unpack(self.data, self.format)
        values = decode_e2m1(codes) * decode_scales(scales).repeat_interleave(self.format.block, -1)
        if self.row_scale is not None:
            values = values * self.row_scale.unsqueeze(-1)
        values = values[: self.n, : self.k]
        return gates_first(values) if self.gated else values


def check_still(name: str, make: Callable[[], object]) -> None:
    """Check that prepared tensors have the shapes that ``make``, their class, wants: resize_() may have changed them.

    Raises ArgumentError for ``name``.
    """
    if torch.compiler.is_dynamo_compiling():
        return
    try:
        make()
    except ArgumentError as error:
        raise type(error)(name, f"{error.args[0]} of {error.args[1]}", str(error.args[2])) from None


def _check_part(name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    check_dtype(name, tensor, (dtype,))
    check_strided(name, tensor)
    if tuple(tensor.shape) != shape:
        raise ArgumentError(name, f"shape {tuple(tensor.shape)}", f"{shape}")
    check_contiguous(name, tensor)


# ---- scales ----------------------------------------------------------------------------------------------------------


def _e4m3_byte(byte: int) -> int:
    """The magnitude of an E4M3 byte, which is not zero, as a scale byte."""
    exponent, mantissa = byte >> 3 & 15, byte & 7
    if byte & 0x7F == 0x7F:
        return _NAN
    if exponent == 0:  # mantissa * 2^-9
        shift = 3 - (mantissa.bit_length() - 1)
        exponent, mantissa = 1 - shift, mantissa << shift & 7
    return exponent - 7 + _BIAS << 3 | mantissa


_E4M3_BYTES = [_ONE if byte & 0x7F == 0 else _e4m3_byte(byte) for byte in range(256)]


def _encode_nvfp4(codes: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and E4M3 bytes as a tile holds them: without zero scales and without signs of scales."""
    table = torch.tensor(_E4M3_BYTES, dtype=torch.uint8, device=scales.device)
    blocks = codes.unflatten(-1, (-1, NVFP4.block)) ^ (scales >> 7 << 3).unsqueeze(-1)
    blocks = blocks.masked_fill((scales & 0x7F == 0).unsqueeze(-1), 0)
    return blocks.flatten(-2), table[scales.long()]


def _encode_mxfp4(codes: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes and UE8M0 bytes as a tile holds them, and the scale of each row."""
    blocks, bytes_ = codes.unflatten(-1, (-1, MXFP4.block)), scales.to(torch.int32)
    counts = (blocks & 7 != 0).any(-1) & (bytes_ != _UE8M0_NAN)
    top = torch.where(counts, bytes_, 0).amax(-1, keepdim=True)
    exponent = _TOP + bytes_ - top
    small = (exponent < 1) | ~counts
    encoded = torch.where(bytes_ == _UE8M0_NAN, _NAN, torch.where(small, _ONE, exponent << 3)).to(torch.uint8)
    blocks = blocks.masked_fill((small & (bytes_ != _UE8M0_NAN)).unsqueeze(-1), 0)
    return blocks.flatten(-2), encoded, torch.exp2(top.squeeze(-1).double() - 127 - (_TOP - _BIAS)).float()


def _raise_nvfp4(codes: torch.Tensor, bytes_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale bytes of rows whose largest is 2^8 or more, and the power of two by which that divides each row."""
    counts = (codes.unflatten(-1, (-1, NVFP4.block)) & 7 != 0).any(-1) & (bytes_ != _NAN)
    top = torch.where(counts, bytes_ >> 3, 0).amax(-1, keepdim=True)
    lift = torch.where(top > 0, _TOP - top, 0)
    ones = torch.ones(len(lift), dtype=torch.float32, device=lift.device)
    power = torch.ldexp(ones, -lift.squeeze(-1).to(torch.int32))
    return torch.where(counts, bytes_ + (lift << 3), bytes_), power


def decode_scales(scales: torch.Tensor) -> torch.Tensor:
    """Scale bytes to float32."""
    value = torch.ldexp(1 + (scales & 7).float() / 8, (scales >> 3).to(torch.int32) - _BIAS)
    return torch.where(scales == _NAN, torch.nan, value)


# ---- layout ----------------------------------------------------------------------------------------------------------


_PAIRS = 0x81C081C0  # a pair of codes as bf16


def pack(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Pack codes [rows, cols] (0 to 15) and scale bytes [rows, cols / block], both uint8, into tiles."""
    tiles, chunks = codes.shape[0] // TILE_ROWS, codes.shape[1] // TILE_COLS
    # [tile, block, row half, g, chunk, step half, step, column half, t, parity]
    c = codes.to(torch.int32).reshape(tiles, 4, 2, 8, chunks, 2, 4, 2, 4, 2)
    c = (c & 8) << 12 | (c & 7) << 6
    c = (c[..., 0] | c[..., 1] << 16).long() & _PAIRS
    # [column half, row half, tile, chunk, block, step half, g, t, step]
    first, second, third, fourth = c.permute(7, 2, 0, 4, 1, 5, 3, 8, 6).flatten(0, 1).unbind()
    words = first | second >> 6 | _rotated(third, 6)
    rest = (fourth ^ words << 4 ^ words >> 4) & _PAIRS
    # where both shifts give a bit of pair 3, the one of the left shift comes first
    chain = rest & 0x80808080
    chain = chain ^ chain >> 8
    chain = chain ^ chain >> 16
    words = words | chain >> 4 | (rest & 0x01000100) >> 4 | (rest & 0x00400040) << 4
    # [tile, block, row half, g, chunk, word, column of a word]
    s = scales.reshape(tiles, 4, 2, 8, chunks, -1, 2).permute(0, 4, 1, 3, 5, 2, 6)
    first, second = s.unbind(-1)
    s = torch.stack((first << 4 | second >> 4, second << 4 | first >> 4), -1)
    return torch.cat((_bytes_of(words).reshape(tiles, chunks, CODE_BYTES), s.reshape(tiles, chunks, -1)), -1)


def unpack(data: torch.Tensor, block_format: BlockFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """The inverse of pack(): codes [rows, cols] and scale bytes [rows, cols / block] of whole tiles."""
    tiles, chunks, _ = data.shape
    words = sum(part << 8 * i for i, part in enumerate(data[..., :CODE_BYTES].long().unflatten(-1, (-1, 4)).unbind(-1)))
    c = torch.stack((words, words << 6, _rotated(words, 26), words << 4 ^ words >> 4)) & _PAIRS
    c = torch.stack((c & 0xFFFF, c >> 16), -1)
    c = (c >> 12 | c >> 6 & 7).to(torch.uint8).reshape(2, 2, tiles, chunks, 4, 2, 8, 4, 4, 2)
    codes = c.permute(2, 4, 1, 6, 3, 5, 8, 0, 7, 9).reshape(tiles * TILE_ROWS, chunks * TILE_COLS)
    low, high = data[..., CODE_BYTES:].unflatten(-1, (-1, 2)).unbind(-1)
    s = torch.stack((high << 4 | low >> 4, low << 4 | high >> 4), -1)
    s = s.reshape(tiles, chunks, 4, 8, -1, 2, 2).permute(0, 2, 5, 3, 1, 4, 6)
    return codes, s.reshape(tiles * TILE_ROWS, chunks * TILE_COLS // block_format.block)


def _rotated(words: torch.Tensor, left: int) -> torch.Tensor:
    """32-bit words, as int64, rotated to the left."""
    return (words << left | words >> 32 - left) & 0xFFFFFFFF


def _bytes_of(words: torch.Tensor) -> torch.Tensor:
    """The bytes of 32-bit words, the lowest first."""
    return torch.stack([words >> 8 * i & 0xFF for i in range(4)], -1).to(torch.uint8)


def gate_up_order(inter: int, device: torch.device | str) -> torch.Tensor:
    """For each row of a prepared weight of gates and ups, its number among the gates and then the ups."""
    gates = torch.arange(inter, device=device).view(-1, _HALF_BLOCK)
    return torch.stack((gates, gates + inter), 1).flatten()


def places_of(order: str, inter: int, device: torch.device) -> torch.Tensor:
    """For each row of a prepared weight of gates and ups, its row in an order of ORDERS."""
    logical = gate_up_order(inter, device)
    if order == ORDERS[0]:
        return logical
    is_up = logical >= inter
    feature = logical - is_up * inter
    return feature + ~is_up * inter if order == ORDERS[1] else 2 * feature + is_up


def prepare(
    codes: torch.Tensor, scales: torch.Tensor, block_format: BlockFormat, powers: torch.Tensor | None = None
) -> Fp4Weight:
    """The prepared weight of packed codes [n, k / 2] and linear scales [n, k / block], both uint8 on one device.

    ``powers`` float32 [n]: of NVFP4, each row is divided by a power of two, so that the largest scale is 2^8 or more,
    and the powers are written there.
    """
    n, k = codes.shape[0], codes.shape[1] * 2
    cols = round_up(k, TILE_COLS)
    tiles = ceil_div(n, TILE_ROWS)
    data = codes.new_empty(tiles, cols // TILE_COLS, tile_bytes(block_format))
    row_scale = (
        torch.empty(tiles * TILE_ROWS, dtype=torch.float32, device=codes.device) if block_format is MXFP4 else None
    )
    slab = max(1, _SLAB // (TILE_ROWS * cols))  # a bound on temporary memory
    for tile in range(0, tiles, slab):
        rows = slice(tile * TILE_ROWS, (tile + slab) * TILE_ROWS)
        part, part_scales = unpack_e2m1(codes[rows]), scales[rows]
        if row_scale is None:
            part, part_scales = _encode_nvfp4(part, part_scales)
            if powers is not None:
                part_scales, powers[rows] = _raise_nvfp4(part, part_scales)
        else:
            part, part_scales, row = _encode_mxfp4(part, part_scales)
            row_scale[rows] = pad(row, (0, row_scale[rows].shape[0] - len(row)), value=1.0)
        below = min(slab, tiles - tile) * TILE_ROWS - part.shape[0]
        part = pad(part, (0, cols - k, 0, below))
        part_scales = pad(part_scales, (0, (cols - k) // block_format.block, 0, below), value=_ONE)
        data[tile : tile + slab] = pack(part, part_scales)
    return Fp4Weight(data, row_scale, n, k, block_format)


def gates_first(values: torch.Tensor) -> torch.Tensor:
    """[2 n, k] of a prepared weight of gates and ups, in its order of rows: first the gates and then the ups."""
    halves: torch.Tensor = values.unflatten(0, (-1, 2, _HALF_BLOCK))
    return halves.transpose(0, 1).flatten(0, 2)


def with_gates(gate: Fp4Weight, up: Fp4Weight) -> Fp4Weight:
    """The ``gated`` weight [2 n, k] of two prepared ones of one size, format and device, exactly."""
    rows, cols = gate.data.shape[0] * TILE_ROWS, gate.data.shape[1] * TILE_COLS
    slab = max(1, _SLAB // (TILE_ROWS * cols))
    parts = []
    for sides in zip(gate.data.split(slab), up.data.split(slab), strict=True):
        codes, scales = (torch.cat(both) for both in zip(*(unpack(side, gate.format) for side in sides), strict=True))
        order = gate_up_order(codes.shape[0] // 2, codes.device)
        parts.append(pack(codes[order], scales[order]))
    tiles = ceil_div(2 * gate.n, TILE_ROWS)
    row_scale = None
    if gate.row_scale is not None and up.row_scale is not None:
        order = gate_up_order(rows, gate.data.device)[: tiles * TILE_ROWS]
        row_scale = torch.cat((gate.row_scale, up.row_scale))[order]
    return Fp4Weight(torch.cat(parts)[:tiles], row_scale, 2 * gate.n, gate.k, gate.format, gated=True)


def without_gates(weight: Fp4Weight) -> tuple[Fp4Weight, Fp4Weight]:
    """The inverse of with_gates(): the weights of the gates and of the ups, [n / 2, k] each."""
    slab = max(2, _SLAB // (TILE_ROWS * TILE_COLS * weight.data.shape[1]) // 2 * 2)
    sides: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
    for tiles in weight.data.split(slab):
        codes, scales = unpack(tiles, weight.format)
        missing = -codes.shape[0] % (2 * TILE_ROWS)
        codes, scales = pad(codes, (0, 0, 0, missing)), pad(scales, (0, 0, 0, missing), value=_ONE)
        codes, scales = (x.unflatten(0, (-1, 2, _HALF_BLOCK)) for x in (codes, scales))
        for side, own in enumerate(sides):
            own.append(pack(codes[:, side].flatten(0, 1), scales[:, side].flatten(0, 1)))
    row_scales: tuple[torch.Tensor | None, ...] = None, None
    if weight.row_scale is not None:
        both = pad(weight.row_scale, (0, -len(weight.row_scale) % (2 * TILE_ROWS)), value=1.0)
        row_scales = both.unflatten(0, (-1, 2, _HALF_BLOCK)).transpose(0, 1).flatten(1).unbind()
    n, k, block_format = weight.n // 2, weight.k, weight.format
    gate, up = (
        Fp4Weight(torch.cat(own), row_scale, n, k, block_format)
        for own, row_scale in zip(sides, row_scales, strict=True)
    )
    return gate, up


def raised(weight: Fp4Weight) -> tuple[torch.Tensor, torch.Tensor]:
    """The tiles of a weight in which each row's largest scale is 2^8 or more, and its rows' factors, float32."""
    rows = weight.data.shape[0] * TILE_ROWS
    if weight.row_scale is not None:
        return weight.data, weight.row_scale
    factors, parts = torch.empty(rows, dtype=torch.float32, device=weight.data.device), []
    slab = max(1, _SLAB // (TILE_ROWS * TILE_COLS * weight.data.shape[1]))
    for tiles, own in zip(weight.data.split(slab), factors.split(slab * TILE_ROWS), strict=True):
        codes, scales = unpack(tiles, weight.format)
        scales, own[:] = _raise_nvfp4(codes, scales)
        parts.append(pack(codes, scales))
    return torch.cat(parts), factors


def rounded_to_e4m3(weight: Fp4Weight, row_scale: torch.Tensor) -> torch.Tensor:
    """float32 [n, k]: the values that products in FP8 multiply, with their row's scale; of gates and ups, gates first.

    Divided by it, each is rounded to the nearest E4M3, ties to even; one that is less than 2^-6 then, to a multiple of
    2^-9 that is less than 2^-9 away.
    """
    codes, bytes_ = unpack(weight.data, weight.format)
    shift = row_scale.unsqueeze(-1) if weight.format is NVFP4 else torch.full_like(row_scale, MXFP4_UNIT).unsqueeze(-1)
    scales = decode_scales(bytes_)
    scales = (scales + torch.exp2(torch.floor(torch.log2(scales))) * _MARK) / shift
    magnitudes = decode_e2m1(codes & 7) * scales.repeat_interleave(weight.format.block, -1)
    least = _STEP / 16  # the products are made in bf16, whose distances near zero are these
    magnitudes = torch.where(magnitudes < _NORMAL, torch.round(magnitudes / least) * least, magnitudes)
    power = torch.exp2(torch.floor(torch.log2(magnitudes.clamp_min(_NORMAL))))
    cut = torch.floor(magnitudes / (power / 8)) * (power / 8)
    values = torch.where(codes & 8 != 0, -cut, cut) * row_scale.unsqueeze(-1)
    values = values[: weight.n, : weight.k]
    return gates_first(values) if weight.gated else values

"""FP4 weights of a layer of experts, in the order in which its kernels read them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from jitfp4.dtypes import CODE_DTYPES, SF_DTYPES
from jitfp4.errors import ArgumentError, ArgumentTypeError, renamed
from jitfp4.formats import MXFP4, NVFP4, BlockFormat
from jitfp4.layouts import SfLayout, ceil_div, padded_shape, round_up
from jitfp4.public import checked
from jitfp4.reference.formats import unswizzle
from jitfp4.tensors import (
    check_contiguous,
    check_device,
    check_dtype,
    check_layout,
    check_same_device,
    check_strided,
)
from jitfp4.weight import (
    MXFP4_UNIT,
    ORDERS,
    TILE_COLS,
    TILE_ROWS,
    Fp4Weight,
    gate_up_order,
    places_of,
    prepare,
    rounded_to_e4m3,
    tile_bytes,
)

MULTIPLE = 32  # of the hidden and of the intermediate size
_MOST_SIZE = 1 << 31
MOST_EXPERTS = 1024
_GROUP = 1 << 26  # bytes of codes that are brought into order at a time
_ORDER = 1  # the number of the order of a prepared layer: another one whenever it changes, with that of Fp4Weight
_NVFP4_UNIT = 8.0  # in E4M3, of rows whose largest scale is at least 256: prepare() gives them
_BIASES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Fp4Experts:
    """The weights of ``experts`` experts, as prepare_fp4_experts() makes them.

    A matrix of n rows and k columns is tiles of 64 rows by 128 columns, as jitfp4/weight.py describes them. In ``w13``
    each block of 16 rows has the gates of eight features and, behind them, their up rows: a thread of the tensor
    cores has both of a feature. Without a gate, rows are in their order.

    Attributes:
        w13: uint8 ``[experts, ceil(n / 64), ceil(hidden / 128), 4608 or 4352]``, n = 2 inter, without a gate inter.
        scale13: float32 ``[experts, round_up(n, 64)]``, the factor of each row's sum, in the order of w13's rows.
        bias13: float32, as scale13; None for none.
        w2, scale2, bias2: the same of ``[hidden, inter]``.
        hidden, inter: logical sizes.
        gated: whether w13 has gates.
        format: of the blocks.
    """

    w13: torch.Tensor
    scale13: torch.Tensor
    bias13: torch.Tensor | None
    w2: torch.Tensor
    scale2: torch.Tensor
    bias2: torch.Tensor | None
    hidden: int
    inter: int
    gated: bool
    format: BlockFormat

    def __post_init__(self) -> None:
        for name, size in (("hidden", self.hidden), ("inter", self.inter)):
            if type(size) is not int:
                raise ArgumentTypeError(name, type(size).__name__, "an int")
            if size <= 0 or size % MULTIPLE or size >= _MOST_SIZE:
                raise ArgumentError(name, str(size)[:40], f"a positive multiple of {MULTIPLE} below 2^31")
        if not isinstance(self.format, BlockFormat):
            raise ArgumentTypeError("format", type(self.format).__name__, "a BlockFormat")
        if type(self.gated) is not bool:
            raise ArgumentTypeError("gated", type(self.gated).__name__, "a bool")
        experts = self.w13.shape[0] if isinstance(self.w13, torch.Tensor) and self.w13.dim() else 0
        if not 0 < experts <= MOST_EXPERTS:
            raise ArgumentError("w13", f"{experts} experts", f"1 to {MOST_EXPERTS}")
        for suffix, rows, cols in (("13", self.rows13, self.hidden), ("2", self.hidden, self.inter)):
            tiles = ceil_div(rows, TILE_ROWS)
            shape = (experts, tiles, ceil_div(cols, TILE_COLS), tile_bytes(self.format))
            self._check(f"w{suffix}", torch.uint8, shape)
            self._check(f"scale{suffix}", torch.float32, (experts, tiles * TILE_ROWS))
            if getattr(self, f"bias{suffix}") is not None:
                self._check(f"bias{suffix}", torch.float32, (experts, tiles * TILE_ROWS))

    def _check(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        tensor = getattr(self, name)
        check_dtype(name, tensor, (dtype,))
        check_strided(name, tensor)
        check_same_device(name, tensor, self.w13)
        if tuple(tensor.shape) != shape:
            raise ArgumentError(name, f"shape {tuple(tensor.shape)}", f"{shape}")
        check_contiguous(name, tensor)

    @property
    def experts(self) -> int:
        return self.w13.shape[0]

    @property
    def rows13(self) -> int:
        """Rows of w13."""
        return 2 * self.inter if self.gated else self.inter

    def tensors(self) -> dict[str, torch.Tensor]:
        """The layer as named tensors, for safetensors or a state_dict; ``size`` also tells the order of the codes."""
        size = torch.tensor([self.hidden, self.inter, self.gated, self.format is MXFP4, _ORDER])
        named = {name: getattr(self, name) for name in _PARTS}
        return {"size": size, **{name: tensor for name, tensor in named.items() if tensor is not None}}

    @staticmethod
    def from_tensors(named: Mapping[str, torch.Tensor]) -> Fp4Experts:
        """The inverse of tensors().

        Raises ArgumentError if they do not fit together, or if another release of jitfp4 prepared them in an order that
        this one does not read: then call prepare_fp4_experts() again.
        """
        if not isinstance(named, Mapping):
            raise ArgumentTypeError("named", type(named).__name__, "a mapping, as tensors() gives it")
        needed = {"size", *_PARTS} - {"bias13", "bias2"}
        if not needed <= named.keys() <= {"size", *_PARTS}:
            raise ArgumentError("named", sorted(map(str, named)), f"{', '.join(sorted(needed))} and biases")
        check_dtype("named, size", named["size"], (torch.int64,))
        if tuple(named["size"].shape) != (5,) or named["size"].is_meta:
            raise ArgumentError("named, size", f"shape {tuple(named['size'].shape)}", "(5,), with values")
        hidden, inter, gated, is_mxfp4, order = named["size"].tolist()
        if order != _ORDER:
            raise ArgumentError("named, size", f"order {order} of prepared experts", f"order {_ORDER}: prepare again")
        parts = {name: named.get(name) for name in _PARTS}
        kind = MXFP4 if is_mxfp4 else NVFP4
        try:
            return Fp4Experts(**parts, hidden=hidden, inter=inter, gated=bool(gated), format=kind)  # type: ignore[arg-type]
        except ArgumentError as error:
            raise renamed(error, {part: f"named, {part}" for part in (*_PARTS, "hidden", "inter")}) from None

    def dequantize(self, expert: int) -> tuple[Matrix, Matrix]:
        """w13 and w2 of one expert, exact; rows of w13 are gates and then up rows."""
        if type(expert) is not int:
            raise ArgumentTypeError("expert", type(expert).__name__, "an int")
        if not 0 <= expert < self.experts:
            raise ArgumentError("expert", str(expert)[:40], f"0 to {self.experts - 1}")
        one = slice(expert, expert + 1)
        bias13, bias2 = (None if bias is None else bias[one] for bias in (self.bias13, self.bias2))
        up = matrix_of(self.w13[one], self.scale13[one], bias13, (self.rows13, self.hidden))
        down = matrix_of(self.w2[one], self.scale2[one], bias2, (self.hidden, self.inter))
        return gates_first(up) if self.gated else up, down


_PARTS = ("w13", "scale13", "bias13", "w2", "scale2", "bias2")


class Matrix(NamedTuple):
    """float32 [n, k], and the factor and the bias of each row's sum [n]."""

    weight: torch.Tensor
    scale: torch.Tensor
    bias: torch.Tensor | None


def matrix_of(
    data: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, size: tuple[int, int], *, fp8: bool = False
) -> Matrix:
    """The matrix [n, k] of the one expert that these prepared tensors hold; with ``fp8``, rounded to E4M3."""
    n, k = size
    block_format = NVFP4 if data.shape[-1] == tile_bytes(NVFP4) else MXFP4
    ones = (
        torch.ones(data.shape[1] * TILE_ROWS, dtype=torch.float32, device=data.device)
        if block_format is MXFP4
        else None
    )
    prepared = Fp4Weight(data[0], ones, n, k, block_format)
    unit = torch.full_like(scale[0], _NVFP4_UNIT if block_format is NVFP4 else MXFP4_UNIT)
    weight = rounded_to_e4m3(prepared, unit) if fp8 else prepared.dequantize()
    return Matrix(weight, scale[0, :n], None if bias is None else bias[0, :n])


def gates_first(matrix: Matrix) -> Matrix:
    """A prepared w13 with the rows of gates before the up rows."""
    order = gate_up_order(len(matrix.scale) // 2, matrix.scale.device)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    return Matrix(*(None if part is None else part[places] for part in matrix))  # type: ignore[arg-type]


@checked
def prepare_fp4_experts(
    w13: torch.Tensor,
    w13_scales: torch.Tensor,
    w2: torch.Tensor,
    w2_scales: torch.Tensor,
    *,
    order: str | None,
    sf_layout: SfLayout,
    block_size: int = 16,
    w13_alpha: torch.Tensor | None = None,
    w2_alpha: torch.Tensor | None = None,
    w13_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
) -> Fp4Experts:
    """Bring the FP4 weights of experts into the order in which fp4_experts() reads them; once, when a model is loaded.

    Args:
        w13: codes [experts, 2 inter, hidden / 2], uint8 or float4_e2m1fn_x2, contiguous, element 2j in the low nibble
            of byte j; without gates [experts, inter, hidden / 2]. hidden and inter are multiples of 32.
        w13_scales: block scales in ``sf_layout`` for each expert, [experts, ...] as by SfLayout.shape(), or flat behind
            the first dimension; E4M3 for blocks of 16, UE8M0 for 32, or the same bytes as uint8.
        w2, w2_scales: the same of [experts, hidden, inter / 2].
        order: of the rows of w13: "concatenated gate,up", "concatenated up,gate", or "interleaved" (gate and up of a
            feature beside each other, as in gpt-oss); None for experts without a gate.
        sf_layout: layout of both scales.
        block_size: 16 for NVFP4, 32 for MXFP4.
        w13_alpha: float32 [experts] or, for gates and up rows apart, [experts, 2]: global *decode* scales, factors of
            the products. None means 1.
        w2_alpha: float32 [experts].
        w13_bias: [experts, 2 inter] (or inter) in the order of w13's rows, float32, bf16 or fp16.
        w2_bias: [experts, hidden].
    Returns:
        The layer on the same device; see Fp4Experts. It takes as much memory as codes and scales, with sizes rounded up
        to 64 rows and 128 columns, and 4 to 8 bytes for each row.
    Numerics:
        Exact, except that MXFP4 blocks become zero if their scale is less than 2^-28 of the largest scale in their row.
    Raises:
        ArgumentError, ArgumentTypeError
    """
    if order is not None and order not in ORDERS:
        raise ArgumentError("order", repr(order), " or ".join(map(repr, (*ORDERS, None))))
    if block_size not in (NVFP4.block, MXFP4.block):
        raise ArgumentError("block_size", block_size, "16 or 32")
    block_format = NVFP4 if block_size == NVFP4.block else MXFP4
    layout = check_layout("sf_layout", sf_layout)
    experts, rows, hidden = _check_codes("w13", w13, w13)
    _, _, inter = _check_codes("w2", w2, w13)
    wanted = inter * (1 if order is None else 2)
    if rows != wanted:
        raise ArgumentError("w13", f"{rows} rows", f"{wanted}, as w2's columns and the order {order!r} need")
    if tuple(w2.shape[:2]) != (experts, hidden):
        raise ArgumentError("w2", f"shape {tuple(w2.shape)}", f"({experts}, {hidden}, {inter // 2})")
    scales13 = _linear("w13_scales", w13_scales, (experts, rows, hidden), block_format, layout, w13)
    scales2 = _linear("w2_scales", w2_scales, (experts, hidden, inter), block_format, layout, w13)
    places = None if order is None else places_of(order, inter, w13.device)
    alpha13 = _alphas("w13_alpha", w13_alpha, experts, order is not None, w13)
    if places is not None:
        alpha13 = alpha13.expand(experts, 2).repeat_interleave(inter, 1)[:, gate_up_order(inter, w13.device)]
    alpha2 = _alphas("w2_alpha", w2_alpha, experts, False, w13)
    packed13, scale13 = _pack(w13, scales13, places, alpha13, block_format)
    packed2, scale2 = _pack(w2, scales2, None, alpha2, block_format)
    bias13 = _bias("w13_bias", w13_bias, (experts, rows), places, w13)
    bias2 = _bias("w2_bias", w2_bias, (experts, hidden), None, w13)
    return Fp4Experts(packed13, scale13, bias13, packed2, scale2, bias2, hidden, inter, order is not None, block_format)


def _check_codes(name: str, codes: torch.Tensor, like: torch.Tensor) -> tuple[int, int, int]:
    check_dtype(name, codes, CODE_DTYPES)
    check_device(name, codes)
    check_same_device(name, codes, like)
    if codes.dim() != 3:
        raise ArgumentError(name, f"shape {tuple(codes.shape)}", "[experts, n, k / 2]")
    check_contiguous(name, codes)
    experts, n, k = codes.shape[0], codes.shape[1], 2 * codes.shape[2]
    if not 0 < experts <= MOST_EXPERTS:
        raise ArgumentError(name, f"{experts} experts", f"1 to {MOST_EXPERTS}")
    if n == 0 or n % MULTIPLE or k == 0 or k % MULTIPLE:
        raise ArgumentError(name, f"n, k = {n}, {k}", f"positive multiples of {MULTIPLE}")
    return experts, n, k


def _linear(
    name: str,
    scales: torch.Tensor,
    size: tuple[int, int, int],
    block_format: BlockFormat,
    layout: SfLayout,
    like: torch.Tensor,
) -> torch.Tensor:
    """Scales as bytes [experts, n, k / block]."""
    experts, n, k = size
    check_dtype(name, scales, SF_DTYPES[block_format])
    check_same_device(name, scales, like)
    check_contiguous(name, scales)
    padded = padded_shape(layout, n, k // block_format.block)
    if scales.numel() != experts * math.prod(padded) or scales.shape[:1] != (experts,):
        raise ArgumentError(name, f"shape {tuple(scales.shape)}", f"({experts}, {padded[0]}, {padded[1]})")
    return unswizzle(scales.view(torch.uint8).view(experts, *padded), layout, n, k // block_format.block)


def _alphas(name: str, alpha: torch.Tensor | None, experts: int, gated: bool, like: torch.Tensor) -> torch.Tensor:
    """[experts, 1], or [experts, 2] of gates and up rows."""
    if alpha is None:
        return torch.ones(experts, 1, dtype=torch.float32, device=like.device)
    check_dtype(name, alpha, (torch.float32,))
    check_same_device(name, alpha, like)
    check_contiguous(name, alpha)
    shapes = [(experts,), (experts, 1), *([(experts, 2)] if gated else [])]
    if tuple(alpha.shape) not in shapes:
        raise ArgumentError(name, f"shape {tuple(alpha.shape)}", " or ".join(map(str, shapes)))
    return alpha.view(experts, -1)


def _bias(
    name: str, bias: torch.Tensor | None, shape: tuple[int, int], places: torch.Tensor | None, like: torch.Tensor
) -> torch.Tensor | None:
    if bias is None:
        return None
    check_dtype(name, bias, _BIASES)
    check_same_device(name, bias, like)
    check_contiguous(name, bias)
    if tuple(bias.shape) != shape:
        raise ArgumentError(name, f"shape {tuple(bias.shape)}", f"{shape}")
    ordered = bias.float() if places is None else bias.float()[:, places]
    padded = torch.zeros(shape[0], round_up(shape[1], TILE_ROWS), dtype=torch.float32, device=bias.device)
    padded[:, : shape[1]] = ordered
    return padded


def _pack(
    codes: torch.Tensor,
    scales: torch.Tensor,
    places: torch.Tensor | None,
    alpha: torch.Tensor,
    block_format: BlockFormat,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tiles of every expert, and the factors of its rows: alpha [experts, 1 or n] times powers of two.

    A row with a scale that is NaN has a factor of NaN: E4M3 has no room for it.
    """
    experts, n, half_k = codes.shape
    tiles = ceil_div(n, TILE_ROWS)
    shape = (experts, tiles, ceil_div(2 * half_k, TILE_COLS), tile_bytes(block_format))
    data = torch.empty(shape, dtype=torch.uint8, device=codes.device)
    factors = torch.ones(experts, tiles * TILE_ROWS, dtype=torch.float32, device=codes.device)
    factors[:, :n] = alpha
    below = tiles * TILE_ROWS - n
    group = max(1, _GROUP // (tiles * TILE_ROWS * half_k))
    for first in range(0, experts, group):
        some = slice(first, first + group)
        rows, of_rows = codes[some].view(torch.uint8), scales[some]
        if places is not None:
            rows, of_rows = rows[:, places], of_rows[:, places]
        if below:
            rows, of_rows = pad(rows, (0, 0, 0, below)), pad(of_rows, (0, 0, 0, below))
        powers = torch.ones(rows.shape[0] * rows.shape[1], dtype=torch.float32, device=codes.device)
        weight = prepare(rows.flatten(0, 1), of_rows.flatten(0, 1), block_format, powers)
        data[some] = weight.data.view(-1, *shape[1:])
        own = powers if weight.row_scale is None else weight.row_scale
        is_nan = of_rows & 0x7F == 0x7F if block_format is NVFP4 else of_rows == 0xFF
        own = own.masked_fill(is_nan.flatten(0, 1).any(-1), torch.nan)
        factors[some, :n] *= own.view(-1, tiles * TILE_ROWS)[:, :n]
    return data, factors

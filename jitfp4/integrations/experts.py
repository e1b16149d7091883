"""A layer of FP4 experts as a torch module: prepared from floats, or from a checkpoint of one of several kinds."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from jitfp4.errors import ArgumentError
from jitfp4.families.experts import Fp4Experts, fp4_experts, prepare_fp4_experts
from jitfp4.families.experts.weights import MOST_EXPERTS
from jitfp4.formats import MXFP4, BlockFormat
from jitfp4.integrations import fp8
from jitfp4.integrations.checkpoints import Layer, Source, aligned
from jitfp4.integrations.layers import Expected, Fp4Linear, quantized
from jitfp4.layouts import SfLayout
from jitfp4.weight import raised

MULTIPLE = 32  # of both sizes
_SIDES = ("gate_up_proj", "down_proj")
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_PARTS = ("w13", "scale13", "bias13", "w2", "scale2", "bias2", "size")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Of a layer of gated experts. ``order`` of rows of gates and up projections as prepare_fp4_experts() names it.

    ``transposed``: floats are [in, out]. ``activation`` and constants as for fp4_experts().
    """

    experts: int
    hidden: int
    inter: int
    biased: bool
    order: str
    transposed: bool
    activation: str
    swiglu_alpha: float | None = None
    swiglu_limit: float | None = None


def quantized_stack(weights: torch.Tensor, transposed: bool, block_format: BlockFormat) -> list[Layer]:
    """Each expert's layer from float weights [experts, out, in], or [experts, in, out] if ``transposed``."""
    return [quantized(weight.T if transposed else weight, block_format) for weight in weights]


class ExpertsModule(nn.Module):
    """Experts with prepared weights: buffers are Fp4Experts.tensors().

    Before finish() there are buffers for what a checkpoint has instead: floats, ``gate_up_proj`` and ``down_proj``;
    gpt-oss's ``..._blocks`` and ``..._scales``; or modules ``0.gate_proj`` and so on.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self._experts: Fp4Experts | None = None
        self._source: Source | None = None
        self.in_fp8 = False
        self.appended = 0  # experts that all tokens have
        for part in _PARTS:
            self.register_buffer(part, None)

    def expect_floats(self, dtype: torch.dtype) -> None:
        """Have float buffers, which somebody replaces by what stacked() gives, and more of these."""
        s = self.shape
        for side, rows, cols in ((_SIDES[0], 2 * s.inter, s.hidden), (_SIDES[1], s.hidden, s.inter)):
            size = (s.experts, cols, rows) if s.transposed else (s.experts, rows, cols)
            self.register_buffer(side, torch.empty(size, dtype=dtype))
            self.register_buffer(f"{side}_scales", torch.empty(1, dtype=torch.uint8))
            self.register_buffer(f"{side}_alpha", torch.empty(1, dtype=torch.float32))
        self._expect_biases(dtype)

    def expect(self, source: Source, kinds: Mapping[str, Collection[str]], dtype: torch.dtype) -> None:
        """Have buffers for what a checkpoint of ``source`` has: tensors by the name of the layer within this one.

        The name of this layer itself is "".
        """
        self._source, s = source, self.shape
        if source is Source.PREPARED:
            for part in kinds[""]:
                kind = torch.int64 if part == "size" else torch.uint8 if part in ("w13", "w2") else torch.float32
                self.register_buffer(part, torch.empty(1, dtype=kind))
            return
        self._expect_biases(dtype)
        sizes = {"gate_proj": (s.hidden, s.inter), "up_proj": (s.hidden, s.inter), "down_proj": (s.inter, s.hidden)}
        if source is Source.GPT_OSS:
            for side, rows, cols in ((_SIDES[0], 2 * s.inter, s.hidden), (_SIDES[1], s.hidden, s.inter)):
                blocks = (s.experts, rows, cols // MXFP4.block)
                self.register_buffer(f"{side}_blocks", torch.empty(*blocks, 16, dtype=torch.uint8))
                self.register_buffer(f"{side}_scales", torch.empty(blocks, dtype=torch.uint8))
            return
        for expert in range(s.experts):
            holder = nn.Module()
            for projection, size in sizes.items():
                layer = Expected(*size)
                layer.expect(source, kinds.get(f"{expert}.{projection}", ()))
                holder.add_module(projection, layer)
            self.add_module(str(expert), holder)

    def _expect_biases(self, dtype: torch.dtype) -> None:
        if self.shape.biased:
            s = self.shape
            self.register_buffer("gate_up_proj_bias", torch.empty(s.experts, 2 * s.inter, dtype=dtype))
            self.register_buffer("down_proj_bias", torch.empty(s.experts, s.hidden, dtype=dtype))

    def finish(self, name: str) -> None:
        """Prepare the experts of what was loaded; ``name`` is the layer's. Raises ArgumentError."""
        if self._source is Source.PREPARED:
            named = {part: aligned(value) for part in _PARTS if (value := getattr(self, part)) is not None}
            self.assign(Fp4Experts.from_tensors(named))
            return
        if self._source is None:
            sides = [self._side_of_floats(side) for side in _SIDES]
        elif self._source is Source.GPT_OSS:
            sides = [
                _Side(_pop(self, f"{side}_blocks").flatten(2), _pop(self, f"{side}_scales"), None) for side in _SIDES
            ]
        else:
            sides = self._sides_of_experts(name)
        first, second = sides
        biases = [_pop(self, f"{side}_bias") if self.shape.biased else None for side in _SIDES]
        apart = self._source not in (None, Source.GPT_OSS)
        self.assign(
            prepare_fp4_experts(
                aligned(first.codes),
                aligned(first.scales),
                aligned(second.codes),
                aligned(second.scales),
                order="concatenated gate,up" if apart else self.shape.order,
                sf_layout=SfLayout.layout_linear,
                block_size=2 * first.codes.shape[-1] // first.scales.shape[-1],
                w13_alpha=first.alpha,
                w2_alpha=None if second.alpha is None else second.alpha.flatten(),
                w13_bias=biases[0],
                w2_bias=biases[1],
            )
        )
        self._source = Source.PREPARED

    def _side_of_floats(self, side: str) -> _Side:
        alpha = _pop(self, f"{side}_alpha")
        scales = _pop(self, f"{side}_scales")
        return _Side(_pop(self, side), scales, alpha if scales.dtype == torch.float8_e4m3fn else None)

    def _sides_of_experts(self, name: str) -> list[_Side]:
        layers: dict[str, list[Layer]] = {projection: [] for projection in _PROJECTIONS}
        for expert in range(self.shape.experts):
            for projection, found in layers.items():
                module = self.get_submodule(f"{expert}.{projection}")
                if not isinstance(module, Expected):
                    raise ArgumentError(f"{name}.{expert}.{projection}", type(module).__name__, "an FP4 layer")
                found.append(module.read(f"{name}.{expert}.{projection}"))
            delattr(self, str(expert))
        gate, up, down = (_Side.of(found) for found in layers.values())
        alpha = None if gate.alpha is None or up.alpha is None else torch.cat((gate.alpha, up.alpha), 1)
        joined = _Side(torch.cat((gate.codes, up.codes), 1), torch.cat((gate.scales, up.scales), 1), alpha)
        return [joined, down]

    def assign(self, experts: Fp4Experts) -> None:
        """Take prepared experts."""
        for part, tensor in experts.tensors().items():
            self.register_buffer(part, tensor)
        self._experts = experts

    def takes(self, gate_up: Fp4Linear, down: Fp4Linear) -> bool:
        """Whether append() can take these layers: of the size, the format and the activation of the experts."""
        s, format_ = self.shape, self.experts.format
        sizes = (gate_up.prepared.n, gate_up.prepared.k, down.prepared.n, down.prepared.k)
        plain = (s.activation, s.swiglu_alpha, s.swiglu_limit, s.biased) == ("swiglu", None, None, False)
        alike = gate_up.prepared.format is down.prepared.format is format_ and gate_up.prepared.gated
        floats = gate_up.bias is not None or down.bias is not None
        room = s.experts < MOST_EXPERTS and not self.appended
        return room and plain and alike and not floats and sizes == (2 * s.inter, s.hidden, s.hidden, s.inter)

    def append(self, gate_up: Fp4Linear, down: Fp4Linear) -> None:
        """Have one more expert, an MLP's: the layer of its gates and ups, and the one behind them.

        State dicts have the others only.
        """
        parts: dict[str, Any] = {}
        for suffix, layer in (("13", gate_up), ("2", down)):
            data, factors = raised(layer.prepared)
            factors = factors if layer.alpha is None else factors * layer.alpha
            for name, tensor in ((f"w{suffix}", data), (f"scale{suffix}", factors)):
                parts[name] = torch.cat((getattr(self.experts, name), tensor.unsqueeze(0)))
        self.assign(replace(self.experts, **parts))
        self.shape, self.appended = replace(self.shape, experts=self.shape.experts + 1), 1
        self.register_state_dict_post_hook(_without_last)  # type: ignore[no-untyped-call]

    @property
    def experts(self) -> Fp4Experts:
        """The weights. Raises ArgumentError if there are none yet."""
        if self._experts is None:
            raise ArgumentError("experts", "a layer that has no weights yet", "assign() or finish() first")
        return self._experts

    def multiply_in_fp8(self) -> None:
        """Have activations in E4M3 where experts have many rows in the mean. Raises ArgumentError."""
        fp8.check_gpu(self.experts.w13)
        self.in_fp8 = True

    def forward(
        self,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
        residual: torch.Tensor | None = None,
    ) -> Any:
        """[tokens, hidden] of a 16-bit dtype, [tokens, slots], [tokens, slots] to [tokens, hidden].

        ``residual`` of the same shape and dtype is added to the results.
        """
        many = fp8.least_tokens(self.shape.experts, top_k_index.shape[1])
        dtype = hidden_states.dtype if hidden_states.dtype in (torch.bfloat16, torch.float16) else torch.bfloat16
        added = residual if residual is not None and residual.dtype == dtype == hidden_states.dtype else None
        out = fp4_experts(
            hidden_states.to(dtype).contiguous(),
            self.experts,
            top_k_index.contiguous(),
            top_k_weights.float().contiguous(),
            activation=self.shape.activation,
            swiglu_alpha=self.shape.swiglu_alpha,
            swiglu_limit=self.shape.swiglu_limit,
            activations="fp8" if self.in_fp8 and top_k_index.shape[0] >= many else None,
            residual=added,
        ).to(hidden_states.dtype)
        return out if residual is None or added is not None else residual + out

    def _apply(self, fn: Any, recurse: bool = True) -> ExpertsModule:
        """As torch's, but factors and biases keep their dtype."""
        before = {part: getattr(self, part) for part in _PARTS}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for part, was in before.items():
            if was is not None and was.dtype == torch.float32:
                now = getattr(self, part)
                setattr(self, part, (now if was.is_meta else was).to(now.device, torch.float32))
        if self._experts is not None:
            named = {part: value for part in _PARTS if (value := getattr(self, part)) is not None}
            self._experts = Fp4Experts.from_tensors(named)
        return self

    def extra_repr(self) -> str:
        """What repr() tells of the layer."""
        return f"experts={self.shape.experts}, hidden={self.shape.hidden}, inter={self.shape.inter}"


@dataclass(frozen=True, slots=True)
class _Side:
    """Codes [experts, rows, cols / 2], scales, and decode scales float32 [experts, 1]."""

    codes: torch.Tensor
    scales: torch.Tensor
    alpha: torch.Tensor | None

    @staticmethod
    def of(layers: list[Layer]) -> _Side:
        alphas = [layer.decode_scale for layer in layers if layer.decode_scale is not None]
        codes, scales = (torch.stack([getattr(layer, part) for layer in layers]) for part in ("codes", "scales"))
        return _Side(codes, scales, torch.stack(alphas) if alphas else None)


def stacked(name: str, weights: torch.Tensor, transposed: bool, block_format: BlockFormat) -> dict[str, torch.Tensor]:
    """Codes, scales and decode scales of float experts, by the names that expect_floats() has for ``name``."""
    side = _Side.of(quantized_stack(weights, transposed, block_format))
    alpha = torch.ones(len(weights), 1, device=weights.device) if side.alpha is None else side.alpha
    return {name: side.codes, f"{name}_scales": side.scales, f"{name}_alpha": alpha}


def _without_last(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Let a state dict have no expert that was appended."""
    del module
    for part in _PARTS:
        if part != "size" and (name := f"{prefix}{part}") in state:
            state[name] = state[name][:-1]


def _pop(module: nn.Module, name: str) -> torch.Tensor:
    tensor = getattr(module, name)
    delattr(module, name)
    return tensor  # type: ignore[no-any-return]

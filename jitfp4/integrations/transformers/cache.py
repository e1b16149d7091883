"""Keys and values in NVFP4 for transformers' models: pages of fixed size and place, so that CUDA graphs can replay.

Request b of a batch owns the pages ``b * columns`` to ``(b + 1) * columns - 1`` of every layer. Tokens of the left
padding are not stored: each request has its own length, which only the device knows. What a layer appends is appended
by the attention function, which is told of the padding: see attention.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import StaticCache, StaticLayer

from jitfp4.errors import ArgumentError
from jitfp4.families.attention.api import new_workspace
from jitfp4.families.kv import nvfp4_quantize_append_paged_kv_cache_with_slot_mapping
from jitfp4.layouts import ceil_div

PAGE = 64
_LARGEST = 448 * 6  # scale times code
_HEADROOM = 8  # later keys and values may be so many times larger than the first ones: scales are floats and have room


class Capacity(int):
    """The length of a cache whose attention needs no mask but the padding."""


@dataclass(frozen=True, slots=True)
class Appended:
    """New keys and values [batch, kv_heads, tokens, d], and the layer that is to hold them."""

    layer: Nvfp4Layer
    key: torch.Tensor
    value: torch.Tensor


class Requests:
    """What layers of one device share: lengths of the requests, where their new tokens go, scratch memory."""

    def __init__(self, owner: int, batch: int, columns: int, device: torch.device) -> None:
        self.owner, self.batch, self.tokens = owner, batch, columns * PAGE
        self.lengths = torch.zeros(batch, dtype=torch.int32, device=device)
        self.tables = torch.arange(batch * columns, dtype=torch.int32, device=device).view(batch, columns)
        self.workspace = new_workspace(device)
        self.slots = torch.zeros(batch, dtype=torch.int64, device=device)
        self.ends = torch.zeros(batch + 1, dtype=torch.int32, device=device)
        self._bases = torch.arange(batch, device=device).unsqueeze(1) * self.tokens
        self._rotation: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    def step(self, count: int, mask: torch.Tensor | None) -> None:
        """``count`` new tokens of each request, of which ``mask`` [batch, tokens so far] says what is left padding."""
        if count == 1:
            self.slots = (self._bases + self.lengths.unsqueeze(1)).flatten()
            self.lengths.add_(1)
            return
        device = self.lengths.device
        numbers = torch.arange(count, device=device).unsqueeze(0)
        self.ends = torch.arange(self.batch + 1, dtype=torch.int32, device=device) * count
        if mask is None:
            self.slots = (self._bases + self.lengths.unsqueeze(1) + numbers).flatten()
            self.lengths.add_(count)
            return
        real = mask[:, -count:].to(device, torch.bool)
        counts = real.sum(-1, keepdim=True)
        slots = self._bases + self.lengths.unsqueeze(1) + numbers - (count - counts)
        self.slots = torch.where(real, slots, -1).flatten()
        self.lengths.add_(counts.squeeze(1).to(torch.int32))

    def rotation(self, cos: torch.Tensor, sin: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        """``cos_sin_cache`` and ``positions`` of a step's rotations [batch or 1, tokens, d], or d / 2: once a step."""
        if self._rotation is None or self._rotation[0] is not cos:
            half = head_dim // 2
            table = torch.cat((cos[..., :half], sin[..., :half]), -1).float()
            table = table.expand(self.batch, -1, -1).flatten(0, 1).contiguous()
            positions = torch.arange(table.shape[0], dtype=torch.int32, device=table.device)
            self._rotation = cos, table, positions
        return self._rotation[1:]


class Nvfp4Layer(StaticLayer):  # type: ignore[misc]
    """Keys and values of one layer: codes and block scales in pages [pages, kv_heads, page, ...].

    Args:
        max_cache_len: the most tokens of a request.
        number: of the layer.
        shared: what layers share, by device. The first layer of a device counts the steps.
        scales: decode scales of keys and values; None: from the first keys and values.
    """

    is_compileable = False

    def __init__(
        self,
        max_cache_len: int,
        number: int,
        shared: dict[torch.device, Requests],
        scales: tuple[float, float] | None,
    ) -> None:
        super().__init__(max_cache_len=max_cache_len)
        self.number, self.shared, self.given = number, shared, scales
        self.seen = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate the pages. Raises ArgumentError for keys and values of different sizes."""
        self.dtype, self.device = key_states.dtype, key_states.device
        batch, heads, _, head_dim = key_states.shape
        if value_states.shape[-1] != head_dim:
            got = f"{head_dim} and {value_states.shape[-1]}"
            raise ArgumentError("head dimensions of keys and values", got, "equal ones")
        columns = ceil_div(self.max_cache_len, PAGE)
        if self.device not in self.shared:
            self.shared[self.device] = Requests(self.number, batch, columns, self.device)
        self.requests = self.shared[self.device]
        self.order = "interleaved4" if head_dim % 64 == 0 else "linear"
        shape = (batch * columns, heads, PAGE)
        self.keys, self.values = (
            torch.zeros(*shape, head_dim // 2, dtype=torch.uint8, device=self.device) for _ in range(2)
        )
        first, second = (
            torch.zeros(*shape, head_dim // 16, dtype=torch.uint8, device=self.device).view(torch.float8_e4m3fn)
            for _ in range(2)
        )
        self.scales: tuple[torch.Tensor, torch.Tensor] = first, second
        self.factors: tuple[torch.Tensor, torch.Tensor] | None = None
        if self.given is not None:
            given = [torch.tensor([scale], dtype=torch.float32, device=self.device) for scale in self.given]
            self.factors = given[0], given[1]
        self.bmm1: torch.Tensor | None = None
        self.sinks: torch.Tensor | None = None
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> tuple[Any, Any]:
        """What the attention function is to append, twice. Raises ArgumentError when the cache is full."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.count(key_states.shape[-2])
        appended = Appended(self, key_states, value_states)
        return appended, appended

    def count(self, tokens: int) -> None:
        """Count new tokens. Raises ArgumentError when the cache is full."""
        self.seen += tokens
        if self.seen > self.max_cache_len:
            raise ArgumentError("max_cache_len", self.max_cache_len, f"at least {self.seen}, the tokens so far")

    def step(self, count: int, padding: torch.Tensor | None) -> None:
        """Places for ``count`` new tokens of each request, which the first layer of a device finds for all."""
        if self.requests.owner == self.number:
            self.requests.step(count, padding)

    def append(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write keys and values [batch * tokens, kv_heads, d] to the slots of this step."""
        if self.factors is None:
            self.factors = _scale_of(key), _scale_of(value)
        nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(
            key,
            value,
            self.requests.slots,
            (self.keys, self.values),
            self.scales,
            *self.factors,
            kv_layout="HND",
            v_sf_layout=self.order,
        )

    def products(self, scaling: float) -> tuple[torch.Tensor | float, torch.Tensor | float]:
        """What products with codes of keys and of values are to be multiplied by; for one ``scaling``."""
        if self.bmm1 is None and self.factors is not None:
            self.bmm1 = self.factors[0] * scaling
        return (scaling, 1.0) if self.bmm1 is None or self.factors is None else (self.bmm1, self.factors[1])

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:  # noqa: ARG002
        """A length that tells the mask function that no mask is needed."""
        return Capacity(self.max_cache_len), 0

    def get_seq_length(self) -> int:
        """Tokens so far, the padding included."""
        return self.seen

    def reset(self) -> None:
        """Forget all tokens; scales stay."""
        self.seen = 0
        if self.is_initialized:
            self.requests.lengths.zero_()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Let request b go on as what was request ``beam_idx[b]``."""
        if not self.is_initialized:
            return
        chosen = beam_idx.to(self.device)
        for pages in (self.keys, self.values, *(scales.view(torch.uint8) for scales in self.scales)):
            owned = pages.unflatten(0, (self.requests.batch, -1))
            owned.copy_(owned[chosen])
        if self.requests.owner == self.number:
            self.requests.lengths.copy_(self.requests.lengths[chosen])


class Nvfp4Cache(StaticCache):  # type: ignore[misc]
    """A cache in NVFP4 for models with ``attn_implementation="jitfp4"``; other layers than attention are transformers'.

    Args:
        config: of the model.
        max_cache_len: the most tokens that a request will have, padding included.
        scales: for each layer of attention the decode scales of keys and of values, as calibrate() gives them; None:
            from the first keys and values of each layer, with room for ones that are 8 times as large.
    Raises:
        ArgumentError: if the model has another attention, or there are not as many scales as layers.
    """

    def __init__(self, config: Any, max_cache_len: int, scales: Sequence[tuple[float, float]] | None = None) -> None:
        text = config.get_text_config(decoder=True)
        if text._attn_implementation != "jitfp4":
            raise ArgumentError("config", f"attn_implementation={text._attn_implementation!r}", "'jitfp4'")
        super().__init__(config, max_cache_len)
        shared: dict[torch.device, Requests] = {}
        places = [i for i, layer in enumerate(self.layers) if isinstance(layer, StaticLayer)]
        if scales is not None and len(scales) != len(places):
            raise ArgumentError("scales", f"{len(scales)} pairs", f"{len(places)}, one for each layer of attention")
        for number, i in enumerate(places):
            self.layers[i] = Nvfp4Layer(max_cache_len, i, shared, None if scales is None else scales[number])

    def nbytes(self) -> int:
        """Bytes of codes and scales so far."""
        held = [layer for layer in self.layers if isinstance(layer, Nvfp4Layer) and layer.is_initialized]
        return sum(part.nbytes for layer in held for part in (layer.keys, layer.values, *layer.scales))


@torch.no_grad()
def calibrate(model: Any, tokens: torch.Tensor) -> list[tuple[float, float]]:
    """The scales of Nvfp4Cache from the keys and values of tokens [batch, length], with an ordinary cache."""
    cache = model(tokens, use_cache=True).past_key_values
    layers = [layer for layer in cache.layers if getattr(layer, "keys", None) is not None]
    return [
        tuple(float(states.abs().amax()) / _LARGEST for states in (layer.keys, layer.values))  # type: ignore[misc]
        for layer in layers
    ]


def _scale_of(states: torch.Tensor) -> torch.Tensor:
    """A decode scale, float32 [1]."""
    return (states.detach().abs().amax().float() * (_HEADROOM / _LARGEST)).clamp(min=2.0**-20).reshape(1)

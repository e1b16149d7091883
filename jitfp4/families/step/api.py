"""A dense model that is prepared for steps of one token."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from jitfp4 import replay
from jitfp4.dtypes import HALVES
from jitfp4.engine import Target, target_of
from jitfp4.errors import ArgumentError, ArgumentTypeError, UnsupportedArchError
from jitfp4.families.step.arguments import Arguments
from jitfp4.families.step.kernels.decode import specialise
from jitfp4.families.step.operation import DECODE_STEP, weights_of
from jitfp4.families.step.problem import HEAD_DIM, PAGE, Problem
from jitfp4.formats import NVFP4
from jitfp4.public import checked, public
from jitfp4.tensors import check_contiguous, check_device, check_dtype, check_same_device, output
from jitfp4.weight import TILE_COLS, Fp4Weight

_NAMES = ("qkv", "o", "gate_up", "down")
_V_SCALE_LAYOUTS = ("linear", "interleaved4")


class DecodeStep:
    """All layers of a dense model (Llama, Qwen2, Qwen3), for one token of one request, in one launch that keeps reading
    weights.

    Each layer is RMSNorm, the product that makes queries, keys and values, an RMSNorm of each query and key (Qwen3),
    their rotation (half rotation, all of 128 dimensions), their append to an NVFP4 cache, attention, its product, and
    RMSNorm, gate and up with SwiGLU, down. The embedding, the last norm and the head are other launches. The steps of
    more requests, and prompts, take the single functions, with the same weights: see ``weights()``. On an H200 eight
    rows in this way took 2.0 ms, and 1.7 by single launches. Windows, sinks, experts, other heads than of 128
    dimensions and MXFP4 weights are not there.

    The CTAs of a launch wait for each other, so all SMs that it counts on must become free, and calls of one object
    must follow each other. A call can be captured in a CUDA graph.
    """

    @checked
    def __init__(
        self,
        qkv: Sequence[Fp4Weight],
        o: Sequence[Fp4Weight],
        gate_up: Sequence[Fp4Weight],
        down: Sequence[Fp4Weight],
        norms: torch.Tensor,
        alphas: torch.Tensor,
        *,
        heads: int,
        kv_heads: int,
        eps: float,
        biases: torch.Tensor | None = None,
        head_norms: torch.Tensor | None = None,
    ) -> None:
        """Copies the weights of all layers to one tensor.

        Args:
            qkv, o, gate_up, down: for each layer a prepared NVFP4 weight: [(heads + 2 kv_heads) * 128, hidden], with
                the rows of queries, keys and values in that order; [hidden, heads * 128]; gates and ups that were
                prepared together, [2 inter, hidden]; [hidden, inter]. hidden and inter are multiples of 128.
            norms: bf16 or fp16 [layers, 2, hidden], contiguous: the weights of both norms.
            alphas: float32 [layers, 7], contiguous: what queries, keys, values, and the outputs of o, gates, ups and
                down are multiplied by.
            heads: query heads, of 128 dimensions; a multiple of kv_heads, at most 8 for each.
            kv_heads: heads of keys and values.
            eps: of the norms.
            biases: [layers, (heads + 2 kv_heads) * 128] of norms' dtype, contiguous: added to queries, keys and values.
            head_norms: [layers, 2, 128] of norms' dtype, contiguous: weights of norms of each query and each key.
        Raises:
            ArgumentError, ArgumentTypeError: for what does not fit together.
            UnsupportedArchError: the GPU has no kernel for the model, or fewer SMs than it needs.
        """
        layers = (qkv, o, gate_up, down)
        for name, of in zip(_NAMES, layers, strict=True):
            if not isinstance(of, (list, tuple)):
                raise ArgumentTypeError(name, type(of).__name__, "a list or tuple of Fp4Weight")
            for weight in of:
                if not isinstance(weight, Fp4Weight):
                    raise ArgumentTypeError(name, type(weight).__name__, "a sequence of Fp4Weight")
            if not of or len(of) != len(layers[0]):
                raise ArgumentError(name, f"{len(of)} weights", f"{max(1, len(layers[0]))}, one for each layer")
        for name, number in (("heads", heads), ("kv_heads", kv_heads)):
            if not isinstance(number, int) or isinstance(number, bool):
                raise ArgumentTypeError(name, type(number).__name__, "an int")
        if kv_heads < 1 or heads % kv_heads or not 0 < heads // kv_heads <= 8:
            raise ArgumentError("heads, kv_heads", f"{heads}, {kv_heads}", "1 to 8 heads for each KV head")
        check_dtype("norms", norms, tuple(HALVES))
        has = biases is not None, head_norms is not None
        self.problem = Problem(layers[0][0].k, heads, kv_heads, layers[3][0].k, HALVES[norms.dtype], *has)
        for name, size in (("qkv", self.problem.hidden), ("down", self.problem.inter)):
            if size % TILE_COLS:
                raise ArgumentError(name, f"{size} columns", f"a multiple of {TILE_COLS}")
        for name, of, (n, k) in zip(_NAMES, layers, self.problem.products, strict=True):
            for weight in of:
                got = weight.n, weight.k, weight.format is NVFP4, weight.gated
                if got != (n, k, True, name == "gate_up"):
                    gated = ", gates and ups together" if name == "gate_up" else ""
                    names = f"{name}, heads, kv_heads" if name in ("qkv", "o") else name
                    raise ArgumentError(names, f"{got[:2]}, {weight.format.name}", f"({n}, {k}), NVFP4{gated}")
        first = layers[0][0].data
        count, dtype = len(layers[0]), norms.dtype
        _check("norms", norms, dtype, (count, 2, self.problem.hidden), first)
        _check("alphas", alphas, torch.float32, (count, 7), first)
        if biases is not None:
            _check("biases", biases, dtype, (count, self.problem.products[0][0]), first)
        if head_norms is not None:
            _check("head_norms", head_norms, dtype, (count, 2, HEAD_DIM), first)
        if first.device.type == "cuda":
            _check_sms(self.problem, target_of(first), first.device)
        self.norms, self.alphas, self.eps = norms, alphas, float(eps)
        self.biases, self.head_norms = biases, head_norms
        self.data = torch.stack([torch.cat([w.data.flatten() for w in layer]) for layer in zip(*layers, strict=True)])
        self._state = torch.zeros(self.problem.state_words, dtype=torch.int64, device=first.device)

    @checked
    def weights(self, layer: int) -> tuple[Fp4Weight, Fp4Weight, Fp4Weight, Fp4Weight]:
        """The prepared weights of a layer, for other functions: views, so what they were made from can be dropped."""
        if not 0 <= layer < len(self.data):
            raise ArgumentError("layer", layer, f"0 to {len(self.data) - 1}")
        qkv, o, gate_up, down = weights_of(self.data[layer], self.problem)
        return qkv, o, gate_up, down

    @public
    def run(
        self,
        x: torch.Tensor,
        kv_cache: torch.Tensor,
        kv_cache_sf: torch.Tensor,
        block_tables: torch.Tensor,
        seq_lens: torch.Tensor,
        cos_sin_cache: torch.Tensor,
        *,
        kv_scales: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
        v_scale_layout: str = "linear",
        sm_scale: float | None = None,
        out: torch.Tensor | None = None,
        enable_pdl: bool | None = None,
    ) -> torch.Tensor:
        """One token through all layers.

        Args:
            x: [1, hidden] of norms' dtype, contiguous: the embedding of the token.
            kv_cache: uint8 [layers, 2, pages, kv_heads, 64, 64], contiguous: codes of keys and of values, pages of 64
                tokens; those of the token are written.
            kv_cache_sf: uint8 or float8_e4m3fn [layers, 2, pages, kv_heads, 64, 8], contiguous: block scales, likewise.
            block_tables: int32 [1, n], contiguous: the pages of the request.
            seq_lens: int32 [1]: its tokens with the new one, 1 to 64 n.
            cos_sin_cache: float32 [max_position, 128], contiguous: 64 cosines, then 64 sines, by whatever scaling.
            kv_scales: float32 [layers, 2], contiguous: decode scales of keys and of values; None: all are 1.
            positions: int32 [1]: the token's row of cos_sin_cache; None: the number of tokens before it.
            v_scale_layout: of the scales of values, "linear" or "interleaved4".
            sm_scale: the factor of logits; None: 128^-0.5.
            out: [1, hidden] of x's dtype to fill in place; allocated when None.
            enable_pdl: programmatic dependent launch; None means wherever the GPU has it.
        Returns:
            ``out``: the hidden values behind the last layer.
        Numerics:
            As the single functions, in this order; but a norm's factor is applied behind the product that follows, in
            float32, and sums have other orders, so results differ by roundings to 16 bits. In bf16, values from 2^95 on
            become infinite, in fp16 those that a norm's weight takes to 2^20.
        Raises:
            ArgumentError, ArgumentTypeError: before anything is written.
        """
        layers, _, hidden = self.norms.shape
        _check("x", x, self.norms.dtype, (1, hidden), self.data)
        if kv_cache.dim() != 6 or kv_cache.shape[2] == 0:
            raise ArgumentError("kv_cache", f"shape {tuple(kv_cache.shape)}", "[layers, 2, pages, kv_heads, 64, 64]")
        paged = (layers, 2, kv_cache.shape[2], self.problem.kv_heads, PAGE)
        _check("kv_cache", kv_cache, torch.uint8, (*paged, HEAD_DIM // 2), self.data)
        check_dtype("kv_cache_sf", kv_cache_sf, (torch.uint8, torch.float8_e4m3fn))
        _check("kv_cache_sf", kv_cache_sf, kv_cache_sf.dtype, (*paged, HEAD_DIM // 16), self.data)
        if block_tables.dim() != 2 or block_tables.shape[1] == 0:
            raise ArgumentError("block_tables", f"shape {tuple(block_tables.shape)}", "[1, n]")
        _check("block_tables", block_tables, torch.int32, (1, block_tables.shape[1]), self.data)
        _check("seq_lens", seq_lens, torch.int32, (1,), self.data)
        if cos_sin_cache.dim() != 2 or cos_sin_cache.shape[0] == 0:
            raise ArgumentError("cos_sin_cache", f"shape {tuple(cos_sin_cache.shape)}", f"[max_position, {HEAD_DIM}]")
        _check("cos_sin_cache", cos_sin_cache, torch.float32, (cos_sin_cache.shape[0], HEAD_DIM), self.data)
        if kv_scales is not None:
            _check("kv_scales", kv_scales, torch.float32, (layers, 2), self.data)
        if positions is not None:
            _check("positions", positions, torch.int32, (1,), self.data)
        if v_scale_layout not in _V_SCALE_LAYOUTS:
            raise ArgumentError("v_scale_layout", repr(v_scale_layout), " or ".join(map(repr, _V_SCALE_LAYOUTS)))
        result = output("out", out, (1, hidden), (x.dtype,), like=x)
        DECODE_STEP(
            Arguments(
                x=x,
                weights=self.data,
                norms=self.norms,
                head_norms=self.head_norms,
                biases=self.biases,
                alphas=self.alphas,
                kv_cache=kv_cache,
                kv_cache_sf=kv_cache_sf.view(torch.uint8),
                kv_scales=kv_scales,
                block_tables=block_tables,
                seq_lens=seq_lens,
                positions=positions,
                cos_sin_cache=cos_sin_cache,
                state=self._state,
                out=result,
                heads=self.problem.heads,
                inter=self.problem.inter,
                interleaved=v_scale_layout == _V_SCALE_LAYOUTS[1],
                eps=self.eps,
                scale=HEAD_DIM**-0.5 if sm_scale is None else sm_scale,
                enable_pdl=enable_pdl,
            )
        )
        return result


replay.unpack(
    DecodeStep,
    *("data", "norms", "head_norms", "biases", "alphas", "_state", "eps"),
    *("problem.heads", "problem.kv_heads", "problem.inter"),
)


def _check(name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], like: torch.Tensor) -> None:
    check_dtype(name, tensor, (dtype,))
    check_device(name, tensor)
    if tuple(tensor.shape) != shape:
        raise ArgumentError(name, f"shape {tuple(tensor.shape)}", f"{shape}")
    check_contiguous(name, tensor)
    check_same_device(name, tensor, like)


def _check_sms(problem: Problem, target: Target, device: torch.device) -> None:
    ctas = specialise(problem, DECODE_STEP.select(problem, target.arch)).ctas
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    if ctas > sms:
        raise UnsupportedArchError(f"a step of this model needs {ctas} SMs, and {target.gpu} has {sms}")

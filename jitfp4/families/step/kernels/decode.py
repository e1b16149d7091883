"""The kernel step/decode: one token through all layers, by CTAs that stay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jitfp4.arch import Arch
from jitfp4.families.step.arguments import Arguments
from jitfp4.families.step.problem import HEAD_DIM, PAGE, TAG_WORDS, Problem
from jitfp4.formats import NVFP4, DType
from jitfp4.kernel import Kernel, Plan
from jitfp4.layouts import ceil_div, round_up
from jitfp4.spec import F32, I64, Geometry, KernelSpec, Ptr
from jitfp4.weight import TILE_COLS, tile_bytes

_WARPS, _BLOCK = 16, 16  # of a CTA; rows of a block
_LOG2_E = 1.4426950408889634
_PAGES = 2  # that a CTA multiplies at once
_PAGE_BYTES = PAGE * (HEAD_DIM // 2 + HEAD_DIM // 16)


@dataclass(frozen=True, slots=True)
class StepTactic:
    """Up to ``splits`` CTAs share a KV head; a warp's ring has ``depth`` pieces of the weights; at most ``most_ctas``
    CTAs, unless KV heads need more.
    """

    splits: int
    depth: int
    most_ctas: int = 128


TACTICS = tuple(StepTactic(splits, depth) for splits in (32, 16, 8, 4, 2) for depth in (5, 4, 3, 2))


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec(KernelSpec):
    """``hidden_chunks`` and ``inter_chunks`` are sizes in 128 elements; the rest as in Problem and StepTactic."""

    dtype: DType
    hidden_chunks: int
    heads: int
    kv_heads: int
    inter_chunks: int
    bias: bool
    head_norms: bool
    interleaved: bool
    ctas: int
    splits: int
    depth: int

    threads = 32 * _WARPS
    tag_words = TAG_WORDS

    @property
    def problem(self) -> Problem:
        """The sizes in elements."""
        return Problem(self.hidden_chunks * TILE_COLS, self.heads, self.kv_heads, self.inter_chunks * TILE_COLS)

    @property
    def pieces(self) -> int:
        """Words of the plan of a CTA: at most as many pieces does a warp have in a layer."""
        products = self.problem.products
        return sum((self._rows(n) // _BLOCK // 2 + 1) * ceil_div(k, TILE_COLS * _WARPS) for n, k in products)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a CTA: rings, two pages, x, queries, sums of the warps, hidden values, sines, the plan."""
        products, group = self.problem.products, self.heads // self.kv_heads
        kept = (1 if self._at_once(n) else ceil_div(k, TILE_COLS * _WARPS) for n, k in products)
        x = max(kept) * _WARPS * TILE_COLS * 2
        few, many = self._rows(products[1][0]), max(self._rows(products[0][0]), self._rows(products[2][0]))
        parts = 4 * _PAGES * round_up(4 * group * (HEAD_DIM + 2), 16)
        ring = _WARPS * self.depth * tile_bytes(NVFP4) // 2
        total = ring + _PAGES * 2 * _PAGE_BYTES + x + 16 + group * HEAD_DIM * 2 + max(4 * _WARPS * many, parts)
        total = round_up(total + 4 * _WARPS * few + 4 * 2 * _WARPS + 4 * few, 16) + 4 * HEAD_DIM
        total = round_up(total + 4 * self.pieces + 4, 8)
        return round_up(total + 8 * (_WARPS * self.depth + 1), 128)

    def _at_once(self, n: int) -> bool:
        """Whether the rows of a CTA, of a weight [n, k], are multiplied at once."""
        return n // _BLOCK % self.ctas == 0 and n // _BLOCK // self.ctas <= 2

    def _rows(self, n: int) -> int:
        """Rows of a weight [n, k] that a CTA has, at most."""
        return ceil_div(n // _BLOCK, self.ctas) * _BLOCK


def specialise(problem: Problem, tactic: StepTactic) -> Spec:
    """The spec of a tactic for a problem."""
    ctas = min(tactic.most_ctas, problem.hidden // _BLOCK)
    return Spec(
        dtype=problem.dtype,
        hidden_chunks=problem.hidden // TILE_COLS,
        heads=problem.heads,
        kv_heads=problem.kv_heads,
        inter_chunks=problem.inter // TILE_COLS,
        bias=problem.bias,
        head_norms=problem.head_norms,
        interleaved=problem.interleaved,
        ctas=max(ctas, problem.kv_heads * tactic.splits),
        splits=tactic.splits,
        depth=tactic.depth,
    )


def _rejects(problem: Problem, tactic: StepTactic, arch: Arch) -> str | None:
    spec = specialise(problem, tactic)
    if not arch.has_wgmma:
        return "it was made for Hopper"
    if spec.ctas > arch.num_sms:
        return f"{spec.ctas} CTAs, which wait for each other, are more than the SMs"
    if problem.hidden // _BLOCK < spec.ctas:
        return f"{spec.ctas} CTAs are more than blocks of {_BLOCK} hidden values"
    if spec.shared_bytes > arch.shared_bytes:
        return f"it needs {spec.shared_bytes} bytes of shared memory"
    return None


def _geometry(problem: Problem, tactic: StepTactic, _arch: Arch) -> Geometry:
    spec = specialise(problem, tactic)
    return Geometry(grid=(spec.ctas, 1, 1), block=(spec.threads, 1, 1), shared_bytes=spec.shared_bytes)


def _bind(arguments: Arguments, _plan: Plan) -> dict[str, Any]:
    a = arguments
    return {
        "x": a.x,
        "weights": a.weights,
        "norms": a.norms,
        "head_norms": a.head_norms,
        "biases": a.biases,
        "alphas": a.alphas,
        "cache": a.kv_cache,
        "cache_sf": a.kv_cache_sf,
        "kv_scales": a.kv_scales,
        "block_table": a.block_tables,
        "seq_len": a.seq_lens,
        "positions": a.positions,
        "cos_sin": a.cos_sin_cache,
        "state": a.state,
        "out": a.out,
        "layers": a.weights.shape[0],
        "num_pages": a.kv_cache.shape[2],
        "table_pages": a.block_tables.shape[1],
        "max_position": a.cos_sin_cache.shape[0],
        "eps": a.eps,
        "scale": a.scale * _LOG2_E,
    }


KERNEL = Kernel(
    name="step/decode",
    spec=Spec,
    params=(
        Ptr("x", "const T", "[1, hidden]"),
        Ptr("weights", "const uint8", "[layers, bytes]: tiles of qkv, o, gate and up, down"),
        Ptr("norms", "const T", "[layers, 2, hidden]"),
        Ptr("head_norms", "const T", "[layers, 2, 128]: of queries and of keys; null"),
        Ptr("biases", "const T", "[layers, rows of qkv]; null"),
        Ptr("alphas", "const float", "[layers, 7]: of q, k, v, o, gate, up, down"),
        Ptr("cache", "uint8", "[layers, 2, num_pages, kv_heads, 64, 64]"),
        Ptr("cache_sf", "uint8", "[layers, 2, num_pages, kv_heads, 64, 8]"),
        Ptr("kv_scales", "const float", "[layers, 2]; null: 1"),
        Ptr("block_table", "const int32", "[table_pages]"),
        Ptr("seq_len", "const int32", "[1], with the new token"),
        Ptr("positions", "const int32", "[1]: the row of cos_sin; null: that of the last token"),
        Ptr("cos_sin", "const float", "[max_position, 128]"),
        Ptr("state", "uint64", "words of the CTAs; zeros before the first launch"),
        Ptr("out", "T", "[1, hidden]"),
        I64("layers"),
        I64("num_pages"),
        I64("table_pages"),
        I64("max_position"),
        F32("eps"),
        F32("scale", "of logits, times log2(e)"),
    ),
    tactics=TACTICS,
    rejects=_rejects,
    specialise=specialise,
    geometry=_geometry,
    bind=_bind,
)

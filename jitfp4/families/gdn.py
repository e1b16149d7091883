"""The gated delta rule: recurrent linear-attention state, one or a few tokens at a time."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import product

import torch

from jitfp4.arch import Arch
from jitfp4.engine import Launch, target_of
from jitfp4.errors import ArgumentError
from jitfp4.formats import DType
from jitfp4.layouts import ceil_div
from jitfp4.ops import operator
from jitfp4.reference import gdn as reference
from jitfp4.registry import Family, register
from jitfp4.spec import F32, I64, Geometry, KernelSpec, Ptr
from jitfp4.tensors import check_device, check_dtype, check_same_device, output

HEAD_DIMS = (64, 128)
MAX_TOKENS = (1, 2, 4, 8, 16)
_DTYPES = {torch.bfloat16: DType.BF16, torch.float16: DType.F16}
_STATE_DTYPES = {torch.float32: DType.F32, torch.bfloat16: DType.BF16}
_BIAS_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_INDEX_DTYPES = (torch.int32, torch.int64)
_ROWS_OF_WARP = 4  # times ilp_rows: eight lanes share a row
_MAX_WARPS = 4
_MAX_GRID_Y = 65535
_NO_LIMIT = 1 << 62


class StateLayout(StrEnum):
    """The order of a head's state in memory: [V, K] or [K, V]."""

    VK = "vk"
    KV = "kv"


# (value heads of the whole batch up to, (tile_v, ilp_rows, use_smem_v)).
_TILES = {
    StateLayout.VK: ((64, (8, 1, False)), (_NO_LIMIT, (32, 2, False))),
    StateLayout.KV: ((_NO_LIMIT, (32, 4, False)),),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec(KernelSpec):
    """``max_tokens`` bounds the tokens of a call; ``tile_v`` rows make a CTA; a lane holds ``ilp_rows`` of them."""

    dtype: DType
    state_dtype: DType
    state_layout: StateLayout
    head_dim: int
    max_tokens: int
    tile_v: int
    ilp_rows: int
    use_smem_v: bool
    update_state: bool
    store_steps: bool
    l2norm: bool

    def __post_init__(self) -> None:
        for name, allowed in (
            ("head_dim", HEAD_DIMS),
            ("max_tokens", MAX_TOKENS),
            ("ilp_rows", (1, 2, 4, 8)),
            ("tile_v", tuple(tile for tile in (4, 8, 16, 32, 64, 128) if tile <= self.head_dim)),
        ):
            if getattr(self, name) not in allowed:
                raise ArgumentError(name, getattr(self, name), f"one of {allowed}")
        if self.tile_v % (_ROWS_OF_WARP * self.ilp_rows):
            raise ArgumentError("ilp_rows", self.ilp_rows, f"at most tile_v / {_ROWS_OF_WARP} = {self.tile_v // 4}")
        if self.store_steps and self.max_tokens == 1:
            raise ArgumentError("store_steps", True, "max_tokens of 2 or more")
        if self.state_layout is StateLayout.KV and (self.state_dtype is not DType.F32 or self.ilp_rows % 4):
            raise ArgumentError("state_layout", "kv", "a float32 state and ilp_rows of 4 or 8")

    @property
    def warps(self) -> int:
        """Warps of a CTA."""
        return min(_MAX_WARPS, self.tile_v // (_ROWS_OF_WARP * self.ilp_rows))


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What selection depends on. ``heads`` counts value heads over the whole batch."""

    dtype: DType
    state_dtype: DType
    state_layout: StateLayout
    head_dim: int
    tokens: int
    heads: int
    update_state: bool
    store_steps: bool
    l2norm: bool


def select(problem: Problem) -> Spec:
    """The kernel for a problem. Pure: reads no device, no clock and no environment."""
    tiles = _TILES[problem.state_layout]
    tile_v, ilp_rows, use_smem_v = next(tile for limit, tile in tiles if problem.heads <= limit)
    tokens = max(problem.tokens, 2 if problem.store_steps else 1)
    return Spec(
        dtype=problem.dtype,
        state_dtype=problem.state_dtype,
        state_layout=problem.state_layout,
        head_dim=problem.head_dim,
        max_tokens=next(bound for bound in MAX_TOKENS if tokens <= bound),
        tile_v=tile_v,
        ilp_rows=ilp_rows,
        use_smem_v=use_smem_v,
        update_state=problem.update_state,
        store_steps=problem.store_steps,
        l2norm=problem.l2norm,
    )


def specs(_: Arch) -> Iterator[Spec]:
    """What select() can return, on every architecture."""
    for layout, tiles in _TILES.items():
        for dtype, state_dtype, head_dim, tokens, update_state, store_steps, l2norm, (limit, _tile) in product(
            _DTYPES.values(), _STATE_DTYPES.values(), HEAD_DIMS, MAX_TOKENS, *[(True, False)] * 3, tiles
        ):
            k_major_decode = state_dtype is DType.F32 and tokens == 1 and update_state
            if (tokens > 1 or not store_steps) and (layout is StateLayout.VK or k_major_decode):
                yield select(
                    Problem(
                        dtype=dtype,
                        state_dtype=state_dtype,
                        state_layout=layout,
                        head_dim=head_dim,
                        tokens=tokens,
                        heads=limit,
                        update_state=update_state,
                        store_steps=store_steps,
                        l2norm=l2norm,
                    )
                )


def geometry(spec: Spec, *, heads: int, max_ctas: int) -> Geometry:
    """At most ``max_ctas`` CTAs, which share the items of ``heads`` value heads in rounds of equal length."""
    items = heads * (spec.head_dim // spec.tile_v)
    ctas = ceil_div(items, ceil_div(items, max_ctas))
    return Geometry(grid=(ctas, 1, 1), block=(32 * spec.warps, 1, 1))


DELTA_RULE = register(
    Family(
        name="gdn/delta_rule",
        spec=Spec,
        params=(
            Ptr("q", "const In", "[batch, tokens, heads, K]"),
            Ptr("k", "const In", "[batch, tokens, heads, K]"),
            Ptr("v", "const In", "[batch, tokens, value_heads, V]"),
            Ptr("a", "const In", "[batch, tokens, value_heads]"),
            Ptr("b", "const In", "[batch, tokens, value_heads]"),
            Ptr("a_log", "const float", "[value_heads]"),
            Ptr("dt_bias", "const void", "[value_heads] of dt_bias_type"),
            Ptr("state", "State", "[pool, value_heads, V, K] in kStateLayout"),
            Ptr("slots", "const void", "[batch], integers of slot_bytes; negative: no state, output zero"),
            Ptr("write_slots", "const void", "[batch], integers of write_slot_bytes; negative: not written"),
            Ptr("steps", "State", "[batch, tokens, value_heads, V, K], or [pool, ...] with step_slots"),
            Ptr("step_slots", "const void", "[batch, tokens], integers of step_slot_bytes; negative: not written"),
            Ptr("out", "In", "[batch, tokens, value_heads, V]"),
            F32("scale", "of q"),
            I64("batch"),
            I64("tokens", "<= kMaxTokens"),
            I64("heads"),
            I64("value_heads", "a multiple of heads"),
            I64("q_batch_stride", "elements, as all strides"),
            I64("q_token_stride"),
            I64("k_batch_stride"),
            I64("k_token_stride"),
            I64("v_batch_stride"),
            I64("v_token_stride"),
            I64("a_batch_stride"),
            I64("a_token_stride"),
            I64("b_batch_stride"),
            I64("b_token_stride"),
            I64("state_stride"),
            I64("steps_batch_stride"),
            I64("steps_token_stride", "of a slot with step_slots"),
            I64("dt_bias_type", "0 float, 1 bf16, 2 f16"),
            I64("step_slot_bytes", "0: steps has its own strides"),
            I64("slot_bytes", "0, 4 or 8; 0: request n uses slot n"),
            I64("write_slot_bytes"),
        ),
        specs=specs,
    )
)


@functools.lru_cache(maxsize=4096)
def _plan(batch: int, value_heads: int, problem: Problem) -> Launch:
    spec = select(problem)
    return Launch(DELTA_RULE, spec, geometry(spec, heads=problem.heads, max_ctas=4*132))


@operator(
    "gated_delta_rule(Tensor q, Tensor k, Tensor v, Tensor(a!) state, Tensor A_log, Tensor a, Tensor dt_bias, Tensor b,"
    " float scale, Tensor(b!) output, Tensor? initial_state_indices, Tensor? output_state_indices,"
    " Tensor(c!)? intermediate_states_buffer, Tensor? ssm_state_indices, bool update_state, bool use_qk_l2norm,"
    " bool k_major, bool? enable_pdl)",
    reference=reference.gated_delta_rule,
    aligned=("q", "k", "v", "state", "output"),
)
def _gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    state: torch.Tensor,
    A_log: torch.Tensor,  # noqa: N803 - FlashInfer's name
    a: torch.Tensor,
    dt_bias: torch.Tensor,
    b: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    indices: torch.Tensor | None,
    output_indices: torch.Tensor | None,
    steps: torch.Tensor | None,
    step_indices: torch.Tensor | None,
    update_state: bool,
    use_qk_l2norm: bool,
    k_major: bool,
    enable_pdl: bool | None,
) -> None:
    batch, tokens, heads, head_dim = q.shape
    value_heads = v.shape[2]
    problem = Problem(
        dtype=_DTYPES[q.dtype],
        state_dtype=_STATE_DTYPES[state.dtype],
        state_layout=StateLayout.KV if k_major else StateLayout.VK,
        head_dim=head_dim,
        tokens=tokens,
        heads=batch * value_heads,
        update_state=update_state,
        store_steps=steps is not None or step_indices is not None,
        l2norm=use_qk_l2norm,
    )
    write_indices = indices if output_indices is None else output_indices
    target = state if steps is None else steps  # of the intermediate states
    step_strides = (0, state.stride(0)) if steps is None else steps.stride()[:2]
    args = (
        q,
        k,
        v,
        a,
        b,
        A_log,
        dt_bias,
        state,
        _or(indices, q),
        _or(write_indices, q),
        target,
        _or(step_indices, q),
        out,
        scale,
        batch,
        tokens,
        heads,
        value_heads,
        *q.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:2],
        *a.stride()[:2],
        *b.stride()[:2],
        state.stride(0),
        *step_strides,
        _BIAS_TYPES[dt_bias.dtype],
        _width(step_indices),
        _width(indices),
        _width(write_indices),
    )
    _plan(batch, value_heads, problem).run(args, target_of(q), pdl=enable_pdl)


def _or(tensor: torch.Tensor | None, stand_in: torch.Tensor) -> torch.Tensor:
    return stand_in if tensor is None else tensor


def _width(indices: torch.Tensor | None) -> int:
    """Bytes of an index; 0 where there is no list of them."""
    return 0 if indices is None else indices.element_size()


# ---- arguments -------------------------------------------------------------------------------------------------------


class _Call:
    """The checked tensors of one call; ``state_name`` is what the public function calls the state."""

    def __init__(
        self,
        state_name: str,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        state: torch.Tensor,
        A_log: torch.Tensor,  # noqa: N803 - FlashInfer's name
        a: torch.Tensor,
        dt_bias: torch.Tensor,
        b: torch.Tensor,
        *,
        k_major: bool,
    ) -> None:
        check_dtype("q", q, _DTYPES)
        check_device("q", q)
        if q.dim() != 4 or not 1 <= q.shape[1] <= MAX_TOKENS[-1] or q.shape[2] == 0 or q.shape[3] not in HEAD_DIMS:
            raise ArgumentError("q", f"shape {tuple(q.shape)}", f"[B, T from 1 to {MAX_TOKENS[-1]}, H, 64 or 128]")
        if k_major and q.shape[1] != 1:
            raise ArgumentError("q", f"{q.shape[1]} tokens", "1 with a state of [K, V]")
        self.batch, self.tokens, heads, head_dim = q.shape
        check_dtype("v", v, (q.dtype,))
        value_heads = v.shape[2] if v.dim() == 4 else 0
        if value_heads == 0 or value_heads % heads:
            raise ArgumentError("v", f"shape {tuple(v.shape)}", f"[B, T, a multiple of {heads}, {head_dim}]")
        self.q, self.k, self.v, self.state, self.k_major = q, k, v, state, k_major
        self.gates = A_log, a, dt_bias, b
        self.state_name, self.head_shape = state_name, (value_heads, head_dim, head_dim)
        rows = self.batch, self.tokens
        self._check("q", q, q.shape, (q.dtype,), dense=2)
        self._check("k", k, q.shape, (q.dtype,), dense=2)
        self._check("v", v, (*rows, value_heads, head_dim), (q.dtype,), dense=2)
        self._check("A_log", A_log, (value_heads,), (torch.float32,), dense=1)
        self._check("a", a, (*rows, value_heads), (q.dtype,), dense=1, aligned=False)
        self._check("dt_bias", dt_bias, (value_heads,), tuple(_BIAS_TYPES), dense=1)
        self._check("b", b, (*rows, value_heads), (q.dtype,), dense=1, aligned=False)
        state_dtypes = (torch.float32,) if k_major else tuple(_STATE_DTYPES)
        pool = state.shape[:1] if isinstance(state, torch.Tensor) else ()
        self._check(state_name, state, (*pool, *self.head_shape), state_dtypes, dense=3)

    def _check(
        self,
        name: str,
        tensor: torch.Tensor,
        shape: tuple[int, ...],
        dtypes: Collection[torch.dtype],
        *,
        dense: int,
        aligned: bool = True,
    ) -> None:
        """``shape`` exactly, its last ``dense`` dimensions contiguous, the others 16-byte strided where ``aligned``."""
        check_dtype(name, tensor, dtypes)
        check_same_device(name, tensor, self.q)
        if tensor.shape != shape:
            raise ArgumentError(name, f"shape {tuple(tensor.shape)}", f"{tuple(shape)}")
        outer = tensor.dim() - dense
        if not tensor[(0,) * outer if tensor.numel() else ...].is_contiguous():
            raise ArgumentError(name, f"strides {tensor.stride()}", f"contiguous last {dense} dimensions")
        if aligned and any(tensor.stride(i) * tensor.element_size() % 16 for i in range(outer) if tensor.shape[i] > 1):
            raise ArgumentError(name, f"strides {tensor.stride()}", "outer strides that are multiples of 16 bytes")

    def one_state_each(self) -> None:
        if self.state.shape[0] != self.batch:
            raise ArgumentError(self.state_name, f"{self.state.shape[0]} states", f"{self.batch}, one for each request")

    def indices(self, name: str, indices: torch.Tensor, *shape: int) -> None:
        self._check(name, indices, shape, _INDEX_DTYPES, dense=len(shape))

    def steps(self, name: str, steps: torch.Tensor) -> None:
        check_dtype(name, steps, (self.state.dtype,))
        if steps.dim() != 5 or steps.shape[0] < self.batch or steps.shape[1] < self.tokens:
            wanted = (f">= {self.batch}", f">= {self.tokens}", *self.head_shape)
            raise ArgumentError(name, f"shape {tuple(steps.shape)}", f"[{', '.join(map(str, wanted))}]")
        self._check(name, steps, (*steps.shape[:2], *self.head_shape), (self.state.dtype,), dense=3)

    def run(
        self,
        scale: float | None,
        out: torch.Tensor | None,
        indices: torch.Tensor | None = None,
        output_indices: torch.Tensor | None = None,
        steps: torch.Tensor | None = None,
        step_indices: torch.Tensor | None = None,
        *,
        update_state: bool = True,
        use_qk_l2norm: bool,
        enable_pdl: bool | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Launch. Returns the output and the state."""
        out = output("output", out, tuple(self.v.shape), (self.q.dtype,), like=self.q)
        if self.batch:
            factor = self.q.shape[-1] ** -0.5 if scale is None else float(scale)
            A_log, a, dt_bias, b = self.gates  # noqa: N806
            _gated_delta_rule(
                self.q,
                self.k,
                self.v,
                self.state,
                A_log,
                a,
                dt_bias,
                b,
                factor,
                out,
                indices,
                output_indices,
                steps,
                step_indices,
                update_state,
                use_qk_l2norm,
                self.k_major,
                enable_pdl,
            )
        return out, self.state


# ---- public functions ------------------------------------------------------------------------------------------------


def gated_delta_rule_mtp(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    initial_state: torch.Tensor,
    initial_state_indices: torch.Tensor,
    A_log: torch.Tensor,  # noqa: N803 - FlashInfer's name
    a: torch.Tensor,
    dt_bias: torch.Tensor,
    b: torch.Tensor,
    scale: float | None = None,
    output: torch.Tensor | None = None,
    intermediate_states_buffer: torch.Tensor | None = None,
    ssm_state_indices: torch.Tensor | None = None,
    disable_state_update: bool | None = None,
    use_qk_l2norm: bool = True,
    output_state_indices: torch.Tensor | None = None,
    *,
    enable_pdl: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One to 16 tokens of each request through the gated delta rule, on a pool of states: multi-token prediction.

    Args:
        q, k: [B, T, H, K] bf16 or fp16, T from 1 to 16, K 64 or 128. Heads dense; requests and tokens may be strided by
            multiples of 16 bytes, as views of a packed projection are.
        v: [B, T, HV, V], q's dtype, V = K, HV a multiple of H: value head hv uses q and k of head hv // (HV / H).
        initial_state: [pool, HV, V, K] float32 or bf16. Slots dense, 16-byte aligned, apart by any stride.
        initial_state_indices: [B] int32 or int64: the slot of each request. Where it is negative the request is
            skipped: its output is zero and no state is touched.
        A_log: [HV] float32.
        a, b: [B, T, HV], q's dtype, heads dense: decay and update gates before their non-linearities.
        dt_bias: [HV] float32, bf16 or fp16.
        scale: factor of q; None means 1 / sqrt(K).
        output: [B, T, HV, V], q's dtype, contiguous, filled in place; allocated when None.
        intermediate_states_buffer: [>= B, >= T, HV, V, K], initial_state's dtype, indexed by request and token through
            its own strides: gets the state after every token.
        ssm_state_indices: [B, T] int32 or int64: the slot of initial_state that gets the state after each token, in
            place of the final write; negative: none. Excludes the two options around it.
        disable_state_update: leave initial_state as it is. None means False: the final state is written back.
            (FlashInfer's releases warn and take None for True; an engine that relies on that passes True.)
        use_qk_l2norm: divide q and k by their l2 norms.
        output_state_indices: [B]: the slot that gets the final state; negative: none. None means
            initial_state_indices.
        enable_pdl: programmatic dependent launch; None means wherever the GPU has it.
    Returns:
        ``(output, initial_state)``.
    Numerics:
        Float32 throughout; a bf16 state is widened once and rounded once, each time that it is stored. Per token::

            decay = exp(-exp(A_log) * softplus(a + dt_bias));   beta = 1 / (1 + exp(-b))
            q, k  = q * (1 / sqrt(sum(q * q) + 1e-6)), likewise k;   q = q * scale
            h     = decay * h;   u = (v - h k) * beta;   h = fma(u, k, h);   output = h q

        Sums are formed in one order (see reference/gdn.py), whatever the batch and the architecture. exp and log are
        within 2 ulp of the exact value; everything else is correctly rounded.
    Raises:
        ArgumentError, ArgumentTypeError: before anything is written.
    """
    check = _Call("initial_state", q, k, v, initial_state, A_log, a, dt_bias, b, k_major=False)
    check.indices("initial_state_indices", initial_state_indices, check.batch)
    if output_state_indices is not None:
        check.indices("output_state_indices", output_state_indices, check.batch)
    if ssm_state_indices is not None:
        check.indices("ssm_state_indices", ssm_state_indices, check.batch, check.tokens)
        for name, given in (
            ("disable_state_update", disable_state_update),
            ("intermediate_states_buffer", intermediate_states_buffer is not None),
            ("output_state_indices", output_state_indices is not None),
        ):
            if given:
                raise ArgumentError(name, "a value", "None together with ssm_state_indices")
    if intermediate_states_buffer is not None:
        check.steps("intermediate_states_buffer", intermediate_states_buffer)
    return check.run(
        scale,
        output,
        initial_state_indices,
        output_state_indices,
        intermediate_states_buffer,
        ssm_state_indices,
        update_state=not disable_state_update and ssm_state_indices is None,
        use_qk_l2norm=use_qk_l2norm,
        enable_pdl=enable_pdl,
    )


def gated_delta_rule_decode_pretranspose(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    state: torch.Tensor | None,
    A_log: torch.Tensor,  # noqa: N803 - FlashInfer's name
    a: torch.Tensor,
    dt_bias: torch.Tensor,
    b: torch.Tensor,
    scale: float | None = None,
    output: torch.Tensor | None = None,
    use_qk_l2norm: bool = True,
    initial_state: torch.Tensor | None = None,
    initial_state_indices: torch.Tensor | None = None,
    output_state_indices: torch.Tensor | None = None,
    *,
    enable_pdl: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One to 16 tokens of each request through the gated delta rule; states [V, K], updated in place.

    Args:
        state: [B, HV, V, K] float32 or bf16, request n's at n; or None, and then
        initial_state, initial_state_indices, output_state_indices: a pool and its slots, as gated_delta_rule_mtp()
            takes them.
        q, k, v, A_log, a, dt_bias, b, scale, output, use_qk_l2norm, enable_pdl: as in gated_delta_rule_mtp().
    Returns:
        ``(output, state)``, or ``(output, initial_state)``.
    Numerics and Raises: see gated_delta_rule_mtp().
    """
    if (state is None) == (initial_state is None):
        raise ArgumentError("state", "both or neither of state and initial_state", "exactly one of them")
    if (initial_state is None) != (initial_state_indices is None):
        raise ArgumentError("initial_state_indices", "a pool or its indices alone", "initial_state with its indices")
    name, pool = ("initial_state", initial_state) if state is None else ("state", state)
    check = _Call(name, q, k, v, pool, A_log, a, dt_bias, b, k_major=False)
    if initial_state_indices is not None:
        check.indices("initial_state_indices", initial_state_indices, check.batch)
    else:
        check.one_state_each()
    if output_state_indices is not None:
        if initial_state_indices is None:
            raise ArgumentError("output_state_indices", "given", "None without initial_state")
        check.indices("output_state_indices", output_state_indices, check.batch)
    return check.run(
        scale,
        output,
        initial_state_indices,
        output_state_indices,
        use_qk_l2norm=use_qk_l2norm,
        enable_pdl=enable_pdl,
    )


def gated_delta_rule_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    state: torch.Tensor,
    A_log: torch.Tensor,  # noqa: N803 - FlashInfer's name
    a: torch.Tensor,
    dt_bias: torch.Tensor,
    b: torch.Tensor,
    scale: float | None = None,
    output: torch.Tensor | None = None,
    use_qk_l2norm: bool = True,
    *,
    enable_pdl: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of each request through the gated delta rule; states [K, V], updated in place.

    Args:
        state: [B, HV, K, V] float32, request n's at n; heads dense, requests 16-byte aligned.
        q, k, v, A_log, a, dt_bias, b, scale, output, use_qk_l2norm, enable_pdl: as in gated_delta_rule_mtp(), T = 1.
    Returns:
        ``(output, state)``. The same bits as gated_delta_rule_decode_pretranspose() on the transposed state.
    Numerics and Raises: see gated_delta_rule_mtp().
    """
    check = _Call("state", q, k, v, state, A_log, a, dt_bias, b, k_major=True)
    check.one_state_each()
    return check.run(scale, output, use_qk_l2norm=use_qk_l2norm, enable_pdl=enable_pdl)

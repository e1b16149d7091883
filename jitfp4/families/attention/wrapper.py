"""What both wrappers share. plan() takes page lists and numbers once for a batch, and run() takes tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from jitfp4 import replay
from jitfp4.dtypes import CODE_DTYPES
from jitfp4.errors import ArgumentError, ArgumentTypeError, renamed
from jitfp4.families.attention import checks
from jitfp4.families.attention.call import Call, attend
from jitfp4.families.attention.engine_names import EngineNames, tokens
from jitfp4.families.attention.problem import CACHES, DTYPES, HEAD_DIMS, MAX_GROUP, MAX_PAGE
from jitfp4.public import checked
from jitfp4.replay import replayed
from jitfp4.tensors import check_dtype, check_strided

BACKENDS = ("auto", "fa2", "fa3", "trtllm-gen")


class Lists(NamedTuple):
    """Lists of a batch on the device.

    ``page_ends`` says where the pages of each request begin and end in ``pages``, ``q_ends`` where its queries do, and
    ``seq_lens`` how many tokens it has. ``mask`` and ``mask_ends`` are those of Arguments.
    """

    page_ends: torch.Tensor
    pages: torch.Tensor
    seq_lens: torch.Tensor
    q_ends: torch.Tensor | None
    mask: torch.Tensor | None = None
    mask_ends: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What plan() stores for run(), beside lists. A request has at most ``q_len`` queries; None is no bound."""

    kv_layout: str
    v_scale_layout: str
    heads: tuple[int, int]
    head_dim: int
    page_size: int
    window_left: int
    q_dtype: torch.dtype
    cache_dtype: torch.dtype
    out_dtype: torch.dtype
    sm_scale: float
    soft_cap: float
    q_len: int | None
    causal: bool
    whole: bool


class PagedWrapper(EngineNames):
    """A workspace, buffers for use in CUDA graphs, and the latest plan."""

    def __init__(
        self, workspace: torch.Tensor, kv_layout: str, backend: str, buffers: dict[str, torch.Tensor | None] | None
    ) -> None:
        """``buffers``, for use in CUDA graphs, are by parameter name in the order of the lists of plan()."""
        checks.check_layout(kv_layout)
        checks.check_backend(backend, BACKENDS)
        self._workspace = _bytes(workspace, workspace)
        self._kv_layout, self._v_scale_layout = kv_layout, "interleaved4" if backend == "trtllm-gen" else "linear"
        self._buffers: list[torch.Tensor] | None = None
        self._plan: Plan | None = None
        self._lists: Lists | None = None
        self._run: Callable[..., torch.Tensor | tuple[torch.Tensor, torch.Tensor]] | None = None  # for the plan
        if buffers is not None:
            given = []
            for name, buffer in buffers.items():
                if buffer is None:
                    raise ArgumentError(name, "None", "a tensor with use_cuda_graph")
                checks.check_ints(name, buffer, (None,), self._workspace)
                given.append(buffer)
            self._keep(*given)
            given[2] = torch.zeros_like(given[2])  # for the tokens of requests, not of their last pages
            for (name, _), buffer in zip(buffers.items(), given, strict=True):
                if "indptr" in name and len(buffer) <= len(given[2]):
                    raise ArgumentError(name, f"{len(buffer)} elements", "one more than the batch of the buffers")
            self._buffers = given

    def _check(self, lists: dict[str, torch.Tensor], seq_lens: torch.Tensor | None) -> int:
        """Check the lists of plan(), by parameter name. Returns the number of requests: that of the third list."""
        name, last = list(lists.items())[2]
        checks.check_ints(name, last, (None,), last)
        batch = len(last)
        expected = dict(zip(lists, (batch + 1, None, batch, batch + 1), strict=False))
        for name, tensor in (lists if seq_lens is None else lists | {"seq_lens": seq_lens}).items():
            checks.check_ints(name, tensor, (expected.get(name, batch),), tensor)
            if tensor.is_meta and not self._workspace.is_meta:
                raise ArgumentTypeError(name, "a tensor on meta", "a tensor with values")
        return batch

    def _take(
        self, lists: dict[str, torch.Tensor], page_size: int, seq_lens: torch.Tensor | None, non_blocking: bool
    ) -> Lists:
        """Check the lists of plan(), by parameter name, and move them to the device.

        They are indptr, indices, last_page_len and, for prefill, qo_indptr.
        """
        batch = self._check(lists, seq_lens)
        move = functools.partial(torch.Tensor.to, device=self._workspace.device, non_blocking=non_blocking)
        moved = [move(tensor) for tensor in lists.values()]
        if seq_lens is not None:
            moved[2] = move(seq_lens)
        else:
            moved[2] = tokens(moved[0], moved[2], page_size)
        if self._buffers is not None:
            sizes = [len(buffer) for buffer in self._buffers]
            if batch != sizes[2] or any(len(tensor) > size for tensor, size in zip(moved, sizes, strict=True)):
                raise ArgumentError(next(iter(lists)), f"a batch of {batch}", f"{sizes[2]}, as the buffers hold")
            for buffer, tensor in zip(self._buffers, moved, strict=True):
                buffer[: len(tensor)].copy_(tensor)
            moved = [self._buffers[0][: batch + 1], self._buffers[1], *(b[: batch + 1] for b in self._buffers[2:])]
        return Lists(moved[0], moved[1], moved[2], moved[3] if len(moved) > 3 else None)

    def _attention(self) -> Callable[..., torch.Tensor | tuple[torch.Tensor, torch.Tensor]]:
        """attention() for the latest plan."""
        if self._run is None:
            if torch.compiler.is_dynamo_compiling():
                return functools.partial(attention, self._planned())
            self._run = _remembered(self._planned())
        return self._run

    @property
    def device(self) -> torch.device:
        """The device of the workspace."""
        return self._workspace.device

    @property
    def _float_workspace_buffer(self) -> torch.Tensor:
        return self._workspace

    @property
    def _window_left(self) -> int:
        return self._planned().window_left

    @property
    def _sm_scale(self) -> float:
        return self._planned().sm_scale

    @property
    def _logits_soft_cap(self) -> float:
        return self._planned().soft_cap

    @property
    def _causal(self) -> bool:
        return self._planned().causal

    def _planned(self) -> Plan:
        if self._plan is None:
            raise ArgumentError("run", "a call before plan()", "plan() first")
        return self._plan

    def _listed(self) -> Lists:
        if self._lists is None:
            raise ArgumentError("run", "a call before plan()", "plan() first")
        return self._lists

    def _replan(self, window_left: int, sm_scale: float | None, soft_cap: float | None, causal: bool) -> None:
        """What forward() says anew, for this and for later calls."""
        plan = self._planned()
        scale = plan.head_dim**-0.5 if sm_scale is None else sm_scale
        cap = checks.soft_cap(soft_cap)
        if (window_left, scale, cap, causal) != (plan.window_left, plan.sm_scale, plan.soft_cap, plan.causal):
            new = replace(plan, window_left=window_left, sm_scale=scale, soft_cap=cap, causal=causal)
            self._store(new, self._listed())

    def _store(self, plan: Plan, lists: Lists) -> None:
        """Keep what the next run() uses."""
        self._plan, self._lists, self._run = plan, lists, None

    @checked
    def reset_workspace_buffer(self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor) -> None:
        """Use another workspace from the next run() on. Captured runs keep the one that they were captured with.

        Args:
            float_workspace_buffer: as for the constructor, on the same device.
            int_workspace_buffer: not used, because plan() needs no workspace.
        Raises:
            ArgumentError, ArgumentTypeError.
        """
        del int_workspace_buffer
        self._workspace = _bytes(float_workspace_buffer, self._workspace)

    def end_forward(self) -> None:
        """Nothing: FlashInfer's older engines call it after forward()."""


def sides(name: str, tensors: checks.Pair, kv_layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V with a dimension for the tokens of a page, which may be left out where that is one."""
    if isinstance(tensors, torch.Tensor) and tensors.dim() == 4 and tensors.shape[1] == 2:
        check_strided(name, tensors)
        tensors = tensors[:, 0], replay.part(tensors[:, 1], tensors)
    page_at = -2 if kv_layout == "HND" else -3
    key, value = (side.unsqueeze(page_at) if side.dim() == 3 else side for side in checks.pair(name, tensors))
    return key, value


@checked
def attention(
    plan: Plan,
    q: torch.Tensor,
    paged_kv_cache: checks.Pair,
    q_scale: checks.Factor,
    k_scale: checks.Factor,
    v_scale: checks.Factor,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
    return_lse: bool,
    enable_pdl: bool | None,
    window_left: int | None,
    sinks: torch.Tensor | None,
    kv_cache_sf: checks.Pair | None,
    q_len_per_req: int | None,
    skip_softmax_threshold_scale_factor: float | None,
    use_fp16_softmax: bool | None,
    uses_spcompress: bool | None,
    workspace: torch.Tensor,
    *lists: torch.Tensor | None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """What run() gives for a plan, with what the wrapper has; logarithms are of base 2, [tokens, heads]."""
    checks.unused("skip_softmax_threshold_scale_factor", skip_softmax_threshold_scale_factor, None)
    checks.unused("use_fp16_softmax", use_fp16_softmax or None, None)
    checks.unused("uses_spcompress", uses_spcompress or None, None)
    planned = Lists(*lists)  # type: ignore[arg-type]
    check_dtype("q", q, (plan.q_dtype,))
    key, value = sides("paged_kv_cache", paged_kv_cache, plan.kv_layout)
    check_dtype("paged_kv_cache", key, CODE_DTYPES if plan.cache_dtype in CODE_DTYPES else (plan.cache_dtype,))
    page_at, heads_at = (2, 1) if plan.kv_layout == "HND" else (1, 2)
    if key.dim() != 4 or (key.shape[page_at], key.shape[heads_at]) != (plan.page_size, plan.heads[1]):
        wanted = f"pages of {plan.page_size} tokens and {plan.heads[1]} heads, as planned"
        raise ArgumentError("paged_kv_cache", f"shape {tuple(key.shape)}", wanted)
    if q.dim() != 3 or tuple(q.shape[1:]) != (plan.heads[0], plan.head_dim):
        wanted = f"[tokens, {plan.heads[0]}, {plan.head_dim}], as planned"
        raise ArgumentError("q", f"shape {tuple(q.shape)}", wanted)
    q_len = max(1, q.shape[0]) if plan.q_len is None else plan.q_len
    if q_len_per_req is not None:
        checks.check_q_len("q_len_per_req", q_len := q_len_per_req)
    scales = (None, None) if kv_cache_sf is None else sides("kv_cache_sf", kv_cache_sf, plan.kv_layout)
    try:
        result = attend(
            Call(
                query=q,
                key=key,
                value=value,
                key_scales=scales[0],
                value_scales=scales[1],
                workspace_buffer=workspace,
                block_tables=planned.pages,
                seq_lens=planned.seq_lens,
                page_ends=planned.page_ends,
                cum_seq_lens_q=planned.q_ends,
                bmm1_scale=checks.product(q, plan.sm_scale, q_scale=q_scale, k_scale=k_scale),
                bmm2_scale=checks.product(q, 1.0, v_scale=v_scale),
                sinks=sinks,
                out=out,
                lse=lse,
                max_seq_len=0,
                window_left=plan.window_left if window_left is None else window_left,
                out_dtype=plan.out_dtype,
                kv_layout=plan.kv_layout,
                v_scale_layout=plan.v_scale_layout,
                q_len=q_len,
                soft_cap=plan.soft_cap,
                causal=plan.causal,
                whole=plan.whole,
                with_lse=return_lse or lse is not None,
                enable_pdl=enable_pdl,
                mask=planned.mask,
                mask_ends=planned.mask_ends,
            )
        )
    except ArgumentError as error:
        raise renamed(error, _NAMES) from None
    return (result[0], result[1]) if return_lse else result[0]


@functools.lru_cache(maxsize=1024)
def _remembered(plan: Plan) -> Callable[..., torch.Tensor | tuple[torch.Tensor, torch.Tensor]]:
    """attention() for a plan, remembered by its other arguments."""
    return replayed(functools.partial(attention, plan))


def _bytes(workspace: torch.Tensor, beside: torch.Tensor) -> torch.Tensor:
    """The bytes of ``workspace``, which is on the device of ``beside``."""
    try:
        return checks.check_workspace(workspace, beside)
    except ArgumentError as error:
        raise renamed(error, _NAMES) from None


_NAMES = {
    "query": "q",
    "kv_cache": "paged_kv_cache",
    "bmm1_scale": "q_scale, k_scale",
    "bmm2_scale": "v_scale",
    "workspace_buffer": "float_workspace_buffer",
}
"""From names of attend() to those of run() and of the constructors."""


def dtypes(
    q: torch.dtype | str | None, cache: torch.dtype | str | None, out: torch.dtype | str | None
) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
    """The dtypes of queries, cache and outputs; None for the others means that of queries."""
    q_dtype = dtype("q_data_type", q, DTYPES)
    cache_dtype = q_dtype if cache is None else dtype("kv_data_type", cache, CACHES)
    return q_dtype, cache_dtype, q_dtype if out is None else dtype("o_data_type", out, DTYPES)


def dtype(name: str, given: torch.dtype | str | None, allowed: Collection[torch.dtype]) -> torch.dtype:
    """The dtype ``given``, which may be its name in torch, or "nvfp4". Raises ArgumentError unless it is allowed."""
    found = getattr(torch, "uint8" if given == "nvfp4" else given, None) if isinstance(given, str) else given
    if found not in allowed:
        raise ArgumentError(name, repr(given), " or ".join(map(str, allowed)))
    return found  # type: ignore[return-value]


def check_sizes(heads: tuple[int, int], head_dim: tuple[str, int], page_size: int, window_left: int) -> None:
    """Check that the kernels support these numbers of a plan; ``head_dim`` comes with its parameter name."""
    for name, value, least, most in (
        ("num_kv_heads", heads[1], 1, None),
        ("page_size", page_size, 1, MAX_PAGE),
        ("window_left", window_left, -1, None),
    ):
        if value < least or (most is not None and value > most):
            raise ArgumentError(name, value, f"{least} or more" if most is None else f"{least} to {most}")
    if head_dim[1] not in HEAD_DIMS:
        raise ArgumentError(*head_dim, " or ".join(map(str, HEAD_DIMS)))
    group = heads[0] // heads[1]
    if heads[0] != group * heads[1] or not 1 <= group <= MAX_GROUP:
        wanted = f"1 to {MAX_GROUP} query heads for each KV head"
        raise ArgumentError("num_qo_heads, num_kv_heads", f"{heads[0]} and {heads[1]}", wanted)

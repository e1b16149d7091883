"""The operation behind all functions: its kernels, its reference."""

from __future__ import annotations

import torch

from jitfp4.families.attention.arguments import Arguments, by_token, heads_and_page
from jitfp4.families.attention.kernels import (
    decode,
    decode_masked,
    prefill,
    prefill_masked,
    prefill_wgmma,
    prefill_wgmma_masked,
)
from jitfp4.families.attention.problem import problem_of
from jitfp4.families.attention.tables import TABLE, problems
from jitfp4.operation import Operation
from jitfp4.reference import attention as reference


def _reference(a: Arguments) -> None:
    k = reference.Side(by_token(a.key_cache, a.hnd))
    v = reference.Side(by_token(a.value_cache, a.hnd))
    if a.key_scales is not None and a.value_scales is not None:
        k = reference.Side(k.data, by_token(a.key_scales, a.hnd))
        v = reference.Side(v.data, by_token(a.value_scales, a.hnd), a.interleaved)
    batch = a.seq_lens.shape[0]
    tables = a.block_tables
    lengths = a.seq_lens
    if a.page_ends is not None:
        ends = a.page_ends.clamp(0, tables.shape[0])
        lengths = torch.minimum(lengths, (ends[1:] - ends[:-1]).clamp(min=0) * heads_and_page(a)[1])
        tables = reference.pad_lists(tables, ends)
    if tables.dim() == 2:
        tables = tables.unsqueeze(1).expand(-1, 2, -1)
    q_ends = a.cum_seq_lens_q
    if q_ends is None:
        q_ends = torch.arange(batch + 1, device=a.query.device) * a.q_len_per_req
    out, lse = reference.paged_attention(
        a.query,
        k,
        v,
        tables,
        lengths,
        q_ends,
        bmm1_scale=a.bmm1 * (1.0 if a.bmm1_scale is None else a.bmm1_scale.double()),
        bmm2_scale=a.bmm2 * (1.0 if a.bmm2_scale is None else a.bmm2_scale.double()),
        soft_cap=a.soft_cap,
        causal=a.causal,
        window_left=a.window_left,
        sinks=a.sinks,
        mask=None if a.mask is None else reference.Mask(a.mask, a.mask_ends, a.mask_row_bytes),
    )
    a.out.copy_(reference.rounded(out, a.out.dtype))
    if a.lse is not None:
        a.lse.copy_(lse)


ATTENTION = Operation(
    Arguments,
    name="attention",
    kernels=(
        decode.KERNEL,
        prefill.KERNEL,
        prefill_wgmma.KERNEL,
        decode_masked.KERNEL,
        prefill_masked.KERNEL,
        prefill_wgmma_masked.KERNEL,
    ),
    problem=problem_of,
    problems=problems,
    tables=(TABLE,),
    reference=_reference,
    output="out",
    aligned=("query", "key_cache", "value_cache", "key_scales", "value_scales", "workspace_buffer", "out"),
    exclusive=("workspace_buffer", "out", "lse"),
)

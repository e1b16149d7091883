"""The operator of the gated delta rule."""

from __future__ import annotations

import functools

import torch

from jitfp4.arch import Arch
from jitfp4.engine import Launch, target_of
from jitfp4.errors import ArgumentError
from jitfp4.families.gdn.kernel import StateLayout
from jitfp4.families.gdn.selection import Problem, plan, shape_of
from jitfp4.formats import DType
from jitfp4.ops import operator
from jitfp4.reference import gdn as reference

DTYPES = {torch.bfloat16: DType.BF16, torch.float16: DType.F16}
STATE_DTYPES = {torch.float32: DType.F32, torch.bfloat16: DType.BF16}
BIAS_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


@functools.lru_cache(maxsize=4096)
def _plan(batch: int, value_heads: int, problem: Problem, arch: Arch) -> Launch:
    return plan(problem, shape_of(problem, arch), arch, batch=batch, value_heads=value_heads)


@operator(
    "gated_delta_rule(Tensor q, Tensor k, Tensor v, Tensor(a!) state, Tensor A_log, Tensor a, Tensor dt_bias, Tensor b,"
    " float scale, Tensor(b!) output, Tensor? initial_state_indices, Tensor? output_state_indices,"
    " Tensor(c!)? intermediate_states_buffer, Tensor? ssm_state_indices, bool update_state, bool use_qk_l2norm,"
    " bool k_major, bool? enable_pdl)",
    reference=reference.gated_delta_rule,
    aligned=("q", "k", "v", "state", "output"),
)
def gated_delta_rule(
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
    if steps is not None and steps.data_ptr() % 16:
        raise ArgumentError("intermediate_states_buffer", "an address between multiples of 16", "16-byte alignment")
    batch, tokens, heads, head_dim = q.shape
    value_heads = v.shape[2]
    problem = Problem(
        dtype=DTYPES[q.dtype],
        state_dtype=STATE_DTYPES[state.dtype],
        state_layout=StateLayout.KV if k_major else StateLayout.VK,
        head_dim=head_dim,
        tokens=tokens,
        heads=batch * value_heads,
        store_steps=steps is not None or step_indices is not None,
        step_slots=step_indices is not None,
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
        indices,
        write_indices,
        target,
        step_indices,
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
        BIAS_TYPES[dt_bias.dtype],
        _width(step_indices),
        _width(indices),
        _width(write_indices),
        int(update_state),
        int(use_qk_l2norm),
    )
    on = target_of(q)
    _plan(batch, value_heads, problem, on.arch).run(args, on, pdl=enable_pdl)


def _width(indices: torch.Tensor | None) -> int:
    """Bytes of an index; 0 where there is no list of them."""
    return 0 if indices is None else indices.element_size()

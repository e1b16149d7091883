"""The gated delta rule under FlashInfer's names: decode on states of either order, and several tokens on a pool."""

from __future__ import annotations

import operator

import torch

from jitfp4 import replay
from jitfp4.errors import ArgumentError
from jitfp4.families.gdn.checks import Call
from jitfp4.public import public


@public
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
    cache_replayssm: bool = False,
    replayssm_rawv: torch.Tensor | None = None,
    replayssm_rawk: torch.Tensor | None = None,
    replayssm_g: torch.Tensor | None = None,
    replayssm_beta: torch.Tensor | None = None,
    *,
    enable_pdl: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply the gated delta rule to 1 to 16 tokens of each request, on a pool of states: multi-token prediction.

    Args:
        q, k: [B, T, H, K] bf16 or fp16, T from 1 to 16, K 64 or 128. Heads dense; requests and tokens may be strided by
            multiples of 16 bytes, as in views of a packed projection. Every request has T tokens; like FlashInfer's
            function, this one has no cu_seqlens.
        v: [B, T, HV, V], q's dtype, HV a multiple of H; V = K, or 256 with K = 128 and float32 states. Value head hv
            uses q and k of head hv // (HV / H).
        initial_state: [pool, HV, V, K] float32 or bf16. The state of a head is dense and 16-byte aligned; slots, and
            heads of a slot, may have any strides without overlap. Like every argument that is written, it shares no
            memory with another one.
        initial_state_indices: [B] int32 or int64, the slot of each request. A request with a negative slot is skipped:
            its output is zero, also in an ``output`` that was given, and no state is read or written. (FlashInfer
            leaves rows of a given ``output`` alone, and its kernels of bf16 states use slot 0 for such a request.) In
            every list of slots, a slot beyond the pool is an error on the CPU; on the GPU, where the host reads no
            values, it counts as negative.
        A_log: [HV] float32.
        a: [B, T, HV], q's dtype or float32, heads dense, the decay gate before its non-linearity.
        dt_bias: [HV] float32, bf16 or fp16.
        b: [B, T, HV], q's dtype or float32, heads dense, the update gate before its non-linearity.
        scale: factor of q; None means 1 / sqrt(K).
        output: [B, T, HV, V], contiguous, filled in place; allocated when None. Of bf16, fp16 or float32; a dtype other
            than q's gets a copy of the values that were rounded to q's dtype.
        intermediate_states_buffer: [>= B, >= T, HV, V, K], initial_state's dtype, strided like initial_state; element
            [request, token] receives the state after that token.
        ssm_state_indices: [B, T] int32 or int64, the slot of initial_state that receives the state after each token;
            with a negative slot, the state is not stored. Excludes intermediate_states_buffer and
            disable_state_update.
        disable_state_update: do not write initial_state. None means False: the final state is written back.
            (FlashInfer's releases warn and take None for True; an engine that relies on that passes True.)
        use_qk_l2norm: divide q and k by their l2 norms.
        output_state_indices: [B] int32 or int64, the slot that receives the final state; with a negative slot, the
            state is not stored. None means initial_state_indices. With ssm_state_indices, None and the tensor
            initial_state_indices itself mean that no slot receives it, so that the initial state stays; any other
            tensor, whatever it holds, is written as well, after the states of the tokens. (So do FlashInfer's kernels
            of bf16 states; those of float32 states write no final state beside ssm_state_indices.)
        cache_replayssm, replayssm_rawv, replayssm_rawk, replayssm_g, replayssm_beta: not supported; False and None.
            FlashInfer has them for data-center Blackwell only. Keep states with intermediate_states_buffer instead.
        enable_pdl: programmatic dependent launch; None means wherever the GPU has it.
    Returns:
        ``(output, initial_state)``.
    Numerics:
        Float32 throughout; a bf16 state is widened once and rounded whenever it is stored. For each token::

            decay = exp(-exp(A_log) * softplus(a + dt_bias));   beta = 1 / (1 + exp(-b))
            q, k  = q * (1 / sqrt(sum(q * q) + 1e-6)), likewise k;   q = q * scale
            h     = decay * h;   u = (v - h k) * beta;   h = fma(u, k, h);   output = h q

        If tokens are taken one by one, every architecture adds in the same order (see reference/gdn.py), exp and log
        are within 2 ulp of the exact value, and everything else is correctly rounded. From 3 tokens on, calls that
        store only the last state may take all tokens at once (the chunkwise form: Yang et al., Gated Delta Networks,
        2024): equal up to rounding, about 1e-6 of the largest element of a state's row. The form depends on the shapes
        of a call, not on its values (families/gdn/tables.py).
    Raises:
        ArgumentError, ArgumentTypeError: before anything is written.
    """
    unsupported = {
        "cache_replayssm": cache_replayssm or None,
        "replayssm_rawv": replayssm_rawv,
        "replayssm_rawk": replayssm_rawk,
        "replayssm_g": replayssm_g,
        "replayssm_beta": replayssm_beta,
    }
    for name, given in unsupported.items():
        if given is not None:
            raise ArgumentError(name, "a value", "False and None: keep states with intermediate_states_buffer")
    check = Call("initial_state", q, k, v, initial_state, A_log, a, dt_bias, b, k_major=False)
    check.indices("initial_state_indices", initial_state_indices, check.batch)
    if output_state_indices is not None:
        check.indices("output_state_indices", output_state_indices, check.batch)
    if ssm_state_indices is not None:
        check.indices("ssm_state_indices", ssm_state_indices, check.batch, check.tokens)
        for name, excluded in (
            ("disable_state_update", disable_state_update),
            ("intermediate_states_buffer", intermediate_states_buffer is not None),
        ):
            if excluded:
                raise ArgumentError(name, "a value", "None together with ssm_state_indices")
    if intermediate_states_buffer is not None:
        check.steps("intermediate_states_buffer", intermediate_states_buffer)
    update_state = not disable_state_update
    if ssm_state_indices is not None:
        update_state = False
        if output_state_indices is not None and output_state_indices is not initial_state_indices:
            update_state = True
            replay.require(operator.is_not, output_state_indices, initial_state_indices)
    return check.run(
        scale,
        output,
        initial_state_indices,
        output_state_indices,
        intermediate_states_buffer,
        ssm_state_indices,
        update_state=update_state,
        use_qk_l2norm=use_qk_l2norm,
        enable_pdl=enable_pdl,
    )


@public
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
    intermediate_states_buffer: torch.Tensor | None = None,
    disable_state_update: bool = False,
    backend: str = "auto",
    *,
    enable_pdl: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply the gated delta rule to 1 to 16 tokens of each request; states are [V, K], updated in place.

    Args:
        q, k, v: as in gated_delta_rule_mtp().
        state: [B, HV, V, K] float32 or bf16, state n for request n, strided like a pool. None with a pool.
        A_log, a, dt_bias, b, scale, output, use_qk_l2norm: as in gated_delta_rule_mtp().
        initial_state, initial_state_indices, output_state_indices: a pool of states and its slots, as in
            gated_delta_rule_mtp(), instead of state.
        intermediate_states_buffer, disable_state_update: as in gated_delta_rule_mtp(), for any number of tokens.
        backend: FlashInfer's names "auto", "flashinfer", "cake_gdn" and "rubin" are accepted; all run the kernels of
            this package.
        enable_pdl: programmatic dependent launch; None means wherever the GPU has it.
    Returns:
        ``(output, state)``, or ``(output, initial_state)``. The numerics are gated_delta_rule_mtp()'s.
    Raises:
        ArgumentError, ArgumentTypeError: before anything is written.
    """
    _check_backend(backend, ("auto", "flashinfer", "cake_gdn", "rubin"))
    name, pool = ("state", state) if initial_state is None else ("initial_state", initial_state)
    if pool is None or (state is not None and initial_state is not None):
        raise ArgumentError("state, initial_state", "both or neither", "exactly one of them")
    if (initial_state is None) != (initial_state_indices is None):
        raise ArgumentError("initial_state_indices", "a pool or its indices alone", "initial_state with its indices")
    check = Call(name, q, k, v, pool, A_log, a, dt_bias, b, k_major=False)
    if initial_state_indices is not None:
        check.indices("initial_state_indices", initial_state_indices, check.batch)
    else:
        check.one_state_each()
    if output_state_indices is not None:
        if initial_state_indices is None:
            raise ArgumentError("output_state_indices", "given", "None without initial_state")
        check.indices("output_state_indices", output_state_indices, check.batch)
    if intermediate_states_buffer is not None:
        check.steps("intermediate_states_buffer", intermediate_states_buffer)
    return check.run(
        scale,
        output,
        initial_state_indices,
        output_state_indices,
        intermediate_states_buffer,
        update_state=not disable_state_update,
        use_qk_l2norm=use_qk_l2norm,
        enable_pdl=enable_pdl,
    )


@public
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
    backend: str = "auto",
    *,
    enable_pdl: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply the gated delta rule to one token of each request; states are [K, V], updated in place.

    Args:
        q, k, v: as in gated_delta_rule_mtp(), T = 1.
        state: [B, HV, K, V] float32, state n for request n, strided like a pool.
        A_log, a, dt_bias, b, scale, output, use_qk_l2norm: as in gated_delta_rule_mtp(), T = 1.
        backend: FlashInfer's names "auto", "flashinfer" and "cake_gdn" are accepted; all run the kernels of this
            package.
        enable_pdl: programmatic dependent launch; None means wherever the GPU has it.
    Returns:
        ``(output, state)``, the same bits as gated_delta_rule_decode_pretranspose() on the transposed state.
    Raises:
        ArgumentError, ArgumentTypeError: before anything is written.
    """
    _check_backend(backend, ("auto", "flashinfer", "cake_gdn"))
    check = Call("state", q, k, v, state, A_log, a, dt_bias, b, k_major=True)
    check.one_state_each()
    return check.run(scale, output, use_qk_l2norm=use_qk_l2norm, enable_pdl=enable_pdl)


def _check_backend(backend: str, names: tuple[str, ...]) -> None:
    if backend not in names:
        raise ArgumentError("backend", repr(backend), ", ".join(names))

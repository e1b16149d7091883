"""FlashInfer's kernels of the gated delta rule on bf16 states, under the names and parameters that they have there.

An engine that knows its states to be bf16 calls them past the public functions (``gdn_kernels.gdn_decode_bf16_state``).
"""

from __future__ import annotations

import torch

from jitfp4.errors import ArgumentError, ArgumentTypeError
from jitfp4.families.gdn import gated_delta_rule_mtp as _on_a_pool

_SOFTPLUS_THRESHOLD = 20.0  # from which FlashInfer's softplus(x) is x; log1p(exp(-20)) is 2e-9


def gated_delta_rule_mtp(
    A_log: torch.Tensor,  # noqa: N803 - FlashInfer's name
    a: torch.Tensor,
    dt_bias: torch.Tensor,
    softplus_beta: float = 1.0,
    softplus_threshold: float = _SOFTPLUS_THRESHOLD,
    q: torch.Tensor | None = None,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    b: torch.Tensor | None = None,
    initial_state_source: torch.Tensor | None = None,
    initial_state_indices: torch.Tensor | None = None,
    output_state_indices: torch.Tensor | None = None,
    intermediate_states_buffer: torch.Tensor | None = None,
    accepted_steps: torch.Tensor | None = None,
    ssm_state_indices: torch.Tensor | None = None,
    disable_state_update: bool = False,
    use_qk_l2norm_in_kernel: bool = True,
    scale: float | None = None,
    output: torch.Tensor | None = None,
    disable_output: bool = False,
    recovery_steps: int = 0,
) -> torch.Tensor:
    """Several tokens on a pool of states: ``jitfp4.gated_delta_rule_mtp`` by other names.

    Args:
        initial_state_source: initial_state there.
        use_qk_l2norm_in_kernel: use_qk_l2norm there.
        softplus_beta, softplus_threshold: 1 and 20.
        accepted_steps, disable_output, recovery_steps: any value but the default is an error.
    Returns:
        The output, [B, T, HV, V].
    Raises:
        ArgumentError, ArgumentTypeError: before anything is written. Its names are the public function's.
    """
    for name, value, only in (
        ("softplus_beta", softplus_beta, 1.0),
        ("softplus_threshold", softplus_threshold, _SOFTPLUS_THRESHOLD),
        ("disable_output", disable_output, False),
        ("recovery_steps", recovery_steps, 0),
    ):
        if value != only:
            raise ArgumentError(name, value, str(only))
    if accepted_steps is not None:
        raise ArgumentError("accepted_steps", "a tensor", "None")
    if q is None or k is None or v is None or b is None or initial_state_source is None:
        raise ArgumentTypeError("q, k, v, b, initial_state_source", "None", "tensors")
    if initial_state_indices is None:
        raise ArgumentTypeError("initial_state_indices", "None", "a tensor")
    out, _ = _on_a_pool(
        q,
        k,
        v,
        initial_state_source,
        initial_state_indices,
        A_log,
        a,
        dt_bias,
        b,
        scale=scale,
        output=output,
        intermediate_states_buffer=intermediate_states_buffer,
        ssm_state_indices=ssm_state_indices,
        disable_state_update=disable_state_update,
        use_qk_l2norm=use_qk_l2norm_in_kernel,
        output_state_indices=output_state_indices,
    )
    return out

"""What the operator takes."""

from __future__ import annotations

from typing import NamedTuple

import torch

from jitfp4.operation import Written


class Arguments(NamedTuple):
    """The arguments of gated_delta_rule_mtp(); ``k_major``: a head's state is [K, V]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    state: Written
    A_log: torch.Tensor
    a: torch.Tensor
    dt_bias: torch.Tensor
    b: torch.Tensor
    scale: float
    output: Written
    initial_state_indices: torch.Tensor | None
    output_state_indices: torch.Tensor | None
    intermediate_states_buffer: Written | None
    ssm_state_indices: torch.Tensor | None
    update_state: bool
    use_qk_l2norm: bool
    k_major: bool
    enable_pdl: bool | None
    names: str

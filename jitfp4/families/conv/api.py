"""Causal convolutions under vLLM's names, for prompts and for decoding."""

from __future__ import annotations

import torch

from jitfp4.dtypes import HALVES
from jitfp4.errors import ArgumentError
from jitfp4.families.conv.arguments import Arguments
from jitfp4.families.conv.operation import CONV
from jitfp4.public import public
from jitfp4.tensors import check_contiguous, check_device, check_dtype, check_same_device

_WIDTHS = (2, 3, 4)
_NO_SLOT = -1


def causal_conv1d_fn(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_states: torch.Tensor,
    query_start_loc: torch.Tensor,
    cache_indices: torch.Tensor | None = None,
    has_initial_state: torch.Tensor | None = None,
    activation: str | None = "silu",
    pad_slot_id: int = -1,
    null_block_id: int | None = 0,
    metadata: object = None,  # noqa: ARG001 - vLLM passes what its kernel needs
    validate_data: bool = False,
    *,
    enable_pdl: bool | None = None,
) -> torch.Tensor:
    """Short causal convolutions of prompts, each channel by itself, and the states behind them.

    Args:
        x: [channels, tokens], bf16 or fp16, 16-byte aligned, channels adjacent: the transposed view of
            [tokens, channels]. Sequences lie behind each other.
        weight: [channels, width], width 2 to 4, contiguous, 16-byte aligned, in x's dtype; column width - 1 is for the
            token itself. With dependent launch it is read before the kernel ahead has ended: where that one computes
            it, enable_pdl is False.
        bias: [channels], as weight; None for none.
        conv_states: [slots, channels, width - 1 or more], in x's dtype, with any strides, filled in place: the last
            width - 1 inputs of a sequence are in its first columns.
        query_start_loc: int32 [sequences + 1], contiguous: where each sequence begins, and the end of the last.
        cache_indices: int32 [sequences]: the slot of each sequence, different ones; None: its number. A sequence whose
            slot is ``pad_slot_id``, ``null_block_id`` or outside is left out: its outputs are unwritten.
        has_initial_state: bool [sequences], contiguous: whether its state comes before the first token of a sequence,
            or zeros; None: zeros.
        activation: "silu" or "swish", which is the same, or None.
        pad_slot_id: a negative number.
        null_block_id: see cache_indices; None for no such slot.
        metadata: anything, unused: the kernel finds the sequences by itself.
        validate_data: accepted: everything is always checked.
        enable_pdl: programmatic dependent launch; None means wherever the GPU has it.
    Returns:
        [channels, tokens] with adjacent channels, a new tensor of x's dtype.
    Numerics:
        With sums in float32, taps in their order:
        ``out[t] = round(silu(bias + sum over j of weight[j] * x[t - width + 1 + j]))``. The exponential and the
        quotient of silu are approximate, with relative errors of about 2**-22; below sums of -87 it is 0 or -0.
    Raises:
        ArgumentError, ArgumentTypeError: before anything is written.
    """
    return _of_prompts(
        *(x, weight, bias, conv_states, query_start_loc, cache_indices, has_initial_state),
        *(activation, pad_slot_id, null_block_id, validate_data, enable_pdl),
    )


@public
def causal_conv1d_update(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: bool | str | None = None,
    conv_state_indices: torch.Tensor | None = None,
    num_accepted_tokens: torch.Tensor | None = None,
    query_start_loc: torch.Tensor | None = None,
    max_query_len: int = -1,
    null_block_id: int | None = 0,
    validate_data: bool = False,  # noqa: ARG001 - arguments are always checked
    out: torch.Tensor | None = None,
    *,
    enable_pdl: bool | None = None,
) -> torch.Tensor:
    """Short causal convolutions of the next tokens of sequences, each channel by itself, and the states behind them.

    Args:
        x: bf16 or fp16, 16-byte aligned, channels adjacent: [sequences, channels], a token of each; [sequences,
            channels, tokens], as many of each; or with ``query_start_loc`` [tokens, channels].
        conv_state: [slots, channels, length], in x's dtype, with any strides, updated in place: see Numerics.
        weight, bias: see causal_conv1d_fn().
        activation: True, "silu" or "swish", which are the same, or None or False.
        conv_state_indices: int32 [sequences]: the slot of each sequence, different ones; None: its number. A sequence
            whose slot is ``null_block_id`` or outside is left out: its outputs are unwritten.
        num_accepted_tokens: int32 [sequences], contiguous, with drafted tokens: how many tokens of the call before
            stay, 1 or more.
        query_start_loc: int32 [sequences + 1], contiguous: where each sequence begins, and the end of the last. Needs
            ``conv_state_indices``.
        max_query_len: with ``query_start_loc`` and drafted tokens, the most tokens of a sequence, for which states must
            have room; 0 or less: not checked.
        null_block_id: see conv_state_indices; None for no such slot.
        validate_data: accepted: everything is always checked.
        out: of x's shape and dtype, channels adjacent, to fill in place: x itself, or memory of its own. None: x is
            overwritten.
        enable_pdl: programmatic dependent launch; None means wherever the GPU has it.
    Returns:
        out, or x.
    Numerics:
        As causal_conv1d_fn(). The inputs before a call are the first width - 1 columns of the state, with drafted
        tokens those from ``num_accepted_tokens - 1`` on. Afterwards the state's first columns are the last width - 1
        inputs, with drafted tokens all inputs but the first, which are width - 2 more than there are tokens; what goes
        beyond ``length`` is lost.
    Raises:
        ArgumentError, ArgumentTypeError: before anything is written.
    """
    check_dtype("x", x, tuple(HALVES))
    check_device("x", x)
    if x.dim() not in ((2, 3) if query_start_loc is None else (2,)) or (x.shape[1] > 1 and x.stride(1) != 1):
        raise ArgumentError(
            "x", f"shape {tuple(x.shape)}, strides {x.stride()}", "[.., channels(, ..)], channels adjacent"
        )
    if query_start_loc is not None and conv_state_indices is None:
        raise ArgumentError("conv_state_indices", "None", "a tensor with query_start_loc")
    given = len(x)
    if query_start_loc is not None and conv_state_indices is not None:
        if conv_state_indices.dim() != 1:
            raise ArgumentError("conv_state_indices", f"shape {tuple(conv_state_indices.shape)}", "[sequences]")
        given = len(conv_state_indices)
    _check_lists(x, query_start_loc, given, ("conv_state_indices", conv_state_indices))
    if num_accepted_tokens is not None:
        _check_list("num_accepted_tokens", num_accepted_tokens, given, x)
        check_contiguous("num_accepted_tokens", num_accepted_tokens)
        _check_room(conv_state, weight, max_query_len if query_start_loc is not None else x.shape[2:].numel())
    target = x if out is None else out
    check_dtype("out", target, (x.dtype,))
    check_same_device("out", target, x)
    if target.shape != x.shape or (x.shape[1] > 1 and target.stride(1) != 1):
        raise ArgumentError(
            "out", f"shape {tuple(target.shape)}, strides {target.stride()}", f"{tuple(x.shape)}, channels adjacent"
        )
    rows, result = (_by_tokens(tensor, query_start_loc is not None) for tensor in (x, target))
    in_place = target is x
    if not in_place and not torch.compiler.is_dynamo_compiling():  # which cannot compare addresses
        in_place = target.data_ptr() == x.data_ptr() and target.stride() == x.stride()
    _convolve(
        x=None if in_place else rows,
        out=result,
        weight=weight,
        bias=bias,
        states=conv_state,
        starts=query_start_loc,
        slots=conv_state_indices,
        has_state=None,
        accepted=num_accepted_tokens,
        sequences=given,
        null_slot=_NO_SLOT if null_block_id is None else null_block_id,
        update=True,
        silu=_has_silu("silu" if activation is True else activation or None),
        names="states=conv_state,slots=conv_state_indices,accepted=num_accepted_tokens,starts=query_start_loc",
        enable_pdl=enable_pdl,
    )
    return target


@public
def _of_prompts(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_states: torch.Tensor,
    query_start_loc: torch.Tensor,
    cache_indices: torch.Tensor | None,
    has_initial_state: torch.Tensor | None,
    activation: str | None,
    pad_slot_id: int,
    null_block_id: int | None,
    validate_data: bool,  # noqa: ARG001 - arguments are always checked
    enable_pdl: bool | None,
) -> torch.Tensor:
    """causal_conv1d_fn() without metadata: a call that can be remembered, whatever vLLM passes as those."""
    check_dtype("x", x, tuple(HALVES))
    check_device("x", x)
    if x.dim() != 2 or (x.shape[0] > 1 and x.stride(0) != 1):
        raise ArgumentError(
            "x", f"shape {tuple(x.shape)}, strides {x.stride()}", "[channels, tokens], channels adjacent"
        )
    if pad_slot_id >= 0:
        raise ArgumentError("pad_slot_id", pad_slot_id, "a negative number")
    check_dtype("query_start_loc", query_start_loc, (torch.int32,))
    if query_start_loc.dim() != 1 or len(query_start_loc) < 1:
        raise ArgumentError("query_start_loc", f"shape {tuple(query_start_loc.shape)}", "[sequences + 1]")
    sequences = len(query_start_loc) - 1
    _check_lists(x, query_start_loc, sequences, ("cache_indices", cache_indices))
    if has_initial_state is not None:
        check_dtype("has_initial_state", has_initial_state, (torch.bool,))
        check_same_device("has_initial_state", has_initial_state, x)
        if tuple(has_initial_state.shape) != (sequences,):
            raise ArgumentError("has_initial_state", f"shape {tuple(has_initial_state.shape)}", f"({sequences},)")
        check_contiguous("has_initial_state", has_initial_state)
    out = torch.empty((x.shape[1], x.shape[0]), dtype=x.dtype, device=x.device)
    _convolve(
        x=x.T,
        out=out,
        weight=weight,
        bias=bias,
        states=conv_states,
        starts=query_start_loc,
        slots=cache_indices,
        has_state=has_initial_state,
        accepted=None,
        sequences=sequences,
        null_slot=_NO_SLOT if null_block_id is None else null_block_id,
        update=False,
        silu=_has_silu(activation),
        names="states=conv_states,slots=cache_indices,has_state=has_initial_state,starts=query_start_loc",
        enable_pdl=enable_pdl,
    )
    return out.T


def _by_tokens(tensor: torch.Tensor, ragged: bool) -> torch.Tensor:
    """[tokens, channels] of ragged sequences, else [sequences, tokens, channels]."""
    return tensor if ragged else tensor.unsqueeze(1) if tensor.dim() == 2 else tensor.transpose(1, 2)


def _convolve(
    *,
    x: torch.Tensor | None,
    out: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    starts: torch.Tensor | None,
    slots: torch.Tensor | None,
    has_state: torch.Tensor | None,
    accepted: torch.Tensor | None,
    sequences: int,
    null_slot: int,
    update: bool,
    silu: bool,
    names: str,
    enable_pdl: bool | None,
) -> torch.Tensor:
    channels, of_states = out.shape[-1], names.partition(",")[0].partition("=")[2]
    check_dtype("weight", weight, (out.dtype,))
    check_same_device("weight", weight, out)
    if weight.dim() != 2 or weight.shape[0] != channels or weight.shape[1] not in _WIDTHS:
        raise ArgumentError("weight", f"shape {tuple(weight.shape)}", f"[{channels}, 2 to 4]")
    check_contiguous("weight", weight)
    if bias is not None:
        check_dtype("bias", bias, (out.dtype,))
        check_same_device("bias", bias, out)
        if tuple(bias.shape) != (channels,):
            raise ArgumentError("bias", f"shape {tuple(bias.shape)}", f"({channels},)")
        check_contiguous("bias", bias)
    check_dtype(of_states, states, (out.dtype,))
    check_same_device(of_states, states, out)
    past = weight.shape[1] - 1
    if states.dim() != 3 or states.shape[1] != channels or states.shape[2] < past:
        raise ArgumentError(of_states, f"shape {tuple(states.shape)}", f"[slots, {channels}, {past} or more]")
    if slots is None and states.shape[0] < sequences:
        raise ArgumentError(of_states, f"{states.shape[0]} slots", f"{sequences}, as there are sequences, or more")
    for name, tensor in ((of_states, states), ("x", out if x is None else x), ("out", out)):
        _check_apart(name, tensor)
    CONV(
        Arguments(
            x=x,
            weight=weight,
            bias=bias,
            states=states,
            starts=starts,
            slots=slots,
            has_state=has_state,
            accepted=accepted,
            out=out,
            sequences=sequences,
            null_slot=null_slot,
            has_by_default=update,
            by_sequence=update,
            silu=silu,
            enable_pdl=enable_pdl,
            names=f"{names},out={'x' if x is None else 'out'}",
        )
    )
    return out


def _has_silu(activation: bool | str | None) -> bool:
    if activation not in (None, "silu", "swish"):
        raise ArgumentError("activation", repr(activation), "'silu', 'swish' or None")
    return activation is not None


def _check_lists(
    x: torch.Tensor, starts: torch.Tensor | None, sequences: int, slots: tuple[str, torch.Tensor | None]
) -> None:
    if starts is not None:
        _check_list("query_start_loc", starts, sequences + 1, x)
        check_contiguous("query_start_loc", starts)
    if slots[1] is not None:
        _check_list(slots[0], slots[1], sequences, x)


def _check_room(states: torch.Tensor, weight: torch.Tensor, tokens: int) -> None:
    """Check that all inputs but the first fit into a state."""
    if weight.dim() != 2 or weight.shape[1] not in _WIDTHS or states.dim() != 3:
        return  # refused later
    if states.shape[2] < weight.shape[1] - 2 + tokens:
        needed = f"width - 2 + {tokens} columns of drafted tokens"
        raise ArgumentError("conv_state, max_query_len", f"{states.shape[2]} columns", needed)


def _check_apart(name: str, tensor: torch.Tensor) -> None:
    if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        raise ArgumentError(name, f"strides {tensor.stride()}", "memory for each element")


def _check_list(name: str, tensor: torch.Tensor, length: int, like: torch.Tensor) -> None:
    check_dtype(name, tensor, (torch.int32,))
    check_same_device(name, tensor, like)
    if tuple(tensor.shape) != (length,):
        raise ArgumentError(name, f"shape {tuple(tensor.shape)}", f"({length},)")
    _check_apart(name, tensor)

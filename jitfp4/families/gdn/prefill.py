"""The gated delta rule for whole prompts, under FlashInfer's name."""

from __future__ import annotations

import torch

from jitfp4.dtypes import HALVES
from jitfp4.errors import ArgumentError
from jitfp4.families.gdn.prefill_arguments import CHUNK, PrefillArguments
from jitfp4.families.gdn.prefill_operation import GATED_DELTA_RULE_PREFILL
from jitfp4.families.gdn.problem import HEAD_DIMS, STATE_DTYPES, VALUE_DIMS
from jitfp4.public import public
from jitfp4.tensors import check_contiguous, check_device, check_dtype, check_list, check_same_device
from jitfp4.tensors import output as output_of

_BACKENDS = ("auto", "flashinfer", "cake_gdn", "cudnn")


@public
def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    output: torch.Tensor | None = None,
    output_state: torch.Tensor | None = None,
    state_checkpoints: torch.Tensor | None = None,
    checkpoint_cu_starts: torch.Tensor | None = None,
    checkpoint_every_n_tokens: int = 0,
    use_cp: str | bool = "auto",
    state_indices: torch.Tensor | None = None,
    _cp_chunk_len: int | None = None,
    backend: str = "auto",
    max_seqlen: int | None = None,
    *,
    enable_pdl: bool | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Apply the gated delta rule to whole prompts of any lengths, in chunks of 64 tokens.

    Args:
        q, k: [T, H, K], [T, HK, K] bf16 or fp16, K 64 or 128, the tokens of all sequences one after the other. Heads
            dense; tokens may be strided by multiples of 16 bytes, as in views of a packed projection.
        v: [T, HV, V], q's dtype, V = K, or 256 with K = 128. With HO = max(H, HK, HV) heads of the output, head h uses
            head h // (HO / H) of q, and likewise of k and v; each number of heads divides HO.
        g: [T, HO] float32, contiguous: the factor by which a token lets the state decay (FlashInfer's alpha, not its
            logarithm). None means 1.
        beta: [T, HO] float32, contiguous, the update gate. None means 1.
        scale: factor of q; None means 1 / sqrt(K).
        initial_state: [N, HO, V, K] float32 or bf16, for N sequences, or with state_indices a pool of any length. The
            states of a slot are dense. None means zeros.
        output_final_state: return the final states too.
        cu_seqlens: [N + 1] int32 or int64: sequence n has tokens cu_seqlens[n] to cu_seqlens[n + 1]. Required. Bounds
            outside [0, T] count as the nearest one inside, and a sequence that ends before it starts as empty; the
            sequences must not overlap.
        use_qk_l2norm_in_kernel: divide q and k by their l2 norms, sqrt(sum + 1e-6).
        output: [T, HO, V], contiguous, q's dtype, filled in place; allocated when None.
        output_state: the final states, shaped and strided like initial_state and of its dtype; it may be initial_state
            itself. Allocated when None and output_final_state is set, in float32 unless initial_state has another
            dtype; with state_indices it is required.
        state_checkpoints: [C, HO, V, K], contiguous, of the states' dtype: receives the state after every
            checkpoint_every_n_tokens tokens of a sequence, those of sequence n from checkpoint_cu_starts[n] on. A place
            outside it is not written.
        checkpoint_cu_starts: [N + 1] int32 or int64, with state_checkpoints.
        checkpoint_every_n_tokens: a multiple of 64; 0 for no checkpoints.
        use_cp: FlashInfer's choice between its kernels, "auto", True or False. All run the kernels of this package.
        state_indices: [N] int32 or int64, the slot of each sequence in the pools of states. A sequence with a slot
            outside the pool is skipped; its output is zero, and no state is read or written.
        _cp_chunk_len: FlashInfer's for its tests; None, as parts of sequences have this package's lengths.
        backend: FlashInfer's names "auto", "flashinfer", "cake_gdn" and "cudnn" are accepted; all run the kernels of
            this package.
        max_seqlen: FlashInfer's bound on the lengths; not needed.
        enable_pdl: programmatic dependent launch; None means wherever the GPU has it.
    Returns:
        ``output``, or ``(output, final states)`` with output_final_state.
    Numerics:
        For each token, with decay = g::

            h = decay * h;   u = (v - h k) * beta;   h = h + u k^T;   output = h (q * scale)

        On CPU tensors exactly that, in float32. The kernel takes 64 tokens at once (Yang et al., Gated Delta Networks,
        2024): products have 16-bit operands and float32 sums; the state stays in float32, but is rounded to 16 bits
        where it is multiplied, as are u and the inverse of the chunk's triangular system, which is computed in
        float32, or for many states on Hopper from products of float16 numbers. On Hopper, few long sequences are
        computed in parts, each from zero and then from the state before it, which the parts' maps of a state to the
        next give in float32. So NaN or infinity in a token may reach the outputs of up to 63 tokens before it.
    Raises:
        ArgumentError, ArgumentTypeError: before anything is written.
    """
    if cu_seqlens is None:
        raise ArgumentError("cu_seqlens", "None", "[N + 1] int32 or int64")
    if backend not in _BACKENDS:
        raise ArgumentError("backend", repr(backend), ", ".join(_BACKENDS))
    if use_cp not in ("auto", True, False):
        raise ArgumentError("use_cp", repr(use_cp), "'auto', True or False")
    if max_seqlen is not None and max_seqlen < 0:
        raise ArgumentError("max_seqlen", max_seqlen, "None or a number of tokens")
    if _cp_chunk_len is not None:
        raise ArgumentError("_cp_chunk_len", _cp_chunk_len, "None: the parts of sequences have this package's lengths")
    heads, sequences = _check_inputs(q, k, v, g, beta, cu_seqlens)
    head_shape = heads, v.shape[2], q.shape[2]
    pooled = state_indices is not None
    if state_indices is not None:
        check_list("state_indices", state_indices, q, sequences)
    slots = None if pooled else sequences
    if initial_state is not None:
        _check_state("initial_state", initial_state, slots, head_shape, initial_state.dtype, q)
    if output_final_state and output_state is None:
        if pooled:
            raise ArgumentError("output_state", "None", "a pool of states with state_indices")
        dtype = torch.float32 if initial_state is None else initial_state.dtype
        output_state = torch.empty(sequences, *head_shape, dtype=dtype, device=q.device)
    if output_state is not None and not output_final_state:
        raise ArgumentError("output_state", "given", "None without output_final_state")
    known = next((s.dtype for s in (initial_state, output_state, state_checkpoints) if s is not None), torch.float32)
    if output_state is not None:
        _check_state("output_state", output_state, slots, head_shape, known, q)
        if initial_state is not None and pooled and initial_state.shape[0] != output_state.shape[0]:
            raise ArgumentError("output_state", f"{output_state.shape[0]} slots", f"{initial_state.shape[0]}")
    _check_checkpoints(
        state_checkpoints, checkpoint_cu_starts, checkpoint_every_n_tokens, sequences, head_shape, known, q
    )
    out = output_of("output", output, (q.shape[0], *head_shape[:2]), (q.dtype,), like=q)
    in_place = initial_state is not None and initial_state is output_state
    if output_state is not None and q.shape[0] == 0 and not in_place:
        _carry(initial_state, output_state, state_indices)
    GATED_DELTA_RULE_PREFILL(
        PrefillArguments(
            q=q,
            k=k,
            v=v,
            g=g,
            beta=beta,
            scale=q.shape[2] ** -0.5 if scale is None else float(scale),
            initial_state=None if in_place else initial_state,
            final_state=output_state,
            cu_seqlens=cu_seqlens,
            state_indices=state_indices,
            state_checkpoints=state_checkpoints,
            checkpoint_cu_starts=checkpoint_cu_starts,
            checkpoint_every_n_tokens=checkpoint_every_n_tokens,
            output=out,
            in_place=in_place,
            use_qk_l2norm=use_qk_l2norm_in_kernel,
            enable_pdl=enable_pdl,
            names="final_state=output_state",
        )
    )
    return out if output_state is None else (out, output_state)


def _check_inputs(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None,
    beta: torch.Tensor | None,
    cu_seqlens: torch.Tensor,
) -> tuple[int, int]:
    """The number of heads of the output, and of sequences."""
    check_dtype("q", q, tuple(HALVES))
    check_device("q", q)
    if q.dim() != 3 or q.shape[1] == 0 or q.shape[2] not in HEAD_DIMS:
        raise ArgumentError("q", f"shape {tuple(q.shape)}", "[T, H, 64 or 128]")
    tokens, _, head_dim = q.shape
    for name, tensor, dims in (("k", k, (head_dim,)), ("v", v, VALUE_DIMS[head_dim])):
        check_dtype(name, tensor, (q.dtype,))
        check_same_device(name, tensor, q)
        if tensor.dim() != 3 or tensor.shape[0] != tokens or tensor.shape[1] == 0 or tensor.shape[2] not in dims:
            raise ArgumentError(
                name, f"shape {tuple(tensor.shape)}", f"[{tokens}, heads, {' or '.join(map(str, dims))}]"
            )
    heads = max(q.shape[1], k.shape[1], v.shape[1])
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if heads % tensor.shape[1]:
            raise ArgumentError(name, f"{tensor.shape[1]} heads", f"a divisor of {heads}, the most of q, k and v")
        row = tensor.shape[1] * tensor.shape[2]
        dense = tensor.stride(2) == 1 and (tensor.shape[1] == 1 or tensor.stride(1) == tensor.shape[2])
        if not dense or (tokens > 1 and (tensor.stride(0) < row or tensor.stride(0) % 8)):
            raise ArgumentError(
                name, f"strides {tensor.stride()}", "dense heads, tokens apart by a multiple of 16 bytes"
            )
    for name, gate in (("g", g), ("beta", beta)):
        if gate is not None:
            check_dtype(name, gate, (torch.float32,))
            check_same_device(name, gate, q)
            if tuple(gate.shape) != (tokens, heads):
                raise ArgumentError(name, f"shape {tuple(gate.shape)}", f"({tokens}, {heads})")
            check_contiguous(name, gate)
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
        raise ArgumentError("cu_seqlens", f"shape {tuple(cu_seqlens.shape)}", "[N + 1], N at least 1")
    check_list("cu_seqlens", cu_seqlens, q)
    return heads, cu_seqlens.shape[0] - 1


def _check_state(
    name: str, state: torch.Tensor, slots: int | None, shape: tuple[int, ...], dtype: torch.dtype, like: torch.Tensor
) -> None:
    check_dtype(name, state, tuple(STATE_DTYPES))
    check_dtype(name, state, (dtype,))
    check_same_device(name, state, like)
    if state.dim() != 4 or tuple(state.shape[1:]) != shape or slots not in (None, state.shape[0]):
        wanted = ("slots" if slots is None else slots, *shape)
        raise ArgumentError(name, f"shape {tuple(state.shape)}", f"[{', '.join(map(str, wanted))}]")
    step = 16 // state.element_size()
    dense = state.shape[0] == 0 or state[0].is_contiguous()
    if not dense or (state.shape[0] > 1 and (state.stride(0) < state[0].numel() or state.stride(0) % step)):
        raise ArgumentError(name, f"strides {state.stride()}", f"dense slots, apart by a multiple of {step}")


def _check_checkpoints(
    checkpoints: torch.Tensor | None,
    starts: torch.Tensor | None,
    every: int,
    sequences: int,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    like: torch.Tensor,
) -> None:
    if every < 0 or every % CHUNK:
        raise ArgumentError("checkpoint_every_n_tokens", every, f"0 or a multiple of {CHUNK}")
    for name, given in (("state_checkpoints", checkpoints), ("checkpoint_cu_starts", starts)):
        if (given is None) != (every == 0):
            got, wanted = ("None", "a tensor") if given is None else ("a tensor", "None")
            raise ArgumentError(f"{name}, checkpoint_every_n_tokens", f"{got} with {every}", f"{wanted} with {every}")
    if checkpoints is not None and starts is not None:
        _check_state("state_checkpoints", checkpoints, None, shape, dtype, like)
        check_contiguous("state_checkpoints", checkpoints)
        check_list("checkpoint_cu_starts", starts, like, sequences + 1)


def _carry(initial: torch.Tensor | None, final: torch.Tensor, slots: torch.Tensor | None) -> None:
    """The final states of sequences without tokens."""
    where = slice(None) if slots is None else slots[(slots >= 0) & (slots < final.shape[0])].long()
    final[where] = 0 if initial is None else initial[where]

"""The gated delta rule in float32, in the order of operations of the kernel that walks the tokens one by one.

Equal bits wherever exp and log agree. ``fma`` is one rounding; every other operation rounds for itself. The chunkwise
kernel, which takes many tokens at once, differs from it by rounding errors.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from jitfp4.errors import ArgumentError

LANES = 8
"""Lanes of a warp that share a state row and sum its columns between them."""

NORM_EPS = 1e-6
SOFTPLUS_LINEAR_FROM = 20.0


def gates(
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,  # noqa: N803 - FlashInfer's name
    dt_bias: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(decay, beta)``, float32 [B, T, HV], of a, b [B, T, HV] and A_log, dt_bias [HV].

    ``decay = exp(-exp(A_log) * softplus(a + dt_bias))`` with ``softplus(x) = x`` above 20, ``beta = 1 / (1 +
    exp(-b))``.
    """
    x = a.float() + dt_bias.float()
    softplus = torch.where(x > SOFTPLUS_LINEAR_FROM, x, torch.log1p(torch.exp(x)))
    return torch.exp(-torch.exp(A_log) * softplus), 1.0 / (1.0 + torch.exp(-b.float()))


def normalize(x: torch.Tensor) -> torch.Tensor:
    """``x * (1 / sqrt(sum(x * x) + 1e-6))`` over the last dimension, in float32.

    Four neighbours add up in ascending order by fma; the sums of neighbouring fours then add up in pairs.
    """
    x = x.float()
    fours = x.unflatten(-1, (-1, 4))
    total = fours[..., 0] * fours[..., 0]
    for i in range(1, 4):
        total = fma(fours[..., i], fours[..., i], total)
    norm = torch.sqrt(
        (_pairwise(total) + NORM_EPS).double()
    ).float()  # torch's float32 square root is off by an ulp on CPUs
    return x * (1.0 / norm).unsqueeze(-1)


def dot_rows(h: torch.Tensor, x: torch.Tensor, vec: int) -> torch.Tensor:
    """``sum(h * x)`` over the last dimension, as the eight lanes of a row form it: [..., V, K] by [..., 1, K] to [...,
    V].

    Lane l holds columns ``8 * vec * m + vec * l + i``, ``i < vec``. It sums the even and the odd ones in ascending
    order by fma and adds the two; then the sums of neighbouring lanes add up in pairs.
    """
    rows, columns = (t.unflatten(-1, (-1, LANES, vec // 2, 2)) for t in (h, x))
    shares = [(rows[..., m, :, i, :], columns[..., m, :, i, :]) for m in range(rows.shape[-4]) for i in range(vec // 2)]
    total = shares[0][0] * shares[0][1]
    for left, right in shares[1:]:
        total = fma(left, right, total)
    return _pairwise(total[..., 0] + total[..., 1])


def delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    h: torch.Tensor,
    scale: float,
    *,
    use_qk_l2norm: bool,
    vec: int,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Walk the tokens: yields ``(out, h)`` after each, float32 [B, HV, V] and [B, HV, V, K].

    Args:
        q, k: [B, T, H, K]; value head hv uses head ``hv // (HV // H)``.
        v: [B, T, HV, V].
        decay, beta: [B, T, HV] float32, as gates() gives them.
        h: [B, HV, V, K] float32, the state before the first token; left as it is.
        scale: multiplies q after its normalisation.
        vec: columns of a 16-byte access to the state in memory (4 for float32, 8 for bf16): sets the order of sums.
    """
    prepare = normalize if use_qk_l2norm else torch.Tensor.float
    ratio = v.shape[2] // q.shape[2]
    q, k = (prepare(x).repeat_interleave(ratio, dim=2).unsqueeze(-2) for x in (q, k))
    q = q * torch.tensor(scale, dtype=torch.float32, device=q.device)
    for t in range(v.shape[1]):
        h = h * decay[:, t, :, None, None]
        u = (v[:, t].float() - dot_rows(h, k[:, t], vec)) * beta[:, t, :, None]
        h = fma(u.unsqueeze(-1).expand_as(h), k[:, t].expand_as(h), h)
        yield dot_rows(h, q[:, t], vec), h


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
    _: bool | None = None,
) -> None:
    """The operator ``jitfp4::gated_delta_rule``: fills ``out`` and the states in place, as its kernel does.

    Raises ArgumentError for a slot beyond the pool, before anything is written.
    """
    _check_slots("initial_state_indices", indices, len(state))
    _check_slots("output_state_indices", output_indices, len(state))
    _check_slots("ssm_state_indices", step_indices, len(state))
    requests = torch.arange(q.shape[0], device=q.device)
    slots = requests if indices is None else indices.long()
    live = requests[slots >= 0]
    slots = slots[live]
    out.zero_()
    h = state[slots].float()
    decay, beta = gates(a[live], b[live], A_log, dt_bias)
    h, vec = h.mT if k_major else h, 16 // state.element_size()
    walk = delta_rule(q[live], k[live], v[live], decay, beta, h, scale, use_qk_l2norm=use_qk_l2norm, vec=vec)
    for t, (out_t, h) in enumerate(walk):
        out[live, t] = out_t.to(out.dtype)
        if step_indices is not None:
            _write(state, step_indices[live, t].long(), h)
        elif steps is not None:
            steps[live, t] = h.to(steps.dtype)
    if update_state:
        _write(state, slots if output_indices is None else output_indices[live].long(), h.mT if k_major else h)


def _check_slots(name: str, slots: torch.Tensor | None, pool: int) -> None:
    if slots is not None and slots.numel() and (last := int(slots.max())) >= pool:
        raise ArgumentError(name, f"slot {last}", f"slots below {pool}, or negative ones")


def _write(pool: torch.Tensor, slots: torch.Tensor, h: torch.Tensor) -> None:
    """``h`` to its slots of the pool; negative slots are skipped."""
    pool[slots[slots >= 0]] = h[slots >= 0].to(pool.dtype)


def fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """``a * b + c`` of float32 tensors with one rounding.

    The product is exact in float64. The sum is rounded to odd there: what is lost sets the last bit, so that the second
    rounding, to float32, cannot tell it from the exact sum.
    """
    product, c = a.double() * b.double(), c.double()
    total = product + c
    shadow = total - product
    lost = (product - (total - shadow)) + (c - shadow)
    bits = total.view(torch.int64)
    away = (lost > 0) == (total > 0)
    make_odd = (lost.abs() > 0) & (bits & 1 == 0)  # false where lost is NaN, beside an infinity
    return torch.where(make_odd, bits + torch.where(away, 1, -1), bits).view(torch.float64).float()


def _pairwise(x: torch.Tensor) -> torch.Tensor:
    """The sum over the last dimension, a power of two: neighbours first."""
    while x.shape[-1] > 1:
        x = x[..., 0::2] + x[..., 1::2]
    return x[..., 0]

"""Byte comparison that says where the first difference is."""

from __future__ import annotations

import torch

POISON = 0xA5


def poisoned(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """An output filled with a pattern that no test expects, so that an unwritten byte is seen."""
    out = torch.empty(shape, dtype=dtype, device=device)
    out.view(torch.uint8).fill_(POISON)
    return out


def assert_same_bytes(name: str, got: torch.Tensor, want: torch.Tensor) -> None:
    """Equal shape, dtype and bytes; on failure the count, and the first index with both values in hex."""
    assert got.shape == want.shape, f"{name}: shape {tuple(got.shape)}, wanted {tuple(want.shape)}"
    assert got.dtype == want.dtype, f"{name}: {got.dtype}, wanted {want.dtype}"
    left, right = (t.detach().cpu().contiguous().view(torch.uint8) for t in (got, want))
    if torch.equal(left, right):
        return
    wrong = (left != right).nonzero()
    first = tuple(wrong[0].tolist())
    raise AssertionError(
        f"{name}: {len(wrong)} of {left.numel()} bytes differ; first at {first}: "
        f"got {left[first].item():#04x}, wanted {right[first].item():#04x}"
    )

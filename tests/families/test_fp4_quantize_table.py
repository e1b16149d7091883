"""Float8 input through a table of thresholds, where a GPU does not convert to E2M1: the bytes of the reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from jitfp4 import SfLayout, nvfp4_quantize, sim
from jitfp4.engine import target_of
from jitfp4.families.quantize.kernels.e4m3 import TACTICS as TABLE_TACTICS
from jitfp4.families.quantize.kernels.e4m3 import TableTactic
from jitfp4.families.quantize.operation import QUANTIZE
from jitfp4.reference import quantize as reference
from tests.support.compare import assert_same_bytes, poisoned

LAYOUTS = list(SfLayout)


@pytest.mark.parametrize("tactic", TABLE_TACTICS, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: x.tag)
def test_float8_input_through_the_table_is_the_reference(layout: SfLayout, tactic: TableTactic, device: str) -> None:
    skip_where_the_gpu_converts(device)
    generator = torch.Generator().manual_seed(6)
    tall, long = (random_float8(shape, generator) for shape in ((133, 208), (6, 1040)))
    for a, scale in ((long, 2.0), *((tall, scale) for scale in (1.0, 37.3, 0.01, 1e-30, 1e30))):
        assert_through_the_table(a, scale, layout, tactic, device)


@pytest.mark.parametrize("shape", [(260, 2400), (20, 6416)], ids=str)
def test_a_warp_takes_several_tasks_of_float8_input(shape: tuple[int, int], device: str) -> None:
    """In rows of fewer tasks than there are warps, which do not divide them, and of more: a task begins in the next."""
    skip_where_the_gpu_converts(device)
    if (place := sim.active_device()) is None:
        pytest.skip("needs a GPU of one SM")
    a = random_float8(shape, torch.Generator().manual_seed(7))
    with sim.device(replace(place.arch, num_sms=1)):
        assert_through_the_table(a, 2.0, SfLayout.layout_128x4, TABLE_TACTICS[0], device)


def skip_where_the_gpu_converts(device: str) -> None:
    place = sim.active_device() or (target_of(torch.empty(1, device=device)) if device == "cuda" else None)
    if place is not None and place.arch.has_e2m1_cvt:
        pytest.skip("the GPU converts to E2M1 itself")


def random_float8(shape: tuple[int, int], generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 256, shape, generator=generator).to(torch.uint8).view(torch.float8_e4m3fn)


def assert_through_the_table(a: torch.Tensor, scale: float, layout: SfLayout, tactic: TableTactic, device: str) -> None:
    g, (m, k) = torch.tensor([scale]), a.shape
    q = poisoned((m, k // 2), torch.uint8, device)
    sf = poisoned(layout.shape(m, k // 16), torch.uint8, device)
    with QUANTIZE.forced(tactic):
        nvfp4_quantize(a.to(device), g.to(device), layout, out=q, out_sf=sf)
    want_q, want_sf = reference.nvfp4_quantize(a, g, layout)
    assert_same_bytes("codes", q, want_q)
    assert_same_bytes("scales", sf, want_sf)

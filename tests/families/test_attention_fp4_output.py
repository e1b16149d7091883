"""Attention into an FP4Tensor: the 16-bit output, quantized, in rows of a matrix of scales that others share."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import jitfp4
from jitfp4 import ArgumentError, ArgumentTypeError, FP4Tensor, SfLayout
from jitfp4.reference.formats import unswizzle
from tests.support.attention import Case
from tests.support.compare import assert_same_bytes

POISON = 0x5A
SCALE = 300.0


def tensor_for(case: Case, rows: int, start: int) -> FP4Tensor:
    """An FP4Tensor of poison: scales of ``rows`` rows, the case's from ``start`` on."""
    tokens, heads, d = case.query.shape
    data = torch.full((tokens, heads, d // 2), POISON, dtype=torch.uint8, device=case.device)
    columns = -(-heads * d // 64) * 4
    scale = torch.full((rows, columns), POISON, dtype=torch.uint8, device=case.device).view(torch.float8_e4m3fn)
    return FP4Tensor(data, scale, start, (tokens, heads, d))


def check(case: Case, run: Any, got: Any, start: int, *, others: bool = True) -> None:
    """Codes and scales of ``got`` are those of the quantizer for the output in 16 bits; other rows are poison."""
    half = case.query.dtype if case.query.dtype.itemsize == 2 else torch.bfloat16
    plain = run(out_dtype=half)[0].flatten(1)
    codes, linear = jitfp4.nvfp4_quantize(plain, SCALE, SfLayout.layout_linear)
    assert_same_bytes("codes", got.data.flatten(1), codes)
    rows = unswizzle(got.scale.view(torch.uint8), SfLayout.layout_128x4, *got.scale.shape)
    tokens, columns = linear.shape
    scales = rows[start : start + tokens, :columns].contiguous()
    assert_same_bytes("scales", scales, linear)
    # o_sf_scale multiplies, as in csrc/cake_fmha/cuda/compat_v1/cake_fmha_compat_v1.cu of FlashInfer 0.7.2.post1
    raw = SCALE * plain.float().unflatten(-1, (columns, 16)).abs().amax(-1) / 6
    stored = scales.view(torch.float8_e4m3fn).float()
    torch.testing.assert_close(stored, raw.to(torch.float8_e4m3fn).float(), rtol=2**-3, atol=2**-9)
    rows = rows.clone()
    rows[start : start + tokens, :columns] = POISON
    assert not others or (rows == POISON).all(), "rows of other calls"


@pytest.mark.one_in(2)
@pytest.mark.parametrize("cache", [torch.uint8, torch.float8_e4m3fn, torch.bfloat16], ids=str)
def test_given_and_allocated(cache: torch.dtype, device: str) -> None:
    q_dtype = torch.bfloat16 if cache == torch.bfloat16 else torch.float8_e4m3fn
    case = Case(cache, q_dtype=q_dtype, head_dim=64, kv_heads=1, lengths=(40, 17, 5), device=device)
    many = Case(cache, q_dtype=q_dtype, head_dim=64, kv_heads=1, lengths=(40, 17), q_lens=(12, 9), device=device)
    for each, run in ((case, case.run), (many, many.run_context)):
        for start in (0, 126):  # the second begins in one tile of scales and ends in the next
            given = tensor_for(each, 256, start)
            out, lse = run(out=given, o_sf_scale=SCALE)
            assert out is given
            assert_same_bytes("lse", lse, run(out_dtype=torch.bfloat16)[1])
            check(each, run, given, start)
        out, _ = run(out_dtype="nvfp4", o_sf_scale=SCALE, o_sf_vec_size=16)
        assert out.dtype == "nvfp4" and out.original_shape == tuple(each.query.shape)
        check(each, run, out, 0, others=False)


@pytest.mark.gpu
def test_a_captured_graph_fills_the_tensor_again() -> None:
    """For queries and lengths that change between replays, given and allocated."""
    case = Case(lengths=(300, 17, 5), kv_heads=2, head_dim=64, device="cuda")
    given = tensor_for(case, 256, 126)
    case.run(out=given, o_sf_scale=SCALE)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case.run(out=given, o_sf_scale=SCALE)
        made, _ = case.run(out_dtype="nvfp4", o_sf_scale=SCALE)
    for seed, lengths in enumerate(((300, 17, 5), (1, 16, 0))):
        torch.manual_seed(seed)
        case.query.copy_(torch.randn(case.query.shape))
        case.seq_lens.copy_(torch.tensor(lengths))
        for tensor in (given.data, given.scale.view(torch.uint8), made.data):
            tensor.fill_(POISON)
        graph.replay()
        torch.cuda.synchronize()
        check(case, case.run, given, 126)
        check(case, case.run, made, 0, others=False)


def test_flashinfers_tensor_is_taken() -> None:
    case = Case(lengths=(9,), kv_heads=1)
    ours = tensor_for(case, 128, 3)
    theirs = type("FP4Tensor", (SimpleNamespace,), {})(data=ours.data, scale=ours.scale, scale_start_index=3)
    assert case.run(out=theirs, out_dtype="nvfp4", o_sf_scale=SCALE)[0] is theirs
    check(case, case.run, theirs, 3)


def test_what_does_not_fit_is_named() -> None:
    case = Case(lengths=(9, 4), kv_heads=1)
    good = tensor_for(case, 128, 0)
    data, scale = good.data, good.scale
    halves = torch.empty_like(case.query)
    for name, changes in {
        "o_sf_scale": {"out": good},
        "o_sf_vec_size": {"out": good, "o_sf_scale": 1.0, "o_sf_vec_size": 32},
        "out": {"out": halves, "out_dtype": "nvfp4", "o_sf_scale": 1.0},
        "out_dtype": {"out_dtype": "nvfp8"},
        "out.data": {"out": FP4Tensor(data[:1], scale), "o_sf_scale": 1.0},
        "out.scale": {"out": FP4Tensor(data, scale[:, :4].contiguous()), "o_sf_scale": 1.0},
        "o_scale": {"out": good, "o_sf_scale": 1.0, "o_scale": 2.0},
    }.items():
        with pytest.raises(ArgumentError) as caught:
            case.run(**changes)
        assert caught.value.name == name
    for changes in ({"o_sf_scale": 1.0}, {"o_sf_scale": 1.0, "out": halves}, {"o_sf_vec_size": 16}):
        with pytest.raises(ArgumentError, match="o_sf_"):
            case.run_context(**changes)
    with pytest.raises(ArgumentTypeError, match="out"):
        case.run(out=good, out_dtype=torch.bfloat16)
    overlapping = scale.view(torch.uint8).flatten()[: data.numel()].view(data.shape)
    with pytest.raises(ArgumentError, match=r"out\.scale"):
        case.run(out=FP4Tensor(overlapping, scale), o_sf_scale=1.0)
    assert (data == POISON).all() and (scale.view(torch.uint8) == POISON).all()


def test_an_fp4_tensor_checks_itself() -> None:
    data, scale = torch.zeros(2, 32, dtype=torch.uint8), torch.zeros(128, 4).to(torch.float8_e4m3fn)
    for name, arguments in {
        "data": (data.float(), scale),
        "scale": (data, scale[:100]),
        "scale_start_index": (data, scale, 127),
        "original_shape": (data, scale, 0, (2, 32)),
    }.items():
        with pytest.raises(ArgumentError) as caught:
            FP4Tensor(*arguments)
        assert caught.value.name == name
    assert FP4Tensor(data, scale, 126, (2, 64)).scale_start_index == 126


def test_while_tracing() -> None:
    case = Case(lengths=(9,), kv_heads=1, head_dim=64)
    given = tensor_for(case, 128, 5)

    def step(query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        case.run(query=query, out=given, o_sf_scale=SCALE)
        made = case.run(query=query, out_dtype="nvfp4", o_sf_scale=SCALE)[0]
        return made.data, given.data, given.scale

    made, codes, scales = torch.compile(step, fullgraph=True, backend="aot_eager")(case.query)
    assert codes is given.data and scales is given.scale
    assert_same_bytes("codes", made, codes)
    check(case, case.run, given, 5)

"""Linear layers in FP8: only when asked for, only for many rows, and with the numbers of the functions behind them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from jitfp4 import ArgumentError, fp4_experts, fp8_row_scale, mm_fp8_fp4, rows_fp8quant
from jitfp4.formats import NVFP4, BlockFormat
from jitfp4.integrations import fp8
from jitfp4.integrations.checkpoints import Source
from jitfp4.integrations.experts import ExpertsModule, Shape
from jitfp4.integrations.fp8 import LEAST_ROWS, LEAST_ROWS_OF_EXPERT
from jitfp4.integrations.layers import Fp4Linear, fuse, quantized
from jitfp4.integrations.partitions import Parameters, PartitionedFp4Linear
from jitfp4.integrations.swiglu import SwiGlu
from jitfp4.integrations.transformers import use_fp8_activations
from jitfp4.weight import with_gates
from tests.support.experts import make_layer as make_experts

BF16 = torch.bfloat16
K = 96


def make_layer(
    seed: int, n: int = 64, k: int = K, block_format: BlockFormat = NVFP4, *, bias: bool = False
) -> Fp4Linear:
    generator = torch.Generator().manual_seed(seed)
    layer = Fp4Linear(k, n, bias, BF16, block_format)
    layer.load(quantized(torch.randn(n, k, generator=generator), block_format))
    if layer.bias is not None:
        layer.bias.data.normal_(generator=generator)
    return layer


def rows(m: int, k: int = K) -> torch.Tensor:
    return torch.randn(m, k, generator=torch.Generator().manual_seed(m)).to(BF16)


def by_hand(x: torch.Tensor, layer: Fp4Linear) -> torch.Tensor:
    weight = layer.prepared
    return mm_fp8_fp4(*rows_fp8quant(x), weight, fp8_row_scale(weight), layer.alpha, layer.bias)


@pytest.mark.parametrize("block_format", BlockFormat)
def test_many_rows_are_in_fp8_once_asked_for(block_format: BlockFormat) -> None:
    layer, many, few = make_layer(1, block_format=block_format, bias=True), rows(LEAST_ROWS), rows(LEAST_ROWS - 1)
    before = layer(many), layer(few)
    assert not layer.in_fp8
    assert use_fp8_activations(nn.Sequential(layer, nn.Linear(4, 4))) == 1
    assert layer.in_fp8
    assert torch.equal(layer(many), by_hand(many, layer))
    assert not torch.equal(layer(many), before[0])
    assert torch.equal(layer(few), before[1])
    cube = many.view(4, -1, K)  # rows of a batch count together
    assert torch.equal(layer(cube).view(-1, 64), by_hand(many, layer))


def test_a_residual_is_added_to_what_is_rounded() -> None:
    layer, x = make_layer(2), rows(LEAST_ROWS)
    layer.multiply_in_fp8()
    residual = x[:, :64].contiguous()
    given = residual.clone()
    assert torch.equal(layer(x, residual), (by_hand(x, layer).float() + residual.float()).to(BF16))
    assert torch.equal(residual, given)
    few, plain = rows(3), make_layer(2)
    assert torch.equal(layer(few, few[:, :64]), plain(few, few[:, :64]))


def test_layers_of_one_input_and_gates_and_ups() -> None:
    first, second, x = make_layer(3), make_layer(4), rows(LEAST_ROWS)
    want = by_hand(x, first), by_hand(x, second)
    assert fuse([first, second])
    assert use_fp8_activations(nn.ModuleList([first, second])) == 2
    assert torch.equal(first(x), want[0])
    assert torch.equal(second(x), want[1])

    gate, up = make_layer(5).prepared, make_layer(6).prepared
    both = Fp4Linear(K, 128, False, BF16)
    both.assign(with_gates(gate, up), torch.ones(1))
    mlp = SwiGlu(both, nn.Identity(), 64)
    use_fp8_activations(mlp)
    given = *rows_fp8quant(x), both.prepared, fp8_row_scale(both.prepared), both.alpha
    assert torch.equal(mlp(x), mm_fp8_fp4(*given, activation="swiglu"))


def test_experts_with_many_rows_are_in_fp8_once_asked_for() -> None:
    shape = Shape(
        experts=2,
        hidden=64,
        inter=32,
        biased=False,
        order="concatenated gate,up",
        transposed=False,
        activation="swiglu",
    )
    layer = ExpertsModule(shape)
    layer.assign(make_experts(2, 64, 32, biases=False))
    many, few = 2 * LEAST_ROWS_OF_EXPERT, 2 * LEAST_ROWS_OF_EXPERT - 2
    ids = torch.arange(many).view(-1, 1) % 2
    given = rows(many, 64), ids, torch.ones(many, 1)
    short = tuple(tensor[:few] for tensor in given)
    before = layer(*given), layer(*short)
    assert use_fp8_activations(layer) == 1
    assert torch.equal(layer(*given), fp4_experts(given[0], layer.experts, ids, given[2], activations="fp8"))
    assert not torch.equal(layer(*given), before[0])
    assert torch.equal(layer(*short), before[1])


@pytest.mark.parametrize("is_asked", [False, True])
def test_layers_of_engines(is_asked: bool) -> None:
    """As vLLM's plugin makes them: its classes of parameters are torch's here."""

    def parameter(data: torch.Tensor, **_: object) -> nn.Parameter:
        return nn.Parameter(data, requires_grad=False)

    method = PartitionedFp4Linear(Source.MODELOPT, NVFP4, "layer", 1024, is_asked)
    method.parameters = Parameters(parameter, parameter, parameter)
    layer, given = nn.Module(), quantized(torch.randn(64, K, generator=torch.Generator().manual_seed(10)))
    method.create_weights(layer, K, [64], K, 64, BF16)
    for name, tensor in ((method.names.codes, given.codes), (method.names.scales, given.scales)):
        getattr(layer, name).data = tensor
    getattr(layer, method.names.global_scale).data = given.decode_scale
    method.process_weights_after_loading(layer)
    own, x = Fp4Linear(K, 64, False, BF16), rows(LEAST_ROWS)
    own.load(given)
    assert torch.equal(method.apply(layer, x), by_hand(x, own) if is_asked else own(x))
    assert torch.equal(method.apply(layer, x[:9]), own(x[:9]))


def test_rows_that_are_not_quantized_and_a_model_that_moves() -> None:
    small = make_layer(7, k=32)
    small.multiply_in_fp8()
    assert not small.in_fp8
    layer = make_layer(8)
    layer.multiply_in_fp8()
    layer.to(torch.device("cpu"))
    assert not layer.in_fp8


def test_other_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8, "device_arch", lambda _index: SimpleNamespace(has_wgmma=False))
    weight = SimpleNamespace(data=SimpleNamespace(is_cuda=True, get_device=lambda: 0))
    with pytest.raises(ArgumentError, match=r"^activations: got 'fp8'; allowed: None on a GPU other than sm_90a"):
        fp8.row_scale_of(weight)  # type: ignore[arg-type]


def test_traced_with_a_number_of_rows_that_is_not_known() -> None:
    """One graph serves few and many rows: the operator decides when it is called."""
    layer = make_layer(9, bias=True)
    layer.multiply_in_fp8()
    traced = torch.compile(layer, fullgraph=True, backend="eager", dynamic=True)
    for m in (LEAST_ROWS + 8, 24):
        assert torch.equal(traced(rows(m)), layer(rows(m)))

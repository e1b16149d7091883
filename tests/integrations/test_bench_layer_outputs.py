"""What the benchmark of vLLM tells of layers: of a stand-in for a model. vLLM itself is not needed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from bench.engines import layer_outputs

WIDTH, EXPERTS, ROWS = 16, 6, 12


class Mlp(torch.nn.Module):
    """Two experts of each row, each of which multiplies the row by its number."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(WIDTH, EXPERTS, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gate(x).topk(2).indices.sum(-1, keepdim=True)


class Layer(torch.nn.Module):
    def __init__(self, attention: str) -> None:
        super().__init__()
        setattr(self, attention, torch.nn.Linear(WIDTH, WIDTH))
        self.mlp = Mlp()

    def forward(self, x: torch.Tensor, residual: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
        residual = x if residual is None else x + residual
        residual = residual + (self.self_attn if hasattr(self, "self_attn") else self.linear_attn)(residual)
        return self.mlp(residual), residual


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = torch.nn.Module()
        self.model.layers = torch.nn.ModuleList([Layer("linear_attn"), Layer("self_attn")])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        residual: Any = None
        for layer in self.model.layers:
            x, residual = layer(x, residual)
        return x + residual


@pytest.fixture(autouse=True)
def nothing_seen() -> Iterator[None]:
    layer_outputs._seen.clear()
    yield
    layer_outputs._seen.clear()


def seen(*, given: bool, factor: float = 1.0) -> tuple[Any, torch.Tensor]:
    """What a model of fixed weights makes of a prompt and a step, and its last output; ``factor``: of its inputs."""
    torch.manual_seed(0)
    model = Model()
    rows = torch.randn(ROWS + 2, WIDTH)
    if given:
        layer_outputs.give_routes(model, ROWS)
    layer_outputs.watch(model)
    with torch.no_grad():
        model(factor * rows[:ROWS])
        out = model(factor * rows[ROWS:])
    taken = layer_outputs.taken()
    layer_outputs._seen.clear()
    return taken, out


def test_all_parts_of_all_layers_are_seen() -> None:
    taken, out = seen(given=False)
    assert set(taken) == {f"{n} {part}" for n in range(2) for part in ("sum", "attention", "experts", "router")}
    assert all(steps == [ROWS, 2] and len(rows) == ROWS + 2 for rows, steps in taken.values())
    assert torch.equal(taken["1 sum"][0][ROWS:], out)


def test_given_routes_do_not_hang_on_the_rows() -> None:
    (own, _), (given, _), (other, _) = seen(given=False), seen(given=True), seen(given=True, factor=-3.0)
    name = "0 router"
    assert torch.equal(given[name][0], other[name][0]) and not torch.equal(own[name][0], given[name][0])
    assert torch.equal(given[name][0][:2], given[name][0][ROWS:])  # by their number in a step
    assert not torch.equal(given[name][0], given["1 router"][0])


def test_the_lines_of_a_comparison() -> None:
    taken, _ = seen(given=False)
    changed = {name: (rows.clone(), steps) for name, (rows, steps) in taken.items()}
    changed["1 experts"][0][3] *= -1
    changed["1 router"][0][5] *= -1
    lines = {line.partition(":")[0]: line.partition(": ")[2] for line in layer_outputs.compared(changed, taken, 2)}
    assert lines["layer 0 sum"] == "prompts least 1.00000 mean 1.00000, steps least 1.00000 mean 1.00000"
    mean = 1 - 2 / ROWS
    assert lines["layer 1 experts"].startswith(f"prompts least -1.00000 mean {mean:.5f}, steps least 1.00000")
    assert lines["layer 0 router"] == f"other experts for 0 of {ROWS + 2} tokens"
    assert lines["layer 1 router"] == f"other experts for 1 of {ROWS + 2} tokens"


def test_other_steps_are_not_compared() -> None:
    taken, _ = seen(given=False)
    shorter = {name: (rows[:-1], [ROWS, 1]) for name, (rows, _) in taken.items()}
    (line,) = layer_outputs.compared(taken, shorter, 2)
    assert "not the same requests" in line
    in_graphs = {name: (rows[:ROWS], [ROWS]) for name, (rows, _) in taken.items()}
    for pair in ((taken, in_graphs), (in_graphs, taken)):
        assert "layer 1 sum: prompts least 1.00000 mean 1.00000" in layer_outputs.compared(*pair, 2)


def test_given_routes_of_the_model_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    from bench.engines import random_experts

    monkeypatch.setitem(random_experts.NARROW, "hidden_size", 128)
    with torch.inference_mode():
        model = random_experts.model_of(2, 32)
        ids = torch.arange(10).view(2, 5)
        runs = [random_experts.run(model, ids, noise=noise, given=True) for noise in (False, False, True)]
        own = random_experts.run(model, ids, noise=False, given=False)
    (first, chosen), (again, _), (noisy, others) = runs
    assert all(torch.equal(*pair) for pair in zip(first, again, strict=True))
    assert all(torch.equal(*pair) for pair in zip(chosen, others, strict=True)) and chosen[0].shape == (10, 10)
    assert not torch.equal(first[0], noisy[0]) and not torch.equal(chosen[0], own[1][0])
    assert torch.nn.functional.cosine_similarity(first[1].float(), noisy[1].float(), dim=-1).min() > 0.99

"""Other kernels of FP4 experts, for bench_experts to measure in the same graphs and in turn with jitfp4's.

Each is optional, and is there if it can be imported:

vllm_marlin     two files of vLLM, ``_C_stable_libtorch`` and ``_moe_C_stable_libtorch``: JITFP4_BENCH_MARLIN=FILE:FILE
humming         humming-kernels, whose compiler needs CUDA's headers
triton_kernels  MXFP4 alone, as vLLM carries it: its ``third_party`` folder is on the path

``python -m bench.experts_peers`` compiles what humming and triton_kernels compile, into their caches.

Recorded are those of vLLM 0.33.0 and humming-kernels 0.1.19.

``products`` are both products and the activation behind a routing that was prepared; ``layer`` begins with the ids and
ends with the sum over slots. triton_kernels' products end with that sum, and have no layer: its routing begins with
logits. Weights are random in the layout of each kernel, and without biases. SiLU is in the place of gpt-oss'
activation, except in triton_kernels.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

from bench.bench_gemm import Replay
from bench.experts_layers import COPIES, LAYERS, Case, Layer, make_case
from jitfp4.formats import MXFP4
from jitfp4.layouts import ceil_div, round_up

_SCALE = {16: 0x38, 32: 0x78}  # bytes of a scale by the block: 1 and 2^-7
_VLLM_E2M1 = 562949953487106  # vLLM's number of the type
_HUMMING = json.dumps({"use_batch_invariant": False, "use_f16_accum": False, "gemm_type": "indexed"})


class Peer(Protocol):
    """A kernel, with weights of one layer."""

    name: str

    def replays(self, case: Case) -> dict[str, Replay]:
        """By ``products`` and ``layer``: a graph of a call for each routing."""


def peers(layer: Layer) -> Iterator[Peer]:
    """Those that can be imported and take the layer; of others, a line of output says why."""
    for make in (Marlin, Humming, TritonKernels):
        try:
            yield make(layer)  # type: ignore[abstract]
        except Exception as error:
            print(f"no {make.name} for {layer.name}: {error!r}"[:200], flush=True)


def graphs(peer: Peer, case: Case) -> dict[str, Replay]:
    """Its replays; none, and a line of output, if it fails."""
    try:
        return peer.replays(case)
    except Exception as error:
        print(f"{peer.name} failed for {case.layer.name}, {case.tokens} tokens: {error!r}"[:300], flush=True)
        return {}


def best_of(peers: Sequence[Mapping[str, Any]], layer: str, routing: str, tokens: int) -> tuple[str, float | None]:
    """The best peer of a case and its microseconds, of lines of experts_peers.csv."""
    key = layer, routing, str(tokens)
    found = [row for row in peers if (row["layer"], row["routing"], str(row["tokens"])) == key]
    best = min(found, key=lambda row: float(row["products_us"]), default=None)
    return (best["peer"], float(best["products_us"])) if best else ("not measured", None)


def _codes(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.uint8, device="cuda").random_(0, 256)


def _scales(layer: Layer, *shape: int) -> torch.Tensor:
    dtype = torch.float8_e8m0fnu if layer.format is MXFP4 else torch.float8_e4m3fn
    return torch.full(shape, _SCALE[layer.format.block], dtype=torch.uint8, device="cuda").view(dtype)


def _globals(layer: Layer) -> torch.Tensor | None:
    return None if layer.format is MXFP4 else torch.full((layer.experts,), 2.0**-10, device="cuda")


class Blocks(NamedTuple):
    """Rows sorted by experts, in blocks of a size, as vLLM's kernel makes them of ids."""

    size: int
    rows: torch.Tensor
    experts: torch.Tensor
    count: torch.Tensor

    @staticmethod
    def empty(layer: Layer, rows: int, size: int) -> Blocks:
        most = rows + layer.experts * (size - 1)
        most = min(most, rows * size) if rows < layer.experts else most
        lengths = most, ceil_div(most, size), 1
        return Blocks(size, *(torch.empty(length, dtype=torch.int32, device="cuda") for length in lengths))

    def fill(self, layer: Layer, ids: torch.Tensor) -> Blocks:
        torch.ops._moe_C.moe_align_block_size(
            ids, layer.experts, self.size, self.rows, self.experts, self.count, None, None
        )
        return self


class Middle(NamedTuple):
    """What the products of a case write."""

    both: torch.Tensor
    h: torch.Tensor
    y: torch.Tensor
    out: torch.Tensor

    @staticmethod
    def of(case: Case, hidden: int, inter: int) -> Middle:
        rows = case.tokens * case.layer.slots
        shapes = (rows, 2 * inter), (rows, inter), (rows, hidden), (case.tokens, hidden)
        return Middle(*(torch.empty(shape, dtype=torch.bfloat16, device="cuda") for shape in shapes))

    def activate(self) -> None:
        torch.ops._C.silu_and_mul(self.h, self.both)

    def add_up(self, case: Case) -> None:
        if case.layer.slots > 1:
            torch.ops._moe_C.moe_sum(self.y.view(case.tokens, case.layer.slots, -1), self.out, None, None)


Product = Callable[[int, Blocks], None]


def _replays(case: Case, middle: Middle, up: Product, down: Product, sizes: tuple[int, int]) -> dict[str, Replay]:
    """Of two products that take the number of a call and its blocks, whose sizes may differ."""
    layer, rows, numbers = case.layer, case.tokens * case.layer.slots, range(len(case.ids))
    distinct = sorted(set(sizes))

    def align(ids: torch.Tensor, into: list[Blocks]) -> tuple[Blocks, Blocks]:
        made = {blocks.size: blocks.fill(layer, ids) for blocks in into}
        return made[sizes[0]], made[sizes[1]]

    def products(number: int, blocks: tuple[Blocks, Blocks]) -> None:
        up(number, blocks[0])
        middle.activate()
        down(number, blocks[1])

    def whole(number: int) -> None:
        products(number, align(case.ids[number], shared))
        middle.add_up(case)

    shared = [Blocks.empty(layer, rows, size) for size in distinct]
    before = [align(ids, [Blocks.empty(layer, rows, size) for size in distinct]) for ids in case.ids]
    return {
        "products": Replay([lambda n=n: products(n, before[n]) for n in numbers]),  # type: ignore[misc]
        "layer": Replay([lambda n=n: whole(n) for n in numbers]),  # type: ignore[misc]
    }


class Marlin:
    """``moe_wna16_marlin_gemm``, with sizes rounded up and blocks chosen as vLLM does."""

    name = "vllm_marlin"

    def __init__(self, layer: Layer) -> None:
        for library in os.environ["JITFP4_BENCH_MARLIN"].split(":"):
            torch.ops.load_library(library)
        self.layer = layer
        self.hidden, self.inter = round_up(layer.hidden, 256), round_up(layer.inter, 128)
        self.weights = [
            [self._matrix(2 * self.inter, self.hidden), self._matrix(self.hidden, self.inter)] for _ in range(COPIES)
        ]
        self.locks = torch.zeros(132 * 8, dtype=torch.int32, device="cuda")

    def _matrix(self, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        experts = self.layer.experts
        codes = _codes(experts, k // 16, 8 * n).view(torch.int32)
        return codes, _scales(self.layer, experts, k // self.layer.format.block, n), _globals(self.layer)

    def replays(self, case: Case) -> dict[str, Replay]:
        layer, rows = case.layer, case.tokens * case.layer.slots
        middle = Middle.of(case, self.hidden, self.inter)
        x = torch.nn.functional.pad(case.x, (0, self.hidden - layer.hidden)).contiguous()
        size = next((size for size in (8, 16, 32, 48) if rows / layer.experts / size < 0.9), 64)

        def product(number: int, blocks: Blocks, second: bool) -> None:
            """The second one's rows are slots already, and it multiplies by the router's weights."""
            a, out, slots = (middle.h, middle.y, 1) if second else (x, middle.both, layer.slots)
            codes, scales, factors = self.weights[number % COPIES][second]
            torch.ops._moe_C.moe_wna16_marlin_gemm(
                a, out, codes, None, scales, None, factors, None, self.locks, blocks.rows, blocks.experts, blocks.count,
                case.weights, blocks.size, slots, second, _VLLM_E2M1, a.shape[0], out.shape[1], a.shape[1],
                False, True, False, -1, -1, -1,
            )  # fmt: skip

        up, down = partial(product, second=False), partial(product, second=True)
        return _replays(case, middle, up, down, (size, size))


class Humming:
    """Its indexed products, with the configurations that it recommends."""

    name = "humming"

    def __init__(self, layer: Layer) -> None:
        from humming.forward import humming_forward
        from humming.transform import transform_humming_tensors

        self.layer, self.configs, self.forward = layer, humming_configs(layer), humming_forward
        sizes = (2 * layer.inter, layer.hidden), (layer.hidden, layer.inter)
        self.weights = [
            [
                transform_humming_tensors(config, self._matrix(*size))
                for config, size in zip(self.configs, sizes, strict=True)
            ]
            for _ in range(COPIES)
        ]
        self.locks = torch.zeros(8192, dtype=torch.int32, device="cuda")

    def _matrix(self, n: int, k: int) -> dict[str, torch.Tensor]:
        experts, factors = self.layer.experts, _globals(self.layer)
        codes, scales = _codes(experts, n, k // 2), _scales(self.layer, experts, n, k // self.layer.format.block)
        tensors = {"weight": codes.view(torch.int32), "weight_scale": scales}
        return tensors if factors is None else {**tensors, "weight_scale_2": factors}

    def replays(self, case: Case) -> dict[str, Replay]:
        middle = Middle.of(case, case.layer.hidden, case.layer.inter)
        specs = humming_specs(self.configs, case.tokens * case.layer.slots)
        tunings = [json.dumps(tuning, default=str) for _, tuning in specs]

        def product(number: int, blocks: Blocks, second: bool) -> None:
            a, out, slots = (middle.h, middle.y, 1) if second else (case.x, middle.both, case.layer.slots)
            weight = self.weights[number % COPIES][second]
            self.forward(
                specs[second][0], inputs=a, weight=weight["weight"], weight_scale=weight["weight_scale"],
                weight_scale_2=weight.get("weight_scale_2"), outputs=out, locks=self.locks, compute_config=_HUMMING,
                tuning_config=tunings[second], valid_shape_m=middle.h.shape[0], sorted_ids=blocks.rows,
                expert_ids=blocks.experts, num_tokens_padded=blocks.count, top_k=slots,
            )  # fmt: skip

        up, down = partial(product, second=False), partial(product, second=True)
        sizes = specs[0][1]["block_shape"][0], specs[1][1]["block_shape"][0]
        return _replays(case, middle, up, down, sizes)


def humming_configs(layer: Layer) -> list[Any]:
    """Of both products."""
    from humming import dtypes
    from humming.config import WeightScale2Type, WeightScaleType
    from humming.schema import HummingWeightSchema
    from humming.transform import prepare_layer_config

    is_mxfp4 = layer.format is MXFP4
    schema = HummingWeightSchema(
        b_dtype=dtypes.float4e2m1,
        bs_dtype=dtypes.float8e8m0 if is_mxfp4 else dtypes.float8e4m3,
        weight_scale_group_size=layer.format.block,
        weight_scale_type=WeightScaleType.GROUP,
        **({} if is_mxfp4 else {"weight_scale_2_type": WeightScale2Type.TENSOR}),
    )
    return [
        prepare_layer_config(
            shape_n=n, shape_k=k, weight_schema=schema, num_experts=layer.experts, torch_dtype=torch.bfloat16,
            device=0, pad_n_to_multiple=256, pad_k_to_multiple=128,
        )
        for n, k in ((2 * layer.inter, layer.hidden), (layer.hidden, layer.inter))
    ]  # fmt: skip


def humming_specs(configs: Sequence[Any], rows: int) -> list[tuple[Any, dict[str, Any]]]:
    """Both products' layers, and what is recommended for so many rows."""
    from humming.tune import get_heuristics_config

    return [
        (config, dict(get_heuristics_config(config, shape_m=rows, gemm_type="indexed", device=0))) for config in configs
    ]


class TritonKernels:
    """vLLM's products of gpt-oss on Hopper, with a fused activation and a sum in the second."""

    name = "triton_kernels"

    def __init__(self, layer: Layer) -> None:
        if layer.format is not MXFP4:
            raise LookupError("it has MXFP4 alone")
        import triton_kernels.matmul_ogs_details.opt_flags as flags
        import triton_kernels.swiglu
        from triton_kernels import matmul_ogs, numerics, routing, tensor
        from triton_kernels.tensor_details import layout

        flags.update_opt_flags_constraints({"split_k": 1})
        self.layer, self.matmul, self.routing = layer, matmul_ogs, routing
        codes, codes_of = layout.make_default_matmul_mxfp4_w_layout(mx_axis=1)
        scales, scales_of = layout.make_default_matmul_mxfp4_w_scale_layout(mx_axis=1, num_warps=8)

        def matrix(n: int, k: int) -> tuple[Any, Any]:
            weight = tensor.wrap_torch_tensor(_codes(layer.experts, n, k // 2).transpose(-2, -1), dtype=tensor.FP4)
            scale = torch.full(
                (layer.experts, n, k // layer.format.block), _SCALE[32], dtype=torch.uint8, device="cuda"
            )
            scale = tensor.convert_layout(tensor.wrap_torch_tensor(scale.transpose(-2, -1)), scales, **scales_of)
            flex = matmul_ogs.FlexCtx(rhs_data=numerics.InFlexData())
            precision = matmul_ogs.PrecisionConfig(weight_scale=scale, flex_ctx=flex)
            return tensor.convert_layout(weight, codes, **codes_of), precision

        self.weights = [
            (matrix(2 * layer.inter, layer.hidden), matrix(layer.hidden, layer.inter)) for _ in range(COPIES)
        ]
        swiglu = matmul_ogs.FnSpecs("swiglu", triton_kernels.swiglu.swiglu_fn, ("alpha", "limit"))
        self.activation = matmul_ogs.FusedActivation(swiglu, (1.702, 7.0), 2)

    def replays(self, case: Case) -> dict[str, Replay]:
        rows = case.tokens * case.layer.slots
        h = torch.empty(1, rows, case.layer.inter, dtype=torch.bfloat16, device="cuda")
        out = torch.empty(1, case.tokens, case.layer.hidden, dtype=torch.bfloat16, device="cuda")
        routings = [self._route(ids, case.weights) for ids in case.ids]

        def products(number: int) -> None:
            (up, of_up), (down, of_down) = self.weights[number % COPIES]
            routing, gather, scatter = routings[number]
            self.matmul.matmul_ogs(
                case.x, up, None, routing, gather_indx=gather, precision_config=of_up,
                fused_activation=self.activation, y=h,
            )  # fmt: skip
            self.matmul.matmul_ogs(
                h[0], down, None, routing, scatter_indx=scatter, precision_config=of_down, gammas=routing.gate_scal,
                y=out,
            )  # fmt: skip

        return {"products": Replay([lambda n=n: products(n) for n in range(len(routings))])}  # type: ignore[misc]

    def _route(self, ids: torch.Tensor, weights: torch.Tensor) -> tuple[Any, Any, Any]:
        """As its own routing: slots of a token in the order of experts, then all sorted by experts."""
        experts, slots = self.layer.experts, self.layer.slots
        ids, order = torch.sort(ids.long(), dim=1)
        gates, flat = torch.gather(weights, 1, order).flatten(), ids.flatten().int()
        by_expert = torch.argsort(flat, stable=True)
        back = torch.argsort(by_expert, stable=True)
        counts = torch.bincount(flat, minlength=experts).int()
        of_experts = self.routing.compute_expt_data_torch(counts, experts, len(flat))
        data = self.routing.RoutingData(gates[by_expert].bfloat16(), counts, experts, slots, of_experts)
        gather = self.routing.GatherIndx(src_indx=by_expert.int(), dst_indx=back.int())
        return data, gather, self.routing.ScatterIndx(src_indx=back.int(), dst_indx=by_expert.int())


def compile_humming(layers: Sequence[Layer], tokens: Sequence[int]) -> None:
    """Every kernel, into humming's cache, in as many processes as there are cores. Nothing is loaded: not for use."""
    from humming.kernel.humming import HummingKernel

    HummingKernel.register_kernel = lambda kernel: setattr(kernel, "kernel_id", 0)
    found = {}
    for layer in layers:
        for count in tokens:
            for config, tuning in humming_specs(humming_configs(layer), count * layer.slots):
                spec = json.loads(config.to_str()) | json.loads(_HUMMING) | tuning
                for name in ("sublayer_name", "num_sms"):
                    spec.pop(name, None)
                found[json.dumps(spec, sort_keys=True, default=str)] = spec
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda spec: HummingKernel(**spec), found.values()))


def main() -> None:
    """Compile what peers compile, into their caches, before bench_experts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    from bench.bench_experts import TOKENS

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(compile_humming, LAYERS, TOKENS)
        for layer in LAYERS:
            if layer.format is MXFP4:
                peer = TritonKernels(layer)
                for count in TOKENS:
                    peer.replays(make_case(layer, count, "uniform"))
        done.result()


if __name__ == "__main__":
    main()

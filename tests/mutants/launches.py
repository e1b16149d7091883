"""The launches that the mutation campaign runs: every kernel of every family on small inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch

import jitfp4
from jitfp4 import engine, sim
from jitfp4.families.attention.kernels.decode import DecodeTactic
from jitfp4.families.attention.kernels.decode_masked import MaskedDecodeTactic
from jitfp4.families.attention.kernels.prefill import PrefillTactic as PortablePrefillTactic
from jitfp4.families.attention.kernels.prefill_masked import MaskedPrefillTactic
from jitfp4.families.attention.kernels.prefill_wgmma import WgmmaTactic
from jitfp4.families.attention.kernels.prefill_wgmma_masked import MaskedWgmmaTactic
from jitfp4.families.attention.operation import ATTENTION
from jitfp4.families.gdn.kernels.chunk import ChunkTactic
from jitfp4.families.gdn.kernels.delta_rule import WalkTactic
from jitfp4.families.gdn.kernels.prefill import PrefillTactic
from jitfp4.families.gdn.kernels.prefill_wgmma import WgmmaTactic as WgmmaPrefillTactic
from jitfp4.families.gdn.operation import GATED_DELTA_RULE
from jitfp4.families.gdn.prefill_operation import GATED_DELTA_RULE_PREFILL
from jitfp4.families.gemm.fp4_operation import MM_FP4
from jitfp4.families.gemm.kernels import wide
from jitfp4.families.gemm.kernels.blockscaled import K64Tactic
from jitfp4.families.gemm.kernels.blockscaled_masked import MaskedTactic
from jitfp4.families.gemm.kernels.narrow import NarrowTactic
from jitfp4.families.gemm.kernels.portable import PortableTactic
from jitfp4.families.gemm.kernels.wide import WideTactic
from jitfp4.families.gemm.masked_operation import MM_FP4_MASKED
from jitfp4.families.gemm.operation import MM_BF16_FP4
from jitfp4.families.kv.kernels.dequantize import DequantizeTactic
from jitfp4.families.kv.kernels.quantize import QuantizeTactic
from jitfp4.families.kv.operation import dequantize, quantize
from jitfp4.families.norm.kernels.rmsnorm_fp4quant import Tactic
from jitfp4.families.norm.kernels.rows_fp4quant import RowsTactic
from jitfp4.families.norm.operation import RMSNORM
from jitfp4.families.quantize.kernels.tma import TACTICS as TMA_TACTICS
from jitfp4.families.quantize.operation import QUANTIZE
from jitfp4.formats import NVFP4
from jitfp4.layouts import round_up
from jitfp4.spec import Geometry, TileMap
from tests.inputs.calls import function_of
from tests.inputs.good import good_calls
from tests.inputs.repeated import repeated_calls
from tests.sim import gemm_kernels as gemm
from tests.sim.cuda import compiled
from tests.support.attention import Case
from tests.support.compare import poisoned
from tests.support.conv import make_sequences
from tests.support.gdn import case
from tests.support.gemm import assert_fp4_product, assert_product, make_batch, make_codes, make_weight, masked_keywords
from tests.support.inputs import random_matrix
from tests.support.kv import paged_cache
from tests.support.norm import check, rows_of_all_kinds
from tests.support.routing import ROUTERS, make_logits

ARCHS = ("sm_90a", "sm_100a")
CONSTANT = {
    "gemm_narrow": (1,),
    "gemm_wide": (1,),
    "gemm_wide_fp4": (1, 2),
    "norm_rmsnorm_fp4quant": (2,),
    "norm_rows_fp4quant": (2,),
    "kv_rope_append": (3, 4),
    "norm_rmsnorm": (2,),
}
"""Parameters by entry that no grid writes that may still run: weights. They may be read ahead of a wait."""


@dataclass(frozen=True)
class Recorded:
    """One launch: its kernel, and its arguments as they were before it."""

    kernel: str
    arch: str
    ptx: str
    entry: str | None
    args: tuple[Any, ...]
    geometry: Geometry

    @property
    def constant(self) -> tuple[int, ...]:
        """Which arguments no earlier launch writes."""
        return CONSTANT.get(self.entry or "", ())

    def fresh(self) -> list[Any]:
        """Arguments to run with: copies, equal where the same memory was passed twice."""
        copies: dict[int, Any] = {}

        def copy(arg: Any) -> Any:
            if isinstance(arg, TileMap):
                return TileMap(copy(arg.tensor), arg.box, swizzle=arg.swizzle)
            if not isinstance(arg, torch.Tensor):
                return arg
            key = arg.untyped_storage().data_ptr()
            if key not in copies:
                whole = torch.empty(0, dtype=torch.uint8).set_(arg.untyped_storage())
                copies[key] = whole.clone().untyped_storage()
            return torch.empty(0, dtype=arg.dtype).set_(copies[key], arg.storage_offset(), arg.shape, arg.stride())

        return [copy(arg) for arg in self.args]


def contents(args: list[Any]) -> list[bytes]:
    """What is in memory after a run."""
    tensors = [arg.tensor if isinstance(arg, TileMap) else arg for arg in args]
    storages = [t.untyped_storage() for t in tensors if isinstance(t, torch.Tensor)]
    return [torch.empty(0, dtype=torch.uint8).set_(s).numpy().tobytes() for s in storages]


@contextmanager
def recording(name: str, arch: str, into: list[Recorded]) -> Iterator[None]:
    """Simulated calls in the block are kept, one for each module that is new."""
    run = sim.run

    def keep(ptx: str, args: Any, geometry: Geometry, target: Any, **options: Any) -> sim.Stats:
        if not any(one.ptx == ptx for one in into):
            one = Recorded(name, getattr(target, "name", target), ptx, options.get("entry"), tuple(args), geometry)
            into.append(replace(one, args=tuple(one.fresh())))
        return run(ptx, args, geometry, target, **options)

    with mock.patch.object(sim, "run", keep), sim.device(arch):
        yield


@contextmanager
def _few_sms() -> Iterator[None]:
    """The simulated GPU has two SMs, so that a persistent CTA meets several rows or tiles."""
    device = sim.active_device()
    assert device is not None
    with sim.device(replace(device.arch, num_sms=2)):
        yield


def _norm(tactic: Tactic | RowsTactic, h: int) -> None:
    x = rows_of_all_kinds(20 if h < 9000 else 6, h, torch.float16)
    with _few_sms(), RMSNORM.forced(tactic):
        check(x, x.flip(0), "both", 16, "e4m3", "cpu")


def _tma() -> None:
    with _few_sms(), QUANTIZE.forced(TMA_TACTICS[0]):
        jitfp4.nvfp4_quantize(random_matrix(300, 1040, torch.bfloat16), torch.tensor([3.0]))


def _gdn(tactic: WalkTactic | ChunkTactic | None, tokens: int, head_dim: int, *, steps: bool = False) -> None:
    arguments = case(2, tokens, 1, 2, head_dim, exact_gates=True)
    if steps:
        arguments["intermediate_states_buffer"] = poisoned((2, tokens, 2, head_dim, head_dim), torch.float32, "cpu")
    with GATED_DELTA_RULE.forced(tactic) if tactic else nullcontext():
        jitfp4.gated_delta_rule_mtp(**arguments)


def _gdn_prefill(tactic: PrefillTactic | WgmmaPrefillTactic) -> None:
    """On the architectures that have its instructions."""
    device = sim.active_device()
    if isinstance(tactic, WgmmaPrefillTactic) and device is not None and not device.arch.has_wgmma:
        return
    with GATED_DELTA_RULE_PREFILL.forced(tactic):
        jitfp4.chunk_gated_delta_rule(**good_calls()["chunk_gated_delta_rule"]())


def _quantize(call: Callable[[torch.Tensor, torch.Tensor], object], m: int = 10, k: int = 96) -> None:
    call(random_matrix(m, k, torch.bfloat16), torch.tensor([3.0]))


def _dequantize(a: torch.Tensor, g: torch.Tensor) -> None:
    jitfp4.nvfp4_dequantize(*jitfp4.nvfp4_quantize(a, g), 1 / 3)


def _experts(a: torch.Tensor, _: torch.Tensor) -> None:
    batch, scales = torch.stack([a, a]), torch.tensor([3.0, 4.0])
    jitfp4.silu_and_mul_scaled_nvfp4_experts_quantize(batch, torch.tensor([7, 2], dtype=torch.int32), scales)


def _kv_append(tactic: QuantizeTactic) -> None:
    """Three tokens of one request, whose second page is found through the list."""
    k, v = (random_matrix(3 * 2, 64, torch.bfloat16, seed).view(3, 2, 64) for seed in (0, 1))
    cache = paged_cache(3, 4, 2, (64, 64), "NHD", "pair", "cpu")
    request, position, pages, ends, last = (torch.tensor(x) for x in ([0] * 3, [2, 3, 4], [2, 0], [0, 2], [1]))
    with quantize.forced(tactic):
        jitfp4.nvfp4_quantize_append_paged_kv_cache(
            k, v, request, position, cache.codes, cache.sf, pages, ends, last, 0.01, 0.4
        )


def _kv_read(tactic: DequantizeTactic) -> None:
    cache = paged_cache(3, 8, 2, (64, 64), "HND", "pair", "cpu")
    outs = [poisoned((1, 16, 2, 64), torch.bfloat16, "cpu") for _ in "kv"]
    table, length, scale = torch.tensor([[2, 0]]), torch.tensor([13]), torch.tensor([0.4])
    with dequantize.forced(tactic):
        jitfp4.nvfp4_kv_dequantize_paged(cache.codes, cache.sf, table, length, scale, scale, *outs, "HND")


def attention_case(**options: Any) -> Case:
    """A case with no more workspace than two SMs need."""
    made = Case(**options)
    made.workspace = torch.zeros(1 << 17, dtype=torch.uint8)
    return made


def _attention(tactic: DecodeTactic, **options: Any) -> None:
    """Seven tiles of two requests, which end within the share of a CTA and of a warp."""
    made = attention_case(**({"lengths": (70, 33), "kv_heads": 2, "group": 8} | options))
    with _few_sms(), ATTENTION.forced(tactic):
        made.run()


def _prefill(
    tactic: PortablePrefillTactic | WgmmaTactic | DecodeTactic,
    *,
    masked: bool = False,
    arch: str | None = None,
    **options: Any,
) -> None:
    """A request with more rows than an item, and a short one."""
    device = sim.active_device()
    if device is None or arch not in (None, device.arch.name):
        return
    fields = {"lengths": (150, 20), "q_lens": (40, 9), "kv_heads": 1, "group": 4, "head_dim": 64}
    made = attention_case(**(fields | options))
    mask = torch.full((made.ends[-1], 4), -21846, dtype=torch.int16).view(torch.uint16)
    with _few_sms(), ATTENTION.forced(tactic):
        if masked:
            made.run(mask=mask[:, : 2 * -(-max(made.q_lens) // 32)].contiguous())  # type: ignore[arg-type]
        else:
            made.run_context()


def _call(name: str) -> None:
    """A call that others repeat."""
    function_of(name)(**repeated_calls()[name]())


def _portable(tactic: PortableTactic) -> None:
    with MM_FP4.forced(tactic):
        assert_fp4_product(20, 72, 416)


def _narrow(tactic: NarrowTactic, m: int, n: int, k: int, call: Callable[[int, int, int], None] | None = None) -> None:
    with MM_BF16_FP4.forced(tactic):
        (call or partial(assert_product, plain=True))(m, n, k)


def _residual(m: int, n: int, k: int) -> None:
    """A product, added to a residual."""
    a, residual = (random_matrix(m, size, torch.bfloat16) for size in (k, n))
    jitfp4.mm_bf16_fp4(a, make_weight(n, k, NVFP4), residual=residual)


def _gated(m: int, n: int, k: int) -> None:
    """A product with a weight of gates and ups."""
    codes, scales = make_codes(n, k, NVFP4)
    weight = jitfp4.prepare_fp4_weight(codes, scales, sf_layout=jitfp4.SfLayout.layout_linear, order="interleaved")
    jitfp4.mm_bf16_fp4(random_matrix(m, k, torch.bfloat16), weight, activation="swiglu")


def _wide(tactic: WideTactic, m: int, n: int, k: int, call: Callable[[int, int, int], None] | None = None) -> None:
    """Rings of so few slots that each is filled again, on the architecture that has its instructions."""
    device = sim.active_device()
    if device is not None and device.arch.name == "sm_90a":
        engine.reset()  # no kernel with more slots
        with _few_sms(), MM_BF16_FP4.forced(tactic), mock.patch.object(wide, "_MOST_SLOTS", 4):
            (call or partial(assert_product, plain=True))(m, n, k)
        engine.reset()


def _fp4_wide(tactic: WideTactic, m: int, n: int, k: int) -> None:
    """The same with two FP4 matrices."""
    device = sim.active_device()
    if device is not None and device.arch.name == "sm_90a":
        engine.reset()
        with _few_sms(), MM_FP4.forced(tactic), mock.patch.object(wide, "_MOST_SLOTS", 4):
            assert_fp4_product(m, n, k)
        engine.reset()


def _topk() -> None:
    router = ROUTERS["uneven groups"]
    logits, bias = make_logits(router, 3)
    jitfp4.route_experts(logits, router.top_k, **router.options(bias))


def _conv(*, decode: bool) -> None:
    given = make_sequences([1, 1] if decode else [5, 2], 24)
    if decode:
        jitfp4.causal_conv1d_update(given.x, given.states, given.weight, given.bias, "silu", given.slots)
    else:
        jitfp4.causal_conv1d_fn(given.x.T, given.weight, given.bias, given.states, given.starts, given.slots)


def _tile(arch: str) -> None:
    """The tile of a GEMM in tests/sim/gemm_kernels.py, on the architecture that has its instructions."""
    device = sim.active_device()
    if device is None or device.arch.name != arch:
        return
    if arch == "sm_90a":
        source, pieces, (args, _), threads, stage = gemm.WGMMA, gemm.WGMMA_PIECES, gemm.wgmma_problem(320), 160, 24576
    else:
        source, pieces = gemm.TCGEN05, gemm.TCGEN05_PIECES
        (args, _), threads, stage = gemm.tcgen05_problem(1280), 128, 55296
    tensors = [torch.from_numpy(arg) if isinstance(arg, np.ndarray) else arg for arg in args]
    geometry = Geometry((1, 1, 1), (threads, 1, 1), shared_bytes=gemm.STAGES * stage)
    sim.run(compiled(gemm.with_pieces(source, pieces), arch), tensors, geometry, arch)


def _mm_fp4(tactic: K64Tactic, m: int, n: int = 136, k: int = 576) -> None:
    """Several tiles for each CTA, by one cluster; more steps than stages."""
    device = sim.active_device()
    if device is None or device.arch.name != "sm_100a":
        return
    generator = torch.Generator().manual_seed(1)
    sizes = (m, k // 2), (n, k // 2), (round_up(m, 128), k // 16), (round_up(n, 128), k // 16)
    a, b, a_scales, b_scales = (torch.randint(0, 64, size, generator=generator).to(torch.uint8) for size in sizes)
    sms = tactic.ctas * tactic.cluster_m * tactic.cluster_n * tactic.split
    with sim.device(replace(device.arch, num_sms=sms)), MM_FP4.forced(tactic):
        jitfp4.mm_fp4(a, b.T, a_scales, b_scales.T, torch.tensor([0.5]))


def _masked(tactic: MaskedTactic, m: int, filled: list[int]) -> None:
    """More tiles than clusters, more steps than stages, rows that are not filled behind a tile's."""
    device = sim.active_device()
    if device is None or device.arch.name != "sm_100a":
        return
    a, b = make_batch(len(filled), m, 576, NVFP4, 1), make_batch(len(filled), 136, 576, NVFP4, 11)
    out = torch.zeros(len(filled), m, 136, dtype=torch.bfloat16).permute(1, 2, 0)
    given = (a.codes, a.scales), (b.codes, b.scales), out, torch.tensor(filled, dtype=torch.int32)
    with sim.device(replace(device.arch, num_sms=1)), MM_FP4_MASKED.forced(tactic):
        jitfp4.grouped_gemm_nt_masked(*given, **masked_keywords(NVFP4), alpha=torch.full((len(filled),), 2.0**-13))


KERNELS: dict[str, Callable[[], None]] = {
    "norm, one warp": lambda: _norm(Tactic(3, 1), 1104),
    "norm, eight warps": lambda: _norm(Tactic(2, 8), 3088),
    "norm, cluster": lambda: _norm(Tactic(2, 16, clustered=True), 16400),
    "norm, stream": lambda: _norm(Tactic(8, 16, stream=True), 9232),
    "norm, a CTA for a row": lambda: _norm(RowsTactic(2), 3088),
    "quantize, vector": lambda: _quantize(jitfp4.nvfp4_quantize),
    "quantize, mxfp4": lambda: _quantize(lambda a, _: jitfp4.mxfp4_quantize(a)),
    "quantize, float8": lambda: _quantize(lambda a, g: jitfp4.nvfp4_quantize(a.to(torch.float8_e4m3fn), g)),
    "quantize, per token": lambda: _quantize(
        lambda a, g: jitfp4.nvfp4_quantize(a, g, per_token_activation=True), k=1040
    ),
    "quantize, silu": lambda: _quantize(jitfp4.silu_and_mul_nvfp4_quantize),
    "quantize, tensor maps": _tma,
    "quantize, experts": lambda: _quantize(_experts),
    "dequantize": lambda: _quantize(_dequantize),
    "gdn, one token": lambda: _gdn(None, 1, 64),
    "gdn, four tokens": lambda: _gdn(None, 4, 128),
    "gdn, bulk stores": lambda: _gdn(WalkTactic(16, 2, 2, bulk_stores=True), 3, 64, steps=True),
    "gdn, v in shared memory": lambda: _gdn(WalkTactic(64, 4, 4, use_smem_v=True, keep_state=True), 3, 64),
    "gdn, chunk": lambda: _gdn(ChunkTactic(2), 5, 64),
    "gdn, prefill": lambda: _gdn_prefill(PrefillTactic(32, 2)),
    "gdn, prefill on warpgroups": lambda: _gdn_prefill(WgmmaPrefillTactic(64)),
    "gdn, prefill in parts": lambda: _gdn_prefill(WgmmaPrefillTactic(64, divided=True)),
    "gdn, prefill in one stage": lambda: _gdn_prefill(PrefillTactic(16, 1)),
    "kv, append": lambda: _kv_append(QuantizeTactic(1, 64)),
    "kv, read": lambda: _kv_read(DequantizeTactic(2, 64)),
    "kv, read by CTAs": lambda: _kv_read(DequantizeTactic(2, 64, by_cta=True)),
    "attention, nvfp4": lambda: _attention(DecodeTactic(2, 2, 1)),
    "attention, heads": lambda: _attention(DecodeTactic(2, 2, 1, head_warps=2), kv_layout="NHD", lengths=(70, 33, 40)),
    "attention, cluster": lambda: _attention(DecodeTactic(1, 2, 1, cluster=2), lengths=(170,), q_lens=3),
    "attention, e4m3": lambda: _attention(DecodeTactic(2, 2, 1), cache=torch.float8_e4m3fn),
    "attention, bf16": lambda: _attention(DecodeTactic(2, 2, 1), cache=torch.bfloat16),
    "gemm, narrow": lambda: _narrow(NarrowTactic(8, 2, 2, 2, 2, 1), 5, 72, 672),
    "gemm, narrow split": lambda: _narrow(NarrowTactic(16, 2, 2, 2, 2, 1, split=2), 13, 72, 1056),
    "gemm, wide split": lambda: _wide(WideTactic(64, 1, 2, 2), 40, 64, 1536),
    "gemm, wide divided": lambda: _wide(WideTactic(64, 2, divided=True), 70, 136, 416),
    "gemm, wide cluster": lambda: _wide(WideTactic(64, 2, cluster=2), 70, 136, 416),
    "gemm, narrow residual": lambda: _narrow(NarrowTactic(8, 2, 2, 2, 2, 1, x_stages=4), 5, 72, 1056, _residual),
    "gemm, wide residual": lambda: _wide(WideTactic(64, 2, divided=True), 70, 136, 416, _residual),
    "gemm, wide gates": lambda: _wide(WideTactic(64, 1, 2, 2), 40, 64, 1536, _gated),
    "wgmma tile": lambda: _tile("sm_90a"),
    "tcgen05 tile": lambda: _tile("sm_100a"),
    "mm_fp4, wgmma": lambda: _fp4_wide(WideTactic(64, 2, divided=True), 70, 136, 416),
    "mm_fp4, one CTA": lambda: _mm_fp4(K64Tactic(64, 1, 2), 100),
    "mm_fp4, pair": lambda: _mm_fp4(K64Tactic(64, 2, 2), 200),
    "mm_fp4, cluster": lambda: _mm_fp4(K64Tactic(64, 1, 2, cluster_m=2, cluster_n=2), 200, 328),
    "mm_fp4, split": lambda: _mm_fp4(K64Tactic(16, 1, 2, swap_ab=True, split=2), 13, 328, 1344),
    "mm_fp4, masked": lambda: _masked(MaskedTactic(64, 1, 2), 100, [100, 0, 33]),
    "mm_fp4, masked rows": lambda: _masked(MaskedTactic(16, 1, 2, swap_ab=True), 16, [16, 0, 2, 16]),
    "mm_fp4, portable": lambda: _portable(PortableTactic(16, 128, 16, 32, 2, 3)),
    "attention, masked": lambda: _prefill(MaskedDecodeTactic(2, 2, 1), masked=True, q_lens=(5, 8)),
    "prefill, rows": lambda: _prefill(PortablePrefillTactic(4, 16, 32, 1)),
    "prefill, rows of bf16": lambda: _prefill(PortablePrefillTactic(4, 16, 32, 1), cache=torch.bfloat16),
    "prefill, rows masked": lambda: _prefill(MaskedPrefillTactic(4, 16, 32, 1), masked=True),
    "prefill, wgmma": lambda: _prefill(WgmmaTactic(2, 1, 64, 2), arch="sm_90a"),
    "prefill, wgmma masked": lambda: _prefill(MaskedWgmmaTactic(2, 1, 64, 2), masked=True, arch="sm_90a"),
    "kv, rope append": lambda: _call("rope_append_paged_kv_cache"),
    "norm, plain": lambda: _call("rmsnorm"),
    "norm, plain residual": lambda: _call("fused_add_rmsnorm"),
    "experts, topk": _topk,
    "conv, prompts": lambda: _conv(decode=False),
    "conv, tokens": lambda: _conv(decode=True),
    "gdn, chunk ahead": lambda: _gdn(ChunkTactic(4, ahead=4), 16, 64),
}


def record(name: str, arch: str) -> list[Recorded]:
    """The launches of one entry of KERNELS."""
    found: list[Recorded] = []
    with np.errstate(all="ignore"), recording(name, arch, found):
        KERNELS[name]()
    return found

"""How a kernel is run for a check, and compared: the simulated tests of its family, on few SMs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple
from unittest import mock

import torch

from jitfp4 import SfLayout, sim
from jitfp4.arch import Arch
from jitfp4.families.attention.kernels.decode import DecodeTactic
from jitfp4.families.attention.kernels.decode_masked import MaskedDecodeTactic
from jitfp4.families.attention.kernels.prefill_masked import MaskedPrefillTactic
from jitfp4.families.attention.kernels.prefill_wgmma_masked import MaskedWgmmaTactic
from jitfp4.families.attention.operation import ATTENTION
from jitfp4.families.gdn import gated_delta_rule_mtp
from jitfp4.families.gdn.kernels.chunk import ChunkTactic
from jitfp4.families.gdn.kernels.delta_rule import WalkTactic
from jitfp4.families.gdn.kernels.prefill import PrefillTactic
from jitfp4.families.gdn.kernels.prefill_wgmma import WgmmaTactic as WgmmaPrefillTactic
from jitfp4.families.gdn.operation import GATED_DELTA_RULE
from jitfp4.families.gdn.prefill_operation import GATED_DELTA_RULE_PREFILL
from jitfp4.families.gemm.fp4_operation import MM_FP4
from jitfp4.families.gemm.fp8_operation import MM_FP8_FP4
from jitfp4.families.gemm.kernels import wide
from jitfp4.families.gemm.kernels.expanded_fp8 import ExpandedTactic
from jitfp4.families.gemm.kernels.narrow import NarrowTactic
from jitfp4.families.gemm.kernels.portable import PortableTactic
from jitfp4.families.gemm.kernels.wide import WideTactic
from jitfp4.families.gemm.kernels.wide_fp8 import Fp8Tactic
from jitfp4.families.gemm.operation import MM_BF16_FP4
from jitfp4.families.norm.kernels.rmsnorm_fp4quant import Tactic
from jitfp4.families.norm.kernels.rows_fp4quant import RowsTactic
from jitfp4.families.norm.operation import RMSNORM
from jitfp4.formats import NVFP4
from jitfp4.operation import Operation
from tests.families import test_attention as attention
from tests.families import test_attention_masks as attention_masks
from tests.families import test_fp4_blockscaled as blockscaled
from tests.families import test_gdn_chunk as chunk
from tests.families import test_gdn_kernel as gdn
from tests.families import test_gdn_prefill as gdn_prefill
from tests.families import test_gemm_fp8 as gemm_fp8
from tests.families import test_mm_fp4_wide as mm_fp4_wide
from tests.families import test_norm_kernel as norm
from tests.mutants.calls import attention_case
from tests.support.attention import SCATTERED, Case
from tests.support.compare import poisoned
from tests.support.gdn import assert_close, case, check_other_writes, recurrence
from tests.support.gemm import assert_fp4_product, assert_product, assert_weights_come_back
from tests.support.norm import check, rows_of_all_kinds

Check = Callable[[str], None]
"""Takes the name of an architecture, and raises where a result is wrong."""


class Subject(NamedTuple):
    """A kernel, by the name of its entry: that of every module that the first check runs."""

    entry: str
    checks: tuple[Check, ...]
    archs: tuple[str, ...] = ("sm_90a", "sm_100a")


F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
TILED, LINEAR = SfLayout.layout_128x4, SfLayout.layout_linear


def on(test: Callable[..., None], *args: Any) -> Check:
    """A test that takes a device, last, on which its tensors are."""

    def run(arch: str) -> None:
        with sim.device(arch):
            test(*args, "cpu")

    return run


def forced(check: Check, *choices: tuple[Operation[Any], Any]) -> Check:
    """A check with tactics that the tables would not choose."""

    def run(arch: str) -> None:
        with ExitStack() as stack:
            for operation, tactic in choices:
                stack.enter_context(operation.forced(tactic))
            check(arch)

    return run


def norm_rows(tactic: Tactic | RowsTactic, h: int) -> tuple[Check, ...]:
    def one(m: int, h: int, layout: str, scale: float | None = 3.0) -> Check:
        def run(arch: str) -> None:
            x = rows_of_all_kinds(m, h, F16)
            with sim.device(replace(Arch.of(arch), num_sms=2)), RMSNORM.forced(tactic):
                check(x, x.flip(0), layout, 16, "e4m3", "cpu", scale=scale)

        return run

    return one(6, h, "both"), one(20 if h < 9000 else 9, h, "both"), one(3, h - 80, "128x4", None), one(131, 80, "both")


def rows(check: Callable[[torch.Tensor, str], None]) -> tuple[Check, ...]:
    """A test of rows, which others than full ones begin."""
    return tuple(on(check, rows_of_all_kinds(m, h, F16)) for m, h in ((3, 80), (5, 128), (7, 64)))


def full_rows(tactic: Tactic | RowsTactic, h: int, *layouts: str) -> Check:
    """Rows that fill their threads."""

    def run(arch: str) -> None:
        x = rows_of_all_kinds(8 if h < 9000 else 3, h, F16)
        with sim.device(arch), RMSNORM.forced(tactic):
            for layout in layouts or ("both",):
                check(x, x.flip(0), layout, 16, "e4m3", "cpu")

    return run


def short_rows(arch: str) -> None:
    norm.test_simulated_kernel(arch, F16, 16, "e4m3")


def rows_by_warps(arch: str) -> None:
    """The same kernels, with several rows for each CTA, of which some fill the threads."""
    tactics = ((Tactic(1, 1), (80, 512)), (Tactic(1, 8), (1040, 4096)), (Tactic(2, 8), (4160, 8192)))
    for tactic, lengths in tactics:
        with sim.device(replace(Arch.of(arch), num_sms=2)), RMSNORM.forced(tactic):
            for layout, h in product(norm.LAYOUTS, lengths):
                x = rows_of_all_kinds(9, h, F16)
                check(x, x.flip(0), layout, 16, "e4m3", "cpu")
                check(x, None, "linear" if layout == "both" else layout, 16, "e4m3", "cpu", scale=None)


def gdn_steps(tactic: WalkTactic, head_dim: int, tokens: int, *, update: bool = True) -> Check:
    def run(arch: str) -> None:
        for number in (0, 1):
            arguments = case(2, tokens, 1, 2, head_dim, exact_gates=True, seed=number)
            arguments["initial_state_indices"] = torch.tensor([1, -1] if number else [1, 0])
            with GATED_DELTA_RULE.forced(tactic):
                gdn.check_kernel(arguments, "cpu", arch, l2norm=not number, update=update)

    return run


def gates(tactic: WalkTactic, head_dim: int, tokens: int) -> Check:
    """Gates that are no round numbers, and rows so short that the epsilon of their norm counts."""

    def run(arch: str) -> None:
        arguments = case(2, tokens, 1, 2, head_dim)
        arguments["q"], arguments["k"] = arguments["q"] * 1e-3, arguments["k"] * 1e-3
        steps = poisoned((2, tokens, 2, head_dim, head_dim), F32, "cpu") if tokens > 1 else None
        want_out, want_states = recurrence(arguments)
        with sim.device(arch), GATED_DELTA_RULE.forced(tactic):
            out, state = gated_delta_rule_mtp(**arguments, intermediate_states_buffer=steps)
        assert_close("output", out, want_out)
        assert_close("state", state, want_states[:, -1])

    return run


def gdn_writes(tactic: WalkTactic) -> Check:
    """Final states to other slots, states of every token to slots of the pool, and both."""

    def run(arch: str) -> None:
        with sim.device(arch), GATED_DELTA_RULE.forced(tactic):
            check_other_writes("cpu")

    return run


def chunk_steps(
    tokens: int, tactic: ChunkTactic, *, state_dtype: torch.dtype = F32, head_dim: int = 64, **options: Any
) -> Check:
    return lambda arch: chunk.TestSimulated().test_shapes(arch, (tokens, head_dim, BF16, state_dtype), tactic, options)


def prompts(tactic: PrefillTactic | WgmmaPrefillTactic, *lengths: int, head_dim: int = 64, **options: Any) -> Check:
    """Whole prompts by the delta rule; of long ones something is left at their end."""

    def run(arch: str) -> None:
        given = gdn_prefill.case(lengths, (1, 1, 2), (head_dim, head_dim), **options)
        given["g"] = 1.0 - (0.3 if max(lengths) < 256 else 0.01) * (1.0 - given["g"])
        with sim.device(arch), GATED_DELTA_RULE_PREFILL.forced(tactic):
            gdn_prefill.check(given, "cpu")

    return run


def attend(tactic: DecodeTactic, sms: int = 2, **options: Any) -> Check:
    def run(arch: str) -> None:
        one = attention_case(sms=sms, **options)
        with sim.device(replace(Arch.of(arch), num_sms=sms)), ATTENTION.forced(tactic):
            one.check(one.run(), attention._BOUND)

    return run


def decode(**cache: Any) -> tuple[Check, ...]:
    """Two short requests; windows, sinks and missing pages; several tokens of ragged requests; many CTAs' shares; CTAs
    with two ragged requests, and a window that hides whole tiles; so many parts that groups of them are added up first;
    a largest element at each place of a query; a request that says to be longer than its row of the page table.
    """
    tactic = DecodeTactic(2, 2, 1)
    lengths, q_lens = (224, 20, 20, 20, 20), (2, 1, 1, 2, 1)
    apart = 128.0 if cache.get("cache") == BF16 else 8.0  # of logits whose references move
    return (
        attend(tactic, lengths=(70, 33), **cache),
        attend(tactic, lengths=(45, 0, 33), window_left=30, with_sinks=True, missing=((0, 0, 1, -1),), **cache),
        attend(tactic, lengths=(40, 50, 2), q_lens=(3, 0, 2), group=4, window_left=20, **cache),
        attend(tactic, lengths=(170,), kv_heads=3, group=7, extra_page_bytes=64, **cache),
        attend(tactic, 5, lengths=(390, 20), kv_heads=1, steep=8.0, **cache),
        attend(tactic, 1, lengths=lengths, q_lens=q_lens, kv_heads=1, group=4, window_left=100, **cache),
        attend(tactic, 40, lengths=(2200,), kv_heads=1, group=3, **cache),
        attend(tactic, lengths=(32,) * 24, kv_heads=1, spikes=True, steep=apart, **cache),
        attend(tactic, 3, **SCATTERED | cache | {"q_lens": (8,), "group": 5, "steep": apart}),
        lambda arch: attention.check_table_ends(arch, **cache),
    )


def masks(
    sizes: dict[str, Any], tactic: MaskedDecodeTactic | MaskedPrefillTactic | MaskedWgmmaTactic, **cache: Any
) -> tuple[Check, ...]:
    """A tree of drafted tokens, and a mask of any form; the latter without sinks, and with references that move."""

    def one(make: Callable[..., Any], call: Callable[[Any], Any], **changes: Any) -> Check:
        def run(arch: str) -> None:
            case = Case(**sizes | cache | changes, masks=make(sizes))
            with sim.device(replace(Arch.of(arch), num_sms=2)), ATTENTION.forced(tactic):
                case.check(call(case), attention_masks.BOUND)

        return run

    tree = one(attention_masks.tree, lambda case: case.run(**attention_masks.drafts(case)))
    steep = one(attention_masks.scattered, attention_masks.planned, with_sinks=False, steep=8.0, spikes=True)
    return tree, one(attention_masks.scattered, attention_masks.planned), steep


def prefill_cases(tests: Any, *names: str) -> tuple[Check, ...]:
    """Cases of test_prefill.py or test_attention_wgmma.py."""

    def one(name: str) -> Check:
        def run(arch: str) -> None:
            with sim.device(arch):
                case, got = tests.run(name)
            case.check(got, tests._BOUND)

        return run

    return tuple(map(one, names))


def portable_races(arch: str) -> None:
    """Several tiles of rows, none of which may write another's."""
    tactic = PortableTactic(16, 128, 16, 32, 2, 3, scaled_mma=arch == "sm_120a")
    with sim.device(arch, races=True), MM_FP4.forced(tactic):
        assert_fp4_product(40, 72, 416)


def fp4_cases(*cases: Any) -> tuple[Check, ...]:
    """Cases of test_fp4_blockscaled.py."""

    def one(tactic: Any, sms: int, *rest: Any) -> Check:
        return lambda arch: blockscaled.assert_product(tactic, replace(Arch.of(arch), num_sms=sms), *rest)

    return tuple(one(*case) for case in cases)


def fp8_products(tactic: Fp8Tactic | ExpandedTactic, *sizes: tuple[int, int, int]) -> tuple[Check, ...]:
    """Each weight by itself, and products of whole numbers and of random ones."""

    def one(test: Callable[..., object], *args: Any) -> Check:
        return forced(on(lambda device: test(*args, NVFP4, device=device)), (MM_FP8_FP4, tactic))

    return (*(one(gemm_fp8.assert_close, *size) for size in sizes), one(gemm_fp8.assert_weights_come_back, 72, 288))


def wide_fp4_cases(number: int) -> tuple[Check, ...]:
    """A case of test_mm_fp4_wide.py."""
    return (on(mm_fp4_wide.test_cuts_formats_and_layouts, *mm_fp4_wide.CASES[number]),)


def products(tactic: NarrowTactic | WideTactic, *sizes: tuple[int, int, int], **options: Any) -> tuple[Check, ...]:
    """Products, and each weight by itself. With two SMs, so that a CTA of the wide kernel has several tiles, and rings
    of so few slots that each is filled again.
    """

    def on_few_sms(test: Callable[[], object]) -> Check:
        def run(arch: str) -> None:
            few = mock.patch.object(wide, "_MOST_SLOTS", 4)
            with sim.device(replace(Arch.of(arch), num_sms=2)), MM_BF16_FP4.forced(tactic), few:
                test()

        return run

    is_narrow = isinstance(tactic, NarrowTactic)
    weights = partial(
        assert_weights_come_back,
        72,
        160 if is_narrow or tactic.split == 1 else 416,
        options.get("block_format", NVFP4),
        rows=2 * tactic.tile_m if is_narrow else None,
    )
    return (*(on_few_sms(partial(assert_product, *size, **options)) for size in sizes), on_few_sms(weights))

"""The mutation campaign: whole with ``--all``, else a sample. bench/mutants.py writes its table.

Of the synchronising instructions nobody misses one; of the arithmetic, the tests of its family notice a change.
"""

from __future__ import annotations

import csv
import zlib
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from jitfp4.kernel import kernels
from jitfp4.sim.api import load
from tests.mutants import arithmetic, campaign, trial
from tests.mutants.checks import CHECKS
from tests.mutants.launches import KERNELS, record
from tests.mutants.synchronisation import mutants, synchronises

pytestmark = [pytest.mark.sim, pytest.mark.compile]
ROOT = Path(__file__).parents[2]
RECORD, README = ROOT / "bench/results/cpu/mutants.csv", ROOT / "jitfp4/sim/README.md"
SAMPLE = 2
"""Mutants of each launch in CI."""
WHOLE_ARITHMETIC = 14
"""Mutants of each kernel and architecture: about a thousand over all."""
JUDGED = (
    *("quantize, vector", "quantize, mxfp4", "quantize, float8", "quantize, table", "quantize, silu"),
    *("quantize, batches", "quantize, masked", "quantize, experts", "dequantize"),
    *("kv, rows", "kv, slots", "kv, positions", "kv, read", "kv, read rows"),
    *("gdn, one token", "gdn, pools", "gdn, chunk", "gdn, chunk ahead"),
)
"""Entries of CHECKS that take seconds, and whose survivors are all on file; bench/mutants.py runs the others too."""


def digest(name: str) -> int:
    return zlib.crc32(name.encode())


@pytest.mark.complete
def test_every_kernel_has_launches() -> None:
    wanted = {kernel.name.replace("/", "_") for kernel in kernels()}
    assert {launch.entry for launch in KERNELS.values() if launch.entry} == wanted, (
        "KERNELS of tests/mutants/launches.py"
    )


@pytest.mark.one_in(8)
@pytest.mark.parametrize("name", KERNELS)
def test_a_missing_synchronisation_is_noticed(name: str, whole: bool) -> None:
    known, archs = campaign.known_survivors(), KERNELS[name].archs
    for arch in archs if whole else archs[digest(name) % len(archs) :][:1]:
        (one,) = record(name, arch)
        found, unchanged = campaign.candidates(one)
        assert found, "no instruction synchronises"
        order = np.random.default_rng(digest(name)).permutation(len(found))
        for at in order if whole else order[:SAMPLE]:
            verdict = campaign.judge(one, found[at], unchanged)
            assert verdict.how or campaign.reason(verdict, known), f"survives: {verdict}"


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", JUDGED)
def test_other_arithmetic_is_noticed(name: str, whole: bool) -> None:
    known, archs = trial.known_survivors(), CHECKS[name].archs
    for arch in archs if whole else archs[digest(name) % len(archs) :][:1]:
        modules = trial.modules(name, arch)
        assert modules
        for one in modules if whole else modules[:1]:
            for mutant in one.sample(-(-WHOLE_ARITHMETIC // len(modules)) if whole else SAMPLE):
                verdict = trial.judge(one, mutant)
                assert verdict.how or trial.reason(verdict, known), f"survives: {verdict}"


def test_every_survivor_is_judged() -> None:
    assert {reason.split(":")[0] for reason in trial.known_survivors().values()} == {"equivalent", "gap"}
    assert all(campaign.known_survivors().values())


def test_the_readme_says_what_is_recorded() -> None:
    counts: Counter[tuple[str, str]] = Counter()
    with RECORD.open(newline="") as file:
        for row in csv.DictReader(file):
            for name in ("mutants", "noticed", "equivalent"):
                counts[row["kind"], name] += int(row[name])
    kinds = "synchronisation", "arithmetic"
    first, second = ({name: n for (kind, name), n in counts.items() if kind == wanted} for wanted in kinds)
    all_, seen, same = second["mutants"], second["noticed"], second["equivalent"]
    rest = all_ - seen - same
    said = (
        f"Of {first['mutants']:,} of the first kind {first['noticed']:,} are noticed, and each of the others has its "
        f"reason. Of {all_:,} of the second kind {seen:,} are noticed, {same} are judged equivalent, which makes "
        f"{100 - 100 * rest / all_:.1f} %, and {rest} live in gaps of the tests"
    )
    assert said in " ".join(README.read_text().split())


def test_every_synchronising_instruction_has_a_mutant() -> None:
    (one,) = record("quantize, tensor maps", "sm_90a")
    found, _ = campaign.candidates(one)
    opcodes = {mutant.instead.text.removeprefix("deleted: ").split()[0].rstrip(";") for mutant in found}
    for piece in ("mbarrier.init.shared::cta.b64", "mbarrier.arrive.expect_tx.shared::cta.b64", "bar.sync"):
        assert piece in opcodes
    changes = {mutant.change for mutant in found if "expect_tx" in mutant.instead.text}
    assert changes == {"deleted", "expects no bytes"}


def test_what_only_computes_is_left_alone() -> None:
    (one,) = record("quantize, vector", "sm_90a")
    code = load(one.ptx, one.entry).module.code
    assert not any(list(mutants(pc, instr)) for pc, instr in enumerate(code) if instr.name in ("add", "mul", "cvt"))
    assert sum(map(synchronises, code)) == 1  # griddepcontrol.wait


@pytest.mark.parametrize(
    ("line", "changes"),
    [
        ("add.s32 %r1, %r2, 7", {"sub.s32", "7 is 8", "7 is 6"}),
        ("setp.leu.f32 %p1, %f1, 0f40000000", {"setp.gt.f32", "2.0 is -2.0", "2.0 is 4.0"}),
        ("mad.lo.s32 %r1, %r2, %r3, %r1", {"mul.lo.s32"}),
        ("div.u32 %r1, %r2, %r3", {"mul.lo.u32"}),
        ("selp.b32 %r1, %r2, %r3, %p1", {"selp.b32"}),
        ("mov.b32 %r1, 0f00000000", {"0.0 is 1.0"}),
        ("mov.f32 %f1, 0fFF800000", {"-inf is inf", "-inf is 0.0"}),
        ("ld.global.u32 %r1, [%rd1+4]", set()),
        ("bar.sync 0", set()),
    ],
)
def test_what_arithmetic_becomes(line: str, changes: set[str]) -> None:
    ptx = f"""
    .version 8.8
    .target sm_90a
    .address_size 64
    .visible .entry kernel() {{
      .reg .pred %p<2>; .reg .b32 %r<4>; .reg .b64 %rd<2>; .reg .f32 %f<2>;
      {line};
      ret;
    }}"""
    program = load(ptx)
    assert {mutant.change for mutant in arithmetic.mutants(0, program.module.code[0])} == changes

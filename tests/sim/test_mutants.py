"""A sample of the mutation campaign (bench/mutants.py runs it whole): synchronising instructions that nobody misses."""

from __future__ import annotations

import zlib

import numpy as np
import pytest

from tests.mutants.campaign import candidates, judge, known_survivors, reason
from tests.mutants.launches import ARCHS, KERNELS, record
from tests.mutants.synchronisation import mutants, synchronises

pytestmark = [pytest.mark.sim, pytest.mark.compile]
SAMPLE = 2
"""Mutants of each launch."""


@pytest.mark.parametrize("name", KERNELS)
def test_a_missing_synchronisation_is_noticed(name: str) -> None:
    number = zlib.crc32(name.encode())
    known = known_survivors()
    first = number % len(ARCHS)
    launches = record(name, ARCHS[first]) or record(name, ARCHS[1 - first])  # the tiles belong to one architecture
    assert launches
    for one in launches:
        found, want = candidates(one)
        assert found, "no instruction synchronises"
        for at in np.random.default_rng(number).permutation(len(found))[:SAMPLE]:
            verdict = judge(one, found[at], want)
            assert verdict.how or reason(verdict, known), f"survives: {verdict}"


def test_every_synchronising_instruction_has_a_mutant() -> None:
    (one,) = record("quantize, tensor maps", "sm_90a")
    found, _ = candidates(one)
    opcodes = {mutant.instead.text.removeprefix("deleted: ").split()[0].rstrip(";") for mutant in found}
    for piece in ("mbarrier.init.shared::cta.b64", "mbarrier.arrive.expect_tx.shared::cta.b64", "bar.sync"):
        assert piece in opcodes
    changes = {mutant.change for mutant in found if "expect_tx" in mutant.instead.text}
    assert changes == {"deleted", "expects no bytes"}


def test_what_only_computes_is_left_alone() -> None:
    from jitfp4.sim.api import load

    (one,) = record("quantize, vector", "sm_90a")
    code = load(one.ptx, one.entry).module.code
    assert not any(list(mutants(pc, instr)) for pc, instr in enumerate(code) if instr.name in ("add", "mul", "cvt"))
    assert sum(map(synchronises, code)) == 2  # griddepcontrol.wait and .launch_dependents

"""Architectures: what a device runs, and that capabilities alone decide which kernels one gets."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import jitfp4
from jitfp4.arch import ARCHS, Arch, names_with, shared_bytes_with
from jitfp4.errors import UnsupportedArchError
from jitfp4.families import attention, experts, gdn, gemm, kv, norm, quantize  # noqa: F401 - their operations
from jitfp4.operation import operations

LIKE = {name: getattr(ARCHS["sm_100a"], name) for name in Arch.__dataclass_fields__ if name not in ("name", "nvrtc")}


@pytest.mark.parametrize(
    ("capability", "name"),
    [
        ((8, 0), "sm_80"),
        ((8, 6), "sm_80"),
        ((8, 7), "sm_80"),
        ((8, 9), "sm_89"),
        ((9, 0), "sm_90a"),
        ((10, 0), "sm_100a"),
        ((10, 3), "sm_103a"),
        ((12, 0), "sm_120a"),
        ((12, 1), "sm_121a"),
    ],
)
def test_the_target_of_a_device(capability: tuple[int, int], name: str) -> None:
    assert Arch.of_capability(*capability) is ARCHS[name]


@pytest.mark.parametrize("capability", [(7, 5), (9, 1), (10, 1), (11, 0), (12, 2)])
def test_arch_specific_code_runs_nowhere_else(capability: tuple[int, int]) -> None:
    with pytest.raises(UnsupportedArchError, match=f"{capability[0]}.{capability[1]} has no target"):
        Arch.of_capability(*capability)


def test_a_new_architecture_is_one_line_and_gets_the_kernels_of_those_like_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ARCHS, "sm_110a", Arch("sm_110a", **LIKE, nvrtc=(13, 0)))
    new, like = Arch.of_capability(11, 0), ARCHS["sm_100a"]
    assert new.name == "sm_110a" and new.ptx_target == "compute_110a"
    for operation in operations():
        for problem in operation.problems(like):
            assert operation.select(problem, new) == operation.select(problem, like)
        for kernel in operation.kernels:
            assert kernel.specs(new, "selected") == kernel.specs(like, "selected")
    assert names_with("has_tcgen05") == "sm_100a and sm_103a and sm_110a"


def test_no_kernel_asks_for_an_architecture_by_its_name() -> None:
    """Nor does the simulator: a capability says what an instruction or a table needs."""
    package = Path(jitfp4.__file__).parent
    for path in [*package.glob("families/**/*.py"), *package.glob("sim/**/*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert not re.fullmatch(r"sm_\d*a?", node.value), f"{path}:{node.lineno}: {node.value}"


def test_every_capability_tells_architectures_apart() -> None:
    for name in Arch.__dataclass_fields__:
        if name.startswith("has_"):
            assert 0 < sum(getattr(arch, name) for arch in ARCHS.values()) < len(ARCHS), name


def test_shared_memory_that_every_architecture_with_a_capability_has() -> None:
    assert shared_bytes_with("has_tma") == 101376 < shared_bytes_with("has_tcgen05") == ARCHS["sm_103a"].shared_bytes

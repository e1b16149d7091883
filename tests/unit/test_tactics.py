"""Tactics files: what is written is read, what is wrong is refused with a reason, and what is loaded is used."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import jitfp4
from jitfp4 import TacticsError, engine, nvrtc, replay, sim, tactics, warmup
from jitfp4.arch import ARCHS, Arch
from jitfp4.errors import ArgumentError
from jitfp4.families.quantize.kernels.tma import TmaTactic
from jitfp4.families.quantize.kernels.vector import VectorTactic
from jitfp4.families.quantize.operation import QUANTIZE
from jitfp4.kernel import Plan
from jitfp4.operation import Operation, operations
from jitfp4.spec import fields_of
from jitfp4.tactics import Choice, TacticsFile
from jitfp4.warmup import plan

SM_90A = Arch.of("sm_90a")
GPU = "simulated sm_90a"
X = torch.ones(4, 64).bfloat16()
TUNED = VectorTactic(4, 256)


def toolchain() -> str:
    found = nvrtc.toolchain()
    assert found is not None
    return found.name


def problem_of(x: torch.Tensor) -> Any:
    like = QUANTIZE.problems(SM_90A)[0]
    return like._replace(in_dtype="bf16", sf_layout=jitfp4.SfLayout.layout_128x4, m=x.shape[0], k=x.shape[1])


def choice(operation: Operation[Any, Any], problem: Any, tactic: Any) -> Choice:
    kernel = next(kernel for kernel in operation.kernels if kernel.tactic is type(tactic))
    return Choice(
        operation=operation.name,
        problem=fields_of(operation.bucket(problem)),
        kernel=kernel.name,
        tactic=fields_of(tactic),
        us=1.5,
        measured=7,
        finished=True,
    )


def file_of(*choices: Choice, gpu: str = GPU, arch: str = "sm_90a") -> TacticsFile:
    return TacticsFile(gpu, arch, toolchain(), {}).updated(choices)


@pytest.fixture
def file() -> TacticsFile:
    """Of the problem of X, whose table says otherwise."""
    assert QUANTIZE.select(problem_of(X), SM_90A) != TUNED
    return file_of(choice(QUANTIZE, problem_of(X), TUNED))


@pytest.fixture
def path(tmp_path: Path, file: TacticsFile) -> Path:
    tactics.write(file, tmp_path / "tactics.json")
    return tmp_path / "tactics.json"


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Plan]]:
    """Plans of launches, on a simulated GPU that runs nothing."""
    plans: list[Plan] = []
    monkeypatch.setattr(engine, "launch", lambda plan, *_, **__: plans.append(plan))
    with sim.device("sm_90a"):
        yield plans


def launched_blocks(launched: list[Plan]) -> int:
    jitfp4.nvfp4_quantize(X, 1.0)
    return int(launched[-1].spec.blocks_per_thread)


# ---- the file --------------------------------------------------------------------------------------------------------


def test_what_is_written_is_read(file: TacticsFile) -> None:
    assert TacticsFile.decode(file.encode()).choices == file.choices
    more = choice(QUANTIZE, problem_of(X)._replace(k=128), TUNED)
    assert file.updated([more]).encode() == file_of(more, *file.choices.values()).encode()
    assert file.updated([replace(more, us=9.0), more]).choices[more.key].us == 1.5


def test_every_changed_byte_is_found(file: TacticsFile) -> None:
    data = file.encode()
    for at in range(len(data)):
        changed = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        try:
            assert TacticsFile.decode(changed).choices == file.choices  # the kind of white space does not matter
        except TacticsError:
            continue
        assert chr(data[at]).isspace() or changed[at : at + 1].isspace()
    for size in range(0, len(data) - 2, 7):
        with pytest.raises(TacticsError):
            TacticsFile.decode(data[:size])


@pytest.mark.parametrize("operation", operations(), ids=lambda one: one.name)
def test_a_problem_that_no_call_has_is_an_error_with_its_name(operation: Operation[Any, Any]) -> None:
    """Of a tactics file, whose kernels are built ahead, and of the command line: sizes of nothing, and endless ones."""
    arch = next(arch for arch in ARCHS.values() if operation.problems(arch))
    good, kinds = operation.problems(arch)[0], fields_of(operation.problems(arch)[0])
    tactic = operation.select(good, arch)
    for field, value in product([name for name, value in kinds.items() if type(value) is int], (0, 1_000_000, 10**30)):
        wrong = replace(choice(operation, good, tactic), problem=kinds | {field: value})
        with suppress(ArgumentError):
            warmup.tuned(file_of(wrong, arch=arch.name))
        with suppress(ArgumentError):
            operation.check(asked := good._replace(**{field: value}), arch)
            operation.selection(asked, arch)


def with_checksum(**changes: Any) -> bytes:
    body = json.loads(file_of().encode()) | changes
    del body["sha256"]
    return json.dumps({"sha256": tactics._checksum(body), **body}).encode()


WHOLE = {"operation": "a", "problem": {}, "kernel": "b", "tactic": {}, "us": 1, "measured": 2, "finished": True}


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "damaged: it is no JSON"),
        (b"[" * 100_000, "damaged: it is no JSON"),
        (b"\xff\xfe", "damaged: it is no JSON"),
        (b" " * (tactics.MAX_BYTES + 1), "more than"),
        (b"[1]", "no tactics file"),
        (b'{"schema": 2, "choices": []}', "a tactics file of version 2; this jitfp4 reads 1"),
        (b'{"schema": 1, "choices": []}', "damaged: its checksum does not match"),
        (with_checksum(choices=[{"operation": "quantize"}]), "not in the form of version 1"),
        (with_checksum(choices=3), "not in the form of version 1"),
        (with_checksum(choices=[WHOLE | {"problem": [1]}]), r"not in the form of version 1: problem: \[1\]"),
        (with_checksum(choices=[WHOLE | {"us": None}]), "not in the form of version 1: us: None"),
        (with_checksum(choices=[WHOLE | {"more": 1}]), "not in the form of version 1"),
    ],
)
def test_what_is_no_file_is_refused_with_the_reason(data: bytes, why: str) -> None:
    with pytest.raises(TacticsError, match=why):
        TacticsFile.decode(data)


def test_another_gpu_and_another_toolchain_are_refused_with_the_reason(
    file: TacticsFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.check(["another", GPU])
    with pytest.raises(TacticsError, match="tuned on 'simulated sm_90a'; here is 'NVIDIA H200'"):
        file.check(["NVIDIA H200"])
    with pytest.raises(TacticsError, match="here is no GPU"):
        file.check([])
    other = replace(file, toolchain="nvrtc-0")
    with pytest.raises(TacticsError, match="tuned with nvrtc-0; here is nvrtc-"):
        other.check([GPU])
    monkeypatch.setattr(nvrtc, "toolchain", lambda: None)
    other.check([GPU])


# ---- what is used ----------------------------------------------------------------------------------------------------


def test_forced_comes_before_tuned_and_tuned_before_the_table(path: Path, launched: list[Plan]) -> None:
    by_table = launched_blocks(launched)
    jitfp4.load_tactics(path)
    assert launched_blocks(launched) == 4 != by_table
    with QUANTIZE.forced(VectorTactic(2, 256)):
        assert launched_blocks(launched) == 2
    assert launched_blocks(launched) == 4
    jitfp4.load_tactics(None)
    assert launched_blocks(launched) == by_table


def test_select_says_what_selected(file: TacticsFile, path: Path) -> None:
    problem, read = problem_of(X), tactics.read(path)
    assert QUANTIZE.select(problem, SM_90A, read) == TUNED
    assert QUANTIZE.selection(problem, SM_90A, read).by == f"tuned: {path}"
    assert QUANTIZE.selection(problem, SM_90A).by.startswith("table: row ")
    assert QUANTIZE.selection(problem, SM_90A).by.endswith(", read from bench/results/h200/quantize_variants.csv")
    with QUANTIZE.forced(TmaTactic(6, 1, 2)):
        assert QUANTIZE.selection(problem, SM_90A, read) == (TmaTactic(6, 1, 2), "forced")


def test_kernels_that_are_built_ahead_do_not_depend_on_forced_or_tuned(path: Path) -> None:
    before = plan([SM_90A], ["quantize"])
    with sim.device("sm_90a"):
        jitfp4.load_tactics(path)
    QUANTIZE._all_specs.cache_clear()  # type: ignore[attr-defined]
    with QUANTIZE.forced(TUNED):
        assert plan([SM_90A], ["quantize"]) == before


def test_a_bucket_holds_up_to_the_next_power_of_two(launched: list[Plan]) -> None:
    jitfp4_file = file_of(choice(QUANTIZE, problem_of(X)._replace(m=5), TUNED))
    tactics.use(jitfp4_file)
    for m in range(1, 12):
        jitfp4.nvfp4_quantize(torch.ones(m, 64).bfloat16(), 1.0)
        assert (launched[-1].spec.blocks_per_thread == 4) == (5 <= m <= 8), m
    jitfp4.nvfp4_quantize(torch.ones(6, 128).bfloat16(), 1.0)
    assert launched[-1].spec.blocks_per_thread != 4


def test_where_the_tuned_tactic_cannot_run_the_table_selects() -> None:
    from jitfp4.families.gemm.kernels.wide import WideTactic
    from jitfp4.families.gemm.operation import MM_BF16_FP4

    like = MM_BF16_FP4.problems(SM_90A)[0]._replace(n=4096, k=4096)
    tuned = file_of(choice(MM_BF16_FP4, like._replace(m=64), WideTactic(64, 1, 2)))
    assert isinstance(MM_BF16_FP4.select(like._replace(m=64), SM_90A, tuned), WideTactic)
    assert not MM_BF16_FP4.selection(like._replace(m=32), SM_90A, tuned).by.startswith("tuned")
    assert MM_BF16_FP4.bucket(like._replace(m=33)).m == 64
    narrow = file_of(choice(MM_BF16_FP4, like._replace(m=32), WideTactic(64, 1, 2)))  # half of its rows would be empty
    assert not MM_BF16_FP4.selection(like._replace(m=32), SM_90A, narrow).by.startswith("tuned")
    assert MM_BF16_FP4.tuned(like._replace(m=64), Arch.of("sm_100a"), tuned) is None


@pytest.mark.parametrize("operation", operations(), ids=lambda operation: operation.name)
def test_every_tactic_of_every_operation_can_be_tuned_for(operation: Operation[Any, Any]) -> None:
    problem = operation.problems(SM_90A)[-1]
    for tactic in list(operation.candidates(problem, SM_90A))[-3:]:
        read = TacticsFile.decode(file_of(choice(operation, problem, tactic)).encode())
        assert operation.select(problem, SM_90A, read) == tactic
        assert operation.selection(problem, SM_90A, read).by.startswith("tuned")


@pytest.mark.complete
def test_the_documented_buckets_are_those_of_the_operations() -> None:
    text = (Path(__file__).parents[2] / "docs" / "tuning.md").read_text()
    table = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", text, re.MULTILINE))
    documented = {name: re.findall(r"`(\w+)`", fields) for name, fields in table.items()}
    for operation in operations():
        assert operation.name in documented, "the table of docs/tuning.md"
        problem, fields = operation.problems(SM_90A)[0], documented.pop(operation.name)
        sizes = [name for name, value in problem._asdict().items() if type(value) is int]
        assert set(fields) <= set(sizes)
        large = problem._replace(**dict.fromkeys(sizes, 1000))
        assert operation.bucket(large) == large._replace(**dict.fromkeys(fields, 1024)), operation.name
    assert not documented


# ---- loading ---------------------------------------------------------------------------------------------------------


def test_a_file_that_cannot_be_used_is_refused_and_what_was_used_stays(
    path: Path, tmp_path: Path, launched: list[Plan]
) -> None:
    jitfp4.load_tactics(path)
    unknown = replace(choice(QUANTIZE, problem_of(X), TUNED), tactic={"blocks_per_thread": 3, "threads": 7})
    for other, why in (
        (file_of(gpu="NVIDIA H200"), "tuned on 'NVIDIA H200'"),
        (file_of(unknown), "one that quantize/vector lists"),
        (file_of(replace(unknown, kernel="quantize/none")), "allowed: quantize/vector"),
        (file_of(replace(unknown, operation="none")), "operation: got 'none'"),
    ):
        tactics.write(other, tmp_path / "other.json")
        with pytest.raises(TacticsError, match=why) as caught:
            jitfp4.load_tactics(tmp_path / "other.json")
        assert str(tmp_path) in str(caught.value)
    with pytest.raises(FileNotFoundError):
        jitfp4.load_tactics(tmp_path / "none")
    assert launched_blocks(launched) == 4


def test_the_variable_names_a_file(path: Path, monkeypatch: pytest.MonkeyPatch, launched: list[Plan]) -> None:
    monkeypatch.setenv("JITFP4_TACTICS", str(path))
    engine.reset()
    assert launched_blocks(launched) == 4


@pytest.mark.parametrize("damage", ["missing", "flipped", "another GPU"])
def test_a_bad_file_of_the_variable_costs_a_warning_and_nothing_else(
    damage: str, path: Path, monkeypatch: pytest.MonkeyPatch, launched: list[Plan], caplog: pytest.LogCaptureFixture
) -> None:
    by_table = launched_blocks(launched)
    if damage == "missing":
        path.unlink()
    elif damage == "flipped":
        path.write_bytes(path.read_bytes().replace(b'"us": 1.5', b'"us": 1.4'))
    else:
        tactics.write(file_of(gpu="NVIDIA H200"), path)
    monkeypatch.setenv("JITFP4_TACTICS", str(path))
    engine.reset()
    with caplog.at_level(logging.WARNING, "jitfp4.tactics"):
        assert [launched_blocks(launched) for _ in range(3)] == [by_table] * 3
    (record,) = caplog.records
    assert str(path) in record.getMessage() and "the committed tables select" in record.getMessage()
    monkeypatch.setenv("JITFP4_STRICT", "1")
    engine.reset()
    for _ in range(2):
        with pytest.raises(TacticsError, match="JITFP4_TACTICS"):
            launched_blocks(launched)


def test_a_choice_that_this_version_does_not_know_costs_a_warning(
    path: Path, monkeypatch: pytest.MonkeyPatch, launched: list[Plan], caplog: pytest.LogCaptureFixture
) -> None:
    by_table = launched_blocks(launched)
    known = choice(QUANTIZE, problem_of(X), TUNED)
    tactics.write(file_of(replace(known, tactic={"blocks_per_thread": 3, "threads": 7})), path)
    monkeypatch.setenv("JITFP4_TACTICS", str(path))
    engine.reset()
    assert [launched_blocks(launched) for _ in range(2)] == [by_table] * 2
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_calls_that_are_remembered_are_forgotten_when_a_file_is_loaded(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a call that another thread was about to remember while the file was loaded."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(replay, "is_plain", lambda _: True)
    ran = []

    @replay.replayed
    def function(x: torch.Tensor) -> torch.Tensor:
        ran.append(x)
        replay.note(None)  # nothing to repeat: it runs again, but is remembered
        if len(ran) == 1:
            tactics.use(None)
        return x

    (memory,) = replay._memories[-1:]
    function(X)
    assert not memory
    function(X)
    assert memory
    with monkeypatch.context() as patch, sim.device("sm_90a"):
        patch.setattr(torch.Tensor, "is_cuda", False)
        jitfp4.load_tactics(path)
    assert not memory
    replay._memories.remove(memory)

"""The command line: no input is a traceback, no entry drives the terminal, Ctrl-C keeps what is done."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from jitfp4.arch import Arch
from jitfp4.cache import Cache, Catalog, Verdict
from jitfp4.cli import app
from jitfp4.cli.output import visible
from jitfp4.config import Config
from jitfp4.keys import Recipe
from jitfp4.warmup import plan, write_plan
from tests.faults.kernels import TOOLCHAIN, make_built, make_recipe
from tests.faults.sandbox import ROOT, interruptible

HUGE = "9" * 5000
EVIL = "\x1b]0;title\x07\x1b[2J\x9b31m\r\x08‮⁦\u2028\x7f\n\x00"

PLANS: dict[str, bytes] = {
    "not UTF-8": b"\xff\xfe\x00",
    "UTF-16": '{"schema": 1}'.encode("utf-16"),
    "nested lists": b"[" * 200_000,
    "nested objects": b'{"a":' * 200_000,
    "a huge number": b'{"schema": ' + b"9" * 5000 + b"}",
    "a lone surrogate": b'{"schema": 1, "kernels": [{"family": "\\ud800", "arch": "sm_90a", "spec": {}}]}',
    "a wrong kernel": b'{"schema": 1, "kernels": [7]}',
    "a wrong spec": b'{"schema": 1, "kernels": [{"family": "quantize/vector", "arch": "sm_90a", "spec": {"x": 1}}]}',
    "null": b"null",
    "nothing": b"",
    "zeros": bytes(1000),
}
ARGUMENTS: list[list[str]] = [
    ["warmup", "--arch", "sm_90a", "--check", "--shard", f"0/{HUGE}"],
    ["warmup", "--arch", "sm_90a", "--check", "--shard", f"{HUGE}/1"],
    ["warmup", "--arch", "sm_90a", "--check", "--shard", "٠/١"],
    ["warmup", "--arch", "sm_90a", "--check", "--shard", "0/1/2"],
    ["warmup", "--arch", "sm_90a", "--check", "--shard", ""],
    ["warmup", "--arch", "sm_90a", "--check", "--family", ""],
    ["warmup", "--arch", "sm_90a", "--check", "--family", " , "],
    ["warmup", "--arch", "sm_90a", "--write-plan", ""],
    ["warmup", "--arch", "", "--check"],
    ["cache", "ls", "--family", ""],
    ["cache", "ls", "--family", ","],
    ["cache", "ls", "--arch", ""],
    ["cache", "ls", "--limit", HUGE],
    ["cache", "prune", "--max-entries", HUGE],
    ["cache", "prune", "--max-age", "1e9d"],
    ["cache", "export", "--out", ""],
    ["cache", "import", "/"],
    ["cache", "import", ""],
    ["cache", "pull", ""],
    ["cache", "pull", "http://[::1"],
    ["cache", "pull", "\x00"],
]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JITFP4_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def check_is_a_message(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2, (arguments, result.output[-500:], result.exception)
    assert isinstance(result.exception, SystemExit), (arguments, result.exception)
    assert result.stderr
    assert "Traceback" not in result.output


@pytest.mark.parametrize("name", PLANS)
def test_a_bad_plan_is_a_message(tmp_path: Path, name: str) -> None:
    (tmp_path / "plan").write_bytes(PLANS[name])
    for command in (["warmup", "plan", "--check"], ["cache", "export", "plan", "--out", "o"],
                    ["cache", "push", "memory://x", "--plan", "plan"]):  # fmt: skip
        check_is_a_message(command)


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=lambda arguments: " ".join(arguments)[:60].replace("\0", "NUL"))
def test_a_bad_argument_is_a_message(arguments: list[str]) -> None:
    check_is_a_message(arguments)


def jitfp4(*arguments: object, redirect: str = "") -> subprocess.CompletedProcess[str]:
    command = " ".join([sys.executable, "-m", "jitfp4", *map(str, arguments), redirect])
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}  # output is written late
    options = {"cwd": ROOT, "env": env, "capture_output": True, "text": True, "timeout": 900}
    return subprocess.run(command, shell=True, check=False, **options)  # type: ignore[call-overload]  # noqa: S602


@pytest.mark.one_in(4)
@pytest.mark.parametrize("redirect", [">&-", "2>&-", ">&- 2>&-", "<&-", ">/dev/full", "| true", "| head -c 1"])
@pytest.mark.parametrize("command", ["ls", "dir", "size", "verify", "ls --json", "prune", "dir --json", "show b7"])
def test_a_closed_or_full_output_is_no_traceback(tmp_path: Path, command: str, redirect: str) -> None:
    Cache(Config(cache_dir=tmp_path / "cache")).get_or_build(make_recipe(), TOOLCHAIN, make_built)
    done = jitfp4("cache", command, redirect=redirect)
    assert "Traceback" not in done.stderr
    assert done.returncode in (0, 1, 2)
    assert {item.verdict for item in Catalog(tmp_path / "cache").verify()} == {Verdict.OK}


def test_a_closed_output_does_not_stop_the_work(tmp_path: Path) -> None:
    Cache(Config(cache_dir=tmp_path / "cache")).get_or_build(make_recipe(), TOOLCHAIN, make_built)
    assert jitfp4("cache", "clear", "-y", redirect=">&-").returncode == 0
    assert Catalog(tmp_path / "cache").size().entries == 0


# ---- what entries say ------------------------------------------------------------------------------------------------


def evil_cache(root: Path) -> str:
    """An entry whose every text is hostile, sealed and valid; its digest."""
    recipe = Recipe(family=f"toy{EVIL}", arch="sm_90a", options=(EVIL,), source=f"// {EVIL}")
    built = replace(make_built(), provenance={EVIL: EVIL, "spec": {EVIL: EVIL}, "jitfp4": [EVIL]})
    Cache(Config(cache_dir=root)).get_or_build(recipe, TOOLCHAIN, lambda: built)
    return recipe.digest


@pytest.mark.parametrize("command", [["ls"], ["ls", "--json"], ["show"], ["show", "--json"], ["show", "--explain"]])
def test_no_entry_drives_the_terminal(tmp_path: Path, command: list[str]) -> None:
    digest = evil_cache(tmp_path / "cache")
    arguments = [*command, digest] if command[0] == "show" else command
    result = CliRunner().invoke(app, ["cache", *arguments])
    assert result.exit_code == 0, result.output
    if "--explain" in command:
        assert result.stdout.startswith(f"recipe {digest}")
    else:
        assert all(c.isprintable() or c == "\n" for c in result.stdout)


def test_what_cannot_be_read_is_named_without_escape_codes(tmp_path: Path) -> None:
    digest = evil_cache(tmp_path / "cache")
    (cubin,) = (tmp_path / "cache").rglob("kernel.cubin")
    cubin.write_bytes(b"")
    for arguments in (["verify"], ["show", digest], ["ls"], ["show", "\x1b[31m"], ["verify", "\x1b[31m"]):
        result = CliRunner().invoke(app, ["cache", *arguments])
        assert all(c.isprintable() or c == "\n" for c in result.stdout + result.stderr)


@pytest.mark.parametrize("option", ["--source", "--explain"])
def test_a_terminal_is_sent_no_escape_codes_and_a_file_every_byte(tmp_path: Path, option: str) -> None:
    digest = evil_cache(tmp_path / "cache")
    piped = CliRunner().invoke(app, ["cache", "show", digest, option]).stdout
    if option == "--source":
        assert piped.rstrip("\n") == f"// {EVIL}".rstrip("\n")
    on_terminal = in_terminal([sys.executable, "-m", "jitfp4", "cache", "show", digest, option])
    assert b"Traceback" not in on_terminal
    text = on_terminal.decode().replace("\r\n", "\n")
    assert "\\x1b" in text or option == "--explain"
    assert all(c.isprintable() or c in "\n\t" for c in text)


def in_terminal(command: list[str]) -> bytes:
    """What ``command`` writes to a terminal."""
    leader, follower = os.openpty()
    process = subprocess.Popen(command, stdout=follower, stderr=follower, stdin=subprocess.DEVNULL, cwd=ROOT)
    os.close(follower)
    data = b""
    try:
        while part := os.read(leader, 65536):
            data += part
    except OSError:  # the other end was closed
        pass
    process.wait(timeout=900)
    os.close(leader)
    return data


def test_every_character_that_is_not_printable_is_escaped() -> None:
    for code in range(0x3000):
        assert visible(chr(code)).isprintable()
    assert visible("\udc80é\n", keep="\n") == "\\udc80é\n"


# ---- Ctrl-C ----------------------------------------------------------------------------------------------------------


def test_what_a_test_interrupts_is_interrupted_where_sigint_is_ignored() -> None:
    """As in a job in the background of a shell: a process that is started there ignores it, too."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interruptible("print(flush=True); import time; time.sleep(60)", stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            process.send_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
    assert process.returncode == -signal.SIGINT


_SLOW = """
import sys, time
from jitfp4 import nvrtc
from pathlib import Path
compile_cubin = nvrtc.compile_cubin
def slowly(*arguments, **options):
    if len(list(Path({marks!r}).iterdir())) >= 3:
        time.sleep(900)
    cubin = compile_cubin(*arguments, **options)
    Path({marks!r}, str(time.monotonic_ns())).touch()
    return cubin
nvrtc.compile_cubin = slowly
from jitfp4.cli import app
app(["warmup", {plan!r}, "--jobs", "2", *{more!r}])
"""


def finished(folder: Path) -> list[Path]:
    return list((folder / "cache").glob("v1/*/*/*/entry.json"))


@pytest.mark.compile
@pytest.mark.one_in(2)
@pytest.mark.parametrize("signals", [1, 3])
@pytest.mark.parametrize("more", [[], ["--json"]])
def test_ctrl_c_stops_at_once_and_keeps_what_is_finished(tmp_path: Path, signals: int, more: list[str]) -> None:
    """Two compilations hang when it comes, and many wait: none of them is waited for."""
    marks = tmp_path / "marks"
    marks.mkdir()
    tasks = plan([Arch.of("sm_90a")], ["quantize/vector"])[:12]
    (tmp_path / "plan.json").write_text(write_plan(tasks))
    code = _SLOW.format(marks=str(marks), plan=str(tmp_path / "plan.json"), more=more)
    with interruptible(code, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            deadline = time.monotonic() + 300
            while process.poll() is None and len(finished(tmp_path)) < 3 and time.monotonic() < deadline:
                time.sleep(0.05)
            for _ in range(signals):
                process.send_signal(signal.SIGINT)
                time.sleep(0.05)
            out, errors = process.communicate(timeout=60)  # the compilations would hang for longer
        finally:
            process.kill()
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    verdicts = [item.verdict for item in Catalog(tmp_path / "cache").verify()]
    assert 3 <= len(verdicts) <= 4
    assert set(verdicts) == {Verdict.OK}
    if signals == 1:
        assert "not built; what is finished is kept" in errors
        if more:
            document = json.loads(out)
            assert document["interrupted"] is True
            assert document["built"] == len(document["kernels"])
            assert 2 <= document["built"] <= 4  # the last one may be on disk and not yet reported

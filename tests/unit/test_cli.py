"""The command line as a whole: help, errors, exit statuses, what it imports, and how options and output are written."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from jitfp4.arch import ARCHS
from jitfp4.cli import app, options, output
from jitfp4.cli.gpus import cuda_driver
from jitfp4.errors import ArgumentError

ROOT = Path(__file__).parents[2]


def commands() -> list[tuple[str, ...]]:
    top = typer.main.get_command(app)
    groups = {name: getattr(command, "commands", None) for name, command in top.commands.items()}
    return [
        (name, *below) for name, group in groups.items() for below in ([(sub,) for sub in group] if group else [()])
    ]


@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_every_command_has_help_with_an_example_and_speaks_json(command: tuple[str, ...]) -> None:
    result = CliRunner().invoke(app, [*command, "--help"])
    assert result.exit_code == 0
    assert "Examples:" in result.stdout
    assert f"jitfp4 {' '.join(command)}" in result.stdout
    assert "--json" in result.stdout


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("warmup --arch sm_8", ["sm_80", "sm_89"]),
        ("warmup --arch sm_90a,sm_8", ["sm_90a,sm_80", "sm_90a,sm_89"]),
        ("warmup --kernel quantize/t", ["quantize/tma"]),
        ("warmup --family gdn,mm_bf", ["gdn,mm_bf16_fp4"]),
        ("warmup --dtype f16,b", ["f16,bf16"]),
        ("render quantize/t", ["quantize/tma"]),
        ("tactics mm_bf", ["mm_bf16_fp4"]),
        ("tactics quantize --arch sm_9", ["sm_90a"]),
        ("sim kernel.ptx --arch sm_9", ["sm_90a"]),
        ("cache ls --sort u", ["used"]),
    ],
)
def test_a_shell_completes_values(line: str, wanted: list[str]) -> None:
    asked = {"COMP_WORDS": f"jitfp4 {line}", "COMP_CWORD": str(len(line.split()))}
    found = CliRunner().invoke(app, [], env={"_JITFP4_COMPLETE": "complete_bash"} | asked, prog_name="jitfp4")
    assert found.stdout.split() == wanted


def test_without_a_command_it_prints_help() -> None:
    result = CliRunner().invoke(app, [])
    assert result.exit_code == 2
    assert "warmup" in result.stdout + result.stderr


def test_an_error_of_the_package_is_one_line_and_status_2() -> None:
    result = CliRunner().invoke(app, ["warmup", "--arch", "sm_1"])
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr == f"jitfp4: --arch: got 'sm_1'; allowed: {', '.join(ARCHS)}, or all\n"


def test_an_error_of_the_file_system_is_one_line_and_status_2(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["warmup", str(tmp_path / "plan.json")])
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1
    assert "plan.json" in result.stderr


def test_a_bad_variable_is_status_2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JITFP4_CACHE", "sometimes")
    result = CliRunner().invoke(app, ["cache", "dir"])
    assert result.exit_code == 2
    assert result.stderr == "jitfp4: JITFP4_CACHE: got 'sometimes'; allowed: rw, ro, off\n"


@pytest.mark.parametrize("command", [["cache", "dir"], ["cache", "size"], ["cache", "ls"], ["cache", "verify"]])
def test_looking_at_the_cache_imports_neither_torch_nor_jinja_nor_cuda(command: list[str], tmp_path: Path) -> None:
    code = f"""
import sys
from jitfp4.cli import app
app({[*command, "--cache-dir", str(tmp_path)]!r}, standalone_mode=False)
sys.exit(", ".join(sys.modules.keys() & {{"torch", "numpy", "jinja2", "cuda.bindings"}}) or 0)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_python_m_is_the_same_program(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "jitfp4", "cache", "dir", "--json", "--cache-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    document = json.loads(done.stdout)
    assert document["schema_version"] == output.SCHEMA_VERSION
    assert document["path"] == str(tmp_path)


def test_no_driver_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr("ctypes.CDLL", missing)
    assert cuda_driver() is None


@pytest.mark.gpu
def test_the_driver_names_the_gpus_that_torch_sees() -> None:
    import torch

    driver = cuda_driver()
    assert driver is not None
    devices = range(torch.cuda.device_count())
    assert [gpu.capability for gpu in driver.gpus] == [torch.cuda.get_device_capability(i) for i in devices]
    assert [gpu.name for gpu in driver.gpus] == [torch.cuda.get_device_name(i) for i in devices]


# ---- options and output ----------------------------------------------------------------------------------------------


def test_archs_are_read() -> None:
    assert [arch.name for arch in options.read_archs("sm_90a, sm_80,sm_90a")] == ["sm_90a", "sm_80"]
    assert options.read_archs("all") == tuple(ARCHS.values())
    with pytest.raises(ArgumentError):
        options.read_archs(" , ")


@pytest.mark.parametrize(
    ("text", "count"), [("0", 0), ("17", 17), ("500M", 500 << 20), ("1.5GiB", 3 << 29), ("2 kb", 2048), ("1T", 1 << 40)]
)
def test_sizes_are_read(text: str, count: int) -> None:
    assert options.read_bytes("--max-size", text) == count


@pytest.mark.parametrize("text", ["", "M", "-1", "1 Q", "1e3", "inf"])
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(ArgumentError, match="--max-size"):
        options.read_bytes("--max-size", text)


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("1.5m", 90), ("12h", 43200), ("30d", 2592000), ("1w", 604800)]
)
def test_times_are_read(text: str, seconds: float) -> None:
    assert options.read_seconds("--max-age", text) == seconds


@pytest.mark.parametrize("text", ["", "5", "1y", "-1d"])
def test_other_times_are_refused(text: str) -> None:
    with pytest.raises(ArgumentError, match="--max-age"):
        options.read_seconds("--max-age", text)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1536 << 20, "1.5 GiB"), (1 << 50, "1024.0 TiB")],
)
def test_sizes_are_written(count: int, text: str) -> None:
    assert output.human_bytes(count) == text


def test_nouns_have_plurals() -> None:
    assert [output.plural(n, "kernel") for n in (0, 1, 2)] == ["0 kernels", "1 kernel", "2 kernels"]
    assert output.plural(3, "entry") == "3 entries"


def test_a_table_in_a_pipe_is_not_cut_off(capsys: pytest.CaptureFixture[str]) -> None:
    output.put_table(["name", "count"], [["x" * 300, 5], ["[red]", 12345]])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines] == [["name", "count"], ["x" * 300, "5"], ["[red]", "12345"]]
    assert lines[1].endswith("    5")


def test_a_table_on_a_narrow_terminal_has_whole_words(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"family/kernel_{number}[in_dtype=bf16]" for number in range(4)]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "40")
    output.put_table(["name", "kernels", "count"], [["operation_with_a_long_name", ", ".join(names), 5]])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5, "a name a line"
    assert all(name in line for name, line in zip(names, lines[1:], strict=True))

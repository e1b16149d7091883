"""Importing jitfp4 is cheap and has no effect: no GPU, no file, no variable, no heavy package."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import jitfp4

ROOT = Path(__file__).parents[2]

WATCH = """
import os, sys
events = []
class Recorder(dict):
    def __getitem__(self, name): events.append(f"read {name}"); return super().__getitem__(name)
    def get(self, name, default=None): events.append(f"read {name}"); return super().get(name, default)
os.environ = Recorder(os.environ)
before = set(sys.modules)
def hook(event, args):
    if event == "open" and isinstance(args[0], str) and not args[0].endswith((".py", ".pyc")):
        events.append(f"open {args[0]}")
    elif event in ("os.mkdir", "os.remove", "os.rename", "subprocess.Popen", "socket.connect", "ctypes.dlopen"):
        events.append(event)
sys.addaudithook(hook)
"""


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_touches_no_gpu_no_file_and_no_variable() -> None:
    assert run(f"{WATCH}\nimport jitfp4\nprint(*events, sep='\\n')").split() == []


def test_the_watch_sees_what_it_is_there_for(tmp_path: Path) -> None:
    code = f"""{WATCH}
import ctypes
os.environ.get("HOME"); os.getenv("PATH"); os.mkdir({str(tmp_path / "new")!r}); ctypes.CDLL(None)
open({str(tmp_path / "file")!r}, "w").close()
print(*events, sep="\\n")"""
    seen = run(code).splitlines()
    assert {"read HOME", "read PATH", "os.mkdir", "ctypes.dlopen", f"open {tmp_path / 'file'}"} <= set(seen)


def test_importing_loads_no_other_package() -> None:
    loaded = run(
        f"{WATCH}\nimport jitfp4\n"
        "new = {name.split('.')[0] for name in set(sys.modules) - before}\n"
        "print(*sorted(new - set(sys.stdlib_module_names)))"
    )
    assert loaded.split() == ["jitfp4"]


@pytest.mark.parametrize("name", jitfp4.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(jitfp4, name) is not None
    assert name in dir(jitfp4)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = jitfp4.no_such_name

"""Operators are registered with torch, whichever is imported first, and ``import torch`` is otherwise as it was."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
REGISTERED = "assert hasattr(torch.ops.jitfp4, 'quantize')"


def run(code: str, *folders: Path) -> str:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (*folders, ROOT)))}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder whose torch needs the name ``ready`` in builtins, and then is no torch that jitfp4 could use."""
    (tmp_path / "torch.py").write_text("import builtins\nloader = __loader__\nbuiltins.ready\n")
    return tmp_path


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "imports",
    [
        "import torch, jitfp4",
        "import jitfp4, torch",
        "import jitfp4; from torch import nn; import torch",
        "import jitfp4.families.quantize, torch",
        "from jitfp4 import sim; import torch",  # jitfp4's own modules import torch
        "import jitfp4, importlib; importlib.reload(jitfp4); import torch",
    ],
)
def test_either_order(imports: str) -> None:
    run(f"{imports}; {REGISTERED}")


def test_a_thread_that_imports_torch_too() -> None:
    run(
        "import jitfp4, threading\n"
        "def work():\n"
        "    global done\n"
        "    import torch\n"
        f"    {REGISTERED}\n"
        "    done = True\n"
        "thread = threading.Thread(target=work); thread.start()\n"
        f"import torch; {REGISTERED}\n"
        "thread.join(); assert done"
    )


def test_torch_keeps_its_loader_and_is_not_imported_by_a_look_up() -> None:
    run(
        "import importlib.util, sys, jitfp4\n"
        "spec = importlib.util.find_spec('torch')\n"
        "assert spec.loader.is_package('torch') and 'torch' not in sys.modules\n"
        "import torch\n"
        "loader = importlib.machinery.SourceFileLoader\n"
        "assert type(torch.__loader__) is type(torch.__spec__.loader) is loader"
    )


def test_without_torch() -> None:
    run(
        "import sys, jitfp4\n"
        "sys.path = [entry for entry in sys.path if 'site-packages' not in entry]\n"
        "sys.meta_path = sys.meta_path[:1] + [x for x in sys.meta_path[1:] if isinstance(x, type)]\n"
        "try: import torch\n"
        "except ModuleNotFoundError as error: assert error.name == 'torch'\n"
        "else: raise AssertionError"
    )


def test_a_torch_that_fails_fails_as_it_did_and_may_be_tried_again(folder: Path) -> None:
    seen = run(
        "import builtins, sys, jitfp4\n"
        "try: import torch\n"
        "except AttributeError as error: print(error)\n"
        "assert 'torch' not in sys.modules and 'jitfp4.families' not in sys.modules\n"
        "builtins.ready = True\n"
        "import torch\n"
        "print(type(torch.loader).__name__)\n"
        "try: jitfp4.nvfp4_quantize\n"
        "except Exception as error: print(type(error).__name__)",
        folder,
    )
    assert seen.splitlines() == ["module 'builtins' has no attribute 'ready'", "SourceFileLoader", "AttributeError"]

"""An integration whose engine is not installed says so, and jitfp4 imports no engine."""

from __future__ import annotations

import subprocess
import sys


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)


def test_vllm_that_is_missing_is_named() -> None:
    done = run("import sys; sys.modules['vllm'] = None; import jitfp4.integrations.vllm")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("ImportError: jitfp4.integrations.vllm needs vLLM, 0.26.0 or newer")


def test_the_package_imports_no_engine() -> None:
    done = run("import sys, jitfp4.integrations, jitfp4.integrations.kernels; print('vllm' in sys.modules)")
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr

"""An integration whose engine is not installed says so, and jitfp4 imports no engine."""

from __future__ import annotations

import subprocess
import sys

import pytest


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(("engine", "needs"), [("vllm", "vLLM, 0.26.0 or newer"), ("sglang", "SGLang")])
def test_an_engine_that_is_missing_is_named(engine: str, needs: str) -> None:
    done = run(f"import sys; sys.modules['{engine}'] = None; import jitfp4.integrations.{engine}")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(f"ImportError: jitfp4.integrations.{engine} needs {needs}")


def test_the_package_imports_no_engine() -> None:
    done = run(
        "import sys, jitfp4.integrations, jitfp4.integrations.kernels; print({'vllm', 'sglang'} & set(sys.modules))"
    )
    assert (done.returncode, done.stdout) == (0, "set()\n"), done.stderr

"""jitfp4 cache export, import, push, pull: what they print and their exit statuses."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from jitfp4 import engine, tactics
from jitfp4.arch import Arch
from jitfp4.cache import Catalog, Verdict
from jitfp4.cli import app, transfer
from jitfp4.tactics import TacticsFile
from jitfp4.warmup import plan, warm_up, write_plan

pytestmark = pytest.mark.compile

KERNELS = 2


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A plan whose kernels are in the cache, beside one more kernel."""
    monkeypatch.setenv("JITFP4_CACHE_DIR", str(tmp_path / "built"))
    engine.reset()
    tasks = plan([Arch.of("sm_90a")], ["quantize/vector"])[: KERNELS + 1]
    warm_up(tasks, jobs=2)
    (tmp_path / "plan.json").write_text(write_plan(tasks[:KERNELS]))
    return tmp_path


def run(*arguments: object) -> Result:
    """As a process of its own would: with the configuration that its options give."""
    assert transfer.app.registered_commands
    engine.reset()
    return CliRunner().invoke(app, ["cache", *map(str, arguments)])


def verdicts(root: Path) -> list[Verdict]:
    return [checked.verdict for checked in Catalog(root).verify()]


def test_export_and_import_a_plan(built: Path) -> None:
    exported = run("export", built / "plan.json", "--out", built / "bundle.tar.zst")
    assert exported.exit_code == 0, exported.stderr
    digest = exported.stdout.strip()
    own = hashlib.sha256((built / "bundle.tar.zst").read_bytes()).hexdigest()
    assert f"sha256sum of the file itself: {own}" in exported.stderr and own != digest
    assert run("import", built / "bundle.tar.zst", "--digest", own, "--cache-dir", built / "other").exit_code == 2
    imported = run("import", built / "bundle.tar.zst", "--digest", digest, "--cache-dir", built / "image", "--json")
    assert imported.exit_code == 0, imported.stderr
    document = json.loads(imported.stdout)
    assert (document["digest"], document["added"], document["present"]) == (digest, KERNELS, 0)
    assert verdicts(built / "image") == [Verdict.OK] * KERNELS


def test_export_without_a_plan_takes_all(built: Path) -> None:
    exported = run("export", "--out", built / "bundle", "--json")
    assert json.loads(exported.stdout)["kernels"] == KERNELS + 1


def test_a_plan_that_is_not_built_is_not_exported(built: Path) -> None:
    missing = run("export", built / "plan.json", "--out", built / "bundle", "--cache-dir", built / "empty")
    assert missing.exit_code == 1
    assert "jitfp4 warmup" in missing.stderr
    assert not (built / "bundle").exists()


def test_import_of_another_digest_fails(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run("export", "--out", built / "bundle")
    monkeypatch.setenv("JITFP4_BUNDLE_SHA256", "0" * 64)
    refused = run("import", built / "bundle", "--cache-dir", built / "image")
    assert refused.exit_code == 2
    assert "0" * 64 in refused.stderr
    assert not (built / "image").exists()


def test_push_and_pull(built: Path) -> None:
    url = f"file://{built}/remote"
    pushed = run("push", url, "--plan", built / "plan.json")
    assert pushed.exit_code == 0, pushed.stderr
    pulled = run("pull", url, "--cache-dir", built / "image")
    assert pulled.exit_code == 0, pulled.stderr
    assert pulled.stdout == pushed.stdout
    assert verdicts(built / "image") == [Verdict.OK] * KERNELS
    run("push", url, "--cache-dir", built / "built")
    ambiguous = run("pull", url, "--cache-dir", built / "image")
    assert ambiguous.exit_code == 2
    assert pushed.stdout.strip() in ambiguous.stderr
    assert run("pull", url, "--digest", pushed.stdout.strip(), "--cache-dir", built / "image").exit_code == 0


def test_a_tactics_file_is_carried_when_that_is_asked_for(built: Path) -> None:
    file = TacticsFile("NVIDIA H200", "sm_90a", "nvrtc-0", {})
    tactics.write(file, built / "tactics.json")
    run("export", "--out", built / "bundle", "--tactics", built / "tactics.json")
    done = run("import", built / "bundle", "--cache-dir", built / "image", "--tactics", built / "carried.json")
    assert done.exit_code == 0, done.stderr
    assert (built / "carried.json").read_bytes() == (built / "tactics.json").read_bytes() == file.encode()
    run("export", "--out", built / "bundle")
    without = run("import", built / "bundle", "--cache-dir", built / "image", "--tactics", built / "none.json")
    assert without.exit_code == 2 and "has no tactics file" in without.stderr
    (built / "tactics.json").write_bytes(b"{}")
    refused = run("export", "--out", built / "refused", "--tactics", built / "tactics.json")
    assert refused.exit_code == 2 and "no tactics file" in refused.stderr and not (built / "refused").exists()

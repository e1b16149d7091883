"""keys.py: what enters a recipe's digest, and that nothing else does."""

from __future__ import annotations

import dataclasses
import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jitfp4.keys import Recipe, frame

RECIPE = Recipe(family="toy", arch="sm_90a", options=("--std=c++17", "--fmad=false"), source="void f() {}\n")


def test_every_field_changes_the_digest() -> None:
    changed = {
        "family": "toy2",
        "arch": "sm_90",
        "options": ("--fmad=false", "--std=c++17"),
        "source": "void f() {} \n",
        "schema": RECIPE.schema + 1,
    }
    assert set(changed) == {field.name for field in dataclasses.fields(RECIPE) if field.init}
    digests = {dataclasses.replace(RECIPE, **{name: value}).digest for name, value in changed.items()}
    assert len(digests | {RECIPE.digest}) == len(changed) + 1


def test_bytes_cannot_move_between_parts() -> None:
    """All ways to cut one text into labelled parts hash differently: ["-I", "-O2"] is not ["-I-O2"]."""
    text = "-I-O2\0option"
    cuts = [
        [text[a:b] for a, b in itertools.pairwise((0, *inner, len(text)))]
        for count in range(4)
        for inner in itertools.combinations(range(1, len(text)), count)
    ]
    recipes = [Recipe(family="", arch="", options=tuple(cut), source="") for cut in cuts]
    recipes += [Recipe(family="", arch="", options=tuple(cut[:-1]), source=cut[-1]) for cut in cuts]
    recipes += [Recipe(family=cut[0], arch="".join(cut[1:2]), options=tuple(cut[2:]), source="") for cut in cuts]
    assert len({recipe.digest for recipe in recipes}) == len(set(recipes))


def test_frame_is_label_nul_length_payload() -> None:
    assert frame([("a", b"xyz"), ("bc", b"")]) == b"a\0\0\0\0\0\0\0\0\x03xyz" + b"bc\0" + bytes(8)


def test_explain_prints_every_part() -> None:
    text = RECIPE.explain()
    for part in (RECIPE.digest, "toy", "sm_90a", "--std=c++17", "--fmad=false", RECIPE.source):
        assert part in text


def test_json_round_trip() -> None:
    assert Recipe.from_json(RECIPE.to_json(), RECIPE.source) == RECIPE


@pytest.mark.parametrize("field", ["digest", "schema", "family", "arch", "options", "source_sha256"])
def test_edited_or_missing_json_is_refused(field) -> None:
    fields = RECIPE.to_json()
    edited = {**fields, field: 2 if field == "schema" else ["x"] if field == "options" else "x"}
    missing = {name: value for name, value in fields.items() if name != field}
    for broken in (edited, missing, {**fields, "extra": 1}, {**fields, "options": [1]}):
        with pytest.raises(ValueError, match="recipe"):
            Recipe.from_json(broken, RECIPE.source)
    with pytest.raises(ValueError, match="hash to"):
        Recipe.from_json(fields, RECIPE.source + " ")


def test_digest_does_not_hang_on_the_process(tmp_path: Path) -> None:
    """cwd, HOME, TZ, LANG, umask, PYTHONHASHSEED and the install path are no part of the key."""
    root = Path(__file__).parents[2]
    (tmp_path / "elsewhere").symlink_to(root)
    code = (
        "from jitfp4.keys import Recipe\n"
        f"print(Recipe(family='toy', arch='sm_90a', options={RECIPE.options!r}, source={RECIPE.source!r}).digest)"
    )
    variants = [
        {"PYTHONPATH": str(root), "HOME": "/nowhere", "TZ": "Asia/Tokyo", "LANG": "C", "PYTHONHASHSEED": "1"},
        {"PYTHONPATH": str(tmp_path / "elsewhere"), "LANG": "tr_TR.UTF-8", "PYTHONHASHSEED": "2"},
    ]
    for umask, env in enumerate(variants):
        out = subprocess.run(
            [sys.executable, "-c", f"import os; os.umask({umask * 0o77})\n{code}"],
            env={"PATH": os.environ["PATH"], **env},
            cwd=tmp_path if umask else root,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        assert out.strip() == RECIPE.digest

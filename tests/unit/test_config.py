"""config.py: every form of every variable gives a value or an error that names the variable."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from jitfp4 import config
from jitfp4.config import Config, read_config
from jitfp4.errors import ArgumentError

NAMES = sorted(set(re.findall(r"JITFP4_[A-Z0-9_]+", config.__doc__ or "")))
PATHS = ("JITFP4_CACHE_DIR", "JITFP4_CACHE_RO", "JITFP4_RECORD", "JITFP4_TACTICS")
HOME = {"HOME": "/home/me"}


@pytest.mark.parametrize("name", NAMES)
def test_an_empty_variable_is_one_that_is_not_set(name: str) -> None:
    assert len(NAMES) >= 12
    assert read_config({**HOME, name: ""}) == read_config(HOME)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "text", ["0", "-1", "0.4", "nan", "1e400", "~/x", "s3://b/x", "a\0b", " ", "\udc80", "x" * 5000]
)
def test_any_text_is_a_value_or_an_error_that_names_the_variable(name: str, text: str) -> None:
    try:
        assert isinstance(read_config({**HOME, name: text}), Config)
    except ArgumentError as error:
        assert error.name == name


@pytest.mark.parametrize("name", PATHS)
@pytest.mark.parametrize("text", ["~/x", "~", "s3://bucket/x", "file:///x", "/a:s3://b/x", "a\0b"])
def test_what_is_no_path_is_no_folder(name: str, text: str) -> None:
    with pytest.raises(ArgumentError, match=name):
        read_config({**HOME, name: text})


@pytest.mark.parametrize("name", ["JITFP4_CACHE_MAX_BYTES", "JITFP4_CACHE_MAX_ENTRIES"])
def test_a_limit_is_never_none_at_all(name: str) -> None:
    for text in ("0", "0.4", "-5", "nan", "inf"):
        with pytest.raises(ArgumentError, match=name):
            read_config({**HOME, name: text})
    assert getattr(read_config({**HOME, name: "1e6"}), name.removeprefix("JITFP4_").lower()) == 1_000_000


@pytest.mark.parametrize("name", PATHS)
def test_a_relative_path_in_a_folder_that_was_removed(name: str, tmp_path: Path) -> None:
    code = f"""
import os
from jitfp4.config import read_config
from jitfp4.errors import ArgumentError
os.mkdir("gone"); os.chdir("gone"); os.rmdir("../gone")
assert read_config({{{name!r}: "/x", "HOME": "/"}})
try:
    read_config({{{name!r}: "x", "HOME": "/"}})
except ArgumentError as error:
    print(error)
"""
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={"PYTHONPATH": root}, capture_output=True, text=True, check=True
    )
    assert done.stdout == f"{name}: got 'x'; allowed: an absolute path: the working directory was removed\n"

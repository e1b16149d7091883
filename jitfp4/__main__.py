"""``python -m jitfp4`` is the command ``jitfp4``."""

from __future__ import annotations

from jitfp4.cli import app

if __name__ == "__main__":
    app(prog_name="jitfp4")

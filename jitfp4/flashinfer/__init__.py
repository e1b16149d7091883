"""This package under FlashInfer's module names, so that an engine's call sites run as they are.

``import jitfp4.flashinfer as flashinfer`` gives FlashInfer's names of functions that jitfp4 has, in FlashInfer's
modules: ``flashinfer.norm.rmsnorm_fp4quant`` and so on. An engine that imports ``flashinfer`` by itself gets them after

    jitfp4.flashinfer.install()
    ...
    jitfp4.flashinfer.uninstall()

or inside ``with jitfp4.flashinfer.install(): ...``. Nothing is substituted before that call. A name that
jitfp4 lacks is an AttributeError that says so, which ``hasattr`` and ``from flashinfer.norm import ...`` understand.

An engine that needs the rest of FlashInfer too keeps it: ``jitfp4.flashinfer.overlay()`` puts jitfp4's functions into
the modules of the FlashInfer that is installed, and uninstall() takes them out.
"""

from __future__ import annotations

import sys
from typing import Any

import jitfp4
from jitfp4.flashinfer.expert_layers import forget_weights
from jitfp4.flashinfer.modules import ALL, HERE, MODULES, look_up, register
from jitfp4.flashinfer.substitution import Installed, Overlaid, install, overlay, uninstall

__all__ = ["MODULES", "Installed", "Overlaid", "forget_weights", "install", "overlay", "uninstall"]


def __getattr__(name: str) -> Any:
    return look_up(__name__, [public for public in ALL if public in HERE or public in jitfp4.__all__], name)


register(sys.modules[__name__])

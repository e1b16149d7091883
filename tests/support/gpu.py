"""What tests of one architecture need of the machine."""

from __future__ import annotations

import pytest
import torch


def needs_sm_90a() -> None:
    """Skip the test elsewhere."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs an sm_90a GPU")

"""Causal convolutions with states, in front of the gated delta rule."""

from jitfp4.families.conv.api import causal_conv1d_fn, causal_conv1d_update

__all__ = ["causal_conv1d_fn", "causal_conv1d_update"]

"""Whole decode steps in one launch."""

from jitfp4.families.step.api import DecodeStep

__all__ = ["DecodeStep"]

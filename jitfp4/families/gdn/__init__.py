"""The gated delta rule: recurrent linear-attention state, a few tokens at a time or whole prompts."""

from jitfp4.families.gdn.api import (
    gated_delta_rule_decode,
    gated_delta_rule_decode_pretranspose,
    gated_delta_rule_mtp,
)
from jitfp4.families.gdn.prefill import chunk_gated_delta_rule

__all__ = [
    "chunk_gated_delta_rule",
    "gated_delta_rule_decode",
    "gated_delta_rule_decode_pretranspose",
    "gated_delta_rule_mtp",
]

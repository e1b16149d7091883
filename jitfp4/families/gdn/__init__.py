"""The gated delta rule: recurrent linear-attention state, one or a few tokens at a time."""

from jitfp4.families.gdn.api import (
    gated_delta_rule_decode,
    gated_delta_rule_decode_pretranspose,
    gated_delta_rule_mtp,
)

__all__ = ["gated_delta_rule_decode", "gated_delta_rule_decode_pretranspose", "gated_delta_rule_mtp"]

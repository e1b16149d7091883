"""One module for each template, of the same name: tactics, spec, what is legal, geometry, parameters, bind.

``wide_fp4`` and ``blockscaled_k96`` take from ``wide`` and ``blockscaled`` what they share with them.
"""

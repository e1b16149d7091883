"""Inputs and comparisons that the tests and the benches share."""

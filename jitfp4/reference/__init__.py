"""Exact models of the kernels in plain torch, for tensors of any device. They are also the CPU implementation.

Every operation is a correctly rounded float32 operation in the order that the docstring states, so a kernel and its
reference agree in every byte.
"""

"""torch operators: one per public function, in the namespace ``jitfp4``, so that eager, torch.compile and graphs agree.

Every operator writes into tensors that its caller allocated and returns nothing. So its Meta implementation is empty,
and torch.compile sees ordinary allocations around a mutation that it knows how to functionalise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from jitfp4 import sim
from jitfp4.errors import ArgumentError

_library = torch.library.Library("jitfp4", "DEF")

Implementation = Callable[..., None]

_ALIGNMENT = 16  # bytes of the widest access that every kernel makes


def operator(schema: str, *, reference: Implementation, aligned: Sequence[str]) -> Callable[[Implementation], Any]:
    """Define ``jitfp4::<schema>`` and decorate its kernel launch, giving a function that calls it.

    Args:
        schema: in torch's schema language, every output a mutated argument, returning ``()``. Arguments bear the names
            of the public function, so that errors do.
        reference: what runs on CPU tensors, with the same arguments; inside ``sim.device(arch)`` the kernel runs
            instead.
        aligned: the arguments that must start at a multiple of 16 bytes. Addresses exist only in here: torch.compile
            does not see them.
    """

    def define(kernel: Implementation) -> Any:
        name = schema[: schema.index("(")]
        _library.define(f"{schema} -> ()")
        op = getattr(torch.ops.jitfp4, name).default
        positions = [(n, arg.name) for n, arg in enumerate(op._schema.arguments) if arg.name in aligned]

        def check(args: Sequence[Any]) -> None:
            for position, argument in positions:
                if args[position] is not None and (past := args[position].data_ptr() % _ALIGNMENT):
                    raise ArgumentError(argument, f"an address {past} bytes past a multiple of 16", "16-byte alignment")

        def on_cuda(*args: Any) -> None:
            check(args)
            kernel(*args)

        def on_cpu(*args: Any) -> None:
            check(args)
            (reference if sim.active_device() is None else kernel)(*args)

        def call(*args: Any) -> None:
            if _is_plain_cuda(args[0]):
                on_cuda(*args)
            else:
                op(*args)

        _library.impl(name, on_cuda, "CUDA")
        _library.impl(name, on_cpu, "CPU")
        _library.impl(name, _on_meta, "Meta")
        return call

    return define


def _is_plain_cuda(tensor: Any) -> bool:
    """Whether the dispatcher would go straight to the CUDA implementation: nobody traces, fakes or wraps.

    It costs 2 us of Python and C++ to ask it (bench/results/h200/launch.csv has both).
    """
    return (
        not torch.compiler.is_compiling()
        and type(tensor) is torch.Tensor
        and tensor.is_cuda
        and not torch._C._len_torch_dispatch_stack()
        and torch._C._functorch.peek_interpreter_stack() is None
    )


def _on_meta(*_: Any) -> None:
    """Shapes are the caller's: there is nothing to infer."""

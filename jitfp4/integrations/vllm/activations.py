"""NVFP4 activations that norms and SwiGLU make for vLLM's own products of FP4 by FP4, which Blackwell has.

vLLM has a contract for this: a linear layer whose kernel takes such rows says so, and is given a QuantizedActivation in
place of a tensor. A norm is not told who reads its rows, and no registry of vLLM spans a norm and a linear layer. So
modules are watched by torch's hook on their registration; when a norm is called first, the forward of its owner and
that of the module which gets the rows are traced by torch.fx, with modules as leaves, to see who reads them. What
torch.compile traces stays vLLM's, whose passes look for it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Graph, Node, Proxy, Tracer
from torch.nn.modules.module import register_module_module_registration_hook
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.fusion.quant_activation import QuantizedActivation
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.utils.quant_utils import kNvfp4Dynamic

from jitfp4.dtypes import HALVES
from jitfp4.families.norm import add_rmsnorm_fp4quant, rmsnorm_fp4quant
from jitfp4.families.norm.operation import RMSNORM
from jitfp4.families.norm.problem import Problem as NormProblem
from jitfp4.families.norm.problem import Scale
from jitfp4.families.quantize import silu_and_mul_nvfp4_quantize
from jitfp4.families.quantize.operation import QUANTIZE
from jitfp4.families.quantize.problem import Problem as QuantizeProblem
from jitfp4.formats import NVFP4
from jitfp4.integrations.kernels import load_growing
from jitfp4.integrations.vllm.norms import Fp4ModelRMSNorm
from jitfp4.integrations.vllm.options import activations_of
from jitfp4.integrations.vllm.swiglu import is_swiglu
from jitfp4.layouts import SfLayout, padded_shape

_registered: list[object] = []


class QuantizedRows:
    """The rows of a norm in NVFP4, where the one module that reads them is a linear layer which takes them.

    Args:
        owner: the module that calls the norm.
        name: the norm's in ``owner``.
        tokens: the most rows.
    """

    def __init__(self, owner: torch.nn.Module, name: str, tokens: int) -> None:
        self._place: tuple[weakref.ref[torch.nn.Module], str] | None = (weakref.ref(owner), name)
        self._tokens = tokens
        self._reader: LinearBase | None = None

    def of(self, norm: Any, x: torch.Tensor, residual: torch.Tensor | None) -> Any:
        """What the norm returns in place of a tensor, or of two; None where nobody takes such rows."""
        if self._place is not None:
            self._read(*self._place, norm.weight)
        if self._reader is None:
            return None
        weight, scale, epsilon = norm.weight.data, self._reader.input_global_scale_inv, norm.variance_epsilon
        options = {"global_scale": scale, "eps": epsilon, "is_sf_swizzled_layout": True}
        if residual is None:
            return _activation(*rmsnorm_fp4quant(x, weight, **options), x)
        codes, scales, *_ = add_rmsnorm_fp4quant(x, residual, weight, **options)
        return _activation(codes, scales, x), residual

    def _read(self, place: weakref.ref[torch.nn.Module], name: str, weight: torch.Tensor) -> None:
        """See who reads the rows, and load what makes them: in the first step, by which vLLM measures its memory."""
        owner = place()
        found = None if owner is None else reader_of(owner, name)
        self._place, self._reader = None, found if takes_nvfp4(found) else None
        if self._reader is not None:
            for add in (False, True):
                rows = NormProblem(HALVES[weight.dtype], NVFP4.block, Scale.E4M3, add, False, True, 1, weight.shape[0])
                load_growing(RMSNORM, rows, "m", self._tokens, weight)


class QuantizedSwiGlu(torch.nn.Module):
    """SiluAndMul whose result is NVFP4, where the linear layer behind it takes that.

    Args:
        own: vLLM's module.
        linear: the layer behind it.
        tokens: the most rows.
    """

    def __init__(self, own: SiluAndMul, linear: LinearBase, tokens: int) -> None:
        super().__init__()
        self.own, self.tokens, self.is_loaded = own, tokens, False
        self.linears = (linear,)  # not a module of this one

    def forward(self, x: torch.Tensor) -> Any:
        """``silu(gate) * up`` of [..., 2k]."""
        (linear,) = self.linears
        if torch.compiler.is_dynamo_compiling() or not takes_nvfp4(linear) or x.dtype not in HALVES:
            return self.own(x)
        rows = x.reshape(-1, x.shape[-1])
        if not self.is_loaded:
            k, layout = x.shape[-1] // 2, SfLayout.layout_128x4
            problem = QuantizeProblem(NVFP4, HALVES[x.dtype], layout, True, False, 1, k)
            load_growing(QUANTIZE, problem, "m", self.tokens, x)
            self.is_loaded = True
        codes, scales = silu_and_mul_nvfp4_quantize(rows, linear.input_global_scale_inv)
        return _activation(codes, scales, x[..., : x.shape[-1] // 2])


def register_activations() -> None:
    """Watch modules from now on; a second call changes nothing."""
    if not _registered:
        _registered.append(register_module_module_registration_hook(_seen))


def _seen(owner: torch.nn.Module, name: str, module: torch.nn.Module | None) -> Any:
    """Let a norm or SwiGLU that ``owner`` registers give NVFP4. Returns what is registered instead, or None."""
    if type(module) not in (Fp4ModelRMSNorm, SiluAndMul):
        return None
    config = get_current_vllm_config()
    if activations_of(config) != "fp4" or config.lora_config is not None:  # adapters read rows of 16 bits
        return None
    tokens = int(config.scheduler_config.max_num_batched_tokens)
    if isinstance(module, Fp4ModelRMSNorm):
        module.rows = QuantizedRows(owner, name, tokens) if module.is_plain else None
        return None
    linear: Any = getattr(owner, "down_proj", None)
    if _key_of(linear) != kNvfp4Dynamic or not is_swiglu(type(owner), name):
        return None
    return QuantizedSwiGlu(module, linear, tokens)


def takes_nvfp4(linear: Any) -> bool:
    """Whether a layer, whose weight is loaded, takes rows of NVFP4 as they are, with scales in the 128x4 layout."""
    if _key_of(linear) != kNvfp4Dynamic or getattr(linear, "requires_unquantized_input", False):
        return False
    return bool(2 * linear.weight.shape[1] == linear.input_size_per_partition)  # k is not padded


def reader_of(owner: torch.nn.Module, name: str) -> LinearBase | None:
    """The linear layer that alone reads the rows of the norm ``name``, with residuals and without; else None."""
    found = set()
    for without in ({}, {"residual": None}):
        graph = _traced(owner, without)
        norms = [] if graph is None else [node for node in graph.nodes if node.target == name]
        if len(norms) != 1:
            return None
        rows = norms[0] if len(norms[0].args) == 1 else _first_of(norms[0])
        found.add(_reader(owner, rows))
    return found.pop() if len(found) == 1 else None


def _reader(owner: torch.nn.Module, rows: Node | None) -> LinearBase | None:
    """The linear layer that alone reads a value of ``owner``'s graph: a module of it, or one of such a module's."""
    users = [] if rows is None else list(rows.users)
    if len(users) != 1 or users[0].op != "call_module":
        return None
    child = owner.get_submodule(str(users[0].target))
    if isinstance(child, LinearBase):
        return child if users[0].args == (rows,) else None
    graph = _traced(child, {})
    if graph is None:
        return None
    given = [node for node in graph.nodes if node.op == "placeholder"]
    by_name = {node.target: node for node in given}
    names = [name for name, value in users[0].kwargs.items() if value is rows]
    taken = [by_name[name] for name in names] + [
        node for node, value in zip(given, users[0].args, strict=False) if value is rows
    ]
    return _reader(child, taken[0]) if len(taken) == 1 else None


def _first_of(node: Node) -> Node | None:
    """The first of the values of a node, whose users take each by its number."""
    firsts = [user for user in node.users if user.args[1:] == (0,)]
    return firsts[0] if len(firsts) == 1 and len(node.users) == 2 else None


def _traced(module: torch.nn.Module, without: dict[str, None]) -> Graph | None:
    """The graph of a module's forward, its modules as leaves; None if the forward is not straight."""
    try:
        return _Leaves().trace(module, without)
    except Exception:  # it asks values for what only tensors can tell, or has no such argument
        return None


class _Value(Proxy):
    """What a forward computes."""

    def __len__(self) -> int:
        raise TypeError("a value has no length before it is computed")  # not torch.fx's error, which ends unpacking


class _Leaves(Tracer):
    """Traces one forward: all modules that it calls are leaves."""

    def is_leaf_module(self, m: torch.nn.Module, module_qualified_name: str) -> bool:
        del m, module_qualified_name
        return True

    def proxy(self, node: Node) -> Proxy:
        """A value of the forward."""
        return _Value(node, self)

    def iter(self, obj: Any) -> Iterator[Any]:
        """Of a shape, whose length nobody knows here: only who uses it counts."""
        return iter((obj[0],))


def _key_of(linear: Any) -> Any:
    """What a layer's kernel takes besides tensors of 16 bits; vLLM 0.33 hides it behind a function."""
    return getattr(linear, "_input_quant_key", getattr(linear, "input_quant_key", None))


def _activation(codes: torch.Tensor, scales: torch.Tensor, like: torch.Tensor) -> QuantizedActivation:
    """Codes [m, k/2] and scales in the 128x4 layout, of rows that are like ``like`` [..., k]."""
    k = like.shape[-1]
    rows = codes.view(torch.uint8).reshape(-1, k // 2)
    shape = padded_shape(SfLayout.layout_128x4, rows.shape[0], k // NVFP4.block)
    scales = scales.view(torch.float8_e4m3fn).view(shape)
    return QuantizedActivation(rows, scales, like.dtype, like.shape, kNvfp4Dynamic)

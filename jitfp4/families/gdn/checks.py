"""The arguments of a call of the gated delta rule, which are checked before anything is written."""

from __future__ import annotations

from collections.abc import Collection

import torch

from jitfp4.dispatch import differ
from jitfp4.dtypes import FLOATS, HALVES, INDEX_DTYPES
from jitfp4.errors import ArgumentError
from jitfp4.families.gdn.arguments import Arguments
from jitfp4.families.gdn.launches import BIAS_TYPES
from jitfp4.families.gdn.operation import GATED_DELTA_RULE
from jitfp4.families.gdn.problem import HEAD_DIMS, MAX_TOKENS, STATE_DTYPES, VALUE_DIMS
from jitfp4.tensors import check_device, check_dtype, check_same_device, output


class Call:
    """The checked tensors of one call; ``state_name`` is the name of the state in the public function."""

    def __init__(
        self,
        state_name: str,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        state: torch.Tensor,
        A_log: torch.Tensor,  # noqa: N803 - FlashInfer's name
        a: torch.Tensor,
        dt_bias: torch.Tensor,
        b: torch.Tensor,
        *,
        k_major: bool,
    ) -> None:
        check_dtype("q", q, HALVES)
        check_device("q", q)
        if q.dim() != 4 or not 1 <= q.shape[1] <= MAX_TOKENS[-1] or q.shape[2] == 0 or q.shape[3] not in HEAD_DIMS:
            raise ArgumentError("q", f"shape {tuple(q.shape)}", f"[B, T from 1 to {MAX_TOKENS[-1]}, H, 64 or 128]")
        if k_major and q.shape[1] != 1:
            raise ArgumentError("q", f"{q.shape[1]} tokens", "1 with a state of [K, V]")
        self.batch, self.tokens, heads, head_dim = q.shape
        check_dtype("v", v, (q.dtype,))
        check_dtype(state_name, state, (torch.float32,) if k_major else tuple(STATE_DTYPES))
        value_heads, value_dim = v.shape[2:] if v.dim() == 4 else (0, 0)
        value_dims = VALUE_DIMS[head_dim] if state.dtype == torch.float32 else (head_dim,)
        if value_heads == 0 or value_heads % heads or value_dim not in value_dims:
            wanted = f"[B, T, a multiple of {heads}, {' or '.join(map(str, value_dims))}]"
            raise ArgumentError("v", f"shape {tuple(v.shape)}", wanted)
        self.q, self.k, self.v, self.state, self.k_major = q, k, v, state, k_major
        self.gates = A_log, a, dt_bias, b
        self.state_name = state_name
        self.head_shape = value_heads, *((head_dim, value_dim) if k_major else (value_dim, head_dim))
        rows, gate_dtypes = (self.batch, self.tokens), (q.dtype, torch.float32)
        self._check("q", q, q.shape, (q.dtype,), dense=2)
        self._check("k", k, q.shape, (q.dtype,), dense=2)
        self._check("v", v, (*rows, value_heads, value_dim), (q.dtype,), dense=2)
        self._check("A_log", A_log, (value_heads,), (torch.float32,), dense=1)
        self._check("a", a, (*rows, value_heads), gate_dtypes, dense=1, aligned=False)
        self._check("dt_bias", dt_bias, (value_heads,), tuple(BIAS_TYPES), dense=1)
        self._check("b", b, (*rows, value_heads), gate_dtypes, dense=1, aligned=False)
        self._check(state_name, state, (*state.shape[:1], *self.head_shape), (state.dtype,), dense=2, written=True)

    def _check(
        self,
        name: str,
        tensor: torch.Tensor,
        shape: tuple[int, ...],
        dtypes: Collection[torch.dtype],
        *,
        dense: int,
        aligned: bool = True,
        written: bool = False,
    ) -> None:
        """Check that a tensor has ``shape``, and that its last ``dense`` dimensions are contiguous. Its other strides
        must be multiples of 16 bytes if ``aligned``, and must not overlap if ``written``."""
        check_dtype(name, tensor, dtypes)
        check_same_device(name, tensor, self.q)
        if differ(tensor.shape, shape):
            raise ArgumentError(name, f"shape {tuple(tensor.shape)}", f"{tuple(shape)}")
        if tensor.is_contiguous():
            return
        strides, extent = tensor.stride(), 1
        for size, stride in zip(shape[: -dense - 1 : -1], strides[: -dense - 1 : -1], strict=True):
            if size > 1 and stride != extent:
                raise ArgumentError(name, f"strides {strides}", f"the last {dense} dimensions contiguous")
            extent *= size
        step = 16 // tensor.element_size() if aligned else 1
        outer = [pair for pair in zip(strides[:-dense], shape[:-dense], strict=True) if pair[1] > 1]
        for place, (stride, _) in enumerate(outer):
            inner = [s * (n - 1) for at, (s, n) in enumerate(outer) if at != place and s <= stride] if written else []
            if stride % step or stride < (extent + sum(inner) if written else 0):
                allowed = f"outer strides that are multiples of {step}{' and do not overlap' if written else ''}"
                raise ArgumentError(name, f"strides {strides}", allowed)

    def one_state_each(self) -> None:
        if differ(self.state.shape[:1], (self.batch,)):
            raise ArgumentError(self.state_name, f"{self.state.shape[0]} states", f"{self.batch}, one for each request")

    def indices(self, name: str, indices: torch.Tensor, *shape: int) -> None:
        self._check(name, indices, shape, INDEX_DTYPES, dense=len(shape))

    def steps(self, name: str, steps: torch.Tensor) -> None:
        check_dtype(name, steps, (self.state.dtype,))
        if steps.dim() != 5 or steps.shape[0] < self.batch or steps.shape[1] < self.tokens:
            wanted = (f">= {self.batch}", f">= {self.tokens}", *self.head_shape)
            raise ArgumentError(name, f"shape {tuple(steps.shape)}", f"[{', '.join(map(str, wanted))}]")
        self._check(name, steps, (*steps.shape[:2], *self.head_shape), (self.state.dtype,), dense=2, written=True)

    def run(
        self,
        scale: float | None,
        out: torch.Tensor | None,
        indices: torch.Tensor | None = None,
        output_indices: torch.Tensor | None = None,
        steps: torch.Tensor | None = None,
        step_indices: torch.Tensor | None = None,
        *,
        update_state: bool = True,
        use_qk_l2norm: bool,
        enable_pdl: bool | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the operation. Returns the output and the state."""
        given, shape = out, tuple(self.v.shape)
        if given is not None and given.dtype in FLOATS and given.dtype != self.q.dtype:
            output("output", given, shape, tuple(FLOATS), like=self.q)
            out = None
        out = output("output", out, shape, (self.q.dtype,), like=self.q)
        A_log, a, dt_bias, b = self.gates  # noqa: N806
        GATED_DELTA_RULE(
            Arguments(
                q=self.q,
                k=self.k,
                v=self.v,
                state=self.state,
                A_log=A_log,
                a=a,
                dt_bias=dt_bias,
                b=b,
                scale=self.q.shape[-1] ** -0.5 if scale is None else float(scale),
                output=out,
                initial_state_indices=indices,
                output_state_indices=output_indices,
                intermediate_states_buffer=steps,
                ssm_state_indices=step_indices,
                update_state=update_state,
                use_qk_l2norm=use_qk_l2norm,
                k_major=self.k_major,
                enable_pdl=enable_pdl,
                names=f"state={self.state_name}",
            )
        )
        if given is not None and given is not out:
            out = given.copy_(out)
        return out, self.state

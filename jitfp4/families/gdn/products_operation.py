"""The operation before gdn/prefill: what each chunk of a prompt needs that does not depend on the state."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from jitfp4.arch import Arch
from jitfp4.dtypes import HALVES
from jitfp4.families.gdn.kernels.prefill_products import PREFILL_PRODUCTS, ProductsTactic
from jitfp4.families.gdn.prefill_arguments import PRODUCTS_BYTES, ProductsArguments, ProductsProblem, chunk_place
from jitfp4.families.gdn.problem import HEAD_DIMS
from jitfp4.operation import Operation
from jitfp4.reference import gdn_prefill as reference
from jitfp4.selection import Row, Table


def _problem(arguments: ProductsArguments) -> ProductsProblem:
    return ProductsProblem(
        dtype=HALVES[arguments.q.dtype],
        head_dim=arguments.q.shape[2],
        tokens=arguments.q.shape[0],
        sequences=arguments.cu_seqlens.shape[0] - 1,
        heads=arguments.heads,
    )


def _problems(_arch: Arch) -> Iterator[ProductsProblem]:
    for dtype, head_dim in product(HALVES.values(), HEAD_DIMS):
        yield ProductsProblem(dtype, head_dim, tokens=8192, sequences=1, heads=32)


def _reference(arguments: ProductsArguments) -> None:
    a = arguments
    rows = a.products.view(-1, a.heads, PRODUCTS_BYTES)
    gates = a.g, a.beta
    for n, (first, end) in enumerate(reference.sequences(a.cu_seqlens, a.q.shape[0])):
        place = chunk_place(first, n)
        for at, chunk in enumerate(reference.products(a.q, a.k, gates, first, end, a.scale, a.heads, a.use_qk_l2norm)):
            rows[place + at] = chunk


PREFILL_PRODUCTS_OPERATION = Operation(
    ProductsArguments,
    name="gated_delta_rule_products",
    kernels=(PREFILL_PRODUCTS,),
    problem=_problem,
    problems=_problems,
    tables=(Table((Row(ProductsTactic()),), measured=None),),
    reference=_reference,
    output="products",
    aligned=("q", "k", "products"),
    exclusive=("products",),
    growing=("tokens", "sequences"),
)

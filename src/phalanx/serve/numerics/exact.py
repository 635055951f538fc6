"""Exact numerics of a model on this machine: everything that they rely on is tried, and what fails is refused by its name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from phalanx.hardware.kernels.rows.product import row_kernel, row_kernel_is_to_compile
from phalanx.model.transformer import Transformer
from phalanx.run.spec import ModelSpec
from phalanx.serve.engine.errors import NotExactError
from phalanx.serve.numerics.attention import dependent_attention, kinds_of_attention
from phalanx.serve.numerics.facts import Facts, facts_folder
from phalanx.serve.numerics.head_products import (
    HeadShape,
    absorbing,
    head_facts,
    keeps_heads_divided,
    use_head_products,
)
from phalanx.serve.numerics.products import (
    RowProducts,
    Shape,
    keeps_divided,
    product_facts,
    shape_of,
    shapes_of,
    use_products,
    whole_shapes,
)
from phalanx.serve.numerics.trials import begin_part, expect_parts, tell_search
from phalanx.serve.numerics.widths import operations, width_facts


def _instead(dtype: torch.dtype) -> str:
    """The end of a refusal: what to do."""
    remedies = ["with --numerics fast"]
    if dtype != torch.float32:
        remedies.append("with --dtype float32")
    if torch.get_num_threads() > 1:
        remedies.append("with one thread (OMP_NUM_THREADS=1)")
    return f"so numerics cannot be exact: serve {', or '.join(remedies)}"


@dataclass(frozen=True)
class Exact:
    """How a model's rows get the bits that they have among many."""

    products: RowProducts
    heads: Mapping[HeadShape, Facts]
    """In which numbers rows go through the heads' products of absorbed latent attention."""
    rows: Facts
    """In which numbers rows go through a model besides its products."""

    def use(self, model: nn.Module) -> None:
        """Gives ``model`` the products whose rows are independent."""
        use_products(model, self.products)
        use_head_products(model, self.heads)


def exact_numerics(model: Transformer, spec: ModelSpec, sequence: int, shares: int = 1) -> Exact:
    """What the probes find for ``model``, or a part of one, which then computes with products whose rows are independent.

    Of ``shares`` that each layer is divided into, ``model`` is one; products are then tried for the bits of the whole. ``sequence`` is the length of the training sequences, 0 if it is not known. Raises NotExactError, which names what fails.
    """
    found: dict[Shape, Facts] = {}
    dtype = next(model.parameters()).dtype
    shapes = _shapes(model)
    wholes = whole_shapes(spec, dtype) if shares > 1 else []
    absorbed = {shape: name for name, _, shape in absorbing(model)}
    expect_parts(
        1
        + len(shapes)
        + len(wholes)
        + len(absorbed)
        + len(list(operations(spec, dtype, shares)))
        + len(kinds_of_attention(model, sequence))
    )
    begin_part("the kernels of few rows, which are compiled")
    if row_kernel_is_to_compile():
        tell_search(facts_folder())
        row_kernel()
    for shape, name in shapes.items():
        begin_part(f"{name}: {shape}")
        facts = product_facts(shape)
        if facts is None:
            raise NotExactError(
                f"{name}: on this machine, rows of a {shape} depend on how many there are, {_instead(dtype)}"
            )
        found[shape] = facts
    for name, shape in wholes:
        begin_part(f"{name}: {shape}, divided among {shares} processes")
        if not keeps_divided(shape, shares):
            raise NotExactError(
                f"{name}: on this machine, a {shape} has other bits when its outputs are divided among {shares} processes, so numerics cannot be "
                "exact: serve with fewer processes in --tensor, with --pipeline, or with --numerics fast"
            )
    heads = dict(_head_facts(absorbed, shares))
    rows = Facts(1, 1)
    for name, facts in width_facts(spec, dtype, shares):
        if facts is None:
            raise NotExactError(
                f"{name}: on this machine, rows in {dtype} depend on how many there are, {_instead(dtype)}"
            )
        rows = Facts(max(rows.fewest, facts.fewest), max(rows.multiple, facts.multiple))
    for problem in dependent_attention(model, sequence):
        raise NotExactError(
            f"{problem}: on this machine, queries depend on those beside them, {_instead(dtype)}"
        )
    exact = Exact(RowProducts(found), heads, rows)
    exact.use(model)
    return exact


def _shapes(model: Transformer) -> dict[Shape, str]:
    """The products of ``model``, each with the name of the first matrix that has it."""
    shapes: dict[Shape, str] = {}
    for name, shape in shapes_of(model):
        shapes.setdefault(shape, name)
    if model.norm is not None:
        shapes.setdefault(shape_of(model.projection()), "the output projection")
    return shapes


def _head_facts(absorbed: Mapping[HeadShape, str], shares: int) -> Iterator[tuple[HeadShape, Facts]]:
    """The facts that products of ``absorbed`` layers rely on, each shape beside the name of a layer, where layers are divided into ``shares``. Raises NotExactError."""
    for shape, name in absorbed.items():
        begin_part(f"{name}: {shape}")
        facts = head_facts(shape)
        if facts is None:
            raise NotExactError(
                f"{name}: on this machine, rows of {shape} depend on how many there are, {_instead(shape.dtype)}"
            )
        whole = replace(shape, heads=shape.heads * shares)
        if shares > 1 and not keeps_heads_divided(whole, shares):
            raise NotExactError(
                f"{name}: on this machine, {whole} have other bits when the heads are divided among {shares} processes, so numerics cannot be exact: "
                "serve with fewer processes in --tensor, with --pipeline, or with --numerics fast"
            )
        yield shape, facts

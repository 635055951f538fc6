"""Probes of the products of absorbed latent attention: each head's rows with its own part of the matrix (``phalanx.model.layers.attention.absorbed``).

One call multiplies all heads, and a library chooses its way by their number and by the number of rows: PyTorch's own loops for very small
ones, MKL's batched product for the others (``aten/src/ATen/native/LinearAlgebra.cpp``, ``bmm_out_or_baddbmm_``). So both are tried, with matrices that
lie in memory as a layer's parts of ``kv_up`` do.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from phalanx.model.layers.attention.absorbed import AbsorbedUp
from phalanx.model.layers.attention.mla import MlaAttention
from phalanx.run.spec import MlaSpec
from phalanx.serve.numerics.facts import Facts, recalled
from phalanx.serve.numerics.products import fewest_rows

MANY = 1024
"""Rows of a micro-batch, in the trainer."""


@dataclass(frozen=True)
class HeadShape:
    """The products of a layer's heads with queries and with results."""

    heads: int
    nope: int
    rank: int
    value: int
    dtype: torch.dtype

    @classmethod
    def of(cls, heads: int, mla: MlaSpec, dtype: torch.dtype) -> HeadShape:
        """Those of ``heads`` of a layer of latent attention."""
        return cls(heads, mla.nope_head_dim, mla.kv_rank, mla.value_head_dim, dtype)

    def __str__(self) -> str:
        return f"{self.dtype} products of {self.heads} heads, {self.nope} x {self.rank} and {self.rank} x {self.value}"


def head_facts(shape: HeadShape) -> Facts | None:
    """How few rows the heads' products may have on this machine, with this number of threads; ``None`` if no number keeps the bits."""
    return _facts_of(shape, torch.get_num_threads())


@functools.cache
def _facts_of(shape: HeadShape, threads: int) -> Facts | None:  # noqa: ARG001  facts hold for a number of threads
    return recalled(str(shape), lambda: _search(shape), lambda facts: _keeps(shape, facts))


@torch.no_grad()
def _search(shape: HeadShape) -> Facts | None:
    products = list(_products(shape, MANY))
    expected = [torch.bmm(rows, matrices) for rows, matrices in products]

    def kept(number: int, begin: int) -> bool:
        return all(
            torch.equal(torch.bmm(rows[:, begin : begin + number].contiguous(), matrices), whole[:, begin : begin + number])
            for (rows, matrices), whole in zip(products, expected, strict=True)
        )  # fmt: skip

    return fewest_rows(kept, MANY)


@torch.no_grad()
def _keeps(shape: HeadShape, facts: Facts) -> bool:
    """A cheap look at what another process found."""
    return all(
        torch.equal(
            torch.bmm(rows[:, : facts.fewest].contiguous(), matrices),
            torch.bmm(rows, matrices)[:, : facts.fewest],
        )
        for rows, matrices in _products(shape, 64)
    )


def keeps_heads_divided(shape: HeadShape, shares: int) -> bool:
    """Whether products of the heads of each of ``shares`` processes have the bits of those of all heads together."""
    return _divided_facts(shape, shares, torch.get_num_threads()) is not None


@functools.cache
def _divided_facts(shape: HeadShape, shares: int, threads: int) -> Facts | None:  # noqa: ARG001  as above

    @torch.no_grad()
    def equal(many: int) -> bool:
        wholes, parts = _products(shape, many), _products(shape, many, shares)
        products = [torch.bmm(rows, matrices) for rows, matrices in wholes]
        return all(
            torch.equal(torch.bmm(rows, matrices), products[n % 2].chunk(shares)[n // 2])
            for n, (rows, matrices) in enumerate(parts)
        )

    return recalled(
        f"{shape} of {shares}", lambda: Facts(1, 1) if equal(MANY) else None, lambda _: equal(256)
    )


def _products(shape: HeadShape, many: int, shares: int = 1) -> Iterator[tuple[Tensor, Tensor]]:
    """Rows ``(heads, many, i)`` and matrices ``(heads, i, o)`` of both products of each share, with numbers of many magnitudes."""
    generator = torch.Generator().manual_seed(0)

    def drawn(width: int) -> Tensor:
        # Alike in all heads, of which there are many: they take as much memory as the rows.
        scale = torch.randint(-3, 4, (many, width), generator=generator).float().exp2()
        numbers = torch.randn(shape.heads, many, width, generator=generator)
        return numbers.mul_(scale).to(shape.dtype)

    mla = MlaSpec(kv_rank=shape.rank, nope_head_dim=shape.nope, value_head_dim=shape.value)
    rows = drawn(shape.nope), drawn(shape.rank)
    weight = torch.randn(shape.heads * (shape.nope + shape.value), shape.rank, generator=generator)
    for number, part in enumerate(weight.to(shape.dtype).chunk(shares)):
        for one, matrices in zip(rows, AbsorbedUp(part.clone(), mla).matrices(), strict=True):
            yield one.chunk(shares)[number].contiguous(), matrices


class HeadProducts:
    """``torch.bmm`` of any number of rows of each head, each with the bits that it has among many."""

    def __init__(self, facts: Facts) -> None:
        self._facts = facts

    def __call__(self, rows: Tensor, matrices: Tensor) -> Tensor:
        """``(h, rows, i)`` times ``(h, i, o)``: ``(h, rows, o)``."""
        count = rows.shape[1]
        if added := self._facts.padding(count):
            rows = torch.cat((rows, rows[:, -1:].expand(-1, added, -1)), 1)
        return torch.bmm(rows, matrices)[:, :count]


def absorbing(model: nn.Module) -> Iterator[tuple[str, MlaAttention, HeadShape]]:
    """The layers of ``model`` whose latent attention is absorbed, with their names and products, but those of predictions ahead, whose guesses may have
    any bits."""
    for name, part in model.named_modules():
        if isinstance(part, MlaAttention) and part.absorbed and not name.startswith("mtp."):
            yield name, part, HeadShape.of(heads_of(part), part.mla, part.kv_up.weight.dtype)


def heads_of(part: MlaAttention) -> int:
    """The heads whose weights ``part`` has."""
    return len(part.kv_up.weight) // (part.mla.nope_head_dim + part.mla.value_head_dim)


def use_head_products(model: nn.Module, facts: Mapping[HeadShape, Facts]) -> None:
    """Gives the heads of all absorbed layers products whose rows are independent."""
    for _, part, shape in absorbing(model):
        part.head_product = HeadProducts(facts[shape])

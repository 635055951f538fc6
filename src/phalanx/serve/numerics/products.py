"""Probes of matrix products: in which numbers of rows a row's result has the bits that it has among many, on this machine.

Exact serving computes a token among other rows than the trainer did, so each product must give a row the bits that it has in a micro-batch.
No library promises that, and each keeps it in its own way: fp32 products of MKL from four rows on without AVX-512, from sixteen with; bf16 products
from one row on without AMX, and of some shapes never with it (704 inputs and 256 outputs, for one). So every shape of the model is multiplied
with random rows in many numbers before anything is served. What is found decides how few rows a product may have; a shape without any such
number is refused by its name.

Few fp32 rows are computed by a kernel of our own (``phalanx.hardware.kernels.rows.product``) where a block of the inner dimension is found with which it
has the bits of the library's many rows; bf16 rows, few or many, where its one order of additions has them. Fast numerics compute bf16 by it wherever PyTorch has no
library for them: it would read the matrix once for each row.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.hardware.kernels.compiler import NoHostKernelsError
from phalanx.hardware.kernels.rows.product import BF16_CHAINS, MOST_ROWS, most_rows, row_kernel
from phalanx.model.layers.attention.mla import MlaAttention
from phalanx.model.layers.experts.expert_groups import Groups
from phalanx.model.layers.experts.moe import Experts
from phalanx.model.layers.linear import Linear
from phalanx.model.transformer import Transformer
from phalanx.run.spec import ModelSpec
from phalanx.serve.numerics.facts import Facts, numbers_of_rows, recalled

_MANY = 1024
"""Rows of a micro-batch, in the trainer; kernels have long settled on their largest blocks then."""
_MORE = (100, 516, _MANY)
"""Numbers of rows above those of the kernel of fp32 in which that of bf16 is tried."""
_RULES = ((1, 1), (4, 4), (8, 4), (16, 4), (16, 16), (32, 32))
"""The fewest rows that a product may have, and of which number its rows are a multiple, in the order in which they are tried."""


@dataclass(frozen=True)
class Shape:
    """A kind of product."""

    outputs: int
    inputs: int
    dtype: torch.dtype
    bias: bool = False

    def __str__(self) -> str:
        added = " and a bias" if self.bias else ""
        return f"{self.dtype} product with {self.inputs} inputs and {self.outputs} outputs{added}"


def shape_of(matrix: Tensor, *, bias: bool = False) -> Shape:
    """That of products with a matrix ``(outputs, inputs)``."""
    outputs, inputs = matrix.shape
    return Shape(outputs, inputs, matrix.dtype, bias)


def product_facts(shape: Shape) -> Facts | None:
    """How few rows a product may have on this machine, with this number of threads; ``None`` if no number keeps the bits.

    Found once in a process, and kept in the user's cache folder for the next (``phalanx.serve.numerics.facts``). Memory: a matrix of the shape
    and two products of 1024 rows.
    """
    return _facts_of(shape, torch.get_num_threads())


@functools.cache
def _facts_of(shape: Shape, threads: int) -> Facts | None:  # noqa: ARG001  facts hold for a number of threads
    name = f"product {shape.outputs} {shape.inputs} {shape.dtype} {shape.bias}"
    return recalled(name, lambda: _search(shape), lambda facts: _keeps(shape, facts, many=64))


def keeps_divided(shape: Shape, shares: int) -> bool:
    """Whether the products of many rows with ``shares`` parts of a matrix's outputs have the bits of those with the whole."""
    return _divided_facts(shape, shares, torch.get_num_threads()) is not None


@functools.cache
def _divided_facts(shape: Shape, shares: int, threads: int) -> Facts | None:  # noqa: ARG001  as above

    @torch.no_grad()
    def equal(many: int) -> bool:
        rows, matrix, bias = _operands(shape, many)
        cuts = [shape.outputs * n // shares for n in range(shares + 1)]
        parts = [
            F.linear(rows, matrix[begin:end].contiguous(), None if bias is None else bias[begin:end])
            for begin, end in itertools.pairwise(cuts)
        ]
        return torch.equal(torch.cat(parts, 1), F.linear(rows, matrix, bias))

    name = f"product {shape.outputs} {shape.inputs} {shape.dtype} {shape.bias} of {shares}"
    return recalled(name, lambda: Facts(1, 1) if equal(_MANY) else None, lambda _: equal(256))


@torch.no_grad()
def _search(shape: Shape) -> Facts | None:
    rows, matrix, bias = _operands(shape, _MANY)
    expected = F.linear(rows, matrix, bias)

    def kept(number: int, begin: int) -> bool:
        part = rows[begin : begin + number].contiguous()
        return torch.equal(F.linear(part, matrix, bias), expected[begin : begin + number])

    found = fewest_rows(kept, _MANY)
    if found is None:
        return None
    return Facts(found.fewest, found.multiple, _block(rows, matrix, bias, expected))


def fewest_rows(kept: Callable[[int, int], bool], many: int, more: Collection[int] = ()) -> Facts | None:
    """The fewest rows that keep their bits; ``kept`` tells whether so many of ``many`` rows do, from the one with this number on. ``more`` are numbers of rows
    to try besides the usual ones."""
    for fewest, multiple in _RULES:
        numbers = numbers_of_rows(fewest, multiple, many)
        numbers += [number for number in more if fewest <= number < many and number % multiple == 0]
        if all(kept(number, begin) for number in numbers for begin in sorted({0, many - number})):
            return Facts(fewest, multiple)
    return None


@torch.no_grad()
def _keeps(shape: Shape, facts: Facts, many: int) -> bool:
    """Whether facts from the cache hold for a few rows: a cheap look at what another process found."""
    rows, matrix, bias = _operands(shape, many)
    expected = F.linear(rows, matrix, bias)
    few = F.linear(rows[: facts.fewest].contiguous(), matrix, bias)
    if not torch.equal(few, expected[: facts.fewest]):
        return False
    return not facts.block or _chain_holds(rows, matrix, bias, expected, facts.block, (1,))


def _operands(shape: Shape, rows: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Numbers of many magnitudes, so that another order of additions shows in the first bits that are lost. Every second row in bf16, which would hide these,
    has sums that cancel: roundings alone are left."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*size: int) -> Tensor:
        scale = torch.randint(-3, 4, size, generator=generator).float().exp2()
        return torch.randn(size, generator=generator).mul_(scale).to(shape.dtype)

    matrix = torch.randn(shape.outputs, shape.inputs, generator=generator, dtype=torch.float32).to(
        shape.dtype
    )
    x, bias = drawn(rows, shape.inputs), drawn(shape.outputs) if shape.bias else None
    if shape.dtype == torch.bfloat16:
        half = shape.inputs // 2
        first = torch.randperm(half, generator=generator)
        x[::2, half : 2 * half] = x[::2, first]
        matrix[:, half : 2 * half] = -matrix[:, first]
        if bias is not None:
            bias[::2] = 0
    return x, matrix, bias


def _block(rows: Tensor, matrix: Tensor, bias: Tensor | None, expected: Tensor) -> int:
    """The block of the inner dimension with which the kernel of few rows has the library's bits; 0 if there is none. That of bf16 is ``BF16_CHAINS``."""
    if row_kernel() is None:
        return 0
    if matrix.dtype == torch.bfloat16:
        numbers = (*range(1, MOST_ROWS + 1), *(number for number in _MORE if number <= len(rows)))
        return BF16_CHAINS if _chain_holds(rows, matrix, bias, expected, BF16_CHAINS, numbers) else 0
    if matrix.dtype != torch.float32:
        return 0
    inputs, some = int(matrix.shape[1]), slice(0, 40)
    few, part = matrix[some].contiguous(), None if bias is None else bias[some]
    candidates: dict[int, None] = dict.fromkeys(
        (inputs, inputs // 2, (inputs + 1) // 2, 192, 384, *range(16, 1025, 16))
    )
    for block in candidates:
        if block < 1 or not _chain_holds(rows[:1], few, part, expected[:1, some], block, (1,)):
            continue
        if _chain_holds(rows, matrix, bias, expected, block, range(1, MOST_ROWS + 1)):
            return block
    return 0


def _chain_holds(
    rows: Tensor,
    matrix: Tensor,
    bias: Tensor | None,
    expected: Tensor,
    block: int,
    numbers: Iterable[int],
) -> bool:
    kernel = row_kernel()
    if kernel is None or (matrix.dtype == torch.bfloat16 and block != BF16_CHAINS):
        return False
    try:
        return all(torch.equal(kernel(rows[:n], matrix, bias, block), expected[:n]) for n in numbers)
    except NoHostKernelsError:
        return False


class RowProducts:
    """``torch.nn.functional.linear`` for any number of rows, each with the bits that it has among many."""

    def __init__(
        self, facts: Mapping[Shape, Facts], by_format: Mapping[torch.dtype, Facts] | None = None
    ) -> None:
        """``by_format`` has facts of shapes that ``facts`` does not have."""
        self._facts, self._by_format = facts, by_format or {}

    def _of(self, shape: Shape) -> Facts | None:
        return self._facts.get(shape, self._by_format.get(shape.dtype))

    def __call__(self, x: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
        """``(..., inputs)`` times the transpose of ``(outputs, inputs)``, plus ``(outputs,)``: ``(..., outputs)``."""
        outputs, inputs = matrix.shape
        shape = Shape(outputs, inputs, matrix.dtype, bias is not None)
        if (facts := self._of(shape)) is None:
            raise KeyError(f"a {shape} was not tried")
        count = x.numel() // inputs
        few = facts.block and 0 < count <= most_rows(matrix.dtype) and not torch.is_grad_enabled()
        # A model may have been moved since it got these products.
        if few and x.device.type == "cpu" and (kernel := row_kernel()) is not None:
            return kernel(x.reshape(-1, inputs), matrix, bias, facts.block).view(*x.shape[:-1], outputs)
        added = facts.padding(count)
        if not added:
            return F.linear(x, matrix, bias)
        rows = x.reshape(-1, inputs)
        padded = torch.cat((rows, rows[-1:].expand(added, -1)))
        return F.linear(padded, matrix, bias)[:count].view(*x.shape[:-1], outputs)

    def block(self, linear: Linear) -> int:
        """The block with which the kernel of few rows has a layer's bits; 0 if none is known, or other products compute it."""
        shape = shape_of(linear.weight, bias=linear.bias is not None)
        facts = self._of(shape)
        return facts.block if linear.affine == self and facts is not None else 0

    def grouped(self, rows: Tensor, matrices: Tensor, groups: Groups) -> Tensor:
        """Each of ``rows`` ``(m, i)`` times the transpose of its expert's matrix of ``(experts, o, i)``: ``(m, o)``."""
        counts = groups.counts.sum(1).tolist()
        parts = [
            self(part, matrix)
            for part, matrix in zip(torch.split(rows, counts), matrices, strict=True)
            if len(part)
        ]
        return torch.cat(parts) if parts else rows.new_empty(0, matrices.shape[1])


def fast_products(model: nn.Module) -> RowProducts | None:
    """Products that need not have PyTorch's bits and are faster: those of bf16 on a CPU without instructions for it; ``None`` elsewhere."""
    kernel, some = row_kernel(), next(model.parameters())
    fit = kernel is not None and kernel.fuses and some.dtype == torch.bfloat16 and some.device.type == "cpu"
    library = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return (
        None
        if not fit or (library and torch.ops.mkldnn._is_mkldnn_bf16_supported())
        else _products_by_kernel()
    )


@functools.cache
def _products_by_kernel() -> RowProducts:
    # Layers that have them are told by their being the same.
    return RowProducts({}, {torch.bfloat16: Facts(1, 1, BF16_CHAINS), torch.float32: Facts(1, 1)})


def _parts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """All parts but the predictions ahead, whose guesses may have any bits, and the matrices of absorbed latent attention, which heads multiply with
    (``phalanx.serve.numerics.head_products``)."""
    by_head = {part.kv_up for part in model.modules() if isinstance(part, MlaAttention) and part.absorbed}
    return (
        (name, part)
        for name, part in model.named_modules()
        if not name.startswith("mtp.") and part not in by_head
    )


def shapes_of(model: nn.Module) -> Iterator[tuple[str, Shape]]:
    """Every product that ``RowProducts`` computes for a model, and a name of a matrix in it; those of the head and of routers are not among them."""
    for name, part in _parts(model):
        if isinstance(part, Linear):
            yield f"{name}.weight", shape_of(part.weight, bias=part.bias is not None)
        elif isinstance(part, Experts):
            for stack in (part.gate, part.up, part.down):
                if stack is not None:
                    yield f"{name}, an expert", shape_of(stack[0])


def whole_shapes(spec: ModelSpec, dtype: torch.dtype) -> list[tuple[str, Shape]]:
    """The products of a whole model, each shape once, but those of experts."""
    with torch.device("meta"):
        model = Transformer(spec).to(dtype)
    named = [(name, shape) for name, shape in shapes_of(model) if not name.endswith("an expert")]
    named.append(("the output projection", shape_of(model.projection())))
    return [(name, shape) for shape, name in {shape: name for name, shape in reversed(named)}.items()]


def use_products(model: nn.Module, products: RowProducts) -> None:
    """Gives all linear layers and experts of ``model`` the products whose rows are independent."""
    for _, part in _parts(model):
        if isinstance(part, Linear):
            part.affine = products
        elif isinstance(part, Experts):
            part.product = products.grouped


def use_fast_products(model: nn.Module) -> RowProducts | None:
    """Gives ``fast_products`` to the linear layers of ``model`` that have no other product yet."""
    products = fast_products(model)
    for _, part in _parts(model) if products is not None else ():
        if isinstance(part, Linear) and part.affine is None:
            part.affine = products
    return products

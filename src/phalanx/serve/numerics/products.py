"""Probes of matrix products: whether a row's result depends on how many rows are multiplied with it, on this machine.

Exact serving computes a token among other rows than the trainer did, so each product must give a row the same bits among 16 rows, among many,
and wherever it lies. Kernels mostly do, and no library promises it: bf16 products of an AMX processor pick another order of
additions for some shapes and numbers of rows (704 inputs and 256 outputs, for one). So every shape of the model is multiplied with random
rows in several numbers before anything is served, and a shape that fails is named.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.model.layers.independent_rows import LEAST, ROWS
from phalanx.serve.engine.errors import EngineError

_MANY = 1024
"""Rows of a micro-batch, in the trainer; kernels have long settled on their largest blocks then."""
_NUMBERS = (LEAST, LEAST + ROWS, 2 * LEAST, 52, 64, 100, 128, 256, 516)


def require_independent_rows(model: nn.Module) -> None:
    """Tries the products of all matrices of ``model``. Raises EngineError, which names the first whose rows are not independent."""
    tried: set[tuple[object, ...]] = set()
    for name, matrix in _matrices(model):
        kind = (tuple(matrix.shape), matrix.dtype)
        if kind in tried:
            continue
        tried.add(kind)
        rows = dependent_rows(matrix)
        if rows:
            outputs, inputs = matrix.shape
            raise EngineError(
                f"{name}: on this machine, rows of a {matrix.dtype} product with {inputs} inputs and {outputs} outputs depend on how many "
                f"there are ({rows} against {_MANY}), so numerics cannot be exact: serve with --numerics fast, or with --dtype float32"
            )


def dependent_rows(matrix: Tensor) -> int:
    """The first number of rows, 0 for none, in which products with ``matrix`` ``(outputs, inputs)`` differ from those of many rows."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(_MANY, matrix.shape[1], generator=generator).to(matrix.device, matrix.dtype)
    with torch.no_grad():
        expected = F.linear(rows, matrix)
        for number in _NUMBERS:
            for begin in (0, _MANY - number):
                part = rows[begin : begin + number].contiguous()
                if not torch.equal(F.linear(part, matrix), expected[begin : begin + number]):
                    return number
    return 0


def _matrices(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every matrix that rows are multiplied with, an expert's as well, and its name."""
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            yield name, parameter
        elif parameter.ndim == 3:
            yield f"{name}[0]", parameter[0]

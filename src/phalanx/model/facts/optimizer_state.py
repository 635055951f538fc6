"""State that each optimizer keeps of a parameter, and the cost of an update: one table, without torch.

The rules in ``phalanx.train.optimizers`` allocate the tensors that ``adamw_state`` and ``matrix_state`` list, and assign matrices by
``matrix_work``. ``phalanx show`` and the planner add up the same lists. A test builds the real optimizers and compares bytes.

AdamW keeps two moments for each element, in fp32, bf16 or as 8-bit codes with a scale for every ``INT8_BLOCK`` elements of a
row (vectors always in fp32). Optimizers of full matrices keep fp32 state for the matrices that they take (``takes_matrix``), and
leave the other parameters to AdamW in fp32.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, assert_never

from phalanx.run.kinds.operations import Parameter
from phalanx.run.kinds.whole_model import INT8_BLOCK
from phalanx.run.spec import OptimizerSpec

StateFormat = Literal["fp32", "bf16", "uint8"]

_FORMAT_BYTES = {"fp32": 4, "bf16": 2, "uint8": 1}
UPDATE_BYTES = 14
"""Bytes per parameter that an update moves in addition to its state: weight read and written, gradient read, compute copy written.

That is the traffic of a fused kernel, without the gradient's norm and temporaries.
"""


@dataclass(frozen=True)
class StateTensor:
    """One named tensor of an optimizer's state, such as ``exp_avg``."""

    name: str
    shape: tuple[int, ...]
    format: StateFormat = "fp32"

    @property
    def bytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * _FORMAT_BYTES[self.format]


def takes_matrix(spec: OptimizerSpec, parameter: Parameter) -> bool:
    """Return True if the optimizer treats the parameter as a matrix (or a stack of them), False if AdamW updates it.

    Rows of embedding and head belong to tokens, most of which a batch does not contain; rows of a router belong to experts. Muon,
    Shampoo and SOAP use directions of the full matrix, so they leave these to AdamW. Adafactor takes embedding and head too, because
    its purpose is to save memory.
    """
    if spec.name == "adamw":
        return False
    if parameter.kind == "embedding" or parameter.name == "head.weight":
        return spec.name == "adafactor"
    return parameter.kind in ("matrix", "output")


def state_tensors(spec: OptimizerSpec, parameter: Parameter) -> list[StateTensor]:
    """Return all state of one full parameter; that of a stack of matrices is stacked likewise."""
    if not takes_matrix(spec, parameter):
        return adamw_state(spec, parameter.shape)
    *stack, rows, columns = parameter.shape
    tensors = matrix_state(spec, rows, columns)
    return [StateTensor(tensor.name, (*stack, *tensor.shape), tensor.format) for tensor in tensors]


def state_bytes_by_name(spec: OptimizerSpec, parameters: Iterable[Parameter]) -> dict[str, int]:
    """Return the bytes of all state of the full ``parameters``, by name of the state tensor; scales count with their codes."""
    sizes: dict[str, int] = {}
    for parameter in parameters:
        for tensor in state_tensors(spec, parameter):
            name = tensor.name.removesuffix("_scale")
            sizes[name] = sizes.get(name, 0) + tensor.bytes
    return sizes


def adamw_state(spec: OptimizerSpec, shape: tuple[int, ...]) -> list[StateTensor]:
    """Return the tensors of both moments of AdamW for a parameter, or a rank's part of one, of ``shape``.

    They are in the format ``spec.state`` if the optimizer is AdamW, with scales for 8 bits. Of other optimizers, and
    of vectors, they are fp32.
    """
    tensors = []
    for moment in ("exp_avg", "exp_avg_sq"):
        if spec.name != "adamw" or spec.state == "fp32" or len(shape) == 1:
            tensors.append(StateTensor(moment, shape))
        elif spec.state == "bf16":
            tensors.append(StateTensor(moment, shape, "bf16"))
        else:
            tensors.append(StateTensor(moment, shape, "uint8"))
            tensors.append(StateTensor(f"{moment}_scale", (*shape[:-1], -(-shape[-1] // INT8_BLOCK))))
    return tensors


def matrix_state(spec: OptimizerSpec, rows: int, columns: int) -> list[StateTensor]:
    """Return the state tensors of Adafactor, Muon, Shampoo or SOAP for one matrix, all fp32. Adafactor has a mean of
    gradients only if ``beta1`` is not 0.

    Raises ``ValueError`` for AdamW, whose state is that of ``adamw_state``.
    """
    shape = (rows, columns)
    match spec.name:
        case "muon":
            return [StateTensor("momentum", shape)]
        case "adafactor":
            means = [StateTensor("row_mean_square", (rows,)), StateTensor("column_mean_square", (columns,))]
            return [*means, StateTensor("exp_avg", shape)] if spec.beta1 else means
        case "shampoo":
            squares, factor = "exp_avg_sq", "root"
        case "soap":
            squares, factor = "basis_exp_avg_sq", "basis"
        case "adamw":
            raise ValueError("AdamW takes no matrices: call adamw_state")
        case _:
            assert_never(spec.name)
    grid = BlockGrid(rows, columns, spec.block_size)
    return [
        StateTensor("exp_avg", shape),
        StateTensor(squares, shape),
        StateTensor("left", grid.left_shape),
        StateTensor("right", grid.right_shape),
        StateTensor(f"left_{factor}", grid.left_shape),
        StateTensor(f"right_{factor}", grid.right_shape),
    ]


@dataclass(frozen=True)
class BlockGrid:
    """A matrix of ``rows x columns`` in blocks of at most ``size x size``, for the preconditioners of Shampoo and SOAP."""

    rows: int
    columns: int
    size: int

    @property
    def counts(self) -> tuple[int, int]:
        """Number of block rows and block columns."""
        return -(-self.rows // self.size), -(-self.columns // self.size)

    @property
    def left_shape(self) -> tuple[int, ...]:
        """Shape of the tensor with all blocks' row statistics: ``(block rows, block columns, n, n)``."""
        height = -(-self.rows // self.counts[0])
        return (*self.counts, height, height)

    @property
    def right_shape(self) -> tuple[int, ...]:
        """Shape of the tensor with all blocks' column statistics: ``(block rows, block columns, n, n)``."""
        width = -(-self.columns // self.counts[1])
        return (*self.counts, width, width)


@dataclass(frozen=True)
class MatrixWork:
    """Owner's cost of one step with one full matrix, or with several together."""

    elements: int = 0
    state_bytes: int = 0
    product_flops: float = 0.0
    """FLOP of matrix products: Muon's in bf16 on a GPU, the others' in fp32."""
    decomposition_flops: float = 0.0
    """FLOP of eigenvalue decompositions (fp64) and QR decompositions (fp32), averaged over steps."""
    crossing_elements: int = 0
    """Elements of divided matrices: their gradients are sent to the owner, and their updates back."""

    @property
    def flops(self) -> float:
        """Cost by which matrices are assigned: all FLOP, plus one for each element that is only read and written."""
        return self.product_flops + self.decomposition_flops + self.elements

    @property
    def moved_bytes(self) -> int:
        """Bytes that an update in one kernel reads and writes."""
        return UPDATE_BYTES * self.elements + 2 * self.state_bytes

    def times(self, count: int) -> MatrixWork:
        """Return the work of ``count`` such matrices."""
        return MatrixWork(
            self.elements * count,
            self.state_bytes * count,
            self.product_flops * count,
            self.decomposition_flops * count,
            self.crossing_elements * count,
        )

    def __add__(self, other: MatrixWork) -> MatrixWork:
        """Return the work of both together, field by field."""
        return MatrixWork(
            self.elements + other.elements,
            self.state_bytes + other.state_bytes,
            self.product_flops + other.product_flops,
            self.decomposition_flops + other.decomposition_flops,
            self.crossing_elements + other.crossing_elements,
        )


def matrix_work(spec: OptimizerSpec, rows: int, columns: int) -> MatrixWork:
    """Return the elements, state bytes and FLOP of one step of Adafactor, Muon, Shampoo or SOAP with a matrix of
    ``rows x columns``.

    FLOP of decompositions are the mean over steps; Adafactor has none of either kind. Nothing crosses ranks.
    """
    products = decompositions = 0.0
    if spec.name == "muon":
        short, long = sorted((rows, columns))
        # An iteration multiplies x x^T (2 s^2 l), its square (2 s^3), and that with x (2 s^2 l).
        products = spec.newton_schulz_steps * (4.0 * short**2 * long + 2.0 * short**3)
    elif spec.name in ("shampoo", "soap"):
        grid = BlockGrid(rows, columns, spec.block_size)
        height, width = grid.left_shape[-1], grid.right_shape[-1]
        blocks = grid.counts[0] * grid.counts[1]
        # Both covariances, and one product with each of their roots. SOAP rotates gradient and mean into the basis, and back.
        sides = 2 if spec.name == "shampoo" else 4
        products = blocks * sides * 2.0 * height * width * (height + width)
        decompositions = blocks * 20.0 * (height**3 + width**3) / spec.precondition_every
    state = sum(tensor.bytes for tensor in matrix_state(spec, rows, columns))
    return MatrixWork(rows * columns, state, products, decompositions)

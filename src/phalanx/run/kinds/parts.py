"""Rows of the table of parts: a parameter's name, shape, kind, division over ranks and products per token.

The table is the one place where these are derived from a description without building anything, so that counting a 405 B model
takes no memory and no torch. Counts, FLOP, stages, what ranks hold, the tensor axis's division of the modules, collectives,
and the planner's products and holdings follow from it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

ParameterKind = Literal[
    "embedding", "matrix", "output", "filter", "router", "gate", "norm", "bias", "balance"
]

Section = Literal["embedding", "block", "end", "ahead"]
"""The section of the model: the embedding, a block, final norm and output projection, a prediction further ahead."""


HEAD_UNIT = "head"
"""The unit of an output projection: gathered when the pass comes to it, and then kept until its backward pass, which is the first."""


@dataclass(frozen=True)
class Parameter:
    """One row of the table of parts: a parameter, and what counting, holding and dividing it follow from.

    ``output`` is a matrix that writes into the residual stream; it starts out smaller. ``filter`` is a weight of more than two
    dimensions in a user's own model. ``gate`` is the row of weights that weighs the shared experts. ``balance`` is the bias by which a
    router's load is evened out: state of the model that no gradient changes.
    """

    name: str
    shape: tuple[int, ...]
    kind: ParameterKind
    stacked: bool = False
    """True for a stack of matrices ``(experts, rows, columns)`` or of biases ``(experts, rows)``, each of its own, rather than one."""
    tensor_dim: int | None = None
    """The dimension that the tensor axis divides (of a stack, the axis of experts' matrices); ``None`` if all ranks hold it alike."""
    most_parts: int = 0
    """The most parts that the tensor axis can divide it into; more ranks hold copies. 0 if there is no such bound."""
    products: int = 0
    """Number of times that the forward pass of a token multiplies with it."""
    per_token: int = 0
    """Number of a stack's matrices, or biases, that one token meets."""
    section: Section = "block"
    layer: int = 0
    """The layer, from 0, of a parameter of a block."""
    unit: str = ""
    """FSDP gathers the parameters of a unit together; those without one, at the ends of the model, with the whole pass."""

    @property
    def in_block(self) -> bool:
        """True if it is in the unit of a block, or of a block's experts."""
        return self.unit not in ("", HEAD_UNIT)

    @property
    def met(self) -> int:
        """Elements that one token meets: of a stack, those of the experts that it is sent to."""
        return self.numel // self.shape[0] * self.per_token if self.stacked else self.numel

    def parts_over(self, tensor: int) -> int:
        """Different parts that ``tensor`` ranks (of a stack, of experts' matrices) hold between them."""
        if self.tensor_dim is None:
            return 1
        return min(tensor, self.most_parts or tensor)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def linear(
    inputs: int,
    outputs: int,
    bias: bool = False,
    kind: Literal["matrix", "output"] = "matrix",
    tensor_dim: int | None = None,
    most_parts: int = 0,
) -> Iterator[Parameter]:
    """A linear layer's ``weight``, shape ``(outputs, inputs)``, and ``bias``."""
    yield Parameter(
        "weight", (outputs, inputs), kind, tensor_dim=tensor_dim, most_parts=most_parts, products=1
    )
    if bias:
        # Where ranks divide the inputs, their results are added up, and the bias is alike on all of them.
        divided = tensor_dim == 0
        yield Parameter(
            "bias",
            (outputs,),
            "bias",
            tensor_dim=0 if divided else None,
            most_parts=most_parts if divided else 0,
        )


def norm(width: int) -> Iterator[Parameter]:
    """An RMSNorm's ``weight``."""
    yield Parameter("weight", (width,), "norm")


def under(name: str, parts: Iterable[Parameter], *, section: Section = "block") -> Iterator[Parameter]:
    """``parts`` under the module ``name``."""
    for part in parts:
        yield dataclasses.replace(part, name=f"{name}.{part.name}", section=section)


def by_name(parts: Iterable[Parameter]) -> dict[str, Parameter]:
    """The rows of a table by their names."""
    return {part.name: part for part in parts}

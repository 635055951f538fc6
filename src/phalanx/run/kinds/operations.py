"""Operations of a layer, as data: products, norms, attention, what only moves memory, exchanges, and what backward needs.

A kind of layer is a list of operations whose sizes are given per row (token). The weights of products and norms are rows of the
table of parts, so that no matrix is written down twice. What an operation costs, and what it keeps for backward, depends on
the software that carries it out: the planner prices the list by a stack (``phalanx_plan.workload.architecture``).

Rows: ``tokens`` are those of a micro-batch after the context axis, which a group of tensor ranks works on together; ``local``
are a rank's piece of them between products (sequence parallelism, arXiv 2205.05198); ``routed`` are the copies of tokens
that the rank's experts receive.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

Rows = Literal["tokens", "local", "gathered", "routed", "undivided"]
"""``gathered`` is kept as ``tokens`` by stacks that keep the gathered inputs of products, and as ``local`` by others. ``undivided`` are
``tokens`` where no context ranks share a sequence, and else none."""
Axis = Literal["none", "tensor", "key_heads", "expert_tensor"]
"""``key_heads`` are the tensor ranks, but at most as many as there are key and value heads: more hold copies."""


@dataclass(frozen=True)
class MatrixProduct:
    """A matrix product (rows, inner) x (inner, columns) of rows with weights that have the same input, computed as one."""

    part: str
    """The part of a layer (``phalanx_plan.workload.candidates.PARTS``) whose results are kept or computed again together."""
    rows: Rows
    weights: tuple[Parameter, ...]
    kept: bool = False
    """True if backward needs the result as it is."""

    @property
    def columns(self) -> int:
        """Width of a result, over all ranks."""
        return sum(weight.shape[-2] for weight in self.weights)

    @property
    def key_columns(self) -> int:
        """Number of ``columns`` for key and value heads, which several ranks may hold in common."""
        return sum(weight.shape[-2] for weight in self.weights if weight.most_parts)

    @property
    def inner(self) -> int:
        """Width of an input, over all ranks."""
        return self.weights[0].shape[-1]

    @property
    def columns_over(self) -> Axis:
        """The axis whose ranks divide the columns."""
        return self._axis(divided_from_last=2)

    @property
    def inner_over(self) -> Axis:
        """The axis whose ranks divide the inputs."""
        return self._axis(divided_from_last=1)

    @property
    def experts(self) -> int:
        """Groups of a grouped product over all expert ranks; 0 for a plain one."""
        return self.weights[0].shape[0] if self.weights[0].stacked else 0

    @property
    def wide(self) -> bool:
        """True if it stays in the format of activations: routers, gates and the output projection."""
        weight = self.weights[0]
        return weight.kind in ("router", "gate") or weight.section in ("embedding", "end")

    def _axis(self, divided_from_last: int) -> Axis:
        """Return the axis that divides the weights' dimension ``divided_from_last``, counted from the last; "none" if none does."""
        weight = self.weights[0]
        if weight.tensor_dim is None or weight.tensor_dim != len(weight.shape) - divided_from_last:
            return "none"
        return "expert_tensor" if weight.stacked else "tensor"


@dataclass(frozen=True)
class Norm:
    """RMSNorm with ``weights``, each over its own width; backward needs the result, which a product takes."""

    part: str
    weights: tuple[Parameter, ...]
    kernels: int = 1

    @property
    def width(self) -> int:
        """Elements of a row."""
        return sum(weight.numel for weight in self.weights)


@dataclass(frozen=True)
class Rotation:
    """Rotary embedding of ``width`` elements of a row, among ``total_width`` elements of queries and keys, which tensor ranks divide."""

    width: int
    total_width: int
    norms: tuple[Parameter, ...] = ()
    """RMSNorm of each head before it is rotated."""


def square_keys(seq_len: int, window: int) -> float:
    """Return twice the mean number of keys that a causal token of ``seq_len`` sees; without a window (0), or with one
    of at least ``seq_len``, ``seq_len``.

    In a band ``window`` wide the area seen is ``seq_len window - window^2 / 2``: its first corner is a triangle.
    """
    return 2 * window - window**2 / seq_len if 0 < window < seq_len else seq_len


@dataclass(frozen=True)
class AttentionCore:
    """Causal attention over the whole sequence or a sliding window, its heads divided over tensor ranks."""

    heads: int
    query_width: int
    """Width of a head's query and key."""
    value_width: int
    """Width of a head's value."""
    part: str = "core"
    windows: tuple[int, ...] = ()
    """Tokens that a token sees, of each layer of the model, 0 if all before it; empty if no layer has a window."""
    capped: bool = False
    """True if scores have a soft cap, for which there is no fused kernel."""

    def keys(self, seq_len: int) -> float:
        """Keys of a token, over the whole square of scores, in the mean of the model's layers."""
        if not self.windows:
            return seq_len
        return sum(square_keys(seq_len, window) for window in self.windows) / len(self.windows)

    @property
    def widths(self) -> int:
        """Widths of a head's query and of its value together: what each score costs."""
        return self.query_width + self.value_width

    @property
    def latent(self) -> bool:
        """True if queries are wider than values, as in latent attention, for which there are kernels of their own."""
        return self.query_width > self.value_width


@dataclass(frozen=True)
class Activation:
    """Activation of a feed-forward layer, ``width`` results for each row; gated, it multiplies with as many values."""

    part: str
    rows: Rows
    width: int
    gated: bool
    over: Axis


@dataclass(frozen=True)
class Permutation:
    """Each token's ``copies`` rows into the order of experts ("dispatch"), or back, weighted and added up ("combine")."""

    part: Literal["dispatch", "combine"]
    width: int
    copies: int


@dataclass(frozen=True)
class AroundExperts:
    """Padding of experts' rows, clamps and biases, which some stacks carry out by kernels of their own."""

    experts: int
    outer: int
    """Width of an expert's input and result."""
    inner: int
    """Width of its activation."""


@dataclass(frozen=True)
class Dropout:
    """Dropout of results ``width`` wide where the stack has it: of both that a block adds to the residual stream, or of the embedding."""

    width: int
    results: int = 2


@dataclass(frozen=True)
class LossOfScores:
    """The loss of ``scores`` logits for each token, and its gradient."""

    scores: int
    capped: bool = False
    """True if logits have a soft cap."""


@dataclass(frozen=True)
class Pointwise:
    """An operation limited by memory bandwidth: elements read and written for each row, with any stack."""

    part: str
    rows: Rows
    forward: float
    backward: float
    over: Axis = "none"
    kernels: int = 1
    """Number of forward kernels. The number of backward kernels is twice this, unless ``backward_kernels`` is set."""
    backward_kernels: int = 0
    experts: int = 0
    """Experts of the model, where every expert on a rank launches so many kernels for itself."""


@dataclass(frozen=True)
class LayerExchange:
    """A collective on the way forward; backward does its mirror image.

    ``gather`` and ``scatter`` join and divide the sequence over tensor ranks; ``context`` fetches the others' keys and values;
    ``dispatch`` and ``combine`` carry tokens to their experts and back; ``expert_gather`` and ``expert_scatter`` join and
    divide routed tokens where experts' matrices are divided.
    """

    part: str
    kind: Literal["gather", "scatter", "context", "dispatch", "combine", "expert_gather", "expert_scatter"]
    width: int
    """Elements of a row."""
    over: Axis = "tensor"
    """The axis that divides the keys and values of ``context``."""


@dataclass(frozen=True)
class KeptTensor:
    """A tensor that waits for backward, unless the part that makes it is computed again."""

    part: str
    """ "input" is always kept."""
    rows: Rows
    width: float
    over: Axis = "none"
    operand: bool = False
    """True if it is an operand of a product, which may be kept in the format of products."""
    bytes: int = 0
    """Bytes of an element if they do not depend on the precision."""
    beside: bool = False
    """True if it is a second form of a tensor: there is none where products are computed in the format of activations."""


Operation = (
    MatrixProduct
    | Norm
    | Rotation
    | AttentionCore
    | Activation
    | Permutation
    | AroundExperts
    | Dropout
    | LossOfScores
    | Pointwise
    | LayerExchange
    | KeptTensor
)


# Rows of the table of parts: a parameter's name, shape, kind, division over ranks and products per token.
#
# The table is the one place where these are derived from a description without building anything, so that counting a 405 B model
# takes no memory and no torch. Counts, FLOP, stages, what ranks hold, the tensor axis's division of the modules, collectives,
# and the planner's products and holdings follow from it.


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
    """Dimension that the tensor axis divides (for a stack, the axis of experts' matrices); ``None`` if all ranks hold it."""
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
    """Yield a linear layer's ``weight``, shape ``(outputs, inputs)``, divided along ``tensor_dim``, and with ``bias``
    its ``bias``, divided only if the outputs are. ``tensor_dim`` and ``most_parts`` are those of ``Parameter``.
    """
    yield Parameter(
        "weight", (outputs, inputs), kind, tensor_dim=tensor_dim, most_parts=most_parts, products=1
    )
    if bias:
        # If ranks divide the inputs, their results are added, and all ranks hold the complete bias.
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

"""Lanes: fixed divisions of the model's width, so that the bits do not depend on the tensor degree.

``model.lanes = L`` cuts the heads of attention, the inner elements of feed-forward layers and the rows of the vocabulary into L
parts, and the sequence, for token-wise layers, into L pieces. Each part and each piece is computed separately, always with the same
shapes. Sums over them are added in a binary tree. A tensor rank has L / T consecutive lanes, and as many pieces: the leaves of a
subtree. So the weights have the same bits for every tensor degree T that divides L. (Slots do the same for the batch.)

| | computed per lane or piece | summed over all in tree order |
|---|---|---|
| attention, feed-forward, shared experts | the lane's heads or inner elements (``layers``) | result; gradient of their input |
| norms, routers, latents, biases of results | the piece's tokens (``shares``) | gradient of the weights (``shares``) |
| weights that lanes share: norms of heads, key heads | the lane's heads | gradient of the weights |
| embedding | the tokens with a row on this rank (below) | nothing: all others are zeros |
| scores and loss | the lane's rows of the vocabulary (``phalanx.train.step.loss``) | exponentials; gradient of their input |

With context tiles (``phalanx.parallel.context.apply``), a lane computes tile by tile, and each tile is cut into L pieces. The leaves of
a gradient are ordered by tile, then lane or piece. So for any tensor and context degree, each rank has the leaves of a subtree, or of
one in each of its tiles (``shares``).

Related work: tensor-invariant training by gathered operands (TransformerEngine's pull request 2977), and partial sums in a tree for
inference (arXiv 2511.17826). Neither both divides the work and keeps the bits in training.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.model.autograd import FunctionContext, apply_function
from phalanx.model.layers.attention.attention import Attention, CausalCore
from phalanx.model.layers.attention.mla import MlaAttention
from phalanx.model.layers.dense import FeedForward, Linear, RMSNorm
from phalanx.model.layers.moe import Experts, MoE, Router
from phalanx.model.transformer import Transformer
from phalanx.parallel.context.fixed_tiles import RankTiles, TiledCore, TiledHeads
from phalanx.parallel.tensor.lanes import layers
from phalanx.parallel.tensor.lanes.shares import (
    InPieces,
    LaneLeaves,
    RoutedInPieces,
    ScoresInPieces,
    SharedParameter,
    by_unit,
    replace_method,
    shared_parameters,
)
from phalanx.parallel.tensor.sequence_comm import SequenceComm
from phalanx.run.kinds.operations import Parameter

_LAYERS = (Attention, MlaAttention, FeedForward)
_Layer = Attention | MlaAttention | FeedForward


@dataclass(frozen=True)
class RankLanes:
    """The lanes of a rank."""

    lanes: int
    """Number of lanes of the full model."""
    tensor: int
    """Number of tensor ranks."""
    comm: SequenceComm | None
    """Collectives over these ranks, adding in tree order; ``None`` if there is one."""
    key_comm: SequenceComm | None
    """Collectives over the tensor ranks with the same key heads."""
    tiles: RankTiles | None = None
    """The context tiles of this rank; ``None`` if the run has none."""

    @property
    def local_lanes(self) -> int:
        """Number of lanes on this rank."""
        return self.lanes // self.tensor

    @property
    def local_tiles(self) -> int:
        """Number of context tiles on this rank; 1 if the run has none."""
        return 1 if self.tiles is None else len(self.tiles.tile_numbers)

    @property
    def pieces(self) -> int:
        """Number of pieces of the sequence on this rank: each tile is cut into as many as there are lanes on the rank."""
        return self.local_tiles * self.local_lanes

    def parts(self, parameter: Parameter) -> int:
        """Return the number of different parts of a parameter that this rank's lanes use."""
        return parameter.parts_over(self.lanes) // parameter.parts_over(self.tensor)

    def sharers(self, parameter: Parameter) -> int:
        """Return the number of lanes on this rank that use the same part of it."""
        return self.local_lanes // self.parts(parameter)

    def comm_of(self, parameter: Parameter) -> SequenceComm | None:
        """Return collectives over the ranks whose lanes use the same part; ``None`` if there are no others."""
        if parameter.parts_over(self.tensor) == 1:
            return self.comm
        return self.key_comm if parameter.parts_over(self.tensor) < self.tensor else None


def apply_lanes(
    module: Transformer, table: Mapping[str, Parameter], lanes: RankLanes, vocabulary_start: int
) -> None:
    """Make ``module`` compute in lanes. Its divided parameters are already this rank's parts.

    Args:
        module: On the meta device, not yet sharded.
        table: The model's parameters by name.
        lanes: This rank's lanes.
        vocabulary_start: The first row of the vocabulary on this rank.
    """
    # The output projection of each layer computes by lanes.
    for layer in list(module.modules()):
        if isinstance(layer, _LAYERS):
            setattr(layer, layer.OUTPUT, layers.LaneOutput(getattr(layer, layer.OUTPUT)))
    if module.embedding is not None:
        module.embedding = LanedEmbedding(module.embedding, vocabulary_start, lanes.comm)
    in_lanes = {
        name: _parameters_in_lanes(part, name)
        for name, part in module.named_modules()
        if isinstance(part, _LAYERS)
    }
    by_lane = set(itertools.chain(*in_lanes.values()))
    shared = _shared(module, table, lanes, by_lane)
    for name in in_lanes:
        _divide(cast(_Layer, module.get_submodule(name)), name, in_lanes[name], table, lanes, shared)
    for name, part in module.named_modules():
        own = [shared[path] for path in _own(part, name) if path in shared and path not in by_lane]
        if isinstance(part, Router):
            replace_method(part, "scores", ScoresInPieces(part, own, lanes.pieces))
        elif isinstance(part, MoE):
            replace_method(part, "routed", RoutedInPieces(part, lanes.pieces))
            if own:
                replace_method(part, "shared_weights", InPieces(part.shared_weights, own, lanes.pieces))
        elif isinstance(part, LanedEmbedding) and own:
            replace_method(part, "lookup", InPieces(part.lookup, own, lanes.local_tiles))
        elif isinstance(part, (RMSNorm, Linear)) and own and not isinstance(part, layers.LaneOutput):
            replace_method(part, "forward", InPieces(part.forward, own, lanes.pieces))


def _own(part: nn.Module, name: str) -> list[str]:
    """Return the names of the parameters that ``part`` owns directly."""
    return [path for path, _ in part.named_parameters(prefix=name, recurse=False)]


def _shared(
    module: Transformer, table: Mapping[str, Parameter], lanes: RankLanes, by_lane: Set[str]
) -> dict[str, SharedParameter]:
    """Return the parameters that several lanes, pieces or tiles use, by name. Their units make the shares from now on.

    ``by_lane`` are the parameters of layers in lanes, of which each lane uses a part, or all.
    """
    leaves: dict[str, LaneLeaves] = {}
    for owner_name, owner in module.named_modules():
        # The output projection has no forward call of its own; its shares are made in the loss.
        if isinstance(owner, Experts) or owner is module.head:
            continue
        for path in _own(owner, owner_name):
            row = table[path]
            sharers, comm = lanes.sharers(row), lanes.comm_of(row)
            in_pieces = row.parts_over(lanes.lanes) == 1 and path not in by_lane
            if in_pieces or lanes.tiles is not None or sharers > 1 or comm is not None:
                runs = 1 if in_pieces else lanes.local_tiles
                leaves[path] = LaneLeaves(lanes.local_tiles * sharers, comm, runs)
    report = None if lanes.tiles is None else lanes.tiles.share_of_total
    parameters: dict[str, SharedParameter] = {}
    for prefix, unit, names in by_unit(module, leaves):
        shared = shared_parameters(unit, {name: leaves[prefix + name] for name in names}, report)
        parameters |= {prefix + name: parameter for name, parameter in shared.items()}
    return parameters


def _parameters_in_lanes(layer: _Layer, name: str) -> list[str]:
    """Return the parameter names that lanes of a layer use: all except those of token-wise modules and the result's bias."""
    return [
        path
        for path, _ in layer.named_parameters(prefix=name)
        if path.removeprefix(f"{name}.").split(".")[0] not in layer.BY_TOKENS
        and path != f"{name}.{layer.OUTPUT}.bias"
    ]


def _divide(
    layer: _Layer,
    name: str,
    paths: Sequence[str],
    table: Mapping[str, Parameter],
    lanes: RankLanes,
    shared: Mapping[str, SharedParameter],
) -> None:
    """Replace a layer's ``forward`` by one that computes in lanes, which use its parameters ``paths``.

    Those in ``shared`` get their values from there. A bias of the result in ``shared`` is added in pieces. Other matrices without a
    bias, of which each of several local lanes has rows of its own, also get another product (``_rows``). ``name`` is the layer's, as in
    the paths.
    """
    parameters = []
    for path in paths:
        owner, _, attribute = path.removeprefix(f"{name}.").rpartition(".")
        row = table[path]
        parameters.append(
            layers.LaneParameter(
                layer.get_submodule(owner),
                attribute,
                row.tensor_dim or 0,
                lanes.parts(row),
                shared.get(path),
                lanes.local_tiles,
                _rows(layer.get_submodule(owner), lanes, row) if path not in shared else None,
            )
        )
    output = getattr(layer, layer.OUTPUT)
    bias = shared.get(f"{name}.{layer.OUTPUT}.bias")
    add_bias = None if bias is None else InPieces(output.add_bias, [bias], lanes.pieces)
    result = _lane_result(layer, lanes.tiles)
    replace_method(
        layer,
        "forward",
        layers.LanedLayer(layer.by_tokens, result, parameters, lanes.local_lanes, lanes.comm, add_bias),
    )


def _rows(owner: nn.Module, lanes: RankLanes, parameter: Parameter) -> layers.LaneRows | None:
    """Make the product of a matrix write the gradients of the lanes' rows side by side.

    Return ``None`` unless each local lane has rows of its own.
    """
    if not isinstance(owner, Linear) or isinstance(owner, layers.LaneOutput) or owner.bias is not None:
        return None
    if parameter.tensor_dim != 0 or lanes.parts(parameter) != lanes.local_lanes or lanes.local_lanes == 1:
        return None
    rows = owner.affine = layers.LaneRows()
    return rows


def _lane_result(layer: _Layer, tiles: RankTiles | None) -> layers.LaneResult:
    """Return the function that computes a layer's heads in lanes: on the full sequence without ``tiles``, else tile by tile."""
    if tiles is None:
        return layers.OnWholeSequence(layer.by_heads)
    if isinstance(layer, FeedForward):
        return layers.TileByTile(layer.by_heads)
    core = cast(CausalCore, layer.core)
    return TiledHeads(layer, TiledCore(tiles, core.score, core.window))


# The embedding in lanes: each tensor rank has some rows of the vocabulary.
#
# One rank has a token's row, and the others contribute zeros, so the sum is exact in any order. The gradient of a row is the sum over
# its tokens in the order of PyTorch's kernel. Tokens without a row on this rank do not take part, so the gradient does not depend on
# the number of rows.


class _RowsContext(FunctionContext, Protocol):
    count: int


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _RowsContext, weight: Tensor, row: Tensor) -> Tensor:
        """Look up ``row`` ``(b, s)`` in ``weight``; the number of rows marks a token that is on another rank: zeros."""
        ctx.count = len(weight)
        ctx.save_for_backward(row)
        absent = (row == len(weight)).unsqueeze(-1)  # (b, s, 1)
        # Adding 0.0 turns -0.0 into 0.0, as a sum with other ranks' zeros does.
        return F.embedding(row % len(weight), weight).masked_fill(absent, 0).add_(0.0)

    @staticmethod
    def backward(ctx: _RowsContext, *upstream: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of the rows; tokens of other ranks add nothing."""
        (row,) = ctx.saved_tensors
        # Row `count` collects tokens without a row on this rank; its gradient is dropped.
        padding = ctx.count
        gradient = torch.ops.aten.embedding_dense_backward(
            upstream[0].contiguous(), row, ctx.count + 1, padding, False
        )
        return gradient[: ctx.count], None


class LanedEmbedding(nn.Embedding):
    """An embedding of which this rank has the rows from ``start`` on."""

    def __init__(self, embedding: nn.Embedding, start: int, comm: SequenceComm | None) -> None:
        """Take over the parameter of ``embedding``, which is already this rank's part."""
        super().__init__(1, 1, device="meta")
        self.num_embeddings, self.embedding_dim = embedding.num_embeddings, embedding.embedding_dim
        self.weight, self.start, self.comm = embedding.weight, start, comm

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens ``(b, s)`` of the full vocabulary to ``(b, s / ranks, d)``."""
        vectors = self.lookup(tokens)  # (b, s, d)
        return vectors if self.comm is None else self.comm.sum_scatter(vectors)

    def lookup(self, tokens: Tensor) -> Tensor:
        """Return the vectors ``(b, s, d)`` of tokens ``(b, s)`` with a row on this rank, and zeros for the others."""
        count = self.weight.shape[0]
        row = tokens - self.start
        row = row.masked_fill((row < 0) | (row >= count), count)
        return apply_function(_Rows, self.weight, row)

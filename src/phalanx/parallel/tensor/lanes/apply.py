"""Lanes: the width of the model in pieces that the run fixes, so that no tensor degree changes a bit.

A lane is to the width of the model what a slot is to the batch. ``model.lanes = L`` cuts the heads of attention, the inner elements
of feed-forward layers and the rows of the vocabulary into L parts, and the sequence, for all that is computed token by token, into
L pieces. Each part and each piece is computed by itself, always with the same shapes, and what is summed over them is summed in
a binary tree. A tensor rank holds L / T consecutive lanes, and as many pieces: the leaves of a subtree. So the weights have
the same bits for every tensor degree T that divides L, one included.

| | a lane or a piece by itself | summed over all in tree order |
|---|---|---|
| attention, feed-forward, shared experts | the lane's heads or inner elements (``layers``) | result; gradient of what they read |
| norms, routers, latents, biases of results | the piece's tokens (``shares``) | gradient of the weights (``shares``) |
| weights that lanes share: norms of heads, key heads | the lane's heads | gradient of the weights |
| embedding | the tokens that have a row here (below) | nothing: all others are zeros |
| scores and loss | the lane's rows of the vocabulary (``phalanx.train.step.loss``) | exponentials; gradient of what they read |

Where the sequence is in context tiles too (``phalanx.parallel.context.apply``), a lane computes tile by tile, and a piece is a part of
a tile: each tile is cut into L pieces. The leaves of a gradient are ordered by tile, then lane or piece, so that whatever tensor and context
ranks there are, each has the leaves of a subtree, or of one in each of its tiles (``shares``).

Tensor-invariant training by gathered operands (TransformerEngine's pull request 2977) and partial sums in a tree for
inference (arXiv 2511.17826) are the neighbors of this; neither divides the work and keeps the bits in training.
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
from phalanx.model.layers.experts.moe import Experts, MoE
from phalanx.model.layers.experts.router import Router
from phalanx.model.transformer import Block, PredictionAhead, Transformer
from phalanx.parallel.context.fixed_tiles import TiledCore, TiledHeads
from phalanx.parallel.context.rank_tiles import RankTiles
from phalanx.parallel.tensor.lanes.layers import (
    LanedLayer,
    LaneOutput,
    LaneParameter,
    LaneResult,
    LaneRows,
    OnWholeSequence,
    TileByTile,
)
from phalanx.parallel.tensor.lanes.shares import (
    InPieces,
    Leaves,
    RoutedInPieces,
    ScoresInPieces,
    SharedParameter,
    Shares,
    replace_method,
)
from phalanx.parallel.tensor.sequence_comm import SequenceComm
from phalanx.run.kinds.operations import Parameter

_UNITS = (Transformer, PredictionAhead, Block)
_LAYERS = (Attention, MlaAttention, FeedForward)
_Layer = Attention | MlaAttention | FeedForward


@dataclass(frozen=True)
class RankLanes:
    """The lanes of a rank."""

    lanes: int
    """Number of lanes of the whole model."""
    tensor: int
    """Number of ranks that divide them."""
    comm: SequenceComm | None
    """Collectives over these ranks, adding in tree order; ``None`` if there is one."""
    key_comm: SequenceComm | None
    """Collectives over those of them that hold the same key heads."""
    tiles: RankTiles | None = None
    """The context tiles of this rank; ``None`` if the run has none."""

    @property
    def here(self) -> int:
        """Lanes on this rank."""
        return self.lanes // self.tensor

    @property
    def tiles_here(self) -> int:
        """Context tiles on this rank; 1 if the run has none."""
        return 1 if self.tiles is None else len(self.tiles.here)

    @property
    def pieces(self) -> int:
        """Pieces of the sequence on this rank: each tile is cut into as many as there are lanes."""
        return self.tiles_here * self.here

    def parts(self, parameter: Parameter) -> int:
        """Different parts that this rank's lanes have of a parameter."""
        return parameter.parts_over(self.lanes) // parameter.parts_over(self.tensor)

    def sharers(self, parameter: Parameter) -> int:
        """Lanes on this rank that have the same part of it."""
        return self.here // self.parts(parameter)

    def comm_of(self, parameter: Parameter) -> SequenceComm | None:
        """To the ranks whose lanes have the same part."""
        if parameter.parts_over(self.tensor) == 1:
            return self.comm
        return self.key_comm if parameter.parts_over(self.tensor) < self.tensor else None


def apply_lanes(
    module: Transformer, table: Mapping[str, Parameter], lanes: RankLanes, vocabulary_start: int
) -> None:
    """Has ``module``, whose divided parameters are this rank's parts already, compute in lanes.

    Args:
        module: On the meta device, not yet sharded.
        table: The model's parameters by name.
        lanes: This rank's.
        vocabulary_start: The first row of the vocabulary on this rank.
    """
    _replace_outputs(module)
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
            replace_method(part, "found", InPieces(part.found, own, lanes.tiles_here))
        elif isinstance(part, (RMSNorm, Linear)) and own and not isinstance(part, LaneOutput):
            replace_method(part, "forward", InPieces(part.forward, own, lanes.pieces))


def _own(part: nn.Module, name: str) -> list[str]:
    """The names of the parameters that ``part`` has itself."""
    return [path for path, _ in part.named_parameters(prefix=name, recurse=False)]


def _replace_outputs(module: nn.Module) -> None:
    for layer in list(module.modules()):
        if isinstance(layer, _LAYERS):
            setattr(layer, layer.OUTPUT, LaneOutput(getattr(layer, layer.OUTPUT)))


def _shared(
    module: Transformer, table: Mapping[str, Parameter], lanes: RankLanes, by_lane: Set[str]
) -> dict[str, SharedParameter]:
    """The parameters that several lanes, pieces or tiles use, by name; from now on their units make the shares.

    ``by_lane`` are those of layers in lanes, of which each lane uses a part, or all of it.
    """
    units = {name: part for name, part in module.named_modules() if isinstance(part, _UNITS)}
    leaves: dict[str, dict[str, Leaves]] = {}
    for owner_name, owner in module.named_modules():
        # The projection is no module's whose forward runs: its shares are made where the loss is.
        if isinstance(owner, Experts) or owner is module.head:
            continue
        for path in _own(owner, owner_name):
            row = table[path]
            sharers, comm = lanes.sharers(row), lanes.comm_of(row)
            in_pieces = row.parts_over(lanes.lanes) == 1 and path not in by_lane
            if in_pieces or lanes.tiles is not None or sharers > 1 or comm is not None:
                runs = 1 if in_pieces else lanes.tiles_here
                unit = max((unit for unit in units if not unit or path.startswith(f"{unit}.")), key=len)
                leaves.setdefault(unit, {})[path] = Leaves(lanes.tiles_here * sharers, comm, runs)
    found = {}
    for unit, parts in leaves.items():
        inside = {path: path.removeprefix(f"{unit}.") if unit else path for path in parts}
        report = None if lanes.tiles is None else lanes.tiles.share_of_total
        shares = Shares({inside[path]: part for path, part in parts.items()}, report)
        shares.install(units[unit])
        for path, name in inside.items():
            owner, _, attribute = path.rpartition(".")
            found[path] = SharedParameter(module.get_submodule(owner), attribute, shares, name)
    return found


def _parameters_in_lanes(layer: _Layer, name: str) -> list[str]:
    """The names of the parameters that lanes of a layer use: neither those that see tokens by themselves nor the result's bias."""
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
    """Makes a layer compute in lanes, which use its parameters ``paths``."""
    parameters = []
    for path in paths:
        owner, _, attribute = path.removeprefix(f"{name}.").rpartition(".")
        row = table[path]
        parameters.append(
            LaneParameter(
                layer.get_submodule(owner),
                attribute,
                row.tensor_dim or 0,
                lanes.parts(row),
                shared.get(path),
                lanes.tiles_here,
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
        LanedLayer(layer.by_tokens, result, parameters, lanes.here, lanes.comm, add_bias),
    )


def _rows(owner: nn.Module, lanes: RankLanes, parameter: Parameter) -> LaneRows | None:
    """Has the product of a matrix, of which each lane here has rows of its own, write them side by side; ``None`` for all else."""
    if not isinstance(owner, Linear) or isinstance(owner, LaneOutput) or owner.bias is not None:
        return None
    if parameter.tensor_dim != 0 or lanes.parts(parameter) != lanes.here or lanes.here == 1:
        return None
    rows = owner.affine = LaneRows()
    return rows


def _lane_result(layer: _Layer, tiles: RankTiles | None) -> LaneResult:
    if tiles is None:
        return OnWholeSequence(layer.by_heads)
    if isinstance(layer, FeedForward):
        return TileByTile(layer.by_heads)
    core = cast(CausalCore, layer.core)
    return TiledHeads(layer, TiledCore(tiles, core.score, core.window))


# The embedding in lanes: each tensor rank has some rows of the vocabulary.
#
# A token's vector comes from the one rank that has its row, and from the others zeros: their sum is exact in any order. The
# gradient of a row is the sum over its tokens in the order that PyTorch's kernel takes, and tokens without a row here have no
# part in it, so that it does not depend on how many rows there are.


class _RowsContext(FunctionContext, Protocol):
    count: int


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _RowsContext, weight: Tensor, row: Tensor) -> Tensor:
        ctx.count = len(weight)
        ctx.save_for_backward(row)
        absent = (row == len(weight)).unsqueeze(-1)
        # Zeros of one sign, as sums with other ranks' zeros have.
        return F.embedding(row % len(weight), weight).masked_fill(absent, 0).add_(0.0)

    @staticmethod
    def backward(ctx: _RowsContext, *upstream: Tensor) -> tuple[Tensor, None]:
        (row,) = ctx.saved_tensors
        # The row behind the last is that of tokens whose gradient nobody wants.
        padding = ctx.count
        gradient = torch.ops.aten.embedding_dense_backward(
            upstream[0].contiguous(), row, ctx.count + 1, padding, False
        )
        return gradient[: ctx.count], None


class LanedEmbedding(nn.Embedding):
    """An embedding of which this rank has the rows from ``start`` on."""

    def __init__(self, whole: nn.Embedding, start: int, comm: SequenceComm | None) -> None:
        """Takes over the parameter of ``whole``, cut already."""
        super().__init__(1, 1, device="meta")
        self.num_embeddings, self.embedding_dim = whole.num_embeddings, whole.embedding_dim
        self.weight, self.start, self.comm = whole.weight, start, comm

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens ``(b, s)`` of the whole vocabulary to ``(b, s / ranks, d)``."""
        found = self.found(tokens)
        return found if self.comm is None else self.comm.sum_scatter(found)

    def found(self, tokens: Tensor) -> Tensor:
        """The vectors ``(b, s, d)`` of tokens ``(b, s)`` that have a row here, and zeros for the others."""
        count = self.weight.shape[0]
        row = tokens - self.start
        row = row.masked_fill((row < 0) | (row >= count), count)
        return apply_function(_Rows, self.weight, row)

"""Lanes: the width of the model in pieces that the run fixes, so that no tensor degree changes a bit.

A lane is to the width of the model what a slot is to the batch. ``model.lanes = L`` cuts the heads of attention, the inner elements
of feed-forward layers and the rows of the vocabulary into L parts, and the sequence, for all that is computed token by token, into
L pieces. Each part and each piece is computed by itself, always with the same shapes, and what is summed over them is summed in
a binary tree. A tensor rank holds L / T consecutive lanes, and as many pieces: the leaves of a subtree. So the weights have
the same bits for every tensor degree T that divides L, one included.

| | a lane or a piece by itself | summed over all in tree order |
|---|---|---|
| attention, feed-forward, shared experts | the lane's heads or inner elements (``layers``) | result; gradient of what they read |
| norms, routers, latents, biases of results | the piece's tokens (``pieces``) | gradient of the weights (``shares``) |
| weights that lanes share: norms of heads, key heads | the lane's heads | gradient of the weights |
| embedding | the tokens that have a row here (``vocabulary``) | nothing: all others are zeros |
| scores and loss | the lane's rows of the vocabulary (``phalanx.train.step.loss``) | exponentials; gradient of what they read |

Tensor-invariant training by gathered operands (TransformerEngine's pull request 2977) and partial sums in a tree for
inference (arXiv 2511.17826) are the neighbors of this; neither divides the work and keeps the bits in training.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from phalanx.model.block import Block
from phalanx.model.layers.attention import Attention
from phalanx.model.layers.feed_forward import FeedForward
from phalanx.model.layers.linear import Linear
from phalanx.model.layers.mla import MlaAttention
from phalanx.model.layers.moe import Experts, MoE
from phalanx.model.layers.norm import RMSNorm
from phalanx.model.layers.router import Router
from phalanx.model.mtp import PredictionAhead
from phalanx.model.transformer import Transformer
from phalanx.parallel.tensor.lanes.layers import LanedLayer, LaneOutput, LaneParameter
from phalanx.parallel.tensor.lanes.mixture import RoutedInPieces, ScoresInPieces
from phalanx.parallel.tensor.lanes.pieces import InPieces, replace_method
from phalanx.parallel.tensor.lanes.shares import SharedParameter, Shares, total_over
from phalanx.parallel.tensor.lanes.vocabulary import LanedEmbedding
from phalanx.parallel.tensor.sequence_comm import SequenceComm
from phalanx.run.kinds.parts import Parameter

_UNITS = (Transformer, PredictionAhead, Block)
_LAYERS = (Attention, MlaAttention, FeedForward)


@dataclass(frozen=True)
class RankLanes:
    """The lanes of a rank."""

    lanes: int
    """Of the whole model."""
    tensor: int
    """Ranks that divide them."""
    comm: SequenceComm | None
    """To all of those, adding in tree order; ``None`` if there is one."""
    key_comm: SequenceComm | None
    """To those of them that hold the same key heads."""

    @property
    def here(self) -> int:
        """Lanes on this rank."""
        return self.lanes // self.tensor

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
    shared = _shared(module, table, lanes)
    in_lanes: set[nn.Module] = set()
    for name, part in module.named_modules():
        if isinstance(part, _LAYERS):
            in_lanes.update(_divide(part, name, table, lanes, shared))
    for name, part in module.named_modules():
        own = [shared[path] for path in _own(part, name) if path in shared]
        if part in in_lanes or isinstance(part, Experts):
            continue
        if isinstance(part, Router):
            replace_method(part, "scores", ScoresInPieces(part, own, lanes.here))
        elif isinstance(part, MoE):
            replace_method(part, "routed", RoutedInPieces(part, lanes.here))
            if own:
                replace_method(part, "shared_weights", InPieces(part.shared_weights, own, lanes.here))
        elif isinstance(part, (RMSNorm, Linear)) and own:
            replace_method(part, "forward", InPieces(part.forward, own, lanes.here))


def _own(part: nn.Module, name: str) -> list[str]:
    """The names of the parameters that ``part`` has itself."""
    return [path for path, _ in part.named_parameters(prefix=name, recurse=False)]


def _replace_outputs(module: nn.Module) -> None:
    for layer in list(module.modules()):
        if isinstance(layer, _LAYERS):
            setattr(layer, layer.OUTPUT, LaneOutput(getattr(layer, layer.OUTPUT)))


def _shared(
    module: nn.Module, table: Mapping[str, Parameter], lanes: RankLanes
) -> dict[str, SharedParameter]:
    """The parameters that several lanes or pieces use, by name; from now on their units make the shares."""
    units = {name: part for name, part in module.named_modules() if isinstance(part, _UNITS)}
    groups: dict[tuple[str, int, bool], list[str]] = {}
    for owner_name, owner in module.named_modules():
        if isinstance(owner, Experts):
            continue
        for path in _own(owner, owner_name):
            row = table[path]
            whole = row.parts_over(lanes.lanes) == 1
            if whole or lanes.sharers(row) > 1 or lanes.comm_of(row) is not None:
                unit = max((unit for unit in units if not unit or path.startswith(f"{unit}.")), key=len)
                groups.setdefault((unit, lanes.sharers(row), lanes.comm_of(row) is lanes.comm), []).append(
                    path
                )
    found = {}
    for (unit, count, everywhere), paths in groups.items():
        inside = [path.removeprefix(f"{unit}.") if unit else path for path in paths]
        comm = lanes.comm if everywhere else lanes.comm_of(table[paths[0]])
        shares = Shares(inside, count, None if comm is None else total_over(comm))
        shares.install(units[unit])
        for path, name in zip(paths, inside, strict=True):
            owner, _, attribute = path.rpartition(".")
            found[path] = SharedParameter(module.get_submodule(owner), attribute, shares, name)
    return found


def _divide(
    layer: Attention | MlaAttention | FeedForward,
    name: str,
    table: Mapping[str, Parameter],
    lanes: RankLanes,
    shared: Mapping[str, SharedParameter],
) -> set[nn.Module]:
    """Has a layer compute in lanes; returns those of its modules that see a lane's parameters."""
    inside: set[nn.Module] = set()
    parameters = []
    for path, _ in layer.named_parameters(prefix=name):
        owner_name, _, attribute = path.rpartition(".")
        owner = layer.get_submodule(owner_name.removeprefix(name).removeprefix("."))
        by_tokens = path.removeprefix(f"{name}.").split(".")[0] in layer.BY_TOKENS
        of_result = isinstance(owner, LaneOutput) and attribute == "bias"
        if by_tokens or of_result:
            continue
        inside.add(owner)
        row = table[path]
        parameters.append(
            LaneParameter(owner, attribute, row.tensor_dim or 0, lanes.parts(row), shared.get(path))
        )
    output = getattr(layer, layer.OUTPUT)
    bias = shared.get(f"{name}.{layer.OUTPUT}.bias")
    add_bias = None if bias is None else InPieces(output.add_bias, [bias], lanes.here)
    in_lanes = LanedLayer(layer.by_tokens, layer.by_heads, parameters, lanes.here, lanes.comm, add_bias)
    replace_method(layer, "forward", in_lanes)
    return inside

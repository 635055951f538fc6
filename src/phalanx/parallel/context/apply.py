"""The context axis: the ranks that share each sequence, with keys and values exchanged, or in context tiles that fix the bits.

Everything in a transformer but attention treats tokens one by one. So each context rank takes some tokens of every sequence
(``context_positions``) through the whole model, with their true positions, and only attention's ``core`` is exchanged for
one that fetches the other ranks' keys and values: passed round in a ring (``RingMethod``) or gathered (``GatherMethod``).
Losses and weight gradients of a rank are those of its tokens; the sum over the ranks is the sequence's.

With ``positions = context_positions(...)``, a rank is given ``tokens[:, positions]``, ``targets[:, positions]`` and
``positions``, but the documents of the *whole* sequence. Tensor ranks work on their own heads and each context group is
their own. Under activation recomputation the forward pass communicates again, in the same order on all ranks.

PyTorch has context parallelism of its own (``torch.distributed.tensor.experimental``). Keep this package until that has
document masks and a fixed order of summation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import cast

import torch
from torch import Tensor, nn

from phalanx.model.layers.attention.attention import CausalCore
from phalanx.model.layers.attention.rotary import rotation
from phalanx.model.layers.dense import FeedForward, RMSNorm
from phalanx.model.layers.experts.moe import Experts, MoE
from phalanx.model.transformer import Block, PredictionAhead, Rotation, Transformer
from phalanx.parallel.context.exchange import GatherMethod, RingMethod, context_positions
from phalanx.parallel.context.fixed_tiles import TiledAttention, TiledCore
from phalanx.parallel.context.rank_tiles import RankTiles, rank_tiles
from phalanx.parallel.context.tiles import DividedCore
from phalanx.parallel.mesh.comm_clock import CommClock
from phalanx.parallel.mesh.mesh import Mesh
from phalanx.parallel.tensor.lanes.shares import (
    InPieces,
    Leaves,
    RoutedInPieces,
    ScoresInPieces,
    SharedParameter,
    Shares,
    replace_method,
)
from phalanx.run.spec import ModelSpec, RunSpec

__all__ = ["apply_context", "context_positions"]


def apply_context(module: Transformer, mesh: Mesh, spec: RunSpec, clock: CommClock) -> None:
    """Lets all attention of ``module`` see the tokens of this rank's whole context group; alone, changes nothing.

    With ``model.context_tiles`` all layers compute tile by tile, alone too.
    """
    tiles = rank_tiles(spec, mesh, clock)
    if tiles is not None:
        module.rotation = rotation_of_sequence(module.seq_len)
        if not spec.model.lanes:  # which compute by tile already
            apply_tiles(module, tiles)
        return
    if spec.parallel.context == 1:
        return
    kind = RingMethod if spec.parallel.context_mode == "ring" else GatherMethod
    for block in module.modules():
        if not isinstance(block, Block):
            continue
        attention = block.attention
        core = cast(CausalCore, attention.core)
        attention.core = DividedCore(kind(mesh.context_group, clock, core.score, core.window))


# Context tiles: each module replaced by one that computes the sequence in pieces that the run fixes.
#
# A context tile is to the sequence what a slot is to the batch. ``model.context_tiles = t`` cuts each sequence into t tiles of equal
# length (``placement``), whatever the number of ranks that share it. Each tile is computed by itself, always with the same shapes,
# and what is summed over tiles is summed in a binary tree. A context rank holds t / c consecutive tiles: the leaves of a subtree.
# So the weights have the same bits for every context degree c that divides t, one included.
#
# | | a tile by itself | summed over all in tree order |
# |---|---|---|
# | embedding, norms, feed-forward layers, routers, projections of predictions ahead | its tokens | gradient of the weights |
# | attention (``attention``, ``core``) | its queries, with all keys before them | gradients of keys, values and weights |
# | routed experts | nothing: all of a slot's tokens come to an expert together, by tile | nothing |
# | scores and loss (``phalanx.train.step.loss``) | its tokens, in chunks | loss, gradient of the projection |
#
# The tables of rotary positions are those of the whole sequence, of which each rank takes its rows.
#
# With lanes too, ``phalanx.parallel.tensor.lanes.apply`` puts the tiles into its own replacements: a lane computes its heads or inner
# elements tile by tile, and what is computed token by token goes by the lanes' pieces of each tile.
#
# Each rank reports some elements of the weights' summed gradient, and zeros for the others (``ranks``). So the sums over
# micro-batches and slots that follow add the same numbers in the same order as those of a single rank, and a sum is rounded to the
# format of compute once, when it is whole.


def apply_tiles(module: Transformer, tiles: RankTiles) -> None:
    """Makes ``module``, on the meta device and not yet sharded, compute tile by tile, if it does not compute in lanes already."""
    count = len(tiles.here)
    # The projection is no module's whose forward runs: its shares are made where the loss is.
    ends = {"embedding": module.embedding, "norm": module.norm}
    outer = _shared(module, (f"{name}.weight" for name, part in ends.items() if part is not None), tiles)
    for name, part in ends.items():
        if part is not None:
            replace_method(part, "forward", InPieces(part.forward, _inside(outer, name), count))
    for block in module.blocks.values():
        _divide(cast(Block, block), tiles)
    for prediction in module.mtp:
        _divide_prediction(cast(PredictionAhead, prediction), tiles)


def _divide_prediction(prediction: PredictionAhead, tiles: RankTiles) -> None:
    """Makes a prediction ahead compute tile by tile."""
    names = (name for name, _ in prediction.named_parameters() if not name.startswith("block."))
    shared = _shared(prediction, names, tiles)
    for name, part in prediction.named_children():
        if not isinstance(part, Block):
            replace_method(part, "forward", InPieces(part.forward, _inside(shared, name), len(tiles.here)))
    _divide(prediction.block, tiles)


def _divide(block: Block, tiles: RankTiles) -> None:
    """Makes a block compute tile by tile."""
    stacked = {name for name, part in block.named_modules() if isinstance(part, Experts)}
    names = (name for name, _ in block.named_parameters() if name.rpartition(".")[0] not in stacked)
    shared, count, attention = _shared(block, names, tiles), len(tiles.here), block.attention
    core = cast(CausalCore, attention.core)
    tiled_core = TiledCore(tiles, core.score, core.window)
    replace_method(attention, "forward", TiledAttention(attention, _inside(shared, "attention"), tiled_core))
    for name, part in block.named_children():
        if isinstance(part, (RMSNorm, FeedForward)):
            replace_method(part, "forward", InPieces(part.forward, _inside(shared, name), count))
    if isinstance(block.ffn, MoE):
        _divide_mixture(block.ffn, shared, count)


def _divide_mixture(moe: MoE, shared: Mapping[str, SharedParameter], count: int) -> None:
    router = _inside(shared, "ffn.router")
    replace_method(moe.router, "scores", ScoresInPieces(moe.router, router, count))
    replace_method(moe, "routed", RoutedInPieces(moe, count))
    if moe.shared is not None:
        experts = _inside(shared, "ffn.shared")
        replace_method(moe.shared, "forward", InPieces(moe.shared.forward, experts, count))
    if moe.shared_gate is not None:
        gate = [shared["ffn.shared_gate"]]
        replace_method(moe, "shared_weights", InPieces(moe.shared_weights, gate, count))


def _shared(unit: nn.Module, names: Iterable[str], tiles: RankTiles) -> dict[str, SharedParameter]:
    """Gives each tile a share of the parameters ``names`` of ``unit``, a group that FSDP gathers at once; returns them by name."""
    found = list(names)
    if not found:
        return {}
    shares = Shares({name: Leaves(len(tiles.here)) for name in found}, tiles.share_of_total)
    shares.install(unit)
    parameters = {}
    for name in found:
        owner, _, attribute = name.rpartition(".")
        parameters[name] = SharedParameter(unit.get_submodule(owner), attribute, shares, name)
    return parameters


def _inside(shared: Mapping[str, SharedParameter], path: str) -> list[SharedParameter]:
    """The shared parameters of the module ``path`` and of the modules inside it."""
    return [parameter for name, parameter in shared.items() if name.startswith(f"{path}.")]


def rotation_of_sequence(seq_len: int) -> Rotation:
    """Rotary tables that are computed for the whole sequence, so that a kernel's arguments do not depend on the context degree.

    Not kept from call to call: 8,192 positions of 128 elements take a CPU core 11 ms, and the tables of long sequences are large.
    """

    def rows(
        spec: ModelSpec, positions: Tensor, *, windowed: bool = False, length: int = 0
    ) -> tuple[Tensor, Tensor]:
        every = torch.arange(seq_len, device=positions.device)
        cos, sin = rotation(spec, every, windowed=windowed, length=length)
        return cos[positions], sin[positions]

    return rows

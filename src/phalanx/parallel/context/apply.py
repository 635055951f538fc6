"""The context axis: ranks that share each sequence, with exchanged keys and values, or with context tiles that fix the bits.

Only attention mixes tokens. So each context rank computes the whole model for some tokens of every sequence
(``context_positions``), with their true positions. The ``core`` of attention is replaced by one that fetches the other ranks' keys
and values, in a ring (``RingMethod``) or by an all-gather (``GatherMethod``). A rank's losses and weight gradients are those of its
tokens; summed over the ranks they are those of the sequence.

With ``positions = context_positions(...)``, a rank gets ``tokens[:, positions]``, ``targets[:, positions]`` and ``positions``, but
the documents of the *full* sequence. Tensor ranks compute their own heads, each in its own context group. Activation recomputation
repeats the communication of the forward pass, in the same order on all ranks.

PyTorch has its own context parallelism (``torch.distributed.tensor.experimental``). Keep this package until that has document
masks and a fixed order of summation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import cast

import torch
from torch import Tensor, nn

from phalanx.hardware.local.device import CommClock
from phalanx.model.layers.attention.attention import CausalCore
from phalanx.model.layers.attention.rotary import rotation
from phalanx.model.layers.dense import FeedForward, RMSNorm
from phalanx.model.layers.moe import Experts, MoE
from phalanx.model.transformer import Block, PredictionAhead, RotaryTables, Transformer
from phalanx.parallel.context.exchange import GatherMethod, RingMethod, context_positions
from phalanx.parallel.context.fixed_tiles import RankTiles, TiledAttention, TiledCore, rank_tiles
from phalanx.parallel.context.tiles import DividedCore
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.tensor.lanes.shares import (
    InPieces,
    LaneLeaves,
    RoutedInPieces,
    ScoresInPieces,
    SharedParameter,
    replace_method,
    shared_parameters,
)
from phalanx.run.spec import ModelSpec, RunSpec

__all__ = ["apply_context", "context_positions"]


def apply_context(module: Transformer, mesh: Mesh, spec: RunSpec, clock: CommClock) -> None:
    """Replace the attention cores of ``module`` so that tokens attend to this rank's full context group, by ring or
    all-gather. With one context rank, change nothing.

    With ``model.context_tiles`` all layers compute tile by tile instead, on a single rank too, unless lanes already
    do.
    """
    tiles = rank_tiles(spec, mesh, clock)
    if tiles is not None:
        module.rotation = rotation_of_sequence(module.seq_len)
        if not spec.model.lanes:  # lanes already compute by tile
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


# Context tiles: each module is replaced by one that computes the sequence in tiles that the run fixes.
#
# ``model.context_tiles = t`` cuts each sequence into t tiles of equal length, independent of the number of ranks that share it. Each
# tile is computed separately, always with the same shapes. Sums over tiles are added in a binary tree. A context rank has t / c
# consecutive tiles, which are the leaves of a subtree. So the weights have the same bits for every context degree c that divides t.
#
# | | computed per tile | summed over all tiles in tree order |
# |---|---|---|
# | embedding, norms, feed-forward layers, routers, projections of predictions ahead | its tokens | gradient of the weights |
# | attention (``attention``, ``core``) | its queries, with all earlier keys | gradients of keys, values and weights |
# | routed experts | nothing: an expert gets all tokens of a slot together, ordered by tile | nothing |
# | scores and loss (``phalanx.train.step.loss``) | its tokens, in chunks | loss, gradient of the projection |
#
# Rotary tables are computed for the full sequence; each rank takes its rows.
#
# With lanes, ``phalanx.parallel.tensor.lanes.apply`` handles tiles itself. A lane computes its heads or inner elements tile by tile.
# Token-wise layers run on the lanes' pieces of each tile.
#
# Each rank reports some elements of the summed weight gradient, and zeros for the others (``RankTiles.share_of_total``). So later
# sums over micro-batches and slots add the same numbers in the same order as on a single rank. A complete sum is rounded to the
# compute dtype once.


def apply_tiles(module: Transformer, tiles: RankTiles) -> None:
    """Make ``module`` compute tile by tile. It is on the meta device, not yet sharded, and has no lanes."""
    count = len(tiles.tile_numbers)
    # The output projection has no forward call of its own; its shares are made in the loss.
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
    """Replace the forward functions of a prediction ahead, so that its block and the parts around it compute tile by tile."""
    names = (name for name, _ in prediction.named_parameters() if not name.startswith("block."))
    shared = _shared(prediction, names, tiles)
    for name, part in prediction.named_children():
        if not isinstance(part, Block):
            replace_method(
                part, "forward", InPieces(part.forward, _inside(shared, name), len(tiles.tile_numbers))
            )
    _divide(prediction.block, tiles)


def _divide(block: Block, tiles: RankTiles) -> None:
    """Replace the forward functions of a block's attention, norms, feed-forward and mixture, so that they compute
    tile by tile. Each tile has its own gradient of the parameters, except the stacked experts'.
    """
    stacked = {name for name, part in block.named_modules() if isinstance(part, Experts)}
    names = (name for name, _ in block.named_parameters() if name.rpartition(".")[0] not in stacked)
    shared, count, attention = _shared(block, names, tiles), len(tiles.tile_numbers), block.attention
    core = cast(CausalCore, attention.core)
    tiled_core = TiledCore(tiles, core.score, core.window)
    replace_method(attention, "forward", TiledAttention(attention, _inside(shared, "attention"), tiled_core))
    for name, part in block.named_children():
        if isinstance(part, (RMSNorm, FeedForward)):
            replace_method(part, "forward", InPieces(part.forward, _inside(shared, name), count))
    if isinstance(block.ffn, MoE):
        _divide_mixture(block.ffn, shared, count)


def _divide_mixture(moe: MoE, shared: Mapping[str, SharedParameter], count: int) -> None:
    """Replace the methods of a mixture's router, routed experts, shared experts and their gate, so that they compute
    tile by tile. ``shared`` are the block's parameters; ``count`` is the number of tiles.
    """
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
    """Give each tile a share of the parameters ``names`` of ``unit``, one FSDP unit.

    Return the shared parameters by name. Empty without names.
    """
    leaves = dict.fromkeys(names, LaneLeaves(len(tiles.tile_numbers)))
    return shared_parameters(unit, leaves, tiles.share_of_total) if leaves else {}


def _inside(shared: Mapping[str, SharedParameter], path: str) -> list[SharedParameter]:
    """Return the shared parameters of the module ``path`` and of its submodules."""
    return [parameter for name, parameter in shared.items() if name.startswith(f"{path}.")]


def rotation_of_sequence(seq_len: int) -> RotaryTables:
    """Return a function that computes the tables of ``seq_len`` positions and returns those of the requested ones, so that
    a kernel's arguments do not depend on the context degree.

    They are not cached: 8,192 positions of 128 elements take one CPU core 11 ms, and tables of long sequences are
    large.
    """

    def rows(
        spec: ModelSpec, positions: Tensor, *, windowed: bool = False, length: int = 0
    ) -> tuple[Tensor, Tensor]:
        positions_of_sequence = torch.arange(seq_len, device=positions.device)
        cos, sin = rotation(spec, positions_of_sequence, windowed=windowed, length=length)
        return cos[positions], sin[positions]  # (s, head_dim) each

    return rows

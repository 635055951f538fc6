"""The context axis: the ranks that share each sequence, for contexts whose activations no single rank could hold.

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

from typing import cast

from phalanx.model.layers.attention.attention import CausalCore
from phalanx.model.transformer import Block, Transformer
from phalanx.parallel.context.fixed.apply import apply_tiles, rotation_of_sequence
from phalanx.parallel.context.fixed.ranks import rank_tiles
from phalanx.parallel.context.gather import GatherMethod
from phalanx.parallel.context.head_tail import context_positions
from phalanx.parallel.context.ring import RingMethod
from phalanx.parallel.context.tiles import DividedCore
from phalanx.parallel.mesh.comm_clock import CommClock
from phalanx.parallel.mesh.mesh import Mesh
from phalanx.run.spec import RunSpec

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

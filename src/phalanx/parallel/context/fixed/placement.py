"""The tokens of a context tile, and the order of tiles: whatever the context degree, a rank holds a run of neighbors.

Of ``2 t`` equal pieces of a sequence, tile ``k`` of ``t`` is piece ``k`` from the head and piece ``2 t - 1 - k`` from the tail. So all
tiles see equally much under a causal mask (``phalanx.parallel.context.head_tail``), and rank ``r`` of ``c``, whose head and tail are
pieces ``r`` and ``2 c - 1 - r`` of ``2 c``, holds the tiles from ``r t / c`` on: the leaves of a subtree. A rank keeps its tokens in
the order of tiles.
"""

from __future__ import annotations

import torch
from torch import Tensor


def tiled_positions(seq_len: int, tiles: int, context: int, rank: int) -> Tensor:
    """The positions of the tokens of rank ``rank`` of ``context``, by tile: ``(seq_len / context,)``, int64."""
    return by_tile(torch.arange(seq_len), tiles, dim=0).chunk(context)[rank]


def by_tile(whole: Tensor, tiles: int, dim: int) -> Tensor:
    """A tensor with the whole sequence in dimension ``dim``, in the order of tiles."""
    pieces = whole.chunk(2 * tiles, dim)
    return torch.cat([pieces[at] for tile in range(tiles) for at in (tile, -1 - tile)], dim)


def by_position(tiled: Tensor, tiles: int, dim: int) -> Tensor:
    """The opposite of ``by_tile``."""
    pieces = tiled.chunk(2 * tiles, dim)
    return torch.cat((*pieces[0::2], *reversed(pieces[1::2])), dim)

"""A rank's context tiles, and the sums over those of all ranks that share a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.parallel.mesh.comm_clock import CommClock
from phalanx.parallel.mesh.mesh import Mesh
from phalanx.parallel.mesh.torch_compat import exchange_along
from phalanx.parallel.tensor.sequence_comm import SequenceComm, sum_in_tree
from phalanx.run.spec import RunSpec

# The tokens of a context tile, and the order of tiles: whatever the context degree, a rank holds a run of neighbors.
#
# Of ``2 t`` equal pieces of a sequence, tile ``k`` of ``t`` is piece ``k`` from the head and piece ``2 t - 1 - k`` from the tail. So all
# tiles see equally much under a causal mask (``phalanx.parallel.context.exchange``), and rank ``r`` of ``c``, whose head and tail are
# pieces ``r`` and ``2 c - 1 - r`` of ``2 c``, holds the tiles from ``r t / c`` on: the leaves of a subtree. A rank keeps its tokens in
# the order of tiles.


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


@dataclass(frozen=True)
class RankTiles:
    """The context tiles of a rank: ``here`` neighbors of ``count``."""

    count: int
    """Number of tiles of the whole sequence."""
    ranks: int
    """Number of ranks that share the sequence."""
    rank: int
    """Number of this rank among them."""
    comm: SequenceComm
    """Collectives over these ranks, adding in tree order; not used if there is one rank."""

    @property
    def here(self) -> range:
        """The numbers of this rank's tiles."""
        each = self.count // self.ranks
        return range(self.rank * each, (self.rank + 1) * each)

    def total(self, mine: Tensor) -> Tensor:
        """The sum over the ranks' tensors."""
        return mine if self.ranks == 1 else self.comm.total(mine)

    def share_of_total(self, sums: Sequence[Tensor]) -> Sequence[Tensor]:
        """Returns the sum over the ranks' tensors in the elements that this rank reports, and zeros elsewhere.

        Each rank reports an equal part of every tensor, always the same part of the same parameter. So the reports of all ranks
        add up to the sum as it is, however many micro-batches' reports are added before. The zeros are negative, because a
        positive one would make a negative zero positive.
        """
        if self.ranks == 1:
            return sums
        # A row is what one rank reports: (ranks, elements of each tensor / ranks, one tensor after the other).
        rows = [self._by_reporter(part) for part in sums]
        with self.comm.waiting():
            received = exchange_along(torch.cat(rows, 1), 0, self.comm.group)  # (ranks, 1, elements)
        totals = torch.split(sum_in_tree(received)[0], [row.shape[1] for row in rows])
        reports = []
        for row, total, like in zip(rows, totals, sums, strict=True):
            report = torch.full_like(row, -0.0)
            report[self.rank] = total
            reports.append(report.flatten()[: like.numel()].view_as(like))
        return reports

    def _by_reporter(self, whole: Tensor) -> Tensor:
        flat = whole.flatten()
        return F.pad(flat, (0, -len(flat) % self.ranks)).view(self.ranks, -1)


def rank_tiles(spec: RunSpec, mesh: Mesh, clock: CommClock) -> RankTiles | None:
    """Returns the context tiles of this rank; ``None`` without ``model.context_tiles``."""
    if not spec.model.context_tiles:
        return None
    comm = SequenceComm(mesh.context_group, clock, "tree")
    return RankTiles(spec.model.context_tiles, mesh.layout.context, mesh.context_rank, comm)

"""Context tiles of a rank, and sums over the tiles of all ranks that share a sequence."""

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

# The tokens of a context tile, and the order of tiles. For every context degree, a rank has consecutive tiles.
#
# The sequence is cut into ``2 t`` equal pieces. Tile ``k`` of ``t`` is piece ``k`` from the head and piece ``2 t - 1 - k`` from the
# tail. So all tiles have the same area of scores under a causal mask (``phalanx.parallel.context.exchange``). Rank ``r`` of ``c``
# has the ``t / c`` tiles from ``r t / c`` on, which are the leaves of a subtree. It keeps its tokens in the order of tiles.


def tiled_positions(seq_len: int, tiles: int, context: int, rank: int) -> Tensor:
    """Return the token positions of rank ``rank`` of ``context``, by tile: ``(seq_len / context,)``, int64."""
    return by_tile(torch.arange(seq_len), tiles, dim=0).chunk(context)[rank]


def by_tile(sequence: Tensor, tiles: int, dim: int) -> Tensor:
    """Reorder dimension ``dim``, which spans the full sequence, from the order of positions to the order of tiles."""
    pieces = sequence.chunk(2 * tiles, dim)
    return torch.cat([pieces[at] for tile in range(tiles) for at in (tile, -1 - tile)], dim)


def by_position(tiled: Tensor, tiles: int, dim: int) -> Tensor:
    """Inverse of ``by_tile``."""
    pieces = tiled.chunk(2 * tiles, dim)
    return torch.cat((*pieces[0::2], *reversed(pieces[1::2])), dim)


@dataclass(frozen=True)
class RankTiles:
    """The context tiles of a rank: ``tile_numbers``, consecutive, out of ``count``."""

    count: int
    """Number of tiles of the full sequence."""
    ranks: int
    """Number of ranks that share the sequence."""
    rank: int
    """Number of this rank among them."""
    comm: SequenceComm
    """Collectives over these ranks, adding in tree order; not used if there is one rank."""

    @property
    def tile_numbers(self) -> range:
        """The numbers of this rank's tiles."""
        per_rank = self.count // self.ranks
        return range(self.rank * per_rank, (self.rank + 1) * per_rank)

    def total(self, tensor: Tensor) -> Tensor:
        """Return the sum of the ranks' tensors."""
        return tensor if self.ranks == 1 else self.comm.total(tensor)

    def share_of_total(self, sums: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the sum over the ranks' tensors in the elements that this rank reports, and zeros elsewhere.

        Each rank reports an equal part of every tensor, always the same part of the same parameter. So the reports of all ranks add up to
        the exact sum, also after the reports of several micro-batches are added. The zeros are negative, because adding a positive one
        would turn a negative zero into a positive one.
        """
        if self.ranks == 1:
            return sums
        # Row r has the elements that rank r reports: (ranks, elements / ranks) for each tensor.
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

    def _by_reporter(self, tensor: Tensor) -> Tensor:
        """Return a tensor as one row for each rank, padded with zeros."""
        flat = tensor.flatten()
        return F.pad(flat, (0, -len(flat) % self.ranks)).view(self.ranks, -1)  # (ranks, elements / ranks)


def rank_tiles(spec: RunSpec, mesh: Mesh, clock: CommClock) -> RankTiles | None:
    """Return the context tiles of this rank; ``None`` without ``model.context_tiles``."""
    if not spec.model.context_tiles:
        return None
    comm = SequenceComm(mesh.context_group, clock, "tree")
    return RankTiles(spec.model.context_tiles, mesh.layout.context, mesh.context_rank, comm)

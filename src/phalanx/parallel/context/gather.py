"""Attention with all keys and values gathered (Llama 3, arXiv 2407.21783, section 3.3.2).

One all-gather brings every rank the keys and values of the whole sequence; then each computes its own queries' rows. With
few key/value heads that is little to send, and one collective costs less latency than a ring of them; but nothing hides it,
and for as long as a layer's attention runs, a rank holds the whole sequence's keys. They are not kept for backward: it
gathers them again, and hands each rank its share of their gradient by an all-to-all whose parts are added in the order of
ranks, in fp32: the volume of a reduce-scatter, in an order that no library chooses.

With head and tail pieces (``phalanx.parallel.context.head_tail``) every rank computes the same area: each of its two pieces sees
all pieces before it and half of itself, and where the head sees little, the tail sees much.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.model.layers.attention.attend import Score
from phalanx.parallel.context.head_tail import in_order, own_pieces, pack, unpack
from phalanx.parallel.context.tiles import SavedAttention, Sight, Tile, attend_tiles, differentiate_tiles
from phalanx.parallel.mesh.comm_clock import CommClock
from phalanx.parallel.mesh.torch_compat import all_gather_single


def tiles(rank: int, ranks: int, seq: int, window: int = 0) -> Iterator[Tile]:
    """The tiles of scores between the ``seq`` queries of ``rank`` and the whole sequence's keys, without what a window hides."""
    piece = seq // 2
    for number, index in enumerate((rank, 2 * ranks - 1 - rank)):
        rows, begin = slice(number * piece, (number + 1) * piece), index * piece
        if begin:
            yield Tile(rows, slice(max(0, begin - window + 1) if window else 0, begin))
        yield Tile(rows, slice(begin, begin + piece), causal=True)


def head_tail_sight(rank: int, ranks: int, seq: int, window: int, documents: Tensor | None) -> Sight:
    """The rule for the ``seq`` queries of ``rank`` and the whole sequence's keys; ``documents`` are ``(b, seq * ranks)``."""
    whole = torch.arange(seq * ranks)
    known = None if documents is None else (own_pieces(documents, ranks, rank, dim=1), documents)
    return Sight(own_pieces(whole, ranks, rank, dim=0), whole, window, known)


@dataclass(frozen=True)
class GatherMethod:
    """Gathers the keys and values of all ranks of ``group`` before attention begins."""

    group: dist.ProcessGroup
    clock: CommClock
    score: Score
    window: int = 0

    def mix(
        self, query: Tensor, key: Tensor, value: Tensor, documents: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """See ``TileMethod``."""
        keys, values = self._gather(key, value)  # (b, k, s * ranks, e), (b, k, s * ranks, v)
        rank, ranks, seq = self.group.rank(), self.group.size(), query.shape[2]
        known = head_tail_sight(rank, ranks, seq, self.window, documents)
        return attend_tiles(tiles(rank, ranks, seq, self.window), query, keys, values, known, self.score)

    def differentiate(
        self, saved: SavedAttention, grad_out: Tensor, key: Tensor, value: Tensor, documents: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See ``TileMethod``."""
        keys, values = self._gather(key, value)
        rank, ranks, seq = self.group.rank(), self.group.size(), grad_out.shape[2]
        known = head_tail_sight(rank, ranks, seq, self.window, documents)
        seen = tiles(rank, ranks, seq, self.window)
        # Of this rank's queries, and of everybody's keys and values: those are summed over the ranks afterwards.
        grad_query, *others = differentiate_tiles(seen, saved, grad_out, keys, values, known, self.score)
        return grad_query, *self._scatter(*others)

    def _gather(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """All-gathers keys and values: those of the whole sequence, in its order."""
        packed = pack(key, value)
        gathered = packed.new_empty(self.group.size() * packed.numel())
        with self.clock.measure():
            all_gather_single(gathered, packed, self.group)
        parts = [unpack(part, key.shape, value.shape) for part in gathered.chunk(self.group.size())]
        return in_order([part[0] for part in parts], dim=2), in_order([part[1] for part in parts], dim=2)

    def _scatter(self, grad_key: Tensor, grad_value: Tensor) -> tuple[Tensor, Tensor]:
        """The sum over all ranks of this rank's pieces of the whole sequence's gradients."""
        ranks = self.group.size()
        pieces = [
            [own_pieces(whole, ranks, rank, dim=2) for whole in (grad_key, grad_value)]
            for rank in range(ranks)
        ]
        # A reduce-scatter as an all-to-all and a sum in the order of ranks: (ranks, elements of one rank's keys and values).
        sent = torch.cat([pack(*parts) for parts in pieces])
        received = torch.empty_like(sent)
        with self.clock.measure():
            dist.all_to_all_single(received, sent, group=self.group)
        return unpack(received.view(ranks, -1).sum(0), pieces[0][0].shape, pieces[0][1].shape)

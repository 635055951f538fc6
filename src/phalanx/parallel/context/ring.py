"""Ring attention (Liu, Zaharia and Abbeel, arXiv 2310.01889): keys and values travel, queries stay.

The ranks that share a sequence stand in a ring. Each computes attention of its own queries with the keys and values at
hand, while these are already on their way to the next rank and the previous rank's are arriving; after as many steps as
there are ranks, every query has met every key, and no rank ever held more than two ranks' keys. Backward goes round once
more: the gradient of a rank's keys and values travels behind them, each rank adds its share, and it arrives home complete.

With head and tail pieces (``phalanx.parallel.context.head_tail``) every step is the same work on every rank: with one's own keys a
causal square, which is two of the four pieces' area; with those of a lower rank, all queries with their head; with those of
a higher rank, the tail's queries with all of them. What the causal mask empties is never computed.

Order of summation: a rank takes the keys of ranks r, r - 1, ... and a gradient collects the shares of ranks r, r + 1, ...;
it depends on the number of context ranks and nothing else. Sums are fp32, gradients on the wire too. Grouped key/value
heads travel as they are, not one for each query head.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.model.layers.attention.attend import Score
from phalanx.parallel.context.head_tail import own_pieces, pack, unpack
from phalanx.parallel.context.tiles import OnlineSoftmax, SavedAttention, Sight, Tile
from phalanx.parallel.mesh.comm_clock import CommClock

_ALL = slice(None)
_KEYS, _GRADIENTS = 0, 1  # tags of the two kinds of messages that are on their way at the same time


def tile(rank: int, source: int, seq: int) -> Tile:
    """The unmasked tile of scores between the ``seq`` queries of ``rank`` and the ``seq`` keys of ``source``."""
    if source == rank:
        return Tile(_ALL, _ALL, causal=True)
    if source < rank:  # its head lies before all of our queries, its tail behind them
        return Tile(_ALL, slice(0, seq // 2))
    return Tile(slice(seq // 2, seq), _ALL)  # only our tail lies behind its keys, and behind all of them


@dataclass
class Passing:
    """One ring exchange in flight: a buffer sent to the next rank, and one received from the previous."""

    works: list[dist.Work]
    sent: Tensor
    """Held until it has left."""
    arriving: Tensor
    clock: CommClock

    def wait(self) -> Tensor:
        """Waits for the buffer that arrives, and returns it."""
        with self.clock.measure():
            for work in self.works:
                work.wait()
        return self.arriving


@dataclass(frozen=True)
class RingMethod:
    """Passes keys and values round the ranks of ``group``, block by block, while attention computes with the last."""

    group: dist.ProcessGroup
    clock: CommClock
    score: Score
    window: int = 0

    def mix(
        self, query: Tensor, key: Tensor, value: Tensor, documents: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """See ``TileMethod``."""
        rows = OnlineSoftmax(query, value.shape[-1])
        for source, keys, values in self._rounds(key, value):
            seen, sight = (
                tile(self.group.rank(), source, query.shape[2]),
                self._sight(query, source, documents),
            )
            if not seen.hidden(sight):
                rows.add(seen.rows, *seen.forward(query, keys, values, sight, self.score))
        return rows.out, rows.lse

    def differentiate(
        self, saved: SavedAttention, grad_out: Tensor, key: Tensor, value: Tensor, documents: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See ``TileMethod``."""
        grad_query = torch.zeros_like(saved.query, dtype=torch.float32)
        collected = key.new_zeros(key.numel() + value.numel(), dtype=torch.float32)
        arriving: Passing | None = None
        # In every step the keys and values (b, k, s, e), (b, k, s, v) of `source` are here, and the sum so far of their
        # gradients, one step behind them, arrives while our share is computed.
        for source, keys, values in self._rounds(key, value):
            seen = tile(self.group.rank(), source, grad_out.shape[2])
            sight = self._sight(saved.query, source, documents)
            shares = (
                None
                if seen.hidden(sight)
                else seen.backward(saved, grad_out, keys, values, sight, self.score)
            )
            if arriving is not None:  # in the first step the keys are our own, and nobody has added anything
                collected = arriving.wait()
            grad_key, grad_value = unpack(collected, key.shape, value.shape)
            if shares is not None:
                grad_query[:, :, seen.rows] += shares[0]
                grad_key[:, :, seen.columns] += shares[1]
                grad_value[:, :, seen.columns] += shares[2]
            arriving = self._pass_on(collected, _GRADIENTS)
        # The last send goes to the rank that the keys came from: what arrives here is the gradient of our own keys.
        assert arriving is not None, "a ring has at least one rank"
        return grad_query, *unpack(arriving.wait(), key.shape, value.shape)

    def _rounds(self, key: Tensor, value: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yields each rank's number, keys and values, this rank's first; the next set is prefetched while one is in use."""
        rank, ranks, held = self.group.rank(), self.group.size(), pack(key, value)
        for step in range(ranks):
            passing = self._pass_on(held, _KEYS) if step < ranks - 1 else None
            yield (rank - step) % ranks, *unpack(held, key.shape, value.shape)
            held = passing.wait() if passing is not None else held

    def _pass_on(self, buffer: Tensor, tag: int) -> Passing:
        rank, ranks, arriving = self.group.rank(), self.group.size(), torch.empty_like(buffer)
        there = dist.P2POp(dist.isend, buffer, group=self.group, tag=tag, group_peer=(rank + 1) % ranks)
        here = dist.P2POp(dist.irecv, arriving, group=self.group, tag=tag, group_peer=(rank - 1) % ranks)
        return Passing(dist.batch_isend_irecv([there, here]), buffer, arriving, self.clock)

    def _sight(self, query: Tensor, source: int, documents: Tensor | None) -> Sight:
        ranks, both = self.group.size(), (self.group.rank(), source)
        whole = torch.arange(query.shape[2] * ranks)
        rows, columns = (own_pieces(whole, ranks, rank, dim=0) for rank in both)
        if documents is None:
            return Sight(rows, columns, self.window)
        mine, theirs = (own_pieces(documents, ranks, rank, dim=1) for rank in both)
        return Sight(rows, columns, self.window, (mine, theirs))

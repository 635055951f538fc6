"""Attention over context ranks: keys and values gathered (Llama 3, arXiv 2407.21783, section 3.3.2) or passed round in a ring, over head and tail pieces.

One all-gather brings every rank the keys and values of the whole sequence; then each computes its own queries' rows. With
few key/value heads that is little to send, and one collective costs less latency than a ring of them; but nothing hides it,
and for as long as a layer's attention runs, a rank holds the whole sequence's keys. They are not kept for backward: it
gathers them again, and hands each rank its share of their gradient by an all-to-all whose parts are added in the order of
ranks, in fp32: the volume of a reduce-scatter, in an order that no library chooses.

With head and tail pieces every rank computes the same area: each of its two pieces sees
all pieces before it and half of itself, and where the head sees little, the tail sees much.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Size, Tensor

from phalanx.model.layers.attention.attend import Score
from phalanx.parallel.context.tiles import (
    OnlineSoftmax,
    SavedAttention,
    Sight,
    Tile,
    attend_tiles,
    differentiate_tiles,
)
from phalanx.parallel.mesh.comm_clock import CommClock
from phalanx.parallel.mesh.torch_compat import all_gather_single

# Head and tail pieces, which balance the load: each context rank has one piece of a sequence's head and one of its tail.
#
# Under a causal mask the last tokens see everything and the first see nothing but themselves, so equal runs of tokens would
# be unequal work. Of ``2 c`` equal pieces, rank ``r`` of ``c`` therefore takes piece ``r`` from the head and piece
# ``2 c - 1 - r`` from the tail: what one lacks the other has, and every rank has the same area of scores to compute. (Striped
# attention, arXiv 2311.09431, balances token by token; pieces in this order, used by Llama 3, arXiv 2407.21783, section 3.3.2,
# leave long runs that a kernel can work on.) Both pieces of a rank are in the order of the sequence.

# Keys and values in one buffer, so that one message carries both.


def pack(key: Tensor, value: Tensor) -> Tensor:
    """Both, flat, one after the other."""
    return torch.cat((key.flatten(), value.flatten()))


def unpack(packed: Tensor, key: Size, value: Size) -> tuple[Tensor, Tensor]:
    """Views of a packed buffer, with these shapes."""
    keys = math.prod(key)
    return packed[:keys].view(key), packed[keys:].view(value)


def context_positions(seq_len: int, context: int, rank: int) -> Tensor:
    """The positions of the tokens of rank ``rank`` of ``context``, ascending: ``(seq_len / context,)``, int64.

    Raises ``ValueError`` when the sequence has no ``2 * context`` equal pieces.
    """
    if seq_len % (2 * context):
        raise ValueError(
            f"{seq_len} tokens have no {2 * context} equal pieces for {context} context ranks: take a multiple of that"
        )
    return own_pieces(torch.arange(seq_len), context, rank, dim=0)


def own_pieces(whole: Tensor, context: int, rank: int, dim: int) -> Tensor:
    """The head and tail piece of rank ``rank`` of ``context``, of a tensor with the whole sequence in dimension ``dim``."""
    pieces = whole.chunk(2 * context, dim)
    return torch.cat((pieces[rank], pieces[-1 - rank]), dim)


def in_order(parts: Sequence[Tensor], dim: int) -> Tensor:
    """The whole again, from what each rank holds, in the order of ranks."""
    heads, tails = zip(*(part.chunk(2, dim) for part in parts), strict=True)
    return torch.cat((*heads, *reversed(tails)), dim)


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


# Ring attention (Liu, Zaharia and Abbeel, arXiv 2310.01889): keys and values travel, queries stay.
#
# The ranks that share a sequence stand in a ring. Each computes attention of its own queries with the keys and values at
# hand, while these are already on their way to the next rank and the previous rank's are arriving; after as many steps as
# there are ranks, every query has met every key, and no rank ever held more than two ranks' keys. Backward goes round once
# more: the gradient of a rank's keys and values travels behind them, each rank adds its share, and it arrives home complete.
#
# With head and tail pieces every step is the same work on every rank: with one's own keys a
# causal square, which is two of the four pieces' area; with those of a lower rank, all queries with their head; with those of
# a higher rank, the tail's queries with all of them. What the causal mask empties is never computed.
#
# Order of summation: a rank takes the keys of ranks r, r - 1, ... and a gradient collects the shares of ranks r, r + 1, ...;
# it depends on the number of context ranks and nothing else. Sums are fp32, gradients on the wire too. Grouped key/value
# heads travel as they are, not one for each query head.


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

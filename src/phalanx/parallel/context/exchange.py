"""Context-parallel attention over head and tail pieces: keys and values are all-gathered or passed around a ring.

The gather method follows Llama 3 (arXiv 2407.21783, section 3.3.2). One all-gather delivers the keys and values of the full
sequence; then each rank computes the rows of its own queries. With few key/value heads the volume is small, and one collective has
less latency than a ring. But no computation overlaps with it, and a rank holds the keys of the full sequence while a layer's
attention runs. Backward gathers them again. It returns each rank's share of their gradient by an all-to-all, and adds the parts in
fp32 in the order of ranks. The volume is that of a reduce-scatter, but the order does not depend on a library.

With head and tail pieces every rank computes the same area of scores. Each piece attends to all pieces before it and to half of
itself, so a small area in the head is balanced by a large one in the tail.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Size, Tensor

from phalanx.hardware.local.device import CommClock
from phalanx.model.layers.attention.attend import Score
from phalanx.parallel.context.tiles import (
    MaskRule,
    OnlineSoftmax,
    SavedAttention,
    Tile,
    attend_tiles,
    differentiate_tiles,
)
from phalanx.parallel.torch_compat import all_gather_single

# Head and tail pieces, which balance the load: each context rank has one piece of a sequence's head and one of its tail.
#
# Under a causal mask the last tokens see everything and the first see only themselves, so equal runs of tokens would be unequal
# work. So the sequence is cut into ``2 c`` equal pieces, and rank ``r`` of ``c`` takes piece ``r`` and piece ``2 c - 1 - r``.
# Then every rank has the same area of scores to compute. Striped attention (arXiv 2311.09431) balances token by token. Pieces as in
# Llama 3 (arXiv 2407.21783, section 3.3.2) leave long runs for the kernels. A rank's two pieces are in the order of the sequence.


# Keys and values share one buffer, so that one message carries both.
def pack(key: Tensor, value: Tensor) -> Tensor:
    """Concatenate keys and values in one flat buffer."""
    return torch.cat((key.flatten(), value.flatten()))  # (b k s (e + v),)


def unpack(packed: Tensor, key: Size, value: Size) -> tuple[Tensor, Tensor]:
    """Return views of a packed buffer as keys and values of these shapes."""
    keys = math.prod(key)
    return packed[:keys].view(key), packed[keys:].view(value)  # (b, k, s, e), (b, k, s, v)


def context_positions(seq_len: int, context: int, rank: int) -> Tensor:
    """Return the token positions of rank ``rank`` of ``context``, ascending: ``(seq_len / context,)``, int64.

    Raise ``ValueError`` if the sequence cannot be cut into ``2 * context`` equal pieces.
    """
    if seq_len % (2 * context):
        raise ValueError(
            f"{seq_len} tokens cannot be cut into {2 * context} equal pieces for {context} context ranks: use a multiple of {2 * context}"
        )
    return own_pieces(torch.arange(seq_len), context, rank, dim=0)


def own_pieces(sequence: Tensor, context: int, rank: int, dim: int) -> Tensor:
    """Return the head and tail piece of rank ``rank`` of ``context`` along ``dim``, which spans the full sequence."""
    pieces = sequence.chunk(2 * context, dim)  # (..., s / (2 context), ...) each
    return torch.cat((pieces[rank], pieces[-1 - rank]), dim)  # (..., s / context, ...)


def in_order(parts: Sequence[Tensor], dim: int) -> Tensor:
    """Reassemble the full sequence along ``dim`` from each rank's head and tail piece, given in the order of ranks."""
    heads, tails = zip(*(part.chunk(2, dim) for part in parts), strict=True)  # (..., s / (2 ranks), ...) each
    return torch.cat((*heads, *reversed(tails)), dim)  # (..., s, ...)


def tiles(rank: int, ranks: int, seq: int, window: int = 0) -> Iterator[Tile]:
    """Yield the tiles of the score matrix of ``rank``'s ``seq`` queries (a head and a tail piece) and the full
    sequence's keys: for each piece the keys before it, then its own. Keys that are outside of ``window`` for all
    queries of a piece are left out.
    """
    piece = seq // 2
    for number, index in enumerate((rank, 2 * ranks - 1 - rank)):
        rows, begin = slice(number * piece, (number + 1) * piece), index * piece
        if begin:
            yield Tile(rows, slice(max(0, begin - window + 1) if window else 0, begin))
        yield Tile(rows, slice(begin, begin + piece), causal=True)


def head_tail_mask_rule(rank: int, ranks: int, seq: int, window: int, documents: Tensor | None) -> MaskRule:
    """Return the mask rule for the ``seq`` queries of ``rank`` and the keys of the full sequence; ``documents`` are ``(b, seq * ranks)``."""
    positions = torch.arange(seq * ranks)
    ids = None if documents is None else (own_pieces(documents, ranks, rank, dim=1), documents)
    return MaskRule(own_pieces(positions, ranks, rank, dim=0), positions, window, ids)


@dataclass(frozen=True)
class GatherMethod:
    """``TileMethod`` that all-gathers the keys and values of all ranks of ``group`` before attention."""

    group: dist.ProcessGroup
    clock: CommClock
    score: Score
    window: int = 0

    def mix(
        self, query: Tensor, key: Tensor, value: Tensor, documents: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Gather all keys and values, and return the rows' results and log-sum-exp, both fp32. A collective."""
        keys, values = self._gather(key, value)  # (b, k, s * ranks, e), (b, k, s * ranks, v)
        rank, ranks, seq = self.group.rank(), self.group.size(), query.shape[2]
        rule = head_tail_mask_rule(rank, ranks, seq, self.window, documents)
        return attend_tiles(tiles(rank, ranks, seq, self.window), query, keys, values, rule, self.score)

    def differentiate(
        self, saved: SavedAttention, grad_out: Tensor, key: Tensor, value: Tensor, documents: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gather all keys and values again, and return the gradients of this rank's queries, keys and values, fp32.

        A collective.
        """
        keys, values = self._gather(key, value)  # (b, k, s * ranks, e), (b, k, s * ranks, v)
        rank, ranks, seq = self.group.rank(), self.group.size(), grad_out.shape[2]
        rule = head_tail_mask_rule(rank, ranks, seq, self.window, documents)
        blocks = tiles(rank, ranks, seq, self.window)
        # Gradients of this rank's queries, and shares in those of all ranks' keys and values, which are summed next.
        grad_query, *others = differentiate_tiles(blocks, saved, grad_out, keys, values, rule, self.score)
        return grad_query, *self._scatter(*others)

    def _gather(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """All-gather keys and values of all ranks, and return those of the full sequence, in its order: ``(b, k, s *
        ranks, e)`` and ``(b, k, s * ranks, v)``.
        """
        packed = pack(key, value)
        gathered = packed.new_empty(self.group.size() * packed.numel())  # (ranks b k s (e + v),)
        with self.clock.measure():
            all_gather_single(gathered, packed, self.group)
        # (b, k, s, e) and (b, k, s, v) of each rank
        parts = [unpack(part, key.shape, value.shape) for part in gathered.chunk(self.group.size())]
        # (b, k, s * ranks, .) each
        return in_order([part[0] for part in parts], dim=2), in_order([part[1] for part in parts], dim=2)

    def _scatter(self, grad_key: Tensor, grad_value: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sum over all ranks, in their order, of the gradients of this rank's keys and values, out of
        gradients for the full sequence. A collective.
        """
        ranks = self.group.size()
        pieces = [
            [own_pieces(grad, ranks, rank, dim=2) for grad in (grad_key, grad_value)] for rank in range(ranks)
        ]
        # A reduce-scatter as an all-to-all and a sum in the order of ranks: (ranks, elements of one rank's keys and values).
        sent = torch.cat([pack(*parts) for parts in pieces])
        received = torch.empty_like(sent)
        with self.clock.measure():
            dist.all_to_all_single(received, sent, group=self.group)
        # (b, k, s, e), (b, k, s, v)
        return unpack(received.view(ranks, -1).sum(0), pieces[0][0].shape, pieces[0][1].shape)


# Ring attention (Liu, Zaharia and Abbeel, arXiv 2310.01889): keys and values move, queries stay.
#
# The ranks that share a sequence form a ring. Each rank computes attention of its own queries with the current keys and values.
# Meanwhile it sends these to the next rank and receives those of the previous one. After as many steps as ranks, every query has
# met every key, and no rank held the keys of more than two ranks. Backward makes one more round. The gradient of a rank's keys and
# values follows them, each rank adds its share, and the complete sum returns to its owner.
#
# With head and tail pieces every step has the same work on every rank. With its own keys it is a causal square, half of the area.
# With the keys of a lower rank, all queries meet their head. With those of a higher rank, the tail's queries meet all of them.
# Areas that the causal mask empties are never computed.
#
# Order of summation: a rank takes the keys of ranks r, r - 1, ... and a gradient collects the shares of ranks r, r + 1, ...
# It depends on the number of context ranks only. Sums are fp32, also on the wire. Grouped key/value heads are sent as they are.


_ALL = slice(None)
_KEYS, _GRADIENTS = 0, 1  # message tags: both kinds are in flight at the same time


def tile(rank: int, source: int, seq: int) -> Tile:
    """Return the only tile of ``rank``'s ``seq`` queries and ``source``'s ``seq`` keys that causal order does not
    hide: all on its own rank, the source's head if that is a lower rank, else the tail's queries.
    """
    if source == rank:
        return Tile(_ALL, _ALL, causal=True)
    if source < rank:  # its head precedes all of our queries, its tail follows them
        return Tile(_ALL, slice(0, seq // 2))
    return Tile(slice(seq // 2, seq), _ALL)  # only our tail follows its keys, all of them


@dataclass
class Passing:
    """One ring exchange in flight: a buffer sent to the next rank, and one received from the previous rank."""

    works: list[dist.Work]
    sent: Tensor
    """Referenced until the send has completed."""
    arriving: Tensor
    clock: CommClock

    def wait(self) -> Tensor:
        """Wait for the arriving buffer and return it."""
        with self.clock.measure():
            for work in self.works:
                work.wait()
        return self.arriving


@dataclass(frozen=True)
class RingMethod:
    """``TileMethod`` that passes keys and values around the ranks of ``group`` while attention computes with the previous set."""

    group: dist.ProcessGroup
    clock: CommClock
    score: Score
    window: int = 0

    def mix(
        self, query: Tensor, key: Tensor, value: Tensor, documents: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Pass keys and values around the ring, and return the rows' results and log-sum-exp, both fp32. A collective."""
        rows = OnlineSoftmax(query, value.shape[-1])
        for source, keys, values in self._rounds(key, value):
            block, rule = (
                tile(self.group.rank(), source, query.shape[2]),
                self._mask_rule(query, source, documents),
            )
            if not block.hidden(rule):
                rows.add(block.rows, *block.forward(query, keys, values, rule, self.score))
        return rows.out, rows.lse

    def differentiate(
        self, saved: SavedAttention, grad_out: Tensor, key: Tensor, value: Tensor, documents: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Pass keys, values and their gradients around the ring, and return the gradients of this rank's queries, keys
        and values, fp32. A collective.
        """
        grad_query = torch.zeros_like(saved.query, dtype=torch.float32)
        collected = key.new_zeros(key.numel() + value.numel(), dtype=torch.float32)  # (b k s (e + v),)
        arriving: Passing | None = None
        # Each step has the keys and values (b, k, s, e), (b, k, s, v) of `source`. The partial sum of their gradients is one
        # step behind, and arrives while our share is computed.
        for source, keys, values in self._rounds(key, value):
            block = tile(self.group.rank(), source, grad_out.shape[2])
            rule = self._mask_rule(saved.query, source, documents)
            shares = (
                None
                if block.hidden(rule)
                else block.backward(saved, grad_out, keys, values, rule, self.score)
            )
            if (
                arriving is not None
            ):  # in the first step the keys are our own, and no rank has added a share yet
                collected = arriving.wait()
            grad_key, grad_value = unpack(collected, key.shape, value.shape)
            if shares is not None:
                grad_query[:, :, block.rows] += shares[0]
                grad_key[:, :, block.columns] += shares[1]
                grad_value[:, :, block.columns] += shares[2]
            arriving = self._pass_on(collected, _GRADIENTS)
        # The last hop returns each gradient to the owner of the keys, so this rank receives that of its own keys.
        assert arriving is not None, "a ring has at least one rank"
        return grad_query, *unpack(arriving.wait(), key.shape, value.shape)

    def _rounds(self, key: Tensor, value: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield each rank's number, keys and values, this rank's first; the next set is prefetched meanwhile.

        A collective: each yielded tensor is valid until the next.
        """
        rank, ranks, packed = self.group.rank(), self.group.size(), pack(key, value)
        for step in range(ranks):
            passing = self._pass_on(packed, _KEYS) if step < ranks - 1 else None
            yield (rank - step) % ranks, *unpack(packed, key.shape, value.shape)
            packed = passing.wait() if passing is not None else packed

    def _pass_on(self, buffer: Tensor, tag: int) -> Passing:
        """Send ``buffer`` to the next rank of the ring and receive one like it from the previous, without waiting.
        ``buffer`` may not change until the result's ``wait``.
        """
        rank, ranks, arriving = self.group.rank(), self.group.size(), torch.empty_like(buffer)
        send = dist.P2POp(dist.isend, buffer, group=self.group, tag=tag, group_peer=(rank + 1) % ranks)
        receive = dist.P2POp(dist.irecv, arriving, group=self.group, tag=tag, group_peer=(rank - 1) % ranks)
        return Passing(dist.batch_isend_irecv([send, receive]), buffer, arriving, self.clock)

    def _mask_rule(self, query: Tensor, source: int, documents: Tensor | None) -> MaskRule:
        """Return the mask rule of this rank's queries and ``source``'s keys, by their positions and documents."""
        ranks, pair = self.group.size(), (self.group.rank(), source)
        positions = torch.arange(query.shape[2] * ranks)
        rows, columns = (own_pieces(positions, ranks, rank, dim=0) for rank in pair)
        if documents is None:
            return MaskRule(rows, columns, self.window)
        query_ids, key_ids = (own_pieces(documents, ranks, rank, dim=1) for rank in pair)
        return MaskRule(rows, columns, self.window, (query_ids, key_ids))

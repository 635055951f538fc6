"""A snapshot as a tier to restore from, wherever its ranks' states are: one step, of one layout.

Who restores is told where each rank's state is held: in segments of its own, with its node's agent, with peers. What it needs
it takes from the nearest; of equally near ones different readers take different ones (``restore_plan.py``). Only the blocks that contain
something needed are moved, each under its checksum from the moment the snapshot was taken. A holder that fails or returns
damaged bytes is not asked again, so that the same restore, tried anew, uses another: ``restore_from_holders`` does that.
"""

import logging
import random
import ssl
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from itertools import groupby
from typing import TypeVar

from phalanx.checkpoint.committed.restore import restore
from phalanx.checkpoint.format.blocks import read_ahead, read_parts
from phalanx.checkpoint.format.boxes import Box
from phalanx.checkpoint.format.errors import CheckpointError, CorruptError, NoSuchStepError
from phalanx.checkpoint.format.image import ByteArray, RawArray
from phalanx.checkpoint.format.restore_plan import OWN_MEMORY, PEER, BoxLocation, Held, PlannedRead
from phalanx.checkpoint.format.shards import Shard
from phalanx.checkpoint.snapshot.data_port import BusyError, HolderEndedError, SnapshotClient
from phalanx.checkpoint.snapshot.segments import (
    Segment,
    Snapshot,
    SnapshotKey,
    decode_record,
    verified,
)
from phalanx.checkpoint.tiers.tier import ReadableTier, Record

_log = logging.getLogger(__name__)
_DESCRIBERS = 16
_CONNECTIONS = 3
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0
_PATIENCE_S = 300.0
"""Time for which a holder may say that it is busy: a whole fleet may be reading from it."""
_MOST_TURNED_AWAY = 6
"""Connections that may end before the holder knows who we are: strangers may crowd its port."""
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class SnapshotHolder:
    """Where the state of ``rank`` is held: the data port ("host:port") of an agent; ``distance`` as in ``restore_plan.py``."""

    rank: int
    address: str
    distance: int = PEER


class _OwnMemory:
    """A segment of this process."""

    distance = OWN_MEMORY

    def __init__(self, segment: Segment, snapshot: Snapshot) -> None:
        self.rank = snapshot.key.rank
        self.name = f"rank {self.rank} in own memory"
        self._segment = segment
        self._snapshot = snapshot

    def snapshot(self) -> Snapshot:
        return self._snapshot

    @property
    def moved_bytes(self) -> int:
        """Nothing goes over a wire."""
        return 0

    def blocks(self, numbers: Iterable[int]) -> Iterator[ByteArray]:
        manifest = self._snapshot.manifest
        image = self._segment.image(manifest.nbytes)
        for number in numbers:
            start = number * manifest.block_bytes
            yield verified(manifest, number, image[start : start + manifest.block_bytes], self.name)

    def close(self) -> None:
        pass


class _TurnedAwayError(Exception):
    """A holder ended the connection before it knew who we are."""

    def __init__(self, why: HolderEndedError) -> None:
        super().__init__(str(why))
        self.why = why


class _Peer:
    """A snapshot behind a data port, read over a few connections at once."""

    def __init__(
        self,
        key: SnapshotKey,
        holder: SnapshotHolder,
        token: str,
        tls: ssl.SSLContext | None,
        pause: Callable[[float], None],
        *,
        keeps_connections: bool,
        known: Snapshot | None = None,
    ) -> None:
        self.rank = holder.rank
        self.distance = holder.distance
        self.name = f"rank {holder.rank} at {holder.address}"
        self._key = key
        self._address = holder.address
        self._token = token
        self._tls = tls
        self._pause, self._keeps_connections = pause, keeps_connections
        self._idle: deque[SnapshotClient] = deque()
        self._read_bytes: deque[int] = deque()  # by several threads
        self._snapshot = known

    def snapshot(self) -> Snapshot:
        if self._snapshot is None:
            self._snapshot = _decoded(self.record(), self._key, self.name)
        return self._snapshot

    def record(self) -> bytes:
        """The record of the snapshot, as the holder gives it."""
        record = self._patiently(lambda client: client.record(self._key))
        if not self._keeps_connections:
            self.close()
        return record

    @property
    def moved_bytes(self) -> int:
        """Bytes of the image that were read so far."""
        return sum(self._read_bytes)

    def blocks(self, numbers: Iterable[int]) -> Iterator[ByteArray]:
        block_bytes = self.snapshot().manifest.block_bytes
        return read_ahead(numbers, lambda _: block_bytes, self._read, threads=_CONNECTIONS)

    def close(self) -> None:
        while self._idle:
            self._idle.popleft().close()

    def _read(self, number: int, buffer: ByteArray) -> int:
        manifest = self.snapshot().manifest
        start = number * manifest.block_bytes
        size = min(manifest.block_bytes, manifest.nbytes - start)
        self._patiently(lambda client: client.read_into(self._key, start, buffer[:size].data))
        self._read_bytes.append(size)
        verified(manifest, number, buffer[:size], self.name)
        return size

    def _patiently(self, use: Callable[[SnapshotClient], _T]) -> _T:
        """The result of ``use``, which is tried anew, after pauses that grow, while the holder is busy or has no place for us."""
        until_s = time.monotonic() + _PATIENCE_S
        pause_s, turned_away = _FIRST_PAUSE_S, 0
        while True:
            try:
                with self._connected() as client:
                    return use(client)
            except BusyError:
                if time.monotonic() > until_s:
                    raise
            except _TurnedAwayError as error:
                turned_away += 1
                if turned_away >= _MOST_TURNED_AWAY:
                    raise error.why from error
            self._pause(pause_s * random.uniform(0.5, 1.5))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    @contextmanager
    def _connected(self) -> Iterator[SnapshotClient]:
        """A connection that nobody else uses; it is kept for the next use unless this one fails."""
        try:
            client = self._idle.popleft()
        except IndexError:
            try:
                client = SnapshotClient(self._address, self._token, tls=self._tls)
            except HolderEndedError as error:
                raise _TurnedAwayError(error) from error
        try:
            yield client
        except BusyError as error:
            if error.ended:
                client.close()
            else:
                self._idle.append(client)
            raise
        except BaseException:
            client.close()
            raise
        self._idle.append(client)


_Source = _OwnMemory | _Peer


def _decoded(record: bytes, key: SnapshotKey, where: str) -> Snapshot:
    snapshot = decode_record(record, where)
    if snapshot.key != key:
        raise CorruptError(f"{where}: gave {snapshot.key} for {key}; restore from another holder")
    return snapshot


def describe(
    ranks: int,
    step: int,
    holders: Sequence[SnapshotHolder],
    *,
    token: str,
    tls: ssl.SSLContext | None = None,
    pause: Callable[[float], None] = time.sleep,
) -> dict[int, bytes]:
    """The records of snapshots, by rank: each from the first of its holders that gives a good one; without those that nobody gives.

    Readers that need the records of all ranks each ask for a share of them and tell each other, so that nobody is asked by all.
    """
    by_rank: dict[int, list[SnapshotHolder]] = defaultdict(list)
    for holder in holders:
        by_rank[holder.rank].append(holder)

    def ask(rank: int) -> bytes | None:
        key = SnapshotKey(ranks, rank, step)
        for holder in by_rank[rank]:
            with closing(_Peer(key, holder, token, tls, pause, keeps_connections=False)) as peer:
                try:
                    record = peer.record()
                    _decoded(record, key, peer.name)
                except CheckpointError as error:
                    _log.warning("the snapshot of %s is passed over: %s", peer.name, error)
                else:
                    return record
        return None

    with ThreadPoolExecutor(_DESCRIBERS, "snapshot-describe") as pool:
        found = zip(by_rank, pool.map(ask, by_rank), strict=True)
        return {rank: record for rank, record in found if record is not None}


class SnapshotTier:
    """The reading side of a tier over the snapshot of one step of one layout; for one thread. Close it after the restore."""

    def __init__(
        self,
        ranks: int,
        step: int,
        *,
        own: Sequence[Segment] = (),
        holders: Sequence[SnapshotHolder] = (),
        records: Mapping[int, bytes] | None = None,
        token: str = "",
        tls: ssl.SSLContext | None = None,
        reader: int = 0,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        """The snapshot of ``step`` taken on ``ranks`` ranks. ``own`` are segments of this process (those with something else are
        ignored); from ``holders`` it is read over their data ports, with a few connections to each. ``records`` are those of ranks that are
        known already (``describe``): their holders are not asked for them. ``reader`` is the number of
        this reader among all: each begins with another holder. ``pause`` waits so many seconds before a busy holder is asked again, and may
        raise to end the restore."""
        self._ranks = ranks
        self._step = step
        found = [(segment, segment.snapshot()) for segment in own]
        self._sources: list[_Source] = [
            _OwnMemory(segment, held)
            for segment, held in found
            if held is not None and (held.key.ranks, held.key.step) == (ranks, step)
        ]
        known: dict[int, Snapshot] = {}
        for rank, record in (records or {}).items():
            with suppress(CorruptError):  # then each holder is asked
                known[rank] = _decoded(record, SnapshotKey(ranks, rank, step), f"the record of rank {rank}")
        self._sources += [
            _Peer(
                SnapshotKey(ranks, holder.rank, step),
                holder,
                token,
                tls,
                pause,
                keeps_connections=len(holders) <= _DESCRIBERS,
                known=known.get(holder.rank),
            )
            for holder in holders
        ]
        self._reader = reader
        self._failed: set[str] = set()

    @property
    def name(self) -> str:
        return "snapshot"

    @property
    def reader(self) -> int:
        """This reader's number among all."""
        return self._reader

    @property
    def failed(self) -> frozenset[str]:
        """The holders that have failed, which are not asked any more."""
        return frozenset(self._failed)

    @property
    def moved_bytes(self) -> int:
        """Bytes that have come from other processes, without records."""
        return sum(source.moved_bytes for source in self._sources)

    def steps(self) -> list[int]:
        return [self._step] if self._good() else []

    def has(self, step: int) -> bool:
        return step in self.steps()

    def record(self, step: int) -> Record:
        return Record(step, self._ranks, self.extra(step))

    def extra(self, step: int) -> dict[str, object]:
        self._require(step)
        for source in sorted(self._good(), key=lambda one: one.distance):
            snapshot = self._described(source)
            if snapshot is not None:
                return snapshot.extra
        raise NoSuchStepError(f"snapshot of step {step}: no holder answers; restore from a checkpoint")

    def boxes(
        self,
        step: int,
        rank: int | None = None,
        needed: Sequence[Box] | None = None,  # noqa: ARG002  a memory of few ranks, whose records are at hand
    ) -> tuple[Held, ...]:
        self._require(step)
        by_rank: dict[int, list[_Source]] = defaultdict(list)
        for source in self._good():
            if rank is None or source.rank == rank:
                by_rank[source.rank].append(source)
        with ThreadPoolExecutor(_DESCRIBERS, "snapshot-describe") as pool:
            held = sorted(by_rank)
            first = self._reader % len(held) if held else 0
            nearest = pool.map(self._nearest, (by_rank[one] for one in held[first:] + held[:first]))
            return tuple(
                Held(entry.box, BoxLocation(self.name, source.name, source.distance))
                for group in nearest
                for source, snapshot in group
                for entry in snapshot.manifest.entries
            )

    def read(self, step: int, reads: Sequence[PlannedRead]) -> Iterator[tuple[Box, RawArray]]:
        self._require(step)
        by_name = {source.name: source for source in self._sources}
        for name, group in groupby(reads, key=lambda read: read.source.location.holder):
            source = by_name[name]
            try:
                yield from read_parts(source.snapshot().manifest, list(group), source.blocks)
            except CheckpointError:
                self._failed.add(name)
                raise

    def close(self) -> None:
        """Ends all connections."""
        for source in self._sources:
            source.close()

    def _good(self) -> list[_Source]:
        return [source for source in self._sources if source.name not in self._failed]

    def _require(self, step: int) -> None:
        if step != self._step:
            raise NoSuchStepError(f"these are the snapshots of step {self._step}, not of step {step}")

    def _nearest(self, sources: Sequence[_Source]) -> list[tuple[_Source, Snapshot]]:
        """The nearest holders of one rank's state that answer."""
        for _, group in groupby(sorted(sources, key=lambda one: one.distance), key=lambda one: one.distance):
            answers = [(source, self._described(source)) for source in group]
            if any(snapshot is not None for _, snapshot in answers):
                return [(source, snapshot) for source, snapshot in answers if snapshot is not None]
        return []

    def _described(self, source: _Source) -> Snapshot | None:
        try:
            return source.snapshot()
        except CheckpointError as error:
            _log.warning("the snapshot of %s is passed over: %s", source.name, error)
            self._failed.add(source.name)
            return None


def restore_from_holders(
    snapshot: SnapshotTier,
    step: int,
    shards: Sequence[Shard],
    *,
    rank: int | None = None,
    further: Sequence[ReadableTier] = (),
    may_be_missing: Collection[str] = (),
) -> dict[str, object]:
    """``restore`` from ``snapshot`` (and ``further`` tiers), anew as long as another holder can replace one that failed.

    Raises as ``restore`` does: NotCoveredError where too many have failed.
    """
    while True:
        failed = snapshot.failed
        try:
            return restore(
                [snapshot, *further],
                step,
                shards,
                rank=rank,
                reader=snapshot.reader,
                may_be_missing=may_be_missing,
            )
        except CheckpointError as error:
            if snapshot.failed == failed:
                raise
            _log.warning("step %d: another holder is asked: %s", step, error)

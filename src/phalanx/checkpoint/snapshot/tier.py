"""A snapshot as a tier to restore from, with its ranks' states at any holders: one step, of one layout.

The restoring rank gets a list of the holders of each rank's state: its own segments, its node's agent, peers. It reads from the nearest;
among equally near ones, different readers use different holders (``format/boxes.py``). Only blocks with needed elements are read, verified
by the checksums taken with the snapshot. A holder that fails or returns damaged bytes is not used again, so a retry of the same restore
uses another: ``restore_from_holders`` does that.
"""

import logging
import random
import ssl
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from itertools import groupby
from typing import TypeVar

from phalanx.checkpoint.committed.restore import Shard, restore
from phalanx.checkpoint.format.blocks import read_ahead, read_parts
from phalanx.checkpoint.format.boxes import OWN_MEMORY, PEER, Box, BoxLocation, PlannedRead, StoredBox
from phalanx.checkpoint.format.errors import CheckpointError, CorruptError, NoSuchStepError
from phalanx.checkpoint.format.image import ByteArray, RawArray
from phalanx.checkpoint.snapshot.data_port import BusyError, HolderEndedError, SnapshotClient
from phalanx.checkpoint.snapshot.segments import (
    Segment,
    Snapshot,
    SnapshotKey,
    decode_record,
    verified,
)
from phalanx.checkpoint.tiers.tier import ReadableTier, StepRecord

_log = logging.getLogger(__name__)
_DESCRIBERS = 16
_CONNECTIONS = 3
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0
_PATIENCE_S = 300.0
"""Time for which a holder may be busy: the full fleet may be reading from it."""
_MOST_TURNED_AWAY = 6
"""Maximum number of connections that end before authentication: strangers may crowd the holder's port."""
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class SnapshotHolder:
    """Holder of the state of ``rank``: the data port ("host:port") of an agent; ``distance`` as in ``format/boxes.py``."""

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
        """0: local memory is not read over the network."""
        return 0

    def blocks(self, numbers: Iterable[int]) -> Iterator[ByteArray]:
        """Yield the image's blocks with these numbers, verified: views, not copies."""
        manifest = self._snapshot.manifest
        image = self._segment.image(manifest.nbytes)
        for number in numbers:
            start = number * manifest.block_bytes
            yield verified(manifest, number, image[start : start + manifest.block_bytes], self.name)

    def close(self) -> None:
        pass


class _TurnedAwayError(Exception):
    """A holder closed the connection before authentication."""

    def __init__(self, cause: HolderEndedError) -> None:
        super().__init__(str(cause))
        self.cause = cause


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
        snapshot: Snapshot | None = None,
    ) -> None:
        """Prepare to read snapshot ``key`` from ``holder``; nothing is connected yet. ``snapshot`` is its decoded
        record, if known. ``keeps_connections`` keeps one after reading the record; ``pause`` waits before a retry.
        """
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
        self._snapshot = snapshot

    def snapshot(self) -> Snapshot:
        """Return the holder's snapshot; its record is read and checked once."""
        if self._snapshot is None:
            self._snapshot = _decoded(self.record(), self._key, self.name)
        return self._snapshot

    def record(self) -> bytes:
        """Read the encoded record of the snapshot from its holder; retry while it is busy. Raises BusyError or the connection's error."""
        record = self._retrying(lambda client: client.record(self._key))
        if not self._keeps_connections:
            self.close()
        return record

    @property
    def moved_bytes(self) -> int:
        """Bytes of the image that were read so far."""
        return sum(self._read_bytes)

    def blocks(self, numbers: Iterable[int]) -> Iterator[ByteArray]:
        """Yield blocks of the image by number, read ahead over several connections."""
        block_bytes = self.snapshot().manifest.block_bytes
        return read_ahead(numbers, lambda _: block_bytes, self._read, threads=_CONNECTIONS)

    def close(self) -> None:
        while self._idle:
            self._idle.popleft().close()

    def _read(self, number: int, buffer: ByteArray) -> int:
        """Read block ``number`` into ``buffer``, retrying while the holder is busy, verify it, and return its length
        in bytes. Raises CorruptError and the connection's errors.
        """
        manifest = self.snapshot().manifest
        start = number * manifest.block_bytes
        size = min(manifest.block_bytes, manifest.nbytes - start)
        self._retrying(lambda client: client.read_into(self._key, start, buffer[:size].data))
        self._read_bytes.append(size)
        verified(manifest, number, buffer[:size], self.name)
        return size

    def _retrying(self, use: Callable[[SnapshotClient], _T]) -> _T:
        """Return the result of ``use``; retry with growing pauses while the holder is busy or refuses connections.

        Raises BusyError after the patience, or the error of the last refused connection.
        """
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
                    raise error.cause from error
            self._pause(pause_s * random.uniform(0.5, 1.5))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    @contextmanager
    def _connected(self) -> Iterator[SnapshotClient]:
        """Context with an exclusive connection, an idle or a new one; it is kept for reuse unless this use fails or
        the holder ended it. Raises _TurnedAwayError if the holder closes a new one before authentication.
        """
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


def _decoded(record: bytes, key: SnapshotKey, location: str) -> Snapshot:
    """Return the snapshot in a record; raises CorruptError if it is damaged or of another snapshot than ``key``."""
    snapshot = decode_record(record, location)
    if snapshot.key != key:
        raise CorruptError(f"{location}: gave {snapshot.key} for {key}; restore from another holder")
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
    """Return the records of snapshots, by rank: each from the first of its holders with a good one. Ranks without one
    are left out.

    Readers that need the records of all ranks each read a share of them and exchange these, so that no holder serves
    all readers. Failed holders are logged.
    """
    by_rank: dict[int, list[SnapshotHolder]] = defaultdict(list)
    for holder in holders:
        by_rank[holder.rank].append(holder)

    def read_record(rank: int) -> bytes | None:
        """Return the first good record of a rank's snapshot; ``None``, with a warning each, if none is."""
        key = SnapshotKey(ranks, rank, step)
        for holder in by_rank[rank]:
            with closing(_Peer(key, holder, token, tls, pause, keeps_connections=False)) as peer:
                try:
                    record = peer.record()
                    _decoded(record, key, peer.name)
                except CheckpointError as error:
                    _log.warning("the snapshot of %s is skipped: %s", peer.name, error)
                else:
                    return record
        return None

    with ThreadPoolExecutor(_DESCRIBERS, "snapshot-describe") as pool:
        found_records = zip(by_rank, pool.map(read_record, by_rank), strict=True)
        return {rank: record for rank, record in found_records if record is not None}


class SnapshotTier:
    """Reading side of a tier over the snapshot of one step of one layout; for one thread. Close it after the restore."""

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
        """Open the snapshot of ``step`` that was taken on ``ranks`` ranks.

        Args:
            ranks: Number of ranks of the layout.
            step: The step.
            own: Segments of this process; those with another snapshot are ignored.
            holders: Holders that are read over their data ports, with a few connections to each.
            records: Records that the caller already has, by rank (``describe``); they are not read again.
            token: The run's token.
            tls: For TLS.
            reader: Index of this reader among all; each starts with another holder.
            pause: Waits that many seconds before a busy holder is retried; may raise to end the restore.
        """
        self._ranks = ranks
        self._step = step
        snapshots = [(segment, segment.snapshot()) for segment in own]
        self._sources: list[_Source] = [
            _OwnMemory(segment, snapshot)
            for segment, snapshot in snapshots
            if snapshot is not None and (snapshot.key.ranks, snapshot.key.step) == (ranks, step)
        ]
        decoded: dict[int, Snapshot] = {}
        for rank, record in (records or {}).items():
            with suppress(CorruptError):  # then it is read from a holder
                decoded[rank] = _decoded(record, SnapshotKey(ranks, rank, step), f"the record of rank {rank}")
        self._sources += [
            _Peer(
                SnapshotKey(ranks, holder.rank, step),
                holder,
                token,
                tls,
                pause,
                keeps_connections=len(holders) <= _DESCRIBERS,
                snapshot=decoded.get(holder.rank),
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
        """Index of this reader among all."""
        return self._reader

    @property
    def failed(self) -> frozenset[str]:
        """The holders that have failed and are not used any more."""
        return frozenset(self._failed)

    @property
    def moved_bytes(self) -> int:
        """Bytes read from other processes, without records."""
        return sum(source.moved_bytes for source in self._sources)

    def steps(self) -> list[int]:
        return [self._step] if self._good() else []

    def has(self, step: int) -> bool:
        return step in self.steps()

    def record(self, step: int) -> StepRecord:
        return StepRecord(step, self._ranks, self.extra(step))

    def extra(self, step: int) -> dict[str, object]:
        """Return the ``extra`` of the nearest holder that answers; raises NoSuchStepError if none does."""
        self._require(step)
        for source in sorted(self._good(), key=lambda candidate: candidate.distance):
            snapshot = self._described(source)
            if snapshot is not None:
                return snapshot.extra
        raise NoSuchStepError(f"snapshot of step {step}: no holder answers; restore from a checkpoint")

    def boxes(
        self,
        step: int,
        rank: int | None = None,
        needed: Sequence[Box] | None = None,  # noqa: ARG002  the records of few ranks are in memory anyway
    ) -> tuple[StoredBox, ...]:
        """Return the boxes that the nearest answering holders of each rank have; holders that fail are skipped from then on."""
        self._require(step)
        by_rank: dict[int, list[_Source]] = defaultdict(list)
        for source in self._good():
            if rank is None or source.rank == rank:
                by_rank[source.rank].append(source)
        with ThreadPoolExecutor(_DESCRIBERS, "snapshot-describe") as pool:
            ranks = sorted(by_rank)
            first = self._reader % len(ranks) if ranks else 0
            nearest = pool.map(self._nearest, (by_rank[number] for number in ranks[first:] + ranks[:first]))
            return tuple(
                StoredBox(entry.box, BoxLocation(self.name, source.name, source.distance))
                for group in nearest
                for source, snapshot in group
                for entry in snapshot.manifest.entries
            )

    def read(self, step: int, reads: Sequence[PlannedRead]) -> Iterator[tuple[Box, RawArray]]:
        """Yield the parts that ``reads`` request. A holder that fails is marked as failed, and its error raised."""
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
        """Close all connections."""
        for source in self._sources:
            source.close()

    def _good(self) -> list[_Source]:
        return [source for source in self._sources if source.name not in self._failed]

    def _require(self, step: int) -> None:
        """Raise ``NoSuchStepError`` for any other step."""
        if step != self._step:
            raise NoSuchStepError(f"these are the snapshots of step {self._step}, not of step {step}")

    def _nearest(self, sources: Sequence[_Source]) -> list[tuple[_Source, Snapshot]]:
        """Return the nearest holders of one rank's state that answer, with their snapshots."""
        by_distance = sorted(sources, key=lambda source: source.distance)
        for _, group in groupby(by_distance, key=lambda source: source.distance):
            answers = [(source, self._described(source)) for source in group]
            if any(snapshot is not None for _, snapshot in answers):
                return [(source, snapshot) for source, snapshot in answers if snapshot is not None]
        return []

    def _described(self, source: _Source) -> Snapshot | None:
        """Return the source's snapshot; None, logged, if it cannot be read: the source counts as failed."""
        try:
            return source.snapshot()
        except CheckpointError as error:
            _log.warning("the snapshot of %s is skipped: %s", source.name, error)
            self._failed.add(source.name)
            return None


def restore_from_holders(
    snapshot: SnapshotTier,
    step: int,
    shards: Sequence[Shard],
    *,
    rank: int | None = None,
    further: Sequence[ReadableTier] = (),
) -> dict[str, object]:
    """Run ``restore`` from ``snapshot`` (and ``further`` tiers); retry as long as another holder can replace a failed one.

    Raises the errors of ``restore``: NotCoveredError if too many have failed.
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
            )
        except CheckpointError as error:
            if snapshot.failed == failed:
                raise
            _log.warning("step %d: another holder is tried: %s", step, error)

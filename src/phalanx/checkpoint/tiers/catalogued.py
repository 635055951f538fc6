"""Committed steps described by an index and catalogs, for any storage, and the drafts that become such steps.

A storage returns bytes by the step's file names. Here they are verified and decoded in the order in which each is covered
by a checksum of the previous: index, catalogs, blocks of images.
"""

from __future__ import annotations

import os
import shutil
import time
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import groupby
from pathlib import Path

import numpy as np

from phalanx.checkpoint.format.blocks import read_parts, storage_errors
from phalanx.checkpoint.format.boxes import Box, BoxLocation, PlannedRead, StoredBox
from phalanx.checkpoint.format.errors import AbandonedError, CheckpointError, CorruptError
from phalanx.checkpoint.format.image import BoxTable, ByteArray, RawArray, encode_table, joined
from phalanx.checkpoint.format.manifest import (
    Catalog,
    CatalogRef,
    Index,
    Manifest,
    StoredImage,
    catalog_of,
    checksum,
    decode_catalog,
    decode_index,
    decode_manifest,
    encode_catalog,
    join_catalogs,
)
from phalanx.checkpoint.tiers.tier import StepRecord
from phalanx.run.directory.files import write_atomically

# Drafts on disk, collected in two levels, so that no rank's work grows with the fleet.
#
# 1. Every rank writes its image and its manifest.
# 2. The first of every ``catalog_ranks`` ranks waits for the others of its group, joins their manifests into a catalog, and writes a
#    summary: its checksum, and the rectangles that the group covers.
# 3. The committing rank does this for the first group, then waits for the summaries: at 100,000 ranks 256 manifests and 390 summaries
#    instead of 100,000 manifests.
#
# The boxes of a rank are the same at every save, so derived results are cached: the rectangles, and that they cover every tensor.

CATALOG_RANKS = 256
EXTENTS = "extents.catalog"
SUMMARIES = "summaries"
DELETING = ".deleting-"
"""Prefix of a folder that is being removed."""
_SHORTEST_POLL_S, _LONGEST_POLL_S = 0.01, 0.5


@dataclass(frozen=True, slots=True)
class WaitLimit:
    """Timeout of the wait for other ranks, and a predicate that cancels it."""

    timeout_s: float
    cancelled: Callable[[], bool]


class Collector:
    """Joins the manifests of a draft's ranks into catalogs of up to ``catalog_ranks``, and the catalogs into an index."""

    def __init__(self, catalog_ranks: int = CATALOG_RANKS) -> None:
        """Join up to ``catalog_ranks`` ranks in one catalog."""
        self.catalog_ranks = catalog_ranks
        self._withdrawn: deque[Path] = deque()
        # Caches for one group and one checkpoint: the digests of the joined tables, and the results.
        self._group: tuple[tuple[int, ...], bytes, bytes] | None = None
        self._checkpoint: tuple[tuple[int, ...], tuple[Box, ...], bytes] | None = None

    def image_folder(self, rank: int) -> str:
        """Return the folder of a rank's image within a step's: "" for the first group, so that small checkpoints have one folder."""
        first = rank - rank % self.catalog_ranks
        return f"ranks-{first:05d}" if first else ""

    def manifest_folder(self, rank: int) -> str:
        """Return the folder within a draft for a rank's manifest."""
        return f"manifests-{rank - rank % self.catalog_ranks:05d}"

    def leads(self, rank: int) -> bool:
        """Return True if ``rank`` joins the manifests of its group."""
        return rank % self.catalog_ranks == 0

    def collect(self, folder: Path, first: int, world_size: int, patience: WaitLimit) -> Catalog:
        """Wait for the manifests of the group that ``first`` leads, write their catalog durably, withdraw the
        manifests, and return the catalog's summary.

        Raises AbandonedError as ``_await_files``, and CorruptError for an image of another size.
        """
        place = folder / self.manifest_folder(first)
        ranks = range(first, min(first + self.catalog_ranks, world_size))
        expected = {_manifest_name(rank): rank for rank in ranks}
        _await_files(folder, place, expected, f"{len(ranks)} ranks", patience)
        members: list[Catalog] = []
        for name in expected:
            path = place / name
            with storage_errors(path):
                member = decode_catalog(path.read_bytes(), str(path))
            for image in member.images:
                require_size(folder / image.file, image.nbytes)
            members.append(member)
        table, extent = self._tables_of(members, first)
        catalog = join_catalogs(members, table)
        data = encode_catalog(catalog)
        file = f"ranks-{first:05d}.catalog"
        write_record(folder / file, data)
        self._withdraw(place)
        seal = np.array([int(checksum(data), 16)], np.uint64)
        return Catalog((StoredImage(first, file, catalog.data_bytes, catalog.data_bytes, seal),), extent)

    def summarize(self, folder: Path, summary: Catalog) -> None:
        """Write the summary of ``collect`` for the committing rank."""
        with storage_errors(folder, 1):
            (folder / SUMMARIES).mkdir(exist_ok=True)
        write_record(folder / SUMMARIES / _summary_name(summary.images[0].rank), encode_catalog(summary))

    def gather(
        self, folder: Path, world_size: int, required: Sequence[Box], patience: WaitLimit
    ) -> tuple[tuple[CatalogRef, ...], str | None]:
        """Collect the first group, wait for the summaries of the others, and check that nothing is missing.

        Returns the catalogs, and the checksum of the extents, which are written if there are several catalogs. Removes
        the summaries. Raises AbandonedError as ``_await_files``, NotCoveredError if elements are missing.
        """
        summaries = [self.collect(folder, 0, world_size, patience)]
        expected = {
            _summary_name(first): first for first in range(self.catalog_ranks, world_size, self.catalog_ranks)
        }
        _await_files(
            folder,
            folder / SUMMARIES,
            expected,
            f"{len(expected)} ranks that collect others' shares",
            patience,
        )
        for name in expected:
            path = folder / SUMMARIES / name
            with storage_errors(path):
                summaries.append(decode_catalog(path.read_bytes(), str(path)))
        extents = self._proven(summaries, tuple(required))
        refs = tuple(self._ref(summary.images[0], world_size) for summary in summaries)
        if not expected:
            return refs, None
        data = encode_catalog(join_catalogs(summaries, extents))
        write_record(folder / EXTENTS, data)
        self._withdraw(folder / SUMMARIES)
        return refs, checksum(data)

    def clear_away(self) -> None:
        """Remove the manifests and summaries that are in catalogs now, after the commit."""
        while self._withdrawn:
            with suppress(IndexError):  # another thread of this process
                shutil.rmtree(self._withdrawn.popleft(), ignore_errors=True)

    def _withdraw(self, place: Path) -> None:
        """Rename a folder out of the draft, at once; ``clear_away`` deletes it later."""
        draft = place.parent
        withdrawn = draft.parent / f"{DELETING}{draft.name.lstrip('.')}-{place.name}-{time.monotonic_ns()}"
        with storage_errors(place, 1):
            os.rename(place, withdrawn)
        self._withdrawn.append(withdrawn)

    def _ref(self, catalog: StoredImage, world_size: int) -> CatalogRef:
        """Return the index's reference to a stored catalog: first rank, number of ranks, file, checksum and bytes."""
        ranks = min(self.catalog_ranks, world_size - catalog.rank)
        return CatalogRef(
            catalog.rank, ranks, catalog.file, f"{int(catalog.checksums[0]):016x}", catalog.nbytes
        )

    def _tables_of(self, members: Sequence[Catalog], first: int) -> tuple[bytes, bytes]:
        """Return, encoded, the table of all members, and the rectangles that they cover together. Cached for the same members."""
        digests = tuple(member.table_digest for member in members)
        cached = self._group
        if cached is None or cached[0] != digests:
            table = joined([member.table for member in members])
            cached = self._group = digests, encode_table(table), encode_table(table.merged(first))
        return cached[1], cached[2]

    def _proven(self, summaries: Sequence[Catalog], required: tuple[Box, ...]) -> bytes:
        """Return, encoded, the rectangles of all catalogs; raise NotCoveredError unless they cover every tensor, and
        ``required``. Cached for the same summaries.
        """
        digests = tuple(summary.table_digest for summary in summaries)
        cached = self._checkpoint
        if cached is None or cached[:2] != (digests, required):
            table = joined([summary.table for summary in summaries])
            table.merged(0).require_whole(required)
            cached = self._checkpoint = digests, required, encode_table(table)
        return cached[2]


def leave_manifest(place: Path, catalog: Catalog) -> None:
    """Write a rank's manifest, durably, for its collector. It exists only after all of the rank's bytes."""
    (image,) = catalog.images
    with storage_errors(place, 1):
        place.mkdir(exist_ok=True)
    write_record(place / _manifest_name(image.rank), encode_catalog(catalog))


def leave_failure(folder: Path, rank: int, reason: str) -> None:
    """Write ``reason`` as the failure of ``rank`` into the draft ``folder``; ranks that wait for it then give up.

    If the text cannot be written, as on a full disk, an empty file is created instead. Raises OSError if that fails too.
    """
    file = folder / f"rank-{rank:05d}.failed"
    try:
        # Atomic: the ranks that poll for it read it as soon as its name appears.
        write_atomically(file, reason.encode(errors="replace"), durable=False)
    except OSError:
        file.touch()  # a full disk has room for a name


def require_size(path: Path, nbytes: int) -> None:
    """Raise CorruptError unless the file has ``nbytes`` bytes, MissingFileError if it does not exist."""
    with storage_errors(path):
        size = path.stat().st_size
    if size != nbytes:
        raise _wrong_size(str(path), size, nbytes)


def _wrong_size(place: str, actual_bytes: int, nbytes: int) -> CorruptError:
    """Return the error for an image whose size differs from its manifest."""
    return CorruptError(
        f"{place}: {actual_bytes:,} bytes, but {nbytes:,} in its manifest. Restore another step."
    )


def write_record(path: Path, content: bytes) -> None:
    """Write a small file, durably and atomically."""
    with storage_errors(path, len(content)):
        write_atomically(path, content)


def _manifest_name(rank: int) -> str:
    return f"rank-{rank:05d}.manifest"


def _summary_name(first: int) -> str:
    return f"ranks-{first:05d}.summary"


def _await_files(
    folder: Path, place: Path, expected: Mapping[str, int], writers: str, patience: WaitLimit
) -> None:
    """Wait until all ``expected`` files, by name with the rank that writes each, are in ``place``.

    Raises AbandonedError if a rank has recorded a failure in ``folder``, or the wait is cancelled or times out, and
    StorageError if a folder or a failure cannot be read. Polls with growing pauses.
    """
    deadline = time.monotonic() + patience.timeout_s
    pause_s = _SHORTEST_POLL_S
    while True:
        with storage_errors(folder, 1):
            entries = os.listdir(folder)
            names = set(os.listdir(place)) if place.name in entries else set[str]()
            failed = sorted(name for name in entries if name.endswith(".failed"))
            reason = (folder / failed[0]).read_text(errors="replace") if failed else ""
        if failed:
            raise AbandonedError(f"{folder.name}: {Path(failed[0]).stem} could not write its share: {reason}")
        absent = [rank for name, rank in expected.items() if name not in names]
        if not absent:
            return
        if patience.cancelled():
            raise AbandonedError(f"{folder.name}: the save was cancelled")
        if time.monotonic() > deadline:
            raise AbandonedError(
                f"{folder.name}: {len(absent)} of {writers} have not written after {patience.timeout_s} s "
                f"(first: {absent[:8]}). They died or their storage is slow; earlier checkpoints, "
                "if there are any, are intact."
            )
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.5, _LONGEST_POLL_S)


class CataloguedTier(ABC):
    """Committed steps with an index and catalogs, in storage that returns bytes by the names of a step's files.

    Every method raises a CheckpointError if the storage fails.
    """

    def __init__(self, name: str, distance: int) -> None:
        """Cache catalogs and manifests that are read; boxes get the location ``name`` and ``distance``."""
        self.name = name
        self._distance = distance
        # Cached: committed steps never change, and a restore reads the same catalogs twice (to plan, to read), by rank.
        self._catalog = lru_cache(maxsize=64)(self._load_catalog)
        self._manifest = lru_cache(maxsize=256)(self._load_manifest)

    @abstractmethod
    def steps(self) -> list[int]:
        """Return the committed steps, oldest first."""

    @abstractmethod
    def index_bytes(self, step: int) -> bytes:
        """Return the encoded index. Raises NoSuchStepError."""

    @abstractmethod
    def place(self, step: int, file: str) -> str:
        """Return the path or URL of a step's file, for messages; of its index if ``file`` is empty."""

    @abstractmethod
    def read_file(self, step: int, file: str) -> bytes:
        """Return a small file of the step. Raises MissingFileError."""

    @abstractmethod
    def image_bytes(self, step: int, file: str) -> int:
        """Return the size of an image in the storage, which ``blocks`` then reads. Raises MissingFileError."""

    @abstractmethod
    def blocks(self, step: int, manifest: Manifest, numbers: Sequence[int]) -> Iterator[ByteArray]:
        """Yield the verified blocks of an image; a block is valid until the next one is requested."""

    def index(self, step: int) -> Index:
        """Return the index of a committed step. Raises NoSuchStepError, CorruptError, FormatVersionError."""
        return decode_index(self.index_bytes(step), self.place(step, ""))

    def record(self, step: int) -> StepRecord:
        """Return the metadata of a committed step. Raises the errors of ``index``."""
        index = self.index(step)
        return StepRecord(index.step, index.world_size, index.extra, index.weights_sha256)

    def extra(self, step: int) -> dict[str, object]:
        """Return the small JSON saved with a committed step. Raises the errors of ``index``."""
        return self.index(step).extra

    def catalog(self, step: int, ref: CatalogRef) -> Catalog:
        """Return a verified catalog of the step's index. Raises CorruptError, MissingFileError."""
        return self._catalog(step, ref)

    def extents(self, step: int, digits: str) -> Catalog:
        """Return the rectangles of each catalog, under the number of its first rank. Raises the errors of ``catalog``."""
        return decode_catalog(self._checked_bytes(step, EXTENTS, digits), self.place(step, EXTENTS))

    def boxes(
        self, step: int, rank: int | None = None, needed: Sequence[Box] | None = None
    ) -> tuple[StoredBox, ...]:
        """Return the stored boxes of a step that may overlap ``needed`` (None: all), those of ``rank`` alone if it is
        given. Raises NoSuchStepError. Catalogs that cannot overlap ``needed`` are not read.
        """
        index = self.index(step)
        refs = index.catalogs
        if rank is not None:
            refs = tuple(ref for ref in refs if ref.first_rank <= rank < ref.first_rank + ref.ranks)
        elif needed is not None and index.extents_checksum is not None:
            extents = self.extents(step, index.extents_checksum).table
            firsts = set(extents.holder[extents.overlapping(needed)].tolist())
            refs = tuple(ref for ref in refs if ref.first_rank in firsts)
        return tuple(box for ref in refs for box in self._stored_boxes(self.catalog(step, ref), rank, needed))

    def read(self, step: int, reads: Sequence[PlannedRead]) -> Iterator[tuple[Box, RawArray]]:
        """Yield (box, elements) of ``reads`` in pieces, each valid until the next one is requested.

        Raises CorruptError for other bytes than those written.
        """
        refs = self.index(step).catalogs
        firsts = [ref.first_rank for ref in refs]
        for holder, group in groupby(reads, key=lambda read: read.source.location.holder):
            ref = refs[bisect_right(firsts, int(holder)) - 1]
            manifest = self._manifest(step, ref, int(holder))
            yield from read_parts(manifest, list(group), partial(self.blocks, step, manifest))

    def damage(self, step: int, manifest: Manifest) -> Iterator[tuple[int, CheckpointError | None]]:
        """Read a full image back: yield (bytes read so far, error or None) for each block.

        An image of another length is one more error, with 0 bytes. For an image whose size cannot be read, that error
        is all. An error other than CorruptError is the last item.
        """
        try:
            size = self.image_bytes(step, manifest.file)
        except CheckpointError as error:
            yield 0, error
            return
        if size != manifest.nbytes:
            yield 0, _wrong_size(self.place(step, manifest.file), size, manifest.nbytes)
        block_count = len(manifest.checksums) if size >= manifest.nbytes else size // manifest.block_bytes
        number = 0
        while number < block_count:
            problem: CheckpointError | None = None
            try:
                # Reading ahead ends at a bad block, and restarts with the next.
                for _ in self.blocks(step, manifest, range(number, block_count)):
                    number += 1
                    yield min(number * manifest.block_bytes, manifest.nbytes), None
            except CheckpointError as error:
                problem = error
                number += 1
            if problem is not None:
                yield min(number * manifest.block_bytes, manifest.nbytes), problem
                if not isinstance(problem, CorruptError):
                    return

    def images(self, step: int) -> list[Manifest]:
        """Return the manifests of a step's images, by rank."""
        catalogs = [self.catalog(step, ref) for ref in self.index(step).catalogs]
        return [catalog.manifest(image.rank) for catalog in catalogs for image in catalog.images]

    def records(self, step: int) -> list[str]:
        """Return the names of a step's files that are neither image nor index."""
        index = self.index(step)
        return [ref.file for ref in index.catalogs] + ([EXTENTS] if index.extents_checksum else [])

    def wrong_catalogs(self, step: int) -> tuple[list[CatalogRef], list[tuple[str, CheckpointError]]]:
        """Return the good catalogs of a step; and, by file, the errors of the others and of the extents.

        An error of the step as a whole has an empty file name. Raises the error of an index that cannot be read.
        """
        index = self.index(step)
        good: list[CatalogRef] = []
        extents: list[BoxTable] = []
        wrong: list[tuple[str, CheckpointError]] = []
        for ref in index.catalogs:
            try:
                extents.append(self.catalog(step, ref).table.merged(ref.first_rank))
                good.append(ref)
            except CheckpointError as error:
                wrong.append((ref.file, error))
        try:
            if index.extents_checksum is not None:
                self.extents(step, index.extents_checksum)
        except CheckpointError as error:
            wrong.append((EXTENTS, error))
        try:
            manifests = sum(ref.ranks for ref in index.catalogs)
            if index.step != step:
                raise CorruptError(
                    f"the index is of step {index.step}: the folder was renamed. Give it its own name back."
                )
            if manifests != index.world_size:
                raise CorruptError(
                    f"{manifests} manifests for {index.world_size} ranks. Restore another step."
                )
            if not wrong:
                joined(extents).merged(0).require_whole()
        except CheckpointError as error:
            wrong.append(("", error))
        return good, wrong

    def forget_catalogs(self) -> None:
        """Clear the caches of catalogs and manifests, for storage in which a step was removed."""
        self._catalog.cache_clear()
        self._manifest.cache_clear()

    def _load_catalog(self, step: int, ref: CatalogRef) -> Catalog:
        """Read and verify a catalog; version 1 has a manifest in its place."""
        data, place = self._checked_bytes(step, ref.file, ref.checksum), self.place(step, ref.file)
        if ref.file.endswith(".json"):  # format 1: the manifest of one rank
            return catalog_of(decode_manifest(data, place))
        return decode_catalog(data, place)

    def _load_manifest(self, step: int, ref: CatalogRef, rank: int) -> Manifest:
        return self.catalog(step, ref).manifest(rank)

    def _checked_bytes(self, step: int, file: str, digits: str) -> bytes:
        """Return a file's bytes; raises CorruptError unless they match the checksum."""
        data = self.read_file(step, file)
        if checksum(data) != digits:
            raise CorruptError(
                f"{self.place(step, file)}: differs from its checksum in the index. Restore another step."
            )
        return data

    def _stored_boxes(
        self, catalog: Catalog, rank: int | None, needed: Sequence[Box] | None
    ) -> Iterator[StoredBox]:
        """Yield the boxes of a catalog, in image order: only those of ``rank``, and those that overlap ``needed``, if given."""
        table = catalog.table
        rows = np.arange(len(table)) if needed is None else table.overlapping(needed)
        if rank is not None:
            rows = rows[table.holder[rows] == rank]
        places: dict[int, BoxLocation] = {}
        for row in table.in_image_order(rows).tolist():
            holder = int(table.holder[row])
            place = places.setdefault(holder, BoxLocation(self.name, str(holder), self._distance))
            yield StoredBox(table.box(row), place)

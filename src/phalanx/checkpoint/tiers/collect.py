"""Gathers what the ranks have written into a draft on disk: in two levels, so that no rank's work grows with the fleet.

Every rank leaves its image and its manifest. The first of every ``catalog_ranks`` waits for the others of its group, joins their
manifests into a catalog, and leaves a summary of it: its checksum, and the rectangles that the group covers. Whoever commits does so
for the first group, then waits for the summaries: at 100,000 ranks 256 manifests and 390 summaries instead of 100,000 manifests. The
boxes of a rank are the same at every save, so what is worked out from them is kept: which rectangles they are, and that they cover
every tensor.
"""

from __future__ import annotations

import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from phalanx.checkpoint.format.blocks import storage_errors
from phalanx.checkpoint.format.box_table import encode_table, joined
from phalanx.checkpoint.format.boxes import Box
from phalanx.checkpoint.format.catalog import (
    Catalog,
    StoredImage,
    decode_catalog,
    encode_catalog,
    join_catalogs,
)
from phalanx.checkpoint.format.errors import AbandonedError, CorruptError
from phalanx.checkpoint.format.index import CatalogRef
from phalanx.checkpoint.format.manifest import checksum
from phalanx.run.directory.files import write_atomically

CATALOG_RANKS = 256
EXTENTS = "extents.catalog"
SUMMARIES = "summaries"
DELETING = ".deleting-"
"""The prefix of a folder that has been given up and is being removed."""
_SHORTEST_POLL_S, _LONGEST_POLL_S = 0.01, 0.5


@dataclass(frozen=True, slots=True)
class Patience:
    """How long others are waited for, and what ends the wait before."""

    timeout_s: float
    cancelled: Callable[[], bool]


class Collector:
    """Joins the manifests of a draft's ranks into catalogs of up to ``catalog_ranks``, and the catalogs into an index."""

    def __init__(self, catalog_ranks: int = CATALOG_RANKS) -> None:
        self.catalog_ranks = catalog_ranks
        self._withdrawn: deque[Path] = deque()
        # For one group and one checkpoint: the digests of the tables that were joined, and what came of them.
        self._group: tuple[tuple[int, ...], bytes, bytes] | None = None
        self._whole: tuple[tuple[int, ...], tuple[Box, ...], bytes] | None = None

    def image_folder(self, rank: int) -> str:
        """The folder of a rank's image within a step's: "" for the first group, so that small checkpoints have one folder."""
        first = rank - rank % self.catalog_ranks
        return f"ranks-{first:05d}" if first else ""

    def manifest_folder(self, rank: int) -> str:
        """The folder within a draft where a rank leaves its manifest."""
        return f"manifests-{rank - rank % self.catalog_ranks:05d}"

    def leads(self, rank: int) -> bool:
        """True if ``rank`` joins the manifests of its group."""
        return rank % self.catalog_ranks == 0

    def collect(self, folder: Path, first: int, world_size: int, patience: Patience) -> Catalog:
        """Writes the catalog of the group that ``first`` leads, removes its manifests, and returns the catalog's summary."""
        place = folder / self.manifest_folder(first)
        ranks = range(first, min(first + self.catalog_ranks, world_size))
        wanted = {_manifest_name(rank): rank for rank in ranks}
        _await_files(folder, place, wanted, f"{len(ranks)} ranks", patience)
        members: list[Catalog] = []
        for name in wanted:
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
        """Tells whoever commits what ``collect`` has found."""
        with storage_errors(folder, 1):
            (folder / SUMMARIES).mkdir(exist_ok=True)
        write_record(folder / SUMMARIES / _summary_name(summary.images[0].rank), encode_catalog(summary))

    def gather(
        self, folder: Path, world_size: int, required: Sequence[Box], patience: Patience
    ) -> tuple[tuple[CatalogRef, ...], str | None]:
        """Collects the first group, waits for the summaries of the others, and makes sure that nothing is missing.

        Returns the catalogs, and the checksum of the extents, which are written where there are several catalogs.
        """
        summaries = [self.collect(folder, 0, world_size, patience)]
        wanted = {
            _summary_name(first): first for first in range(self.catalog_ranks, world_size, self.catalog_ranks)
        }
        _await_files(
            folder,
            folder / SUMMARIES,
            wanted,
            f"{len(wanted)} ranks that collect others' shares",
            patience,
        )
        for name in wanted:
            path = folder / SUMMARIES / name
            with storage_errors(path):
                summaries.append(decode_catalog(path.read_bytes(), str(path)))
        extents = self._proven(summaries, tuple(required))
        refs = tuple(self._ref(summary.images[0], world_size) for summary in summaries)
        if not wanted:
            return refs, None
        data = encode_catalog(join_catalogs(summaries, extents))
        write_record(folder / EXTENTS, data)
        self._withdraw(folder / SUMMARIES)
        return refs, checksum(data)

    def clear_away(self) -> None:
        """Removes the manifests and summaries that are in catalogs now; nobody waits for that."""
        while self._withdrawn:
            with suppress(IndexError):  # another thread of this process
                shutil.rmtree(self._withdrawn.popleft(), ignore_errors=True)

    def _withdraw(self, place: Path) -> None:
        """Takes a folder out of the draft, at once."""
        draft = place.parent
        gone = draft.parent / f"{DELETING}{draft.name.lstrip('.')}-{place.name}-{time.monotonic_ns()}"
        with storage_errors(place, 1):
            os.rename(place, gone)
        self._withdrawn.append(gone)

    def _ref(self, catalog: StoredImage, world_size: int) -> CatalogRef:
        ranks = min(self.catalog_ranks, world_size - catalog.rank)
        return CatalogRef(
            catalog.rank, ranks, catalog.file, f"{int(catalog.checksums[0]):016x}", catalog.nbytes
        )

    def _tables_of(self, members: Sequence[Catalog], first: int) -> tuple[bytes, bytes]:
        """The table of all members, and the rectangles that they cover together."""
        digests = tuple(member.table_digest for member in members)
        known = self._group
        if known is None or known[0] != digests:
            table = joined([member.table for member in members])
            known = self._group = digests, encode_table(table), encode_table(table.merged(first))
        return known[1], known[2]

    def _proven(self, summaries: Sequence[Catalog], required: tuple[Box, ...]) -> bytes:
        """The rectangles of all catalogs; raises NotCoveredError unless they cover every tensor, and ``required``."""
        digests = tuple(summary.table_digest for summary in summaries)
        known = self._whole
        if known is None or known[:2] != (digests, required):
            table = joined([summary.table for summary in summaries])
            table.merged(0).require_whole(required)
            known = self._whole = digests, required, encode_table(table)
        return known[2]


def leave_manifest(place: Path, catalog: Catalog) -> None:
    """Writes a rank's manifest, durable, for whoever collects it: where it is, all of the rank's bytes are."""
    (image,) = catalog.images
    with storage_errors(place, 1):
        place.mkdir(exist_ok=True)
    write_record(place / _manifest_name(image.rank), encode_catalog(catalog))


def leave_failure(folder: Path, rank: int, reason: str) -> None:
    """Tells whoever waits for ``rank`` that it cannot deliver."""
    (folder / f"rank-{rank:05d}.failed").write_text(reason)


def require_size(path: Path, nbytes: int) -> None:
    """Raises CorruptError unless the file has ``nbytes`` bytes, MissingFileError where it is not there."""
    with storage_errors(path):
        size = path.stat().st_size
    if size != nbytes:
        raise wrong_size(str(path), size, nbytes)


def wrong_size(place: str, found_bytes: int, nbytes: int) -> CorruptError:
    """The error for an image that is not as large as its manifest says."""
    return CorruptError(
        f"{place}: {found_bytes:,} bytes; its manifest says {nbytes:,}. Restore another step."
    )


def write_record(path: Path, content: bytes) -> None:
    """Writes a small file, durable and at once."""
    with storage_errors(path, len(content)):
        write_atomically(path, content)


def _manifest_name(rank: int) -> str:
    return f"rank-{rank:05d}.manifest"


def _summary_name(first: int) -> str:
    return f"ranks-{first:05d}.summary"


def _await_files(folder: Path, place: Path, wanted: Mapping[str, int], whom: str, patience: Patience) -> None:
    """Waits until all ``wanted`` files, by name with the rank that writes each, are in ``place``.

    Raises AbandonedError where a rank has said in ``folder`` that it cannot, where the wait is cancelled or takes too long.
    """
    deadline = time.monotonic() + patience.timeout_s
    pause_s = _SHORTEST_POLL_S
    while True:
        with storage_errors(folder, 1):
            told = os.listdir(folder)
            names = set(os.listdir(place)) if place.name in told else set[str]()
        failed = sorted(name for name in told if name.endswith(".failed"))
        if failed:
            reason = (folder / failed[0]).read_text(errors="replace")
            raise AbandonedError(f"{folder.name}: {Path(failed[0]).stem} could not write its share: {reason}")
        absent = [rank for name, rank in wanted.items() if name not in names]
        if not absent:
            return
        if patience.cancelled():
            raise AbandonedError(f"{folder.name}: the save was cancelled")
        if time.monotonic() > deadline:
            raise AbandonedError(
                f"{folder.name}: {len(absent)} of {whom} have not written after {patience.timeout_s} s "
                f"(first: {absent[:8]}). They died or their storage is slow; the older checkpoints are intact."
            )
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.5, _LONGEST_POLL_S)

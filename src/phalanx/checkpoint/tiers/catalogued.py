"""Committed steps that are described by an index and catalogs, wherever their files lie: what all such tiers do alike.

A place gives bytes by the step's file names (``StepFiles``); here they are checked and decoded, in the order in which each is under a
checksum of the one before: index, catalogs, blocks of images.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import groupby
from typing import Protocol

import numpy as np

from phalanx.checkpoint.format.box_table import BoxTable, joined
from phalanx.checkpoint.format.boxes import Box
from phalanx.checkpoint.format.catalog import Catalog, catalog_of, decode_catalog
from phalanx.checkpoint.format.errors import CheckpointError, CorruptError
from phalanx.checkpoint.format.image import ByteArray, RawArray
from phalanx.checkpoint.format.index import CatalogRef, Index
from phalanx.checkpoint.format.manifest import Manifest, checksum, decode_manifest
from phalanx.checkpoint.format.parts import read_parts
from phalanx.checkpoint.format.restore_plan import BoxLocation, Held, PlannedRead
from phalanx.checkpoint.tiers.collect import EXTENTS


class StepFiles(Protocol):
    """A place of committed steps, by the names of their files. Every method raises a CheckpointError where the place fails."""

    def index(self, step: int) -> Index:
        """The index of a committed step. Raises NoSuchStepError, CorruptError, FormatVersionError."""
        ...

    def index_bytes(self, step: int) -> bytes:
        """The encoded index. Raises NoSuchStepError."""
        ...

    def place(self, step: int, file: str) -> str:
        """The path or URL of a step's file, for messages; of its index where ``file`` is empty."""
        ...

    def read_file(self, step: int, file: str) -> bytes:
        """A small file of the step. Raises MissingFileError."""
        ...

    def blocks(self, step: int, manifest: Manifest, numbers: Sequence[int]) -> Iterator[ByteArray]:
        """Blocks of an image in turn, checked; a block is valid until the next one is asked for."""
        ...

    def damage(self, step: int, manifest: Manifest) -> Iterator[tuple[int, CheckpointError | None]]:
        """Reads a whole image back: yields how many of its bytes have been looked at, with what is wrong with the last of them."""
        ...


class CatalogReader:
    """Looks into the committed steps of ``files``; boxes are said to be at ``distance`` in the tier ``name``."""

    def __init__(self, files: StepFiles, name: str, distance: int) -> None:
        self._files = files
        self._name = name
        self._distance = distance
        # Committed steps never change; a restore reads the same catalogs twice (to plan, to read), in the order of ranks.
        self._catalog = lru_cache(maxsize=64)(self._load_catalog)
        self._manifest = lru_cache(maxsize=256)(self._load_manifest)

    def catalog(self, step: int, ref: CatalogRef) -> Catalog:
        """A catalog that the step's index names, checked. Raises CorruptError, MissingFileError."""
        return self._catalog(step, ref)

    def extents(self, step: int, digits: str) -> Catalog:
        """Which catalogs hold what: the rectangles of each, under the number of its first rank. Raises as ``catalog`` does."""
        return decode_catalog(self._checked_bytes(step, EXTENTS, digits), self._files.place(step, EXTENTS))

    def boxes(self, step: int, rank: int | None, needed: Sequence[Box] | None) -> tuple[Held, ...]:
        """As ``ReadableTier.boxes``."""
        index = self._files.index(step)
        refs = index.catalogs
        if rank is not None:
            refs = tuple(ref for ref in refs if ref.first_rank <= rank < ref.first_rank + ref.ranks)
        elif needed is not None and index.extents_checksum is not None:
            extents = self.extents(step, index.extents_checksum).table
            firsts = set(extents.holder[extents.overlapping(needed)].tolist())
            refs = tuple(ref for ref in refs if ref.first_rank in firsts)
        return tuple(held for ref in refs for held in self._held(self.catalog(step, ref), rank, needed))

    def read(self, step: int, reads: Sequence[PlannedRead]) -> Iterator[tuple[Box, RawArray]]:
        """As ``ReadableTier.read``."""
        refs = self._files.index(step).catalogs
        firsts = [ref.first_rank for ref in refs]
        for holder, group in groupby(reads, key=lambda read: read.source.location.holder):
            ref = refs[bisect_right(firsts, int(holder)) - 1]
            manifest = self._manifest(step, ref, int(holder))
            yield from read_parts(manifest, list(group), partial(self._files.blocks, step, manifest))

    def images(self, step: int) -> list[Manifest]:
        """The manifests of a step's images, by rank."""
        catalogs = [self.catalog(step, ref) for ref in self._files.index(step).catalogs]
        return [catalog.manifest(image.rank) for catalog in catalogs for image in catalog.images]

    def records(self, step: int) -> list[str]:
        """The names of a step's files that are neither image nor index."""
        index = self._files.index(step)
        return [ref.file for ref in index.catalogs] + ([EXTENTS] if index.extents_checksum else [])

    def wrong_catalogs(self, step: int) -> tuple[list[CatalogRef], list[tuple[str, CheckpointError]]]:
        """The good catalogs of a step; and, by file, what is wrong with the others and with the extents."""
        index = self._files.index(step)
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
            _require_whole(index.step, step, index.world_size, sum(ref.ranks for ref in index.catalogs))
            if not wrong:
                joined(extents).merged(0).require_whole()
        except CheckpointError as error:
            wrong.append(("", error))
        return good, wrong

    def _load_catalog(self, step: int, ref: CatalogRef) -> Catalog:
        data, place = self._checked_bytes(step, ref.file, ref.checksum), self._files.place(step, ref.file)
        if ref.file.endswith(".json"):  # format 1: the manifest of one rank
            return catalog_of(decode_manifest(data, place))
        return decode_catalog(data, place)

    def _load_manifest(self, step: int, ref: CatalogRef, rank: int) -> Manifest:
        return self.catalog(step, ref).manifest(rank)

    def _checked_bytes(self, step: int, file: str, digits: str) -> bytes:
        data = self._files.read_file(step, file)
        if checksum(data) != digits:
            raise CorruptError(
                f"{self._files.place(step, file)}: differs from its checksum in the index. Restore another step."
            )
        return data

    def _held(self, catalog: Catalog, rank: int | None, needed: Sequence[Box] | None) -> Iterator[Held]:
        table = catalog.table
        rows = np.arange(len(table)) if needed is None else table.overlapping(needed)
        if rank is not None:
            rows = rows[table.holder[rows] == rank]
        places: dict[int, BoxLocation] = {}
        for row in table.in_image_order(rows).tolist():
            holder = int(table.holder[row])
            place = places.setdefault(holder, BoxLocation(self._name, str(holder), self._distance))
            yield Held(table.box(row), place)


def look_through(
    manifest: Manifest, blocks: Callable[[Sequence[int]], Iterator[ByteArray]], there: int
) -> Iterator[tuple[int, CheckpointError | None]]:
    """``StepFiles.damage`` of an image of which ``there`` blocks are there. ``blocks`` reads ahead; after a bad block it begins again behind it."""
    number = 0
    while number < there:
        problem: CheckpointError | None = None
        try:
            for _ in blocks(range(number, there)):
                number += 1
                yield min(number * manifest.block_bytes, manifest.nbytes), None
        except CheckpointError as error:
            problem = error
            number += 1
        if problem is not None:
            yield min(number * manifest.block_bytes, manifest.nbytes), problem
            if not isinstance(problem, CorruptError):
                return


def _require_whole(recorded_step: int, step: int, world_size: int, manifests: int) -> None:
    if recorded_step != step:
        raise CorruptError(
            f"the index is of step {recorded_step}: the folder was renamed. Give it its own name back."
        )
    if manifests != world_size:
        raise CorruptError(f"{manifests} manifests for {world_size} ranks. Restore another step.")

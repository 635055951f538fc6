"""Read the documents of a portion, and find duplicates among them: the stages ``read``, ``exact``, ``near`` and ``cluster``.

``read`` keeps the documents of a portion after their steps, and writes what they are compared by, divided into ranges of the keys. A task of ``exact`` or
``near`` looks at one range of the keys of all portions, so nothing is ever shuffled but files. ``cluster`` joins what they found into the list of those to leave
out: of documents that are equal or similar, all but the one in the lowest portion, and there the first.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

from phalanx.data.dedup import (
    HASH_DTYPE,
    all_but_the_first,
    band_dtype,
    band_rows,
    hash_of,
    later_copies,
    normal_form,
    signature,
    similar_pairs,
)
from phalanx.data.errors import CorpusError, PreparationError
from phalanx.data.formats.compressed import Compression
from phalanx.data.formats.document import BadDocument, Document, ReadOptions
from phalanx.data.formats.read import Format, Kind, documents
from phalanx.data.formats.tables import columns_read
from phalanx.data.portions.planning.plan import PREPARATION, Piece, PreparationPlan, bring_parquet_footer
from phalanx.data.portions.planning.raw_files import LocalBytes, require_unchanged, scratch_folder
from phalanx.data.portions.planning.recipe import read_options
from phalanx.data.portions.tasks import Stage, TaskManifest, Workplace
from phalanx.data.steps.step import Dropped, through_steps

# Documents of a portion, read from its raw files and taken through its steps.
#
# Each file is compared with the listing before and after it is read, so that a file that is changed midway ends the task before its manifest.


@dataclass(frozen=True)
class KeptDocument(Document):
    """A document of a portion."""

    piece: int
    """Number of the piece of the portion that it was read from."""


def read_portion(plan: PreparationPlan, number: int) -> Iterator[tuple[int, Document | None]]:
    """(number of the piece in the portion, document) in order; ``None`` in place of one that is bad and only counted.

    Raises ``PreparationError`` for a bad one whose source says so, and for a file that is not the one that was planned.
    """
    for at, piece in enumerate(plan.portions[number]):
        file = plan.files[piece.file]
        stops = plan.recipe.source[file.source].on_bad == "stop"
        require_unchanged(file)
        for document in _documents(plan, piece):
            if isinstance(document, Document):
                yield at, document
            elif stops:
                require_unchanged(file)
                where = f"{document.place} of {file.url}" if document.place else file.url
                raise PreparationError(
                    f'portion {number}: {where} {document.reason}; mend it and plan again, or write source.on_bad = "skip" and plan again'
                )
            else:
                yield at, None
        require_unchanged(file)


def _documents(plan: PreparationPlan, piece: Piece) -> Iterator[Document | BadDocument]:
    file, form = plan.files[piece.file], plan.formats[piece.file]
    options = read_options(plan.recipe, file.source)
    with scratch_folder("phalanx-portion-") as scratch:
        local = LocalBytes(file, scratch)
        try:
            _bring(local, piece, form, file.nbytes, options)
            for found in documents(local.path, file.name, form, piece.span, options):
                if (
                    isinstance(found, BadDocument)
                    and local.is_copy
                    and form.kind is Kind.JSONL
                    and piece.span.start
                ):
                    # Its line's number counts lines that are not here.
                    local.bring(0, piece.span.start)
                    again = documents(local.path, file.name, form, piece.span, options)
                    yield next((bad for bad in again if isinstance(bad, BadDocument)), found)
                else:
                    yield found
        except CorpusError as error:
            raise PreparationError(local.named(str(error))) from error


def _bring(local: LocalBytes, piece: Piece, form: Format, nbytes: int, options: ReadOptions) -> None:
    if not local.is_copy:
        return
    span = piece.span
    if form == Format(Kind.JSONL, Compression.NONE):
        local.bring(max(0, span.start - 1), span.stop)
        # The line that begins within the span may end behind it; and its last byte may be the end of a line.
        local.bring_line_end(span.stop - 1)
    elif form.kind is Kind.PARQUET:
        import pyarrow.parquet as pq

        local.bring(0, 4)
        local.bring(max(0, nbytes - 8), nbytes)
        bring_parquet_footer(local, nbytes)
        metadata = pq.read_metadata(local.path)
        wanted = {
            name.partition(".")[0] for name in columns_read(options, metadata.schema.to_arrow_schema().names)
        }
        for group in range(span.start, span.stop):
            for column in range(metadata.num_columns):
                chunk = metadata.row_group(group).column(column)
                # Of messages, the columns of their fields: messages.list.element.role and the like.
                if chunk.path_in_schema.partition(".")[0] not in wanted:
                    continue
                start = min(chunk.data_page_offset, chunk.dictionary_page_offset or chunk.data_page_offset)
                local.bring(start, start + chunk.total_compressed_size)
    else:
        local.bring(0, nbytes)


def stepped_documents(
    place: Workplace, number: int, manifest: TaskManifest | None = None
) -> Iterator[KeptDocument]:
    """The documents of a portion that its steps keep, in order. What was read and dropped is counted in ``manifest``, by reason."""
    counts: dict[str, int] = {} if manifest is None else manifest.counts
    counts["documents read"] = 0
    for piece, document in read_portion(place.plan, number):
        counts["documents read"] += 1
        outcome = Dropped("bad") if document is None else through_steps(document, place.plan.recipe.step)
        if isinstance(outcome, Document) and not outcome.text:
            outcome = Dropped("empty")
        if isinstance(outcome, Document):
            _require_characters(outcome)
            yield KeptDocument(outcome.name, outcome.text, piece)
        else:
            counts[f"dropped: {outcome.reason}"] = counts.get(f"dropped: {outcome.reason}", 0) + 1


def _require_characters(document: Document) -> None:
    try:
        document.text.encode()
    except UnicodeEncodeError as error:
        raise PreparationError(
            f"document {document.name} cannot be written as UTF-8 after its steps: {error}"
        ) from error


READ, EXACT, NEAR, CLUSTER = "read", "exact", "near", "cluster"
_CHUNK_CHARACTERS = 1 << 26
_MOST_RANGES = 256
_PORTIONS_OF_A_RANGE = 16
_PORTIONS_OF_A_LIST = 64
_READ_AT_ONCE = 16
_LOSER_DTYPE = np.dtype([("place", "<u8"), ("near", "u1")])


def ranges_of(plan: PreparationPlan) -> int:
    """Into how many ranges keys are divided: so many that one fits into a worker's memory."""
    return min(_MOST_RANGES, -(-len(plan.portions) // _PORTIONS_OF_A_RANGE))


def duplicate_stages(plan: PreparationPlan) -> list[Stage]:
    """The stages that find the duplicates of a plan; none if that is not asked for."""
    dedup = plan.recipe.dedup
    if dedup is None:
        return []
    ranges = ranges_of(plan)
    return [
        Stage(READ, len(plan.portions)),
        *([Stage(EXACT, ranges)] if dedup.exact else []),
        *([Stage(NEAR, ranges)] if dedup.near is not None else []),
        Stage(CLUSTER, 1),
    ]


def read_and_sketch(place: Workplace, number: int) -> None:
    """Do the task ``number`` of the stage ``read``."""
    manifest = place.new_manifest(READ, number)
    dedup = place.plan.recipe.dedup
    assert dedup is not None
    hashes: list[tuple[int, int, int]] = []
    bands: list[NDArray[np.void]] = []
    rows: list[str] = []
    characters = chunks = 0
    for ordinal, document in enumerate(stepped_documents(place, number, manifest)):
        rows.append(json.dumps([document.piece, document.name, document.text], ensure_ascii=False))
        characters += len(document.text)
        normal = normal_form(document.text)
        hashes.append((*hash_of(normal), ordinal))
        if (near := dedup.near) is not None:
            values = signature(normal, near.bands * near.rows, near.ngram)
            bands.append(band_rows(values, ordinal, near.bands, near.rows))
        if characters >= _CHUNK_CHARACTERS:
            place.put_packed(manifest, _chunk(number, chunks), "\n".join(rows).encode())
            rows, characters, chunks = [], 0, chunks + 1
    if rows:
        place.put_packed(manifest, _chunk(number, chunks), "\n".join(rows).encode())
        chunks += 1
    manifest.facts["chunks"] = chunks
    ranges = ranges_of(place.plan)
    if dedup.exact:
        manifest.facts[EXACT] = _put_ranges(
            place, manifest, EXACT, np.array(hashes, dtype=HASH_DTYPE), ranges
        )
    if dedup.near is not None:
        empty = np.empty(0, dtype=band_dtype(dedup.near.bands * dedup.near.rows))
        manifest.facts[NEAR] = _put_ranges(place, manifest, NEAR, np.concatenate([empty, *bands]), ranges)
    place.commit(manifest)


def find_exact(place: Workplace, number: int) -> None:
    """Do the task ``number`` of the stage ``exact``."""
    manifest = place.new_manifest(EXACT, number)
    entries, places = _range(place, EXACT, number, HASH_DTYPE)
    place.put_packed(manifest, f"{number:05d}", later_copies(entries, places).astype("<u8").tobytes())
    place.commit(manifest)


def find_near(place: Workplace, number: int) -> None:
    """Do the task ``number`` of the stage ``near``."""
    manifest = place.new_manifest(NEAR, number)
    near = place.plan.recipe.dedup.near if place.plan.recipe.dedup else None
    assert near is not None
    permutations = near.bands * near.rows
    entries, places = _range(place, NEAR, number, band_dtype(permutations))
    pairs = similar_pairs(entries, places, permutations, near.least_similarity)
    place.put_packed(manifest, f"{number:05d}", pairs.astype("<u8").tobytes())
    place.commit(manifest)


def join_clusters(place: Workplace, number: int) -> None:
    """Do the only task of the stage ``cluster``."""
    manifest = place.new_manifest(CLUSTER, number)
    found = {stage.name: stage for stage in duplicate_stages(place.plan)}
    copies = _joined(place, found[EXACT]) if EXACT in found else np.empty(0, dtype=np.uint64)
    pairs = _joined(place, found[NEAR]) if NEAR in found else np.empty(0, dtype=np.uint64)
    similar = all_but_the_first(pairs.reshape(-1, 2)) if len(pairs) else pairs
    losers = np.empty(0, dtype=_LOSER_DTYPE)
    # A document that is both is counted as an exact copy.
    for places, near in ((np.unique(copies), 0), (np.setdiff1d(similar, copies), 1)):
        part = np.zeros(len(places), dtype=_LOSER_DTYPE)
        part["place"], part["near"] = places, near
        losers = np.concatenate([losers, part])
    losers = losers[np.argsort(losers["place"])]
    groups = (losers["place"] >> np.uint64(32)) // np.uint64(_PORTIONS_OF_A_LIST)
    for group in range(-(-len(place.plan.portions) // _PORTIONS_OF_A_LIST)):
        place.put_packed(manifest, f"{group:05d}", losers[groups == group].tobytes())
    place.commit(manifest)


def without_duplicates(
    place: Workplace, number: int, manifest: TaskManifest | None
) -> Iterator[KeptDocument]:
    """The documents that ``read`` kept of a portion and that are no copies; what was dropped, there and here, is counted in ``manifest``."""
    read = _done(place, READ, number)
    counts: dict[str, int] = {} if manifest is None else manifest.counts
    counts.update(read.counts)
    losers = _losers(place, number)
    ordinal = -1
    objects = {written.key: written for written in read.objects}
    for chunk in range(read.facts["chunks"]):
        text = place.get_packed(objects[f"{PREPARATION}/{READ}/{_chunk(number, chunk)}"]).decode()
        for line in text.split("\n"):
            ordinal += 1
            if ordinal in losers:
                reason = "dropped: near duplicate" if losers[ordinal] else "dropped: duplicate"
                counts[reason] = counts.get(reason, 0) + 1
            else:
                piece, name, text = json.loads(line)
                yield KeptDocument(name, text, piece)


def _losers(place: Workplace, number: int) -> dict[int, bool]:
    group = _done(place, CLUSTER, 0).objects[number // _PORTIONS_OF_A_LIST]
    found = np.frombuffer(place.get_packed(group), dtype=_LOSER_DTYPE)
    mine = found[found["place"] >> np.uint64(32) == number]
    ordinals = (mine["place"] & np.uint64(0xFFFFFFFF)).tolist()
    return dict(zip(ordinals, (mine["near"] == 1).tolist(), strict=True))


def _done(place: Workplace, stage: str, task: int) -> TaskManifest:
    manifest = place.manifest(stage, task)
    if manifest is None:
        raise PreparationError(f"task {task} of stage {stage} is not done; give the same command again")
    return manifest


def _chunk(number: int, chunk: int) -> str:
    return f"{number:05d}-texts-{chunk:03d}"


def _put_ranges(
    place: Workplace, manifest: TaskManifest, kind: str, entries: NDArray[np.void], ranges: int
) -> list[tuple[int, int, str]]:
    """Write the entries in order of their ranges; returns where each range begins and ends, and its checksum."""
    number = _range_of(entries["key"], ranges)
    order = np.argsort(number, kind="stable")
    data = memoryview(entries[order].tobytes())
    bounds = (np.searchsorted(number[order], np.arange(ranges + 1)) * entries.itemsize).tolist()
    place.put(manifest, _keys_object(kind, manifest.task), data)
    return [(a, b, xxhash.xxh3_64_hexdigest(data[a:b])) for a, b in itertools.pairwise(bounds)]


def _range_of(keys: NDArray[np.uint64], ranges: int) -> NDArray[np.int64]:
    return (keys >> np.uint64(56)).astype(np.int64) * ranges >> 8


def _range(
    place: Workplace, kind: str, number: int, dtype: np.dtype[np.void]
) -> tuple[NDArray[np.void], NDArray[np.uint64]]:
    """All entries of a range of keys, of all portions, and their places: portion in the upper, ordinal in the lower 32 bits."""

    def of_portion(portion: int) -> NDArray[np.void]:
        start, stop, checksum = _done(place, READ, portion).facts[kind][number]
        data = place.store.ranges(_keys_object(kind, portion), [(start, stop)])[0] if stop > start else b""
        if xxhash.xxh3_64_hexdigest(data) != checksum:
            raise PreparationError(
                f"{place.url}/{_keys_object(kind, portion)} is not what was written; prepare again with another --out"
            )
        return np.frombuffer(data, dtype=dtype)

    with ThreadPoolExecutor(_READ_AT_ONCE) as pool:
        parts = list(pool.map(of_portion, range(len(place.plan.portions))))
    places = [
        np.uint64(portion << 32) + part["ordinal"].astype(np.uint64) for portion, part in enumerate(parts)
    ]
    return np.concatenate(parts), np.concatenate(places)


def _joined(place: Workplace, stage: Stage) -> NDArray[np.uint64]:
    manifests: Sequence[TaskManifest] = place.manifests(stage)
    return np.concatenate(
        [np.frombuffer(place.get_packed(manifest.objects[0]), dtype="<u8") for manifest in manifests]
    )


def _keys_object(kind: str, portion: int) -> str:
    return f"{PREPARATION}/{READ}/{portion:05d}-{kind}"

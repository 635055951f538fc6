"""Find duplicates: the stages ``read``, ``exact``, ``near`` and ``cluster``.

``read`` stores a portion's documents after their steps, and their comparison keys divided into ranges. A task of ``exact`` or ``near`` compares one
range of keys across all portions, so only files are exchanged. ``cluster`` joins the results into the list of documents to drop: of equal
or similar documents, all except the first one in the lowest portion.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

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
from phalanx.data.errors import PreparationError
from phalanx.data.portions.planning.plan import PREPARATION, PreparationPlan
from phalanx.data.portions.read_portion import KeptDocument, stepped_documents
from phalanx.data.portions.tasks import Stage, TaskManifest, Workplace

READ, EXACT, NEAR, CLUSTER = "read", "exact", "near", "cluster"
_CHUNK_CHARACTERS = 1 << 26
_MOST_RANGES = 256
_PORTIONS_OF_A_RANGE = 16
_PORTIONS_OF_A_LIST = 64
_READ_AT_ONCE = 16
_LOSER_DTYPE = np.dtype([("place", "<u8"), ("near", "u1")])


def ranges_of(plan: PreparationPlan) -> int:
    """Return the number of key ranges, chosen so that one range fits into a worker's memory."""
    return min(_MOST_RANGES, -(-len(plan.portions) // _PORTIONS_OF_A_RANGE))


def duplicate_stages(plan: PreparationPlan) -> list[Stage]:
    """Return the stages that find a plan's duplicates: ``read``, ``exact`` and ``near`` if chosen, ``cluster``.

    Empty without deduplication.
    """
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
    """Run task ``number`` of the stage ``read``: store the portion's documents after its steps, and their hashes.

    Documents are stored in compressed chunks. Hashes, and MinHash bands for near duplicates, are sorted by ranges of
    keys. Commits the manifest.
    """
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
    """Run task ``number`` of the stage ``exact``: store the places of later copies in one range of hashes, and commit
    the manifest.
    """
    manifest = place.new_manifest(EXACT, number)
    entries, places = _range(place, EXACT, number, HASH_DTYPE)
    place.put_packed(manifest, f"{number:05d}", later_copies(entries, places).astype("<u8").tobytes())
    place.commit(manifest)


def find_near(place: Workplace, number: int) -> None:
    """Run task ``number`` of the stage ``near``: store pairs of places of similar documents in one range of bands,
    and commit the manifest.
    """
    manifest = place.new_manifest(NEAR, number)
    near = place.plan.recipe.dedup.near if place.plan.recipe.dedup else None
    assert near is not None
    permutations = near.bands * near.rows
    entries, places = _range(place, NEAR, number, band_dtype(permutations))
    pairs = similar_pairs(entries, places, permutations, near.least_similarity)
    place.put_packed(manifest, f"{number:05d}", pairs.astype("<u8").tobytes())
    place.commit(manifest)


def write_dropped_documents(place: Workplace, number: int) -> None:
    """Write the lists of documents to drop as duplicates, by group of portions, and commit the manifest.

    The only task of the stage ``cluster``. Of each cluster, the first document stays. One that is both an exact and a
    near duplicate is listed as exact.
    """
    manifest = place.new_manifest(CLUSTER, number)
    stages = {stage.name: stage for stage in duplicate_stages(place.plan)}
    copies = _joined(place, stages[EXACT]) if EXACT in stages else np.empty(0, dtype=np.uint64)
    pairs = _joined(place, stages[NEAR]) if NEAR in stages else np.empty(0, dtype=np.uint64)
    similar = all_but_the_first(pairs.reshape(-1, 2)) if len(pairs) else pairs
    dropped = np.empty(0, dtype=_LOSER_DTYPE)
    for places, near in ((np.unique(copies), 0), (np.setdiff1d(similar, copies), 1)):
        part = np.zeros(len(places), dtype=_LOSER_DTYPE)
        part["place"], part["near"] = places, near
        dropped = np.concatenate([dropped, part])
    dropped = dropped[np.argsort(dropped["place"])]
    groups = (dropped["place"] >> np.uint64(32)) // np.uint64(_PORTIONS_OF_A_LIST)
    for group in range(-(-len(place.plan.portions) // _PORTIONS_OF_A_LIST)):
        place.put_packed(manifest, f"{group:05d}", dropped[groups == group].tobytes())
    place.commit(manifest)


def without_duplicates(
    place: Workplace, number: int, manifest: TaskManifest | None
) -> Iterator[KeptDocument]:
    """Yield the documents of a portion that ``read`` kept and that are not duplicates. ``manifest`` counts all dropped documents."""
    read = place.required_manifest(READ, number)
    counts: dict[str, int] = {} if manifest is None else manifest.counts
    counts.update(read.counts)
    dropped = _losers(place, number)
    ordinal = -1
    objects = {written.key: written for written in read.objects}
    for chunk in range(read.facts["chunks"]):
        text = place.get_packed(objects[f"{PREPARATION}/{READ}/{_chunk(number, chunk)}"]).decode()
        for line in text.split("\n"):
            ordinal += 1
            if ordinal in dropped:
                reason = "dropped: near duplicate" if dropped[ordinal] else "dropped: duplicate"
                counts[reason] = counts.get(reason, 0) + 1
            else:
                piece, name, text = json.loads(line)
                yield KeptDocument(name, text, piece)


def _losers(place: Workplace, number: int) -> dict[int, bool]:
    """Return the portion's documents to drop, by ordinal: True for a near duplicate, False for an exact one."""
    group = place.required_manifest(CLUSTER, 0).objects[number // _PORTIONS_OF_A_LIST]
    entries = np.frombuffer(place.get_packed(group), dtype=_LOSER_DTYPE)
    own_entries = entries[entries["place"] >> np.uint64(32) == number]
    ordinals = (own_entries["place"] & np.uint64(0xFFFFFFFF)).tolist()
    return dict(zip(ordinals, (own_entries["near"] == 1).tolist(), strict=True))


def _chunk(number: int, chunk: int) -> str:
    return f"{number:05d}-texts-{chunk:03d}"


def _put_ranges(
    place: Workplace, manifest: TaskManifest, kind: str, entries: NDArray[np.void], ranges: int
) -> list[tuple[int, int, str]]:
    """Store the entries, grouped into ``ranges`` ranges of their keys, as one object of the task. Within a range they
    keep their order. Return the first byte, the end and the checksum of each range.
    """
    number = (entries["key"] >> np.uint64(56)).astype(np.int64) * ranges >> 8
    order = np.argsort(number, kind="stable")
    data = memoryview(entries[order].tobytes())
    bounds = (np.searchsorted(number[order], np.arange(ranges + 1)) * entries.itemsize).tolist()
    place.put(manifest, _keys_object(kind, manifest.task), data)
    return [(a, b, xxhash.xxh3_64_hexdigest(data[a:b])) for a, b in itertools.pairwise(bounds)]


def _range(
    place: Workplace, kind: str, number: int, dtype: np.dtype[np.void]
) -> tuple[NDArray[np.void], NDArray[np.uint64]]:
    """Return all portions' entries in a range of keys, and their places: the portion in the upper and the ordinal in
    the lower 32 bits. Raises ``PreparationError`` if a portion's bytes differ from their checksum.
    """

    def of_portion(portion: int) -> NDArray[np.void]:
        """Return the entries of one portion. Raises ``PreparationError`` if they are not what was written."""
        start, stop, checksum = place.required_manifest(READ, portion).facts[kind][number]
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
    """Return the numbers (uint64) that all tasks of a stage have stored, joined in the order of tasks. Raises
    ``PreparationError`` if a task is not done.
    """
    manifests: Sequence[TaskManifest] = place.manifests(stage)
    return np.concatenate(
        [np.frombuffer(place.get_packed(manifest.objects[0]), dtype="<u8") for manifest in manifests]
    )


def _keys_object(kind: str, portion: int) -> str:
    return f"{PREPARATION}/{READ}/{portion:05d}-{kind}"

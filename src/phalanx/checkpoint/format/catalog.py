"""Catalogs: the manifests of consecutive ranks in one file, so that a checkpoint of N ranks has N / 256 of them.

A rank writes a catalog of one image, its own manifest. The first of every 256 ranks joins theirs into one, and says in a summary
what it has found: the joined catalog's checksum, and the rectangles that its ranks cover together. A summary is a catalog too, with
catalogs in place of images; so are the extents of a checkpoint, the summaries of all its catalogs together, which tell a reader which
catalogs to open. Whoever commits reads N / 256 summaries and no manifest.

In bytes: a line of JSON with the images, the table of boxes (``box_table.py``), the checksums of all blocks as 64-bit integers, and the
xxh3_64 of all this. The table is the same at every step, so it is encoded once.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import xxhash

from phalanx.checkpoint.format.box_table import BoxTable, decode_table, encode_table, joined, table_of
from phalanx.checkpoint.format.errors import CorruptError, FormatVersionError
from phalanx.checkpoint.format.image import ImageEntry
from phalanx.checkpoint.format.manifest import Manifest

CATALOG_VERSION = 1
_SEAL_BYTES = 8


@dataclass(frozen=True, slots=True)
class StoredImage:
    """The file of ``rank``, of ``nbytes`` bytes in blocks of ``block_bytes``, with the checksum of each block."""

    rank: int
    file: str
    nbytes: int
    block_bytes: int
    checksums: npt.NDArray[np.uint64]


@dataclass(frozen=True)
class Catalog:
    """The manifests of ``images``, sorted by rank. ``packed_table`` is an encoded table of their boxes, whose holders are ranks."""

    images: tuple[StoredImage, ...]
    packed_table: bytes

    @cached_property
    def table(self) -> BoxTable:
        """The boxes of all images. Raises ValueError where the packed table is damaged, which a checksum has ruled out."""
        return decode_table(self.packed_table)

    @property
    def table_digest(self) -> int:
        """Equal for equal boxes at equal places: the same at every step of a layout."""
        return xxhash.xxh3_64_intdigest(self.packed_table)

    @property
    def data_bytes(self) -> int:
        """Bytes of all images."""
        return sum(image.nbytes for image in self.images)

    def manifest(self, rank: int) -> Manifest:
        """The manifest of one rank. Raises KeyError where the catalog does not have it."""
        for image in self.images:
            if image.rank == rank:
                entries = tuple(
                    ImageEntry(self.table.box(row), int(self.table.start[row]))
                    for row in self.table.rows_of(rank).tolist()
                )
                checksums = tuple(f"{value:016x}" for value in image.checksums.tolist())
                return Manifest(rank, image.file, image.nbytes, image.block_bytes, checksums, entries)
        raise KeyError(rank)


def catalog_of(manifest: Manifest, packed_table: bytes | None = None) -> Catalog:
    """The catalog of one image. ``packed_table``, where it is known, is that of the manifest's boxes."""
    checksums = np.array([int(digits, 16) for digits in manifest.checksums], np.uint64)
    image = StoredImage(manifest.rank, manifest.file, manifest.nbytes, manifest.block_bytes, checksums)
    return Catalog((image,), packed_table or encode_table(table_of(manifest.entries, manifest.rank)))


def join_catalogs(catalogs: Sequence[Catalog], packed_table: bytes | None = None) -> Catalog:
    """The images of several catalogs in one. ``packed_table``, where it is known, is the table of all."""
    images = sorted((image for one in catalogs for image in one.images), key=lambda image: image.rank)
    return Catalog(tuple(images), packed_table or encode_table(joined([one.table for one in catalogs])))


def encode_catalog(catalog: Catalog) -> bytes:
    """The catalog as bytes that end with their own checksum."""
    head = {
        "version": CATALOG_VERSION,
        "image_fields": ["rank", "file", "bytes", "block_bytes", "blocks"],
        "images": [
            [one.rank, one.file, one.nbytes, one.block_bytes, len(one.checksums)] for one in catalog.images
        ],
        "table_bytes": len(catalog.packed_table),
    }
    checksums = b"".join(image.checksums.astype("<u8").tobytes() for image in catalog.images)
    body = json.dumps(head, separators=(",", ":")).encode() + b"\n" + catalog.packed_table + checksums
    return body + xxhash.xxh3_64_intdigest(body).to_bytes(_SEAL_BYTES, "little")


def decode_catalog(data: bytes, path: str) -> Catalog:
    """The inverse of ``encode_catalog``. ``path`` is for messages. Raises CorruptError, FormatVersionError."""
    body = memoryview(data)[:-_SEAL_BYTES]
    if xxhash.xxh3_64_intdigest(body).to_bytes(_SEAL_BYTES, "little") != data[-_SEAL_BYTES:]:
        raise CorruptError(
            f"{path}: differs from its checksum; the file was changed or torn. Restore another step."
        )
    try:
        line, _, rest = data[:-_SEAL_BYTES].partition(b"\n")
        head = json.loads(line)
        if head["version"] != CATALOG_VERSION:
            raise FormatVersionError(
                f"{path}: catalog version {head['version']!r}; this version of Phalanx reads {CATALOG_VERSION}. "
                "Use the version that wrote it, or export it there to safetensors."
            )
        table, checksums = rest[: head["table_bytes"]], rest[head["table_bytes"] :]
        values = np.frombuffer(checksums, "<u8").astype(np.uint64)
        images, first = [], 0
        for rank, file, nbytes, block_bytes, blocks in head["images"]:
            images.append(StoredImage(rank, file, nbytes, block_bytes, values[first : first + blocks]))
            first += blocks
        return Catalog(tuple(images), table)
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptError(f"{path}: not a catalog: {error!r}; restore another step") from error

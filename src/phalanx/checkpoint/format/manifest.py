"""Descriptions of a checkpoint: the manifest of a rank's image, the index that commits all of them, and catalogs of many manifests.

On disk the manifests of many ranks are joined in a catalog (below). A manifest as JSON is in the record of each in-memory snapshot, and
next to each rank's file in checkpoints of format 1, which can still be read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from phalanx.checkpoint.format.boxes import Box
from phalanx.checkpoint.format.errors import CorruptError, FormatVersionError
from phalanx.checkpoint.format.image import BoxTable, ImageEntry, decode_table, encode_table, joined, table_of

_VERSION = 1


@dataclass(frozen=True, slots=True)
class Manifest:
    """Manifest of rank ``rank``: a file of ``nbytes`` bytes in blocks of ``block_bytes``, and the boxes in it."""

    rank: int
    file: str
    nbytes: int
    block_bytes: int
    checksums: tuple[str, ...]
    entries: tuple[ImageEntry, ...]


def checksum(data: Any) -> str:
    """Return the xxh3_64 of a bytes-like object, as 16 hexadecimal digits."""
    return f"{xxhash.xxh3_64_intdigest(data):016x}"


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the manifest as one line of compact JSON, in UTF-8."""
    boxes = [
        [e.box.name, e.box.dtype, list(e.box.global_shape), list(e.box.offset), list(e.box.shape), e.start]
        for e in manifest.entries
    ]
    content = {
        "version": _VERSION,
        "rank": manifest.rank,
        "file": manifest.file,
        "bytes": manifest.nbytes,
        "block_bytes": manifest.block_bytes,
        "xxh3_64": list(manifest.checksums),
        "box_fields": ["name", "dtype", "global_shape", "offset", "shape", "start"],
        "boxes": boxes,
    }
    return json.dumps(content, separators=(",", ":")).encode() + b"\n"


def decode_manifest(data: bytes, path: str) -> Manifest:
    """Inverse of ``encode_manifest``. ``path`` is for messages. Raises CorruptError if it is not a manifest,
    FormatVersionError for another version.
    """
    content = parse_object(data, path)
    version = content.get("version")
    if version != _VERSION:
        raise FormatVersionError(
            f"{path}: manifest version {version!r}; this version of Phalanx reads {_VERSION}. "
            "Use the version that wrote it, or export it there to safetensors."
        )
    try:
        return Manifest(
            rank=content["rank"],
            file=content["file"],
            nbytes=content["bytes"],
            block_bytes=content["block_bytes"],
            checksums=tuple(content["xxh3_64"]),
            entries=tuple(
                ImageEntry(Box(name, dtype, tuple(global_shape), tuple(offset), tuple(shape)), start)
                for name, dtype, global_shape, offset, shape, start in content["boxes"]
            ),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptError(f"{path}: not a manifest: {error!r}; restore another step") from error


def parse_object(data: bytes, path: str) -> dict[str, Any]:
    """Return the JSON object in a file's bytes. ``path`` is for messages. Raises CorruptError."""
    try:
        content = json.loads(data)
    except ValueError as error:
        raise CorruptError(
            f"{path}: not JSON ({error}); the file was changed or torn. Restore another step."
        ) from error
    if not isinstance(content, dict):
        raise CorruptError(f"{path}: not a JSON object; the file was changed or torn. Restore another step.")
    return content


# The index of a checkpoint, ``checkpoint.json``: it commits the checkpoint and is the root of its checksums.
#
# It lists the catalogs with their checksums, which list the checksums of all blocks, and has its own checksum. So every byte of a
# checkpoint has a checksum that is reached from this file. Checksums are xxh3_64 (https://xxhash.com): they detect rot, not forgery.
# Format 1 had a JSON file for each rank instead of catalogs; such a file is read as a catalog of one image.


FORMAT_VERSION = 2
_READABLE = (1, 2)


@dataclass(frozen=True, slots=True)
class CatalogRef:
    """A catalog in the index: its ranks, its file, the checksum of its bytes, and the number of data bytes that it lists."""

    first_rank: int
    ranks: int
    file: str
    checksum: str
    data_bytes: int


@dataclass(frozen=True, slots=True)
class Index:
    """Contents of ``checkpoint.json``. ``extra`` is small JSON: tokens seen, data cursor, random states."""

    step: int
    attempt: int
    world_size: int
    extra: dict[str, object]
    weights_sha256: str | None
    catalogs: tuple[CatalogRef, ...]
    """Sorted by rank."""
    extents_checksum: str | None = None
    """Checksum of the file with each catalog's extents; exists only if there are several catalogs."""


def encode_index(index: Index) -> bytes:
    """Return the index as sealed JSON: its content, and the checksum of the content's text."""
    content = {
        "version": FORMAT_VERSION,
        "step": index.step,
        "attempt": index.attempt,
        "world_size": index.world_size,
        "weights_sha256": index.weights_sha256,
        "extra": index.extra,
        "catalogs": [
            [ref.first_rank, ref.ranks, ref.file, ref.checksum, ref.data_bytes] for ref in index.catalogs
        ],
        "extents": index.extents_checksum,
    }
    return sealed(content)


def sealed(content: Mapping[str, object]) -> bytes:
    """Return ``content`` as JSON, with the checksum of its text."""
    text = json.dumps(content, indent=1)
    return f'{{"xxh3_64": "{checksum(text.encode())}", "content": {text}}}\n'.encode()


def decode_index(data: bytes, path: str) -> Index:
    """Inverse of ``encode_index``; also reads version 1.

    ``path`` is for messages. Raises CorruptError if any byte was changed, FormatVersionError.
    """
    outer = parse_object(data, path)
    content = outer.get("content")
    if not isinstance(content, dict):
        raise CorruptError(f"{path}: has no content; the file was changed or torn. Restore another step.")
    # Verify the checksum first: a damaged version number is damage, not another version.
    if sealed(content) != data:
        raise CorruptError(
            f"{path}: differs from its checksum; the file was changed or torn. Restore another step."
        )
    version = content.get("version")
    if version not in _READABLE:
        readable = " and ".join(map(str, _READABLE))
        raise FormatVersionError(
            f"{path}: checkpoint format version {version!r}; this version of Phalanx reads {readable}. "
            "Use the version that wrote it, or export it there to safetensors."
        )
    try:
        if version == 1:
            refs = [(rank, 1, file, digits, nbytes) for rank, file, digits, nbytes in content["manifests"]]
        else:
            refs = content["catalogs"]
        return Index(
            step=content["step"],
            attempt=content["attempt"],
            world_size=content["world_size"],
            extra=content["extra"],
            weights_sha256=content["weights_sha256"],
            catalogs=tuple(CatalogRef(*ref) for ref in refs),
            extents_checksum=content.get("extents"),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptError(f"{path}: not a checkpoint's index: {error!r}; restore another step") from error


# Catalogs: the manifests of consecutive ranks in one file, so that a checkpoint of N ranks has N / 256 of them.
#
# A rank writes a catalog of one image, its own manifest. The first of every 256 ranks joins these into one catalog, and writes a summary:
# the joined catalog's checksum, and the rectangles that its ranks cover together. A summary is also a catalog, with catalogs in place of
# images. So are the extents of a checkpoint: the summaries of all its catalogs, by which a reader selects the catalogs to open. The
# committing rank reads N / 256 summaries and no manifest.
#
# Encoding: a line of JSON with the images, the table of boxes (``image.py``), the checksums of all blocks as 64-bit integers, and the
# xxh3_64 of all this. The table is the same at every step, so it is encoded once.


CATALOG_VERSION = 1
_SEAL_BYTES = 8


@dataclass(frozen=True, slots=True)
class StoredImage:
    """File of ``rank``, of ``nbytes`` bytes in blocks of ``block_bytes``, with the checksum of each block."""

    rank: int
    file: str
    nbytes: int
    block_bytes: int
    checksums: npt.NDArray[np.uint64]


@dataclass(frozen=True)
class Catalog:
    """Manifests of ``images``, sorted by rank. ``packed_table`` is an encoded table of their boxes, whose holders are ranks."""

    images: tuple[StoredImage, ...]
    packed_table: bytes

    @cached_property
    def table(self) -> BoxTable:
        """Boxes of all images. Raises ValueError if the packed table is damaged, which its checksum has ruled out."""
        return decode_table(self.packed_table)

    @property
    def table_digest(self) -> int:
        """Digest of the packed table; equal at every step of a layout."""
        return xxhash.xxh3_64_intdigest(self.packed_table)

    @property
    def data_bytes(self) -> int:
        """Bytes of all images."""
        return sum(image.nbytes for image in self.images)

    def manifest(self, rank: int) -> Manifest:
        """Return the manifest of one rank. Its boxes and checksums are unpacked at each call.

        Raises KeyError if the catalog does not have the rank.
        """
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
    """Return the catalog of one image. ``packed_table`` may be passed if it is already encoded."""
    checksums = np.array([int(digits, 16) for digits in manifest.checksums], np.uint64)
    image = StoredImage(manifest.rank, manifest.file, manifest.nbytes, manifest.block_bytes, checksums)
    return Catalog((image,), packed_table or encode_table(table_of(manifest.entries, manifest.rank)))


def join_catalogs(catalogs: Sequence[Catalog], packed_table: bytes | None = None) -> Catalog:
    """Join the images of several catalogs in one, sorted by rank. ``packed_table`` may be passed if the joined table is already encoded."""
    images = sorted((image for catalog in catalogs for image in catalog.images), key=lambda image: image.rank)
    return Catalog(
        tuple(images), packed_table or encode_table(joined([catalog.table for catalog in catalogs]))
    )


def encode_catalog(catalog: Catalog) -> bytes:
    """Return the catalog as a line of JSON, the packed table, the blocks' checksums, and a checksum of all before."""
    head = {
        "version": CATALOG_VERSION,
        "image_fields": ["rank", "file", "bytes", "block_bytes", "blocks"],
        "images": [
            [image.rank, image.file, image.nbytes, image.block_bytes, len(image.checksums)]
            for image in catalog.images
        ],
        "table_bytes": len(catalog.packed_table),
    }
    checksums = b"".join(image.checksums.astype("<u8").tobytes() for image in catalog.images)
    body = json.dumps(head, separators=(",", ":")).encode() + b"\n" + catalog.packed_table + checksums
    return body + xxhash.xxh3_64_intdigest(body).to_bytes(_SEAL_BYTES, "little")


def decode_catalog(data: bytes, path: str) -> Catalog:
    """Inverse of ``encode_catalog``; the table stays packed. ``path`` is for messages. Raises CorruptError if any
    byte was changed, FormatVersionError for another version.
    """
    body = memoryview(data)[:-_SEAL_BYTES]
    if xxhash.xxh3_64_intdigest(body).to_bytes(_SEAL_BYTES, "little") != data[-_SEAL_BYTES:]:
        raise CorruptError(
            f"{path}: differs from its checksum; the file was changed or torn. Restore another step."
        )
    try:
        line, _, payload = data[:-_SEAL_BYTES].partition(b"\n")
        head = json.loads(line)
        if head["version"] != CATALOG_VERSION:
            raise FormatVersionError(
                f"{path}: catalog version {head['version']!r}; this version of Phalanx reads {CATALOG_VERSION}. "
                "Use the version that wrote it, or export it there to safetensors."
            )
        table, checksums = payload[: head["table_bytes"]], payload[head["table_bytes"] :]
        values = np.frombuffer(checksums, "<u8").astype(np.uint64)
        images, first = [], 0
        for rank, file, nbytes, block_bytes, blocks in head["images"]:
            images.append(StoredImage(rank, file, nbytes, block_bytes, values[first : first + blocks]))
            first += blocks
        return Catalog(tuple(images), table)
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptError(f"{path}: not a catalog: {error!r}; restore another step") from error

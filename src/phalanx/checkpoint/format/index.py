"""The index of a checkpoint, ``checkpoint.json``: what commits it, and the root of its checksums.

It lists the catalogs with their checksums, which list the checksums of all blocks, and carries its own: every byte of a
checkpoint is under a checksum that is reached from this file. Checksums are xxh3_64 (https://xxhash.com): they find rot, not forgery.
Format 1 had a file of JSON for each rank in place of catalogs; such a file is read as a catalog of one image.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from phalanx.checkpoint.format.errors import CorruptError, FormatVersionError
from phalanx.checkpoint.format.manifest import checksum, parse_object

FORMAT_VERSION = 2
_READABLE = (1, 2)


@dataclass(frozen=True, slots=True)
class CatalogRef:
    """A catalog as the index names it: whose images, its file, the checksum of its bytes, and how many bytes of data it lists."""

    first_rank: int
    ranks: int
    file: str
    checksum: str
    data_bytes: int


@dataclass(frozen=True, slots=True)
class Index:
    """The contents of ``checkpoint.json``. ``extra`` is small JSON: tokens seen, data cursor, random states."""

    step: int
    attempt: int
    world_size: int
    extra: dict[str, object]
    weights_sha256: str | None
    catalogs: tuple[CatalogRef, ...]
    """Sorted by rank."""
    extents_checksum: str | None = None
    """Checksum of the file that tells which catalogs hold what; there is one where there are several catalogs."""


def encode_index(index: Index) -> bytes:
    """The index as JSON: its content, and the checksum of the content's own text."""
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
    """``content`` as JSON, together with the checksum of its text."""
    text = json.dumps(content, indent=1)
    return f'{{"xxh3_64": "{checksum(text.encode())}", "content": {text}}}\n'.encode()


def decode_index(data: bytes, path: str) -> Index:
    """The inverse of ``encode_index``. Raises CorruptError where any byte was changed, FormatVersionError."""
    outer = parse_object(data, path)
    content = outer.get("content")
    if not isinstance(content, dict):
        raise CorruptError(f"{path}: has no content; the file was changed or torn. Restore another step.")
    # The checksum first: a damaged version number is damage, not another version.
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

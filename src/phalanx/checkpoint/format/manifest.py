"""The manifest of a rank's image: the boxes in it, where each begins, and a checksum of each of its blocks.

On disk the manifests of many ranks stand together in a catalog (``catalog.py``). As JSON, one stands in the record of each snapshot in
memory, and one beside each rank's file in checkpoints of format 1, which are still read.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import xxhash

from phalanx.checkpoint.format.boxes import Box
from phalanx.checkpoint.format.errors import CorruptError, FormatVersionError
from phalanx.checkpoint.format.image import ImageEntry

_VERSION = 1


@dataclass(frozen=True, slots=True)
class Manifest:
    """The manifest of rank ``rank``: a file of ``nbytes`` bytes in blocks of ``block_bytes``, and the boxes in it."""

    rank: int
    file: str
    nbytes: int
    block_bytes: int
    checksums: tuple[str, ...]
    entries: tuple[ImageEntry, ...]


def checksum(data: Any) -> str:
    """xxh3_64 of a bytes-like object, as 16 hexadecimal digits."""
    return f"{xxhash.xxh3_64_intdigest(data):016x}"


def encode_manifest(manifest: Manifest) -> bytes:
    """The manifest as a line of JSON."""
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
    """The inverse of ``encode_manifest``. ``path`` is for messages. Raises CorruptError, FormatVersionError."""
    content = parse_object(data, path)
    _require_version(content, path)
    try:
        return Manifest(
            rank=content["rank"],
            file=content["file"],
            nbytes=content["bytes"],
            block_bytes=content["block_bytes"],
            checksums=tuple(content["xxh3_64"]),
            entries=tuple(
                ImageEntry(Box(name, dtype, tuple(whole), tuple(offset), tuple(shape)), start)
                for name, dtype, whole, offset, shape, start in content["boxes"]
            ),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptError(f"{path}: not a manifest: {error!r}; restore another step") from error


def parse_object(data: bytes, path: str) -> dict[str, Any]:
    """The JSON object in a file's bytes. ``path`` is for messages. Raises CorruptError."""
    try:
        content = json.loads(data)
    except ValueError as error:
        raise CorruptError(
            f"{path}: not JSON ({error}); the file was changed or torn. Restore another step."
        ) from error
    if not isinstance(content, dict):
        raise CorruptError(f"{path}: not a JSON object; the file was changed or torn. Restore another step.")
    return content


def _require_version(content: Mapping[str, object], path: str) -> None:
    version = content.get("version")
    if version != _VERSION:
        raise FormatVersionError(
            f"{path}: manifest version {version!r}; this version of Phalanx reads {_VERSION}. "
            "Use the version that wrote it, or export it there to safetensors."
        )

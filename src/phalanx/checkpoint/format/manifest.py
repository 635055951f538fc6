"""The two records of a checkpoint on disk: a manifest for each rank's file, and one index that commits them.

A manifest lists the boxes in a rank's file and a checksum of each of its blocks; the index (``checkpoint.json``) lists
the manifests with their checksums, and carries its own. So every byte of a checkpoint is under a checksum that is
reached from one file. Checksums are xxh3_64 (https://xxhash.com): they find rot, not forgery.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import xxhash

from phalanx.checkpoint.format.boxes import Box
from phalanx.checkpoint.format.errors import CorruptError, FormatVersionError
from phalanx.checkpoint.format.image import ImageEntry

FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True)
class Manifest:
    """The manifest of rank ``rank``: a file of ``nbytes`` bytes in blocks of ``block_bytes``, and the boxes in it."""

    rank: int
    file: str
    nbytes: int
    block_bytes: int
    checksums: tuple[str, ...]
    entries: tuple[ImageEntry, ...]


@dataclass(frozen=True, slots=True)
class ManifestRef:
    """A manifest as the index names it: its file, the checksum of its bytes, and how many bytes of data it lists."""

    rank: int
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
    manifests: tuple[ManifestRef, ...]


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
        "version": FORMAT_VERSION,
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
    content = _parse(data, path)
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


def encode_index(index: Index) -> bytes:
    """The index as JSON: its content, and the checksum of the content's own text."""
    content = {
        "version": FORMAT_VERSION,
        "step": index.step,
        "attempt": index.attempt,
        "world_size": index.world_size,
        "weights_sha256": index.weights_sha256,
        "extra": index.extra,
        "manifests": [[ref.rank, ref.file, ref.checksum, ref.data_bytes] for ref in index.manifests],
    }
    return _sealed(content)


def _sealed(content: Mapping[str, object]) -> bytes:
    text = json.dumps(content, indent=1)
    return f'{{"xxh3_64": "{checksum(text.encode())}", "content": {text}}}\n'.encode()


def decode_index(data: bytes, path: str) -> Index:
    """The inverse of ``encode_index``. Raises CorruptError where any byte was changed, FormatVersionError."""
    outer = _parse(data, path)
    content = outer.get("content")
    if not isinstance(content, dict):
        raise CorruptError(f"{path}: has no content; the file was changed or torn. Restore another step.")
    # The checksum first: a damaged version number is damage, not another version.
    if _sealed(content) != data:
        raise CorruptError(
            f"{path}: differs from its checksum; the file was changed or torn. Restore another step."
        )
    _require_version(content, path)
    try:
        return Index(
            step=content["step"],
            attempt=content["attempt"],
            world_size=content["world_size"],
            extra=content["extra"],
            weights_sha256=content["weights_sha256"],
            manifests=tuple(ManifestRef(*ref) for ref in content["manifests"]),
        )
    except (KeyError, TypeError) as error:
        raise CorruptError(f"{path}: not a checkpoint's index: {error!r}; restore another step") from error


def _parse(data: bytes, path: str) -> dict[str, Any]:
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
    if version != FORMAT_VERSION:
        raise FormatVersionError(
            f"{path}: checkpoint format version {version!r}; this version of Phalanx reads {FORMAT_VERSION}. "
            "Use the version that wrote it, or export it there to safetensors."
        )

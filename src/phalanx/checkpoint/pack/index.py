"""The index of a pack: what it was made of, where each section lies, and the checksum of each chunk.

The file is a header of one page, the sections, and the index as sealed JSON, which the header points to. The header is written last but one,
the file's name last: under its name a pack is complete. Besides the weights it carries the small files that text is made with (run file,
tokenizer, the publisher's files), so that one file can be served where the run directory is not.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import xxhash

from phalanx.checkpoint.format.errors import CheckpointError, CorruptError, FormatVersionError
from phalanx.checkpoint.format.image import PAGE_BYTES
from phalanx.checkpoint.format.index import sealed
from phalanx.checkpoint.format.manifest import parse_object
from phalanx.checkpoint.pack.layout import PackedTensor, PackFormat, Section

MAGIC = b"phalanx pack\n\0\0\0"
_VERSION = 1
_HEADER = struct.Struct("<16sQQ")
_CHECKSUM = struct.Struct("<Q")
REMEDY = "Pack the run again with `phalanx pack`, or copy the file back from where it is whole."


class PackError(CheckpointError):
    """A pack cannot be made or used; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Rounding:
    """Rounding errors of a format against the fp32 weights, relative to a tensor's root mean square."""

    relative_error: float
    """Over all weights together."""
    worst_error: float
    worst_tensor: str


@dataclass(frozen=True, slots=True)
class PackIndex:
    """The contents of a pack but for the weights."""

    format: PackFormat
    run: str
    """The run's name, and the folder that it was packed from."""
    step: int
    weights_sha256: str
    """Hash of the fp32 weights that it was made from, as the run prints it."""
    sections: tuple[Section, ...]
    checksums: tuple[tuple[int, ...], ...]
    """Checksums (xxh3_64) of each section's chunks."""
    rounding: Rounding
    files: Mapping[str, bytes]
    """Small files of the run directory by their path in it: ``run.toml``, ``tokenizer/tokenizer.json``."""

    @property
    def weights_id(self) -> str:
        """The name of these weights and no others: the run's hash, and the format if it is narrower than fp32."""
        return self.weights_sha256 if self.format == "fp32" else f"{self.weights_sha256}-{self.format}"

    def find(self, kind: str, layer: int = -1, expert: int = -1) -> int | None:
        """The number of a section, if there is such a one."""
        for number, section in enumerate(self.sections):
            if (section.kind, section.layer, section.expert) == (kind, layer, expert):
                return number
        return None


def encode_header(index_start: int, index_bytes: int) -> bytes:
    """The first page."""
    head = _HEADER.pack(MAGIC, index_start, index_bytes)
    return (head + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(head))).ljust(PAGE_BYTES, b"\0")


def decode_header(page: bytes, path: str) -> tuple[int, int]:
    """The inverse of ``encode_header``. Raises PackError, CorruptError."""
    if page[: len(MAGIC)] != MAGIC:
        raise PackError(f"{path}: is not a pack; give a file that `phalanx pack` has written")
    head, rest = page[: _HEADER.size], page[_HEADER.size : _HEADER.size + _CHECKSUM.size]
    if _CHECKSUM.pack(xxhash.xxh3_64_intdigest(head)) != rest:
        raise CorruptError(f"{path}: the header differs from its checksum. {REMEDY}")
    _, start, nbytes = _HEADER.unpack(head)
    return start, nbytes


def encode_index(index: PackIndex) -> bytes:
    """The index as sealed JSON. Sections that are laid out alike share one list of tensors."""
    layouts = list(dict.fromkeys(section.tensors for section in index.sections))
    number = {layout: place for place, layout in enumerate(layouts)}
    return sealed(
        {
            "version": _VERSION,
            "format": index.format,
            "run": index.run,
            "step": index.step,
            "weights_sha256": index.weights_sha256,
            "rounding": [
                index.rounding.relative_error,
                index.rounding.worst_error,
                index.rounding.worst_tensor,
            ],
            "layouts": [
                [[one.name, one.dtype, list(one.shape), one.start, one.scale_start] for one in layout]
                for layout in layouts
            ],
            "sections": [
                [one.kind, one.prefix, one.layer, one.expert, number[one.tensors], one.start]
                for one in index.sections
            ],
            "xxh3_64": ["".join(f"{digest:016x}" for digest in section) for section in index.checksums],
            "files": {name: base64.b64encode(data).decode() for name, data in index.files.items()},
        }
    )


def decode_index(data: bytes, path: str) -> PackIndex:
    """The inverse of ``encode_index``. Raises CorruptError where any byte was changed, FormatVersionError."""
    try:
        content = parse_object(data, path).get("content")
        whole = isinstance(content, dict) and sealed(content) == data
    except CorruptError:
        whole = False
    if not whole or not isinstance(content, dict):
        raise CorruptError(f"{path}: the index differs from its checksum. {REMEDY}")
    if content.get("version") != _VERSION:
        raise FormatVersionError(
            f"{path}: pack version {content.get('version')!r}; this version of Phalanx reads {_VERSION}. Pack the run again."
        )
    try:
        return _read(content)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise CorruptError(f"{path}: not a pack's index: {error!r}. {REMEDY}") from error


def _read(content: Mapping[str, Any]) -> PackIndex:
    layouts = [
        tuple(
            PackedTensor(name, dtype, tuple(shape), start, scale)
            for name, dtype, shape, start, scale in layout
        )
        for layout in content["layouts"]
    ]
    return PackIndex(
        format=content["format"],
        run=content["run"],
        step=content["step"],
        weights_sha256=content["weights_sha256"],
        sections=tuple(
            Section(kind, prefix, layer, expert, layouts[number], start)
            for kind, prefix, layer, expert, number, start in content["sections"]
        ),
        checksums=tuple(
            tuple(int(digits[place : place + 16], 16) for place in range(0, len(digits), 16))
            for digits in content["xxh3_64"]
        ),
        rounding=Rounding(*content["rounding"]),
        files={name: base64.b64decode(data) for name, data in content["files"].items()},
    )

"""Layout of a pack and its index: tensors with their order and format, sections, and checksums.

A checkpoint's images are by rank, in fp32 and with the optimizer's moments. A server that reads weights while it computes needs the
opposite: a layer's bytes together, in the order of layers, with separate experts, because most are not needed. So a pack consists of
*sections*, each read as one: the resident part (final norm, routers), the embedding, each layer's body followed by its experts, the head,
the predictions ahead. Sections of 2 MiB and more are aligned to 2 MiB, smaller ones to a page, so that all can be read without the page
cache.

In the narrow formats, matrices of the blocks have 8-bit elements with a scale (its exponent, one byte) for 32 neighbors of a row; embedding
and head are bf16, and routers, norms and biases stay fp32. Pure: names and shapes in, offsets out.
"""

from __future__ import annotations

import base64
import math
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass
from typing import Literal

import xxhash

from phalanx.checkpoint.format.boxes import ITEMSIZE, Extent
from phalanx.checkpoint.format.errors import CheckpointError, CorruptError, FormatVersionError
from phalanx.checkpoint.format.image import PAGE_BYTES
from phalanx.checkpoint.format.manifest import parse_object, sealed

PackFormat = Literal["fp32", "bf16", "fp8", "int8"]
SectionKind = Literal["kept", "embedding", "block", "expert", "head", "ahead"]

CHUNK_BYTES = 2 << 20
"""Bytes per checksum."""
SHARING = 32
"""Elements of a row that share a scale."""
_ALIGNMENT = 64  # bytes, for a tensor in its section: PyTorch's own, so that kernels take the same path
_WIDE: Mapping[PackFormat, str] = {
    "fp32": "float32",
    "bf16": "bfloat16",
    "fp8": "float32",
    "int8": "float32",
}
_NARROW: Mapping[PackFormat, str] = {"fp8": "float8_e4m3fn", "int8": "int8"}
_BLOCK = re.compile(r"blocks\.(\d+)\.(.+)")
_EXPERTS = re.compile(r"(.+\.experts)\.(gate|up|down)")
_ROUTER = re.compile(r".+\.router\.(weight|logit_bias|bias)")


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """A tensor (or an expert's matrix of a stack) in its section; offsets are bytes from the section's start."""

    name: str
    """Name after the section's prefix; for an expert, the stack's last name: ``gate``."""
    dtype: str
    shape: Extent
    start: int
    scale_start: int | None = None
    """Offset of the scales ``(rows, columns / 32 rounded up)``, one exponent (uint8) each; ``None`` without scales."""

    @property
    def nbytes(self) -> int:
        """Bytes of the elements, without scales."""
        return math.prod(self.shape) * ITEMSIZE[self.dtype]

    @property
    def scale_shape(self) -> Extent:
        """Shape of the scales, if there are any."""
        return (*self.shape[:-1], -(-self.shape[-1] // SHARING))

    @property
    def stop(self) -> int:
        """End offset of elements and scales."""
        if self.scale_start is None:
            return self.start + self.nbytes
        return self.scale_start + math.prod(self.scale_shape)


Layout = tuple[PackedTensor, ...]
"""The tensors of a section, in their order."""


@dataclass(frozen=True, slots=True)
class Section:
    """Bytes of a pack that are read together."""

    kind: SectionKind
    prefix: str
    """Prefix of its tensors' full names: ``blocks.3.``; for an expert, ``blocks.3.ffn.experts.``."""
    layer: int
    """Index of the layer; -1 outside the blocks."""
    expert: int
    """Index of the expert; -1 if the section is not an expert's."""
    tensors: Layout
    start: int

    @property
    def nbytes(self) -> int:
        """Bytes of the section, without the gap before the next."""
        return self.tensors[-1].stop if self.tensors else 0

    @property
    def chunks(self) -> int:
        """Number of chunks; the last one may be shorter."""
        return -(-self.nbytes // CHUNK_BYTES)

    @property
    def name(self) -> str:
        """Name for messages."""
        if self.kind == "expert":
            return f"layer {self.layer}, expert {self.expert}"
        return f"layer {self.layer}" if self.kind == "block" else self.kind


def padded_bytes(nbytes: int) -> int:
    """Round ``nbytes`` up to full pages, as reads without the page cache require."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


def lay_out(shapes: Mapping[str, Extent], form: PackFormat, *, custom: bool = False) -> tuple[Section, ...]:
    """Return the sections of a model with tensors of these full names and shapes.

    The parts of a user's model (``custom``) have arbitrary names, so experts and routers are not recognized there.
    Sections are in the order: kept weights and embedding, each block with its experts, head, prediction modules. Starts
    are aligned to pages, large ones to chunks.
    """
    sections: list[Section] = []
    end = PAGE_BYTES  # the header
    for kind, prefix, layer, expert, members in _members(shapes, custom=custom):
        tensors = _placed(members, kind, form)
        nbytes = tensors[-1].stop if tensors else 0
        start = _aligned(end, CHUNK_BYTES if nbytes >= CHUNK_BYTES else PAGE_BYTES)
        sections.append(Section(kind, prefix, layer, expert, tensors, start))
        end = start + padded_bytes(nbytes)
    return tuple(sections)


_Members = tuple[SectionKind, str, int, int, list[tuple[str, Extent]]]


def _members(shapes: Mapping[str, Extent], *, custom: bool) -> Iterator[_Members]:
    """Yield the sections of a model in their order: kind, prefix, layer, expert (-1 if none), and names and shapes of
    its tensors. With ``custom``, experts and routers are not recognized.
    """
    outside: dict[SectionKind, list[tuple[str, Extent]]] = {}
    bodies: dict[int, list[tuple[str, Extent]]] = {}
    stacks: dict[int, tuple[str, list[tuple[str, Extent]]]] = {}
    for name, shape in shapes.items():
        block = _BLOCK.fullmatch(name)
        if block is None:
            outside.setdefault(_outside(name), []).append((name, shape))
        elif not custom and _ROUTER.fullmatch(block[2]):
            outside.setdefault("kept", []).append((name, shape))
        elif not custom and len(shape) == 3 and (stack := _EXPERTS.fullmatch(block[2])):
            prefix, rows = f"blocks.{block[1]}.{stack[1]}.", stacks.setdefault(int(block[1]), ("", []))[1]
            rows.append((stack[2], shape))
            stacks[int(block[1])] = (prefix, rows)
        else:
            bodies.setdefault(int(block[1]), []).append((block[2], shape))
    for kind in ("kept", "embedding"):
        if kind in outside:
            yield kind, "", -1, -1, outside[kind]
    for layer in sorted(bodies.keys() | stacks.keys()):
        yield "block", f"blocks.{layer}.", layer, -1, bodies.get(layer, [])
        prefix, rows = stacks.get(layer, ("", []))
        for expert in range(rows[0][1][0] if rows else 0):
            yield "expert", prefix, layer, expert, [(name, shape[1:]) for name, shape in rows]
    for kind in ("head", "ahead"):
        if kind in outside:
            yield kind, "", -1, -1, outside[kind]


def _outside(name: str) -> SectionKind:
    """Return the section of a tensor outside blocks."""
    if name.startswith("embedding."):
        return "embedding"
    if name.startswith("head."):
        return "head"
    return "ahead" if name.startswith("mtp.") else "kept"


def _placed(members: Iterable[tuple[str, Extent]], kind: SectionKind, form: PackFormat) -> Layout:
    """Return where each tensor is in a section, in order and aligned, with its scales behind it if it is narrow."""
    tensors: list[PackedTensor] = []
    end = 0
    for name, shape in members:
        start = _aligned(end, _ALIGNMENT)
        dtype = stored_dtype(name, shape, kind, form)
        scale = None
        if dtype in _NARROW.values():
            scale = _aligned(start + math.prod(shape), _ALIGNMENT)
        tensors.append(PackedTensor(name, dtype, shape, start, scale))
        end = tensors[-1].stop
    return tuple(tensors)


def stored_dtype(name: str, shape: Extent, kind: SectionKind, form: PackFormat) -> str:
    """Return the dtype of a tensor in a pack of this format, by its name after the section's prefix.

    Narrow formats apply to matrices of blocks, experts and prediction modules. Embedding and head are bf16 then.
    Router biases are always fp32.
    """
    if name.endswith("router.bias"):
        return "float32"  # not a parameter; the router's choice is always computed in fp32
    if form in _NARROW and len(shape) == 2:
        if kind == "expert" or (kind in ("block", "ahead") and name.endswith(".weight")):
            return _NARROW[form]
        if kind in ("embedding", "head"):
            return "bfloat16"
    return _WIDE[form]


def _aligned(offset: int, unit: int) -> int:
    return -(-offset // unit) * unit


# The index of a pack: its source, the position of each section, and the checksum of each chunk.
#
# The file has a header of one page, the sections, and the index as sealed JSON, to which the header points. The header is written after
# the rest, and then the file gets its name, so a named pack is complete. It also contains the small files for text generation (run file,
# tokenizer, the publisher's files), so that it can be served without the run directory.


MAGIC = b"phalanx pack\n\0\0\0"
_VERSION = 1
_HEADER = struct.Struct("<16sQQ")
_CHECKSUM = struct.Struct("<Q")
REMEDY = "Pack the run again with `phalanx pack`, or copy the file back from an intact copy."


class PackError(CheckpointError):
    """A pack cannot be made or used; the message has the cause and the remedy."""


@dataclass(frozen=True, slots=True)
class Rounding:
    """Rounding errors of a format against the fp32 weights, relative to a tensor's root mean square."""

    relative_error: float
    """Over all weights."""
    worst_error: float
    worst_tensor: str


@dataclass(frozen=True, slots=True)
class PackIndex:
    """Contents of a pack except the weights."""

    format: PackFormat
    run: str
    """The run's name, and the folder of the run."""
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
        """Unique name of these weights: the run's hash, and the format if it is narrower than fp32."""
        return self.weights_sha256 if self.format == "fp32" else f"{self.weights_sha256}-{self.format}"

    def find(self, kind: str, layer: int = -1, expert: int = -1) -> int | None:
        """Return the index of the section of this kind, layer and expert; None if there is none."""
        for number, section in enumerate(self.sections):
            if (section.kind, section.layer, section.expert) == (kind, layer, expert):
                return number
        return None


def encode_header(index_start: int, index_bytes: int) -> bytes:
    """Encode the first page."""
    head = _HEADER.pack(MAGIC, index_start, index_bytes)
    return (head + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(head))).ljust(PAGE_BYTES, b"\0")


def decode_header(page: bytes, path: str) -> tuple[int, int]:
    """Return the first byte and the length of the index, from the pack's first page; the inverse of
    ``encode_header``. Raises PackError for another file, CorruptError for a changed header.
    """
    if page[: len(MAGIC)] != MAGIC:
        raise PackError(f"{path}: is not a pack; give a file that `phalanx pack` has written")
    head, stored_checksum = page[: _HEADER.size], page[_HEADER.size : _HEADER.size + _CHECKSUM.size]
    if _CHECKSUM.pack(xxhash.xxh3_64_intdigest(head)) != stored_checksum:
        raise CorruptError(f"{path}: the header differs from its checksum. {REMEDY}")
    _, start, nbytes = _HEADER.unpack(head)
    return start, nbytes


def encode_index(index: PackIndex) -> bytes:
    """Return the index as sealed JSON. Sections with the same layout share one list of tensors; files are base64."""
    layouts = list(dict.fromkeys(section.tensors for section in index.sections))
    number = {layout: place for place, layout in enumerate(layouts)}
    return sealed(
        {
            "version": _VERSION,
            "format": index.format,
            "run": index.run,
            "step": index.step,
            "weights_sha256": index.weights_sha256,
            "rounding": astuple(index.rounding),
            "layouts": [[astuple(tensor) for tensor in layout] for layout in layouts],
            "sections": [
                [
                    *(section.kind, section.prefix, section.layer, section.expert),
                    *(number[section.tensors], section.start),
                ]
                for section in index.sections
            ],
            "xxh3_64": ["".join(f"{digest:016x}" for digest in section) for section in index.checksums],
            "files": {name: base64.b64encode(data).decode() for name, data in index.files.items()},
        }
    )


def decode_index(data: bytes, path: str) -> PackIndex:
    """Inverse of ``encode_index``. Raises CorruptError if any byte was changed, FormatVersionError for another version."""
    try:
        content = parse_object(data, path).get("content")
        is_intact = isinstance(content, dict) and sealed(content) == data
    except CorruptError:
        is_intact = False
    if not is_intact or not isinstance(content, dict):
        raise CorruptError(f"{path}: the index differs from its checksum. {REMEDY}")
    if content.get("version") != _VERSION:
        raise FormatVersionError(
            f"{path}: pack version {content.get('version')!r}; this version of Phalanx reads {_VERSION}. Pack the run again."
        )
    try:
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
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise CorruptError(f"{path}: not a pack's index: {error!r}. {REMEDY}") from error

"""The layout of a pack: which tensors lie together, in which order, in which format.

A checkpoint's images hold what each rank held, in fp32 and with the optimizer's moments. A server that reads weights as it computes wants
the opposite: a layer's bytes side by side in the order of layers, each expert's apart from the others, because most are not needed. So a
pack consists of *sections*, each read as one: what is always resident (final norm, routers), the embedding, each layer's body followed by
its experts, the head, the predictions ahead. Sections of 2 MiB and more begin on 2 MiB, smaller ones on a page, so that all can be read
past the page cache.

In the narrow formats, matrices of the blocks have 8-bit elements with a scale (its exponent, one byte) for 32 neighbors of a row; embedding
and head are bf16, and routers, norms and biases stay fp32. Pure: names and shapes in, offsets out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from phalanx.checkpoint.format.boxes import ITEMSIZE, Extent
from phalanx.checkpoint.format.image import PAGE_BYTES

PackFormat = Literal["fp32", "bf16", "fp8", "int8"]
SectionKind = Literal["kept", "embedding", "block", "expert", "head", "ahead"]

CHUNK_BYTES = 2 << 20
"""Bytes under one checksum."""
SHARING = 32
"""Elements of a row that share a scale."""
_ALIGNMENT = 64  # of a tensor in its section: PyTorch's own, so that kernels take the same path
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
    """A tensor (of an expert: its matrix of the stack) in its section; offsets are bytes from the section's beginning."""

    name: str
    """Behind the section's prefix; of an expert, the stack's last name: ``gate``."""
    dtype: str
    shape: Extent
    start: int
    scale_start: int | None = None
    """Where the scales ``(rows, columns / 32 rounded up)`` lie, of which there is one exponent (uint8) each."""

    @property
    def nbytes(self) -> int:
        """Bytes of the elements alone."""
        return math.prod(self.shape) * ITEMSIZE[self.dtype]

    @property
    def scale_shape(self) -> Extent:
        """The shape of the scales, if it has some."""
        return (*self.shape[:-1], -(-self.shape[-1] // SHARING))

    @property
    def stop(self) -> int:
        """The end of elements and scales."""
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
    """Prefix of its tensors' full names: ``blocks.3.``; of an expert, ``blocks.3.ffn.experts.``."""
    layer: int
    """-1 outside the blocks."""
    expert: int
    """-1 unless it is one expert's."""
    tensors: Layout
    start: int

    @property
    def nbytes(self) -> int:
        """Bytes, without what lies between this section and the next."""
        return self.tensors[-1].stop if self.tensors else 0

    @property
    def chunks(self) -> int:
        """Chunks, the last one shorter unless it happens to fit."""
        return -(-self.nbytes // CHUNK_BYTES)

    @property
    def name(self) -> str:
        """For messages."""
        if self.kind == "expert":
            return f"layer {self.layer}, expert {self.expert}"
        return f"layer {self.layer}" if self.kind == "block" else self.kind


def padded_bytes(nbytes: int) -> int:
    """``nbytes`` up to the end of the page: what is read past the page cache."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


def lay_out(shapes: Mapping[str, Extent], form: PackFormat, *, custom: bool = False) -> tuple[Section, ...]:
    """The sections of a model with tensors of these full names and shapes.

    The parts of a user's own model (``custom``) have names of the user's, so that nothing is known of experts and routers there.
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
    if name.startswith("embedding."):
        return "embedding"
    if name.startswith("head."):
        return "head"
    return "ahead" if name.startswith("mtp.") else "kept"


def _placed(members: Iterable[tuple[str, Extent]], kind: SectionKind, form: PackFormat) -> Layout:
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
    """The dtype of a tensor in a pack of this format, by its name behind the section's prefix."""
    if name.endswith("router.bias"):
        return "float32"  # no parameter: it takes part in a choice that is made in fp32, whatever the rest is
    if form in _NARROW and len(shape) == 2:
        if kind == "expert" or (kind in ("block", "ahead") and name.endswith(".weight")):
            return _NARROW[form]
        if kind in ("embedding", "head"):
            return "bfloat16"
    return _WIDE[form]


def _aligned(offset: int, unit: int) -> int:
    return -(-offset // unit) * unit

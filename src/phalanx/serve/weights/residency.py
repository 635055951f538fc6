"""What of a pack stays in memory, and what is streamed, by the bytes that there are. Pure.

Ends and routers stay. Each pass reads every streamed layer's body whole, and of its experts only those chosen; so room that is left first
keeps bodies, spread evenly so that the reader never has to stand still for long, and then experts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from phalanx.checkpoint.format.boxes import ITEMSIZE
from phalanx.checkpoint.pack.index import PackError, PackIndex
from phalanx.checkpoint.pack.layout import Section, padded_bytes

LEAST_EXPERTS = 2


class TooLargeError(PackError):
    """The model, or what streaming it needs, does not fit into the memory that may be used."""


@dataclass(frozen=True)
class Residency:
    """A division of memory."""

    buffers: int
    """Buffers of the ring; 0 if no body is streamed."""
    resident_layers: frozenset[int]
    expert_slots: int
    """Experts that are held at once; 0 for a model without."""
    nbytes: int
    """What all of it takes."""


def wide_bytes(section: Section, dtype: str) -> int:
    """Bytes of a section's tensors in the dtype that is computed with."""
    return sum(-(-math.prod(one.shape) * ITEMSIZE[dtype] // 64) * 64 for one in section.tensors)


def is_direct(section: Section, dtype: str) -> bool:
    """True if a section's bytes can be computed with as they are."""
    return all(one.dtype == dtype for one in section.tensors)


def resident_bytes(index: PackIndex, dtype: str) -> int:
    """What the whole model takes."""
    return sum(wide_bytes(one, dtype) for one in index.sections if one.kind != "ahead")


@dataclass(frozen=True)
class _Sizes:
    """Bytes of the parts that memory is divided among."""

    fixed: int
    """Embedding, head, routers, and memory for converting what is stored in another dtype."""
    slot: int
    """An expert; 0 for a model without."""
    of_buffer: int

    @property
    def least(self) -> int:
        """The least that streaming works in."""
        return self.fixed + 2 * self.of_buffer + LEAST_EXPERTS * self.slot


def _sizes(index: PackIndex, dtype: str) -> _Sizes:
    bodies = [one for one in index.sections if one.kind == "block"]
    experts = [one for one in index.sections if one.kind == "expert"]
    fixed = sum(wide_bytes(one, dtype) for one in index.sections if one.kind in ("kept", "embedding", "head"))
    fixed += max((wide_bytes(one, dtype) for one in bodies if not is_direct(one, dtype)), default=0)
    fixed += max((wide_bytes(one, dtype) for one in experts if not is_direct(one, dtype)), default=0)
    slot = max((padded_bytes(one.nbytes) for one in experts), default=0)
    return _Sizes(fixed, slot, max((padded_bytes(one.nbytes) for one in bodies), default=0))


def least_bytes(index: PackIndex, dtype: str) -> int:
    """The least memory for weights that ``divide_memory`` takes."""
    return _sizes(index, dtype).least


def divide_memory(index: PackIndex, dtype: str, memory_bytes: int, buffers: int = 3) -> Residency:
    """The division of ``memory_bytes`` for a model that is streamed. Raises TooLargeError with the least that would do."""
    bodies = {one.layer: one for one in index.sections if one.kind == "block"}
    experts = sum(one.kind == "expert" for one in index.sections)
    sizes = _sizes(index, dtype)
    fixed, slot, of_buffer = sizes.fixed, sizes.slot, sizes.of_buffer
    if memory_bytes < sizes.least:
        raise TooLargeError(
            f"streaming this model needs {sizes.least:,} bytes for its weights ({fixed:,} for embedding, head and conversion, two buffers of "
            f"{of_buffer:,}, {LEAST_EXPERTS} experts of {slot:,}), and may use {memory_bytes:,}: give it more (--memory), or pack it in a "
            "narrower format"
        )
    left = memory_bytes - fixed - LEAST_EXPERTS * slot
    buffers = min(buffers, left // of_buffer) if of_buffer else 0
    resident = _resident(
        {layer: wide_bytes(one, dtype) for layer, one in bodies.items()}, left, buffers * of_buffer
    )
    buffers = buffers if len(resident) < len(bodies) else 0
    left -= buffers * of_buffer + sum(wide_bytes(bodies[layer], dtype) for layer in resident)
    slots = min(experts, LEAST_EXPERTS + left // slot) if slot else 0
    used = memory_bytes - left + (slots - LEAST_EXPERTS) * slot if slot else memory_bytes - left
    return Residency(buffers, frozenset(resident), slots, used)


def _resident(bodies: Mapping[int, int], room: int, for_buffers: int) -> set[int]:
    """The layers whose bodies stay, evenly spread."""
    if sum(bodies.values()) <= room:
        return set(bodies)
    largest = max(bodies.values(), default=0)
    count = (room - for_buffers) // largest if largest else 0
    layers = sorted(bodies)
    return {layers[(2 * place + 1) * len(layers) // (2 * count)] for place in range(count)}

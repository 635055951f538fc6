"""A hard limit on a process's memory, divided: the process itself, computing, keys and values, and weights, resident or streamed. Pure.

Weights are the only part that can shrink, so all others are reckoned at their most. Keys and values get a quarter of what the process leaves,
for as many texts of the longest kind as that holds, one at least; where all weights fit, also what they leave.

Ends and routers stay. Each pass reads every streamed layer's body whole, and of its experts only those chosen; so room that is left first
keeps bodies, spread evenly so that the reader never has to stand still for long, and then experts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from phalanx.checkpoint.format.boxes import ITEMSIZE
from phalanx.checkpoint.pack.layout import PackError, PackIndex, Section, padded_bytes
from phalanx.run.kinds.attention import attention_kind
from phalanx.run.spec import ModelSpec
from phalanx_serve.kv_cache.layer_cache import TOGETHER
from phalanx_serve.kv_cache.memory import BLOCK

# Weights: what stays in memory, and what is streamed.


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


# The process.


LIBRARIES = 64 << 20
"""Bytes that a process takes later for threads' stacks, the libraries' own buffers and what its allocator does not give back."""
_TEXTS_SHARE = 4


@dataclass(frozen=True)
class Computing:
    """How much a pass computes at once."""

    rows: int
    scored_rows: int
    """Rows whose distribution over the vocabulary is computed at a time."""
    keys: int
    """The most keys that a row attends to."""
    any_form: bool = False
    """Whether latent attention may be expanded or absorbed whatever the run says, as with fast numerics."""

    def nbytes(self, spec: ModelSpec, dtype: str) -> int:
        """Bytes of a pass of a resolved model at their most: hidden states and products in fp32, masks, scores, and expanded latents."""
        moe, mla = spec.moe, spec.mla
        inner = spec.ffn_dim if moe is None else (moe.per_token + moe.shared) * moe.ffn_dim
        heads = spec.head_dim if mla is None else mla.nope_head_dim + mla.rope_head_dim + mla.value_head_dim
        hidden = self.rows * (8 * spec.dim + 4 * max(inner, spec.ffn_dim) + 4 * spec.heads * heads) * 4
        masks = self.rows * self.keys * (1 + ITEMSIZE[dtype])
        expanded = 0 if mla is None else 2 * self.keys * spec.heads * heads * ITEMSIZE[dtype]
        if mla is not None and (mla.absorbed or self.any_form):
            # Queries and results as wide as latents; what few queries of all heads see.
            hidden += self.rows * 3 * spec.heads * (mla.kv_rank + mla.rope_head_dim) * 4
            masks += TOGETHER * self.keys * (1 + ITEMSIZE[dtype])
        return hidden + masks + expanded + self.scored_rows * spec.vocab_size * 3 * 4


@dataclass(frozen=True)
class Budget:
    """A division of the memory that a process may take, in bytes."""

    process: int
    computing: int
    texts: int
    """How many texts there may be at a time."""
    of_text: int
    """Keys and values of a text of the longest kind."""
    weights: int

    def __str__(self) -> str:
        mib = [part >> 20 for part in (self.process, self.computing, self.texts * self.of_text, self.weights)]
        return (
            f"of memory {mib[0]:,} MiB are the process, {mib[1]:,} a pass, {mib[2]:,} keys and values of {self.texts} texts, "
            f"{mib[3]:,} weights"
        )


def text_bytes(spec: ModelSpec, dtype: str, context: int) -> int:
    """Bytes of a text of ``context`` tokens in an engine: its pages, and its keys and values in one piece, which grows by doubling."""
    heads, key, value = attention_kind(spec).cache_row(spec)
    most = max(BLOCK, 2 * context)
    return (
        spec.layers
        * heads
        * (key + value)
        * ITEMSIZE[dtype]
        * (context + -context % 64 + most + -most % BLOCK)
    )


def divide_budget(
    index: PackIndex,
    dtype: str,
    total: int,
    *,
    process: int,
    computing: int,
    of_text: int,
    most_texts: int,
    fewer: str = "fewer tokens at once (--rows, --context), ",
) -> Budget:
    """The division of ``total`` for a model that is streamed and computes up to ``most_texts`` texts. Raises TooLargeError with the least
    that would do, and how a pass may be made smaller (``fewer``)."""
    left, least = total - process - computing, least_bytes(index, dtype)
    if left < least + of_text:
        raise TooLargeError(
            f"streaming this model needs {process + computing + of_text + least:,} bytes of memory ({process:,} for the process, "
            f"{computing:,} for a pass, {of_text:,} for keys and values of one text, {least:,} for the weights that are there at a time), and "
            f"may take {total:,}: give it more (--memory), {fewer}or pack it in a narrower format"
        )
    texts = 1
    if of_text:
        texts = max(1, min(most_texts, left // _TEXTS_SHARE // of_text, (left - least) // of_text))
        spare = left - texts * of_text - divide_memory(index, dtype, left - texts * of_text).nbytes
        texts = min(most_texts, texts + spare // of_text)
    return Budget(process, computing, texts, of_text, left - texts * of_text)

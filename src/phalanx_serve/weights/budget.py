"""Division of a process's memory limit among the process itself, activations, keys and values, and weights, resident
or streamed. Pure.

Only the weights can shrink, so all other parts are counted at their maximum. Keys and values get a quarter of the
remaining memory, for as many of the longest texts as fit, at least one. If all weights fit, they also get the rest.

The embedding, head and routers stay resident. Each pass reads every streamed layer's body, and only the chosen
experts. So spare memory first keeps bodies, evenly spaced so that the reader never stalls for long, and then experts.
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
_BUFFERS = 3
"""Most buffers of the ring."""


class TooLargeError(PackError):
    """The model, or the memory that streaming needs, exceeds the limit."""


@dataclass(frozen=True)
class Residency:
    """Division of the memory for weights."""

    buffers: int
    """Buffers of the ring; 0 if no body is streamed."""
    resident_layers: frozenset[int]
    expert_slots: int
    """Experts in memory at once; 0 for a model without experts."""
    nbytes: int
    """Total bytes."""


def wide_bytes(section: Section, dtype: str) -> int:
    """Return the bytes of a section's tensors in the compute dtype."""
    return sum(-(-math.prod(tensor.shape) * ITEMSIZE[dtype] // 64) * 64 for tensor in section.tensors)


def is_direct(section: Section, dtype: str) -> bool:
    """Return True if a section is stored in the compute dtype."""
    return all(tensor.dtype == dtype for tensor in section.tensors)


def resident_bytes(index: PackIndex, dtype: str) -> int:
    """Return the bytes of the full model."""
    return sum(wide_bytes(section, dtype) for section in index.sections if section.kind != "ahead")


@dataclass(frozen=True)
class _Sizes:
    """Bytes of the parts of a streamed model."""

    fixed: int
    """Embedding, head, routers, and buffers for converting sections that are stored in another dtype."""
    slot: int
    """One expert; 0 for a model without experts."""
    of_buffer: int

    @property
    def least(self) -> int:
        """Least bytes that streaming needs."""
        return self.fixed + 2 * self.of_buffer + LEAST_EXPERTS * self.slot


def _sizes(index: PackIndex, dtype: str) -> _Sizes:
    """Return the bytes of a streamed model: what always stays, an expert's slot, and a buffer."""
    bodies = [section for section in index.sections if section.kind == "block"]
    experts = [section for section in index.sections if section.kind == "expert"]
    fixed = sum(
        wide_bytes(section, dtype)
        for section in index.sections
        if section.kind in ("kept", "embedding", "head")
    )
    for sections in (bodies, experts):
        widened = (wide_bytes(section, dtype) for section in sections if not is_direct(section, dtype))
        fixed += max(widened, default=0)
    slot = max((padded_bytes(section.nbytes) for section in experts), default=0)
    return _Sizes(fixed, slot, max((padded_bytes(section.nbytes) for section in bodies), default=0))


def least_bytes(index: PackIndex, dtype: str) -> int:
    """Return the least memory for weights that ``divide_memory`` accepts."""
    return _sizes(index, dtype).least


def divide_memory(index: PackIndex, dtype: str, memory_bytes: int) -> Residency:
    """Divide ``memory_bytes`` for a streamed model: buffers of the ring, resident layers, and slots for experts.

    Experts get what the layers leave, and ``LEAST_EXPERTS`` in any case. Without streamed layers there are no
    buffers. Raises TooLargeError with the least that suffices.
    """
    bodies = {section.layer: section for section in index.sections if section.kind == "block"}
    experts = sum(section.kind == "expert" for section in index.sections)
    sizes = _sizes(index, dtype)
    fixed, slot, of_buffer = sizes.fixed, sizes.slot, sizes.of_buffer
    if memory_bytes < sizes.least:
        raise TooLargeError(
            f"streaming this model needs {sizes.least:,} bytes for its weights ({fixed:,} for embedding, head and conversion, two buffers of "
            f"{of_buffer:,}, {LEAST_EXPERTS} experts of {slot:,}), and may use {memory_bytes:,}: give it more (--memory), or pack it in a "
            "narrower format"
        )
    remaining = memory_bytes - fixed - LEAST_EXPERTS * slot
    buffers = min(_BUFFERS, remaining // of_buffer) if of_buffer else 0
    resident = _resident(
        {layer: wide_bytes(section, dtype) for layer, section in bodies.items()},
        remaining,
        buffers * of_buffer,
    )
    buffers = buffers if len(resident) < len(bodies) else 0
    remaining -= buffers * of_buffer + sum(wide_bytes(bodies[layer], dtype) for layer in resident)
    slots = min(experts, LEAST_EXPERTS + remaining // slot) if slot else 0
    used = memory_bytes - remaining + (slots - LEAST_EXPERTS) * slot
    return Residency(buffers, frozenset(resident), slots, used)


def _resident(bodies: Mapping[int, int], room: int, for_buffers: int) -> set[int]:
    """Return the layers whose bodies stay resident, evenly spaced; all if they fit without the ``for_buffers`` bytes."""
    if sum(bodies.values()) <= room:
        return set(bodies)
    largest = max(bodies.values(), default=0)
    count = (room - for_buffers) // largest if largest else 0
    layers = sorted(bodies)
    return {layers[(2 * place + 1) * len(layers) // (2 * count)] for place in range(count)}


# The process.


LIBRARIES = 64 << 20
"""Bytes that a process allocates later for thread stacks, library buffers and allocator fragmentation."""
_TEXTS_SHARE = 4


@dataclass(frozen=True)
class Computing:
    """Size of one pass."""

    rows: int
    scored_rows: int
    """Rows whose logits are computed at a time."""
    keys: int
    """Most keys that a row attends to."""
    any_form: bool = False
    """True if latent attention may be expanded or absorbed regardless of the run, as with fast numerics."""

    def nbytes(self, spec: ModelSpec, dtype: str) -> int:
        """Return the peak bytes of a pass: hidden states and products in fp32, masks, scores, and expanded
        latents.
        """
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
class MemoryBudget:
    """Division of a process's memory limit, in bytes."""

    process: int
    computing: int
    texts: int
    """Most texts at a time."""
    of_text: int
    """Keys and values of a text of maximum length."""
    weights: int

    def __str__(self) -> str:
        """The parts of the memory in MiB, in a sentence."""
        mib = [part >> 20 for part in (self.process, self.computing, self.texts * self.of_text, self.weights)]
        return (
            f"of memory {mib[0]:,} MiB are the process, {mib[1]:,} a pass, {mib[2]:,} keys and values of {self.texts} texts, "
            f"{mib[3]:,} weights"
        )


def text_bytes(spec: ModelSpec, dtype: str, context: int) -> int:
    """Return the bytes of a text of ``context`` tokens in an engine: its pages of 64, and its contiguous keys and
    values.

    The latter grow by doubling, so may take twice the context.
    """
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
) -> MemoryBudget:
    """Divide ``total`` bytes for a streamed model that computes up to ``most_texts`` texts.

    Texts get at most a share ``1 / _TEXTS_SHARE``, and what the weights do not use; at least one text. Raises
    TooLargeError with the least that suffices, and with ways to make a pass smaller (``fewer``).
    """
    remaining, least = total - process - computing, least_bytes(index, dtype)
    if remaining < least + of_text:
        raise TooLargeError(
            f"streaming this model needs {process + computing + of_text + least:,} bytes of memory ({process:,} for the process, "
            f"{computing:,} for a pass, {of_text:,} for keys and values of one text, {least:,} for the weights that are there at a time), and "
            f"may take {total:,}: give it more (--memory), {fewer}or pack it in a narrower format"
        )
    texts = 1
    if of_text:
        texts = max(1, min(most_texts, remaining // _TEXTS_SHARE // of_text, (remaining - least) // of_text))
        spare = remaining - texts * of_text - divide_memory(index, dtype, remaining - texts * of_text).nbytes
        texts = min(most_texts, texts + spare // of_text)
    return MemoryBudget(process, computing, texts, of_text, remaining - texts * of_text)

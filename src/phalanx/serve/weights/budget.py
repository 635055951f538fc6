"""A hard limit on a process's memory, divided: the process itself, computing, keys and values, and what is left for weights. Pure.

Weights are the only part that can shrink, so all others are reckoned at their most. Keys and values get a quarter of what the process leaves,
for as many texts of the longest kind as that holds, one at least; where all weights fit, also what they leave.
"""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.checkpoint.format.boxes import ITEMSIZE
from phalanx.checkpoint.pack.index import PackIndex
from phalanx.run.kinds.attention import attention_kind
from phalanx.run.spec import ModelSpec
from phalanx.serve.kv_cache.layer_cache import TOGETHER
from phalanx.serve.kv_cache.memory import BLOCK
from phalanx.serve.weights.residency import TooLargeError, divide_memory, least_bytes

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

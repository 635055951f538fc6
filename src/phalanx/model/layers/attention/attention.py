"""Causal self-attention with grouped key/value heads (arXiv 2305.13245), its cache, and documents of packed sequences.

Projections and attention are separate: ``Attention`` computes queries, keys and values, and passes them to its ``core``. Parallelism
over the sequence or the heads replaces the core. The number of heads follows from the weights, so a module with the rows of fewer
heads works unchanged.

Shapes: ``b`` batch, ``s`` sequence, ``d`` model width, ``h`` query heads, ``k`` key/value heads, ``e`` head width, ``v`` value width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.hardware.local.device import brought
from phalanx.model.autograd import uncompiled
from phalanx.model.layers.attention.attend import Score, attend_whole_rows
from phalanx.model.layers.attention.rotary import rotate
from phalanx.model.layers.dense import Linear, RMSNorm
from phalanx.run.kinds.grouped_attention import attention_of, window_of
from phalanx.run.spec import ModelSpec

# The KV cache of an attention layer, for generation.
#
# Latent attention caches the source of keys and values instead: the normalized latent, and the rotated part of the keys. It is
# expanded again for every new token, which costs time but keeps the cache small.

Expand = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Function from cache entries of latent attention to keys and values."""


class Cache(Protocol):
    """KV cache of one layer for one text, or for several texts whose rows are computed together."""

    @property
    def length(self) -> int:
        """Number of cached tokens of the text. With several texts, each row's position must be passed to the model."""
        ...

    @property
    def takes_any_form(self) -> bool:
        """True if latent attention may be expanded or absorbed, whichever needs fewer operations, regardless of the run."""
        ...

    def mix(
        self,
        core: Core,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None = None,
        expand: Expand | None = None,
    ) -> Tensor:
        """Append the keys and values ``(b, k, s, .)`` of new tokens; return the attention of queries ``(b, h, s, e)`` to all tokens."""
        ...


# Attention within the documents of packed sequences, one document after the other.
#
# A mask over full sequences is expensive: ``s * s`` bytes a sequence, the scores of every pair of tokens, and no flash kernel, since
# those support no mask. Here each document is a separate sequence for the causal kernel, so the work is the sum of the squares of the
# documents' lengths. The lengths are on the host: one kernel is launched for each document, without waiting for the device.


@dataclass(eq=False)
class Documents:
    """Documents of a batch of packed sequences. Tokens of different documents do not see each other. Do not modify.

    It is not frozen, because Dynamo of PyTorch 2.11 reads every field of a frozen dataclass (``FrozenDataClassVariable``), and would
    recompile a block for each number of ``lengths``. Of other objects it reads only the fields in use.
    """

    ids: Tensor
    """``(b, s)``, int64: the number of each token's document. Equal for tokens of one document; neighbors of different documents differ.
    """
    lengths: tuple[int, ...]
    """Tokens of each document, sequence after sequence; their sum is ``b * s``."""

    @classmethod
    def numbered(cls, ids: Tensor) -> Self:
        """Return the documents of ``ids`` ``(b, s)``, with the length of each run of equal ids in a sequence. Waits
        for the device if ``ids`` are not on the host.
        """
        first = torch.ones_like(ids, dtype=torch.bool)  # (b, s): True at the first token of each document
        first[:, 1:] = ids[:, 1:] != ids[:, :-1]
        starts = first.flatten().nonzero().flatten()  # (documents,): positions in the flattened (b s,)
        ends = torch.cat((starts[1:], starts.new_full((1,), ids.numel())))  # (documents,)
        return cls(ids, tuple((ends - starts).tolist()))

    def to(self, device: torch.device) -> Self:
        """Return the same documents with ``ids`` on ``device``."""
        return type(self)(brought(self.ids, device), self.lengths)


Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Causal attention of ``(1, h, n, e)``, ``(1, k, n, e)`` and ``(1, k, n, v)`` to ``(1, h, n, v)``."""


@uncompiled
def attend_by_document(
    query: Tensor, key: Tensor, value: Tensor, documents: Documents, attend: Attend
) -> Tensor:
    """Return the attention ``(b, h, s, v)`` of each document to itself: ``attend`` is called with each document's
    ``(1, h, n, e)``, ``(1, k, n, e)`` and ``(1, k, n, v)``.

    Uncompiled, because the compiler would make another program for every batch.
    """
    batch, _, seq, _ = query.shape
    # Documents are contiguous in (b s, heads, width). The backward pass of split is one concatenation.
    lengths = list(documents.lengths)
    pieces = (
        torch.split(x.transpose(1, 2).flatten(0, 1), lengths) for x in (query, key, value)
    )  # (n, heads, width)
    # (n, h, v) each; `attend` takes (1, heads, n, width)
    mixed = [
        attend(*(piece.transpose(0, 1).unsqueeze(0) for piece in document)).squeeze(0).transpose(0, 1)
        for document in zip(*pieces, strict=True)
    ]
    joined = torch.cat(mixed)  # (b s, h, v)
    return joined.view(batch, seq, *joined.shape[1:]).transpose(1, 2)  # (b, h, s, v)


class Core(Protocol):
    """Attention of queries to keys and values."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        documents: Documents | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Return ``(b, h, s, v)`` from query ``(b, h, s, e)``, key ``(b, k, s, e)``, value ``(b, k, s, v)``, documents and sinks ``(h,)``."""
        ...


Softmax = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""Attention of queries ``(b, h, q, e)`` to keys and values ``(b, k, n, .)`` that a mask ``(q, n)`` or ``(b, 1, q, n)`` makes visible.

Without a mask each query sees the keys up to its own position.
"""


class CausalCore:
    """Softmax attention in which a token sees itself and earlier tokens, within its document and its window."""

    def __init__(self, scale: float | None = None, window: int = 0, cap: float = 0.0) -> None:
        self.score = Score(scale, cap)
        self.window = window
        """Number of tokens that a token sees, including itself; 0 means no limit."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        documents: Documents | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Return ``(b, h, s, v)``, each token's attention to itself and earlier ones in its document and window.

        If there are more keys than queries, the queries are the last tokens of one document.
        """
        softmax = self.softmax(sinks)

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            if 0 < self.window < key.shape[2]:
                return windowed_attention(query, key, value, self.window, softmax)
            return softmax(query, key, value, None)

        queries, keys = query.shape[2], key.shape[2]
        if documents is not None:
            return attend_by_document(query, key, value, documents, attend)
        if queries == keys:
            return attend(query, key, value)
        # A continuation of n tokens after c cached ones: query i sees keys up to c + i.
        mask = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril(keys - queries)  # (q, n)
        if self.window:
            mask = mask.triu(keys - queries - self.window + 1)
        return softmax(query, key, value, mask)

    def softmax(self, sinks: Tensor | None, *, causal: bool = True) -> Softmax:
        """Return PyTorch's attention, or ours, ``attend_whole_rows``, if there is a cap or a sink. A mask ``(q, n)``
        is true for visible keys; without one attention is causal, or sees all keys if not ``causal``.
        """
        score = self.score

        def plain(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
            """Return PyTorch's attention; keys and values are shared by groups of query heads."""
            grouped = key.shape[1] != query.shape[1]
            return F.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=mask,
                is_causal=causal and mask is None,
                scale=score.scale,
                enable_gqa=grouped,
            )

        def with_denominators(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
            return attend_whole_rows(
                query, key, value, sinks, score, causal=causal and mask is None, visible=mask
            )

        return plain if sinks is None and not score.cap else with_denominators


def windowed_attention(query: Tensor, key: Tensor, value: Tensor, window: int, softmax: Softmax) -> Tensor:
    """Return causal attention in which a token sees only the last ``window`` tokens, itself included, fewer than the
    sequence has; shapes as ``Core``.

    The sequence is cut into blocks of ``window`` queries. The first block sees its own keys. Each other block sees
    its own keys and those of the previous block, as a separate entry of the batch. So the work is that of the band,
    not of the square (block-local attention, as in Longformer, arXiv 2004.05150, section 3.1).
    """
    batch, _, seq, _ = query.shape
    first = softmax(query[:, :, :window], key[:, :, :window], value[:, :, :window], None)  # (b, h, window, v)
    # Padding queries see themselves; their results are cut off below.
    queries = _blocks(query, window)[:, :, 1:].transpose(1, 2).flatten(0, 1)  # (b blocks, h, window, e)
    # (b blocks, k, 2 window, .)
    keys, values = (
        torch.cat((x[:, :, :-1], x[:, :, 1:]), dim=3).transpose(1, 2).flatten(0, 1)
        for x in (_blocks(key, window), _blocks(value, window))
    )
    # Query i is at position window + i of its 2 window keys: it sees keys i + 1 to window + i.
    mask = torch.ones(window, 2 * window, dtype=torch.bool, device=query.device).tril(window).triu(1)
    others = softmax(queries, keys, values, mask)  # (b blocks, h, window, v)
    others = (
        others.view(batch, -1, *others.shape[1:]).transpose(1, 2).flatten(2, 3)
    )  # (b, h, blocks window, v)
    return torch.cat((first, others), dim=2)[:, :, :seq]  # (b, h, s, v)


def _blocks(x: Tensor, window: int) -> Tensor:
    """Pad ``(b, heads, s, width)`` with zeros and reshape it to ``(b, heads, blocks, window, width)``."""
    filled = F.pad(x, (0, 0, 0, -x.shape[2] % window))  # (b, heads, blocks window, width)
    return filled.reshape(*x.shape[:2], -1, window, x.shape[-1])  # (b, heads, blocks, window, width)


class Attention(nn.Module):
    """Attention in which groups of query heads share a key/value head."""

    OUTPUT: ClassVar[str] = "output"
    """Name of the last matrix, whose inputs are divided if ranks or lanes divide the layer."""
    BY_TOKENS: ClassVar[tuple[str, ...]] = ()
    """Names of the modules that ``by_tokens`` uses."""

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        """Build the attention of layer ``layer``, from 0, of a resolved ``spec``: its window, rotation, biases, norms
        of heads or of all heads, and uninitialized sinks follow from ``spec``.
        """
        super().__init__()
        self.head_dim = spec.head_dim
        queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        bias = spec.attention_bias or spec.qkv_bias
        self.query = Linear(spec.dim, queries, bias=bias)
        self.key = Linear(spec.dim, keys, bias=bias)
        self.value = Linear(spec.dim, keys, bias=bias)
        self.output = Linear(queries, spec.dim, bias=spec.attention_bias)
        self.normalizes_heads = spec.qk_norm_width == "head"
        widths = (spec.head_dim, spec.head_dim) if self.normalizes_heads else (queries, keys)
        self.query_norm = RMSNorm(widths[0], spec.norm_eps, offset=spec.norm_offset) if spec.qk_norm else None
        self.key_norm = RMSNorm(widths[1], spec.norm_eps, offset=spec.norm_offset) if spec.qk_norm else None
        self.rotated = attention_of(spec, layer) != "no-position"
        self.sinks = nn.Parameter(torch.empty(spec.heads)) if spec.sinks else None
        scale = 1 / math.sqrt(spec.score_width) if spec.score_width else None
        self.core: Core = CausalCore(scale, window_of(spec, layer), spec.score_cap)

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        documents: Documents | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """Return the layer's result ``(b, s, d)`` for ``x`` ``(b, s, d)`` and the rotary tables. With a cache, ``x``
        continues the cached tokens, is added to it, and ``documents`` is not used.
        """
        return self.by_heads(self.by_tokens(x), cos, sin, documents, cache)

    def by_tokens(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the inputs of ``by_heads``, computed token by token: here the hidden states ``(b, s, d)`` themselves."""
        return (x,)

    def by_heads(
        self,
        inputs: tuple[Tensor, ...],
        cos: Tensor,
        sin: Tensor,
        documents: Documents | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """Return the result ``(b, s, d)`` of the heads whose weights the module has, for the outputs of
        ``by_tokens``.

        The sum over all heads is the layer's result. New keys and values are added to ``cache``, if given.
        """
        query, key, value = self.projected(inputs, cos, sin)
        if cache is not None:
            return self.result(cache.mix(self.core, query, key, value, self.sinks))
        return self.result(self.core(query, key, value, documents, self.sinks))

    def projected(
        self, inputs: tuple[Tensor, ...], cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries ``(b, h, s, e)``, keys ``(b, k, s, e)`` and values ``(b, k, s, v)`` for the outputs of
        ``by_tokens``.

        Queries and keys are normalized if the model does so, by head or over all heads, then rotated unless the layer
        has no positions.
        """
        (x,) = inputs
        query, key = self.query(x), self.key(x)
        if self.query_norm is not None and self.key_norm is not None and not self.normalizes_heads:
            query, key = self.query_norm(query), self.key_norm(key)
        query = query.unflatten(-1, (-1, self.head_dim))  # (b, s, h, e)
        key = key.unflatten(-1, (-1, self.head_dim))  # (b, s, k, e)
        value = self.value(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # (b, k, s, v)
        if self.query_norm is not None and self.key_norm is not None and self.normalizes_heads:
            query, key = self.query_norm(query), self.key_norm(key)
        query, key = query.transpose(1, 2), key.transpose(1, 2)  # (b, h, s, e), (b, k, s, e)
        if self.rotated:
            query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        return query, key, value

    def result(self, mixed: Tensor) -> Tensor:
        """Return the heads' share ``(b, s, d)`` of the layer's result; ``mixed`` ``(b, h, s, v)`` is the result of ``core``."""
        output: Tensor = self.output(mixed.transpose(1, 2).flatten(2))  # (b, s, h v) to (b, s, d)
        return output


# Document numbers of the tokens of a packed sequence.
#
# Samples are cut from concatenated documents. Each ends with the tokenizer's end-of-document token, which no text contains
# (``phalanx.data.preparing.prepare``; some tokenizers also begin each with a token). So documents are counted from the tokens, without
# a table. A sample may begin inside a document; attention needs only to see which tokens have the same number.


def document_ids(tokens: Tensor, end_of_document: int) -> Tensor:
    """Return the number, from 0, of each token's document in its sequence: ``(b, s)``, int64, for tokens ``(b, s)``.

    The end token belongs to its document, and so do further end tokens after it: padding, or documents without text. As separate
    documents they would each launch a kernel in attention, thousands for a record of padding.
    """
    ends = tokens == end_of_document
    begins = torch.zeros_like(tokens)
    begins[..., 1:] = ends[..., :-1] & ~ends[..., 1:]
    return begins.cumsum(-1)

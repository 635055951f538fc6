"""Causal self-attention with grouped key/value heads (arXiv 2305.13245), its cache, and documents of packed sequences.

The projections and the mixing are apart: ``Attention`` makes queries, keys and values, and hands them to its ``core``,
which whoever divides the sequence or the heads over ranks replaces. How many heads there are is read off the weights, so a
module that holds the rows of fewer heads works as it is.

Shapes: ``b`` batch, ``s`` sequence, ``d`` model width, ``h`` query heads, ``k`` key/value heads, ``e`` head width, ``v``
width of a value.
"""

from __future__ import annotations

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
from phalanx.run.kinds.attention import attention_kind
from phalanx.run.kinds.grouped_attention import attention_of, window_of
from phalanx.run.spec import ModelSpec

# The keys and values of tokens that an attention layer has seen, kept during generation.
#
# Latent attention keeps what keys and values are expanded from instead: the normalized latent, and the rotated part of the
# keys. Here it is expanded again for every new token, which costs time but keeps the cache as small as the method promises.

Expand = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""What is kept of keys and values, to keys and values."""


class Mixing(Protocol):
    """Attention of queries to keys and values; ``phalanx.model.layers.attention.attention.Core`` without documents."""

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, documents: None = None, sinks: Tensor | None = None
    ) -> Tensor: ...


class Cache(Protocol):
    """What a layer has seen of one text, or of many whose rows are computed together."""

    @property
    def length(self) -> int:
        """Tokens that are held of the text; of many texts, each row's position must be given to the model."""
        ...

    @property
    def takes_any_form(self) -> bool:
        """Whether latent attention is expanded or absorbed as takes less work, whatever the run says."""
        ...

    def mix(
        self,
        core: Mixing,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None = None,
        expand: Expand | None = None,
    ) -> Tensor:
        """Keeps what is given of new tokens' keys and values ``(b, k, s, .)``; the mixing of all with queries ``(b, h, s, e)``."""
        ...


class LayerCache:
    """Keys and values of one layer, in buffers of fixed capacity ``(batch, kv_heads, max_len, width)``."""

    takes_any_form = False

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self._keys, self._values = keys, values
        self.length = 0

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Stores ``(batch, kv_heads, new, width)`` each and returns all that is held so far.

        Raises ``ValueError`` when the buffer is full.
        """
        end = self.length + key.shape[2]
        if end > self._keys.shape[2]:
            raise ValueError(f"the cache holds {self._keys.shape[2]} tokens, and {end} were asked for")
        self._keys[:, :, self.length : end] = key
        self._values[:, :, self.length : end] = value
        self.length = end
        return self._keys[:, :, :end], self._values[:, :, :end]

    def mix(
        self,
        core: Mixing,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None = None,
        expand: Expand | None = None,
    ) -> Tensor:
        """See ``Cache``."""
        key, value = self.append(key, value)
        if expand is not None:
            key, value = expand(key, value)
        return core(query, key, value, None, sinks)


def empty_cache(
    spec: ModelSpec, batch: int, max_len: int, device: torch.device, dtype: torch.dtype = torch.float32
) -> list[LayerCache]:
    """One empty cache for each layer of a resolved model."""
    heads, key_width, value_width = attention_kind(spec).cache_row(spec)

    def buffer(width: int) -> Tensor:
        return torch.zeros(batch, heads, max_len, width, device=device, dtype=dtype)

    return [LayerCache(buffer(key_width), buffer(value_width)) for _ in range(spec.layers)]


# Attention within the documents of packed sequences, one document after the other.
#
# A mask over whole sequences would cost more than it saves: ``s * s`` bytes a sequence, the scores of every pair of tokens, and no flash
# kernel, since those take no mask. Here each document is a sequence of its own to the causal kernel, so that the work is the sum of the
# squares of the documents' lengths. The lengths are numbers on the host: a kernel is launched for each, and nothing waits for a device.


@dataclass(eq=False)
class Documents:
    """The documents of a batch of packed sequences; tokens of different documents do not see each other. Nobody changes one.

    It is not frozen, since Dynamo of PyTorch 2.11 looks into every field of a frozen dataclass (``FrozenDataClassVariable``) and compiles a
    block anew for each number of ``lengths``; of other objects it looks at what is read.
    """

    ids: Tensor
    """``(b, s)``, int64: the number of each token's document, the same for neighbors of one document and no others."""
    lengths: tuple[int, ...]
    """Tokens of each document, sequence after sequence: they add up to ``b * s``."""

    @classmethod
    def numbered(cls, ids: Tensor) -> Self:
        """Counts the lengths of the documents of ``ids`` ``(b, s)``, which should lie on the host: others are waited for."""
        first = torch.ones_like(ids, dtype=torch.bool)
        first[:, 1:] = ids[:, 1:] != ids[:, :-1]
        starts = first.flatten().nonzero().flatten()
        ends = torch.cat((starts[1:], starts.new_full((1,), ids.numel())))
        return cls(ids, tuple((ends - starts).tolist()))

    def to(self, device: torch.device) -> Self:
        """The same documents, with their numbers on ``device``."""
        return type(self)(brought(self.ids, device), self.lengths)


Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Causal attention of ``(1, h, n, e)``, ``(1, k, n, e)`` and ``(1, k, n, v)`` to ``(1, h, n, v)``."""


@uncompiled
def attend_by_document(
    query: Tensor, key: Tensor, value: Tensor, documents: Documents, attend: Attend
) -> Tensor:
    """``(b, h, s, e)``, ``(b, k, s, e)`` and ``(b, k, s, v)`` to ``(b, h, s, v)``: ``attend`` for each document by itself.

    A compiler would make another program for every batch, so it leaves this function as it is.
    """
    batch, _, seq, _ = query.shape
    # Documents lie behind each other in (b s, heads, width). The backward pass of split is one concatenation.
    lengths = list(documents.lengths)
    pieces = (torch.split(x.transpose(1, 2).flatten(0, 1), lengths) for x in (query, key, value))
    mixed = [
        attend(*(piece.transpose(0, 1).unsqueeze(0) for piece in document)).squeeze(0).transpose(0, 1)
        for document in zip(*pieces, strict=True)
    ]
    together = torch.cat(mixed)  # (b s, h, v)
    return together.view(batch, seq, *together.shape[1:]).transpose(1, 2)


class Core(Protocol):
    """The mixing of values."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        documents: Documents | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Query ``(b, h, s, e)``, key ``(b, k, s, e)``, value ``(b, k, s, v)``, their documents and the heads' sinks ``(h,)``
        to ``(b, h, s, v)``."""
        ...


Softmax = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""Attention of queries ``(b, h, q, e)`` to keys and values ``(b, k, n, .)`` of which they see those that a mask ``(q, n)`` or
``(b, 1, q, n)`` says; without a mask each sees those up to its own place."""


class CausalCore:
    """Softmax attention in which a token sees itself and what came before it, within its document and its window."""

    def __init__(self, scale: float | None = None, window: int = 0, cap: float = 0.0) -> None:
        self.score = Score(scale, cap)
        self.window = window
        """Tokens that a token sees, itself among them; 0 is no limit."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        documents: Documents | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See ``Core``. With more keys than queries, the queries are the last of the sequence, which is one document then."""
        softmax = self.softmax(sinks)

        def whole(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            if 0 < self.window < key.shape[2]:
                return windowed_attention(query, key, value, self.window, softmax)
            return softmax(query, key, value, None)

        new, held = query.shape[2], key.shape[2]
        if documents is not None:
            return attend_by_document(query, key, value, documents, whole)
        if new == held:
            return whole(query, key, value)
        # A continuation of n tokens after c cached ones: query i sees keys up to c + i.
        mask = torch.ones(new, held, dtype=torch.bool, device=query.device).tril(held - new)
        if self.window:
            mask = mask.triu(held - new - self.window + 1)
        return softmax(query, key, value, mask)

    def softmax(self, sinks: Tensor | None, *, causal: bool = True) -> Softmax:
        """PyTorch's own, unless there is a cap or a sink, which it does not know. Without a mask, and not ``causal``, each query sees all keys."""
        score = self.score

        def plain(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
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
                query, key, value, sinks, score, causal=causal and mask is None, seen=mask
            )

        return plain if sinks is None and not score.cap else with_denominators


def windowed_attention(query: Tensor, key: Tensor, value: Tensor, window: int, softmax: Softmax) -> Tensor:
    """Causal attention in which a token sees the last ``window`` tokens alone, fewer than the sequence has; shapes as ``Core``.

    The sequence is cut into blocks of ``window`` queries. The first sees its own keys; each other sees its own and those of
    the block before, as an entry of the batch of its own, so that the work is the band's and not the square's
    (block-local attention, as in Longformer, arXiv 2004.05150, section 3.1).
    """
    batch, _, seq, _ = query.shape
    first = softmax(query[:, :, :window], key[:, :, :window], value[:, :, :window], None)
    # Queries behind the end see themselves, and are cut off again.
    queries = _blocks(query, window)[:, :, 1:].transpose(1, 2).flatten(0, 1)  # (b blocks, h, window, e)
    # (b blocks, k, 2 window, .)
    keys, values = (
        torch.cat((x[:, :, :-1], x[:, :, 1:]), dim=3).transpose(1, 2).flatten(0, 1)
        for x in (_blocks(key, window), _blocks(value, window))
    )
    # Row i is key window + i of its pair: it sees keys i + 1 to window + i.
    mask = torch.ones(window, 2 * window, dtype=torch.bool, device=query.device).tril(window).triu(1)
    rest = softmax(queries, keys, values, mask)
    rest = rest.view(batch, -1, *rest.shape[1:]).transpose(1, 2).flatten(2, 3)
    return torch.cat((first, rest), dim=2)[:, :, :seq]


def _blocks(x: Tensor, window: int) -> Tensor:
    """``(b, heads, s, width)``, filled up with zeros, as ``(b, heads, blocks, window, width)``."""
    filled = F.pad(x, (0, 0, 0, -x.shape[2] % window))
    return filled.reshape(*x.shape[:2], -1, window, x.shape[-1])


class Attention(nn.Module):
    """Attention in which groups of query heads share a key/value head."""

    OUTPUT: ClassVar[str] = "output"
    """The last matrix, whose inputs are divided where ranks or lanes divide the layer."""
    BY_TOKENS: ClassVar[tuple[str, ...]] = ()
    """The modules that ``by_tokens`` computes with."""

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        """Builds that of layer ``layer``, from 0, of a resolved ``spec``."""
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
        scale = spec.score_width**-0.5 if spec.score_width else None
        self.core: Core = CausalCore(scale, window_of(spec, layer), spec.score_cap)

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        documents: Documents | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """``(b, s, d)`` to ``(b, s, d)``; with a cache, ``x`` is the continuation of what the cache holds."""
        return self.by_heads(self.by_tokens(x), cos, sin, documents, cache)

    def by_tokens(self, x: Tensor) -> tuple[Tensor, ...]:
        """What the heads read of each token by itself: its hidden state ``(b, s, d)``."""
        return (x,)

    def by_heads(
        self,
        inputs: tuple[Tensor, ...],
        cos: Tensor,
        sin: Tensor,
        documents: Documents | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """The result ``(b, s, d)`` of the heads whose weights are here; those of all heads add up to that of the layer."""
        query, key, value = self.projected(inputs, cos, sin)
        if cache is not None:
            return self.result(cache.mix(self.core, query, key, value, self.sinks))
        return self.result(self.core(query, key, value, documents, self.sinks))

    def projected(
        self, inputs: tuple[Tensor, ...], cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries ``(b, h, s, e)``, keys ``(b, k, s, e)`` and values ``(b, k, s, v)`` of what ``by_tokens`` gave."""
        (x,) = inputs
        query, key = self.query(x), self.key(x)
        if self.query_norm is not None and self.key_norm is not None and not self.normalizes_heads:
            query, key = self.query_norm(query), self.key_norm(key)
        query = query.unflatten(-1, (-1, self.head_dim))
        key = key.unflatten(-1, (-1, self.head_dim))
        value = self.value(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        if self.query_norm is not None and self.key_norm is not None and self.normalizes_heads:
            query, key = self.query_norm(query), self.key_norm(key)
        query, key = query.transpose(1, 2), key.transpose(1, 2)  # (b, h, s, e), (b, k, s, e)
        if self.rotated:
            query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        return query, key, value

    def result(self, mixed: Tensor) -> Tensor:
        """The heads' share ``(b, s, d)`` of the layer's result, from what ``core`` gave ``(b, h, s, v)``."""
        output: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return output


# Document numbers of the tokens of a packed sequence.
#
# Samples are cut from documents that are joined end to end, each closed by the tokenizer's end-of-document token (``phalanx.data.preparing.prepare``;
# some tokenizers begin each with a token too), and by nothing else: no text yields that token. So a sample needs no table of its documents:
# they can be counted. A sample may begin amid one, and all that matters to attention is which tokens have the same number.


def document_ids(tokens: Tensor, end_of_document: int) -> Tensor:
    """The number, from 0, of each token's document in its sequence: ``(b, s)``, int64, for tokens ``(b, s)``.

    The token that ends a document belongs to it, and so do further ones behind it: the padding of a record, or documents without text. Each
    as a document of its own would be a kernel of its own to attention, thousands for a record of padding.
    """
    ends = tokens == end_of_document
    begins = torch.zeros_like(tokens)
    begins[..., 1:] = ends[..., :-1] & ~ends[..., 1:]
    return begins.cumsum(-1)

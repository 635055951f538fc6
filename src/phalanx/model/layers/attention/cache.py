"""The keys and values that one attention layer has already seen, kept while text is generated.

Latent attention keeps what keys and values are expanded from instead: the normalized latent, and the rotated part of the
keys. Here it is expanded again for every new token, which costs time but keeps the cache as small as the method promises.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from phalanx.run.kinds.attention import attention_kind
from phalanx.run.spec import ModelSpec

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

"""The plainest ``Cache``: it keeps all keys and values of one text, or of several of one length."""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.model.layers.attention.attention import Core, Expand


class GrowingCache:
    """Keys and values of one layer, ``(batch, kv_heads, length, width)`` each."""

    takes_any_form = False

    def __init__(self) -> None:
        self._entries: tuple[Tensor, Tensor] | None = None

    @property
    def length(self) -> int:
        """Number of cached tokens."""
        return 0 if self._entries is None else self._entries[0].shape[2]

    def mix(
        self,
        core: Core,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None = None,
        expand: Expand | None = None,
    ) -> Tensor:
        """Append keys and values ``(b, k, s, .)``, and return the attention of queries ``(b, h, s, e)`` to all."""
        if self._entries is not None:
            key, value = torch.cat((self._entries[0], key), 2), torch.cat((self._entries[1], value), 2)
        self._entries = key, value
        if expand is not None:
            key, value = expand(key, value)
        return core(query, key, value, None, sinks)


def empty_cache(layers: int) -> list[GrowingCache]:
    """Return one empty cache for each of ``layers`` layers."""
    return [GrowingCache() for _ in range(layers)]

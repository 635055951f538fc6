"""The keys and values that one attention layer has already seen, kept while text is generated."""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.run.spec import ModelSpec


class LayerCache:
    """Keys and values of one layer, in a buffer of fixed capacity ``(batch, kv_heads, max_len, head_dim)``."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self._keys, self._values = keys, values
        self.length = 0

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Stores ``(batch, kv_heads, new, head_dim)`` and returns all that is held so far.

        Raises ``ValueError`` when the buffer is full.
        """
        end = self.length + key.shape[2]
        if end > self._keys.shape[2]:
            raise ValueError(f"the cache holds {self._keys.shape[2]} tokens, and {end} were asked for")
        self._keys[:, :, self.length : end] = key
        self._values[:, :, self.length : end] = value
        self.length = end
        return self._keys[:, :, :end], self._values[:, :, :end]


def empty_cache(
    spec: ModelSpec, batch: int, max_len: int, device: torch.device, dtype: torch.dtype = torch.float32
) -> list[LayerCache]:
    """One empty cache for each layer of a resolved model."""
    shape = (batch, spec.kv_heads, max_len, spec.head_dim)

    def buffer() -> Tensor:
        return torch.zeros(shape, device=device, dtype=dtype)

    return [LayerCache(buffer(), buffer()) for _ in range(spec.layers)]

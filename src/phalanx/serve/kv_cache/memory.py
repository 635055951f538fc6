"""Memory of the KV cache: pages, and a contiguous copy for each running text.

Attention kernels on a CPU read contiguous keys, and gathering all pages in every step would cost as much as attention itself. So a
running text has one contiguous tensor for each layer, grown by doubling. Pages are copied out of it when they are full, and into it when a
text begins with them. That takes up to twice the bytes of the pages, which ``pages_within`` includes. Both are on the device that computes. Pages
as bytes are in the host's memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.hardware.local.device import brought, fetched
from phalanx.run.kinds.attention import attention_kind
from phalanx.run.spec import ModelSpec
from phalanx.serve.kv_cache.format import KVFormat, kv_format
from phalanx.traffic.block_table import PAGE

PageBytes = bytes | bytearray | memoryview
BLOCK = 512
"""Tokens by which a text's own copy grows."""


def page_bytes(spec: ModelSpec, kept: KVFormat) -> int:
    """Return the bytes of a page of all layers."""
    return spec.layers * kept.row_bytes * PAGE


def copy_bytes(spec: ModelSpec, dtype: torch.dtype, drafts: int = 0) -> int:
    """Return the bytes of a text's own copy of a page, with the keys and values of ``drafts`` depths of predictions ahead."""
    return page_bytes(spec, kv_format("compute", spec, dtype)) * (spec.layers + drafts) // spec.layers


def pages_within(spec: ModelSpec, kept: KVFormat, memory_bytes: int, drafts: int = 0) -> int:
    """Return the number of pages that fit into ``memory_bytes``, with the running texts' own copies."""
    return memory_bytes // (page_bytes(spec, kept) + copy_bytes(spec, kept.dtype, drafts))


class TextKV:
    """Contiguous keys and values of one text: for each layer ``(heads, capacity, width)``, zeros where none are yet."""

    def __init__(
        self,
        spec: ModelSpec,
        dtype: torch.dtype,
        layers: range | None = None,
        number: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        """Create empty tensors for ``layers``, by default all. ``number`` identifies the text in other processes."""
        self._heads, *self._widths = attention_kind(spec).cache_row(spec)
        self.layers = {
            layer: tuple(
                torch.zeros(self._heads, 0, width, dtype=dtype, device=device) for width in self._widths
            )
            for layer in (range(spec.layers) if layers is None else layers)
        }
        self.number = number
        self.capacity = 0

    def grow(self, tokens: int) -> None:
        """Make room for at least ``tokens``, in full blocks of keys."""
        if tokens <= self.capacity:
            return
        minimum = max(tokens, 2 * self.capacity)
        capacity = minimum + -minimum % BLOCK
        for layer, tensors in self.layers.items():
            grown = tuple(old.new_zeros(old.shape[0], capacity, old.shape[2]) for old in tensors)
            for new, old in zip(grown, tensors, strict=True):
                # A layer may have grown already, if memory gave out before the others had.
                new[:, : self.capacity] = old[:, : self.capacity]
            self.layers[layer] = grown
        self.capacity = capacity


class PageMemory:
    """The pages of a process's layers: one tensor ``(pages, layers, heads, 64, width)`` for each stored part of keys and values."""

    def __init__(self, layers: int, pages: int, kept: KVFormat, device: torch.device | str = "cpu") -> None:
        self._kept = kept
        self.page_bytes = layers * kept.row_bytes * PAGE
        """Bytes of a page's part in these layers."""
        self._parts = [
            tuple(
                torch.empty(pages, layers, kept.heads, PAGE, width, dtype=dtype, device=device)
                for width, dtype in part
            )
            for part in kept.stores()
        ]
        self._pools = [pool for part in self._parts for pool in part]

    def copy_out(self, kv: TextKV, number: int, place: int) -> None:
        """Copy page ``number`` of a text to ``place``."""
        rows = slice(number * PAGE, (number + 1) * PAGE)
        for layer, tensors in enumerate(kv.layers.values()):
            for part, (pools, tensor) in enumerate(zip(self._parts, tensors, strict=True)):
                for pool, stored in zip(pools, self._kept.packed(part, tensor[:, rows]), strict=True):
                    pool[place, layer] = stored

    def copy_in(self, kv: TextKV, number: int, place: int) -> None:
        """Copy the page at ``place`` to page ``number`` of a text."""
        rows = slice(number * PAGE, (number + 1) * PAGE)
        for layer, tensors in enumerate(kv.layers.values()):
            for part, (pools, tensor) in enumerate(zip(self._parts, tensors, strict=True)):
                tensor[:, rows] = self._kept.unpacked(part, tuple(pool[place, layer] for pool in pools))

    def read(self, place: int) -> bytes:
        """Return the bytes of a page."""
        parts = [_bytes(pool[place]) for pool in self._pools]
        if parts[0].device.type != "cpu":
            return fetched(torch.cat(parts)).tobytes()  # one wait
        return b"".join(part.numpy().tobytes() for part in parts)

    def write(self, place: int, content: PageBytes) -> None:
        """Write a page. Raises ValueError if ``content`` has another length."""
        sizes = [_bytes(pool[place]).numel() for pool in self._pools]
        if len(content) != sum(sizes):
            raise ValueError(
                f"a page has {sum(sizes)} bytes, and {len(content)} came: the other worker has another model or format"
            )
        data = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        slices = torch.split(brought(data, self._pools[0].device), sizes)
        for pool, part in zip(self._pools, slices, strict=True):
            _bytes(pool[place]).copy_(part)


def _bytes(page: Tensor) -> Tensor:
    return page.view(-1).view(torch.uint8)

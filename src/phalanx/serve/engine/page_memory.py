"""Memory of an engine's keys and values: pages under names, and each running request's in one piece.

Attention kernels on a CPU read keys in one piece, and gathering all pages in every step would cost as much as attention itself. So a
running request has them in one piece for each layer, grown by doubling, and pages are copied out when they are whole and in when a
request begins with them. That takes up to twice the pages' bytes, which ``pages_within`` reckons with.
"""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.run.kinds.attention import attention_kind
from phalanx.run.spec import ModelSpec
from phalanx.traffic.pages import PAGE

BLOCK = 512
"""Keys that the attention kernel takes at once."""


def page_bytes(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Bytes of a page of all layers."""
    heads, key, value = attention_kind(spec).cache_row(spec)
    return spec.layers * heads * (key + value) * PAGE * dtype.itemsize


def pages_within(spec: ModelSpec, dtype: torch.dtype, memory_bytes: int, drafts: int = 0) -> int:
    """Pages that fit into ``memory_bytes``, with the running requests' own copies, and what ``drafts`` depths of predictions ahead keep."""
    page = page_bytes(spec, dtype)
    return memory_bytes // (2 * page + drafts * page // spec.layers)


class Piece:
    """The keys and values of one request: for each layer ``(heads, capacity, width)``, zeros where none are yet."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype) -> None:
        self._heads, *self._widths = attention_kind(spec).cache_row(spec)
        self.layers = [
            tuple(torch.zeros(self._heads, 0, width, dtype=dtype) for width in self._widths)
            for _ in range(spec.layers)
        ]
        self.capacity = 0

    def grow(self, tokens: int) -> None:
        """Makes room for at least ``tokens``, whole blocks of keys."""
        if tokens <= self.capacity:
            return
        wanted = max(tokens, 2 * self.capacity)
        capacity = wanted + -wanted % BLOCK
        for number, tensors in enumerate(self.layers):
            grown = tuple(old.new_zeros(old.shape[0], capacity, old.shape[2]) for old in tensors)
            for new, old in zip(grown, tensors, strict=True):
                new[:, : self.capacity] = old
            self.layers[number] = grown
        self.capacity = capacity


class PageMemory:
    """The pages of all layers in one tensor each for keys and values: ``(pages, layers, heads, 64, width)``."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, pages: int) -> None:
        heads, *widths = attention_kind(spec).cache_row(spec)
        self._pools = [torch.empty(pages, spec.layers, heads, PAGE, width, dtype=dtype) for width in widths]

    def copy_out(self, piece: Piece, number: int, place: int) -> None:
        """Keeps page ``number`` of a request at ``place``."""
        rows = slice(number * PAGE, (number + 1) * PAGE)
        for layer, tensors in enumerate(piece.layers):
            for pool, tensor in zip(self._pools, tensors, strict=True):
                pool[place, layer] = tensor[:, rows]

    def copy_in(self, piece: Piece, number: int, place: int) -> None:
        """Gives a request what is kept at ``place`` as its page ``number``."""
        rows = slice(number * PAGE, (number + 1) * PAGE)
        for layer, tensors in enumerate(piece.layers):
            for pool, tensor in zip(self._pools, tensors, strict=True):
                tensor[:, rows] = pool[place, layer]

    def read(self, place: int) -> bytes:
        """The bytes of a page."""
        return b"".join(_bytes(pool[place]).numpy().tobytes() for pool in self._pools)

    def write(self, place: int, content: bytes) -> None:
        """Fills a page. Raises ValueError if ``content`` has another length."""
        sizes = [_bytes(pool[place]).numel() for pool in self._pools]
        if len(content) != sum(sizes):
            raise ValueError(
                f"a page has {sum(sizes)} bytes, and {len(content)} came: the other worker has another model or format"
            )
        pieces = torch.split(torch.frombuffer(bytearray(content), dtype=torch.uint8), sizes)
        for pool, piece in zip(self._pools, pieces, strict=True):
            _bytes(pool[place]).copy_(piece)


def _bytes(page: Tensor) -> Tensor:
    return page.view(-1).view(torch.uint8)

"""Memory of an engine's keys and values: pages under names, and each running request's in one piece.

Attention kernels on a CPU read keys in one piece, and gathering all pages in every step would cost as much as attention itself. So a
running request has them in one piece for each layer, grown by doubling, and pages are copied out when they are whole and in when a
request begins with them. That takes up to twice the pages' bytes, which ``pages_within`` reckons with. Both are where the model computes, on a GPU
too; as bytes, pages are in the host's memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.hardware.local.device import brought, fetched
from phalanx.run.kinds.attention import attention_kind
from phalanx.run.spec import ModelSpec
from phalanx.serve.engine.pages.kept import KeptFormat, kept_as
from phalanx.traffic.pages import PAGE

PageBytes = bytes | bytearray | memoryview
BLOCK = 512
"""Keys that the attention kernel takes at once."""


def page_bytes(spec: ModelSpec, kept: KeptFormat) -> int:
    """Bytes of a page of all layers."""
    return spec.layers * kept.row_bytes * PAGE


def piece_bytes(spec: ModelSpec, dtype: torch.dtype, drafts: int = 0) -> int:
    """Bytes of a running request's own copy of a page, with what ``drafts`` depths of predictions ahead keep."""
    return page_bytes(spec, kept_as("compute", spec, dtype)) * (spec.layers + drafts) // spec.layers


def pages_within(spec: ModelSpec, kept: KeptFormat, memory_bytes: int, drafts: int = 0) -> int:
    """Pages that fit into ``memory_bytes``, with the running requests' own copies."""
    return memory_bytes // (page_bytes(spec, kept) + piece_bytes(spec, kept.dtype, drafts))


class Piece:
    """The keys and values of one request: for each layer ``(heads, capacity, width)``, zeros where none are yet."""

    def __init__(
        self,
        spec: ModelSpec,
        dtype: torch.dtype,
        layers: range | None = None,
        number: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        """Begins an empty piece for ``layers``, by default all; ``number`` is how other processes that have layers know it."""
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
        """Makes room for at least ``tokens``, whole blocks of keys."""
        if tokens <= self.capacity:
            return
        wanted = max(tokens, 2 * self.capacity)
        capacity = wanted + -wanted % BLOCK
        for layer, tensors in self.layers.items():
            grown = tuple(old.new_zeros(old.shape[0], capacity, old.shape[2]) for old in tensors)
            for new, old in zip(grown, tensors, strict=True):
                # A layer may have grown already, if memory gave out before the others had.
                new[:, : self.capacity] = old[:, : self.capacity]
            self.layers[layer] = grown
        self.capacity = capacity


class PageMemory:
    """The pages of a process's layers in one tensor for each that is stored of keys and values: ``(pages, layers, heads, 64, width)``."""

    def __init__(self, layers: int, pages: int, kept: KeptFormat, device: torch.device | str = "cpu") -> None:
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

    def copy_out(self, piece: Piece, number: int, place: int) -> None:
        """Keeps page ``number`` of a request at ``place``."""
        rows = slice(number * PAGE, (number + 1) * PAGE)
        for layer, tensors in enumerate(piece.layers.values()):
            for part, (pools, tensor) in enumerate(zip(self._parts, tensors, strict=True)):
                for pool, stored in zip(pools, self._kept.packed(part, tensor[:, rows]), strict=True):
                    pool[place, layer] = stored

    def copy_in(self, piece: Piece, number: int, place: int) -> None:
        """Gives a request what is kept at ``place`` as its page ``number``."""
        rows = slice(number * PAGE, (number + 1) * PAGE)
        for layer, tensors in enumerate(piece.layers.values()):
            for part, (pools, tensor) in enumerate(zip(self._parts, tensors, strict=True)):
                tensor[:, rows] = self._kept.unpacked(part, tuple(pool[place, layer] for pool in pools))

    def read(self, place: int) -> bytes:
        """The bytes of a page."""
        parts = [_bytes(pool[place]) for pool in self._pools]
        if parts[0].device.type != "cpu":
            return fetched(torch.cat(parts)).tobytes()  # one wait
        return b"".join(part.numpy().tobytes() for part in parts)

    def write(self, place: int, content: PageBytes) -> None:
        """Fills a page. Raises ValueError if ``content`` has another length."""
        sizes = [_bytes(pool[place]).numel() for pool in self._pools]
        if len(content) != sum(sizes):
            raise ValueError(
                f"a page has {sum(sizes)} bytes, and {len(content)} came: the other worker has another model or format"
            )
        whole = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        pieces = torch.split(brought(whole, self._pools[0].device), sizes)
        for pool, piece in zip(self._pools, pieces, strict=True):
            _bytes(pool[place]).copy_(piece)


def _bytes(page: Tensor) -> Tensor:
    return page.view(-1).view(torch.uint8)

"""Memory of the KV cache: the format of keys and values, pages, a contiguous copy for each running text, and boxes of divided pages.

Attention kernels on a CPU read contiguous keys, and gathering all pages in every step would cost as much as attention itself. So a
running text has one contiguous tensor for each layer, grown by doubling. Pages are copied out of it when they are full, and into it when a
text begins with them. That takes up to twice the bytes of the pages, which ``pages_within`` includes. Both are on the device that computes. Pages
as bytes are in the host's memory.

A narrow row is rounded when it is computed, in the text's own copy too. A second rounding changes nothing, so a token reads the same numbers
whether a page is its own, was cached, or came from another worker. Latent attention's rotated part, which carries the positions, keeps the computation's format.
The blocks are those of ``phalanx.model.narrow`` (OCP Microscaling, arXiv 2310.10537).

A page is sent in one order: for each stored part of keys and values the layers, in these the heads, of 64 tokens each. A process that has some
of the layers, or some heads of each, has a box of the page. So a page of two processes can be read by one, by three, or by two that divide it otherwise.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from phalanx.checkpoint.snapshot.segments import total_memory_bytes
from phalanx.hardware.local.device import brought, fetched
from phalanx.model.narrow import SHARING, Quantized, dequantize, quantize
from phalanx.run.kinds.attention import attention_kind
from phalanx.run.spec import ModelSpec
from phalanx_serve.traffic.events import ServeError
from phalanx_serve.traffic.scheduler import PAGE

# Formats: that of the computation, or eight bits with a power-of-two scale for 32 neighbors.


KVFormatName = Literal["compute", "int8", "fp8"]
"""The values of the option ``--kv``."""
_NARROW = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
_MANTISSA = 23
_INFINITE = 255
"""The exponent of an infinite scale, which makes all that share it infinite or NaN."""


@dataclass(frozen=True)
class KVFormat:
    """Storage format of the two tensors of a layer: keys and values, or latents and rotated keys."""

    name: KVFormatName
    dtype: torch.dtype
    """The number format of the computation."""
    heads: int
    widths: tuple[int, int]
    narrow: tuple[bool, bool]

    def rounded(self, part: int, rows: Tensor) -> Tensor:
        """Round ``(..., width)`` as storing does."""
        return self.unpacked(part, self.packed(part, rows)) if self.narrow[part] else rows

    def packed(self, part: int, rows: Tensor) -> tuple[Tensor, ...]:
        """Return the stored tensors of ``(..., width)``: itself, or eight bits each and the exponents ``(..., width /
        32)`` of their scales.

        A block with a value that is not finite gets an infinite scale.
        """
        if not self.narrow[part]:
            return (rows,)
        values, scale = quantize(rows, _NARROW[self.name], "block")
        exponents = (scale.view(torch.int32) >> _MANTISSA).to(torch.uint8)
        # Integers have no NaN, and a NaN must not become a zero silently: the scale of its neighbors is infinite instead.
        finite = rows.isfinite().view(*rows.shape[:-1], -1, SHARING).all(-1)  # (..., width / 32)
        return values, exponents.masked_fill_(~finite, _INFINITE)

    def unpacked(self, part: int, stored: tuple[Tensor, ...]) -> Tensor:
        """Return the numbers of stored tensors; narrow ones are multiplied by their scales and converted to ``dtype``."""
        if not self.narrow[part]:
            return stored[0]
        values, exponents = stored
        return dequantize(
            Quantized(values, (exponents.to(torch.int32) << _MANTISSA).view(torch.float32)), self.dtype
        )

    def stores(self) -> Iterator[tuple[tuple[int, torch.dtype], ...]]:
        """Yield, for each of the two tensors, the widths and dtypes that are stored of a head's row."""
        for width, narrow in zip(self.widths, self.narrow, strict=True):
            if narrow:
                yield (width, _NARROW[self.name]), (width // SHARING, torch.uint8)
            else:
                yield ((width, self.dtype),)

    @property
    def row_bytes(self) -> int:
        """Bytes of a token in a layer."""
        return self.heads * sum(width * dtype.itemsize for part in self.stores() for width, dtype in part)


def kv_format(name: KVFormatName, spec: ModelSpec, dtype: torch.dtype) -> KVFormat:
    """Return the format ``name`` for a model that computes in ``dtype``; of latents, only the first part is narrow.

    Raises ServeError for widths that are no multiple of a block.
    """
    heads, first, second = attention_kind(spec).cache_row(spec)
    narrow = (name != "compute", name != "compute" and spec.mla is None)
    for width, rounds in zip((first, second), narrow, strict=True):
        if rounds and width % SHARING:
            field_name = "mla.kv_rank" if spec.mla is not None else "head_dim"
            raise ServeError(
                f"keys and values in {name} share a scale among {SHARING} neighbors, and model.{field_name} = {width} is no multiple of that: "
                "keep them in the format computed in (--kv compute)"
            )
    return KVFormat(name, dtype, heads, (first, second), narrow)


# Pages and copies.


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


def require_memory(nbytes: int, device: torch.device) -> None:
    """Raise ServeError if keys and values of ``nbytes`` exceed the machine's memory. A GPU refuses its own when they are allocated."""
    if device.type == "cpu" and nbytes > (total := total_memory_bytes()):
        raise ServeError(
            f"keys and values of {nbytes:,} bytes exceed this machine's memory of {total:,}: give less (--memory)"
        )


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
        self._addresses: npt.NDArray[np.int64] | None = None

    @property
    def device(self) -> torch.device:
        """The device of its tensors."""
        return next(iter(self.layers.values()))[0].device

    def grow(self, tokens: int) -> None:
        """Make room for at least ``tokens``, in full blocks of keys; zeros where nothing is yet.

        Copies what is there; at least doubles, and never shrinks.
        """
        if tokens <= self.capacity:
            return
        minimum = max(tokens, 2 * self.capacity)
        capacity = minimum + -minimum % BLOCK
        self._addresses = None
        for layer, tensors in self.layers.items():
            grown = tuple(old.new_zeros(old.shape[0], capacity, old.shape[2]) for old in tensors)
            for new, old in zip(grown, tensors, strict=True):
                # A layer may have grown already, if memory gave out before the others had.
                new[:, : self.capacity] = old[:, : self.capacity]
            self.layers[layer] = grown
        self.capacity = capacity

    def addresses(self) -> npt.NDArray[np.int64]:
        """Return, for each layer, the addresses of keys and of values, and the tokens that they have room for: flat ``(3 layers,)``."""
        if self._addresses is None:
            rows = [
                (keys.data_ptr(), values.data_ptr(), keys.shape[1]) for keys, values in self.layers.values()
            ]
            self._addresses = np.array(rows, np.int64).reshape(-1)  # (3 layers,)
        return self._addresses


@dataclass(frozen=True)
class RowSpan:
    """Consecutive rows of one text in a step, from token ``begin`` up to ``end``."""

    kv: TextKV
    begin: int
    end: int


class PageMemory:
    """The pages of a process's layers: one tensor ``(pages, layers, heads, 64, width)`` for each stored part of keys and values."""

    def __init__(self, layers: int, pages: int, kept: KVFormat, device: torch.device | str = "cpu") -> None:
        """Allocate ``pages`` pages of ``layers`` layers on ``device``, in the format ``kept``, not initialized."""
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
        """Copy page ``number`` of a text to ``place``, packed in the stored format."""
        rows = slice(number * PAGE, (number + 1) * PAGE)
        for part, pools in enumerate(self._parts):
            # All layers together: on a GPU one launch, not one for each layer.
            of_layers = [tensors[part][:, rows] for tensors in kv.layers.values()]  # (heads, 64, width) each
            if not self._kept.narrow[part]:
                torch.stack(of_layers, out=pools[0][place])  # (layers, heads, 64, width)
                continue
            # (layers, heads, 64, .) for each stored tensor
            for pool, stored in zip(pools, self._kept.packed(part, torch.stack(of_layers)), strict=True):
                pool[place] = stored

    def copy_in(self, kv: TextKV, number: int, place: int) -> None:
        """Copy the page at ``place`` to page ``number`` of a text, unpacked from the stored format."""
        rows = slice(number * PAGE, (number + 1) * PAGE)
        for layer, tensors in enumerate(kv.layers.values()):
            for part, (pools, tensor) in enumerate(zip(self._parts, tensors, strict=True)):
                tensor[:, rows] = self._kept.unpacked(part, tuple(pool[place, layer] for pool in pools))

    def copy_in_together(self, kv: TextKV, places: Sequence[int]) -> None:
        """Copy the pages at ``places`` to the first pages of a text, as ``copy_in`` does one by one.

        All pages of a layer are copied twice. So it takes longer on a CPU, and on a GPU as many launches for any number of pages.
        """
        at = brought(torch.tensor(places), kv.device)
        for layer, tensors in enumerate(kv.layers.values()):
            for part, (pools, tensor) in enumerate(zip(self._parts, tensors, strict=True)):
                stored = tuple(pool[:, layer].index_select(0, at) for pool in pools)
                pages = self._kept.unpacked(part, stored)  # (pages, heads, 64, width)
                rows = tensor[:, : len(places) * PAGE]
                # (heads, pages, 64, width)
                rows.view(rows.shape[0], len(places), PAGE, -1).copy_(pages.transpose(0, 1))

    def read(self, place: int) -> bytes:
        """Return the bytes of a page as stored, all tensors in order; waits for the device."""
        parts = [_bytes(pool[place]) for pool in self._pools]
        if parts[0].device.type != "cpu":
            return fetched(torch.cat(parts)).tobytes()  # (bytes of the page,), in one wait
        return b"".join(part.numpy().tobytes() for part in parts)

    def write(self, place: int, content: PageBytes) -> None:
        """Write a page. Raises ValueError if ``content`` has another length."""
        sizes = [_bytes(pool[place]).numel() for pool in self._pools]
        if len(content) != sum(sizes):
            raise ValueError(
                f"a page has {sum(sizes)} bytes, and {len(content)} came: the other worker has another model or format"
            )
        data = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        slices = torch.split(brought(data, self._pools[0].device), sizes)  # (bytes of a tensor,) each
        for pool, part in zip(self._pools, slices, strict=True):
            _bytes(pool[place]).copy_(part)


def _bytes(page: Tensor) -> Tensor:
    """Return a view of a page as its bytes ``(bytes,)``."""
    return page.view(-1).view(torch.uint8)  # (bytes,)


# Pages divided into boxes of layers and heads, one for each process of a divided model.


@dataclass(frozen=True)
class PageBox:
    """Layers and heads of a page that a process has."""

    layers: range
    heads: range


@dataclass(frozen=True)
class PageShape:
    """The byte layout of a full page."""

    layers: int
    heads: int
    cells: tuple[int, ...]
    """Bytes of a head's 64 tokens in a layer, for each stored part."""

    @classmethod
    def around(cls, boxes: Collection[PageBox], kept: KVFormat) -> PageShape:
        """Return the layout of pages in a format, given the boxes of all processes."""
        stores = (store for part in kept.stores() for store in part)
        return cls(
            max(box.layers.stop for box in boxes),
            max(box.heads.stop for box in boxes),
            tuple(PAGE * width * dtype.itemsize for width, dtype in stores),
        )

    @property
    def full_box(self) -> PageBox:
        """The box of all layers and heads."""
        return PageBox(range(self.layers), range(self.heads))

    @property
    def nbytes(self) -> int:
        """Bytes of a page."""
        return self.layers * self.heads * sum(self.cells)

    def cut(self, page: PageBytes, box: PageBox) -> PageBytes:
        """Return the bytes of a box of a page, in the order of a ``PageMemory`` of its layers and heads."""
        if box == self.full_box:
            return page
        return b"".join(view[_slices(box)].tobytes() for view in self._views(page))

    def assemble(self, parts: Iterable[tuple[PageBox, PageBytes]]) -> bytearray:
        """Assemble a whole page from the bytes of its boxes (layers and heads)."""
        page = bytearray(self.nbytes)
        for box, part in parts:
            own = PageShape(len(box.layers), len(box.heads), self.cells)
            for view, piece in zip(self._views(page), own._views(part), strict=True):
                view[_slices(box)] = piece
        return page

    def _views(self, page: PageBytes) -> Iterator[npt.NDArray[np.uint8]]:
        """Yield views ``(layers, heads, bytes)`` of each tensor in a page."""
        flat, begin = np.frombuffer(page, np.uint8), 0
        for cell in self.cells:
            end = begin + self.layers * self.heads * cell
            yield flat[begin:end].reshape(self.layers, self.heads, cell)  # (layers, heads, bytes)
            begin = end


def _slices(box: PageBox) -> tuple[slice, slice]:
    """Return the slices of a box in an array ``(layers, heads, ...)``."""
    return slice(box.layers.start, box.layers.stop), slice(box.heads.start, box.heads.stop)

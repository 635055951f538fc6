"""A 64-bit checksum of tensors that changes with every single bit, and a witness that takes it of slots' gradients.

A tensor's bytes are read as 64-bit words; each has its upper half xored into its lower one, is multiplied by an odd number that depends
on its place, and the products are added modulo 2^64. Both operations can be undone, so whatever happens to one word, a flipped bit above
all, changes the sum. Words that trade places, and errors that would cancel in a plain sum, change it too (all but about one in 2^32).
Without the xor, two flipped upper bits would cancel: ``2^63 * odd`` is the same for all. Integer addition has no order, so any device,
chunk size or number of threads gives the same value, and several tensors' sums can be added up. Multipliers are the products of a random
odd number for the row and one for the column, as if the words lay in rows, because drawing a number costs more than multiplying by one.
This is no defense against an adversary.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from phalanx.model.init import random_words, stream_key
from phalanx.parallel.mesh.slots import Round
from phalanx.parallel.reduction.data_parallel import DataParallel

_COLUMNS = 1 << 12
_ROWS_AT_ONCE = {"cpu": 1 << 6, "cuda": 1 << 12}
"""2 MiB, which stays in a CPU's cache; 128 MiB, which keeps a GPU busy."""
_ELEMENTS_AT_ONCE = 1 << 20


def total_checksum(sums: Sequence[Tensor]) -> int:
    """The checksum of everything whose ``named_checksum`` is in ``sums``, in any order. Waits for the device."""
    return int(torch.stack(list(sums)).sum().item()) & ((1 << 64) - 1) if sums else 0


def named_checksum(name: str, tensor: Tensor, *, rows_at_once: int | None = None) -> Tensor:
    """The summand of ``tensor`` in the checksum of all: 0-dim int64, on its device, modulo 2^64.

    Any dtype, shape and stride; the same values in another shape have the same checksum, under another name another one.
    ``rows_at_once`` rows of 4,096 words are summed at once; by default, as many as suit the device.
    """
    words, device = _words(tensor.detach()), tensor.device
    columns, total = _multipliers(device), torch.zeros((), dtype=torch.int64, device=device)
    step = (rows_at_once or _ROWS_AT_ONCE.get(device.type, 1 << 12)) * _COLUMNS
    for first in range(0, len(words), step):
        part = words[first : first + step]
        part = part ^ ((part >> 32) & 0xFFFFFFFF)
        whole = len(part) // _COLUMNS * _COLUMNS
        rows = (part[:whole].view(-1, _COLUMNS) * columns).sum(1)
        if whole < len(part):
            last = (part[whole:] * columns[: len(part) - whole]).sum()
            rows = torch.cat((rows, last.view(1)))
        numbers = torch.arange(len(rows), device=device) + first // _COLUMNS
        total += (rows * _odd("row", numbers)).sum()
    length = torch.full((1,), tensor.nbytes, dtype=torch.int64, device=device)
    # Without the length, zeros at the end would not count.
    return (total + length[0] * _odd("length", length)[0]) * _odd(name, length * 0)[0]


def _words(tensor: Tensor) -> Tensor:
    """The bytes of ``tensor`` as int64 ``(words,)``, with zeros at the end for what is missing to a whole word."""
    data = tensor.contiguous().view(-1).view(torch.uint8)
    missing = -len(data) % 8
    if missing:
        data = torch.cat((data, data.new_zeros(missing)))
    if data.storage_offset() % 8:
        data = data.clone()
    return data.view(torch.int64)


@functools.cache
def _multipliers(device: torch.device) -> Tensor:
    return _odd("column", torch.arange(_COLUMNS, device=device))


def _odd(stream: str, index: Tensor) -> Tensor:
    return random_words(stream_key(0, f"checksum {stream}"), index) | 1


def piece_checksum(name: str, piece: Tensor, index: Sequence[Tensor], whole: Sequence[int]) -> Tensor:
    """The summand of a piece of a tensor in the checksum of the whole one: 0-dim int64, on its device, modulo 2^64.

    Each element's bits are multiplied by an odd number that depends on its place in the whole tensor, so the sums of any pieces that
    make up the whole add up to the same checksum, however it was cut.

    Args:
        name: Of the tensor; under another name the checksum is another one.
        piece: Any dtype, and one dimension for each of ``index``.
        index: For each dimension, the piece's places in the whole tensor: int64 ``(size of the piece,)``.
        whole: Shape of the whole tensor.
    """
    device = piece.device
    total = torch.zeros((), dtype=torch.int64, device=device)
    if not piece.numel():
        return total
    held = piece.detach().reshape(1) if piece.ndim == 0 else piece.detach()
    places = list(index) or [torch.zeros(1, dtype=torch.int64)]
    strides = [math.prod(whole[dim + 1 :]) for dim in range(len(whole))] or [1]
    rows = max(1, _ELEMENTS_AT_ONCE // max(1, held[0].numel()))
    for first in range(0, len(held), rows):
        part = held[first : first + rows]
        words = _element_bits(part.contiguous())
        place = torch.zeros((), dtype=torch.int64, device=device)
        for dim, (along, stride) in enumerate(zip(places, strides, strict=True)):
            own = (along[first : first + rows] if dim == 0 else along).to(device) * stride
            place = place + own.view(-1, *[1] * (held.ndim - 1 - dim))
        total += (words * _odd("element", place)).sum()
    return total * _odd(name, torch.zeros(1, dtype=torch.int64, device=device))[0]


def _element_bits(tensor: Tensor) -> Tensor:
    """The bits of each element as int64, in the shape of ``tensor``."""
    if tensor.dtype == torch.bool:
        return tensor.to(torch.int64)
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.dtype.itemsize]
    words = tensor.view(integers).to(torch.int64)
    # As above: two flipped upper bits of 64 would cancel.
    return words ^ ((words >> 32) & 0xFFFFFFFF) if integers is torch.int64 else words


# A witness of slots' gradients: their checksums just before they enter the tree of all slots.
#
# A slot's gradient is complete on a rank as the input of each parameter group's reduce-scatter (a sharded model), or parameter by
# parameter (a whole one). There the witness is put, once, by ``attach``. In a round that it watches it takes checksums on the way; in
# an *extra round*, in which a rank computes another team's slot to check it, it also keeps the gradient out of the tree, so
# that the step's sum is what it would be without. An extra round comes before the step's own rounds: FSDP drops what it makes of
# it as it does after every round but the last. All ranks of a replica run it together, because weights are gathered in it.


class NotWitnessedError(ValueError):
    """A model whose slots' gradients are not to be seen one by one."""


@dataclass
class Witness:
    """Sees the gradients of a slot as they become complete."""

    watching: bool = False
    extra: bool = False
    sums: list[Tensor] = field(default_factory=list)
    """Checksums, of parameters or of parameter groups; they wait on the device until they are taken."""
    corrupt: Callable[[Tensor], None] | None = None
    """Damages a gradient in place before anybody sees it: a fault on demand."""

    def see(self, name: str, gradient: Tensor) -> bool:
        """Takes note of a gradient that is about to enter its tree; ``False`` keeps it out, in an extra round."""
        if self.corrupt is not None:
            self.corrupt(gradient)
        if self.watching:
            self.sums.append(named_checksum(name, gradient))
        return not self.extra

    @contextmanager
    def watch(self, *, extra: bool = False) -> Iterator[None]:
        """Watches a round, or a part of it, inside the ``with``."""
        self.watching, self.extra = True, extra
        try:
            yield
        finally:
            self.watching = self.extra = False

    def take(self) -> int:
        """The checksum of what was watched since this was last asked for."""
        total, self.sums = total_checksum(self.sums), []
        return total


def extra_round(slots: tuple[int, ...], shard_rank: int) -> Round:
    """A round in which the shard ranks of a replica compute ``slots`` only to check them."""
    return Round(slots, slots[shard_rank], counts=False, last=False)


def attach(model: DataParallel) -> Witness:
    """Puts a witness into ``model``; bits stay as they are. Raises ``NotWitnessedError`` if it cannot see slots."""
    if not model.summation.slot_by_slot:
        raise NotWitnessedError(
            'slots are summed before they can be told apart: set train.reduction = "reproducible" or "integer" to audit them'
        )
    witness = Witness()
    model.summation.intake.admit = witness.see
    return witness

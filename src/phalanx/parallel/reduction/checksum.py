"""A 64-bit checksum of tensors that detects every flipped bit, and a witness that takes it of slots' gradients.

1. A tensor's bytes are read as 64-bit words.
2. The upper half of each word is xored into its lower half. Without it, two flipped upper bits would cancel, because
   ``2^63 * odd`` is the same for all odd numbers.
3. Each word is multiplied by an odd number that depends on its position.
4. The products are added modulo 2^64.

Steps 2 and 3 are invertible, so any change of one word, such as a flipped bit, changes the sum. So do exchanged words, and errors
that would cancel in a plain sum (all but about one in 2^32). Integer addition has no order, so the value does not depend on the
device, chunk size or number of threads, and the sums of several tensors can be added. Words are arranged in rows. A multiplier is the
product of two random odd numbers, one for the row and one for the column: drawing a number costs more than multiplying. This is no
defense against an adversary.
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
from phalanx.parallel.divisions import Round
from phalanx.parallel.reduction.data_parallel import DataParallel

_COLUMNS = 1 << 12
_ROWS_AT_ONCE = {"cpu": 1 << 6, "cuda": 1 << 12}
"""2 MiB, which fits into a CPU's cache; 128 MiB, which keeps a GPU busy."""
_ELEMENTS_AT_ONCE = 1 << 20


def total_checksum(sums: Sequence[Tensor]) -> int:
    """Return the checksum of all tensors whose ``named_checksum`` is in ``sums``, in any order. Waits for the device."""
    # (tensors,), added to a scalar
    return int(torch.stack(list(sums)).sum().item()) & ((1 << 64) - 1) if sums else 0


def named_checksum(name: str, tensor: Tensor, *, rows_at_once: int | None = None) -> Tensor:
    """Return the summand of ``tensor`` in the checksum of all tensors: 0-dim int64, on its device, modulo 2^64.

    Any dtype, shape and stride. It depends on the name and the values, but not on the shape. ``rows_at_once`` rows of 4,096 words are
    summed at once; the default suits the device.
    """
    words, device = _words(tensor.detach()), tensor.device
    columns, total = _multipliers(device), torch.zeros((), dtype=torch.int64, device=device)
    step = (rows_at_once or _ROWS_AT_ONCE.get(device.type, 1 << 12)) * _COLUMNS
    for first in range(0, len(words), step):
        part = words[first : first + step]
        part = part ^ ((part >> 32) & 0xFFFFFFFF)  # step 2
        full_words = len(part) // _COLUMNS * _COLUMNS
        rows = (part[:full_words].view(-1, _COLUMNS) * columns).sum(1)  # step 3 by column: (rows,)
        if full_words < len(part):
            last = (part[full_words:] * columns[: len(part) - full_words]).sum()
            rows = torch.cat((rows, last.view(1)))  # (rows,), the last one shorter
        numbers = torch.arange(len(rows), device=device) + first // _COLUMNS
        total += (rows * _odd("row", numbers)).sum()  # step 3 by row, and step 4
    length = torch.full((1,), tensor.nbytes, dtype=torch.int64, device=device)
    # Without the length, trailing zeros would not change the checksum.
    return (total + length[0] * _odd("length", length)[0]) * _odd(name, length * 0)[0]


def _words(tensor: Tensor) -> Tensor:
    """Return the bytes of ``tensor`` as int64 ``(words,)``, padded with zeros to a full word; a view if it is contiguous and aligned."""
    data = tensor.contiguous().view(-1).view(torch.uint8)  # (bytes,)
    missing = -len(data) % 8
    if missing:
        data = torch.cat((data, data.new_zeros(missing)))  # (8 words,)
    if data.storage_offset() % 8:
        data = data.clone()
    return data.view(torch.int64)  # (words,)


@functools.cache
def _multipliers(device: torch.device) -> Tensor:
    return _odd("column", torch.arange(_COLUMNS, device=device))


def _odd(stream: str, index: Tensor) -> Tensor:
    return random_words(stream_key(0, f"checksum {stream}"), index) | 1


def piece_checksum(name: str, piece: Tensor, index: Sequence[Tensor], full_shape: Sequence[int]) -> Tensor:
    """Return the summand of a piece in the checksum of the full tensor: 0-dim int64, on its device, modulo 2^64.

    Each element's bits are multiplied by an odd number that depends on its position in the full tensor. So the sums of any pieces that
    make up the tensor add up to the same checksum, independent of the division.

    Args:
        name: Name of the tensor; part of the checksum.
        piece: Any dtype, with one dimension for each of ``index``.
        index: For each dimension, the piece's positions in the full tensor: int64 ``(size of the piece,)``.
        full_shape: Shape of the full tensor.
    """
    device = piece.device
    total = torch.zeros((), dtype=torch.int64, device=device)
    if not piece.numel():
        return total
    values = piece.detach().reshape(1) if piece.ndim == 0 else piece.detach()  # (1,) for a scalar
    places = list(index) or [torch.zeros(1, dtype=torch.int64)]
    strides = [math.prod(full_shape[dim + 1 :]) for dim in range(len(full_shape))] or [1]
    rows = max(1, _ELEMENTS_AT_ONCE // max(1, values[0].numel()))
    for first in range(0, len(values), rows):
        part = values[first : first + rows]
        words = _element_bits(part.contiguous())
        place = torch.zeros((), dtype=torch.int64, device=device)
        for dim, (positions, stride) in enumerate(zip(places, strides, strict=True)):
            offsets = (positions[first : first + rows] if dim == 0 else positions).to(device) * stride
            # (rows, ..., n_dim, 1, ..., 1), one dimension for each of `values`
            place = place + offsets.view(-1, *[1] * (values.ndim - 1 - dim))
        total += (words * _odd("element", place)).sum()
    return total * _odd(name, torch.zeros(1, dtype=torch.int64, device=device))[0]


def _element_bits(tensor: Tensor) -> Tensor:
    """Return the bits of each element as int64, in the shape of ``tensor``. The upper half of 64-bit elements is mixed into the lower."""
    if tensor.dtype == torch.bool:
        return tensor.to(torch.int64)
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.dtype.itemsize]
    words = tensor.view(integers).to(torch.int64)
    # Step 2 of the module's docstring, needed for 64-bit elements only.
    return words ^ ((words >> 32) & 0xFFFFFFFF) if integers is torch.int64 else words


# A witness of slots' gradients: it takes their checksums just before they enter the tree of all slots.
#
# A slot's gradient is complete on a rank as the input of each parameter group's reduce-scatter (sharded model), or parameter by
# parameter (replicated model). ``attach`` installs the witness there, once. In a watched round it takes checksums. In an *extra round*
# a rank computes another team's slot to verify it; there the witness also keeps the gradient out of the tree, so that the step's sum
# does not change. Extra rounds precede the step's own rounds: FSDP drops their output, as after every round but the last. All ranks
# of a replica run an extra round together, because it gathers weights.


class NotWitnessedError(ValueError):
    """The model does not expose the gradients of single slots."""


@dataclass
class Witness:
    """Takes checksums of a slot's gradients as they become complete."""

    watching: bool = False
    extra: bool = False
    sums: list[Tensor] = field(default_factory=list)
    """Checksums of parameters or parameter groups; they stay on the device until ``take``."""
    corrupt: Callable[[Tensor], None] | None = None
    """Fault injection: damages a gradient in place before it is used."""

    def see(self, name: str, gradient: Tensor) -> bool:
        """Process a gradient that is about to enter its tree; return ``False`` to keep it out, in an extra round.

        Appends its checksum while watching; ``corrupt``, for tests, changes it first.
        """
        if self.corrupt is not None:
            self.corrupt(gradient)
        if self.watching:
            self.sums.append(named_checksum(name, gradient))
        return not self.extra

    @contextmanager
    def watch(self, *, extra: bool = False) -> Iterator[None]:
        """Take checksums of a round, or a part of it, inside the ``with``. With ``extra``, gradients are kept out of the sums."""
        self.watching, self.extra = True, extra
        try:
            yield
        finally:
            self.watching = self.extra = False

    def take(self) -> int:
        """Return the checksum of all gradients seen since the last call."""
        total, self.sums = total_checksum(self.sums), []
        return total


def extra_round(slots: tuple[int, ...], shard_rank: int) -> Round:
    """Return a round in which the shard ranks of a replica compute ``slots`` only to verify them."""
    return Round(slots, slots[shard_rank], counts=False, last=False)


def attach(model: DataParallel) -> Witness:
    """Install a witness in ``model``; bits do not change. Raise ``NotWitnessedError`` if single slots are not exposed."""
    if not model.summation.slot_by_slot:
        raise NotWitnessedError(
            'slots are summed before they can be audited: set train.reduction = "reproducible" or "integer" to audit them'
        )
    witness = Witness()
    model.summation.intake.admit = witness.see
    return witness

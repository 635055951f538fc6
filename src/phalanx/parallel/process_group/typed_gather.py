"""Collectives for small values of a declared type: gather from every rank, or broadcast from rank 0.

PyTorch's object collectives use pickle, so a member of a process group could run code on every rank. Here a value is encoded as
msgpack and decoded against its type by ``msgspec`` (https://jcristharif.com/msgspec). A value of another type raises an error that
names its rank. Sizes are exchanged first and are bounded.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec
import torch
import torch.distributed as dist

from phalanx.parallel.torch_compat import all_gather_single, device_of_messages

LONGEST_MESSAGE_BYTES = 64 << 20
"""Limit of one rank's message; bounds the memory for the messages of all ranks."""
_T = TypeVar("_T")
_encoder = msgspec.msgpack.Encoder()


class RankMessageError(RuntimeError):
    """The message of a rank cannot be decoded, or is too long; the text names the rank."""


def gather_typed(value: _T, kind: type[_T], *, max_message_bytes: int = LONGEST_MESSAGE_BYTES) -> list[_T]:
    """Return every rank's ``value``, by rank. A collective of the default group, with the same result on every rank.

    Args:
        value: Of type ``kind``, which msgspec must be able to encode.
        kind: Numbers, text, bytes, lists, tuples, dicts, dataclasses and named tuples of such.
        max_message_bytes: Limit of each rank's message; the same on every rank.

    Raises:
        RankMessageError: A rank's message is longer than ``max_message_bytes`` (every rank raises), or is not of type ``kind``.
    """
    group = _default_group()
    body, device = _encoder.encode(value), device_of_messages(group)
    sizes = torch.empty(group.size(), dtype=torch.int64, device=device)
    all_gather_single(sizes, torch.tensor([len(body)], dtype=torch.int64, device=device), group)
    lengths = [
        _checked(length, rank, max_message_bytes) for rank, length in enumerate(map(int, sizes.tolist()))
    ]
    longest = max(lengths)
    piece = torch.zeros(longest, dtype=torch.uint8)
    piece[: len(body)] = _tensor(body)
    gathered = torch.empty(longest * group.size(), dtype=torch.uint8, device=device)
    all_gather_single(gathered, piece.to(device), group)
    rows = gathered.cpu().view(group.size(), longest)  # (ranks, longest)
    return [
        _decoded(row[:length], kind, rank)
        for rank, (row, length) in enumerate(zip(rows, lengths, strict=True))
    ]


def broadcast_typed(value: _T, kind: type[_T], *, max_message_bytes: int = LONGEST_MESSAGE_BYTES) -> _T:
    """Return rank 0's ``value`` of type ``kind`` on every rank; the values of other ranks are ignored. A collective.

    Raises:
        RankMessageError: Rank 0's message is longer than ``max_message_bytes`` (every rank raises), or is not of type ``kind``.
    """
    group = _default_group()
    device = device_of_messages(group)
    first = group.rank() == 0
    body = _encoder.encode(value) if first else b""
    length = torch.tensor([len(body)], dtype=torch.int64, device=device)
    dist.broadcast(length, src=0)
    nbytes = _checked(int(length.item()), 0, max_message_bytes)
    message = _tensor(body).to(device) if first else torch.empty(nbytes, dtype=torch.uint8, device=device)
    dist.broadcast(message, src=0)
    return _decoded(message.cpu(), kind, 0)


def _default_group() -> dist.ProcessGroup:
    """Return the default group; raises RuntimeError before this process has joined it."""
    group = dist.group.WORLD
    if group is None:
        raise RuntimeError("this process has not joined the other ranks yet")
    return group


def _checked(nbytes: int, rank: int, max_bytes: int) -> int:
    """Return the size. Raises ``RankMessageError`` if it is not between 1 and ``max_bytes``."""
    if not 0 < nbytes <= max_bytes:
        raise RankMessageError(
            f"rank {rank} announces a message of {nbytes:,} bytes; between 1 and {max_bytes:,} are allowed"
        )
    return nbytes


def _tensor(body: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(body), dtype=torch.uint8)


def _decoded(message: torch.Tensor, kind: type[_T], rank: int) -> _T:
    """Decode the message of ``rank``, uint8 ``(bytes,)``, as ``kind``. Raises ``RankMessageError`` if it is not of that type."""
    try:
        return msgspec.msgpack.decode(message.numpy().tobytes(), type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RankMessageError(
            f"the message of rank {rank} cannot be read: {error}; all ranks must run the same version of Phalanx"
        ) from error

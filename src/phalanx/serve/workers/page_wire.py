"""The messages of a worker's page port: identity first, then an offer of names and digests, then raw pages, then done.

The connection is that of ``phalanx.checkpoint.snapshot.wire``: both sides prove that they know the service's token, under a purpose of its
own, so that a proof for one port is worth nothing at another. Messages are short (length, msgpack), pages follow as raw bytes.
"""

from __future__ import annotations

import struct
from typing import Annotated

import msgspec
import xxhash
from msgspec import Meta, Struct

from phalanx.checkpoint.snapshot.wire import Wire, WireError
from phalanx.traffic.events import Identity

PURPOSE = "phalanx page port, version 1"
MOST_PAGES = 1 << 15
_LENGTH = struct.Struct("<I")
_LONGEST_MESSAGE_BYTES = 4 << 20

PageName = Annotated[bytes, Meta(max_length=64)]
PageNames = Annotated[tuple[PageName, ...], Meta(max_length=MOST_PAGES)]
Digests = Annotated[tuple[Annotated[bytes, Meta(max_length=16)], ...], Meta(max_length=MOST_PAGES)]


class Open(Struct, frozen=True, tag=True):
    """Asks what is offered under a job, by one who computes with ``identity``. Answered by ``Offer`` or ``Refused``."""

    identity: Identity
    job: int
    names: PageNames


class Offer(Struct, frozen=True, tag=True):
    """These of the pages asked for are there, in this order; all have so many bytes."""

    names: PageNames
    digests: Digests
    page_bytes: Annotated[int, Meta(ge=0, le=1 << 32)]


class Fetch(Struct, frozen=True, tag=True):
    """Asks for the bytes of the first ``pages`` of the offer, one page after the other."""

    pages: Annotated[int, Meta(ge=0, le=MOST_PAGES)]


class Done(Struct, frozen=True, tag=True):
    """The lease may end: all that was wanted has come."""


class Refused(Struct, frozen=True, tag=True):
    """Nothing is offered; ``why`` says what is different."""

    why: Annotated[str, Meta(max_length=8192)]


Message = Open | Offer | Fetch | Done | Refused
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def digest(page: bytes | bytearray) -> bytes:
    """xxh3-128 of a page's bytes."""
    return xxhash.xxh3_128_digest(page)


def say(wire: Wire, message: Message) -> None:
    """Sends a message. Raises WireError."""
    text = _encoder.encode(message)
    wire.send(_LENGTH.pack(len(text)) + text)


def hear(wire: Wire) -> Message:
    """The next message. Raises WireError, also where it is none."""
    (length,) = _LENGTH.unpack(wire.receive(_LENGTH.size))
    if length > _LONGEST_MESSAGE_BYTES:
        raise WireError(f"{wire.peer}: announces a message of {length:,} bytes")
    try:
        return _decoder.decode(wire.receive(length))
    except msgspec.MsgspecError as error:
        raise WireError(f"{wire.peer}: says what nobody understands: {error}") from error

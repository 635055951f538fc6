"""Framing and encoding of messages, and what can go wrong with a connection.

A message is four bytes of length (little endian), then msgpack of a tagged struct (https://jcristharif.com/msgspec).

Each protocol declares its messages as a union of ``msgspec.Struct`` and bounds their fields; a decoder accepts nothing else.
"""

from __future__ import annotations

import struct
from typing import Generic, TypeVar

import msgspec

LENGTH_BYTES = 4
LONGEST_MESSAGE_BYTES = 16 << 20
_LENGTH = struct.Struct("<I")
_T = TypeVar("_T")
_encoder = msgspec.msgpack.Encoder()


class WireError(Exception):
    """All failures of a connection: it broke, or the peer broke the protocol. The connection cannot be used any more."""


class EndedError(WireError):
    """The peer closed or reset the connection."""


class SilentError(WireError):
    """The peer sent nothing for the whole timeout."""


class MessageError(WireError):
    """Bytes that are no message of this protocol, or too many of them."""


class UnprovenError(WireError):
    """The peer does not know the token, or does not speak this version of the handshake."""


class ForgedError(WireError):
    """A message is not the next one that the peer sealed: it was altered, added, repeated or dropped on the way."""


def encode(message: msgspec.Struct) -> bytes:
    """Return a message as msgpack."""
    return _encoder.encode(message)


class MessageDecoder(Generic[_T]):
    """Decoder of one protocol's messages, ``MessageDecoder(First | Second)``."""

    def __init__(self, kinds: object) -> None:
        self._decoder: msgspec.msgpack.Decoder[_T] = msgspec.msgpack.Decoder(kinds)

    def decode(self, body: bytes | bytearray) -> _T:
        """Return the message in ``body``. Raises MessageError if it is none of this protocol."""
        try:
            return self._decoder.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise MessageError(f"sent a message that is not of this protocol: {error}") from error


def frame(body: bytes, longest_bytes: int = LONGEST_MESSAGE_BYTES) -> bytes:
    """Return ``body`` with its length in front. Raises MessageError if it is too long to be accepted."""
    _require_short(len(body), longest_bytes)
    return _LENGTH.pack(len(body)) + body


def body_length(head: bytes, longest_bytes: int = LONGEST_MESSAGE_BYTES) -> int:
    """Return the length in the ``LENGTH_BYTES`` bytes before a message. Raises MessageError if it is too long."""
    length: int = _LENGTH.unpack(head)[0]
    _require_short(length, longest_bytes)
    return length


def _require_short(nbytes: int, longest_bytes: int) -> None:
    if nbytes > longest_bytes:
        raise MessageError(f"a message of {nbytes:,} bytes, more than the {longest_bytes:,} allowed")

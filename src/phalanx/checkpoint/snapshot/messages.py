"""Messages of a node's data port, and what a failure of one means to a restore.

Each request and each answer is a short message (``phalanx.wire.messages``), followed by as many raw bytes as it announces, sent from and received into
memory without a copy. Both ends have proven that they know the run's token. This keeps strangers out, not those who can
rewrite traffic on its way: over such a network use TLS.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

from msgspec import Meta, Struct

from phalanx.checkpoint.format.errors import CheckpointError
from phalanx.checkpoint.snapshot.segments import SnapshotKey
from phalanx.wire.messages import EndedError, MessageDecoder, UnprovenError, WireError

PURPOSE = "phalanx data port, version 3"
LONGEST_READ_BYTES = 64 << 20
LONGEST_RECORD_BYTES = 256 << 20

WireCount = Annotated[int, Meta(ge=0, lt=2**53)]
WireStep = Annotated[int, Meta(ge=-1, lt=2**53)]
WireText = Annotated[str, Meta(max_length=8192)]


class HolderLostError(CheckpointError):
    """The connection to a holder failed, or the holder broke the protocol; another holder may do better."""


class HolderEndedError(HolderLostError):
    """The holder ended the connection."""


class BusyError(CheckpointError):
    """The node serves as many requests as it can; worth another request after a pause."""

    def __init__(self, text: str, *, ended: bool) -> None:
        super().__init__(text)
        self.ended = ended
        """The connection has ended with this answer."""


class SnapshotRefusedError(CheckpointError):
    """The other side is not of this run, or does not accept what was sent."""


@contextmanager
def holder_errors() -> Iterator[None]:
    """Raise failures of the connection to a holder as failures of the snapshot that it holds."""
    try:
        yield
    except UnprovenError as error:
        raise SnapshotRefusedError(str(error)) from error
    except EndedError as error:
        raise HolderEndedError(str(error)) from error
    except WireError as error:
        raise HolderLostError(str(error)) from error


class _Message(Struct, frozen=True, tag=True):
    pass


class WireKey(Struct, frozen=True):
    """A ``SnapshotKey`` on the wire."""

    ranks: WireCount
    rank: WireCount
    step: WireCount

    @classmethod
    def of(cls, key: SnapshotKey) -> "WireKey":
        return cls(key.ranks, key.rank, key.step)

    def value(self) -> SnapshotKey:
        return SnapshotKey(self.ranks, self.rank, self.step)


class Describe(_Message, frozen=True):
    """Request for the record of a snapshot. The answer is ``BytesFollow``."""

    key: WireKey


class ReadImage(_Message, frozen=True):
    """Request for bytes ``start:stop`` of a snapshot's image. The answer is ``BytesFollow``."""

    key: WireKey
    start: WireCount
    stop: WireCount


class OfferSnapshot(_Message, frozen=True):
    """Offer of a snapshot. After the answer ``BytesFollow`` its record follows, then its image; the last answer is ``PushAccepted``."""

    run: WireText
    key: WireKey
    previous: WireStep
    image_bytes: WireCount
    record_bytes: Annotated[int, Meta(ge=0, le=LONGEST_RECORD_BYTES)]


class BytesFollow(_Message, frozen=True):
    """So many raw bytes follow: from the sender of this message; in the answer to ``OfferSnapshot``, from the receiver."""

    nbytes: WireCount


class PushAccepted(_Message, frozen=True):
    """The offered snapshot is in memory, complete and checked."""


class Missing(_Message, frozen=True):
    """The requested snapshot is not in memory."""

    text: WireText


class SnapshotRefused(_Message, frozen=True):
    """The request is refused; ``text`` is the reason."""

    text: WireText


class Busy(_Message, frozen=True):
    """The node serves as many requests as it can."""

    ends: bool = False
    """The connection ends with this answer: there are too many."""


Request = Describe | ReadImage | OfferSnapshot
Answer = BytesFollow | PushAccepted | Missing | SnapshotRefused | Busy
REQUESTS: MessageDecoder[Request] = MessageDecoder(Request)
ANSWERS: MessageDecoder[Answer] = MessageDecoder(Answer)

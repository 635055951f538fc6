"""The messages of a worker's page port: identity first, then an offer of names, digests and a place in memory, then pages, then done.

Both sides prove that they know the service's token, under a purpose of its own, so that a proof for one port is worth nothing at another.
Messages are short (msgpack) and sealed. Whoever can open the memory that the offer names (``shared_pages``) takes the pages there. Others ask for raw bytes, or
have the pages laid where their NIXL agent can read them (``over_nixl``): a sealed message before them holds the SHA-256 of each page, so that one that was altered on
its way, by accident or on purpose, is noticed. Nothing is encrypted.
"""

from __future__ import annotations

import hashlib
from typing import Annotated

from msgspec import Meta, Struct

from phalanx.serve.workers.over_nixl.agent import Address, NixlAgent
from phalanx.serve.workers.shared_pages import Place
from phalanx.traffic.events import Identity
from phalanx.wire.messages import MessageDecoder

PURPOSE = "phalanx page port, version 4"
MOST_PAGES = 1 << 15

PageName = Annotated[bytes, Meta(max_length=64)]
PageNames = Annotated[tuple[PageName, ...], Meta(max_length=MOST_PAGES)]
Digests = Annotated[tuple[Annotated[bytes, Meta(max_length=32)], ...], Meta(max_length=MOST_PAGES)]
_PageCount = Annotated[int, Meta(ge=0, le=MOST_PAGES)]
Numbers = Annotated[tuple[Annotated[int, Meta(ge=0, lt=MOST_PAGES)], ...], Meta(max_length=MOST_PAGES)]


class Open(Struct, frozen=True, tag=True):
    """Asks what is offered under a job, by one who computes with ``identity``. Answered by ``Offer`` or ``Refused``."""

    identity: Identity
    job: int
    names: PageNames


class Offer(Struct, frozen=True, tag=True):
    """These of the pages asked for are there, in this order; all have so many bytes."""

    names: PageNames
    page_bytes: Annotated[int, Meta(ge=0, le=1 << 32)]
    place: Place | None = None
    """Where they lie in memory, with one another and perhaps with others; None where they can only be fetched."""
    numbers: Numbers = ()
    """With ``place``, which of the pages there they are, """
    digests: Digests = ()
    """and the xxh3-128 of each."""


class Fetch(Struct, frozen=True, tag=True):
    """Asks for the bytes of ``pages`` of the offer, from the one of number ``first`` on. Answered by ``Coming``, and behind it one page after the other."""

    first: _PageCount
    pages: _PageCount


class Coming(Struct, frozen=True, tag=True):
    """The SHA-256 of each page that follows."""

    digests: Digests


class Lay(Struct, frozen=True, tag=True):
    """Asks for pages of the offer, as ``Fetch`` does, to be laid where an agent can read them. Answered by ``Laid`` or ``NotLaid``.

    They lie there until two more of these are asked for, or the conversation ends.
    """

    first: _PageCount
    pages: _PageCount


class Laid(Struct, frozen=True, tag=True):
    """The pages asked for lie one behind the other at ``address``, in the memory that ``agent`` lets others read,"""

    agent: NixlAgent
    address: Address
    digests: Digests
    """and this is the SHA-256 of each."""


class NotLaid(Struct, frozen=True, tag=True):
    """They do not: ``why``. They can be fetched all the same."""

    why: Annotated[str, Meta(max_length=8192)]


class Done(Struct, frozen=True, tag=True):
    """The lease may end: all that was wanted has come."""


class Refused(Struct, frozen=True, tag=True):
    """Nothing is offered; ``why`` says what is different."""

    why: Annotated[str, Meta(max_length=8192)]


Message = Open | Offer | Fetch | Coming | Lay | Laid | NotLaid | Done | Refused
MESSAGES: MessageDecoder[Message] = MessageDecoder(Message)


def digest(page: bytes | bytearray | memoryview) -> bytes:
    """Return the SHA-256 of a page's bytes."""
    return hashlib.sha256(page).digest()

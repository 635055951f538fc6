"""Pulling pages from another worker: whatever does not come, whole and undamaged, is left to be computed here.

A pull never fails: it returns the pages that came, from the first on without a gap, and why it ended early. Slower is allowed, other tokens
are not, so a page counts only if its digest is that of its producer.
"""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from phalanx.checkpoint.format.errors import CheckpointError
from phalanx.checkpoint.snapshot.wire import Wire, secured_client
from phalanx.serve.workers.page_wire import PURPOSE, Done, Fetch, Offer, Open, Refused, digest, hear, say
from phalanx.serve.workers.sealed_wire import SealedWire
from phalanx.traffic.events import Identity

_UNHASHED = 2
"""Pages that may wait for their hash."""


@dataclass(frozen=True)
class Pulled:
    """What a pull has brought."""

    pages: dict[bytes, bytearray]
    """Name -> bytes, in the order asked for, without a gap."""
    failure: str = ""
    """Why the rest did not come; empty if all did."""


def pull(
    host: str,
    port: int,
    token: str,
    identity: Identity,
    job: int,
    names: Sequence[bytes],
    *,
    within_s: float = 10.0,
    page_bytes: int | None = None,
) -> Pulled:
    """Pulls the pages ``names`` that are offered under ``job``, within ``within_s`` seconds; ``page_bytes`` is what one must have."""
    pages: dict[bytes, bytearray] = {}
    until_s = time.monotonic() + within_s
    try:
        with socket.create_connection((host, port), within_s) as connection:
            wire = Wire(secured_client(connection, None, host), f"{host}:{port}")
            wire.set_deadline(within_s)
            sealed = SealedWire(wire, token, "client", PURPOSE)
            failure = _pull(sealed, Open(identity, job, tuple(names)), pages, page_bytes, until_s)
    except (CheckpointError, OSError) as error:
        failure = str(error) or type(error).__name__
    return Pulled(pages, failure)


def _pull(
    wire: SealedWire,
    asked: Open,
    pages: dict[bytes, bytearray],
    page_bytes: int | None,
    until_s: float,
) -> str:
    say(wire, asked)
    offer = hear(wire)
    if isinstance(offer, Refused):
        return offer.why
    if not isinstance(offer, Offer) or offer.names != asked.names[: len(offer.names)]:
        return f"{wire.peer}: offers other pages than were asked for"
    if len(offer.digests) != len(offer.names) or (offer.names and page_bytes not in (None, offer.page_bytes)):
        return f"{wire.peer}: offers pages of {offer.page_bytes:,} bytes, where {page_bytes} are one"
    say(wire, Fetch(len(offer.names)))
    # A page is hashed, which holds no lock of Python's, while the next one comes.
    with ThreadPoolExecutor(1) as hashing:
        came: deque[tuple[bytes, bytes, bytearray, Future[bytes]]] = deque()
        failure = ""
        for name, right in zip(offer.names, offer.digests, strict=True):
            page = bytearray(offer.page_bytes)
            wire.raw.receive_into(memoryview(page))
            came.append((name, right, page, hashing.submit(digest, page)))
            if len(came) > _UNHASHED:
                failure = _keep(came.popleft(), pages)
            if not failure and time.monotonic() > until_s:
                failure = f"{wire.peer}: too slow"
            if failure:
                return failure
        while came:
            if failure := _keep(came.popleft(), pages):
                return failure
    say(wire, Done())
    missing = len(asked.names) - len(offer.names)
    return f"{missing} pages are not offered: evicted, or their lease is over" if missing else ""


def _keep(one: tuple[bytes, bytes, bytearray, Future[bytes]], pages: dict[bytes, bytearray]) -> str:
    name, right, page, found = one
    if found.result() != right:
        return f"page {name.hex()} came damaged"
    pages[name] = page
    return ""

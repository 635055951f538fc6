"""Bounds of a serving process: connections, texts, and the bytes that clients can make it hold.

Admission decides by ``Limits``; uvicorn's protocol and the responses read the constants. Memory for weights and KV pages is
bounded by ``phalanx_serve.weights.budget``.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from phalanx.process.this_process import RESERVE, raise_open_file_limit

CONNECTIONS = 65_536
"""Most connections. Each takes some tens of KiB of memory, so a descriptor limit of a million must not allow a
million.
"""
REFUSED_CONNECTIONS = 64
"""Connections beyond the limit that may wait for their refusal."""
BACKLOG = 1024
"""Connections that the kernel keeps for a server that has not accepted them yet."""
ACCEPTED_AT_ONCE = 16
"""Connections that asyncio accepts before it calls a protocol, which may close another one. So the limit may be
exceeded by a few times this number.
"""
QUEUED_EVENTS = 64
"""Events of a response that may wait for a slow reader before the detokenizer waits too."""


def connections() -> int:
    """Return the number of connections that this process may have besides its other descriptors; raises its limit
    on open files first.
    """
    free = raise_open_file_limit() - len(os.listdir("/proc/self/fd")) - RESERVE
    return max(1, min(CONNECTIONS, free))


@dataclass(frozen=True)
class Limits:
    """Limits of one server."""

    requests: int = 256
    """Most texts that are computed or wait."""
    wait_s: float = 60.0
    """Longest predicted wait for the first token."""
    body_bytes: int = 8 << 20
    """Longest body of a request."""
    bodies_bytes: int = 256 << 20
    """Bytes of all bodies that are being received or parsed, which admission has not seen yet."""
    prompts: int = 128
    """Most prompts of a request."""
    connections: int = 0
    """Connections at a time; 0: as many as the process may have."""

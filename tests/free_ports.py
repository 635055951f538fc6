"""Ports of this machine that a test may give to a process of its own."""

from __future__ import annotations

import os
import socket
from contextlib import ExitStack, suppress
from itertools import chain

PORTS = range(12_000, 19_000)
"""Below the ports of outgoing connections (from 32,768), any of which would find a port taken that was free a moment before, and below
those from which runs take the ports of their coordinators (20,000 to 39,999)."""
_given: set[int] = set()


def free_port(count: int = 1) -> int:
    """Return the first of ``count`` ports in a row on which nobody listens, and which this process was not given before. Two processes begin
    at different ports, since both may look at the same time."""
    rows = PORTS[: len(PORTS) - count + 1 : count]
    begin = hash((os.getpid(), count)) % len(rows)
    for first in chain(rows[begin:], rows[:begin]):
        ports = set(range(first, first + count))
        if ports & _given:
            continue
        with suppress(OSError), ExitStack() as probes:
            for port in ports:
                probes.enter_context(socket.socket()).bind(("127.0.0.1", port))
            _given.update(ports)
            return first
    raise OSError("no free ports")

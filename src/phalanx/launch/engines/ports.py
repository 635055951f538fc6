"""Chooses the TCP port of a run's coordinator outside the range from which the kernel takes the ports of outgoing connections.

A coordinator that is started, or started again after a death, needs one port that all agents know. Any program's outgoing connection may hold
a port of the kernel's range at that moment, for as long as it lives (``ip_local_port_range``, by default 32768 to 60999: Linux,
Documentation/networking/ip-sysctl.rst). So the port is taken from those from 20,000 to 39,999 that the machine's range leaves, by a number
that is the run's own. Where it leaves fewer than a thousand, as on machines that give nearly all ports to connections, any of them is taken, as
runs would come to share ports otherwise; ``fleet.port`` names one. Where a fleet that runs is found is in its ``fleet.json``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_FIRST, _END = 20_000, 40_000
_LEAST = 1_000
USUAL_RANGE = 32_768, 60_999
"""The first and last port of outgoing connections where nobody has set others."""
RANGE_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def range_of_connections(path: Path = RANGE_FILE) -> tuple[int, int]:
    """The first and last port that this machine's kernel gives to outgoing connections; the usual ones where it does not say."""
    try:
        first, last = map(int, path.read_text().split())
    except (OSError, ValueError):
        return USUAL_RANGE
    return first, last


def port_of(number: int, connections: tuple[int, int]) -> int:
    """The coordinator's port of a run with this number, where outgoing connections have these first and last ports."""
    first, last = connections
    below = min(max(first, _FIRST), _END) - _FIRST
    resumes = min(max(last + 1, _FIRST), _END)
    count = below + _END - resumes
    if count < _LEAST:
        below = count = _END - _FIRST
    place = number % count
    return _FIRST + place if place < below else resumes + place - below


def port_in_shell(number: str, path: Path = RANGE_FILE) -> Iterator[str]:
    """Lines of a shell that set ``port`` as ``port_of`` does, on the machine that runs them; ``number`` is an expression of its arithmetic."""
    first, last = USUAL_RANGE
    yield f"first={first} last={last}; {{ read -r first last < {path}; }} 2>/dev/null || :"
    yield f"below=$(( (first < {_FIRST} ? {_FIRST} : first > {_END} ? {_END} : first) - {_FIRST} ))"
    yield f"resumes=$(( last < {_FIRST} ? {_FIRST} : last >= {_END} ? {_END} : last + 1 ))"
    yield f"count=$(( below + {_END} - resumes ))"
    yield f'[ "$count" -ge {_LEAST} ] || {{ below={_END - _FIRST}; count=$below; }}'
    yield f"place=$(( {number} % count ))"
    yield f"port=$(( place < below ? {_FIRST} + place : resumes + place - below ))"

"""Names by which only processes of this machine reach a server.

A web page that a browser here shows can make its own host name point at 127.0.0.1 ("DNS rebinding"). Then the browser counts a server on a
loopback address as the page's own, but sends the page's host name. A server without keys therefore answers its own names alone.
"""

from __future__ import annotations

import ipaddress
import re

_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9._-]+))(?::\d{1,5})?")
_NAMES = ("localhost", "127.0.0.1", "::1")


def is_loopback(host: str) -> bool:
    """Return True for an address or name that only processes of this machine reach. Resolves no name."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def loopback_names(host: str) -> tuple[str, ...]:
    """Return the names of a server that listens on ``host``, a loopback address."""
    return tuple(dict.fromkeys((*_NAMES, host)))


def host_name(header: str) -> str:
    """Return the name or address in a Host header, without port and brackets; empty if it has another form."""
    match = _HOST.fullmatch(header)
    return (match[1] or match[2]).lower() if match else ""

"""The machines of a run and their users: addresses as users write them, loopback names, and clocks. Resolves no name."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping

# Names by which only processes of this machine reach a server.
#
# A web page in a browser on this machine can make its own host name resolve to 127.0.0.1 ("DNS rebinding"). The browser then
# treats a server on a loopback address as the page's own, but sends the page's host name. So a server without keys answers only
# requests for its own names.

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


def split_target(target: str) -> tuple[str, str]:
    """Return host and path of an HTTP request's target, both quoted. The host is empty for a target that is no URL.

    A client that takes the server for a proxy sends the whole URL. Its host counts, and not the Host header's (RFC 9112, 3.2.2).
    """
    scheme, separator, rest = target.partition("://")
    if not separator or scheme.lower() not in ("http", "https"):
        return "", target
    host, slash, path = rest.partition("/")
    return host, slash + path or "/"


def host_name(header: str) -> str:
    """Return the name or address in a Host header, without port and brackets; empty if it has another form."""
    match = _HOST.fullmatch(header)
    return (match[1] or match[2]).lower() if match else ""


_NAME = re.compile(r"(?=.{1,253}$)[\w-]{1,63}(?:\.[\w-]{1,63})*\.?")
_MOST_PORT = 65535


class AddressError(ValueError):
    """The text is no address; the message is the form to write."""


def read_host(text: str) -> str:
    """Return a host's name or IP address, without the brackets of an IPv6 address. Raises AddressError for other
    text, such as one with a port.
    """
    bare = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    if _is_ip_address(bare) or (bare == text and _NAME.fullmatch(text)):
        return bare
    raise AddressError(f"{text!r} is no host: write a name or an IP address, without a port")


def read_address(text: str) -> tuple[str, int]:
    """Return host and port, above 0, of "HOST:PORT", split at the last colon; brackets around the host are removed. Raises AddressError."""
    host, _, port = text.rpartition(":")
    try:
        if read_port(port) > 0:
            return read_host(host), int(port)
    except AddressError:
        pass
    raise AddressError(f"{text!r} is not HOST:PORT, as 10.0.0.5:29400 or [fd00::5]:29400")


def read_port(text: str) -> int:
    """Return a TCP port. Raises AddressError."""
    if text.isdecimal() and text.isascii() and int(text) <= _MOST_PORT:
        return int(text)
    raise AddressError(f"{text!r} is no port: write a number up to {_MOST_PORT}")


def _is_ip_address(text: str) -> bool:
    """Return True if ``text`` is an IPv4 or IPv6 address, without brackets."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


# Wrong clocks: if one machine's clock differs from several others by the same time, its own clock is wrong.
#
# Clocks usually fail one by one. Several clocks with the same wrong offset are far less likely than a single wrong clock.


ALIKE_S = 15.0
"""Offsets that differ by less are one offset: each is measured with the delay of its own message."""
_NAMED = 3
"""Hosts that are named; the others are counted."""


def own_clock_is_wrong(ahead_s: Mapping[str, float], agreeing: int, own: str) -> str:
    """Return a sentence on why the clock of ``own`` is the wrong one; empty if it may be right.

    It is wrong if at least two hosts differ from it, agree with each other, and are more than those that agree with it.

    Args:
        ahead_s: Host -> seconds by which its clock is ahead of that of ``own`` (negative: behind), for the hosts that are too far
            apart.
        agreeing: The number of other hosts whose clocks agree with it.
        own: The machine that has compared the clocks, as a user calls it.
    """
    offsets = sorted(ahead_s.values())
    if len(offsets) < 2 or len(offsets) <= agreeing or offsets[-1] - offsets[0] > ALIKE_S:
        return ""
    middle = offsets[len(offsets) // 2]
    names = sorted(ahead_s)
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    beside = f"; it agrees with {agreeing}" if agreeing else "; it agrees with none"
    return (
        f"the clocks of {len(names)} hosts ({', '.join(names[:_NAMED])}{more}) are {abs(middle):.0f} s {'ahead of' if middle > 0 else 'behind'} "
        f"that of {own}, all equally{beside}: the clock of {own} is the wrong one, set it there (chrony, ntpd)"
    )

"""This machine's network interfaces and listening sockets, and addresses as text: "host:port", with an IPv6 address in brackets (RFC 3986)."""

from __future__ import annotations

import ctypes
import errno
import os
import select
import socket
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import zip_longest
from typing import NamedTuple

from phalanx.run.peers import is_loopback

_DEFAULT_ROUTE = "192.0.2.1", "2001:db8::1"
"""Addresses of documentation (RFC 5737, RFC 3849), which only a default route leads to."""
_WAITING = 1024
"""Connections that the kernel keeps for a server that has not accepted them yet."""


class Interface(NamedTuple):
    """One address of a network interface; an interface with several addresses is listed once for each."""

    name: str
    address: str


def join_address(host: str, port: int | str) -> str:
    """Return "host:port", with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host and host[0] != "[" else f"{host}:{port}"


def split_address(address: str) -> tuple[str, str]:
    """Return host, without brackets, and port of "host:port"; an empty host if there is no colon."""
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), port


def resolved(host: str) -> list[str]:
    """Return the IP addresses of a host, each once, in the resolver's order; empty if it has none here."""
    with suppress(OSError, UnicodeError):
        infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        return list(dict.fromkeys(str(info[4][0]).partition("%")[0] for info in infos))
    return []


def is_private(host: str) -> bool:
    """Return True if only processes of this machine reach a server that listens at ``host``, an address or a name."""
    return is_loopback(host) or (bool(addresses := resolved(host)) and all(map(is_loopback, addresses)))


def family_of(host: str) -> socket.AddressFamily:
    """The family in which a socket listens at ``host``: IPv6 if it has no IPv4 address."""
    addresses = resolved(host)
    return socket.AF_INET6 if addresses and all(":" in address for address in addresses) else socket.AF_INET


def listening_address(host: str) -> str:
    """The address to listen at if others reach this machine at ``host``: loopback stays private; else every interface, since ``host`` may be an alias."""
    if is_loopback(host):
        return host
    return "::" if family_of(host) is socket.AF_INET6 else "0.0.0.0"


def address_towards(host: str) -> str:
    """Return this machine's address on its route to ``host``; empty if there is no route. Sends nothing."""
    with suppress(OSError), socket.socket(family_of(host), socket.SOCK_DGRAM) as probe:
        probe.connect((host, 1))
        return str(probe.getsockname()[0])
    return ""


def default_addresses() -> list[str]:
    """This machine's addresses on its default routes."""
    return [own for own in map(address_towards, _DEFAULT_ROUTE) if own]


def interface_for(addresses: Iterable[str], interfaces: Sequence[Interface], *, shared: bool) -> str:
    """Return the name of the interface with the first of ``addresses`` that any has; empty if none has one.

    ``shared``: other machines are to connect to it, so loopback addresses are skipped. Otherwise a loopback address
    selects the first interface that has any.
    """
    for address in addresses:
        if is_loopback(address):
            if not shared:  # 127.0.1.1 is one too, though no interface lists it
                return next(
                    (interface.name for interface in interfaces if is_loopback(interface.address)), ""
                )
            continue
        for interface in interfaces:
            if interface.address == address:
                return interface.name
    return ""


NEXT_ADDRESS_S = 0.25
"""Wait for one address of a host before the next is tried as well (RFC 8305, section 8)."""


def dial(host: str, port: int, within_s: float) -> socket.socket:
    """Connect to the first of a host's addresses that accepts (Happy Eyeballs, RFC 8305).

    A name may resolve to an IPv6 address that leads nowhere and an IPv4 address that works. The next address is tried
    as soon as one fails, or has not accepted for ``NEXT_ADDRESS_S``. The socket has the timeout ``within_s``. Raises
    TimeoutError after ``within_s``; OSError for a name that does not resolve, or the last failure if all addresses
    fail.
    """
    infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    remaining = _families_in_turn([(info[0], info[4]) for info in infos])
    attempts: list[socket.socket] = []
    deadline_s, next_s, failure = time.monotonic() + within_s, 0.0, OSError(f"{host} has no address")
    try:
        while remaining or attempts:
            now_s = time.monotonic()
            if now_s >= deadline_s:
                raise TimeoutError("timed out")
            if remaining and (now_s >= next_s or not attempts):
                family, address = remaining.pop(0)
                next_s = now_s + NEXT_ADDRESS_S
                try:
                    attempts.append(_attempt(family, address))
                except OSError as error:
                    failure, next_s = error, now_s
            for attempt in _decided(attempts, (min(next_s, deadline_s) if remaining else deadline_s) - now_s):
                attempts.remove(attempt)
                code = attempt.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if not code:
                    attempt.settimeout(within_s)
                    return attempt
                attempt.close()
                failure, next_s = OSError(code, os.strerror(code)), 0.0
        raise failure
    finally:
        for attempt in attempts:
            attempt.close()


_Address = tuple[object, ...]
"""An address as getaddrinfo(3) returns it."""


def _families_in_turn(
    addresses: Sequence[tuple[socket.AddressFamily, _Address]],
) -> list[tuple[socket.AddressFamily, _Address]]:
    """Return the addresses in which those of the first one's family and the others alternate."""
    first = [address for address in addresses if address[0] == addresses[0][0]]
    others = [address for address in addresses if address[0] != addresses[0][0]]
    return [address for pair in zip_longest(first, others) for address in pair if address is not None]


def _attempt(family: socket.AddressFamily, address: _Address) -> socket.socket:
    """Return a non-blocking socket that has begun to connect. Raises OSError."""
    attempt = socket.socket(family, socket.SOCK_STREAM)
    try:
        attempt.setblocking(False)
        with suppress(BlockingIOError):
            attempt.connect(address)
    except OSError:
        attempt.close()
        raise
    return attempt


def _decided(attempts: Sequence[socket.socket], within_s: float) -> list[socket.socket]:
    """Wait up to ``within_s`` seconds until an attempt has succeeded or failed; return all that have."""
    poll = select.poll()
    for attempt in attempts:
        poll.register(attempt, select.POLLOUT)
    ready = {number for number, _ in poll.poll(max(0.0, within_s) * 1000)} if attempts else set()
    return [attempt for attempt in attempts if attempt.fileno() in ready]


class ListenError(RuntimeError):
    """A server cannot listen; the message names the option to change."""

    def __init__(self, message: str, *, is_taken: bool = False) -> None:
        super().__init__(message)
        self.is_taken = is_taken
        """True if another program has the port."""


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens at ``host`` (--host of a command) and ``port`` (--port; 0: any). Raises ListenError."""
    sock = socket.socket(family_of(host), socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(_WAITING)
    except OSError as error:
        sock.close()
        if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
            raise ListenError(f"--host {host}: {error.strerror}; give an address of this machine") from error
        raise ListenError(
            f"cannot listen at {host}, port {port}: {error.strerror}; give another --port, or 0 for any",
            is_taken=error.errno == errno.EADDRINUSE,
        ) from error
    return sock


class _InterfaceAddress(ctypes.Structure):
    """``struct ifaddrs`` of getifaddrs(3)."""


_InterfaceAddress._fields_ = [
    ("next", ctypes.POINTER(_InterfaceAddress)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.c_void_p),
    ("netmask", ctypes.c_void_p),
    ("peer", ctypes.c_void_p),
    ("data", ctypes.c_void_p),
]


def local_interfaces() -> list[Interface]:
    """Return the interfaces of this machine with each of their IPv4 and IPv6 addresses; empty if the system cannot list them."""
    library, first = ctypes.CDLL(None, use_errno=True), ctypes.POINTER(_InterfaceAddress)()
    if library.getifaddrs(ctypes.byref(first)):
        return []
    try:
        interfaces, entry = [], first
        while entry:
            address = _address_at(entry.contents.address)
            if address:
                interfaces.append(Interface(entry.contents.name.decode(errors="replace"), address))
            entry = entry.contents.next
        return interfaces
    finally:
        library.freeifaddrs(first)


def _address_at(pointer: int | None) -> str:
    """Return the address of a ``struct sockaddr`` as text; empty for a null pointer, or another family than IPv4 and IPv6."""
    if not pointer:
        return ""
    head = ctypes.string_at(pointer, 2)
    # BSD has the length of the structure before a family of one byte.
    family = head[1] if sys.platform == "darwin" else int.from_bytes(head, sys.byteorder)
    if family == socket.AF_INET:
        return socket.inet_ntop(socket.AF_INET, ctypes.string_at(pointer + 4, 4))
    if family == socket.AF_INET6:
        return socket.inet_ntop(socket.AF_INET6, ctypes.string_at(pointer + 8, 16))
    return ""

"""The gateway's socket, by itself: a port that another server has is refused before PyTorch is imported, let alone weights read."""

from __future__ import annotations

import socket

WAITING = 1024
"""Connections that the kernel keeps for a server that has not accepted them yet."""


class ServerError(RuntimeError):
    """The server cannot start; the message says what to do."""


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens. Raises ServerError."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        sock = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise ServerError(f"--host {host}: {error.strerror}; give an address of this machine") from error
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(WAITING)
    except OSError as error:
        sock.close()
        raise ServerError(
            f"cannot listen at {host}, port {port}: {error.strerror}; give another --port, or 0 for any"
        ) from error
    return sock

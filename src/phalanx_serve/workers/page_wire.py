"""Pages between workers: messages of the page port, and pages in memory that the processes of one machine and user share.

First comes the identity, then an offer of names, digests and a place in memory, then pages, then done.
Both sides prove that they know the service's token, under a purpose of its own, so that a proof for one port is worth nothing at another.
Messages are short (msgpack) and sealed. Whoever can open the memory that the offer names (``shared_pages``) takes the pages there. Others ask for raw bytes, or
have the pages laid where their NIXL agent can read them (``over_nixl``): a sealed message before them holds the SHA-256 of each page, so that one that was altered on
its way, by accident or on purpose, is noticed. Nothing is encrypted.

The source writes the pages of a job into an anonymous file (memfd_create(2)) and seals it (fcntl(2), F_ADD_SEALS): then nobody, not even the source,
can change or shorten it, and a reader may check a page and use it where it lies. The reader opens it by way of the source, /proc/PID/fd/N, which the
kernel allows to processes of the same user alone (ptrace(2), PTRACE_MODE_READ), and knows it by its machine, device and inode.

Such a file is in no directory. It needs no /dev/shm, so one that is absent, small or full does not matter; and it is freed with the last process that has
it open or mapped, however that process ends. A lease that ends closes it in the source, while whoever reads it keeps what it has mapped.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import mmap
import os
import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import xxhash
from msgspec import Meta, Struct

from phalanx.wire.messages import MessageDecoder
from phalanx_serve.traffic.events import Identity
from phalanx_serve.workers.over_nixl.agent import Address, NixlAgent

# Shared memory.


_BOOT = Path("/proc/sys/kernel/random/boot_id")
_SEALS = ("F_SEAL_SEAL", "F_SEAL_SHRINK", "F_SEAL_GROW", "F_SEAL_WRITE")

_Number = Annotated[int, Meta(ge=0, le=2**62)]


class Place(Struct, frozen=True):
    """Where a file of pages can be opened."""

    machine: Annotated[str, Meta(max_length=64)]
    """The identity of the kernel's present run (/proc/sys/kernel/random/boot_id)."""
    pid: _Number
    descriptor: _Number
    device: _Number
    inode: _Number


def fast_digest(page: bytes | memoryview) -> bytes:
    """xxh3-128 of a page's bytes: against accidents, in memory that nobody else can write."""
    return xxhash.xxh3_128_digest(page)


def this_machine() -> str:
    """The ``Place.machine`` of this process; empty where the system tells none."""
    with suppress(OSError):
        return _BOOT.read_text().strip()
    return ""


class SharedPages:
    """Pages of equal size in a sealed file of this process, one behind the other; freed with the object, and with its readers."""

    def __init__(self, pages: Iterable[bytes]) -> None:
        """Copies ``pages`` into it. Raises OSError where the system gives no such memory, or no more of it."""
        machine = this_machine()
        if not machine or not hasattr(os, "memfd_create"):
            raise OSError(errno.ENOSYS, "this system has no anonymous files")
        self._descriptor = os.memfd_create("phalanx-pages", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._close = weakref.finalize(self, os.close, self._descriptor)
        try:
            os.fchmod(self._descriptor, 0o400)
            for page in pages:
                _write(self._descriptor, page)
            fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, _all_seals())
            status = os.fstat(self._descriptor)
        except BaseException:
            self._close()
            raise
        self.nbytes = status.st_size
        self.place = Place(machine, os.getpid(), self._descriptor, status.st_dev, status.st_ino)

    def mapped(self) -> memoryview:
        """The bytes of all pages, for reading."""
        return _map(self._descriptor, self.nbytes)


def _write(descriptor: int, page: bytes) -> None:
    rest = memoryview(page)
    while rest:  # a write may end early where memory does
        rest = rest[os.write(descriptor, rest) :]


def _all_seals() -> int:
    seals = 0
    for name in _SEALS:
        seals |= getattr(fcntl, name)
    return seals


def opened(place: Place, nbytes: int) -> memoryview:
    """The first ``nbytes`` bytes of another process's ``SharedPages``, for reading, for as long as it is used.

    Raises OSError where this process cannot reach it: on another machine, in another container, of another user, or freed.
    """
    if place.machine != this_machine():
        raise OSError(errno.EXDEV, "the pages are in the memory of another machine")
    # Only looked at, not opened, until it is known to be the file: a pid may be another process's in this container.
    found = os.open(f"/proc/{place.pid}/fd/{place.descriptor}", os.O_PATH | os.O_CLOEXEC)
    try:
        status = os.fstat(found)
        if (status.st_dev, status.st_ino) != (place.device, place.inode):
            raise OSError(errno.ENOENT, f"process {place.pid} of this container has no such pages")
        descriptor = os.open(f"/proc/self/fd/{found}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(found)
    try:
        if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _all_seals() != _all_seals():
            raise OSError(errno.EPERM, f"the pages of process {place.pid} can still be changed")
        if os.fstat(descriptor).st_size < nbytes:
            raise OSError(errno.ENODATA, f"the pages of process {place.pid} are fewer than it says")
        return _map(descriptor, nbytes)
    finally:
        os.close(descriptor)


def _map(descriptor: int, nbytes: int) -> memoryview:
    if not nbytes:
        return memoryview(b"")
    # Private, since a file that is sealed against writing cannot be mapped shared before Linux 6.7; nothing is copied by it.
    flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_POPULATE", 0)
    return memoryview(mmap.mmap(descriptor, nbytes, flags=flags, prot=mmap.PROT_READ))


def cut(memory: memoryview, numbers: Sequence[int], page_bytes: int) -> list[memoryview]:
    """The pages of these numbers."""
    return [memory[number * page_bytes : (number + 1) * page_bytes] for number in numbers]


# Messages.


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

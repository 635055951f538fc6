"""Pages between workers: messages of the page port, and pages in memory that the processes of one machine and user
share.

The order is: identity, an offer of names, digests and a place in memory, pages, done. Both sides prove that they know
the service's token, with a purpose of its own, so a proof for one port is invalid at another. Messages are short
(msgpack) and sealed. A reader that can open the offered memory (``SharedPages``) reads the pages there. Others
request raw bytes, or have the pages written where their NIXL agent can read them (``nixl_client``). A sealed message
then carries the SHA-256 of each page, so any change on the way is detected. Nothing is encrypted.

The source writes the pages of a job into an anonymous file (memfd_create(2)) and seals it (fcntl(2), F_ADD_SEALS).
After that no process, not even the source, can change or shorten it, and a reader may check a page and use it in
place. The reader opens it through the source, /proc/PID/fd/N, and verifies its machine, device and inode. The kernel
allows that only to processes of the same user (ptrace(2), PTRACE_MODE_READ).

Such a file is in no directory. It needs no /dev/shm, and is freed with the last process that has it open or mapped,
however that process ends. The end of a lease closes it in the source; a reader keeps its mapping.
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
from msgspec import Meta, Struct, field

from phalanx.wire.messages import MessageDecoder
from phalanx_serve.traffic.events import WorkerIdentity
from phalanx_serve.workers.nixl_agent import Address, NixlAgent

# Shared memory.


_BOOT = Path("/proc/sys/kernel/random/boot_id")
_SEALS = ("F_SEAL_SEAL", "F_SEAL_SHRINK", "F_SEAL_GROW", "F_SEAL_WRITE")

_Number = Annotated[int, Meta(ge=0, le=2**62)]


class SharedMemoryPlace(Struct, frozen=True):
    """Address of a shared file of pages."""

    machine: Annotated[str, Meta(max_length=64)]
    """Boot id of the kernel (/proc/sys/kernel/random/boot_id)."""
    pid: _Number
    descriptor: _Number
    device: _Number
    inode: _Number


def fast_digest(page: bytes | memoryview) -> bytes:
    """Return the xxh3-128 of a page: against accidents, in memory that no other process can write."""
    return xxhash.xxh3_128_digest(page)


def this_machine() -> str:
    """Return the ``SharedMemoryPlace.machine`` of this process; empty if the system has no boot id."""
    with suppress(OSError):
        return _BOOT.read_text().strip()
    return ""


class SharedPages:
    """Consecutive pages of equal size in a sealed file of this process; freed with the object and its readers."""

    def __init__(self, pages: Iterable[bytes]) -> None:
        """Copy ``pages`` into a sealed anonymous file, which only this user can open. Raises OSError if the system lacks such memory."""
        machine = this_machine()
        if not machine or not hasattr(os, "memfd_create"):
            raise OSError(errno.ENOSYS, "this system has no anonymous files")
        self._descriptor = os.memfd_create("phalanx-pages", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._close = weakref.finalize(self, os.close, self._descriptor)
        try:
            os.fchmod(self._descriptor, 0o400)
            for page in pages:
                remaining = memoryview(page)
                while remaining:  # a write may be partial if memory is short
                    remaining = remaining[os.write(self._descriptor, remaining) :]
            fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, _all_seals())
            status = os.fstat(self._descriptor)
        except BaseException:
            self._close()
            raise
        self.nbytes = status.st_size
        self.place = SharedMemoryPlace(machine, os.getpid(), self._descriptor, status.st_dev, status.st_ino)

    def mapped(self) -> memoryview:
        """Return the bytes of all pages, read-only."""
        return _map(self._descriptor, self.nbytes)


def _all_seals() -> int:
    """Return all seals of anonymous files that this system has."""
    seals = 0
    for name in _SEALS:
        seals |= getattr(fcntl, name)
    return seals


def opened(place: SharedMemoryPlace, nbytes: int) -> memoryview:
    """Map the first ``nbytes`` bytes of another process's ``SharedPages``, read-only, for as long as the view is
    used.

    Raises OSError if this process cannot open it: on another machine, in another container, of another user, or
    freed. Also if the file is another one, is not sealed, or is shorter.
    """
    if place.machine != this_machine():
        raise OSError(errno.EXDEV, "the pages are in the memory of another machine")
    # O_PATH does not open it before the check: in this container the pid may belong to another process.
    handle = os.open(f"/proc/{place.pid}/fd/{place.descriptor}", os.O_PATH | os.O_CLOEXEC)
    try:
        status = os.fstat(handle)
        if (status.st_dev, status.st_ino) != (place.device, place.inode):
            raise OSError(errno.ENOENT, f"process {place.pid} of this container has no such pages")
        descriptor = os.open(f"/proc/self/fd/{handle}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(handle)
    try:
        if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _all_seals() != _all_seals():
            raise OSError(errno.EPERM, f"the pages of process {place.pid} can still be changed")
        if os.fstat(descriptor).st_size < nbytes:
            raise OSError(errno.ENODATA, f"the pages of process {place.pid} are fewer than it has announced")
        return _map(descriptor, nbytes)
    finally:
        os.close(descriptor)


def _map(descriptor: int, nbytes: int) -> memoryview:
    """Map a file's first bytes, read-only."""
    if not nbytes:
        return memoryview(b"")
    # Private, since a file that is sealed against writing cannot be mapped shared before Linux 6.7; nothing is copied by it.
    flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_POPULATE", 0)
    return memoryview(mmap.mmap(descriptor, nbytes, flags=flags, prot=mmap.PROT_READ))


def cut(memory: memoryview, numbers: Sequence[int], page_bytes: int) -> list[memoryview]:
    """Return the pages of these numbers."""
    return [memory[number * page_bytes : (number + 1) * page_bytes] for number in numbers]


# Messages.


PURPOSE = "phalanx page port, version 4"
MOST_PAGES = 1 << 15

PageName = Annotated[bytes, Meta(max_length=64)]
PageNames = Annotated[tuple[PageName, ...], Meta(max_length=MOST_PAGES)]
Digests = Annotated[tuple[Annotated[bytes, Meta(max_length=32)], ...], Meta(max_length=MOST_PAGES)]
_PageCount = Annotated[int, Meta(ge=0, le=MOST_PAGES)]
Numbers = Annotated[tuple[Annotated[int, Meta(ge=0, lt=MOST_PAGES)], ...], Meta(max_length=MOST_PAGES)]


class OpenPages(Struct, frozen=True, tag="Open"):
    """Request for the pages under a job, by a worker with ``identity``. Answered by ``Offer`` or ``PagesRefused``."""

    identity: WorkerIdentity
    job: int
    names: PageNames


class Offer(Struct, frozen=True, tag=True):
    """The requested pages that are available, in this order; all have the same size."""

    names: PageNames
    page_bytes: Annotated[int, Meta(ge=0, le=1 << 32)]
    place: SharedMemoryPlace | None = None
    """Their shared memory, which may have other pages too; None if they can only be fetched."""
    numbers: Numbers = ()
    """With ``place``, their page numbers there."""
    digests: Digests = ()
    """With ``place``, the xxh3-128 of each."""


class Fetch(Struct, frozen=True, tag=True):
    """Request for the bytes of ``pages`` offered pages, from number ``first`` on. Answered by ``Coming``, followed
    by the pages.
    """

    first: _PageCount
    pages: _PageCount


class Coming(Struct, frozen=True, tag=True):
    """SHA-256 of each page that follows."""

    digests: Digests


class Lay(Struct, frozen=True, tag=True):
    """Request to write offered pages, numbered as in ``Fetch``, where an agent can read them. Answered by ``Laid`` or
    ``NotLaid``.

    They stay until two more of these requests, or the end of the conversation.
    """

    first: _PageCount
    pages: _PageCount


class Laid(Struct, frozen=True, tag=True):
    """The requested pages are consecutive at ``address``, in the memory of ``agent``."""

    agent: NixlAgent
    address: Address
    digests: Digests
    """SHA-256 of each page."""


class NotLaid(Struct, frozen=True, tag=True):
    """The pages could not be written, for ``reason``. They can still be fetched."""

    reason: Annotated[str, Meta(max_length=8192)] = field(name="why")


class Done(Struct, frozen=True, tag=True):
    """All needed pages have arrived; the lease may end."""


class PagesRefused(Struct, frozen=True, tag="Refused"):
    """Nothing is offered; ``reason`` names the mismatch."""

    reason: Annotated[str, Meta(max_length=8192)] = field(name="why")


Message = OpenPages | Offer | Fetch | Coming | Lay | Laid | NotLaid | Done | PagesRefused
MESSAGES: MessageDecoder[Message] = MessageDecoder(Message)


def digest(page: bytes | bytearray | memoryview) -> bytes:
    """Return the SHA-256 of a page's bytes."""
    return hashlib.sha256(page).digest()

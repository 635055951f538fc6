"""The protocol of an object store: whole objects under keys, read in ranges, written at once, created only if absent.

It is the part that S3, Google Cloud Storage, Azure and a file system have in common. There is no rename and no lock: whatever has to
become visible at one moment is one small object made by ``create``, which fails if the key is taken. An object is seen whole or not at
all, and once written it is seen by everybody (S3 and the others are strongly consistent since 2020).

Beside the protocol: the rules of keys, the errors of every store, its retry policy, and hedged reads.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol, TypeVar

from phalanx.process.background import in_background

MOST_CREATED_BYTES = 4 << 20
"""The largest object that ``create`` makes: it must go in one request, since uploads in parts cannot be made conditional."""


@dataclass(frozen=True, slots=True)
class Info:
    """An object as a listing shows it. ``etag`` and ``version`` are empty where the store has none."""

    key: str
    nbytes: int
    etag: str
    version: str
    modified: datetime


class Store(Protocol):
    """Objects under one URL; keys are relative to it, as ``a/b.json``. Safe to use from several threads.

    Failures that may pass (a broken connection, 408, 429, 5xx) are tried again for as long as the store's ``RetryPolicy`` allows. Every
    method raises a StoreError that names the object, the operation and the remedy.
    """

    @property
    def url(self) -> str:
        """The URL that was opened, without a slash at its end."""

    def get(self, key: str) -> bytes:
        """The whole object. Raises MissingObjectError."""

    def ranges(self, key: str, spans: Sequence[tuple[int, int]]) -> list[memoryview]:
        """Return the bytes ``start`` to ``stop`` (exclusive) of each span, in order; gaps below 64 KiB are read as
        one request.

        Raises MissingObjectError, and ShortObjectError where the object ends before a span does.
        """

    def put(self, key: str, data: bytes | memoryview) -> None:
        """Write the object, durable when this returns, in place of one that is there; no reader ever sees a part of it."""

    def put_blocks(self, key: str, blocks: Iterable[bytes | memoryview], nbytes: int) -> None:
        """As ``put``, for an object of ``nbytes`` that comes in blocks, so that it is never in memory as a whole.

        A broken upload is not begun again, since the blocks are gone: only its requests are repeated. Errors of
        ``blocks`` are raised.
        """

    def create(self, key: str, data: bytes) -> None:
        """Create the object if there is none, atomic and durable; of several creators one succeeds. At most 4 MiB.

        Raises ExistsError if the key is taken by other bytes. Equal bytes count as one's own, whose answer was lost: give ``data``
        something that no other creator writes. Raises ValueError for a larger object.
        """

    def list(self, prefix: str = "") -> Iterator[Info]:
        """All objects below ``prefix``, a path of whole segments (``a/b`` holds ``a/b/c`` but not ``a/bc``), in any order."""

    def info(self, key: str) -> Info:
        """The object as a listing shows it. Raises MissingObjectError."""

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects; a key that is missing is no error."""

    def remove_unfinished(self) -> None:
        """Remove leftovers of killed writers that are no objects, as far as the store does not do so itself. No writer may be active."""


def require_create(store: Store, probe_key: str) -> None:
    """Check, by creating ``probe_key`` twice, that ``create`` is refused for a key that is taken; some stores
    ignore the condition.

    The key must be new; it is deleted again, if that is allowed. Raises UnconditionalStoreError, and other
    StoreErrors.
    """
    store.create(probe_key, b"first")
    try:
        store.create(probe_key, b"second")
    except ExistsError:
        refused = True
    else:
        refused = False
    with suppress(StoreError):  # a client that may only create objects can commit all the same
        store.delete([probe_key])
    if not refused:
        raise UnconditionalStoreError(
            f"{store.url} ignores If-None-Match: two attempts could both commit; use a store with conditional writes",
            store.url,
            "create",
        )


# Errors of object stores. Each names the URL, the operation and the remedy. None has the full text of a server or library,
# which can contain signatures and keys.


class StoreError(Exception):
    """Any failure of an object store. ``url`` is the object's or the store's, ``operation`` the method that failed."""

    def __init__(self, message: str, url: str, operation: str) -> None:
        super().__init__(message)
        self.url = url
        self.operation = operation


class BadUrlError(StoreError):
    """The URL or key names no place in a store."""


class MissingObjectError(StoreError):
    """There is no such object."""


class MissingBucketError(StoreError):
    """There is no such bucket or container."""


class ExistsError(StoreError):
    """The key is taken."""


class ShortObjectError(StoreError):
    """The object ends before the requested bytes."""


class DeniedError(StoreError):
    """The store refuses: no credentials, wrong ones, or no right to this."""


class UnavailableError(StoreError):
    """The store did not do it within the time that the retry policy gives it."""


class ExpiredError(UnavailableError):
    """The store refuses credentials that have expired, and no new ones came in time."""


class FullError(StoreError):
    """The storage has no room."""


class UnconditionalStoreError(StoreError):
    """The store cannot refuse to create what is there, so nothing may be committed in it."""


class MissingSupportError(StoreError):
    """A package is not installed that this URL or these credentials need."""


# Keys: relative paths that are valid in every store and on a file system.


def require_key(key: str, url: str) -> None:
    """Raise BadUrlError unless ``key`` is a relative path of plain segments.

    It has no empty segment, no ``.`` or ``..``, no control character and no backslash.
    """
    segments = key.split("/")
    if any(segment in ("", ".", "..") for segment in segments) or any(ord(c) < 32 or c == "\\" for c in key):
        raise BadUrlError(
            f"{key!r} is no key below {url}: write a relative path such as data/part-0.bin", url, "open"
        )


def require_prefix(prefix: str, url: str) -> None:
    """As ``require_key``, but for the empty prefix, which means everything."""
    if prefix:
        require_key(prefix, url)


# Retries.


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often and how long what may pass is tried again: ``retries`` times, with pauses that double from ``first_pause_s`` to
    ``longest_pause_s`` and are spread at random, and nothing is begun again after ``timeout_s``."""

    retries: int = 10
    first_pause_s: float = 0.1
    longest_pause_s: float = 15.0
    timeout_s: float = 180.0


# Hedged reads: a read that is much slower than usual is sent a second time, and the first response is used.
#
# Of many thousand requests a few take a hundred times the median, by chance, and a reader of all of them waits for the slowest.
# A second request is then usually answered at once (Dean and Barroso 2013, "The Tail at Scale", CACM 56(2)). It is sent after
# three times the 99th percentile of the latest reads. At most one read in twenty is sent twice, so that a slow store does not
# get twice the load.


_LATEST = 256
"""Reads of which the percentile is taken."""
_FACTOR, _LEAST_S, _UNKNOWN_S = 3.0, 0.5, 5.0
_FEW = 16
"""Number of reads below which there is no percentile: a second request is sent after ``unmeasured_s`` then."""
_MOST_SHARE = 0.05
_THREAD = "store-read"

T = TypeVar("T")


class HedgedReads:
    """Reads of one kind and size from one store, and how long they took. Threads may share it."""

    def __init__(self, *, min_s: float = _LEAST_S, unmeasured_s: float = _UNKNOWN_S) -> None:
        """Wait at least ``min_s`` seconds before a second request, and ``unmeasured_s`` while there are too few
        reads for a percentile.
        """
        self._min_s, self._unmeasured_s = min_s, unmeasured_s
        self.reads = 0
        self.hedged = 0
        """Number of reads that were called a second time."""
        self._latest: deque[float] = deque(maxlen=_LATEST)
        self._lock = threading.Lock()

    def read(self, call: Callable[[], T]) -> T:
        """Hedged read: call ``call`` in a thread, and call it again in parallel if the first call is slow. Return
        the first success.

        If both fail, raise the error that came first. A first answer that is an error before the second call is
        raised at once. Second calls are limited to a share of all reads.
        """
        with self._lock:
            self.reads += 1
        begun_s = time.monotonic()
        # Daemon threads: the slower call may never return, and the process does not wait for it.
        answers: queue.SimpleQueue[Future[T]] = queue.SimpleQueue()
        in_background(call, _THREAD).add_done_callback(answers.put)
        try:
            answer = answers.get(timeout=self.patience_s())
        except queue.Empty:
            calls = 1 + self._may_hedge()
            if calls == 2:
                in_background(call, _THREAD).add_done_callback(answers.put)
            answer = answers.get()
            if answer.exception() is not None and calls == 2:
                other = answers.get()
                answer = answer if other.exception() is not None else other
        with self._lock:
            self._latest.append(time.monotonic() - begun_s)
        return answer.result()

    def patience_s(self) -> float:
        """Return the seconds after which a read is called a second time: a multiple of the latest reads' 99th
        percentile.

        It is at least ``min_s``; while there are too few reads, it is ``unmeasured_s``.
        """
        with self._lock:
            latest = sorted(self._latest)
        if len(latest) < _FEW:
            return self._unmeasured_s
        return max(self._min_s, _FACTOR * latest[math.ceil(0.99 * len(latest)) - 1])

    def _may_hedge(self) -> bool:
        """Count a second call and return True, unless second calls would exceed their share of all reads."""
        with self._lock:
            allowed = self.hedged < max(1.0, _MOST_SHARE * self.reads)
            self.hedged += allowed
            return allowed

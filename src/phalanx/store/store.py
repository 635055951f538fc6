"""The protocol of an object store: whole objects under keys, read in ranges, written at once, created only if absent.

It is the part that S3, Google Cloud Storage, Azure and a file system have in common. There is no rename and no lock: whatever has to
become visible at one moment is one small object made by ``create``, which fails if the key is taken. An object is seen whole or not at
all, and once written it is seen by everybody (S3 and the others are strongly consistent since 2020).
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from phalanx.store.errors import ExistsError, StoreError, UnconditionalStoreError

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

    Failures that may pass (a broken connection, 408, 429, 5xx) are tried again for as long as the store's ``RetryPolicy`` says. Every
    method raises a StoreError that names the object, the operation and the remedy.
    """

    @property
    def url(self) -> str:
        """The URL that was opened, without a slash at its end."""
        ...

    def get(self, key: str) -> bytes:
        """The whole object. Raises MissingObjectError."""
        ...

    def ranges(self, key: str, spans: Sequence[tuple[int, int]]) -> list[memoryview]:
        """The bytes ``start`` to ``stop`` (exclusive) of each span; gaps below 64 KiB are read over rather than asked for separately.

        Raises MissingObjectError, and ShortObjectError where the object ends before a span does.
        """
        ...

    def put(self, key: str, data: bytes | memoryview) -> None:
        """Writes the object, durable when this returns, in place of one that is there; nobody ever sees a part of it."""
        ...

    def put_blocks(self, key: str, blocks: Iterable[bytes | memoryview], nbytes: int) -> None:
        """As ``put``, for an object of ``nbytes`` that comes in blocks, so that it is never in memory as a whole.

        A broken upload is not begun anew, since the blocks are gone: only its requests are repeated. What ``blocks`` raises is raised.
        """
        ...

    def create(self, key: str, data: bytes) -> None:
        """Makes the object if there is none, atomic and durable; of several creators one succeeds. At most 4 MiB.

        Raises ExistsError where the key is taken by other bytes. Equal bytes count as one's own, whose answer was lost: give ``data``
        something that no other creator writes. Raises ValueError for a larger object.
        """
        ...

    def list(self, prefix: str = "") -> Iterator[Info]:
        """All objects below ``prefix``, a path of whole segments (``a/b`` holds ``a/b/c`` but not ``a/bc``), in any order."""
        ...

    def info(self, key: str) -> Info:
        """The object as a listing shows it. Raises MissingObjectError."""
        ...

    def delete(self, keys: Iterable[str]) -> None:
        """Removes objects; a key that is not there is no error."""
        ...

    def remove_unfinished(self) -> None:
        """Removes what killed writers left behind that is no object, as far as the store does not do so itself; nobody may be writing."""
        ...


def require_create(store: Store, probe_key: str) -> None:
    """The probe: makes sure that ``create`` is refused for a key that is taken, by trying it; some stores ignore the condition.

    ``probe_key`` must be new; it is removed again, where that is allowed. Raises UnconditionalStoreError.
    """
    store.create(probe_key, b"first")
    try:
        store.create(probe_key, b"second")
    except ExistsError:
        refused = True
    else:
        refused = False
    with suppress(StoreError):  # whoever may only add objects can commit all the same
        store.delete([probe_key])
    if not refused:
        raise UnconditionalStoreError(
            f"{store.url} ignores If-None-Match: two attempts could both commit; use a store with conditional writes",
            store.url,
            "create",
        )

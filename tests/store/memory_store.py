"""A store in this process's memory, in which a test sees and can stop every operation."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta

from phalanx.store.store import ExistsError, Info, MissingObjectError, ShortObjectError


def nothing(_operation: str, _key: str) -> None:
    """Lets every operation pass."""


class MemoryStore:
    """Objects in a dictionary. ``before(operation, key)`` is called before each operation and may raise; ``age`` makes objects older."""

    url = "memory://store"

    def __init__(self, objects: dict[str, bytes] | None = None) -> None:
        self.objects = {} if objects is None else objects
        self.before: Callable[[str, str], None] = nothing
        self.age = timedelta()
        self.read_bytes = 0
        self._lock = threading.Lock()

    def get(self, key: str) -> bytes:
        self.before("get", key)
        if key not in self.objects:
            raise MissingObjectError(f"get of {self.url}/{key}: there is no such object", key, "get")
        return self.objects[key]

    def ranges(self, key: str, spans: Sequence[tuple[int, int]]) -> list[memoryview]:
        self.before("ranges", key)
        if key not in self.objects:
            raise MissingObjectError(f"ranges of {self.url}/{key}: there is no such object", key, "ranges")
        data = memoryview(self.objects[key])
        if any(stop > len(data) for _, stop in spans):
            raise ShortObjectError(f"{self.url}/{key}: ends before", key, "ranges")
        self.read_bytes += sum(stop - start for start, stop in spans)
        return [data[start:stop] for start, stop in spans]

    def put(self, key: str, data: bytes | memoryview) -> None:
        self.before("put", key)
        self.objects[key] = bytes(data)

    def put_blocks(self, key: str, blocks: Iterable[bytes | memoryview], nbytes: int) -> None:
        data = b"".join(blocks)
        assert len(data) == nbytes
        self.put(key, data)

    def create(self, key: str, data: bytes) -> None:
        self.before("create", key)
        with self._lock:
            if self.objects.setdefault(key, data) != data:
                raise ExistsError(f"create of {self.url}/{key}: it is there already", key, "create")

    def list(self, prefix: str = "") -> Iterator[Info]:
        self.before("list", prefix)
        modified = datetime.now(UTC) - self.age
        for key, data in sorted(self.objects.items()):
            if not prefix or key.startswith(f"{prefix}/"):
                yield Info(key, len(data), "", "", modified)

    def info(self, key: str) -> Info:
        self.before("info", key)
        if key not in self.objects:
            raise MissingObjectError(f"info of {self.url}/{key}: there is no such object", key, "info")
        return Info(key, len(self.objects[key]), "", "", datetime.now(UTC) - self.age)

    def delete(self, keys: Iterable[str]) -> None:
        for key in list(keys):
            self.before("delete", key)
            self.objects.pop(key, None)

    def remove_unfinished(self) -> None:
        """Nothing: an object is there or not."""

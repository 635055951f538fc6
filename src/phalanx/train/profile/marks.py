"""Our own words for what a rank does, while it is recorded: each range of the profiler carries the number of a mark.

PyTorch's ``record_function`` takes a name; what a range means to us (which axis, which ranks, how many bytes, the how-manieth collective of its
group) is kept beside it in a list, and the name is only its number. So a range costs a few microseconds, and all times come from one clock.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.autograd.profiler import record_function

from phalanx.run.section_reader import JsonObject

PREFIX = "phalanx|"


class Marks:
    """The marks of one recording."""

    def __init__(self) -> None:
        self.rows: list[JsonObject] = []
        self._numbers: dict[tuple[str, str], int] = {}

    @contextmanager
    def around(self, kind: str, name: str, **more: object) -> Iterator[None]:
        """Marks the time inside; with ``more`` to say, as a mark of its own."""
        with record_function(f"{PREFIX}{self.number(kind, name, **more)}"):
            yield

    def opened(self, kind: str, name: str) -> record_function:
        """A range that has begun; whoever asked for it calls its ``__exit__``."""
        opened = record_function(f"{PREFIX}{self.number(kind, name)}")
        opened.__enter__()  # type: ignore[no-untyped-call]
        return opened

    def number(self, kind: str, name: str, **more: object) -> int:
        """The number of a mark, the same for all ranges of which there is no more to say."""
        key = kind, name
        if not more and key in self._numbers:
            return self._numbers[key]
        self.rows.append({"kind": kind, "name": name, **more})
        if not more:
            self._numbers[key] = len(self.rows) - 1
        return len(self.rows) - 1

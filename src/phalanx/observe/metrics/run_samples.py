"""The samples of a run directory: its event stream is followed from where the last look ended.

A look reads what was appended since, and no more than a given time of it: the first look at a run of months says what its first part says, and the
next looks catch up. Nothing is ever written, and nothing that stands in the stream can do more than be counted as torn.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from phalanx.observe.metrics.run_facts import RunFacts
from phalanx.observe.metrics.run_metrics import RUN_METRICS
from phalanx.observe.metrics.samples import Labels, Metric, Sample, collect
from phalanx.run.directory.paths import RunDirectory
from phalanx.run.directory.regular_file import open_regular

_BLOCK_BYTES = 1 << 16
_LONGEST_LINE = 1 << 22
_REST = 1.0
"""Between blocks the reader rests for so many times what a block took: other threads of its process have something to do."""


def _ignore(_metric: Metric, _error: Exception) -> None:
    """A metric that cannot be computed is left out."""


class RunSampler:
    """Follows one run. Not for several threads at once."""

    def __init__(
        self, directory: Path, run: str = "", failed: Callable[[Metric, Exception], None] = _ignore
    ) -> None:
        """``run`` is the label; by default the name of the run directory, which two runs of one name do not share."""
        self._path = RunDirectory(directory).events
        self._labels = Labels(run=run or directory.resolve().name)
        self._failed = failed
        self._forget()

    def _forget(self) -> None:
        self.facts, self._offset, self._rest, self._file = RunFacts(), 0, b"", (0, 0)

    def samples(self, patience_s: float = 1.0) -> list[Sample]:
        """The run's samples as of now; reads for at most ``patience_s``. None for a run without events."""
        self.catch_up(patience_s)
        if not self.facts.counts:
            return []
        return collect(RUN_METRICS, self.facts, self._labels, self._failed)

    def catch_up(self, patience_s: float) -> bool:
        """Takes what was appended since the last call, for at most so long; returns True if that was all of it."""
        deadline_s = time.monotonic() + patience_s
        while block := self._next():
            began_s = time.thread_time()
            *whole, self._rest = (self._rest + block).split(b"\n")
            for line in whole:
                self.facts.take(line)
            if len(self._rest) > _LONGEST_LINE:
                self._rest = b"?"  # whatever it is, its end will be no event either
            if time.monotonic() >= deadline_s:
                return False
            if len(block) == _BLOCK_BYTES:
                time.sleep(_REST * (time.thread_time() - began_s))
        return True

    def _next(self) -> bytes:
        """The next block of the file; all is read anew if another file has taken its place. Empty at the end, and where it cannot be read."""
        try:
            with open_regular(self._path) as file:
                status = os.fstat(file.fileno())
                if self._file != (status.st_dev, status.st_ino) or status.st_size < self._offset:
                    self._forget()
                    self._file = status.st_dev, status.st_ino
                file.seek(self._offset)
                block = file.read(_BLOCK_BYTES)
        except OSError:
            return b""
        self._offset += len(block)
        return block


def run_samples(directory: Path) -> list[Sample]:
    """All samples of the run in ``directory``. Who asks again and again keeps a ``RunSampler``."""
    return RunSampler(directory).samples(patience_s=60.0)

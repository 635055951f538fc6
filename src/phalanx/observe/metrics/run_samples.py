"""The samples of a run directory: its event stream is followed from where the last look ended.

A look reads what was appended since, and no more than a given time of it: the first look at a run of months says what its first part says, and the
next looks catch up. Nothing is ever written, and nothing that stands in the stream can do more than be counted as torn.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from phalanx.observe.lines.tail import FileTail
from phalanx.observe.metrics.run_facts import RunFacts
from phalanx.observe.metrics.run_metrics import RUN_METRICS
from phalanx.observe.metrics.samples import Labels, Metric, Sample, collect
from phalanx.run.directory.paths import RunDirectory

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
        self._tail = FileTail(
            RunDirectory(directory).events,
            most_line_bytes=_LONGEST_LINE,
            block_bytes=_BLOCK_BYTES,
            instead_of_long=b"?",  # counted as torn
        )
        self._labels = Labels(run=run or directory.resolve().name)
        self._failed = failed
        self.facts = RunFacts()
        self._over = False
        """The file was gone when it was last looked at: what it said last counts until another one says something."""

    def samples(self, patience_s: float = 1.0) -> list[Sample]:
        """The run's samples as of now; reads for at most ``patience_s``. None for a run without events."""
        self.catch_up(patience_s)
        if not self.facts.counts:
            return []
        return collect(RUN_METRICS, self.facts, self._labels, self._failed)

    def catch_up(self, patience_s: float) -> bool:
        """Takes what was appended since the last call, for at most so long; returns True if that was all of it."""
        deadline_s = time.monotonic() + patience_s
        while True:
            began_s, before = time.thread_time(), self._tail.read_bytes
            try:
                batch = self._tail.next_batch()
            except OSError:
                return True
            self._over |= batch.restarted
            if self._over and self._tail.found:
                self.facts, self._over = RunFacts(), False
            for _, line in batch.lines:
                self.facts.take(line)
            if self._tail.read_bytes == before and not batch.restarted:
                return True
            if time.monotonic() >= deadline_s:
                return False
            if batch.more:
                time.sleep(_REST * (time.thread_time() - began_s))


def run_samples(directory: Path) -> list[Sample]:
    """All samples of the run in ``directory``. Who asks again and again keeps a ``RunSampler``."""
    return RunSampler(directory).samples(patience_s=60.0)

"""Gathers the samples of several sources into the text that an endpoint serves, so that neither a source nor a scraper can cost the process much.

* Each source is computed on a thread of its own. One that hangs, as a file system or a driver may, is left out after a moment (``patience_s``) and called
  again only when it has come back; one that raises is left out. Both are counted (``phalanx_exporter_failures_total``).
* The text is made at a request, and kept: at most a small share of one core's time (``share``) goes into making it, however many requests come.
  Only the clock, the last line of it, is that of the moment.

The last section gathers the samples of one run directory.
"""

from __future__ import annotations

import gzip
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from phalanx.observe.lines import FileTail
from phalanx.observe.metrics.run_metrics import RUN_METRICS, RunFacts
from phalanx.observe.metrics.samples import Labels, Metric, Sample, collect, render
from phalanx.run.directory.paths import RunDirectory

_SELF = "the endpoint itself"
FAILURES = Metric(
    "phalanx_exporter_failures_total",
    "counter",
    "Times that a source of metrics raised or was late.",
    _SELF,
    ("source",),
)
RENDER = Metric("phalanx_exporter_seconds", "gauge", "Seconds that the last text took to be made.", _SELF)
CPU = Metric(
    "phalanx_process_cpu_seconds_total",
    "counter",
    "Processor time of the process that serves the metrics.",
    _SELF,
)
CLOCK = Metric(
    "phalanx_clock_timestamp_seconds",
    "gauge",
    "The machine's clock at the moment of the answer; against Prometheus' own it shows clocks that run apart.",
    _SELF,
)
EXPORTER_METRICS = (FAILURES, RENDER, CPU, CLOCK)

Collect = Callable[[], Iterable[Sample]]


class _Collector:
    """One source, computed on a thread of its own at a request."""

    def __init__(self, name: str, collect: Collect) -> None:
        """Start the thread that calls ``collect`` at each request."""
        self.name, self._collect = name, collect
        self._requested, self.done = threading.Event(), threading.Event()
        self.done.set()
        self.samples: list[Sample] = []
        self.error = ""
        self.cpu_s = 0.0
        """Processor time that the last answer took."""
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=f"metrics-{name}", daemon=True)
        self._thread.start()

    def ask(self) -> bool:
        """Request the source's computation, and return True; False if the one before is still running."""
        if not self.done.is_set():
            return False
        self.done.clear()
        self._requested.set()
        return True

    def close(self) -> None:
        self._closing = True
        self._requested.set()

    def _run(self) -> None:
        """Compute the samples each time they are requested, until closed. An error is kept in ``error`` in their place."""
        while True:
            self._requested.wait()
            self._requested.clear()
            if self._closing:
                return
            began_s = time.thread_time()
            try:
                self.samples, self.error = list(self._collect()), ""
            except Exception as error:
                self.samples, self.error = [], f"{type(error).__name__}: {error}"
            self.cpu_s = time.thread_time() - began_s
            self.done.set()


class Exporter:
    """The text of some sources. Threads may share it."""

    def __init__(
        self,
        sources: Mapping[str, Collect],
        labels: Labels,
        log: Callable[[str], None] = lambda _line: None,
        *,
        patience_s: float = 2.0,
        share: float = 0.05,
    ) -> None:
        """Start a thread for each source.

        ``labels`` are those of the exporter's own metrics; ``log`` takes a line when a source begins to fail. A
        source has ``patience_s`` seconds; ``share`` is the fraction of one processor's time that all may use.
        """
        self._collectors = [_Collector(name, collect) for name, collect in sources.items()]
        self._labels, self._log, self._patience_s, self._share = labels, log, patience_s, share
        self._lock = threading.Lock()
        self._due_s = 0.0
        self._texts: dict[tuple[bool, bool], bytes] = {}
        self._samples: list[Sample] = []
        self._failures: Counter[str] = Counter(dict.fromkeys(sources, 0))
        self._complaints: dict[str, str] = {}

    def text(self, *, open_metrics: bool = False, zipped: bool = False) -> bytes:
        """Return the metrics as text, with the present time; compressed by gzip if ``zipped``.

        Samples and text are cached until computing them again stays below the exporter's share of processor time.
        """
        with self._lock:
            if time.monotonic() >= self._due_s:
                self._texts = {}
                self._samples = self._gathered()
            if (open_metrics, zipped) not in self._texts:
                began_s = time.thread_time()
                self._texts[open_metrics, zipped] = self._made(open_metrics, zipped)
                took_s = time.thread_time() - began_s
                self._due_s = max(self._due_s, time.monotonic()) + took_s / self._share
            body = self._texts[open_metrics, zipped]
        clock = render([Sample(CLOCK, self._labels, time.time())], open_metrics=open_metrics)
        return body + (
            gzip.compress(clock, compresslevel=1) if zipped else clock
        )  # gzip files may follow each other

    def _made(self, open_metrics: bool, zipped: bool) -> bytes:
        """The text but for the clock. Compressing is without the interpreter's lock, and still too dear for each scrape of a large fleet."""
        text = render(self._samples, open_metrics=open_metrics).removesuffix(b"# EOF\n")
        return gzip.compress(text, compresslevel=1) if zipped else text

    def close(self) -> None:
        """End the sources' threads, without waiting; one that hangs stays behind."""
        for collector in self._collectors:
            collector.close()

    def _gathered(self) -> list[Sample]:
        """Return the samples of all sources within the patience, and of this exporter itself; set when they are due
        again.

        Late or failing sources are left out, counted and logged.
        """
        began_s = time.monotonic()
        started = {collector.name: collector.ask() for collector in self._collectors}
        samples: list[Sample] = []
        for collector in self._collectors:
            left_s = began_s + self._patience_s - time.monotonic()
            if not started[collector.name]:
                self._failed(collector.name, "it has hung since the last scrape")
            elif not collector.done.wait(max(0.0, left_s)):
                self._failed(collector.name, f"it did not answer within {self._patience_s:g} s")
            elif collector.error:
                self._failed(collector.name, collector.error)
            else:
                self._complaints.pop(collector.name, None)
                samples += collector.samples
        self._due_s = time.monotonic() + sum(collector.cpu_s for collector in self._collectors) / self._share
        samples += [
            Sample(FAILURES, self._labels | {"source": name}, count) for name, count in self._failures.items()
        ]
        samples.append(Sample(RENDER, self._labels, time.monotonic() - began_s))
        samples.append(Sample(CPU, self._labels, time.process_time()))
        return samples

    def _failed(self, name: str, reason: str) -> None:
        """Count a source's failure, and log it if the reason is new."""
        self._failures[name] += 1
        if self._complaints.get(name) != reason:
            self._log(f"metrics of {name} are left out: {reason}")
        self._complaints[name] = reason


# Samples of a run directory, from its event stream, which is read from where the last call ended.
#
# A call reads the events appended since then, for a bounded time. So the first call on a run of months reports the state after
# the part that was read, and later calls catch up. Nothing is written. A line that is no event only increases the count of torn
# lines.


_BLOCK_BYTES = 1 << 16
_LONGEST_LINE = 1 << 22
_REST = 1.0
"""Between blocks the reader rests for so many times what a block took: other threads of its process have something to do."""


class RunSampler:
    """Follows one run. Not for several threads at once."""

    def __init__(self, directory: Path, run: str = "") -> None:
        """Set up the reader of a run's events; nothing is read yet. ``run`` is the label, by default the name of the run directory."""
        self._tail = FileTail(
            RunDirectory(directory).events,
            most_line_bytes=_LONGEST_LINE,
            block_bytes=_BLOCK_BYTES,
            instead_of_long=b"?",  # counted as torn
        )
        self._labels = Labels(run=run or directory.resolve().name)
        self.facts = RunFacts()
        self._over = False
        """The file was gone when it was last looked at: what it said last counts until another one says something."""

    def samples(self, patience_s: float = 1.0) -> list[Sample]:
        """Return the run's samples as of now, after reading new events for at most ``patience_s``; empty for a run
        without events.
        """
        self.catch_up(patience_s)
        if not self.facts.counts:
            return []
        return collect(RUN_METRICS, self.facts, self._labels)

    def catch_up(self, patience_s: float) -> bool:
        """Read the events that were appended since the last call, for at most ``patience_s`` seconds, with pauses.

        Return True if that was all of them, or the file is unreadable. A replaced file begins from nothing.
        """
        deadline_s = time.monotonic() + patience_s
        while True:
            began_s, before = time.thread_time(), self._tail.read_bytes
            try:
                batch = self._tail.next_batch()
            except OSError:
                return True
            self._over |= batch.restarted
            if self._over and self._tail.has_file:
                self.facts, self._over = RunFacts(), False
            for _, line in batch.lines:
                self.facts.take(line)
            if self._tail.read_bytes == before and not batch.restarted:
                return True
            if time.monotonic() >= deadline_s:
                return False
            if batch.more:
                time.sleep(_REST * (time.thread_time() - began_s))

"""Metrics of all runs below some folders, collected in rounds while they are scraped.

A run without a fleet, or one that was killed, has no process that serves metrics. So ``phalanx ui`` serves the
numbers of the event streams, the reasons of ``phalanx why`` for every run, and the state of the servers of its
weights.

One thread collects in rounds. Its pauses keep it at half a percent of a processor, but they are at most 15 s while it
needs less than a tenth. A scrape returns the result of the last round at once. Without scrapes there are no rounds.
If a run cannot be read, the others are not affected. Its last samples are repeated with their time, so that the alert
about a missing observer names it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from phalanx.observe.metrics.exporter import RunSampler
from phalanx.observe.metrics.samples import Labels, Metric, Sample
from phalanx.observe.record.notes import Serving, read_serving
from phalanx.run.directory.paths import RunDirectory
from phalanx_watch.runs.row import RunRow, read_labels
from phalanx_watch.why.observed import CODES, Reason
from phalanx_watch.why.reasons import reasons

# Metrics of the servers of a run's weights, from the notes that they write to the run directory.

_FROM = "serving/, by phalanx ui"
SERVERS = Metric(
    "phalanx_serving_servers",
    "gauge",
    "Servers of the run's weights by state; silent are those without a note for half a minute.",
    _FROM,
    ("state",),
)
TEXTS = Metric(
    "phalanx_serving_texts", "gauge", "Texts that these servers compute, and that wait.", _FROM, ("state",)
)
TOKENS = Metric(
    "phalanx_serving_tokens_total", "counter", "Tokens of prompts, and generated.", _FROM, ("kind",)
)
REFUSED = Metric(
    "phalanx_serving_requests_refused_total", "counter", "Requests answered with an error.", _FROM
)
SERVING_METRICS = (SERVERS, TEXTS, TOKENS, REFUSED)
_STATES = ("serving", "draining", "trouble", "silent")
_COUNTS = ("prompt_tokens", "generated_tokens", "refused")


class RunServers:
    """Servers of one run's weights, across rounds.

    A falling counter is treated as restarted, so its full value is added. A server's counts stay in the sums after it
    ends or goes silent. If it returns, only the increase is added.
    """

    def __init__(self) -> None:
        self._counted: dict[tuple[str, str, float], Counter[str]] = {}
        self._sums = Counter(dict.fromkeys(_COUNTS, 0))

    def samples(self, notes: Sequence[Serving], labels: Labels, now: float) -> list[Sample]:
        """Add the servers' ``notes`` to this run's counters, and return its samples; none without notes.

        Servers that are silent at ``now`` count by state, but not among running and waiting texts.
        """
        if not notes:
            return []
        states = Counter(state_of(note, now) for note in notes)
        live_notes = [note for note in notes if not note.silent(now)]
        self._count(notes, now)
        samples = [Sample(SERVERS, labels | {"state": state}, states[state]) for state in _STATES]
        for state in ("running", "waiting"):
            samples.append(
                Sample(TEXTS, labels | {"state": state}, sum(getattr(note, state) for note in live_notes))
            )
        for kind in ("prompt", "generated"):
            samples.append(Sample(TOKENS, labels | {"kind": kind}, self._sums[f"{kind}_tokens"]))
        return [*samples, Sample(REFUSED, labels, self._sums["refused"])]

    def _count(self, notes: Sequence[Serving], now: float) -> None:
        """Add what each server's counters have grown by since the last call. A server that is silent when first seen counts from
        its present numbers."""
        for note in notes:
            server = note.node, note.url, note.since_s
            counts = Counter({name: int(getattr(note, name)) for name in _COUNTS})
            # A server that was silent from the start adds nothing.
            before = self._counted.get(server, counts if note.silent(now) else Counter())
            self._sums += counts - before  # a difference of counters has no negative ones
            self._counted[server] = counts


def state_of(note: Serving, now: float) -> str:
    """Return the state of a server: one of four words. Its note has the details of any trouble."""
    if note.silent(now):
        return "silent"
    return note.state if note.state in _STATES else "trouble"


# Diagnosis as a metric: a series for each code of ``phalanx why``, so that each can be an alert.

REASON = Metric(
    "phalanx_reason",
    "gauge",
    "What phalanx why names: 0 nothing of the kind, 1 info, 2 warning, 3 critical.",
    "phalanx ui",
    ("code",),
)
LOOKED = Metric(
    "phalanx_reasons_timestamp_seconds",
    "gauge",
    "Unix time at which the run was last looked at from outside.",
    "phalanx ui",
)
WATCHED_METRICS = (REASON, LOOKED)
_WEIGHT = {"info": 1, "warning": 2, "critical": 3}


def reason_samples(reasons: Iterable[Reason], labels: Labels, looked_s: float) -> list[Sample]:
    """Return a sample for each code of a reason: the weight of its worst severity, 0 without such a reason; and the time of the look."""
    worst: dict[str, int] = dict.fromkeys(CODES, 0)
    for reason in reasons:
        worst[reason.code] = max(worst[reason.code], _WEIGHT[reason.severity])
    samples = [Sample(REASON, labels | {"code": code}, weight) for code, weight in worst.items()]
    return [*samples, Sample(LOOKED, labels, looked_s)]


_LOG = logging.getLogger(__name__)

MOST_RUNS = 64
"""Most runs, the newest first; each has about a hundred series."""
ACKNOWLEDGED = "acknowledged"
"""Tag of a run whose end is acknowledged, so that no alert fires for it (``phalanx runs tag``)."""
OVER_S, OLD_S = 600.0, 86_400.0
"""Seconds after which an ended run is dropped, and a run without a new event."""
_SHARE, _MOST_SHARE = 0.005, 0.1
_LEAST_REST_S, _LONG_REST_S = 1.0, 15.0
_READING_S = 0.5
"""Seconds per round and run; a long stream is read over several rounds, so that it delays no other run."""
_FIRST_S = 1.5
_IDLE_S = 300.0


class Lookout:
    """Collector of the samples of the runs that ``rows`` lists. Thread-safe."""

    def __init__(
        self,
        rows: Callable[[], Sequence[RunRow]],
        clock: Callable[[], float] = time.time,
        *,
        reading_budget_s: float = _READING_S,
    ) -> None:
        """Begin without a thread, which the first ``samples`` starts. ``rows`` returns the runs, ``clock`` Unix
        seconds.

        ``reading_budget_s`` is the time per round for reading one run's stream.
        """
        self._rows, self._clock, self._reading_budget_s = rows, clock, reading_budget_s
        self._samplers: dict[tuple[str, str], RunSampler] = {}
        self._labels: dict[str, str] = {}
        self._served: dict[str, RunServers] = {}
        self._last: dict[str, list[Sample]] = {}
        """Last samples of each run."""
        self._seen: list[Sample] = []
        self._trouble: Exception | None = None
        self._scraped_s = 0.0
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._first = threading.Event()

    def samples(self) -> list[Sample]:
        """Return the samples of the last round; start the thread that runs rounds if there is none.

        Waits up to ``_FIRST_S`` for the first round; empty until it is done. Raises the last round's error.
        """
        with self._lock:
            self._scraped_s = time.monotonic()
            if self._thread is None:
                self._first.clear()
                self._thread = threading.Thread(target=self._watch, name="metrics-lookout", daemon=True)
                self._thread.start()
        self._first.wait(_FIRST_S)
        if self._trouble is not None:
            raise self._trouble
        return self._seen

    def _watch(self) -> None:
        """Run rounds, with rests between them, until no samples were requested for ``_IDLE_S``; then drop all
        state and end.

        An error of a round is kept for ``samples``.
        """
        while True:
            began_s = time.thread_time()
            try:
                self._seen, self._trouble = self.look(), None
            except Exception as error:  # raised in the scrape; the next round may succeed
                self._seen, self._trouble = [], error
            self._first.set()
            time.sleep(rest_s(time.thread_time() - began_s))
            with self._lock:
                if time.monotonic() - self._scraped_s > _IDLE_S:
                    self._thread, self._seen, self._samplers, self._labels, self._last = None, [], {}, {}, {}
                    self._served = {}
                    return

    def look(self) -> list[Sample]:
        """Run one round over all watched runs and return their samples. A run that fails is logged, and keeps its last samples."""
        now = self._clock()
        samples: list[Sample] = []
        samplers: dict[tuple[str, str], RunSampler] = {}
        rows = self._rows()
        trained = watched(rows, now)
        served = served_now(rows, now)
        self._labels = _labelled([*trained, *(row for row in rows if row.path in served)], self._labels)
        self._served = {path: self._served.get(path) or RunServers() for path in served}
        for path, notes in served.items():
            samples += self._served[path].samples(notes, Labels(run=self._labels[path]), now)
        last: dict[str, list[Sample]] = {}
        for path, label in ((row.path, self._labels[row.path]) for row in trained):
            sampler = self._samplers.get((path, label)) or RunSampler(Path(path), label)
            samplers[path, label] = sampler
            try:
                last[path] = self._look_at(sampler, path, label, now)
            except Exception:  # a damaged directory must not affect the other runs
                _LOG.exception("the run in %s cannot be looked at", path)
                last[path] = [
                    sample for sample in self._last.get(path, []) if sample.labels.pairs["run"] == label
                ]
                del samplers[path, label]
            samples += last[path]
        self._samplers, self._last = samplers, last
        return samples

    def _look_at(self, sampler: RunSampler, path: str, label: str, now: float) -> list[Sample]:
        """Return the samples of one run: of its reasons, and of its events once they are read to the end."""
        # A partly read stream would make the newest step look days old: report a run only when it is read to the end.
        samples = sampler.samples(0.0) if sampler.catch_up(self._reading_budget_s) else []
        return [*samples, *reason_samples(reasons(RunDirectory(Path(path)), now), Labels(run=label), now)]


def rest_s(took_s: float) -> float:
    """Return the pause after a round that used ``took_s`` seconds of a processor."""
    wanted_s = max(_LEAST_REST_S, took_s * (1 / _SHARE - 1))
    return min(wanted_s, max(_LONG_REST_S, took_s * (1 / _MOST_SHARE - 1)))


def is_acknowledged(row: RunRow) -> bool:
    """Return True if the run got the tag ``ACKNOWLEDGED`` after its newest event. A run that continues is watched again."""
    if ACKNOWLEDGED not in row.tags:
        return False
    return read_labels(Path(row.path)).tagged_s.get(ACKNOWLEDGED, 0.0) >= (row.updated or 0.0)


def watched(rows: Iterable[RunRow], now: float) -> list[RunRow]:
    """Return the runs that an alert may concern, the newest first, at most ``MOST_RUNS``: not acknowledged, and with
    a recent event.

    Recent is within ``OVER_S`` for a run that finished or stopped, else within ``OLD_S``.
    """
    ages = [(row, now - row.updated) for row in rows if row.updated is not None and not is_acknowledged(row)]
    over = ("finished", "stopped")
    kept = [row for row, age_s in ages if age_s < (OVER_S if row.state in over else OLD_S)]
    return sorted(kept, key=lambda row: -(row.updated or 0.0))[:MOST_RUNS]


def served_now(rows: Iterable[RunRow], now: float) -> dict[str, list[Serving]]:
    """Return the servers' notes by run path, for each run with one seen within ``OVER_S``, however old its training."""
    notes_by_path = {
        row.path: [note for note in read_serving(RunDirectory(Path(row.path))) if now - note.seen_s < OVER_S]
        for row in rows
    }
    return {path: notes for path, notes in notes_by_path.items() if notes}


def _labelled(rows: Sequence[RunRow], before: Mapping[str, str]) -> dict[str, str]:
    """Return each run's label by path: its folder's name, as its own endpoint uses it.

    If several runs have the same name, the label stays with the run that had it ``before``, or goes to the first row;
    the others get their ids. The newest changes with each step of concurrent runs, and an alert must not move between
    runs.
    """
    names = {row.path: Path(row.path).resolve().name for row in rows}
    owners = {name: path for path, name in names.items() if before.get(path) == name}
    for path, name in names.items():
        owners.setdefault(name, path)
    return {row.path: names[row.path] if owners[names[row.path]] == row.path else row.id for row in rows}

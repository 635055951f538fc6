"""Metrics of all runs below some folders, collected in rounds as long as somebody scrapes.

A run without a fleet has no process that serves metrics, and of one that was killed none is left: so ``phalanx ui`` serves the numbers of the event streams, and
what ``phalanx why`` says, of every run that it shows, and what serves them. One thread looks, in rounds, and rests so
long that it takes half a percent of a processor, but no more than a quarter of a minute as long as it takes a tenth; a scrape takes what the last round has found and waits for nothing. Nobody who scrapes: no round. A run that cannot be looked at costs no other run: of it the last is told again, with the time
of that look, so that the alert about an observer that is gone names it.
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
from phalanx_watch.runs.row import RunRow
from phalanx_watch.why.observed import CODES, Reason
from phalanx_watch.why.reasons import reasons

# What serves a run's weights, as metrics: of all servers together, by the notes that they leave in the run directory.

_FROM = "serving/, by phalanx ui"
SERVERS = Metric(
    "phalanx_serving_servers",
    "gauge",
    "Servers of the run's weights by state; silent are those that have not been heard of for half a minute.",
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
    """The servers of one run, as they are looked at again and again.

    A counter that falls is taken for one that began anew, and all of it for new. So what a server has counted stays in the sums when it ends or is silent,
    and of one that is heard again only what is new is added.
    """

    def __init__(self) -> None:
        self._counted: dict[tuple[str, str, float], Counter[str]] = {}
        self._sums = Counter(dict.fromkeys(_COUNTS, 0))

    def samples(self, notes: Sequence[Serving], labels: Labels, now: float) -> list[Sample]:
        """The samples of the run, by what its servers say now; none if nobody serves it."""
        if not notes:
            return []
        states = Counter(state_of(note, now) for note in notes)
        heard = [note for note in notes if not note.silent(now)]
        self._count(notes, now)
        found = [Sample(SERVERS, labels | {"state": state}, states[state]) for state in _STATES]
        for state in ("running", "waiting"):
            found.append(Sample(TEXTS, labels | {"state": state}, sum(getattr(one, state) for one in heard)))
        for kind in ("prompt", "generated"):
            found.append(Sample(TOKENS, labels | {"kind": kind}, self._sums[f"{kind}_tokens"]))
        return [*found, Sample(REFUSED, labels, self._sums["refused"])]

    def _count(self, notes: Sequence[Serving], now: float) -> None:
        for note in notes:
            server = note.node, note.url, note.since_s
            counts = Counter({name: int(getattr(note, name)) for name in _COUNTS})
            # What was silent when it was first seen tells nothing new.
            before = self._counted.get(server, counts if note.silent(now) else Counter())
            self._sums += counts - before  # a difference of counters has no negative ones
            self._counted[server] = counts


def state_of(note: Serving, now: float) -> str:
    """One of four words for what a server does; what its trouble is, the note says."""
    if note.silent(now):
        return "silent"
    return note.state if note.state in _STATES else "trouble"


# What is wrong with a run, as a metric: a series for each reason that ``phalanx why`` knows, so that every one of them can be an alert.

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
    """The samples of one run: of several reasons of a kind the worst counts."""
    worst: dict[str, int] = dict.fromkeys(CODES, 0)
    for reason in reasons:
        worst[reason.code] = max(worst[reason.code], _WEIGHT[reason.severity])
    found = [Sample(REASON, labels | {"code": code}, weight) for code, weight in worst.items()]
    return [*found, Sample(LOOKED, labels, looked_s)]


_LOG = logging.getLogger(__name__)

MOST_RUNS = 64
"""The newest; each has some hundred series."""
ACKNOWLEDGED = "acknowledged"
"""Tag of a run whose end somebody knows, so that no alert is about it any more (``phalanx runs tag``)."""
OVER_S, OLD_S = 600.0, 86_400.0
"""A run that has ended is left out after ten minutes, and one of which nothing was heard for a day."""
_SHARE, _MOST_SHARE = 0.005, 0.1
_LEAST_REST_S, _LONG_REST_S = 1.0, 15.0
_READING_S = 0.5
"""A long stream is read over several rounds, so that it holds up no other run."""
_FIRST_S = 1.5
_UNASKED_S = 300.0


class Lookout:
    """The samples of the runs that ``rows`` lists. Threads may share it."""

    def __init__(
        self,
        rows: Callable[[], Sequence[RunRow]],
        clock: Callable[[], float] = time.time,
        *,
        reading_budget_s: float = _READING_S,
    ) -> None:
        """``reading_budget_s``: Time in which a round reads on in the stream of one run."""
        self._rows, self._clock, self._reading_budget_s = rows, clock, reading_budget_s
        self._samplers: dict[tuple[str, str], RunSampler] = {}
        self._labels: dict[str, str] = {}
        self._served: dict[str, RunServers] = {}
        self._last: dict[str, list[Sample]] = {}
        """What each run said when it could be looked at last."""
        self._seen: list[Sample] = []
        self._trouble: Exception | None = None
        self._asked_s = 0.0
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._first = threading.Event()

    def samples(self) -> list[Sample]:
        """What the last round has found; nothing while the first one takes longer than a moment. Raises what the round did."""
        with self._lock:
            self._asked_s = time.monotonic()
            if self._thread is None:
                self._first.clear()
                self._thread = threading.Thread(target=self._watch, name="metrics-lookout", daemon=True)
                self._thread.start()
        self._first.wait(_FIRST_S)
        if self._trouble is not None:
            raise self._trouble
        return self._seen

    def _watch(self) -> None:
        while True:
            began_s = time.thread_time()
            try:
                self._seen, self._trouble = self.look(), None
            except Exception as error:  # told to who scrapes, and the next round may do
                self._seen, self._trouble = [], error
            self._first.set()
            time.sleep(rest_s(time.thread_time() - began_s))
            with self._lock:
                if time.monotonic() - self._asked_s > _UNASKED_S:
                    self._thread, self._seen, self._samplers, self._labels, self._last = None, [], {}, {}, {}
                    self._served = {}
                    return

    def look(self) -> list[Sample]:
        """One round over all runs that count."""
        now = self._clock()
        found: list[Sample] = []
        samplers: dict[tuple[str, str], RunSampler] = {}
        rows = self._rows()
        trained = watched(rows, now)
        served = served_now(rows, now)
        self._labels = _labelled([*trained, *(row for row in rows if row.path in served)], self._labels)
        self._served = {path: self._served.get(path) or RunServers() for path in served}
        for path, notes in served.items():
            found += self._served[path].samples(notes, Labels(run=self._labels[path]), now)
        last: dict[str, list[Sample]] = {}
        for path, label in ((row.path, self._labels[row.path]) for row in trained):
            sampler = self._samplers.get((path, label)) or RunSampler(Path(path), label)
            samplers[path, label] = sampler
            try:
                last[path] = self._look_at(sampler, path, label, now)
            except Exception:  # whatever lies in its directory, the other runs are looked at
                _LOG.exception("the run in %s cannot be looked at", path)
                last[path] = [one for one in self._last.get(path, []) if one.labels.pairs["run"] == label]
                del samplers[path, label]
            found += last[path]
        self._samplers, self._last = samplers, last
        return found

    def _look_at(self, sampler: RunSampler, path: str, label: str, now: float) -> list[Sample]:
        """The samples of one run."""
        # Half a stream says that the newest step is days old: a run is told of when all of it was read.
        found = sampler.samples(0.0) if sampler.catch_up(self._reading_budget_s) else []
        return [*found, *reason_samples(reasons(RunDirectory(Path(path)), now), Labels(run=label), now)]


def rest_s(took_s: float) -> float:
    """The rest after a round that took so long of a processor."""
    wanted_s = max(_LEAST_REST_S, took_s * (1 / _SHARE - 1))
    return min(wanted_s, max(_LONG_REST_S, took_s * (1 / _MOST_SHARE - 1)))


def is_acknowledged(row: RunRow) -> bool:
    """True if the run got the tag ``ACKNOWLEDGED`` after its newest event: somebody knows how it ended. A run that goes on is watched again."""
    if ACKNOWLEDGED not in row.tags:
        return False
    try:
        return RunDirectory(Path(row.path)).labels.stat().st_mtime >= (row.updated or 0.0)
    except OSError:
        return False


def watched(rows: Iterable[RunRow], now: float) -> list[RunRow]:
    """The runs that an alert may be about, the newest first."""
    heard = [(row, now - row.updated) for row in rows if row.updated is not None and not is_acknowledged(row)]
    over = ("finished", "stopped")
    kept = [row for row, age_s in heard if age_s < (OVER_S if row.state in over else OLD_S)]
    return sorted(kept, key=lambda row: -(row.updated or 0.0))[:MOST_RUNS]


def served_now(rows: Iterable[RunRow], now: float) -> dict[str, list[Serving]]:
    """Path -> what its servers say, of each run that is served, however long ago it was trained."""
    found = {
        row.path: [one for one in read_serving(RunDirectory(Path(row.path))) if now - one.seen_s < OVER_S]
        for row in rows
    }
    return {path: notes for path, notes in found.items() if notes}


def _labelled(rows: Sequence[RunRow], before: Mapping[str, str]) -> dict[str, str]:
    """Path -> label of each run: its folder's name, as its own endpoint says it; of several of one name, who had it ``before``, or the newest.

    Who is the newest changes with each step of runs that train at once, and an alert must not go from one to the other.
    """
    names = {row.path: Path(row.path).resolve().name for row in rows}
    owners = {name: path for path, name in names.items() if before.get(path) == name}
    for path, name in names.items():
        owners.setdefault(name, path)
    return {row.path: names[row.path] if owners[names[row.path]] == row.path else row.id for row in rows}

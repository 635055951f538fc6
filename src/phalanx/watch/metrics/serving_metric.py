"""What serves a run's weights, as metrics: of all servers together, by the notes that they leave in the run directory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from phalanx.observe.metrics.samples import Labels, Metric, Sample
from phalanx.observe.serving import Serving

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

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


def serving_samples(notes: Sequence[Serving], labels: Labels, now: float) -> list[Sample]:
    """The samples of one run; none of a run that nobody serves."""
    if not notes:
        return []
    states = Counter(state_of(note, now) for note in notes)
    heard = [note for note in notes if not note.silent(now)]
    found = [Sample(SERVERS, labels | {"state": state}, states[state]) for state in _STATES]
    for metric, label, values in (
        (TEXTS, "state", {"running": "running", "waiting": "waiting"}),
        (TOKENS, "kind", {"prompt": "prompt_tokens", "generated": "generated_tokens"}),
    ):
        for value, name in values.items():
            found.append(Sample(metric, labels | {label: value}, sum(getattr(one, name) for one in heard)))
    return [*found, Sample(REFUSED, labels, sum(note.refused for note in heard))]


def state_of(note: Serving, now: float) -> str:
    """One of four words for what a server does; what its trouble is, the note says."""
    if note.silent(now):
        return "silent"
    return note.state if note.state in _STATES else "trouble"

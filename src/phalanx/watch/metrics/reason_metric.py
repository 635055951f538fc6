"""What is wrong with a run, as a metric: a series for each reason that ``phalanx why`` knows, so that every one of them can be an alert."""

from __future__ import annotations

from collections.abc import Iterable

from phalanx.observe.metrics.samples import Labels, Metric, Sample
from phalanx.watch.why.reason import CODES, Reason

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

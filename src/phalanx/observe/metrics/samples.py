"""Metrics and samples: the values that sources give, and their text for Prometheus (0.0.4) and OpenMetrics (1.0.0)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, NamedTuple, TypeVar

Kind = Literal["gauge", "counter", "info"]


@dataclass(frozen=True)
class Metric:
    """One metric: what its series are called and mean."""

    name: str
    kind: Kind
    """``info`` is a gauge that is always 1, and whose labels are the fact."""
    help: str
    """One sentence."""
    source: str
    """Where its numbers come from, in the words of the documentation."""
    labels: tuple[str, ...] = ()
    """The labels beside ``run`` and ``node``, each of a short list of values."""


class Labels:
    """The labels of a series, written once: many series have the same."""

    __slots__ = ("pairs", "text")

    def __init__(self, **pairs: str) -> None:
        """Drop labels with an empty value, as Prometheus itself would do."""
        self.pairs: Mapping[str, str] = {name: value for name, value in pairs.items() if value}
        self.text = _written(self.pairs)

    def __or__(self, more: Mapping[str, str]) -> Labels:
        return Labels(**{**self.pairs, **more})


def _written(pairs: Mapping[str, str]) -> str:
    if not pairs:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in pairs.items()) + "}"


def _escaped(value: str) -> str:
    """A label's value in double quotes; what is no text in UTF-8 (a lone surrogate, of a file's name) becomes ``?``."""
    plain = value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
    return plain.encode(errors="replace").decode()


class Sample(NamedTuple):
    """One number of one series."""

    metric: Metric
    labels: Labels
    value: float


Facts = TypeVar("Facts")
MetricValues = float | None | Iterable[tuple[Mapping[str, str], float]]
"""The values of a metric: one number, or none, or numbers with labels that distinguish them."""


@dataclass(frozen=True)
class Derived(Generic[Facts]):
    """A metric and how its numbers follow from the facts of its source."""

    metric: Metric
    compute: Callable[[Facts], MetricValues]


def collect(
    derived: Sequence[Derived[Facts]],
    facts: Facts,
    labels: Labels,
    failed: Callable[[Metric, Exception], None] = lambda _metric, _error: None,
) -> list[Sample]:
    """Return all samples of ``derived``; a metric that cannot be computed is left out and passed to ``failed``, and costs only itself."""
    samples: list[Sample] = []
    for metric in derived:
        try:
            samples += _samples(metric, facts, labels)
        except Exception as error:
            failed(metric.metric, error)
    return samples


def _samples(derived: Derived[Facts], facts: Facts, labels: Labels) -> list[Sample]:
    """Return one sample, several with further labels, or none if the metric has no value now."""
    computed = derived.compute(facts)
    if computed is None:
        return []
    if isinstance(computed, (int, float)):
        return [Sample(derived.metric, labels, computed)]
    return [Sample(derived.metric, labels | more, value) for more, value in computed]


# Samples in Prometheus' text format 0.0.4, or in OpenMetrics 1.0.0 for clients that accept it.
#
# Written by hand because it is hot: a coordinator of 12,500 nodes has 100,000 series. A series costs one dictionary entry and
# one line here. ``prometheus_client`` builds a family, a sample object and an escaped line for each, which takes about seven
# times as long. Its parsers are the reference in the tests.
#
# Formats: prometheus.io/docs/instrumenting/exposition_formats; the OpenMetrics specification of 2020.


TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPEN_METRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
_SPELLED = {"nan": "NaN", "inf": "+Inf", "-inf": "-Inf"}
_UNITS = ("seconds", "bytes", "ratio")


def render(samples: Iterable[Sample], *, open_metrics: bool = False) -> bytes:
    """Return the samples as UTF-8 text, those of one metric together, in the order in which the metrics first came.

    Of several samples of one series the last one counts, since a scraper refuses duplicates. OpenMetrics ends with
    "# EOF".
    """
    families: dict[str, tuple[Metric, dict[str, str]]] = {}
    last, series = "", dict[str, str]()
    for metric, labels, value in samples:
        if metric.name != last:
            last = metric.name
            series = families.setdefault(last, (metric, {}))[1]
        text = repr(value)
        series[labels.text] = _SPELLED.get(text, text)
    head = _open_metrics_head if open_metrics else _head
    parts = [head(metric) + _lines(metric.name, series) for metric, series in families.values()]
    return "".join([*parts, "# EOF\n"] if open_metrics else parts).encode()


def _lines(name: str, series: dict[str, str]) -> str:
    return "".join([f"{name}{labels} {value}\n" for labels, value in series.items()])


def _head(metric: Metric) -> str:
    kind = "gauge" if metric.kind == "info" else metric.kind
    return f"# HELP {metric.name} {_help(metric)}\n# TYPE {metric.name} {kind}\n"


def _open_metrics_head(metric: Metric) -> str:
    """Return the head of a metric in OpenMetrics: a counter or info has its family's name without suffix, and a unit is the name's
    last word."""
    family = metric.name.removesuffix(
        "_total" if metric.kind == "counter" else "_info" * (metric.kind == "info")
    )
    unit = next((unit for unit in _UNITS if family.endswith(f"_{unit}")), "")
    head = f"# TYPE {family} {metric.kind}\n"
    if unit and metric.kind != "info":
        head += f"# UNIT {family} {unit}\n"
    return f"{head}# HELP {family} {_help(metric).replace(chr(34), chr(92) + chr(34))}\n"


def _help(metric: Metric) -> str:
    return metric.help.replace("\\", "\\\\").replace("\n", "\\n")

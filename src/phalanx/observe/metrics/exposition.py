"""Samples as Prometheus' text format 0.0.4, and as OpenMetrics 1.0.0 for those who ask for it.

Written by hand because it is hot: a coordinator of 12,500 nodes has 100,000 series, and its processor has better things to do. A series costs one
entry of a dictionary and one line; ``prometheus_client`` builds a family, a sample object and an escaped line of each, and takes about seven times as
long. Its parsers are the reference in the tests.

Formats: prometheus.io/docs/instrumenting/exposition_formats; the OpenMetrics specification of 2020.
"""

from __future__ import annotations

from collections.abc import Iterable

from phalanx.observe.metrics.samples import Metric, Sample

TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPEN_METRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
_SPELLED = {"nan": "NaN", "inf": "+Inf", "-inf": "-Inf"}
_UNITS = ("seconds", "bytes", "ratio")


def render(samples: Iterable[Sample], *, open_metrics: bool = False) -> bytes:
    """The samples as text, those of one metric together, in the order in which the metrics first came.

    Of several samples of one series the last one counts: a scraper would refuse all the rest for a series that comes twice.
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
    """There the family of a counter or an info is called without its suffix, and a unit must be the name's last word."""
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

"""``docs/reference/metrics.md``: every Prometheus series of runs, fleets, nodes and servers, from the code that exports them."""

from __future__ import annotations

import re
from collections.abc import Iterator

from phalanx.fleet.control import publisher
from phalanx.fleet.node import node_metrics
from phalanx.observe.metrics.exporter import EXPORTER_METRICS
from phalanx.observe.metrics.run_metrics import RUN_METRICS
from phalanx.observe.metrics.samples import Metric
from phalanx_serve.http.admission import Key, KeyUse
from phalanx_serve.http.counts import Counts
from phalanx_serve.http.worker import Streaming, WorkerFacts, WorkerLoad
from phalanx_watch.lookout import SERVING_METRICS, WATCHED_METRICS
from tools.reference.markdown import table

_INTRODUCTION = """\
# Metrics

Every Prometheus series, from the code that exports it. [../watch/metrics.md](../watch/metrics.md) shows how to scrape them, and has
rules and alerts. An `info` is a gauge that is always 1; its labels are the fact. A counter without a unit is a number of what its name says.

"""
_SERVERS = """
## Servers of models

`phalanx serve` exports these, with vLLM's names where it has them. Series of workers, keys, streamed weights and newer checkpoints are
there if the server has them.

"""
_UNITS = {
    "timestamp_seconds": "Unix time, s",
    "seconds": "s",
    "bytes": "bytes",
    "ratio": "0 to 1",
    "perc": "0 to 1",
    "bits_per_byte": "bits per byte",
    "tokens_per_second": "tokens/s",
    "loss": "nats per token",
    "GPU_TEMP": "°C",
    "SM_CLOCK": "MHz",
}
"""Ends of names -> units; the first that fits."""


def metrics() -> list[tuple[str, Metric]]:
    """Return all series of runs and fleets, with the labels that name their place."""
    run = [derived.metric for derived in RUN_METRICS]
    fleet = [derived.metric for derived in publisher.FLEET_METRICS]
    node = [derived.metric for derived in node_metrics.AGENT_METRICS]
    node += [derived.metric for derived in node_metrics.MACHINE_METRICS]
    gpu = [derived.metric for derived in node_metrics.GPU_METRICS]
    of_nodes = (
        *publisher.NODE_METRICS,
        *node,
        node_metrics.SOFTWARE,
        *gpu,
        node_metrics.XID,
        *EXPORTER_METRICS,
    )
    return [
        *(("run", metric) for metric in (*run, *fleet)),
        *(("run, node", metric) for metric in of_nodes),
        *(("run", metric) for metric in (*WATCHED_METRICS, *SERVING_METRICS)),
    ]


def page() -> str:
    """Return the page."""
    rows = [
        (
            f"`{metric.name}`",
            metric.kind,
            ", ".join([place, *metric.labels]),
            unit(metric.name),
            metric.help,
            metric.source,
        )
        for place, metric in metrics()
    ]
    head = ("name", "type", "labels", "unit", "meaning")
    return (
        _INTRODUCTION
        + "## Runs, fleets and nodes\n\n"
        + table((*head, "source"), rows)
        + _SERVERS
        + table(head, _of_servers())
    )


def unit(name: str) -> str:
    """Return the unit of a series, by the end of its name; empty for a plain number."""
    base = name.removesuffix("_total")
    return next((unit for end, unit in _UNITS.items() if re.search(rf"(^|_){end}$", base)), "")


def _of_servers() -> Iterator[tuple[str, str, str, str, str]]:
    """Yield the series of a server that has everything."""
    counts = Counts("model")
    counts.ended("stop", 1.0)
    counts.refused(429)
    counts.keys["key"] = KeyUse.of(Key("key", "", ""), 0.0)
    counts.keys["key"].refused["requests"] = 1
    workers = (WorkerFacts(0, "both", "ready"),)
    counts.render(WorkerLoad(workers=workers, weights_step=1, streaming=Streaming(0, 0.0, 0, 0)))
    for family in counts.collect():
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = [label for label in family.samples[0].labels if label != "le"]
        yield f"`{name}`", family.type, ", ".join(labels), unit(name), family.documentation

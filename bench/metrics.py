"""What watching a run costs: the text of 100,000 series, the first look at a long run, and a step's time while somebody scrapes.

    python bench/metrics.py [--series 100000] [--steps 100000] [--rounds 6]

Ratios, as always: to Prometheus' own client library, and of a step of a small model with and without a scraper that asks five times a second, in pairs of
short stretches of one process.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from phalanx.observe.events import Event, RunStarted, Step, encode
from phalanx.observe.metrics.exporter import Exporter
from phalanx.observe.metrics.exposition import render
from phalanx.observe.metrics.run_samples import RunSampler
from phalanx.observe.metrics.samples import Labels, Metric, Sample
from phalanx.observe.metrics.server import MetricsServer, metrics_page


def cpu_s(work: Callable[[], object], times: int = 5) -> float:
    """The least processor time of some tries: the machine is shared."""
    found = []
    for _ in range(times):
        began_s = time.process_time()
        work()
        found.append(time.process_time() - began_s)
    return min(found)


def fleet_samples(series: int) -> list[Sample]:
    """Eight metrics of each of many nodes."""
    metrics = [Metric(f"phalanx_measured_{n}_seconds", "gauge", "Measured.", "bench") for n in range(8)]
    labels = [Labels(run="big-1f3a9c04", node=f"node-{n:05d}") for n in range(series // 8)]
    return [Sample(m, own, (7919 * i % 104729) / 97) for m in metrics for i, own in enumerate(labels)]


class _Client(Collector):
    def __init__(self, samples: list[Sample]) -> None:
        self._samples = samples

    def collect(self) -> Iterator[GaugeMetricFamily]:
        families: dict[str, GaugeMetricFamily] = {}
        for metric, labels, value in self._samples:
            if metric.name not in families:
                families[metric.name] = GaugeMetricFamily(metric.name, metric.help, labels=("run", "node"))
            families[metric.name].add_metric(tuple(labels.pairs.values()), value)
        yield from families.values()


def rendering(series: int) -> dict[str, float]:
    """Seconds and bytes of a text, by hand and by the client library."""
    samples = fleet_samples(series)
    registry = CollectorRegistry()
    registry.register(_Client(samples))
    text = render(samples)
    ours, theirs = cpu_s(lambda: render(samples)), cpu_s(lambda: generate_latest(registry), 3)
    zipped = gzip.compress(text, compresslevel=1)
    return {"series": len(samples), "by_hand_s": ours, "client_s": theirs, "ratio": ours / theirs, "bytes": len(text), "zipped_bytes": len(zipped)}  # fmt: skip


def first_look(steps: int) -> dict[str, float]:
    """Seconds for the first scrape of a long run, and for the next."""
    ledger = {"step.compute": 1.0, "step.optimizer": 0.1, "step.comm_exposed.dp": 0.2, "step.data_wait": 0.01}
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "events.jsonl").open("wb") as log:
        log.write(encode(Event(0.0, 0, RunStarted("long", steps))))
        for n in range(1, steps + 1):
            body = Step(
                n, steps, 2.0, 0.5, 1e-3, 64 * n, 64.0, 1.0, ledger={k: n * v for k, v in ledger.items()}
            )
            log.write(encode(Event(float(n), 0, body)))
        log.flush()
        size = log.tell()
        sampler = RunSampler(Path(folder))
        first = cpu_s(lambda: sampler.samples(600.0), 1)
        return {
            "steps": steps,
            "bytes": size,
            "first_s": first,
            "next_s": cpu_s(lambda: sampler.samples(1.0)),
        }


def work() -> float:
    """A stretch of Python and of numpy, such as the event loop of a coordinator or the host side of a step; its seconds."""
    import numpy as np

    began_s, matrix = time.perf_counter(), np.ones((192, 192), np.float32)
    for _ in range(20):
        matrix = matrix @ matrix * np.float32(1e-3)
        sum(range(8000))
    return time.perf_counter() - began_s


def scraped(rounds: int, series: int) -> dict[str, float]:
    """The time of the same work in a process that is scraped five times a second, over that of one that is not, in pairs."""
    samples = fleet_samples(series)
    exporter = Exporter({"fleet": lambda: samples}, Labels(run="big"))
    ratios, lasted, clients_s, served_s = list[float](), list[float](), [0.0], 0.0
    with (
        closing(exporter),
        closing(MetricsServer({"/metrics": metrics_page(exporter)}, "127.0.0.1", 0)) as server,
    ):
        wanted, over = threading.Event(), threading.Event()

        def scrape() -> None:
            while not over.is_set():
                wanted.wait()
                began_s, own_s = time.perf_counter(), time.thread_time()
                request = urllib.request.Request(f"http://127.0.0.1:{server.port}/metrics", headers={"Accept-Encoding": "gzip"})  # fmt: skip
                urllib.request.urlopen(request).read()
                lasted.append(time.perf_counter() - began_s)
                clients_s[0] += time.thread_time() - own_s
                time.sleep(0.2)

        threading.Thread(target=scrape, daemon=True).start()
        for _ in range(rounds):
            alone = statistics.median(work() for _ in range(20))
            wanted.set()
            began_s = time.process_time() - time.thread_time()
            watched = statistics.median(work() for _ in range(20))
            wanted.clear()
            served_s += time.process_time() - time.thread_time() - began_s
            ratios.append(watched / alone)
        over.set()
        wanted.set()
    return {"series": len(samples), "ratio": statistics.median(ratios), "least": min(ratios), "most": max(ratios), "scrape_s": statistics.median(lasted), "cpu_s": (served_s - clients_s[0]) / len(lasted)}  # fmt: skip


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--series", type=int, default=100_000)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=6)
    given = parser.parse_args()
    print("rendering", json.dumps(rendering(given.series)), flush=True)
    print("first look", json.dumps(first_look(given.steps)), flush=True)
    for series in (1000, given.series):
        print("process that is scraped", json.dumps(scraped(given.rounds, series)), flush=True)


if __name__ == "__main__":
    main()

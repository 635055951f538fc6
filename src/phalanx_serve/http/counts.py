"""The gateway's numbers for Prometheus, under vLLM's names where it has them, so that dashboards made for it work.

Counting happens for every token, so it is plain arithmetic; ``prometheus_client``, whose own counters take several microseconds each, only
writes what was counted (its custom collectors: prometheus.github.io/client_python/collector/custom).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4 as CONTENT_TYPE

from phalanx_serve.http.admission import KeyUse
from phalanx_serve.http.worker import WorkerLoad

__all__ = ["CONTENT_TYPE", "Counts"]

_FIRST = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
)
_NEXT = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_DURATION = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)

_AMONG_WORKERS = (
    ("moved", "requests_moved", "Texts that went on at another worker."),
    ("pulled", "pages_pulled", "Pages that came from another worker."),
    ("shared", "pages_shared", "Of these, pages that were read in its memory, not from a socket."),
    ("over_nixl", "pages_over_nixl", "Of these, pages that were read over NIXL, not from a socket."),
    ("not_pulled", "pages_recomputed", "Pages that were to come from another worker and were computed."),
    ("audits", "audits", "Texts that another worker scored again."),
    ("audits_skipped", "audits_skipped", "Texts that no other worker could score again."),
    ("differences", "audit_differences", "Audits that found other bits."),
    ("quarantined", "workers_quarantined", "Workers set aside for computing other bits."),
)
"""Counts of the router: the name there, the name here, and the help text."""


class Histogram:
    """Values counted in buckets."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds, self._counts, self._sum = bounds, [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    @property
    def mean(self) -> float | None:
        """Mean of all values; None without any."""
        count = sum(self._counts)
        return self._sum / count if count else None

    def family(self, name: str, about: str, model: str) -> HistogramMetricFamily:
        """Return the cumulative buckets and the sum as a Prometheus metric labeled with the model's name."""
        bounds = [*map(str, map(float, self._bounds)), "+Inf"]
        buckets = list(zip(bounds, accumulate(self._counts), strict=True))
        family = HistogramMetricFamily(name, about, labels=["model_name"])
        family.add_metric([model], buckets, self._sum)
        return family


class Counts:
    """Counters and histograms of a gateway since its start."""

    def __init__(self, model: str) -> None:
        """Begin all counts at 0, and register them with a registry of their own."""
        self._model = model
        self.first_token, self.next_token, self._duration = (
            Histogram(_FIRST),
            Histogram(_NEXT),
            Histogram(_DURATION),
        )
        self.prompt_tokens = self.generated_tokens = self.queried_tokens = self.cached_tokens = 0
        self.cancelled = 0
        self._refused: Counter[str] = Counter()
        self._finished: Counter[str] = Counter()
        self._load = WorkerLoad()
        self.keys: dict[str, KeyUse] = {}
        """Uses by clients with a key, by the key's name."""
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def ended(self, finish: str, seconds: float) -> None:
        """Count a text that ended after ``seconds``."""
        self._finished[finish] += 1
        self._duration.observe(seconds)

    @property
    def finished(self) -> int:
        """Texts that have ended, for any reason."""
        return sum(self._finished.values())

    @property
    def refusals(self) -> int:
        """Requests that were answered with an error."""
        return sum(self._refused.values())

    def refused(self, status: int) -> None:
        """Count a request that was answered with an error."""
        self._refused[str(status)] += 1

    def render(self, load: WorkerLoad) -> bytes:
        """Return all metrics in Prometheus' text format, with the worker's current load."""
        self._load = load
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics, for the Prometheus registry."""
        load = self._load
        used = load.pages_used / load.pages if load.pages else 0.0
        for name, about, value in (
            ("vllm:num_requests_running", "Texts that are computed.", load.running),
            ("vllm:num_requests_waiting", "Texts that wait.", load.waiting),
            ("vllm:kv_cache_usage_perc", "Pages in use; 1 is all of them.", used),
        ):
            gauge = GaugeMetricFamily(name, about, labels=["model_name"])
            gauge.add_metric([self._model], value)
            yield gauge
        for name, about, count in (
            ("vllm:prompt_tokens", "Tokens of prompts.", self.prompt_tokens),
            ("vllm:generation_tokens", "Tokens generated.", self.generated_tokens),
            ("vllm:prefix_cache_queries", "Prompt tokens looked up in the cache.", self.queried_tokens),
            ("vllm:prefix_cache_hits", "Prompt tokens that were in the cache.", self.cached_tokens),
            ("vllm:spec_decode_num_draft_tokens", "Tokens drafted and computed.", load.drafted),
            ("vllm:spec_decode_num_accepted_tokens", "Drafted tokens that were drawn.", load.accepted),
            ("phalanx_requests_cancelled", "Texts left by clients.", self.cancelled),
        ):
            yield self._counter(name, about, {"": count}, "")
        if load.weights_step is not None:
            step = GaugeMetricFamily(
                "phalanx_weights_step", "Step whose weights compute.", labels=["model_name"]
            )
            step.add_metric([self._model], load.weights_step)
            yield step
            yield self._counter(
                "phalanx_weights_swaps", "Steps that took over while serving.", {"": load.swaps}, ""
            )
        yield from self._of_workers(load)
        yield from self._of_streaming(load)
        yield self._counter(
            "vllm:request_success", "Texts that ended, by reason.", self._finished, "finished_reason"
        )
        yield self._counter(
            "phalanx_requests_refused", "Requests refused, by status.", self._refused, "status"
        )
        for name, about, histogram in (
            ("vllm:time_to_first_token_seconds", "From a request to its first token.", self.first_token),
            ("vllm:inter_token_latency_seconds", "Between two tokens of a text.", self.next_token),
            ("vllm:e2e_request_latency_seconds", "From a request to its end.", self._duration),
        ):
            yield histogram.family(name, about, self._model)
        if self.keys:
            yield from self._of_keys()

    def _of_keys(self) -> Iterator[Metric]:
        """Yield the metrics of each client's key: running and admitted requests, tokens of ended ones, and refusals by limit."""
        running = GaugeMetricFamily("phalanx_key_running", "Requests under way.", labels=["key"])
        requests = CounterMetricFamily("phalanx_key_requests", "Requests admitted.", labels=["key"])
        tokens = CounterMetricFamily(
            "phalanx_key_tokens", "Tokens of ended requests.", labels=["key", "kind"]
        )
        limited = CounterMetricFamily(
            "phalanx_key_limited", "Requests beyond a limit of their key.", labels=["key", "limit"]
        )
        for name, use in self.keys.items():
            running.add_metric([name], use.running)
            requests.add_metric([name], use.admitted)
            tokens.add_metric([name, "prompt"], use.prompt_tokens)
            tokens.add_metric([name, "generated"], use.generated_tokens)
            for limit, count in use.refused.items():
                limited.add_metric([name, limit], count)
        yield from (running, requests, tokens, limited)

    def _of_workers(self, load: WorkerLoad) -> Iterator[Metric]:
        """Yield the number of workers by role and state, and counts of what happens among them; nothing for an engine in this process."""
        if not load.workers:
            return
        states = GaugeMetricFamily(
            "phalanx_workers", "Workers by role and state.", labels=["model_name", "role", "state"]
        )
        for (role, state), count in Counter((w.role, w.state) for w in load.workers).items():
            states.add_metric([self._model, role, state], count)
        yield states
        for name, about, count in (
            ("phalanx_worker_ends", "Ends of worker processes.", sum(w.ended for w in load.workers)),
            *((f"phalanx_{name}", about, load.counts.get(key, 0)) for key, name, about in _AMONG_WORKERS),
        ):
            yield self._counter(name, about, {"": count}, "")

    def _of_streaming(self, load: WorkerLoad) -> Iterator[Metric]:
        """Yield the bytes, waits and experts of streamed weights; nothing for resident ones."""
        if (streaming := load.streaming) is None:
            return
        for name, about, value in (
            ("phalanx_weights_read_bytes", "Bytes of weights that were read.", streaming.bytes_read),
            (
                "phalanx_weights_wait_seconds",
                "Seconds that passes stood still for weights.",
                streaming.wait_s,
            ),
            ("phalanx_experts_needed", "Experts that routers chose, once a pass.", streaming.experts_needed),
            ("phalanx_experts_held", "Of those, in memory already or on their way.", streaming.experts_held),
        ):
            yield self._counter(name, about, {"": value}, "")

    def _counter(self, name: str, about: str, counts: Mapping[str, float], label: str) -> CounterMetricFamily:
        """Return a counter with a sample for each entry of ``counts``, whose keys are values of ``label``, if that is not empty."""
        family = CounterMetricFamily(name, about, labels=["model_name", label] if label else ["model_name"])
        for value, count in counts.items():
            family.add_metric([self._model, value] if label else [self._model], count)
        return family

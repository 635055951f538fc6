"""OpenTelemetry sink, by OTLP over HTTP: metrics under their Prometheus names, and epochs, recoveries, checkpoints
and evaluations as spans.

The destination is OpenTelemetry's own configuration (OTEL_EXPORTER_OTLP_ENDPOINT and others), by default a collector
on this machine.

Metrics are observed when the SDK's reader collects them (OTEL_METRIC_EXPORT_INTERVAL), from the same table as
``/metrics``. Sums are exported as gauges. A fleet's epochs are attempts, each exported by a process that may be new,
so a backend would place a counter's start wrongly at every recovery.

All spans of a run have one trace id, derived from the run's name and folder. Each span id is derived from its
content: an epoch that is sent again (``phalanx sinks fill``) is the same span. Past numbers cannot be sent again,
because the SDK stamps them with the present.

An epoch's span ends when its rank closes the sink. A killed rank loses its own span; the spans within it remain.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from phalanx.observe import events as run_events
from phalanx.observe.ledger import PHASES
from phalanx.observe.metrics.run_metrics import RUN_METRICS, RunFacts
from phalanx.observe.metrics.samples import Derived, Labels, collect

_NS = 1_000_000_000
_FLUSH_MS = 5_000
MODULES = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")


class OtelSink:
    """Sink that feeds the SDK's metric and span providers."""

    def __init__(self, run_directory: Path, run: str, reader: Any = None, exporter: Any = None) -> None:
        """Open OpenTelemetry's exporters of metrics and spans for the run.

        ``reader`` (of metrics) and ``exporter`` (of spans) replace those of OTLP, for tests.
        """
        sdk: Any = importlib.import_module("opentelemetry.sdk.trace")
        metrics: Any = importlib.import_module("opentelemetry.sdk.metrics")
        resources: Any = importlib.import_module("opentelemetry.sdk.resources")
        self._api: Any = importlib.import_module("opentelemetry.trace")
        self._observation: Any = importlib.import_module("opentelemetry.metrics").Observation
        self._key = f"{run_directory.resolve()}:{run}"
        folder = run_directory.resolve().name
        self._labels, self._facts = Labels(run=folder), RunFacts()
        resource = resources.Resource.create({"service.name": "phalanx", "phalanx.run": folder})
        self._meters: Any = metrics.MeterProvider([reader or _otlp_reader()], resource)
        meter = self._meters.get_meter("phalanx")
        for derived in RUN_METRICS:
            about = derived.metric
            meter.create_observable_gauge(about.name, [self._observer(derived)], description=about.help)
        self._ids = _Ids()
        self._tracers: Any = sdk.TracerProvider(resource=resource, id_generator=self._ids)
        processors: Any = importlib.import_module("opentelemetry.sdk.trace.export")
        make = processors.SimpleSpanProcessor if exporter else processors.BatchSpanProcessor
        self._tracers.add_span_processor(make(exporter or _otlp_exporter()))
        self._tracer: Any = self._tracers.get_tracer("phalanx")
        self._epoch: Any = None
        self._attempt, self._last_ns, self._stepped = -1, 0, False

    def holds(self, event: run_events.Event) -> bool:  # noqa: ARG002 (numbers of the past cannot be sent again)
        """Return False: sent points cannot be queried."""
        return False

    def write(self, event: run_events.Event) -> None:
        """Add an event to the facts that metrics read, and create the spans that end with it.

        A start opens a span for its epoch, which the next start or the run's end closes. Restores, warnings and steps
        that are not finite become events of that span.
        """
        self._facts.take(run_events.encode(event).rstrip())
        at_ns = round(event.t * _NS)
        attributes: dict[str, Any]
        if event.attempt != self._attempt and isinstance(event.body, run_events.RunStarted):
            self._end_epoch()
            self._attempt, self._stepped = event.attempt, False
            self._epoch = self._open("epoch", event.attempt, at_ns, {"ranks": event.body.ranks})
        self._last_ns = max(self._last_ns, at_ns)
        match event.body:
            case run_events.Step() as body if not self._stepped:
                self._stepped = True
                self._recovered(body, at_ns)
            case run_events.CheckpointSaved() as body:
                attributes = {"step": body.step, "bytes": body.size_bytes, "blocked_s": body.blocked_s}
                self._span("checkpoint", body.step, at_ns - round(body.seconds * _NS), at_ns, attributes)
            case run_events.Evaluated() as body:
                attributes = {"step": body.step, "loss": body.loss}
                self._span("evaluation", body.step, at_ns - round(body.seconds * _NS), at_ns, attributes)
            case run_events.TaskEvaluated() as body:
                attributes = {"step": body.step, "task": body.task, **body.figures}
                self._span("task", body.step, at_ns - round(body.seconds * _NS), at_ns, attributes)
            case run_events.Restored() as body if self._epoch is not None:
                attributes = {"step": body.step, "source": body.source, "moved_bytes": body.moved_bytes}
                self._epoch.add_event("restored", attributes, at_ns)
            case run_events.NonFinite() as body if self._epoch is not None:
                self._epoch.add_event("not finite", {"step": body.step, "what": body.problem}, at_ns)
            case run_events.Message(level="warning" | "error", text=text) if self._epoch is not None:
                self._epoch.add_event(text[:200], {}, at_ns)
            case run_events.Stopped() | run_events.Finished():
                self._end_epoch()

    def close(self) -> None:
        """End the epoch's span, flush with a timeout, and shut the exporters down."""
        self._end_epoch()
        self._tracers.force_flush(_FLUSH_MS)
        self._tracers.shutdown()
        self._meters.shutdown(_FLUSH_MS)

    def _observer(self, derived: Derived[RunFacts]) -> Callable[[Any], Iterable[Any]]:
        """Return the SDK's callback for one metric.

        It runs on the SDK's thread while events arrive. A figure that fails on a partial update is left out until the
        next time.
        """

        def observe(_options: Any) -> list[Any]:
            """Return the metric's present observations; errors give none."""
            samples = collect([derived], self._facts, self._labels)
            return [self._observation(value, dict(labels.pairs)) for _, labels, value in samples]

        return observe

    # --- spans -----------------------------------------------------------------------------------

    def _recovered(self, step: run_events.Step, at_ns: int) -> None:
        """Create the span of a start or recovery, from the ledger of the first step, and one for each phase.

        ``at_ns`` is the end of that step; the span ends where the step began.
        """
        own_s = sum(seconds for name, seconds in step.ledger.items() if name.startswith("step."))
        end_ns = at_ns - round(own_s * _NS)
        phases = {phase.value: step.ledger[phase] for phase in PHASES if step.ledger.get(phase)}
        begin_ns = end_ns - round(sum(phases.values()) * _NS)
        name = "recovery" if any(phase.startswith("fault.") for phase in phases) else "start"
        recovery_span = self._open(name, self._attempt, begin_ns, {"step": step.step})
        for phase, seconds in phases.items():
            until_ns = begin_ns + round(seconds * _NS)
            self._span(phase, self._attempt, begin_ns, until_ns, {}, recovery_span)
            begin_ns = until_ns
        recovery_span.end(end_ns)

    def _open(
        self, name: str, number: int, begin_ns: int, attributes: dict[str, Any], parent: Any = None
    ) -> Any:
        """Start a span with a fixed identity, below ``parent``, else the epoch, else the run; ``number`` distinguishes equal names."""
        self._ids.next_span = _identity(f"{self._key}:{self._attempt}:{name}:{number}", 8)
        above = parent or (self._epoch if name != "epoch" else None)
        context = self._api.set_span_in_context(above) if above is not None else self._root()
        return self._tracer.start_span(
            name, context, attributes=attributes | {"attempt": self._attempt}, start_time=begin_ns
        )

    def _span(
        self,
        name: str,
        number: int,
        begin_ns: int,
        end_ns: int,
        attributes: dict[str, Any],
        parent: Any = None,
    ) -> None:
        """Create a span that begins and ends at the given nanoseconds, as ``_open`` does."""
        self._open(name, number, begin_ns, attributes, parent).end(end_ns)

    def _root(self) -> Any:
        """Return the run's own span as a parent that is never sent: it is open as long as the run."""
        api, trace = self._api, _identity(self._key, 16)
        flags = api.TraceFlags(api.TraceFlags.SAMPLED)
        context = api.SpanContext(trace, _identity(f"{self._key}:run", 8), is_remote=True, trace_flags=flags)
        return api.set_span_in_context(api.NonRecordingSpan(context))

    def _end_epoch(self) -> None:
        """End the epoch's span at the newest event, if one is open."""
        if self._epoch is not None:
            self._epoch.end(self._last_ns)
            self._epoch = None


class _Ids:
    """Id generator that returns the chosen ids of the next span."""

    next_span = 1

    def generate_span_id(self) -> int:
        """Return the id of the next span."""
        return self.next_span

    def generate_trace_id(self) -> int:
        """Return the same id; unused, because every span has a parent."""
        return self.next_span

    def is_trace_id_random(self) -> bool:
        """Return False: ids are derived from the content."""
        return False


def _identity(text: str, nbytes: int) -> int:
    """Return a number that is equal for equal words, and never 0, which OpenTelemetry reserves."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:nbytes], "big") or 1


def _otlp_reader() -> Any:
    """Return a periodic exporter of metrics over OTLP and HTTP."""
    export: Any = importlib.import_module("opentelemetry.sdk.metrics.export")
    otlp: Any = importlib.import_module("opentelemetry.exporter.otlp.proto.http.metric_exporter")
    return export.PeriodicExportingMetricReader(otlp.OTLPMetricExporter())


def _otlp_exporter() -> Any:
    """Return an exporter of spans over OTLP and HTTP."""
    otlp: Any = importlib.import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    return otlp.OTLPSpanExporter()

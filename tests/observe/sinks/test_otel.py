"""OpenTelemetry: the run's numbers and its epochs as the SDK's own in-memory exporters see them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from phalanx.observe.event_log import EventLog, read_events
from phalanx.observe.events import CheckpointSaved, Evaluated, Finished, Restored, RunStarted, Step
from phalanx_watch.sinks.otel import OtelSink
from recorded_runs import run_samples

pytest.importorskip("opentelemetry.sdk", reason="opentelemetry-sdk is not installed: make env-dev")


def ledger(seconds: float, **phases: float) -> dict[str, float]:
    return {**{name.replace("__", "."): value for name, value in phases.items()}, "step.compute": seconds}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    clock = iter(float(t) for t in range(1000, 1100))
    first = [RunStarted("r", 9, ranks=2), Step(1, 9, 2.0, 0.5, 1e-3, 64, 64.0, 1.0, ledger=ledger(1.0))]
    again = ledger(1.0, fault__undetected=0.25, start__restore=0.5)
    second = [RunStarted("r", 9, ranks=2), Restored(1, "memory", moved_bytes=7), Step(2, 9, 1.5, 0.5, 1e-3, 128, 64.0, 1.0, ledger=again)]  # fmt: skip
    second += [CheckpointSaved(2, "c", 10, 0.5, 0.125), Evaluated(2, 1.25, seconds=0.25), Finished({})]
    for attempt, bodies in enumerate((first, second)):
        with EventLog(tmp_path / "events.jsonl", attempt, lambda: next(clock)) as log:
            for body in bodies:
                log.append(body)  # type: ignore[arg-type]
    return tmp_path


def sent(run: Path) -> tuple[dict[tuple[str, frozenset[Any]], float], dict[tuple[str, int], Any]]:
    """Numbers by name and labels, and spans by name and attempt, that the sink has given to the SDK."""
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    reader, exporter = InMemoryMetricReader(), InMemorySpanExporter()
    sink = OtelSink(run, "r", reader, exporter)
    for event in read_events(run / "events.jsonl"):
        sink.write(event)
    data = reader.get_metrics_data()
    numbers = {
        (metric.name, frozenset(point.attributes.items())): point.value
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
        for point in metric.data.data_points
    }
    sink.close()
    return numbers, {(span.name, span.attributes["attempt"]): span for span in exporter.get_finished_spans()}


def test_the_numbers_are_those_that_prometheus_gets(run: Path) -> None:
    numbers, _ = sent(run)
    expected = {(s.metric.name, frozenset(s.labels.pairs.items())): s.value for s in run_samples(run)}
    assert numbers == expected


def test_epochs_hold_what_happened_in_them_and_a_recovery_its_phases(run: Path) -> None:
    _, spans = sent(run)
    assert set(spans) == {("epoch", 0), ("start", 0), ("epoch", 1), ("recovery", 1), ("fault.undetected", 1), ("start.restore", 1), ("checkpoint", 1), ("evaluation", 1)}  # fmt: skip
    epoch, recovery = spans["epoch", 1], spans["recovery", 1]
    assert [event.name for event in epoch.events] == ["restored"]
    assert recovery.parent.span_id == epoch.context.span_id
    assert spans["start.restore", 1].parent.span_id == recovery.context.span_id
    seconds = {name: (span.end_time - span.start_time) / 1e9 for (name, _), span in spans.items()}
    assert (seconds["recovery"], seconds["start.restore"]) == (0.75, 0.5)
    assert (seconds["checkpoint"], spans["checkpoint", 1].attributes["blocked_s"]) == (0.5, 0.125)


def test_all_attempts_are_one_trace_and_what_is_sent_again_is_the_same_span(run: Path) -> None:
    once, again = ({key: span.context for key, span in sent(run)[1].items()} for _ in range(2))
    assert len({context.trace_id for context in once.values()}) == 1
    assert {key: context.span_id for key, context in once.items()} == {
        key: context.span_id for key, context in again.items()
    }
    assert len({context.span_id for context in once.values()}) == len(once)

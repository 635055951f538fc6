"""Both text formats, against the parsers of Prometheus' own client library."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_open_metrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from phalanx.observe.metrics.samples import Labels, Metric, Sample, render

METRICS = (
    Metric("phalanx_a_seconds", "gauge", 'Seconds; a "quote", a \\ and\na line.', "test"),
    Metric("phalanx_b_total", "counter", "Counted.", "test"),
    Metric("phalanx_c_info", "info", "A fact.", "test", ("version",)),
    Metric("phalanx_c", "gauge", "The same word without its suffix.", "test"),
)
VALUES = st.floats(allow_nan=True, allow_infinity=True) | st.integers(-(2**53), 2**53)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


@st.composite
def samples(draw: st.DrawFn) -> list[Sample]:
    drawn = []
    for metric in METRICS:
        for _ in range(draw(st.integers(0, 3))):
            labels = Labels(run=draw(TEXTS), node=draw(TEXTS))
            value = {"gauge": draw(VALUES), "counter": draw(st.floats(0, 1e300)), "info": 1.0}[metric.kind]
            drawn.append(Sample(metric, labels, value))
    return drawn


def series(drawn: list[Sample]) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (sample.metric.name, frozenset(sample.labels.pairs.items())): float(sample.value) for sample in drawn
    }


def same(left: dict[object, float], right: dict[object, float]) -> bool:
    return left.keys() == right.keys() and all(
        left[key] == right[key] or (math.isnan(left[key]) and math.isnan(right[key])) for key in left
    )


@given(samples())
def test_what_was_rendered_is_read_back_by_the_librarys_parser(drawn: list[Sample]) -> None:
    families = list(parse_text(render(drawn).decode()))
    read = {(s.name, frozenset(s.labels.items())): s.value for f in families for s in f.samples}
    assert same(read, series(drawn))
    kinds = {s.name: f.type for f in families for s in f.samples}
    assert all(kinds[sample.metric.name] == sample.metric.kind.replace("info", "gauge") for sample in drawn)


@given(samples())
def test_what_was_rendered_as_open_metrics_is_read_back_by_the_librarys_strict_parser(
    drawn: list[Sample],
) -> None:
    # Its rules forbid families whose names differ only by a suffix; we have none of these.
    plain = [sample for sample in drawn if sample.metric.name != "phalanx_c"]
    families = list(parse_open_metrics(render(plain, open_metrics=True).decode()))
    read = {(s.name, frozenset(s.labels.items())): s.value for f in families for s in f.samples}
    assert same(read, series(plain))
    assert {f.unit for f in families if f.name == "phalanx_a_seconds"} <= {"seconds"}


def test_help_is_escaped_as_each_format_wants_it() -> None:
    single = [Sample(METRICS[0], Labels(), 1.0)]
    assert next(iter(parse_text(render(single).decode()))).documentation == METRICS[0].help
    read = next(iter(parse_open_metrics(render(single, open_metrics=True).decode())))
    assert read.documentation == METRICS[0].help


def test_the_last_sample_of_a_series_that_comes_twice_counts() -> None:
    labels = Labels(run="a")
    text = render(
        [Sample(METRICS[1], labels, 1), Sample(METRICS[0], labels, 2), Sample(METRICS[1], labels, 3)]
    )
    assert [line for line in text.decode().splitlines() if line[0] != "#"] == [
        'phalanx_b_total{run="a"} 3',
        'phalanx_a_seconds{run="a"} 2',
    ]


def test_a_label_that_is_no_text_in_utf_8_does_not_break_the_rest() -> None:
    assert b'{run="a?b"}' in render([Sample(METRICS[0], Labels(run="a\udc80b"), 1.0)])

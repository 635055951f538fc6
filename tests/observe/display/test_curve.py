"""The loss curve is valid SVG that shows each surviving step once."""

import math
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from observe.recorded import bodies, crashed_run, step
from phalanx.observe.display.curve import (
    BOTTOM,
    LEFT,
    RIGHT,
    TOP,
    CurveError,
    draw_curve,
    envelope,
    gather,
    svg_curve,
)
from phalanx.observe.events import Evaluated, Event, Restored, RunStarted

SVG = "{http://www.w3.org/2000/svg}"


def elements(svg: str, tag: str, kind: str) -> list[ET.Element]:
    return [e for e in ET.fromstring(svg).iter(SVG + tag) if kind in e.get("class", "").split()]


def words(svg: str) -> list[str]:
    return [e.text or "" for e in ET.fromstring(svg).iter(SVG + "text")]


def test_the_file_is_a_valid_svg_document(tmp_path: Path) -> None:
    draw_curve(crashed_run(), tmp_path / "loss.svg")
    root = ET.fromstring((tmp_path / "loss.svg").read_text())
    assert root.tag == SVG + "svg"
    assert [path.name for path in tmp_path.iterdir()] == ["loss.svg"]


@settings(max_examples=60)
@given(st.lists(st.builds(Event, t=st.floats(0, 4e9), attempt=st.integers(0, 3), body=bodies()), max_size=10))
def test_any_events_give_valid_xml_or_a_clear_refusal(events: list[Event]) -> None:
    series = gather(events)
    if not (series.train or series.held_out):
        with pytest.raises(CurveError, match="no finite loss"):
            svg_curve(events)
        return
    ET.fromstring(svg_curve(events))


def test_a_run_without_a_step_is_refused() -> None:
    with pytest.raises(CurveError, match="no finite loss"):
        svg_curve([Event(1.0, 0, RunStarted("x", 10))])


def test_a_step_done_twice_is_drawn_once() -> None:
    series = gather(crashed_run())
    assert [at for at, _ in series.train] == list(range(1, 41))
    assert [at for at, _ in series.held_out] == [10, 20, 30, 40]


def test_steps_lost_in_a_crash_are_gone_until_they_are_done_again() -> None:
    events = [Event(float(n), 0, step(n, 9)) for n in range(1, 6)] + [Event(9.0, 1, Restored(3, "x"))]
    assert [at for at, _ in gather(events).train] == [1, 2, 3]


def test_a_loss_that_is_no_number_leaves_the_others_drawn() -> None:
    events = [Event(float(n), 0, step(n, 9, math.nan if n == 2 else 1.0 * n)) for n in range(1, 5)]
    assert [at for at, _ in gather(events).train] == [1, 3, 4]
    ET.fromstring(svg_curve(events))


def test_each_evaluation_is_a_point_and_each_restart_a_dash() -> None:
    svg = svg_curve(crashed_run())
    assert len(elements(svg, "circle", "held")) == 4 + 1  # and one in the legend
    (dash,) = elements(svg, "line", "restart")
    assert float(dash.get("x1", "")) == pytest.approx((LEFT + RIGHT) / 2, abs=0.1)  # step 20 of 40


def test_the_baseline_lies_where_its_bits_per_byte_are_on_the_right_axis() -> None:
    svg = svg_curve(crashed_run())
    (line,) = elements(svg, "line", "xz")
    # Two bits a byte for one nat a token: 2.3 bits are 1.15 nats. Loss fell from 3.95 to 1.15 and below.
    low, high = 1.15, max(loss for _, loss in gather(crashed_run()).train)
    margin = 0.05 * (high - low)
    expected = BOTTOM - (BOTTOM - TOP) * margin / (high - low + 2 * margin)
    assert float(line.get("y1", "")) == pytest.approx(expected, abs=0.2)
    assert "xz -9: 2.300 bits per byte" in words(svg)
    assert "bits per byte" in words(svg)


def test_without_bits_per_byte_there_is_no_right_axis() -> None:
    svg = svg_curve([Event(1.0, 0, step(1, 9, 3.0)), Event(2.0, 0, Evaluated(1, 2.0))])
    assert "bits per byte" not in words(svg)


def test_absurd_losses_are_left_out_not_drawn_flat() -> None:
    events = [
        Event(float(n), 0, step(n, 9, loss)) for n, loss in enumerate([2.0, 1e308, -1e308, 1.5], start=1)
    ]
    assert [loss for _, loss in gather(events).train] == [2.0, 1.5]
    ET.fromstring(svg_curve(events))


def test_the_name_of_a_run_cannot_break_the_document() -> None:
    name = '<b>&"quotes"\x00\x1b'
    svg = svg_curve([Event(1.0, 0, RunStarted(name, 9)), Event(2.0, 0, step(1, 9))])
    assert '<b>&"quotes"  ' in words(svg)


@given(st.lists(st.floats(-5, 5), max_size=400), st.integers(1, 20))
def test_thinning_a_line_keeps_its_extremes_and_its_order(losses: list[float], columns: int) -> None:
    points = [(float(i), loss) for i, loss in enumerate(losses)]
    kept = envelope(points, columns)
    assert len(kept) <= max(2 * columns, 0)
    assert kept == sorted(kept)
    assert set(kept) <= set(points)
    if points:
        assert min(y for _, y in kept) == min(losses)
        assert max(y for _, y in kept) == max(losses)


def test_a_long_run_still_gives_a_small_file() -> None:
    events = [Event(float(n), 0, step(n, 50_000, 2 + math.sin(n))) for n in range(1, 50_001)]
    assert len(svg_curve(events)) < 60_000

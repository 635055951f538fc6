"""Scales, ticks and marks of hand-written charts."""

import xml.etree.ElementTree as ET

from hypothesis import example, given
from hypothesis import strategies as st

from phalanx.observe.display import curve as svg


@given(low=st.floats(-1e4, 1e4), span=st.floats(1e-3, 1e5), about=st.integers(3, 10))
def test_ticks_are_round_numbers_within_the_axis(low: float, span: float, about: int) -> None:
    ticks = svg.round_ticks(low, low + span, about)
    assert 0 < len(ticks) <= about + 1
    assert all(low - 1e-6 * span <= tick <= low + span * (1 + 1e-6) for tick in ticks)
    if len(ticks) > 1:
        leading = f"{ticks[1] - ticks[0]:.3e}"
        assert leading[:5] in ("1.000", "2.000", "5.000")


@example([1e6, 999999.9999999999])  # neighboring floats
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=9))
def test_a_padded_range_holds_all_values_and_is_never_empty(values: list[float]) -> None:
    low, high = svg.padded(values, 0.05)
    assert low < min(values) <= max(values) < high


def test_a_scale_may_run_either_way() -> None:
    up = svg.Scale(0, 10, 388, 92)
    assert [up(0), up(10), up(5)] == [388, 92, 240]


@given(st.text())
def test_no_text_can_break_a_mark(text: str) -> None:
    marks = [svg.label(0, 0, text), svg.box(0, 0, 1, 1, svg.look_of("x"), text), svg.path([], "")]
    ET.fromstring(svg.drawing(10, 10, marks, caption=text + "."))

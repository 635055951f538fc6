"""The loss curve is drawn while a run continues, seldom enough to cost nothing."""

from __future__ import annotations

from pathlib import Path

from observe.recorded import crashed_run, step
from phalanx.observe.display.curve import EVERY_S, SHARE, draw_run, keep_drawn
from phalanx.observe.events import Event, encode


def steps(count: int) -> list[Event]:
    return [Event(float(number), 0, step(number, count)) for number in range(1, count + 1)]


class Clock:
    """Clock that shows ``now_s``."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_the_curve_is_there_while_the_run_continues_and_complete_at_its_end(tmp_path: Path) -> None:
    file, curve, clock = tmp_path / "events.jsonl", tmp_path / "loss.svg", Clock()
    events = keep_drawn(crashed_run(), file, curve, clock)
    seen, drawn = [], []
    with file.open("wb") as stream:
        for event in crashed_run():
            stream.write(encode(event))
            stream.flush()
            seen.append(next(events))
            clock.now_s += EVERY_S / 4
            if curve.exists():
                drawn.append(curve.read_text())
    assert list(events) == []
    assert seen == crashed_run()
    assert len(set(drawn)) > 2
    draw_run(file, tmp_path / "whole.svg")
    assert curve.read_text() == (tmp_path / "whole.svg").read_text()


def test_drawing_takes_a_small_share_of_the_time_however_long_it_takes(tmp_path: Path) -> None:
    clock = Clock()
    spent_s = 0.0

    def draw(_file: Path, _curve: Path) -> None:
        nonlocal spent_s
        clock.now_s, spent_s = clock.now_s + 100.0, spent_s + 100.0

    for _ in keep_drawn(steps(1000), tmp_path / "events.jsonl", tmp_path / "loss.svg", clock, draw):
        clock.now_s += 60.0
    assert 0 < spent_s <= SHARE * clock.now_s + 200.0


def test_a_short_run_is_left_to_draw_its_curve_itself(tmp_path: Path) -> None:
    list(keep_drawn(steps(5), tmp_path / "events.jsonl", tmp_path / "loss.svg", lambda: 0.0))
    assert not (tmp_path / "loss.svg").exists()

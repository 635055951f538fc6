"""The display for people: the same from the same events, never wider than their terminal, never garbled."""

import io
import json
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from functools import reduce as fold
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from observe.recorded import bodies, crashed_run, step
from phalanx.observe.display.state import CURVE_POINTS, Curve, State, reduce
from phalanx.observe.display.terminal import plain_lines, render, show_events, sparkline
from phalanx.observe.event_log import read_events
from phalanx.observe.events import (
    Body,
    CheckpointFailed,
    EpochLeft,
    Evaluated,
    Evaluating,
    Event,
    Finished,
    Message,
    NonFinite,
    RanksChanged,
    RunStarted,
    Stopped,
    TaskEvaluated,
    Torn,
    Unknown,
    encode,
)
from phalanx.observe.goodput import format_goodput, goodput


def state_after(events: Iterable[Event]) -> State:
    return fold(reduce, events, State())


def screen(state: State, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(render(state, width))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def log(events: list[Event], every_s: float = 10.0, **terminal: bool) -> str:
    console = Console(file=io.StringIO(), width=40, **terminal)  # type: ignore[arg-type]
    show_events(events, console, live=True, every_s=every_s)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


# --- the fold ---


def test_a_new_attempt_keeps_the_curve_and_forgets_the_speed() -> None:
    events = crashed_run()
    second = next(i for i, event in enumerate(events) if event.attempt == 1)
    before, after = state_after(events[:second]), state_after(events[: second + 1])
    assert after.curve == before.curve
    assert after.recent_step_s == ()
    assert after.attempt == 1


def test_an_attempt_that_ended_without_a_word_is_noted() -> None:
    notes = [note.text for note in state_after(crashed_run()).notes]
    assert "attempt 1 ended without a word after step 25" in notes


def test_the_end_of_an_epoch_that_its_fleet_has_explained_is_not_noted_again() -> None:
    events = crashed_run()
    second = next(i for i, event in enumerate(events) if event.attempt == 1)
    epoch_left = replace(events[second - 1], body=EpochLeft(0, "node node-1 fell silent"))
    notes = [note.text for note in state_after([*events[:second], epoch_left, *events[second:]]).notes]
    assert not any("without a word" in note for note in notes)
    assert "leave epoch 0: node node-1 fell silent" in notes


def test_the_time_left_includes_what_evaluations_cost() -> None:
    state = State()
    for number in range(1, 11):  # a second a step, two seconds of wall time each
        state = reduce(state, Event(2.0 * number, 0, step(number, 20)))
    assert state.time_left_s == pytest.approx(20.0)


@given(st.integers(0, 3000))
def test_the_curve_in_memory_is_bounded_and_evenly_spaced(count: int) -> None:
    curve = Curve()
    for value in range(count):
        curve = curve.add(float(value))
    assert len(curve.values) <= CURVE_POINTS
    assert list(curve.values) == [float(v) for v in range(0, count, curve.stride)]


# --- the panel ---


@settings(max_examples=60)
@given(
    st.lists(st.builds(Event, t=st.floats(0, 4e9), attempt=st.integers(0, 3), body=bodies()), max_size=8),
    st.integers(50, 200),
)
def test_any_events_can_be_drawn_at_any_width(events: list[Event], width: int) -> None:
    assert all(cell_len(line) <= width for line in screen(state_after(events), width).splitlines())


def test_the_panel_shows_the_figures_of_a_run() -> None:
    started = RunStarted(
        "tiny", 40, 4, peak_flops_per_s=1.84e12, peak_source="measured at start", xz_bits_per_byte=2.3
    )
    events = [*crashed_run()[:20], Event(1.8e9 + 99, 0, started)]
    events.append(Event(1.8e9 + 100, 0, step(18, 40, mfu=0.412, goodput=0.9, peak_memory_bytes=3 << 30)))
    shown = screen(state_after(events))
    for fact in (
        "step 18 of 40",
        "45.0 %",
        "41.2 %",
        "1.84 TFLOP/s, measured at start",
        "90.0 %",
        "3.00 GiB",
        "3.00e-04",
        "7.000 bits/byte (xz -9: 2.300)",
        "step 10, 1.00 MiB",
        "4 ranks",
        "step 15 is not finite",
        "left",
    ):
        assert fact in shown


def test_a_finished_run_shows_its_hash_whole() -> None:
    assert "ab" * 32 in screen(state_after(crashed_run()))


def test_markup_in_a_message_is_shown_as_it_is() -> None:
    assert "[bold]x[/]" in screen(reduce(State(), Event(1.0, 0, Message("info", "[bold]x[/]"))))


# --- plain lines ---


def test_off_the_terminal_there_are_no_control_characters_for_any_message() -> None:
    events = [*crashed_run(), Event(1.9e9, 1, Message("error", "a\x1b[31mb\rc\nd\x07"))]
    shown = log(events, force_terminal=False)
    assert all(letter.isprintable() or letter == "\n" for letter in shown)
    assert "error: a [31mb c d " in shown


def test_a_plain_line_is_one_line_however_narrow_the_console() -> None:
    first = log(crashed_run()).splitlines()[0]
    assert len(first) > 40
    assert first.endswith("40 steps")


def test_the_first_and_the_last_step_are_always_shown() -> None:
    lines = [line for line in plain_lines(crashed_run(), every_s=1e9) if "  step " in line]
    assert "step 1/40" in lines[0]
    assert "step 40/40" in lines[-1]


def test_the_last_step_before_a_crash_is_shown() -> None:
    events = [event for event in crashed_run() if event.attempt == 0]
    assert "step 25/40" in list(plain_lines(events, every_s=1e9))[-1]


@given(every_s=st.integers(1, 20))
def test_between_other_events_a_step_is_shown_every_so_many_seconds(every_s: int) -> None:
    events = [Event(float(number), 0, step(number, 99)) for number in range(1, 99)]
    assert len(list(plain_lines(events, every_s))) == -(-98 // every_s) + (97 % every_s != 0)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (
            CheckpointFailed(3, "ckpt/3", "disk full"),
            "error: checkpoint of step 3 failed (ckpt/3): disk full",
        ),
        (NonFinite(3, "loss", skipped=False), "warning: step 3 is not finite, the run ends before it: loss"),
        (
            TaskEvaluated(4, "sums", "generation", 2, {"exact_match": 0.5, "exact_match_error": 0.25}),
            "task sums at step 4: exact match 0.500 ± 0.250",
        ),
        (
            TaskEvaluated(4, "margin", "observer", 2, {"margin": 1.25}),
            "task margin at step 4: margin 1.25",
        ),
        (RanksChanged(3, 5, "node07 came back"), "5 ranks from step 4 on: node07 came back"),
        (Stopped(3, "SIGTERM"), "warning: stopped after step 3: SIGTERM"),
        (
            Finished({"loss": 1.25, "held_out_loss": None, "run_dir": "runs/x", "layout": {"tensor": 2}}),
            "finished  loss=1.25",
        ),
        (Torn(7, "{"), "line 7 of the event file is torn: its writer was killed"),
        (Unknown("Levitated", {}), "an event of a kind this version does not know: Levitated"),
    ],
)
def test_every_notable_event_is_a_line(body: object, text: str) -> None:
    lines = list(plain_lines([Event(0.0, 0, body)], every_s=10))  # type: ignore[arg-type]
    assert lines == [f"00:00:00  {text}"]


# --- the terminal ---


def test_on_a_terminal_the_panel_ends_with_the_last_state() -> None:
    shown = log(crashed_run(), force_terminal=True)
    assert "\x1b[" in shown
    assert "finished" in shown


def test_no_color_is_honored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system="truecolor")
    console.print(render(state_after(crashed_run())))
    assert isinstance(console.file, io.StringIO)
    colored = [f"\x1b[3{digit}m" for digit in range(8)]
    assert not any(code in console.file.getvalue() for code in colored)


@given(st.lists(st.floats(), max_size=300), st.integers(1, 120))
def test_a_sparkline_fits_and_spans_the_blocks(values: list[float], width: int) -> None:
    assert len(sparkline(values, width)) <= width


def test_a_falling_loss_is_a_falling_sparkline() -> None:
    assert sparkline([float(8 - i) for i in range(8)], 8) == "█▇▆▅▄▃▂▁"


# --- damaged files ---

ANY_NUMBER = st.floats() | st.sampled_from([1e18, 1e300, -1.0, 5e-324]) | st.integers(-(2**200), 2**200)


@given(st.lists(st.tuples(ANY_NUMBER, st.integers(0, 3), bodies()), max_size=8))
@settings(max_examples=200)
def test_a_run_with_any_numbers_in_a_damaged_line_can_be_watched_and_accounted(
    written: list[tuple[float, int, Body]],
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "events.jsonl"
        with file.open("wb") as stream:
            for t, attempt, body in written:
                line = json.loads(encode(Event(1.0, attempt, body)))
                stream.write(json.dumps(line | {"t": t}).encode() + b"\n")
        events = list(read_events(file))
    assert len(events) == len(written)
    list(plain_lines(events, 1.0))
    screen(state_after(events))
    account = goodput(events)
    assert sum(account.buckets_ns.values()) == account.total_ns
    format_goodput(account)


def test_a_long_evaluation_shows_how_far_it_is() -> None:
    events = [Event(float(n), 0, body) for n, body in enumerate([step(2, 2), Evaluating(2, 64, 4096)])]
    assert "evaluating: 64 of 4,096 sequences" in screen(state_after(events))
    assert log(events).splitlines()[-1].endswith("evaluating: 64 of 4,096 sequences")
    after = [*events, Event(9.0, 0, Evaluated(2, 1.5))]
    assert "evaluating" not in screen(state_after(after))

"""Following a run's events: the same numbers however they came, and nothing lost to what is torn or hostile."""

from __future__ import annotations

import json
import math
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from observe.recorded import bodies, crashed_run, step
from phalanx.observe.event_log import read_events
from phalanx.observe.events import (
    CheckpointSaved,
    ChildTaken,
    Evaluated,
    Event,
    Forked,
    IncidentKind,
    LossSpike,
    MemoryMeasured,
    Message,
    Restored,
    Step,
    TaskEvaluated,
    encode,
)
from phalanx_watch.page.runs import SeriesCache
from phalanx_watch.page.view_curves import NoSuchCurveError, curves
from phalanx_watch.series.run_series import RunSeries
from watch.made_runs import crashed, write_events


def _read(run_dir: Path) -> RunSeries:
    run = RunSeries(run_dir)
    run.refresh()
    return run


def test_the_columns_are_those_of_the_events(tmp_path: Path) -> None:
    run = _read(crashed(tmp_path))
    steps = [event.body for event in crashed_run() if isinstance(event.body, Step)]
    assert run.table.column("step").tolist() == [body.step for body in steps]
    assert run.table.column("loss").tolist() == [body.loss for body in steps]
    assert run.table.column("tokens").tolist() == [body.tokens for body in steps]


def test_a_step_that_was_computed_again_counts_as_it_was_computed_last(tmp_path: Path) -> None:
    run = _read(crashed(tmp_path))
    drawn = curves(run, ["loss"])
    assert drawn.x.tolist() == list(range(1, 41))
    assert [mark.mark.kind for mark in drawn.marks if mark.mark.step == 20][-1] == "recovery"


def test_a_fork_marks_the_state_that_it_went_back_to_and_the_one_that_it_continued_from(
    tmp_path: Path,
) -> None:
    bodies = [
        *(step(number, 18) for number in range(1, 13)),
        Forked(13, 8, 16, ["skip", "rate"]),
        ChildTaken(13, "rate", 16, 3.0, 0.5, 1.0),
        *(step(number, 18) for number in range(13, 19)),
    ]
    write_events(tmp_path / "run", [Event(float(t), 0, body) for t, body in enumerate(bodies)])
    drawn = curves(_read(tmp_path / "run"), ["loss"])
    assert drawn.x.tolist() == list(range(1, 19))
    assert [(mark.x, mark.mark.step) for mark in drawn.marks] == [(8, 8), (16, 16)]
    assert "skip, rate" in drawn.marks[0].mark.text
    assert "child rate of the fork at step 13" in drawn.marks[1].mark.text


def test_the_mark_of_a_spike_names_the_figure_that_rose_in_four_digits(tmp_path: Path) -> None:
    of_loss = LossSpike(3, 5.686061054468155, 4.9, 4.860533207654953, 18.9, "fork", 16, 8, 0.8541234567)
    of_norm = msgspec.structs.replace(of_loss, step=4, figure="gradient norm")
    bodies = [*(step(number, 18) for number in range(1, 5)), of_loss, of_norm]
    write_events(tmp_path / "run", [Event(float(t), 0, body) for t, body in enumerate(bodies)])
    assert [mark.mark.text for mark in curves(_read(tmp_path / "run"), ["loss"]).marks] == [
        "the loss jumped to 5.686 from about 4.861: fork",
        "the gradient norm jumped to 4.9 from about 0.8541: fork",
    ]


def test_reading_as_the_file_grows_gives_what_reading_it_whole_gives(tmp_path: Path) -> None:
    content = write_events(tmp_path / "whole", crashed_run()).read_bytes()
    at_once = _read(tmp_path / "whole")
    (tmp_path / "grown").mkdir()
    growing = RunSeries(tmp_path / "grown")
    for end in range(0, len(content) + 997, 997):
        (tmp_path / "grown" / "events.jsonl").open("ab").write(content[max(0, end - 997) : end])
        growing.refresh()
    for name in ("step", "loss", "t", "eval_loss", "grad_norm", "attempt"):
        assert np.array_equal(
            at_once.table.column(name), growing.table.column(name), equal_nan=name != "attempt"
        ), name
    assert list(at_once.marks) == list(growing.marks)


def test_the_general_decoder_and_the_quick_one_agree(tmp_path: Path) -> None:
    quick = _read(crashed(tmp_path / "quick"))
    file = tmp_path / "slow" / "events.jsonl"
    file.parent.mkdir()
    lines = (tmp_path / "quick" / "events.jsonl").read_bytes().splitlines()
    file.write_text(
        "".join(json.dumps(json.loads(line)) + "\n" for line in lines)
    )  # with spaces: the quick way passes it on
    slow = _read(file.parent)
    for name in quick.table._columns:
        if name != "offset":
            assert np.array_equal(
                quick.table.column(name).astype(float), slow.table.column(name).astype(float), equal_nan=True
            ), name


def test_numbers_that_are_not_finite_are_kept_as_such(tmp_path: Path) -> None:
    body = step(2, 5, loss=math.nan, mfu=math.inf, grad_norm=-math.inf)
    write_events(tmp_path, [Event(1.0, 0, step(1, 5)), Event(2.0, 0, body)])
    run = _read(tmp_path)
    assert math.isnan(run.table.column("loss")[1])
    assert run.table.column("mfu")[1] == math.inf


def test_evaluations_and_memory_stand_at_their_steps(tmp_path: Path) -> None:
    write_events(
        tmp_path,
        [
            *(Event(float(n), 0, step(n, 9)) for n in (1, 2, 3)),
            Event(4.0, 0, Evaluated(2, 1.5, 0.75)),
            Event(4.0, 0, MemoryMeasured(3, {"total": 1 << 30})),
        ],
    )
    drawn = curves(_read(tmp_path), ["eval_loss", "memory.total"])
    assert [None if math.isnan(y) else y for y in drawn.series["eval_loss"].y] == [None, 1.5, None]
    assert drawn.series["memory.total"].y[2] == 1 << 30


def test_torn_lines_are_counted_and_passed_over(tmp_path: Path) -> None:
    crashed(tmp_path)
    with (tmp_path / "events.jsonl").open("ab") as file:
        file.write(b'{"t":1,"attempt":0,"kind":"Step","st\n[]\n\xff\xfe\n')
    run = _read(tmp_path)
    assert run.torn_lines == 3
    assert run.table.rows == 45


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1e9), st.integers(0, 3), bodies()), max_size=12))
def test_any_events_at_all_leave_a_series_that_can_be_drawn(
    tmp_path: Path, events: list[tuple[float, int, object]]
) -> None:
    file = tmp_path / "events.jsonl"
    file.write_bytes(b"".join(encode(Event(t, attempt, body)) for t, attempt, body in events))  # type: ignore[arg-type]
    run = _read(tmp_path)
    for x in ("step", "tokens", "time"):
        drawn = curves(run, run.curve_names() or ["loss"], x, points=10)  # type: ignore[arg-type]
        assert (np.diff(drawn.x) >= 0).all()


@pytest.mark.parametrize(
    "line",
    [
        b'{"t":1,"attempt":0,"kind":"Step","step":1e999,"steps":1,"loss":1,"grad_norm":1,"lr":1,"tokens":1,"tokens_per_s":1,"step_s":1}',
        b'{"t":1,"attempt":0,"kind":"Step","step":'
        + b"9" * 400
        + b',"steps":1,"loss":1,"grad_norm":1,"lr":1,"tokens":1,"tokens_per_s":1,"step_s":1}',
        b'{"t":1,"attempt":0,"kind":"Step","step":-5,"steps":1,"loss":1,"grad_norm":1,"lr":1,"tokens":1,"tokens_per_s":1,"step_s":1}',
        b'{"t":1,"attempt":0,"kind":"Step","step":2,"steps":1,"loss":"much","grad_norm":1,"lr":1,"tokens":1,"tokens_per_s":1,"step_s":1}',
        b'{"t":1,"attempt":'
        + b"9" * 30
        + b',"kind":"Step","step":2,"steps":1,"loss":1,"grad_norm":1,"lr":1,"tokens":1,"tokens_per_s":1,"step_s":1}',
        b'{"t":1,"attempt":0,"kind":"Evaluated","step":' + b"9" * 30 + b',"loss":1e400}',
        b'{"t":1,"attempt":0,"kind":"MemoryMeasured","step":1,"most":{"x":' + b"9" * 500 + b"}}",
        b"[" * 100_000,
        b'{"a":' * 50_000,
        b"\x00" * 1000,
        b'{"t":"NaN","attempt":0,"kind":"Step"}',
    ],
)
def test_a_hostile_line_costs_itself_alone(tmp_path: Path, line: bytes) -> None:
    write_events(tmp_path, [Event(1.0, 0, step(1, 5))])
    with (tmp_path / "events.jsonl").open("ab") as file:
        file.write(line + b"\n")
    write_events(tmp_path, [Event(3.0, 0, step(2, 5))])
    run = _read(tmp_path)
    assert run.table.column("step")[[0, -1]].tolist() == [1, 2]
    curves(run, run.curve_names())


def test_a_run_directory_that_vanishes_leaves_an_empty_series(tmp_path: Path) -> None:
    run = _read(crashed(tmp_path / "run"))
    (tmp_path / "run" / "events.jsonl").unlink()
    run.refresh()
    assert run.table.rows == 0
    assert curves(run, ["loss"]).x.tolist() == []


def test_a_refresh_ends_when_its_time_is_over_and_records_how_far_it_came(tmp_path: Path) -> None:
    crashed(tmp_path)
    run = RunSeries(tmp_path)
    run._tail._block_bytes = 2000
    run.refresh(budget_s=0.0)
    assert run.unread is not None
    assert 0 < run.unread[0] < run.unread[1]
    while run.unread is not None:
        run.refresh(budget_s=0.0)
    assert run.table.rows == 45


def test_a_range_of_the_axis_comes_with_one_point_beyond_each_end(tmp_path: Path) -> None:
    run = _read(crashed(tmp_path))
    assert curves(run, ["loss"], first=10.5, last=12.5).x.tolist() == [10, 11, 12, 13]
    assert curves(run, ["loss"], first=1e9).x.tolist() == [40]


def test_axes_of_tokens_operations_and_time_have_their_units(tmp_path: Path) -> None:
    run = _read(crashed(tmp_path))
    assert curves(run, ["loss"], "tokens").x[:2].tolist() == [1000, 2000]
    assert curves(run, ["loss"], "flops", flops_per_token=6e6).x[:2].tolist() == [6e9, 12e9]
    assert curves(run, ["loss"], "time").x[:2].tolist() == [
        1.0,
        2.0,
    ]  # seconds since the first start was written


def test_a_curve_that_no_run_has_is_refused_with_those_that_there_are(tmp_path: Path) -> None:
    with pytest.raises(NoSuchCurveError, match="grad_norm"):
        curves(_read(crashed(tmp_path)), ["happiness"])


def test_marks_beyond_the_bound_are_left_out_by_weight_and_counted(tmp_path: Path) -> None:
    events = [Event(float(n), 0, CheckpointSaved(n, "x")) for n in range(1, 1201)]
    write_events(
        tmp_path,
        [
            Event(0.0, 0, step(1, 9)),
            *events,
            Event(9e3, 0, Restored(1, "disk")),
            Event(9e3, 0, Message("info", "a node", IncidentKind.STRAGGLER)),
        ],
    )
    drawn = curves(_read(tmp_path), ["loss"])
    assert drawn.marks_left_out == 202
    assert {"recovery", "straggler"} <= {mark.mark.kind for mark in drawn.marks}


def test_series_beyond_the_bound_of_memory_are_given_up_and_read_again(tmp_path: Path) -> None:
    cache = SeriesCache(most_bytes=1)
    first = cache.get(crashed(tmp_path / "a"))
    cache.get(crashed(tmp_path / "b"))
    assert cache.get(tmp_path / "a") is not first
    assert cache.get(tmp_path / "a").table.rows == 45


def test_recorded_events_are_read_without_being_changed(tmp_path: Path) -> None:
    file = write_events(tmp_path, crashed_run())
    before = file.read_bytes(), sorted(path.name for path in tmp_path.iterdir())
    _read(tmp_path)
    assert (file.read_bytes(), sorted(path.name for path in tmp_path.iterdir())) == before
    assert list(read_events(file)) == crashed_run()


def test_each_figure_of_a_task_is_a_curve_and_their_number_is_bounded(tmp_path: Path) -> None:
    events = [Event(float(number), 0, step(number, 300)) for number in range(1, 5)]
    events += [
        Event(
            9.0,
            0,
            TaskEvaluated(
                step=4, task=f"task-{number}", scored_as="choice", items=2, figures={"accuracy": 0.5}
            ),
        )
        for number in range(300)
    ]
    write_events(tmp_path, events)
    run = _read(tmp_path)
    (line,) = [line for name, line in curves(run, ["task.task-7.accuracy"]).series.items() if "task" in name]
    assert [value for value in np.asarray(line.y).tolist() if not math.isnan(value)] == [0.5]
    assert sum(name.startswith("task.") for name in run.curve_names()) == 256

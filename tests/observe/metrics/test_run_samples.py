"""The metrics of a run directory are those of its events, also if these arrive in pieces or other lines are between them."""

from __future__ import annotations

import random
from itertools import count
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.observe.event_log import EventLog, read_events
from phalanx.observe.events import (
    CheckpointFailed,
    CheckpointSaved,
    Evaluated,
    Event,
    Finished,
    Message,
    NonFinite,
    Restored,
    RunStarted,
    Step,
    encode,
)
from phalanx.observe.goodput import goodput
from phalanx.observe.metrics.exporter import RunSampler
from phalanx.observe.metrics.run_metrics import RunFacts
from phalanx.observe.metrics.samples import Sample
from recorded_runs import run_samples


def step(number: int, seconds: float, loss: float = 2.0, step_s: float = 1.0) -> Step:
    ledger = {"start.process": 3.0, "step.compute": seconds}
    return Step(number, 100, loss, 0.5, 1e-3, 64 * number, 64.0 / step_s, step_s, mfu=0.4, ledger=ledger)


def write(folder: Path, attempts: list[list[object]]) -> Path:
    clock = count(1000.0).__next__
    for attempt, bodies in enumerate(attempts):
        with EventLog(folder / "events.jsonl", attempt, clock) as log:
            for body in bodies:
                log.append(body)  # type: ignore[arg-type]
    return folder


def values(samples: list[Sample]) -> dict[str, float]:
    """Value by name, with the labels beside the run's in brackets."""
    by_name = {}
    for metric, labels, value in samples:
        more = [text for name, text in labels.pairs.items() if name != "run"]
        by_name[metric.name.removeprefix("phalanx_") + (f"[{','.join(more)}]" if more else "")] = value
    return by_name


@pytest.fixture
def run(tmp_path: Path) -> Path:
    first = [RunStarted("tiny", 100, ranks=2, parameters=7), step(1, 1.0), step(2, 2.0), CheckpointSaved(2, "c", 9, 1.0, 0.25), step(3, 3.0)]  # fmt: skip
    second = [RunStarted("tiny", 100, ranks=2), Restored(2, "disk", moved_bytes=5), step(3, 1.0), NonFinite(4, "loss", skipped=True), step(4, 2.0, loss=float("nan"))]  # fmt: skip
    second += [Evaluated(4, 1.5, 0.9, 2.0), Message("warning", "mind"), CheckpointFailed(4, "c", "full")]
    return write(tmp_path, [first, second])


def test_the_newest_numbers_and_the_sums_over_all_attempts_are_there(run: Path) -> None:
    metrics = values(run_samples(run))
    assert metrics["run_steps"] == 100
    assert (metrics["step"], metrics["steps_total"], metrics["lost_steps_total"]) == (4, 5, 1)
    assert metrics["loss"] != metrics["loss"], "not a number"
    assert (metrics["tokens"], metrics["mfu_ratio"], metrics["usual_step_seconds"]) == (256, 0.4, 1.0)
    assert metrics["ledger_seconds_total[step.compute]"] == 3.0 + 2.0
    assert (
        metrics["checkpoints_total"],
        metrics["checkpoint_failures_total"],
        metrics["checkpoint_step"],
    ) == (
        1,
        1,
        2,
    )
    assert (metrics["nonfinite_steps_total"], metrics["skipped_steps_total"]) == (1, 1)
    assert (metrics["evaluations_total"], metrics["evaluation_loss"]) == (1, 1.5)
    assert (
        metrics["attempts_total"],
        metrics["recoveries_total"],
        metrics["recovery_moved_bytes_total"],
    ) == (
        2,
        1,
        5,
    )
    assert metrics["messages_total[warning]"] == 1
    assert metrics["run_state[training]"] == 1


def test_the_label_is_the_run_directory_whose_name_no_other_run_has(run: Path) -> None:
    assert {sample.labels.pairs["run"] for sample in run_samples(run)} == {run.name}


def test_a_run_without_events_has_no_samples(tmp_path: Path) -> None:
    assert run_samples(tmp_path) == []
    assert run_samples(tmp_path / "missing") == []


@given(st.lists(st.integers(1, 400), max_size=30))
def test_a_stream_that_is_read_in_pieces_has_the_metrics_of_one_that_is_read_at_once(
    tmp_path_factory: pytest.TempPathFactory, cuts: list[int]
) -> None:
    folder = tmp_path_factory.mktemp("run")
    write(folder, [[RunStarted("r", 9), *(step(n, float(n)) for n in range(1, 9)), Finished({})]])
    content = (folder / "events.jsonl").read_bytes()
    grown = folder / "grown"
    grown.mkdir()
    sampler, at = RunSampler(grown, run=folder.name), 0
    for cut in cuts:
        (grown / "events.jsonl").write_bytes(content[: at + cut])
        at += cut
        sampler.catch_up(1.0)
    (grown / "events.jsonl").write_bytes(content)
    assert values(sampler.samples()) == values(run_samples(folder))


def test_lines_that_are_no_events_are_counted_and_change_nothing_else(run: Path) -> None:
    before = values(run_samples(run))
    log = run / "events.jsonl"
    nonsense = [b"\x00\xff", b'{"t":1,"attempt":0,"kind":"Step"', b"[" * 100_000, b'{"t":"NaN","attempt":0,"kind":"Step","step":3}', b"null"]  # fmt: skip
    log.write_bytes(log.read_bytes() + b"\n".join(nonsense) + b"\n")
    after = values(run_samples(run))
    assert after.pop("torn_events_total") == len(nonsense)
    assert {name: value for name, value in before.items() if name not in ("torn_events_total", "loss")} == {
        name: value for name, value in after.items() if name != "loss"
    }


def test_another_file_of_the_name_is_read_from_its_beginning(run: Path) -> None:
    sampler = RunSampler(run)
    assert values(sampler.samples())["step"] == 4
    (run / "events.jsonl").unlink()
    write(run, [[RunStarted("tiny", 5), step(1, 1.0)]])
    assert values(sampler.samples())["step"] == 1


def test_a_long_stream_is_read_in_looks_of_a_bounded_time(tmp_path: Path) -> None:
    line = encode(Event(1.0, 0, step(1, 1.0)))
    (tmp_path / "events.jsonl").write_bytes(line * 20_000)
    sampler = RunSampler(tmp_path)
    assert not sampler.catch_up(0.0)
    assert sampler.catch_up(60.0)
    assert values(sampler.samples())["steps_total"] == 20_000


def events_of(attempts: int, seed: int) -> list[Event]:
    """A long run with restarts, as its events."""
    draw, done, t, events = random.Random(seed), 0, 0.0, list[Event]()
    for attempt in range(attempts):
        resumed = max(0, done - draw.randrange(30))
        seconds = {"start.process": draw.random(), "step.compute": 0.0}
        t += seconds["start.process"]
        events += [Event(t, attempt, RunStarted("r", 10**6)), Event(t, attempt, Restored(resumed, "memory"))]
        for number in range(resumed + 1, resumed + draw.randrange(40, 3000)):
            seconds["step.compute"] += 1.0
            t, done = t + 1.0, number
            events.append(
                Event(t, attempt, Step(number, 10**6, 1.0, 1.0, 1.0, 1, 1.0, 1.0, ledger=dict(seconds)))
            )
            if number % 10 == 0:
                events.append(Event(t, attempt, CheckpointSaved(number, "c")))
    return events


@pytest.mark.parametrize("seed", range(3))
def test_goodput_of_a_long_run_is_that_of_the_whole_stream_though_old_ledgers_are_thinned(seed: int) -> None:
    events, facts = events_of(6, seed), RunFacts()
    for event in events:
        facts.take(encode(event))
    exact = goodput(events)
    assert len(facts._ledgers) < 4500
    assert facts.goodput.total_ns == exact.total_ns
    assert facts.goodput.goodput_if_kept == pytest.approx(exact.goodput_if_kept, rel=1e-9)


def test_the_sums_are_those_of_the_goodput_report_on_a_run_that_another_process_wrote(run: Path) -> None:
    report = goodput(read_events(run / "events.jsonl"))
    metrics = values(run_samples(run))
    assert metrics["goodput_ratio"] == report.goodput_if_kept
    assert metrics["outcome_seconds[rollback]"] == report.rollback_ns / 1e9

"""A tracker may hang, fail or be missing: training does not notice."""

import math
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from observe.recorded import crashed_run, step
from phalanx.observe.events import Evaluated, Event, LayerStatistics, Message, Sampled, TaskEvaluated, encode
from phalanx.observe.sink_registry import SinkError, Vendor, fill_sink, missing_points, open_sinks
from phalanx.observe.sinks import (
    FAILURES_IN_A_ROW,
    Background,
    Sink,
    SinkHealth,
    close_sinks,
    hyperparameters,
    kind_of_tag,
    point_of,
    scalars,
    step_of,
)
from traced_memory import peak_and_found

PATIENCE_S = 100.0


class Recording:
    """Sink that keeps its events, of a tracker that has ``points`` already."""

    def __init__(self, points: set[tuple[str, int]] | None = None) -> None:
        self.events: list[Event] = []
        self.points: set[tuple[str, int] | None] = {*(points or ())}
        self.closed = False

    def holds(self, event: Event) -> bool:
        return point_of(event) in self.points

    def write(self, event: Event) -> None:
        self.events.append(event)

    def close(self) -> None:
        self.closed = True


class Gated(Recording):
    """Sink that hangs at its first event until ``go`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.reached, self.go = threading.Event(), threading.Event()

    def write(self, event: Event) -> None:
        self.reached.set()
        self.go.wait()
        super().write(event)


class Failing(Recording):
    """Sink that raises for every step in ``bad``."""

    def __init__(self, bad: set[int]) -> None:
        super().__init__()
        self.bad = bad

    def write(self, event: Event) -> None:
        if step_of(event) in self.bad:
            raise ConnectionError("no route to tracker")
        super().write(event)


def steps(count: int) -> list[Event]:
    return [Event(float(number), 0, step(number, count)) for number in range(1, count + 1)]


def accounted(health: SinkHealth) -> int:
    return health.written + health.waiting + health.dropped + health.failed


def test_every_event_arrives_in_order_and_the_sink_is_closed() -> None:
    sink = Recording()
    background = Background("x", lambda: sink)
    assert all(background.offer(event) for event in crashed_run())
    health = background.close(PATIENCE_S)
    assert sink.events == crashed_run()
    assert sink.closed
    assert health == SinkHealth("x", len(crashed_run()), 0, 0, 0, "", given_up=False)


def test_a_hanging_sink_costs_drops_that_are_counted_and_nothing_else() -> None:
    sink = Gated()
    background = Background("x", lambda: sink, queue_events=10)
    background.offer(steps(1)[0])
    sink.reached.wait()
    taken = [background.offer(event) for event in steps(100)]
    assert sum(taken) == 10
    health = background.close(0.05)
    assert health.given_up
    assert "did not finish within 0.05 s" in health.last_error
    assert accounted(health) == 101
    sink.go.set()


def test_a_sink_left_behind_writes_nothing_more_when_it_wakes() -> None:
    sink = Gated()
    background = Background("x", lambda: sink)
    for event in steps(5):
        background.offer(event)
    sink.reached.wait()
    background.close(0.01)
    sink.go.set()
    background._thread.join()
    assert len(sink.events) == 1


def test_a_failure_now_and_then_is_counted_and_survived() -> None:
    sink = Failing({2, 4, 6})
    background = Background("x", lambda: sink)
    for event in steps(8):
        background.offer(event)
    health = background.close(PATIENCE_S)
    assert [step_of(event) for event in sink.events] == [1, 3, 5, 7, 8]
    assert (health.written, health.failed, health.given_up) == (5, 3, False)
    assert "no route to tracker" in health.last_error


def test_a_sink_that_keeps_failing_is_given_up_with_its_reason() -> None:
    background = Background("x", lambda: Failing(set(range(100))))
    for event in steps(20):
        background.offer(event)
    health = background.close(PATIENCE_S)
    assert health.given_up
    assert health.failed == FAILURES_IN_A_ROW
    assert "ConnectionError: no route to tracker" in health.last_error
    assert accounted(health) == 20
    assert background.offer(steps(1)[0]) is False


def test_a_sink_that_cannot_be_opened_is_reported_not_raised() -> None:
    def refuse() -> Sink:
        raise PermissionError("log in first")

    background = Background("x", refuse)
    health = background.close(PATIENCE_S)
    assert "could not be opened: PermissionError: log in first" in health.last_error


def test_a_sink_that_hangs_while_opening_does_not_delay_the_start() -> None:
    forever = threading.Event()

    def open_sink() -> Sink:
        forever.wait()
        return Recording()

    background = Background("x", open_sink)
    assert background.offer(steps(1)[0])
    assert background.close(0.01).given_up
    forever.set()


def test_several_sinks_are_closed_at_the_same_time() -> None:
    meeting = threading.Barrier(4)

    class Meeting(Recording):
        def close(self) -> None:
            meeting.wait()  # for ever, if the sinks were closed one after the other

    sinks = [Background(str(i), Meeting) for i in range(4)]
    healths = close_sinks(sinks, PATIENCE_S)
    assert [(health.name, health.given_up) for health in healths] == [(str(i), False) for i in range(4)]


def test_a_process_exits_while_its_sink_hangs_for_ever() -> None:
    code = """
import threading
from phalanx.observe.events import Event, Message
from phalanx.observe.sinks import Background
class Hanging:
    def holds(self, event): return False
    def write(self, event): threading.Event().wait()
    def close(self): threading.Event().wait()
sink = Background("x", Hanging)
sink.offer(Event(0.0, 0, Message("info", "x")))
print(sink.close(0.1).given_up)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "True\n"


def test_a_missing_package_is_named_with_the_command_that_installs_it(tmp_path: Path) -> None:
    vendors = {"abacus": Vendor("abacus_not_installed", lambda *_: Recording())}
    with pytest.raises(SinkError, match="pip install abacus_not_installed"):
        open_sinks(["abacus"], tmp_path, "run", vendors)


@pytest.mark.parametrize(("wrong", "nearest"), [("tensorbord", "tensorboard"), ("wand", "wandb")])
def test_an_unknown_sink_is_refused_with_the_nearest_and_those_there_are(
    wrong: str, nearest: str, tmp_path: Path
) -> None:
    refusal = rf"'{wrong}' is not known: one of 'mlflow', 'otel', 'tensorboard', 'trackio', 'wandb'; did you mean '{nearest}'\?"
    with pytest.raises(SinkError, match=refusal):
        open_sinks([wrong], tmp_path, "run")


def test_each_named_sink_is_opened_with_the_directory_and_the_run(tmp_path: Path) -> None:
    opened: dict[str, tuple[Path, str]] = {}

    def vendor(name: str) -> Vendor:
        def open_sink(directory: Path, run: str) -> Sink:
            opened[name] = (directory, run)
            return Recording()

        return Vendor("json", open_sink)

    close_sinks(open_sinks(["a", "b"], tmp_path, "run", {"a": vendor("a"), "b": vendor("b")}), PATIENCE_S)
    assert opened == {"a": (tmp_path, "run"), "b": (tmp_path, "run")}


def test_numbers_that_were_not_measured_are_not_sent() -> None:
    tags = scalars(Event(1.0, 0, step(3, 9, mfu=0.4)))
    assert tags["speed/mfu"] == 0.4
    assert "speed/goodput" not in tags
    assert scalars(Event(1.0, 0, Evaluated(3, 2.0))) == {"eval/loss": 2.0}
    assert scalars(Event(1.0, 0, Message("info", "x"))) == {}


def test_a_wait_for_slow_trackers_is_logged_and_then_everything_has_arrived() -> None:
    sink, messages = Gated(), []
    background = Background("slow", lambda: sink)
    assert all(background.offer(event) for event in steps(30))

    def log(text: str) -> None:
        messages.append(text)
        sink.go.set()

    (health,) = close_sinks([background], 60.0, log, silent_s=0.01)
    assert messages == ["waiting for slow to take what the run has sent, for at most 60 s"]
    assert (health.written, health.dropped) == (30, 0)
    assert sink.closed


def test_nothing_is_logged_of_a_tracker_that_keeps_up() -> None:
    messages: list[str] = []
    close_sinks([Background("quick", Recording)], 60.0, messages.append, silent_s=60.0)
    assert messages == []


def test_the_resolved_run_file_is_flattened_for_trackers(tmp_path: Path) -> None:
    assert hyperparameters(tmp_path) == {}
    (tmp_path / "run.toml").write_text(
        'name = "a"\n[optimizer]\nlr = 0.1\n[model.moe]\nexperts = 4\n[observe]\nsinks = ["wandb"]\n'
    )
    assert hyperparameters(tmp_path) == {
        "name": "a",
        "optimizer.lr": 0.1,
        "model.moe.experts": 4,
        "observe.sinks": "['wandb']",
    }


def test_a_sink_is_filled_with_every_event_and_its_own_folder_is_emptied_before(tmp_path: Path) -> None:
    sink = Recording()
    vendors = {"x": Vendor("json", lambda _directory, _run: sink, "x-files")}
    (tmp_path / "x-files").mkdir()
    (tmp_path / "x-files" / "old").touch()
    assert fill_sink("x", tmp_path, "run", crashed_run(), vendors) == len(sink.events)
    assert {point_of(event) for event in sink.events} == {point_of(event) for event in crashed_run()}
    assert sink.events[0] == crashed_run()[0]
    assert sink.closed
    assert not (tmp_path / "x-files").exists()


def test_a_tracker_that_fails_while_it_is_filled_loses_nothing_of_what_it_had(tmp_path: Path) -> None:
    vendors = {"x": Vendor("json", lambda _directory, _run: Failing({1}), "x-files")}
    (tmp_path / "x-files").mkdir()
    (tmp_path / "x-files" / "old").touch()
    with pytest.raises(SinkError, match=r"no route to tracker.*try again"):
        fill_sink("x", tmp_path, "run", steps(2), vendors)
    assert [path.name for path in tmp_path.rglob("*")] == ["x-files", "old"]


# --- after a crash ---------------------------------------------------------------------------------


def stream(path: Path, events: list[Event]) -> Path:
    """The event stream of a run directory."""
    (path / "events.jsonl").write_bytes(b"".join(map(encode, events)))
    return path


def steps_of(sink: Recording) -> list[int | None]:
    return [step_of(event) for event in sink.events]


def test_a_start_sends_what_the_killed_one_had_not_and_no_step_twice(tmp_path: Path) -> None:
    first = steps(50)
    sink = Recording({("Step", number) for number in range(1, 37)})
    vendors = {"x": Vendor("json", lambda *_: sink)}
    (background,) = open_sinks(["x"], stream(tmp_path, first), "r", vendors)
    again = [Event(100.0 + number, 1, step(number, 80)) for number in range(41, 81)]
    assert all(background.offer(event) for event in again)
    health = background.close(60)
    assert steps_of(sink) == list(range(37, 81))
    assert (health.written, health.dropped, health.failed) == (40, 0, 0)


def test_a_tracker_that_holds_nothing_gets_a_long_run_from_its_beginning(tmp_path: Path) -> None:
    path = stream(tmp_path, steps(50)) / "events.jsonl"
    for most_lines in (10, 1000):
        missing = missing_points(path, lambda _: False, most_lines=most_lines)
        assert [step_of(event) for event in missing] == list(range(1, 51))
    assert [step_of(event) for event in missing_points(path, lambda event: step_of(event) in (1, 48))] == [
        49,
        50,
    ]


def test_a_line_without_end_in_a_long_stream_takes_no_memory(tmp_path: Path) -> None:
    path = stream(tmp_path, steps(50)) / "events.jsonl"
    content = path.read_bytes()
    with path.open("wb") as file:
        file.truncate(1 << 28)  # one line of zeros, which takes no disk
        file.seek(0, os.SEEK_END)
        file.write(b"\n" + content)
    peak, number = peak_and_found(
        tmp_path,
        "from pathlib import Path; from phalanx.observe.sink_registry import missing_points",
        f"found = sum(1 for _ in missing_points(Path({str(path)!r}), lambda _: False, most_lines=10))",
    )
    assert number == 50
    assert peak < 1 << 26


def test_a_fill_sends_what_is_missing_in_the_middle_and_no_step_twice(tmp_path: Path) -> None:
    sink = Recording({("Step", number) for number in (*range(1, 6), *range(9, 21))})
    events = [*steps(20), *steps(12)]
    sent = fill_sink("x", tmp_path, "r", events, {"x": Vendor("json", lambda *_: sink)})
    assert (sent, steps_of(sink)) == (3, [6, 7, 8])


def tensorboard_values(run_dir: Path) -> list[tuple[str, int, bytes]]:
    """Tag, step and text of all values in the event files; what a killed writer left torn is left out."""
    EventFileReader = pytest.importorskip("tensorboardX.proto.event_pb2").Event
    values = []
    for path in (run_dir / "tensorboard").glob("events.*"):
        data, at = path.read_bytes(), 0
        while at + 12 <= len(data):
            size = int.from_bytes(data[at : at + 8], "little")
            if at + 16 + size <= len(data):
                record = EventFileReader.FromString(data[at + 12 : at + 12 + size])
                for value in record.summary.value:
                    values.append((value.tag, record.step, b"".join(value.tensor.string_val)))
            at += 16 + size
    return values


def test_tensorboard_after_a_kill_has_every_step_once(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    for attempt, (first, last) in enumerate(((1, 50), (41, 80))):
        events = [Event(100.0 * attempt + n, attempt, step(n, 80)) for n in range(first, last + 1)]
        (sink,) = open_sinks(["tensorboard"], tmp_path, "r")
        with (tmp_path / "events.jsonl").open("ab") as file:
            for event in events:
                file.write(encode(event))
                sink.offer(event)
        assert sink.close(60).last_error == ""
        if attempt == 0:  # the newest bytes of a killed process are not there
            (written,) = (tmp_path / "tensorboard").glob("events.*")
            written.write_bytes(written.read_bytes()[:-1000])
            written.rename(written.with_name("events.out.tfevents.0000000001.host"))
    logged_steps = [step for tag, step, _ in tensorboard_values(tmp_path) if tag == "train/loss"]
    assert sorted(logged_steps) == list(range(1, 81))


def test_each_task_has_points_and_tags_of_its_own() -> None:
    figures = {"accuracy": 0.5, "bits_per_byte": 1.25}
    event = Event(1.0, 0, TaskEvaluated(step=3, task="sums", scored_as="choice", items=4, figures=figures))
    tags = scalars(event)
    assert tags == {"task/sums/accuracy": 0.5, "task/sums/bits_per_byte": 1.25}
    assert {kind_of_tag(tag) for tag in tags} == {None, "TaskEvaluated sums"}
    assert point_of(event) == ("TaskEvaluated sums", 3)
    assert [kind_of_tag(tag) for tag in ("train/loss", "eval/loss", "train/lr")] == [
        "Step",
        "Evaluated",
        None,
    ]


def test_statistics_of_layers_have_a_tag_for_each_layer_and_figure() -> None:
    figures = {"residual.rms": [0.5, 0.25], "attention.weight_norm": [None, math.inf]}
    event = Event(1.0, 0, LayerStatistics(step=3, layers=["embedding", "0"], figures=figures))
    assert scalars(event) == {
        "layer/embedding/residual/rms": 0.5,
        "layer/0/residual/rms": 0.25,
        "layer/0/attention/weight_norm": math.inf,
    }
    assert point_of(event) == ("LayerStatistics", 3)
    assert kind_of_tag("layer/0/residual/rms") == "LayerStatistics"


def test_a_sample_is_text_in_tensorboard_once(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    sample = Event(1.0, 0, Sampled(step=3, sample="story", prompt="Once", text=" upon", tokens=[1]))
    (tmp_path / "events.jsonl").write_bytes(encode(sample) + encode(Event(2.0, 0, step(3, 9))))
    for attempt in range(2):  # the second start finds it there
        (sink,) = open_sinks(["tensorboard"], tmp_path, "run")
        assert sink.offer(sample)
        assert sink.close(60).last_error == ""
        for written in (tmp_path / "tensorboard").glob("events.out.tfevents.*.*"):
            written.rename(written.with_name(f"events.out.tfevents.000000000{attempt}"))
    texts = [value for value in tensorboard_values(tmp_path) if kind_of_tag(value[0]) == "Sampled story"]
    assert [value[1:] for value in texts] == [(3, b"```\nOnce upon\n```")]


def test_a_tracker_that_lacks_the_tasks_of_an_evaluation_gets_them(tmp_path: Path) -> None:
    events = [
        Event(1.0, 0, step(2, 9)),
        Event(2.0, 0, Evaluated(2, 3.0)),
        *(
            Event(
                3.0,
                0,
                TaskEvaluated(step=2, task=task, scored_as="text", items=1, figures={"bits_per_byte": 2.0}),
            )
            for task in ("one", "other")
        ),
    ]
    (tmp_path / "events.jsonl").write_bytes(b"".join(map(encode, events)))
    points = {("Step", 2), ("Evaluated", 2), ("TaskEvaluated one", 2)}
    sent = [point_of(event) for event in missing_points(tmp_path / "events.jsonl", Recording(points).holds)]
    assert sent == [("TaskEvaluated other", 2)]

"""Measurements of ranks: the same table on all of them, the slow one's own time, and one stream over restarts."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from observe.rank_frames import read
from phalanx.checkpoint.save.saver import AsyncSaver
from phalanx.fleet.health.stragglers import StragglerWatch
from phalanx.hardware.local.device import CommClock, QueueEvent, QueueTimes
from phalanx.observe.event_log import read_events
from phalanx.observe.events import Message
from phalanx.observe.ledger import Bucket
from phalanx.observe.rank_stream import RankFrame
from phalanx.run.spec import ObserveSpec, RunSpec
from phalanx.train.lifecycle.guardian import Guardian, Samples
from phalanx.train.step.state import Built
from phalanx.train.step.step import Audit, Stepper
from ranks import Ranks
from tiny_runs import on_layout, tiny_run, train_on_this_rank

SLOW_S = 0.03
"""By so much longer, or twice as long as it took to come here, a planted slow rank computes at each slot: a rank beside it waits for it
on a loaded machine, too."""
_MOST_SLOW_S = 0.5


class Watching(Guardian):
    """Compares the measurements that all ranks received, and may slow its rank down."""

    def __init__(
        self, window: int, slow_rank: int = -1, accused: Path = Path(), *, pauses_once: bool = False
    ) -> None:
        """``accused`` is made once the straggler watch names the slow rank. With ``pauses_once`` only its first slot is slow."""
        self._window, self._slow_rank, self._accused = window, slow_rank, accused
        self._pauses_once = pauses_once
        self._communicated_s = [0.0]
        """Exposed seconds of communication up to each window's end."""

    def assembled(self, built: Built, saver: AsyncSaver) -> None:  # noqa: ARG002
        self._watch = StragglerWatch(built.model.mesh.layout, self._window)
        if dist.get_rank() == self._slow_rank:
            end = built.model.end
            since_s = time.monotonic()

            def slowly(*args: Any) -> Any:
                nonlocal since_s
                if self._pauses_once:
                    vars(built.model)["end"] = end
                    time.sleep(_MOST_SLOW_S)
                    return end(*args)
                time.sleep(min(max(SLOW_S, 2 * (time.monotonic() - since_s)), _MOST_SLOW_S))
                since_s = time.monotonic()
                return end(*args)

            vars(built.model)["end"] = slowly

    def audit(self, stepper: Stepper, samples: Samples) -> Audit | None:  # noqa: ARG002
        self._ledger = stepper.ledger
        return None

    def window_steps(self) -> int:
        return self._window

    def measured(self, frame: RankFrame) -> None:
        mine = frame.step, frame.steps, {name: values.tobytes() for name, values in frame.columns.items()}
        tables: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(tables, mine)
        assert all(table == mine for table in tables)
        if self._slow_rank in {straggler.rank for straggler in self._watch.look(frame)}:
            self._accused.touch()
        self._communicated_s.append(self._ledger.seconds()[Bucket.COMM_EXPOSED_DP])
        typical_s: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(typical_s, np.median(np.diff(self._communicated_s)))
        if self._slow_rank >= 0:
            self._accused.with_name("least communication").write_text(str(np.argmin(typical_s)))


def every(spec: RunSpec, steps: int) -> RunSpec:
    return dataclasses.replace(spec, observe=ObserveSpec(ranks_every_steps=steps))


class Moment(QueueEvent):
    """A place in the queue of a device on which all has happened when a call returns: this processor."""

    def record(self) -> None:
        self.at_s = time.monotonic()

    def elapsed_time(self, end: Any, /) -> float:
        assert isinstance(end, Moment)
        return (end.at_s - self.at_s) * 1e3


def train_by_a_queue(*args: Any) -> Any:
    """``train_on_this_rank``, whose waits are measured as on a device whose collectives do not block the host."""

    def of(cls: type[CommClock], device: torch.device) -> CommClock:  # noqa: ARG001
        return cls(blocking=False, queue=QueueTimes(lambda: 0, Moment))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(CommClock, "of", classmethod(of))
        return train_on_this_rank(*args)


def test_what_a_device_waits_for_collectives_is_no_computing(
    ranks: Ranks, dataset: Path, tmp_path: Path
) -> None:
    spec = on_layout(every(tiny_run(dataset, tmp_path / "run", steps=4), 1), "zero3", 2)
    ranks.run(2, train_by_a_queue, spec, None, Watching(1, 1, tmp_path / "accused"))
    for frame in read(tmp_path / "run" / "ranks.bin"):
        assert frame.columns["compute_s"][1] > SLOW_S
    # The other one waits for it.
    assert (tmp_path / "least communication").read_text() == "1"


def test_a_planted_slow_rank_stands_out_in_every_frame_and_is_named_by_the_straggler_watch(
    ranks: Ranks, dataset: Path, tmp_path: Path
) -> None:
    spec = every(tiny_run(dataset, tmp_path / "run", steps=7), 1)
    ranks.run(2, train_on_this_rank, spec, None, Watching(1, 1, tmp_path / "accused"))
    frames = read(tmp_path / "run" / "ranks.bin")
    assert [frame.step for frame in frames] == [1, 2, 3, 4, 5, 6, 7]
    for frame in frames:
        assert frame.columns["compute_s"][1] > SLOW_S
    typical = np.median([frame.columns["compute_s"] for frame in frames], axis=0)
    assert typical.argmax() == 1
    assert (tmp_path / "accused").exists()
    # The other rank waits for it and so communicates longer: by communication that one would be accused.
    assert (tmp_path / "least communication").read_text() == "1"


def test_a_window_has_the_mean_of_its_steps_so_that_a_pause_in_one_of_them_shows(
    ranks: Ranks, dataset: Path, tmp_path: Path
) -> None:
    spec = every(tiny_run(dataset, tmp_path / "run", steps=5), 5)
    ranks.run(2, train_on_this_rank, spec, None, Watching(5, 1, tmp_path / "accused", pauses_once=True))
    (frame,) = read(tmp_path / "run" / "ranks.bin")
    own_slots = spec.train.slots / 2
    assert frame.columns["compute_s"][1] * frame.steps * own_slots > 0.99 * _MOST_SLOW_S  # two bytes a number


@pytest.mark.parametrize("layout", [("none", 0), ("zero3", 2)])
def test_all_ranks_receive_the_same_numbers(
    ranks: Ranks, dataset: Path, tmp_path: Path, layout: tuple[str, int]
) -> None:
    spec = on_layout(every(tiny_run(dataset, tmp_path / "run"), 2), *layout)
    ranks.run(2, train_on_this_rank, spec, None, Watching(3))
    frames = read(tmp_path / "run" / "ranks.bin")
    assert [(frame.step, frame.steps) for frame in frames] == [(2, 2), (3, 1), (4, 1), (6, 2)]
    for frame in frames:
        assert frame.ranks == 2
        assert (frame.columns["compute_s"] > 0).all()
        assert (frame.columns["data_wait_s"] >= 0).all()
        assert (frame.columns["memory_bytes"] > 1 << 20).all()
        assert np.isnan(frame.columns["temperature_c"]).all()  # a CPU reports none


def test_a_run_that_crashed_and_goes_on_with_more_ranks_goes_on_in_the_same_file(
    ranks: Ranks, dataset: Path, tmp_path: Path
) -> None:
    spec = every(tiny_run(dataset, tmp_path / "run"), 2)
    ranks.run(2, train_on_this_rank, spec, 6)
    ranks.run(3, train_on_this_rank, spec)
    frames = read(tmp_path / "run" / "ranks.bin")
    assert [(frame.attempt, frame.ranks) for frame in frames][:2] == [(0, 2), (0, 2)]
    assert {(frame.attempt, frame.ranks) for frame in frames[2:]} == {(1, 3)}
    assert [frame.step for frame in frames if frame.attempt == 0] == [2, 4]
    assert frames[-1].step == 6


def test_nothing_is_written_or_exchanged_if_nobody_wants_it(
    ranks: Ranks, dataset: Path, tmp_path: Path
) -> None:
    spec = every(tiny_run(dataset, tmp_path / "run", steps=2), 0)
    ranks.run(2, train_on_this_rank, spec)
    assert not (tmp_path / "run" / "ranks.bin").exists()


def test_a_stream_that_cannot_be_written_costs_one_warning_and_no_step(
    ranks: Ranks, dataset: Path, tmp_path: Path
) -> None:
    spec = every(tiny_run(dataset, tmp_path / "run"), 1)
    (tmp_path / "run" / "ranks.bin").mkdir(parents=True)
    result, *_ = ranks.run(2, train_on_this_rank, spec)
    assert result["step"] == 6
    events = [event.body for event in read_events(tmp_path / "run" / "events.jsonl")]
    warnings = [
        event_body.text
        for event_body in events
        if isinstance(event_body, Message) and "ranks.bin" in event_body.text
    ]
    assert len(warnings) == 1
    assert "training continues" in warnings[0]

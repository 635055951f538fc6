"""A request to stop in the first step of two real ranks, at several places of each: they agree on what is saved, and the run goes on."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

import forked_python
from phalanx.data.reading.sources import read_index
from phalanx.launch.local import run_locally
from phalanx.observe.event_log import read_events
from phalanx.observe.events import Stopped
from phalanx.run.directory.paths import RunDirectory
from phalanx.run.spec import RunSpec
from phalanx.train.lifecycle.ending import Ending
from phalanx.train.start.open_run import OpenRun, open_run
from tiny_runs import tiny_run

PROGRAM = "train.lifecycle.stopping_rank"


@contextmanager
def opened(spec: RunSpec) -> Iterator[OpenRun]:
    """The run's directory, taken for one start."""
    run = open_run(spec, read_index(Path(spec.data.path)).fingerprint, Path(spec.data.path))
    try:
        yield run
    finally:
        os.close(run.lock_fd)


def stopped_at(spec: RunSpec, places: str, monkeypatch: pytest.MonkeyPatch, *packages: str) -> Ending:
    """How a start of two ranks ends that gets the request when each rank is at its place."""
    monkeypatch.setenv("STOPPED_AT", places)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[2]), *packages]))

    def stop_once_there(ended: Callable[[], bool]) -> None:
        while not all((run.directory.path / f"at-{rank}").exists() for rank in range(2)):
            assert not ended()
        os.kill(os.getpid(), signal.SIGTERM)

    with opened(spec) as run:
        return run_locally(run, 2, stop_once_there, program=PROGRAM)


def finished(spec: RunSpec) -> str:
    """The weights' hash of the run, trained to its end on one rank, which is forked."""
    with opened(spec) as run, pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", forked_python.Popen)
        assert run_locally(run, 1, lambda _ended: None).status == "finished"
        result = run.directory.finished_result()
    assert result is not None
    return result.weights_sha256


@pytest.fixture(scope="module")
def undisturbed(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights' hash of a run that nobody stops."""
    return finished(tiny_run(dataset, tmp_path_factory.mktemp("undisturbed") / "run", steps=3))


@pytest.mark.parametrize(
    ("places", "saved_step"),
    [
        ("behind step_ended,before step_ended", 2),
        ("behind join_step,behind join_step", 2),
        ("before join_step,passing before join_step", 0),
    ],
)
def test_ranks_that_are_stopped_in_their_first_step_save_the_same_step_or_none(
    dataset: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    places: str,
    saved_step: int,
    undisturbed: str,
) -> None:
    spec = tiny_run(dataset, tmp_path / "run", steps=3)
    ending = stopped_at(spec, places, monkeypatch)
    assert (ending.status, ending.message) == ("stopped", "")
    directory = RunDirectory(tmp_path / "run")
    (stopped,) = (event.body for event in read_events(directory.events) if isinstance(event.body, Stopped))
    assert stopped.step == saved_step
    assert len(list(directory.checkpoints.glob("step-*"))) == (saved_step > 0)
    assert finished(spec) == undisturbed


TRACKER = """
from pathlib import Path

from phalanx.observe.sink_registry import Vendor


class Notebook:
    def __init__(self, folder, run):
        self._file = folder / "notebook"
        self._write("opened")

    def holds(self, event):
        return False

    def write(self, event):
        self._write(type(event.body).__name__)

    def close(self):
        self._write("closed")

    def _write(self, line):
        with self._file.open("a") as file:
            file.write(line + chr(10))


VENDOR = Vendor(__name__, Notebook)
"""


def test_a_tracker_is_closed_by_a_stop_in_the_first_step(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "packages" / "notebook-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: notebook\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[phalanx.sinks]\nnotebook = notebook_tracker:VENDOR\n")
    (info.parent / "notebook_tracker.py").write_text(TRACKER)
    spec = tiny_run(dataset, tmp_path / "run", steps=3)
    spec = replace(spec, observe=replace(spec.observe, sinks=("notebook",)))
    places = "before join_step,passing before join_step"
    ending = stopped_at(spec, places, monkeypatch, str(info.parent))
    assert (ending.status, ending.message) == ("stopped", "")
    lines = (tmp_path / "run" / "notebook").read_text().split()
    assert (lines[0], lines[-2:]) == ("opened", ["Stopped", "closed"])

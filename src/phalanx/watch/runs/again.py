"""Trains a run again, in a directory of its own, by its own resolved run file.

What belongs to the fleet is made fit for this machine: no nodes, no engine, no trackers, and no object store, which is the first run's. None of
that changes a bit. To repeat only the first steps, the new run is stopped once it has logged them: a smaller ``train.steps`` would be another run,
whose learning rate falls sooner.
"""

from __future__ import annotations

import math
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import tomli_w

from phalanx.process.child import Child
from phalanx.run.data_folders import found_again
from phalanx.run.directory.paths import RunDirectory, RunDirectoryError
from phalanx.run.identity import identity
from phalanx.run.read import to_table
from phalanx.run.spec import FleetSpec, LaunchSpec, RunSpec
from phalanx.watch.runs.tail import read_tail

_POLL_S = 0.5
_STOPPED = 75


def free_directory(run_dir: Path) -> Path:
    """A directory beside a run for its reproduction, which is not there yet."""
    number = 1
    while (place := run_dir.with_name(f"{run_dir.name}-again{f'-{number}' if number > 1 else ''}")).exists():
        number += 1
    return place


def again(spec: RunSpec, directory: RunDirectory, into: Path, ranks: int) -> RunSpec:
    """The run as it is to be trained again on this machine. Its identity is the same."""
    data = found_again(spec.data, directory.read_record())
    made = replace(
        spec,
        run_dir=str(into),
        data=data,
        parallel=replace(spec.parallel, ranks=ranks),
        checkpoint=replace(spec.checkpoint, store=""),
        observe=replace(spec.observe, sinks=()),
        fleet=FleetSpec(),
        launch=LaunchSpec(),
    )
    assert identity(made) == identity(spec)
    return made


def write_run_file(spec: RunSpec, into: Path) -> Path:
    """Writes the run file beside the directory that is to be made. Raises ``RunDirectoryError`` if there is one."""
    if into.exists() and any(into.iterdir()):
        raise RunDirectoryError(f"{into} is not empty; give another --into")
    into.parent.mkdir(parents=True, exist_ok=True)
    table = to_table(spec)
    table["model"] = {**table["model"], "preset": ""}  # its fields are all there
    file = into.with_name(f"{into.name}.toml")
    file.write_bytes(tomli_w.dumps(table).encode())
    return file


def train_again(
    run_file: Path,
    into: RunDirectory,
    steps: int | None,
    on_step: Callable[[int], None] = lambda _step: None,
    command: Sequence[str] = (sys.executable, "-m", "phalanx", "train"),
) -> int:
    """Trains until the end, or until ``steps`` are logged and it has stopped; returns the exit code of the training.

    What it prints goes to stderr. If this process is interrupted, so is the training, which saves: the same command goes on with it.
    """
    training, stopped = Child.start([*command, str(run_file)]), False
    try:
        while training.wait(_POLL_S) is None:
            step = read_tail(into.events).step
            on_step(step.step if step else 0)
            if steps is not None and step is not None and step.step >= steps and not stopped:
                stopped = True
                training.signal(signal.SIGTERM)
    except BaseException:
        if not stopped:  # a second request would end it without saving
            training.signal(signal.SIGTERM)
        training.wait(math.inf)
        raise
    finally:
        code = training.end()
    return 0 if code == _STOPPED and steps is not None else code

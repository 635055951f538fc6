"""The Python interface: training, a run directory to look at, and weights. ``phalanx`` itself offers these names.

Training starts the same run, ranks and directory as ``phalanx train``. Ranks are processes of their own here too,
started by the same launchers, so that a crash of a rank, a stop and a recovery are what they are from the command line;
the calling process trains nothing and needs no guard against being imported again. On the main thread Ctrl-C is handed
on to the ranks, which save and stop; on another one nothing is, since Python lets only the main thread handle signals,
and what ``on_event`` raises is the way to stop.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.checkpoint.committed.digest import WEIGHTS, digest_checkpoint
from phalanx.checkpoint.format.boxes import full_box
from phalanx.checkpoint.tiers.disk import DiskTier
from phalanx.checkpoint.tiers.tier import ReadableTier
from phalanx.fleet.node.launcher import LocalFleet
from phalanx.fleet.node.processes import run_fleet
from phalanx.launch.local import ranks_on_this_machine, run_locally
from phalanx.model.facts.presets import PRESETS
from phalanx.observe.event_log import follow, read_events
from phalanx.observe.events import Event
from phalanx.run.directory.paths import (
    RunDirectory,
    RunDirectoryError,
    RunResult,
    committed_steps,
    is_published,
    locate_checkpoints,
    read_resolved,
)
from phalanx.run.factory import FactoryError, factory_name
from phalanx.run.fields import RunFileError
from phalanx.run.read import read_run
from phalanx.run.rules import check
from phalanx.run.spec import ModelSpec, RunSpec
from phalanx.train.lifecycle.ending import Ending, RunFailedError
from phalanx.train.start.open_run import OpenRun
from phalanx.train.start.origins import child_run
from phalanx.train.start.prepare import prepare_run

if TYPE_CHECKING:
    from torch import Tensor

    from phalanx.model.custom import CustomModel

IN_PYTHON = Path("<RunSpec>")
"""Stands for the run file in messages about a run that was described in Python."""


class RunStoppedError(RuntimeError):
    """A run was stopped (Ctrl-C, SIGTERM) and has saved; ``Run.resume`` continues from there."""


@dataclass(frozen=True)
class Run:
    """A run directory."""

    path: Path
    """The directory."""

    @property
    def spec(self) -> RunSpec:
        """The resolved run: every field with its value."""
        return read_resolved(RunDirectory(self.path))

    @property
    def result(self) -> RunResult | None:
        """The result; ``None`` while the run is not complete."""
        return RunDirectory(self.path).finished_result()

    @property
    def saved_steps(self) -> list[int]:
        """The steps with a committed checkpoint, oldest first."""
        return RunDirectory(self.path).committed_steps()

    def events(self) -> Iterator[Event]:
        """Yield the run's events over all of its starts, oldest first: steps, evaluations, saves, restores, recoveries."""
        return read_events(RunDirectory(self.path).events)

    def resume(self, *, on_event: Callable[[Event], None] | None = None) -> RunResult:
        """Resume from the newest good checkpoint, as ``train_run`` does, and return the result. A complete run
        returns its result again, without training.
        """
        spec = dataclasses.replace(self.spec, run_dir=str(self.path))
        return train_run(spec, on_event=on_event)

    def child(self, *overrides: str, step: int | None = None) -> RunSpec:
        """Return the run that continues from this one's checkpoint of ``step`` (``None``: the newest) with other values from there on.

        ``overrides`` are as in ``read_run_file``, such as ``"train.steps=400"``. Give it to ``train_run``; it has a directory of its own.
        Raises ``RunDirectoryError`` where there is no such checkpoint, and ``RunFileError``.
        """
        return child_run(self.path, step, overrides)


def open_run(path: Path | str) -> Run:
    """Return the run in a directory. Raises ``RunDirectoryError`` if there is none."""
    run = Run(Path(path))
    _ = run.spec
    return run


def read_run_file(path: Path | str, *overrides: str) -> RunSpec:
    """Return the run that a TOML file describes, with ``section.field=value`` overrides, as ``phalanx train --set`` takes them.

    Raises ``RunFileError``, which lists every mistake with what is allowed.
    """
    return read_run(Path(path), PRESETS, overrides)


def train_run(
    spec: RunSpec | Path | str,
    *,
    model: Callable[[ModelSpec], CustomModel] | str | None = None,
    on_event: Callable[[Event], None] | None = None,
) -> RunResult:
    """Train a run to its last step on this machine, and return its result.

    Called again after a crash or a stop, it resumes from the newest good checkpoint, on as many ranks as there are then. The
    weights at the end are the same. With ``fleet.nodes`` the ranks are a fleet that recovers in place.

    Args:
        spec: A run, or the path of a run file.
        model: A model of your own (``phalanx.CustomModel``): a class or function at module level that makes it from
            ``spec.model``, or its name ``"package.module:name"``. It takes the place of ``model.factory``.
        on_event: Called in this process with each event of this start of the run, as it comes. If it raises, the run saves
            and stops, and the exception is raised here.

    Raises:
        RunFileError: The run cannot be; all mistakes are listed.
        FactoryError: The ranks could not import ``model``.
        CustomModelError: ``model`` cannot be built, or would not be trained correctly. (A fleet raises ``RunFailedError``.)
        DataError: The dataset is missing or damaged.
        RunDirectoryError: The run directory is in use, or belongs to another run.
        RunFailedError: A rank failed.
        RunStoppedError: The run was stopped by a signal.
    """
    path = IN_PYTHON if isinstance(spec, RunSpec) else Path(spec)
    spec = spec if isinstance(spec, RunSpec) else read_run_file(spec)
    if model is not None:
        # The digest is of the source of the model before; preparing the run takes that of this one.
        own = dataclasses.replace(spec.model, factory=factory_name(model), factory_sha256="")
        spec = dataclasses.replace(spec, model=own)
    if spec.fleet.nodes:
        ranks = spec.fleet.nodes * spec.fleet.workers_per_node
        spec = dataclasses.replace(spec, parallel=dataclasses.replace(spec.parallel, ranks=ranks))
    problems = check(spec)
    if problems:
        raise RunFileError(path, problems)
    done = RunDirectory(Path(spec.run_dir)).complete_result(spec) if spec.run_dir else None
    run = prepare_run(spec, path, lambda _label, _done, _total: None)
    try:
        if done is not None:
            return done
        ending = _launch(run, path, on_event)
    finally:
        os.close(run.lock_fd)
    return _result(run, ending)


def _launch(run: OpenRun, path: Path, on_event: Callable[[Event], None] | None) -> Ending:
    """Train a prepared run on this machine, as a fleet if it has nodes, and return how it ended.

    Events of this attempt, and of later ones that a fleet makes meanwhile, go to ``on_event``. If it raises, the run
    saves and stops, and the error is raised with a note.
    """

    def while_running(ended: Callable[[], bool]) -> None:
        """Pass the events of this attempt to ``on_event``, if any, until ``ended()`` is true. An error from it gets a
        note and is raised again.
        """
        if on_event is None:
            return
        run.directory.events.touch()
        for event in follow(run.directory.events, ended):
            if event.attempt >= run.attempt:
                try:
                    on_event(event)
                except BaseException as error:
                    error.add_note(
                        f"raised by on_event; the run saves and stops; to resume: {_resuming(run)}"
                    )
                    raise

    fleet = run.spec.fleet
    if fleet.nodes:
        return run_fleet(run, LocalFleet(fleet.nodes, fleet.spares), while_running)
    return run_locally(run, ranks_on_this_machine(run.spec, path), while_running)


def _result(run: OpenRun, ending: Ending) -> RunResult:
    """Return the result of a finished run.

    Raises RunStoppedError for a stopped one; for a failed one FactoryError, CustomModelError, or RunFailedError
    with the remedy.
    """
    if ending.status == "stopped":
        raise RunStoppedError(f"stopped; to resume: {_resuming(run)}")
    result = run.directory.finished_result()
    if ending.status == "finished" and result is not None:
        return result
    if ending.kind == FactoryError.__name__:
        raise FactoryError(ending.message)
    if ending.kind == "CustomModelError":
        # Here, since it imports torch, which otherwise only the ranks need.
        from phalanx.model.custom import CustomModelError

        raise CustomModelError(ending.message)
    who = "" if ending.failed_rank is None else f"rank {ending.failed_rank} "
    saved = run.directory.committed_steps()
    remedy = (
        f"to resume from step {saved[-1]}: {_resuming(run)}"
        if saved
        else "nothing has been saved: remove the cause, then train again"
    )
    raise RunFailedError(f"{who}{ending.message}; {remedy}", remedy)


def _resuming(run: OpenRun) -> str:
    """Return the Python expression that resumes a run."""
    return f"phalanx.open_run({str(run.directory.path)!r}).resume()"


# Weights: as a state dict, and as a hash. PyTorch is imported where tensors are made, since training from Python needs it in
# the ranks alone.


def load_weights(place: Path | str, step: int | None = None) -> dict[str, Tensor]:
    """Return the weights of a checkpoint as a state dict: whole tensors on the CPU, in the format of the master weights (fp32).

    The names are those of the module: of a model of your own, ``model.load_state_dict(load_weights(...))`` takes them.

    Args:
        place: A run directory, its folder of checkpoints, one checkpoint, or a folder of Hugging Face.
        step: ``None``: the newest committed one, even if it is damaged, or that of the one checkpoint.

    Raises:
        RunDirectoryError: There is no such checkpoint, or ``place`` is that of another step.
        CheckpointError: It is damaged. An older step is not tried.
    """
    import torch

    from phalanx.checkpoint.committed.restore import Shard, restore, torch_dtype

    tier, step = _checkpoint(place, step)
    boxes = {entry.box.name: entry.box for entry in tier.boxes(step) if entry.box.name.startswith(WEIGHTS)}
    shards = [
        Shard(
            full_box(name, box.dtype, box.global_shape),
            torch.empty(box.global_shape, dtype=torch_dtype(box.dtype)),
        )
        for name, box in sorted(boxes.items())
    ]
    restore(tier, step, shards)
    return {shard.box.name.removeprefix(WEIGHTS): shard.tensor for shard in shards}


def weights_sha256(place: Path | str, step: int | None = None) -> str:
    """Return the SHA-256 (hex) over all weights of a checkpoint, from the bytes on disk: the hash that training
    reports.

    ``place``, ``step`` and the errors are as for ``load_weights``.
    """
    tier, step = _checkpoint(place, step)
    return digest_checkpoint(tier, step)


def _checkpoint(place: Path | str, step: int | None) -> tuple[ReadableTier, int]:
    """Return the tier and step of a checkpoint: ``step``, or the newest; of a published model step 0 by default.

    Raises RunDirectoryError if it is not there.
    """
    if is_published(Path(place)):
        from phalanx.checkpoint.interop.huggingface.stored_folder import FolderTier

        if step:
            raise RunDirectoryError(
                f"there is no step {step} in {place}, a published model: leave the step out"
            )
        return FolderTier(Path(place)), 0
    root, chosen = locate_checkpoints(Path(place), step)
    steps = committed_steps(root) if root.is_dir() else []
    if not steps:
        raise RunDirectoryError(f"there is no committed checkpoint in {place}")
    if chosen is not None and chosen not in steps:
        raise RunDirectoryError(f"there is no step {chosen} in {place}; there are {steps}")
    return DiskTier(root), steps[-1] if chosen is None else chosen

"""Describes a child run: one that goes on from a checkpoint of another run, with other values of some fields from there on.

So a run is made longer, or gets another learning rate or batch size, without losing the optimizer's state or its place in the
data. The parent stays as it is; the child has a directory and an identity of its own and shares the past by reference.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from phalanx.checkpoint.format.errors import CheckpointError
from phalanx.checkpoint.tiers.disk import DiskTier
from phalanx.run.directory.paths import (
    RunDirectory,
    RunDirectoryError,
    committed_steps,
    read_resolved,
    step_folder,
)
from phalanx.run.identity import differences
from phalanx.run.problems import Problem, RunFileError
from phalanx.run.read import override
from phalanx.run.spec import RunSpec
from phalanx.train.step.learning_rate import multiplier

_MUCH_HIGHER = 2.0
"""Rise of the learning rate from which its cause and a remedy are named."""


def child_run(parent: Path, step: int | None, overrides: Sequence[str]) -> RunSpec:
    """The run that goes on from step ``step`` of the run directory ``parent``, or from its newest whole checkpoint.

    Whether the fields of ``overrides`` may differ is checked when it is prepared (``train/start/checks.py``).

    Raises:
        RunDirectoryError: It is no run directory, or has no such checkpoint.
        RunFileError: An override is wrong.
    """
    directory = RunDirectory(parent)
    for given in overrides:
        if given.startswith("checkpoint.init_"):
            raise RunFileError(
                directory.run_file,
                [Problem(given.partition("=")[0], "--from says it", "leave out one of the two")],
            )
    spec = read_resolved(directory)
    steps = committed_steps(directory.checkpoints) if directory.checkpoints.is_dir() else []
    if not steps:
        raise RunDirectoryError(f"{parent} has saved no checkpoint yet, so there is nothing to go on from")
    if step is None:
        step = _newest_whole(DiskTier(directory.checkpoints), steps)
    if step not in steps:
        there = ", ".join(map(str, steps))
        raise RunDirectoryError(
            f"{parent} has no checkpoint of step {step}; there are {there}. How many are kept: checkpoint.keep_last, "
            "checkpoint.keep_every"
        )
    start = str(step_folder(directory.checkpoints.resolve(), step))
    own = ['run_dir=""', f"checkpoint.init_from={json.dumps(start)}", 'checkpoint.init_with="training"']
    child = override(spec, [*own, *overrides], directory.run_file)
    if child.run_dir and Path(child.run_dir).resolve() == parent.resolve():
        problem = Problem(
            "run_dir",
            f"{child.run_dir} is the parent's, which stays as it is",
            "leave it out, or name another",
        )
        raise RunFileError(directory.run_file, [problem])
    if child.train.steps <= step:
        problem = Problem(
            "train.steps",
            f"{child.train.steps} steps are done at step {step}, so there is nothing left to train",
            f"--set train.steps=N with more than {step}, or an earlier step: --from STEP",
        )
        raise RunFileError(directory.run_file, [problem])
    return child


def _newest_whole(tier: DiskTier, steps: Sequence[int]) -> int:
    """The newest of ``steps`` whose files are all there; a damaged byte is found when it is read."""
    problem: CheckpointError | None = None
    for step in reversed(steps):
        try:
            tier.require_files(step)
        except CheckpointError as error:
            problem = problem or error
        else:
            return step
    raise RunDirectoryError(f"no checkpoint in {tier.root} is whole: {problem}") from problem


def changes_from_parent(parent: RunSpec, child: RunSpec, step: int) -> Iterator[str]:
    """Sentences on what is another than in the parent after ``step``: fields, and the learning rate if it jumps."""
    for line in differences(parent, child):
        if not line.startswith("checkpoint.init_"):
            yield line.replace(" != ", " -> ")
    before, after = (
        spec.optimizer.lr * multiplier(spec.schedule, step + 1, spec.train.steps) for spec in (parent, child)
    )
    if before == after:
        return
    ended = step >= parent.train.steps
    text = f"learning rate of step {step + 1}: {before:.4g}{f', as in step {step}' if ended else ''} -> {after:.4g}"
    if after >= _MUCH_HIGHER * before > 0:
        text += (
            f", {after / before:.3g} times as high: the parent's schedule has come down, and the model has to be cooled again. A lower "
            "optimizer.lr, or --from a step before the parent's decay, avoids the jump"
        )
    yield text

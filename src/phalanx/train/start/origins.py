"""Origins of a run: another run's checkpoint, an imported model, or an earlier version of its dataset.

A child run resumes from a checkpoint of another run, with other values of some fields from there on. So a run gets more steps, another
learning rate or another batch size without losing the optimizer's state or its place in the data. The parent is not changed. The child
has a directory and an identity of its own and shares the past by reference.
"""

from __future__ import annotations

import glob
import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from phalanx.checkpoint.format.errors import CheckpointError
from phalanx.checkpoint.tiers.disk import DiskTier
from phalanx.data.tokenizers.published import TOKENIZER_FILE
from phalanx.run.directory.files import files_below
from phalanx.run.directory.paths import (
    RunDirectory,
    RunDirectoryError,
    committed_steps,
    read_resolved,
    step_folder,
)
from phalanx.run.fields import Problem, RunFileError
from phalanx.run.identity import differences, read_unchanged
from phalanx.run.read import override, record_of
from phalanx.run.spec import RunSpec
from phalanx.train.start.open_run import OpenRun, holds_steps
from phalanx.train.step.learning_rate import multiplier

_MUCH_HIGHER = 2.0
"""Rise of the learning rate from which its cause and a remedy are named."""


def child_run(parent: Path, step: int | None, overrides: Sequence[str]) -> RunSpec:
    """Return the run that continues from step ``step`` of the run directory ``parent``, or from its newest complete
    checkpoint, with ``overrides``. Its ``run_dir`` is empty unless given.

    Which fields may differ is checked when it is prepared (``train/start/checks.py``). Raises RunDirectoryError if
    ``parent`` is no run directory, its run file was changed, or it has no such checkpoint. Raises RunFileError for a
    wrong override, the parent's directory, or no step left.
    """
    directory = RunDirectory(parent)
    for setting in overrides:
        if setting.startswith("checkpoint.init_"):
            raise RunFileError(
                directory.run_file,
                [Problem(setting.partition("=")[0], "--from sets it", "leave out one of the two")],
            )
    spec = read_unchanged(directory)
    steps = committed_steps(directory.checkpoints) if directory.checkpoints.is_dir() else []
    if not steps:
        raise RunDirectoryError(f"{parent} has saved no checkpoint yet, so there is nothing to continue from")
    if step is None:
        step = _newest_whole(DiskTier(directory.checkpoints), steps)
    if step not in steps:
        there = ", ".join(map(str, steps))
        raise RunDirectoryError(
            f"{parent} has no checkpoint of step {step}; there are {there}. How many are kept: checkpoint.keep_last, "
            "checkpoint.keep_every"
        )
    start = str(step_folder(directory.checkpoints.resolve(), step))
    own = [
        'run_dir=""',
        f"checkpoint.init_from={json.dumps(start, ensure_ascii=False)}",
        'checkpoint.init_with="training"',
    ]
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
    """Return the newest of ``steps`` whose files all exist; their bytes are not checked. Raises ``RunDirectoryError``
    with the newest one's problem if there is none.
    """
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
    """Yield sentences on what differs from the parent after ``step``: fields, and the next step's learning rate if it
    differs, with a remedy if it is much higher.
    """
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


# Continued pretraining: a run that starts from the weights of an imported model, on the user's own text.
#
# Two paths determine four parts of a run file: the model's shape, its weights, its tokenizer, and the text. Without a run file,
# the other fields get values that do not destroy a trained model in its first steps.


LEARNING_RATE, SEQ_LEN = 1e-5, 1024
"""For a run that has no run file. The rate is a tenth or less of what models are pretrained with."""


def fields_from_model(model: Path, data: Path, *, bare: bool) -> list[str]:
    """Return the ``section.field=value`` overrides of a run that trains ``model``, an imported model or a run
    directory, on ``data``.

    ``data`` is a prepared dataset, or text, which is then prepared with the model's tokenizer. ``bare``: there is no
    run file, so name, learning rate and sequence length are given too. Raises RunDirectoryError if ``model`` is no
    such directory, or has no tokenizer for the text.
    """
    return [
        f"{field}={json.dumps(value, ensure_ascii=False)}"
        for field, value in _fields(RunDirectory(model), data, bare)
    ]


def _fields(model: RunDirectory, data: Path, bare: bool) -> Iterator[tuple[str, object]]:
    """Yield the fields of a run that trains ``model`` further on ``data``; with ``bare``, also name, rate and length. Raises
    ``RunDirectoryError``."""
    if not model.run_file.is_file():
        hub = (model.path / "config.json").is_file()
        remedy = f"phalanx import {model.path}" if hub else "phalanx import FOLDER --out DIR makes one"
        raise RunDirectoryError(f"{model.path} is no imported model and no run directory: {remedy}")
    name = model.path.resolve().name
    yield "model.preset", str(model.path)
    yield "checkpoint.init_from", str(model.path)
    if (data / "index.json").is_file():
        yield "data.path", str(data)
    else:
        yield from _text_of(data, model, name)
    if bare:
        yield "name", f"{name}-further"
        yield "optimizer.lr", LEARNING_RATE
        yield "train.seq_len", SEQ_LEN


def _text_of(data: Path, model: RunDirectory, name: str) -> Iterator[tuple[str, object]]:
    """Yield the fields that prepare the text ``data`` with the model's tokenizer. The dataset's folder is named by a
    hash of paths, sizes and times, so that changed text is another dataset.

    Raises ``RunDirectoryError`` if there is no text or no tokenizer.
    """
    if not data.exists():
        raise RunDirectoryError(f"there is nothing at {data}: give a prepared dataset, or text to prepare")
    tokenizer = model.tokenizer / TOKENIZER_FILE
    if not tokenizer.is_file():
        raise RunDirectoryError(
            f"{model.path} has no tokenizer to prepare {data} with; put a tokenizer.json into {model.tokenizer}, or give a dataset "
            "that was prepared with the model's"
        )
    # Another text, or another model, is another folder; files that were added or written again are another text.
    files = sorted(path for path in files_below(data) if path.is_file()) if data.is_dir() else [data]
    stamps = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    mark = hashlib.sha256(f"{data.resolve()}\n{model.path.resolve()}\n{stamps}".encode()).hexdigest()[:8]
    yield "data.path", f".cache/data/{data.resolve().stem}-for-{name}-{mark}"
    yield "data.corpus", [str(data)]
    yield "data.tokenizer", str(tokenizer)


# A note for a run file that now begins a second run, because its dataset was prepared again since.
#
# A run's identity is its run file and its data's fingerprint. So other tokens are another run, in a directory of its own, which
# begins at step 0. That is right, but may surprise a user who only packed a dataset again. So the note has the way to resume
# the old run.


_ASKED_FOR_BY_DATASETS = ("train.document_mask", "train.targets_within_documents")
"""Fields whose default comes from the dataset."""


def notes_of_earlier_data(run: OpenRun) -> list[str]:
    """Return a sentence for each unfinished run beside this one that has the same run file but earlier data at the same
    address. Empty for a run with a ``run_dir`` or a saved step.
    """
    if run.spec.run_dir or holds_steps(run.directory):
        return []
    fingerprint = str(run.directory.read_record()["data_fingerprint"])
    pattern = f"{glob.escape(run.spec.name)}-*"
    others = sorted(path for path in run.directory.path.parent.glob(pattern) if path != run.directory.path)
    return [note for path in others for note in _notes(run.spec, fingerprint, RunDirectory(path))]


def _notes(spec: RunSpec, fingerprint: str, other: RunDirectory) -> Iterator[str]:
    """Yield a sentence if ``other`` is an unfinished run with saved steps of the same run file, whose data were other
    tokens or the same tokens packed otherwise. Unreadable directories are skipped.
    """
    try:
        if not holds_steps(other) or other.result.exists():
            return
        record, before = other.read_record(), read_resolved(other)
        step = max(other.committed_steps(), default=0)
    except (RunDirectoryError, OSError):
        return  # a folder that is no run, or is not readable
    changed = [line.partition(":")[0] for line in differences(before, spec)]
    same_place = all(record.get(name) == value for name, value in record_of(spec.data).items())
    if not same_place or not set(changed) <= set(_ASKED_FOR_BY_DATASETS):
        return
    recorded = str(record.get("data_fingerprint", fingerprint))
    if recorded != fingerprint:
        place = ", ".join([source.path for source in spec.data.sources] or [spec.data.path])
        yield (
            f"{other.path}, at step {step:,}, is of this run file, on what {place} contained before ({recorded[:12]}, now {fingerprint[:12]}): the dataset "
            "was prepared again since, so that this is another run and begins at step 0; to resume that one, put its dataset back there"
        )
    elif changed:
        values = " ".join(f"--set {field}={_value(before, field)}" for field in changed)
        yield (
            f"{other.path}, at step {step:,}, is of this run file on the same tokens, before they were packed again: datasets set "
            f"{' and '.join(changed)} since, so that this is another run and begins at step 0; {values} resumes that one"
        )


def _value(spec: RunSpec, field: str) -> str:
    section, _, name = field.partition(".")
    return str(getattr(getattr(spec, section), name)).lower()

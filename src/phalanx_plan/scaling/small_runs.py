"""Reads finished runs as points of a scaling law, and refuses runs that are not of one kind.

A law joins runs that differ in size and tokens alone: the same text, tokenizer, length of sequences, text that is held out, and kind of
model. Whether each was trained well (learning rate, schedule to its end) shows in no field; a run that was not pulls the law.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from phalanx.model.facts.shape import count
from phalanx.run.directory.paths import RunDirectory, RunDirectoryError, read_resolved
from phalanx.run.kinds.whole_model import resolve
from phalanx.run.spec import RunSpec
from phalanx_plan.scaling.fit import FitError, SmallRun


def read_runs(places: Sequence[Path]) -> tuple[SmallRun, ...]:
    """The runs in these directories. Raises ``FitError`` for one that is not finished, not of the others' kind, or no run."""
    if len({place.resolve() for place in places}) < len(places):
        raise FitError("--fit: a run directory is given twice")
    runs, kinds = [], []
    for place in places:
        directory = RunDirectory(place)
        try:
            spec = read_resolved(directory)
        except RunDirectoryError as error:
            raise FitError(f"--fit: {error}") from error
        runs.append(_small_run(place, directory, spec))
        kinds.append(_kind(spec, str(directory.read_record().get("data_fingerprint", ""))))
    for place, kind in zip(places, kinds, strict=True):
        for name, value in kind.items():
            if value != kinds[0][name]:
                raise FitError(
                    f"{place} and {places[0]} differ in {name} ({value} and {kinds[0][name]}): a law is of runs that differ in "
                    "size and tokens alone; leave one of them out"
                )
    return tuple(runs)


def size_of(spec: RunSpec) -> int:
    """The size that laws speak of: parameters that a token meets, embedding included."""
    return count(resolve(spec.model, spec.data.vocab_size), spec.train.seq_len).active_parameters


def _small_run(place: Path, directory: RunDirectory, spec: RunSpec) -> SmallRun:
    result = directory.finished_result()
    if result is None:
        raise FitError(
            f"{place} is not finished: train it to its end (phalanx train {place}), or leave it out"
        )
    if result.held_out_loss is None:
        raise FitError(f"{place} has no held-out loss: hold out more text (data.held_out), or leave it out")
    return SmallRun(str(place), float(size_of(spec)), float(result.tokens), result.held_out_loss)


def _kind(spec: RunSpec, fingerprint: str) -> dict[str, object]:
    """The properties that runs of one law have in common."""
    moe = spec.model.moe
    return {
        "the data (its fingerprint)": fingerprint[:12],
        "model.vocab_size": spec.model.vocab_size,
        "train.seq_len": spec.train.seq_len,
        "evaluation": asdict(spec.evaluation) | {"every_steps": None},
        "model.moe (experts, per_token)": None if moe is None else (moe.experts, moe.per_token),
        "schedule.kind": spec.schedule.kind,
        "optimizer.name": spec.optimizer.name,
    }

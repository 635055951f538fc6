"""The lineage of a run: which checkpoint of which run its state came from, and which fields may differ from there on.

A *child run* takes a whole state over from a checkpoint of its parent: weights, optimizer state, number of steps and place
in the data (``checkpoint.init_with = "training"``). Fields that act step by step, such as the learning rate, the batch size or
the number of steps, may have other values from that step on. Fields that the state itself was made with may not: with another
one it could not be read, or would mean something else.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from phalanx.run.directory.paths import step_of
from phalanx.run.fields import Problem
from phalanx.run.identity import run_owned
from phalanx.run.rules import stages_of
from phalanx.run.spec import RunSpec

_FIXED = {
    "model": "the checkpoint holds the weights of the parent's model",
    "train.seq_len": "the place in the data is counted in sequences of the parent's length",
    "runtime.seed": "it orders the samples, so that the place in the data would be one in another order",
    "optimizer.name": "the checkpoint holds the state of the parent's optimizer",
    "optimizer.state": "the checkpoint holds the optimizer's moments in the parent's format",
    "optimizer.block_size": "the checkpoint holds the optimizer's statistics in the parent's blocks",
}
"""Fields, or sections, in which a child run may not differ, and why. ``data.path`` may name a copy of the same data."""
_OF_OPTIMIZER = ("optimizer.name", "optimizer.state", "optimizer.block_size")
"""Fields that are also fixed where only weights and optimizer state are taken over; shapes are compared tensor by tensor."""
_ANEW = 'start a run of its own from the weights: checkpoint.init_from, with init_with = "weights"'


@dataclass(frozen=True)
class Origin:
    """A checkpoint that a run began from."""

    run_dir: str
    """The directory of the run that saved it, the parent."""
    identity: str
    """The parent's identity; empty if it is not known, as of an imported model."""
    step: int
    """The parent's step."""
    weights_sha256: str
    """Hash of the weights at that step."""
    init_with: str
    """The part of the parent's state that was taken over; the values are those of ``checkpoint.init_with``."""

    def __str__(self) -> str:
        name = f" (identity {self.identity[:12]})" if self.identity else ""
        kept = {"weights": ", its weights alone", "optimizer": ", its weights and optimizer state"}
        return f"step {self.step} of {self.run_dir}{name}, weights {self.weights_sha256[:12]}{kept.get(self.init_with, '')}"


def read_lineage(record: Mapping[str, object]) -> list[Origin]:
    """The origins that a run directory's ``record.json`` lists, the oldest first and the run's own last."""
    try:
        return msgspec.convert(record.get("lineage", []), list[Origin])
    except msgspec.ValidationError:
        return []


def lineage_table(lineage: list[Origin]) -> list[dict[str, object]]:
    """The inverse of ``read_lineage``, for ``record.json``."""
    return [asdict(origin) for origin in lineage]


def reason_fixed(path: str) -> str | None:
    """Why a child run may not differ from its parent in the field ``path``; ``None`` if it may."""
    return next(
        (reason for fixed, reason in _FIXED.items() if path == fixed or path.startswith(f"{fixed}.")), None
    )


def taken_over_problems(parent: RunSpec, child: RunSpec) -> Iterator[Problem]:
    """The fields of ``child`` that keep it from taking over the parts in ``checkpoint.init_with`` from a checkpoint of ``parent``.

    Both runs are resolved.
    """
    parents, childs = run_owned(parent), run_owned(child)
    for path in sorted(parents.keys() | childs.keys()):
        reason = reason_fixed(path)
        if reason is None or parents.get(path) == childs.get(path):
            continue
        if child.checkpoint.init_with == "training" or path in _OF_OPTIMIZER:
            finding = f"{childs.get(path)!r} is not the parent's {parents.get(path)!r}: {reason}"
            yield Problem(path, finding, f"leave it as it is, or {_ANEW}")
    if child.checkpoint.init_with == "training":
        yield from _past_of_data(parent, child)


def _past_of_data(parent: RunSpec, child: RunSpec) -> Iterator[Problem]:
    """The fields by which the child would draw other samples from its sources before the checkpoint than the parent did.

    Stages that begin after it may be others, and sources may be added that have no weight before.
    """
    if not parent.data.sources and not child.data.sources:
        return
    if bool(parent.data.sources) != bool(child.data.sources):
        finding = "a dataset alone and a mixture have other orders, in which the place in the data would mean nothing"
        yield Problem("data.sources", finding, f"name the parent's data, or {_ANEW}")
        return
    if parent.train.batch_size != child.train.batch_size:
        finding = f"{child.train.batch_size} is not the parent's {parent.train.batch_size}, by which its samples were drawn from data.sources"
        yield Problem("train.batch_size", finding, f"leave it as it is, or {_ANEW}")
    step = step_of(Path(child.checkpoint.init_from)) or 0
    if _drawn_by(parent, step) != _drawn_by(child, step):
        finding = f"other samples would have been drawn in the first {step:,} steps, which are the parent's"
        remedy = f"change the weights of stages that begin at step {step:,} or later alone, or {_ANEW}"
        yield Problem("data.sources", finding, remedy)


def shares_past(parent: RunSpec, child: RunSpec, step: int) -> bool:
    """True if both runs draw the same samples in their first ``step`` steps, by their sources."""
    if not parent.data.sources and not child.data.sources:
        return True
    same_batches = parent.train.batch_size == child.train.batch_size
    return (
        bool(parent.data.sources) == bool(child.data.sources)
        and same_batches
        and _drawn_by(parent, step) == _drawn_by(child, step)
    )


def _drawn_by(spec: RunSpec, step: int) -> object:
    """All that decides what is drawn from sources in the first ``step`` steps."""
    stages = [stage for stage in stages_of(spec.data) if stage < step or stage == 0]
    used = {
        source.name: (source.weights[: len(stages)], source.use)
        for source in spec.data.sources
        if any(source.weights[: len(stages)])
    }
    return stages, used


def extending_command(run_dir: Path, step: int, changes: Mapping[str, object]) -> str | None:
    """The command that goes on from a run's checkpoint of ``step`` with ``changes`` from there on, by field.

    ``None`` if one of the fields is fixed, or cannot be written, so that there is no such command.
    """
    if (
        any(reason_fixed(path) or path.startswith("checkpoint.init_") for path in changes)
        or None in changes.values()
        or any(path.startswith("data.sources.") and path.endswith(".name") for path in changes)
    ):
        return None
    settings = [
        word
        for path, value in changes.items()
        for word in ("--set", f"{path}={json.dumps(value, ensure_ascii=False)}")
    ]
    return shlex.join(["phalanx", "train", str(run_dir), "--from", str(step), *settings])

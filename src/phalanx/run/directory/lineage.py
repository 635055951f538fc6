"""The lineage of a run: the checkpoint from which it began, and the fields that may change from there.

A *child run* continues from a complete checkpoint of its parent: weights, optimizer state, number of steps and position in the data
(``checkpoint.init_with = "training"``). Fields that act in each step, such as the learning rate, the batch size or the number of steps, may change
at that step. Fields on which the state depends may not: with other values, the state could not be read or would have another meaning.
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
"""Fields or sections in which a child run must equal its parent, with reasons. ``data.path`` may name a copy of the same data."""
_OF_OPTIMIZER = ("optimizer.name", "optimizer.state", "optimizer.block_size")
"""Fixed fields for runs that take over only weights and optimizer state. Shapes are compared tensor by tensor."""
_ANEW = 'start a run of its own from the weights: checkpoint.init_from, with init_with = "weights"'


@dataclass(frozen=True)
class Origin:
    """A checkpoint that a run began from."""

    run_dir: str
    """Directory of the parent, the run that saved it."""
    identity: str
    """The parent's identity; empty if unknown, as for an imported model."""
    step: int
    """The parent's step."""
    weights_sha256: str
    """Hash of the weights at that step."""
    init_with: str
    """The part of the parent's state that was taken over; the values are those of ``checkpoint.init_with``."""

    def __str__(self) -> str:
        name = f" (identity {self.identity[:12]})" if self.identity else ""
        scopes = {"weights": ", its weights alone", "optimizer": ", its weights and optimizer state"}
        return f"step {self.step} of {self.run_dir}{name}, weights {self.weights_sha256[:12]}{scopes.get(self.init_with, '')}"


def read_lineage(record: Mapping[str, object]) -> list[Origin]:
    """Return the origins in a run directory's ``record.json``, oldest first and the run's own last."""
    try:
        return msgspec.convert(record.get("lineage", []), list[Origin])
    except msgspec.ValidationError:
        return []


def lineage_table(lineage: list[Origin]) -> list[dict[str, object]]:
    """Return the origins for ``record.json``: the inverse of ``read_lineage``."""
    return [asdict(origin) for origin in lineage]


def reason_fixed(path: str) -> str | None:
    """Return the reason why a child run must equal its parent in the field ``path``; ``None`` if it may differ."""
    return next(
        (reason for fixed, reason in _FIXED.items() if path == fixed or path.startswith(f"{fixed}.")), None
    )


def taken_over_problems(parent: RunSpec, child: RunSpec) -> Iterator[Problem]:
    """Yield the fields of ``child`` that prevent it from taking over the state selected by ``checkpoint.init_with`` from ``parent``.

    Both runs are resolved.
    """
    old, new = run_owned(parent), run_owned(child)
    for path in sorted(old.keys() | new.keys()):
        reason = reason_fixed(path)
        if reason is None or old.get(path) == new.get(path):
            continue
        if child.checkpoint.init_with == "training" or path in _OF_OPTIMIZER:
            problem = f"{new.get(path)!r} is not the parent's {old.get(path)!r}: {reason}"
            yield Problem(path, problem, f"leave it as it is, or {_ANEW}")
    if child.checkpoint.init_with == "training":
        yield from _past_of_data(parent, child)


def _past_of_data(parent: RunSpec, child: RunSpec) -> Iterator[Problem]:
    """Yield the fields with which the child's samples before the checkpoint would differ from the parent's.

    Later stages may differ, and sources without a weight before may be added.
    """
    if not parent.data.sources and not child.data.sources:
        return
    if bool(parent.data.sources) != bool(child.data.sources):
        problem = "a dataset alone and a mixture have other orders, in which the place in the data would mean nothing"
        yield Problem("data.sources", problem, f"name the parent's data, or {_ANEW}")
        return
    if parent.train.batch_size != child.train.batch_size:
        problem = f"{child.train.batch_size} is not the parent's {parent.train.batch_size}, by which its samples were drawn from data.sources"
        yield Problem("train.batch_size", problem, f"leave it as it is, or {_ANEW}")
    step = step_of(Path(child.checkpoint.init_from)) or 0
    if _drawn_by(parent, step) != _drawn_by(child, step):
        problem = f"other samples would have been drawn in the first {step:,} steps, which are the parent's"
        remedy = f"change the weights of stages that begin at step {step:,} or later alone, or {_ANEW}"
        yield Problem("data.sources", problem, remedy)


def shares_past(parent: RunSpec, child: RunSpec, step: int) -> bool:
    """Return True if both runs draw the same samples from their sources in the first ``step`` steps."""
    if not parent.data.sources and not child.data.sources:
        return True
    same_batches = parent.train.batch_size == child.train.batch_size
    return (
        bool(parent.data.sources) == bool(child.data.sources)
        and same_batches
        and _drawn_by(parent, step) == _drawn_by(child, step)
    )


def _drawn_by(spec: RunSpec, step: int) -> object:
    """Return the settings that determine the draws from sources in the first ``step`` steps."""
    stages = [start for start in stages_of(spec.data) if start < step or start == 0]
    used = {
        source.name: (source.weights[: len(stages)], source.use)
        for source in spec.data.sources
        if any(source.weights[: len(stages)])
    }
    return stages, used


def extending_command(run_dir: Path, step: int, values: Mapping[str, object]) -> str | None:
    """Return the command that continues from a run's checkpoint of ``step`` with new ``values`` by field.

    ``None`` if a field is fixed or cannot be given on the command line.
    """
    if (
        any(reason_fixed(path) or path.startswith("checkpoint.init_") for path in values)
        or None in values.values()
        or any(path.startswith("data.sources.") and path.endswith(".name") for path in values)
    ):
        return None
    changes = [
        word
        for path, value in values.items()
        for word in ("--set", f"{path}={json.dumps(value, ensure_ascii=False)}")
    ]
    return shlex.join(["phalanx", "train", str(run_dir), "--from", str(step), *changes])

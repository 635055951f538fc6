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

from phalanx.run.identity import run_owned
from phalanx.run.problems import Problem
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
"""Those that also hold where only weights and optimizer state are taken over; shapes are compared tensor by tensor."""
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
    return next((why for fixed, why in _FIXED.items() if path == fixed or path.startswith(f"{fixed}.")), None)


def taken_over_problems(parent: RunSpec, child: RunSpec) -> Iterator[Problem]:
    """The fields of ``child`` that keep it from taking over what ``checkpoint.init_with`` says from a checkpoint of ``parent``.

    Both runs are resolved.
    """
    held, wanted = run_owned(parent), run_owned(child)
    for path in sorted(held.keys() | wanted.keys()):
        why = reason_fixed(path)
        if why is None or held.get(path) == wanted.get(path):
            continue
        if child.checkpoint.init_with == "training" or path in _OF_OPTIMIZER:
            found = f"{wanted.get(path)!r} is not the parent's {held.get(path)!r}: {why}"
            yield Problem(path, found, f"leave it as it is, or {_ANEW}")


def extending_command(run_dir: Path, step: int, wanted: Mapping[str, object]) -> str | None:
    """The command that goes on from a run's checkpoint of ``step`` with the values ``wanted`` from there on, by field.

    ``None`` if one of the fields is fixed, or cannot be written, so that there is no such command.
    """
    if (
        any(reason_fixed(path) or path.startswith("checkpoint.init_") for path in wanted)
        or None in wanted.values()
    ):
        return None
    changes = [word for path, value in wanted.items() for word in ("--set", f"{path}={json.dumps(value)}")]
    return shlex.join(["phalanx", "train", str(run_dir), "--from", str(step), *changes])

"""The summary of a run directory in a line: how far it is, its losses, and which run it goes on from."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from phalanx.checkpoint.tiers.store_standing import store_standing
from phalanx.run.directory.lineage import Origin, read_lineage
from phalanx.run.directory.paths import RunDirectory, read_resolved, read_small_json


@dataclass(frozen=True)
class RunSummary:
    """A run directory, as ``phalanx runs`` lists it."""

    path: str
    name: str
    steps: int
    """Steps after which the run is complete."""
    saved_step: int
    """Step of the newest checkpoint; 0 if there is none."""
    finished: bool
    loss: float | None
    """Training loss of the last step, in nats a token, once the run is complete."""
    held_out_loss: float | None
    weights_sha256: str
    """Hash of the final weights; empty while the run is not complete."""
    lineage: tuple[Origin, ...]
    """The checkpoints that the run descends from, the oldest first."""
    store: str = ""
    """What is in the run's store, and what is not yet; empty if it has none."""

    @property
    def state(self) -> str:
        """The run's progress, for people."""
        if self.finished:
            return "finished"
        return (
            f"saved step {self.saved_step} of {self.steps}"
            if self.saved_step
            else f"nothing saved yet of {self.steps} steps"
        )

    def to_json(self) -> dict[str, object]:
        """The fields as a JSON object."""
        return asdict(self)


def summarize(path: Path) -> RunSummary:
    """The summary of the run in the directory ``path``. Raises ``RunDirectoryError`` if there is none, ``OSError``."""
    directory = RunDirectory(path)
    spec, result = read_resolved(directory), directory.finished_result()
    standing = store_standing(spec, directory)
    return RunSummary(
        path=str(path),
        name=spec.name,
        steps=spec.train.steps,
        saved_step=max(directory.committed_steps(), default=0),
        finished=result is not None,
        loss=result.loss if result else None,
        held_out_loss=result.held_out_loss if result else None,
        weights_sha256=result.weights_sha256 if result else "",
        lineage=tuple(read_lineage(read_small_json(directory.record))),
        store="" if standing is None else str(standing),
    )

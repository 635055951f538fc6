"""``[checkpoint]``: what is saved when and where, and what a run starts from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from phalanx.run.fields import FLEET, LATER, NOT_NEGATIVE, POSITIVE, ValueRange


@dataclass(frozen=True)
class CheckpointSpec:
    """When checkpoints are saved, and how many are kept."""

    every_steps: Annotated[int, FLEET, NOT_NEGATIVE] = 50
    """Steps between checkpoints; the last step is always saved. 0 chooses the time between them while the run goes on, by how long a save
    holds training up and how often machines fail (Daly 2006)."""
    hours_between_failures: Annotated[float, FLEET, NOT_NEGATIVE] = 0.0
    """Mean time between failures of the whole run, for every_steps = 0; 0 takes 50,675 hours of a rank (Llama 3, arXiv 2407.21783)."""
    keep_last: Annotated[int, FLEET, POSITIVE] = 2
    """Number of newest checkpoints that are kept."""
    keep_every: Annotated[int, FLEET, NOT_NEGATIVE] = 0
    """Checkpoints at multiples of this step are never deleted; 0 means none."""
    timeout_s: Annotated[float, FLEET, ValueRange(above=0)] = 600.0
    """Seconds that the commit of a checkpoint waits for the files of all ranks."""
    store: Annotated[str, FLEET] = ""
    """URL of an object store (s3://, gs://, az://, file://) or path where checkpoints are copied in the background; a run whose disk is
    lost goes on from there. Empty means none."""
    store_every_steps: Annotated[int, FLEET, NOT_NEGATIVE] = 0
    """Saved steps divisible by this are copied, and the last one; 0 means all."""
    store_keep_last: Annotated[int, FLEET, POSITIVE] = 2
    """Number of newest checkpoints that are kept in the store."""
    store_keep_every: Annotated[int, FLEET, NOT_NEGATIVE] = 0
    """Copies at multiples of this step are never deleted; 0 means none."""
    store_mib_s: Annotated[float, FLEET, NOT_NEGATIVE] = 0.0
    """Upper limit of each machine's upload in MiB/s; 0 means none."""
    init_from: str = ""
    """A run directory, checkpoint or URL of an object store whose weights the run starts from; empty means fresh weights. Resolved to one
    checkpoint when the run is first started."""
    init_with: Annotated[Literal["weights", "optimizer", "training"], LATER] = "weights"
    """The part of init_from that is taken over: the "weights" alone; weights and "optimizer" state; or all of the "training", with the
    number of steps and the place in the data."""

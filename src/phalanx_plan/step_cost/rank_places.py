"""Kinds of ranks of a pipeline (places), for arrays of layouts: how much of the model the ranks of each kind have.

The places of a pipeline depend on few fields of a layout, and are looked up for all layouts at once (``phalanx_plan.workload.holdings``).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from phalanx.run.layout import SPLIT_BACKWARD
from phalanx_plan.workload.candidates import SCHEDULES, Candidates, Floats, Ints, distinct
from phalanx_plan.workload.holdings import PipelinePlaces, most_stages, places
from phalanx_plan.workload.stacks import TrainingJob


@dataclass(frozen=True)
class PlaceCounts:
    """One kind of rank of each candidate: how much of each of ``KINDS`` it has, in the candidates' axes."""

    counts: tuple[Floats, Floats, Floats, Floats]
    rank: Ints
    """Rank in the pipeline."""


@dataclass(frozen=True)
class PlaceTable:
    """The places of every candidate."""

    table: PipelinePlaces
    row: Ints
    """Row of each candidate in ``table``."""

    def __len__(self) -> int:
        return self.table.kinds

    def __getitem__(self, kind: int | Ints) -> PlaceCounts:
        """Return the ``kind``-th place of each candidate; an array gives each candidate its own, and broadcasts.

        Raises ``IndexError`` beyond the last.
        """
        table, row = self.table, self.row
        if not 0 <= np.max(kind) < table.kinds:
            raise IndexError(f"there are {table.kinds} places")
        place = row * table.kinds + kind
        dense, mixture, embedding, head = (column.take(place) for column in table.counts)
        return PlaceCounts((dense, mixture, embedding, head), table.rank.take(place))

    def each(self) -> tuple[Ints, Ints]:
        """Every place of every candidate of the last axis, as (candidate, kind); by kind."""
        number = self.table.number[self.row.ravel()]
        kind, candidate = np.nonzero(np.arange(len(self))[:, None] < number)
        return candidate, kind


def place_table(job: TrainingJob, candidates: Candidates) -> PlaceTable:
    """The kinds of ranks of all ``candidates``."""
    folded = np.logical_or.reduce([candidates.schedule == SCHEDULES.index(name) for name in SPLIT_BACKWARD])
    # Candidates with more stages than layers are not legal; they are looked up with one stage on a rank.
    enough = candidates.pipeline * candidates.stages_per_rank <= most_stages(job.workload, job.stack)
    per_rank = np.where(enough, candidates.stages_per_rank, 1)
    columns, row = distinct([candidates.pipeline, per_rank, folded.astype(np.int64)])
    pipelines = [
        (ranks, each, bool(turns)) for ranks, each, turns in zip(*(c.tolist() for c in columns), strict=True)
    ]
    wide = np.broadcast_to(row, (*row.shape[:-1], candidates.shape[-1]))
    return PlaceTable(places(job.workload, job.stack, pipelines), wide)

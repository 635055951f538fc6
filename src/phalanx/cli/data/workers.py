"""Who prepares a dataset in portions: processes of this machine, a cluster of Dask, Ray or Spark, or an array of Slurm's jobs."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import click

from phalanx.command.options import Option
from phalanx.data.errors import DataError
from phalanx.run.fields import POSITIVE
from phalanx.store.errors import StoreError

if TYPE_CHECKING:
    from phalanx.data.portions.executors.executor import Executor


@dataclass(frozen=True, kw_only=True)
class ChosenWorkers:
    """Workers of a preparation; with no option, there are as many processes as this machine has cores."""

    count: Annotated[
        int | None,
        POSITIVE,
        Option(
            "--workers",
            text="Processes of this machine, or with --slurm jobs.  [default: as many as the machine has cores]",
        ),
    ] = None
    dask: Annotated[str | None, Option(metavar="ADDRESS")] = None
    """Have it done by a Dask cluster: the address of its scheduler."""
    spark: Annotated[str | None, Option(metavar="MASTER")] = None
    """Or by a Spark cluster: spark://HOST:7077, yarn, local[8]."""
    ray: Annotated[str | None, Option(metavar="ADDRESS")] = None
    """Or by a Ray cluster: auto, HOST:6379, or local."""
    slurm: bool = False
    """Or by an array of --workers jobs of Slurm; --out, and paths that are read, must be seen by its nodes."""

    @property
    def is_chosen(self) -> bool:
        """True if any was named."""
        return self.count is not None or bool(self._clusters())

    def require_one_kind(self) -> None:
        """Raises ``click.UsageError`` for what does not go together."""
        clusters = self._clusters()
        if len(clusters) > 1:
            raise click.UsageError(f"--{clusters[0]} and --{clusters[1]} are two clusters; leave one out")
        if clusters and self.count and not self.slurm:
            raise click.UsageError(
                f"--workers are processes of this machine, or jobs of --slurm; with --{clusters[0]}, leave it out"
            )
        if self.slurm and self.count is None:
            raise click.UsageError("--slurm needs the number of jobs in its array: add --workers N")

    @contextmanager
    def executor(self) -> Iterator[Executor]:
        """The executor, which is closed at the end. Raises ``PreparationError``."""
        executor = self._executor()
        try:
            yield executor
        finally:
            executor.close()

    def _executor(self) -> Executor:
        # Each is loaded only where it is used.
        if self.dask:
            from phalanx.data.portions.executors.dask import DaskCluster

            return DaskCluster(self.dask)
        if self.spark:
            from phalanx.data.portions.executors.spark import SparkCluster

            return SparkCluster(self.spark)
        if self.ray:
            from phalanx.data.portions.executors.ray import RayCluster

            return RayCluster(self.ray)
        if self.slurm:
            from phalanx.data.portions.executors.slurm import SlurmArray

            return SlurmArray(self.count or 1)
        from phalanx.data.portions.executors.executor import InOrder
        from phalanx.data.portions.executors.processes import Processes

        workers = self.count or len(os.sched_getaffinity(0))
        return Processes(workers) if workers > 1 else InOrder()

    def _clusters(self) -> list[str]:
        named = (("dask", self.dask), ("spark", self.spark), ("ray", self.ray), ("slurm", self.slurm))
        return [name for name, given in named if given]


@contextmanager
def resumable() -> Iterator[None]:
    """Say, whatever ends a preparation, that the same command goes on from there."""
    try:
        yield
    except (DataError, StoreError):
        click.echo("what is done is kept: once that is mended, the same command goes on from there", err=True)
        raise
    except KeyboardInterrupt:
        click.echo("\nstopped; what is done is kept, and the same command goes on from there", err=True)
        sys.exit(130)

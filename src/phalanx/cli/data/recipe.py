"""``phalanx data prepare RECIPE.toml``, ``plan`` and ``work``: a dataset prepared in portions, by any number of workers."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import click

from phalanx.cli.data.report import PrepareProgress, lines_of_counts, report
from phalanx.cli.errors import explained
from phalanx.command import Argument, AsJson, FiniteRange, Heading, Option, command_options
from phalanx.command_help import Command
from phalanx.data.errors import DataError
from phalanx.data.portions.drive import (
    carry_out,
    place_plan,
    sealed_index,
    work_share,
)
from phalanx.data.portions.planning.plan import make_plan
from phalanx.data.portions.planning.recipe import read_recipe
from phalanx.data.portions.stages import Executor, InOrder, stages_of
from phalanx.data.portions.tasks import Workplace
from phalanx.data.preparing.prepare import PreparedDataset
from phalanx.run.fields import POSITIVE
from phalanx.store.store import StoreError

if TYPE_CHECKING:
    from click import Context


# Workers of a preparation: processes of this machine, a cluster of Dask, Ray or Spark, or an array of Slurm's jobs.


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
    """Use a Dask cluster: the address of its scheduler."""
    spark: Annotated[str | None, Option(metavar="MASTER")] = None
    """Use a Spark cluster: spark://HOST:7077, yarn, local[8]."""
    ray: Annotated[str | None, Option(metavar="ADDRESS")] = None
    """Use a Ray cluster: auto, HOST:6379, or local."""
    slurm: bool = False
    """Use an array of --workers jobs of Slurm; its nodes must see --out and all input paths."""

    @property
    def is_chosen(self) -> bool:
        """True if any option was given."""
        return self.count is not None or bool(self._clusters())

    def require_one_kind(self) -> None:
        """Raise ``click.UsageError`` for two clusters, ``--workers`` with a cluster other than Slurm, or Slurm
        without ``--workers``.
        """
        clusters = self._clusters()
        if len(clusters) > 1:
            raise click.UsageError(f"--{clusters[0]} and --{clusters[1]} are two clusters; leave one out")
        if clusters and self.count and not self.slurm:
            raise click.UsageError(
                f"--workers are processes of this machine, or jobs of --slurm; with --{clusters[0]}, leave it out"
            )
        if self.slurm and self.count is None:
            raise click.UsageError("--slurm needs the number of jobs in its array: add --workers N")

    def executor(self) -> Executor:
        """Open the executor of the chosen cluster; without one, processes of this machine, one for each core by
        default.

        A single process is this one. Raises ``PreparationError``.
        """
        from phalanx.data.portions import clusters

        if self.dask:
            return clusters.DaskCluster(self.dask)
        if self.spark:
            return clusters.SparkCluster(self.spark)
        if self.ray:
            return clusters.RayCluster(self.ray)
        if self.slurm:
            return clusters.SlurmArray(self.count or 1)
        workers = self.count or len(os.sched_getaffinity(0))
        return clusters.Processes(workers) if workers > 1 else InOrder()

    def _clusters(self) -> list[str]:
        options = (("dask", self.dask), ("spark", self.spark), ("ray", self.ray), ("slurm", self.slurm))
        return [name for name, value in options if value]


@contextmanager
def resumable() -> Iterator[None]:
    """Context that prints at a ``DataError``, ``StoreError`` or interruption that the same command resumes the
    preparation.

    An interruption exits with code 130; errors are raised again.
    """
    try:
        yield
    except (DataError, StoreError):
        click.echo(
            "finished work is kept: fix the error, then run the same command again to resume", err=True
        )
        raise
    except KeyboardInterrupt:
        click.echo("\nstopped; finished work is kept: run the same command again to resume", err=True)
        sys.exit(130)


_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
_RECIPE = click.argument("recipe", type=click.Path(path_type=Path))


class PrepareCommand(Command):
    """``phalanx data prepare``: with a recipe among its arguments it is ``recipe_command``, else itself."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: Context | None = None, **extra: object
    ) -> Context:
        """Return the context of ``recipe_command`` if an argument ends in ".toml", else of this command."""
        if any(arg.endswith(".toml") and not arg.startswith("-") for arg in args):
            return recipe_command.make_context(info_name, args, parent)
        return super().make_context(info_name, args, parent, **extra)


@dataclass(frozen=True, kw_only=True)
class RecipeOptions:
    recipe: Annotated[Path, Argument()]
    out: Annotated[str, Option(metavar="FOLDER_OR_URL"), Heading("Dataset")]
    """Target of the dataset: a folder, s3://, gs:// or az://."""
    workers: Annotated[ChosenWorkers, Heading("Workers")]
    as_json: AsJson = False


@click.command("prepare", cls=Command)
@command_options(RecipeOptions)
def recipe_command(options: RecipeOptions) -> None:
    """Prepare the dataset that RECIPE describes: plan it in portions, have each done once, and seal it.

    After any interruption (Ctrl-C, a kill, a full disk, a lost machine), run the same command again to resume
    it. The bytes of the dataset do not depend on the workers.

    \b
      phalanx data prepare recipe.toml --out data/web --workers 8
      phalanx data prepare recipe.toml --out s3://bucket/web
      phalanx data prepare recipe.toml --out s3://bucket/web --dask tcp://10.0.0.1:8786
      phalanx data prepare recipe.toml --out s3://bucket/web --spark spark://10.0.0.1:7077
      phalanx data prepare recipe.toml --out /shared/web --slurm --workers 16
    """
    options.workers.require_one_kind()
    with explained(DataError, StoreError):
        place = place_plan(read_recipe(options.recipe), options.recipe.parent, options.out)
        dataset = carried_out(place, options.workers, quiet=options.as_json)
    lines, facts = lines_of_counts(dataset.counts), {"counts": dataset.counts}
    report(options.out, dataset, lines, facts, by_recipe=True, as_json=options.as_json)


def carried_out(place: Workplace, workers: ChosenWorkers, *, quiet: bool) -> PreparedDataset:
    """Do the remaining work at a place with ``workers``, and print the progress unless ``quiet``; return the
    dataset.

    At an error or interruption, print that the same command resumes. Raises ``DataError`` and ``StoreError``.
    """
    with closing(workers.executor()) as executor, resumable(), PrepareProgress(quiet=quiet) as progress:
        return carry_out(place, executor, progress)


@click.command(
    "plan", short_help="Files, portions and stages of a recipe's dataset, before it is prepared.", cls=Command
)
@_RECIPE
@click.option("--out", metavar="FOLDER_OR_URL", help="Write the plan there, for `phalanx data work`.")
@_JSON
def plan_command(recipe: Path, out: str | None, as_json: bool) -> None:
    """Show the files, portions and stages of the dataset of RECIPE, without preparing it.

    \b
      phalanx data plan recipe.toml
      phalanx data plan recipe.toml --out s3://bucket/web     # and then, on any machines: phalanx data work s3://bucket/web --task 1/16
    """
    with explained(DataError, StoreError):
        description = read_recipe(recipe)
        plan = (
            make_plan(description, recipe.parent)[0]
            if out is None
            else place_plan(description, recipe.parent, out).plan
        )
    by_format: dict[str, int] = {}
    for form in plan.formats:
        by_format[str(form)] = by_format.get(str(form), 0) + 1
    facts = {
        "plan": plan.sha256,
        "files": len(plan.files),
        "bytes": plan.head["bytes"],
        "formats": by_format,
        "portions": len(plan.portions),
        "portion_bytes": plan.portion_bytes,
        "stages": {stage.name: stage.tasks for stage in stages_of(plan)},
        "out": out,
    }
    if as_json:
        click.echo(json.dumps(facts))
        return
    formats = ", ".join(f"{count:,} {name}" for name, count in sorted(by_format.items()))
    files, portions = len(plan.files), len(plan.portions)
    click.echo(f"{files:,} file{'s' * (files != 1)}, {int(plan.head['bytes']):,} bytes ({formats})")
    click.echo(f"{portions:,} portion{'s' * (portions != 1)} of about {plan.portion_bytes:,} bytes")
    click.echo("stages: " + ", ".join(f"{stage.name} ({stage.tasks:,})" for stage in stages_of(plan)))
    if out is not None:
        click.echo(f"written to {out}; next: phalanx data work {out} --task 1/1")


@click.command("work", short_help="One job's share of such a plan.", cls=Command)
@click.argument("plan", metavar="PLAN")
@click.option(
    "--task", required=True, metavar="I/N", help="This job's number and how many there are, from 1: 3/16."
)
@click.option(
    "--patience",
    "patience_s",
    type=FiniteRange(min=0.1),
    default=600.0,
    show_default=True,
    help="Seconds without any progress after which this job does the remaining work of others.",
)
def work_command(plan: str, task: str, patience_s: float) -> None:
    """Do one job's share of the plan at PLAN (the --out of `phalanx data plan`), as in an array of jobs.

    Every N-th portion is this job's. It waits for the others before a stage that needs theirs, and does the
    remaining work of jobs that have ended.

    \b
      phalanx data work /scratch/web --task 1/16
      sbatch --array=1-16 --wrap 'phalanx data work /scratch/web --task $SLURM_ARRAY_TASK_ID/$SLURM_ARRAY_TASK_COUNT'
    """
    number, slash, of = task.partition("/")
    if not (slash and number.isdecimal() and of.isdecimal() and 1 <= int(number) <= int(of)):
        raise click.UsageError(f"--task {task!r} is not I/N with I from 1 to N, such as 3/16")
    with explained(DataError, StoreError):
        place = Workplace(plan)
        with resumable(), PrepareProgress() as progress:
            work_share(place, int(number), int(of), progress, patience_s)
        index = sealed_index(place)
    click.echo(f"{plan}: sealed; fingerprint {index.fingerprint[:16]}" if index else f"{plan}: not sealed")

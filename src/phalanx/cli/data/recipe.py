"""``phalanx data prepare RECIPE.toml``, ``plan`` and ``work``: a dataset prepared in portions, by any number of workers."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from phalanx.cli.data.notices import lines_of_overlap, lines_of_turns
from phalanx.cli.data.workers import ChosenWorkers, resumable, worker_options
from phalanx.cli.errors import explained
from phalanx.data.errors import DataError
from phalanx.data.portions.drive import (
    OnStage,
    PreparedDataset,
    carry_out,
    place_plan,
    planned,
    sealed_index,
    work_share,
)
from phalanx.data.portions.planning.recipe import read_recipe
from phalanx.data.portions.stages import stages_of
from phalanx.data.portions.tasks import Workplace
from phalanx.store.errors import StoreError

if TYPE_CHECKING:
    from click import Context

_PAUSE_S = 1.0
_MUCH_PADDING = 0.01
_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
_RECIPE = click.argument("recipe", type=click.Path(path_type=Path))


class PrepareCommand(click.Command):
    """``phalanx data prepare``: with a recipe among its arguments it is ``recipe_command``, else itself."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: Context | None = None, **extra: object
    ) -> Context:
        if any(arg.endswith(".toml") and not arg.startswith("-") for arg in args):
            return recipe_command.make_context(info_name, args, parent)
        return super().make_context(info_name, args, parent, **extra)


@click.command("prepare")
@_RECIPE
@click.option(
    "--out",
    required=True,
    metavar="FOLDER_OR_URL",
    help="Where the dataset is to be: a folder, s3://, gs:// or az://.",
)
@worker_options
@_JSON
def recipe_command(
    recipe: Path,
    out: str,
    workers: int | None,
    dask: str | None,
    spark: str | None,
    ray: str | None,
    slurm: bool,
    as_json: bool,
) -> None:
    """Prepare the dataset that RECIPE describes: plan it in portions, have each done once, and seal it.

    Whatever ends it (Ctrl-C, a kill, a full disk, a lost machine), the same command goes on from there. The bytes of the dataset do not
    depend on the workers.

    \b
      phalanx data prepare recipe.toml --out data/web --workers 8
      phalanx data prepare recipe.toml --out s3://bucket/web
      phalanx data prepare recipe.toml --out s3://bucket/web --dask tcp://10.0.0.1:8786
      phalanx data prepare recipe.toml --out s3://bucket/web --spark spark://10.0.0.1:7077
      phalanx data prepare recipe.toml --out /shared/web --slurm --workers 16
    """
    chosen = ChosenWorkers(workers, dask, spark, ray, slurm)
    chosen.require_one_kind()
    with explained(DataError, StoreError):
        place = place_plan(read_recipe(recipe), recipe.parent, out)
        prepared = carried_out(place, chosen, quiet=as_json)
    report(out, prepared, as_json=as_json)


def carried_out(place: Workplace, workers: ChosenWorkers, *, quiet: bool) -> PreparedDataset:
    """Do what is not yet done at a place, and say how far it is unless ``quiet``. Raises ``DataError`` and ``StoreError``."""
    with workers.executor() as executor, resumable():
        return carry_out(place, executor, _progress(quiet))


@click.command("plan", short_help="What a recipe's dataset would be made of, and at what cost.")
@_RECIPE
@click.option("--out", metavar="FOLDER_OR_URL", help="Write the plan there, for `phalanx data work`.")
@_JSON
def plan_command(recipe: Path, out: str | None, as_json: bool) -> None:
    """Say what the dataset of RECIPE would be made of: files, portions, stages.

    \b
      phalanx data plan recipe.toml
      phalanx data plan recipe.toml --out s3://bucket/web     # and then, on any machines: phalanx data work s3://bucket/web --task 1/16
    """
    with explained(DataError, StoreError):
        wanted = read_recipe(recipe)
        plan = planned(wanted, recipe.parent) if out is None else place_plan(wanted, recipe.parent, out).plan
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


@click.command("work", short_help="One job's share of such a plan.")
@click.argument("plan", metavar="PLAN")
@click.option(
    "--task", required=True, metavar="I/N", help="This job's number and how many there are, from 1: 3/16."
)
@click.option(
    "--patience",
    "patience_s",
    type=click.FloatRange(min=0.1),
    default=600.0,
    show_default=True,
    help="Seconds without any progress after which what other jobs have left is done here.",
)
def work_command(plan: str, task: str, patience_s: float) -> None:
    """Do one job's share of the plan at PLAN (the --out of `phalanx data plan`), as in an array of jobs.

    Every N-th portion is this job's; it waits for the others before a stage that needs theirs, and does what jobs that are gone have left.

    \b
      phalanx data plan recipe.toml --out /scratch/web
      sbatch --array=1-16 --wrap 'phalanx data work /scratch/web --task $SLURM_ARRAY_TASK_ID/$SLURM_ARRAY_TASK_COUNT'
    """
    number, slash, of = task.partition("/")
    if not (slash and number.isdecimal() and of.isdecimal() and 1 <= int(number) <= int(of)):
        raise click.UsageError(f"--task {task!r} is not I/N with I from 1 to N, such as 3/16")
    with explained(DataError, StoreError):
        place = Workplace(plan)
        with resumable():
            work_share(place, int(number), int(of), _progress(False), patience_s)
        index = sealed_index(place)
    click.echo(f"{plan}: sealed; fingerprint {index.fingerprint[:16]}" if index else f"{plan}: not sealed")


def _progress(quiet: bool) -> OnStage:
    begun: dict[str, tuple[float, int]] = {}
    last = 0.0

    def show(stage: str, done: int, tasks: int) -> None:
        nonlocal last
        now = time.monotonic()
        start, at_start = begun.setdefault(stage, (now, done))
        if quiet or (done < tasks and now - last < _PAUSE_S):
            return
        last = now
        left = (now - start) / (done - at_start) * (tasks - done) if done > at_start else 0.0
        rest = f", {_duration(left)} left" if left >= 1 else ""
        click.echo(f"{stage}: {done:,} of {tasks:,}{rest}", err=True)

    return show


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return (
        f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
    )


def report(
    out: str, prepared: PreparedDataset, more: Mapping[str, object] | None = None, *, as_json: bool
) -> None:
    """Say what a prepared dataset holds, with ``more`` facts in JSON."""
    index = prepared.index
    facts = {
        "path": out,
        "reused": prepared.reused,
        "vocab_size": index.vocab_size,
        "train_tokens": index.train.tokens,
        "held_out_tokens": index.held_out.tokens,
        "held_out_in_training": prepared.held_out_in_training,
        "fingerprint": index.fingerprint,
        "padding": index.train.padding / max(1, index.train.tokens),
        "counts": prepared.counts,
        **(more or {}),
    }
    if as_json:
        click.echo(json.dumps(facts))
        return
    click.echo(f"{out}: {'was there already' if prepared.reused else 'written'}")
    read, kept = prepared.counts["documents read"], prepared.counts["documents kept"]
    click.echo(f"  {kept:,} of {read:,} documents kept")
    for name, count in sorted(prepared.counts.items()):
        if name.startswith("dropped: "):
            click.echo(f"    {name}: {count:,}")
    click.echo(f"  {index.train.tokens:,} tokens to train on, {index.held_out.tokens:,} held out")
    if index.packed_seq_len:
        few = (
            "; a portion has too few documents to fill them better: a larger output.portion_bytes, with another --out, helps"
            if index.train.padding > _MUCH_PADDING * index.train.tokens
            else ""
        )
        click.echo(
            f"  packed whole into records of {index.packed_seq_len:,} tokens, {facts['padding']:.3%} of them padding{few}"
        )
    for line in lines_of_overlap(prepared.held_out_in_training, index, 'output.hold_out_by = "text"'):
        click.echo(f"  {line}")
    for line in lines_of_turns(out, index):
        click.echo(f"  {line}")
    if not index.held_out.tokens:
        click.echo(
            "  nothing is held out, so there will be no held-out loss: raise output.held_out with another --out"
        )
    click.echo(f"  vocabulary {index.vocab_size:,}; fingerprint {index.fingerprint[:16]}")
